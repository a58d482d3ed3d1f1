# SPDX-License-Identifier: Apache-2.0
"""Putting nodes into an order in which each follows those it reads from: the one change made to a model on loading."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto

from convpool.ir.protos import graphs_within, subgraphs


def in_order(model: ModelProto) -> ModelProto:
    """The model, as a copy with sorted nodes where a node stands before one that it reads from.

    Converters write such graphs and runtimes sort them; onnx's checker and one-pass algorithms do not.
    """
    orders = [_order(graph.node) for graph in _node_lists(model)]
    if all(order is None for order in orders):
        return model
    result = ModelProto()
    result.CopyFrom(model)
    for graph, order in zip(_node_lists(result), orders, strict=True):
        if order is not None:
            nodes = [graph.node[index] for index in order]
            graph.ClearField("node")
            graph.node.extend(nodes)
    return result


def _node_lists(model: ModelProto) -> Iterator[GraphProto | FunctionProto]:
    """Every graph and function body, inner ones first: sorting an outer one copies its nodes."""
    for container in (model.graph, *model.functions):
        inner = [graph for node in container.node for _, _, g in subgraphs(node) for graph in graphs_within(g)]
        yield from reversed(inner)
        yield container


def _order(nodes: Sequence[NodeProto]) -> list[int] | None:
    """Indices of the nodes in an order in which each follows those it reads from; None if they are in one.

    Stable: a node goes no further back than it has to.  Nodes on a cycle stay last, for the checker to refuse.
    """
    producer = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    needs = [{producer[name] for name in _read_names(node) if name in producer} for node in nodes]
    if all(other < index for index, others in enumerate(needs) for other in others):
        return None
    readers: dict[int, list[int]] = {}
    for index, others in enumerate(needs):
        for other in others:
            readers.setdefault(other, []).append(index)
    open_needs = [len(others) for others in needs]
    ready = [index for index, count in enumerate(open_needs) if not count]
    order: list[int] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for reader in readers.get(index, ()):
            open_needs[reader] -= 1
            if not open_needs[reader]:
                heapq.heappush(ready, reader)
    rest = sorted(set(range(len(nodes))) - set(order))
    order += rest
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
