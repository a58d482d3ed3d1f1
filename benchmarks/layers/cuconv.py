# SPDX-License-Identifier: Apache-2.0
"""cuConv's two-stage convolution (Jorda, Valero-Lara, Pena, "cuConv: A CUDA Implementation of Convolution for CNN Inference").

    S[a, b] = sum over c of W[., c, a, b] X[., c, . + a, . + b],    Y = sum over a, b of S[a, b]

The first stage forms the scalar products over the depth for each tap, with coalesced reads of X as it lies, channels first; the
second adds them.  A 1x1 convolution needs the first stage only.  Our kernels, written from the paper's description; sums in
float32.  In a run with channels last it reads copies of the inputs in its own order.
"""

from __future__ import annotations

from typing import Any

from benchmarks.layers.case import Candidate, Case, Skip
from benchmarks.layers.device import blocks
from benchmarks.layers.textbook import pooled

FILTERS = 8
"""Filters that a thread multiplies a pixel with, kFilters of `kernels.cu`."""
MOST_PRODUCTS = 2**31
"""Scalar products, 4 bytes each, beyond which the method is left out."""


def two_stages(case: Case) -> list[Candidate]:
    """Scalar products, then sums; pooling behind them where the row has one.  Raises Skip beyond 8 GiB of products."""
    row = case.row
    (p, q), taps = row.conv_size, row.kernel**2
    count = row.n * row.m * p * q
    if taps > 1 and taps * count > MOST_PRODUCTS:
        raise Skip(f"{taps * count * 4 >> 30} GiB of scalar products")
    grid = (blocks(p * q), -(-row.m // FILTERS) * taps, row.n)
    numbers = (row.h, row.w, row.c, row.m, p, q, row.kernel, row.stride, row.pad)
    if taps == 1:
        products = case.device.kernel("cuconv_pointwise", case.precision)
        return pooled(case, lambda x, y: products(grid, x, case.w_first, y, *numbers), "one stage")
    products, sums = (case.device.kernel(f"cuconv_{stage}", case.precision) for stage in ("products", "sums"))
    scalar = case.empty(taps * count, dtype=case.device.torch.float32)

    def convolve(x: Any, y: Any) -> None:
        products(grid, x, case.w_first, scalar, *numbers)
        sums((blocks(count), 1, 1), scalar, y, taps, count)

    return pooled(case, convolve, "two stages")
