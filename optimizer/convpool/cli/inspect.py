# SPDX-License-Identifier: Apache-2.0
"""`convpool inspect`: what a model would gain, and what to run next.  It writes no model and runs none."""

from __future__ import annotations

from pathlib import Path

import click

from convpool.algebra.lowering import REQUESTS
from convpool.api import optimize
from convpool.cli.group import SHAPE, NamedShape, NewFile, SectionedCommand, complete_file, load_model, write_report
from convpool.cli.table import make_console, show
from convpool.ir.files import check_output
from convpool.options import TARGETS
from convpool.summary import name_of
from convpool.types import Lowering, Target


@click.command(
    "inspect",
    cls=SectionedCommand,
    examples=("convpool inspect model.onnx", "convpool inspect model.onnx --input-shape image:1x3x224x224 -v"),
)
@click.argument("model", shell_complete=complete_file)
@click.option(
    "--target", type=click.Choice(tuple(TARGETS)), default="any", show_default=True, help="What the result would be for."
)
@click.option("--lowering", type=click.Choice(REQUESTS), help="How pairs would be written. Default: the target's.")
@click.option(
    "--input-shape", "shapes", **SHAPE, help="Shape of an input with dynamic sizes, to count with. Repeat it for more inputs."
)
@click.option("--report", "report_path", type=NewFile(), metavar="FILE.json", help="Write the report as JSON; '-' is stdout.")
@click.option("-v", "--verbose", is_flag=True, help="Also show every pair left unchanged.")
def command(
    model: str, target: Target, lowering: Lowering | None, shapes: tuple[NamedShape, ...], report_path: str | None, verbose: bool
) -> None:
    """Show what MODEL would gain. Nothing is run or written.

    MODEL is an ONNX file, or '-' for stdin. The output lists the pairs, the multiply-adds before and after, the reasons why
    pairs are left unchanged, and what to run next.

    \b
    Exit status:
      0  done, whether MODEL gains or not
      2  unusable model or option
    """
    loaded = load_model(model)
    if report_path and report_path != "-":
        check_output(Path(report_path), {"the model itself": [Path(model)], "weights of the model": loaded.weight_files})
    report = optimize(loaded, target=target, lowering=lowering, check=0, input_shapes=dict(shapes)).report
    if report.summary.rewritten:
        report.hints += [
            f"on a CPU: convpool optimize {name_of(loaded)} --target cpu --time",
            f"in onnxruntime on a GPU: convpool optimize {name_of(loaded)} --target cuda",
            f"in TensorRT: convpool build {name_of(loaded)} -o {name_of(loaded, '.engine')}",
        ]
    write_report(report_path, report.to_json())
    show(report, make_console(stderr=report_path == "-"), verbose=verbose, preview=True)
