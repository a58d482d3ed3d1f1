# SPDX-License-Identifier: Apache-2.0
"""Networks that enlarge maps in front of convolutions: decoders, generators, U-Nets, heads, necks.

Sizes and channels default to small ones; arguments give those of the papers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from models.builder import Net

PAPER_SIZES: dict[str, dict[str, object]] = {
    "sngan_generator": {"width": 64},
    "biggan_generator": {"width": 96, "factors": (16, 16, 8, 4, 2, 1)},
    "stargan_v2_generator": {"widths": (512, 512, 256, 128, 64)},
    "unet_nearest": {"size": 512, "widths": (64, 128, 256, 512)},
    "vae_decoder": {"size": 64, "widths": (512, 512, 256, 128), "blocks": 3, "groups": 32},
}
"""Arguments of `models.generators.generate`, by name, that make a network as large as in its paper: images of 64, 128, 256, 512,
512."""
UPSAMPLED_LAYERS = {
    "SD VAE decoder, 512": (1, 512, 512, 64, 64),
    "SD VAE decoder, 1024": (1, 512, 512, 128, 128),
    "SD VAE decoder, last": (1, 256, 256, 256, 256),
    "SDXL UNet, 32": (2, 1280, 1280, 32, 32),
    "SDXL UNet, 64": (2, 640, 640, 64, 64),
    "SNGAN generator, 16": (64, 256, 256, 16, 16),
    "SNGAN generator, 4": (64, 1024, 512, 4, 4),
    "SNGAN generator, 32": (64, 128, 64, 32, 32),
    "BigGAN generator, 32": (32, 384, 192, 32, 32),
    "BigGAN generator, 4": (32, 1536, 1536, 4, 4),
    "Real-ESRGAN": (1, 64, 64, 256, 256),
    "U-Net, 16": (8, 512, 256, 16, 16),
    "U-Net, 32": (8, 256, 128, 32, 32),
    "style transfer, 1080p": (1, 128, 64, 270, 480),
    "VQ decoder": (1, 512, 512, 32, 32),
}
"""Layers of decoders, generators and U-Nets, 3x3 behind an upsampling by 2: n, c, m, height and width of the small map."""


def vae_decoder(net: Net, *, size=16, widths: Sequence[int] = (64, 64, 32, 32), blocks=1, latent=4, groups=8) -> None:
    """The decoder of Stable Diffusion's autoencoder (Rombach et al., CVPR 2022), without its attention.

    Input [N, latent, size, size]; `widths` from the smallest map on, each but the last followed by upsampling and Conv3.
    """
    x = net.conv(net.input("latent", latent, size, size), "in", widths[0], 3, gain=1.0)
    for level, width in enumerate(widths):
        for block in range(blocks):
            x = _resnet_block(net, x, f"up{level}/block{block}", width, groups)
        if level < len(widths) - 1:
            x = net.conv(net.upsample(x, f"up{level}/upsample"), f"up{level}/conv", width, 3, gain=1.0)
    x = _silu(net, _group_norm(net, x, "out/norm", groups), "out/silu")
    net.output(net.conv(x, "out/conv", 3, 3, gain=1.0), "image")


def _silu(net: Net, x, name: str):
    return net.op("Mul", name, [x, net.act(x, f"{name}/sigmoid", "Sigmoid")], x.shape)


def _group_norm(net: Net, x, name: str, groups: int):
    """GroupNormalization as exporters write it: Reshape, InstanceNormalization, Reshape, Mul, Add."""
    ones = [net.constant(f"{name}.{key}", np.full(groups, value)) for key, value in (("ones", 1.0), ("zeros", 0.0))]
    flat = net.reshape(x, f"{name}/groups", groups, -1)
    flat = net.op("InstanceNormalization", f"{name}/norm", [flat, *ones], flat.shape, epsilon=1e-6)
    y = net.reshape(flat, f"{name}/back", *x.shape[1:])
    return _per_channel(net, y, name)


def _per_channel(net: Net, x, name: str):
    column = (x.shape[1], *[1] * (len(x.shape) - 2))
    y = net.op("Mul", f"{name}/mul", [x, net.uniform(f"{name}.scale", column, 0.7, 1.3)], x.shape)
    return net.op("Add", f"{name}/add", [y, net.uniform(f"{name}.shift", column, -0.3, 0.3)], x.shape)


def _resnet_block(net: Net, x, name: str, width: int, groups: int):
    h = _silu(net, _group_norm(net, x, f"{name}/norm1", groups), f"{name}/silu1")
    h = net.conv(h, f"{name}/conv1", width, 3)
    h = _silu(net, _group_norm(net, h, f"{name}/norm2", groups), f"{name}/silu2")
    h = net.conv(h, f"{name}/conv2", width, 3, gain=1.0)
    skip = x if width == x.shape[1] else net.conv(x, f"{name}/skip", width, 1, gain=1.0)
    return net.add(h, skip, f"{name}/sum")


def sngan_generator(net: Net, *, width=32, factors: Sequence[int] = (16, 8, 4, 2, 1), latent=128, conditional=False) -> None:
    """SNGAN's generator (Miyato et al., ICLR 2018), blocks that double the map; `conditional`: as BigGAN's, from the latent.

    Input [N, latent]; `factors`: channels over `width` of the first map, 4x4, and behind each block.
    """
    z = net.input("z", latent)
    x = net.reshape(net.linear(z, "in", 16 * width * factors[0]), "in/map", width * factors[0], 4, 4)
    for number, factor in enumerate(factors[1:]):
        x = _generator_block(net, x, f"block{number}", width * factor, z if conditional else None)
    x = net.act(net.batch_norm(x, "out/norm"), "out/relu")
    net.output(net.act(net.conv(x, "out/conv", 3, 3, gain=1.0), "out/tanh", "Tanh"), "image")


def _conditional_norm(net: Net, x, name: str, z):
    """BatchNormalization, and scale and shift that a Gemm computes."""
    h = net.batch_norm(x, name)
    if z is None:
        return h
    scale, shift = (net.linear(z, f"{name}/{key}", x.shape[1], gain=0.1) for key in ("scale", "shift"))
    scale, shift = (net.reshape(y, f"{y.name}_column", x.shape[1], 1, 1) for y in (scale, shift))
    gain = net.op("Add", f"{name}/gain", [scale, net.scalar(f"{name}.one", 1.0)], scale.shape)
    h = net.op("Mul", f"{name}/mul", [h, gain], h.shape)
    return net.op("Add", f"{name}/add", [h, shift], h.shape)


def _generator_block(net: Net, x, name: str, width: int, z):
    h = net.act(_conditional_norm(net, x, f"{name}/norm1", z), f"{name}/relu1")
    h = net.conv(net.upsample(h, f"{name}/upsample"), f"{name}/conv1", width, 3)
    h = net.act(_conditional_norm(net, h, f"{name}/norm2", z), f"{name}/relu2")
    h = net.conv(h, f"{name}/conv2", width, 3, gain=1.0)
    skip = net.conv(net.upsample(x, f"{name}/skip_upsample"), f"{name}/skip", width, 1, gain=1.0)
    return net.add(h, skip, f"{name}/sum")


def stargan_generator(net: Net, *, size=16, widths: Sequence[int] = (64, 64, 32, 16), style=64) -> None:
    """The upsampling half of StarGAN v2's generator (Choi et al., CVPR 2020): AdaIN from a style.

    Inputs [N, widths[0], size, size] and [N, style]; each block doubles the map.
    """
    x, s = net.input("x", widths[0], size, size), net.input("style", style)
    for number, width in enumerate(widths[1:]):
        name = f"block{number}"
        h = net.act(_adain(net, x, f"{name}/norm1", s), f"{name}/act1", "LeakyRelu", alpha=0.2)
        h = net.conv(net.upsample(h, f"{name}/upsample"), f"{name}/conv1", width, 3)
        h = net.act(_adain(net, h, f"{name}/norm2", s), f"{name}/act2", "LeakyRelu", alpha=0.2)
        h = net.conv(h, f"{name}/conv2", width, 3, gain=1.0)
        up = net.upsample(x, f"{name}/skip_upsample")
        skip = up if width == x.shape[1] else net.conv(up, f"{name}/skip", width, 1, bias=False, gain=1.0)
        total = net.add(h, skip, f"{name}/sum")
        x = net.op("Div", f"{name}/div", [total, net.scalar(f"{name}.sqrt2", math.sqrt(2.0))], total.shape)
    x = net.act(net.instance_norm(x, "out/norm"), "out/act", "LeakyRelu", alpha=0.2)
    net.output(net.conv(x, "out/conv", 3, 1, gain=1.0), "image")


def _adain(net: Net, x, name: str, style):
    column = net.reshape(net.linear(style, f"{name}/scale", x.shape[1]), f"{name}/scale_column", x.shape[1], 1, 1)
    h = net.op("Mul", f"{name}/mul", [net.instance_norm(x, name), column], x.shape)
    shift = net.reshape(net.linear(style, f"{name}/shift", x.shape[1]), f"{name}/shift_column", x.shape[1], 1, 1)
    return net.op("Add", f"{name}/add", [h, shift], x.shape)


def unet(net: Net, *, size=32, widths: Sequence[int] = (16, 32, 64, 128), classes=2, rank=2, groups=0) -> None:
    """A U-Net that upsamples by nearest neighbours: Concat with the skip in front of the first Conv of each level.

    Input [N, 3, size...]; `groups`: GroupNormalization with so many in place of BatchNormalization, as UNet3D has it.
    """
    skips, x = [], net.input("image", 3, *[size] * rank)
    for level, width in enumerate(widths):
        if level:
            x = net.pool(x, f"down{level}/pool", kind="MaxPool")
        x = _double_conv(net, x, f"down{level}", width, groups)
        skips.append(x)
    for level in range(len(widths) - 2, -1, -1):
        x = net.concat([net.upsample(x, f"up{level}/upsample"), skips[level]], f"up{level}/concat")
        x = _double_conv(net, x, f"up{level}", widths[level], groups)
    net.output(net.conv(x, "head", classes, 1, gain=1.0), "logits")


def _double_conv(net: Net, x, name: str, width: int, groups: int):
    for number in (1, 2):
        x = net.conv(x, f"{name}/conv{number}", width, 3, bias=False)
        norm = _group_norm(net, x, f"{name}/norm{number}", groups) if groups else net.batch_norm(x, f"{name}/norm{number}")
        x = net.act(norm, f"{name}/relu{number}")
    return x


def segformer_head(net: Net, *, size=32, widths: Sequence[int] = (32, 64, 160, 256), width=256, classes=150) -> None:
    """SegFormer's head (Xie et al., NeurIPS 2021): maps of a quarter to a 32nd, projected, resized, joined, mixed.

    Inputs [N, widths[i], size / 2^i, size / 2^i].
    """
    maps = []
    for level, channels in enumerate(widths):
        x = net.conv(net.input(f"map{level}", channels, *[size >> level] * 2), f"project{level}", width, 1, gain=1.0)
        maps.append(net.upsample(x, f"resize{level}", 1 << level, mode="linear") if level else x)
    x = net.concat(maps[::-1], "concat")
    x = net.act(net.batch_norm(net.conv(x, "fuse", width, 1, bias=False), "norm"), "relu")
    net.output(net.conv(x, "classifier", classes, 1, gain=1.0), "logits")


def hrnet_head(net: Net, *, size=32, widths: Sequence[int] = (18, 36, 72, 144), classes=19) -> None:
    """HRNetV2's head (Wang et al., TPAMI 2020): maps of four sizes resized to the largest, joined, two 1x1 convolutions.

    Inputs [N, widths[i], size / 2^i, size / 2^i].
    """
    maps = [net.input(f"map{level}", channels, *[size >> level] * 2) for level, channels in enumerate(widths)]
    maps = [net.upsample(x, f"resize{level}", 1 << level, mode="linear") if level else x for level, x in enumerate(maps)]
    x = net.concat(maps, "concat")
    x = net.act(net.batch_norm(net.conv(x, "conv1", x.shape[1], 1), "norm"), "relu")
    net.output(net.conv(x, "conv2", classes, 1, gain=1.0), "logits")


def yolo_neck(net: Net, *, size=8, widths: Sequence[int] = (64, 32, 16)) -> None:
    """The top-down path of a YOLO neck: upsampling, Concat with a larger map, Conv1 with BatchNormalization and SiLU.

    Inputs from the smallest map on: [N, 2 * widths[i], size * 2^i, size * 2^i].
    """
    x = None
    for level, width in enumerate(widths):
        skip = net.input(f"map{level}", 2 * width, *[size << level] * 2)
        x = skip if x is None else net.concat([net.upsample(x, f"upsample{level}"), skip], f"concat{level}")
        for number, kernel in ((1, 1), (2, 3)):
            h = net.batch_norm(net.conv(x, f"conv{level}_{number}", width, kernel, bias=False), f"norm{level}_{number}")
            x = _silu(net, h, f"silu{level}_{number}")
        net.output(net.conv(x, f"head{level}", 8, 1, gain=1.0), f"boxes{level}")


def esrgan_tail(net: Net, *, size=16, width=64) -> None:
    """The layers behind the trunk of Real-ESRGAN (Wang et al., ICCVW 2021). Input [N, width, size, size]."""
    x = net.input("features", width, size, size)
    for name in ("up1", "up2"):
        x = net.act(net.conv(net.upsample(x, f"{name}/upsample"), name, width, 3), f"{name}/act", "LeakyRelu", alpha=0.2)
    x = net.act(net.conv(x, "conv", width, 3), "act", "LeakyRelu", alpha=0.2)
    net.output(net.conv(x, "out", 3, 3, gain=1.0), "image")
