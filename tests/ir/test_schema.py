# SPDX-License-Identifier: Apache-2.0
"""The operator itself: attributes, shape inference, function body against the float64 reference."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import convpool
from convpool.algebra import parts as layouts
from convpool.algebra import reference
from convpool.algebra.expand import UpsampleSpec
from convpool.algebra.geometry import ConvSpec, PoolSpec
from convpool.algebra.parts import AFFINES, FUSED_VARIANTS, OPERATORS
from convpool.check.session import Session
from convpool.errors import ModelError
from convpool.ir import schema
from convpool.ir.model import LoadedModel
from tests.support.models import graph, model_of
from tests.support.operator_models import SAMPLED
from tests.support.rewriting import PAIR

POOL = PoolSpec((2, 3), (1, 1), (1, 0, 0, 1), (1, 1))
CONV = ConvSpec((3, 1), (2, 3), (0, 0, 1, 0), (1, 1), 2)
WINDOWS = {False: (POOL, CONV), True: (UpsampleSpec((2, 3)), ConvSpec((3, 1), (1, 1), (1, 0, 1, 0), (1, 1), 2))}
"""A convolution behind what stands in front of it, by whether that upsamples."""


def made(nodes: list[onnx.NodeProto], shapes: dict[str, list], opset: int = 17, version: int = 1, **options) -> onnx.ModelProto:
    """A model of these nodes, of inputs of these shapes; options: of `functions_for`."""
    functions = schema.functions_for({node.op_type for node in nodes if node.domain}, opset, **options)
    return model_of(nodes, shapes, {nodes[-1].output[0]: [None] * 4}, opset=opset, version=version, functions=functions)


def model(x_shape, conv=CONV, bias=True, opset=17) -> onnx.ModelProto:
    shapes = {"x": x_shape, "w": [6, *conv.kernel_shape, 2], **({"b": [6]} if bias else {})}
    return made([schema.make_node(list(shapes), "y", POOL, conv)], shapes, opset)


def inferred(found: onnx.ModelProto, data_prop: bool = False) -> list:
    inferred = onnx.shape_inference.infer_shapes(found, strict_mode=True, data_prop=data_prop)
    dims = inferred.graph.output[0].type.tensor_type.shape.dim
    names = [dim.dim_param if not dim.dim_param.startswith("unk__") else "" for dim in dims]
    return [dim.dim_value or name or None for dim, name in zip(dims, names, strict=True)]


def test_shapes():
    assert inferred(model([2, 4, 10, 11])) == [2, 6, 5, 4]
    assert inferred(model(["N", 4, 10, "W"])) == ["N", 6, 5, None]


FAULTS = {
    "no strides": (lambda node: node.attribute.remove(attribute(node, "strides")), "strides; got none, expected INTS"),
    "a kernel of one number": (lambda node: attribute(node, "kernel_shape").CopyFrom(helper.make_attribute("kernel_shape", 3)),
                               "kernel_shape; got INT, expected INTS"),
    "another attribute": (lambda node: node.attribute.append(helper.make_attribute("pad", 1)), "pad; got an attribute of this"),
    "no weights": (lambda node: node.input.__delitem__(slice(1, None)), "tensors; got 1 inputs and 1 outputs, expected X, W, B"),
    "an empty name": (lambda node: node.input.__setitem__(2, ""), "tensors; got 3 inputs and 1 outputs, expected X, W, B"),
    "two results": (lambda node: node.output.append("z"), "tensors; got 3 inputs and 2 outputs, expected X, W, B"),
    "no such layout": (lambda node: schema.give_layout(node, 4), "channels_last; got 4"),
}  # fmt: skip


def attribute(node, name: str) -> onnx.AttributeProto:
    return next(item for item in node.attribute if item.name == name)


@pytest.mark.parametrize("what", FAULTS)
def test_a_node_in_another_form_is_refused(what):
    found = model([2, 4, 10, 11])
    convpool.optimize(found, check=0)
    change, message = FAULTS[what]
    change(found.graph.node[0])
    with pytest.raises(ModelError, match=message):
        convpool.optimize(found, check=0)


@pytest.mark.parametrize("strides", [(0, 0), (1,)])
def test_strides_that_there_are_not_are_refused(strides):
    found = model([2, 4, 10, 11], conv=replace(CONV, strides=strides))
    with pytest.raises(ModelError):
        convpool.optimize(found)


@pytest.mark.parametrize("factors", [(2, 5), (0, 1)])
def test_an_upsampling_that_there_is_not_is_refused(factors):
    found, _ = fused_variant("UpsampleConv")
    attribute(found.graph.node[0], "upsample").ints[:] = factors
    with pytest.raises(ModelError, match=rf"upsample; got \[{factors[0]}, {factors[1]}\], expected 2 factors from 1 to 4"):
        convpool.optimize(found)


@pytest.mark.parametrize("op_type", ["UpsampleConv", "ReluUpsampleConvAdd"])
def test_scales_that_say_another_thing_are_refused(op_type):
    """A runtime without the library goes by them, one with it by upsample."""
    found, _ = fused_variant(op_type)
    next(item for item in found.graph.node[0].attribute if item.name == "scales").floats[:] = [1, 1, 2, 2]
    with pytest.raises(ModelError, match=r"node': scales; got \[1.0, 1.0, 2.0, 2.0\], expected \[1.0, 1.0, 2.0, 3.0\]"):
        convpool.optimize(found)


@pytest.mark.parametrize("opset", [7, 17, 19, onnx.defs.onnx_opset_version() - 4])
@pytest.mark.parametrize("bias", [False, True])
def test_function_computes_the_reference(bias, opset):
    rng = np.random.default_rng(0)
    x, w, b = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ([2, 4, 10, 11], [6, 3, 1, 2], [6]))
    feed = {"x": x * 6, "w": w, "b": b}  # sixes, so that means over 6 elements are integers, to the rounding of 1/6
    if not bias:
        del feed["b"]
    got = Session(LoadedModel(model([2, 4, 10, 11], bias=bias, opset=opset), None, 0), optimize=False).run(None, feed)
    np.testing.assert_allclose(got[0], reference.conv_avg_pool(feed["x"], w, b if bias else None, POOL, CONV), rtol=0, atol=1e-4)


SLOPES = {"": 0.0, "Relu": 0.0, "LeakyRelu": 0.25, "Tanh": 0.0, "Sigmoid": 0.0, "Silu": 0.0}


def permuted(shape, last: bool) -> list:
    """[N, C, spatial...], or with the channels last."""
    return [shape[0], *shape[2:], shape[1]] if last else list(shape)


def fused_variant(
    op_type: str, opset: int = 17, x_shape=(2, 4, 10, 11), channels_last: int = 0
) -> tuple[onnx.ModelProto, schema.Parts]:
    """A model of one node with everything but its weights as inputs."""
    x_last, y_last = layouts.LAYOUTS[channels_last]
    kind = OPERATORS[op_type]
    parts = replace(kind, prologue_alpha=SLOPES[kind.prologue], epilogue_alpha=2 * SLOPES[kind.epilogue])
    parts = replace(parts, norm_groups=2, epsilon=0.25) if kind.normalized else parts
    before, conv = WINDOWS[kind.upsamples]
    shapes = {"X": permuted(x_shape, x_last), "W": [6, 3, 1, 2], "B": [6]}
    shapes |= dict.fromkeys(("scale", "shift"), [2, 4, 1, 1] if kind.modulated else [4])
    shapes["R"] = permuted([2, 6, *conv.output_size(before.output_size((10, 11)))], y_last)
    node = schema.make_node(list(parts.inputs), "Y", before, conv, "node")
    schema.give_parts(node, parts)
    schema.give_layout(node, channels_last)
    permuting = schema.complete_layouts([node])
    shapes = {name: shapes[name] for name in parts.inputs}
    return made([node], shapes, opset, schema.version_of(parts), permuting=permuting), parts


def test_fused_variants_are_named_after_what_they_do():
    assert len(FUSED_VARIANTS) == 2 * (4 * 4 * 2 * 6 - 1)
    parts = schema.Parts(True, "LeakyRelu", 0.1, True, "Relu")
    assert parts.op_type == "AffineLeakyReluConvAvgPoolAddRelu"
    assert parts.inputs == ("X", "W", "B", "scale", "shift", "R")
    assert schema.Parts().op_type == "ConvAvgPool" and schema.Parts(residual=True).inputs == ("X", "W", "B", "R")
    assert schema.Parts(prologue="Relu", upsamples=True).op_type == "ReluUpsampleConv"
    assert schema.Parts(True, "Silu", epilogue="Silu", modulated=True).op_type == "ModulatedSiluConvAvgPoolSilu"
    assert schema.Parts(True, normalized=True, norm_groups=8).op_type == "NormalizedConvAvgPool"


@pytest.mark.parametrize("op_type", [name for name in SAMPLED if name in FUSED_VARIANTS])
def test_a_fused_variant_says_in_attributes_what_its_name_says(op_type):
    found, parts = fused_variant(op_type)
    onnx.checker.check_model(found, full_check=True)
    assert inferred(found, data_prop=parts.normalized) == [2, 6, *((20, 33) if parts.upsamples else (5, 4))]
    node = found.graph.node[0]
    assert schema.parts_of(node) == parts
    given = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    scaled = next((number for number, name in enumerate(AFFINES[1:], 1) if name in op_type), 0)
    assert (given["prologue_affine"], given["residual"]) == (scaled, int("Add" in op_type))
    names = ("", "Relu", "LeakyRelu", "Tanh", "Sigmoid", "Clip", "Silu")  # convpool_activation
    core = schema.Parts(upsamples=parts.upsamples)
    before, after = op_type.removeprefix(AFFINES[scaled]).split(core.op_type)
    assert (names[given["prologue_activation"]], names[given["activation"]]) == (before, after.removeprefix("Add"))
    assert (given["prologue_alpha"], given["alpha"]) == (SLOPES[before], 2 * SLOPES[after.removeprefix("Add")])
    schema.give_parts(node, core)
    assert node.op_type == core.op_type and not {item.name for item in node.attribute} & {"residual", "alpha", "norm_groups"}


@pytest.mark.parametrize(
    ("behind", "version"),
    [("y = Neg(p)", 1), ("y = Relu(p)", 2), ("y = Tanh(p)", 3), ("y = Sigmoid(p)", 3), ("s = Sigmoid(p) y = Mul(s, p)", 5)],
)
def test_a_model_imports_the_version_that_has_its_operators(behind, version):
    result = convpool.optimize(graph(f"{PAIR.replace('y =', 'p =')}\n{behind}"), check=0).model
    assert {entry.domain: entry.version for entry in result.opset_import} == {"": 17, schema.DOMAIN: version}


def check_against_reference(op_type: str, opset: int, channels_last: int = 0) -> None:
    rng = np.random.default_rng(1)
    found, parts = fused_variant(op_type, opset, channels_last=channels_last)
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in found.graph.input}
    feed = {name: rng.integers(-3, 4, shape).astype(np.float32) for name, shape in shapes.items()}
    whole = parts.prologue != "Silu" and not parts.normalized
    feed["X"] *= 24 if whole else 1  # whole numbers after a slope of 1/4 and a mean over 6, to the rounding of 1/6
    if parts.affine:
        feed["scale"] = np.array([1, -2, 0, 3, 2, 1, -1, 0][: feed["scale"].size], np.float32).reshape(feed["scale"].shape)
    saturates = parts.epilogue in ("Tanh", "Sigmoid")
    if saturates:  # weights, bias and residual so small that the result is not 1 everywhere
        feed |= {name: feed[name] / (64 if whole else 8) for name in ("W", "B", "R") if name in feed}
    got = Session(LoadedModel(found, None, 0), optimize=False).run(None, feed)[0]
    tensors = [feed.get(name) for name in ("scale", "shift", "R")]
    before, conv = WINDOWS[parts.upsamples]
    expected = reference.conv_avg_pool(feed["X"], feed["W"], feed["B"], before, conv, parts, *tensors, channels_last)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 if saturates else 5e-4)
    assert np.ptp(expected) > (0.5 if saturates else 10)


@pytest.mark.parametrize("opset", ["least", 17])
@pytest.mark.parametrize("op_type", SAMPLED[1:])
def test_a_variant_computes_the_reference(op_type, opset):
    kind = OPERATORS[op_type]
    least = schema.NORMALIZING_OPSET if kind.normalized else schema.UPSAMPLING_OPSET if kind.upsamples else 7
    check_against_reference(op_type, least if opset == "least" else opset)


@pytest.mark.parametrize("channels_last", [1, 2, 3])
@pytest.mark.parametrize("op_type", SAMPLED)
def test_with_channels_last_it_computes_the_reference(op_type, channels_last):
    check_against_reference(op_type, 17, channels_last)


@pytest.mark.parametrize("channels_last", [1, 2, 3])
def test_with_channels_last_sizes_stand_at_their_places(channels_last):
    found, _ = fused_variant("ConvAvgPool", x_shape=("N", 4, 10, 11), channels_last=channels_last)
    onnx.checker.check_model(found, full_check=True)
    assert inferred(found) == permuted(["N", 6, 5, 4], channels_last != 3)


def test_permutations_are_given_once_and_go_with_the_layouts():
    nodes = [schema.make_node(["x", "w"], name, POOL, CONV) for name in ("y", "z")]
    before = [node.SerializeToString() for node in nodes]
    schema.give_layout(nodes[0], 1)
    for _ in range(2):
        assert schema.complete_layouts(nodes) == {"ConvAvgPool"}
        for node in nodes:
            names = [item.name for item in node.attribute]
            assert "x_perm" in names and len(names) == len(set(names))
    schema.give_layout(nodes[0], 0)
    assert schema.complete_layouts(nodes) == set() and [node.SerializeToString() for node in nodes] == before


def test_one_function_serves_nodes_of_both_layouts():
    """The second node reads what the first gives, through its Transpose: both have the function that permutes."""
    first, second = (
        schema.make_node(names, y, POOL, ConvSpec((1, 1), (1, 1), (0,) * 4, (1, 1), 2))
        for names, y in ((["x", "w"], "t"), (["u", "w"], "y"))
    )
    schema.give_layout(first, 2)
    turn = helper.make_node("Transpose", ["t"], ["u"], perm=layouts.to_channels_first(2))
    assert schema.complete_layouts([first, second]) == {"ConvAvgPool"}
    found = made([first, turn, second], {"x": [2, 4, 6, 7], "w": [4, 1, 1, 2]}, permuting={"ConvAvgPool"})
    onnx.checker.check_model(found, full_check=True)
    rng = np.random.default_rng(2)
    feed = {"x": rng.standard_normal((2, 4, 6, 7)).astype(np.float32), "w": rng.standard_normal((4, 1, 1, 2)).astype(np.float32)}
    conv = ConvSpec((1, 1), (1, 1), (0,) * 4, (1, 1), 2)
    once = reference.conv_avg_pool(feed["x"], feed["w"], None, POOL, conv)
    got = Session(LoadedModel(found, None, 0), optimize=False).run(None, feed)[0]
    np.testing.assert_allclose(got, reference.conv_avg_pool(once, feed["w"], None, POOL, conv), rtol=0, atol=1e-5)


def test_the_border_is_zero_and_not_what_the_prologue_makes_of_zero():
    pool, conv = PoolSpec((1, 2), (1, 1), (0, 1, 0, 0), (1, 1)), ConvSpec((1, 1), (1, 1), (1, 0, 0, 0), (1, 1))
    one, shift = np.ones((1, 1, 1, 1)), np.array([5.0])
    parts = schema.Parts(True, "Relu")
    got = reference.conv_avg_pool(one[:, :, :, :], one, np.zeros(1), pool, conv, parts, np.array([2.0]), shift)
    assert got.tolist() == [[[[0.0], [3.5]]]]  # a padded row; the mean of 0 and 2 * 1 + 5
    node = schema.make_node(list(parts.inputs), "Y", pool, conv)
    schema.give_parts(node, parts)
    found = made([node], {"X": [1, 1, 1, 1], "W": [1, 1, 1, 1], "B": [1], "scale": [1], "shift": [1]}, version=2)
    feed = {"X": one, "W": one, "B": np.zeros(1), "scale": np.array([2.0]), "shift": shift}
    session = Session(LoadedModel(found, None, 0), optimize=False)
    assert session.run(None, {key: value.astype(np.float32) for key, value in feed.items()})[0].tolist() == got.tolist()


def test_moving_to_a_domain_where_fused_variants_are_already():
    found, _ = fused_variant("ReluConvAvgPoolAdd")
    schema.move_to_domain(found, "trt.plugins")
    more, _ = fused_variant("ReluConvAvgPoolAdd")
    found.functions.extend(more.functions)
    found.opset_import.extend(entry for entry in more.opset_import if entry.domain)
    found.graph.node.extend(more.graph.node)
    found.graph.node[1].name = found.graph.node[1].output[0] = "second"
    found.graph.output.add().CopyFrom(helper.make_tensor_value_info("second", TensorProto.FLOAT, [None] * 4))
    schema.move_to_domain(found, "trt.plugins")
    assert [(entry.domain, entry.version) for entry in found.opset_import] == [("", 17), ("trt.plugins", 2)]
    assert [(function.domain, function.name) for function in found.functions] == [("trt.plugins", "ReluConvAvgPoolAdd")]
    Session(LoadedModel(found, None, 0), optimize=False)


def test_no_move_to_a_domain_with_another_function_of_the_name():
    result = convpool.optimize(graph(PAIR), check=0)
    result.model.functions.add(domain="mine", name="ConvAvgPool")
    before = result.model.SerializeToString()
    with pytest.raises(convpool.OptionError, match="domain 'mine': got another function 'ConvAvgPool'"):
        result.move_to_domain("mine")
    for domain in ("", "ai.onnx", "ai.onnx.ml"):
        with pytest.raises(convpool.OptionError, match=f"^domain: got '{domain}', where ONNX has its own operators"):
            result.move_to_domain(domain)
    assert result.model.SerializeToString() == before and not schema.move_back(result.model)


def change(found: onnx.ModelProto, what: str) -> None:
    (function,), node = found.functions, found.graph.node[-1]
    conv = next(n for n in function.node if n.op_type == "Conv")
    pool = next(n for n in function.node if n.op_type == "AveragePool")
    if what == "a stride of its own":
        next(a for a in conv.attribute if a.name == "strides").ref_attr_name = "pool_strides"
    elif what == "padding not counted":
        next(a for a in pool.attribute if a.name == "count_include_pad").i = 0
    elif what == "one more node":
        conv.output[0] = "before"
        function.node.append(helper.make_node("Neg", ["before"], ["Y" if function.node[-1] is conv else "convolved"]))
    elif what == "the maximum":
        pool.op_type = "MaxPool"
        del pool.attribute[:1]
    elif what == "weights as they lie":
        next(a for a in node.attribute if a.name == "weight_perm").ints[:] = [0, 1, 2, 3]
    elif what == "another order":
        next(a for a in node.attribute if a.name == "x_perm").ints[:] = [0, 2, 1, 3]
    elif what == "channels first":
        schema.give_layout(node, 1)


@pytest.mark.parametrize("op_type", schema.OP_TYPES[:4])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        *((what, "got another body, expected the operator's own") for what in ("a stride of its own", "padding not counted")),
        *((what, "got another body, expected the operator's own") for what in ("one more node", "the maximum")),
        ("weights as they lie", "weight_perm; got [0, 1, 2, 3], expected [0, 3, 1, 2]"),
        ("another order", "x_perm; got [0, 2, 1, 3], expected [0, 3, 1, 2]"),
        ("channels first", "channels_last; got 1 with a function for channels first"),
    ],
)
def test_a_function_that_is_not_the_operator_s_is_refused(op_type, what, message):
    found = fused_variant(op_type, channels_last=int(what == "another order"))[0]
    convpool.optimize(found, check=0)
    change(found, what)
    with pytest.raises(convpool.ModelError) as raised:
        convpool.optimize(found, check=0)
    assert message in str(raised.value)


@pytest.mark.parametrize("op_type", schema.OP_TYPES[:4])
def test_names_comments_and_order_of_a_function_do_not_matter(op_type):
    found = fused_variant(op_type)[0]
    found.functions[0].node.sort(key=lambda node: node.op_type != "AveragePool")
    for number, node in enumerate(found.functions[0].node):
        node.name, node.doc_string = f"n{number}", "of another tool"
        node.attribute.sort(key=lambda item: item.name, reverse=True)
    convpool.optimize(found, check=0)


def test_nodes_in_another_domain_stay_there():
    result = convpool.optimize(graph(PAIR), check=0)
    result.move_to_domain("trt.plugins")
    again = convpool.optimize(result.model, check=0)
    assert not again.changed and again.model == result.model and again.model.graph.node[0].domain == "trt.plugins"


def test_only_nodes_of_the_source_s_domain_move_to_another():
    model = convpool.optimize(graph(PAIR), check=0).model
    for domain, op_type in ((schema.DOMAIN, "Foreign"), ("elsewhere", "ConvAvgPool")):
        model.graph.node.add(op_type=op_type, domain=domain, input=["y"], output=[f"{domain}/{op_type}"])
    for domain in (schema.DOMAIN, "trt.plugins"):  # of one name in both, but none of convpool's
        model.functions.add(domain=domain, name="Foreign")
    assert schema.move_to_domain(model, "trt.plugins")
    assert [node.domain for node in model.graph.node] == ["trt.plugins", schema.DOMAIN, "elsewhere"]
    assert [part.domain for part in model.functions] == ["trt.plugins", schema.DOMAIN, "trt.plugins"]
    assert [entry.domain for entry in model.opset_import] == ["", schema.DOMAIN, "trt.plugins"]
    assert not schema.move_to_domain(model, "trt.plugins") and not schema.move_to_domain(model, schema.DOMAIN)
