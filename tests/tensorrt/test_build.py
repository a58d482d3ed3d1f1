# SPDX-License-Identifier: Apache-2.0
"""`convpool.tensorrt.build` up to where TensorRT takes over: what is loaded, checked, kept and reported."""

import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import onnx
import pytest

from convpool import VerificationError, optimize
from convpool.check.judge import OutputErrors, Verification
from convpool.check.verify import compare_runners
from convpool.cli import build as build_cli
from convpool.cli.group import run
from convpool.errors import OptionError, TensorRTError
from convpool.ir import model as models
from convpool.ir.index import index_model
from convpool.ir.model import LoadedModel, infer_shapes, load
from convpool.tensorrt import BuildOptions, EngineMismatchError, build, build_engine, pipeline
from models.generators import generate

TRT_86 = SimpleNamespace(__name__="tensorrt", __version__="8.6.1")


class PretendedEngine:
    """An engine of the operators of a model."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.plan, self.built_from = b"plan", Counter(node.op_type for node in model.graph.node)

    def save(self, path) -> None:
        Path(path).write_bytes(self.plan)


@pytest.fixture
def judged(monkeypatch):
    """Engines without TensorRT, whose outputs agree unless `agrees` is made false; `compared` holds the comparisons' options."""
    seen = SimpleNamespace(agrees=True, compared=[])

    def compared(first, second, **options):
        seen.compared.append(options)
        return Verification(seen.agrees, "the first", 1, {}, [OutputErrors("y", 0.5, 0.25, seen.agrees)], "0")

    for name, value in (
        ("build_plan", lambda trt, model, options: PretendedEngine(model)),
        ("check_can_run", lambda *_: None),
        ("EngineRunner", lambda engine: engine),
        ("compare_runners", compared),
    ):
        monkeypatch.setattr(pipeline, name, value)
    monkeypatch.setattr(build_cli, "check_can_run", lambda *_: None)
    return seen


def count_calls(monkeypatch, *functions) -> Counter[str]:
    """How often the package calls each of the functions, by name, from now on; loading what is loaded does not count."""
    calls: Counter[str] = Counter()

    def counted(function):
        def wrapper(first, *rest, **keywords):
            calls[function.__name__] += not (function is load and isinstance(first, LoadedModel))
            return function(first, *rest, **keywords)

        return wrapper

    for module in [module for name, module in sys.modules.items() if name.startswith("convpool")]:
        for name, value in list(vars(module).items()):
            if any(value is function for function in functions):
                monkeypatch.setattr(module, name, counted(value))
    infer = onnx.shape_inference.infer_shapes

    def inferred(*arguments, **keywords):
        calls["onnx"] += 1
        return infer(*arguments, **keywords)

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", inferred)
    return calls


@pytest.mark.parametrize("lowering", ["convavgpool", "direct", "none"])
def test_a_model_is_loaded_once_and_looked_at_no_more_often_than_by_optimize(judged, monkeypatch, tmp_path, lowering):
    """The check against onnxruntime included: the build itself neither infers shapes nor indexes the graph again."""
    path = tmp_path / "model.onnx"
    onnx.save(generate("densenet_transition1", batch=2), path)
    monkeypatch.setattr(pipeline, "tensorrt_module", lambda: TRT_86)
    calls = count_calls(monkeypatch, load, infer_shapes, index_model)
    if lowering == "none":
        models.load(path)
    else:
        optimize(path, lowering=lowering, check=0)
    by_optimize = dict(calls)
    calls.clear()
    arguments = [str(path), "-o", str(tmp_path / "m.engine"), "--lowering", lowering, "-q"]
    assert run(build_cli.build_command, "convpool-build", arguments) == 0
    assert dict(calls) == by_optimize and len(judged.compared) == 1
    assert calls["load"] == 1 and calls["onnx"] <= 2 and calls["index_model"] <= 3


def test_an_engine_is_compared_unless_that_is_left_out(judged):
    model = generate("wgan_gp_small", batch=2)
    arrays = {"image": np.zeros((2, 3, 32, 32), np.float32)}
    options = BuildOptions(precision="tf32", seed=3, plain_conv=False, trt=TRT_86)
    built = build(model, options)
    assert built.verification.passed and built.lowering == "fused" and built.times_us == {}
    assert 0 <= built.report.build_seconds < 60
    assert judged.compared[0] | {"check": 1, "precision": "tf32", "seed": 3, "data": None} == judged.compared[0]
    assert build(model, options, check=0).verification is None and len(judged.compared) == 1
    assert build(model, options, check=0, data=arrays).verification.passed and judged.compared[1]["data"] == arrays
    assert isinstance(build_engine(model, options, data=arrays), PretendedEngine) and len(judged.compared) == 2


def test_an_engine_whose_outputs_disagree_comes_with_the_error(judged):
    judged.agrees = False
    with pytest.raises(EngineMismatchError, match="verification: output 'y' differs; got 0.5 absolute") as found:
        build(generate("wgan_gp_small", batch=2), trt=TRT_86)
    assert isinstance(found.value, VerificationError)
    built = found.value.built
    assert not built.verification.passed and built.engine.plan == b"plan" and built.plugin_nodes
    assert built.report.to_dict()["verification"]["outputs"][0]["max_rel_error"] == 0.25


def test_the_report_says_which_nodes_the_plugin_runs(judged):
    model = generate("densenet_transition1", batch=2)
    with_plugin, without = (build(model, trt=TRT_86, plugin=plugin, lowering="convavgpool") for plugin in (True, False))
    (name,) = with_plugin.plugin_nodes
    assert name.endswith("ConvAvgPool") and with_plugin.report.other_nodes == {}
    assert without.plugin_nodes == {} and without.report.other_nodes == {name: 1}


class PretendedRunner:
    """Doubles an input, as an engine without a GPU would."""

    runtime, model, precision = "TensorRT", None, "fp32"
    input_names, output_names, input_types = ["x"], ["y"], {"x": np.dtype(np.float32)}

    def __init__(self, typical: int, factor: float = 2.0, least: int | None = None, most: int | None = None) -> None:
        self.profile = [[n or typical, 3] for n in (least, typical, most)]
        self.factor, self.given = factor, []

    def run(self, arrays):
        self.given.append(arrays["x"])
        return {"y": self.factor * arrays["x"]}

    def ranges(self):
        return {"x": self.profile}


@pytest.mark.parametrize(
    ("first", "second", "batch"),
    [
        ((1, 4, 8), (1, 4, 8), 3),
        ((1, 4, 8), (2, 4, 6), 3),
        ((1, 4, 4), (1, 1, 8), 1),
        ((1, 4, 8), (4, 4, 4), None),
        ((4, 4, 4), (4, 4, 4), None),
    ],
)
@pytest.mark.parametrize("sides", [(2.0, 2.0), (2.0, 2.1), (2.1, 2.0)])
def test_engines_run_once_more_at_a_size_that_both_profiles_allow(first, second, batch, sides):
    one, other = (
        PretendedRunner(typical, factor, least, most)
        for (least, typical, most), factor in zip((first, second), sides, strict=True)
    )
    found = compare_runners(one, other)
    assert found.passed == (sides[0] == sides[1]) and found.input_shapes == {"x": [4, 3]}
    assert found.other_shapes == ({} if batch is None else {"x": [batch, 3]})
    assert [len(x) for x in other.given] == [4, *([batch] if batch else [])]


class OnlyAtFour(PretendedRunner):
    """Gives the same as a `PretendedRunner` for one batch alone: an error, or other numbers, for others."""

    def run(self, arrays):
        if self.factor and len(arrays["x"]) != 4:
            raise TensorRTError("no kernel")
        return {"y": 2 * arrays["x"] + (len(arrays["x"]) != 4)}


def test_a_second_engine_that_holds_only_for_one_size():
    first = PretendedRunner(4, least=1, most=8)
    with pytest.raises(VerificationError, match="the first runs at x:3x3, but not the second: no kernel"):
        compare_runners(first, OnlyAtFour(4, least=1, most=8))
    found = compare_runners(first, OnlyAtFour(4, factor=0, least=1, most=8))
    assert not found.passed and found.outputs[0].note == "1 absolute at x:3x3"
    found = compare_runners(OnlyAtFour(4, least=1, most=8), first)
    assert found.passed and found.other_shapes == {}


def test_two_engines_are_compared_on_the_first_one_s_typical_shapes():
    first, second = PretendedRunner(4), PretendedRunner(7)
    found = compare_runners(first, second, check=2)
    assert found.passed and found.inputs == 2 and found.reference == "the first in TensorRT"
    # The first runs once more, on other inputs: an output that does not change proves little.
    assert [x.shape for x in first.given] == [(4, 3)] * 3 and len({x.tobytes() for x in first.given}) == 3
    assert all(map(np.array_equal, first.given, second.given)) and len(second.given) == 2 and found.input_shapes == {"x": [4, 3]}
    assert compare_runners(first, second, input_shapes={"x": [5, 3]}).input_shapes == {"x": [5, 3]}
    data = {"x": np.ones((1, 3), np.float32)}
    assert compare_runners(first, second, data=data).input_shapes == {"x": [1, 3]} and any(x is data["x"] for x in second.given)
    assert not compare_runners(first, PretendedRunner(4, factor=2.01)).passed
    assert compare_runners(first, PretendedRunner(4, factor=2.01), precision="tf32").passed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, "precision: got 'fp8', expected one of fp32, tf32, fp16, bf16"),
        ({"lowering": "plugin"}, "lowering: got 'plugin', expected one of convavgpool"),
        ({"autotune": True, "layers": True}, "autotune: got layers too; expected one of them"),
        ({"autotune": True, "lowering": "direct"}, "autotune: got lowering too; expected one of them"),
        ({"check": -1}, "check: got -1, expected 0 or more"),
        ({"seed": -1}, "seed: got -1, expected 0 or more"),
    ],
)
def test_options_that_no_model_can_use_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        BuildOptions(**options)
    with pytest.raises(OptionError, match=message):
        build("none.onnx", **options)


def test_importing_the_package_imports_no_tensorrt():
    import subprocess

    code = "import sys, convpool.tensorrt; print([name for name in ('tensorrt', 'pycuda') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_package_names_a_function_and_no_module_build():
    import convpool.tensorrt

    assert not isinstance(convpool.tensorrt.build, ModuleType)
