# SPDX-License-Identifier: Apache-2.0
"""The algebra: how the attributes of a convolution and of the pooling behind it become those of a pooling first.

Per spatial axis, with convolution kernel k, stride s, pads (Pl, Pr), dilation d, and pooling kernel p, stride q,
dilation e, no pads, the extent of the convolution kernel being K = d(k-1) + 1:

    pool(conv(x))[i] = sum_a W[a] * mean_j x[(i q + e j) s + a d - Pl]
                     = sum_a W[a] * box[i (s q) + a d - Pl],    box[t] = mean_j x[t + (s e) j]

so the box mean has the dilation s*e and the convolution the stride s*q.  `box` is non-zero from -(s e)(p-1) on: that
much of the padding is the pooling's, the rest is the convolution's.  All positions and sizes agree for every input
size, since floor((floor(z / s) - e(p-1)) / q) = floor((z - s e(p-1)) / (s q)).

The fused form is one convolution whose kernel is W convolved with the box, on the grid of step gcd(d, s e).

Source: Suita et al., "Efficient cuDNN-compatible convolution-pooling on the GPU", JPDC 2020 (direct and fused forms
for dilation 1 and s = 1); Kasagi et al., MLSP 2017.

A zero Pad of t positions behind a convolution equals s*t more zeros in front of it exactly where the convolution gives
zero: it has no bias so far, and the added windows lie outside the input, Pl >= K - s at the begin and Pr >= K - 1 at
the end (K the extent of the kernel).  A negative Pad crops, and so does a smaller padding, while it stays >= 0.

A Refusal says why something cannot be done exactly; whoever knows the node adds its name.

`lower` says what a site becomes in one of these forms, if the convolution admits it:

| lowering | nodes | needs |
|---|---|---|
| convavgpool | ai.convpool::ConvAvgPool, a model-local function | one group, 1-D or 2-D, a static window of at most 64 elements |
| direct | AveragePool, Conv | |
| fused | Conv with the kernel convolved with the box | constant weights, which do not grow out of proportion |
| auto | direct or fused, whichever the cost model puts ahead | |

`convavgpool` falls back to the next lowering that the model admits and that pays, `direct` and `fused` do not.  The time of a
layer is taken as a weighted sum, in units of one multiply-add of a dense convolution.  The weights are ratios measured with
onnxruntime on a CPU (`make bench-cpu` repeats the layers they are from): what matters is only their order of magnitude, since a
rewrite that pays does so by factors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Refusal:
    """The condition that does not hold, what was found, and what would have been right."""

    condition: str
    got: str
    expected: str


def refuse(condition: str, got: object, expected: object) -> Refusal:
    """A Refusal of values of any type."""
    return Refusal(condition, str(got), str(expected))


Ints = tuple[int, ...]


@dataclass(frozen=True)
class Windows:
    """Attributes of an operator over windows, complete: one entry per spatial axis; `pads` holds all begins, then all ends."""

    kernel_shape: Ints
    strides: Ints
    pads: Ints
    dilations: Ints

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.kernel_shape)

    @property
    def extents(self) -> Ints:
        """Input positions that the window spans, per axis."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel_shape, self.dilations, strict=True))

    @property
    def taps(self) -> int:
        """Elements of the window; of a kernel, per input channel."""
        return math.prod(self.kernel_shape)

    def output_size(self, size: Ints) -> Ints:
        """Spatial output sizes for the spatial input sizes `size`; may be below 1 where the window does not fit."""
        r, extents = self.rank, self.extents
        return tuple((size[i] + self.pads[i] + self.pads[r + i] - extents[i]) // self.strides[i] + 1 for i in range(r))

    def places(self, size: Ints) -> int:
        """Number of outputs of a channel for the spatial input sizes `size`."""
        return math.prod(max(n, 0) for n in self.output_size(size))


@dataclass(frozen=True)
class ConvSpec(Windows):
    """Attributes of a Conv."""

    group: int = 1

    @property
    def is_pointwise(self) -> bool:
        """True if every kernel dimension is 1."""
        return self.taps == 1


@dataclass(frozen=True)
class PoolSpec(Windows):
    """Attributes of an average pooling that counts its padding, without ceil_mode."""

    @property
    def is_idle(self) -> bool:
        """True if it returns its input: the window is one element at every position."""
        return self.taps == 1 and not any(self.pads) and all(stride == 1 for stride in self.strides)


def windows(values: Mapping[str, Any], rank: int) -> PoolSpec | Refusal:
    """The windows that a node's attributes `values` give on `rank` axes, a Conv's too; onnx's checker does not look at them.  No
    pads where `auto_pad` adds them."""
    for name, count, least in (("kernel_shape", rank, 1), ("strides", rank, 1), ("dilations", rank, 1), ("pads", 2 * rank, 0)):
        if (got := values.get(name)) and (len(got) != count or min(got) < least):
            return refuse(name, list(got), f"{count} numbers of at least {least}")
    pads = values.get("pads") if values.get("auto_pad", b"NOTSET") == b"NOTSET" else None
    kernel, strides, dilations = (tuple(values.get(name) or (1,) * rank) for name in ("kernel_shape", "strides", "dilations"))
    return PoolSpec(kernel, strides, tuple(pads or (0,) * (2 * rank)), dilations)


def whole_map(size: Ints) -> PoolSpec:
    """The average over all of a map of this size."""
    return PoolSpec(size, (1,) * len(size), (0,) * (2 * len(size)), (1,) * len(size))


@lru_cache
def pool_first(conv: ConvSpec, pool: PoolSpec) -> tuple[PoolSpec, ConvSpec]:
    """The pooling and the convolution that, in this order, equal `pool` after `conv`.  `pool` must have no pads."""
    if any(pool.pads):
        raise AssertionError(f"pool_first: pooling pads are not exact; got {pool.pads}, expected zeros")
    reach = tuple(s * e * (p - 1) for s, e, p in zip(conv.strides, pool.dilations, pool.kernel_shape, strict=True))
    pool_pads = tuple(min(pad, limit) for pad, limit in zip(conv.pads, reach * 2, strict=True))
    pads = tuple(pad - taken for pad, taken in zip(conv.pads, pool_pads, strict=True))
    dilations = tuple(s * e if p > 1 else 1 for s, e, p in zip(conv.strides, pool.dilations, pool.kernel_shape, strict=True))
    strides = tuple(s * q for s, q in zip(conv.strides, pool.strides, strict=True))
    ones = (1,) * conv.rank
    # A pointwise convolution without pads only picks positions, so the pooling need not compute the others.
    pool_strides, conv_strides = (strides, ones) if conv.is_pointwise and not any(pads) else (ones, strides)
    return (
        PoolSpec(pool.kernel_shape, pool_strides, pool_pads, dilations),
        ConvSpec(conv.kernel_shape, conv_strides, pads, conv.dilations, conv.group),
    )


@lru_cache
def pool_last(pool: PoolSpec, conv: ConvSpec) -> tuple[ConvSpec, PoolSpec] | None:
    """The convolution and the pooling behind it that equal `conv` after `pool`, which counts its padding; None if there are none.

    With kernel p, stride q, pads (Pl, Pr), dilation e of the pooling, and C_l, C_r the pads of the convolution, which stand for
    zeros: these are averages of padding alone, and nothing is lost, if e(p-1) < q + Pl or C_l = 0, and e(p-1) <= Pr or C_r = 0.
    """
    r = conv.rank
    reach = [e * (p - 1) for e, p in zip(pool.dilations, pool.kernel_shape, strict=True)]
    for i in range(r):
        if conv.pads[i] and reach[i] >= pool.strides[i] + pool.pads[i] or conv.pads[r + i] and reach[i] > pool.pads[r + i]:
            return None
    pads = tuple(own + inner * q for own, inner, q in zip(pool.pads, conv.pads, pool.strides * 2, strict=True))
    dilations = tuple(d * q if k > 1 else 1 for d, q, k in zip(conv.dilations, pool.strides, conv.kernel_shape, strict=True))
    strides = tuple(s * q for s, q in zip(conv.strides, pool.strides, strict=True))
    ones = (1,) * r
    return (
        ConvSpec(conv.kernel_shape, ones, pads, dilations, conv.group),
        PoolSpec(pool.kernel_shape, strides, (0,) * (2 * r), pool.dilations),
    )


@lru_cache
def fused_spec(conv: ConvSpec, pool: PoolSpec) -> ConvSpec:
    """The one convolution that equals `pool` after `conv`; its kernel is `fuse_kernel` of theirs."""
    kernel, dilations = [], []
    for i in range(conv.rank):
        k, p = conv.kernel_shape[i], pool.kernel_shape[i]
        reach = conv.dilations[i] * (k - 1) + conv.strides[i] * pool.dilations[i] * (p - 1)
        # The step of the finest grid that both kernels' taps lie on.
        step = math.gcd(conv.dilations[i] if k > 1 else 0, conv.strides[i] * pool.dilations[i] if p > 1 else 0) or 1
        kernel.append(reach // step + 1)
        dilations.append(step)
    strides = tuple(s * q for s, q in zip(conv.strides, pool.strides, strict=True))
    return ConvSpec(tuple(kernel), strides, conv.pads, tuple(dilations), conv.group)


def fuse_kernel(weight: np.ndarray, conv: ConvSpec, pool: PoolSpec) -> np.ndarray:
    """Convolve `weight` [M, C/group, kernel...] with the box of `pool`; float64 [M, C/group, fused kernel...]."""
    fused = fused_spec(conv, pool)
    out = weight.astype(np.float64) / pool.taps
    for i in range(conv.rank):  # the box is one of each axis
        # A kernel of one tap has no dilation, and its own may be below the grid's step.
        tap = max(conv.dilations[i] // fused.dilations[i], 1)
        box = conv.strides[i] * pool.dilations[i] // fused.dilations[i]
        summed = np.zeros((*out.shape[: 2 + i], fused.kernel_shape[i], *out.shape[3 + i :]))
        rows = np.moveaxis(summed, 2 + i, 0)
        for j in range(pool.kernel_shape[i]):
            rows[box * j : box * j + tap * (conv.kernel_shape[i] - 1) + 1 : tap] += np.moveaxis(out, 2 + i, 0)
        out = summed
    return out


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
                return refuse(f"zeros where the convolution gives others, axis {i}", own, f"convolution pads >= {least}")
    total = tuple(p + s * t for p, s, t in zip(conv.pads, conv.strides * 2, pads, strict=True))
    if min(total) < 0:
        return refuse("crop beyond the convolution's padding", list(pads), "pads that stay >= 0")
    return replace(conv, pads=total)


def transposed(pads: Ints, orders: Sequence[Ints], rank: int) -> Ints | None:
    """Spatial pads behind Transposes of these orders, nearest first, () the reverse one; None if other axes are padded."""
    axes: Sequence[int] = range(rank + 2)
    for order in orders:
        axes = [(order or range(rank + 1, -1, -1))[axis] for axis in axes]
    begins, ends = ([pads[axis + half] for axis in axes] for half in (0, rank + 2))
    return None if any((*begins[:2], *ends[:2])) else (*begins[2:], *ends[2:])


COUNTED = "ones that onnxruntime before 1.25 counts right"


def miscounts(pads: Ints) -> bool:
    """Return True if onnxruntime before 1.25 may divide by a wrong count where an AveragePool counts these zeros, from opset 19
    on: on two or three axes it takes other pads than those at the end."""
    rank = len(pads) // 2
    return any(pads[rank + i] > pads[2 * i + 1] for i in range(rank))


def fills_window(pads: Ints, pool: PoolSpec) -> bool:
    """Return True if zeros in front, merged into the pads, fill a window: onnxruntime refuses."""
    return any(more + own >= k for more, own, k in zip(pads, pool.pads, pool.kernel_shape * 2, strict=True))


ADDITION_WEIGHT = 8.0
"""A pooling's addition against a dense convolution's multiply-add: pooling is bound by loads."""
CPU_ADDITION_WEIGHTS = {1: (48.0, 90.0), 2: (ADDITION_WEIGHT, 78.0), 3: (4.0, 60.0)}
"""One by onnxruntime's AveragePool on a CPU, by spatial axes: before SLOW_OPSET, and from then on."""
SLOW_OPSET = 19
"""The first opset whose AveragePool adds number by number, except on maps of two axes with a multiple of BLOCK channels."""
ALONE_ELEMENTS = 2**16
"""A result of fewer elements is averaged by one core from SLOW_OPSET on, where it adds number by number."""
MANY, LONG = 16, 64
"""Elements of a window.  With more than MANY an addition takes 1.3 times as long on maps of two axes; of more than LONG 3.5
times, on other maps twice."""
BLOCKED_WEIGHT, SINGLY_WEIGHT = 2.0, 40.0
"""An addition in BLOCKs on a CPU; one where single numbers are added before SLOW_OPSET, too."""
COLUMN_WEIGHT = 700.0
"""An element of a result of one column, beside its additions, before SLOW_OPSET: its rows are averaged one by one."""
BLOCK = 16
"""Channels that onnxruntime's convolutions compute at once; fewer take as long."""
COLUMN_WEIGHTS, ROW_WEIGHT, GROUP_WEIGHT = (8.0, 22.0), 270.0, 5900.0
"""A convolution computed as matrix products by onnxruntime: an element copied, without and with strides, a row of them, a
group.  Fitted to 240 random layers."""
CACHED_WEIGHTS = 2**20
"""The most weights that come from a cache; of more each is two to read."""
DEPTHWISE_WEIGHT = 4.0
"""A multiply-add of a convolution with under 4 input channels a group: each input element is used few times."""
CORES = 2.5
"""How many times as fast onnxruntime's convolutions are on four cores: a rewrite must not lose there either."""
BYTE_WEIGHT = 2.0
"""A byte read or written, mostly in a cache, against a dense multiply-add."""
COMPUTED = "computed, or an input that a caller may override"
"""How a Refusal names what is no constant."""
NOMINAL_SIZE = 32
"""Stands for a spatial size that the model leaves open, in comparisons only; reported figures stay unknown."""


@dataclass(frozen=True)
class Cost:
    """macs: multiply-adds of convolutions; additions: of poolings; per sample.  time: the weighted sum.  alone: the part of it
    that onnxruntime does on one core, however many there are."""

    macs: int = 0
    additions: int = 0
    time: float = 0.0
    alone: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        macs, additions = self.macs + other.macs, self.additions + other.additions
        return Cost(macs, additions, self.time + other.time, self.alone + other.alone)

    def share_of(self, before: Cost) -> float:
        """The time as a share of another's, on one core or on several, whichever is more."""
        return max(self.on(cores) / before.on(cores) for cores in (1, CORES))

    def on(self, cores: float) -> float:
        """The time where other parts than `alone` are so many times as fast."""
        return self.alone + (self.time - self.alone) / cores


@lru_cache
def conv_cost(conv: ConvSpec, weight_shape: Ints, size: Ints, item_bytes: int, *, on_cpu: bool = False) -> Cost:
    """Cost of one convolution, per sample; weight_shape: [M, C/group, kernel...]; size: spatial sizes; on_cpu: in onnxruntime."""
    out, taps = conv.places(size), conv.taps
    m, c = weight_shape[0], weight_shape[1] * conv.group
    weights = m * weight_shape[1] * taps
    macs = out * weights
    moved = (math.prod(size) * c + out * m + weights * (1 + (on_cpu and weights > CACHED_WEIGHTS))) * item_bytes
    weight = DEPTHWISE_WEIGHT if weight_shape[1] < 4 and conv.group > 1 else 1.0
    if not on_cpu:
        return Cost(macs, 0, macs * weight + moved * BYTE_WEIGHT)
    if conv.group == 1 or conv.group == c == m:
        blocked = conv.rank == 2 and (c % 4 == 0 or conv.group == 1 and c < BLOCK)
    else:
        blocked = conv.rank == 2 and not any(n // conv.group % BLOCK for n in (m, c))
    if blocked:
        return Cost(macs, 0, macs * weight * (-(-m // BLOCK) * BLOCK / m) + moved * BYTE_WEIGHT)
    strided = any(stride > 1 for stride in conv.strides)
    columns = c * taps * out if strided or not conv.is_pointwise else 0
    copied = columns * (COLUMN_WEIGHTS[strided] + ROW_WEIGHT / max(conv.output_size(size)[-1], 1))
    return Cost(macs, 0, macs + copied + conv.group * GROUP_WEIGHT + moved * BYTE_WEIGHT)


def addition_weight(pool: PoolSpec, channels: int, cpu_opset: int) -> float:
    """The weight of an AveragePool's addition.  cpu_opset: of the model, in onnxruntime on a CPU; 0 for other runtimes."""
    before, since = CPU_ADDITION_WEIGHTS[pool.rank]
    plane = pool.rank == 2
    if not cpu_opset or _is_pooled_in_blocks(pool, channels):
        return BLOCKED_WEIGHT if cpu_opset else ADDITION_WEIGHT
    if cpu_opset >= SLOW_OPSET:
        if pool.taps > LONG:
            return since * (3.5 if plane else 2)
        return since * (1.3 if plane and pool.taps > MANY else 1)
    return SINGLY_WEIGHT if plane and (max(pool.kernel_shape) > 32 or max(pool.strides) > 2) else before


def _is_pooled_in_blocks(pool: PoolSpec, channels: int) -> bool:
    return pool.rank == 2 and channels % BLOCK == 0 and max(pool.dilations) == 1


@lru_cache
def pool_cost(pool: PoolSpec, channels: int, size: Ints, item_bytes: int, cpu_opset: int = 0) -> Cost:
    """Cost of one average pooling, per sample, of `addition_weight`; nothing where each window is the element it stands at."""
    if pool.is_idle:
        return Cost()
    out = pool.places(size)
    additions = out * channels * pool.taps
    moved = (math.prod(size) + out) * channels * item_bytes
    time, alone = additions * addition_weight(pool, channels, cpu_opset), 0.0
    if cpu_opset and not _is_pooled_in_blocks(pool, channels):
        moved *= 2 if pool.rank == 2 else 1  # out of the layout of convolutions
        if cpu_opset < SLOW_OPSET and pool.output_size(size)[-1] == 1 < out:
            time += out * channels * COLUMN_WEIGHT
        alone = time if cpu_opset >= SLOW_OPSET and out * channels < ALONE_ELEMENTS else 0.0
    return Cost(0, additions, time + moved * BYTE_WEIGHT, alone)


def affine_cost(count: int, channels: int, size: Ints, item_bytes: int) -> Cost:
    """Cost of `count` elementwise nodes on a feature map, per sample."""
    return Cost(0, 0, count * math.prod(size) * channels * (ADDITION_WEIGHT / 4 + 2 * item_bytes * BYTE_WEIGHT))


LOWERINGS = ("convavgpool", "direct", "fused")
REQUESTS = (*LOWERINGS, "auto")
ORDERS: dict[str, tuple[str, ...]] = {"convavgpool": LOWERINGS, "direct": ("direct",), "fused": ("fused",), "auto": LOWERINGS[1:]}
"""For each request the lowerings to try, in order; for auto the order is by cost."""
MAX_KERNEL_RANK = 2
"""Most spatial axes of the plugin's kernels on tensor cores; its `generic` kernel takes more, and groups."""
MAX_KERNEL_WINDOW = 64
"""Most elements of a pooling window that the plugin's kernels sum fast: one thread sums a whole window."""
MAX_FUSED_ELEMENTS = 2**24
MAX_FUSED_GROWTH = 16
"""Fused weights may have MAX_FUSED_ELEMENTS, or MAX_FUSED_GROWTH times as many as before: a mean over 56 x 56 makes them 300."""
MAX_FUSED_PRODUCTS = 2**18
"""Likewise the products of a sum: onnxruntime adds them one by one, and 780,000 of an image of one colour are 0.6% off."""


@dataclass(frozen=True)
class Lowered:
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
    may_miscount: bool = False
    """True if the runtime may be one that `miscounts` tells of."""


def lower(layer: Layer, pool: PoolSpec | None, name: str, obstacles: Obstacles) -> Lowered | Refusal:
    """`layer` with the window `pool` behind it (None: the feature map, of unknown size) in the lowering named, or why not."""
    conv = layer.conv
    whole = conv.is_pointwise and not any(conv.pads) and all(s == 1 for s in conv.strides)
    if pool is None:
        if not whole or name == "fused":
            return refuse("mean over a feature map", "unknown sizes", "static sizes, or a 1x1 Conv")
        if name == "convavgpool":
            return refuse("pool_kernel_shape", "unknown sizes", "static sizes")
        return Lowered("direct", None, conv, is_global=True)
    if name == "fused":
        return _fused(layer, pool)
    if pool.taps == 1:
        # Nothing to average: the convolution by itself has fewer positions.
        if name == "convavgpool":
            return refuse("pooling window", "one element", "more")
        return Lowered("direct", None, fused_spec(conv, pool))
    box, rest = pool_first(conv, pool)
    if any(d > 1 for d in box.dilations) and obstacles.dilated_pooling is not None:
        return obstacles.dilated_pooling
    if any(pad >= k for pad, k in zip(box.pads, box.kernel_shape * 2, strict=True)):
        return refuse("pads of the box mean", list(box.pads), f"less than {list(box.kernel_shape)}, as onnxruntime demands")
    if obstacles.may_miscount and miscounts(box.pads):
        return refuse("pads of the box mean", list(box.pads), COUNTED)
    if name == "convavgpool" and obstacles.operator is not None:
        return obstacles.operator
    if name == "direct" and whole and layer.size == pool.kernel_shape:
        return Lowered("direct", None, conv, is_global=True)
    return Lowered(name, box, rest)


def _fused(layer: Layer, pool: PoolSpec) -> Lowered | Refusal:
    if not layer.constant:
        return refuse("weights", COMPUTED, "a constant")
    fused = fused_spec(layer.conv, pool)
    channels = math.prod(layer.weight_shape[:2])
    limit = max(MAX_FUSED_ELEMENTS, MAX_FUSED_GROWTH * channels * layer.conv.taps)
    if channels * fused.taps > limit:
        return refuse("elements of the fused weights", f"{channels * fused.taps:,}", f"at most {limit:,}")
    products = layer.weight_shape[1] * fused.taps
    limit = max(MAX_FUSED_PRODUCTS, MAX_FUSED_GROWTH * layer.weight_shape[1] * layer.conv.taps)
    if products > limit:
        return refuse("products of a sum with the fused weights", f"{products:,}", f"at most {limit:,}")
    return Lowered("fused", None, fused)


def without_kernel(conv: ConvSpec, pool: PoolSpec | None = None) -> Refusal | None:
    """Why the plugin has no fast kernel for a convolution and, if there is one of known size, its pooling window."""
    if conv.group > 1:
        return refuse("group of a ConvAvgPool", conv.group, "1, for which the plugin has kernels")
    if conv.rank > MAX_KERNEL_RANK:
        return refuse("spatial axes of a ConvAvgPool", conv.rank, f"at most {MAX_KERNEL_RANK}, for which the plugin has kernels")
    if pool is not None and pool.taps > MAX_KERNEL_WINDOW:
        expected = f"at most {MAX_KERNEL_WINDOW} elements, for which the plugin has kernels"
        return refuse("pooling window of a ConvAvgPool", list(pool.kernel_shape), expected)
    return None


def lowering_cost(lowering: Lowered, layer: Layer, size: Ints, item_bytes: int, cpu_opset: int = 0) -> Cost:
    """Cost of a lowering per sample; size: spatial input sizes, nominal where unknown; cpu_opset: as of `addition_weight`."""
    channels = layer.weight_shape[1] * layer.conv.group
    shape = (*layer.weight_shape[:2], *lowering.conv.kernel_shape)
    pool = whole_map(size) if lowering.is_global else lowering.pool
    where = size if pool is None else pool.output_size(size)
    found = conv_cost(lowering.conv, shape, where, item_bytes, on_cpu=cpu_opset > 0)
    return found if pool is None else found + pool_cost(pool, channels, size, item_bytes, 0 if lowering.is_global else cpu_opset)


def nominal_size(conv: ConvSpec, pool: PoolSpec | None) -> Ints:
    """An input size that stands for an unknown one in comparisons: large enough for a window."""
    windows = zip((1,) * conv.rank if pool is None else pool.extents, conv.strides, conv.extents, strict=True)
    return tuple(max(NOMINAL_SIZE, (w - 1) * s + extent) for w, s, extent in windows)
