# SPDX-License-Identifier: Apache-2.0
"""What `optimize` asks of a module: which of its submodules to look at, with which arguments, and the plans for its modes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from convpool.torch.rewrite.memory import has_hooks, without_caches, without_hooks
from convpool.torch.rewrite.reads import Held, noted
from convpool.torch.rewrite.regions import Planned, Region, own_class


def callable_module(module: nn.Module) -> bool:
    """Whether the module has a forward: a ModuleList has none."""
    return getattr(type(module), "forward", None) is not getattr(nn.Module, "forward", None)


def is_leaf(module: nn.Module) -> bool:
    return not any(True for _ in module.children()) and type(module).__module__.startswith("torch.nn")


def stand_ins(module: nn.Module) -> tuple:
    """A tensor for each argument that a call needs."""
    parameters = list(inspect.signature(own_class(type(module)).forward).parameters.values())[1:]  # type: ignore[attr-defined]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(
        torch.empty((), dtype=torch.float32, device="cpu")
        for p in parameters
        if p.kind in kinds and p.default is inspect.Parameter.empty
    )


def plans(module: nn.Module, region: Region, args: tuple, kwargs: dict[str, Any]) -> Planned | None:
    """The plan for the module's mode; those of the other modes are made too, so that torch.compile finds them."""
    planned = None
    for training in (not module.training, None):
        with _mode(module, training):
            for grad in (not module.training, module.training):
                with torch.set_grad_enabled(grad):
                    planned = region.planned(module, args, kwargs)
                if planned is None or planned.refusal is not None and planned.report is None:
                    return planned
    return planned


@contextmanager
def _mode(module: nn.Module, training: bool | None) -> Iterator[None]:
    """All modules in training or in evaluation, as they are for None."""
    before = [(m, m.training) for m in module.modules()]
    try:
        for m, _ in before if training is not None else ():
            m.training = bool(training)
        yield
    finally:
        for m, mode in before:
            m.training = mode


def outermost(module: nn.Module, path: str, found: list[tuple[str, nn.Module]]) -> None:
    """Submodules with hooks, which the graph of the whole holds as one node each."""
    for name, child in module.named_children():
        place = f"{path}.{name}".lstrip(".")
        if has_hooks(child) and not is_leaf(child):
            found.append((place, child))
        else:
            outermost(child, place, found)


def calls(
    module: nn.Module, inside: Sequence[tuple[str, nn.Module]], path: str, args: tuple, kwargs: dict[str, Any]
) -> dict[str, tuple[tuple, dict[str, Any]]]:
    """The arguments that submodules get in a call of the module, by path; it leaves no trace in the module."""
    calls: dict[str, tuple[tuple, dict[str, Any]]] = {}
    handles = []
    places = {f"{path}.{name}".lstrip("."): child for name, child in module.named_modules() if child is not module}
    memory, held = without_hooks(module, parameters=True), Held()

    def note(place: str) -> Any:
        return lambda child, given, named: calls.setdefault(place, (given, named)) and None

    try:
        for place, child in places.items():
            handles.append(child.register_forward_pre_hook(note(place), with_kwargs=True))
        with noted(held, module), _mode(module, False), torch.no_grad(), without_caches(), torch.random.fork_rng(devices=[]):
            own_class(type(module)).forward(module, *args, **kwargs)  # type: ignore[attr-defined]
    except Exception:  # noqa: S110 - an example that forward does not take: then there are no calls
        pass
    finally:
        for handle in handles:
            handle.remove()
        memory.restore()
        held.restore()
    return calls
