# SPDX-License-Identifier: Apache-2.0
"""The operators on NVIDIA GPUs: plans of the CUDA library on PyTorch's current stream, workspace from PyTorch's allocator.

Tensors of float16, bfloat16 and float32 run so.  Others, and all where the library is not installed, run by PyTorch's own
operators (`convpool.torch.plain`).  pooled_conv is one plan where the library has a kernel on tensor cores for it; else (groups,
three axes) it is the library's box mean, then cuDNN.  float32 is multiplied in TF32 where PyTorch does so in convolutions.

What a call needs is kept by the kinds of its tensors, for the `KEPT` kinds seen first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from convpool.cuda import Plan, Problem, box, library
from convpool.cuda.errors import NotBuiltError
from convpool.torch import plain

Ints = Sequence[int]
KEPT = 4096
_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
_ACTIVATIONS = (None, "relu", "leaky_relu", "tanh", "sigmoid")
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


@functools.cache
def library_is_there() -> bool:
    """Whether libconvpool.so is installed; LibraryError if it is, but of no use."""
    try:
        library.load()
    except NotBuiltError:
        return False
    return True


def allows_tf32() -> bool:
    """Whether PyTorch multiplies float32 in TF32 in convolutions."""
    conv = getattr(torch.backends.cudnn, "conv", None)
    return conv.fp32_precision == "tf32" if conv is not None else torch.backends.cudnn.allow_tf32


def _runs(x: torch.Tensor) -> bool:
    return x.dtype in _NAMES and 0 not in x.shape and library_is_there()


class _Kept(dict[Any, Any]):
    """Values by key, the first KEPT of them."""

    def keep(self, key: Any, value: Any) -> Any:
        if len(self) < KEPT:
            self[key] = value
        return value


_problems, _plans = _Kept(), _Kept()


# ---- box means ----


def _box_call(
    adjoint: bool,
    x: torch.Tensor,
    gate: torch.Tensor | None,
    slope: float,
    shape: Sequence[int],
    out_shape: Sequence[int],
    window: tuple[Ints, ...],
) -> torch.Tensor:
    """The box mean of x of `shape`, or the adjoint for an X of `shape`."""
    found = plain.memory_format(x if gate is None or not adjoint else gate)
    source, x = x, x.contiguous(memory_format=found)
    if gate is not None:
        gate = x if gate is source else gate.contiguous(memory_format=found)
    out = torch.empty(out_shape, dtype=x.dtype, device=x.device, memory_format=found)
    key = (x.dtype, found, tuple(shape), *map(tuple, window), gate is None, slope)
    problem = _problems.get(key)
    if problem is None:
        last = found != torch.contiguous_format
        made = box.problem(_NAMES[x.dtype], last, shape, *window, gated=gate is not None, slope=slope)
        problem = _problems.keep(key, made)
    device = x.get_device()
    with torch.cuda.device(device):
        gate_address = 0 if gate is None else gate.data_ptr()
        status = box.calls()[adjoint](problem, x.data_ptr(), gate_address, out.data_ptr(), _raw_stream(device))
    library.check(status)
    return out


def box_mean(
    x: torch.Tensor, gate: torch.Tensor | None, slope: float, kernel: Ints, strides: Ints, pads: Ints, dilations: Ints
) -> torch.Tensor:
    """As `plain.box_mean`, by one kernel of the library."""
    window = (kernel, strides, pads, dilations)
    if not _runs(x):
        return plain.box_mean(x, gate, slope, *window)
    sizes = plain.pooled_size(x.shape[2:], *window)
    return _box_call(False, x, gate, slope, x.shape, (*x.shape[:2], *sizes), window)


def box_mean_adjoint(
    grad: torch.Tensor,
    gate: torch.Tensor | None,
    slope: float,
    size: Ints,
    kernel: Ints,
    strides: Ints,
    pads: Ints,
    dilations: Ints,
) -> torch.Tensor:
    """As `plain.box_mean_adjoint`, by one kernel of the library."""
    window = (kernel, strides, pads, dilations)
    if not _runs(grad):
        return plain.box_mean_adjoint(grad, gate, slope, size, *window)
    shape = (*grad.shape[:2], *size)
    return _box_call(True, grad, gate, slope, shape, shape, window)


# ---- plans ----


def _problem(x: torch.Tensor, weight: torch.Tensor, inputs: tuple, x_last: bool, y_last: bool) -> Problem:
    bias, scale, _, residual = inputs[2:6]
    pool_kernel, pool_strides, pool_pads, pool_dilations, strides, pads, dilations, groups = inputs[6:14]
    prologue, prologue_alpha, epilogue, epilogue_alpha = inputs[14:]
    return Problem(
        n=x.shape[0],
        c=x.shape[1],
        m=weight.shape[0],
        spatial=tuple(x.shape[2:]),
        kernel_shape=tuple(weight.shape[2:]),
        pool_kernel_shape=pool_kernel,
        dtype=_NAMES[x.dtype],
        layout="channels_last" if x_last else "channels_first",
        y_layout="channels_last" if y_last else "channels_first",
        pool_strides=pool_strides,
        pool_pads=pool_pads,
        pool_dilations=pool_dilations,
        strides=strides,
        pads=pads,
        dilations=dilations,
        group=groups,
        bias=bias is not None,
        residual=residual is not None,
        activation=_ACTIVATIONS[epilogue],
        alpha=epilogue_alpha,
        allow_tf32=allows_tf32(),
        prologue_affine=scale is not None,
        prologue_activation=_ACTIVATIONS[prologue],
        prologue_alpha=prologue_alpha,
    )


def _plan(problem: Problem, aligned: bool) -> Plan | None:
    """The library's plan; None where it has but one thread per output."""
    plan = Plan(problem, unaligned=not aligned)
    return None if plan.tactic.family == "generic" else plan


def _library_weight(weight: torch.Tensor) -> torch.Tensor:
    """[M, kernel..., C/groups] in memory."""
    if weight.dim() == 4:
        return weight.contiguous(memory_format=torch.channels_last)
    if weight.dim() == 5:
        return weight.contiguous(memory_format=torch.channels_last_3d)
    return weight.movedim(1, -1).contiguous()


def _by_plan(*inputs: Any) -> torch.Tensor | None:
    """pooled_conv by one plan of the library; None where it has none for it."""
    x, weight, bias, scale, shift, residual = inputs[:6]
    x_format, y_format = plain.memory_format(x), plain.result_format(x, weight)
    x, w = x.contiguous(memory_format=x_format), _library_weight(weight)
    if residual is not None:
        residual = residual.contiguous(memory_format=y_format)
    bias, scale, shift = (None if v is None else v.contiguous() for v in (bias, scale, shift))
    operands = (x, w, bias, residual, scale, shift)
    addresses = [0 if v is None else v.data_ptr() for v in operands]
    aligned = not any(address % 16 for address in addresses)
    geometry = tuple(v if isinstance(v, (int, float)) else tuple(v) for v in inputs[6:])
    present = tuple(v is not None for v in operands)
    device = x.get_device()
    key = (x.dtype, x.shape, weight.shape, x_format, y_format, present, geometry, aligned, device, allows_tf32())
    plan = _plans.get(key, key)
    if plan is key:
        last = [found != torch.contiguous_format for found in (x_format, y_format)]
        plan = _plans.keep(key, _plan(_problem(x, weight, inputs, *last), aligned))
    if plan is None:
        return None
    shape = plan.y_shape
    if y_format != torch.contiguous_format:
        shape = (shape[0], shape[-1], *shape[1:-1])
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=y_format)
    space = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=x.device) if plan.workspace_bytes else None
    addresses += [0, y.data_ptr()]
    plan.launch_raw(addresses, 0 if space is None else space.data_ptr(), plan.workspace_bytes, _raw_stream(device))
    return y


def _fits(*inputs: Any) -> bool:
    """Whether the library may be asked: PyTorch's operators refuse the rest, or do it."""
    x, weight = inputs[:2]
    groups, rank = inputs[13], x.dim() - 2
    if groups != 1 or rank > 2 or 0 in weight.shape or not _runs(x) or weight.shape[1] != x.shape[1]:
        return False
    shapes = [None, None, weight.shape[:1], x.shape[1:2], x.shape[1:2], None]
    for tensor, shape in zip(inputs[:6], shapes, strict=True):
        if tensor is not None and (tensor.dtype != x.dtype or tensor.device != x.device or shape not in (None, tensor.shape)):
            return False
    residual = inputs[5]
    return residual is None or residual.shape == _y_shape(*inputs)


def _y_shape(*inputs: Any) -> torch.Size:
    x, weight = inputs[:2]
    sizes = plain.pooled_size(x.shape[2:], *inputs[6:10])
    return torch.Size([x.shape[0], weight.shape[0], *plain.pooled_size(sizes, weight.shape[2:], *inputs[10:13])])


def pooled_conv(*inputs: Any) -> torch.Tensor:
    """As `plain.pooled_conv`."""
    x = inputs[0]
    if _fits(*inputs):
        with torch.cuda.device(x.get_device()):
            y = _by_plan(*inputs)
        if y is not None:
            return y
    return plain.pooled_conv(*(*inputs, box_mean))
