# SPDX-License-Identifier: Apache-2.0
"""A report as a person reads it: one row per site, totals below."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from convpool.check.verdict import Verification
from convpool.ir import schema
from convpool.report import Report, SiteReport

STYLES = {"rewritten": "green", "rejected": "yellow", "excluded": "dim"}
MAX_ROWS = 200
"""Sites shown unless asked for more."""
PIPE_WIDTH = 160
"""Columns where the output is no terminal: names and reasons should not be cut to 80 there."""


def make_console(*, stderr: bool) -> Console:
    """A console on stdout or stderr, wide where it is no terminal."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=PIPE_WIDTH)


def show(report: Report, console: Console, *, verbose: bool = False) -> None:
    """Print the table of sites and the totals below it."""
    shown = report.sites if verbose else report.sites[:MAX_ROWS]
    if shown:
        console.print(_sites(shown, verbose))
    if len(shown) < len(report.sites):
        console.print(f"... and {len(report.sites) - len(shown)} more; --verbose shows all")
    for line in _totals(report, verbose):
        console.print(line, soft_wrap=True)


def show_verification(verification: Verification, console: Console) -> None:
    """Print the largest errors of every output."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("tensor", "max absolute error", "relative", "result"):
        table.add_column(column, justify="left" if column in ("tensor", "result") else "right")
    for output in verification.outputs:
        verdict = "[green]agrees[/]" if output.passed else f"[red]differs[/] {escape(output.note)}"
        table.add_row(escape(output.name), f"{output.max_abs_error:.3g}", f"{output.max_rel_error:.3g}", verdict)
    console.print(table)


def _sites(sites: list[SiteReport], verbose: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("convolution", overflow="fold")
    table.add_column("pooling", overflow="fold")
    table.add_column("pattern", no_wrap=True)
    table.add_column("result", overflow="fold", ratio=1)
    table.add_column("MACs before", justify="right", no_wrap=True)
    table.add_column("after", justify="right", no_wrap=True)
    for site in sites:
        result = f"[{STYLES[site.status]}]{site.status}[/]"
        form = site.operator if site.operator not in (None, "ConvAvgPool") else site.lowering
        result += f" as {form}" if form else f": {escape(site.reason or '')}"
        if site.absorbed:
            names = ", ".join(site.absorbed if verbose else [name.split()[0] for name in site.absorbed])
            result += f" with {escape(names)}"
        if verbose and site.beside:
            result += f" (without: {escape('; '.join(site.beside))})"
        if verbose and site.times_us:
            result += " (" + ", ".join(f"{name} {value:.1f} us" for name, value in site.times_us.items()) + ")"
        conv = f"{site.scope}: {site.conv}" if site.scope else site.conv
        table.add_row(escape(conv), escape(site.pool), site.pattern, result, _count(site.macs_before), _count(site.macs_after))
    return table


def _totals(report: Report, verbose: bool) -> list[str]:
    summary = report.summary
    lines = []
    if not report.sites:
        done = sum(count for name, count in summary.operators_before.items() if name in schema.OP_TYPES)
        there = f" (nodes of convpool's operators: {done})" if done else ""
        lines.append(f"Nothing to rewrite: no convolution feeds an average pooling{there}.")
    elif not summary.rewritten:
        lines.append(f"Nothing rewritten: none of the {len(report.sites)} candidates qualifies.")
    else:
        rest = [
            f"{count} {status}" for status, count in (("rejected", summary.rejected), ("excluded", summary.excluded)) if count
        ]
        open_sized = sum(site.status == "rewritten" and site.macs_before is None for site in report.sites)
        counted = f"{_count(summary.macs_before)} -> {_count(summary.macs_after)} a sample"
        if open_sized:
            known = "" if open_sized == summary.rewritten else f"{counted}, "
            counted = f"{known}unknown for {open_sized} of open sizes"
        lines.append(
            f"[bold]{summary.rewritten} rewritten[/]{''.join(f', {item}' for item in rest)}; multiply-adds of these "
            f"convolutions {counted}"
        )
    if summary.concats:
        lines.append(f"concats   {summary.concats} read the result of one before")
    lines.append(f"file      {_size(summary.bytes_before)} -> {_size(summary.bytes_after)}")
    before, after = summary.operators_before, summary.operators_after
    names = sorted(name for name in before.keys() | after.keys() if verbose or before.get(name) != after.get(name))
    if names:
        counts = ", ".join(f"{escape(name)} {before.get(name, 0)} -> {after.get(name, 0)}" for name in names)
        lines.append(f"operators {counts}")
    lines.append(_verification(report))
    if verbose and report.verification:
        lines += [
            f"          {escape(o.name)}: {o.max_abs_error:.3g} absolute, {o.max_rel_error:.3g} relative"
            + (f" ({escape(o.note)})" if o.note else "")
            for o in report.verification.outputs
        ]
    lines.append(f"time      {summary.seconds:.2f} s")
    return lines


def _verification(report: Report) -> str:
    found = report.verification
    if found is None:
        return "check     [yellow]not verified[/]"
    if not found.inputs:
        return "check     [green]equal[/]: the model is unchanged"
    worst = max(found.outputs, key=lambda o: o.max_rel_error, default=None)
    errors = (
        "no outputs"
        if worst is None
        else (f"largest error {worst.max_abs_error:.2g} absolute, {worst.max_rel_error:.2g} relative ({escape(worst.name)})")
    )
    outcome = "[green]equal[/]" if found.passed else "[bold red]DIFFERENT[/]"
    sets = f"{found.inputs} set{'s' if found.inputs != 1 else ''} of inputs"
    return f"check     {outcome} to {found.reference} on {sets}: {errors}"


def _count(value: int | None) -> str:
    if value is None:
        return "?"
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return str(value)


def _size(value: int) -> str:
    return f"{value / 2**20:.1f} MiB" if value >= 2**20 else f"{value / 2**10:.1f} KiB"
