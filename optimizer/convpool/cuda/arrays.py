# SPDX-License-Identifier: Apache-2.0
"""Other libraries' GPU arrays: address, shape, type and device, and new arrays of the library that made one.

`read` is what every launch calls: of PyTorch's tensors and CuPy's arrays it asks for their attributes, of all others by DLPack,
which knows bfloat16 and the device, or the CUDA array interface.  No library is imported here; one that made an array is in
`sys.modules` already.
"""

import ctypes
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from convpool.errors import ArrayError

Kind = tuple[tuple[int, ...], Any, "int | None"]
"""Shape, type (a name, or PyTorch's object for it) and device: arrays of one kind are run by one plan."""
Reading = tuple[int, Kind, int, bool]
"""Address, kind, bytes of an element, and whether the array must not be written: a plain tuple, since every call makes some."""
readers: dict[type, Callable[[str, Any], Reading]] = {}
"""Readers of the types of arrays that were read before."""


def read(name: str, array: Any) -> Reading:
    """The array as a launch needs it; ArrayError as of `view`."""
    cls = type(array)
    reader = readers.get(cls)
    if reader is None:
        reader = readers[cls] = _ATTRIBUTE_READERS.get((cls.__module__, cls.__qualname__), _read_view)
    return reader(name, array)


def _read_torch(name: str, tensor: Any) -> Reading:
    if not tensor.is_cuda or not tensor.is_contiguous() or tensor.requires_grad:
        return _read_view(name, tensor)  # which says what is wrong
    return tensor.data_ptr(), (tensor.shape, tensor.dtype, tensor.get_device()), tensor.element_size(), False


def _read_cupy(name: str, array: Any) -> Reading:
    if not array.flags.c_contiguous:
        return _read_view(name, array)
    return array.data.ptr, (array.shape, array.dtype.name, array.device.id), array.itemsize, False


def _read_view(name: str, array: Any) -> Reading:
    seen = view(name, array)
    return seen.pointer, (seen.shape, seen.dtype, seen.device), seen.itemsize, seen.read_only


_ATTRIBUTE_READERS = {
    ("torch", "Tensor"): _read_torch,
    ("torch.nn.parameter", "Parameter"): _read_torch,
    ("cupy", "ndarray"): _read_cupy,
}


def address_by(array: Any) -> Callable[[Any, Kind], int | None] | None:
    """A function faster than `read` that gives the address of a dense array of a kind, else None; None where there is none."""
    return _ADDRESSES.get(readers[type(array)])


def _torch_address(tensor: Any, kind: Kind) -> int | None:
    shape, dtype, device = kind
    if tensor.shape == shape and tensor.dtype is dtype and tensor.get_device() == device:
        if tensor.is_contiguous() and not tensor.requires_grad:
            return tensor.data_ptr()
    return None


def _cupy_address(array: Any, kind: Kind) -> int | None:
    same = (array.shape, array.dtype.name, array.device.id) == kind and array.flags.c_contiguous
    return array.data.ptr if same else None


_ADDRESSES: dict[Callable[[str, Any], Reading], Callable[[Any, Kind], int | None]] = {
    _read_torch: _torch_address,
    _read_cupy: _cupy_address,
}


def nbytes(reading: Reading) -> int:
    """The bytes that the array takes."""
    return math.prod(reading[1][0]) * reading[2]


def dtype_name(dtype: Any) -> str:
    """The name of a kind's type."""
    return str(dtype).removeprefix("torch.")


# ---- what other arrays export ----


@dataclass(frozen=True)
class ArrayView:
    """A dense, C-ordered array in GPU memory.  `owner` keeps the memory described here alive."""

    pointer: int
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    device: int | None
    read_only: bool
    owner: Any


def view(name: str, array: Any) -> ArrayView:
    """The array as a view; ArrayError if it is none, not on a GPU, or not contiguous."""
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        kind = array.__dlpack_device__()[0]
        if int(kind) not in _CUDA_DEVICES:
            raise ArrayError(f"{name}: not in GPU memory; got DLPack device type {int(kind)}, expected CUDA; copy it there")
        return _dlpack(name, array)
    if hasattr(array, "__cuda_array_interface__"):
        return _cuda_array_interface(name, array)
    raise ArrayError(
        f"{name}: no GPU array; got {type(array).__module__}.{type(array).__qualname__}, expected DLPack or "
        "__cuda_array_interface__ (pycuda, CuPy, PyTorch)"
    )


class _DLDevice(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_CUDA_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged
_DL_TYPES = {
    (0, 8, 1): "int8",
    (2, 16, 1): "float16",
    (2, 32, 1): "float32",
    (4, 16, 1): "bfloat16",
    (10, 8, 1): "float8_e4m3fn",
}
_CAI_TYPES = {"|i1": "int8", "<f2": "float16", "<f4": "float32"}
_NO_TYPESTR = ("bfloat16", "float8_e4m3fn")  # ml_dtypes shows <V2 and |V1
_NO_SYNC = -1  # the stream argument with which a producer waits for nothing
_OF_CAPSULE = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))


def _dlpack(name: str, array: Any) -> ArrayView:
    try:
        capsule = array.__dlpack__(stream=_NO_SYNC)
        tensor = _DLTensor.from_address(_OF_CAPSULE(capsule, b"dltensor"))
    except TypeError:
        raise ArrayError(f"{name}: a host array; got {type(array).__name__}, expected a GPU array") from None
    except (BufferError, RuntimeError, ValueError) as error:
        raise ArrayError(f"{name}: DLPack export failed; got {error}, expected a plain GPU array") from error
    key = (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)
    shape = tuple(tensor.shape[: tensor.ndim])
    _check_dense(name, shape, tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None, 1)
    pointer = (tensor.data or 0) + tensor.byte_offset
    dtype, itemsize = _DL_TYPES.get(key, f"DLPack type {key}"), (tensor.dtype.bits * tensor.dtype.lanes + 7) // 8
    return ArrayView(pointer, shape, dtype, itemsize, tensor.device.id, False, (array, capsule))


def _cuda_array_interface(name: str, array: Any) -> ArrayView:
    interface = array.__cuda_array_interface__
    shape, typestr = tuple(interface["shape"]), interface["typestr"]
    dtype = _CAI_TYPES.get(typestr, typestr)
    if (named := str(getattr(array, "dtype", ""))) in _NO_TYPESTR:
        dtype = named
    if interface.get("mask") is not None:
        raise ArrayError(f"{name}: masked; got a mask, expected an array without one")
    itemsize = int(typestr[2:].partition("[")[0])
    _check_dense(name, shape, interface.get("strides"), itemsize)
    pointer, read_only = interface["data"]
    return ArrayView(pointer, shape, dtype, itemsize, None, read_only, array)


def _check_dense(name: str, shape: tuple[int, ...], strides: tuple[int, ...] | None, unit: int) -> None:
    """strides, that of neighbours being `unit`, or None for C order."""
    if strides is None or 0 in shape:
        return
    expected = unit
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            raise ArrayError(
                f"{name}: not contiguous; got strides {strides} for shape {shape}, expected C order in the layout "
                "given; make a contiguous copy or name the other layout"
            )
        expected *= size


# ---- streams and new arrays ----


def stream_handle(stream: Any) -> int:
    """A cudaStream_t from None, a number, or a stream of pycuda, CuPy, PyTorch or cuda.core."""
    if stream is None:
        return 0
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for attribute in ("handle", "ptr", "cuda_stream"):
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    raise ArrayError(f"stream: no CUDA stream; got {type(stream).__name__}, expected a handle or a stream object")


def origin(array: Any) -> str:
    """The library that made the array: "pycuda", "cupy", "torch", or "" for any other."""
    for base in type(array).__mro__:
        root = base.__module__.partition(".")[0]
        if root in ("pycuda", "cupy", "torch"):
            return root
    return ""


Allocator = Callable[[Any, int], tuple[Any, int]]
"""A new array and its address, from an array on the device and a cudaStream_t."""


def allocator(library: str, shape: tuple[int, ...], dtype: str) -> Allocator | None:
    """Return a maker of uninitialised arrays of that library, shape and type; None if not known.  Memory of PyTorch and CuPy is
    that of the stream, where nothing before the work still uses it.  PyTorch's is recorded as used by its current stream too, so
    that it is not handed out again before the work there is done."""
    makers = {"pycuda": _pycuda_allocator, "cupy": _cupy_allocator, "torch": _torch_allocator}
    return makers[library](shape, dtype) if library in makers else None


def _pycuda_allocator(shape: tuple[int, ...], dtype: str) -> Allocator:
    gpuarray, element = sys.modules["pycuda.gpuarray"], _numpy_type(dtype)

    def allocate(like: Any, stream: int) -> tuple[Any, int]:
        made = gpuarray.empty(shape, element)
        return made, int(made.gpudata)

    return allocate


def _cupy_allocator(shape: tuple[int, ...], dtype: str) -> Allocator:
    cupy, element = sys.modules["cupy"], _numpy_type(dtype)

    def allocate(like: Any, stream: int) -> tuple[Any, int]:
        with like.device, cupy.cuda.ExternalStream(stream):
            made = cupy.empty(shape, element)
        return made, made.data.ptr

    return allocate


def _torch_allocator(shape: tuple[int, ...], dtype: str) -> Allocator:
    torch = sys.modules["torch"]
    element, current_stream = getattr(torch, dtype), torch._C._cuda_getCurrentRawStream  # 10 times as fast as current_stream()

    def allocate(like: Any, stream: int) -> tuple[Any, int]:
        if current_stream(like.get_device()) == stream:
            made = like.new_empty(shape, dtype=element)
            return made, made.data_ptr()
        current = torch.cuda.current_stream(like.device)
        if stream:
            used = torch.cuda.ExternalStream(stream, device=like.device)
        else:  # of which ExternalStream would make a new stream
            used = torch.cuda.default_stream(like.device)
        with torch.cuda.stream(used):
            made = torch.empty(shape, dtype=element, device=like.device)
        made.record_stream(current)
        return made, made.data_ptr()

    return allocate


def _numpy_type(dtype: str) -> Any:
    if dtype in _NO_TYPESTR:
        import ml_dtypes

        return getattr(ml_dtypes, dtype)
    return dtype
