# SPDX-License-Identifier: Apache-2.0
"""`optimize` and `explain`: a module whose calls TorchDynamo captures for the backend, and the report of that; `export_onnx`.

The module's class, its parameters and their names stay.  PyTorch keeps a function beside a module that its calls go to
(`nn.Module.compile`); here that is a `Calls`, which copies and pickles of the module take along.
"""

import contextlib
import copy
import inspect
import io
import itertools
import os
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import onnx
import torch
from onnx import ModelProto
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils.hooks import RemovableHandle

from convpool.errors import ModelError, OptionError
from convpool.ir.model import load
from convpool.options import OptimizeOptions, check_arguments, options_for, unmatched
from convpool.pipeline import rewrite
from convpool.report import Report, SiteReport, Summary
from convpool.torch.backend import Backend, Captured
from convpool.torch.deprecated import without_accumulation

Inputs: TypeAlias = Tensor | Sequence[Any] | Mapping[str, Any] | None
_NAME, _IGNORED = "_convpool", "__jit_ignored_attributes__"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FLAGS = ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
_LIMITS = {"recompile_limit": 64, "isolate_recompiles": True}
_OWN_LIMITS = {name: value for name, value in _LIMITS.items() if name in inspect.signature(torch.compile).parameters}
_is_traced: Any = getattr(torch.fx._symbolic_trace, "is_fx_symbolic_tracing", torch.fx._symbolic_trace.is_fx_tracing)
_number = itertools.count()
LIMIT = 64 if "recompile_limit" in _OWN_LIMITS else torch._dynamo.config.recompile_limit
"""Captures of a module; after that its original forward runs for calls that none of them is for."""


# ---- the report ----


@dataclass
class ModuleReport(Report):
    """The report of a module's captures: more sites come with calls of other kinds.  plans: a line for each capture."""

    plans: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """The table that `convpool inspect` prints of a model."""
        from convpool.cli.table import PrintableConsole, show

        text = io.StringIO()
        show(self, PrintableConsole(file=text, width=160, highlight=False, emoji=False), preview=True)
        lines = [line for line in text.getvalue().splitlines() if line != "model     multiply-adds unknown"]
        if not self.plans:  # there is no graph yet in which a pair could be missing
            lines[:2] = ["No call is captured."]
        return "\n".join([*lines, *(f"plan {number:<5}{line}" for number, line in enumerate(self.plans, 1))])

    def update(self, captured: Sequence[Captured], options: OptimizeOptions, names: Sequence[str]) -> None:
        """Say what is known now.  names: of the modules."""
        sites: dict[tuple[str, str], SiteReport] = {}
        reports = [report for one in captured for report in one.reports]
        found = sorted((site for report in reports for site in report.sites), key=lambda site: site.status != "rewritten")
        for site in found:
            sites.setdefault((site.conv, site.pool), site)
        self.sites[:] = sites.values()
        # Each part of forward counts once, though it is captured for several kinds of calls.
        parts = {(one.breaks, *(s.conv for s in r.sites)): r.summary.convolutions for one in captured for r in one.reports}
        self.summary = replace(_summed(self.sites, [report.summary for report in reports]), convolutions=sum(parts.values()))
        self.changed = bool(self.summary.rewritten)
        self.notes[:] = dict.fromkeys(note for report in reports for note in report.notes)
        pairs = [(one.call, sum(report.summary.rewritten for report in one.reports)) for one in captured]
        self.plans[:] = [f"{call}: {count} {'pair' if count == 1 else 'pairs'}" for call, count in pairs]
        names = [*names, *(name for site in self.sites for name in (site.conv, site.pool))]
        matched = [pattern for pattern in options.exclude if any(fnmatchcase(name, pattern) for name in names)]
        lost = [f"forward is cut in two at {one.breaks}" for one in captured if one.breaks]
        told = [error for one in captured for error in one.errors] + (unmatched(options.exclude, matched) if captured else [])
        self.warnings[:] = dict.fromkeys([*lost, *told])
        self.hints[:] = [] if captured else ["pairs are found by calls: call the module, or pass inputs: optimize(module, x)"]


def _summed(sites: Sequence[SiteReport], summaries: Sequence[Summary]) -> Summary:
    """The totals of several graphs."""
    status = Counter(site.status for site in sites)
    rewritten = [(site.macs_before, site.macs_after) for site in sites if site.status == "rewritten"]
    macs = [sum(getattr(site, f"macs_{time}") or 0 for site in sites) for time in ("before", "after")]
    operators = [dict(sum((Counter(getattr(s, f"operators_{t}")) for s in summaries), Counter())) for t in ("before", "after")]
    totals: tuple = (*macs, *operators, 0, 0, 0.0, 0)
    counts: dict[str, Any] = {"averages": sum(summary.averages for summary in summaries)}
    counts["rewritten_convolutions"] = len({site.conv for site in sites if site.status == "rewritten"})
    if rewritten and all(None not in pair for pair in rewritten):
        counts["rewritten_macs_before"], counts["rewritten_macs_after"] = map(sum, zip(*rewritten, strict=True))
    return Summary(status["rewritten"], status["rejected"], status["excluded"], *totals, **counts)


# ---- the functions ----


@without_accumulation
def optimize(
    module: nn.Module, example_inputs: Inputs = None, *, inplace: bool = False, exclude: str | Sequence[str] = ()
) -> tuple[nn.Module, ModuleReport]:
    """Let a module convolve on the smaller map, before nearest upsampling and behind average pooling, where that is exact.

    module: not changed unless `inplace` is set.  The result has the same class, and the same parameters and buffers, as objects
    too, under the same names: an optimizer of the original trains it, and checkpoints load both ways.  Use one of the two from
    then on: moving one to another device or type leaves the other's buffers behind.
    example_inputs: the arguments of a call: a tensor, a sequence of positional ones, or a mapping of keywords.  Their numbers do
    not count.  With them the call is captured at once, for any batch; without them, by the first call.
    exclude: a glob pattern or several of names of convolutions and poolings that stay.

    Returns the module and a report with every pair: its names, `status` ("rewritten", "rejected" or "excluded"), `pattern` and
    `reason`, as `convpool.optimize` gives them for ONNX models; `plans` has a line for each capture.  A call in another mode, as
    in evaluation, without gradients or under autocast, is captured anew, and the report then has its pairs too.

    Raises OptionError for arguments of a wrong type and inputs that forward does not take, ModelError for a module that cannot be
    copied.
    """
    args, kwargs = _checked(module, example_inputs)
    check_arguments(exclude=exclude)
    options = options_for(exclude=exclude or ())
    found = module if inplace else _copied(module)
    calls = Calls(found, options)
    if not _left_alone(found, calls.report):
        if example_inputs is not None:
            calls.look(args, kwargs)
        calls.start()
    return found, calls.report


def explain(module: nn.Module, *inputs: Any, **keywords: Any) -> ModuleReport:
    """The report that `optimize` gives for a call with these inputs; the module stays as it is.

    Without inputs, of an optimized module: what its calls so far were captured as.
    """
    calls = module.__dict__.get(_NAME) if isinstance(module, nn.Module) else None
    if calls is not None and not inputs and not keywords:
        return calls.report
    _checked(module, () if keywords else inputs)
    looking = Calls(module, calls.options if calls is not None else OptimizeOptions())
    if not _left_alone(module, looking.report):
        looking.look(inputs, keywords)
    return looking.report


def export_onnx(module: torch.nn.Module, args: tuple, path: str | os.PathLike[str] | None = None, **options: Any) -> ModelProto:
    """A module as an ONNX model with convpool's operator (docs/operator.md) and the functions that define it.

    torch.export and torch.onnx.export see PyTorch's own operators of an optimized module and of ConvAvgPool layers: the
    convolution, then the pooling.  Here the rules rewrite the exported model, as `convpool optimize` does by default: pairs of
    few channels may become one convolution.

    args: of a call, the example inputs of `optimize`.  path: where the model is written; its weights are inside, so that it is
    below 2 GB.  options: of torch.onnx.export with dynamo=True, which needs onnxscript.
    Returns the model.  Raises what torch.onnx.export raises.
    """
    program: Any = torch.onnx.export(module, args, dynamo=True, **options)
    asked = getattr(module.__dict__.get(_NAME), "options", OptimizeOptions())
    model: ModelProto = rewrite(load(program.model_proto), replace(asked)).model
    onnx.checker.check_model(model)
    if path is not None:
        onnx.save(model, os.fspath(path))
    return model


def _left_alone(module: nn.Module, report: ModuleReport) -> bool:
    """True where a module's calls cannot be captured; the report then says why."""
    if isinstance(module, torch.jit.ScriptModule):
        why = "a ScriptModule; got TorchScript, expected a module in Python"
    elif isinstance(module, torch._dynamo.OptimizedModule):
        why = "a module that torch.compile has made; pass its backend instead: torch.compile(module, backend='convpool')"
    else:
        return False
    report.hints[:], report.warnings[:] = [], [f"{why}: the module stays as it is"]
    return True


def _checked(module: Any, example: Inputs) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a call; OptionError for what is none."""
    if not isinstance(module, nn.Module):
        raise OptionError(f"module: got {type(module).__name__}, expected a torch.nn.Module")
    if isinstance(example, Mapping):
        return (), dict(example)
    args = (example,) if isinstance(example, Tensor) else () if example is None else example
    if not isinstance(args, (tuple, list)):
        raise OptionError(f"example_inputs: got {type(example).__name__}, expected a tensor, a sequence or a mapping")
    if args and all(type(arg) is int for arg in args):
        raise OptionError(f"example_inputs: got the numbers {args}, expected tensors; for a shape, pass torch.randn{args}")
    return tuple(args), {}


def _copied(module: nn.Module) -> nn.Module:
    """The modules again, with the same tensors in them."""
    held = [*module.parameters(), *module.buffers()]
    held += [value for m in module.modules() for value in m.__dict__.values() if isinstance(value, Tensor)]
    held += [p.grad for p in module.parameters() if p.grad is not None]
    try:
        return copy.deepcopy(module, {id(tensor): tensor for tensor in held})
    except Exception as error:  # whatever the module holds
        raise ModelError(f"module: cannot be copied: {error}; pass inplace=True") from error


# ---- the calls of a module ----


class _Looked(Exception):
    """Raised in the place of a graph that nobody is to run."""


class Calls:
    """What an optimized module's calls go to.  It is an attribute of the module, for copies, and PyTorch's function beside it."""

    def __init__(self, module: nn.Module, options: OptimizeOptions) -> None:
        self.module, self.options = module, options
        self.backend = Backend(options)
        self.report = ModuleReport([], _summed([], []))
        self._only_looks, self._handles = False, -1
        self._runs: list[tuple[list, Callable]] = []
        self._held: list[tuple[dict, list]] = []
        self._run: Any = None
        self.report.update((), options, ())

    def start(self) -> None:
        """Let the module's calls come here."""
        unseen = [*getattr(type(self.module), _IGNORED, ()), "_compiled_call_impl"]  # by torch.jit.script
        own = {_NAME: self, "_compiled_call_impl": self, "_replicate_for_data_parallel": self.replica, _IGNORED: unseen}
        self.module.__dict__.update(own)

    def replica(self) -> nn.Module:
        """What DataParallel runs on another device: the original, with parameters of its own."""
        made = type(self.module)._replicate_for_data_parallel(self.module)
        for name in (_NAME, "_compiled_call_impl", "_replicate_for_data_parallel"):
            made.__dict__.pop(name)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's call."""
        if _is_followed() or torch.overrides.has_torch_function((*args, *kwargs.values())):  # of a class of tensors
            return self.module._call_impl(*args, **kwargs)
        if self._handles != RemovableHandle.next_id or any([[*own.values()] != held for own, held in self._held]):
            self._renew()
        return self._run(self.module, *args, **kwargs)

    def _renew(self) -> None:
        """Capture anew where hooks are others, of which TorchDynamo takes no notice.  Other threads see what is set last."""
        handles, modules = RemovableHandle.next_id, [*self.module.modules()]  # the former counts every hook that anything gets
        children = [(place, name, m) for place, own in enumerate(modules) for name, m in own._modules.items() if m is not None]
        places = [(*place, m, kind) for *place, m in [(0, "", self.module), *children] for kind in _HOOKS if m.__dict__.get(kind)]
        held = itertools.chain((m._modules for m in modules), (m.__dict__[kind] for *_, m, kind in places))
        self._held = [(own, [*own.values()]) for own in held if own]
        hooks = [(*place, kind, _hooks_of(m, kind)) for *place, m, kind in places]
        run = next((run for kept, run in self._runs if kept == hooks), None)
        if run is None and len(self.backend.captured) < LIMIT:
            calls: Any = weakref.ref(self)  # PyTorch keeps every backend
            run = compiled(lambda *given: calls()._capture(*given))
            self._runs = [*(one for one in self._runs if not one[0]), (hooks, run)]  # what hooks hold is not kept
        self._run = run or _original
        self._handles = handles

    def _capture(self, graph: Any, example_inputs: Any) -> Callable:
        """The backend, with a report after each capture."""
        run = self.backend(graph, example_inputs)
        self.report.update(self.backend.captured, self.options, [name for name, _ in self.module.named_modules()])
        if len(self.backend.captured) == LIMIT:
            warnings.warn(
                f"convpool: {type(self.module).__name__} has been captured {LIMIT} times, once for each kind of call; calls of"
                " other kinds run the original forward; print the report for the kinds",
                stacklevel=2,
            )
        if not self._only_looks:
            return run
        calls: Any = weakref.ref(self)

        def looked(*inputs: Any) -> Any:
            if calls()._only_looks:
                raise _Looked
            return run(*inputs)

        return looked

    def look(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Capture a call.  Nothing is computed where one graph holds all of forward; else a copy of the module runs."""
        args, kwargs = _with_open_batch(args, kwargs)
        self._renew()
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=_LIMITS["recompile_limit"]):
            self._only_looks = True
            try:
                with _aside(self.module):  # what TorchDynamo leaves out runs
                    self._run(self.module, *args, **kwargs)
            except _Looked:
                pass
            except Exception as error:
                self._judge(args, kwargs, error)
            finally:
                self._only_looks = False
            if self.backend.captured and self.backend.captured[-1].breaks:
                with _aside():
                    try:
                        self._run(*copy.deepcopy((self.module, *args)), **copy.deepcopy(kwargs))
                    except Exception as error:  # behind the place where forward is cut
                        self._judge(args, kwargs, error)
        if not self.backend.captured and not self.report.warnings:
            why = "TorchDynamo captures nothing of this call, which runs as it is; TORCH_LOGS=graph_breaks says why"
            self.report.hints[:], self.report.warnings[:] = [], [why]

    def _judge(self, args: tuple, kwargs: dict[str, Any], error: Exception) -> None:
        """OptionError if forward fails with these inputs without TorchDynamo too; else a warning."""
        with _aside():
            try:
                copy.deepcopy(self.module)._call_impl(*copy.deepcopy(args), **copy.deepcopy(kwargs))
            except Exception as own:
                said = f"{type(own).__name__}: {' '.join(str(own).split())}"
                raise OptionError(f"example_inputs: forward fails; got {said}, expected inputs that it takes") from own
        said = " ".join(str(error).split())[:200]
        self.report.warnings.append(f"TorchDynamo cannot follow forward: {type(error).__name__}: {said}")

    def __reduce__(self) -> tuple:
        return _restored, (self.module, self.options)


def _restored(module: nn.Module, options: OptimizeOptions) -> Calls:
    """The calls of a copy, or of what a file holds; module: without attributes yet."""
    made = Calls(module, options)
    made.start()
    return made


def _hooks_of(module: nn.Module, kind: str) -> list:
    """A module's hooks of a kind, each with how it is called."""
    own = module.__dict__
    hooks = [(hook, *(number in own.get(flag, ()) for flag in _FLAGS)) for number, hook in own[kind].items()]
    return [own.get("_is_full_backward_hook"), *hooks]


def _original(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def compiled(backend: Callable) -> Callable:
    """A function of a module and its arguments that TorchDynamo captures.

    TorchDynamo keeps captures by a function's code, and by its name what sizes it has seen: each has its own."""

    code = _original.__code__.replace(co_name=f"call_{next(_number)}")
    own = types.FunctionType(code, _original.__globals__, code.co_name)
    return torch.compile(own, backend=backend, **_OWN_LIMITS)


def _is_followed() -> bool:
    """Return True if something follows the call that wants to see forward itself: a tracer, a transform, a mode, global hooks."""
    c = torch._C
    if torch.compiler.is_compiling() or c._get_tracing_state() is not None or c._are_functorch_transforms_active():
        return True
    modes = torch.overrides._get_current_function_mode_stack() if c._len_torch_function_stack() else ()
    own = any(type(mode) is not DeviceContext for mode in modes)  # TorchDynamo would run it, and then the graph under it
    hooks = any(getattr(nn.modules.module, f"_global{kind}") for kind in _HOOKS)
    return bool(own or c._len_torch_dispatch_stack() or _is_traced() or hooks)


@contextlib.contextmanager
def _aside(module: nn.Module | None = None) -> Iterator[None]:
    """Run something that leaves the random numbers and a module's buffers as they are."""
    found = [b for b in module.buffers() if type(b) is Tensor] if module is not None else []
    kept = [(buffer, buffer.detach().clone()) for buffer in found if not (buffer.is_meta or buffer.is_inference())]
    try:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
            yield
    finally:
        for buffer, value in kept:
            if not torch.equal(buffer, value):
                with torch.no_grad():
                    buffer.resize_(value.shape).copy_(value)


def _with_open_batch(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments, with tensors that leave the batch, the first axis, open."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)
    made: dict[int, Tensor] = {}
    for leaf in leaves:
        if type(leaf) is Tensor and leaf.dim() and first is not None and leaf.shape[0] == first.shape[0] > 1:
            made[id(leaf)] = alias = leaf.detach().requires_grad_(leaf.requires_grad)
            torch._dynamo.maybe_mark_dynamic(alias, 0)
    return pytree.tree_unflatten([made.get(id(leaf), leaf) for leaf in leaves], spec)
