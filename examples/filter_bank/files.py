# SPDX-License-Identifier: Apache-2.0
"""Images from and to files, by Pillow, and a whole folder through the bank: reading, computing and writing at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from bank import COUNT, NAMES, Images, Pooling
from PIL import Image, ImageDraw

if TYPE_CHECKING:
    from gpu import Gpu

SUFFIXES = (".pgm", ".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
ACROSS = 3
"""Results side by side in a file: three rows of three."""
WORKERS = 8

Run = Callable[[Images, Pooling], Images]
Tell = Callable[[int], None]
"""Called with the number of images that are done."""


def find(folder: Path) -> list[Path]:
    """The images of a folder.  Raises ValueError where there is none."""
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise ValueError(f"{folder}: no image; expected files that end in {', '.join(SUFFIXES)}")
    return paths


def read(path: Path) -> Images:
    """The image in grey, [H, W]."""
    with Image.open(path) as image:
        return np.asarray(image.convert("L"))


def read_into(path: Path, target: Images) -> None:
    """Read one image to memory of its size.  Raises ValueError for another size."""
    image = read(path)
    if image.shape != target.shape:
        expected = f"{target.shape[1]}x{target.shape[0]} as the first image"
        raise ValueError(f"{path}: size; got {image.shape[1]}x{image.shape[0]}, expected {expected}")
    target[...] = image


def write(path: Path, maps: Images) -> None:
    """The nine results [9, P, Q] of an image as one picture, three rows of three."""
    rows, columns = maps.shape[1:]
    tiles = maps.reshape(ACROSS, COUNT // ACROSS, rows, columns).transpose(0, 2, 1, 3)
    Image.fromarray(tiles.reshape(ACROSS * rows, -1)).save(path)


def contact_sheet(path: Path, image: Images, pooled: dict[str, Images]) -> None:
    """An image and, by name of the pooling, its nine results [9, P, Q], named, in one picture."""
    side = max(image.shape)
    scale, cell = 128 / side, 128
    sheet = Image.new("L", ((COUNT + 1) * (cell + 8), len(pooled) * (cell + 24)), 255)
    draw = ImageDraw.Draw(sheet)
    for line, (name, maps) in enumerate(pooled.items()):
        for place, (label, values) in enumerate([(name, image), *zip(NAMES, maps, strict=True)]):
            x, y = place * (cell + 8), line * (cell + 24)
            draw.text((x, y + 4), label, fill=0)
            size = (max(1, round(image.shape[1] * scale)), max(1, round(image.shape[0] * scale)))
            sheet.paste(Image.fromarray(values).resize(size), (x, y + 20))
    sheet.save(path)


def run_folder(paths: list[Path], out: Path, pooling: Pooling, run: Run, tell: Tell, suffix: str = ".png") -> None:
    """Every image through `run` on the CPU, one after the other; files are read and written beside it."""
    with ThreadPoolExecutor(WORKERS) as pool:
        written = []
        for done, (path, image) in enumerate(zip(paths, pool.map(read, paths), strict=True), 1):
            written.append(pool.submit(write, out / f"{path.stem}{suffix}", run(image[None], pooling)[0]))
            tell(done)
        _results(written)


def run_folder_on_gpu(paths: list[Path], out: Path, gpu: Gpu, tell: Tell, suffix: str = ".png", *, compute: bool = True) -> None:
    """Every image through the GPU: while a batch is read into one slot, others are computed and written.

    compute: False leaves the GPU out and writes what lies in the slots, which times the files alone.
    """
    batches = [paths[i : i + gpu.batch] for i in range(0, len(paths), gpu.batch)]
    slots, done = gpu.slots, 0
    reads: dict[int, list[Future[None]]] = {}
    writes: dict[int, list[Future[None]]] = {}
    with ThreadPoolExecutor(WORKERS) as readers, ThreadPoolExecutor(WORKERS) as writers:

        def fill(number: int) -> None:
            """Have a batch read into its slot, as soon as the slot's last batch is written."""
            _results(writes.pop(number - len(slots), []))
            slot = slots[number % len(slots)]
            reads[number] = [readers.submit(read_into, path, slot.x[i]) for i, path in enumerate(batches[number])]

        def land(number: int) -> None:
            """Have a batch written that the GPU has finished."""
            slot = slots[number % len(slots)]
            if compute:
                gpu.wait(slot)
            names = [out / f"{path.stem}{suffix}" for path in batches[number]]
            writes[number] = [writers.submit(write, name, slot.y[i]) for i, name in enumerate(names)]

        ahead = max(1, len(slots) - 2)
        for number in range(min(ahead, len(batches))):
            fill(number)
        for number in range(len(batches)):
            _results(reads.pop(number))
            if compute:
                gpu.submit(slots[number % len(slots)], len(batches[number]))
            if number:
                land(number - 1)
            if number + ahead < len(batches):
                fill(number + ahead)
            done += len(batches[number])
            tell(done)
        land(len(batches) - 1)
        for left in writes.values():
            _results(left)


def _results(futures: Iterable[Future[None]]) -> None:
    for future in futures:
        future.result()
