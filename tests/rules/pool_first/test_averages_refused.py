# SPDX-License-Identifier: Apache-2.0
"""Means that are no average over windows, or none that can be moved: each with its reason."""

import numpy as np
import pytest

import convpool
from tests.support.models import graph, graph_of, operators
from tests.support.reject_cases import AXES, BOX, HALF, resize
from tests.support.rewriting import CONV, DIRECT, rewrite, verified

REJECTS: dict[str, tuple] = {  # body, the reason, and what `graph_of` is given
    "activation before": (
        CONV + "r = Relu(h)\nm = ReduceMean<axes=[3]>(r)\ny = ReduceMean<axes=[2]>(m)",
        "Relu 'r': between convolution and pooling; got Relu, expected linear operators only",
    ),
    "computed axes": (
        CONV + "f = Reshape(h, s)\ny = ReduceMean(f, a)",
        "ReduceMean 'y': axes; got a computed tensor, expected a constant",
        {"s": [0, 0, -1], "inputs": "float[1,16,12,12] x, int64[1] a", "outputs": "float[a,b,c] y", "opset": 18},
    ),
    "open size flattened": (
        "h = Conv(x, w)\nf = Reshape(h, s)\ny = ReduceMean<axes=[2]>(f)",
        "Reshape 'f': sizes of a Reshape; got unknown, expected static sizes",
        {"s": [1, 32, -1], "w": (32, 16, 1, 1), "inputs": "float[1,16,H,W] x", "outputs": "float[a,b,c] y"},
    ),
    "open size summed": (
        "h = Conv(x, w)\ny = ReduceSum(h, a)",
        "ReduceSum 'y': elements of a ReduceSum; got an unknown number, expected static sizes",
        {"a": [2, 3], "w": (32, 16, 1, 1), "inputs": "float[1,16,H,W] x"},
    ),
    "one axis of open size": (
        "h = Conv(x, w)\ny = ReduceMean<axes=[3]>(h)",
        "ReduceMean 'y': size averaged; got unknown, expected static sizes",
        {"w": (32, 16, 1, 1), "inputs": "float[1,16,12,W] x"},
    ),
    "axes that are cut across": (
        CONV + "f = Reshape(h, s)\ny = ReduceMean<axes=[3]>(f)",
        "Reshape 'f': shape of a Reshape; got [1, 32, 9, 16], expected axes split in two, or joined",
        {"s": [1, 32, 9, 16]},
    ),
    "channels that take of the batch": (
        CONV + "f = Reshape(h, s)\ny = ReduceMean<axes=[2]>(f)",
        "Reshape 'f': shape of a Reshape; got [1, 64, 144], expected axes split in two, or joined",
        {"s": [-1, 64, 144], "inputs": "float[2,16,12,12] x", "outputs": "float[a,b,c] y"},
    ),
    "batch and channels joined": (
        CONV + "f = Reshape(h, s)\ny = ReduceMean<axes=[1]>(f)",
        "Reshape 'f': shape of a Reshape; got [64, 144], expected axes split in two, or joined",
        {"s": [-1, 144], "inputs": "float[2,16,12,12] x", "outputs": "float[a,b] y"},
    ),
    "the outer part of an axis": (
        CONV + "v = Reshape(h, s)\ny = ReduceMean<axes=[2,4], keepdims=0>(v)",
        "ReduceMean 'y': positions averaged on spatial axis 0; got others, expected whole windows side by side",
        {"s": [1, 32, 2, 6, 2, 6]},
    ),
    "parts kept apart": (
        CONV + "v = Reshape(h, s)\ny = ReduceMean<axes=[3,5]>(v)",
        "ReduceMean 'y': axes of the average; got others, expected batch, channels and space, in order",
        {"s": [1, 32, 6, 2, 6, 2], "outputs": "float[a,b,c,d,e5,f] y"},
    ),
    "channels last, kept": (
        CONV + "t = Transpose<perm=[0,2,3,1]>(h)\ny = ReduceMean<axes=[1,2]>(t)",
        "ReduceMean 'y': axes of the average; got others, expected batch, channels and space, in order",
    ),
    "one channel, flattened": (
        CONV + "f = Flatten(h)\ny = ReduceMean<axes=[1]>(f)",
        "Conv 'h': saves too little as convavgpool; got 144 of 9,216 multiply-adds, and 9,216 additions in place of 64, "
        "expected at most 75% of the multiply-adds, and less time by the cost model",
        {"w": (1, 16, 3, 3), "inputs": "float[2,16,8,8] x", "outputs": "float[a,b] y"},
    ),
    "one channel, flattened by a negative axis": (
        CONV + "f = Flatten<axis=-3>(h)\ny = ReduceMean<axes=[1]>(f)",
        "Conv 'h': saves too little as convavgpool; got 144 of 9,216 multiply-adds, and 9,216 additions in place of 64, "
        "expected at most 75% of the multiply-adds, and less time by the cost model",
        {"w": (1, 16, 3, 3), "inputs": "float[2,16,8,8] x", "outputs": "float[a,b] y"},
    ),
    "flattened with the channels": (
        CONV + "f = Flatten<axis=2>(h)\ny = ReduceMean<axes=[1]>(f)",
        "ReduceMean 'y': axes of the average; got others, expected batch, channels and space, in order",
        {"inputs": "float[2,16,12,12] x", "outputs": "float[a,b] y"},
    ),
    "rows and columns exchanged": (
        CONV + "t = Transpose<perm=[0,1,3,2]>(h)\nv = Reshape(t, s)\ny = ReduceMean<axes=[3,5], keepdims=0>(v)",
        "ReduceMean 'y': axes of the average; got others, expected batch, channels and space, in order",
        {"s": [1, 32, 6, 2, 6, 2]},
    ),
    "SpaceToDepth of an open size": (
        CONV + "d = SpaceToDepth<blocksize=2>(h)\ny = ReduceMean<axes=[2,3]>(d)",
        "SpaceToDepth 'd': sizes of a SpaceToDepth; got unknown, or not its blocks', expected multiples of the block size",
        {"inputs": "float[1,16,H,W] x"},
    ),
    "a view read elsewhere": (
        CONV + "f = Reshape(h, s)\ny = ReduceMean<axes=[2]>(f)\nz = Relu(f)",
        "Reshape 'f': readers; got a reader outside the average, expected none",
        {"s": [0, 0, -1], "outputs": "float[a,b,c] y, float[d,e,f] z"},
    ),
    "Resize, nearest": (CONV + resize().replace("linear", "nearest"), "Resize 'y': mode; got nearest, expected linear", HALF),
    "Resize, cubic": (CONV + resize().replace("linear", "cubic"), "Resize 'y': mode; got cubic, expected linear", HALF),
    "Resize, antialias": (CONV + resize(", antialias=1"), "Resize 'y': antialias; got 1, expected 0", {**HALF, "opset": 18}),
    "Resize, asymmetric": (
        CONV + resize(', coordinate_transformation_mode="asymmetric"'),
        "Resize 'y': coordinate_transformation_mode; got asymmetric, expected half_pixel or pytorch_half_pixel",
        HALF,
    ),
    "Resize, align_corners": (
        CONV + resize(', coordinate_transformation_mode="align_corners"'),
        "Resize 'y': coordinate_transformation_mode; got align_corners, expected half_pixel or pytorch_half_pixel",
        HALF,
    ),
    "Resize of opset 10": (
        CONV + resize(inputs="scales"),
        "Resize 'y': coordinate_transformation_mode; got asymmetric, expected half_pixel or pytorch_half_pixel",
        {**HALF, "opset": 10},
    ),
    "Resize of an odd size": (
        CONV + resize(),
        "Resize 'y': size halved; got [12, 13], expected even numbers; runtimes scale odd ones differently",
        {**HALF, "inputs": "float[1,16,12,13] x"},
    ),
    "Resize of an open size": (
        CONV + resize(),
        "Resize 'y': size of the Resize's input; got unknown, expected static spatial sizes",
        {**HALF, "inputs": "float[1,16,12,W] x"},
    ),
    "Resize to one element": (
        CONV + resize(', coordinate_transformation_mode="pytorch_half_pixel"'),
        "Resize 'y': elements that pytorch_half_pixel leaves; got 1, expected more",
        {**HALF, "inputs": "float[1,16,2,12] x"},
    ),
    "Resize to a quarter": (
        CONV + resize(),
        "Resize 'y': scales; got [1.0, 1.0, 0.25, 0.25], expected 1/2 or 1 on spatial axes",
        {**HALF, "scales": np.array([1, 1, 0.25, 0.25], np.float32)},
    ),
    "Resize of channels": (
        CONV + resize(),
        "Resize 'y': scales; got [1.0, 0.5, 0.5, 0.5], expected 1/2 or 1 on spatial axes",
        {**HALF, "scales": np.array([1, 0.5, 0.5, 0.5], np.float32)},
    ),
    "box filter with pads": (
        CONV + "y = Conv<strides=[2,2], pads=[1,1,1,1], group=32>(h, ninth)",
        "Conv 'y': pooling pads; got [1, 1, 1, 1], expected no padding",
        {"ninth": np.full((32, 1, 3, 3), 1 / 9, np.float32)},
    ),
    "box filter with a bias": (
        CONV + "y = Conv<strides=[2,2], group=32>(h, quarter, k)",
        "Conv 'y': bias of a box filter; got numbers, expected none, or zeros",
        {**BOX, "k": (32,)},
    ),
    "box filter larger than the map": (
        CONV + "y = Conv<pads=[0,0,1,1], group=32>(h, quarter)",
        "Conv 'y': window; got [13, 13], expected no larger than the feature map, [12, 12]",
        {**BOX, "quarter": np.full((32, 1, 13, 13), 0.25, np.float32)},
    ),
    "half precision that the sum exceeds": (
        "h = Conv(x, w)\ny = ReduceSum(h, a)",
        "ReduceSum 'y': factor of the average; got 65792.0, expected a number that the type has",
        {
            "a": [2, 3],
            "w": np.ones((4, 2, 1, 1), np.float16),
            "inputs": "float16[1,2,256,257] x",
            "outputs": "float16[a,b,c,d] y",
        },
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
        {"s": [1, 4, -1], "outputs": "float[a,b,c] y"},
    ),
    "over channels that SpaceToDepth gives": (
        CONV + "d = SpaceToDepth<blocksize=2>(h)\nv = Reshape(d, s)\ny = ReduceMean<axes=[2], keepdims=0>(v)",
        "ReduceMean 'y': channels averaged with the positions; got 32, expected one",
        {"s": [1, 2, 64, 6, 6]},
    ),
    "behind a Squeeze of the batch": (
        CONV + "f = Squeeze(h, zero)\ny = ReduceMean<axes=[1,2]>(f)",
        "Squeeze 'f': axes of Squeeze; got [0], expected channels or space, of size 1",
        {"zero": [0], "outputs": "float[a,b,c] y"},
    ),
    "behind a Squeeze of what has size 1": (
        CONV + "f = Squeeze(h)\ny = ReduceMean<axes=[1,2]>(f)",
        "Squeeze 'f': axes of Squeeze; got none, expected some of 4",
        {"outputs": "float[a,b,c] y"},
    ),
}
UNREPORTED = {  # no averages over windows
    "a normalisation of tokens": (
        CONV + "f = Reshape(h, s)\nt = Transpose<perm=[0,2,1]>(f)\nm = ReduceMean<axes=[-1]>(t)\nd = Sub(t, m)\nq = Mul(d, d)\n"
        "y = ReduceMean<axes=[-1]>(q)",
        {"s": [0, 0, -1], "outputs": "float[a,b,c] y"},
    ),
    "over channels": (CONV + "y = ReduceMean<axes=[1]>(h)", {}),
    "a depthwise convolution": (CONV + "y = Conv<strides=[2,2], group=32>(h, k)", {"k": (32, 1, 2, 2)}),
    "a depthwise convolution with other numbers for a channel": (
        CONV + "y = Conv<strides=[2,2], group=32>(h, k)",
        {"k": np.repeat(np.array([0.25, 0.5], np.float32), 64).reshape(32, 1, 2, 2)},
    ),
    "a factor per channel": (CONV + "y = Conv<group=32>(h, k)", {"k": np.full((32, 1, 1, 1), 0.25, np.float32)}),
    "a sum of channels": (CONV + "y = Conv(h, k)", {"k": np.full((8, 32, 2, 2), 0.25, np.float32)}),
    "Slices without a factor's reciprocal": (
        CONV + "s1 = Slice(h, zero, end, rows, two)\ns2 = Slice(h, one, end, rows, two)\nt = Add(s1, s2)\ny = Mul(t, never)",
        {**AXES, "rows": [2], "two": [2], "never": np.float32(0)},
    ),
    "Resize with computed sizes": (
        CONV + 'y = Resize<mode="linear">(h, r, , sizes)',
        {"r": np.zeros(0, np.float32), "inputs": "float[1,16,12,12] x, int64[4] sizes"},
    ),
    "Resize that keeps the aspect ratio": (
        CONV + 'y = Resize<mode="linear", keep_aspect_ratio_policy="not_larger">(h, , , six)',
        {"six": [1, 32, 6, 6], "opset": 18},
    ),
    "Resize of axes of a tensor of unknown rank": (
        CONV + 'y = Resize<mode="linear", axes=[2,3]>(h, , halves)',
        {"halves": np.array([0.5, 0.5], np.float32), "inputs": "float[] x", "opset": 18},
    ),
    **{
        f"Resize of axes that there are not, {axes}, by {name}": (
            CONV + f'y = Resize<mode="linear", axes=[{axes}]>(h, , {places})',
            {"halves": np.array([0.5, 0.5], np.float32), "six": [6, 6], "opset": 18},
        )
        for axes in ("2,4", "-5,3")
        for name, places in (("scales", "halves"), ("sizes", ", six"))
    },
    "Resize of an open size to a known one": (
        CONV + 'y = Resize<mode="linear">(h, r, , six)',
        {"r": np.zeros(0, np.float32), "six": [1, 32, 6, 6], "inputs": "float[1,16,H,12] x"},
    ),
    "Resize to twice the size": (CONV + resize(), {**HALF, "scales": np.array([1, 1, 2, 2], np.float32)}),
}


@pytest.mark.parametrize("name", REJECTS)
def test_reason(name):
    body, expected, given = (*REJECTS[name], {})[:3]
    model = graph_of(body, given)
    result = convpool.optimize(model, check=0)
    assert [(site.status, site.reason) for site in result.report.sites] == [("rejected", expected)]
    assert result.model.SerializeToString() == model.SerializeToString()


@pytest.mark.parametrize("name", UNREPORTED)
def test_what_is_no_average_over_windows(name):
    model = graph_of(*UNREPORTED[name])
    result = convpool.optimize(model, check=0)
    assert not result.report.sites and result.model.SerializeToString() == model.SerializeToString()


def test_a_mean_over_channels_behind_one_over_space_stays():
    body = CONV + "m = ReduceMean<axes=[2,3]>(h)\ny = ReduceMean<axes=[1]>(m)"
    assert operators(rewrite(graph(body), 1).graph) == {**DIRECT, "ReduceMean": 1}


def test_the_type_of_a_factor_has_to_be_known():
    body = "z = local.some(x)\nh = Conv<kernel_shape=[2,2]>(z, v)\ny = Conv<strides=[2,2], group=32>(h, ones)"
    model = graph(f"v = local.some(x)\n{body}", {"ones": np.ones((32, 1, 2, 2), np.float32)}, imports=', "local": 1')
    (site,) = convpool.optimize(model, check=0).report.sites
    assert site.reason == "Conv 'y': type of the average; got unknown, expected a known one"


def test_a_sum_onto_computed_numbers_is_no_mean():
    corners = {"f": [0, 0], "r": [1, 0], "c": [0, 1], "d": [1, 1], "e": [2**40, 2**40], "a": [2, 3], "s": [2, 2]}
    slices = "".join(f"s{i} = Slice(h, {start}, e, a, s)\n" for i, start in enumerate("frcd"))
    body = CONV + slices + "n = Shape(s0)\nz = Expand(v, n)\nt = Sum(z, s0, s1, s2, s3)\ny = Div(t, four)"
    constants = {**corners, "four": np.float32(4)}
    verified(graph(body, constants, inputs="float[1,16,12,12] x, float[1] v"), 0)
    verified(graph(body, {**constants, "v": np.zeros(1, np.float32)}), 1)


def test_a_box_filter_that_cannot_be_told_is_reported():
    body = 'h = Conv(x, w)\ny = Conv<group=32, strides=[2,2], auto_pad="SAME_UPPER">(h, box)'
    model = graph(body, {"box": np.full((32, 1, 2, 2), 0.25, np.float32)}, inputs="float[1,16,H,W] x")
    (site,) = convpool.optimize(model, check=0).report.sites
    assert site.status == "rejected" and "auto_pad" in site.reason
