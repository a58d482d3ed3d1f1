# SPDX-License-Identifier: Apache-2.0
"""Reasons in a few words, to group sites that stay for the same one, and notes on what is none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from convpool.passes.base import BETWEEN, Reject
from convpool.passes.seen import Seen
from convpool.report import SiteReport


def in_short(verdict: Reject) -> str:
    """The obstacle in a few words."""
    condition = verdict.condition
    if condition == BETWEEN:
        return f"{verdict.got} between"
    if condition.startswith("output '"):
        return "read by something else too"
    for beginning, words in (("saves too little", "saves too little"), ("Pad '", "a Pad in front")):
        if condition.startswith(beginning):
            return words
    if verdict.got == "a computed tensor":
        return f"{condition} not constant"
    return f"{condition}: unknown" if "unknown" in verdict.got else condition


def in_words(verdict: Reject) -> str:
    """The reason as a sentence, where `in_short` has words of its own for it; else in full."""
    if verdict.condition == BETWEEN:
        article = "an" if verdict.got[:1] in "AEIOU" else "a"
        return f"{article} {verdict.got} stands between: {verdict.node}"
    if verdict.condition.startswith("output '"):
        return f"read by something else too: {verdict.condition}"
    return str(verdict)


def notes(seen: Seen, sites: Sequence[SiteReport], int8: int) -> list[str]:
    """What a model has that looks like a pair and is none; and what its result costs.  int8: see `Pipeline`."""
    found = []
    if seen.max_pools and not any(site.status == "rewritten" for site in sites):
        found.append(f"MaxPool follows a convolution {seen.max_pools} x: a maximum is not linear, so no pair")
    if int8:
        found.append(f"TensorRT would run {int8} x a float kernel for an INT8 convolution; --target tensorrt leaves these")
    return found


def unmatched(patterns: Iterable[str], matched: Iterable[str]) -> list[str]:
    """A warning for each pattern of `exclude` that matches no name."""
    known = set(matched)
    return [
        f"exclude: {pattern!r} matches no convolution, pooling or Concat here" for pattern in patterns if pattern not in known
    ]
