# SPDX-License-Identifier: Apache-2.0
"""Comparing two models, or two runners that compute the same outputs: onnxruntime's and TensorRT's, on the same inputs.

`compare_runners`: |y - r| <= atol + rtol |r| per element, with atol in units of max |r|, as in `verify`.  The precision that the
less exact side computes in gives rtol and atol (`judge.PRECISION_TOLERANCES`).  A model's precision is that of its types.  An
engine may compute in less than it takes and gives, so a caller can say what it computes in.

In `compare_runners` numbers that are small beside others, and further off than slices allow in `verify`, are only noted: it
runs no nudged inputs, by which `verify` tells a discontinuity.  Nothing else is allowed: `verify` also lets an output pass that
is random, discontinuous, or no further off than the original's own half precision.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar

import numpy as np
from onnx import TensorProto, helper

from convpool.check import inputs, judge
from convpool.check.session import OnnxruntimeRunner, Outputs, Runner, start_process, with_optimisations
from convpool.errors import ConvpoolError, ModelError, OptionError, VerificationError
from convpool.ir.model import LoadedModel, load, passes_full_check
from convpool.ir.protos import HALF_TYPES, UNIT_ROUNDOFF, all_nodes, model_nodes, ops_of, subgraphs
from convpool.ir.schema import OP_TYPES
from convpool.options import check_arguments
from convpool.types import Model

BRANCHES = {"then_branch": "else_branch", "else_branch": "then_branch"}
WORK = ("Conv", "ConvTranspose", "Gemm", "MatMul", *OP_TYPES)
"""Operators of branches worth a run; others, by which exporters tell shapes apart, often cannot run."""
Compare = TypeVar("Compare", bound=Callable[..., judge.Verification])


def _in_all_branches(compare: Compare) -> Compare:
    """Make a comparison run once more with the branches exchanged of each If that does work: one run takes one of the two."""

    @wraps(compare)
    def both(first: Any, second: Any, *arguments: Any, **options: Any) -> judge.Verification:
        verdict = compare(first, second, *arguments, **options)
        models = [getattr(side, "loaded", side) for side in (first, second)]
        known = verdict.passed and all(isinstance(model, LoadedModel) for model in models)
        names = set.intersection(*map(_working_ifs, models)) if known else set()
        if not names:
            return verdict
        try:
            other = compare(*(_exchanged(side, names) for side in (first, second)), *arguments, **options)
        except ModelError as error:
            return replace(verdict, notes=[*verdict.notes, f"a branch of each If was not run: {error}"])
        how = "with the branches of each If exchanged"
        told = [o if o.passed else replace(o, note=f"{o.note or f'{o.max_abs_error:.3g} absolute'} {how}") for o in other.outputs]
        return replace(other, outputs=told) if other.differs else verdict

    return both  # type: ignore[return-value]


def _working_ifs(model: LoadedModel) -> set[tuple[str, ...]]:
    """The Ifs with WORK in a branch, by their outputs."""
    inner = {tuple(node.output): subgraphs(node) for node in ops_of(model_nodes(model.proto), "If")}
    return {name for name, graphs in inner.items() if any(n.op_type in WORK for _, _, graph in graphs for n in all_nodes(graph))}


def _exchanged(side: Any, names: set[tuple[str, ...]]) -> Any:
    """A model or onnxruntime's runner of it with the branches of these Ifs exchanged."""
    if isinstance(side, OnnxruntimeRunner):
        runner = OnnxruntimeRunner(_exchanged(side.loaded, names), side.what, precision=side.precision)
        runner.model = side.model  # whose types the inputs have
        return runner
    result = replace(side, proto=deepcopy(side.proto))
    for node in ops_of(model_nodes(result.proto), "If"):
        for attribute in node.attribute if tuple(node.output) in names else ():
            attribute.name = BRANCHES.get(attribute.name, attribute.name)
    return result


NO_MEMORY = "model: not enough memory to check it; give smaller input_shapes (--input-shape)"
NUDGE = 2.0**-18
"""Relative change of the inputs by which discontinuities are found; in half precision twice the unit roundoff."""
NUDGED_RUNS = 8


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
) -> judge.Verification:
    """Run both models on the same inputs and compare every output.

    onnxruntime's own graph optimisations are off on both sides, so that a difference is convpool's.
    At the end the last inputs are run with them, as by default: some of them stumble over graphs
    that are valid.  Where the original then gives what it does without, the result has to as well.
    A model with half-precision or double tensors is judged against the original in float32 (every
    such tensor, attribute and type made float32), since half precision does not show who is right,
    and onnxruntime has no CPU kernels for some types.

    Default tolerances, |y - r| <= atol + rtol |r| per element, with atol in units of max |r|:

    | type | rtol | atol | why |
    |---|---|---|---|
    | float32, float64 | 1e-3 | 1e-4 | errors of 6e-8 grow with depth; wrong rewrites give 1e-1 |
    | float16 | 2e-2 | 1e-2 | 16 units in the last place |
    | bfloat16 | 1e-1 | 5e-2 | likewise |
    | integers of models without half precision | 0 | 0 | classes and indices have no distance |

    A half-precision output also passes when it is no further from float32 than twice the original's
    own is, and beyond the tolerance in at most four times as many places.

    Numbers may be small beside others of an output, as scores beside boxes.  So each slice of an axis,
    of 16 elements or more, may by default be off by no more than ten rtol of its own largest number,
    or as far as half precision puts the original four times, and a 128th of float32's atol.

    Values that are NaN or infinite in both prove nothing.  Random inputs are made smaller, down to
    2^-12, where that leaves fewer of them; an output without any other value fails.

    One run takes one branch of an If.  Where branches have convolutions or matrix products, both models
    also run with them exchanged.

    Behind a QuantizeLinear, Round, ArgMax or comparison, the last bit of a sum decides now and then
    over a whole step.  An output beyond the default tolerances therefore passes when the original
    does the same to itself: when inputs changed by a part in 2^18, of the order of what summing in
    another order does, or in half precision by twice what rounding does, move at most four times
    fewer elements beyond the tolerance, and by at least half as much.

    onnxruntime gives a Sigmoid near 0 in steps of 3e-8.  An output of a Sigmoid beyond the tolerances passes where what
    the Sigmoid reads is within an atol of 1e-3 and an rtol of 1e-5.

    Args:
        original: A path, serialised bytes, a ModelProto or a gs.Graph.
        optimized: Likewise.
        check: Number of random input sets.
        data: Input arrays by name, or a .npz file with them, in place of random ones.
        input_shapes: Shapes for inputs whose dimensions the model leaves open.
        rtol: Relative tolerance in place of the default.
        atol: Absolute tolerance in place of the default, in output units.
        seed: Seed of the random inputs.

    Returns:
        The outcome for all outputs.

    Raises:
        ModelError: The original cannot be run.
        VerificationError: Only the optimized model cannot be run.
        OptionError: Data or shapes do not fit, or there is no check.
    """
    check_arguments(check=check, seed=seed, rtol=rtol, atol=atol, input_shapes=input_shapes)
    if check == 0 and data is None:
        raise OptionError(f"check: got {check}, expected 1 or more, or data")
    start_process()
    first, second = load(original), load(optimized)
    given = inputs.CheckInputs(max(check, 1), inputs.load_arrays(data), dict(input_shapes or {}), seed, rtol, atol)
    try:
        return compare_models(first, second, given)
    except MemoryError as error:
        raise ModelError(NO_MEMORY) from error


def verified(original: LoadedModel, result: LoadedModel | None, given: inputs.CheckInputs) -> judge.Verification:
    """`compare_models`; with no result, which is the original then, unusable input is still refused.  Errors say how to go on."""
    try:
        if result is not None:
            return compare_models(original, result, given)
        given.maker(original.proto)
        if not passes_full_check(original):
            OnnxruntimeRunner(original, "the original").check()
        return judge.Verification(True, "the original, unchanged", 0, {})
    except ModelError as error:
        if str(error).startswith(("onnxruntime cannot load the original", "onnxruntime cannot run the original")):
            raise ModelError(f"{error}; check=0 (--no-check) skips the check") from error
        raise
    except MemoryError as error:
        raise ModelError(f"{NO_MEMORY}, or check=0 (--no-check)") from error


@_in_all_branches
def compare_models(original: LoadedModel, optimized: LoadedModel, given: inputs.CheckInputs) -> judge.Verification:
    """`verify` on loaded models.  Outputs of Sigmoids that differ are judged by what these read: onnxruntime's Sigmoid has steps
    of 3e-8 near 0.

    Nothing is allowed by that but the steps: there log(Sigmoid(x)) has the derivative 1, so that rtol of y is as much absolute of
    x, and elsewhere a smaller one.  The last bits of a large x are allowed, too."""
    verdict = _compared(original, optimized, given)
    off = {output.name for output in verdict.outputs if not output.passed}
    first, second = (_without_sigmoids(model, off) if verdict.differs else None for model in (original, optimized))
    if first is None or second is None or (given.rtol, given.atol) != (None, None):
        return verdict
    again = _compared(first, second, replace(given, rtol=1e-5, atol=judge.FLOAT32_TOLERANCE[0]))
    read = {output.name: output for output in again.outputs if output.passed and output.name in off}
    if set(read) != off:
        return verdict
    outputs = [read.get(output.name, output) for output in verdict.outputs]
    notes = [*verdict.notes, f"{', '.join(read)}: judged by what the Sigmoid in front reads"]
    return replace(verdict, passed=True, outputs=outputs, notes=notes)


def _without_sigmoids(model: LoadedModel, names: set[str]) -> LoadedModel | None:
    """The model with an Identity for each Sigmoid that gives one of these outputs alone; None where another node gives one."""
    result = replace(model, proto=deepcopy(model.proto))
    found = [node for node in ops_of(result.proto.graph.node, "Sigmoid") if node.output[0] in names]
    if len(found) < len(names) or any(names & {*node.input} for node in all_nodes(result.proto.graph)):
        return None
    for node in found:
        node.op_type = "Identity"
    return result


def _compared(original: LoadedModel, optimized: LoadedModel, given: inputs.CheckInputs) -> judge.Verification:
    """Do what `compare_models` does, but for Sigmoids."""
    maker, types = given.maker(original.proto), original.float_types
    narrow = sorted(types & set(HALF_TYPES))
    original, optimized, native, exact = _references(original, optimized, types)
    reference = exact or native
    default_rtol, relative_atol = judge.PRECISION_TOLERANCES[judge.precision_of(map(helper.tensor_dtype_to_np_dtype, types))]
    tolerance = judge.Tolerance(default_rtol if given.rtol is None else given.rtol, relative_atol, given.atol)
    by_default = given.rtol is None and given.atol is None
    nudged = max([NUDGE, *(2 * UNIT_ROUNDOFF[kind] for kind in narrow)])
    lenience = {"own_error_counts": by_default and bool(narrow), "exact_integers": by_default and not narrow}
    judging, own_judge = (judge.Judge(reference.output_names, tolerance, **lenience) for _ in range(2))
    candidate: OnnxruntimeRunner | None = None
    done, notes, run = 0, [""], partial(_values, (reference, native))

    def add(arrays: inputs.Arrays, found: list, how: str = "") -> tuple:
        """Judge one set of inputs.  how: said of one that differs.  The originals' outputs, and what gives more of them."""
        nonlocal candidate
        candidate = candidate or _candidate(optimized, native)
        wanted, own = found[: len(reference.output_names)], found[-len(native.output_names) :]
        again = partial(native.values, arrays)
        nudge = partial(_nudged_runs, reference, arrays, given.seed, nudged) if by_default else None
        try:
            result = candidate.values(arrays)
        except ModelError as error:
            why = maker.overhang(inputs.shapes_of(arrays)) or error
            raise VerificationError(f"verification: the original runs{how}, but not the result: {why}") from error
        judging.add(wanted, result, own, again, nudge, how.strip())
        return wanted, own, again, nudge

    for arrays, found, note in maker.sets(given.check, run, lambda: judging.compared, given.progress):
        done, notes = done + 1, [note]
        wanted, own, again, nudge = add(arrays, found)
    elsewhere = maker.elsewhere(arrays, optimized.proto, run) if arrays else None
    if elsewhere is not None:
        add(*elsewhere, f" at {judge.shapes_text(inputs.shapes_of(elsewhere[0]))}")
    by_itself = not native.optimize  # other inputs may change that
    others = maker.outputs_of_others(done, reference.values) if arrays else None
    if others is not None:
        judging.vary(wanted, others)
    both = with_optimisations(original, optimized, arrays) if by_itself else None
    if both is not None:
        usual, result = both
        own_judge.add(wanted, usual, own, again, nudge)
        if own_judge.verdict("", 1, {}).passed:
            judging.add(wanted, result, own, again, nudge, "with onnxruntime's graph optimisations")
    what = "the original in onnxruntime" + (", in float32" if exact else "")
    notes += [runner.note for runner in dict.fromkeys((reference, native))] + ["" if arrays else "the model has no inputs"]
    verdict = judging.verdict(what, done, inputs.shapes_of(arrays), may_be_empty=not arrays)
    other_shapes = inputs.shapes_of(elsewhere[0]) if elsewhere is not None else {}
    return replace(verdict, input_scale=maker.scale, notes=list(filter(None, notes)), other_shapes=other_shapes)


def _references(
    original: LoadedModel, optimized: LoadedModel, types: set[int]
) -> tuple[LoadedModel, LoadedModel, OnnxruntimeRunner, OnnxruntimeRunner | None]:
    """Both models as they are run; the original as it is and, unless it is of float32 alone, in float32.  Raises ModelError."""
    native = OnnxruntimeRunner(original, "the original")
    exact = native.in_float32() if types - {TensorProto.FLOAT} else None
    # Without kernels for a type, or a numpy type to feed it by, float32 has to speak for both.
    if exact is not None and (native.error or TensorProto.BFLOAT16 in types):
        native, original, optimized = exact, exact.loaded, optimized.in_float32()
    for runner in (native, exact):
        if runner is not None:
            runner.check()
    return original, optimized, native, exact


def _candidate(optimized: LoadedModel, native: OnnxruntimeRunner) -> OnnxruntimeRunner:
    """The result in onnxruntime, run as `native`, the original, is.  Raises VerificationError."""
    candidate = OnnxruntimeRunner(optimized, "the result", optimize=native.optimize, lenient=False)
    if candidate.error:
        raise VerificationError(f"verification: onnxruntime loads the original, but not the result: {candidate.error}")
    if candidate.output_names != native.output_names:
        got, expected = map(", ".join, (candidate.output_names, native.output_names))
        raise VerificationError(f"verification: the result's outputs; got {got}, expected {expected}")
    return candidate


def _values(runners: Sequence[OnnxruntimeRunner], arrays: inputs.Arrays) -> list[object]:
    """The outputs of each of these in order, of one that is there twice once."""
    return [value for runner in dict.fromkeys(runners) for value in runner.values(arrays)]


def _nudged_runs(reference: OnnxruntimeRunner, arrays: inputs.Arrays, seed: int, share: float) -> list[list[object]]:
    """The reference's outputs for inputs whose floats differ by a random part of a share of theirs, NUDGED_RUNS times."""
    rngs = (np.random.default_rng([seed, number]) for number in range(NUDGED_RUNS))
    return [reference.values(inputs.noisy(arrays, share, rng)) for rng in rngs]


@_in_all_branches
def compare_runners(
    first: Runner,
    second: Runner,
    *,
    check: int = 1,
    data: inputs.Arrays | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    precision: str | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
) -> judge.Verification:
    """Run both on the same inputs and compare the outputs that both have; `first` is what the errors are against.

    Where the inputs of both leave sizes open, they run once more at other sizes.

    check: number of random input sets.  data: these inputs instead.  input_shapes: where the inputs are open; default an
    engine's typical ones.  precision: which tolerances apply; default that of the less exact side.  rtol, atol (absolute, in
    the outputs' units): in place of the precision's.  Raises OptionError if there is nothing to compare, and
    VerificationError if only the second cannot run at the other sizes.
    """
    if set(first.input_names) != set(second.input_names):
        raise OptionError(f"inputs differ; got {', '.join(first.input_names)} and {', '.join(second.input_names)}")
    names = [name for name in first.output_names if name in second.output_names]
    if not names:
        raise OptionError(f"no output in common; got {', '.join(first.output_names)} and {', '.join(second.output_names)}")
    precision = precision or judge.least_exact((first.precision, second.precision))
    default_rtol, relative_atol = judge.PRECISION_TOLERANCES[precision]
    exact = precision == "fp32" and rtol is None and atol is None
    tolerance = judge.Tolerance(default_rtol if rtol is None else rtol, relative_atol, atol)
    judging = judge.Judge(names, tolerance, exact_integers=exact)
    maker = _input_maker(first, second, data, dict(input_shapes or {}), seed)
    done, notes = 0, [""]
    small: dict[str, str] = {}

    def run(arrays: inputs.Arrays) -> list[object]:
        return list(_numbers(names, first.run(arrays)))

    for arrays, wanted, note in maker.sets(check, run, lambda: judging.compared):
        given = _numbers(names, second.run(arrays))
        judging.add(wanted, given)
        for name, r, y in zip(names, wanted, given, strict=True) if rtol is None and atol is None else ():
            small[name] = judge.small_numbers_off(name, r, y, tolerance) or small.get(name, "")
        done, notes = done + 1, [note]
    ranges = [runner.ranges() for runner in (first, second)]
    elsewhere = maker.elsewhere(arrays, second.model, run, ranges) if arrays else None
    if elsewhere is not None:
        where = f"at {judge.shapes_text(inputs.shapes_of(elsewhere[0]))}"
        try:
            result = second.run(elsewhere[0])
        except ConvpoolError as error:
            raise VerificationError(f"verification: the first runs {where}, but not the second: {error}") from error
        judging.add(elsewhere[1], _numbers(names, result), how=where)
    others = maker.outputs_of_others(done, run) if arrays else None
    if others is not None:
        judging.vary(wanted, others)
    notes += [*small.values(), *(getattr(runner, "note", "") for runner in (first, second))]
    notes += ["" if arrays else "the model has no inputs"]
    alone = [name for name in (*first.output_names, *second.output_names) if name not in names]
    notes += [f"not compared, in one of them alone: {', '.join(alone[:4])}{', ...' * (len(alone) > 4)}"] if alone else []
    verdict = judging.verdict(f"the first in {first.runtime}", done, inputs.shapes_of(arrays), may_be_empty=not arrays)
    other_shapes = inputs.shapes_of(elsewhere[0]) if elsewhere is not None else {}
    return replace(verdict, input_scale=maker.scale, notes=list(filter(None, notes)), other_shapes=other_shapes)


def _input_maker(
    first: Runner, second: Runner, data: inputs.Arrays | None, shapes: dict[str, Sequence[int]], seed: int
) -> inputs.InputMaker:
    """Inputs by the model among the two, which says what is open, else by the data, or the types of the first."""
    if data is None:
        ranges = {**second.ranges(), **first.ranges()}
        shapes = {**{name: shapes[1] for name, shapes in ranges.items()}, **shapes}
    model = first.model or second.model
    if model is None:
        types = first.input_types if data is None else {name: array.dtype for name, array in data.items()}
        model = inputs.typed_inputs(types, shapes if data is None else inputs.shapes_of(data))
    return inputs.InputMaker(model, data, shapes, seed)


def _numbers(names: Sequence[str], outputs: Outputs) -> list[np.ndarray]:
    """The outputs named.  Raises OptionError for one that is no array of numbers."""
    values = [outputs[name] for name in names]
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, np.ndarray) or value.dtype.kind in "OSU":
            got = getattr(value, "dtype", type(value).__name__)
            raise OptionError(f"output '{name}': no tensor of numbers; got {got}, expected one; take it out of the model")
    return values
