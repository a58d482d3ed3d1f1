"""Exceptions of `convpool.tensorrt`.  Messages read `<what>: <problem>; got X, expected Y; <next step>`."""

from __future__ import annotations

from convpool.errors import ConvpoolError


class TensorRTError(ConvpoolError):
    """TensorRT, its plugin library or the GPU's memory interface is missing, or refuses a model or an engine."""
