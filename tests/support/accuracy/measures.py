# SPDX-License-Identifier: Apache-2.0
"""The two measures of how far outputs are from a reference."""

from collections.abc import Mapping, Sequence

import numpy as np

Outputs = Mapping[str, np.ndarray]


def largest(outputs: Outputs, reference: Outputs) -> float:
    """The largest max |y - r| / max |r| over the outputs; infinite where shapes differ or a value is not finite."""
    worst = 0.0
    for name, wanted in reference.items():
        got = outputs[name].astype(np.float64)
        if got.shape != wanted.shape or not np.isfinite(got).all():
            return float("inf")
        worst = max(worst, float(np.abs(got - wanted).max() / np.abs(wanted).max()))
    return worst


def root_mean_square(outputs: Sequence[Outputs], reference: Sequence[Outputs]) -> float:
    """sqrt(sum (y - r)^2 / sum r^2) over all outputs of all input sets.  What a ratio of two engines is taken of: the largest
    error of a few scores is a matter of luck."""
    off = sum(float(((y[name] - r[name]) ** 2).sum()) for y, r in zip(outputs, reference, strict=True) for name in r)
    return (off / sum(float((value**2).sum()) for r in reference for value in r.values())) ** 0.5
