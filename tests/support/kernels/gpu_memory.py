# SPDX-License-Identifier: Apache-2.0
"""GPU memory for tests: arrays between guard zones; all around them, and an output before it is written, is NaN."""

from __future__ import annotations

import functools

import numpy as np

GUARD_BYTES = 4096
ALIGNMENT = 256
POISON = 0xFF  # 0xFFFF and 0xFFFFFFFF are NaN in float16, bfloat16 and float32


@functools.cache
def _pool():
    from pycuda.tools import DeviceMemoryPool

    return DeviceMemoryPool()


class Array:
    """An array of an Arena.  Shows itself by __cuda_array_interface__, as pycuda's arrays do."""

    def __init__(self, arena: Arena, offset: int, shape, dtype, written: bool) -> None:
        self.arena, self.offset, self.shape, self.dtype, self.written = arena, offset, tuple(shape), np.dtype(dtype), written
        self.end = offset + int(np.prod(self.shape)) * self.dtype.itemsize

    def of(self, raw: np.ndarray) -> np.ndarray:
        """The array in a copy of the arena's bytes."""
        return raw[self.offset : self.end].view(self.dtype).reshape(self.shape)

    @property
    def __cuda_array_interface__(self) -> dict:
        kind = {1: "|i1", 2: "<f2", 4: "<f4"}[self.dtype.itemsize]  # for ml_dtypes' types the attribute dtype tells
        pointer = self.arena.pointer + self.offset
        return {"shape": self.shape, "typestr": kind, "data": (pointer, False), "version": 3, "strides": None}


class Arena:
    """Arrays in one piece of GPU memory, aligned to 256 bytes, or one element further; few copies serve all of them."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self.size = GUARD_BYTES

    def input(self, data: np.ndarray, dtype, skewed: bool = False) -> Array:
        """An array that nobody may write."""
        array = self._add(data.shape, dtype, skewed, written=False)
        array.data = np.ascontiguousarray(data, dtype)
        return array

    def output(self, shape, dtype, skewed: bool = False) -> Array:
        """An array of NaNs."""
        return self._add(shape, dtype, skewed, written=True)

    def _add(self, shape, dtype, skewed: bool, written: bool) -> Array:
        array = Array(self, self.size + (np.dtype(dtype).itemsize if skewed else 0), shape, dtype, written)
        self.arrays.append(array)
        self.size = -(-array.end // ALIGNMENT) * ALIGNMENT + GUARD_BYTES
        return array

    def upload(self) -> None:
        """Places all arrays."""
        self.memory = _pool().allocate(self.size)
        self.pointer = int(self.memory)
        self.before = np.full(self.size, POISON, np.uint8)
        for array in self.arrays:
            if not array.written:
                array.of(self.before)[...] = array.data
        self.reset()

    def reset(self) -> None:
        """Everything as it was before the first launch."""
        import pycuda.driver as driver

        driver.memcpy_htod(self.pointer, self.before)

    def download(self) -> np.ndarray:
        """The bytes of all arrays; AssertionError if any outside the outputs is not what it was."""
        import pycuda.driver as driver

        raw = np.empty(self.size, np.uint8)
        driver.memcpy_dtoh(raw, self.pointer)
        changed = raw != self.before
        for array in self.arrays:
            if array.written:
                changed[array.offset : array.end] = False
        if changed.any():
            at = int(np.argmax(changed))
            near = min(self.arrays, key=lambda array: max(array.offset - at, at - array.end + 1, 0))
            raise AssertionError(f"byte {at - near.offset} of an array of {near.shape} was written, of {near.end - near.offset}")
        return raw
