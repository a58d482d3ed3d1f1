# SPDX-License-Identifier: Apache-2.0
"""A lone layer as it stands inside a network: its engine reads and writes what TensorRT has there, halves, channels last."""

from typing import Any

import numpy as np

from convpool.tensorrt.package import tensorrt_module

Arrays = dict[str, np.ndarray]


def half_channels_last(network: Any) -> None:
    """Make a TensorRT network's inputs and outputs half precision with the channels last."""
    trt = tensorrt_module()
    for tensor in (*map(network.get_input, range(network.num_inputs)), *map(network.get_output, range(network.num_outputs))):
        tensor.dtype = trt.DataType.HALF
        tensor.allowed_formats = 1 << int(trt.TensorFormat.HWC8)


def to_channels_last(arrays: Arrays) -> Arrays:
    """[N, C, H, W] as half precision with the channels last in memory, under the shape that the engine gives: [N, C, H, W]."""
    return {name: np.ascontiguousarray(x.transpose(0, 2, 3, 1), np.float16).reshape(x.shape) for name, x in arrays.items()}


def from_channels_last(arrays: Arrays) -> Arrays:
    """Return what `to_channels_last` gives, as [N, C, H, W] in memory too."""
    return {name: x.reshape(x.shape[0], *x.shape[2:], x.shape[1]).transpose(0, 3, 1, 2) for name, x in arrays.items()}
