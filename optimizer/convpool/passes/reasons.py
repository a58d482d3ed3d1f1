# SPDX-License-Identifier: Apache-2.0
"""Reasons in a few words, to group sites that stay for the same one, and what a user can do about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from convpool.passes.base import Reject
from convpool.report import SiteReport

QUANTIZED = frozenset(
    {
        "QuantizeLinear",
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        "QLinearConv",
        "QLinearMatMul",
        "ConvInteger",
        "MatMulInteger",
    }
)
"""Operators that only quantized models have."""
QUANTIZE_LATER = "the model is quantized: run convpool before quantizing, with --lowering auto"
FOLD = "onnxslim and onnxsim fold what is computed from constants and sizes: run one of them first"
FIX_SIZES = "give the model's inputs fixed sizes first, as onnxslim --input-shapes and onnxsim --overwrite-input-shape do"
NOT_INFERRED = f"sizes are not inferred: {FOLD}"
BETWEEN = "between convolution and pooling"
"""The condition that a nonlinear operator between a convolution and a pooling fails."""


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


def advice(verdict: Reject) -> str:
    """What to do, where something can be done about a site; "" elsewhere."""
    if verdict.condition == BETWEEN and verdict.got in QUANTIZED:
        return "run convpool before quantizing"
    return ""


def hints(sites: Sequence[SiteReport], operators: Mapping[str, int], max_pools: int, open_inputs: bool) -> list[str]:
    """What to do next about a model, and what it has that looks like a pair and is none.

    operators: how often each occurs.  max_pools: poolings by the maximum that follow a convolution.
    """
    found = []
    stay = [site.reason or "" for site in sites if site.status == "rejected"]
    if QUANTIZED & operators.keys():
        found.append(QUANTIZE_LATER)
    if any("got a computed tensor" in reason for reason in stay):
        found.append(FOLD)
    if any(f" {words}" in reason for reason in stay for words in ("unknown size", "got unknown")):
        found.append(FIX_SIZES if open_inputs else NOT_INFERRED)
    if max_pools and not any(site.status == "rewritten" for site in sites):
        found.append(f"MaxPool follows a convolution {max_pools} x: a maximum is not linear, so no pair")
    return found


def unmatched(patterns: Iterable[str], matched: Iterable[str]) -> list[str]:
    """A warning for each pattern of `exclude` that matches no name."""
    known = set(matched)
    return [
        f"exclude: {pattern!r} matches no convolution, pooling or Concat here" for pattern in patterns if pattern not in known
    ]
