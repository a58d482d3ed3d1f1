# SPDX-License-Identifier: Apache-2.0
"""Why something cannot be done exactly: a value, to be completed with a name by whoever knows one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """The condition that does not hold, what was found, and what would have been right."""

    condition: str
    got: str
    expected: str


def refuse(condition: str, got: object, expected: object) -> Refusal:
    """A Refusal of values of any type."""
    return Refusal(condition, str(got), str(expected))
