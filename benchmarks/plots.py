# SPDX-License-Identifier: Apache-2.0
"""Speed-ups of networks as a picture: on a CPU and in TensorRT.

    python -m benchmarks plots benchmarks/results/cpu.json benchmarks/results/h200_trt86_networks.json docs/speedup_networks.png

The first record is of `benchmarks.model_times`, the second of `benchmarks.tensorrt_engines time`.  The picture of a record of
layers on a GPU is drawn by `python -m benchmarks layers --merge RECORD.json --plot PICTURE.png`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.layers.plot import save
from benchmarks.network_times import STANDARD, ratios, times_of
from benchmarks.tables import NETWORKS

BAR_HEIGHT = 0.8  # of all bars of a network
COLORS = ("C0", "C7", "C2")

Record = dict[str, Any]


def draw(on_cpu: Record, on_gpu: Record) -> bytes:
    """The picture of two records as PNG."""
    return save(bars(*speed_ups(on_cpu, on_gpu)), [on_cpu["rows"], on_gpu["rows"]])


def speed_ups(on_cpu: Record, on_gpu: Record) -> tuple[dict[str, dict[str, float | None]], dict[str, str]]:
    """Return each network's figures by the keys of the legend, and the legend."""
    cpu_rows = [row for row in on_cpu["rows"] if row["kind"] == "network"]
    named: dict[str, dict[str, float | None]] = {}
    for row in on_gpu["rows"]:
        times, (plugin, _) = times_of(row), ratios(row)
        standard = min((times[name] for name in STANDARD if name in times), default=None)
        found = named.setdefault(row["network"], {})
        found["plugin"], found["standard"] = plugin, times["original"] / standard if standard else None
    for row in cpu_rows:
        named.setdefault(row["name"].split(", ")[0], {}).setdefault("cpu", row["speedup"])  # the smallest batch's
    version, gpu, precision = (
        sorted({row[key].split(",")[0] for row in on_gpu["rows"]}) for key in ("tensorrt", "gpu", "precision")
    )
    where = f"TensorRT {'/'.join(version)}, {'/'.join(gpu)}, {'/'.join(precision)}"
    legend = {
        "cpu": f"onnxruntime {on_cpu['onnxruntime']}, {on_cpu['threads']} CPU cores",
        "standard": f"{where}: convpool, standard operators",
        "plugin": f"{where}: convpool, with the plugin",
    }
    return named, legend


def bars(named: dict[str, dict[str, float | None]], legend: dict[str, str]) -> Figure:
    """A group of bars for every network, a bar for every key of the legend."""
    figure = Figure(figsize=(10, 1.4 + 0.5 * len(named)), layout="constrained")
    axes = figure.subplots()
    height = BAR_HEIGHT / len(legend)
    for number, (key, label) in enumerate(legend.items()):
        places = {row + (number + 0.5) * height - BAR_HEIGHT / 2: found.get(key) for row, found in enumerate(named.values())}
        shown = {place: value for place, value in places.items() if value is not None}
        drawn = axes.barh(list(shown), list(shown.values()), height * 0.9, label=label, color=COLORS[number])
        axes.bar_label(drawn, fmt="%.2f", padding=2, fontsize="small")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(named)), [NETWORKS[name] for name in named])
    axes.margins(x=0.1)
    axes.set_ylim(len(named) - 0.5, -0.5)
    axes.set(xlabel="times as fast as the original in the same runtime (1: as fast)")
    figure.legend(loc="outside upper center", fontsize="small")
    return figure


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cpu", type=Path, help="record of benchmarks.model_times")
    parser.add_argument("gpu", type=Path, help="record of benchmarks.tensorrt_engines time")
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    records = (json.loads(path.read_text()) for path in (arguments.cpu, arguments.gpu))
    arguments.picture.write_bytes(draw(*records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
