"""Times of engines on the GPU: CUDA graphs of calls, replayed in turn so that all engines see the same clocks."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from convpool.tensorrt.engine import Engine
from convpool.tensorrt.errors import TensorRTError

ROUNDS = 30
WARM_UP_ROUNDS = 2
LEAST_CALLS = 16
"""Calls in a graph, so that its start weighs little."""
_RELAXED_CAPTURE = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: TensorRT may call what a strict capture refuses


def time_in_turn(
    engines: Mapping[str, Engine], inputs: Sequence[Mapping[str, Any]], rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """Microseconds a call, one figure a round, for engines that take the same inputs.

    inputs: one set of arrays by name, or several sets of GPU arrays of the same shapes, which the calls take in turn.
    Raises TensorRTError for an engine whose run cannot be captured into a CUDA graph.
    """
    replays: dict[str, _Replay] = {}
    try:
        for name, engine in engines.items():
            replays[name] = _Replay(engine, inputs)
        for _ in range(WARM_UP_ROUNDS):
            for replay in replays.values():
                replay.microseconds()
        times: dict[str, list[float]] = {name: [] for name in replays}
        for _ in range(rounds):
            for name, replay in replays.items():
                times[name].append(replay.microseconds())
        return times
    finally:
        for replay in replays.values():
            replay.close()


class _Replay:
    """An engine's calls on every input set in turn, as one CUDA graph."""

    def __init__(self, engine: Engine, inputs: Sequence[Mapping[str, Any]]) -> None:
        self._cuda, self._stream = ctypes.CDLL("libcuda.so.1"), engine.memory.stream
        self.calls = max(LEAST_CALLS, len(inputs))
        engine.bind(inputs[0])
        engine.execute()  # once outside: TensorRT and the plugin may allocate in the first run
        engine.memory.synchronize(None)
        handle, graph, self._graph = ctypes.c_void_p(self._stream.handle), ctypes.c_void_p(), ctypes.c_void_p()
        _check(self._cuda.cuStreamBeginCapture_v2(handle, _RELAXED_CAPTURE))
        try:
            for call in range(self.calls):
                if len(inputs) > 1:
                    engine.point(inputs[call % len(inputs)])
                engine.execute()
        finally:
            ended = self._cuda.cuStreamEndCapture(handle, ctypes.byref(graph))
        _check(ended)
        _check(self._cuda.cuGraphInstantiateWithFlags(ctypes.byref(self._graph), graph, ctypes.c_ulonglong(0)))
        _check(self._cuda.cuGraphDestroy(graph))

    def microseconds(self) -> float:
        """Time of a call.  The timed replay follows another one, which hides its launch."""
        import pycuda.driver as driver

        start, stop = driver.Event(), driver.Event()
        self._launch()
        start.record(self._stream)
        self._launch()
        stop.record(self._stream)
        stop.synchronize()
        return start.time_till(stop) * 1000 / self.calls

    def close(self) -> None:
        """Free the graph."""
        _check(self._cuda.cuGraphExecDestroy(self._graph))

    def _launch(self) -> None:
        _check(self._cuda.cuGraphLaunch(self._graph, ctypes.c_void_p(self._stream.handle)))


def _check(code: int) -> None:
    if code:
        raise TensorRTError(f"engine: cannot be timed as a CUDA graph; got error {code} of the CUDA driver")
