# SPDX-License-Identifier: Apache-2.0
"""Models made float32 for the check."""

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from convpool.check.inputs import float_types, to_float32
from convpool.ir.model import LoadedModel
from tests.support.models import graph
from tests.support.rewriting import PAIR


def test_the_floating_point_types_of_a_model():
    assert float_types(graph(PAIR)) == {TensorProto.FLOAT}
    model = graph("y = Cast<to=1>(x)", inputs="float16[4] x", outputs="float[4] y")
    assert float_types(model) == {TensorProto.FLOAT, TensorProto.FLOAT16}
    model.graph.initializer.append(numpy_helper.from_array(np.ones(1), "d"))
    assert float_types(model) == {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE}
    assert float_types(graph("y = Add(x, x)", inputs="int64[4] x", outputs="int64[4] y")) == set()


def test_every_type_of_a_model_becomes_float32():
    functions = """<domain: "local", opset_import: ["": 17]> net (f) => (g) { g = Cast<to=11>(f) }"""
    body = """d = Cast<to=11>(x)
      e = Cast<to=7>(d)
      c = local.net(d)
      k = Constant<value = double[1] {2.0}>()
      s = SequenceConstruct(d, k)
      y = If(flag) <then_branch = yes () => (double[a] t) { t = Identity(c) },
        else_branch = no () => (double[a] u) { u = Neg(d) }>"""
    model = graph(
        body, {"w": (1,)}, inputs="float16[4] x, bool flag", outputs="double[a] y", functions=functions, imports=', "local": 1'
    )
    model.functions[0].value_info.append(helper.make_tensor_value_info("g", TensorProto.DOUBLE, [4]))
    model.graph.value_info.append(helper.make_tensor_sequence_value_info("s", TensorProto.DOUBLE, None))
    optional = helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.BFLOAT16, [1]))
    model.graph.value_info.append(helper.make_value_info("o", optional))
    before = model.SerializeToString()
    found = to_float32(LoadedModel(model, None, 0))
    assert model.SerializeToString() == before
    assert [item.type.tensor_type.elem_type for item in (*found.graph.input, *found.graph.output)] == [1, TensorProto.BOOL, 1]
    casts = [node.attribute[0].i for node in (*found.graph.node, *found.functions[0].node) if node.op_type == "Cast"]
    assert casts == [1, TensorProto.INT64, 1] and found.functions[0].value_info[0].type.tensor_type.elem_type == 1
    (constant,) = [node.attribute[0].t for node in found.graph.node if node.op_type == "Constant"]
    assert numpy_helper.to_array(constant).dtype == np.float32 and numpy_helper.to_array(constant).tolist() == [2]
    sequence, maybe = (value.type for value in found.graph.value_info)
    assert sequence.sequence_type.elem_type.tensor_type.elem_type == 1
    assert maybe.optional_type.elem_type.tensor_type.elem_type == 1
    branches = [
        item.g.output[0].type.tensor_type.elem_type
        for node in found.graph.node
        if node.op_type == "If"
        for item in node.attribute
    ]
    assert branches == [1, 1]
