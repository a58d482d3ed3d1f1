# SPDX-License-Identifier: Apache-2.0
"""Public models with resized maps, exported by PyTorch from random weights: what the rules find and what it saves.

    python -m benchmarks public_models [NAME ...] [--json FILE] [--exporter torchscript|dynamo|both] [--open] [--export FOLDER]

For each model and exporter: the sites rewritten for a CPU, and the share of the whole model's multiply-adds that is saved in form
fused (`saved`) and by cost (`auto`).  Outputs are checked in onnxruntime.  Needs torch, onnxscript, diffusers,
segmentation_models_pytorch and transformers; models of packages that are not there are left out.  --export writes files only.
--open leaves batch and sizes of the inputs open, with which `convpool optimize FILE --target cpu --time --input-shape ...` times.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import torch
import torch.nn.functional as F
from torch import nn

import convpool
from convpool.errors import ConvpoolError, first_line

Built = tuple[nn.Module, tuple[torch.Tensor, ...]]


class Wrapped(nn.Module):
    """A module's function of tensors, its first result where there are more."""

    def __init__(self, inner: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The function's result."""
        return self.call(self.inner, *inputs)


def _decode(name: str, shape: tuple[int, ...], **config: Any) -> Built:
    """The decoder of one of diffusers' autoencoders."""
    import diffusers

    model = getattr(diffusers, name)(**config)
    return Wrapped(model, lambda inner, z: inner.decode(z, return_dict=False)[0]), (torch.randn(shape),)


def _kl(widths: tuple[int, ...], latent: int, size: int, **config: Any) -> Built:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * len(widths), "up_block_types": ("UpDecoderBlock2D",) * len(widths)}
    given = {"block_out_channels": widths, "latent_channels": latent, "layers_per_block": 2, **blocks, **config}
    return _decode("AutoencoderKL", (1, latent, size, size), **given)


def _vq(widths: tuple[int, ...], size: int, **config: Any) -> Built:
    import diffusers

    blocks = {"down_block_types": ("DownEncoderBlock2D",) * len(widths), "up_block_types": ("UpDecoderBlock2D",) * len(widths)}
    model = diffusers.VQModel(block_out_channels=widths, layers_per_block=2, num_vq_embeddings=64, **blocks, **config)
    latent = config.get("latent_channels", 3)

    def decoded(inner: Any, z: torch.Tensor) -> torch.Tensor:
        quant = inner.post_quant_conv(z)
        return inner.decoder(quant, z if config.get("norm_type") == "spatial" else None)

    return Wrapped(model, decoded), (torch.randn(1, latent, size, size),)


def _unet(size: int, widths: tuple[int, ...], **config: Any) -> Built:
    import diffusers

    model = diffusers.UNet2DModel(sample_size=size, block_out_channels=widths, layers_per_block=2, **config)
    call = lambda inner, x, t: inner(x, t, return_dict=False)[0]  # noqa: E731
    return Wrapped(model, call), (torch.randn(1, 3, size, size), torch.tensor([5]))


def _conditioned(size: int, widths: tuple[int, ...], **config: Any) -> Built:
    import diffusers

    model = diffusers.UNet2DConditionModel(
        sample_size=size, block_out_channels=widths, cross_attention_dim=64, attention_head_dim=8, **config
    )
    call = lambda inner, x, t, text: inner(x, t, text, return_dict=False)[0]  # noqa: E731
    return Wrapped(model, call), (torch.randn(1, model.config.in_channels, size, size), torch.tensor([5]), torch.randn(1, 7, 64))


def _smp(name: str, encoder: str, size: int = 128) -> Built:
    import segmentation_models_pytorch as smp

    return getattr(smp, name)(encoder, encoder_weights=None, classes=1), (torch.randn(1, 3, size, size),)


def _segformer(size: int = 128, **config: Any) -> Built:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    model = SegformerForSemanticSegmentation(SegformerConfig(num_labels=150, **config))
    return Wrapped(model, lambda inner, x: inner(x).logits), (torch.randn(1, 3, size, size),)


def _dpt(size: int = 64) -> Built:
    from transformers import DPTConfig, DPTForDepthEstimation

    config = DPTConfig(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128, image_size=size)
    config.backbone_out_indices, config.neck_hidden_sizes, config.fusion_hidden_size = [0, 1, 2, 3], [32, 64, 128, 128], 64
    return Wrapped(DPTForDepthEstimation(config), lambda inner, x: inner(x).predicted_depth), (torch.randn(1, 3, size, size),)


def up(x: torch.Tensor) -> torch.Tensor:
    """Nearest upsampling by two."""
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


class UpBlock(nn.Module):
    """A generator's residual block: BatchNorm or InstanceNorm, activation, upsampling, two Conv3, and a 1x1 shortcut."""

    def __init__(self, c: int, m: int, norm: Callable[[int], nn.Module] = nn.BatchNorm2d, slope: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2, self.slope = norm(c), norm(m), slope
        self.conv1, self.conv2, self.skip = nn.Conv2d(c, m, 3, padding=1), nn.Conv2d(m, m, 3, padding=1), nn.Conv2d(c, m, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The map of twice the size."""
        h = self.conv1(up(F.leaky_relu(self.norm1(x), self.slope)))
        return self.conv2(F.leaky_relu(self.norm2(h), self.slope)) + self.skip(up(x))


class Up(nn.Module):
    """Nearest upsampling by two."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The map of twice the size."""
        return up(x)


def _blocks(widths: tuple[int, ...], size: int = 4, **config: Any) -> Built:
    layers = [UpBlock(a, b, **config) for a, b in zip(widths, widths[1:], strict=False)]
    last = [nn.BatchNorm2d(widths[-1]), nn.ReLU(), nn.Conv2d(widths[-1], 3, 3, padding=1), nn.Tanh()]
    return nn.Sequential(*layers, *last), (torch.randn(1, widths[0], size, size),)


def _tail(c: int, widths: tuple[int, ...], kernel: int, size: int, *, norm: Any = nn.Identity, trunk: int = 0) -> Built:
    """A trunk of Conv3, then upsampling and Conv for each width, as image translation and super-resolution have it."""
    layers: list[nn.Module] = [m for _ in range(trunk) for m in (nn.Conv2d(c, c, 3, padding=1), nn.ReLU())]
    for a, b in zip((c, *widths), widths, strict=False):
        layers += [Up(), nn.Conv2d(a, b, kernel, padding=kernel // 2), norm(b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(widths[-1], 3, 3, padding=1)), (torch.randn(1, c, size, size),)


class Growing(nn.Module):
    """ProGAN's generator: PixelNorm behind each Conv."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        pairs = [(a, b) for a, b in zip(widths, widths[1:], strict=False)]
        self.first = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairs)
        self.second = nn.ModuleList(nn.Conv2d(b, b, 3, padding=1) for _, b in pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The largest map."""
        for one, two in zip(self.first, self.second, strict=True):
            for conv, resized in ((one, up(x)), (two, None)):
                h = F.leaky_relu(conv(x if resized is None else resized), 0.2)
                x = h * torch.rsqrt(h.square().mean(1, keepdim=True) + 1e-8)
        return x


class UNet(nn.Module):
    """UNet3D and Keras's U-Net: Conv blocks, MaxPool, nearest upsampling, Concat.  kernel: of a Conv behind the upsampling."""

    def __init__(self, widths: tuple[int, ...], rank: int, kernel: int = 0) -> None:
        super().__init__()
        conv = (nn.Conv2d, nn.Conv3d)[rank - 2]
        self.pool = (nn.MaxPool2d, nn.MaxPool3d)[rank - 2](2)

        def block(c: int, m: int, between: int) -> nn.Module:
            norms = [nn.GroupNorm(8, n) if rank == 3 else nn.Identity() for n in (between, m)]
            return nn.Sequential(
                conv(c, between, 3, padding=1), norms[0], nn.ReLU(), conv(between, m, 3, padding=1), norms[1], nn.ReLU()
            )  # fmt: skip

        ends = list(zip(widths, widths[1:], strict=False))
        first = zip((1, *widths), widths, strict=False)
        self.down = nn.ModuleList(block(c, m, max(c, m // 2) if rank == 3 else m) for c, m in first)
        self.reduce = nn.ModuleList(conv(b, a, kernel) if kernel else nn.Identity() for a, b in ends[::-1])
        self.up = nn.ModuleList(block(2 * a if kernel else a + b, a, a) for a, b in ends[::-1])
        self.kernel = kernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The map of the input's size."""
        skips = []
        for number, block in enumerate(self.down):
            x = block(self.pool(x) if number else x)
            skips.append(x)
        for number, (reduce, block) in enumerate(zip(self.reduce, self.up, strict=True)):
            h = up(x)
            h = reduce(F.pad(h, (0, 1, 0, 1))) if self.kernel else h
            x = block(torch.cat((skips[-2 - number], h), 1))
        return x


class Head(nn.Module):
    """HRNetV2's head: maps of four sizes resized linearly to the largest, Concat, two 1x1 Conv."""

    def __init__(self, widths: tuple[int, ...], classes: int = 19) -> None:
        super().__init__()
        total = sum(widths)
        self.mix = nn.Sequential(nn.Conv2d(total, total, 1), nn.BatchNorm2d(total), nn.ReLU(), nn.Conv2d(total, classes, 1))

    def forward(self, *maps: torch.Tensor) -> torch.Tensor:
        """The classes at the largest map's size."""
        size = maps[0].shape[2:]
        return self.mix(torch.cat([maps[0], *(F.interpolate(x, size=size, mode="bilinear") for x in maps[1:])], 1))


class Neck(nn.Module):
    """The top-down path of YOLOv5 (kernel 1) or YOLOv3's, by nearest upsampling and Concat."""

    def __init__(self, width: int) -> None:
        super().__init__()

        def mix(c: int, m: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(c, m, 1, bias=False), nn.BatchNorm2d(m), nn.SiLU(), nn.Conv2d(m, m, 3, padding=1), nn.SiLU()
            )

        self.top = mix(4 * width, 2 * width)
        self.mid = nn.ModuleList((mix(4 * width, width), mix(4 * width, width)))
        self.low = nn.ModuleList((mix(3 * width, width), mix(3 * width, width)))

    def forward(self, small: torch.Tensor, middle: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
        """The largest map; two 1x1 Conv read each Concat, as in a C3 block."""
        a = torch.cat((up(self.top(small)), middle), 1)
        b = torch.cat((up(self.mid[0](a) + self.mid[1](a)), large), 1)
        return self.low[0](b) + self.low[1](b)


def _maps(module: nn.Module, widths: tuple[int, ...], size: int) -> Built:
    return module, tuple(torch.randn(1, c, size >> i, size >> i) for i, c in enumerate(widths))


ATTENTION = {"down_block_types": ("DownBlock2D",) * 3 + ("AttnDownBlock2D", "DownBlock2D")}
ATTENTION["up_block_types"] = ("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D", "UpBlock2D")
MODELS: dict[str, tuple[float, Callable[[], Built]]] = {
    "SD VAE decoder": (15.6, lambda: _kl((128, 256, 512, 512), 4, 8)),
    "SD3 and Flux VAE decoder": (15.6, lambda: _kl((128, 256, 512, 512), 16, 8, use_post_quant_conv=False)),
    "VQ-VAE f4 decoder": (13.5, lambda: _vq((128, 256, 512), 8)),
    "Kandinsky MoVQ decoder": (14.2, lambda: _vq((128, 256, 256, 512), 8, latent_channels=4, norm_type="spatial")),
    "TAESD decoder": (10.0, lambda: _decode("AutoencoderTiny", (1, 4, 16, 16))),
    "Asymmetric VAE decoder": (
        13.0,
        lambda: _decode(
            "AsymmetricAutoencoderKL",
            (1, 4, 8, 8),
            down_block_types=("DownEncoderBlock2D",) * 4,
            down_block_out_channels=(128, 256, 512, 512),
            up_block_types=("UpDecoderBlock2D",) * 4,
            up_block_out_channels=(192, 384, 768, 768),
            layers_per_up_block=3,
        ),
    ),
    "DC-AE decoder": (
        11.8,
        lambda: _decode(
            "AutoencoderDC",
            (1, 32, 2, 2),
            upsample_block_type="interpolate",
            decoder_block_out_channels=(32, 64, 128, 128, 256, 256),
            encoder_block_out_channels=(32, 64, 128, 128, 256, 256),
            attention_head_dim=32,
        ),
    ),
    "AudioLDM VAE decoder": (13.5, lambda: _kl((128, 256, 512), 8, 8)),
    "HunyuanVideo VAE decoder": (
        17.9,
        lambda: _decode("AutoencoderKLHunyuanVideo", (1, 16, 5, 8, 8), block_out_channels=(32, 64, 128, 128)),
    ),
    "Qwen-Image VAE decoder": (3.9, lambda: _decode("AutoencoderKLQwenImage", (1, 16, 1, 8, 8), base_dim=32)),
    "SD1.5 UNet": (5.6, lambda: _conditioned(16, (64, 128, 256, 256))),
    "SD x4 upscaler UNet": (
        5.7,
        lambda: _conditioned(
            32,
            (64, 128, 128, 256),
            in_channels=7,
            down_block_types=("DownBlock2D", *("CrossAttnDownBlock2D",) * 3),
            up_block_types=(*("CrossAttnUpBlock2D",) * 3, "UpBlock2D"),
            only_cross_attention=(True, True, True, False),
            use_linear_projection=True,
        ),
    ),
    "DDPM CelebA-HQ UNet": (5.5, lambda: _unet(64, (64, 64, 128, 128, 256), **ATTENTION)),
    "DDPM CIFAR-10 UNet": (
        7.3,
        lambda: _unet(32, (128, 256, 256, 256), down_block_types=("DownBlock2D",) * 4, up_block_types=("UpBlock2D",) * 4),
    ),
    "ADM-like UNet": (
        4.9,
        lambda: _unet(
            32,
            (64, 128, 128, 256),
            down_block_types=("ResnetDownsampleBlock2D",) * 4,
            up_block_types=("ResnetUpsampleBlock2D",) * 4,
        ),
    ),
    "BigGAN-128 generator": (38.2, lambda: _blocks((512, 512, 256, 128, 64, 32))),
    "SNGAN generator 64": (39.5, lambda: _blocks((512, 256, 128, 64, 32))),
    "SNGAN generator 32": (30.1, lambda: _blocks((256, 256, 256, 256))),
    "StarGAN v2 generator": (21.8, lambda: _blocks((256, 128, 64, 32, 16), 8, norm=nn.InstanceNorm2d, slope=0.2)),
    "ProGAN generator": (35.6, lambda: (Growing((128, 128, 128, 64, 32, 16)), (torch.randn(1, 128, 4, 4),))),
    "EDM upsampling layer": (55.6, lambda: _tail(128, (128,), 3, 16)),
    "fast-neural-style": (13.3, lambda: _tail(128, (64, 32), 3, 32, norm=nn.InstanceNorm2d, trunk=10)),
    "MUNIT generator": (24.2, lambda: _tail(256, (128, 64), 5, 16, norm=nn.InstanceNorm2d, trunk=8)),
    "Real-ESRGAN 6B": (7.2, lambda: _tail(64, (64, 64), 3, 16, trunk=90)),
    "SMP Unet resnet18": (15.5, lambda: _smp("Unet", "resnet18")),
    "SMP Unet resnet34": (10.7, lambda: _smp("Unet", "resnet34")),
    "SMP Unet resnet50": (12.6, lambda: _smp("Unet", "resnet50")),
    "SMP Unet efficientnet-b0": (26.2, lambda: _smp("Unet", "efficientnet-b0")),
    "SMP Unet mobilenet_v2": (32.6, lambda: _smp("Unet", "mobilenet_v2")),
    "SMP UnetPlusPlus resnet34": (12.8, lambda: _smp("UnetPlusPlus", "resnet34")),
    "SMP MAnet resnet34": (7.1, lambda: _smp("MAnet", "resnet34")),
    "SMP PSPNet resnet34": (2.9, lambda: _smp("PSPNet", "resnet34")),
    "SMP DeepLabV3Plus resnet34": (0.2, lambda: _smp("DeepLabV3Plus", "resnet34")),
    "SegFormer-B0": (39.0, _segformer),
    "DPT": (1.0, _dpt),
    "HRNetV2-W48 head": (85.3, lambda: _maps(Head((48, 96, 192, 384)), (48, 96, 192, 384), 64)),
    "YOLOv5-like neck": (1.3, lambda: _maps(Reversed(Neck(32)), (64, 64, 128), 32)),
    "UNet3D": (30.2, lambda: (UNet((16, 32, 64, 128), 3), (torch.randn(1, 1, 16, 16, 16),))),
    "Keras-style U-Net": (6.9, lambda: (UNet((32, 64, 128, 256), 2, 2), (torch.randn(1, 1, 64, 64),))),
}
"""Share in percent of the multiply-adds that form fused saves at the published size, and a builder at a small one."""


class Reversed(nn.Module):
    """A module whose inputs come in the other order."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The module's result."""
        return self.inner(*inputs[::-1])


def exported(name: str, exporter: str, folder: Path, *, is_open: bool = False) -> Path:
    """The ONNX file of a model.  is_open: leave all sizes of its inputs open, but for the channels."""
    torch.manual_seed(0)
    module, inputs = MODELS[name][1]()
    path = folder / f"{name.replace(' ', '_')}_{exporter}.onnx"
    names = [f"x{number}" for number in range(len(inputs))]
    axes = [[axis for axis in range(x.dim()) if axis != 1] for x in inputs]
    given: dict[str, Any] = {}
    if is_open and exporter == "dynamo":
        given["dynamic_shapes"] = tuple(dict.fromkeys(own, torch.export.Dim.DYNAMIC) for own in axes)
    elif is_open:
        given |= {"input_names": names, "dynamic_axes": dict(zip(names, axes, strict=True))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            inputs,
            path,
            dynamo=exporter == "dynamo",
            opset_version=18,
            external_data=False,
            verbose=False,
            **given,
        )
    return path


def measured(path: Path) -> dict[str, Any]:
    """The sites that the rules find in a file, and the shares that they save."""
    model = onnx.load(path)
    result = convpool.optimize(model, target="cpu")
    fused = convpool.optimize(model, target="cpu", upsampling="fused", check=0).report
    counts = [(report.summary.model_macs_before, report.summary.model_macs_after) for report in (fused, result.report)]
    shares = [None if before is None or after is None else round(100 * (1 - after / before), 1) for before, after in counts]
    sites = Counter(site.rule for site in result.report.sites if site.status == "rewritten")
    reasons = Counter(site.obstacle for site in result.report.sites if site.status == "rejected")
    return {"sites": dict(sites), "saved": shares[0], "auto": shares[1], "left": dict(reasons), "checked": True}


def main() -> int:
    """Export, rewrite, check, and print a row for each model and exporter; 1 where a check fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="models whose name has this in it")
    parser.add_argument("--exporter", choices=("torchscript", "dynamo", "both"), default="both")
    parser.add_argument("--open", action="store_true", help="leave sizes of the inputs open")
    parser.add_argument("--export", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    exporters = ("torchscript", "dynamo") if options.exporter == "both" else (options.exporter,)
    rows, failed = [], False
    with tempfile.TemporaryDirectory() as temporary:
        for name, (expected, _) in MODELS.items():
            if options.names and not any(word in name for word in options.names):
                continue
            for exporter in exporters:
                row: dict[str, Any] = {"name": name, "exporter": exporter, "review": expected}
                try:
                    path = exported(name, exporter, options.export or Path(temporary), is_open=options.open)
                    row |= {} if options.export else measured(path)
                    path.unlink() if not options.export else None
                except ConvpoolError as error:
                    failed, row["error"] = True, first_line(error)
                except Exception as error:  # the exporters' errors share no base class, nor do missing packages
                    row["error"] = f"no export: {type(error).__name__}: {first_line(error)}"
                rows.append(row)
                print(json.dumps(row), flush=True)
                if options.json:
                    options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
