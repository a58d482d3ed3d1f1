# SPDX-License-Identifier: Apache-2.0
"""The small convolution of a call of pooled_conv, the one of box means, as the backward passes use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from convpool.torch import gradients, plain

Ints = Sequence[int]


class SmallConvolution(NamedTuple):
    """u: what the box means are of, gated by `gate`; pool: their windows.  boxes: whose box_mean and box_mean_adjoint to call."""

    u: torch.Tensor
    gate: torch.Tensor | None
    slope: float
    pool: Sequence[Ints]
    strides: Ints
    pads: Ints
    dilations: Ints
    groups: int

    @property
    def is_single(self) -> bool:
        """Whether the box means are u itself."""
        return self.gate is None and plain.is_single(*self.pool[:3])

    @property
    def _is_even(self) -> bool:
        rank = len(self.pads) // 2
        return list(self.pads[:rank]) == list(self.pads[rank:])

    @property
    def geometry(self) -> gradients.Geometry:
        """As PyTorch's convolution takes it."""
        rank = len(self.pads) // 2
        padding = list(self.pads[:rank]) if self._is_even else [0] * rank
        return (self.strides, padding, self.dilations, self.groups)

    def input(self, boxes: Any) -> torch.Tensor:
        """Its input, with the padding that PyTorch's convolution does not take."""
        z = self.u if self.is_single else boxes.box_mean(self.u, self.gate, self.slope, *self.pool)
        return plain.even_pads(z, self.pads)[0]

    def like_input(self) -> torch.Tensor:
        """A tensor as its input, of any values."""
        if self.is_single and self._is_even:
            return self.u
        sizes, rank = plain.pooled_size(self.u.shape[2:], *self.pool), len(self.pads) // 2
        if not self._is_even:
            sizes = [size + self.pads[i] + self.pads[rank + i] for i, size in enumerate(sizes)]
        made = {"dtype": self.u.dtype, "device": self.u.device}
        return torch.empty([*self.u.shape[:2], *sizes], memory_format=plain.memory_format(self.u), **made)

    def without_pads(self, d_z: torch.Tensor) -> torch.Tensor:
        """A gradient at `input`, at the box means."""
        if self._is_even:
            return d_z
        for axis, (size, begin) in enumerate(zip(plain.pooled_size(self.u.shape[2:], *self.pool), self.pads, strict=False), 2):
            d_z = d_z.narrow(axis, begin, size)
        return d_z

    def input_gradient(self, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The gradient at the box means."""
        return self.without_pads(gradients.input_gradient(grad, weight, self.like_input(), self.geometry))

    def through_boxes(self, boxes: Any, d_z: torch.Tensor) -> torch.Tensor:
        """A gradient at the box means, at u."""
        return d_z if self.is_single else boxes.box_mean_adjoint(d_z, self.gate, self.slope, self.u.shape[2:], *self.pool)
