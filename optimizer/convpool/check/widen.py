# SPDX-License-Identifier: Apache-2.0
"""A model with every half-precision and double tensor, type and attribute made float32, as a reference to judge by."""

from __future__ import annotations

import numpy as np
from onnx import AttributeProto, ModelProto, TensorProto, TypeProto, numpy_helper

from convpool.ir.model import LoadedModel
from convpool.ir.protos import graphs_within, model_nodes, tensors

HALF_TYPES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_OTHER_TYPES = (*HALF_TYPES, TensorProto.DOUBLE)
TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype")


def float_types(model: ModelProto) -> set[int]:
    """The floating-point types among the model's stored tensors and its inputs and outputs."""
    found = {tensor.data_type for tensor in tensors(model)}
    found |= {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    return found & {TensorProto.FLOAT, *_OTHER_TYPES}


def to_float32(model: LoadedModel) -> ModelProto:
    """A float32 copy of the model, its external data read in where it has to be converted."""
    result = ModelProto()
    result.CopyFrom(model.proto)
    for tensor in tensors(result):
        if tensor.data_type in _OTHER_TYPES:
            name = tensor.name
            tensor.CopyFrom(numpy_helper.from_array(model.read(tensor).astype(np.float32), name))
    for graph in graphs_within(result.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            _convert_type(value.type)
    for node in model_nodes(result):
        for attribute in node.attribute:
            if attribute.name in TYPE_ATTRIBUTES and attribute.i in _OTHER_TYPES:
                if attribute.type == AttributeProto.INT:
                    attribute.i = TensorProto.FLOAT
    for function in result.functions:
        for value in function.value_info:
            _convert_type(value.type)
    return result


def _convert_type(kind: TypeProto) -> None:
    which = kind.WhichOneof("value")
    if which == "tensor_type":
        if kind.tensor_type.elem_type in _OTHER_TYPES:
            kind.tensor_type.elem_type = TensorProto.FLOAT
    elif which == "sequence_type":
        _convert_type(kind.sequence_type.elem_type)
    elif which == "optional_type":
        _convert_type(kind.optional_type.elem_type)
