# SPDX-License-Identifier: Apache-2.0
"""The bank on a GPU through pycuda: batches in page-locked memory, each on a stream of its own.

While one batch is copied in, another is computed and a third copied out.  What lies between filters and pooling stays on the
device: sums in registers, or filtered bytes where the pooling is `max`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from bank import COUNT, DIVISORS, FILTERS, SIDE, Images, Pooling

THREADS = (64, 4, 1)


class Slot:
    """Room for one batch on its way: x [batch, H, W] and y [batch, 9, P, Q], page-locked, and the same on the device."""

    def __init__(self, driver: Any, batch: int, size: tuple[int, int], pooling: Pooling) -> None:
        height, width = size
        rows, columns = pooling.out_size(height, width)
        self.x: Images = driver.pagelocked_empty((batch, height, width), np.uint8)
        self.y: Images = driver.pagelocked_empty((batch, COUNT, rows, columns), np.uint8)
        self.device_x, self.device_y = driver.mem_alloc(self.x.nbytes), driver.mem_alloc(self.y.nbytes)
        self.between = None
        if pooling.kind == "max":
            self.between = driver.mem_alloc(batch * COUNT * (height - SIDE + 1) * (width - SIDE + 1))
        self.stream, self.done = driver.Stream(), driver.Event()


class Gpu:
    """The bank for images of one size.  Raises ImportError without pycuda, pycuda's errors without a GPU.

    A context belongs to the thread that makes the object: submit and wait are called there.
    """

    def __init__(self, size: tuple[int, int], pooling: Pooling, batch: int = 16, slots: int = 4) -> None:
        import pycuda.autoinit  # noqa: F401 (makes the context)
        import pycuda.driver as driver
        from pycuda.compiler import SourceModule

        self.driver, self.size, self.pooling, self.batch = driver, size, pooling, batch
        source = Path(__file__).with_name("kernel.cu").read_text()
        module = SourceModule(source, options=["-std=c++17"], no_extern_c=True)
        for name, values in (("filters", FILTERS), ("divisors", DIVISORS)):
            driver.memcpy_htod(module.get_global(name)[0], values)
        self._bank, self._largest = (module.get_function(name) for name in ("bank", "largest"))
        self.slots = [Slot(driver, batch, size, pooling) for _ in range(slots)]

    def submit(self, slot: Slot, count: int, *, copies: bool = True, kernels: bool = True) -> None:
        """Enqueue the first `count` images of slot.x, and return.  copies, kernels: leave one out, to time the other."""
        if copies:
            self.driver.memcpy_htod_async(slot.device_x, slot.x[:count], slot.stream)
        if kernels:
            self._compute(slot, count)
        if copies:
            self.driver.memcpy_dtoh_async(slot.y[:count], slot.device_y, slot.stream)
        slot.done.record(slot.stream)

    def wait(self, slot: Slot) -> None:
        """Until what was submitted is in slot.y."""
        slot.done.synchronize()

    def _compute(self, slot: Slot, count: int) -> None:
        height, width = self.size
        rows, columns = self.pooling.out_size(height, width)
        if slot.between is None:
            self._run(
                self._bank,
                slot,
                count,
                (rows, columns),
                (slot.device_x, slot.device_y),
                (height, width, rows, columns),
                (self.pooling.window, self.pooling.stride),
            )
            return
        inner = height - SIDE + 1, width - SIDE + 1
        self._run(self._bank, slot, count, inner, (slot.device_x, slot.between), (height, width, *inner), (1, 1))
        self._run(
            self._largest,
            slot,
            count,
            (rows, columns),
            (slot.between, slot.device_y),
            (*inner, rows, columns),
            (self.pooling.window,),
        )

    def _run(self, kernel: Any, slot: Slot, count: int, out: tuple[int, int], arrays: tuple, sizes: tuple, last: tuple) -> None:
        grid = (-(-out[1] // THREADS[0]), -(-out[0] // THREADS[1]), count)
        kernel(*arrays, *(np.int32(value) for value in (*sizes, *last)), block=THREADS, grid=grid, stream=slot.stream)

    def run(self, images: Images) -> Images:
        """Do what `bank.run_numpy` does, batch by batch through all slots."""
        rows, columns = self.pooling.out_size(*self.size)
        y = np.empty((len(images), COUNT, rows, columns), np.uint8)
        flying: list[tuple[Slot, int, int]] = []

        def land() -> None:
            slot, first, count = flying.pop(0)
            self.wait(slot)
            y[first : first + count] = slot.y[:count]

        for number, first in enumerate(range(0, len(images), self.batch)):
            slot, part = self.slots[number % len(self.slots)], images[first : first + self.batch]
            if len(flying) == len(self.slots):
                land()
            slot.x[: len(part)] = part
            self.submit(slot, len(part))
            flying.append((slot, first, len(part)))
        while flying:
            land()
        return y
