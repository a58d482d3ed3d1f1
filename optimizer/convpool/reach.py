# SPDX-License-Identifier: Apache-2.0
"""Models in another form that means the same, where the passes find pairs only in that.

| what stands in the way | what is done about it |
|---|---|
| local functions with a part of a pair | their calls are replaced by their nodes, see `ir.inlining` |
| Transposes | they are moved out of the way, see `passes.channels_first` |

A change is tried on a copy, and made again only for the pairs that have appeared; without any the model stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from onnx import ModelProto

from convpool.check.session import evaluate
from convpool.ir.index import Scope
from convpool.ir.inlining import Call, Inlined, inlined
from convpool.ir.model import LoadedModel, infer_shapes
from convpool.ir.protos import all_nodes, is_op, model_nodes, ops_of
from convpool.options import OptimizeOptions
from convpool.pipeline import Pipeline
from convpool.rules import Stage
from convpool.rules.base import Reject
from convpool.rules.cuda_chain.channels_last import ChannelsFirst
from convpool.rules.pool_first.pairs import PairPlan, PairSite
from convpool.rules.pool_first.rule import PoolFirst

Stays = tuple[tuple[PairSite, Reject], ...]


@dataclass(frozen=True)
class Reached:
    """A model to start from.  stays: sites of other forms of it, and why no pair appears there."""

    model: LoadedModel
    stays: Stays = ()


def in_reach(model: LoadedModel, options: OptimizeOptions) -> Reached:
    """The model with more pairs in reach of the passes, as a copy; itself where there are no more."""
    if "pool_first" not in options.passes:
        return Reached(model)
    options = replace(options, accumulation=None, metadata=())
    first = _without_calls(model, options)
    last = _without_transposes(first.model, options)
    return Reached(last.model, (*first.stays, *last.stays))


def _without_calls(model: LoadedModel, options: OptimizeOptions) -> Reached:
    """Without the calls that have a part of a pair, or a pair that only the call's attributes make known."""
    wanted: frozenset[Call] | None = None
    stays: Stays = ()
    before: frozenset[tuple[str, str]] = frozenset()
    while wanted != frozenset() and (found := inlined(model.proto, wanted)) is not None:
        if wanted is None:
            before = _convolutions(_look(model, options)[0])
        result = replace(model, proto=found.model, inferred=infer_shapes(found.model), source=None)
        plans, kept = _look(_without_transposes(result, options).model, options)
        origins = _origins(found)
        parts: set[Call] = set()
        for plan in plans:
            places = (found.places.get(plan.scope.nodes[index].name) for index in plan.convolutions)
            new = any(place is not None and place not in before for place in places)
            parts |= _parts(origins, plan.scope, plan.own, least=1 if new else 2)
        needed = frozenset(call[:end] for call in parts for end in range(1, len(call) + 1))
        stays += tuple((site, why) for site, why in kept if _parts(origins, site.scope, (site.root, site.conv)))
        if wanted is not None and needed >= wanted:
            return Reached(result, stays)
        wanted = needed if wanted is None else needed & wanted
    return Reached(model, stays)


def _origins(found: Inlined) -> dict[str, set[Call]]:
    """The calls that a node comes from, with constants and Transposes in front of it, by its name; a Conv's input may stay."""
    nodes = list(all_nodes(found.model.graph))
    producer = {name: node for node in nodes for name in node.output}
    origins: dict[str, set[Call]] = {}
    for node in nodes:
        calls = origins.setdefault(node.name, set())
        calls.add(found.calls.get(node.name, ()))
        for name in node.input[1:] if is_op(node, "Conv") else node.input:
            while (source := producer.get(name)) is not None and is_op(source, "Transpose", "Identity", "Constant"):
                calls.add(found.calls.get(source.name, ()))
                name = next(iter(source.input), "")
    return origins


def _parts(origins: dict[str, set[Call]], scope: Scope, nodes: Iterable[int], least: int = 2) -> set[Call]:
    """The calls that nodes come from, () for the model's own; none where these are fewer than `least`."""
    calls = set().union(*(origins.get(scope.nodes[index].name, {()}) for index in nodes))
    return calls if len(calls) >= least else set()


def _without_transposes(model: LoadedModel, options: OptimizeOptions) -> Reached:
    """Without the Transposes between the parts of a pair."""
    wanted: frozenset[tuple[str, str]] | None = None
    stays: Stays = ()
    while (moved := _with_channels_first(model, options, wanted)) is not None:
        before, found = (_convolutions(_look(one, options)[0]) for one in (model, moved))
        if wanted is None:
            stays = _look(moved, options)[1]
        if found - before == wanted:
            return Reached(moved, stays)
        if not before < found:
            break
        wanted = found - before
    return Reached(model, stays)


def _with_channels_first(
    model: LoadedModel, options: OptimizeOptions, convolutions: frozenset[tuple[str, str]] | None
) -> LoadedModel | None:
    """A copy with Transposes moved away from behind these convolutions, None for all; None where none can be."""
    if not ops_of(model_nodes(model.proto), "Transpose"):
        return None
    result = replace(model, proto=ModelProto(), source=None)
    result.proto.CopyFrom(model.proto)
    run = Pipeline(result, result.inferred, options, evaluate)
    run.run((Stage((ChannelsFirst(convolutions),)),))
    return replace(result, inferred=infer_shapes(result.proto)) if run.changed else None


def _look(model: LoadedModel, options: OptimizeOptions) -> tuple[list[PairPlan], Stays]:
    """The pairs that would be rewritten, and the sites that would stay."""
    return Pipeline(model, model.inferred, options, evaluate).first_look(PoolFirst())


def _convolutions(plans: Iterable[PairPlan]) -> frozenset[tuple[str, str]]:
    """By what they give, each with its scope's path."""
    return frozenset((plan.scope.path, plan.scope.nodes[index].output[0]) for plan in plans for index in plan.convolutions)
