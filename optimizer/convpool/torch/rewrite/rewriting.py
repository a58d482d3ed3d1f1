# SPDX-License-Identifier: Apache-2.0
"""`optimize`: a module with its pairs of convolution and average pooling rewritten.

The module's own class, its parameters and their names stay; what is new is a forward for the whole module, or where that cannot
be followed, for those of its submodules that can.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import nn

from convpool.algebra.geometry import Refusal, refuse
from convpool.errors import ModelError, OptionError
from convpool.options import OptimizeOptions
from convpool.report import Report, SiteReport
from convpool.rules.seen import unmatched
from convpool.torch.functional import checked
from convpool.torch.rewrite.regions import Region, own_class, rewritten_class
from convpool.torch.rewrite.reports import merged
from convpool.torch.rewrite.visits import callable_module, calls, is_leaf, outermost, plans, stand_ins
from convpool.types import Accumulation

Inputs: TypeAlias = torch.Tensor | Sequence[Any] | Mapping[str, Any] | None


def optimize(
    module: nn.Module,
    example_inputs: Inputs = None,
    *,
    inplace: bool = False,
    exclude: str | Sequence[str] = (),
    accumulation: Accumulation = "default",
) -> tuple[nn.Module, Report]:
    """Let a module do its average poolings before the convolutions in front of them, where that is exact and saves work.

    module: not changed unless `inplace` is set.  The result has the same class, and the same parameters and buffers, as objects
    too, under the same names: an optimizer of the original trains it, and checkpoints load both ways.  Use one of the two from
    then on: moving one to another device or type leaves the other's buffers behind.
    example_inputs: the arguments of a call: a tensor, a sequence of positional ones, or a mapping of keywords.  Their numbers do
    not count.  With them, pairs are found whose average depends on sizes; a plan is made for these sizes, and for others at the
    first call with them.  Without them, pairs are rewritten that are exact for all sizes.
    exclude: a glob pattern or several of names of convolutions and poolings that stay.
    accumulation: how the pairs sum their pooling windows, as of `conv_avg_pool2d`.

    Returns the module and a report with every pair: its names, `status` ("rewritten", "rejected" or "excluded"), `pattern` and
    `reason`, as `convpool.optimize` gives them for ONNX models.  It is about the mode that the module is in: in training what
    stands in front of and behind a pair stays as it is, and a pair with a BatchNorm or Dropout in between is not rewritten.  A
    call in another mode has a plan of its own.

    Raises OptionError for arguments of a wrong type, ModelError for a module that cannot be copied.
    """
    if not isinstance(module, nn.Module):
        raise OptionError(f"module: got {type(module).__name__}, expected a torch.nn.Module")
    patterns = (exclude,) if isinstance(exclude, str) else exclude
    if not isinstance(patterns, (tuple, list, set, frozenset)) or not all(isinstance(pattern, str) for pattern in patterns):
        raise OptionError(f"exclude: got {exclude!r}, expected a pattern or several")
    args, kwargs = _call(example_inputs)
    if example_inputs is not None:
        _check_call(module, args, kwargs)
    found = module if inplace else _copied(module)
    work = _Work(OptimizeOptions(exclude=tuple(patterns), accumulation=checked(accumulation)), example_inputs is not None)
    work.visit(found, "", args, kwargs)
    return found, work.report([name for name, _ in found.named_modules()])


def _call(example: Inputs) -> tuple[tuple, dict[str, Any]]:
    if example is None:
        return (), {}
    if isinstance(example, torch.Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    raise OptionError(f"example_inputs: got {type(example).__name__}, expected a tensor, a sequence or a mapping")


def _check_call(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """OptionError for a number or names of arguments that the module's forward does not take."""
    if "forward" in module.__dict__ or not callable_module(module):
        return
    signature = inspect.signature(own_class(type(module)).forward)  # type: ignore[attr-defined]
    try:
        signature.bind(module, *args, **kwargs)
    except TypeError as error:
        given = ", ".join([*(type(arg).__name__ for arg in args), *(f"{name}=" for name in kwargs)])
        raise OptionError(f"example_inputs: {error}; got ({given}), expected arguments of forward{signature}") from None


def _copied(module: nn.Module) -> nn.Module:
    """The modules again, with the same tensors in them."""
    held = [*module.parameters(), *module.buffers()]
    held += [value for m in module.modules() for value in m.__dict__.values() if isinstance(value, torch.Tensor)]
    held += [p.grad for p in module.parameters() if p.grad is not None]
    try:
        return copy.deepcopy(module, {id(tensor): tensor for tensor in held})
    except Exception as error:  # whatever the module holds
        raise ModelError(f"module: cannot be copied: {error}; pass inplace=True") from error


@dataclass
class _Work:
    """The regions found so far, and their reports."""

    options: OptimizeOptions
    sized: bool
    reports: list[tuple[str, Report]] = field(default_factory=list)
    others: list[SiteReport] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def visit(self, module: nn.Module, path: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """Rewrite a module, or else what is in it.  args, kwargs: of a call, if there is an example."""
        why = self._rewrite(module, path, args, kwargs)
        if why is not None:
            inside = [(f"{path}.{name}".lstrip("."), child) for name, child in module.named_children()]
            self._refused(module, path, why)
        else:
            inside = []
            outermost(module, path, inside)
        if inside:
            found = calls(module, inside, path, args, kwargs) if self.sized else {}
            for name, child in inside:
                given = found.get(name)
                if given is not None or not self.sized or not callable_module(child):
                    self.visit(child, name, *(given or ((), {})))

    def _rewrite(self, module: nn.Module, path: str, args: tuple, kwargs: dict[str, Any]) -> Refusal | None:
        """Rewrite a module as a whole; why it cannot be."""
        if isinstance(module, torch.jit.ScriptModule):
            return refuse("module", "a ScriptModule", "one in Python")
        if "forward" in module.__dict__:
            return refuse("forward", "an attribute of the module", "a method of its class")
        if not callable_module(module):
            return refuse("forward", "none", "a method")
        if is_leaf(module):
            return refuse("module", f"one {type(module).__name__} of torch.nn", "several")
        prefix = f"{path}." if path else ""
        own = tuple(pattern.removeprefix(prefix) for pattern in self.options.exclude)
        region = Region(replace(self.options, exclude=own), self.sized)
        module.__class__ = rewritten_class(own_class(type(module)))
        module.__dict__["_convpool_region"] = region
        if not self.sized:
            args, kwargs = stand_ins(module), {}
        planned = plans(module, region, args, kwargs)
        if planned is not None and planned.refusal is None:
            assert planned.report is not None
            self.reports.append((path, planned.report))
            return None
        module.__class__ = own_class(type(module))
        del module.__dict__["_convpool_region"]
        if planned is None:
            return refuse("arguments of forward", "other than tensors, numbers and words", "these")
        if planned.report is not None:
            self.reports.append((path, planned.report))
        return planned.refusal

    def _refused(self, module: nn.Module, path: str, why: Refusal) -> None:
        """A warning, and one report for each convolution that the module's own forward calls, as far as its children tell."""
        if not callable_module(module) or is_leaf(module):
            return
        reason = f"forward of '{path or type(module).__name__}': {why.condition}; got {why.got}, expected {why.expected}"
        self.warnings.append(reason)
        if any(place == path for place, _ in self.reports):
            return
        for name, child in module.named_children():
            if isinstance(child, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                conv = f"{path}.{name}".lstrip(".")
                self.others.append(
                    SiteReport(
                        conv=conv,
                        pattern="conv_pool",
                        status="rejected",
                        reason=reason,
                        obstacle=why.condition,
                        rule="pool_first",
                    )
                )

    def report(self, names: list[str]) -> Report:
        """All reports as one.  names: of the modules."""
        report = merged(self.reports, self.others, self.options, self.warnings)
        names = [*names, *(name for site in report.sites for name in (site.conv, site.pool))]
        matched = [pattern for pattern in self.options.exclude if any(fnmatchcase(name, pattern) for name in names)]
        unknown = any("unknown" in (site.reason or "") for site in report.sites)
        lost = not self.sized and (unknown or report.summary.convolutions and not report.sites)
        hints = ["with example inputs more averages may be found: optimize(module, x)"] if lost else []
        return replace(report, hints=hints, warnings=[*report.warnings, *unmatched(self.options.exclude, matched)])
