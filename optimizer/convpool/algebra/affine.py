# SPDX-License-Identifier: Apache-2.0
"""Maps per channel, y = scale * x + shift, and how they fold into the weights and the bias of a convolution.

Behind a convolution: scale * (W x + b) + shift = (scale W) x + (scale b + shift), scale and shift per output channel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from convpool.algebra.geometry import Refusal

BFLOAT16_MAX, BFLOAT16_EPSILON = (2 - 2.0**-7) * 2.0**127, 2.0**-7
"""What numpy's finfo would say of bfloat16: 8 significant bits, float32's exponents."""


@dataclass(frozen=True)
class Affine:
    """y = scale * x + shift per channel; float64, shape () or [channels]."""

    scale: np.ndarray
    shift: np.ndarray

    def after(self, first: Affine) -> Affine:
        """The map that does `first`, then this one."""
        return Affine(self.scale * first.scale, self.scale * first.shift + self.shift)

    @property
    def is_finite(self) -> bool:
        """Whether it has neither infinities nor NaN."""
        return bool(np.isfinite(self.scale).all() and np.isfinite(self.shift).all())

    def fits(self, channels: int) -> bool:
        """Whether scale and shift have one number for all channels, or one for each."""
        return all(values.size in (1, channels) for values in (self.scale, self.shift))


IDENTITY = Affine(np.array(1.0), np.array(0.0))


def fold(weight: np.ndarray, bias: np.ndarray | None, affine: Affine) -> tuple[np.ndarray, np.ndarray | None]:
    """Weights and bias of the convolution that does `affine` behind itself; float64.

    weight: [M, ...]; bias: [M] or None.  The bias returned is None where it would be all zeros and there was none.
    """
    m = weight.shape[0]
    scale = np.broadcast_to(affine.scale, (m,))
    old = np.zeros(m) if bias is None else bias.astype(np.float64)
    new = scale * old + affine.shift
    return weight.astype(np.float64) * scale.reshape(-1, *[1] * (weight.ndim - 1)), new if new.any() or bias is not None else None


def limits(dtype: np.dtype) -> tuple[float, float]:
    """The largest finite number of a floating-point type, and the distance from 1 to the next number above it."""
    if dtype.name == "bfloat16":
        return BFLOAT16_MAX, BFLOAT16_EPSILON
    info = np.finfo(dtype)
    return float(info.max), float(info.eps)


def holds(values: np.ndarray, dtype: np.dtype) -> bool:
    """Whether the type has finite numbers for all values."""
    return bool((np.abs(values) <= limits(dtype)[0]).all())


def keeps(factors: np.ndarray, dtype: np.dtype) -> bool:
    """Whether the type has these numbers, which others are multiplied by, finite and to its precision.

    factors: [rows, ...].  A number too small for the type may lose digits, or all, only beside a larger one in its row:
    what both are multiplied by is then added up.  A summand may always: the sum is no more precise than the type.
    """
    if not holds(factors, dtype):
        return False
    rows = factors.reshape(len(factors), -1)
    lost = np.abs(rows.astype(dtype).astype(np.float64) - rows)
    return bool((lost <= limits(dtype)[1] * np.abs(rows).max(axis=1, keepdims=True, initial=0)).all())


def outside(condition: str) -> Refusal:
    """The Refusal of numbers for which `keeps` or `holds` says no."""
    return Refusal(condition, "numbers too large or small", "ones that the type has")
