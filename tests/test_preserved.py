# SPDX-License-Identifier: Apache-2.0
"""Preserved by a rewrite: names, documentation, metadata, shapes, order; and consistency."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import convpool
from convpool.ir import schema
from convpool.ir.protos import value_names
from tests.support.models import graph, operators, sparse_of, weights
from tests.support.rewriting import IF_BODY, IF_INPUTS, PAIR, POOL, assert_close, rewrite, verified

LOWERINGS = ("convavgpool", "direct", "fused")
PLAIN = {"disable": ("fuse_prologue", "fuse_epilogue")}


def documented() -> onnx.ModelProto:
    """A pair with everything that a model can say about itself."""
    model = graph(PAIR + "\nz = Relu(y)", inputs="float[batch,16,12,width] x", outputs="float[batch,32,6,half] z", opset=19)
    model.producer_name, model.producer_version, model.domain = "someone", "1.2", "org.example"
    model.model_version, model.doc_string = 7, "a model"
    model.metadata_props.add(key="author", value="somebody")
    main = model.graph
    main.name, main.doc_string = "network", "a graph"
    main.metadata_props.add(key="graph", value="property")
    main.input[0].doc_string, main.output[0].doc_string = "pictures", "features"
    for node, name in zip(main.node, ("the conv", "the pool", "the relu"), strict=True):
        node.name, node.doc_string = name, f"about {name}"
        node.metadata_props.add(key="namespace", value=name)
        devices = node.device_configurations.add(configuration_id="two", pipeline_stage=len(name))
        for tensor in (*node.input, *node.output):
            devices.sharding_spec.add(tensor_name=tensor)
    model.configuration.add(name="two", num_devices=2)
    for name in ("h", "y", "w", "x"):
        main.quantization_annotation.add(tensor_name=name).quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="scale")
    main.initializer.append(numpy_helper.from_array(np.float32(1), "scale"))
    return model


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_names_documentation_and_metadata(lowering):
    model = documented()
    result = rewrite(model, 1, lowering, **PLAIN)
    for name in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
        assert getattr(result, name) == getattr(model, name)
    assert list(result.metadata_props) == list(model.metadata_props)
    assert list(result.graph.metadata_props) == list(model.graph.metadata_props)
    assert (result.graph.name, result.graph.doc_string) == ("network", "a graph")
    assert list(result.graph.input) == list(model.graph.input)
    assert list(result.graph.output) == list(model.graph.output)
    conv = next(node for node in result.graph.node if node.op_type in ("Conv", "ConvAvgPool"))
    assert (conv.name, conv.doc_string) == ("the conv", "about the conv")
    assert list(conv.metadata_props) == list(model.graph.node[0].metadata_props)
    assert list(result.configuration) == list(model.configuration)
    devices = [(item.pipeline_stage, [spec.tensor_name for spec in item.sharding_spec]) for item in conv.device_configurations]
    assert devices == [(len("the conv"), {"convavgpool": ["x"], "direct": ["w"], "fused": ["x"]}[lowering])]
    assert result.graph.node[-1] == model.graph.node[-1]
    names = [node.name for node in result.graph.node]
    assert len(names) == len(set(names))
    if lowering == "direct":
        pool = result.graph.node[0]
        assert (pool.name, pool.doc_string, len(pool.metadata_props)) == ("the pool", "about the pool", 1)


def test_annotations_of_tensors_that_are_gone_go():
    result = rewrite(documented(), 1, "fused")
    assert [item.tensor_name for item in result.graph.quantization_annotation if item.tensor_name == "h"] == []
    assert "w" not in {item.tensor_name for item in result.graph.quantization_annotation}
    assert {"y", "x"} <= {item.tensor_name for item in result.graph.quantization_annotation}


def test_constants_that_an_annotation_names_stay():
    model = graph(PAIR.replace("(h)", "(m)").replace("\ny", "\nm = Mul(h, scale)\ny"), {"scale": np.float32(2)})
    model.graph.quantization_annotation.add(tensor_name="y").quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="scale")
    result = convpool.optimize(model, check=0).model
    assert "Mul" not in {node.op_type for node in result.graph.node}
    assert "scale" in {tensor.name for tensor in result.graph.initializer}


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_value_info_covers_new_tensors_and_drops_old_ones(lowering):
    model = onnx.shape_inference.infer_shapes(documented())
    assert {value.name for value in model.graph.value_info} == {"h", "y"}
    result = rewrite(model, 1, lowering, **PLAIN)
    made = {name for node in result.graph.node for name in node.output} - {"z"}
    infos = {value.name: value.type.tensor_type for value in result.graph.value_info}
    assert made <= set(infos) and "h" not in infos
    assert infos["y"] == model.graph.value_info[[value.name for value in model.graph.value_info].index("y")].type.tensor_type
    if lowering == "direct":
        dims = infos["y_pooled_input"].shape.dim
        assert [dims[0].dim_param, dims[1].dim_value, dims[2].dim_value] == ["batch", 16, 13]


UNKNOWN_IF = """r = If(flag) <then_branch = yes () => (float[a,b,c,d] t) { t = com.microsoft.Gelu(x) },
  else_branch = no () => (float[a,b,c,d] e) { e = com.microsoft.Gelu(x) }>"""


@pytest.mark.parametrize(
    ("body", "claimed", "found"),
    [
        ("r = Relu(x)", 12, 6),
        ("r = Reshape(x, s)", 6, None),  # by whoever runs it
        ("r = com.microsoft.Gelu(x)", 6, 6),
        (UNKNOWN_IF, 6, 6),
        ("z = com.microsoft.Gelu(x)\nr = MaxPool<ceil_mode=1, kernel_shape=[1,1], strides=[3,3]>(z)", 6, 2),  # onnx says 3
        ("z = Relu(x)\nr = com.microsoft.Gelu(z)", 12, None),  # z is noted so too
    ],
)
def test_value_info_counts_where_the_inputs_do_not_contradict_it(body, claimed, found):
    text = f"{body}\nh = Conv<pads=[1,1,1,1]>(r, w)\ny = GlobalAveragePool(h)"
    inputs = "float[1,16,6,6] x" + (", int64[n] s" if "s)" in body else "") + (", bool flag" if "flag" in body else "")
    model = graph(text, inputs=inputs, imports=', "com.microsoft": 1')
    for name in "rz" if "z =" in body else "r":
        model.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 16, claimed, claimed]))
    feeds = {"x": weights((1, 16, 6, 6)), "s": np.array([1, 16, 6, 6]), "flag": np.array(True)}
    result = convpool.optimize(model, data={value.name: feeds[value.name] for value in model.graph.input})
    attributes = {item.name: item for item in result.model.graph.node[-1].attribute}
    assert result.changed == (found is not None)
    assert found is None or list(attributes["pool_kernel_shape"].ints) == [found, found]


def test_sizes_noted_behind_an_unknown_operator_do_not_count_beside_open_ones():
    body = "r = com.microsoft.Gelu(x)\nh = Conv<pads=[1,1,1,1]>(r, w)\ny = GlobalAveragePool(h)"
    model = graph(body, inputs="float[1,16,H,W] x", imports=', "com.microsoft": 1')
    model.graph.value_info.append(helper.make_tensor_value_info("r", TensorProto.FLOAT, [1, 16, 8, 8]))
    assert not convpool.optimize(model, check=0).changed


def test_new_tensors_of_a_branch_are_annotated_where_any_graph_was():
    model = graph(f"{IF_BODY}\nz = Relu(y)", {"v": (32, 16, 3, 3)}, inputs=IF_INPUTS, outputs="float[a,b,c,d] z")
    model.graph.value_info.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 32, 6, 6]))
    for attribute in rewrite(model, 2, "direct").graph.node[0].attribute:
        new = {node.output[0] for node in attribute.g.node} - {attribute.g.output[0].name}
        assert new and new <= {value.name for value in attribute.g.value_info}


def test_no_value_info_where_there_was_none():
    assert len(rewrite(documented(), 1, "direct").graph.value_info) == 0


def test_new_names_avoid_those_taken():
    body = PAIR + "\nw_fused = Relu(x)\nu, w_fused_1 = Dropout(w_fused)"
    result = rewrite(graph(body, outputs="float[a,b,c,d] y, float[1,16,12,12] u"), 1, "fused")
    assert [tensor.name for tensor in result.graph.initializer] == ["w_fused_2"]


def test_names_that_onnxruntime_gives_again_where_it_inlines_functions(tmp_path):
    body = f"g = Conv<pads=[1,1,1,1]>(x, u)\nq = {POOL}(g)\nh = Conv<pads=[1,1,1,1]>(q, w)\ny = {POOL}(h)"
    model = graph(body, {"u": (16, 16, 3, 3), "w": (32, 16, 3, 3)})
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.optimized_model_filepath = str(tmp_path / "saved.onnx")
    onnxruntime.InferenceSession(rewrite(model, 1, None, exclude="h").SerializeToString(), options)
    assert "_inlfunc_ConvAvgPool_pooled" in value_names(saved := onnx.load(options.optimized_model_filepath))
    assert_close(model, rewrite(saved, 1, None))


def test_every_name_that_a_model_has():
    functions = """<domain: "local", opset_import: ["": 17]> net (f) => (g) { inside = Relu(f) g = Neg(inside) }"""
    body = "h = Relu(x)\ny = If(flag) <then_branch = yes () => (float[a,b,c,d] t) { t = Add(h, own) }, "
    body += "else_branch = no () => (float[a,b,c,d] e) { e = local.net(h) }>"
    model = graph(body, {"own": (1,), "h": ()}, inputs=IF_INPUTS, functions=functions)
    model.graph.node[0].name = "first"
    model.graph.initializer[-1].name = "unread"
    model.graph.sparse_initializer.append(sparse_of(np.ones(4), "sparse"))
    named = value_names(model) - {""}
    assert named == {"x", "flag", "h", "y", "t", "e", "own", "unread", "first", "sparse", "f", "g", "inside"}


def test_new_names_avoid_those_of_bodies():
    inner = "w_fused = Relu(x) {0} = Neg(w_fused)"
    body = f"""{PAIR}\nz = If(flag) <then_branch = yes () => (float[1,16,12,12] a) {{ {inner.format("a")} }},
      else_branch = no () => (float[1,16,12,12] b) {{ {inner.format("b")} }}>"""
    model = graph(body, inputs=IF_INPUTS, outputs="float[a,b,c,d] y, float[1,16,12,12] z")
    assert [tensor.name for tensor in rewrite(model, 1, "fused").graph.initializer] == ["w_fused_1"]


def test_order_stays_topological_where_the_average_starts_before_the_weights():
    body = f"""x2 = Relu(x) n = Sigmoid(v) h = Conv<pads=[1,1,1,1]>(x2, w) m = Mul(h, n) o = Tanh(v) k = Add(m, o)
y = {POOL}(k) z = Relu(y)"""
    model = graph(body, inputs="float[1,16,12,12] x, float[1,32,1,1] v", outputs="float[a,b,c,d] z")
    result = rewrite(model, 1, "convavgpool", **PLAIN)
    seen = {"x", "v", *(tensor.name for tensor in result.graph.initializer)}
    for node in result.graph.node:
        assert set(node.input) <= seen
        seen |= set(node.output)
    assert operators(result.graph) == {"Add": 1, "ConvAvgPool": 1, "Mul": 1, "Relu": 2, "Sigmoid": 1, "Tanh": 1}


def test_constants_that_something_else_reads_stay():
    body = f"c = Conv<pads=[1,1,1,1]>(x, w)\nh = Mul(c, k)\ny = {POOL}(h)\nz = Mul(y, k)"
    result = rewrite(graph(body, {"k": np.float32(3)}, outputs="float[a,b,c,d] z"), 1)
    assert {tensor.name for tensor in result.graph.initializer} == {"k", "w_scaled"}


def test_constants_that_only_a_branch_reads_stay():
    body = PAIR.replace("y =", "p =").replace("h =", "g =").replace("(h)", "(g)") + "\n" + IF_BODY
    model = graph(body, {"v": (32, 16, 3, 3)}, inputs=IF_INPUTS, outputs="float[a,b,c,d] y, float[a,b,c,d] p")
    result = convpool.optimize(model, check=1, lowering="fused", exclude=["a", "b"]).model
    assert {"w", "v", "w_fused"} == {tensor.name for tensor in result.graph.initializer}


GAPS = {
    "a graph without a name": lambda model: model.graph.ClearField("name"),
    "an output by its name alone": lambda model: model.graph.output[0].ClearField("type"),
    "a key of metadata twice": lambda model: model.metadata_props.extend([*model.metadata_props]),
}


@pytest.mark.parametrize("leave", GAPS.values(), ids=GAPS)
def test_what_onnxs_checker_alone_refuses_is_rewritten_and_stays(leave):
    model = documented()
    leave(model)
    result = verified(model, 1).model
    assert (result.graph.name, list(result.graph.output)) == (model.graph.name, list(model.graph.output))
    assert list(result.metadata_props) == list(model.metadata_props)


def test_ir_version_rises_only_for_the_function():
    assert rewrite(graph(PAIR, ir=7), 1, "direct").ir_version == 7
    assert rewrite(graph(PAIR, ir=7), 1, "convavgpool").ir_version == schema.MIN_IR_VERSION
    assert rewrite(graph(PAIR, ir=10), 1, "convavgpool").ir_version == 10


def test_training_information_and_unused_initializers_stay():
    model = graph(PAIR)
    model.graph.initializer.append(numpy_helper.from_array(weights((3,)), "unused"))
    model.training_info.add().algorithm.name = "training"
    result = rewrite(model, 1, "direct")
    assert list(result.training_info) == list(model.training_info)
    assert "unused" in {tensor.name for tensor in result.graph.initializer}


@pytest.mark.parametrize("reads", [False, True], ids=["assigned", "read"])
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_weights_that_training_changes_or_reads_stay_as_they_are(lowering, reads):
    model = graph(f"{PAIR.replace('y =', 'p =')}\ny = Mul(p, k)", {"k": (32, 1, 1)})
    training = model.training_info.add()
    for name, binding in (("w", training.update_binding), ("k", training.initialization_binding)):
        if reads:
            training.algorithm.node.append(helper.make_node("Identity", [name], ["h_bias"]))
        else:
            binding.add(key=name, value=f"{name}_new")
    result = convpool.optimize(model, check=1, lowering=lowering)
    assert result.changed == (lowering != "fused")
    kept = {tensor.name: tensor for tensor in result.model.graph.initializer}
    assert [kept[tensor.name] for tensor in model.graph.initializer] == list(model.graph.initializer)
    used = {name for node in result.model.graph.node for name in node.input}
    assert {"w", "k"} <= used and not (reads and "h_bias" in used)
