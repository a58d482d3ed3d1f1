# SPDX-License-Identifier: Apache-2.0
"""The box mean's adjoint as torch.compile shall see it: operators of PyTorch that inductor fuses with what stands around them.

A kernel of the library would read and write all of it once more, and the derivative of an activation in front, or a sum, again.
With strides of 1 the adjoint is a sum of shifted gradients.  Inductor's code for avg_pool2d_backward, which looks for the windows
of each position, takes 42 microseconds where that sum would take 25 (64 images of 64x64, 64 channels).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from convpool.torch import plain

Ints = Sequence[int]
MOST = 25
"""Positions of a window up to which its sums are written out."""


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
    rank = len(kernel)
    even = list(pads[:rank]) == list(pads[rank:]) and all(2 * p <= k for p, k in zip(pads, kernel, strict=False))
    if math.prod(kernel) <= MOST and all(s == 1 for s in strides):
        spread = _shifted_sum(grad, u.shape[2:], kernel, pads, dilations)
    elif math.prod(kernel) <= MOST and rank == 2 and even and all(d == 1 for d in dilations):
        spread = torch.ops.aten.avg_pool2d_backward(grad, u, kernel, strides, pads[:2], False, True, None)
    else:
        return torch.ops.convpool.box_mean_adjoint(grad, gate, slope, u.shape[2:], kernel, strides, pads, dilations)
    return spread if gate is None else plain.gated(spread, gate, slope)


def _shifted_sum(grad: torch.Tensor, size: Ints, kernel: Ints, pads: Ints, dilations: Ints) -> torch.Tensor:
    """The adjoint with strides of 1: at each position the gradients of the windows that it is in, over a window's positions."""
    rank, reach = len(kernel), [d * (k - 1) for k, d in zip(kernel, dilations, strict=True)]
    sides = [reach[i % rank] - pad for i, pad in enumerate(pads)]
    wide = F.pad(grad, plain.torch_pads(sides)) if any(sides) else grad
    total = None
    for place in itertools.product(*(range(0, e + 1, d) for e, d in zip(reach, dilations, strict=True))):
        part = wide
        for axis, (start, count) in enumerate(zip(place, size, strict=True), 2):
            part = part.narrow(axis, start, count)
        part = part if grad.dtype == torch.float64 else part.float()
        total = part if total is None else total + part
    assert total is not None
    return (total / math.prod(kernel)).to(grad.dtype)
