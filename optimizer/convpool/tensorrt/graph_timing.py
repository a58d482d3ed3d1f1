# SPDX-License-Identifier: Apache-2.0
"""Times of engines on the GPU: each engine's calls form a CUDA graph, and the graphs take turns, so that clocks favour none."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from convpool.check.session import in_turn
from convpool.errors import TensorRTError, first_line
from convpool.tensorrt.engine import Engine

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
