# SPDX-License-Identifier: Apache-2.0
"""The ways to write the pair: what is found, and exactly which operators remain."""

from __future__ import annotations

import numpy as np
import pytest

import convpool
from convpool.check.session import make_session
from convpool.ir.model import LoadedModel
from tests.support.models import graph, operators
from tests.support.rewriting import PAIR, POOL, rewrite

CONV = "h = Conv<pads=[1,1,1,1]>(x, w)\n"
TWO = "p = Conv<pads=[1,1,1,1]>(x, w)\nq = Conv(x, v)\n"
POINTWISE = {"v": (32, 16, 1, 1)}
DIRECT = {"AveragePool": 1, "Conv": 1}
LAST = 2**63 - 1
TWO_IMAGES = "float[1,16,12,12] x, float[1,16,12,12] z"
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

MIDDLES = {
    "Identity": "h = Identity(c)",
    "Dropout": "h = Dropout(c)",
    "Dropout with its mask unread": "h, m = Dropout(c)",
    "Dropout with a ratio": "h = Dropout(c, half)",
    "a factor as an attribute": "f = Constant<value_float = 0.5>()\nh = Mul(c, f)",
    "factors as an attribute": "f = Constant<value_floats = [0.5]>()\nh = Mul(f, c)",
    "BatchNormalization": "h = BatchNormalization(c, g, b, g2, v2)",
    "Add": "h = Add(c, k)",
    "Sub": "h = Sub(c, k)",
    "Sub reversed": "h = Sub(k, c)",
    "Mul": "h = Mul(k, c)",
    "Div": "h = Div(c, k)",
    "scalar": "h = Mul(c, half)",
    "three": "i = Mul(c, k)\nj = Sub(half, i)\nh = Div(j, k)",
    "Pad by nothing": "h = Pad(c, none)",
    "Pad by nothing with a value": "h = Pad(c, none, half)",
    "Pad that crops": "h = Pad(c, crop)",
}
CONSTANTS = {
    "k": (32, 1, 1),
    "half": np.float32(0.5),
    "g": (32,),
    "b": (32,),
    "g2": (32,),
    "v2": np.full(32, 2, np.float32),
    "none": [0] * 8,
    "crop": [0, 0, -1, 0, 0, 0, 0, -1],
}


@pytest.mark.parametrize("lowering", ["direct", "fused"])
@pytest.mark.parametrize("name", MIDDLES)
def test_linear_operators_between_vanish(name, lowering):
    body = f"c = Conv<pads=[1,1,1,1]>(x, w, bias)\n{MIDDLES[name]}\ny = {POOL}(h)"
    result = rewrite(graph(body, {**CONSTANTS, "bias": (32,)}), 1, lowering)
    assert operators(result.graph) == (DIRECT if lowering == "direct" else {"Conv": 1})


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_each_of_few_channels_has_its_own_factor(channels):
    """Shapes with sizes of 1 and 2 look like others."""
    given = {"w": (channels, 16, 3, 3), "k": np.arange(2, 2 + channels, dtype=np.float32).reshape(-1, 1, 1)}
    model = graph(f"c = Conv<pads=[1,1,1,1]>(x, w)\nh = Mul(c, k)\ny = {POOL}(h)", given)
    assert operators(rewrite(model, 1, "fused").graph) == {"Conv": 1}


@pytest.mark.parametrize("factor", [1e-5, 2.0**15])
@pytest.mark.parametrize("lowering", ["convavgpool", "direct", "fused"])
def test_a_factor_that_half_precision_weights_cannot_take_in_moves_behind(lowering, factor):
    constants = {"w": np.full((32, 16, 3, 3), 8 if factor > 1 else 0.01, np.float16), "k": np.float16(factor)}
    model = graph(
        f"c = Conv<pads=[1,1,1,1]>(x, w)\nh = Mul(c, k)\ny = {POOL}(h)",
        constants,
        inputs="float16[1,16,12,12] x",
        outputs="float16[a,b,c,d] y",
    )
    result = convpool.optimize(model, check=0, lowering=lowering)
    assert result.report.summary.rewritten == 1 and operators(result.model.graph)["Mul"] == 1


@pytest.mark.parametrize(
    ("operator", "operands"), [("Mul", "c, n"), ("Mul", "n, c"), ("Add", "c, n"), ("Sub", "n, c"), ("Div", "c, n")]
)
def test_factors_that_are_no_constants_move_behind(operator, operands):
    body = f"c = Conv<pads=[1,1,1,1]>(x, w)\nh = {operator}({operands})\ny = {POOL}(h)"
    result = rewrite(graph(body, inputs="float[1,16,12,12] x, float[1,32,1,1] n"), 1)
    assert [node.op_type for node in result.graph.node] == ["AveragePool", "Conv", operator]
    assert result.graph.node[2].input[operands.split(", ").index("n")] == "n"


JOINS = {
    "Add": ("h = Add(p, q)", {"Add": 1, "AveragePool": 2, "Conv": 2}),
    "Sub": ("h = Sub(q, p)", {"AveragePool": 2, "Conv": 2, "Sub": 1}),
    "Sum": ("h = Sum(p, q)", {"AveragePool": 2, "Conv": 2, "Sum": 1}),
    "Concat": ("h = Concat<axis=1>(p, q)", {"AveragePool": 2, "Concat": 1, "Conv": 2}),
    "Concat of a negative axis": ("h = Concat<axis=-3>(p, q)", {"AveragePool": 2, "Concat": 1, "Conv": 2}),
    "scaled": ("i = Add(p, q)\nh = Mul(i, k)", {"Add": 1, "AveragePool": 2, "Conv": 2, "Mul": 1}),
    "scaled branch": ("i = Mul(k, q)\nh = Add(p, i)", {"Add": 1, "AveragePool": 2, "Conv": 2}),
    "residual": ("o = Relu(v2)\nh = Add(p, o)", {"Add": 1, "AveragePool": 2, "Conv": 1, "Relu": 1}),
    "dense": ("o = Relu(v2)\nh = Concat<axis=1>(o, p)", {"AveragePool": 2, "Concat": 1, "Conv": 1, "Relu": 1}),
}


@pytest.mark.parametrize("name", JOINS)
def test_pooling_distributes_over_a_join(name):
    join, expected = JOINS[name]
    branches = TWO if "q" in join.replace("Concat", "") else TWO.splitlines()[0] + "\n"
    model = graph(
        f"{branches}{join}\ny = {POOL}(h)", {**POINTWISE, "k": (32, 1, 1)}, inputs="float[1,16,12,12] x, float[1,32,12,12] v2"
    )
    result = rewrite(model, branches.count("Conv"))
    assert operators(result.graph) == expected


def test_residual_of_open_size_by_a_common_origin():
    body = f"r = Relu(x)\np = Conv<pads=[1,1,1,1]>(r, w)\nq = Conv(x, v)\nh = Add(p, q)\ny = {POOL}(h)"
    result = rewrite(graph(body, POINTWISE, inputs="float[N,16,H,W] x"), 2, size=16)
    assert operators(result.graph) == {"Add": 1, "AveragePool": 2, "Conv": 2, "Relu": 1}


ORIGINS = {  # what stands before the 1x1 convolution, and what the other is: of equal sizes beyond doubt or not
    "AveragePool and a window": ("u = AveragePool<kernel_shape=[3,3]>(x)", "pads=[0,0,0,0]", True),
    "padding that makes up for it": ("u = Conv<pads=[0,1,1,0]>(x, s)", "pads=[1,1,0,1]", False),
    "padding elsewhere": ("u = AveragePool<kernel_shape=[3,3], pads=[1,1,0,0], count_include_pad=1>(x)", "pads=[0,1,1,0]", True),
    "stride before and behind": (
        "u = AveragePool<kernel_shape=[2,2], strides=[2,2], pads=[1,1,0,0]>(x)",
        "pads=[1,1,1,1], strides=[2,2]",
        True,
    ),
    "other strides": ("u = AveragePool<kernel_shape=[2,2], strides=[2,2]>(x)", "pads=[1,1,1,1]", False),
    "an axis more": ("u = AveragePool<kernel_shape=[3,3], pads=[1,0,1,0]>(x)", "pads=[0,0,0,0]", False),
    "ceil_mode": (
        "u = AveragePool<kernel_shape=[2,2], strides=[2,2], pads=[1,1,0,0], ceil_mode=1>(x)",
        "pads=[1,1,1,1], strides=[2,2]",
        False,
    ),
    "auto_pad": ('u = AveragePool<kernel_shape=[3,3], auto_pad="SAME_UPPER">(x)', "pads=[1,1,1,1]", False),
}


@pytest.mark.parametrize("name", ORIGINS)
def test_residual_of_open_size_by_windows_of_the_same_origin(name):
    before, attributes, equal = ORIGINS[name]
    body = f"{before}\np = Conv<{attributes}>(x, w)\nq = Conv(u, v)\nh = Add(p, q)\ny = {POOL}(h)"
    model = graph(body, {**POINTWISE, "s": (16, 16, 3, 3)}, inputs="float[N,16,H,W] x", opset=19)
    if equal:
        rewrite(model, 2, size=16)
    else:
        result = convpool.optimize(model, lowering="direct", check=0)
        assert "spatial sizes of the operands" in str([site.reason for site in result.report.sites])
        assert result.model.SerializeToString() == model.SerializeToString()


def test_an_operand_of_lower_rank_is_not_pooled():
    body = f"p = Mul(x, two)\nq = Conv<pads=[1,1,1,1]>(p, w)\nh = Add(q, x)\ny = {POOL}(h)"
    model = graph(body, {"two": np.full((1, 1, 1, 1), 2, "f"), "w": (16, 16, 3, 3)}, inputs="float[16,12,12] x")
    result = convpool.optimize(model, check=0)
    assert not result.changed and "spatial sizes of the operands" in result.report.sites[0].reason


def test_long_ways_to_the_pooling_and_to_a_constant():
    count = 2000
    chain = "c0 = Relu(x)\n" + "".join(f"c{i + 1} = Add(c{i}, x)\n" for i in range(count))
    same = "w0 = Identity(w)\n" + "".join(f"w{i + 1} = Identity(w{i})\n" for i in range(count))
    body = f"{chain}{same}p = Conv<pads=[1,1,1,1]>(x, w{count})\nh = Add(p, c{count})\ny = {POOL}(h)"
    result = convpool.optimize(graph(body, {"w": (16, 16, 3, 3)}), lowering="direct", check=1)
    assert result.report.summary.rewritten == 1


PADS = {  # Pads and the convolution behind them
    "Pad": ("c = Pad(x, two)\np = Conv(c, w)", True),
    "Pad and padding": ("c = Pad(x, two)\np = Conv<pads=[1,1,1,1]>(c, w)", True),
    "SAME": ('c = Pad(x, two)\np = Conv<auto_pad="SAME_UPPER">(c, w)', True),
    "two and an Identity": ("a = Pad(x, two)\nb = Identity(a)\nc = Pad(b, two)\np = Conv(c, w)", True),
    "of ones": ("c = Pad(x, two, one)\np = Conv(c, w)", False),
    "that crops": ("c = Pad(x, crop)\np = Conv(c, w)", False),
}


@pytest.mark.parametrize("lowering", ["convavgpool", "direct", "fused"])
@pytest.mark.parametrize("name", PADS)
def test_pads_in_front_go_into_the_convolution(name, lowering):
    body, gone = PADS[name]
    constants = {"two": [0, 0, 2, 2, 0, 0, 2, 2], "crop": [0, 0, -1, 0, 0, 0, 0, 0], "one": np.float32(1)}
    result = rewrite(graph(f"{body}\ny = {POOL}(p)", constants), 1, lowering)
    assert "Pad" not in operators(result.graph) if gone else operators(result.graph)["Pad"] == 1
    make_session(LoadedModel(result, None, 0), optimize=True)  # merges Pads into the AveragePool behind them


@pytest.mark.parametrize(
    ("between", "taken_out"),
    [
        ("d = Mul(c, unit)", True),
        ("d = Add(nothing, c)", True),
        ("d = Cast<to=1>(c)", True),
        ("d = Expand(c, shape)", True),
        ("d = Mul(c, half)", False),
        ("d = Sub(nothing, c)", False),
        ("d = Cast<to=11>(c)\ne = Cast<to=1>(d)", False),
    ],
)
def test_a_pad_behind_what_onnxruntime_takes_out(between, taken_out):
    """It would be merged into the box mean, which may not be padded by as much as its window."""
    constants = {
        "two": [0, 0, 2, 2, 0, 0, 2, 2],
        "unit": np.float32(1),
        "nothing": np.float32(0),
        "half": np.float32(0.5),
        "shape": [1],
    }
    last = "e" if "e = " in between else "d"
    model = graph(f"c = Pad(x, two)\n{between}\np = Conv({last}, w)\ny = {POOL}(p)", constants)
    for lowering, kept in (("convavgpool", "convavgpool"), ("direct", "direct"), ("fused", "fused")):
        result = convpool.optimize(model, lowering=lowering, prologue=False, check=1)
        (site,) = result.report.sites
        if taken_out and lowering == "direct":
            assert site.reason.startswith("Conv 'p': Pad 'c' in front of the box mean; got pads that reach its window")
        else:
            assert site.lowering == ("fused" if taken_out else kept)
        make_session(LoadedModel(result.model, None, 0), optimize=True)


def test_a_pad_in_front_that_something_else_reads_stays():
    body = f"c = Pad(x, two)\np = Conv(c, w)\ny = {POOL}(p)\nz = Relu(c)"
    constants = {"two": [0, 0, 2, 2, 0, 0, 2, 2]}
    result = rewrite(graph(body, constants, outputs="float[a,b,c,d] y, float[a,b,c,d] z"), 1)
    assert operators(result.graph) == {**DIRECT, "Pad": 1, "Relu": 1}


SLICES = {
    "one Slice per corner, Mul": (FOUR + CHAIN + "y = Mul(t3, k)", QUARTER),
    "one Slice per corner, Div": (FOUR + CHAIN + "y = Div(t3, four)", {**CORNERS, "four": np.full((1,), 4, "f")}),
    "rows, then columns": (SIX + CHAIN + "y = Div(t3, four)", AXES),
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


UNPADDED = {  # poolings whose auto_pad or ceil_mode changes nothing, and the map they are of
    "SAME as TensorFlow writes it": ('kernel_shape=[2,2], strides=[2,2], auto_pad="SAME_UPPER"', "12,12"),
    "SAME of one element, open size": ('kernel_shape=[1,1], auto_pad="SAME_LOWER"', "H,W"),
    "ceil_mode without strides, open size": ("kernel_shape=[2,2], ceil_mode=1", "H,W"),
    "ceil_mode and whole windows": ("kernel_shape=[3,2], strides=[3,2], ceil_mode=1", "12,12"),
}


@pytest.mark.parametrize("name", UNPADDED)
def test_padding_that_is_none(name):
    attributes, size = UNPADDED[name]
    model = graph(CONV + f"y = AveragePool<{attributes}>(h)", inputs=f"float[1,16,{size}] x")
    (site,) = convpool.optimize(model, check=1).report.sites
    if "strides" in attributes:
        assert site.status == "rewritten"
    else:  # exact, and no gain
        assert "saves nothing" in site.reason or "one element" in site.reason


@pytest.mark.parametrize("zeros", ["ConstantOfShape(n)", "Expand(nothing, n)"])
def test_slices_added_to_zeros_of_their_own_shape(zeros):
    """As scripted loops start their sums."""
    body = CONV + FOUR + f"n = Shape(s1)\nz = {zeros}\nt0 = Add(z, s1)\n" + CHAIN.replace("s1", "t0") + "y = Mul(t3, k)"
    result = rewrite(graph(body, {**QUARTER, "nothing": np.float32(0)}), 1)
    assert operators(result.graph) == DIRECT


@pytest.mark.parametrize("zeros", ["ConstantOfShape(n)", "Expand(nothing, n)"])
def test_zeros_of_a_shape_known_at_run_time_alone(zeros):
    body = CONV + FOUR + f"n = Shape(s1)\nz = {zeros}\nt0 = Add(z, s1)\n" + CHAIN.replace("s1", "t0") + "y = Mul(t3, k)"
    result = rewrite(graph(body, {**QUARTER, "nothing": np.float32(0)}, inputs="float[N,16,12,12] x"), 1)
    assert operators(result.graph) == DIRECT


GLOBAL = {
    "GlobalAveragePool": "y = GlobalAveragePool(h)",
    "ReduceMean": "y = ReduceMean<axes=[2,3]>(h)",
    "negative axes": "y = ReduceMean<axes=[-1,-2], keepdims=1>(h)",
}


@pytest.mark.parametrize("name", GLOBAL)
def test_mean_over_the_feature_map(name):
    model = graph("h = Conv(x, w)\n" + GLOBAL[name], {"w": (64, 16, 1, 1)})
    assert operators(rewrite(model, 1).graph) == {"Conv": 1, "GlobalAveragePool": 1}
    assert operators(rewrite(model, 1, "convavgpool").graph) == {"ConvAvgPool": 1}


def test_mean_over_the_feature_map_of_a_sum():
    """Its windows are as large as the map, which no 1x1 convolution has to be behind."""
    model = graph("p = Conv(x, w)\nq = Conv(z, w)\nh = Add(p, q)\ny = GlobalAveragePool(h)", inputs=TWO_IMAGES)
    assert operators(rewrite(model, 2).graph) == {"Add": 1, "AveragePool": 2, "Conv": 2}


@pytest.mark.parametrize("opset", [11, 13, 18])
def test_mean_without_the_spatial_axes(opset):
    mean = "ReduceMean(h, axes)" if opset >= 18 else "ReduceMean(h)"
    mean = mean.replace("Mean(", "Mean<keepdims=0>(" if opset >= 18 else "Mean<axes=[3,2], keepdims=0>(")
    model = graph(f"h = Conv(x, w)\ny = {mean}", {"w": (64, 16, 1, 1), "axes": [3, 2]}, outputs="float[a,b] y", opset=opset)
    assert operators(rewrite(model, 1).graph) == {"Conv": 1, "GlobalAveragePool": 1, "Squeeze": 1}


def test_global_mean_of_open_size_behind_a_pointwise_convolution():
    model = graph("h = Conv(x, w)\ny = GlobalAveragePool(h)", {"w": (64, 16, 1, 1)}, inputs="float[N,16,H,W] x")
    assert operators(rewrite(model, 1, "convavgpool").graph) == {"Conv": 1, "GlobalAveragePool": 1}


@pytest.mark.parametrize("pads", [[0, 0, 0, 0], [1, 0, 1, 1]])
def test_fuse_pool_conv(pads):
    pool = f"AveragePool<kernel_shape=[2,3], strides=[2,3], pads={pads}, count_include_pad=1>"
    model = graph(f"h = {pool}(x)\ny = Conv<pads=[1,1,1,1]>(h, w, b)", {"b": (32,)})
    assert operators(rewrite(model, 0).graph) == {"AveragePool": 1, "Conv": 1}
    assert operators(rewrite(model, 0, "convavgpool").graph) == {"AveragePool": 1, "Conv": 1}
    result = rewrite(model, 1, "convavgpool", fuse_pool_conv=True)
    assert operators(result.graph) == {"ConvAvgPool": 1}
    assert list(result.graph.node[0].input)[2] == "b"


def test_numbers_of_the_operator():
    model = graph("h = Conv<pads=[1,2,1,1], strides=[2,1]>(x, w)\ny = " + POOL + "(h)", opset=19)
    node = rewrite(model, 1, "convavgpool").graph.node[-1]
    assert {item.name: list(item.ints) for item in node.attribute if item.ints} == {
        "pool_kernel_shape": [2, 2],
        "pool_strides": [1, 1],
        "pool_pads": [1, 1, 1, 1],
        "pool_dilations": [2, 1],
        "kernel_shape": [3, 3],
        "strides": [4, 2],
        "pads": [0, 1, 0, 0],
        "dilations": [1, 1],
        "weight_perm": [0, 3, 1, 2],
    }
    assert {item.name: item.i for item in node.attribute if item.type == 2} == {"group": 1}
    assert {item.name: item.s for item in node.attribute if item.type == 3} == {
        "plugin_version": b"1",
        "plugin_namespace": b"",
    }


def test_excluded_by_name():
    model = graph(PAIR)
    model.graph.node[0].name, model.graph.node[1].name = "block/conv", "block/pool"
    for pattern in ("block/*", "*/pool", "block/conv"):
        result = rewrite(model, 0, exclude=[pattern])
        assert operators(result.graph) == DIRECT
    assert operators(rewrite(model, 1, "fused", exclude=["conv"]).graph) == {"Conv": 1}


@pytest.mark.parametrize("pattern", ["p", "q", "y"])
def test_any_excluded_convolution_of_a_join_keeps_it(pattern):
    model = graph(f"p = Conv(x, w)\nq = Conv(x, u)\nh = Add(p, q)\ny = {POOL}(h)", {"u": (32, 16, 3, 3)})
    result = convpool.optimize(model, check=0, exclude=pattern)
    assert not result.changed and [site.status for site in result.report.sites] == ["excluded"]


@pytest.mark.parametrize(
    ("conv", "shape", "sizes", "fused"),
    [
        ("Conv<group=2, pads=[1,1,1,1]>(x, w)", (32, 8, 3, 3), "12,12", True),
        ("Conv<group=2>(x, w)", (32, 8, 1, 1), "12,12", False),
        ("Conv<pads=[1,1,1,1,1,1]>(x, w)", (16, 16, 3, 3, 3), "12,12,12", True),
        ("Conv(x, w)", (32, 16, 1, 1, 1), "12,12,12", False),
    ],
    ids=["groups", "pointwise groups", "3-D", "pointwise 3-D"],
)
def test_what_the_plugin_has_no_fast_kernel_for(conv, shape, sizes, fused):
    rank, given = len(shape) - 2, {"w": shape}
    pool = f"AveragePool<kernel_shape={[2] * rank}, strides={[2] * rank}>"
    types = {"inputs": f"float[1,16,{sizes}] x", "outputs": f"float[{','.join('abcde'[: rank + 2])}] y"}
    model = graph(f"h = {conv}\ny = {pool}(h)", given, **types)
    if fused:
        assert operators(rewrite(model, 1, "convavgpool").graph) == {"Conv": 1}
    else:
        assert operators(rewrite(model, 1, "convavgpool").graph) == {"AveragePool": 1, "Conv": 1}
        kept = convpool.optimize(model, target="tensorrt").report.sites[0]
        assert kept.status == "rejected" and "for which the plugin has kernels" in kept.reason
    whole = graph(
        f"h = Conv{'<group=2>' if 'group' in conv else ''}(x, w)\ny = GlobalAveragePool(h)",
        {"w": (*shape[:2], *[1] * rank)},
        **types,
    )
    assert operators(rewrite(whole, 1, "convavgpool").graph) == {"Conv": 1, "GlobalAveragePool": 1}
    first = graph(f"h = {pool}(x)\ny = {conv.replace('(x', '(h')}", given, **types)
    kept = convpool.optimize(first, fuse_pool_conv=True)
    assert not kept.changed and "expected 1, for which" in kept.report.sites[0].reason.replace("at most 2", "1")


@pytest.mark.parametrize(("pads", "lowering"), [(0, "convavgpool"), (1, "fused")])
def test_pads_that_onnxruntime_moves_through_a_transpose(pads, lowering):
    """A Pad in TensorFlow's layout comes to stand in front of the box mean, whose window they may reach with its own."""
    order = {"last": "[0,2,3,1]", "first": "[0,3,1,2]"}
    body = f"t = Transpose<perm={order['last']}>(x)\nq = Pad(t, p)\nu = Transpose<perm={order['first']}>(q)\n"
    model = graph(f"{body}h = Conv<pads={[pads] * 4}>(u, w)\ny = {POOL}(h)", {"p": [0, 1, 1, 0, 0, 1, 1, 0]})
    assert [site.lowering for site in convpool.optimize(model).report.sites] == [lowering]


@pytest.mark.parametrize("before", ["", "t = Relu(x)\n"])
def test_pads_behind_which_alone_a_transpose_stands_stay_where_they_are(before):
    """onnxruntime moves a Transpose to another one only."""
    body = f"{before}q = Pad({'t' if before else 'x'}, p)\nu = Transpose<perm=[0,3,1,2]>(q)\nh = Conv(u, w)\ny = {POOL}(h)"
    given = {"w": (32, 16, 5, 5), "p": [0, 2, 2, 0, 0, 2, 2, 0]}
    result = rewrite(graph(body, given, inputs="float[1,12,12,16] x"), 1, "convavgpool")
    assert "ConvAvgPool" in operators(result.graph)
    assert convpool.verify(graph(body, given, inputs="float[1,12,12,16] x"), result).passed


def test_a_pad_behind_a_transpose_whose_order_a_function_is_given():
    functions = f"""<domain: "local", opset_import: ["": 17]>
      moved <order> (x, w, p) => (y) {{ t = Transpose<perm=[0,2,3,1]>(x) q = Pad(t, p) u = Transpose<perm: ints = @order>(q)
        h = Conv<pads=[1,1,1,1]>(u, w) y = {POOL}(h) }}"""
    model = graph(
        "y = local.moved<order=[0,3,1,2]>(x, w, p)", {"p": [0, 0, 1, 0, 0, 0, 1, 0]}, functions=functions, imports=', "local": 1'
    )
    assert not convpool.optimize(model).changed


def test_maps_beside_a_convolution_count_with_their_own_channels():
    """A second run, which sees the Concats joined, would find another cost."""
    body, given, maps = ["m0 = Relu(x)"], {"z": (64, 8, 3, 3)}, ["m0"]
    for j in (1, 2, 3):
        body += [f"q{j} = Concat<axis=1>({', '.join(maps)})"] if j > 1 else []
        body += [f"r{j} = Relu({f'q{j}' if j > 1 else 'm0'})", f"m{j} = Conv(r{j}, w{j})"]
        given[f"w{j}"] = (8, 8 * j, 1, 1)
        maps.append(f"m{j}")
    body += [f"c = Concat<axis=1>({', '.join(maps)})", f"y = {POOL}(c)", "h = Conv<pads=[1,1,1,1]>(x, z)", f"k = {POOL}(h)"]
    shapes = {"inputs": "float[1,8,8,8] x", "outputs": "float[a,b,c,d] y, float[a,e,c,d] k"}
    result = convpool.optimize(graph("\n".join(body), given, **shapes))
    assert result.changed and not convpool.optimize(result.model).changed


def test_a_wide_map_beside_a_convolution_is_pooled_before_and_after():
    """Its pooling is no cost of the rewrite."""
    given = {"w": (8, 16, 3, 3)}
    shapes = {"inputs": "float[1,16,32,32] x, float[1,64,32,32] r", "outputs": "float[a,b,c,d] y"}
    model = graph(f"h = Conv<pads=[1,1,1,1]>(x, w)\nc = Concat<axis=1>(h, r)\ny = {POOL}(c)", given, **shapes)
    assert operators(rewrite(model, 1, "direct").graph) == {"AveragePool": 2, "Concat": 1, "Conv": 1}
