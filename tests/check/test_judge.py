# SPDX-License-Identifier: Apache-2.0
"""How outputs are judged: what differences are, which one counts, and models of less usual types."""

import json
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import convpool
from convpool.check.judge import (
    FLOAT32_TOLERANCE,
    PRECISION_TOLERANCES,
    Judge,
    OutputErrors,
    Tolerance,
    Verification,
    _percent,
    array_errors,
    precision_of,
    worst_of,
)
from convpool.check.session import OnnxruntimeRunner, open_model
from convpool.check.verify import compare_runners
from convpool.cli.group import command
from convpool.cli.group import run as run_command
from convpool.errors import ModelError, OptionError, VerificationError
from convpool.ir.model import LoadedModel, load
from tests.support.models import graph, random_feeds, weights
from tests.support.rewriting import PAIR, POOL
from tests.support.sessions import run

EXACT, TENTH = Tolerance(0.0, 0.0), Tolerance(0.0, 0.1)
NAN, INF = np.nan, np.inf


def arrays(*values):
    return [np.array(each) for each in values]


def test_what_is_allowed():
    assert Tolerance(0.5, 0.1).of(np.array([-2.0, 4.0])).tolist() == pytest.approx([1.4, 2.4])
    assert Tolerance(0.5, 0.1, 3.0).of(np.array([-2.0, 4.0])).tolist() == [4.0, 5.0]
    assert str(Tolerance(0.5, 0.1)) == "0.5 of each value + 0.1 of the largest"
    assert str(Tolerance(0.5, 0.1, 3.0)) == "0.5 of each value + 3"
    assert list(PRECISION_TOLERANCES.values()) == [(1e-3, 1e-4), (2e-2, 1e-2), (2e-2, 1e-2), (1e-1, 5e-2)]


@pytest.mark.parametrize(
    ("reference", "result", "wanted"),
    [
        ([2.0, 4.0], [2.0, 4.0], (0, 0, True, 0, "")),
        ([2.0, -4.0], [2.0, -3.6], (0.4, 0.1, True, 0, "")),
        ([2.0, -4.0], [1.5, -4.0], (0.5, 0.125, False, 0, "")),
        ([0.0, 0.0], [0.0, 0.0], (0, 0, True, 0, "")),
        ([0.0, 0.0], [0.0, 0.25], (0.25, 1, False, 0, "")),
        ([2.0, NAN], [2.0, NAN], (0, 0, True, 0.5, "")),
        ([2.0, INF, NAN, 4.0], [2.0, INF, NAN, 4.2], (0.2, 0.05, True, 0.5, "")),
        ([2.0, INF], [2.0, -INF], (INF, INF, False, 0, "NaN or infinity in other places")),
        ([2.0, 4.0], [2.0, NAN], (INF, INF, False, 0, "NaN or infinity in other places")),
        ([2.0, NAN], [2.0, 4.0], (INF, INF, False, 0, "NaN or infinity in other places")),
        ([NAN, INF], [NAN, INF], (0, 0, True, 1, "")),
        ([], [], (0, 0, True, 0, "")),
        ([2.0], [2.0, 2.0], (INF, INF, False, 0, "shape (2,), expected (1,)")),
    ],
)
def test_differences_of_arrays(reference, result, wanted):
    found = array_errors("y", *arrays(reference, result), TENTH)
    assert (found.max_abs_error, found.max_rel_error) == pytest.approx(wanted[:2])
    assert (found.passed, found.not_finite, found.note) == wanted[2:]


def test_the_worse_of_two_runs_counts():
    good, better = OutputErrors("y", 2, 2, True), OutputErrors("y", 1, 1, True)
    bad, worse = OutputErrors("y", 1, 1, False), OutputErrors("y", 2, 2, False)
    assert worst_of(None, good) is good
    pairs = ((good, better, good), (better, good, good), (good, bad, bad), (bad, good, bad), (worse, bad, worse))
    for first, second, worst in pairs:
        assert worst_of(first, second) is worst


def test_the_precision_of_types():
    given = ([], ["float32", "int64"], ["float16", "float32"])
    assert [precision_of(map(np.dtype, kinds)) for kinds in given] == ["fp32", "fp32", "fp16"]
    assert precision_of([np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)]) == "bf16"


def judged(reference, result, **more):
    """The one output's outcome and the verdict."""
    judge = Judge(["y"], more.pop("tolerance", EXACT), own_error_counts=more.pop("own", False))
    judge.add([reference], [result], **more)
    verdict = judge.verdict("the original", 1, {})
    return verdict.outputs[0], verdict


def test_an_output_that_differs_from_itself_is_random_and_alone_proves_nothing():
    one, other = arrays([1.0], [2.0])
    found, verdict = judged(one, other, again=lambda: [other])
    assert found.passed and found.note == "random" and not verdict.passed and not found.max_abs_error
    for again in arrays([1.0], [1.2]):  # it stays, or moves by less than a quarter of the error
        assert not judged(one, other, again=lambda again=again: [again])[0].passed
    judge = Judge(["y", "z"], EXACT)
    judge.add([one, one], [other, one], again=lambda: [other, one])
    assert judge.verdict("", 1, {}).passed
    assert Judge([], EXACT).verdict("", 1, {}).passed


def test_twice_the_original_s_own_error_counts_only_where_that_is_said():
    reference, original, result = arrays([1.0, 2.0], [1.0, 2.5], [1.0, 3.0])
    assert judged(reference, result, original=[original], own=True)[1].passed
    assert not judged(reference, result + [0, 0.01], original=[original], own=True)[1].passed
    assert not judged(reference, result, original=[original])[1].passed
    assert not judged(reference, result, own=True)[1].passed
    (overflown,) = arrays([np.inf, 2.5])  # says nothing of the other element
    assert judged(reference, overflown, original=[overflown], own=True)[1].passed
    assert not judged(reference, overflown * [-1, 1], original=[overflown], own=True)[1].passed
    assert not judged(reference, *arrays([9.0, 9.0]), original=[overflown], own=True)[1].passed


@pytest.mark.parametrize(
    ("result", "nudged", "passed"),
    [
        ([0, 0, 0, 1.0], [[0, 0, 0, 0.5]], True), ([0, 0, 0, 1.1], [[0, 0, 0, 0.5]], False),
        ([1.0, 1.0, 1.0, 1.0], [[0, 0, 0, 0.5]], True), ([1.0, 1.0, 1.0, 1.0], [[0, 0, 0, 0.0]], False),
        ([0, 0, 0, 1.0], [[0, 0, 0, 0.0], [0, 0.5, 0, 0]], True), ([0, 0, 0, 1.0], [[0, 0, 0, NAN]], False),
        ([0, 0, 0, 1.0], [[0, 0, 0.5]], False), ([0, 0, 0, 1.0], [[0, 0, 0, INF], [0, 0, 0, 1.0]], False),
    ],
)  # fmt: skip
def test_an_original_that_jumps_alike(result, nudged, passed):
    found, _ = judged(np.zeros(4), np.array(result), nudge=lambda: [[np.array(each)] for each in nudged])
    assert found.passed == passed
    assert (found.note == "differs only where the original is discontinuous") == passed


def test_at_most_four_times_as_many_elements_jump():
    reference, nudged = np.zeros(8), np.array([1.0] + [0.0] * 7)
    for count in (4, 5):
        result = np.array([1.0] * count + [0.0] * (8 - count))
        assert judged(reference, result, nudge=lambda: [[nudged]])[0].passed == (count == 4)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize(
    ("factor", "count", "moved", "own", "passed"),
    [
        (1.5, 64, 1.0, None, False),
        (1.005, 64, 1.0, None, True),  # within ten times the rtol of the scores
        (1.5, 64, 1.4, None, True),  # the original does the same to itself
        (1.5, 8, 1.0, None, True),  # too few of them to tell how large they are
        (1.5, 64, 1.0, 1.2, True),  # half precision does as much
        (1.5, 64, 1.0, 1.05, False),
        (1.5, 64, 1.0, NAN, True),
    ],
)
def test_scores_beside_boxes_have_a_tolerance_of_their_own(axis, factor, count, moved, own, passed):
    """Four rows of boxes in pixels and one of scores: the largest number of the output allows each of these to be off by all."""
    reference = np.full((1, 5, count), 640.0)
    reference[:, 4] = 0.04
    scales = [np.where(reference < 1, value, 1) for value in (factor, moved, own or 1)]
    result, nudged, original = (np.moveaxis(reference * scale, 1, axis) for scale in scales)
    options = {"own": own is not None, "tolerance": Tolerance(*FLOAT32_TOLERANCE), "original": [original]}
    found, verdict = judged(np.moveaxis(reference, 1, axis), result, nudge=lambda: [[nudged]], **options)
    assert found.passed == passed
    told = "0.02 absolute in a slice of small numbers, where 0.0009 are allowed" in verdict.difference
    assert told == (own is None and not passed)
    assert judged(np.moveaxis(reference, 1, axis), result, **options)[0].passed  # with a tolerance that a user gives


def test_a_huge_number_in_half_precision_allows_nothing_to_others():
    reference = np.full((1, 32, 36), 0.5)
    reference[0, 3, 7] = 6e4
    options = {"own": True, "tolerance": Tolerance(*PRECISION_TOLERANCES["fp16"]), "original": [reference]}
    for factor, passed in ((1.1, True), (-1.0, False)):
        result = np.where(reference < 1, factor * reference, reference)
        assert judged(reference, result, nudge=lambda: [[reference]], **options)[0].passed == passed


def test_indices_have_no_distance():
    reference, result, nudged = arrays([1, 1], [1, 900], [1, 2])
    assert judged(reference, result, nudge=lambda: [[nudged]])[0].passed
    floats = [each.astype(float) for each in (reference, result, nudged)]
    assert not judged(*floats[:2], nudge=lambda: [[floats[2]]])[0].passed


def test_slightly_changed_inputs_are_run_once_for_all_outputs():
    runs, judge = [], Judge(["y", "z"], EXACT)
    zero, one = arrays([0.0], [1.0])
    judge.add([zero, zero], [one, one], nudge=lambda: runs.append(1) or [[one, one]])
    assert judge.verdict("", 1, {}).passed and runs == [1]
    judge.add([zero, zero], [zero, zero], nudge=lambda: runs.append(1))
    assert runs == [1]


def test_how_a_run_was_made_is_told_where_it_differs():
    zero, one = arrays([0.0], [0.123456])
    assert judged(zero, one, how="with that")[0].note == "0.123 absolute with that"
    assert judged(zero, np.zeros(2), how="with that")[0].note == "shape (2,), expected (1,) with that"
    assert judged(zero, zero, how="with that")[0].note == ""


def test_shares_of_nan_are_the_mean_over_the_runs_and_one_run_has_to_have_numbers():
    judge = Judge(["y"], EXACT)
    for values in ([NAN, 1.0], [1.0, 1.0]):
        judge.add(arrays(values), arrays(values))
    verdict = judge.verdict("", 2, {})
    assert verdict.passed and verdict.outputs[0].not_finite == 0.25
    found, verdict = judged(*arrays([NAN], [NAN]))
    assert not verdict.passed and found.note == "every value is NaN or infinite in the original"
    judge.add(arrays([NAN]), arrays([NAN]))
    assert judge.verdict("", 3, {}).passed


@pytest.mark.parametrize(
    ("reference", "result", "passed"),
    [
        (np.array(["a"], object), np.array(["a"], object), True),
        (np.array(["a"], object), np.array(["b"], object), False),
        (np.array([1 + 1j]), np.array([1 + 2j]), False),
        ([np.zeros(1), np.ones(2)], [np.zeros(1), np.ones(2)], True),
        ([np.zeros(1), np.ones(2)], [np.ones(1), np.ones(2)], False),
        ([np.zeros(1)], [np.zeros(1), np.zeros(1)], False),
        ([np.array([1.0, NAN])], [np.array([1.0, NAN])], True),
        ({1: 2.0}, {1: 2.0}, True),
        ({1: 2.0}, {1: 3.0}, False),
        (None, None, True),
        (None, np.zeros(1), False),
    ],
)
def test_other_kinds_of_outputs(reference, result, passed):
    found, verdict = judged(reference, result)
    assert found.passed == passed and verdict.passed == (passed and reference is not None)  # nothing is no evidence
    assert (found.max_abs_error > 0) == (found.max_rel_error > 0) == (not passed)


def verdict(*outputs: OutputErrors) -> Verification:
    return Verification(False, "the original", 1, {}, list(outputs), "little")


def test_a_verdict_in_words():
    fine = OutputErrors("fine", 9.0, 9.0, True)
    small, large = OutputErrors("small", 2.0, 0.1, False), OutputErrors("large", 1.0, 0.25, False)
    odd = OutputErrors("odd", 0.0, 0.0, False, "every value is NaN")
    words = "output '{}' differs; got {} relative error, expected at most little"
    assert verdict(fine, small, large).difference == words.format("large", "1 absolute, 0.25")
    noted = OutputErrors("noted", 1.0, 0.5, False, "another shape")
    assert verdict(small, noted).difference == words.format("noted", "another shape, 0.5")
    assert verdict(fine).difference.startswith("no output can be compared; ")
    assert verdict(fine, odd).difference.startswith("output 'odd' cannot be compared; every value is NaN; ")
    assert [verdict(*outputs).differs for outputs in ((fine,), (odd,), (odd, small))] == [False, False, True]


def test_shares_that_are_not_finite_in_words():
    assert verdict(OutputErrors("a", 0, 0, True)).not_finite == ""
    outputs = (OutputErrors(name, 0, 0, True, "", share) for name, share in (("a", 0.25), ("b", 0.0), ("c", 1.0)))
    assert verdict(*outputs).not_finite == "25 % of a, 100 % of c is NaN or infinite in both"
    assert [_percent(share) for share in (1e-9, 0.0005, 0.5, 0.99999, 1)] == ["0.1 %", "0.1 %", "50 %", "99.9 %", "100 %"]


def words(*given: str) -> onnx.ModelProto:
    """A model that looks strings up."""
    return graph("y = Gather(words, i)", {"words": np.array(given, object)}, inputs="int64[16] i", outputs="string[16] y")


def maps(factor: float, labels: str = "[3,5]") -> onnx.ModelProto:
    """A model that gives a sequence of dictionaries."""
    body = f"m = Mul(x, k)\ny = ai.onnx.ml.ZipMap<classlabels_int64s={labels}>(m)"
    given = {"inputs": "float[2,2] x", "outputs": "seq(map(int64, float)) y", "imports": ', "ai.onnx.ml": 1'}
    return graph(body, {"k": np.float32(factor)}, **given)


def sequence(names: str) -> onnx.ModelProto:
    return graph(f"y = SequenceConstruct({names})", inputs="float[2] x", outputs="seq(float[2]) y")


OTHER_KINDS = {  # a model, one that gives the same, and others
    "strings": (words("a", "b"), words("a", "b", "c"), words("a", "c")),
    "a sequence": (sequence("x"), sequence("x"), sequence("x, x")),
    "a longer sequence": (sequence("x, x"), sequence("x, x"), sequence("x")),
    "maps": (maps(1), maps(1), maps(2), maps(1, "[3,4]")),
}


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_models_that_give_other_kinds(name):
    model, same, *others = OTHER_KINDS[name]
    assert convpool.verify(model, same).passed
    for other in others:
        (output,) = convpool.verify(model, other).outputs
        assert not output.passed and output.max_abs_error == np.inf


@pytest.mark.parametrize(("second", "given", "noted"), [(2e-3, {}, True), (1e-3, {}, False), (2e-3, {"atol": 1.0}, False)])
def test_small_numbers_beside_large_ones_are_noted_of_engines(second, given, noted):
    body = "a = Mul(x, large)\nb = Mul(x, small)\ny = Concat<axis=1>(a, b)"
    models = (graph(body, {"large": np.float32(640), "small": np.float32(small)}) for small in (1e-3, second))
    found = compare_runners(*(OnnxruntimeRunner(LoadedModel(model, None, 0), "a model") for model in models), **given)
    assert found.passed and len(found.doubts) == noted
    assert not noted or found.doubts[0].startswith("y: 0.00") and "absolute in a slice of small numbers" in found.doubts[0]


def test_models_and_engines_with_open_sizes_are_compared_at_two(tmp_path, monkeypatch, capsys):
    """The command does so too, and reports the other sizes."""
    monkeypatch.chdir(tmp_path)
    texts = {"mean": "y = GlobalAveragePool(x)", "window": "y = AveragePool<kernel_shape=[64,64]>(x)"}
    for name, text in {**texts, "reshaped": "t = Reshape(x, s)\ny = GlobalAveragePool(t)"}.items():
        onnx.save(graph(text, {"s": [1, 16, 64, 64]}, inputs="float[N,16,H,W] x"), f"{name}.onnx")
    found = compare_runners(*(open_model(load(f"{name}.onnx")) for name in ("mean", "window")))
    assert not found.passed and found.other_shapes == {"x": [3, 16, 65, 67]}
    assert found.outputs[0].note == "shape (3, 16, 2, 4), expected (3, 16, 1, 1) at x:3x16x65x67"
    for names, status in ((("mean", "mean"), 0), (("mean", "window"), 1), (("mean", "reshaped"), 1), (("reshaped", "mean"), 0)):
        assert run_command(command, "convpool", ["verify", *(f"{name}.onnx" for name in names), "--report", "r.json"]) == status
        if names[1] != "reshaped":
            other = json.loads(Path("r.json").read_text())["verification"]["other_shapes"]
            assert other == ({} if names[0] == "reshaped" else {"x": [3, 16, 65, 67]})
        else:
            assert "the first runs at x:3x16x65x67, but not the second" in capsys.readouterr().err


def test_a_result_that_cannot_be_checked_is_not_given():
    """No random inputs can be made for it."""
    given = {"inputs": "float[1,16,12,12] x, seq(float[2]) s", "outputs": "float[a,b,c,d] y, int64 n"}
    model = graph(f"{PAIR}\nn = SequenceLength(s)", **given)
    assert convpool.optimize(model, check=0).changed
    for run_it in (convpool.optimize, lambda model: convpool.verify(model, model)):
        with pytest.raises(ModelError, match="input 's': not a tensor; give it as data or switch the check off"):
            run_it(model)


def test_unusable_inputs_are_refused_even_where_nothing_is_rewritten():
    model = graph("y = Relu(x)")
    assert not convpool.optimize(model, input_shapes={"x": [1, 16, 12, 12]}).changed
    with pytest.raises(OptionError, match="input shape: no input 'q'; expected one of x"):
        convpool.optimize(model, input_shapes={"q": [1]})
    with pytest.raises(OptionError, match="data: array 'q'; expected inputs x"):
        convpool.optimize(model, data={"q": np.zeros(1, np.float32)})


def test_a_shape_for_no_input_of_engines_is_refused():
    """Engines say no more of their inputs than names, types and sizes."""
    engine = SimpleNamespace(
        input_names=["x"], output_names=["y"], input_types={"x": np.dtype(np.float32)}, precision="fp32",
        runtime="an engine", model=None, ranges=lambda: {"x": ([2], [2], [3])}, run=lambda arrays: {"y": arrays["x"]},
    )  # fmt: skip
    assert compare_runners(engine, engine, input_shapes={"x": [3]}).passed
    with pytest.raises(OptionError, match="input shape: no input 'q'; expected one of x"):
        compare_runners(engine, engine, input_shapes={"q": [1]})


WIDENED = {
    "a sequence": ("s = SequenceConstruct(x, x)\ny = SequenceAt(s, one)", helper.make_sequence_type_proto),
    "an optional": ("s = Optional(x)\ny = OptionalGetElement(s)", helper.make_optional_type_proto),
}


@pytest.mark.parametrize("kind", ["float16", "double"])
@pytest.mark.parametrize(("body", "wrap"), WIDENED.values(), ids=WIDENED)
def test_types_of_inner_values_become_float32(body, wrap, kind):
    model = graph(body, {"one": np.int64(1)}, inputs=f"{kind}[2,3] x", outputs=f"{kind}[2,3] y", opset=18)
    elem_type = model.graph.input[0].type.tensor_type.elem_type
    model.graph.value_info.append(helper.make_value_info("s", wrap(helper.make_tensor_type_proto(elem_type, [2, 3]))))
    wide = LoadedModel(model, None, 0).in_float32().proto
    (x,) = random_feeds(wide).values()
    assert x.dtype == np.float32
    np.testing.assert_array_equal(run(wide, {"x": x})[0], x)
    assert convpool.verify(model, model).passed


def test_types_within_functions_and_of_attributes_become_float32():
    """Also the types that the bodies in a function note of what they give, and those that calls give, or defaults."""
    functions = """<opset_import: ["": 17, "local": 1], domain: "local"> net <n> (a) => (b) { b = local.halved<k: int=@n>(a) }
    <opset_import: ["": 17], domain: "local"> halved <k, m: int=10> (a) => (b) { c = Neg(a) e = EyeLike<dtype: int=@m>(c)
    d = Cast<to: int=@k>(e) f = Add(c, d) t = Constant<value=bool {1}>() n = Constant<value=int64 {3}>()
    w = HannWindow<output_datatype=10>(n) v = Mul(w, d) b = If(t) <then_branch = yes () => (float16[3,3] g) { g = Identity(f) },
              else_branch = no () => (float16[3,3] h) { h = Neg(f) }> }"""
    given = {"inputs": "float16[3,3] x", "outputs": "float16[3,3] y", "ir": 10}
    model = graph("y = local.net<n=10>(x)", functions=functions, **given)
    model.functions[1].value_info.append(helper.make_tensor_value_info("c", TensorProto.FLOAT16, [3, 3]))
    wide = LoadedModel(model, None, 0).in_float32().proto
    assert wide.functions[1].value_info[0].type.tensor_type.elem_type == TensorProto.FLOAT
    x = random_feeds(wide)["x"]
    np.testing.assert_array_equal(run(wide, {"x": x})[0], np.eye(3, dtype=np.float32) - x)


# ---- outputs without a value, and outputs that are the same for all inputs -----------------------------------------------

PICKED = "g = Greater(p, t)\nnz = NonZero(g)\ny = Transpose<perm=[1,0]>(nz)"
SCORES = f"{PICKED}\nz = GatherND(p, y)"
INDEXED = SCORES.replace("y", "i")
EMPTY = {
    "indices of what is above a threshold": (PICKED, "int64[k,4] y", ["y"]),
    "these and their scores": (SCORES, "int64[k,4] y, float[k] z", ["y", "z"]),
    "scores alone": (f"{INDEXED}\ny = Identity(z)", "float[k] y", ["y"]),
    "halves": (f"{SCORES}\nh = Cast<to=10>(z)", "float16[k] h", ["h"]),
    "flags": (f"{SCORES}\nb = Cast<to=9>(z)", "bool[k] b", ["b"]),
    "bytes": (f"{SCORES}\nu = Cast<to=2>(z)", "uint8[k] u", ["u"]),
    "words": (f"{SCORES}\ns = Cast<to=8>(z)", "string[k] s", ["s"]),
    "boxes": ("q = Reshape(p, three)\nb = Reshape(p, four)\ny = NonMaxSuppression(b, q, most, half, t)", "int64[k,3] y", ["y"]),
    "a slice of no rows": ("r = Slice(p, zero, zero, zero)\ny = Identity(r)", "float[a,b,c,d] y", ["y"]),
    "compressed": ("m = Mul(p, o)\ng = Greater(m, t)\nf = Reshape(g, one)\ny = Compress(p, f)", "float[k] y", ["y"]),
    "rows of a table": (f"{PICKED.replace('y', 'i')}\ny = Gather<axis=0>(table, i)", "float[k,l,m] y", ["y"]),
    "sums over nothing": (f"{INDEXED}\ne = Unsqueeze(z, one0)\ny = ReduceMean<axes=[1]>(e)", "float[k,l] y", ["y"]),
}
TABLE = {"three": [1, 4, -1], "four": [1, -1, 4], "most": [5], "zero": [0], "one": [-1], "one0": [1], "table": (36, 2)}
TABLE |= {"half": np.float32(0.5), "o": np.float32(1)}


def detector(name: str, factor: float = 1.0, threshold: float = 1e9, extra: str = "") -> onnx.ModelProto:
    """A model whose outputs are empty unless a value of its pooling is above the threshold."""
    body, outputs, _ = EMPTY[name]
    constants = {**TABLE, "t": np.float32(threshold), "w": factor * weights((32, 16, 3, 3))}
    return graph(f"c = Conv<pads=[1,1,1,1]>(x, w)\np = {POOL}(c)\n{body}", constants, outputs=outputs + extra)


@pytest.mark.parametrize("name", EMPTY)
def test_outputs_without_any_value_prove_nothing(name):
    model, names = detector(name), EMPTY[name][2]
    with pytest.raises(VerificationError, match=f"^verification: no output can be compared: {names[0]} is empty") as caught:
        convpool.optimize(model)
    assert "--data" in str(caught.value) and '"passed": false' in caught.value.report.to_json()
    found = convpool.verify(model, detector(name, 0))
    assert not found.passed and not found.differs and [o.note for o in found.outputs] == ["empty"] * len(names)
    assert [(o.compared, o.passed) for o in found.outputs] == [(0, True)] * len(names)
    with pytest.raises(VerificationError):
        convpool.optimize(model, data=random_feeds(model))


@pytest.mark.parametrize("name", [name for name in EMPTY if name not in ("a slice of no rows", "boxes", "words")])
def test_larger_inputs_reach_a_threshold(name):
    """The first ones give nothing; what larger ones give is compared."""
    model = detector(name, threshold=150)
    found = convpool.optimize(model).report.verification
    assert found.passed and found.outputs[0].compared and found.inputs > 1
    assert any("times as large, since outputs were empty before" in text for text in found.doubts)
    assert not convpool.verify(model, detector(name, 0, threshold=150)).passed


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_output_beside_others_is_named(name):
    report = convpool.optimize(detector(name, extra=", float[a,b,c,d] p")).report
    found = {output.name: output for output in report.verification.outputs}
    assert report.verification.passed and found["p"].compared == 32 * 36 * 2 and found["p"].note == ""
    for output in EMPTY[name][2]:
        assert (found[output].compared, found[output].note) == (0, "empty")
    assert report.verification.doubts[0] == f"nothing to compare in {', '.join(EMPTY[name][2])}: empty"


def test_a_sequence_without_elements_and_an_optional_without_a_value():
    for body, kind in (
        ("y = SequenceEmpty()", "seq"),
        ("n = SequenceConstruct(x)\ny = SequenceErase(n)", "seq"),
        ("y = Optional<type=float[4]>()", "optional"),
    ):
        model = graph(f"{body}\nz = Neg(x)", inputs="float[4] x", outputs=f"{kind}(float) y, float[4] z")
        found = convpool.verify(model, model)
        assert found.passed and [(o.compared, o.note) for o in found.outputs] == [(0, "empty"), (8, "")]
        del model.graph.output[1], model.graph.node[-1]
        assert not convpool.verify(model, model).passed


def test_a_model_without_inputs_may_be_as_it_is():
    for body, outputs, compared in (("y = Neg(k)", "float[3] y", 6), ("y = Slice(k, zero, zero)", "float[a] y", 0)):
        model = graph(body, {"k": (3,), "zero": [0]}, inputs="", outputs=outputs)
        found = convpool.verify(model, model)
        assert found.passed and found.notes == ["the model has no inputs"]
        assert (found.outputs[0].compared, found.outputs[0].constant) == (compared, False)


CONV = "Conv<pads=[1,1,1,1]>"
CONSTANT = {
    "weights of 0": f"h = {CONV}(x, n, b)\ny = {POOL}(h)",
    "a factor of 0 in front": f"m = Mul(x, o)\nh = {CONV}(m, w, b)\ny = {POOL}(h)",
    "a factor of 0 behind": f"{PAIR.replace('y =', 'p =')}\nm = Mul(p, o)\ny = Add(m, big)",
    "cut off below": f"{PAIR.replace('y =', 'p =')}\ny = Clip(p, big)",
    "cut off above": f"{PAIR.replace('y =', 'p =')}\ny = Clip(p, , low)",
    "small beside its bias": f"{PAIR.replace('y =', 'p =')}\ny = Add(p, huge)",
    "saturated": f"{PAIR.replace('y =', 'p =')}\nd = Add(p, big)\ny = Sigmoid(d)",
    "of another tensor": f"m = Mul(x, o)\nh = {CONV}(k, w)\ny = {POOL}(h)\nu = Neg(m)",
}
VALUES = {"n": np.zeros((32, 16, 3, 3), np.float32), "b": (32,), "o": np.float32(0), "k": (1, 16, 12, 12)}
VALUES |= {"big": np.float32(1e3), "low": np.float32(-1e3), "huge": np.float32(1e8)}


@pytest.mark.parametrize("name", CONSTANT)
@pytest.mark.parametrize("options", [{}, {"check": 3}, {"data": True}])
def test_outputs_that_do_not_depend_on_the_inputs_are_named(name, options):
    model = graph(CONSTANT[name], VALUES)
    if options.get("data"):
        options = {"data": random_feeds(model)}
    report = convpool.optimize(model, **options).report
    assert report.verification.passed and [output.constant for output in report.verification.outputs] == [True]
    assert report.verification.doubts == ["y: the same for other inputs, so that agreement proves little"]
    assert '"constant": true' in report.to_json()
    both = graph(f"{CONSTANT[name]}\nz = Neg(x)", VALUES, outputs="float[a,b,c,d] y, float[a,b,c,e] z")
    assert [output.constant for output in convpool.verify(both, both, **options).outputs] == [True, False]


@pytest.mark.parametrize("extra", ["s = Shape(h)", "s = ArgMax<axis=1>(h)\nr = Neg(s)", "s = Cast<to=7>(m)"])
def test_whole_numbers_that_stay_are_told_only_where_nothing_else_varies(extra):
    body = f"m = Mul(x, o)\nh = Add(m, k)\n{extra}"
    alone = graph(body, VALUES, outputs="int64[a] s")
    alone.graph.output[0].type.tensor_type.ClearField("shape")
    assert [output.constant for output in convpool.verify(alone, alone).outputs] == [True]
    beside = graph(f"{body}\ny = Neg(x)", VALUES, outputs="int64[a] s, float[a,b,c,d] y")
    beside.graph.output[0].type.tensor_type.ClearField("shape")
    assert [output.constant for output in convpool.verify(beside, beside).outputs] == [False, False]


def test_a_usual_output_is_not_constant():
    for model in (graph(PAIR), graph("y = Relu(x)"), graph("y = Gather(k, x)", {"k": (4, 2)}, inputs="int64[9] x")):
        assert not convpool.verify(model, model).outputs[0].constant
    found = convpool.optimize(graph(PAIR), data=random_feeds(graph(PAIR))).report.verification
    assert found.doubts == [] and found.outputs[0].compared == 2 * 32 * 36
