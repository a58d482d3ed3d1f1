# SPDX-License-Identifier: Apache-2.0
"""Nine 3x3 filters and the pooling behind them, in whole numbers.

    S[f, i, j] = sum over the window of sum over a, b of K[f, a, b] X[. + a, . + b]       average, box
    Y[f, i, j] = S rounded to a multiple of the filter's divisor times the window, within 0 to 255

The sums are linear, so the window may be summed first: 9 products for an output instead of 9 for each of its pixels.
Rounding comes last, once; rounding (or the remainder modulo 256) between filter and pooling would forbid it.  The largest of
a window is not linear either: for `max` every filtered pixel is rounded, and then compared.  Filters see no padding, and
windows that do not fit are left out, so an image of H x W gives (H - 2) // p x (W - 2) // p, or H - 1 - p x W - 1 - p for box
means.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Images = NDArray[np.uint8]

NAMES = ("vertical", "horizontal", "diagonal", "antidiagonal", "Sobel x", "Sobel y", "Laplace", "sharpen", "blur")
FILTERS = np.array(
    [
        [[-1, 2, -1], [-1, 2, -1], [-1, 2, -1]],
        [[-1, -1, -1], [2, 2, 2], [-1, -1, -1]],
        [[2, -1, -1], [-1, 2, -1], [-1, -1, 2]],
        [[-1, -1, 2], [-1, 2, -1], [2, -1, -1]],
        [[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]],
        [[-1, -2, -1], [0, 0, 0], [1, 2, 1]],
        [[0, 1, 0], [1, -4, 1], [0, 1, 0]],
        [[0, -1, 0], [-1, 5, -1], [0, -1, 0]],
        [[1, 2, 1], [2, 4, 2], [1, 2, 1]],
    ],
    np.int32,
)
DIVISORS = np.array([1, 1, 1, 1, 1, 1, 1, 1, 16], np.int32)
COUNT, SIDE = 9, 3
KINDS = ("average", "box", "max")
"""average and max: windows side by side; box: a window at every pixel."""


@dataclass(frozen=True)
class Pooling:
    """kind: one of `KINDS`; window: its side."""

    kind: str = "average"
    window: int = 2

    @property
    def stride(self) -> int:
        """The step from window to window."""
        return 1 if self.kind == "box" else self.window

    def out_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of a filter's result.  Raises ValueError for images too small."""
        rows, columns = ((size - SIDE + 1 - self.window) // self.stride + 1 for size in (height, width))
        if min(rows, columns) < 1:
            raise ValueError(f"image; got {width}x{height}, expected at least {self.window + SIDE - 1} pixels each way")
        return rows, columns


def finish(sums: NDArray[np.integer], pooling: Pooling) -> Images:
    """Sums [N, 9, P, Q] over filters and windows, rounded to bytes: what every backend must give."""
    divisors = DIVISORS * (1 if pooling.kind == "max" else pooling.window**2)
    per_filter = divisors[:, None, None]
    return np.clip((sums + per_filter // 2) // per_filter, 0, 255).astype(np.uint8)


def windows(x: NDArray[np.integer], side: int, stride: int, rows: int, columns: int) -> list[NDArray[np.integer]]:
    """Views of x [..., H, W]: for each place in the window its elements of all windows, [..., rows, columns]."""
    reach = (rows - 1) * stride + 1, (columns - 1) * stride + 1
    return [x[..., u : u + reach[0] : stride, v : v + reach[1] : stride] for u in range(side) for v in range(side)]


def run_numpy(images: Images, pooling: Pooling) -> Images:
    """The bank on images [N, H, W]: sums of windows first where the pooling is linear.  Returns [N, 9, P, Q]."""
    x = images.astype(np.int32)
    height, width = x.shape[1:]
    rows, columns = pooling.out_size(height, width)
    if pooling.kind == "max":
        filtered = finish(_filtered(x, 1, height - SIDE + 1, width - SIDE + 1), pooling)
        return np.maximum.reduce(windows(filtered, pooling.window, pooling.stride, rows, columns))
    box_size = height - pooling.window + 1, width - pooling.window + 1
    boxes = np.add.reduce(windows(x, pooling.window, 1, *box_size))
    return finish(_filtered(boxes, pooling.stride, rows, columns), pooling)


def _filtered(x: NDArray[np.integer], stride: int, rows: int, columns: int) -> NDArray[np.integer]:
    """Sums [N, 9, rows, columns] of x [N, H, W] with the nine filters."""
    taps = np.stack(windows(x, SIDE, stride, rows, columns), axis=1)
    return np.einsum("ft,ntpq->nfpq", FILTERS.reshape(COUNT, -1), taps, optimize=True)
