# SPDX-License-Identifier: Apache-2.0
"""Tensors between a convolution and an average get their channels first, where a model transposes them away and back.

    x - Conv - Transpose - Add - Transpose - AveragePool        x - Conv - Add - AveragePool

Converters from TensorFlow write so.  All tensors that are laid out alike (`layouts`) change together.  Conditions: (1) fewer
Transposes stand there afterwards, or as many, and they move less; (2) `reach` asks for the convolution, since a pair appears.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from convpool.algebra.layouts import to_channels_first, to_channels_last
from convpool.ir.index import Scope
from convpool.ir.protos import is_op
from convpool.passes.base import Context, Pass, Site
from convpool.passes.channels_last import LayoutPlan, Turner, plan_of
from convpool.passes.edit import Edit
from convpool.passes.either_layout import rank_of, turning
from convpool.passes.layouts import fixed_ends, groups_of, turn_us
from convpool.passes.pool_first import averages
from convpool.passes.upstream import upstream


@dataclass(frozen=True)
class GroupSite(Site):
    """Tensors that are laid out alike, on the way to the average `root`."""

    tensors: frozenset[str]


class ChannelsFirst(Pass):
    """Every group of tensors between one of the convolutions asked for and an average."""

    names = ("pool_first",)

    def __init__(self, convolutions: Collection[tuple[str, str]] | None) -> None:
        """convolutions: what they give, each with its scope's path; None for all."""
        self._convolutions = convolutions

    def sites(self, scope: Scope, context: Context) -> Iterator[GroupSite]:
        """The groups that save Transposes."""
        sites = [site for site in averages(scope) if self._convolutions is None or site.convolution in self._convolutions]
        groups = groups_of(scope, {}, to_channels_first) if sites else {}
        given, read = fixed_ends(scope, (), to_channels_first) if sites else (set(), set())
        seen: set[int] = set()
        for site in sites:
            way = [scope.nodes[index].output[0] for index in upstream(scope, site.tensor)]
            for name in (site.tensor, *way):
                group = groups.get(name)
                if group is None or id(group) in seen:
                    continue
                seen.add(id(group))
                if not group.fixed and _saves(scope, set(group.tensors), given | read):
                    yield GroupSite(scope, site.root, frozenset(group.tensors))

    def check(self, site: GroupSite, context: Context) -> LayoutPlan:
        """The nodes that change."""
        return plan_of(site.scope, (), site.tensors, to_channels_first)

    def apply(self, plan: LayoutPlan, edit: Edit) -> None:
        """Change the nodes, and put Transposes where the layout changes."""
        Turner(plan, edit).run()


def _saves(scope: Scope, tensors: set[str], ends: set[str]) -> bool:
    """Whether channels first save Transposes: condition (1).  ends: tensors whose givers, or readers, do not change."""
    if any((rank_of(scope, name) or 0) < 3 for name in tensors):
        return False
    gone, new = [], [turn_us(scope, name, to_channels_first) for name in tensors & ends]
    for node in scope.nodes:
        if not is_op(node, "Transpose") or (perm := turning(node)) is None:
            continue
        x, y = (name in tensors for name in (node.input[0], node.output[0]))
        if (x, y) == (False, True) and perm == to_channels_last(len(perm) - 2):
            gone.append(turn_us(scope, node.output[0], to_channels_first))
        elif (x, y) == (True, False) and perm == to_channels_first(len(perm) - 2):
            gone.append(turn_us(scope, node.input[0], to_channels_first))
    return len(new) <= len(gone) and sum(new) < sum(gone)
