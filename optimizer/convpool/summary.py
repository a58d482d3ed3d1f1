# SPDX-License-Identifier: Apache-2.0
"""The gain of a model: multiply-adds, time in onnxruntime before and after, and what to do next.

A step is named only if it changes the outcome: what can be tried here is.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from onnx import ModelProto

from convpool.check.inputs import Arrays, InputMaker, shapes_of
from convpool.check.session import OnnxruntimeRunner, Session, evaluate, time_sessions
from convpool.errors import ModelError
from convpool.ir.model import LoadedModel, load
from convpool.ir.shapes import feeds, scopes_at, with_sizes
from convpool.macs import ModelMacs, count
from convpool.options import TARGETS, OptimizeOptions
from convpool.report import Report, SiteReport, Speed, Summary
from convpool.rules.seen import Seen

ROUNDS = 15
BUDGET_S = 5.0
"""The timing stops after so many seconds, though not before three rounds."""


def with_macs(
    summary: Summary, sites: Sequence[SiteReport], before: ModelMacs, after: ModelMacs, shapes: Mapping[str, Sequence[int]]
) -> Summary:
    """A summary with the multiply-adds of the model, at these shapes, and of the convolutions rewritten, each counted once."""
    names = {(site.scope, site.conv) for site in sites if site.status == "rewritten"}
    rewritten = [node for node in before.convolutions if (node.scope, node.name) in names]
    first, total, left = before.of(rewritten), before.total, after.total
    return replace(
        summary,
        convolutions=len(before.convolutions),
        rewritten_convolutions=len(rewritten),
        rewritten_macs_before=first,
        # All else is as it was.
        rewritten_macs_after=None if first is None or total is None or left is None else first - total + left,
        model_macs_before=total,
        model_macs_after=left,
        counted_shapes={name: list(shape) for name, shape in shapes.items()} if total is not None else {},
        batch=before.batch,
    )


def recount(report: Report, original: LoadedModel, result: LoadedModel, given: Mapping[str, Sequence[int]]) -> None:
    """Count a model that leaves sizes open: with those of the check, else with those given, else with a batch of 1."""
    batches = _batches_of_one(original.proto)
    shapes: Mapping[str, Sequence[int]] = report.checked_shapes or batches | dict(given)
    if report.summary.model_macs_before is not None and report.summary.model_macs_after is not None:
        counted = {name: list(shape) for name, shape in shapes.items()} if batches else {}
        report.summary = replace(report.summary, counted_shapes=counted)
    elif shapes:
        before = count(scopes_at(original, shapes, evaluate))
        after = before if result.proto == original.proto else count(scopes_at(result, shapes, evaluate))
        report.summary = with_macs(report.summary, report.sites, before, after, shapes)


def _batches_of_one(model: ModelProto) -> dict[str, Sequence[int]]:
    """Shapes of the inputs whose first axis alone is open, with 1 there."""
    shapes: dict[str, Sequence[int]] = {}
    for value in feeds(model):
        dims = value.type.tensor_type.shape.dim
        if dims and not dims[0].dim_value > 0 and all(dim.dim_value > 0 for dim in dims[1:]):
            shapes[value.name] = [1, *(dim.dim_value for dim in dims[1:])]
    return shapes


def time_models(
    report: Report,
    original: LoadedModel,
    result: LoadedModel,
    arrays: Arrays | None,
    shapes: Mapping[str, Sequence[int]],
    seed: int,
    progress: Callable[[int, int, str], None] | None,
) -> None:
    """Report median times of both models in turn, in onnxruntime as it is by default here; a warning where one cannot run."""
    if progress is not None:
        progress(1, 1, "timing both models")
    runner, threads = OnnxruntimeRunner(original, "the original", optimize=True, spin=True), physical_cores()
    try:
        inputs, _ = InputMaker(original.proto, arrays, shapes, seed).runnable(0, runner.values)
    except ModelError as error:
        report.warnings.append(f"not timed: {error}")
        return
    models = {"original": original, "result": result}
    try:
        sessions = {name: Session(model, optimize=True, threads=threads, spin=True) for name, model in models.items()}
        times = time_sessions(sessions, inputs, ROUNDS, BUDGET_S)
    except Exception as error:  # onnxruntime's exceptions share no base class
        report.warnings.append(f"not timed: onnxruntime cannot time the models: {error}")
    else:
        report.speed = Speed(times["original"], times["result"], threads, shapes_of(inputs))


def physical_cores() -> int:
    """The cores that this process may use, as onnxruntime counts them by default: threads of one core are one."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            cores.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


Rewrite = Callable[[LoadedModel, OptimizeOptions], int]
"""How many sites of a model are rewritten."""
SAVED = "the model was saved by onnxruntime, with operators of its own: optimize the original"
QUANTIZE_LATER = "run convpool with --lowering auto on the float model, and quantize the result"
SUGGESTED_SIZE = 224
"""Stands for open sizes but the first in a command that is suggested."""


def next_steps(
    report: Report,
    seen: Seen,
    model: LoadedModel,
    options: OptimizeOptions,
    shapes: Mapping[str, Sequence[int]],
    rewrite: Rewrite,
) -> list[str]:
    """Say what changes the outcome, commands last.  model: as it was rewritten.  shapes: known ones of its inputs."""
    found = []
    stay = [site.reason or "" for site in report.sites if site.status == "rejected"]
    if seen.saved:
        found.append(SAVED)
    elif seen.quantized:
        found.append(QUANTIZE_LATER)
    on_cpu = replace(options, devices=TARGETS["cpu"].devices)
    if not found and any(re.search(r"\bunknown\b|computed tensor|not provably|for every size", reason) for reason in stay):
        found += _preparing(report, model, options, suggested(model.proto, shapes), rewrite)
        if not found and report.options["target"] == "any" and any("for every size" in reason for reason in stay):
            found += _preparing(report, model, on_cpu, suggested(model.proto, shapes), rewrite)
    if report.options["target"] == "any" and any(reason.endswith("for this target") for reason in stay):
        more = rewrite(model, on_cpu) - report.summary.rewritten
        if more > 0:
            found.append(f"{more} more for onnxruntime on a CPU: convpool optimize {name_of(model)} --target cpu")
    if report.summary.rewritten and report.summary.model_macs_before is None:
        given = suggested(model.proto, shapes)
        if given and count(scopes_at(model, given, evaluate)).total is not None:
            words = _words("--input-shape", given)
            found.append(f"to count multiply-adds, with your sizes: convpool inspect {name_of(model)} {words}")
    return found


def _preparing(
    report: Report, model: LoadedModel, options: OptimizeOptions, sizes: dict[str, list[int]], rewrite: Rewrite
) -> Iterator[str]:
    """The least that has more pairs rewritten: constants folded, sizes fixed, or both."""
    folding = replace(options, passes=options.passes | {"fold"})
    for shapes, tried in (({}, folding), (sizes, options), (sizes, folding)):
        if not shapes and tried is options:
            continue
        with suppress(ModelError):
            fixed = load(with_sizes(model.proto, shapes), model.base_dir) if shapes else model
            more = rewrite(fixed, tried) - report.summary.rewritten
            if more > 0:
                what = "with sizes that are fixed (put yours)" if shapes else "with constants folded"
                given = [_asked(report, tried), "--fold" if tried is folding else "", _words("--fix-shape", shapes)]
                yield f"{more} more {what}: convpool optimize {name_of(model)} {' '.join(filter(None, given))}"
                return


def _asked(report: Report, tried: OptimizeOptions) -> str:
    """The target and the lowering as options of a command, where they are not the usual ones."""
    given, lowering = str(report.options["target"]), report.options["lowering"]
    target = "cpu" if tried.devices == TARGETS["cpu"].devices else given
    words = [] if target == "any" else ["--target", target]
    return " ".join(words if lowering == TARGETS[given].lowering else [*words, "--lowering", str(lowering)])


def suggested(model: ModelProto, known: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Shapes for inputs with open sizes: those known, else 1 for the first and its name; none for an input of size 0."""
    shapes = {value.name: value.type.tensor_type.shape.dim for value in feeds(model)}
    batches = {dims[0].dim_param for dims in shapes.values() if dims} - {""}
    found = {}
    for name, dims in shapes.items():
        is_empty = any(dim.HasField("dim_value") and dim.dim_value == 0 for dim in dims)
        if any(dim.dim_value <= 0 for dim in dims) and not is_empty:
            sizes = [1 if not axis or dim.dim_param in batches else SUGGESTED_SIZE for axis, dim in enumerate(dims)]
            found[name] = list(known.get(name) or [max(dim.dim_value, 0) or n for dim, n in zip(dims, sizes, strict=True)])
    return found


def name_of(model: LoadedModel, suffix: str = "") -> str:
    """The model's file as a command takes it, or one beside it with another suffix."""
    path = model.path or Path("MODEL.onnx")
    name = str(path.with_suffix(suffix) if suffix else path)
    return shlex.quote(f"./{name}" if name.startswith("-") else name)


def _words(option: str, shapes: Mapping[str, Sequence[int]]) -> str:
    return " ".join(f"{option} {shlex.quote(name + ':' + 'x'.join(map(str, shape)))}" for name, shape in shapes.items())
