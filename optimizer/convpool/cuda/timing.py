# SPDX-License-Identifier: Apache-2.0
"""Times of calls on a GPU.

A method is captured as a CUDA graph of several calls, each on another set of inputs.  Before every replay a kernel reads
twice the L2 cache's size, so that no input is left in it.  A figure is the median over the replays of the replay's time,
by events on the stream, over its calls; the spread is the interquartile range.
"""

import math
import statistics
from collections.abc import Callable
from typing import Any

SET_BYTES_OVER_L2 = 4
MOST_SETS = 64
REPLAYS = 15
QUICK_REPLAYS = 5
"""Replays when only the fastest of several algorithms is looked for."""
CALLS_US, REPLAYS_US = 2e5, 1e6
"""A replay and all replays stay within these where a call is slow, down to 1 call and 3 replays."""
HOPELESS_US = 200
"""Only calls above this are given up at the first look: below, the CPU's launches blur it."""
LOOKS = 2
"""Replays after which a call below that is given up: one may have been disturbed."""


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


class GraphTimer:
    """Times calls on the current GPU with PyTorch's graphs, replayed at least twice, and events; all runs on `stream`."""

    def __init__(self, torch: Any, replays: int = REPLAYS) -> None:
        self._torch, self._replays = torch, replays
        self.stream = torch.cuda.Stream()
        self.l2_bytes: int = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._flush = torch.ones(2 * self.l2_bytes // 4, device="cuda")
        self._sink = torch.empty((), device="cuda")

    def measure(
        self, call: Callable[[int], Any], sets: int, *, quick: bool = False, give_up_us: float = math.inf
    ) -> dict[str, float]:
        """Median and spread of microseconds of `call(i)`, i rotating through the sets.  quick: fewer replays.  give_up_us: a call
        that takes longer at a first look, or in the first two replays, gets no closer one.  call only enqueues on `stream`; what
        it allocates comes from the graph's own memory."""
        torch = self._torch
        with torch.cuda.stream(self.stream):
            call(0)
            self.stream.synchronize()
            estimate = self._elapsed_us(lambda: call(0))
            if estimate > max(give_up_us, HOPELESS_US):
                return {"us": estimate, "spread_us": 0.0}
            calls, replays = schedule(max(estimate, 1.0), sets, QUICK_REPLAYS if quick else self._replays)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="relaxed"):
                for i in range(calls):
                    call(i)
            graph.replay()
            times = []
            for _ in range(replays):
                torch.sum(self._flush, dim=0, out=self._sink)
                times.append(self._elapsed_us(graph.replay) / calls)
                if len(times) == LOOKS and min(times) > give_up_us:
                    break
        return summarize(times)

    def _elapsed_us(self, work: Callable[[], Any]) -> float:
        start, stop = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self.stream)
        work()
        stop.record(self.stream)
        stop.synchronize()
        return start.elapsed_time(stop) * 1000
