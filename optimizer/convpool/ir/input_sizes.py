# SPDX-License-Identifier: Apache-2.0
"""A model whose inputs have sizes that the model itself leaves open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnx import ModelProto, ValueInfoProto

from convpool.ir.model import infer_shapes


def with_sizes(model: ModelProto, shapes: Mapping[str, Sequence[int]]) -> ModelProto:
    """A copy in which inputs have the shapes given, by name, and other tensors the sizes that follow.

    A name that stands for one size in these shapes stands for it in the other inputs too.  Open sizes of outputs and in
    value_info are inferred; names of sizes given go there, since exporters name sizes by guess.
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
    for value in (*fixed.graph.output, *fixed.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.ClearField("dim_param")
    inferred = infer_shapes(fixed)
    if inferred is not None:
        known = {value.name: value for value in (*inferred.graph.value_info, *inferred.graph.output)}
        for value in (*fixed.graph.output, *fixed.graph.value_info):
            if value.name in known:
                _fill_in(value, known[value.name])
    return fixed


def _fill_in(value: ValueInfoProto, known: ValueInfoProto) -> None:
    """Give open sizes of one tensor's type those that are known."""
    dims, found = value.type.tensor_type.shape.dim, known.type.tensor_type.shape.dim
    if len(dims) == len(found):
        for dim, other in zip(dims, found, strict=True):
            if dim.dim_value <= 0 < other.dim_value:
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
