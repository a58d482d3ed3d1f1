# SPDX-License-Identifier: Apache-2.0
"""The way from a pooling's input back to the convolutions.

`conv_upstream` finds the convolution that a report names, whether the pair is exact to move or not.  `trace` goes back through
linear nodes, and through Add, Sub, Sum and Concat.

    conv - linear... -+
                      Add - linear... - pooling      ->     Add of two pooled convolutions
    conv - linear... -+

A tensor on the way may have no other reader, since its value at full resolution is gone afterwards; Shapes of it have other ways
to what they give.  Below a join a branch that does not qualify is pooled as it is, if it provably has the spatial size of the
others (broadcasting over space does not commute with pooling; Concat broadcasts nothing).

`shape_nodes_of` plans for Shapes that a model reads off a tensor which a rewrite takes away, as exporters do for `view(n, c, -1)`
and `h * w`.

    x - Conv - h - Reshape - ReduceMean         x - ConvAvgPool
               |      |                         |
               +- Shape - Slice, Concat         +- Shape - Slice - Concat with [M, H, W]     where anything still reads it

A Shape does not keep h there if (1) all sizes of h but the first are static, and (2) the first one is too, or has the name of the
first size of a convolution's input.  Shapes that only serve the average go with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from onnx import helper

from convpool.algebra.geometry import Refusal, pad_behind
from convpool.algebra.parts import IDENTITY
from convpool.ir.edit import Edit
from convpool.ir.index import FOLDABLE, Dim, Scope
from convpool.ir.protos import attributes, is_op
from convpool.rules import convs
from convpool.rules.base import BETWEEN, Reject, reject, rejection
from convpool.rules.linear import JOINS, NONLINEAR, Step, linear_step, op_of
from convpool.rules.sizes import same_size

SEARCH_LIMIT = 24
"""Nodes that the search visits at most: candidates are local."""


def conv_upstream(scope: Scope, tensor: str) -> int | None:
    """The nearest convolution that `tensor` is computed from by elementwise nodes, joins and Transposes, exact or not; if there
    is none, also by nodes that rearrange, select or reduce."""
    ways = (upstream(scope, tensor, apart=apart) for apart in (False, True))
    return next((index for way in ways for index in way if is_op(scope.nodes[index], "Conv")), None)


def upstream(scope: Scope, tensor: str, *, apart: bool = False) -> Iterator[int]:
    """The nodes in front of `tensor`, nearest first.  apart: also past those that rearrange, select or reduce."""
    pending: list[str] = [tensor]
    seen: set[int] = set()
    while pending and len(seen) < SEARCH_LIMIT:
        index = scope.producer.get(pending.pop(0))
        if index is None or index in seen:
            continue
        seen.add(index)
        yield index
        node = scope.nodes[index]
        linear = op_of(node)
        if linear is not None and linear.apart and not apart and not is_op(node, "Pad", "Transpose", *JOINS):
            continue
        if is_op(node, *JOINS) or linear is not None and linear.binary:
            pending.extend(node.input)
        elif linear is not None or is_op(node, *NONLINEAR):
            pending.append(node.input[0])


DEPTH_LIMIT = 100
"""Nodes on a way from the pooling that are looked at: below a join, what lies further back is pooled as it is."""


def trace(scope: Scope, tensor: str, rank: int, inside: frozenset[int] = frozenset(), depth: int = 0) -> convs.Tree | Reject:
    """The tree of convolutions behind `tensor` as a Tree, or a Reject.  inside: nodes of the average itself, which may read
    `tensor` any number of times; depth: nodes from the average."""
    index = scope.producer.get(tensor)
    if index is None:
        return Reject(f"tensor '{tensor}'", "producer", "an input or constant", "a convolution")
    node = scope.nodes[index]
    others = other_reader(scope, tensor, inside)
    if others is not None:
        return reject(scope, index, f"output '{tensor}' {others}", "other readers", "only the pooling")
    if is_op(node, "Conv"):
        leaf = convs.conv_leaf(scope, index, rank)
        return leaf if isinstance(leaf, Reject) else convs.with_pads_in_front(scope, leaf)
    if depth == DEPTH_LIMIT:
        return reject(scope, index, "nodes between convolution and pooling", f"over {DEPTH_LIMIT}", "fewer")
    step = linear_step(scope, index, rank)
    if isinstance(step, Reject):
        return step
    if step is not None:
        for inner in step.before:
            name = scope.nodes[inner].output[0]
            if (others := other_reader(scope, name, frozenset())) is not None:
                return reject(scope, inner, f"output '{name}' {others}", "other readers", "only the pooling")
        first = scope.nodes[(index, *step.before)[-1]]
        tree = trace(scope, first.input[step.operand], rank, depth=depth + 1)
        return tree if isinstance(tree, Reject) else _with_step(scope, tree, step)
    if is_op(node, *JOINS):
        return _join(scope, index, rank, depth)
    return reject(scope, index, BETWEEN, node.op_type, "linear operators only")


def other_reader(scope: Scope, tensor: str, inside: frozenset[int]) -> str | None:
    """Name a reader of `tensor` beside one node or `inside`; Shapes that go do not count."""
    others = scope.other_readers(tensor)
    if others is None or tensor in scope.outputs or tensor in scope.captured:
        return others
    readers = [reader for reader in scope.readers[tensor] if not _replaceable(scope, reader)]
    return None if len(readers) == 1 or readers and set(readers) <= inside else others


def _with_step(scope: Scope, tree: convs.Tree, step: Step) -> convs.Tree | Reject:
    """`tree` with one more linear node behind it."""
    assert not isinstance(tree, str), "trace returns opaque leaves only below joins"
    nodes = (*tree.nodes, *step.before, step.node)
    if step.pads is not None and any(step.pads):
        if isinstance(tree, convs.JoinTree) or tree.behind:
            return reject(scope, step.node, "Pad behind nodes that move", list(step.pads), "Pad next to a convolution")
        conv = pad_behind(tree.conv, step.pads, any(scope.nodes[tree.node].input[2:]) or bool(tree.affine.shift.any()))
        return rejection(scope, step.node, conv) if isinstance(conv, Refusal) else replace(tree, conv=conv, nodes=nodes)
    if step.affine is IDENTITY:
        return replace(tree, nodes=nodes)
    if isinstance(tree, convs.ConvLeaf) and not tree.behind and convs.is_known(scope, tree) and step.affine is not None:
        if step.affine.fits(tree.weight_shape[0]):
            return replace(tree, affine=step.affine.after(tree.affine), folded=(*tree.folded, step), nodes=nodes)
    return replace(tree, behind=(*tree.behind, step), nodes=nodes)


def _join(scope: Scope, index: int, rank: int, depth: int) -> convs.JoinTree | Reject:
    node = scope.nodes[index]
    if is_op(node, "Concat"):
        axis = attributes(node).get("axis", 1) % (rank + 2)
        if axis > 1:
            return reject(scope, index, "axis of Concat", axis, "batch or channels")
    elif not same_size(scope, list(node.input), rank):
        return reject(scope, index, "spatial sizes of the operands", "not provably equal", "equal sizes")
    children, failures = [], []
    for name in node.input:
        child = trace(scope, name, rank, depth=depth + 1)
        if isinstance(child, Reject):
            failures.append(child)
        children.append(name if isinstance(child, Reject) else child)
    tree = convs.JoinTree(index, tuple(children), nodes=(index,))
    return tree if convs.conv_leaves(tree) else failures[0]


SLICE_OPSET = 10
"""The first opset whose Slice has inputs."""


@dataclass(frozen=True)
class ShapeNode:
    """A Shape node and the sizes that it gives; `batch`: a tensor with the open one as its first, where one is open."""

    node: int
    sizes: tuple[Dim, ...]
    batch: str | None


@dataclass(frozen=True)
class ShapeNodes:
    """The fate of the Shapes of tensors that go.  dying: nodes that only serve the average."""

    kept: tuple[ShapeNode, ...] = ()
    dying: frozenset[int] = frozenset()

    @property
    def nodes(self) -> frozenset[int]:
        return self.dying | {item.node for item in self.kept}


def shape_nodes_of(scope: Scope, pooling: convs.Pooling, tree: convs.Tree) -> ShapeNodes | Reject:
    """Plan Shapes that read what a rewrite removes; a Reject if the open size is only there."""
    own = {*pooling.nodes, *convs.tree_nodes(tree)}
    gone = {name for node in own for name in scope.nodes[node].output} - {pooling.output}
    readers = {reader for name in gone for reader in scope.readers.get(name, ())} - own
    found = sorted(reader for reader in readers if _replaceable(scope, reader))
    if not found:
        return ShapeNodes()
    # Shapes, and what is computed from them, that only the other inputs of the average need.
    names = (name for node in pooling.nodes for name in scope.nodes[node].input[1:])
    dying = scope.upstream(names, lambda index: index not in own and is_op(scope.nodes[index], "Shape", *FOLDABLE))
    while read := {i for i in dying if any(scope.read_outside(name, own | dying) for name in scope.nodes[i].output)}:
        dying -= read
    kept = []
    for node in found:
        if node in dying:
            continue
        sizes = scope.sizes(scope.nodes[node].output[0])
        assert sizes is not None
        named = [name for name in sizes if not isinstance(name, int)]
        inputs = [leaf.input for leaf in convs.conv_leaves(tree) if (scope.info(leaf.input).shape or (None,))[0] in named]
        if named and not inputs:
            return reject(scope, node, "open size", named[0], "that of a convolution's input")
        kept.append(ShapeNode(node, sizes, inputs[0] if named else None))
    return ShapeNodes(tuple(kept), frozenset(dying))


def _replaceable(scope: Scope, node: int) -> bool:
    """Return True if a node is a Shape of which only the first size is open."""
    if not is_op(scope.nodes[node], "Shape") or any(item.ref_attr_name for item in scope.nodes[node].attribute):
        return False
    shape = scope.info(scope.nodes[node].input[0]).shape
    if not shape or not all(isinstance(n, int) for n in shape[1:]):
        return False
    return isinstance(shape[0], int) or isinstance(shape[0], str) and scope.opset >= SLICE_OPSET


def rewire(shapes: ShapeNodes, edit: Edit) -> None:
    """Let the Shapes that stay give the same without the tensor that goes, and drop the others."""
    for item in shapes.kept:
        output = edit.scope.nodes[item.node].output[0]
        if item.batch is None:
            known = edit.constant(np.array(item.sizes, np.int64), f"{output}/sizes")
            edit.nodes.append(helper.make_node("Identity", [known], [output]))
        else:
            whole, first = edit.fresh(f"{output}/input"), edit.fresh(f"{output}/batch")
            zero, one = (edit.constant(np.array([n], np.int64), f"{output}/{n}") for n in (0, 1))
            rest = edit.constant(np.array(item.sizes[1:], np.int64), f"{output}/sizes")
            edit.nodes.append(helper.make_node("Shape", [item.batch], [whole]))
            edit.nodes.append(helper.make_node("Slice", [whole, zero, one, zero], [first]))
            edit.nodes.append(helper.make_node("Concat", [first, rest], [output], axis=0))
        edit.replace(item.node, {item.node})
    edit.drop_unread(shapes.dying)
