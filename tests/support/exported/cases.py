# SPDX-License-Identifier: Apache-2.0
"""Networks in PyTorch with the number of pairs that convpool should find in what each exporter writes.  `pairs` counts
convolutions whose average is exact to move and pays, as read from the module; `missed` of them convpool leaves unchanged today.
A change that finds them has to lower the number here."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn import utils

from tests.support.exported import blocks
from tests.support.exported.blocks import Behind, BoxFilter, Down, Fn, Parallel, mean_of_slices

IMAGE = ((2, 8, 12, 12),)
EXPORTERS = ("dynamo", "script")


@dataclass(frozen=True)
class Case:
    """make: the module; shapes: of its inputs; open_axes: names by axis that stay open on every input.  missed: pairs that stay
    although they are exact to move, by exporter.  exporters: those that take the module. opset: 0 for the exporter's usual
    one."""

    make: Callable[[], nn.Module]
    pairs: int
    shapes: tuple[tuple[int, ...], ...] = IMAGE
    dtype: torch.dtype = torch.float32
    open_axes: dict[int, str] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)
    exporters: tuple[str, ...] = EXPORTERS
    opset: int = 0

    def rewritten(self, exporter: str) -> int:
        """Pairs that convpool rewrites."""
        return self.pairs - self.missed.get(exporter, 0)


def conv(**options) -> nn.Conv2d:
    """The 3x3 convolution of most cases."""
    return nn.Conv2d(8, 16, **{"kernel_size": 3, "padding": 1, **options})


def before(*layers, shape: tuple[int, ...] = IMAGE[0], first: nn.Module | None = None, pairs: int = 1, **fields) -> Case:
    """A convolution, `first` or `conv()`, with `layers` behind it."""

    def make() -> nn.Sequential:
        behind = [layer if isinstance(layer, nn.Module) else Fn(layer) for layer in layers]
        return nn.Sequential(*copy.deepcopy([first or conv(), *behind]))

    return Case(make, pairs, (shape,), **fields)


def sngan(norm: Callable) -> nn.Sequential:
    """SNGAN's discriminator for 32x32."""
    blocks_ = [blocks.FirstDown(3, 16, norm), Down(16, 16, norm), blocks.Flat(16, norm), blocks.Flat(16, norm)]
    return nn.Sequential(*blocks_, nn.ReLU(), Fn(lambda x: x.sum((2, 3))), norm(nn.Linear(16, 1)))


def lenet5(activation: type[nn.Module], pool: Callable[[int], nn.Module]) -> nn.Sequential:
    """LeNet-5; the pooling before the activation, as in the first form."""
    first = [nn.Conv2d(1, 6, 5), pool(6), activation(), nn.Conv2d(6, 16, 5), pool(16), activation()]
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(400, 120), activation(), nn.Linear(120, 10))


def densenet() -> nn.Sequential:
    """A small DenseNet for images of 32x32."""
    head = [nn.BatchNorm2d(36), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(36, 10)]
    parts = [blocks.Dense(16, 8), blocks.transition(32, 16), blocks.Dense(16, 8), blocks.transition(32, 20)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *parts, blocks.Dense(20, 8), *head)


def whole(*layers, **fields) -> Case:
    """`before`, for means over a map: small enough for a node, and of channels that every opset averages fast on a CPU."""
    return before(*layers, shape=(2, 16, 6, 6), first=nn.Conv2d(16, 16, 3, padding=1), **fields)


def quantized(x: torch.Tensor) -> torch.Tensor:
    """Rounded to sixteenths and clamped, as fake quantization does."""
    return (x * 16).round().clamp(-128, 127) / 16


def windows(x: torch.Tensor) -> torch.Tensor:
    """2x2 average by views."""
    n, c, h, w = x.shape
    return x.view(n, c, h // 2, 2, w // 2, 2).mean((3, 5))


def unshuffled(x: torch.Tensor) -> torch.Tensor:
    """2x2 average by pixel_unshuffle."""
    n, c, h, w = x.shape
    return F.pixel_unshuffle(x, 2).view(n, c, 4, h // 2, w // 2).mean(2)


def corners(x: torch.Tensor) -> list[torch.Tensor]:
    """The four Slices of 2x2 windows."""
    return [x[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)]


POOL = nn.AvgPool2d(2)
OPEN_SIZE = {2: "height", 3: "width"}
EACH, SLOW = {"dynamo": 1, "script": 1}, {"dynamo": 1}  # in dynamo's opset onnxruntime sums few channels, or one axis, slowly
NETWORKS: dict[str, Case] = {
    "lenet5": Case(lambda: lenet5(nn.Tanh, blocks.Trained), 2, ((1, 1, 32, 32),)),
    "lenet5 with plain averages": Case(lambda: lenet5(nn.Sigmoid, lambda _: nn.AvgPool2d(2)), 2, ((2, 1, 32, 32),)),
    "sngan first block": Case(lambda: blocks.FirstDown(3, 16), 1, ((2, 3, 16, 16),)),
    "sngan block": Case(lambda: Down(8, 16), 2, missed=SLOW),
    "sngan block, one average": Case(lambda: blocks.DownOnce(8, 16), 2),
    "sngan block, spectral norm": Case(lambda: Down(8, 16, utils.spectral_norm), 2, missed=SLOW),
    "sngan block, spectral norm parametrized": Case(lambda: Down(8, 16, blocks.spectral), 2, missed=SLOW, exporters=("dynamo",)),
    "sngan discriminator": Case(lambda: sngan(utils.spectral_norm), 3, ((4, 3, 32, 32),)),
    "sngan discriminator parametrized": Case(
        lambda: sngan(blocks.spectral), 3, ((4, 3, 32, 32),), open_axes={0: "N"}, exporters=("dynamo",)
    ),
    "wgan-gp block": Case(lambda: Down(8, 16, pool=mean_of_slices), 2, missed=SLOW),
    "wgan-gp block, open batch": Case(lambda: Down(8, 16, pool=mean_of_slices), 2, open_axes={0: "N"}, missed=SLOW),
    "stargan v2 block": Case(lambda: blocks.StyleDown(16, 32), 2, ((2, 16, 12, 12),)),
    "stargan v2 block, instance norm": Case(lambda: blocks.StyleDown(16, 32, True), 2, ((2, 16, 12, 12),)),
    "densenet transition": Case(lambda: blocks.transition(16, 8), 1, ((2, 16, 14, 14),)),
    "densenet transition, odd size": Case(lambda: blocks.transition(16, 8), 1, ((1, 16, 15, 13),)),
    "densenet": Case(densenet, 2, ((1, 3, 32, 32),)),
    "u-net": Case(blocks.UNet, 2, ((1, 3, 32, 32),)),
    "u-net, open batch": Case(blocks.UNet, 2, ((1, 3, 32, 32),), open_axes={0: "N"}),
    "stylegan block": Case(lambda: blocks.StyleGAN1Down(8, 16), 1),
    "next-vit attention": Case(blocks.Attention, 0, ((1, 3, 16, 16),)),
    "inception": Case(
        lambda: nn.Sequential(Parallel(lambda ways: torch.cat(ways, 1), conv(), conv(kernel_size=5, padding=2)), POOL), 2
    ),
    "sum of convolutions": Case(lambda: nn.Sequential(Parallel(sum, conv(), conv(kernel_size=1, padding=0)), POOL), 2),
    "shared convolution": Case(lambda: blocks.Shared(pooled=True), 2, (IMAGE[0], IMAGE[0])),
    "shared convolution, one pooled": Case(lambda: blocks.Shared(pooled=False), 1, (IMAGE[0], IMAGE[0])),
    "audio": before(
        *(nn.LeakyReLU(0.1), blocks.weight(nn.Conv1d(16, 32, 9, padding=4, groups=4)), nn.AvgPool1d(4)),
        **{"first": blocks.weight(nn.Conv1d(1, 16, 15, padding=7)), "shape": (1, 1, 256)},
    ),
    "audio, old weight norm": Case(
        lambda: nn.Sequential(utils.weight_norm(nn.Conv1d(4, 16, 5, padding=2)), nn.AvgPool1d(3, 2)), 1, ((2, 4, 101),)
    ),
    "volumes": Case(
        lambda: nn.Sequential(nn.Conv3d(4, 64, 3, padding=1), nn.BatchNorm3d(64), nn.AvgPool3d(2)), 1, ((1, 4, 8, 8, 8),)
    ),
    "video": Case(lambda: nn.Sequential(nn.Conv3d(3, 8, (3, 5, 5)), nn.AvgPool3d((1, 2, 2))), 1, ((1, 3, 6, 16, 16),)),
    "mobile bottleneck": before(
        nn.BatchNorm2d(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10), first=conv(kernel_size=1, padding=0)
    ),
}
AVERAGES: dict[str, Case] = {
    "AdaptiveAvgPool1d(1)": before(nn.AdaptiveAvgPool1d(1), first=nn.Conv1d(8, 64, 5), shape=(2, 8, 40), missed=SLOW),
    "AdaptiveAvgPool2d(1)": whole(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    "AdaptiveAvgPool2d(1), open sizes": before(
        nn.AdaptiveAvgPool2d(1), first=conv(kernel_size=1, padding=0), open_axes={0: "N", **OPEN_SIZE}
    ),
    "AdaptiveAvgPool2d(4)": before(nn.AdaptiveAvgPool2d(4)),
    "avg_pool2d of the whole map": whole(lambda x: F.avg_pool2d(x, x.shape[2:])),
    "mean((2, 3))": whole(lambda x: x.mean((2, 3))),
    "mean((2, 3)), open sizes": before(lambda x: x.mean((2, 3)), open_axes=OPEN_SIZE, missed=EACH),
    "mean((-2, -1), keepdim)": whole(lambda x: x.mean((-2, -1), keepdim=True)),
    "mean(3).mean(2)": whole(lambda x: x.mean(3).mean(2)),
    "flatten(2).mean(-1)": whole(lambda x: x.flatten(2).mean(-1)),
    "flatten(2).mean(-1), open batch": whole(lambda x: x.flatten(2).mean(-1), open_axes={0: "N"}),
    "view.mean(2)": whole(lambda x: x.view(x.shape[0], x.shape[1], -1).mean(2)),
    "view.mean(2), open batch": whole(lambda x: x.view(x.shape[0], x.shape[1], -1).mean(2), open_axes={0: "N"}),
    "sum over a count, open batch": whole(lambda x: x.sum((2, 3)) / (x.shape[2] * x.shape[3]), open_axes={0: "N"}),
    "sum over a count": whole(lambda x: x.sum((2, 3)) / (x.shape[2] * x.shape[3])),
    "channels last": whole(lambda x: x.permute(0, 2, 3, 1).mean((1, 2))),
    "views of windows": before(windows),
    "views of windows, open batch": before(windows, open_axes={0: "N"}),
    "pixel_unshuffle": before(unshuffled),
    "pixel_unshuffle, open batch": before(unshuffled, open_axes={0: "N"}),
    "bilinear, open batch": before(
        lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", align_corners=False), open_axes={0: "N"}
    ),
    "bilinear": before(lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", align_corners=False)),
    "area": before(lambda x: F.interpolate(x, size=(6, 6), mode="area")),
    "sum of a list": before(lambda x: sum(corners(x)) * 0.25),
    "stacked slices": before(lambda x: torch.stack(corners(x)).mean(0)),
    "box filter": before(BoxFilter(16)),
    "blur": before(BoxFilter(16, (1.0, 2.0, 1.0), 1), pairs=0),
}
LAYERS: dict[str, Case] = {
    "open batch": before(POOL, open_axes={0: "N"}),
    "open sizes": before(POOL, open_axes=OPEN_SIZE),
    "overlapping windows": before(nn.AvgPool2d(3, 2)),
    "stride 2": before(POOL, first=conv(stride=2), shape=(2, 8, 16, 16)),
    "dilation 2, groups": before(POOL, first=conv(dilation=2, padding=2, groups=4), missed=SLOW),
    "depthwise": before(POOL, first=nn.Conv2d(8, 8, 5, padding=2, groups=8)),
    "padding same": before(POOL, first=nn.Conv2d(8, 16, 4, padding="same")),
    "padding reflect": before(POOL, first=conv(padding_mode="reflect")),
    "ZeroPad2d": Case(lambda: nn.Sequential(nn.ZeroPad2d((1, 2, 0, 1)), nn.Conv2d(8, 16, 3), POOL), 1),
    "ceil_mode without a partial window": before(nn.AvgPool2d(2, ceil_mode=True)),
    "ceil_mode with a partial window": before(nn.AvgPool2d(2, ceil_mode=True), shape=(2, 8, 13, 13), pairs=0),
    "padded average": before(nn.AvgPool2d(3, 2, padding=1), pairs=0),
    "Relu between": before(nn.ReLU(), POOL, pairs=0),
    "GroupNorm between": before(nn.GroupNorm(4, 16), POOL, pairs=0),
    "quantized between": before(quantized, POOL, pairs=0),
    "Dropout between": before(nn.Dropout(0.3), POOL),
    "two averages of one convolution": Case(lambda: Behind(conv(), lambda h: (F.avg_pool2d(h, 2), F.avg_pool2d(h, 3))), 0),
    "squeeze and excite": Case(lambda: Behind(conv(), lambda h: h * h.mean((2, 3), keepdim=True).sigmoid()), 0),
    "transposed convolution": before(POOL, first=nn.ConvTranspose2d(8, 16, 4, 2, 1), pairs=0),
    "no convolution": Case(lambda: nn.Sequential(nn.Linear(12, 8), nn.ReLU(), POOL), 0),
    "float16": before(POOL, dtype=torch.float16),
    "bfloat16": before(POOL, dtype=torch.bfloat16, opset=22, exporters=("dynamo",)),
    "float64": before(POOL, dtype=torch.float64),
}
CASES = NETWORKS | AVERAGES | LAYERS
