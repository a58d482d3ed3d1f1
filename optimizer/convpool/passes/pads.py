# SPDX-License-Identifier: Apache-2.0
"""Pads in front of a convolution or pooling, as onnxruntime moves and merges them.

onnxruntime merges a Pad of zeros into the pooling behind it, which then refuses pads that reach the kernel.  It takes out what
does nothing between the two, and moves a Pad through Transposes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from onnx import NodeProto

from convpool.algebra.geometry import Ints
from convpool.algebra.pads import transposed
from convpool.ir.index import Scope
from convpool.ir.protos import AttributeReference, is_op
from convpool.passes.base import Reject
from convpool.passes.linear import Step, known_step, op_of, pad_numbers
from convpool.passes.tree import ConvLeaf

SEARCH_LIMIT = 24
"""Nodes that the search for a Transpose visits at most."""


def with_pads_in_front(scope: Scope, leaf: ConvLeaf) -> ConvLeaf:
    """`leaf` with zero Pads in front of it merged into its own.

    A Pad left in front of an AveragePool is merged into it by onnxruntime, which then refuses pads that reach the kernel.  It
    merges one into a pooling that is its only reader, even a MaxPool, which then finds no zeros: one that a pooling reads stays.
    """
    name, pads, passed = zero_pads(scope, leaf.input, leaf.conv.rank)
    if not passed or any(_pooled(scope, scope.nodes[index].output[0]) for index in passed):
        return leaf
    rank, total = leaf.conv.rank, tuple(own + more for own, more in zip(leaf.conv.pads, pads, strict=True))
    size = leaf.size and tuple(n - pads[i] - pads[rank + i] for i, n in enumerate(leaf.size))
    return replace(leaf, input=name, conv=replace(leaf.conv, pads=total), size=size, passed=passed)


def _pooled(scope: Scope, tensor: str) -> bool:
    """Whether a pooling reads the tensor, if only through what does nothing, or a body that may have one."""
    pending = [tensor]
    while pending:
        tensor = pending.pop()
        for node in (scope.nodes[index] for index in scope.readers.get(tensor, ())):
            if is_op(node, "MaxPool", "AveragePool"):
                return True
            if is_op(node, "Pad", "Transpose") or _idle(scope, node) == tensor:
                pending.append(node.output[0])
        if tensor in scope.captured:
            return True
    return False


def zero_pads(scope: Scope, name: str, rank: int) -> tuple[str, Ints, tuple[int, ...]]:
    """The tensor that `name` is by only Pads of zeros, their pads in all, and the nodes from it to `name`, nearest first."""
    total: Ints = (0,) * (2 * rank)
    nodes: tuple[int, ...] = ()
    found = name, total, nodes
    while (index := scope.producer.get(name)) is not None and is_op(scope.nodes[index], "Identity", "Dropout", "Pad"):
        step = known_step(scope, index, rank)
        if not isinstance(step, Step) or step.affine is None or min(step.pads or (0,)) < 0:
            break
        name, nodes = scope.nodes[index].input[0], (*nodes, index)
        if step.pads is not None and any(step.pads):
            total = tuple(a + b for a, b in zip(total, step.pads, strict=True))
            found = name, total, nodes
    return found


def pads_upstream(scope: Scope, tensor: str) -> Iterator[tuple[Scope, int | None, tuple[Ints | None, ...]]]:
    """Each Pad, by zeros as far as known, that stands in front of `tensor` once onnxruntime has taken out what does nothing.

    With its scope, and the orders of axes of the Transposes between, the nearest first; () is the reverse one, None an unknown
    one.  onnxruntime moves them to one that stands before the Pad; without one they stay.  None in the Pad's place where
    `tensor` may come from outside of a function.
    """
    name = tensor
    orders: tuple[Ints | None, ...] = ()
    while True:
        while scope.parent is not None and not scope.defines(name):
            scope = scope.parent
        index = scope.producer.get(name)
        if index is None:
            if scope.is_function:
                yield scope, None, orders
            return
        node = scope.nodes[index]
        if is_op(node, "Pad"):
            if _may_pad_zeros(scope, node) and (not orders or _transposed(scope, node.input[0])):
                yield scope, index, orders
            return
        if is_op(node, "Transpose"):
            perm = next((item for item in node.attribute if item.name == "perm"), None)
            order = () if perm is None else None if perm.ref_attr_name else tuple(perm.ints)
            orders = (*orders, order)
            name = node.input[0]
            continue
        step = _idle(scope, node)
        if step is None:
            return
        name = step


def _transposed(scope: Scope, tensor: str) -> bool:
    """Whether the tensor is computed, over SEARCH_LIMIT nodes at most, from what a Transpose gives, or what a caller may."""
    pending = [(scope, tensor)]
    seen: set[tuple[str, int]] = set()
    while pending:
        where, name = pending.pop(0)
        while where.parent is not None and not where.defines(name):
            where = where.parent
        index = where.producer.get(name)
        if index is None:
            if where.is_function and name in where.inputs:
                return True
            continue
        if is_op(where.nodes[index], "Transpose") or len(seen) == SEARCH_LIMIT:
            return True
        if (where.path, index) not in seen:
            seen.add((where.path, index))
            pending += [(where, given) for given in where.nodes[index].input if given]
    return False


def moved_pads(scope: Scope, index: int, orders: tuple[Ints | None, ...], rank: int) -> Ints | None:
    """A Pad's pads, on spatial axes only, behind Transposes of these orders, nearest first; None where they are unknown."""
    try:
        numbers = pad_numbers(scope, index, rank)
    except AttributeReference:
        return None
    if isinstance(numbers, Reject) or None in orders:
        return None
    return transposed(numbers[0], [order for order in orders if order is not None], rank)


def _may_pad_zeros(scope: Scope, node: NodeProto) -> bool:
    values = {item.name: item for item in node.attribute}
    if "mode" in values and values["mode"].s not in (b"constant", b""):  # empty where it refers to a function's
        return False
    filling = node.input[2] if len(node.input) > 2 else ""
    constant = scope.constant(filling) if filling else None
    if constant is not None:
        return not constant.array().any()
    return bool(filling) or "value" not in values or values["value"].f == 0


def _idle(scope: Scope, node: NodeProto) -> str | None:
    """The tensor that a node may hand on as it is; None where it does something."""
    op = op_of(node)
    if is_op(node, "Expand") or op is not None and op.idle:
        return node.input[0]
    if is_op(node, "Cast"):
        known = scope.info(node.input[0]).elem_type
        return None if known and known != next(item.i for item in node.attribute if item.name == "to") else node.input[0]
    if op is not None and op.neutral is not None:
        for data, other in ((0, 1), (1, 0)) if op.commutes else ((0, 1),):
            constant = scope.constant(node.input[other])
            if constant is not None and (constant.array() == op.neutral).all():
                return node.input[data]
    return None
