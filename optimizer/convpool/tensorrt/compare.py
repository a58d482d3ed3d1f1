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

from convpool.check.inputs import Arrays, InputMaker, random_array
from convpool.check.judge import FLOAT32_TOLERANCE, TOLERANCES, Tolerance, array_errors, worst_of
from convpool.check.runners import OnnxruntimeRunner
from convpool.check.verdict import OutputErrors, Verification
from convpool.check.widen import float_types, to_float32
from convpool.errors import OptionError
from convpool.ir.model import LoadedModel, load
from convpool.tensorrt import prepare
from convpool.tensorrt.engine import Engine

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


class ModelRunner(OnnxruntimeRunner):
    """A model in onnxruntime on the CPU, in float32 where onnxruntime has no kernels for its types.

    layers: intermediate tensors become outputs too.  what: the model in messages.  Raises ModelError if it cannot be loaded.
    """

    def __init__(self, model: LoadedModel, *, layers: bool = False, what: str = "the model") -> None:
        self.model = model
        types = float_types(model.proto)
        precision = _precision_of(map(helper.tensor_dtype_to_np_dtype, types))
        proto = model.proto
        if layers:
            proto = ModelProto()
            proto.CopyFrom(model.proto)
            prepare.mark_all(proto)
        given = LoadedModel(proto, model.base_dir, 0)
        super().__init__(given, what, precision=precision)
        if self.error and types - {TensorProto.FLOAT}:
            super().__init__(LoadedModel(to_float32(given), model.base_dir, 0), f"{what} in float32", precision=precision)
            self.check()
            self.what = what
        self.check()


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


AnyRunner = ModelRunner | EngineRunner


def open_runner(path: str, *, layers: bool = False) -> AnyRunner:
    """A runner for a file: an engine by its suffix, else an ONNX model.  Raises ModelError, OptionError or TensorRTError."""
    if Path(path).suffix.lower() in (".engine", ".plan", ".trt"):
        return EngineRunner(Engine.load(path))
    return ModelRunner(load(path), layers=layers, what=path)


def compare(
    first: AnyRunner,
    second: AnyRunner,
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
    default_rtol, relative_atol = PRECISION_TOLERANCES[precision or _least_exact((first.precision, second.precision))]
    tolerance = Tolerance(default_rtol if rtol is None else rtol, relative_atol, atol)
    worst: dict[str, OutputErrors] = {}
    shapes: dict[str, list[int]] = {}
    count = 1 if data is not None else check
    for arrays, wanted in _input_sets(first, second, count, data, dict(input_shapes or {}), seed):
        got = second.run(arrays)
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        for name in names:
            worst[name] = worst_of(worst.get(name), _judge(name, wanted[name], got[name], tolerance))
    what = "the first in onnxruntime" if isinstance(first, ModelRunner) else "the first in TensorRT"
    passed = all(output.passed for output in worst.values())
    return Verification(passed, what, count, shapes, [worst[name] for name in names], str(tolerance))


def _input_sets(
    first: AnyRunner,
    second: AnyRunner,
    count: int,
    data: Arrays | None,
    shapes: dict,
    seed: int,
):
    """(inputs, what `first` gives for them), one after the other."""
    for runner in (first, second):
        if data is None:
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


def _judge(name: str, reference: object, result: object, tolerance: Tolerance) -> OutputErrors:
    for value in (reference, result):
        if not isinstance(value, np.ndarray) or value.dtype.kind in "OSU":
            got = getattr(value, "dtype", type(value).__name__)
            raise OptionError(f"output '{name}': no tensor of numbers; got {got}, expected one; take it out of the model")
    return array_errors(name, reference, result, tolerance)


__all__ = ["EngineRunner", "ModelRunner", "compare", "open_runner"]
