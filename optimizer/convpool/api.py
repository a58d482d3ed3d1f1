"""`optimize`: the whole way from a model to its rewritten form, with the proof and the report."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import numpy as np
from onnx import ModelProto

from convpool import autotune as tuning
from convpool.algebra.lowering import REQUESTS
from convpool.check.inputs import load_arrays
from convpool.check.session import evaluate
from convpool.check.verify import compare, unchanged
from convpool.errors import OptionError, VerificationError
from convpool.ir import schema
from convpool.ir.index import Scope, index_model
from convpool.ir.model import LoadedModel, infer_shapes, load, passes_full_check, save
from convpool.ir.model import check as check_model
from convpool.ir.protos import is_op, label, opset_of, subgraphs
from convpool.passes import absorb, alone, conv_pool, pool_conv
from convpool.passes.absorption import Absorption
from convpool.passes.concat import repeats
from convpool.passes.conv_pool import Site
from convpool.plan import Plan, Reject, conv_leaves, tree_nodes
from convpool.report import Report, SiteReport, Summary
from convpool.rewrite import Rewriter, read_instead

MIN_OPSET = 7
"""The first opset whose AveragePool can count its padding."""


@dataclass
class OptimizeResult:
    """A rewritten model with its report.  `model` is the whole ModelProto; external data stays in its files."""

    model: ModelProto
    report: Report
    changed: bool
    _loaded: LoadedModel
    _new_constants: set[str]

    @property
    def loaded(self) -> LoadedModel:
        """The rewritten model with the folder of its external data."""
        return self._loaded

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to `path` atomically; external data is linked or copied beside it.  Raises OutputError."""
        save(self._loaded, Path(path), self._new_constants)

    def move_to_domain(self, domain: str) -> None:
        """Give the model's nodes of convpool's operators, and their functions, another domain (`--domain`)."""
        if schema.move_to_domain(self.model, domain):
            self._loaded.source = None  # no longer what was read


def optimize(
    model: object,
    *,
    lowering: str = "convavgpool",
    check: int = 1,
    exclude: str | Sequence[str] = (),
    fuse_pool_conv: bool = False,
    stem: bool = False,
    plain_conv: bool = False,
    prologue: bool = True,
    epilogue: bool = True,
    concat: bool = True,
    autotune: bool = False,
    data: Mapping[str, np.ndarray] | str | os.PathLike[str] | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    base_dir: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> OptimizeResult:
    """Rewrite every convolution followed by average pooling that is exact to rewrite and pays, and verify the result.

    model: a path, serialised bytes, an onnx.ModelProto (not changed) or a gs.Graph.
    lowering: "convavgpool", "direct", "fused" or "auto" (direct or fused by cost).
    check: number of random input sets to verify with, 0 for none.
    exclude: a glob pattern or several; a site whose convolution's or pooling's name matches one stays as it is, and a Concat
        whose name does.
    fuse_pool_conv: also make one node of AveragePool followed by Conv; saves traffic on a GPU, no arithmetic.
    stem: in a model with a pair made a ConvAvgPool, also make one of each convolution of an image of at most 4 channels, with
        a window of one element, or with an AveragePool in front that `fuse_pool_conv` could take; saves TensorRT a copy of the
        image, no arithmetic.
    plain_conv: in such a model, also make one, with a window of one element, of each other convolution of 64 channels and more
        whose kernel has more than one element; for GPUs on which the plugin's kernels are faster than TensorRT's.
    prologue, epilogue: with lowering "convavgpool", also take in what stands before and behind the pairs.
    concat: in a model with such pairs, also let Concats of channels that begin as an earlier one does read its result.
    autotune: time the lowerings of each site in onnxruntime here, and keep the fastest.
    data: input arrays by name or a .npz file, to verify with instead of random inputs.
    input_shapes: shapes of inputs that the model leaves open, for verification, timing and the size of plain convolutions.
    rtol, atol: tolerances in place of the defaults (see `help(convpool.verify)`); seed: of the random inputs.
    base_dir: folder of the external data, where `model` is no path.
    progress: called with (done, total, what) while timing.

    Raises ModelError (unusable model), OptionError (unusable argument), VerificationError (results disagree).
    Source of the algebra: Suita et al., JPDC 2020; see `convpool.algebra.geometry`.
    """
    started = time.perf_counter()
    if lowering not in REQUESTS:
        raise OptionError(f"lowering: got {lowering!r}, expected one of {', '.join(REQUESTS)}")
    if check < 0:
        raise OptionError(f"check: got {check}, expected 0 or more")
    if seed < 0:
        raise OptionError(f"seed: got {seed}, expected 0 or more")
    arrays = load_arrays(data)  # before any work: a wrong file should fail at once
    original = load(model, Path(base_dir) if base_dir is not None else None)
    result = LoadedModel(ModelProto(), original.base_dir, 0, data_files=original.data_files)
    result.proto.CopyFrom(original.proto)
    patterns = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    run = _Run(result, original.inferred, lowering, patterns, fuse_pool_conv)
    if autotune:
        run.tuner = tuning.Tuner(original, input_shapes or {}, seed, progress)
    if plain_conv:
        run.sizes = tuning.given_shapes(original, input_shapes or {})
    run.alone = tuple(kind for kind, on in zip(alone.KINDS, (stem, plain_conv), strict=True) if on)
    run.phases = tuple(name for name, on in (("epilogue", epilogue), ("prologue", prologue)) if on)
    run.to_fixpoint()
    if run.changed and concat:
        run.join_once()
    if run.changed:
        _check_result(original, result)
    else:
        result.source = original.source
    summary = _summary(original, result, run.reports(), run.concats)
    report = Report(run.reports(), summary, options={"lowering": lowering, "seed": seed})
    outcome = OptimizeResult(result.proto, report, run.changed, result, run.new_constants)
    if check or arrays is not None:
        shapes = dict(input_shapes or {})
        if run.changed:
            verification = compare(original, result, max(check, 1), arrays, shapes, rtol, atol, seed)
        else:
            verification = unchanged(original, arrays, shapes, seed)
        report.verification = verification
        if not verification.passed:
            report.summary = replace(report.summary, seconds=time.perf_counter() - started)
            raise VerificationError(f"verification: {verification.difference}", report)
    report.summary = replace(report.summary, seconds=time.perf_counter() - started)
    return outcome


class _Run:
    """The passes over one model, and what they found."""

    def __init__(
        self, model: LoadedModel, inferred: ModelProto | None, lowering: str, exclude: Sequence[str], reverse: bool
    ) -> None:
        self._model, self._inferred, self._lowering = model, inferred, lowering
        self._exclude, self._reverse = exclude, reverse
        self._rewritten: list[SiteReport] = []
        self._kept: list[SiteReport] = []
        self.tuner: tuning.Tuner | None = None
        self.new_constants: set[str] = set()
        self.changed = False
        self.concats = 0
        self.alone: tuple[str, ...] = ()
        """Which convolutions without a pair become nodes of the operator too, of `alone.KINDS`."""
        self.sizes: dict[str, tuple] = {}
        """Shapes of the main graph's tensors, as a caller gives the inputs."""
        self.phases: tuple[str, ...] = ()
        """What nodes of the operator take in, in this order."""
        self._given_by: dict[tuple[str, str], int] = {}
        """Which report tells of the operator's node that gives a tensor of a scope."""

    def to_fixpoint(self) -> None:
        """Apply the passes until nothing more is found; each rewrite lowers the cost, so this ends."""
        rewriter = Rewriter(self._model.proto, self._model.read, evaluate)
        inferred = self._inferred
        originals = self._convolutions() if self.alone else set()
        while self._one_pass(rewriter, inferred, self._pairs):
            self.changed = True
            inferred = infer_shapes(self._model.proto)
            self._kept = []  # the next pass sees them again
        if originals and self._given_by and self._one_pass(rewriter, inferred, partial(self._alone, originals)):
            inferred = infer_shapes(self._model.proto)
        for phase in self.phases if self._lowering == "convavgpool" else ():
            while self._absorb(rewriter, inferred, phase):
                self.changed = True
                inferred = infer_shapes(self._model.proto)
        if self.changed:
            rewriter.finish()
            rewriter.annotate(inferred)
        self.new_constants = rewriter.new_constants

    def join_once(self) -> None:
        """Let Concats read the result of an earlier one that joins what they begin with."""
        for scope in index_model(self._model.proto, self._model.read, evaluate):
            found = repeats(scope, self._named)
            read_instead(scope, found)
            self.concats += len(found)

    def reports(self) -> list[SiteReport]:
        """One report per convolution of every candidate, rewritten ones first."""
        return [*self._rewritten, *self._kept]

    def _one_pass(
        self, rewriter: Rewriter, inferred: ModelProto | None, verdicts_of: Callable[[Scope, int], Iterator[tuple]]
    ) -> bool:
        """Rewrite what `verdicts_of` a scope, given the main opset, has a Plan for; whether there was any."""
        main_opset = opset_of(self._model.proto.opset_import)
        found: list[tuple[Scope, list[Plan], list[list[SiteReport]]]] = []
        for scope in index_model(self._model.proto, self._model.read, evaluate, inferred):
            plans: list[Plan] = []
            reports: list[list[SiteReport]] = []
            taken: set[int] = set()
            verdicts = list(verdicts_of(scope, main_opset))
            if self.tuner:
                self.tuner.expected += sum(isinstance(verdict, Plan) for _, verdict in verdicts)
            for site, verdict in verdicts:
                times: dict[str, float] | None = None
                if isinstance(verdict, Plan):
                    nodes = {*verdict.pooling.nodes, *tree_nodes(verdict.tree)}
                    if nodes & taken:
                        continue  # the next pass sees it again
                    taken |= nodes
                    plan: Plan | Reject = verdict
                    if self.tuner:
                        plan, times = self.tuner.tune(verdict, self._lowering, main_opset)
                    if isinstance(plan, Plan):
                        plans.append(plan)
                        reports.append(_rewritten(plan, times))
                        continue
                    verdict = plan
                if not rewriter.made(scope.nodes[site.root].output[0]):
                    self._kept.append(_kept(site, verdict, times))
            if plans:
                found.append((scope, plans, reports))
        # Inner scopes first: applying plans to an outer one copies its nodes, and the graphs in them.
        outputs = [rewriter.apply(scope, plans) for scope, plans, _ in reversed(found)]
        for (scope, _, reports), made in zip(found, reversed(outputs), strict=True):
            for report, names in zip(reports, made, strict=True):
                self._remember(scope, report, names)
        return bool(found)

    def _remember(self, scope: Scope, reports: list[SiteReport], outputs: list[str]) -> None:
        """Keep reports of one plan, whose nodes of the operator give `outputs`."""
        rest = iter(outputs)
        for report in reports:
            if report.lowering == "convavgpool":
                self._given_by[scope.path, next(rest)] = len(self._rewritten)
                report = replace(report, operator=schema.OP_TYPE)
            self._rewritten.append(report)

    def _absorb(self, rewriter: Rewriter, inferred: ModelProto | None, phase: str) -> bool:
        """One pass over the operator's nodes; whether any took something in."""
        found: list[tuple[Scope, list[Absorption]]] = []
        left: dict[int, list[Reject]] = {}
        for scope in index_model(self._model.proto, self._model.read, evaluate, inferred):
            plans: list[Absorption] = []
            changed: set[int] = set()
            leaving: set[int] = set()
            for index, node in enumerate(scope.nodes):
                if not schema.is_operator(node) or self._named(label(node)):
                    continue
                plan, rejects = absorb.check(scope, index, phase, self._named)
                own = {index, *plan.downstream, *([plan.scaled.node] if plan.scaled else [])} if plan else set()
                number = self._given_by.get((scope.path, node.output[0]))
                if rejects and number is not None:
                    left[number] = rejects
                if plan is None or own & (changed | leaving) or changed & set(plan.upstream):
                    continue  # if it was only in the way of another, the next pass sees it again
                changed |= own
                leaving |= set(plan.upstream)
                plans.append(plan)
                self._tell(scope, plan)
            if plans:
                found.append((scope, plans))
        for scope, plans in reversed(found):  # inner ones first, as above
            rewriter.absorb(scope, plans)
        for number, rejects in left.items() if not found else ():
            site = self._rewritten[number]
            self._rewritten[number] = replace(site, beside=(*site.beside, *map(str, rejects)))
        return bool(found)

    def _tell(self, scope: Scope, plan: Absorption) -> None:
        """Note in the report of a node of the operator what it took in; one that an earlier run wrote gets a report."""
        node = scope.nodes[plan.node]
        number = self._given_by.pop((scope.path, node.output[0]), None)
        if number is None:
            number = len(self._rewritten)
            self._rewritten.append(
                SiteReport(label(node), label(node), "conv_avg_pool", "rewritten", "convavgpool", None, None, None, scope.path)
            )
        site = self._rewritten[number]
        saved = None if plan.saved_bytes is None else plan.saved_bytes + (site.saved_bytes or 0)
        upstream = len(plan.upstream)
        absorbed = (*plan.names[:upstream], *site.absorbed, *plan.names[upstream:])
        self._rewritten[number] = replace(site, operator=plan.parts.op_type, absorbed=absorbed, saved_bytes=saved)
        self._given_by[scope.path, plan.output] = number

    def _pairs(self, scope: Scope, main_opset: int):
        for site in conv_pool.sites(scope):
            if self._excluded(site):
                yield site, None
            elif scope.opset < MIN_OPSET:
                yield site, Reject("model", "opset", str(scope.opset), f"at least {MIN_OPSET}")
            else:
                verdict = conv_pool.check(site, self._lowering, main_opset)
                convs = conv_leaves(verdict.tree) if isinstance(verdict, Plan) else ()
                if any(self._named(label(scope.nodes[leaf.node])) for leaf in convs):
                    yield site, None
                elif verdict is not None:
                    yield site, verdict
        if self._reverse and self._lowering == "convavgpool" and scope.opset >= MIN_OPSET:
            for site in pool_conv.sites(scope):
                yield site, None if self._excluded(site) else pool_conv.check(site, main_opset)

    def _alone(self, originals: set[tuple[str, str]], scope: Scope, main_opset: int):
        for site in alone.sites(scope, self.alone):
            if (scope.path, scope.nodes[site.conv].output[0]) in originals:  # and not what a pair has become
                sizes = {} if scope.path else self.sizes
                yield site, None if self._excluded(site) else alone.check(site, main_opset, self._named, sizes)

    def _convolutions(self) -> set[tuple[str, str]]:
        """What the model's convolutions give, each with its scope's path."""
        scopes = index_model(self._model.proto, self._model.read, evaluate)
        return {(scope.path, node.output[0]) for scope in scopes for node in scope.nodes if is_op(node, "Conv")}

    def _excluded(self, site: Site) -> bool:
        return any(name and self._named(name) for name in site.names)

    def _named(self, name: str) -> bool:
        """Whether a pattern given to exclude matches."""
        return any(fnmatchcase(name, pattern) for pattern in self._exclude)


def _rewritten(plan: Plan, times: dict[str, float] | None) -> list[SiteReport]:
    pool = label(plan.scope.nodes[plan.pooling.root]) if plan.pooling.nodes else ""
    return [
        SiteReport(
            label(plan.scope.nodes[leaf.node]),
            pool,
            plan.pattern,
            "rewritten",
            lowering.name,
            None,
            lowering.macs_before,
            lowering.macs_after,
            plan.scope.path,
            times,
        )
        for leaf, lowering in zip(conv_leaves(plan.tree), plan.lowerings, strict=True)
    ]


def _kept(site: Site, verdict: Reject | None, times: dict[str, float] | None) -> SiteReport:
    """Report of a site that stays: rejected with a reason, or excluded (no verdict)."""
    conv, pool = site.names
    status, reason = ("excluded", "excluded by name") if verdict is None else ("rejected", str(verdict))
    macs = conv_pool.macs(site)
    return SiteReport(conv, pool, site.pattern, status, None, reason, macs, macs, site.scope.path, times)


def _summary(original: LoadedModel, result: LoadedModel, reports: list[SiteReport], concats: int) -> Summary:
    status = Counter(report.status for report in reports)
    return Summary(
        status["rewritten"],
        status["rejected"],
        status["excluded"],
        sum(report.macs_before or 0 for report in reports),
        sum(report.macs_after or 0 for report in reports),
        _operators(original.proto),
        _operators(result.proto),
        original.size_bytes or original.proto.ByteSize(),
        result.proto.ByteSize(),
        0.0,
        concats,
    )


def _operators(model: ModelProto) -> dict[str, int]:
    """How often each operator occurs, the bodies of convpool's own left out."""
    counts: Counter[str] = Counter()

    def visit(nodes) -> None:
        for node in nodes:
            counts[node.op_type] += 1
            for _, _, graph in subgraphs(node):
                visit(graph.node)

    visit(model.graph.node)
    for function in model.functions:
        if function.domain != schema.DOMAIN:
            visit(function.node)
    return dict(sorted(counts.items()))


def _check_result(original: LoadedModel, result: LoadedModel) -> None:
    """The result must pass every check that the original passes."""
    check_model(result, "the result", full=passes_full_check(original))
