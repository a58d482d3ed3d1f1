# SPDX-License-Identifier: Apache-2.0
"""Parts of the check: sessions as they are asked for, models made float32, and what a verdict says in words."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from convpool.check.inputs import float_types, to_float32
from convpool.check.judge import OutputErrors, Verification, _percent
from convpool.check.session import fitted, make_session
from convpool.ir.model import LoadedModel
from tests.support.models import graph
from tests.support.rewriting import PAIR


@pytest.mark.parametrize(
    ("given", "threads", "spins", "level"),
    [
        ({"optimize": False}, 0, "0", onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL),
        ({"optimize": True}, 0, "0", onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL),
        ({"optimize": True, "spin": True, "threads": 3}, 3, "1", onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL),
    ],
)
def test_what_a_session_is_made_with(monkeypatch, given, threads, spins, level):
    made = []
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *words, **more: made.append((*words, more)))
    for folder in (None, Path("/data")):
        make_session(LoadedModel(graph(PAIR), folder, 0), **given)
        content, options, more = made.pop()
        assert onnx.load_from_string(content) == graph(PAIR) and more == {"providers": ["CPUExecutionProvider"]}
        assert (options.intra_op_num_threads, options.graph_optimization_level, options.log_severity_level) == (threads, level, 4)
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == spins
        if folder:
            assert options.get_session_config_entry("session.model_external_initializers_file_folder_path") == "/data"


def test_arrays_are_float32_where_the_session_s_input_is():
    inputs = [SimpleNamespace(name=name, type=kind) for name, kind in (("x", "tensor(float)"), ("h", "tensor(float16)"))]
    half = np.ones(2, np.float16)
    found = fitted(SimpleNamespace(get_inputs=lambda: inputs), {"x": half, "h": half})
    assert found["x"].dtype == np.float32 and found["h"] is half


def test_the_floating_point_types_of_a_model():
    assert float_types(graph(PAIR)) == {TensorProto.FLOAT}
    model = graph("y = Cast<to=1>(x)", inputs="float16[4] x", outputs="float[4] y")
    assert float_types(model) == {TensorProto.FLOAT, TensorProto.FLOAT16}
    model.graph.initializer.append(numpy_helper.from_array(np.ones(1), "d"))
    assert float_types(model) == {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE}
    whole = graph("y = Add(x, x)", inputs="int64[4] x", outputs="int64[4] y")
    assert float_types(whole) == set()


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


def verdict(*outputs: OutputErrors) -> Verification:
    return Verification(False, "the original", 1, {}, list(outputs), "little")


def test_a_verdict_in_words():
    fine = OutputErrors("fine", 9.0, 9.0, True)
    small, large = OutputErrors("small", 2.0, 0.1, False), OutputErrors("large", 1.0, 0.25, False)
    odd = OutputErrors("odd", 0.0, 0.0, False, "every value is NaN")
    assert (
        verdict(fine, small, large).difference
        == "output 'large' differs; got 1 absolute, 0.25 relative error, expected at most little"
    )
    noted = OutputErrors("noted", 1.0, 0.5, False, "another shape")
    assert (
        verdict(small, noted).difference
        == "output 'noted' differs; got another shape, 0.5 relative error, expected at most little"
    )
    assert verdict(fine).difference.startswith("no output can be compared; ")
    assert verdict(fine, odd).difference.startswith("output 'odd' cannot be compared; every value is NaN; ")
    assert [verdict(*outputs).differs for outputs in ((fine,), (odd,), (odd, small))] == [False, False, True]


def test_shares_that_are_not_finite_in_words():
    assert verdict(OutputErrors("a", 0, 0, True)).not_finite == ""
    found = verdict(
        OutputErrors("a", 0, 0, True, "", 0.25), OutputErrors("b", 0, 0, True), OutputErrors("c", 0, 0, True, "", 1.0)
    )
    assert found.not_finite == "25 % of a, 100 % of c is NaN or infinite in both"
    assert [_percent(share) for share in (1e-9, 0.0005, 0.5, 0.99999, 1)] == ["0.1 %", "0.1 %", "50 %", "99.9 %", "100 %"]
