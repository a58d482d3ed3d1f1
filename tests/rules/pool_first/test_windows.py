# SPDX-License-Identifier: Apache-2.0
"""Which windows of poolings fit: at their boundaries, with pads, ceil_mode and auto_pad."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import convpool
from convpool.ir.index import Scope, index_model
from convpool.ir.model import infer_shapes
from convpool.rules.base import Reject
from convpool.rules.convs import Pooling
from convpool.rules.fuse_pool_conv import behind_pooling, whole_windows
from convpool.rules.pool_first.averages import _box_weight, average_pool, box_filter
from tests.support import sessions
from tests.support.models import graph, random_feeds


def index(model: onnx.ModelProto) -> Scope:
    return index_model(model, numpy_helper.to_array, lambda *_: pytest.fail("nothing to compute"), infer_shapes(model))[0]


def pooled(attributes: str, size: str = "12,12") -> Scope:
    return index(graph(f"y = AveragePool<{attributes}>(x)", inputs=f"float[1,16,{size}] x"))


BESIDE = "kernel_shape=[2,3], strides=[2,3]"
WHOLE = {  # an AveragePool in front of a convolution: why it stays in front, or its pads
    (BESIDE, "12,12"): (0, 0, 0, 0),
    (BESIDE, "H,W"): (0, 0, 0, 0),
    ("kernel_shape=[2,3], strides=[2,2]", "12,12"): "strides",
    ("kernel_shape=[2,3]", "12,12"): "strides",
    ("kernel_shape=[1,1]", "12,12"): (0, 0, 0, 0),
    (f"{BESIDE}, pads=[0,1,0,2], count_include_pad=1", "12,12"): (0, 1, 0, 2),
    (f"{BESIDE}, pads=[0,1,0,2]", "12,12"): "padding left out of the mean",
    (f'{BESIDE}, auto_pad="VALID"', "12,12"): (0, 0, 0, 0),
    (f'{BESIDE}, auto_pad="SAME_LOWER"', "12,12"): "auto_pad",
    (f"{BESIDE}, dilations=[1,2]", "12,12"): "dilations",
    (BESIDE, "2,3"): (0, 0, 0, 0),
    (BESIDE, "2,2"): "window",
    (BESIDE, "1,3"): "window",
    (f"{BESIDE}, pads=[1,0,0,1], count_include_pad=1", "1,2"): (1, 0, 0, 1),
    (f"{BESIDE}, pads=[0,1,1,0], count_include_pad=1", "1,1"): "window",
    (f"{BESIDE}, ceil_mode=1", "12,12"): (0, 0, 0, 0),
    (f"{BESIDE}, ceil_mode=1", "12,13"): "ceil_mode",
    (f"{BESIDE}, ceil_mode=1", "13,12"): "ceil_mode",
    (f"{BESIDE}, ceil_mode=1", "12,W"): "ceil_mode",
    (f"{BESIDE}, ceil_mode=1, pads=[1,0,0,2], count_include_pad=1", "11,10"): (1, 0, 0, 2),
    (f"{BESIDE}, ceil_mode=1, pads=[0,1,1,0], count_include_pad=1", "12,11"): "ceil_mode",
}


@pytest.mark.parametrize(("attributes", "size"), WHOLE)
def test_windows_side_by_side(attributes, size):
    found, wanted = whole_windows(pooled(attributes, size), 0, 2), WHOLE[attributes, size]
    if isinstance(wanted, str):
        assert isinstance(found, Reject) and found.condition == wanted
    else:
        assert not isinstance(found, Reject) and found.pads == wanted and found.strides == found.kernel_shape


AVERAGED = {  # an AveragePool behind a convolution: why it stays there, or its strides
    ("kernel_shape=[2,3], strides=[2,1]", "12,12"): (2, 1),
    ("kernel_shape=[2,3]", "12,12"): (1, 1),
    ("kernel_shape=[2,3]", "2,3"): (1, 1),
    ("kernel_shape=[2,3]", "2,2"): "window",
    ("kernel_shape=[2,2], dilations=[3,1]", "4,2"): (1, 1),
    ("kernel_shape=[2,2], dilations=[3,1]", "3,2"): "window",
    ("kernel_shape=[2,2], strides=[2,2], pads=[0,0,0,1]", "12,12"): (2, 2),
    ("kernel_shape=[2,2], strides=[2,2], pads=[0,0,0,1]", "12,13"): "pooling pads",
    ("kernel_shape=[2,2], strides=[2,2], pads=[0,1,0,0]", "12,12"): "pooling pads",
    ("kernel_shape=[2,2], strides=[2,2], pads=[0,0,0,1]", "H,W"): "pooling pads",
    ("kernel_shape=[2,2], strides=[2,2], pads=[0,0,0,1], ceil_mode=1", "12,12"): "pooling pads",
    ("kernel_shape=[3,2], strides=[3,2], ceil_mode=1", "12,12"): (3, 2),
    ("kernel_shape=[3,2], strides=[3,2], ceil_mode=1", "13,12"): "ceil_mode",
    ("kernel_shape=[3,2], strides=[3,2], ceil_mode=1", "12,W"): "ceil_mode",
    ("kernel_shape=[3,2], ceil_mode=1", "H,W"): (1, 1),
    ('kernel_shape=[2,2], strides=[2,2], auto_pad="SAME_UPPER"', "12,12"): (2, 2),
    ('kernel_shape=[2,2], strides=[2,2], auto_pad="SAME_UPPER"', "12,13"): "auto_pad",
    ('kernel_shape=[2,2], strides=[2,2], auto_pad="SAME_LOWER"', "12,W"): "auto_pad",
    ('kernel_shape=[1,1], strides=[2,2], auto_pad="SAME_LOWER"', "12,13"): (2, 2),
    ('kernel_shape=[2,2], strides=[2,2], auto_pad="VALID"', "13,13"): (2, 2),
    ("kernel_shape=[2]", "12,12"): "kernel_shape",
}


@pytest.mark.parametrize(("attributes", "size"), AVERAGED)
def test_windows_inside_of_the_map(attributes, size):
    scope, wanted = pooled(attributes, size), AVERAGED[attributes, size]
    known = tuple(int(n) for n in size.split(",")) if size.replace(",", "").isdigit() else None
    found = average_pool(scope, 0, 2, known)
    if isinstance(wanted, str):
        assert isinstance(found, Reject) and found.condition == wanted
    else:
        assert isinstance(found, Pooling) and found.spec is not None and found.spec.strides == wanted
        assert found.spec.pads == (0, 0, 0, 0) and (found.input, found.output, found.kind) == ("x", "y", "pool")


def test_the_pooling_in_front_of_a_convolution():
    scope = index(
        graph("p = AveragePool<kernel_shape=[2,2]>(x)\nr = Relu(p)\nh = Conv(p, w)\ny = Conv(r, v)", {"v": (8, 16, 1, 1)})
    )
    site = behind_pooling(scope, 2)
    assert site is not None and (site.root, site.tensor, site.conv) == (0, "p", 2)
    assert behind_pooling(scope, 3) is None
    assert behind_pooling(index(graph("y = Conv(x, w)")), 0) is None


def uneven(shape=(4, 1, 2, 2)) -> np.ndarray:
    found = np.full(shape, 0.25, np.float32)
    found.reshape(-1)[-1] = 0.5
    return found


@pytest.mark.parametrize(
    ("weight", "group", "number"),
    [
        (np.full((4, 1, 2, 2), 0.25, np.float32), 4, 0.25),
        (np.full((4, 1, 1, 2), 3, np.float32), 4, 3.0),
        (np.full((4, 1, 1, 1), 3, np.float32), 4, None),
        (np.full((4, 2, 2, 2), 0.25, np.float32), 2, None),
        (np.full((8, 1, 2, 2), 0.25, np.float32), 4, None),
        (np.zeros((4, 1, 2, 2), np.float32), 4, None),
        (np.full((4, 1, 2, 2), np.inf, np.float32), 4, None),
        (uneven(), 4, None),
    ],
)
def test_the_one_number_of_a_box_filter(weight, group, number):
    scope = index(graph(f"y = Conv<group={group}>(x, k)", {"k": weight}, inputs=f"float[1,{weight.shape[1] * group},12,12] x"))
    assert _box_weight(scope, 0) == number


@pytest.mark.parametrize(
    ("number", "bias", "factor"),
    [
        (0.25, None, 1.0),
        (0.5, None, 2.0),
        (0.25, np.zeros(4), 1.0),
        (0.25, np.ones(4), None),
        (np.float32(1 / 6) * 1.5, None, 1.0),
    ],
)
def test_box_filters_are_averages_times_a_factor(number, bias, factor):
    constants = {"k": np.full((4, 1, 2, 2), number, np.float32)}
    names = "x, k" if bias is None else "x, k, b"
    constants |= {} if bias is None else {"b": bias.astype(np.float32)}
    scope = index(graph(f"y = Conv<group=4, strides=[2,2]>({names})", constants, inputs="float[1,4,12,12] x"))
    found = box_filter(scope, 0, 2, (12, 12))
    if factor is None:
        assert isinstance(found, Reject) and found.condition == "bias of a box filter"
    else:
        assert isinstance(found, Pooling) and found.factor == factor and found.kind == "box_filter"


@pytest.mark.parametrize("opset", [11, 17, 21, 22])
@pytest.mark.parametrize("operator", ["AveragePool", "MaxPool"])
@pytest.mark.parametrize(
    "window",
    [
        "kernel_shape=[1,1], strides=[3,3]",
        "kernel_shape=[2,2], strides=[2,2], pads=[1,1,1,1]",
        "kernel_shape=[2,3], strides=[3,3], pads=[0,1,1,1]",
        "kernel_shape=[2,2], strides=[2,1]",
    ],
)
@pytest.mark.parametrize("sizes", ["9,12", "12,13", "11,N"])
def test_a_window_of_ceil_mode_behind_the_map_does_not_count(opset, operator, window, sizes):
    """A mean over all of a map behind it becomes a window of the map's size."""
    body = f"m = {operator}<{window}, ceil_mode=1>(x)\nh = Conv<pads=[1,1,1,1]>(m, w)\ny = GlobalAveragePool(h)"
    model = graph(body, inputs=f"float[1,16,{sizes}] x", opset=opset)
    result = convpool.optimize(model)
    assert result.report.summary.rewritten == ("N" not in sizes)
    feeds = random_feeds(model, size=14)
    (wanted,), (got,) = sessions.run(model, feeds), sessions.run(result.model, feeds)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
