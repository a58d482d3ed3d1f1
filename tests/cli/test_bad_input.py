# SPDX-License-Identifier: Apache-2.0
"""Unusable input: exit status 2 with one line on stderr and nothing left behind; a mismatch: 1, and no output file."""

import os
import re
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data
from onnx.serialization import registry

import convpool
from convpool import interrupt
from convpool.cli.group import run as run_cli
from convpool.cli.optimize import command
from convpool.errors import ModelError, OptionError, VerificationError
from tests.support.models import graph
from tests.support.rewriting import IF_BODY, IF_INPUTS, PAIR


def good() -> onnx.ModelProto:
    return graph(PAIR)


def without_opset() -> onnx.ModelProto:
    model = good()
    del model.opset_import[:]
    return model


def external(location: str, offset: str = "0", length: str = "18432") -> onnx.ModelProto:
    """The weights in a file beside the model, under any location, offset and length."""
    model = good()
    tensor = model.graph.initializer[0]
    set_external_data(tensor, location)
    tensor.ClearField("raw_data")
    tensor.external_data.add(key="offset", value=offset)
    tensor.external_data.add(key="length", value=length)
    return model


def sparse() -> onnx.ModelProto:
    """The values of sparse weights in a file."""
    model = external("w.bin")
    values = model.graph.initializer.pop()
    values.dims[:] = [values.dims[0] * 144]
    indices = numpy_helper.from_array(np.arange(values.dims[0]))
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [32, 16, 3, 3]))
    return model


MODELS = {
    "dangling input": (lambda: graph(PAIR.replace("(x, w)", "(nowhere, w)")), "nowhere"),
    "duplicate output": (lambda: graph(PAIR + "\nh = Relu(x)"), "h"),
    "no opset": (without_opset, "opset"),
    "opset 99": (lambda: graph(PAIR, opset=99), "opset; got 99"),
    "channels against group": (lambda: graph(PAIR, {"w": (32, 15, 3, 3)}), "expected 15 channels"),
    "channels in a branch": (lambda: graph(IF_BODY, {"w": (32, 15, 3, 3)}, inputs=IF_INPUTS), "expected 15 channels"),
    "group that does not divide": (lambda: graph(PAIR.replace("<", "<group=5, ", 1)), "expected one that fits group 5"),
    "bias of another size": (lambda: graph(PAIR.replace("w)", "w, b)"), {"b": (31,)}), "bias; got shape [31], expected [32]"),
    "unknown operator": (lambda: graph(PAIR + "\nz = NoSuchOperator(x)"), "NoSuchOperator"),
    "cycle": (lambda: graph(PAIR.replace("(x, w)", "(y, w)")), "y"),
    "missing data file": (lambda: external("none.bin"), "is missing"),
    "data above the folder": (lambda: external("../w.bin"), "outside the model's folder"),
    "data above by detour": (lambda: external("sub/../../w.bin"), "outside the model's folder"),
    "absolute data path": (lambda: external("/etc/hostname"), "outside the model's folder"),
    "data through a link": (lambda: external("link.bin"), "outside the model's folder"),
    "data beyond the file": (lambda: external("w.bin", offset="4"), "got 18432 bytes at 4 of 18432"),
    "data of another length": (lambda: external("w.bin", length="18428"), "expected 18432"),
    "negative offset": (lambda: external("w.bin", offset="-4"), "tensor 'w': offset of its external data; got '-4', expected a"),
    "length that is no number": (lambda: external("w.bin", length="four"), "length of its external data; got 'four', expected a"),
    "data file that is a folder": (lambda: external("sub"), "sub"),
    "no location": (lambda: external(""), "tensor 'w': external data without a location"),
    "data of a sparse tensor": (sparse, "tensor 'w': sparse, with external data; expected its values in the model"),
    "a zero byte in the location": (lambda: external("a\0b"), "tensor 'w': external data 'a\\x00b'; expected a file name"),
}
FILES = {
    "missing": (None, "no such file"),
    "empty": (b"", "empty"),
    "truncated": (good().SerializeToString()[:-100], "not an ONNX model"),
    "text": (b"this is no model, it is a sentence", "not an ONNX model"),
    "no graph": (onnx.ModelProto(ir_version=8).SerializeToString(), "not an ONNX model; it has no IR version or no graph"),
    "zeros": (bytes(1000), "not an ONNX model"),
    "for Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
    **{form: (registry.get(form).serialize_proto(good()), f"format='{form}'") for form in ("json", "textproto", "onnxtxt")},
    "protobuf of another kind": (helper.make_tensor("t", 1, [1], [1.0]).SerializeToString(), "not an ONNX model"),
}


@pytest.fixture
def folder(tmp_path):
    """A folder with a good model, its weights as a data file, and a link that leads out of it."""
    inside = tmp_path / "inside"
    (inside / "sub").mkdir(parents=True)
    (inside / "good.onnx").write_bytes(good().SerializeToString())
    (inside / "w.bin").write_bytes(good().graph.initializer[0].raw_data)
    (tmp_path / "w.bin").write_bytes(good().graph.initializer[0].raw_data)
    os.symlink(tmp_path / "w.bin", inside / "link.bin")
    np.savez(inside / "other.npz", z=np.zeros((1, 16, 12, 12), np.float32))
    np.save(inside / "one.npy", np.zeros(3))
    (inside / "text.npz").write_text("no arrays")
    return inside


def contents(folder) -> dict:
    """Inode, time and content of everything in a folder."""
    bytes_of = {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}
    return {path: (path.lstat().st_ino, path.lstat().st_mtime_ns, data) for path, data in bytes_of.items()}


def refuse(capsys, folder, arguments: list[str], status: int, part: str) -> None:
    """The command line ends with this status and one line that holds `part`, and leaves the folder as it was."""
    before = contents(folder.parent)
    assert run_cli(command, "convpool-optimize", arguments) == status
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("convpool-optimize: "), captured.err
    assert part in lines[0], captured.err
    assert contents(folder.parent) == before


@pytest.mark.parametrize(("content", "part"), [*FILES.values(), *MODELS.values()], ids=[*FILES, *MODELS])
def test_unusable_file(content, part, folder, capsys):
    path = folder / "model.onnx"
    if content is not None:
        path.write_bytes(content().SerializeToString() if callable(content) else content)
    refuse(capsys, folder, [str(path), "--no-check"], 2, part)
    with pytest.raises(ModelError, match=re.escape(part)):
        convpool.optimize(path, check=0)


PLAIN = ("--enable", "plain_conv")
OPTIONS = {
    "a folder": (["sub"], "a folder"),
    "the folder itself": (["."], "a folder"),
    "model in no folder": (["none/model.onnx"], "none/model.onnx: no such file"),
    "no folder for the output": (["good.onnx", "-o", "none/out.onnx"], "no folder"),
    "no name for the output": (["good.onnx", "-o", ""], "got '', expected a file's name"),
    "a folder as output": (["good.onnx", "-o", "sub"], "a folder"),
    "no folder for the report": (["good.onnx", "--report", "none/report.json"], "no folder"),
    "a folder as report": (["good.onnx", "--report", "sub"], "sub: a folder; expected a file name"),
    "report that cannot be written": (["good.onnx", "--report", "/dev/full"], "/dev/full: cannot be written; No space left"),
    "report over the model": (["good.onnx", "--report", "sub/../good.onnx"], "a model's name, which would be overwritten"),
    "report over the output": (["good.onnx", "-o", "x.onnx", "--report", "x.onnx"], "a model's name, which would be overwritten"),
    "report over the data": (["good.onnx", "--data", "other.npz", "--report", "other.npz"], "other.npz: --data, which would be"),
    "output over the data": (["good.onnx", "--data", "other.npz", "-o", "sub/../other.npz"], "--data, which would be"),
    "output in the name of text": (["good.onnx", "-o", "out.json"], "out.json: a name by which onnx reads json, expected one"),
    "lowering": (["good.onnx", "--lowering", "best"], "best"),
    "negative check": (["good.onnx", "--check", "-1"], "-1"),
    "check that is no number": (["good.onnx", "--check", "many"], "many"),
    "shape without sizes": (["good.onnx", "--input-shape", "x"], "expected NAME:1x3x224x224"),
    "shape with a letter": (["good.onnx", "--input-shape", "x:1xCx12x12"], "expected NAME:1x3x224x224"),
    "shape with another digit": (["good.onnx", "--input-shape", "x:1x\u00b2x12x12"], "expected NAME:1x3x224x224"),
    "shape too large": (["good.onnx", *PLAIN, "--input-shape", f"x:{10**20}x16x12x12"], "expected positive sizes"),
    "shape of no input, unchecked": (["good.onnx", *PLAIN, "--no-check", "--input-shape", "z:1"], "no input 'z'"),
    "shape of no input": (["good.onnx", "--input-shape", "z:1x16x12x12"], "no input 'z'"),
    "missing data": (["good.onnx", "--data", "none.npz"], "none.npz"),
    "data that is text": (["good.onnx", "--data", "text.npz"], "text.npz"),
    "one array without a name": (["good.onnx", "--data", "one.npy"], "not a .npz file"),
    "data for no input": (["good.onnx", "--data", "other.npz"], "array 'z'"),
    "negative tolerance": (["good.onnx", "--rtol", "-1"], "-1"),
    "tolerance that is no number": (["good.onnx", "--atol", "nan"], "expected a finite number"),
    "infinite tolerance": (["good.onnx", "--rtol", "inf"], "got 'inf', expected a finite number"),
    "stem of another lowering": (["good.onnx", "--enable", "image_conv", "--lowering", "auto"], "conv: got --lowering auto too"),
    "pooling in front, of another": (["good.onnx", "--enable", "fuse_pool_conv", "--target", "cpu"], "cpu sets auto"),
    "plain convolutions of another": (["good.onnx", "--enable", "plain_conv", "--lowering", "direct"], "expected convavgpool"),
    "negative seed": (["good.onnx", "--seed", "-1"], "-1"),
    "ONNX's own domain": (["good.onnx", "--domain", "ai.onnx.ml"], "domain: got 'ai.onnx.ml'"),
    "empty domain": (["good.onnx", "--domain", ""], "domain: got ''"),
    "unknown option": (["good.onnx", "--faster"], "--faster"),
    "no model": ([], "MODEL"),
    "output as a second file": (["good.onnx", "out.onnx"], "expected one MODEL; name the output with -o"),
    "quiet and verbose": (["good.onnx", "-q", "-v"], "exclude each other"),
    "data without a check": (["good.onnx", "--no-check", "--data", "text.npz"], "exclude each other"),
    "a number of checks without a check": (["good.onnx", "--no-check", "--check", "3"], "exclude each other"),
}


@pytest.mark.parametrize(("arguments", "part"), OPTIONS.values(), ids=OPTIONS)
def test_unusable_option(arguments, part, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    refuse(capsys, folder, arguments, 2, part)


ARGUMENTS = {
    "check": ("2", 1.5, None, True, -1), "seed": ("0", None, -1), "exclude": (3, [3], None),
    "enable": (3, [3], ["no pass"]), "disable": (3, None), "input_shapes": ([1, 3], {"x": 3}, {"x": "abcd"}, {3: [1]}, "x:1x3"),
    "rtol": ("a", -1, float("nan"), float("inf"), 10**400, True), "atol": ("a", -1, [1]), "progress": (3, "yes"),
    "fold": ("no", 1), "autotune": ("no", None), "time": ("no",),
    "target": ("gpu", 3, ["any"]), "lowering": ("best", 3, ["direct"]), "data": (3, [1]), "base_dir": (3,),
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in ARGUMENTS.items() for value in values])
def test_an_argument_of_another_kind(name, value):
    with pytest.raises(OptionError, match="got .*, expected |data "):
        convpool.optimize(good(), **{name: value})
    if name in ("check", "seed", "input_shapes", "rtol", "atol", "data"):
        with pytest.raises(OptionError):
            convpool.verify(good(), good(), **{name: value})


def test_arguments_of_every_kind_that_is_allowed_and_sources_of_another_type():
    given = {"exclude": iter(["none"]), "enable": ("pool_first",), "rtol": np.float32(1), "check": np.int64(1), "fold": None}
    assert convpool.optimize(good(), input_shapes={"x": (1, 16, 12, 12)}, progress=print, **given).changed
    with pytest.raises(OptionError, match="check: got 0, expected 1 or more"):  # it would compare nothing
        convpool.verify(good(), good(), check=0)
    for source in (3, None, ["model.onnx"], np.zeros(3)):
        with pytest.raises(ModelError, match="expected a path, bytes, ModelProto or gs.Graph"):
            convpool.optimize(source)


@pytest.mark.parametrize("stage", ["importlib.metadata", "numpy", "work"])
def test_ctrl_c_is_one_line_and_130(stage, folder):
    """Sent by the process itself, while it imports a module, or when it opens the model."""
    code = f"""
import builtins, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start without
sys.argv = ["convpool-optimize", {str(folder / "good.onnx")!r}]
def hook(event, arguments):
    if (event == "import" and arguments[0] == {stage!r}
            or event == "open" and str(arguments[0]).endswith("good.onnx") and {stage == "work"}):
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(hook)
from convpool.cli.optimize import main
main()
"""
    before = sorted(folder.iterdir())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (130, "convpool-optimize: interrupted")
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("number", interrupt.WORDS, ids=str)
@pytest.mark.parametrize("status", [0, 2])
def test_a_signal_behind_the_work_changes_nothing(status, number, folder):
    """Sent when Python calls what is registered for its end, and when it clears up modules.  The status was -15, or 0 with a
    traceback."""
    words = ["convpool-optimize", str(folder / ("good.onnx" if status == 0 else "none.onnx")), "-q"]
    code = f"""
import atexit, os, sys
class Late:
    def __del__(self, kill=os.kill, own=os.getpid()): kill(own, {number:d})
sys.argv, late = {words!r}, Late()
atexit.register(os.kill, os.getpid(), {number:d})
from convpool.cli.optimize import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (status, min(status, 1))
    assert (folder / "good.convpool.onnx").exists() == (status == 0)


def test_importing_convpool_leaves_ctrl_c_to_the_program():
    handler = "signal.getsignal(signal.SIGINT)"
    code = f"import signal; before = {handler}; import convpool; assert {handler} is before"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_mismatch_exits_with_1_and_writes_no_model(folder, capsys):
    path, report = folder / "good.onnx", folder.parent / "report.json"
    report.write_text("")
    before = sorted(folder.iterdir())
    arguments = [str(path), "-q", "--rtol", "0", "--atol", "0", "--report", str(report)]
    assert run_cli(command, "convpool-optimize", arguments) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "verification: output 'y' differs" in lines[0] and "expected at most " in lines[0]
    assert sorted(folder.iterdir()) == before
    assert '"passed": false' in report.read_text()
    with pytest.raises(VerificationError) as caught:
        convpool.optimize(path, rtol=0, atol=0)
    assert caught.value.report.verification.outputs[0].max_abs_error > 0


@pytest.mark.parametrize("old", [external("r\0.json").SerializeToString(), None])
def test_failed_write_leaves_the_old_files(folder, monkeypatch, capsys, old):
    for name in ("out.onnx", "r.json") if old else ():
        (folder.parent / name).write_bytes(old)
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    refuse(capsys, folder, "inside/good.onnx -o out.onnx --report r.json --no-check".split(), 2, "out.onnx: cannot be written")


def test_no_traceback_from_the_installed_module(folder):
    (folder / "bad.onnx").write_bytes(b"no model")
    words = [sys.executable, "-m", "convpool.cli", str(folder / "bad.onnx")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)


@pytest.mark.parametrize("arguments", [["-o", "-"], ["--dry-run"], ["--help"]])
def test_stdout_that_takes_nothing(folder, arguments):
    words = [sys.executable, "-m", "convpool.cli", str(folder / "good.onnx"), "--no-check", *arguments]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "convpool-optimize: stdout: No space left on device\n")
    closed, pipe = os.pipe()
    os.close(closed)
    with open(pipe, "wb") as broken:
        done = subprocess.run(words, stdout=broken, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr


@pytest.mark.parametrize(("closed", "words"), [("<&-", "- -o {}/out.onnx"), (">&-", "{}/good.onnx -o -"), ("<&- >&-", "-")])
def test_closed_stdin_and_stdout_are_told(closed, words, folder):
    """The status was that of models that differ, behind a traceback."""
    command = f"{sys.executable} -m convpool optimize {words.format(folder)} {closed}"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and re.fullmatch("convpool: std(in|out): closed(, or a terminal)?; expected .*\n", done.stderr)
    assert not (folder / "out.onnx").exists()


def test_good_model_from_stdin_to_stdout(folder):
    words = [sys.executable, "-m", "convpool.cli", "-", "-q", "--lowering", "direct"]
    done = subprocess.run(words, input=(folder / "good.onnx").read_bytes(), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    model = onnx.load_from_string(done.stdout)
    assert [node.op_type for node in model.graph.node] == ["AveragePool", "Conv"]
    assert model.graph.initializer[0].data_type == TensorProto.FLOAT
    given = {"input": (folder / "good.onnx").read_bytes(), "stdout": os.openpty()[1], "stderr": subprocess.PIPE}
    done = [subprocess.run([*words, *more], check=False, **given) for more in (["--no-check"], ["--no-check", "--dry-run"])]
    assert [each.returncode for each in done] == [2, 0] and b"a terminal; expected a pipe" in done[0].stderr
