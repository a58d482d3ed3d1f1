# SPDX-License-Identifier: Apache-2.0
"""Timing in turn: whatever is compared runs alternately, so that a drift of the machine's speed meets all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from convpool.check.inputs import Arrays

PAUSE_S = 0.06
"""Before each turn: onnxruntime's threads spin for 36 ms after a run, and would slow the next session down."""
TURN_S = 0.02
"""The timed runs of a turn last at least so long together."""
LEAST_ROUNDS = 3
"""Rounds that a budget does not cut."""


def in_turn(
    turns: Mapping[str, Callable[[], float]], rounds: int, *, warm_up: int = 0, budget_s: float | None = None
) -> dict[str, list[float]]:
    """One figure a round of everything in `turns`, each by its own call.

    warm_up: rounds before these, whose figures do not count.  budget_s: rounds stop when so many seconds are spent, though not
    before LEAST_ROUNDS.
    """
    for _ in range(warm_up):
        for turn in turns.values():
            turn()
    figures: dict[str, list[float]] = {name: [] for name in turns}
    deadline = None if budget_s is None else time.perf_counter() + budget_s
    for number in range(rounds):
        for name, turn in turns.items():
            figures[name].append(turn())
        if deadline is not None and number + 1 >= LEAST_ROUNDS and time.perf_counter() > deadline:
            break
    return figures


def time_sessions(sessions: Mapping[str, Any], arrays: Arrays, rounds: int, budget_s: float) -> dict[str, float]:
    """Median microseconds per run of onnxruntime sessions with the same inputs, each as fast as it is by itself.

    A turn is a pause, a run that is not timed, and runs for TURN_S.
    """

    def turn_of(session: Any) -> Callable[[], float]:
        def turn() -> float:
            time.sleep(PAUSE_S)
            session.run(None, arrays)
            begin, runs = time.perf_counter(), 0
            while runs == 0 or time.perf_counter() - begin < TURN_S:
                session.run(None, arrays)
                runs += 1
            return (time.perf_counter() - begin) / runs * 1e6

        return turn

    samples = in_turn({name: turn_of(session) for name, session in sessions.items()}, rounds, budget_s=budget_s)
    return {name: statistics.median(values) for name, values in samples.items()}
