"""The Python package of TensorRT, and libconvpool_plugin.so in its plugin registry.

The plugin library is looked for in the environment variable CONVPOOL_PLUGIN_LIBRARY, then beside this file, where the
wheel puts it.  One file serves TensorRT 8.6 to 11.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from convpool import operator
from convpool.tensorrt.errors import TensorRTError

LIBRARY = "libconvpool_plugin.so"
_OLDEST, _NEWEST = (8, 6), 11
_handles: dict[str, Any] = {}
_loggers: dict[str, Any] = {}
_loading = threading.Lock()


def plugin_path() -> Path:
    """Where libconvpool_plugin.so lies.  Raises TensorRTError if it is not there."""
    path = Path(os.environ.get("CONVPOOL_PLUGIN_LIBRARY") or Path(__file__).parent / LIBRARY)
    if not path.is_file():
        raise TensorRTError(
            f"{LIBRARY}: not found; got {path}, expected the built library; install convpool where a C++ compiler is "
            "present, or build plugin/ with CMake and set CONVPOOL_PLUGIN_LIBRARY"
        )
    return path.resolve()


def tensorrt_module(name: str = "tensorrt") -> ModuleType:
    """TensorRT's Python package.  Raises TensorRTError, with how to get it, if it is missing or too old."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise TensorRTError(f"{name}: cannot be imported; got {error}; pip install {name}") from error
    if not hasattr(module, "get_plugin_registry") and not hasattr(module, "Runtime"):
        raise TensorRTError(f"{name}: not TensorRT; got {getattr(module, '__file__', module)}; pip install {name}")
    if name == "tensorrt" and not _OLDEST <= version(module) < (_NEWEST + 1, 0):
        raise TensorRTError(f"{name}: version; got {module.__version__}, expected 8.6 to {_NEWEST}")
    return module


def version(trt: ModuleType) -> tuple[int, int]:
    """(major, minor) of a TensorRT package."""
    major, minor = trt.__version__.split(".")[:2]
    return int(major), int(minor)


def find_creator(trt: ModuleType, op_type: str = operator.OP_TYPE) -> Any:
    """The registry's creator of one of the operators, or None."""
    registry = trt.get_plugin_registry()
    find = getattr(registry, "get_creator", None) or registry.get_plugin_creator
    return find(op_type, "1", "")


def load_plugin(trt: ModuleType | None = None) -> Path:
    """Register the plugin with TensorRT in this process, once; a second call does nothing.  Returns the library's path.

    trt: TensorRT's package, default `import tensorrt`.  Raises TensorRTError.
    """
    trt = trt or tensorrt_module()
    path = plugin_path()
    with _loading:
        if find_creator(trt) is None:
            _register(trt, path)
    missing = [name for name in operator.OP_TYPES if find_creator(trt, name) is None]
    if missing:
        got = "none of the operators" if len(missing) == len(operator.OP_TYPES) else f"no {missing[0]}"
        raise TensorRTError(
            f"{path}: plugins; got {got} in TensorRT {trt.__version__}, expected {len(operator.OP_TYPES)}; "
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


def logger(trt: ModuleType) -> Any:
    """The one logger of this process for TensorRT, which keeps its errors and drops the rest."""
    if trt.__name__ not in _loggers:

        class Log(trt.ILogger):
            def __init__(self) -> None:
                trt.ILogger.__init__(self)
                self.errors: list[str] = []

            def log(self, severity: Any, message: str) -> None:
                if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                    self.errors.append(message)

            def explain(self, error: BaseException | str = "") -> str:
                """The error and what TensorRT logged since the last call, on one line."""
                texts, self.errors = [str(error), *self.errors[-4:]], []
                return " ".join(" | ".join(text for text in texts if text).split())

        _loggers[trt.__name__] = Log()
    return _loggers[trt.__name__]
