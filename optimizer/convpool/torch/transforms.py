# SPDX-License-Identifier: Apache-2.0
"""The operators under torch.func (vmap, grad, jacrev and their like) and torch.autograd.forward_ad.

PyTorch's transforms do not look into derivatives that torch.library registers.  While one is active, `pooled_conv` is therefore
made of an autograd.Function for the box mean, with a rule for vmap, and of PyTorch's own convolution.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from convpool.torch import operators, plain

_ops = torch.ops.convpool


def _fold(x: torch.Tensor | None, dim: int | None, count: int) -> torch.Tensor | None:
    """[count * N, ...] of a tensor with the batch at `dim`, or of one without."""
    if x is None:
        return None
    return (x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)


class _BoxMean(torch.autograd.Function):
    """box_mean(x, gate, slope, kernel, strides, pads, dilations)."""

    @staticmethod
    def forward(x: torch.Tensor, gate: torch.Tensor | None, *rest: Any) -> torch.Tensor:
        return _ops.box_mean(x, gate, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        x, gate, ctx.slope, *ctx.window = inputs
        ctx.size = list(x.shape[2:])
        ctx.save_for_backward(gate)
        ctx.save_for_forward(gate)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        (gate,) = ctx.saved_tensors
        return _BoxMeanAdjoint.apply(grads[0], gate, ctx.slope, ctx.size, *ctx.window), *[None] * 6

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *others: Any) -> torch.Tensor:
        (gate,) = ctx.saved_tensors
        return _BoxMean.apply(tangent, gate, ctx.slope, *ctx.window)

    @staticmethod
    def vmap(info: Any, dims: tuple, x: torch.Tensor, gate: torch.Tensor | None, *rest: Any) -> tuple:
        count = info.batch_size
        z = _BoxMean.apply(_fold(x, dims[0], count), _fold(gate, dims[1], count), *rest)
        return z.unflatten(0, (count, -1)), 0


class _BoxMeanAdjoint(torch.autograd.Function):
    """box_mean_adjoint(grad, gate, slope, size, kernel, strides, pads, dilations)."""

    @staticmethod
    def forward(grad: torch.Tensor, gate: torch.Tensor | None, *rest: Any) -> torch.Tensor:
        return _ops.box_mean_adjoint(grad, gate, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        _, gate, ctx.slope, ctx.size, *ctx.window = inputs
        ctx.save_for_backward(gate)
        ctx.save_for_forward(gate)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        (gate,) = ctx.saved_tensors
        return _BoxMean.apply(grads[0], gate, ctx.slope, *ctx.window), *[None] * 7

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *others: Any) -> torch.Tensor:
        (gate,) = ctx.saved_tensors
        return _BoxMeanAdjoint.apply(tangent, gate, ctx.slope, ctx.size, *ctx.window)

    @staticmethod
    def vmap(info: Any, dims: tuple, grad: torch.Tensor, gate: torch.Tensor | None, *rest: Any) -> tuple:
        count = info.batch_size
        spread = _BoxMeanAdjoint.apply(_fold(grad, dims[0], count), _fold(gate, dims[1], count), *rest)
        return spread.unflatten(0, (count, -1)), 0


def _composed(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, scale: Any, shift: Any, residual: Any, *rest: Any
) -> torch.Tensor:
    """pooled_conv of parts that PyTorch's transforms look into."""
    pool, conv, (prologue, prologue_alpha, epilogue, epilogue_alpha) = rest[:4], rest[4:8], rest[8:12]
    x, weight, bias, scale, shift = operators.cast_for_autocast((x, weight, bias, scale, shift))
    u = x if scale is None else x * plain.by_channel(scale, x) + plain.by_channel(shift, x)
    gate = u.detach() if prologue else None
    z = _BoxMean.apply(u, gate, plain.slope_of(prologue, prologue_alpha), *pool)
    y = plain.convolve(z, weight, bias, *conv)
    return plain.activate(y if residual is None else y + residual, epilogue, epilogue_alpha)


def are_active() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation follows operators."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def pooled_conv(*inputs: Any) -> torch.Tensor:
    """torch.ops.convpool.pooled_conv, with the same arguments, also under torch.func's transforms."""
    if are_active():
        return _composed(*inputs)
    return _ops.pooled_conv(*inputs)
