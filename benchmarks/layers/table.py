# SPDX-License-Identifier: Apache-2.0
"""A record as a person reads it: rows as in the papers' tables, methods as columns, geometric means below.

Beside the times stand the operations and memory accesses of the naive, fused and direct form (`benchmarks.counts`), and the
papers' two speed-ups by libraries alone; below the times of a paper's rows, what the paper measured on a V100.
"""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.layers.figures import (
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
from benchmarks.layers.ort import NAMES as ORT
from benchmarks.layers.paper import FIVE, PAPERS_TYPES, speed_up_fused, speed_up_naive
from benchmarks.layers.record import entry_row
from benchmarks.layers.rows import Row

ORDER = (
    "cudnn_naive",
    "cudnn_fused",
    "cudnn_direct",
    "cublas_fused",
    "cublas_direct",
    "tensorrt_naive",
    "tensorrt_fused",
    "tensorrt_direct",
    *ORT[:-1],
    "sat_direct",
    "cuconv",
    "textbook_direct",
    "textbook_tiled",
    "textbook_gemm",
    "cpu_loop",
    "onnxruntime_cpu",
    ORT[-1],
    NO_WORKSPACE,
    RULE,
    OURS,
)


SPEED_UPS = ("direct / naive", "direct / fused")
"""The papers' two speed-ups, of libraries alone."""
COUNTS = ("Gop naive / fused / direct", "10^6 accesses")


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
        console.print()
        console.print(f"[bold]{escape(suite)}[/], {precision}, {layout}: microseconds")
        console.print(_table(entries, found))
        if any(row.paper for row in found):
            console.print()
            console.print(
                f"[bold]{escape(suite)}[/], the paper on a V100, {PAPERS_TYPES.get(precision, precision)}: microseconds"
            )
            console.print(_paper_table(entries, found))
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
        level = _tensorrt_level(record)
        names = {name: f"{value} (builder level {level})" if name == "TensorRT" else value for name, value in versions.items()}
        lines.append(", ".join([record["machine"]["name"], *(f"{name} {value}" for name, value in names.items())]))
    ceilings = record["ceilings"]
    if ceilings:
        rates = ", ".join(f"{name} {rate:.0f} TFLOP/s" for name, rate in ceilings.get("tflops", {}).items())
        lines.append(f"measured here: copy {ceilings['copy_tb_per_s']:.2f} TB/s, matrix product {rates}")
    return lines


def _tensorrt_level(record: dict[str, Any]) -> str:
    """TensorRT's builder level; records of older versions have it in their command only."""
    known = record["protocol"].get("tensorrt_level")
    if known is not None:
        return str(known)
    named = re.search(r"--tensorrt-level[= ](\d)", record["command"])
    return named[1] if named else "unknown"


def _table(entries: list[dict], found: list[Figures]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("layer", no_wrap=True)
    present = {name for entry in entries for name in entry["methods"]}
    methods = [name for name in ORDER if name in present]
    for name in methods:
        table.add_column(name.replace("_", " "), justify="right")
    for name in ("fastest tactic", "x naive", "x others", *SPEED_UPS, "roofline", "copy", *COUNTS):
        table.add_column(name, justify="right")
    for entry, row in zip(entries, found, strict=True):
        cells = [_cell(entry["methods"].get(name)) for name in methods]
        table.add_row(
            escape(entry_row(entry).name),
            *cells,
            _number(row.best_us, ".1f"),
            _number(row.over_naive, ".2f"),
            _number(row.over_others, ".2f"),
            _number(row.direct_over_naive, ".2f"),
            _number(row.direct_over_fused, ".2f"),
            _number(row.of_roofline, ".0%"),
            _number(row.of_copy, ".0%"),
            *_counts(entry_row(entry)),
        )
    return table


def _counts(row: Row) -> list[str]:
    """10^9 operations and 10^6 memory accesses of the naive, fused and direct form."""
    found = [row.counts(form) for form in ("naive", "fused", "direct")]
    return [
        " / ".join(f"{one.operations / 1e9:.3g}" for one in found),
        " / ".join(f"{one.accesses / 1e6:.3g}" for one in found),
    ]


def _paper_table(entries: list[dict], found: list[Figures]) -> Table:
    """The paper's microseconds by method, its two speed-ups, and the same two of this record."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("layer", no_wrap=True)
    for name in (*(name.replace("_", " ") for name in FIVE), *SPEED_UPS, *(f"here {name}" for name in SPEED_UPS)):
        table.add_column(name, justify="right")
    for entry, row in zip(entries, found, strict=True):
        ratios = (speed_up_naive(row.paper), speed_up_fused(row.paper), row.direct_over_naive, row.direct_over_fused)
        table.add_row(
            escape(entry_row(entry).name),
            *(_number(row.paper.get(name), ".4g") for name in FIVE),
            *(_number(ratio, ".2f") for ratio in ratios),
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


RATIOS = ("over_naive", "over_others")


def markdown(record: dict[str, Any]) -> str:
    """Speed-ups over the faster naive and over the fastest of all others, input size by channels, and their geometric
    means, for a record of one suite in which each size and number of channels is there once."""
    rows = {(entry_row(e).h, entry_row(e).c): figures(e, record["ceilings"]) for e in record["rows"]}
    assert len(rows) == len(record["rows"]), "a size and number of channels twice"
    sizes, channels = (sorted({key[i] for key in rows}) for i in (0, 1))
    lines = ["| size | " + " | ".join(f"{c} channels" for c in channels) + " |", "|---" * (len(channels) + 1) + "|"]
    for size in sizes:
        cells = (" / ".join(_number(getattr(rows[size, c], ratio), ".2f") or "-" for ratio in RATIOS) for c in channels)
        lines.append(f"| {size}x{size} | " + " | ".join(cells) + " |")
    means = (geometric_mean(value for row in rows.values() if (value := getattr(row, ratio))) for ratio in RATIOS)
    return "\n".join([*lines, "", "Geometric means: " + " / ".join(f"{mean:.2f}" for mean in means) + "."])
