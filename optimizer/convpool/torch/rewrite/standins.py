# SPDX-License-Identifier: Apache-2.0
"""What a traced forward gets in the place of tensors: stand-ins that note, or refuse, what a graph of torch.fx would drop."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import Attribute

from convpool.algebra.geometry import refuse
from convpool.torch.rewrite.foreign import Untraceable
from convpool.torch.rewrite.sizes import asks_for_sizes

_OWN = frozenset({"tracer", "node", "root", "attr", "_node"})
"""Attributes of torch.fx's stand-ins."""
_STATES = frozenset({"grad_fn", "grad", "_base", "_backward_hooks"})
"""Attributes of tensors that may be None, which a stand-in's never is."""


def _in_place(name: str) -> Any:
    """The method of x += y and its like: torch.fx would let x become a new tensor, and leave the old one as it was."""
    function, plain = getattr(operator, f"i{name.strip('_')}"), getattr(operator, name)

    def change(self: Any, other: Any) -> Any:
        if _is_number(self.node):
            return plain(self, other)
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return change


def _is_number(node: fx.Node) -> bool:
    """Whether a node is made of sizes alone; numbers never change."""
    if asks_for_sizes(node):
        return True
    given = node.all_input_nodes
    pure = getattr(node.target, "__module__", None) in ("_operator", "builtins", "math")
    return node.op == "call_function" and pure and bool(given) and all(map(_is_number, given))


def _question(what: str) -> Any:
    """A method that no stand-in can answer; forward may catch the error."""

    def ask(self: Any, *args: Any) -> Any:
        self.tracer.questions = True
        raise TypeError(f"{what} of a value that nobody knows while forward is followed")

    return ask


class _Noting:
    """What all stand-ins have in common."""

    tracer: Any

    def __format__(self, format_spec: str) -> str:
        self.tracer.questions = True
        return super().__format__(format_spec)

    def __getattr__(self, k: str) -> Any:
        if k in _STATES:
            raise Untraceable(refuse("state of a tensor that forward asks for", k, "none"))
        return _AttributeOf(self, k)

    def __setattr__(self, k: str, v: Any) -> None:
        if k not in _OWN:
            raise Untraceable(refuse("attributes of tensors that forward sets", k, "none"))
        super().__setattr__(k, v)

    __int__, __float__, __complex__, __len__, __setitem__ = map(_question, ("int", "float", "complex", "len", "an item"))
    __iadd__, __isub__, __imul__, __itruediv__ = map(_in_place, ("add", "sub", "mul", "truediv"))
    __ifloordiv__, __imod__, __ipow__, __imatmul__ = map(_in_place, ("floordiv", "mod", "pow", "matmul"))
    __ilshift__, __irshift__ = map(_in_place, ("lshift", "rshift"))
    __iand__, __ior__, __ixor__ = map(_in_place, ("and_", "or_", "xor"))


class Value(_Noting, fx.Proxy):
    """A stand-in for what an operator gives."""


class _AttributeOf(_Noting, Attribute):
    """A stand-in for an attribute, or for a method that is called next."""


class Input(Value):
    """A stand-in for a tensor among the arguments: it has no attributes that tensors lack, for forward may ask."""

    def __getattr__(self, k: str) -> Any:
        if not hasattr(torch.Tensor, k):
            raise AttributeError(f"'Tensor' object has no attribute {k!r}")
        return super().__getattr__(k)
