# SPDX-License-Identifier: Apache-2.0
"""More networks with the pair as PyTorch modules, written from the papers, with weights drawn at random.

- Projection: Miyato, Koyama, "cGANs with Projection Discriminator", ICLR 2018.
- BigGAN: Brock, Donahue, Simonyan, "Large Scale GAN Training for High Fidelity Natural Image Synthesis", ICLR 2019, with the
  self-attention of Zhang, Goodfellow, Metaxas, Odena, "Self-Attention Generative Adversarial Networks", ICML 2019.
- IGEBM: Du, Mordatch, "Implicit Generation and Modeling with Energy-Based Models", NeurIPS 2019; it pools behind the Add.
- StyleGAN: Karras, Laine, Aila, "A Style-Based Generator Architecture for Generative Adversarial Networks", CVPR 2019: a blur in
  front of each halving convolution, equalized learning rates, the deviation over the batch as one more channel.
- GAN stability: Mescheder, Geiger, Nowozin, "Which Training Methods for GANs do actually Converge?", ICML 2018; its averages are
  padded, so that none of its pairs is exact to move.
- DVD-GAN: Clark, Donahue, Simonyan, "Adversarial Video Generation on Complex Datasets", 2019; its temporal discriminator.
- DenseNet: Huang, Liu, van der Maaten, Weinberger, "Densely Connected Convolutional Networks", CVPR 2017.
- LeNet-5: LeCun, Bottou, Bengio, Haffner, "Gradient-Based Learning Applied to Document Recognition", Proc. IEEE, 1998.

`models.torch_discriminators` has SNGAN, WGAN-GP and StarGAN v2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import spectral_norm as hooked_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm

from models.torch_discriminators import Block, FirstBlock


class Projection(nn.Module):
    """SNGAN's blocks, and an inner product of the features with an embedding of the label."""

    def __init__(self, width: int = 64, factors: Sequence[int] = (1, 2, 4, 8, 16), classes: int = 10) -> None:
        super().__init__()
        sizes = [width * factor for factor in factors]
        rest = (Block(a, a, b, wrap=spectral_norm) for a, b in zip(sizes, sizes[1:], strict=False))
        self.blocks = nn.Sequential(FirstBlock(sizes[0], spectral_norm), *rest)
        self.head, self.classes = spectral_norm(nn.Linear(sizes[-1], 1)), spectral_norm(nn.Embedding(classes, sizes[-1]))

    def forward(self, x: torch.Tensor, label: torch.Tensor | None = None) -> torch.Tensor:
        """Scores [N, 1] of images [N, 3, H, W] with labels [N], or without."""
        h = F.relu(self.blocks(x)).sum((2, 3))
        score = self.head(h)
        return score if label is None else score + (self.classes(label) * h).sum(1, keepdim=True)


class Attention(nn.Module):
    """Self-attention over positions, keys and values from a map of half the size; its weight starts at 0."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        small, half = max(channels // 8, 1), max(channels // 2, 1)
        self.query, self.key, self.value, self.out = (
            hooked_spectral_norm(nn.Conv2d(a, b, 1, bias=False))
            for a, b in ((channels, small), (channels, small), (channels, half), (half, channels))
        )
        self.gamma = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of x [N, C, H, W]."""
        n, _, h, w = x.shape
        key, value = F.max_pool2d(self.key(x), 2).flatten(2), F.max_pool2d(self.value(x), 2).flatten(2)
        weights = torch.bmm(self.query(x).flatten(2).transpose(1, 2), key).softmax(-1)
        return self.gamma * self.out(torch.bmm(value, weights.transpose(1, 2)).view(n, -1, h, w)) + x


class BigGAN(nn.Module):
    """BigGAN's discriminator for 128x128 images, with old-style spectral normalisation and attention behind the first block."""

    def __init__(self, width: int = 96, factors: Sequence[int] = (1, 2, 4, 8, 16, 16)) -> None:
        super().__init__()
        sizes = [width * factor for factor in factors]
        blocks: list[nn.Module] = [FirstBlock(sizes[0], hooked_spectral_norm), Attention(sizes[0])]
        for number, (a, b) in enumerate(zip(sizes, sizes[1:], strict=False)):
            blocks.append(Block(a, b, b, down=number < len(sizes) - 2, wrap=hooked_spectral_norm))
        self.blocks, self.head = nn.Sequential(*blocks), hooked_spectral_norm(nn.Linear(sizes[-1], 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [N, 1] of images [N, 3, H, W]."""
        return self.head(F.relu(self.blocks(x)).sum((2, 3)))


class IGEBMBlock(nn.Module):
    """Conv3, LeakyReLU, Conv3, Add, LeakyReLU; down: Conv1 in the shortcut, and an average of the sum before its LeakyReLU."""

    def __init__(self, channels: int, out: int, down: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(channels, out, 1, bias=False) if channels != out else nn.Identity()
        self.down = down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, out, H, W] of [N, channels, H, W], of half the height and width where it averages."""
        h = self.conv2(F.leaky_relu(self.conv1(x), 0.2)) + self.skip(x)
        return F.leaky_relu(F.avg_pool2d(h, 2) if self.down else h, 0.2)


class IGEBM(nn.Module):
    """The energy of 32x32 images: Conv3, six blocks, of which every other one halves, sum, linear."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        sizes = [width, width, width, 2 * width, 2 * width, 2 * width, 2 * width]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        pairs = enumerate(zip(sizes, sizes[1:], strict=False))
        self.blocks = nn.Sequential(*(IGEBMBlock(a, b, number % 2 == 0) for number, (a, b) in pairs))
        self.head = nn.Linear(sizes[-1], 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Energies [N, 1] of images [N, 3, 32, 32]."""
        return self.head(self.blocks(F.leaky_relu(self.stem(x), 0.2)).sum((2, 3)))


class Equalized(nn.Conv2d):
    """A convolution whose weights are scaled by what their number asks for as they are used."""

    def __init__(self, channels: int, out: int, kernel: int, bias: bool = True) -> None:
        super().__init__(channels, out, kernel, padding=kernel // 2, bias=bias)
        nn.init.normal_(self.weight)
        self.gain = math.sqrt(2 / (channels * kernel * kernel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, out, H, W] of [N, channels, H, W]."""
        return F.conv2d(x, self.weight * self.gain, self.bias, padding=self.padding)


class StyleGANBlock(nn.Module):
    """Conv3, LeakyReLU, blur, Conv3 without bias, average, bias, LeakyReLU."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = Equalized(channels, channels, 3), Equalized(channels, out, 3, bias=False)
        self.bias = nn.Parameter(torch.zeros(out))
        taps = torch.tensor([1.0, 2.0, 1.0])
        self.register_buffer("blur", (taps[:, None] * taps / 16).expand(channels, 1, 3, 3).clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, out, H/2, W/2] of [N, channels, H, W]."""
        x = F.leaky_relu(self.conv1(x), 0.2)
        x = self.conv2(F.conv2d(x, self.blur, padding=1, groups=x.shape[1]))
        return F.leaky_relu(F.avg_pool2d(x, 2) + self.bias.view(1, -1, 1, 1), 0.2)


class StyleGAN(nn.Module):
    """StyleGAN's discriminator: from RGB, halving blocks down to 4x4, the deviation over groups of 4 samples, Conv3, linear."""

    def __init__(self, size: int = 64, width: int = 64, max_width: int = 512) -> None:
        super().__init__()
        count = int(math.log2(size)) - 2
        sizes = [min(width * 2**number, max_width) for number in range(count + 1)]
        self.stem = Equalized(3, width, 1)
        self.blocks = nn.Sequential(*(StyleGANBlock(a, b) for a, b in zip(sizes, sizes[1:], strict=False)))
        self.last, self.head = Equalized(sizes[-1] + 1, sizes[-1], 3), nn.Linear(16 * sizes[-1], 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [N, 1] of images [N, 3, size, size]; N is a multiple of 4."""
        h = self.blocks(F.leaky_relu(self.stem(x), 0.2))
        groups = h.view(4, -1, *h.shape[1:])
        # Not 1e-8, which float16 takes for zero: the derivative there is infinite.
        deviation = (groups.var(0, unbiased=False) + 1e-6).sqrt().mean((1, 2, 3), keepdim=True)
        h = torch.cat([h, deviation.repeat(4, 1, h.shape[2], h.shape[3])], 1)
        return self.head(F.leaky_relu(self.last(h), 0.2).flatten(1))


class StabilityBlock(nn.Module):
    """x + 0.1 (Conv3, LeakyReLU) twice, each LeakyReLU in front."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        hidden = min(channels, out)
        self.conv1, self.conv2 = nn.Conv2d(channels, hidden, 3, padding=1), nn.Conv2d(hidden, out, 3, padding=1)
        self.skip = nn.Conv2d(channels, out, 1, bias=False) if channels != out else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, out, H, W] of [N, channels, H, W]."""
        h = self.conv2(F.leaky_relu(self.conv1(F.leaky_relu(x, 0.2)), 0.2))
        return self.skip(x) + 0.1 * h


class Stability(nn.Module):
    """GAN stability's discriminator: blocks, each behind an average over 3x3 with padding and stride 2."""

    def __init__(self, size: int = 32, width: int = 64) -> None:
        super().__init__()
        count = int(math.log2(size)) - 2
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), StabilityBlock(width, width)]
        for number in range(count):
            layers += [nn.AvgPool2d(3, 2, 1), StabilityBlock(width * 2**number, width * 2 ** (number + 1))]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(16 * width * 2**count, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [N, 1] of images [N, 3, size, size]."""
        return self.head(F.leaky_relu(self.layers(x), 0.2).flatten(1))


class VideoBlock(nn.Module):
    """ReLU, Conv3, ReLU, Conv3, pool; shortcut Conv1, pool; Add; over time, height and width, or over the last two of them."""

    def __init__(self, channels: int, out: int, window: tuple[int, int, int] = (2, 2, 2)) -> None:
        super().__init__()
        self.conv1, self.conv2 = (spectral_norm(nn.Conv3d(c, out, 3, padding=1)) for c in (channels, out))
        self.shortcut, self.pool = spectral_norm(nn.Conv3d(channels, out, 1)), nn.AvgPool3d(window)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, out, T/2, H/2, W/2] of [N, channels, T, H, W]."""
        h = self.conv2(F.relu(self.conv1(F.relu(x))))
        return self.pool(h) + self.pool(self.shortcut(x))


class DVDGAN(nn.Module):
    """DVD-GAN's temporal discriminator in short: two blocks in 3-D, then frames by themselves, sums over them."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.Sequential(VideoBlock(3, width), VideoBlock(width, 2 * width, (1, 2, 2)))
        self.frames = nn.Sequential(*(Block(width * n, width * n, 2 * width * n, wrap=spectral_norm) for n in (2, 4)))
        self.head = spectral_norm(nn.Linear(8 * width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [N, 1] of videos [N, 3, T, H, W]."""
        h = self.blocks(x).transpose(1, 2)
        n, t = h.shape[0], h.shape[1]
        h = F.relu(self.frames(h.flatten(0, 1))).sum((2, 3))
        return self.head(h.view(n, t, -1).sum(1))


class DenseLayer(nn.Module):
    """BatchNorm, ReLU, Conv1 to 4k channels, BatchNorm, ReLU, Conv3 to k channels, behind all that came before."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, channels + k, H, W] of [N, channels, H, W]."""
        h = self.conv1(self.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(self.relu(self.norm2(h)))], 1)


class DenseNet(nn.Module):
    """DenseNet-BC for ImageNet; the layers of each block make DenseNet-121."""

    def __init__(self, growth: int = 32, layers: Sequence[int] = (6, 12, 24, 16), classes: int = 1000) -> None:
        super().__init__()
        channels = 2 * growth
        stem = [nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        parts: list[nn.Module] = [*stem, nn.MaxPool2d(3, 2, 1)]
        for number, count in enumerate(layers):
            parts += [DenseLayer(channels + growth * i, growth) for i in range(count)]
            channels += growth * count
            parts += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
            if number < len(layers) - 1:
                parts += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
                channels //= 2
        self.features, self.head = nn.Sequential(*parts), nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [N, classes] of images [N, 3, H, W], whose sizes are multiples of 32."""
        return self.head(self.features(x).mean((2, 3)))


class Subsampling(nn.Module):
    """LeNet-5's S layers: an average over 2x2, times a coefficient, plus a bias, for each map."""

    def __init__(self, maps: int) -> None:
        super().__init__()
        self.coefficient, self.bias = nn.Parameter(torch.ones(maps, 1, 1)), nn.Parameter(torch.zeros(maps, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, maps, H/2, W/2] of [N, maps, H, W]."""
        return F.avg_pool2d(x, 2) * self.coefficient + self.bias


class LeNet5(nn.Module):
    """LeNet-5 in its first form: the average directly behind each convolution, then the squashing function."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.c1, self.s2 = nn.Conv2d(1, 6, 5), Subsampling(6)
        self.c3, self.s4 = nn.Conv2d(6, 16, 5), Subsampling(16)
        self.c5, self.f6, self.output = nn.Conv2d(16, 120, 5), nn.Linear(120, 84), nn.Linear(84, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [N, classes] of images [N, 1, 32, 32]."""
        h = torch.tanh(self.s2(self.c1(x)))
        h = torch.tanh(self.s4(self.c3(h)))
        return self.output(torch.tanh(self.f6(torch.tanh(self.c5(h)).flatten(1))))
