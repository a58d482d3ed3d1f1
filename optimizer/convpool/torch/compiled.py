# SPDX-License-Identifier: Apache-2.0
"""The box mean's adjoint as torch.compile shall see it: PyTorch's own operator, which inductor fuses with what stands around it.

A kernel of the library would read and write all of it once more, and the derivative of an activation in front, or a sum, again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from convpool.torch import plain

Ints = Sequence[int]
MOST = 25
"""Positions of a window up to which inductor writes PyTorch's average pooling out."""


def box_mean_adjoint(
    grad: torch.Tensor,
    gate: torch.Tensor | None,
    slope: float,
    u: torch.Tensor,
    kernel: Ints,
    strides: Ints,
    pads: Ints,
    dilations: Ints,
) -> torch.Tensor:
    """As `plain.box_mean_adjoint` for an input as u, whose values do not matter."""
    even = list(pads[:2]) == list(pads[2:]) and all(2 * p <= k for p, k in zip(pads, kernel, strict=False))
    if len(kernel) != 2 or not even or any(d != 1 for d in dilations) or math.prod(kernel) > MOST:
        return torch.ops.convpool.box_mean_adjoint(grad, gate, slope, u.shape[2:], kernel, strides, pads, dilations)
    spread = torch.ops.aten.avg_pool2d_backward(grad, u, kernel, strides, pads[:2], False, True, None)
    return spread if gate is None else plain.gated(spread, gate, slope)
