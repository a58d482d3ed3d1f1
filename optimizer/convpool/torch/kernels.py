# SPDX-License-Identifier: Apache-2.0
"""The operators on NVIDIA GPUs, by the CUDA library on PyTorch's current stream.

Tensors of float16, bfloat16 and float32 run so.  Others, and all where the library is not installed, run by PyTorch's own
operators (`convpool.torch.plain`).  pooled_conv is one plan where the library has a kernel on tensor cores for it
(`convpool.torch.calls`); else (groups, three axes) it is the library's box mean, then cuDNN.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from convpool.cuda import box, library
from convpool.cuda.errors import NotBuiltError
from convpool.torch import calls, plain

Ints = Sequence[int]


@functools.cache
def library_is_there() -> bool:
    """Whether libconvpool.so is installed; LibraryError if it is, but of no use."""
    try:
        library.load()
    except NotBuiltError:
        return False
    return True


def _runs(x: torch.Tensor) -> bool:
    return x.dtype in calls.NAMES and 0 not in x.shape and library_is_there()


_problems: dict[Any, tuple[bytes, Any]] = {}


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
    problem: Any = _problems.get(key)
    if problem is None:
        last = found != torch.contiguous_format
        problem = box.problem(calls.NAMES[x.dtype], last, shape, *window, gated=gate is not None, slope=slope)
        if len(_problems) < calls.KEPT:
            _problems[key] = problem
    device = x.get_device()
    if device != calls.current_device():
        with torch.cuda.device(device):
            return _box_call(adjoint, source, gate, slope, shape, out_shape, window)
    gate_address = 0 if gate is None else gate.data_ptr()
    status = box.calls()[adjoint](problem, x.data_ptr(), gate_address, out.data_ptr(), calls.raw_stream(device))
    if status:
        library.check(status)
    return out


def box_mean(
    x: torch.Tensor, gate: torch.Tensor | None, slope: float, kernel: Ints, strides: Ints, pads: Ints, dilations: Ints
) -> torch.Tensor:
    """As `plain.box_mean`, by one kernel of the library."""
    window = (kernel, strides, pads, dilations)
    sizes = plain.pooled_size(x.shape[2:], *window)
    if not _runs(x) or min(sizes) < 1:
        return plain.box_mean(x, gate, slope, *window)
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


def by_plan(tensors: Sequence[Any], geometry: tuple) -> torch.Tensor | None:
    """pooled_conv by one plan of the library on x's device, or None; geometry as `calls.run` takes it."""
    if not library_is_there():
        return None
    device = tensors[0].get_device()
    if device == calls.current_device():
        return calls.run(geometry, *tensors)
    with torch.cuda.device(device):
        return calls.run(geometry, *tensors)


def prepare(tensors: Sequence[Any], geometry: tuple) -> None:
    """Makes the plan that `by_plan` would launch."""
    if library_is_there():
        with torch.cuda.device(tensors[0].device):
            calls.find(geometry, *tensors)


def pooled_conv(*inputs: Any) -> torch.Tensor:
    """As `plain.pooled_conv`."""
    y = by_plan(inputs[:6], frozen(inputs[6:]))
    return plain.pooled_conv(*inputs, mean=box_mean) if y is None else y


def frozen(geometry: Sequence[Any]) -> tuple:
    """The operator's arguments behind the tensors, hashable and complete: PyTorch leaves out a last one that has its default."""
    return (*map(tuple, geometry[:7]), *geometry[7:12], *(geometry[12:] or (0,)))
