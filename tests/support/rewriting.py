# SPDX-License-Identifier: Apache-2.0
"""Pairs to rewrite, and what every rewritten model must hold."""

import os

import numpy as np
import onnx

import convpool
from tests.support import sessions
from tests.support.models import random_feeds

POOL = "AveragePool<kernel_shape=[2,2], strides=[2,2]>"
PAIR = f"h = Conv<pads=[1,1,1,1]>(x, w)\ny = {POOL}(h)"
CONV = "h = Conv<pads=[1,1,1,1]>(x, w)\n"
DIRECT = {"AveragePool": 1, "Conv": 1}
"""The operators of a pair in the lowering direct."""
LAST = 2**63 - 1
"""The end of a Slice that has none."""
CORNERS = {"f": [0, 0], "r": [1, 0], "c": [0, 1], "d": [1, 1], "e": [LAST, LAST], "a": [2, 3], "s": [2, 2]}
CORNER_SLICES = "".join(f"s{number} = Slice(h, {start}, e, a, s)\n" for number, start in enumerate("frcd", 1))
"""The four corners of each 2x2 window, by the constants CORNERS."""
RTOL = 2e-6
"""A share of the largest output: sums of up to 576 float32 products with random errors of 6e-8."""


def cases(usual: int) -> int:
    """Return how many random cases run: so many, times CONVPOOL_TEST_ROUNDS of the environment."""
    return max(1, round(usual * float(os.environ.get("CONVPOOL_TEST_ROUNDS", "1"))))


def assert_close(model, result, feeds: dict | None = None, rtol: float = RTOL) -> None:
    """Both give the same numbers, some of them finite, up to a share of each output's largest one of these."""
    feeds = feeds or random_feeds(model)
    for wanted, got in zip(sessions.run(model, feeds), sessions.run(result, feeds), strict=True):
        assert got.shape == wanted.shape and np.isfinite(wanted).any() == (wanted.size > 0)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=rtol * np.abs(wanted).max(initial=0, where=np.isfinite(wanted)))


def assert_stable(result: onnx.ModelProto, **options) -> None:
    """A second run changes nothing."""
    again = convpool.optimize(result, **{"check": 0, **options}).model
    assert again.SerializeToString(deterministic=True) == result.SerializeToString(deterministic=True)


def rewrite(
    model: onnx.ModelProto,
    pairs: int,
    lowering: str | None = "direct",
    size: int = 8,
    rtol: float = RTOL,
    *,
    whole: bool = False,
    **options,
) -> onnx.ModelProto:
    """The optimized model, after all that every result must hold: `pairs` rewritten, valid, equal, stable.  whole: on inputs that
    are whole numbers."""
    options["lowering"] = lowering
    before, result = model.SerializeToString(deterministic=True), convpool.optimize(model, check=0, **options)
    sites = result.report.sites
    assert sum(site.status == "rewritten" for site in sites) == pairs, [site.reason for site in sites]
    assert model.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(result.model, full_check=True)
    assert_stable(result.model, **options)
    feeds = random_feeds(model, size=size)
    if whole:
        feeds = {name: np.round(array * 2) for name, array in feeds.items()}
    assert_close(model, result.model, feeds, rtol)
    return result.model


def verified(model: onnx.ModelProto, pairs: int, **options) -> convpool.OptimizeResult:
    """The result of a model in which so many pairs are rewritten, compared with the original."""
    result = convpool.optimize(model, check=2, **options)
    assert result.report.summary.rewritten == pairs, [site.reason for site in result.report.sites]
    return result


IF_BODY = f"""y = If(flag) <
  then_branch = yes () => (float[1,32,6,6] a) {{ h = Conv<pads=[1,1,1,1]>(x, w) a = {POOL}(h) }},
  else_branch = no () => (float[1,32,6,6] b) {{ k = Conv<pads=[1,1,1,1]>(x, v) b = {POOL}(k) }}
>"""
IF_INPUTS = "float[1,16,12,12] x, bool flag"
