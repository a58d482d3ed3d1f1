# SPDX-License-Identifier: Apache-2.0
"""The outcome of a comparison, as data."""

from __future__ import annotations

from dataclasses import dataclass, field

EMPTY = "empty"
"""The note of an output without a value in any run."""
_NEXT_STEP = "give other inputs with --data"


@dataclass(frozen=True)
class OutputErrors:
    """Largest differences of one output over all inputs tried.

    max_abs_error is in the output's units, max_rel_error relative to the reference's largest magnitude.  not_finite: share of the
    values that are NaN or infinite in both, which says nothing about the others.  compared: how many values, in all runs;
    an output without any proves nothing.  constant: it is the same for other inputs, within the tolerance, and proves little.
    """

    name: str
    max_abs_error: float
    max_rel_error: float
    passed: bool
    note: str = ""
    not_finite: float = 0.0
    compared: int = 0
    constant: bool = False


@dataclass(frozen=True)
class Verification:
    """Outcome for all outputs.

    reference: what the errors are against; inputs: how many sets were run; allowed: in words; input_scale: what random inputs
    were multiplied by, below 1 where larger ones gave values that are not finite.  notes: what else the comparison is subject to.
    other_shapes: of one more set, of other sizes; none where the model leaves none open or the original takes no others.
    """

    passed: bool
    reference: str
    inputs: int
    input_shapes: dict[str, list[int]]
    outputs: list[OutputErrors] = field(default_factory=list)
    allowed: str = ""
    input_scale: float = 1.0
    notes: list[str] = field(default_factory=list)
    other_shapes: dict[str, list[int]] = field(default_factory=dict)

    @property
    def difference(self) -> str:
        """What is wrong with the output that is furthest off, and what was allowed; else with one that proves nothing."""
        worst = max((o for o in self.outputs if not o.passed), key=lambda o: o.max_rel_error, default=None)
        if worst is None:
            why = ", ".join(f"{output.name} is {output.note}" for output in self.outputs if output.note)
            return f"no output can be compared{f': {why}' if why else ''}; {_NEXT_STEP}"
        if not worst.max_abs_error:
            return f"output '{worst.name}' cannot be compared; {worst.note}; {_NEXT_STEP}"
        got = f"{worst.note or f'{worst.max_abs_error:.3g} absolute'}, {worst.max_rel_error:.3g} relative error"
        return f"output '{worst.name}' differs; got {got}, expected at most {self.allowed}"

    @property
    def differs(self) -> bool:
        """Whether some output is further off than is allowed; a comparison that proves nothing fails without it."""
        return any(output.max_abs_error > 0 for output in self.outputs if not output.passed)

    @property
    def not_finite(self) -> str:
        """Which outputs hold how many values that cannot be compared, in words; "" for none."""
        odd = [(output.not_finite, output.name) for output in self.outputs if output.not_finite]
        return ", ".join(f"{_percent(share)} of {name}" for share, name in odd) + " is NaN or infinite in both" if odd else ""

    @property
    def doubts(self) -> list[str]:
        """What the comparison does not prove and why, in words, and `notes`."""
        empty = ", ".join(output.name for output in self.outputs if output.passed and output.note == EMPTY)
        same = ", ".join(output.name for output in self.outputs if output.constant)
        found = [self.not_finite, empty and f"nothing to compare in {empty}: empty"]
        found.append(same and f"{same}: the same for other inputs, so that agreement proves little")
        return [text for text in (*found, *self.notes) if text]


def shapes_text(shapes: dict[str, list[int]]) -> str:
    """Shapes by input, as `--input-shape` takes them."""
    return ", ".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items())


def _percent(share: float) -> str:
    """A share that is not nothing, nor all, if it is not written as that."""
    percent = min(max(100 * share, 0.1), 99.9) if share < 1 else 100
    return f"{percent:.3g} %"
