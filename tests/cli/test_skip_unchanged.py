# SPDX-License-Identifier: Apache-2.0
"""`--skip-unchanged`: no copy of a model in which nothing changes."""

import json
from pathlib import Path

import onnx
import pytest

import convpool
from convpool.cli.group import run
from convpool.cli.optimize import command
from tests.support.models import graph
from tests.support.rewriting import PAIR


@pytest.mark.parametrize("stands", ["MODEL", "a pair", "a fold", "sizes"])
def test_a_copy_is_written_where_something_changes(stands, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    body = {"a pair": PAIR, "a fold": "a = Identity(x)\ny = Relu(a)"}.get(stands, "y = Relu(x)")
    onnx.save(graph(body, inputs="float[N,16,12,12] x"), "in.onnx")
    words = {"a fold": ["--fold"], "sizes": ["--fix-shape", "x:1x16x12x12"]}.get(stands, [])
    assert run(command, "convpool-optimize", ["in.onnx", "--skip-unchanged", "--report", "r.json", *words]) == 0
    report, last = json.loads(Path("r.json").read_text()), capsys.readouterr().out.splitlines()[-1]
    assert report["changed"] == (stands != "MODEL") and report["options"]["skip_unchanged"] is True
    assert Path("in.convpool.onnx").exists() == report["changed"]
    assert last == ("written   in.convpool.onnx" if report["changed"] else "written   nothing: the model is unchanged")
    assert run(command, "convpool-optimize", ["in.onnx", *words]) == 0
    copy = "" if report["changed"] else ", an unchanged copy (--skip-unchanged writes none)"
    assert capsys.readouterr().out.splitlines()[-1] == f"written   in.convpool.onnx{copy}" and Path("in.convpool.onnx").exists()


def test_a_copy_that_is_skipped_from_python_and_on_stdout(tmp_path, capsys):
    result = convpool.optimize(graph("y = Relu(x)"))
    assert result.save(tmp_path / "y.onnx", skip_unchanged=True) == [] and not (tmp_path / "y.onnx").exists()
    assert result.save(tmp_path / "y.onnx") == [tmp_path / "y.onnx"]
    assert run(command, "convpool-optimize", [str(tmp_path / "y.onnx"), "--skip-unchanged", "-o", "-"]) == 2
    assert "--skip-unchanged: got stdout; expected a file's name with -o" in capsys.readouterr().err


def test_nodes_moved_to_another_domain_are_a_change(tmp_path):
    onnx.save(convpool.optimize(graph(PAIR), check=0).model, tmp_path / "in.onnx")
    words = [str(tmp_path / "in.onnx"), "--skip-unchanged", "--no-check", "-q"]
    assert run(command, "convpool-optimize", words) == 0 and not (tmp_path / "in.convpool.onnx").exists()
    assert (
        run(command, "convpool-optimize", [*words, "--domain", "trt.plugins"]) == 0 and (tmp_path / "in.convpool.onnx").exists()
    )
