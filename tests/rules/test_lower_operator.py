# SPDX-License-Identifier: Apache-2.0
"""Nodes of the operator back to standard operators, where a file that has them is optimized with another lowering."""

import numpy as np
import onnx
import pytest
from onnx import helper

import convpool
from convpool.algebra import parts as layouts
from convpool.algebra.geometry import ConvSpec, PoolSpec, pool_first, pool_last
from convpool.ir import schema
from models import generators
from tests.support.models import graph, model_of, operators, weights
from tests.support.rewriting import IF_BODY, IF_INPUTS, PAIR, POOL, assert_close, assert_stable, verified

SMALL = weights((32, 16, 3, 3)) / 12  # sums of about 1, so that Tanh does not saturate
NORM = {"g": (16,), "b": (16,), "m": (16,), "v": np.linspace(0.5, 2, 16, dtype=np.float32)}
BODIES = {
    "a pair": PAIR,
    "prologue": f"p = LeakyRelu<alpha=0.25>(x)\n{PAIR.replace('(x,', '(p,')}",
    "affine prologue": f"n = BatchNormalization(x, g, b, m, v)\np = Relu(n)\n{PAIR.replace('(x,', '(p,')}",
    "epilogue": f"{PAIR.replace('y =', 'q =')}\ns = Add(q, r)\ny = LeakyRelu<alpha=0.5>(s)",
    "tanh": f"{PAIR.replace('y =', 'q =')}\ny = Tanh(q)".replace("w)", "small)"),
    "silu": f"g0 = Sigmoid(x)\np = Mul(x, g0)\n{PAIR.replace('(x,', '(p,').replace('y =', 'q =')}\ns = Sigmoid(q)\ny = Mul(s, q)",
    "by image": f"t = Mul(f, x)\np = Add(t, s)\n{PAIR.replace('(x,', '(p,')}",
}
KINDS = {
    "a pair": ("ConvAvgPool", {}),
    "prologue": ("LeakyReluConvAvgPool", {"LeakyRelu": 1}),
    "affine prologue": ("AffineReluConvAvgPool", {"BatchNormalization": 1, "Relu": 1}),
    "epilogue": ("ConvAvgPoolAddLeakyRelu", {"Add": 1, "LeakyRelu": 1}),
    "tanh": ("ConvAvgPoolTanh", {"Tanh": 1}),
    "silu": ("SiluConvAvgPoolSilu", {"Mul": 2, "Sigmoid": 2}),
    "by image": ("ModulatedConvAvgPool", {"Add": 1, "Mul": 1}),
}


def original(name: str) -> onnx.ModelProto:
    more = {"epilogue": ", float[1,32,6,6] r", "by image": ", float[1,16,1,1] f, float[1,16,1,1] s"}.get(name, "")
    return graph(BODIES[name], {**NORM, "small": SMALL}, inputs=f"float[1,16,12,12] x{more}")


@pytest.mark.parametrize("lowering", ["direct", "fused", "auto"])
@pytest.mark.parametrize("name", BODIES)
def test_standard_operators_alone_are_left(name, lowering):
    model, (kind, beside) = original(name), KINDS[name]
    written = convpool.optimize(model, check=0).model
    assert kind in operators(written.graph)
    result = convpool.optimize(written, lowering=lowering)
    pair = {"AveragePool": 1, "Conv": 1} if result.report.sites[0].lowering == "direct" else {"Conv": 1}
    assert operators(result.model.graph) == dict(sorted({**pair, **beside}.items()))
    assert lowering == "auto" or result.report.sites[0].lowering == lowering
    assert not result.model.functions and [entry.domain for entry in result.model.opset_import] == [""]
    onnx.checker.check_model(result.model, full_check=True)
    assert_close(model, result.model)
    assert_stable(result.model, lowering=lowering)


def test_pads_that_some_onnxruntime_miscounts():
    """They are in nodes for a GPU alone, from opset 19 on, which auto makes one Conv."""
    model = graph(f"h = Conv<pads=[1,0,1,0]>(x, w)\ny = {POOL}(h)", {"w": (64, 64, 3, 1)}, inputs="float[1,64,12,12] x", opset=19)
    for target, op_type in (("tensorrt", "ConvAvgPool"), ("cuda", "ConvAvgPool"), ("any", "Conv")):
        result = convpool.optimize(model, target=target).model
        assert operators(result.graph) == {op_type: 1}
        assert operators(convpool.optimize(result, lowering="auto").model.graph) == {"Conv": 1}


@pytest.mark.parametrize("name", ["lenet5", "sngan64_small"])
@pytest.mark.parametrize("lowering", ["direct", "auto"])
def test_networks_come_to_what_the_lowering_gives_at_once(name, lowering):
    model = generators.generate(name)
    over = convpool.optimize(convpool.optimize(model, check=0).model, lowering=lowering)
    once = convpool.optimize(model, lowering=lowering, check=0)
    folded = {"Mul", "Add"} if name == "lenet5" else set()  # LeNet's scale and bias are in the operator's weights already
    counts = [{op: n for op, n in operators(found.model.graph).items() if op not in folded} for found in (over, once)]
    assert counts[0] == counts[1] and over.report.verification.passed
    assert convpool.verify(model, over.model).passed


def test_in_bodies_and_functions():
    functions = f"""<opset_import: ["": 17], domain: "local">
    twice (a, w) => (b) {{ c = Conv<pads=[1,1,1,1]>(a, w)\n b = {POOL}(c) }}"""
    for model in (graph(IF_BODY, {"v": (32, 16, 3, 3)}, inputs=IF_INPUTS), graph("y = local.twice(x, w)", functions=functions)):
        written = convpool.optimize(model, check=0).model
        assert schema.used_in(written)
        result = convpool.optimize(written, lowering="direct")
        assert not schema.used_in(result.model) and schema.DOMAIN not in {f.domain for f in result.model.functions}
        onnx.checker.check_model(result.model, full_check=True)
        assert_close(model, result.model)


@pytest.mark.parametrize("lowering", ["direct", "fused"])
@pytest.mark.parametrize("channels_last", [1, 2, 3])
def test_nodes_with_channels_last_get_transposes(channels_last, lowering):
    """Lower a node that does everything; the model around it reads and gives channels first."""
    text = "n = Add(x, c)\ns = Relu(n)\nu = Conv<pads=[1,1,1,1]>(s, w)\np = AveragePool<kernel_shape=[2,2], strides=[2,2]>(u)\n"
    constants = {"w": (32, 16, 3, 3), "c": (16, 1, 1)}
    model = graph(text + "q = Add(p, r)\ny = LeakyRelu(q)", constants, inputs="float[1,16,12,12] x, float[1,32,6,6] r")
    written = convpool.optimize(model, check=0)
    node = next(filter(schema.is_operator, written.model.graph.node))
    assert node.op_type == "AffineReluConvAvgPoolAddLeakyRelu"
    x_last, y_last = layouts.LAYOUTS[channels_last]
    perm, y = layouts.to_channels_last(2), node.output[0]
    nodes = []
    for last, index in ((x_last, 0), (y_last, 5)):
        if last:
            nodes.append(helper.make_node("Transpose", [node.input[index]], [f"last{index}"], perm=perm))
            node.input[index] = f"last{index}"
    nodes.append(node)
    if y_last:
        node.output[0] = "last"
        nodes.append(helper.make_node("Transpose", ["last"], [y], perm=layouts.to_channels_first(2)))
    schema.give_layout(node, channels_last)
    nodes = [onnx.NodeProto.FromString(item.SerializeToString()) for item in nodes]
    del written.model.graph.node[:], written.model.functions[:], written.model.graph.value_info[:]
    written.model.graph.node.extend(nodes)
    permuting = schema.complete_layouts(list(filter(schema.is_operator, written.model.graph.node)))
    written.model.functions.extend(schema.functions_for({node.op_type}, 17, permuting))
    assert_close(model, written.model)
    result = convpool.optimize(written.model, lowering=lowering)
    assert not schema.used_in(result.model) and operators(result.model.graph)["Transpose"] == 2 * (x_last + 2 * y_last)
    assert result.report.sites[0].macs_after == convpool.optimize(model, lowering=lowering, check=0).report.sites[0].macs_after
    assert_close(model, result.model)


def test_what_is_excluded_or_disabled_stays():
    two = graph(f"{PAIR.replace('y =', 'p =')}\nq = Tanh(p)\ny = Conv(q, k)", {"k": (4, 32, 1, 1)})
    written = convpool.optimize(two, check=0).model
    name = next(node.output[0] for node in written.graph.node if schema.is_operator(node))
    for options in ({"exclude": name}, {"disable": ["lower_operator"]}):
        result = convpool.optimize(written, lowering="direct", check=0, **options)
        assert not result.changed and len(result.report.sites) == ("exclude" in options)
    assert not convpool.optimize(written, check=0).changed  # the default lowering is the operator


def test_computed_weights_are_transposed_and_not_fused():
    model = graph("k = Relu(v)\n" + PAIR.replace("w)", "k)"), inputs="float[1,16,12,12] x, float[32,16,3,3] v")
    result = convpool.optimize(convpool.optimize(model, check=0).model, lowering="fused")
    assert operators(result.model.graph)["AveragePool"] == 1
    assert result.report.sites[0].fallback.startswith("weights; got computed")
    assert_close(model, result.model)


def test_fused_half_weights_that_the_type_cannot_hold_are_not_written():
    small = np.full((32, 16, 3, 3), 2.0**-24, np.float16)
    model = graph(PAIR, {"w": small}, inputs="float16[1,16,12,12] x", outputs="float16[a,b,c,d] y")
    site = convpool.optimize(convpool.optimize(model, check=0).model, lowering="fused", check=0).report.sites[0]
    assert site.lowering == "direct" and site.fallback.startswith("fused weights")


def test_pool_last_is_the_inverse_of_pool_first():
    for conv, pool in (
        (ConvSpec((3, 3), (1, 1), (1,) * 4, (1, 1)), PoolSpec((2, 2), (2, 2), (0,) * 4, (1, 1))),
        (ConvSpec((5, 3), (1, 1), (2, 1, 2, 1), (1, 2)), PoolSpec((2, 3), (2, 1), (0,) * 4, (1, 1))),
        (ConvSpec((3,), (1,), (4, 4), (2,)), PoolSpec((3,), (3,), (0, 0), (1,))),
    ):
        assert pool_last(*pool_first(conv, pool)) == (conv, pool)
    strided = pool_last(*pool_first(ConvSpec((1,), (1,), (0, 0), (1,)), PoolSpec((2,), (2,), (0, 0), (1,))))
    assert strided == (ConvSpec((1,), (1,), (0, 0), (1,)), PoolSpec((2,), (2,), (0, 0), (1,)))


def test_any_operator_node_fused_or_not_computes_the_same():
    """Seeded windows, strides, pads and dilations: also those that no pair gives, where one Conv must be refused."""
    rng, forms = np.random.default_rng(0), []
    for number in range(60):
        k, p = (tuple(int(n) for n in rng.integers(1, 4, 2)) for _ in range(2))
        strides, pool_strides, dilations = (tuple(int(n) for n in rng.integers(1, 3, 2)) for _ in range(3))
        pool = PoolSpec(p, pool_strides, tuple(int(rng.integers(0, n)) for n in p * 2), (1, 1))
        conv = ConvSpec(k, strides, tuple(int(n) for n in rng.integers(0, 3, 4)), dilations)
        node = schema.make_node(["x", "w", "b"], "y", pool, conv)
        constants = {"w": weights((8, *k, 4), number), "b": weights((8,), number)}
        functions = [schema.function_proto("ConvAvgPool", 17)]
        model = model_of([node], {"x": (1, 4, 15, 13)}, {"y": [None] * 4}, constants, functions=functions)
        result = convpool.optimize(model, lowering="fused", check=0)
        site = result.report.sites[0]
        forms.append((site.lowering, site.fallback.split(";")[0] if site.fallback else None))
        assert not schema.used_in(result.model)
        assert_close(model, result.model)
    assert {("fused", None), ("direct", "pads of the convolution")} <= set(forms)


def test_attributes_that_do_not_fit_stay():
    """A damaged file may have them: the operator's schema does not compare them."""
    model = convpool.optimize(graph(PAIR), check=0).model
    (node,) = (node for node in model.graph.node if schema.is_operator(node))
    for name, numbers, reason in (
        ("kernel_shape", [3, 2], "shape of the weights; got [32, 3, 3, 16], expected kernel_shape [3, 2]"),
        ("pool_kernel_shape", [2, 2, 2], "expected numbers for 2 axes"),
    ):
        ints = next(item for item in node.attribute if item.name == name).ints
        right, ints[:] = list(ints), numbers
        for lowering in ("direct", "fused", "auto"):
            (site,) = convpool.optimize(model, lowering=lowering, check=0).report.sites
            assert site.reason.startswith("ConvAvgPool 'y': ") and site.reason.endswith(reason)
        ints[:] = right


def moved(name: str, domain: str = "trt.plugins") -> onnx.ModelProto:
    result = convpool.optimize(original(name), check=0)
    result.move_to_domain(domain)
    assert {node.domain for node in result.model.graph.node if node.op_type in schema.OP_TYPES} == {domain}
    return result.model


@pytest.mark.parametrize("name", BODIES)
def test_nodes_in_another_domain(name):
    result = convpool.optimize(moved(name), lowering="direct")
    assert operators(result.model.graph) == dict(sorted({"AveragePool": 1, "Conv": 1, **KINDS[name][1]}.items()))
    assert not result.model.functions and [entry.domain for entry in result.model.opset_import] == [""]
    assert_close(original(name), result.model)


@pytest.mark.parametrize("change", ["another body", "another node", "another function"])
def test_a_domain_with_more_than_these_operators_is_left_alone(change):
    model = moved("a pair")
    if change == "another body":
        average = next(node for node in model.functions[0].node if node.op_type == "AveragePool")
        average.op_type = "MaxPool"
        average.attribute.remove(next(item for item in average.attribute if item.name == "count_include_pad"))
    elif change == "another node":
        other = onnx.FunctionProto.FromString(model.functions[0].SerializeToString())
        other.name = "Other"
        model.functions.append(other)
    else:
        model.functions[0].attribute.append("more")
    result = convpool.optimize(model, lowering="direct", check=0)
    assert not result.changed and result.report.sites == []


def operator_model(**attributes) -> onnx.ModelProto:
    """A node of the operator, with some attributes changed."""
    model = convpool.optimize(graph(PAIR), check=0).model
    node = next(node for node in model.graph.node if schema.is_operator(node))
    for name, value in attributes.items():
        next(item for item in node.attribute if item.name == name).CopyFrom(helper.make_attribute(name, value))
    return model


@pytest.mark.parametrize("name,ones", [("strides", 1), ("pads", 1), ("pads", 5), ("pool_pads", 1), ("pool_strides", 1)], ids=str)
def test_attributes_of_other_ranks_are_told(name, ones):
    (site,) = convpool.optimize(operator_model(**{name: [1] * ones}), lowering="direct", check=0).report.sites
    assert site.status == "rejected" and "attributes; got" in site.reason and "expected numbers for 2 axes" in site.reason


@pytest.mark.parametrize(
    ("kernel", "strides", "pads", "idle"),
    [((1, 1), (1, 1), 0, True), ((1, 2), (1, 1), 0, False), ((1, 1), (1, 2), 0, False), ((1, 1), (1, 1), 1, False)],
)
def test_a_window_of_one_element_at_every_position_averages_nothing(kernel, strides, pads, idle):
    assert PoolSpec(kernel, strides, (0, 0, 0, pads), (1, 1)).is_idle == idle


def test_weights_of_another_rank_are_told():
    model = operator_model()
    model.graph.initializer[0].dims[:] = [32, 9, 16]
    (site,) = convpool.optimize(model, lowering="direct", check=0).report.sites
    assert site.reason == "ConvAvgPool 'y': shape of the weights; got [32, 9, 16], expected one of rank 4"


def test_a_lowered_node_keeps_its_words():
    model = operator_model()
    node = next(node for node in model.graph.node if schema.is_operator(node))
    node.name, node.doc_string = "name", "words"
    result = verified(model, 1, lowering="direct").model
    assert [(node.name, node.doc_string) for node in result.graph.node if node.op_type == "Conv"] == [("name", "words")]


def test_open_sizes_of_a_node_that_becomes_standard_operators():
    body = f"n = BatchNormalization(x, g, b, m, v)\nr = Relu(n)\nh = Conv<pads=[1,1,1,1]>(r, w)\ny = {POOL}(h)"
    constants = {"g": (16,), "b": (16,), "m": (16,), "v": np.ones(16, np.float32)}
    written = convpool.optimize(graph(body, constants, inputs="float[N,16,H,W] x"), check=0).model
    (site,) = convpool.optimize(written, lowering="direct", check=1).report.sites
    assert (site.status, site.macs_before, site.macs_after) == ("rewritten", None, None)
    (node,) = [item for item in written.graph.node if schema.is_operator(item)]
    shift = next(tensor for tensor in written.graph.initializer if tensor.name == node.input[4])
    written.graph.input.append(onnx.helper.make_tensor_value_info(shift.name, onnx.TensorProto.FLOAT, ["C"]))
    written.graph.initializer.remove(shift)
    (site,) = convpool.optimize(written, lowering="direct", check=0).report.sites
    reason = f"{node.op_type} '{site.conv}': type and shape of the shift; got unknown, expected known ones"
    assert (site.status, site.reason) == ("rejected", reason)
