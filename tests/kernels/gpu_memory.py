"""GPU buffers with guard zones, for tests: everything around an array, and an output before it is written, is NaN."""

from __future__ import annotations

import functools

import numpy as np

GUARD_BYTES = 4096
POISON = 0xFF  # 0xFFFF and 0xFFFFFFFF are NaN in float16, bfloat16 and float32


@functools.cache
def _pool():
    from pycuda.tools import DeviceMemoryPool

    return DeviceMemoryPool()


class Guarded:
    """An array in GPU memory between two guard zones; `data` is copied in, or everything is left poisoned.

    Shows itself by __cuda_array_interface__, as pycuda's arrays do, at an address aligned to 256 bytes, or one element
    further if it is `skewed`.  Memory comes from a pool, which is quicker, unless `pooled` is False: a sanitizer sees
    where allocations end.
    """

    pooled = True

    def __init__(self, shape, dtype, data: np.ndarray | None = None, skewed: bool = False) -> None:
        import pycuda.driver as driver

        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.bytes = int(np.prod(self.shape)) * self.dtype.itemsize
        self.start = GUARD_BYTES + (self.dtype.itemsize if skewed else 0)
        self.total = 2 * GUARD_BYTES + (self.bytes + 511) // 256 * 256
        self.memory = _pool().allocate(self.total) if self.pooled else driver.mem_alloc(self.total)
        driver.memset_d8(int(self.memory), POISON, self.total)
        self.pointer = int(self.memory) + self.start
        if data is not None:
            driver.memcpy_htod(self.pointer, np.ascontiguousarray(data, self.dtype))

    @property
    def __cuda_array_interface__(self) -> dict:
        kind = "<f4" if self.dtype.itemsize == 4 else "<f2"  # for bfloat16 the attribute dtype tells
        return {"shape": self.shape, "typestr": kind, "data": (self.pointer, False), "version": 3, "strides": None}

    def poison(self) -> None:
        import pycuda.driver as driver

        driver.memset_d8(int(self.memory), POISON, self.total)

    def read(self) -> np.ndarray:
        """The array; AssertionError if a guard zone was written."""
        import pycuda.driver as driver

        raw = np.empty(self.total, np.uint8)
        driver.memcpy_dtoh(raw, int(self.memory))
        end = self.start + self.bytes
        assert (raw[: self.start] == POISON).all(), "written before the array"
        assert (raw[end:] == POISON).all(), "written past the array"
        return raw[self.start : end].view(self.dtype).reshape(self.shape)
