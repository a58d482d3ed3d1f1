# SPDX-License-Identifier: Apache-2.0
"""Training as it is done: a WGAN-GP on scikit-learn's digits, and LeNet-5 forward and backward as the textbook derives it."""

import copy

import numpy as np
import pytest

from tests.support.torch import require_torch

torch = require_torch()

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from convpool.torch import ConvAvgPool2d, optimize  # noqa: E402
from models.digits import load_train_set  # noqa: E402
from models.torch_discriminators import Block, gradient_penalty  # noqa: E402

STEPS = 6
ROUNDING = 2.0**-24


class Critic(nn.Module):
    """A small critic of WGAN-GP's blocks for images of 32x32 with one channel."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.Sequential(Block(8, 8, 16), Block(16, 16, 16), Block(16, 16, 16, down=False))
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(F.relu(self.blocks(self.stem(x))).mean((2, 3)))


def generator():
    """Images [N, 1, 32, 32] of noise [N, 8]."""
    layers = [
        nn.Linear(8, 128),
        nn.ReLU(),
        nn.Unflatten(1, (8, 4, 4)),
        nn.Upsample(scale_factor=8),
        nn.Conv2d(8, 1, 3, padding=1),
    ]
    return nn.Sequential(*layers, nn.Tanh())


def train_gan(critic, maker, images):
    """Losses of both, step by step; WGAN-GP's settings (lambda 10, Adam with betas 0 and 0.9), one critic step for each."""
    draw = torch.Generator().manual_seed(31)
    adam = [torch.optim.Adam(module.parameters(), lr=1e-4, betas=(0.0, 0.9)) for module in (critic, maker)]
    losses = []
    for step in range(STEPS):
        real = images[8 * step : 8 * step + 8]
        fake, mix = maker(torch.randn(8, 8, generator=draw)), torch.rand(8, 1, 1, 1, generator=draw)
        penalty = gradient_penalty(critic, real, fake.detach(), mix)
        loss = critic(fake.detach()).mean() - critic(real).mean() + 10 * penalty
        adam[0].zero_grad()
        loss.backward()
        adam[0].step()
        score = -critic(maker(torch.randn(8, 8, generator=draw))).mean()
        adam[1].zero_grad()
        score.backward()
        adam[1].step()
        losses += [loss.item(), score.item()]
    return np.array(losses)


def test_wgan_gp_on_digits():
    torch.manual_seed(1)
    critic, maker = Critic(), generator()
    images = torch.from_numpy(load_train_set()[0]).float()
    assert images.shape[1:] == (1, 32, 32)
    changed, report = optimize(copy.deepcopy(critic), images[:8])
    assert report.summary.rewritten == 4
    original = train_gan(critic, copy.deepcopy(maker), images)
    optimized = train_gan(changed, maker, images)
    # The penalty's norms are of about 1; Adam's first steps divide gradients by their own size, which a rounding of 2^-24 may
    # change by a hundred times as much where they are small.
    np.testing.assert_allclose(optimized, original, rtol=1e3 * ROUNDING, atol=1e3 * ROUNDING)
    assert original[0] > original[-2]


# Textbook, chapter 16: with Y = pool(conv(X, W) + b), window p, D = dE/dY, and G the derivative by the convolution's result,
#     G[n, m, i, j] = D[n, m, i // p, j // p] / p^2                  dE/db[m] = sum over n, i, j of G[n, m, i, j]
#     dE/dW[m, c, a, b] = sum over n, i, j of G[n, m, i, j] X[n, c, i + a, j + b]
#     dE/dX[n, c, i, j] = sum over m, a, b of G[n, m, i - a, j - b] W[m, c, a, b]


def by_hand(x, weight, grad, p):
    """dE/dX, dE/dW and dE/db as the textbook has them, in float64."""
    wide = grad.repeat(p, 2).repeat(p, 3) / p**2
    k, size = weight.shape[-1], wide.shape[-1]
    d_x, d_weight = np.zeros_like(x), np.zeros_like(weight)
    for a in range(k):
        for b in range(k):
            window = x[:, :, a : a + size, b : b + size]
            d_weight[:, :, a, b] = np.einsum("nmij,ncij->mc", wide, window)
            d_x[:, :, a : a + size, b : b + size] += np.einsum("nmij,mc->ncij", wide, weight[:, :, a, b])
    return d_x, d_weight, wide.sum((0, 2, 3))


@pytest.mark.parametrize(("c", "m", "size"), [(1, 6, 32), (6, 16, 14)])
def test_the_fused_layer_has_the_textbook_s_derivatives(c, m, size):
    torch.manual_seed(2)
    layer = ConvAvgPool2d(c, m, 5, pool_size=2).double()
    x = torch.randn(3, c, size, size, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, layer.weight, layer.bias), grad)
    expected = by_hand(x.detach().numpy(), layer.weight.detach().numpy(), grad.numpy(), 2)
    for tensor, array in zip(found, expected, strict=True):
        np.testing.assert_allclose(tensor.numpy(), array, rtol=1e-12, atol=1e-12)


class LeNet5(nn.Module):
    """LeNet-5 in its first form; pair: a convolution of 5x5 and its average over 2x2, as one layer or two."""

    def __init__(self, pair):
        super().__init__()
        self.first, self.second = pair(1, 6), pair(6, 16)
        self.rest = nn.Sequential(
            nn.Conv2d(16, 120, 5), nn.Tanh(), nn.Flatten(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10)
        )

    def forward(self, x):
        return self.rest(torch.tanh(self.second(torch.tanh(self.first(x)))))


def two_layers(c, m):
    return nn.Sequential(nn.Conv2d(c, m, 5), nn.AvgPool2d(2))


def one_layer(c, m):
    return ConvAvgPool2d(c, m, 5, pool_size=2)


def test_lenet5_trains_through_the_fused_layer():
    torch.manual_seed(3)
    plain, fused = LeNet5(two_layers), LeNet5(one_layer)
    values = {key.replace("first.0", "first").replace("second.0", "second"): v for key, v in plain.state_dict().items()}
    fused.load_state_dict(values)
    images, labels = (torch.from_numpy(array) for array in load_train_set())
    histories = []
    for net in (plain, fused):
        optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
        losses = []
        for step in range(24):
            batch = slice(64 * step % 1024, 64 * step % 1024 + 64)
            loss = F.cross_entropy(net(images[batch].float()), labels[batch].long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        histories.append(np.array(losses))
    np.testing.assert_allclose(histories[1][:5], histories[0][:5], rtol=1e3 * ROUNDING)
    np.testing.assert_allclose(histories[1], histories[0], rtol=1e-2)  # Adam lets roundings grow from step to step
    assert histories[1][-1] < 0.5 * histories[1][0]
