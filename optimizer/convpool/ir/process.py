# SPDX-License-Identifier: Apache-2.0
"""Another process, for C++ that a model may end: onnx's shape inference and onnxruntime.

It imports as little as it can.  It ends when this process does, and Ctrl-C is not for it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


class EndedError(Exception):
    """The way in which a model ended the process, in words."""


class OtherProcess:
    """A script of this package in a process of its own, by pipes."""

    def __init__(self, script: str, *words: str) -> None:
        """Start it.  Raises OSError, also where there is no Python to start it with, as in a program that has Python inside."""
        if getattr(sys, "frozen", False) or not sys.executable or not Path(script).exists():
            raise OSError("no Python to start another process with")
        self.owner = os.getpid()
        """The process that started it: not this one, where this one was forked from that."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", script, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # where C++ names the assertion that failed
            bufsize=0,
            start_new_session=True,  # Ctrl-C is not for it
        )

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write all of them; nothing where the process has ended, which a read then tells."""
        pipe = self._process.stdin
        assert pipe is not None
        with suppress(BrokenPipeError):
            for part in parts:
                left = memoryview(part).cast("B")
                while left:
                    left = left[pipe.write(left) :]

    def read(self, count: int, until: float | None = None) -> bytearray:
        """So many bytes, fewer where the process has ended.  until: by the monotonic clock.  Raises TimeoutError."""
        pipe, content, done = self._process.stdout, bytearray(count), 0
        assert pipe is not None
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while done < count:
            if until is not None and not poll.poll(max(until - time.monotonic(), 0) * 1000):
                raise TimeoutError
            part = pipe.readinto(memoryview(content)[done:])  # type: ignore[attr-defined]
            if not part:
                break
            done += part
        return content if done == count else content[:done]

    def end(self, patience_s: float = 1) -> int:
        """End the process, which may take so long to do it by itself; its exit code."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(patience_s)
        self._process.kill()
        return self._process.wait()


def ended(code: int) -> EndedError:
    """How a process has ended, by its exit code."""
    return EndedError(f"ends the process with {signal.Signals(-code).name if code < 0 else f'status {code}'}")
