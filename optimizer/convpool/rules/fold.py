# SPDX-License-Identifier: Apache-2.0
"""Constants that a model computes, and nodes that hand their input on: both go.

    w = Mul(a, b), a and b constant        w, an initializer
    y = Identity(x); z = Relu(y)           z = Relu(x)

What is folded is all that other nodes read of what is computed from constants and from sizes that are known.  Conditions:
(1) the operator is a standard one, without bodies, and gives the same for the same inputs; no Q or DQ, which runtimes look for;
(2) the result is a tensor of known shape, of at most MAX_BYTES, or no larger than the inputs; (3) the node stands in a graph:
functions stay as they are; (4) onnx counts sizes as runtimes do.  An Identity that gives a result of its graph stays.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper

from convpool.ir.edit import Edit
from convpool.ir.index import Scope
from convpool.ir.protos import is_op, subgraphs
from convpool.rules.base import Context, NodesPlan, Rule, Site
from convpool.rules.linear import Step, op_of, step_or_reject

MAX_BYTES = 2**20
"""Largest constant that may be larger than what it is computed from."""
KEPT = (
    "Bernoulli Constant DequantizeLinear Dropout DynamicQuantizeLinear Identity Multinomial QuantizeLinear "
    "RandomNormal RandomNormalLike RandomUniform RandomUniformLike"
).split()
"""Standard operators that are not computed: random ones, those that mark what is quantized, and those that go otherwise."""


@dataclass(frozen=True)
class FoldPlan(NodesPlan):
    """A node whose results become `values`, or that reads other `inputs`; before: nodes that may be unread then."""

    values: tuple[tuple[str, np.ndarray], ...]
    inputs: tuple[str, ...]
    before: frozenset[int]


class Fold(Rule):
    """Every node whose results are constants that another node reads, and every one that reads through an Identity."""

    names = ("fold",)

    def sites(self, scope: Scope, context: Context) -> Iterator[Site]:
        if scope.is_function:
            return
        computed = _computed(scope)
        for index, node in enumerate(scope.nodes):
            if index in computed:
                # Integers of old models stay as they are stored (`Editor.store`): else this would have no end.
                stored = scope.opset < 9 and is_op(node, "Cast") and scope.made_by(node.input[0], "Constant") is not None
                if not stored and any(scope.read_outside(name, computed) for name in node.output):
                    yield Site(scope, index)
            elif any(_passed(scope, name)[1] for name in node.input):
                yield Site(scope, index)

    def check(self, site: Site, context: Context) -> FoldPlan | None:
        scope, node = site.scope, site.scope.nodes[site.root]
        passed = [_passed(scope, name) for name in node.input]
        if any(nodes for _, nodes in passed):
            before_it = frozenset(index for _, nodes in passed for index in nodes)
            return FoldPlan(scope, (site.root,), (), tuple(name for name, _ in passed), before_it)
        values, before = [], set()
        for name in filter(None, node.output):
            cone = scope.cone([name], lambda index: _is_foldable(scope.nodes[index]))
            before |= cone
            found = scope.constant(name)
            if found is None:
                found = scope.compute(name, [i for i in sorted(cone) if scope.constant(scope.nodes[i].output[0]) is None])
            if found is None:
                return None
            values.append((name, found.array()))
        return FoldPlan(scope, (site.root,), tuple(values), (), frozenset(before))

    def apply(self, plan: FoldPlan, edit: Edit) -> None:
        if plan.inputs:
            edit.new_inputs[plan.node] = list(plan.inputs)
        else:
            for name, array in plan.values:
                edit.store(array, name)
            edit.replace(plan.node, plan.own)
        edit.drop_unread(plan.before)


def _computed(scope: Scope) -> set[int]:
    """The nodes whose results are known: conditions (1), (2) and (4)."""
    found: set[int] = set()
    known: set[str] = set()
    for index, node in enumerate(scope.nodes):
        if not _is_foldable(node):
            continue
        if all(name in known or _is_constant(scope, name) for name in filter(None, node.input)):
            allowed = max(MAX_BYTES, sum(_bytes(scope, name) or 0 for name in filter(None, node.input)))
            sizes = [_bytes(scope, name) for name in filter(None, node.output)]
            folds = all(size is not None and size <= allowed for size in sizes)
        else:  # of a shape that is known, or in part
            folds = is_op(node, "Shape", "Gather", "Slice") and scope.constant(node.output[0]) is not None
            folds = folds and not _is_disputed(scope, node.output[0])
        if folds:
            found.add(index)
            known.update(node.output)
    return found


def _is_foldable(node: NodeProto) -> bool:
    """Condition (1)."""
    standard = node.domain in ("", "ai.onnx") and onnx.defs.has(node.op_type)
    return standard and bool(node.input) and not is_op(node, *KEPT) and not any(subgraphs(node))


def _is_constant(scope: Scope, name: str) -> bool:
    """Return True if a tensor is stored, also renamed; computed ones are `known` or too large."""
    index = scope.producer.get(name)
    stored = index is None or is_op(scope.nodes[index], "Constant", "Identity")
    return stored and scope.constant(name) is not None and not _is_disputed(scope, name)


def _is_disputed(scope: Scope, name: str) -> bool:
    """Return True if a tensor is computed from sizes that break condition (4)."""
    while scope.parent is not None and not scope.defines(name):
        scope = scope.parent
    cone = scope.cone([name], lambda index: _is_foldable(scope.nodes[index]) or is_op(scope.nodes[index], "Identity"))
    return any(scope.info(source).disputed for index in cone for source in scope.nodes[index].input)


def _bytes(scope: Scope, name: str) -> int | None:
    """The size of a tensor; None where it is unknown, and for strings."""
    info = scope.info(name)
    shape = info.shape
    if shape is None or not all(isinstance(n, int) for n in shape):
        constant = scope.constant(name)
        shape = None if constant is None else constant.shape
    if shape is None or info.elem_type in (TensorProto.UNDEFINED, TensorProto.STRING):
        return None
    return math.prod(int(n or 0) for n in shape) * helper.tensor_dtype_to_np_dtype(info.elem_type).itemsize


def _passed(scope: Scope, name: str) -> tuple[str, list[int]]:
    """The tensor that `name` is another name of, and the nodes by which it is, which hand on what they read."""
    nodes: list[int] = []
    while (index := scope.producer.get(name)) is not None:
        op = op_of(scope.nodes[index])
        if op is None or not op.idle or not isinstance(step_or_reject(scope, index, 0), Step):
            break
        nodes.append(index)
        name = scope.nodes[index].input[0]
    return name, nodes
