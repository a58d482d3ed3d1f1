# SPDX-License-Identifier: Apache-2.0
"""Figures of a measured row, and geometric means over rows.

Roofline of the direct method: the larger of its operations over the matrix rate and its bytes over the copy bandwidth,
both measured in the same run.  In fp32 a product on tensor cores is three in TF32, so that the rate is the larger of float32's
own and a third of TF32's.  "naive" is the original graph, convolution then pooling: the faster of cuDNN and TensorRT; of a row
without a pooling the convolution.  "others" is every method on the GPU that is not this project's; there is a speed-up over the
fastest of them only where all five of the papers ran.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.layers.paper import FIVE, paper_times, speed_up_fused, speed_up_naive
from benchmarks.layers.record import Entry, entry_row, significant

OURS = "convpool"
NO_WORKSPACE = "convpool_no_workspace"
RULE = "convpool_rule"
"""The library's choice by its cost rule, without measurements."""
TACTIC = "convpool:"
NAIVE = ("cudnn_naive", "tensorrt_naive")
UNPOOLED = ("cudnn_fused", "tensorrt_fused")
"""Methods for the original of a row without a pooling, one convolution."""
PRODUCTS = 3
"""Products in TF32 that make one in float32."""
ON_CPU = ("cpu_loop", "onnxruntime_cpu")
SLOW = "slow"
"""Why a method was left out that would have run."""
CLOSE = 1.05
"""A choice counts as good within 5% of the fastest tactic."""


@dataclass(frozen=True)
class Figures:
    """Microseconds and ratios of one row; None where something was not measured."""

    times: dict[str, float]
    ours_us: float | None
    rule_us: float | None
    best_us: float | None
    best: str | None
    naive_us: float | None
    others_us: float | None
    other: str | None
    roofline_us: float | None
    copy_us: float | None
    paper: dict[str, float]
    """The paper's microseconds by method."""

    def _over_ours(self, other: float | None) -> float | None:
        return other / self.ours_us if other and self.ours_us else None

    @property
    def over_naive(self) -> float | None:
        """Speed-up of the library's choice over the original graph."""
        return self._over_ours(self.naive_us)

    @property
    def over_others(self) -> float | None:
        """Speed-up of the library's choice over the fastest other method."""
        return self._over_ours(self.others_us)

    @property
    def direct_over_naive(self) -> float | None:
        """The papers' first speed-up, by libraries alone: the faster direct sum over cuDNN naive."""
        return speed_up_naive(self.times)

    @property
    def direct_over_fused(self) -> float | None:
        """The papers' second speed-up, by libraries alone: the faster direct sum over the faster fused method."""
        return speed_up_fused(self.times)

    @property
    def of_roofline(self) -> float | None:
        """Roofline time over the library's."""
        return self._over_ours(self.roofline_us)

    @property
    def of_copy(self) -> float | None:
        """Time to copy X and Y's bytes over the library's: its share of the copy bandwidth."""
        return self._over_ours(self.copy_us)

    @property
    def choice(self) -> float | None:
        """Time of the library's choice over that of the fastest tactic."""
        return self.ours_us / self.best_us if self.ours_us and self.best_us else None

    @property
    def rule_choice(self) -> float | None:
        """Time of the cost rule's choice over that of the fastest tactic."""
        return self.rule_us / self.best_us if self.rule_us and self.best_us else None


def _least(times: dict[str, float]) -> tuple[float | None, str | None]:
    name = min(times, key=times.__getitem__, default=None)
    return (None, None) if name is None else (times[name], name)


def matrix_rate(precision: str, ceilings: dict[str, Any]) -> float | None:
    """TFLOP/s that the machine of the record has for a precision; None where the record does not say."""
    rates = ceilings.get("tflops", {})
    if precision != "fp32":
        return rates.get(precision)
    return max(rates["fp32"], rates["tf32"] / PRODUCTS) if "fp32" in rates and "tf32" in rates else None


def _others_us(entry: Entry, times: dict[str, float]) -> tuple[float | None, str | None]:
    """Time and name of the fastest other method; nothing where one of the papers' five was left out."""
    if any(name not in entry["methods"] or entry["methods"][name].get("skipped") == SLOW for name in FIVE):
        return None, None
    return _least({name: us for name, us in times.items() if not name.startswith(OURS) and name not in ON_CPU})


def roofline_us(entry: Entry, ceilings: dict[str, Any]) -> float | None:
    """Least microseconds of the direct method on the machine of the record; None without its ceilings."""
    rate, bandwidth = matrix_rate(entry["precision"], ceilings), ceilings.get("copy_tb_per_s")
    if not rate or not bandwidth:
        return None
    return max(entry["direct_flops"] / (rate * 1e6), entry["min_bytes"] / (bandwidth * 1e6))


def figures(entry: Entry, ceilings: dict[str, Any]) -> Figures:
    """The figures of one row."""
    times = {name: result["us"] for name, result in entry["methods"].items() if result.get("us")}
    best_us, best = _least({name: us for name, us in times.items() if name.startswith(TACTIC)})
    original = UNPOOLED if entry_row(entry).pool == 1 else NAIVE
    naive_us, _ = _least({name: us for name, us in times.items() if name in original})
    others_us, other = _others_us(entry, times)
    bandwidth = ceilings.get("copy_tb_per_s")
    return Figures(
        times,
        times.get(OURS),
        times.get(RULE),
        best_us,
        best and best.removeprefix(TACTIC),
        naive_us,
        others_us,
        other,
        roofline_us(entry, ceilings),
        entry["min_bytes"] / (bandwidth * 1e6) if bandwidth else None,
        paper_times(entry_row(entry), entry["precision"]),
    )


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers; nan of none."""
    logs = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


def summary(rows: list[Figures]) -> list[dict[str, Any]]:
    """Per ratio its name, geometric mean, least and number of rows; ratios that no row has are left out."""
    lines = []
    for what, values in (
        ("over the faster naive", [row.over_naive for row in rows]),
        ("over the fastest of all others", [row.over_others for row in rows]),
        ("of the direct roofline", [row.of_roofline for row in rows]),
        ("libraries alone, direct over cuDNN naive", [row.direct_over_naive for row in rows]),
        ("libraries alone, direct over fused", [row.direct_over_fused for row in rows]),
        ("the paper's direct over cuDNN naive (V100)", [speed_up_naive(row.paper) for row in rows]),
        ("the paper's direct over fused (V100)", [speed_up_fused(row.paper) for row in rows]),
    ):
        found = [value for value in values if value is not None]
        if found:
            lines.append({"what": what, "mean": geometric_mean(found), "least": min(found), "rows": len(found)})
    return lines


def overview(record: dict[str, Any]) -> dict[str, Any]:
    """Keep of a record's figures: {choice, rows}.

    choice: of how many rows the library's choice and the cost rule's were timed beside the tactics, and in how many each was
    close to the fastest; `protocol` says what chose for the library.  rows: ratios of every row to three digits, None where
    something was not measured.
    """
    found = [(entry, figures(entry, record["ceilings"])) for entry in record["rows"]]
    libraries = ("direct_over_naive", "direct_over_fused")
    ratios = ("over_naive", "over_others", *libraries, "of_roofline", "of_copy", "choice", "rule_choice")
    return {
        "choice": {"within": CLOSE} | close_choices(row for _, row in found),
        "rows": [
            {"name": entry_row(entry).name, "precision": entry["precision"], "layout": entry["layout"]}
            | {ratio: value and significant(value) for ratio in ratios for value in [getattr(row, ratio)]}
            for entry, row in found
        ],
    }


def close_choices(rows: Iterable[Figures]) -> dict[str, dict[str, int]]:
    """Count for the library's choice and the cost rule's by method: {rows, close}, how many rows
    have it and in how many it is within 5% of the fastest tactic; without one that no row has."""
    rows = list(rows)
    choices = {OURS: [row.choice for row in rows], RULE: [row.rule_choice for row in rows]}
    found = {name: [ratio for ratio in ratios if ratio is not None] for name, ratios in choices.items()}
    return {
        name: {"rows": len(ratios), "close": sum(ratio <= CLOSE for ratio in ratios)} for name, ratios in found.items() if ratios
    }
