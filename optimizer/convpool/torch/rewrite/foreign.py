# SPDX-License-Identifier: Apache-2.0
"""Real tensors that a forward meets in a trace: they are no stand-ins, so that what it learns of them would stay for ever.

Parameters and buffers are stand-ins where forward reads them as attributes of modules.  `self.parameters()`, tensors in lists,
and attributes that are plain tensors give real ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from convpool.algebra.geometry import refuse

IN_PLACE = frozenset({"__setitem__", "__set__", "__delitem__"})
TYPES = (torch.Tensor.dtype.__get__, torch.Tensor.device.__get__)
"""What asks for the type or the place of a tensor."""


class Untraceable(Exception):
    """Why forward cannot be followed; args[0] is the Refusal."""


class Watch(TorchFunctionMode):
    """Notes in a tracer the questions for numbers of real tensors, and stops at a change of one.

    Tensors that forward itself has made of numbers may be asked and changed.
    """

    def __init__(self, tracer: Any) -> None:
        super().__init__()
        self._tracer = tracer
        self._own: dict[int, torch.Tensor] = {}
        """Tensors that forward has made of numbers, kept so that no other gets their places."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function."""
        kwargs = kwargs or {}
        given = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, fx.Proxy) for leaf in given):
            return func(*args, **kwargs)
        foreign = [leaf for leaf in given if isinstance(leaf, torch.Tensor) and _memory(leaf) not in self._own]
        name = getattr(func, "__name__", "")
        if foreign and (_is_in_place(name) or kwargs.get("out") is not None):
            raise Untraceable(refuse("tensors that forward changes", f"one by {name}", "none but those of its graph"))
        result = func(*args, **kwargs)
        leaves = [result] if result is None else pytree.tree_leaves(result)
        if not foreign and not any(isinstance(leaf, torch.Generator) for leaf in given):
            self._own.update((_memory(leaf), leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
        elif func in TYPES:
            self._tracer.types = True
        elif not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            self._tracer.numbers.append(name if name != "__get__" else getattr(func.__self__, "__name__", name))
        return result


def _memory(x: torch.Tensor) -> int:
    """Which memory a tensor has; a parameter has that of the tensor that it was made of."""
    return x.untyped_storage()._cdata if x.layout == torch.strided else id(x)


def _is_in_place(name: str) -> bool:
    if name.endswith("__"):
        return name in IN_PLACE or f"{name[:2]}{name[3:]}" in dir(torch.Tensor) and name[2] == "i"
    return name.endswith("_")
