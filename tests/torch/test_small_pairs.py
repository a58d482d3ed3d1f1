# SPDX-License-Identifier: Apache-2.0
"""Small pairs of eager steps on a GPU have the right gradients, in each memory order, where PyTorch's own pooling has not."""

import copy

import pytest

from tests.support.torch import require_torch

torch = require_torch()

import convpool.torch  # noqa: E402
from tests.support.torch_gpu import gpu, on_gpu  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("gpu")
CONVS = {1: torch.nn.Conv1d, 2: torch.nn.Conv2d, 3: torch.nn.Conv3d}
POOLS = {1: torch.nn.AvgPool1d, 2: torch.nn.AvgPool2d, 3: torch.nn.AvgPool3d}


def gradients(net, x):
    return torch.autograd.grad(net(x).square().sum(), list(net.parameters()))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(
    ("channels", "kernel", "padding", "pool"), [(6, 3, 1, 2), (1, 3, 1, 2), (6, 4, 1, 3), (6, 5, 2, 2), (6, 3, 0, 2)]
)
def test_gradients(channels, kernel, padding, pool, rank, last):
    torch.manual_seed(1)
    layers = [CONVS[rank](3, channels, 3), torch.nn.LeakyReLU(0.2), CONVS[rank](channels, 7, kernel, padding=padding)]
    net = torch.nn.Sequential(*layers, POOLS[rank](pool))
    x = on_gpu((2, 3, *[12] * rank), torch.float64, last)
    expected = gradients(copy.deepcopy(net).double(), x.cpu().contiguous())
    order = {2: torch.channels_last, 3: torch.channels_last_3d}.get(rank) if last else None
    changed, report = convpool.torch.optimize(net.cuda().double().to(memory_format=order or torch.contiguous_format), x)
    assert report.summary.rewritten == 1
    for got, wanted in zip(gradients(changed, x), expected, strict=True):
        torch.testing.assert_close(got.cpu().contiguous(), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("last", [False, True])
def test_a_pooling_before_the_split_of_a_map(last):
    """Two convolutions of one map, whose mean is a pooling of its own in the rewritten graph."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = (torch.nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

        def forward(self, x):
            x = self.first(x).tanh()
            return torch.nn.functional.avg_pool2d(torch.cat([self.second(x), x, self.third(x)], 1), 2)

    torch.manual_seed(2)
    net, x = Net(), on_gpu((2, 4, 12, 12), torch.float64, last)
    expected = gradients(copy.deepcopy(net).double(), x.cpu().contiguous())
    order = torch.channels_last if last else torch.contiguous_format
    changed, report = convpool.torch.optimize(net.cuda().double().to(memory_format=order), x)
    assert report.summary.rewritten == 2
    for got, wanted in zip(gradients(changed, x), expected, strict=True):
        torch.testing.assert_close(got.cpu().contiguous(), wanted, rtol=1e-10, atol=1e-10)
