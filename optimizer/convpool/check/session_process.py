# SPDX-License-Identifier: Apache-2.0
"""The process in which onnxruntime runs models; `convpool.check.session` starts it."""

import sys
import time
from typing import Any

PAUSE_S = 0.06
"""Before each turn: onnxruntime's threads spin for 36 ms after a run, and would slow the next session down."""
TURN_S = 0.02
"""The timed runs of a turn last at least so long together."""


def open_session(content: bytes, folder: str | None, *, optimize: bool, threads: int = 0, spin: bool = False) -> Any:
    """An onnxruntime session of a serialised model on the CPU.  optimize: with onnxruntime's own passes.  threads: 0 for as many
    as there are cores.  spin: idle threads wait for work awake, as is onnxruntime's default: faster for a session by itself, and
    in the way of others."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spin)))
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def turn(session: Any, arrays: dict[str, Any]) -> float:
    """Microseconds per run: a pause, a run that is not timed, and runs for TURN_S."""
    time.sleep(PAUSE_S)
    session.run(None, arrays)
    begin, runs = time.perf_counter(), 0
    while runs == 0 or time.perf_counter() - begin < TURN_S:
        session.run(None, arrays)
        runs += 1
    return (time.perf_counter() - begin) / runs * 1e6


class Service:
    """onnxruntime sessions by number."""

    def __init__(self, *folders: str) -> None:
        """folders: of the packages that it needs, where this process has not the paths of the one that started it."""
        sys.path += folders
        import numpy  # noqa: F401
        import onnxruntime  # noqa: F401

        self._made: dict[int, Any] = {}
        self._count = 0

    def make(self, content: bytes, folder: str | None, options: dict[str, Any]) -> tuple[int, dict[str, str], list[str]]:
        """A session's number, the types of its inputs by name, and the names of its outputs."""
        session = open_session(content, folder, **options)
        self._count += 1
        self._made[self._count] = session
        return self._count, {item.name: item.type for item in session.get_inputs()}, [item.name for item in session.get_outputs()]

    def run(self, number: int, names: list[str] | None, arrays: dict[str, Any]) -> list[Any]:
        return self._made[number].run(names, arrays)

    def turn(self, number: int, arrays: dict[str, Any]) -> float:
        return turn(self._made[number], arrays)

    def drop(self, number: int) -> None:
        self._made.pop(number, None)
