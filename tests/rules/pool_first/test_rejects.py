# SPDX-License-Identifier: Apache-2.0
"""One model per reason not to rewrite a pair; each reason names the node, the condition, what was found and what is wanted."""

import numpy as np
import pytest
from onnx import helper, numpy_helper

import convpool
from tests.support.models import graph, graph_of
from tests.support.rewriting import CONV, CORNER_SLICES, CORNERS, LAST
from tests.support.rewriting import POOL as AVERAGE

POOL = f"y = {AVERAGE}(h)"
ALONE = CONV + POOL
PADDED = "c = Conv<pads=[1,1,1,1]>(x, w)\n"
MEAN = CORNER_SLICES + "t = Sum(s1, s2, s3, s4)\ny = Mul(t, q)"
QUARTER = {**CORNERS, "q": np.float32(0.25), "third": np.float32(1 / 3)}
BRANCH = f"""y = If(flag) <
  then_branch = t () => (float[1,32,6,6] z) {{ z = {AVERAGE}(h) }},
  else_branch = e () => (float[1,32,6,6] u) {{ u = MaxPool<kernel_shape=[2,2], strides=[2,2]>(h) }}
>
"""
OPEN = {"inputs": "float[1,16,H,W] x"}
BOOL = {"inputs": "float[1,16,12,12] x, bool flag"}
HALVES = {"inputs": "float16[1,16,12,12] x", "outputs": "float16[a,b,c,d] y"}
FUSE = {"enable": "fuse_pool_conv"}
GIVEN = {"one": np.float32(1), "half": np.float32(0.5), "yes": np.array(True), "around": [0, 0, 1, 1, 0, 0, 1, 1], "b": (32,)}
TWOS, THREES = "kernel_shape=[2,2], strides=[2,2]", "kernel_shape=[3,3], strides=[2,2]"
LOWER, UPPER = 'auto_pad="SAME_LOWER"', 'auto_pad="SAME_UPPER"'


def pool_conv(attributes: str) -> str:
    """An AveragePool with these attributes, then a convolution."""
    return f"h = AveragePool<{attributes}>(x)\ny = Conv<pads=[1,1,1,1]>(h, w)"


def slot(middle: str, before: str = PADDED) -> str:
    """Convolution, `middle` from c to h, pooling."""
    return before + middle + "\n" + POOL


CASES: dict[str, tuple] = {  # nodes, the reason, and what `graph_of` and `optimize` are given beside GIVEN
    "a map without elements": (
        "h = Conv(x, w)\ny = GlobalAveragePool(h)",
        "GlobalAveragePool 'y': window; got [-1, 8], expected a feature map with elements",
        {"inputs": "float[1,16,1,10] x"},
    ),
    # rules/pool_first/pairs.py
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
    "open kernel": (
        "h = Conv<kernel_shape=[3,3]>(x, v)\n" + POOL,
        "Conv 'h': shape of the weights; got (32, 16, 'K', 3), expected a static kernel with 2 axes",
        {"inputs": "float[1,16,12,12] x, float[32,16,K,3] v"},
    ),
    "Pad behind a join": (
        slot("j = Add(c, v)\nh = Pad(j, around)"),
        "Pad 'h': Pad behind nodes that move; got [1, 1, 1, 1], expected Pad next to a convolution",
        {"inputs": "float[1,16,12,12] x, float[1,32,12,12] v"},
    ),
    # geometry.py
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
    "pads that some onnxruntime miscounts": (
        "h = Conv<pads=[1,0,1,0]>(x, w)\n" + POOL,
        "Conv 'h': pads of the box mean; got [1, 0, 1, 0], expected ones that onnxruntime before 1.25 counts right",
        {"w": (32, 16, 3, 1), "opset": 19, "lowering": "direct"},
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
    "weights without a number": (
        "h = Conv(x, w)\n" + POOL,
        "Conv 'h': shape of the weights; got [0, 16, 3, 3], expected at least one number",
        {"w": np.ones((0, 16, 3, 3), np.float32)},
    ),
    # rules/pool_first/rule.py
    "saves nothing": (
        CONV + "y = AveragePool<kernel_shape=[2,2]>(h)",
        "Conv 'h': saves too little as convavgpool; got 557,568 of 663,552 multiply-adds, and 10,816 additions in place of "
        "15,488, expected at most 75% of the multiply-adds, and less time by the cost model",
    ),
    "gaps between the elements that are averaged of another map": (
        PADDED + "h = Add(c, v)\nm = AveragePool<kernel_shape=[1,2], strides=[2,2]>(h)\ny = AveragePool<kernel_shape=[2,2]>(m)",
        "AveragePool 'y': dilations of the average of 'v'; got [2, 1], expected 1 on every axis before opset 19",
        {"inputs": "float[1,16,12,12] x, float[1,32,12,12] v"},
    ),
    "Pad that the pooling would follow": (
        "p = Pad(x, two)\nc = Conv<pads=[3,3,3,3]>(x, v)\nh = Add(c, p)\n" + POOL,
        "Pad 'p': Pad that the pooling would follow; got [2, 2, 2, 2], expected less than [2, 2], as onnxruntime demands",
        {"two": [0, 0, 2, 2, 0, 0, 2, 2], "v": (16, 16, 3, 3)},
    ),
    "Pad that the pooling would follow, behind others": (
        "o = Pad(x, around)\np = Identity(o)\nq = Pad(p, around)\nc = Conv<pads=[3,3,3,3]>(x, v)\nh = Add(c, q)\n" + POOL,
        "Pad 'o': Pad that the pooling would follow; got [2, 2, 2, 2], expected less than [2, 2], as onnxruntime demands",
        {"v": (16, 16, 3, 3)},
    ),
    "Pad that some onnxruntime would miscount": (
        "p = Pad(x, corner)\nc = Conv<pads=[1,1,2,2]>(x, v)\nh = Add(c, p)\n" + POOL,
        "Pad 'p': Pad that the pooling would follow; got [0, 0, 1, 1], expected ones that onnxruntime before 1.25 counts right",
        {"corner": [0, 0, 0, 0, 0, 0, 1, 1], "v": (16, 16, 3, 3), "opset": 19},
    ),
    "Pad in front that some onnxruntime would miscount": (
        "p = Pad(x, corner)\nc = Mul(p, one)\nh = Conv(c, w)\n" + POOL,
        "Conv 'h': Pad 'p' in front of the box mean; got pads that reach its window, unknown ones, or more at an end, expected "
        "others, as onnxruntime demands",
        {"corner": [0, 0, 0, 0, 0, 0, 1, 1], "opset": 19, "lowering": "direct"},
    ),
    "fused weights too small": (
        ALONE,
        "Conv 'h': fused weights; got numbers too large or small, expected ones that the type has",
        {"w": np.full((32, 16, 3, 3), 3e-5, np.float16), **HALVES, "lowering": "fused"},
    ),
    "fused weights too large": (
        "h = Conv<pads=[2,2,2,2]>(x, v)\ny = GlobalAveragePool(h)",
        "Conv 'h': elements of the fused weights; got 58,982,400, expected at most 16,777,216",
        {"v": (128, 128, 5, 5), "inputs": "float[1,128,56,56] x", "lowering": "fused"},
    ),
    "sums of too many products": (
        "h = Conv(x, v)\ny = GlobalAveragePool(h)",
        "Conv 'h': products of a sum with the fused weights; got 262,656, expected at most 262,144",
        {"v": (8, 2, 1, 2), "inputs": "float[1,2,342,384] x", "lowering": "fused"},
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
        slot("h = Pad(c, around)", "c = Conv<pads=[2,2,2,2]>(x, w, b)\n"),
        "Pad 'h': Pad behind a bias; got [1, 1, 1, 1], expected no positive pads",
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
    "training Dropout": (slot("h = Dropout(c, half, yes)"), "Dropout 'h': training_mode; got (1,), expected false"),
    "Dropout by a caller": (
        slot("h = Dropout(c, half, flag)"),
        "Dropout 'h': training_mode; got computed, or an input that a caller may override, expected false",
        BOOL,
    ),
    "spatial BatchNormalization": (
        slot("h = BatchNormalization<spatial=0>(c, map, map, map, map)"),
        "BatchNormalization 'h': spatial; got 0, expected 1",
        {"map": (32, 12, 12), "opset": 8},
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
    ),
    "division by zero": (
        slot("h = Div(c, k)"),
        "Div 'h': constant operands; got a division by 0, infinity or NaN, expected finite numbers",
        {"k": np.zeros((32, 1, 1), np.float32)},
    ),
    "infinite weight": (
        ALONE,
        "Conv 'h': weights; got infinity, expected finite numbers",
        {"w": np.full((32, 16, 3, 3), np.inf, "f")},
    ),
    "negative variance": (
        slot("h = BatchNormalization(c, b, b, b, var)"),
        "BatchNormalization 'h': constant operands; got a division by 0, infinity or NaN, expected finite numbers",
        {"var": np.full(32, -1, np.float32)},
    ),
    "reflecting Pad": (slot('h = Pad<mode="reflect">(c, around)'), "Pad 'h': mode of Pad; got reflect, expected constant"),
    "computed pads": (
        slot("h = Pad(c, p)"),
        "Pad 'h': pads or value of Pad; got computed, or an input that a caller may override, expected constants",
        {"inputs": "float[1,16,12,12] x, int64[8] p"},
    ),
    "computed Pad axes": (
        slot("h = Pad(c, p, , axes)"),
        "Pad 'h': axes of Pad; got computed, or an input that a caller may override, expected a constant",
        {"p": [0, 1, 0, 1], "inputs": "float[1,16,12,12] x, int64[2] axes", "opset": 18},
    ),
    "value of Pad": (slot("h = Pad(c, around, one)"), "Pad 'h': value of Pad; got 1.0, expected 0"),
    # attributes that onnx's checker lets pass and no runtime takes
    "pads beside axes": (
        slot("h = Pad(c, p, , a)"),
        "Pad 'h': pads of Pad; got [1, 1, 1], expected 4 numbers",
        {"p": [1, 1, 1], "a": [2, 3], "opset": 18},
    ),
    "value of Pad without elements": (
        slot("h = Pad(c, zeros, v)"),
        "Pad 'h': value of Pad; got shape [0], expected one number",
        {"zeros": [0] * 8, "v": np.zeros(0, np.float32)},
    ),
    "parameters of two sizes": (
        slot("h = BatchNormalization(c, b, five, b, b)"),
        "BatchNormalization 'h': parameters; got [[32], [5], [32], [32]], expected one shape",
        {"five": (5,)},
    ),
    # rules/offloaded.py
    "pool_conv strides of the convolution": (
        pool_conv(TWOS).replace("Conv<", "Conv<strides=[0,1], "),
        "Conv 'y': strides; got [0, 1], expected 2 numbers of at least 1",
        FUSE,
    ),
    "pool_conv read twice": (
        pool_conv(TWOS) + "\nz = Relu(h)",
        "AveragePool 'h': output 'h' has 2 readers; got other readers, expected only the convolution",
        {"outputs": "float[a,b,c,d] y, float[a,b,c,d] z", **FUSE},
    ),
    "pool_conv rank unknown": (
        "v = Reshape(u, s)\n" + pool_conv(TWOS).replace("w)", "v)"),
        "Conv 'y': shape of the weights; got unknown, expected a known rank",
        {"inputs": "float[1,16,12,12] x, float[4608] u, int64[n] s", **FUSE},
    ),
}
INSIDE = "expected windows that all lie inside"
LARGE = "window; got [3, 3], expected no larger than the feature map,"
AVERAGES: dict[str, tuple] = {  # attributes of the AveragePool behind CONV, the reason, and what is given
    "pool pads": (f"{TWOS}, pads=[1,0,0,0]", "pooling pads; got [1, 0, 0, 0], expected no padding"),
    "end pads in a window": (f"{THREES}, pads=[0,0,1,1]", "pooling pads; got [0, 0, 1, 1], expected no padding"),
    "SAME pads": (f"{THREES}, {UPPER}", "auto_pad; got SAME_UPPER, which pads size 12, expected no padding"),
    "SAME on an open size": (f"{TWOS}, {LOWER}", "auto_pad; got SAME_LOWER on an unknown size, expected no padding", OPEN),
    "ceil adds a window": (f"{THREES}, ceil_mode=1", f"ceil_mode; got a partial window on size 12, {INSIDE}"),
    "ceil on an open size": (f"{TWOS}, ceil_mode=1", f"ceil_mode; got 1 on an unknown size, {INSIDE}", OPEN),
    "window too large": (f"{THREES}, ceil_mode=1", f"{LARGE} [2, 2]", {"inputs": "float[1,16,2,2] x"}),
    "window too high where the width is open": (THREES, f"{LARGE} [2, '?']", {"inputs": "float[1,16,2,width] x"}),
    "dimensions of the pooling": ("kernel_shape=[2]", "kernel_shape; got (2,), expected 2 dimensions, as the convolution has"),
    "pool strides of 0": ("kernel_shape=[2,2], strides=[0,2]", "strides; got [0, 2], expected 2 numbers of at least 1"),
}
STRIDED = "auto_pad; got {} with strides on an unknown size, expected explicit pads"
CONVOLUTIONS: dict[str, tuple] = {  # attributes of the Conv in front of POOL, the reason, and what is given
    "kernel_shape of the Conv": ("kernel_shape=[2,2]", "kernel_shape; got [2, 2], expected [3, 3], as the weights have"),
    "SAME on an open size, strided": (f"{UPPER}, strides=[2,2]", STRIDED.format("SAME_UPPER"), OPEN),
    "SAME on an open size, strided on one axis": (f"{LOWER}, strides=[1,2]", STRIDED.format("SAME_LOWER"), OPEN),
    "strides of 0": ("strides=[0,1]", "strides; got [0, 1], expected 2 numbers of at least 1"),
    "dilations of 0": ("dilations=[0,1]", "dilations; got [0, 1], expected 2 numbers of at least 1", {"lowering": "fused"}),
    "negative pads": ("pads=[-1,-1,-1,-1]", "pads; got [-1, -1, -1, -1], expected 4 numbers of at least 0"),
    "empty": ("pads=[3,3,3,3]", "size of the map; got [0, 5], expected at least one element", {"inputs": "float[1,16,0,5] x"}),
    "pads of one axis": ("pads=[1,1]", "pads; got [1, 1], expected 4 numbers of at least 0"),
}
OTHERS = "zeros where the convolution gives others, axis {}; got 1, expected convolution pads >= 2"
PADS: dict[str, tuple] = {  # of a Pad between PADDED and POOL, and the reason
    "zeros at the begin": ([0, 0, 1, 0, 0, 0, 0, 0], OTHERS.format(0)),
    "zeros at the end": ([0, 0, 0, 0, 0, 0, 0, 1], OTHERS.format(1)),
    "crop": ([0, 0, -2, 0, 0, 0, 0, 0], "crop beyond the convolution's padding; got [-2, 0, 0, 0], expected pads that stay >= 0"),
    "channels and rows of Pad": (
        [0, 1, 0, 0, 0, 0, 1, 0],
        "pads of Pad; got [0, 1, 0, 0, 0, 0, 1, 0], expected zeros on the batch and channel axes",
    ),
    "pads for two axes": ([0, 0, 1, 1], "pads of Pad; got [0, 0, 1, 1], expected 8 numbers"),
}
CONSTANT = "Slice 's4': Slice; got other axes, or bounds that are computed, expected constant strides over spatial axes"
ONE_SHAPE = "expected sizes of 1 or [1, 32, 6, 6]"
SLICES: dict[str, tuple] = {  # from the Slices to the mean, the reason, and what is given beside QUARTER
    "open size under Slices": (MEAN, "Mul 'y': size of the Slices' input; got unknown, expected static spatial sizes", OPEN),
    "computed Slice": (MEAN.replace("(h, d,", "(h, v,"), CONSTANT, {"inputs": "float[1,16,12,12] x, int64[2] v"}),
    "Slices without an end": (MEAN.replace("(h, d, e,", "(h, d, f1,"), CONSTANT, {"f1": [LAST]}),
    "Slices backwards": (MEAN.replace("(h, d, e, a, s)", "(h, e, f, a, back)"), CONSTANT, {"back": [-2, -2]}),
    "odd size under Slices": (
        MEAN,
        "Mul 'y': Slices of spatial axis 0; got [0:3:2] [1:3:2], expected equal strides and lengths",
        {"inputs": "float[1,16,3,3] x"},
    ),
    "a corner twice": (
        MEAN.replace("s3, s4)", "s3, s1)"),
        "Mul 'y': offsets of the Slices; got [(0, 0), (0, 0), (0, 1), (1, 0)], expected each offset of the window once",
    ),
    "wrong divisor, open size": (MEAN.replace("q)", "third)"), "Mul 'y': factor of a Slice; got 0.333333343, expected 1/4", OPEN),
    "8 units of rounding": (MEAN, "Mul 'y': factor of a Slice; got 0.250000119, expected 1/4", {"q": np.float32(0.25000012)}),
    "factor that raises the rank": (
        MEAN,
        f"Mul 'y': shape of a constant; got [1, 1, 1, 1, 1], {ONE_SHAPE}",
        {"q": np.full((1,) * 5, 0.25, "f"), "outputs": "float[a,b,c,d,e5] y"},
    ),
    "unequal factors": (
        MEAN.replace("t = Sum(s1,", "p = Mul(s1, third)\nt = Sum(p,"),
        "Mul 'y': factor of a Slice; got 0.0833333358, expected 1/4",
    ),
    "zeros that broadcast": (
        MEAN.replace("s4)\ny", "s4, zeros)\ny"),
        f"Mul 'y': shape of a constant; got [2, 1, 1, 1], {ONE_SHAPE}",
        {"zeros": np.zeros((2, 1, 1, 1), "f")},
    ),
    "a corner read elsewhere": (
        f"{MEAN}\nother = Relu(s4)",
        "Slice 's4': readers; got a reader outside the average, expected none",
        {"outputs": "float[a,b,c,d] y, float[a,b,c,d] other"},
    ),
}
POOL_CONV: dict[str, tuple] = {  # attributes of the AveragePool in front of a Conv, the reason, and what is given beside FUSE
    "strides": ("kernel_shape=[2,2]", "strides; got [1, 1], expected kernel_shape, [2, 2]"),
    "auto_pad": (f"{TWOS}, {UPPER}", "auto_pad; got SAME_UPPER, expected explicit pads"),
    "pads": (f"{TWOS}, pads=[1,1,1,1]", "padding left out of the mean; got [1, 1, 1, 1], expected count_include_pad = 1"),
    "dilations": (f"{TWOS}, dilations=[2,2]", "dilations; got [2, 2], expected ones", {"opset": 19}),
    "partial window": (
        "kernel_shape=[5,5], strides=[5,5], ceil_mode=1",
        "ceil_mode; got a partial window or an unknown size, expected whole windows",
    ),
    "window": (
        "kernel_shape=[13,2], strides=[13,2]",
        "window; got [13, 2], expected no larger than the padded feature map, [12, '?']",
        {"inputs": "float[1,16,12,W] x"},
    ),
}


def check_rejected(body: str, expected: str, given: dict | None = None) -> None:
    """The first site stays for the reason expected, and the model as it is; given: for `graph_of` and `optimize`."""
    arguments = GIVEN | (given or {})
    options = {name: arguments.pop(name) for name in ("lowering", *FUSE) if name in arguments}
    model = graph_of(body, arguments)
    before, result = model.SerializeToString(deterministic=True), convpool.optimize(model, check=0, **options)
    site = result.report.sites[0]
    assert (site.status, site.lowering, site.reason) == ("rejected", None, expected)
    assert result.model.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("name", CASES)
def test_reason(name):
    check_rejected(*CASES[name])


@pytest.mark.parametrize("name", PADS)
def test_reason_of_a_pad(name):
    pads, expected = PADS[name]
    check_rejected(slot("h = Pad(c, p)"), f"Pad 'h': {expected}", {"p": pads})


@pytest.mark.parametrize("name", SLICES)
def test_reason_of_a_mean_of_slices(name):
    nodes, expected, given = (*SLICES[name], {})[:3]
    check_rejected(CONV + nodes, expected, QUARTER | given)


KINDS = [  # a table, the nodes with its attributes, the node that stays, and what is given
    (AVERAGES, CONV + "y = AveragePool<{}>(h)", "AveragePool 'y'", {}),
    (CONVOLUTIONS, "h = Conv<{}>(x, w)\n" + POOL, "Conv 'h'", {}),
    (POOL_CONV, pool_conv("{}"), "AveragePool 'h'", FUSE),
]


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in KINDS for name in kind[0]],
    ids=lambda part: part if isinstance(part, str) else part[2],
)
def test_reason_by_attributes(kind, name):
    table, nodes, node, more = kind
    attributes, expected, given = (*table[name], {})[:3]
    check_rejected(nodes.replace("{}", attributes), f"{node}: {expected}", more | given)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        *((np.ones(n, np.float32), f"shape of the bias; got {list(n)}, expected [32]") for n in ((), (16,), (32, 1))),
        (np.ones((32, 16, 3, 3), np.int32), "type of the weights; got INT32, expected floating point"),
    ],
)
def test_weights_and_biases_in_a_function_are_told(stored, expected):
    model = graph(
        "y = local.net(x)",
        functions=f"""<opset_import: ["": 17], domain: "local">
    net (a) => (v) {{ h = Conv<pads=[1,1,1,1]>(a, w{", b" if stored.ndim < 4 else ""}) v = {AVERAGE}(h) }}""",
    )
    values = {"b": stored, "w": np.ones((32, 16, 3, 3), np.float32)} if stored.ndim < 4 else {"w": stored}
    for name, value in values.items():
        model.functions[0].node.insert(0, helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value)))
    (site,) = convpool.optimize(model, check=0).report.sites
    assert site.reason == f"Conv 'h': {expected}"


def test_normalization_in_training_is_none_of_inference():
    statistics = {"g": (32,), "b": (32,), "m": (32,), "v": np.ones(32, np.float32)}
    for outputs, opset in (("n, rm, rv", 17), ("n", 17), ("n, rm, rv, sm, sv", 9)):
        body = CONV + f"{outputs} = BatchNormalization{'<training_mode=1>' * (opset > 9)}(h, g, b, m, v)\ny = {AVERAGE}(n)"
        (site,) = convpool.optimize(graph(body, statistics, opset=opset), check=0).report.sites
        assert site.status == "rejected" and "form; got training, expected inference" in site.reason
