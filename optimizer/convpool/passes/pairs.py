# SPDX-License-Identifier: Apache-2.0
"""What the passes share that write a convolution with a pooling in front of it: sites, plans, emission, reports."""

from __future__ import annotations

from dataclasses import dataclass, replace

from convpool.algebra import cost
from convpool.algebra.lowering import Lowering
from convpool.ir.protos import AttributeReference, label
from convpool.ir.schema import OP_TYPE, VERSION
from convpool.passes.base import Pass, Plan, Reject, Site
from convpool.passes.convs import conv_leaf, conv_rank
from convpool.passes.edit import Edit
from convpool.passes.emit import Emitter
from convpool.passes.pooling import Candidate
from convpool.passes.reasons import in_short, in_words
from convpool.passes.shape_readers import Shapes, rewire
from convpool.passes.tree import ConvLeaf, Pooling, Tree, conv_leaves, tree_nodes
from convpool.report import SiteReport
from convpool.reporting import Log


@dataclass(frozen=True)
class PairSite(Site):
    """A convolution and a pooling: node `root` ends an average over `tensor`, which is computed from convolution `conv`.

    Where there is no average, `root` is the convolution.  averages: what may be averages of averages, from `root` on to the
    one of `tensor`; empty where `root` has been recognised as an AveragePool.
    """

    tensor: str
    conv: int
    pattern: str
    averages: tuple[Candidate, ...] = ()

    @property
    def convolution(self) -> tuple[str, str]:
        """The convolution by what it gives, with its scope's path."""
        return self.scope.path, self.scope.nodes[self.conv].output[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the convolution and of the pooling, "" where there is none; of several poolings the first one first."""
        conv = label(self.scope.nodes[self.conv])
        if self.root == self.conv:
            return conv, ""
        roots = [item.root for item in reversed(self.averages)] or [self.root]
        return conv, *(label(self.scope.nodes[root]) for root in roots)


@dataclass(frozen=True)
class PairPlan(Plan):
    """A site that is exact to rewrite and pays.  `lowerings` belong to the convolutions of `tree`, left to right."""

    pattern: str
    pooling: Pooling
    tree: Tree
    lowerings: tuple[Lowering, ...] = ()
    fallback: Reject | None = None
    """Why a convolution does not become the operator that is asked for."""
    shapes: Shapes = Shapes()

    @property
    def own(self) -> frozenset[int]:
        """The average and everything between it and the convolutions, with what reads their shapes."""
        return frozenset((*self.pooling.nodes, *tree_nodes(self.tree), *self.shapes.nodes))

    @property
    def operator_version(self) -> int:
        """That of ConvAvgPool, where any convolution becomes one."""
        return VERSION if any(lowering.name == "convavgpool" for lowering in self.lowerings) else 0

    @property
    def convolutions(self) -> tuple[int, ...]:
        """The convolutions of the tree."""
        return tuple(leaf.node for leaf in conv_leaves(self.tree))


class PairPass(Pass):
    """A pass whose plans are PairPlans."""

    def apply(self, plan: PairPlan, edit: Edit) -> None:
        """Put the plan's nodes in the place of the last of those that go."""
        nodes = Emitter(edit, plan.pooling, plan.lowerings).run(plan.tree)
        gone = {*plan.pooling.nodes, *tree_nodes(plan.tree)}
        split = plan.pooling.split
        edit.replace(max(plan.pooling.root, *tree_nodes(plan.tree)) if split is None else split, gone, nodes)
        rewire(plan.shapes, edit)
        edit.drop_unread(index for leaf in conv_leaves(plan.tree) for index in leaf.passed)

    def rewritten(self, plan: PairPlan, outputs: list[str], times: dict[str, float] | None, log: Log) -> None:
        """One report for each convolution."""
        scope, made = plan.scope, iter(outputs)
        pool = label(scope.nodes[plan.pooling.root]) if plan.pooling.nodes else ""
        for leaf, lowering in zip(conv_leaves(plan.tree), plan.lowerings, strict=True):
            as_operator = lowering.name == "convavgpool"
            site = SiteReport(
                label(scope.nodes[leaf.node]),
                pool,
                plan.pattern,
                "rewritten",
                lowering.name,
                None,
                lowering.macs_before,
                lowering.macs_after,
                scope.path,
                times,
                OP_TYPE if as_operator else None,
                fallback=None if as_operator or plan.fallback is None else plan.fallback.why,
            )
            log.rewritten(site, next(made) if as_operator else None)

    def kept(self, site: PairSite, verdict: Reject | None, times: dict[str, float] | None, log: Log) -> None:
        """One report with the reason, unless the site is of nodes that an earlier round made."""
        if log.made(site.scope.nodes[site.root].output[0]):
            return
        conv, pool, *_ = site.names
        count = macs(site)
        found = SiteReport(conv, pool, site.pattern, "excluded", None, "excluded by name", count, count, site.scope.path, times)
        if verdict is not None:
            found = replace(found, status="rejected", reason=str(verdict), obstacle=in_short(verdict), in_words=in_words(verdict))
        log.kept(found)


def macs(site: PairSite) -> int | None:
    """Multiply-adds of the site's convolution for one sample, None where its sizes are unknown."""
    rank = conv_rank(site.scope, site.conv)
    try:
        leaf = conv_leaf(site.scope, site.conv, rank) if rank else None
    except AttributeReference:
        return None
    if not isinstance(leaf, ConvLeaf) or leaf.size is None:
        return None
    return cost.conv_cost(leaf.conv, leaf.weight_shape, leaf.size, 4).macs


def operator_lowering(pooling: Pooling, leaf: ConvLeaf, count: int | None = None) -> Lowering:
    """A convolution as a node of the operator, which saves no multiply-adds: `count` before and after."""
    return Lowering("convavgpool", pooling.spec, leaf.conv, macs_before=count, macs_after=count)
