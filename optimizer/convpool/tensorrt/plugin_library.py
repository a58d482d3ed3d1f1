# SPDX-License-Identifier: Apache-2.0
"""The library of TensorRT's plugins: where it is, and how it gets into TensorRT's plugin registry.

It is libconvpool.so, which serves TensorRT 8.6 to 11.  The environment variable CONVPOOL_PLUGIN_LIBRARY names another file.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from convpool.algebra.parts import OP_TYPE
from convpool.cuda.errors import LibraryError
from convpool.cuda.location import library_path, named_file
from convpool.errors import TensorRTError
from convpool.ir import schema
from convpool.tensorrt.package import logger, tensorrt_module

_handles: dict[str, Any] = {}
_loading = threading.Lock()


def plugin_path() -> Path:
    """Return the one file to hand to TensorRT's tools.

    Raises:
        TensorRTError: It is not there or of another version.
    """
    try:
        return named_file("plugin library", "CONVPOOL_PLUGIN_LIBRARY") or library_path().resolve()
    except LibraryError as error:
        raise TensorRTError(str(error)) from error


def find_creator(trt: ModuleType, op_type: str = OP_TYPE) -> Any:
    """The registry's creator of one of the operators, or None."""
    registry = trt.get_plugin_registry()
    find = getattr(registry, "get_creator", None) or registry.get_plugin_creator
    return find(op_type, "1", "")


def load_plugin(trt: ModuleType | None = None) -> Path:
    """Register the plugin with TensorRT in this process, once; a second call does nothing.

    Args:
        trt: TensorRT's package.  Default: `import tensorrt`.

    Returns:
        The library's path.

    Raises:
        TensorRTError: The library or TensorRT is missing, or one refuses the other.
    """
    trt = trt or tensorrt_module()
    path = plugin_path()
    with _loading:
        if find_creator(trt) is None:
            _register(trt, path)
    missing = [name for name in schema.OP_TYPES if find_creator(trt, name) is None]
    if missing:
        got = "none of the operators" if len(missing) == len(schema.OP_TYPES) else f"no {missing[0]}"
        raise TensorRTError(
            f"{path}: plugins; got {got} in TensorRT {trt.__version__}, expected {len(schema.OP_TYPES)}; "
            f"build the library of this version of convpool {logger(trt).explain()}".rstrip()
        )
    return path


def _register(trt: ModuleType, path: Path) -> None:
    log = logger(trt)
    try:
        ctypes.CDLL(str(path))  # the registry does not say why it could not open a file
        _handles[trt.__name__] = trt.get_plugin_registry().load_library(str(path))
    except Exception as error:  # the bindings' exceptions share no base class
        raise TensorRTError(f"{path}: cannot be loaded as a plugin library; got {log.explain(error)}") from error
