# SPDX-License-Identifier: Apache-2.0
"""Training steps of discriminators and generators in PyTorch: the original against `convpool.torch.optimize`d.

    python -m benchmarks torch_training --json benchmarks/results/h200_torch_training.json

A step is forward, loss and the gradients of all parameters, without the optimizer's update; bf16, channels last, in a CUDA
graph, cudnn.benchmark on.  Times are medians of replays, in microseconds; "eager" are those of steps that are not captured.
Memory is the peak of an eager step over what was there before it.  --compile adds steps of both under a mode of torch.compile;
max-autotune-no-cudagraphs takes minutes to compile, and steps of reduce-overhead are timed in turn, as eager ones are.  It has
no second derivatives, so penalties are left out.  --combo-kernels lets its compiler join small independent kernels.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor
from torch import nn

import convpool.torch
from benchmarks.torch_layers import graph_time
from convpool.torch.backend import convpool as convpool_backend
from models import torch_discriminators as networks
from models.torch_generators import BigGANGenerator, SNGANGenerator

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A loss of the network, real images, generated images, and numbers from 0 to 1."""


def hinge(net: nn.Module, real: torch.Tensor, fake: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """SNGAN's, of real images."""
    return networks.hinge_loss(net(real).float())


def logistic(net: nn.Module, real: torch.Tensor, fake: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """StarGAN v2's, of real images."""
    return networks.logistic_loss(net(real).float())


def logistic_r1(net: nn.Module, real: torch.Tensor, fake: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """StarGAN v2's, of real images, with the R1 penalty."""
    images = real.detach().requires_grad_()
    scores = net(images)
    return networks.logistic_loss(scores.float()) + networks.r1_penalty(scores, images)


def wasserstein(net: nn.Module, real: torch.Tensor, fake: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """WGAN-GP's whole loss of the critic."""
    penalty = networks.gradient_penalty(net, real, fake, mix)
    return net(fake).float().mean() - net(real).float().mean() + 10 * penalty


def energy(net: nn.Module, real: torch.Tensor, fake: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """A loss of a generator's images that needs no discriminator."""
    return net(real).float().square().mean()


@dataclass(frozen=True)
class Case:
    """A network, the size and number of its images, its loss, whether that needs second derivatives, and a generator's noise."""

    build: Callable[[], nn.Module]
    size: int
    batch: int
    loss: Loss
    second: bool = False
    noise: int = 0

    def input(self) -> torch.Tensor:
        """Random images, or noise."""
        shape = (self.batch, self.noise) if self.noise else (self.batch, 3, self.size, self.size)
        made = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        return made if self.noise else made.contiguous(memory_format=torch.channels_last)


CASES = {
    "sngan64": Case(networks.sngan64, 64, 64, hinge),
    "sngan64_without_spectral_norm": Case(lambda: networks.sngan64(spectral_norm=False), 64, 64, hinge),
    "sngan128": Case(networks.sngan128, 128, 64, hinge),
    "sngan128_without_spectral_norm": Case(lambda: networks.sngan128(spectral_norm=False), 128, 64, hinge),
    "stargan_v2": Case(networks.StarGANv2, 256, 8, logistic),
    "stargan_v2_r1": Case(networks.StarGANv2, 256, 8, logistic_r1, True),
    "wgan_gp32": Case(networks.WGANGP32, 32, 64, wasserstein, True),
    "wgan_gp64": Case(networks.WGANGP64, 64, 64, wasserstein, True),
    "sngan64_generator": Case(SNGANGenerator, 64, 64, energy, noise=128),
    "biggan128_generator": Case(BigGANGenerator, 128, 32, energy, noise=120),
}


def step_of(net: nn.Module, case: Case) -> Callable[[], Any]:
    """A function that makes one step's gradients."""
    real, fake = case.input(), case.input()
    mix = torch.rand(case.batch, 1, 1, 1, device="cuda", dtype=torch.bfloat16)
    parameters = list(net.parameters())

    def step() -> Any:
        return torch.autograd.grad(case.loss(net, real, fake, mix), parameters)

    return step


def peak_memory(step: Callable[[], Any]) -> int:
    """Bytes of an eager step beyond what was there before it."""
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def eager_times(*steps: Callable[[], Any], rounds: int = 20) -> list[float]:
    """Median microseconds of steps that are not captured, from an idle GPU to an idle one, in turn: hosts vary."""
    times: list[list[float]] = [[] for _ in steps]
    for number in range(3 + rounds):
        for step, found in zip(steps, times, strict=True):
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            if number >= 3:
                found.append((time.perf_counter() - start) * 1e6)
    return [statistics.median(found) for found in times]


def measure(case: Case, mode: str | None) -> dict[str, Any]:
    """Times and memory of both."""
    torch.manual_seed(0)
    original = case.build().cuda().to(torch.bfloat16, memory_format=torch.channels_last).train()
    images = case.input().requires_grad_(case.second)
    optimized, report = convpool.torch.optimize(copy.deepcopy(original), images)
    found: dict[str, Any] = {"pairs": sum(site.status == "rewritten" for site in report.sites)}
    steps, compiled = {"original": step_of(original, case), "convpool": step_of(optimized, case)}, {}
    for name, step in steps.items():  # captured first: behind eager steps PyTorch cannot capture BigGAN's generator
        found[name] = {"us": graph_time(step, calls=1), "peak_bytes": peak_memory(step)}
        if mode and not case.second:
            ours: dict[str, Any] = {"backend": convpool_backend, "options": {"inner": "inductor"} if mode == "default" else None}
            given = {} if name == "original" else ours
            fast = torch.compile(original, fullgraph=True, **given, **({"mode": mode} if mode != "default" else {}))
            compiled[name] = step_of(fast, case)
            if mode != "reduce-overhead":
                found[name]["compiled_us"] = graph_time(compiled.pop(name), calls=1)
                torch._dynamo.reset()
    for name, us in zip(compiled, eager_times(*compiled.values()), strict=True):  # CUDA graphs of their own: no capture
        found[name]["compiled_us"] = us
    if compiled:
        torch._dynamo.reset()
    for name, us in zip(steps, eager_times(*steps.values()), strict=True):
        found[name]["eager_us"] = us
    return found


def main() -> int:
    """Measures the cases named, prints a table and writes the record after each; 1 if one could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", nargs="*", choices=[[], *CASES], help="default: all")
    parser.add_argument("--compile", choices=("default", "reduce-overhead", "max-autotune-no-cudagraphs"))
    parser.add_argument("--combo-kernels", action="store_true", help="with --compile, for both")
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    inductor.combo_kernels = options.combo_kernels
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "commit": options.commit,
        "compile": options.compile,
        "combo_kernels": options.combo_kernels,
        "steps": {},
    }
    failed = False
    for name in options.case or CASES:
        try:
            found = record["steps"][name] = measure(CASES[name], options.compile)
        except RuntimeError:  # a capture that did not succeed, or memory; the other cases may
            traceback.print_exc()
            print(f"{name}: not measured", flush=True)
            failed = True
            continue
        print(line_of(name, found), flush=True)
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(failed)


def line_of(name: str, found: dict[str, Any]) -> str:
    """Return the line printed for a case."""
    one, two = found["original"], found["convpool"]
    text = f"{name}: {one['us']:.0f} -> {two['us']:.0f} us ({one['us'] / two['us']:.2f} times), "
    text += f"eager {one['eager_us']:.0f} -> {two['eager_us']:.0f} us, "
    text += f"{one['peak_bytes'] / 2**20:.0f} -> {two['peak_bytes'] / 2**20:.0f} MiB"
    if "compiled_us" in one:
        text += f", compiled {one['compiled_us']:.0f} -> {two['compiled_us']:.0f} us"
        text += f" ({one['compiled_us'] / two['compiled_us']:.2f} times)"
    return text


if __name__ == "__main__":
    sys.exit(main())
