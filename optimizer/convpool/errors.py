# SPDX-License-Identifier: Apache-2.0
"""Exceptions raised by convpool.  Messages read `<where>: <what>; got X, expected Y; <next step>`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convpool.report import Report


class ConvpoolError(Exception):
    """Base of every exception that convpool raises on purpose."""


class OptionError(ConvpoolError, ValueError):
    """An option or argument has an unusable value."""


class ModelError(ConvpoolError):
    """The model cannot be read, is not valid ONNX, or cannot be run."""


class OutputError(ConvpoolError):
    """The result cannot be written where it was asked for."""


class TensorRTError(ConvpoolError):
    """TensorRT, its plugin library or the GPU's memory interface is missing, or refuses a model or an engine."""


class TorchError(ConvpoolError, ImportError):
    """PyTorch is not installed."""


class OnnxruntimeError(ConvpoolError):
    """onnxruntime, its CUDA provider or the library of custom operators is missing, or refuses a model."""


class LibraryError(ConvpoolError):
    """libconvpool.so is not there, cannot be loaded, or is another version's."""


class NotBuiltError(LibraryError):
    """The distribution with libconvpool.so is not installed."""


class ProblemError(ConvpoolError, ValueError):
    """An argument describes no ConvAvgPool: a shape, an attribute or an option."""


class ArrayError(ConvpoolError, TypeError):
    """An array argument of the wrong kind, type, shape, memory order or device."""


class UnsupportedError(ConvpoolError):
    """The tactic asked for does not run this problem on this device; the message says why."""


class CudaError(ConvpoolError, RuntimeError):
    """The CUDA runtime refused a call."""


class VerificationError(ConvpoolError):
    """Original and result disagree.  `report` holds the whole report, with the per-output errors, when there is one."""

    def __init__(self, message: str, report: Report | None = None) -> None:
        super().__init__(message)
        self.report = report


def first_line(error: BaseException) -> str:
    """An exception's message on one line, shortened."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def printable(text: str) -> str:
    """A text with its control characters as `repr` has them: names come from files, and a terminal obeys what it is sent."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
