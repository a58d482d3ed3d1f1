# SPDX-License-Identifier: Apache-2.0
"""Other processes, for C++ that a model may end: onnx's shape inference and onnxruntime.

One process of a kind serves all requests, until one of them ends it; the next request starts another.  It imports as little as it
can.  It ends when this process does, and Ctrl-C is not for it.
"""

import atexit
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe
from pathlib import Path
from types import ModuleType
from typing import Any

from convpool.ir import serving

START_S = 120
"""Limit on a loaded machine, for importing onnxruntime too."""


class EndedError(Exception):
    """The way in which a model ended the process, in words."""


class OtherProcess:
    """The class `Service` of a script, in a process of its own."""

    def __init__(self, script: str, *words: str) -> None:
        """Start it, with words for the class, and do not wait.  Raises OSError, also where no Python can be started."""
        if getattr(sys, "frozen", False) or not sys.executable or not Path(script).exists():
            raise OSError("no Python to start another process with")
        self.owner = os.getpid()
        """The process that started it: not this one, where this one was forked from that."""
        self.gone = self._ready = False
        self._later: list[tuple[Any, ...]] = []
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", serving.__file__, str(theirs.fileno()), script, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # where C++ names the assertion that failed
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is not for it
            )

    def is_ready(self) -> bool:
        """Wait until it is; False where it does not start."""
        with suppress(EOFError, OSError):
            self._ready = self._ready or self._pipe.poll(START_S) and self._pipe.recv() == serving.READY
        if not self._ready:
            self.end(0)
        return self._ready

    def ask(self, method: str, *arguments: Any, content: bytes | None = None, patience_s: float | None = None) -> Any:
        """Call a method.  content: the first argument, as it is.  Raises RuntimeError for the method's error, MemoryError,
        EndedError, and TimeoutError where no answer comes in time."""
        while self._later:
            self._exchange(self._later.pop())
        kind, value = self._exchange((method, *arguments), content, patience_s)
        if kind != serving.DONE:
            raise MemoryError if kind == serving.MEMORY else RuntimeError(value)
        return value

    def ask_later(self, lock: threading.Lock, *request: Any) -> None:
        """Call a method whose answer is of no use: now, or before the next one where a thread, perhaps this, holds the lock."""
        if self.owner != os.getpid() or self.gone:
            return
        self._later.append(request)
        if lock.acquire(blocking=False):
            try:
                while self._later:
                    self._exchange(self._later.pop())
            except EndedError:
                pass
            finally:
                lock.release()

    def _exchange(
        self, request: tuple[Any, ...], content: bytes | None = None, patience_s: float | None = None
    ) -> tuple[str, Any]:
        """An answer: what became of a request, and a value (`serving`)."""
        try:
            self._pipe.send((*request[:1], content is not None, *request[1:]))
            if content is not None:
                self._pipe.send_bytes(content)
            if not self._pipe.poll(patience_s):
                raise TimeoutError
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            raise _ended(self.end()) from None
        except BaseException:
            self.end(0)
            raise

    def end(self, patience_s: float = 1) -> int:
        """End the process, which may take so long to do it by itself; its exit code."""
        self.gone = True
        self._pipe.close()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(patience_s)
        self._process.kill()
        return self._process.wait()


def _ended(code: int) -> EndedError:
    """How a process has ended, by its exit code."""
    if code == -signal.SIGXCPU:
        return EndedError("does not end")
    return EndedError(f"ends the process with {signal.Signals(-code).name if code < 0 else f'status {code}'}")


class Shared:
    """The one process of a kind.  lock: to be held by whoever asks for it, and asks it."""

    def __init__(self, script: ModuleType, words: Callable[[], Sequence[str]]) -> None:
        """script: has the class `Service`; words: gives its arguments."""
        self._script, self._words = script, words
        self.lock = threading.Lock()
        self.process: OtherProcess | None = None
        self._served = self._hopeless = False
        atexit.register(self.end)

    def start(self) -> OtherProcess | None:
        """The process, started if there is none; None where none can be started.  Raises EndedError where one was there and no
        other can be: what ended that one is not to end this process."""
        if not self._hopeless and (self.process is None or self.process.gone or self.process.owner != os.getpid()):
            try:
                self.process = OtherProcess(str(self._script.__file__), *self._words())
            except OSError as error:
                self._give_up(error)
        return self.process

    def current(self) -> OtherProcess | None:
        """The process once it is ready, otherwise as `start`."""
        process = self.start()
        if process is not None and not process.is_ready():
            self._give_up("it does not start")
        self._served = self._served or self.process is not None
        return self.process

    def end(self) -> None:
        """End the process, if it is this one's."""
        if self.process is not None and self.process.owner == os.getpid():
            self.process.end()

    def _give_up(self, why: object) -> None:
        self.process = None
        if self._served:
            raise EndedError(f"has no process: {why}")
        self._hopeless = True
