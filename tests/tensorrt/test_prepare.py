# SPDX-License-Identifier: Apache-2.0
"""Models prepared for one TensorRT version, checked in onnxruntime."""

import copy
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from convpool import optimize
from convpool.check.session import Session
from convpool.cuda import CudaError, tactics
from convpool.errors import ModelError, OptionError
from convpool.ir import schema
from convpool.ir.model import LoadedModel, load
from convpool.tensorrt import PRECISIONS, Engine, build_engine, pipeline, prepare
from convpool.tensorrt.builder import keep_heads_in_float
from convpool.tensorrt.prepare import typical_shapes
from models.generators import generate, random_inputs
from tests.support.models import graph

TRT_86 = SimpleNamespace(__name__="tensorrt", __version__="8.6.1")


def pretend_gpu(monkeypatch, capability: int | None) -> None:
    """A GPU of this compute capability, or none."""

    def current_device():
        if capability is None:
            raise CudaError("no GPU")
        return {"cc": capability}

    monkeypatch.setattr(prepare, "current_device", current_device)


def windows(model: onnx.ModelProto) -> list[list[int]]:
    """The pooling windows of all nodes of the operators."""
    return [list(item.ints) for node in model.graph.node for item in node.attribute if item.name == "pool_kernel_shape"]


def run(model: onnx.ModelProto, inputs) -> list[np.ndarray]:
    return Session(LoadedModel(model, None, 0), optimize=False).run(None, inputs)


@pytest.mark.parametrize("name", ["wgan_gp_small", "stargan_v2_small", "densenet_small"])
def test_cast_floats_rounds_and_nothing_else(name):
    model = generate(name, batch=2)
    inputs = random_inputs(model)
    exact = run(model, inputs)
    half = prepare.self_contained(optimize(model, check=0).model, None)
    prepare.cast_floats(half, TensorProto.FLOAT16)
    onnx.checker.check_model(half)
    kinds = {tensor.data_type for tensor in half.graph.initializer}
    assert TensorProto.FLOAT not in kinds and TensorProto.FLOAT16 in kinds
    assert [value.type.tensor_type.elem_type for value in (*half.graph.input, *half.graph.output)] == [1, 1]
    for wanted, got in zip(exact, run(half, inputs), strict=True):
        assert got.dtype == np.float32
        error = np.abs(got - wanted).max() / np.abs(wanted).max()
        assert 1e-6 < error < 1e-2  # it did round, and no more than half precision does


def test_cast_floats_keeps_scales_and_clips_what_half_precision_cannot_hold():
    constants = {"scales": np.float32([1, 1, 2, 2]), "large": np.float32([1e9])}
    model = graph("z = Resize(x, , scales)\ny = Min(z, large)", constants, inputs="float[1,1,2,2] x", outputs="float[1,1,4,4] y")
    prepare.cast_floats(model, TensorProto.FLOAT16)
    onnx.checker.check_model(model, full_check=True)
    kept = {tensor.name: tensor for tensor in model.graph.initializer}
    assert kept["scales"].data_type == TensorProto.FLOAT
    assert onnx.numpy_helper.to_array(kept["large"]) == np.float16(65504)
    assert np.array_equal(run(model, {"x": np.ones((1, 1, 2, 2), np.float32)})[0], np.ones((1, 1, 4, 4)))


def test_cast_floats_keeps_scales_of_constant_nodes_and_converts_what_branches_hold():
    body = """scales = Constant<value = float[4] {1, 1, 2, 2}>()
      z = Resize<mode = "nearest">(x, , scales)
      y = If (c) <
        then_branch = t () => (float[1,1,4,4] y) <float[1] three = {3}> { y = Mul(z, three) },
        else_branch = e () => (float[1,1,4,4] b) { half = Constant<value = float {0.5}>() b = Mul(z, half) }
      >"""
    model = graph(body, inputs="float[1,1,2,2] x, bool c", outputs="float[1,1,4,4] y")
    branch = model.graph.node[-1].attribute[0].g
    assert [tensor.name for tensor in branch.initializer] == ["three"]
    prepare.cast_floats(model, TensorProto.FLOAT16)
    onnx.checker.check_model(model, full_check=True)
    assert branch.initializer[0].data_type == TensorProto.FLOAT16
    for condition, factor in ((True, 3), (False, 0.5)):
        found = run(model, {"x": np.ones((1, 1, 2, 2), np.float32), "c": np.array(condition)})[0]
        assert np.array_equal(found, np.full((1, 1, 4, 4), factor))


@pytest.mark.parametrize("name", ["wgan_gp_small", "densenet_small"])  # the second has convolutions without a bias
def test_old_parsers_get_standard_operators_without_the_plugin(name):
    model = generate(name, batch=2)
    rewritten = optimize(model, check=0).model
    assert prepare.has_plugin_nodes(rewritten)
    inlined = prepare.for_parser(prepare.self_contained(rewritten), 8, plugin=False, allow_tf32=False)
    assert not prepare.has_plugin_nodes(inlined) and not inlined.functions
    assert not any(node.input and not node.input[-1] for node in inlined.graph.node)  # TensorRT refuses a bias named ""
    inputs = random_inputs(model)
    assert np.array_equal(run(inlined, inputs)[0], run(rewritten, inputs)[0])


def test_functions_leave_nothing_before_the_plugin():
    """TensorRT 10.0 to 10.6 would run the function of the node's name; those that remain are inlined, as 8.6 reads none."""
    rewritten = prepare.self_contained(optimize(generate("densenet_small", batch=2), check=0).model)
    inputs = random_inputs(rewritten)
    wanted = run(rewritten, inputs)
    names = [node.op_type for node in rewritten.graph.node if prepare.is_plugin_node(node)]
    body = [
        helper.make_node("Constant", [], ["two"], value=helper.make_tensor("", TensorProto.FLOAT, [], [2.0])),
        helper.make_node("Mul", ["a", "two"], ["b"]),
    ]
    rewritten.functions.append(helper.make_function("own", "Twice", ["a"], ["b"], body, [helper.make_opsetid("", 17)]))
    rewritten.opset_import.append(helper.make_opsetid("own", 1))
    rewritten.graph.node.append(helper.make_node("Twice", [rewritten.graph.output[0].name], ["twice"], domain="own"))
    rewritten.graph.output[0].name = "twice"
    for major in (8, 10):
        ready = prepare.for_parser(copy.deepcopy(rewritten), major, plugin=True, allow_tf32=False)
        assert not ready.functions
        assert [node.op_type for node in ready.graph.node if prepare.is_plugin_node(node)] == names and names
    plain = prepare.for_parser(rewritten, 10, plugin=False, allow_tf32=False)
    assert np.array_equal(run(plain, inputs)[0], 2 * wanted[0])
    prepare.cast_floats(plain, TensorProto.FLOAT16)
    error = np.abs(run(plain, inputs)[0] - 2 * wanted[0]).max() / np.abs(wanted[0]).max()
    assert 0 < error < 2e-2


def test_old_parsers_refuse_new_opsets():
    model = generate("wgan_gp_small", batch=2, opset=19)
    with pytest.raises(ModelError, match="opset; got 19, expected at most 17 for TensorRT 8"):
        prepare.for_parser(model, 8, plugin=True, allow_tf32=False)
    prepare.for_parser(model, 11, plugin=True, allow_tf32=False)


@pytest.mark.parametrize("optimized", [False, True])
def test_weights_computed_from_constants_become_initializers(optimized):
    """Spectral normalisation: W / (u' W v)."""
    model = generate("wgan_gp_small", batch=2)
    inputs = random_inputs(model)
    convolutions = [index for index, node in enumerate(model.graph.node) if node.op_type == "Conv"]
    for index in reversed(convolutions):
        node = model.graph.node[index]
        name, weight = node.input[1], next(t for t in model.graph.initializer if t.name == node.input[1])
        m, rest = weight.dims[0], int(np.prod(weight.dims[1:]))
        u, v = (np.random.default_rng(index).random(shape, np.float32) + 1 for shape in (m, (rest, 1)))
        for key, value in (("rows", np.array([m, -1])), ("u", u), ("v", v)):
            model.graph.initializer.append(numpy_helper.from_array(value, f"{name}.{key}"))
        chain = [
            ("Reshape", [name, f"{name}.rows"], "m"),
            ("Abs", [f"{name}.m"], "a"),
            ("MatMul", [f"{name}.a", f"{name}.v"], "s"),
            ("MatMul", [f"{name}.u", f"{name}.s"], "sigma"),
            ("Div", [name, f"{name}.sigma"], "w"),
        ]
        node.input[1] = f"{name}.w"
        for op_type, sources, output in reversed(chain):
            model.graph.node.insert(index, helper.make_node(op_type, sources, [f"{name}.{output}"]))
    exact = run(model, inputs)
    folded = prepare.folded(prepare.self_contained(optimize(model, check=1).model if optimized else model))
    onnx.checker.check_model(folded)
    assert not {node.op_type for node in folded.graph.node} & {"Div", "Abs", "Reshape"}
    names = {tensor.name for tensor in folded.graph.initializer}
    weighted = [node for node in folded.graph.node if node.op_type == "Conv" or prepare.is_plugin_node(node)]
    assert len(weighted) == len(convolutions) and all(node.input[1] in names for node in weighted)
    assert names <= {name for node in folded.graph.node for name in node.input}
    for wanted, got in zip(exact, run(folded, inputs), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


def test_attributes_said_to_the_plugin_by_hand_are_valid_and_the_precision_decides():
    """Follow docs/tensorrt.md for other tools' engines: the file loads, runs, and can be built."""
    model = generate("wgan_gp_small", batch=2)
    inputs = random_inputs(model)
    rewritten = optimize(model, check=0).model
    wanted = run(rewritten, inputs)[0]
    for node in filter(prepare.is_plugin_node, rewritten.graph.node):
        node.attribute.extend(helper.make_attribute(name, 1) for name in ("allow_tf32", "constant_weights"))
    prepared = prepare.self_contained(rewritten)  # after convpool's check
    assert np.array_equal(run(prepared, inputs)[0], wanted)
    for allowed in (True, False):
        ready = prepare.for_parser(prepare.self_contained(prepared), 10, plugin=True, allow_tf32=allowed)
        for node in filter(prepare.is_plugin_node, ready.graph.node):
            assert [a.i for a in node.attribute if a.name == "allow_tf32"] == ([1] if allowed else [])
    assert np.array_equal(run(prepare.for_parser(prepared, 10, plugin=False, allow_tf32=True), inputs)[0], wanted)


def test_channels_last_is_not_for_tensorrt():
    rewritten = optimize(generate("wgan_gp_small"), check=0).model
    schema.give_layout(next(filter(prepare.is_plugin_node, rewritten.graph.node)), 1)
    with pytest.raises(ModelError, match="layout of ConvAvgPool nodes; got channels_last"):
        prepare.for_parser(rewritten, 10, plugin=True, allow_tf32=False)


def test_constant_weights_are_those_that_nothing_can_change():
    def said(model):
        return [any(a.name == "constant_weights" and a.i == 1 for a in n.attribute) for n in nodes(model)]

    def nodes(model):
        return [node for node in model.graph.node if prepare.is_plugin_node(node)]

    rewritten = prepare.self_contained(optimize(generate("wgan_gp_small", batch=2), check=0).model)
    assert nodes(rewritten) and not any(said(rewritten))
    prepare.set_constant_weights(rewritten, True)
    prepare.set_constant_weights(rewritten, True)
    assert all(said(rewritten))
    assert all(sum(a.name == "constant_weights" for a in node.attribute) == 1 for node in nodes(rewritten))
    prepare.set_constant_weights(rewritten, False)
    assert not any(said(rewritten))
    # An initializer that is an input too may be overridden; a computed tensor is none at all.
    first, second = nodes(rewritten)[:2]
    tensor = next(t for t in rewritten.graph.initializer if t.name == first.input[1])
    rewritten.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    rewritten.graph.node.insert(0, helper.make_node("Neg", [second.input[1]], ["negative"]))
    second = nodes(rewritten)[1]
    second.input[1] = "negative"
    prepare.set_constant_weights(rewritten, True)
    assert said(rewritten) == [False, False] + [True] * (len(nodes(rewritten)) - 2)


def test_nodes_in_bodies_have_no_constant_weights():
    """There a name may mean another tensor."""
    body = """y = If(flag) <
      then_branch = yes () => (float[1,2,2,2] a) { a = ai.convpool.ConvAvgPool<constant_weights=1>(x, w) },
      else_branch = no () => (float[1,2,2,2] b) { b = ai.convpool.ConvAvgPool(x, w) }>"""
    model = graph(body, {"w": (2, 1, 1, 2)}, inputs="float[1,2,4,4] x, bool flag", imports=', "ai.convpool": 1')
    prepare.set_constant_weights(model, True)
    nodes = [item.g.node[0] for item in model.graph.node[0].attribute]
    assert all(prepare.is_plugin_node(node) and not node.attribute for node in nodes)


def test_half_weights_are_those_of_the_operator_alone():
    rewritten = prepare.self_contained(optimize(generate("wgan_gp_small", batch=2), check=0).model)
    prepare.half_weights(rewritten, TensorProto.FLOAT16)
    kinds = {tensor.name: tensor.data_type for tensor in rewritten.graph.initializer}
    for node in rewritten.graph.node:
        wanted = TensorProto.FLOAT16 if prepare.is_plugin_node(node) else TensorProto.FLOAT
        for name in node.input[1:]:
            if name in kinds and kinds[name] != TensorProto.INT64:
                assert kinds[name] == wanted, (node.op_type, name)


def test_half_weights_of_a_prologue_that_two_nodes_share():
    """Also where one has it as its prologue and something else reads it: then it stays."""
    model = prepare.self_contained(optimize(generate("densenet_small", batch=2), check=0).model)
    first, second, third = (node for node in model.graph.node if node.op_type == "AffineReluConvAvgPool")
    shared, kept = first.input[3], third.input[4]
    second.input[3] = shared
    model.graph.node.append(helper.make_node("Neg", [kept], ["elsewhere"]))
    prepare.half_weights(model, TensorProto.FLOAT16)
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    fp16 = {name for node in (first, second, third) for name in node.input[1:]} - {kept}
    assert {kinds[name] for name in fp16} == {TensorProto.FLOAT16} and kinds[kept] == TensorProto.FLOAT


@pytest.mark.parametrize("lowering", ["direct", "fused"])
def test_a_file_with_the_operators_nodes_has_no_other_form(lowering):
    optimized = optimize(generate("wgan_gp_small", batch=2), check=0).model
    with pytest.raises(OptionError, match=f"lowering: got {lowering} for a model with the operator's nodes already"):
        build_engine(optimized, lowering=lowering, trt=TRT_86)
    for own in ("convavgpool", "fused"):  # which nobody asked for
        assert prepare.has_plugin_nodes(prepare.lowered(load(optimized), own))


def test_the_least_capability_is_the_tactics():
    few = [tactic.min_cc for tactic in tactics() if tactic.name.endswith("_few")]
    assert few and set(few) == {prepare.STEM_MIN_CC}


@pytest.mark.parametrize(
    ("profile", "taken"),
    [
        ({"image": ((1, 3, 32, 32), (8, 3, 32, 32), (64, 3, 32, 32))}, 5),
        (None, 0),
        ({"image": ((8, 3, 32, 32),)}, 0),
        ({"image": [np.array([8, 3, 32, 32])] * 3}, 5),
        ({"image": ((1, 3, 32, 32), (1000, 3, 32, 32), (2000, 3, 32, 32))}, 0),
        ({"image": ((1,), ("a", 3, 32, 32), (2,))}, 0),
    ],
)
def test_the_typical_shape_says_which_convolutions_are_small(profile, taken):
    shapes = typical_shapes([profile] if profile else [])
    made = prepare.lowered(load(generate("wgan_gp")), "convavgpool", input_shapes=shapes, enable="plain_conv")
    assert windows(made).count([1, 1]) == taken


@pytest.mark.parametrize("precision", PRECISIONS)
def test_convolutions_without_a_pooling_go_to_the_plugin_but_in_fp32(precision, monkeypatch):
    built = []
    pretend_gpu(monkeypatch, 90)
    monkeypatch.setattr(pipeline, "tensorrt_module", lambda: TRT_86)

    def build_prepared(trt, model, options):
        built.append(model)
        return Engine(b"")

    monkeypatch.setattr(pipeline, "build_prepared", build_prepared)
    model = generate("wgan_gp", batch=1, width=64)
    for options in ({}, {"stem": False}, {"plain_conv": False}, {"plugin": False, "lowering": "direct"}, {"lowering": "direct"}):
        build_engine(model, **{"lowering": "convavgpool", **options}, precision=precision)
    # The first block's first convolution, and its shortcut's with its pooling; the second's first, and the others' four.
    without_plain = (0, 3) if precision in ("fp32", "tf32") else (1, 5)
    wanted = [(0, 3)] * 3 if precision == "fp32" else [(6, 10), (5, 8), without_plain]
    assert [(found.count([1, 1]), len(found)) for found in map(windows, built)] == [*wanted, (0, 0), (0, 0)]


def test_what_stands_in_a_local_function_goes_to_the_plugin_and_is_folded():
    functions = """<opset_import: ["": 17], domain: "own"> Block (a, w) => (b) {
      n = ReduceL2<keepdims = 0>(w) v = Div(w, n) c = Conv<pads = [1, 1, 1, 1]>(a, v)
      b = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(c)
    }"""
    given = {"inputs": "float[1,3,16,16] x", "functions": functions, "imports": ', "own": 1'}
    model = graph("y = own.Block(x, w)", {"w": (4, 3, 3, 3)}, **given)
    for lowering, operators in (("convavgpool", {"ConvAvgPool"}), ("none", {"Conv", "AveragePool"})):
        ready = prepare.for_parser(prepare.lowered(load(model), lowering), 10, plugin=True, allow_tf32=False)
        assert not ready.functions and {node.op_type for node in ready.graph.node} - {"Transpose", "Constant"} == operators


@pytest.mark.parametrize(
    ("kind", "shapes", "kept"),
    [
        ("REDUCE", [(8, 64, 4, 4), (8, 64)], True),
        ("REDUCE", [(8, 64, 4, 4), (8, 64, 1, 1)], True),
        ("REDUCE", [(8, 64, 4, 4), (8, 64, 4)], False),
        ("REDUCE", [(-1, 64, 4, 4), (-1, 64)], True),
        ("MATRIX_MULTIPLY", [(-1, 1024), (1024, 1000), (-1, 1000)], True),
        ("MATRIX_MULTIPLY", [(8, 25088), (25088, 4096), (8, 4096)], False),
        ("MATRIX_MULTIPLY", [(1, 24, 4096), (1, 4096, 24), (1, 24, 24)], False),
        ("MATRIX_MULTIPLY", [(4096, 1024), (1024, 4096), (4096, 4096)], False),
        ("CONVOLUTION", [(8, 64, 1, 1), (8, 64, 1, 1)], False),
        ("integers", [(4,), ()], False),
        ("REDUCE", [None, None], False),
    ],
)
def test_sums_over_maps_and_small_products_stay_in_float(kind, shapes, kept):
    class Tensor:
        dtype = "int32" if kind == "integers" else "float"

        def __init__(self, shape) -> None:
            self._shape = shape

        @property
        def shape(self):
            if self._shape is None:
                raise ValueError("of an unknown rank")
            return self._shape

    tensors, kind = [Tensor(shape) for shape in shapes], "REDUCE" if kind == "integers" else kind
    layer = SimpleNamespace(type=kind, precision="half", get_input=tensors.__getitem__, get_output=lambda _: tensors[-1])
    flags = []
    kinds, flag = SimpleNamespace(REDUCE="REDUCE", MATRIX_MULTIPLY="MATRIX_MULTIPLY"), "prefer"
    builder_flags = SimpleNamespace(PREFER_PRECISION_CONSTRAINTS=flag)
    trt = SimpleNamespace(LayerType=kinds, float32="float", float16="half", BuilderFlag=builder_flags)
    network = SimpleNamespace(num_layers=1, get_layer=lambda _: layer)
    keep_heads_in_float(trt, network, SimpleNamespace(set_flag=flags.append))
    assert (layer.precision, flags) == (("float", ["prefer"]) if kept else ("half", []))
