# SPDX-License-Identifier: Apache-2.0
"""Checks of every model with a convolution beside a resampling after its rewrite, and pieces of such models."""

from __future__ import annotations

import numpy as np
import onnx

import convpool
from tests.support import sessions
from tests.support.models import random_feeds

UP = 'u = Resize<mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor">(x, , s)\n'
TOLERANCE = 4e-6
"""Share of the largest output: sums of at most 32 * 49 float32 products in another order."""


def rewrite(
    model: onnx.ModelProto, count: int = 1, size: int = 6, *, exact: bool = False, target: str = "cpu", **options
) -> onnx.ModelProto:
    """The result of `count` sites rewritten: valid, equal, and stable.  exact: to the bit, on whole numbers."""
    before = model.SerializeToString(deterministic=True)
    result = convpool.optimize(model, check=0, target=target, **options)
    sites = result.report.sites
    assert sum(site.status == "rewritten" for site in sites) == count, [site.reason for site in sites]
    assert model.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(result.model, full_check=True)
    after = result.model.SerializeToString(deterministic=True)
    again = convpool.optimize(result.model, check=0, target=target, **options)
    assert again.model.SerializeToString(deterministic=True) == after
    feeds = random_feeds(model, size=size)
    if exact:
        feeds = {name: np.round(array * 2) for name, array in feeds.items()}
    for one, other in zip(sessions.run(model, feeds), sessions.run(result.model, feeds), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(other, one, rtol=0, atol=0 if exact else TOLERANCE * max(np.abs(one).max(), 1))
    return result.model


def reason(model: onnx.ModelProto, **options) -> str:
    """The reason why the one site of a model stays."""
    result = convpool.optimize(model, check=0, **{"target": "cpu", **options})
    (site,) = result.report.sites
    assert site.status == "rejected" and not result.changed
    return site.reason


def scales(*factors: float) -> np.ndarray:
    """Scales of a Resize, batch and channels kept."""
    return np.array([1, 1, *factors], np.float32)


def whole(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Small whole numbers."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)
