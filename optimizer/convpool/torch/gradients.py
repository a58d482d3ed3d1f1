# SPDX-License-Identifier: Apache-2.0
"""The gradients of a convolution Y = Z * W as functions that are differentiable by one another.

    input_gradient(G, W): dZ        weight_gradient(G, Z): dW        convolve(Z, W): Y

All three are linear in both arguments, and the derivative of each is made of the other two.  PyTorch's own derivative of a
convolution's backward computes the weights' part as a convolution with kernels as large as the images, many times slower.
"""

from __future__ import annotations

from typing import Any

import torch

Geometry = tuple[Any, Any, Any, int]
"""Strides, padding, dilations and groups, as torch.convolution takes them."""


def _backward(grad: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, geometry: Geometry, wanted: list[bool]) -> Any:
    strides, padding, dilations, groups = geometry
    zeros = [0] * len(strides)
    return torch.ops.aten.convolution_backward(grad, z, weight, None, strides, padding, dilations, False, zeros, groups, wanted)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        ctx.save_for_backward(z, weight)
        ctx.geometry = geometry
        strides, padding, dilations, groups = geometry
        return torch.convolution(z, weight, None, strides, padding, dilations, False, [0] * len(strides), groups)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        (z, weight), (grad,) = ctx.saved_tensors, grads
        d_z = input_gradient(grad, weight, z, ctx.geometry) if ctx.needs_input_grad[0] else None
        d_weight = weight_gradient(grad, z, weight, ctx.geometry) if ctx.needs_input_grad[1] else None
        return d_z, d_weight, None


class _InputGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, weight: torch.Tensor, like: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        ctx.save_for_backward(grad, weight)
        ctx.geometry = geometry
        return _backward(grad, like, weight, geometry, [True, False, False])[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        (grad, weight), (outer,) = ctx.saved_tensors, grads
        d_grad = convolve(outer, weight, ctx.geometry) if ctx.needs_input_grad[0] else None
        d_weight = weight_gradient(grad, outer, weight, ctx.geometry) if ctx.needs_input_grad[1] else None
        return d_grad, d_weight, None, None


class _WeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, z: torch.Tensor, like: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        ctx.save_for_backward(grad, z)
        ctx.geometry = geometry
        return _backward(grad, z, like, geometry, [False, True, False])[1]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        (grad, z), (outer,) = ctx.saved_tensors, grads
        d_grad = convolve(z, outer, ctx.geometry) if ctx.needs_input_grad[0] else None
        d_z = input_gradient(grad, outer, z, ctx.geometry) if ctx.needs_input_grad[1] else None
        return d_grad, d_z, None, None


def convolve(z: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The convolution without a bias."""
    return _Convolve.apply(z, weight, geometry)


def input_gradient(grad: torch.Tensor, weight: torch.Tensor, like: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The gradient at the convolution's input, which has the shape, type and memory order of `like`; its values do not matter."""
    return _InputGradient.apply(grad, weight, like.detach(), geometry)


def weight_gradient(grad: torch.Tensor, z: torch.Tensor, like: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The gradient at the weights, which are as `like`, from the convolution's input z."""
    return _WeightGradient.apply(grad, z, like.detach(), geometry)
