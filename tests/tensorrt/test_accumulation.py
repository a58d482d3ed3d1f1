# SPDX-License-Identifier: Apache-2.0
"""How box means are summed, as TensorRT and onnxruntime's operators are told it.  No GPU."""

import io
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import onnx
import onnxruntime
import pytest

from convpool import onnxruntime as on_gpu
from convpool import optimize
from convpool.cli import build as build_cli
from convpool.cli.group import run
from convpool.errors import OptionError
from convpool.ir import schema
from convpool.tensorrt import BuildOptions, build_engine, pipeline
from convpool.tensorrt.prepare import is_plugin_node
from models.generators import generate
from tests.support.operator_models import Node


def packed(plan: bytes) -> list[int]:
    """The attribute of the nodes that a pretended engine has."""
    return [schema.accumulation_of(node) for node in onnx.load_from_string(plan).graph.node if is_plugin_node(node)]


@pytest.mark.parametrize(("accumulation", "wanted"), [("packed", 1), ("default", 0), (None, 0)])
def test_every_node_of_an_engine_has_it(trt, accumulation, wanted):
    engine = build_engine(generate("wgan_gp_small", batch=2), precision="fp16", trt=trt, accumulation=accumulation)
    assert packed(engine.plan) and set(packed(engine.plan)) == {wanted}


@pytest.mark.parametrize("given", ["default", "packed"])
@pytest.mark.parametrize("asked", ["default", "packed", None])
def test_nodes_of_the_file_keep_it_unless_another_is_asked_for(trt, given, asked):
    model = optimize(generate("wgan_gp_small", batch=2), check=0, accumulation=given).model
    engine = build_engine(model, precision="fp16", trt=trt, accumulation=asked)
    assert set(packed(engine.plan)) == {int((asked or given) == "packed")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulation": "fp16"}, "accumulation: got 'fp16', expected one of default, packed"),
        ({"accumulation": 1}, "accumulation: got 1, expected one of default, packed"),
        ({"accumulation": "packed", "plugin": False}, "accumulation: got packed without the plugin, expected one of them"),
        ({"accumulation": "packed", "precision": "tf32"}, "got packed with precision tf32, expected precision fp16 or bf16"),
        ({"accumulation": "packed", "lowering": "fused"}, "got packed with lowering fused, expected lowering convavgpool"),
        ({"accumulation": "packed", "lowering": "none"}, "got packed with lowering none, expected lowering convavgpool"),
    ],
)
def test_what_no_engine_can_have_is_refused(options, message):
    with pytest.raises(OptionError, match=message):
        BuildOptions(**options)
    if options["accumulation"] == "packed":
        BuildOptions(**options | {"accumulation": "default"})


def test_the_command_hands_it_on_and_reports_it(monkeypatch, tmp_path, capsys):
    seen = []

    def build_prepared(trt, model, options):
        seen.append(options.accumulation)
        nodes = Counter(node.op_type for node in model.graph.node)
        return SimpleNamespace(plan=b"plan", built_from=nodes, save=lambda path: Path(path).write_bytes(b"plan"))

    monkeypatch.setattr(pipeline, "tensorrt_module", lambda: SimpleNamespace(__name__="tensorrt", __version__="10.1.0"))
    monkeypatch.setattr(pipeline, "build_prepared", build_prepared)
    model, report = tmp_path / "m.onnx", tmp_path / "r.json"
    onnx.save(generate("conv_pool", batch=2), model)
    command = [str(model), "-o", str(tmp_path / "m.engine"), "--check", "0", "--report", str(report), "--precision", "fp16"]
    for options, wanted in (([], None), (["--accumulation", "packed"], "packed")):
        assert run(build_cli.build_command, "convpool-build", command + options) == 0
        assert seen.pop() == json.loads(report.read_text())["accumulation"] == wanted
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(model.read_bytes())))
    assert run(build_cli.build_command, "convpool-build", ["-", *command[1:], "--report", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "-"
    assert run(build_cli.build_command, "convpool-build", [*command, "--accumulation", "packed", "--no-plugin"]) == 2
    assert "convpool-build: accumulation: got packed without the plugin" in capsys.readouterr().err


@pytest.mark.parametrize("op_type", ["ConvAvgPool", "AffineReluConvAvgPoolAdd"])
def test_onnxruntime_runs_nodes_with_it(op_type, plugin, monkeypatch):
    """With the library, and by the function."""
    monkeypatch.setenv("CONVPOOL_LIBRARY", str(plugin))
    for registered in (True, False):
        options = onnxruntime.SessionOptions()
        if registered:
            on_gpu.register(options)
        results = []
        for accumulation in ("default", "packed"):
            node = Node(op_type, "float16", accumulation=accumulation)
            model = node.model(functions=not registered).SerializeToString()
            session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
            arrays = node.arrays()
            results.append(session.run(None, node.feeds(arrays))[0])
            node.check(results[-1], arrays)
        assert results[0].tobytes() == results[1].tobytes()
