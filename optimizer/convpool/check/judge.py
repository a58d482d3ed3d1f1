# SPDX-License-Identifier: Apache-2.0
"""Judging outputs: how far two results are apart, what is allowed, and when more is the original's own doing; and the verdict
as data."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

EMPTY = "empty"
"""The note of an output without a value in any run."""
_NEXT_STEP = "give other inputs with --data"


@dataclass(frozen=True)
class OutputErrors:
    """Largest differences of one output over all inputs tried.

    Attributes:
        max_abs_error: In the output's units.
        max_rel_error: Relative to the reference's largest magnitude.
        not_finite: Share of the values that are NaN or infinite in both, which says nothing about
            the others.
        compared: Number of values compared, in all runs; an output without any proves nothing.
        constant: True if it is the same for other inputs, within the tolerance, and proves little.
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

    Attributes:
        reference: The model that the errors are against.
        inputs: Number of sets run.
        allowed: The tolerances in words.
        input_scale: Factor of the random inputs, below 1 where larger ones gave values that are not
            finite.
        notes: Other limits of the comparison.
        other_shapes: Shapes of one more set, of other sizes; none where the model leaves none open
            or the original takes no others.
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
        """The fault of the output furthest off, with its tolerance; else one proving nothing."""
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
        """True if an output is further off than allowed, not if the check merely proves nothing."""
        return any(output.max_abs_error > 0 for output in self.outputs if not output.passed)

    @property
    def not_finite(self) -> str:
        """Which outputs hold how many values that cannot be compared, in words; "" for none."""
        odd = [(output.not_finite, output.name) for output in self.outputs if output.not_finite]
        return ", ".join(f"{_percent(share)} of {name}" for share, name in odd) + " is NaN or infinite in both" if odd else ""

    @property
    def doubts(self) -> list[str]:
        """The points that the comparison does not prove and why, in words, and `notes`."""
        names = {kind: ", ".join(o.name for o in self.outputs if o.passed and o.note == kind) for kind in (EMPTY, RANDOM)}
        same = ", ".join(output.name for output in self.outputs if output.constant)
        found = [self.not_finite, *(said and f"nothing to compare in {said}: {kind}" for kind, said in names.items())]
        found.append(same and f"{same}: the same for other inputs, so that agreement proves little")
        return [text for text in (*found, *self.notes) if text]


def shapes_text(shapes: dict[str, list[int]]) -> str:
    """Shapes by input, as `--input-shape` takes them."""
    return ", ".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items())


def _percent(share: float) -> str:
    """A share that is not nothing, nor all, if it is not written as that."""
    percent = min(max(100 * share, 0.1), 99.9) if share < 1 else 100
    return f"{percent:.3g} %"


FLOAT32_TOLERANCE = (1e-3, 1e-4)
PRECISION_TOLERANCES = {"fp32": FLOAT32_TOLERANCE, "tf32": (2e-2, 1e-2), "fp16": (2e-2, 1e-2), "bf16": (1e-1, 5e-2)}
"""(rtol, atol in units of the largest magnitude) by what a model or an engine computes in, from the most exact to the least: tf32
and fp16 keep 11 significant bits of what is multiplied, bf16 keeps 8."""


@dataclass(frozen=True)
class Tolerance:
    """|y - r| <= atol + rtol |r| per element; without an atol, relative_atol of the largest |r| stands for it."""

    rtol: float
    relative_atol: float
    atol: float | None = None

    def of(self, reference: np.ndarray) -> np.ndarray:
        """Return the tolerance of each element of a reference that is finite and not empty."""
        size = np.abs(reference)
        return (self.relative_atol * float(size.max()) if self.atol is None else self.atol) + self.rtol * size

    def __str__(self) -> str:
        absolute = f"{self.relative_atol:g} of the largest" if self.atol is None else f"{self.atol:g}"
        return f"{self.rtol:g} of each value + {absolute}"


EXACT = Tolerance(0.0, 0.0)
SLICE_ELEMENTS = 16
"""Fewest elements of a slice that has a tolerance of its own: of fewer, all may be near 0 by chance."""


def slice_tolerance(reference: np.ndarray, tolerance: Tolerance, own_error: np.ndarray | None = None) -> np.ndarray:
    """The tolerance of each element by the largest magnitude in its slice, the strictest of all axes.

    Scores beside boxes in pixels may be wrong by all that they are, and yet be right beside the largest number.  Ten rtol of a
    slice's largest are far from a wrong rewrite, which gives 1e-1.  A 128th of the output's atol is what float32 may make of
    a sum that cancels.  own_error: of the original's half precision, which may be four times as large; float32's atol does then.
    """
    size, allowed = np.abs(reference), np.full(reference.shape, np.inf)
    for axis, count in enumerate(reference.shape):
        if count > 1 and reference.size >= count * SLICE_ELEMENTS:
            rest = tuple(other for other in range(reference.ndim) if other != axis)
            own = 0.0 if own_error is None else 4 * own_error.max(axis=rest, keepdims=True)
            allowed = np.minimum(allowed, np.maximum(10 * tolerance.rtol * size.max(axis=rest, keepdims=True), own))
    return allowed + (tolerance.relative_atol if own_error is None else FLOAT32_TOLERANCE[1]) / 128 * float(size.max(initial=0))


def small_numbers_off(name: str, reference: Any, result: Any, tolerance: Tolerance) -> str:
    """A note of an output whose numbers are further off than their slices allow; "" where none is."""
    if not _are_numbers([reference, result]) or reference.dtype.kind != "f":
        return ""
    r, y = reference.astype(np.float64), result.astype(np.float64)
    allowed = slice_tolerance(r, tolerance)
    return f"{name}: {_furthest(r, y, allowed)}" if (np.abs(y - r) > allowed).any() else ""


def _furthest(reference: np.ndarray, result: np.ndarray, allowed: np.ndarray) -> str:
    off = np.abs(result - reference)
    worst = np.unravel_index((off - allowed).argmax(), off.shape)
    return f"{off[worst]:.3g} absolute in a slice of small numbers, where {allowed[worst]:.3g} are allowed"


def array_errors(
    name: str, reference: np.ndarray, result: np.ndarray, tolerance: Tolerance, original: np.ndarray | None = None
) -> OutputErrors:
    """The differences of two arrays of numbers.  original: its infinities are allowed, twice its errors, four times as often."""
    if reference.shape != result.shape:
        return OutputErrors(name, np.inf, np.inf, False, f"shape {result.shape}, expected {reference.shape}")
    r, y = reference.astype(np.float64), result.astype(np.float64)
    r = r if original is None else np.where(np.isinf(y) & (original == y), y, r)
    odd = ~np.isfinite(r)
    if not np.array_equal(r[odd], y[odd], equal_nan=True) or not np.isfinite(y[~odd]).all():
        return OutputErrors(name, np.inf, np.inf, False, "NaN or infinity in other places")
    not_finite = float(odd.mean()) if odd.size else 0.0
    r, y = r[~odd], y[~odd]
    if r.size == 0:
        return OutputErrors(name, 0.0, 0.0, True, not_finite=not_finite)
    difference, largest, allowed = np.abs(y - r), float(np.abs(r).max()), tolerance.of(r)
    passed = bool((difference <= allowed).all())
    if not passed and original is not None:
        own = np.abs(original.astype(np.float64)[~odd] - r)
        near = bool(difference.max() <= 2 * own.max(where=np.isfinite(own), initial=0))
        passed = near and int((difference > allowed).sum()) <= 4 * int((own > allowed).sum())
    error = float(difference.max())
    return OutputErrors(name, error, error / largest if largest else float(error > 0), passed, "", not_finite, r.size)


def worst_of(before: OutputErrors | None, found: OutputErrors) -> OutputErrors:
    """The worse one of two runs' errors of an output."""
    return min(filter(None, (before, found)), key=lambda errors: (errors.passed, -errors.max_abs_error))


def least_exact(precisions: Iterable[str]) -> str:
    """The least exact of these; "fp32" if there are none."""
    return max(precisions, key=list(PRECISION_TOLERANCES).index, default="fp32")


def precision_of(types: Iterable[np.dtype]) -> str:
    """The precision of the least exact of these types."""
    return least_exact({"float16": "fp16", "bfloat16": "bf16"}.get(dtype.name, "fp32") for dtype in types)


RANDOM = "random"
"""The note of an output that the original itself gives other numbers for in each run."""
RANDOM_RUNS = 8


class Judge:
    """Collects the differences of every output; the tolerance alone decides, unless `add` gets what a lenient judgement needs."""

    def __init__(
        self, names: list[str], tolerance: Tolerance, *, own_error_counts: bool = False, exact_integers: bool = False
    ) -> None:
        """names: of the outputs.  own_error_counts: an output passes that is no further off than twice the original's own is.
        exact_integers: whole numbers have no tolerance; classes and indices next to one another may mean anything."""
        self._names, self._tolerance, self._own_error_counts = names, tolerance, own_error_counts
        self._exact_integers, self._allowed = exact_integers, str(tolerance)
        self._results: dict[str, OutputErrors] = {}
        self._not_finite: dict[str, list[float]] = {}
        self._compared: Counter[str] = Counter()
        self._constant: set[str] = set()

    def add(
        self,
        reference: Sequence[Any],
        result: Sequence[Any],
        original: Sequence[Any] | None = None,
        again: Callable[[], list] | None = None,
        nudge: Callable[[], list[list]] | None = None,
        how: str = "",
    ) -> None:
        """Compare one run's outputs.  how: said of one that differs.  original: what the original gives in its own types; default
        the reference.  again: runs the original once more; an output that then differs from itself as much is random and passes.
        nudge: runs the reference on slightly changed inputs; an output passes that differs only where the reference is
        discontinuous."""
        original = reference if original is None else original
        runs = nudge and cache(nudge)
        for index, name in enumerate(self._names):
            found = self._one(name, reference[index], original[index], result[index])
            if not found.passed and again is not None and self._is_random(index, found.max_abs_error, original[index], again):
                found = OutputErrors(name, 0.0, 0.0, True, RANDOM)
            elif runs is not None:
                found = self._beside_jumps(found, reference[index], original[index], result[index], runs, index)
            if not found.passed and how:
                found = replace(found, note=f"{found.note or f'{found.max_abs_error:.3g} absolute'} {how}")
            self._results[name] = worst_of(self._results.get(name), found)
            self._not_finite.setdefault(name, []).append(found.not_finite)
            self._compared[name] += found.compared

    def vary(self, reference: Sequence[Any], other: Sequence[Any]) -> None:
        """Find outputs that hardly depend on the inputs; whole numbers, often sizes or classes, count where no output does."""
        for index, name in enumerate(self._names):
            if self._compared[name] and self._one(name, reference[index], reference[index], other[index]).passed:
                self._constant.add(name)
        if any(count and name not in self._constant for name, count in self._compared.items()):
            kinds = {name: getattr(reference[index], "dtype", np.dtype(object)).kind for index, name in enumerate(self._names)}
            self._constant -= {name for name, kind in kinds.items() if kind in "iub"}

    @property
    def compared(self) -> bool:
        return not self._names or self._compared.total() > 0

    def _is_random(self, index: int, error: float, original: Any, again: Callable[[], list]) -> bool:
        """Return True if the original differs from itself, and in one of some runs by a quarter of an error at least."""
        for _ in range(RANDOM_RUNS):
            own = self._one(self._names[index], original, original, again()[index]).max_abs_error
            if not own or error <= 4 * own:
                return own > 0
        return False

    def _beside_jumps(
        self, found: OutputErrors, reference: Any, original: Any, result: Any, runs: Callable[[], list[list]], index: int
    ) -> OutputErrors:
        """Output `index`'s errors, and whether it passes once each slice is looked at, and where the original jumps in `runs`."""
        if not _are_numbers([reference, result]) or found.passed and reference.dtype.kind != "f":
            return found
        r, y = reference.astype(np.float64), result.astype(np.float64)
        if not found.passed:
            allowed = self._tolerance_of(reference).of(r)
        elif not self._own_error_counts:
            allowed = slice_tolerance(r, self._tolerance)
        elif _are_numbers([reference, original]):
            allowed = slice_tolerance(r, self._tolerance, np.abs(original.astype(np.float64) - r))
        else:
            return found
        if not (np.abs(y - r) > allowed).any():
            return found
        if self._jumps_alike(reference, result, [run[index] for run in runs()], allowed):
            return found if found.passed else replace(found, passed=True, note="differs only where the original is discontinuous")
        return replace(found, passed=False, note=_furthest(r, y, allowed)) if found.passed else found

    def _jumps_alike(self, reference: Any, result: Any, nudged: list, allowed: np.ndarray) -> bool:
        """Return True if the original, on nudged inputs, moves as many elements further than allowed, as far."""
        if not _are_numbers([reference, *nudged]):
            return False
        r, *others = (a.astype(np.float64) for a in (reference, result, *nudged))
        own, *changes = (np.abs(a - r) for a in others)
        beyond = max(int((change > allowed).sum()) for change in changes)
        far = max(float(change.max()) for change in changes)
        # Indices and classes have no distance.
        near = reference.dtype.kind in "iub" or bool(own.max() <= 2 * far)
        return near and int((own > allowed).sum()) <= 4 * beyond

    def verdict(self, reference: str, inputs: int, shapes: dict[str, list[int]], *, may_be_empty: bool = False) -> Verification:
        """The outcome over everything added.  may_be_empty: outputs without any value pass, as nothing else can be expected."""
        outputs = [self._with_share(output) for output in self._results.values()]
        passed = all(output.passed for output in outputs) and (self.compared or may_be_empty)
        return Verification(passed, reference, inputs, shapes, outputs, self._allowed)

    def _with_share(self, output: OutputErrors) -> OutputErrors:
        shares = self._not_finite[output.name]
        compared, constant = self._compared[output.name], output.name in self._constant
        output = replace(output, not_finite=sum(shares) / len(shares), compared=compared, constant=constant)
        if output.passed and min(shares) == 1:
            return replace(output, passed=False, note="every value is NaN or infinite in the original")
        return output if compared or output.note else replace(output, note=EMPTY)

    def _one(self, name: str, reference: Any, original: Any, result: Any) -> OutputErrors:
        if not all(isinstance(value, np.ndarray) for value in (reference, original, result)):
            return self._sequence(name, reference, original, result)
        if reference.dtype.kind not in "fiub" and reference.dtype.name != "bfloat16" and reference.shape == result.shape:
            return _exact(name, bool(np.array_equal(reference, result)), reference.size)
        return array_errors(name, reference, result, self._tolerance_of(reference), original if self._own_error_counts else None)

    def _tolerance_of(self, reference: np.ndarray) -> Tolerance:
        if not self._exact_integers or reference.dtype.kind not in "iu":
            return self._tolerance
        self._allowed = f"{self._tolerance}, whole numbers the same"
        return EXACT

    def _sequence(self, name: str, reference: Any, original: Any, result: Any) -> OutputErrors:
        """Sequences element by element; maps and missing optionals by equality."""
        if isinstance(reference, list) and isinstance(result, list) and len(reference) == len(result):
            parts = [self._one(name, *items) for items in zip(reference, original, result, strict=True)]
            worst = min(parts, key=lambda p: (p.passed, -p.max_abs_error), default=_exact(name, True, 0))
            return replace(worst, compared=sum(part.compared for part in parts))
        return _exact(name, _equal(reference, result), 0 if reference is None else 1)


def _are_numbers(arrays: Sequence[Any]) -> bool:
    """Return True if these are arrays of one shape, of finite numbers."""
    shapes = {a.shape if isinstance(a, np.ndarray) and a.dtype.kind in "fiub" else None for a in arrays}
    return len(shapes) == 1 and None not in shapes and all(a.size and np.isfinite(a).all() for a in arrays)


def _exact(name: str, same: bool, compared: int) -> OutputErrors:
    error = 0.0 if same else np.inf
    return OutputErrors(name, error, error, same, compared=compared)


def _equal(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f" and b.dtype.kind == "f"))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
