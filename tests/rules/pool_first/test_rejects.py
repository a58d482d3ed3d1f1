# SPDX-License-Identifier: Apache-2.0
"""One model per reason not to rewrite a pair; each reason names the node, the condition, what was found and what is wanted."""

import numpy as np
import pytest
from onnx import helper, numpy_helper

import convpool
from tests.support import rewriting
from tests.support.models import graph
from tests.support.reject_cases import (
    ALONE,
    BOOL,
    BRANCH,
    CONV,
    FOUR,
    FOUR_SUM,
    FUSE,
    LAST,
    OPEN,
    PADDED,
    POOL,
    QUARTER,
    check_rejected,
    pool,
    pool_conv,
    slot,
)

CASES: dict[str, tuple] = {  # arguments of `check_rejected`
    # rules/pool_first/averages.py
    "pool pads": (
        CONV + pool("kernel_shape=[2,2], strides=[2,2], pads=[1,0,0,0]"),
        "AveragePool 'y': pooling pads; got [1, 0, 0, 0], expected no padding",
    ),
    "end pads in a window": (
        CONV + pool("kernel_shape=[3,3], strides=[2,2], pads=[0,0,1,1]"),
        "AveragePool 'y': pooling pads; got [0, 0, 1, 1], expected no padding",
    ),
    "SAME pads": (
        CONV + pool('kernel_shape=[3,3], strides=[2,2], auto_pad="SAME_UPPER"'),
        "AveragePool 'y': auto_pad; got SAME_UPPER, which pads size 12, expected no padding",
    ),
    "SAME on an open size": (
        CONV + pool('kernel_shape=[2,2], strides=[2,2], auto_pad="SAME_LOWER"'),
        "AveragePool 'y': auto_pad; got SAME_LOWER on an unknown size, expected no padding",
        OPEN,
    ),
    "ceil adds a window": (
        CONV + pool("kernel_shape=[3,3], strides=[2,2], ceil_mode=1"),
        "AveragePool 'y': ceil_mode; got a partial window on size 12, expected windows that all lie inside",
    ),
    "ceil on an open size": (
        CONV + pool("kernel_shape=[2,2], strides=[2,2], ceil_mode=1"),
        "AveragePool 'y': ceil_mode; got 1 on an unknown size, expected windows that all lie inside",
        OPEN,
    ),
    "window too large": (
        "h = Conv(x, w)\n" + pool("kernel_shape=[3,3], strides=[2,2], ceil_mode=1"),
        "AveragePool 'y': window; got [3, 3], expected no larger than the feature map, [2, 2]",
        {"inputs": "float[1,16,4,4] x"},
    ),
    "window too high where the width is open": (
        "h = Conv(x, w)\n" + pool("kernel_shape=[3,3], strides=[2,2]"),
        "AveragePool 'y': window; got [3, 3], expected no larger than the feature map, [2, '?']",
        {"inputs": "float[1,16,4,width] x"},
    ),
    "open size under Slices": (
        FOUR_SUM + "y = Mul(t, q)",
        "Mul 'y': size of the Slices' input; got unknown, expected static spatial sizes",
        {**QUARTER, **OPEN},
    ),
    "computed Slice": (
        FOUR_SUM + "y = Mul(t, q)",
        "Slice 's4': Slice; got other axes, or bounds that are computed, expected constant strides over spatial axes",
        {**{k: v for k, v in QUARTER.items() if k != "d"}, "inputs": "float[1,16,12,12] x, int64[2] d"},
    ),
    "odd size under Slices": (
        FOUR_SUM + "y = Mul(t, q)",
        "Mul 'y': Slices of spatial axis 0; got [0:3:2] [1:3:2], expected equal strides and lengths",
        {**QUARTER, "inputs": "float[1,16,3,3] x"},
    ),
    "a corner twice": (
        FOUR + "t = Sum(s1, s2, s3, s1)\ny = Mul(t, q)",
        "Mul 'y': offsets of the Slices; got [(0, 0), (0, 0), (0, 1), (1, 0)], expected each offset of the window once",
        QUARTER,
    ),
    "wrong divisor": (FOUR_SUM + "y = Mul(t, third)", "Mul 'y': factor of a Slice; got 0.333333343, expected 1/4", QUARTER),
    "a quarter but for 8 units of rounding": (
        FOUR_SUM + "y = Mul(t, q)",
        "Mul 'y': factor of a Slice; got 0.250000119, expected 1/4",
        {**QUARTER, "q": np.float32(0.25000012)},
    ),
    "factor that raises the rank": (
        FOUR_SUM + "y = Mul(t, q)",
        "Mul 'y': shape of a constant; got [1, 1, 1, 1, 1], expected sizes of 1 or [1, 32, 6, 6]",
        {**QUARTER, "q": np.full((1,) * 5, 0.25, "f"), "outputs": "float[a,b,c,d,e5] y"},
    ),
    "unequal factors": (
        FOUR + "p = Mul(s1, third)\nt = Sum(p, s2, s3, s4)\ny = Mul(t, q)",
        "Mul 'y': factor of a Slice; got 0.0833333358, expected 1/4",
        QUARTER,
    ),
    "zeros that broadcast": (
        FOUR + "t = Sum(s1, s2, s3, s4, zeros)\ny = Mul(t, q)",
        "Mul 'y': shape of a constant; got [2, 1, 1, 1], expected sizes of 1 or [1, 32, 6, 6]",
        {**QUARTER, "zeros": np.zeros((2, 1, 1, 1), "f")},
    ),
    "a corner read elsewhere": (
        FOUR_SUM + "y = Mul(t, q)\nother = Relu(s4)",
        "Slice 's4': readers; got a reader outside the average, expected none",
        {**QUARTER, "outputs": "float[a,b,c,d] y, float[a,b,c,d] other"},
    ),
    "dimensions of the pooling": (
        CONV + pool("kernel_shape=[2]"),
        "AveragePool 'y': kernel_shape; got (2,), expected 2 dimensions, as the convolution has",
    ),
    # rules/pool_first/trace.py
    "other operand traced": (
        "c = Conv(x, w)\nh = Mul(k, c)\ny = GlobalAveragePool(h)",
        "tensor 'k': producer; got an input or constant, expected a convolution",
        {"inputs": "float[1,16,3,3] x, float[1,32,1,1] k"},
    ),
    "read twice": (
        ALONE + "\nz = Relu(h)",
        "Conv 'h': output 'h' has 2 readers; got other readers, expected only the pooling",
        {"outputs": "float[a,b,c,d] y, float[a,b,c,d] z"},
    ),
    "a graph output": (
        ALONE,
        "Conv 'h': output 'h' is a graph output; got other readers, expected only the pooling",
        {"outputs": "float[a,b,c,d] y, float[a,b,c,d] h"},
    ),
    "captured": (
        ALONE.replace("y =", "o =") + "\n" + BRANCH,
        "Conv 'h': output 'h' is read by a subgraph; got other readers, expected only the pooling",
        {**BOOL, "outputs": "float[a,b,c,d] o, float[a,b,c,d] y"},
    ),
    "activation": (slot("h = Relu(c)"), "Relu 'h': between convolution and pooling; got Relu, expected linear operators only"),
    "quantised": (
        slot("i = QuantizeLinear(c, one)\nh = DequantizeLinear(i, one)"),
        "DequantizeLinear 'h': between convolution and pooling; got DequantizeLinear, expected linear operators only",
        {"one": np.float32(1)},
    ),
    "axis of Concat": (
        slot("h = Concat<axis=3>(c, c2)", PADDED + "c2 = Conv<pads=[1,1,1,1]>(x, w)\n"),
        "Concat 'h': axis of Concat; got 3, expected batch or channels",
    ),
    "sizes of a join": (
        slot("h = Add(c, v)"),
        "Add 'h': spatial sizes of the operands; got not provably equal, expected equal sizes",
        {"inputs": "float[1,16,H,W] x, float[1,32,K,L] v"},
    ),
    "rank of the weights": (
        "v = Reshape(u, s)\nh = Conv(x, v)\n" + POOL,
        "Conv 'h': shape of the weights; got unknown, expected a known rank",
        {"inputs": "float[1,16,12,12] x, float[4608] u, int64[n] s"},
    ),
    "kernel_shape of the Conv": (
        "h = Conv<kernel_shape=[2,2]>(x, w)\n" + POOL,
        "Conv 'h': kernel_shape; got [2, 2], expected [3, 3], as the weights have",
    ),
    "open kernel": (
        "h = Conv(x, v)\n" + POOL,
        "Conv 'h': shape of the weights; got (32, 16, 'K', 3), expected a static kernel with 2 axes",
        {"inputs": "float[1,16,12,12] x, float[32,16,K,3] v"},
    ),
    "SAME on an open size, strided": (
        'h = Conv<auto_pad="SAME_UPPER", strides=[2,2]>(x, w)\n' + POOL,
        "Conv 'h': auto_pad; got SAME_UPPER with strides on an unknown size, expected explicit pads",
        OPEN,
    ),
    "SAME on an open size, strided on one axis": (
        'h = Conv<auto_pad="SAME_LOWER", strides=[1,2]>(x, w)\n' + POOL,
        "Conv 'h': auto_pad; got SAME_LOWER with strides on an unknown size, expected explicit pads",
        OPEN,
    ),
    "Pad behind a join": (
        slot("j = Add(c, v)\nh = Pad(j, p)"),
        "Pad 'h': Pad behind nodes that move; got [1, 1, 1, 1], expected Pad next to a convolution",
        {"p": [0, 0, 1, 1, 0, 0, 1, 1], "inputs": "float[1,16,12,12] x, float[1,32,12,12] v"},
    ),
    # lowering.py
    "computed weights, fused": (
        ALONE.replace("w)", "v)"),
        "Conv 'h': weights; got computed, or an input that a caller may override, expected a constant",
        {"inputs": "float[1,16,12,12] x, float[32,16,3,3] v", "lowering": "fused"},
    ),
    "dilated box mean": (
        "h = Conv<strides=[2,2]>(x, w)\n" + POOL,
        "Conv 'h': dilated box mean; got opset 17, expected opset 19, where AveragePool has dilations",
        {"inputs": "float[1,16,17,17] x", "lowering": "direct"},
    ),
    "pads of the box mean": (
        "h = Conv<strides=[2,2], pads=[2,2,2,2]>(x, w)\n" + POOL,
        "Conv 'h': pads of the box mean; got [2, 2, 2, 2], expected less than [2, 2], as onnxruntime demands",
        {"opset": 19, "lowering": "direct"},
    ),
    "mean over an open size": (
        "h = Conv(x, w)\ny = GlobalAveragePool(h)",
        "Conv 'h': mean over a feature map; got unknown sizes, expected static sizes, or a 1x1 Conv",
        OPEN,
    ),
    "mean over an open size, fused": (
        "h = Conv(x, w)\ny = GlobalAveragePool(h)",
        "Conv 'h': mean over a feature map; got unknown sizes, expected static sizes, or a 1x1 Conv",
        {"w": (32, 16, 1, 1), **OPEN, "lowering": "fused"},
    ),
    # rules/pool_first/rule.py
    "saves nothing": (
        CONV + pool("kernel_shape=[2,2]"),
        "Conv 'h': saves too little as convavgpool; got 557,568 of 663,552 multiply-adds, and 10,816 additions in place of "
        "15,488, expected at most 75% of the multiply-adds, and less time by the cost model",
    ),
    "Pad that the pooling would follow": (
        "p = Pad(x, two)\nc = Conv<pads=[3,3,3,3]>(x, v)\n" + "h = Add(c, p)\n" + POOL,
        "Pad 'p': Pad that the pooling would follow; got [2, 2, 2, 2], expected less than [2, 2], as onnxruntime demands",
        {"two": [0, 0, 2, 2, 0, 0, 2, 2], "v": (16, 16, 3, 3)},
    ),
    "Pad that the pooling would follow, behind others": (
        "o = Pad(x, one)\np = Identity(o)\nq = Pad(p, one)\nc = Conv<pads=[3,3,3,3]>(x, v)\n" + "h = Add(c, q)\n" + POOL,
        "Pad 'o': Pad that the pooling would follow; got [2, 2, 2, 2], expected less than [2, 2], as onnxruntime demands",
        {"one": [0, 0, 1, 1, 0, 0, 1, 1], "v": (16, 16, 3, 3)},
    ),
    "fused weights too small": (
        ALONE,
        "Conv 'h': fused weights; got numbers too large or small, expected ones that the type has",
        {
            "w": np.full((32, 16, 3, 3), 3e-5, np.float16),
            "inputs": "float16[1,16,12,12] x",
            "outputs": "float16[a,b,c,d] y",
            "lowering": "fused",
        },
    ),
    "fused weights too large": (
        "h = Conv<pads=[2,2,2,2]>(x, v)\ny = GlobalAveragePool(h)",
        "Conv 'h': elements of the fused weights; got 58,982,400, expected at most 16,777,216",
        {"v": (128, 128, 5, 5), "inputs": "float[1,128,56,56] x", "lowering": "fused"},
    ),
    "few channels": (
        ALONE,
        "Conv 'h': saves too little as direct; got 784 of 3,136 multiply-adds, and 3,136 additions in place of 196, "
        "expected at most 75% of the multiply-adds, and less time by the cost model",
        {"w": (1, 16, 1, 1), "lowering": "direct"},
    ),
    "opset 6": (ALONE, "model: opset; got 6, expected at least 7", {"opset": 6}),
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
    "infinite weight": (
        CONV + POOL,
        "Conv 'h': weights; got infinity, expected finite numbers",
        {"w": np.full((32, 16, 3, 3), np.inf, np.float32)},
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


@pytest.mark.parametrize("shape", [(), (16,), (32, 1)])
def test_a_bias_of_another_shape_in_a_function_is_told(shape):
    functions = f"""<opset_import: ["": 17], domain: "local">
    net (a) => (v) {{ h = Conv<pads=[1,1,1,1]>(a, w, b) v = {rewriting.POOL}(h) }}"""
    model = graph("y = local.net(x)", functions=functions, imports=', "local": 1')
    for name, size in (("w", (32, 16, 3, 3)), ("b", shape)):
        value = numpy_helper.from_array(np.ones(size, np.float32))
        model.functions[0].node.insert(0, helper.make_node("Constant", [], [name], value=value))
    (site,) = convpool.optimize(model, check=0).report.sites
    assert site.reason == f"Conv 'h': shape of the bias; got {list(shape)}, expected [32]"


def test_weights_of_whole_numbers_in_a_function_are_told():
    functions = f"""<opset_import: ["": 17], domain: "local">
    net (a) => (v) {{ h = Conv<pads=[1,1,1,1]>(a, w) v = {rewriting.POOL}(h) }}"""
    model = graph("y = local.net(x)", functions=functions, imports=', "local": 1')
    value = numpy_helper.from_array(np.ones((32, 16, 3, 3), np.int32))
    model.functions[0].node.insert(0, helper.make_node("Constant", [], ["w"], value=value))
    (site,) = convpool.optimize(model, check=0).report.sites
    assert site.reason == "Conv 'h': type of the weights; got INT32, expected floating point"


def test_normalization_in_training_is_none_of_inference():
    statistics = {"g": (32,), "b": (32,), "m": (32,), "v": np.ones(32, np.float32)}
    body = CONV + f"n, rm, rv = BatchNormalization<training_mode=1>(h, g, b, m, v)\ny = {rewriting.POOL}(n)"
    for outputs in ("n, rm, rv", "n"):
        (site,) = convpool.optimize(graph(body.replace("n, rm, rv", outputs), statistics), check=0).report.sites
        assert site.status == "rejected" and "form; got training, expected inference" in site.reason
    old = CONV + f"n, rm, rv, sm, sv = BatchNormalization(h, g, b, m, v)\ny = {rewriting.POOL}(n)"
    (site,) = convpool.optimize(graph(old, statistics, opset=9), check=0).report.sites
    assert site.status == "rejected" and "form; got training, expected inference" in site.reason
