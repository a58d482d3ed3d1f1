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
from convpool.cuda.errors import LibraryError, UnsupportedError
from convpool.cuda.location import INSTALL
from convpool.cuda.problem import Problem

MAX_FILTER = 32
"""Elements of a filter, channels times kernel, that the library's kernels take; one less where dB is wanted."""
Call = Callable[[bytes, int, int, int, int, int, int, int], int]
"""Arguments: problem's bytes, addresses of dY, X, dW, dB or 0, workspace and its bytes, stream."""


@functools.cache
def call() -> Call:
    """The function of the library.  It returns a status for `library.check`."""
    lib = library.load()
    try:
        found, size = lib.convpool_weight_gradient, lib.convpool_weight_gradient_bytes
    except AttributeError as error:
        raise LibraryError(f"libconvpool: another library; got {error}, expected this version's; {INSTALL}") from error
    size.restype, size.argtypes = ctypes.c_int32, [ctypes.POINTER(library.ProblemStruct), ctypes.POINTER(ctypes.c_size_t)]
    found.restype = ctypes.c_int32
    found.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 5, ctypes.c_size_t, ctypes.c_void_p]
    return found


def workspace_bytes(problem: Problem) -> int | None:
    """Bytes of workspace (256-byte aligned) that a call needs; None where the library has no kernel for the problem."""
    call()
    size = ctypes.c_size_t()
    try:
        library.check(library.load().convpool_weight_gradient_bytes(problem.struct, size))
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
    found = getattr(library.load(), "convpool_turn_weights", None)
    if found is not None:
        found.restype, found.argtypes = ctypes.c_int32, TURN_ARGUMENTS
    return found
