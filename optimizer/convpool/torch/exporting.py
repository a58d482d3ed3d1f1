# SPDX-License-Identifier: Apache-2.0
"""`export_onnx`: modules in ONNX with convpool's operator, as `convpool optimize` writes them.

torch.export and torch.onnx.export see PyTorch's own operators of an optimized module and of ConvAvgPool layers: the convolution,
then the pooling.  Here the rules rewrite the exported model.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import onnx
import torch
from onnx import ModelProto

from convpool.api import rewrite
from convpool.ir.model import load
from convpool.options import OptimizeOptions


def export_onnx(module: torch.nn.Module, args: tuple, path: str | os.PathLike[str] | None = None, **options: Any) -> ModelProto:
    """A module as an ONNX model with convpool's operator (docs/operator.md) and the functions that define it.

    args: of a call, the example inputs of `optimize`.  path: where the model is written; its weights are inside, so that it is
    below 2 GB.  options: of torch.onnx.export with dynamo=True, which needs onnxscript.
    Returns the model.  Raises what torch.onnx.export raises.
    """
    program: Any = torch.onnx.export(module, args, dynamo=True, **options)
    calls = module.__dict__.get("_convpool")
    asked = calls.options if calls is not None else OptimizeOptions()
    model: ModelProto = rewrite(load(program.model_proto), replace(asked), {}).model
    onnx.checker.check_model(model)
    if path is not None:
        onnx.save(model, os.fspath(path))
    return model
