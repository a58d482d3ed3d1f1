# SPDX-License-Identifier: Apache-2.0
"""Which lowering a site gets: the first that is admitted and pays, by the cost of all of its tree."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto, helper

from convpool.algebra import cost
from convpool.algebra.affine import keeps, outside
from convpool.algebra.cost import Cost
from convpool.algebra.geometry import Ints, PoolSpec
from convpool.algebra.lowering import ORDERS, Lowering, lower, lowering_cost, nominal_size, without_kernel
from convpool.algebra.pads import fills_window
from convpool.algebra.refusal import Refusal
from convpool.ir.index import Scope
from convpool.ir.protos import label
from convpool.passes.base import Context, Reject, reject, rejection
from convpool.passes.convs import channel_count
from convpool.passes.pads import moved_pads, pads_upstream
from convpool.passes.pairs import PairPlan
from convpool.passes.runtime import runtime_of
from convpool.passes.tree import ConvLeaf, JoinTree, Tree, conv_leaves, folded_exactly, opaque_leaves

ENOUGH = 0.75
"""Largest share of the multiply-adds that may remain: no rewrite without pooling strides passes on a large map."""


@dataclass(frozen=True)
class Attempt:
    """Lowerings to try for every convolution: the first that is admitted, or by_cost the cheapest.

    spare_direct: not AveragePool and Conv, where the plugin has no fast kernel.
    """

    names: tuple[str, ...]
    by_cost: bool = False
    spare_direct: bool = False


BY_COST = (Attempt(("direct", "fused"), by_cost=True), Attempt(("direct",)), Attempt(("fused",)))
"""The cheapest lowering by time may leave too many multiply-adds (a pointwise convolution fused): then the others."""


def attempts(request: str, direct_without_kernel: bool) -> tuple[Attempt, ...]:
    """What is tried for a request, in order; direct_without_kernel: see `convpool.options.Target`."""
    if request == "auto":
        return BY_COST
    order, operator = ORDERS[request], request == "convavgpool"
    own = tuple(Attempt(order[i:], spare_direct=operator) for i in range(len(order)))
    return (*own, *BY_COST) if operator and direct_without_kernel else own


def choose(plan: PairPlan, context: Context) -> PairPlan | Reject:
    """The plan with a lowering for each convolution, the first that pays, or why there is none."""
    failure: Reject | None = None
    for attempt in attempts(context.options.lowering, context.options.direct_without_kernel):
        lowerings = []
        for leaf in conv_leaves(plan.tree):
            found, reason = _of_leaf(plan, leaf, attempt, context)
            failure = failure or reason
            if found is None:
                break
            lowerings.append(found)
        else:
            outcome = _judge(plan, lowerings)
            if isinstance(outcome, PairPlan):
                return replace(outcome, fallback=_fallback(outcome, failure, context))
            failure = failure or outcome
    assert failure is not None
    return failure


def _fallback(plan: PairPlan, failure: Reject | None, context: Context) -> Reject | None:
    """Why a convolution of a plan is not the operator, where that is asked for.  failure: of the attempts before the plan's."""
    if context.options.lowering != "convavgpool":
        return None
    for leaf, lowering in zip(conv_leaves(plan.tree), plan.lowerings, strict=True):
        if lowering.name != "convavgpool":
            found = _lowering(plan, leaf, "convavgpool", context.main_opset)
            return found if isinstance(found, Reject) else failure
    return None


def _of_leaf(plan: PairPlan, leaf: ConvLeaf, attempt: Attempt, context: Context) -> tuple[Lowering | None, Reject | None]:
    """The lowering that an attempt comes to for one convolution, and the first reason against a better one."""
    admitted = [_lowering(plan, leaf, name, context.main_opset) for name in attempt.names]
    usable = [item for item in admitted if isinstance(item, Lowering)]
    reason = None
    refusal = without_kernel(leaf.conv, plan.pooling.spec) if attempt.spare_direct else None
    if refusal is not None and any(map(_is_direct, usable)):
        usable, reason = [item for item in usable if not _is_direct(item)], rejection(plan.scope, leaf.node, refusal)
    if not usable:
        return None, reason or next(item for item in admitted if isinstance(item, Reject))
    if attempt.by_cost:
        return min(usable, key=lambda found: _leaf_cost(plan, leaf, found).time), reason
    return usable[0], reason


def _is_direct(lowering: Lowering) -> bool:
    """Whether a box mean over windows stands before the convolution."""
    return lowering.name == "direct" and lowering.pool is not None


def _lowering(plan: PairPlan, leaf: ConvLeaf, name: str, main_opset: int) -> Lowering | Reject:
    """`lowering.lower`, or why not: a Pad would be merged into the box mean, or the type cannot hold the fused weights, each a
    share of those that there are."""
    scope, spec = plan.scope, plan.pooling.spec
    found = lower(leaf.layer, spec, name, runtime_of(scope, leaf.conv, main_opset, spec))
    if isinstance(found, Refusal):
        return rejection(scope, leaf.node, found)
    if found.pool is not None and (merged := _merged_pad(scope, leaf, found.pool)) is not None:
        return merged
    if found.name == "fused" and leaf.weight is not None and leaf.weight.data_type == TensorProto.FLOAT16:
        assert spec is not None
        weight, _ = folded_exactly(leaf)
        if not keeps(weight / spec.taps, np.dtype(np.float16)):
            return rejection(scope, leaf.node, outside("fused weights"))
    return found


def _merged_pad(scope: Scope, leaf: ConvLeaf, box: PoolSpec) -> Reject | None:
    """Why a Pad in front keeps the box mean from standing before a convolution."""
    for where, pad, orders in pads_upstream(scope, leaf.input):
        if pad is not None and _reaches(where, pad, orders, box):
            condition = f"Pad '{label(where.nodes[pad])}' in front of the box mean"
            return reject(
                scope, leaf.node, condition, "pads that reach its window, or unknown ones", "less, as onnxruntime demands"
            )
    return None


def _reaches(scope: Scope, pad: int, orders: tuple[Ints | None, ...], box: PoolSpec) -> bool:
    """Whether a Pad's zeros, merged into the box mean, would fill a window of it; so do pads that are unknown.

    orders: the Transposes between, through which onnxruntime moves it.
    """
    pads = moved_pads(scope, pad, orders, box.rank)
    return pads is None or fills_window(pads, box)


def _judge(plan: PairPlan, lowerings: list[Lowering]) -> PairPlan | Reject:
    """Condition (5), over all of the tree; sizes that the model leaves open are taken as nominal ones."""
    scope, spec = plan.scope, plan.pooling.spec
    leaves = conv_leaves(plan.tree)
    bytes_ = _item_bytes(scope, leaves[0])
    before, after, priced = Cost(), Cost(), []
    for leaf, found in zip(leaves, lowerings, strict=True):
        size = leaf.size or nominal_size(leaf.conv, spec)
        old = cost.conv_cost(leaf.conv, leaf.weight_shape, size, bytes_)
        new = lowering_cost(found, leaf.layer, size, bytes_)
        before, after = before + old, after + new
        known = leaf.size is not None
        priced.append(replace(found, macs_before=old.macs if known else None, macs_after=new.macs if known else None))
    full = leaves[0].conv.output_size(leaves[0].size or nominal_size(leaves[0].conv, spec))
    window = spec or PoolSpec(full, (1,) * len(full), (0,) * (2 * len(full)), (1,) * len(full))
    pooled = window.output_size(full)
    channels = leaves[0].weight_shape[0]
    before += cost.pool_cost(window, channel_count(scope, plan.pooling.input) or channels, full, bytes_)
    steps = len(_moving(plan.tree))
    before += cost.affine_cost(steps, channels, full, bytes_)
    after += cost.affine_cost(steps, channels, pooled, bytes_)
    for opaque in opaque_leaves(plan.tree):
        after += cost.pool_cost(window, channel_count(scope, opaque.tensor) or channels, full, bytes_)
    if after.macs > ENOUGH * before.macs or after.time >= before.time:
        return reject(
            scope,
            leaves[0].node,
            f"saves too little as {lowerings[0].name}",
            f"{after.macs:,} of {before.macs:,} multiply-adds, "
            f"and {after.additions:,} additions in place of {before.additions:,}",
            f"at most {ENOUGH:.0%} of the multiply-adds, and less time by the cost model",
        )
    return replace(plan, lowerings=tuple(priced))


def _leaf_cost(plan: PairPlan, leaf: ConvLeaf, found: Lowering) -> Cost:
    size = leaf.size or nominal_size(leaf.conv, plan.pooling.spec)
    return lowering_cost(found, leaf.layer, size, _item_bytes(plan.scope, leaf))


def _moving(tree: Tree) -> list[int]:
    """Joins and nodes that go behind the pooling."""
    if isinstance(tree, ConvLeaf):
        return [moved.node for moved in tree.behind]
    if isinstance(tree, JoinTree):
        return [tree.node, *(m.node for m in tree.behind), *(n for child in tree.children for n in _moving(child))]
    return []


def _item_bytes(scope: Scope, leaf: ConvLeaf) -> int:
    elem_type = scope.info(scope.nodes[leaf.node].input[1]).elem_type
    return helper.tensor_dtype_to_np_dtype(elem_type).itemsize if elem_type else 4
