# SPDX-License-Identifier: Apache-2.0
"""ConvAvgPool and UpsampleConv in float64 with numpy, straight from its definition, and how far a kernel may be from it."""

import itertools

import numpy as np

from convpool.cuda import Problem, Tactic

UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}


def _attributes(p: Problem) -> dict[str, list[int]]:
    rank, s = len(p.spatial), p.struct
    names = ("pool_kernel", "pool_strides", "pool_dilations", "kernel", "strides", "dilations", "upsample")
    lists = {name: list(getattr(s, name)[:rank]) for name in names}
    lists["pool_pads"], lists["pads"] = list(s.pool_pads[: 2 * rank]), list(s.pads[: 2 * rank])
    return lists


def _pad(x: np.ndarray, pads: list[int]) -> np.ndarray:
    rank = len(pads) // 2
    return np.pad(x, [(0, 0), (0, 0)] + [(pads[i], pads[i + rank]) for i in range(rank)])


def _windows(x: np.ndarray, kernel: list[int], strides: list[int], dilations: list[int]):
    """(offset, x at that offset of every window) for each place of the kernel; x is [N, C, spatial]."""
    sizes = [(x.shape[2 + i] - dilations[i] * (k - 1) - 1) // strides[i] + 1 for i, k in enumerate(kernel)]
    for offset in itertools.product(*(range(k) for k in kernel)):
        places = zip([o * d for o, d in zip(offset, dilations, strict=True)], sizes, strides, strict=True)
        yield offset, x[(slice(None), slice(None), *(slice(a, a + (n - 1) * s + 1, s) for a, n, s in places))]


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
    a = _attributes(p)
    for axis, times in enumerate(a["upsample"]):
        x = np.repeat(x, times, axis=2 + axis)
    places = _windows(_pad(x, a["pool_pads"]), a["pool_kernel"], a["pool_strides"], a["pool_dilations"])
    pooled = sum(view for _, view in places) / np.prod(a["pool_kernel"])
    per_group_c, per_group_m = p.c // p.group, p.m // p.group
    parts, padded = [], _pad(pooled, a["pads"])
    for g in range(p.group):
        channels = padded[:, g * per_group_c : (g + 1) * per_group_c]
        filters = w[g * per_group_m : (g + 1) * per_group_m]
        views = _windows(channels, a["kernel"], a["strides"], a["dilations"])
        taps = ((view, filters[(slice(None), *tap)]) for tap, view in views)
        parts.append(sum(np.einsum("nc...,mc->nm...", view, weights, optimize=True) for view, weights in taps))
    return np.concatenate(parts, axis=1)


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
