# SPDX-License-Identifier: Apache-2.0
"""ConvAvgPool in PyTorch: forward, backward and twice backward with the pooling done first.

    from convpool.torch import ConvAvgPool2d, conv_avg_pool2d
    y = conv_avg_pool2d(x, weight, bias, padding=1, pool_size=2)  # avg_pool2d(conv2d(x, weight, bias, padding=1), 2)
    layer = ConvAvgPool2d(64, 128, 3, padding=1, pool_size=2)     # the parameters of nn.Conv2d(64, 128, 3, padding=1)
    model, report = optimize(model, example_inputs)               # the pairs of a whole module

The operators behind them take any number of spatial axes from 1 to 3.  pads hold all begins, then all ends; other lists have one
number for each axis.  Weights are PyTorch's: [M, C/groups, kernel...].

    convpool.torch.pooled_conv(                                 # torch.ops.convpool.pooled_conv, also under torch.func
        x, weight, bias,                                        # bias [M], or None
        pool_kernel, pool_strides, pool_pads, pool_dilations,   # of the box mean, which counts its zero padding
        strides, pads, dilations, groups,                       # of the convolution, over the pooled tensor
        relu)                                                   # whether a ReLU follows

    Y = relu(conv(box_mean(X), weight, bias))

    torch.ops.convpool.box_mean(x, kernel, strides, pads, dilations)
    torch.ops.convpool.box_mean_adjoint(grad, size, kernel, strides, pads, dilations)
"""

import importlib.util

from convpool.errors import TorchError

if importlib.util.find_spec("torch") is None:
    raise TorchError("torch: not installed; got no PyTorch, expected version 2.7 or later; run `pip install 'convpool[torch]'`")

import torch

if [*map(int, torch.__version__.split(".")[:2])] < [2, 7]:
    raise TorchError(f"torch: version; got {torch.__version__}, expected 2.7 or later; run `pip install -U 'convpool[torch]'`")

# ruff: noqa: E402
from convpool.torch.backend import compile_options
from convpool.torch.deprecated import constant_weights
from convpool.torch.modules import (
    ConvAvgPool1d,
    ConvAvgPool2d,
    ConvAvgPool3d,
    UpsampleConv1d,
    UpsampleConv2d,
    UpsampleConv3d,
    conv_avg_pool1d,
    conv_avg_pool2d,
    conv_avg_pool3d,
)
from convpool.torch.optimizing import explain, export_onnx, optimize
from convpool.torch.pairs import pooled_conv
from convpool.torch.upsampling import upsample_conv1d, upsample_conv2d, upsample_conv3d

__all__ = [
    "ConvAvgPool1d",
    "ConvAvgPool2d",
    "ConvAvgPool3d",
    "UpsampleConv1d",
    "UpsampleConv2d",
    "UpsampleConv3d",
    "compile_options",
    "constant_weights",
    "conv_avg_pool1d",
    "conv_avg_pool2d",
    "conv_avg_pool3d",
    "explain",
    "export_onnx",
    "optimize",
    "pooled_conv",
    "upsample_conv1d",
    "upsample_conv2d",
    "upsample_conv3d",
]
