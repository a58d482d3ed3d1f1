# SPDX-License-Identifier: Apache-2.0
"""What to do next about a model.  A step is named only if it changes the outcome: what can be tried here is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from onnx import ModelProto

from convpool.check.inputs import feeds
from convpool.check.session import evaluate
from convpool.errors import ModelError
from convpool.ir.input_sizes import with_sizes
from convpool.ir.model import LoadedModel, load
from convpool.macs import count_at
from convpool.options import TARGETS, OptimizeOptions
from convpool.passes.seen import Seen
from convpool.report import Report

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
    """What changes the outcome, in words for a user; commands stand at the end.

    model: as it was rewritten.  shapes: known ones of its inputs.
    """
    found = []
    stay = [site.reason or "" for site in report.sites if site.status == "rejected"]
    if seen.saved:
        found.append(SAVED)
    elif seen.quantized:
        found.append(QUANTIZE_LATER)
    elif any(re.search(r"\bunknown\b|computed tensor|not provably", reason) for reason in stay):
        found += _preparing(report, model, options, suggested(model.proto, shapes), rewrite)
    if report.summary.rewritten and report.summary.model_macs_before is None:
        given = suggested(model.proto, shapes)
        if given and count_at(model, given, evaluate).total is not None:
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
                given = [_asked(report), "--fold" if tried is folding else "", _words("--fix-shape", shapes)]
                yield f"{more} more {what}: convpool optimize {name_of(model)} {' '.join(filter(None, given))}"
                return


def _asked(report: Report) -> str:
    """The target and the lowering as options of a command, where they are not the usual ones."""
    target, lowering = str(report.options["target"]), report.options["lowering"]
    words = [] if target == "any" else ["--target", target]
    return " ".join(words if lowering == TARGETS[target].lowering else [*words, "--lowering", str(lowering)])


def suggested(model: ModelProto, known: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Shapes for the inputs whose sizes are open: those known, else 1 for the first size, and for a name that is one."""
    shapes = {value.name: value.type.tensor_type.shape.dim for value in feeds(model)}
    batches = {dims[0].dim_param for dims in shapes.values() if dims} - {""}
    found = {}
    for name, dims in shapes.items():
        if any(dim.dim_value <= 0 for dim in dims):
            sizes = [1 if not axis or dim.dim_param in batches else SUGGESTED_SIZE for axis, dim in enumerate(dims)]
            found[name] = list(known.get(name) or [max(dim.dim_value, 0) or n for dim, n in zip(dims, sizes, strict=True)])
    return found


def name_of(model: LoadedModel) -> str:
    """The model's file as a shell takes it."""
    return shlex.quote(str(model.path)) if model.path is not None else "MODEL.onnx"


def _words(option: str, shapes: Mapping[str, Sequence[int]]) -> str:
    return " ".join(f"{option} {shlex.quote(name + ':' + 'x'.join(map(str, shape)))}" for name, shape in shapes.items())
