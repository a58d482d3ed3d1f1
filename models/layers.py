# SPDX-License-Identifier: Apache-2.0
"""Single pieces of the networks: one convolution with its pooling, one DenseNet transition, one discriminator block.

For benchmarks and tests of one layer at a time; sizes default to layers that occur in the networks.
"""

from __future__ import annotations

from collections.abc import Sequence

from models.builder import Net
from models.densenets import transition
from models.discriminators import residual_block


def conv_pool(
    net: Net,
    *,
    size: int | Sequence[int] = 56,
    channels=64,
    filters=64,
    kernel: int | Sequence[int] = 3,
    stride: int | Sequence[int] = 1,
    pads: int | Sequence[int] | None = None,
    group=1,
    bias=True,
    pool: int | Sequence[int] | None = 2,
    rank=2,
) -> None:
    """One Conv and its AveragePool. ``pads`` defaults to kernel // 2, ``pool`` None means GlobalAveragePool.

    Input [N, channels, size...]; per-axis arguments are an int or ``rank`` ints.
    """
    sizes = [size] * rank if isinstance(size, int) else size
    x = net.input("x", channels, *sizes)
    # Gain 1: the input is data, not a ReLU's output, so its variance is kept.
    x = net.conv(x, "conv", filters, kernel, stride=stride, pads=pads, group=group, bias=bias, gain=1.0)
    net.output(net.global_pool(x, "pool") if pool is None else net.pool(x, "pool", pool), "y")


def densenet_transition(net: Net, *, size=56, channels=256, rank=2) -> None:
    """One DenseNet transition: BN, ReLU, Conv1 to half the channels, AveragePool 2. Input [N, channels, size...]."""
    net.output(transition(net, net.input("x", channels, *[size] * rank), "transition"), "y")


def discriminator_block(net: Net, *, size=32, channels=64, filters=128) -> None:
    """One halving block of SNGAN's discriminator: two pairs that meet in an Add. Input [N, channels, size, size]."""
    net.output(residual_block(net, net.input("x", channels, size, size), "block", channels, filters), "y")
