# SPDX-License-Identifier: Apache-2.0
"""An average and the convolutions behind it, as a tree: the pooling distributes over the joins in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import helper

from convpool.algebra.affine import IDENTITY, Affine, fold
from convpool.algebra.geometry import ConvSpec, Ints, PoolSpec
from convpool.algebra.lowering import Layer
from convpool.ir.constants import Constant


@dataclass(frozen=True)
class Pooling:
    """An average over windows of the tensor `input`, written to `output` by the nodes `nodes`, `root` the last.

    spec, without pads, is None for a mean over all of the feature map.  squeeze: axes that vanish (ReduceMean, keepdims = 0);
    factor: what the average is multiplied by (ReduceSum); batch: whether it is also over the batch.  split: the Split whose
    results are averaged alike, as the tensors `parts` in its order, "" for one that nothing reads; None without one.
    Without an average (`offload_conv`), `nodes` is empty, `root` the convolution and the window of `spec` one element.
    """

    root: int
    nodes: tuple[int, ...]
    input: str
    output: str
    kind: str
    spec: PoolSpec | None
    squeeze: Ints = ()
    factor: float = 1.0
    batch: bool = False
    split: int | None = None
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Moved:
    """A node that goes behind the pooling: numbers of the input that carries the data, and of the output that is read.

    channels: those which a Gather picks in its place.
    """

    node: int
    operand: int
    result: int = 0
    channels: Ints = ()


@dataclass(frozen=True)
class ConvLeaf:
    """A convolution whose output only the pooling reads, with what stood between already in it.

    conv: attributes, with a zero Pad behind it added to the pads.  affine: to be folded into weights and bias.
    behind: nodes that move behind the pooling, in order.  size: spatial input size, None where any of it is unknown.
    """

    node: int
    input: str
    conv: ConvSpec
    weight: Constant | None
    bias: Constant | None
    weight_shape: Ints
    size: Ints | None
    affine: Affine = IDENTITY
    behind: tuple[Moved, ...] = ()
    nodes: tuple[int, ...] = ()
    """The convolution and the nodes between it and the join or pooling, all of which go."""
    folded: tuple[Moved, ...] = ()
    """The nodes whose effect is in `affine`."""
    passed: tuple[int, ...] = ()
    """Pads in front of the convolution, which reads from before them: nearest first, and they may have other readers."""

    @property
    def layer(self) -> Layer:
        """The convolution as the algebra sees it."""
        return Layer(self.conv, self.weight_shape, self.size, self.weight is not None)


@dataclass(frozen=True)
class OpaqueLeaf:
    """A tensor that is pooled as it is, since the pooling distributes over the join that reads it."""

    tensor: str


@dataclass(frozen=True)
class JoinTree:
    """Add, Sub, Sum or Concat of trees: the pooling distributes over it."""

    node: int
    children: tuple[Tree, ...]
    behind: tuple[Moved, ...] = ()
    nodes: tuple[int, ...] = ()


Tree = ConvLeaf | OpaqueLeaf | JoinTree


def conv_leaves(tree: Tree) -> list[ConvLeaf]:
    """The convolutions of a tree, left to right."""
    if isinstance(tree, ConvLeaf):
        return [tree]
    return [leaf for child in tree.children for leaf in conv_leaves(child)] if isinstance(tree, JoinTree) else []


def opaque_leaves(tree: Tree) -> list[OpaqueLeaf]:
    """The other leaves of a tree, left to right."""
    if isinstance(tree, OpaqueLeaf):
        return [tree]
    return [leaf for child in tree.children for leaf in opaque_leaves(child)] if isinstance(tree, JoinTree) else []


def tree_nodes(tree: Tree) -> list[int]:
    """The nodes that go when the tree is rewritten."""
    if isinstance(tree, OpaqueLeaf):
        return []
    children = tree.children if isinstance(tree, JoinTree) else ()
    return [*tree.nodes, *(node for child in children for node in tree_nodes(child))]


def folded(leaf: ConvLeaf) -> tuple[np.ndarray, np.ndarray | None]:
    """Weights [M, C/group, kernel...] and bias [M] or None with the affine map folded in, in the weights' type."""
    assert leaf.weight is not None
    if leaf.affine is IDENTITY:
        return leaf.weight.array(), None if leaf.bias is None else leaf.bias.array()
    dtype = helper.tensor_dtype_to_np_dtype(leaf.weight.data_type)
    weight, bias = folded_exactly(leaf)
    return weight.astype(dtype), None if bias is None else bias.astype(dtype)


def folded_exactly(leaf: ConvLeaf) -> tuple[np.ndarray, np.ndarray | None]:
    """`folded` in float64."""
    assert leaf.weight is not None
    return fold(leaf.weight.array(), None if leaf.bias is None else leaf.bias.array(), leaf.affine)
