# SPDX-License-Identifier: Apache-2.0
"""Every command, wrongly used: one line on stderr, the right exit status, and every file as it was, to byte and inode.
tests/cli/test_bad_input.py has what `convpool optimize` refuses; here are the files that are no model, places where nothing can
be written, and the other commands."""

import os
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from convpool.cli.group import command, run
from tests.cli.test_bad_input import contents
from tests.support.models import graph
from tests.support.rewriting import PAIR

FILES = {
    "random.onnx": np.random.default_rng(1).bytes(5000), "ir_99.onnx": graph(PAIR, ir=99).SerializeToString(),
    "good.onnx": graph(PAIR).SerializeToString(), "no_pair.onnx": graph("y = Relu(x)").SerializeToString(),
    "long" * 70 + ".onnx": None,
}  # fmt: skip
NO_MODEL = "truncated, or not an ONNX model"
CASES = {
    "random bytes": ("optimize random.onnx", 2, NO_MODEL),
    "a newer IR version": ("optimize ir_99.onnx", 2, "ir_version 99 is higher"),
    "a name too long": (f"optimize {'long' * 70}.onnx", 2, "cannot be read; File name too long"),
    "a misspelt option": ("optimize good.onnx --lowerin auto", 2, "'--lowerin'. (Did you mean one of: '--lowering'"),
    "an option without its value": ("optimize good.onnx -o", 2, "'-o' requires an argument"),
    "output to a full device": ("optimize good.onnx -o /dev/full", 2, "/dev/full: cannot be written; No space left"),
    "output to a file system of the kernel": ("optimize good.onnx -o /proc/out.onnx", 2, "/proc/out.onnx: cannot be written"),
    "output among open files": ("optimize good.onnx -o /proc/self/fd/none", 2, "in a folder of devices and open files"),
    "a report to an open file": ("inspect good.onnx --report /proc/self/environ", 2, "in a folder of devices and open files"),
    "an engine on stdout": ("build good.onnx -o -", 2, "got '-', expected a file's name"),
    "output of a folder's name": ("optimize good.onnx -o new/", 2, "'-o' / '--output': got 'new/', expected a file's name"),
    "a report of a folder's name": ("inspect good.onnx --report new/.", 2, "got 'new/.', expected a file's name"),
    "output of a name too long": (f"optimize good.onnx -o {'long' * 70}.onnx", 2, ".onnx: cannot be written; File name too long"),
    "a misspelt command": ("optimise good.onnx", 2, "No such command 'optimise'"),
    "inspect without a model": ("inspect", 2, "Missing argument 'MODEL'"),
    "inspect two models": ("inspect good.onnx no_pair.onnx", 2, "unexpected extra argument"),
    "inspect a missing file": ("inspect none.onnx", 2, "none.onnx: no such file"),
    "inspect random bytes": ("inspect random.onnx", 2, NO_MODEL),
    "verify one model": ("verify good.onnx", 2, "Missing argument 'SECOND'"),
    "verify a missing file": ("verify good.onnx none.onnx", 2, "none.onnx: no such file"),
    "verify a folder": ("verify good.onnx folder", 2, "folder: a folder; expected an ONNX file"),
    "verify random bytes": ("verify random.onnx good.onnx", 2, NO_MODEL),
    "verify with a tolerance of nan": ("verify good.onnx good.onnx --rtol nan", 2, "got 'nan', expected a finite number"),
    "verify another model": ("verify -q no_pair.onnx good.onnx", 1, "got shape (1, 32, 6, 6), expected (1, 16, 12, 12)"),
    "build a missing file": ("build none.onnx -o out.engine", 2, "none.onnx: no such file"),
    "build without TensorRT": ("build good.onnx -o out.engine", 2, "pip install tensorrt"),
    "tune without a file for the result": ("tune good.onnx", 2, "Missing option '-o'"),
    "tune a model without a pair": ("tune no_pair.onnx -o tuned.def", 2, "no node of the operators"),
    "tune into a folder's name": ("tune good.onnx -o folder/", 2, "got 'folder/', expected a file's name"),
    "tune without PyTorch": ("tune good.onnx -o tuned.def", 2, "PyTorch cannot be imported"),
    "tune into the model itself": ("tune good.onnx -o good.onnx", 2, "the model itself"),
    "doctor with a file": ("doctor good.onnx", 2, "unexpected extra argument"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    for name, content in FILES.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("tensorrt", "torch"):
        monkeypatch.setitem(sys.modules, name, None)  # as where they are not installed
    return tmp_path


@pytest.mark.parametrize(("words", "status", "part"), CASES.values(), ids=CASES)
def test_one_line_and_nothing_changed(words, status, part, folder, capsys):
    before = contents(folder)
    assert run(command, "convpool", words.split()) == status
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("convpool: ") and part in lines[0], lines
    assert contents(folder) == before


@pytest.mark.parametrize(
    "words",
    ["optimize good.onnx", "optimize good.onnx --target cpu --time -q", "inspect good.onnx", "verify good.onnx good.onnx"],
)
def test_the_original_is_read_only(words, folder):
    before = contents(folder)
    assert run(command, "convpool", words.split()) == 0
    after = contents(folder)
    assert {path: after[path] for path in before} == before
    assert [path.name for path in after.keys() - before.keys()] == (["good.convpool.onnx"] if "optimize" in words else [])


def test_a_model_without_a_pair_is_copied(folder):
    os.utime("no_pair.onnx", ns=(1, 1))
    assert run(command, "convpool", ["optimize", "no_pair.onnx", "-o", "copy.onnx", "-q"]) == 0
    assert Path("copy.onnx").read_bytes() == FILES["no_pair.onnx"] and Path("no_pair.onnx").stat().st_nlink == 1
    onnx.checker.check_model("copy.onnx")
