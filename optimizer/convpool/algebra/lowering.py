# SPDX-License-Identifier: Apache-2.0
"""The forms that an exact site can be written in, which of them a convolution admits, and what each costs.

The time of a layer is taken as a weighted sum, in units of one multiply-add of a dense convolution.  The weights are
ratios measured with onnxruntime on a CPU (`make bench-cpu` repeats the layers they are from): what matters is only
their order of magnitude, since a rewrite that pays does so by factors.

| lowering | nodes | needs |
|---|---|---|
| convavgpool | ai.convpool::ConvAvgPool, a model-local function | one group, 1-D or 2-D, a static window of at most 64 elements |
| direct | AveragePool, Conv | |
| fused | Conv with the kernel convolved with the box | constant weights, which do not grow out of proportion |
| auto | direct or fused, whichever the cost model puts ahead | |

`convavgpool` falls back to the next lowering that the model admits and that pays, `direct` and `fused` do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from convpool.algebra.geometry import ConvSpec, Ints, PoolSpec, Refusal, fused_spec, pool_first, refuse, whole_map

ADDITION_WEIGHT = 8.0
"""A pooling's addition against a dense convolution's multiply-add: pooling is bound by loads."""
CPU_ADDITION_WEIGHTS = {1: (32.0, 90.0), 2: (ADDITION_WEIGHT, ADDITION_WEIGHT), 3: (4.0, 60.0)}
"""One by onnxruntime's AveragePool on a CPU, by spatial axes: before SLOW_OPSET, and from then on, twice that in long windows."""
SLOW_OPSET = 19
"""The first opset whose AveragePool adds number by number in maps of one or three axes."""
ONE_PLACE_WEIGHTS = {True: (20.0, 6.0), False: (60.0, 9.0)}
"""A multiply-add of a fused convolution in groups with one place on a CPU, of two axes or not: depthwise, others.  Each weight is
read for one product, and onnxruntime runs a matrix product for each group."""
DEPTHWISE_WEIGHT = 4.0
"""A multiply-add of a convolution with under 4 input channels a group: each input element is used few times."""
BYTE_WEIGHT = 2.0
"""A byte read or written, mostly in a cache, against a dense multiply-add."""
NOMINAL_SIZE = 32
"""Stands for a spatial size that the model leaves open, in comparisons only; reported figures stay unknown."""


@dataclass(frozen=True)
class Cost:
    """macs: multiply-adds of convolutions; additions: of poolings; per sample.  time: the weighted sum."""

    macs: int = 0
    additions: int = 0
    time: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.macs + other.macs, self.additions + other.additions, self.time + other.time)


@lru_cache
def conv_cost(conv: ConvSpec, weight_shape: Ints, size: Ints, item_bytes: int) -> Cost:
    """Cost of one convolution, per sample; weight_shape: [M, C/group, kernel...]; size: spatial input sizes."""
    out, taps = conv.places(size), conv.taps
    m, c = weight_shape[0], weight_shape[1] * conv.group
    macs = out * m * weight_shape[1] * taps
    moved = (math.prod(size) * c + out * m + m * weight_shape[1] * taps) * item_bytes
    weight = DEPTHWISE_WEIGHT if weight_shape[1] < 4 and conv.group > 1 else 1.0
    return Cost(macs, 0, macs * weight + moved * BYTE_WEIGHT)


def addition_weight(pool: PoolSpec, cpu_opset: int) -> float:
    """The weight of an AveragePool's addition.  cpu_opset: of the model, in onnxruntime on a CPU; 0 for other runtimes."""
    before, since = CPU_ADDITION_WEIGHTS[pool.rank]
    if cpu_opset >= SLOW_OPSET and pool.rank != 2:
        return since * (1 + (pool.taps > 64))
    return before if cpu_opset else ADDITION_WEIGHT


@lru_cache
def pool_cost(pool: PoolSpec, channels: int, size: Ints, item_bytes: int, cpu_opset: int = 0) -> Cost:
    """Cost of one average pooling, per sample, of `addition_weight`; nothing where each window is the element it stands at."""
    if pool.is_idle:
        return Cost()
    out = pool.places(size)
    additions = out * channels * pool.taps
    moved = (math.prod(size) + out) * channels * item_bytes
    return Cost(0, additions, additions * addition_weight(pool, cpu_opset) + moved * BYTE_WEIGHT)


def affine_cost(count: int, channels: int, size: Ints, item_bytes: int) -> Cost:
    """Cost of `count` elementwise nodes on a feature map, per sample."""
    return Cost(0, 0, count * math.prod(size) * channels * (ADDITION_WEIGHT / 4 + 2 * item_bytes * BYTE_WEIGHT))


LOWERINGS = ("convavgpool", "direct", "fused")
REQUESTS = (*LOWERINGS, "auto")
ORDERS: dict[str, tuple[str, ...]] = {
    "convavgpool": ("convavgpool", "direct", "fused"),
    "direct": ("direct",),
    "fused": ("fused",),
    "auto": ("direct", "fused"),
}
"""For each request the lowerings to try, in order; for auto the order is by cost."""
MAX_KERNEL_RANK = 2
"""Most spatial axes of the plugin's kernels on tensor cores; its `generic` kernel takes more, and groups."""
MAX_KERNEL_WINDOW = 64
"""Most elements of a pooling window that the plugin's kernels sum fast: one thread sums a whole window."""
MAX_FUSED_ELEMENTS = 2**24
MAX_FUSED_GROWTH = 16
"""Fused weights may be as large as the one, or as many times as large as the other: a mean over 56 x 56 makes them 300."""


@dataclass(frozen=True)
class Lowering:
    """One convolution as it is to be written.  pool is None where the pooling is global or has vanished (`is_global` tells).
    name: one of LOWERINGS.  macs_before, macs_after: multiply-adds of the convolution for one sample, None where unknown."""

    name: str
    pool: PoolSpec | None
    conv: ConvSpec
    is_global: bool = False
    macs_before: int | None = None
    macs_after: int | None = None


@dataclass(frozen=True)
class Layer:
    """A convolution to be lowered.  size: spatial input size, None where any of it is unknown; constant: its weights are."""

    conv: ConvSpec
    weight_shape: Ints
    size: Ints | None
    constant: bool


@dataclass(frozen=True)
class Obstacles:
    """Reasons why a graph cannot express a form (its opset, its nesting, the plugin); None where it can."""

    dilated_pooling: Refusal | None = None
    operator: Refusal | None = None


def lower(layer: Layer, pool: PoolSpec | None, name: str, obstacles: Obstacles) -> Lowering | Refusal:
    """`layer` behind the window `pool` (None: the feature map, of unknown size) in the lowering named, or why not."""
    conv = layer.conv
    whole = conv.is_pointwise and not any(conv.pads) and all(s == 1 for s in conv.strides)
    if pool is None:
        if not whole or name == "fused":
            return refuse("mean over a feature map", "unknown sizes", "static sizes, or a 1x1 Conv")
        if name == "convavgpool":
            return refuse("pool_kernel_shape", "unknown sizes", "static sizes")
        return Lowering("direct", None, conv, is_global=True)
    if name == "fused":
        return _fused(layer, pool)
    if pool.taps == 1:
        # Nothing to average: the convolution by itself has fewer positions.
        if name == "convavgpool":
            return refuse("pooling window", "one element", "more")
        return Lowering("direct", None, fused_spec(conv, pool))
    box, rest = pool_first(conv, pool)
    if any(d > 1 for d in box.dilations) and obstacles.dilated_pooling is not None:
        return obstacles.dilated_pooling
    if any(pad >= k for pad, k in zip(box.pads, box.kernel_shape * 2, strict=True)):
        expected = f"less than {list(box.kernel_shape)}, as onnxruntime demands"
        return refuse("pads of the box mean", list(box.pads), expected)
    if name == "convavgpool" and obstacles.operator is not None:
        return obstacles.operator
    if name == "direct" and whole and layer.size == pool.kernel_shape:
        return Lowering("direct", None, conv, is_global=True)
    return Lowering(name, box, rest)


def _fused(layer: Layer, pool: PoolSpec) -> Lowering | Refusal:
    if not layer.constant:
        return refuse("weights", "computed, or an input that a caller may override", "a constant")
    fused = fused_spec(layer.conv, pool)
    channels = math.prod(layer.weight_shape[:2])
    limit = max(MAX_FUSED_ELEMENTS, MAX_FUSED_GROWTH * channels * layer.conv.taps)
    if channels * fused.taps > limit:
        return refuse("elements of the fused weights", f"{channels * fused.taps:,}", f"at most {limit:,}")
    return Lowering("fused", None, fused)


def without_kernel(conv: ConvSpec, pool: PoolSpec | None = None) -> Refusal | None:
    """Why the plugin has no fast kernel for a convolution and, if there is one of known size, its pooling window."""
    if conv.group > 1:
        return refuse("group of a ConvAvgPool", conv.group, "1, for which the plugin has kernels")
    if conv.rank > MAX_KERNEL_RANK:
        expected = f"at most {MAX_KERNEL_RANK}, for which the plugin has kernels"
        return refuse("spatial axes of a ConvAvgPool", conv.rank, expected)
    if pool is not None and pool.taps > MAX_KERNEL_WINDOW:
        expected = f"at most {MAX_KERNEL_WINDOW} elements, for which the plugin has kernels"
        return refuse("pooling window of a ConvAvgPool", list(pool.kernel_shape), expected)
    return None


def lowering_cost(lowering: Lowering, layer: Layer, size: Ints, item_bytes: int, cpu_opset: int = 0) -> Cost:
    """Cost of a lowering per sample; size: spatial input sizes, nominal where unknown; cpu_opset: as of `addition_weight`."""
    channels = layer.weight_shape[1] * layer.conv.group
    shape = (*layer.weight_shape[:2], *lowering.conv.kernel_shape)
    pool = whole_map(size) if lowering.is_global else lowering.pool
    if pool is None:
        conv, found = lowering.conv, conv_cost(lowering.conv, shape, size, item_bytes)
        if not cpu_opset or lowering.name != "fused" or conv.group == 1 or conv.places(size) > 1:
            return found
        weight = ONE_PLACE_WEIGHTS[conv.rank == 2][conv.group < channels]
        return replace(found, time=found.time + found.macs * (weight - 1))
    found = conv_cost(lowering.conv, shape, pool.output_size(size), item_bytes)
    return pool_cost(pool, channels, size, item_bytes, 0 if lowering.is_global else cpu_opset) + found


def nominal_size(conv: ConvSpec, pool: PoolSpec | None) -> Ints:
    """An input size that stands for an unknown one in comparisons: large enough for a window."""
    windows = zip((1,) * conv.rank if pool is None else pool.extents, conv.strides, conv.extents, strict=True)
    return tuple(max(NOMINAL_SIZE, (w - 1) * s + extent) for w, s, extent in windows)
