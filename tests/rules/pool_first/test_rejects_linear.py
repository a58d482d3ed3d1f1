# SPDX-License-Identifier: Apache-2.0
"""One model per reason not to rewrite: linear nodes, attributes that no runtime takes, and a pooling in front."""

import numpy as np
import pytest

import convpool
from tests.support import rewriting
from tests.support.models import graph
from tests.support.reject_cases import (
    BOOL,
    CONV,
    FOUR,
    FOUR_SUM,
    FUSE,
    LAST,
    POOL,
    QUARTER,
    check_rejected,
    pool,
    pool_conv,
    slot,
)

CASES: dict[str, tuple] = {  # arguments of `check_rejected`
    # rules/linear.py
    "Pad behind a bias": (
        slot("h = Pad(c, p)", "c = Conv<pads=[2,2,2,2]>(x, w, b)\n"),
        "Pad 'h': Pad behind a bias; got [1, 1, 1, 1], expected no positive pads",
        {"b": (32,), "p": [0, 0, 1, 1, 0, 0, 1, 1]},
    ),
    "zeros at the begin": (
        slot("h = Pad(c, p)"),
        "Pad 'h': zeros where the convolution gives others, axis 0; got 1, expected convolution pads >= 2",
        {"p": [0, 0, 1, 0, 0, 0, 0, 0]},
    ),
    "zeros at the end": (
        slot("h = Pad(c, p)"),
        "Pad 'h': zeros where the convolution gives others, axis 1; got 1, expected convolution pads >= 2",
        {"p": [0, 0, 0, 0, 0, 0, 0, 1]},
    ),
    "crop": (
        slot("h = Pad(c, p)"),
        "Pad 'h': crop beyond the convolution's padding; got [-2, 0, 0, 0], expected pads that stay >= 0",
        {"p": [0, 0, -2, 0, 0, 0, 0, 0]},
    ),
    "mask read": (
        slot("h, m = Dropout(c)\nz = Not(m)"),
        "Dropout 'h': mask; got a reader, expected none",
        {"outputs": "float[a,b,c,d] y, bool[a,b,c,d] z"},
    ),
    "mask captured": (
        slot(
            "h, m = Dropout(c)\nz = If(flag) <\n  then_branch = t () => (bool[1,32,12,12] p) { p = Not(m) },\n"
            "  else_branch = e () => (bool[1,32,12,12] q) { q = Identity(m) }\n>"
        ),
        "Dropout 'h': mask; got a reader, expected none",
        {**BOOL, "outputs": "float[a,b,c,d] y, bool[a,b,c,d] z"},
    ),
    "training Dropout": (
        slot("h = Dropout(c, ratio, on)"),
        "Dropout 'h': training_mode; got (1,), expected false",
        {"ratio": np.float32(0.5), "on": np.array(True)},
    ),
    "Dropout by a caller": (
        slot("h = Dropout(c, ratio, flag)"),
        "Dropout 'h': training_mode; got a computed tensor, expected false",
        {"ratio": np.float32(0.5), **BOOL},
    ),
    "training BatchNormalization": (
        slot("h, m, v = BatchNormalization<training_mode=1>(c, g, b, mean, var)"),
        "BatchNormalization 'h': form; got training, expected inference",
        {name: (32,) for name in ("g", "b", "mean", "var")},
    ),
    "spatial BatchNormalization": (
        slot("h = BatchNormalization<spatial=0>(c, g, b, mean, var)"),
        "BatchNormalization 'h': spatial; got 0, expected 1",
        {**{name: (32, 12, 12) for name in ("g", "b", "mean", "var")}, "opset": 8},
    ),
    "product of maps": (
        slot("h = Mul(c, v)"),
        "Mul 'h': operands; got two that vary over space, expected one that does not",
        {"inputs": "float[1,16,12,12] x, float[1,32,12,12] v"},
    ),
    "factor that varies over space": (
        slot("h = Mul(c, v)"),
        "Mul 'h': operands; got two that vary over space, expected one that does not",
        {"v": (12, 12)},
    ),
    "division by the data": (
        slot("h = Div(one, c)"),
        "Div 'h': division by the data; got a nonlinear map, expected division by a constant",
        {"one": np.float32(1)},
    ),
    "division by zero": (
        slot("h = Div(c, k)"),
        "Div 'h': constant operands; got a division by 0, infinity or NaN, expected finite numbers",
        {"k": np.zeros((32, 1, 1), np.float32)},
    ),
    "negative variance": (
        slot("h = BatchNormalization(c, g, b, mean, var)"),
        "BatchNormalization 'h': constant operands; got a division by 0, infinity or NaN, expected finite numbers",
        {"g": (32,), "b": (32,), "mean": (32,), "var": np.full(32, -1, np.float32)},
    ),
    "reflecting Pad": (
        slot('h = Pad<mode="reflect">(c, p)'),
        "Pad 'h': mode of Pad; got reflect, expected constant",
        {"p": [0, 0, 1, 1, 0, 0, 1, 1]},
    ),
    "computed pads": (
        slot("h = Pad(c, p)"),
        "Pad 'h': pads or value of Pad; got a computed tensor, expected constants",
        {"inputs": "float[1,16,12,12] x, int64[8] p"},
    ),
    "computed Pad axes": (
        slot("h = Pad(c, p, , axes)"),
        "Pad 'h': axes of Pad; got a computed tensor, expected a constant",
        {"p": [0, 1, 0, 1], "inputs": "float[1,16,12,12] x, int64[2] axes", "opset": 18},
    ),
    "value of Pad": (
        slot("h = Pad(c, p, one)"),
        "Pad 'h': value of Pad; got 1.0, expected 0",
        {"one": np.float32(1), "p": [0, 0, 1, 1, 0, 0, 1, 1]},
    ),
    "channels and rows of Pad": (
        slot("h = Pad(c, p)"),
        "Pad 'h': pads of Pad; got [0, 1, 0, 0, 0, 0, 1, 0], expected zeros on the batch and channel axes",
        {"p": [0, 1, 0, 0, 0, 0, 1, 0]},
    ),
    # attributes that onnx's checker lets pass and no runtime takes
    "strides of 0": ("h = Conv<strides=[0,1]>(x, w)\n" + POOL, "Conv 'h': strides; got [0, 1], expected 2 numbers of at least 1"),
    "dilations of 0": (
        "h = Conv<dilations=[0,1]>(x, w)\n" + POOL,
        "Conv 'h': dilations; got [0, 1], expected 2 numbers of at least 1",
        {"lowering": "fused"},
    ),
    "negative pads": (
        "h = Conv<pads=[-1,-1,-1,-1]>(x, w)\n" + POOL,
        "Conv 'h': pads; got [-1, -1, -1, -1], expected 4 numbers of at least 0",
    ),
    "pads of one axis": ("h = Conv<pads=[1,1]>(x, w)\n" + POOL, "Conv 'h': pads; got [1, 1], expected 4 numbers of at least 0"),
    "pool strides of 0": (
        CONV + pool("kernel_shape=[2,2], strides=[0,2]"),
        "AveragePool 'y': strides; got [0, 2], expected 2 numbers of at least 1",
    ),
    "pool strides of one axis": (
        CONV + pool("kernel_shape=[2,2], strides=[2]"),
        "AveragePool 'y': strides; got [2], expected 2 numbers of at least 1",
    ),
    "pool_conv strides of one axis": (
        pool_conv("kernel_shape=[2,2], strides=[2]"),
        "AveragePool 'h': strides; got [2], expected 2 numbers of at least 1",
        FUSE,
    ),
    "pads for two axes": (
        slot("h = Pad(c, p)"),
        "Pad 'h': pads of Pad; got [0, 0, 1, 1], expected 8 numbers",
        {"p": [0, 0, 1, 1]},
    ),
    "pads beside axes": (
        slot("h = Pad(c, p, , a)"),
        "Pad 'h': pads of Pad; got [1, 1, 1], expected 4 numbers",
        {"p": [1, 1, 1], "a": [2, 3], "opset": 18},
    ),
    "value of Pad without elements": (
        slot("h = Pad(c, p, v)"),
        "Pad 'h': value of Pad; got shape [0], expected one number",
        {"p": [0] * 8, "v": np.zeros(0, np.float32)},
    ),
    "parameters of two sizes": (
        slot("h = BatchNormalization(c, s, b, s, s)"),
        "BatchNormalization 'h': parameters; got [[32], [5], [32], [32]], expected one shape",
        {"s": (32,), "b": (5,)},
    ),
    "Slices without an end": (
        FOUR.replace("s4 = Slice(h, d, e, a, s)", "s4 = Slice(h, d, f1, a, s)") + "t = Sum(s1, s2, s3, s4)\ny = Mul(t, q)",
        "Slice 's4': Slice; got other axes, or bounds that are computed, expected constant strides over spatial axes",
        {**QUARTER, "f1": [LAST]},
    ),
    "pool_conv strides of the convolution": (
        pool_conv("kernel_shape=[2,2], strides=[2,2]").replace("Conv<", "Conv<strides=[0,1], "),
        "Conv 'y': strides; got [0, 1], expected 2 numbers of at least 1",
        FUSE,
    ),
    "Slices backwards": (
        FOUR_SUM.replace("s4 = Slice(h, d, e, a, s)", "s4 = Slice(h, e, f, a, back)") + "y = Mul(t, q)",
        "Slice 's4': Slice; got other axes, or bounds that are computed, expected constant strides over spatial axes",
        {**QUARTER, "back": [-2, -2]},
    ),
    # rules/fuse_pool_conv.py
    "pool_conv strides": (
        pool_conv("kernel_shape=[2,2]"),
        "AveragePool 'h': strides; got [1, 1], expected kernel_shape, [2, 2]",
        FUSE,
    ),
    "pool_conv auto_pad": (
        pool_conv('kernel_shape=[2,2], strides=[2,2], auto_pad="SAME_UPPER"'),
        "AveragePool 'h': auto_pad; got SAME_UPPER, expected explicit pads",
        FUSE,
    ),
    "pool_conv pads left out": (
        pool_conv("kernel_shape=[2,2], strides=[2,2], pads=[1,1,1,1]"),
        "AveragePool 'h': padding left out of the mean; got [1, 1, 1, 1], expected count_include_pad = 1",
        FUSE,
    ),
    "pool_conv dilations": (
        pool_conv("kernel_shape=[2,2], strides=[2,2], dilations=[2,2]"),
        "AveragePool 'h': dilations; got [2, 2], expected ones",
        {"opset": 19, **FUSE},
    ),
    "pool_conv partial window": (
        pool_conv("kernel_shape=[5,5], strides=[5,5], ceil_mode=1"),
        "AveragePool 'h': ceil_mode; got a partial window or an unknown size, expected whole windows",
        FUSE,
    ),
    "pool_conv window": (
        pool_conv("kernel_shape=[13,2], strides=[13,2]"),
        "AveragePool 'h': window; got [13, 2], expected no larger than the padded feature map, [12, 12]",
        {"outputs": "float[a,b,c,d] y", **FUSE},
    ),
    "pool_conv read twice": (
        pool_conv("kernel_shape=[2,2], strides=[2,2]") + "\nz = Relu(h)",
        "AveragePool 'h': output 'h' has 2 readers; got other readers, expected only the convolution",
        {"outputs": "float[a,b,c,d] y, float[a,b,c,d] z", **FUSE},
    ),
    "pool_conv rank unknown": (
        "v = Reshape(u, s)\n" + pool_conv("kernel_shape=[2,2], strides=[2,2]").replace("w)", "v)"),
        "Conv 'y': shape of the weights; got unknown, expected a known rank",
        {"inputs": "float[1,16,12,12] x, float[4608] u, int64[n] s", **FUSE},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_reason(name):
    check_rejected(*CASES[name])


def test_normalization_in_training_is_none_of_inference():
    statistics = {"g": (32,), "b": (32,), "m": (32,), "v": np.ones(32, np.float32)}
    body = CONV + f"n, rm, rv = BatchNormalization<training_mode=1>(h, g, b, m, v)\ny = {rewriting.POOL}(n)"
    for outputs in ("n, rm, rv", "n"):
        (site,) = convpool.optimize(graph(body.replace("n, rm, rv", outputs), statistics), check=0).report.sites
        assert site.status == "rejected" and "form; got training, expected inference" in site.reason
    old = CONV + f"n, rm, rv, sm, sv = BatchNormalization(h, g, b, m, v)\ny = {rewriting.POOL}(n)"
    (site,) = convpool.optimize(graph(old, statistics, opset=9), check=0).report.sites
    assert site.status == "rejected" and "form; got training, expected inference" in site.reason
