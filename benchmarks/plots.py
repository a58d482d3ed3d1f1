# SPDX-License-Identifier: Apache-2.0
"""Speed-ups of a record as a picture: of `benchmarks.model_times`, or of networks by `benchmarks.tensorrt_engines time`.

    python -m benchmarks.plots benchmarks/results/cpu.json docs/speedup_cpu.png
    python -m benchmarks.plots benchmarks/results/h200_trt86_networks.json docs/speedup_gpu_networks.png

The picture of a record of layers on a GPU is convpool-bench's: `convpool-bench --merge RECORD.json --plot PICTURE.png`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.network_times import LOWERINGS, times_of
from convpool.bench.plot import save

BAR_HEIGHT = 0.8  # of all bars of a row
WAYS = {
    "plugin": "plugin: ConvAvgPool alone",
    "siblings": "plugin: pairs",
    "stem": "plugin: pairs, images",
    "plain_conv": "plugin: convpool-build",
    "concats_kept": "plugin: Concats kept",
}
"""What lowerings of `benchmarks.network_times` are called beside the bars, where not by their names."""


def draw(record: dict[str, Any]) -> bytes:
    """A record's picture as PNG."""
    labels, series, title = (_networks if "network" in record["rows"][0] else _cpu)(record)
    figure = Figure(figsize=(8, 0.9 + 0.32 * max(len(labels), len(labels) * len(series) * 0.6)), layout="constrained")
    axes = figure.subplots()
    height = BAR_HEIGHT / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [row + (number + 0.5) * height - BAR_HEIGHT / 2 for row, value in enumerate(values) if value is not None]
        shown = [value for value in values if value is not None]
        bars = axes.barh(places, shown, height * 0.9, label=name, color=f"C{number}")
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize="small")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set(xlabel="times as fast as the original", title=title)
    if len(series) > 1:
        figure.legend(loc="outside right upper", fontsize="small")
    return save(figure, record["rows"])


Parts = tuple[list[str], dict[str, list[float | None]], str]
"""Labels of the rows, a list of speed-ups for each way, the title."""


def _cpu(record: dict[str, Any]) -> Parts:
    rows = record["rows"]
    title = f"onnxruntime {record['onnxruntime']} on {record['threads']} cores of an {record['cpu']}"
    return [row["name"] for row in rows], {"optimized": [row["speedup"] for row in rows]}, title


def _networks(record: dict[str, Any]) -> Parts:
    rows = [row for row in record["rows"] if "original" in times_of(row)]
    ways = [name for name in LOWERINGS if name != "original" and any(name in times_of(row) for row in rows)]
    series = {
        WAYS.get(name, name): [times_of(row)["original"] / times_of(row)[name] if name in times_of(row) else None for row in rows]
        for name in ways
    }
    versions = sorted({f"TensorRT {row['tensorrt']}, {row['gpu'].split(',')[0]}, {row['precision']}" for row in rows})
    labels = [f"{row['network']}, batch {row['batch']}" for row in rows]
    return labels, series, "; ".join(versions)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    arguments.picture.write_bytes(draw(json.loads(arguments.record.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
