# SPDX-License-Identifier: Apache-2.0
"""A model's outputs in float64: onnx's reference evaluator with the windowed operators done by slices and matrix products.

onnxruntime has no float64 convolution, and onnx's own takes minutes for a real network.
"""

import functools
import itertools

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun


def windows(x: np.ndarray, kernel, strides, pads, dilations, fill: float):
    """For every tap of a window over x [N, C, spatial...] the values that it meets, [N, C, places...]."""
    rank = len(kernel)
    x = np.pad(x, [(0, 0), (0, 0), *((pads[i], pads[i + rank]) for i in range(rank))], constant_values=fill)
    places = [(x.shape[2 + i] - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1 for i in range(rank)]
    for tap in itertools.product(*map(range, kernel)):
        index = tuple(
            slice(tap[i] * dilations[i], tap[i] * dilations[i] + (places[i] - 1) * strides[i] + 1, strides[i])
            for i in range(rank)
        )
        yield tap, x[(slice(None), slice(None), *index)]


class Conv(OpRun):
    """Convolution: one matrix product per tap and group."""

    def _run(self, x, w, b=None, auto_pad=None, dilations=None, group=None, kernel_shape=None, pads=None, strides=None):
        rank = x.ndim - 2
        assert auto_pad in (None, "NOTSET")
        kernel = w.shape[2:]
        pads, strides, dilations = pads or [0] * 2 * rank, strides or [1] * rank, dilations or [1] * rank
        group, total = group or 1, None
        for tap, values in windows(x, kernel, strides, pads, dilations, 0.0):
            parts = [
                np.tensordot(wg[(slice(None), slice(None), *tap)], xg, axes=(1, 1))
                for wg, xg in zip(np.split(w, group), np.split(values, group, axis=1), strict=True)
            ]
            part = np.concatenate(parts)  # [M, N, places...]
            total = part if total is None else total + part
        y = np.moveaxis(total, 0, 1)
        return (y if b is None else y + b.reshape(1, -1, *([1] * rank)),)


def pooled(x: np.ndarray, fill: float, *, kernel_shape, auto_pad=None, ceil_mode=None, dilations=None, pads=None, strides=None):
    """The values that each tap of a pooling's window meets, by its attributes; ceil_mode must be off."""
    rank = x.ndim - 2
    assert auto_pad in (None, "NOTSET") and not ceil_mode
    geometry = (kernel_shape, strides or [1] * rank, pads or [0] * 2 * rank, dilations or [1] * rank)
    return (values for _, values in windows(x, *geometry, fill))


class AveragePool(OpRun):
    """Average pooling."""

    def _run(self, x, count_include_pad=None, **attributes):
        ones = np.ones_like(x[:1, :1])
        count = np.prod(attributes["kernel_shape"]) if count_include_pad else sum(pooled(ones, 0.0, **attributes))
        return (sum(pooled(x, 0.0, **attributes)) / count,)


class MaxPool(OpRun):
    """Maximum pooling."""

    def _run(self, x, storage_order=None, **attributes):
        return (functools.reduce(np.maximum, pooled(x, -np.inf, **attributes)),)


def to_float64(model: ModelProto) -> ModelProto:
    """A copy of a float32 model with every weight and input in float64; no value changes."""
    copy = ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            name = tensor.name
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), name))
    for node in copy.graph.node:
        assert node.op_type != "Cast", "a Cast would round"
        for attribute in node.attribute:
            if attribute.HasField("t") and attribute.t.data_type == TensorProto.FLOAT:
                value = numpy_helper.to_array(attribute.t).astype(np.float64)
                attribute.CopyFrom(helper.make_attribute(attribute.name, numpy_helper.from_array(value)))
    for value in (*copy.graph.input, *copy.graph.output, *copy.graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    return copy


def run_float64(model: ModelProto, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs by name of a float32 model of standard operators, computed in float64."""
    evaluator = ReferenceEvaluator(to_float64(model), new_ops=[Conv, AveragePool, MaxPool])
    feed = {name: x.astype(np.float64) if x.dtype.kind == "f" else x for name, x in inputs.items()}
    outputs = dict(zip(evaluator.output_names, evaluator.run(None, feed), strict=True))
    assert all(value.dtype == np.float64 for value in outputs.values())
    return outputs
