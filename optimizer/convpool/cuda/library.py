# SPDX-License-Identifier: Apache-2.0
"""libconvpool.so through ctypes: where it is, the structures of convpool.h, loading, and status codes as exceptions.

One file is the CUDA library and TensorRT's plugin library.  The environment variable CONVPOOL_LIBRARY names it.  Without it, the
distribution convpool-cuda brings the file, in the version of this package.  Loading needs no GPU and no CUDA installation.
"""

import ctypes
import functools
import os
import struct
import warnings
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from convpool.errors import CudaError, LibraryError, NotBuiltError, ProblemError, UnsupportedError, printable

VARIABLE = "CONVPOOL_LIBRARY"
DISTRIBUTION = "convpool-cuda"
INSTALLED = "convpool_cuda/libconvpool.so"
"""The file in the folder that the distribution is installed to."""
INSTALL = "run `pip install ./plugin` in convpool's repository"


def library_path() -> Path:
    """The library's file.  Raises LibraryError if it is not there, or of another version than this package."""
    if named := named_file("libconvpool", VARIABLE):
        return named
    try:
        found = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        raise NotBuiltError(f"libconvpool: not built; got no {DISTRIBUTION}, expected it installed; {INSTALL}") from None
    _check_version(found.version)
    path = Path(str(found.locate_file(INSTALLED)))
    if not path.exists():
        raise LibraryError(f"libconvpool: not found; got {path}, expected the file of {DISTRIBUTION}; {INSTALL}")
    return path


def named_file(what: str, variable: str) -> Path | None:
    """The absolute path of the file that an environment variable names, or None.  Raises LibraryError where it is missing."""
    named = os.environ.get(variable)
    if not named:
        return None
    if not os.path.isfile(named):  # unlike Path's, it never raises
        raise LibraryError(f"{what}: not found; got {named}, expected the built library; {variable} names it")
    return Path(os.path.realpath(named))


def _check_version(library: str) -> None:
    try:
        package = distribution("convpool").version
    except PackageNotFoundError:  # used from the sources; the library's ABI version is compared when it is loaded
        return
    if library != package:
        raise LibraryError(f"{DISTRIBUTION}: another version; got {library}, expected convpool's {package}; {INSTALL}")


MAX_RANK = 3
ABI_VERSION = 2
DTYPES = {"float16": 0, "bfloat16": 1, "float32": 2, "int8": 3, "float8_e4m3fn": 4}
EIGHT_BIT = tuple(name for name in DTYPES if name not in ("float16", "bfloat16", "float32"))
ACTIVATIONS = {None: 0, "none": 0, "relu": 1, "leaky_relu": 2, "tanh": 3, "sigmoid": 4, "clip": 5, "silu": 6}
ACCUMULATIONS = {"default": 0, "packed": 1}
WEIGHTS_PREPARED = 1
PLAN_UNALIGNED = 1
ANY_BYTES = 2 ** (8 * ctypes.sizeof(ctypes.c_size_t)) - 1

_OK, _INVALID, _UNSUPPORTED, _WORKSPACE, _MISALIGNED, _CUDA = range(6)
_EXCEPTIONS = {_INVALID: ProblemError, _UNSUPPORTED: UnsupportedError, _CUDA: CudaError}

_Ints = ctypes.c_int32 * MAX_RANK
_Pads = ctypes.c_int32 * (2 * MAX_RANK)


def fields(*declarations: tuple[Any, str]) -> list[tuple[str, Any]]:
    """The fields of a ctypes Structure, from declarations as in C: a type and the names of fields."""
    return [(name, kind) for kind, names in declarations for name in names.split()]


class ProblemStruct(ctypes.Structure):
    """convpool_problem."""

    _fields_ = fields(
        (ctypes.c_uint32, "struct_size"),
        (ctypes.c_int32, "rank x_dtype w_dtype y_dtype accumulation has_w_scale x_layout y_layout allow_tf32"),
        (ctypes.c_int64, "n c m"),
        (ctypes.c_int64 * MAX_RANK, "spatial"),
        (_Ints, "pool_kernel pool_strides"),
        (_Pads, "pool_pads"),
        (_Ints, "pool_dilations kernel strides"),
        (_Pads, "pads"),
        (_Ints, "dilations"),
        (ctypes.c_int32, "group has_bias has_residual activation"),
        (ctypes.c_float, "alpha beta"),
        (ctypes.c_int32, "prologue_affine prologue_activation"),
        (ctypes.c_float, "prologue_alpha"),
        (_Ints, "upsample"),
        (ctypes.c_int32, "prologue_groups"),
        (ctypes.c_float, "prologue_epsilon"),
    )


class TensorsStruct(ctypes.Structure):
    """convpool_tensors."""

    _fields_ = fields(
        (ctypes.c_uint32, "struct_size flags"),
        (ctypes.c_void_p, "x w b residual y workspace"),
        (ctypes.c_size_t, "workspace_bytes"),
        (ctypes.c_void_p, "scale shift prepared"),
        (ctypes.c_size_t, "prepared_bytes"),
        (ctypes.c_void_p, "w_scale"),
    )


PACK_TENSORS = struct.Struct("@IIPPPPPPNPPPNP").pack
"""The fields of convpool_tensors in their order, as bytes: faster than a TensorsStruct."""
TENSORS_BYTES = ctypes.sizeof(TensorsStruct)


class TacticStruct(ctypes.Structure):
    """convpool_tactic_info."""

    _fields_ = fields(
        (ctypes.c_uint32, "struct_size"),
        (ctypes.c_int32, "id"),
        (ctypes.c_char_p, "name family"),
        (ctypes.c_int32, "dtype tf32 min_cc split_k packed roundings"),
    )


class PlanStruct(ctypes.Structure):
    """convpool_plan_properties."""

    _fields_ = fields(
        (ctypes.c_uint32, "struct_size"),
        (ctypes.c_int32, "tactic"),
        (ctypes.c_char_p, "name"),
        (ctypes.c_int32, "chosen_by device"),
        (ctypes.c_double, "expected_us"),
        (ctypes.c_size_t, "workspace_bytes prepared_bytes"),
        (ctypes.c_int32, "x_alignment w_alignment b_alignment residual_alignment"),
        (ctypes.c_int32, "y_alignment scale_alignment shift_alignment w_scale_alignment"),
        (ctypes.c_int64 * MAX_RANK, "out_spatial"),
    )


def declare(lib: ctypes.CDLL, name: str, arguments: Sequence[Any], result: Any = ctypes.c_int32) -> Any:
    """A function of the library, which gives a status for `check` unless said otherwise.  Raises LibraryError for none."""
    try:
        function = getattr(lib, name)
    except AttributeError as error:
        raise LibraryError(f"libconvpool: another library; got {error}, expected this version's; {INSTALL}") from error
    function.restype, function.argtypes = result, arguments
    return function


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
    signatures: dict[str, tuple[Any, list[Any]]] = {
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
        declare(lib, name, arguments, result)
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
def driver() -> ctypes.CDLL | None:
    """CUDA's driver; None where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def current_ordinal() -> int | None:
    """The number of the device that a launch would run on; None where the driver does not say."""
    number, cuda = ctypes.c_int(), driver()
    return None if cuda is None or cuda.cuCtxGetDevice(ctypes.byref(number)) != 0 else number.value


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
