# SPDX-License-Identifier: Apache-2.0
"""`rewrite`: the rules over a model, stage by stage, each until nothing is found; and timing what they find (`Tuner`).

    index -> sites -> check -> plans that share no node -> apply -> index ...

The index serves every rule until something changes.  A round applies inner scopes first: changing an outer one copies its nodes
and the graphs in them.

A model may also be in a form in which the rules find no pair; another one, that means the same, is tried then:

| what stands in the way | what is done about it |
|---|---|
| local functions with a part of a pair | their calls are replaced by their nodes, see `ir.inlining` |
| Transposes | they are moved out of the way, see `rules.cuda_chain.channels_last` |

A change is tried on a copy; without a pair that appears by it the model stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, helper, numpy_helper

from convpool.algebra.expand import FORMS
from convpool.algebra.geometry import LOWERINGS
from convpool.check.inputs import InputMaker
from convpool.check.session import OnnxruntimeRunner, evaluate, time_sessions
from convpool.errors import ModelError, OptionError, OutputError
from convpool.ir import schema
from convpool.ir.edit import Editor
from convpool.ir.files import save, self_contained, serialize
from convpool.ir.index import Scope, index_model
from convpool.ir.inlining import Call, inlined
from convpool.ir.model import LoadedModel, passes_full_check
from convpool.ir.model import check as check_model
from convpool.ir.process import EndedError
from convpool.ir.protos import model_nodes, ops_of, opset_of, sparse_values
from convpool.options import OF_OPERATORS, OptimizeOptions, unmatched
from convpool.report import Log, Report, SiteReport
from convpool.rules import STAGES, Stage
from convpool.rules.base import EXCLUDED, Context, Plan, Reject, Rule, Site, is_int8, reject
from convpool.rules.cuda_chain.channels_last import ChannelsFirst
from convpool.rules.pool_first.pairs import PairPlan, PairSite
from convpool.rules.pool_first.rule import PoolFirst
from convpool.summary import Seen, count, misread, notes, survey, totals, with_macs
from convpool.types import Layout

Times = dict[str, float] | None
"""Median microseconds by alternative; None where nothing was timed."""
Found = tuple[Rule, Plan, Times]
Kept = tuple[Rule, Site, Reject, Times]
"""A plan of a round, and a site that stays, with what their reports need."""
KeptPairs = tuple[tuple[PairSite, Reject], ...]
Reached = tuple[LoadedModel, KeptPairs]
"""A model to start from; and sites of other forms of it, and why no pair appears there."""


def in_reach(model: LoadedModel, options: OptimizeOptions) -> Reached:
    """The model with more pairs in reach of the rules, as a copy; itself where there are no more."""
    if "pool_first" not in options.rules:
        return model, ()
    options = replace(options, accumulation=None, metadata=())
    first, stays = _without_calls(model, options)
    last, others = _without_transposes(first, options)
    return last, (*stays, *others)


def _without_calls(model: LoadedModel, options: OptimizeOptions) -> Reached:
    """Without the calls that have a part of a pair, or a pair that only the call's attributes make known.  First all calls are
    replaced, to see which pairs appear, then those that these need, until no fewer will do."""
    wanted: frozenset[Call] | None = None
    stays: KeptPairs = ()
    before: frozenset[tuple[str, str]] = frozenset()
    while wanted != frozenset() and (found := inlined(model.proto, wanted)) is not None:
        result = replace(model, proto=found.model, source=None)
        if wanted is None:
            before = _planned(_pairs_of(model, options)[0])
        plans, kept = _pairs_of(_without_transposes(result, options)[0], options)
        parts: set[Call] = set()
        for plan in plans:
            places = (found.places.get(plan.scope.nodes[index].name) for index in plan.convolutions)
            new = any(place is not None and place not in before for place in places)
            parts |= _parts(found.origins, plan.scope, plan.own, least=1 if new else 2)
        needed = frozenset(call[:end] for call in parts for end in range(1, len(call) + 1))
        stays += tuple((site, why) for site, why in kept if _parts(found.origins, site.scope, (site.root, site.conv)))
        if wanted is not None and needed >= wanted:
            return result, stays
        wanted = needed if wanted is None else needed & wanted
    return model, stays


def _parts(origins: dict[str, set[Call]], scope: Scope, nodes: Iterable[int], least: int = 2) -> set[Call]:
    """The calls that nodes come from, () for the model's own; none where these are fewer than `least`."""
    calls = set().union(*(origins.get(scope.nodes[index].name, {()}) for index in nodes))
    return calls if len(calls) >= least else set()


def _without_transposes(model: LoadedModel, options: OptimizeOptions) -> Reached:
    """Without the Transposes around averages, where pairs appear by that and none goes."""
    if not ops_of(model_nodes(model.proto), "Transpose"):
        return model, ()
    moved = replace(model, proto=deepcopy(model.proto), source=None)
    moved.inference = model.inference
    run = Pipeline(moved, options).run((Stage((ChannelsFirst(),)),))
    if not run.changed:
        return model, ()
    run.finish()
    moved = replace(moved)  # whose shapes are inferred anew
    (before, _), (found, stays) = (_pairs_of(one, options) for one in (model, moved))
    return moved if _planned(before) < _planned(found) else model, stays


def _pairs_of(model: LoadedModel, options: OptimizeOptions) -> tuple[list[PairPlan], KeptPairs]:
    """The pairs that would be rewritten, and the sites that would stay, each with the reason."""
    run, kept = Pipeline(model, options), list[Kept]()
    plans: list[Any] = [plan for scope in run.scopes() for _, plan, _ in run.plans(scope, [PoolFirst()], kept)]
    stays: list[Any] = [(site, why) for _, site, why, _ in kept if why is not EXCLUDED]
    return plans, tuple(stays)


def _planned(plans: Iterable[PairPlan]) -> frozenset[tuple[str, str]]:
    """Return the results of the plans' convolutions, each with its scope's path."""
    return frozenset((plan.scope.path, plan.scope.nodes[index].output[0]) for plan in plans for index in plan.convolutions)


def rewrite(
    model: LoadedModel,
    options: OptimizeOptions,
    reached: Reached | None = None,
    shapes: Mapping[str, tuple] | None = None,
    tuner: Tuner | None = None,
) -> OptimizeResult:
    """`optimize` without its check.  reached: where it starts, of `in_reach`; default the model.  shapes: see `Context`."""
    start, stays = reached or (model, ())
    result = LoadedModel(deepcopy(start.proto), model.base_dir, path=model.path, data_files=model.data_files)
    moved_back = options.lowering != "convavgpool" and schema.move_back(result.proto)  # for lower_operator
    result.inference = start.inference
    run = Pipeline(result, options, shapes=shapes, tuner=tuner)
    scopes = run.scopes()
    before, seen = count(scopes), survey(scopes)
    run.run()
    sites = _with_clearer_reasons(run.log, stays)
    after = count(run.scopes()) if run.changed else before
    run.finish()
    if not run.changed:  # then it is the model, in its own form
        result.source = model.source
        if moved_back or start is not model:
            result.proto.CopyFrom(model.proto)
            result.inference = model.inference
    nodes = [model_nodes(one.proto, without=schema.DOMAIN) for one in (model, result)]
    dense = len(sparse_values(model.proto)) - len(sparse_values(result.proto))
    if run.changed:  # every check that the model passes
        check_model(result, "the result", passes_full_check(model), model.inferred)
    summary = with_macs(totals((model, result), nodes, sites, run.log, seen), sites, before, after, {})
    report = Report(sites, summary, notes=notes(seen, sites, run.int8), changed=run.changed)
    report.options |= {"lowering": options.lowering, "accumulation": options.accumulation, "rules": sorted(options.rules)}
    report.warnings += unmatched(options.exclude, run.matched)
    if tuner is not None and "cpu" not in options.devices:
        report.warnings.append("autotune: timed on this machine's CPU, which says little of a GPU")
    if dense > 0:
        report.warnings.append(f"sparse constants: {dense} dense in the result, since the rewrite changes their numbers")
    old, new = (misread(held, opset_of(model.proto.opset_import)) for held in nodes)
    for name in sorted(new - old):
        text = "its pads are misread by onnxruntime 1.24 and earlier at opset 19 and later; run the result in 1.25 or later"
        report.warnings.append(f"AveragePool of {name!r}: {text}")
    if options.accumulation == "packed" and not summary.packed:
        report.warnings.append("accumulation packed changes nothing: the result has no node of convpool's operators")
    return OptimizeResult(result.proto, report, run.changed, result, run.editor.new_constants, seen)


def _with_clearer_reasons(log: Log, stays: KeptPairs) -> list[SiteReport]:
    """The reports, with those of sites that another form of the model shows, or tells more of."""
    clearer, sites = Log(log.made), log.reports()
    for site, why in stays:
        PoolFirst().kept(site, why, None, clearer)
    done = {(site.scope, site.conv) for site in sites if site.status != "rejected"}
    found = {(site.scope, site.conv, site.pool): site for site in clearer.reports() if (site.scope, site.conv) not in done}
    return [*(found.pop((site.scope, site.conv, site.pool), site) for site in sites), *found.values()]


class Pipeline:
    """The rules over one model, and what they found."""

    def __init__(
        self,
        model: LoadedModel,
        options: OptimizeOptions,
        *,
        shapes: Mapping[str, tuple] | None = None,
        tuner: Tuner | None = None,
    ) -> None:
        """model: changed in place.  shapes: see `Context`."""
        self._model = model
        self._scopes: list[Scope] | None = None
        self._known: list[Scope] = []
        """The index before a change that shapes have survived."""
        self._tuner = tuner
        self.log = Log(lambda name: self.editor.made(name))  # a look makes no editor
        self._exclude = options.exclude
        self.matched: set[str] = set()
        """Patterns of `options.exclude` that match a name."""
        self.changed = False
        """True if anything was rewritten."""
        self.int8 = 0
        """Convolutions rewritten that TensorRT would run in INT8."""
        self._context = Context(options, opset_of(model.proto.opset_import), self._excluded, shapes or {})

    @cached_property
    def editor(self) -> Editor:
        return Editor(self._model.proto, names=not self._context.options.for_torch)

    def scopes(self) -> list[Scope]:
        """The index of the model as it is, until `finish`, outer scopes first: made when it is asked for, and after a change."""
        if self._scopes is None:
            model = self._model
            if self._known:
                self._scopes = index_model(model.proto, model.read, evaluate, None, self._known)
            else:
                self._scopes = model.index(evaluate)
        return self._scopes

    def _update_index(self, scopes: Iterable[Scope], *, adds_tensors: bool) -> None:
        """Renew the index after a change of some scopes.  adds_tensors: by tensors that only shape inference knows."""
        if not adds_tensors and all(scope.parent is None and not scope.children for scope in scopes):
            for scope in scopes:
                scope.reload()
            return
        self._known = [] if adds_tensors else self._scopes or []
        if adds_tensors:
            self._model.changed()
        self._scopes = None

    def run(self, stages: tuple[Stage, ...] = STAGES) -> Pipeline:
        """Rewrite the model, but for `finish`."""
        options = self._context.options
        if any(map(self._context.enabled, ("image_conv", "plain_conv", "chain_conv", "chain_upsample"))):
            convolutions = ((scope.path, node.output[0]) for scope in self.scopes() for node in ops_of(scope.nodes, "Conv"))
            self._context = replace(self._context, originals=frozenset(convolutions))
        rewritten, enabled = False, options.rules.difference(() if options.lowering == "convavgpool" else OF_OPERATORS)
        for stage in stages:
            rules = [rule for rule in stage.rules if not enabled.isdisjoint(rule.names)]
            due = self.log.made_operator if stage.only_if == "operator" else rewritten or not stage.only_if
            while due and rules and self._round(stage, rules):
                rewritten, due = rewritten or stage.rewrites, stage.repeats
        return self

    def finish(self) -> None:
        """Leave the model complete and consistent where it has changed, with the accumulation asked for."""
        wanted = self._context.options.accumulation
        if wanted is not None and self.editor.accumulate(wanted, self._excluded):
            self.changed = True
        if self.changed:
            self.editor.finish(self.scopes(), self._model.inferred, self._context.options.metadata)

    def _round(self, stage: Stage, rules: list[Rule]) -> bool:
        """One look at every site; whether any was rewritten.  Sites that stay are reported only by the last round."""
        kept: list[Kept] = []
        found = [(scope, plans) for scope in self.scopes() if (plans := self.plans(scope, rules, kept))]
        if not (found and stage.repeats):
            for rule, site, why, times in kept:
                rule.kept(site, why, times, self.log)
        if found:
            self._apply(found)
            self._update_index([scope for scope, _ in found], adds_tensors=stage.adds_tensors)
            self.changed = True
        return bool(found)

    def plans(self, scope: Scope, rules: list[Rule], kept: list[Kept]) -> list[Found]:
        """Plans for one scope, none of a node that another owns.  A site in the way of another is seen again in the next round.
        kept: gets the sites that stay."""
        may_have = [rule for rule in rules if not rule.needs or not scope.op_types.isdisjoint(rule.needs)]
        sites = [(rule, site) for rule in may_have for site in rule.sites(scope, self._context)]
        verdicts = [(rule, site, rule.verdict(site, self._context)) for rule, site in sites]
        if self._tuner:
            self._tuner.expect(sum(isinstance(verdict, Plan) and rule.has_alternatives for rule, _, verdict in verdicts))
        plans: list[Found] = []
        owned: set[int] = set()
        shared: set[int] = set()
        for rule, site, verdict in verdicts:
            times: Times = None
            if isinstance(verdict, Plan):
                if verdict.own & (owned | shared) or verdict.shared & owned:
                    continue
                owned |= verdict.own
                shared |= verdict.shared
                if self._tuner and rule.has_alternatives:
                    verdict, times = self._tuner.tune(rule, site, verdict, self._context)
            if isinstance(verdict, Plan):
                plans.append((rule, verdict, times))
            elif verdict is not None:
                kept.append((rule, site, verdict, times))
        return plans

    def _apply(self, found: list[tuple[Scope, list[Found]]]) -> None:
        """Make the changes, inner scopes first, then report them, outer ones first."""
        outputs: dict[int, list[str]] = {}
        for scope, plans in reversed(found):
            self.int8 += sum(is_int8(scope, index) for _, plan, _ in plans for index in plan.convolutions)
            edit = self.editor.edit(scope, max(plan.operator_version for _, plan, _ in plans))
            for rule, plan, _ in plans:
                before = len(edit.new_nodes)
                rule.apply(plan, edit)
                outputs[id(plan)] = [node.output[0] for node in edit.new_nodes[before:] if schema.is_operator(node)]
            self.editor.commit(edit)
        for _, plans in found:
            for rule, plan, times in plans:
                rule.rewritten(plan, outputs[id(plan)], times, self.log)

    def _excluded(self, name: str) -> bool:
        """Return True if a pattern given to exclude matches a name."""
        found = {pattern for pattern in self._exclude if name and fnmatchcase(name, pattern)}
        self.matched |= found
        return bool(found)


ROUNDS = 9
BUDGET_S = 1.5
"""A site's rounds stop when this much time is spent, though not before three."""


class Tuner:
    """Chooses lowerings by timing them in onnxruntime on the machine at hand, since the best differs by layer.

    A site's nodes are cut out into a model of their own, which is optimized once per lowering.  All of them, the
    original included, then take turns, so that a drift of the machine's speed meets them alike; the median decides.
    Source: Suita et al., JPDC 2020, section 5, where too the best method differs by layer.
    """

    def __init__(self, seed: int, progress: Callable[[int, int, str], None] | None) -> None:
        self._seed, self._progress, self._done, self._expected = seed, progress, 0, 0

    def expect(self, sites: int) -> None:
        """So many more sites will be timed, for the progress shown."""
        self._expected += sites

    def tune(self, rule: Rule, site: Site, plan: Plan, context: Context) -> tuple[Plan | Reject, Times]:
        """The fastest plan, a Reject where the original is, or `plan` where none can be timed; and medians in microseconds."""
        scope, node = site.scope, site.scope.nodes[site.root]
        if self._progress:
            self._progress(self._done, self._expected, f"timing {node.name or node.output[0]}")
        self._done += 1
        candidates = rule.alternatives(site, context)
        if not candidates or plan.timed is None:
            return plan, None
        try:
            cut = _cut_out(plan.scope, *plan.timed, context)
            runners = {"original": OnnxruntimeRunner(LoadedModel(cut), "the site", optimize=True, spin=True)}
            arrays, _ = InputMaker(cut, None, {}, self._seed).runnable(0, runners["original"].values)
            for name in candidates:
                lowered = LoadedModel(_lowered(cut, rule, name))
                runners[name] = OnnxruntimeRunner(lowered, "the site", optimize=True, spin=True)
                runners[name].values(arrays)
            times = time_sessions({name: runner.session for name, runner in runners.items()}, arrays, ROUNDS, BUDGET_S)
        except (ModelError, EndedError):  # the site cannot be cut out, or onnxruntime cannot run it: there is nothing to measure
            return plan, None
        best = min(times, key=lambda name: times[name])
        if best == "original":
            expected = f"a lowering faster than {times[best]:.1f} us"
            got = ", ".join(f"{name} {value:.1f} us" for name, value in times.items() if name != best)
            return reject(scope, site.root, "measured slower", got, expected), times
        return candidates[best], times


def _cut_out(scope: Scope, indices: frozenset[int], result: str, context: Context) -> ModelProto:
    """The site's nodes as a model: constants become initializers, everything else inputs of known type."""
    nodes = [scope.nodes[index] for index in sorted(indices)]
    made = {name for node in nodes for name in node.output}
    inputs, constants = [], []
    for name in dict.fromkeys(name for node in nodes for name in node.input if name and name not in made):
        constant = scope.constant(name)
        if constant is not None:
            constants.append(numpy_helper.from_array(np.ascontiguousarray(constant.array()), name))
            continue
        info = scope.info(name)
        shape = context.shapes.get(name, info.shape)
        if not info.elem_type or shape is None:
            raise ModelError(f"{name}: type or rank unknown")
        inputs.append(helper.make_tensor_value_info(name, info.elem_type, shape))
    elem_type = scope.info(result).elem_type or inputs[0].type.tensor_type.elem_type
    output = helper.make_tensor_value_info(result, elem_type, None)
    graph = helper.make_graph(nodes, "site", inputs, [output], constants)
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", context.main_opset)])


def _lowered(model: ModelProto, rule: Rule, lowering: str) -> ModelProto:
    """A copy of a cut-out site in the lowering, or the form of an upsampling, asked for."""
    result = LoadedModel(deepcopy(model))
    options = OptimizeOptions(
        rules=frozenset(rule.names),
        lowering=lowering if lowering in LOWERINGS else "auto",
        upsampling=lowering if lowering in FORMS else None,
    )
    Pipeline(result, options).run((Stage((rule,), repeats=False),)).finish()
    return result.proto


@dataclass
class OptimizeResult:
    """A rewritten model with its report.

    Attributes:
        model: The whole ModelProto, that of `loaded` until the caller puts another there; external data stays in its files.
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
        if os.fspath(path).endswith((os.sep, f"{os.sep}.")):  # which Path drops
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
