# SPDX-License-Identifier: Apache-2.0
"""What a model gains: its multiply-adds and its time in onnxruntime, before and after."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from onnx import ModelProto

from convpool.check.inputs import Arrays, InputMaker, feeds
from convpool.check.runners import OnnxruntimeRunner
from convpool.check.session import Session, evaluate
from convpool.check.timing import time_sessions
from convpool.errors import ModelError
from convpool.ir.model import LoadedModel
from convpool.macs import ModelMacs, count_at
from convpool.report import Report, SiteReport, Speed, Summary

ROUNDS = 15
BUDGET_S = 5.0
"""The timing stops after so many seconds, though not before three rounds."""


def with_macs(
    summary: Summary, sites: Sequence[SiteReport], before: ModelMacs, after: ModelMacs, shapes: Mapping[str, Sequence[int]]
) -> Summary:
    """A summary with the multiply-adds of the model and of the convolutions rewritten, each counted once.

    shapes: of the inputs, where the model leaves them open.
    """
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
    if report.summary.model_macs_before is not None:
        return
    checked = report.verification.input_shapes if report.verification is not None else {}
    shapes: Mapping[str, Sequence[int]] = checked or _batches_of_one(original.proto) | dict(given)
    if shapes:
        before = count_at(original, shapes, evaluate)
        after = before if result.proto == original.proto else count_at(result, shapes, evaluate)
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
    """`measure` both models for a report; a warning where onnxruntime cannot run them."""
    if progress is not None:
        progress(1, 1, "timing both models")
    try:
        report.speed = measure(original, result, arrays, shapes, seed)
    except ModelError as error:
        report.warnings.append(f"not timed: {error}")


def measure(
    original: LoadedModel, result: LoadedModel, arrays: Arrays | None, shapes: Mapping[str, Sequence[int]], seed: int
) -> Speed:
    """Median times of both models on the same inputs, in turn, in onnxruntime as it is by default on this machine.

    arrays: in place of random inputs.  Raises ModelError where onnxruntime cannot run one of them.
    """
    runner = OnnxruntimeRunner(original, "the original", optimize=True, spin=True)
    inputs, _ = InputMaker(original.proto, arrays, shapes, seed).runnable(0, runner.values)
    threads = physical_cores()
    try:
        sessions = {
            name: Session(model, optimize=True, threads=threads, spin=True)
            for name, model in (("original", original), ("result", result))
        }
        times = time_sessions(sessions, inputs, ROUNDS, BUDGET_S)
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise ModelError(f"onnxruntime cannot time the models: {error}") from error
    used = {name: list(array.shape) for name, array in inputs.items()}
    return Speed(times["original"], times["result"], threads, used)


def physical_cores() -> int:
    """The cores that this process may use, as onnxruntime counts them by default: threads of one core are one."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            cores.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            cores.add(str(cpu))
    return len(cores)
