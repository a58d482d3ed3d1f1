# SPDX-License-Identifier: Apache-2.0
"""The timing protocol, which the GPU's methods and TensorRT's process share.

A method is captured as a CUDA graph of several calls, each on another set of inputs.  Before every replay a kernel reads
twice the L2 cache's size, so that no input is left in it.  A figure is the median over the replays of the replay's time,
by events on the stream, over its calls; the spread is the interquartile range.
"""

from __future__ import annotations

import statistics

SET_BYTES_OVER_L2 = 4
MOST_SETS = 64
REPLAYS = 15
QUICK_REPLAYS = 5
"""Replays when only the fastest of several algorithms is looked for."""
CALLS_US, REPLAYS_US = 2e5, 1e6
"""A replay and all replays stay within these where a call is slow, down to 1 call and 3 replays."""


def input_sets(set_bytes: int, l2_bytes: int) -> int:
    """How many sets of inputs to rotate: four times the L2 cache in all, from 4 to 64 sets."""
    return max(4, min(MOST_SETS, -(-SET_BYTES_OVER_L2 * l2_bytes // set_bytes)))


def schedule(estimate_us: float, sets: int, replays: int) -> tuple[int, int]:
    """(calls in the graph, replays) for a method that takes about `estimate_us` a call."""
    calls = max(1, min(sets, int(CALLS_US / estimate_us)))
    return calls, max(min(replays, 3), min(replays, int(REPLAYS_US / (estimate_us * calls))))


def summarize(times_us: list[float]) -> dict[str, float]:
    """Median and interquartile range of microseconds a call, from at least 2 replays; to a nanosecond."""
    quartiles = statistics.quantiles(times_us, n=4)
    return {"us": round(statistics.median(times_us), 3), "spread_us": round(quartiles[2] - quartiles[0], 3)}
