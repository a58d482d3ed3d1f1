# SPDX-License-Identifier: Apache-2.0
"""Averages that one window operator writes: AveragePool, GlobalAveragePool, and a box filter.

A box filter is a depthwise Conv whose weights are all one number w: it gives w times the number of its taps, times the
average.  Its zeros in front count, as those of an AveragePool with count_include_pad = 1.

All are exact to move when (1) no window reaches into padding, given or automatic, since outside the feature map stand
zeros and not what the convolution would give there, and (2) all windows lie inside: ceil_mode adds no partial one, and
the window fits the map.  A box filter besides has (3) no bias.
"""

from __future__ import annotations

import math

from convpool.algebra.geometry import Ints, PoolSpec
from convpool.ir.index import Scope
from convpool.ir.protos import attributes, is_op, known_attributes
from convpool.passes.base import Reject, malformed, reject
from convpool.passes.convs import conv_leaf
from convpool.passes.tree import Pooling


def may_be_average_pool(scope: Scope, index: int) -> str | None:
    """What node `index` averages, None where it is no AveragePool."""
    node = scope.nodes[index]
    return node.input[0] if is_op(node, "AveragePool") else None


def may_be_global(scope: Scope, index: int) -> str | None:
    """What node `index` averages, None where it is no GlobalAveragePool."""
    node = scope.nodes[index]
    return node.input[0] if is_op(node, "GlobalAveragePool") else None


def may_be_box_filter(scope: Scope, index: int) -> str | None:
    """What node `index` averages, None where it is no depthwise Conv with equal weights."""
    node = scope.nodes[index]
    return node.input[0] if is_op(node, "Conv") and _box_weight(scope, index) is not None else None


def global_average_pool(scope: Scope, index: int, rank: int, size: Ints | None) -> Pooling:
    """A GlobalAveragePool."""
    node = scope.nodes[index]
    return Pooling(index, (index,), node.input[0], node.output[0], "global", None)


def average_pool(scope: Scope, index: int, rank: int, size: Ints | None) -> Pooling | Reject:
    """An AveragePool whose windows lie inside of the map, or why they do not."""
    node = scope.nodes[index]
    values = attributes(node)
    kernel = tuple(values["kernel_shape"])
    if len(kernel) != rank:
        return reject(scope, index, "kernel_shape", kernel, f"{rank} dimensions, as the convolution has")
    if (wrong := malformed(scope, index, values, rank)) is not None:
        return wrong
    ones, zeros = (1,) * rank, (0,) * (2 * rank)
    strides, dilations = tuple(values.get("strides") or ones), tuple(values.get("dilations") or ones)
    auto_pad = values.get("auto_pad", b"NOTSET").decode(errors="replace")
    pads = tuple(values.get("pads") or zeros) if auto_pad == "NOTSET" else zeros
    spec = PoolSpec(kernel, strides, pads, dilations)
    ceil = bool(values.get("ceil_mode", 0)) and not auto_pad.startswith("SAME")
    if (wrong := _padded(scope, index, spec, size, ceil)) is not None:
        return wrong
    windows = _extents(spec)
    if auto_pad.startswith("SAME"):
        # SAME gives ceil(size / stride) windows; none of them is padded where they all fit.
        if size is None and any(w > 1 or s > 1 for w, s in zip(windows, strides, strict=True)):
            return reject(scope, index, "auto_pad", f"{auto_pad} on an unknown size", "no padding")
        for n, window, stride in zip(size or (), windows, strides, strict=size is not None):
            if (math.ceil(n / stride) - 1) * stride + window > n:
                return reject(scope, index, "auto_pad", f"{auto_pad}, which pads size {n}", "no padding")
    elif ceil:
        if size is None and any(s > 1 for s in strides):
            return reject(scope, index, "ceil_mode", "1 on an unknown size", "windows that all lie inside")
        for n, window, stride in zip(size or (), windows, strides, strict=size is not None):
            if (n - window) % stride:
                return reject(scope, index, "ceil_mode", f"a partial window on size {n}", "windows that all lie inside")
    return Pooling(index, (index,), node.input[0], node.output[0], "pool", PoolSpec(kernel, strides, zeros, dilations))


def box_filter(scope: Scope, index: int, rank: int, size: Ints | None) -> Pooling | Reject | None:
    """A box filter whose windows lie inside of the map, or why they do not."""
    node, weight = scope.nodes[index], _box_weight(scope, index)
    if weight is None:
        return None
    leaf = conv_leaf(scope, index, rank)
    if isinstance(leaf, Reject):
        return leaf
    conv = leaf.conv
    spec = PoolSpec(conv.kernel_shape, conv.strides, conv.pads, conv.dilations)
    if (wrong := _padded(scope, index, spec, size, ceil=False)) is not None:
        return wrong
    if len(node.input) > 2 and node.input[2] and (leaf.bias is None or leaf.bias.array().any()):
        return reject(scope, index, "bias of a box filter", "numbers", "none, or zeros")
    factor = weight * conv.taps
    assert leaf.weight is not None
    if math.isclose(factor, 1, rel_tol=leaf.weight.unit_roundoff):
        factor = 1.0
    spec = PoolSpec(conv.kernel_shape, conv.strides, (0,) * (2 * rank), conv.dilations)
    return Pooling(index, (index,), node.input[0], node.output[0], "box_filter", spec, factor=factor)


def _box_weight(scope: Scope, index: int) -> float | None:
    """The one number in the weights of a depthwise convolution of more than one tap; None where it is none, or they differ."""
    node, values = scope.nodes[index], known_attributes(scope.nodes[index])
    weight = scope.constant(node.input[1])
    if values is None or weight is None or len(weight.shape) < 3 or math.prod(weight.shape[2:]) < 2:
        return None
    if weight.shape[1] != 1 or values.get("group", 1) != weight.shape[0]:
        return None
    array = weight.array()
    number = float(array.reshape(-1)[0])
    return number if number and math.isfinite(number) and (array == array.reshape(-1)[0]).all() else None


def _padded(scope: Scope, index: int, spec: PoolSpec, size: Ints | None, ceil: bool) -> Reject | None:
    """Why windows do not fit the map, or reach into the padding that `spec` gives."""
    windows = _extents(spec)
    if size is not None and any(n < w for n, w in zip(size, windows, strict=True)):
        return reject(scope, index, "window", windows, f"no larger than the feature map, {list(size)}")
    if any(spec.pads) and (ceil or not _unreached(spec.pads, size, windows, spec.strides)):
        return reject(scope, index, "pooling pads", list(spec.pads), "no padding")
    return None


def _extents(spec: PoolSpec) -> list[int]:
    return [d * (k - 1) + 1 for k, d in zip(spec.kernel_shape, spec.dilations, strict=True)]


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
