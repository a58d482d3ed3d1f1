# SPDX-License-Identifier: Apache-2.0
"""The papers' figures of a V100, to stand beside this machine's, and the two speed-ups they state.

Sources: S. Suita et al., "Efficient convolution pooling on the GPU", JPDC 138 (2020), tables 1 and 2 (`suita2020.csv`,
milliseconds, batch 64); H. Tokura et al., "Fast Algorithm of Unified Layer Performing Convolution and Average Pooling on
the GPU", Bulletin of Networking, Computing, Systems, and Software (2018), tables II and III (`tokura2018.csv`,
microseconds, 32x32 input, batch 1; `tokura2018_counts.csv`, the floating-point operations that nvprof counted, in 1e5).

Suita et al. give two speed-ups for each row, both of the faster direct sum: over cuDNN naive, and over the faster fused method.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from pathlib import Path

from benchmarks.layers.rows import Row

FIVE = ("cudnn_naive", "cudnn_fused", "cublas_fused", "cudnn_direct", "cublas_direct")
"""The five implementations that both papers compare."""
PAPERS_TYPES = {"tf32": "fp32"}
"""The papers' type that a precision stands beside, if it is another: the V100 has no TF32."""
FORMS = (("fused", "filter"), ("direct", "sum"))


TOKURAS_NAMES = {f"{library}_{form}_{what}": f"{library}_{form}" for library in ("cudnn", "cublas") for form, what in FORMS}
"""Tokura's fused filter and direct sum, as Suita names them."""


@functools.cache
def _tables() -> dict[tuple, dict[str, float]]:
    """Microseconds by method for (suite family, precision, size, c, m)."""
    found: dict[tuple, dict[str, float]] = {}
    folder = Path(__file__).parent / "data"
    for line in csv.DictReader((folder / "suita2020.csv").read_text().splitlines()):
        key = ("suita", line["dtype"], int(line["size"]), int(line["channels"]), int(line["channels"]))
        found.setdefault(key, {})[line["method"]] = float(line["ms"]) * 1000
    for line in csv.DictReader((folder / "tokura2018.csv").read_text().splitlines()):
        key = ("tokura", line["dtype"], 32, int(line["in_channels"]), int(line["out_channels"]))
        found.setdefault(key, {})[TOKURAS_NAMES.get(line["method"], line["method"])] = float(line["us"])
    return found


def paper_times(row: Row, precision: str) -> dict[str, float]:
    """The papers' microseconds by method for a row of their suites; empty if they have none.

    TF32 stands beside the papers' fp32, the V100 having none.
    """
    family = row.suite.partition("-")[0]
    if family not in ("suita", "tokura"):
        return {}
    dtype = PAPERS_TYPES.get(precision, precision)
    return dict(_tables().get((family, dtype, row.h, row.c, row.m), {}))


def speed_up_naive(times: Mapping[str, float]) -> float | None:
    """The papers' "Speed-up: naive": cuDNN naive over the faster direct sum; None where one of them is missing."""
    direct = _fastest(times, "direct")
    naive = times.get("cudnn_naive")
    return naive / direct if naive and direct else None


def speed_up_fused(times: Mapping[str, float]) -> float | None:
    """The papers' "Speed-up: fused": the faster fused method over the faster direct sum; None where one is missing."""
    direct, fused = _fastest(times, "direct"), _fastest(times, "fused")
    return fused / direct if fused and direct else None


def _fastest(times: Mapping[str, float], form: str) -> float | None:
    """Return the lesser time of cuDNN's and cuBLAS' implementation; both must have one."""
    both = [times.get(f"{library}_{form}") for library in ("cudnn", "cublas")]
    return min(us for us in both if us) if all(both) else None
