# SPDX-License-Identifier: Apache-2.0
"""convpool-optimize: the command line of `convpool.optimize`.

Exit status: 0 written, also when nothing matched; 1 original and result disagree, nothing written; 2 unusable model,
option or output, one line on stderr, nothing written.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from convpool.algebra.lowering import REQUESTS
from convpool.api import OptimizeResult, optimize
from convpool.cli.common import InputShape, Tolerance, load_model, run, write_report
from convpool.cli.progress import StepBar
from convpool.cli.sections import SectionedCommand, complete_file
from convpool.cli.table import make_console, show
from convpool.errors import OptionError, VerificationError
from convpool.ir import schema
from convpool.ir.files import check_output
from convpool.ir.save import LAYOUTS
from convpool.options import DEFAULT_LIMITS, PASSES, TARGETS
from convpool.types import Layout

_NAMES = ", ".join(f"{name} ({what})" for name, what in PASSES.items())


SECTIONS = {
    "Output": ("output", "external_data", "dry_run", "report_path", "verbose", "quiet"),
    "What to rewrite": ("target", "lowering", "exclude", "enable", "disable", "autotune", "concat"),
    "Check": ("check", "no_check", "data", "shapes", "rtol", "atol", "seed", "time"),
    "GPU plugin": ("stem", "plain_conv", "prologue", "epilogue", "fuse_pool_conv", "domain"),
}
EXAMPLES = (
    "convpool optimize model.onnx                           # writes model.convpool.onnx",
    "convpool optimize model.onnx --target cpu --autotune   # time the forms here",
    "convpool optimize model.onnx --input-shape x:1,3,224,224 --check 5 -o out.onnx",
    "convpool optimize model.onnx --dry-run --report report.json",
)


@click.command(
    "optimize",
    cls=SectionedCommand,
    sections=SECTIONS,
    examples=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("model", shell_complete=complete_file)
@click.argument("others", nargs=-1, metavar="")
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    shell_complete=complete_file,
    help="Where to write; '-' is stdout, MODEL's own name replaces it. Default: MODEL's name with .convpool.onnx, beside it.",
)
@click.option(
    "--external-data",
    type=click.Choice(LAYOUTS),
    default="auto",
    show_default=True,
    help="Where weights in data files go: auto, into the model where it stays under 2 GB, else as one; one, one data file beside "
    "OUT; keep, copies of the original's files.",
)
@click.option(
    "--target",
    type=click.Choice(tuple(TARGETS)),
    default="any",
    show_default=True,
    help="What the result is for: any runtime; cpu, onnxruntime on a CPU (--lowering auto); tensorrt, TensorRT with the plugin "
    "(--stem, --plain-conv, and no AveragePool where the plugin has no fast kernel).",
)
@click.option(
    "--lowering",
    type=click.Choice(REQUESTS),
    help="Form of a rewritten pair: the ConvAvgPool operator, AveragePool + Conv, one Conv, or the cheaper of these two. "
    "Default: the target's, convavgpool.",
)
@click.option("--enable", multiple=True, type=click.Choice(tuple(PASSES)), metavar="NAME", help=f"Run this too: {_NAMES}.")
@click.option("--disable", multiple=True, type=click.Choice(tuple(PASSES)), metavar="NAME", help="Do not run this.")
@click.option(
    "--check",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    metavar="N",
    help="Verify with N sets of random inputs in onnxruntime.",
)
@click.option("--no-check", is_flag=True, help="Do not verify.")
@click.option("--data", metavar="FILE.npz", help="Verify with these inputs in place of random ones.")
@click.option(
    "--input-shape",
    "shapes",
    type=InputShape(),
    multiple=True,
    metavar="NAME:1x3x224x224",
    help="Shape of an input that the model leaves open, for the check, --autotune and --plain-conv; repeat for more "
    "inputs. What is rewritten stays open.",
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="PATTERN",
    help="Leave as it is what has a convolution, pooling or Concat with a matching name (*, ? and [] as in a shell).",
)
@click.option(
    "--fuse-pool-conv", is_flag=True, default=None, help="Also make one node of AveragePool followed by Conv (GPU traffic)."
)
@click.option(
    "--stem",
    is_flag=True,
    default=None,
    help="For TensorRT with the plugin: where a pair became a ConvAvgPool, also make one of a convolution of an image "
    f"({DEFAULT_LIMITS.of_images}), an AveragePool in front of it included.",
)
@click.option(
    "--plain-conv",
    is_flag=True,
    default=None,
    help="The same on Hopper GPUs, of other convolutions whose kernel has more than one element: "
    f"{DEFAULT_LIMITS.of_plain_convolutions}.",
)
@click.option(
    "--prologue/--no-prologue",
    default=None,
    help="With convavgpool: fuse the scale and shift, Relu and LeakyRelu before it. Default: --prologue.",
)
@click.option(
    "--epilogue/--no-epilogue",
    default=None,
    help="With convavgpool: fuse the maps per channel, the Add and the Relu or LeakyRelu behind it. Default: --epilogue.",
)
@click.option(
    "--concat/--no-concat",
    default=None,
    help="With a pair rewritten: let a Concat of channels that begins as an earlier one does read its result. Default: --concat.",
)
@click.option(
    "--domain",
    default=schema.DOMAIN,
    show_default=True,
    metavar="NAME",
    help="Domain of the ConvAvgPool nodes written; onnxruntime's TensorRT provider wants trt.plugins.",
)
@click.option("--autotune", is_flag=True, help="Time the forms of each pair in onnxruntime here and keep the fastest.")
@click.option(
    "--time/--no-time",
    default=None,
    help="Time MODEL and the result in turn in onnxruntime here. Default: --time with --autotune, else --no-time.",
)
@click.option("--dry-run", is_flag=True, help="Do everything but write the model.")
@click.option("--report", "report_path", metavar="FILE.json", help="Write the report as JSON; '-' is stdout.")
@click.option("--rtol", type=Tolerance(), help="Relative tolerance of the check; default by type.")
@click.option("--atol", type=Tolerance(), help="Absolute tolerance of the check; default by type and output.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the random inputs.")
@click.option("-v", "--verbose", is_flag=True, help="Show errors per output, all operators and measured times.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@click.version_option(package_name="convpool")
def command(
    model: str,
    others: tuple[str, ...],
    output: str | None,
    external_data: Layout,
    report_path: str | None,
    quiet: bool,
    verbose: bool,
    dry_run: bool,
    no_check: bool,
    check: int,
    shapes: tuple,
    domain: str,
    **options: Any,
) -> None:
    """Rewrite convolution followed by average pooling in MODEL ('-' is stdin), exactly, and verify the result.

    Exit status: 0 written, also when nothing matched; 1 original and result differ, nothing written; 2 unusable model, option
    or output.
    """
    if others:
        raise OptionError(f"{others[0]}: a second file; expected one MODEL; name the output with -o")
    if quiet and verbose:
        raise OptionError("--quiet and --verbose exclude each other")
    _check_offloading(options)
    if no_check and options["data"]:
        raise OptionError("--no-check and --data exclude each other")
    out = _output_path(model, output)
    if out is None and external_data == "one":
        raise OptionError("--external-data one: got stdout, which takes no data file; expected a file's name with -o")
    if domain == "" or f"{domain}.".startswith("ai.onnx."):
        raise OptionError(f"--domain: got {domain!r}, where ONNX has its own operators; expected another, as trt.plugins")
    if out is None and report_path == "-":
        raise OptionError("--report -: got the model on stdout too; expected one of them in a file")
    loaded = load_model(model)
    read = {"--data": [Path(options["data"])] if options["data"] else [], "weights of the model": loaded.weight_files}
    if out is not None and not dry_run:
        check_output(out, read)
    if report_path and report_path != "-":
        models = [Path(path) for path in (model, out) if path and path != "-"]
        check_output(Path(report_path), {"a model's name": models, **read})
    console = make_console(stderr=out is None or report_path == "-")
    try:
        with StepBar(hidden=quiet) as progress:
            result = optimize(
                loaded, check=0 if no_check else check, input_shapes=dict(shapes), progress=progress.update, **options
            )
    except VerificationError as error:
        if error.report is not None:
            if not quiet:
                show(error.report, console, verbose=verbose)
            write_report(report_path, error.report.to_json())
        raise
    result.move_to_domain(domain)
    write_report(report_path, result.report.to_json())
    written = [] if dry_run else _write(result, out, external_data)
    if not quiet:
        show(result.report, console, verbose=verbose)
        if out is not None:
            files = ", ".join(map(str, written or [out]))
            console.print(f"{'would write' if dry_run else 'written'}   {files}", soft_wrap=True, markup=False)


def main() -> None:
    """Entry point; turns exceptions into exit statuses and one line on stderr."""
    sys.exit(run(command, "convpool-optimize"))


def _check_offloading(options: dict[str, Any]) -> None:
    """Refuse what asks for nodes of the operator beside a lowering without any."""
    given = {"--stem": options["stem"], "--plain-conv": options["plain_conv"]}
    given |= {f"--enable {name}": name in options["enable"] for name in ("image_conv", "plain_conv")}
    lowering = options["lowering"] or TARGETS[options["target"]].lowering
    for words, wanted in given.items():
        if wanted and lowering != "convavgpool":
            raise OptionError(f"{words}: got --lowering {lowering} too; expected convavgpool")


def _output_path(model: str, output: str | None) -> Path | None:
    """Where to write; None for stdout."""
    if output == "-" or (output is None and model == "-"):
        return None
    return Path(output) if output else Path(model).parent / f"{Path(model).stem}.convpool.onnx"


def _write(result: OptimizeResult, out: Path | None, external_data: Layout) -> list[Path]:
    """Write the model; the files that it needs."""
    if out is not None:
        return result.save(out, external_data=external_data)
    data = result.to_bytes()
    with open(sys.stdout.fileno(), "wb", closefd=False) as stdout:  # sys.stdout.buffer may write a part (PYTHONUNBUFFERED)
        stdout.write(data)
    return []


if __name__ == "__main__":
    main()
