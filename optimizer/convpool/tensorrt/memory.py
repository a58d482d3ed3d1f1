"""GPU memory and streams by pycuda.  The only module that imports it, and only when an engine runs."""

from __future__ import annotations

import atexit
from typing import Any

import numpy as np

from convpool.tensorrt.errors import TensorRTError


class PycudaMemory:
    """Buffers and a stream in the device's primary context, which TensorRT and other libraries share.

    A context that the caller has made current is used as it is.
    """

    def __init__(self, device: int = 0) -> None:
        try:
            import pycuda.driver as driver
        except ImportError as error:
            raise TensorRTError(f"pycuda: cannot be imported; got {error}; pip install pycuda") from error
        self._driver = driver
        try:
            driver.init()
            if driver.Context.get_current() is None:
                context = driver.Device(device).retain_primary_context()
                context.push()
                atexit.register(context.pop)  # pycuda ends the process at its exit if a context is still current
        except driver.Error as error:
            raise TensorRTError(f"CUDA device {device}: cannot be used; got {error}") from error
        self.stream = driver.Stream()

    def allocate(self, size_bytes: int) -> Any:
        """A device buffer; `int(buffer)` is its address.  Raises TensorRTError."""
        try:
            return self._driver.mem_alloc(max(size_bytes, 1))
        except self._driver.Error as error:
            raise TensorRTError(f"GPU memory: {size_bytes} bytes cannot be had; got {error}") from error

    def upload(self, buffer: Any, array: np.ndarray, stream: Any) -> None:
        """Copy a C-ordered host array to a buffer, on the stream."""
        if array.nbytes:
            self._driver.memcpy_htod_async(int(buffer), array.reshape(-1).view(np.uint8), self._owned(stream))

    def download(self, array: np.ndarray, buffer: Any, stream: Any) -> None:
        """Copy a buffer to a host array, on the stream."""
        if array.nbytes:
            self._driver.memcpy_dtoh_async(array.reshape(-1).view(np.uint8), int(buffer), self._owned(stream))

    def synchronize(self, stream: Any) -> None:
        """Wait for the stream.  Raises TensorRTError if what ran on it failed."""
        try:
            self._owned(stream).synchronize()
        except self._driver.Error as error:
            raise TensorRTError(f"GPU: the engine's work failed; got {error}") from error

    def _owned(self, stream: Any) -> Any:
        return self.stream if stream is None else stream
