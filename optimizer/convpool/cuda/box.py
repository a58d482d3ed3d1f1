# SPDX-License-Identifier: Apache-2.0
"""Box means and their adjoint on a GPU, by address: convpool_box_mean and convpool_box_mean_adjoint of convpool.h.

Z = AveragePool(X, count_include_pad=1),    dX = AveragePool'(dZ)
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

from convpool.cuda import library


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


Call = Callable[[bytes, int, int, int, int], int]
"""Arguments: a problem's bytes, the input's address, 0, the output's, a cudaStream_t."""


@functools.cache
def calls() -> tuple[Call, Call]:
    """The box mean and its adjoint.  They return a status for `library.check`."""
    lib, arguments = library.load(), [ctypes.c_char_p, *[ctypes.c_void_p] * 4]
    return library.declare(lib, "convpool_box_mean", arguments), library.declare(lib, "convpool_box_mean_adjoint", arguments)


def problem(
    dtype: str,
    channels_last: bool,
    shape: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    *,
    sums: bool = False,
) -> bytes:
    """The bytes of a convpool_box_problem.  shape: [N, C, spatial...] in any layout; pads: begins, then ends; sums: not means."""
    rank = len(kernel)
    s = BoxStruct(ctypes.sizeof(BoxStruct), rank, library.DTYPES[dtype], channels_last, shape[0], shape[1])
    s.spatial[:rank] = shape[2:]
    s.kernel[:rank], s.strides[:rank], s.dilations[:rank] = kernel, strides, dilations
    s.pads[: 2 * rank], s.sums = pads, sums
    return bytes(s)
