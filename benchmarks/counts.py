# SPDX-License-Identifier: Apache-2.0
"""How many multiplications, additions and memory accesses each form of convolution and average pooling takes.

Exact, for the forms that Suita et al. (JPDC 2020) and Tokura et al. (2018) compare; then what the papers state:

| form | computes |
|---|---|
| naive | every output of the convolution, then the mean of each window |
| fused | one convolution with the kernel convolved with the window |
| direct | box means by sums of neighbours along one axis, then along the other; then the convolution |
| table | the same box means from a summed-area table (Kasagi et al., MLSP 2017) |

An access is an element read from or written to memory by a stage that reads each of its inputs once and writes each of its
outputs once: what a kernel that reuses all it can on chip cannot avoid.  A mean of p^d values is p^d - 1 additions and one
multiplication.  Padding counts as values, as in the papers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from convpool.algebra.geometry import ConvSpec, Ints, PoolSpec

FORMS = ("naive", "fused", "direct", "table")


@dataclass(frozen=True)
class Counts:
    """Elementary operations, and elements read and written, of one form on a whole batch."""

    multiplications: int = 0
    additions: int = 0
    reads: int = 0
    writes: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.multiplications + other.multiplications,
            self.additions + other.additions,
            self.reads + other.reads,
            self.writes + other.writes,
        )

    @property
    def operations(self) -> int:
        """Multiplications and additions: the papers' computational cost."""
        return self.multiplications + self.additions

    @property
    def accesses(self) -> int:
        """Elements read and written."""
        return self.reads + self.writes


def count(form: str, batch: int, weight_shape: Ints, size: Ints, conv: ConvSpec, pool: PoolSpec) -> Counts:
    """Counts of one of `FORMS` for a convolution followed by an unpadded pooling of dilation 1.

    weight_shape: [M, C/group, kernel...]; size: spatial sizes of X.  Raises ValueError for another form.
    """
    if form == "naive":
        middle = conv.output_size(size)
        return _convolution(batch, weight_shape, conv.group, conv.taps, size, middle) + _means(
            batch * weight_shape[0], pool, middle, pool.output_size(middle)
        )
    out = pool.output_size(conv.output_size(size))
    if form == "fused":
        taps = math.prod(k + d * (p - 1) for k, d, p in zip(_reach(conv), conv.strides, pool.kernel_shape, strict=True))
        return _convolution(batch, weight_shape, conv.group, taps, size, out)
    if form not in ("direct", "table"):
        raise ValueError(f"form; got {form!r}, expected one of {', '.join(FORMS)}")
    channels = batch * weight_shape[1] * conv.group
    if form == "direct" and conv.taps == 1 and not any(conv.pads):  # no tap shares a mean with another: those of Y alone
        return _means(channels, pool, size, out) + _convolution(batch, weight_shape, conv.group, 1, out, out)
    box = _box_size(conv, pool, size)
    means = _table_means(channels, size, box) if form == "table" else _paired_means(channels, pool, conv, size, box)
    return means + _convolution(batch, weight_shape, conv.group, conv.taps, box, out)


def _reach(conv: ConvSpec) -> Iterator[int]:
    """Elements from the kernel's first to its last tap, on each axis."""
    return (d * (k - 1) + 1 for k, d in zip(conv.kernel_shape, conv.dilations, strict=True))


def _convolution(batch: int, weight_shape: Ints, group: int, taps: int, size: Ints, out: Ints) -> Counts:
    m, depth = weight_shape[0], weight_shape[1] * taps
    results = batch * m * math.prod(out)
    return Counts(results * depth, results * (depth - 1), batch * weight_shape[1] * group * math.prod(size) + m * depth, results)


def _means(maps: int, pool: PoolSpec, size: Ints, out: Ints) -> Counts:
    results = maps * math.prod(out)
    return Counts(results, results * (pool.taps - 1), maps * math.prod(size), results)


def _box_size(conv: ConvSpec, pool: PoolSpec, size: Ints) -> Ints:
    """Box means at stride 1 that lie in X, or over its border where the convolution pads: what is left of its padding is
    around the means then."""
    rank, sizes = conv.rank, []
    for axis in range(rank):
        reach = conv.strides[axis] * (pool.kernel_shape[axis] - 1)
        sizes.append(size[axis] - reach + sum(min(pad, reach) for pad in (conv.pads[axis], conv.pads[rank + axis])))
    return tuple(sizes)


def _paired_means(channels: int, pool: PoolSpec, conv: ConvSpec, size: Ints, box: Ints) -> Counts:
    """Sums along one axis after the other, each of p values; one multiplication for each mean."""
    lines, additions = [n + conv.strides[i] * (pool.kernel_shape[i] - 1) for i, n in enumerate(box)], 0
    for axis in range(conv.rank):
        lines[axis] = box[axis]
        additions += channels * math.prod(lines) * (pool.kernel_shape[axis] - 1)
    results = channels * math.prod(box)
    return Counts(results, additions, channels * math.prod(size), results)


def _table_means(channels: int, size: Ints, box: Ints) -> Counts:
    """Prefix sums along each axis, then 2^d entries of the table for each mean; the table is written and read once an axis
    more, and its entries once each."""
    rank, elements, results = len(size), math.prod(size), channels * math.prod(box)
    additions = channels * sum(elements - elements // n for n in size) + results * (2**rank - 1)
    return Counts(results, additions, channels * elements * (rank + 1), channels * elements * rank + results)


# ---- what the papers state ----------------------------------------------------------------------------------------------


def tokura_operations(form: str, n: int, k: int, c_in: int, c_out: int, p: int) -> int:
    """Floating-point operations as Tokura et al. 2018, table I, count them: input n x n (padded), kernel k x k, window p x p.

    form: "naive", "winograd" (naive by F(2x2, 3x3)), "fused" or "direct".  Raises ValueError for another.
    """
    pooling, outputs = n * n * c_out, (n // p) ** 2 * c_out
    if form == "naive":
        return 2 * k * k * c_in * c_out * n * n + pooling
    if form == "winograd":
        return 36 * c_in * c_out + 68 * (n // 2) ** 2 * (c_in - 1) * c_out + pooling
    if form == "fused":
        return (2 * (k + p - 1) ** 2 * c_in - 1) * outputs
    if form == "direct":
        return 2 * p * n * n * c_in + (2 * k * k * c_in - 1) * outputs
    raise ValueError(f"form; got {form!r}, expected naive, winograd, fused or direct")


def suita_bound(form: str, n: int, k: int, c_in: int, c_out: int, p: int) -> float:
    """Return the O() of Suita et al. 2020: lemma 1 (naive), 2 (fused), theorem 2.1 (direct, table).

    Raises ValueError for another form.
    """
    products = n * n * c_in * c_out
    if form == "naive":
        return products * k * k
    if form == "fused":
        return products * (k + p) ** 2 / p**2
    if form in ("direct", "table"):
        return products * k * k / p**2 + n * n * c_in
    raise ValueError(f"form; got {form!r}, expected one of {', '.join(FORMS)}")
