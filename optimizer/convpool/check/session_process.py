# SPDX-License-Identifier: Apache-2.0
"""The process in which onnxruntime runs models; `convpool.check.session` starts it with the folders of the packages it needs.

A request is the name of a method of `Sessions` and its arguments, an answer is ("done", value) or what went wrong.  Both are
pickled, with the content of arrays and models behind: the number of parts, their sizes, then the parts.
"""

from __future__ import annotations

import os
import pickle
import select
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

READY = b"r"
SIZE_BYTES = 8
"""Bytes of the number of parts, and of the size of each."""
PAUSE_S = 0.06
"""Before each turn: onnxruntime's threads spin for 36 ms after a run, and would slow the next session down."""
TURN_S = 0.02
"""The timed runs of a turn last at least so long together."""


def open_session(content: bytes, folder: str | None, *, optimize: bool, threads: int = 0, spin: bool = False) -> Any:
    """An onnxruntime session of a serialised model on the CPU.

    optimize: with onnxruntime's own passes.  threads: 0 for as many as there are cores.  spin: idle threads wait for work
    awake, as is onnxruntime's default: faster for a session by itself, and in the way of others.
    """
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


class Sessions:
    """onnxruntime sessions by number."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._count = 0

    def make(self, content: Any, folder: str | None, options: dict[str, Any]) -> tuple[int, list[tuple[str, str]], list[str]]:
        """A session's number, the names and types of its inputs, and the names of its outputs."""
        session = open_session(bytes(content), folder, **options)  # no copy of bytes
        self._count += 1
        self._made[self._count] = session
        inputs = [(item.name, item.type) for item in session.get_inputs()]
        return self._count, inputs, [item.name for item in session.get_outputs()]

    def run(self, number: int, names: list[str] | None, arrays: dict[str, Any]) -> list[Any]:
        """Run a session."""
        return self._made[number].run(names, arrays)

    def turn(self, number: int, arrays: dict[str, Any]) -> float:
        """`turn` of a session."""
        return turn(self._made[number], arrays)

    def drop(self, number: int) -> None:
        """Forget a session."""
        self._made.pop(number, None)


def packed(message: object) -> list[Any]:
    """The parts of a message."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    contents = [head, *(buffer.raw() for buffer in buffers)]
    return [struct.pack(f"<{1 + len(contents)}Q", len(contents), *map(len, contents)), *contents]


def unpacked(read: Callable[[int], Any], ask: Callable[[], object] = tuple) -> Any:
    """The message of parts.  read: gives so many bytes, fewer at the end; ask: sends a request before.  Raises EOFError."""
    ask()
    found = read(SIZE_BYTES)
    count = int.from_bytes(found, "little") if len(found) == SIZE_BYTES else 0
    table = read(count * SIZE_BYTES)
    if count == 0 or len(table) < count * SIZE_BYTES:
        raise EOFError
    sizes = struct.unpack(f"<{count}Q", table)
    contents = list(map(read, sizes))
    if tuple(map(len, contents)) != sizes:
        raise EOFError
    return pickle.loads(contents[0], buffers=contents[1:])


def answer(sessions: Sessions, read: Callable[[int], Any]) -> Sequence[Any]:
    """The parts of the answer to a request; this may end the process."""
    try:
        method, *arguments = unpacked(read)
        return packed(("done", getattr(sessions, method)(*arguments)))
    except EOFError:
        raise
    except MemoryError:
        return packed(("memory", ""))
    except Exception as error:  # onnxruntime's exceptions share no base class
        return packed(("failed", str(error) or type(error).__name__))


def end_with_parent() -> None:
    """End this process, also in the middle of a run, once nobody can send it requests."""
    poll = select.poll()
    poll.register(0, 0)
    poll.poll()
    os._exit(0)


def main() -> None:
    """Answer requests until there are no more."""
    import resource

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    sys.path += sys.argv[1:]
    import numpy  # noqa: F401
    import onnxruntime  # noqa: F401

    threading.Thread(target=end_with_parent, daemon=True).start()
    answers.write(READY)
    answers.flush()
    sessions = Sessions()
    with suppress(EOFError, BrokenPipeError):
        while True:
            answers.writelines(answer(sessions, sys.stdin.buffer.read))
            answers.flush()
    os._exit(0)  # nobody waits for onnxruntime to clear up


if __name__ == "__main__":
    main()
