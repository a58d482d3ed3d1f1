# SPDX-License-Identifier: Apache-2.0
"""convpool-build and convpool-verify with TensorRT on a GPU: engines built, saved, run elsewhere, and every exit status."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from convpool import optimize
from convpool.cli.build import build_command
from convpool.cli.group import run
from convpool.cli.verify import verify_command
from convpool.ir.model import load
from convpool.tensorrt import BuildOptions
from convpool.tensorrt.prepare import with_default_lowering
from models.generators import generate, random_inputs
from tests.support.gpu import require_gpu

FAST = ("--optimization-level", "1")


@pytest.fixture(autouse=True)
def _gpu():
    require_gpu()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model, its rewritten form, one with a wrong weight, one with an open batch; and an engine of the rewritten form."""
    require_gpu()
    path = tmp_path_factory.mktemp("models")
    model = generate("wgan_gp_small", batch=2)
    onnx.save(model, path / "model.onnx")
    optimize(model, check=0).save(path / "model.convpool.onnx")
    wrong = onnx.load(path / "model.convpool.onnx")
    node = next(node for node in wrong.graph.node if node.op_type == "ConvAvgPool")
    weight = next(tensor for tensor in wrong.graph.initializer if tensor.name == node.input[1])
    weight.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(weight), weight.name))
    onnx.save(wrong, path / "wrong.onnx")
    onnx.save(generate("wgan_gp_small", batch="dynamic"), path / "open.onnx")
    assert build(path / "model.convpool.onnx", path / "model.engine", "--layers", "-q") == 0
    return path


def build(model: Path, engine: Path, *options: str) -> int:
    return run(build_command, "convpool-build", [str(model), "-o", str(engine), *FAST, *map(str, options)])


def verify(*arguments) -> int:
    return run(verify_command, "convpool-verify", [str(argument) for argument in arguments])


def entry_point(name: str, *arguments) -> subprocess.CompletedProcess:
    """The installed program, as a process of its own."""
    code = f"from convpool.cli.{name} import main\nmain()"
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
def test_builds_checks_and_reports(folder, tmp_path, capsys, precision):
    engine, report = tmp_path / "m.engine", tmp_path / "report.json"
    options = ("--precision", precision, "--check", "3", "--report", report)
    assert build(folder / "model.onnx", engine, *options) == 0
    content = json.loads(report.read_text())
    assert content["plugin"] and content["precision"] == precision and content["engine_bytes"] == engine.stat().st_size
    assert content["verification"]["passed"] and content["verification"]["inputs"] == 3
    assert [output["name"] for output in content["verification"]["outputs"]] == ["score"]
    printed = capsys.readouterr()
    assert "agrees" in printed.out and f"written   {engine}" in printed.out and precision in printed.out
    lowering = with_default_lowering(load(str(folder / "model.onnx")), BuildOptions(precision=precision)).lowering
    assert (b"ConvAvgPool" in engine.read_bytes()) == (lowering == "convavgpool")
    assert verify(folder / "model.onnx", engine, "--precision", precision, "-q") == 0


@pytest.mark.parametrize("options", [("--no-plugin",), ("--no-plugin", "--lowering", "none"), ("--lowering", "direct")])
def test_engines_of_standard_operators(folder, tmp_path, options):
    engine = tmp_path / "m.engine"
    assert build(folder / "model.onnx", engine, *options, "-q") == 0
    assert b"ConvAvgPool" not in engine.read_bytes()


def test_the_fastest_form_is_kept(folder, tmp_path, capsys):
    engine, report = tmp_path / "m.engine", tmp_path / "report.json"
    assert build(folder / "model.onnx", engine, "--precision", "fp16", "--autotune", "--report", report) == 0
    found = json.loads(report.read_text())["autotune"]
    assert set(found["times_us"]) == {"none", "convavgpool", "direct", "fused"} and not found["left_out"]
    assert found["lowering"] == min(found["times_us"], key=found["times_us"].get) and min(found["times_us"].values()) > 0
    assert (b"ConvAvgPool" in engine.read_bytes()) == (found["lowering"] == "convavgpool")
    assert verify(folder / "model.onnx", engine, "--precision", "fp16", "-q") == 0


def test_a_saved_engine_is_verified_in_another_process(folder, tmp_path):
    engine = tmp_path / "m.plan"
    done = entry_point("build", folder / "model.convpool.onnx", "-o", engine, "--precision", "fp16", *FAST)
    assert done.returncode == 0 and "agrees" in done.stdout, done.stderr
    done = entry_point("verify", folder / "model.onnx", engine, "--precision", "fp16", "--check", "2")
    assert done.returncode == 0 and "agrees" in done.stdout, done.stderr
    done = entry_point("verify", folder / "wrong.onnx", engine, "--precision", "fp16")
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 1 and "differs" in done.stdout
    assert len(lines) == 1 and lines[0].startswith("convpool-verify: verification: output 'score' differs; got "), done.stderr


def test_two_engines_are_compared(folder, tmp_path, capsys):
    plain = tmp_path / "plain.trt"
    assert build(folder / "model.onnx", plain, "--no-plugin", "--lowering", "none", "--check", "0") == 0
    assert "agrees" not in capsys.readouterr().out  # --check 0 compares nothing
    assert verify(plain, folder / "model.engine", "--check", "2") == 0
    assert "agrees" in capsys.readouterr().out


def test_layers_are_compared_and_the_first_wrong_one_is_named(folder, tmp_path, capsys):
    report = tmp_path / "report.json"
    assert verify(folder / "model.onnx", folder / "model.engine", "--layers", "--report", report, "-q") == 0
    right = json.loads(report.read_text())["verification"]["outputs"]
    assert len(right) > 5 and all(output["passed"] for output in right)
    wrong = tmp_path / "wrong.engine"
    assert build(folder / "wrong.onnx", wrong, "--layers", "-q") == 0
    assert verify(folder / "model.onnx", wrong, "--layers", "--report", report) == 1
    outputs = {output["name"]: output["passed"] for output in json.loads(report.read_text())["verification"]["outputs"]}
    assert set(outputs) == {output["name"] for output in right}
    node = next(node for node in onnx.load(folder / "wrong.onnx").graph.node if node.op_type == "ConvAvgPool")
    assert not outputs[node.output[0]] and any(outputs.values())
    assert "convpool-verify: verification: output '" in capsys.readouterr().err


def test_open_shapes_and_data(folder, tmp_path, capsys):
    engine = tmp_path / "open.engine"
    assert build(folder / "open.onnx", engine) == 2
    assert "profile: input 'image' has the open shape [-1, 3, 32, 32]; give" in capsys.readouterr().err
    shapes = [f"--{kind}-shape=image:{n}x3x32x32" for kind, n in (("min", 1), ("opt", 2), ("max", 8))]
    assert build(folder / "open.onnx", engine, *shapes, "-q") == 0
    for batch in (1, 5, 8):
        np.savez(tmp_path / "data.npz", **random_inputs(generate("wgan_gp_small", batch=batch)))
        assert verify(folder / "open.onnx", engine, "--data", tmp_path / "data.npz", "-q") == 0
        assert verify(folder / "open.onnx", engine, "--input-shape", f"image:{batch}x3x32x32", "-q") == 0
    assert verify(folder / "open.onnx", engine, "--input-shape", "image:9x3x32x32") == 2
    assert "input 'image': shape; got [9, 3, 32, 32], expected [1, 3, 32, 32] to [8, 3, 32, 32]" in capsys.readouterr().err


def test_the_timing_cache_is_written_and_used(folder, tmp_path):
    cache = tmp_path / "timing.cache"
    for _ in range(2):
        assert build(folder / "model.onnx", tmp_path / "m.engine", "--timing-cache", cache, "--check", "0", "-q") == 0
        size = cache.stat().st_size
        assert size > 0
    cache.write_bytes(b"damaged")
    assert build(folder / "model.onnx", tmp_path / "m.engine", "--timing-cache", cache, "--check", "0", "-q") == 0
    assert cache.stat().st_size == size
    assert build(folder / "model.onnx", tmp_path / "m.engine", "--timing-cache", tmp_path, "-q") == 2


def test_a_failed_check_writes_no_engine(folder, tmp_path, capsys):
    engine, report = tmp_path / "m.engine", tmp_path / "report.json"
    assert build(folder / "model.onnx", engine, "--precision", "fp16", "--rtol", 0, "--atol", 0, "--report", report) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("convpool-build: verification: output 'score' differs; got ")
    assert not engine.exists()
    assert json.loads(report.read_text())["verification"]["passed"] is False


def test_what_cannot_be_used_is_one_line(folder, tmp_path, capsys):
    import tensorrt as trt

    damaged = tmp_path / "damaged.engine"
    damaged.write_bytes((folder / "model.engine").read_bytes()[:1000])
    newer = tmp_path / "newer.onnx"
    onnx.save(generate("wgan_gp_small", batch=2, opset=19), newer)
    cases = [
        (verify, (folder / "model.onnx", damaged), "engine: cannot be loaded by TensorRT"),
        (verify, (folder / "model.onnx", tmp_path / "none.engine"), "none.engine: cannot be read"),
        (build, (folder / "model.onnx", tmp_path / "m.engine", "--max-shape=picture:1x3x32x32"), "no input 'picture'"),
    ]
    if int(trt.__version__.partition(".")[0]) < 10:
        cases.append((build, (newer, tmp_path / "m.engine"), "opset; got 19, expected at most 17"))
    if not hasattr(trt.BuilderFlag, "BF16"):
        cases.append((build, (folder / "model.onnx", tmp_path / "m.engine", "--precision", "bf16"), "precision: got bf16, which"))
    for program, arguments, message in cases:
        assert program(*arguments) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1 and message in lines[0]
    assert not (tmp_path / "m.engine").exists()
