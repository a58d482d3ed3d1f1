"""What a check returns: a Plan with everything that applying it needs, or a Reject with the reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from convpool.algebra.affine import IDENTITY, Affine
from convpool.algebra.geometry import ConvSpec, Ints, PoolSpec
from convpool.algebra.lowering import Layer, Lowering
from convpool.algebra.refusal import Refusal
from convpool.ir.constants import Constant
from convpool.ir.index import Scope
from convpool.ir.protos import label


@dataclass(frozen=True)
class Reject:
    """Why a site stays as it is: the node at fault, the condition, what was found and what would have been right."""

    node: str
    condition: str
    got: str
    expected: str

    def __str__(self) -> str:
        return f"{self.node}: {self.condition}; got {self.got}, expected {self.expected}"


def reject(scope: Scope, node: int, condition: str, got: object, expected: object) -> Reject:
    """A Reject that names node number `node` of `scope`."""
    return Reject(f"{scope.nodes[node].op_type} '{label(scope.nodes[node])}'", condition, str(got), str(expected))


def rejection(scope: Scope, node: int, refusal: Refusal) -> Reject:
    """A Refusal of the algebra as a Reject that names node number `node` of `scope`."""
    return reject(scope, node, refusal.condition, refusal.got, refusal.expected)


def malformed(scope: Scope, node: int, values: dict[str, Any], rank: int) -> Reject | None:
    """Why the windows that a node's attributes `values` give are none on `rank` axes; onnx's checker does not look."""
    for name, count, least in (("kernel_shape", rank, 1), ("strides", rank, 1), ("dilations", rank, 1), ("pads", 2 * rank, 0)):
        if (got := values.get(name)) and (len(got) != count or min(got) < least):
            return reject(scope, node, name, list(got), f"{count} numbers of at least {least}")
    return None


@dataclass(frozen=True)
class Pooling:
    """An average over windows of the tensor `input`, written to `output` by the nodes `nodes`, `root` the last.

    spec is None for a mean over all of the feature map; squeeze: the spatial axes vanish (ReduceMean, keepdims = 0).
    Without an average (`alone`), `nodes` is empty, `root` the convolution and the window of `spec` one element.
    """

    root: int
    nodes: tuple[int, ...]
    input: str
    output: str
    kind: str
    spec: PoolSpec | None
    squeeze: bool = False


@dataclass(frozen=True)
class Moved:
    """A node that goes behind the pooling; `operand` is the number of the input that carries the data."""

    node: int
    operand: int


@dataclass(frozen=True)
class ConvLeaf:
    """A convolution whose output only the pooling reads, with what stood between already absorbed.

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


@dataclass(frozen=True)
class Plan:
    """A site that is exact to rewrite and pays.  `lowerings` belong to the convolutions of `tree`, left to right."""

    scope: Scope
    pattern: str
    pooling: Pooling
    tree: Tree
    lowerings: tuple[Lowering, ...] = field(default=())
