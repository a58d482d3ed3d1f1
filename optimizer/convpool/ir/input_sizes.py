# SPDX-License-Identifier: Apache-2.0
"""A model whose inputs have sizes that the model itself leaves open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from onnx import GraphProto, ModelProto, TensorShapeProto, ValueInfoProto

from convpool.ir.model import infer_shapes
from convpool.ir.protos import graphs_within


def with_sizes(model: ModelProto, shapes: Mapping[str, Sequence[int]]) -> ModelProto:
    """A copy in which inputs have the shapes given, by name, and other tensors the sizes that follow.

    A name that stands for one size in these shapes stands for it in the other inputs too.  Sizes of outputs and in value_info,
    also in bodies, are then those that follow from the inputs: those noted for other sizes go, and names of sizes given too,
    since exporters name sizes by guess.
    """
    fixed = ModelProto()
    fixed.CopyFrom(model)
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
        for graph, typed in zip(graphs_within(fixed.graph), graphs_within(inferred.graph), strict=True):
            known = {value.name: value.type.tensor_type for value in (*typed.value_info, *typed.input, *typed.output)}
            for value in _noted(graph, fixed):
                if value.type.tensor_type.HasField("shape") and value.name in known and known[value.name].HasField("shape"):
                    _fill_in(value.type.tensor_type.shape, known[value.name].shape)
    return fixed


def _noted(graph: GraphProto, model: ModelProto) -> Iterator[ValueInfoProto]:
    """What a graph notes of tensors other than the model's inputs."""
    yield from (*graph.value_info, *graph.output, *(() if graph is model.graph else graph.input))


def _fill_in(noted: TensorShapeProto, known: TensorShapeProto) -> None:
    """Give one tensor's open sizes those that are known."""
    if len(noted.dim) != len(known.dim):
        noted.ClearField("dim")
        noted.dim.extend(TensorShapeProto.Dimension() for _ in known.dim)
    for dim, other in zip(noted.dim, known.dim, strict=True):
        if other.HasField("dim_value"):
            dim.dim_value = other.dim_value


def static_shapes(model: ModelProto) -> dict[str, list[int]]:
    """The shapes of the inputs whose sizes are all known, by name."""
    found = {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        sizes = [dim.dim_value for dim in kind.shape.dim]
        if kind.HasField("shape") and all(size > 0 for size in sizes):
            found[value.name] = sizes
    return found
