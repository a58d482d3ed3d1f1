# SPDX-License-Identifier: Apache-2.0
"""`optimize`: the whole way from a model to its rewritten form, with the proof and the report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from onnx import ModelProto

from convpool.check.inputs import Given, load_arrays
from convpool.check.judge import Verification
from convpool.check.session import evaluate, prepare
from convpool.check.verify import NO_MEMORY, compare_models, unchanged
from convpool.errors import ModelError, OptionError, OutputError, VerificationError
from convpool.ir import schema
from convpool.ir.files import save, self_contained, serialize
from convpool.ir.model import LoadedModel, load, passes_full_check, tensor_shapes, with_fixed
from convpool.ir.model import check as check_model
from convpool.ir.protos import sparse_values
from convpool.options import OptimizeOptions, check_arguments, options_for, unmatched
from convpool.pipeline import Pipeline, Reached, Stays, Tuner, in_reach
from convpool.report import Log, Report, SiteReport
from convpool.rules.pool_first.rule import PoolFirst
from convpool.summary import Seen, count, misread, next_steps, notes, recount, survey, time_models, totals, with_macs
from convpool.types import Accumulation, Layout, Lowering, Model, Target, Upsampling


@dataclass
class OptimizeResult:
    """A rewritten model with its report.

    Attributes:
        model: The whole ModelProto; external data stays in its files.
        report: Every site, the totals, the check and the hints.
        changed: True if the model differs from the original.
        loaded: The model with the folder of its external data.
    """

    model: ModelProto = field(repr=False)
    report: Report = field(repr=False)
    changed: bool
    loaded: LoadedModel = field(repr=False)
    _new_constants: set[str] = field(repr=False)
    _seen: Seen = field(repr=False)

    @property
    def graph(self) -> Any:
        """The model as a new `onnx_graphsurgeon.Graph`, with its external data in it.

        Raises:
            OptionError: onnx-graphsurgeon is not installed.
            ModelError: The model is above 2 GB.
        """
        try:
            import onnx_graphsurgeon as gs
        except ImportError as error:
            raise OptionError("graph: onnx-graphsurgeon is not installed; pip install onnx-graphsurgeon") from error
        self.loaded.check_data()
        return gs.import_onnx(self_contained(self.model, self.loaded.base_dir))

    def save(self, path: str | os.PathLike[str], *, external_data: Layout = "auto", skip_unchanged: bool = False) -> list[Path]:
        """Write the model to `path` atomically.

        The original's own files are never linked to or changed.

        Args:
            path: The model's file.
            external_data: Where weights go that the original has in data files, and all weights of
                a model too large for one file.  "auto": into the model where it fits protobuf's 2
                GB, otherwise as "one".  "one": into one file beside the model, of its name with
                .data.  "keep": into copies of the original's files; a model saved under the name
                that it was loaded from goes on to use these.
            skip_unchanged: Write nothing, and return no files, if the model has not changed.

        Returns:
            All the files that the model needs, itself first.

        Raises:
            OutputError: A file cannot be written.
            ModelError: A data file of the original has changed since it was loaded.
            OptionError: `external_data` is unknown.
        """
        if skip_unchanged and not self.changed:
            return []
        if os.fspath(path).endswith(os.sep):  # which Path drops
            raise OutputError(f"{path}: a folder; expected a file name")
        return save(replace(self.loaded, proto=self.model), Path(path), self._new_constants, external_data)

    def to_bytes(self) -> bytes:
        """Return the model as one file's content, with its external data in it.

        Raises:
            ModelError: The model is above 2 GB, or a data file of the original has changed.
        """
        self.loaded.check_data()
        return serialize(self_contained(self.model, self.loaded.base_dir))

    def move_to_domain(self, domain: str) -> None:
        """Give the model's nodes of convpool's operators, and their functions, another domain (`--domain`)."""
        if schema.move_to_domain(self.model, domain):
            self.loaded.source = None  # no longer what was read
            self.changed = self.report.changed = True


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
        prepare()
    original = load(model, None if base_dir is None else Path(base_dir))
    loaded, shapes = with_fixed(original, fix_shapes or {}, input_shapes or {})
    options = replace(options, accumulation=accumulation, upsampling=upsampling)
    sized = autotune or "plain_conv" in options.passes or "tensorrt" in options.devices
    sizes = tensor_shapes(loaded, shapes, evaluate) if sized else {}
    given = Given(max(check, 1), arrays, shapes, seed, rtol, atol, progress)
    given.maker(loaded.proto)  # before any work too
    start = in_reach(loaded, options)  # a form of the model in which more pairs are seen, if there is one
    result = rewrite(loaded, options, sizes, Tuner(seed, progress) if autotune else None, start)
    report = result.report
    report.options |= {"target": target, "seed": seed, "fix_shapes": {n: list(s) for n, s in (fix_shapes or {}).items()}}
    report.changed = result.changed = result.changed or loaded is not original
    if check or arrays is not None:
        report.verification = _verified(original, result, given)
    passed = report.verification is None or report.verification.passed
    recount(report, original, result.loaded, shapes)
    if (autotune if time is None else time) and result.changed and passed:
        time_models(report, original, result.loaded, given)
    report.hints += next_steps(report, result._seen, loaded, options, report.checked_shapes or shapes, _pairs) if passed else []
    report.summary = replace(report.summary, bytes_before=original.size_bytes, seconds=perf_counter() - started)
    if report.verification is not None and not passed:
        left = "" if report.verification.differs else ", or leave the check out with --no-check"
        raise VerificationError(f"verification: {report.verification.difference}{left}", report)
    return result


def _pairs(model: LoadedModel, options: OptimizeOptions) -> int:
    """How many sites of a model are rewritten; `next_steps` asks this of changes that it may name."""
    return rewrite(model, options, {}, reached=in_reach(model, options)).report.summary.rewritten


def _verified(original: LoadedModel, result: OptimizeResult, given: Given) -> Verification:
    """`compare_models`, or `unchanged` where that is so; errors say how to go on."""
    try:
        if result.changed:
            return compare_models(original, result.loaded, given)
        return unchanged(original, given)
    except ModelError as error:
        if str(error).startswith(("onnxruntime cannot load the original", "onnxruntime cannot run the original")):
            raise ModelError(f"{error}; check=0 (--no-check) skips the check") from error
        raise
    except MemoryError as error:
        raise ModelError(f"{NO_MEMORY}, or check=0 (--no-check)") from error


def rewrite(
    original: LoadedModel,
    options: OptimizeOptions,
    sizes: Mapping[str, tuple],
    tuner: Tuner | None = None,
    reached: Reached | None = None,
) -> OptimizeResult:
    """`optimize` without its check.  sizes: see `Context`.  reached: where it starts, of `in_reach`; default the original."""
    reached = reached or Reached(original)
    result = LoadedModel(deepcopy(reached.model.proto), original.base_dir, 0, path=original.path, data_files=original.data_files)
    moved = options.lowering != "convavgpool" and schema.move_back(result.proto)
    run = Pipeline(result, reached.model.inferred, options, sizes=sizes, tuner=tuner)
    scopes = run.scopes()
    before, seen = count(scopes), survey(scopes)
    run.run()
    after = count(run.scopes()) if run.changed else before
    run.finish()
    if run.changed:
        # Every check that the original passes.
        check_model(result, "the result", full=passes_full_check(original), inferred=original.inferred)
    else:
        result.source = original.source
        if moved or reached.model is not original:
            result.proto.CopyFrom(original.proto)
    sites = _with_clearer_reasons(run.log, reached.stays)
    summary = with_macs(totals(original, result, sites, run.log, seen), sites, before, after, {})
    report = Report(sites, summary, notes=notes(seen, sites, run.int8), changed=run.changed)
    report.options |= {"lowering": options.lowering, "accumulation": options.accumulation, "rules": sorted(options.passes)}
    report.warnings += unmatched(options.exclude, run.matched)
    if tuner is not None and "cpu" not in options.devices:
        report.warnings.append("autotune: timed on this machine's CPU, which says little of a GPU")
    if (dense := len(sparse_values(original.proto)) - len(sparse_values(result.proto))) > 0:
        report.warnings.append(f"sparse constants: {dense} dense in the result, since the rewrite changes their numbers")
    for name in sorted(misread(result.proto) - misread(original.proto)):
        text = "its pads are misread by onnxruntime 1.24 and earlier at opset 19 and later; run the result in 1.25 or later"
        report.warnings.append(f"AveragePool of {name!r}: {text}")
    if options.accumulation == "packed" and not summary.packed:
        report.warnings.append("accumulation packed changes nothing: the result has no node of convpool's operators")
    return OptimizeResult(result.proto, report, run.changed, result, run.new_constants, seen)


def _with_clearer_reasons(log: Log, stays: Stays) -> list[SiteReport]:
    """The reports, with those of sites that another form of the model shows, or tells more of."""
    clearer, sites = Log(log.made), log.reports()
    for site, why in stays:
        PoolFirst().kept(site, why, None, clearer)
    done = {(site.scope, site.conv) for site in sites if site.status != "rejected"}
    found = {(site.scope, site.conv, site.pool): site for site in clearer.reports() if (site.scope, site.conv) not in done}
    return [*(found.pop((site.scope, site.conv, site.pool), site) for site in sites), *found.values()]
