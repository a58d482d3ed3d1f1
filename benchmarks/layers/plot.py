# SPDX-License-Identifier: Apache-2.0
"""A record as a picture: how long every other method takes, beside the roofline.  Needs matplotlib."""

from __future__ import annotations

import hashlib
import io
import json
from typing import Any

from benchmarks.layers.figures import ON_CPU, OURS, figures, geometric_mean, matrix_rate
from benchmarks.layers.record import entry_row
from benchmarks.layers.rows import PRECISIONS
from convpool.errors import OptionError

LIBRARIES = {"cudnn": "cuDNN", "cublas": "cuBLAS", "tensorrt": "TensorRT", "sat": "summed-area table"}
FORMS = {"naive": "convolution, then pooling", "fused": "one convolution", "direct": "pooling first"}
"""Labels beside the bars for the parts of a method's name, such as cudnn_naive."""
CLOSE = 1.15
"""Points one above the other whose rates are closer have their names moved apart."""
MOST_NAMED = 40
"""Points of the roofline that have their names written beside them: more of them could not be read."""


def to_png(record: dict[str, Any]) -> bytes:
    """Other methods' times over convpool's, and rate against intensity, as PNG.

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
    figure = Figure(figsize=(13, 6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _opponents(left, found)
    _roofline(right, found, record["ceilings"])
    suites = sorted({entry_row(entry).suite for entry, _ in found})
    figure.suptitle(f"{record['machine'].get('name', '')}; {len(found)} layers of {', '.join(suites)}")
    return save(figure, record["rows"])


def save(figure: Any, rows: Any) -> bytes:
    """The figure as PNG, which says of which rows it is: see `digest`."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=72, metadata={"Description": digest(rows)}, pil_kwargs={"optimize": True})
    return data.getvalue()


def digest(rows: Any) -> str:
    """Return a digest that tells if a picture is of these rows of a record."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def _method(name: str) -> str:
    """Return a method's label beside its bar."""
    library, _, form = name.partition("_")
    return f"{LIBRARIES[library]}: {FORMS[form]}" if library in LIBRARIES and form in FORMS else name


def _opponents(axes: Any, found: list) -> None:
    """A bar for every other method and precision: the geometric mean of its time over convpool's; a line from the least to the
    largest ratio."""
    ratios: dict[str, dict[str, list[float]]] = {}
    for entry, row in found:
        for name, us in row.times.items():
            if not name.startswith(OURS) and name not in ON_CPU:
                ratios.setdefault(name, {}).setdefault(entry["precision"], []).append(us / row.ours_us)
    precisions = [precision for precision in PRECISIONS if any(precision in of for of in ratios.values())]
    order = sorted(ratios, key=lambda name: -geometric_mean(value for values in ratios[name].values() for value in values))
    for number, precision in enumerate(precisions):
        height = 0.8 / len(precisions)
        places = [
            (i + (number + 0.5) * height - 0.4, ratios[n][precision]) for i, n in enumerate(order) if precision in ratios[n]
        ]
        y = [place for place, _ in places]
        means = [geometric_mean(values) for _, values in places]
        spread = [[m - min(v) for m, (_, v) in zip(means, places, strict=True)]]
        spread.append([max(v) - m for m, (_, v) in zip(means, places, strict=True)])
        axes.barh(y, means, height * 0.9, color=_color(precision), label=precision)
        axes.errorbar(means, y, xerr=spread, fmt="none", ecolor="black", elinewidth=1, capsize=3)
        for place, mean, (_, values) in zip(y, means, places, strict=True):
            axes.annotate(f"{mean:.2f}", (max(values), place), (6, 0), textcoords="offset points", va="center", fontsize="small")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(order)), [_method(name) for name in order])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(title="Other methods", xlabel="time over convpool's (1: as fast)\nbar: geometric mean; line: range over the layers")
    if len(precisions) > 1:
        axes.legend(fontsize="small", loc="lower right")


def _color(precision: str) -> str:
    return f"C{PRECISIONS.index(precision)}"


def _roofline(axes: Any, found: list, ceilings: dict[str, Any]) -> None:
    """Rate of the direct method's operations against operations a byte, under the measured ceilings; points are named."""
    intensities = [entry["direct_flops"] / entry["min_bytes"] for entry, _ in found]
    for precision in PRECISIONS:
        rows = [(entry, row) for entry, row in found if entry["precision"] == precision]
        if not rows:
            continue
        color = _color(precision)
        x = [entry["direct_flops"] / entry["min_bytes"] for entry, _ in rows]
        y = [entry["direct_flops"] / row.ours_us / 1e6 for entry, row in rows]
        axes.scatter(x, y, color=color, s=14, label=f"convpool, {precision}")
        for (at, rate), (entry, _) in zip(zip(x, y, strict=True), rows if len(found) <= MOST_NAMED else [], strict=False):
            layer = entry_row(entry)
            above = any(other == at and rate < value < rate * CLOSE for other, value in zip(x, y, strict=True))
            below = any(other == at and rate / CLOSE < value < rate for other, value in zip(x, y, strict=True))
            text, offset = f"{layer.c} ch, {layer.h}x{layer.w}", (4, -2 + 4 * (below - above))
            axes.annotate(text, (at, rate), offset, textcoords="offset points", fontsize=7)
        rate, bandwidth = matrix_rate(precision, ceilings), ceilings.get("copy_tb_per_s")
        if rate and bandwidth:
            ends = sorted({min(intensities) / 1.5, rate / bandwidth, max(*intensities, rate / bandwidth) * 2})
            limit = f"limit: {bandwidth:.1f} TB/s, {rate:.0f} TFLOP/s"
            axes.plot(ends, [min(rate, bandwidth * end) for end in ends], color=color, linewidth=1, label=limit)
    axes.set(xscale="log", yscale="log", title="Roofline: input channels and size of each layer")
    axes.set(xlabel="operations per byte (pooling first)", ylabel="TFLOP/s (pooling first)")
    axes.legend(fontsize="small", loc="lower right")
