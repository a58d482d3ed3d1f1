"""A read-only index over the graphs of a model: who produces a tensor, who reads it, what is constant, which shape.

A scope is one graph or function body.  The main graph, the bodies of If, Loop and Scan at any depth, and the
model-local functions (and the bodies in them) each get one.  Nothing here changes the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

Dim = int | str | None
"""A size, a symbolic name, or unknown."""


@dataclass(frozen=True)
class TensorInfo:
    """Element type (a TensorProto.DataType, 0 if unknown) and shape (None if even the rank is unknown)."""

    elem_type: int
    shape: tuple[Dim, ...] | None


FOLDABLE = (
    "Add",
    "Cast",
    "CastLike",
    "Concat",
    "ConstantOfShape",
    "Div",
    "Expand",
    "Gather",
    "Mul",
    "Neg",
    "Range",
    "Reshape",
    "Slice",
    "Squeeze",
    "Sub",
    "Transpose",
    "Unsqueeze",
)
"""Operators of shape arithmetic that are evaluated where all their inputs are constants."""
MAX_FOLDED_ELEMENTS = 4096
"""Largest tensor taken into or made by that: sizes, axes, and per-channel parameters."""
MAX_FOLDED_NODES = 100
"""Longest chain of nodes looked through to a constant."""
ARITHMETIC = (
    "Abs",
    "Add",
    "Concat",
    "Div",
    "Exp",
    "Flatten",
    "Gemm",
    "Identity",
    "MatMul",
    "Max",
    "Min",
    "Mul",
    "Neg",
    "Pow",
    "Reciprocal",
    "ReduceL2",
    "ReduceMean",
    "ReduceSum",
    "ReduceSumSquare",
    "Reshape",
    "Slice",
    "Sqrt",
    "Squeeze",
    "Sub",
    "Transpose",
    "Unsqueeze",
)
"""Operators that reparametrised weights are made of.  Not Cast or DequantizeLinear: they are there to keep a file small."""
COMPUTING_IR_VERSION = 8
MAX_WEIGHT_ELEMENTS = 2**27
"""Most elements that weights are computed from."""
UNKNOWN = TensorInfo(0, None)


class Constant:
    """A value that no caller can change: an initializer or a Constant node, read only when asked for."""

    def __init__(self, tensor: TensorProto, read: Callable[[TensorProto], np.ndarray]) -> None:
        self._tensor, self._read = tensor, read
        self.shape = tuple(tensor.dims)
        self.data_type: int = tensor.data_type

    def array(self) -> np.ndarray:
        """The value; external data is read from its file here."""
        return self._read(self._tensor)


class Scope:
    """One graph or function body.  Nodes are named by their index in `nodes`; `path` is "" for the main graph."""

    def __init__(
        self,
        proto: GraphProto | FunctionProto,
        parent: Scope | None,
        opset: int,
        ir_version: int,
        read: Callable[[TensorProto], np.ndarray],
        infos: dict[str, TensorInfo],
        path: str = "",
        depth: int = 0,
    ) -> None:
        self.proto, self.parent, self.opset, self.path = proto, parent, opset, path
        self.depth = depth
        """Bodies around it; a function's are those around its calls, the most of them."""
        self._read, self._infos = read, infos
        self.is_function = isinstance(proto, FunctionProto)
        self.nodes: list[NodeProto] = list(proto.node)
        self.outputs = set(proto.output) if self.is_function else {o.name for o in proto.output}
        self.inputs = set(proto.input) if self.is_function else {i.name for i in proto.input}
        self.initializers: dict[str, TensorProto] = (
            {} if self.is_function else {tensor.name: tensor for tensor in proto.initializer}
        )
        # Before IR 4 an initializer had to be a graph input too, and was none that a caller could override.
        self.constants_as_inputs = parent is None and ir_version < 4
        self.trained: set[str] = set()
        """Initializers that the model's training information assigns to."""
        self.producer: dict[str, int] = {}
        self.readers: dict[str, list[int]] = {}
        self.captured: set[str] = set()
        self._folded: dict[str, Constant | None] = {}
        self._weights: dict[str, Constant | None] = {}
        self.children: list[Scope] = []
        for index, node in enumerate(self.nodes):
            for name in node.output:
                if name:
                    self.producer[name] = index
            for name in node.input:
                if name:
                    self.readers.setdefault(name, []).append(index)

    def add_infos(self, infos: dict[str, TensorInfo]) -> None:
        """Types and shapes known from elsewhere."""
        self._infos = {**infos, **self._infos}

    def defines(self, name: str) -> bool:
        """Whether `name` comes from this scope, not from one around it."""
        return name in self.producer or name in self.initializers or name in self.inputs

    def free_names(self) -> set[str]:
        """Tensors that this scope or one inside it takes from the scopes around it."""
        return {name for name in (*self.readers, *self.captured, *self.outputs) if not self.defines(name)}

    def info(self, name: str) -> TensorInfo:
        """Type and shape of a tensor, as far as known."""
        if name in self._infos:
            return self._infos[name]
        if name in self.initializers:
            tensor = self.initializers[name]
            return TensorInfo(tensor.data_type, tuple(tensor.dims))
        if self.parent is not None and not self.defines(name):
            return self.parent.info(name)
        constant = self.constant(name)
        return TensorInfo(constant.data_type, constant.shape) if constant else UNKNOWN

    def constant(self, name: str, depth: int = 0) -> Constant | None:
        """The constant behind `name`, None when it is computed at run time or a caller may replace it.

        Seen through Identity, and through small shape arithmetic on constants, which exporters leave unfolded.  depth:
        nodes seen through so far.
        """
        if depth > MAX_FOLDED_NODES:
            return None
        if name in self.initializers:
            if name in self.trained or name in self.inputs and not self.constants_as_inputs:
                return None
            return Constant(self.initializers[name], self._read)
        if name in self.producer:
            node = self.nodes[self.producer[name]]
            if is_op(node, "Identity"):
                return self.constant(node.input[0], depth + 1)
            if is_op(node, "Constant"):
                tensor = _constant_tensor(node)
                return Constant(tensor, self._read) if tensor is not None else None
            if is_op(node, *FOLDABLE):
                if name not in self._folded:
                    self._folded[name] = None  # ends the search on a graph with a cycle
                    self._folded[name] = self._fold(node, name, depth + 1)
                return self._folded[name]
            return None
        if self.parent is not None and name not in self.inputs:
            return self.parent.constant(name, depth)
        return None

    def _fold(self, node: NodeProto, name: str, depth: int) -> Constant | None:
        """Evaluate a node whose inputs are all small constants, by onnx's reference implementation."""
        inputs = {}
        for source in filter(None, node.input):
            constant = self.constant(source, depth)
            if constant is None or math.prod(constant.shape) > MAX_FOLDED_ELEMENTS:
                return None
            inputs[source] = constant.array()
        if any(attribute.ref_attr_name for attribute in node.attribute):
            return None
        stored = [numpy_helper.from_array(array, source) for source, array in inputs.items()]
        outputs = [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None)]
        graph = helper.make_graph([node], "fold", [], outputs, stored)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)])
        try:
            from onnx.reference import ReferenceEvaluator

            shape = onnx.shape_inference.infer_shapes(model, data_prop=True).graph.output[0].type.tensor_type.shape
            if math.prod(dim.dim_value for dim in shape.dim) > MAX_FOLDED_ELEMENTS:
                return None
            result = np.asarray(ReferenceEvaluator(model).run([name], {})[0])
        except Exception:  # whatever the reference implementation has against it: then it is not folded
            return None
        if result.size > MAX_FOLDED_ELEMENTS:
            return None
        return Constant(numpy_helper.from_array(result, name), self._read)

    def weights(self, name: str) -> Constant | None:
        """As `constant`, and of any size: what spectral or weight normalisation computes from constants, by onnxruntime."""
        constant = self.constant(name)
        if constant is not None:
            return constant
        if name not in self._weights:
            nodes = self.arithmetic(name)
            self._weights[name] = None if nodes is None else self._compute(name, nodes)
        return self._weights[name]

    def arithmetic(self, name: str) -> list[int] | None:
        """The nodes that compute `name` from constants, by ARITHMETIC alone; None if it comes about in another way."""
        found: set[int] = set()
        names = [name]
        while names:
            name = names.pop()
            index = self.producer.get(name)
            node = None if index is None else self.nodes[index]
            if node is None or not is_op(node, *ARITHMETIC) or any(attribute.ref_attr_name for attribute in node.attribute):
                if name and self.constant(name) is None:
                    return None
            elif index not in found:
                found.add(index)
                names.extend(node.input)
        return sorted(found) or None

    def _compute(self, name: str, indices: list[int]) -> Constant | None:
        nodes = [self.nodes[index] for index in indices]
        made = {output for node in nodes for output in node.output}
        leaves = {source: self.constant(source) for node in nodes for source in node.input if source and source not in made}
        if sum(math.prod(leaf.shape) for leaf in leaves.values() if leaf) > MAX_WEIGHT_ELEMENTS:
            return None
        stored = [numpy_helper.from_array(leaf.array(), source) for source, leaf in leaves.items() if leaf]
        graph = helper.make_graph(nodes, "weights", [], [onnx.ValueInfoProto(name=name)], stored)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=COMPUTING_IR_VERSION)
        try:
            from convpool.modelio import LoadedModel
            from convpool.verify import make_session

            (result,) = make_session(LoadedModel(model, None, 0), optimize=False).run([name], {})
        except Exception:  # a type or opset that it does not have: then these are no constants
            return None
        return Constant(numpy_helper.from_array(result, name), self._read)

    def constant_ints(self, name: str) -> tuple[int, ...] | None:
        """A constant integer tensor as a flat tuple, None if it is no constant."""
        constant = self.constant(name)
        return None if constant is None else tuple(int(v) for v in constant.array().reshape(-1))

    def sole_reader(self, name: str) -> str | None:
        """None if one node of this scope reads `name` and nothing else does; otherwise what else does, in words."""
        if name in self.outputs:
            return "is a graph output"
        if name in self.captured:
            return "is read by a subgraph"
        count = len(self.readers.get(name, ()))
        return None if count == 1 else f"has {count} readers"


def is_op(node: NodeProto, *op_types: str) -> bool:
    """Whether `node` is one of the standard operators named."""
    return node.op_type in op_types and node.domain in ("", "ai.onnx")


def label(node: NodeProto) -> str:
    """The node's name, or its first output's where it has none."""
    return node.name or next((name for name in node.output if name), node.op_type)


class AttributeReference(Exception):
    """An attribute takes its value from the function that the node stands in, so it is unknown here."""


def attributes(node: NodeProto) -> dict[str, Any]:
    """The node's attributes as Python values.  Raises AttributeReference where one refers to a function's."""
    values = {}
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            raise AttributeReference(attribute.name)
        values[attribute.name] = helper.get_attribute_value(attribute)
    return values


def subgraphs(node: NodeProto) -> Iterator[tuple[int, int, GraphProto]]:
    """The graphs in a node's attributes, with the attribute's index and the position in it."""
    for position, attribute in enumerate(node.attribute):
        if attribute.type == AttributeProto.GRAPH:
            yield position, 0, attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            for index, graph in enumerate(attribute.graphs):
                yield position, index, graph


def graphs_within(graph: GraphProto) -> Iterator[GraphProto]:
    """`graph` and every graph in its nodes' attributes, at any depth, in a fixed order."""
    yield graph
    for node in graph.node:
        for _, _, inner in subgraphs(node):
            yield from graphs_within(inner)


def tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Every tensor stored in the model: initializers and Constant values, subgraphs and functions included."""

    def visit(proto) -> Iterator[TensorProto]:
        if isinstance(proto, GraphProto):
            yield from proto.initializer
        for node in proto.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors
            for _, _, graph in subgraphs(node):
                yield from visit(graph)

    yield from visit(model.graph)
    for function in model.functions:
        yield from visit(function)


def index_model(model: ModelProto, read: Callable[[TensorProto], np.ndarray], inferred: ModelProto | None = None) -> list[Scope]:
    """Index every scope of `model`, outer ones first.

    read: gives the value of a tensor, external or not.  inferred: the same model after shape inference, node for
    node; shapes come from it.  In functions they follow from the arguments, as far as all calls agree.
    """
    scopes: list[Scope] = []
    functions = {_key(function): function for function in model.functions}
    calls: dict[tuple, list[tuple[Scope, NodeProto]]] = {key: [] for key in functions}

    def visit(proto, typed, parent: Scope | None, opset: int, path: str, depth: int = 0) -> Scope:
        scope = Scope(proto, parent, opset, model.ir_version, read, _tensor_infos(typed), path, depth)
        scopes.append(scope)
        for index, node in enumerate(scope.nodes):
            if functions and (key := (node.domain, node.op_type, node.overload)) in calls:
                calls[key].append((scope, node))
            for position, nth, graph in subgraphs(node):
                typed_graph = None
                if typed is not None:
                    attribute = typed.node[index].attribute[position]
                    typed_graph = attribute.graphs[nth] if attribute.graphs else attribute.g
                place = f"{label(node)}.{node.attribute[position].name}"
                child = visit(graph, typed_graph, scope, opset, f"{path}/{place}" if path else place, depth + 1)
                scope.children.append(child)
                scope.captured |= child.free_names()
        return scope

    visit(model.graph, inferred.graph if inferred is not None else None, None, opset_of(model.opset_import), "")
    for training in model.training_info:
        scopes[0].trained |= {entry.key for entry in (*training.initialization_binding, *training.update_binding)}
    for key in _callers_first(functions):
        function = functions[key]
        arguments = _argument_infos(function, calls[key])
        typed = _infer_function(model, function, arguments) if arguments else None
        depth = max((caller.depth for caller, _ in calls[key]), default=0)
        scope = visit(function, typed, None, opset_of(function.opset_import), f"function {function.name}", depth)
        scope.add_infos(arguments)
    return scopes


def _key(function: FunctionProto) -> tuple[str, str, str]:
    return function.domain, function.name, function.overload


def _callers_first(functions: dict[tuple, FunctionProto]) -> list[tuple]:
    """The functions' keys, each after those of the functions that call it."""
    called = {
        key: {(n.domain, n.op_type, n.overload) for n in _all_nodes(function)} & functions.keys()
        for key, function in functions.items()
    }
    order: list[tuple] = []

    def visit(key: tuple) -> None:  # ONNX allows no recursion, so this ends
        if key not in order:
            for other in called[key]:
                visit(other)
            order.append(key)

    for key in functions:
        visit(key)
    return order[::-1]


def _all_nodes(proto: GraphProto | FunctionProto) -> Iterator[NodeProto]:
    for node in proto.node:
        yield node
        for _, _, graph in subgraphs(node):
            yield from _all_nodes(graph)


def _argument_infos(function: FunctionProto, calls: list[tuple[Scope, NodeProto]]) -> dict[str, TensorInfo]:
    """Types and shapes of a function's inputs where all calls agree; dimensions that differ are unknown."""
    infos = {}
    for position, name in enumerate(function.input):
        found = [s.info(n.input[position]) for s, n in calls if len(n.input) > position and n.input[position]]
        shapes = [info.shape for info in found]
        if not found or len(found) < len(calls) or any(s is None or len(s) != len(shapes[0] or ()) for s in shapes):
            continue
        if len({info.elem_type for info in found}) == 1:
            dims = zip(*(s for s in shapes if s is not None), strict=True)
            shape = tuple(d[0] if len(set(d)) == 1 and isinstance(d[0], int) else None for d in dims)
            infos[name] = TensorInfo(found[0].elem_type, shape)
    return infos


def _infer_function(model: ModelProto, function: FunctionProto, inputs: dict[str, TensorInfo]) -> GraphProto | None:
    """The function's body as a graph with inferred shapes, node for node; None where it depends on attributes."""
    if any(attribute.ref_attr_name for node in _all_nodes(function) for attribute in node.attribute):
        return None
    values = [helper.make_tensor_value_info(name, info.elem_type, info.shape) for name, info in inputs.items()]
    graph = helper.make_graph(function.node, "body", values, [])
    probe = helper.make_model(graph, opset_imports=function.opset_import, functions=model.functions)
    probe.ir_version = model.ir_version
    try:
        return onnx.shape_inference.infer_shapes(probe, data_prop=True).graph
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError):
        return None


def opset_of(imports) -> int:
    """Version of the standard operators that `imports` names; 0 if none."""
    return max((entry.version for entry in imports if entry.domain in ("", "ai.onnx")), default=0)


def value_names(model: ModelProto) -> set[str]:
    """Every tensor and node name anywhere in the model, functions included."""
    names: set[str] = set()

    def visit(proto) -> None:
        if isinstance(proto, GraphProto):
            names.update(value.name for value in (*proto.input, *proto.output, *proto.initializer))
            names.update(tensor.values.name for tensor in proto.sparse_initializer)
        else:
            names.update((*proto.input, *proto.output))
        for node in proto.node:
            names.add(node.name)
            names.update(node.input)
            names.update(node.output)
            for _, _, graph in subgraphs(node):
                visit(graph)

    visit(model.graph)
    for function in model.functions:
        visit(function)
    return names


def _tensor_infos(graph: GraphProto | None) -> dict[str, TensorInfo]:
    infos = {}
    for value in (*graph.value_info, *graph.input, *graph.output) if graph is not None else ():
        if value.type.HasField("tensor_type"):
            tensor = value.type.tensor_type
            shape = None
            if tensor.HasField("shape"):
                shape = tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in tensor.shape.dim)
            infos[value.name] = TensorInfo(tensor.elem_type, shape)
    return infos


def _constant_tensor(node: NodeProto) -> TensorProto | None:
    if len(node.attribute) != 1 or node.attribute[0].ref_attr_name:
        return None
    attribute = node.attribute[0]
    if attribute.name == "value":
        return attribute.t
    if attribute.name in ("value_float", "value_floats"):
        values = attribute.floats if attribute.name.endswith("s") else attribute.f
        return numpy_helper.from_array(np.array(values, np.float32))
    if attribute.name in ("value_int", "value_ints"):
        values = attribute.ints if attribute.name.endswith("s") else attribute.i
        return numpy_helper.from_array(np.array(values, np.int64))
    return None
