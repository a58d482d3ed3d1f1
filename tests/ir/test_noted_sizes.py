# SPDX-License-Identifier: Apache-2.0
"""Sizes that are no truth: notes of another size, -1, names used twice.  NOTED_MODELS sets the number of random models."""

import os
from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import convpool
from convpool.check.inputs import InputMaker
from convpool.cli.group import command, run
from convpool.errors import ModelError, VerificationError
from convpool.ir.model import SUGGESTED_SIZE, load, passes_full_check, suggested, with_sizes
from tests.support import noted_models, sessions
from tests.support.data_files import assert_same_outputs
from tests.support.models import graph, index, random_feeds
from tests.support.rewriting import PAIR, POOL, assert_close

MODELS = int(os.environ.get("NOTED_MODELS", "60"))
TARGETS = ("any", "cpu", "cuda", "tensorrt")
SHARE = 1e-5
"""A share of the largest output."""
ONES = np.ones((1, 16, 12, 12), np.float32)


def outcome(seed: int) -> tuple[str, list[str]]:
    """Rewrite the model of a seed: whether it is, and what is wrong with that at three sizes."""
    noted, rng = noted_models.make(seed), np.random.default_rng(seed)
    target = TARGETS[seed % len(TARGETS)]
    result = convpool.optimize(noted.model, check=0, target=target)
    wrong, ran = [], 0
    for feeds in (noted.feeds(rng) for _ in range(3 * result.changed)):
        shapes = {name: array.shape for name, array in feeds.items()}
        try:
            expected = sessions.run(noted.model, feeds)
        except Exception:  # onnxruntime holds some bodies to their notes
            continue
        ran += 1
        try:
            got = sessions.run(result.model, feeds)
        except Exception as error:
            wrong.append(f"{seed} {target}, {noted.words}: at {shapes} {error}")
            continue
        for one, other in zip(expected, got, strict=True):
            if one.shape != other.shape or np.abs(one - other).max() > SHARE * np.abs(one).max():
                wrong.append(f"{seed} {target}, {noted.words}: at {shapes} {other.shape} for {one.shape}")
    if result.changed and ran and seed % 4 == 0:  # nor does the check find fault
        try:
            assert convpool.optimize(noted.model, target=target).report.verification.passed
        except ModelError:
            pass  # the original does not run at the check's sizes
        except VerificationError as error:
            wrong.append(f"{seed} {target}, {noted.words}: {error}")
    return "rewritten" if ran else "does not run" if result.changed else "stays", wrong


def test_notes_of_other_sizes_make_no_wrong_model():
    counts: Counter[str] = Counter()
    wrong = []
    for seed in range(MODELS):
        kind, found = outcome(seed)
        counts[kind] += 1
        wrong += found
    print(f"\n{MODELS} models: {dict(counts)}")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(text[:400] for text in wrong)
    assert counts["rewritten"] >= 0.25 * MODELS


SPELLINGS = [
    ["n", 16, "h", "w"], [-1, 16, -1, -1], [None, 16, None, None], ["n", 16, "n", "n"], ["n", 16, "n", 32],
    ["s", 16, -1, "s"],
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", SPELLINGS)
def test_open_sizes_in_any_spelling_stay_as_they_are(shape, target):
    """Once more by -1 in a note.  The check runs at two sizes, of which no window is larger than its map."""
    model = graph(PAIR)
    x = model.graph.input[0]
    x.CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, shape))
    model.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, [-1, 32, -1, -1]))
    result = convpool.optimize(model, target=target)
    assert result.changed and result.model.graph.input[0] == x
    found = result.report.verification
    (first,), (other,) = found.input_shapes.values(), found.other_shapes.values()
    assert min(first[2:]) > 1 and [n for n in other[2:] if n != 32] and all(n % 2 for n in other[2:] if n != 32)
    assert all(b != a or isinstance(n, int) and n > 0 for a, b, n in zip(first, other, shape, strict=True))


@pytest.mark.parametrize("names", [("n", "n"), ("n", "m"), (-1, -1), (None, None)])
def test_one_name_on_two_inputs_makes_no_residual(names):
    """onnxruntime runs them with batches of 2 and 1, and widens the second one."""
    model = graph(f"{PAIR.replace('y =', 'q =')}\ny = Add(q, r)", inputs="float[1,16,12,12] x, float[1,32,6,6] r")
    for value, name in zip(model.graph.input, names, strict=True):
        sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        value.CopyFrom(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, [name, *sizes[1:]]))
    result = convpool.optimize(model, target="cuda").model
    assert [node.op_type for node in result.graph.node] == ["ConvAvgPool", "Add"]
    assert_close(model, result, {"x": np.repeat(ONES, 2, 0), "r": np.ones((1, 32, 6, 6), np.float32)}, SHARE)


def test_a_size_of_0_is_one():
    """onnxruntime takes no other there."""
    (scope,) = index(graph("y = Relu(x)", inputs="float[0,16,12,12] x"))
    assert scope.info("y").shape == (0, 16, 12, 12)


@pytest.mark.parametrize("runs", [True, False])
def test_an_original_that_takes_no_other_size_is_checked_at_one(runs):
    """Its Reshape takes no other."""
    target = [-1, 16, 8, 8] if runs else [1, 16, 8, 8]
    model = graph(f"r = Reshape(x, t)\n{PAIR.replace('(x,', '(r,')}", {"t": target}, inputs="float[N,16,H,W] x")
    found = convpool.optimize(model, input_shapes={"x": [1, 16, 8, 8]}).report.verification
    assert found.passed and found.input_shapes == {"x": [1, 16, 8, 8]}
    assert bool(found.other_shapes) == runs


def test_the_second_size_finds_a_result_that_holds_only_for_the_first():
    model = graph("h = Relu(x)\ny = GlobalAveragePool(h)", inputs="float[N,16,H,W] x")
    wrong = graph("h = Relu(x)\ny = AveragePool<kernel_shape=[64,64]>(h)", inputs="float[N,16,H,W] x")
    given = np.random.default_rng(0).standard_normal((1, 16, 64, 64)).astype(np.float32)
    for options in ({}, {"input_shapes": {"x": [1, 16, 64, 64]}}, {"data": {"x": given}}):
        found = convpool.verify(model, wrong, **options)
        assert not found.passed and found.input_shapes == {"x": [1, 16, 64, 64]} and found.other_shapes == {"x": [3, 16, 65, 67]}
        assert found.outputs[0].note == "shape (3, 16, 2, 4), expected (3, 16, 1, 1) at x:3x16x65x67"


def test_a_window_larger_than_its_map_is_told():
    model = graph(PAIR, inputs="float[N,16,H,W] x")
    message = r"AveragePool 'y': window; got \[2, 2\] on a map of \[1, 1\]; give larger inputs$"
    with pytest.raises(VerificationError, match=message):
        convpool.optimize(model, lowering="direct", input_shapes={"x": [1, 16, 1, 1]})
    maker = InputMaker(graph(PAIR.replace("2,2", "100,100"), inputs="float[N,16,H,W] x"), None, {}, 0)
    assert maker.runnable(0, lambda arrays: [])[0]["x"].shape == (1, 16, 224, 224)


@pytest.mark.parametrize(("body", "counts"), [("q = Slice(x, s, e, a)", 0), ("q = elsewhere.Crop(x, s, e, a)", 1)])
def test_a_noted_shape_counts_behind_an_operator_that_onnx_does_not_know(body, counts):
    """A Slice by an input keeps the rank alone, and the mean needs the sizes; a note of them may be of other inputs."""
    body = f"{body}\nh = Conv(q, w)\ny = ReduceMean<axes=[2,3], keepdims=1>(h)"
    model = graph(body, {"a": [2, 3]}, inputs="float[1,16,20,20] x, int64[2] s, int64[2] e", imports=', "elsewhere": 1')
    assert convpool.optimize(model, check=0).report.summary.rewritten == 0
    model.graph.value_info.append(helper.make_tensor_value_info("q", TensorProto.FLOAT, [1, 16, 12, 12]))
    assert convpool.optimize(model, check=0).report.summary.rewritten == counts


ENDS = {"float[1,32,8,8]": 1, "float[1,32,H,W]": 0, "float[1,32,4,4]": 0, "float[]": 0}


@pytest.mark.parametrize("begin", ["float[1,32,8,8]", "float[]"])
@pytest.mark.parametrize("end", ENDS)
def test_a_size_noted_where_a_loop_s_body_begins_may_be_the_first_run_s(begin, end):
    """The names q and r stand for two tensors each: the body's, and a later one of another shape."""
    counts = ENDS[end] * (begin != "float[]")
    given = f"(int64 i, bool c, {begin} s) => (bool d, {end} t, float[] by) <float[1,32,8,8] r>"
    t = "MaxPool<kernel_shape=[1,1]>" if counts else "MaxPool<kernel_shape=[2,2], strides=[2,2]>"
    inner = f"d = Identity(c) t = {t}(s) q = Relu(s) r = Relu(q) h = Conv<pads=[1,1,1,1]>(q, w) by = GlobalAveragePool(h)"
    body = f"l, y = Loop(trips, yes, x) <body = b {given} {{ {inner} }}>\nq = Flatten(x) r = Relu(q)"
    constants = {"w": (32, 32, 3, 3), "trips": np.int64(3), "yes": np.bool_(True)}
    model = graph(body, constants, inputs="float[1,32,8,8] x", outputs="float[a,b,c,d,e] y, float[f,g] r")
    result = convpool.optimize(model, check=0)
    assert result.report.summary.rewritten == counts
    assert_close(model, result.model, {"x": np.ones((1, 32, 8, 8), np.float32)}, SHARE)


def test_a_note_of_nothing_keeps_its_name():
    """A tool left it; a new tensor of that name would have its shape."""
    model = graph(PAIR)
    for name in {tensor.name for tensor in convpool.optimize(model, check=0).model.graph.initializer}:
        model.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [7]))
    model.graph.value_info.append(helper.make_tensor_value_info("y_pooled_input", TensorProto.FLOAT, [7]))
    for lowering in ("convavgpool", "direct"):
        assert convpool.optimize(model, lowering=lowering).report.verification.passed


def test_a_claimed_size_below_zero_is_refused():
    model = graph(PAIR)
    model.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, [1, 32, -5, 12]))
    with pytest.raises(ModelError, match=r"tensor 'h': shape; got \[1, 32, -5, 12\], expected no negative size"):
        convpool.optimize(model)
    model.graph.value_info[0].type.tensor_type.shape.dim[2].dim_value = -1  # as some write an open one
    assert convpool.optimize(model, check=0).changed


def test_channels_that_do_not_fit_count_by_what_follows_from_the_inputs():
    """Not by value_info, which may be of an earlier version of the model."""
    stale = graph("a = Relu(x)\ny = Conv(a, w)")
    stale.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, [1, 8, 12, 12]))
    assert not convpool.optimize(stale, check=0).changed
    wrong = graph("a = Concat<axis=1>(x, x)\ny = Conv(a, w)")
    message = r"^Conv 'y': weights \[32, 16, 3, 3\], group 1; got an input of shape \[1, 32, 12, 12\]"
    with pytest.raises(ModelError, match=message):
        convpool.optimize(wrong, check=0)


def test_axes_that_are_an_output_too_are_known():
    body = "s = Slice(x, b, e, a)\nh = Conv<pads=[1,1,1,1]>(s, w)\ny = ReduceMean<axes=[2,3], keepdims=0>(h)"
    model = graph(body, {"b": [1], "e": [-1], "a": [2]}, outputs="float[n,m] y, int64[1] a")
    assert convpool.optimize(model, lowering="direct").report.summary.rewritten == 1


def test_sizes_that_shape_inference_names_have_no_name_in_the_result():
    model = graph(PAIR, inputs="float[N,16,H,W] x")
    model = onnx.shape_inference.infer_shapes(model)
    for lowering in ("direct", "convavgpool"):
        result = convpool.optimize(model, lowering=lowering, check=0).model
        names = {dim.dim_param for value in result.graph.value_info for dim in value.type.tensor_type.shape.dim}
        assert names <= {"", "N"} and (lowering != "direct" or len(result.graph.value_info) > 0)


@pytest.mark.parametrize("opset", [9, 11])
def test_branches_stay_before_opset_11(opset):
    """onnxruntime refuses such branches once it knows the ranks.  Here it learns them where no Concat is left."""
    resize = "Upsample" if opset < 10 else "Resize"
    scales = "s" if opset < 10 else "n, s"
    mode = 'mode="nearest"' if opset < 10 else 'mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"'
    nodes = f"a = {resize}<{mode}>(x, {scales}) t = Concat<axis=-3>(a, a) r = Conv<pads=[1,1,1,1]>(t, w)"
    body = f"y = If(c) <then_branch = t () => (float[] r) {{ {nodes} }}, else_branch = e () => (float[] k) {{ k = Identity(v) }}>"
    constants = {"w": (32, 32, 3, 3), "s": np.array([1, 1, 2, 2], np.float32), "n": np.zeros(0, np.float32), "v": (2,)}
    model = graph(body, constants, inputs="bool c, float[1,16,12,12] x", outputs="float[] y", opset=opset)
    for one in (model.graph, *(attribute.g for attribute in model.graph.node[0].attribute)):
        one.output[0].type.tensor_type.ClearField("shape")
    result = convpool.optimize(model, check=0, target="cpu", upsampling="fused")
    (site,) = result.report.sites
    assert (site.status, site.obstacle) == (("rejected", "branch of an If") if opset < 11 else ("rewritten", None))
    for condition in (True, False):
        assert_close(model, result.model, {"c": np.array(condition), "x": ONES}, SHARE)


def test_a_result_is_not_refused_where_notes_alone_tell_sizes():
    """Strict inference knows of a Slice by computed bounds no size, and then has 0 for that of the Concat."""
    sizes = "k = Cast<to=7>(two) d = Shape(x) i = Slice(d, zero, k) j = Slice(d, k, four) m = Mul(j, f) l = Concat<axis=0>(i, m)"
    body = f'{sizes} u = Resize<mode="linear"> (x, , , l) h = Conv<pads=[1,1,1,1]>(u, w) y = {POOL}(h)'
    model = graph(body, {"two": np.array([2], np.int32), "zero": [0], "four": [4], "f": [2, 2]})
    model.graph.value_info.extend(helper.make_tensor_value_info(name, TensorProto.INT64, [2]) for name in "ij")
    onnx.checker.check_model(model, full_check=True)
    result = convpool.optimize(model, check=0)
    assert result.changed
    assert_close(model, result.model, {"x": ONES}, SHARE)


def test_a_result_is_not_refused_for_a_wrong_note_of_the_original():
    """Inference knows the result's sizes where it knew none of the original's, for which the output's note is wrong."""
    sizes = "d = Shape(x) i = Slice(d, o, p) j = Slice(d, p, q) k = Mul(j, f) l = Concat<axis=0>(i, k)"
    resize = 'u = Resize<mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor">(x, , , l)'
    constants = {"o": [0], "p": [2], "q": [4], "f": [2, 2]}
    model = graph(f"{sizes} {resize} y = Conv<pads=[1,1,1,1]>(u, w)", constants, outputs="float[1,32,9,9] y")
    assert passes_full_check(load(model))
    result = convpool.optimize(model, check=0, target="cpu", upsampling="fused")
    assert result.changed
    assert_close(model, result.model, {"x": ONES}, SHARE)


def test_a_branch_of_unknown_shape_leaves_the_result_of_its_if_unknown():
    """Before opset 11 onnx's shape inference gives it the other branch's, by which it would be one number for all elements."""
    nodes = 'a = Upsample<mode="nearest">(x, s) r = Concat<axis=-3>(a)'
    branches = f"then_branch = t () => (float[] r) {{ {nodes} }}, else_branch = e () => (float[] i) {{ i = Identity(v) }}"
    body = f'k = If(c) <{branches}> u = Upsample<mode="nearest">(x, s) m = Mul(u, k) y = Conv<pads=[1,1,1,1]>(m, w)'
    model = graph(body, {"s": np.array([1, 1, 2, 2], np.float32), "v": (1,)}, inputs="bool c, float[1,16,12,12] x", opset=9)
    for one in (model.graph.node[0].attribute[0].g, model.graph.node[0].attribute[1].g):
        one.output[0].type.tensor_type.ClearField("shape")
    result = convpool.optimize(model, check=0, target="cpu", upsampling="fused")
    for condition in (True, False):
        assert_close(model, result.model, {"c": np.array(condition), "x": ONES}, SHARE)


SIZES = {"x": [2, 16, 12, 14]}


def dims(values) -> dict[str, list[int | str]]:
    """Sizes and names of tensors by name, "" for an open one without."""
    return {
        value.name: [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in value.type.tensor_type.shape.dim]
        for value in values
    }


@pytest.mark.parametrize("target", ["any", "cpu", "tensorrt", "cuda"])
@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize(
    "tail", ["", "s = Shape(p)\nq = Reshape(p, s)\n", "s = Shape(p)\nq = Expand(p, s)\n", "q = Identity(p)\n", "q = Relu(p)\n"]
)
def test_the_result_has_the_sizes_and_gives_the_same(target, fold, tail):
    body = f"{PAIR.replace('y =', 'p =')}\n{tail}y = Sigmoid({'q' if tail else 'p'})"
    model = graph(body, inputs="float[N,16,H,W] x", outputs="float[N,a,b,c] y")
    before = model.SerializeToString(deterministic=True)
    result = convpool.optimize(model, target=target, fold=fold, fix_shapes=SIZES)
    assert result.changed and result.report.changed and result.report.verification.input_shapes == SIZES
    assert result.report.summary.rewritten == 1 and result.report.summary.counted_shapes == {}
    assert dims(result.model.graph.input) == SIZES and dims(result.model.graph.output) == {"y": [2, 32, 6, 7]}
    onnx.checker.check_model(result.model, full_check=True)
    assert (not fold) or not {node.op_type for node in result.model.graph.node} & {"Shape", "Identity"}
    assert model.SerializeToString(deterministic=True) == before
    assert_close(model, result.model, random_feeds(result.model))


def test_a_model_without_a_pair_is_written_with_its_sizes():
    result = convpool.optimize(graph("y = Relu(x)", inputs="float[N,16,H,W] x", outputs="float[N,16,H,W] y"), fix_shapes=SIZES)
    assert result.changed and result.report.verification.inputs == 1
    assert dims(result.model.graph.output) == {"y": SIZES["x"]}


@pytest.mark.parametrize(
    ("inputs", "given", "wanted"),
    [
        ("float[N,16,H,W] x, float[N,1,H,W] m", SIZES, {**SIZES, "m": [2, 1, 12, 14]}),
        ("float[N,16,H,W] x, float[M,1,H,V] m", SIZES, {**SIZES, "m": ["M", 1, 12, "V"]}),
        ("float[N,16,N,N] x, float[N,1,1,1] m", SIZES, {**SIZES, "m": ["N", 1, 1, 1]}),  # one name, three sizes
        ("float[N,16,H,W] x, float[N,1,H,W] m", {**SIZES, "m": [1, 1, 12, 14]}, {**SIZES, "m": [1, 1, 12, 14]}),
        ("float[2,16,12,14] x, float[N,1,1,1] m", SIZES, {**SIZES, "m": ["N", 1, 1, 1]}),
        ("float x, float[N,1,1,1] m", {"m": [1, 1, 1, 1]}, {"x": [], "m": [1, 1, 1, 1]}),
    ],
)
def test_names_stand_for_the_same_size_elsewhere(inputs, given, wanted):
    assert dims(with_sizes(graph("y = Mul(x, m)", inputs=inputs), given).graph.input) == wanted


def test_sizes_that_follow_are_those_of_inference_not_of_names():
    """An exporter names the output's first size as the input's, and notes a size that it no longer has."""
    model = graph("f = Reshape(x, s)\ny = Relu(f)", {"s": [-1, 4]}, inputs="float[N,16,H,W] x", outputs="float[N,W] y")
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("f", onnx.TensorProto.FLOAT, ["N", "four"]))
    fixed = with_sizes(model, SIZES)
    assert dims(fixed.graph.output) == {"y": [1344, 4]} and dims(fixed.graph.value_info) == {"f": [1344, 4]}


def test_sizes_noted_at_an_export_do_not_stay():
    """Sizes that inputs do not give are open then: behind unknown operators, in bodies, and in functions."""
    body = f"{PAIR.replace('y =', 'p =')}\nu = com.microsoft.Gelu(p)\ny = If(flag) <\n"
    body += "then_branch = yes () => (float[1,32,g,32] a) { r = Relu(p) a = Identity(r) },\n"
    body += "else_branch = no () => (float[1,32,g,32] b) { b = Neg(u) }>"
    inputs, outputs = "float[N,16,H,W] x, bool flag", "float[1,32,32,g] y, float[1,32,g,32] u"
    model = graph(body, inputs=inputs, outputs=outputs, imports=', "com.microsoft": 1')
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("p", onnx.TensorProto.FLOAT, [1, 32, 32, 32]))
    model.functions.append(
        helper.make_function("local", "F", ["p", "u", "flag"], ["y"], model.graph.node[-1:], model.opset_import)
    )
    fixed = with_sizes(model, SIZES)
    for name, branch in zip("ab", fixed.functions[0].node[0].attribute, strict=True):
        assert dims(branch.g.output) == {name: ["", "", "g", ""]}
    assert dims(fixed.graph.value_info) == {"p": [2, 32, 6, 7]}
    assert dims(fixed.graph.output) == {"y": ["", "", "", "g"], "u": ["", "", "g", ""]}
    yes, no = (attribute.g for attribute in fixed.graph.node[-1].attribute)
    assert dims(yes.output) == {"a": [2, 32, 6, 7]} and dims(no.output) == {"b": ["", "", "g", ""]}


def test_an_output_of_unknown_size_stays_open():
    fixed = with_sizes(graph("y = NonZero(x)", inputs="float[N,16,H,W] x", outputs="int64[N,n] y"), SIZES)
    assert dims(fixed.graph.output)["y"][1] == "n" and dims(fixed.graph.output)["y"][0] in (4, "")


OPEN = "float[N,16,H,W] x"


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (OPEN, {"fix_shapes": {"x": [1, 16, 12]}}, "fix shape: input 'x'; got shape .*, expected ."),
        (
            OPEN,
            {"fix_shapes": {"x": [1, 8, 12, 12]}},
            r"fix shape: input 'x'; got shape \[1, 8, 12, 12\], expected \['N', 16, 'H', 'W'\]",
        ),
        (OPEN, {"fix_shapes": {"z": [1]}}, "fix shape: no input 'z'; expected one of x"),
        (OPEN, {"fix_shapes": {"w": [1]}}, "fix shape: no input 'w'; expected one of x"),
        (OPEN, {"fix_shapes": {"x": [0, 16, 12, 12]}}, "fix shape of 'x'; got .*, expected positive sizes"),
        (OPEN, {"fix_shapes": {"x": [-1, 16, 12, 12]}}, "fix shape of 'x'; got .*, expected positive sizes"),
        ("float[1,16,12,12] x", {"fix_shapes": {"x": [1, 16, 24, 24]}}, "fix shape: input 'x'; got shape"),
        (OPEN, {"fix_shapes": SIZES, "input_shapes": {"x": [1, 16, 12, 14]}}, "input shape: input 'x'; got shape"),
        (OPEN, {"fix_shapes": SIZES, "data": {"x": np.zeros((1, 16, 12, 14), np.float32)}}, "data: input 'x'; got shape"),
        (f"{OPEN}, float[N,1,1,1] m", {"fix_shapes": SIZES, "input_shapes": {"m": [1, 1, 1, 1]}}, "input shape: input 'm'"),
        (
            f"{OPEN}, seq(float) q",
            {"fix_shapes": {"q": [1]}},
            "fix shape: input 'q'; got a shape, expected none: it is no tensor",
        ),
        (OPEN, {"fix_shapes": [1, 16, 12, 12]}, "fix_shapes: got .*, expected sizes by name"),
    ],
)
def test_what_does_not_fit_is_refused(inputs, options, message):
    with pytest.raises(convpool.OptionError, match=message):
        convpool.optimize(graph(PAIR, inputs=inputs), **options)


@pytest.mark.parametrize(
    ("inputs", "wanted"),
    [("float[0,16,12,12] x", {}), ("float[0,16,H,W] x", {}), ("float[N,16,H,12] x", {"x": [1, 16, SUGGESTED_SIZE, 12]})],
)
def test_an_empty_input_is_given_no_sizes(inputs, wanted):
    assert suggested(graph("y = Relu(x)", inputs=inputs), {}) == wanted


def test_sizes_that_the_model_has_change_nothing():
    assert not convpool.optimize(graph("y = Relu(x)"), fix_shapes={"x": [1, 16, 12, 12]}).changed


def test_sizes_that_do_not_run_are_an_error_of_the_original(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    onnx.save(graph("h = Conv(x, w)\nf = Reshape(h, s)\ny = Relu(f)", {"s": [1, 32, 10, 10]}, inputs=OPEN), "in.onnx")
    assert run(command, "convpool", ["optimize", "in.onnx", "--fix-shape", "x:1x16x14x14"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("convpool: ") and len(error.splitlines()) == 1 and not (tmp_path / "in.convpool.onnx").exists()


@pytest.mark.parametrize("words", [["--no-check"], ["--check", "2"], ["--input-shape", "x:1x16x12x12"], ["--fold"], ["--time"]])
def test_the_command_writes_the_sizes(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    onnx.save(graph("h = Conv<pads=[1,1,1,1]>(x, w)\ny = GlobalAveragePool(h)", inputs=OPEN), "in.onnx")
    assert run(command, "convpool", ["optimize", "in.onnx", "--fix-shape", "x:1,16,12,12", *words]) == 0
    assert dims(onnx.load("in.convpool.onnx").graph.input) == {"x": [1, 16, 12, 12]}
    assert "rewritten 1 of 1 convolution: 664 k -> 4.61 k multiply-adds" in capsys.readouterr().out


def test_a_model_with_data_files_keeps_its_weights(tmp_path):
    onnx.save(graph(PAIR, inputs=OPEN), tmp_path / "in.onnx", save_as_external_data=True, location="in.data", size_threshold=0)
    convpool.optimize(tmp_path / "in.onnx", fix_shapes=SIZES, fold=True).save(tmp_path / "out.onnx", external_data="keep")
    assert_same_outputs(tmp_path / "out.onnx", tmp_path / "in.onnx")
