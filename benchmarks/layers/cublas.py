# SPDX-License-Identifier: Apache-2.0
"""cuBLAS on the fused and direct forms (Suita et al., JPDC 2020): unrolling, then one matrix product.

The products are cuBLASLt's; every algorithm that its heuristics name is a candidate.  Channels last the unrolled matrix is
[N P Q, k k C] and one product makes Y; channels first it is [C k k, P Q] for each image, and the products are batched.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from benchmarks.layers.case import NO_POOLING, Candidate, Case, Skip
from benchmarks.layers.gather import box_means, gather

ALGORITHMS = 8
WORKSPACE_BYTES = 64 * 2**20
_TYPES = {"fp16": 2, "bf16": 14, "tf32": 0, "fp32": 0}  # CUDA_R_16F, CUDA_R_16BF, CUDA_R_32F
_COMPUTE = {"fp16": 68, "bf16": 68, "tf32": 77, "fp32": 68}  # CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32
_FLOAT32, _TRANSA, _BATCH_COUNT, _BATCH_STRIDE, _MAX_WORKSPACE = 0, 3, 5, 6, 1


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@functools.cache
def _library(cuda: str) -> Any:
    return ctypes.CDLL(f"libcublasLt.so.{cuda.partition('.')[0]}")


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt: status {status}")


class Product:
    """D [columns of A' x columns of B] = A' B, column-major, in float32 sums; A' is A or its transpose.

    rows, columns, depth: D is rows x columns.  batch > 1: that many products with the same B, on A and D that follow one
    another.
    """

    def __init__(self, case: Case, rows: int, columns: int, depth: int, *, transpose: bool, batch: int = 1) -> None:
        torch = case.device.torch
        self._lib, self._stream = _library(torch.version.cuda), ctypes.c_void_p(case.device.handle)
        self._workspace = case.empty(WORKSPACE_BYTES, dtype=torch.uint8)
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._handle, self._operation = ctypes.c_void_p(), ctypes.c_void_p()
        _check(self._lib.cublasLtCreate(ctypes.byref(self._handle)))
        _check(self._lib.cublasLtMatmulDescCreate(ctypes.byref(self._operation), _COMPUTE[case.precision], _FLOAT32))
        if transpose:
            self._set(self._lib.cublasLtMatmulDescSetAttribute, self._operation, _TRANSA, ctypes.c_int32(1))
        kind = _TYPES[case.precision]
        self._a = self._layout(kind, *((depth, rows) if transpose else (rows, depth)), batch, rows * depth)
        self._b = self._layout(kind, depth, columns, batch, 0)
        self._d = self._layout(kind, rows, columns, batch, rows * columns)
        self.algorithms = self._heuristics()

    def _set(self, function: Any, what: ctypes.c_void_p, attribute: int, value: Any) -> None:
        _check(function(what, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))))

    def _layout(self, kind: int, rows: int, columns: int, batch: int, batch_stride: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        _check(self._lib.cublasLtMatrixLayoutCreate(ctypes.byref(layout), kind, *sizes))
        if batch > 1:
            self._set(self._lib.cublasLtMatrixLayoutSetAttribute, layout, _BATCH_COUNT, ctypes.c_int32(batch))
            self._set(self._lib.cublasLtMatrixLayoutSetAttribute, layout, _BATCH_STRIDE, ctypes.c_int64(batch_stride))
        return layout

    def _heuristics(self) -> list[_Heuristic]:
        preference = ctypes.c_void_p()
        _check(self._lib.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        self._set(self._lib.cublasLtMatmulPreferenceSetAttribute, preference, _MAX_WORKSPACE, ctypes.c_uint64(WORKSPACE_BYTES))
        results, count = (_Heuristic * ALGORITHMS)(), ctypes.c_int()
        layouts = self._a, self._b, self._d, self._d
        status = self._lib.cublasLtMatmulAlgoGetHeuristic(
            self._handle, self._operation, *layouts, preference, ALGORITHMS, results, ctypes.byref(count)
        )
        self._lib.cublasLtMatmulPreferenceDestroy(preference)
        if status:
            raise Skip(f"cuBLASLt has no algorithm for this product (status {status})")
        return [result for result in results[: count.value] if result.state == 0]

    def run(self, algorithm: _Heuristic, a: Any, b: Any, d: Any) -> None:
        """Enqueue the product of GPU tensors."""
        pa, pb, pd = (ctypes.c_void_p(t.data_ptr()) for t in (a, b, d))
        _check(
            self._lib.cublasLtMatmul(
                self._handle,
                self._operation,
                ctypes.byref(self._one),
                pa,
                self._a,
                pb,
                self._b,
                ctypes.byref(self._zero),
                pd,
                self._d,
                pd,
                self._d,
                algorithm.algorithm,
                ctypes.c_void_p(self._workspace.data_ptr()),
                ctypes.c_size_t(WORKSPACE_BYTES),
                self._stream,
            )
        )

    def __del__(self) -> None:
        for layout in (getattr(self, name, None) for name in ("_a", "_b", "_d")):
            if layout:
                self._lib.cublasLtMatrixLayoutDestroy(layout)
        if getattr(self, "_operation", None):
            self._lib.cublasLtMatmulDescDestroy(self._operation)
        if getattr(self, "_handle", None):
            self._lib.cublasLtDestroy(self._handle)


Unroll = tuple[str, Callable[[Any], None]]
"""(name, call(x)): leaves x's unrolled matrix in the tensor that belongs to it."""


def _multiply(case: Case, unrolls: list[Unroll], matrix: Any, kernel: int, w_last: Any, w_first: Any) -> list[Candidate]:
    """Every way to unroll with every algorithm for the product."""
    row = case.row
    (p, q), depth = row.out_size, kernel**2 * row.c
    if case.layout == "nhwc":  # Y' [m, n p q] = W' (W [m, depth] row-major, transposed) times the matrix' [depth, n p q]
        product = Product(case, row.m, row.n * p * q, depth, transpose=True)
        operands = (w_last, matrix)
    else:  # Y' [p q, m] = matrix' [p q, depth] times W' [depth, m], for each image
        product = Product(case, p * q, row.m, depth, transpose=False, batch=row.n)
        operands = (matrix, w_first)

    def run(unroll: Callable[[Any], None], algorithm: _Heuristic) -> Callable[[int], None]:
        def call(i: int) -> None:
            unroll(case.xs[i])
            product.run(algorithm, *operands, case.out)

        return call

    return [
        Candidate(f"{how}, cuBLASLt algorithm {number} of {len(product.algorithms)}", run(unroll, algorithm))
        for how, unroll in unrolls
        for number, algorithm in enumerate(product.algorithms, 1)
    ]


def _matrix(case: Case, kernel: int) -> Any:
    p, q = case.row.out_size
    return case.empty(case.row.n * p * q * kernel**2 * case.row.c)


def fused(case: Case) -> list[Candidate]:
    """The map unrolled for the fused kernel."""
    row = case.row
    kernel, matrix = row.fused_kernel, _matrix(case, row.fused_kernel)
    launch = gather(case, (row.h, row.w, row.c), row.out_size, kernel=kernel, stride=row.total_stride, pad=row.pad)
    unroll = ("unrolled", lambda x: launch(x, matrix))
    return _multiply(case, [unroll], matrix, kernel, case.w_fused, case.w_fused_first)


def direct(case: Case) -> list[Candidate]:
    """Box means unrolled: taken while unrolling, or beforehand where taps share them."""
    row = case.row
    if row.pool == 1:
        raise Skip(NO_POOLING)
    matrix, size = _matrix(case, row.kernel), (row.h, row.w, row.c)
    at_once = gather(
        case, size, row.out_size, kernel=row.kernel, stride=row.total_stride, pad=row.pad, pool=row.pool, dilation=row.stride
    )
    unrolls = [("means while unrolling", lambda x: at_once(x, matrix))]
    if not row.pointwise:
        means, z = box_means(case)
        plain = gather(
            case, (*row.box_size, row.c), row.out_size, kernel=row.kernel, stride=row.total_stride, pad=row.pad - row.box_pad
        )

        def in_turn(x: Any) -> None:
            means(x, z)
            plain(z, matrix)

        unrolls.append(("means, then unrolling", in_turn))
    return _multiply(case, unrolls, matrix, row.kernel, case.w, case.w_first)
