# SPDX-License-Identifier: Apache-2.0
"""Float64 references in plain numpy, written for plainness: every optimised form is checked against these."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from convpool.algebra.expand import UpsampleSpec
from convpool.algebra.geometry import ConvSpec, PoolSpec
from convpool.algebra.parts import LAYOUTS, Parts

PLAIN = Parts()
"""No prologue, residual or epilogue."""


def average_pool(x: np.ndarray, spec: PoolSpec) -> np.ndarray:
    """Average pooling that counts its zero padding (ONNX AveragePool with count_include_pad = 1).

    x: [N, C, spatial...], any real type.  Returns float64 [N, C, pooled spatial...].
    """
    padded = _pad(x, spec.pads)
    out = spec.output_size(x.shape[2:])
    total = np.zeros(x.shape[:2] + out)
    for offset in product(*(range(p) for p in spec.kernel_shape)):
        total += padded[_window(offset, spec.dilations, spec.strides, out)]
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
        patch = padded[_window(tap, spec.dilations, spec.strides, out)]
        index: tuple[Any, ...] = (..., *tap)
        total += np.einsum("ngc...,gmc->ngm...", patch.reshape(n, g, w.shape[1], *out), weight[index], optimize=True)
    total = total.reshape(n, m, *out)
    return total if b is None else total + b.astype(np.float64).reshape(-1, *[1] * spec.rank)


def upsample(x: np.ndarray, spec: UpsampleSpec) -> np.ndarray:
    """Nearest upsampling of x [N, C, spatial...], as ONNX Resize does with whole scales, asymmetric positions and floor."""
    for axis, factor in enumerate(spec.factors):
        x = np.repeat(x, factor, axis=axis + 2)
    return x


def conv_avg_pool(
    x: np.ndarray,
    w: np.ndarray,
    b: np.ndarray | None,
    before: PoolSpec | UpsampleSpec,
    spec: ConvSpec,
    parts: Parts = PLAIN,
    scale: np.ndarray | None = None,
    shift: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    channels_last: int = 0,
) -> np.ndarray:
    """ConvAvgPool, UpsampleConv and their fused variants, by their definition in docs/operator.md.

    x: [N, C, spatial...]; w: [M, kernel..., C/group], channels last; b: [M] or None.  before: in front of the convolution.
    scale, shift: [C], or [N, C, 1...] where parts.modulated; residual: the output's shape, where parts.residual.
    channels_last: as the attribute, a number of `algebra.parts.LAYOUTS`; x or the result then has its channels behind the
    spatial axes.  Returns float64 [N, M, output spatial...].
    """
    x_last, y_last = LAYOUTS[channels_last]
    z = _channels_first(x, x_last).astype(np.float64)
    if parts.normalized:
        groups = z.reshape(len(z), parts.norm_groups, -1)
        deviation = np.sqrt(groups.var(axis=2, keepdims=True) + parts.epsilon)
        z = ((groups - groups.mean(axis=2, keepdims=True)) / deviation).reshape(z.shape)
    if parts.affine:
        assert scale is not None and shift is not None
        z = z * _per_channel(scale, spec.rank) + _per_channel(shift, spec.rank)
    z = ACTIVATIONS[parts.prologue](z, parts.prologue_alpha)
    z = average_pool(z, before) if isinstance(before, PoolSpec) else upsample(z, before)
    y = conv(z, np.moveaxis(w, -1, 1), b, spec)
    if parts.residual:
        assert residual is not None
        r = _channels_first(residual, y_last)
        assert r.shape == y.shape
        y = y + r.astype(np.float64)
    y = ACTIVATIONS[parts.epilogue](y, parts.epilogue_alpha)
    return np.moveaxis(y, 1, -1) if y_last else y


ACTIVATIONS: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "": lambda x, alpha: x,
    "Relu": lambda x, alpha: np.where(x < 0, x * 0.0, x),
    "LeakyRelu": lambda x, alpha: np.where(x < 0, x * alpha, x),
    "Tanh": lambda x, alpha: np.tanh(x),
    "Sigmoid": lambda x, alpha: 0.5 * (1 + np.tanh(0.5 * x)),
    "Silu": lambda x, alpha: x * (0.5 * (1 + np.tanh(0.5 * x))),
}
"""Every activation of a prologue or epilogue, elementwise, on x and its slope."""


def _channels_first(x: np.ndarray, last: bool) -> np.ndarray:
    return np.moveaxis(x, -1, 1) if last else x


def _per_channel(values: np.ndarray, rank: int) -> np.ndarray:
    return values.astype(np.float64).reshape(*values.shape[:2], *[1] * rank)


def _pad(x: np.ndarray, pads: tuple[int, ...]) -> np.ndarray:
    r = len(pads) // 2
    return np.pad(x.astype(np.float64), [(0, 0), (0, 0), *((pads[i], pads[r + i]) for i in range(r))])


def _window(
    offset: tuple[int, ...], dilations: tuple[int, ...], strides: tuple[int, ...], out: tuple[int, ...]
) -> tuple[Any, ...]:
    """Index of the input elements that meet the kernel element `offset`, one per output element."""
    return (..., *(slice(o * d, o * d + s * (n - 1) + 1, s) for o, d, s, n in zip(offset, dilations, strides, out, strict=True)))
