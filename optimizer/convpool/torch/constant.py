# SPDX-License-Identifier: Apache-2.0
"""The promise that weights stay as they are: what a plan makes of them is then made once.

The fastest plan of a small layer reads the weights convolved with the pooling window.  Making those takes as long as the layer,
so that without the promise other plans run.  No check of a tensor's version could stand in for the promise: changes through
`.data`, as moving averages of weights are often written, do not count there.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from convpool.cuda import library


class Kept(NamedTuple):
    """Of a plan: the weights in the library's order, None if they are so already, and transformed.

    alive: tells when the weights are gone, and others may get their address.
    """

    dense: torch.Tensor | None
    prepared: torch.Tensor
    alive: Any = None


class Store(dict[Any, Any]):
    """What is kept inside a `constant_weights`.

    passing: calls whose weights were gone in it, as those are that every forward pass computes.  Nothing more is kept of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.passing: set[Any] = set()


_kept: ContextVar[Store | None] = ContextVar("convpool_constant_weights", default=None)
current = _kept.get
"""What is kept inside a `constant_weights`, None outside."""


@contextlib.contextmanager
def constant_weights() -> Iterator[None]:
    """Within this context no weight of a convpool layer changes: a promise of the caller's, for inference on a GPU.

    It is about a BatchNorm in front of a layer too, which is then part of it.  Weights are transformed once in the context, by
    their first call outside a CUDA graph's capture, which waits for it.  A graph that is captured afterwards reads what was made:
    it is of no use once the context is left.  A weight that is changed in it may count or not.
    """
    token = _kept.set(Store())
    try:
        yield
    finally:
        _kept.reset(token)


def prepared_for(key: Any, weight: torch.Tensor, dense: Any, nbytes: int) -> tuple[Kept, int]:
    """What is kept of a weight, or memory for it, and the launch's flags: whether an earlier launch has transformed it."""
    kept = _kept.get()
    found = None if kept is None else kept.get(key)
    if found is not None:
        return found, library.WEIGHTS_PREPARED
    copy = dense(weight)
    return Kept(None if copy is weight else copy, torch.empty(nbytes, dtype=torch.uint8, device=weight.device)), 0


def keep(key: tuple[Any, Any], weight: torch.Tensor, made: Kept) -> None:
    """Keeps what a launch has transformed, for all streams, as long as the weights live.

    Not what a capture has: its graph may run long after.  key: the call, and the weights' address.
    """
    kept = _kept.get()
    if kept is None or torch.cuda.is_current_stream_capturing():
        return
    torch.cuda.current_stream().synchronize()
    store = weakref.ref(kept)

    def gone(_: Any) -> None:
        held = store()
        if held is not None:
            held.pop(key, None)
            held.passing.add(key[0])

    kept[key] = made._replace(alive=weakref.ref(weight, gone))
