"""What the passes that take nodes in share: the plan, and facts about nodes and constants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from convpool import operator
from convpool.graph import AttributeReference, Scope, attributes, is_op, label
from convpool.operator import Parts
from convpool.passes.linear import BINARY, Step, linear_step
from convpool.plan import Affine, Reject, reject

ACTIVATIONS = operator.ACTIVATIONS[1:]
LINEAR = ("BatchNormalization", "Identity", "Dropout", *BINARY)
"""Operators that may be maps per channel."""
OUTSIDE, INSIDE = "numbers too large or small", "ones that the type has"


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


def holds(values: np.ndarray, dtype: np.dtype) -> bool:
    """Whether the type has finite numbers for all values."""
    return bool((np.abs(values) <= float(ml_dtypes.finfo(dtype).max)).all())


def keeps(factors: np.ndarray, dtype: np.dtype) -> bool:
    """Whether the type has these numbers, which others are multiplied by, finite and to its precision.

    factors: [rows, ...].  A number too small for the type may lose digits, or all, beside a larger one in its row only:
    what either is multiplied by is then added up.  A summand may always: the sum is no more precise than the type.
    """
    if not holds(factors, dtype):
        return False
    rows = factors.reshape(len(factors), -1)
    lost = np.abs(rows.astype(dtype).astype(np.float64) - rows)
    return bool((lost <= float(ml_dtypes.finfo(dtype).eps) * np.abs(rows).max(axis=1, keepdims=True, initial=0)).all())


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
