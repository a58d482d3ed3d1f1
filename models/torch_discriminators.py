# SPDX-License-Identifier: Apache-2.0
"""Discriminators and critics as PyTorch modules, written from the papers, with weights drawn at random.

- SNGAN: Miyato, Kataoka, Koyama, Yoshida, "Spectral Normalization for Generative Adversarial Networks", ICLR 2018; the ResNets
  for 64x64 (as torch-mimicry has it) and 128x128 images.
- WGAN-GP: Gulrajani, Ahmed, Arjovsky, Dumoulin, Courville, "Improved Training of Wasserstein GANs", NeurIPS 2017; the ResNet
  critics for 32x32 and 64x64 images.
- StarGAN v2: Choi, Uh, Yoo, Ha, "StarGAN v2: Diverse Image Synthesis for Multiple Domains", CVPR 2020.

The losses are those that the papers train them with.  SNGAN's projection of labels, which reads the pooled features only, is left
out.  `models.discriminators` has the same networks as ONNX models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm as _spectral_norm

Wrap = Callable[[nn.Module], nn.Module]


def _plain(module: nn.Module) -> nn.Module:
    return module


class FirstBlock(nn.Module):
    """The block that reads the image: Conv3, ReLU, Conv3, pool; its shortcut pools first, then Conv1."""

    def __init__(self, out: int, wrap: Wrap = _plain) -> None:
        super().__init__()
        self.conv1 = wrap(nn.Conv2d(3, out, 3, padding=1))
        self.conv2 = wrap(nn.Conv2d(out, out, 3, padding=1))
        self.shortcut = wrap(nn.Conv2d(3, out, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, out, H/2, W/2] of an image [N, 3, H, W]."""
        h = F.avg_pool2d(self.conv2(F.relu(self.conv1(x))), 2)
        return h + self.shortcut(F.avg_pool2d(x, 2))


class Block(nn.Module):
    """Pre-activation residual block: ReLU, Conv3, ReLU, Conv3, pool; shortcut Conv1, pool; Add.

    down: whether it pools.  norm: a normalisation of so many channels in front of each ReLU, or None.
    """

    def __init__(
        self,
        channels: int,
        hidden: int,
        out: int,
        *,
        down: bool = True,
        wrap: Wrap = _plain,
        norm: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.down = down
        self.norm1 = norm(channels) if norm else nn.Identity()
        self.conv1 = wrap(nn.Conv2d(channels, hidden, 3, padding=1))
        self.norm2 = norm(hidden) if norm else nn.Identity()
        self.conv2 = wrap(nn.Conv2d(hidden, out, 3, padding=1))
        self.shortcut = wrap(nn.Conv2d(channels, out, 1)) if down or channels != out else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, out, H, W] of [N, channels, H, W], of half the height and width where it pools."""
        h = self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
        shortcut = self.shortcut(x)
        if self.down:
            return F.avg_pool2d(h, 2) + F.avg_pool2d(shortcut, 2)
        return h + shortcut


class SNGAN(nn.Module):
    """SNGAN's ResNet discriminator: halving blocks of width x factors channels, the last one plain if `last_plain`; sum; linear.

    Spectral normalisation is PyTorch's parametrization, unless `spectral_norm` is False.
    """

    def __init__(
        self,
        width: int = 64,
        factors: Sequence[int] = (1, 2, 4, 8, 16),
        *,
        last_plain: bool = False,
        spectral_norm: bool = True,
    ) -> None:
        super().__init__()
        wrap = _spectral_norm if spectral_norm else _plain
        blocks: list[nn.Module] = [FirstBlock(width * factors[0], wrap)]
        for before, factor in zip(factors, factors[1:], strict=False):
            down = not (last_plain and len(blocks) == len(factors) - 1)
            hidden = width * (before if down else factor)
            blocks.append(Block(width * before, hidden, width * factor, down=down, wrap=wrap))
        self.blocks = nn.Sequential(*blocks)
        self.head = wrap(nn.Linear(width * factors[-1], 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [N, 1] of images [N, 3, H, W]."""
        return self.head(F.relu(self.blocks(x)).sum((2, 3)))


def sngan64(**options) -> SNGAN:
    """For 64x64 images: 64 to 1024 channels."""
    return SNGAN(64, (1, 2, 4, 8, 16), **options)


def sngan128(**options) -> SNGAN:
    """For 128x128 images: 64 to 1024 channels, and a plain block."""
    return SNGAN(64, (1, 2, 4, 8, 16, 16), last_plain=True, **options)


class LayerNorm(nn.GroupNorm):
    """Normalisation over all but the batch, scaled and shifted by channel: the layer normalisation of WGAN-GP's code."""

    def __init__(self, channels: int) -> None:
        super().__init__(1, channels)


class WGANGP32(nn.Module):
    """WGAN-GP's critic for 32x32 images: two halving blocks, two plain ones, mean, linear."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        blocks = [Block(width, width, width, down=down) for down in (True, False, False)]
        self.blocks = nn.Sequential(FirstBlock(width), *blocks)
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [N, 1] of images [N, 3, 32, 32]."""
        return self.head(F.relu(self.blocks(x)).mean((2, 3)))


class WGANGP64(nn.Module):
    """WGAN-GP's ResNet critic for 64x64 images: Conv3, four halving blocks, linear.

    layer_norm: whether the blocks normalise, as the authors' code does.
    """

    def __init__(self, width: int = 64, *, layer_norm: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        sizes = [width, 2 * width, 4 * width, 8 * width, 8 * width]
        norm = LayerNorm if layer_norm else None
        self.blocks = nn.Sequential(*(Block(a, a, b, norm=norm) for a, b in zip(sizes, sizes[1:], strict=False)))
        self.head = nn.Linear(4 * 4 * 8 * width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [N, 1] of images [N, 3, 64, 64]."""
        return self.head(self.blocks(self.stem(x)).flatten(1))


class StarGANBlock(nn.Module):
    """LeakyReLU, Conv3, pool, LeakyReLU, Conv3; shortcut Conv1 (where the channels change), pool; (a + b) / sqrt 2."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, out, 3, padding=1)
        self.shortcut = nn.Conv2d(channels, out, 1, bias=False) if channels != out else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, out, H/2, W/2] of [N, channels, H, W]."""
        shortcut = F.avg_pool2d(self.shortcut(x), 2)
        h = F.avg_pool2d(self.conv1(F.leaky_relu(x, 0.2)), 2)
        return (shortcut + self.conv2(F.leaky_relu(h, 0.2))) / math.sqrt(2)


class StarGANv2(nn.Module):
    """StarGAN v2's discriminator: one score for each domain.  size: of the images, a power of two from 16 on."""

    def __init__(self, size: int = 256, *, width: int | None = None, max_width: int = 512, domains: int = 2) -> None:
        super().__init__()
        channels = width or 2**14 // size
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
        for _ in range(int(math.log2(size)) - 2):
            out = min(2 * channels, max_width)
            layers.append(StarGANBlock(channels, out))
            channels = out
        layers += [nn.LeakyReLU(0.2), nn.Conv2d(channels, channels, 4), nn.LeakyReLU(0.2), nn.Conv2d(channels, domains, 1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [N, domains] of images [N, 3, size, size]."""
        return self.layers(x).flatten(1)


def hinge_loss(scores: torch.Tensor, real: bool = True) -> torch.Tensor:
    """SNGAN's loss of a discriminator on real or generated images."""
    return F.relu(1 - scores if real else 1 + scores).mean()


def logistic_loss(scores: torch.Tensor) -> torch.Tensor:
    """StarGAN v2's loss of real images, for the first domain."""
    return F.softplus(-scores[:, 0]).mean()


def r1_penalty(scores: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """Half the squared norm of the gradient at real images (Mescheder, Geiger, Nowozin, ICML 2018)."""
    (grad,) = torch.autograd.grad(scores[:, 0].sum(), images, create_graph=True)
    return 0.5 * grad.float().square().flatten(1).sum(1).mean()


def gradient_penalty(critic: nn.Module, real: torch.Tensor, fake: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """WGAN-GP's penalty between real and generated images; mix [N, 1, 1, 1] from 0 to 1 says where."""
    between = (real + mix * (fake - real)).detach().requires_grad_()
    (grad,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (grad.float().flatten(1).norm(dim=1) - 1).square().mean()
