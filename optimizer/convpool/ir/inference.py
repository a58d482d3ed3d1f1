# SPDX-License-Identifier: Apache-2.0
"""Type and shape inference of the operators of ai.convpool, as onnx calls it."""

from __future__ import annotations

import onnx

from convpool.algebra.geometry import ConvSpec, PoolSpec
from convpool.algebra.layouts import LAYOUTS
from convpool.algebra.parts import OP_TYPE

CHANNELS_LAST = "channels_last"
"""The attribute that says where channels stand: a number of `algebra.layouts.LAYOUTS`."""


def infer(context: onnx.shape_inference.InferenceContext) -> None:
    """Output type and shape; unknown input dimensions give unknown output dimensions."""
    x, w = context.get_input_type(0), context.get_input_type(1)
    if x is None or not x.HasField("tensor_type"):
        return
    result = onnx.TypeProto()
    result.tensor_type.elem_type = x.tensor_type.elem_type
    if x.tensor_type.HasField("shape"):
        names = ("kernel_shape", "strides", "pads", "dilations")
        pool = PoolSpec(*(_ints(context, f"pool_{name}") for name in names))
        kernel_shape, strides, pads, dilations = (_ints(context, name) for name in names)
        conv = ConvSpec(kernel_shape, strides, pads, dilations)
        for steps in (pool.strides, conv.strides):
            if min(steps, default=1) < 1:
                raise onnx.shape_inference.InferenceError(f"{OP_TYPE}: strides; got {steps}, expected at least 1")
        dims = x.tensor_type.shape.dim
        if len(dims) != conv.rank + 2:
            raise onnx.shape_inference.InferenceError(
                f"{OP_TYPE}: rank of X; got {len(dims)}, expected {conv.rank + 2} for kernel_shape {conv.kernel_shape}"
            )
        x_last, y_last = _layout(context)
        shape = result.tensor_type.shape
        shape.dim.add().CopyFrom(dims[0])
        out = [shape.dim.add() for _ in range(conv.rank + 1)]
        channels = out.pop(-1 if y_last else 0)
        if w is not None and w.HasField("tensor_type") and w.tensor_type.shape.dim:
            channels.CopyFrom(w.tensor_type.shape.dim[0])
        for i, given in enumerate(dims[1:-1] if x_last else dims[2:]):
            if given.HasField("dim_value"):
                # Axes are independent, so any stand-in serves for the unknown ones.
                size = tuple(given.dim_value for _ in range(conv.rank))
                out[i].dim_value = conv.output_size(pool.output_size(size))[i]
    context.set_output_type(0, result)


def _ints(context: onnx.shape_inference.InferenceContext, name: str) -> tuple[int, ...]:
    """An attribute of a node that onnx has not checked yet.  Raises InferenceError."""
    attribute, kernel = context.get_attribute(name), context.get_attribute("kernel_shape")
    rank = len(kernel.ints) if kernel is not None else 0
    wanted = 2 * rank if name.endswith("pads") else rank
    if attribute is None or len(attribute.ints) != wanted:
        raise onnx.shape_inference.InferenceError(f"{OP_TYPE}: {name}; expected {wanted} sizes")
    return tuple(attribute.ints)


def _layout(context: onnx.shape_inference.InferenceContext) -> tuple[bool, bool]:
    """Whether X and Y have the channels last.  Raises InferenceError."""
    attribute = context.get_attribute(CHANNELS_LAST)
    number = 0 if attribute is None else attribute.i
    if number not in LAYOUTS:
        raise onnx.shape_inference.InferenceError(f"{OP_TYPE}: {CHANNELS_LAST}; got {number}, expected 0 to {max(LAYOUTS)}")
    return LAYOUTS[number]
