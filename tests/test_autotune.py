# SPDX-License-Identifier: Apache-2.0
"""Choosing lowerings by measurement: what is timed, and what a measurement decides, by a pretended clock but for one test."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import convpool
from convpool import pipeline, summary
from convpool.check import session as runners
from convpool.check import session as timing
from convpool.check import session_process
from convpool.errors import ModelError
from models import generators
from tests.support.models import graph
from tests.support.rewriting import PAIR

ONE_SITE = [(0, 1, "timing y"), (1, 1, "checking"), (1, 1, "timing both models")]
ALL = {"convavgpool": {"original", "convavgpool", "fused"}, "auto": {"original", "direct", "fused"}}
ALL |= {form: {"original", form} for form in ("direct", "fused")}
"""Forms that each request times; direct is what onnxruntime makes of convavgpool."""


@pytest.fixture
def clock(monkeypatch):
    """Makes the lowering named by `clock["fastest"]` the fastest; `clock["timed"]` lists what was timed per site."""
    state: dict = {"fastest": None, "timed": []}

    def fake(sessions, arrays, rounds, budget_s):
        for session in sessions.values():
            session.run(None, arrays)
        state["timed"].append(set(sessions))
        return {name: 1.0 if name.split("+")[0] == state["fastest"] else 2.0 for name in sessions}

    monkeypatch.setattr(pipeline, "time_sessions", fake)
    monkeypatch.setattr(summary, "time_sessions", lambda sessions, *_: dict.fromkeys(sessions, 1.0))
    return state


@pytest.mark.parametrize("lowering", ALL)
def test_every_form_of_the_request_is_timed_and_the_fastest_kept(clock, lowering):
    for clock["fastest"] in sorted(ALL[lowering] - {"original"}):
        clock["timed"].clear()
        result = convpool.optimize(generators.generate("lenet5"), lowering=lowering, autotune=True)
        assert clock["timed"] == [ALL[lowering]] * 2
        assert [site.lowering for site in result.report.sites] == [clock["fastest"]] * 2
        assert all(site.times_us[clock["fastest"]] == 1.0 for site in result.report.sites)
        assert result.report.verification.passed


def test_a_site_whose_original_is_fastest_stays(clock):
    clock["fastest"], seen = "original", []
    result = convpool.optimize(generators.generate("lenet5"), target="cuda", autotune=True, progress=lambda *s: seen.append(s))
    assert [(done, total) for done, total, what in seen if what.startswith("timing S")] == [(0, 2), (1, 2)]
    assert result.report.warnings == ["autotune: timed on this machine's CPU, which says little of a GPU"]
    assert not result.changed and [site.status for site in result.report.sites] == ["rejected"] * 2
    assert all("measured slower; got convavgpool 2.0 us" in site.reason for site in result.report.sites)
    assert all(min(site.times_us, key=site.times_us.get) == "original" for site in result.report.sites)


def test_pairs_that_meet_before_the_pooling_are_timed_as_one_site(clock):
    clock["fastest"] = "fused"
    result = convpool.optimize(generators.generate("igebm_small"), lowering="auto", autotune=True)
    rewritten = [site.lowering for site in result.report.sites if site.status == "rewritten"]
    assert rewritten == ["fused"] * 4 and result.report.verification.passed


def test_a_site_of_open_size_is_timed_at_the_shape_given(clock):
    clock["fastest"] = "fused"
    body = f"s = Constant<value_ints=[8,2,3,3]>() k = ConstantOfShape<value=float[1] {{0.5}}>(s) {PAIR.replace('w)', 'k)')}"
    model = graph(body, inputs="float[N,2,H,W] x", outputs="float[N,8,P,Q] y")
    seen = []
    result = convpool.optimize(model, autotune=True, input_shapes={"x": [3, 2, 20, 24]}, progress=lambda *item: seen.append(item))
    assert [site.lowering for site in result.report.sites] == ["fused"] and seen == ONE_SITE


@pytest.mark.parametrize("long", [0.004, 0.5])
def test_a_session_is_timed_as_if_by_itself(monkeypatch, long):
    """A run takes longer while threads of another session spin, and where its own have gone to sleep."""
    now, ended = 0.0, {}

    class Session:
        def __init__(self, seconds):
            self.seconds = seconds

        def run(self, names, feed):
            nonlocal now
            disturbed = any(now - end < 0.036 for session, end in ended.items() if session is not self)
            asleep = now - ended.get(self, -1) > 0.036
            now += self.seconds * (1 + disturbed + 4 * asleep)
            ended[self] = now

        def turn(self, arrays):
            return session_process.turn(self, arrays)

    def sleep(seconds):
        nonlocal now
        now += seconds

    for module in (timing, session_process):
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep, perf_counter=lambda: now))
    times = timing.time_sessions({"a": Session(0.002), "b": Session(long)}, {}, rounds=5, budget_s=1)
    assert times == {"a": pytest.approx(2e3), "b": pytest.approx(long * 1e6)}


@pytest.mark.parametrize(("budget_s", "rounds"), [(None, 6), (7.5, 4), (0, timing.LEAST_ROUNDS)])
def test_rounds_stop_when_a_budget_is_spent_but_not_before_three(monkeypatch, budget_s, rounds):
    now = 0.0

    def turn():
        nonlocal now
        now += 1
        return now

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now))
    figures = timing.in_turn({"a": turn, "b": turn}, 6, warm_up=2, budget_s=budget_s)
    assert timing.LEAST_ROUNDS == 3
    assert figures == {"a": [5.0 + 2 * n for n in range(rounds)], "b": [6.0 + 2 * n for n in range(rounds)]}


def test_real_clock_on_a_real_network():
    result = convpool.optimize(generators.generate("lenet5"), lowering="auto", autotune=True)
    assert len(result.report.sites) == 2
    for site in result.report.sites:
        assert {"original", "direct"} <= set(site.times_us) <= ALL["auto"] and min(site.times_us.values()) > 0
        fastest = min(site.times_us, key=lambda name: site.times_us[name])
        assert site.lowering == (None if fastest == "original" else fastest)
    assert result.report.verification.passed


def test_what_has_one_form_only_is_not_timed(clock):
    body = """c = Conv<pads=[1,1,1,1]>(x, u) r = Relu(c) p = AveragePool<kernel_shape=[2,2], strides=[2,2]>(r)
      s = Conv<pads=[1,1,1,1]>(p, v) t = Relu(s)
      h = Conv<pads=[1,1,1,1]>(t, w) y = AveragePool<kernel_shape=[2,2], strides=[2,2]>(h)"""
    model = graph(body, {"u": (3, 16, 3, 3), "v": (16, 3, 3, 3)}, inputs="float[1,16,24,24] x")
    clock["fastest"] = "convavgpool"
    seen = []
    sites = convpool.optimize(model, enable="image_conv", autotune=True, progress=lambda *item: seen.append(item)).report.sites
    assert seen == ONE_SITE  # nor does what the operator's nodes fuse with count
    found = {site.conv: (site.pattern, site.status) for site in sites}
    assert found == {"h": ("conv_pool", "rewritten"), "s": ("stem", "rewritten"), "c": ("conv_pool", "rejected")}
    assert len(clock["timed"]) == 1


def test_a_site_that_onnxruntime_cannot_run_is_not_timed_but_a_bug_is_no_measurement(clock, monkeypatch):
    class Runner(runners.OnnxruntimeRunner):
        def values(self, arrays):
            if self.what == "the site":
                raise ModelError("no kernel")
            return super().values(arrays)

    model = generators.generate("lenet5")
    monkeypatch.setattr(pipeline, "OnnxruntimeRunner", Runner)
    result = convpool.optimize(model, autotune=True)
    assert result.changed and clock["timed"] == [] and all(site.times_us is None for site in result.report.sites)
    monkeypatch.undo()
    monkeypatch.setattr(pipeline, "time_sessions", Mock(side_effect=KeyError("a bug")))
    with pytest.raises(KeyError, match="a bug"):
        convpool.optimize(model, autotune=True)
