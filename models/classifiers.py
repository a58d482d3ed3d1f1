# SPDX-License-Identifier: Apache-2.0
"""Classifiers: where convolution and average pooling meet, and where they must not be joined.

With pairs:

- LeNet-5: LeCun, Bottou, Bengio, Haffner, "Gradient-Based Learning Applied to Document Recognition", Proc. IEEE 1998.
- MobileNetV1 as in PANNs: Kong et al., "PANNs: Large-Scale Pretrained Audio Neural Networks for Audio Pattern
  Recognition", IEEE/ACM TASLP 2020; its strides are average pools, also of window 1.
- DarkNet-19: Redmon, Farhadi, "YOLO9000: Better, Faster, Stronger", CVPR 2017; Conv1 then global pooling.
- NextViT: Li et al., "Next-ViT: Next Generation Vision Transformer for Efficient Deployment", 2022; its convolution
  blocks only, which end in a residual Add that the next stage pools.

Without, for negative tests:

- VGG (Simonyan, Zisserman, ICLR 2015) with average pooling: an activation stands between.
- SE-ResNet (Hu, Shen, Sun, "Squeeze-and-Excitation Networks", CVPR 2018): the pooled convolution is read elsewhere.
- ResNet-D (He et al., "Bag of Tricks for Image Classification with CNNs", CVPR 2019): pooling stands before Conv1.
"""

from __future__ import annotations

from collections.abc import Sequence

from models.builder import Net


def lenet5(net: Net, *, size=32, classes=10) -> None:
    """LeNet-5 in its 1998 order, untrained: Conv5, average, gain, bias, tanh, twice. Input [N, 1, size, size].

    C3 is fully connected to S2, where the original leaves connections out (a table of 1998's memory).
    """
    x = net.input("image", 1, size, size)
    for conv, subsample, channels in (("C1", "S2", 6), ("C3", "S4", 16)):
        x = net.pool(net.conv(x, conv, channels, 5, pads=0, gain=1.5), f"{subsample}/average")
        gain = net.uniform(f"{subsample}.gain", (1, channels, 1, 1), 0.7, 1.3)
        bias = net.uniform(f"{subsample}.bias", (1, channels, 1, 1), -0.3, 0.3)
        x = net.op("Add", f"{subsample}/bias", [net.op("Mul", f"{subsample}/gain", [x, gain], x.shape), bias], x.shape)
        x = net.act(x, f"{subsample}/tanh", "Tanh")
    x = net.act(net.conv(x, "C5", 120, 5, pads=0, gain=1.5), "C5/tanh", "Tanh")
    x = net.act(net.linear(x, "F6", 84), "F6/tanh", "Tanh")
    net.output(net.linear(x, "output", classes), "logits")


def _conv_norm(net: Net, x, name: str, channels: int, kernel: int, act: str | None = "Relu", **conv):
    """Conv without bias, BN, activation."""
    x = net.batch_norm(net.conv(x, f"{name}/conv", channels, kernel, bias=False, **conv), f"{name}/norm")
    if act is None:
        return x
    return net.act(x, f"{name}/act", act, **({"alpha": 0.1} if act == "LeakyRelu" else {}))


def mobilenet_v1(net: Net, *, frames=256, mels=64, width=32, classes=527) -> None:
    """PANNs MobileNetV1: every stride is an AveragePool between Conv3 (depthwise but the first) and BN.

    Input: log-mel spectrogram [N, 1, frames, mels]. Blocks of stride 1 hold an AveragePool of window 1.
    """

    def conv_pool(x, name: str, channels: int, stride: int, **conv):
        x = net.conv(x, f"{name}/conv", channels, 3, bias=False, **conv)
        x = net.pool(x, f"{name}/pool", stride)
        return net.act(net.batch_norm(x, f"{name}/norm"), f"{name}/relu")

    x = conv_pool(net.input("logmel", 1, frames, mels), "stem", width, 2, gain=1.0)
    # Per block the channels over ``width``, and the stride.
    blocks = ((2, 1), (4, 2), (4, 1), (8, 2), (8, 1), (16, 2), *[(16, 1)] * 5, (32, 2), (32, 1))
    for i, (factor, stride) in enumerate(blocks, 1):
        x = conv_pool(x, f"block{i}/depthwise", x.shape[1], stride, group=x.shape[1])
        x = _conv_norm(net, x, f"block{i}/pointwise", factor * width, 1)
    x = net.reduce(x, "head/mean_mels", "ReduceMean", (3,))
    x = net.add(net.reduce(x, "head/max", "ReduceMax", (2,)), net.reduce(x, "head/mean", "ReduceMean", (2,)), "head/add")
    x = net.act(net.linear(x, "head/fc1", 32 * width), "head/relu")
    net.output(net.act(net.linear(x, "head/fc2", classes), "head/sigmoid", "Sigmoid"), "scores")


def darknet19(net: Net, *, size=224, width=32, classes=1000) -> None:
    """DarkNet-19: 3x3 convolutions with 1x1 bottlenecks, five max pools; Conv1, GlobalAveragePool, Softmax."""
    x = net.input("image", 3, size, size)
    # Per stage the channels over ``width``: the 3x3 convolutions, with a 1x1 of half the channels between two of them.
    for i, (factor, convs) in enumerate(((1, 1), (2, 1), (4, 3), (8, 3), (16, 5), (32, 5)), 1):
        for j in range(convs):
            kernel, channels = (1, factor * width // 2) if j % 2 else (3, factor * width)
            gain = 1.0 if i == 1 else 2.0
            x = _conv_norm(net, x, f"stage{i}/{j + 1}", channels, kernel, "LeakyRelu", gain=gain)
        if i < 6:
            x = net.pool(x, f"stage{i}/pool", kind="MaxPool")
    x = net.global_pool(net.conv(x, "head/conv", classes, 1), "head/pool")
    x = net.op("Flatten", "head/flatten", [x], (x.shape[0], classes), axis=1)
    net.output(net.op("Softmax", "head/softmax", [x], x.shape, axis=1), "probabilities")


def nextvit(
    net: Net,
    *,
    size=224,
    depths: Sequence[int] = (3, 4, 10, 3),
    widths: Sequence[int] = (96, 192, 384, 768),
    classes=1000,
) -> None:
    """NextViT's convolution blocks: between stages AveragePool (ceil_mode) over Add(residual, Conv), then Conv1, BN."""
    # Random statistics do not normalise, so a branch must be weak for 40 of them to leave the sum of order one.
    branch_gain = 0.1
    x = net.input("image", 3, size, size)
    for i, (channels, stride) in enumerate(((64, 2), (32, 1), (64, 1), (64, 2)), 1):
        x = _conv_norm(net, x, f"stem{i}", channels, 3, stride=stride, gain=1.0 if i == 1 else 2.0)
    for i, (depth, channels) in enumerate(zip(depths, widths, strict=True), 1):
        if i > 1:
            # No partial window: the sizes are even. count_include_pad=0 without pads changes nothing either.
            rounding = {"ceil_mode": 1} if net.opset >= 10 else {}
            x = net.pool(x, f"stage{i}/embed/pool", count_include_pad=0, **rounding)
        x = _conv_norm(net, x, f"stage{i}/embed", channels, 1, None, gain=1.0)
        for j in range(1, depth + 1):
            name = f"stage{i}/block{j}"
            h = _conv_norm(net, x, f"{name}/mhca/group", channels, 3, group=channels // 32, gain=1.0)
            h = net.conv(h, f"{name}/mhca/project", channels, 1, bias=False, gain=branch_gain)
            x = net.add(x, h, f"{name}/mhca/add")
            h = net.conv(net.batch_norm(x, f"{name}/mlp/norm"), f"{name}/mlp/conv1", 3 * channels, 1, gain=1.0)
            h = net.conv(net.act(h, f"{name}/mlp/relu"), f"{name}/mlp/conv2", channels, 1, gain=2.0 * branch_gain)
            x = net.add(x, h, f"{name}/mlp/add")
    x = net.batch_norm(x, "head/norm")
    net.output(net.linear(net.global_pool(x, "head/pool"), "head/fc", classes), "logits")


def vgg_average(net: Net, *, size=64, widths: Sequence[int] = (32, 64, 128), classes=10) -> None:
    """VGG with average pooling: Conv3, ReLU, Conv3, ReLU, AveragePool. Nothing to rewrite."""
    x = net.input("image", 3, size, size)
    for i, channels in enumerate(widths, 1):
        for j in (1, 2):
            x = net.act(net.conv(x, f"stage{i}/conv{j}", channels, 3), f"stage{i}/relu{j}")
        x = net.pool(x, f"stage{i}/pool")
    net.output(net.linear(x, "head/fc", classes), "logits")


def squeeze_excite(net: Net, *, size=32, width=64, blocks=3, reduction=8, classes=10) -> None:
    """SE-ResNet: the convolution that GlobalAveragePool reads is also scaled by the gate. Nothing to rewrite."""
    x = _conv_norm(net, net.input("image", 3, size, size), "stem", width, 3, gain=1.0)
    for i in range(1, blocks + 1):
        name = f"block{i}"
        h = net.conv(_conv_norm(net, x, f"{name}/1", width, 3), f"{name}/2/conv", width, 3)
        gate = net.conv(net.global_pool(h, f"{name}/squeeze"), f"{name}/reduce", width // reduction, 1, gain=1.0)
        gate = net.conv(net.act(gate, f"{name}/relu"), f"{name}/expand", width, 1)
        gate = net.act(gate, f"{name}/sigmoid", "Sigmoid")
        h = net.op("Mul", f"{name}/scale", [h, gate], h.shape)
        x = net.act(net.add(h, x, f"{name}/add"), f"{name}/out")
    net.output(net.linear(net.global_pool(x, "head/pool"), "head/fc", classes), "logits")


def resnet_d(net: Net, *, size=64, width=64, stages=4, classes=10) -> None:
    """ResNet-D basic blocks, one per stage: the shortcut is AveragePool 2, Conv1, BN (pooling first: the reverse)."""
    x = _conv_norm(net, net.input("image", 3, size, size), "stem", width, 3, stride=2, gain=1.0)
    for i in range(1, stages + 1):
        name, out, stride = f"stage{i}", width << (i - 1), 1 if i == 1 else 2
        h = _conv_norm(net, x, f"{name}/1", out, 3, stride=stride)
        h = _conv_norm(net, h, f"{name}/2", out, 3, None)
        if stride == 2:
            x = _conv_norm(net, net.pool(x, f"{name}/shortcut/pool"), f"{name}/shortcut", out, 1, None, gain=1.0)
        x = net.act(net.add(h, x, f"{name}/add"), f"{name}/out")
    net.output(net.linear(net.global_pool(x, "head/pool"), "head/fc", classes), "logits")
