# SPDX-License-Identifier: Apache-2.0
"""Poolings whose window is larger than their map.

By ONNX they give nothing.  onnxruntime clips the window and gives numbers, which no exact rewrite does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnx import ModelProto, NodeProto, TypeProto

from convpool.ir.model import at_shapes, infer_shapes
from convpool.ir.protos import graphs_within, is_op, known_attributes, label, model_nodes


def overhang(model: ModelProto, shapes: Mapping[str, Sequence[int]]) -> str:
    """The first such average of a model for inputs of these shapes, in words; "" where none is known."""
    if not any(is_op(node, "AveragePool") for node in model_nodes(model)):
        return ""
    inferred = infer_shapes(at_shapes(model, shapes))
    for graph in graphs_within(inferred.graph) if inferred is not None else ():
        types = {value.name: value.type for value in (*graph.input, *graph.value_info)}
        for node in graph.node:
            if is_op(node, "AveragePool") and node.input[0] in types and (found := _overhang(node, types[node.input[0]])):
                return found
    return ""


def _overhang(node: NodeProto, kind: TypeProto) -> str:
    values = known_attributes(node) or {}
    kernel = values.get("kernel_shape", [])
    dims = kind.tensor_type.shape.dim[2:]
    if len(dims) != len(kernel) or values.get("auto_pad", b"").startswith(b"SAME"):
        return ""
    pads = values.get("pads") or [0] * 2 * len(kernel)
    dilations = values.get("dilations") or [1] * len(kernel)
    sizes = [dim.dim_value for dim in dims]
    for k, d, size, before, after in zip(kernel, dilations, sizes, pads, pads[len(kernel) :], strict=False):
        if size and (k - 1) * d + 1 > size + before + after:
            return f"{node.op_type} '{label(node)}': window; got {list(kernel)} on a map of {sizes}; give larger inputs"
    return ""
