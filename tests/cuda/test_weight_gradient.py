# SPDX-License-Identifier: Apache-2.0
"""convpool_weight_gradient without a GPU: what is refused and why, and what is launched on the pretended runtime."""

import ctypes

import pytest

from convpool.cuda import Problem, training

DY, X, DW, DB, SPACE = (n << 30 for n in range(1, 6))
IMAGE = dict(n=64, c=3, m=64, spatial=(64, 64), kernel_shape=3, pool_kernel_shape=1, pads=1, dtype="bfloat16", layout="NHWC")
INVALID, UNSUPPORTED, TOO_SMALL, MISALIGNED = range(1, 5)
PART = 32 * 64 * 4
"""Bytes of the sums of one block."""


def problem(**changed) -> bytes:
    return bytes(Problem(**{**IMAGE, **changed}).struct)


def space_of(lib, given: bytes) -> int:
    size = ctypes.c_size_t()
    assert lib.convpool_weight_gradient_bytes(given, ctypes.byref(size)) == 0, lib.convpool_last_error()
    return size.value


def refusal(lib, given: bytes, dy=DY, x=X, dw=DW, db=None, space=SPACE, size=1 << 30) -> tuple[int, str]:
    return lib.convpool_weight_gradient(given, dy, x, dw, db, space, size, None), lib.convpool_last_error().decode()


def launches(lib, given: bytes, **others) -> list[int]:
    """The blocks along the first axis, of the launches of a call that succeeds."""
    before = lib.pretended_launches()
    assert refusal(lib, given, size=space_of(lib, given), **others) == (0, "")
    return [lib.pretended_launch(i)[0].grid for i in range(before, lib.pretended_launches())]


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"spatial": (8, 8, 8), "kernel_shape": 1, "pads": 0}, "rank; got 3, expected 1 or 2"),
        ({"dtype": "float32"}, "types; got F32 and F32"),
        ({"x_dtype": "float32"}, "types; got F32 and BF16"),
        ({"layout": "NCHW"}, "layout; got channels first"),
        ({"y_layout": "NCHW"}, "layout; got channels first"),
        ({"pool_kernel_shape": 2}, "pooling window; got 4, expected 1"),
        ({"pool_strides": 2}, "pooled size; got 32, expected X's, 64"),
        ({"c": 4, "group": 2, "kernel_shape": 1}, "group; got 2"),
        ({"m": 60}, "m; got 60, expected a multiple of 8"),
        ({"c": 4}, "elements of a filter; got 36, expected at most 32"),
        ({"n": 2**18}, "elements of X; got"),
        ({"n": 2**13, "c": 1, "kernel_shape": 1, "pads": 300}, "pixels of Y; got"),
    ],
)
def test_what_no_kernel_runs_is_refused(lib, changed, named):
    given, size = problem(**changed), ctypes.c_size_t()
    status, message = refusal(lib, given)
    assert status == UNSUPPORTED and named in message
    assert lib.convpool_weight_gradient_bytes(given, ctypes.byref(size)) == UNSUPPORTED


def test_a_bias_is_one_element_more(lib):
    given = problem(c=16, kernel_shape=(1, 2), pads=0)
    assert launches(lib, given) == [256, 32]
    message = "weight gradient: elements of a filter with a bias; got 32, expected at most 31"
    assert refusal(lib, given, db=DB) == (UNSUPPORTED, message)


def test_no_convolution_is_refused(lib):
    assert refusal(lib, problem(n=0))[0] == INVALID
    assert lib.convpool_weight_gradient_bytes(problem(), None) == INVALID


def test_pointers_are_checked(lib):
    given = problem()
    for name in ("dy", "x", "dw", "space"):
        shown = {"space": "workspace"}.get(name, name)
        assert refusal(lib, given, **{name: None}) == (INVALID, f"{shown}: the pointer is null")
    assert refusal(lib, given, dy=DY + 8) == (MISALIGNED, "dy: not aligned to 16 bytes")
    assert refusal(lib, given, x=X + 1)[0] == refusal(lib, given, dw=DW + 1)[0] == MISALIGNED
    assert refusal(lib, given, db=DB + 1)[0] == MISALIGNED
    assert refusal(lib, given, space=SPACE + 16)[0] == MISALIGNED
    status, message = refusal(lib, given, size=space_of(lib, given) - 1)
    assert status == TOO_SMALL and f"expected {space_of(lib, given)}" in message


def test_blocks_share_the_pixels_and_a_second_kernel_adds_their_sums(lib):
    assert space_of(lib, problem()) == 256 * PART and launches(lib, problem()) == [256, 27]
    assert launches(lib, problem(), db=DB) == [256, 28]
    small = problem(n=1, spatial=(8, 8))
    assert space_of(lib, small) == PART and launches(lib, small) == [1, 27]
    wide = problem(m=136, n=1, spatial=(32, 33))  # 1056 pixels are three parts, 136 channels another axis
    assert space_of(lib, wide) == 9 * PART and launches(lib, wide) == [3, 27]


def test_the_python_module_asks_the_same_library():
    assert training.MAX_FILTER == 32
    assert training.gradient_bytes(Problem(**IMAGE)) == 256 * PART
    assert training.gradient_bytes(Problem(**{**IMAGE, "m": 60})) is None


@pytest.mark.parametrize(
    "changed, status, message",
    [
        ({}, 0, ""),
        ({"m": 0}, INVALID, "m; got 0, expected 1 to 65535"),
        ({"c": 65536}, INVALID, "c; got 65536, expected 1 to 65535"),
        ({"taps": -1}, INVALID, "taps; got -1, expected 1 to 65535"),
        ({"dtype": 3}, INVALID, "dtype; got 3, expected 0 (F16), 1 (BF16) or 2 (F32)"),
        ({"w": None}, INVALID, "w: the pointer is null"),
        ({"out": X + 1}, MISALIGNED, "out: not aligned to its elements"),
        ({"out": X + 2, "dtype": 2}, MISALIGNED, "out: not aligned to its elements"),
    ],
)
def test_weights_turned_round(lib, changed, status, message):
    given, before = {"w": DW, "out": X, "m": 65, "c": 129, "taps": 9, "dtype": 1, **changed}, lib.pretended_launches()
    assert (lib.convpool_turn_weights(*given.values(), 4.0, None), lib.convpool_last_error().decode()) == (status, message)
    assert [lib.pretended_launch(i)[0].grid for i in range(before, lib.pretended_launches())] == [3] * (not status)
