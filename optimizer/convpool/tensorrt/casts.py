# SPDX-License-Identifier: Apache-2.0
"""A model's float32 tensors in half precision, for TensorRT.

| networks | half precision is | here |
|---|---|---|
| weakly typed (TensorRT 8.6, 9) | a flag of the builder | `half_weights`: constants of the plugin's nodes |
| strongly typed (TensorRT 10, 11) | the model's types | `cast_floats`: every tensor inside the model |
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from convpool.check.inputs import TYPE_ATTRIBUTES
from convpool.ir.protos import all_nodes, graphs_within
from convpool.tensorrt.prepare import is_plugin_node

ELEMENT_TYPES: dict[str, int] = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
"""ONNX's number for the type of a half precision."""
_NUMPY_TYPES: dict[int, np.dtype] = {
    TensorProto.FLOAT16: np.dtype(np.float16),
    TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
_FLOAT_ONLY_INPUTS = {"Resize": (1, 2), "Upsample": (1,)}
"""Inputs that stay float32 whatever the type of the data: regions and scales."""


def half_weights(model: ModelProto, kind: int) -> None:
    """Give the plugin's nodes constants of type `kind` (FLOAT16): weights, biases, scales and shifts that only they read.

    For weakly typed networks, where TensorRT would otherwise convert the float32 constants in every run.
    """
    elsewhere = {
        node.input[index]
        for node in all_nodes(model.graph)
        for index in range(len(node.input))
        if index == 0 or not is_plugin_node(node)
    }
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in filter(is_plugin_node, model.graph.node):
        for name in node.input[1:]:
            if name in initializers and name not in elsewhere:
                _convert(initializers[name], kind)


def cast_floats(model: ModelProto, kind: int) -> None:
    """Make every float32 tensor inside the model one of type `kind` (FLOAT16, BFLOAT16); inputs and outputs stay float32.

    For strongly typed networks, where the model's types say how TensorRT computes.
    """
    graph = model.graph
    kept = _float_only(graph)
    for node in all_nodes(graph):
        if node.op_type != "Constant" or node.output[0] not in kept:
            _convert_attributes(node, kind)
    for inner in graphs_within(graph):
        for tensor in inner.initializer:
            if tensor.name not in kept:
                _convert(tensor, kind)
        for value in (*inner.value_info, *(() if inner is graph else (*inner.input, *inner.output))):
            if value.type.tensor_type.elem_type == TensorProto.FLOAT and value.name not in kept:
                value.type.tensor_type.elem_type = kind
    _cast_ends(graph, kind)


def _float_only(graph: GraphProto) -> set[str]:
    names: set[str] = set()
    for node in all_nodes(graph):
        for index in _FLOAT_ONLY_INPUTS.get(node.op_type, ()):
            names.update(node.input[index : index + 1])
    return names


def _convert(tensor: TensorProto, kind: int) -> None:
    if tensor.data_type != TensorProto.FLOAT:
        return
    values = numpy_helper.to_array(tensor)
    largest = float(ml_dtypes.finfo(_NUMPY_TYPES[kind]).max)
    finite = np.where(np.isfinite(values), np.clip(values, -largest, largest), values)
    tensor.CopyFrom(helper.make_tensor(tensor.name, kind, tensor.dims, finite.astype(_NUMPY_TYPES[kind]).tobytes(), raw=True))


def _convert_attributes(node: NodeProto, kind: int) -> None:
    for attribute in node.attribute:
        if attribute.name in TYPE_ATTRIBUTES and attribute.type == AttributeProto.INT:
            if attribute.i == TensorProto.FLOAT:
                attribute.i = kind
        elif attribute.type == AttributeProto.TENSOR and node.op_type in ("Constant", "ConstantOfShape"):
            _convert(attribute.t, kind)
        elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
            shape = [] if attribute.name == "value_float" else [len(attribute.floats)]
            values = [attribute.f] if attribute.name == "value_float" else list(attribute.floats)
            tensor = helper.make_tensor("", TensorProto.FLOAT, shape, values)
            _convert(tensor, kind)
            attribute.CopyFrom(helper.make_attribute("value", tensor))


def _cast_ends(graph: GraphProto, kind: int) -> None:
    """Casts between the float32 inputs and outputs and the inside."""
    first, last, renames = [], [], {}
    initializers = {tensor.name for tensor in graph.initializer}
    for value in graph.input:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT and value.name not in initializers:
            renames[value.name] = f"{value.name}__inside"
            first.append(helper.make_node("Cast", [value.name], [renames[value.name]], to=kind))
    for value in graph.output:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            inside = renames.setdefault(value.name, f"{value.name}__inside")
            last.append(helper.make_node("Cast", [inside], [value.name], to=TensorProto.FLOAT))
    for node in all_nodes(graph):
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                names[index] = renames.get(name, name)
    nodes = [*first, *graph.node, *last]
    del graph.node[:]
    graph.node.extend(nodes)
