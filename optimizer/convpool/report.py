# SPDX-License-Identifier: Apache-2.0
"""The report of a run as data.  `to_json` is the file format; `convpool.cli.table` prints it.

A Log collects the reports while the rules run.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

from convpool.check.judge import Verification

OF_TARGET = "for this target"
"""Ends what a reason expects where another target may ask for less: told rather than others, and with a hint."""


@dataclass(kw_only=True)
class SiteReport:
    """One convolution with the node beside it that resamples: an average, or a Resize.

    Attributes:
        pool: The name of that node, "" if there is none.
        pattern: The form of the nodes that the rule found.
        status: "rewritten", "rejected" or "excluded".
        reason: Why it was rejected or excluded, else None.
        macs_before: Multiply-adds of the convolution for one sample, None if a size is unknown.
        macs_after: Likewise of the result.
        scope: "" for the main graph.
        rule: The rule that found it, of `convpool.options.RULES`.
    """

    conv: str = ""
    pool: str = ""
    pattern: str
    status: str
    lowering: str | None = None
    reason: str | None = None
    macs_before: int | None = None
    macs_after: int | None = None
    scope: str = ""
    times_us: dict[str, float] | None = None
    """Median microseconds per lowering where they were timed (autotune)."""
    operator: str | None = None
    """convpool's operator that replaced the pair; None if standard operators did."""
    absorbed: tuple[str, ...] = ()
    """Nodes before and after the pair that were fused into its node."""
    saved_bytes: int | None = None
    """Bytes per sample that the fused nodes no longer write and read; None if there are none, or if sizes are unknown."""
    beside: tuple[str, ...] = ()
    """Why other nodes next to the pair were not fused."""
    obstacle: str | None = None
    """The reason in a few words: equal for all sites that have the same one."""
    fallback: str | None = None
    """Why the pair got another lowering than the one asked for; None if it did not."""
    in_words: str | None = None
    """The reason as a sentence, or `reason` again where there is none; None unless rejected."""
    rule: str = ""


@dataclass(frozen=True)
class Summary:
    """Totals over the model; operators with those in subgraphs and functions, sizes in bytes of all its files."""

    rewritten: int
    rejected: int
    excluded: int
    macs_before: int
    macs_after: int
    operators_before: dict[str, int]
    operators_after: dict[str, int]
    bytes_before: int
    bytes_after: int
    seconds: float
    concats: int
    """Concats that read the result of an earlier Concat instead of its inputs."""
    channels_last: int = 0
    """Nodes that read or give tensors with channels last, for onnxruntime's CUDA provider."""
    packed: int = 0
    """Nodes of the result whose pooling windows of 16-bit types may be summed in that type."""
    convolutions: int = 0
    """All convolutions of the original; each in a function or subgraph counts once."""
    rewritten_convolutions: int = 0
    """How many of them were rewritten, each counted once."""
    rewritten_macs_before: int | None = None
    """Multiply-adds per sample of the rewritten convolutions; None if sizes are unknown, as in the three below.
    `macs_before` and `macs_after` are sums over all sites: sites left unchanged count too, and a convolution with
    two sites counts twice."""
    rewritten_macs_after: int | None = None
    model_macs_before: int | None = None
    """Multiply-adds per sample of all convolutions and matrix products, see `convpool.summary`."""
    model_macs_after: int | None = None
    counted_shapes: dict[str, list[int]] = field(default_factory=dict)
    """The shapes of inputs with open sizes that the multiply-adds are counted with."""
    batch: int = 1
    """Samples in the inputs."""
    averages: int = 0
    """All averages of the original over windows or over maps."""
    resizes: int = 0
    """All its Resizes."""
    between: dict[str, int] = field(default_factory=dict)
    """How often an operator is the first obstacle on the way from a convolution to the nearest average."""


@dataclass(frozen=True)
class Speed:
    """Median microseconds per run of the original and of the result, timed in turn in onnxruntime on this machine's CPU."""

    original_us: float
    result_us: float
    threads: int
    input_shapes: dict[str, list[int]]

    @property
    def ratio(self) -> float:
        """How many times as fast the result is."""
        return self.original_us / self.result_us


@dataclass
class Report:
    """The whole report of one run."""

    sites: list[SiteReport]
    summary: Summary
    verification: Verification | None = None
    options: dict[str, object] = field(default_factory=dict)
    speed: Speed | None = None
    """None if nothing was timed."""
    hints: list[str] = field(default_factory=list)
    """Next steps that change the outcome."""
    notes: list[str] = field(default_factory=list)
    """Things that look like a pair and are none, and what the result costs."""
    warnings: list[str] = field(default_factory=list)
    """Things to know before using the result, as options that had no effect."""
    changed: bool = False
    """True if the result differs from the model."""

    @property
    def checked_shapes(self) -> dict[str, list[int]]:
        """The shapes that inputs had in the check; none without one."""
        return self.verification.input_shapes if self.verification is not None else {}

    def to_json(self, indent: int | None = 2) -> str:
        """The report as JSON text; verification is null if there was none."""
        return json_text(asdict(self), indent)


def json_text(content: dict, indent: int | None = 2) -> str:
    """`content` as JSON, with null for numbers that are not finite."""
    return json.dumps(json.loads(json.dumps(content), parse_constant=lambda _: None), indent=indent) + "\n"


class Log:
    """Collects the reports of the rules."""

    def __init__(self, made: Callable[[str], bool]) -> None:
        """made: whether a tensor is none of the original model's."""
        self.made = made
        self.channels_last = 0
        """How many nodes read or give tensors with channels last."""
        self.concats = 0
        """How many Concats read another's result."""
        self._rewritten: list[SiteReport] = []
        self._kept: list[SiteReport] = []
        self._giver: dict[tuple[str, str], SiteReport] = {}
        """The report of the operator's node that gives a tensor of a scope."""

    @property
    def made_operator(self) -> bool:
        """True if any report tells of a node of the operator."""
        return bool(self._giver)

    def reports(self) -> list[SiteReport]:
        """One report per convolution of every candidate, rewritten ones first."""
        return [*self._rewritten, *self._kept]

    def rewritten(self, site: SiteReport, output: str | None) -> None:
        """A convolution was rewritten.  output: what the operator's node gives, where it became one."""
        if output is not None:
            self._giver[site.scope, output] = site
        self._rewritten.append(site)

    def upsamples(self, scope: str, conv: str, output: str, operator: str) -> None:
        """A convolution that was rewritten has become, with the upsampling behind it, the operator's node that gives `output`."""
        for site in self._rewritten:
            if (site.scope, site.conv, site.operator) == (scope, conv, None):
                site.operator, site.lowering, site.macs_after = operator, "upsampleconv", site.macs_before
                self._giver[scope, output] = site

    def kept(self, site: SiteReport) -> None:
        """A candidate stays as it is."""
        self._kept.append(site)

    def fused(
        self, found: SiteReport, output: str, now: str, before: Iterable[str], behind: Iterable[str], saved: int | None
    ) -> None:
        """The operator's node that gives `output` was fused with the nodes `before` and `behind` it, and gives `now`.  found: a
        report of the node as it is now, for one that an earlier run wrote.  saved: bytes a sample, None where unknown."""
        site = self._giver.pop((found.scope, output), None)
        if site is None:
            site = found
            self._rewritten.append(site)
        site.operator, site.absorbed = found.operator, (*before, *site.absorbed, *behind)
        site.saved_bytes = None if saved is None else saved + (site.saved_bytes or 0)
        self._giver[found.scope, now] = site

    def beside(self, scope: str, output: str, reasons: Iterable[object]) -> None:
        """Why other nodes beside the operator's node that gives `output` stay; nothing for one that has no report."""
        site = self._giver.get((scope, output))
        if site is not None:
            site.beside += tuple(map(str, reasons))
