# SPDX-License-Identifier: Apache-2.0
"""GPU memory and streams by pycuda.  The only module that imports it, and only when an engine runs."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from convpool.errors import TensorRTError

_threads = threading.local()


class _Pushed:
    """A context that is current in this thread until the thread ends: pycuda ends the process if one is left behind.

    A thread's own data, where this is kept, goes in the thread itself; the main thread's goes too late.
    """

    def __init__(self, driver: Any, device: int) -> None:
        self._driver, self._context = driver, None
        context = driver.Device(device).retain_primary_context()
        context.push()
        self._context = context
        if threading.current_thread() is threading.main_thread():
            atexit.register(self.pop)

    def pop(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            with suppress(self._driver.Error):  # the caller has popped it
                context.pop()

    __del__ = pop


class PycudaMemory:
    """Buffers and a stream in the device's primary context, which TensorRT and other libraries share.

    device: number of the GPU; None: that of the context that the caller has made current, else 0.  Belongs to the thread
    that made it.  Raises TensorRTError, also if another device's context is current.
    """

    def __init__(self, device: int | None = None) -> None:
        try:
            import pycuda.driver as driver
        except ImportError as error:
            raise TensorRTError(f"pycuda: cannot be imported; got {error}; pip install pycuda") from error
        self._driver = driver
        with self._errors(f"CUDA device {device or 0}: cannot be used"):
            driver.init()
            if driver.Context.get_current() is None:
                _threads.__dict__.setdefault("pushed", []).append(_Pushed(driver, device or 0))
            elif device is not None and driver.Context.get_device() != driver.Device(device):
                raise TensorRTError(
                    f"CUDA device {device}: cannot be used; got a context of another device that is current "
                    "in this thread, expected none; use a thread for each device"
                )
            self.stream = driver.Stream()

    def allocate(self, size_bytes: int) -> Any:
        """A device buffer; `int(buffer)` is its address.  Raises TensorRTError."""
        with self._errors(f"GPU memory: {size_bytes} bytes cannot be had"):
            return self._driver.mem_alloc(max(size_bytes, 1))

    def upload(self, buffer: Any, array: np.ndarray, stream: Any) -> None:
        """Copy a C-ordered host array to a buffer, on the stream.  Raises TensorRTError."""
        if array.nbytes:
            with self._errors(f"GPU memory: {array.nbytes} bytes cannot be copied to the GPU"):
                self._driver.memcpy_htod_async(int(buffer), array.reshape(-1).view(np.uint8), self._owned(stream))

    def download(self, array: np.ndarray, buffer: Any, stream: Any) -> None:
        """Copy a buffer to a host array, on the stream.  Raises TensorRTError, also if what ran before it failed."""
        if array.nbytes:
            with self._errors(f"GPU memory: {array.nbytes} bytes cannot be copied from the GPU"):
                self._driver.memcpy_dtoh_async(array.reshape(-1).view(np.uint8), int(buffer), self._owned(stream))

    def synchronize(self, stream: Any) -> None:
        """Wait for the stream.  Raises TensorRTError if what ran on it failed."""
        with self._errors("GPU: the engine's work failed"):
            self._owned(stream).synchronize()

    def elapsed_us(self, work: Callable[[], None]) -> float:
        """Microseconds that what `work` puts on the stream takes on the GPU.  Raises TensorRTError if it failed."""
        with self._errors("GPU: the engine's work failed"):
            start, stop = self._driver.Event(), self._driver.Event()
            start.record(self.stream)
            work()
            stop.record(self.stream)
            stop.synchronize()
            return start.time_till(stop) * 1000

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._driver.Error as error:
            raise TensorRTError(f"{what}; got {error}") from error

    def _owned(self, stream: Any) -> Any:
        return self.stream if stream is None else stream
