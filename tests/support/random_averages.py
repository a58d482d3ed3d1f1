# SPDX-License-Identifier: Apache-2.0
"""Averages of random models that no pooling operator writes; `m.exact` ends where a size does not admit one."""

from itertools import product

import numpy as np
from onnx import helper

from tests.support.random_models import TYPES, Maker, volume

WHOLE = ("reduce", "unsqueezed", "axes", "flattened", "sum")
"""Means over the feature map."""
HALVES = ("slices", "steps", "resize")
"""Means over 2 elements of each axis."""
FROM_OPSET = {"slices": 10, "steps": 10, "resize": 11}


def make_reduction(m: Maker, name: str, op_type: str, axes: list[int], keep: bool) -> str:
    """A reduction over these axes, in the form that its opset has; some are counted from the end."""
    given = {} if keep and m.chance(0.5) else {"keepdims": int(keep)}
    if m.opset >= (18 if op_type == "ReduceMean" else 13):
        return m.node(op_type, [name, m.constant(np.array(axes, np.int64))], **given)
    return m.node(op_type, [name], axes=axes, **given)


def make_whole(m: Maker, name: str, kind: str, channels: int) -> str:
    """A mean over the feature map in one of its ways, or its sum; `m.keeps_rank` says whether the spatial axes remain."""
    r, spatial = m.rank, list(range(2, m.rank + 2))
    m.keeps_rank = m.chance(0.5)
    if kind == "unsqueezed":
        name = _changed(m, "Unsqueeze", name, [2])
        name = make_reduction(m, name, "ReduceMean", [*spatial, r + 2], m.keeps_rank)
        return _changed(m, "Squeeze", name, [2]) if m.keeps_rank else name
    if kind == "flattened":
        shape = [0, int(m.pick([0, channels])), -1]
        rows = make_shape(m, shape)
        keep = r == 1 and m.keeps_rank
        m.keeps_rank = keep
        return make_reduction(m, m.node("Reshape", [name, rows]), "ReduceMean", [int(m.pick([2, -1]))], keep)
    if kind == "axes":
        for axis in reversed(spatial):
            name = make_reduction(m, name, "ReduceMean", [axis], m.keeps_rank)
        return name
    axes = [axis - (r + 2 if m.chance(0.5) else 0) for axis in spatial]
    m.rng.shuffle(axes)
    return make_reduction(m, name, "ReduceSum" if kind == "sum" else "ReduceMean", axes, m.keeps_rank)


def _changed(m: Maker, op_type: str, name: str, axes: list[int]) -> str:
    """Unsqueeze or Squeeze, in the form that its opset has."""
    if m.opset < 13:
        return m.node(op_type, [name], axes=axes)
    return m.node(op_type, [name, m.constant(np.array(axes, np.int64), "initializer")])


def make_shape(m: Maker, shape: list[int]) -> str:
    """The shape for a Reshape.

    Not behind an Identity, which shape inference does not see through, nor before opset 9 by a Constant, which has no integers.
    """
    return m.constant(np.array(shape, np.int64), str(m.pick(["initializer", "constant"])) if m.opset >= 9 else "initializer")


def make_view(m: Maker, name: str, channels: int, sizes: list[int], window: list[int]) -> str:
    """Each spatial axis as windows side by side, and the mean over their elements.  Sizes are multiples of the window."""
    shape = [int(m.pick([-1, 0])), channels, *(n for size, p in zip(sizes, window, strict=True) for n in (size // p, p))]
    rows = make_shape(m, shape)
    axes = [3 + 2 * axis - (2 * m.rank + 2 if m.chance(0.3) else 0) for axis in range(m.rank)]
    m.rng.shuffle(axes)
    return make_reduction(m, m.node("Reshape", [name, rows]), "ReduceMean", axes, False)


def make_box(m: Maker, name: str, channels: int, sizes: list[int], window: list[int], strides: list[int]) -> str:
    """A depthwise convolution with equal weights, of one over their number or of another; padded ones are inexact."""
    number = 1 / volume(window) if m.chance(0.7) else float(m.data(1)[0])
    weight = m.constant(np.full((channels, 1, *window), number, m.data(1).dtype))
    given = {"strides": strides, "group": channels}
    m.exact &= all(n >= p for n, p in zip(sizes, window, strict=True)) and volume(window) > 1
    if m.chance(0.2):
        given["pads"] = [int(m.rng.integers(0, p)) for p in window * 2]
        m.exact &= not any(given["pads"])
    m.factor = number * volume(window)
    return m.node("Conv", [name, weight], **given)


def make_resize(m: Maker, name: str) -> str:
    """A linear Resize to half of each size."""
    roi = m.constant(np.zeros(0, np.float32), "initializer")
    scales = m.constant(np.array([1, 1, *[0.5] * m.rank], np.float32), "initializer")
    how = str(m.pick(["half_pixel", "pytorch_half_pixel"]))
    return m.node("Resize", [name, roi, scales], mode="linear", coordinate_transformation_mode=how)


def make_slices(m: Maker, name: str, sizes: list[int], kind: str) -> str:
    """The mean of strided Slices: one Slice per corner, chained by axis, or in "steps" with a mean after each axis."""
    if kind == "steps":
        for axis in range(m.rank):
            name = _mean(m, _corners(m, name, sizes, [axis], False))
            sizes = [n // 2 if i == axis else n for i, n in enumerate(sizes)]
        return name
    return _mean(m, _corners(m, name, sizes, list(range(m.rank)), m.chance(0.5)))


def _corners(m: Maker, name: str, sizes: list[int], axes: list[int], chained: bool) -> list[str]:
    """The Slices of every second element of each of these spatial axes."""
    last = int(m.pick([2**31 - 1, 2**63 - 1, 2**40]))
    ends = [n if n % 2 == 0 else n - 1 for n in sizes]  # equal corners also of odd sizes

    def cut(source: str, of: list[int], starts: tuple[int, ...]) -> str:
        stops = [last if sizes[a] % 2 == 0 and m.chance(0.7) else ends[a] for a in of]
        shown = [a - m.rank if m.chance(0.3) else a + 2 for a in of]
        rows = (starts, stops, shown, [2] * len(of))
        return m.node("Slice", [source, *(m.constant(np.array(row, np.int64)) for row in rows)])

    corners = [name]
    if chained:
        for axis in axes:
            corners = [cut(corner, [axis], (start,)) for corner in corners for start in (0, 1)]
    else:
        corners = [cut(name, axes, starts) for starts in product((0, 1), repeat=len(axes))]
    m.rng.shuffle(corners)
    return corners


def _mean(m: Maker, corners: list[str]) -> str:
    """The mean of tensors, by Mean, or by a sum and a factor."""
    total, scalar = corners[0], m.pick([(), (1,)])
    if m.chance(0.2):
        return m.node("Mean", corners)
    if m.chance(0.3):
        total = m.node("Sum", corners)
    else:
        for corner in corners[1:]:
            total = m.node("Add", [total, corner])
    count = len(corners)
    dtype = helper.tensor_dtype_to_np_dtype(TYPES[m.dtype])
    if m.chance(0.5):
        return m.node("Div", [total, m.constant(np.full(scalar, count, dtype))])
    factor = m.constant(np.full(scalar, 1 / count, dtype))
    return m.node("Mul", [total, factor] if m.chance(0.5) else [factor, total])
