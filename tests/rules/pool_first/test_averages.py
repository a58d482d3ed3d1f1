# SPDX-License-Identifier: Apache-2.0
"""The ways to write an average: which are found and give the same numbers with less work, and why others stay."""

import numpy as np
import onnx
import pytest

import convpool
from convpool.rules.base import Reject
from convpool.rules.convs import Pooling
from convpool.rules.pool_first.averages import box_filter, candidates, may_be_box_filter, recognise
from tests.support.models import graph, graph_of, operators
from tests.support.reject_cases import AXES, BOX, HALF, resize
from tests.support.rewriting import CONV, DIRECT, POOL, rewrite
from tests.support.scopes import function_scope, index

LINE = "h = Conv<pads=[1,1]>(x, w)\n"
ONE = {"inputs": "float[2,16,12] x", "outputs": "float[a,b,c] y", "w": (32, 16, 3)}
FLAT = {"outputs": "float[a,b] y"}
BATCHES = {"inputs": "float[N,16,12,12] x"}
ROWS = """u = Slice(h, zero, end, rows, two)
l = Slice(h, one, end, rows, two)
s = Add(u, l)
m = Div(s, half)
"""
COLUMNS = """i = Slice(m, zero, end, columns, two)
j = Slice(m, one, end, columns, two)
t = Add(i, j)
y = Div(t, half)"""


SQUEEZED = {**DIRECT, "Squeeze": 1}
FORMS: dict[str, tuple] = {  # body, operators that remain, and what `graph_of` is given
    "Unsqueeze, ReduceMean, Squeeze": (
        LINE + "u = Unsqueeze(h, b)\nm = ReduceMean(u, a)\ny = Squeeze(m, b)",
        DIRECT,
        {"a": [-2, -1], "b": [-2], **ONE, "opset": 18},
    ),
    "Unsqueeze, ReduceMean, Squeeze with attributes": (
        LINE + "u = Unsqueeze<axes=[2]>(h)\nm = ReduceMean<axes=[2,3]>(u)\ny = Squeeze<axes=[2]>(m)",
        DIRECT,
        {**ONE, "opset": 11},
    ),
    "Unsqueeze, ReduceMean without the axes": (
        LINE + "u = Unsqueeze(h, b)\ny = ReduceMean<axes=[-2,-1], keepdims=0>(u)",
        SQUEEZED,
        {"b": [-2], **ONE, **FLAT},
    ),
    "axis by axis": (CONV + "m = ReduceMean<axes=[3]>(h)\ny = ReduceMean<axes=[2]>(m)", DIRECT),
    "axis by axis, squeezed": (
        CONV + "m = ReduceMean<axes=[3], keepdims=0>(h)\ny = ReduceMean<axes=[2], keepdims=0>(m)",
        SQUEEZED,
        FLAT,
    ),
    "the first axis twice, squeezed": (
        CONV + "m = ReduceMean<axes=[2], keepdims=0>(h)\ny = ReduceMean<axes=[2], keepdims=0>(m)",
        SQUEEZED,
        FLAT,
    ),
    "axis by axis, one squeezed": (
        CONV + "m = ReduceMean<axes=[3]>(h)\ny = ReduceMean<axes=[2], keepdims=0>(m)",
        SQUEEZED,
        {"outputs": "float[a,b,c] y"},
    ),
    "one axis": (CONV + "y = ReduceMean<axes=[3]>(h)", DIRECT),
    "one axis, squeezed": (CONV + "y = ReduceMean<axes=[2], keepdims=0>(h)", SQUEEZED, {"outputs": "float[a,b,c] y"}),
    "flatten": (CONV + "f = Reshape(h, s)\ny = ReduceMean<axes=[-1], keepdims=0>(f)", SQUEEZED, {"s": [0, 0, -1], **FLAT}),
    "shuffled channels": (
        CONV + "v = Reshape(h, s)\nt = Transpose<perm=[0,2,1,3]>(v)\nu = Reshape(t, d)\ny = ReduceMean<axes=[2,3]>(u)",
        {**DIRECT, "Gather": 1},
        {"s": [1, 2, 16, 144], "d": [1, 32, 12, 12]},
    ),
    "flatten, kept": (
        CONV + "f = Reshape(h, s)\ny = ReduceMean<axes=[2]>(f)",
        SQUEEZED,
        {"s": [0, 32, 144], **BATCHES, "outputs": "float[a,b,c] y"},
    ),
    "view": (CONV + "v = Reshape(h, s)\ny = ReduceMean<axes=[3,5], keepdims=0>(v)", DIRECT, {"s": [1, 32, 6, 2, 6, 2]}),
    "view, open batch": (
        CONV + "v = Reshape(h, s)\ny = ReduceMean<axes=[-3,-1], keepdims=0>(v)",
        DIRECT,
        {"s": [-1, 32, 4, 3, 6, 2], **BATCHES},
    ),
    "view of one axis": (CONV + "v = Reshape(h, s)\ny = ReduceMean<axes=[4], keepdims=0>(v)", DIRECT, {"s": [1, 32, 12, 6, 2]}),
    "view, one after the other": (
        CONV + "v = Reshape(h, s)\nm = ReduceMean<axes=[3]>(v)\ny = ReduceMean<axes=[3,5], keepdims=0>(m)",
        DIRECT,
        {"s": [1, 32, 6, 2, 6, 2]},
    ),
    "sum": (CONV + "y = ReduceSum(h, a)", {**DIRECT, "Mul": 1}, {"a": [2, 3]}),
    "sum, squeezed": (CONV + "y = ReduceSum<axes=[2,3], keepdims=0>(h)", {**SQUEEZED, "Mul": 1}, {**FLAT, "opset": 11}),
    "sum of a mean": (CONV + "m = ReduceMean<axes=[2]>(h)\ny = ReduceSum(m, a)", {**DIRECT, "Mul": 1}, {"a": [3]}),
    "channels last": (CONV + "t = Transpose<perm=[0,2,3,1]>(h)\ny = ReduceMean<axes=[1,2], keepdims=0>(t)", SQUEEZED, FLAT),
    "axes reversed twice": (CONV + "t = Transpose(h)\nu = Transpose(t)\ny = ReduceMean<axes=[2,3]>(u)", DIRECT),
    "tokens": (
        CONV + "f = Reshape(h, s)\nt = Transpose<perm=[0,2,1]>(f)\ny = ReduceMean<axes=[1], keepdims=0>(t)",
        SQUEEZED,
        {"s": [0, 0, -1], **FLAT},
    ),
    "SpaceToDepth": (
        CONV + "d = SpaceToDepth<blocksize=2>(h)\nv = Reshape(d, s)\ny = ReduceMean<axes=[1], keepdims=0>(v)",
        DIRECT,
        {"s": [1, 4, 32, 6, 6]},
    ),
    "pixel_unshuffle": (
        CONV + "v = Reshape(h, s)\nt = Transpose<perm=[0,1,3,5,2,4]>(v)\nu = Reshape(t, d)\nq = Reshape(u, e)\n"
        "y = ReduceMean<axes=[2], keepdims=0>(q)",
        DIRECT,
        {"s": [1, 32, 6, 2, 6, 2], "d": [1, 128, 6, 6], "e": [1, 32, 4, 6, 6]},
    ),
    "Resize by scales": (CONV + resize(), DIRECT, HALF),
    "Resize by sizes": (CONV + resize(inputs=", , sizes"), DIRECT, {"sizes": [1, 32, 6, 6]}),
    "Resize by scales of axes": (
        CONV + resize(', axes=[3,2], coordinate_transformation_mode="pytorch_half_pixel"'),
        DIRECT,
        {**HALF, "scales": np.array([0.5, 1], np.float32), "opset": 18},
    ),
    "Resize by sizes of axes, open batch": (
        CONV + resize(', axes=[2,3], keep_aspect_ratio_policy="stretch"', inputs=", , sizes"),
        DIRECT,
        {"sizes": [6, 6], **BATCHES, "opset": 19},
    ),
    "box filter": (CONV + "y = Conv<strides=[2,2], group=32>(h, quarter)", DIRECT, BOX),
    "box filter, computed": (
        CONV + "y = Conv<strides=[3,2], group=32>(h, third)",
        DIRECT,
        {"third": np.full((32, 1, 3, 2), 1 / 6, np.float32)},
    ),
    "box filter with other strides": (
        "h = Conv(x, w)\ny = Conv<strides=[2,2], group=32>(h, ninth, nothing)",
        DIRECT,
        {"ninth": np.full((32, 1, 3, 3), 1 / 9, np.float32), "nothing": np.zeros(32, np.float32)},
    ),
    "box filter of ones": (
        CONV + "y = Conv<strides=[2,2], group=32>(h, ones)",
        {**DIRECT, "Mul": 1},
        {"ones": np.ones((32, 1, 2, 2), np.float32)},
    ),
    "box filter whose end pads no window reaches": (
        CONV + "y = Conv<strides=[2,2], pads=[0,0,1,1], group=32>(h, quarter)",
        DIRECT,
        BOX,
    ),
    "box filter with SAME": (CONV + 'y = Conv<strides=[2,2], auto_pad="SAME_UPPER", group=32>(h, quarter)', DIRECT, BOX),
    "slices by rows, then by columns": (CONV + ROWS + COLUMNS, DIRECT, AXES),
    "two poolings": (CONV + f"p = {POOL}(h)\ny = AveragePool<kernel_shape=[3,3], strides=[3,3]>(p)", DIRECT),
    "a pooling and the mean of the map": (CONV + f"p = {POOL}(h)\ny = GlobalAveragePool(p)", DIRECT),
    "a pooling that leaves a row, and the mean of its result": (
        CONV + f"p = {POOL}(h)\ny = GlobalAveragePool(p)",
        DIRECT,
        {"inputs": "float[1,16,13,13] x"},
    ),
    "a mean over rows, a window over columns": (
        CONV + "p = ReduceMean<axes=[2]>(h)\ny = AveragePool<kernel_shape=[1,2], strides=[1,2]>(p)",
        DIRECT,
    ),
}
WINDOWS = {  # kernel of the AveragePool that remains, strides of the Conv behind it
    "one axis": ([1, 12], [1, 1]),
    "view, open batch": ([3, 2], [3, 2]),
    "view of one axis": ([1, 2], [1, 2]),
    "SpaceToDepth": ([2, 2], [2, 2]),
    "Resize by scales of axes": ([1, 2], [1, 2]),
    "box filter, computed": ([3, 2], [3, 2]),
    "box filter with other strides": ([3, 3], [2, 2]),
    "slices by rows, then by columns": ([2, 2], [2, 2]),
    "two poolings": ([6, 6], [6, 6]),
    "a pooling and the mean of the map": ([12, 12], [1, 1]),
    "a pooling that leaves a row, and the mean of its result": ([12, 12], [12, 12]),
    "a mean over rows, a window over columns": ([12, 2], [1, 2]),
}
FUSED = (
    "view",
    "view of one axis",
    "SpaceToDepth",
    "Resize by scales",
    "box filter with other strides",
    "box filter of ones",
    "slices by rows, then by columns",
)
LARGE = (
    "axis by axis",
    "axis by axis, squeezed",
    "the first axis twice, squeezed",
    "axis by axis, one squeezed",
    "flatten",
    "shuffled channels",
    "flatten, kept",
    "sum",
    "sum, squeezed",
    "sum of a mean",
    "channels last",
    "axes reversed twice",
    "tokens",
    "a pooling and the mean of the map",
    "a pooling that leaves a row, and the mean of its result",
)
"""Windows of more than 64 elements, for which the plugin has no fast kernel."""


def form(name: str) -> onnx.ModelProto:
    """A model of FORMS."""
    body, _, given = (*FORMS[name], {})[:3]
    return graph_of(body, given)


@pytest.mark.parametrize("name", FORMS)
def test_found_and_equal(name):
    model = form(name)
    result = rewrite(model, 1)
    assert operators(result.graph) == FORMS[name][1]
    (site,) = convpool.optimize(model, check=1, lowering="direct").report.sites
    assert site.macs_before is not None and site.macs_after < site.macs_before
    if name in WINDOWS:
        numbers = {node.op_type: {item.name: list(item.ints) for item in node.attribute} for node in result.graph.node}
        assert (numbers["AveragePool"]["kernel_shape"], numbers["Conv"]["strides"]) == WINDOWS[name]


@pytest.mark.parametrize("name", FORMS)
def test_as_a_node_of_the_operator(name):
    found = operators(rewrite(form(name), 1, "convavgpool").graph)
    assert found.get("ConvAvgPool", 0) == (name not in LARGE)
    assert name in LARGE or "Mul" not in found


@pytest.mark.parametrize("name", FUSED)
def test_as_one_convolution(name):
    assert operators(rewrite(form(name), 1, "fused").graph)["Conv"] == 1


def test_a_map_of_open_size_may_be_flattened():
    body = "h = Conv(x, w)\nf = Reshape(h, s)\ny = ReduceMean<axes=[-1], keepdims=0>(f)"
    model = graph(body, {"s": [0, 0, -1], "w": (32, 16, 1, 1)}, inputs="float[1,16,H,W] x", **FLAT)
    assert operators(rewrite(model, 1).graph) == {"Conv": 1, "GlobalAveragePool": 1, "Squeeze": 1}


def test_windows_that_overlap_are_moved_one_after_the_other():
    body = CONV + "p = AveragePool<kernel_shape=[3,3], strides=[2,2]>(h)\ny = AveragePool<kernel_shape=[2,2], strides=[2,2]>(p)"
    result = rewrite(graph(body, inputs="float[1,16,13,13] x", opset=19), 2)
    assert operators(result.graph) == {"AveragePool": 2, "Conv": 1}


def test_a_window_over_every_second_element_composes_with_a_window_of_one():
    body = CONV + "p = AveragePool<kernel_shape=[1,1], strides=[2,2]>(h)\ny = AveragePool<kernel_shape=[2,2], strides=[2,2]>(p)"
    pool = next(node for node in rewrite(graph(body, opset=19), 1).graph.node if node.op_type == "AveragePool")
    assert next(list(item.ints) for item in pool.attribute if item.name == "dilations") == [2, 2]


def test_an_average_that_something_else_reads_is_moved_alone():
    body = CONV + "m = ReduceMean<axes=[3]>(h)\ny = ReduceMean<axes=[2]>(m)\nz = Relu(m)"
    result = rewrite(graph(body, outputs="float[a,b,c,d] y, float[d,e,f,g] z"), 1)
    assert operators(result.graph) == {**DIRECT, "ReduceMean": 1, "Relu": 1}
    slices = ROWS + COLUMNS + "\nz = Relu(m)"
    result = rewrite(graph(CONV + slices, AXES, outputs="float[a,b,c,d] y, float[d,e,f,g] z"), 1)
    assert operators(result.graph) == {**DIRECT, "Slice": 2, "Add": 1, "Div": 1, "Relu": 1}


@pytest.mark.parametrize("name", ["h", "p", "y"])
def test_any_excluded_name_of_averages_of_averages_keeps_them(name):
    model = graph(CONV + f"p = {POOL}(h)\ny = GlobalAveragePool(p)")
    (site,) = convpool.optimize(model, check=0, exclude=name).report.sites
    assert (site.status, site.conv, site.pool) == ("excluded", "h", "p")


def test_of_averages_of_averages_the_first_is_reported():
    model = graph(CONV + "p = AveragePool<kernel_shape=[2,2], pads=[1,1,1,1]>(h)\ny = GlobalAveragePool(p)")
    (site,) = convpool.optimize(model, check=0).report.sites
    assert (site.pool, site.reason) == ("p", "AveragePool 'p': pooling pads; got [1, 1, 1, 1], expected no padding")


@pytest.mark.parametrize("name", ["sum", "box filter of ones"])
def test_half_precision(name):
    body, _, given = (*FORMS[name], {})[:3]
    halves = {key: value.astype(np.float16) if isinstance(value, np.ndarray) else value for key, value in given.items()}
    weights = np.random.default_rng(0).uniform(-1, 1, (32, 16, 3, 3)).astype(np.float16)
    half = {**halves, "w": weights, "inputs": "float16[1,16,12,12] x", "outputs": "float16[a,b,c,d] y"}
    assert convpool.optimize(graph_of(body, half), check=2).report.verification.passed


def test_a_box_filter_by_an_attribute_of_the_function():
    box = "w2 = Constant<value_floats = [1.0]>() b = Conv<group: int = @e>(a, w2)"
    assert may_be_box_filter(function_scope(box), 1) is None


def test_a_strided_box_filter_with_pads_by_a_size_that_is_unknown():
    box = {"box": np.full((16, 1, 2, 2), 0.25, np.float32)}
    for attributes, wrong in (("strides=[2,2]", False), ('strides=[2,2], auto_pad="SAME_UPPER"', True)):
        (scope,) = index(graph(f"y = Conv<group=16, {attributes}>(x, box)", box, inputs="float[N,16,H,W] x"))
        found = box_filter(scope, 0, 2, None)
        assert isinstance(found, Reject if wrong else Pooling) and (not wrong or found.condition == "auto_pad")


@pytest.mark.parametrize(("size", "known"), [(256, True), (257, False)])
def test_a_sum_over_more_positions_than_its_type_has_numbers(size, known):
    weights = {"w": np.ones((8, 8, 1, 1), np.float16)}
    inputs, outputs = f"float16[1,8,{size},{size - 1}] x", "float16[a,b,c,d] y"
    model = graph("h = Conv(x, w)\ny = ReduceSum(h, axes)", {**weights, "axes": [2, 3]}, inputs=inputs, outputs=outputs)
    (site,) = convpool.optimize(model, check=0).report.sites
    told = f"ReduceSum 'y': factor of the average; got {257.0 * 256}, expected a number that the type has"
    assert site.reason == (None if known else told)


COMPOSED = {  # averages of averages: size, then the kind, window, strides and factor of both together
    "p = AveragePool<kernel_shape=[2,2], strides=[2,2]>(x)\ny = AveragePool<kernel_shape=[3,3], strides=[3,3]>(p)": (
        12,
        ("pool", (6, 6), (6, 6), 1.0),
    ),
    "p = AveragePool<kernel_shape=[2,2], strides=[2,2]>(x)\ny = GlobalAveragePool(p)": (12, ("global", None, None, 1.0)),
    "p = AveragePool<kernel_shape=[3,3], strides=[3,3]>(x)\ny = GlobalAveragePool(p)": (13, ("mean", (12, 12), (12, 12), 1.0)),
    "p = AveragePool<kernel_shape=[2,2]>(x)\ny = AveragePool<kernel_shape=[2,2]>(p)": (12, ("pool", (2, 2), (1, 1), 1.0)),
    "p = ReduceSum(x, width)\ny = ReduceSum(p, height)": (12, ("global", None, None, 144.0)),
    "p = AveragePool<kernel_shape=[2,2], strides=[2,2]>(x)\ny = ReduceSum(p, space)": (12, ("global", None, None, 36.0)),
}


@pytest.mark.parametrize("body", COMPOSED)
def test_averages_of_averages(body):
    """With strides of 1 the elements of the second window overlap those of the first: only the first is taken."""
    size, wanted = COMPOSED[body]
    constants = {"width": [3], "height": [2], "space": [2, 3]}
    (scope,) = index(graph(body, constants, inputs=f"float[1,16,{size},{size}] x"))
    (chain,) = candidates(scope)
    found = recognise(scope, chain, 2)
    assert isinstance(found, Pooling) and found.input == "x"
    spec = found.spec
    kernel, strides = (None, None) if spec is None else (spec.kernel_shape, spec.strides)
    assert (found.kind, kernel, strides, found.factor) == wanted
