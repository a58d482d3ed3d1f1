# SPDX-License-Identifier: Apache-2.0
"""Walks over ONNX protobufs: nodes, attributes, subgraphs and stored tensors, at any depth; and `in_order`, the one change made
to a model on loading: each node follows those that it reads from."""

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from graphlib import CycleError, TopologicalSorter
from itertools import chain, count
from typing import Any, TypeVar

import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TypeProto, helper

from convpool.errors import ModelError

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
"""Types that convolutions and averages have."""
HALF_TYPES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
INTEGERS = (TensorProto.INT64, TensorProto.INT32)
WIDE = (*INTEGERS, TensorProto.FLOAT, TensorProto.DOUBLE)
"""Types that hold any size."""
UNIT_ROUNDOFF: dict[int, float] = dict(zip(FLOATS, (2.0**-24, 2.0**-11, 2.0**-8, 2.0**-53), strict=True))
"""Largest relative error of a number that is rounded to a type."""
STANDARD_DOMAINS = ("", "ai.onnx")
"""Both names of the domain of the standard operators."""
Holder = TypeVar("Holder", GraphProto, FunctionProto)


def is_op(node: NodeProto, *op_types: str) -> bool:
    """Return True if `node` is one of the standard operators named."""
    return node.op_type in op_types and node.domain in STANDARD_DOMAINS


def ops_of(nodes: Iterable[NodeProto], *op_types: str) -> list[NodeProto]:
    """Return the nodes that are one of the standard operators named."""
    return [node for node in nodes if node.op_type in op_types and node.domain in STANDARD_DOMAINS]


def constants_of(nodes: Iterable[NodeProto]) -> list[tuple[str, Any]]:
    """The names of Constants, each with a tensor or numbers."""
    found = [(name, a) for node in ops_of(nodes, "Constant") for name in node.output for a in node.attribute]
    return [(name, a.t if a.type == a.TENSOR else a.floats or a.ints) for name, a in found]


def takes_more(starts: Iterable[int], ends: Iterable[int], axes: Iterable[int], steps: Iterable[int]) -> bool:
    """Return True if a Slice goes back to the first element in onnxruntime, but may take none by onnx: up to INT_MAX, or from
    where a short axis has none.  Its inputs behind the map, in their order; the axes do not matter."""
    slices = zip(starts, ends, steps, strict=False)
    return any(step < 0 and (start < -1 or end in (2**31 - 1, 2**63 - 1)) for start, end, step in slices)


def label(node: NodeProto) -> str:
    """The node's name, or its first output's where it has none."""
    return node.name or next((name for name in node.output if name), node.op_type)


def named(node: NodeProto) -> str:
    """The operator and `label`, as messages have them."""
    return f"{node.op_type} '{label(node)}'"


def stand_for(node: NodeProto, old: NodeProto) -> None:
    """Give a node the name, doc string, metadata and devices of the one in whose place it stands."""
    notes = NodeProto()
    notes.CopyFrom(old)
    unset = ["input", "output", "op_type", "domain", "overload", "attribute"]
    with suppress(UnicodeDecodeError):  # a text that is no UTF-8 is copied, but cannot be read
        unset += [name for name in ("name", "doc_string") if not getattr(old, name)]
    for name in unset:
        notes.ClearField(name)
    node.MergeFrom(notes)


class AttributeReference(Exception):
    """An attribute takes its value from the function that the node stands in, so it is unknown here."""


def attributes(node: NodeProto) -> dict[str, Any]:
    """The node's attributes as Python values.  Raises AttributeReference where one refers to a function's."""
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            raise AttributeReference(attribute.name)
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def known_attributes(node: NodeProto) -> dict[str, Any] | None:
    """The node's attributes as Python values; None where one refers to a function's."""
    with suppress(AttributeReference):
        return attributes(node)
    return None


Key = tuple[str, str, str]
"""A function's domain, name and overload."""


def key_of(part: NodeProto | FunctionProto) -> Key:
    """The key of a function, or of the one that a node calls."""
    return part.domain, part.op_type if isinstance(part, NodeProto) else part.name, part.overload


def refill(field: Any, entries: Iterable[Any]) -> None:
    """Give a repeated field of messages these entries in place of its own, which may be among them."""
    kept = list(entries)
    del field[:]
    field.extend(kept)


def give(node: NodeProto, values: Mapping[str, Any], instead_of: Collection[str] = ()) -> None:
    """Give a node attributes, last of all, in place of those of their names and of the names `instead_of`."""
    kept = [item for item in node.attribute if item.name not in values and item.name not in instead_of]
    refill(node.attribute, [*kept, *(helper.make_attribute(name, value) for name, value in values.items())])


def subgraphs(node: NodeProto) -> list[tuple[int, int, GraphProto]]:
    """The graphs in a node's attributes, with the attribute's index and the position in it."""
    found = []
    for position, attribute in enumerate(node.attribute):
        if attribute.type == onnx.AttributeProto.GRAPH:
            found.append((position, 0, attribute.g))
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            found += [(position, index, graph) for index, graph in enumerate(attribute.graphs)]
    return found


def graphs_within(graph: Holder) -> list[Holder | GraphProto]:
    """`graph`, or a function, and every graph in its nodes' attributes, at any depth, in a fixed order."""
    found: list[Holder | GraphProto] = [graph]
    for node in graph.node:
        for _, _, inner in subgraphs(node):
            found += graphs_within(inner)
    return found


def holders(model: ModelProto, without: str | None = None) -> list[GraphProto | FunctionProto]:
    """Every graph anywhere in the model, and every function, but those of the domain `without`; none of its training."""
    functions = (function for function in model.functions if function.domain != without)
    return [inner for holder in (model.graph, *functions) for inner in graphs_within(holder)]


def training_graphs(model: ModelProto) -> list[GraphProto]:
    """The graphs of the model's training information, and every graph in them; they read the main graph's initializers."""
    graphs = (graph for training in model.training_info for graph in (training.initialization, training.algorithm))
    return [inner for graph in graphs for inner in graphs_within(graph)]


def tensors(model: ModelProto) -> list[TensorProto]:
    """Every tensor stored in the model: initializers and Constant values, those of subgraphs, functions and training included."""
    found: list[TensorProto] = []
    for proto in (*holders(model), *training_graphs(model)):
        stored, defaults = (proto.initializer, ()) if isinstance(proto, GraphProto) else ((), proto.attribute_proto)
        found += stored
        for attribute in (*defaults, *(attribute for node in proto.node for attribute in node.attribute)):
            if attribute.HasField("t"):
                found.append(attribute.t)
            found += attribute.tensors
    return found


def sparse_values(model: ModelProto) -> list[TensorProto]:
    """The numbers of every sparse tensor stored in the model, which `tensors` leaves out."""
    found = [tensor.values for graph in graphs_within(model.graph) for tensor in graph.sparse_initializer]
    attributes = (attribute for node in model_nodes(model) for attribute in node.attribute)
    return found + [attribute.sparse_tensor.values for attribute in attributes if attribute.HasField("sparse_tensor")]


def all_nodes(proto: GraphProto | FunctionProto) -> list[NodeProto]:
    """The nodes of a graph or function and of the graphs in their attributes, each before those in it."""
    return nodes_within(proto.node)


def nodes_within(nodes: Iterable[NodeProto]) -> list[NodeProto]:
    """Nodes, and those of the graphs in their attributes, each before those in it."""
    return [found for node in nodes for found in (node, *nodes_within(n for _, _, body in subgraphs(node) for n in body.node))]


def model_nodes(model: ModelProto, without: str | None = None) -> list[NodeProto]:
    """Every node anywhere in the model, functions included, but those of the domain `without`."""
    return [node for holder in holders(model, without) for node in holder.node]


def called_by(caller: GraphProto | FunctionProto, model: ModelProto) -> list[FunctionProto]:
    """The functions of a model that a graph or one of them calls, directly or not."""
    functions, found = {key_of(function): function for function in model.functions}, dict[Key, FunctionProto]()
    pending = [caller]
    while pending:
        keys = sorted(set(map(key_of, all_nodes(pending.pop()))) & functions.keys() - found.keys())
        found |= {key: functions[key] for key in keys}
        pending += [functions[key] for key in keys]
    return [*found.values()]


def opset_of(imports: Iterable[OperatorSetIdProto]) -> int:
    """Version of the standard operators that `imports` names; 0 if none."""
    return max((entry.version for entry in imports if entry.domain in STANDARD_DOMAINS), default=0)


ONNXRUNTIMES = {"LayerNormalization": 17, "SimplifiedLayerNormalization": 2**31}
"""Operators that onnxruntime has and writes into models before the opset in which onnx has them; results have the shape of X."""


def of_onnxruntime(model: ModelProto) -> list[NodeProto]:
    """The nodes of standard operators that onnxruntime alone has at the model's opset."""
    return ops_of(model_nodes(model), *(name for name, since in ONNXRUNTIMES.items() if opset_of(model.opset_import) < since))


def value_names(model: ModelProto) -> set[str]:
    """Every tensor and node name anywhere in the model, functions included, also of tensors that are only noted."""
    names: set[str] = set()
    for proto in (*holders(model), *training_graphs(model)):
        names.update(value.name for value in proto.value_info)
        if isinstance(proto, GraphProto):
            names.update(value.name for value in (*proto.input, *proto.output, *proto.initializer))
            names.update(tensor.values.name for tensor in proto.sparse_initializer)
        else:
            names.update((*proto.input, *proto.output))
        for node in proto.node:
            names.add(node.name)
            names.update(node.input)
            names.update(node.output)
    return names


def fresh_name(wanted: str, names: set[str]) -> str:
    """A name that is none of `names`, and one of them from then on: `wanted`, with a number behind it if that is there."""
    numbered = (f"{wanted}_{number}" for number in count(1))
    name = next(name for name in chain((wanted,), numbered) if name not in names)
    names.add(name)
    return name


def tell_apart(model: ModelProto) -> dict[str, str]:
    """Give what a body makes names that no graph in front of it has; the old ones by the new.  onnx keeps the values of sizes by
    name alone, so that one branch gets those of another."""
    old: dict[str, str] = {}
    taken = value_names(model)
    for holder in (model.graph, *model.functions):
        seen: set[str] = {*holder.input} if isinstance(holder, FunctionProto) else set()
        for number, graph in enumerate(graphs_within(holder)):
            made = {name for node in graph.node for name in node.output if name}
            if isinstance(graph, GraphProto):
                made.update(value.name for value in (*graph.input, *graph.initializer))
                made.update(tensor.values.name for tensor in graph.sparse_initializer)
            names = {name: fresh_name(f"{name}_{number}", taken) for name in sorted(made & seen)}
            if names:
                rename(graph, names)
            old |= {new: old.get(name, name) for name, new in names.items()}
            seen |= made | {*names.values()}
    return old


def rename(graph: GraphProto, names: Mapping[str, str]) -> None:
    """Give tensors of a graph other names, there and in the bodies in it."""
    for inner in (found for found in graphs_within(graph) if isinstance(found, GraphProto)):
        weights = (*inner.initializer, *(tensor.values for tensor in inner.sparse_initializer))
        for value in (*inner.input, *inner.output, *inner.value_info, *weights):
            value.name = names.get(value.name, value.name)
        for note in inner.quantization_annotation:
            note.tensor_name = names.get(note.tensor_name, note.tensor_name)
        for node in inner.node:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]


def side_by_side(model: ModelProto, inferred: ModelProto) -> list[tuple[GraphProto, GraphProto, dict[str, TypeProto]]]:
    """Each graph of a model, outer ones first, it after shape inference, and the types known there by tensor."""
    pairs = zip(graphs_within(model.graph), graphs_within(inferred.graph), strict=True)
    return [(own, typed, {v.name: v.type for v in (*typed.value_info, *typed.input, *typed.output)}) for own, typed in pairs]


def types_within(inferred: ModelProto) -> dict[str, TypeProto]:
    """The types that are known by tensor, in all graphs of a model whose bodies' names are told apart."""
    return {v.name: v.type for graph in graphs_within(inferred.graph) for v in (*graph.value_info, *graph.input, *graph.output)}


def forget_shape(kind: TypeProto) -> None:
    """Leave nothing but the element type."""
    which = kind.WhichOneof("value")
    if which in ("tensor_type", "sparse_tensor_type"):
        getattr(kind, which).ClearField("shape")
    elif which in ("sequence_type", "optional_type"):
        forget_shape(getattr(kind, which).elem_type)
    elif which == "map_type":
        forget_shape(kind.map_type.value_type)


def has_open_sizes(model: ModelProto) -> bool:
    """Return True if an input has an open size, after `take` or shape inference."""
    types = [value.type.tensor_type for value in model.graph.input]
    return any(not kind.HasField("shape") or any(not dim.HasField("dim_value") for dim in kind.shape.dim) for kind in types)


def noted_sizes(model: ModelProto, inferred: ModelProto, outputs: bool) -> Iterator[tuple[Any, Any]]:
    """Yield each size that a model notes, with the one after shape inference; of a tensor whose rank is noted wrongly open ones.
    outputs: the model's own count too."""
    for graph, _, known in side_by_side(model, inferred):
        main = graph is model.graph
        for value in (*graph.value_info, *(() if main else graph.input), *(() if main and not outputs else graph.output)):
            noted, found = value.type.tensor_type, known.get(value.name, TypeProto()).tensor_type
            if noted.HasField("shape") and found.HasField("shape"):
                if len(noted.shape.dim) != len(found.shape.dim):
                    refill(noted.shape.dim, [onnx.TensorShapeProto.Dimension() for _ in found.shape.dim])
                yield from zip(noted.shape.dim, found.shape.dim, strict=True)


def contradict(note: TypeProto, found: TypeProto | None) -> bool:
    """Return True if both know the rank, or an axis' size, and differ."""
    if found is None or not (note.tensor_type.HasField("shape") and found.tensor_type.HasField("shape")):
        return False
    noted, inferred = note.tensor_type.shape.dim, found.tensor_type.shape.dim
    return len(noted) != len(inferred) or any(
        a.HasField("dim_value") and b.HasField("dim_value") and 0 <= a.dim_value != b.dim_value
        for a, b in zip(noted, inferred, strict=True)
    )


def in_order(model: ModelProto) -> ModelProto:
    """The model, as a sorted copy where a node stands before one that it reads from, as converters write and runtimes take it."""
    orders = [_order(graph.node) for graph in _node_lists(model)]
    if all(order is None for order in orders):
        return model
    result = deepcopy(model)
    for graph, order in zip(_node_lists(result), orders, strict=True):
        if order is not None:
            refill(graph.node, [graph.node[index] for index in order])
    return result


def _node_lists(model: ModelProto) -> Iterator[GraphProto | FunctionProto]:
    """Every graph and function body, inner ones first: sorting an outer one copies its nodes."""
    for container in (model.graph, *model.functions):
        yield from reversed(graphs_within(container))


def _order(nodes: Sequence[NodeProto]) -> list[int] | None:
    """Indices of nodes, each no further behind those it reads than it was, cycles last; None if they are in order."""
    producer = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    needs = [{producer[name] for name in _read_names(node) if name in producer} for node in nodes]
    if all(other < index for index, others in enumerate(needs) for other in others):
        return None
    sorter: TopologicalSorter[int] = TopologicalSorter(dict(enumerate(needs)))
    with suppress(CycleError):
        sorter.prepare()
    ready, order = sorted(sorter.get_ready()), []
    while ready:
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
        for index in sorter.get_ready():
            heapq.heappush(ready, index)
    order += sorted(set(range(len(nodes))) - set(order))
    return order if order != list(range(len(nodes))) else None


def _read_names(node: NodeProto) -> set[str]:
    """Tensors that a node reads, through its subgraphs too."""
    names = {name for name in node.input if name}
    for _, _, graph in subgraphs(node):
        made = {name for inner in graph.node for name in inner.output}
        made |= {value.name for value in (*graph.input, *graph.initializer)}
        read = {output.name for output in graph.output}
        for inner in graph.node:
            read |= _read_names(inner)
        names |= read - made
    return names


def in_default_domain(model: ModelProto) -> ModelProto:
    """The model, as a copy with "" in place of `ai.onnx` where a node, a function or its imports have that.  onnxruntime takes
    both for one, but in branches and as a function's import; onnx's checker refuses nodes of `ai.onnx`. Raises ModelError where
    both are imported, and differ."""
    name, alias = STANDARD_DOMAINS
    holders = (model, *model.functions)
    for holder in holders:
        versions = {entry.version for entry in holder.opset_import if entry.domain in STANDARD_DOMAINS}
        if len(versions) > 1:
            raise ModelError(f"model: opset of '{name}', which is '{alias}' too; got {sorted(versions)}, expected one version")
    used = {node.domain for node in model_nodes(model)}
    used |= {entry.domain for function in model.functions for entry in function.opset_import}
    if alias not in used or any(function.domain == alias for function in model.functions):
        return model
    result = deepcopy(model)
    for node in model_nodes(result):
        node.domain = name if node.domain == alias else node.domain
    for holder in (result, *result.functions):
        version = opset_of(holder.opset_import)
        kept = [entry for entry in holder.opset_import if entry.domain not in STANDARD_DOMAINS]
        refill(holder.opset_import, [helper.make_opsetid(name, version), *kept] if version else kept)
    return result
