# SPDX-License-Identifier: Apache-2.0
"""Tensors between nodes of the operator get their channels last, for onnxruntime's CUDA provider.

    x - ConvAvgPool - Relu - ConvAvgPool - y        x - ConvAvgPool - Relu - ConvAvgPool - Transpose - y
                                                        channels_last = 2      channels_last = 1

`layouts` decides which tensors, by cost.  A Transpose stands only where another node gives such a tensor or reads it, and a
Reshape where both layouts are the same in memory.  Conditions: (1) the scope is the main graph or a function, and has nodes of
the operator with channels first, of a type that the kernels have; (2) channels last cost less for a tensor that one of them
reads or gives; (3) no tensor there was quantized.

Before that, tensors between a convolution and an average get their channels first, where a model transposes them away and back:

    x - Conv - Transpose - Add - Transpose - AveragePool        x - Conv - Add - AveragePool

Converters from TensorFlow write so.  All tensors that are laid out alike (`layouts`) change together.  Conditions: (1) fewer
Transposes stand there afterwards, or as many, and they move less; (2) a pair appears in the model by that, as
`pipeline.in_reach` sees."""

from collections.abc import Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, helper

from convpool.algebra.parts import LAYOUTS, to_channels_first, to_channels_last
from convpool.ir import schema
from convpool.ir.edit import Edit
from convpool.ir.index import Scope
from convpool.ir.protos import is_op, label
from convpool.report import Log
from convpool.rules.base import EXCLUDED, Context, NodesPlan, Reject, Rule, Site, reject
from convpool.rules.cuda_chain import layouts
from convpool.rules.pool_first.pairs import upstream
from convpool.rules.pool_first.rule import pair_sites


@dataclass(frozen=True)
class LayoutPlan(NodesPlan):
    """The nodes of a scope that change, and the tensors that get another layout."""

    tensors: frozenset[str]
    read_too: frozenset[str]
    """Tensors that something needs as they were too."""
    to: layouts.To = to_channels_last

    operator_version = schema.POOLING_VERSION


class ChannelsLast(Rule):
    """Every scope with nodes of the operator."""

    names = ("channels_last",)
    needs = schema.OP_TYPES

    def sites(self, scope: Scope, context: Context) -> Iterator[Site]:
        """A scope, named by its first such node."""
        found = layouts.ports_of(scope)
        if found:
            yield Site(scope, min(found))

    def check(self, site: Site, context: Context) -> LayoutPlan | Reject:
        scope, ports = site.scope, layouts.ports_of(site.scope)
        if site.scope.depth:
            return reject(scope, site.root, "layout in a body", "a node of the operator there", "one in the main graph")
        if any(node.op_type == "DequantizeLinear" and scope.constant(node.input[0]) is None for node in scope.nodes):
            return reject(scope, site.root, "layout", "a DequantizeLinear", "none")  # onnxruntime 1.32 loads no Transpose of one
        last = layouts.channels_last(scope, ports)
        if not last:
            got, expected = "channels first at less cost", "channels last between nodes of the operator"
            return reject(scope, site.root, "layout", got, expected)
        return plan_of(scope, ports, last)

    def apply(self, plan: LayoutPlan, edit: Edit) -> None:
        Turner(plan, edit).run()

    def rewritten(self, plan: LayoutPlan, outputs: list[str], times: dict[str, float] | None, log: Log) -> None:
        log.channels_last += len(plan.nodes)

    def kept(self, site: Site, why: Reject, times: dict[str, float] | None, log: Log) -> None:
        """Add the reason to the report of the scope's first node."""
        if why is not EXCLUDED:
            log.beside(site.scope.path, site.scope.nodes[site.root].output[0], (why,))


def plan_of(scope: Scope, ports: Collection[int], tensors: frozenset[str], to: layouts.To = to_channels_last) -> LayoutPlan:
    """How `tensors`, whole groups, get their other layout.  ports: nodes of the operator with channels first."""
    _, read = layouts.fixed_ends(scope, ports, to)
    nodes = [
        index
        for index, node in enumerate(scope.nodes)
        if (index in ports or layouts.joined(scope, index, to) or layouts.reads_any(scope, index, to))
        and tensors & {*node.input, *node.output}
    ]
    return LayoutPlan(scope, tuple(nodes), tensors, frozenset(tensors & read), to)


class Turner:
    """Changes the nodes of one plan."""

    def __init__(self, plan: LayoutPlan, edit: Edit) -> None:
        self._plan, self._edit, self._scope, self._to = plan, edit, plan.scope, plan.to
        self._back: layouts.To = to_channels_first if plan.to is to_channels_last else to_channels_last
        self._made: dict[str, str] = {}
        """Names of the tensors in the other layout."""
        self._known: dict[str, str] = {}
        """Names that vanishing Transposes give them."""

    def run(self) -> None:
        given = {name for index in self._plan.nodes if self._gives(index) for name in self._scope.nodes[index].output}
        for index in self._plan.nodes:
            node = self._scope.nodes[index]
            if self._crosses(node, self._to):
                self._known.setdefault(node.input[0], node.output[0])
        for index in self._plan.nodes:
            node = self._scope.nodes[index]
            if self._crosses(node, self._back):
                self._made[node.output[0]] = node.input[0]
                if node.output[0] in self._plan.read_too:
                    self._edit.nodes.append(node)
                self._edit.replace(index, {index})
                continue
            for name in node.input:
                if name in self._plan.tensors and name not in given and name not in self._made:
                    self._turn(name, self._rename(name), back=False)
            gone = self._crosses(node, self._to) and self._made[node.input[0]] == node.output[0]
            for item in () if gone else self._node(index, node):
                if item.output[0] == node.output[0] and node.output[0] in self._plan.tensors & given:
                    item.output[0] = self._rename(node.output[0])
            for name in node.output:
                if name in self._plan.read_too & given:
                    self._turn(self._made[name], name, back=True)
            self._edit.replace(index, {index})

    def _gives(self, index: int) -> bool:
        """Return True if a node can give its result in either layout; a Reshape only reads what is the same in both."""
        node = self._scope.nodes[index]
        return schema.is_operator(node) or is_op(node, "Transpose") or layouts.joined(self._scope, index, self._to) is not None

    def _crosses(self, node: NodeProto, to: layouts.To) -> bool:
        """Return True if a node is a Transpose between one of the plan's tensors and another, into the layout that `to` gives."""
        perm = layouts.turning(node)
        return perm is not None and perm == to(len(perm) - 2) and self._of_plan(node) == (to is self._to, to is self._back)

    def _of_plan(self, node: NodeProto) -> tuple[bool, bool]:
        return node.input[0] in self._plan.tensors, node.output[0] in self._plan.tensors

    def _node(self, index: int, node: NodeProto) -> list[NodeProto]:
        """Make a node for the layouts of its tensors, and the constants that it needs."""
        x, y = self._of_plan(node)
        before = len(self._edit.nodes)
        if schema.is_operator(node):
            made = deepcopy(node)
            schema.give_layout(made, next(number for number, last in LAYOUTS.items() if last == (x, y)))
            self._edit.nodes.append(made)
            residual = len(node.input) - 1 if schema.parts_of(node).residual else 0
            positions = {0, residual} if residual else {0}
        else:
            shape = self._scope.info(node.input[0]).shape or ()
            rank = next(
                (len(s) for name in node.input if (s := self._scope.info(name).shape) and len(s) > len(shape)), len(shape)
            )
            layouts.turn(self._edit, index, rank, x, y, self._to)
            positions = set(range(len(node.input)))
        nodes = self._edit.nodes[before:]
        for item in nodes:
            if not item.name and self._to is to_channels_first:
                item.name = label(node)  # a report goes on to name it so
            for position, name in enumerate(item.input):
                if name in self._made and (position in positions or len(nodes) > 1):
                    item.input[position] = self._made[name]
        return nodes

    def _rename(self, name: str) -> str:
        self._made[name] = self._known.get(name) or self._edit.fresh(f"{name}_{self._to.__name__[3:]}")
        return self._made[name]

    def _turn(self, source: str, target: str, *, back: bool) -> None:
        """Make the node that gives a tensor in the other layout, or `back` in its own."""
        name = target if back else source
        shape = self._scope.info(name).shape or ()
        perm = (self._back if back else self._to)(len(shape) - 2)
        sizes = [shape[axis] for axis in (range(len(shape)) if back else perm)]
        if layouts.same_in_memory(self._scope, name, self._to) and all(isinstance(size, int) for size in sizes[1:]):
            wanted = np.array([0, *sizes[1:]], np.int64)
            constant = self._edit.common(("shape", *wanted.tolist()), lambda: wanted, f"{target}_shape")
            self._edit.nodes.append(helper.make_node("Reshape", [source, constant], [target]))
        else:
            self._edit.nodes.append(helper.make_node("Transpose", [source], [target], perm=perm))


@dataclass(frozen=True)
class GroupSite(Site):
    """Tensors that are laid out alike, on the way to the average `root`."""

    tensors: frozenset[str]


class ChannelsFirst(Rule):
    """Every group of tensors between a convolution and an average."""

    names = ("pool_first",)

    def sites(self, scope: Scope, context: Context) -> Iterator[GroupSite]:
        """The groups that save Transposes."""
        sites = list(pair_sites(scope))
        groups = layouts.groups_of(scope, {}, to_channels_first) if sites else {}
        given, read = layouts.fixed_ends(scope, (), to_channels_first) if sites else (set(), set())
        seen: set[int] = set()
        for site in sites:
            way = [scope.nodes[index].output[0] for index in upstream(scope, site.tensor)]
            for name in (site.tensor, *way):
                group = groups.get(name)
                if group is None or id(group) in seen:
                    continue
                seen.add(id(group))
                if not group.fixed and _saves(scope, set(group.tensors), given | read):
                    yield GroupSite(scope, site.root, frozenset(group.tensors))

    def check(self, site: GroupSite, context: Context) -> LayoutPlan:
        return plan_of(site.scope, (), site.tensors, to_channels_first)

    def apply(self, plan: LayoutPlan, edit: Edit) -> None:
        Turner(plan, edit).run()


def _saves(scope: Scope, tensors: set[str], ends: set[str]) -> bool:
    """Return True if condition (1) holds.  ends: tensors whose giver, or readers, do not change."""
    if any((layouts.rank_of(scope, name) or 0) < 3 for name in tensors):
        return False
    gone, new = [], [layouts.turn_us(scope, name, to_channels_first) for name in tensors & ends]
    for node in scope.nodes:
        if not is_op(node, "Transpose") or (perm := layouts.turning(node)) is None:
            continue
        x, y = (name in tensors for name in (node.input[0], node.output[0]))
        if (x, y) == (False, True) and perm == to_channels_last(len(perm) - 2):
            gone.append(layouts.turn_us(scope, node.output[0], to_channels_first))
        elif (x, y) == (True, False) and perm == to_channels_first(len(perm) - 2):
            gone.append(layouts.turn_us(scope, node.input[0], to_channels_first))
    return len(new) <= len(gone) and sum(new) < sum(gone)
