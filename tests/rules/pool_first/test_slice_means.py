# SPDX-License-Identifier: Apache-2.0
"""Averages that are written as sums of strided Slices."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.models import graph, operators
from tests.support.rewriting import rewrite

CONV = "h = Conv<pads=[1,1,1,1]>(x, w)\n"
DIRECT = {"AveragePool": 1, "Conv": 1}
LAST = 2**63 - 1
CORNERS = {"f": [0, 0], "r": [1, 0], "c": [0, 1], "d": [1, 1], "e": [LAST, LAST], "a": [2, 3], "s": [2, 2]}
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


@pytest.mark.parametrize("name", SLICES)
def test_mean_of_four_slices(name):
    body, constants = SLICES[name]
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
    model = graph(CONV + FOUR + STACKED[name], {**CORNERS, "zero": [0], "z": (1, 1, 32, 6, 6)})
    rewrite(model, 0)


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
    result = rewrite(graph(body, {**QUARTER, "nothing": np.float32(0)}), 1)
    assert operators(result.graph) == DIRECT


@pytest.mark.parametrize("zeros", ["ConstantOfShape(n)", "Expand(nothing, n)"])
def test_zeros_of_a_shape_known_at_run_time_alone(zeros):
    body = CONV + FOUR + f"n = Shape(s1)\nz = {zeros}\nt0 = Add(z, s1)\n" + CHAIN.replace("s1", "t0") + "y = Mul(t3, k)"
    result = rewrite(graph(body, {**QUARTER, "nothing": np.float32(0)}, inputs="float[N,16,12,12] x"), 1)
    assert operators(result.graph) == DIRECT
