"""Recognising averages over windows, however a model writes them.

| written as | window |
|---|---|
| AveragePool | kernel_shape |
| GlobalAveragePool, ReduceMean over all spatial axes | the feature map |
| Add/Sum of strided Slices, times 1/n or over n (or Mean of them) | one element per Slice |

    +-- Slice [::2, ::2] --+
    +-- Slice [1::2, ::2] -+
    x                      Add... -> Div 4         AveragePool(kernel 2, stride 2)
    +-- Slice [::2, 1::2] -+
    +-- Slice [1::2,1::2] -+

An AveragePool is exact to move when (1) it has no padding, given or automatic, since outside the feature map stand
zeros and not what the convolution would give there, and (2) ceil_mode adds no partial window.  The Slices must
(3) be strided alike, start at each offset of the window exactly once and have equal lengths, (4) be averaged:
the factor is one over their number, and (5) have no other reader.
"""

from __future__ import annotations

import math
from itertools import product

from convpool.geometry import Ints, PoolSpec
from convpool.graph import Scope, attributes, is_op
from convpool.plan import Pooling, Reject, reject

WHOLE_AXIS = 2**31 - 1
"""A Slice end at or beyond this reaches the end of any axis."""


def may_be_pooling(scope: Scope, index: int) -> str | None:
    """The tensor that would be averaged if node `index` ends an average over windows; cheap, no conditions checked."""
    node = scope.nodes[index]
    if is_op(node, "AveragePool", "GlobalAveragePool", "ReduceMean"):
        return node.input[0]
    leaf = _first_slice(scope, index) if is_op(node, "Mul", "Div", "Mean") else None
    return None if leaf is None else _slice_base(scope, leaf)


def recognise(scope: Scope, index: int, rank: int, size: Ints | None) -> Pooling | Reject | None:
    """The average that node `index` ends; a Reject where it is one but not exact to move, None where it is none.

    rank: number of spatial axes; size: spatial sizes of the tensor averaged, None where any is unknown.
    """
    node = scope.nodes[index]
    if is_op(node, "AveragePool"):
        return _average_pool(scope, index, rank, size)
    if is_op(node, "GlobalAveragePool"):
        return Pooling(index, (index,), node.input[0], node.output[0], "global", None)
    if is_op(node, "ReduceMean"):
        return _reduce_mean(scope, index, rank)
    return _slice_mean(scope, index, rank, size)


def _average_pool(scope: Scope, index: int, rank: int, size: Ints | None) -> Pooling | Reject:
    node = scope.nodes[index]
    values = attributes(node)
    kernel = tuple(values["kernel_shape"])
    if len(kernel) != rank:
        return reject(scope, index, "kernel_shape", kernel, f"{rank} dimensions, as the convolution has")
    ones, zeros = (1,) * rank, (0,) * (2 * rank)
    strides, dilations = tuple(values.get("strides", ones)), tuple(values.get("dilations", ones))
    spec = PoolSpec(kernel, strides, zeros, dilations)
    auto_pad = values.get("auto_pad", b"NOTSET").decode()
    pads = tuple(values.get("pads", zeros)) if auto_pad == "NOTSET" else zeros
    if any(pads):
        return reject(scope, index, "pooling pads", list(pads), "no padding")
    windows = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    if auto_pad.startswith("SAME"):
        # SAME gives ceil(size / stride) windows; none of them is padded where they all fit.
        if size is None and any(w > 1 or s > 1 for w, s in zip(windows, strides, strict=True)):
            return reject(scope, index, "auto_pad", f"{auto_pad} on an unknown size", "no padding")
        for n, window, stride in zip(size or (), windows, strides, strict=False):
            if (math.ceil(n / stride) - 1) * stride + window > n:
                return reject(scope, index, "auto_pad", f"{auto_pad}, which pads size {n}", "no padding")
    elif values.get("ceil_mode", 0):
        if size is None and any(s > 1 for s in strides):
            return reject(scope, index, "ceil_mode", "1 on an unknown size", "windows that all lie inside")
        for n, window, stride in zip(size or (), windows, strides, strict=False):
            if (n - window) % stride:
                return reject(
                    scope, index, "ceil_mode", f"a partial window on size {n}", "windows that all lie inside"
                )
    return Pooling(index, (index,), node.input[0], node.output[0], "pool", spec)


def _reduce_mean(scope: Scope, index: int, rank: int) -> Pooling | Reject | None:
    node = scope.nodes[index]
    values = attributes(node)
    axes = values.get("axes")
    if axes is None and len(node.input) > 1 and node.input[1]:
        axes = scope.constant_ints(node.input[1])
        if axes is None:
            return reject(scope, index, "axes", "a computed tensor", "a constant")
    if not axes:
        return None
    found = sorted({int(axis) % (rank + 2) for axis in axes})
    spatial = list(range(2, rank + 2))
    if not set(found) & set(spatial) or not set(found) <= set(spatial):
        return None
    if found != spatial:
        return reject(scope, index, "axes", found, f"all spatial axes, {spatial}")
    squeeze = not values.get("keepdims", 1)
    return Pooling(index, (index,), node.input[0], node.output[0], "global", None, squeeze)


def _slice_mean(scope: Scope, index: int, rank: int, size: Ints | None) -> Pooling | Reject | None:
    terms = _terms(scope, index)
    if terms is None:
        return None
    leaves, nodes, count = terms
    base = _slice_base(scope, leaves[0])
    if base is None or any(_slice_base(scope, leaf) != base for leaf in leaves):
        return None
    if size is None:
        return reject(scope, index, "size of the Slices' input", "unknown", "static spatial sizes")
    ranges = []
    for leaf in leaves:
        got = _slice_ranges(scope, leaf, base, rank, size, nodes)
        if got is None:
            return reject(scope, scope.producer[leaf], "Slice", "other axes, or bounds that are computed",
                          "constant strides over spatial axes")  # fmt: skip
        ranges.append(got)
    kernel, strides = [], []
    for axis in range(rank):
        starts = sorted({r[axis].start for r in ranges})
        steps = {r[axis].step for r in ranges if len(r[axis]) > 1} or {ranges[0][axis].step}
        pooled = (size[axis] - len(starts)) // max(steps) + 1
        if starts != list(range(len(starts))) or len(steps) > 1 or any(len(r[axis]) != pooled for r in ranges):
            got = sorted({f"[{r[axis].start}:{size[axis]}:{r[axis].step}]" for r in ranges})
            return reject(scope, index, f"Slices of spatial axis {axis}", " ".join(got), "equal strides and lengths")
        kernel.append(len(starts))
        strides.append(steps.pop())
    offsets = sorted(tuple(r.start for r in got) for got in ranges)
    if offsets != list(product(*(range(k) for k in kernel))):
        return reject(scope, index, "offsets of the Slices", offsets, "each offset of the window once")
    if not math.isclose(count, len(leaves), rel_tol=1e-6):
        return reject(scope, index, "divisor of the sum", f"{count:g}", len(leaves))
    for inner in nodes - {index}:
        for name in scope.nodes[inner].output:
            if name in scope.outputs or name in scope.captured or not set(scope.readers.get(name, ())) <= nodes:
                return reject(scope, inner, "readers", "a reader outside the average", "none")
    spec = PoolSpec(tuple(kernel), tuple(strides), (0,) * (2 * rank), (1,) * rank)
    return Pooling(index, tuple(sorted(nodes)), base, scope.nodes[index].output[0], "slice_mean", spec)


def _scale(scope: Scope, index: int) -> tuple[str, float] | None:
    """For x * c or x / c with a constant scalar: the tensor x and the number that x is divided by."""
    node = scope.nodes[index]
    if not is_op(node, "Mul", "Div") or len(node.input) != 2:
        return None
    for operand in (1, 0) if node.op_type == "Mul" else (1,):
        constant = scope.constant(node.input[operand])
        if constant is not None and math.prod(constant.shape) == 1:
            value = float(constant.array().reshape(-1)[0])
            if value == 0 or not math.isfinite(value):
                return None
            return node.input[1 - operand], value if node.op_type == "Div" else 1 / value
    return None


def _terms(scope: Scope, index: int) -> tuple[list[str], set[int], float] | None:
    """The tensors summed, the nodes that sum and scale them, and the divisor."""
    node = scope.nodes[index]
    if is_op(node, "Mean"):
        return list(node.input), {index}, float(len(node.input))
    scaled = _scale(scope, index)
    if scaled is None:
        return None
    pending, leaves, nodes = [scaled[0]], [], {index}
    while pending:
        name = pending.pop()
        producer = scope.producer.get(name)
        if producer is not None and is_op(scope.nodes[producer], "Add", "Sum"):
            nodes.add(producer)
            pending.extend(scope.nodes[producer].input)
        else:
            leaves.append(name)
    return (leaves, nodes, scaled[1]) if len(leaves) > 1 else None


def _first_slice(scope: Scope, index: int) -> str | None:
    """A Slice's output among the terms of the sum that node `index` averages, found by going left."""
    node = scope.nodes[index]
    if is_op(node, "Mean"):
        name = node.input[0]
    else:
        scaled = _scale(scope, index)
        if scaled is None:
            return None
        name = scaled[0]
        producer = scope.producer.get(name)
        if producer is None or not is_op(scope.nodes[producer], "Add", "Sum"):
            return None
    while (producer := scope.producer.get(name)) is not None and is_op(scope.nodes[producer], "Add", "Sum"):
        name = scope.nodes[producer].input[0]
    return name if producer is not None and is_op(scope.nodes[producer], "Slice") else None


def _slice_base(scope: Scope, name: str) -> str | None:
    """The tensor that a chain of Slices starts from; None if `name` is no Slice's output."""
    base = None
    while (producer := scope.producer.get(name)) is not None and is_op(scope.nodes[producer], "Slice"):
        name = base = scope.nodes[producer].input[0]
    return base


def _slice_ranges(
    scope: Scope, name: str, base: str, rank: int, size: Ints, nodes: set[int]
) -> tuple[range, ...] | None:
    """Indices that the chain of Slices from `base` to `name` keeps, per spatial axis; adds the Slices to `nodes`."""
    chain = []
    while name != base:
        chain.append(scope.producer[name])
        name = scope.nodes[chain[-1]].input[0]
    ranges = [range(n) for n in size]
    for index in reversed(chain):
        nodes.add(index)
        if scope.opset < 10:  # Slice has no steps before, so no chain of them strides
            return None
        inputs = scope.nodes[index].input
        read = [scope.constant_ints(name) if name else None for name in inputs[1:]]
        if len(read) < 2 or read[0] is None or read[1] is None:
            return None
        starts, ends = read[0], read[1]
        axes = read[2] if len(read) > 2 and inputs[3] else tuple(range(len(starts)))
        steps = read[3] if len(read) > 3 and inputs[4] else (1,) * len(starts)
        if axes is None or steps is None:
            return None
        for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
            axis %= rank + 2
            if axis < 2:
                if start != 0 or step != 1 or end < WHOLE_AXIS:
                    return None
            elif step < 1:
                return None
            else:
                ranges[axis - 2] = ranges[axis - 2][start:end:step]
    return tuple(ranges) if all(len(r) for r in ranges) else None
