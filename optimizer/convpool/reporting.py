# SPDX-License-Identifier: Apache-2.0
"""The reports of a run while it runs: what was rewritten, what stays, and which node each report tells of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from convpool.report import SiteReport


class Log:
    """Collects the reports of the passes."""

    def __init__(self, made: Callable[[str], bool]) -> None:
        """made: whether a tensor is none of the original model's."""
        self.made = made
        self.channels_last = 0
        """How many nodes read or give tensors with channels last."""
        self.concats = 0
        """How many Concats read another's result."""
        self._rewritten: list[SiteReport] = []
        self._kept: list[SiteReport] = []
        self._giver: dict[tuple[str, str], int] = {}
        """Which report tells of the operator's node that gives a tensor of a scope."""

    @property
    def made_operator(self) -> bool:
        """Whether any report tells of a node of the operator."""
        return bool(self._giver)

    def reports(self) -> list[SiteReport]:
        """One report per convolution of every candidate, rewritten ones first."""
        return [*self._rewritten, *self._kept]

    def rewritten(self, site: SiteReport, output: str | None) -> None:
        """A convolution was rewritten.  output: what the operator's node gives, where it became one."""
        if output is not None:
            self._giver[site.scope, output] = len(self._rewritten)
        self._rewritten.append(site)

    def kept(self, site: SiteReport) -> None:
        """A candidate stays as it is."""
        self._kept.append(site)

    def fused(
        self, found: SiteReport, output: str, now: str, before: Iterable[str], behind: Iterable[str], saved: int | None
    ) -> None:
        """The operator's node that gives `output` was fused with the nodes `before` and `behind` it, and gives `now`.

        found: a report of the node as it is now, for one that an earlier run wrote.  saved: bytes a sample, None where unknown.
        """
        number = self._giver.pop((found.scope, output), None)
        if number is None:
            number = len(self._rewritten)
            self._rewritten.append(found)
        site = self._rewritten[number]
        self._rewritten[number] = replace(
            site,
            operator=found.operator,
            absorbed=(*before, *site.absorbed, *behind),
            saved_bytes=None if saved is None else saved + (site.saved_bytes or 0),
        )
        self._giver[found.scope, now] = number

    def beside(self, scope: str, output: str, reasons: Iterable[object]) -> None:
        """Why other nodes beside the operator's node that gives `output` stay; nothing for one that has no report."""
        number = self._giver.get((scope, output))
        if number is not None:
            site = self._rewritten[number]
            self._rewritten[number] = replace(site, beside=(*site.beside, *map(str, reasons)))
