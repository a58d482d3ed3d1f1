# SPDX-License-Identifier: Apache-2.0
"""`export_onnx`: rewritten modules in ONNX, as `convpool optimize` writes them.

Each pair becomes a node of the domain ai.convpool (docs/operator.md), with the function that defines it by standard operators.
torch.onnx.export inlines all functions of a model, so that the operator's are added to what it gives.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import ModelProto, numpy_helper

from convpool.algebra.geometry import ConvSpec, PoolSpec
from convpool.algebra.parts import ACCUMULATIONS, EPILOGUES, PROLOGUES, Parts
from convpool.errors import OptionError
from convpool.ir import schema
from convpool.ir.protos import attributes, is_op, opset_of


def export_onnx(module: torch.nn.Module, args: tuple, path: str | os.PathLike[str] | None = None, **options: Any) -> ModelProto:
    """A module of `optimize`, or one with ConvAvgPool layers, as an ONNX model with convpool's operator and its functions.

    args: of a call, the example inputs of `optimize`.  path: where the model is written; its weights are inside, so that it is
    below 2 GB.  options: of torch.onnx.export with dynamo=True, which needs onnxscript.
    Returns the model.  Raises what torch.onnx.export raises, and OptionError for an opset below 19 where a pooling is dilated.
    """
    table = {**onnx_translations(), **options.pop("custom_translation_table", {})}
    program: Any = torch.onnx.export(module, args, dynamo=True, custom_translation_table=table, **options)
    model: ModelProto = program.model_proto
    _fold_transposes(model)
    opset = opset_of(model.opset_import)
    dilated = [node for node in model.graph.node if schema.is_operator(node) and max(attributes(node)["pool_dilations"]) > 1]
    if dilated and opset < schema.POOL_DILATIONS_OPSET:
        raise OptionError(f"opset_version: got {opset}, expected at least {schema.POOL_DILATIONS_OPSET} for dilated poolings")
    known = {function.name for function in model.functions if function.domain == schema.DOMAIN}
    model.functions.extend(schema.functions_for(schema.used_in(model) - known, opset))
    model.ir_version = max(model.ir_version, schema.MIN_IR_VERSION)
    schema.register_schema()
    onnx.checker.check_model(model)
    if path is not None:
        onnx.save(model, os.fspath(path))
    return model


def onnx_translations() -> dict[Callable, Callable]:
    """A custom_translation_table for torch.onnx.export that makes a node of each pair; functions have to be added behind it."""
    return {torch.ops.convpool.pooled_conv.default: _pooled_conv, torch.ops.convpool.box_mean.default: _box_mean}


def _box_mean(x: Any, gate: Any, slope: float, kernel: Any, strides: Any, pads: Any, dilations: Any) -> Any:
    """An AveragePool that counts its padding: the lowering "direct" of a pair."""
    onnxscript: Any = importlib.import_module("onnxscript")
    if gate is not None:
        raise OptionError("torch.onnx.export: got a box mean with a gate, which only a backward has; expected a forward")
    values = {"kernel_shape": kernel, "strides": strides, "pads": pads, "count_include_pad": 1}
    if any(d > 1 for d in dilations):
        values["dilations"] = dilations
        return getattr(onnxscript, f"opset{schema.POOL_DILATIONS_OPSET}").AveragePool(x, **values)
    return onnxscript.evaluator.default().opset.AveragePool(x, **values)


def _fold_transposes(model: ModelProto) -> None:
    """Store weights as the operator reads them, where they are constants that only it reads."""
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    read = [name for node in model.graph.node for name in node.input]
    operators = [node for node in model.graph.node if schema.is_operator(node)]
    weights = {node.input[1] for node in operators}
    for node in list(model.graph.node):
        if is_op(node, "Transpose") and node.output[0] in weights and node.input[0] in stored and read.count(node.input[0]) == 1:
            tensor = stored[node.input[0]]
            array = numpy_helper.to_array(tensor).transpose(attributes(node)["perm"])
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), node.output[0]))
            model.graph.node.remove(node)


def _pooled_conv(
    x: Any,
    weight: Any,
    bias: Any,
    scale: Any,
    shift: Any,
    residual: Any,
    pool_kernel: Sequence[int],
    pool_strides: Sequence[int],
    pool_pads: Sequence[int],
    pool_dilations: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    groups: int,
    prologue: int,
    prologue_alpha: float,
    epilogue: int,
    epilogue_alpha: float,
    accumulation: int = 0,
) -> Any:
    """A node of the operator; the exporter calls this with its tensors in the place of PyTorch's."""
    onnxscript: Any = importlib.import_module("onnxscript")
    opset = onnxscript.evaluator.default().opset
    kernel = tuple(int(n) for n in weight.shape[2:])
    steps, zeros, spread = (tuple(map(int, numbers)) for numbers in (strides, pads, dilations))
    pool = PoolSpec(*(tuple(map(int, numbers)) for numbers in (pool_kernel, pool_strides, pool_pads, pool_dilations)))
    conv = ConvSpec(kernel, steps, zeros, spread, int(groups))
    names = (("", *PROLOGUES)[prologue], float(prologue_alpha), residual is not None, ("", *EPILOGUES)[epilogue])
    parts = Parts(scale is not None, *names, float(epilogue_alpha))
    node = schema.make_node(["X", "W"], "Y", pool, conv)
    schema.give_parts(node, parts)
    schema.give_accumulation(node, tuple(ACCUMULATIONS)[accumulation])
    if bias is None:
        bias = opset.Constant(value=onnxscript.ir.tensor(np.zeros(int(weight.shape[0]), np.float32)))
        bias = opset.CastLike(bias, weight)
    transposed = opset.Transpose(weight, perm=schema.channels_last_perm(conv.rank))
    given = {"X": x, "W": transposed, "B": bias, "scale": scale, "shift": shift, "R": residual}
    schema.register_schema()
    operators = onnxscript.values.Opset(schema.DOMAIN, schema.version_of(parts))
    inputs = [given[name] for name in parts.inputs]
    values = {name: value.decode() if isinstance(value, bytes) else value for name, value in attributes(node).items()}
    return getattr(operators, parts.op_type)(*inputs, **values)
