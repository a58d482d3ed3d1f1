# SPDX-License-Identifier: Apache-2.0
"""ConvAvgPool and UpsampleConv of a problem in float64, and how far a kernel may be from it."""

import numpy as np

from convpool.algebra import reference
from convpool.algebra.expand import UpsampleSpec
from convpool.algebra.geometry import ConvSpec, PoolSpec
from convpool.cuda import Problem, Tactic

UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}


def _specs(p: Problem) -> tuple[UpsampleSpec, PoolSpec, ConvSpec]:
    """Upsampling, pooling, one of which does nothing, and convolution."""
    rank, s = len(p.spatial), p.struct
    pooling = s.pool_kernel[:rank], s.pool_strides[:rank], s.pool_pads[: 2 * rank], s.pool_dilations[:rank]
    convolution = s.kernel[:rank], s.strides[:rank], s.pads[: 2 * rank], s.dilations[:rank]
    pool, conv = PoolSpec(*map(tuple, pooling)), ConvSpec(*map(tuple, convolution), p.group)
    return UpsampleSpec(tuple(s.upsample[:rank])), pool, conv


def prologue(p: Problem, x: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """f(x) of x [N, C, spatial]; scale and shift [C]."""
    if p.prologue_affine:
        channels = (1, -1, *[1] * len(p.spatial))
        x = x * scale.reshape(channels) + shift.reshape(channels)
    match p.prologue_activation:
        case "relu":
            return np.maximum(x, 0)
        case "leaky_relu":
            return np.where(x < 0, x * np.float64(np.float32(p.prologue_alpha)), x)
    return x


def linear(p: Problem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Conv(AveragePool(x), w), or Conv(Upsample(x), w), with x [N, C, spatial], w [M, kernel, C/group]; the result is
    [N, M, out]."""
    up, pool, conv = _specs(p)
    return reference.conv(reference.average_pool(reference.upsample(x, up), pool), np.moveaxis(w, -1, 1), None, conv)


def activate(p: Problem, y: np.ndarray) -> np.ndarray:
    match p.activation:
        case "relu":
            return np.maximum(y, 0)
        case "leaky_relu":
            return np.where(y < 0, y * np.float64(np.float32(p.alpha)), y)
        case "tanh":
            return np.tanh(y)
        case "sigmoid":
            return 1 / (1 + np.exp(-y))
        case "clip":
            return np.clip(y, np.float32(p.alpha), np.float32(p.beta))
    return y


def bound(p: Problem, tactic: Tactic, x: np.ndarray, w: np.ndarray, sums: np.ndarray, before: np.ndarray) -> np.ndarray:
    """How far from the exact result a correct kernel may be; x is f(X), `sums` is linear(|x|, |w|), and `before` the exact
    result before the activation.

    With `sums` of |box mean| |w|: each product has an operand rounded to the type that is multiplied (box means, or
    fused weights: u; both to TF32: 2u; 3xTF32: three products of 22 bits), the K terms are added in fp32 by units that
    truncate (K + 8 times 2^-23), and the result is rounded once to the type of y. Operands of float16 below 2^-14 are
    subnormal: 2^-25 each. Packed box means are rounded twice, and are sums of four quarters, which may be subnormal. A
    prologue is one rounding to the type or to fp32, of fma, and with a slope two more, of the slope and of the product. The
    activations are no steeper than 1; tanh and exp are good to a few units of fp32.
    """
    terms = int(np.prod(p.w_shape[1:])) * 2  # filter_fused adds up to 16/9 as many at 3x3; each with smaller weights
    operand = UNIT_ROUNDOFF[p.dtype] * (2 if tactic.packed else 1)
    if tactic.family == "generic":
        operand = 2.0**-23
    elif "tf32x3" in tactic.name:
        operand = 3 * 2.0**-22
    elif "tf32" in tactic.name:
        operand = 2 * 2.0**-11
    if "differences" in tactic.name:  # a sum of weights times a pixel; a weight and a difference of pixels, all rounded
        near = np.lib.stride_tricks.sliding_window_view(np.pad(np.abs(x), [(0, 0)] * (x.ndim - 1) + [(1, 1)]), 3, -1).sum(-1)
        sums, operand = linear(p, near, np.abs(w)), operand * (2.5 if "tf32" in tactic.name else 3)
    prologue = 0.0
    if p.prologue_affine or p.prologue_activation:
        fp32 = p.dtype == "float32" or tactic.family == "generic"
        prologue = (3 if p.prologue_activation == "leaky_relu" else 1) * (2.0**-24 if fp32 else UNIT_ROUNDOFF[p.dtype])
    tiny = 1e-38
    if p.dtype == "float16":
        subnormal = (2 if prologue else 1) * (4 if tactic.packed else 1)
        tiny = subnormal * terms * 2.0**-25 * max(np.abs(x).max(), np.abs(w).max())
    error = sums * (operand + prologue + (terms + 8) * 2.0**-23) + np.abs(before) * 2.0**-22 + tiny
    return error * (1 + UNIT_ROUNDOFF[p.dtype]) + np.abs(activate(p, before)) * UNIT_ROUNDOFF[p.dtype] + 2.0**-24
