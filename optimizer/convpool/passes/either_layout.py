# SPDX-License-Identifier: Apache-2.0
"""Nodes that work in either layout, and what they become in the other one: with the channels last, or first.

| node | becomes |
|---|---|
| elementwise, on tensors of one rank and constants | itself; constants are turned |
| BatchNormalization with constants | Mul and Add; only with the channels first |
| Concat; Pad by constants; a sum or mean that keeps its axes | itself, along other axes |
| GlobalAveragePool | ReduceMean; only with the channels first |
| a sum or mean over space that drops it; Flatten, Reshape, Squeeze of what is the same in both layouts | itself |
| Transpose | itself, by another permutation; nothing, or Identity, where that changes nothing |

`to` says into which layout: it gives the permutation for a number of spatial axes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, helper

from convpool.algebra.layouts import to_channels_last
from convpool.ir.index import Dim, Scope
from convpool.ir.protos import is_op, known_attributes
from convpool.passes.base import Reject
from convpool.passes.edit import Edit
from convpool.passes.linear import pad_numbers

To = Callable[[int], list[int]]
"""A layout: gives the permutation into it for a number of spatial axes, as those of `algebra.layouts` do."""

UNARY = (
    *("Relu", "LeakyRelu", "Elu", "Selu", "Celu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Softplus", "Softsign", "Gelu"),
    *("Mish", "ThresholdedRelu", "Abs", "Neg", "Exp", "Log", "Sqrt", "Reciprocal", "Erf", "Floor", "Ceil", "Round", "Sign"),
    *("Identity", "Dropout", "Cast", "Clip"),
)
"""Elementwise operators of one tensor; the other inputs of Clip and Dropout are scalars."""
ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum", "Mean", "PRelu")
"""Elementwise operators of several tensors, with broadcasting."""
SUMS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare")
KEEPS = ("GlobalAveragePool",)
VIEWS = ("Flatten", "Reshape", "Squeeze")


def rank_of(scope: Scope, name: str) -> int | None:
    """A tensor's number of axes, None where it is unknown."""
    shape = scope.info(name).shape
    return None if shape is None else len(shape)


def joined(scope: Scope, index: int, to: To = to_channels_last) -> tuple[str, ...] | None:
    """The tensors of a node that are laid out alike, where it works in either layout; None where it does not."""
    node = scope.nodes[index]
    values = known_attributes(node)
    if values is None or len(list(filter(None, node.output))) != 1:
        return None
    names: Sequence[str] = ()
    if is_op(node, *UNARY) or to is to_channels_last and is_op(node, "GlobalAveragePool", "BatchNormalization"):
        names = (node.input[0], node.output[0])
        if is_op(node, "BatchNormalization") and not _is_plain_norm(scope, node, values):
            return None
    elif is_op(node, *ELEMENTWISE):
        names = (*(name for name in node.input if scope.constant(name) is None), node.output[0])
        ranks = [rank_of(scope, name) for name in (names[0], *node.input)]
        if len(names) < 2 or None in ranks or ranks[0] != max(rank or 0 for rank in ranks):
            return None
    elif is_op(node, "Concat"):
        names = (*node.input, node.output[0])
    elif is_op(node, *SUMS) and _keeps_axes(scope, index) or is_op(node, "Pad") and _pads(scope, index) is not None:
        names = (node.input[0], node.output[0])
    axes = {rank_of(scope, name) for name in names}
    return tuple(names) if len(axes) == 1 and (axes.pop() or 0) > 2 else None


def _is_plain_norm(scope: Scope, node: NodeProto, values: dict[str, Any]) -> bool:
    """Whether a BatchNormalization is a map per channel by constants."""
    per_channel = values.get("spatial", 1) and not values.get("training_mode", 0)
    return bool(per_channel) and all(scope.constant(name) is not None for name in node.input[1:])


def axes_of(scope: Scope, index: int) -> tuple[int, ...] | None:
    """The axes that a sum is over, from 0 on; None where they are not known, or all are meant."""
    node = scope.nodes[index]
    rank, values = rank_of(scope, node.input[0]), known_attributes(node)
    if rank is None or values is None:
        return None
    axes = values.get("axes") or (scope.constant_ints(node.input[1]) if len(node.input) > 1 and node.input[1] else None)
    return tuple(sorted(axis % rank for axis in axes)) if axes else None


def _keeps_axes(scope: Scope, index: int) -> bool:
    """Whether a sum keeps its axes; onnxruntime and onnx take no other number than 1 for that."""
    return (known_attributes(scope.nodes[index]) or {}).get("keepdims", 1) == 1 and axes_of(scope, index) is not None


def _pads(scope: Scope, index: int) -> tuple[int, ...] | None:
    """The pads on all axes, begins then ends; None where they are no constants."""
    rank = rank_of(scope, scope.nodes[index].input[0])
    found = pad_numbers(scope, index, rank - 2) if rank is not None else None
    return None if found is None or isinstance(found, Reject) else found[0]


def keeps_order(shape: Sequence[Dim], to: To, gone: Container[int] = ()) -> bool:
    """Whether the elements stand in memory as they would in the other layout, once the axes `gone` are summed over."""
    left = [axis for axis in to(len(shape) - 2) if shape[axis] != 1 and axis not in gone]
    return left == sorted(left)


def reads_any(scope: Scope, index: int, to: To = to_channels_last) -> bool:
    """Whether a node gives the same from either layout of its first input, once it is told of it."""
    node = scope.nodes[index]
    shape = scope.info(node.input[0]).shape if node.input else None
    if shape is None or len(shape) < 3 or known_attributes(node) is None:
        return False
    if is_op(node, "Transpose"):
        return True
    if is_op(node, *SUMS):
        axes = axes_of(scope, index)
        # What remains are batch or channels, or nothing beside space.
        return axes is not None and not _keeps_axes(scope, index) and keeps_order([None] * len(shape), to, axes)
    if not is_op(node, *VIEWS) or not keeps_order(shape, to):
        return False
    if is_op(node, "Flatten"):
        return (known_attributes(node) or {}).get("axis", 1) == 1
    if is_op(node, "Squeeze"):
        axes = axes_of(scope, index)
        return axes is not None and keeps_order([None] * len(shape), to, axes)
    target = scope.constant_ints(node.input[1])
    return target is not None and all(size != 0 for size in target[1:]) and not (known_attributes(node) or {}).get("allowzero", 0)


def turning(node: NodeProto) -> list[int] | None:
    """The permutation that a Transpose names, of three or more axes; None for other nodes."""
    perm = (known_attributes(node) or {}).get("perm", ()) if is_op(node, "Transpose") else ()
    return list(perm) if len(perm) > 2 else None


def turned(edit: Edit, index: int, rank: int, x: bool, y: bool, to: To) -> list[NodeProto]:
    """Node `index` for the layouts of its input and output, before its tensors are renamed.

    rank: axes of what is turned; x, y: whether the first input, and the output, are.
    """
    scope, node = edit.scope, NodeProto()
    node.CopyFrom(edit.scope.nodes[index])
    nodes: list[NodeProto] = []
    if is_op(node, "Transpose"):
        return [_permuted(node, rank, x, y, to)]
    if is_op(node, "BatchNormalization"):
        return _scaled(edit, node, rank)
    if is_op(node, "GlobalAveragePool"):
        return _mean(edit, node, rank)
    if is_op(node, "Concat"):
        axis = (known_attributes(node) or {})["axis"] % rank
        _set(node, "axis", _moved(axis, rank, to))
    elif is_op(node, *SUMS, "Squeeze"):
        _sum(edit, node, tuple(_moved(axis, rank, to) for axis in axes_of(scope, index) or ()), nodes)
    elif is_op(node, "Pad"):
        _pad(edit, node, _pads(scope, index) or (), to, nodes)
    elif is_op(node, *ELEMENTWISE):
        for position, name in enumerate(node.input):
            node.input[position] = _constant(edit, name, rank, to, nodes)
    return [*nodes, node]


def _moved(axis: int, rank: int, to: To = to_channels_last) -> int:
    """Where an axis stands in the other layout."""
    return to(rank - 2).index(axis)


def _set(node: NodeProto, name: str, value: Any) -> None:
    kept = [item for item in node.attribute if item.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def _permuted(node: NodeProto, rank: int, x: bool, y: bool, to: To = to_channels_last) -> NodeProto:
    perm = list((known_attributes(node) or {}).get("perm", range(rank - 1, -1, -1)))
    if x:
        perm = [_moved(axis, rank, to) for axis in perm]
    if y:
        perm = [perm[axis] for axis in to(rank - 2)]
    if perm == sorted(perm):
        return helper.make_node("Identity", [node.input[0]], [node.output[0]], name=node.name or None)
    _set(node, "perm", perm)
    return node


def _sum(edit: Edit, node: NodeProto, axes: tuple[int, ...], nodes: list[NodeProto]) -> None:
    """Give a sum, a mean or a Squeeze its axes, where the operator's version has them."""
    axes = tuple(sorted(axes))
    if any(item.name == "axes" for item in node.attribute):
        _set(node, "axes", axes)
    else:
        name = node.input[1]
        node.input[1] = edit.shared((name, axes), lambda: np.array(axes, np.int64), f"{name}_channels_last", nodes)


def _pad(edit: Edit, node: NodeProto, pads: Sequence[int], to: To, nodes: list[NodeProto]) -> None:
    """Give a Pad its pads on all axes of the other layout."""
    half = len(pads) // 2
    moved = tuple(pads[axis + end] for end in (0, half) for axis in to(half - 2))
    if edit.scope.opset < 11:
        _set(node, "pads", moved)
        return
    name = node.input[1]
    node.input[1] = edit.shared((name, moved), lambda: np.array(moved, np.int64), f"{name}_moved", nodes)
    del node.input[3:]


def _mean(edit: Edit, node: NodeProto, rank: int) -> list[NodeProto]:
    axes = tuple(range(1, rank - 1))
    nodes: list[NodeProto] = []
    mean = helper.make_node("ReduceMean", [node.input[0]], [node.output[0]], name=node.name or None, keepdims=1)
    if edit.scope.opset < 18:
        _set(mean, "axes", axes)
    else:
        mean.input.append(edit.shared(("axes", axes), lambda: np.array(axes, np.int64), f"{node.output[0]}_axes", nodes))
    return [*nodes, mean]


def _scaled(edit: Edit, node: NodeProto, rank: int) -> list[NodeProto]:
    """BatchNormalization as Mul and Add along the last axis."""
    scope = edit.scope
    nodes: list[NodeProto] = []
    parameters = [scope.constant(name) for name in node.input[1:]]
    kinds = [constant.data_type for constant in parameters if constant is not None]
    scale, bias, mean, variance = (constant.array().astype(np.float64) for constant in parameters if constant is not None)
    epsilon = (known_attributes(node) or {}).get("epsilon", 1e-5)
    dtype = helper.tensor_dtype_to_np_dtype(scope.info(node.input[0]).elem_type or kinds[0])
    factor = scale / np.sqrt(variance + epsilon)
    y = node.output[0]
    names = [
        edit.constant(array.astype(dtype), f"{y}_{what}", nodes)
        for what, array in (("scale", factor), ("shift", bias - mean * factor))
    ]
    product = edit.fresh(f"{y}_scaled")
    nodes.append(helper.make_node("Mul", [node.input[0], names[0]], [product], name=node.name or None))
    nodes.append(helper.make_node("Add", [product, names[1]], [y]))
    return nodes


def _constant(edit: Edit, name: str, rank: int, to: To, nodes: list[NodeProto]) -> str:
    """A constant operand as it is broadcast in the other layout; `name` where that changes nothing."""
    constant = edit.scope.constant(name)
    if constant is None or all(dim == 1 for dim in constant.shape):
        return name

    def make() -> np.ndarray:
        array = constant.array()
        return np.transpose(array.reshape((1,) * (rank - array.ndim) + array.shape), to(rank - 2))

    return edit.shared((name, rank), make, f"{name}_{to.__name__[3:]}", nodes)
