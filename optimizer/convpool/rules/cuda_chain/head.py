# SPDX-License-Identifier: Apache-2.0
"""A sum or mean over space and the product of matrices behind it, as one node of the operator, for onnxruntime's CUDA provider.

    x - ReduceSum (2, 3) - Gemm        x - ConvAvgPool - Flatten

The head of many networks: the mean over the whole map is an average pooling, and the Gemm a convolution of one element.  It saves
two or three short kernels.  Conditions: (1) a pair has become a node of the operator in the scope, and no attribute refers to a
function's; (2) the sum or mean is over all of a 2-D map of a known size, of a type that the kernels have; only views (Flatten,
Reshape, Squeeze) stand behind it; (3) nothing else reads what they give; (4) the Gemm multiplies by a constant [C, M] and adds
at most a constant, a MatMul multiplies by one; (5) the channels are multiples of 16 bytes; (6) x has the channels last
(`layouts`); (7) the type has the weights of a sum, the map's size times as large, to its precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from onnx import TensorProto, helper

from convpool.algebra.geometry import PoolSpec
from convpool.algebra.parts import OP_TYPE, keeps, outside
from convpool.ir import schema
from convpool.ir.edit import Edit
from convpool.ir.index import Scope
from convpool.ir.protos import attributes, is_op, label, stand_for
from convpool.report import Log
from convpool.rules.base import Context, Plan, Reject, Rule, Site, reject, rejection
from convpool.rules.convs import KERNEL_TYPES, POINT, RANK, WINDOW, against_node
from convpool.rules.cuda_chain.conv import chunk
from convpool.rules.cuda_chain.layouts import VIEWS, Ports, channels_last, ports_of, summed_axes

PATTERN = "head"
MEANS = ("ReduceSum", "ReduceMean", "GlobalAveragePool")


@dataclass(frozen=True)
class HeadPlan(Plan):
    """The nodes that go, from the sum or mean to the product; weights [M, 1, 1, C] and bias [M]."""

    nodes: tuple[int, ...]
    window: PoolSpec
    weight: np.ndarray = field(compare=False)
    bias: np.ndarray = field(compare=False)

    operator_version = schema.VERSION

    @property
    def own(self) -> frozenset[int]:
        return frozenset(self.nodes)


class ChainHead(Rule):
    """Every product of matrices behind a sum or mean over space."""

    names = ("chain_head",)
    on_operators = True

    def sites(self, scope: Scope, context: Context) -> Iterator[Site]:
        if context.made_operator and ports_of(scope):
            for index, node in enumerate(scope.nodes):
                if is_op(node, "Gemm", "MatMul") and _from_map(scope, index):
                    yield Site(scope, index)

    def check(self, site: Site, context: Context) -> HeadPlan | Reject:
        scope, index = site.scope, site.root
        nodes = _from_map(scope, index)
        mean = nodes[0]
        for inner in nodes[:-1]:
            if (others := scope.other_readers(scope.nodes[inner].output[0])) is not None:
                name = scope.nodes[inner].output[0]
                return reject(scope, inner, f"output '{name}' {others}", "other readers", f"only {scope.nodes[index].op_type}")
        size = _map_size(scope, mean)
        if isinstance(size, Reject):
            return size
        linear = _linear(scope, index)
        if isinstance(linear, Reject):
            return linear
        weight, bias = linear
        x = scope.nodes[mean].input[0]
        kind = scope.info(x).elem_type
        if weight.shape[1] % chunk(kind):
            return reject(scope, index, "input channels", weight.shape[1], f"a multiple of {chunk(kind)}")
        window = replace(WINDOW, kernel_shape=size)
        if (found := against_node(scope, POINT, context.main_opset, window)) is not None:
            return rejection(scope, index, found)
        ports = {**ports_of(scope), mean: Ports(x, scope.nodes[mean].output[0])}
        if x not in channels_last(scope, ports, context.options.limits):
            return reject(scope, mean, "layout", "channels first in front of it", "channels last")
        if is_op(scope.nodes[mean], "ReduceSum"):
            dtype, scaled = weight.dtype, weight.astype(np.float64) * math.prod(size)
            if not keeps(scaled, dtype):
                return rejection(scope, mean, outside("weights of a sum"))
            weight = scaled.astype(dtype)
        return HeadPlan(scope, tuple(nodes), window, weight.reshape(len(weight), *(1,) * RANK, -1), bias)

    def apply(self, plan: HeadPlan, edit: Edit) -> None:
        first, last = plan.scope.nodes[plan.nodes[0]], plan.scope.nodes[plan.nodes[-1]]
        y = last.output[0]
        weight = edit.constant(plan.weight, f"{last.input[1]}_channels_last")
        bias = edit.constant(plan.bias, f"{y}_bias")
        product = edit.fresh(f"{y}_map")
        edit.nodes.append(schema.make_node([first.input[0], weight, bias], product, plan.window, POINT))
        stand_for(edit.nodes[-1], last)
        edit.nodes.append(helper.make_node("Flatten", [product], [y], axis=1))
        edit.replace(plan.nodes[-1], plan.nodes)

    def rewritten(self, plan: HeadPlan, outputs: list[str], times: dict[str, float] | None, log: Log) -> None:
        pool, count = label(plan.scope.nodes[plan.nodes[0]]), plan.weight.size
        values = {"pool": pool, "macs_before": count, "macs_after": count, "operator": OP_TYPE}
        log.rewritten(self.site_report(plan.scope, PATTERN, "convavgpool", **values), outputs[0])


def _from_map(scope: Scope, index: int) -> list[int]:
    """The nodes from the sum or mean over space to the product `index`, in order; none where there is no such chain."""
    found = [index]
    name = scope.nodes[index].input[0]
    while (producer := scope.producer.get(name)) is not None:
        node = scope.nodes[producer]
        found.insert(0, producer)
        if is_op(node, *MEANS):
            return found
        if not is_op(node, *VIEWS):
            break
        name = node.input[0]
    return []


def _map_size(scope: Scope, index: int) -> tuple[int, ...] | Reject:
    """The sizes of the map that a sum or mean is over: condition (2)."""
    node = scope.nodes[index]
    info = scope.info(node.input[0])
    if info.shape is None or len(info.shape) != RANK + 2:
        return reject(scope, index, "rank", "unknown" if info.shape is None else len(info.shape), RANK + 2)
    if info.elem_type not in KERNEL_TYPES:
        return reject(scope, index, "type", TensorProto.DataType.Name(info.elem_type), "float16, bfloat16 or float32")
    size = tuple(dim for dim in info.shape[2:] if isinstance(dim, int))
    if len(size) != RANK:
        return reject(scope, index, "size of the map", list(info.shape[2:]), "a known one")
    axes = (2, 3) if is_op(node, "GlobalAveragePool") else summed_axes(scope, index)
    return size if axes == (2, 3) else reject(scope, index, "axes", axes, "2 and 3")


def _linear(scope: Scope, index: int) -> tuple[np.ndarray, np.ndarray] | Reject:
    """Weights [M, C] and bias [M] of the product: condition (4)."""
    node = scope.nodes[index]
    values = attributes(node)
    shape = scope.info(node.input[0]).shape
    if shape is None or len(shape) != 2:
        return reject(scope, index, "shape of what it multiplies", shape, "[N, C]")
    constant = scope.weights(node.input[1])
    if constant is None or len(constant.shape) != 2:
        return reject(scope, index, "weights", "no matrix of constants", "one")
    for name, expected in (("alpha", 1.0), ("beta", 1.0), ("transA", 0)):
        if values.get(name, expected) != expected:
            return reject(scope, index, name, values[name], expected)
    weight = constant.array() if values.get("transB", 0) else constant.array().T  # a MatMul has no transB
    bias = np.zeros(len(weight), weight.dtype)
    if len(node.input) > 2 and node.input[2]:
        added = scope.constant(node.input[2])
        if added is None or added.array().size not in (1, len(bias)) or any(n != 1 for n in added.shape[:-1]):
            return reject(scope, index, "what it adds", "no constant per column", "one")
        bias = np.broadcast_to(added.array().reshape(-1), bias.shape).astype(weight.dtype)
    return np.ascontiguousarray(weight), np.ascontiguousarray(bias)
