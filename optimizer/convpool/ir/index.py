# SPDX-License-Identifier: Apache-2.0
"""A read-only index over the graphs of a model: producers and readers of tensors, constants, shapes.  Nothing here changes it.

A scope is one graph or function body.  The main graph, the bodies of If, Loop and Scan at any depth, and the model-local
functions (and the bodies in them) each get one.  A constant is a value that no caller can change, and what follows from such.
onnx's reference implementation evaluates small shape arithmetic, and who indexes the model (`Evaluate`) weights of any size:
nothing here runs a runtime.

Shapes may follow from constants which onnx's shape inference does not compute.  Exporters write the amounts of a Pad, or the
sizes of a Reshape, by a chain of nodes on constants and on shapes.  Inference gives up there, and all sizes behind are
unknown.  So the model is inferred again with the values of these chains as initializers (`LoadedModel.index`).  The shape that a
Reshape gets may have an open size in it, such as the batch's, if that stays where it is or all others are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from graphlib import TopologicalSorter
from itertools import zip_longest
from typing import Any

import numpy as np
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto, helper, numpy_helper

from convpool.ir import protos
from convpool.ir.files import is_external
from convpool.ir.inference import BRANCHES_OPSET, DISPUTED, infer_elsewhere, infer_shapes, without_large_values
from convpool.ir.protos import HALF_TYPES, INTEGERS, STANDARD_DOMAINS, all_nodes, is_op, key_of
from convpool.ir.schema import is_own

Read = Callable[[TensorProto], np.ndarray]
"""Gives the value of a stored tensor, external or not."""
Evaluate = Callable[[ModelProto, str], np.ndarray]
"""Gives the value of one tensor of a model without inputs.  May raise anything: then the value is unknown."""
Dim = int | str | None
"""A size, a symbolic name, or unknown."""
FOLDABLE = (
    "Abs Add Cast CastLike Ceil Clip Concat ConstantOfShape Div Equal Expand Floor Gather Greater Less Max Min Mod Mul Neg "
    "Not Range ReduceMax ReduceMin ReduceProd ReduceSum Reshape ScatterND Slice Split Squeeze Sub Tile Transpose Unsqueeze "
    "Where"
).split()
"""Operators of shape arithmetic that are evaluated where all their inputs are constants."""
MAX_FOLDED_ELEMENTS = 4096
"""Largest tensor taken into or made by that: sizes, axes, and per-channel parameters."""
MAX_FOLDED_NODES = 100
"""Longest chain of nodes looked through to a constant."""
ARITHMETIC = (
    "Abs Add Concat Div Exp Flatten Gemm Identity MatMul Max Min Mul Neg Pow Reciprocal ReduceL2 ReduceMean ReduceSum "
    "ReduceSumSquare Reshape Slice Sqrt Squeeze Sub Transpose Unsqueeze"
).split()
"""Operators of reparametrised weights, beside Cast of stored HALF_TYPES.  Not DequantizeLinear, which keeps a file small."""
MAX_WEIGHT_ELEMENTS = 2**27
"""Most elements that weights are computed from."""
SHAPING: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Expand", "ReduceMean", "ReduceSum", "Reshape", "Squeeze", "Tile", "Unsqueeze"), (1,)),
    **{"ConstantOfShape": (0,), "Pad": (1, 3), "Resize": (1, 2, 3), "Slice": (1, 2, 3, 4)},
}
"""Operators whose result has a shape that depends on values, and the inputs that have these."""


def index_model(
    model: ModelProto, read: Read, evaluate: Evaluate, inferred: ModelProto | None = None, known: Sequence[Scope] = ()
) -> list[Scope]:
    """Index every scope of `model`, outer ones first.

    read: gives the value of a stored tensor; evaluate: of one that a model computes.  inferred: the same model after shape
    inference, node for node; shapes come from it.  In functions they follow from the arguments, as far as all calls agree.
    known: an earlier index of the same scopes, whose shapes hold still: the model has gained only constants since.
    """
    scopes: list[Scope] = []
    functions = {key_of(function): function for function in model.functions}
    calls: dict[tuple, list[tuple[Scope, NodeProto]]] = {key: [] for key in functions}

    def visit(proto: GraphProto | FunctionProto, typed: Any, parent: Scope | None, path: str, depth: int = 0) -> Scope:
        infos = known[len(scopes)].infos if known else _tensor_infos(typed)
        scope = Scope(proto, parent, model, read, evaluate, infos, path, depth)
        scopes.append(scope)
        for index, node in enumerate(scope.nodes):
            if functions and (key := key_of(node)) in calls:
                calls[key].append((scope, node))
            for position, nth, graph in protos.subgraphs(node):
                typed_graph = None
                if typed is not None:
                    attribute = typed.node[index].attribute[position]
                    typed_graph = attribute.graphs[nth] if attribute.graphs else attribute.g
                place = f"{protos.label(node)}.{node.attribute[position].name}"
                around = depth + 1 + is_op(node, "SequenceMap")  # which stands for a Loop in a function
                child = visit(graph, typed_graph, scope, f"{path}/{place}" if path else place, around)
                child.owner = index
                scope.children.append(child)
                scope.captured |= child.free_names()
        return scope

    visit(model.graph, inferred.graph if inferred is not None else None, None, "")
    called = {key: filter(functions.__contains__, map(key_of, all_nodes(function))) for key, function in functions.items()}
    for key in reversed([*TopologicalSorter(called).static_order()]):  # callers first
        function = functions[key]
        arguments = {} if known else _argument_infos(function, calls[key])
        inputs = [helper.make_tensor_value_info(name, info.elem_type, info.shape) for name, info in arguments.items()]
        typed = infer_function(model, function, inputs) if inputs else None
        depth = max((caller.depth for caller, _ in calls[key]), default=0)
        scope = visit(function, typed, None, f"function {function.name}", depth)
        scope.infos = {**arguments, **scope.infos}
    return scopes


def infer_function(model: ModelProto, function: FunctionProto, inputs: list[Any]) -> GraphProto | None:
    """The function's body as a graph with inferred shapes, node for node; None where it depends on attributes."""
    if any(attribute.ref_attr_name for node in all_nodes(function) for attribute in node.attribute):
        return None
    graph = helper.make_graph(function.node, "body", inputs, [])
    probe = helper.make_model(graph, opset_imports=function.opset_import, functions=protos.called_by(function, model))
    probe.ir_version = model.ir_version
    inferred = infer_shapes(probe)
    return None if inferred is None else inferred.graph


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


def _tensor_infos(graph: GraphProto | None) -> dict[str, TensorInfo]:
    infos = {}
    for value in (*graph.value_info, *graph.input, *graph.output) if graph is not None else ():
        if value.type.HasField("tensor_type"):
            tensor = value.type.tensor_type
            dims = (dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in tensor.shape.dim)
            shape = tuple(dims) if tensor.HasField("shape") else None
            infos[value.name] = TensorInfo(tensor.elem_type, shape, value.doc_string == DISPUTED)
    return infos


def with_shapes_folded(model: ModelProto, main: Scope) -> ModelProto | None:
    """A copy for shape inference in which constants that shapes in `main` depend on are initializers; None where that makes no
    shape known."""
    changes: list[tuple[int, int, str, np.ndarray]] = []
    unknown = False
    for index, node in enumerate(main.nodes):
        positions = SHAPING.get(node.op_type, ()) if node.domain in STANDARD_DOMAINS else ()
        given = [(index, position, node.input[position]) for position in positions if position < len(node.input)]
        makers = [main.producer.get(name) for _, _, name in given]
        found = [it for it, at in zip(given, makers, strict=True) if at is not None and not is_op(main.nodes[at], "Constant")]
        values = [_value(main, node, name) for _, _, name in found]
        if found and all(value is not None for value in values):
            # Also where the shape is known by now, which may be by an earlier copy.
            changes += [(*place, value) for place, value in zip(found, values, strict=True) if value is not None]
            shape = main.info(node.output[0]).shape
            unknown = unknown or shape is None or not all(isinstance(n, int) for n in shape[1:])  # the batch may be
    if not unknown:
        return None
    copy = without_large_values(model)
    for number, (index, position, name, value) in enumerate(changes):
        stored = f"{name}/folded/{number}"
        copy.graph.initializer.append(numpy_helper.from_array(value, stored))
        copy.graph.node[index].input[position] = stored
    return copy


def _value(scope: Scope, node: NodeProto, name: str) -> np.ndarray | None:
    """The value of a node's input; in a Reshape's shape, 0 for a size that is open and stays, -1 for one other that is open."""
    constant = scope.constant(name)
    if constant is not None:
        return constant.array()
    sizes, given = scope.sizes(name), scope.info(node.input[0]).shape
    if not is_op(node, "Reshape") or any(item.i for item in node.attribute) or sizes is None or given is None or 0 in sizes:
        return None
    kept = [0 if isinstance(n, str) and n == old else n for n, old in zip_longest(sizes, given[: len(sizes)])]
    rest = [n for n in kept if not isinstance(n, int)]
    if len(rest) == 1 and -1 not in kept and scope.info(node.output[0]).shape != tuple(sizes):  # -1 would lose its name
        kept, rest = [n if isinstance(n, int) else -1 for n in kept], []
    return None if rest else np.array(kept, np.int64)


@dataclass(eq=False, repr=False)
class Scope:
    """One graph or function body.  Nodes are named by their index in `nodes`; `path` is "" for the main graph."""

    proto: GraphProto | FunctionProto
    parent: Scope | None
    model: ModelProto
    _read: Read
    _evaluate: Evaluate
    infos: dict[str, TensorInfo]
    """Types and shapes that do not follow from constants."""
    path: str = ""
    depth: int = 0
    """Bodies around it; a function's are those around its calls, the most of them."""
    owner: int = -1
    """The node of the scope around a body that has it."""
    captured: set[str] = field(default_factory=set)  # what bodies in it take from it or from around it
    children: list[Scope] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.is_function = isinstance(self.proto, FunctionProto)
        self.is_own = isinstance(self.proto, FunctionProto) and is_own(self.proto)
        """True for the function of one of convpool's operators."""
        self.reload()

    @cached_property
    def opset(self) -> int:
        """Version of the standard operators."""
        if self.parent is not None:
            return self.parent.opset
        return protos.opset_of((self.proto if isinstance(self.proto, FunctionProto) else self.model).opset_import)

    @cached_property
    def trained(self) -> set[str]:
        """Tensors that the model's training information reads or assigns to."""
        if self.is_function or self.parent is not None:
            return set()
        read = {name for graph in protos.training_graphs(self.model) for node in graph.node for name in node.input}
        parts = self.model.training_info
        return read | {entry.key for part in parts for entry in (*part.initialization_binding, *part.update_binding)}

    @property
    def is_bound(self) -> bool:
        """True in a branch of an If whose results must not become better known."""
        around = self.parent
        old = around is not None and self.opset < BRANCHES_OPSET and is_op(around.nodes[self.owner], "If")
        return old or around is not None and around.is_bound

    def reload(self) -> None:
        """Read the nodes anew: they have changed, and shapes hold."""
        proto = self.proto
        self.nodes: list[NodeProto] = list(proto.node)
        self.op_types = {node.op_type for node in self.nodes}
        self.outputs = set(proto.output) if self.is_function else {o.name for o in proto.output}
        self.inputs = set(proto.input) if self.is_function else {i.name for i in proto.input}
        dense, sparse = ((), ()) if self.is_function else (proto.initializer, proto.sparse_initializer)
        self.initializers: dict[str, TensorProto] = {tensor.name: tensor for tensor in dense}
        self.sparse: dict[str, SparseTensorProto] = {tensor.values.name: tensor for tensor in sparse}
        # Before IR 4 an initializer had to be a graph input too, and was none that a caller could override.
        self.constants_as_inputs = self.parent is None and self.model.ir_version < 4
        self.producer: dict[str, int] = {}
        self.readers: dict[str, list[int]] = {}
        self._folded: dict[str, Constant | None] = {}
        self._weights: dict[str, Constant | None] = {}
        self._constants: dict[str, Constant | None] = {}
        self._sizes: dict[str, tuple[Dim, ...] | None] = {}
        self.traced: dict[tuple[str, int], Any] = {}
        """Sizes of tensors by name and axis, and elements of vectors, as `rules.sizes` traces them."""
        for index, node in enumerate(self.nodes):
            for name in node.output:
                if name:
                    self.producer[name] = index
            for name in node.input:
                if name:
                    self.readers.setdefault(name, []).append(index)

    def defines(self, name: str) -> bool:
        """Return True if `name` comes from this scope, not from one around it."""
        return name in self.producer or name in self.initializers or name in self.sparse or name in self.inputs

    def free_names(self) -> set[str]:
        """Tensors that this scope or one inside it takes from the scopes around it."""
        return {name for name in (*self.readers, *self.captured, *self.outputs) if not self.defines(name)}

    def info(self, name: str) -> TensorInfo:
        """Type and shape of a tensor, as far as known."""
        if name in self.infos:
            return self.infos[name]
        if name in self.initializers:
            tensor = self.initializers[name]
            return TensorInfo(tensor.data_type, tuple(tensor.dims))
        if self.parent is not None and not self.defines(name):
            return self.parent.info(name)
        constant = self.constant(name)
        return TensorInfo(constant.data_type, constant.shape) if constant else TensorInfo(0, None)

    def known_sizes(self, name: str, ones: Collection[str] = ()) -> tuple[int | None, ...] | None:
        """The sizes of a tensor, None for one that is open; None if the rank is unknown.  ones: open sizes that count as 1."""
        shape = self.info(name).shape
        if shape is None:
            return None
        return tuple(1 if dim in ones else dim if isinstance(dim, int) and dim >= 0 else None for dim in shape)

    def constant(self, name: str, depth: int = 0) -> Constant | None:
        """The constant that `name` stands for, None when it is computed at run time or a caller may replace it.  Seen through
        Identity, and through small shape arithmetic on constants and static shapes, which exporters leave unfolded.  depth: nodes
        seen through so far."""
        if name not in self._constants:
            found = self._constant(name, depth)
            if found is not None and found.data_type == TensorProto.STRING:
                found = None  # which no rule reads
            if depth:
                return found  # a search that ended at its limit may go further from here
            self._constants[name] = found
        return self._constants[name]

    def _constant(self, name: str, depth: int) -> Constant | None:
        if depth > MAX_FOLDED_NODES:
            return None
        if name in self.initializers or name in self.sparse:
            if name in self.trained or name in self.inputs and not self.constants_as_inputs:
                return None
            tensor = self.initializers.get(name)
            return Constant(tensor, self._read) if tensor is not None else sparse_constant(self.sparse[name])
        if name in self.producer:
            node = self.nodes[self.producer[name]]
            if is_op(node, "Identity"):
                return self.constant(node.input[0], depth + 1)
            if is_op(node, "Constant"):
                return constant_of(node, self._read)
            if is_op(node, "Shape"):
                return self._static(self._sizes_of(node, depth + 1))
            if is_op(node, *FOLDABLE):
                if name not in self._folded:
                    self._folded[name] = None  # ends the search on a graph with a cycle
                    self._folded[name] = self._fold(node, name, depth + 1)
                return self._folded[name]
            return None
        return self.parent.constant(name, depth) if self.parent is not None and name not in self.inputs else None

    def _static(self, sizes: tuple[Dim, ...] | None, shape: Sequence[int] = (-1,)) -> Constant | None:
        """Sizes as a constant, None unless all of them are static."""
        if sizes is None or not all(isinstance(n, int) for n in sizes):
            return None
        return self._known(numpy_helper.from_array(np.array(sizes, np.int64).reshape(shape)))

    def _sizes_of(self, node: NodeProto, depth: int) -> tuple[Dim, ...] | None:
        """Return a Shape's output, as far as it is known."""
        known = self.infos.get(node.input[0]) or self.constant(node.input[0], depth)
        shape = known.shape if known is not None else None
        if shape is None or any(attribute.ref_attr_name for attribute in node.attribute):
            return None
        return shape[slice(*(next((item.i for item in node.attribute if item.name == name), None) for name in ("start", "end")))]

    def sizes(self, name: str, depth: int = 0) -> tuple[Dim, ...] | None:
        """The elements of a vector or number made of constants and parts of shapes, each known or not; None for other tensors."""
        if depth > MAX_FOLDED_NODES:
            return None
        if name not in self._sizes:
            self._sizes[name] = None  # ends the search on a graph with a cycle
            self._sizes[name] = self._sizes_by_name(name, depth)
        return self._sizes[name]

    def _sizes_by_name(self, name: str, depth: int) -> tuple[Dim, ...] | None:
        node = self.nodes[self.producer[name]] if name in self.producer else None
        cast = node is not None and is_op(node, "Cast") and self.constant(name, depth) is None
        if node is None or not cast and not is_op(node, "Shape", "Concat", "Unsqueeze", "Gather", "Slice"):
            constant = self.constant(name, depth)
            if constant is None or constant.data_type not in INTEGERS or len(constant.shape) > 1:
                return None
            return self.constant_ints(name) if math.prod(constant.shape) <= MAX_FOLDED_ELEMENTS else None
        if is_op(node, "Shape"):
            return self._sizes_of(node, depth + 1)
        sources = node.input if is_op(node, "Concat") else node.input[:1]
        known = [part for source in sources if (part := self.sizes(source, depth + 1)) is not None]
        matrix = any(len(getattr(self.infos.get(source), "shape", None) or ()) > 1 for source in sources)
        matrix |= is_op(node, "Unsqueeze") and len(getattr(self.infos.get(name), "shape", None) or (0, 0)) > 1
        if matrix or len(known) < len(sources) or sum(map(len, known)) > MAX_FOLDED_ELEMENTS:
            return None
        if cast or is_op(node, "Concat", "Unsqueeze"):
            sizes = tuple(size for part in known for size in part)
            fits = all(abs(size) < 2**31 for size in sizes if isinstance(size, int))  # an INT32 has the low bits of others
            return sizes if not cast or fits and any(a.name == "to" and a.i in INTEGERS for a in node.attribute) else None
        rest = [self.constant_ints(source) for source in node.input[1:]]
        return None if None in rest else _picked(node, known[0], [item for item in rest if item is not None])

    def _fold(self, node: NodeProto, name: str, depth: int) -> Constant | None:
        """The result of a node whose inputs are all small constants."""
        inputs = {}
        for source in filter(None, node.input):
            constant = self.constant(source, depth)
            if constant is None:  # a Gather or Slice may pick static sizes of a shape with others
                picks = is_op(node, "Gather", "Slice") and self.info(name).elem_type == TensorProto.INT64
                sizes = self.sizes(name, depth) if picks else None
                indices = self.constant(node.input[1], depth) if sizes is not None and is_op(node, "Gather") else None
                return self._static(sizes, (-1,) if indices is None else indices.shape)
            if math.prod(constant.shape) > MAX_FOLDED_ELEMENTS:
                return None
            inputs[source] = constant.array()
        numbers = ([*inputs.get(name, ())] for name in [*node.input, *[""] * 4][1:5])
        if is_op(node, "Slice") and protos.takes_more(*numbers) or any(attribute.ref_attr_name for attribute in node.attribute):
            return None
        return self._known(folded(node, name, inputs, self.opset))

    def weights(self, name: str) -> Constant | None:
        """Find a `constant` of any size, as spectral or weight normalisation computes."""
        constant = self.constant(name)
        if constant is not None:
            return constant
        if name not in self._weights:
            nodes = self.arithmetic(name)
            self._weights[name] = None if nodes is None else self.compute(name, nodes)
        return self._weights[name]

    def arithmetic(self, name: str) -> list[int] | None:
        """The nodes that compute `name` from constants, by ARITHMETIC only; None if it comes about in another way."""
        found, names = set[int](), [name]
        while names:
            name = names.pop()
            index = self.producer.get(name)
            node = None if index is None else self.nodes[index]
            cast = self.constant(node.input[0]) if node is not None and is_op(node, "Cast") else None
            known = node is not None and (is_op(node, *ARITHMETIC) or cast is not None and cast.data_type in HALF_TYPES)
            if index is None or node is None or not known or any(a.ref_attr_name for a in node.attribute):
                if name and self.constant(name) is None:
                    return None
            elif index not in found:
                found.add(index)
                names.extend(node.input)
        return sorted(found) or None

    def compute(self, name: str, indices: list[int]) -> Constant | None:
        """Compute `name` by nodes on constants; None if too large, or the runtime refuses them."""
        nodes = [self.nodes[index] for index in indices]
        made = {output for node in nodes for output in node.output}
        leaves = {source: self.constant(source) for node in nodes for source in node.input if source and source not in made}
        known = {source: leaf for source, leaf in leaves.items() if leaf is not None}
        if sum(math.prod(leaf.shape) for leaf in known.values()) > MAX_WEIGHT_ELEMENTS:
            return None
        stored = [numpy_helper.from_array(leaf.array(), source) for source, leaf in known.items()]
        graph = helper.make_graph(nodes, "weights", [], [helper.make_empty_tensor_value_info(name)], stored)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)
        try:
            result = self._evaluate(model, name)
        except Exception:  # a type or opset that the runtime does not have: then these are no constants
            return None
        return self._known(numpy_helper.from_array(result, name))

    def _known(self, tensor: TensorProto | None) -> Constant | None:
        return None if tensor is None else Constant(tensor, self._read)

    def constant_ints(self, name: str) -> tuple[int, ...] | None:
        """A constant integer tensor as a flat tuple, None if it is no constant."""
        constant = self.constant(name)
        array = None if constant is None else constant.array()
        return None if array is None or array.dtype.kind not in "iub" else tuple(int(v) for v in array.reshape(-1))

    def chain(self, index: int, *op_types: str) -> list[int] | None:
        """Node `index` and, from input 0 to input 0, the nodes in front of it; None where they are of other types."""
        nodes = [index]
        for op_type in op_types:
            source = self.made_by(self.nodes[nodes[-1]].input[0], op_type)
            if source is None:
                return None
            nodes.append(source)
        return nodes

    def made_by(self, name: str, *op_types: str) -> int | None:
        """The node of this scope that gives `name`, if it is one of the standard operators named; else None."""
        index = self.producer.get(name)
        return index if index is not None and is_op(self.nodes[index], *op_types) else None

    def cone(self, names: Iterable[str], takes: Callable[[int], bool]) -> set[int]:
        """The nodes that tensors are computed by, up to what Shapes read, and to nodes that `takes` refuses."""
        found, pending = set[int](), list(names)
        while pending:
            index = self.producer.get(pending.pop())
            if index is not None and index not in found and takes(index):
                found.add(index)
                pending.extend(() if is_op(self.nodes[index], "Shape") else self.nodes[index].input)
        return found

    def read_outside(self, name: str, inside: Collection[int]) -> bool:
        """Return True if anything but the nodes `inside` reads a tensor."""
        return name in self.outputs or name in self.captured or any(i not in inside for i in self.readers.get(name, ()))

    def other_readers(self, name: str) -> str | None:
        """None if one node of this scope, and nothing else, reads `name`; otherwise who reads it, in words."""
        if name in self.outputs:
            return "is a graph output"
        if name in self.captured:
            return "is read by a subgraph"
        count = len(self.readers.get(name, ()))
        return None if count == 1 else f"has {count} readers"


@dataclass(frozen=True)
class TensorInfo:
    """Element type (a TensorProto.DataType, 0 if unknown), shape (None if even the rank is unknown) and if onnx disputes it."""

    elem_type: int
    shape: tuple[Dim, ...] | None
    disputed: bool = False


@dataclass(frozen=True)
class Constant:
    """A value that no caller can change: an initializer or a Constant node, read only when asked for."""

    tensor: TensorProto
    read: Read

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.dims)

    @property
    def data_type(self) -> int:
        return self.tensor.data_type

    @property
    def unit_roundoff(self) -> float:
        """Relative error that its numbers may have by being rounded to their type; 0 for types that are not floating-point."""
        return protos.UNIT_ROUNDOFF.get(self.data_type, 0.0)

    def array(self) -> np.ndarray:
        """The value; external data is read from its file here."""
        return self.read(self.tensor)


def _picked(node: NodeProto, sizes: tuple[Dim, ...], inputs: list[tuple[int, ...]]) -> tuple[Dim, ...] | None:
    """Return what a Gather or Slice with these inputs picks of a vector; None if not plain."""
    if is_op(node, "Gather"):
        (indices,) = inputs
        return tuple(sizes[i] for i in indices) if all(-len(sizes) <= i < len(sizes) for i in indices) else None
    if len(inputs) < 2 or any(len(item) != 1 for item in inputs) or inputs[3:] not in ([], [(1,)]):
        return None
    return sizes[inputs[0][0] : inputs[1][0]]


def folded(node: NodeProto, name: str, inputs: Mapping[str, np.ndarray], opset: int) -> TensorProto | None:
    """Return a node's output `name` for constants; None if too large or the reference refuses."""
    stored = [numpy_helper.from_array(array, source) for source, array in inputs.items()]
    graph = helper.make_graph([node], "fold", [], [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None)], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    try:
        return _evaluated(model.SerializeToString())
    except Exception:  # whatever the reference implementation has against it: then it is not folded
        return None


@lru_cache(maxsize=4096)
def _evaluated(content: bytes) -> TensorProto | None:
    """Evaluate a serialised model's only output; None if it is too large.  A model is indexed many times."""
    from onnx.reference import ReferenceEvaluator

    model = ModelProto.FromString(content)
    (output,) = infer_elsewhere(model).graph.output
    if math.prod(dim.dim_value for dim in output.type.tensor_type.shape.dim) > MAX_FOLDED_ELEMENTS:
        return None
    with np.errstate(all="ignore"):  # a constant may be NaN
        (value,) = ReferenceEvaluator(model).run([output.name], {})
    result = np.asarray(value)
    return None if result.size > MAX_FOLDED_ELEMENTS else numpy_helper.from_array(result, output.name)


def constant_of(node: NodeProto, read: Read) -> Constant | None:
    """The value of a Constant node; None for a string, or an attribute of the function around it."""
    if len(node.attribute) != 1 or node.attribute[0].ref_attr_name:
        return None
    attribute = node.attribute[0]
    if attribute.name == "value":
        return Constant(attribute.t, read)
    if attribute.name == "sparse_value":
        return sparse_constant(attribute.sparse_tensor)
    if attribute.name not in ("value_float", "value_floats", "value_int", "value_ints"):
        return None
    kind = np.float32 if "float" in attribute.name else np.int64
    return Constant(numpy_helper.from_array(np.array(helper.get_attribute_value(attribute), kind)), read)


def sparse_constant(sparse: SparseTensorProto) -> Constant | None:
    """A sparse tensor as a constant that is made dense when it is read; None for one in a file, or too large for that."""
    if is_external(sparse.values) or is_external(sparse.indices) or math.prod(sparse.dims) > MAX_WEIGHT_ELEMENTS:
        return None

    def dense(tensor: TensorProto) -> np.ndarray:
        values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
        array = np.zeros(tuple(tensor.dims), values.dtype)
        if indices.ndim == 2:
            array[tuple(indices.T)] = values
        else:
            array.reshape(-1)[indices] = values
        return array

    return Constant(TensorProto(data_type=sparse.values.data_type, dims=sparse.dims), dense)
