# SPDX-License-Identifier: Apache-2.0
"""The names that end with release 0.4, with a warning until then: `constant_weights` and the argument `accumulation`.

torch.compile, which cannot follow a warning into one graph, follows these calls without it.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch


def warn(what: str, instead: str, level: int = 3) -> None:
    """Say that a name ends, and what to write, to the caller of who calls this.  level: of another one, as warnings count."""
    if not torch.compiler.is_compiling():
        warnings.warn(f"{what} ends with release 0.4; {instead}", DeprecationWarning, stacklevel=level)


def without_accumulation(function: Callable) -> Callable:
    """The function, which still takes `accumulation`, and does nothing with it."""

    @functools.wraps(function)
    def run(*args: Any, **keywords: Any) -> Any:
        if "accumulation" in keywords:
            warn("accumulation", "convpool.torch sums in float32; leave it out")
            del keywords["accumulation"]
        return function(*args, **keywords)

    return run


@contextlib.contextmanager
def constant_weights() -> Iterator[None]:
    """A context that does nothing any more: weights are transformed in each call."""
    warn("constant_weights", "it does nothing, leave it out", level=4)
    yield
