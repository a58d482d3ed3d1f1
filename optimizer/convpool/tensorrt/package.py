# SPDX-License-Identifier: Apache-2.0
"""The Python package of TensorRT: which one is there, its version, and the log of its errors."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from convpool.errors import TensorRTError

OLDEST, NEWEST = (8, 6), 11
"""The oldest version, and the newest major version, that convpool works with."""
STRONGLY_TYPED_SINCE = 10
"""The first major version whose networks compute in the types that the model says."""
_loggers: dict[str, Any] = {}


def tensorrt_module(name: str = "tensorrt") -> ModuleType:
    """TensorRT's Python package.  Raises TensorRTError, with how to get it, if it is missing or too old."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise TensorRTError(f"{name}: cannot be imported; got {error}; pip install {name}") from error
    if not hasattr(module, "get_plugin_registry") and not hasattr(module, "Runtime"):
        raise TensorRTError(f"{name}: not TensorRT; got {getattr(module, '__file__', module)}; pip install {name}")
    if name == "tensorrt" and not OLDEST <= version(module) < (NEWEST + 1, 0):
        raise TensorRTError(f"{name}: version; got {module.__version__}, expected 8.6 to {NEWEST}")
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
