# SPDX-License-Identifier: Apache-2.0
"""Counts of the cost model, by hand, and the form it picks where that changes the choice."""

import numpy as np
import pytest

import convpool
from convpool.algebra import geometry as cost
from convpool.algebra.geometry import ConvSpec, PoolSpec
from tests.support.models import graph
from tests.support.resizing import UP
from tests.support.rewriting import POOL

WINDOW = PoolSpec((2, 2), (2, 2), (0, 0, 0, 0), (1, 1))


@pytest.mark.parametrize("item_bytes", [2, 4, 8])
def test_a_pooling(item_bytes):
    found = cost.pool_cost(WINDOW, 16, (12, 10), item_bytes)
    assert (found.macs, found.additions, found.time) == (0, 6 * 5 * 16 * 4, 8 * 6 * 5 * 16 * 4 + 2 * (120 + 30) * 16 * item_bytes)


def test_a_pooling_of_single_elements_that_keeps_all_costs_nothing():
    assert cost.pool_cost(PoolSpec((1, 1), (1, 1), (0, 0, 0, 0), (1, 1)), 16, (12, 12), 4) == cost.Cost()
    assert cost.pool_cost(PoolSpec((1, 1), (2, 1), (0, 0, 0, 0), (1, 1)), 16, (12, 12), 4).additions == 6 * 12 * 16


FORMS = {  # axes, opset: of a global mean, plain and depthwise, of Resizes, linear and nearest, for a CPU; of the mean for any
    (1, 18): ["direct", None, None, None, "direct"], (1, 19): [None] * 5, (3, 19): ["fused", "fused", None, None, None],
    (2, 18): ["direct", "fused", "conv_first", None, "direct"], (3, 18): ["direct", "direct", None, "direct", "direct"],
}  # fmt: skip


@pytest.mark.parametrize(("axes", "opset"), FORMS)
def test_one_axis_and_three_have_slow_sums_and_resizes_on_a_cpu(axes, opset):
    size, given = {1: "4096", 2: "16,16", 3: "8,8,8"}[axes], {"v": (32, 16, *(1,) * axes), "s": np.float32([1, 1, *(2,) * axes])}
    arguments = {"inputs": f"float[1,16,{size}] x", "outputs": f"float[{','.join('abcde'[: axes + 2])}] y", "opset": opset}
    pooled = graph("h = Conv(x, w)\ny = GlobalAveragePool(h)", {"w": (32, 16, *(3,) * axes)}, **arguments)
    apart = graph("h = Conv<group=16>(x, w)\ny = GlobalAveragePool(h)", {"w": (16, 1, *(5,) * axes)}, **arguments)
    enlarged = graph('u = Resize<mode="linear">(x, , s)\ny = Conv(u, v)', given, **arguments)
    spread = graph(UP + f"y = Conv<pads={[1] * 2 * axes}>(u, w)", {**given, "w": (64, 16, *(3,) * axes)}, **arguments)
    results = [convpool.optimize(model, target="cpu", check=0) for model in (pooled, apart, enlarged, spread)]
    sites = [result.report.sites[0] for result in (*results, convpool.optimize(pooled, check=0))]
    assert [site.lowering for site in sites] == FORMS[axes, opset], [site.reason for site in sites]


@pytest.mark.parametrize("item_bytes", [2, 4])
@pytest.mark.parametrize(("group", "weight"), [(1, 1), (4, 1), (8, 4), (16, 4)])
def test_a_convolution(group, weight, item_bytes):
    found = cost.conv_cost(ConvSpec((3, 3), (1, 2), (1, 1, 1, 1), (1, 1), group), (32, 16 // group, 3, 3), (12, 10), item_bytes)
    macs, moved = 12 * 5 * 32 * (16 // group) * 9, (120 * 16 + 60 * 32 + 32 * (16 // group) * 9) * item_bytes
    assert (found.macs, found.additions, found.time) == (macs, 0, macs * weight + 2 * moved)


def test_elementwise_nodes():
    found = cost.affine_cost(3, 32, (12, 10), 4)
    assert (found.macs, found.additions, found.time) == (0, 0, 3 * 120 * 32 * (2 + 2 * 4 * 2))


CHOICES = {  # channels, filters, kernel, size, axes, window (0: all; and stride), opset on a CPU, negative: any target; form
    "pointwise": (16, 32, 1, 12, 2, 2, 2, "direct"), "many channels": (64, 64, 3, 12, 2, 2, 2, "direct"),
    "few channels": (2, 16, 3, 12, 2, 2, 2, "fused"), "few filters": (16, 2, 3, 12, 2, 2, 2, "fused"),
    "many filters of few channels": (4, 64, 3, 12, 2, 2, 2, "direct"), "large kernel": (8, 8, 5, 16, 2, 2, 2, "fused"),
    "as many filters as channels": (16, 16, 3, 12, 2, 2, 2, "fused"),
    "channels of no block": (24, 32, 3, 56, 2, 2, 20, "fused"), "channels of a block": (32, 32, 3, 56, 2, 2, 20, "direct"),
    "a long window of no block": (72, 28, 5, 56, 2, 0, 17, "fused"), "of a block": (16, 16, 3, 64, 2, 0, 17, "direct"),
    "too many weights": (24, 24, 3, 64, 2, 0, 17, None), "columns of few filters": (72, 3, 3, 16, 1, 2, 17, None),
    "blocks to few filters": (48, 16, 3, 64, 2, 2, 17, "direct"), "wide windows": (64, 96, 3, 24, 2, 6, 20, "direct"),
    "averages of three channels": (3, 32, 3, 32, 2, (7, 1), 20, None), "strides of two": (3, 96, 3, 24, 2, (7, 2), 20, None),
    "overlapping averages of blocks": (48, 32, 3, 64, 2, (7, 3), 20, "direct"),
    "number by number": (24, 48, 1, 32, 2, 4, -19, None), "before that": (24, 48, 1, 32, 2, 4, -18, "convavgpool"),
    "of no block": (24, 48, 3, 32, 2, 4, -19, "fused"), "of blocks": (32, 48, 1, 32, 2, 4, -19, "convavgpool"),
    "a block of one filter": (32, 1, 1, 56, 2, 2, 17, "direct"), "no block of few filters": (72, 4, 1, 14, 2, 2, 17, None),
}  # fmt: skip


@pytest.mark.parametrize(("c", "m", "k", "n", "axes", "window", "opset", "lowering"), CHOICES.values(), ids=CHOICES)
def test_the_form_that_auto_takes(c, m, k, n, axes, window, opset, lowering):
    taps, stride = window if isinstance(window, tuple) else (window, window)
    pool = f"AveragePool<kernel_shape={[taps] * axes}, strides={[stride] * axes}>" if window else "GlobalAveragePool"
    body, sizes = f"h = Conv<pads={[k // 2] * 2 * axes}>(x, w)\ny = {pool}(h)", ",".join([str(n)] * axes)
    outputs = f"float[{','.join('abcd'[: axes + 2])}] y"
    given = {"inputs": f"float[1,{c},{sizes}] x", "outputs": outputs, "opset": max(abs(opset), 17)}
    options = {"target": "cpu"} if opset > 2 else {"lowering": "auto"} if opset > 0 else {}
    (site,) = convpool.optimize(graph(body, {"w": (m, c, *(k,) * axes)}, **given), check=0, **options).report.sites
    assert site.lowering == lowering, site.reason


@pytest.mark.parametrize(("size", "axis", "lowering"), [("8,8,8", -1, None), ("8,8,8", -3, "direct"), ("32,32", -1, "direct")])
def test_rows_that_are_averaged_one_by_one(size, axis, lowering):
    """On a CPU up to opset 18, but for two axes with channels of a block: the result took 2.9 times as long as the model."""
    axes = size.count(",") + 1
    outputs = f"float[{','.join('abcde'[: axes + 2])}] y"
    body = f"h = Conv(x, w)\ny = ReduceMean<axes=[{axis}]>(h)"
    model = graph(body, {"w": (24, 64, *[1] * axes)}, inputs=f"float[1,64,{size}] x", outputs=outputs, opset=17)
    (site,) = convpool.optimize(model, check=0, target="cpu").report.sites
    assert site.lowering == lowering, site.reason


def test_weights_of_half_precision_count_two_bytes():
    """A pooled input in float32 costs more than the larger kernel, in half precision less."""
    found = {}
    for dtype, name in ((np.float32, "float"), (np.float16, "float16")):
        body, given = f"h = Conv<pads=[2,2,2,2]>(x, w)\ny = {POOL}(h)", {"w": np.ones((16, 8, 5, 5), dtype)}
        model = graph(body, given, inputs=f"{name}[1,8,12,12] x", outputs=f"{name}[a,b,c,d] y")
        (site,) = convpool.optimize(model, check=0, lowering="auto").report.sites
        found[name] = site.lowering
    assert found == {"float": "fused", "float16": "direct"}


def test_weights_that_a_custom_operator_gives_are_moved_as_they_are():
    body = f"v = local.weights(w)\nh = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, v)\ny = {POOL}(h)"
    (site,) = convpool.optimize(graph(body, imports=', "local": 1'), check=0).report.sites
    assert site.status == "rewritten"


@pytest.mark.parametrize("shape", ["M,16,3,3", "32,C,3,3"])
def test_multiply_adds_are_unknown_where_either_number_of_channels_is(shape):
    model = graph(f"h = Conv<pads=[1,1,1,1]>(x, v)\ny = {POOL}(h)", inputs=f"float[1,16,12,12] x, float[{shape}] v")
    (site,) = convpool.optimize(model, check=0).report.sites
    assert site.macs_before is None
