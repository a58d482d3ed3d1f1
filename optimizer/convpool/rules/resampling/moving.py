# SPDX-License-Identifier: Apache-2.0
"""The change and the reports of the rules that move a convolution in front of resamplings."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from onnx import NodeProto

from convpool.algebra.parts import IDENTITY, UPSAMPLING_OP_TYPE, fold
from convpool.ir.edit import Edit
from convpool.ir.index import Scope
from convpool.ir.protos import is_op, label
from convpool.report import Log, SiteReport
from convpool.rules.base import Reject, Rule
from convpool.rules.convs import macs
from convpool.rules.resampling import plans
from convpool.rules.resampling.emit import Emitter
from convpool.rules.resampling.maps import Applied, Source
from convpool.rules.seen import verdict_of


class ResizeRule(Rule):
    """A rule whose sites are ResizeSites.  pattern: what a report calls them."""

    needs: ClassVar[Collection[str]] = plans.SPELLINGS
    pattern: ClassVar[str] = "resize_conv"

    def report(self, scope: Scope, conv: int, resize: int, lowering: str | None, **values: Any) -> SiteReport:
        """A report of a convolution and a resampling of a scope."""
        names = {"conv": label(scope.nodes[conv]), "pool": label(scope.nodes[resize])}
        return self.site_report(scope, self.pattern, lowering, **names, **values)

    def kept(self, site: plans.ResizeSite, verdict: Reject | None, times: dict[str, float] | None, log: Log) -> None:
        """One report with the reason, unless the site is of nodes that an earlier round made."""
        scope = site.scope
        nodes = (scope.nodes[site.root], scope.nodes[site.resize])
        if any(log.made(name) for node in nodes for name in (*node.input, node.output[0])):
            return
        count = macs(scope, site.root)
        counts: dict[str, Any] = {"macs_before": count, "macs_after": count, "times_us": times}
        log.kept(self.report(scope, site.root, site.resize, None, **counts, **verdict_of(verdict)))


class MovingRule(ResizeRule):
    """A rule whose plans are ResizePlans."""

    def apply(self, plan: plans.ResizePlan, edit: Edit) -> None:
        scope, leaf = plan.scope, plan.leaf
        old = scope.nodes[leaf.node]
        emitter = Emitter(edit, leaf.conv.rank, plan.output, self.names[0])
        behind = [scope.nodes[index] for index in plan.behind]
        results: list[str] = []
        for group, weight, bias in self._weights(plan):
            maps = [emitter.joined("Add", [emitter.source(source) for source in sources]) for _, _, sources in group.ranges]
            x = emitter.joined("Concat", maps)
            if group.form == plans.OPERATOR and weight is not None:
                results = [emitter.operator(x, weight, bias, leaf.conv, group.resample, *results)]
            else:
                results.append(_convolution(emitter, plan, group, x, weight, bias, behind))
        name = emitter.joined("Add", results)
        last = next(node for node in reversed(emitter.nodes) if name in node.output)
        last.output[0] = plan.output
        _name(emitter.nodes, old)
        edit.replace(leaf.node, plan.own)
        edit.drop_unread(plan.passed)

    def _weights(self, plan: plans.ResizePlan) -> Iterator[tuple[plans.Group, np.ndarray | None, np.ndarray | None]]:
        """The weights and the bias of each group; None for weights that stay, and where there is no bias."""
        leaf = plan.leaf
        if leaf.weight is None or not plans.is_known(plan.scope, leaf) or plan.lowering == plans.NODE:
            yield plan.groups[0], None, None
            return
        array = leaf.weight.array()
        bias = None if leaf.bias is None else leaf.bias.array()
        if plan.affine is not IDENTITY:
            dtype = array.dtype
            array, bias = fold(array, bias, plan.affine)
            array, bias = array.astype(dtype), None if bias is None else bias.astype(dtype)
        large = [group for group in plan.groups if not group.form]
        joined = plans.Group(tuple(item for group in large for item in _at_full_size(group, plan.scope)), None)
        # What is convolved at the size of the result comes last, so that runtimes fuse the sum into that convolution; but for a
        # node of UpsampleConv, which adds it as its residual.
        moved, whole = [group for group in plan.groups if group.form], [joined] if large else []
        ordered = [*whole, *moved] if moved[0].form == plans.OPERATOR else [*moved, *whole]
        for group in ordered:
            part = array if plans.is_whole(group, plans.channels_in(leaf)) else array[:, group.channels]
            yield group, part, bias if group is ordered[-1] else None

    def rewritten(self, plan: plans.ResizePlan, outputs: list[str], times: dict[str, float] | None, log: Log) -> None:
        counts: dict[str, Any] = {"macs_before": plan.macs_before, "macs_after": plan.macs_after, "times_us": times}
        operator = UPSAMPLING_OP_TYPE if plan.operator_version else None
        found = self.report(plan.scope, plan.leaf.node, plan.resize, plan.lowering, operator=operator, **counts)
        log.rewritten(found, outputs[-1] if operator else None)


def _at_full_size(group: plans.Group, scope: Scope) -> Iterator[tuple[int, int, tuple[Source, ...]]]:
    """The ranges of a group that is convolved at the size of the result."""
    for first, count, sources in group.ranges:
        found = group.resample
        if found is None:
            yield first, count, sources
        elif sources == (found.input,):
            yield first, count, (scope.nodes[found.node].output[0],)
        else:
            yield first, count, tuple(Applied(found.node, (source,), kind="resample", resample=found) for source in sources)


def _convolution(
    emitter: Emitter,
    plan: plans.ResizePlan,
    group: plans.Group,
    x: str,
    weight: np.ndarray | None,
    bias: np.ndarray | None,
    behind: Sequence[NodeProto],
) -> str:
    """The nodes of one group's convolution; the tensor that they give."""
    conv, old = plan.leaf.conv, plan.scope.nodes[plan.leaf.node]
    if weight is None:
        assert group.resample is not None
        if group.form == plans.NODE and group.resample.up is not None:
            return emitter.node(x, list(old.input[1:]), conv, group.resample.up)
        return emitter.kept(x, list(old.input[1:]), conv, group.resample, behind)
    if group.resample is None and plan.skip_is_node:
        return emitter.operator(x, weight, bias, conv, None)
    if group.resample is None:
        names = [emitter.constant(array, name) for array, name in ((weight, "weight"), (bias, "bias")) if array is not None]
        return emitter.conv(x, names[0], names[1] if len(names) > 1 else "", conv)
    return emitter.form(group.form, x, weight, bias, conv, group.resample, behind)


def _name(nodes: Sequence[NodeProto], old: NodeProto) -> None:
    """Give the convolution's name, doc string and metadata to the first node that stands for it."""
    made = [node for node in nodes if is_op(node, "Conv", "ConvTranspose") or node.domain]
    node = made[-1] if made[-1].domain else made[0]
    node.name, node.doc_string = old.name, old.doc_string
    node.metadata_props.extend(old.metadata_props)
    if not node.doc_string:
        node.ClearField("doc_string")
