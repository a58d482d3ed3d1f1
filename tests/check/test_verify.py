# SPDX-License-Identifier: Apache-2.0
"""Verification: what it must catch, in every type, what it must let pass, outputs that are not finite, and float32 models."""

import json
import os
import subprocess
import sys
from contextlib import suppress

import ml_dtypes  # noqa: F401  numpy knows bfloat16 by it
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import convpool
from convpool.check import session as runners
from convpool.cli.group import run
from convpool.cli.optimize import command
from convpool.cli.verify import verify_command
from convpool.errors import ModelError, VerificationError
from convpool.ir.model import LoadedModel
from tests.support.models import TYPES as ARRAYS
from tests.support.models import graph, random_feeds, weights
from tests.support.rewriting import POOL

PAIR = f"h = Conv<pads=[1,1,1,1]>(x, w, b)\ny = {POOL}(h)"
TYPES = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}


def pair(dtype: str = "float32", body: str = PAIR, **given) -> onnx.ModelProto:
    """Convolution with bias and pooling in the given type."""
    given.setdefault("inputs", f"{TYPES[dtype]}[1,16,12,12] x")
    given.setdefault("outputs", f"{TYPES[dtype]}[a,b,c,d] y")
    given.setdefault("opset", 22)  # the first with bfloat16 convolutions
    model = graph(body, {"b": (32,), **given.pop("constants", {})}, ir=10, **given)
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype == np.float32:
            wanted = helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
            tensor.CopyFrom(numpy_helper.from_array(array.astype(wanted), tensor.name))
    return model


def change(model: onnx.ModelProto, name: str, function) -> onnx.ModelProto:
    """A copy in which initializer `name` is `function` of itself."""
    result = onnx.ModelProto.FromString(model.SerializeToString())
    tensor = next(tensor for tensor in result.graph.initializer if tensor.name == name)
    array = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(function(array)).astype(array.dtype), name))
    return result


def swap(array: np.ndarray) -> np.ndarray:
    """Two channels exchanged."""
    return array[:, [1, 0, *range(2, array.shape[1])]]


GAINS = {"float16": 1.1, "bfloat16": 1.3, "float32": 1.005, "float64": 1.005}
"""A factor on the weights just beyond each type's tolerances."""
BREAKS = {
    "weights off by a little": lambda model, dtype: change(model, "w", lambda w: w.astype(np.float64) * GAINS[dtype]),
    "one weight": lambda model, dtype: change(
        model, "w", lambda w: np.where(np.arange(w.size).reshape(w.shape), w, w.dtype.type(9))
    ),
    "input channels swapped": lambda model, dtype: change(model, "w", swap),
    "filters swapped": lambda model, dtype: change(model, "w", lambda w: w[::-1]),
    "kernel mirrored": lambda model, dtype: change(model, "w", lambda w: w[..., ::-1]),
    "bias lost": lambda model, dtype: change(model, "b", np.zeros_like),
    "pads shifted": lambda model, dtype: pair(dtype, PAIR.replace("[1,1,1,1]", "[0,0,2,2]")),
    "pads lost in the mean": lambda model, dtype: pair(
        dtype, "p = AveragePool<kernel_shape=[2,2], pads=[1,1,1,1]>(x)\ny = Conv<strides=[2,2]>(p, w, b)"
    ),
    "maximum for mean": lambda model, dtype: pair(dtype, PAIR.replace("AveragePool", "MaxPool")),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", BREAKS)
def test_broken_results_are_caught(name, dtype):
    model = pair(dtype)
    verification = convpool.verify(model, BREAKS[name](model, dtype))
    assert not verification.passed and not verification.outputs[0].passed
    assert verification.outputs[0].max_abs_error > 0


BRANCHED = f"""m = ReduceMean<keepdims=0>(x) q = CONDITION(m, m)
y = If(q) <then_branch = t () => (TYPE[a,b,c,d] p) {{ g = Conv(x, v) p = {POOL}(g) }},
           else_branch = e () => (TYPE[a,b,c,d] o) {{ h = Conv(x, w, b) r = LAST o = {POOL}(r) }}>"""


def branched(dtype: str, condition: str, last: str = "Identity(h)") -> onnx.ModelProto:
    """Two pairs in the branches of an If, which takes the first one if the condition is Equal."""
    text = BRANCHED.replace("TYPE", TYPES[dtype]).replace("CONDITION", condition).replace("LAST", last)
    return pair(dtype, text, constants={"w": (32, 16, 3, 3), "v": (32, 16, 3, 3), "wrong": [7, 11, 2, 2]})


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize(("condition", "taken"), [("Equal", "v"), ("Greater", "w")])
def test_both_branches_of_an_if_are_compared(dtype, condition, taken, tmp_path):
    model, files = branched(dtype, condition), [str(tmp_path / f"{name}.onnx") for name in "ab"]
    report = convpool.optimize(model).report
    assert [site.status for site in report.sites] == ["rewritten"] * 2 and not report.verification.doubts
    for name in "vw":
        for file, held in zip(files, (model, wrong := change(model, name, lambda w: w[::-1])), strict=True):
            onnx.save(held, file)
        difference = convpool.verify(model, wrong).difference
        assert difference.startswith("output 'y' differs") and ("branches of each If exchanged" in difference) == (name != taken)
        assert run(verify_command, "convpool-verify", files) == 1


def test_a_branch_that_cannot_run_is_named():
    verification = convpool.optimize(branched("float32", "Equal", "Reshape(h, wrong)")).report.verification
    assert verification.passed and verification.notes[0].startswith("a branch of each If was not run: onnxruntime cannot run")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("lowering", ["convavgpool", "direct", "fused"])
def test_right_results_pass(dtype, lowering):
    result = convpool.optimize(pair(dtype), lowering=lowering, check=2)
    verification = result.report.verification
    assert result.report.summary.rewritten == 1 and verification.passed
    assert (verification.inputs, verification.input_shapes) == (2, {"x": [1, 16, 12, 12]})
    reference = "the original in onnxruntime" + ("" if dtype == "float32" else ", in float32")
    assert verification.reference == reference
    limits = {"float16": 2e-3, "bfloat16": 2e-2}  # 2 and 2.6 units in the last place of weights and sums
    assert verification.outputs[0].max_rel_error < limits.get(dtype, 2e-6)


def quantised() -> onnx.ModelProto:
    body = PAIR.replace("y =", "p =") + "\nq = QuantizeLinear(p, s, z)\ny = DequantizeLinear(q, s, z)"
    constants = {"s": np.float32(0.13), "z": np.uint8(128), "w": (64, 16, 3, 3), "b": (64,)}
    return pair(body=body, constants=constants, inputs="float[2,16,64,64] x")


def test_swapped_channels_of_a_quantised_output_are_caught():
    model = quantised()
    assert not convpool.verify(model, change(model, "w", swap)).passed
    assert not convpool.verify(model, change(model, "w", lambda w: w * 1.01)).passed


@pytest.mark.parametrize("seed", range(4))
def test_last_bits_that_decide_over_a_quantisation_step_pass(seed):
    output = convpool.optimize(quantised(), seed=seed).report.verification.outputs[0]
    assert output.passed and output.max_abs_error in (0.0, pytest.approx(0.13, rel=1e-5))


@pytest.mark.parametrize("seed", [4, 9, 19, 29])
def test_a_step_of_half_precision_passes_that_the_original_does_not_take(seed):
    constants = {"k": np.float16(1), "w": (4, 16, 3, 3), "b": (4,)}
    model = pair("float16", PAIR.replace("y =", "p =") + "\nm = Mul(p, k)\ny = Round(m)", constants=constants)
    assert convpool.verify(model, convpool.optimize(model, check=0).model, seed=seed).outputs[0].passed
    assert not convpool.verify(model, change(model, "w", lambda w: w * np.float16(1.1)), seed=seed).passed


@pytest.mark.parametrize("seed", [5, 7, 9])
def test_only_as_many_steps_of_half_precision_pass_as_the_original_takes(seed):
    """It takes a few, and the wrong weights hundreds, but none of two."""
    model = pair("float16", PAIR.replace("y =", "p =") + "\nm = Mul(p, k)\ny = Round(m)", constants={"k": np.float16(0.25)})
    found = convpool.verify(model, change(model, "w", lambda w: w * np.float16(1.1)), seed=seed)
    assert not found.passed and found.outputs[0].max_abs_error == 1


@pytest.mark.parametrize(("kind", "large", "small"), [("float", 640, 1e-3), ("float16", 64, 1e-2)])
def test_scores_beside_large_boxes_are_compared(kind, large, small):
    body = "h = Conv(x, w)\nb = Mul(h, large)\nt = Conv(x, s)\ns1 = Mul(t, small)\ny = Concat<axis=1>(b, s1)"
    shapes = {"w": (32, 16, 1, 1), "s": (4, 16, 1, 1)}
    constants = {name: weights(shape, dtype=ARRAYS[kind]) for name, shape in shapes.items()}
    constants |= {name: ARRAYS[kind](value) for name, value in (("large", large), ("small", small))}
    outs = {"inputs": f"{kind}[1,16,12,12] x", "outputs": f"{kind}[a,b,c,d] y"}
    model, wrong = (graph(body, constants | {"s": constants["s"][::step]}, **outs) for step in (1, -1))
    assert convpool.verify(model, model).passed
    found = convpool.verify(model, wrong)
    assert not found.passed and found.outputs[0].max_rel_error < 1e-3 and "a slice of small numbers" in found.difference


def test_a_sigmoid_near_0_is_judged_by_what_it_reads():
    constants = {"w": weights((8, 16, 3, 3)) / 300, "b": np.full(8, -16.6, np.float32)}
    model = graph(f"{PAIR.replace('y =', 'p =')}\ny = Sigmoid(p)", constants, inputs="float[1,16,64,64] x")
    found = convpool.optimize(model, lowering="direct").report.verification
    assert found.passed and found.notes == ["y: judged by what the Sigmoid in front reads"]
    wrong = change(model, "w", lambda w: w * np.float32(1.1))
    found, strict = (convpool.verify(model, wrong, rtol=rtol) for rtol in (None, 1e-3))
    assert not found.passed and not strict.passed and found.outputs[0].max_abs_error < 1e-6


@pytest.mark.parametrize("rtol", [None, 1e-3])
def test_indices_near_one_another_are_others(tmp_path, rtol):
    """Unless a caller gives a tolerance."""
    models = [graph("y = Add(x, p)", {"p": [shift]}, inputs="int64[4] x", outputs="int64[4] y") for shift in (5000, 5002)]
    found = convpool.verify(*models, rtol=rtol)
    assert (found.passed, found.outputs[0].max_abs_error) == (rtol is not None, 2)
    assert found.allowed.endswith("whole numbers the same") == (rtol is None)
    paths = [str(tmp_path / f"{number}.onnx") for number in range(2)]
    for model, path in zip(models, paths, strict=True):
        onnx.save(model, path)
    given = [] if rtol is None else ["--rtol", str(rtol)]
    assert run(verify_command, "convpool-verify", [*paths, "-q", *given]) == (rtol is None)


def test_outputs_that_only_one_of_two_has_are_named(tmp_path, capsys):
    paths = []
    for names in ("yz", "y", "z"):
        outputs = ", ".join(f"float[a,b,c,d] {name}" for name in names)
        paths.append(str(tmp_path / f"{names}.onnx"))
        onnx.save(graph("\n".join(f"{name} = Relu(x)" for name in names), outputs=outputs), paths[-1])
    assert [run(verify_command, "convpool-verify", pair) for pair in (paths[:2], paths[1:])] == [0, 2]
    told = capsys.readouterr()
    assert "note  not compared, in one of them alone: z\n" in told.out
    assert told.err == "convpool-verify: no output in common; got y and z\n"


def test_given_tolerances_hold_to_the_letter():
    model = pair()
    error = convpool.optimize(model).report.verification.outputs[0].max_abs_error
    assert error > 0
    assert convpool.optimize(model, rtol=0, atol=error).report.verification.passed
    with pytest.raises(VerificationError):
        convpool.optimize(model, rtol=0, atol=error / 2)


@pytest.mark.parametrize("sizes", ["N,16,H,W", "?,16,?,?"])
def test_open_dimensions_get_sizes(sizes):
    model = pair(inputs=f"float[{sizes}] x")
    assert convpool.optimize(model).report.verification.input_shapes == {"x": [1, 16, 64, 64]}
    shapes = {"x": [3, 16, 10, 14]}
    assert convpool.optimize(model, input_shapes=shapes).report.verification.input_shapes == shapes


def test_seed_decides_over_the_inputs():
    first, again, other = (convpool.optimize(pair(), seed=seed).report.verification for seed in (1, 1, 2))
    assert first == again and first != other


def test_arrays_from_a_file(tmp_path):
    data = np.linspace(-1, 1, 16 * 144, dtype=np.float32).reshape(1, 16, 12, 12)
    np.savez(tmp_path / "in.npz", x=data)
    stored = convpool.optimize(pair(), data=tmp_path / "in.npz").report.verification
    assert stored == convpool.optimize(pair(), data={"x": data}).report.verification
    assert stored != convpool.optimize(pair()).report.verification
    assert stored.inputs == 1


def test_random_output_is_named_but_another_one_decides():
    body = PAIR + "\nh2 = Relu(x)\nr = RandomNormalLike(h2)"
    model = pair(body=body, outputs="float[a,b,c,d] y, float[1,16,12,12] r", opset=17)
    verification = convpool.optimize(model).report.verification
    assert [(output.name, output.passed) for output in verification.outputs] == [("y", True), ("r", True)]
    assert verification.outputs[1].note == "random" and "nothing to compare in r: random" in verification.doubts


def test_integer_and_boolean_outputs_are_compared():
    body = PAIR + "\nz = Constant<value = float {0.0}>()\nm = Greater(y, z)\ni = ArgMax<axis=1>(y)"
    model = pair(body=body, outputs="float[a,b,c,d] y, bool[a,b,c,d] m, int64[a,e,c,d] i")
    assert [output.max_abs_error for output in convpool.optimize(model).report.verification.outputs[1:]] == [0.0, 0.0]
    broken = convpool.verify(model, change(model, "w", swap))
    assert [output.passed for output in broken.outputs] == [False, False, False]


def test_progress_of_the_check():
    seen = []
    convpool.optimize(pair(), check=3, progress=lambda *step: seen.append(step))
    assert seen == [(1, 3, "checking"), (2, 3, "checking"), (3, 3, "checking")]


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal of its own")
def test_progress_is_shown_on_a_terminal_alone(tmp_path):
    import pty

    onnx.save(pair(), tmp_path / "model.onnx")
    words = [sys.executable, "-m", "convpool.cli", str(tmp_path / "model.onnx"), "--check", "3"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    ours, theirs = pty.openpty()
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=theirs, env=environment, check=True)
    os.close(theirs)
    shown = ""
    with open(ours, "rb", buffering=0) as terminal, suppress(OSError):  # at its end a terminal gives EIO
        while more := terminal.read(2**16):
            shown += more.decode(errors="replace")
    assert "checking" in shown and "3/3" in shown and b"checking" not in done.stdout
    assert shown.rstrip().endswith("\x1b[2K"), "the bar stays"
    assert subprocess.run(words, capture_output=True, check=True).stderr == b""


def test_a_result_that_cannot_run_is_an_error():
    broken = pair(body=PAIR.replace("x, w, b", "x, w, b, b"))
    with pytest.raises(ModelError):
        convpool.verify(pair(), broken)


def test_inputs_that_share_a_symbolic_dimension_agree_on_it():
    inputs, outputs = "float[2,N,3] state, float[N,2,H,H] x", "float[N,2,P,P] y, float[2,N,3] s"
    model = graph(f"c = Conv(x, w)\ny = {POOL}(c)\ns = Identity(state)", {"w": (2, 2, 1, 1)}, inputs=inputs, outputs=outputs)
    found = convpool.optimize(model).report.verification
    assert found.passed and found.input_shapes["state"] == [2, 1, 3] and found.input_shapes["x"][0] == 1
    found = convpool.optimize(model, input_shapes={"x": [4, 2, 8, 8]}).report.verification
    assert found.passed and found.input_shapes["state"] == [2, 4, 3]


@pytest.mark.parametrize("body", ["y = Unknown(x)", "s = Shape(x)\nt = Add(s, s)\ny = Reshape(x, t)"])
def test_a_result_that_does_not_run_fails_the_verification(body):
    given = {"inputs": "float[1,2,8,8] x", "outputs": "float[1,2,8,8] y"}
    with pytest.raises(VerificationError, match="not the result"):
        convpool.verify(graph("y = Relu(x)", **given), LoadedModel(graph(body, **given), None, 0))


@pytest.mark.parametrize("others", ["", "z", "y, z", "z, y"])
def test_a_result_with_other_outputs_is_refused(others):
    """Outputs were compared by place alone: others passed, and too few ended in an IndexError."""

    def named(names: str) -> onnx.ModelProto:
        found = graph("y = Relu(x)\nz = Relu(x)", inputs="float[4] x", outputs="float[4] y, float[4] z")
        kept = [value for name in names.split(", ") for value in found.graph.output if value.name == name]
        found.graph.ClearField("output")
        found.graph.output.extend(kept or [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])])
        return found

    for names in ("y", "y, z"):
        if names == others:
            assert convpool.verify(named(names), named(others)).passed
            continue
        with pytest.raises(
            VerificationError, match=f"^verification: the result's outputs; got {others or 'x'}, expected {names}$"
        ):
            convpool.verify(named(names), named(others))


class Harmed:
    """A session whose runs give something else."""

    def __init__(self, session) -> None:
        self._session = session

    def __getattr__(self, name):
        return getattr(self._session, name)

    def run(self, names, feed):
        return [-array for array in self._session.run(names, feed)]


@pytest.fixture(params=["not loaded", "other numbers"])
def optimisations(request, monkeypatch):
    """onnxruntime with optimisations that break or change what has a Pad, as those of 1.31 and older do with some."""
    Session = runners.Session

    def harming(model, *, optimize, **options):
        harmed = optimize and any(node.op_type == "Pad" for node in model.proto.graph.node)
        if harmed and request.param == "not loaded":
            raise RuntimeError("pads: too large")
        session = Session(model, optimize=optimize, **options)
        return Harmed(session) if harmed else session

    monkeypatch.setattr(runners, "Session", harming)
    return request.param


@pytest.mark.parametrize("kind", ["float", "double", "float16", "bfloat16"])
def test_a_result_that_onnxruntimes_own_optimisations_harm_fails(kind, optimisations):
    shapes = dict(inputs=f"{kind}[1,1,8] x", outputs=f"{kind}[a,b,c] y")
    zeros = np.zeros((1, 1, 1), np.dtype({"float": "float32", "double": "float64"}.get(kind, kind)))
    pool = "AveragePool<kernel_shape=[2], strides=[2]>"
    original = graph(f"c = Concat<axis=2>(z, x, z)\ny = {pool}(c)", {"z": zeros}, **shapes)
    result = graph(f"c = Pad(x, p)\ny = {pool}(c)", {"p": [0, 0, 1, 0, 0, 1]}, **shapes)
    if optimisations == "not loaded":
        with pytest.raises(VerificationError, match="graph optimisations, on by default, take the original, but not the result"):
            convpool.verify(original, result)
    else:
        found = convpool.verify(original, result)
        assert not found.passed and found.outputs[0].note.endswith("with onnxruntime's graph optimisations")
    assert convpool.verify(original, original).passed
    assert convpool.verify(result, result).passed  # what they do to the original is not the result's fault


@pytest.mark.parametrize("nothing", ["i = Identity(q)", "i = Add(q, o)", "i = Pad(q, n)", "t = Transpose(q)\ni = Transpose(t)"])
def test_a_pad_that_a_pooling_reads_too_stays_in_front_of_both(nothing):
    """onnxruntime 1.31 merges one into a MaxPool that alone reads it, where its zeros are no numbers to choose from."""
    shapes = dict(inputs="float[1,16,10,10] x", outputs="float[a,b,c,d] y, float[a,b,e,f] z")
    pool, most = "AveragePool<kernel_shape=[2,2], strides=[2,2]>", "MaxPool<kernel_shape=[2,2], strides=[2,2]>"
    body = f"q = Pad(x, p)\nh = Conv(q, w)\ny = {pool}(h)\n{nothing}\nm = {most}(i)\nz = Neg(m)"
    original = graph(body, {"p": [0, 0, 1, 1, 0, 0, 1, 1], "o": np.float32(0), "n": [0] * 8}, **shapes)
    made = convpool.optimize(original, data={"x": -np.abs(random_feeds(original)["x"])})
    first = made.model.graph.node[0]
    second = next(node for node in made.model.graph.node if node.op_type == "ConvAvgPool")
    assert first.op_type == "Pad" and second.input[0] == first.output[0]


def test_a_model_without_pairs_that_onnxruntime_does_not_load_is_refused():
    model = graph("y = Add(x, k)", {"k": (5,)})
    assert not convpool.optimize(model, check=0).changed
    with pytest.raises(ModelError, match="cannot load the original"):
        convpool.optimize(model, check=1)


def custom(body: str, **given) -> onnx.ModelProto:
    """A model with an operator that onnxruntime does not have."""
    return graph(body, {"b": (32,), **given.pop("constants", {})}, imports=', "own": 1', **given)


def test_an_original_that_onnxruntime_cannot_load_is_not_the_results_fault():
    model = custom("t = own.Unknown(x)\n" + PAIR.replace("(x,", "(t,"))
    assert convpool.optimize(model, check=0).report.summary.rewritten == 1
    with pytest.raises(ModelError, match="onnxruntime cannot load the original"):
        convpool.optimize(model)
    with pytest.raises(ModelError, match="onnxruntime cannot load the original"):
        convpool.verify(model, model)


def test_weights_of_an_unknown_type_are_rewritten():
    body = f"v = own.Unknown(x)\nh = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, v, b)\ny = {POOL}(h)"
    assert convpool.optimize(custom(body), check=0, lowering="direct").report.summary.rewritten == 1


OVERFLOW = "s = Mul(x, huge)\nh = Conv<pads=[1,1,1,1]>(s, w)\ny = " + POOL + "(h)"


def overflowing(factor: float, **given) -> onnx.ModelProto:
    return pair(body=OVERFLOW, constants={"huge": np.float32(factor)}, **given)


def test_outputs_without_a_finite_value_prove_nothing():
    model = change(pair(), "w", lambda w: w * np.nan)
    for result in (model, change(model, "b", np.zeros_like)):
        found = convpool.verify(model, result)
        assert not found.passed and not found.differs
        assert found.outputs[0].not_finite == 1 and found.not_finite == "100 % of y is NaN or infinite in both"
    with pytest.raises(VerificationError) as caught:
        convpool.optimize(model)
    reason = "verification: output 'y' cannot be compared; every value is NaN or infinite in the original; give other inputs "
    assert str(caught.value) == f"{reason}with --data, or leave the check out with --no-check"
    assert '"not_finite": 1.0' in caught.value.report.to_json()
    assert convpool.optimize(model, check=0).changed


def test_one_output_of_several_without_a_finite_value():
    body = PAIR + "\nn = Mul(x, nan)\nv = Conv(n, w)\nz = " + POOL + "(v)"
    model = pair(body=body, constants={"nan": np.float32(np.nan)}, outputs="float[a,b,c,d] y, float[e,f,g,h] z")
    found = convpool.verify(model, model)
    assert [(output.passed, output.not_finite) for output in found.outputs] == [(True, 0.0), (False, 1.0)]


@pytest.mark.parametrize(("factor", "scale"), [(1e35, 1.0), (1e37, 2.0**-4), (3e38, 2.0**-8)])
def test_inputs_are_made_smaller_where_everything_overflows(factor, scale, monkeypatch):
    seen, values = [], runners.OnnxruntimeRunner.values

    def recorded(self, arrays):
        seen.append(float(np.abs(arrays["x"]).max()))
        return values(self, arrays)

    monkeypatch.setattr(runners.OnnxruntimeRunner, "values", recorded)
    model = overflowing(factor)
    found = convpool.optimize(model, check=2).report.verification
    assert found.passed and found.outputs[0].max_rel_error < 1e-5 and found.outputs[0].not_finite == 0
    assert found.input_scale == scale
    assert seen[-1] == pytest.approx(scale * 4, rel=0.5)
    assert not convpool.verify(model, change(model, "w", swap)).passed


def test_given_inputs_are_not_made_smaller():
    model, data = overflowing(3e38), {"x": np.full((1, 16, 12, 12), 100, np.float32)}
    assert not convpool.verify(model, model, data=data).passed
    assert convpool.verify(model, model, data={"x": data["x"] * 1e-6}).passed


def test_the_share_that_is_not_finite_is_told(capsys, tmp_path):
    def broken(w):
        w = w.copy()
        w[:8] = np.nan
        return w

    onnx.save(change(pair(), "w", broken), tmp_path / "model.onnx")
    report = tmp_path / "report.json"
    assert run(command, "convpool-optimize", [str(tmp_path / "model.onnx"), "--report", str(report)]) == 0
    assert "25 % of y is NaN or infinite in both" in capsys.readouterr().out
    (output,) = json.loads(report.read_text())["verification"]["outputs"]
    assert output["passed"] and output["not_finite"] == 0.25
    assert convpool.optimize(pair()).report.verification.not_finite == ""


def test_the_command_writes_nothing_that_is_not_proven(capsys, tmp_path):
    path, report = tmp_path / "model.onnx", tmp_path / "report.json"
    onnx.save(change(pair(), "w", lambda w: w * np.nan), path)
    assert run(command, "convpool-optimize", [str(path), "--report", str(report)]) == 1
    captured = capsys.readouterr()
    assert "NOT COMPARABLE" in captured.out and "DIFFERS" not in captured.out
    assert captured.err.count("\n") == 1 and "--data" in captured.err and "--no-check" in captured.err
    assert json.loads(report.read_text())["verification"]["passed"] is False
    assert not (tmp_path / "model.convpool.onnx").exists()
    assert run(command, "convpool-optimize", [str(path), "--no-check", "-q"]) == 0


def test_every_type_of_a_model_becomes_float32():
    functions = """<domain: "local", opset_import: ["": 17]> net (f) => (g) { g = Cast<to=11>(f) }"""
    body = """d = Cast<to=11>(x) e = Cast<to=7>(d)
      c = local.net(d)
      k = Constant<value = double[1] {2.0}>() s = SequenceConstruct(d, k)
      y = If(flag) <then_branch = yes () => (double[a] t) { t = Identity(c) },
        else_branch = no () => (double[a] u) { u = Neg(d) }>"""
    model = graph(body, {"w": (1,)}, inputs="float16[4] x, bool flag", outputs="double[a] y", functions=functions)
    model.functions[0].value_info.append(helper.make_tensor_value_info("g", TensorProto.DOUBLE, [4]))
    model.graph.value_info.append(helper.make_tensor_sequence_value_info("s", TensorProto.DOUBLE, None))
    optional = helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.BFLOAT16, [1]))
    model.graph.value_info.append(helper.make_value_info("o", optional))
    before, found = model.SerializeToString(), LoadedModel(model, None, 0).in_float32().proto
    assert model.SerializeToString() == before
    assert [item.type.tensor_type.elem_type for item in (*found.graph.input, *found.graph.output)] == [1, TensorProto.BOOL, 1]
    casts = [node.attribute[0].i for node in (*found.graph.node, *found.functions[0].node) if node.op_type == "Cast"]
    assert casts == [1, TensorProto.INT64, 1] and found.functions[0].value_info[0].type.tensor_type.elem_type == 1
    (constant,) = [node.attribute[0].t for node in found.graph.node if node.op_type == "Constant"]
    assert numpy_helper.to_array(constant).dtype == np.float32 and numpy_helper.to_array(constant).tolist() == [2]
    sequence, maybe = (value.type for value in found.graph.value_info)
    assert sequence.sequence_type.elem_type.tensor_type.elem_type == 1
    assert maybe.optional_type.elem_type.tensor_type.elem_type == 1
    (branching,) = (node for node in found.graph.node if node.op_type == "If")
    assert [item.g.output[0].type.tensor_type.elem_type for item in branching.attribute] == [1, 1]
