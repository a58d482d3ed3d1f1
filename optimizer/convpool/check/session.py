# SPDX-License-Identifier: Apache-2.0
"""onnxruntime sessions on the CPU, in another process: onnxruntime ends the one it is in on some models.

One process serves all sessions.  Where a model ends it, the other sessions are made again in the next one when they are used.

`Runner` is all that a comparison needs to know of either.  A model runs in onnxruntime here; an engine runs in TensorRT, in
`convpool.tensorrt`.

Sessions are timed in turn: whatever is compared runs alternately, so that a drift of the machine's speed meets all alike.
"""

from __future__ import annotations

import statistics
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper

from convpool.check import session_process
from convpool.check.inputs import Arrays, Ranges
from convpool.check.judge import precision_of
from convpool.check.session_process import Service
from convpool.errors import ModelError, VerificationError, first_line
from convpool.ir.files import serialize
from convpool.ir.inference import mark_layers
from convpool.ir.model import LoadedModel
from convpool.ir.process import EndedError, OtherProcess, Shared


class Session:
    """An onnxruntime session on the CPU, in another process, for models that may end it: then it raises EndedError.  model: kept
    as it is; it may not change.  The other arguments are those of `session_process.open_session`."""

    def __init__(self, model: LoadedModel, *, optimize: bool, threads: int = 0, spin: bool = False) -> None:
        self._model, self._options = model, {"optimize": optimize, "threads": threads, "spin": spin}
        with _shared.lock:
            self._make(_current())

    def run(self, names: list[str] | None, arrays: Arrays) -> list[Any]:
        """Run the model as an onnxruntime session does."""
        return self._ask("run", names, arrays)

    def turn(self, arrays: Arrays) -> float:
        """Microseconds per run, the runs timed where they are done; see `session_process.turn`."""
        return self._ask("turn", arrays)

    def _ask(self, method: str, *arguments: Any) -> Any:
        with _shared.lock:
            place = _current()
            if self._place() is not place:
                self._make(place)
            return place.ask(method, self._number, *arguments)

    def _make(self, place: _Place) -> None:
        content, folder = serialize(self._model.proto), self._model.base_dir and str(self._model.base_dir)
        self._number, self.inputs, self.outputs = place.ask("make", folder, self._options, content=content)
        self._place = weakref.ref(place)
        drop = partial(place.ask_later, _shared.lock, "drop") if isinstance(place, OtherProcess) else place.drop
        weakref.finalize(self, drop, self._number).atexit = False


def _folders() -> list[str]:
    """The folders of the packages that the other process needs."""
    found = [find_spec(name) for name in ("numpy", "onnxruntime", "ml_dtypes")]
    return list(dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in found if spec is not None and spec.origin))


class _Here(Service):
    """Sessions in this process, where no other one can be started; an error is raised as it is."""

    def ask(self, method: str, *arguments: Any, content: bytes | None = None) -> Any:
        """Call a method as `OtherProcess.ask` does."""
        return getattr(self, method)(*([] if content is None else [content]), *arguments)


_Place = OtherProcess | _Here
_shared = Shared(session_process, _folders)
_here: _Here | None = None


def start_process() -> None:
    """Start the process, which takes as long as importing onnxruntime, if it does not run; do not wait for it."""
    with _shared.lock, suppress(EndedError):
        _shared.start()


def _current() -> _Place:
    """Where sessions are from now on.  Raises EndedError where another process was there, and no new one starts."""
    global _here
    if (process := _shared.current()) is not None:
        return process
    _here = _here or _Here()
    return _here


_FLOATS = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}


def fitted(inputs: Mapping[str, str], arrays: Arrays) -> Arrays:
    """The arrays as a session takes them: floats in its input's type.  inputs: their types in it, by name."""
    types = {name: _FLOATS[kind] for name, kind in inputs.items() if kind in _FLOATS}
    return {name: array.astype(types[name], copy=False) if name in types else array for name, array in arrays.items()}


def evaluate(model: ModelProto, name: str) -> np.ndarray:
    """The value of one tensor of a model without inputs, for `convpool.ir.index`.  Raises what `Session` does."""
    (result,) = Session(LoadedModel(model), optimize=False).run([name], {})
    return result


Outputs = dict[str, Any]
"""Results by output's name: arrays, and for a model also sequences, maps and missing optionals."""


class Runner(ABC):
    """Runs one thing on inputs by name.  runtime: its name.  precision: what it computes in, "fp32" where nothing says otherwise.
    model: the model, which says what its inputs may be; None for an engine.  input_types: by input's name, where there is no
    model."""

    runtime: str
    input_names: list[str]
    output_names: list[str]
    precision: str
    model: ModelProto | None = None
    input_types: Mapping[str, np.dtype] = MappingProxyType({})

    @abstractmethod
    def run(self, arrays: Arrays) -> Outputs:
        """All outputs by name.  Raises a ConvpoolError where it cannot run."""

    def ranges(self) -> Ranges:
        """The shapes of inputs that it is made for; none where any will do."""
        return {}


class OnnxruntimeRunner(Runner):
    """A model in onnxruntime on the CPU.  `error` says why it could not be loaded.  what: the model, in messages.  optimize: with
    onnxruntime's own passes.  lenient: with them too where onnxruntime ends its process without them, as on some optional outputs
    that a model leaves out; then `note` says so.  spin: as for `Session`."""

    runtime = "onnxruntime"

    def __init__(
        self,
        model: LoadedModel,
        what: str,
        *,
        optimize: bool = False,
        lenient: bool = True,
        spin: bool = False,
        precision: str = "fp32",
    ) -> None:
        self.what, self.error, self.note, self.precision = what, "", "", precision
        self.model, self.input_names, self.output_names = model.proto, [], []
        self.optimize, self._lenient = optimize, lenient and not optimize
        self.loaded, self._spin = model, spin
        try:
            try:
                self.session = Session(self.loaded, optimize=self.optimize, spin=self._spin)
            except EndedError as error:
                self._optimize(error)
            self.input_names, self.output_names = list(self.session.inputs), self.session.outputs
        except Exception as error:  # onnxruntime's exceptions share no base class
            self.error = _why(error)

    def _optimize(self, error: EndedError) -> None:
        """Load the model with onnxruntime's passes from now on.  error: what it does without, raised unless lenient."""
        if not self._lenient:
            raise error
        self._lenient, self.optimize = False, True
        self.session = Session(self.loaded, optimize=True, spin=self._spin)
        self.note = f"onnxruntime {error} on {self.what} unless its graph optimisations are on, as they are by default"

    def in_float32(self) -> OnnxruntimeRunner:
        """The same of the model in float32."""
        return OnnxruntimeRunner(self.loaded.in_float32(), f"{self.what} in float32", precision=self.precision)

    def check(self) -> None:
        """Raise ModelError if it could not be loaded."""
        if self.error:
            raise ModelError(f"onnxruntime cannot load {self.what}: {self.error}")

    def run(self, arrays: Arrays) -> Outputs:
        """All outputs by name.  Raises ModelError if onnxruntime fails."""
        return dict(zip(self.output_names, self.values(arrays), strict=True))

    def values(self, arrays: Arrays) -> list[Any]:
        """All outputs in order.  Raises ModelError if onnxruntime fails."""
        self.check()
        given = fitted(self.session.inputs, arrays)
        try:
            try:
                return self.session.run(None, given)
            except EndedError as error:
                self._optimize(error)
                return self.session.run(None, given)
        except Exception as error:
            raise ModelError(f"onnxruntime cannot run {self.what}: {_why(error)}") from error


def _why(error: Exception) -> str:
    return f"it {error}" if isinstance(error, EndedError) else first_line(error)


def with_layers(model: LoadedModel) -> LoadedModel:
    """A copy of a model whose intermediate tensors are outputs too."""
    given = LoadedModel(deepcopy(model.proto), model.base_dir, 0)
    mark_layers(given.proto, model.inferred)
    return given


def open_model(model: LoadedModel, what: str = "the model", *, layers: bool = False) -> OnnxruntimeRunner:
    """A runner of a model, in float32 where onnxruntime has no kernels for its types.  layers: with inner tensors as outputs."""
    types = model.float_types
    precision = precision_of(map(helper.tensor_dtype_to_np_dtype, types))
    given = with_layers(model) if layers else LoadedModel(model.proto, model.base_dir)
    runner = OnnxruntimeRunner(given, what, precision=precision)
    if runner.error and types - {TensorProto.FLOAT}:
        runner = runner.in_float32()
        runner.check()
        runner.what = what
    runner.check()
    runner.model = model.proto
    return runner


def with_optimisations(original: LoadedModel, optimized: LoadedModel, arrays: Arrays) -> tuple[list[object], list[object]] | None:
    """Run both with onnxruntime's optimisations; None where the original fails, VerificationError where only the result does."""
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


LEAST_ROUNDS = 3
"""Rounds that a budget does not cut."""


def in_turn(
    turns: Mapping[str, Callable[[], float]], rounds: int, *, warm_up: int = 0, budget_s: float | None = None
) -> dict[str, list[float]]:
    """Figures of all `turns` by round, `warm_up` rounds not counted.  budget_s: seconds that end them, after LEAST_ROUNDS."""
    for _ in range(warm_up):
        for turn in turns.values():
            turn()
    figures: dict[str, list[float]] = {name: [] for name in turns}
    deadline = None if budget_s is None else time.perf_counter() + budget_s
    for number in range(rounds):
        for name, turn in turns.items():
            figures[name].append(turn())
        if deadline is not None and number + 1 >= LEAST_ROUNDS and time.perf_counter() > deadline:
            break
    return figures


def time_sessions(sessions: Mapping[str, Session], arrays: Arrays, rounds: int, budget_s: float) -> dict[str, float]:
    """Median microseconds per run of `Session`s with the same inputs, each as fast as it is by itself."""
    turns = {name: partial(session.turn, arrays) for name, session in sessions.items()}
    return {name: statistics.median(values) for name, values in in_turn(turns, rounds, budget_s=budget_s).items()}
