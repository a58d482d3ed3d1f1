# SPDX-License-Identifier: Apache-2.0
"""Comparing models whose inputs, outputs and types are less usual than tensors of numbers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import convpool
from convpool.check.compare import compare
from convpool.check.runners import OnnxruntimeRunner
from convpool.check.widen import to_float32
from convpool.errors import ModelError, OptionError
from convpool.ir.model import LoadedModel
from tests.support.models import graph, random_feeds
from tests.support.sessions import run


def words(*given: str) -> onnx.ModelProto:
    """A model that looks strings up."""
    constants = {"words": np.array(given, object)}
    return graph("y = Gather(words, i)", constants, inputs="int64[16] i", outputs="string[16] y")


def test_strings_are_equal_or_not():
    assert convpool.verify(words("a", "b"), words("a", "b", "c")).passed
    found = convpool.verify(words("a", "b"), words("a", "c"))
    assert not found.passed and [output.max_abs_error for output in found.outputs] == [np.inf]


def test_sequences_of_other_lengths():
    """Of one tensor, or of two."""
    models = []
    for inputs in ("x", "x, x"):
        model = graph(f"y = SequenceConstruct({inputs})", inputs="float[2] x", outputs="float[2] y")
        kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [2]))
        model.graph.output[0].CopyFrom(helper.make_value_info("y", kind))
        models.append(model)
    one, two = models
    assert convpool.verify(two, two).passed
    for first, second in ((one, two), (two, one)):
        (output,) = convpool.verify(first, second).outputs
        assert not output.passed and output.max_abs_error == np.inf


def maps(factor: float, labels: str = "[3,5]") -> onnx.ModelProto:
    """A model that gives a sequence of dictionaries."""
    nodes = [
        helper.make_node("Mul", ["x", "k"], ["m"]),
        helper.make_node("ZipMap", ["m"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[3, 5] if labels == "[3,5]" else [3, 4]),
    ]
    kind = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    outputs = [helper.make_value_info("y", helper.make_sequence_type_proto(kind))]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 2])]
    number = helper.make_tensor("k", TensorProto.FLOAT, [], [factor])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 1)]
    return helper.make_model(helper.make_graph(nodes, "maps", inputs, outputs, [number]), opset_imports=opsets, ir_version=8)


def test_maps_are_equal_or_not():
    assert convpool.verify(maps(1), maps(1)).passed
    assert not convpool.verify(maps(1), maps(2)).passed
    assert not convpool.verify(maps(1), maps(1, "[3,4]")).passed


def test_not_a_number_in_other_places():
    given = {"inputs": "float[64] x", "outputs": "float[64] y"}
    model = graph("y = Sqrt(x)", **given)
    assert convpool.verify(model, model).passed
    for other in ("a = Abs(x)\ny = Sqrt(a)", "a = Neg(x)\ny = Sqrt(a)"):
        (output,) = convpool.verify(model, graph(other, **given)).outputs
        assert not output.passed and output.note == "NaN or infinity in other places"


def test_models_without_an_output_in_common():
    one, other = (graph(f"{name} = Relu(x)", outputs=f"float[a,b,c,d] {name}") for name in "yz")
    with pytest.raises(OptionError, match="^no output in common; got y and z$"):
        compare(*(OnnxruntimeRunner(LoadedModel(model, None, 0), "a model") for model in (one, other)))


def test_what_random_inputs_cannot_be_made_for():
    sequence = helper.make_value_info("x", helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, [2])))
    model = graph("y = SequenceAt(x, zero)", {"zero": np.int64(0)}, inputs="float[2] x", outputs="float[a] y")
    model.graph.input[0].CopyFrom(sequence)
    with pytest.raises(ModelError, match="input 'x': not a tensor; give it as data or switch the check off"):
        convpool.verify(model, model)


def test_a_result_that_cannot_be_checked_is_not_given():
    body = "h = Conv<pads=[1,1,1,1]>(x, w)\ny = AveragePool<kernel_shape=[2,2], strides=[2,2]>(h)\nn = SequenceLength(s)"
    model = graph(body, inputs="float[1,16,12,12] x, float[2] s", outputs="float[a,b,c,d] y, int64 n")
    sequence = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [2]))
    model.graph.input[1].CopyFrom(helper.make_value_info("s", sequence))
    assert convpool.optimize(model, check=0).changed
    with pytest.raises(ModelError, match="input 's': not a tensor; give it as data or switch the check off"):
        convpool.optimize(model)


def test_unusable_inputs_are_refused_even_where_nothing_is_rewritten():
    model = graph("y = Relu(x)")
    assert not convpool.optimize(model, input_shapes={"x": [1, 16, 12, 12]}).changed
    with pytest.raises(OptionError, match="input shape: no input 'q'; expected one of x"):
        convpool.optimize(model, input_shapes={"q": [1]})
    with pytest.raises(OptionError, match="data: array 'q'; expected inputs x"):
        convpool.optimize(model, data={"q": np.zeros(1, np.float32)})


def test_a_shape_for_no_input_of_engines_is_refused():
    """Engines say no more of their inputs than names, types and sizes."""
    engine = SimpleNamespace(
        input_names=["x"],
        output_names=["y"],
        input_types={"x": np.dtype(np.float32)},
        precision="fp32",
        runtime="an engine",
        model=None,
        typical_shapes=lambda: {"x": [2]},
        run=lambda arrays: {"y": arrays["x"]},
    )
    assert compare(engine, engine, input_shapes={"x": [3]}).passed
    with pytest.raises(OptionError, match="input shape: no input 'q'; expected one of x"):
        compare(engine, engine, input_shapes={"q": [1]})


def test_data_that_lack_an_input(tmp_path):
    model = graph("y = Add(x, z)", inputs="float[2] x, float[2] z", outputs="float[2] y")
    with pytest.raises(OptionError, match="data: no array for input 'z'; got x"):
        convpool.verify(model, model, data={"x": np.zeros(2, np.float32)})
    with pytest.raises(OptionError, match="data: no array for input 'x'; got none"):
        convpool.verify(model, model, data={})
    np.save(tmp_path / "one.npy", np.zeros(2))
    with pytest.raises(OptionError, match="not a .npz file of named arrays"):
        convpool.verify(model, model, data=tmp_path / "one.npy")


HALF = "float16[2,3] x"
WIDENED = {
    "a sequence": ("s = SequenceConstruct(x, x)\ny = SequenceAt(s, one)", helper.make_sequence_type_proto),
    "an optional": ("s = Optional(x)\ny = OptionalGetElement(s)", helper.make_optional_type_proto),
}


@pytest.mark.parametrize("kind", ["float16", "double"])
@pytest.mark.parametrize("name", WIDENED)
def test_types_of_inner_values_become_float32(name, kind):
    body, wrap = WIDENED[name]
    model = graph(body, {"one": np.int64(1)}, inputs=f"{kind}[2,3] x", outputs=f"{kind}[2,3] y", opset=18)
    elem_type = model.graph.input[0].type.tensor_type.elem_type
    model.graph.value_info.append(helper.make_value_info("s", wrap(helper.make_tensor_type_proto(elem_type, [2, 3]))))
    wide = to_float32(LoadedModel(model, None, 0))
    (x,) = random_feeds(wide).values()
    assert x.dtype == np.float32
    np.testing.assert_array_equal(run(wide, {"x": x})[0], x)
    assert convpool.verify(model, model).passed


def test_types_within_functions_and_of_attributes_become_float32():
    functions = """<opset_import: ["": 17], domain: "local">
    halved (a) => (b) { c = Neg(a) e = EyeLike<dtype=10>(c) d = Cast<to=10>(e) b = Add(c, d) }"""
    given = {"inputs": "float16[3,3] x", "outputs": "float16[3,3] y", "ir": 10}
    model = graph("y = local.halved(x)", functions=functions, imports=', "local": 1', **given)
    model.functions[0].value_info.append(helper.make_tensor_value_info("c", TensorProto.FLOAT16, [3, 3]))
    wide = to_float32(LoadedModel(model, None, 0))
    assert wide.functions[0].value_info[0].type.tensor_type.elem_type == TensorProto.FLOAT
    x = random_feeds(wide)["x"]
    np.testing.assert_array_equal(run(wide, {"x": x})[0], np.eye(3, dtype=np.float32) - x)
