# SPDX-License-Identifier: Apache-2.0
"""Tensors between nodes of the operator get their channels last, for onnxruntime's CUDA provider.

    x - ConvAvgPool - Relu - ConvAvgPool - y        x - ConvAvgPool - Relu - ConvAvgPool - Transpose - y
                                                        channels_last = 2      channels_last = 1

`layouts` decides which tensors, by cost.  A Transpose stands only where another node gives such a tensor or reads it, and a
Reshape where both layouts are the same in memory.  Conditions: (1) the scope is the main graph or a function, and has nodes of
the operator with channels first, of a type that the kernels have; (2) channels last cost less for a tensor that one of them
reads or gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, helper

from convpool.algebra import layouts
from convpool.ir import schema
from convpool.ir.index import Scope
from convpool.passes.base import Context, Pass, Plan, Reject, Site, reject
from convpool.passes.edit import Edit
from convpool.passes.either_layout import joined, reads_any, turned
from convpool.passes.layouts import channels_last, fixed_ends, ports_of, same_in_memory
from convpool.reporting import Log


@dataclass(frozen=True)
class LayoutPlan(Plan):
    """The tensors of a scope that get their channels last, and the nodes that change."""

    tensors: frozenset[str]
    nodes: tuple[int, ...]
    read_first: frozenset[str]
    """Those of the tensors that something needs with channels first too."""

    @property
    def own(self) -> frozenset[int]:
        """The nodes that change."""
        return frozenset(self.nodes)

    @property
    def operator_version(self) -> int:
        """That of ConvAvgPool; a scope with fused variants imports theirs already."""
        return schema.VERSION


class ChannelsLast(Pass):
    """Every scope with nodes of the operator."""

    names = ("channels_last",)
    on_operators = True

    def sites(self, scope: Scope, context: Context) -> Iterator[Site]:
        """A scope, named by its first such node."""
        found = ports_of(scope)
        if found:
            yield Site(scope, min(found))

    def check(self, site: Site, context: Context) -> LayoutPlan | Reject:
        """The tensors whose channels stand last, or why there are none."""
        scope, ports = site.scope, ports_of(site.scope)
        if site.scope.depth:
            return reject(scope, site.root, "layout in a body", "a node of the operator there", "one in the main graph")
        last = channels_last(scope, ports, context.options.limits)
        if not last:
            return reject(
                scope, site.root, "layout", "channels first at less cost", "channels last between nodes of the operator"
            )
        _, read = fixed_ends(scope, ports)
        nodes = [
            index
            for index, node in enumerate(scope.nodes)
            if (index in ports or joined(scope, index) or reads_any(scope, index)) and last & {*node.input, *node.output}
        ]
        return LayoutPlan(scope, last, tuple(nodes), frozenset(last & read))

    def apply(self, plan: LayoutPlan, edit: Edit) -> None:
        """Change the nodes, and put Transposes where the layout changes."""
        _Turner(plan, edit).run()

    def rewritten(self, plan: LayoutPlan, outputs: list[str], times: dict[str, float] | None, log: Log) -> None:
        """Count the nodes."""
        log.channels_last += len(plan.nodes)

    def kept(self, site: Site, verdict: Reject | None, times: dict[str, float] | None, log: Log) -> None:
        """Add the reason to the report of the scope's first node."""
        if verdict is not None:
            log.beside(site.scope.path, site.scope.nodes[site.root].output[0], (verdict,))


class _Turner:
    """Changes the nodes of one plan."""

    def __init__(self, plan: LayoutPlan, edit: Edit) -> None:
        self._plan, self._edit, self._scope = plan, edit, plan.scope
        self._made: dict[str, str] = {}
        """What the tensors with channels last are called."""

    def run(self) -> None:
        given = {name for index in self._plan.nodes for name in self._scope.nodes[index].output}
        for index in self._plan.nodes:
            node = self._scope.nodes[index]
            nodes = []
            for name in node.input:
                if name in self._plan.tensors and name not in given and name not in self._made:
                    nodes.append(self._turn(name, self._rename(name), to_last=True))
            made = self._node(index, node)
            for item in made:
                if item.output[0] == node.output[0] and node.output[0] in self._plan.tensors:
                    item.output[0] = self._rename(node.output[0])
            nodes += made
            for name in node.output:
                if name in self._plan.read_first:
                    nodes.append(self._turn(self._made[name], name, to_last=False))
            self._edit.replace(index, {index}, nodes)

    def _node(self, index: int, node: NodeProto) -> list[NodeProto]:
        x_last, y_last = (name in self._plan.tensors for name in (node.input[0], node.output[0]))
        if schema.is_operator(node):
            made = NodeProto()
            made.CopyFrom(node)
            schema.give_layout(made, layouts.number_of(x_last, y_last))
            nodes = [made]
            residual = len(node.input) - 1 if schema.parts_of(node).residual else 0
            positions = {0, residual} if residual else {0}
        else:
            shape = self._scope.info(node.input[0]).shape or ()
            rank = next(
                (len(s) for name in node.input if (s := self._scope.info(name).shape) and len(s) > len(shape)), len(shape)
            )
            nodes = turned(self._edit, index, rank, x_last, y_last)
            positions = set(range(len(node.input)))
        for item in nodes:
            for position, name in enumerate(item.input):
                if name in self._made and (position in positions or len(nodes) > 1):
                    item.input[position] = self._made[name]
        return nodes

    def _rename(self, name: str) -> str:
        self._made[name] = self._edit.fresh(f"{name}_channels_last")
        return self._made[name]

    def _turn(self, source: str, target: str, *, to_last: bool) -> NodeProto:
        """The node that gives a tensor in the other layout."""
        name = target if not to_last else source
        shape = self._scope.info(name).shape or ()
        rank = len(shape) - 2
        perm = layouts.to_channels_last(rank) if to_last else layouts.to_channels_first(rank)
        sizes = [shape[axis] for axis in (perm if to_last else range(rank + 2))]
        if same_in_memory(self._scope, name) and all(isinstance(size, int) for size in sizes[1:]):
            nodes: list[NodeProto] = []
            wanted = np.array([0, *sizes[1:]], np.int64)
            constant = self._edit.shared(("shape", *wanted.tolist()), lambda: wanted, f"{target}_shape", nodes)
            if not nodes:
                return helper.make_node("Reshape", [source, constant], [target])
        return helper.make_node("Transpose", [source], [target], perm=perm)
