# SPDX-License-Identifier: Apache-2.0
"""A graph of torch.fx as an ONNX model for the rules: its nodes, types and shapes, without its numbers.

Parameters become inputs of the model, so that no rule takes them for constants: the rewritten module reads them at every call.
What has no operator of ONNX becomes a node of the domain `DOMAIN`, of which the rules know only what it reads and gives.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
import torch
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from torch import fx

from convpool.algebra.geometry import Refusal, refuse
from convpool.rules.resampling.emit import DOMAIN_OF_TORCH as DOMAIN
from convpool.torch.changes import TRANSFORM, Context, contexts_of, is_of_module, value_of
from convpool.torch.plain import HALF_TYPES

Dim: TypeAlias = int | str | None
OPSET = 22
"""The first whose Conv and AveragePool take bfloat16."""
IR_VERSION = 10
BATCH = 55440 * 13
"""What stands for an open batch: it has many divisors."""
ELEM_TYPES = {
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.int32: TensorProto.INT32,
    torch.int64: TensorProto.INT64,
    torch.bool: TensorProto.BOOL,
}
"""The types that the rules may see; a tensor of any other has none."""
_AVERAGES = frozenset(("AveragePool", "GlobalAveragePool", "ReduceMean", "ReduceSum"))
_LAYERS = frozenset(
    "relu leaky_relu sigmoid tanh elu selu gelu hardswish mish softplus batch_norm dropout pad linear group_norm".split()
)
"""Functions that are the whole forward of a module of torch.nn, beside convolutions and poolings."""


class Skeleton:
    """The model in the making.  A translation asks it for the names of its inputs, and hands it the nodes."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.labels: dict[str, fx.Node] = {}
        """The node of the graph that a name of the model's nodes stands for."""
        self.pinned: dict[str, Refusal] = {}
        self.protos: dict[str, NodeProto] = {}
        self.contexts: dict[fx.Node, Context] = contexts_of(graph)
        """The context of each node."""
        self.crossings: dict[str, str] = {}
        """Tensors as they are read in another context than the one they are made in: their names, and those of the tensors."""
        self._casts = any("autocast" in text for context in set(self.contexts.values()) for text in context)
        self._batches: dict[Any, Any] = {}
        for node in graph.find_nodes(op="placeholder"):
            value = value_of(node)
            first = value.shape[0] if isinstance(value, torch.Tensor) and value.dim() and not is_of_module(node) else 0
            if isinstance(first, torch.SymInt) and first.node.expr.is_symbol:
                self._batches.setdefault(first.node.expr, BATCH + len(self._batches) * BATCH)
        self._constants: list[TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._infos: dict[str, onnx.ValueInfoProto] = {}
        self._counts: Counter[str] = Counter()

    # ---- what translations ask ----

    def dtype(self, node: Any) -> Any:
        """The type of a node's tensor; None where it is none.

        Of what autocast makes the rules see the type that it was made of: in ONNX no operator changes it."""
        value = value_of(node)
        if not isinstance(value, torch.Tensor):
            return None
        casts = self._casts or value.device.type != "meta" and torch.is_autocast_enabled(value.device.type)
        return torch.float32 if casts and value.dtype in HALF_TYPES else value.dtype

    def _size(self, n: Any) -> Dim:
        """A size; an open batch is a number here, which no other size is likely to be."""
        if type(n) is int:
            return n
        expression = n.node.expr
        return int(expression.subs(self._batches)) if expression.free_symbols <= self._batches.keys() else str(n)

    def shape(self, node: Any) -> tuple[Dim, ...] | None:
        """The shape of a node's tensor, with names for open sizes; None where it is none."""
        value = value_of(node)
        return tuple(map(self._size, value.shape)) if isinstance(value, torch.Tensor) else None

    def number(self, array: Any, dtype: Any = np.int64) -> str:
        """The name of a constant."""
        name = f"constant {len(self._constants)}"
        self._constants.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def scalar(self, value: float, like: fx.Node) -> str:
        """A number as a constant of the type of a node's tensor."""
        return self.number(value, helper.tensor_dtype_to_np_dtype(ELEM_TYPES.get(self.dtype(like), TensorProto.FLOAT)))

    def pin(self, label: str, why: Refusal | None) -> None:
        """Let a node stay as it is, for a reason."""
        if why is not None:
            self.pinned.setdefault(label, why)

    # ---- what the driver tells ----

    def label(self, node: fx.Node) -> str:
        """A name for a node as a reader of the module knows it: the path of the layer, or its place and the function's name."""
        place, cls = _place(node)
        own = (getattr(node.target, "__name__", None) or str(node.target)).strip("_")
        bases = [base.__module__ for base in getattr(cls, "__mro__", ())]
        leaf = any(name.startswith("torch.nn.modules.") and not name.endswith((".container", ".module")) for name in bases)
        leaf = leaf and (own in _LAYERS or own.startswith(("conv", "avg_pool", "max_pool", "adaptive")))
        wanted = place if leaf and place else f"{place}.{own}".lstrip(".")
        while True:
            self._counts[wanted] += 1
            label = wanted if self._counts[wanted] == 1 else f"{wanted} {self._counts[wanted]}"
            if label not in self.labels:
                self.labels[label] = node
                return label

    def add_input(self, node: fx.Node) -> None:
        """A node of the graph that computes nothing."""
        self._inputs.append(self._info(node.name, node))

    def add(self, node: fx.Node, label: str, protos: Sequence[NodeProto] | None) -> None:
        """Return what stands for a node, the last one giving its tensor; None for one of which the rules know nothing."""
        if protos is None:
            kind = re.sub(r"\W", "_", getattr(node.target, "__name__", None) or str(node.target))
            names = [other.name for other in node.all_input_nodes]
            protos = [helper.make_node(kind, names, [node.name], domain=DOMAIN)]
        for other in node.all_input_nodes:
            if self.contexts[other] != self.contexts[node] and other.op not in ("placeholder", "get_attr"):
                self._cross(other, node, protos)
        x, y = (value_of(item) for item in ([*node.all_input_nodes, None][0], node))
        if protos[-1].op_type in _AVERAGES and isinstance(x, torch.Tensor) and x.dtype != y.dtype:  # autocast's on a CPU
            self.pin(label, refuse("type of the averages", y.dtype, x.dtype))
        if TRANSFORM in self.contexts[node]:
            self.pin(label, refuse("transform of torch.func in forward", "one", "none"))
        for number, proto in enumerate(protos, 1):
            proto.name = label if number == len(protos) else f"{label}/{number}"
            self.protos[proto.name] = proto
        if self.dtype(node) in ELEM_TYPES:
            self._infos[node.name] = self._info(node.name, node)

    def _cross(self, made: fx.Node, read: fx.Node, protos: Sequence[NodeProto]) -> None:
        """Let a node read another one's tensor through an Identity, which stays: no rule moves anything across contexts."""
        name = f"{made.name} of {read.name}"
        self.crossings[name] = made.name
        self.protos[name] = helper.make_node("Identity", [made.name], [name], name)
        if made.name in self._infos:
            self._infos[name] = self._info(name, made)
        why = [", ".join(sorted(set(self.contexts[a]) - set(self.contexts[b]))) for a, b in ((made, read), (read, made))]
        self.pin(name, refuse("context in forward", why[0] or "none", why[1] or "none"))
        for proto in protos:
            proto.input[:] = [name if item == made.name else item for item in proto.input]

    def _info(self, name: str, node: fx.Node) -> onnx.ValueInfoProto:
        """A name with the type and shape of a node's tensor; a number where it is none."""
        dtype = self.dtype(node)
        elem_type = TensorProto.INT64 if dtype is None else ELEM_TYPES.get(dtype, TensorProto.FLOAT)
        return helper.make_tensor_value_info(name, elem_type, self.shape(node) or ())

    def model(self, results: Sequence[fx.Node]) -> ModelProto:
        """The model.  results: nodes that the graph gives."""
        end = helper.make_node("Result", [node.name for node in results], ["result"], name="result", domain=DOMAIN)
        outputs = [helper.make_tensor_value_info("result", TensorProto.FLOAT, ())]
        computed = {name for proto in self.protos.values() for name in proto.output}
        outputs += [self._infos.pop(node.name) for node in dict.fromkeys(results) if node.name in self._infos.keys() & computed]
        graph = helper.make_graph(
            [*self.protos.values(), end], "module", self._inputs, outputs, self._constants, value_info=[*self._infos.values()]
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)


def _place(node: fx.Node) -> tuple[str, type | None]:
    """The path and the class of the module around a node: TorchDynamo's L['self']._modules['a'].b as a.b."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return "", None
    path = re.sub(r"^L\['\w+'\]", "", str(stack[-1][0]))
    return ".".join(part for part in re.split(r"\._modules|[.\[\]'\"]+", path) if part), stack[-1][1]
