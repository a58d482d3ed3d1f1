# SPDX-License-Identifier: Apache-2.0
"""Shape inference in another process, because it may end the process that does it.

onnx's shape inference is C++ that trusts the model: sizes that fit no operator end the process, by an assertion or a memory
fault, and sizes beyond memory make it run for hours.  One process serves all models, until one of them ends it.  Its results are
used, and not only its survival: what reads beside an array fails at one time and not at another.
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
from convpool.ir.inference_process import DONE, FAILED, GROWTH_BYTES, MEMORY, READY, SIZE_BYTES
from convpool.ir.protos import model_nodes
from convpool.ir.schema import DOMAIN

START_S = 20
ANSWER_S = 50
"""Limits on a loaded machine; processor time is limited by the other process itself."""


class EndedError(Exception):
    """What a model has done to the process, in words."""


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
            stderr=subprocess.DEVNULL,  # where C++ names the assertion that failed
            bufsize=0,
            start_new_session=True,  # Ctrl-C is not for it
        )
        try:
            ready = self._read(1, time.monotonic() + START_S)
        except TimeoutError:
            ready = b""
        if ready != READY:
            self.end()
            raise OSError("the process for shape inference does not start")

    def ask(self, model: bytes) -> bytes:
        """The model with shapes.  Raises onnx's InferenceError, and EndedError where it ends the process."""
        until = time.monotonic() + ANSWER_S
        pipe = self._process.stdin
        assert pipe is not None
        with suppress(BrokenPipeError):
            for part in (len(model).to_bytes(SIZE_BYTES, "little"), model):
                left = memoryview(part)
                while left:
                    left = left[pipe.write(left) :]
        try:
            kind = self._read(1, until)
            content = self._read(int.from_bytes(self._read(SIZE_BYTES, until), "little"), until)
        except TimeoutError:
            self.end()
            raise EndedError("does not end") from None
        if kind == DONE:
            return content
        if kind == FAILED:
            raise onnx.shape_inference.InferenceError(content.decode())
        code = self.end()
        if kind == MEMORY:
            raise EndedError(f"takes more than {GROWTH_BYTES // 2**30} GiB of memory")
        if code == -signal.SIGXCPU:
            raise EndedError("does not end")
        raise EndedError(f"ends the process with {signal.Signals(-code).name if code < 0 else f'status {code}'}")

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

    def _read(self, count: int, until: float) -> bytes:
        """So many bytes, fewer at the end of the pipe.  Raises TimeoutError."""
        pipe, parts = self._process.stdout, []
        assert pipe is not None
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while count:
            if not poll.poll(max(until - time.monotonic(), 0) * 1000):
                raise TimeoutError
            part = pipe.read(count)
            if not part:
                break
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


_lock = threading.Lock()
_running: InferenceProcess | None = None


def infer(model: bytes) -> bytes | None:
    """A serialised model with shapes; None where no other process can be started.  Raises as `InferenceProcess.ask`."""
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
        except onnx.shape_inference.InferenceError:
            _running = asked
            raise
        except BaseException:
            asked.end()
            raise
        _running = asked
        return found


def infer_elsewhere(model: ModelProto) -> ModelProto:
    """onnx's shape inference, with the values of small tensors, node for node.

    Raises onnx's InferenceError, EncodeError for a model beyond 2 GB, and ModelError where it would end the process.
    """
    try:
        found = infer(model.SerializeToString())
    except EndedError as error:
        raise ModelError(f"the model is not valid ONNX: shape inference of onnx {onnx.__version__} {error}") from None
    if found is None or any(node.domain == DOMAIN for node in model_nodes(model)):
        # The other process has not the schemas of these operators; it has shown that the rest is safe.
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    return ModelProto.FromString(found)


def _end() -> None:
    if _running is not None and _running.owner == os.getpid():
        _running.end()


atexit.register(_end)
