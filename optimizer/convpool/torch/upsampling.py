# SPDX-License-Identifier: Apache-2.0
"""`upsample_conv1d`, 2d and 3d: nearest upsampling, then convolution, computed on the small map.

    upsample_conv2d(x, weight, bias, scale_factor=2, padding=1)
    = conv2d(interpolate(x, scale_factor=2, mode="nearest"), weight, bias, padding=1)

On a GPU a kernel of the library runs it.  Elsewhere it is one transposed convolution with the weights summed over the copies of a
pixel, or PyTorch's two operators where making those sums costs more.

The derivatives are the pair of `convpool.torch.pairs` and its own.  With P(g, V) = avg_pool_s(conv(g, V)) and V the weights
turned round, <g, y> = s * s * <x, P(g, V)>.  So the gradient at x is P of the gradient at y, and that at the weights is P's, both
with the pooling done first and differentiable to any order.
"""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convpool.algebra.geometry import ConvSpec, Ints
from convpool.errors import OptionError
from convpool.torch import kernels, pairs, plain
from convpool.torch.plain import Geometry, Sizes, conv_pads, sizes

_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
SUM_MACS = {"cpu": 320, "cuda": 640}
"""Multiply-adds that take as long as making one tap of the summed weights: 256 pixels of 3x3 kernels and a factor of 2, on a GPU
512."""
CHANNELS, GPU_CHANNELS, MANY_OUTPUTS = {False: 24, True: 64}, (4, 9), 64
"""Input channels from which on a CPU's transposed convolutions are faster, without gradients and with; and a GPU's, of which the
second is without gradients for fewer outputs than many."""
LARGE = 1 << 20
"""Numbers of an upsampled map from which on a kernel of the library makes it."""


def _two_operators(x: Tensor, weight: Tensor, bias: Any, scales: Ints, pads: Ints) -> Tensor:
    return _convolved(F.interpolate(x, scale_factor=[float(s) for s in scales]), weight, bias, pads)


def _convolved(x: Tensor, weight: Tensor, bias: Any, pads: Ints) -> Tensor:
    ones = [1] * (x.dim() - 2)
    return plain.convolve(x, weight, bias, ones, pads, ones, 1)


def summed_weights(weight: Tensor, scales: Ints) -> Tensor:
    """The weights [C, M, kernel...] of a transposed convolution: turned round, convolved with a box, rounded once."""
    rank = len(scales)
    wide = weight.float() if weight.dtype in plain.HALF_TYPES else weight
    found = wide.permute(*range(2, 2 + rank), 1, 0).flip(tuple(range(rank))).contiguous()
    for axis, scale in enumerate(scales):
        shape, size = list(found.shape), found.shape[axis]
        shape[axis] += scale - 1
        total = found.new_zeros(shape)
        for place in range(scale):
            total.narrow(axis, place, size).add_(found)
        found = total
    return found.permute(rank, rank + 1, *range(rank)).to(weight.dtype)


def _transposed(x: Tensor, weight: Tensor, bias: Any, scales: Ints, pads: Ints) -> Tensor:
    """One transposed convolution of the summed weights; what uneven pads leave over is cut off."""
    rank, crops = len(scales), _around(weight.shape[2:], pads)
    padding = [min(crops[axis], crops[rank + axis]) for axis in range(rank)]
    y = _TRANSPOSED[rank](x, summed_weights(weight, scales), bias, stride=scales, padding=padding)
    over = [padding[place % rank] - crop for place, crop in enumerate(crops)]
    return plain.laid_out(F.pad(y, plain.torch_pads(over)) if any(over) else y, plain.result_format(x, weight))


def _around(kernel: Ints, pads: Ints) -> Ints:
    """The pads of the convolution by the weights turned round, begins then ends."""
    return tuple(k - 1 - p for k, p in zip(tuple(kernel) * 2, pads, strict=True))


class _UpsampleConv(torch.autograd.Function):
    """The operator with its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, scales: Ints, pads: Ints) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scales, ctx.pads = scales, pads
        y = kernels.by_plan((x, weight, bias), (scales, pads)) if x.is_cuda else None
        return _transposed(x, weight, bias, scales, pads) if y is None else y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        (x, weight), grad, needs = ctx.saved_tensors, grads[0], ctx.needs_input_grad
        geometry, copies = _gradient_pair(tuple(weight.shape[2:]), ctx.scales, ctx.pads), math.prod(ctx.scales)
        turned = _turned(weight, copies)
        found = pairs.pair_gradients(x, grad, turned, geometry, (False, True, False))[1] if needs[1] else None
        d_weight = None if found is None else _turned(found, copies, weight)
        run = pairs.pair_by_torch if pairs.is_transformed(grad) else pairs.pooled_conv_of
        with torch._C._ExcludeDispatchKeyGuard(pairs.AUTOCAST):  # a backward pass in its context has forward's types
            d_x = run((grad, turned, None), geometry) if needs[0] else None
        return d_x, d_weight, pairs.channel_sums(grad) if needs[2] else None, None, None


_apply = super(torch.autograd.Function, _UpsampleConv).apply  # without PyTorch's question for transforms, which has been answered


@functools.lru_cache(4096)
def _gradient_pair(kernel: Ints, scales: Ints, pads: Ints) -> Geometry:
    """The geometry of the pair that makes the gradient at x."""
    ones = (1,) * len(scales)
    return pairs.pair_of(ConvSpec(kernel, ones, _around(kernel, pads), ones, 1), scales, scales)


def _turned(weight: Tensor, factor: int, like: Tensor | None = None) -> Tensor:
    """The weights of the transposed convolution as those of a plain one times a factor: [C, M, kernel] turned round, and back.

    like: how they lie in memory."""
    found, recorded = plain.memory_format(weight if like is None else like), torch.is_grad_enabled()
    if found == torch.channels_last and not recorded and pairs.takes_kernels(weight):
        made = kernels.turned(weight, factor)
        if made is not None:
            return made
    turned = weight.flip(tuple(range(2, weight.dim()))).transpose(0, 1)
    if recorded or pairs.is_transformed(weight):
        return (factor * turned).contiguous()
    return torch.mul(turned, factor, out=torch.empty(turned.shape, dtype=weight.dtype, device=weight.device, memory_format=found))


class _Blocks(torch.autograd.Function):
    """Each value repeated over a block, or the sums over blocks: one another's derivatives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scales: Ints, sums: bool) -> Tensor:
        ctx.scales, ctx.sums = scales, sums
        made = kernels.blocks(x, scales, sums) if pairs.takes_kernels(x) else None
        return _blocks_by_torch(x, scales, sums) if made is None else made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        run = _blocks_by_torch if pairs.is_transformed(grads[0]) else _blocks
        return run(grads[0], ctx.scales, not ctx.sums), None, None


_blocks = super(torch.autograd.Function, _Blocks).apply


def _blocks_by_torch(x: Tensor, scales: Ints, sums: bool) -> Tensor:
    if sums:
        return plain.box_mean(x, scales, scales, (0, 0) * len(scales), (1,) * len(scales)) * math.prod(scales)
    return interpolated(x, scales)


def interpolated(x: Tensor, scales: Ints) -> Tensor:
    """Nearest upsampling by PyTorch, in the type of x, where its autocast on a GPU makes float32."""
    return F.interpolate(x, scale_factor=[float(s) for s in scales]).to(x.dtype)


def _upsampled(x: Tensor, scales: Ints) -> Tensor:
    """Nearest upsampling; PyTorch's own takes 3 microseconds a MB with the channels last, on an H100."""
    if x.is_cuda and x.numel() * math.prod(scales) >= LARGE and plain.memory_format(x) == torch.channels_last:
        if pairs.unwatched(x, x, "meta"):
            return _blocks(x, scales, False)
    return interpolated(x, scales)


def _pays(x: Tensor, weight: Tensor, scales: Ints) -> bool:
    """Return True if the sums of weights take less than they save."""
    recorded = torch.is_grad_enabled()
    if x.shape[1] < (GPU_CHANNELS[weight.shape[0] < MANY_OUTPUTS and not recorded] if x.is_cuda else CHANNELS[recorded]):
        return False
    kernel, pixels = tuple(weight.shape[2:]), math.prod(plain.hints(x.shape, True)) // x.shape[1]
    after = math.prod(k + s - 1 for k, s in zip(kernel, scales, strict=True))
    before = math.prod(kernel) * math.prod(scales)
    return pixels * (before - after) >= after * SUM_MACS.get(x.device.type, 320)


def convolves_first(weight: Tensor) -> bool:
    """Return True if a convolution is computed before the upsampling: that is less work, though more channels are repeated."""
    return max(weight.shape[2:]) == 1 and weight.shape[0] <= 2 * weight.shape[1]


def upsample_conv_of(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Ints, pads: Ints) -> Tensor:
    """The call of a rewritten graph: an upsampling by whole factors, then a convolution of stride 1.  pads: begins, then ends."""
    x, weight, bias = pairs.cast_for_autocast((x, weight, bias))
    if convolves_first(weight):
        return _upsampled(_convolved(x, weight, bias, pads), scales)
    if 0 in plain.hints(x.shape, True) or not x.is_floating_point() or not _pays(x, weight, scales):
        return _two_operators(x, weight, bias, scales, pads)
    if not pairs.unwatched(x, weight, "meta"):
        return _transposed(x, weight, bias, scales, pads)
    return _apply(x, weight, bias, scales, pads)


def upsample_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, **arguments: Any) -> Tensor:
    """`upsample_conv2d` of one axis, by its keywords: x [N, C, L], weight [M, C, k]."""
    return upsample_conv2d(x, weight, bias, _rank=1, **arguments)


def upsample_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scale_factor: Sizes = 2, padding: Sizes | str = 0, _rank: int = 2
) -> Tensor:
    """conv2d(interpolate(x, scale_factor=scale_factor, mode="nearest"), weight, bias, padding=padding), on the small map.

    x is [N, C, H, W], weight [M, C, kh, kw], bias [M]; scale_factor and padding are whole numbers, one or one for each axis;
    padding also "valid" or "same".  The result equals PyTorch's within the rounding of sums of weights, which are rounded once to
    the weights' type.  It lies in memory as PyTorch's would: channels last where x or the weight does.

    Differentiable to any order; autocast works.  PyTorch's two operators run under torch.compile, torch.func and torch.export,
    and where they are faster: below 256 pixels of all samples for 3x3 and a factor of 2, on a GPU 512; below 24 channels, 64
    with gradients, on a GPU 4, or 9 without gradients for fewer than 64 outputs.

    Raises OptionError for sizes that describe no upsampling, and what PyTorch's operators raise.
    """
    rank, kernel, ones = _rank, tuple(weight.shape[2:]), (1,) * _rank
    if len(kernel) != rank:
        raise OptionError(f"weight: wrong number of axes; got {weight.dim()}, expected {rank + 2}")
    scales, pads = sizes("scale_factor", scale_factor, rank, 1), conv_pads(padding, kernel, ones, ones)
    x, weight, bias = pairs.cast_for_autocast((x, weight, bias))
    alike = all(x.dtype == other.dtype and x.device == other.device for other in (weight, bias) if other is not None)
    fits = alike and x.dim() == rank + 2 and x.shape[1] == weight.shape[1]
    # A list and slices of one length: PyTorch 2.7 and 2.8 capture neither generators nor zips of other ones.
    sides = [*zip(scales, x.shape[2:], pads[:rank], pads[rank:], kernel, strict=True)] if fits else []
    if max(scales) > 1 and fits and all([max(p, q) < k <= s * n + p + q for s, n, p, q, k in sides]):
        if pairs.unwatched(x, weight, "meta"):
            return upsample_conv_of(x, weight, bias, scales, pads)
    return _two_operators(x, weight, bias, scales, pads)


def upsample_conv3d(x: Tensor, weight: Tensor, bias: Tensor | None = None, **arguments: Any) -> Tensor:
    """`upsample_conv2d` of three axes, by its keywords: x [N, C, D, H, W], weight [M, C, kd, kh, kw]."""
    return upsample_conv2d(x, weight, bias, _rank=3, **arguments)
