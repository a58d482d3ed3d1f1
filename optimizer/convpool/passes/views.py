# SPDX-License-Identifier: Apache-2.0
"""Tensors that nodes rearrange without computing anything: which positions of x stand where.

Each axis of a tensor on the way is a list of parts of x's axes.  A part of an axis is `size` positions that are `step` apart, so
that Reshape splits and joins parts, and Transpose moves them.

    x [N, C, H, W] - Reshape [N, 2, C/2, H, W] - Transpose 0, 2, 1, 3, 4 - Reshape [N, C, H, W]      a shuffle of channels
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from convpool.algebra.geometry import Ints
from convpool.ir.index import Scope
from convpool.ir.protos import attributes, is_op
from convpool.passes.base import BETWEEN, Reject, reject
from convpool.passes.sizes import spatial_size

VIEWS = ("Flatten", "Reshape", "SpaceToDepth", "Squeeze", "Transpose", "Unsqueeze")
"""Operators that rearrange, and compute nothing."""
MAX_CHAIN = 16
"""Most nodes of a chain that is looked at."""


class Part(NamedTuple):
    """`size` positions (None: unknown) of axis `axis` of x, `step` apart."""

    axis: int
    size: int | None
    step: int = 1


Parts = tuple[Part, ...]


@dataclass(frozen=True)
class View:
    """A tensor computed from x: the parts of x in each of its axes, and the parts that were averaged.

    factor: what the average is multiplied by; None where that is not known.
    """

    axes: tuple[Parts, ...]
    averaged: Parts = ()
    factor: float | None = 1.0


def whole(scope: Scope, x: str, rank: int, size: Ints | None) -> View:
    """x itself."""
    shape = scope.info(x).shape
    known = (None, None) if shape is None or len(shape) < 2 else tuple(n if isinstance(n, int) else None for n in shape[:2])
    sizes = (*known, *(size or (None,) * rank))
    return View(tuple((Part(axis, n),) if n != 1 or axis == 0 else () for axis, n in enumerate(sizes)))


def viewed(scope: Scope, index: int, view: View) -> View | Reject:
    """What node `index`, one of VIEWS, makes of a view.  Raises AttributeReference."""
    node, count = scope.nodes[index], len(view.axes)
    values = attributes(node)
    if is_op(node, "Reshape"):
        return _reshaped(scope, index, view)
    if is_op(node, "Transpose"):
        order = values.get("perm") or range(count - 1, -1, -1)
        if sorted(order) != list(range(count)):
            return reject(scope, index, "perm", list(order), f"the axes from 0 to {count - 1}")
        return replace(view, axes=tuple(view.axes[axis] for axis in order))
    if is_op(node, "Flatten"):
        axis = values.get("axis", 1)
        axis += count if axis < 0 else 0
        return replace(view, axes=tuple(sum(half, ()) for half in (view.axes[:axis], view.axes[axis:])))
    if is_op(node, "SpaceToDepth"):
        return _space_to_depth(scope, index, view, values["blocksize"])
    axes = axes_of(scope, index, values)
    if isinstance(axes, Reject):
        return axes
    count += len(axes) if is_op(node, "Unsqueeze") else 0
    if not axes or any(not -count <= axis < count for axis in axes):
        return reject(scope, index, f"axes of {node.op_type}", list(axes) or "none", f"some of {count}")
    chosen = {axis % count for axis in axes}
    if is_op(node, "Unsqueeze"):
        rest = iter(view.axes)
        return replace(view, axes=tuple(() if axis in chosen else next(rest) for axis in range(count)))
    if any(view.axes[axis] for axis in chosen):
        return reject(scope, index, "axes of Squeeze", list(axes), "channels or space, of size 1")
    return replace(view, axes=tuple(parts for axis, parts in enumerate(view.axes) if axis not in chosen))


def axes_of(scope: Scope, index: int, values: dict[str, Any]) -> Ints | Reject:
    """The axes that a node is told, by an attribute or an input; empty where it is told none.  values: its attributes."""
    node = scope.nodes[index]
    axes = values.get("axes")
    if axes is None and len(node.input) > 1 and node.input[1]:
        axes = scope.constant_ints(node.input[1])
        if axes is None:
            return reject(scope, index, "axes", "a computed tensor", "a constant")
    return tuple(axes or ())


def channel_order(scope: Scope, chain: list[int], rank: int) -> Ints | Reject:
    """The channels of the tensor in front of a chain of views that stand in what it gives; empty for all, as they were.

    A Reject where it changes more than the order of channels.  Raises AttributeReference.
    """
    x, last = scope.nodes[chain[0]].input[0], chain[-1]
    if len(scope.info(x).shape or range(rank + 2)) != rank + 2:
        return reject(scope, chain[0], "axes of its input", len(scope.info(x).shape or ()), rank + 2)
    view = before = whole(scope, x, rank, spatial_size(scope, x, rank))
    for index in chain:
        step = viewed(scope, index, view)
        if not isinstance(step, View):
            return step
        view = step
    axes = tuple(tuple(joined(list(parts))) for parts in view.axes)
    if axes == before.axes:
        return ()
    if (*axes[:1], *axes[2:]) == (*before.axes[:1], *before.axes[2:]):
        order = np.zeros(1, np.int64)
        for part in axes[1]:
            order = np.add.outer(order, part.step * np.arange(part.size or 1)).reshape(-1)
        return tuple(order.tolist())
    return reject(scope, last, BETWEEN, scope.nodes[last].op_type, "views that cancel, or shuffle channels")


def _reshaped(scope: Scope, index: int, view: View) -> View | Reject:
    """The parts in the shape that a Reshape gives, by shape inference; the batch stays as it is.

    Leading axes that are kept, and all others made one, need no sizes.
    """
    target = scope.constant_ints(scope.nodes[index].input[1]) if len(scope.nodes[index].input) > 1 else None
    kept = len(target or ()) - 1
    if target == (0,) * kept + (-1,) and kept < len(view.axes):
        return replace(view, axes=(*view.axes[:kept], sum(view.axes[kept:], ())))
    shape = scope.info(scope.nodes[index].output[0]).shape
    parts = [part for axis in view.axes[1:] for part in axis]
    if shape is None or not all(isinstance(n, int) for n in shape[1:]) or any(part.size is None for part in parts):
        return reject(scope, index, "sizes of a Reshape", "unknown", "static sizes")
    sizes = [n for n in shape[1:] if isinstance(n, int)]
    axes = _regrouped(parts, sizes)
    if axes is None or [part.axis for part in view.axes[0]] != [0]:
        return reject(scope, index, "shape of a Reshape", list(shape), "axes split in two, or joined")
    return replace(view, axes=(view.axes[0], *axes))


def _regrouped(parts: list[Part], sizes: list[int]) -> list[Parts] | None:
    """The same positions in axes of these sizes; None where a part would be cut across."""
    left, axes = parts[::-1], []
    for size in sizes:
        axis: list[Part] = []
        while size > 1:
            part = left.pop() if left else None
            if part is None or part.size is None:
                return None
            if size % part.size == 0:
                axis.append(part)
                size //= part.size
            elif part.size % size == 0:
                inner = part.size // size
                axis.append(Part(part.axis, size, part.step * inner))
                left.append(Part(part.axis, inner, part.step))
                size = 1
            else:
                return None
        axes.append(tuple(axis))
    return None if left or 0 in sizes else axes


def _space_to_depth(scope: Scope, index: int, view: View, block: int) -> View | Reject:
    """Blocks of positions to the front of the channels, row by row."""
    batch, channels, *spatial = view.axes
    split = [_regrouped(list(parts), [math.prod(p.size or 0 for p in parts) // block, block]) for parts in spatial]
    outer = [axes[0] for axes in split if axes is not None]
    if len(outer) < len(spatial):
        return reject(scope, index, "sizes of a SpaceToDepth", "unknown, or not its blocks'", "multiples of the block size")
    inner = [part for axes in split if axes is not None for part in axes[1]]
    return replace(view, axes=(batch, (*inner, *channels), *outer))


def joined(parts: list[Part]) -> list[Part]:
    """Parts, outer ones first, with those that continue one another made one."""
    found: list[Part] = []
    for part in parts:
        if found and part.size is not None and found[-1].step == part.step * part.size and found[-1].size is not None:
            found[-1] = Part(part.axis, found[-1].size * part.size, part.step)
        else:
            found.append(part)
    return found
