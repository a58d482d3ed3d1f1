# SPDX-License-Identifier: Apache-2.0
"""convpool-optimize: the command line of `convpool.optimize`; and `convpool inspect`: what a model would gain, and what to run
next, which writes no model and runs none."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from convpool.algebra.expand import FORMS
from convpool.algebra.geometry import REQUESTS
from convpool.api import OptimizeResult, name_of, optimize
from convpool.cli import group
from convpool.cli.group import SHAPE, NamedShape
from convpool.cli.table import make_console, show
from convpool.errors import OptionError, OutputError, VerificationError
from convpool.ir import schema
from convpool.ir.files import LAYOUTS, check_model_output, check_output, locations_in, output_errors
from convpool.options import OF_OPERATORS, RULE_TEXTS, TARGETS
from convpool.types import Layout, Lowering, Target

REPORT = click.option(
    "--report", "report_path", type=group.NewFile(), metavar="FILE.json", help="Write the report as JSON; '-' is stdout."
)
SECTIONS = {
    "Output": ("output", "external_data", "dry_run", "skip_unchanged", "report_path", "verbose", "quiet"),
    "What to rewrite": "target lowering upsampling exclude enable disable autotune fix_shapes fold".split(),
    "Check": ("check", "no_check", "data", "shapes", "rtol", "atol", "seed", "time"),
    "GPU plugin": ("accumulation", "domain"),
}
EXAMPLES = (
    "convpool optimize model.onnx                           # writes model.convpool.onnx",
    "convpool optimize model.onnx --target cpu --autotune   # time the forms here",
    "convpool optimize model.onnx --input-shape image:1x3x224x224 --check 5 -o out.onnx",
    "convpool optimize model.onnx --dry-run --report report.json",
    "convpool optimize model.onnx --fix-shape image:1x3x224x224 --fold",
)


@click.command(
    "optimize",
    short_help="Rewrite a model and check the result.",
    cls=group.SectionedCommand,
    sections=SECTIONS,
    lists={"Rules, and what each rewrites": RULE_TEXTS},
    examples=EXAMPLES,
)
@click.argument("model", shell_complete=group.complete_file)
@click.argument("others", nargs=-1, metavar="")
@click.option(
    "-o",
    "--output",
    type=group.NewFile(),
    metavar="OUT",
    shell_complete=group.complete_file,
    help="Where to write the result; '-' is stdout, and MODEL's own name replaces MODEL. "
    "Default: beside MODEL, with .convpool.onnx in place of .onnx.",
)
@click.option(
    "--external-data",
    type=click.Choice(LAYOUTS),
    default="auto",
    show_default=True,
    help="Where to put weights that are in data files. auto: into the model if it stays under 2 GB, else as with "
    "one. one: into one data file beside OUT. keep: into copies of the original's files.",
)
@click.option(
    "--target",
    type=click.Choice(tuple(TARGETS)),
    default="any",
    show_default=True,
    help="What the result is for. any: every runtime. cpu: onnxruntime on a CPU (--lowering auto). tensorrt: "
    "TensorRT with the plugin (sets image_conv, plain_conv, norm_conv, chain_upsample and fold_product; a pair with groups, "
    "three spatial axes or a window of more than 64 elements becomes fused or is left unchanged). cuda: onnxruntime's CUDA "
    "provider with convpool's operators; in a model with a pair, convolutions between pairs are written as nodes of the "
    "operator too, with the channels last.",
)
@click.option(
    "--lowering",
    type=click.Choice(REQUESTS),
    help="How a pair is written. convavgpool: one node of the ConvAvgPool operator. direct: AveragePool, then "
    "Conv. fused: one Conv. auto: direct or fused, whichever is cheaper. Default: auto with --target cpu, "
    "else convavgpool.",
)
@click.option(
    "--upsampling",
    type=click.Choice(FORMS),
    help="How a convolution behind a nearest upsampling is written, where it has this form. conv_first: Conv, Resize. fused: one "
    "ConvTranspose. direct: ConvTranspose, AveragePool. subpixel: Conv, DepthToSpace. phases: several Conv, DepthToSpace. "
    "Default: by cost.",
)
@click.option(
    "--enable",
    multiple=True,
    type=click.Choice(tuple(RULE_TEXTS)),
    metavar="NAME",
    help="Also run this rule. The list of rules is below.",
)
@click.option("--disable", multiple=True, type=click.Choice(tuple(RULE_TEXTS)), metavar="NAME", help="Do not run this rule.")
@click.option("--check", **group.CHECK, help="Compare the result with MODEL in onnxruntime on N sets of random inputs.")
@click.option("--no-check", is_flag=True, help="Do not compare the result with MODEL.")
@group.DATA
@click.option(
    "--input-shape",
    "shapes",
    **SHAPE,
    help="Shape of an input with dynamic sizes, for the check, for times and for plain_conv. Repeat it for more "
    "inputs. The sizes stay dynamic in the result.",
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="PATTERN",
    help="Leave a pair or a Concat unchanged if the name of one of its nodes matches (*, ? and [] as in a "
    "shell). Repeat it for more patterns.",
)
@click.option(
    "--fix-shape",
    "fix_shapes",
    **SHAPE,
    help="Give an input with dynamic sizes this shape in the result. Repeat it for more inputs. Sizes of the same name in other "
    "inputs are fixed too.",
)
@click.option(
    "--fold",
    is_flag=True,
    help="Store what is computed from constants, and remove Identity nodes. Sizes that are fixed count as constants.",
)
@click.option("--accumulation", **group.ACCUMULATION)
@click.option(
    "--domain",
    default=schema.DOMAIN,
    show_default=True,
    metavar="NAME",
    help="Domain of the ConvAvgPool nodes. onnxruntime's TensorRT provider needs trt.plugins.",
)
@click.option(
    "--autotune", is_flag=True, help="Time every form of each pair in onnxruntime on this machine, and keep the fastest."
)
@click.option(
    "--time/--no-time",
    default=None,
    help="Time MODEL and the result in onnxruntime on this machine. Default: --time with --autotune, else --no-time.",
)
@click.option("--skip-unchanged", is_flag=True, help="Write no copy of a model in which nothing changes.")
@click.option("--dry-run", is_flag=True, help="Do everything except writing the model.")
@REPORT
@click.option("--rtol", type=group.Tolerance(), help="Relative tolerance of the check. Default: by type.")
@click.option("--atol", type=group.Tolerance(), help="Absolute tolerance of the check. Default: by type and output.")
@group.SEED
@click.option(
    "-v", "--verbose", is_flag=True, help="Also show pairs left unchanged, the errors of every output, and all operators."
)
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
    skip_unchanged: bool,
    no_check: bool,
    check: int,
    shapes: tuple[NamedShape, ...],
    domain: str,
    **options: Any,  # arguments of `optimize`, by its names
) -> None:
    """Rewrite convolutions beside average pooling and resizing in MODEL, and compare the result with MODEL in onnxruntime.

    MODEL is an ONNX file, or '-' for stdin. It is not changed unless -o names it.

    \b
    Exit status:
      0    done, also if nothing was rewritten
      1    outputs differ or cannot be compared; nothing is written
      2    unusable model, option or output file; nothing is written
      130  stopped by Ctrl-C (143 by SIGTERM, 129 by SIGHUP); nothing is written
    """
    if others:
        raise OptionError(f"{others[0]}: a second file; expected one MODEL; name the output with -o")
    _check_exclusions({"--quiet": quiet, "--verbose": verbose, "--no-check": no_check, "--data": options["data"]})
    _check_lowering(options)
    out = _output_path(model, output)
    if out is None:
        _check_stdout(external_data, skip_unchanged, report_path, dry_run)
    schema.check_domain(domain)
    options["fix_shapes"] = dict(options["fix_shapes"])
    loaded = group.load_model(model)
    read = {"--data": [Path(options["data"])] if options["data"] else [], "weights of the model": loaded.weight_files}
    if out is not None and not dry_run:
        check_model_output(out, read)
    if report_path and report_path != "-":
        models = [Path(path) for path in (model, out) if path and path != "-"]
        lost = {"weights of the model that would be replaced": [out.parent / name for name in locations_in(out)] if out else []}
        check_output(Path(report_path), {"a model's name": models, **read, **lost})
    console = make_console(stderr=out is None or report_path == "-")
    try:
        with group.StepBar(*group.STEPS, hidden=quiet) as progress:
            check = 0 if no_check else check
            result = optimize(loaded, check=check, input_shapes=dict(shapes), progress=progress.update, **options)
    except VerificationError as error:
        if error.report is not None:
            if not quiet:
                show(error.report, console, verbose=verbose)
            group.write_report(report_path, error.report.to_json())
        raise
    result.move_to_domain(domain)
    result.report.options["skip_unchanged"] = skip_unchanged
    skipped = skip_unchanged and not result.changed
    write = list if dry_run or skipped else partial(_write, result, out, external_data)  # list(): no files
    written = group.write_report(report_path, result.report.to_json(), write)
    if not quiet:
        show(result.report, console, verbose=verbose)
        if out is not None:
            console.print(_outcome(written or [out], dry_run, skipped, result.changed), soft_wrap=True, markup=False)


def main() -> None:
    sys.exit(group.run(command, "convpool-optimize"))


def _check_stdout(external_data: Layout, skip_unchanged: bool, report_path: str | None, dry_run: bool) -> None:
    """Refuse what a model on stdout cannot have beside it."""
    if sys.stdout is None or not dry_run and sys.stdout.isatty():
        raise OutputError("stdout: closed, or a terminal; expected a pipe or a file for the model; name the output with -o")
    if external_data == "one":
        raise OptionError("--external-data one: got stdout, which takes no data file; expected a file's name with -o")
    if skip_unchanged:
        raise OptionError("--skip-unchanged: got stdout; expected a file's name with -o")
    if report_path == "-":
        raise OptionError("--report -: got the model on stdout too; expected one of them in a file")


def _check_exclusions(given: dict[str, Any]) -> None:
    """Raise OptionError if options exclude each other."""
    given["--check"] = click.get_current_context().get_parameter_source("check") is ParameterSource.COMMANDLINE
    for one, other in (("--quiet", "--verbose"), ("--no-check", "--data"), ("--no-check", "--check")):
        if given[one] and given[other]:
            raise OptionError(f"{one} and {other} exclude each other")


def _check_lowering(options: dict[str, Any]) -> None:
    """Refuse what asks for nodes of the operator beside a lowering without any."""
    given = {"--accumulation packed": options["accumulation"] == "packed"}
    given |= {f"--enable {name}": name in options["enable"] for name in OF_OPERATORS}
    lowering = options["lowering"] or TARGETS[options["target"]].lowering
    for words, wanted in given.items():
        if wanted and lowering != "convavgpool":
            source = "" if options["lowering"] else f"; --target {options['target']} sets {lowering}"
            raise OptionError(f"{words}: got --lowering {lowering} too; expected convavgpool{source}")


def _output_path(model: str, output: str | None) -> Path | None:
    """Where to write; None for stdout."""
    if output == "-" or (output is None and model == "-"):
        return None
    return Path(output) if output else Path(model).parent / f"{Path(model).stem}.convpool.onnx"


def _outcome(files: list[Path], dry_run: bool, skipped: bool, changed: bool) -> str:
    """Say in a line what was written, or would be."""
    if skipped:
        return "written   nothing: the model is unchanged"
    same = "" if changed else ", an unchanged copy (--skip-unchanged writes none)"
    return f"{'would write' if dry_run else 'written'}   {', '.join(map(str, files))}{same}"


def _write(result: OptimizeResult, out: Path | None, external_data: Layout) -> list[Path]:
    """Write the model; the files that it needs."""
    if out is not None:
        return result.save(out, external_data=external_data)
    data = result.to_bytes()
    with output_errors("stdout:"), open(sys.stdout.fileno(), "wb", closefd=False) as stdout:  # sys.stdout may write a part
        stdout.write(data)
    return []


@click.command(
    "inspect",
    cls=group.SectionedCommand,
    examples=("convpool inspect model.onnx", "convpool inspect model.onnx --input-shape image:1x3x224x224 -v"),
)
@click.argument("model", shell_complete=group.complete_file)
@click.option(
    "--target", type=click.Choice(tuple(TARGETS)), default="any", show_default=True, help="What the result would be for."
)
@click.option("--lowering", type=click.Choice(REQUESTS), help="How pairs would be written. Default: the target's.")
@click.option(
    "--input-shape", "shapes", **SHAPE, help="Shape of an input with dynamic sizes, to count with. Repeat it for more inputs."
)
@REPORT
@click.option("-v", "--verbose", is_flag=True, help="Also show every pair left unchanged.")
def inspect_command(
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
    loaded = group.load_model(model)
    if report_path and report_path != "-":
        check_output(Path(report_path), {"the model itself": [Path(model)], "weights of the model": loaded.weight_files})
    report = optimize(loaded, target=target, lowering=lowering, check=0, input_shapes=dict(shapes)).report
    if report.summary.rewritten:
        report.hints += [
            f"on a CPU: convpool optimize {name_of(loaded)} --target cpu --time",
            f"in onnxruntime on a GPU: convpool optimize {name_of(loaded)} --target cuda",
            f"in TensorRT: convpool build {name_of(loaded)} -o {name_of(loaded, '.engine')}",
        ]
    group.write_report(report_path, report.to_json())
    show(report, make_console(stderr=report_path == "-"), verbose=verbose, preview=True)
