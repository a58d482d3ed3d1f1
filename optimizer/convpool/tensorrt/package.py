# SPDX-License-Identifier: Apache-2.0
"""The Python package of TensorRT: which one is there, its version, the log of its errors, and convpool's plugins in its registry.

The plugins' library is libconvpool.so, which serves TensorRT 8.6 to 11.  The environment variable CONVPOOL_PLUGIN_LIBRARY names
another file.
"""

import ctypes
import importlib
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from convpool.algebra.parts import OP_TYPE
from convpool.cuda.library import library_path, named_file
from convpool.errors import LibraryError, TensorRTError
from convpool.ir import schema

OLDEST, NEWEST = (8, 6), 11
"""The oldest version, and the newest major version, that convpool works with."""
STRONGLY_TYPED_SINCE = 10
"""The first major version whose networks compute in the types that the model says."""
_loggers: dict[str, Any] = {}


def tensorrt_module() -> ModuleType:
    """TensorRT's Python package.  Raises TensorRTError, with how to get it, if it is missing or of another version."""
    try:
        module = importlib.import_module("tensorrt")
    except ImportError as error:
        raise TensorRTError(f"tensorrt: cannot be imported; got {error}; pip install tensorrt") from error
    if not hasattr(module, "get_plugin_registry") and not hasattr(module, "Runtime"):
        raise TensorRTError(f"tensorrt: not TensorRT; got {getattr(module, '__file__', module)}; pip install tensorrt")
    if not OLDEST <= version(module) < (NEWEST + 1, 0):
        raise TensorRTError(f"tensorrt: version; got {module.__version__}, expected 8.6 to {NEWEST}")
    return module


def version(trt: ModuleType) -> tuple[int, int]:
    """(major, minor) of a TensorRT package."""
    major, minor = trt.__version__.split(".")[:2]
    return int(major), int(minor)


def parser_major(trt: ModuleType) -> int:
    """The major version of TensorRT whose parser and networks the package has; TensorRT-RTX has those of TensorRT 11."""
    return NEWEST if "rtx" in trt.__name__ else version(trt)[0]


def is_weakly_typed(trt: ModuleType) -> bool:
    """Return True if flags of the builder, not types of the model, choose TensorRT's precision."""
    return parser_major(trt) < STRONGLY_TYPED_SINCE


def logger(trt: ModuleType) -> Any:
    """The one logger of this process for TensorRT, which keeps its errors and drops the rest."""
    if trt.__name__ not in _loggers:

        class Log(trt.ILogger):  # type: ignore[name-defined]
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
    return (getattr(registry, "get_creator", None) or registry.get_plugin_creator)(op_type, "1", "")


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
