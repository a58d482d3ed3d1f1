# SPDX-License-Identifier: Apache-2.0
"""Averages that several nodes write: a weighted sum of strided Slices, as the WGAN-GP code has it, and reductions.

    +-- Slice [::2, ::2] --+
    +-- Slice [1::2, ::2] -+
    x                      Add... -> Div 4         AveragePool(kernel 2, stride 2)
    +-- Slice [::2, 1::2] -+
    +-- Slice [1::2,1::2] -+

The sum is made of Add, Sum and Mean, with constant factors by Mul and Div on it or on its terms, or of a ReduceMean or
ReduceSum over the axis on which an Unsqueeze each and a Concat stack the Slices (torch.stack).  The Slices must (1) be strided
alike, start at each offset of the window exactly once and have equal lengths, on a known size: at size 3 the Slices broadcast,
and compute something else; (2) be averaged: each factor is one over their number, to the rounding of the factors' types; and
(3) have no other reader.  Zeros among the terms (an accumulator's start) do not count, and no constant may widen the result.

An average is also ReduceMean or ReduceSum, with nodes around it that only rearrange:

    x [N, C, H, W] - Reshape [N, C, H/2, 2, W/2, 2] - ReduceMean over axes 3 and 5      AveragePool(kernel 2, stride 2)
    x [N, C, L] - Unsqueeze [N, C, 1, L] - ReduceMean over axes 2 and 3 - Squeeze       GlobalAveragePool
    x [N, C, H, W] - ReduceMean over axis 3 - ReduceMean over axis 2                    GlobalAveragePool

A reduction takes spans of x's axes away (`rules.linear`).  The rest is an average over windows when (1) axes are constants, and
sizes known where they are split, joined or summed; (2) channels are reduced only where there is one, and the batch only with
all other axes; (3) per spatial axis all of it is reduced, or none, or the inner of two spans; (4) what remains are N, C and the
spatial axes in order, less some of size 1; and (5) nothing else reads a tensor in between.  A ReduceSum is the mean times the
number of elements, which a Mul behind it restores.

A chain of them is taken as far as it is such an average: a mean over channels behind it is none.  Where nodes in front of it
act along channels, it begins behind them.
"""

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
from onnx import numpy_helper

from convpool.algebra.geometry import Ints, PoolSpec
from convpool.ir.index import Constant, Scope
from convpool.ir.protos import attributes, is_op, known_attributes
from convpool.rules import linear
from convpool.rules.base import Reject, reject, spatial_size
from convpool.rules.convs import Pooling

SUMMING = ("Add", "Sum", "Mean", "Mul", "Div")
"""Operators that a mean of Slices is written with."""
REDUCTIONS = ("ReduceMean", "ReduceSum")
ENDS_OF_SUMS = (*SUMMING, *REDUCTIONS)
"""Operators that a mean of Slices may end in."""
MAX_TERM_NODES = 64
"""Largest sum of Slices looked at, in nodes."""


def may_be_mean(scope: Scope, index: int) -> str | None:
    """The tensor whose Slices node `index` would average; a sum that goes on is none unless it is a mean already."""
    terms = _terms(scope, index) if "Slice" in scope.op_types and _sums(scope, index) else None
    if terms is None or len(terms.slices) < 2:
        return None
    is_mean = math.isclose(sum(terms.weights), 1, rel_tol=terms.rounding)
    name, copies = scope.nodes[index].output[0], 0
    while not is_mean and copies < MAX_TERM_NODES and len(readers := scope.readers.get(name, [])) == 1:
        reader = scope.nodes[readers[0]]
        if is_op(reader, *SUMMING):
            return None
        name, copies = (reader.output[0], copies + 1) if is_op(reader, "Identity") else (name, MAX_TERM_NODES)
    return _slice_base(scope, terms.slices[0])


def recognise_mean(scope: Scope, index: int, rank: int, size: Ints | None) -> Pooling | Reject | None:
    """The average that node `index` ends, a Reject where it is one but not exact to move, None where it is none."""
    terms = _terms(scope, index)
    if terms is None:
        return None
    leaves, nodes = terms.slices, set(terms.nodes)
    base = _slice_base(scope, leaves[0])
    if base is None or any(_slice_base(scope, leaf) != base for leaf in leaves):
        return None
    for weight in terms.weights:
        if not math.isclose(weight * len(leaves), 1, rel_tol=terms.rounding):
            return reject(scope, index, "factor of a Slice", f"{weight:.9g}", f"1/{len(leaves)}")
    if size is None:
        return reject(scope, index, "size of the Slices' input", "unknown", "static spatial sizes")
    ranges = []
    for leaf in leaves:
        got = _slice_ranges(scope, leaf, base, rank, size, nodes)
        if got is None:
            wanted = "constant strides over spatial axes"
            return reject(scope, scope.producer[leaf], "Slice", "other axes, or bounds that are computed", wanted)
        ranges.append(got)
    kernel, strides = [], []
    for axis in range(rank):
        starts = sorted({r[axis].start for r in ranges})
        steps = {r[axis].step for r in ranges if len(r[axis]) > 1} or {ranges[0][axis].step}
        length = (size[axis] - len(starts)) // max(steps) + 1
        if starts != list(range(len(starts))) or len(steps) > 1 or any(len(r[axis]) != length for r in ranges):
            shown = sorted({f"[{r[axis].start}:{size[axis]}:{r[axis].step}]" for r in ranges})
            return reject(scope, index, f"Slices of spatial axis {axis}", " ".join(shown), "equal strides and lengths")
        kernel.append(len(starts))
        strides.append(steps.pop())
    offsets = sorted(tuple(r.start for r in got) for got in ranges)
    if offsets != list(product(*(range(k) for k in kernel))):
        return reject(scope, index, "offsets of the Slices", offsets, "each offset of the window once")
    pooled = tuple((n - k) // q + 1 for n, k, q in zip(size, kernel, strides, strict=True))
    for shape in terms.shapes:
        full = (1,) * (rank + 2 - len(shape)) + shape
        limits = (*(scope.info(base).shape or (1, 1))[:2], *pooled)
        if len(full) > len(limits) or any(n not in (1, limit) for n, limit in zip(full, limits, strict=True)):
            return reject(scope, index, "shape of a constant", list(shape), f"sizes of 1 or {list(limits)}")
    for inner in nodes - {index}:
        for name in scope.nodes[inner].output:
            if scope.read_outside(name, nodes):
                return reject(scope, inner, "readers", "a reader outside the average", "none")
    spec = PoolSpec(tuple(kernel), tuple(strides), (0,) * (2 * rank), (1,) * rank)
    return Pooling(index, tuple(sorted(nodes)), base, scope.nodes[index].output[0], "slice_mean", spec)


@dataclass
class _Terms:
    """A weighted sum of Slices: the Slices' outputs, their weights, and the nodes that sum and scale.  shapes: of the constant
    factors, and of constant zeros among the terms.  rounding: relative error that the factors may have by being rounded to their
    types."""

    slices: list[str]
    weights: list[float]
    nodes: set[int]
    shapes: list[Ints]
    rounding: float = 2.0**-50


def _terms(scope: Scope, index: int) -> _Terms | None:
    """The weighted sum that node `index` ends, None where anything but Slices and zeros is summed."""
    found, constants = _Terms([], [], set(), []), []
    pending = [(index, 1.0)]
    while pending:
        current, weight = pending.pop()
        node = scope.nodes[current]
        found.nodes.add(current)
        if len(found.nodes) > MAX_TERM_NODES:
            return None
        if node.op_type in REDUCTIONS and (stack := _stacked(scope, current)) is not None:
            terms = list(stack)
            found.nodes.update(stack.values(), {scope.producer[node.input[0]]})
            weight = weight / len(terms) if node.op_type == "ReduceMean" else weight
        elif is_op(node, "Mul", "Div"):
            scaled = _scale(scope, current)
            if scaled is None:
                return None
            terms, weight = [scaled[0]], weight * scaled[1]
            found.shapes.append(scaled[2].shape)
            found.rounding += scaled[2].unit_roundoff
        else:
            terms = list(node.input)
            weight = weight / len(terms) if node.op_type == "Mean" else weight
        for name in reversed(terms):
            while (copy := scope.made_by(name, "Identity")) is not None and copy not in found.nodes:
                found.nodes.add(copy)
                name = scope.nodes[copy].input[0]
            producer = scope.producer.get(name)
            if scope.made_by(name, "Slice") is not None:
                found.slices.append(name)
                found.weights.append(weight)
            elif (zeros := _computed_zeros(scope, name)) is not None:
                found.nodes |= zeros  # also where they count as constants: their Shape reads a Slice
            elif (constant := scope.constant(name)) is not None:
                constants.append(constant)
            elif producer is not None and _sums(scope, producer):
                pending.append((producer, weight))
            else:
                return None
    # Values are read last: most sums are none of Slices, and their constants may be large.
    if not found.slices or any(constant.array().any() for constant in constants):
        return None
    found.shapes += [constant.shape for constant in constants]
    return found


def _sums(scope: Scope, index: int) -> bool:
    node = scope.nodes[index]
    return node.op_type in ENDS_OF_SUMS and (is_op(node, *SUMMING) or _stacked(scope, index) is not None)


def _stacked(scope: Scope, index: int) -> dict[str, int] | None:
    """For a ReduceMean or ReduceSum over stacked tensors: these tensors, each with its Unsqueeze; None for any other node."""
    node = scope.nodes[index]
    concat = scope.made_by(node.input[0], "Concat") if is_op(node, *REDUCTIONS) else None
    values = None if concat is None else known_attributes(node)
    if concat is None or values is None or values.get("keepdims", 1):
        return None
    names = list(scope.nodes[concat].input)
    unsqueezes = [scope.made_by(name, "Unsqueeze") for name in names]
    found = {scope.nodes[item].input[0]: item for item in unsqueezes if item is not None}
    axis = (known_attributes(scope.nodes[concat]) or {}).get("axis")
    axes = {linear.axes_of(scope, item, known_attributes(scope.nodes[item]) or {}) for item in (index, *found.values())}
    return found if len(found) == len(names) > 1 and axes == {(axis,)} else None


def _scale(scope: Scope, index: int) -> tuple[str, float, Constant] | None:
    """For x * c or x / c with a constant scalar: the tensor x, the factor on it, and c."""
    node = scope.nodes[index]
    for operand in (1, 0) if node.op_type == "Mul" else (1,):
        constant = scope.constant(node.input[operand])
        if constant is not None and math.prod(constant.shape) == 1:
            value = float(constant.array().reshape(-1)[0])
            if value == 0 or not math.isfinite(value):
                return None
            return node.input[1 - operand], value if node.op_type == "Mul" else 1 / value, constant
    return None


def _computed_zeros(scope: Scope, name: str) -> set[int] | None:
    """The nodes that make `name` zeros of a Slice's shape at run time; None if it is not that."""
    index = scope.made_by(name, "ConstantOfShape", "Expand")
    values = None if index is None else known_attributes(scope.nodes[index])
    if index is None or values is None:
        return None
    node = scope.nodes[index]
    value, shape = (None, node.input[0]) if node.op_type == "ConstantOfShape" else (node.input[0], node.input[1])
    source = scope.made_by(shape, "Shape")
    if source is None or scope.nodes[source].attribute or scope.made_by(scope.nodes[source].input[0], "Slice") is None:
        return None
    if value is None:
        fill = numpy_helper.to_array(values["value"]) if "value" in values else np.zeros(1)
    else:
        constant = scope.constant(value)
        fill = np.ones(1) if constant is None else constant.array()
    return {index, source} if fill.size == 1 and not fill.any() else None


def _slice_base(scope: Scope, name: str) -> str | None:
    """The tensor that a chain of Slices starts from; None if `name` is no Slice's output."""
    base = None
    while (producer := scope.made_by(name, "Slice")) is not None:
        name = base = scope.nodes[producer].input[0]
    return base


def _slice_ranges(scope: Scope, name: str, base: str, rank: int, size: Ints, nodes: set[int]) -> tuple[range, ...] | None:
    """Indices that the chain of Slices from `base` to `name` keeps, per spatial axis; adds the Slices to `nodes`."""
    chain = []
    while name != base:
        chain.append(scope.producer[name])
        name = scope.nodes[chain[-1]].input[0]
    ranges = [range(n) for n in size]
    for index in reversed(chain):
        nodes.add(index)
        known = [numbers for numbers in linear.slice_numbers(scope, index) if numbers is not None]
        if len(known) < 4 or len(set(map(len, known))) > 1:
            return None
        for start, end, axis, step in zip(*known, strict=True):
            axis %= rank + 2
            if axis < 2:
                if start != 0 or step != 1 or end < linear.WHOLE_AXIS:
                    return None
            elif step < 1:
                return None
            else:
                ranges[axis - 2] = ranges[axis - 2][start:end:step]
    return tuple(ranges) if all(len(r) for r in ranges) else None


def may_be_reduction(scope: Scope, index: int) -> str | None:
    """The tensor x of a chain that node `index` ends; None if it ends none."""
    node = scope.nodes[index]
    if is_op(node, "Squeeze"):
        ends = _undoes(scope, index)
    else:
        ends = is_op(node, *REDUCTIONS) and not _goes_on(scope, node.output[0])
    return scope.nodes[linear.chain_to(scope, index, *REDUCTIONS)[0]].input[0] if ends else None


def recognise_reduction(scope: Scope, index: int, rank: int, size: Ints | None) -> Pooling | Reject | None:
    """The average that a chain up to `index` begins with, a Reject for none over windows, None for none of positions at all."""
    chain = linear.chain_to(scope, index, *REDUCTIONS)
    found = _average(scope, chain, rank, size)
    for start in range(1, len(chain)):
        if isinstance(found, Reject) and isinstance(linear.step_or_reject(scope, chain[start - 1], rank), linear.Step):
            later = _average(scope, chain[start:], rank, spatial_size(scope, scope.nodes[chain[start]].input[0], rank))
            found = later if isinstance(later, Pooling) else found
    return found


def _average(scope: Scope, chain: list[int], rank: int, size: Ints | None) -> Pooling | Reject | None:
    """`recognise_reduction` of the tensor that a chain reads."""
    x = scope.nodes[chain[0]].input[0]
    axes = len(scope.info(x).shape or range(rank + 2))
    if axes != rank + 2:
        return _other_axes(scope, x, axes, rank)
    view = linear.whole(scope, x, rank, size)
    found: Pooling | Reject | None = None
    for number, node in enumerate(chain):
        step = _step(scope, node, view)
        if not isinstance(step, linear.View):
            return found if isinstance(found, Pooling) else step
        view = step
        averages = any(span.axis > 1 for span in view.averaged)
        if averages and (number == len(chain) - 1 or is_op(scope.nodes[node], *REDUCTIONS)):
            pooling = _pooling(scope, chain[: number + 1], view, rank)
            found = pooling if isinstance(pooling, Pooling) or found is None else found
    return found


def _other_axes(scope: Scope, x: str, axes: int, rank: int) -> Reject | None:
    """The node that gives what is averaged other axes than a map has; None for a reduction, or behind one of several operands."""
    for _ in range(linear.MAX_CHAIN):
        index = scope.producer.get(x)
        op = None if index is None else linear.op_of(scope.nodes[index])
        if index is None or op is not None and op.binary or op is None and not is_op(scope.nodes[index], *linear.NONLINEAR):
            return None
        if op is not None and op.rearranges:
            reduces = is_op(scope.nodes[index], *REDUCTIONS)
            return None if reduces else reject(scope, index, "axes of what it gives", axes, rank + 2)
        x = scope.nodes[index].input[0]
    return None


def _goes_on(scope: Scope, name: str) -> bool:
    """Return True if the only reader reduces on, perhaps rearranged, or undoes an Unsqueeze."""
    for _ in range(linear.MAX_CHAIN):
        if scope.other_readers(name) is not None:
            return False
        reader = scope.readers[name][0]
        node = scope.nodes[reader]
        if is_op(node, *REDUCTIONS) or is_op(node, "Squeeze") and _undoes(scope, reader):
            return True
        if not is_op(node, *linear.VIEWS):
            return False
        name = node.output[0]
    return False


def _undoes(scope: Scope, index: int) -> bool:
    """Return True if a Squeeze ends the chain, right after a reduction, behind an Unsqueeze."""
    if scope.made_by(scope.nodes[index].input[0], *REDUCTIONS) is None or _goes_on(scope, scope.nodes[index].output[0]):
        return False
    return any(is_op(scope.nodes[node], "Unsqueeze") for node in linear.chain_to(scope, index, *REDUCTIONS))


def _step(scope: Scope, index: int, view: linear.View) -> linear.View | Reject | None:
    """Apply node `index` to a view; None if it averages nothing.  Raises AttributeReference."""
    node = scope.nodes[index]
    if not is_op(node, *REDUCTIONS):
        return linear.viewed(scope, index, view)
    values = attributes(node)
    axes, count = linear.axes_of(scope, index, values), len(view.axes)
    if isinstance(axes, Reject):
        return axes
    if not axes and values.get("noop_with_empty_axes", 0) or any(not -count <= axis < count for axis in axes):
        return None
    chosen, keep = {axis % count for axis in axes or range(count)}, values.get("keepdims", 1) == 1
    gone = tuple(span for axis in sorted(chosen) for span in view.axes[axis])
    left = tuple(() if axis in chosen else spans for axis, spans in enumerate(view.axes) if keep or axis not in chosen)
    factor = view.factor
    if node.op_type == "ReduceSum" and factor is not None:
        sizes = [span.size for span in gone]
        factor = None if None in sizes else factor * math.prod(n for n in sizes if n is not None)
    return linear.View(left, (*view.averaged, *gone), factor)


def _pooling(scope: Scope, chain: list[int], view: linear.View, rank: int) -> Pooling | Reject:
    """The view as an average over windows: conditions (2) to (5)."""
    root = chain[-1]
    channels = [span.size for span in view.averaged if span.axis == 1]
    if channels:
        got = "an unknown number" if None in channels else math.prod(n for n in channels if n is not None)
        return reject(scope, root, "channels averaged with the positions", got, "one")
    batch = any(span.axis == 0 for span in view.averaged)
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
        if scope.read_outside(scope.nodes[node].output[0], chain):
            return reject(scope, node, "readers", "a reader outside the average", "none")
    if view.factor is None:
        return reject(scope, root, "elements of a ReduceSum", "an unknown number", "static sizes")
    kernel, spec = tuple(n for n, _ in windows), None
    if not all(full for _, full in windows):
        if None in kernel:
            return reject(scope, root, "size averaged", "unknown", "static sizes")
        strides = tuple(1 if full else n or 1 for n, full in windows)
        spec = PoolSpec(tuple(n or 1 for n in kernel), strides, (0,) * (2 * rank), (1,) * rank)
    kind = "mean" if spec else "global"
    x, y = scope.nodes[chain[0]].input[0], scope.nodes[root].output[0]
    return Pooling(root, tuple(chain), x, y, kind, spec, squeezed, view.factor, batch)


def _window(view: linear.View, axis: int) -> tuple[int | None, bool] | None:
    """The window on an axis and whether it is all of it; None where the positions averaged are no windows side by side."""
    kept = linear.joined([span for spans in view.axes for span in spans if span.axis == axis])
    averaged = linear.joined(sorted((span for span in view.averaged if span.axis == axis), key=lambda span: -span.step))
    if not kept:
        return (averaged[0].size if averaged else 1), True
    if not averaged and len(kept) == 1:
        return 1, False
    inner = len(averaged) == 1 and averaged[0].step == 1 and len(kept) == 1 and kept[0].step == averaged[0].size
    return (averaged[0].size, False) if inner else None


def _squeezed(view: linear.View, rank: int) -> Ints | None:
    """The axes that are missing, all of size 1 by then; None if the others are not N, C and the rest of the space, in order."""
    rest = [[span.axis for span in linear.joined(list(spans))] for spans in view.axes]
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
