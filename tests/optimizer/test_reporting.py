# SPDX-License-Identifier: Apache-2.0
"""The reports of a run: which one tells of a node that is fused step by step, and what is said beside and at the end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convpool.passes import reasons
from convpool.passes.base import Reject
from convpool.report import SiteReport, Speed
from convpool.reporting import Log


def site(conv: str, **more) -> SiteReport:
    return replace(SiteReport(conv, "pool", "conv_avg_pool", "rewritten", "convavgpool", None, 4, 1), **more)


def test_each_report_follows_its_node():
    log = Log({"made"}.__contains__)
    assert not log.made_operator and log.made("made") and not log.made("x")
    log.rewritten(site("a"), None)
    assert not log.made_operator
    log.rewritten(site("b"), "y")
    log.rewritten(site("c", scope="body"), "y")
    log.kept(site("d", status="rejected"))
    assert log.made_operator
    fused = site("y", operator="ReluConvAvgPool")
    log.fused(fused, "y", "z", ["Relu 'r'"], ["Add 's'"], 10)
    log.fused(replace(fused, operator="ReluConvAvgPoolTanh"), "z", "z", ["Mul 'm'"], ["Tanh 't'"], 5)
    log.fused(replace(fused, scope="body"), "y", "y", [], [], None)
    log.fused(site("older", operator="ConvAvgPoolRelu"), "q", "q", (), ["Relu 'u'"], 7)
    log.beside("", "z", [Reject("Add 's'", "condition", "one", "another")])
    log.beside("", "z", ["more"])
    log.beside("", "y", ["of nothing"])
    found = {item.conv: item for item in log.reports()}
    assert list(found) == ["a", "b", "c", "older", "d"]
    assert found["b"].absorbed == ("Mul 'm'", "Relu 'r'", "Add 's'", "Tanh 't'") and found["b"].saved_bytes == 15
    assert found["b"].operator == "ReluConvAvgPoolTanh"
    assert found["b"].beside == ("Add 's': condition; got one, expected another", "more")
    assert found["c"].saved_bytes is None and found["c"].absorbed == () and found["c"].operator == "ReluConvAvgPool"
    assert found["older"].saved_bytes == 7 and found["older"].absorbed == ("Relu 'u'",)
    assert found["a"].beside == found["d"].beside == ()


def test_how_many_times_as_fast():
    assert Speed(30.0, 12.0, 2, {}).ratio == 2.5


def rejected(reason: str | None) -> SiteReport:
    return site("a", status="rejected", reason=reason)


POOLED = "MaxPool follows a convolution 2 x: a maximum is not linear, so no pair"


@pytest.mark.parametrize(
    ("sites", "operators", "max_pools", "open_inputs", "wanted"),
    [
        ([], {"Conv": 1}, 0, False, []),
        ([], {"QLinearConv": 1}, 0, False, [reasons.QUANTIZE_LATER]),
        ([rejected("Pad 'p': pads; got a computed tensor, expected constants")], {}, 0, False, [reasons.FOLD]),
        ([site("a", reason="got a computed tensor")], {}, 0, False, []),
        ([rejected("size of the Slices' input; got unknown, expected static")], {}, 0, True, [reasons.FIX_SIZES]),
        ([rejected("ceil_mode; got 1 on an unknown size, expected more")], {}, 0, False, [reasons.NOT_INFERRED]),
        ([rejected("operator; got unknowntype, expected one")], {}, 0, True, [reasons.FIX_SIZES]),
        ([rejected("operator; gotunknown"), rejected(None)], {}, 0, True, []),
        ([], {}, 2, False, [POOLED]),
        ([rejected("x")], {}, 2, False, [POOLED]),
        ([site("a")], {}, 2, False, []),
    ],
)
def test_hints(sites, operators, max_pools, open_inputs, wanted):
    assert reasons.hints(sites, operators, max_pools, open_inputs) == wanted


def test_advice_is_for_what_is_quantized():
    verdict = Reject("QLinearConv 'q'", reasons.BETWEEN, "QLinearConv", "linear operators only")
    assert reasons.advice(verdict) == "run convpool before quantizing"
    assert reasons.advice(replace(verdict, got="Relu")) == reasons.advice(replace(verdict, condition="mode")) == ""


def test_patterns_that_match_nothing():
    told = "exclude: 'b*' matches no convolution, pooling or Concat here"
    assert reasons.unmatched(["a*", "b*"], {"a*"}) == [told] and reasons.unmatched(["a*"], {"a*"}) == []


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (Reject("n", reasons.BETWEEN, "Relu", ""), "Relu between"),
        (Reject("n", "output 'x' has 2 readers", "other readers", ""), "read by something else too"),
        (Reject("n", "saves too little as direct", "1", ""), "saves too little"),
        (Reject("n", "Pad 'p' in front of the box mean", "pads", ""), "a Pad in front"),
        (Reject("n", "axes", "a computed tensor", ""), "axes not constant"),
        (Reject("n", "size", "unknown sizes", ""), "size: unknown"),
        (Reject("n", "mode", "edge", ""), "mode"),
    ],
)
def test_obstacles_in_short(verdict, words):
    assert reasons.in_short(verdict) == words
