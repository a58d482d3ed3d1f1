# SPDX-License-Identifier: Apache-2.0
"""What is known of a convolution: its attributes, weights and sizes."""

from __future__ import annotations

from onnx import TensorProto

from convpool.algebra.geometry import ConvSpec, PoolSpec
from convpool.algebra.pads import same_pads
from convpool.ir.index import Scope
from convpool.ir.protos import FLOATS, attributes, is_op, known_attributes
from convpool.passes.base import Context, Reject, malformed, reject, rejection
from convpool.passes.runtime import against_node
from convpool.passes.sizes import spatial_size
from convpool.passes.tree import ConvLeaf

RANK = 2
"""Spatial axes of what becomes a node of the operator without being a pair."""
WINDOW = PoolSpec((1,) * RANK, (1,) * RANK, (0,) * (2 * RANK), (1,) * RANK)
"""A pooling of one element."""
POINT = ConvSpec(WINDOW.kernel_shape, WINDOW.strides, WINDOW.pads, WINDOW.dilations)
"""A convolution of one element."""
NOMINAL_CHANNELS = 64
"""Stands for a channel count that is unknown, in cost comparisons only."""


def conv_rank(scope: Scope, index: int) -> int | None:
    """Number of spatial axes of a convolution, None where neither its attributes nor its weights tell."""
    node = scope.nodes[index]
    shape = scope.info(node.input[1]).shape
    if shape is not None:
        return len(shape) - 2 if len(shape) > 2 else None
    kernel = (known_attributes(node) or {}).get("kernel_shape")
    return len(kernel) if kernel else None


def is_int8(scope: Scope, index: int) -> bool:
    """Whether a convolution reads what DequantizeLinear gives: TensorRT runs it on the integers."""
    producer = scope.producer.get(scope.nodes[index].input[0])
    return producer is not None and is_op(scope.nodes[producer], "DequantizeLinear")


def channel_count(scope: Scope, name: str) -> int | None:
    """A tensor's channels, or those that weights take; None where they are unknown."""
    shape = scope.info(name).shape
    return shape[1] if shape is not None and len(shape) > 1 and isinstance(shape[1], int) else None


def conv_leaf(scope: Scope, index: int, rank: int) -> ConvLeaf | Reject:
    """Attributes, weights and sizes of convolution `index`, or why they cannot be known."""
    node = scope.nodes[index]
    values = attributes(node)
    weight_shape = scope.info(node.input[1]).shape
    kernel = tuple(values.get("kernel_shape") or (weight_shape[2:] if weight_shape else ()))
    if len(kernel) != rank or not all(isinstance(dim, int) for dim in kernel):
        return reject(scope, index, "shape of the weights", weight_shape, f"a static kernel with {rank} axes")
    if (wrong := malformed(scope, index, {**values, "kernel_shape": kernel}, rank)) is not None:
        return wrong
    if weight_shape is not None and kernel != tuple(weight_shape[2:]):
        return reject(scope, index, "kernel_shape", list(kernel), f"{list(weight_shape[2:])}, as the weights have")
    if (kind := scope.info(node.input[1]).elem_type) and kind not in FLOATS:
        return reject(scope, index, "type of the weights", TensorProto.DataType.Name(kind), "floating point")
    channels = weight_shape[:2] if weight_shape is not None else (None, None)
    known = all(isinstance(dim, int) for dim in channels)
    m, c = (dim if isinstance(dim, int) else NOMINAL_CHANNELS for dim in channels)
    strides = tuple(values.get("strides") or (1,) * rank)
    dilations = tuple(values.get("dilations") or (1,) * rank)
    size = spatial_size(scope, node.input[0], rank)
    auto_pad = values.get("auto_pad", b"NOTSET").decode(errors="replace")
    pads = tuple(values.get("pads") or (0,) * (2 * rank)) if auto_pad == "NOTSET" else (0,) * (2 * rank)
    if auto_pad.startswith("SAME"):
        if size is None and any(s > 1 for s in strides):
            return reject(scope, index, "auto_pad", f"{auto_pad} with strides on an unknown size", "explicit pads")
        pads = same_pads(auto_pad, kernel, strides, dilations, size)
    conv = ConvSpec(kernel, strides, pads, dilations, int(values.get("group", 1)))
    bias = node.input[2] if len(node.input) > 2 else ""
    if known and bias and (shape := scope.info(bias).shape) is not None and shape != (m,):
        if all(isinstance(dim, int) for dim in shape):
            return reject(scope, index, "shape of the bias", list(shape), [m])
    return ConvLeaf(
        index,
        node.input[0],
        conv,
        scope.weights(node.input[1]),
        scope.constant(bias) if bias else None,
        (m, c, *kernel),
        size if known else None,
        nodes=(index,),
    )


def constant_leaf(scope: Scope, index: int, context: Context) -> ConvLeaf | Reject:
    """As `conv_leaf`, of a convolution over two axes with constant weights that can be a node of the operator."""
    rank = conv_rank(scope, index)
    if rank != RANK:
        return reject(scope, index, "spatial axes", "an unknown number" if rank is None else rank, RANK)
    leaf = conv_leaf(scope, index, rank)
    if isinstance(leaf, Reject):
        return leaf
    if (found := against_node(scope, leaf.conv, context.main_opset)) is not None:
        return rejection(scope, index, found)
    if leaf.weight is None:
        return reject(scope, index, "weights", "computed, or an input that a caller may override", "a constant")
    return leaf
