# SPDX-License-Identifier: Apache-2.0
"""A record as a person reads it: rows as in the papers' tables, methods as columns, geometric means below."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from convpool.bench.figures import (
    CLOSE,
    NO_WORKSPACE,
    OURS,
    RULE,
    TACTIC,
    Figures,
    close_choices,
    figures,
    geometric_mean,
    summary,
)
from convpool.bench.record import entry_row

ORDER = (
    "cudnn_naive",
    "cudnn_fused",
    "cudnn_direct",
    "cublas_fused",
    "cublas_direct",
    "tensorrt_naive",
    "tensorrt_fused",
    "tensorrt_direct",
    "sat_direct",
    "cuconv",
    "textbook_direct",
    "textbook_tiled",
    "textbook_gemm",
    "cpu_loop",
    "onnxruntime_cpu",
    NO_WORKSPACE,
    RULE,
    OURS,
)


def show(record: dict[str, Any], console: Console) -> None:
    """Print the ceilings, a table for every suite, precision and layout, and the problems below."""
    for line in _heading(record):
        console.print(line, soft_wrap=True, markup=False)
    groups: dict[tuple, list] = {}
    for entry in record["rows"]:
        groups.setdefault((entry["row"]["suite"], entry["precision"], entry["layout"]), []).append(entry)
    everything = []
    for (suite, precision, layout), entries in groups.items():
        found = [figures(entry, record["ceilings"]) for entry in entries]
        everything += found
        console.print(f"\n[bold]{escape(suite)}[/], {precision}, {layout}: microseconds")
        console.print(_table(entries, found))
        for line in [*_means(found), *_choices(found)]:
            console.print(line, soft_wrap=True)
    if len(groups) > 1:
        for line in _choices(everything):
            console.print(f"[bold]all tables[/]: {line}", soft_wrap=True)
    for line in _problems(record):
        console.print(line, soft_wrap=True)


def _heading(record: dict[str, Any]) -> list[str]:
    lines = []
    if record["machine"].get("name"):
        versions = record["protocol"].get("versions", {})
        lines.append(", ".join([record["machine"]["name"], *(f"{name} {value}" for name, value in versions.items())]))
    ceilings = record["ceilings"]
    if ceilings:
        rates = ", ".join(f"{name} {rate:.0f} TFLOP/s" for name, rate in ceilings.get("tflops", {}).items())
        lines.append(f"measured here: copy {ceilings['copy_tb_per_s']:.2f} TB/s, matrix product {rates}")
    return lines


def _table(entries: list[dict], found: list[Figures]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("layer", no_wrap=True)
    present = {name for entry in entries for name in entry["methods"]}
    methods = [name for name in ORDER if name in present]
    for name in methods:
        table.add_column(name.replace("_", " "), justify="right")
    for name in ("fastest tactic", "x naive", "x others", "roofline", "copy", "V100 us", "V100 x"):
        table.add_column(name, justify="right")
    for entry, row in zip(entries, found, strict=True):
        cells = [_cell(entry["methods"].get(name)) for name in methods]
        paper = ("", "") if row.paper is None else (f"{row.paper[0]:.0f}", f"{row.paper[1]:.2f}")
        table.add_row(
            escape(entry_row(entry).name),
            *cells,
            _number(row.best_us, ".1f"),
            _number(row.over_naive, ".2f"),
            _number(row.over_others, ".2f"),
            _number(row.of_roofline, ".0%"),
            _number(row.of_copy, ".0%"),
            *paper,
        )
    return table


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return ""
    if "wrong" in result:
        return "[bold red]wrong[/]"
    return f"{result['us']:.1f}" if result.get("us") else "-"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _means(found: list[Figures]) -> list[str]:
    return [
        f"{line['what']}: geometric mean [bold]{line['mean']:.2f}[/], least {line['least']:.2f}, {line['rows']} rows"
        for line in summary(found)
    ]


def _choices(found: list[Figures]) -> list[str]:
    whose = {OURS: "library's", RULE: "cost rule's"}
    return [
        f"the {whose[name]} choice is within {CLOSE - 1:.0%} of the fastest tactic in {counts['close']} of {counts['rows']} rows"
        for name, counts in close_choices(found).items()
    ]


def _problems(record: dict[str, Any]) -> list[str]:
    """Wrong methods one by one, and each reason for skipping one once; tactics are skipped by the dozen and not told."""
    lines: list[str] = []
    reasons: dict[tuple[str, str], list[str]] = {}
    for entry in record["rows"]:
        where = f"{entry_row(entry).name} {entry['precision']}"
        for name, result in entry["methods"].items():
            if "wrong" in result:
                lines.append(f"[bold red]WRONG[/] {escape(where)}: {escape(name)}, relative error {result['wrong']}")
            elif "skipped" in result and not name.startswith(TACTIC):
                reasons.setdefault((name, result["skipped"]), []).append(where)
    lines += [
        f"[dim]not run: {escape(name)} ({len(rows)} row{'s' if len(rows) > 1 else ''}): {escape(reason)}[/]"
        for (name, reason), rows in reasons.items()
    ]
    return lines


def markdown(record: dict[str, Any]) -> str:
    """Speed-ups over the faster naive and over the fastest of all others, input size by channels, and their geometric
    means, for a record of one suite in which each size and number of channels is there once."""
    rows = {(entry_row(e).h, entry_row(e).c): figures(e, record["ceilings"]) for e in record["rows"]}
    assert len(rows) == len(record["rows"]), "a size and number of channels twice"
    sizes, channels = (sorted({key[i] for key in rows}) for i in (0, 1))
    lines = ["| size | " + " | ".join(f"{c} channels" for c in channels) + " |", "|---" * (len(channels) + 1) + "|"]
    for size in sizes:
        cells = (f"{rows[size, c].over_naive:.2f} / {rows[size, c].over_others:.2f}" for c in channels)
        lines.append(f"| {size}x{size} | " + " | ".join(cells) + " |")
    means = (geometric_mean(getattr(row, ratio) for row in rows.values()) for ratio in ("over_naive", "over_others"))
    return "\n".join([*lines, "", "Geometric means: " + " / ".join(f"{mean:.2f}" for mean in means) + "."])
