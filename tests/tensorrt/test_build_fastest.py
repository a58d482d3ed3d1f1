# SPDX-License-Identifier: Apache-2.0
"""The fastest form of a model's pairs, with engines, times and the CUDA driver pretended: what is built, kept and left out."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from convpool import optimize
from convpool.check.judge import OutputErrors, Verification
from convpool.cli import build as build_cli
from convpool.cli.build import build_command
from convpool.cli.group import run
from convpool.errors import OptionError, OutputError
from convpool.tensorrt import BuildOptions, TensorRTError, build_fastest, pipeline, prepare
from convpool.tensorrt.engine import TensorInfo
from models.generators import generate

TIMES = {"none": 30.0, "convavgpool": 12.0, "direct": 20.0, "fused": 15.0}


def form_of(model: onnx.ModelProto) -> str:
    """Which form of the model below this is."""
    nodes = {node.op_type for node in model.graph.node}
    largest = max(max(tensor.dims[2:]) for tensor in model.graph.initializer if len(tensor.dims) == 4)
    order = [node.op_type for node in model.graph.node if node.op_type in ("Conv", "AveragePool")]
    if any("ConvAvgPool" in name for name in nodes):
        return "convavgpool"
    return "fused" if largest == 4 else "direct" if order[0] == "AveragePool" else "none"


class FakeEngine:
    def __init__(self, form: str, loads: bool = True) -> None:
        self.form, self.plan, self.loads = form, form.encode(), loads
        self.built_from = Counter(["ConvAvgPool", "ConvAvgPool", "Gemm"] if form == "convavgpool" else ["Conv"])

    @property
    def inputs(self):
        if not self.loads:
            raise TensorRTError("cannot be loaded")
        shape = (2, 3, 32, 32)
        profiles = ((1, 3, 32, 32), shape, (8, 3, 32, 32)), ((16, 3, 32, 32),) * 3
        return {"image": TensorInfo("image", shape, np.dtype(np.float32), profiles)}

    def save(self, path) -> None:
        Path(path).write_bytes(self.plan)


@pytest.fixture
def pretend(monkeypatch):
    """Pretended builds and times: what was built with which options; forms that fail as they are built or timed."""
    seen = SimpleNamespace(options={}, failing={}, not_timed={}, not_loaded=set(), shapes=None)

    def build_prepared(trt, model, options):
        form = form_of(model)
        seen.options[form] = options
        if form in seen.failing:
            raise seen.failing[form]
        return FakeEngine(form, loads=form not in seen.not_loaded)

    def time_in_turn(engines, inputs, left_out):
        seen.shapes = {name: x.shape for name, x in inputs[0].items()}
        left_out |= seen.not_timed
        return {form: [TIMES[form] + late for late in (0.0, 0.5, 9.0)] for form in engines if form not in seen.not_timed}

    monkeypatch.setattr(pipeline, "tensorrt_module", lambda: SimpleNamespace(__name__="tensorrt", __version__="8.6.1"))
    monkeypatch.setattr(pipeline, "build_prepared", build_prepared)
    monkeypatch.setattr(pipeline, "time_in_turn", time_in_turn)
    monkeypatch.setattr(prepare, "current_device", lambda: {"cc": 90})  # whatever GPU there is here
    return seen


def conv_pool():
    return generate("conv_pool", batch=2)


def test_forms_come_in_the_order_of_their_medians(pretend):
    found = build_fastest(conv_pool(), precision="fp16")
    assert list(found.engines) == [engine.form for engine in found.engines.values()] == ["convavgpool", "fused", "direct", "none"]
    assert found.times_us == {form: value + 0.5 for form, value in TIMES.items()} and found.left_out == {}
    assert pretend.shapes == {"image": (2, 3, 32, 32)}
    caches = {options.timing_cache for options in pretend.options.values()}
    assert len(caches) == 1 and not next(iter(caches)).exists()  # shared, and gone
    for options in pretend.options.values():
        config = SimpleNamespace(avg_timing_iterations=1)
        options.configure(config)
        assert config.avg_timing_iterations == pipeline.TIMING_ITERATIONS
        assert replace(options, timing_cache=None, configure=None) == BuildOptions(precision="fp16", autotune=True)


def test_every_form_has_the_convolutions_that_the_plugin_takes(pretend, monkeypatch):
    given, lowered = [], prepare.lowered

    def noted(model, lowering, *, input_shapes, **offloaded):
        given.append(offloaded | input_shapes)
        return lowered(model, lowering, input_shapes=input_shapes, **offloaded)

    monkeypatch.setattr(prepare, "lowered", noted)
    name = conv_pool().graph.input[0].name
    build_fastest(conv_pool(), precision="fp16", plain_conv=False, profiles={name: ((1, 2), (3, 4), (5, 6))})
    assert given == [{"target": "tensorrt", "enable": ["image_conv"], "disable": ["plain_conv"], name: [3, 4]}] * len(TIMES)


def test_without_the_plugin_its_form_is_not_built(pretend, tmp_path):
    configured = []
    found = build_fastest(conv_pool(), plugin=False, timing_cache=tmp_path / "kept.cache", configure=configured.append)
    assert set(pretend.options) == {"none", "direct", "fused"} and next(iter(found.engines)) == "fused"
    for options in pretend.options.values():
        assert options.timing_cache == tmp_path / "kept.cache" and options.plugin is False
        options.configure(SimpleNamespace())
    assert len(configured) == 3


def test_forms_that_come_out_the_same_are_built_once(pretend):
    found = build_fastest(generate("densenet_transition1", batch=1))  # a 1x1 pair has no fused form
    assert found.left_out == {"fused": "the same as none"} and set(found.times_us) == {"none", "direct", "convavgpool"}


def test_a_form_that_cannot_be_built_loaded_or_timed_is_left_out(pretend):
    pretend.failing["convavgpool"] = TensorRTError("no plugin")
    pretend.not_timed["none"] = "cannot be loaded"
    pretend.not_loaded.add("none")
    found = build_fastest(conv_pool())
    assert list(found.engines) == ["fused", "direct"]
    assert found.left_out == {"convavgpool": "no plugin", "none": "cannot be loaded"}
    pretend.not_timed |= dict.fromkeys(("direct", "fused"), "no graph")
    with pytest.raises(TensorRTError, match="no form's engine could be timed; got convavgpool: no plugin; none: cannot"):
        build_fastest(conv_pool())
    pretend.not_loaded |= TIMES.keys()
    with pytest.raises(TensorRTError, match="^cannot be loaded$"):
        build_fastest(conv_pool())
    for form in TIMES:
        pretend.failing[form] = TensorRTError(f"no {form}")
    with pytest.raises(TensorRTError, match="^no none$"):
        build_fastest(conv_pool())
    for error in (OptionError("shapes are wrong"), OutputError("no such folder")):  # as they would be for every form
        pretend.options.clear()
        pretend.failing["none"] = error
        with pytest.raises(type(error), match=str(error)):
            build_fastest(conv_pool())
        assert list(pretend.options) == ["none"]


def test_a_model_that_has_the_operator_is_refused():
    with pytest.raises(OptionError, match="has ConvAvgPool nodes already; expected the original model"):
        build_fastest(optimize(conv_pool(), check=0).model)


def can_run(monkeypatch) -> None:
    """Pretend that TensorRT and pycuda are installed."""
    for module in (build_cli, pipeline):
        monkeypatch.setattr(module, "check_can_run", lambda *_: None)


def build(folder, *options: str) -> int:
    model, engine, report = folder / "m.onnx", folder / "m.engine", folder / "r.json"
    onnx.save(conv_pool(), model)
    return run(build_command, "convpool-build", [str(model), "-o", str(engine), "--report", str(report), "--autotune", *options])


def test_the_command_shows_the_times_and_writes_the_fastest(pretend, monkeypatch, tmp_path, capsys):
    pretend.failing["direct"] = TensorRTError("out of memory")
    can_run(monkeypatch)
    assert build(tmp_path, "--check", "0") == 0
    assert (tmp_path / "m.engine").read_bytes() == b"convavgpool"
    report = json.loads((tmp_path / "r.json").read_text())
    times, left_out = {"convavgpool": 12.5, "fused": 15.5, "none": 30.5}, {"direct": "out of memory"}
    assert report["autotune"] == {"lowering": "convavgpool", "times_us": times, "left_out": left_out}
    assert report["plugin_nodes"] == {"ConvAvgPool": 2} and report["other_nodes"] == {"Gemm": 1}
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:5] == [
        "lowering us over MODEL", "convavgpool 12.5 2.44 kept", "fused 15.5 1.97 -", "none 30.5 1.00 -",
        "direct - - left out: out of memory",
    ]  # fmt: skip
    assert lines[5] == "plugin 2 ConvAvgPool; TensorRT: 1 Gemm" and lines[6].startswith("written ")
    for option in (["--lowering", "direct"], ["--layers"]):
        assert build(tmp_path, *option) == 2
        assert f"autotune: got {option[0].lstrip('-')} too; expected one of them" in capsys.readouterr().err


def test_the_command_keeps_the_fastest_whose_outputs_agree(pretend, monkeypatch, tmp_path, capsys):
    right = {"fused", "none"}

    def compare(first, second, **_):
        good = second.form in right
        return Verification(good, "", 1, {}, [OutputErrors("y", 0.1, 0.1, good)])

    can_run(monkeypatch)
    for name, value in (("EngineRunner", lambda engine: engine), ("compare_runners", compare)):
        monkeypatch.setattr(pipeline, name, value)
    assert build(tmp_path) == 0
    assert (tmp_path / "m.engine").read_bytes() == b"fused"
    assert "convavgpool 12.5 2.44 left out: output 'y' differs; got 0.1 absolute" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "m.engine").unlink()
    right.clear()
    assert build(tmp_path) == 1 and not (tmp_path / "m.engine").exists()
    found = json.loads((tmp_path / "r.json").read_text())["autotune"]
    assert found["lowering"] is None and found["left_out"].keys() == TIMES.keys()


class FakeDriver:
    """CUDA's driver: which calls were made; those that fail give a number."""

    def __init__(self) -> None:
        self.calls, self.failing, self.graphs, self.capturing = [], {}, 0, 0

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            self.capturing += (name == "cuStreamBeginCapture_v2") - (name == "cuStreamEndCapture")
            if name == "cuStreamBeginCapture_v2":
                assert arguments[1] == 2  # CU_STREAM_CAPTURE_MODE_RELAXED: TensorRT may allocate in a run
            if name in self.failing:
                return self.failing[name]
            if name in ("cuStreamEndCapture", "cuGraphInstantiateWithFlags"):
                arguments[1 if name == "cuStreamEndCapture" else 0]._obj.value = 1
                self.graphs += 1
            self.graphs -= name in ("cuGraphDestroy", "cuGraphExecDestroy")
            return 0

        return call


class CapturedEngine:
    """An engine whose run number `bad` fails; 48 us for every timed graph of 16 calls."""

    def __init__(self, bad: int = 0) -> None:
        self.bad, self.runs = bad, 0
        stream = SimpleNamespace(handle=1)
        self.memory = SimpleNamespace(stream=stream, synchronize=lambda stream: None, elapsed_us=lambda work: work() or 48.0)

    def bind(self, inputs) -> None:
        self.read = [inputs]

    def point(self, inputs) -> None:
        self.read.append(inputs)

    def execute(self) -> None:
        self.runs += 1
        if self.runs == self.bad:
            raise TensorRTError("the run failed")


@pytest.fixture
def driver(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(pipeline.ctypes, "CDLL", lambda name: fake)
    return fake


def test_graphs_are_replayed_in_turn_and_freed(driver):
    times = pipeline.time_in_turn({"a": CapturedEngine(), "b": CapturedEngine()}, [{}], rounds=3)
    assert times == {"a": [3.0] * 3, "b": [3.0] * 3}
    several = [{"x": number} for number in range(3)]
    pipeline.time_in_turn({"a": (engine := CapturedEngine())}, several, rounds=1)
    assert engine.read == [several[0], *(several[call % 3] for call in range(pipeline.LEAST_CALLS))] and engine.runs == 17
    driver.calls.clear()
    pipeline.time_in_turn({"a": CapturedEngine(), "b": CapturedEngine()}, [{}], rounds=3)
    assert driver.calls.count("cuGraphLaunch") == 2 * 2 * (pipeline.WARM_UP_ROUNDS + 3) and driver.graphs == 0


@pytest.mark.parametrize("bad", [1, 5])
def test_an_engine_that_fails_before_or_in_its_capture_is_left_out_or_raises(driver, bad):
    left_out: dict[str, str] = {}
    engines = {"a": CapturedEngine(), "b": CapturedEngine(bad)}
    assert list(pipeline.time_in_turn(engines, [{}], rounds=1, left_out=left_out)) == ["a"]
    assert left_out == {"b": "the run failed"} and driver.graphs == driver.capturing == 0
    driver.failing |= {"cuStreamEndCapture": 901, "cuGraphExecDestroy": 700}
    with pytest.raises(TensorRTError, match="^the run failed$"):  # not what comes of it
        pipeline.time_in_turn({"b": CapturedEngine(bad)}, [{}])


@pytest.mark.parametrize(
    "name", ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags", "cuGraphLaunch"]
)
def test_what_the_driver_refuses_is_an_error_and_leaves_no_graph(driver, name):
    driver.failing[name] = 2
    with pytest.raises(TensorRTError, match="cannot be timed as a CUDA graph; got error 2 of the CUDA driver"):
        pipeline.time_in_turn({"a": CapturedEngine()}, [{}])
    assert driver.graphs == 0
