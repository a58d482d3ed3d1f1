# SPDX-License-Identifier: Apache-2.0
"""A pair in any type, and what makes another model of it."""

import ml_dtypes  # noqa: F401  numpy knows bfloat16 by it
import numpy as np
import onnx
from onnx import helper, numpy_helper

from tests.support.models import graph

POOL = "AveragePool<kernel_shape=[2,2], strides=[2,2]>"
PAIR = f"h = Conv<pads=[1,1,1,1]>(x, w, b)\ny = {POOL}(h)"
TYPES = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}


def pair(dtype: str = "float32", body: str = PAIR, **given) -> onnx.ModelProto:
    """Convolution with bias and pooling in the given type."""
    given.setdefault("inputs", f"{TYPES[dtype]}[1,16,12,12] x")
    given.setdefault("outputs", f"{TYPES[dtype]}[a,b,c,d] y")
    given.setdefault("opset", 22)  # the first with bfloat16 convolutions
    model = graph(body, {"b": (32,), **given.pop("constants", {})}, ir=10, **given)
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype == np.float32:
            wanted = helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
            tensor.CopyFrom(numpy_helper.from_array(array.astype(wanted), tensor.name))
    return model


def change(model: onnx.ModelProto, name: str, function) -> onnx.ModelProto:
    """A copy in which initializer `name` is `function` of itself."""
    result = onnx.ModelProto.FromString(model.SerializeToString())
    tensor = next(tensor for tensor in result.graph.initializer if tensor.name == name)
    array = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(function(array)).astype(array.dtype), name))
    return result


def swap(array: np.ndarray) -> np.ndarray:
    """Two channels exchanged."""
    return array[:, [1, 0, *range(2, array.shape[1])]]
