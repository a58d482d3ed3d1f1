# SPDX-License-Identifier: Apache-2.0
"""What a site costs before and after, in multiply-adds, additions and bytes.

The time of a layer is taken as a weighted sum, in units of one multiply-add of a dense convolution.  The weights are
ratios measured with onnxruntime on a CPU (`make bench-cpu` repeats the layers they are from): what matters is only
their order of magnitude, since a rewrite that pays does so by factors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from convpool.algebra.geometry import ConvSpec, Ints, PoolSpec

ADDITION_WEIGHT = 8.0
"""A pooling's addition against a dense convolution's multiply-add: pooling is bound by loads."""
DEPTHWISE_WEIGHT = 4.0
"""A multiply-add of a convolution with under 4 input channels a group: each input element is used few times."""
BYTE_WEIGHT = 2.0
"""A byte read or written, mostly in a cache, against a dense multiply-add."""
NOMINAL_SIZE = 32
"""Stands for a spatial size that the model leaves open, in comparisons only; reported figures stay unknown."""


@dataclass(frozen=True)
class Cost:
    """macs: multiply-adds of convolutions; additions: of poolings; per sample.  time: the weighted sum."""

    macs: int = 0
    additions: int = 0
    time: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.macs + other.macs, self.additions + other.additions, self.time + other.time)


@lru_cache
def conv_cost(conv: ConvSpec, weight_shape: Ints, size: Ints, item_bytes: int) -> Cost:
    """Cost of one convolution, per sample; weight_shape: [M, C/group, kernel...]; size: spatial input sizes."""
    out = math.prod(max(n, 0) for n in conv.output_size(size))
    m, c = weight_shape[0], weight_shape[1] * conv.group
    macs = out * m * weight_shape[1] * conv.taps
    moved = (math.prod(size) * c + out * m + m * weight_shape[1] * conv.taps) * item_bytes
    weight = DEPTHWISE_WEIGHT if weight_shape[1] < 4 and conv.group > 1 else 1.0
    return Cost(macs, 0, macs * weight + moved * BYTE_WEIGHT)


@lru_cache
def pool_cost(pool: PoolSpec, channels: int, size: Ints, item_bytes: int) -> Cost:
    """Cost of one average pooling, per sample; nothing where the window is a single element at every position."""
    if pool.taps == 1 and not any(s > 1 for s in pool.strides) and not any(pool.pads):
        return Cost()
    out = math.prod(max(n, 0) for n in pool.output_size(size))
    additions = out * channels * pool.taps
    moved = (math.prod(size) + out) * channels * item_bytes
    return Cost(0, additions, additions * ADDITION_WEIGHT + moved * BYTE_WEIGHT)


def affine_cost(count: int, channels: int, size: Ints, item_bytes: int) -> Cost:
    """Cost of `count` elementwise nodes on a feature map, per sample."""
    return Cost(0, 0, count * math.prod(size) * channels * (ADDITION_WEIGHT / 4 + 2 * item_bytes * BYTE_WEIGHT))
