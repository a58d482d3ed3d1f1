# SPDX-License-Identifier: Apache-2.0
"""`ConvAvgPool1d`, 2d and 3d: torch.nn's convolutions with an average pooling behind them; `UpsampleConv1d`, 2d and 3d: with a
nearest upsampling in front of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from convpool.torch.ended import without_accumulation
from convpool.torch.functional import Sizes, conv_avg_pool, sizes
from convpool.torch.upsampling import upsample_conv2d


class _ConvAvgPool:
    """The part that the modules share; the class beside it is torch.nn's convolution of the rank."""

    rank: int

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
        self.pool_size = sizes("pool_size", pool_size, self.rank, 1)
        self.pool_stride = self.pool_size if pool_stride is None else sizes("pool_stride", pool_stride, self.rank, 1)
        self.pool_padding = sizes("pool_padding", pool_padding, self.rank, 0)
        self.ceil_mode, self.count_include_pad = ceil_mode, count_include_pad

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The pooled convolution of `input`."""
        conv: Any = self
        x, padding = input, conv.padding
        if conv.padding_mode != "zeros":
            x, padding = F.pad(input, conv._reversed_padding_repeated_twice, mode=conv.padding_mode), 0
        geometry = (conv.stride, padding, conv.dilation, conv.groups, self.pool_size, self.pool_stride, self.pool_padding)
        return conv_avg_pool(self.rank, x, conv.weight, conv.bias, *geometry, self.ceil_mode, self.count_include_pad)

    def extra_repr(self) -> str:
        """The convolution's arguments, then the pooling's."""
        convolution: Any = super()
        names = ("pool_size", "pool_stride", "pool_padding", "ceil_mode", "count_include_pad")
        return ", ".join([convolution.extra_repr(), *(f"{name}={getattr(self, name)!r}" for name in names)])


class ConvAvgPool1d(_ConvAvgPool, nn.Conv1d):
    """nn.Conv1d, then nn.AvgPool1d, as one layer: see `ConvAvgPool2d`."""

    rank = 1


class ConvAvgPool2d(_ConvAvgPool, nn.Conv2d):
    """nn.Conv2d, then nn.AvgPool2d, as one layer.

    Arguments, parameters and state_dict are nn.Conv2d's; pool_size, pool_stride (None: pool_size), pool_padding, ceil_mode and
    count_include_pad are nn.AvgPool2d's, by keyword.  What is computed, and how:
    `convpool.torch.conv_avg_pool2d`.
    """

    rank = 2


class ConvAvgPool3d(_ConvAvgPool, nn.Conv3d):
    """nn.Conv3d, then nn.AvgPool3d, as one layer: see `ConvAvgPool2d`."""

    rank = 3


class _UpsampleConv:
    """The part that the modules share; the class beside it is torch.nn's convolution of the rank."""

    rank: int

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Sizes, *, scale_factor: Sizes = 2, **options: Any
    ) -> None:
        convolution: Any = super()
        convolution.__init__(in_channels, out_channels, kernel_size, stride=1, dilation=1, groups=1, **options)
        self.scale_factor = sizes("scale_factor", scale_factor, self.rank, 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The convolution of the upsampled `input`."""
        conv: Any = self
        x, scales, padding = input, self.scale_factor, conv.padding
        if conv.padding_mode != "zeros":
            x, scales, padding = F.interpolate(x, scale_factor=[float(s) for s in scales]), (1,) * self.rank, 0
            x = F.pad(x, conv._reversed_padding_repeated_twice, mode=conv.padding_mode)
        return upsample_conv2d(x, conv.weight, conv.bias, scale_factor=scales, padding=padding, _rank=self.rank)

    def extra_repr(self) -> str:
        """The convolution's arguments, then the upsampling's."""
        convolution: Any = super()
        return f"{convolution.extra_repr()}, scale_factor={self.scale_factor}"


class UpsampleConv1d(_UpsampleConv, nn.Conv1d):
    """nn.Upsample, then nn.Conv1d, as one layer: see `UpsampleConv2d`."""

    rank = 1


class UpsampleConv2d(_UpsampleConv, nn.Conv2d):
    """nn.Upsample(scale_factor=scale_factor), then nn.Conv2d with a stride of 1, as one layer.

    Parameters and state_dict are nn.Conv2d's, and so are the arguments, without stride, dilation and groups; all behind
    kernel_size are by keyword.  scale_factor is a whole number, or one for each axis.  What is computed:
    `convpool.torch.upsample_conv2d`; with another padding_mode than zeros PyTorch's two operators.
    """

    rank = 2


class UpsampleConv3d(_UpsampleConv, nn.Conv3d):
    """nn.Upsample, then nn.Conv3d, as one layer: see `UpsampleConv2d`."""

    rank = 3
