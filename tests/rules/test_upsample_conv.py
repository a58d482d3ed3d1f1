# SPDX-License-Identifier: Apache-2.0
"""Convolutions behind nearest upsampling as nodes of UpsampleConv, for runtimes with the plugin, and why others are none."""

import re

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

import convpool
from convpool.check.session import evaluate
from convpool.ir import schema
from convpool.ir.model import load, scopes_at
from convpool.ir.protos import attributes
from convpool.summary import count
from models import generators
from tests.support import models
from tests.support.cuda_target import for_cuda, layouts
from tests.support.fusing import operator_nodes
from tests.support.models import operators
from tests.support.resizing import UP, reason, rewrite, scales, whole

CONV = "y = Conv<pads=[1,1,1,1]>(u, w)"
SCALES = {"s": scales(2, 2)}
ONES = {"p": np.array([0.5, 1, 2, 4] * 8, np.float32), "q": np.array([1, 2, 4, 1] * 10, np.float32)}
GPU = pytest.mark.parametrize("target", ("tensorrt", "cuda"))


def graph(body: str, constants: dict | None = None, **given):
    """`models.graph` from 32 to 40 channels."""
    return models.graph(body, {"w": whole((40, 32, 3, 3)), **(constants or {})}, **{"inputs": "float[2,32,10,12] x", **given})


@GPU
@pytest.mark.parametrize("factors", [(2, 2), (1, 2), (3, 2), (4, 4)])
def test_one_node_for_every_factor(factors, target):
    model = graph(UP + CONV.replace("w)", "w, b)"), {"s": scales(*factors), "b": whole((40,))})
    result = rewrite(model, target=target, exact=True)
    (node,) = result.graph.node
    values = attributes(node)
    assert (node.op_type, values["upsample"], values["scales"]) == ("UpsampleConv", list(factors), [1.0, 1.0, *factors])
    assert {entry.domain: entry.version for entry in result.opset_import} == {"": 17, schema.DOMAIN: schema.UPSAMPLING_VERSION}


@GPU
@pytest.mark.parametrize(
    ("pads", "kernel"), [("0,0,0,0", (3, 3)), ("0,1,1,0", (3, 3)), ("2,1,2,3", (5, 5)), ("0,0,0,1", (2, 3)), ("0,0,0,1", (2, 2))]
)
def test_pads_stand_around_the_upsampled_map(pads, kernel, target):
    body = UP + f"v = Pad(u, more)\ny = Conv<pads=[{pads}]>(v, w)"
    given = {**SCALES, "w": whole((40, 32, *kernel)), "more": [0, 0, 0, 1, 0, 0, 1, 0]}
    model = graph(body, given, inputs="float[N,32,H,W] x")
    for size in (3, 4, 7):
        assert operators(rewrite(model, size=size, target=target, exact=True).graph) == {"UpsampleConv": 1}


@GPU
def test_what_stands_beside_is_fused(target):
    body = f"n = BatchNormalization(x, p, p, p, p)\nr = Relu(n)\n{UP.replace('(x,', '(r,')}h = Conv<pads=[1,1,1,1]>(u, w, b)\n"
    body += "m = BatchNormalization(h, q, q, q, q)\na = Add(m, z)\ny = LeakyRelu<alpha=0.25>(a)"
    inputs = "float[2,32,10,12] x, float[2,40,20,24] z"
    result = convpool.optimize(graph(body, {**SCALES, **ONES, "b": whole((40,))}, inputs=inputs), target=target)
    assert result.report.verification.passed
    (node,) = operator_nodes(result.model)
    assert (node.op_type, list(operators(result.model.graph))) == ("AffineReluUpsampleConvAddLeakyRelu", [node.op_type])
    (site,) = result.report.sites
    assert (site.rule, site.lowering, site.operator) == ("upsample_last", "upsampleconv", node.op_type)
    products = 2 * 40 * 32
    assert (site.macs_before, site.macs_after) == (products // 2 * 20 * 24 * 9, products // 2 * 10 * 12 * 16)
    summary = result.report.summary
    assert (summary.model_macs_before, summary.model_macs_after) == (site.macs_before, site.macs_after)


SKIP = "float[2,32,10,12] x, float[2,16,20,24] z"
JOIN = UP + "j = Concat<axis=1>({})\nr = Relu(j)\ny = Conv<pads=[1,1,1,1]>(r, w, b)"


@pytest.mark.parametrize("operands", ["u, z", "z, u"])
def test_a_skip_connection_is_convolved_apart_and_added(operands):
    model = graph(JOIN.format(operands), {**SCALES, "w": whole((32, 48, 3, 3)), "b": whole((32,))}, inputs=SKIP)
    assert operators(rewrite(model, target="tensorrt", exact=True).graph) == {"ReluUpsampleConvAdd": 1, "Relu": 1, "Conv": 1}
    result = convpool.optimize(model, target="cuda")
    assert operators(result.model.graph) == {"ReluUpsampleConvAdd": 1, "ReluConvAvgPool": 1} and result.report.verification.passed
    site = result.report.sites[0]
    assert (site.operator, site.macs_after) == ("ReluUpsampleConvAdd", 32 * (32 * 10 * 12 * 16 + 16 * 20 * 24 * 9))


def test_a_pad_in_front_of_a_skip_connection_stays_in_front_of_a_conv():
    """onnxruntime would merge it into the AveragePool of the function."""
    body = "z = Pad(q, more)\n" + JOIN.format("u, z").replace("Relu(j)", "Neg(j)")
    inputs = "float[2,32,10,12] x, float[2,16,18,22] q"
    given = {**SCALES, "w": whole((32, 48, 3, 3)), "b": whole((32,)), "more": [0, 0, 1, 1, 0, 0, 1, 1]}
    made = rewrite(graph(body, given, inputs=inputs), target="cuda", exact=True)
    assert operators(made.graph)["Pad"] == 1 and "UpsampleConvAdd" in "".join(operators(made.graph))


def test_shortcuts_of_generators_are_resized_once():
    """A sum that another node reads too is not split again by the next shortcut."""
    model = generators.generate("sngan_generator", batch=2)
    result = convpool.optimize(model, target="cuda", disable="chain_upsample")
    found = operators(result.model.graph)
    assert found["Resize"] == 4 and found["ConvAvgPoolAdd"] == 4 and "Add" not in found and result.report.verification.passed
    result = convpool.optimize(model, target="cuda")
    found = operators(result.model.graph)
    assert found["UpsampleConv"] == 4 and "Resize" not in found and result.report.verification.passed
    assert {schema.layout_of(node) for node in result.model.graph.node if node.op_type == "UpsampleConv"} == {1}


SHORTCUT = f"{UP}h = Conv<pads=[1,1,1,1]>(u, w)\nk = Conv<pads=[1,1,1,1]>(h, w2)\n"
SHORTCUT += UP.replace("u =", "v =") + "c = Conv(v, w1, b1)\n"
SUM = "a = Add(k, c)\nn = BatchNormalization(a, p, p, p, p)\ny = Relu(n)"
GIVEN = {**SCALES, **ONES, "w": whole((32, 32, 3, 3)), "w2": whole((32, 32, 3, 3))}
GIVEN |= {"w1": whole((32, 32, 1, 1)), "b1": whole((32,))}


def test_a_shortcut_fuses_the_sum_and_what_is_behind_in_tensorrt():
    result = convpool.optimize(graph(SHORTCUT + SUM, GIVEN), target="tensorrt")
    made, (_, site) = operators(result.model.graph), result.report.sites[:2]
    assert made == {"UpsampleConv": 1, "Conv": 1, "UpsampleConvAddRelu": 1} and result.report.verification.passed
    assert (site.conv, site.lowering, site.operator) == ("c", "upsampleconv", "UpsampleConvAddRelu")
    assert site.macs_after == site.macs_before == 2 * 32 * 32 * 20 * 24 // 2
    of_any_size = graph(SHORTCUT + "y = Add(k, c)", GIVEN, inputs="float[N,32,H,W] x")
    exact = rewrite(of_any_size, 2, target="tensorrt", exact=True, disable="plain_conv")
    assert operators(exact.graph) == {"UpsampleConv": 1, "Conv": 1, "UpsampleConvAdd": 1}


@pytest.mark.parametrize(
    "body",
    [
        SHORTCUT + "m = Mul(k, c)\ny = Relu(m)",  # no Add
        SHORTCUT + "a = Add(k, c)\nt = Tanh(c)\ny = Mul(a, t)",  # another reader
        SHORTCUT + "g = GlobalAveragePool(k)\ny = Add(g, c)",  # an Add that broadcasts
        SHORTCUT + "a = Add(c, z)\ny = Add(k, a)",  # an Add of a constant
    ],
)
def test_other_shortcuts_are_resized_in_tensorrt(body):
    made = convpool.optimize(graph(body, {**GIVEN, "z": whole((2, 32, 20, 24))}), target="tensorrt", check=0).model
    assert operators(made.graph)["Resize"] == 1 and operators(made.graph)["UpsampleConv"] == 1


@pytest.mark.parametrize(("channels", "resized"), [(40, 0), (44, 1)])
def test_a_shortcut_of_channels_without_a_fast_kernel_is_resized_in_tensorrt(channels, resized):
    body = SHORTCUT.replace("(x, , s)\nc", "(z, , s)\nc") + "y = Add(k, c)"
    inputs = f"float[2,32,10,12] x, float[2,{channels},10,12] z"
    model = graph(body, {**GIVEN, "w1": whole((32, channels, 1, 1))}, inputs=inputs)
    assert operators(convpool.optimize(model, target="tensorrt", check=0).model.graph).get("Resize", 0) == resized


@GPU
def test_a_silu_in_front_is_fused(target):
    body = "t = Sigmoid(x)\nr = Mul(x, t)\n" + UP.replace("(x,", "(r,") + CONV
    assert operators(rewrite(graph(body, SCALES), target=target).graph) == {"SiluUpsampleConv": 1}


@GPU
@pytest.mark.parametrize("lowering", ("direct", "fused", "auto"))
def test_other_lowerings_have_standard_operators(lowering, target):
    model = graph(UP + CONV, {**SCALES, "w": whole((64, 64, 3, 3))}, inputs="float[1,64,64,64] x")
    result = convpool.optimize(model, target=target, lowering=lowering)
    assert operators(result.model.graph) == {"ConvTranspose": 1} and result.report.verification.passed


OTHER_MAP = "float[2,32,10,12] x, float[2,32,20,24] z"
REFUSED = {  # constants, the reason, and where they are others the nodes and the inputs
    "factors": ({"s": scales(5, 2)}, "upsampled map; got factors [5, 2], 32 to 40 channels, expected factors up to 4"),
    "no number": ({"s": scales(np.nan, 2)}, "scales; got [1.0, 1.0, nan, 2.0], expected finite numbers"),
    "infinity": ({"s": scales(2, np.inf)}, "scales; got [1.0, 1.0, 2.0, inf], expected finite numbers"),
    "few channels": ({"w": (24, 32, 3, 3)}, "got factors [2, 2], 32 to 24 channels"),
    "odd channels": ({"w": (36, 32, 3, 3)}, "at least 32 channels in multiples of 8, for this target"),
    "groups": ({"w": (64, 16, 3, 3)}, "group of a ConvAvgPool; got 2, expected 1, for which the plugin has kernels",
        UP + CONV.replace("<", "<group=2, ")),
    "double": ({"w": np.ones((40, 32, 3, 3))}, "type; got DOUBLE, expected float16, bfloat16 or float32",
        UP + CONV, "double[2,32,10,12] x"),
    "one axis": ({"s": scales(2), "w": (40, 32, 3)}, "spatial axes; got 1, expected 2, for this target",
        UP + "y = Conv<pads=[1,1]>(u, w)", "float[2,32,10] x"),
    "dilations": ({}, "window; got dilations [1, 2], pads [1, 2, 1, 2], expected dilations of 1",
        UP + "y = Conv<pads=[1,2,1,2], dilations=[1,2]>(u, w)"),
    "a crop": ({"e": [0, 0, 1, 1] * 2}, "got dilations [1, 1], pads [-1, -1, -1, -1], expected dilations of 1 and no crop",
        UP + 'v = Pad<mode="edge">(u, e)\ny = Conv(v, w)'),
    "a wider result": ({"w": (40, 48, 3, 3), "b": (40,)},
        "upsampled maps; got 1 of 2, 32 to 40 channels, expected one, as wide as the result where another map",
        JOIN.format("u, z"), SKIP),
    "a sum": ({"w": (32, 32, 3, 3)}, "upsampled maps; got 1 of 2",
        f"{UP}a = Add(u, z)\ny = Conv<pads=[1,1,1,1]>(a, w)", OTHER_MAP),
    "a pointwise sum": ({"w": (32, 32, 1, 1)}, "sum of maps; got one of them not resampled",
        f"{UP}a = Add(u, z)\ny = Conv(a, w)", OTHER_MAP),
}  # fmt: skip


@GPU
@pytest.mark.parametrize("name", REFUSED)
def test_why_a_convolution_is_none(name, target):
    constants, expected, *more = REFUSED[name]
    body, inputs = (*more, *(UP + CONV, "float[2,32,10,12] x")[len(more) :])
    outputs = f"{inputs.split('[')[0]}[a,b,c,d] y"
    assert expected in reason(graph(body, {**SCALES, **constants}, inputs=inputs, outputs=outputs), target=target)


@GPU
def test_models_of_old_opsets_have_a_transposed_convolution(target):
    up = UP.replace(", ,", ", roi,")
    given = {**SCALES, "roi": np.zeros(0, np.float32), "w": whole((64, 64, 3, 3))}
    model = graph(up + CONV, given, inputs="float[1,64,64,64] x", opset=12)
    assert operators(rewrite(model, target=target).graph) == {"ConvTranspose": 1}
    narrow = graph(up + CONV, {**SCALES, "roi": given["roi"]}, opset=12)
    assert "opset; got 12, expected at least 13, for this target" in reason(narrow, target=target)


def test_a_map_behind_is_not_folded_where_sums_of_weights_would_be_beyond_the_type():
    """65504 is the most of float16, and a kernel adds up to four weights."""
    for largest, folded in ((4000, True), (5000, False)):
        weights = np.full((40, 32, 3, 3), largest / 2**12, np.float16)
        body = UP + "h = Conv<pads=[1,1,1,1]>(u, w)\nh2 = Add(h, z)\ny = Mul(h2, k)"
        given = {**SCALES, "w": weights, "k": np.full((40, 1, 1), 2**14, np.float16)}
        kinds = {"inputs": "float16[2,32,10,12] x, float16[2,40,20,24] z", "outputs": "float16[a,b,c,d] y"}
        result = convpool.optimize(models.graph(body, given, **kinds), target="cuda", check=0)
        assert [node.op_type for node in operator_nodes(result.model)] == ["UpsampleConvAdd"]
        plain = body.replace("h2 = Add(h, z)\n", "").replace("h2", "h")
        kinds["inputs"] = "float16[2,32,10,12] x"
        result = convpool.optimize(models.graph(plain, given, **kinds), target="cuda", check=0)
        assert ("Mul" not in operators(result.model.graph)) == folded, largest


CHAIN = f"a = Conv<pads=[1,1,1,1]>(x, v)\nr = Relu(a)\n{UP.replace('(x,', '(r,')}h = Conv<pads=[1,1,1,1]>(u, v)\n"
CHAIN += "t = Relu(h)\ny = Conv<pads=[1,1,1,1]>(t, v)"


def test_convolutions_around_it_keep_the_channels_last():
    model = models.graph(CHAIN, {**SCALES, "v": models.weights((64, 64, 3, 3)) / 24}, inputs="float[4,64,64,64] x")
    result = for_cuda(model, size=64)
    nodes = operator_nodes(result.model)
    assert [node.op_type for node in nodes] == ["ConvAvgPoolRelu", "UpsampleConvRelu", "ConvAvgPool"]
    assert layouts(result.model)[1] == 1
    assert schema.permutes(next(item for item in result.model.functions if item.name == "UpsampleConvRelu"))
    assert convpool.optimize(result.model, target="cpu", lowering="direct", check=1).report.verification.passed


def test_an_earlier_run_s_nodes_become_a_resize_again():
    made = rewrite(graph(UP + CONV, SCALES), target="cuda")
    assert not convpool.optimize(made, target="cuda", check=0).report.sites  # nor is its function looked into
    back = convpool.optimize(made, target="cpu", lowering="direct", disable="upsample_last")
    assert operators(back.model.graph) == {"Resize": 1, "Conv": 1} and back.report.verification.passed
    (site,) = back.report.sites
    assert site.macs_before == site.macs_after == 40 * 32 * 20 * 24 * 9
    again = convpool.optimize(made, target="cpu", upsampling="direct").model
    assert operators(again.graph) == {"ConvTranspose": 1, "AveragePool": 1}


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_half_precisions(kind):
    numbers = whole((40, 32, 3, 3)).astype(onnx.helper.tensor_dtype_to_np_dtype(getattr(TensorProto, kind.upper())))
    model = graph(UP + CONV, {**SCALES, "w": numbers}, inputs=f"{kind}[2,32,10,12] x", outputs=f"{kind}[a,b,c,d] y")
    result = convpool.optimize(model, target="tensorrt", check=int(kind == "float16"))
    (node,) = operator_nodes(result.model)
    (weights,) = [item for item in result.model.graph.initializer if item.name == node.input[1]]
    np.testing.assert_array_equal(np.moveaxis(numpy_helper.to_array(weights), -1, 1), numbers)


def test_multiply_adds_are_those_of_the_kernels():
    """Count the taps of an output that meet one row of X once."""
    made = rewrite(graph(UP + "y = Conv<pads=[2,0,0,1]>(u, w)", {"s": scales(3, 2)}, inputs="float[N,32,H,W] x"), target="cuda")
    found = count(scopes_at(load(made), {"x": [2, 32, 5, 6]}, evaluate))
    rows = sum(len({(o - 2 + a) // 3 for a in range(3)}) for o in range(15))
    assert found.nodes[0].macs == 2 * 40 * 32 * rows * sum(len({(o + a) // 2 for a in range(3)}) for o in range(11))


@pytest.mark.parametrize("target", ("any", "cpu", "tensorrt", "cuda"))
@pytest.mark.parametrize("name", ("UpsampleConv", "ConvAvgPool", "UpsampleConvRelu"))
def test_another_s_function_of_the_operator_s_name_is_any_function(name, target):
    """A module of PyTorch's that is exported as a function has the name of its class."""

    def reported(called):
        constants = "s = Constant<value_floats=[1., 1., 2., 2.]>()\n"
        function = f'<domain: "mod", opset_import: ["": 17]>\n{called} (x, w) => (y) {{\n{constants}{UP}{CONV}\n}}'
        model = graph(f"y = mod.{called}(x, w)", functions=function, imports=', "mod": 1')
        report = convpool.optimize(model, target=target).report
        return [site.reason for site in report.sites], report.summary.model_macs_before, report.summary.resizes

    assert reported(name) == reported("Block") and reported(name)[2] == 1


@pytest.mark.parametrize(
    ("upsample", "opset", "said"),
    [
        ([0, 2], 17, "upsample; got [0, 2], expected 2 factors from 1 to 4"),
        ([5, 2], 17, "upsample; got [5, 2], expected 2 factors from 1 to 4"),
        ([2], 17, "upsample; got [2], expected 2 factors from 1 to 4"),
        ([2, 2], 12, "the model's opset; got 12, expected at least 13"),
    ],
)
def test_nodes_that_no_kernel_runs_are_refused(upsample, opset, said):
    model = rewrite(graph(UP + CONV, SCALES), target="cuda", exact=True)
    (node,) = model.graph.node
    next(item for item in node.attribute if item.name == "upsample").ints[:] = upsample
    next(item for item in node.attribute if item.name == "scales").floats[:] = [1, 1, *upsample]
    model.opset_import[0].version = opset
    del model.functions[:]
    for lowering in ("direct", "convavgpool"):
        with pytest.raises(convpool.ConvpoolError, match=re.escape(said)):
            convpool.optimize(model, lowering=lowering, check=0)
