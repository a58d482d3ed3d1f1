# SPDX-License-Identifier: Apache-2.0
"""Discriminators and critics, whose residual blocks end in convolution and average pooling: the largest share of all.

- SNGAN: Miyato, Kataoka, Koyama, Yoshida, "Spectral Normalization for Generative Adversarial Networks", ICLR 2018.
- BigGAN: Brock, Donahue, Simonyan, "Large Scale GAN Training for High Fidelity Natural Image Synthesis", ICLR 2019.
- WGAN-GP: Gulrajani, Ahmed, Arjovsky, Dumoulin, Courville, "Improved Training of Wasserstein GANs", NeurIPS 2017.
- StarGAN v2: Choi, Uh, Yoo, Ha, "StarGAN v2: Diverse Image Synthesis for Multiple Domains", CVPR 2020.
- IGEBM: Du, Mordatch, "Implicit Generation and Modeling with Energy-Based Models", NeurIPS 2019; it pools after the
  residual Add.

Spectral normalisation is folded into the weights here; exporters leave it in the graph (tests/ir/test_constants.py).
The class-conditional terms of SNGAN and BigGAN (an embedding of the label) are left out: they read the pooled features only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from models.builder import Net


def residual_block(
    net: Net, x, name: str, hidden: int, out: int, *, down=True, down_sample: Callable | None = None, in_place=False
):
    """Pre-activation residual block: ReLU, Conv3, ReLU, Conv3, pool; shortcut Conv1, pool; Add.

    in_place: the shortcut reads what the first ReLU gives, as where PyTorch's works in place.
    """
    down_sample = down_sample or net.pool
    h = net.act(x, f"{name}/relu1")
    x = h if in_place else x
    h = net.conv(h, f"{name}/conv1", hidden, 3)
    h = net.conv(net.act(h, f"{name}/relu2"), f"{name}/conv2", out, 3)
    if not down:
        return net.add(h, x, f"{name}/add")
    shortcut = net.conv(x, f"{name}/shortcut", out, 1, gain=1.0)
    return net.add(down_sample(h, f"{name}/pool"), down_sample(shortcut, f"{name}/shortcut_pool"), f"{name}/add")


def _first_block(net: Net, x, name: str, out: int, *, down_sample: Callable | None = None):
    """The block that reads the image: Conv3, ReLU, Conv3, pool; its shortcut pools first, then Conv1."""
    down_sample = down_sample or net.pool
    h = net.conv(x, f"{name}/conv1", out, 3, gain=1.0)
    h = net.conv(net.act(h, f"{name}/relu"), f"{name}/conv2", out, 3)
    shortcut = net.conv(down_sample(x, f"{name}/shortcut_pool"), f"{name}/shortcut", out, 1, gain=1.0)
    return net.add(down_sample(h, f"{name}/pool"), shortcut, f"{name}/add")


def sngan(net: Net, *, size=64, width=64, in_place=False) -> None:
    """SNGAN's 64x64 discriminator: five blocks, each halving; global sum, linear. Input [N, 3, size, size].

    in_place: of residual_block; torch-mimicry's SNGAN is so, the authors' own is not.
    """
    x = _first_block(net, net.input("image", 3, size, size), "block1", width)
    for i, factor in enumerate((2, 4, 8, 16), 2):
        x = residual_block(net, x, f"block{i}", x.shape[1], width * factor, in_place=in_place)
    x = net.reduce(net.act(x, "head/relu"), "head/sum", "ReduceSum", (2, 3))
    net.output(net.linear(x, "head/linear", 1), "score")


def biggan(net: Net, *, size=128, width=96, factors: Sequence[int] = (2, 4, 8, 16), attention_after=1) -> None:
    """BigGAN's discriminator, for 128x128 by default: halving blocks, self-attention between two of them, one more block.

    ``factors``: channels over ``width`` of the halving blocks after the first; for 256x256 they are 2, 4, 8, 8, 16, and
    the attention stands after the second block. Input [N, 3, size, size].
    """
    x = _first_block(net, net.input("image", 3, size, size), "block1", width)
    for i, factor in enumerate(factors, 1):
        if i == attention_after:
            x = _attention(net, x, "attention")
        x = residual_block(net, x, f"block{i + 1}", width * factor, width * factor)
    x = residual_block(net, x, f"block{len(factors) + 2}", x.shape[1], x.shape[1], down=False)
    x = net.reduce(net.act(x, "head/relu"), "head/sum", "ReduceSum", (2, 3))
    net.output(net.linear(x, "head/linear", 1), "score")


def _attention(net: Net, x, name: str):
    """Self-attention over positions (Zhang et al., "Self-Attention GANs", ICML 2019), keys and values pooled by max."""
    batch, channels, height, width = x.shape
    positions, pooled = height * width, height * width // 4

    def project(part: str, out: int, pool: bool):
        y = net.conv(x, f"{name}/{part}", out, 1, bias=False, gain=1.0)
        y = net.pool(y, f"{name}/{part}_pool", kind="MaxPool") if pool else y
        return net.reshape(y, f"{name}/{part}_flat", out, pooled if pool else positions)

    theta = project("theta", channels // 8, False)
    theta = net.op("Transpose", f"{name}/queries", [theta], (batch, positions, channels // 8), perm=[0, 2, 1])
    scores = net.op("MatMul", f"{name}/scores", [theta, project("phi", channels // 8, True)], (batch, positions, pooled))
    beta = net.op("Softmax", f"{name}/softmax", [scores], scores.shape, axis=2)
    beta = net.op("Transpose", f"{name}/weights", [beta], (batch, pooled, positions), perm=[0, 2, 1])
    y = net.op("MatMul", f"{name}/mix", [project("g", channels // 2, True), beta], (batch, channels // 2, positions))
    y = net.reshape(y, f"{name}/mix_image", channels // 2, height, width)
    y = net.conv(y, f"{name}/out", channels, 1, bias=False, gain=1.0)
    y = net.op("Mul", f"{name}/gain", [y, net.scalar(f"{name}.gamma", 0.5)], y.shape)
    return net.add(y, x, f"{name}/add")


def wgan_gp(net: Net, *, size=32, width=128, mean="avgpool") -> None:
    """WGAN-GP's CIFAR-10 critic: two halving blocks, two plain ones, spatial mean, linear. Input [N, 3, size, size].

    ``mean`` says how the 2x2 average is written: "avgpool"; "slices_div" as the reference implementations have it and
    exporters write it (two strided Slices of rows, two of columns of each, three Adds, Div by 4); "slices_mul" (Mul by
    0.25); "slices_sum" (one Sum of four inputs, then Div); "slices_python_sum" (as "slices_div", but starting with
    0 + x, which is what Python's sum() computes and an exporter may leave).
    """
    if mean not in ("avgpool", "slices_div", "slices_mul", "slices_sum", "slices_python_sum"):
        raise ValueError(
            f"wgan_gp: mean; got {mean!r}, expected avgpool, slices_div, slices_mul, slices_sum or slices_python_sum"
        )

    def down_sample(x, name):
        return net.pool(x, name) if mean == "avgpool" else _mean_of_slices(net, x, name, mean)

    x = _first_block(net, net.input("image", 3, size, size), "block1", width, down_sample=down_sample)
    x = residual_block(net, x, "block2", width, width, down_sample=down_sample)
    for i in (3, 4):
        x = residual_block(net, x, f"block{i}", width, width, down=False)
    x = net.reduce(net.act(x, "head/relu"), "head/mean", "ReduceMean", (2, 3))
    net.output(net.linear(x, "head/linear", 1), "score")


def _mean_of_slices(net: Net, x, name: str, mean: str):
    """(x[::2, ::2] + x[1::2, ::2] + x[::2, 1::2] + x[1::2, 1::2]) / 4, in the reference's order."""
    rows = [net.slice(x, f"{name}/rows{row}", row, 2, 2) for row in (0, 1)]
    corners = [net.slice(rows[row], f"{name}/columns{column}{row}", column, 2, 3) for column in (0, 1) for row in (0, 1)]
    if mean == "slices_sum":
        total = net.op("Sum", f"{name}/sum", corners, corners[0].shape)
    else:
        total = corners[0]
        if mean == "slices_python_sum":
            total = net.add(total, net.scalar(f"{name}.zero", 0.0), f"{name}/add0")
        for i, corner in enumerate(corners[1:], 1):
            total = net.add(total, corner, f"{name}/add{i}")
    op, factor = ("Mul", 0.25) if mean == "slices_mul" else ("Div", 4.0)
    return net.op(op, f"{name}/{op.lower()}", [total, net.scalar(f"{name}.factor", factor)], total.shape)


def stargan_v2(net: Net, *, size=256, width: int | None = None, max_width=512, domains=2, style=0) -> None:
    """StarGAN v2's discriminator, or its style encoder where ``style`` (the code's length, 64 in the paper) is set.

    Input [N, 3, size, size], a power of two from 16 on. One output [N, domains], or [N, style] per domain; the
    selection of the domain's row by a label is left out. ``width`` defaults to 2^14 / size, as in the paper.
    """
    if size < 16 or size & (size - 1):
        raise ValueError(f"stargan_v2: size; got {size}, expected a power of two from 16 on")
    width = width or 2**14 // size
    x = net.conv(net.input("image", 3, size, size), "stem/conv", width, 3, gain=1.0)
    for i in range(1, size.bit_length() - 2):
        x = _stargan_block(net, x, f"block{i}", min(2 * x.shape[1], max_width))
    x = net.conv(_leaky(net, x, "head/act1"), "head/conv", x.shape[1], 4, pads=0)
    x = _leaky(net, x, "head/act2")
    if style:
        for i in range(domains):
            net.output(net.linear(x, f"head/style{i}", style), f"style{i}")
    else:
        x = net.conv(x, "head/out", domains, 1)
        net.output(net.reshape(x, "head/flat", domains), "logits")


def _leaky(net: Net, x, name: str):
    return net.act(x, name, "LeakyRelu", alpha=0.2)


def _stargan_block(net: Net, x, name: str, out: int):
    """LeakyReLU, Conv3, pool, LeakyReLU, Conv3; shortcut Conv1 (where the channels change), pool; (a + b) / sqrt 2."""
    shortcut = x
    if out != x.shape[1]:
        shortcut = net.conv(x, f"{name}/shortcut", out, 1, bias=False, gain=1.0)
    shortcut = net.pool(shortcut, f"{name}/shortcut_pool")
    h = net.conv(_leaky(net, x, f"{name}/act1"), f"{name}/conv1", x.shape[1], 3)
    h = net.pool(h, f"{name}/pool")
    h = net.conv(_leaky(net, h, f"{name}/act2"), f"{name}/conv2", out, 3)
    total = net.add(shortcut, h, f"{name}/add")
    return net.op("Div", f"{name}/div", [total, net.scalar(f"{name}.sqrt2", math.sqrt(2.0))], total.shape)


def igebm(net: Net, *, size=32, width=128, factors: Sequence[int] = (1, 1, 2, 2, 2, 2)) -> None:
    """IGEBM's CIFAR-10 energy: six residual blocks, every other one halving after its Add. Input [N, 3, size, size]."""
    x = net.conv(net.input("image", 3, size, size), "stem/conv", width, 3, gain=1.0)
    for i, factor in enumerate(factors):
        name, out = f"block{i + 1}", width * factor
        h = _leaky(net, net.conv(x, f"{name}/conv1", out, 3), f"{name}/act1")
        h = net.conv(h, f"{name}/conv2", out, 3)
        skip = x if out == x.shape[1] else net.conv(x, f"{name}/skip", out, 1, bias=False, gain=1.0)
        x = net.add(h, skip, f"{name}/add")
        x = net.pool(x, f"{name}/pool") if i % 2 == 0 else x
        x = _leaky(net, x, f"{name}/act2")
    x = net.reduce(net.act(x, "head/relu"), "head/sum", "ReduceSum", (2, 3))
    net.output(net.linear(x, "head/linear", 1), "energy")
