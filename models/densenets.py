# SPDX-License-Identifier: Apache-2.0
"""Networks of dense connections. Their transitions (BN, ReLU, Conv 1x1, AveragePool 2) hold the conv-pool pairs.

- DenseNet, DenseNet-BC: Huang, Liu, van der Maaten, Weinberger, "Densely Connected Convolutional Networks", CVPR 2017.
- 3-D DenseNet: the same with volumes, as used for CT and MR images (for instance in MONAI).
- SPARCNet: Jing et al., "Development of Expert-Level Classification of Seizures and Rhythmic and Periodic Patterns
  During EEG Interpretation", Neurology 2023; a 1-D DenseNet with ELU.
- CondenseNet: Huang, Liu, van der Maaten, Weinberger, "CondenseNet: An Efficient DenseNet using Learned Group
  Convolutions", CVPR 2018, in its form for inference (channel selection, then group convolution). Its transitions are a
  bare AveragePool over the Concat.
"""

from __future__ import annotations

from collections.abc import Sequence

from models.builder import Net


def _norm_act_conv(net: Net, x, name: str, channels: int, kernel: int, *, act="Relu", bias=False):
    x = net.act(net.batch_norm(x, f"{name}/norm"), f"{name}/act", act)
    return net.conv(x, f"{name}/conv", channels, kernel, bias=bias)


def _dense_block(net: Net, x, name: str, layers: int, growth: int, bottleneck: int, **conv):
    """Concat of the input and of all layers' outputs; a layer is BN-act-Conv1 (bottleneck), BN-act-Conv3."""
    features = [x]
    for i in range(1, layers + 1):
        layer = f"{name}/layer{i}"
        joined = features[0] if len(features) == 1 else net.concat(features, f"{layer}/concat")
        y = _norm_act_conv(net, joined, f"{layer}/1", bottleneck, 1, **conv)
        features.append(_norm_act_conv(net, y, f"{layer}/2", growth, 3, **conv))
    return net.concat(features, f"{name}/concat")


def transition(net: Net, x, name: str, **conv):
    """BN, act, Conv 1 to half the channels (theta = 0.5), AveragePool 2."""
    return net.pool(_norm_act_conv(net, x, name, x.shape[1] // 2, 1, **conv), f"{name}/pool")


def _head(net: Net, x, classes: int) -> None:
    x = net.act(net.batch_norm(x, "head/norm"), "head/relu")
    net.output(net.linear(net.global_pool(x, "head/pool"), "head/fc", classes), "logits")


def densenet(net: Net, *, size=224, channels=3, rank=2, growth=32, blocks: Sequence[int] = (6, 12, 24, 16), classes=1000) -> None:
    """DenseNet-121 by default, for images (rank 2) or volumes (rank 3). Input [N, channels, size...]."""
    x = net.input("input", channels, *[size] * rank)
    x = net.conv(x, "stem/conv", 2 * growth, 7, stride=2, bias=False, gain=1.0)
    x = net.act(net.batch_norm(x, "stem/norm"), "stem/relu")
    x = net.pool(x, "stem/pool", 3, stride=2, pads=1, kind="MaxPool")
    for i, layers in enumerate(blocks, 1):
        x = _dense_block(net, x, f"block{i}", layers, growth, 4 * growth)
        if i < len(blocks):
            x = transition(net, x, f"transition{i}")
    _head(net, x, classes)


def densenet_bc(net: Net, *, size=32, depth=100, growth=12, classes=10) -> None:
    """DenseNet-BC for CIFAR, ``depth`` L = 6 n + 4 layers in three blocks of n. Input [N, 3, size, size]."""
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(f"densenet_bc: depth; got {depth}, expected 6 n + 4 with n >= 1")
    x = net.conv(net.input("input", 3, size, size), "stem/conv", 2 * growth, 3, bias=False, gain=1.0)
    for i in (1, 2, 3):
        x = _dense_block(net, x, f"block{i}", (depth - 4) // 6, growth, 4 * growth)
        if i < 3:
            x = transition(net, x, f"transition{i}")
    _head(net, x, classes)


def sparcnet(net: Net, *, size=1000, channels=16, layers=4, growth=16, classes=6) -> None:
    """SPARCNet: input [N, channels, size samples]; floor(log2(size / 4)) dense blocks, each with its transition."""
    conv = {"act": "Elu", "bias": True}
    x = net.input("eeg", channels, size)
    x = net.conv(x, "stem/conv", 1 << channels.bit_length(), 7, stride=2, gain=1.0)
    x = net.act(net.batch_norm(x, "stem/norm"), "stem/elu", "Elu")
    x = net.pool(x, "stem/pool", 3, stride=2, pads=1, kind="MaxPool")
    for i in range(1, (size // 4).bit_length()):
        x = _dense_block(net, x, f"block{i}", layers, growth, 16 * growth, **conv)
        x = transition(net, x, f"transition{i}", **conv)
    net.output(net.linear(net.act(x, "head/elu", "Elu"), "head/fc", classes), "logits")


def condensenet(
    net: Net,
    *,
    size=224,
    stages: Sequence[int] = (4, 6, 8, 10, 8),
    growth: Sequence[int] = (8, 16, 32, 64, 128),
    group=4,
    classes=1000,
) -> None:
    """CondenseNet-74 after pruning. Input [N, 3, size, size]; one transition less than stages."""
    x = net.conv(net.input("input", 3, size, size), "stem/conv", 2 * growth[0], 3, stride=2, bias=False, gain=1.0)
    for i, (layers, k) in enumerate(zip(stages, growth, strict=True), 1):
        for j in range(1, layers + 1):
            name = f"block{i}/layer{j}"
            y = _learned_group_conv(net, x, f"{name}/1", 4 * k, group)
            y = net.act(net.batch_norm(y, f"{name}/2/norm"), f"{name}/2/relu")
            y = net.conv(y, f"{name}/2/conv", k, 3, group=group, bias=False)
            x = net.concat([x, y], f"{name}/concat")
        if i < len(stages):
            x = net.pool(x, f"transition{i}/pool")
    _head(net, x, classes)


def _learned_group_conv(net: Net, x, name: str, channels: int, group: int):
    """Selects the channels that pruning left (a Gather), group convolution 1x1, then shuffles the groups."""
    kept = x.shape[1] // group * group
    # A fixed spread of the input channels over the groups: channel i goes to group i mod group.
    index = net.ints(f"{name}.index", *[i for g in range(group) for i in range(g, kept, group)])
    x = net.op("Gather", f"{name}/select", [x, index], (x.shape[0], kept, *x.shape[2:]), axis=1)
    x = net.act(net.batch_norm(x, f"{name}/norm"), f"{name}/relu")
    x = net.conv(x, f"{name}/conv", channels, 1, group=group, bias=False)
    height, width = x.shape[2:]
    x = net.reshape(x, f"{name}/split", group, channels // group, height, width)
    x = net.op("Transpose", f"{name}/shuffle", [x], (x.shape[0], channels // group, group, height, width), perm=[0, 2, 1, 3, 4])
    return net.reshape(x, f"{name}/merge", channels, height, width)
