# SPDX-License-Identifier: Apache-2.0
"""Checks of one tactic on one case: integers exactly, random data within a derived bound, the same bits twice, nothing outside
written.  Where a case fails, the message is a reproduction."""

import functools
import re
from dataclasses import replace

import ml_dtypes
import numpy as np

from convpool.cuda import Plan, Problem, Tactic, conv_avg_pool
from tests.support.kernels import conv_cases, conv_reference
from tests.support.kernels.gpu_memory import Arena

NUMPY_TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
CASES = conv_cases.all_cases()
RANDOM, INTEGER = "random", "integer"


def sizes(name: str) -> tuple[int, int]:
    """Return kernel and window that the tactic is for; 3 and 2 where it is for many."""
    only = re.search(r"_(?:tma|rs)?(\d)x\d(?:_pool(\d))?$", name)
    return (int(only[1]), int(only[2] or 2)) if only else (3, 2)


def layer_of(tactic: Tactic) -> dict:
    """Windows and steps of a layer of two dimensions that the tactic is for."""
    if tactic.family == "upsample":
        return dict(kernel_shape=3, pool_kernel_shape=1, upsample=2)
    kernel, window = sizes(tactic.name)
    return dict(kernel_shape=kernel, pool_kernel_shape=window, strides=window)


def make_problem(case: dict, dtype: str, layout: str, y_layout: str, tf32: bool, kind: str) -> Problem:
    if kind == INTEGER and case.get("activation") in ("tanh", "sigmoid"):
        case = case | {"activation": None}
    return Problem(**case, dtype=dtype, layout=layout, y_layout=y_layout, allow_tf32=tf32)


@functools.cache
def data_of(index: int, dtype: str, kind: str):
    """x [N,C,...], w, b, residual [N,M,...], scale, shift in float64, exactly representable in dtype, and the sum before the
    activation without bias and residual. Integers: x and shift are left to be multiplied by the size of the pooling window,
    or w is; with a slope of 1/4 in the prologue they are multiples of 4."""
    p, rng = make_problem(CASES[index], dtype, "NCHW", "NCHW", True, kind), np.random.default_rng(index)
    shapes = (p.x_shape, p.w_shape, (p.m,), p.y_shape, (p.c,), (p.c,))
    if kind == INTEGER:
        unit = 4 if p.prologue_activation == "leaky_relu" else 1
        most, factors = (2, 2, 2, 2, 1, 1), (unit, 1, 1, 1, 1, unit)
        data = [rng.integers(-a, a + 1, s).astype(np.float64) * f for s, a, f in zip(shapes, most, factors, strict=True)]
    else:
        small = 1 / np.sqrt(np.prod(p.w_shape[1:]))
        data = [rng.standard_normal(s) * f for s, f in zip(shapes, (1, small, 1, 1, 1, 1), strict=True)]
        data = [a.astype(NUMPY_TYPES[dtype]).astype(np.float64) for a in data]
    x, w, _, _, scale, shift = data
    return *data, conv_reference.linear(p, conv_reference.prologue(p, x, scale, shift), w)


@functools.cache
def magnitudes(index: int, dtype: str):
    """f(x), and the sum of its magnitudes times those of w, of random data."""
    p = make_problem(CASES[index], dtype, "NCHW", "NCHW", True, RANDOM)
    x, w, _, _, scale, shift, _ = data_of(index, dtype, RANDOM)
    x = conv_reference.prologue(p, x, scale, shift)
    return x, conv_reference.linear(p, np.abs(x), np.abs(w))


def moved(array: np.ndarray, layout: str) -> np.ndarray:
    return np.moveaxis(array, 1, -1) if layout == "NHWC" else array


def run_twice(p: Problem, tactic, x, w, b, r, scale, shift, skewed: str = "") -> np.ndarray:
    """y as [N, M, ...] in float64; the array named `skewed` is aligned to its elements only."""
    dtype, y_layout, arena = NUMPY_TYPES[p.dtype], p.y_layout or p.layout, Arena()

    def placed(name: str, data: np.ndarray):
        return arena.input(data, dtype, skewed == name)

    gx, gw = arena.input(moved(x, p.layout), NUMPY_TYPES[p.dtypes[0]], skewed == "x"), placed("w", w)
    gb = placed("b", b) if p.bias else None
    gr = placed("residual", moved(r, y_layout)) if p.residual else None
    factors = {"scale": placed("scale", scale), "shift": placed("shift", shift)} if p.prologue_affine else {}
    gy = arena.output(p.y_shape, dtype, skewed == "y")
    need = p.workspace_bytes(tactic) if tactic is not None else 0
    workspace = arena.output((need // 4,), np.float32) if need else None
    arena.upload()
    s, rank = p.struct, len(p.spatial)
    results = []
    for again in (False, True):
        if again:
            arena.reset()
        if p.upsample is not None or p.prologue_affine > 1:
            Plan(p, tactic=tactic).launch(gx, gw, gy, b=gb, residual=gr, workspace=workspace, **factors)
            results.append(gy.of(arena.download()))
            continue
        conv_avg_pool(
            gx, gw, gb, residual=gr, out=gy, workspace=workspace, tactic=tactic, layout=p.layout, y_layout=p.y_layout,
            pool_kernel_shape=s.pool_kernel[:rank], pool_strides=s.pool_strides[:rank],
            pool_pads=s.pool_pads[: 2 * rank], pool_dilations=s.pool_dilations[:rank], strides=s.strides[:rank],
            pads=s.pads[: 2 * rank], dilations=s.dilations[:rank], group=p.group, activation=p.activation,
            alpha=p.alpha, beta=p.beta, allow_tf32=p.allow_tf32, accumulation=p.accumulation,
            prologue_activation=p.prologue_activation, prologue_alpha=p.prologue_alpha, **factors,
        )  # fmt: skip
        results.append(gy.of(arena.download()))
    assert results[0].tobytes() == results[1].tobytes(), "two runs gave different bits"
    y = results[0].astype(np.float64)
    return np.moveaxis(y, -1, 1) if y_layout == "NHWC" else y


def check(index: int, tactic, dtype: str, layout: str, kind: str, skewed: str = "") -> bool:
    """False if the tactic does not support the case."""
    y_layout = layout if index % 3 else {"NCHW": "NHWC", "NHWC": "NCHW"}[layout]
    p = make_problem(CASES[index], dtype, layout, y_layout, "tf32x3" not in tactic.name, kind)
    if tactic.packed:
        p = replace(p, accumulation="packed")
    if p.why_not(tactic) is not None:
        return False
    x, w, b, r, scale, shift, linear = data_of(index, dtype, kind)
    if kind == INTEGER:  # then box means, or fused weights, are integers
        size = int(np.prod(p.struct.pool_kernel[: len(p.spatial)]))
        if tactic.family == "filter_fused":
            w = w * size
        else:
            x, shift = x * size, shift * size
        linear = np.rint(linear * size)  # the reference divides by size first
    before = linear + (b.reshape(1, -1, *[1] * len(p.spatial)) if p.bias else 0) + (r if p.residual else 0)
    exact = conv_reference.activate(p, before)
    try:
        y = run_twice(p, tactic, x, w, b, r, scale, shift, skewed)
        assert not np.isnan(y).any(), f"{np.isnan(y).sum()} of {y.size} outputs were not written"
        if kind == INTEGER:
            expected = exact.astype(np.float32).astype(NUMPY_TYPES[dtype]).astype(np.float64)
            wrong = np.argwhere(y != expected)
            assert not len(wrong), f"at {wrong[0]} got {y[tuple(wrong[0])]}, expected {expected[tuple(wrong[0])]}"
        else:
            x_after, sums = magnitudes(index, dtype)
            allowed = conv_reference.bound(p, tactic, x_after, w, sums, before)
            excess = np.abs(y - exact) - allowed
            at = np.unravel_index(np.argmax(excess), excess.shape)
            assert excess[at] <= 0, f"at {at} got {y[at]}, expected {exact[at]} +- {allowed[at]}"
    except Exception as error:
        raise AssertionError(f"{tactic.name}, {kind} data, seed {index}, {p}: {error}") from error
    return True


def check_float_image(index: int, tactic: Tactic, dtype: str, layout: str) -> bool:
    """Floats in place of X give the bits that they give when rounded; False if the tactic does not support the case."""
    y_layout = layout if index % 3 else {"NCHW": "NHWC", "NHWC": "NCHW"}[layout]
    rounded = make_problem(CASES[index], dtype, layout, y_layout, False, RANDOM)
    floats = replace(rounded, x_dtype="float32")
    if int(np.prod(rounded.w_shape[1:])) > 64 or floats.why_not(tactic) is not None:
        return False
    x = np.random.default_rng(index).standard_normal((rounded.n, rounded.c, *rounded.spatial)).astype(np.float32)
    x.flat[:2] = 1e6, -1e6  # infinite in float16
    others = data_of(index, dtype, RANDOM)[1:6]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = run_twice(rounded, tactic, x, *others)
        got = run_twice(floats, tactic, x, *others, "x" if index % 2 else "")
    np.testing.assert_array_equal(got, expected, f"{tactic.name}, {dtype}, {layout}, case {index}")
    return True
