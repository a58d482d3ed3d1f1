# SPDX-License-Identifier: Apache-2.0
"""Spectral normalization of several weights by address: convpool_spectral_norm of convpool.h, and its derivative."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable

from convpool.cuda import library

SHARE = 8192
"""Elements of a weight for each of which, and for a rest, the derivative needs a float of workspace."""


class WeightStruct(ctypes.Structure):
    """convpool_spectral_weight."""

    _fields_ = library.fields((ctypes.c_void_p, "w dy last_u last_v out kept"), (ctypes.c_int32, "m c taps reserved"))


PACK = struct.Struct("@6P4i").pack
"""The fields of a WeightStruct in their order, as bytes."""


_BEGIN = [ctypes.c_char_p, ctypes.c_int32, ctypes.c_int32]


def is_there() -> bool:
    """Return True if the library has it: those of older versions do not."""
    return hasattr(library.load(), "convpool_spectral_norm")


@functools.cache
def normalize() -> Callable[..., int]:
    """convpool_spectral_norm, which returns a status for `library.check`.

    Arguments: bytes of the weights, their number, their type, whether u is first, epsilon, a cudaStream_t."""
    return library.declare(library.load(), "convpool_spectral_norm", [*_BEGIN, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p])


@functools.cache
def adjoint() -> Callable[..., int]:
    """convpool_spectral_norm_adjoint: bytes of the weights, their number, their type, the workspace's address, a cudaStream_t."""
    return library.declare(library.load(), "convpool_spectral_norm_adjoint", [*_BEGIN, ctypes.c_void_p, ctypes.c_void_p])
