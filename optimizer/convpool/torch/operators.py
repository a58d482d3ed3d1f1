# SPDX-License-Identifier: Apache-2.0
"""The operators of torch.library: convpool::pooled_conv, convpool::box_mean and convpool::box_mean_adjoint.

`convpool.torch` describes them.  All three have fake tensors and derivatives of any order, and pooled_conv a rule for
autocast.  pooled_conv's backward, with Z the box mean, made again rather than kept:

    dZ, dW, db = gradients of the small convolution at Z      (PyTorch's own operator: cuDNN)
    dX = box_mean_adjoint(dZ), gated by the prologue's activation

Each part is differentiable itself: the box mean and its adjoint are one another's derivative, as both are linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from convpool.torch import gradients, kernels, plain

Ints = Sequence[int]
LIBRARY = torch.library.Library("convpool", "DEF")
LIBRARY.define(
    "box_mean(Tensor x, Tensor? gate, float slope, int[] kernel, int[] strides, int[] pads, int[] dilations) -> Tensor"
)
LIBRARY.define(
    "box_mean_adjoint(Tensor grad, Tensor? gate, float slope, SymInt[] size, int[] kernel, int[] strides, int[] pads, "
    "int[] dilations) -> Tensor"
)
LIBRARY.define(
    "pooled_conv(Tensor x, Tensor weight, Tensor? bias, Tensor? scale, Tensor? shift, Tensor? residual, int[] pool_kernel, "
    "int[] pool_strides, int[] pool_pads, int[] pool_dilations, int[] strides, int[] pads, int[] dilations, int groups, "
    "int prologue, float prologue_alpha, int epilogue, float epilogue_alpha, int accumulation=0) -> Tensor"
)
for _name in ("box_mean", "box_mean_adjoint", "pooled_conv"):
    LIBRARY.impl(_name, getattr(plain, _name), "CompositeExplicitAutograd")
    LIBRARY.impl(_name, getattr(kernels, _name), "CUDA")
_ops = torch.ops.convpool


# ---- fake tensors ----


def _new(like: torch.Tensor, shape: Sequence[Any], found: torch.memory_format) -> torch.Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=found)


def _fake_box_mean(
    x: torch.Tensor, gate: torch.Tensor | None, slope: float, kernel: Ints, strides: Ints, pads: Ints, dilations: Ints
) -> torch.Tensor:
    sizes = plain.pooled_size(x.shape[2:], kernel, strides, pads, dilations)
    return _new(x, [*x.shape[:2], *sizes], plain.memory_format(x))


def _fake_box_mean_adjoint(
    grad: torch.Tensor, gate: torch.Tensor | None, slope: float, size: Ints, *window: Ints
) -> torch.Tensor:
    return _new(grad, [*grad.shape[:2], *size], plain.memory_format(grad if gate is None else gate))


def _fake_pooled_conv(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    pool, (strides, pads, dilations) = rest[4:8], rest[8:11]
    sizes = plain.pooled_size(x.shape[2:], *pool)
    sizes = plain.pooled_size(sizes, weight.shape[2:], strides, pads, dilations)
    return _new(x, [x.shape[0], weight.shape[0], *sizes], plain.result_format(x, weight))


torch.library.register_fake("convpool::box_mean", _fake_box_mean, lib=LIBRARY)
torch.library.register_fake("convpool::box_mean_adjoint", _fake_box_mean_adjoint, lib=LIBRARY)
torch.library.register_fake("convpool::pooled_conv", _fake_pooled_conv, lib=LIBRARY)


# ---- derivatives ----


def _box_mean_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x, gate, ctx.slope, *ctx.window = inputs
    ctx.size = x.shape[2:]
    ctx.save_for_backward(gate)


def _box_mean_backward(ctx: Any, grad: torch.Tensor) -> tuple:
    (gate,) = ctx.saved_tensors
    return _ops.box_mean_adjoint(grad, gate, ctx.slope, ctx.size, *ctx.window), *[None] * 6


def _adjoint_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    _, gate, ctx.slope, _, *ctx.window = inputs
    ctx.save_for_backward(gate)


def _adjoint_backward(ctx: Any, grad: torch.Tensor) -> tuple:
    (gate,) = ctx.saved_tensors
    return _ops.box_mean(grad, gate, ctx.slope, *ctx.window), *[None] * 7


def pooled_conv_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    """Keeps what `pooled_conv_backward` needs."""
    x, weight, bias, scale, shift, residual, *ctx.rest = inputs
    ctx.has_residual = residual is not None
    ctx.are_tensors = [value is not None for value in inputs[:6]]
    epilogue, alpha = inputs[16:18]
    kept = output if epilogue else None
    if epilogue and plain.slope_of(epilogue, alpha) < 0:  # Y does not tell the sign of what it was made of
        kept = None
    ctx.save_for_backward(x, weight, bias, scale, shift, residual if epilogue and kept is None else None, kept)


def _boxes(grad: torch.Tensor) -> Any:
    """The box mean and its adjoint: operators, or their kernels at once where no derivatives are wanted and nothing looks on."""
    if type(grad) is not torch.Tensor or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
        return _ops
    return kernels if grad.is_cuda else plain


def _like_small_input(x: torch.Tensor, pads: Ints, pool: Sequence[Ints]) -> tuple[torch.Tensor, list[int]]:
    """A tensor as the small convolution's input, without its values, and the padding that PyTorch takes."""
    sizes, r = plain.pooled_size(x.shape[2:], *pool), len(pads) // 2
    even = list(pads[:r]) == list(pads[r:])
    if not even:
        sizes = [size + pads[i] + pads[r + i] for i, size in enumerate(sizes)]
    return _new(x, [*x.shape[:2], *sizes], plain.memory_format(x)), list(pads[:r]) if even else [0] * r


def pooled_conv_backward(ctx: Any, grad: torch.Tensor) -> tuple:
    """Gradients for all arguments, None for numbers; differentiable."""
    x, weight, bias, scale, shift, residual, y = ctx.saved_tensors
    pool, (strides, pads, dilations, groups) = ctx.rest[:4], ctx.rest[4:8]
    prologue, prologue_alpha, epilogue, epilogue_alpha = ctx.rest[8:12]
    needs, boxes = gradients.wanted(ctx, ctx.are_tensors), _boxes(grad)
    if epilogue:
        if y is None:
            y = _ops.pooled_conv(x, weight, bias, scale, shift, residual, *ctx.rest[:10], plain.NONE, 0.0, *ctx.rest[12:])
        grad = plain.activation_backward(grad, y, epilogue, epilogue_alpha)
    through_x = needs[0] or needs[3] or needs[4]
    u = x if scale is None else x * plain.by_channel(scale, x) + plain.by_channel(shift, x)
    gate, slope = (u.detach() if prologue else None), plain.slope_of(prologue, prologue_alpha)
    like, padding = _like_small_input(x, pads, pool)
    convolution = (strides, padding, dilations, groups)
    grad, single = gradients.dense(grad, x, weight), not prologue and plain.is_single(*pool)

    def small_input() -> torch.Tensor:
        return plain.even_pads(u if single else boxes.box_mean(u, gate, slope, *pool), pads)[0] if needs[1] else like

    def through_boxes(d_z: torch.Tensor) -> torch.Tensor:
        for axis, (size, begin) in enumerate(zip(plain.pooled_size(x.shape[2:], *pool), pads, strict=False), 2):
            if d_z.shape[axis] != size:
                d_z = d_z.narrow(axis, begin, size)
        return d_z if single else boxes.box_mean_adjoint(d_z, gate, slope, x.shape[2:], *pool)

    if gradients.is_captured(grad):
        (d_weight, d_bias), d_u = gradients.side_by_side(
            grad,
            lambda: gradients.of_parameters(grad, small_input(), weight, convolution, needs[1], needs[2]),
            lambda: through_boxes(gradients.input_gradient(grad, weight, like, convolution)) if through_x else None,
        )
    else:
        wanted = (through_x, needs[1], needs[2])
        d_z, d_weight, d_bias = gradients.of_convolution(grad, small_input(), weight, convolution, wanted)
        d_u = through_boxes(d_z) if through_x else None
    d_x = d_scale = d_shift = None
    if d_u is not None:
        d_x = d_u if scale is None else d_u * plain.by_channel(scale, x)
        others = [0, *range(2, x.dim())]
        d_scale = (d_u * x).sum(others) if needs[3] else None
        d_shift = d_u.sum(others) if needs[4] else None
    d_residual = grad if ctx.has_residual and needs[5] else None
    return d_x if needs[0] else None, d_weight, d_bias, d_scale, d_shift, d_residual, *[None] * 13


torch.library.register_autograd("convpool::box_mean", _box_mean_backward, setup_context=_box_mean_context, lib=LIBRARY)
torch.library.register_autograd("convpool::box_mean_adjoint", _adjoint_backward, setup_context=_adjoint_context, lib=LIBRARY)
torch.library.register_autograd("convpool::pooled_conv", pooled_conv_backward, setup_context=pooled_conv_context, lib=LIBRARY)


# ---- autocast: as PyTorch's convolutions ----


def cast_for_autocast(values: Sequence[Any]) -> list[Any]:
    """The values, tensors of floats in autocast's type where it is on for the first one's device."""
    device = values[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(values)
    dtype = torch.get_autocast_dtype(device)

    def cast(value: Any) -> Any:
        lower = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if lower else value

    return [cast(value) for value in values]


def _autocast(device: str) -> Any:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device.upper()}"))

    def pooled_conv(*inputs: Any) -> torch.Tensor:
        cast = cast_for_autocast(inputs)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return _ops.pooled_conv(*cast)

    return pooled_conv


for _device in ("cpu", "cuda"):
    LIBRARY.impl("pooled_conv", _autocast(_device), f"Autocast{_device.upper()}")
