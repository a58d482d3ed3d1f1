"""Float64 references in plain numpy, written for plainness: every optimised form is checked against these."""

from __future__ import annotations

from itertools import product

import numpy as np

from convpool.geometry import ConvSpec, PoolSpec


def average_pool(x: np.ndarray, spec: PoolSpec) -> np.ndarray:
    """Average pooling that counts its zero padding (ONNX AveragePool with count_include_pad = 1).

    x: [N, C, spatial...], any real type.  Returns float64 [N, C, pooled spatial...].
    """
    padded = _pad(x, spec.pads)
    out = spec.output_size(x.shape[2:])
    total = np.zeros(x.shape[:2] + out)
    for offset in product(*(range(p) for p in spec.kernel_shape)):
        total += padded[(..., *_window(offset, spec.dilations, spec.strides, out))]
    return total / spec.taps


def conv(x: np.ndarray, w: np.ndarray, b: np.ndarray | None, spec: ConvSpec) -> np.ndarray:
    """Convolution (cross-correlation) as ONNX Conv defines it.

    x: [N, C, spatial...]; w: [M, C/group, kernel...]; b: [M] or None.  Returns float64 [N, M, output spatial...].
    """
    padded = _pad(x, spec.pads)
    out = spec.output_size(x.shape[2:])
    n, m, g = x.shape[0], w.shape[0], spec.group
    total = np.zeros((n, g, m // g, *out))
    weight = w.astype(np.float64).reshape(g, m // g, *w.shape[1:])
    for tap in product(*(range(k) for k in spec.kernel_shape)):
        patch = padded[(..., *_window(tap, spec.dilations, spec.strides, out))]
        total += np.einsum("ngc...,gmc->ngm...", patch.reshape(n, g, -1, *out), weight[(..., *tap)])
    total = total.reshape(n, m, *out)
    return total if b is None else total + b.astype(np.float64).reshape(-1, *[1] * spec.rank)


def conv_avg_pool(x: np.ndarray, w: np.ndarray, b: np.ndarray | None, pool: PoolSpec, spec: ConvSpec) -> np.ndarray:
    """The operator ai.convpool::ConvAvgPool, by its definition.

    x: [N, C, spatial...]; w: [M, kernel..., C/group], channels last; b: [M] or None.
    Returns float64 [N, M, output spatial...].
    """
    return conv(average_pool(x, pool), np.moveaxis(w, -1, 1), b, spec)


def _pad(x: np.ndarray, pads: tuple[int, ...]) -> np.ndarray:
    r = len(pads) // 2
    return np.pad(x.astype(np.float64), [(0, 0), (0, 0), *((pads[i], pads[r + i]) for i in range(r))])


def _window(offset: tuple[int, ...], dilations: tuple[int, ...], strides: tuple[int, ...], out: tuple[int, ...]):
    """Index of the input elements that meet the kernel element `offset`, one per output element."""
    return (
        slice(o * d, o * d + s * (n - 1) + 1, s) for o, d, s, n in zip(offset, dilations, strides, out, strict=True)
    )
