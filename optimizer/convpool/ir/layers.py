# SPDX-License-Identifier: Apache-2.0
"""Intermediate tensors of a model as outputs, to compare a model layer by layer."""

from __future__ import annotations

from onnx import ModelProto, TensorProto

from convpool.ir.elsewhere import infer_elsewhere


def mark_layers(model: ModelProto, inferred: ModelProto | None = None) -> None:
    """Make every intermediate float tensor of known type an output of the model.

    inferred: the model after shape inference, where there is one.
    """
    inferred = inferred or infer_elsewhere(model)
    known = {value.name: value for value in inferred.graph.value_info}
    outputs = {value.name for value in model.graph.output}
    for node in model.graph.node:
        for name in node.output:
            value = known.get(name)
            if value is not None and name not in outputs and value.type.tensor_type.elem_type == TensorProto.FLOAT:
                model.graph.output.append(value)
