# SPDX-License-Identifier: Apache-2.0
"""The lowerings of a model's pairs as engines, timed on the GPU at hand.

Which lowering is fastest depends on what stands around a pair: TensorRT fuses convolutions with what follows them, and changes
formats where its layers meet the plugin's.  So whole engines are timed, the original model's among them.  Each engine's calls
form a CUDA graph, and the graphs take turns, so that clocks favour none.
"""

from __future__ import annotations

import ctypes
import hashlib
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from convpool.check.inputs import random_array
from convpool.check.session import in_turn
from convpool.errors import ConvpoolError, OptionError, OutputError, TensorRTError, first_line
from convpool.ir.model import LoadedModel
from convpool.tensorrt import prepare
from convpool.tensorrt.build_options import BuildOptions
from convpool.tensorrt.builder import build_plan
from convpool.tensorrt.engine import Engine
from convpool.tensorrt.package import tensorrt_module
from convpool.tensorrt.policy import optimize_keywords

TRIED = ("none", "convavgpool", "direct", "fused")
"""The lowerings tried; none: the model as it is."""


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
    TensorRTError, or what `builder.build_plan` raises, where no lowering is left.
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
    keywords = optimize_keywords(options, trt)
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
            same = seen.setdefault(hashlib.sha256(prepare.serialized(prepared)).digest(), lowering)
            if same != lowering:
                left_out[lowering] = f"the same as {same}"
                continue
            try:
                engines[lowering] = build_plan(trt, prepared, options)
            except (OptionError, OutputError):  # as they would be for every lowering
                raise
            except ConvpoolError as error:
                left_out[lowering], failure = first_line(error), failure or error
    if failure and not engines:
        raise failure
    return engines


def typical_inputs(engines: Mapping[str, Engine], seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs of the first profile's typical shapes, by the first of the engines that can be loaded."""
    rng = np.random.default_rng(seed)
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
