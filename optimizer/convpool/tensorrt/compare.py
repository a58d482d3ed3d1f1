"""Do two things that compute the same outputs agree?  Models run in onnxruntime, engines in TensorRT, on one input set.

Tolerances are those of `convpool.verify`, |y - r| <= atol + rtol |r| with atol in units of max |r|, by the precision that
the less exact side computes in; of a model it is that of its types, of an engine, which may compute in less than it takes and
gives, it can be told:

| precision | rtol | atol | why |
|---|---|---|---|
| fp32 | 1e-3 | 1e-4 | as in `convpool.verify` |
| tf32, fp16 | 2e-2 | 1e-2 | both keep 11 significant bits of what is multiplied |
| bf16 | 1e-1 | 5e-2 | 8 significant bits |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper

from convpool.errors import ModelError, OptionError
from convpool.float32 import float_types, to_float32
from convpool.inputs import Arrays, InputMaker, random_array
from convpool.modelio import LoadedModel, first_line, load
from convpool.tensorrt import prepare
from convpool.tensorrt.engine import Engine
from convpool.verify import FLOAT32_TOLERANCE, TOLERANCES, OutputErrors, Verification, allowed, fitted, make_session

PRECISION_TOLERANCES = {
    "fp32": FLOAT32_TOLERANCE,
    "tf32": TOLERANCES[TensorProto.FLOAT16],
    "fp16": TOLERANCES[TensorProto.FLOAT16],
    "bf16": TOLERANCES[TensorProto.BFLOAT16],
}
"""From the most exact to the least."""


def _least_exact(precisions: Iterable[str]) -> str:
    return max(precisions, key=list(PRECISION_TOLERANCES).index, default="fp32")


def _precision_of(types: Iterable[np.dtype]) -> str:
    return _least_exact({"float16": "fp16", "bfloat16": "bf16"}.get(dtype.name, "fp32") for dtype in types)


class ModelRunner:
    """A model in onnxruntime on the CPU, in float32 where onnxruntime has no kernels for its types.

    layers: intermediate tensors become outputs too.  what: the model in messages.
    """

    def __init__(self, model: LoadedModel, *, layers: bool = False, what: str = "the model") -> None:
        self.model, self._what = model, what
        types = float_types(model.proto)
        self.precision = _precision_of(map(helper.tensor_dtype_to_np_dtype, types))
        proto = model.proto
        if layers:
            proto = ModelProto()
            proto.CopyFrom(model.proto)
            prepare.mark_all(proto)
        given = LoadedModel(proto, model.base_dir, 0)
        try:
            self._session = make_session(given, optimize=False)
        except Exception as error:  # onnxruntime's exceptions share no base class
            if not types - {TensorProto.FLOAT}:
                raise ModelError(f"onnxruntime cannot load {what}: {first_line(error)}") from error
            wide = LoadedModel(to_float32(given), model.base_dir, 0)
            try:
                self._session = make_session(wide, optimize=False)
            except Exception as other:
                raise ModelError(f"onnxruntime cannot load {what} in float32: {first_line(other)}") from other
        self.input_names = [value.name for value in self._session.get_inputs()]
        self.output_names = [value.name for value in self._session.get_outputs()]

    def run(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """All outputs by name.  Raises ModelError if onnxruntime fails."""
        try:
            return dict(zip(self.output_names, self._session.run(None, fitted(self._session, arrays)), strict=True))
        except Exception as error:
            raise ModelError(f"onnxruntime cannot run {self._what}: {first_line(error)}") from error


class EngineRunner:
    """An engine in TensorRT."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.input_names, self.output_names = list(engine.inputs), list(engine.outputs)
        infos = (*engine.inputs.values(), *engine.outputs.values())
        self.precision = _precision_of(info.dtype for info in infos)
        for info in infos:
            if info.format != "LINEAR":
                raise OptionError(f"engine: tensor '{info.name}'; got format {info.format}, expected LINEAR to compare")

    def run(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """All outputs by name."""
        return self._engine.run(arrays)

    def typical_shapes(self) -> dict[str, list[int]]:
        """For every input the typical shape of the first profile."""
        return {name: list(info.profiles[0][1]) for name, info in self._engine.inputs.items()}


Runner = ModelRunner | EngineRunner


def open_runner(path: str, *, layers: bool = False) -> Runner:
    """A runner for a file: an engine by its suffix, else an ONNX model.  Raises ModelError, OptionError or TensorRTError."""
    if Path(path).suffix.lower() in (".engine", ".plan", ".trt"):
        return EngineRunner(Engine.load(path))
    return ModelRunner(load(path), layers=layers, what=path)


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

    check: number of random input sets; data: these inputs instead.  input_shapes: where the inputs are open; default an
    engine's typical ones.  precision: which tolerances apply; default that of the less exact side's types.  Raises
    OptionError if there is nothing to compare.
    """
    if set(first.input_names) != set(second.input_names):
        raise OptionError(f"inputs differ; got {', '.join(first.input_names)} and {', '.join(second.input_names)}")
    for name in input_shapes or {}:
        if name not in first.input_names:
            raise OptionError(f"input shape: no input '{name}'; expected one of {', '.join(first.input_names) or 'none'}")
    names = [name for name in first.output_names if name in second.output_names]
    if not names:
        raise OptionError(f"no output in common; got {', '.join(first.output_names)} and {', '.join(second.output_names)}")
    tolerance = PRECISION_TOLERANCES[precision or _least_exact((first.precision, second.precision))]
    limits = (tolerance[0] if rtol is None else rtol, tolerance[1], atol)
    worst: dict[str, OutputErrors] = {}
    shapes: dict[str, list[int]] = {}
    count = 1 if data is not None else check
    for arrays, wanted in _input_sets(first, second, count, data, dict(input_shapes or {}), seed):
        got = second.run(arrays)
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        for name in names:
            found = _judge(name, wanted[name], got[name], *limits)
            before = worst.get(name)
            if before is None or (found.passed, -found.max_abs_error) < (before.passed, -before.max_abs_error):
                worst[name] = found
    what = "the first in onnxruntime" if isinstance(first, ModelRunner) else "the first in TensorRT"
    passed = all(output.passed for output in worst.values())
    return Verification(passed, what, count, shapes, [worst[name] for name in names], allowed(*limits))


def _input_sets(first: Runner, second: Runner, count: int, data: Arrays | None, shapes: dict, seed: int):
    """(inputs, what `first` gives for them), one after the other."""
    for runner in (first, second):
        if isinstance(runner, EngineRunner) and data is None:
            shapes = {**runner.typical_shapes(), **shapes}
    models = [runner for runner in (first, second) if isinstance(runner, ModelRunner)]
    if models:
        proto = models[0].model.proto
        maker = InputMaker(proto, data, shapes, seed)
        for number in range(count):
            arrays, outputs = maker.runnable(number, lambda arrays: list(first.run(arrays).values()))
            yield arrays, dict(zip(first.output_names, outputs, strict=True))
        return
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        arrays = (
            data
            if data is not None
            else {name: random_array(rng, info.dtype, shapes[name]) for name, info in first._engine.inputs.items()}
        )
        yield arrays, first.run(arrays)


def _judge(name: str, reference, result, rtol: float, relative_atol: float, atol: float | None) -> OutputErrors:
    for value in (reference, result):
        if not isinstance(value, np.ndarray) or value.dtype.kind in "OSU":
            got = getattr(value, "dtype", type(value).__name__)
            raise OptionError(f"output '{name}': no tensor of numbers; got {got}, expected one; take it out of the model")
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
    allowed = (relative_atol * largest if atol is None else atol) + rtol * np.abs(r)
    error = float(difference.max())
    return OutputErrors(name, error, error / largest if largest else float(error > 0), bool((difference <= allowed).all()))


__all__ = ["EngineRunner", "ModelRunner", "compare", "open_runner"]
