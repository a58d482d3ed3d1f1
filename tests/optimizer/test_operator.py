"""The operator itself: schema, type and shape inference, function body against the float64 reference."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from convpool import operator, reference
from convpool.geometry import ConvSpec, PoolSpec
from convpool.modelio import LoadedModel
from convpool.verify import make_session

POOL = PoolSpec((2, 3), (1, 1), (1, 0, 0, 1), (1, 1))
CONV = ConvSpec((3, 1), (2, 3), (0, 0, 1, 0), (1, 1), 2)


def model(x_shape, pool=POOL, conv=CONV, bias=True, opset=17) -> onnx.ModelProto:
    names = ["x", "w", "b"] if bias else ["x", "w"]
    node = operator.make_node(names, "y", pool, conv)
    shapes = {"x": x_shape, "w": [6, *conv.kernel_shape, 2], "b": [6]}
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes[name]) for name in names],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(operator.DOMAIN, operator.VERSION)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8, functions=[operator.function_proto(opset)])


def inferred(found: onnx.ModelProto) -> list:
    dims = onnx.shape_inference.infer_shapes(found, strict_mode=True).graph.output[0].type.tensor_type.shape.dim
    names = [dim.dim_param if not dim.dim_param.startswith("unk__") else "" for dim in dims]
    return [dim.dim_value or name or None for dim, name in zip(dims, names, strict=True)]


def test_schema_is_registered_once():
    operator.register_schema()
    schema = onnx.defs.get_schema("ConvAvgPool", 1, "ai.convpool")
    assert schema.has_type_and_shape_inference_function and (schema.min_input, schema.max_input) == (2, 3)


def test_shapes():
    assert inferred(model([2, 4, 10, 11])) == [2, 6, 5, 4]
    assert inferred(model(["N", 4, 10, "W"])) == ["N", 6, 5, None]


def test_wrong_rank_and_strides_are_inference_errors():
    with pytest.raises(onnx.shape_inference.InferenceError, match="rank of X; got 3, expected 4"):
        inferred(model([2, 4, 10]))
    with pytest.raises(onnx.shape_inference.InferenceError, match=r"strides; got \(0, 0\), expected at least 1"):
        inferred(model([2, 4, 10, 11], conv=ConvSpec((3, 1), (0, 0), (0,) * 4, (1, 1), 2)))


@pytest.mark.parametrize("opset", [7, 17, 19, onnx.defs.onnx_opset_version() - 4])
@pytest.mark.parametrize("bias", [False, True])
def test_function_computes_the_reference(bias, opset):
    rng = np.random.default_rng(0)
    x, w, b = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ([2, 4, 10, 11], [6, 3, 1, 2], [6]))
    feed = {"x": x * 6, "w": w, "b": b}  # sixes, so that means over 6 elements are integers, to the rounding of 1/6
    if not bias:
        del feed["b"]
    got = make_session(LoadedModel(model([2, 4, 10, 11], bias=bias, opset=opset), None, 0), optimize=False).run(None, feed)
    expected = reference.conv_avg_pool(feed["x"], w, b if bias else None, POOL, CONV)
    np.testing.assert_allclose(got[0], expected, rtol=0, atol=1e-4)
