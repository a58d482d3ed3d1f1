# SPDX-License-Identifier: Apache-2.0
"""A report as a person reads it: one line per site, reasons and totals below."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from convpool.algebra.parts import OP_TYPE
from convpool.check.judge import Verification, shapes_text
from convpool.errors import printable
from convpool.ir import schema
from convpool.report import Report, SiteReport, Summary

RESIZING = ("upsample_last", "resize_last", "resize_first")
"""The rules whose convolutions stand beside a resize."""
FINDING = ("pool_first", *RESIZING)
STYLES = {"rewritten": "green", "rejected": "yellow", "excluded": "dim"}
MAX_ROWS = 200
"""Sites shown unless asked for more."""
FEW = 3
"""Sites that stay have their reasons shown in full up to this number of them, else in groups."""
PIPE_WIDTH = 160
"""Columns where the output is no terminal: a progress bar or a message has to be laid out for some width."""
GAP = 2
"""Blanks between two columns of a table."""
LEAST = 8
"""Characters that a cell keeps on the narrowest terminal."""


class PrintableConsole(Console):
    """A console that shows control characters as text.  Every string that is printed comes through `render_str`."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(text if text.isprintable() else printable(text), **options)


def make_console(*, stderr: bool, width: int = PIPE_WIDTH) -> Console:
    """A console on stdout or stderr, `width` columns wide where it is no terminal."""
    console = PrintableConsole(stderr=stderr, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = width
    return console


def print_table(
    console: Console,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int] = (),
    names: Sequence[int] = (),
) -> None:
    """Print rows of markup, one line each: aligned on a terminal, elsewhere with two spaces between the cells.

    right: columns of numbers, which are never cut.  names: columns that are cut on the left where the terminal is too narrow;
    others are cut on the right.
    """
    lines = [[console.render_str(cell or "-", highlight=False) for cell in row] for row in rows]
    if not console.is_terminal:
        for line in [[Text(heading) for heading in headings], *lines]:
            console.print(Text("  ").join(line), soft_wrap=True)
        return
    natural = [max(map(len, column)) for column in zip(*lines, headings, strict=True)]
    widths = _widths(natural, console.width - GAP * (len(natural) - 1), right)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for number, (heading, width) in enumerate(zip(headings, widths, strict=True)):
        justify: Literal["left", "right"] = "right" if number in right else "left"
        table.add_column(heading, justify=justify, no_wrap=True, overflow="ellipsis", min_width=width, max_width=width)
    for line in lines:
        long = [i in names and len(cell) > widths[i] for i, cell in enumerate(line)]
        table.add_row(*(Text("..." + c.plain[3 - widths[i] :]) if long[i] else c for i, c in enumerate(line)))
    console.print(table)


def _widths(natural: Sequence[int], room: int, fixed: Sequence[int]) -> list[int]:
    """Columns' widths: what the fixed ones leave of the room goes to the others in equal shares, none more than it needs."""
    widths = list(natural)
    left = room - sum(natural[number] for number in fixed)
    others = sorted((number for number in range(len(natural)) if number not in fixed), key=lambda number: natural[number])
    for position, number in enumerate(others):
        widths[number] = max(LEAST, min(natural[number], left // (len(others) - position)))
        left -= widths[number]
    return widths


def show(report: Report, console: Console, *, verbose: bool = False, preview: bool = False) -> None:
    """Print the table of sites, the reasons of those that stay, and the totals.  preview: nothing is to be written or checked."""
    wanted = report.sites if verbose else [site for site in report.sites if site.status == "rewritten"]
    shown = wanted if verbose else wanted[:MAX_ROWS]
    if shown:
        _show_sites(shown, console, verbose)
    if len(shown) < len(wanted):
        console.print(f"... and {len(wanted) - len(shown)} more; --verbose shows all")
    totals = [] if preview else _totals(report, verbose)
    remarks = {"[yellow]warning[/]  ": report.warnings, "note     ": report.notes, "next     ": report.hints}
    told = [f"{head} {escape(text)}" for head, texts in remarks.items() for text in texts]
    for line in (*_gains(report, preview), *_kept(report, verbose), *totals, *told):
        console.print(line, soft_wrap=True)


def show_verification(verification: Verification, console: Console) -> None:
    """Print the largest errors of every output, and what the comparison does not prove."""
    rows = []
    for output in verification.outputs:
        verdict = "[green]agrees[/]" if output.passed else f"[red]differs[/] {escape(output.note)}"
        verdict = verdict if output.compared or not output.passed else "[yellow]not compared[/]"
        rows.append([escape(output.name), f"{output.max_abs_error:.3g}", f"{output.max_rel_error:.3g}", verdict])
    print_table(console, ("tensor", "max absolute error", "relative", "result"), rows, right=(1, 2), names=(0,))
    for doubt in verification.doubts:
        console.print(f"note  {escape(doubt)}", soft_wrap=True)


def _show_sites(sites: Sequence[SiteReport], console: Console, verbose: bool) -> None:
    resized = {site.rule in RESIZING for site in sites}
    beside = "pooling or resize" if len(resized) == 2 else "resize" if True in resized else "pooling"
    headings = ["convolution", beside, "rewritten as", "multiply-adds", "after"]
    rows = []
    for site in sites:
        conv = f"{site.scope}: {site.conv}" if site.scope else site.conv
        rows.append([escape(conv), escape(site.pool), _form(site, verbose), _count(site.macs_before), _count(site.macs_after)])
    print_table(console, headings, rows, right=(3, 4), names=(0, 1))


def _form(site: SiteReport, verbose: bool) -> str:
    if site.status != "rewritten":
        return f"[{STYLES[site.status]}]{site.status}[/]"
    form = site.operator if site.operator not in (None, OP_TYPE) else site.lowering
    text = f"[{STYLES[site.status]}]{form}[/]"
    if site.absorbed:
        text += f" with {escape(', '.join(site.absorbed if verbose else [name.split()[0] for name in site.absorbed]))}"
    return text


def _gains(report: Report, preview: bool) -> list[str]:
    """Say what was rewritten, or would be, and what the model gains, as markup."""
    summary = report.summary
    rules: Any = report.options.get("rules", FINDING)
    off = [name for name in FINDING if name not in rules]
    if not report.sites and off:
        lines = [f"Nothing to rewrite with {', '.join(off)} disabled."]
    elif not report.sites:
        done = sum(count for name, count in summary.operators_before.items() if name in schema.OP_TYPES)
        there = f" (nodes of convpool's operators: {done})" if done else ""
        lines = [f"Nothing to rewrite: no Conv stands beside an average pooling or a resize{there}.", *_seen(summary)]
    elif not summary.rewritten:
        count = len(report.sites)
        which = "the one candidate is" if count == 1 else f"all {count} candidates are"
        lines = [f"Nothing rewritten: {which} left unchanged."]
    else:
        before, after = summary.rewritten_macs_before, summary.rewritten_macs_after
        macs = "multiply-adds unknown" if before is None else f"{_count(before)} -> {_count(after)} multiply-adds"
        number = summary.rewritten_convolutions
        label = "[bold]rewrites[/] " if preview else "[bold]rewritten[/]"
        lines = [f"{label} {number} of {_plural(summary.convolutions, 'convolution')}: {macs}"]
    if summary.convolutions:
        lines.append(f"model     {_model(summary)}")
    return lines


def _seen(summary: Summary) -> list[str]:
    """Say what the model has in place of pairs, as markup."""
    counts = ((summary.convolutions, "convolution"), (summary.averages, "average"), (summary.resizes, "Resize"))
    lines = ["seen      " + ", ".join(_plural(count, noun) for count, noun in counts)]
    if summary.between:
        lines.append("between   " + ", ".join(f"{escape(name)} {count} x" for name, count in summary.between.items()))
    elif summary.convolutions and summary.averages:
        lines.append("between   no average is computed from a convolution")
    return lines


def _model(summary: Summary) -> str:
    before, after = summary.model_macs_before, summary.model_macs_after
    if before is None or after is None:
        return "multiply-adds unknown"
    change = f" -> {_count(after)} multiply-adds ({(after - before) / max(before, 1):+.0%})".replace("%", " %")
    sample = " a sample" if summary.batch > 1 else ""
    shapes = f", with input {shapes_text(summary.counted_shapes)}" if summary.counted_shapes else ""
    return escape(_count(before) + (change if after != before else " multiply-adds") + sample + shapes)


def _kept(report: Report, verbose: bool) -> list[str]:
    """Why sites stay, or are not the operator, as markup."""
    rejected = [site for site in report.sites if site.status == "rejected"]
    lines = []
    if len(rejected) > FEW:
        groups = Counter(site.obstacle or site.reason or "" for site in rejected).most_common()
        lines.append(f"[yellow]rejected[/]  {len(rejected)}: " + ", ".join(f"{count} x {escape(why)}" for why, count in groups))
    for site in rejected if verbose or len(rejected) <= FEW else ():
        where = f"{site.conv} -> {site.pool}" if site.pool else site.conv
        why = site.reason if verbose else site.in_words or site.reason
        lines.append(f"[yellow]rejected[/]  {escape(where)}: {escape(why or '')}")
    if report.summary.excluded:
        lines.append(f"excluded  {report.summary.excluded} by name")
    fallbacks = Counter((site.lowering, site.fallback) for site in report.sites if site.fallback)
    for (lowering, why), count in fallbacks.items():
        lines.append(f"{lowering:9} {count} x instead of convavgpool: {escape(why or '')}")
    return lines


def _totals(report: Report, verbose: bool) -> list[str]:
    summary = report.summary
    lines = []
    if summary.concats:
        lines.append(f"concats   {summary.concats} reuse the result of an earlier one")
    if summary.channels_last:
        lines.append(f"layout    {_plural(summary.channels_last, 'node')} with channels last")
    if summary.packed:
        lines.append(f"sums      may be packed in {_plural(summary.packed, 'node')}, in fp16 and bf16")
    lines.append(f"file      {_size(summary.bytes_before)} -> {_size(summary.bytes_after)}")
    before, after = summary.operators_before, summary.operators_after
    names = sorted(name for name in before.keys() | after.keys() if verbose or before.get(name) != after.get(name))
    if names:
        counts = ", ".join(f"{escape(name)} {before.get(name, 0)} -> {after.get(name, 0)}" for name in names)
        lines.append(f"operators {counts}")
    lines += _verification(report, verbose)
    if report.speed:
        speed = report.speed
        unit, size = ("ms", 1e3) if max(speed.original_us, speed.result_us) >= 1e3 else ("us", 1.0)
        old, new = (f"{value / size:.3g} {unit}" for value in (speed.original_us, speed.result_us))
        lines.append(f"speed     here, {_plural(speed.threads, 'thread')}: {old} -> {new} ({speed.ratio:.2f}x)")
    lines.append(f"took      {summary.seconds:.2f} s")
    return lines


def _verification(report: Report, verbose: bool) -> list[str]:
    found = report.verification
    if found is None:
        return ["check     [yellow]not done[/]"]
    if not found.inputs:
        return ["check     [green]equal[/]: the model is unchanged"]
    worst = max(found.outputs, key=lambda o: o.max_rel_error, default=None)
    errors = "no outputs"
    if worst is not None:
        errors = f"largest error {worst.max_rel_error:.2g} relative, {worst.max_abs_error:.2g} absolute ({escape(worst.name)})"
    errors = "; ".join([errors, *map(escape, found.doubts)])
    failed = "[bold red]DIFFERS[/] from" if found.differs else "[bold red]NOT COMPARABLE[/] with"
    outcome = "[green]agrees[/] with" if found.passed else failed
    sets = f"{_plural(found.inputs, 'set')} of inputs"
    if found.input_scale < 1:
        sets += f" of 1/{1 / found.input_scale:g} the size"
    if found.other_shapes:
        sets += f" and at {escape(shapes_text(found.other_shapes))}"
    lines = [f"check     {outcome} {found.reference} on {sets}: {errors}"]
    for o in found.outputs if verbose else ():
        note = f" ({escape(o.note)})" if o.note else ""
        lines.append(f"          {escape(o.name)}: {o.max_rel_error:.3g} relative, {o.max_abs_error:.3g} absolute{note}")
    return lines


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _count(value: int | None) -> str:
    if value is None:
        return "?"
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return str(value)


def _size(value: int) -> str:
    return f"{value / 2**20:.1f} MiB" if value >= 2**20 else f"{value / 2**10:.1f} KiB"
