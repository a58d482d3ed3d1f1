# SPDX-License-Identifier: Apache-2.0
"""A module's forward as a graph of torch.fx, or why there is none that does the same.

Symbolic tracing runs forward once with stand-ins for tensors.  It cannot follow flow that depends on values, and it drops without
a word what is no operation on a tensor.  So what forward did besides is compared and undone, and any of these refuses the graph:

- contexts such as torch.no_grad(), torch.autocast() or a checkpoint of activations: the graph would run outside of them;
- attributes that forward assigns, also those of tensors, and tensors that it makes: the graph would have those of the trace;
- questions for the type of a value that is no input: nobody knows it while the stand-ins run;
- questions whether autocast or inference mode is on: it may not be in the next call;
- stand-ins that forward keeps, in a global list for instance, and text that it prints;
- numbers of real tensors, such as those of self.parameters();
- random numbers that Python, numpy or PyTorch drew.

Calls of a torch.autograd.Function stay whole.  So do modules with hooks, for the trace would run the hooks once and for all.

A trace changes functions of PyTorch and `isinstance` for as long as it takes.  In other threads these do what they always do, and
a second trace waits for the first.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import gc
import random
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from convpool.algebra.geometry import Refusal, refuse
from convpool.torch.rewrite.foreign import Untraceable, Watch
from convpool.torch.rewrite.memory import Memory, has_hooks, without_caches
from convpool.torch.rewrite.reads import Held, noted
from convpool.torch.rewrite.standins import Input, Value

CONTEXTS = (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.autocast, torch.autograd.graph.saved_tensors_hooks)
STATES = (
    "is_autocast_enabled is_autocast_cpu_enabled get_autocast_dtype get_autocast_gpu_dtype get_autocast_cpu_dtype"
    " is_inference_mode_enabled get_default_dtype manual_seed seed set_rng_state get_rng_state"
).split()
"""Functions of torch by which a forward asks in what state it is called, or sets it; plans do not depend on it."""
NUMBERS = (bool, int, float, complex, str)
"""What the code of a graph can say; a class made of one of these, such as an IntEnum, has another text."""
_TRACING = threading.RLock()
"""Held by the thread that traces."""
FORWARD = "_convpool_forward"
"""The method that is traced; the root's class has it during a trace."""
PATH = "convpool_path"
"""Where a node of a captured graph keeps the path of the module around it."""


@dataclass(frozen=True)
class Captured:
    """The graph of a module's forward; its placeholders are the tensors among the arguments, in order.

    refusal: why the graph must not run in forward's place.  held: what it holds of attributes as they were.
    types: whether it depends on the types of the module's own tensors.  used: those of them that forward had from a list, say.
    """

    graph: fx.Graph
    refusal: Refusal | None
    held: Held = field(default_factory=Held)
    types: bool = False
    used: Sequence[torch.Tensor] = ()


def capture(root: nn.Module, args: tuple, kwargs: dict[str, Any], forward: Callable) -> Captured | Refusal:
    """The graph of `forward(root, *args, **kwargs)`; tensors in the arguments, at any depth, become placeholders.

    Other values in the arguments are taken as they are.  The module is as it was afterwards.
    """
    with _TRACING:
        return _capture(root, args, kwargs, forward)


def _capture(root: nn.Module, args: tuple, kwargs: dict[str, Any], forward: Callable) -> Captured | Refusal:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(self: nn.Module, values: Sequence[Any]) -> Any:
        given = list(leaves)
        for number, value in zip(tensors, values, strict=True):
            given[number] = value
        positional, named = pytree.tree_unflatten(given, spec)
        result = forward(self, *positional, **named)
        after, shape = pytree.tree_flatten((positional, named))
        if shape != spec or any(a is not b for a, b in zip(after, given, strict=True)):
            tracer.changes_arguments = True
        return result

    names = ", ".join(f"input_{number}" for number in range(len(tensors)))
    space: dict[str, Any] = {"call": call}
    exec(f"def forward(self, {names}):\n    return call(self, ({names}{',' if names else ''}))\n", space)
    tracer = Tracer([leaves[number] for number in tensors])
    before, held = Memory(root), Held()
    own = type(root)
    randomness = _randomness()
    try:
        setattr(own, FORWARD, space["forward"])  # not in forward's place: other threads may call the module
        with without_caches(), _watched(tracer), _silent(tracer), noted(held, root), Watch(tracer):
            graph = tracer.trace(root)
    except Untraceable as error:
        return error.args[0]
    except Exception as error:  # whatever forward does with stand-ins
        return refuse(
            "flow of forward", " ".join(f"{type(error).__name__}: {error}".split())[:200], "none that depends on values"
        )
    finally:
        if FORWARD in own.__dict__:
            delattr(own, FORWARD)
        written = [*before.restore(), *held.changed()]
        drawn = randomness != _randomness() or held.drew()
        held.restore()
    kept = tracer.kept()
    if tracer.questions:
        return Captured(graph, refuse("flow of forward", "a question for a value", "none that depends on values"))
    if drawn:
        return Captured(graph, refuse("random numbers in forward", "some that are no tensor of the graph", "none"))
    if tracer.numbers:
        return Captured(graph, refuse("numbers of tensors in forward", tracer.numbers[0], "none but those of its inputs"))
    if tracer.contexts:
        return Captured(graph, refuse("context in forward", ", ".join(sorted(tracer.contexts)), "none"))
    if tracer.states:
        return Captured(graph, refuse("state that forward asks for", ", ".join(sorted(tracer.states)), "none"))
    if tracer.prints:
        return Captured(graph, refuse("text that forward prints", "some", "none"))
    if tracer.asked:
        return Captured(graph, refuse("type that forward asks for", f"that of {tracer.asked[0]}", "that of an input"))
    if written:
        return Captured(graph, refuse("attributes that forward assigns", ", ".join(written), "none"))
    if tracer.changes_arguments:
        return Captured(graph, refuse("arguments that forward changes", "another list or dictionary", "the same"))
    if kept:
        return Captured(graph, refuse("values that forward keeps", "some outside of the module", "none"))
    return Captured(graph, None, held, tracer.types, tracer.used)


class Tracer(fx.Tracer):
    """torch.fx's tracer, which leaves modules with hooks whole and notes what a graph cannot hold."""

    proxy_buffer_attributes = True

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.contexts: set[str] = set()
        self.states: set[str] = set()
        self.asked: list[str] = []
        """Tensors other than inputs whose type forward asked for."""
        self.questions = False
        """Whether forward asked a stand-in for its value, of which it may have caught the error, or made text of one."""
        self.numbers: list[str] = []
        """Functions that gave numbers of tensors that are no stand-ins."""
        self.types = False
        """Whether forward asked for the type or device of such a tensor."""
        self.changes_arguments = False
        """Whether forward has put something else into a list or dictionary among its arguments."""
        self.inputs = inputs
        """The tensors among the arguments."""
        self.used: list[torch.Tensor] = []
        """The module's own tensors that forward had, not stand-ins for them."""
        self.prints = False
        """Whether forward has called print."""
        self._made: list[weakref.ref] = []
        """The stand-ins."""
        self._paths: list[str] = []
        self._grad = torch.is_grad_enabled()
        self._thread = threading.get_ident()
        self.traced_func_name = FORWARD

    def is_elsewhere(self) -> bool:
        """Whether another thread calls."""
        return threading.get_ident() != self._thread

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether the module stays one node."""
        return has_hooks(m) or isinstance(m, torch.jit.ScriptModule) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call of a module, with its path kept for the nodes in it."""
        if self.is_elsewhere():
            return forward(*args, **kwargs)
        self._paths.append(self.path_of_module(m))
        try:
            return super().call_module(m, forward, args, kwargs)
        finally:
            self._paths.pop()

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """An attribute of a module; a stand-in for a parameter or buffer."""
        return attr_val if self.is_elsewhere() else super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A stand-in for a node's value."""
        made = (Input if node.op == "placeholder" else Value)(node, self)
        self._made.append(weakref.ref(made))
        return made

    def kept(self) -> bool:
        """Whether somebody still has a stand-in when the trace is over; lists that have one lose it."""
        if all(made() is None for made in self._made):
            return False
        gc.collect()
        kept = [value for value in (made() for made in self._made) if value is not None]
        for value in kept:
            for holder in gc.get_referrers(value):
                if isinstance(holder, (list, deque)) and holder is not kept:
                    while any(item is value for item in holder):
                        del holder[next(number for number, item in enumerate(holder) if item is value)]
        return bool(kept)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """The truth of a stand-in, which has none."""
        self.questions = True
        return super().to_bool(obj)

    def iter(self, obj: fx.Proxy) -> Iterator:
        """The items of a stand-in, known where they are unpacked into variables."""
        try:
            return super().iter(obj)
        except fx.proxy.TraceError:
            self.questions = True
            raise

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """A node, with the path of the module around it."""
        node = super().create_node(*args, **kwargs)
        node.meta[PATH] = self._paths[-1] if self._paths else ""
        if parametrize._cache_enabled:
            self.contexts.add("torch.nn.utils.parametrize.cached()")
        if torch.is_grad_enabled() != self._grad:
            self.contexts.add(f"torch.set_grad_enabled({not self._grad})")
        return node

    def create_arg(self, a: Any) -> Any:
        """An argument or result; a tensor must be the module's own, and a graph knows no class of a dictionary or list."""
        if isinstance(a, torch.Tensor) and a not in self.tensor_attrs:
            self.used.append(a)
            if not any(a is own for own in (*self.root.parameters(), *self.root.buffers())):
                raise Untraceable(
                    refuse("tensors that forward makes", f"one of shape {list(a.shape)}", "none but from its inputs")
                )
        if not _is_made_of_its_items(a):
            raise Untraceable(refuse("class in forward", type(a).__name__, "one that only holds what it is given"))
        if isinstance(a, (dict, list)) and type(a) not in (dict, list) and not type(a).__module__.startswith("torch.fx."):
            raise Untraceable(refuse("dictionary or list in forward", f"one of class {type(a).__name__}", "Python's own"))
        if type(a) is np.float64:
            return float(a)
        if isinstance(a, (int, float, complex, str)) and type(a) not in NUMBERS:
            raise Untraceable(refuse("number or word in forward", f"one of class {type(a).__name__}", "Python's own"))
        return super().create_arg(a)


@contextlib.contextmanager
def _watched(tracer: Tracer) -> Iterator[None]:
    """Notes contexts that are entered and types that are asked for, and makes a node of each call of an autograd.Function."""
    own_isinstance = isinstance
    saved = [(cls, cls.__enter__) for cls in CONTEXTS]
    apply = torch.autograd.Function.__dict__["apply"]

    def noting(cls: type, enter: Callable) -> Callable:
        @functools.wraps(enter)
        def entered(self: Any) -> Any:
            if not tracer.is_elsewhere():
                tracer.contexts.add(f"torch.{cls.__name__}")
            return enter(self)

        return entered

    def whole(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if tracer.is_elsewhere() or not any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves((args, kwargs))):
            return apply.__get__(None, cls)(*args, **kwargs)
        if _marks_dirty(cls):
            raise Untraceable(refuse("tensors that forward changes", f"one by {cls.__name__}", "none but those of its graph"))
        return tracer.create_proxy("call_function", _applying(cls), args, kwargs)

    def is_instance(value: Any, kinds: Any) -> bool:
        """Stand-ins for inputs are tensors; of other values nobody knows."""
        if not own_isinstance(value, fx.Proxy) or own_isinstance(value, kinds) or tracer.is_elsewhere():
            return own_isinstance(value, kinds)
        frame = sys._getframe(1)
        if _is_of(frame, "torch", "convpool") and frame.f_code is not torch.is_tensor.__code__:
            return False  # PyTorch knows what stand-ins are
        if value.node.op == "placeholder":
            return own_isinstance(tracer.inputs[int(value.node.name.removeprefix("input_"))], kinds)
        tracer.asked.append(value.node.name)
        return False

    def noting_state(name: str, ask: Callable) -> Callable:
        def asked(*args: Any, **kwargs: Any) -> Any:
            if not tracer.is_elsewhere() and not _is_of(sys._getframe(1), "torch", "convpool"):
                tracer.states.add(f"torch.{name}")
            return ask(*args, **kwargs)

        return asked

    states = [(name, getattr(torch, name)) for name in STATES if hasattr(torch, name)]
    try:
        for name, ask in states:
            setattr(torch, name, noting_state(name, ask))
        builtins.isinstance = is_instance
        for cls, enter in saved:
            cls.__enter__ = noting(cls, enter)
        torch.autograd.Function.apply = classmethod(whole)
        yield
    finally:
        builtins.isinstance = own_isinstance
        for name, ask in states:
            setattr(torch, name, ask)
        torch.autograd.Function.apply = apply
        for cls, enter in saved:
            cls.__enter__ = enter


@contextlib.contextmanager
def _silent(tracer: Tracer) -> Iterator[None]:
    """Notes calls of print."""
    own = print

    def printed(*args: Any, **kwargs: Any) -> None:
        if tracer.is_elsewhere():
            own(*args, **kwargs)
        else:
            tracer.prints = True

    builtins.print = printed
    try:
        yield
    finally:
        builtins.print = own


def _is_of(frame: Any, *packages: str) -> bool:
    """Whether a frame's code is of a package or module."""
    place = str(frame.f_globals.get("__name__"))
    return any(place == package or place.startswith(f"{package}.") for package in packages)


def _is_made_of_its_items(value: Any) -> bool:
    """Whether calling a named tuple's or dataclass's class with a value's items, as a graph does, makes the same value."""
    cls = type(value)
    if issubclass(cls, tuple) and cls not in (tuple, torch.Size):
        return cls.__bases__ == (tuple,) and hasattr(cls, "_fields")
    if not hasattr(cls, "__dataclass_fields__"):
        return True
    names = {item.name for item in dataclasses.fields(value) if item.init}
    whole = cls.__dataclass_params__.init and "__init__" in vars(cls) and not hasattr(cls, "__post_init__")
    return whole and all(item.init for item in dataclasses.fields(value)) and names >= getattr(value, "__dict__", {}).keys()


def _marks_dirty(cls: Any) -> bool:
    """Whether an autograd.Function says that it changes an input, as its code tells."""
    codes = (getattr(method, "__code__", None) for method in (cls.forward, cls.setup_context))
    return any(code is not None and "mark_dirty" in code.co_names for code in codes)


def _applying(cls: Any) -> Callable:
    def apply(*args: Any, **kwargs: Any) -> Any:
        return cls.apply(*args, **kwargs)

    apply.__name__ = apply.__qualname__ = f"apply_{cls.__name__}"
    return apply


def _randomness() -> tuple[Any, ...]:
    """The state of the generators of random numbers."""
    _, keys, position, *_ = np.random.get_state()
    with torch._C._DisableFuncTorch():  # whose tensors have no memory
        state = torch.get_rng_state().numpy().tobytes()
    return random.getstate(), np.asarray(keys).tobytes(), position, state
