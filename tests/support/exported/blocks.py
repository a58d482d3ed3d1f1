# SPDX-License-Identifier: Apache-2.0
"""Blocks of networks that have a convolution before an average pooling, written as people write them."""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations


class Fn(nn.Module):
    """A function as a module, to stand in a Sequential."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def same(module: nn.Module) -> nn.Module:
    """The module itself, for blocks that take a normalisation of weights."""
    return module


def mean_of_slices(x: torch.Tensor) -> torch.Tensor:
    """2x2 average as WGAN-GP's code writes it."""
    return (x[:, :, ::2, ::2] + x[:, :, 1::2, ::2] + x[:, :, ::2, 1::2] + x[:, :, 1::2, 1::2]) / 4


class FirstDown(nn.Module):
    """SNGAN's first block: the shortcut pools before its convolution, the other way behind it."""

    def __init__(self, c: int, m: int, norm: Callable = same) -> None:
        super().__init__()
        self.conv1, self.conv2 = norm(nn.Conv2d(c, m, 3, padding=1)), norm(nn.Conv2d(m, m, 3, padding=1))
        self.shortcut = norm(nn.Conv2d(c, m, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(self.conv2(F.relu(self.conv1(x))), 2) + self.shortcut(F.avg_pool2d(x, 2))


class Down(nn.Module):
    """A residual block of SNGAN, BigGAN and WGAN-GP: both ways end in a convolution and an average."""

    def __init__(self, c: int, m: int, norm: Callable = same, pool: Callable = lambda x: F.avg_pool2d(x, 2)) -> None:
        super().__init__()
        self.conv1, self.conv2 = norm(nn.Conv2d(c, m, 3, padding=1)), norm(nn.Conv2d(m, m, 3, padding=1))
        self.shortcut, self.pool = norm(nn.Conv2d(c, m, 1)), pool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(self.conv2(F.relu(self.conv1(F.relu(x))))) + self.pool(self.shortcut(x))


class DownOnce(Down):
    """The same with one average behind the sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(self.conv2(F.relu(self.conv1(F.relu(x)))) + self.shortcut(x))


class Flat(nn.Module):
    """A residual block that keeps the size."""

    def __init__(self, c: int, norm: Callable = same) -> None:
        super().__init__()
        self.conv1, self.conv2 = norm(nn.Conv2d(c, c, 3, padding=1)), norm(nn.Conv2d(c, c, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv2(F.relu(self.conv1(F.relu(x))))


class StyleDown(nn.Module):
    """StarGAN v2's block: the average stands between the two convolutions, and instance norms before each."""

    def __init__(self, c: int, m: int, normalize: bool = False) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(c, c, 3, 1, 1), nn.Conv2d(c, m, 3, 1, 1)
        self.shortcut = nn.Conv2d(c, m, 1, bias=False)
        self.norm1, self.norm2 = (nn.InstanceNorm2d(c, affine=True) if normalize else nn.Identity() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.avg_pool2d(self.conv1(F.leaky_relu(self.norm1(x), 0.2)), 2)
        h = self.conv2(F.leaky_relu(self.norm2(h), 0.2))
        return (F.avg_pool2d(self.shortcut(x), 2) + h) / math.sqrt(2)


def transition(c: int, m: int) -> nn.Sequential:
    """DenseNet's transition."""
    return nn.Sequential(nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, m, 1, bias=False), nn.AvgPool2d(2, 2))


class Dense(nn.Module):
    """DenseNet's block of two layers."""

    def __init__(self, c: int, growth: int) -> None:
        super().__init__()
        layers = ((nn.BatchNorm2d(n), nn.ReLU(), nn.Conv2d(n, growth, 3, padding=1, bias=False)) for n in (c, c + growth))
        self.layers = nn.ModuleList(nn.Sequential(*each) for each in layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


class UNet(nn.Module):
    """Two levels; down by a 1x1 convolution, BatchNorm and an average, up by interpolation and the skipped maps."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.down1 = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.AvgPool2d(2), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.AvgPool2d(2), nn.ReLU())
        self.up1, self.up2 = nn.Conv2d(64, 16, 3, padding=1), nn.Conv2d(32, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.inputs(x)
        second = self.down1(first)
        up = F.interpolate(self.down2(second), scale_factor=2.0, mode="nearest")
        up = F.relu(self.up1(torch.cat([up, second], 1)))
        return self.up2(torch.cat([F.interpolate(up, scale_factor=2.0, mode="nearest"), first], 1))


class BoxFilter(nn.Module):
    """An average as a depthwise convolution with a buffer of equal weights; `taps` on one axis other than equal: a blur."""

    def __init__(self, channels: int, taps: tuple[float, ...] = (1.0, 1.0), padding: int = 0) -> None:
        super().__init__()
        line = torch.tensor(taps)
        square = line[:, None] * line[None, :]
        self.register_buffer("kernel", (square / square.sum()).expand(channels, 1, -1, -1).clone())
        self.channels, self.padding = channels, padding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, self.kernel, stride=2, padding=self.padding, groups=self.channels)


class StyleGAN1Down(nn.Module):
    """StyleGAN's discriminator block: blur, convolution without bias, average, then bias and LeakyReLU."""

    def __init__(self, c: int, m: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, m, 3, padding=1, bias=False)
        taps = torch.tensor([1.0, 2.0, 1.0])
        self.register_buffer("blur", (taps[:, None] * taps / 16).expand(c, 1, 3, 3).clone())
        self.bias, self.scale = nn.Parameter(torch.randn(m)), 1 / math.sqrt(9 * c)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.leaky_relu(self.conv1(x), 0.2)
        x = F.conv2d(x, self.blur, padding=1, groups=x.shape[1])
        x = F.conv2d(x, self.conv2.weight * self.scale, padding=1)
        return F.leaky_relu(F.avg_pool2d(x, 2) + self.bias.view(1, -1, 1, 1), 0.2)


class Trained(nn.Module):
    """LeNet-5's pooling: an average with a coefficient and a bias per map."""

    def __init__(self, maps: int) -> None:
        super().__init__()
        self.coefficient, self.bias = nn.Parameter(torch.rand(maps, 1, 1) + 0.5), nn.Parameter(torch.randn(maps, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(x, 2) * self.coefficient + self.bias


class Parallel(nn.Module):
    """Several ways from one input, joined by `join`."""

    def __init__(self, join: Callable, *ways: nn.Module) -> None:
        super().__init__()
        self.ways, self.join = nn.ModuleList(ways), join

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.join([way(x) for way in self.ways])


class Behind(nn.Module):
    """A convolution, and a function of its result that gives one or several outputs."""

    def __init__(self, conv: nn.Module, function: Callable) -> None:
        super().__init__()
        self.conv, self.function = conv, function

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self.function(self.conv(x))


class Shared(nn.Module):
    """One convolution for two inputs, as a siamese network has it."""

    def __init__(self, *, pooled: bool) -> None:
        super().__init__()
        self.conv, self.pooled = nn.Conv2d(8, 16, 3, padding=1), pooled

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        second = self.conv(z)
        return F.avg_pool2d(self.conv(x), 2) - (F.avg_pool2d(second, 2) if self.pooled else second[:, :, ::2, ::2])


class Attention(nn.Module):
    """Next-ViT's attention in small: keys and values from tokens that an AvgPool1d has shortened."""

    def __init__(self, c: int = 32) -> None:
        super().__init__()
        pool = nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False)
        self.embed = nn.Sequential(pool, nn.Conv2d(3, c, 1), nn.BatchNorm2d(c))
        self.q, self.k, self.v, self.sr = nn.Linear(c, c), nn.Linear(c, c), nn.Linear(c, c), nn.AvgPool1d(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        short = self.sr(tokens.transpose(1, 2)).transpose(1, 2)
        return tokens + (self.q(tokens) @ self.k(short).transpose(1, 2) / 8).softmax(-1) @ self.v(short)


def spectral(module: nn.Module) -> nn.Module:
    """Spectral normalisation as a parametrization."""
    return parametrizations.spectral_norm(module)


def weight(module: nn.Module) -> nn.Module:
    """Weight normalisation as a parametrization."""
    return parametrizations.weight_norm(module)
