# SPDX-License-Identifier: Apache-2.0
"""In front of a node of the operator: maps per channel, then an activation.

Towards the input: (1) at most one Relu or LeakyRelu; (2) before it any number of linear nodes (`linear`) with constants, one
per channel or one for all, that neither raise the rank nor widen the channels; (3) only the node reads what they give, or nodes
that all fuse with them: then each of them recomputes it as it loads, and it is never written; (4) no layer before fuses with
them already: behind a convolution or matrix product that nothing else reads, every runtime does them for free; (5) in front of a
plain convolution (`offload_conv`) an activation only, of what no linear node or Add gives: the plugin's kernels for those would
do a map in a pass of its own, and runtimes fuse the activation with what stays.  `plain_prologues` of the limits lifts this.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from onnx import NodeProto, helper

from convpool.algebra.parts import IDENTITY, PROLOGUES, Affine, holds, keeps, outside
from convpool.ir import schema
from convpool.ir.index import Scope
from convpool.ir.protos import attributes, is_op, known_attributes, label
from convpool.rules.base import Context, Reject, Site, reject, rejection
from convpool.rules.image_conv import is_plain
from convpool.rules.linear import Step, is_map, op_of
from convpool.rules.neighbours.fusion import (
    Draft,
    FusionPlan,
    FusionRule,
    channels_of,
    check_fusion,
    elem_type,
    map_step,
    slope,
)

EPILOGUE_HOSTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators into whose own epilogue runtimes fuse what is elementwise behind them."""


class FusePrologue(FusionRule):
    """What stands in front of a node of the operator goes into it."""

    names = ("fuse_prologue",)

    def check(self, site: Site, context: Context) -> FusionPlan | Reject | None:
        """What the node fuses, or why it fuses nothing."""
        return check_fusion(site, context, grow)


def grow(draft: Draft) -> None:
    """Fuse all that can be, into the plan of `draft`."""
    plan = draft.plan
    if _has_prologue(plan.scope, plan.node):
        return
    if (
        _is_plain(plan.scope, plan.node, draft.context)
        and not draft.context.options.limits.plain_prologues
        and not _only_an_activation(plan.scope, plan.x)
    ):
        producer = plan.scope.producer.get(plan.x)
        if producer is not None and _may_fuse(plan.scope, producer):
            found = "other elementwise nodes in front of a convolution without a pooling"
            draft.rejects.append(reject(plan.scope, producer, "prologue", found, "only an activation"))
        return
    scope, x, parts, affine = plan.scope, plan.x, plan.parts, IDENTITY
    upstream: list[int] = []
    while (index := scope.producer.get(x)) is not None:
        node = scope.nodes[index]
        if not _may_fuse(scope, index):
            break
        if not _all_fuse(scope, x, plan.node, bool(upstream), draft.context):
            others = f"output '{x}' {scope.sole_reader(x)}"
            draft.rejects.append(reject(scope, index, others, "other readers", "only the convolution"))
            break
        if is_op(node, *PROLOGUES):
            alpha = slope(scope, index)
            if alpha is None or parts.prologue or affine is not IDENTITY:
                break
            if not holds(np.asarray(alpha), np.dtype(np.float16)):  # engines compute it in X's type, a float32 model's too
                draft.rejects.append(reject(scope, index, "slope", f"{alpha:g}", "a number of float16"))
                break
            parts, x = replace(parts, prologue=node.op_type, prologue_alpha=alpha), node.input[0]
        else:
            step = _fitting(draft, index)
            if isinstance(step, Reject):
                draft.rejects.append(step)
                break
            assert step.affine is not None
            if step.affine is not IDENTITY:
                affine = step.affine if affine is IDENTITY else affine.after(step.affine)
            x = node.input[step.operand]
        upstream.append(index)
        if affine is not IDENTITY or parts.prologue:  # only an Identity is not worth a change
            parts = replace(parts, affine=affine is not IDENTITY)
            given = affine if parts.affine else None
            draft.plan = replace(plan, x=x, affine=given, parts=parts, upstream=tuple(upstream))
    host = _host(scope, draft.plan.x) if draft.plan.upstream else None
    if host is not None:
        got = f"{scope.nodes[host].op_type} '{label(scope.nodes[host])}' before it, which fuses it"
        draft.rejects.append(reject(scope, draft.plan.upstream[0], "prologue", got, "a tensor that stays as it is"))
        draft.plan = plan
    elif draft.plan.affine is not None and not _representable(plan, draft.plan.affine):
        draft.rejects.append(rejection(scope, draft.plan.upstream[0], outside("scale and shift")))
        draft.plan = plan


def _fitting(draft: Draft, index: int) -> Step | Reject:
    """Node `index` in front of the chain as a map per channel of a tensor of the same shape; condition (2)."""
    scope, rank = draft.plan.scope, draft.rank
    node = scope.nodes[index]
    step = map_step(scope, index, rank)
    if isinstance(step, Reject):
        return step
    if step is None or step.affine is None:
        return reject(scope, index, "constant operands", "computed ones", "constants per channel")
    if step.affine is IDENTITY:
        return step
    channels = channels_of(scope, draft.plan.node)
    assert channels is not None
    sizes = {step.affine.scale.size, step.affine.shift.size}
    if is_op(node, "BatchNormalization"):
        return step if sizes == {channels[1]} else reject(scope, index, "parameters", sizes, f"{channels[1]} of each")
    shape = scope.info(node.input[step.operand]).shape
    if shape is None or len(shape) != rank + 2:
        return reject(scope, index, "rank", "unknown" if shape is None else len(shape), rank + 2)
    if sizes != {1} and (shape[1] != channels[1] or not sizes <= {1, channels[1]}):
        return reject(scope, index, "channels", shape[1], f"{channels[1]}, not widened")
    return step


def _all_fuse(scope: Scope, x: str, node: int, inside: bool, context: Context) -> bool:
    """Whether whatever reads `x` fuses with it: the chain so far, or nodes that may have a prologue and have none yet."""
    if x in scope.outputs or x in scope.captured:
        return False
    readers = scope.readers.get(x, [])
    if inside:
        return len(readers) == 1
    return all(
        schema.is_operator(scope.nodes[i])
        and scope.nodes[i].input[0] == x
        and x not in scope.nodes[i].input[1:]
        and (i == node or not context.excluded(label(scope.nodes[i])) and _may_have_prologue(scope, i, x, context))
        for i in readers
    )


def _may_have_prologue(scope: Scope, index: int, x: str, context: Context) -> bool:
    if known_attributes(scope.nodes[index]) is None or _has_prologue(scope, index) or schema.layout_of(scope.nodes[index]):
        return False
    free = context.options.limits.plain_prologues or not _is_plain(scope, index, context)
    return free or _only_an_activation(scope, x)


def _has_prologue(scope: Scope, index: int) -> bool:
    parts = schema.parts_of(scope.nodes[index])
    return parts.affine or bool(parts.prologue)


def _only_an_activation(scope: Scope, x: str) -> bool:
    """Whether an activation gives `x`, of what no elementwise node gives; condition (5)."""
    index = scope.producer.get(x)
    if index is None or not is_op(scope.nodes[index], *PROLOGUES):
        return False
    before = scope.producer.get(scope.nodes[index].input[0])
    while before is not None and _is_idle(scope.nodes[before]):
        before = scope.producer.get(scope.nodes[before].input[0])
    return before is None or not (is_map(scope, before) or is_op(scope.nodes[before], "Sum"))


def _is_plain(scope: Scope, index: int, context: Context) -> bool:
    channels = channels_of(scope, index)
    return channels is not None and is_plain(scope.nodes[index], channels[1], context.options.limits)


def _is_idle(node: NodeProto) -> bool:
    op = op_of(node)
    return op is not None and op.idle


def _may_fuse(scope: Scope, index: int) -> bool:
    """Whether a node's operator may stand in a prologue."""
    return is_map(scope, index) or is_op(scope.nodes[index], *PROLOGUES)


def _host(scope: Scope, x: str) -> int | None:
    """The layer that gives `x` only to this chain, possibly by an Add, and into which runtimes fuse it; condition (4)."""
    for _ in range(2):
        index = scope.producer.get(x)
        if index is None or scope.sole_reader(x) is not None:
            return None
        node = scope.nodes[index]
        if is_op(node, *EPILOGUE_HOSTS):
            return index
        if not is_op(node, "Add", "Sum"):
            return None
        given = [
            name for name in node.input if (i := scope.producer.get(name)) is not None and is_op(scope.nodes[i], *EPILOGUE_HOSTS)
        ]
        if not given:
            return None
        x = given[0]
    return None


def _representable(plan: FusionPlan, affine: Affine) -> bool:
    """Whether the type has scale and shift; channels are added up within the convolution's groups."""
    dtype = helper.tensor_dtype_to_np_dtype(elem_type(plan.scope, plan.node))
    group = int(attributes(plan.scope.nodes[plan.node]).get("group", 1))
    channels = channels_of(plan.scope, plan.node)
    assert channels is not None
    scale = np.broadcast_to(affine.scale, (channels[1],)).reshape(group, -1)
    return keeps(scale, dtype) and holds(affine.shift, dtype)
