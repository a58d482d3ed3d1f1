# SPDX-License-Identifier: Apache-2.0
"""Do two runners that compute the same outputs agree?  Models run in onnxruntime, engines in TensorRT, on one input set.

|y - r| <= atol + rtol |r| per element, with atol in units of max |r|, as in `convpool.verify`.  The precision that the less exact
side computes in gives rtol and atol.  A model's precision is that of its types.  An engine may compute in less than it takes and
gives, so a caller can say what it computes in:

| precision | rtol | atol | why |
|---|---|---|---|
| fp32 | 1e-3 | 1e-4 | as in `convpool.verify` |
| tf32, fp16 | 2e-2 | 1e-2 | both keep 11 significant bits of what is multiplied |
| bf16 | 1e-1 | 5e-2 | 8 significant bits |

Nothing else is allowed: `convpool.verify` also lets an output pass that is random, discontinuous, or no further off than the
original's own half precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from convpool.check.inputs import Arrays, FixedInputMaker, InputMaker, input_sets, outputs_of_others, shapes_of
from convpool.check.judge import PRECISION_TOLERANCES, Judge, Tolerance, least_exact
from convpool.check.runners import Outputs, Runner
from convpool.check.verdict import Verification, shapes_text
from convpool.errors import ConvpoolError, OptionError, VerificationError


def compare(
    first: Runner,
    second: Runner,
    *,
    check: int = 1,
    data: Arrays | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    precision: str | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
) -> Verification:
    """Run both on the same inputs and compare the outputs that both have; `first` is what the errors are against.

    Where the inputs of both leave sizes open, they run once more at other sizes.

    check: number of random input sets.  data: these inputs instead.  input_shapes: where the inputs are open; default an
    engine's typical ones.  precision: which tolerances apply; default that of the less exact side.  rtol, atol (absolute, in
    the outputs' units): in place of the precision's.  Raises OptionError if there is nothing to compare, and
    VerificationError if only the second cannot run at the other sizes.
    """
    if set(first.input_names) != set(second.input_names):
        raise OptionError(f"inputs differ; got {', '.join(first.input_names)} and {', '.join(second.input_names)}")
    for name in input_shapes or {}:
        if name not in first.input_names:
            raise OptionError(f"input shape: no input '{name}'; expected one of {', '.join(first.input_names) or 'none'}")
    names = [name for name in first.output_names if name in second.output_names]
    if not names:
        raise OptionError(f"no output in common; got {', '.join(first.output_names)} and {', '.join(second.output_names)}")
    default_rtol, relative_atol = PRECISION_TOLERANCES[precision or least_exact((first.precision, second.precision))]
    judge = Judge(names, Tolerance(default_rtol if rtol is None else rtol, relative_atol, atol))
    maker = _input_maker(first, second, data, dict(input_shapes or {}), seed)
    done, notes = 0, [""]

    def run(arrays: Arrays) -> list[object]:
        return list(_numbers(names, first.run(arrays)))

    for arrays, wanted, note in input_sets(maker, 1 if data is not None else check, data, run, lambda: judge.compared):
        judge.add(wanted, _numbers(names, second.run(arrays)))
        done, notes = done + 1, [note]
    ranges = [runner.ranges() for runner in (first, second)]
    elsewhere = maker.elsewhere(arrays, second.model, run, ranges) if arrays else None
    if elsewhere is not None:
        where = f"at {shapes_text(shapes_of(elsewhere[0]))}"
        try:
            result = second.run(elsewhere[0])
        except ConvpoolError as error:
            raise VerificationError(f"verification: the first runs {where}, but not the second: {error}") from error
        judge.add(elsewhere[1], _numbers(names, result), how=where)
    others = outputs_of_others(maker, done, data, run) if arrays else None
    if others is not None:
        judge.vary(wanted, others)
    notes += [getattr(runner, "note", "") for runner in (first, second)] + ["" if arrays else "the model has no inputs"]
    verdict = judge.verdict(f"the first in {first.runtime}", done, shapes_of(arrays), may_be_empty=not arrays)
    other_shapes = shapes_of(elsewhere[0]) if elsewhere is not None else {}
    return replace(verdict, input_scale=maker.scale, notes=list(filter(None, notes)), other_shapes=other_shapes)


def _input_maker(
    first: Runner, second: Runner, data: Arrays | None, shapes: dict[str, Sequence[int]], seed: int
) -> InputMaker | FixedInputMaker:
    """Inputs by the model among the two, which says what is open, else by the types of the first."""
    if data is None:
        ranges = {**second.ranges(), **first.ranges()}
        shapes = {**{name: shapes[1] for name, shapes in ranges.items()}, **shapes}
    for runner in (first, second):
        if runner.model is not None:
            return InputMaker(runner.model, data, shapes, seed)
    return FixedInputMaker(first.input_types, data, shapes, seed)


def _numbers(names: Sequence[str], outputs: Outputs) -> list[np.ndarray]:
    """The outputs named.  Raises OptionError for one that is no array of numbers."""
    values = [outputs[name] for name in names]
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, np.ndarray) or value.dtype.kind in "OSU":
            got = getattr(value, "dtype", type(value).__name__)
            raise OptionError(f"output '{name}': no tensor of numbers; got {got}, expected one; take it out of the model")
    return values
