# SPDX-License-Identifier: Apache-2.0
"""Does the optimized model compute what the original does?  Both run in onnxruntime on the same inputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from onnx import TensorProto

from convpool.arguments import check_arguments
from convpool.check.inputs import Arrays, InputMaker, input_sets, load_arrays, noisy, outputs_of_others, shapes_of
from convpool.check.judge import FLOAT32_TOLERANCE, TOLERANCES, Judge, Tolerance
from convpool.check.overhang import overhang
from convpool.check.runners import OnnxruntimeRunner
from convpool.check.session import prepare
from convpool.check.verdict import Verification, shapes_text
from convpool.check.widen import HALF_TYPES, float_types, to_float32
from convpool.errors import ModelError, OptionError, VerificationError
from convpool.ir.model import LoadedModel, load, passes_full_check
from convpool.types import Model

NO_MEMORY = "model: not enough memory to check it; give smaller input_shapes (--input-shape)"
NUDGE = 2.0**-18
"""Relative change of the inputs by which discontinuities are found."""
NUDGED_RUNS = 4


def verify(
    original: Model,
    optimized: Model,
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
    float32), since half precision does not show who is right, and onnxruntime has no CPU kernels for some types.

    Default tolerances, |y - r| <= atol + rtol |r| per element, with atol in units of max |r|:

    | type | rtol | atol | why |
    |---|---|---|---|
    | float32, float64 | 1e-3 | 1e-4 | a rounding error of 6e-8 grows with depth; a wrong rewrite is off by 1e-1 |
    | float16 | 2e-2 | 1e-2 | 16 units in the last place |
    | bfloat16 | 1e-1 | 5e-2 | likewise |

    A half-precision output also passes when it is no further from float32 than twice the original's own is.

    Values that are NaN or infinite in both prove nothing.  Random inputs are made smaller, down to 2^-12, where that leaves
    fewer of them; an output without any other value fails.

    Behind a QuantizeLinear, Round, ArgMax or comparison, the last bit of a sum decides now and then over a whole step.  An
    output beyond the default tolerance therefore passes when the original does the same to itself: when inputs changed
    by a part in 2^18, of the order of what summing in another order does, move at most four times fewer elements beyond the
    tolerance, and by at least half as much.
    """
    check_arguments(check=check, seed=seed, rtol=rtol, atol=atol, input_shapes=input_shapes)
    if check == 0 and data is None:
        raise OptionError(f"check: got {check}, expected 1 or more, or data")
    prepare()
    first, second = load(original), load(optimized)
    try:
        return compare(first, second, max(check, 1), load_arrays(data), dict(input_shapes or {}), rtol, atol, seed)
    except MemoryError as error:
        raise ModelError(NO_MEMORY) from error


def compare(
    original: LoadedModel,
    optimized: LoadedModel,
    check: int,
    data: Arrays | None,
    input_shapes: dict[str, Sequence[int]],
    rtol: float | None,
    atol: float | None,
    seed: int,
    progress: Callable[[int, int, str], None] | None = None,
) -> Verification:
    """`verify` on loaded models.  progress: called with (number, count, "checking") before each set of inputs."""
    maker = InputMaker(original.proto, data, input_shapes, seed)
    types = float_types(original.proto)
    narrow = sorted(types & set(HALF_TYPES))
    original, optimized, native, exact = _references(original, optimized, types)
    reference = exact or native
    default_rtol, relative_atol = TOLERANCES[narrow[-1]] if narrow else FLOAT32_TOLERANCE
    tolerance = Tolerance(default_rtol if rtol is None else rtol, relative_atol, atol)
    by_default = rtol is None and atol is None
    judge, own_judge = (Judge(reference.output_names, tolerance, own_error_counts=by_default and bool(narrow)) for _ in range(2))
    candidate: OnnxruntimeRunner | None = None
    done, notes, run = 0, [""], partial(_values, (reference, native))

    def add(arrays: Arrays, given: list, how: str = "") -> tuple:
        """Judge one set of inputs.  how: said of one that differs.  The originals' outputs, and what gives more of them."""
        nonlocal candidate
        candidate = candidate or _candidate(optimized, native.optimize)
        wanted, own = given[: len(reference.output_names)], given[-len(native.output_names) :]
        again = partial(native.values, arrays)
        nudge = partial(_nudged_runs, reference, arrays, seed) if by_default else None
        try:
            result = candidate.values(arrays)
        except ModelError as error:
            why = overhang(original.proto, shapes_of(arrays)) or error
            raise VerificationError(f"verification: the original runs{how}, but not the result: {why}") from error
        judge.add(wanted, result, own, again, nudge, how.strip())
        return wanted, own, again, nudge

    for arrays, given, note in input_sets(maker, 1 if data is not None else check, data, run, lambda: judge.compared, progress):
        done, notes = done + 1, [note]
        wanted, own, again, nudge = add(arrays, given)
    elsewhere = maker.elsewhere(arrays, optimized.proto, run) if arrays else None
    if elsewhere is not None:
        add(*elsewhere, f" at {shapes_text(shapes_of(elsewhere[0]))}")
    both = None if native.optimize else _with_optimisations(original, optimized, arrays)
    if both is not None:
        usual, result = both
        own_judge.add(wanted, usual, own, again, nudge)
        if own_judge.verdict("", 1, {}).passed:
            judge.add(wanted, result, own, again, nudge, "with onnxruntime's graph optimisations")
    others = outputs_of_others(maker, done, data, reference.values) if arrays else None
    if others is not None:
        judge.vary(wanted, others)
    what = "the original in onnxruntime" + (", in float32" if exact else "")
    notes += [runner.note for runner in dict.fromkeys((reference, native))] + ["" if arrays else "the model has no inputs"]
    verdict = judge.verdict(what, done, shapes_of(arrays), may_be_empty=not arrays)
    other_shapes = shapes_of(elsewhere[0]) if elsewhere is not None else {}
    return replace(verdict, input_scale=maker.scale, notes=list(filter(None, notes)), other_shapes=other_shapes)


def _references(
    original: LoadedModel, optimized: LoadedModel, types: set[int]
) -> tuple[LoadedModel, LoadedModel, OnnxruntimeRunner, OnnxruntimeRunner | None]:
    """Both models as they are run; the original as it is and, unless it is of float32 alone, in float32.  Raises ModelError."""
    native = OnnxruntimeRunner(original, "the original")
    exact = None
    if types - {TensorProto.FLOAT}:
        wide = LoadedModel(to_float32(original), original.base_dir, 0)
        exact = OnnxruntimeRunner(wide, "the original in float32")
        # Without kernels for a type, or a numpy type to feed it by, float32 has to speak for both.
        if native.error or TensorProto.BFLOAT16 in types:
            native, original = exact, wide
            optimized = LoadedModel(to_float32(optimized), optimized.base_dir, 0)
    for runner in (native, exact):
        if runner is not None:
            runner.check()
    return original, optimized, native, exact


def _candidate(optimized: LoadedModel, optimize: bool) -> OnnxruntimeRunner:
    """The result in onnxruntime.  optimize: with onnxruntime's own passes, as the original.  Raises VerificationError."""
    candidate = OnnxruntimeRunner(optimized, "the result", optimize=optimize, lenient=False)
    if candidate.error:
        raise VerificationError(f"verification: onnxruntime loads the original, but not the result: {candidate.error}")
    return candidate


def _values(runners: Sequence[OnnxruntimeRunner], arrays: Arrays) -> list[object]:
    """The outputs of each of these in order, of one that is there twice once."""
    return [value for runner in dict.fromkeys(runners) for value in runner.values(arrays)]


def _with_optimisations(
    original: LoadedModel, optimized: LoadedModel, arrays: Arrays
) -> tuple[list[object], list[object]] | None:
    """What both give with onnxruntime's graph optimisations; None where these do not take the original.

    Raises VerificationError where they do not take the result by itself.
    """
    try:
        usual = OnnxruntimeRunner(original, "the original", optimize=True).values(arrays)
    except ModelError:
        return None
    try:
        return usual, OnnxruntimeRunner(optimized, "the result", optimize=True).values(arrays)
    except ModelError as error:
        raise VerificationError(
            f"verification: onnxruntime's graph optimisations, on by default, take the original, but not the result: {error}"
        ) from error


def unchanged(model: LoadedModel, data: Arrays | None, input_shapes: dict[str, Sequence[int]], seed: int) -> Verification:
    """The outcome where the result is the original: nothing to compare, but unusable input is still refused."""
    InputMaker(model.proto, data, input_shapes, seed)
    if not passes_full_check(model):
        OnnxruntimeRunner(model, "the original").check()
    return Verification(True, "the original, unchanged", 0, {})


def _nudged_runs(reference: OnnxruntimeRunner, arrays: Arrays, seed: int) -> list[list[object]]:
    """The reference's outputs for inputs whose floats differ by a random share of NUDGE, NUDGED_RUNS times."""
    runs = []
    for number in range(NUDGED_RUNS):
        runs.append(reference.values(noisy(arrays, NUDGE, np.random.default_rng([seed, number]))))
    return runs
