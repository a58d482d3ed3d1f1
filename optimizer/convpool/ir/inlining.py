# SPDX-License-Identifier: Apache-2.0
"""Calls of model-local functions replaced by the functions' nodes: those that are asked for, and no others.

A call is named by what it gives first, with the calls around it before that: ("h",) is one of the main graph or of a body in it,
("h", "a") the one that gives a in the function that the first one calls.  `onnx.inliner` takes all calls of a function or none.
"""

from collections import Counter
from collections.abc import Container, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, defs, helper

from convpool.errors import ModelError
from convpool.ir import protos
from convpool.ir.schema import is_own

Call = tuple[str, ...]
MAX_NODES = 500_000
"""Most nodes once functions are expanded.  onnx's checker takes half a minute for these; large models have 20,000."""
MAX_INLINED = 100_000
"""Most nodes of a model whose calls are replaced: functions that call others twice, and these again, grow without end."""


@dataclass
class Inlined:
    """A copy of a model without some calls.  calls: that a node comes from, by its name; origins: these, and those of constants
    and Transposes in front of it; places: a node's function and first result there."""

    model: ModelProto
    calls: dict[str, Call] = field(default_factory=dict)
    origins: dict[str, set[Call]] = field(default_factory=dict)
    places: dict[str, tuple[str, str]] = field(default_factory=dict)


def check_functions(model: ModelProto) -> int:
    """The nodes that the main graph stands for once functions are expanded; 0 without functions.  Raises ModelError for functions
    that older onnx crashes on, or that keep every onnx busy for minutes: two of one name, one that calls itself, directly or not,
    and calls that stand for more than MAX_NODES nodes."""
    calls: dict[protos.Key, Counter[protos.Key]] = {}
    for function in model.functions:
        key = protos.key_of(function)
        if key in calls:
            raise ModelError(f"function '{function.domain}::{function.name}': defined twice; expected once")
        calls[key] = _called(function)
    sorter = TopologicalSorter({key: filter(calls.__contains__, called) for key, called in calls.items()})
    nodes: dict[protos.Key, int] = {}  # that a call stands for, at most MAX_NODES + 1
    try:
        for key in sorter.static_order():
            nodes[key] = _expanded(calls[key], nodes)
    except CycleError as error:
        domain, name, _ = error.args[1][-1]
        raise ModelError(f"function '{domain}::{name}': it calls itself; got a circle, expected none") from error
    count = _expanded(_called(model.graph), nodes) if nodes else 0
    if count > MAX_NODES:
        raise ModelError(f"functions: their calls stand for too many nodes; got more than {MAX_NODES}, expected no more")
    return count


def _called(holder: GraphProto | FunctionProto) -> Counter[protos.Key]:
    return Counter(map(protos.key_of, protos.all_nodes(holder)))


def _expanded(called: Counter[protos.Key], nodes: Mapping[protos.Key, int]) -> int:
    """Nodes that these stand for once functions are expanded, at most MAX_NODES + 1."""
    return min(MAX_NODES + 1, 1 + sum(count * nodes.get(name, 1) for name, count in called.items()))


def inlined(model: ModelProto, calls: Container[Call] | None = None) -> Inlined | None:
    """A copy in which these calls, None for all, are replaced; None where there is none that can be.  convpool's own functions
    stay, those whose operators have other versions than the model's, and those of the standard domain: onnxruntime runs the
    operator of the name.  Functions that nothing calls any more go.  None, too, for more than MAX_INLINED nodes."""
    functions = {protos.key_of(function): function for function in model.functions}
    usable = {k for k, f in functions.items() if k[0] not in protos.STANDARD_DOMAINS and _fits(f, model) and not is_own(f)}
    is_called = bool(usable) and any(protos.key_of(node) in usable for node in protos.all_nodes(model.graph))
    if not is_called or check_functions(model) > MAX_INLINED:
        return None
    result = Inlined(deepcopy(model))
    _Inliner(result, {key: functions[key] for key in usable}, calls).run(result.model.graph)
    before = set(map(protos.key_of, protos.model_nodes(model)))
    uncalled = [function for key, function in functions.items() if key not in before]
    roots = (result.model.graph, *protos.training_graphs(model), *uncalled)
    called = (protos.key_of(function) for root in roots for function in protos.called_by(root, result.model))
    kept = functions.keys() - before | {*called}
    protos.refill(result.model.functions, [part for part in result.model.functions if protos.key_of(part) in kept])
    result.origins = _origins(result)
    return result


def _origins(found: Inlined) -> dict[str, set[Call]]:
    """The calls that a node comes from, with constants and Transposes in front of it, by its name; a Conv's input may stay."""
    nodes = protos.all_nodes(found.model.graph)
    producer = {name: node for node in nodes for name in node.output}
    origins: dict[str, set[Call]] = {}
    for node in nodes:
        calls = origins.setdefault(node.name, set())
        calls.add(found.calls.get(node.name, ()))
        for name in node.input[1:] if protos.is_op(node, "Conv") else node.input:
            while (source := producer.get(name)) is not None and protos.is_op(source, "Transpose", "Identity", "Constant"):
                calls.add(found.calls.get(source.name, ()))
                name = next(iter(source.input), "")
    return origins


def _fits(function: FunctionProto, model: ModelProto) -> bool:
    """Return True if a function's operators mean the same by the model's imports."""
    theirs = {entry.domain: entry.version for entry in function.opset_import}
    ours = {entry.domain: entry.version for entry in model.opset_import}
    other = {domain for domain, version in theirs.items() if ours.get(domain, version) != version}
    local = {*protos.STANDARD_DOMAINS, *(entry.domain for entry in model.functions)}
    other &= {node.domain for node in protos.all_nodes(function)} - local
    old, new = protos.opset_of(function.opset_import), protos.opset_of(model.opset_import)
    kinds = {node.op_type for node in protos.all_nodes(function) if node.domain in protos.STANDARD_DOMAINS}
    return not other and (old == new or all(_since(kind, old) == _since(kind, new) for kind in kinds))


def _since(op_type: str, opset: int) -> int | None:
    try:
        return defs.get_schema(op_type, opset).since_version
    except defs.SchemaError:
        return None


class _Inliner:
    """Replaces calls in one model, from the outside inwards."""

    def __init__(self, result: Inlined, functions: dict[protos.Key, FunctionProto], calls: Container[Call] | None) -> None:
        self._result, self._functions, self._calls = result, functions, calls
        self._names = protos.value_names(result.model)

    def run(self, graph: GraphProto, around: Call = ()) -> None:
        """Replace the calls of a graph and of the bodies in it.  around: the call that the graph comes from."""
        protos.refill(graph.node, [new for node in graph.node for new in self._replaced(node, _first(node), around)])

    def _replaced(self, node: NodeProto, name: str, around: Call, path: str = "") -> Iterator[NodeProto]:
        """Yield a node's final replacement.  name: its first output in the function of `path`."""
        call, function = (*around, name), self._functions.get(protos.key_of(node))
        if function is None or self._calls is not None and call not in self._calls:
            copy = deepcopy(node)
            for _, _, graph in protos.subgraphs(copy):
                self.run(graph, around)
            if around:
                self._result.calls[copy.name] = around
            if path:
                self._result.places[copy.name] = path, name
            yield copy
            return
        known = {entry.domain for entry in self._result.model.opset_import}
        self._result.model.opset_import.extend(entry for entry in function.opset_import if entry.domain not in known)
        for inner, given in self._body(node, function):
            yield from self._replaced(inner, given, call, f"function {function.name}")

    def _body(self, node: NodeProto, function: FunctionProto) -> Iterator[tuple[NodeProto, str]]:
        """The function's nodes with the call's tensors and attributes, each with what it gives first in the function."""
        names = dict.fromkeys(function.input, "") | dict(zip(function.input, node.input, strict=False))
        values = {item.name: item for item in (*function.attribute_proto, *node.attribute)}
        made = {name for inner in function.node for name in inner.output}
        handed_on = []
        for name, wanted in zip(function.output, node.output, strict=False):
            if wanted and name in made and name not in names:
                names[name] = wanted
            elif wanted:
                handed_on.append((name, wanted))
        for inner in function.node:
            copy = deepcopy(inner)
            self._rename(copy, protos.label(node), names, values)
            yield copy, _first(inner)
        for name, wanted in handed_on:
            fresh = protos.fresh_name(f"{protos.label(node)}/{name}", self._names)
            yield helper.make_node("Identity", [names[name]], [wanted], name=fresh), wanted

    def _rename(self, node: NodeProto, around: str, names: dict[str, str], values: dict[str, AttributeProto]) -> None:
        """Give a node of a function its names in the call, and the attributes that it refers to.  around: the call's name.
        names: of the tensors; what the node gives comes to them.  values: the attributes."""
        node.name = protos.fresh_name(f"{around}/{protos.label(node)}", self._names)
        node.input[:] = [names.get(name, name) for name in node.input]
        for _, _, graph in protos.subgraphs(node):
            own = [value.name for value in (*graph.input, *graph.initializer)]
            own += [tensor.values.name for tensor in graph.sparse_initializer]
            inside = names | {name: protos.fresh_name(f"{around}/{name}", self._names) for name in own}
            for inner in graph.node:
                self._rename(inner, around, inside, values)
            for value in (*graph.input, *graph.initializer, *graph.output, *graph.value_info):
                value.name = inside.get(value.name, value.name)
            for tensor in graph.sparse_initializer:
                tensor.values.name = inside[tensor.values.name]
        for name in filter(None, node.output):
            if name not in names:
                names[name] = protos.fresh_name(f"{around}/{name}", self._names)
        node.output[:] = [names.get(name, name) for name in node.output]
        attributes = []
        for attribute in node.attribute:
            given = values.get(attribute.ref_attr_name) if attribute.ref_attr_name else attribute
            if given is not None:
                attributes.append(deepcopy(given))
                attributes[-1].name = attribute.name
        protos.refill(node.attribute, attributes)


def _first(node: NodeProto) -> str:
    return next(filter(None, node.output), "")
