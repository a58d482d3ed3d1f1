# SPDX-License-Identifier: Apache-2.0
"""Convolutions without a pair, of images and others: what becomes a node with a window of one element, and why others stay."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import convpool
from convpool.algebra.geometry import ConvSpec, PoolSpec
from convpool.check.session import Session
from convpool.ir import schema
from convpool.ir.model import LoadedModel
from convpool.ir.protos import attributes
from convpool.rules.offloaded import KINDS
from tests.support import rewriting, sessions
from tests.support.models import TYPES, graph, operators, random_feeds
from tests.support.rewriting import POOL

PAIR = f"h = Conv<pads=[1,1,1,1]>(s, w)\ny = {POOL}(h)"
STEM = "s = Conv<pads=[1,1,1,1]>(x, v)\n"
RELU = STEM.replace("s =", "c =") + "s = Relu(c)\n"
POOLED = "p = AveragePool<kernel_shape=[2,2], strides=[2,2]>(x)\ns = Conv<pads=[1,1,1,1]>(p, v)\n"
OTHER = f"g = Conv(z, w)\no = {POOL}(g)"
BESIDE = {"outputs": "float[a,b,c,d] y, float[i,j,k,l] o"}
IMAGE, SHAPES = "float[1,3,12,12] x", {"v": (16, 3, 3, 3)}
WIDE, WIDE_SHAPES = "float[1,64,8,8] x", {"v": (64, 64, 3, 3), "w": (32, 64, 3, 3)}
BOTH = ("image_conv", "plain_conv")


def rewrite(
    model: onnx.ModelProto, pairs: int, enable: str | tuple[str, ...] | None = "image_conv", **options
) -> onnx.ModelProto:
    """`rewriting.rewrite` to nodes of the operator, pairs and others; enable: the kinds without a pair."""
    return rewriting.rewrite(model, pairs, "convavgpool", **({"enable": enable} if enable else {}), **options)


def made(model: onnx.ModelProto) -> list[str]:
    """The operators of all nodes, in order."""
    return [node.op_type for node in model.graph.node]


def operators_of(*arguments, **options) -> list[str]:
    """The operators of a rewritten model."""
    return made(rewrite(*arguments, **options))


def patterns(site) -> tuple[str, str, str]:
    return site.conv, site.pattern, site.status


def windows(node: onnx.NodeProto) -> dict[str, list[int]]:
    """A node's attributes that are lists of numbers."""
    return {item.name: list(item.ints) for item in node.attribute if item.ints}


def check_reason(kind, name, body, constants, inputs, expected):
    """The convolution 's' beside a pair is rejected for the reason expected, and the model is as without the option."""
    constants = {key: value for key, value in {**SHAPES, **constants}.items() if value is not None}
    outputs = f"float[{'a,b,c' if name == 'one axis' else 'a,b,c,d'}] s, float[i,j,k,l] o"
    model = graph(body + OTHER, constants, inputs=f"{inputs}, float[1,16,12,12] z", outputs=outputs)
    result = convpool.optimize(model, check=0, enable=kind)
    found = [(site.pattern, site.status, site.reason) for site in result.report.sites]
    assert found == [("conv_pool", "rewritten", None), (KINDS[kind], "rejected", f"Conv 's': {expected}")]
    assert result.model.SerializeToString() == convpool.optimize(model, check=0).model.SerializeToString()


@pytest.mark.parametrize(("kind", "shapes", "inputs"), [("image_conv", SHAPES, IMAGE), ("plain_conv", WIDE_SHAPES, WIDE)])
def test_a_convolution_and_its_relu_in_front_of_a_pair(kind, shapes, inputs):
    model = graph(RELU + PAIR, shapes, inputs=inputs)
    assert operators_of(model, 2, kind) == ["ConvAvgPoolRelu", "ConvAvgPool"]
    assert operators_of(model, 2, kind, disable="fuse_epilogue") == ["ConvAvgPool", "ReluConvAvgPool"]
    apart = rewrite(model, 2, kind, disable=["fuse_epilogue", "fuse_prologue"])
    assert made(apart) == ["ConvAvgPool", "Relu", "ConvAvgPool"]
    assert operators_of(model, 1, None) == ["Conv", "Relu", "ConvAvgPool"]


def test_numbers_of_the_node_and_of_the_report():
    body = "s = Conv<pads=[1,0,2,1], strides=[2,1], dilations=[1,2]>(x, v, b)\n" + PAIR
    model = graph(body, {**SHAPES, "b": (16,)}, inputs=IMAGE)
    model.graph.node[0].name = "conv1"
    node = rewrite(model, 2).graph.node[0]
    assert (node.name, node.op_type) == ("conv1", "ConvAvgPool")
    assert (list(node.input), list(node.output)) == (["x", "v_channels_last", "b"], ["s"])
    one, conv = PoolSpec((1, 1), (1, 1), (0,) * 4, (1, 1)), ConvSpec((3, 3), (2, 1), (1, 0, 2, 1), (1, 2), 1)
    assert schema.specs_of(attributes(node)) == (one, conv) and windows(node)["weight_perm"] == [0, 3, 1, 2]
    site = convpool.optimize(model, enable="image_conv").report.sites[1]
    assert (site.conv, site.pool, site.pattern, site.status, site.lowering) == ("conv1", "", "stem", "rewritten", "convavgpool")
    assert site.macs_before == site.macs_after == 7 * 9 * 16 * 27


STEMS = {
    "strides": ("s = Conv<pads=[1,1,1,1], strides=[2,2]>(x, v)\n", {}, IMAGE),
    "5x5 of one channel": ("s = Conv<pads=[2,2,2,2]>(x, v)\n", {"v": (16, 1, 5, 5)}, "float[2,1,12,12] x"),
    "4x4 of four channels": ("s = Conv(x, v)\n", {"v": (16, 4, 4, 4)}, "float[1,4,12,12] x"),
    "SAME": ('s = Conv<auto_pad="SAME_LOWER", strides=[2,2]>(x, v)\n', {}, "float[1,3,11,11] x"),
    "SAME of an open size": ('s = Conv<auto_pad="SAME_UPPER">(x, v)\n', {}, "float[N,3,H,W] x"),
    "VALID": ('s = Conv<auto_pad="VALID">(x, v)\n', {}, IMAGE),
    "open batch and sizes": (STEM, {}, "float[N,3,H,W] x"),
    "computed from constants": ("u = Mul(v, v)\ns = Conv<pads=[1,1,1,1]>(x, u)\n", {}, IMAGE),
    "of a map per channel": ("n = Sub(x, k)\nm = Clip(n)\ns = Conv<pads=[1,1,1,1]>(m, v)\n", {"k": (3, 1, 1)}, IMAGE),
    "of reflected borders": ('p = Pad<mode="reflect">(x, n)\ns = Conv(p, v)\n', {"n": [0, 0, 1, 1, 0, 0, 1, 1]}, IMAGE),
    "of a smaller image": (f"m = {POOL}(x)\ns = Conv<pads=[1,1,1,1]>(m, v)\n", {}, IMAGE),
}


@pytest.mark.parametrize(("body", "constants", "inputs"), STEMS.values(), ids=STEMS)
def test_stem(body, constants, inputs):
    model = rewrite(graph(body + PAIR, {**SHAPES, **constants}, inputs=inputs), 2)
    assert "Conv" not in made(model) and made(model)[-2:] == ["ConvAvgPool"] * 2


@pytest.mark.parametrize("opset", [7, 10, 11, 13, 18, 19, 22])
@pytest.mark.parametrize("kind", ["float", "float16"])
def test_opsets_and_half_precision(opset, kind):
    sixteenth = TYPES[kind](1 / 16)
    constants = {"v": np.full((16, 3, 3, 3), sixteenth), "w": np.full((32, 16, 3, 3), sixteenth)}
    model = graph(RELU + PAIR, constants, inputs=f"{kind}[1,3,12,12] x", outputs=f"{kind}[a,b,c,d] y", opset=opset)
    result = convpool.optimize(model, enable="image_conv")
    assert made(result.model) == ["ConvAvgPoolRelu", "ConvAvgPool"] and result.report.verification.passed


def test_zero_pads_in_front_go_with_it():
    # onnxruntime merges a Pad into an AveragePool behind it, and refuses pads as large as the window.
    model = graph("p = Pad(x, n)\ns = Conv(p, v)\n" + PAIR, {**SHAPES, "n": [0, 0, 1, 2, 0, 0, 1, 0]}, inputs=IMAGE)
    result = rewrite(model, 2)
    assert made(result) == ["ConvAvgPool"] * 2 and windows(result.graph.node[0])["pads"] == [1, 2, 1, 0]
    feeds = random_feeds(model)
    optimized = Session(LoadedModel(result, None, 0), optimize=True).run(None, feeds)
    np.testing.assert_allclose(optimized[0], sessions.run(model, feeds)[0], rtol=1e-4, atol=1e-3)


def test_several_readers_and_an_output():
    body = STEM + "r = Relu(s)\n" + PAIR.replace("(s,", "(r,") + "\nt = Neg(s)"
    result = rewrite(graph(body, SHAPES, inputs=IMAGE, outputs="float[a,b,c,d] y, float[e,f,g,i] t, float[e,f,g,i] s"), 2)
    assert operators(result.graph) == {"ConvAvgPool": 1, "Neg": 1, "ReluConvAvgPool": 1}


def test_what_stands_behind_is_taken_in():
    body = f"""n = BatchNormalization(s, g, g, g, g) r = LeakyRelu(n) a = Conv<pads=[1,1,1,1]>(x, u) e = Add(a, r)
{PAIR.replace("(s,", "(e,")}"""
    model = graph(STEM + body, {**SHAPES, "u": (16, 3, 3, 3), "g": np.full(16, 2, np.float32)}, inputs=IMAGE)
    assert operators_of(model, 3) == ["ConvAvgPoolLeakyRelu", "ConvAvgPoolAdd", "ConvAvgPool"]


def test_pairs_come_first():
    of_an_image = graph(PAIR.replace("(s,", "(x,"), {"w": (32, 3, 3, 3)}, inputs=IMAGE)
    report = convpool.optimize(of_an_image, enable="image_conv").report
    assert [site.pattern for site in report.sites] == ["conv_pool"]


def test_a_pooling_in_front_goes_with_it():
    model = graph(f"r = Relu(x)\n{POOLED.replace('(x)', '(r)')}{PAIR}", SHAPES, inputs=IMAGE)
    model.graph.node[1].name = "pool"
    result = rewrite(model, 2)
    assert made(result) == ["ReluConvAvgPool", "ConvAvgPool"]
    assert windows(result.graph.node[0])["pool_kernel_shape"] == windows(result.graph.node[0])["pool_strides"] == [2, 2]
    site = convpool.optimize(model, enable="image_conv").report.sites[1]
    assert (site.conv, site.pool, site.pattern, site.status) == ("s", "pool", "stem", "rewritten")
    assert site.macs_before == site.macs_after == 6 * 6 * 16 * 27
    assert list(rewrite(model, 2, ["image_conv", "fuse_pool_conv"]).graph.node) == list(result.graph.node)


@pytest.mark.parametrize(
    ("pooling", "more"),
    [
        ("AveragePool<kernel_shape=[3,3], strides=[2,2]>", ""),
        ("AveragePool<kernel_shape=[2,2], strides=[2,2], pads=[1,1,1,1]>", ""),
        ("AveragePool<kernel_shape=[5,5], strides=[5,5], ceil_mode=1>", ""),
        ("AveragePool<kernel_shape=[2,2], strides=[2,2]>", "\nt = Neg(p)"),
        ("MaxPool<kernel_shape=[2,2], strides=[2,2]>", ""),
    ],
)
def test_a_pooling_that_cannot_go_with_it_stays(pooling, more):
    body = f"p = {pooling}(x)\ns = Conv<pads=[1,1,1,1]>(p, v)\n{PAIR}{more}"
    result = rewrite(graph(body, SHAPES, inputs=IMAGE, outputs="float[a,b,c,d] y" + (", float[e,f,g,i] t" if more else "")), 2)
    assert made(result)[:3] == [pooling.split("<")[0], "ConvAvgPool", "ConvAvgPool"]
    assert windows(result.graph.node[1])["pool_kernel_shape"] == [1, 1]


def test_a_pooling_stays_where_it_is_excluded_or_its_convolution_is_none_of_an_image():
    model = graph(POOLED + PAIR, SHAPES, inputs=IMAGE)
    model.graph.node[0].name = "pool"
    assert operators_of(model, 2, exclude="pool") == ["AveragePool", "ConvAvgPool", "ConvAvgPool"]
    assert operators_of(model, 1, exclude="s") == ["AveragePool", "Conv", "ConvAvgPool"]
    large = graph(POOLED.replace("1,1,1,1", "2,2,2,2") + PAIR, {"v": (16, 3, 5, 5)}, inputs=IMAGE)
    assert operators_of(large, 1) == ["AveragePool", "Conv", "ConvAvgPool"]
    wide = graph(POOLED + PAIR, WIDE_SHAPES, inputs=WIDE)
    assert operators_of(wide, 2, BOTH) == ["AveragePool", "ConvAvgPool", "ConvAvgPool"]


def test_what_a_pair_has_become_is_no_site():
    # A strided pair is fused before opset 19; the convolution left could be a node, but has its row in the report.
    body = f"c = Conv<strides=[2,2]>(x, u)\no = {POOL}(c)\n{STEM}{PAIR}"
    model = graph(body, {"v": (16, 1, 3, 3), "u": (16, 1, 3, 3)}, inputs="float[1,1,13,13] x", **BESIDE)
    result = convpool.optimize(model, enable="image_conv")
    assert {site.conv: site.lowering for site in result.report.sites} == {"c": "fused", "h": "convavgpool", "s": "convavgpool"}
    assert made(result.model) == ["Conv", "ConvAvgPool", "ConvAvgPool"]


@pytest.mark.parametrize("average", [f"{POOL[:-1]}, pads=[1,1,1,1]>(s)", "GlobalAveragePool(s)", f"{POOL}(r)"])
def test_an_average_behind_it_leaves_it(average):
    model = graph(f"{STEM}r = Relu(s)\no = {average}\n{PAIR}", SHAPES, inputs=IMAGE, **BESIDE)
    sites = convpool.optimize(model, enable="image_conv").report.sites
    pattern = f"conv_{'global_' * ('Global' in average)}pool"
    assert [patterns(site) for site in sites] == [("h", "conv_pool", "rewritten"), ("s", pattern, "rejected")]


GROUP = "group of a ConvAvgPool; got {}, expected 1, for which the plugin has kernels"
PAD = "Pad 'p' in front; got pads that the convolution cannot take, expected none"
AROUND = {"n": [0, 0, 1, 1, 0, 0, 1, 1], "k": np.zeros((), np.float32)}
REFUSED = {
    "five channels": (STEM, {"v": (8, 5, 3, 3)}, "float[1,5,12,12] x", "channels; got 5, expected at most 4"),
    "large kernel": ("s = Conv(x, v)\n", {"v": (8, 3, 5, 5)}, IMAGE, "weights a filter; got 75, expected at most 64"),
    "group": ("s = Conv<group=3>(x, v)\n", {"v": (9, 1, 3, 3)}, IMAGE, GROUP.format(3)),
    "computed weights": (
        STEM,
        {"v": None},
        f"{IMAGE}, float[8,3,3,3] v",
        "weights; got computed, or an input that a caller may override, expected a constant",
    ),
    "weights of an unknown rank": (
        "u = Reshape(x, n)\ns = Conv(x, u)\n",
        {},
        f"{IMAGE}, int64[k] n",
        "spatial axes; got an unknown number, expected 2",
    ),
    "Pad behind what onnxruntime takes out": (
        "p = Pad(x, n)\nm = Mul(p, k)\nq = Cast<to=1>(m)\ns = Conv(q, v)\n",
        {**AROUND, "k": np.ones(1, np.float32)},
        IMAGE,
        PAD,
    ),
    "Pad of a computed value": ("a = Sin(k)\np = Pad(x, n, a)\ns = Conv(p, v)\n", AROUND, IMAGE, PAD),
    "one axis": ("s = Conv(x, v)\n", {"v": (8, 3, 3)}, "float[1,3,12] x", "spatial axes; got 1, expected 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_reason(name):
    check_reason("image_conv", name, *REFUSED[name])


@pytest.mark.parametrize(
    ("version", "attribute", "expected"),
    [
        (17, "group: int = @group", "attributes; got a reference to the function's 'group', expected values"),
        (16, "group = 1", "opset of the function; got 16, expected the model's, 17"),
        (17, "group = 1", "input of the function; got what a call gives, expected a tensor that is known"),
    ],
)
def test_in_a_function(version, attribute, expected):
    text = f'<opset_import: ["": {version}], domain: "local">\nfirst <group> (x) => (s) {{ s = Conv<{attribute}>(x, c) }}'
    inputs, outputs = f"{IMAGE}, float[1,16,12,12] z", "float[a,b,c,d] s, float[i,j,k,l] o"
    model = graph(f"s = local.first<group = 1>(x)\n{OTHER}", inputs=inputs, outputs=outputs, functions=text)
    body = model.functions[0]
    value = helper.make_tensor("c", onnx.TensorProto.FLOAT, [8, 3, 3, 3], np.ones(216))
    body.node.insert(0, helper.make_node("Constant", [], ["c"], value=value))
    result = convpool.optimize(model, check=0, enable="image_conv")
    assert [site.reason for site in result.report.sites] == [None, f"Conv 's': {expected}"]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("options", [{}, {"lowering": "direct"}, {"exclude": "h"}])
def test_without_a_node_of_a_pair_nothing_changes(options, kind):
    body = RELU + (PAIR if options else "y = Neg(s)")
    model = graph(body, SHAPES, inputs=IMAGE) if kind == "image_conv" else graph(body, WIDE_SHAPES, inputs=WIDE)
    result, plain = (convpool.optimize(model, check=0, enable=names, **options) for names in (kind, ()))
    assert result.model.SerializeToString() == plain.model.SerializeToString()
    assert result.report.sites == plain.report.sites
    assert result.changed == (options == {"lowering": "direct"})


def test_excluded():
    result = convpool.optimize(graph(RELU + PAIR, SHAPES, inputs=IMAGE), enable="image_conv", exclude="c")
    assert [patterns(site) for site in result.report.sites] == [("h", "conv_pool", "rewritten"), ("c", "stem", "excluded")]
    assert made(result.model) == ["Conv", "Relu", "ConvAvgPool"]


def test_each_kind_for_itself():
    body = f"i = Conv<pads=[1,1,1,1]>(x, v)\ns = Conv<pads=[1,1,1,1]>(i, u)\n{PAIR}"
    model = graph(body, {"v": (64, 3, 3, 3), "u": (64, 64, 3, 3), "w": (32, 64, 3, 3)}, inputs=IMAGE)
    for kinds, expected in (((), []), ("image_conv", ["i"]), ("plain_conv", ["s"]), (BOTH, ["i", "s"])):
        sites = convpool.optimize(model, enable=kinds).report.sites
        assert [site.conv for site in sites] == ["h", *expected] and {site.status for site in sites} == {"rewritten"}
    assert [site.pattern for site in sites] == ["conv_pool", "stem", "plain_conv"]
    of_an_input = graph(STEM + PAIR, WIDE_SHAPES, inputs=WIDE)
    for kinds, expected in (("image_conv", ("stem", "rejected")), (BOTH, ("plain_conv", "rewritten"))):
        site = convpool.optimize(of_an_input, enable=kinds).report.sites[1]
        assert (site.pattern, site.status) == expected


def test_a_size_of_minus_one_is_an_open_one():
    model = graph(f"s = Conv(x, v)\n{PAIR}", WIDE_SHAPES, inputs=WIDE.replace("[1,", "[N,", 1))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    shape = [2] + [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim][1:]
    assert convpool.optimize(model, enable="plain_conv", input_shapes={model.graph.input[0].name: shape}).changed


@pytest.mark.parametrize(("depth", "taken"), [(0, True), (1, True), (2, False)])
def test_an_image_s_convolution_in_bodies(depth, taken):
    """A body within a body has no node of the operator."""
    body = "y = Conv<pads=[1,1,1,1]>(x, v)"
    for level in range(depth):
        name = f"a{level}"
        body = (
            f"y = If(flag) <then_branch = yes{level} () => (float[1,8,12,12] {name}) {{ {body.replace('y =', f'{name} =')} }}, "
            f"else_branch = no{level} () => (float[1,8,12,12] b{level}) {{ b{level} = Expand(zero, s) }}>"
        )
    body += f"\n{rewriting.PAIR.replace('y =', 'o =').replace('(x,', '(z,')}"
    given = {"v": (8, 3, 3, 3), "zero": np.zeros((1, 1, 1, 1), np.float32), "s": [1, 8, 12, 12]}
    inputs = f"{IMAGE}, float[1,16,12,12] z, bool flag"
    model = graph(body, given, inputs=inputs, outputs="float[a,b,c,d] y, float[e,f,g,h] o")
    sites = convpool.optimize(model, enable="image_conv", check=1).report.sites
    (found,) = [site for site in sites if site.pattern == "stem"]
    reason = None if taken else "bodies around a ConvAvgPool; got 2, expected at most 1"
    assert (found.status == "rewritten") == taken and (reason is None or found.reason.endswith(reason))


WIDE_INPUT = "float[1,64,8,8] a"
SQUARE = (64, 64, 3, 3)
CHANNELS = "channels; got {}, expected at least 64, a multiple of 8"
MANY = "multiply-adds of the batch; got {}, expected at most 2.5e+09"
PLAIN_REFUSED: dict[str, tuple] = {  # the reason, the weights' shape, and if others the inputs, the nodes, and constants
    "few input channels": (f"input {CHANNELS.format(56)}", (64, 56, 3, 3), "float[1,56,8,8] a"),
    "odd input channels": (f"input {CHANNELS.format(68)}", (64, 68, 3, 3), "float[1,68,8,8] a"),
    "few output channels": (f"output {CHANNELS.format(32)}", (32, 64, 3, 3)),
    "odd output channels": (f"output {CHANNELS.format(100)}", (100, 64, 3, 3)),
    "one element": ("kernel_shape; got [1, 1], expected more than one element", (64, 64, 1, 1)),
    "group": (GROUP.format(2), SQUARE, "float[1,128,8,8] a", "s = Conv<group=2>(x, v)\n"),
    "Pad": (PAD, SQUARE, WIDE_INPUT, "t = Sin(k)\np = Pad(x, n, t)\ns = Conv(p, v)\n", AROUND),
    "one axis": ("spatial axes; got 1, expected 2", (64, 64, 3), "float[1,64,8] a", "s = Conv(x, v)\n"),
    "many multiply-adds": (MANY.format("2.01e+10"), SQUARE, "float[68000,64,8,1] a"),
    "open batch": (MANY.format("an unknown number"), SQUARE, "float[n,64,8,8] a"),
    "open height": (MANY.format("an unknown number"), SQUARE, "float[1,64,h,8] a"),
}


@pytest.mark.parametrize("name", PLAIN_REFUSED)
def test_reason_of_a_plain_one(name):
    expected, weights, inputs, body, constants = (*PLAIN_REFUSED[name], *(WIDE_INPUT, STEM, {})[len(PLAIN_REFUSED[name]) - 2 :])
    check_reason("plain_conv", name, f"x = Neg(a)\n{body}", {"v": weights, **constants}, inputs, expected)


@pytest.mark.parametrize(("images", "taken"), [(97, True), (98, False)])
def test_small_results_of_many_multiply_adds(images, taken):
    shapes = {**WIDE_SHAPES, "v": (64, 1024, 3, 3)}  # 3.8e7 multiply-adds and 4,096 numbers in the result an image
    model = graph(STEM + PAIR, shapes, inputs=f"float[{images},1024,8,8] x")
    result = convpool.optimize(model, enable="plain_conv", check=0)
    assert made(result.model) == ["ConvAvgPool" if taken else "Conv", "ConvAvgPool"]


@pytest.mark.parametrize(("batch", "taken"), [(2, True), (2000, False)])
def test_input_shapes_say_how_large_an_open_batch_is(batch, taken):
    model = graph(RELU + PAIR, WIDE_SHAPES, inputs="float[n,64,32,32] x")  # 3.8e7 multiply-adds for an image
    options = {"check": 0, "input_shapes": {"x": (batch, 64, 32, 32)}}
    result = convpool.optimize(model, enable="plain_conv", **options)
    assert made(result.model) == (["ConvAvgPoolRelu"] if taken else ["Conv", "Relu"]) + ["ConvAvgPool"]
    assert result.model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "n"
    assert made(convpool.optimize(model, **options).model)[0] == "Conv"


PLAIN = {
    "first": (STEM, {}),
    "strides": ("s = Conv<pads=[1,1,1,1], strides=[2,2]>(x, v)\n", {}),
    "4x4": ("s = Conv(x, v)\n", {"v": (72, 64, 4, 4), "w": (32, 72, 3, 3)}),
    "behind a pooling": (POOLED, {}),
    "zero pads in front": ("p = Pad(x, n)\ns = Conv(p, v)\n", {"n": [0, 0, 1, 1, 0, 0, 1, 1]}),
    "normalised weights": ("u = Div(v, v)\ns = Conv<pads=[1,1,1,1]>(x, u)\n", {}),
}


@pytest.mark.parametrize(("body", "constants"), PLAIN.values(), ids=PLAIN)
def test_plain_convolution(body, constants):
    model = graph(body + PAIR, {**WIDE_SHAPES, **constants}, inputs=WIDE)
    result = rewrite(model, 2, "plain_conv")
    assert made(result)[-2:] == ["ConvAvgPool"] * 2 and "Conv" not in made(result)
    assert windows(next(node for node in result.graph.node if "s" in node.output))["pool_kernel_shape"] == [1, 1]
    pair, plain = convpool.optimize(model, enable="plain_conv").report.sites
    assert patterns(pair) == ("h", "conv_pool", "rewritten") and patterns(plain) == ("s", "plain_conv", "rewritten")
    assert (pair.pool, plain.pool) == ("y", "")


@pytest.mark.parametrize("activation", ["Relu", "LeakyRelu<alpha=0.2>"])
def test_an_activation_before_a_plain_convolution_goes_into_it(activation):
    before, name = f"r = {activation}(x)\n{STEM.replace('(x,', '(r,')}", activation.partition("<")[0]
    assert made(rewrite(graph(before + PAIR, WIDE_SHAPES, inputs=WIDE), 2, "plain_conv")) == [f"{name}ConvAvgPool", "ConvAvgPool"]
    shared = graph(f"{before}g = Conv(r, w)\no = {POOL}(g)\n{PAIR}", WIDE_SHAPES, inputs=WIDE, **BESIDE)
    assert sorted(operators_of(shared, 3, "plain_conv")) == ["ConvAvgPool", *[f"{name}ConvAvgPool"] * 2]


def test_a_map_per_channel_before_a_plain_convolution_stays():
    body = f"n = BatchNormalization(x, g, g, g, d)\nr = Relu(n)\n{STEM.replace('(x,', '(r,')}{PAIR}"
    given = {**WIDE_SHAPES, "g": (64,), "d": np.ones(64, np.float32)}
    model = graph(body, given, inputs=WIDE)
    result = rewrite(model, 2, "plain_conv")
    assert made(result) == ["BatchNormalization", "Relu", "ConvAvgPool", "ConvAvgPool"]
    apart = graph(body.replace("r = Relu(n)", "i = Identity(n)\nr = Relu(i)"), given, inputs=WIDE)
    assert operators_of(apart, 2, "plain_conv")[-2:] == ["ConvAvgPool", "ConvAvgPool"]
    assert operators_of(result, 0, None) == made(result)  # a later run knows it by its window
    site = convpool.optimize(model, enable="plain_conv").report.sites[1]
    got = "got other elementwise nodes in front of a convolution without a pooling"
    assert site.beside == (f"Relu 'r': prologue; {got}, expected only an activation",)
    body = body.replace(PAIR, f"q = Conv(r, w)\no = {POOL}(q)\n{PAIR}")
    shared = graph(body, {**WIDE_SHAPES, "g": (64,), "d": np.ones(64, np.float32)}, inputs=WIDE, **BESIDE)
    assert operators_of(shared, 3, "plain_conv") == ["BatchNormalization", "Relu", *["ConvAvgPool"] * 3]


@pytest.mark.parametrize("plain_first", [True, False])
@pytest.mark.parametrize(("kernel", "takes"), [(1, "plain"), (3, "later"), (5, "pair")])
def test_a_plain_convolution_and_a_pair_meet_in_an_add(kernel, takes, plain_first):
    """The one with more weights takes the residual, of as many the later one; the Div goes into the weights of both."""
    plain, pads = ["s = Conv<pads=[1,1,1,1]>(x, v)"], [kernel // 2] * 4
    pair = [f"h = Conv<pads={pads}>(z, w)", f"p = {POOL}(h)"]
    body = "\n".join([*(plain + pair if plain_first else pair + plain), "e = Add(p, s)", "d = Div(e, k)", "y = Relu(d)"])
    constants = {"v": (64, 64, 3, 3), "w": (64, 64, kernel, kernel), "k": np.float32(1.5)}
    result = rewrite(graph(body, constants, inputs=f"{WIDE}, float[1,64,16,16] z"), 2, "plain_conv")
    assert made(result) == ["ConvAvgPool", "ConvAvgPoolAddRelu"]
    first, last = result.graph.node
    assert windows(last)["pool_kernel_shape"] == ([1, 1] if takes == "plain" or takes == "later" and not plain_first else [2, 2])
    assert last.input[-1] == first.output[0]


def test_a_residual_that_no_node_of_the_operator_gives():
    body = f"{RELU}e = Conv<pads=[1,1,1,1]>(s, u)\nt = Add(e, x)\n{PAIR.replace('(s,', '(t,')}"
    model = graph(body, {**WIDE_SHAPES, "u": (64, 64, 3, 3)}, inputs=WIDE)
    assert operators_of(model, 3, "plain_conv") == ["ConvAvgPoolRelu", "ConvAvgPoolAdd", "ConvAvgPool"]


AVERAGES = {
    "an activation between": ("r = Relu(s)\no = GlobalAveragePool(r)\n", True),
    "other readers": (f"o = {POOL}(s)\n", True),
    "not exact to move": (f"q = Conv<pads=[1,1,1,1]>(x, v)\no = {POOL[:-1]}, pads=[1,1,1,1]>(q)\n", True),
    "exact, but saves nothing": ("q = Conv<pads=[1,1,1,1]>(x, v)\no = AveragePool<kernel_shape=[2,2]>(q)\n", False),
}


@pytest.mark.parametrize(("average", "taken"), AVERAGES.values(), ids=AVERAGES)
def test_an_average_behind_a_plain_convolution_leaves_it_only_where_it_could_move(average, taken):
    report = convpool.optimize(graph(STEM + average + PAIR, WIDE_SHAPES, inputs=WIDE, **BESIDE), enable="plain_conv").report
    rewritten = {site.conv for site in report.sites if site.status == "rewritten"}
    conv = "q" if "q =" in average else "s"
    assert (conv in rewritten) == taken and {"h", "s"} <= rewritten
    assert any((site.conv, site.status) == (conv, "rejected") and site.pattern != "plain_conv" for site in report.sites)


@pytest.mark.parametrize(
    ("body", "pair"),
    [
        ("h = Conv<pads=[1,1,1,1]>(a, w) b = AveragePool<kernel_shape=[2,2], strides=[2,2], ceil_mode: int = @e>(h)", True),
        ("p = AveragePool<kernel_shape=[2,2], strides=[2,2], ceil_mode: int = @e>(a) b = Conv<pads=[1,1,1,1]>(p, w)", False),
    ],
)
def test_poolings_by_an_attribute_of_the_function_beside_a_convolution_for_the_plugin(body, pair):
    functions = f"""<domain: "local", opset_import: ["": 17]> net <e> (a) => (b) {{ {body} }}"""
    model = graph("y = local.net<e = 0>(x)", inputs="float[1,64,16,16] x", functions=functions)
    value = numpy_helper.from_array(np.ones((64, 64, 3, 3), np.float32))
    model.functions[0].node.insert(0, helper.make_node("Constant", [], ["w"], value=value))
    result = convpool.optimize(model, target="tensorrt", check=1)
    sites = [site.status for site in result.report.sites if site.pool]
    assert sites == (["rewritten"] if pair else []) and result.report.verification.passed
