# SPDX-License-Identifier: Apache-2.0
"""The functions of convpool.h for steps of training in PyTorch, beside the operator, by address.

Z = AveragePool(X, count_include_pad=1),    dX = AveragePool'(dZ)
dW[m, k, c] = sum over samples and outputs o of dY[n, o, m] * X[n, o * strides + k * dilations - pads, c]
dB[m] = sum over samples and outputs o of dY[n, o, m]
weights turned round: out[c, last - k, m] = factor * w[m, k, c]
several weights, each divided by its largest singular value, and the derivative
"""

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

from convpool.cuda import library
from convpool.cuda.problem import Problem
from convpool.errors import UnsupportedError

Ints = Sequence[int]

MAX_FILTER = 32
"""Elements of a filter, channels times kernel, whose gradients the library has; one less where dB is wanted."""
MOST_TURNED = 65535
"""Channels and taps of weights that are turned round."""
SHARE = 8192
"""Elements of a weight for each of which, and for a rest, the derivative of a normalization needs a float of workspace."""


class BoxStruct(ctypes.Structure):
    """convpool_box_problem."""

    _fields_ = library.fields(
        (ctypes.c_uint32, "struct_size"),
        (ctypes.c_int32, "rank dtype layout"),
        (ctypes.c_int64, "n c"),
        (ctypes.c_int64 * library.MAX_RANK, "spatial"),
        (ctypes.c_int32 * library.MAX_RANK, "kernel strides"),
        (ctypes.c_int32 * (2 * library.MAX_RANK), "pads"),
        (ctypes.c_int32 * library.MAX_RANK, "dilations"),
        (ctypes.c_int32, "sums"),
        (ctypes.c_int32 * 4, "reserved"),
    )


class WeightStruct(ctypes.Structure):
    """convpool_spectral_weight."""

    _fields_ = library.fields((ctypes.c_void_p, "w dy last_u last_v out kept"), (ctypes.c_int32, "m c taps reserved"))


PACK = struct.Struct("@6P4i").pack
"""The fields of a WeightStruct in their order, as bytes."""
_bytes, _at, _i32, _i64 = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_ARGUMENTS: dict[str, list[Any]] = {
    # a box problem's bytes, addresses of the input, 0, of the output, a stream
    **dict.fromkeys(("box_mean", "box_mean_adjoint"), [_bytes, _at, _at, _at, _at]),
    # a problem's bytes, addresses of dY, X, dW, dB or 0, workspace and its bytes, a stream
    "weight_gradient": [_bytes, *[_at] * 5, ctypes.c_size_t, _at],
    "weight_gradient_bytes": [_bytes, ctypes.POINTER(ctypes.c_size_t)],
    # addresses of w and out, m, c, taps, type, factor, a stream
    "turn_weights": [_at, _at, _i64, _i64, _i64, _i32, ctypes.c_float, _at],
    # bytes of the weights, their number, their type, whether u is first, epsilon, a stream; or the workspace's address, a stream
    "spectral_norm": [_bytes, _i32, _i32, _i32, ctypes.c_float, _at],
    "spectral_norm_adjoint": [_bytes, _i32, _i32, _at, _at],
}


@functools.cache
def function(name: str) -> Callable[..., int]:
    """A function of _ARGUMENTS, which returns a status for `library.check`.  Raises LibraryError where the library lacks it."""
    return library.declare(library.load(), f"convpool_{name}", _ARGUMENTS[name])


@functools.cache
def has(name: str) -> bool:
    """Return True if the library has a function: those of older versions may not."""
    return hasattr(library.load(), f"convpool_{name}")


def box_problem(
    dtype: str, channels_last: bool, shape: Ints, kernel: Ints, strides: Ints, pads: Ints, dilations: Ints, *, sums: bool = False
) -> bytes:
    """The bytes of a convpool_box_problem.  shape: [N, C, spatial...] in any layout; pads: begins, then ends; sums: not means."""
    rank = len(kernel)
    s = BoxStruct(ctypes.sizeof(BoxStruct), rank, library.DTYPES[dtype], channels_last, shape[0], shape[1])
    s.spatial[:rank] = shape[2:]
    s.kernel[:rank], s.strides[:rank], s.dilations[:rank] = kernel, strides, dilations
    s.pads[: 2 * rank], s.sums = pads, sums
    return bytes(s)


def gradient_bytes(problem: Problem) -> int | None:
    """Bytes of workspace (256-byte aligned) that dW and dB need; None where the library has no kernel for the problem."""
    size = ctypes.c_size_t()
    try:
        library.check(function("weight_gradient_bytes")(bytes(problem.struct), size))
    except UnsupportedError:
        return None
    return size.value
