# SPDX-License-Identifier: Apache-2.0
"""Recognising averages over windows, however a model writes them.

| written as | window |
|---|---|
| AveragePool | kernel_shape |
| GlobalAveragePool, ReduceMean over all spatial axes | the feature map |
| the mean of strided Slices | one element per Slice; see `slice_mean` |

An AveragePool is exact to move when (1) no window reaches into padding, given or automatic, since outside the feature
map stand zeros and not what the convolution would give there, and (2) all windows lie inside: ceil_mode adds no
partial one, and the window fits the map.
"""

from __future__ import annotations

import math

from convpool.algebra.geometry import Ints, PoolSpec
from convpool.ir.index import Scope
from convpool.ir.protos import attributes, is_op
from convpool.passes.base import Reject, malformed, reject
from convpool.passes.slice_mean import may_be_mean, recognise_mean
from convpool.passes.tree import Pooling


def may_be_pooling(scope: Scope, index: int) -> str | None:
    """The tensor that would be averaged if node `index` ends an average over windows; cheap, no conditions checked."""
    node = scope.nodes[index]
    if is_op(node, "AveragePool", "GlobalAveragePool", "ReduceMean"):
        return node.input[0]
    return may_be_mean(scope, index)


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
    return recognise_mean(scope, index, rank, size)


def _average_pool(scope: Scope, index: int, rank: int, size: Ints | None) -> Pooling | Reject:
    node = scope.nodes[index]
    values = attributes(node)
    kernel = tuple(values["kernel_shape"])
    if len(kernel) != rank:
        return reject(scope, index, "kernel_shape", kernel, f"{rank} dimensions, as the convolution has")
    if (wrong := malformed(scope, index, values, rank)) is not None:
        return wrong
    ones, zeros = (1,) * rank, (0,) * (2 * rank)
    strides, dilations = tuple(values.get("strides") or ones), tuple(values.get("dilations") or ones)
    spec = PoolSpec(kernel, strides, zeros, dilations)
    auto_pad = values.get("auto_pad", b"NOTSET").decode()
    pads = tuple(values.get("pads") or zeros) if auto_pad == "NOTSET" else zeros
    windows = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    if size is not None and any(n < w for n, w in zip(size, windows, strict=True)):
        return reject(scope, index, "window", windows, f"no larger than the feature map, {list(size)}")
    if any(pads) and (values.get("ceil_mode", 0) or not _unreached(pads, size, windows, strides)):
        return reject(scope, index, "pooling pads", list(pads), "no padding")
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
                return reject(scope, index, "ceil_mode", f"a partial window on size {n}", "windows that all lie inside")
    return Pooling(index, (index,), node.input[0], node.output[0], "pool", spec)


def _unreached(pads: Ints, size: Ints | None, windows: list[int], strides: Ints) -> bool:
    """Whether the pads change nothing: none at the begin, and at the end too few for one more window.

    Exporters to opset 9, which has no ceil_mode, write it so.
    """
    rank = len(windows)
    if size is None or any(pads[:rank]):
        return False
    return all(
        n >= w and (n + pad - w) // s == (n - w) // s for n, pad, w, s in zip(size, pads[rank:], windows, strides, strict=True)
    )


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
