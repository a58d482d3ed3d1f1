# SPDX-License-Identifier: Apache-2.0
"""Recognising an average that is written as ReduceMean or ReduceSum, with nodes around it that only rearrange.

    x [N, C, H, W] - Reshape [N, C, H/2, 2, W/2, 2] - ReduceMean over axes 3 and 5      AveragePool(kernel 2, stride 2)
    x [N, C, L] - Unsqueeze [N, C, 1, L] - ReduceMean over axes 2 and 3 - Squeeze       GlobalAveragePool
    x [N, C, H, W] - ReduceMean over axis 3 - ReduceMean over axis 2                    GlobalAveragePool

A reduction takes parts of x's axes away (`views`).  The rest is an average over windows when (1) axes are constants, and sizes
known where they are split, joined or summed; (2) channels are reduced only where there is one, and the batch only with all other
axes; (3) per spatial axis all of it is reduced, or none, or the inner of two parts; (4) what remains are N, C and the spatial
axes in order, less some of size 1; and (5) nothing else reads a tensor in between.  A ReduceSum is the mean times the number of
elements, which a Mul behind it restores.

A chain of them is taken as far as it is such an average: a mean over channels behind it is none.  Where nodes in front of it
act along channels (`linear`), it begins behind them.
"""

from __future__ import annotations

import math

from convpool.algebra.geometry import Ints, PoolSpec
from convpool.ir.index import Scope
from convpool.ir.protos import attributes, is_op
from convpool.passes.base import Reject, reject
from convpool.passes.linear import Step, known_step, op_of
from convpool.passes.sizes import spatial_size
from convpool.passes.tree import Pooling
from convpool.passes.upstream import NONLINEAR
from convpool.passes.views import MAX_CHAIN, VIEWS, View, axes_of, joined, viewed, whole

REDUCTIONS = ("ReduceMean", "ReduceSum")


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
    found = _average(scope, chain, rank, size)
    for start in range(1, len(chain)):
        if isinstance(found, Reject) and isinstance(known_step(scope, chain[start - 1], rank), Step):
            size = spatial_size(scope, scope.nodes[chain[start]].input[0], rank)
            later = _average(scope, chain[start:], rank, size)
            found = later if isinstance(later, Pooling) else found
    return found


def _average(scope: Scope, chain: list[int], rank: int, size: Ints | None) -> Pooling | Reject | None:
    """`recognise_reduction` of the tensor that a chain reads."""
    x = scope.nodes[chain[0]].input[0]
    axes = len(scope.info(x).shape or range(rank + 2))
    if axes != rank + 2:
        return _other_axes(scope, x, axes, rank)
    view = whole(scope, x, rank, size)
    found: Pooling | Reject | None = None
    for number, node in enumerate(chain):
        step = _step(scope, node, view)
        if not isinstance(step, View):
            return found if isinstance(found, Pooling) else step
        view = step
        averages = any(part.axis > 1 for part in view.averaged)
        if averages and (number == len(chain) - 1 or is_op(scope.nodes[node], *REDUCTIONS)):
            pooling = _pooling(scope, chain[: number + 1], view, rank)
            found = pooling if isinstance(pooling, Pooling) or found is None else found
    return found


def _other_axes(scope: Scope, x: str, axes: int, rank: int) -> Reject | None:
    """The node that gives what is averaged other axes than a map has; None for a reduction, or behind one of several operands."""
    for _ in range(MAX_CHAIN):
        index = scope.producer.get(x)
        op = None if index is None else op_of(scope.nodes[index])
        if index is None or op is not None and op.binary or op is None and not is_op(scope.nodes[index], *NONLINEAR):
            return None
        if op is not None and op.apart:
            return (
                None if is_op(scope.nodes[index], *REDUCTIONS) else reject(scope, index, "axes of what it gives", axes, rank + 2)
            )
        x = scope.nodes[index].input[0]
    return None


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


def _step(scope: Scope, index: int, view: View) -> View | Reject | None:
    """What node `index` makes of a view.  None: nothing that averages positions.  Raises AttributeReference."""
    node = scope.nodes[index]
    if not is_op(node, *REDUCTIONS):
        return viewed(scope, index, view)
    values = attributes(node)
    axes, count = axes_of(scope, index, values), len(view.axes)
    if isinstance(axes, Reject):
        return axes
    if not axes and values.get("noop_with_empty_axes", 0) or any(not -count <= axis < count for axis in axes):
        return None
    chosen = {axis % count for axis in axes or range(count)}
    return _reduced(view, chosen, keep=values.get("keepdims", 1) == 1, is_sum=node.op_type == "ReduceSum")


def _reduced(view: View, chosen: set[int], *, keep: bool, is_sum: bool) -> View:
    gone = tuple(part for axis in sorted(chosen) for part in view.axes[axis])
    axes = tuple(() if axis in chosen else parts for axis, parts in enumerate(view.axes) if keep or axis not in chosen)
    factor = view.factor
    if is_sum and factor is not None:
        sizes = [part.size for part in gone]
        factor = None if None in sizes else factor * math.prod(n for n in sizes if n is not None)
    return View(axes, (*view.averaged, *gone), factor)


def _pooling(scope: Scope, chain: list[int], view: View, rank: int) -> Pooling | Reject:
    """The view as an average over windows: conditions (2) to (5)."""
    root, inside = chain[-1], set(chain)
    channels = [part.size for part in view.averaged if part.axis == 1]
    if channels:
        got = "an unknown number" if None in channels else math.prod(n for n in channels if n is not None)
        return reject(scope, root, "channels averaged with the positions", got, "one")
    batch = any(part.axis == 0 for part in view.averaged)
    if batch and any(view.axes):
        return reject(scope, root, "axes of the average", "the batch and others", "all axes, or not the batch")
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
    return Pooling(root, tuple(chain), x, y, kind, spec, squeezed, view.factor, batch)


def _window(view: View, axis: int) -> tuple[int | None, bool] | None:
    """The window on an axis and whether it is all of it; None where the positions averaged are no windows side by side."""
    kept = joined([part for parts in view.axes for part in parts if part.axis == axis])
    averaged = joined(sorted((part for part in view.averaged if part.axis == axis), key=lambda part: -part.step))
    if not kept:
        return (averaged[0].size if averaged else 1), True
    if not averaged and len(kept) == 1:
        return 1, False
    inner = len(averaged) == 1 and averaged[0].step == 1 and len(kept) == 1 and kept[0].step == averaged[0].size
    return (averaged[0].size, False) if inner else None


def _squeezed(view: View, rank: int) -> Ints | None:
    """The axes that are missing, all of size 1 by then; None if the others are not N, C and the rest of the space, in order."""
    rest = [[part.axis for part in joined(list(parts))] for parts in view.axes]
    remaining = {axis for axes in rest for axis in axes}
    missing = []
    for axis in range(rank + 2):
        if rest and rest[0] == ([axis] if axis in remaining else []):
            rest.pop(0)
        elif axis in remaining:
            return None
        else:
            missing.append(axis)
    return None if rest else tuple(missing)
