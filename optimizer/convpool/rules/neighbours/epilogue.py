# SPDX-License-Identifier: Apache-2.0
"""Behind a node of the operator: maps per channel, a residual, an activation.

Towards the output: (1) only the next node reads the result; (2) linear nodes with constants per channel are folded into weights
and bias; with a residual already fused, into those of the convolution that gives it too; (3) an Add or Sum of two fuses with the
other operand as the residual, if it provably has the same shape: nothing is broadcast; of two ConvAvgPool nodes that meet in it,
the one with more taps fuses it, since the other is bound by memory; (4) then at most one Relu, LeakyRelu, Tanh or
Sigmoid.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from convpool.algebra.parts import EPILOGUES, IDENTITY, Affine, fold, holds, keeps, outside
from convpool.ir import schema
from convpool.ir.index import Scope
from convpool.ir.protos import is_op, label
from convpool.rules.base import Context, Reject, Site, reject, rejection
from convpool.rules.linear import Step, is_map
from convpool.rules.neighbours.fusion import (
    Draft,
    FusionPlan,
    FusionRule,
    Weights,
    channels_of,
    check_fusion,
    map_step,
    slope,
)
from convpool.rules.origins import spatial_sizes


class FuseEpilogue(FusionRule):
    """What stands behind a node of the operator goes into it."""

    names = ("fuse_epilogue",)

    def check(self, site: Site, context: Context) -> FusionPlan | Reject | None:
        """What the node fuses, or why it fuses nothing."""
        return check_fusion(site, context, grow)


def grow(draft: Draft) -> None:
    """Fuse all that can be, into the plan of `draft`."""
    current: FusionPlan | None = draft.plan
    while current is not None:
        if current.parts != draft.plan.parts or current.weights is not draft.plan.weights:
            draft.plan = current  # only an Identity is not worth a change
        current = _behind(draft, current)


def _behind(draft: Draft, plan: FusionPlan) -> FusionPlan | None:
    """The plan with one more node behind; None where there is none that can be fused."""
    scope, parts = plan.scope, plan.parts
    readers = [
        index
        for index in scope.readers.get(plan.output, [])
        if is_op(scope.nodes[index], "Sum", *EPILOGUES) or is_map(scope, index)
    ]
    if not readers or parts.epilogue:
        return None
    reader = readers[0]
    node = scope.nodes[reader]
    others = scope.sole_reader(plan.output)
    if others is not None:
        found = reject(scope, plan.node, f"result '{plan.output}' {others}", "other readers", f"only {node.op_type}")
        draft.rejects.append(found)
        return None
    taken = replace(plan, output=node.output[0], downstream=(*plan.downstream, reader))
    if is_op(node, *EPILOGUES):
        alpha = slope(scope, reader)
        return None if alpha is None else replace(taken, parts=replace(parts, epilogue=node.op_type, epilogue_alpha=alpha))
    step = map_step(scope, reader, draft.rank)
    if isinstance(step, Step) and step.affine is not None and node.input[step.operand] == plan.output:
        result: FusionPlan | Reject | None = _fold(draft, taken, step)
    elif is_op(node, "Add", "Sum"):
        result = _residual(draft, plan, taken)
    else:
        result = (
            step
            if isinstance(step, Reject)
            else reject(scope, reader, "constant operands", "computed ones", "constants per channel")
        )
    if isinstance(result, Reject):
        draft.rejects.append(result)
        return None
    return result


def _fold(draft: Draft, plan: FusionPlan, step: Step) -> FusionPlan | Reject:
    """Condition (2): `step` behind the node, in its weights."""
    scope = plan.scope
    if step.affine is IDENTITY:
        return plan
    assert step.affine is not None
    m, _ = channels_of(scope, plan.node) or (0, 0)
    if not step.affine.fits(m):
        return reject(scope, step.node, "channels", "constants that widen them", f"{m} or 1")
    weights = plan.weights or _weights(scope, plan.node)
    if weights is None:
        return reject(scope, plan.node, "weights", "computed, or an input that a caller may override", "constants")
    own, other = _scaled(weights, step.affine), plan.scaled
    if plan.parts.residual and (step.affine.scale != 1).any():
        source = scope.producer.get(plan.residual or "")
        giver = plan.scaled or (_giver(draft, source) if source is not None else None)
        if giver is None:
            return reject(
                scope,
                step.node,
                "map behind a residual",
                "one that its convolution cannot fold",
                "a convolution with constant weights that nothing else reads",
            )
        other = _scaled(giver, Affine(step.affine.scale, np.array(0.0)))
        if other is None:
            own = None
    if own is None:
        return rejection(scope, step.node, outside("constants folded into weights"))
    return replace(plan, weights=own, scaled=other)


def _residual(draft: Draft, plan: FusionPlan, taken: FusionPlan) -> FusionPlan | Reject | None:
    """Condition (3): the other operand of the Add."""
    scope, reader = plan.scope, taken.downstream[-1]
    node = scope.nodes[reader]
    if len(node.input) != 2:
        return reject(scope, reader, "operands", len(node.input), 2)
    if plan.parts.residual:
        return reject(scope, reader, "residual", "a second one", "one")
    other = node.input[1] if node.input[0] == plan.output else node.input[0]
    shapes = [scope.info(name).shape for name in (plan.output, other)]
    x = scope.info(plan.x).shape
    if shapes[0] and shapes[1] and x and x[0] == shapes[1][0]:
        shapes[0] = (x[0], *shapes[0][1:])  # the same batch, for which a value_info may have another name
    same = shapes[0] == shapes[1] and shapes[0] is not None and len(shapes[0]) == draft.rank + 2 and None not in shapes[0]
    if not same and not _same_origin(scope, plan.output, other, shapes, draft.rank):
        got, expected = (list(shape) if shape is not None else "unknown" for shape in reversed(shapes))
        return reject(scope, reader, "shape of the residual", got, f"provably the result's, {expected}")
    rival = scope.producer.get(other)
    if rival is not None and schema.is_operator(scope.nodes[rival]) and scope.sole_reader(other) is None:
        parts = schema.parts_of(scope.nodes[rival])
        able = not parts.epilogue and not parts.residual and not schema.layout_of(scope.nodes[rival])
        able = able and not draft.context.excluded(label(scope.nodes[rival]))
        if able and (_work(scope, rival), rival) > (_work(scope, plan.node), plan.node):
            return None
    return replace(taken, residual=other, parts=replace(plan.parts, residual=True))


def _giver(draft: Draft, index: int) -> Weights | None:
    """Weights of the convolution that gives the residual, if they may be scaled."""
    scope = draft.plan.scope
    node = scope.nodes[index]
    if scope.sole_reader(node.output[0]) is not None or draft.context.excluded(label(node)):
        return None
    if schema.is_operator(node):
        parts = schema.parts_of(node)
        if parts.epilogue or parts.residual or schema.layout_of(node):
            return None
    elif not is_op(node, "Conv"):
        return None
    return _weights(scope, index)


def _weights(scope: Scope, index: int) -> Weights | None:
    """The constant weights and bias (zeros if there is none) of a Conv or a node of the operator."""
    node = scope.nodes[index]
    weight = scope.weights(node.input[1])
    has_bias = len(node.input) > 2 and bool(node.input[2])
    bias = scope.constant(node.input[2]) if has_bias else None
    if weight is None or (has_bias and bias is None):
        return None
    array = weight.array()
    return Weights(index, array, bias.array() if bias else np.zeros(array.shape[0], array.dtype))


def _scaled(weights: Weights, affine: Affine) -> Weights | None:
    """The affine map behind the convolution, folded in; None if the type cannot hold the result to its precision."""
    dtype = weights.weight.dtype
    with np.errstate(over="ignore", invalid="ignore"):
        weight, bias = fold(weights.weight, weights.bias, affine)
        assert bias is not None
        if not keeps(weight, dtype) or not holds(bias, dtype):
            return None
        return Weights(weights.node, weight.astype(dtype), bias.astype(dtype))


def _work(scope: Scope, index: int) -> int:
    """Multiply-adds per output position."""
    shape = scope.info(scope.nodes[index].input[1]).shape
    return math.prod(dim for dim in shape[1:] if isinstance(dim, int)) if shape else 0


def _same_origin(scope: Scope, y: str, other: str, shapes: list, rank: int) -> bool:
    """Whether batch and channels are equal by their shapes, and spatial sizes by how they came about."""
    if any(shape is None or len(shape) != rank + 2 or None in shape[:2] for shape in shapes):
        return False
    return shapes[0][:2] == shapes[1][:2] and spatial_sizes(scope, y, rank) == spatial_sizes(scope, other, rank)
