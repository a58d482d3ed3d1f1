# SPDX-License-Identifier: Apache-2.0
"""Timing in turn: whatever is compared runs alternately, so that a drift of the machine's speed meets all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

from convpool.check.inputs import Arrays
from convpool.check.session import Session

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


def time_sessions(sessions: Mapping[str, Session], arrays: Arrays, rounds: int, budget_s: float) -> dict[str, float]:
    """Median microseconds per run of `Session`s with the same inputs, each as fast as it is by itself."""
    turns = {name: partial(session.turn, arrays) for name, session in sessions.items()}
    return {name: statistics.median(values) for name, values in in_turn(turns, rounds, budget_s=budget_s).items()}
