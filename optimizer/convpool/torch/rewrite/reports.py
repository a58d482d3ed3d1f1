# SPDX-License-Identifier: Apache-2.0
"""The reports of a module's regions as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from convpool.options import OptimizeOptions
from convpool.report import Report, SiteReport, Summary


def merged(
    reports: Sequence[tuple[str, Report]], others: Sequence[SiteReport], options: OptimizeOptions, warnings: Sequence[str]
) -> Report:
    """One report of several, each with the path of its module; names are from the root on.

    others: sites of modules that have none.
    """
    sites: list[SiteReport] = []
    seen: set[str] = set()
    for path, report in reversed(reports):  # inner ones last: they know better
        for site in report.sites:
            names = [f"{path}.{name}".strip(".") if name else "" for name in (site.conv, site.pool)]
            if names[0] not in seen or site.status == "rewritten":
                sites.append(replace(site, conv=names[0], pool=names[1]))
        seen |= {f"{path}.{site.conv}".strip(".") for site in report.sites}
    sites += [site for site in others if site.conv not in seen]
    sites.sort(key=lambda site: site.status != "rewritten")
    summaries = [report.summary for _, report in reports]
    notes = list(dict.fromkeys(note for _, report in reports for note in report.notes))
    asked: dict[str, object] = {"lowering": options.lowering, "accumulation": options.accumulation}
    return Report(sites, summed(sites, summaries), options=asked, notes=notes, warnings=[*warnings])


def summed(sites: Sequence[SiteReport], summaries: Sequence[Summary]) -> Summary:
    """The totals of all sites."""
    status = Counter(site.status for site in sites)
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()
    for summary in summaries:
        before.update(summary.operators_before)
        after.update(summary.operators_after)
    macs = [[value or 0 for value in (site.macs_before, site.macs_after)] for site in sites]
    totals = (sum(pair[0] for pair in macs), sum(pair[1] for pair in macs))
    counts = (status["rewritten"], status["rejected"], status["excluded"])
    found = Summary(*counts, *totals, dict(sorted(before.items())), dict(sorted(after.items())), 0, 0, 0.0, 0)
    return replace(
        found,
        convolutions=sum(summary.convolutions for summary in summaries),
        rewritten_convolutions=sum(summary.rewritten_convolutions for summary in summaries),
        packed=sum(summary.packed for summary in summaries),
    )
