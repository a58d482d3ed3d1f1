# SPDX-License-Identifier: Apache-2.0
"""The reports of a run: which one tells of a node that is fused step by step, and what is said beside and at the end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convpool.report import Log, SiteReport, Speed
from convpool.rules import seen as reasons
from convpool.rules.base import Reject
from convpool.rules.seen import Seen


def site(conv: str, **more) -> SiteReport:
    return replace(
        SiteReport(
            conv=conv,
            pool="pool",
            pattern="conv_avg_pool",
            status="rewritten",
            lowering="convavgpool",
            macs_before=4,
            macs_after=1,
        ),
        **more,
    )


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


POOLED = "MaxPool follows a convolution 2 x: a maximum is not linear, so no pair"
INT8 = "TensorRT would run 3 x a float kernel for an INT8 convolution; --target tensorrt leaves these"


@pytest.mark.parametrize(
    ("sites", "max_pools", "int8", "wanted"),
    [
        ([], 0, 0, []),
        ([], 2, 0, [POOLED]),
        ([site("a", status="rejected")], 2, 0, [POOLED]),
        ([site("a")], 2, 0, []),
        ([site("a")], 0, 3, [INT8]),
    ],
)
def test_notes(sites, max_pools, int8, wanted):
    assert reasons.notes(Seen(max_pools=max_pools), sites, int8) == wanted


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


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (Reject("Relu 'r'", reasons.BETWEEN, "Relu", "linear"), "a Relu stands between: Relu 'r'"),
        (Reject("Elu 'e'", reasons.BETWEEN, "Elu", "linear"), "an Elu stands between: Elu 'e'"),
        (Reject("Conv 'c'", "output 'x' has 2 readers", "others", "one"), "read by something else too: output 'x' has 2 readers"),
        (Reject("Conv 'c'", "mode", "edge", "constant"), "Conv 'c': mode; got edge, expected constant"),
    ],
)
def test_obstacles_in_words(verdict, words):
    assert reasons.in_words(verdict) == words
