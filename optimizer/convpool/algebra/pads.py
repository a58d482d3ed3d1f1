# SPDX-License-Identifier: Apache-2.0
"""Zero padding: what `auto_pad` stands for, a Pad behind a convolution, Pads that a runtime moves and merges.

A zero Pad of t positions behind a convolution equals s*t more zeros in front of it exactly where the convolution gives
zero: it has no bias so far, and the added windows lie outside the input, Pl >= K - s at the begin and Pr >= K - 1 at
the end (K the extent of the kernel).  A negative Pad crops, and so does a smaller padding, while it stays >= 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from convpool.algebra.geometry import ConvSpec, Ints, PoolSpec
from convpool.algebra.refusal import Refusal, refuse


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
    """Pads of all axes behind Transposes of these orders, nearest first, on spatial axes; None if others are padded.

    pads: begins then ends, of `rank` + 2 axes each.  An empty order is the reverse one.
    """
    axes: Sequence[int] = range(rank + 2)
    for order in orders:
        axes = [(order or range(rank + 1, -1, -1))[axis] for axis in axes]
    begins, ends = ([pads[axis + half] for axis in axes] for half in (0, rank + 2))
    return None if any((*begins[:2], *ends[:2])) else (*begins[2:], *ends[2:])


def fills_window(pads: Ints, pool: PoolSpec) -> bool:
    """Whether zeros in front, merged into the pooling's own, would reach its kernel's size, which onnxruntime refuses."""
    return any(more + own >= k for more, own, k in zip(pads, pool.pads, pool.kernel_shape * 2, strict=True))
