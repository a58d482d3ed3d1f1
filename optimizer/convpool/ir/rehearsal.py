# SPDX-License-Identifier: Apache-2.0
"""Shape inference of a model in another process first, because it may end the process that does it.

onnx's shape inference is C++ that trusts the model: sizes that fit no operator end the process, by an assertion or a memory
fault, and sizes beyond memory make it run for hours.  One process serves all models, until one of them ends it.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import onnx
from onnx import ModelProto, onnx_cpp2py_export

from convpool.errors import ModelError
from convpool.ir import inference_process
from convpool.ir.inference_process import DONE, GROWTH_BYTES, MEMORY, READY, SIZE_BYTES

START_S = 20
ANSWER_S = 50
"""Limits on a loaded machine; processor time is limited by the other process itself."""


class InferenceProcess:
    """The other process; it ends when this one does."""

    def __init__(self) -> None:
        """Start it.  Raises OSError."""
        self.owner = os.getpid()
        words = [sys.executable, "-I", "-S", inference_process.__file__, str(onnx_cpp2py_export.__file__)]
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is not for it
        )
        if self._answer(time.monotonic() + START_S) != READY:
            self.end()
            raise OSError("the process for shape inference does not start")

    def ask(self, model: bytes) -> str | None:
        """What shape inference of a model does to the process, in words; None for nothing.  With words, the process is gone."""
        until = time.monotonic() + ANSWER_S
        pipe = self._process.stdin
        assert pipe is not None
        with suppress(BrokenPipeError):
            for part in (len(model).to_bytes(SIZE_BYTES, "little"), model):
                left = memoryview(part)
                while left:
                    left = left[pipe.write(left) :]
        answer = self._answer(until)
        if answer == DONE:
            return None
        timed_out = answer is None
        code = self.end()
        if timed_out or code == -signal.SIGXCPU:
            return "does not end"
        if answer == MEMORY:
            return f"takes more than {GROWTH_BYTES // 2**30} GiB of memory"
        return f"ends the process with {signal.Signals(-code).name}" if code < 0 else f"ends the process with status {code}"

    def end(self) -> int:
        """End the process, unless it has ended by itself; its exit code."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(1)
        self._process.kill()
        return self._process.wait()

    def _answer(self, until: float) -> bytes | None:
        """One byte; none at the end of the pipe, None when the time is over."""
        pipe = self._process.stdout
        assert pipe is not None
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        return pipe.read(1) if poll.poll(max(until - time.monotonic(), 0) * 1000) else None


_lock = threading.Lock()
_running: InferenceProcess | None = None


def rehearse(model: bytes) -> str | None:
    """What shape inference of a serialised model does to the process that does it, in words; None for nothing: then do it here.

    Where no other process can be started, nothing is known, and None is returned.
    """
    global _running
    with _lock:
        if _running is not None and _running.owner != os.getpid():  # of the process that this one was forked from
            _running = None
        if _running is None:
            if getattr(sys, "frozen", False) or not sys.executable or not Path(inference_process.__file__).exists():
                return None
            try:
                _running = InferenceProcess()
            except OSError:
                return None
        asked, _running = _running, None
        try:
            found = asked.ask(model)
        except BaseException:
            asked.end()
            raise
        if found is None:
            _running = asked
        return found


def rehearsed_inference(model: ModelProto) -> ModelProto:
    """onnx's shape inference, with the values of small tensors; raises ModelError where it would end the process.

    Not only of models that are new here: a pass may make a value known from which onnx gets a size that fits no operator.
    """
    if (ending := rehearse(model.SerializeToString())) is not None:
        raise ModelError(f"the model is not valid ONNX: shape inference of onnx {onnx.__version__} {ending}")
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def _end() -> None:
    if _running is not None and _running.owner == os.getpid():
        _running.end()


atexit.register(_end)
