"""What the passes that take nodes in share: the plan, and facts about nodes and constants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from convpool.algebra.affine import Affine
from convpool.algebra.parts import Parts
from convpool.ir import schema
from convpool.ir.index import Scope
from convpool.ir.protos import AttributeReference, attributes, is_op, label
from convpool.passes.linear import BINARY, Step, linear_step
from convpool.plan import Reject, reject

ACTIVATIONS = schema.ACTIVATIONS[1:]
LINEAR = ("BatchNormalization", "Identity", "Dropout", *BINARY)
"""Operators that may be maps per channel."""


@dataclass(frozen=True)
class Weights:
    """New constants for a node: weights as the node stores them, and bias [M]."""

    node: int
    weight: np.ndarray
    bias: np.ndarray


@dataclass(frozen=True)
class Absorption:
    """A node of the operator, what it becomes, and what it takes in.

    upstream: nodes that go where nothing else reads what they give; downstream: nodes that go.  weights: of the node,
    scaled: of the convolution that gives the residual; None where they stay.
    """

    scope: Scope
    node: int
    parts: Parts
    x: str
    affine: Affine | None = None
    residual: str | None = None
    output: str = ""
    upstream: tuple[int, ...] = ()
    downstream: tuple[int, ...] = ()
    weights: Weights | None = None
    scaled: Weights | None = None
    saved_bytes: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes taken in, as a report names them."""
        nodes = self.scope.nodes
        return tuple(f"{nodes[i].op_type} '{label(nodes[i])}'" for i in (*reversed(self.upstream), *self.downstream))


@dataclass
class Walk:
    """One node's plan in the making, and why its ends stopped."""

    plan: Absorption
    rank: int
    excluded: Callable[[str], bool]
    rejects: list[Reject] = field(default_factory=list)


def linear(scope: Scope, index: int, rank: int) -> Step | Reject | None:
    """The node as a linear map, None where it joins two tensors."""
    if is_op(scope.nodes[index], "Sum"):
        return None
    try:
        return linear_step(scope, index, rank)
    except AttributeReference as error:
        return reject(scope, index, "attributes", f"a reference to the function's '{error}'", "values")


def slope(scope: Scope, index: int) -> float | None:
    """An activation's slope below 0 as the operator has it; None where it is an attribute of a function around it."""
    try:
        values = attributes(scope.nodes[index])
    except AttributeReference:
        return None
    return float(values.get("alpha", np.float32(0.01))) if is_op(scope.nodes[index], "LeakyRelu") else 0.0


def elem_type(scope: Scope, index: int) -> int:
    """The TensorProto.DataType of a node of the operator; 0 where it is unknown."""
    node = scope.nodes[index]
    return scope.info(node.input[1]).elem_type or scope.info(node.input[0]).elem_type


def channels_of(scope: Scope, index: int) -> tuple[int, int] | None:
    """(M, C) of a node of the operator; None where its weights' shape is unknown."""
    node = scope.nodes[index]
    shape = scope.info(node.input[1]).shape
    if shape is None or not all(isinstance(dim, int) for dim in shape):
        return None
    return shape[0], shape[-1] * int(attributes(node).get("group", 1))
