# SPDX-License-Identifier: Apache-2.0
"""Real networks, original and optimized, in use: inference, checkpoints, 20 steps of training.

What may differ is as in test_optimize_networks.py.  Losses of training are compared with the original's of one order.
"""

from __future__ import annotations

import copy

import pytest

from tests.support.torch import require_torch

torch = require_torch()

import torch.nn.functional as F  # noqa: E402

from convpool.torch import optimize  # noqa: E402
from tests.torch.test_optimize_networks import ALL, NETWORKS, TIMES, channels_last, exact_products, floor, made  # noqa: E402

__all__ = ["exact_products"]
STEPS = 20


@pytest.mark.parametrize(("name", "device", "dtype"), ALL)
def test_inference(name, device, dtype):
    module, x = made(name, device, dtype)
    with torch.no_grad():
        for _ in range(2):  # running means, and the vectors of spectral norm
            module(x)
        module.eval()
        exact = copy.deepcopy(module).double()(x.double())
        other, nhwc = channels_last(module, x)
        own = [module(x).double(), other(nhwc).double()]
        changed, _ = optimize(module, x)
        distances = [float((y.double() - exact).abs().max() / exact.abs().max()) for y in (*own, changed(x))]
    assert distances[2] <= max(TIMES * max(distances[:2]), floor(dtype))


@pytest.mark.parametrize("name", NETWORKS)
def test_checkpoints_load_both_ways(name):
    module, x = made(name)
    changed, _ = optimize(module, x)
    before, after = module.state_dict(keep_vars=True), changed.state_dict(keep_vars=True)
    assert list(before) == list(after)
    assert all(before[key] is after[key] for key in before)
    other = NETWORKS[name].make()
    changed.load_state_dict(other.state_dict())
    other.load_state_dict(changed.state_dict())
    with torch.no_grad():
        # Of equal states, less what another order of summation makes; both train, for spectral norm goes on from there.
        torch.testing.assert_close(copy.deepcopy(changed).eval()(x), other.eval()(x), rtol=1e-4, atol=1e-4)


OF_ALL_KINDS = (
    "SNGAN 64x64",
    "projection 64x64",
    "WGAN-GP 64x64",
    "StarGAN v2 64x64",
    "DVD-GAN",
    "LeNet-5",
    "DenseNet of short blocks",
)


def losses(module, x, seed):
    """The losses of 20 steps of a copy on noise."""
    module = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(STEPS):
        batch = x + torch.randn(x.shape, generator=generator).to(x.device)
        optimizer.zero_grad(set_to_none=True)
        loss = F.softplus(-module(batch)).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach().double().cpu())
    return torch.stack(found)


TRAINED = [("cpu", name) for name in OF_ALL_KINDS] + [("cuda", name) for name in NETWORKS if name != "DenseNet-121"]


@pytest.mark.parametrize("device, name", TRAINED)
def test_training_follows_the_original(name, device):
    module, x = made(name, device)
    x = x[..., : NETWORKS[name].trained, : NETWORKS[name].trained]
    changed, _ = optimize(copy.deepcopy(module), x)
    far = [0.0, 0.0]
    for seed in (29, 30, 31):  # in one of them a ReLU may pass zero by a rounding, which moves the losses by 1e-5 or not at all
        own = losses(module, x, seed)
        assert own[0] != own[-1]
        for number, found in enumerate((losses(*channels_last(module, x), seed), losses(changed, x, seed))):
            assert found.isfinite().all()
            far[number] = max(far[number], float((found - own).abs().max() / own.abs().max()))
    assert far[1] <= max(TIMES * far[0], STEPS * floor(torch.float32))
