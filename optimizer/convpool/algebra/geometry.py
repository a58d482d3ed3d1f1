# SPDX-License-Identifier: Apache-2.0
"""The algebra: how the attributes of a convolution and of the pooling behind it become those of a pooling first.

Per spatial axis, with convolution kernel k, stride s, pads (Pl, Pr), dilation d, and pooling kernel p, stride q,
dilation e, no pads, the extent of the convolution kernel being K = d(k-1) + 1:

    pool(conv(x))[i] = sum_a W[a] * mean_j x[(i q + e j) s + a d - Pl]
                     = sum_a W[a] * box[i (s q) + a d - Pl],    box[t] = mean_j x[t + (s e) j]

so the box mean has the dilation s*e and the convolution the stride s*q.  `box` is non-zero from -(s e)(p-1) on: that
much of the padding is the pooling's, the rest is the convolution's.  All positions and sizes agree for every input
size, since floor((floor(z / s) - e(p-1)) / q) = floor((z - s e(p-1)) / (s q)).

The fused form is one convolution whose kernel is W convolved with the box, on the grid of step gcd(d, s e).

Source: Suita et al., "Efficient cuDNN-compatible convolution-pooling on the GPU", JPDC 2020 (direct and fused forms
for dilation 1 and s = 1); Kasagi et al., MLSP 2017.

A zero Pad of t positions behind a convolution equals s*t more zeros in front of it exactly where the convolution gives
zero: it has no bias so far, and the added windows lie outside the input, Pl >= K - s at the begin and Pr >= K - 1 at
the end (K the extent of the kernel).  A negative Pad crops, and so does a smaller padding, while it stays >= 0.

A Refusal says why something cannot be done exactly; whoever knows the node adds its name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class Refusal:
    """The condition that does not hold, what was found, and what would have been right."""

    condition: str
    got: str
    expected: str


def refuse(condition: str, got: object, expected: object) -> Refusal:
    """A Refusal of values of any type."""
    return Refusal(condition, str(got), str(expected))


Ints = tuple[int, ...]


@dataclass(frozen=True)
class Windows:
    """Attributes of an operator over windows, complete: one entry per spatial axis; `pads` holds all begins, then all ends."""

    kernel_shape: Ints
    strides: Ints
    pads: Ints
    dilations: Ints

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.kernel_shape)

    @property
    def extents(self) -> Ints:
        """Input positions that the window spans, per axis."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel_shape, self.dilations, strict=True))

    @property
    def taps(self) -> int:
        """Elements of the window; of a kernel, per input channel."""
        return math.prod(self.kernel_shape)

    def output_size(self, size: Ints) -> Ints:
        """Spatial output sizes for the spatial input sizes `size`; may be below 1 where the window does not fit."""
        r, extents = self.rank, self.extents
        return tuple((size[i] + self.pads[i] + self.pads[r + i] - extents[i]) // self.strides[i] + 1 for i in range(r))

    def places(self, size: Ints) -> int:
        """Number of outputs of a channel for the spatial input sizes `size`."""
        return math.prod(max(n, 0) for n in self.output_size(size))


@dataclass(frozen=True)
class ConvSpec(Windows):
    """Attributes of a Conv."""

    group: int = 1

    @property
    def is_pointwise(self) -> bool:
        """True if every kernel dimension is 1."""
        return self.taps == 1


@dataclass(frozen=True)
class PoolSpec(Windows):
    """Attributes of an average pooling that counts its padding, without ceil_mode."""

    @property
    def is_idle(self) -> bool:
        """True if it returns its input: the window is one element at every position."""
        return self.taps == 1 and not any(self.pads) and all(stride == 1 for stride in self.strides)


def whole_map(size: Ints) -> PoolSpec:
    """The average over all of a map of this size."""
    return PoolSpec(size, (1,) * len(size), (0,) * (2 * len(size)), (1,) * len(size))


@lru_cache
def pool_first(conv: ConvSpec, pool: PoolSpec) -> tuple[PoolSpec, ConvSpec]:
    """The pooling and the convolution that, in this order, equal `pool` after `conv`.  `pool` must have no pads."""
    if any(pool.pads):
        raise AssertionError(f"pool_first: pooling pads are not exact; got {pool.pads}, expected zeros")
    reach = tuple(s * e * (p - 1) for s, e, p in zip(conv.strides, pool.dilations, pool.kernel_shape, strict=True))
    pool_pads = tuple(min(pad, limit) for pad, limit in zip(conv.pads, reach * 2, strict=True))
    pads = tuple(pad - taken for pad, taken in zip(conv.pads, pool_pads, strict=True))
    dilations = tuple(s * e if p > 1 else 1 for s, e, p in zip(conv.strides, pool.dilations, pool.kernel_shape, strict=True))
    strides = tuple(s * q for s, q in zip(conv.strides, pool.strides, strict=True))
    ones = (1,) * conv.rank
    # A pointwise convolution without pads only picks positions, so the pooling need not compute the others.
    pool_strides, conv_strides = (strides, ones) if conv.is_pointwise and not any(pads) else (ones, strides)
    return (
        PoolSpec(pool.kernel_shape, pool_strides, pool_pads, dilations),
        ConvSpec(conv.kernel_shape, conv_strides, pads, conv.dilations, conv.group),
    )


@lru_cache
def pool_last(pool: PoolSpec, conv: ConvSpec) -> tuple[ConvSpec, PoolSpec] | None:
    """The convolution and the pooling behind it that equal `conv` after `pool`, which counts its padding; None if there are none.

    With kernel p, stride q, pads (Pl, Pr), dilation e of the pooling, and C_l, C_r the pads of the convolution, which stand for
    zeros: these are averages of padding alone, and nothing is lost, if e(p-1) < q + Pl or C_l = 0, and e(p-1) <= Pr or C_r = 0.
    """
    r = conv.rank
    reach = [e * (p - 1) for e, p in zip(pool.dilations, pool.kernel_shape, strict=True)]
    for i in range(r):
        if conv.pads[i] and reach[i] >= pool.strides[i] + pool.pads[i] or conv.pads[r + i] and reach[i] > pool.pads[r + i]:
            return None
    pads = tuple(own + inner * q for own, inner, q in zip(pool.pads, conv.pads, pool.strides * 2, strict=True))
    dilations = tuple(d * q if k > 1 else 1 for d, q, k in zip(conv.dilations, pool.strides, conv.kernel_shape, strict=True))
    strides = tuple(s * q for s, q in zip(conv.strides, pool.strides, strict=True))
    ones = (1,) * r
    return (
        ConvSpec(conv.kernel_shape, ones, pads, dilations, conv.group),
        PoolSpec(pool.kernel_shape, strides, (0,) * (2 * r), pool.dilations),
    )


@lru_cache
def fused_spec(conv: ConvSpec, pool: PoolSpec) -> ConvSpec:
    """The one convolution that equals `pool` after `conv`; its kernel is `fuse_kernel` of theirs."""
    kernel, dilations = [], []
    for i in range(conv.rank):
        k, p = conv.kernel_shape[i], pool.kernel_shape[i]
        reach = conv.dilations[i] * (k - 1) + conv.strides[i] * pool.dilations[i] * (p - 1)
        # The step of the finest grid that both kernels' taps lie on.
        step = math.gcd(conv.dilations[i] if k > 1 else 0, conv.strides[i] * pool.dilations[i] if p > 1 else 0) or 1
        kernel.append(reach // step + 1)
        dilations.append(step)
    strides = tuple(s * q for s, q in zip(conv.strides, pool.strides, strict=True))
    return ConvSpec(tuple(kernel), strides, conv.pads, tuple(dilations), conv.group)


def fuse_kernel(weight: np.ndarray, conv: ConvSpec, pool: PoolSpec) -> np.ndarray:
    """Convolve `weight` [M, C/group, kernel...] with the box of `pool`; float64 [M, C/group, fused kernel...]."""
    fused = fused_spec(conv, pool)
    out = weight.astype(np.float64) / pool.taps
    for i in range(conv.rank):  # the box is one of each axis
        # A kernel of one tap has no dilation, and its own may be below the grid's step.
        tap = max(conv.dilations[i] // fused.dilations[i], 1)
        box = conv.strides[i] * pool.dilations[i] // fused.dilations[i]
        summed = np.zeros((*out.shape[: 2 + i], fused.kernel_shape[i], *out.shape[3 + i :]))
        rows = np.moveaxis(summed, 2 + i, 0)
        for j in range(pool.kernel_shape[i]):
            rows[box * j : box * j + tap * (conv.kernel_shape[i] - 1) + 1 : tap] += np.moveaxis(out, 2 + i, 0)
        out = summed
    return out


def same_pads(auto_pad: str, kernel: Ints, strides: Ints, dilations: Ints, size: Ints | None) -> Ints:
    """The pads, begins then ends, of "SAME_UPPER" or "SAME_LOWER"; size: needed where a stride is above 1."""
    begins, ends = [], []
    for i, (k, s, d) in enumerate(zip(kernel, strides, dilations, strict=True)):
        total = d * (k - 1)
        if s > 1 and size is not None:
            total = max((-(-size[i] // s) - 1) * s + d * (k - 1) + 1 - size[i], 0)
        small = total // 2
        begins.append(small if auto_pad == "SAME_UPPER" else total - small)
        ends.append(total - begins[-1])
    return (*begins, *ends)


def pad_behind(conv: ConvSpec, pads: Ints, has_shift: bool) -> ConvSpec | Refusal:
    """The convolution that also does a zero Pad of `pads` behind it.  has_shift: whether anything is added to its sums."""
    r = conv.rank
    for i in range(r):
        begin, end = pads[i], pads[r + i]
        if (begin > 0 or end > 0) and has_shift:
            return refuse("Pad behind a bias", list(pads), "no positive pads")
        for added, own, least in (
            (begin, conv.pads[i], conv.extents[i] - conv.strides[i]),
            (end, conv.pads[r + i], conv.extents[i] - 1),
        ):
            if added > 0 and own < least:
                condition = f"zeros where the convolution gives others, axis {i}"
                return refuse(condition, own, f"convolution pads >= {least}")
    total = tuple(p + s * t for p, s, t in zip(conv.pads, conv.strides * 2, pads, strict=True))
    if min(total) < 0:
        return refuse("crop beyond the convolution's padding", list(pads), "pads that stay >= 0")
    return replace(conv, pads=total)


def transposed(pads: Ints, orders: Sequence[Ints], rank: int) -> Ints | None:
    """Spatial pads behind Transposes of these orders, nearest first, () the reverse one; None if other axes are padded."""
    axes: Sequence[int] = range(rank + 2)
    for order in orders:
        axes = [(order or range(rank + 1, -1, -1))[axis] for axis in axes]
    begins, ends = ([pads[axis + half] for axis in axes] for half in (0, rank + 2))
    return None if any((*begins[:2], *ends[:2])) else (*begins[2:], *ends[2:])


COUNTED = "ones that onnxruntime before 1.25 counts right"


def miscounts(pads: Ints) -> bool:
    """Return True if onnxruntime before 1.25 may divide by a wrong count where an AveragePool counts these zeros, from opset 19
    on: on two or three axes it takes other pads than those at the end."""
    rank = len(pads) // 2
    return any(pads[rank + i] > pads[2 * i + 1] for i in range(rank))


def fills_window(pads: Ints, pool: PoolSpec) -> bool:
    """Return True if zeros in front, merged into the pads, fill a window: onnxruntime refuses."""
    return any(more + own >= k for more, own, k in zip(pads, pool.pads, pool.kernel_shape * 2, strict=True))
