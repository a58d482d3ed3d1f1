# SPDX-License-Identifier: Apache-2.0
"""The modules of `tests/exporters`, optimized in PyTorch: how many pairs are rewritten, and outputs in all modes."""

from __future__ import annotations

import pytest

from tests.support.torch import require_torch

torch = require_torch()

from convpool.torch import optimize  # noqa: E402
from tests.support.exported.cases import CASES  # noqa: E402
from tests.support.exported.exporting import UNITS, module_and_inputs  # noqa: E402

MISSED = {"box filter": 1, "stride 2": 1}
"""Pairs that need constants: a buffer of equal weights, and a convolution with a larger kernel."""
SUMMED = 64
"""Units of roundoff that another order of summation of these small networks may differ by."""


@pytest.mark.parametrize("name", CASES)
def test_pairs_and_outputs(name):
    module, inputs = module_and_inputs(name)
    case = CASES[name]
    changed, report = optimize(module_and_inputs(name)[0], inputs)  # not a copy: what weight_norm has computed cannot be copied
    assert report.summary.rewritten == case.pairs - MISSED.get(name, 0), [(s.conv, s.status, s.reason) for s in report.sites]
    for training in (False, True):
        for grad in (True, False):
            both = module.train(training), changed.train(training)
            results = []
            with torch.set_grad_enabled(grad):
                for item in both:
                    torch.manual_seed(5)
                    y = item(*inputs)
                    results.append(y if isinstance(y, tuple) else (y,))
            for original, optimized in zip(*results, strict=True):
                largest = float(original.double().abs().max())
                assert float((original.double() - optimized.double()).abs().max()) <= SUMMED * UNITS[case.dtype] * largest
