# SPDX-License-Identifier: Apache-2.0
"""Any enlarging resampling, then a 1x1 convolution: the convolution goes in front.  And the mirror image.

    x - Resize - Conv 1x1                       x - Conv 1x1 - Resize
    x - Resize - Concat - Conv 1x1              x - Conv 1x1 - Resize - Add
             y -                                         y - Conv 1x1 -

    x - Conv 1x1 - Resize to fewer elements     x - Resize - Conv 1x1

A 1x1 convolution acts on each position alike, and the weights of each position of a resampling add up to one: so the bias moves
too.  Conditions of `ResizeLast`, in the order in which they are checked: (1) no attribute refers to a function's; (2) strides of
1, no pads; (3) a resampling that `resampling.resize` takes is in front, through what `resampling.maps` lists, and enlarges; (4)
it is one map, or the convolution has one group, constant weights, and is split by its input channels; (5) its constants are
finite, if it moves in front of an interpolation, which multiplies by 0 too; (6) it takes at most 95% of the time by the cost
model.  Of `ResizeFirst`: (1), (2), (5), and (6) on a CPU; (3) only the Resize reads the convolution, and makes its result
smaller; (7) on a GPU no more numbers are written than before: the channels that are resized are those of its input then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass

import numpy as np

from convpool.algebra.expand import dense_cost
from convpool.algebra.lowering import NOMINAL_SIZE
from convpool.ir.edit import Edit
from convpool.ir.index import Scope
from convpool.ir.protos import is_op, stand_for
from convpool.report import Log
from convpool.rules.base import Context, Plan, Reject, reject
from convpool.rules.convs import ConvLeaf, conv_leaf, conv_rank
from convpool.rules.resampling import plans
from convpool.rules.resampling.emit import Emitter, MovingRule, ResizeRule
from convpool.rules.resampling.maps import Walk
from convpool.rules.resampling.resize import Resample, recognise


class ResizeLast(MovingRule):
    """Every 1x1 convolution that reads what is resampled."""

    names = ("resize_last",)

    def sites(self, scope: Scope, context: Context) -> Iterator[plans.ResizeSite]:
        return plans.resize_sites(scope, pointwise=True)

    def check(self, site: plans.ResizeSite, context: Context) -> plans.ResizePlan | Reject | None:
        leaf = _pointwise(site.scope, site.root)
        if not isinstance(leaf, ConvLeaf):
            return leaf
        walk = Walk(site.scope, leaf.conv.rank, whole=False)
        found = walk.map(leaf.input)
        if not found.resampled:
            return next(iter(walk.rejects), None)
        picks = all(part.resample.picks for part in found.resampled if part.resample is not None)
        plan = _infinite(site.scope, leaf, picks=picks) or plans.planned(site, leaf, found, found.nodes, context)
        if isinstance(plan, plans.ResizePlan):
            plan = plans.with_forms(plans.with_nodes_behind(plan), context)
        return plans.with_activations(plan) if isinstance(plan, plans.ResizePlan) else plan


def _pointwise(scope: Scope, index: int) -> ConvLeaf | Reject:
    """Condition (2)."""
    rank = conv_rank(scope, index)
    assert isinstance(rank, int)
    leaf = conv_leaf(scope, index, rank)
    if isinstance(leaf, Reject):
        return leaf
    if any(stride != 1 for stride in leaf.conv.strides):
        return reject(scope, index, "strides", list(leaf.conv.strides), "1 on every axis")
    if any(leaf.conv.pads):
        return reject(scope, index, "pads", list(leaf.conv.pads), "none")
    return leaf


def _infinite(scope: Scope, leaf: ConvLeaf, *, picks: bool) -> Reject | None:
    """Condition (5): a bias of minus infinity, which masks a class, would become NaN.  picks: whether nothing is interpolated."""
    constants = [item.array() for item in (leaf.weight, leaf.bias) if item is not None and not picks]
    if all(np.isfinite(array).all() for array in constants):
        return None
    return reject(scope, leaf.node, "weights and bias", "infinity or NaN", "finite numbers in front of an interpolation")


@dataclass(frozen=True)
class ShrinkPlan(Plan):
    """A convolution that goes behind the resampling that reads it."""

    leaf: ConvLeaf
    resample: Resample
    macs_before: int | None
    macs_after: int | None

    @property
    def own(self) -> frozenset[int]:
        return frozenset((self.leaf.node, self.resample.node))

    @property
    def convolutions(self) -> tuple[int, ...]:
        return (self.leaf.node,)


class ResizeFirst(ResizeRule):
    """Every 1x1 convolution whose result is only read to be made smaller."""

    names = ("resize_first",)
    needs = ("Resize", "Upsample")
    pattern = "conv_resize"

    def sites(self, scope: Scope, context: Context) -> Iterator[plans.ResizeSite]:
        for index, node in enumerate(scope.nodes):
            if is_op(node, "Resize", "Upsample"):
                conv = scope.made_by(node.input[0], "Conv")
                if conv is not None and plans.is_pointwise(scope, conv):
                    yield plans.ResizeSite(scope, conv, index)

    def check(self, site: plans.ResizeSite, context: Context) -> ShrinkPlan | Reject | None:
        """A plan if it is exact and saves; None for a Resize that does not make the map smaller."""
        scope = site.scope
        leaf = _pointwise(scope, site.root)
        found = recognise(scope, site.resize, leaf.conv.rank) if isinstance(leaf, ConvLeaf) else leaf
        if isinstance(found, Reject) or not isinstance(leaf, ConvLeaf):
            return found if isinstance(found, Reject) else None
        assert found is not None
        if found.growth >= 1 or 0 in (scope.info(scope.nodes[site.resize].output[0]).shape or ()):
            return None
        if (wrong := _infinite(scope, leaf, picks=found.picks)) is not None:
            return wrong
        if (readers := scope.other_readers(found.input)) is not None:
            return reject(scope, site.root, "result of the convolution", readers, "one reader, the Resize")
        size, m, c = leaf.size or (NOMINAL_SIZE,) * leaf.conv.rank, plans.channels_out(leaf), plans.channels_in(leaf)
        before, elements = dense_cost(leaf.conv, m, c, size, 4), math.prod(size) * found.growth
        resizing = plans.weight_of(found, leaf.conv.rank) * elements
        share = (before.time * found.growth + c * resizing) / (before.time + m * resizing)
        if "cpu" in context.options.devices and share > plans.ENOUGH:
            got = f"{c} channels in place of {m}, {share:.2f} of the time by the cost model"
            return reject(scope, site.root, "resizing the convolution's input", got, f"at most {plans.ENOUGH:.0%} of the time")
        if "gpu" in context.options.devices and c * found.growth > m:
            return reject(scope, site.root, "channels that are resized", c, f"at most {m / found.growth:.0f}, for this target")
        counts = (before.macs, int(before.macs * found.growth)) if leaf.size is not None else (None, None)
        return ShrinkPlan(scope, leaf, found, *counts)

    def apply(self, plan: ShrinkPlan, edit: Edit) -> None:
        scope, leaf = plan.scope, plan.leaf
        old, resize = scope.nodes[leaf.node], scope.nodes[plan.resample.node]
        emitter = Emitter(edit, leaf.conv.rank, resize.output[0], self.names[0])
        small = emitter.resample(old.input[0], plan.resample)
        stand_for(emitter.nodes[-1], resize)
        conv = deepcopy(old)
        conv.input[0], conv.output[0] = small, resize.output[0]
        edit.nodes.append(conv)
        edit.replace(plan.resample.node, plan.own)

    def rewritten(self, plan: ShrinkPlan, outputs: list[str], times: dict[str, float] | None, log: Log) -> None:
        counts = {"macs_before": plan.macs_before, "macs_after": plan.macs_after}
        log.rewritten(self.report(plan.scope, plan.leaf.node, plan.resample.node, "conv_last", **counts), None)
