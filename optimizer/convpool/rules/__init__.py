# SPDX-License-Identifier: Apache-2.0
"""The rules by stage, in the order in which they run.  A new rule is a file or folder here and an entry of `options.RULES`."""

from dataclasses import dataclass, replace
from pkgutil import resolve_name

from convpool.options import RULES
from convpool.rules.base import Rule


@dataclass(frozen=True)
class Stage:
    """Rules that run over the same index, in this order for each scope.

    repeats: until nothing is found, since a rewrite may make a site of its neighbours; each rewrite lowers the cost, so this
    ends.  adds_tensors: whether the rules make tensors that only shape inference knows.  rewrites: whether a change counts for
    the stages behind it.  only_if: "rewritten" where these run only if there was such a change, "operator" only if a pair became
    a node of the operator.
    """

    rules: tuple[Rule, ...] = ()
    repeats: bool = True
    adds_tensors: bool = True
    rewrites: bool = True
    only_if: str = ""


_ORDER = {
    "constants": Stage(rewrites=False),
    # What an earlier run wrote, where another form is asked for now.
    "earlier": Stage(repeats=False),
    "pairs": Stage(),
    "pairs of chains": Stage(only_if="operator"),
    "convolutions": Stage(repeats=False, only_if="operator"),
    "chains": Stage(repeats=False, only_if="operator"),
    "heads": Stage(repeats=False, only_if="operator"),
    # What can go to the node in front is cheaper there, once for each result: epilogues before prologues.
    "epilogues": Stage(adds_tensors=False),
    "prologues": Stage(adds_tensors=False),
    "products": Stage(repeats=False, only_if="rewritten"),
    "concats": Stage(repeats=False, adds_tensors=False, only_if="rewritten"),
    "layouts": Stage(repeats=False),
}


def _rules(stage: str) -> tuple[Rule, ...]:
    """The rules of a stage, each once and in order; that of pairs has `fold` too: one may make the sizes of another known."""
    stages = ("constants", stage) if stage == "pairs" else (stage,)
    places = dict.fromkeys(entry.where for entry in RULES if entry.stage in stages)
    return tuple(resolve_name(f"{__name__}.{place}")() for place in places)


STAGES = tuple(replace(stage, rules=_rules(name)) for name, stage in _ORDER.items())
