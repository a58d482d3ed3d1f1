# SPDX-License-Identifier: Apache-2.0
"""Fusions in bodies, functions and files, and whose names and constants stay."""

import numpy as np
import onnx
from onnx import helper, numpy_helper

import convpool
from convpool.cli.group import run
from convpool.cli.optimize import command
from convpool.ir import schema
from convpool.ir import schema as domains
from tests.support.fusing import BOTH, NORM, PAIR, RESIDUAL, TAIL, only, operator_nodes, optimize, rewrite
from tests.support.models import graph, operators, weights
from tests.support.rewriting import POOL

IF_BODY = f"""p = Relu(x)
y = If(flag) <
  then_branch = yes () => (float[1,32,6,6] a) {{ {PAIR.replace("y =", "q =")} a = Relu(q) }},
  else_branch = no () => (float[1,32,6,6] c) {{ n = Relu(z) f = Conv<pads=[1,1,1,1]>(n, w) o = {POOL}(f) c = Add(o, r) }}
>"""


def test_inside_a_branch_and_not_across_its_border():
    inputs = "float[1,16,12,12] x, float[1,16,12,12] z, float[1,32,6,6] r, bool flag"
    model = rewrite(graph(IF_BODY, inputs=inputs), 2, "convavgpool")
    assert [node.op_type for node in model.graph.node] == ["Relu", "If"]  # the branch only captures p
    branches = [operators(attribute.g) for attribute in model.graph.node[1].attribute]
    assert branches == [{"ConvAvgPoolRelu": 1}, {"ReluConvAvgPoolAdd": 1}]


def test_inside_a_loop():
    body = (
        "n = Constant<value = int64 {3}>()\ny = Loop(n, flag, x) <body = step (int64 i, bool go, float[1,16,12,12] s) => "
        f"(bool again, float[1,16,12,12] next) {{ again = Identity(go) p = Relu(s) {PAIR.replace('y =', 'o =')} "
        'f = LeakyRelu(o) next = Resize<mode="nearest">(f, , scales) }>'
    )
    constants = {"w": (16, 16, 3, 3), "scales": np.array([1, 1, 2, 2], np.float32)}
    standard = {"AveragePool": 1, "Conv": 1, "Relu": 1, "LeakyRelu": 1}
    for lowering, nodes in (("convavgpool", {"ReluConvAvgPoolLeakyRelu": 1}), ("direct", standard)):
        model = rewrite(graph(body, constants, inputs="float[1,16,12,12] x, bool flag"), 1, lowering)
        loop = next(node for node in model.graph.node if node.op_type == "Loop")
        assert operators(loop.attribute[0].g) == {"Identity": 1, "Resize": 1, **nodes}


def test_inside_a_function_with_constants_of_its_own():
    text = f"""
<domain: "local", opset_import: ["" : 17]>
block (x, w, g, b, m, d) => (y) {{ k = Constant<value = float {{2.0}}>() n = Mul(x, k) p = Relu(n) {PAIR} }}
"""
    model = graph("y = local.block(x, w, g, b, m, d)", NORM, functions=text, imports=', "local": 1')
    found = rewrite(model, 1, "convavgpool")
    assert "AffineReluConvAvgPool" in operators(found.functions[0])
    assert {entry.domain: entry.version for entry in found.functions[0].opset_import} == {"": 17, "ai.convpool": 2}


def test_alpha_of_a_function_s_attribute_is_unknown():
    text = f"""
<domain: "local", opset_import: ["" : 17]>
block <a>(x, w) => (y) {{ p = LeakyRelu<alpha : float = @a>(x) {PAIR} }}
"""
    model = rewrite(graph("y = local.block<a = 0.5>(x, w)", functions=text, imports=', "local": 1'), 1, "convavgpool")
    assert operators(model.functions[0])["LeakyRelu"] == 1


def test_a_node_of_that_name_in_another_domain_is_left_alone():
    model = optimize(graph(f"p = Relu(x)\n{PAIR}"), disable="fuse_prologue").model
    domains.move_to_domain(model, "trt.plugins")
    assert optimize(model, check=0).changed is False


def test_weights_that_something_else_reads_are_not_edited():
    body = f"{TAIL}\nn = Mul(q, c)\nz = Conv(x, w)\ny = Relu(n)"
    model = graph(body, {"c": (32, 1, 1)}, outputs="float[a,b,c,d] y, float[a,b,e,f] z")
    result = rewrite(model, 1, "convavgpool")
    kept = {tensor.name: numpy_helper.to_array(tensor) for tensor in result.graph.initializer}
    assert np.array_equal(kept["w"], numpy_helper.to_array(model.graph.initializer[0]))


def test_domain_of_a_model_in_which_nothing_is_left_to_rewrite(tmp_path):
    onnx.save(graph(f"p = Relu(x)\n{PAIR}"), tmp_path / "in.onnx")
    steps = [[str(tmp_path / "in.onnx"), "-q"], [str(tmp_path / "in.convpool.onnx"), "-q", "--domain", "trt.plugins"]]
    assert [run(command, "convpool-optimize", step) for step in steps] == [0, 0]
    moved = onnx.load(tmp_path / "in.convpool.convpool.onnx")
    assert [node.domain for node in moved.graph.node] == ["trt.plugins"]


def test_constants_that_others_read_stay_as_they_are():
    body = (
        f"n = BatchNormalization(x, g, b, m, d)\np = Relu(n)\n{PAIR.replace('y =', 'q =')}\nt = Mul(q, c)\ny = Relu(t)\n"
        "z = BatchNormalization(x, g, b, m, d)\nu = Mul(x, c2)\nv = Mul(r, c)"
    )
    outputs = "float[a,b,c,d] y, float[a,b,e,f] z, float[a,b,e,f] u, float[a,b,e,f] v"
    model = graph(body, {**NORM, "c": (32, 1, 1), "c2": (16, 1, 1)}, inputs=RESIDUAL, outputs=outputs)
    result = rewrite(model, 1)
    assert operator_nodes(result)[0].op_type == "AffineReluConvAvgPoolRelu"
    before = {tensor.name: tensor for tensor in model.graph.initializer}
    after = {tensor.name: tensor for tensor in result.graph.initializer}
    assert all(after[name] == before[name] for name in (*NORM, "c", "c2"))


def test_names_that_are_taken_are_not_taken_again():
    # Every name that the operator's constants would like to have belongs to something else.
    body = f"{PAIR.replace('y =', 'q =')}\nt = Mul(q, c)\ny = Relu(t)\n"
    body = f"n = BatchNormalization(x, g, b, m, d)\np = Relu(n)\n{body}"
    names = (
        "w_channels_last",
        "w_channels_last_scaled",
        "q_scale",
        "q_shift",
        "q_bias",
        "y_scale",
        "y_shift",
        "y_bias",
        "q_bias_scaled",
        "y_bias_scaled",
        "mean",
        "variance",
        "scaled",
        "activated",
        "pooled",
        "weight",
    )
    body += "\n".join(f"{name} = Relu(x)" for name in names) + f"\nz = Sum({', '.join(names)})"
    model = graph(body, {**NORM, "c": (32, 1, 1)}, outputs="float[a,b,c,d] y, float[a,b,e,f] z")
    assert operator_nodes(rewrite(model, 1))[0].op_type == "AffineReluConvAvgPoolRelu"


def test_external_constants(tmp_path):
    body = f"n = BatchNormalization(x, g, b, m, d)\np = Relu(n)\n{PAIR.replace('y =', 'q =')}\nt = Mul(q, c)\ny = Relu(t)"
    model = graph(body, {**NORM, "c": (32, 1, 1)})
    (tmp_path / "out").mkdir()
    onnx.save(model, tmp_path / "in.onnx", save_as_external_data=True, location="in.data", size_threshold=0)
    optimize(tmp_path / "in.onnx").save(tmp_path / "out" / "out.onnx")
    assert only(onnx.load(tmp_path / "out" / "out.onnx")).op_type == "AffineReluConvAvgPoolRelu"
    assert convpool.verify(tmp_path / "in.onnx", tmp_path / "out" / "out.onnx").passed


def test_a_sparse_initializer_is_a_constant_to_fold():
    values = numpy_helper.from_array(weights((1, 16, 1, 1)).reshape(-1), "t")
    indices = numpy_helper.from_array(np.arange(16, dtype=np.int64), "t_indices")
    model = graph(f"p = Add(x, t)\n{PAIR}")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [1, 16, 1, 1]))
    result = convpool.optimize(model, **BOTH)
    assert only(result.model).op_type == "AffineConvAvgPool" and not result.model.graph.sparse_initializer
    assert result.report.verification.passed


def test_two_branches_of_a_network_scale_the_convolution_between_them_once():
    # The second Mul finds the residual's convolution already scaled by the first.
    body = f"{TAIL}\nr = Conv<strides=[2,2]>(x, v)\nn = Add(q, r)\no = Mul(n, c)\nf = Sub(o, c)\ny = Mul(f, c)"
    model = rewrite(graph(body, {"v": (32, 16, 1, 1), "c": (32, 1, 1)}), 1)
    assert operators(model.graph) == {"Conv": 1, "ConvAvgPoolAdd": 1}
    assert len(model.graph.initializer) == 3  # two weights and the bias


def test_nodes_whose_attributes_a_function_gives_are_left_alone():
    """Beside one that fuses what it reads."""
    inner = optimize(graph(f"p = Relu(x)\n{PAIR}"), disable="fuse_prologue").model
    node = next(node for node in inner.graph.node if node.op_type == "ConvAvgPool")
    first, second = type(node)(), type(node)()
    first.CopyFrom(node)
    second.CopyFrom(node)
    first.input[:], first.output[:] = ["p", "w", "b"], ["s"]
    second.input[:], second.output[:] = ["p", "w", "b"], ["t"]
    group = next(item for item in second.attribute if item.name == "group")
    group.Clear()
    group.name, group.ref_attr_name, group.type = "group", "groups", onnx.AttributeProto.INT
    nodes = [helper.make_node("Relu", ["x"], ["p"]), first, second, helper.make_node("Sub", ["s", "t"], ["y"])]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(schema.DOMAIN, 1)]
    function = helper.make_function("local", "both", ["x", "w", "b"], ["y"], nodes, imports, ["groups"])
    model = onnx.ModelProto()
    model.CopyFrom(inner)
    model.functions.append(function)
    model.opset_import.add(domain="local", version=1)
    call = helper.make_node("both", ["x", *node.input[1:3]], list(node.output), domain="local", groups=1)
    del model.graph.node[:]
    model.graph.node.append(call)
    result = optimize(model)  # the difference is zeros
    body = next(function for function in result.model.functions if function.name == "both").node
    assert [n.op_type for n in body] == ["Relu", "ConvAvgPool", "ConvAvgPool", "Sub"]
