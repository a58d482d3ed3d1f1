# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks layers: every way to compute a convolution followed by average pooling, side by side.

Exit status: 0 measured or shown; 1 a method's output was wrong; 2 no GPU, or an unusable option or file, one line on
stderr; 130 interrupted, what was measured is written.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.progress import TimeElapsedColumn

from benchmarks.layers import record as records
from benchmarks.layers import tactics
from benchmarks.layers.figures import TACTIC, overview
from benchmarks.layers.rows import LAYOUTS, PRECISIONS, Row
from benchmarks.layers.run import METHODS, Options, Run, protocol
from benchmarks.layers.suites import SUITES, load_rows
from benchmarks.layers.table import show
from convpool.cli.group import SectionedCommand, StepBar, run
from convpool.cli.table import make_console
from convpool.cuda import tuned
from convpool.cuda.timing import REPLAYS
from convpool.errors import ConvpoolError, OptionError, VerificationError, printable
from convpool.ir.files import check_output, write_atomically

Work = list[tuple[Row, str]]
WIDTH = 250
"""Columns of the table where the output is no terminal."""


@click.command(
    "bench",
    short_help="Time convolution followed by pooling on a GPU, by every method.",
    cls=SectionedCommand,
    sections={
        "What to measure": (
            "listing",
            "precisions",
            "layout",
            "methods",
            "patterns",
            "prologue",
            "packed",
            "on_cpu",
            "slow",
            "plans",
        ),
        "How to measure": ("replays", "tensorrt_python", "tensorrt_level"),
        "Output": ("merged", "json_path", "csv_path", "plot_path", "tune_path", "commit", "quiet"),
    },
    examples=(
        "python -m benchmarks layers suita-table2 --json table2.json --plot table2.png",
        "python -m benchmarks layers --list densenet                    # suites, methods and rows; needs no GPU",
        "python -m benchmarks layers rows.json --precision tf32 --cpu   # rows of your own",
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("suites", metavar="[SUITE|FILE.json]...", nargs=-1)
@click.option(
    "--list",
    "listing",
    is_flag=True,
    help="List all suites and methods, and the rows of the suites named. Measures nothing and needs no GPU.",
)
@click.option(
    "--precision",
    "precisions",
    type=click.Choice(PRECISIONS),
    multiple=True,
    help="Type to compute in. Repeat it for several. Default: the types of the suite.",
)
@click.option(
    "--layout", type=click.Choice(LAYOUTS), default="nhwc", show_default=True, help="Order of the axes of inputs and outputs."
)
@click.option(
    "--methods",
    multiple=True,
    metavar="PATTERN",
    help="Measure only methods whose name matches (* and ? as in a shell); convpool:* are convpool's kernels. Repeat it for "
    "more. Default: all methods.",
)
@click.option(
    "--rows", "patterns", multiple=True, metavar="PATTERN", help="Measure only rows whose name matches, such as '*x8x8 *'."
)
@click.option(
    "--prologue",
    is_flag=True,
    help="Add scale, shift and ReLU before every row. For other libraries, the time of a separate kernel at copy speed is added.",
)
@click.option(
    "--packed", is_flag=True, help="Let convpool sum pooling windows of fp16 and bf16 in that type: faster, with a larger error."
)
@click.option(
    "--replays",
    type=click.IntRange(min=2),
    default=REPLAYS,
    show_default=True,
    metavar="N",
    help="Number of timed replays of each method.",
)
@click.option(
    "--plans",
    type=click.IntRange(min=1),
    help="Try only the first N of cuDNN's engines, in its own ranking. Default: all.",
    metavar="N",
)
@click.option("--cpu", "on_cpu", is_flag=True, help="Also measure onnxruntime and a plain loop on the CPU.")
@click.option("--slow", is_flag=True, help="Also measure slow methods on large rows.")
@click.option("--tensorrt-python", metavar="PROGRAM", help="Python that has TensorRT, pycuda and convpool. Default: this one.")
@click.option(
    "--tensorrt-level",
    metavar="N",
    type=click.IntRange(0, 5),
    default=3,
    show_default=True,
    help="TensorRT's builder optimization level.",
)
@click.option(
    "--merge",
    "merged",
    multiple=True,
    metavar="FILE.json",
    help="Add the results of an earlier run. Without a suite nothing is measured: the results are shown and written.",
)
@click.option("--json", "json_path", metavar="FILE", help="Write everything that was measured, as JSON.")
@click.option("--csv", "csv_path", metavar="FILE", help="Write one line for each row and method.")
@click.option("--plot", "plot_path", metavar="FILE.png", help="Draw the speed-ups and the roofline.")
@click.option(
    "--tune",
    "tune_path",
    metavar="FILE.def",
    help="Add the fastest tactic of each row to this file, from which the library chooses: plugin/src/tuned.def, or the one "
    "that CONVPOOL_TUNED names.",
)
@click.option("--commit", default="", help="Commit to name in the JSON file.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@click.version_option(package_name="convpool")
def command(
    suites: tuple[str, ...],
    listing: bool,
    precisions: tuple[str, ...],
    patterns: tuple[str, ...],
    prologue: bool,
    packed: bool,
    merged: tuple[str, ...],
    json_path: str | None,
    csv_path: str | None,
    plot_path: str | None,
    tune_path: str | None,
    commit: str,
    quiet: bool,
    **given: Any,
) -> None:
    """Measure every method for convolution followed by average pooling on this machine's GPU.

    SUITE is a list of layers, one a row. --list shows the rows. No row has a bias.

    \b
      suita-table1  fp32 layers of Suita et al. (JPDC 2020), table 1
      suita-table2  the same layers in fp16, table 2 of that paper
      tokura        layers of Tokura et al. (2018), tables II and III
      densenet      1x1 transitions of DenseNet-121, 169 and 201
      batch1        layers of known networks at batch 1, as in the cuConv paper
      networks      discriminators of SNGAN, WGAN-GP and StarGAN v2
      plain         convolutions without pooling, of networks
      cuconv        convolutions without pooling, of the cuConv paper's sizes
      windows       pooling windows of 3 and 4, and 5x5 convolutions

    Papers: S. Suita et al., "Efficient convolution pooling on the GPU", JPDC 138, 2020. H. Tokura et al., "Fast Algorithm of
    Unified Layer Performing Convolution and Average Pooling on the GPU", 2018. M. Jorda et al., "cuConv: A CUDA Implementation
    of Convolution for CNN Inference".

    FILE.json has rows of your own: a list of objects with c (input channels), m (output channels) and size (height and width).
    They may also have n (batch, default 1), kernel (3), pad (kernel // 2), stride (1), pool (2), pool_stride (pool) and label
    ("").

    \b
    Exit status:
      0    measured or shown
      1    a method's output is wrong
      2    no GPU, or unusable option or file
      130  stopped by Ctrl-C; what was measured is written
    """
    forms = _forms(json_path, csv_path, plot_path, tune_path)
    work, methods = _work(suites, precisions, patterns, prologue, packed), _methods(given["methods"])
    if listing:
        _list(work)
        return
    if not work and not merged:
        raise OptionError(f"suite: got none, expected one of {', '.join(SUITES)}, a JSON file, or --merge")
    options = Options(**{**given, "methods": methods})
    earlier = [records.load(path) for path in merged]
    made = records.new_record(
        records.without_folders(["python", "-m", "benchmarks", "layers", *sys.argv[1:]]), commit, protocol(options)
    )
    failure = _measure(Run(made, work, options), quiet) if work else None
    result = records.merge([*earlier, made] if work else earlier)
    result["summary"] = overview(result)
    for path, form in forms.items():
        if failure is None or result["rows"]:
            write_atomically(path, form(result))
    if not quiet:
        show(result, make_console(stderr=False, width=WIDTH))
    if failure is not None:
        raise failure
    wrong = [name for entry in made["rows"] for name, found in entry["methods"].items() if "wrong" in found]
    if wrong:
        raise VerificationError(f"wrong results: {', '.join(sorted(set(wrong)))}")


def main() -> None:
    """Entry point; turns exceptions into exit statuses and one line on stderr."""
    sys.exit(run(command, "python -m benchmarks layers"))


def _forms(
    json_path: str | None, csv_path: str | None, plot_path: str | None, tune_path: str | None
) -> dict[str, Callable[[dict[str, Any]], bytes]]:
    """Return what makes each file's bytes of the record; refuse files that cannot be written."""
    forms: dict[str, Callable[[dict[str, Any]], bytes]] = {}
    if json_path:
        forms[json_path] = records.to_json
    if csv_path:
        forms[csv_path] = records.to_csv
    if plot_path:
        forms[plot_path] = _plot
    if tune_path:
        forms[tune_path] = lambda record: tuned.merged(tactics.fastest(record), tune_path)
    for path in forms:
        check_output(Path(path))
    if plot_path and importlib.util.find_spec("matplotlib") is None:
        raise OptionError("--plot: matplotlib is missing; pip install matplotlib")
    return forms


def _measure(measuring: Run, quiet: bool) -> BaseException | None:
    """Measure, and give back what stopped it; what was measured until then is in the record."""
    try:
        with StepBar(TimeElapsedColumn(), hidden=quiet) as bar:
            measuring.measure(bar.update)
    except (KeyboardInterrupt, ConvpoolError) as error:
        return error
    return None


def _work(suites: tuple[str, ...], precisions: tuple[str, ...], patterns: tuple[str, ...], prologue: bool, packed: bool) -> Work:
    """Rows with the precision to measure each in."""
    work: Work = []
    for suite in suites:
        rows, usual, _ = SUITES[suite] if suite in SUITES else (load_rows(suite), ("fp16",), "")
        rows = [dataclasses.replace(row, prologue=prologue, packed=packed) for row in rows] if prologue or packed else rows
        for precision in precisions or usual:
            work += [
                (row, precision)
                for row in rows
                if not patterns or any(fnmatch.fnmatchcase(row.name, pattern) for pattern in patterns)
            ]
    if suites and not work:
        raise OptionError(f"--rows: no row's name matches {', '.join(patterns)}; --list SUITE shows the names")
    return work


def _methods(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        if not pattern.startswith(TACTIC) and not fnmatch.filter(METHODS, pattern):
            raise OptionError(f"--methods: got {pattern!r}, expected one of {', '.join(METHODS)}, {TACTIC}*")
    return patterns or ("*",)


def _list(work: Work) -> None:
    for name, (rows, precisions, what) in SUITES.items():
        click.echo(f"{name:13} {len(rows):3} rows, {' and '.join(precisions)}: {what}")
    click.echo(f"methods: {', '.join(METHODS)}, {TACTIC}TACTIC")
    for row, precision in work:
        click.echo(printable(f"{row.suite:13} {precision} {row.name}" + (f" ({row.label})" if row.label else "")))


def _plot(record: dict) -> bytes:
    from benchmarks.layers.plot import to_png

    return to_png(record)


if __name__ == "__main__":
    main()
