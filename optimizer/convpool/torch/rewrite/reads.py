# SPDX-License-Identifier: Apache-2.0
"""What a forward reads during a trace besides stand-ins, numbers, words and modules; a plan holds it as it was.

Attributes that are functions, lists, dictionaries or objects, and constants of a module's class: `Held` tells at every call
whether they are still the same, down to what is in them.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import random
import threading
import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from convpool.torch.rewrite.memory import followed

VALUES = (type(None), bool, int, float, complex, str, bytes, np.generic, enum.Enum, torch.dtype, torch.device)
"""What never changes itself, and can be compared."""
CONTAINERS = (list, dict, set, deque)
MOST, MOST_NUMBERS = 200, 1 << 16
"""Lists, dictionaries and objects that are looked into, and numbers of an array that are compared."""
_OWN = frozenset({*vars(nn.Module()), "_convpool_region", "_modules", "training"})
_PLAIN = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type, nn.Module, torch.Tensor)
"""What is compared as a whole; modules and tensors are followed elsewhere."""
_NOTHING = object()


@dataclass
class Held:
    """Attributes by their places, and the lists, dictionaries and objects in them, each with a copy."""

    attributes: dict[tuple[int, str], tuple[Mapping, str, Any]] = field(default_factory=dict)
    inside: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    lists: dict[int, tuple] = field(default_factory=dict)
    """Those of `inside` that are lists of numbers and words."""
    tensors: dict[tuple[int, str], tuple[Mapping, str, tuple]] = field(default_factory=dict)
    """Attributes that are tensors, neither parameters nor buffers: each call reads them, but a plan depends on their sizes."""
    generators: list[tuple[Any, Any]] = field(default_factory=list)
    """Those of random numbers, and their states."""

    def note(self, owner: Any, own: Mapping, name: str, value: Any) -> None:
        """Keep an attribute of a module or class as it is now.  own: what holds it."""
        place = id(owner), name
        if place not in self.attributes:
            self.attributes[place] = (own, name, value)
            self._look_into(value)

    def _look_into(self, value: Any) -> None:
        for item in _parts(value):
            self._look_into(item)
        state = _state_of(value)
        if state is not None:
            self.generators.append((value, state))
            return
        container = _container(value)
        if container is None or id(container) in self.inside or len(self.inside) >= MOST:
            return
        copy = container.copy()
        self.inside[id(container)] = (container, copy)
        if isinstance(copy, np.ndarray):
            return
        if type(copy) is list and all(type(item) in _FOLLOWED for item in copy):
            self.lists[id(container)] = tuple(copy)
        for item in [*copy.values()] if isinstance(copy, dict) else [*copy]:
            self._look_into(item)

    def changed(self) -> list[str]:
        """The attributes that are others now; a word for what is in them."""
        found = [name for own, name, value in self.attributes.values() if not same(own.get(name, _NOTHING), value)]
        found += [name for own, name, kind in self.tensors.values() if _kind_of(own.get(name)) != kind]
        if not all(same_items(container, copy) for container, copy in self.inside.values()):
            found.append("what is in an attribute")
        return found

    def stays(self) -> bool:
        """Whether everything is as it was."""
        if torch.compiler.is_compiling():
            if not all([_kind_of(own.get(name)) == kind for own, name, kind in self.tensors.values()]):
                return False
            found = 0
            for own, name, value in self.attributes.values():
                now = own.get(name)
                if type(now) is list:  # not by the copies in `inside`: TorchDynamo takes a tuple with lists for a constant
                    if not _is_list_of(now, self.lists.get(id(value), ())):
                        return False
                    found += 1
                elif now is not value and (type(value) not in _FOLLOWED or now != value):
                    return False
            return len(self.inside) == found
        return not (self.attributes or self.tensors) or not self.changed()

    def drew(self) -> bool:
        """Whether random numbers came from a generator among the attributes."""
        return any(repr(_state_of(generator)) != repr(state) for generator, state in self.generators)

    def restore(self) -> None:
        """Put back what is in the lists, dictionaries and objects, and the generators' states."""
        for generator, state in self.generators:
            if isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            elif isinstance(generator, torch.Generator):
                generator.set_state(torch.tensor(state, dtype=torch.uint8))
            else:
                generator.setstate(state)
        for container, copy in self.inside.values():
            if same_items(container, copy):
                continue
            if isinstance(container, np.ndarray):
                container[...] = copy
            else:
                container.clear()
                container.extend(copy) if isinstance(container, (list, deque)) else container.update(copy)

    def add(self, other: Held) -> None:
        """Take what another one holds."""
        self.attributes.update(other.attributes)
        self.inside.update(other.inside)
        self.lists.update(other.lists)
        self.tensors.update(other.tensors)


def _kind_of(value: Any) -> Any:
    """Shape and type of a tensor, None for anything else."""
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None


def _is_list_of(now: list, items: tuple) -> bool:
    """Whether a list has these numbers and words."""
    return len(now) == len(items) and all([a == b for a, b in zip(now, items, strict=False)])


def _parts(value: Any) -> tuple:
    """What a tuple holds, a method's object, or what functools.partial has been given."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, functools.partial):
        return (value.func, *value.args, value.keywords)
    return (value.__self__,) if isinstance(value, types.MethodType) else ()


def _container(value: Any) -> Any:
    """What is to be looked into: a list, dictionary, set or array, or an object's attributes; None for others."""
    if isinstance(value, CONTAINERS):
        return value
    if isinstance(value, np.ndarray):
        return value if value.size <= MOST_NUMBERS and not value.dtype.hasobject else None
    own = None if isinstance(value, (*_PLAIN, *VALUES)) else getattr(value, "__dict__", None)
    return own if type(own) is dict else None


def _state_of(value: Any) -> Any:
    """The state of a generator of random numbers, None for anything else."""
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    return value.getstate() if isinstance(value, random.Random) else None


def same(now: Any, before: Any) -> bool:
    """Whether a value is what it was: the same object, or one that never changes and is equal."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, tuple):
        return len(now) == len(before) and all(map(same, now, before))
    return isinstance(now, VALUES) and bool(now == before)


def same_items(now: Any, before: Any) -> bool:
    """Whether a list, dictionary or set has the same items in the same order as its copy."""
    if isinstance(now, np.ndarray):
        return np.array_equal(now, before)
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(map(same, now, before)) and all(map(same, now.values(), before.values()))
    return now == before if isinstance(now, set) else all(map(same, now, before))


@contextlib.contextmanager
def noted(held: Held, root: nn.Module) -> Iterator[None]:
    """Let `held` have the attributes that this thread reads of modules, numbers and words only of those that are not followed."""
    known = {id(module) for module in followed(root)}
    thread, read = threading.get_ident(), object.__getattribute__

    def reading(self: Any, name: str) -> Any:
        value = read(self, name)
        is_known = id(self) in known
        if threading.get_ident() != thread or name in _OWN and (is_known or name != "training"):
            return value
        own = read(self, "__dict__")
        if isinstance(value, (torch.Tensor, nn.Module)):
            if name in own and type(value) is torch.Tensor:
                held.tensors[(id(self), name)] = (own, name, _kind_of(value))
        elif name in own:
            if type(value) not in _FOLLOWED or not is_known:
                held.note(self, own, name, value)
        elif isinstance(value, (*VALUES, *CONTAINERS)) and not name.startswith("__"):
            cls = next((cls for cls in type(self).__mro__ if name in vars(cls)), nn.Module)
            if not cls.__module__.startswith("torch.") and same(vars(cls).get(name, _NOTHING), value):
                held.note(cls, vars(cls), name, value)
        return value

    module: Any = nn.Module
    module.__getattribute__ = reading
    try:
        yield
    finally:
        del module.__getattribute__


_FOLLOWED = (type(None), bool, int, float, str)
"""Attributes that regions.py compares at every call."""
