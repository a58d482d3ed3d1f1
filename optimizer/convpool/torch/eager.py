# SPDX-License-Identifier: Apache-2.0
"""The shortest way through pooled_conv where nothing looks on: no compiler, mode, transform, tracer or autocast.

PyTorch takes some 20 microseconds to bring a call from Python to an operator of torch.library and back to Python, and more with
derivatives.  An eager call that nothing intercepts goes to the kernels at once, with an autograd.Function where derivatives are
wanted.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from convpool.torch import gradients, kernels, operators, plain, transforms
from convpool.torch.small import SmallConvolution

_TYPES = (torch.Tensor, torch.nn.Parameter)


def unwatched(x: Any, weight: Any, device: str) -> bool:
    """Whether the tensors are plain ones, and nothing intercepts operators."""
    c = torch._C
    return (
        type(x) in _TYPES
        and type(weight) in _TYPES
        and not torch.compiler.is_compiling()
        and not c._len_torch_dispatch_stack()
        and not c._len_torch_function_stack()
        and not transforms.are_active()
        and c._get_tracing_state() is None
        and (device == "meta" or not torch.is_autocast_enabled(device))
    )


class _PooledConv(torch.autograd.Function):
    """pooled_conv with the operator's own backward."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        tensors, geometry = inputs[:6], inputs[6]
        y = _run(tensors, geometry)
        operators.keep(ctx, tensors, geometry, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        (grad,), saved, convolution = grads, ctx.saved_tensors, _first_order(ctx.rest)
        if convolution is None or len(saved) != 2 or not _is_last(grad):
            return *operators.pooled_conv_backward(ctx, grad, saved)[:6], None
        return _gradients(ctx, grad, saved[0], saved[1], convolution)


_apply: Any = super(torch.autograd.Function, _PooledConv).apply  # without its question for transforms, which has been answered


@functools.lru_cache(4096)
def _first_order(geometry: tuple) -> gradients.Geometry | None:
    """The small convolution as PyTorch's takes it; None if its pads are uneven, or activations are part of the call."""
    strides, pads, dilations, groups, prologue, _, epilogue = geometry[4:11]
    rank = len(strides)
    if prologue or epilogue or pads[:rank] != pads[rank:]:
        return None
    return strides, pads[:rank], dilations, groups


def _is_last(grad: torch.Tensor) -> bool:
    """Whether a backward pass without derivatives of its own asks, nothing looks on, and no CUDA graph is captured."""
    recorded = type(grad) is not torch.Tensor or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack()
    return not recorded and not gradients.is_captured(grad) and not gradients.is_batched(grad)


def _gradients(ctx: Any, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, convolution: gradients.Geometry) -> tuple:
    """What `operators.pooled_conv_backward` gives of a call without activations, scale and shift."""
    to_x, to_weight, to_bias, _, _, to_residual = gradients.wanted(ctx, ctx.are_tensors)
    boxes: Any = kernels if grad.is_cuda else plain
    pool, grad = ctx.rest[:4], gradients.dense(grad, x, weight)
    z, is_single = x, plain.is_single(*pool[:3])
    if to_weight and not is_single:
        z = boxes.box_mean(x, None, 0.0, *pool)
    elif not is_single:
        z = SmallConvolution(x, None, 0.0, pool, *ctx.rest[4:8]).like_input()
    d_z, d_weight, d_bias = gradients.of_convolution(grad, z, weight, convolution, (to_x, to_weight, to_bias))
    d_x = d_z if is_single or not to_x else boxes.box_mean_adjoint(d_z, None, 0.0, x.shape[2:], *pool)
    return d_x, d_weight, d_bias, None, None, grad if to_residual else None, None


def _run(tensors: Any, geometry: tuple) -> torch.Tensor:
    if not tensors[0].is_cuda:
        return plain.pooled_conv(*tensors, *geometry)
    y = kernels.by_plan(tensors, geometry)
    return plain.pooled_conv(*tensors, *geometry, mean=kernels.box_mean) if y is None else y


def pooled_conv_of(tensors: tuple, geometry: tuple) -> torch.Tensor:
    """pooled_conv of x, weight, bias, scale, shift and residual, and of the other arguments as tuples and numbers."""
    x, weight = tensors[:2]
    if not unwatched(x, weight, "cuda" if x.is_cuda else x.device.type):
        return transforms.pooled_conv(*tensors, *geometry)
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return _apply(*tensors, geometry)
    return _run(tensors, geometry)


def pooled_conv(*inputs: Any) -> torch.Tensor:
    """torch.ops.convpool.pooled_conv, with the same arguments, also under torch.func's transforms."""
    return pooled_conv_of(inputs[:6], kernels.frozen(inputs[6:]))
