# SPDX-License-Identifier: Apache-2.0
"""Types of X, W and Y: 8-bit ones, which `generic` runs with exact sums."""

import ctypes
import re
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from convpool.cuda import Problem, ProblemError, conv_avg_pool, find_tactic, library, tactics
from tests.support.kernels import conv_reference
from tests.support.kernels.gpu_memory import Arena

GENERIC = "conv_avgpool_generic"
H200 = dict(cc=90, shared_bytes=232448)
LAYER = dict(n=2, c=12, m=6, spatial=(9, 10), kernel_shape=3, pool_kernel_shape=(2, 3), pool_pads=1, strides=2, pads=1, group=2)
NUMPY_TYPES = {
    "int8": np.int8, "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
}  # fmt: skip
EIGHT_BIT = ("int8", "float8_e4m3fn")


@pytest.mark.parametrize("dtype", EIGHT_BIT)
@pytest.mark.parametrize("y_dtype", ["float16", "bfloat16", "float32"])
def test_generic_alone_runs_8_bit_types(dtype, y_dtype):
    problem = Problem(**LAYER, dtype=dtype, y_dtype=y_dtype, w_scale=True, bias=True, residual=True, activation="tanh")
    assert problem.why_not(GENERIC, **H200) is None
    assert problem.default_tactic(**H200, multiprocessors=132, max_workspace_bytes=2**40).name == GENERIC
    name = {"int8": "I8", "float8_e4m3fn": "F8E4M3"}[dtype]
    for tactic in tactics():
        if tactic.name != GENERIC:
            assert f"dtype; got {name}, expected" in problem.why_not(tactic, **H200), tactic.name
            assert problem.why_not(tactic, **H200).endswith("use the tactic generic")


def test_y_of_8_bit_types_is_float32_unless_named():
    assert Problem(**LAYER, dtype="int8").dtypes == ("int8", "int8", "float32")
    assert Problem(**LAYER, dtype="int8", y_dtype="float16").dtypes == ("int8", "int8", "float16")
    assert Problem(**LAYER, dtype="float16").dtypes == ("float16",) * 3
    assert Problem(**LAYER, dtype="bfloat16", x_dtype="float32").dtypes == ("float32", "bfloat16", "bfloat16")


def test_unknown_accumulation_is_refused():
    problem = Problem(**LAYER)
    problem.struct.accumulation = 2
    with pytest.raises(ProblemError, match=r"accumulation; got 2, expected 0 \(the types' default\) or 1 \(packed\)"):
        problem.y_shape  # noqa: B018
    with pytest.raises(ProblemError, match="accumulation: unknown; got 'fp16', expected 'default' or 'packed'"):
        Problem(**LAYER, accumulation="fp16")


def test_packed_sums_only_where_the_problem_allows_them():
    layer = dict(n=64, c=128, m=64, spatial=(64, 64), kernel_shape=3, pool_kernel_shape=2, pool_pads=1, strides=2, layout="NHWC")
    packed = [tactic for tactic in tactics() if tactic.packed]
    assert packed and {tactic.dtype for tactic in packed} == {"float16", "bfloat16"}
    for tactic in packed:
        assert tactic.roundings == 2
        layout = "NCHW" if "_nchw" in tactic.name else "NHWC"
        exact = Problem(**layer | dict(layout=layout), dtype=tactic.dtype)
        assert "accumulation; got 0 (the default), expected 1 (packed); use a tactic that is not" in exact.why_not(tactic, **H200)
        kernels = (3, 5)  # that a tactic may be for
        allowed = [replace(exact, kernel_shape=kernel, accumulation="packed") for kernel in kernels]
        assert sum(problem.why_not(tactic, **H200) is None for problem in allowed) == 1
    for dtype in ("float16", "bfloat16"):
        for size in (8, 16, 32, 64):
            problem = Problem(**layer | dict(spatial=(size, size)), dtype=dtype)
            assert not problem.default_tactic(**H200, multiprocessors=132, max_workspace_bytes=2**40).packed
    floats = Problem(**layer, dtype="float32", accumulation="packed")
    assert floats.default_tactic(**H200, multiprocessors=132, max_workspace_bytes=2**40).roundings == 1


@pytest.mark.parametrize(
    "fields, pointers, status, reason",
    [
        (dict(w_scale=True), {}, 1, "tensors: w_scale is null"),
        (dict(w_scale=True), dict(w_scale=(1 << 20) + 2), 4, "tensors: w_scale is not aligned to its 4-byte elements"),
        (dict(bias=True), dict(b=(1 << 20) + 2), 4, "tensors: b is not aligned to its 4-byte elements"),
        (dict(bias=True, y_dtype="float16"), dict(b=(1 << 20) + 1), 4, "tensors: b is not aligned to its 2-byte elements"),
        ({}, dict(y=(1 << 20) + 2), 4, "tensors: y is not aligned to its 4-byte elements"),
    ],
)
def test_pointers_are_checked_by_their_own_types(fields, pointers, status, reason):
    """x and w, of bytes, may be anywhere."""
    tensors = library.TensorsStruct(struct_size=ctypes.sizeof(library.TensorsStruct), x=(1 << 20) + 1, w=(1 << 20) + 3, y=1 << 20)
    for name, value in pointers.items():
        setattr(tensors, name, value)
    assert library.load().convpool_launch(Problem(**LAYER, dtype="int8", **fields).struct, 1, tensors, None) == status
    assert library.last_error() == reason


def random_bytes(rng, dtype: str, shape) -> np.ndarray:
    """Every number of the type, the largest and smallest too; no NaN."""
    data = rng.integers(0, 256, shape).astype(np.uint8)
    if dtype == "float8_e4m3fn":
        data[(data & 0x7F) == 0x7F] = 0x7E
    return data.view(NUMPY_TYPES[dtype])


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("y_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", EIGHT_BIT)
@pytest.mark.parametrize("w_scale", [False, True])
@pytest.mark.parametrize(
    "case", [{}, dict(bias=True, residual=True, activation="relu"), dict(spatial=(5, 6, 7), pool_kernel_shape=2)]
)
def test_sums_of_8_bit_types_are_exact(gpu, case, w_scale, dtype, y_dtype, layout):
    """Sums of few products fit float64, so numpy's are exact too: what remains is one division and the roundings of Y."""
    p = Problem(**(LAYER | case), dtype=dtype, y_dtype=y_dtype, w_scale=w_scale, layout=layout)
    rng, arena, rank = np.random.default_rng(7), Arena(), len(p.spatial)
    x, w = random_bytes(rng, dtype, (p.n, p.c, *p.spatial)), random_bytes(rng, dtype, p.w_shape)
    window = np.prod(p.struct.pool_kernel[:rank])
    sums = np.rint(conv_reference.linear(p, x.astype(np.float64) * window, w.astype(np.float64)) * 2.0**18) / 2.0**18
    scale = rng.uniform(2.0**-9, 2.0**-8, p.m).astype(np.float32)
    b = rng.standard_normal(p.m).astype(NUMPY_TYPES[y_dtype])
    r = rng.standard_normal(sums.shape).astype(NUMPY_TYPES[y_dtype])
    by_channel = (1, -1, *[1] * rank)
    exact = sums / window * (scale.astype(np.float64).reshape(by_channel) if w_scale else 1)
    exact = exact + (b.astype(np.float64).reshape(by_channel) if p.bias else 0) + (r.astype(np.float64) if p.residual else 0)
    exact = conv_reference.activate(p, exact).astype(np.float32).astype(NUMPY_TYPES[y_dtype]).astype(np.float64)

    def placed(array: np.ndarray):
        return np.moveaxis(array, 1, -1) if layout == "NHWC" else array

    gx, gw = arena.input(placed(x), x.dtype), arena.input(w, w.dtype)
    gb = arena.input(b, b.dtype) if p.bias else None
    gr = arena.input(placed(r), r.dtype) if p.residual else None
    gs = arena.input(scale, np.float32) if w_scale else None
    gy = arena.output(p.y_shape, NUMPY_TYPES[y_dtype])
    arena.upload()
    s = p.struct
    conv_avg_pool(
        gx, gw, gb, residual=gr, w_scale=gs, out=gy, layout=layout, pool_kernel_shape=s.pool_kernel[:rank],
        pool_pads=s.pool_pads[: 2 * rank], strides=s.strides[:rank], pads=s.pads[: 2 * rank], group=p.group,
        activation=p.activation,
    )  # fmt: skip
    y = gy.of(arena.download()).astype(np.float64)
    np.testing.assert_array_equal(np.moveaxis(y, -1, 1) if layout == "NHWC" else y, exact)


def test_nan_of_fp8_stays_nan(gpu):
    p = Problem(n=1, c=1, m=2, spatial=(4,), kernel_shape=1, pool_kernel_shape=2, pool_strides=2, dtype="float8_e4m3fn")
    arena, x = Arena(), np.array([[[1, np.nan, 2, 3]]]).astype(ml_dtypes.float8_e4m3fn)
    gx, gw = arena.input(x, x.dtype), arena.input(np.ones((2, 1, 1)), x.dtype)
    gy = arena.output(p.y_shape, np.float32)
    arena.upload()
    conv_avg_pool(gx, gw, out=gy, pool_kernel_shape=2, pool_strides=2, tactic=find_tactic(GENERIC))
    np.testing.assert_array_equal(gy.of(arena.download()), [[[np.nan, 2.5]] * 2])


def test_header_library_and_python_number_the_types_alike():
    plugin = Path(__file__).parents[2] / "plugin"
    enum = re.search(r"typedef enum \{([^}]*)\} convpool_dtype;", (plugin / "include" / "convpool.h").read_text())[1]
    header = [(name, int(number)) for name, number in re.findall(r"CONVPOOL_(\w+) = (\d+)", enum)]
    table = re.search(r"kTypes\[\] = \{(.*?)\n\};", (plugin / "src" / "core" / "problem.h").read_text(), re.DOTALL)[1]
    assert header == [(name, number) for number, name in enumerate(re.findall(r'"(\w+)"', table))]
    assert list(library.DTYPES.values()) == [number for _, number in header]
