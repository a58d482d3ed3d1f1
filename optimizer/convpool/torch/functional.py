# SPDX-License-Identifier: Apache-2.0
"""`conv_avg_pool1d`, `conv_avg_pool2d` and `conv_avg_pool3d`: convolution, then average pooling, computed in the other order.

    avg_pool_p,q(conv_s(x, W) + b)  =  conv_sq(box_mean_p(x), W) + b

The pooling is done first where that is exact (`convpool.algebra.geometry`) and saves arithmetic.  PyTorch's own two operators run
for a pooling with strides of 1, which saves nothing; windows of more than 64 elements on a GPU; pool_padding behind a bias or too
little padding of the convolution, where the border averages other values; ceil_mode; count_include_pad=False with pool_padding.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

from convpool.algebra.geometry import MAX_KERNEL_WINDOW, ConvSpec, Ints, PoolSpec, Refusal, pad_behind, pool_first, same_pads
from convpool.errors import OptionError
from convpool.torch import plain
from convpool.torch.ended import without_accumulation
from convpool.torch.pairs import is_exporting, pooled_conv_of

Sizes = int | Sequence[int]


def sizes(name: str, value: Any, rank: int, least: int) -> Ints:
    """One number for every axis, or one for each; OptionError otherwise."""
    given = tuple(value) if isinstance(value, (tuple, list)) else (value,) * rank
    if len(given) == 1:
        given *= rank
    try:
        found = tuple(operator.index(v) for v in given)
    except TypeError:
        raise OptionError(f"{name}: no whole numbers; got {value!r}, expected one, or {rank}") from None
    if len(found) != rank or min(found) < least:
        raise OptionError(f"{name}: wrong numbers; got {value!r}, expected one, or {rank}, of at least {least}")
    return found


def conv_pads(padding: Any, kernel: Ints, strides: Ints, dilations: Ints) -> Ints:
    """Begins, then ends, of PyTorch's padding argument, a word included."""
    rank = len(kernel)
    if not isinstance(padding, str):
        return sizes("padding", padding, rank, 0) * 2
    if padding == "valid":
        return (0,) * (2 * rank)
    if padding != "same" or any(s != 1 for s in strides):
        raise OptionError(f"padding: got {padding!r} with strides {strides}, expected numbers, 'valid', or 'same' with stride 1")
    return same_pads("SAME_UPPER", kernel, strides, dilations, None)


def pooled_first(conv: ConvSpec, pool: Ints, strides: Ints, padding: Ints, shifted: bool) -> tuple | None:
    """The arguments behind `pooled_conv`'s tensors: window, convolution, no ReLU.  None where PyTorch's two operators run.

    padding: of the pooling.  shifted: whether the convolution has a bias."""
    if all(s == 1 for s in strides):
        return None
    padded = pad_behind(conv, padding * 2, shifted) if any(padding) else conv
    return None if isinstance(padded, Refusal) else pair_of(padded, pool, strides)


def pair_of(conv: ConvSpec, pool: Ints, strides: Ints) -> tuple:
    """The arguments of `pooled_conv` behind its tensors: window, convolution, no ReLU."""
    return arguments_of(*pool_first.__wrapped__(conv, PoolSpec(pool, strides, (0, 0) * len(pool), (1,) * len(pool))))


def arguments_of(box: PoolSpec, conv: ConvSpec) -> tuple:
    """The same, of the box means and the convolution behind them."""
    window = (box.kernel_shape, box.strides, box.pads, box.dilations)
    return (*window, conv.strides, conv.pads, conv.dilations, conv.group, False)


def _describe(rank: int, kernel: Ints, *arguments: Any) -> tuple[tuple, tuple, tuple | None]:
    """Return PyTorch's arguments of the convolution and of the pooling, and what `pooled_first` gives."""
    stride, padding, dilation, groups, pool_size, pool_stride, pool_padding, ceil_mode, count_include_pad, shifted = arguments
    if len(kernel) != rank:
        raise OptionError(f"weight: wrong number of axes; got a kernel of {tuple(kernel)}, expected {rank}")
    strides, dilations = sizes("stride", stride, rank, 1), sizes("dilation", dilation, rank, 1)
    pool = sizes("pool_size", pool_size, rank, 1)
    pool_strides = pool if pool_stride is None else sizes("pool_stride", pool_stride, rank, 1)
    pool_pads = sizes("pool_padding", pool_padding, rank, 0)
    padding = padding if isinstance(padding, str) else sizes("padding", padding, rank, 0)
    first = None
    exact = not ceil_mode and (count_include_pad or not any(pool_pads))
    if exact and all(2 * pad <= window for pad, window in zip(pool_pads, pool, strict=True)):  # more is PyTorch's to refuse
        conv = ConvSpec(kernel, strides, conv_pads(padding, kernel, strides, dilations), dilations, groups)
        first = pooled_first(conv, pool, pool_strides, pool_pads, shifted)
    pooling = (pool, pool_strides, pool_pads, ceil_mode, count_include_pad)
    return (strides, padding, dilations, groups), pooling, first


_kept = functools.lru_cache(4096)(_describe)  # torch.compile, which would ignore the cache, traces the function itself


def conv_avg_pool(rank: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *arguments: Any) -> torch.Tensor:
    """The functions of all ranks; arguments: from stride to count_include_pad, in the functions' order."""
    asked = (rank, weight.shape[2:], *arguments, bias is not None)
    try:
        described = (_describe if torch.compiler.is_compiling() else _kept)(*asked)
    except TypeError:  # a list among the arguments
        described = _describe(*asked)
    convolution, pooling, first = described
    wrong = x.dim() not in (rank + 1, rank + 2) or not x.is_floating_point()  # which PyTorch's own operators say best
    casts = torch.is_autocast_enabled(x.device.type)
    wrong = wrong or casts and rank == 3 and x.device.type == "cpu"  # which averages in float32
    slow = x.is_cuda and math.prod(pooling[0]) > MAX_KERNEL_WINDOW
    if first is None or wrong or slow or is_exporting() or x.dtype != weight.dtype and not casts:
        return plain.POOLS[rank](plain.CONVS[rank](x, weight, bias, *convolution), *pooling)
    if x.dim() == rank + 1:
        return pooled_conv_of((x.unsqueeze(0), weight, bias), first).squeeze(0)
    return pooled_conv_of((x, weight, bias), first)


@without_accumulation
def conv_avg_pool1d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **arguments: Any) -> torch.Tensor:
    """`conv_avg_pool2d` of one axis, by its keywords: x [N, C, L] or [C, L], weight [M, C/groups, k]."""
    return conv_avg_pool2d(x, weight, bias, _rank=1, **arguments)


@without_accumulation
def conv_avg_pool2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    pool_size: Sizes,
    pool_stride: Sizes | None = None,
    pool_padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    _rank: int = 2,
) -> torch.Tensor:
    """avg_pool2d(conv2d(x, weight, bias, stride, padding, dilation, groups), pool_size, pool_stride, pool_padding), with the
    pooling done first where that is exact.

    x is [N, C, H, W] or [C, H, W], weight [M, C/groups, kh, kw], bias [M]; the result is [N, M, h, w] or [M, h, w].  Arguments
    are those of torch.nn.functional's conv2d and avg_pool2d: one number, or one for each axis; padding also "valid" or "same";
    pool_stride=None is pool_size.  The result equals PyTorch's within the rounding of another order of summation.  It lies in
    memory as PyTorch's would: channels last where x or the weight does.

    Differentiable to any order.  Works under autocast, torch.compile, CUDA graphs and torch.func.  float32 is multiplied in TF32
    where torch.backends.cudnn.allow_tf32 says so.

    Raises OptionError for sizes that describe no convolution or pooling, and what PyTorch's operators raise.
    """
    pooling = (pool_size, pool_stride, pool_padding, ceil_mode, count_include_pad)
    return conv_avg_pool(_rank, x, weight, bias, stride, padding, dilation, groups, *pooling)


@without_accumulation
def conv_avg_pool3d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **arguments: Any) -> torch.Tensor:
    """`conv_avg_pool2d` of three axes, by its keywords: x [N, C, D, H, W] or [C, D, H, W], weight [M, C/groups, kd, kh, kw]."""
    return conv_avg_pool2d(x, weight, bias, _rank=3, **arguments)
