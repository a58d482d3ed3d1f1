# SPDX-License-Identifier: Apache-2.0
"""Checks of every model with a convolution beside a resampling after its rewrite, and pieces of such models."""

import numpy as np
import onnx

import convpool
from tests.support import rewriting

UP = 'u = Resize<mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor">(x, , s)\n'
TOLERANCE = 4e-6
"""Share of the largest output: sums of at most 32 * 49 float32 products in another order."""


def rewrite(
    model: onnx.ModelProto, count: int = 1, size: int = 6, *, exact: bool = False, target: str = "cpu", **options
) -> onnx.ModelProto:
    """The result of `count` sites rewritten: valid, equal, and stable.  exact: to the bit, on whole numbers."""
    return rewriting.rewrite(model, count, None, size, 0 if exact else TOLERANCE, whole=exact, target=target, **options)


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
