# SPDX-License-Identifier: Apache-2.0
"""Random models with upsampled maps give the same numbers after a rewrite, and the same bytes after a second one."""

import numpy as np
import onnx
import pytest

import convpool
from tests.support import sessions
from tests.support.random_resizes import random_upsampled
from tests.support.resizing import TOLERANCE


@pytest.mark.parametrize("seed", range(100))
def test_a_random_model(seed):
    model, feeds, maker = random_upsampled(seed)
    result = convpool.optimize(model, check=0, target="cpu", upsampling=maker.form)
    onnx.checker.check_model(result.model, full_check=True)
    for one, other in zip(sessions.run(model, feeds), sessions.run(result.model, feeds), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(other, one, rtol=0, atol=TOLERANCE * max(np.abs(one).max(initial=0), 1))
    again = convpool.optimize(result.model, check=0, target="cpu", upsampling=maker.form)
    assert again.model.SerializeToString(deterministic=True) == result.model.SerializeToString(deterministic=True)


def test_the_models_have_every_form():
    forms = set()
    for seed in range(100):
        model, _, maker = random_upsampled(seed)
        report = convpool.optimize(model, check=0, target="cpu", upsampling=maker.form).report
        forms |= {site.lowering for site in report.sites if site.status == "rewritten"}
    assert forms >= {"conv_first", "fused", "subpixel", "phases", "direct"}
