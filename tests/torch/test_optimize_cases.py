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


class Between(torch.nn.Module):
    """A pair, and one with something between its parts."""

    def __init__(self, between):
        super().__init__()
        self.first = torch.nn.Conv2d(16, 32, 3, padding=1)
        self.second = torch.nn.Conv2d(32, 32, 3, padding=1)
        self.between = between

    def forward(self, x):
        x = torch.relu(torch.nn.functional.avg_pool2d(self.first(x), 2))
        return torch.nn.functional.avg_pool2d(self.between(self.second(x)), 2)


def shuffled(x, groups: int):
    n, c, h, w = x.shape
    return x.view(n, groups, c // groups, h, w).transpose(1, 2).reshape(n, c, h, w)


BETWEEN = {
    "shuffle": lambda x: shuffled(x, 4),
    "shuffle of a slice": lambda x: shuffled(x[:, :12], 2),
    "slice": lambda x: x[:, 8:24],
    "negative": lambda x: -x,
    "permuted, and back": lambda x: x.permute(0, 2, 3, 1).permute(0, 3, 1, 2),
    "mean of the channels": lambda x: x.mean(1, keepdim=True),
    "padded channels": lambda x: torch.nn.functional.pad(x, (0, 0, 0, 0, 1, 2)),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_acts_along_channels_moves_behind_the_average(name):
    torch.manual_seed(3)
    module, x = Between(BETWEEN[name]).double(), torch.randn(2, 16, 32, 32, dtype=torch.float64)
    changed, report = optimize(module, (x,))
    assert report.summary.rewritten == 2, [site.reason for site in report.sites]
    results = []
    for item in (module, changed):
        item.zero_grad()
        y = item(x)
        (y * y).sum().backward()
        results.append([y, *(parameter.grad.clone() for parameter in item.parameters())])
    for one, other in zip(*results, strict=True):
        assert float((one - other).detach().abs().max()) <= 1e-12 * float(one.detach().abs().max())
