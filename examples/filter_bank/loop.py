# SPDX-License-Identifier: Apache-2.0
"""The bank as a plain loop on one core, compiled here: every filter on every pixel, then the pooling."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from bank import COUNT, DIVISORS, FILTERS, SIDE, Images, Pooling

SOURCE = r"""
#include <stdint.h>
static int byte_of(int sum, int divisor) {
    int value = (sum + divisor / 2) / divisor;
    return value < 0 || sum + divisor / 2 < 0 ? 0 : value > 255 ? 255 : value;
}
/* x [n][h][w], filters [9][3][3], filtered [h - 2][w - 2], y [n][9][p][q] */
void bank(const uint8_t *x, const int *filters, const int *divisors, int *filtered, uint8_t *y, int n, int h, int w, int p, int q,
          int window, int stride, int is_max) {
    const int rows = h - 2, columns = w - 2;
    for (int image = 0; image < n; ++image)
        for (int f = 0; f < 9; ++f) {
            for (int i = 0; i < rows; ++i)
                for (int j = 0; j < columns; ++j) {
                    int sum = 0;
                    for (int a = 0; a < 3; ++a)
                        for (int b = 0; b < 3; ++b)
                            sum += filters[(f * 3 + a) * 3 + b] * x[((long)image * h + i + a) * w + j + b];
                    filtered[(long)i * columns + j] = is_max ? byte_of(sum, divisors[f]) : sum;
                }
            for (int i = 0; i < p; ++i)
                for (int j = 0; j < q; ++j) {
                    int result = 0;
                    for (int u = 0; u < window; ++u)
                        for (int v = 0; v < window; ++v) {
                            int value = filtered[(long)(i * stride + u) * columns + j * stride + v];
                            result = !is_max ? result + value : value > result ? value : result;
                        }
                    y[(((long)image * 9 + f) * p + i) * q + j] = is_max ? result : byte_of(result, divisors[f] * window * window);
                }
        }
}
"""


@functools.cache
def _compiled() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "bank.c"), Path(folder, "bank.so")
        source.write_text(SOURCE)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        return ctypes.CDLL(str(library))


def run_loop(images: Images, pooling: Pooling) -> Images:
    """Do what `bank.run_numpy` does.  Raises FileNotFoundError without a C compiler."""
    n, height, width = images.shape
    rows, columns = pooling.out_size(height, width)
    filtered = np.empty((height - SIDE + 1, width - SIDE + 1), np.int32)
    y = np.empty((n, COUNT, rows, columns), np.uint8)
    arrays = (np.ascontiguousarray(images), FILTERS, DIVISORS, filtered, y)
    numbers = (n, height, width, rows, columns, pooling.window, pooling.stride, int(pooling.kind == "max"))
    _compiled().bank(*(array.ctypes.data_as(ctypes.c_void_p) for array in arrays), *numbers)
    return y
