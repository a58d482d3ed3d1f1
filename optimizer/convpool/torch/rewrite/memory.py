# SPDX-License-Identifier: Apache-2.0
"""What the modules under a root hold, to be compared with what they held before and put back; and their hooks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
WEIGHT_HOOKS = (SpectralNorm, WeightNorm)
"""Hooks in front of forward that compute a parameter and do nothing else."""


def has_hooks(module: nn.Module) -> bool:
    """Whether anything runs beside the module's forward when it is called."""
    return any(module.__dict__.get(name) for name in HOOKS)


def has_own_hooks(module: nn.Module) -> bool:
    """Whether a hook runs that may do anything, not only compute a weight."""
    return any(not isinstance(hook, WEIGHT_HOOKS) for name in HOOKS for hook in (module.__dict__.get(name) or {}).values())


def of_torch(module: nn.Module) -> bool:
    """Whether PyTorch wrote the module's class."""
    return type(module).__module__.startswith("torch.")


def followed(module: nn.Module) -> Iterator[nn.Module]:
    """The module and those in it, but for what a graph holds whole because of its hooks."""
    yield module
    for child in module.children():
        if of_torch(child) or not has_hooks(child):
            yield from followed(child)


class Memory:
    """What the modules under a root hold, to be compared and put back; parameters too if forward is run with numbers."""

    def __init__(self, root: nn.Module, *, parameters: bool = False) -> None:
        self._held = [(name, module, self._of(module)) for name, module in root.named_modules()]
        attributes = [value for m in root.modules() for value in vars(m).values() if isinstance(value, torch.Tensor)]
        buffers = [x for x in (*root.buffers(), *attributes) if not nn.parameter.is_lazy(x) and not x.is_inference()]
        self._buffers = [(buffer, buffer._version, buffer.detach().clone()) for buffer in buffers]
        owned = [x for x in (*root.parameters(), *buffers) if not nn.parameter.is_lazy(x)] if parameters else []
        self._tensors = [(x, x.data, x.detach().clone(), x.requires_grad) for x in owned]

    @staticmethod
    def _of(module: nn.Module) -> dict[str, tuple[Any, Any]]:
        return {key: (value, _contents(value)) for key, value in module.__dict__.items()}

    def restore(self) -> list[str]:
        """Put everything back, the numbers in buffers too; names of attributes that had changed."""
        changed = []
        for buffer, version, numbers in self._buffers:
            if buffer._version != version:
                buffer.detach().copy_(numbers)
        for x, data, numbers, required in self._tensors:  # which x.data = ... changes, too, without another version
            if x.data_ptr() != data.data_ptr() or x.shape != data.shape:
                x.data = data
            if not torch.equal(data, numbers):
                data.copy_(numbers)
            x.requires_grad_(required)
        for name, module, before in self._held:
            now = module.__dict__
            for key in [*now]:
                if key not in before:
                    changed.append(f"{name}.{key}".lstrip("."))
                    del now[key]
            for key, (value, contents) in before.items():
                if key not in now or now[key] is not value or not _same(_contents(value), contents):
                    changed.append(f"{name}.{key}".lstrip("."))
                    now[key] = value
                    if contents is not None:
                        value.clear()
                        value.extend(contents) if isinstance(value, list) else value.update(contents)
        return changed


def without_hooks(root: nn.Module, *, parameters: bool = False) -> Memory:
    """Take all hooks but those that compute a weight from the modules under a root; `restore` puts them back."""
    memory = Memory(root, parameters=parameters)
    for module in root.modules():
        for kind in HOOKS:
            hooks = module.__dict__.get(kind)
            if hooks and not isinstance(module, torch.jit.ScriptModule):
                kept = ((key, hook) for key, hook in hooks.items() if isinstance(hook, WEIGHT_HOOKS))
                module.__dict__[kind] = OrderedDict(kept)
    return memory


@contextmanager
def without_caches() -> Iterator[None]:
    """Let nothing that is made here stay for calls that follow: no cast weight of autocast's, none of parametrize.cached()."""
    casts, cached = torch.is_autocast_cache_enabled(), parametrize._cache_enabled
    torch.set_autocast_cache_enabled(False)
    parametrize._cache_enabled -= cached
    try:
        yield
    finally:
        parametrize._cache_enabled += cached
        torch.set_autocast_cache_enabled(casts)


def _contents(value: Any) -> Any:
    """A copy of a list, dictionary or set, not of what is in it; None for anything else."""
    return value.copy() if isinstance(value, (list, dict, set)) else None


def _same(now: Any, before: Any) -> bool:
    if now is None or before is None:
        return now is before
    if len(now) != len(before):
        return False
    if isinstance(now, set):
        return now == before
    pairs = zip(now, before, strict=True) if isinstance(now, list) else ((now[key], before.get(key)) for key in now)
    return all(a is b for a, b in pairs)
