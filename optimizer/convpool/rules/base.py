# SPDX-License-Identifier: Apache-2.0
"""The contract of a rule: it finds sites, checks each, and applies the plans.

`sites` yields candidates, in a fixed order.  `check` reads, and returns a Plan that holds every decision, or a Reject with the
reason, or None where there is nothing to do or to say.  `apply` decides nothing: it hands the nodes of a plan to an Edit.  No
rule keeps state between calls.  `convpool.pipeline` drives the rules; `options.RULES` lists them, `convpool.rules` has the order
of their stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from convpool.algebra.geometry import COMPUTED, Ints, Refusal
from convpool.ir.index import Scope
from convpool.ir.inference import BRANCHES_OPSET
from convpool.ir.protos import AttributeReference, label, named
from convpool.options import OptimizeOptions
from convpool.report import Log, SiteReport

if TYPE_CHECKING:
    from convpool.ir.edit import Edit

MIN_OPSET = 7
"""The first opset whose AveragePool can count its padding."""
BETWEEN = "between convolution and pooling"
"""The condition that a nonlinear operator between a convolution and a pooling fails."""


@dataclass(frozen=True)
class Reject:
    """Why a site stays: the node at fault, the condition, what was found, what would have been right; and other reasons."""

    node: str
    condition: str
    got: str
    expected: str
    others: tuple[Reject, ...] = ()

    @property
    def why(self) -> str:
        """The reason without the node."""
        return f"{self.condition}; got {self.got}, expected {self.expected}"

    def __str__(self) -> str:
        return f"{self.node}: {self.why}"


def reject(scope: Scope, node: int, condition: str, got: object, expected: object) -> Reject:
    """A Reject that names node number `node` of `scope`."""
    return Reject(named(scope.nodes[node]), condition, str(got), str(expected))


def rejection(scope: Scope, node: int, refusal: Refusal) -> Reject:
    """A Refusal of the algebra as a Reject that names node number `node` of `scope`."""
    return reject(scope, node, refusal.condition, refusal.got, refusal.expected)


EXCLUDED = Reject("", "excluded by name", "", "")
"""The verdict of a site that a user excludes."""


def reason_fields(why: Reject) -> dict[str, str]:
    """Status and reason of a site that stays, as its report has them."""
    if why is EXCLUDED:
        return {"status": "excluded", "reason": why.condition}
    return {"status": "rejected", "reason": str(why), "obstacle": in_short(why), "in_words": in_words(why)}


def in_short(why: Reject) -> str:
    """The obstacle in a few words."""
    condition = why.condition
    if condition == BETWEEN:
        return f"{why.got} between"
    if condition.startswith("output '"):
        return "read by something else too"
    for beginning, words in (("saves too little", "saves too little"), ("Pad '", "a Pad in front")):
        if condition.startswith(beginning):
            return words
    if why.got == COMPUTED:
        return f"{condition} not constant"
    return f"{condition}: unknown" if "unknown" in why.got else condition


def in_words(why: Reject) -> str:
    """The reason as a sentence, where `in_short` has words of its own for it; else in full."""
    if why.condition == BETWEEN:
        article = "an" if why.got[:1] in "AEIOU" else "a"
        return f"{article} {why.got} stands between: {why.node}"
    return f"read by something else too: {why.condition}" if why.condition.startswith("output '") else str(why)


def spatial_size(scope: Scope, tensor: str, rank: int, first_axis: int = 2) -> Ints | None:
    """Static spatial sizes of a tensor, None where any is unknown.  first_axis: 1 where the channels stand last."""
    shape = scope.info(tensor).shape
    if shape is None or len(shape) != rank + 2:
        return None
    size = tuple(dim for dim in shape[first_axis : first_axis + rank] if isinstance(dim, int))
    return size if len(size) == rank else None


def is_int8(scope: Scope, index: int) -> bool:
    """Return True if a convolution reads a DequantizeLinear: TensorRT runs it on the integers."""
    return scope.made_by(scope.nodes[index].input[0], "DequantizeLinear") is not None


@dataclass(frozen=True)
class Context:
    """Facts for a rule beside the graph.

    main_opset: version of the standard operators in the main graph.  excluded: whether a name matches a pattern of
    `options.exclude`.  shapes: of the main graph's tensors, as a caller gives the inputs.  originals: what the model's own
    convolutions give, each with its scope's path.
    """

    options: OptimizeOptions
    main_opset: int
    excluded: Callable[[str], bool]
    shapes: Mapping[str, tuple]
    originals: frozenset[tuple[str, str]] = frozenset()

    def enabled(self, name: str) -> bool:
        """Return True if the options switch a rule, or a kind of its sites, on."""
        return name in self.options.rules


@dataclass(frozen=True)
class Site:
    """A candidate of one rule.  root: the node that it ends in, and that is named where nothing closer is at fault."""

    scope: Scope
    root: int

    @property
    def names(self) -> tuple[str, ...]:
        """Names that `exclude=` matches."""
        return (label(self.scope.nodes[self.root]),)


@dataclass(frozen=True)
class Plan:
    """A change to one scope, decided in full."""

    scope: Scope

    @property
    def own(self) -> frozenset[int]:
        """Nodes that this plan changes or removes: no other plan of the same round may."""
        raise NotImplementedError

    @property
    def shared(self) -> frozenset[int]:
        """Nodes that go where no reader is left; other plans may share them, but not own them."""
        return frozenset()

    @property
    def operator_version(self) -> int:
        """The version of the operator's domain that the new nodes need; 0 for none."""
        return 0

    @property
    def convolutions(self) -> tuple[int, ...]:
        """The convolutions that go."""
        return ()

    @property
    def timed(self) -> tuple[frozenset[int], str] | None:
        """The nodes that are timed against the plan's alternatives, and the tensor that they give; None where none are."""
        return None


@dataclass(frozen=True)
class NodesPlan(Plan):
    """A change to the nodes that it names, often one alone."""

    nodes: tuple[int, ...]

    @property
    def node(self) -> int:
        """The first of them."""
        return self.nodes[0]

    @property
    def own(self) -> frozenset[int]:
        return frozenset(self.nodes)


class Rule(ABC):
    """One rewrite.

    names: by which options switch it on.  has_alternatives: whether there may be more than one plan for a site, so that they can
    be timed.  needs: operators; a scope without any of them has no site.  Empty where every scope may have one.
    """

    names: ClassVar[tuple[str, ...]]
    needs: ClassVar[Collection[str]] = ()
    has_alternatives: ClassVar[bool] = False

    @abstractmethod
    def sites(self, scope: Scope, context: Context) -> Iterator[Any]:
        """Every candidate of a scope."""

    @abstractmethod
    def check(self, site: Any, context: Context) -> Plan | Reject | None:
        """The plan for a site, why there is none, or None where nothing is to be done or said."""

    @abstractmethod
    def apply(self, plan: Any, edit: Edit) -> None:
        """Make the change that the plan describes."""

    def verdict(self, site: Any, context: Context) -> Plan | Reject | None:
        """Decide what is to be done or said of a site, by `check` and by what holds for every rule; None for nothing."""
        scope = site.scope
        if context.options.exclude and any([context.excluded(name) for name in site.names]):  # every name: each may match
            return EXCLUDED
        if scope.opset < MIN_OPSET:
            return Reject("model", "opset", str(scope.opset), f"at least {MIN_OPSET}")
        if scope.is_bound:
            return reject(scope, site.root, "branch of an If", f"opset {scope.opset}", f"at least {BRANCHES_OPSET}")
        try:
            plan = self.check(site, context)
        except AttributeReference as error:
            return reject(scope, site.root, "attributes", f"a reference to the function's '{error}'", "values")
        if not isinstance(plan, Plan):
            return plan
        if context.options.exclude and any(context.excluded(label(scope.nodes[index])) for index in plan.convolutions):
            return EXCLUDED
        for index in plan.convolutions if context.options.keep_int8 else ():
            if is_int8(plan.scope, index):
                return reject(plan.scope, index, "would become a float kernel", "INT8, behind DequantizeLinear", "float")
        pinned = context.options.pinned
        for index in sorted(plan.own | plan.shared) if pinned and not plan.scope.path else ():
            if (why := pinned.get(plan.scope.nodes[index].name)) is not None:
                return rejection(plan.scope, index, why)
        return plan

    def alternatives(self, site: Any, context: Context) -> dict[str, Plan]:
        """Plans for a site that may be timed against one another, by name; none where there is nothing to choose."""
        return {}

    def rewritten(self, plan: Any, outputs: list[str], times: dict[str, float] | None, log: Log) -> None:
        """Report a plan that was applied.  outputs: of the operator's nodes that it made; times: by alternative."""
        return

    def kept(self, site: Any, why: Reject, times: dict[str, float] | None, log: Log) -> None:
        """Report a site that stays."""
        return

    def site_report(self, scope: Scope, pattern: str, lowering: str | None, **values: Any) -> SiteReport:
        """A report of this rule.  values: other fields, the status where the site was not rewritten."""
        fields = {"status": "rewritten", "scope": scope.path, "rule": self.names[0], **values}
        return SiteReport(pattern=pattern, lowering=lowering, **fields)
