# SPDX-License-Identifier: Apache-2.0
"""Real networks, as small as they can be.  Importing it skips a module where there is no PyTorch."""

import copy
from collections.abc import Callable
from typing import NamedTuple

from tests.support.torch import require_cuda, require_torch

torch = require_torch()

from models import torch_discriminators as gans  # noqa: E402
from models import torch_generators as generators  # noqa: E402
from models import torch_networks as more  # noqa: E402


class Network(NamedTuple):
    """make: the module; shape: of its input; pairs: convolutions that are rewritten in training; trained: largest images."""

    make: Callable
    shape: tuple[int, ...]
    pairs: int
    trained: int = 64


NETWORKS = {
    "SNGAN 32x32": Network(lambda: gans.SNGAN(8, (1, 1, 1), last_plain=True), (2, 3, 32, 32), 3),
    "SNGAN 64x64": Network(lambda: gans.SNGAN(8, (1, 2, 4, 8, 16)), (2, 3, 64, 64), 9, 32),
    "SNGAN 128x128": Network(lambda: gans.SNGAN(8, (1, 2, 4, 8, 8, 8), last_plain=True), (1, 3, 128, 128), 9, 32),
    "projection 64x64": Network(lambda: more.Projection(8, (1, 2, 4, 8)), (2, 3, 64, 64), 7, 32),
    "WGAN-GP 32x32": Network(lambda: gans.WGANGP32(16), (4, 3, 32, 32), 3),
    "WGAN-GP 64x64": Network(lambda: gans.WGANGP64(8, layer_norm=True), (2, 3, 64, 64), 8),
    "StarGAN v2 64x64": Network(lambda: gans.StarGANv2(64, width=8, max_width=32), (2, 3, 64, 64), 6),
    "BigGAN 64x64": Network(lambda: more.BigGAN(8, (1, 2, 4, 8, 8)), (2, 3, 64, 64), 7, 32),
    "IGEBM 32x32": Network(lambda: more.IGEBM(16), (4, 3, 32, 32), 4),
    "StyleGAN 64x64": Network(lambda: more.StyleGAN(64, 8), (4, 3, 64, 64), 4),
    "GAN stability 32x32": Network(lambda: more.Stability(32, 8), (4, 3, 32, 32), 0),
    "DVD-GAN": Network(lambda: more.DVDGAN(8), (2, 3, 4, 16, 16), 8),
    "LeNet-5": Network(lambda: more.LeNet5(), (4, 1, 32, 32), 2),
    "DenseNet-121": Network(lambda: more.DenseNet(growth=16, classes=10), (2, 3, 32, 32), 3),
    "SNGAN generator": Network(lambda: generators.SNGANGenerator((16, 12, 8, 8), 16), (3, 16), 6),
    "BigGAN generator": Network(lambda: generators.BigGANGenerator(8, (4, 4, 2, 1), 6, 10), (3, 24), 6),
    "VAE decoder": Network(lambda: generators.Decoder((16, 12, 8)), (2, 4, 8, 8), 2),
    "U-Net": Network(lambda: generators.UNet((8, 12, 16)), (2, 3, 16, 16), 2),
    "DenseNet of short blocks": Network(lambda: more.DenseNet(8, (2, 3, 4, 2), 10), (8, 3, 64, 64), 3),
}


def made(name, device="cpu", dtype=torch.float32):
    """The module in training mode, and an input; the same at each call."""
    if device == "cuda":
        require_cuda()
    torch.manual_seed(17)
    network = NETWORKS[name]
    return network.make().train().to(device, dtype), torch.randn(network.shape).to(device, dtype)


def channels_last(module, x):
    """Both as copies in another order in memory, so that PyTorch's convolutions sum in another order."""
    layouts, module = {4: torch.channels_last, 5: torch.channels_last_3d}, copy.deepcopy(module)
    for parameter in module.parameters():
        if parameter.dim() in layouts:
            parameter.data = parameter.data.contiguous(memory_format=layouts[parameter.dim()])
    return module, x.contiguous(memory_format=layouts.get(x.dim(), torch.contiguous_format))
