# SPDX-License-Identifier: Apache-2.0
"""The operators of torch.library: convpool::pooled_conv, convpool::box_mean and convpool::box_mean_adjoint.

`convpool.torch` describes them.  All three have fake tensors and derivatives of any order, and pooled_conv a rule for
autocast.  A fourth, convpool::pooled_conv_gradients, is what a compiler sees of pooled_conv's backward.  pooled_conv's
backward, with Z the box mean, made again rather than kept:

    dZ, dW, db = gradients of the small convolution at Z      (PyTorch's own operator: cuDNN)
    dX = box_mean_adjoint(dZ), gated by the prologue's activation

Each part is differentiable itself: the box mean and its adjoint are one another's derivative, as both are linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from convpool.torch import compiled, gradients, kernels, plain
from convpool.torch.small import SmallConvolution

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
LIBRARY.define(
    "pooled_conv_gradients(Tensor grad, Tensor x, Tensor? gate, float slope, Tensor weight, int[] pool_kernel, "
    "int[] pool_strides, int[] pool_pads, int[] pool_dilations, int[] strides, int[] pads, int[] dilations, int groups, "
    "bool of_input, bool of_weight, bool of_bias) -> (Tensor, Tensor, Tensor)"
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


def _fake_gradients(
    grad: torch.Tensor, x: torch.Tensor, gate: torch.Tensor | None, slope: float, weight: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pool, (of_input, of_weight, of_bias), found = rest[:4], rest[8:], plain.result_format(x, weight)
    sizes = plain.pooled_size(x.shape[2:], *pool)
    d_z = _new(grad, [*x.shape[:2], *sizes], found) if of_input else grad.new_empty(0)
    d_weight = _new(grad, weight.shape, found) if of_weight else grad.new_empty(0)
    return d_z, d_weight, grad.new_empty(weight.shape[0] if of_bias else 0)


torch.library.register_fake("convpool::pooled_conv_gradients", _fake_gradients, lib=LIBRARY)
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


def keep(ctx: Any, tensors: Sequence[Any], geometry: Sequence[Any], y: torch.Tensor) -> None:
    """Keeps what `pooled_conv_backward` needs of a call and its result."""
    x, weight, bias, scale, shift, residual = tensors
    ctx.rest, ctx.has_residual = geometry, residual is not None
    ctx.are_tensors = (True, True, bias is not None, scale is not None, shift is not None, residual is not None)
    epilogue = geometry[10]
    if not epilogue:
        ctx.save_for_backward(*((x, weight) if scale is None else (x, weight, scale, shift)))
    elif plain.slope_of(epilogue, geometry[11]) >= 0:
        ctx.save_for_backward(x, weight, scale, shift, y)
    else:  # Y does not tell the sign of what it was made of
        ctx.save_for_backward(x, weight, scale, shift, None, bias, residual)


def _pooled_conv_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    keep(ctx, inputs[:6], inputs[6:], output)


def _boxes(grad: torch.Tensor) -> Any:
    """The box mean and its adjoint: operators, or their kernels at once where no derivatives are wanted and nothing looks on."""
    watched = type(grad) is not torch.Tensor or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack()
    if watched or gradients.is_batched(grad):
        return _ops
    return kernels if grad.is_cuda else plain


def _pooled_conv_backward(ctx: Any, grad: torch.Tensor) -> tuple:
    return pooled_conv_backward(ctx, grad, ctx.saved_tensors)


def pooled_conv_backward(ctx: Any, grad: torch.Tensor, saved: tuple) -> tuple:
    """Gradients for all arguments, None for numbers; differentiable.  saved: ctx.saved_tensors, which may be asked for once."""
    kept: Any = (*saved, *[None] * 5)
    x, weight, scale, shift, y, bias, residual = kept[:7]
    pool, convolution = ctx.rest[:4], ctx.rest[4:8]
    prologue, prologue_alpha, epilogue, epilogue_alpha = ctx.rest[8:12]
    needs, boxes = gradients.wanted(ctx, ctx.are_tensors), _boxes(grad)
    if epilogue:
        if y is None:
            y = _ops.pooled_conv(x, weight, bias, scale, shift, residual, *ctx.rest[:10], plain.NONE, 0.0, *ctx.rest[12:])
        grad = plain.activation_backward(grad, y, epilogue, epilogue_alpha)
    through_x = needs[0] or needs[3] or needs[4]
    u = x if scale is None else x * plain.by_channel(scale, x) + plain.by_channel(shift, x)
    gate, slope = (u.detach() if prologue else None), plain.slope_of(prologue, prologue_alpha)
    small, d_u = SmallConvolution(u, gate, slope, pool, *convolution), None
    grad = gradients.dense(grad, x, weight)
    if gradients.is_compiled(grad):
        # A compiler fuses the bias's sums with what is around them; with those of few channels they cost nothing.
        together = needs[1] and needs[2] and gradients.has_few_channels(weight, True)
        wanted = through_x, needs[1], together
        d_z, d_weight, d_bias = _ops.pooled_conv_gradients(grad, u, gate, slope, weight, *pool, *convolution, *wanted)
        d_weight = d_weight if needs[1] else None
        if not together:
            d_bias = gradients.channel_sums(grad) if needs[2] else None
        if through_x:
            d_u = d_z if small.is_single else compiled.box_mean_adjoint(d_z, gate, slope, u, *pool)
    elif gradients.is_captured(grad):
        (d_weight, d_bias), d_u = gradients.side_by_side(
            grad,
            lambda: gradients.of_parameters(
                grad, small.input(boxes) if needs[1] else u, weight, small.geometry, needs[1], needs[2]
            ),
            lambda: small.through_boxes(boxes, small.input_gradient(grad, weight)) if through_x else None,
        )
    else:
        wanted, z = (through_x, needs[1], needs[2]), small.input(boxes) if needs[1] else small.like_input()
        d_z, d_weight, d_bias = gradients.of_convolution(grad, z, weight, small.geometry, wanted)
        d_u = small.through_boxes(boxes, small.without_pads(d_z)) if through_x else None
    d_x = d_scale = d_shift = None
    if d_u is not None:
        d_x = d_u if scale is None else d_u * plain.by_channel(scale, x)
        others = [0, *range(2, x.dim())]
        d_scale = (d_u * x).sum(others) if needs[3] else None
        d_shift = d_u.sum(others) if needs[4] else None
    d_residual = grad if ctx.has_residual and needs[5] else None
    return d_x if needs[0] else None, d_weight, d_bias, d_scale, d_shift, d_residual, *[None] * 13


def _pooled_conv_gradients(
    grad: torch.Tensor, x: torch.Tensor, gate: torch.Tensor | None, slope: float, weight: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients at the box means, the weight and the bias; empty those that are not asked for.

    One operator for all: they are two branches of a CUDA graph then, whatever a compiler makes of what is around it."""
    of_input, of_weight, of_bias = rest[8:]
    boxes, small = kernels if grad.is_cuda else plain, SmallConvolution(x, gate, slope, rest[:4], *rest[4:8])

    def at_parameters() -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return gradients.of_parameters(grad, small.input(boxes), weight, small.geometry, of_weight, of_bias)

    def at_box_means() -> torch.Tensor:
        return small.input_gradient(grad, weight)

    with torch.no_grad():
        if of_input and of_weight:
            (d_weight, d_bias), d_z = gradients.side_by_side(grad, at_parameters, at_box_means)
        else:
            d_weight, d_bias = at_parameters() if of_weight or of_bias else (None, None)
            d_z = at_box_means() if of_input else None
    found = plain.result_format(x, weight)
    made = (grad.new_empty(0) if t is None else t for t in (d_z, d_weight, d_bias))
    d_z, d_weight, d_bias = (t.contiguous(memory_format=found) if t.dim() > 1 else t for t in made)
    return d_z, d_weight, d_bias


LIBRARY.impl("pooled_conv_gradients", _pooled_conv_gradients, "CompositeExplicitAutograd")
torch.library.register_autograd("convpool::box_mean", _box_mean_backward, setup_context=_box_mean_context, lib=LIBRARY)
torch.library.register_autograd("convpool::box_mean_adjoint", _adjoint_backward, setup_context=_adjoint_context, lib=LIBRARY)
torch.library.register_autograd("convpool::pooled_conv", _pooled_conv_backward, setup_context=_pooled_conv_context, lib=LIBRARY)


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
        cast, residual = cast_for_autocast(inputs), inputs[5]
        apart = residual is not None and residual.dtype != cast[0].dtype  # a sum has the wider type of the two
        with torch._C._ExcludeDispatchKeyGuard(keys):
            if not apart:
                return _ops.pooled_conv(*cast)
            y = _ops.pooled_conv(*cast[:5], None, *cast[6:16], plain.NONE, 0.0, *cast[18:])
        return plain.activate(y + residual, *cast[16:18])

    return pooled_conv


for _device in ("cpu", "cuda"):
    LIBRARY.impl("pooled_conv", _autocast(_device), f"Autocast{_device.upper()}")
