# SPDX-License-Identifier: Apache-2.0
"""What a comparison came to, as data."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class OutputErrors:
    """Largest differences of one output over all inputs tried.

    max_abs_error is in the output's units, max_rel_error relative to the reference's largest magnitude.
    """

    name: str
    max_abs_error: float
    max_rel_error: float
    passed: bool
    note: str = ""


@dataclass(frozen=True)
class Verification:
    """Outcome for all outputs.  reference: what the errors are against; inputs: how many sets were run; allowed: in words."""

    passed: bool
    reference: str
    inputs: int
    input_shapes: dict[str, list[int]]
    outputs: list[OutputErrors] = field(default_factory=list)
    allowed: str = ""

    @property
    def difference(self) -> str:
        """What is wrong with the output that is furthest off, and what was allowed."""
        worst = max((o for o in self.outputs if not o.passed), key=lambda o: o.max_rel_error, default=None)
        if worst is None:
            return "no output can be compared"
        got = f"{worst.note or f'{worst.max_abs_error:.3g} absolute'}, {worst.max_rel_error:.3g} relative error"
        return f"output '{worst.name}' differs; got {got}, expected at most {self.allowed}"
