# SPDX-License-Identifier: Apache-2.0
"""Exceptions of `convpool.cuda`.  Messages read `<argument>: <what>; got X, expected Y; <next step>`."""

from __future__ import annotations

from convpool.errors import ConvpoolError


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
