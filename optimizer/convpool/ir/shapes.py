# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model's inputs: those that it leaves open, those that a caller gives, and the model with these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from numbers import Integral

from onnx import GraphProto, ModelProto, TensorShapeProto, ValueInfoProto, helper

from convpool.errors import OptionError
from convpool.ir.constants import Evaluate
from convpool.ir.index import Dim, Scope, index_with_shapes
from convpool.ir.inference import infer_shapes, side_by_side
from convpool.ir.model import LoadedModel, load
from convpool.ir.protos import graphs_within

Shapes = Mapping[str, Sequence[int]]
"""Shapes by input."""


def feeds(model: ModelProto) -> list[ValueInfoProto]:
    """The graph inputs that a caller must give: those without an initializer."""
    initializers = {tensor.name for tensor in model.graph.initializer}
    initializers |= {tensor.values.name for tensor in model.graph.sparse_initializer}
    return [value for value in model.graph.input if value.name not in initializers]


def dims_of(value: ValueInfoProto) -> list[Dim]:
    """The sizes of an input, a name or None for one that is open."""
    dims = value.type.tensor_type.shape.dim
    fixed = [dim.HasField("dim_value") and dim.dim_value >= 0 for dim in dims]  # some write -1 for an open one
    return [dim.dim_value if known else dim.dim_param or None for dim, known in zip(dims, fixed, strict=True)]


def fit_shapes(values: list[ValueInfoProto], shapes: Shapes, what: str = "input shape") -> dict[str, list[int]]:
    """Shapes given for some of the inputs `values`, as numbers.  Raises OptionError for some that do not fit.  what: they are."""
    wanted = {value.name: value for value in values}
    for name, shape in shapes.items():
        if name not in wanted:
            raise OptionError(f"{what}: no input '{name}'; expected one of {', '.join(wanted) or 'none'}")
        if not all(isinstance(size, Integral) and 1 <= size < 2**63 for size in shape):
            raise OptionError(f"{what} of '{name}'; got {list(shape)}, expected positive sizes")
        if not wanted[name].type.HasField("tensor_type"):
            raise OptionError(f"{what}: input '{name}'; got a shape, expected none: it is no tensor")
        check_shape(wanted[name], shape, what)
    return {name: [int(size) for size in shape] for name, shape in shapes.items()}


def fitting(values: list[ValueInfoProto], shapes: Shapes) -> dict[str, Sequence[int]]:
    """Return those of `shapes`, given for inputs by name, that fit one of the inputs `values`."""
    return {value.name: shapes[value.name] for value in values if value.name in shapes and _fits(value, shapes[value.name])}


def check_shape(value: ValueInfoProto, shape: Sequence[int], what: str) -> None:
    """Raise OptionError for a shape that does not fit an input.  what: it is."""
    if not _fits(value, shape):
        shown = [dim if dim is not None else "?" for dim in dims_of(value)]
        raise OptionError(f"{what}: input '{value.name}'; got shape {list(shape)}, expected {shown}")


def _fits(value: ValueInfoProto, shape: Sequence[int]) -> bool:
    if not value.type.tensor_type.HasField("shape"):
        return True
    dims = dims_of(value)
    return len(dims) == len(shape) and all(not isinstance(dim, int) or dim == size for dim, size in zip(dims, shape, strict=True))


def with_fixed(original: LoadedModel, fixed: Shapes, given: Shapes) -> tuple[LoadedModel, dict[str, Sequence[int]]]:
    """The model with inputs of fixed sizes, itself where none are new; and its inputs' known shapes, those given among them.

    Raises ModelError or OptionError.
    """
    inputs = feeds(original.proto)
    sizes, shapes = fit_shapes(inputs, fixed, "fix shape"), fit_shapes(inputs, given)
    known = static_shapes(inputs)
    if all(known.get(name) == shape for name, shape in sizes.items()):
        return original, {**shapes}
    proto = with_sizes(original.proto, sizes)
    inputs = feeds(proto)
    shapes = fit_shapes(inputs, shapes) | static_shapes(inputs)
    model = load(proto, original.base_dir)
    model.path = original.path
    return model, {**shapes}


def static_shapes(inputs: Sequence[ValueInfoProto]) -> dict[str, list[int]]:
    """The shapes of those of these inputs whose sizes are all known, by name."""
    kinds = {value.name: value.type.tensor_type for value in inputs}
    shapes = {name: [dim.dim_value for dim in kind.shape.dim] for name, kind in kinds.items() if kind.HasField("shape")}
    return {name: sizes for name, sizes in shapes.items() if all(size > 0 for size in sizes)}


def with_sizes(model: ModelProto, shapes: Shapes) -> ModelProto:
    """A copy in which inputs have the shapes given, by name, and other tensors the sizes that follow.

    A name that stands for one size in these shapes stands for it in the other inputs too.  Sizes of outputs and in value_info,
    also in bodies, are then those that follow from the inputs: those noted for other sizes go, and names of sizes given too,
    since exporters name sizes by guess.
    """
    fixed = deepcopy(model)
    sizes: dict[str, set[int]] = {}
    for value in fixed.graph.input:
        if value.name in shapes:
            shape = value.type.tensor_type.shape
            names = [dim.dim_param for dim in shape.dim]
            del shape.dim[:]
            for number, size in enumerate(shapes[value.name]):
                shape.dim.add(dim_value=size)
                if number < len(names) and names[number]:
                    sizes.setdefault(names[number], set()).add(size)
    for value in fixed.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if len(sizes.get(dim.dim_param, ())) == 1:
                (dim.dim_value,) = sizes[dim.dim_param]
    for graph in graphs_within(fixed.graph):
        for value in _noted(graph, fixed):
            for dim in value.type.tensor_type.shape.dim:
                if not dim.dim_param or dim.dim_param in sizes:
                    dim.Clear()
    inferred = infer_shapes(fixed)
    if inferred is not None:
        for graph, _, known in side_by_side(fixed, inferred):
            for value in _noted(graph, fixed):
                found = known[value.name].tensor_type if value.name in known else None
                if value.type.tensor_type.HasField("shape") and found is not None and found.HasField("shape"):
                    _fill_in(value.type.tensor_type.shape, found.shape)
    return fixed


def _noted(graph: GraphProto, model: ModelProto) -> Iterator[ValueInfoProto]:
    """Yield a graph's notes of tensors other than the model's inputs."""
    yield from (*graph.value_info, *graph.output, *(() if graph is model.graph else graph.input))


def _fill_in(noted: TensorShapeProto, known: TensorShapeProto) -> None:
    """Give one tensor's open sizes those that are known."""
    if len(noted.dim) != len(known.dim):
        noted.ClearField("dim")
        noted.dim.extend(TensorShapeProto.Dimension() for _ in known.dim)
    for dim, other in zip(noted.dim, known.dim, strict=True):
        if other.HasField("dim_value"):
            dim.dim_value = other.dim_value


def at_shapes(model: ModelProto, shapes: Shapes) -> ModelProto:
    """A copy of the model whose inputs have the shapes given."""
    fixed = deepcopy(model)
    for value in fixed.graph.input:
        if value.name in shapes:
            elem_type = value.type.tensor_type.elem_type
            value.CopyFrom(helper.make_tensor_value_info(value.name, elem_type, list(shapes[value.name])))
    return fixed


def scopes_at(model: LoadedModel, shapes: Shapes, evaluate: Evaluate) -> list[Scope]:
    """The index of a model whose inputs have the shapes given."""
    fixed = at_shapes(model.proto, shapes)
    return index_with_shapes(fixed, model.read, evaluate, infer_shapes(fixed))


def tensor_shapes(model: LoadedModel, shapes: Shapes, evaluate: Evaluate) -> dict[str, tuple[Dim, ...]]:
    """Known shapes of the main graph's tensors when its inputs have the shapes given; none where none are given."""
    if not shapes:
        return {}
    scope = scopes_at(model, shapes, evaluate)[0]
    names = {name for node in scope.nodes for name in (*node.input, *node.output) if name}
    return {name: shape for name in names if (shape := scope.info(name).shape) is not None}
