# SPDX-License-Identifier: Apache-2.0
"""The contexts that a captured forward enters and leaves: torch.no_grad(), torch.autocast(), transforms of torch.func and others.

In a graph of TorchDynamo's they are nodes that read no tensor and give none.  Such a switch counts for all nodes behind it, up to
the one that takes it back:

    _set_grad_enabled(False)                            _set_grad_enabled(True)
    enter = _enter_autocast("cpu", torch.bfloat16)      _exit_autocast(enter)
    _vmap_increment_nesting(4, "error")                 _vmap_decrement_nesting()

A pair is rewritten only where all of it runs in the same context, and in no transform, whose tensors the operator does not know.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import fx

from convpool.torch.changes import value_of

Context: TypeAlias = tuple[str, ...]
TRANSFORM = "torch.func"
"""In a context: a transform of torch.func, or a level of forward-mode derivatives."""
_GRAD = "_set_grad_enabled"
_BEGINS = ("_increment_nesting", "enter_dual_level")
_DATA = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, tuple, list, int, float)


def contexts_of(graph: fx.Graph) -> dict[fx.Node, Context]:
    """The context of each node of a graph that is called in the current mode of gradients."""
    found: dict[fx.Node, Context] = {}
    on: dict[Any, str] = {_GRAD: _text(_GRAD, (torch.is_grad_enabled(),))}
    for node in graph.nodes:
        data = any(isinstance(value_of(item), _DATA) for item in (node, *node.all_input_nodes))
        if node.op == "call_function" and (not data or _name(node).endswith(_BEGINS)):  # vmap's reads the size of an open batch
            _turn(on, node)
        found[node] = tuple(on.values())
    return found


def _turn(on: dict[Any, str], switch: fx.Node) -> None:
    """on: what is set, by the name of the function that sets it, or the switch that enters it."""
    name = _name(switch)
    if name.endswith(_BEGINS):
        on[switch] = TRANSFORM
    elif name.endswith(("_decrement_nesting", "exit_dual_level")):
        del on[[key for key, text in on.items() if text == TRANSFORM][-1]]
    elif name.startswith("_exit_") and switch.all_input_nodes:
        for entered in switch.all_input_nodes:
            del on[entered]
    else:
        on[switch if name.startswith("_enter_") else name] = _text(name, switch.args)


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))


def _text(name: str, args: tuple) -> str:
    return f"{name}({', '.join(map(str, args))})"
