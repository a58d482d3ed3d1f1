# SPDX-License-Identifier: Apache-2.0
"""`convpool tune`: measure which tactic runs each ConvAvgPool node of a model fastest on this GPU, and write it down.

The library chooses by such measurements before its cost rule: compiled-in ones (plugin/src/tuned.def), or those of the file that
the environment variable CONVPOOL_TUNED names.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from onnx import NodeProto
from rich.progress import TimeElapsedColumn

from convpool.algebra.parts import ACCUMULATIONS, LAYOUTS
from convpool.api import optimize
from convpool.check.session import evaluate
from convpool.cli.group import SHAPE, STEPS, NamedShape, NewFile, SectionedCommand, StepBar, complete_file, load_model
from convpool.errors import ConvpoolError, OptionError, printable
from convpool.ir import schema
from convpool.ir.files import check_output, write_atomically
from convpool.ir.model import scopes_at
from convpool.ir.protos import attributes, label, named

PRECISIONS = {"fp16": "float16", "bf16": "bfloat16", "tf32": "float32", "fp32": "float32"}
MEMORY_ORDERS = {"nhwc": True, "nchw": False}
_KEYWORDS = ("kernel_shape", "strides", "pads", "dilations")


@click.command(
    "tune",
    short_help="Measure the fastest kernel of each node on this GPU, for the library to choose.",
    cls=SectionedCommand,
    examples=(
        "convpool tune model.onnx -o tuned.def",
        "convpool tune model.onnx -o tuned.def --precision tf32 --input-shape image:64x3x64x64",
        "CONVPOOL_TUNED=tuned.def trtexec --onnx=model.convpool.onnx ...   # what uses the file",
    ),
)
@click.argument("model", shell_complete=complete_file)
@click.option(
    "-o",
    "--output",
    required=True,
    type=NewFile(stdout=False),
    metavar="FILE.def",
    help="File of measurements. An existing one gains rows; those of the same problem on the same GPU are replaced.",
)
@click.option(
    "--precision",
    "precisions",
    type=click.Choice(tuple(PRECISIONS)),
    multiple=True,
    default=("fp16",),
    show_default=True,
    help="Type to compute in. Repeat it for several.",
)
@click.option(
    "--layout",
    type=click.Choice(tuple(MEMORY_ORDERS)),
    help="Order of the axes of X and Y in memory. Default: as the nodes say, and nhwc for nodes that are channels first: "
    "TensorRT reorders these in half precision.",
)
@click.option("--input-shape", "shapes", **SHAPE, help="Shape of an input with dynamic sizes. Repeat it for more inputs.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@click.version_option(package_name="convpool")
def command(
    model: str, output: str, precisions: tuple[str, ...], layout: str | None, shapes: tuple[NamedShape, ...], quiet: bool
) -> None:
    """Time every kernel of the CUDA library that runs a ConvAvgPool node of MODEL on this machine's GPU, and keep the fastest.

    MODEL is an ONNX file, optimized or not. A model without such nodes is optimized first, in memory. Needs the CUDA library and
    PyTorch.

    \b
    Exit status:
      0    measured and written
      2    no GPU, or unusable model, option or file
      130  stopped by Ctrl-C; nothing is written
    """
    from convpool.cuda import current_device, tuned

    check_output(Path(output), {"the model itself": [Path(model)]})
    problems = [
        (name, problem)
        for precision in precisions
        for name, problem in problems_of(model, dict(shapes), precision, layout).items()
    ]
    rows = []
    with StepBar(TimeElapsedColumn(), *STEPS, hidden=quiet) as bar:
        measure, device = _measuring(), current_device()
        for number, (name, problem) in enumerate(problems):
            bar.update(number, len(problems), name)
            tactic, us = measure(problem)
            rows.append(tuned.row(problem, device, tactic, us, tactic.name))
            if not quiet:
                click.echo(printable(f"{name}: {tactic.name}, {us:.1f} us"))
    write_atomically(output, tuned.merged(rows, output))
    if not quiet:
        click.echo(printable(f"written   {output}: {len(rows)} rows; CONVPOOL_TUNED={output} has the library choose by it"))


def problems_of(model: str, shapes: dict[str, list[int]], precision: str, layout: str | None = None) -> dict[str, Any]:
    """`convpool.cuda.Problem`s of the operator's nodes in the main graph of a model, each once, by "node (precision)".

    shapes: of the inputs, where the model leaves them open.  Raises OptionError where a size stays open or there is no such node.
    """
    loaded = load_model(model)
    if not any(map(schema.is_operator, loaded.proto.graph.node)):
        loaded = optimize(loaded, lowering="convavgpool", check=0).loaded
    scope = scopes_at(loaded, shapes, evaluate)[0]
    found: dict[str, Any] = {}
    for node in filter(schema.is_operator, scope.nodes):
        x, w = (scope.info(name).shape for name in node.input[:2])
        if x is None or w is None or not all(isinstance(size, int) for size in (*x, *w)):
            raise OptionError(f"{named(node)}: sizes of X; got {x}, expected numbers; give --input-shape")
        problem = _problem(node, x, w, precision, layout)
        if problem not in found.values():
            found[f"{label(node)} ({precision})"] = problem
    if not found:
        raise OptionError(f"{model}: no node of the operators; convpool inspect shows why pairs are left unchanged")
    return found


def _problem(node: NodeProto, x: tuple[Any, ...], w: tuple[Any, ...], precision: str, layout: str | None) -> Any:
    from convpool.cuda import Problem

    values, parts = attributes(node), schema.parts_of(node)
    x_last, y_last = LAYOUTS[int(values.get("channels_last", 0))]
    channels, spatial = (x[-1], x[1:-1]) if x_last else (x[1], x[2:])
    in_memory = (MEMORY_ORDERS[layout],) * 2 if layout else (x_last, y_last) if x_last or y_last else (True, True)
    names = ["channels_last" if last else "channels_first" for last in in_memory]
    geometry: dict[str, Any] = {name: tuple(values[name]) for name in _KEYWORDS}
    if parts.upsamples:
        geometry |= {"upsample": tuple(values["upsample"]), "pool_kernel_shape": 1}
    else:
        geometry |= {f"pool_{name}": tuple(values[f"pool_{name}"]) for name in _KEYWORDS}
    accumulation = next(name for name, number in ACCUMULATIONS.items() if number == values.get(schema.ACCUMULATION, 0))
    return Problem(
        n=x[0],
        c=channels,
        m=w[0],
        spatial=tuple(spatial),
        **geometry,
        group=int(values.get("group", 1)),
        dtype=PRECISIONS[precision],
        layout=names[0],
        y_layout=names[1],
        bias=True,
        residual=parts.residual,
        activation=_activation(parts.epilogue),
        alpha=parts.epilogue_alpha,
        allow_tf32=precision == "tf32",
        prologue_affine=parts.affine_number,
        prologue_activation=_activation(parts.prologue),
        prologue_alpha=parts.prologue_alpha,
        prologue_groups=parts.norm_groups,
        prologue_epsilon=parts.epsilon,
        accumulation=accumulation if PRECISIONS[precision] != "float32" else "default",
    )


def _activation(name: str) -> str | None:
    return {"": None, "LeakyRelu": "leaky_relu"}.get(name, name.lower())


def _measuring() -> Callable[[Any], tuple[Any, float]]:
    """A function that gives the fastest tactic of a problem and its microseconds.  Raises ConvpoolError without a GPU."""
    try:
        import torch
    except ImportError as error:
        raise ConvpoolError(f"tune: PyTorch cannot be imported; got {error}, expected PyTorch and an NVIDIA GPU") from error
    from convpool.cuda import CudaError, Plan, UnsupportedError, tactics
    from convpool.cuda.plan import shapes_and_types
    from convpool.cuda.timing import GraphTimer, input_sets

    if not torch.cuda.is_available():
        raise ConvpoolError("tune: no GPU; got torch.cuda.is_available() False, expected an NVIDIA GPU")
    timer = GraphTimer(torch)

    def call_of(plan: Plan, sets: list[dict[str, Any]]) -> Callable[[int], None]:
        workspace = torch.empty(max(256, plan.workspace_bytes), dtype=torch.uint8, device="cuda")
        prepared = False

        def call(i: int) -> None:
            nonlocal prepared
            plan.launch(**sets[i], workspace=workspace, weights_prepared=prepared, stream=timer.stream.cuda_stream)
            prepared = True

        return call

    def measure(problem: Any) -> tuple[Any, float]:
        wanted = {"b": problem.bias, "residual": problem.residual, "w_scale": False}
        wanted |= dict.fromkeys(("scale", "shift"), bool(problem.prologue_affine))
        tensors = {
            name: torch.randn(shape, device="cuda").to(getattr(torch, dtype))
            for name, (shape, dtype) in shapes_and_types(problem).items()
            if wanted.get(name, True)
        }
        count = input_sets(tensors["x"].nbytes, timer.l2_bytes)
        sets = [{**tensors, "x": tensors["x"].clone()} for _ in range(count)]
        best: tuple[Any, float] | None = None
        for tactic in sorted(tactics(), key=lambda tactic: tactic.family == "generic"):  # the slowest comes last
            try:
                plan = Plan(problem, tactic=tactic)
            except UnsupportedError:
                continue
            limit = best[1] if best else float("inf")
            us = timer.measure(call_of(plan, sets), count, give_up_us=1.5 * limit)["us"]
            if us < limit:
                best = tactic, us
        if best is None:
            raise CudaError(f"tune: no tactic runs {problem}")
        return best

    return measure
