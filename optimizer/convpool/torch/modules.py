# SPDX-License-Identifier: Apache-2.0
"""Layers as functions and modules: `conv_avg_pool1d`, 2d and 3d are a convolution, then an average pooling, computed in the other
order.  `ConvAvgPool1d`, 2d and 3d are torch.nn's convolutions with that behind them, `UpsampleConv1d`, 2d and 3d with a nearest
upsampling in front of them.

    avg_pool_p,q(conv_s(x, W) + b)  =  conv_sq(box_mean_p(x), W) + b

The pooling is done first where that is exact (`convpool.algebra.geometry`) and saves arithmetic.  PyTorch's own two operators run
for a pooling with strides of 1, which saves nothing; windows of more than 64 elements on a GPU; pool_padding behind a bias or too
little padding of the convolution, where the border averages other values; ceil_mode; count_include_pad=False with pool_padding.
"""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convpool.algebra.geometry import MAX_KERNEL_WINDOW, ConvSpec, Ints, Refusal, pad_behind
from convpool.errors import OptionError
from convpool.torch import plain
from convpool.torch.deprecated import without_accumulation
from convpool.torch.pairs import is_exporting, pair_of, pooled_conv_of
from convpool.torch.plain import Sizes, conv_pads, sizes
from convpool.torch.upsampling import upsample_conv2d


def _describe(rank: int, kernel: Ints, *arguments: Any) -> tuple[tuple, tuple, tuple | None]:
    """Return PyTorch's arguments of the convolution and of the pooling, and those behind `pooled_conv`'s tensors: window,
    convolution, no ReLU; None for the last where PyTorch's two operators run.  shifted: whether the convolution has a bias."""
    stride, padding, dilation, groups, pool_size, pool_stride, pool_padding, ceil_mode, count_include_pad, shifted = arguments
    if len(kernel) != rank:
        raise OptionError(f"weight: wrong number of axes; got a kernel of {tuple(kernel)}, expected {rank}")
    strides, dilations = sizes("stride", stride, rank, 1), sizes("dilation", dilation, rank, 1)
    pool = sizes("pool_size", pool_size, rank, 1)
    pool_strides = pool if pool_stride is None else sizes("pool_stride", pool_stride, rank, 1)
    pool_pads = sizes("pool_padding", pool_padding, rank, 0)
    padding = padding if isinstance(padding, str) else sizes("padding", padding, rank, 0)
    first = None
    exact = not ceil_mode and (count_include_pad or not any(pool_pads)) and any(s != 1 for s in pool_strides)
    if exact and all(2 * pad <= window for pad, window in zip(pool_pads, pool, strict=True)):  # more is PyTorch's to refuse
        conv = ConvSpec(kernel, strides, conv_pads(padding, kernel, strides, dilations), dilations, groups)
        padded = pad_behind(conv, pool_pads * 2, shifted) if any(pool_pads) else conv
        first = None if isinstance(padded, Refusal) else pair_of(padded, pool, pool_strides)
    return (strides, padding, dilations, groups), (pool, pool_strides, pool_pads, ceil_mode, count_include_pad), first


_kept = functools.lru_cache(4096)(_describe)  # torch.compile, which would ignore the cache, traces the function itself


def conv_avg_pool(rank: int, x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    """The functions of all ranks; arguments: from stride to count_include_pad, in the functions' order."""
    asked = (rank, weight.shape[2:], *arguments, bias is not None)
    try:
        convolution, pooling, first = (_describe if torch.compiler.is_compiling() else _kept)(*asked)
    except TypeError:  # a list among the arguments
        convolution, pooling, first = _describe(*asked)
    wrong = x.dim() not in (rank + 1, rank + 2) or not x.is_floating_point()  # which PyTorch's own operators say best
    casts = torch.is_autocast_enabled(x.device.type)
    wrong = wrong or casts and rank == 3 and x.device.type == "cpu"  # which averages in float32
    slow = x.is_cuda and math.prod(pooling[0]) > MAX_KERNEL_WINDOW
    if first is None or wrong or slow or is_exporting() or x.dtype != weight.dtype and not casts:
        return plain.POOLS[rank](plain.CONVS[rank](x, weight, bias, *convolution), *pooling)
    if x.dim() == rank + 1:
        return torch.squeeze_copy(pooled_conv_of((x.unsqueeze(0), weight, bias), first), 0)
    return pooled_conv_of((x, weight, bias), first)


@without_accumulation
def conv_avg_pool1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, **arguments: Any) -> Tensor:
    """`conv_avg_pool2d` of one axis, by its keywords: x [N, C, L] or [C, L], weight [M, C/groups, k]."""
    return conv_avg_pool2d(x, weight, bias, _rank=1, **arguments)


@without_accumulation
def conv_avg_pool2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
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
) -> Tensor:
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
def conv_avg_pool3d(x: Tensor, weight: Tensor, bias: Tensor | None = None, **arguments: Any) -> Tensor:
    """`conv_avg_pool2d` of three axes, by its keywords: x [N, C, D, H, W] or [C, D, H, W], weight [M, C/groups, kd, kh, kw]."""
    return conv_avg_pool2d(x, weight, bias, _rank=3, **arguments)


# ---- modules ----


class _ConvAvgPool(nn.modules.conv._ConvNd):
    """The part that the modules share; the class beside it is torch.nn's convolution of the rank."""

    @without_accumulation
    def __init__(
        self,
        *args: Any,
        pool_size: Sizes,
        pool_stride: Sizes | None = None,
        pool_padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        rank = len(self.kernel_size)
        self.pool_size = sizes("pool_size", pool_size, rank, 1)
        self.pool_stride = self.pool_size if pool_stride is None else sizes("pool_stride", pool_stride, rank, 1)
        self.pool_padding = sizes("pool_padding", pool_padding, rank, 0)
        self.ceil_mode, self.count_include_pad = ceil_mode, count_include_pad

    def forward(self, input: Tensor) -> Tensor:
        """The pooled convolution of `input`."""
        x, padding, rank = input, self.padding, len(self.kernel_size)
        if self.padding_mode != "zeros":
            x, padding = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0
        numbers = (self.stride, padding, self.dilation, self.groups, self.pool_size, self.pool_stride, self.pool_padding)
        return conv_avg_pool(rank, x, self.weight, self.bias, *numbers, self.ceil_mode, self.count_include_pad)

    def extra_repr(self) -> str:
        """The convolution's arguments, then the pooling's."""
        names = ("pool_size", "pool_stride", "pool_padding", "ceil_mode", "count_include_pad")
        return ", ".join([super().extra_repr(), *(f"{name}={getattr(self, name)!r}" for name in names)])


class ConvAvgPool1d(_ConvAvgPool, nn.Conv1d):
    """nn.Conv1d, then nn.AvgPool1d, as one layer: see `ConvAvgPool2d`."""


class ConvAvgPool2d(_ConvAvgPool, nn.Conv2d):
    """nn.Conv2d, then nn.AvgPool2d, as one layer.

    Arguments, parameters and state_dict are nn.Conv2d's; pool_size, pool_stride (None: pool_size), pool_padding, ceil_mode and
    count_include_pad are nn.AvgPool2d's, by keyword.  What is computed, and how: `convpool.torch.conv_avg_pool2d`.
    """


class ConvAvgPool3d(_ConvAvgPool, nn.Conv3d):
    """nn.Conv3d, then nn.AvgPool3d, as one layer: see `ConvAvgPool2d`."""


class _UpsampleConv(nn.modules.conv._ConvNd):
    """The part that the modules share; the class beside it is torch.nn's convolution of the rank."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Sizes, *, scale_factor: Sizes = 2, **options: Any
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride=1, dilation=1, groups=1, **options)
        self.scale_factor = sizes("scale_factor", scale_factor, len(self.kernel_size), 1)

    def forward(self, input: Tensor) -> Tensor:
        """The convolution of the upsampled `input`."""
        x, scales, padding = input, self.scale_factor, self.padding
        if self.padding_mode != "zeros":
            x, scales, padding = F.interpolate(x, scale_factor=[float(s) for s in scales]), (1,) * len(scales), 0
            x = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode)
        return upsample_conv2d(x, self.weight, self.bias, scale_factor=scales, padding=padding, _rank=len(self.kernel_size))

    def extra_repr(self) -> str:
        """The convolution's arguments, then the upsampling's."""
        return f"{super().extra_repr()}, scale_factor={self.scale_factor}"


class UpsampleConv1d(_UpsampleConv, nn.Conv1d):
    """nn.Upsample, then nn.Conv1d, as one layer: see `UpsampleConv2d`."""


class UpsampleConv2d(_UpsampleConv, nn.Conv2d):
    """nn.Upsample(scale_factor=scale_factor), then nn.Conv2d with a stride of 1, as one layer.

    Parameters and state_dict are nn.Conv2d's, and so are the arguments, without stride, dilation and groups; all behind
    kernel_size are by keyword.  scale_factor is a whole number, or one for each axis.  What is computed:
    `convpool.torch.upsample_conv2d`; with another padding_mode than zeros PyTorch's two operators.
    """


class UpsampleConv3d(_UpsampleConv, nn.Conv3d):
    """nn.Upsample, then nn.Conv3d, as one layer: see `UpsampleConv2d`."""
