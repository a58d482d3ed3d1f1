# SPDX-License-Identifier: Apache-2.0
"""A record as a picture: speed-up by size and channels beside the roofline.  Needs matplotlib."""

from __future__ import annotations

import hashlib
import io
import json
from typing import Any

from convpool.bench.figures import figures, geometric_mean
from convpool.bench.record import entry_row
from convpool.bench.rows import PRECISIONS
from convpool.errors import OptionError


def to_png(record: dict[str, Any]) -> bytes:
    """Speed-up over the faster naive by size and channels, and rate against intensity, as PNG.

    Raises OptionError without matplotlib or without a single speed-up.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError(f"--plot: matplotlib is missing; got {error}; pip install matplotlib") from error
    found = [(entry, figures(entry, record["ceilings"])) for entry in record["rows"]]
    found = [(entry, row) for entry, row in found if row.over_naive is not None]
    if not found:
        raise OptionError("--plot: nothing to draw; got no row with both convpool and a naive method, expected one")
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _speed_ups(left, found)
    _roofline(right, found, record["ceilings"])
    figure.suptitle(record["machine"].get("name", ""))
    return save(figure, record["rows"])


def save(figure: Any, rows: Any) -> bytes:
    """The figure as PNG, which says of which rows it is: see `digest`."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=72, metadata={"Description": digest(rows)}, pil_kwargs={"optimize": True})
    return data.getvalue()


def digest(rows: Any) -> str:
    """What tells whether a picture is of these rows of a record."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def _speed_ups(axes: Any, found: list) -> None:
    """A line for every suite, precision and size over the input channels, dashed over the fastest of all others; several
    rows at one point by their mean."""
    lines: dict[str, dict[int, list]] = {}
    for entry, row in found:
        layer = entry_row(entry)
        label = f"{layer.suite} {entry['precision']} {layer.h}x{layer.w}" + (f" batch {layer.n}" if layer.n != 64 else "")
        lines.setdefault(label, {}).setdefault(layer.c, []).append(row)
    for label, points in lines.items():
        channels = sorted(points)
        (line,) = axes.plot(channels, [geometric_mean(r.over_naive for r in points[c]) for c in channels], "o-", label=label)
        others = [geometric_mean(r.over_others for r in points[c]) for c in channels]
        axes.plot(channels, others, "--", color=line.get_color(), linewidth=1)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xlabel="input channels", ylabel="speed-up over the faster naive (dashed: over all others)", ylim=(0, None))
    axes.set_xscale("log", base=2)
    channels = sorted({c for points in lines.values() for c in points})
    if len(channels) <= 10:
        axes.set_xticks(channels, [str(c) for c in channels])
    axes.legend(fontsize="small", ncols=2 if len(lines) > 8 else 1)


def _roofline(axes: Any, found: list, ceilings: dict[str, Any]) -> None:
    """Rate of the direct method's operations against operations a byte, under the measured ceilings."""
    intensities = [entry["direct_flops"] / entry["min_bytes"] for entry, _ in found]
    for number, precision in enumerate(PRECISIONS):
        rows = [(entry, row) for entry, row in found if entry["precision"] == precision]
        if not rows:
            continue
        color = f"C{number}"
        axes.scatter(
            [entry["direct_flops"] / entry["min_bytes"] for entry, _ in rows],
            [entry["direct_flops"] / row.ours_us / 1e6 for entry, row in rows],
            color=color,
            s=14,
            label=precision,
        )
        rate, bandwidth = ceilings.get("tflops", {}).get(precision), ceilings.get("copy_tb_per_s")
        if rate and bandwidth:
            ends = sorted({min(intensities) / 1.5, rate / bandwidth, max(*intensities, rate / bandwidth) * 1.5})
            axes.plot(ends, [min(rate, bandwidth * end) for end in ends], color=color, linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="operations a byte (direct form)", ylabel="TFLOP/s of the direct form")
    axes.legend(fontsize="small")
