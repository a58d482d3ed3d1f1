# SPDX-License-Identifier: Apache-2.0
"""convpool-verify: the comparison of any two of models and engines."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from convpool.check.inputs import load_arrays
from convpool.check.session import Runner, open_model, start_process
from convpool.check.verify import compare_runners
from convpool.cli.group import DATA, SHAPE, SectionedCommand, comparison_options, complete_file, load_model, run, write_report
from convpool.cli.table import make_console, show_verification
from convpool.errors import OptionError, VerificationError
from convpool.ir.files import check_output, locations_in
from convpool.onnxruntime.session import CudaRunner
from convpool.report import json_text
from convpool.tensorrt import PRECISIONS
from convpool.tensorrt.engine import Engine, EngineRunner, is_engine


@click.command(
    "verify",
    short_help="Compare two models or engines.",
    cls=SectionedCommand,
    sections={
        "Check": ("precision", "provider", "check", "data", "shapes", "rtol", "atol", "seed", "layers"),
        "Output": ("report_path", "quiet"),
    },
    examples=(
        "convpool verify model.onnx model.convpool.onnx",
        "convpool verify model.onnx model.engine --precision fp16",
        "convpool verify model.onnx model.convpool.onnx --provider cuda",
    ),
)
@click.argument("first", shell_complete=complete_file)
@click.argument("second", shell_complete=complete_file)
@click.option(
    "--layers",
    is_flag=True,
    help="Compare every tensor whose name is in both, not only the outputs. An engine keeps its inner tensors "
    "if it was built with convpool build --layers.",
)
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    help="Precision of the less precise of the two. It sets the tolerances. Default: by the types in a model, and by "
    "those of an engine's inputs and outputs.",
)
@click.option(
    "--provider",
    type=click.Choice(("cpu", "cuda")),
    default="cpu",
    show_default=True,
    help="onnxruntime's provider that runs SECOND. cuda: on a GPU, ConvAvgPool by convpool's kernels.",
)
@click.option(
    "--check", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Compare on N sets of random inputs."
)
@DATA
@click.option("--input-shape", "shapes", **SHAPE, help="Shape of an input with dynamic sizes. Repeat it for more inputs.")
@comparison_options(report="Write the comparison as JSON.")
def verify_command(
    first: str,
    second: str,
    layers: bool,
    provider: str,
    data: str | None,
    shapes: tuple[tuple[str, list[int]], ...],
    report_path: str | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Run FIRST and SECOND on the same inputs, and compare their outputs.

    Each is an ONNX model ('-': on stdin) or a TensorRT engine (.engine, .plan, .trt). Errors are those of SECOND against FIRST.

    \b
    Exit status:
      0  the outputs agree
      1  the outputs differ
      2  unusable file, option or installation
    """
    if report_path and report_path != "-":
        read = [Path(path).parent / name for path in (first, second) for name in (Path(path).name, *locations_in(Path(path)))]
        check_output(Path(report_path), {"compared here": read, "--data": [Path(data)] if data else []})
    start_process()
    runners = open_runner(first, layers=layers), open_runner(second, provider, layers=layers)
    verification = compare_runners(*runners, data=load_arrays(data), input_shapes=dict(shapes), **options)
    write_report(report_path, json_text({"first": first, "second": second, "verification": asdict(verification)}))
    if not quiet:
        show_verification(verification, make_console(stderr=report_path == "-"))
    if not verification.passed:
        raise VerificationError(f"verification: {verification.difference}")


def open_runner(path: str, provider: str = "cpu", *, layers: bool = False) -> Runner:
    """A runner of an engine, by its suffix, or of a model, on stdin for "-".  Raises ModelError, OptionError or TensorRTError."""
    if is_engine(path) and provider == "cuda":
        raise OptionError(f"--provider: got cuda, expected a model to run by it; {path} is an engine")
    if is_engine(path):
        return EngineRunner(Engine.load(path))
    return (open_model if provider == "cpu" else CudaRunner)(load_model(path), path, layers=layers)


def main() -> None:
    sys.exit(run(verify_command, "convpool-verify"))
