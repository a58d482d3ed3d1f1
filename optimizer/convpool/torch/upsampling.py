# SPDX-License-Identifier: Apache-2.0
"""`upsample_conv2d`: nearest upsampling, then convolution, computed on the small map.

    upsample_conv2d(x, weight, bias, scale_factor=2, padding=1)
    = conv2d(interpolate(x, scale_factor=2, mode="nearest"), weight, bias, padding=1)

On a GPU a kernel of the library runs it.  Elsewhere it is one transposed convolution with the weights summed over the copies of a
pixel, or PyTorch's two operators where making those sums costs more.

The derivatives are the pair of `convpool.torch.pairs` and its own.  With P(g, V) = avg_pool_s(conv(g, V)) and V the weights
turned round, <g, y> = s * s * <x, P(g, V)>.  So the gradient at x is P of the gradient at y, and that at the weights is P's, both
with the pooling done first and differentiable to any order.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from convpool.algebra.geometry import Ints
from convpool.cuda import Plan, Problem
from convpool.errors import OptionError
from convpool.torch import calls, constant, gradients, kernels, pairs, plain
from convpool.torch.functional import Sizes, pooled_first, sizes

_CONVS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
MOST_SCALE = 4
"""The largest factor of an axis in the library's kernels."""
FEW_PIXELS = 16
"""The least pixels of all samples' small maps: with fewer, summing the weights costs more than it saves."""


def _two_operators(x: torch.Tensor, weight: torch.Tensor, bias: Any, scales: Ints, pads: Ints) -> torch.Tensor:
    up = F.interpolate(x, scale_factor=[float(s) for s in scales], mode="nearest")
    return _CONVS[len(scales)](up, weight, bias, padding=pads)


def _transposed(x: torch.Tensor, weight: torch.Tensor, bias: Any, scales: Ints, pads: Ints) -> torch.Tensor:
    """One transposed convolution, whose weights are those turned round and convolved with a box of the scales."""
    rank, kernel = len(scales), weight.shape[2:]
    merged = weight.flip(tuple(range(2, 2 + rank))).transpose(0, 1)
    for axis, scale in enumerate(scales):
        sides = [0, 0] * (rank - 1 - axis)
        copies = [F.pad(merged, [*sides, place, scale - 1 - place]) for place in range(scale)]
        merged = sum(copies[1:], copies[0])
    padding = [k - 1 - p for k, p in zip(kernel, pads, strict=True)]
    return _TRANSPOSED[rank](x, merged, bias, stride=scales, padding=padding)


class _Kind:
    """A kind of call on a GPU, planned once: shapes, types and order of the tensors, scales, pads, and TF32 or not."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, bias: Any, scales: Ints, pads: Ints) -> None:
        self.formats = plain.memory_format(x), plain.result_format(x, weight)
        x_layout, y_layout = ("channels_first" if f == torch.contiguous_format else "channels_last" for f in self.formats)
        problem = Problem(
            n=x.shape[0],
            c=x.shape[1],
            m=weight.shape[0],
            spatial=tuple(x.shape[2:]),
            kernel_shape=tuple(weight.shape[2:]),
            pool_kernel_shape=1,
            upsample=scales,
            pads=(*pads, *pads),
            dtype=calls.NAMES[x.dtype],
            layout=x_layout,
            y_layout=y_layout,
            bias=bias is not None,
            allow_tf32=calls.allows_tf32(),
        )
        self.plan = Plan(problem)
        shape = self.plan.y_shape
        self.shape = shape if y_layout == "channels_first" else (shape[0], shape[-1], *shape[1:-1])

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor | None:
        """The result, on PyTorch's current stream; None where an address is not aligned."""
        plan, key, kept, flags = self.plan, (self, weight.data_ptr()), None, 0
        dense = x.contiguous(memory_format=self.formats[0])
        store = constant.current()
        if store is not None and self not in store.passing:
            kept, flags = constant.prepared_for(key, weight, calls.library_weight, plan.prepared_bytes)
        w = calls.library_weight(weight) if kept is None or kept.dense is None else kept.dense
        b = None if bias is None else bias.contiguous()
        y = torch.empty(self.shape, dtype=x.dtype, device=x.device, memory_format=self.formats[1])
        addresses = [0 if t is None else t.data_ptr() for t in (dense, w, b, None, None, None, None, y)]
        if any(address & 15 for address in addresses):
            return None
        size = plan.workspace_bytes - (0 if kept is None else plan.prepared_bytes)
        space = torch.empty(size, dtype=torch.uint8, device=x.device)
        memory = (space.data_ptr(), size, calls.raw_stream(x.device.index), flags)
        plan.launch_raw(addresses, *memory, *((0, 0) if kept is None else (kept.prepared.data_ptr(), plan.prepared_bytes)))
        if kept is not None and not flags:
            constant.keep(key, weight, kept)
        return y


_kinds: dict[Any, _Kind | None] = {}


def _by_library(x: torch.Tensor, weight: torch.Tensor, bias: Any, scales: Ints, pads: Ints) -> torch.Tensor | None:
    """The result by the library, or None where it has no kernel on tensor cores for the call."""
    same = all(t is None or (t.dtype == x.dtype and t.device == x.device) for t in (weight, bias))
    if not (x.is_cuda and same and x.dtype in calls.NAMES and x.dim() <= 4 and max(scales) <= MOST_SCALE):
        return None
    if not kernels.library_is_there() or x.numel() == 0:
        return None
    tf32 = x.dtype == torch.float32 and calls.allows_tf32()
    key = (x.shape, x.stride(), x.dtype, x.device, weight.shape, weight.stride(), bias is None, scales, pads, tf32)
    with torch.cuda.device(x.device):
        if key not in _kinds:
            made = _Kind(x, weight, bias, scales, pads)
            if len(_kinds) >= calls.KEPT:
                _kinds.clear()
            _kinds[key] = made if made.plan.tactic.family != "generic" else None
        kind = _kinds[key]
        return None if kind is None else kind(x, weight, bias)


def _forward(x: torch.Tensor, weight: torch.Tensor, bias: Any, scales: Ints, pads: Ints) -> torch.Tensor:
    y = _by_library(x, weight, bias, scales, pads)
    if y is not None:
        return y
    if x.shape[0] * math.prod(x.shape[2:]) < FEW_PIXELS:
        return _two_operators(x, weight, bias, scales, pads)
    return _transposed(x, weight, bias, scales, pads)


class _UpsampleConv(torch.autograd.Function):
    """The operator with its own backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, scales: Ints, pads: Ints) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scales, ctx.pads = scales, pads
        return _forward(x, weight, bias, scales, pads)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        (x, weight), grad = ctx.saved_tensors, grads[0]
        rank, kernel = x.dim() - 2, tuple(weight.shape[2:])
        around, ones = tuple(k - 1 - p for k, p in zip(kernel, ctx.pads, strict=True)), (1,) * rank
        geometry = pooled_first(kernel, around, ones, ones, 1, ctx.scales, ctx.scales, (0,) * rank, False)
        assert geometry is not None  # a scale above 1
        turned, copies = _turned(weight), math.prod(ctx.scales)
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            d_x = copies * pairs.pooled_conv_of((grad, turned, None, None, None, None), geometry)
        if ctx.needs_input_grad[1]:
            found = pairs._pair_gradients(copies * x, grad, turned, geometry, (False, True, False))[1]
            assert found is not None
            d_weight = _turned(found)
        return d_x, d_weight, gradients.channel_sums(grad) if ctx.needs_input_grad[2] else None, None, None


def _turned(weight: torch.Tensor) -> torch.Tensor:
    """The weights of the transposed convolution as those of a plain one: [C, M, kernel] turned round, and back."""
    return weight.flip(tuple(range(2, weight.dim()))).transpose(0, 1).contiguous()


def upsample_conv2d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, scale_factor: Sizes = 2, padding: Sizes = 0
) -> torch.Tensor:
    """conv2d(interpolate(x, scale_factor=scale_factor, mode="nearest"), weight, bias, padding=padding), on the small map.

    x is [N, C, H, W], weight [M, C, kh, kw], bias [M]; scale_factor and padding are whole numbers, one or one for each axis.
    The result equals PyTorch's within the rounding of sums of weights, which are rounded once to the weights' type.  It lies in
    memory as PyTorch's would: channels last where x or the weight does.

    Differentiable to any order.  Under torch.compile, torch.func, torch.export and autocast PyTorch's two operators run.  Inside
    `constant_weights` the weights are summed once.

    Raises OptionError for sizes that describe no upsampling, and what PyTorch's operators raise.
    """
    scales, pads = sizes("scale_factor", scale_factor, 2, 1), sizes("padding", padding, 2, 0)
    if weight.dim() != 4:
        raise OptionError(f"weight: wrong number of axes; got {weight.dim()}, expected 4")
    fits = x.dim() == 4 and x.shape[1] == weight.shape[1] and x.dtype == weight.dtype and x.device == weight.device
    sides = list(zip(scales, x.shape[2:], pads, weight.shape[2:], strict=False))  # as many as there are
    regular = min(x.shape, default=0) > 0 and all(p < k <= s * n + 2 * p for s, n, p, k in sides)
    if max(scales) == 1 or not fits or not regular or not pairs.unwatched(x, weight, x.device.type):
        return _two_operators(x, weight, bias, scales, pads)
    return _UpsampleConv.apply(x, weight, bias, scales, pads)
