# SPDX-License-Identifier: Apache-2.0
"""1x1 convolutions behind any resampling that enlarges, in front of one that shrinks, and why others stay."""

import numpy as np
import pytest

import convpool
from tests.support import models
from tests.support.models import operators
from tests.support.resizing import UP, reason, rewrite, scales, whole

CONV = "y = Conv(u, w, b)"
SCALES = {"s": scales(2, 3), "b": (8,)}


def graph(body: str, constants: dict | None = None, **given):
    """`models.graph` with a 1x1 kernel."""
    return models.graph(body, {"w": (8, 16, 1, 1), **SCALES, **(constants or {})}, **given)


def resized(attributes: str, scale: str = "s") -> str:
    """A Resize with these attributes, to u."""
    return f"u = Resize<{attributes}>(x, , {scale})\n"


ENLARGING = {
    "half_pixel": 'mode="linear"',
    "align_corners": 'mode="linear", coordinate_transformation_mode="align_corners"',
    "asymmetric": 'mode="linear", coordinate_transformation_mode="asymmetric"',
    "pytorch_half_pixel": 'mode="linear", coordinate_transformation_mode="pytorch_half_pixel"',
    "cubic": 'mode="cubic", cubic_coeff_a=-0.5',
    "nearest, ceil": 'mode="nearest", nearest_mode="ceil"',
}


@pytest.mark.parametrize("name", ENLARGING)
def test_every_mode(name):
    for factors in ((2, 3), (1.5, 1.25), (1, 4)):
        if name == "cubic" and factors[0] == 1:
            continue
        result = rewrite(graph(resized(ENLARGING[name]) + CONV, {"s": scales(*factors)}))
        assert [node.op_type for node in result.graph.node] == ["Conv", "Resize"]


def test_fixed_sizes_get_the_new_number_of_channels():
    result = rewrite(graph('u = Resize<mode="linear">(x, , , z)\ny = Conv(u, w, b)', {"z": [1, 16, 30, 17]}))
    assert operators(result.graph)["Resize"] == 1


def test_sizes_of_spatial_axes_alone():
    body = 'u = Resize<mode="linear", axes=[2,3]>(x, , , z)\ny = Conv(u, w, b)'
    assert set(operators(rewrite(graph(body, {"z": [30, 17]}, opset=18)).graph)) == {"Conv", "Resize"}


def test_open_batch_with_computed_sizes():
    body = """h = Shape(x)
f = Slice(h, n0, n2)
z = Concat<axis=0>(f, t)
u = Resize<mode="linear", coordinate_transformation_mode="pytorch_half_pixel">(x, , , z)
y = Conv(u, w, b)"""
    rewrite(graph(body, {"n0": [0], "n2": [2], "t": [30, 17]}, inputs="float[N,16,12,12] x"), size=3)


def test_computed_weights_move_as_they_are():
    inputs = "float[1,16,12,12] x, float[8,16,1,1] w, float[8] b"
    result = rewrite(graph(resized('mode="linear"') + CONV, inputs=inputs))
    assert [node.op_type for node in result.graph.node] == ["Conv", "Resize"]


HEAD = """a = Resize<mode="linear">(x, , s2)
v = Resize<mode="linear">(q, , s4)
j = Concat<axis=1>(v, a, z)
h = Conv(j, w)
n = BatchNormalization(h, p, p, p, p)
y = Relu(n)"""
HEAD_INPUTS = "float[1,256,8,8] x, float[1,256,4,4] q, float[1,256,16,16] z"
HEAD_VALUES = {"s2": scales(2, 2), "s4": scales(4, 4), "w": (256, 768, 1, 1), "p": np.linspace(0.5, 2, 256, dtype=np.float32)}


def test_the_head_of_segformer():
    result = rewrite(graph(HEAD, HEAD_VALUES, inputs=HEAD_INPUTS))
    assert operators(result.graph) == {"Add": 2, "Conv": 3, "Relu": 1, "Resize": 2}
    (site,) = convpool.optimize(graph(HEAD, HEAD_VALUES, inputs=HEAD_INPUTS), target="cpu", check=0).report.sites
    assert (site.rule, site.lowering, site.macs_before) == ("resize_last", "conv_first", 256 * 768 * 256)
    assert site.macs_after == (256 + 64 + 16) * 256 * 256


def test_a_sum_of_resized_maps_is_split():
    body = """a = Resize<mode="linear">(x, , s2)
v = Resize<mode="linear">(q, , s4)
j = Add(a, v)
k = Mul(j, c)
y = Conv(k, w, b8)"""
    values = {**HEAD_VALUES, "w": (8, 32, 1, 1), "c": (32, 1, 1), "b8": (8,)}
    result = rewrite(graph(body, values, inputs="float[1,32,8,8] x, float[1,32,4,4] q"))
    assert operators(result.graph) == {"Add": 1, "Conv": 2, "Mul": 2, "Resize": 2}


def test_an_operand_of_fewer_axes_is_no_part_of_a_sum():
    row = {"k": np.ones((1, 16, 24), np.float32), "s": scales(2, 2)}
    given = graph(resized('mode="linear"') + "v = Add(u, k)\ny = Conv(v, w, b)", row, inputs="float[1,16,12,12] x")
    assert not convpool.optimize(given, check=0, target="cpu").changed


def test_a_concat_of_a_sum_that_may_broadcast_stays():
    body = resized('mode="linear"', "s2") + "a = Add(u, z)\nj = Concat<axis=1>(a, q)\ny = Conv(j, w)"
    inputs = "float[1,16,12,12] x, float[1,16,K,L] z"
    given = graph(body, {"s2": scales(2, 2), "w": (8, 32, 1, 1)}, inputs=f"{inputs}, float[1,16,24,24] q")
    assert "sizes of the maps that are added; got unknown" in reason(given)
    alone = graph(resized('mode="linear"', "s2") + "a = Add(u, z)\ny = Conv(a, w)", {"s2": scales(2, 2)}, inputs=inputs)
    rewrite(alone, size=1, upsampling="conv_first")  # a 1x1 convolution commutes with broadcasting


def test_more_channels_to_resize_stay_on_a_gpu():
    given = graph(resized('mode="linear"') + CONV, {"w": (32, 16, 1, 1), "b": (32,)})
    assert "channels that are resized; got 32, expected at most 16, for this target" in reason(given, target="cuda")


@pytest.mark.parametrize(("size", "most"), [(8, "of 0 microseconds"), (256, "")])
def test_several_maps_of_few_elements_stay_on_a_gpu(size, most):
    body = """a = Resize<mode="linear">(x, , s2)
v = Resize<mode="linear">(q, , s4)
j = Concat<axis=1>(a, v)
y = Conv(j, w, b8)"""
    values = {"s2": scales(2, 2), "s4": scales(4, 4), "w": (8, 32, 1, 1), "b8": (8,)}
    given = graph(body, values, inputs=f"float[1,16,{2 * size},{2 * size}] x, float[1,16,{size},{size}] q")
    result = convpool.optimize(given, target="cuda", check=0)
    assert result.changed == (not most) and convpool.optimize(given, target="cpu", check=0).changed
    assert not most or f"several maps, time on a GPU; got 5 {most}" in result.report.sites[0].reason


def test_maps_per_channel_move_in_front_of_interpolation_and_others_do_not():
    body = resized('mode="linear"') + "v = BatchNormalization(u, p, p, p, p)\ny = Conv(v, w, b)"
    assert operators(rewrite(graph(body, {"p": np.linspace(0.5, 2, 16, dtype=np.float32)})).graph)["Resize"] == 1
    relu = reason(graph(resized('mode="linear"') + "v = Relu(u)\ny = Conv(v, w, b)"))
    assert relu == "Relu 'v': between resize and convolution; got Relu, expected maps per channel"


REFUSED = {
    "extrapolation": (
        'u = Resize<mode="linear", coordinate_transformation_mode="tf_crop_and_resize">(x, roi, s)\n',
        "coordinate_transformation_mode; got tf_crop_and_resize",
    ),
    "exclude_outside": (resized('mode="cubic", exclude_outside=1'), "exclude_outside; got 1, expected 0"),
    "antialias": (resized('mode="linear", antialias=1'), "antialias; got 1, expected 0"),
    "aspect ratio": (
        'u = Resize<mode="linear", axes=[2,3], keep_aspect_ratio_policy="not_larger">(x, , , z)\n',
        "keep_aspect_ratio_policy; got not_larger, expected stretch",
    ),
    "computed scales": ('u = Resize<mode="linear">(x, , e)\n', "scales; got a computed tensor, expected a constant"),
    "norm": (resized('mode="linear"') + "n = Relu(u)\nk = InstanceNormalization(u, p, p)\n", "statistics of the map; got of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_why_a_convolution_stays(name):
    body, expected = REFUSED[name]
    values = {"roi": np.float32([0, 0, 0, 0, 1, 1, 1, 1]), "z": [30, 30], "p": np.ones(16, np.float32)}
    conv = "y = Conv(k, w, b)" if name == "norm" else CONV
    inputs = "float[1,16,12,12] x" + (", float[4] e" if name == "computed scales" else "")
    assert expected in reason(graph(body + conv, values, opset=18, inputs=inputs))


@pytest.mark.parametrize(
    ("attributes", "expected"), [("strides=[2,2]", "strides; got [2, 2]"), ("pads=[1,1,1,1]", "pads; got [1, 1,")]
)
def test_other_convolutions_stay(attributes, expected):
    assert expected in reason(graph(resized('mode="linear"') + f"y = Conv<{attributes}>(u, w, b)"))


SHRINK = {"s": scales(0.5, 0.5), "w": whole((32, 16, 1, 1)), "b": whole((32,))}


@pytest.mark.parametrize("mode", ('mode="nearest"', 'mode="linear", coordinate_transformation_mode="align_corners"'))
def test_in_front_of_a_shrinking_resize(mode):
    body = f"h = Conv(x, w, b)\ny = Resize<{mode}>(h, , s)"
    assert [node.op_type for node in rewrite(graph(body, SHRINK)).graph.node] == ["Resize", "Conv"]
    (site,) = convpool.optimize(graph(body, SHRINK), target="cpu", check=0).report.sites
    assert (site.rule, site.pattern, site.macs_before, site.macs_after) == ("resize_first", "conv_resize", 73728, 18432)


@pytest.mark.parametrize("attributes", ("strides=[2,2]", "pads=[1,1,1,1]"))
def test_other_convolutions_stay_in_front_of_a_shrinking_resize(attributes):
    given = graph(f"h = Conv<{attributes}>(x, w, b)\ny = Resize(h, , s)", {**SHRINK, "s": scales(0.25, 0.25)})
    assert attributes.split("=")[0] + "; got [" in reason(given, disable="pool_first")


def test_nothing_moves_behind_a_resize_to_no_elements():
    given = graph("h = Conv(x, w, b)\ny = Resize(h, , s)", {**SHRINK, "s": scales(0.05, 0.5)})
    assert not convpool.optimize(given, check=0, target="cpu").changed


def test_a_second_reader_keeps_the_convolution_in_front():
    body = "h = Conv(x, w, b)\nq = Relu(h)\ny = Resize(h, , s)"
    given = graph(body, {**SHRINK, "s": scales(0.25, 0.25)}, outputs="float[a,b,c,d] y, float[e,f,g,h] q")
    assert (
        reason(given, disable="pool_first")
        == "Conv 'h': result of the convolution; got has 2 readers, expected one reader, the Resize"
    )


def test_nearest_upsampling_of_one_map():
    result = rewrite(graph(UP + CONV, {"s": scales(2, 2), "w": whole((8, 16, 1, 1)), "b": whole((8,))}), exact=True)
    assert [node.op_type for node in result.graph.node] == ["Conv", "Resize"]
