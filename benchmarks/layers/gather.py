# SPDX-License-Identifier: Apache-2.0
"""Pooling, box means and unrolling at the speed of memory: the kernels `gather_*` of `kernels.cu` on a case's tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.layers.case import Case
from benchmarks.layers.device import blocks


def gather(
    case: Case,
    size: tuple[int, int, int],
    out: tuple[int, int],
    layout: str | None = None,
    *,
    kernel: int = 1,
    stride: int = 1,
    pad: int = 0,
    pool: int = 1,
    dilation: int = 1,
) -> Callable[[Any, Any], None]:
    """launch(x, y): means of pool x pool windows of x, whose (height, width, channels) are `size`, for every output
    position of `out` and every tap of kernel x kernel.

    y is [N, P, Q, kernel, kernel, C] channels last and [N, C, kernel, kernel, P, Q] channels first.
    """
    (height, width, channels), (p, q), n = size, out, case.row.n
    numbers = (n, height, width, channels, p, q, kernel, stride, pad, pool, dilation)
    kind = str(pool) if pool in (1, 2) else "any"
    if (layout or case.layout) == "nchw":
        name, grid = f"gather_first_{kind}", (blocks(p * q), channels * kernel**2, n)
    else:
        vector = 16 // (2 if case.precision in ("fp16", "bf16") else 4)
        if channels % vector:
            kind, vector = "scalar", 1
        name, grid = f"gather_last_{kind}", (blocks(q * kernel * (channels // vector)), p * kernel, n)
    launch = case.device.kernel(name, case.precision)
    return lambda x, y: launch(grid, x, y, *numbers)


def pooling(case: Case, layout: str | None = None) -> Callable[[Any, Any], None]:
    """launch(x, y): the row's average pooling of the convolution's output."""
    row = case.row
    return gather(case, (*row.conv_size, row.m), row.out_size, layout, stride=row.pool_stride, pool=row.pool)


def box_means(case: Case) -> tuple[Callable[[Any, Any], None], Any]:
    """(launch(x, y), y): the direct form's box means; with the stride where the convolution is 1x1."""
    row = case.row
    size = row.out_size if row.pointwise else row.box_size
    launch = gather(
        case,
        (row.h, row.w, row.c),
        size,
        stride=row.total_stride if row.pointwise else 1,
        pad=row.box_pad,
        pool=row.pool,
        dilation=row.stride,
    )
    return launch, case.empty(*case.shape(*size, row.c))
