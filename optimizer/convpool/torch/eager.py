# SPDX-License-Identifier: Apache-2.0
"""The shortest way through pooled_conv where nothing looks on: no compiler, mode, transform, tracer or autocast.

PyTorch takes some 20 microseconds to bring a call from Python to an operator of torch.library and back to Python, and more with
derivatives.  An eager call that nothing intercepts goes to the kernels at once, with an autograd.Function where derivatives are
wanted.
"""

from __future__ import annotations

from typing import Any

import torch

from convpool.torch import kernels, operators, plain, transforms

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
        *tensors, geometry = inputs
        y = _run(tensors, geometry)
        operators.pooled_conv_context(ctx, (*tensors, *geometry), y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        return *operators.pooled_conv_backward(ctx, grads[0])[:6], None


def _run(tensors: Any, geometry: tuple) -> torch.Tensor:
    if not tensors[0].is_cuda:
        return plain.pooled_conv(*tensors, *geometry)
    y = kernels.by_plan(tensors, geometry)
    return plain.pooled_conv(*tensors, *geometry, mean=kernels.box_mean) if y is None else y


def pooled_conv_of(tensors: tuple, geometry: tuple) -> torch.Tensor:
    """pooled_conv of x, weight, bias, scale, shift and residual, and of the other arguments as tuples and numbers."""
    x, weight = tensors[:2]
    if not unwatched(x, weight, x.device.type):
        return transforms.pooled_conv(*tensors, *geometry)
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return _PooledConv.apply(*tensors, geometry)
    return _run(tensors, geometry)


def pooled_conv(*inputs: Any) -> torch.Tensor:
    """torch.ops.convpool.pooled_conv, with the same arguments, also under torch.func's transforms."""
    return pooled_conv_of(inputs[:6], kernels.frozen(inputs[6:]))
