# SPDX-License-Identifier: Apache-2.0
"""Nine 3x3 filters, then pooling, over a folder of images: on a CPU or a GPU.  ``python examples/filter_bank FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from bank import KINDS, Pooling, run_numpy
from files import contact_sheet, find, read, run_folder, run_folder_on_gpu
from gpu import Gpu
from measure import BACKENDS, end_to_end, machine, plot, sweep
from rich.progress import Progress

SHEET = ("average", "max")


def gpu_or_none(size: tuple[int, int], pooling: Pooling) -> Gpu | None:
    """The GPU; None, with the reason on stderr, where there is none."""
    try:
        return Gpu(size, pooling)
    except Exception as error:  # of pycuda, which is not there where its errors would be named
        click.echo(f"no GPU: {str(error).splitlines()[0]}", err=True)
        return None


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path), required=False)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), default=Path("filtered"), help="Where results go. Default: filtered."
)
@click.option("--pool", type=click.Choice(KINDS), default="average", show_default=True, help="Pooling behind the filters.")
@click.option("--window", type=click.IntRange(2, 3), default=2, show_default=True, help="Side of its window.")
@click.option("--backend", type=click.Choice(["gpu", *BACKENDS]), help="What computes. Default: the GPU, else numpy.")
@click.option("--sheet", type=click.Path(path_type=Path), help="Draw the first image and its results, of average and max, here.")
@click.option("--measure", "json_path", type=click.Path(path_type=Path), help="Time every backend instead; write JSON here.")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), help="With --measure, draw the times here.")
@click.option("--counts", default="1,10,100,1000", show_default=True, help="With --measure, numbers of images.")
@click.option("--size", default=512, show_default=True, help="With --measure, height and width of the images.")
def main(
    folder: Path | None,
    out: Path,
    pool: str,
    window: int,
    backend: str | None,
    sheet: Path | None,
    json_path: Path | None,
    plot_path: Path | None,
    counts: str,
    size: int,
) -> None:
    """Filter the images of FOLDER, all of one size, and write the nine results of each as one picture."""
    pooling = Pooling(pool, window)
    if json_path is not None:
        measure(json_path, plot_path, [int(count) for count in counts.split(",")], size, pooling)
        return
    if folder is None:
        raise click.UsageError("FOLDER: none given; expected a folder of images, or --measure")
    paths = find(folder)
    first = read(paths[0])
    height, width = first.shape
    pooling.out_size(height, width)
    if sheet is not None:
        contact_sheet(sheet, first, {kind: run_numpy(first[None], Pooling(kind, window))[0] for kind in SHEET})
    gpu = gpu_or_none((height, width), pooling) if backend in (None, "gpu") else None
    if gpu is None and backend == "gpu":
        raise click.ClickException("--backend gpu: no GPU; expected pycuda and an NVIDIA GPU")
    out.mkdir(parents=True, exist_ok=True)
    with Progress() as progress:
        task = progress.add_task("filtering", total=len(paths))

        def tell(done: int) -> None:
            progress.update(task, completed=done)

        if gpu is not None:
            run_folder_on_gpu(paths, out, gpu, tell)
        else:
            run_folder(paths, out, pooling, BACKENDS[backend or "numpy"], tell)
    click.echo(f"{len(paths)} images to {out}, by {'the GPU' if gpu else backend or 'numpy'}")


def measure(path: Path, plot_path: Path | None, counts: list[int], size: int, pooling: Pooling) -> None:
    """Write and show all times."""
    gpu = gpu_or_none((size, size), pooling)
    found = {
        "machine": machine(gpu),
        "in_memory_s": sweep(counts, size, pooling, gpu),
        "files": end_to_end(max(counts), size, pooling, gpu),
    }
    path.write_text(json.dumps(found, indent=1) + "\n")
    click.echo(json.dumps(found, indent=1))
    if plot_path is not None:
        plot(found["in_memory_s"], size, plot_path)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"filter_bank: {error}")
