# SPDX-License-Identifier: Apache-2.0
"""A case as a file of each exporter with its weights in data files, and what PyTorch gives for the same inputs."""

import functools
import logging
import math
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
import torch._export.utils as _export_utils
from torch import nn
from torch.onnx._internal.exporter._registration import ONNXRegistry

from tests.support.exported.cases import CASES, Case

UNITS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
POWER_ITERATIONS = 8
OPSETS = {"dynamo": 20, "script": 17}
# PyTorch makes tables of its operators for every export anew, for as long as all the rest takes.
ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
_export_utils._materialize_cpp_cia_ops = functools.cache(_export_utils._materialize_cpp_cia_ops)


@dataclass(frozen=True)
class Exported:
    """path: the model, alone in its folder with its data; feeds: by the names in the file; expected: PyTorch's in float64.
    tolerance: for each output, relative to its largest value."""

    path: Path
    feeds: dict[str, np.ndarray]
    expected: list[np.ndarray]
    tolerance: float


def module_and_inputs(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The module of a case in inference mode with seeded weights, and seeded inputs; the same at each call."""
    case, seed = CASES[name], zlib.crc32(name.encode())
    torch.manual_seed(seed)  # for the buffers of spectral norm
    module, generator = case.make(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in (*module.named_parameters(), *module.named_buffers()):
            if "running_var" in key:
                tensor.uniform_(0.5, 1.5, generator=generator)
            elif "running_mean" in key or tensor.dim() == 1 and isinstance(tensor, nn.Parameter):
                tensor.normal_(0, 0.5, generator=generator)
            elif isinstance(tensor, nn.Parameter) and tensor.dim() > 1:
                tensor.normal_(0, tensor[0].numel() ** -0.5, generator=generator)
    inputs = tuple(torch.randn(shape, generator=generator) for shape in case.shapes)
    if any(key.endswith("_u") for key, _ in module.named_buffers()):
        with torch.no_grad():  # training steps, after which spectral norm divides by a norm and not by a number near zero
            for _ in range(POWER_ITERATIONS):
                module.train()(*inputs)
    module.eval()
    return module.to(case.dtype), tuple(x.to(case.dtype) for x in inputs)


def roundings(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> int:
    """Terms of the sums on the way to an output: all layers' one after the other."""
    count = 0

    def add(layer: nn.Module, given: object, result: object) -> None:
        nonlocal count
        weight = getattr(layer, "weight", None)
        count += weight[0].numel() + 8 if isinstance(weight, torch.Tensor) else 8

    hooks = [layer.register_forward_hook(add) for layer in module.modules()]
    with torch.no_grad():
        module(*inputs)
    for hook in hooks:
        hook.remove()
    return count


def export(name: str, exporter: str, folder: Path) -> Exported:
    """Export a case to a folder of its own."""
    case, (module, inputs) = CASES[name], module_and_inputs(name)
    folder.mkdir(parents=True)
    path = folder / "model.onnx"
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        write_dynamo(module, inputs, case, path) if exporter == "dynamo" else write_script(module, inputs, case, path)
        exact = module_and_inputs(name)[0].double()(*(x.double() for x in inputs))
    outputs = exact if isinstance(exact, tuple) else (exact,)
    # n roundings of unit u and of random sign add up to an error of standard deviation sqrt(n / 3) u of the size; this is
    # seven times that.
    tolerance = 4 * math.sqrt(roundings(module, inputs)) * UNITS[case.dtype]
    names = [value.name for value in onnx.load(path, load_external_data=False).graph.input]
    feeds = {key: as_numpy(x) for key, x in zip(names, inputs, strict=False)}
    return Exported(path, feeds, [x.numpy() for x in outputs], tolerance)


def as_numpy(x: torch.Tensor) -> np.ndarray:
    """A tensor as an array; bfloat16 as ml_dtypes has it."""
    if x.dtype is torch.bfloat16:
        return x.float().numpy().astype(onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16))
    return x.numpy()


def write_dynamo(module: nn.Module, inputs: tuple[torch.Tensor, ...], case: Case, path: Path) -> None:
    """torch.export, then onnxscript: one data file of the weights."""
    axes = {axis: torch.export.Dim(name) for axis, name in case.open_axes.items()}
    shapes = tuple(axes for _ in inputs) if axes else None
    options = {"dynamo": True, "external_data": True, "opset_version": case.opset or OPSETS["dynamo"], "verbose": False}
    torch.onnx.export(module, inputs, path, dynamic_shapes=shapes, **options)


def write_script(module: nn.Module, inputs: tuple[torch.Tensor, ...], case: Case, path: Path) -> None:
    """TorchScript: one file; its tensors are then moved to a file each, those of shapes too."""
    names = [f"x{number}" for number in range(len(inputs))]
    whole = path.with_suffix(".whole")
    axes, opset = dict.fromkeys(names, case.open_axes) if case.open_axes else None, case.opset or OPSETS["script"]
    torch.onnx.export(module, inputs, whole, dynamo=False, opset_version=opset, input_names=names, dynamic_axes=axes)
    model = onnx.load(whole)
    whole.unlink()
    onnx.save(model, path, save_as_external_data=True, all_tensors_to_one_file=False, size_threshold=0)
