# SPDX-License-Identifier: Apache-2.0
"""The convolutions of GPU textbooks, each followed by pooling: basic, tiled through shared memory, unrolled and multiplied.

As in Kirk and Hwu, "Programming Massively Parallel Processors": one output a thread, 16x16 tiles, float32 sums, channels
first.  In a run with channels last they read copies of the inputs in their own order.
"""

from __future__ import annotations

from typing import Any

from benchmarks.layers.case import Candidate, Case, Skip
from benchmarks.layers.device import blocks
from benchmarks.layers.gather import gather, pooling

TILE = 16
REACH, SIDE = 40, 7
"""Largest input tile and kernel of the tiled convolution, as in `kernels.cu`."""


def pooled(case: Case, convolve: Any, how: str) -> list[Candidate]:
    """The candidate that runs convolve(x, y), channels first, and pools where the row has a pooling."""
    row = case.row
    xs, between = case.xs_in("nchw"), case.empty(row.n, row.m, *row.conv_size)
    if row.pool == 1:

        def alone(i: int) -> Any:
            convolve(xs[i], between)
            return between

        return [Candidate(how, alone, layout="nchw")]
    out, pool = case.empty(row.n, row.m, *row.out_size), pooling(case, "nchw")

    def call(i: int) -> Any:
        convolve(xs[i], between)
        pool(between, out)
        return out

    return [Candidate(how, call, layout="nchw")]


def _direct(case: Case, name: str, pixels: int) -> list[Candidate]:
    row = case.row
    launch = case.device.kernel(name, case.precision)
    numbers = (row.h, row.w, row.c, row.m, *row.conv_size, row.kernel, row.stride, row.pad)
    return pooled(case, lambda x, y: launch((pixels, row.m, row.n), x, case.w_first, y, *numbers), name)


def basic(case: Case) -> list[Candidate]:
    """One output a thread, everything from global memory."""
    rows, columns = case.row.conv_size
    return _direct(case, "textbook_direct", blocks(rows * columns))


def tiled(case: Case) -> list[Candidate]:
    """16x16 outputs a block, inputs and weights through shared memory."""
    row = case.row
    if (TILE - 1) * row.stride + row.kernel > REACH or row.kernel > SIDE:
        raise Skip(f"written for kernels up to {SIDE}x{SIDE} and input tiles up to {REACH}x{REACH}")
    rows, columns = row.conv_size
    return _direct(case, "textbook_tiled", -(-rows // TILE) * -(-columns // TILE))


def unrolled(case: Case) -> list[Candidate]:
    """The map unrolled, then a tiled matrix product."""
    row = case.row
    (rows, columns), depth = row.conv_size, row.kernel**2 * row.c
    matrix = case.empty(row.n * depth * rows * columns)
    unroll = gather(case, (row.h, row.w, row.c), row.conv_size, "nchw", kernel=row.kernel, stride=row.stride, pad=row.pad)
    multiply = case.device.kernel("textbook_gemm", case.precision)
    grid = (-(-rows * columns // TILE), -(-row.m // TILE), row.n)

    def convolve(x: Any, y: Any) -> None:
        unroll(x, matrix)
        multiply(grid, case.w_first, matrix, y, row.m, depth, rows * columns)

    return pooled(case, convolve, "textbook_gemm")
