# SPDX-License-Identifier: Apache-2.0
"""libconvpool.so through ctypes: the structures of convpool.h, loading, and status codes as exceptions.

Loading needs no GPU and no CUDA installation.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import warnings

from convpool.cuda.errors import CudaError, LibraryError, ProblemError, UnsupportedError
from convpool.cuda.location import INSTALL, VARIABLE, library_path
from convpool.errors import printable

MAX_RANK = 3
ABI_VERSION = 2
DTYPES = {"float16": 0, "bfloat16": 1, "float32": 2, "int8": 3, "float8_e4m3fn": 4}
EIGHT_BIT = tuple(name for name in DTYPES if name not in ("float16", "bfloat16", "float32"))
ACTIVATIONS = {None: 0, "none": 0, "relu": 1, "leaky_relu": 2, "tanh": 3, "sigmoid": 4, "clip": 5}
ACCUMULATIONS = {"default": 0, "packed": 1}
WEIGHTS_PREPARED = 1
PLAN_UNALIGNED = 1
ANY_BYTES = 2 ** (8 * ctypes.sizeof(ctypes.c_size_t)) - 1

_OK, _INVALID, _UNSUPPORTED, _WORKSPACE, _MISALIGNED, _CUDA = range(6)
_EXCEPTIONS = {_INVALID: ProblemError, _UNSUPPORTED: UnsupportedError, _CUDA: CudaError}

_Ints = ctypes.c_int32 * MAX_RANK
_Pads = ctypes.c_int32 * (2 * MAX_RANK)


class ProblemStruct(ctypes.Structure):
    """convpool_problem."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("rank", ctypes.c_int32),
        ("x_dtype", ctypes.c_int32),
        ("w_dtype", ctypes.c_int32),
        ("y_dtype", ctypes.c_int32),
        ("accumulation", ctypes.c_int32),
        ("has_w_scale", ctypes.c_int32),
        ("x_layout", ctypes.c_int32),
        ("y_layout", ctypes.c_int32),
        ("allow_tf32", ctypes.c_int32),
        ("n", ctypes.c_int64),
        ("c", ctypes.c_int64),
        ("m", ctypes.c_int64),
        ("spatial", ctypes.c_int64 * MAX_RANK),
        ("pool_kernel", _Ints),
        ("pool_strides", _Ints),
        ("pool_pads", _Pads),
        ("pool_dilations", _Ints),
        ("kernel", _Ints),
        ("strides", _Ints),
        ("pads", _Pads),
        ("dilations", _Ints),
        ("group", ctypes.c_int32),
        ("has_bias", ctypes.c_int32),
        ("has_residual", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
        ("prologue_affine", ctypes.c_int32),
        ("prologue_activation", ctypes.c_int32),
        ("prologue_alpha", ctypes.c_float),
        ("upsample", _Ints),
        ("reserved", ctypes.c_int32 * 2),
    ]


class TensorsStruct(ctypes.Structure):
    """convpool_tensors."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("x", ctypes.c_void_p),
        ("w", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
        ("scale", ctypes.c_void_p),
        ("shift", ctypes.c_void_p),
        ("prepared", ctypes.c_void_p),
        ("prepared_bytes", ctypes.c_size_t),
        ("w_scale", ctypes.c_void_p),
    ]


PACK_TENSORS = struct.Struct("@IIPPPPPPNPPPNP").pack
"""The fields of convpool_tensors in their order, as bytes: faster than a TensorsStruct."""


class TacticStruct(ctypes.Structure):
    """convpool_tactic_info."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("id", ctypes.c_int32),
        ("name", ctypes.c_char_p),
        ("family", ctypes.c_char_p),
        ("dtype", ctypes.c_int32),
        ("tf32", ctypes.c_int32),
        ("min_cc", ctypes.c_int32),
        ("split_k", ctypes.c_int32),
        ("packed", ctypes.c_int32),
        ("roundings", ctypes.c_int32),
    ]


class PlanStruct(ctypes.Structure):
    """convpool_plan_properties."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("tactic", ctypes.c_int32),
        ("name", ctypes.c_char_p),
        ("chosen_by", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("expected_us", ctypes.c_double),
        ("workspace_bytes", ctypes.c_size_t),
        ("prepared_bytes", ctypes.c_size_t),
        ("x_alignment", ctypes.c_int32),
        ("w_alignment", ctypes.c_int32),
        ("b_alignment", ctypes.c_int32),
        ("residual_alignment", ctypes.c_int32),
        ("y_alignment", ctypes.c_int32),
        ("scale_alignment", ctypes.c_int32),
        ("shift_alignment", ctypes.c_int32),
        ("w_scale_alignment", ctypes.c_int32),
        ("out_spatial", ctypes.c_int64 * MAX_RANK),
    ]


@functools.cache
def _load(named: str | None) -> ctypes.CDLL:
    """The library that CONVPOOL_LIBRARY names, or the installed one."""
    path = library_path()
    try:
        lib = ctypes.CDLL(str(path))
    except (OSError, UnicodeDecodeError) as error:  # ctypes does not read a message that names a file in other bytes
        got = error if isinstance(error, OSError) else path
        raise LibraryError(f"libconvpool: cannot be loaded; got {got}, expected a library for this machine") from error
    problem, i32, size = ctypes.POINTER(ProblemStruct), ctypes.c_int32, ctypes.POINTER(ctypes.c_size_t)
    signatures = {
        "convpool_abi_version": (i32, []),
        "convpool_version": (ctypes.c_char_p, []),
        "convpool_architectures": (ctypes.c_char_p, []),
        "convpool_cuda_version": (i32, []),
        "convpool_last_error": (ctypes.c_char_p, []),
        "convpool_tactics": (i32, [ctypes.POINTER(TacticStruct), i32]),
        "convpool_output_shape": (i32, [problem, ctypes.POINTER(ctypes.c_int64)]),
        "convpool_device": (i32, [ctypes.POINTER(i32)] * 3),
        "convpool_supports": (i32, [problem, i32, i32, i32]),
        "convpool_workspace_bytes": (i32, [problem, i32, size]),
        "convpool_prepared_bytes": (i32, [problem, i32, size]),
        "convpool_default_tactic": (i32, [problem, i32, i32, i32, ctypes.c_size_t, ctypes.POINTER(i32)]),
        "convpool_prepare": (i32, [problem, i32]),
        "convpool_launch": (i32, [problem, i32, ctypes.POINTER(TensorsStruct), ctypes.c_void_p]),
        "convpool_plan_create": (i32, [problem, i32, ctypes.c_size_t, ctypes.c_uint32, ctypes.POINTER(ctypes.c_void_p)]),
        "convpool_plan_launch": (i32, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]),
        "convpool_plan_info": (i32, [ctypes.c_void_p, ctypes.POINTER(PlanStruct)]),
        "convpool_plan_destroy": (None, [ctypes.c_void_p]),
    }
    for name, (result, arguments) in signatures.items():
        try:
            function = getattr(lib, name)
        except AttributeError as error:
            raise LibraryError(f"libconvpool: another library; got {error}, expected this version's {path.name}") from error
        function.restype, function.argtypes = result, arguments
    if (abi := lib.convpool_abi_version()) != ABI_VERSION:
        raise LibraryError(
            f"libconvpool: another version of its interface; got {abi} from {path}, expected {ABI_VERSION}; "
            f"build the library of this version of convpool: {INSTALL}"
        )
    return lib


def load() -> ctypes.CDLL:
    """The library; LibraryError if it is not there, cannot be loaded, or is another version's."""
    return _load(os.environ.get(VARIABLE))


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def current_ordinal() -> int | None:
    """The number of the device that a launch would run on; None where the driver does not say."""
    number = ctypes.c_int()
    driver = _driver()
    if driver is None or driver.cuCtxGetDevice(ctypes.byref(number)) != 0:
        return None
    return number.value


def last_error() -> str:
    """The library's message for this thread's last call, "" where it had none.  It may quote a file of any bytes."""
    return printable(load().convpool_last_error().decode(errors="backslashreplace"))


def check(status: int) -> None:
    """Raises what a status code stands for, with the library's message."""
    if status != _OK:
        raise _EXCEPTIONS.get(status, ProblemError)(last_error())


def warn_of_tuned_file() -> None:
    """A RuntimeWarning where the last call chose a tactic without the file that CONVPOOL_TUNED names, since it is unusable."""
    message = last_error()
    if message:
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def unsupported_reason(status: int) -> str | None:
    """None for success, the reason for "unsupported", and an exception for anything else."""
    if status == _UNSUPPORTED:
        return last_error()
    check(status)
    return None
