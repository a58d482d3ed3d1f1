# SPDX-License-Identifier: Apache-2.0
"""Generators and decoders as PyTorch modules, written from the papers: each enlarges its maps by nearest upsampling.

- SNGAN: Miyato, Kataoka, Koyama, Yoshida, "Spectral Normalization for Generative Adversarial Networks", ICLR 2018.
- BigGAN: Brock, Donahue, Simonyan, "Large Scale GAN Training for High Fidelity Natural Image Synthesis", ICLR 2019.
- VAE: the decoder of Esser, Rombach, Ommer, "Taming Transformers for High-Resolution Image Synthesis", CVPR 2021.
- U-Net: Ronneberger, Fischer, Brox, "U-Net: Convolutional Networks for Biomedical Image Segmentation", MICCAI 2015.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from models.torch_networks import Attention


class ClassNorm(nn.Module):
    """BatchNorm whose gains and biases come from a vector of the sample's."""

    def __init__(self, channels: int, given: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, affine=False)
        self.gain, self.bias = (spectral_norm(nn.Linear(given, channels, bias=False)) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """[N, C, H, W] of x of that shape and the vectors y [N, given]."""
        return self.norm(x) * (1 + self.gain(y))[:, :, None, None] + self.bias(y)[:, :, None, None]


class UpBlock(nn.Module):
    """Pre-activation residual block: norm, ReLU, upsampling, Conv3, norm, ReLU, Conv3; shortcut upsampling, Conv1; Add.

    given: the length of the vectors of class-conditional norms, 0 for plain ones."""

    def __init__(self, channels: int, out: int, given: int = 0) -> None:
        super().__init__()
        wrap: Callable = spectral_norm if given else lambda module: module
        self.given = given
        self.norm1, self.norm2 = (ClassNorm(c, given) if given else nn.BatchNorm2d(c) for c in (channels, out))
        self.up = nn.Upsample(scale_factor=2)
        self.conv1, self.conv2 = (wrap(nn.Conv2d(c, out, 3, padding=1)) for c in (channels, out))
        self.shortcut = wrap(nn.Conv2d(channels, out, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """[N, out, 2 H, 2 W] of [N, channels, H, W]."""
        own = (y,) if self.given else ()
        h = self.conv1(self.up(F.relu(self.norm1(x, *own))))
        return self.conv2(F.relu(self.norm2(h, *own))) + self.shortcut(self.up(x))


class SNGANGenerator(nn.Module):
    """Linear to 4x4, a block for each doubling, BatchNorm, ReLU, Conv3, Tanh.  sizes: channels, from 4x4 on."""

    def __init__(self, sizes: Sequence[int] = (1024, 512, 256, 128, 64), noise: int = 128) -> None:
        super().__init__()
        self.first = nn.Linear(noise, 16 * sizes[0])
        self.blocks = nn.Sequential(*(UpBlock(a, b) for a, b in zip(sizes, sizes[1:], strict=False)))
        self.last = nn.Sequential(nn.BatchNorm2d(sizes[-1]), nn.ReLU(), nn.Conv2d(sizes[-1], 3, 3, padding=1), nn.Tanh())

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Images [N, 3, H, W] of noise [N, noise]."""
        return self.last(self.blocks(self.first(z).view(len(z), -1, 4, 4)))


class BigGANGenerator(nn.Module):
    """BigGAN's generator for 128x128 images: each block has a part of the noise and the class's vector; attention at 64x64."""

    def __init__(
        self, width: int = 96, factors: Sequence[int] = (16, 16, 8, 4, 2, 1), part: int = 20, classes: int = 1000
    ) -> None:
        super().__init__()
        sizes, self.part, shared = [width * factor for factor in factors], part, 128
        self.classes = nn.Embedding(classes, shared)
        self.first = spectral_norm(nn.Linear(part, 16 * sizes[0]))
        self.blocks = nn.ModuleList(UpBlock(a, b, part + shared) for a, b in zip(sizes, sizes[1:], strict=False))
        self.attention = Attention(sizes[-2])
        self.norm, self.last = nn.BatchNorm2d(sizes[-1]), spectral_norm(nn.Conv2d(sizes[-1], 3, 3, padding=1))

    def forward(self, z: torch.Tensor, label: torch.Tensor | None = None) -> torch.Tensor:
        """Images [N, 3, H, W] of noise [N, part x (blocks + 1)] and labels [N], class 0 without."""
        parts = z.split(self.part, 1)
        y = self.classes(torch.zeros(len(z), dtype=torch.long, device=z.device) if label is None else label)
        h = self.first(parts[0]).view(len(z), -1, 4, 4)
        for number, (block, own) in enumerate(zip(self.blocks, parts[1:], strict=True), 1):
            h = block(h, torch.cat([y, own], 1))
            h = self.attention(h) if number == len(self.blocks) - 1 else h
        return torch.tanh(self.last(F.relu(self.norm(h))))


class Decoder(nn.Module):
    """A VAE's decoder: Conv3, then GroupNorm, SiLU, Conv3, upsampling and Conv3 for each size, GroupNorm, SiLU, Conv3."""

    def __init__(self, sizes: Sequence[int] = (512, 256, 128), latent: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(latent, sizes[0], 3, padding=1)
        layers: list[nn.Module] = []
        for a, b in zip(sizes, sizes[1:], strict=False):
            layers += [nn.GroupNorm(4, a), nn.SiLU(), nn.Conv2d(a, a, 3, padding=1)]
            layers += [nn.Upsample(scale_factor=2.0, mode="nearest"), nn.Conv2d(a, b, 3, padding=1)]
        self.rest = nn.Sequential(*layers, nn.GroupNorm(4, sizes[-1]), nn.SiLU(), nn.Conv2d(sizes[-1], 3, 3, padding=1))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Images of latent maps [N, latent, H, W]."""
        return self.rest(self.first(z))


class UNet(nn.Module):
    """Conv3 and MaxPool down; up by nearest upsampling, Conv3 and the sum with the map of that size."""

    def __init__(self, sizes: Sequence[int] = (64, 128, 256)) -> None:
        super().__init__()
        pairs = list(zip(sizes, sizes[1:], strict=False))
        self.first = nn.Conv2d(3, sizes[0], 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairs)
        self.up = nn.ModuleList(nn.Conv2d(b, a, 3, padding=1) for a, b in reversed(pairs))
        self.last = nn.Conv2d(sizes[0], 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, 2, H, W] of images [N, 3, H, W]."""
        skips, h = [], F.relu(self.first(x))
        for conv in self.down:
            skips.append(h)
            h = F.relu(conv(F.max_pool2d(h, 2)))
        for conv, skip in zip(self.up, reversed(skips), strict=True):
            h = F.relu(conv(F.interpolate(h, size=skip.shape[2:])) + skip)
        return self.last(h)
