# SPDX-License-Identifier: Apache-2.0
"""The layout of each tensor, and the form of nodes that work in either one: channels last, or first.

| node | becomes |
|---|---|
| elementwise, on tensors of one rank and constants | itself; constants are turned |
| BatchNormalization with constants | Mul and Add; only with the channels first |
| Concat; Pad by constants; a sum or mean that keeps its axes | itself, along other axes |
| GlobalAveragePool | ReduceMean; only with the channels first |
| a sum or mean over space that drops it; Flatten, Reshape, Squeeze of what is the same in both layouts | itself |
| Transpose | itself, by another permutation; nothing, or Identity, where that changes nothing |

`to` says into which layout: it gives the permutation for a number of spatial axes.

Tensors of a graph have their channels last where convpool's kernels then need not turn them.

A group is all tensors that must be laid out alike, because nodes that work in either layout join them.  A node of the operator
joins only R and Y: X is turned as it is read, and Y as it is written.  Each group has the layout that costs less:

- Channels last: a Transpose of each tensor that another node gives, or that another node reads; and a sum or mean over space,
  which onnxruntime's CUDA provider runs faster along the last axes.
- Channels first: nodes of the operator turn X in a pass of its own, unless it is an image, and write Y in shorter runs.

Groups that no node of the operator touches stay as they are.  So do tensors with channels last of an earlier run, and those of
unknown rank.
"""

import math
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto, helper

from convpool.algebra.parts import LAYOUTS, holds, keeps, to_channels_last
from convpool.ir import schema
from convpool.ir.edit import Edit
from convpool.ir.index import Dim, Scope
from convpool.ir.protos import give, is_op, known_attributes
from convpool.options import IMAGE_CHANNELS
from convpool.rules.base import Reject
from convpool.rules.convs import KERNEL_TYPES, channel_count
from convpool.rules.linear import BROADCASTING, UNARY, Step, axes_of, order_of, pad_numbers, step_or_reject

To = Callable[[int], list[int]]
"""A layout: gives the permutation into it for a number of spatial axes, as those of `algebra.parts` do."""

SUMS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare")
VIEWS = ("Flatten", "Reshape", "Squeeze")


def rank_of(scope: Scope, name: str) -> int | None:
    """A tensor's number of axes, None where it is unknown."""
    shape = scope.info(name).shape
    return None if shape is None else len(shape)


def joined(scope: Scope, index: int, to: To = to_channels_last) -> tuple[str, ...] | None:
    """The tensors of a node that are laid out alike, where it works in either layout; None where it does not."""
    node = scope.nodes[index]
    if known_attributes(node) is None or len(list(filter(None, node.output))) != 1:
        return None
    names: Sequence[str] = ()
    if is_op(node, *UNARY) or to is to_channels_last and is_op(node, "GlobalAveragePool", "BatchNormalization"):
        names = (node.input[0], node.output[0])
        if is_op(node, "BatchNormalization") and _norm(scope, index) is None:
            return None
    elif is_op(node, *BROADCASTING):
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


def _norm(scope: Scope, index: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Scale and shift by channel of a BatchNormalization, in its type; None where it is no map by constants that this has."""
    node = scope.nodes[index]
    step = step_or_reject(scope, index, (rank_of(scope, node.input[0]) or 2) - 2)
    kind = scope.info(node.input[0]).elem_type or scope.info(node.input[1]).elem_type
    if not isinstance(step, Step) or step.affine is None or not kind:
        return None
    dtype, scale, shift = helper.tensor_dtype_to_np_dtype(kind), step.affine.scale, step.affine.shift
    return (scale.astype(dtype), shift.astype(dtype)) if keeps(scale.reshape(-1, 1), dtype) and holds(shift, dtype) else None


def summed_axes(scope: Scope, index: int) -> tuple[int, ...] | None:
    """The axes that a sum is over, from 0 on; None where they are not known, or all are meant."""
    rank, values = rank_of(scope, scope.nodes[index].input[0]), known_attributes(scope.nodes[index])
    if rank is None or values is None or isinstance(axes := axes_of(scope, index, values), Reject) or not axes:
        return None
    return tuple(sorted(axis % rank for axis in axes))


def _keeps_axes(scope: Scope, index: int) -> bool:
    """Return True if a sum keeps its axes; onnxruntime and onnx take only 1 for that."""
    return (known_attributes(scope.nodes[index]) or {}).get("keepdims", 1) == 1 and summed_axes(scope, index) is not None


def _pads(scope: Scope, index: int) -> tuple[int, ...] | None:
    """The pads on all axes, begins then ends; None where they are no constants."""
    rank = rank_of(scope, scope.nodes[index].input[0])
    found = pad_numbers(scope, index, rank - 2) if rank is not None else None
    return None if found is None or isinstance(found, Reject) else found[0]


def keeps_order(shape: Sequence[Dim], to: To, gone: Container[int] = ()) -> bool:
    """Return True if the other layout keeps the order in memory, the axes `gone` summed over."""
    left = [axis for axis in to(len(shape) - 2) if shape[axis] != 1 and axis not in gone]
    return left == sorted(left)


def reads_any(scope: Scope, index: int, to: To = to_channels_last) -> bool:
    """Return True if a node, told of the layout of its first input, gives the same from either."""
    node = scope.nodes[index]
    shape = scope.info(node.input[0]).shape if node.input else None
    if shape is None or len(shape) < 3 or (values := known_attributes(node)) is None:
        return False
    if is_op(node, "Transpose"):
        return order_of(values, len(shape)) is not None
    if is_op(node, *SUMS):
        axes = summed_axes(scope, index)
        # What remains are batch or channels, or nothing beside space.
        return axes is not None and not _keeps_axes(scope, index) and keeps_order([None] * len(shape), to, axes)
    if not is_op(node, *VIEWS) or not keeps_order(shape, to):
        return False
    if is_op(node, "Flatten"):
        return values.get("axis", 1) == 1
    if is_op(node, "Squeeze"):
        axes = summed_axes(scope, index)
        return axes is not None and keeps_order([None] * len(shape), to, axes)
    target = scope.constant_ints(node.input[1])
    return target is not None and all(size != 0 for size in target[1:]) and not values.get("allowzero", 0)


def turning(node: NodeProto) -> list[int] | None:
    """The permutation that a Transpose names, of three or more axes; None for other nodes."""
    perm = (known_attributes(node) or {}).get("perm", ()) if is_op(node, "Transpose") else ()
    return list(perm) if len(perm) > 2 else None


def turn(edit: Edit, index: int, rank: int, x: bool, y: bool, to: To) -> None:
    """Make node `index` for the layouts of its input and output, before its tensors are renamed.  rank: axes of what is turned;
    x, y: whether the first input, and the output, are."""
    scope, node = edit.scope, deepcopy(edit.scope.nodes[index])
    if is_op(node, "BatchNormalization"):
        _scale(edit, index, node)
        return
    if is_op(node, "Transpose"):
        node = _permuted(node, rank, x, y, to)
    elif is_op(node, "GlobalAveragePool"):
        node = _mean(edit, node, rank)
    elif is_op(node, "Concat"):
        axis = (known_attributes(node) or {})["axis"] % rank
        give(node, {"axis": _moved(axis, rank, to)})
    elif is_op(node, *SUMS, "Squeeze"):
        _sum(edit, node, tuple(_moved(axis, rank, to) for axis in summed_axes(scope, index) or ()))
    elif is_op(node, "Pad"):
        _pad(edit, node, _pads(scope, index) or (), to)
    elif is_op(node, *BROADCASTING):
        for position, name in enumerate(node.input):
            node.input[position] = _constant(edit, name, rank, to)
    edit.nodes.append(node)


def _moved(axis: int, rank: int, to: To = to_channels_last) -> int:
    """Where an axis stands in the other layout."""
    return to(rank - 2).index(axis)


def _permuted(node: NodeProto, rank: int, x: bool, y: bool, to: To = to_channels_last) -> NodeProto:
    perm = list(order_of(known_attributes(node) or {}, rank) or ())
    if x:
        perm = [_moved(axis, rank, to) for axis in perm]
    if y:
        perm = [perm[axis] for axis in to(rank - 2)]
    if perm == sorted(perm):
        return helper.make_node("Identity", [node.input[0]], [node.output[0]], name=node.name or None)
    give(node, {"perm": perm})
    return node


def _sum(edit: Edit, node: NodeProto, axes: tuple[int, ...]) -> None:
    """Give a sum, a mean or a Squeeze its axes, where the operator's version has them."""
    axes = tuple(sorted(axes))
    if any(item.name == "axes" for item in node.attribute):
        give(node, {"axes": axes})
    else:
        name = node.input[1]
        node.input[1] = edit.common((name, axes), lambda: np.array(axes, np.int64), f"{name}_channels_last")


def _pad(edit: Edit, node: NodeProto, pads: Sequence[int], to: To) -> None:
    """Give a Pad its pads on all axes of the other layout."""
    half = len(pads) // 2
    moved = tuple(pads[axis + end] for end in (0, half) for axis in to(half - 2))
    if edit.scope.opset < 11:
        give(node, {"pads": moved})
        return
    name = node.input[1]
    node.input[1] = edit.common((name, moved), lambda: np.array(moved, np.int64), f"{name}_moved")
    del node.input[3:]


def _mean(edit: Edit, node: NodeProto, rank: int) -> NodeProto:
    axes = tuple(range(1, rank - 1))
    mean = helper.make_node("ReduceMean", [node.input[0]], [node.output[0]], name=node.name or None, keepdims=1)
    if edit.scope.opset < 18:
        give(mean, {"axes": axes})
    else:
        mean.input.append(edit.common(("axes", axes), lambda: np.array(axes, np.int64), f"{node.output[0]}_axes"))
    return mean


def _scale(edit: Edit, index: int, node: NodeProto) -> None:
    """Make a BatchNormalization Mul and Add along the last axis."""
    norm, y = _norm(edit.scope, index), node.output[0]
    assert norm is not None
    names = [edit.constant(array, f"{y}_{what}") for what, array in zip(("factor", "shift"), norm, strict=True)]
    product = edit.add("Mul", [node.input[0], names[0]], f"{y}_scaled", name=node.name or None)
    edit.nodes.append(helper.make_node("Add", [product, names[1]], [y]))


def _constant(edit: Edit, name: str, rank: int, to: To) -> str:
    """A constant operand as it is broadcast in the other layout; `name` where that changes nothing."""
    constant = edit.scope.constant(name)
    if constant is None or all(dim == 1 for dim in constant.shape):
        return name

    def make() -> np.ndarray:
        array = constant.array()
        return np.transpose(array.reshape((1,) * (rank - array.ndim) + array.shape), to(rank - 2))

    return edit.common((name, rank), make, f"{name}_{to.__name__[3:]}")


NOMINAL_BATCH, NOMINAL_SIZE = 8, 32
"""Stand for an open batch, and for other unknown sizes, in comparisons only."""
LAUNCH_US, BYTES_PER_US = 2.5, 3.0e6
"""A kernel's own time, and the memory's rate, in round numbers of an H200."""
SHORT_RUNS = 0.25
"""Share of a Transpose's bytes that writing channels first costs more in a kernel's epilogue."""
SUM_US = 5.0
"""Extra microseconds of a sum over axes in the middle, not the last ones."""


@dataclass(frozen=True)
class Ports:
    """The tensors of a node of the operator, or of one that may become one, that have channels."""

    x: str
    y: str
    residual: str = ""


@dataclass
class Group:
    """Tensors that are laid out alike.  The two sums are in microseconds."""

    tensors: list[str] = field(default_factory=list)
    last_us: float = 0.0
    first_us: float = 0.0
    touched: bool = False
    fixed: bool = False


def ports_of(scope: Scope) -> dict[int, Ports]:
    """The nodes of the operator in a scope that have channels first, by index."""
    found = {}
    for index, node in enumerate(scope.nodes):
        if schema.is_operator(node) and not schema.layout_of(node) and scope.info(node.input[1]).elem_type in KERNEL_TYPES:
            found[index] = Ports(node.input[0], node.output[0], _residual(scope, index))
    return found


def channels_last(scope: Scope, ports: Mapping[int, Ports], *, sums: bool = True) -> frozenset[str]:
    """The tensors that have their channels last.  sums: count those over space, which may not become nodes themselves."""
    groups = groups_of(scope, ports)
    for name in set().union(*fixed_ends(scope, ports)) & groups.keys():
        groups[name].last_us += turn_us(scope, name)
    for index, node in enumerate(scope.nodes) if sums else ():
        if index not in ports and is_op(node, *SUMS, "GlobalAveragePool") and node.input[0] in groups:
            groups[node.input[0]].last_us += SUM_US
    for item in ports.values():
        groups[item.x].touched = groups[item.y].touched = True
        if not _is_image(scope, item.x):
            groups[item.x].first_us += turn_us(scope, item.x)
        for name in filter(None, (item.y, item.residual)):
            groups[name].first_us += SHORT_RUNS * _move_us(scope, name)
        for name in filter(None, (item.x, item.y, item.residual)):
            groups[name].fixed |= rank_of(scope, name) is None  # a Transpose would need it
    return frozenset(name for name, it in groups.items() if it.touched and not it.fixed and it.last_us < it.first_us)


def groups_of(scope: Scope, ports: Mapping[int, Ports], to: To = to_channels_last) -> dict[str, Group]:
    """The group of every tensor of three or more axes."""
    parent: dict[str, str] = {}

    def find(name: str) -> str:
        root = name
        while parent.setdefault(root, root) != root:
            root = parent[root]
        parent[name] = root
        return root

    for index, node in enumerate(scope.nodes):
        names: Collection[str] = [name for name in (*node.input, *node.output) if name]
        for name in names:
            find(name)
        if index in ports:
            names = [ports[index].y, *filter(None, [ports[index].residual])]
        else:
            names = joined(scope, index, to) or ()
        for name in names:
            parent[find(name)] = find(next(iter(names)))
    groups: dict[str, Group] = {}
    for name in list(parent):
        group = groups.setdefault(find(name), Group())
        groups[name] = group
        group.tensors.append(name)
    for node in scope.nodes:
        if schema.is_operator(node) and schema.layout_of(node):
            x_last, y_last = LAYOUTS[schema.layout_of(node)]
            for name, last in ((node.input[0], x_last), (node.output[0], y_last)):
                groups[name].fixed |= last
    return groups


def fixed_ends(scope: Scope, ports: Collection[int], to: To = to_channels_last) -> tuple[set[str], set[str]]:
    """The tensors that come in the layout that they have, whatever their readers want; and those that are read so."""
    given = {*scope.inputs, *scope.initializers, *scope.sparse, *scope.free_names()}
    read = set(scope.outputs) | set(scope.captured)
    for index, node in enumerate(scope.nodes):
        if index in ports:
            read |= set(node.input[1:]) - {_residual(scope, index)}
            continue
        through = joined(scope, index, to) or ()
        given |= set(node.output) - set(through) - ({node.output[0]} if is_op(node, "Transpose") else set())
        free = {node.input[0]} if reads_any(scope, index, to) else set()
        read |= set(node.input) - set(through) - free
    return given - {""}, read - {""}


def _residual(scope: Scope, index: int) -> str:
    node = scope.nodes[index]
    return node.input[-1] if schema.is_operator(node) and schema.parts_of(node).residual else ""


def _is_image(scope: Scope, name: str) -> bool:
    """Return True if the kernel for images reads a tensor as it is."""
    count = channel_count(scope, name)
    return count is not None and count <= IMAGE_CHANNELS


def same_in_memory(scope: Scope, name: str, to: To = to_channels_last) -> bool:
    """Return True if both layouts are the same bytes: one channel, or one element of space."""
    shape = scope.info(name).shape
    return shape is not None and len(shape) > 2 and keeps_order((None, *shape[1:]), to)


def _move_us(scope: Scope, name: str) -> float:
    """The time in which a tensor is read and written."""
    info = scope.info(name)
    shape = info.shape or (None,) * 4
    sizes = [dim if isinstance(dim, int) else NOMINAL_SIZE if axis else NOMINAL_BATCH for axis, dim in enumerate(shape)]
    item = helper.tensor_dtype_to_np_dtype(info.elem_type).itemsize if info.elem_type else 4
    return 2 * item * math.prod(sizes) / BYTES_PER_US


def turn_us(scope: Scope, name: str, to: To = to_channels_last) -> float:
    """The time of a Transpose, 0 where it moves nothing."""
    return 0.0 if same_in_memory(scope, name, to) else LAUNCH_US + _move_us(scope, name)
