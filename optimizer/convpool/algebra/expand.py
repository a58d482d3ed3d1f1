# SPDX-License-Identifier: Apache-2.0
"""The algebra of upsampling: how a convolution behind a nearest upsampling is computed on the small map.

Per spatial axis, with factor s, kernel k, dilation d, pads (Pl, Pr), stride 1, and the kernel's extent K = d(k-1) + 1, a map x
of n elements becomes u[t] = x[floor(t / s)] for 0 <= t < s n, zero elsewhere:

    conv(u)[o] = sum_a W[a] u[o + a d - Pl] = sum_i x[i] V[o + (K-1-Pl) - s i]
    V[r] = sum of W[a] over all a and all j from 0 to s-1 with r = d(k-1-a) + j

V is W, flipped and convolved with the box of s: the transpose of `geometry`, where the box stands in front of the strides.  With
P' = K - 1 - P on both sides, which takes P < K, the forms are

| form | what is written | multiply-adds |
|---|---|---|
| fused | ConvTranspose with the kernel V, stride s, pads P' | K + s - 1 |
| direct | ConvTranspose with W flipped, stride s, then a box sum of s, stride 1 | k |
| subpixel | Conv of s M outputs with T = ceil((K-1) / s) + 1 taps, DepthToSpace, crop | s T |
| phases | s Convs, one for each remainder p of o by s, interleaved | K + s - 1 mostly |
| conv_first | where d is a multiple of s, or k is 1: Conv of dilation d / s, upsampling, crop | k |

per element of x, pair of channels and axis.  Tap q of phase p is the sum of all W[a] with floor((p + a d - Pl) / s) = q, or of
p + Pl - s ceil(Pl / s) for p where a crop follows.  The last form holds since floor((o + a d - Pl) / s) is
floor((o - Pl) / s) + a d / s.
The original has s k.  All forms hold for every n.  The plugin's operator UpsampleConv, form `upsampleconv`, computes phases
without their Concat and DepthToSpace, for d = 1 (decision 033).
Negative pads crop u, as an edge Pad that moved in front of the upsampling leaves more than it should.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from convpool.algebra import geometry
from convpool.algebra.geometry import ConvSpec, Cost, Ints, PoolSpec, Windows

FORMS = ("conv_first", "fused", "subpixel", "phases", "direct")


@dataclass(frozen=True)
class UpsampleSpec:
    """A nearest upsampling: element t of an axis is element floor(t / factor) of its input's."""

    factors: Ints

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.factors)

    @property
    def copies(self) -> int:
        """Elements of the result for each of the input's."""
        return math.prod(self.factors)

    def output_size(self, size: Ints) -> Ints:
        """Spatial output sizes for the spatial input sizes `size`."""
        return tuple(n * s for n, s in zip(size, self.factors, strict=True))


@dataclass(frozen=True)
class TransposeSpec(Windows):
    """Attributes of a ConvTranspose without output padding."""

    group: int = 1


# ---- fused and direct ---------------------------------------------------------------------------------------------------


def fused_spec(conv: ConvSpec, up: UpsampleSpec) -> TransposeSpec:
    """The one ConvTranspose that equals `conv` after `up`; an axis that is not upsampled keeps its dilation."""
    kernel, dilations = [], []
    for k, d, extent, s in zip(conv.kernel_shape, conv.dilations, conv.extents, up.factors, strict=True):
        kernel.append(k if s == 1 else extent + s - 1)
        dilations.append(d if s == 1 else 1)
    pads = tuple(extent - 1 - pad for extent, pad in zip(conv.extents * 2, conv.pads, strict=True))
    return TransposeSpec(tuple(kernel), up.factors, pads, tuple(dilations), conv.group)


def fuse_kernel(weight: np.ndarray, conv: ConvSpec, up: UpsampleSpec) -> np.ndarray:
    """V of the module's docstring; float64 [C, M/group, fused kernel...] of the weights [M, C/group, kernel...]."""
    flipped = transpose_kernel(weight, conv)
    out = np.zeros((*flipped.shape[:2], *fused_spec(conv, up).kernel_shape))
    steps = [1 if s == 1 else d for d, s in zip(conv.dilations, up.factors, strict=True)]
    for offset in product(*map(range, up.factors)):
        window = tuple(slice(j, j + d * (k - 1) + 1, d) for j, d, k in zip(offset, steps, conv.kernel_shape, strict=True))
        out[(slice(None),) * 2 + window] += flipped
    return out


def transpose_kernel(weight: np.ndarray, conv: ConvSpec) -> np.ndarray:
    """The weights [M, C/group, kernel...] flipped, as a ConvTranspose has them; float64 [C, M/group, kernel...]."""
    m, c = weight.shape[:2]
    grouped = weight.astype(np.float64).reshape(conv.group, m // conv.group, c, *conv.kernel_shape)
    flipped = np.flip(np.swapaxes(grouped, 1, 2), tuple(range(3, 3 + conv.rank)))
    return flipped.reshape(conv.group * c, m // conv.group, *conv.kernel_shape)


def direct_specs(conv: ConvSpec, up: UpsampleSpec) -> tuple[TransposeSpec, PoolSpec]:
    """The ConvTranspose of the kernel itself, and the box whose sums behind it equal `conv` after `up`."""
    short = tuple(extent - s for extent, s in zip(conv.extents, up.factors, strict=True))
    pads = tuple(have - pad for have, pad in zip(short * 2, conv.pads, strict=True))
    ones = (1,) * conv.rank
    return (
        TransposeSpec(conv.kernel_shape, up.factors, tuple(max(pad, 0) for pad in pads), conv.dilations, conv.group),
        PoolSpec(up.factors, ones, tuple(max(-pad, 0) for pad in pads), ones),
    )


# ---- forms of convolutions ----------------------------------------------------------------------------------------------


def is_conv_first(conv: ConvSpec, up: UpsampleSpec) -> bool:
    """Return True if the convolution can stand in front of the upsampling as it is."""
    return all(k == 1 or d % s == 0 for k, d, s in zip(conv.kernel_shape, conv.dilations, up.factors, strict=True))


def conv_first(conv: ConvSpec, up: UpsampleSpec) -> tuple[ConvSpec, Ints]:
    """The convolution in front of `up`, and what is cut off behind that, begins then ends; see `is_conv_first`."""
    dilations = tuple(d // s if k > 1 else 1 for k, d, s in zip(conv.kernel_shape, conv.dilations, up.factors, strict=True))
    pads = tuple(max(-(-pad // s), 0) for pad, s in zip(conv.pads, up.factors * 2, strict=True))
    crop = tuple(s * pad - old for s, pad, old in zip(up.factors * 2, pads, conv.pads, strict=True))
    return ConvSpec(conv.kernel_shape, (1,) * conv.rank, pads, dilations, conv.group), crop


def subpixel(conv: ConvSpec, up: UpsampleSpec) -> tuple[ConvSpec, Ints]:
    """The convolution of all phases at once, and what is cut off once they are interleaved, begins then ends."""
    kernel, begins, ends, first, last = [], [], [], [], []
    for i, s in enumerate(up.factors):
        reach, left, right = conv.extents[i] - 1, conv.pads[i], conv.pads[conv.rank + i]
        taps = -(-reach // s) + 1
        pl = max(-(-left // s), 0)
        cut = s * pl - left
        # Blocks of s results that are needed beyond the n of the input.
        more = -((reach - left - right - cut) // s)
        pr = max(more - pl + taps - 1, 0)
        kernel.append(taps)
        begins.append(pl)
        ends.append(pr)
        first.append(cut)
        last.append(s * (pl + pr - taps + 1) - cut - (left + right - reach))
    ones = (1,) * conv.rank
    return ConvSpec(tuple(kernel), ones, (*begins, *ends), ones, conv.group), (*first, *last)


def subpixel_kernel(weight: np.ndarray, conv: ConvSpec, up: UpsampleSpec) -> np.ndarray:
    """Weights of `subpixel`, the phases in front of the channels, the last axis's fastest: [phases * M, C, kernel...]."""
    spec, _ = subpixel(conv, up)
    return np.concatenate([_phase(weight, conv, up, phase, (0,) * conv.rank, spec.kernel_shape) for phase in _phases(up)])


def phase_specs(conv: ConvSpec, up: UpsampleSpec) -> list[ConvSpec] | None:
    """One convolution for each phase, the last axis's fastest, all of one size; None where there are none such."""
    if any((a + b + 1 - extent) % s for a, b, extent, s in _axes(conv, up)):
        return None
    specs = []
    for phase in _phases(up):
        kernel, begins, ends = [], [], []
        for p, (left, right, extent, s) in zip(phase, _axes(conv, up), strict=True):
            low, high = (p - left) // s, (p + extent - 1 - left) // s
            kernel.append(high - low + 1)
            begins.append(-low)
            ends.append(high - (p + extent - 1 - left - right) // s)
        if min((*begins, *ends)) < 0:
            return None
        ones = (1,) * conv.rank
        specs.append(ConvSpec(tuple(kernel), ones, (*begins, *ends), ones, conv.group))
    return specs


def phase_kernels(weight: np.ndarray, conv: ConvSpec, up: UpsampleSpec, specs: list[ConvSpec]) -> list[np.ndarray]:
    """Weights of `phase_specs`; float64."""
    kernels = []
    for phase, spec in zip(_phases(up), specs, strict=True):
        start = tuple(conv.pads[i] - s * spec.pads[i] for i, s in enumerate(up.factors))
        kernels.append(_phase(weight, conv, up, phase, start, spec.kernel_shape))
    return kernels


def _phase(weight: np.ndarray, conv: ConvSpec, up: UpsampleSpec, phase: Ints, start: Ints, kernel: Ints) -> np.ndarray:
    """The taps that meet one element each of the small map, added up: tap (phase + a d - start) // s gets W[a]."""
    out = np.zeros((*weight.shape[:2], *kernel))
    for tap in product(*map(range, conv.kernel_shape)):
        place = tuple((p + a * d - b) // s for p, a, d, b, s in zip(phase, tap, conv.dilations, start, up.factors, strict=True))
        whole: tuple[Any, ...] = (slice(None), slice(None))
        out[whole + place] += weight[whole + tap]
    return out


def _phases(up: UpsampleSpec) -> Iterator[Ints]:
    return product(*map(range, up.factors))


def _axes(conv: ConvSpec, up: UpsampleSpec) -> list[tuple[int, int, int, int]]:
    """Pads at begin and end, extent and factor of each axis."""
    return list(zip(conv.pads[: conv.rank], conv.pads[conv.rank :], conv.extents, up.factors, strict=True))


# ---- costs --------------------------------------------------------------------------------------------------------------


TRANSPOSE_WEIGHT = 1.2
"""A multiply-add of a ConvTranspose's product against one of a convolution in onnxruntime's blocked layout."""
COLUMN_WEIGHT = 54.0
"""A number that this product gives, before it is added to its place."""
BOX_WEIGHT = 75.0
"""An element that a box sum with strides of 1 writes, beside its additions."""
SHUFFLE_WEIGHT, COPY_WEIGHT = 200.0, 50.0
"""An element that DepthToSpace moves, which leaves the blocked layout of the convolutions; one that Slice or Concat move."""
RESIZE_WEIGHTS = {"nearest": (40.0, 16.0, 490.0), "linear": (170.0, 32.0, 170.0), "cubic": (7000.0,) * 3}
SHRINKING = (2.0, 5.0, 2.0)
"""An element that a Resize writes, by its mode and the number of spatial axes; SHRINKING times that in a smaller map, for which
the whole map leaves the blocked layout."""
PASS_WEIGHT = 15.0
"""An element that an Add of two maps, or another elementwise operator, writes."""


@dataclass(frozen=True)
class Work:
    """A convolution behind an upsampling: its channels, the spatial size of the small map, and its opset."""

    conv: ConvSpec
    up: UpsampleSpec
    m: int
    c: int
    size: Ints
    opset: int


def admits(form: str, conv: ConvSpec, up: UpsampleSpec) -> bool:
    """Return True if a convolution behind an upsampling has a form; one of 1x1 has conv_first alone.  Its pads are less than its
    extents, its strides 1."""
    if form == "conv_first" or all(k == 1 for k in conv.kernel_shape):
        return form == "conv_first" and is_conv_first(conv, up)
    if form == "direct":
        return conv.rank <= 3 and all(d == 1 for d in conv.dilations)
    plane = up.rank == 2 and up.factors[0] == up.factors[1] and conv.group == 1
    return form == "fused" or plane and (form == "subpixel" or form == "phases" and phase_specs(conv, up) is not None)


def merges(work: Work) -> bool:
    """Return True if weights may be merged: for at most 16 copies, or for 16 pixels and more, to MAX_FUSED_ELEMENTS.  With more
    copies, on a CPU, that took 1.2 to 2.9 times as long as Resize and Conv for 1 and 4 pixels, 0.5 to 0.8 of the time for 16."""
    count = work.m * (work.c // work.conv.group) * fused_spec(work.conv, work.up).taps
    return work.up.copies <= 16 or math.prod(work.size) >= 16 and count <= geometry.MAX_FUSED_ELEMENTS


def form_cost(form: str, work: Work) -> Cost:
    """The cost of a form, per sample."""
    conv, up, m, c, size = work.conv, work.up, work.m, work.c, work.size
    out = m * math.prod(conv.output_size(up.output_size(size)))
    if form == "conv_first":
        spec, crop = conv_first(conv, up)
        weight = RESIZE_WEIGHTS["nearest"][up.rank - 1] + COPY_WEIGHT * any(crop)
        return dense_cost(spec, m, c, size) + pass_cost(out, weight, alone=True)
    if form == "subpixel":
        spec, crop = subpixel(conv, up)
        return dense_cost(spec, m * up.copies, c, size) + pass_cost(out, SHUFFLE_WEIGHT + COPY_WEIGHT * any(crop), alone=True)
    if form == "phases":
        costs = [dense_cost(spec, m, c, size) for spec in phase_specs(conv, up) or []]
        return sum(costs, Cost()) + pass_cost(out, SHUFFLE_WEIGHT + COPY_WEIGHT, alone=True)
    if form == "direct":
        spread, box = direct_specs(conv, up)
        least = 0.0 if box.taps > geometry.LONG else geometry.ADDITION_WEIGHT  # beside which the other forms are fitted
        weight = max(geometry.addition_weight(box, m, work.opset), least)
        return transpose_cost(spread, m, c, size) + pass_cost(out, BOX_WEIGHT + box.taps * weight)
    return transpose_cost(fused_spec(conv, up), m, c, size)


def dense_cost(conv: ConvSpec, m: int, c: int, size: Ints) -> Cost:
    """A convolution of c to m channels, in float32; few channels take as long as a block of them."""
    cost = geometry.conv_cost(conv, (m, c // conv.group, *conv.kernel_shape), size, 4)
    return replace(cost, time=cost.time + cost.macs * (-(-m // geometry.BLOCK) * geometry.BLOCK / m - 1))


def kernel_macs(conv: ConvSpec, up: UpsampleSpec, m: int, c: int, out: Ints) -> int:
    """Multiply-adds of the plugin's kernels of phases for one sample, whose result has the spatial size `out`.  Where strides and
    dilations are 1, the taps of an output that meet one pixel count once; others are computed as they are."""
    axes = zip(out, conv.kernel_shape, conv.strides, conv.dilations, conv.pads[: conv.rank], up.factors, strict=True)
    taps = [
        n * k if stride > 1 or d > 1 else sum(((o - pad) % s + k - 1) // s + 1 for o in range(n))
        for n, k, stride, d, pad, s in axes
    ]
    return math.prod(taps) * m * (c // conv.group)


def transpose_cost(spec: TransposeSpec, m: int, c: int, size: Ints) -> Cost:
    """A ConvTranspose of c to m channels: a product, whose columns are added to their places."""
    elements = math.prod(size)
    macs = elements * c * (m // spec.group) * spec.taps
    columns = elements * m * spec.taps * COLUMN_WEIGHT
    return Cost(macs, 0, macs * TRANSPOSE_WEIGHT + columns, columns)


def pass_cost(elements: int, weight: float, alone: bool = False) -> Cost:
    """A pass that writes so many elements, each at this weight.  alone: by one core."""
    return Cost(0, 0, elements * weight, elements * weight * alone)
