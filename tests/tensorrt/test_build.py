# SPDX-License-Identifier: Apache-2.0
"""`convpool.tensorrt.build` up to where TensorRT takes over, and convpool-build and convpool-verify without a GPU."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from convpool import VerificationError, optimize
from convpool.check.judge import OutputErrors, Verification
from convpool.check.verify import compare_runners
from convpool.cli import build as build_cli
from convpool.cli.build import _profile, build_command
from convpool.cli.group import run
from convpool.cli.verify import verify_command
from convpool.errors import OptionError, TensorRTError
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
        ("build_prepared", lambda trt, model, options: PretendedEngine(model)),
        ("check_can_run", lambda *_: None),
        ("EngineRunner", lambda engine: engine),
        ("compare_runners", compared),
    ):
        monkeypatch.setattr(pipeline, name, value)
    monkeypatch.setattr(build_cli, "check_can_run", lambda *_: None)
    return seen


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
        ((1, 4, 8), (1, 4, 8), 3), ((1, 4, 8), (2, 4, 6), 3), ((1, 4, 4), (1, 1, 8), 1), ((1, 4, 8), (4, 4, 4), None),
        ((4, 4, 4), (4, 4, 4), None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sides", [(2.0, 2.0), (2.0, 2.1), (2.1, 2.0)])
def test_engines_run_once_more_at_a_size_that_both_profiles_allow(first, second, batch, sides):
    pairs = zip((first, second), sides, strict=True)
    one, other = (PretendedRunner(typical, factor, least, most) for (least, typical, most), factor in pairs)
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
        ({"rtol": float("nan")}, "rtol: got nan, expected a finite number of at least 0"),
    ],
)
def test_options_that_no_model_can_use_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        BuildOptions(**options)
    with pytest.raises(OptionError, match=message):
        build("none.onnx", **options)


@pytest.fixture
def pair(tmp_path):
    """A model and its rewritten form, as files."""
    model = generate("wgan_gp_small", batch=2)
    onnx.save(model, tmp_path / "a.onnx")
    optimize(model, check=0).save(tmp_path / "b.onnx")
    return str(tmp_path / "a.onnx"), str(tmp_path / "b.onnx")


TIMES = "<float c = {FACTOR}> { d = CastLike(c, x) y = Mul(x, d) }"
IN_FP16 = "<float c = {FACTOR}> { h = Cast<to = 10>(x) k = Mul(h, c) y = Cast<to = 1>(k) }"  # and c becomes one


@pytest.mark.parametrize(
    ("kind", "body", "factor", "options", "status"),
    [
        ("float", TIMES, 1.005, [], 1), ("float", TIMES, 1.005, ["--precision", "fp16"], 0),
        ("float", TIMES, 1.05, ["--precision", "fp16"], 1), ("float", TIMES, 1.05, ["--precision", "bf16"], 0),
        ("float", IN_FP16, 1.005, [], 0), ("float16", TIMES, 1.005, [], 0),
        ("float16", TIMES, 1.005, ["--precision", "fp32"], 1), ("float16", TIMES, 1.05, [], 1),
        ("float/float16", TIMES, 1.005, [], 0), ("double/float", TIMES, 1.005, [], 1), ("double/float", TIMES, 1.0, [], 0),
    ],
)  # fmt: skip
def test_verify_judges_by_the_types_of_the_less_exact_side(kind, body, factor, options, status, tmp_path):
    kinds, bodies = kind.split("/") * 2, ("{ y = Identity(x) }", body.replace("FACTOR", str(factor)))
    for name, kind, nodes in zip("ab", kinds, bodies, strict=False):
        text = f"""<ir_version: 8, opset_import: ["": 17]> g ({kind}[1,64] x) => ({kind}[1,64] y) {nodes}"""
        model = onnx.parser.parse_model(text)
        for tensor in model.graph.initializer if nodes.count("Cast<") else ():
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
        onnx.save(model, tmp_path / f"{name}.onnx")
    arguments = [str(tmp_path / "a.onnx"), str(tmp_path / "b.onnx"), "-q", *options]
    assert run(verify_command, "convpool-verify", arguments) == status


@pytest.mark.parametrize("kind", ["double", "bfloat16"])
def test_verify_takes_types_that_onnxruntime_has_no_convolution_for(kind, tmp_path, capsys):
    text = f"""<ir_version: 10, opset_import: ["": 22]> g ({kind}[1,4,8,8] x, {kind}[4,4,3,3] w) => ({kind}[1,4,3,3] y)
        <float c = {{FACTOR}}> {{ h = Conv(x, w) d = CastLike(c, h) t = Mul(h, d)
                                  y = AveragePool<kernel_shape=[2,2], strides=[2,2]>(t) }}"""
    for name, factor in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        onnx.save(onnx.parser.parse_model(text.replace("FACTOR", str(factor))), tmp_path / f"{name}.onnx")
    first, same, other = (str(tmp_path / f"{name}.onnx") for name in "abc")
    assert run(verify_command, "convpool-verify", [first, same, "-q"]) == 0
    assert run(verify_command, "convpool-verify", [first, other, "-q"]) == 1
    broken = onnx.load(same)
    broken.graph.node[0].domain, broken.graph.node[0].op_type = "nobody", "Knows"
    broken.opset_import.add(domain="nobody", version=1)
    onnx.save(broken, tmp_path / "b.onnx")
    capsys.readouterr()
    assert run(verify_command, "convpool-verify", [first, same]) == 2
    assert f"onnxruntime cannot load {same} in float32: " in capsys.readouterr().err


def test_verify_layers_compares_what_both_have(pair, tmp_path):
    report = tmp_path / "report.json"
    assert run(verify_command, "convpool-verify", [*pair, "--layers", "-q", "--report", str(report)]) == 0
    outputs = json.loads(report.read_text())["verification"]["outputs"]
    assert len(outputs) > 5 and all(output["passed"] for output in outputs)


def test_verify_finds_a_wrong_weight_and_the_first_layer_that_has_it(pair, tmp_path, capsys):
    model = onnx.load(pair[1])
    weight = next(t for t in model.graph.initializer if len(t.dims) == 4)
    values = numpy_helper.to_array(weight).copy()
    values.flat[0] += 1.0
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    wrong, report = str(tmp_path / "wrong.onnx"), tmp_path / "report.json"
    onnx.save(model, wrong)
    assert run(verify_command, "convpool-verify", [pair[0], wrong, "--layers", "-q", "--report", str(report)]) == 1
    error = capsys.readouterr().err
    assert "convpool-verify: verification: output '" in error
    assert error.strip().endswith("relative error, expected at most 0.001 of each value + 0.0001 of the largest")
    assert any(not output["passed"] for output in json.loads(report.read_text())["verification"]["outputs"])


def test_verify_refuses_models_of_other_inputs(pair, tmp_path, capsys):
    other = str(tmp_path / "other.onnx")
    onnx.save(generate("densenet_transition1", batch=1), other)
    assert run(verify_command, "convpool-verify", [pair[0], other]) == 2
    assert capsys.readouterr().err.strip() == "convpool-verify: inputs differ; got image and x"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.onnx", "-o", "x.engine"], "none.onnx: no such file"),
        (["MODEL", "-o", "nowhere/x.engine"], "no folder 'nowhere'; make it first"),
        (["MODEL", "-o", "x.engine", "--min-shape", "image:9x3x32x32", "--max-shape", "image:2x3x32x32"], "smallest <= typical"),
        (["MODEL", "-o", "x.engine", "--precision", "fp8"], "'fp8' is not one of"),
        (["MODEL", "-o", "./a.onnx"], "a.onnx: the model itself, which would be overwritten"),
        (["MODEL", "-o", "x.engine", "--timing-cache", "a.onnx"], "a.onnx: the model itself, which would be overwritten"),
        (["MODEL", "-o", "x.engine", "--report", "./x.engine"], "x.engine: another output, which would be overwritten"),
        (["MODEL", "-o", "d.npz", "--data", "d.npz"], "d.npz: --data, which would be overwritten"),
        (["weights.onnx", "-o", "x.engine", "--timing-cache", "w.bin"], "w.bin: weights of the model, which would be"),
        (["MODEL", "-o", "."], ".: a folder; expected a file name"),
        (["MODEL", "-o", "x.engine", "--report", "."], ".: a folder; expected a file name"),
        (["MODEL", "-o", "x.engine", "--timing-cache", "nowhere/t.cache"], "nowhere/t.cache: no folder 'nowhere'; make it first"),
        (["MODEL", "-o", "x.engine", "--timing-cache", "."], ".: a folder; expected a file name"),
    ],
)
def test_build_refuses_in_one_line(pair, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    np.savez("d.npz", image=np.zeros((2, 3, 32, 32), np.float32))
    onnx.save(onnx.load(pair[0]), "weights.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    assert run(build_command, "convpool-build", [pair[0] if a == "MODEL" else a for a in arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("convpool-build: ") and message in lines[0]
    assert not (tmp_path / "x.engine").exists()


def test_build_without_pycuda_says_so_before_it_builds(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pipeline, "tensorrt_module", lambda: None)
    monkeypatch.setattr(pipeline.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(pipeline, "build_prepared", lambda *_: pytest.fail("built"))
    assert run(build_command, "convpool-build", [pair[0], "-o", str(tmp_path / "x.engine")]) == 2
    message = "convpool-build: pycuda: not installed, but the engine is run to be checked; pip install pycuda, or say --check 0"
    assert capsys.readouterr().err.strip() == message
    options = ["--autotune", "--check", "0"]
    assert run(build_command, "convpool-build", [pair[0], "-o", str(tmp_path / "x.engine"), *options]) == 2
    assert capsys.readouterr().err.strip().endswith("run to be timed; pip install pycuda, or leave out --autotune")
    with pytest.raises(TensorRTError, match="run to be checked; pip install pycuda, or say check=0$"):
        build(pair[0])


@pytest.mark.parametrize(("option", "kind"), [(None, None), ("--no-stem", "stem"), ("--no-plain-conv", "plain_conv")])
def test_build_says_which_convolutions_go_to_the_plugin(pair, tmp_path, monkeypatch, capsys, option, kind):
    def build(model, options):
        assert all(getattr(options, one) == (one != kind) for one in ("stem", "plain_conv"))
        raise OptionError("as expected")

    monkeypatch.setattr(build_cli, "build", build)
    options = ["-o", str(tmp_path / "x.engine"), "--check", "0", *([option] if option else [])]
    assert run(build_command, "convpool-build", [pair[0], *options]) == 2
    assert capsys.readouterr().err.strip() == "convpool-build: as expected"


@pytest.mark.parametrize(
    "text",
    ['string[1] y) { y = Constant<value_strings = ["a"]>() z = Neg(x) }', "seq(float[1,2]) y) { y = SequenceConstruct(x, x) }"],
)
def test_verify_refuses_outputs_that_are_no_numbers(tmp_path, capsys, text):
    path = str(tmp_path / "m.onnx")
    onnx.save(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g (float[1,2] x) => ({text}'), path)
    assert run(verify_command, "convpool-verify", [path, path]) == 2
    assert "convpool-verify: output 'y': no tensor of numbers; got " in capsys.readouterr().err


def test_profiles_fill_in_what_is_left_out():
    assert _profile({}, {"x": [4, 3]}, {}) == {"x": ([4, 3], [4, 3], [4, 3])}
    assert _profile({"x": [1, 3]}, {}, {"x": [8, 3]}) == {"x": ([1, 3], [8, 3], [8, 3])}
    assert _profile({}, {}, {}) is None
    with pytest.raises(
        OptionError, match=r"'x'; got \[1, 2\] / \[1, 2, 3\] / \[1, 2, 3\], expected the same rank and smallest <= "
    ):
        BuildOptions(profiles=_profile({"x": [1, 2]}, {"x": [1, 2, 3]}, {}))
