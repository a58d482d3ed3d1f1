# SPDX-License-Identifier: Apache-2.0
"""Means by ReduceMean, Resize and sums of strided Slices: which nodes begin and end one, and how far they are followed."""

import numpy as np
import pytest

from convpool.rules.base import Reject
from convpool.rules.convs import Pooling
from convpool.rules.cuda_chain.layouts import axes_of
from convpool.rules.pool_first import means as slice_mean
from convpool.rules.pool_first.averages import may_be_half, recognise_half
from convpool.rules.pool_first.means import may_be_reduction, recognise_mean, recognise_reduction
from tests.support.models import graph, operators
from tests.support.reject_cases import CORNERS
from tests.support.rewriting import CONV, DIRECT, LAST, rewrite, verified
from tests.support.scopes import chain, function_scope, index

FOUR = "s1 = Slice(h, f, e, a, s)\ns2 = Slice(h, r, e, a, s)\ns3 = Slice(h, c, e, a, s)\ns4 = Slice(h, d, e, a, s)\n"
AXES = {"zero": [0], "one": [1], "end": [LAST], "two": [2], "rows": [-2], "columns": [3], "four": np.float32(4)}
SIX = """u = Slice(h, zero, end, rows, two)
l = Slice(h, one, end, rows, two)
s1 = Slice(u, zero, end, columns, two)
s2 = Slice(u, one, end, columns, two)
s3 = Slice(l, zero, end, columns, two)
s4 = Slice(l, one, end, columns, two)
"""
STACK = "".join(f"u{i} = Unsqueeze(s{i}, zero)\n" for i in (1, 2, 3, 4)) + "t = Concat<axis=0>(u1, u2, u3, u4)\n"
CHAIN = "t1 = Add(s1, s2)\nt2 = Add(s3, t1)\nt3 = Add(t2, s4)\n"
QUARTER = {**CORNERS, "k": np.float32(0.25)}
SLICES = {
    "one Slice per corner, Mul": (FOUR + CHAIN + "y = Mul(t3, k)", QUARTER),
    "one Slice per corner, Div": (FOUR + CHAIN + "y = Div(t3, four)", {**CORNERS, "four": np.full((1,), 4, "f")}),
    "rows, then columns": (SIX + CHAIN + "y = Div(t3, four)", AXES),
    "behind a Slice of all axes, which are not named": (
        "a1 = Slice(h, start, stop)\n" + FOUR.replace("Slice(h, r", "Slice(a1, r") + "t = Sum(s1, s2, s3, s4)\ny = Mul(k, t)",
        {**QUARTER, "start": [0, 0, 0, 0], "stop": [LAST] * 4},
    ),
    "Sum": (FOUR + "t = Sum(s1, s2, s3, s4)\ny = Mul(k, t)", QUARTER),
    "Mean": (FOUR + "y = Mean(s4, s2, s3, s1)", CORNERS),
    "each corner scaled": (FOUR + "".join(f"m{i} = Mul(s{i}, k)\n" for i in (1, 2, 3, 4)) + "y = Sum(m1, m2, m3, m4)", QUARTER),
    "stacked, ReduceMean": (FOUR + STACK + "y = ReduceMean<axes=[0], keepdims=0>(t)", {**CORNERS, "zero": [0]}),
    "stacked, ReduceSum": (FOUR + STACK + "t1 = ReduceSum<keepdims=0>(t, zero)\ny = Mul(t1, k)", {**QUARTER, "zero": [0]}),
    "stacked behind": (
        FOUR + STACK.replace("axis=0", "axis=-1") + "y = ReduceMean<axes=[-1], keepdims=0>(t)",
        {**CORNERS, "zero": [-1]},
    ),
    "onto zeros": (
        FOUR + "t0 = Add(zero, s1)\n" + CHAIN.replace("s1", "t0") + "y = Mul(t3, k)",
        {**QUARTER, "zero": np.zeros((1, 32, 6, 6), np.float32)},
    ),
}


@pytest.mark.parametrize(("body", "constants"), SLICES.values(), ids=SLICES)
def test_mean_of_four_slices(body, constants):
    result = rewrite(graph(CONV + body, constants), 1)
    assert operators(result.graph) == DIRECT
    assert {tensor.name for tensor in result.graph.initializer} == {"w"}


STACKED = {
    "the axis is kept": STACK + "m = ReduceMean<axes=[0], keepdims=1>(t)\ny = Squeeze(m, zero)",
    "the mean of another axis": STACK + "m = ReduceMean<axes=[1], keepdims=0>(t)\ny = Identity(m)",
    "stacked along another axis": STACK.replace("axis=0", "axis=1") + "y = ReduceMean<axes=[0], keepdims=0>(t)",
    "the mean of two axes": STACK + "m = ReduceMean<axes=[0,1], keepdims=0>(t)\ny = Unsqueeze(m, zero)",
    "one Slice twice": STACK.replace("u4)", "u3)") + "y = ReduceMean<axes=[0], keepdims=0>(t)",
    "one more tensor": STACK.replace("u4)", "u4, z)") + "y = ReduceMean<axes=[0], keepdims=0>(t)",
    "a stack read elsewhere": STACK
    + "y1 = ReduceMean<axes=[0], keepdims=0>(t)\nm = ReduceMax<axes=[0], keepdims=0>(t)\ny = Add(y1, m)",
    "the sum": STACK + "y = ReduceSum<keepdims=0>(t, zero)",
}


@pytest.mark.parametrize("name", STACKED)
def test_stacks_that_are_no_mean_of_four_slices(name):
    rewrite(graph(CONV + FOUR + STACKED[name], {**CORNERS, "zero": [0], "z": (1, 1, 32, 6, 6)}), 0)


@pytest.mark.parametrize(("opset", "pairs"), [(9, 0), (10, 1)])
def test_slices_have_strides_from_opset_10_on(opset, pairs):
    if opset == 9:
        body = CONV + "s1 = Slice<axes=[2], starts=[0], ends=[6]>(h)\ns2 = Slice<axes=[2], starts=[6], ends=[12]>(h)\n"
        model = graph(body + "t = Add(s1, s2)\ny = Mul(t, half)", {"half": np.float32(0.5)}, opset=9)
    else:
        body, constants = SLICES["rows, then columns"]
        model = graph(CONV + body, constants, opset=10)
    rewrite(model, pairs)


@pytest.mark.parametrize("step", [1, 2])
def test_slices_of_one_axis_that_name_the_other(step):
    ends, starts = {"e": [LAST, LAST], "a": [2, 3]}, {"f": [0, 0], "r": [1, 0]}
    body = CONV + "s1 = Slice(h, f, e, a, s)\ns2 = Slice(h, r, e, a, s)\nt = Add(s1, s2)\ny = Div(t, two)"
    model = graph(body, {**ends, **starts, "s": [2, step], "two": np.float32(2)})
    pool = next(node for node in rewrite(model, 1).graph.node if node.op_type == "AveragePool")
    assert next(list(item.ints) for item in pool.attribute if item.name == "kernel_shape") == [2, 1]


@pytest.mark.parametrize(("end", "pairs"), [(2**31 - 1, 1), (2**31 - 2, 0), (LAST, 1)])
def test_slices_that_name_the_channels_keep_all_of_them(end, pairs):
    """Exporters write the largest int32 or int64 for the end of an axis."""
    rows = {"e": [end, end], "a": [1, 2], "f": [0, 0], "r": [0, 1], "s": [1, 2], "two": np.float32(2)}
    body = CONV + "s1 = Slice(h, f, e, a, s)\ns2 = Slice(h, r, e, a, s)\nt = Add(s1, s2)\ny = Div(t, two)"
    rewrite(graph(body, rows), pairs)


@pytest.mark.parametrize("zeros", ["ConstantOfShape(n)", "Expand(nothing, n)"])
def test_slices_added_to_zeros_of_their_own_shape(zeros):
    """Scripted loops start their sums so."""
    body = CONV + FOUR + f"n = Shape(s1)\nz = {zeros}\nt0 = Add(z, s1)\n" + CHAIN.replace("s1", "t0") + "y = Mul(t3, k)"
    assert operators(rewrite(graph(body, {**QUARTER, "nothing": np.float32(0)}), 1).graph) == DIRECT


@pytest.mark.parametrize("zeros", ["ConstantOfShape(n)", "Expand(nothing, n)"])
def test_zeros_of_a_shape_known_at_run_time_alone(zeros):
    body = CONV + FOUR + f"n = Shape(s1)\nz = {zeros}\nt0 = Add(z, s1)\n" + CHAIN.replace("s1", "t0") + "y = Mul(t3, k)"
    result = rewrite(graph(body, {**QUARTER, "nothing": np.float32(0)}, inputs="float[N,16,12,12] x"), 1)
    assert operators(result.graph) == DIRECT


def test_halves_that_are_no_strided_slices():
    """Slices without steps, one beside the other: their mean is no average over windows."""
    ends = {"b": [0, 0], "c": [0, 6], "e": [12, 6], "f": [12, 12], "a": [2, 3], "half": np.float32(0.5)}
    body = CONV + "s1 = Slice(h, b, e, a)\ns2 = Slice(h, c, f, a)\nt = Add(s1, s2)\ny = Mul(t, half)"
    verified(graph(body, ends), 0)


@pytest.mark.parametrize(("count", "x"), [(1, "x"), (15, "x"), (16, "t1"), (17, "t2")])
def test_an_average_is_of_16_nodes_at_most(count, x):
    (scope,) = index(graph(f"{chain(count, 'Transpose<perm=[0,1,3,2]>', 'x', 't')}\ny = ReduceMean<axes=[2,3]>(t)"))
    assert may_be_reduction(scope, count) == x


@pytest.mark.parametrize(("count", "ends"), [(1, False), (15, False), (16, True)])
def test_a_reduction_that_goes_on_within_16_nodes_ends_no_average(count, ends):
    views = chain(count, "Transpose<perm=[0,1,3,2]>", "m", "t")
    (scope,) = index(graph(f"m = ReduceMean<axes=[2]>(x)\n{views}\ny = ReduceMean<axes=[2]>(t)"))
    assert (may_be_reduction(scope, 0) == "x") == ends


@pytest.mark.parametrize(("end", "whole"), [(2**63 - 1, True), (2**31 - 1, True), (2**31 - 2, False), (16, False)])
def test_a_slice_of_the_channels_is_whole_from_2_to_the_31_on(end, whole):
    slices = "\n".join(f"s{i} = Slice(x, f{i}, e, a, t)" for i in (0, 1))
    constants = {"f0": [0, 0], "f1": [0, 1], "e": [end, 12], "a": [1, 3], "t": [1, 2], "two": np.float32(2)}
    (scope,) = index(graph(f"{slices}\ns = Add(s0, s1)\ny = Div(s, two)", constants))
    found = recognise_mean(scope, 3, 2, (12, 12))
    if whole:
        assert not isinstance(found, Reject) and found is not None and found.spec.kernel_shape == (1, 2)
    else:
        assert isinstance(found, Reject) and found.condition == "Slice"


@pytest.mark.parametrize(
    ("node", "axes"),
    [
        ("y = ReduceMean<axes=[-1, 2]>(x)", (2, 3)),
        ("y = ReduceSum(x, two)", (2,)),
        ("y = ReduceSum(x)", None),
        ("y = ReduceSum(x, given)", None),
        ("y = Squeeze(x, two)", (2,)),
    ],
)
def test_axes_of_a_sum(node, axes):
    (scope,) = index(graph(node, {"two": [2]}, inputs="float[2,16,1,8] x, int64[1] given", outputs="float y"))
    assert axes_of(scope, 0) == axes


def test_axes_by_an_attribute_of_the_function_are_unknown():
    assert axes_of(function_scope("b = ReduceMax<axes: ints = @e>(a)"), 0) is None


@pytest.mark.parametrize(
    ("scales", "smaller"), [([1, 1, 0.5, 0.5], True), ([1, 1, 1, 0.5], True), ([1, 1, 1, 1], False), ([1, 1, 0.5, 2], False)]
)
def test_a_resize_that_makes_a_map_smaller(scales, smaller):
    (scope,) = index(graph("y = Resize(x, r, s)", {"r": np.zeros(0, np.float32), "s": np.array(scales, np.float32)}))
    assert may_be_half(scope, 0) == ("x" if smaller else None)


def test_a_resize_by_scales_of_a_caller():
    inputs = "float[1,16,12,12] x, float[4] s, int64[4] n"
    for node in ("y = Resize(x, r, s)", "y = Resize(x, r, e, n)"):
        (scope,) = index(graph(node, {"r": np.zeros(0, np.float32), "e": np.zeros(0, np.float32)}, inputs=inputs))
        assert may_be_half(scope, 0) is None and recognise_half(scope, 0, 2, (12, 12)) is None


SQUEEZES = {  # whether the last node ends an average, and of what
    "u = Unsqueeze(x, b)\ny = Squeeze(u, b)": None,
    "u = Unsqueeze(x, b)\nm = ReduceMean<axes=[3]>(u)\ny = Squeeze(m, b)": "x",
    "m = ReduceMean<axes=[2]>(x)\ny = Squeeze(m, b)": None,
    "y = Squeeze(x, b)": None,
    "m = ReduceMean<axes=[3]>(x)\ny = ReduceMean<axes=[2]>(m)": "x",
    "m = ReduceMean<axes=[3]>(x)\nr = Relu(m)\ny = ReduceMean<axes=[2]>(r)": "r",
}


@pytest.mark.parametrize("body", SQUEEZES)
def test_which_nodes_end_an_average(body):
    (scope,) = index(graph(body, {"b": [2]}, inputs="float[2,16,1,8] x", outputs="float y"))
    assert may_be_reduction(scope, len(scope.nodes) - 1) == SQUEEZES[body]


def test_a_reduction_that_another_one_follows_ends_no_average():
    body = "u = Unsqueeze(x, b)\nm = ReduceMean<axes=[3]>(u)\ns = Squeeze(m, b)\ny = ReduceMean<axes=[2], keepdims=0>(s)"
    (scope,) = index(graph(body, {"b": [2]}, inputs="float[2,16,8] x", outputs="float[a,c] y"))
    assert [may_be_reduction(scope, number) for number in range(4)] == [None, None, None, "x"]
    (scope,) = index(graph("m = ReduceMean<axes=[3]>(x)\nr = Relu(m)\ny = ReduceMean<axes=[2]>(r)"))
    assert [may_be_reduction(scope, number) for number in (0, 2)] == ["x", "r"]


@pytest.mark.parametrize(
    ("body", "kind", "window"),
    [
        ("y = ReduceMean<axes=[2,3]>(x)", "global", None),
        ("y = ReduceMean<axes=[3]>(x)", "mean", (1, 8)),
        ("r = Reshape(x, split)\ny = ReduceMean<axes=[3,5], keepdims=0>(r)", "mean", (2, 2)),
    ],
)
def test_means_over_the_map_and_over_windows(body, kind, window):
    (scope,) = index(graph(body, {"split": [2, 16, 4, 2, 4, 2]}, inputs="float[2,16,8,8] x"))
    found = recognise_reduction(scope, len(scope.nodes) - 1, 2, (8, 8))
    assert isinstance(found, Pooling) and found.kind == kind
    assert (None if found.spec is None else found.spec.kernel_shape) == window


@pytest.mark.parametrize("most", [4, 3])
def test_sums_of_slices_of_so_many_nodes_are_looked_at(monkeypatch, most):
    slices = "\n".join(f"s{i}{j} = Slice(x, f{i}{j}, e, a, t)" for i in "01" for j in "01")
    body = f"{slices}\np = Add(s00, s01)\nq = Add(p, s10)\nr = Add(q, s11)\ny = Div(r, four)"
    corners = {f"f{i}{j}": [i, j] for i in (0, 1) for j in (0, 1)}
    (scope,) = index(graph(body, {**corners, "e": [12, 12], "a": [2, 3], "t": [2, 2], "four": np.float32(4)}))
    monkeypatch.setattr(slice_mean, "MAX_TERM_NODES", most)
    assert slice_mean.may_be_mean(scope, 7) == ("x" if most == 4 else None)
