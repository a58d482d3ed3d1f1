# SPDX-License-Identifier: Apache-2.0
"""What was found, done and checked, as data: `to_json` is the file format, `convpool.cli.table` shows it to a person."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field

from convpool.check.verdict import Verification


@dataclass(frozen=True)
class SiteReport:
    """One convolution and the average behind it, or in front of it; pool is "" where there is none.

    status: "rewritten", "rejected" or "excluded"; reason: why not, else None.  macs_before, macs_after: multiply-adds
    of the convolution for one sample, None where a spatial size is unknown.  scope: "" for the main graph.
    """

    conv: str
    pool: str
    pattern: str
    status: str
    lowering: str | None
    reason: str | None
    macs_before: int | None
    macs_after: int | None
    scope: str = ""
    times_us: dict[str, float] | None = None
    """Median microseconds per lowering where they were timed (autotune)."""
    operator: str | None = None
    """The operator that stands there now, where it is one of convpool's."""
    absorbed: tuple[str, ...] = ()
    """Nodes before and behind the pair that are part of its node now."""
    saved_bytes: int | None = None
    """Bytes a sample that these no longer write and read; None where none are, or where sizes are unknown."""
    beside: tuple[str, ...] = ()
    """Why other nodes beside it are not."""
    obstacle: str | None = None
    """The reason in a few words, the same for all sites that stay for the same one."""
    fallback: str | None = None
    """Why it is not the operator that was asked for, where it became another form."""


@dataclass(frozen=True)
class Summary:
    """Totals over the model.  Operator counts cover subgraphs and functions; sizes are the bytes of all files
    that a model needs."""

    rewritten: int
    rejected: int
    excluded: int
    macs_before: int
    macs_after: int
    operators_before: dict[str, int]
    operators_after: dict[str, int]
    bytes_before: int
    bytes_after: int
    seconds: float
    concats: int
    """Concats that read an earlier one's result in place of what that joins."""
    convolutions: int = 0
    """All convolutions of the original, those in functions and bodies once."""
    rewritten_convolutions: int = 0
    """How many of them were rewritten, each counted once."""
    rewritten_macs_before: int | None = None
    """Multiply-adds a sample of these alone; None where sizes are unknown, as in the three below.  `macs_before` and `macs_after`
    are sums over all sites instead: those that stay count too, and a convolution with two sites twice."""
    rewritten_macs_after: int | None = None
    model_macs_before: int | None = None
    """Multiply-adds a sample of all convolutions and matrix products, see `convpool.macs`."""
    model_macs_after: int | None = None
    counted_shapes: dict[str, list[int]] = field(default_factory=dict)
    """The inputs' shapes that were counted with, where the model leaves sizes open."""
    batch: int = 1
    """Samples in the inputs."""


@dataclass(frozen=True)
class Speed:
    """Median microseconds a run of original and result in onnxruntime on the CPU at hand, timed in turn."""

    original_us: float
    result_us: float
    threads: int
    input_shapes: dict[str, list[int]]

    @property
    def ratio(self) -> float:
        """How many times as fast the result is."""
        return self.original_us / self.result_us


@dataclass
class Report:
    """The whole report of one run."""

    sites: list[SiteReport]
    summary: Summary
    verification: Verification | None = None
    options: dict[str, object] = field(default_factory=dict)
    speed: Speed | None = None
    """None where it was not timed."""
    hints: list[str] = field(default_factory=list)
    """What to do next, where something can be done about what stays."""
    warnings: list[str] = field(default_factory=list)
    """What the options ask for in vain."""

    def to_json(self, indent: int | None = 2) -> str:
        """The report as JSON text; infinite errors become null, verification is null if there was none."""
        return json.dumps(_finite(asdict(self)), indent=indent) + "\n"


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
