# SPDX-License-Identifier: Apache-2.0
"""Recognising an average that is written as ReduceMean or ReduceSum, with nodes around it that only rearrange.

    x [N, C, H, W] - Reshape [N, C, H/2, 2, W/2, 2] - ReduceMean over axes 3 and 5      AveragePool(kernel 2, stride 2)
    x [N, C, L] - Unsqueeze [N, C, 1, L] - ReduceMean over axes 2 and 3 - Squeeze       GlobalAveragePool
    x [N, C, H, W] - ReduceMean over axis 3 - ReduceMean over axis 2                    GlobalAveragePool

Each axis of a tensor on the way is a list of parts of x's axes.  A part of an axis is `size` positions that are `step` apart, so
that Reshape splits and joins parts, Transpose moves them, and a reduction takes them away.  The rest is an average over windows
when (1) axes are constants, and sizes known where they are split, joined or summed; (2) per spatial axis all of it is reduced, or
none, or the inner of two parts; (3) what remains are N, C and the spatial axes in order, less some of size 1; and (4) nothing
else reads a tensor in between.  A ReduceSum is the mean times the number of elements, which a Mul behind it restores.

A chain of them is taken as far as it is such an average: a mean over channels behind it is none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from convpool.algebra.geometry import Ints, PoolSpec
from convpool.ir.index import Scope
from convpool.ir.protos import attributes, is_op
from convpool.passes.base import Reject, reject
from convpool.passes.tree import Pooling

VIEWS = ("Flatten", "Reshape", "SpaceToDepth", "Squeeze", "Transpose", "Unsqueeze")
"""Operators that rearrange, and compute nothing."""
REDUCTIONS = ("ReduceMean", "ReduceSum")
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


def may_be_reduction(scope: Scope, index: int) -> str | None:
    """The tensor x of a chain that node `index` ends; None if it ends none."""
    node = scope.nodes[index]
    if is_op(node, "Squeeze"):
        ends = _undoes(scope, index)
    else:
        ends = is_op(node, *REDUCTIONS) and not _goes_on(scope, node.output[0])
    return scope.nodes[_chain(scope, index)[0]].input[0] if ends else None


def recognise_reduction(scope: Scope, index: int, rank: int, size: Ints | None) -> Pooling | Reject | None:
    """The average that a chain up to node `index` begins with, a Reject where it is none over windows, None where it is no
    average of positions at all."""
    chain = _chain(scope, index)
    x = scope.nodes[chain[0]].input[0]
    view = _whole(scope, x, rank, size)
    found: Pooling | Reject | None = None
    for number, node in enumerate(chain):
        step = _step(scope, node, view)
        if not isinstance(step, View):
            return found if isinstance(found, Pooling) else step
        view = step
        if view.averaged and (node == index or is_op(scope.nodes[node], *REDUCTIONS)):
            pooling = _pooling(scope, chain[: number + 1], view, rank, size)
            found = pooling if isinstance(pooling, Pooling) or found is None else found
    return found


def _chain(scope: Scope, index: int) -> list[int]:
    """Node `index`, and those in front of it that rearrange or reduce: the first one reads x."""
    chain = [index]
    while len(chain) < MAX_CHAIN and (producer := scope.producer.get(scope.nodes[chain[-1]].input[0])) is not None:
        node = scope.nodes[producer]
        if not is_op(node, *VIEWS) and not (is_op(node, *REDUCTIONS) and scope.sole_reader(node.output[0]) is None):
            break
        chain.append(producer)
    return chain[::-1]


def _goes_on(scope: Scope, name: str) -> bool:
    """Whether the only reader reduces the tensor again, perhaps rearranged, or squeezes what was unsqueezed."""
    for _ in range(MAX_CHAIN):
        if scope.sole_reader(name) is not None:
            return False
        reader = scope.readers[name][0]
        node = scope.nodes[reader]
        if is_op(node, *REDUCTIONS) or is_op(node, "Squeeze") and _undoes(scope, reader):
            return True
        if not is_op(node, *VIEWS):
            return False
        name = node.output[0]
    return False


def _undoes(scope: Scope, index: int) -> bool:
    """Whether a Squeeze stands next to a reduction behind an Unsqueeze, and ends the chain."""
    producer = scope.producer.get(scope.nodes[index].input[0])
    if producer is None or not is_op(scope.nodes[producer], *REDUCTIONS) or _goes_on(scope, scope.nodes[index].output[0]):
        return False
    return any(is_op(scope.nodes[node], "Unsqueeze") for node in _chain(scope, index))


def _whole(scope: Scope, x: str, rank: int, size: Ints | None) -> View:
    """x itself."""
    shape = scope.info(x).shape
    known = (None, None) if shape is None or len(shape) < 2 else tuple(n if isinstance(n, int) else None for n in shape[:2])
    sizes = (*known, *(size or (None,) * rank))
    return View(tuple((Part(axis, n),) if n != 1 or axis == 0 else () for axis, n in enumerate(sizes)))


def _step(scope: Scope, index: int, view: View) -> View | Reject | None:
    """What node `index` makes of a view.  None: nothing that averages positions.  Raises AttributeReference."""
    node = scope.nodes[index]
    values = attributes(node)
    count = len(view.axes)
    if is_op(node, "Reshape"):
        return _reshaped(scope, index, view)
    if is_op(node, "Transpose"):
        order = values.get("perm") or range(count - 1, -1, -1)
        return replace(view, axes=tuple(view.axes[axis] for axis in order)) if len(order) == count else None
    if is_op(node, "Flatten"):
        axis = values.get("axis", 1)
        axis += count if axis < 0 else 0
        return replace(view, axes=tuple(sum(half, ()) for half in (view.axes[:axis], view.axes[axis:])))
    if is_op(node, "SpaceToDepth"):
        return _space_to_depth(scope, index, view, values["blocksize"])
    axes = values.get("axes")
    if axes is None and len(node.input) > 1 and node.input[1]:
        axes = scope.constant_ints(node.input[1])
        if axes is None:
            return reject(scope, index, "axes", "a computed tensor", "a constant")
    if not axes:
        return None  # all axes, or none
    count += len(axes) if node.op_type == "Unsqueeze" else 0
    if any(not -count <= axis < count for axis in axes):
        return None
    chosen = {axis % count for axis in axes}
    if is_op(node, "Unsqueeze"):
        rest = iter(view.axes)
        return replace(view, axes=tuple(() if axis in chosen else next(rest) for axis in range(count)))
    if is_op(node, "Squeeze"):
        if any(view.axes[axis] for axis in chosen):
            return None
        return replace(view, axes=tuple(parts for axis, parts in enumerate(view.axes) if axis not in chosen))
    return _reduced(view, chosen, keep=bool(values.get("keepdims", 1)), is_sum=node.op_type == "ReduceSum")


def _reduced(view: View, chosen: set[int], *, keep: bool, is_sum: bool) -> View | None:
    gone = tuple(part for axis in sorted(chosen) for part in view.axes[axis])
    if any(part.axis < 2 for part in gone):
        return None
    axes = tuple(() if axis in chosen else parts for axis, parts in enumerate(view.axes) if keep or axis not in chosen)
    factor = view.factor
    if is_sum and factor is not None:
        sizes = [part.size for part in gone]
        factor = None if None in sizes else factor * math.prod(n for n in sizes if n is not None)
    return View(axes, (*view.averaged, *gone), factor)


def _reshaped(scope: Scope, index: int, view: View) -> View | Reject:
    """The parts in the shape that a Reshape gives, by shape inference; the batch stays as it is."""
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


def _pooling(scope: Scope, chain: list[int], view: View, rank: int, size: Ints | None) -> Pooling | Reject:
    """The view as an average over windows: conditions (2) to (4)."""
    root, inside = chain[-1], set(chain)
    windows = []
    for axis in range(2, rank + 2):
        window = _window(view, axis)
        if window is None:
            return reject(scope, root, f"positions averaged on spatial axis {axis - 2}", "others", "whole windows side by side")
        windows.append(window)
    squeezed = _squeezed(view, rank)
    if squeezed is None:
        return reject(scope, root, "axes of the average", "others", "batch, channels and space, in order")
    for node in chain[:-1]:
        name = scope.nodes[node].output[0]
        if name in scope.outputs or name in scope.captured or not set(scope.readers.get(name, ())) <= inside:
            return reject(scope, node, "readers", "a reader outside the average", "none")
    if view.factor is None:
        return reject(scope, root, "elements of a ReduceSum", "an unknown number", "static sizes")
    kernel = tuple(n for n, _ in windows)
    spec = None
    if any(not whole for _, whole in windows):
        if None in kernel:
            return reject(scope, root, "size averaged", "unknown", "static sizes")
        strides = tuple(1 if whole else n or 1 for n, whole in windows)
        spec = PoolSpec(tuple(n or 1 for n in kernel), strides, (0,) * (2 * rank), (1,) * rank)
    kind = "mean" if spec else "global"
    x, y = scope.nodes[chain[0]].input[0], scope.nodes[root].output[0]
    return Pooling(root, tuple(chain), x, y, kind, spec, squeezed, view.factor)


def _window(view: View, axis: int) -> tuple[int | None, bool] | None:
    """The window on an axis and whether it is all of it; None where the positions averaged are no windows side by side."""
    kept = _joined([part for parts in view.axes for part in parts if part.axis == axis])
    averaged = _joined(sorted((part for part in view.averaged if part.axis == axis), key=lambda part: -part.step))
    if not kept:
        return (averaged[0].size if averaged else 1), True
    if not averaged and len(kept) == 1:
        return 1, False
    inner = len(averaged) == 1 and averaged[0].step == 1 and len(kept) == 1 and kept[0].step == averaged[0].size
    return (averaged[0].size, False) if inner else None


def _joined(parts: list[Part]) -> list[Part]:
    """Parts, outer ones first, with those that continue one another made one."""
    found: list[Part] = []
    for part in parts:
        if found and part.size is not None and found[-1].step == part.step * part.size and found[-1].size is not None:
            found[-1] = Part(part.axis, found[-1].size * part.size, part.step)
        else:
            found.append(part)
    return found


def _squeezed(view: View, rank: int) -> Ints | None:
    """The spatial axes that are missing, all of size 1; None if the others are not N, C and the rest of the space, in order."""
    rest = [[part.axis for part in _joined(list(parts))] for parts in view.axes]
    remaining = {axis for axes in rest for axis in axes}
    missing = []
    for axis in range(rank + 2):
        if rest and rest[0] == ([axis] if axis in remaining else []):
            rest.pop(0)
        elif axis < 2 or axis in remaining:
            return None
        else:
            missing.append(axis)
    return None if rest else tuple(missing)
