# SPDX-License-Identifier: Apache-2.0
"""libconvpool_ort.so, the library of custom operators: where it is, and how session options get it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from convpool.cuda.errors import LibraryError
from convpool.cuda.location import INSTALL
from convpool.cuda.location import library_path as cuda_library_path
from convpool.errors import OnnxruntimeError, first_line

NAME = "libconvpool_ort.so"
"""The file beside libconvpool.so."""


def library_path() -> Path:
    """Return the file to register with onnxruntime.

    Raises:
        OnnxruntimeError: It is not there or of another version.
    """
    try:
        path = cuda_library_path().resolve().parent / NAME
    except LibraryError as error:
        raise OnnxruntimeError(str(error)) from error
    if not path.is_file():
        raise OnnxruntimeError(f"{NAME}: not found; got {path}, expected it beside libconvpool.so; {INSTALL}")
    return path


def register(options: Any) -> Path:
    """Register the operators with session options; a second time changes nothing.

    A session of these options runs ConvAvgPool and its fused variants by the library alone: by CUDA
    kernels on the CUDA provider, by plain loops on the CPU provider.  The functions that a model
    carries are faster than these loops; so do not register the library where there is no CUDA
    provider.

    Args:
        options: An onnxruntime.SessionOptions.

    Returns:
        The library's path.

    Raises:
        OnnxruntimeError: The library cannot be used.
    """
    path = library_path()
    try:
        ctypes.CDLL(str(path))  # onnxruntime's message does not say what a library lacks
        options.register_custom_ops_library(str(path))
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise OnnxruntimeError(f"{path}: cannot be registered; got {first_line(error)}") from error
    return path
