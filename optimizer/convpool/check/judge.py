"""Judging outputs: how far two results are apart, what is allowed, and when more is the original's own doing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto

from convpool.check.verdict import OutputErrors, Verification

TOLERANCES: dict[int, tuple[float, float]] = {TensorProto.FLOAT16: (2e-2, 1e-2), TensorProto.BFLOAT16: (1e-1, 5e-2)}
"""(rtol, atol in units of the largest magnitude) by type."""
FLOAT32_TOLERANCE = (1e-3, 1e-4)


@dataclass(frozen=True)
class Tolerance:
    """|y - r| <= atol + rtol |r| per element; without an atol, relative_atol of the largest |r| stands for it."""

    rtol: float
    relative_atol: float
    atol: float | None = None

    def of(self, reference: np.ndarray) -> np.ndarray:
        """What is allowed for each element of a reference that is finite and not empty."""
        size = np.abs(reference)
        return (self.relative_atol * float(size.max()) if self.atol is None else self.atol) + self.rtol * size

    def __str__(self) -> str:
        absolute = f"{self.relative_atol:g} of the largest" if self.atol is None else f"{self.atol:g}"
        return f"{self.rtol:g} of each value + {absolute}"


def array_errors(
    name: str, reference: np.ndarray, result: np.ndarray, tolerance: Tolerance, original: np.ndarray | None = None
) -> OutputErrors:
    """The differences of two arrays of numbers.  original: one that is allowed to be twice its own distance off."""
    if reference.shape != result.shape:
        return OutputErrors(name, np.inf, np.inf, False, f"shape {result.shape}, expected {reference.shape}")
    r, y = reference.astype(np.float64), result.astype(np.float64)
    odd = ~np.isfinite(r)
    if not np.array_equal(r[odd], y[odd], equal_nan=True) or not np.isfinite(y[~odd]).all():
        return OutputErrors(name, np.inf, np.inf, False, "NaN or infinity in other places")
    r, y = r[~odd], y[~odd]
    if r.size == 0:
        return OutputErrors(name, 0.0, 0.0, True)
    difference, largest = np.abs(y - r), float(np.abs(r).max())
    passed = bool((difference <= tolerance.of(r)).all())
    if not passed and original is not None:
        passed = bool(difference.max() <= 2 * np.abs(original.astype(np.float64)[~odd] - r).max())
    error = float(difference.max())
    return OutputErrors(name, error, error / largest if largest else float(error > 0), passed)


def worst_of(before: OutputErrors | None, found: OutputErrors) -> OutputErrors:
    """The worse one of two runs' errors of an output."""
    if before is None or (found.passed, -found.max_abs_error) < (before.passed, -before.max_abs_error):
        return found
    return before


class Judge:
    """Collects the differences of every output."""

    def __init__(self, names: list[str], tolerance: Tolerance, *, own_error_counts: bool, nudge_counts: bool) -> None:
        """names: of the outputs.  own_error_counts: an output passes that is no further off than twice the original's own is.

        nudge_counts: one passes that differs only where the original is discontinuous.
        """
        self._names, self._tolerance = names, tolerance
        self._own_error_counts, self._nudge_counts = own_error_counts, nudge_counts
        self._results: dict[str, OutputErrors] = {}

    def add(
        self,
        reference: list,
        original: list,
        result: list,
        again: Callable[[], list],
        nudge: Callable[[], list[list]],
        how: str = "",
    ) -> None:
        """Compare one run's outputs.  how: said of one that differs.

        again: runs the original once more, to see whether it is deterministic.  nudge: runs the reference on slightly
        changed inputs, to see whether it is continuous.
        """
        nudged: list[list] | None = None
        for index, name in enumerate(self._names):
            found = self._one(name, reference[index], original[index], result[index])
            if not found.passed and not _equal(again()[index], original[index]):
                found = OutputErrors(name, found.max_abs_error, found.max_rel_error, True, "random: not comparable")
            elif not found.passed and self._nudge_counts:
                nudged = nudge() if nudged is None else nudged
                if self._jumps_alike(reference[index], result[index], [run[index] for run in nudged]):
                    found = replace(found, passed=True, note="differs only where the original is discontinuous")
            if not found.passed and how:
                found = replace(found, note=f"{found.note or f'{found.max_abs_error:.3g} absolute'} {how}")
            self._results[name] = worst_of(self._results.get(name), found)

    def _jumps_alike(self, reference, result, nudged: list) -> bool:
        """Whether the original, on slightly changed inputs, moves as many elements beyond the tolerance, as far."""
        arrays = [reference, result, *nudged]
        if not all(isinstance(a, np.ndarray) and a.shape == reference.shape and a.dtype.kind in "fiub" for a in arrays):
            return False
        r, *others = (a.astype(np.float64) for a in arrays)
        if not all(np.isfinite(a).all() for a in (r, *others)) or r.size == 0:
            return False
        allowed = self._tolerance.of(r)
        own, *changes = (np.abs(a - r) for a in others)
        beyond = max(int((change > allowed).sum()) for change in changes)
        far = max(float(change.max()) for change in changes)
        # Indices and classes have no distance.
        near = reference.dtype.kind in "iub" or bool(own.max() <= 2 * far)
        return near and int((own > allowed).sum()) <= 4 * beyond

    def verdict(self, reference: str, inputs: int, shapes: dict[str, list[int]]) -> Verification:
        """The outcome over everything added; at least one output must be comparable."""
        outputs = list(self._results.values())
        passed = all(output.passed for output in outputs) and (
            not outputs or any("random" not in output.note for output in outputs)
        )
        return Verification(passed, reference, inputs, shapes, outputs, str(self._tolerance))

    def _one(self, name: str, reference, original, result) -> OutputErrors:
        if not all(isinstance(value, np.ndarray) for value in (reference, original, result)):
            return self._sequence(name, reference, original, result)
        if reference.dtype.kind not in "fiub" and reference.dtype.name != "bfloat16" and reference.shape == result.shape:
            same = bool(np.array_equal(reference, result))
            return OutputErrors(name, 0.0 if same else np.inf, 0.0 if same else np.inf, same)
        return array_errors(name, reference, result, self._tolerance, original if self._own_error_counts else None)

    def _sequence(self, name: str, reference, original, result) -> OutputErrors:
        """Sequences element by element; maps and missing optionals by equality."""
        if isinstance(reference, list) and isinstance(result, list) and len(reference) == len(result):
            parts = [self._one(name, *items) for items in zip(reference, original, result, strict=True)]
            worst = min(parts, key=lambda p: (p.passed, -p.max_abs_error), default=OutputErrors(name, 0.0, 0.0, True))
            return worst
        same = _equal(reference, result)
        return OutputErrors(name, 0.0 if same else np.inf, 0.0 if same else np.inf, same)


def _equal(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f" and b.dtype.kind == "f"))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
