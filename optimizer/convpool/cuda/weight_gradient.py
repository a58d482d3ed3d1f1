# SPDX-License-Identifier: Apache-2.0
"""The gradients at weights and bias of a convolution of few channels, by address: convpool_weight_gradient of convpool.h.

dW[m, k, c] = sum over samples and outputs o of dY[n, o, m] * X[n, o * strides + k * dilations - pads, c]
dB[m] = sum over samples and outputs o of dY[n, o, m]

And weights turned round: out[c, last - k, m] = factor * w[m, k, c].
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from convpool.cuda import library
from convpool.cuda.problem import Problem
from convpool.errors import UnsupportedError

MAX_FILTER = 32
"""Elements of a filter, channels times kernel, that the library's kernels take; one less where dB is wanted."""
Call = Callable[[bytes, int, int, int, int, int, int, int], int]
"""Arguments: problem's bytes, addresses of dY, X, dW, dB or 0, workspace and its bytes, stream."""


@functools.cache
def call() -> Call:
    """The function of the library.  It returns a status for `library.check`."""
    arguments = [ctypes.c_char_p, *[ctypes.c_void_p] * 5, ctypes.c_size_t, ctypes.c_void_p]
    return library.declare(library.load(), "convpool_weight_gradient", arguments)


def workspace_bytes(problem: Problem) -> int | None:
    """Bytes of workspace (256-byte aligned) that a call needs; None where the library has no kernel for the problem."""
    arguments = [ctypes.POINTER(library.ProblemStruct), ctypes.POINTER(ctypes.c_size_t)]
    size_of, size = library.declare(library.load(), "convpool_weight_gradient_bytes", arguments), ctypes.c_size_t()
    try:
        library.check(size_of(problem.struct, size))
    except UnsupportedError:
        return None
    return size.value


MOST_TURNED = 65535
"""Channels and taps of weights that `turn` takes."""
_pointer, _size = ctypes.c_void_p, ctypes.c_int64
TURN_ARGUMENTS = [_pointer, _pointer, _size, _size, _size, ctypes.c_int32, ctypes.c_float, _pointer]
"""Addresses of w and out, m, c, taps, type, factor, stream."""


@functools.cache
def turn() -> Callable[..., int] | None:
    """convpool_turn_weights of TURN_ARGUMENTS; None in a library that lacks it.  It returns a status for `library.check`."""
    lib = library.load()
    return library.declare(lib, "convpool_turn_weights", TURN_ARGUMENTS) if hasattr(lib, "convpool_turn_weights") else None
