# SPDX-License-Identifier: Apache-2.0
"""The library on the pretended CUDA runtime of tests/support/pretended_cuda, and arrays of a pretended PyTorch on it.  The
library is part of a build with -DCONVPOOL_PLUGIN_TESTS=ON: in CONVPOOL_PLUGIN_BUILD, or where tests/conftest.py builds."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from convpool.cuda import library

ROOT = Path(__file__).parents[3]
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "int8": 1, "uint8": 1, "float8_e4m3fn": 1}


def library_path() -> Path:
    """Skips the test where the library is not built."""
    folder = Path(os.environ.get("CONVPOOL_PLUGIN_BUILD") or ROOT / "build" / "plugin-tests")
    path = folder / "pretended" / "libconvpool_pretended.so"
    if not path.exists():
        pytest.skip(f"no {path}: build plugin/ with -DCONVPOOL_PLUGIN_TESTS=ON")
    return path


class Launch(ctypes.Structure):
    """A kernel launch that the pretended runtime saw."""

    _fields_ = library.fields(
        (ctypes.c_void_p, "function"), (ctypes.c_uint, "grid threads cluster"), (ctypes.c_size_t, "shared_bytes")
    )


def load(patched: pytest.MonkeyPatch) -> ctypes.CDLL:
    """The library as the package's, device 0 current; no launch is seen yet."""
    patched.setenv("CONVPOOL_LIBRARY", str(library_path()))
    lib = library.load()
    lib.pretended_launch.restype = ctypes.POINTER(Launch)
    lib.pretended_set_device.argtypes = [ctypes.c_int, ctypes.c_uint64]
    lib.pretended_set_device(0, 100)
    lib.pretended_forget()
    return lib


class DType:
    """A type as PyTorch shows it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


class Tensor:
    """Describes a tensor that nothing reads, with what `convpool.cuda` asks of PyTorch's."""

    addresses = 1 << 30
    made: list[Tensor] = []

    def __init__(self, shape, dtype="float16", *, device=0, address=None, contiguous=True, requires_grad=False, cuda=True):
        self.shape, self.dtype, self.device_number = tuple(shape), DTYPES[dtype], device
        if address is None:
            address, Tensor.addresses = Tensor.addresses, Tensor.addresses + (1 << 30)
        self.address, self.contiguous, self.requires_grad, self.is_cuda = address, contiguous, requires_grad, cuda
        self.item_bytes = ITEM_BYTES[dtype]

    def data_ptr(self) -> int:
        return self.address

    def element_size(self) -> int:
        return self.item_bytes

    def is_contiguous(self) -> bool:
        return self.contiguous

    def get_device(self) -> int:
        return self.device_number

    def new_empty(self, shape, dtype) -> Tensor:
        Tensor.made.append(Tensor(shape, dtype.name, device=self.device_number))
        return Tensor.made[-1]

    def __dlpack_device__(self):
        return (2 if self.is_cuda else 1, self.device_number)

    def __dlpack__(self, stream=None):
        raise BufferError("not contiguous" if not self.contiguous else "requires grad")


Tensor.__module__ = "torch"
DTYPES = {name: DType(name) for name in ITEM_BYTES}


def torch_module(current_stream: int = 0) -> ModuleType:
    """Return a module for `sys.modules["torch"]`."""
    module = ModuleType("torch")
    module.__dict__.update(DTYPES)
    module._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda device: current_stream)
    return module
