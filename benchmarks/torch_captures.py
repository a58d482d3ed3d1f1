# SPDX-License-Identifier: Apache-2.0
"""PyTorch modules as TorchDynamo captures them, on a CPU: which pairs are found, and how long the capture takes.

    python -m benchmarks torch_captures [NAME ...] [--public] [--traps] [--json FILE]

For each network of `models`, with its own widths, or with --public of torchvision, timm and diffusers, of random weights: the
convolutions that are rewritten by `convpool.torch.optimize` in evaluation and in training, and by `convpool.optimize` in its
export by torch.onnx.export; and the processor's seconds of the first two.  --traps: 15 modules whose forward does more than call
layers; whether each is rewritten, and whether outputs and gradients are the original's, also after forward's reads change.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import torch
import torch.nn.functional as F
from torch import nn

import convpool
import convpool.torch
from benchmarks.public_models import MODELS, Built
from models import torch_discriminators as gans
from models import torch_generators as generators
from models import torch_networks as more

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "SNGAN 64x64": (gans.sngan64, (2, 3, 64, 64)),
    "SNGAN 128x128": (gans.sngan128, (2, 3, 128, 128)),
    "projection 64x64": (more.Projection, (2, 3, 64, 64)),
    "WGAN-GP 32x32": (gans.WGANGP32, (2, 3, 32, 32)),
    "WGAN-GP 64x64": (gans.WGANGP64, (2, 3, 64, 64)),
    "StarGAN v2 256x256": (gans.StarGANv2, (2, 3, 256, 256)),
    "BigGAN 128x128": (more.BigGAN, (2, 3, 128, 128)),
    "IGEBM 32x32": (more.IGEBM, (2, 3, 32, 32)),
    "StyleGAN 64x64": (more.StyleGAN, (4, 3, 64, 64)),
    "GAN stability 32x32": (more.Stability, (2, 3, 32, 32)),
    "DVD-GAN": (more.DVDGAN, (2, 3, 4, 64, 64)),
    "DenseNet-121": (more.DenseNet, (2, 3, 224, 224)),
    "DenseNet of short blocks": (lambda: more.DenseNet(12, (6, 6, 6, 6), 10), (2, 3, 64, 64)),
    "LeNet-5": (more.LeNet5, (2, 1, 32, 32)),
    "SNGAN generator 64x64": (generators.SNGANGenerator, (2, 128)),
    "BigGAN generator 128x128": (generators.BigGANGenerator, (2, 120)),
    "VAE decoder": (generators.Decoder, (2, 4, 32, 32)),
    "U-Net": (generators.UNet, (2, 3, 64, 64)),
}
TORCHVISION = ("densenet121", "densenet169", "googlenet", "inception_v3", "squeezenet1_1")
TIMM = (
    "densenet121",
    "densenetblur121d",
    "resnet26d",
    "resnest14d",
    "inception_v4",
    "poolformer_s12",
    "ecaresnet26t",
    "hrnet_w18_small",
)
DIFFUSERS = tuple(MODELS)[:15]
"""Public networks with a pair, or one that something stands between."""
RULES = ("pool_first", "upsample_last", "resize_last")


def public() -> dict[str, Callable[[], Built]]:
    """The public networks, by name; those of diffusers as `benchmarks.public_models` builds them."""
    import timm
    import torchvision

    made: dict[str, Callable[[], Built]] = {}
    for name in TORCHVISION:
        without = {"init_weights": False, "aux_logits": False} if name in ("googlenet", "inception_v3") else {}
        made[f"torchvision {name}"] = lambda name=name, without=without: image(torchvision.models.get_model(name, **without))
    for name in TIMM:
        made[f"timm {name}"] = lambda name=name: image(timm.create_model(name))
    return made | {name: MODELS[name][1] for name in DIFFUSERS}


def image(module: nn.Module, size: int = 160) -> Built:
    """A module, and two images."""
    return module, (torch.randn(2, 3, size, size),)


def rewritten(*reports: Any) -> int:
    """The convolutions that the rules of PyTorch have rewritten, by reports."""
    return sum(site.status == "rewritten" and site.rule in RULES for report in reports for site in report.sites)


def captured(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[int, float]:
    """Rewritten convolutions, and the seconds of a processor that `optimize` takes."""
    torch._dynamo.reset()
    start = time.process_time()
    _, report = convpool.torch.optimize(copy.deepcopy(module), inputs)
    return rewritten(report), time.process_time() - start


def exported(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> int:
    """Rewritten convolutions of the ONNX model that PyTorch exports."""
    buffer = io.BytesIO()
    torch.onnx.export(module, inputs, dynamo=True, verbose=False).save(buffer)
    return rewritten(convpool.optimize(onnx.load_from_string(buffer.getvalue()), check=0).report)


# ---- traps ----


class Trap(nn.Module):
    """A pair, and something beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale, self.kept = nn.Conv2d(3, 8, 3, padding=1), 1.0, None

    def pair(self, x: torch.Tensor) -> torch.Tensor:
        """The pair."""
        return F.avg_pool2d(self.conv(x), 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The pair times the attribute, which a change may set."""
        return self.pair(x) * self.scale


GLOBAL = {"scale": 1.0}


def _no_grad(self: Trap, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        mean = self.pair(x).mean()
    return self.pair(x) - mean


def _branch(self: Trap, x: torch.Tensor) -> torch.Tensor:
    y = self.pair(x)
    return y * 2 if y.sum() > 0 else y * 3


def _printed(self: Trap, x: torch.Tensor) -> torch.Tensor:
    y = self.pair(x)
    print(f"shape {tuple(y.shape)}", file=sys.stderr)
    return y


def _assigned(self: Trap, x: torch.Tensor) -> torch.Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return self.pair(x)


def _kept(self: Trap, x: torch.Tensor) -> torch.Tensor:
    self.kept = self.conv(x)
    return F.avg_pool2d(self.kept, 2)


def _autocast(self: Trap, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = self.pair(x)
    return y.float()


def _hooked() -> Trap:
    module = Trap()
    module.conv.register_forward_hook(lambda module, given, made: made * 2)
    return module


def _normalised() -> Trap:
    module = Trap().train()
    nn.utils.parametrizations.spectral_norm(module.conv)
    return module


TRAPS: dict[str, Any] = {
    "an attribute that changes": Trap.forward,
    "a global that changes": lambda self, x: self.pair(x) * GLOBAL["scale"],
    "torch.no_grad": _no_grad,
    "torch.autocast": _autocast,
    "an attribute that forward assigns": _assigned,
    "a branch by data": _branch,
    "print": _printed,
    "random numbers": lambda self, x: self.pair(x) + torch.rand(()) + torch.randn(8, 1, 1),
    "type()": lambda self, x: self.pair(x) * (2 if type(x) is torch.Tensor else 3),
    "dtype in a dictionary": lambda self, x: self.pair(x) * {torch.float32: 2}.get(x.dtype, 7),
    "parameters()": lambda self, x: self.pair(x) + sum(p.square().sum() for p in self.parameters()),
    "a kept value": _kept,
    "the same tensor twice": lambda self, x: torch.cat([self.pair(x)] * 2, 1) + self.pair(x).repeat(1, 2, 1, 1),
    "a hook": _hooked,
    "spectral normalisation": _normalised,
}
"""A forward, or what makes the module."""


def trapped(given: Any) -> tuple[bool, bool]:
    """Return whether a trap's module is rewritten, and right before and after a change."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    made = given in (_hooked, _normalised)
    module = given() if made else type("Trapped", (Trap,), {} if given is Trap.forward else {"forward": given})()
    x, GLOBAL["scale"], right = torch.randn(4, 3, 16, 16), 1.0, True
    changed, report = convpool.torch.optimize(copy.deepcopy(module), x)
    for _ in range(2):
        results = []
        for net in (module, changed):
            torch.manual_seed(1)
            y = net(x)
            results.append([y, *torch.autograd.grad(y.square().sum(), list(net.parameters()))])
        # In bfloat16 another order of summation is as far off as one rounding of it.
        bound = 2e-2 if given is _autocast else 1e-4
        right &= all(float((a - b).norm()) <= bound * float(a.norm()) for a, b in zip(*results, strict=True))
        module.scale = changed.scale = GLOBAL["scale"] = 3.0
    return rewritten(report) > 0, right


def main() -> int:
    """Prints what the arguments name, and writes the record; 1 if a trap is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network", nargs="*", help="default: all")
    parser.add_argument("--public", action="store_true", help="networks of torchvision, timm and diffusers")
    parser.add_argument("--traps", action="store_true", help="these, and no networks but those named")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    record: dict[str, Any] = {"torch": torch.__version__, "networks": {}, "traps": {}}
    known = (
        public()
        if options.public
        else {name: lambda given=given: (given[0](), (torch.randn(given[1]),)) for name, given in NETWORKS.items()}
    )
    for name in options.network or ([] if options.traps else known):
        module, inputs = known[name]()
        training, seconds = captured(module.train(), inputs)
        with torch.no_grad():
            evaluation, more_seconds = captured(module.eval(), inputs)
        found = {"training": training, "evaluation": evaluation, "onnx": exported(module, inputs)}
        record["networks"][name] = {**found, "seconds": [seconds, more_seconds]}
        print(f"{name}: {found}, captured in {seconds:.1f} and {more_seconds:.1f} s", flush=True)
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    for name, given in TRAPS.items() if options.traps else ():
        record["traps"][name] = found = dict(zip(("rewritten", "right"), trapped(given), strict=True))
        print(f"{name}: {found}", flush=True)
    traps = list(record["traps"].values())
    if traps:
        print(f"{len(traps)} traps: {sum(t['rewritten'] for t in traps)} rewritten, {sum(t['right'] for t in traps)} right")
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(not trap["right"] for trap in traps))


if __name__ == "__main__":
    sys.exit(main())
