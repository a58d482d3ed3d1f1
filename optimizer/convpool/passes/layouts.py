# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a graph have their channels last, so that convpool's kernels need not turn them.

A group is all tensors that must be laid out alike, because nodes that work in either layout join them.  A node of the operator
joins only R and Y: X is turned as it is read, and Y as it is written.  Each group has the layout that costs less:

- Channels last: a Transpose of each tensor that another node gives, or that another node reads; and a sum or mean over space,
  which onnxruntime's CUDA provider runs faster along the last axes.
- Channels first: nodes of the operator turn X in a pass of its own, unless it is an image, and write Y in shorter runs.

Groups that no node of the operator touches stay as they are.  So do tensors with channels last of an earlier run, and those of
unknown rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from onnx import TensorProto, helper

from convpool.algebra.layouts import LAYOUTS, to_channels_last
from convpool.ir import schema
from convpool.ir.index import Scope
from convpool.ir.protos import is_op
from convpool.options import Limits
from convpool.passes.either_layout import KEEPS, SUMS, To, joined, keeps_order, rank_of, reads_any

KERNEL_TYPES = (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT)
"""The types that the kernels have."""
NOMINAL_BATCH, NOMINAL_SIZE = 8, 32
"""Stand for an open batch, and for other unknown sizes, in comparisons only."""
LAUNCH_US, BYTES_PER_US = 2.5, 3.0e6
"""A kernel's own time, and the memory's rate, in round numbers of an H200."""
SHORT_RUNS = 0.25
"""Of a Transpose's bytes: what writing channels first costs more in a kernel's epilogue."""
SUM_US = 5.0
"""What a sum over axes in the middle takes longer than along the last ones."""


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

    @property
    def last(self) -> bool:
        """Whether channels last cost less."""
        return self.touched and not self.fixed and self.last_us < self.first_us


def ports_of(scope: Scope) -> dict[int, Ports]:
    """The nodes of the operator in a scope that have channels first, by index."""
    found = {}
    for index, node in enumerate(scope.nodes):
        if schema.is_operator(node) and not schema.layout_of(node) and elem_type_of(scope, node.input[1]) in KERNEL_TYPES:
            residual = node.input[-1] if schema.parts_of(node).residual else ""
            found[index] = Ports(node.input[0], node.output[0], residual)
    return found


def elem_type_of(scope: Scope, name: str) -> int:
    """The TensorProto.DataType of a tensor; 0 where it is unknown."""
    return scope.info(name).elem_type


def channels_last(scope: Scope, ports: Mapping[int, Ports], limits: Limits, *, sums: bool = True) -> frozenset[str]:
    """The tensors that have their channels last.

    ports: of nodes of the operator, by index.  sums: whether sums over space count; they do not where they may become nodes.
    """
    groups = groups_of(scope, ports)
    _count_transposes(scope, groups, ports)
    for index, node in enumerate(scope.nodes) if sums else ():
        if index not in ports and is_op(node, *SUMS, *KEEPS) and node.input[0] in groups:
            groups[node.input[0]].last_us += SUM_US
    for item in ports.values():
        groups[item.x].touched = groups[item.y].touched = True
        if not _is_image(scope, item.x, limits):
            groups[item.x].first_us += turn_us(scope, item.x)
        for name in filter(None, (item.y, item.residual)):
            groups[name].first_us += SHORT_RUNS * _move_us(scope, name)
        for name in filter(None, (item.x, item.y, item.residual)):
            groups[name].fixed |= rank_of(scope, name) is None  # a Transpose would need it
    return frozenset(name for name, group in groups.items() if group.last)


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


def _count_transposes(scope: Scope, groups: dict[str, Group], ports: Mapping[int, Ports]) -> None:
    """Add what channels last cost each group."""
    given, read = fixed_ends(scope, ports)
    for name in given | read:
        if name in groups:
            groups[name].last_us += turn_us(scope, name)


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


def _is_image(scope: Scope, name: str, limits: Limits) -> bool:
    """Whether the kernel for images reads a tensor as it is."""
    shape = scope.info(name).shape
    return shape is not None and len(shape) > 1 and isinstance(shape[1], int) and shape[1] <= limits.image_channels


def same_in_memory(scope: Scope, name: str, to: To = to_channels_last) -> bool:
    """Whether both layouts of a tensor are the same bytes: it has one channel, or one element of space."""
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
