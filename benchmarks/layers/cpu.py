# SPDX-License-Identifier: Apache-2.0
"""The CPU: a plain loop in C, compiled here, and onnxruntime on the original graph.  Both in float32, channels first."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.layers.record import Result, significant
from benchmarks.layers.rows import Row
from convpool.cuda.timing import summarize

LIMIT = 1e-4
RUNS, BUDGET_S = 15, 2.0
"""Timed runs, at least three, stop when the time is spent."""

LOOP = """
void conv_pool(const float *x, const float *w, float *y, float *between, const int *g) {
    int n = g[0], c = g[1], m = g[2], h = g[3], wd = g[4], k = g[5], pad = g[6], stride = g[7], pool = g[8], step = g[9];
    int rows = (h + 2 * pad - k) / stride + 1, cols = (wd + 2 * pad - k) / stride + 1;
    int p = (rows - pool) / step + 1, q = (cols - pool) / step + 1;
    for (int image = 0; image < n; ++image)
        for (int map = 0; map < m; ++map) {
            for (int i = 0; i < rows; ++i)
                for (int j = 0; j < cols; ++j) {
                    float sum = 0;
                    for (int channel = 0; channel < c; ++channel)
                        for (int a = 0; a < k; ++a)
                            for (int b = 0; b < k; ++b) {
                                int row = i * stride - pad + a, col = j * stride - pad + b;
                                if (row >= 0 && row < h && col >= 0 && col < wd)
                                    sum += x[((image * c + channel) * h + row) * (long)wd + col]
                                           * w[((map * c + channel) * k + a) * k + b];
                            }
                    between[i * cols + j] = sum;
                }
            for (int i = 0; i < p; ++i)
                for (int j = 0; j < q; ++j) {
                    float sum = 0;
                    for (int u = 0; u < pool; ++u)
                        for (int v = 0; v < pool; ++v) sum += between[(i * step + u) * cols + j * step + v];
                    y[((image * m + map) * p + i) * (long)q + j] = sum / (pool * pool);
                }
        }
}
"""


def reference(x: np.ndarray, w: np.ndarray, row: Row) -> np.ndarray:
    """The definition in float64: x [N, C, H, W], w [M, C, k, k] give [N, M, P, Q]."""
    rows, columns = row.conv_size
    padding = ((0, 0), (0, 0), (row.pad, row.pad), (row.pad, row.pad))
    x = np.pad(x.astype(np.float64), padding)
    sums = np.zeros((x.shape[0], row.m, rows * columns))
    for a in range(row.kernel):
        for b in range(row.kernel):
            taps = x[:, :, a :: row.stride, b :: row.stride][:, :, :rows, :columns]
            sums += w[:, :, a, b].astype(np.float64) @ taps.reshape(x.shape[0], row.c, -1)
    maps = sums.reshape(x.shape[0], row.m, rows, columns)
    windows = np.lib.stride_tricks.sliding_window_view(maps, (row.pool, row.pool), (2, 3))
    return windows[:, :, :: row.pool_stride, :: row.pool_stride].mean((-1, -2))


def _loop(row: Row) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    function = _compiled()
    numbers = (ctypes.c_int * 10)(row.n, row.c, row.m, row.h, row.w, row.kernel, row.pad, row.stride, row.pool, row.pool_stride)
    between, y = np.empty(row.conv_size, np.float32), np.empty((row.n, row.m, *row.out_size), np.float32)

    def call(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        function(*(array.ctypes.data_as(ctypes.c_void_p) for array in (x, w, y, between)), numbers)
        return y

    return call


@functools.cache
def _compiled() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "loop.c"), Path(folder, "loop.so")
        source.write_text(LOOP)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True, capture_output=True)
        function = ctypes.CDLL(str(library)).conv_pool
    function.restype = None
    return function


def _onnxruntime(row: Row, w: np.ndarray) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    from onnx import TensorProto, helper, numpy_helper

    from convpool.check.session_process import open_session

    conv = helper.make_node("Conv", ["x", "w"], ["t"], strides=[row.stride] * 2, pads=[row.pad] * 4)
    pool = helper.make_node("AveragePool", ["t"], ["y"], kernel_shape=[row.pool] * 2, strides=[row.pool_stride] * 2)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (row.n, row.c, row.h, row.w))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, (row.n, row.m, *row.out_size))
    graph = helper.make_graph([conv, pool], "layer", [x], [y], [numpy_helper.from_array(w, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = open_session(model.SerializeToString(), None, optimize=True, spin=True)
    return lambda x, w: session.run(None, {"x": x})[0]


def measure(name: str, row: Row) -> Result:
    """The result of "cpu_loop" or "onnxruntime_cpu" on a row."""
    if name == "cpu_loop" and shutil.which("cc") is None:
        return {"skipped": "no C compiler"}
    random = np.random.default_rng(row.c)
    x = random.standard_normal((row.n, row.c, row.h, row.w), np.float32)
    w = random.standard_normal((row.m, row.c, row.kernel, row.kernel), np.float32) / (row.c * row.kernel**2) ** 0.5
    call = _loop(row) if name == "cpu_loop" else _onnxruntime(row, w)
    how = "one core, cc -O2" if name == "cpu_loop" else "original graph, fp32"
    right = reference(x, w, row)
    error = float(np.linalg.norm(call(x, w) - right) / np.linalg.norm(right))
    if not error <= LIMIT:
        return {"wrong": error, "how": how}
    times: list[float] = []
    deadline = time.perf_counter() + BUDGET_S
    while len(times) < 3 or (len(times) < RUNS and time.perf_counter() < deadline):
        start = time.perf_counter()
        call(x, w)
        times.append((time.perf_counter() - start) * 1e6)
    return {**summarize(times), "error": significant(error), "exact": False, "how": how}
