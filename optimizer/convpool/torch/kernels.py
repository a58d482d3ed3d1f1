# SPDX-License-Identifier: Apache-2.0
"""The operators on NVIDIA GPUs, by the CUDA library on PyTorch's current stream.

Tensors of float16, bfloat16 and float32 run so.  Others, and all where the library is not installed, run by PyTorch's own
operators (`convpool.torch.plain`).  pooled_conv is one plan where the library has a kernel on tensor cores for it
(`convpool.torch.calls`); else (groups, three axes) it is the library's box mean, then cuDNN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from convpool.cuda import box, library, weight_gradient
from convpool.errors import NotBuiltError
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


def _boxed(adjoint: bool, x: Any, size: Ints, window: tuple[Ints, ...], sums: bool) -> Callable:
    """box_mean, or its adjoint, of tensors of one kind: shapes, strides, type, and the window; or of sums in place of means."""
    order, full = plain.memory_format(x), (*x.shape[:2], *size)
    shape = full if adjoint else (*x.shape[:2], *plain.pooled_size(size, *window))
    strides = torch.empty(shape, device="meta", memory_format=order).stride()
    problem = box.problem(calls.NAMES[x.dtype], order != torch.contiguous_format, full, *window, sums=sums)
    launch, copies = box.calls()[adjoint], not x.is_contiguous(memory_format=order)

    def run(x: torch.Tensor) -> torch.Tensor:
        device = x.get_device()
        if device != calls.current_device():
            with torch.cuda.device(device):
                return run(x)
        if copies:
            x = x.contiguous(memory_format=order)
        out = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
        status = launch(problem, x.data_ptr(), 0, out.data_ptr(), calls.raw_stream(device))
        if status:
            library.check(status)
        return out

    return run


_boxes: dict[Any, Callable | None] = {}
_NEW: Any = object()


def _box(adjoint: bool, x: torch.Tensor, size: Ints, window: tuple, sums: bool = False) -> Callable | None:
    """The call for these tensors, None where PyTorch's operators run; size: of the input of the box mean."""
    size, window = tuple(size), tuple(map(tuple, window))
    key = (adjoint, x.shape, x.stride(), x.dtype, size, window, sums)
    found = _boxes.get(key, _NEW)
    if found is _NEW:
        runs = x.dtype in calls.NAMES and 0 not in x.shape and library_is_there() and min(plain.pooled_size(size, *window)) > 0
        found = _boxed(adjoint, x, size, window, sums) if runs else None
        if len(_boxes) < calls.KEPT:
            _boxes[key] = found
    return found


def box_mean(x: torch.Tensor, *window: Ints) -> torch.Tensor:
    """As `plain.box_mean`, by one kernel of the library."""
    found = _box(False, x, x.shape[2:], window)
    return plain.box_mean(x, *window) if found is None else found(x)


def box_mean_adjoint(grad: torch.Tensor, size: Ints, *window: Ints) -> torch.Tensor:
    """As `plain.box_mean_adjoint`, by one kernel of the library."""
    found = _box(True, grad, size, window)
    return plain.box_mean_adjoint(grad, size, *window) if found is None else found(grad)


def blocks(x: torch.Tensor, scales: Ints, sums: bool) -> torch.Tensor | None:
    """Each value repeated over a block of `scales`, or the sums over blocks; None where the library has no kernel."""
    if x.dtype not in calls.NAMES or not library_is_there() or weight_gradient.turn() is None:  # a library of that version
        return None
    size = x.shape[2:] if sums else [n * scale for n, scale in zip(x.shape[2:], scales, strict=True)]
    found = _box(not sums, x, size, (scales, scales, (0, 0) * len(scales), (1,) * len(scales)), True)
    return None if found is None else found(x)


_weight_gradients: dict[Any, Callable | None] = {}


def few_channels_gradients(
    grad: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, geometry: tuple, bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """The gradients at the weights and, where wanted, the bias, from the convolution's input z, with the channels last.

    None where the library has no kernel.  geometry: as torch.convolution takes it.  The tensors are on the current device.
    """
    strides, padding, dilations, groups = geometry
    convolution = (tuple(strides), tuple(padding), tuple(dilations), groups)
    key = (grad.shape, grad.stride(), grad.dtype, z.shape, z.dtype, weight.shape, weight.dtype, convolution)
    found = _weight_gradients.get(key, _NEW)
    if found is _NEW:
        found = _weight_gradient(grad, z, weight, convolution)
        if len(_weight_gradients) < calls.KEPT:
            _weight_gradients[key] = found
    return None if found is None or grad.data_ptr() & 15 else found(grad, z, bias)


def _weight_gradient(grad: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, convolution: tuple) -> Callable | None:
    """The call for tensors of one kind: of the gradient, the convolution's input, and whether the bias's is wanted."""
    last, groups, shape = torch.channels_last, convolution[3], tuple(weight.shape)
    if z.dim() != 4 or groups != 1 or 0 in grad.shape or 0 in z.shape or not library_is_there():
        return None
    if not grad.dtype == z.dtype == weight.dtype or z.dtype not in (torch.float16, torch.bfloat16):
        return None
    if not grad.is_contiguous(memory_format=last) or torch.cuda.get_device_capability(z.device) < (8, 0):
        return None
    problem = calls.problem_of((z, weight, None), (*plain.single(*convolution), 0), True, True)
    space_bytes, packed, launch = weight_gradient.workspace_bytes(problem), bytes(problem.struct), weight_gradient.call()
    if space_bytes is None:
        return None

    def run(grad: torch.Tensor, z: torch.Tensor, bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        z, d_bias = z.contiguous(memory_format=last), z.new_empty(shape[0]) if bias else None
        out = torch.empty(shape, dtype=z.dtype, device=z.device, memory_format=last)
        space = torch.empty(space_bytes, dtype=torch.uint8, device=z.device)
        at = grad.data_ptr(), z.data_ptr(), out.data_ptr(), 0 if d_bias is None else d_bias.data_ptr(), space.data_ptr()
        status = launch(packed, *at, space_bytes, calls.raw_stream(z.device.index))
        if status:
            library.check(status)
        return out, d_bias

    return run


def turned(weight: torch.Tensor, factor: float) -> torch.Tensor | None:
    """Weights [M, C, kernel] with the channels last as [C, M, kernel], turned round and times a factor.

    None where the library has no kernel.  The weight is on the current device."""
    if weight.dim() != 4 or weight.dtype not in calls.NAMES or not weight.is_contiguous(memory_format=torch.channels_last):
        return None
    (m, c, *kernel), turn = weight.shape, weight_gradient.turn() if library_is_there() else None
    sizes, dtype = (m, c, math.prod(kernel)), library.DTYPES[calls.NAMES[weight.dtype]]
    if turn is None or min(sizes) < 1 or max(sizes) > weight_gradient.MOST_TURNED:
        return None
    out = torch.empty((c, m, *kernel), dtype=weight.dtype, device=weight.device, memory_format=torch.channels_last)
    status = turn(weight.data_ptr(), out.data_ptr(), *sizes, dtype, factor, calls.raw_stream(weight.get_device()))
    if status:
        library.check(status)
    return out


def by_plan(tensors: Sequence[Any], geometry: tuple) -> torch.Tensor | None:
    """A call by one plan of the library on x's device, or None; geometry as `calls.find` takes it."""
    if not library_is_there():
        return None
    device = tensors[0].get_device()
    if device != calls.current_device():
        with torch.cuda.device(device):
            return by_plan(tensors, geometry)
    call = calls.find(geometry, *tensors)
    return None if call is None else call(*tensors)


def pooled_conv(*inputs: Any) -> torch.Tensor:
    """As `plain.pooled_conv`."""
    y = by_plan(inputs[:3], frozen(inputs[3:]))
    return plain.pooled_conv(*inputs, mean=box_mean) if y is None else y


def frozen(geometry: Sequence[Any]) -> tuple:
    """The operator's arguments behind the tensors, hashable and complete: PyTorch leaves out a last one that has its default."""
    return (*map(tuple, geometry[:7]), *geometry[7:10], *(geometry[10:] or (0,)))
