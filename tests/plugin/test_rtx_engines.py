"""TensorRT-RTX's parser and builder take the rewritten models in standard operators, in every precision."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorrt_rtx_bindings")

MODELS = ("lenet5_digits", "sngan64_small", "wgan_gp_small", "stargan_v2_small", "densenet_small", "densenet_transition1")


def build(*arguments: str) -> subprocess.CompletedProcess:
    program = Path(__file__).with_name("rtx.py")
    return subprocess.run([sys.executable, program, *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("lowering", ["direct", "fused"])
@pytest.mark.parametrize("name", MODELS)
def test_builds(name, lowering, precision):
    batch = "N" if precision in ("fp32", "fp16") else "2"
    done = build(name, lowering, precision, batch)
    assert done.returncode == 0, done.stderr[-3000:]
    built = json.loads(done.stdout.splitlines()[-1])
    element = 2 if precision in ("fp16", "bf16") else 4
    assert built["bytes"] > 0.9 * element * built["weights"]  # the weights are in it


def test_convpool_build_builds_what_it_loaded(tmp_path, monkeypatch, capsys):
    """The whole program but for the plugin and the run, which need another TensorRT and a GPU."""
    import functools

    import onnx
    import tensorrt_rtx_bindings as trt

    from convpool import build_cli
    from convpool.cli import run
    from convpool.tensorrt import build_engine
    from models.generators import generate

    def for_ampere_and_later(config) -> None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM80, 0)

    monkeypatch.setattr(build_cli, "build_engine", functools.partial(build_engine, trt=trt, configure=for_ampere_and_later))
    onnx.save(generate("wgan_gp_small", batch="dynamic"), tmp_path / "model.onnx")
    engine, report = tmp_path / "m.engine", tmp_path / "report.json"
    shapes = [f"--{kind}-shape=image:{n}x3x32x32" for kind, n in (("min", 1), ("max", 4))]
    arguments = [str(tmp_path / "model.onnx"), "-o", str(engine), "--no-plugin", "--check", "0", "--report", str(report), *shapes]
    assert run(build_cli.build_command, "convpool-build", arguments) == 0, capsys.readouterr().err
    content = json.loads(report.read_text())
    assert content["engine_bytes"] == engine.stat().st_size > 0 and content["plugin"] is False
    assert "written" in capsys.readouterr().out


def test_an_open_input_without_a_profile_is_refused():
    import tensorrt_rtx_bindings as trt

    from convpool.errors import OptionError
    from convpool.tensorrt import build_engine
    from models.generators import generate

    model = generate("wgan_gp_small", batch="dynamic")
    with pytest.raises(OptionError, match=r"profile: input 'image' has the open shape \[-1, 3, 32, 32\]; give"):
        build_engine(model, lowering="direct", plugin=False, trt=trt)
    for profile, message in (
        ({"picture": ([1], [1], [1])}, "profile: no input 'picture'; expected image"),
        ({"image": ([1, 3, 32], [1, 3, 32], [1, 3, 32])}, r"profile: input 'image'; got \[1, 3, 32\], expected"),
        ({"image": ([1, 4, 32, 32],) * 3}, r"profile: input 'image'; got \[1, 4, 32, 32\], expected \[-1, 3, 32, 32\]"),
    ):
        with pytest.raises(OptionError, match=message):
            build_engine(model, lowering="direct", plugin=False, trt=trt, profiles=profile)


def test_a_model_that_tensorrt_cannot_read_is_an_error_with_its_message():
    import tensorrt_rtx_bindings as trt
    from onnx import TensorProto, helper

    from convpool.errors import ModelError
    from convpool.tensorrt import build_engine

    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Det", ["m"], ["y"]), helper.make_node("Neg", ["x"], ["m"])][::-1], "g",
                              value[:1], value[1:])  # fmt: skip
    graph.node.append(helper.make_node("StringNormalizer", ["s"], ["t"]))
    graph.input.append(helper.make_tensor_value_info("s", TensorProto.STRING, [1]))
    graph.output.append(helper.make_tensor_value_info("t", TensorProto.STRING, [1]))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with pytest.raises(ModelError, match="TensorRT .* cannot read the model; got "):
        build_engine(model, lowering="none", plugin=False, trt=trt)
