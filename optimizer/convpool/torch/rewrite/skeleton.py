# SPDX-License-Identifier: Apache-2.0
"""A graph of torch.fx as an ONNX model for the passes: its nodes, types and shapes, without its numbers.

Parameters become inputs of the model, so that no pass takes them for constants: the rewritten module reads them at every call.
What has no operator of ONNX becomes a node of the domain `DOMAIN`, of which the passes know only what it reads and gives.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from torch import fx, nn

from convpool.algebra.geometry import Refusal, refuse
from convpool.torch.rewrite.capture import PATH
from convpool.torch.rewrite.contexts import TRANSFORM, Context, contexts_of
from convpool.torch.rewrite.sizes import Dim, Known, Sizes

DOMAIN = "ai.convpool.torch"
OPSET = 22
"""The first whose Conv and AveragePool take bfloat16."""
IR_VERSION = 10
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
"""The types that the passes may see; a tensor of any other has none."""


@dataclass(frozen=True)
class Source:
    """A tensor of a module: attribute `name` of the submodule at `path`.

    hooked: whether old-style hooks of the submodule compute it before each call.
    """

    path: str
    name: str
    hooked: bool = False


class Skeleton:
    """The model in the making.  A translation asks it for the names of its inputs, and hands it the nodes."""

    def __init__(self, root: nn.Module | None, graph: fx.Graph, sizes: Sizes | None) -> None:
        self.root, self.graph, self.sizes = root, graph, sizes
        self.labels: dict[str, fx.Node] = {}
        """The node of the graph that a name of the model's nodes stands for."""
        self.pinned: dict[str, Refusal] = {}
        self.sources: dict[str, Source] = {}
        """Inputs of the model that are tensors of modules."""
        self.derived: dict[str, tuple] = {}
        """Tensors inside of a node of the graph: a function and its arguments."""
        self.slopes: dict[float, float] = {}
        """Slopes of activations by what ONNX, which has float32, makes of them."""
        self.protos: dict[str, NodeProto] = {}
        self.contexts: dict[fx.Node, Context] = contexts_of(graph) if root is None else {}
        """The context of each node of TorchDynamo's graph."""
        self.crossings: dict[str, str] = {}
        """Tensors as they are read in another context than the one they are made in: their names, and those of the tensors."""
        self._constants: list[TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._infos: dict[str, onnx.ValueInfoProto] = {}
        self._counts: Counter[str] = Counter()

    # ---- what translations ask ----

    def module(self, node: fx.Node) -> nn.Module:
        """The module that a node calls."""
        assert self.root is not None
        return self.root.get_submodule(str(node.target))

    def known(self, value: Any) -> Known | None:
        """Type and shape of a node's tensor, None where they are unknown."""
        return self.sizes.tensors.get(value) if self.sizes is not None and isinstance(value, fx.Node) else None

    def shape(self, value: Any) -> tuple[Dim, ...] | None:
        """Shape of a node's tensor, None where it is unknown."""
        found = self.known(value)
        return None if found is None else found.shape

    def number(self, array: Any, dtype: Any = np.int64) -> str:
        """The name of a constant."""
        name = f"constant {len(self._constants)}"
        self._constants.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def scalar(self, value: float, like: fx.Node) -> str:
        """A number as a constant of the type of a node's tensor."""
        found = self.known(like)
        elem_type = ELEM_TYPES.get(found.dtype, 0) if found is not None else TensorProto.FLOAT
        return self.number(value, helper.tensor_dtype_to_np_dtype(elem_type or TensorProto.FLOAT))

    def source(self, source: Source, shape: Sequence[int], dtype: torch.dtype) -> str:
        """The name of a module's tensor."""
        name = f"{source.path}.{source.name}".lstrip(".")
        if name not in self.sources:
            self.sources[name] = source
            self._inputs.append(_info(name, ELEM_TYPES.get(dtype, TensorProto.FLOAT), tuple(shape)))
        return name

    def pin(self, label: str, why: Refusal | None) -> None:
        """Let a node stay as it is, for a reason."""
        if why is not None:
            self.pinned.setdefault(label, why)

    # ---- what the driver tells ----

    def label(self, node: fx.Node) -> str:
        """A name for a node as a reader of the module knows it: the path of the module, or its place and the function's name."""
        if node.op == "call_module":
            wanted = str(node.target)
        else:
            own = getattr(node.target, "__name__", None) or str(node.target)
            wanted = f"{_place(node)}.{own.strip('_')}".lstrip(".")
        self._counts[wanted] += 1
        label = wanted if self._counts[wanted] == 1 else f"{wanted} {self._counts[wanted]}"
        if label in self.labels:
            return self.label(node)
        self.labels[label] = node
        return label

    def add_input(self, node: fx.Node) -> None:
        """A node of the graph that computes nothing."""
        found = self.known(node)
        self._inputs.append(_info(node.name, *(_described(found) if found is not None else (TensorProto.FLOAT, None))))

    def add(self, node: fx.Node, label: str, protos: Sequence[NodeProto]) -> None:
        """What stands for a node, the last one giving its tensor."""
        for other in node.all_input_nodes if self.contexts else ():
            if self.contexts[other] != self.contexts[node] and other.op not in ("placeholder", "get_attr"):
                self._cross(other, node, protos)
        if TRANSFORM in self.contexts.get(node, ()):
            self.pin(label, refuse("transform of torch.func in forward", "one", "none"))
        for number, proto in enumerate(protos, 1):
            proto.name = label if number == len(protos) else f"{label}/{number}"
            self.protos[proto.name] = proto
        found = self.known(node)
        if found is not None and ELEM_TYPES.get(found.dtype):
            self._infos[node.name] = _info(node.name, *_described(found))

    def _cross(self, made: fx.Node, read: fx.Node, protos: Sequence[NodeProto]) -> None:
        """Let a node read another one's tensor through an Identity, which stays: no pass moves anything across contexts."""
        name = f"{made.name} of {read.name}"
        self.crossings[name] = made.name
        self.protos[name] = helper.make_node("Identity", [made.name], [name], name)
        if made.name in self._infos:
            assert self.sizes is not None
            self._infos[name] = _info(name, *_described(self.sizes.tensors[made]))
        why = [", ".join(sorted(set(self.contexts[a]) - set(self.contexts[b]))) for a, b in ((made, read), (read, made))]
        self.pin(name, refuse("context in forward", why[0] or "none", why[1] or "none"))
        for proto in protos:
            proto.input[:] = [name if item == made.name else item for item in proto.input]

    def add_opaque(self, node: fx.Node, label: str) -> None:
        """A node of which the passes know nothing."""
        kind = re.sub(r"\W", "_", type(self.module(node)).__name__ if node.op == "call_module" else label.rpartition(".")[2])
        names = [other.name for other in node.all_input_nodes]
        self.add(node, label, [helper.make_node(kind, names, [node.name], domain=DOMAIN)])

    def model(self, results: Sequence[fx.Node]) -> ModelProto:
        """The model.  results: nodes that the graph gives."""
        end = helper.make_node("Result", [node.name for node in results], ["result"], name="result", domain=DOMAIN)
        outputs = [_info("result", TensorProto.FLOAT, ())]
        computed = {name for proto in self.protos.values() for name in proto.output}
        outputs += [self._infos.pop(node.name) for node in dict.fromkeys(results) if node.name in self._infos.keys() & computed]
        graph = helper.make_graph(
            [*self.protos.values(), end], "module", self._inputs, outputs, self._constants, value_info=[*self._infos.values()]
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)


def _place(node: fx.Node) -> str:
    """The path of the module around a node, as a captured graph or TorchDynamo has it."""
    stack = node.meta.get("nn_module_stack")
    if PATH in node.meta or not stack:
        return node.meta.get(PATH, "")
    return re.sub(r"L\['self'\]\.?", "", str(list(stack.values())[-1][0])).replace("_modules.", "")


def _described(known: Known) -> tuple[int, tuple[Dim, ...]]:
    return ELEM_TYPES.get(known.dtype, TensorProto.FLOAT), known.shape


def _info(name: str, elem_type: int, shape: tuple[Dim, ...] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem_type, shape)


def ints(value: Any, rank: int) -> tuple[int, ...] | None:
    """One whole number for every axis, or one for each; None for anything else."""
    given = tuple(value) if isinstance(value, (tuple, list)) else (value,) * rank
    given = given * rank if len(given) == 1 else given
    return given if len(given) == rank and all(type(number) is int for number in given) else None


def elements(shape: Sequence[Dim]) -> int | None:
    """How many numbers a tensor has, None where a size is open."""
    known = [n for n in shape if isinstance(n, int)]
    return math.prod(known) if len(known) == len(shape) else None
