"""convpool-build: engines from models.

Exit status as convpool-optimize's: 0 done; 1 the outputs disagree, no engine written; 2 unusable model, option or
installation, one line on stderr.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import click
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from convpool import operator
from convpool.cli.common import SHAPE, Tolerance, json_text, run, write_report
from convpool.cli.table import make_console, show_verification
from convpool.errors import OptionError, VerificationError
from convpool.files import check_output
from convpool.inputs import load_arrays
from convpool.modelio import load
from convpool.tensorrt import PRECISIONS, TensorRTError, Timed, build_engine, build_fastest
from convpool.tensorrt.build import LOWERINGS
from convpool.tensorrt.compare import EngineRunner, ModelRunner, compare
from convpool.tensorrt.library import tensorrt_module


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model")
@click.option("-o", "--output", required=True, metavar="ENGINE", help="Where to write the engine.")
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    default="fp32",
    show_default=True,
    help="What layers may compute in; float32 inputs and outputs stay so. fp32: without TF32.",
)
@click.option("--min-shape", "least", **SHAPE, help="Smallest shape of an input with open sizes; repeat for more inputs.")
@click.option("--opt-shape", "typical", **SHAPE, help="The shape that the engine is tuned for; default the largest.")
@click.option("--max-shape", "largest", **SHAPE, help="Largest shape; default the typical one.")
@click.option("--timing-cache", metavar="FILE", help="Take layer timings from this file and add new ones to it.")
@click.option(
    "--workspace-mib",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="The most scratch memory that a layer may use.",
)
@click.option("--optimization-level", type=click.IntRange(0, 5), help="TensorRT's; the default is its own.")
@click.option(
    "--max-aux-streams",
    type=click.IntRange(min=0),
    metavar="N",
    help="Let layers that need not wait for one another run on up to N more streams; the default is TensorRT's.",
)
@click.option("--no-plugin", is_flag=True, help="Standard operators only.")
@click.option(
    "--lowering",
    type=click.Choice(LOWERINGS),
    help="Form of a rewritten pair; default the plugin's operator (convavgpool), auto with --no-plugin, fused in "
    "tf32, where 1x1 pairs stay as they are. none: as MODEL is.",
)
@click.option(
    "--stem/--no-stem",
    default=True,
    show_default=True,
    help="In fp16 the plugin also runs convolutions of images (up to 4 channels) in a model with a pair, on GPUs of "
    "compute capability 8.0 and newer with TensorRT 8.6 or 9.",
)
@click.option(
    "--plain-conv/--no-plain-conv",
    default=True,
    show_default=True,
    help="Likewise other convolutions of 64 channels and more, with at most 2.5e9 multiply-adds at --opt-shape, on "
    "GPUs of compute capability 9.0 with TensorRT 8.6 or 9.",
)
@click.option(
    "--autotune",
    is_flag=True,
    help="Build MODEL as it is and every form of its pairs, time the engines on this "
    "GPU, keep the fastest whose outputs agree; without --lowering and --layers.",
)
@click.option("--layers", is_flag=True, help="Keep intermediate tensors as outputs, for convpool-verify --layers.")
@click.option(
    "--check",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    metavar="N",
    help="Compare with onnxruntime on MODEL, on N sets of random inputs.",
)
@click.option("--data", metavar="FILE.npz", help="Compare on these inputs in place of random ones.")
@click.option("--rtol", type=Tolerance(), help="Relative tolerance; default by precision.")
@click.option("--atol", type=Tolerance(), help="Absolute tolerance; default by precision and output.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the random inputs.")
@click.option("--report", "report_path", metavar="FILE.json", help="Write what was built and compared as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@click.version_option(package_name="convpool")
def build_command(
    model,
    output,
    precision,
    least,
    typical,
    largest,
    timing_cache,
    workspace_mib,
    optimization_level,
    max_aux_streams,
    no_plugin,
    lowering,
    stem,
    plain_conv,
    autotune,
    layers,
    check,
    data,
    rtol,
    atol,
    seed,
    report_path,
    quiet,
) -> None:
    """Build a TensorRT engine from MODEL, run it, and compare it with onnxruntime on MODEL.

    MODEL is optimized first; one that has the operator's nodes already is built as it is, so that --stem and --plain-conv change
    nothing there, and --lowering direct or fused is refused.

    Exit status: 0 written; 1 the outputs differ, nothing written; 2 unusable model, option or installation.
    """
    out = Path(output)
    arrays = load_arrays(data)
    original = load(Path(model))
    read = {
        "the model itself": [Path(model)],
        "weights of the model": original.weight_files,
        "--data": [Path(data)] if data else [],
    }
    outputs = [Path(path) for path in (output, report_path, timing_cache) if path]
    for number, path in enumerate(outputs):
        check_output(path, {**read, "another output": outputs[:number]})
    profile = _profile(dict(least), dict(typical), dict(largest))
    if autotune and (lowering or layers):
        raise OptionError(f"--autotune: got --{'lowering' if lowering else 'layers'} too; expected one of them")
    checked = check or arrays is not None
    if checked or autotune:
        _check_can_run("timed" if autotune else "checked")
    started, timed = time.perf_counter(), None
    with _Progress(quiet) as progress:
        options = {
            "precision": precision,
            "profiles": profile,
            "timing_cache": timing_cache,
            "workspace_bytes": workspace_mib << 20,
            "optimization_level": optimization_level,
            "max_aux_streams": max_aux_streams,
            "plugin": not no_plugin,
            "stem": stem,
            "plain_conv": plain_conv,
            "progress": progress.update,
        }
        if autotune:
            timed = build_fastest(original, **options)
        engines = timed.engines if timed else {"": build_engine(original, lowering=lowering, layers=layers, **options)}
    seconds = time.perf_counter() - started
    verification = None
    for form, engine in engines.items():  # the fastest first
        if checked:
            verification = compare(
                ModelRunner(original, layers=layers),
                EngineRunner(engine),
                check=max(check, 1),
                data=arrays,
                precision=precision,
                rtol=rtol,
                atol=atol,
                seed=seed,
            )
        if verification is None or verification.passed:
            break
        if timed:
            timed.left_out[form] = verification.difference
    kept = form if verification is None or verification.passed else None
    by_plugin, by_tensorrt = _shares(engine.built_from, not no_plugin)
    report = json_text(
        {
            "model": model,
            "engine": output,
            "precision": precision,
            "plugin": not no_plugin,
            "build_seconds": seconds,
            "engine_bytes": len(engine.plan),
            "plugin_nodes": by_plugin,
            "other_nodes": by_tensorrt,
            "verification": verification and asdict(verification),
            "autotune": timed and {"lowering": kept, "times_us": timed.times_us, "left_out": timed.left_out},
        }
    )
    write_report(report_path, report)
    if timed and not quiet:
        _show_times(timed, kept)
    if verification is not None:
        if not quiet:
            show_verification(verification, make_console(stderr=False))
        if not verification.passed:
            raise VerificationError(f"verification: {verification.difference}")
    engine.save(out)
    if not quiet:
        console = make_console(stderr=False)
        console.print(f"plugin    {_counted(by_plugin)}; TensorRT: {_counted(by_tensorrt)}", soft_wrap=True, markup=False)
        console.print(
            f"written   {out} ({len(engine.plan) / 2**20:.1f} MiB, {precision}, {seconds:.0f} s)", soft_wrap=True, markup=False
        )


def main() -> None:
    """Entry point of convpool-build."""
    sys.exit(run(build_command, "convpool-build"))


def _profile(least: dict, typical: dict, largest: dict):
    """One profile of every input named; what is left out is as large as the next one given."""
    profile = {}
    for name in dict.fromkeys((*least, *typical, *largest)):
        most = largest.get(name) or typical.get(name) or least[name]
        middle = typical.get(name) or most
        profile[name] = (least.get(name) or middle, middle, most)
    for name, shapes in profile.items():
        if len({len(shape) for shape in shapes}) != 1 or any(
            not low <= mid <= high for low, mid, high in zip(*shapes, strict=True)
        ):
            raise OptionError(
                f"shapes of '{name}'; got {' / '.join('x'.join(map(str, s)) for s in shapes)}, "
                "expected the same rank and smallest <= typical <= largest"
            )
    return profile or None


def _check_can_run(what_for: str) -> None:
    """Before the minutes of a build whose engine could then not be run."""
    tensorrt_module()
    if importlib.util.find_spec("pycuda") is None:
        without = "say --check 0" if what_for == "checked" else "leave out --autotune"
        raise TensorRTError(f"pycuda: not installed, but the engine is run to be {what_for}; pip install pycuda, or {without}")


def _shares(nodes: Counter[str], plugin: bool) -> tuple[dict[str, int], dict[str, int]]:
    """What of the nodes the plugin runs, and what TensorRT does, by operator."""
    ours = {name: count for name, count in sorted(nodes.items()) if plugin and name in operator.OP_TYPES}
    return ours, {name: count for name, count in sorted(nodes.items()) if name not in ours}


def _counted(nodes: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in nodes.items()) or "nothing"


def _show_times(timed: Timed, kept: str | None) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("lowering", "us", "over MODEL", ""):
        table.add_column(column, justify="right" if column in ("us", "over MODEL") else "left")
    original = timed.times_us.get("none")
    for form, value in timed.times_us.items():
        over = f"{original / value:.2f}" if original else ""
        left_out = escape(timed.left_out.get(form, ""))
        table.add_row(form, f"{value:.1f}", over, f"left out: {left_out}" if left_out else "kept" if form == kept else "")
    for form, reason in timed.left_out.items():
        if form not in timed.times_us:
            table.add_row(form, "", "", escape(f"left out: {reason}"))
    make_console(stderr=False).print(table)


class _Progress:
    """What TensorRT is at, on stderr; nothing if `hidden` or where stderr is no terminal."""

    def __init__(self, hidden: bool) -> None:
        columns = (SpinnerColumn(), TextColumn("building"), TimeElapsedColumn(), TextColumn("{task.description}"))
        console = make_console(stderr=True)
        self._bar = Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal)
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, phase: str, done: int, total: int) -> None:
        """Show the phase that TensorRT reports."""
        self._bar.update(self._task, description=escape(f"{phase} {done}/{total}" if total else phase))
