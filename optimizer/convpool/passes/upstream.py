# SPDX-License-Identifier: Apache-2.0
"""Which convolution an average starts from, exact to move or not: a report names every pair, also those that stay."""

from __future__ import annotations

from collections.abc import Iterator

from convpool.ir.index import Scope
from convpool.ir.protos import is_op
from convpool.passes.linear import JOINS, op_of

NONLINEAR = (
    "Abs",
    "Celu",
    "Clip",
    "DepthToSpace",
    "DequantizeLinear",
    "Elu",
    "Erf",
    "Exp",
    "Gelu",
    "GroupNormalization",
    "HardSigmoid",
    "HardSwish",
    "InstanceNormalization",
    "LeakyRelu",
    "Mish",
    "PRelu",
    "QuantizeLinear",
    "Relu",
    "Selu",
    "Sigmoid",
    "Softplus",
    "Softsign",
    "Sqrt",
    "Swish",
    "Tanh",
    "ThresholdedRelu",
)
"""Elementwise operators that are looked through, beside the linear ones of `linear.OPS`, though no average moves past them."""
SEARCH_LIMIT = 24
"""Nodes that the search visits at most: candidates are local."""


def max_pools(scope: Scope) -> int:
    """How many poolings by the maximum of a scope are computed from a convolution by elementwise nodes and joins."""
    nodes = [node for node in scope.nodes if is_op(node, "MaxPool", "GlobalMaxPool")]
    return sum(conv_upstream(scope, node.input[0]) is not None for node in nodes)


def conv_upstream(scope: Scope, tensor: str) -> int | None:
    """The nearest convolution that `tensor` is computed from by elementwise nodes, joins and Transposes, exact or not; if there
    is none, also by nodes that rearrange, select or reduce."""
    ways = (upstream(scope, tensor, apart=apart) for apart in (False, True))
    return next((index for way in ways for index in way if is_op(scope.nodes[index], "Conv")), None)


def upstream(scope: Scope, tensor: str, *, apart: bool = False) -> Iterator[int]:
    """The nodes that give `tensor` from convolutions or anything else, the nearest first.

    apart: whether it is looked past nodes that rearrange, select or reduce.
    """
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
