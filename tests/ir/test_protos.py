# SPDX-License-Identifier: Apache-2.0
"""Names that a node reads, also through its bodies."""

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from convpool.ir.protos import _read_names
from tests.support.models import graph


def test_what_a_node_reads_through_its_bodies():
    body = """y = If(flag) <then_branch = yes () => (float[a] t) { u = Add(outer, own) t = Mul(u, x) },
      else_branch = no () => (float[a] late) { v = Neg(x) }>"""
    model = graph(body, inputs="float[4] x, bool flag, float[4] outer, float[4] late", outputs="float[a] y")
    node = model.graph.node[0]
    assert _read_names(node) == {"flag", "outer", "own", "x", "late"}
    node.attribute[0].g.initializer.append(numpy_helper.from_array(np.ones(4, np.float32), "own"))
    assert _read_names(node) == {"flag", "outer", "x", "late"}
    node.attribute[1].g.input.append(helper.make_tensor_value_info("late", TensorProto.FLOAT, [4]))
    assert _read_names(node) == {"flag", "outer", "x"}
