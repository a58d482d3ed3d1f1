# SPDX-License-Identifier: Apache-2.0
"""Means: how they are written with Slices, windows behind the map, and shapes read off results."""

import numpy as np
import pytest
from onnx import numpy_helper, shape_inference

import convpool
from convpool.ir.index import index_model
from convpool.ir.model import LoadedModel
from tests.support import sessions
from tests.support.models import graph, operators, random_feeds
from tests.support.rewriting import CONV, CORNERS, DIRECT, LAST, POOL, assert_close, rewrite, verified
from tests.support.rewriting import CORNER_SLICES as FOUR

AXES = {"zero": [0], "one": [1], "end": [LAST], "two": [2], "rows": [-2], "columns": [3], "four": np.float32(4)}
SIX = """u = Slice(h, zero, end, rows, two) s1 = Slice(u, zero, end, columns, two) s2 = Slice(u, one, end, columns, two)
l = Slice(h, one, end, rows, two) s3 = Slice(l, zero, end, columns, two) s4 = Slice(l, one, end, columns, two)
"""
STACK = "".join(f"u{i} = Unsqueeze(s{i}, zero)\n" for i in (1, 2, 3, 4)) + "t = Concat<axis=0>(u1, u2, u3, u4)\n"
CHAIN = "t1 = Add(s1, s2)\nt2 = Add(s3, t1)\nt3 = Add(t2, s4)\n"
QUARTER = {**CORNERS, "k": np.float32(0.25)}
SLICES = {
    "copies between, Mul": (FOUR + "i = Identity(s1)\n" + CHAIN.replace("s1", "i") + "j = Identity(t3)\ny = Mul(j, k)", QUARTER),
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
    "read twice": STACK + "y1 = ReduceMean<axes=[0], keepdims=0>(t)\nm = ReduceMax<axes=[0], keepdims=0>(t)\ny = Add(y1, m)",
    "the sum": STACK + "y = ReduceSum<keepdims=0>(t, zero)",
}


@pytest.mark.parametrize("name", STACKED)
def test_stacks_that_are_no_mean_of_four_slices(name):
    rewrite(graph(CONV + FOUR + STACKED[name], {**CORNERS, "zero": [0], "z": (1, 1, 32, 6, 6)}), 0)


def test_slices_have_strides_from_opset_10_on():
    body, constants = SLICES["rows, then columns"]
    rewrite(graph(CONV + body, constants, opset=10), 1)
    halves = CONV + "s1 = Slice<axes=[2], starts=[0], ends=[6]>(h)\ns2 = Slice<axes=[2], starts=[6], ends=[12]>(h)\n"
    rewrite(graph(halves + "t = Add(s1, s2)\ny = Mul(t, half)", {"half": np.float32(0.5)}, opset=9), 0)


@pytest.mark.parametrize("step", [1, 2])
def test_slices_of_one_axis_that_name_the_other(step):
    body = CONV + "s1 = Slice(h, f, e, a, s)\ns2 = Slice(h, r, e, a, s)\nt = Add(s1, s2)\ny = Div(t, two)"
    model = graph(body, {"e": [LAST] * 2, "a": [2, 3], "f": [0, 0], "r": [1, 0], "s": [2, step], "two": np.float32(2)})
    pool = next(node for node in rewrite(model, 1).graph.node if node.op_type == "AveragePool")
    assert next(list(item.ints) for item in pool.attribute if item.name == "kernel_shape") == [2, 1]


@pytest.mark.parametrize(("end", "pairs"), [(2**31 - 1, 1), (2**31 - 2, 0), (LAST, 1)])
def test_slices_that_name_the_channels_keep_all_of_them(end, pairs):
    """Exporters write the largest int32 or int64 for the end of an axis."""
    rows = {"e": [end, end], "a": [1, 2], "f": [0, 0], "r": [0, 1], "s": [1, 2], "two": np.float32(2)}
    rewrite(graph(CONV + "s1 = Slice(h, f, e, a, s)\ns2 = Slice(h, r, e, a, s)\nt = Add(s1, s2)\ny = Div(t, two)", rows), pairs)


@pytest.mark.parametrize("batch", [1, "N"])
@pytest.mark.parametrize("zeros", ["ConstantOfShape(n)", "Expand(nothing, n)"])
def test_slices_added_to_zeros_of_their_own_shape(zeros, batch):
    """Scripted loops start their sums so; of an open batch the shape is known at run time alone."""
    body = CONV + FOUR + f"n = Shape(s1)\nz = {zeros}\nt0 = Add(z, s1)\n" + CHAIN.replace("s1", "t0") + "y = Mul(t3, k)"
    model = graph(body, {**QUARTER, "nothing": np.float32(0)}, inputs=f"float[{batch},16,12,12] x")
    assert operators(rewrite(model, 1).graph) == DIRECT


def test_halves_that_are_no_strided_slices():
    """Slices without steps, one beside the other: their mean is no average over windows."""
    ends = {"b": [0, 0], "c": [0, 6], "e": [12, 6], "f": [12, 12], "a": [2, 3], "half": np.float32(0.5)}
    verified(graph(CONV + "s1 = Slice(h, b, e, a)\ns2 = Slice(h, c, f, a)\nt = Add(s1, s2)\ny = Mul(t, half)", ends), 0)


@pytest.mark.parametrize("opset", [11, 17, 21, 22])
@pytest.mark.parametrize("operator", ["AveragePool", "MaxPool"])
@pytest.mark.parametrize(
    "window",
    [
        "kernel_shape=[1,1], strides=[3,3]",
        "kernel_shape=[2,2], strides=[2,2], pads=[1,1,1,1]",
        "kernel_shape=[2,3], strides=[3,3], pads=[0,1,1,1]",
        "kernel_shape=[2,2], strides=[2,1]",
        'kernel_shape=[2,2], strides=[3,3], auto_pad="VALID"',
    ],
)
@pytest.mark.parametrize("sizes", ["9,12", "12,13", "11,N"])
def test_a_window_of_ceil_mode_behind_the_map_does_not_count(opset, operator, window, sizes):
    """A mean over all of a map behind it becomes a window of the map's size."""
    body = f"m = {operator}<{window}, ceil_mode=1>(x)\nh = Conv<pads=[1,1,1,1]>(m, w)\ny = GlobalAveragePool(h)"
    model = graph(body, inputs=f"float[1,16,{sizes}] x", opset=opset)
    result = convpool.optimize(model)
    assert result.report.summary.rewritten == ("N" not in sizes)
    assert_close(model, result.model, random_feeds(model, size=14), 1e-5)


SAME = 'MaxPool<auto_pad="SAME_UPPER", dilations=[2,2], kernel_shape=[2,2]>(x)'
KEPT = 'Resize<axes=[-2,-1], keep_aspect_ratio_policy="not_larger">(x, , , z)'
WINDOWED = "b = MaxPool<kernel_shape=[1,1],strides=[3,3],ceil_mode=1>(a)"


def resized(inputs: str, scale: float) -> str:
    return f"s = Constant<value_floats=[1.0,1.0,{scale},2.0]>() t = Constant<value_ints=[1,16,13,13]>() b = Resize(a, {inputs})"


INNER = [WINDOWED, resized(", s", 1.3), resized(", s", 1.5), resized(", , t", 1.3), resized(", e", 1.5)]


@pytest.mark.parametrize("opset", [18, 22])
@pytest.mark.parametrize(("node", "inner"), [*(("local.f(x, e)", inner) for inner in INNER), (SAME, WINDOWED), (KEPT, WINDOWED)])
def test_sizes_that_onnx_counts_otherwise_where_it_is_not_seen(node, inner, opset):
    """Nor do notes count that onnx has written."""
    body, size = f"m = {node}\nh = Conv(m, w)\ny = GlobalAveragePool(h)", 12 if inner == WINDOWED else 10
    scales = {"e": np.float32([1, 1, 1.3, 1.3]), "z": [24, 30]}
    function = f'<opset_import: ["": {opset}], domain: "local"> f (a, e) => (b) {{ {inner} }}'
    model = graph(body, scales, functions=function, inputs=f"float[1,16,{size},{size}] x", opset=opset)
    rewrite(model, node not in (SAME, KEPT), "auto")
    if node in (SAME, KEPT):
        rewrite(shape_inference.infer_shapes(model), 0, "auto")


@pytest.mark.parametrize(("size", "pairs"), [(9, 0), (10, 1)])
def test_windows_behind_the_map_in_a_branch(size, pairs):
    """A map that its nodes read is around it; onnxruntime holds them to the sizes that onnx counts."""
    pair = "m = MaxPool<kernel_shape=[1,1], strides=[3,3], ceil_mode=1>(x) h = Conv(m, w) {} = GlobalAveragePool(h)"
    one, other = (f"{r} () => (float[1,32,1,1] {r}) {{ {pair.format(r)} }}" for r in ("r", "t"))
    model = graph(f"y = If(k)<then_branch = {one}, else_branch = {other}>", inputs=f"float[1,16,{size},{size}] x, bool k")
    rewrite(model, 2 * pairs)


@pytest.mark.parametrize("size", ["12", "H"])
def test_branches_whose_computed_sizes_have_one_name(size):
    """onnx keeps their values by name alone; a window of the other's size would be wrong."""
    mean = "s = Shape({}) m = Reshape(x, s) h = Conv(m, w) {} = GlobalAveragePool(h)"
    one, other = (f"{r} () => (float[1,32,1,1] {r}) {{ {mean.format(x, r)} }}" for x, r in ("xr", "zt"))
    inputs = f"float[1,16,{size},12] x, float[1,16,6,24] z, bool k"
    model = graph(f"no = Not(k) y = If(no)<then_branch = {one}, else_branch = {other}>", inputs=inputs)
    rewrite(model, 1 + (size == "12"), size=12)


COUNTED = {  # 10 times 1.3 in float32 is 13 to runtimes, and just below it to onnx
    'AveragePool<auto_pad="SAME_UPPER", ceil_mode=1, count_include_pad=1, kernel_shape=[2,1], strides=[2,6]>(x)': 18,
    "LpPool<ceil_mode=1, kernel_shape=[1,1], strides=[3,3]>(x)": 18,
    "Slice(x, i, l, i)\ni = Identity(two)": 10,
    'ConvTranspose<auto_pad="SAME_UPPER", strides=[2,2], output_padding=[1,0]>(x, v)': 17,
    'ConvTranspose<auto_pad="SAME_LOWER", strides=[6,5], output_padding=[1,3]>(x, v)': 17,
    "Upsample<scales=[1.0,1.0,1.3,2.6]>(x)": 7,
    "Upsample(x, s)": 9,
    "Resize(x, s)": 10,
    "Resize<axes=[3,-2]>(x, , t)": 18,
    "Resize(x, , k)\nk = Constant<value_floats=[1.0,1.0,1.3,2.6]>()": 13,
}


@pytest.mark.parametrize("node", COUNTED)
def test_sizes_that_onnx_counts_otherwise_than_runtimes(node):
    constants = {"v": (16, 16, 3, 3), "s": np.float32([1, 1, 1.3, 2.6]), "t": np.float32([1.3, 3.1]), "two": [2], "l": [LAST]}
    body = f"m = {node}\nh = Conv(m, w)\ny = GlobalAveragePool(h)"
    model = graph(body, constants, inputs="float[1,16,10,20] x", opset=COUNTED[node], ir=3)
    model.graph.output.append(model.graph.input[0])  # whose type onnx takes from there
    kinds = operators(model.graph)
    kinds["AveragePool"] = kinds.pop("GlobalAveragePool") + kinds.get("AveragePool", 0)
    assert operators(rewrite(model, 1).graph) == kinds


FLATTEN = "s = Shape(h)\nt = Slice(s, zero, two, zero)\nr = Concat<axis=0>(t, last)\nf = Reshape(h, r)\n"
VIEW = "s = Shape(h)\nn = Gather(s, first)\nu = Unsqueeze(n, zero)\nr = Concat<axis=0>(u, channels, last)\nf = Reshape(h, r)\n"
WINDOWS = (
    "s = Shape(h)\nn = Gather(s, first)\nu = Unsqueeze(n, zero)\ni = Gather(s, second)\nj = Div(i, half)\n"
    "v = Unsqueeze(j, zero)\nr = Concat<axis=0>(u, channels, v, two, v, two)\nf = Reshape(h, r)\n"
    "y = ReduceMean<axes=[3,5], keepdims=0>(f)\n"
)
FLOATS = WINDOWS.replace("j = Div(i, half)", "k = Cast<to=1>(i)\nl = Mul(k, point)\nj = Cast<to=7>(l)")
MEAN = "y = ReduceMean<axes=[2], keepdims=0>(f)"
COUNT = (
    "s = Shape(h)\na = ReduceSum<keepdims=0>(h, axes)\ni = Gather(s, second)\nj = Gather(s, third)\nk = Mul(i, j)\n"
    "c = Cast<to=1>(k)\ny = Div(a, c)"
)
NUMBERS = {
    "zero": [0], "two": [2], "last": [-1], "channels": [32], "axes": [2, 3], "w": (32, 16, 3, 3), "point": np.float32(0.5),
    **{name: np.array(n, np.int64) for name, n in (("first", 0), ("second", 2), ("third", 3), ("half", 2))},
}  # fmt: skip
FLAT = {"outputs": "float[a,b] y"}
OPEN = {"inputs": "float[N,16,12,12] x"}
SQUEEZED = {**DIRECT, "Squeeze": 1}


@pytest.mark.parametrize("batch", [{}, OPEN], ids=["static", "open batch"])
@pytest.mark.parametrize(
    ("body", "options", "left"),
    [(FLATTEN + MEAN, FLAT, SQUEEZED), (VIEW + MEAN, FLAT, SQUEEZED), (WINDOWS, {}, DIRECT), (FLOATS, {}, DIRECT)],
    ids=["flatten", "view", "windows", "by floats"],
)
def test_shapes_of_the_average_go_with_it(body, options, left, batch):
    assert operators(rewrite(graph(CONV + body, NUMBERS, **options, **batch), pairs=1, size=3).graph) == left


def test_a_shape_that_is_read_on_comes_from_the_input():
    result = rewrite(graph(CONV + COUNT, NUMBERS, **FLAT, **OPEN, opset=13), pairs=1, size=3)
    left = operators(result.graph)
    assert (left["Shape"], left["Slice"], left["Concat"], left["Conv"]) == (1, 1, 1, 1)
    (shape,) = (node for node in result.graph.node if node.op_type == "Shape")
    assert list(shape.input) == ["x"]


@pytest.mark.parametrize("body", ["", "<start=1>", "<start=1, end=-1>", "<end=1>", "<start=-2>"])
@pytest.mark.parametrize("batch", ["1", "N"])
def test_a_shape_as_an_output_gives_the_same(body, batch):
    body = f"{CONV}s = Shape{body}(h)\ny = {POOL}(h)"
    model = graph(body, inputs=f"float[{batch},16,12,12] x", outputs="float[a,b,c,d] y, int64[e] s")
    result, feeds = rewrite(model, pairs=1, size=3), random_feeds(model, size=3)
    np.testing.assert_array_equal(sessions.run(result, feeds)[1], sessions.run(model, feeds)[1])


def test_a_shape_that_several_nodes_on_the_way_are_read_for():
    body = CONV + f"s = Shape(h)\nk = Identity(h)\nt = Shape(k)\ny = {POOL}(k)\nz = Add(s, t)"
    rewrite(graph(body, **OPEN, outputs="float[a,b,c,d] y, int64[4] z"), pairs=1, size=3)


@pytest.mark.parametrize(
    ("body", "options", "reason"),
    [
        (f"{CONV}s = Shape(h)\ny = {POOL}(h)", {"inputs": "float[1,16,H,12] x"}, "output 'h' has 2 readers"),
        (f"{CONV}s = Shape(h)\ny = {POOL}(h)", {**OPEN, "opset": 9}, "output 'h' has 2 readers"),
        (f"{CONV}g = Relu(h)\ns = Shape(g)\ny = {POOL}(h)", OPEN, "output 'h' has 2 readers"),
        (
            f"{CONV}k = Add(h, v)\ns = Shape(k)\ny = {POOL}(k)",
            {"inputs": "float[1,16,12,12] x, float[N,32,1,1] v"},
            "Shape 's': open size; got N, expected that of a convolution's input",
        ),
        (
            f"{CONV}k = Conv<pads=[1,1,1,1]>(v, w)\nc = Concat<axis=0>(h, k)\ns = Shape(c)\ny = {POOL}(c)",
            {"inputs": "float[N,16,12,12] x, float[M,16,12,12] v"},
            "Shape 's': open size",
        ),
    ],
    ids=["open size of space", "opset 9", "not a Shape", "batch of another tensor", "two batches"],
)
def test_other_readers_keep_the_pair(body, options, reason):
    model = graph(body, **options, outputs="float[a,b,c,d] y, int64[4] s")
    result = convpool.optimize(model, check=0, lowering="direct")
    assert not result.changed
    assert any(reason in site.reason for site in result.report.sites), [site.reason for site in result.report.sites]


def test_two_pairs_that_share_a_shape():
    body = CONV + "k = Conv<pads=[1,1,1,1]>(x, w)\n" + FLATTEN + "g = Reshape(k, r)\n"
    body += "a = ReduceMean<axes=[2], keepdims=0>(f)\nb = ReduceMean<axes=[2], keepdims=0>(g)\ny = Add(a, b)"
    rewrite(graph(body, NUMBERS, **FLAT, **OPEN), pairs=2, size=3)


def test_large_tables_are_not_read_for_sizes(monkeypatch):
    names, read = [], LoadedModel.read
    monkeypatch.setattr(LoadedModel, "read", lambda self, tensor: names.append(tensor.name) or read(self, tensor))
    body = CONV + "i = Gather(table, zero)\nj = Shape(x)\nr = Concat<axis=0>(i, j)\n"
    body += f"f = Reshape(q, r)\ny = {POOL}(h)\nz = Identity(f)"
    inputs, outputs = "float[N,16,12,12] x, float[0] q", "float[a,b,c,d] y, float[e,f,g,h,i] z"
    model = graph(body, {**NUMBERS, "table": np.arange(10000, dtype=np.int64)}, inputs=inputs, outputs=outputs)
    assert convpool.optimize(model, check=0).report.summary.rewritten == 1
    assert names and "table" not in names


def test_a_batch_that_a_reshape_has_made_nameless():
    body = CONV + VIEW.replace("f = Reshape(h, r)", "g = Reshape(h, same)\nf = Reshape(g, r)").replace("last)", "area)") + MEAN
    numbers = {**NUMBERS, "same": [-1, 32, 144], "area": [144]}
    assert operators(rewrite(graph(body, numbers, **FLAT, **OPEN), pairs=1, size=3).graph) == SQUEEZED


def test_a_reshape_to_the_batch_of_another_tensor_stays():
    body = CONV + FLATTEN.replace("Shape(h)", "Shape(k)") + MEAN
    body = body.replace("s = ", "k = Conv<pads=[1,1,1,1]>(v, w)\ns = ")
    model = graph(body, NUMBERS, inputs="float[N,16,12,12] x, float[M,16,12,12] v", **FLAT)
    result = convpool.optimize(model, check=0)
    assert not result.changed
    assert "sizes of a Reshape; got unknown" in result.report.sites[0].reason


def test_each_node_of_a_shape_is_looked_at_once():
    """Forty Concats of a vector with itself are 2^40 ways to it."""
    doubled = "".join(f"d{n + 1} = Concat<axis=0>(d{n}, d{n})\n" for n in range(40))
    model = graph(doubled + "y = Identity(d40)", inputs="int64[1] d0", outputs="int64[n] y")
    (scope,) = index_model(model, numpy_helper.to_array, lambda *_: pytest.fail("nothing to compute"))
    assert scope.sizes("d40") is None
