# SPDX-License-Identifier: Apache-2.0
"""Modules that run a rewritten forward: which plan a call takes, and when the original forward runs.

A plan is a forward for inputs of given sizes and for the modes that the modules are in; it is made at the first such call.
What it depends on is compared at every call: sizes and types of the tensors, the other arguments, whether gradients are
recorded, the modes of all modules under the root, the sizes of their parameters and buffers, their attributes that are numbers
or words, hooks, and whether these are still the same modules.  Where other attributes that forward has read are no longer the
same, all plans are made anew.  The original forward runs where the graph cannot be had, or has no pair.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from convpool.algebra.geometry import Refusal, refuse
from convpool.errors import ModelError
from convpool.options import OptimizeOptions
from convpool.report import Report
from convpool.torch.rewrite.branches import compute_weights_first
from convpool.torch.rewrite.capture import Captured, capture
from convpool.torch.rewrite.convolutions import give_derivatives
from convpool.torch.rewrite.memory import followed, has_hooks, of_torch
from convpool.torch.rewrite.norms import take_norms
from convpool.torch.rewrite.planning import FUSED, PAIRS, Unmapped, plan
from convpool.torch.rewrite.reads import Held
from convpool.torch.rewrite.sizes import Sizes, ranks_of, sizes_of
from convpool.torch.rewrite.waiting import EagerSteps

MAX_PLANS = 64
"""Most plans of a module; calls of further sizes run the original forward."""
STAND_IN = (0, torch.float32, False, False)
"""What a plan's key says of a tensor of which nothing is known."""
CONSTANTS = (type(None), bool, int, float, str)
"""Arguments beside tensors that a plan may be made for."""


@dataclass(frozen=True)
class Planned:
    """run: forward with the tensors among the arguments, None for the original.  batch: the only one that it is for, or None.

    graph: what `run` runs."""

    run: Callable | None
    batch: int | None = None
    report: Report | None = None
    refusal: Refusal | None = None
    graph: fx.Graph | None = None


@dataclass
class Region:
    """What a rewritten module knows.  sized: whether plans are made for sizes, as opposed to all sizes."""

    options: OptimizeOptions
    sized: bool
    plans: dict[tuple, Planned] = field(default_factory=dict)
    modules: list[nn.Module] = field(default_factory=list)
    children: list[tuple[dict, tuple]] = field(default_factory=list)
    tensors: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    """The parameters and buffers of the root and of each of the modules."""
    ties: list[tuple[dict, str, dict, str]] = field(default_factory=list)
    """Places that had the same tensor when a plan was made, which reads one of them."""
    pinned: list[tuple[dict, str, torch.Tensor]] = field(default_factory=list)
    """Places of tensors that forward had from elsewhere, from a list for instance."""
    values: list[tuple[dict, dict[str, Any]]] = field(default_factory=list)
    settings: list[tuple[dict, Callable]] = field(default_factory=list)
    versions: dict[tuple, int] = field(default_factory=dict)
    now: list[Any] = field(default_factory=list)
    version: int | None = None
    hooks: tuple[int, ...] = ()
    handles: int = -1
    known: dict[tuple, Sizes | None] = field(default_factory=dict)
    held: Held = field(default_factory=Held)
    starts: int = 0
    types: bool = False
    steps: EagerSteps = field(default_factory=EagerSteps)

    def __getstate__(self) -> dict[str, Any]:
        """Without plans: a copy makes its own."""
        return {"options": self.options, "sized": self.sized}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def sizes(self, root: nn.Module, graph: fx.Graph, tensors: Sequence[torch.Tensor]) -> Sizes | None:
        """`sizes_of`, made once for graphs that are the same, of modules with the same attributes."""
        key = (str(graph), self.version, self._shapes(), *((tuple(x.shape), x.dtype, x.device) for x in tensors))
        if key not in self.known:
            self.known[key] = sizes_of(root, graph, tensors)
        found = self.known[key]
        return None if found is None else found.on(graph)

    def find(self, root: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Callable | None:
        """The forward for a call, None for the original."""
        # TorchScript's exporter has no operator of ours; hooks of all modules want to see each.
        if torch.jit.is_tracing() or nn.modules.module._has_any_global_hook():
            return None
        tensors = () if torch.compiler.is_compiling() else tensors_of(args, kwargs)
        if tensors and self.steps.wait_for_host(root, tensors, lambda: self.planned(root, args, kwargs)):
            return None
        found = self.planned(root, args, kwargs)
        return None if found is None else found.run

    def planned(self, root: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Planned | None:
        """The plan for a call, made where there is none yet; None where none can be."""
        leaves, spec = ([*args], len(args)) if not kwargs else pytree.tree_flatten((args, kwargs))
        if not kwargs and any(isinstance(leaf, (list, tuple, dict)) for leaf in leaves):
            leaves, spec = pytree.tree_flatten((args, kwargs))
        if not (self.held.stays() and self._stay_tied()) and not self._starts_anew():
            return None
        modes, version = self._modes(root), self._version(root)
        shapes = self._shapes()
        if version is None or modes is None or shapes is None:
            return None
        if any([a is b for n, a in enumerate(leaves) if isinstance(a, torch.Tensor) for b in leaves[:n]]):
            return None  # a trace would take them for two
        described: list[Any] = [spec, torch.is_grad_enabled() and not exporting(), modes, (version, shapes)]
        first = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), None)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                described.append((self._shape(leaf, first), leaf.dtype, leaf.is_cuda, isinstance(leaf, nn.Parameter)))
            elif type(leaf) in CONSTANTS:
                described.append((type(leaf), leaf))
            else:
                return None
        key = tuple(described)
        found = self.plans.get(key)
        if found is None:
            if torch.compiler.is_compiling():
                return self._for_all(described)
            if len(self.plans) >= MAX_PLANS:
                return None
            depends = self.types
            found = make_plan(root, args, kwargs, self)
            if self.types and not depends:  # now the key has the types of the module's tensors
                return self.planned(root, args, kwargs)
            self.plans[key] = found
        if found.batch is not None and (first is None or first.shape[0] != found.batch):
            return None
        return found

    def _forget(self) -> None:
        for made in (self.plans, self.known, self.versions, self.ties, self.pinned):
            made.clear()
        self.held, self.now = Held(), []

    def _stay_tied(self) -> bool:
        """Whether tensors that plans read by another name than forward does are where they were."""
        tied = all([one.get(name) is other.get(called) for one, name, other, called in self.ties])
        return tied and all([own.get(name) is tensor for own, name, tensor in self.pinned])

    def note_ties(self, used: Sequence[torch.Tensor]) -> None:
        """Keep in mind which places have the same tensor.  used: those that forward had from elsewhere."""
        places: dict[int, tuple[dict, str]] = {}
        self.ties = []
        for own in self.tensors:
            for name, tensor in own.items():
                one, first = places.setdefault(id(tensor), (own, name))
                if tensor is not None and (one is not own or first != name):
                    self.ties.append((one, first, own, name))
        self.pinned += [(*places[id(tensor)], tensor) for tensor in used if id(tensor) in places]

    def _starts_anew(self) -> bool:
        """Forget all plans, which hold attributes that have changed; False where that cannot be, or has been too often."""
        if torch.compiler.is_compiling() or self.starts >= MAX_PLANS:
            return False
        self.starts += 1
        self._forget()
        return True

    def _for_all(self, described: list[Any]) -> Planned | None:
        """The plan that `optimize` has made for inputs of which it knew nothing."""
        if self.sized:
            return None
        inputs = [STAND_IN if len(item) == len(STAND_IN) else item for item in described[4:]]
        return self.plans.get((*described[:4], *inputs))

    def _shape(self, x: torch.Tensor, first: torch.Tensor | None) -> Any:
        """What a plan depends on of a tensor's shape; first: the one that has the batch, of which any goes."""
        if not self.sized:
            return x.dim()
        has_batch = x is first or first is not None and x.dim() and x.shape[0] == first.shape[0]
        return (None, *x.shape[1:]) if has_batch else tuple(x.shape)

    def _modes(self, root: nn.Module) -> tuple | None:
        """The modes of all modules, and which have hooks; looks for the modules again where one is another.

        Under torch.compile, which cannot look again, None where one is another."""
        if torch.compiler.is_compiling():
            for held, those in self.children:
                if len(held) != len(those) or not all([a is b for a, b in zip(held.values(), those, strict=False)]):
                    return None
            return (root.training, *[module.training for module in self.modules], self.hooks)
        if self.handles == -1 or any([tuple(held.values()) != those for held, those in self.children]):
            self._forget()
            parents = [m for m in root.modules() if not isinstance(m, torch.jit.ScriptModule)]
            self.children = [(m._modules, tuple(m._modules.values())) for m in parents if m._modules or not of_torch(m)]
            self.modules = [child for _, children in self.children for child in children if child is not None]
            owners = [m for m in (root, *self.modules) if not isinstance(m, torch.jit.ScriptModule)]
            self.tensors = [own for m in owners for own in (m._parameters, m._buffers)]
            self.handles = -1
        if self.handles != RemovableHandle.next_id:  # counts every hook that anything gets
            self.handles = RemovableHandle.next_id
            self.hooks = tuple(number for number, module in enumerate(self.modules) if has_hooks(module))
            self.now = []
        return (root.training, *[module.training for module in self.modules], self.hooks)

    def _shapes(self) -> tuple | None:
        """Shapes of the modules' parameters and buffers, types too if plans depend on them; None where one has no shape yet."""
        tensors: list[torch.Tensor | None] = []
        for held in self.tensors:
            tensors += held.values()
        try:
            shapes = tuple([x if x is None else x.shape for x in tensors])
        except RuntimeError:  # a lazy module's
            return None
        return (shapes, tuple([x if x is None else (x.dtype, x.device.type) for x in tensors])) if self.types else shapes

    def _version(self, root: nn.Module) -> int | None:
        """A number for the attributes of the modules, None where there are too many."""
        if torch.compiler.is_compiling():  # which knows no itemgetter
            same = all([own.get(name) == values.get(name) for own, values in self.values for name in values])
            return self.version if same else None
        try:
            now = [(len(own), read(own)) for own, read in self.settings]
        except KeyError:  # one is gone
            now = []
        if now != self.now or not now:
            followed = list(settings_of(root))
            self.settings = [(own, operator.itemgetter(*values) if values else len) for own, values in followed]
            self.values, self.now = followed, [(len(own), read(own)) for own, read in self.settings]
            key = tuple(self.now)
            known = key in self.versions or len(self.versions) < MAX_PLANS
            self.version = self.versions.setdefault(key, len(self.versions)) if known else None
        return self.version


def settings_of(module: nn.Module) -> Iterator[tuple[dict, dict[str, Any]]]:
    """The attributes of a module, and of those in it, that a graph holds as they were; not of modules that it holds whole."""
    for child in followed(module):
        own = child.__dict__
        yield own, {key: value for key, value in own.items() if is_constant(value) and key != "training"}


def is_constant(value: Any) -> bool:
    """Whether a value is one that never changes itself, and can be compared."""
    return all(map(is_constant, value)) if type(value) is tuple else type(value) in CONSTANTS


class Rewritten:
    """Stands in front of a module's own class: forward by a plan where there is one."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Nothing: a class that registers its subclasses, or wants arguments of them, has seen the module's own class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        region = self.__dict__.get("_convpool_region")
        run = region.find(self, args, kwargs) if region is not None else None
        if run is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return run(self, *tensors_of(args, kwargs))

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """As its own class, rewritten again when it is loaded; a copy's attributes may become others, so it has its own plans."""
        get = getattr(self, "__getstate__", None)  # Python 3.11 has one for every class
        state = get() if get is not None else self.__dict__
        if isinstance(state, dict) and "_convpool_region" in state:
            state = {**state, "_convpool_region": copy.copy(state["_convpool_region"])}
        return _restored, (own_class(type(self)),), state


def exporting() -> bool:
    """Whether torch.export follows the call."""
    # Not by torch.compiler.is_exporting(), which PyTorch 2.11 takes for true under torch.compile as well.
    return getattr(torch.compiler, "_is_exporting_flag", False)


def own_class(cls: type) -> type:
    """The class of a module before it was rewritten."""
    return cls.__mro__[cls.__mro__.index(Rewritten) + 1] if issubclass(cls, Rewritten) else cls


def _restored(cls: type) -> nn.Module:
    made: Any = rewritten_class(cls)
    return made.__new__(made)


def rewritten_class(cls: type) -> type:
    """The class that is `cls` with Rewritten in front: one, as torch.func.stack_module_state wants of several modules."""
    known: type
    for known in cls.__subclasses__():
        if known.__bases__ == (Rewritten, cls):
            return known
    own = Rewritten.forward
    forward: Any = types.FunctionType(own.__code__, own.__globals__, own.__name__, own.__defaults__, own.__closure__)
    forward.__doc__ = own.__doc__
    with contextlib.suppress(TypeError, ValueError):  # torch.export names inputs by it
        forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    return type(cls.__name__, (Rewritten, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__, "forward": forward})


def tensors_of(args: tuple, kwargs: dict[str, Any]) -> Sequence[torch.Tensor]:
    """The tensors among arguments, at any depth."""
    if not kwargs and all([isinstance(arg, torch.Tensor) for arg in args]):
        return args
    return [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]


def make_plan(root: nn.Module, args: tuple, kwargs: dict[str, Any], region: Region) -> Planned:
    """The plan for a call like this one, in the modes that the modules are in."""
    if any(x.is_complex() for x in (*tensors_of(args, kwargs), *root.parameters())):
        return Planned(None, refusal=refuse("type of a tensor", "complex", "real"))
    cls = type(root)
    forward = own_class(cls).forward  # type: ignore[attr-defined]
    found = capture(root, args, kwargs, forward)
    if isinstance(found, Refusal):
        return Planned(None, refusal=found)
    region.held.add(found.held)
    region.note_ties(found.used)
    region.types = region.types or found.types
    tensors = tensors_of(args, kwargs)
    if torch.is_grad_enabled():
        return _planned(root, found, tensors, region, PAIRS)
    fused = _planned(root, found, tensors, region, FUSED)
    if fused.refusal is None or found.refusal is not None:
        return fused
    again = capture(root, args, kwargs, forward)  # the passes have changed the graph
    return fused if isinstance(again, Refusal) else _planned(root, again, tensors, region, FUSED - {"fuse_prologue"})


def _planned(
    root: nn.Module, found: Captured, tensors: Sequence[torch.Tensor], region: Region, passes: frozenset[str]
) -> Planned:
    options = replace(region.options, passes=passes)
    sizes = region.sizes(root, found.graph, tensors) if region.sized else ranks_of(found.graph, tensors)
    try:
        changed, report = plan(root, found.graph, sizes, options, found.refusal)
    except Exception as error:  # the original runs whatever is wrong with a plan
        if not isinstance(error, (Unmapped, ModelError)):
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return Planned(None, refusal=refuse("graph of forward", error, "one that the passes take"))
    if changed and torch.is_grad_enabled():
        give_derivatives(root, found.graph)
        compute_weights_first(root, found.graph)
    elif changed:
        take_norms(root, found.graph)
    batch = sizes.batch if sizes is not None else None
    try:
        run = function_of(found.graph) if changed else None
    except SyntaxError:
        return Planned(None, refusal=refuse("names of modules", "one that is a word of Python's", "none"))
    return Planned(run, batch, report, found.refusal, found.graph if changed else None)


def function_of(graph: Any) -> Callable:
    """A function of the root and the inputs that runs the graph; tensors among nested arguments are its inputs."""
    code = graph.python_code("self")
    space = dict(code.globals)
    exec(compile(code.src, "<convpool>", "exec"), space)
    return space["forward"]
