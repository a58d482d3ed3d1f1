"""Does the optimized model compute what the original does?  Both run in onnxruntime on the same inputs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from onnx import TensorProto

from convpool.errors import ModelError, OptionError, VerificationError, first_line
from convpool.float32 import HALF_TYPES, float_types, to_float32
from convpool.inputs import Arrays, InputMaker, load_arrays
from convpool.modelio import LoadedModel, load, passes_full_check, serialize

TOLERANCES: dict[int, tuple[float, float]] = {TensorProto.FLOAT16: (2e-2, 1e-2), TensorProto.BFLOAT16: (1e-1, 5e-2)}
FLOAT32_TOLERANCE = (1e-3, 1e-4)
NUDGE = 2.0**-18
"""Relative change of the inputs by which discontinuities are found."""
NUDGED_RUNS = 4


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


def allowed(rtol: float, relative_atol: float, atol: float | None) -> str:
    """Tolerances in words; relative_atol counts where there is no atol."""
    return f"{rtol:g} of each value + " + (f"{relative_atol:g} of the largest" if atol is None else f"{atol:g}")


def verify(
    original: object,
    optimized: object,
    *,
    check: int = 1,
    data: Mapping[str, np.ndarray] | str | os.PathLike[str] | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
) -> Verification:
    """Run both models on the same inputs and compare every output.

    original, optimized: paths, serialised bytes, ModelProtos or gs.Graphs.  check: number of random input sets.
    data: input arrays by name, or a .npz file with them, in place of random ones.  input_shapes: shapes for inputs
    whose dimensions the model leaves open.  rtol, atol (absolute, in output units): replace the default tolerances.
    Raises ModelError if the original cannot be run, VerificationError if only the optimized one cannot, OptionError for
    data or shapes that do not fit, or no check.

    onnxruntime's own graph optimisations are off on both sides, so that a difference is convpool's.  At the end the last inputs
    are run with them, as by default: some of them stumble over graphs that are valid.  Where the original then gives what it
    does without, the result has to as well.  A model with
    half-precision or double tensors is judged against the original in float32 (every such tensor, attribute and type made
    float32), since halves alone say little about who is right, and onnxruntime has no CPU kernels for some types.

    Default tolerances, |y - r| <= atol + rtol |r| per element, with atol in units of max |r|:

    | type | rtol | atol | why |
    |---|---|---|---|
    | float32, float64 | 1e-3 | 1e-4 | a rounding error of 6e-8 grows with depth; a wrong rewrite is off by 1e-1 |
    | float16 | 2e-2 | 1e-2 | 16 units in the last place |
    | bfloat16 | 1e-1 | 5e-2 | likewise |

    A half-precision output also passes when it is no further from float32 than twice the original's own is.

    Behind a QuantizeLinear, Round, ArgMax or comparison, the last bit of a sum decides now and then over a whole step.  An
    output beyond the default tolerance therefore passes when the original does the same to itself: when inputs changed
    by a part in 2^18, of the order of what summing in another order does, move at most four times fewer elements beyond the
    tolerance, and by at least half as much.
    """
    if check < 0 or check == 0 and data is None:
        raise OptionError(f"check: got {check}, expected 1 or more, or data")
    first, second = load(original), load(optimized)
    return compare(first, second, max(check, 1), load_arrays(data), dict(input_shapes or {}), rtol, atol, seed)


def compare(
    original: LoadedModel,
    optimized: LoadedModel,
    check: int,
    data: Arrays | None,
    input_shapes: dict[str, Sequence[int]],
    rtol: float | None,
    atol: float | None,
    seed: int,
) -> Verification:
    """`verify` on loaded models."""
    maker = InputMaker(original.proto, data, input_shapes, seed)
    types = float_types(original.proto)
    narrow = sorted(types & set(HALF_TYPES))
    native = _Runner(original, "the original")
    exact = None
    if types - {TensorProto.FLOAT}:
        wide = LoadedModel(to_float32(original), original.base_dir, 0)
        exact = _Runner(wide, "the original in float32")
        # Without kernels for a type, or a numpy type to feed it by, float32 has to speak for both.
        if native.error or TensorProto.BFLOAT16 in types:
            native, original = exact, wide
            optimized = LoadedModel(to_float32(optimized), optimized.base_dir, 0)
    candidate = _Runner(optimized, "the result")
    for runner in (native, exact):
        if runner is not None:
            runner.check()
    if candidate.error:
        raise VerificationError(f"verification: onnxruntime loads the original, but not the result: {candidate.error}")
    reference = exact or native
    tolerance = TOLERANCES[narrow[-1]] if narrow else FLOAT32_TOLERANCE
    judge, own_judge = (_Judge(reference.output_names, tolerance, rtol, atol, bool(narrow)) for _ in range(2))
    shapes: dict[str, list[int]] = {}
    count = 1 if data is not None else check
    for number in range(count):
        arrays, wanted = maker.runnable(number, reference.run)
        own = wanted if reference is native else native.run(arrays)
        again, nudge = partial(native.run, arrays), partial(_nudged_runs, reference, arrays, seed)
        try:
            result = candidate.run(arrays)
        except ModelError as error:
            raise VerificationError(f"verification: the original runs, but not the result: {error}") from error
        judge.add(wanted, own, result, again, nudge)
        shapes = {name: list(array.shape) for name, array in arrays.items()}
    usual = None
    with suppress(ModelError):
        usual = _Runner(original, "the original", optimize=True).run(arrays)
    if usual is not None:
        try:
            result = _Runner(optimized, "the result", optimize=True).run(arrays)
        except ModelError as error:
            raise VerificationError(
                f"verification: onnxruntime's graph optimisations, on by default, take the original, but not the result: {error}"
            ) from error
        own_judge.add(wanted, own, usual, again, nudge)
        if own_judge.verdict("", 1, {}).passed:
            judge.add(wanted, own, result, again, nudge, "with onnxruntime's graph optimisations")
    what = "the original in onnxruntime" + (", in float32" if exact else "")
    return judge.verdict(what, count, shapes)


def unchanged(model: LoadedModel, data: Arrays | None, input_shapes: dict[str, Sequence[int]], seed: int) -> Verification:
    """The outcome where the result is the original: nothing to compare, but unusable input is still refused."""
    InputMaker(model.proto, data, input_shapes, seed)
    if not passes_full_check(model):
        _Runner(model, "the original").check()
    return Verification(True, "the original, unchanged", 0, {})


class _Runner:
    """A model in onnxruntime on the CPU.  `error` says why it could not be loaded."""

    def __init__(self, model: LoadedModel, what: str, *, optimize: bool = False) -> None:
        self.what, self.error = what, ""
        try:
            self._session = make_session(model, optimize=optimize)
        except Exception as error:  # onnxruntime's exceptions share no base class
            self.error = first_line(error)
            return
        self.output_names = [output.name for output in self._session.get_outputs()]

    def check(self) -> None:
        """Raise ModelError if it could not be loaded."""
        if self.error:
            raise ModelError(f"onnxruntime cannot load {self.what}: {self.error}")

    def run(self, arrays: Arrays) -> list[object]:
        """All outputs.  Raises ModelError if onnxruntime fails."""
        self.check()
        try:
            return self._session.run(None, fitted(self._session, arrays))
        except Exception as error:
            raise ModelError(f"onnxruntime cannot run {self.what}: {first_line(error)}") from error


def fitted(session: Any, arrays: Arrays) -> Arrays:
    """The arrays as a session's inputs take them: in float32 where the model was made float32."""
    floats = {item.name for item in session.get_inputs() if item.type == "tensor(float)"}
    return {name: array.astype(np.float32, copy=False) if name in floats else array for name, array in arrays.items()}


def _nudged_runs(reference: _Runner, arrays: Arrays, seed: int) -> list[list[object]]:
    """The reference's outputs for inputs whose floats differ by a random share of NUDGE, NUDGED_RUNS times."""
    runs = []
    for number in range(NUDGED_RUNS):
        rng = np.random.default_rng([seed, number])
        changed = {}
        for name, array in arrays.items():
            if array.dtype.kind == "f" or array.dtype.name == "bfloat16":
                wide = array if array.dtype == np.float64 else array.astype(np.float32)
                array = wide * (1 + NUDGE * rng.uniform(-1, 1, array.shape)).astype(wide.dtype)
            changed[name] = array
        runs.append(reference.run(changed))
    return runs


def make_session(model: LoadedModel, *, optimize: bool, threads: int = 0, spin: bool = False):
    """An onnxruntime session on the CPU.

    optimize: with onnxruntime's own passes.  threads: 0 for as many as there are cores.  spin: idle threads wait for work
    awake, as is onnxruntime's default: faster for a session by itself, and in the way of others.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spin)))
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    if model.base_dir is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(model.base_dir))
    return onnxruntime.InferenceSession(serialize(model.proto), options, providers=["CPUExecutionProvider"])


class _Judge:
    """Collects the differences of every output."""

    def __init__(
        self, names: list[str], tolerance: tuple[float, float], rtol: float | None, atol: float | None, halves: bool
    ) -> None:
        self._names, self._tolerance, self._halves = names, tolerance, halves
        self._rtol, self._atol = rtol, atol
        self._results: dict[str, OutputErrors] = {}

    def add(self, reference: list, original: list, result: list, again, nudge, how: str = "") -> None:
        """Compare one run's outputs.  how: said of one that differs.

        again: runs the original once more, to see whether it is deterministic.  nudge: runs the reference on slightly
        changed inputs, to see whether it is continuous.
        """
        nudged: list[list] | None = None
        for index, name in enumerate(self._names):
            found = self._one(name, reference[index], original[index], result[index])
            if not found.passed and not _equal(again()[index], original[index]):
                found = OutputErrors(name, found.max_abs_error, found.max_rel_error, True, "random: not comparable")
            elif not found.passed and self._rtol is None and self._atol is None:
                nudged = nudge() if nudged is None else nudged
                if self._jumps_alike(reference[index], result[index], [run[index] for run in nudged]):
                    found = replace(found, passed=True, note="differs only where the original is discontinuous")
            if not found.passed and how:
                found = replace(found, note=f"{found.note or f'{found.max_abs_error:.3g} absolute'} {how}")
            before = self._results.get(name)
            if before is None or (found.passed, -found.max_abs_error) < (before.passed, -before.max_abs_error):
                self._results[name] = found

    def _jumps_alike(self, reference, result, nudged: list) -> bool:
        """Whether the original, on slightly changed inputs, moves as many elements beyond the tolerance, as far."""
        arrays = [reference, result, *nudged]
        if not all(isinstance(a, np.ndarray) and a.shape == reference.shape and a.dtype.kind in "fiub" for a in arrays):
            return False
        r, *others = (a.astype(np.float64) for a in arrays)
        if not all(np.isfinite(a).all() for a in (r, *others)) or r.size == 0:
            return False
        allowed = self._tolerance[1] * np.abs(r).max() + self._tolerance[0] * np.abs(r)
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
        rtol = self._tolerance[0] if self._rtol is None else self._rtol
        return Verification(passed, reference, inputs, shapes, outputs, allowed(rtol, self._tolerance[1], self._atol))

    def _one(self, name: str, reference, original, result) -> OutputErrors:
        if not all(isinstance(value, np.ndarray) for value in (reference, original, result)):
            return self._sequence(name, reference, original, result)
        if reference.shape != result.shape:
            return OutputErrors(name, np.inf, np.inf, False, f"shape {result.shape}, expected {reference.shape}")
        if reference.dtype.kind not in "fiub" and reference.dtype.name != "bfloat16":
            same = bool(np.array_equal(reference, result))
            return OutputErrors(name, 0.0 if same else np.inf, 0.0 if same else np.inf, same)
        r, y = reference.astype(np.float64), result.astype(np.float64)
        odd = ~np.isfinite(r)
        if not np.array_equal(r[odd], y[odd], equal_nan=True) or not np.isfinite(y[~odd]).all():
            return OutputErrors(name, np.inf, np.inf, False, "NaN or infinity in other places")
        r, y, own = r[~odd], y[~odd], original.astype(np.float64)[~odd]
        if r.size == 0:
            return OutputErrors(name, 0.0, 0.0, True)
        difference, largest = np.abs(y - r), float(np.abs(r).max())
        rtol = self._tolerance[0] if self._rtol is None else self._rtol
        atol = self._tolerance[1] * largest if self._atol is None else self._atol
        passed = bool((difference <= atol + rtol * np.abs(r)).all())
        if not passed and self._halves and self._rtol is None and self._atol is None:
            passed = bool(difference.max() <= 2 * np.abs(own - r).max())
        error = float(difference.max())
        return OutputErrors(name, error, error / largest if largest else float(error > 0), passed)

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
