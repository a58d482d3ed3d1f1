# SPDX-License-Identifier: Apache-2.0
"""ConvAvgPool modules against torch.nn's with the same parameters."""

import copy

import pytest

from tests.support.torch import require_torch

torch = require_torch()
from torch import nn  # noqa: E402

import convpool.torch  # noqa: E402

ARGUMENTS = [
    (1, {"padding": 1}, {"pool_size": 2}),
    (2, {"padding": 1, "bias": False}, {"pool_size": 2}),
    (2, {"stride": 2, "padding": (1, 2), "groups": 2, "dilation": 2}, {"pool_size": (2, 3), "pool_stride": (2, 1)}),
    (2, {"padding": 1, "padding_mode": "reflect"}, {"pool_size": 3, "pool_padding": 1, "count_include_pad": False}),
    (2, {"padding": "same", "padding_mode": "circular"}, {"pool_size": 2, "ceil_mode": True}),
    (3, {"padding": 1}, {"pool_size": 2}),
]


@pytest.mark.parametrize("rank, conv, pool", ARGUMENTS)
def test_a_module_is_its_two(rank, conv, pool):
    torch.manual_seed(0)
    original = getattr(nn, f"Conv{rank}d")(4, 6, 3, **conv, dtype=torch.float64)
    module = getattr(convpool.torch, f"ConvAvgPool{rank}d")(4, 6, 3, **conv, dtype=torch.float64, **pool)
    module.load_state_dict(original.state_dict())
    original.load_state_dict(module.state_dict())
    assert list(module.state_dict()) == list(original.state_dict())
    pooling = {name.removeprefix("pool_").replace("size", "kernel_size"): value for name, value in pool.items()}
    x = torch.randn(2, 4, *[9, 8, 7][:rank], dtype=torch.float64)
    expected = getattr(nn, f"AvgPool{rank}d")(**pooling)(original(x))
    torch.testing.assert_close(module(x), expected)
    module(x).sum().backward()
    expected.sum().backward()
    for mine, theirs in zip(module.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_the_first_weights_are_nn_conv2ds():
    torch.manual_seed(3)
    original = nn.Conv2d(4, 6, 3)
    torch.manual_seed(3)
    module = convpool.torch.ConvAvgPool2d(4, 6, 3, pool_size=2)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), original.parameters(), strict=True))


def test_it_tells_what_it_is_and_is_copied():
    module = convpool.torch.ConvAvgPool2d(4, 6, 3, padding=1, pool_size=2)
    assert repr(module) == (
        "ConvAvgPool2d(4, 6, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), pool_size=(2, 2), pool_stride=(2, 2))"
    )
    x = torch.randn(1, 4, 8, 8)
    assert torch.equal(copy.deepcopy(module)(x), module(x))


def test_parametrizations_stay_live():
    module = torch.nn.utils.parametrizations.spectral_norm(convpool.torch.ConvAvgPool2d(4, 6, 3, pool_size=2))
    x = torch.randn(1, 4, 8, 8)
    module(x).sum().backward()
    assert module.parametrizations.weight.original.grad is not None
