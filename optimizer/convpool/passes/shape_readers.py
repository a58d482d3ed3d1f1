# SPDX-License-Identifier: Apache-2.0
"""Shapes that a model reads off a tensor which a rewrite takes away, as exporters do for `x.view(n, c, -1)` and `h * w`.

    x - Conv - h - Reshape - ReduceMean         x - ConvAvgPool
               |      |                         |
               +- Shape - Slice, Concat         +- Shape - Slice - Concat with [M, H, W]     where anything still reads it

A Shape does not keep h there if (1) all sizes of h but the first are static, and (2) the first one is too, or has the name of the
first size of a convolution's input.  Shapes that only serve the average go with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, helper

from convpool.ir.constants import FOLDABLE
from convpool.ir.index import Dim, Scope
from convpool.ir.protos import is_op
from convpool.passes.base import Reject, reject
from convpool.passes.edit import Edit
from convpool.passes.tree import Pooling, Tree, conv_leaves, tree_nodes

SLICE_OPSET = 10
"""The first opset whose Slice has inputs."""


@dataclass(frozen=True)
class ShapeOf:
    """A Shape node and the sizes that it gives; `batch`: a tensor with the open one as its first, where one is open."""

    node: int
    sizes: tuple[Dim, ...]
    batch: str | None


@dataclass(frozen=True)
class Shapes:
    """What becomes of the Shapes of tensors that go.  dying: nodes that only serve the average."""

    kept: tuple[ShapeOf, ...] = ()
    dying: frozenset[int] = frozenset()

    @property
    def nodes(self) -> frozenset[int]:
        """All nodes that go."""
        return self.dying | {item.node for item in self.kept}


def other_reader(scope: Scope, tensor: str, inside: frozenset[int]) -> str | None:
    """What else reads `tensor` than one node, or the nodes `inside`, in words; Shapes that need not read it aside."""
    others = scope.sole_reader(tensor)
    if others is None or tensor in scope.outputs or tensor in scope.captured:
        return others
    readers = [reader for reader in scope.readers[tensor] if not _replaceable(scope, reader)]
    return None if len(readers) == 1 or readers and set(readers) <= inside else others


def _replaceable(scope: Scope, node: int) -> bool:
    """Whether a node is a Shape of which only the first size is open."""
    if not is_op(scope.nodes[node], "Shape") or any(item.ref_attr_name for item in scope.nodes[node].attribute):
        return False
    shape = scope.info(scope.nodes[node].input[0]).shape
    if not shape or not all(isinstance(n, int) for n in shape[1:]):
        return False
    return isinstance(shape[0], int) or isinstance(shape[0], str) and scope.opset >= SLICE_OPSET


def shapes_of(scope: Scope, pooling: Pooling, tree: Tree) -> Shapes | Reject:
    """What becomes of the Shapes that read what goes with a rewrite; a Reject where the open size is nowhere else."""
    own = {*pooling.nodes, *tree_nodes(tree)}
    gone = {name for node in own for name in scope.nodes[node].output} - {pooling.output, *pooling.parts}
    readers = {reader for name in gone for reader in scope.readers.get(name, ())} - own
    found = sorted(reader for reader in readers if _replaceable(scope, reader))
    if not found:
        return Shapes()
    dying = _dying(scope, pooling.nodes, own)
    kept = []
    for node in found:
        if node in dying:
            continue
        sizes = scope.sizes(scope.nodes[node].output[0])
        assert sizes is not None
        named = [name for name in sizes if not isinstance(name, int)]
        inputs = [leaf.input for leaf in conv_leaves(tree) if (scope.info(leaf.input).shape or (None,))[0] in named]
        if named and not inputs:
            return reject(scope, node, "open size", named[0], "that of a convolution's input")
        kept.append(ShapeOf(node, sizes, inputs[0] if named else None))
    return Shapes(tuple(kept), frozenset(dying))


def _dying(scope: Scope, nodes: Iterable[int], own: set[int]) -> set[int]:
    """Shapes and what is computed from them that only the other inputs of `nodes` need."""
    found: set[int] = set()
    pending = [name for node in nodes for name in scope.nodes[node].input[1:]]
    while pending:
        index = scope.producer.get(pending.pop())
        if index is None or index in found or index in own or not is_op(scope.nodes[index], "Shape", *FOLDABLE):
            continue
        found.add(index)
        if not is_op(scope.nodes[index], "Shape"):
            pending.extend(scope.nodes[index].input)
    while read := {index for index in found if _is_read(scope, index, own | found)}:
        found -= read
    return found


def _is_read(scope: Scope, index: int, inside: set[int]) -> bool:
    names = scope.nodes[index].output
    return any(n in scope.outputs or n in scope.captured or not set(scope.readers.get(n, ())) <= inside for n in names)


def rewire(shapes: Shapes, edit: Edit) -> None:
    """Let the Shapes that stay give the same without the tensor that goes, and drop the others."""
    for item in shapes.kept:
        nodes: list[NodeProto] = []
        output = edit.scope.nodes[item.node].output[0]
        if item.batch is None:
            known = edit.constant(np.array(item.sizes, np.int64), f"{output}/sizes", nodes)
            nodes.append(helper.make_node("Identity", [known], [output]))
        else:
            whole, first = edit.fresh(f"{output}/input"), edit.fresh(f"{output}/batch")
            zero, one = (edit.constant(np.array([n], np.int64), f"{output}/{n}", nodes) for n in (0, 1))
            rest = edit.constant(np.array(item.sizes[1:], np.int64), f"{output}/sizes", nodes)
            nodes.append(helper.make_node("Shape", [item.batch], [whole]))
            nodes.append(helper.make_node("Slice", [whole, zero, one, zero], [first]))
            nodes.append(helper.make_node("Concat", [first, rest], [output], axis=0))
        edit.replace(item.node, {item.node}, nodes)
    edit.drop_unread(shapes.dying)
