# SPDX-License-Identifier: Apache-2.0
"""`build`: from an ONNX model to a TensorRT engine that was run and compared with the model.

1. The model is loaded once and optimized for the precision, TensorRT and GPU (`prepare`).
2. TensorRT builds an engine (`builder`); with `autotune` one for each lowering, which are timed.
3. The fastest engine runs on the inputs that onnxruntime gets for the model as it was given.  Where the outputs disagree, the
   next fastest takes its place.
4. A report says what was built, timed and compared.

Which lowering is fastest depends on what stands around a pair: TensorRT fuses convolutions with what follows them, and changes
formats where its layers meet the plugin's.  So whole engines are timed, the original model's among them.  Each engine's calls
form a CUDA graph, and the graphs take turns, so that clocks favour none.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from convpool.check.inputs import Arrays, load_arrays, random_array
from convpool.check.judge import Verification
from convpool.check.session import in_turn, open_model
from convpool.check.verify import compare_runners
from convpool.errors import ConvpoolError, OptionError, OutputError, TensorRTError, VerificationError, first_line
from convpool.ir import schema
from convpool.ir.files import serialize
from convpool.ir.model import LoadedModel, load
from convpool.tensorrt import prepare
from convpool.tensorrt.build_options import BuildOptions
from convpool.tensorrt.builder import build_prepared
from convpool.tensorrt.engine import Engine, EngineRunner
from convpool.tensorrt.package import tensorrt_module

TRIED = ("none", "convavgpool", "direct", "fused")
"""The lowerings tried; none: the model as it is."""


@dataclass(frozen=True)
class Tuning:
    """Times of the lowerings' engines.

    lowering: the one kept, None if no engine's outputs agree.  times_us: median microseconds a run.  left_out: why a lowering
    has no engine, or why its engine was not kept.
    """

    lowering: str | None
    times_us: dict[str, float]
    left_out: dict[str, str]


@dataclass(frozen=True)
class BuildReport:
    """The outcome of a build and its comparison.

    accumulation: of the options, None for that of the model's own nodes.  plugin_nodes, other_nodes: how many nodes of each
    operator the plugin and TensorRT run.
    """

    precision: str
    plugin: bool
    accumulation: str | None
    build_seconds: float
    engine_bytes: int
    plugin_nodes: dict[str, int]
    other_nodes: dict[str, int]
    verification: Verification | None
    autotune: Tuning | None

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dicts and lists, in the order of the JSON file."""
        return asdict(self)


@dataclass(frozen=True)
class Built:
    """An engine, and what is known of it.  lowering: the form of the model's pairs in it."""

    engine: Engine
    lowering: str
    report: BuildReport

    @property
    def verification(self) -> Verification | None:
        """The comparison with onnxruntime; None where there was no check."""
        return self.report.verification

    @property
    def plugin_nodes(self) -> dict[str, int]:
        """How many nodes of each operator the plugin runs."""
        return self.report.plugin_nodes

    @property
    def times_us(self) -> dict[str, float]:
        """Median microseconds a run of each lowering's engine, fastest first; empty without `autotune`."""
        return self.report.autotune.times_us if self.report.autotune else {}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the engine to a file, atomically.  Raises OutputError."""
        self.engine.save(path)


class EngineMismatchError(VerificationError):
    """The outputs of an engine disagree with onnxruntime's on the model.  `built` holds the engine and the comparison."""

    def __init__(self, message: str, built: Built) -> None:
        super().__init__(message)
        self.built = built


def build(model: object, options: BuildOptions | None = None, **keywords: Any) -> Built:
    """Build a TensorRT engine from a model, run it, and compare it with onnxruntime on the model.

    The comparison needs a GPU and pycuda; `check=0` leaves it out.

    Args:
        model: A path, serialised bytes, an onnx.ModelProto, a gs.Graph, or what
            `convpool.ir.model.load` gave.  It is not changed.
        options: The options.
        **keywords: Fields of `BuildOptions`, which replace those of `options`.

    Returns:
        The engine and its report.

    Raises:
        OptionError: An option is unusable.
        ModelError: The model is unusable.
        OutputError: The timing cache cannot be written.
        TensorRTError: TensorRT fails, with its own messages.
        EngineMismatchError: The outputs of the engine, or of all engines with `autotune`, disagree
            with onnxruntime's; a VerificationError.
    """
    options = replace(options or BuildOptions(), **keywords)
    arrays = load_arrays(options.data)  # before any work: a wrong file should fail at once
    loaded = load(model)
    if options.checked or options.autotune:
        check_can_run(options)
    started, timed = time.perf_counter(), None
    if options.autotune:
        timed = time_lowerings(loaded, options)
        engines = timed.engines
    else:
        engines = _build_one(loaded, options)
    seconds = time.perf_counter() - started
    lowering, verification = next(iter(engines)), None
    left_out = dict(timed.left_out) if timed else {}
    if options.checked:
        lowering, verification = _first_that_agrees(loaded, engines, options, arrays, left_out)
    agrees = verification is None or verification.passed
    tuning = Tuning(lowering if agrees else None, timed.times_us, left_out) if timed else None
    engine = engines[lowering]
    nodes = sorted(engine.built_from.items())
    ours = {name: count for name, count in nodes if options.plugin and name in schema.OP_TYPES}
    others = {name: count for name, count in nodes if name not in ours}
    asked = options.precision, options.plugin, options.accumulation
    built = Built(engine, lowering, BuildReport(*asked, seconds, len(engine.plan), ours, others, verification, tuning))
    if verification is not None and not agrees:
        raise EngineMismatchError(f"verification: {verification.difference}", built)
    return built


def build_engine(model: object, options: BuildOptions | None = None, **keywords: Any) -> Engine:
    """`build` without its check: the engine has not been run.  Arguments and errors are those of `build`."""
    return build(model, options, **{**keywords, "check": 0, "data": None}).engine


def build_fastest(model: object, options: BuildOptions | None = None, **keywords: Any) -> Timed:
    """The engines of all lowerings of the model's pairs, timed on this GPU, fastest first; their outputs are not compared.

    `build` with `autotune` also compares them, and keeps one.  Arguments are those of `build`, but `lowering` and `layers`.

    Raises what `build` raises, and TensorRTError where no lowering is left.
    """
    return time_lowerings(load(model), replace(options or BuildOptions(), **{**keywords, "autotune": True}))


def check_can_run(options: BuildOptions, no_check: str = "check=0", no_autotune: str = "autotune") -> None:
    """Raise TensorRTError, in the caller's words, where the engine could not be run: before the minutes of a build."""
    if options.trt is None:
        tensorrt_module()
    if importlib.util.find_spec("pycuda") is None:
        purpose, without = ("timed", f"leave out {no_autotune}") if options.autotune else ("checked", f"say {no_check}")
        raise TensorRTError(f"pycuda: not installed, but the engine is run to be {purpose}; pip install pycuda, or {without}")


def _build_one(model: LoadedModel, options: BuildOptions) -> dict[str, Engine]:
    """The engine of the lowering asked for, or of the default, by its name."""
    if options.lowering in ("direct", "fused") and prepare.has_plugin_nodes(model.proto):
        raise OptionError(
            f"lowering: got {options.lowering} for a model with the operator's nodes already; expected the original model"
        )
    if options.lowering is None:
        options = prepare.with_default_lowering(model, options)
    trt = options.trt or tensorrt_module()
    lowering, keywords = str(options.lowering), prepare.optimize_keywords(options, trt)
    return {lowering: build_prepared(trt, prepare.lowered(model, lowering, layers=options.layers, **keywords), options)}


def _first_that_agrees(
    model: LoadedModel, engines: dict[str, Engine], options: BuildOptions, data: Arrays | None, left_out: dict[str, str]
) -> tuple[str, Verification]:
    """The first engine that agrees with onnxruntime, else the last, with its comparison; left_out takes the others' reasons."""
    reference = open_model(model, layers=options.layers)
    for lowering, engine in engines.items():
        how: dict[str, Any] = {name: getattr(options, name) for name in ("precision", "rtol", "atol", "seed")}
        verification = compare_runners(reference, EngineRunner(engine), check=max(options.check, 1), data=data, **how)
        if verification.passed:
            break
        left_out[lowering] = verification.difference
    return lowering, verification


@dataclass(frozen=True)
class Timed:
    """Engines by lowering, fastest first, median microseconds a run, and why other lowerings have no engine."""

    engines: dict[str, Engine]
    times_us: dict[str, float]
    left_out: dict[str, str]


def time_lowerings(model: LoadedModel, options: BuildOptions) -> Timed:
    """Build an engine for every lowering of the model's pairs and time them, at the first profile's typical shapes.

    Without `options.plugin` only standard operators are tried.  Without `options.timing_cache` the builds share a cache that is
    thrown away.  A lowering is left out if it gives the same model as another one, or if its engine cannot be built, run, or
    captured into a CUDA graph.

    Raises OptionError for a model that has the operator's nodes already, OutputError for a cache that cannot be written, and
    TensorRTError, or what `builder.build_prepared` raises, where no lowering is left.
    """
    if prepare.has_plugin_nodes(model.proto):
        raise OptionError("autotune: the model has ConvAvgPool nodes already; expected the original model, whose forms are timed")
    left_out: dict[str, str] = {}
    engines = _build_all(model, options, left_out)
    times = time_in_turn(engines, [typical_inputs(engines)], left_out=left_out)
    if not times:
        reasons = "; ".join(f"{lowering}: {reason}" for lowering, reason in left_out.items())
        raise TensorRTError(f"autotune: no form's engine could be timed; got {reasons}; leave out autotune")
    medians = {lowering: statistics.median(values) for lowering, values in times.items()}
    order = sorted(medians, key=medians.__getitem__)
    return Timed({name: engines[name] for name in order}, {name: medians[name] for name in order}, left_out)


def _build_all(model: LoadedModel, options: BuildOptions, left_out: dict[str, str]) -> dict[str, Engine]:
    """An engine of every lowering that can be built; left_out takes the reasons of the others."""
    trt = options.trt or tensorrt_module()
    keywords = prepare.optimize_keywords(options, trt)
    engines: dict[str, Engine] = {}
    seen: dict[bytes, str] = {}
    failure: ConvpoolError | None = None
    with tempfile.TemporaryDirectory() as folder:
        cache = options.timing_cache or Path(folder, "timing.cache")

        def configure(config: Any, last: Callable[[Any], None] | None = options.configure) -> None:
            choose_patiently(config)
            if last is not None:
                last(config)

        options = replace(options, timing_cache=cache, configure=configure)
        for lowering in TRIED if options.plugin else [name for name in TRIED if name != "convavgpool"]:
            prepared = prepare.lowered(model, lowering, **keywords)
            same = seen.setdefault(hashlib.sha256(serialize(prepared)).digest(), lowering)
            if same != lowering:
                left_out[lowering] = f"the same as {same}"
                continue
            try:
                engines[lowering] = build_prepared(trt, prepared, options)
            except (OptionError, OutputError):  # as they would be for every lowering
                raise
            except ConvpoolError as error:
                left_out[lowering], failure = first_line(error), failure or error
    if failure and not engines:
        raise failure
    return engines


def typical_inputs(engines: Mapping[str, Engine]) -> dict[str, np.ndarray]:
    """Random inputs of the first profile's typical shapes, by the first of the engines that can be loaded."""
    rng = np.random.default_rng(0)
    for number, engine in enumerate(engines.values(), 1):
        try:
            inputs = engine.inputs
        except TensorRTError:
            if number == len(engines):
                raise
        else:
            return {name: random_array(rng, info.dtype, info.profiles[0][1]) for name, info in inputs.items()}
    return {}


ROUNDS = 30
WARM_UP_ROUNDS = 2
LEAST_CALLS = 16
"""Calls in a graph, so that its start weighs little."""
TIMING_ITERATIONS = 8
"""Runs that TensorRT averages over when it chooses a kernel.  With its default of one it sometimes chooses a slow kernel."""
_RELAXED_CAPTURE = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: TensorRT may call what a strict capture refuses


def choose_patiently(config: Any) -> None:
    """Have TensorRT time its kernels longer, so that two engines differ by their model and not by luck."""
    if hasattr(config, "avg_timing_iterations"):  # TensorRT-RTX chooses as an engine is first run
        config.avg_timing_iterations = TIMING_ITERATIONS


def time_in_turn(
    engines: Mapping[str, Engine],
    inputs: Sequence[Mapping[str, Any]],
    rounds: int = ROUNDS,
    left_out: dict[str, str] | None = None,
) -> dict[str, list[float]]:
    """Microseconds a call, one figure a round, for engines that take the same inputs.

    inputs: one set of arrays by name, or several sets of GPU arrays of the same shapes, through which the calls cycle.
    left_out: takes the reason, by name, for each engine that cannot be loaded, run, or captured into a CUDA graph.  Without it
    such an engine raises TensorRTError.
    """
    with ExitStack() as graphs:
        replays: dict[str, _Replay] = {}
        for name, engine in engines.items():
            try:
                replays[name] = _Replay(engine, inputs)
            except TensorRTError as error:
                if left_out is None:
                    raise
                left_out[name] = first_line(error)
            else:
                graphs.callback(replays[name].close)
        return in_turn({name: replay.microseconds for name, replay in replays.items()}, rounds, warm_up=WARM_UP_ROUNDS)


class _Replay:
    """An engine's calls on every input set in turn, as one CUDA graph."""

    def __init__(self, engine: Engine, inputs: Sequence[Mapping[str, Any]]) -> None:
        engine.bind(inputs[0])
        engine.execute()  # once outside: TensorRT and the plugin may allocate in the first run
        self._memory, self._cuda = engine.memory, ctypes.CDLL("libcuda.so.1")
        self._memory.synchronize(None)
        self.calls = max(LEAST_CALLS, len(inputs))
        self._handle, graph, self._graph = ctypes.c_void_p(self._memory.stream.handle), ctypes.c_void_p(), ctypes.c_void_p()
        _check(self._cuda.cuStreamBeginCapture_v2(self._handle, _RELAXED_CAPTURE))
        try:
            try:
                for call in range(self.calls):
                    if len(inputs) > 1:
                        engine.point(inputs[call % len(inputs)])
                    engine.execute()
            finally:
                ended = self._cuda.cuStreamEndCapture(self._handle, ctypes.byref(graph))
            _check(ended)
            _check(self._cuda.cuGraphInstantiateWithFlags(ctypes.byref(self._graph), graph, ctypes.c_ulonglong(0)))
        finally:
            if graph:
                self._cuda.cuGraphDestroy(graph)

    def microseconds(self) -> float:
        """Time of a call.  The timed replay follows another one, whose run hides the launch."""
        self._launch()
        return self._memory.elapsed_us(self._launch) / self.calls

    def close(self) -> None:
        self._cuda.cuGraphExecDestroy(self._graph)

    def _launch(self) -> None:
        _check(self._cuda.cuGraphLaunch(self._graph, self._handle))


def _check(code: int) -> None:
    if code:
        raise TensorRTError(f"engine: cannot be timed as a CUDA graph; got error {code} of the CUDA driver")
