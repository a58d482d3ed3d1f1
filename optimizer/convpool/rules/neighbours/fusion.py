# SPDX-License-Identifier: Apache-2.0
"""Fuse nodes before and behind a ConvAvgPool node, as a fused variant (`convpool.ir.schema`).

    x - BatchNormalization - Relu - ConvAvgPool - Add - Relu        x - AffineReluConvAvgPoolAddRelu
                                              r --+                 r --+

`fuse` says what may go, and this module what both share.  The residual cannot depend on the node:
only the Add reads the node's result, so that would be a cycle.  Zero padding stays exact, since it comes after the prologue;
folding a shift in front of a padded convolution into its bias would not be.  Each step removes a pass over a tensor
(`saved_bytes`) and adds none, so the cost only falls; onnxruntime inlines the function and runs what it ran before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import NodeProto, helper

from convpool.algebra.parts import Affine, Parts
from convpool.ir import schema
from convpool.ir.edit import Edit
from convpool.ir.index import Dim, Scope
from convpool.ir.protos import attributes, is_op, known_attributes, label
from convpool.report import Log, SiteReport
from convpool.rules.base import Context, Plan, Reject, Rule, Site, reject
from convpool.rules.linear import Step, known_step


@dataclass(frozen=True)
class Weights:
    """New constants for a node: weights as the node stores them, and bias [M].  copies: how many weights a kernel adds up."""

    node: int
    weight: np.ndarray
    bias: np.ndarray
    copies: int = 1


@dataclass(frozen=True)
class FusionPlan(Plan):
    """A node of the operator, what it becomes, and what goes into it.

    channels: M and C.  elem_type: the weights' TensorProto.DataType, else X's.
    upstream: nodes that go where nothing else reads what they give; downstream: nodes that go.  weights: of the node,
    scaled: of the convolution that gives the residual; None where they stay.
    """

    node: int
    channels: tuple[int, int]
    elem_type: int
    parts: Parts
    x: str
    output: str
    affine: Affine | None = None
    residual: str | None = None
    upstream: tuple[int, ...] = ()
    downstream: tuple[int, ...] = ()
    weights: Weights | None = None
    scaled: Weights | None = None
    saved_bytes: int | None = None

    @property
    def own(self) -> frozenset[int]:
        """The node, what goes behind it, and the convolution whose weights change."""
        return frozenset((self.node, *self.downstream, *([self.scaled.node] if self.scaled else [])))

    @property
    def shared(self) -> frozenset[int]:
        """The nodes in front that it fuses."""
        return frozenset(self.upstream)

    @property
    def operator_version(self) -> int:
        """The domain version of the operator that the node becomes."""
        return schema.version_of(self.parts)

    def described(self, nodes: tuple[int, ...]) -> tuple[str, ...]:
        """Nodes as a report names them."""
        return tuple(f"{self.scope.nodes[i].op_type} '{label(self.scope.nodes[i])}'" for i in nodes)


@dataclass
class Draft:
    """One node's plan in the making, and why it grows no further."""

    plan: FusionPlan
    rank: int
    context: Context
    rejects: list[Reject] = field(default_factory=list)


class FusionRule(Rule):
    """A rule whose plans are FusionPlans."""

    on_operators = True
    needs = schema.OP_TYPES

    def sites(self, scope: Scope, context: Context) -> Iterator[Site]:
        """The operator's nodes, this run's and earlier ones', but those with channels last: their neighbours are no longer
        the model's own."""
        for index, node in enumerate(scope.nodes):
            if schema.is_operator(node) and not schema.layout_of(node):
                yield Site(scope, index)

    def apply(self, plan: FusionPlan, edit: Edit) -> None:
        """Put the fused node where the last of those stood that it replaces."""
        edit.replace(max(plan.node, *plan.downstream, plan.node), {plan.node, *plan.downstream}, _fused_node(plan, edit))
        if plan.scaled is not None:
            edit.replace(plan.scaled.node, {plan.scaled.node}, _scaled_node(plan.scaled, edit))
        edit.drop_unread(plan.upstream)

    def rewritten(self, plan: FusionPlan, outputs: list[str], times: dict[str, float] | None, log: Log) -> None:
        """Add the fused nodes to the report of the node."""
        name, path = label(plan.scope.nodes[plan.node]), plan.scope.path
        found = SiteReport(
            conv=name,
            pool=name,
            pattern="conv_avg_pool",
            status="rewritten",
            lowering="convavgpool",
            scope=path,
            rule=self.names[0],
        )
        log.fused(
            replace(found, operator=plan.parts.op_type),
            plan.scope.nodes[plan.node].output[0],
            plan.output,
            plan.described(tuple(reversed(plan.upstream))),
            plan.described(plan.downstream),
            plan.saved_bytes,
        )

    def kept(self, site: Site, verdict: Reject | None, times: dict[str, float] | None, log: Log) -> None:
        """Add the reasons why nodes beside it stay to the report of the node."""
        if verdict is not None:
            log.beside(site.scope.path, site.scope.nodes[site.root].output[0], (verdict, *verdict.others))


def check_fusion(site: Site, context: Context, grow: Callable[[Draft], None]) -> FusionPlan | Reject | None:
    """Plan a fusion by `grow`, or refuse; None if no node is there.  Raises AttributeReference."""
    scope, index = site.scope, site.root
    node = scope.nodes[index]
    values, weights = attributes(node), scope.info(node.input[1])
    kind, shape = weights.elem_type or scope.info(node.input[0]).elem_type, weights.shape
    channels = channels_of(shape, values)
    if channels is None or not kind:
        return reject(scope, index, "type or shape of the weights", "unknown", "known ones")
    parts = schema.parts_of(node)
    residual = node.input[-1] if parts.residual else None
    plan = FusionPlan(scope, index, channels, kind, parts, node.input[0], node.output[0], residual=residual)
    draft = Draft(plan, len(values["kernel_shape"]), context)
    grow(draft)
    plan = draft.plan
    if plan.upstream or plan.downstream:
        return replace(plan, saved_bytes=_saved_bytes(plan))
    return replace(draft.rejects[0], others=tuple(draft.rejects[1:])) if draft.rejects else None


def map_step(scope: Scope, index: int, rank: int) -> Step | Reject | None:
    """The node as a linear map, None where it joins two tensors."""
    return None if is_op(scope.nodes[index], "Sum") else known_step(scope, index, rank)


def slope(scope: Scope, index: int) -> float | None:
    """An activation's slope below 0 as the operator has it; None where it is an attribute of a function around it."""
    values = known_attributes(scope.nodes[index])
    if values is None:
        return None
    return float(values.get("alpha", np.float32(0.01))) if is_op(scope.nodes[index], "LeakyRelu") else 0.0


def channels_of(shape: tuple[Dim, ...] | None, values: Mapping[str, Any]) -> tuple[int, int] | None:
    """(M, C) of a node of the operator by its weights' shape and its attributes; None where they are unknown."""
    known = [dim for dim in shape or () if isinstance(dim, int)]
    return (known[0], known[-1] * int(values.get("group", 1))) if known and len(known) == len(shape or ()) else None


def _saved_bytes(plan: FusionPlan) -> int | None:
    """Bytes that are no longer written and read again, per sample where the batch is open; None if sizes are unknown."""
    scope, total = plan.scope, 0
    item = helper.tensor_dtype_to_np_dtype(plan.elem_type).itemsize
    names = [scope.nodes[i].output[0] for i in plan.upstream]
    names += [scope.nodes[plan.node].output[0], *(scope.nodes[i].output[0] for i in plan.downstream)][: len(plan.downstream)]
    for name in names:
        shape = scope.info(name).shape
        if shape is None or not all(isinstance(dim, int) for dim in shape[1:]):
            return None
        total += 2 * item * math.prod(dim if isinstance(dim, int) else 1 for dim in shape)
    return total


def _fused_node(plan: FusionPlan, edit: Edit) -> list[NodeProto]:
    """The node of `plan` as it becomes, behind the constants that it needs."""
    scope, parts = plan.scope, plan.parts
    node = NodeProto()
    nodes: list[NodeProto] = []
    node.CopyFrom(scope.nodes[plan.node])
    given = dict(zip(schema.parts_of(node).inputs, node.input, strict=False))
    given["X"], stem = plan.x, node.output[0]
    dtype = helper.tensor_dtype_to_np_dtype(plan.elem_type)

    def constant(key: tuple, make: Callable[[], np.ndarray], wanted: str) -> str:
        return edit.shared(key, lambda: make().astype(dtype), wanted, nodes)

    if plan.weights is not None:
        new, old = plan.weights, given.get("B", "")
        given["W"] = constant(("W", plan.node), lambda: new.weight, f"{given['W']}_scaled")
        if old or new.bias.any():
            given["B"] = constant(("B", plan.node), lambda: new.bias, f"{old or stem + '_bias'}_scaled")
    m, channels = plan.channels
    if plan.affine is not None:
        scale, shift = (np.broadcast_to(values, (channels,)) for values in (plan.affine.scale, plan.affine.shift))
        given["scale"] = constant(("scale", plan.node), lambda: scale, f"{stem}_scale")
        given["shift"] = constant(("shift", plan.node), lambda: shift, f"{stem}_shift")
    if plan.residual is not None:
        given["R"] = plan.residual
    if not parts.is_plain and not given.get("B"):
        given["B"] = constant(("zeros", plan.elem_type, m), lambda: np.zeros(m), f"{stem}_bias")
    schema.give_parts(node, parts)
    del node.input[:]
    node.input.extend(given[name] for name in parts.inputs if name != "B" or given.get("B"))
    node.output[0] = plan.output
    return [*nodes, node]


def _scaled_node(weights: Weights, edit: Edit) -> list[NodeProto]:
    """A convolution with other weights and bias."""
    before = edit.scope.nodes[weights.node]
    node = NodeProto()
    nodes: list[NodeProto] = []
    node.CopyFrom(before)
    old = node.input[2] if len(node.input) > 2 else ""
    del node.input[2:]
    node.input[1] = edit.shared(("W", weights.node), lambda: weights.weight, f"{node.input[1]}_scaled", nodes)
    if old or weights.bias.any():
        wanted = f"{old or node.output[0] + '_bias'}_scaled"
        node.input.append(edit.shared(("B", weights.node), lambda: weights.bias, wanted, nodes))
    node.input.extend(before.input[3:])
    return [*nodes, node]
