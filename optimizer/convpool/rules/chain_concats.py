# SPDX-License-Identifier: Apache-2.0
"""Concats of channels that begin as an earlier one does: they read its result.

    p = Concat(a, b); q = Concat(a, b, c)        p = Concat(a, b); q = Concat(p, c)

A DenseNet joins all maps so far in front of each layer, its transition's among them.  A runtime can let a map be written in
place into one Concat, and copies it into every other that reads it: (n - 1)(n + 2) / 2 copies in a block of n layers, where
joined step by step there are 2 (n - 1) at most.
Conditions: (1) both join along axis 1; (2) the earlier one's inputs, two or more, are the first of the later one's, which
has more; (3) something else in the model was rewritten.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from convpool.ir.edit import Edit
from convpool.ir.index import Scope
from convpool.ir.protos import is_op, known_attributes
from convpool.report import Log
from convpool.rules.base import Context, NodesPlan, Rule, Site


@dataclass(frozen=True)
class ConcatSite(Site):
    """A Concat, and what it could read instead: the result of an earlier one, and what that does not join."""

    inputs: tuple[str, ...]


@dataclass(frozen=True)
class ConcatPlan(NodesPlan):
    """A Concat with other inputs."""

    inputs: tuple[str, ...]


class ChainConcats(Rule):
    """Every Concat of channels that begins as an earlier one does."""

    names = ("chain_concats",)
    needs = ("Concat",)

    def sites(self, scope: Scope, context: Context) -> Iterator[ConcatSite]:
        """The later Concats, each with the longest of the earlier ones that it begins as."""
        earlier: dict[tuple[str, ...], str] = {}
        lengths: set[int] = set()
        for index, node in enumerate(scope.nodes):
            if not is_op(node, "Concat") or (known_attributes(node) or {}).get("axis") != 1:
                continue
            names = tuple(node.input)
            for length in sorted((n for n in lengths if n < len(names)), reverse=True):
                if names[:length] in earlier:
                    yield ConcatSite(scope, index, (earlier[names[:length]], *names[length:]))
                    break
            if len(names) > 1:
                earlier.setdefault(names, node.output[0])
                lengths.add(len(names))

    def check(self, site: ConcatSite, context: Context) -> ConcatPlan:
        """The plan: there is no condition left."""
        return ConcatPlan(site.scope, (site.root,), site.inputs)

    def apply(self, plan: ConcatPlan, edit: Edit) -> None:
        edit.new_inputs[plan.node] = list(plan.inputs)

    def rewritten(self, plan: ConcatPlan, outputs: list[str], times: dict[str, float] | None, log: Log) -> None:
        log.concats += 1
