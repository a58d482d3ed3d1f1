# SPDX-License-Identifier: Apache-2.0
"""convpool-build: engines from models."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from convpool.check.inputs import load_arrays
from convpool.cli import group
from convpool.cli.table import make_console, print_table, show_verification
from convpool.ir.files import check_output
from convpool.options import IMAGE_CHANNELS, PLAIN_MACS, PLAIN_RESULTS, WIDE_CHANNELS
from convpool.report import json_text
from convpool.tensorrt import PRECISIONS, BuildOptions, BuildReport, EngineMismatchError, Profile, Tuning, build
from convpool.tensorrt.build_options import LOWERINGS
from convpool.tensorrt.pipeline import check_can_run

Shapes = dict[str, list[int]]


@click.command(
    "build",
    short_help="Build a TensorRT engine and check it.",
    cls=group.SectionedCommand,
    sections={
        "Output": ("output", "layers", "report_path", "quiet"),
        "Engine": "precision least typical largest timing_cache workspace_mib optimization_level max_aux_streams".split(),
        "What to rewrite": ("no_plugin", "lowering", "stem", "plain_conv", "accumulation", "autotune"),
        "Check": ("check", "data", "rtol", "atol", "seed"),
    },
    examples=(
        "convpool build model.onnx -o model.engine --precision fp16",
        "convpool build model.onnx -o model.engine --opt-shape image:8x3x224x224 --max-shape image:32x3x224x224",
    ),
)
@click.argument("model", shell_complete=group.complete_file)
@click.option(
    "-o", "--output", required=True, type=group.NewFile(stdout=False), metavar="ENGINE", help="Where to write the engine."
)
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    default="fp32",
    show_default=True,
    help="What layers may compute in. float32 inputs and outputs keep their type. fp32 does not use TF32.",
)
@click.option(
    "--min-shape",
    "least",
    **group.SHAPE,
    help="Smallest shape of an input with dynamic sizes. Default: --opt-shape. Repeat it for more inputs.",
)
@click.option("--opt-shape", "typical", **group.SHAPE, help="Shape that the engine is tuned for. Default: --max-shape.")
@click.option("--max-shape", "largest", **group.SHAPE, help="Largest shape. Default: --opt-shape.")
@click.option("--timing-cache", metavar="FILE", help="Read layer timings from this file, and add new ones to it.")
@click.option(
    "--workspace-mib",
    type=click.IntRange(min=1),
    default=1024,
    metavar="MIB",
    show_default=True,
    help="Largest scratch memory of a layer, in MiB.",
)
@click.option(
    "--optimization-level",
    type=click.IntRange(0, 5),
    metavar="N",
    help="TensorRT's builder optimization level. Default: TensorRT's own.",
)
@click.option(
    "--max-aux-streams",
    type=click.IntRange(min=0),
    metavar="N",
    help="Let independent layers run on up to N more CUDA streams. Default: TensorRT's own.",
)
@click.option("--no-plugin", is_flag=True, help="Do not use the plugin. The engine has standard operators only.")
@click.option(
    "--lowering",
    type=click.Choice(LOWERINGS),
    help="How pairs are rewritten. none: MODEL is not optimized. Default: convavgpool, the plugin's operator; "
    "auto with --no-plugin. With --precision tf32 it is fused (pairs with a 1x1 convolution are then left unchanged), unless "
    "the plugin can run most convolutions or its own are mostly upsampled ones or 1x1 pairs behind a normalization.",
)
@click.option(
    "--stem/--no-stem",
    default=True,
    show_default=True,
    help=f"In fp16 and bf16, also run convolutions of images (at most {IMAGE_CHANNELS} channels) on the "
    "plugin, in a model with a pair. Only on GPUs of compute capability 8.0 and newer, with TensorRT 8.6 "
    "or 9. In tf32 only beside --plain-conv.",
)
@click.option(
    "--plain-conv/--no-plain-conv",
    default=True,
    show_default=True,
    help="In fp16, bf16 and tf32, also run other convolutions on the plugin, in a model with a pair: at least "
    f"{WIDE_CHANNELS} channels; at --opt-shape at most {PLAIN_MACS / 1e9:g}e9 multiply-adds, "
    f"or more if the result has at most {PLAIN_RESULTS:,} numbers. "
    "Only on GPUs of compute capability 9.0, with TensorRT 8.6 or 9.",
)
@click.option("--accumulation", **group.ACCUMULATION)
@click.option(
    "--autotune",
    is_flag=True,
    help="Build an engine of MODEL as it is and of every lowering, and time them on this GPU. Keep the fastest "
    "whose outputs agree. Not with --lowering or --layers.",
)
@click.option("--layers", is_flag=True, help="Keep intermediate tensors as outputs. convpool verify --layers compares them.")
@click.option("--check", **group.CHECK, help="Compare the engine with onnxruntime on MODEL, on N sets of random inputs.")
@group.DATA
@group.comparison_options(report="Write what was built and compared as JSON.")
def build_command(
    model: str,
    output: str,
    least: tuple[group.NamedShape, ...],
    typical: tuple[group.NamedShape, ...],
    largest: tuple[group.NamedShape, ...],
    no_plugin: bool,
    workspace_mib: int,
    report_path: str | None,
    quiet: bool,
    **given: Any,
) -> None:
    """Build a TensorRT engine from MODEL, run it, and compare it with onnxruntime on MODEL.

    MODEL is an ONNX file, or '-' for stdin. It is optimized first. If it already has convpool's operators, it is built as it is:
    --stem and --plain-conv change nothing, --accumulation changes its nodes, and --lowering direct or fused is refused.

    \b
    Exit status:
      0    done
      1    outputs differ; no engine is written
      2    unusable model, option or installation
      130  stopped by Ctrl-C; no engine is written
    """
    given["data"], data_file = load_arrays(given["data"]), given["data"]
    original = group.load_model(model)
    read = {
        "the model itself": [Path(model)],
        "weights of the model": original.weight_files,
        "--data": [Path(data_file)] if data_file else [],
    }
    outputs = [Path(path) for path in (output, report_path, given["timing_cache"]) if path and path != "-"]
    for number, path in enumerate(outputs):
        check_output(path, {**read, "another output": outputs[:number]})
    with group.StepBar(SpinnerColumn(), TextColumn("building"), TimeElapsedColumn(), hidden=quiet) as bar:

        def tell(phase: str, done: int, total: int) -> None:
            bar.update(done, None, f"{phase} {done}/{total}" if total else phase)

        shapes, memory = _profile(dict(least), dict(typical), dict(largest)), workspace_mib << 20
        options = BuildOptions(profiles=shapes, progress=tell, plugin=not no_plugin, workspace_bytes=memory, **given)
        if options.checked or options.autotune:
            check_can_run(options, "--check 0", "--autotune")
        try:
            built, mismatch = build(original, options), None
        except EngineMismatchError as error:
            built, mismatch = error.built, error
    text = json_text({"model": model, "engine": output, **built.report.to_dict()})
    group.write_report(report_path, text, list if mismatch else partial(built.save, output))
    console = make_console(stderr=report_path == "-")
    if built.report.autotune and not quiet:
        _show_times(built.report.autotune, console)
    if built.report.verification and not quiet:
        show_verification(built.report.verification, console)
    if mismatch is not None:
        raise mismatch
    if not quiet:
        _show_written(output, built.report, console)


def main() -> None:
    sys.exit(group.run(build_command, "convpool-build"))


def _profile(least: Shapes, typical: Shapes, largest: Shapes) -> Profile | None:
    """One profile of every input named; what is left out is as large as the next one given."""
    profile: dict[str, tuple[list[int], list[int], list[int]]] = {}
    for name in dict.fromkeys((*least, *typical, *largest)):
        most = largest.get(name) or typical.get(name) or least[name]
        middle = typical.get(name) or most
        profile[name] = (least.get(name) or middle, middle, most)
    return profile or None


def _counted(nodes: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in nodes.items()) or "nothing"


def _show_written(output: str, report: BuildReport, console: Console) -> None:
    shares = f"{_counted(report.plugin_nodes)}; TensorRT: {_counted(report.other_nodes)}"
    console.print(f"plugin    {shares}", soft_wrap=True, markup=False)
    size = f"{report.engine_bytes / 2**20:.1f} MiB, {report.precision}, {report.build_seconds:.0f} s"
    console.print(f"written   {Path(output)} ({size})", soft_wrap=True, markup=False)


def _show_times(tuning: Tuning, console: Console) -> None:
    original, rows = tuning.times_us.get("none"), []
    for lowering in dict.fromkeys((*tuning.times_us, *tuning.left_out)):
        us, why = tuning.times_us.get(lowering), tuning.left_out.get(lowering)
        over = f"{original / us:.2f}" if original and us else ""
        outcome = f"left out: {why}" if why else "kept" if lowering == tuning.lowering else ""
        rows.append([lowering, "" if us is None else f"{us:.1f}", over, escape(outcome)])
    print_table(console, ("lowering", "us", "over MODEL", ""), rows, right=(1, 2))
