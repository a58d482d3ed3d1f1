# SPDX-License-Identifier: Apache-2.0
"""Plain convolutions, of many channels, as nodes of the operator: `plain_conv`."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import convpool
from convpool.cli.group import run
from convpool.cli.optimize import command
from tests.support.models import graph
from tests.support.offloaded import BESIDE, PAIR, POOLED, RELU, STEM, WIDE, WIDE_SHAPES, check_reason, made, windows
from tests.support.rewriting import POOL, rewrite

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
    "group": (
        "group of a ConvAvgPool; got 2, expected 1, for which the plugin has kernels",
        SQUARE,
        "float[1,128,8,8] a",
        "s = Conv<group=2>(x, v)\n",
    ),
    "computed weights": (
        "weights; got computed, or an input that a caller may override, expected a constant",
        None,
        f"{WIDE_INPUT}, float[64,64,3,3] v",
    ),
    "Pad": (
        "Pad 'p' in front; got pads that the convolution cannot take, expected none",
        SQUARE,
        WIDE_INPUT,
        "t = Sin(k)\np = Pad(x, n, t)\ns = Conv(p, v)\n",
        {"n": [0, 0, 1, 1, 0, 0, 1, 1], "k": np.zeros((), np.float32)},
    ),
    "one axis": ("spatial axes; got 1, expected 2", (64, 64, 3), "float[1,64,8] a", "s = Conv(x, v)\n"),
    "many multiply-adds": (MANY.format("2.01e+10"), SQUARE, "float[68000,64,8,1] a"),
    "open batch": (MANY.format("an unknown number"), SQUARE, "float[n,64,8,8] a"),
    "open height": (MANY.format("an unknown number"), SQUARE, "float[1,64,h,8] a"),
}


@pytest.mark.parametrize("name", PLAIN_REFUSED)
def test_reason_of_a_plain_one(name):
    expected, weights, inputs, body, constants = (*PLAIN_REFUSED[name], *(WIDE_INPUT, STEM, {})[len(PLAIN_REFUSED[name]) - 2 :])
    check_reason("plain_conv", name, f"x = Neg(a)\n{body}", {"v": weights, **constants}, inputs, f"Conv 's': {expected}")


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
    result = rewrite(model, 2, "convavgpool", enable="plain_conv")
    assert made(result)[-2:] == ["ConvAvgPool"] * 2 and "Conv" not in made(result)
    assert windows(next(node for node in result.graph.node if "s" in node.output))["pool_kernel_shape"] == [1, 1]
    report = convpool.optimize(model, enable="plain_conv").report
    assert [(site.conv, site.pool, site.pattern, site.status) for site in report.sites] == [
        ("h", "y", "conv_pool", "rewritten"),
        ("s", "", "plain_conv", "rewritten"),
    ]


def test_an_activation_behind_a_plain_convolution_stays_with_it():
    model = graph(RELU + PAIR, WIDE_SHAPES, inputs=WIDE)
    assert made(rewrite(model, 2, "convavgpool", enable="plain_conv")) == ["ConvAvgPoolRelu", "ConvAvgPool"]
    assert made(rewrite(model, 2, "convavgpool", enable="plain_conv", disable="fuse_epilogue")) == [
        "ConvAvgPool",
        "ReluConvAvgPool",
    ]
    assert made(rewrite(model, 1, "convavgpool")) == ["Conv", "Relu", "ConvAvgPool"]


@pytest.mark.parametrize("activation", ["Relu", "LeakyRelu<alpha=0.2>"])
def test_an_activation_before_a_plain_convolution_goes_into_it(activation):
    before = f"r = {activation}(x)\n{STEM.replace('(x,', '(r,')}"
    name = activation.partition("<")[0]
    result = rewrite(graph(before + PAIR, WIDE_SHAPES, inputs=WIDE), 2, "convavgpool", enable="plain_conv")
    assert made(result) == [f"{name}ConvAvgPool", "ConvAvgPool"]
    shared = graph(f"{before}g = Conv(r, w)\no = {POOL}(g)\n{PAIR}", WIDE_SHAPES, inputs=WIDE, **BESIDE)
    assert sorted(made(rewrite(shared, 3, "convavgpool", enable="plain_conv"))) == ["ConvAvgPool", *[f"{name}ConvAvgPool"] * 2]


def test_a_map_per_channel_before_a_plain_convolution_stays():
    body = f"n = BatchNormalization(x, g, g, g, d)\nr = Relu(n)\n{STEM.replace('(x,', '(r,')}{PAIR}"
    given = {**WIDE_SHAPES, "g": (64,), "d": np.ones(64, np.float32)}
    model = graph(body, given, inputs=WIDE)
    result = rewrite(model, 2, "convavgpool", enable="plain_conv")
    assert made(result) == ["BatchNormalization", "Relu", "ConvAvgPool", "ConvAvgPool"]
    apart = graph(body.replace("r = Relu(n)", "i = Identity(n)\nr = Relu(i)"), given, inputs=WIDE)
    assert made(rewrite(apart, 2, "convavgpool", enable="plain_conv"))[-2:] == ["ConvAvgPool", "ConvAvgPool"]
    assert made(rewrite(result, 0, "convavgpool")) == made(result)  # a later run knows it by its window
    site = convpool.optimize(model, enable="plain_conv").report.sites[1]
    assert site.beside == (
        "Relu 'r': prologue; got other elementwise nodes in front of a convolution without a pooling, "
        "expected only an activation",
    )
    body = body.replace(PAIR, f"q = Conv(r, w)\no = {POOL}(q)\n{PAIR}")
    shared = graph(body, {**WIDE_SHAPES, "g": (64,), "d": np.ones(64, np.float32)}, inputs=WIDE, **BESIDE)
    assert made(rewrite(shared, 3, "convavgpool", enable="plain_conv")) == ["BatchNormalization", "Relu", *["ConvAvgPool"] * 3]


@pytest.mark.parametrize("plain_first", [True, False])
@pytest.mark.parametrize(("kernel", "takes"), [(1, "plain"), (3, "later"), (5, "pair")])
def test_a_plain_convolution_and_a_pair_meet_in_an_add(kernel, takes, plain_first):
    """The one with more weights takes the residual, of as many the later one; the Div goes into the weights of both."""
    plain, pads = ["s = Conv<pads=[1,1,1,1]>(x, v)"], [kernel // 2] * 4
    pair = [f"h = Conv<pads={pads}>(z, w)", f"p = {POOL}(h)"]
    body = "\n".join([*(plain + pair if plain_first else pair + plain), "e = Add(p, s)", "d = Div(e, k)", "y = Relu(d)"])
    constants = {"v": (64, 64, 3, 3), "w": (64, 64, kernel, kernel), "k": np.float32(1.5)}
    result = rewrite(graph(body, constants, inputs=f"{WIDE}, float[1,64,16,16] z"), 2, "convavgpool", enable="plain_conv")
    assert made(result) == ["ConvAvgPool", "ConvAvgPoolAddRelu"]
    first, last = result.graph.node
    assert windows(last)["pool_kernel_shape"] == ([1, 1] if takes == "plain" or takes == "later" and not plain_first else [2, 2])
    assert last.input[-1] == first.output[0]


def test_a_residual_that_no_node_of_the_operator_gives():
    body = f"{RELU}e = Conv<pads=[1,1,1,1]>(s, u)\nt = Add(e, x)\n{PAIR.replace('(s,', '(t,')}"
    model = graph(body, {**WIDE_SHAPES, "u": (64, 64, 3, 3)}, inputs=WIDE)
    assert made(rewrite(model, 3, "convavgpool", enable="plain_conv")) == ["ConvAvgPoolRelu", "ConvAvgPoolAdd", "ConvAvgPool"]


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


def test_a_plain_convolution_excluded():
    result = convpool.optimize(graph(RELU + PAIR, WIDE_SHAPES, inputs=WIDE), enable="plain_conv", exclude="c")
    assert [(site.conv, site.pattern, site.status) for site in result.report.sites] == [
        ("h", "conv_pool", "rewritten"),
        ("c", "plain_conv", "excluded"),
    ]
    assert made(result.model) == ["Conv", "Relu", "ConvAvgPool"]


def test_command_line_of_plain_convolutions(tmp_path, capsys):
    onnx.save(graph(RELU + PAIR, WIDE_SHAPES, inputs=WIDE), tmp_path / "in.onnx")
    assert run(command, "convpool-optimize", [str(tmp_path / "in.onnx"), "--plain-conv"]) == 0
    assert made(onnx.load(tmp_path / "in.convpool.onnx")) == ["ConvAvgPoolRelu", "ConvAvgPool"]
    assert "  -  ConvAvgPoolRelu with Relu  " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "pair"),
    [
        ("h = Conv<pads=[1,1,1,1]>(a, w) b = AveragePool<kernel_shape=[2,2], strides=[2,2], ceil_mode: int = @e>(h)", True),
        ("p = AveragePool<kernel_shape=[2,2], strides=[2,2], ceil_mode: int = @e>(a) b = Conv<pads=[1,1,1,1]>(p, w)", False),
    ],
)
def test_poolings_by_an_attribute_of_the_function_beside_a_convolution_for_the_plugin(body, pair):
    functions = f"""<domain: "local", opset_import: ["": 17]> net <e> (a) => (b) {{ {body} }}"""
    model = graph("y = local.net<e = 0>(x)", inputs="float[1,64,16,16] x", functions=functions, imports=', "local": 1')
    value = numpy_helper.from_array(np.ones((64, 64, 3, 3), np.float32))
    model.functions[0].node.insert(0, helper.make_node("Constant", [], ["w"], value=value))
    result = convpool.optimize(model, target="tensorrt", check=1)
    sites = [site.status for site in result.report.sites if site.pool]
    assert sites == (["rewritten"] if pair else []) and result.report.verification.passed
