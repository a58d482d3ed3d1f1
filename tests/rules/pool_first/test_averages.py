# SPDX-License-Identifier: Apache-2.0
"""The ways to write an average: which are found and give the same numbers with less work, and why others stay."""

import numpy as np
import onnx
import pytest

import convpool
from convpool.rules.pool_first.averages import may_be_box_filter
from tests.support.models import function_scope, graph, graph_of, operators
from tests.support.rewriting import CONV, CORNER_SLICES, CORNERS, DIRECT, LAST, POOL, rewrite, verified

LINE = "h = Conv<pads=[1,1]>(x, w)\n"
ONE = {"inputs": "float[2,16,12] x", "outputs": "float[a,b,c] y", "w": (32, 16, 3)}
FLAT, ROW = {"outputs": "float[a,b] y"}, {"outputs": "float[a,b,c] y"}
TOKENS = {"s": [0, 0, -1]}
DROPPED = "m = ReduceMean<axes=[{}], keepdims=0>(h)\n"
BATCHES = {"inputs": "float[N,16,12,12] x"}
ROWS = "u = Slice(h, zero, end, rows, two)\nl = Slice(h, one, end, rows, two)\ns = Add(u, l)\nm = Div(s, half)\n"
COLUMNS = "i = Slice(m, zero, end, columns, two)\nj = Slice(m, one, end, columns, two)\nt = Add(i, j)\ny = Div(t, half)"
AXES = {"zero": [0], "one": [1], "end": [LAST], "two": [2], "rows": [2], "columns": [3], "half": np.float32(2)}
HALF = {"r": np.zeros(0, np.float32), "scales": np.array([1, 1, 0.5, 0.5], np.float32)}


def resize(attributes: str = "", inputs: str = "r, scales") -> str:
    """A linear Resize from h to y."""
    return f'y = Resize<mode="linear"{attributes}>(h, {inputs})'


def box(height: int, width: int, number: float | None = None) -> dict[str, np.ndarray]:
    """The weights of a box filter: this number, or one over that of their elements."""
    return {"box": np.full((32, 1, height, width), 1 / (height * width) if number is None else number, np.float32)}


SQUEEZED = {**DIRECT, "Squeeze": 1}
SCALED = {**DIRECT, "Mul": 1}
VIEW = {"s": [1, 32, 6, 2, 6, 2]}
FORMS: dict[str, tuple] = {  # body, what `graph_of` is given, and the operators that remain where these are not DIRECT
    "Unsqueeze, ReduceMean, Squeeze": (
        LINE + "u = Unsqueeze(h, b)\nm = ReduceMean(u, a)\ny = Squeeze(m, b)",
        {"a": [-2, -1], "b": [-2], **ONE, "opset": 18},
    ),
    "Unsqueeze, ReduceMean, Squeeze with attributes": (
        LINE + "u = Unsqueeze<axes=[2]>(h)\nm = ReduceMean<axes=[2,3]>(u)\ny = Squeeze<axes=[2]>(m)",
        {**ONE, "opset": 11},
    ),
    "Unsqueeze, ReduceMean without the axes": (
        LINE + "u = Unsqueeze(h, b)\ny = ReduceMean<axes=[-2,-1], keepdims=0>(u)",
        {"b": [-2], **ONE, **FLAT},
        SQUEEZED,
    ),
    "axis by axis": (CONV + "m = ReduceMean<axes=[3]>(h)\ny = ReduceMean<axes=[2]>(m)", {}),
    "axis by axis, squeezed": (CONV + DROPPED.format(3) + "y = ReduceMean<axes=[2], keepdims=0>(m)", FLAT, SQUEEZED),
    "the first axis twice, squeezed": (CONV + DROPPED.format(2) + "y = ReduceMean<axes=[2], keepdims=0>(m)", FLAT, SQUEEZED),
    "axis by axis, one squeezed": (CONV + "m = ReduceMean<axes=[3]>(h)\ny = ReduceMean<axes=[2], keepdims=0>(m)", ROW, SQUEEZED),
    "one axis": (CONV + "y = ReduceMean<axes=[3]>(h)", {}),
    "one axis, squeezed": (CONV + "y = ReduceMean<axes=[2], keepdims=0>(h)", ROW, SQUEEZED),
    "flatten": (CONV + "f = Reshape(h, s)\ny = ReduceMean<axes=[-1], keepdims=0>(f)", {**TOKENS, **FLAT}, SQUEEZED),
    "shuffled channels": (
        CONV + "v = Reshape(h, s)\nt = Transpose<perm=[0,2,1,3]>(v)\nu = Reshape(t, d)\ny = ReduceMean<axes=[2,3]>(u)",
        {"s": [1, 2, 16, 144], "d": [1, 32, 12, 12]},
        {**DIRECT, "Gather": 1},
    ),
    "flatten, kept": (CONV + "f = Reshape(h, s)\ny = ReduceMean<axes=[2]>(f)", {"s": [0, 32, 144], **BATCHES, **ROW}, SQUEEZED),
    "view": (CONV + "v = Reshape(h, s)\ny = ReduceMean<axes=[3,5], keepdims=0>(v)", VIEW),
    "view, open batch": (
        CONV + "v = Reshape(h, s)\ny = ReduceMean<axes=[-3,-1], keepdims=0>(v)",
        {"s": [-1, 32, 4, 3, 6, 2], **BATCHES},
    ),
    "view of one axis": (CONV + "v = Reshape(h, s)\ny = ReduceMean<axes=[4], keepdims=0>(v)", {"s": [1, 32, 12, 6, 2]}),
    "view, one after the other": (
        CONV + "v = Reshape(h, s)\nm = ReduceMean<axes=[3]>(v)\ny = ReduceMean<axes=[3,5], keepdims=0>(m)",
        VIEW,
    ),
    "sum": (CONV + "y = ReduceSum(h, a)", {"a": [2, 3]}, SCALED),
    "sum, squeezed": (CONV + "y = ReduceSum<axes=[2,3], keepdims=0>(h)", {**FLAT, "opset": 11}, {**SQUEEZED, "Mul": 1}),
    "sum of a mean": (CONV + "m = ReduceMean<axes=[2]>(h)\ny = ReduceSum(m, a)", {"a": [3]}, SCALED),
    "channels last": (CONV + "t = Transpose<perm=[0,2,3,1]>(h)\ny = ReduceMean<axes=[1,2], keepdims=0>(t)", FLAT, SQUEEZED),
    "axes reversed twice": (CONV + "t = Transpose(h)\nu = Transpose(t)\ny = ReduceMean<axes=[2,3]>(u)", {}),
    "tokens": (
        CONV + "f = Reshape(h, s)\nt = Transpose<perm=[0,2,1]>(f)\ny = ReduceMean<axes=[1], keepdims=0>(t)",
        {**TOKENS, **FLAT},
        SQUEEZED,
    ),
    "SpaceToDepth": (
        CONV + "d = SpaceToDepth<blocksize=2>(h)\nv = Reshape(d, s)\ny = ReduceMean<axes=[1], keepdims=0>(v)",
        {"s": [1, 4, 32, 6, 6]},
    ),
    "SpaceToDepth of opset 28": (
        CONV + 'd = SpaceToDepth<blocksize=2, mode="CRD">(h)\nv = Reshape(d, s)\ny = ReduceMean<keepdims=0>(v, a)',
        {"s": [1, 32, 4, 6, 6], "a": [2], "opset": 28},
    ),
    "pixel_unshuffle": (
        CONV + "v = Reshape(h, s)\nt = Transpose<perm=[0,1,3,5,2,4]>(v)\nu = Reshape(t, d)\nq = Reshape(u, e)\n"
        "y = ReduceMean<axes=[2], keepdims=0>(q)",
        {**VIEW, "d": [1, 128, 6, 6], "e": [1, 32, 4, 6, 6]},
    ),
    "Resize by scales": (CONV + resize(), HALF),
    "Resize by sizes": (CONV + resize(inputs=", , sizes"), {"sizes": [1, 32, 6, 6]}),
    "Resize by scales of axes": (
        CONV + resize(', axes=[3,2], coordinate_transformation_mode="pytorch_half_pixel"'),
        {**HALF, "scales": np.array([0.5, 1], np.float32), "opset": 18},
    ),
    "Resize by sizes of axes, open batch": (
        CONV + resize(', axes=[2,3], keep_aspect_ratio_policy="stretch"', inputs=", , sizes"),
        {"sizes": [6, 6], **BATCHES, "opset": 19},
    ),
    "box filter": (CONV + "y = Conv<strides=[2,2], group=32>(h, box)", box(2, 2)),
    "box filter, computed": (CONV + "y = Conv<strides=[3,2], group=32>(h, box)", box(3, 2)),
    "box filter with other strides": (
        "h = Conv(x, w)\ny = Conv<strides=[2,2], group=32>(h, box, nothing)",
        {**box(3, 3), "nothing": np.zeros(32, np.float32)},
    ),
    "box filter of ones": (CONV + "y = Conv<strides=[2,2], group=32>(h, box)", box(2, 2, 1), SCALED),
    "box filter of nearly a quarter": (CONV + "y = Conv<strides=[2,2], group=32>(h, box)", box(2, 2, 0.2501), SCALED),
    "box filter, end pads unread": (CONV + "y = Conv<strides=[2,2], pads=[0,0,1,1], group=32>(h, box)", box(2, 2)),
    "box filter with SAME": (CONV + 'y = Conv<strides=[2,2], auto_pad="SAME_UPPER", group=32>(h, box)', box(2, 2)),
    "slices by rows, then by columns": (CONV + ROWS + COLUMNS, AXES),
    "two poolings": (CONV + f"p = {POOL}(h)\ny = AveragePool<kernel_shape=[3,3], strides=[3,3]>(p)", {}),
    "a pooling and the mean of the map": (CONV + f"p = {POOL}(h)\ny = GlobalAveragePool(p)", {}),
    "a pooling that leaves a row, and the mean of its result": (
        CONV + f"p = {POOL}(h)\ny = GlobalAveragePool(p)",
        {"inputs": "float[1,16,13,13] x"},
    ),
    "rows, then pairs": (CONV + "p = ReduceMean<axes=[2]>(h)\ny = AveragePool<kernel_shape=[1,2], strides=[1,2]>(p)", {}),
}
if onnx.defs.onnx_opset_version() < 28:
    del FORMS["SpaceToDepth of opset 28"]
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
    "rows, then pairs": ([12, 2], [1, 2]),
}
FUSED = (
    "view", "view of one axis", "SpaceToDepth", "Resize by scales", "box filter with other strides",
    "box filter of ones", "slices by rows, then by columns",
)  # fmt: skip
LARGE = (
    "axis by axis", "axis by axis, squeezed", "the first axis twice, squeezed", "axis by axis, one squeezed",
    "flatten", "shuffled channels", "flatten, kept", "sum", "sum, squeezed", "sum of a mean", "channels last",
    "axes reversed twice", "tokens", "a pooling and the mean of the map",
    "a pooling that leaves a row, and the mean of its result",
)  # fmt: skip
"""Windows of more than 64 elements, for which the plugin has no fast kernel."""


def form(name: str) -> onnx.ModelProto:
    """A model of FORMS."""
    return graph_of(*FORMS[name][:2])


@pytest.mark.parametrize("name", FORMS)
def test_found_and_equal(name):
    model = form(name)
    result = rewrite(model, 1)
    assert operators(result.graph) == (*FORMS[name], DIRECT)[2]
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


def test_a_map_of_open_size_may_be_flattened_or_lose_an_axis():
    body = "h = Conv(x, w)\nf = Reshape(h, s)\ny = ReduceMean<axes=[-1], keepdims=0>(f)"
    model = graph(body, {"s": [0, 0, -1], "w": (32, 16, 1, 1)}, inputs="float[1,16,H,W] x", **FLAT)
    assert operators(rewrite(model, 1).graph) == {"Conv": 1, "GlobalAveragePool": 1, "Squeeze": 1}
    pooled = "f = Squeeze(h, b)\nu = Unsqueeze(f, b)\ny = AveragePool<kernel_shape=[1,2], strides=[1,2]>(u)"  # as of Paddle
    model = graph("h = Conv(x, w)\n" + pooled, {"b": [2], "w": (32, 16, 1, 3)}, inputs="float[N,16,1,W] x")
    assert operators(rewrite(model, 1).graph) == DIRECT


def test_one_channel_may_be_flattened():
    given = {"w": (1, 16, 3, 3), "inputs": "float[2,16,8,8] x", **FLAT}
    result = rewrite(graph_of(CONV + "f = Flatten(h)\ny = ReduceMean<axes=[1]>(f)", given), 1, target="cpu", lowering="auto")
    assert operators(result.graph) == {"AveragePool": 1, "Conv": 1, "Squeeze": 1}


def test_windows_that_overlap_are_moved_one_after_the_other():
    body = CONV + "p = AveragePool<kernel_shape=[3,3], strides=[2,2]>(h)\ny = AveragePool<kernel_shape=[2,2], strides=[2,2]>(p)"
    assert operators(rewrite(graph(body, inputs="float[1,16,13,13] x", opset=19), 2).graph) == {"AveragePool": 2, "Conv": 1}


def test_a_window_over_every_second_element_composes_with_a_window_of_one():
    body = CONV + "p = AveragePool<kernel_shape=[1,1], strides=[2,2]>(h)\ny = AveragePool<kernel_shape=[2,2], strides=[2,2]>(p)"
    pool = next(node for node in rewrite(graph(body, opset=19), 1).graph.node if node.op_type == "AveragePool")
    assert next(list(item.ints) for item in pool.attribute if item.name == "dilations") == [2, 2]


def test_an_average_that_something_else_reads_is_moved_alone():
    body = CONV + "m = ReduceMean<axes=[3]>(h)\ny = ReduceMean<axes=[2]>(m)\nz = Relu(m)"
    result = rewrite(graph(body, outputs="float[a,b,c,d] y, float[d,e,f,g] z"), 1)
    assert operators(result.graph) == {**DIRECT, "ReduceMean": 1, "Relu": 1}
    result = rewrite(graph(CONV + ROWS + COLUMNS + "\nz = Relu(m)", AXES, outputs="float[a,b,c,d] y, float[d,e,f,g] z"), 1)
    assert operators(result.graph) == {**DIRECT, "Slice": 2, "Add": 1, "Div": 1, "Relu": 1}


@pytest.mark.parametrize("name", ["h", "p", "y"])
def test_any_excluded_name_of_averages_of_averages_keeps_them(name):
    (site,) = convpool.optimize(graph(CONV + f"p = {POOL}(h)\ny = GlobalAveragePool(p)"), check=0, exclude=name).report.sites
    assert (site.status, site.conv, site.pool) == ("excluded", "h", "p")


def test_of_averages_of_averages_the_first_is_reported():
    model = graph(CONV + "p = AveragePool<kernel_shape=[2,2], pads=[1,1,1,1]>(h)\ny = GlobalAveragePool(p)")
    (site,) = convpool.optimize(model, check=0).report.sites
    assert (site.pool, site.reason) == ("p", "AveragePool 'p': pooling pads; got [1, 1, 1, 1], expected no padding")


@pytest.mark.parametrize("name", ["sum", "box filter of ones"])
def test_half_precision(name):
    body, given = FORMS[name][:2]
    halves = {key: value.astype(np.float16) if isinstance(value, np.ndarray) else value for key, value in given.items()}
    weights = np.random.default_rng(0).uniform(-1, 1, (32, 16, 3, 3)).astype(np.float16)
    half = {**halves, "w": weights, "inputs": "float16[1,16,12,12] x", "outputs": "float16[a,b,c,d] y"}
    assert convpool.optimize(graph_of(body, half), check=2).report.verification.passed


def test_a_box_filter_by_an_attribute_of_the_function():
    assert may_be_box_filter(function_scope("w2 = Constant<value_floats = [1.0]>() b = Conv<group: int = @e>(a, w2)"), 1) is None


@pytest.mark.parametrize(("size", "known"), [(256, True), (257, False)])
def test_a_sum_over_more_positions_than_its_type_has_numbers(size, known):
    weights = {"w": np.ones((8, 8, 1, 1), np.float16)}
    inputs, outputs = f"float16[1,8,{size},{size - 1}] x", "float16[a,b,c,d] y"
    model = graph("h = Conv(x, w)\ny = ReduceSum(h, axes)", {**weights, "axes": [2, 3]}, inputs=inputs, outputs=outputs)
    (site,) = convpool.optimize(model, check=0).report.sites
    told = f"ReduceSum 'y': factor of the average; got {257.0 * 256}, expected a number that the type has"
    assert site.reason == (None if known else told)


ORDER = "ReduceMean 'y': axes of the average; got others, expected batch, channels and space, in order"
POINTWISE = (32, 16, 1, 1)
REJECTS: dict[str, tuple] = {  # body, the reason, and what `graph_of` is given
    "computed axes": (
        CONV + "f = Reshape(h, s)\ny = ReduceMean(f, a)",
        "ReduceMean 'y': axes; got computed, or an input that a caller may override, expected a constant",
        {**TOKENS, "inputs": "float[1,16,12,12] x, int64[1] a", **ROW, "opset": 18},
    ),
    "open size flattened": (
        "h = Conv(x, w)\nf = Reshape(h, s)\ny = ReduceMean<axes=[2]>(f)",
        "Reshape 'f': sizes of a Reshape; got unknown, expected static sizes",
        {"s": [1, 32, -1], "w": POINTWISE, "inputs": "float[1,16,H,W] x", **ROW},
    ),
    "open size summed": (
        "h = Conv(x, w)\ny = ReduceSum(h, a)",
        "ReduceSum 'y': elements of a ReduceSum; got an unknown number, expected static sizes",
        {"a": [2, 3], "w": POINTWISE, "inputs": "float[1,16,H,W] x"},
    ),
    "one axis of open size": (
        "h = Conv(x, w)\ny = ReduceMean<axes=[3]>(h)",
        "ReduceMean 'y': size averaged; got unknown, expected static sizes",
        {"w": POINTWISE, "inputs": "float[1,16,12,W] x"},
    ),
    "axes that are cut across": (
        CONV + "f = Reshape(h, s)\ny = ReduceMean<axes=[3]>(f)",
        "Reshape 'f': shape of a Reshape; got [1, 32, 9, 16], expected axes split in two, or joined",
        {"s": [1, 32, 9, 16]},
    ),
    "batch and channels joined": (
        CONV + "f = Reshape(h, s)\ny = ReduceMean<axes=[1]>(f)",
        "Reshape 'f': shape of a Reshape; got [64, 144], expected axes split in two, or joined",
        {"s": [-1, 144], "inputs": "float[2,16,12,12] x", **FLAT},
    ),
    "the outer part of an axis": (
        CONV + "v = Reshape(h, s)\ny = ReduceMean<axes=[2,4], keepdims=0>(v)",
        "ReduceMean 'y': positions averaged on spatial axis 0; got others, expected whole windows side by side",
        {"s": [1, 32, 2, 6, 2, 6]},
    ),
    "parts kept apart": (
        CONV + "v = Reshape(h, s)\ny = ReduceMean<axes=[3,5]>(v)",
        ORDER,
        {**VIEW, "outputs": "float[a,b,c,d,e5,f] y"},
    ),
    "channels last, kept": (CONV + "t = Transpose<perm=[0,2,3,1]>(h)\ny = ReduceMean<axes=[1,2]>(t)", ORDER),
    "rows and columns exchanged": (
        CONV + "t = Transpose<perm=[0,1,3,2]>(h)\nv = Reshape(t, s)\ny = ReduceMean<axes=[3,5], keepdims=0>(v)",
        ORDER,
        VIEW,
    ),
    "SpaceToDepth of an open size": (
        CONV + "d = SpaceToDepth<blocksize=2>(h)\ny = ReduceMean<axes=[2,3]>(d)",
        "SpaceToDepth 'd': sizes of a SpaceToDepth; got unknown, or not its blocks', expected multiples of the block size",
        {"inputs": "float[1,16,H,W] x"},
    ),
    "SpaceToDepth of no rows": (
        CONV + "d = SpaceToDepth<blocksize=2>(h)\ny = ReduceMean<axes=[2,3]>(d)",
        "SpaceToDepth 'd': sizes of a SpaceToDepth; got unknown, or not its blocks', expected multiples of the block size",
        {"inputs": "float[1,16,0,8] x"},
    ),
    "a view read elsewhere": (
        CONV + "f = Reshape(h, s)\ny = ReduceMean<axes=[2]>(f)\nz = Relu(f)",
        "Reshape 'f': readers; got a reader outside the average, expected none",
        {**TOKENS, "outputs": "float[a,b,c] y, float[d,e,f] z"},
    ),
    "box filter with pads": (
        CONV + "y = Conv<strides=[2,2], pads=[1,1,1,1], group=32>(h, box)",
        "Conv 'y': pooling pads; got [1, 1, 1, 1], expected no padding",
        box(3, 3),
    ),
    "box filter with a bias": (
        CONV + "y = Conv<strides=[2,2], group=32>(h, box, k)",
        "Conv 'y': bias of a box filter; got numbers, expected none, or zeros",
        {**box(2, 2), "k": (32,)},
    ),
    "over everything": (
        CONV + "y = ReduceMean<keepdims=0>(h)",
        "ReduceMean 'y': channels averaged with the positions; got 32, expected one",
        {"outputs": "float y"},
    ),
    "over everything, of unknown channels": (
        "h = Conv<kernel_shape=[1,1]>(x, v)\ny = ReduceMean(h)",
        "ReduceMean 'y': channels averaged with the positions; got an unknown number, expected one",
        {"inputs": "float[1,16,12,12] x, float[M,16,1,1] v"},
    ),
    "over a group's channels": (
        CONV + "f = Reshape(h, s)\ny = ReduceMean<axes=[2]>(f)",
        "ReduceMean 'y': channels averaged with the positions; got 8, expected one",
        {"s": [1, 4, -1], **ROW},
    ),
    "behind a Squeeze of the batch": (
        CONV + "f = Squeeze(h, zero)\ny = ReduceMean<axes=[1,2]>(f)",
        "Squeeze 'f': axes of Squeeze; got [0], expected channels or space, of size 1",
        {"zero": [0], **ROW},
    ),
    "behind a Squeeze of what has size 1": (
        CONV + "f = Squeeze(h)\ny = ReduceMean<axes=[1,2]>(f)",
        "Squeeze 'f': axes of Squeeze; got none, expected some of 4",
        ROW,
    ),
}
HALF_PIXEL, SPATIAL = "expected half_pixel or pytorch_half_pixel", "expected 1/2 or 1 on spatial axes"
MODE = "coordinate_transformation_mode"
RESIZES: dict[str, tuple] = {  # the Resize of CONV's result, the reason, and what `graph_of` is given beside HALF
    "nearest": (resize().replace("linear", "nearest"), "mode; got nearest, expected linear"),
    "cubic": (resize().replace("linear", "cubic"), "mode; got cubic, expected linear"),
    "antialias": (resize(", antialias=1"), "antialias; got 1, expected 0", {"opset": 18}),
    "asymmetric": (resize(f', {MODE}="asymmetric"'), f"{MODE}; got asymmetric, {HALF_PIXEL}"),
    "align_corners": (resize(f', {MODE}="align_corners"'), f"{MODE}; got align_corners, {HALF_PIXEL}"),
    "of opset 10": (resize(inputs="scales"), f"{MODE}; got asymmetric, {HALF_PIXEL}", {"opset": 10}),
    "of an odd size": (
        resize(),
        "size halved; got [12, 13], expected even numbers; runtimes scale odd ones differently",
        {"inputs": "float[1,16,12,13] x"},
    ),
    "of an open size": (
        resize(),
        "size of the Resize's input; got unknown, expected static spatial sizes",
        {"inputs": "float[1,16,12,W] x"},
    ),
    "to one element": (
        resize(f', {MODE}="pytorch_half_pixel"'),
        "elements that pytorch_half_pixel leaves; got 1, expected more",
        {"inputs": "float[1,16,2,12] x"},
    ),
    "to a quarter": (resize(), f"scales; got [1.0, 1.0, 0.25, 0.25], {SPATIAL}", {"scales": np.float32([1, 1, 0.25, 0.25])}),
    "of channels": (resize(), f"scales; got [1.0, 0.5, 0.5, 0.5], {SPATIAL}", {"scales": np.float32([1, 0.5, 0.5, 0.5])}),
}
UNREPORTED: dict[str, tuple] = {  # no averages over windows: nodes behind CONV, and what `graph_of` is given
    "a normalisation of tokens": (
        "f = Reshape(h, s)\nt = Transpose<perm=[0,2,1]>(f)\nm = ReduceMean<axes=[-1]>(t)\nd = Sub(t, m)\nq = Mul(d, d)\n"
        "y = ReduceMean<axes=[-1]>(q)",
        {**TOKENS, **ROW},
    ),
    "over channels": ("y = ReduceMean<axes=[1]>(h)", {}),
    "a depthwise convolution": ("y = Conv<strides=[2,2], group=32>(h, k)", {"k": (32, 1, 2, 2)}),
    "a depthwise convolution with other numbers for a channel": (
        "y = Conv<strides=[2,2], group=32>(h, k)",
        {"k": np.repeat(np.array([0.25, 0.5], np.float32), 64).reshape(32, 1, 2, 2)},
    ),
    "a factor per channel": ("y = Conv<group=32>(h, box)", box(1, 1, 0.25)),
    "a sum of channels": ("y = Conv(h, k)", {"k": np.full((8, 32, 2, 2), 0.25, np.float32)}),
    "Slices without a factor's reciprocal": (
        "s1 = Slice(h, zero, end, rows, two)\ns2 = Slice(h, one, end, rows, two)\nt = Add(s1, s2)\ny = Mul(t, never)",
        {**AXES, "never": np.float32(0)},
    ),
    "Resize with computed sizes": (resize(inputs="r, , sizes"), {**HALF, "inputs": "float[1,16,12,12] x, int64[4] sizes"}),
    "Resize that keeps the aspect ratio": (
        resize(', keep_aspect_ratio_policy="not_larger"', ", , six"),
        {"six": [1, 32, 6, 6], "opset": 18},
    ),
    "Resize of axes of a tensor of unknown rank": (
        resize(", axes=[2,3]", ", halves"),
        {"halves": np.float32([0.5, 0.5]), "inputs": "float[] x", "opset": 18},
    ),
    **{
        f"Resize of axes that there are not, {axes}, by {name}": (
            resize(f", axes=[{axes}]", places),
            {"halves": np.float32([0.5, 0.5]), "six": [6, 6], "opset": 18},
        )
        for axes in ("2,4", "-5,3")
        for name, places in (("scales", ", halves"), ("sizes", ", , six"))
    },
    "Resize of an open size to a known one": (
        resize(inputs="r, , six"),
        {**HALF, "six": [1, 32, 6, 6], "inputs": "float[1,16,H,12] x"},
    ),
    "Resize to twice the size": (resize(), {**HALF, "scales": np.float32([1, 1, 2, 2])}),
}


def check_rejected(body: str, expected: str, given: dict) -> None:
    """The one average of a model stays for the reason expected, and the model as it is."""
    model = graph_of(body, given)
    result = convpool.optimize(model, check=0)
    assert [(site.status, site.reason) for site in result.report.sites] == [("rejected", expected)]
    assert result.model.SerializeToString() == model.SerializeToString()


@pytest.mark.parametrize("name", REJECTS)
def test_reason(name):
    body, expected, given = (*REJECTS[name], {})[:3]
    check_rejected(body, expected, given)


@pytest.mark.parametrize("name", RESIZES)
def test_reason_of_a_resize(name):
    node, expected, given = (*RESIZES[name], {})[:3]
    check_rejected(CONV + node, f"Resize 'y': {expected}", HALF | given)


@pytest.mark.parametrize("name", UNREPORTED)
def test_what_is_no_average_over_windows(name):
    nodes, given = UNREPORTED[name]
    model = graph_of(CONV + nodes, given)
    result = convpool.optimize(model, check=0)
    assert not result.report.sites and result.model.SerializeToString() == model.SerializeToString()


def test_a_mean_over_channels_behind_one_over_space_stays():
    body = CONV + "m = ReduceMean<axes=[2,3]>(h)\ny = ReduceMean<axes=[1]>(m)"
    assert operators(rewrite(graph(body), 1).graph) == {**DIRECT, "ReduceMean": 1}


def test_the_type_of_a_factor_has_to_be_known():
    body = "z = local.some(x)\nh = Conv<kernel_shape=[2,2]>(z, v)\ny = Conv<strides=[2,2], group=32>(h, box)"
    model = graph(f"v = local.some(x)\n{body}", box(2, 2, 1), imports=', "local": 1')
    (site,) = convpool.optimize(model, check=0).report.sites
    assert site.reason == "Conv 'y': type of the average; got unknown, expected a known one"


def test_a_sum_onto_computed_numbers_is_no_mean():
    body = CONV + CORNER_SLICES + "n = Shape(s1)\nz = Expand(v, n)\nt = Sum(z, s1, s2, s3, s4)\ny = Div(t, four)"
    constants = {**CORNERS, "four": np.float32(4)}
    verified(graph(body, constants, inputs="float[1,16,12,12] x, float[1] v"), 0)
    verified(graph(body, {**constants, "v": np.zeros(1, np.float32)}), 1)


def test_a_box_filter_that_cannot_be_told_is_reported():
    body = 'h = Conv(x, w)\ny = Conv<group=32, strides=[2,2], auto_pad="SAME_UPPER">(h, box)'
    (site,) = convpool.optimize(graph(body, box(2, 2), inputs="float[1,16,H,W] x"), check=0).report.sites
    assert site.status == "rejected" and "auto_pad" in site.reason
