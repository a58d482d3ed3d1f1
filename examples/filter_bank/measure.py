# SPDX-License-Identifier: Apache-2.0
"""Times over the number of images, of every backend, with and without transfers; and of files, end to end.  With pictures."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bank import Images, Pooling, run_numpy
from files import Run, read, run_folder, run_folder_on_gpu, write
from gpu import Gpu
from loop import run_loop
from PIL import Image
from runtime import run_onnxruntime

BACKENDS: dict[str, Run] = {"loop": run_loop, "numpy": run_numpy, "onnxruntime": run_onnxruntime}
RUNS = 3
AT_MOST_S = 4.0
"""A count whose images would take a backend longer is left out."""
AT_ONCE = 16


def images_of(count: int, size: int) -> Images:
    """Seeded images: noise, of which nothing can be left out."""
    return np.random.default_rng(0).integers(0, 256, (count, size, size), dtype=np.uint8)


def seconds(work: Callable[[], Any], runs: int = RUNS) -> float:
    """Median over some runs, after one that does not count."""
    work()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def machine(gpu: Gpu | None) -> dict[str, Any]:
    """Return the machine: the GPU's name and the number of cores."""
    return {"gpu": gpu.driver.Device(0).name() if gpu else None, "cores": os.cpu_count()}


def sweep(counts: list[int], size: int, pooling: Pooling, gpu: Gpu | None) -> dict[str, dict[str, float]]:
    """Seconds by backend and number of images, in memory; of the GPU with transfers, and of kernels and transfers alone."""
    images = images_of(min(max(counts), AT_ONCE), size)
    found: dict[str, dict[str, float]] = {}
    for name, run in BACKENDS.items():
        one = seconds(lambda run=run: run(images[:1], pooling), 1)
        for count in counts:
            if one * count <= AT_MOST_S:
                parts = [min(AT_ONCE, count - first) for first in range(0, count, AT_ONCE)]

                def work(run: Run = run, parts: list[int] = parts) -> None:
                    for part in parts:
                        run(images[:part], pooling)

                found.setdefault(name, {})[str(count)] = seconds(work, 1)
    if gpu is not None:
        for name, what in (("GPU", {}), ("GPU, kernels alone", {"copies": False}), ("GPU, transfers alone", {"kernels": False})):
            for count in counts:
                found.setdefault(name, {})[str(count)] = seconds(lambda count=count, what=what: stream(gpu, count, what))
    return found


def stream(gpu: Gpu, count: int, what: dict[str, bool]) -> None:
    """Run as many images as asked through all slots, from page-locked memory and back."""
    for number, first in enumerate(range(0, count, gpu.batch)):
        slot = gpu.slots[number % len(gpu.slots)]
        if number >= len(gpu.slots):
            gpu.wait(slot)
        gpu.submit(slot, min(gpu.batch, count - first), **what)
    for slot in gpu.slots:
        slot.stream.synchronize()


def end_to_end(count: int, size: int, pooling: Pooling, gpu: Gpu | None, folder: Path | None = None) -> dict[str, Any]:
    """Seconds from files to files (.pgm, which nothing compresses): of the GPU, of the files alone, and of the loop on a part."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        source, out = Path(name, "in"), Path(name, "out")
        source.mkdir()
        out.mkdir()
        paths = [source / f"{i:05}.pgm" for i in range(count)]
        images = images_of(min(count, 64), size)
        for i, path in enumerate(paths):
            Image.fromarray(images[i % len(images)]).save(path)
        part = paths[: max(1, min(count, 32))]
        found: dict[str, Any] = {"images": count, "size": size, "pooling": [pooling.kind, pooling.window]}
        found["loop_s"] = seconds(lambda: run_folder(part, out, pooling, run_loop, _nothing, ".pgm"), 1) / len(part) * count
        if gpu is None:
            return found
        found["files_s"] = seconds(lambda: run_folder_on_gpu(paths, out, gpu, _nothing, ".pgm", compute=False))
        found["end_to_end_s"] = seconds(lambda: run_folder_on_gpu(paths, out, gpu, _nothing, ".pgm"))
        found["equal"] = all(_equal(path, out / path.name, pooling) for path in paths[:: max(1, count // 16)])
    found["transfers_s"] = seconds(lambda: stream(gpu, count, {"kernels": False}))
    found["kernels_s"] = seconds(lambda: stream(gpu, count, {"copies": False}))
    found["over_slower"] = found["end_to_end_s"] / max(found["files_s"], found["transfers_s"])
    found["over_loop"] = found["loop_s"] / found["end_to_end_s"]
    return found


def _equal(source: Path, result: Path, pooling: Pooling) -> bool:
    """Return True if a written file is what numpy makes of its source, to the bit."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "wanted.pgm")
        write(wanted, run_numpy(read(source)[None], pooling)[0])
        return bool(np.array_equal(read(wanted), read(result)))


def _nothing(done: int) -> None:
    pass


def plot(found: dict[str, dict[str, float]], size: int, path: Path) -> None:
    """Seconds over the number of images, a line for each backend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for name, times in found.items():
        axes.plot([int(count) for count in times], list(times.values()), "o-", label=name)
    axes.set(xscale="log", yscale="log", xlabel=f"images of {size}x{size}", ylabel="seconds, in memory")
    axes.legend()
    figure.savefig(path, dpi=96)
