# SPDX-License-Identifier: Apache-2.0
"""`optimize`: the whole way from a model to its rewritten form, with the proof, the report, and what to do next."""

import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np

from convpool.check.inputs import CheckInputs, load_arrays
from convpool.check.session import evaluate, start_process
from convpool.check.verify import verified
from convpool.errors import ModelError, VerificationError
from convpool.ir.model import LoadedModel, Shapes, feeds, load, scopes_at, suggested, tensor_shapes, with_fixed, with_sizes
from convpool.options import TARGETS, OptimizeOptions, check_arguments, options_for
from convpool.pipeline import OptimizeResult, Tuner, in_reach, rewrite
from convpool.report import OF_TARGET, Report
from convpool.summary import count, recount, time_models
from convpool.types import Accumulation, Lowering, Model, Target, Upsampling


def optimize(
    model: Model,
    *,
    target: Target = "any",
    lowering: Lowering | None = None,
    upsampling: Upsampling | None = None,
    check: int = 1,
    exclude: str | Sequence[str] = (),
    enable: Iterable[str] = (),
    disable: Iterable[str] = (),
    fold: bool = False,
    accumulation: Accumulation | None = None,
    autotune: bool = False,
    time: bool | None = None,
    data: Mapping[str, np.ndarray] | str | os.PathLike[str] | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    fix_shapes: Mapping[str, Sequence[int]] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    base_dir: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> OptimizeResult:
    """Rewrite convolutions beside pooling and resizing, where exact and cheaper, and verify them.

    The algebra is that of Suita et al., JPDC 2020; see `convpool.algebra.geometry`.

    Args:
        model: A path, serialised bytes, an onnx.ModelProto (not changed), an
            onnx_graphsurgeon.Graph.
        target: The runtime of the result: "any", "cpu" (onnxruntime), "tensorrt" (with the plugin)
            or "cuda" (onnxruntime's CUDA provider with convpool's operators).  Sets rules and
            lowering.
        lowering: "convavgpool", "direct", "fused" or "auto" (direct or fused by cost).  Default:
            the target's.
        upsampling: The form of a convolution behind a nearest upsampling, where it admits this one:
            "conv_first", "fused", "subpixel", "phases" or "direct" (`convpool.algebra.expand`).
            Default: by cost.
        check: Number of random input sets to verify with, 0 for none.
        exclude: A glob pattern or several.  A pair is left unchanged if the name of its convolution
            or pooling matches one; so is a Concat.
        enable: Names of rules (`convpool.options.RULES`) to add to the target's.
        disable: Names of rules to leave out.
        fold: Run the rule fold, as `--fold` does.
        accumulation: Type in which kernels sum pooling windows of float16 and bfloat16, for all
            nodes of the operator in the result: "default", float32, or "packed", that type where a
            kernel can.  Packed is faster; its largest error in float16 is 3.9e-4 to 5.4e-4 of the
            largest result, that of "default" 3.3e-4 to 4.8e-4.  Neither float32 nor standard
            operators change.  Default: as in the model's own nodes, and "default" for new ones.
        autotune: Time the lowerings of each pair in onnxruntime here, and keep the fastest.
        time: Time original and result in onnxruntime on this machine.  Default: only with autotune.
        data: Input arrays by name or a .npz file, to verify with instead of random inputs.
        input_shapes: Shapes of inputs that the model leaves open, for verification, timing and the
            size of plain convolutions.
        fix_shapes: Shapes that inputs have in the result, where the model leaves sizes open.  Other
            inputs with sizes of the same name have them too.  The original is verified with these.
        rtol: Relative tolerance in place of the default (see `help(convpool.verify)`).
        atol: Absolute tolerance in place of the default, in the output's units.
        seed: Seed of the random inputs.
        base_dir: Folder of the external data, where `model` is no path.
        progress: Called with (done, total, "timing NAME") before a pair is timed, with (number,
            count, "checking") before each set of inputs, with (1, 1, "timing both models") before
            these are timed.

    Returns:
        The result: `save(path)` writes the model, `model` is its ModelProto, `report` lists every
        pair.

    Raises:
        ModelError: The model is unusable.
        OptionError: An argument is unusable.
        VerificationError: The results disagree.
    """
    started = perf_counter()
    check_arguments(check=check, seed=seed, rtol=rtol, atol=atol, exclude=exclude, enable=enable, disable=disable)
    check_arguments(input_shapes=input_shapes, fix_shapes=fix_shapes, base_dir=base_dir, progress=progress, autotune=autotune)
    check_arguments(time=time, fold=fold)
    options = options_for(target, lowering=lowering, exclude=exclude, enable=enable, disable=disable, fold=fold)
    arrays = load_arrays(data)  # before any work: a wrong file should fail at once
    if check or arrays is not None or autotune:
        start_process()
    original = load(model, None if base_dir is None else Path(base_dir))
    fixed, shapes = with_fixed(original, fix_shapes or {}, input_shapes or {})
    given = CheckInputs(max(check, 1), arrays, shapes, seed, rtol, atol, progress)
    given.maker(fixed.proto)  # before any work too
    options = replace(options, accumulation=accumulation, upsampling=upsampling)
    asks_sizes = autotune or "plain_conv" in options.rules or "tensorrt" in options.devices  # open ones too
    known = tensor_shapes(fixed, shapes, evaluate) if asks_sizes else {}
    reached = in_reach(fixed, options)  # a form of the model in which more pairs are seen, if there is one
    result = rewrite(fixed, options, reached, known, Tuner(seed, progress) if autotune else None)
    report = result.report
    report.options |= {"target": target, "seed": seed, "fix_shapes": {n: list(s) for n, s in (fix_shapes or {}).items()}}
    report.changed = result.changed = result.changed or fixed is not original
    if check or arrays is not None:
        report.verification = verified(original, result.loaded if result.changed else None, given)
    passed = report.verification is None or report.verification.passed
    recount(report, original, result.loaded, shapes)
    if (autotune if time is None else time) and result.changed and passed:
        time_models(report, original, result.loaded, given)
    report.hints += _next_steps(result, fixed, options, report.checked_shapes or shapes) if passed else []
    report.summary = replace(report.summary, bytes_before=original.size_bytes, seconds=perf_counter() - started)
    if report.verification is not None and not passed:
        left = "" if report.verification.differs else ", or leave the check out with --no-check"
        raise VerificationError(f"verification: {report.verification.difference}{left}", report)
    return result


TAKE_ORIGINAL = "the model was saved by onnxruntime, with operators of its own: optimize the original"
DROP_INPUTS = "initializers are inputs too, so that a caller may override them: drop these inputs first, as onnxsim does"
UNKNOWN = r"\bunknown\b|(?<!weights; got )computed,|not provably|for every size"
QUANTIZE_LATER = "run convpool with --lowering auto on the float model, and quantize the result"


def _next_steps(result: OptimizeResult, model: LoadedModel, options: OptimizeOptions, shapes: Shapes) -> list[str]:
    """Say what changes the outcome, commands last: what can be tried here is.  model: as `rewrite` got it.  shapes: if known."""
    report, seen, found = result.report, result._seen, []
    stay = [site.reason or "" for site in report.sites if site.status == "rejected"]
    replaceable = model.proto.ir_version > 3 and len(feeds(model.proto)) < len(model.proto.graph.input)
    if seen.saved:
        found.append(TAKE_ORIGINAL)
    elif seen.quantized:
        found.append(QUANTIZE_LATER)
    elif replaceable and any("may override" in reason for reason in stay):
        found.append(DROP_INPUTS)
    on_cpu = replace(options, devices=TARGETS["cpu"].devices, rules=options.rules | {"upsample_if"})
    given = suggested(model.proto, shapes)
    if not found and any(re.search(UNKNOWN, reason) for reason in stay):
        found += _preparing(report, model, options, given)
    by_size = not found and any("for every size" in reason for reason in stay)
    if report.options["target"] == "any" and (by_size or any(reason.endswith(OF_TARGET) for reason in stay)):
        more = _pairs(model, on_cpu) - report.summary.rewritten
        if more > 0:
            found.append(f"{more} more for onnxruntime on a CPU: convpool optimize {name_of(model)} --target cpu")
        elif by_size:
            found += _preparing(report, model, on_cpu, given)
    if report.summary.rewritten and report.summary.model_macs_before is None:
        if given and count(scopes_at(model, given, evaluate)).total is not None:
            words = _words("--input-shape", given)
            found.append(f"to count multiply-adds, with your sizes: convpool inspect {name_of(model)} {words}")
    return found


def _preparing(report: Report, model: LoadedModel, options: OptimizeOptions, sizes: dict[str, list[int]]) -> list[str]:
    """The least that has more pairs rewritten: constants folded, sizes fixed, or both.  Neither alone where both have none."""
    folding = replace(options, rules=options.rules | {"fold"})

    def step(shapes: dict[str, list[int]], tried: OptimizeOptions) -> list[str]:
        with suppress(ModelError):
            fixed = load(with_sizes(model.proto, shapes), model.base_dir) if shapes else model
            more = _pairs(fixed, tried) - report.summary.rewritten
            if more > 0:
                what = "with sizes that are fixed (put yours)" if shapes else "with constants folded"
                given = [_asked(report, tried), "--fold" if tried is folding else "", _words("--fix-shape", shapes)]
                return [f"{more} more {what}: convpool optimize {name_of(model)} {' '.join(filter(None, given))}"]
        return []

    both = step(sizes, folding)
    return both if not both or not sizes else step({}, folding) or step(sizes, options) or both


def _asked(report: Report, tried: OptimizeOptions) -> str:
    """The target and the lowering as options of a command, where they are not the usual ones."""
    given, lowering = str(report.options["target"]), report.options["lowering"]
    target = "cpu" if tried.devices == TARGETS["cpu"].devices else given
    words = [] if target == "any" else ["--target", target]
    return " ".join(words if lowering == TARGETS[given].lowering else [*words, "--lowering", str(lowering)])


def name_of(model: LoadedModel, suffix: str = "") -> str:
    """The model's file as a command takes it, or one beside it with another suffix."""
    path = model.path or Path("MODEL.onnx")
    name = str(path.with_suffix(suffix) if suffix else path)
    return shlex.quote(f"./{name}" if name.startswith("-") else name)


def _words(option: str, shapes: Shapes) -> str:
    return " ".join(f"{option} {shlex.quote(name + ':' + 'x'.join(map(str, shape)))}" for name, shape in shapes.items())


def _pairs(model: LoadedModel, options: OptimizeOptions) -> int:
    """How many sites of a model are rewritten."""
    return rewrite(model, options, in_reach(model, options)).report.summary.rewritten
