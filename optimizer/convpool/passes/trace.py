# SPDX-License-Identifier: Apache-2.0
"""From a pooling's input back to the convolutions: through linear nodes, and through Add, Sub, Sum and Concat.

    conv - linear... -+
                      Add - linear... - pooling      ->     Add of two pooled convolutions
    conv - linear... -+

A tensor on the way may have no other reader, since its value at full resolution is gone afterwards; Shapes of it have other ways
to what they give (`shape_readers`).  Below a join a
branch that does not qualify is pooled as it is, if it provably has the spatial size of the others (broadcasting over
space does not commute with pooling; Concat broadcasts nothing).
"""

from __future__ import annotations

from dataclasses import replace

from convpool.algebra.affine import IDENTITY
from convpool.algebra.pads import pad_behind
from convpool.algebra.refusal import Refusal
from convpool.ir.index import Scope
from convpool.ir.protos import attributes, is_op
from convpool.passes.base import BETWEEN, Reject, reject, rejection
from convpool.passes.convs import conv_leaf
from convpool.passes.linear import JOINS, Step, linear_step
from convpool.passes.origins import same_size
from convpool.passes.pads import with_pads_in_front
from convpool.passes.shape_readers import other_reader
from convpool.passes.tree import ConvLeaf, JoinTree, Moved, OpaqueLeaf, Tree, conv_leaves

DEPTH_LIMIT = 100
"""Nodes on a way from the pooling that are looked at: below a join, what lies further back is pooled as it is."""


def trace(scope: Scope, tensor: str, rank: int, inside: frozenset[int] = frozenset(), depth: int = 0) -> Tree | Reject:
    """The tree of convolutions behind `tensor` as a Tree, or a Reject.

    inside: nodes of the average itself, which may read `tensor` any number of times; depth: nodes from the average.
    """
    index = scope.producer.get(tensor)
    if index is None:
        return Reject(f"tensor '{tensor}'", "producer", "an input or constant", "a convolution")
    node = scope.nodes[index]
    others = other_reader(scope, tensor, inside)
    if others is not None:
        return reject(scope, index, f"output '{tensor}' {others}", "other readers", "only the pooling")
    if is_op(node, "Conv"):
        leaf = conv_leaf(scope, index, rank)
        return leaf if isinstance(leaf, Reject) else with_pads_in_front(scope, leaf)
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


def _with_step(scope: Scope, tree: Tree, step: Step) -> Tree | Reject:
    """`tree` with one more linear node behind it."""
    if isinstance(tree, OpaqueLeaf):
        raise AssertionError("trace returns opaque leaves only below joins")
    nodes = (*tree.nodes, *step.before, step.node)
    if step.pads is not None and any(step.pads):
        if isinstance(tree, JoinTree) or tree.behind:
            return reject(scope, step.node, "Pad behind nodes that move", list(step.pads), "Pad next to a convolution")
        conv_node = scope.nodes[tree.node]
        has_bias = len(conv_node.input) > 2 and bool(conv_node.input[2])
        conv = pad_behind(tree.conv, step.pads, has_bias or bool(tree.affine.shift.any()))
        return rejection(scope, step.node, conv) if isinstance(conv, Refusal) else replace(tree, conv=conv, nodes=nodes)
    if step.affine is IDENTITY:
        return replace(tree, nodes=nodes)
    moved = Moved(step.node, step.operand, step.result, step.channels)
    if isinstance(tree, ConvLeaf) and not tree.behind and _foldable(scope, tree, step):
        assert step.affine is not None
        return replace(tree, affine=step.affine.after(tree.affine), folded=(*tree.folded, moved), nodes=nodes)
    return replace(tree, behind=(*tree.behind, moved), nodes=nodes)


def _foldable(scope: Scope, leaf: ConvLeaf, step: Step) -> bool:
    conv = scope.nodes[leaf.node]
    constant_bias = leaf.bias is not None or len(conv.input) < 3 or not conv.input[2]
    if step.affine is None or leaf.weight is None or not constant_bias:
        return False
    return step.affine.fits(leaf.weight_shape[0])


def _join(scope: Scope, index: int, rank: int, depth: int) -> JoinTree | Reject:
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
            child = OpaqueLeaf(name)
        children.append(child)
    tree = JoinTree(index, tuple(children), nodes=(index,))
    return tree if conv_leaves(tree) else failures[0]
