# SPDX-License-Identifier: Apache-2.0
"""What the papers measured on a V100, to stand beside this machine's figures.

Sources: S. Suita et al., "Efficient convolution pooling on the GPU", JPDC 138 (2020), tables 1 and 2 (`suita2020.csv`,
milliseconds, batch 64); H. Tokura et al., "Fast Algorithm of Unified Layer Performing Convolution and Average Pooling on
the GPU", Bulletin of Networking, Computing, Systems, and Software (2018), tables II and III (`tokura2018.csv`,
microseconds, 32x32 input, batch 1).
"""

from __future__ import annotations

import csv
import functools
from importlib import resources

from convpool.bench.rows import Row


@functools.cache
def _tables() -> dict[tuple, dict[str, float]]:
    """Microseconds by method for (suite family, precision, size, c, m)."""
    found: dict[tuple, dict[str, float]] = {}
    folder = resources.files("convpool.bench") / "data"
    for line in csv.DictReader((folder / "suita2020.csv").read_text().splitlines()):
        key = ("suita", line["dtype"], int(line["size"]), int(line["channels"]), int(line["channels"]))
        found.setdefault(key, {})[line["method"]] = float(line["ms"]) * 1000
    for line in csv.DictReader((folder / "tokura2018.csv").read_text().splitlines()):
        key = ("tokura", line["dtype"], 32, int(line["in_channels"]), int(line["out_channels"]))
        found.setdefault(key, {})[line["method"]] = float(line["us"])
    return found


def paper_times(row: Row, precision: str) -> dict[str, float]:
    """The papers' microseconds by method for a row of their suites; empty if they have none.

    TF32 stands beside the papers' fp32, the V100 having none.
    """
    family = row.suite.partition("-")[0]
    if family not in ("suita", "tokura"):
        return {}
    dtype = "fp32" if precision == "tf32" else precision
    return dict(_tables().get((family, dtype, row.h, row.c, row.m), {}))


def paper_speed_up(row: Row, precision: str) -> tuple[float, float] | None:
    """(microseconds of cuDNN naive, speed-up of the paper's fastest method over it) on the V100, or None."""
    times = paper_times(row, precision)
    naive = times.get("cudnn_naive")
    return (naive, naive / min(times.values())) if naive else None
