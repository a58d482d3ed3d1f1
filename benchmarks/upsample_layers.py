# SPDX-License-Identifier: Apache-2.0
"""Nearest upsampling by 2 and a 3x3 convolution: 15 layers of decoders, generators and U-Nets on a GPU.

    python -m benchmarks upsample_layers --json benchmarks/results/h100_upsample_layers.json

Channels last, with a bias, each captured in a CUDA graph; medians of replays, in microseconds.  "forward" has the weights summed
beforehand: the library's kernel, PyTorch's interpolate and conv2d, and cuDNN's transposed convolution.  "training" is forward
with the gradients of input, weight and bias, the weights summed in each call.  The roof is
the larger of 16 products for each pixel of the small map and pair of channels at PEAKS, and of the bytes read and written at
BYTES_PER_US.  Every result is compared with PyTorch's before it is timed.  --device cpu compares on tiny maps and times nothing.
--random: random layers for so many seconds by every tactic, and how far the library's choice is from the fastest.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import convpool.torch
from benchmarks.torch_layers import graph_time
from convpool import cuda
from convpool.cuda.timing import GraphTimer
from convpool.torch.upsampling import summed_weights
from models.decoders import UPSAMPLED_LAYERS

DTYPES = {"fp16": torch.float16, "tf32": torch.float32}
PEAKS = {"fp16": 790e6, "tf32": 395e6}
"""Floating-point operations a microsecond of an H100's tensor cores, as measured."""
BYTES_PER_US = 3.0e6
TOLERANCE = 5e-3
"""The largest error of float16 and TF32, relative, by norms."""

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def two_operators(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """PyTorch's interpolate and conv2d."""
    return F.conv2d(F.interpolate(x, scale_factor=2.0), w, b, padding=1)


def ours(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The function under test."""
    return convpool.torch.upsample_conv2d(x, w, b, scale_factor=2, padding=1)


def layer(shape: tuple[int, ...], dtype: torch.dtype, device: str, gradients: bool) -> Tensors:
    """Input, weight and bias."""
    n, c, m, *size = shape
    made = [torch.randn(sizes, device=device) for sizes in ((n, c, *size), (m, c, 3, 3), (m,))]
    made[1] /= math.sqrt(9 * c)
    x, w = (t.to(dtype, memory_format=torch.channels_last).requires_grad_(gradients) for t in made[:2])
    return x, w, made[2].to(dtype).requires_grad_(gradients)


def problem(shape: Sequence[int], precision: str) -> cuda.Problem:
    """A layer as the library knows it."""
    n, c, m, *size = shape
    sizes = dict(n=n, c=c, m=m, spatial=tuple(size), kernel_shape=3, pool_kernel_shape=1, upsample=2, pads=1, bias=True)
    dtype = str(DTYPES[precision]).removeprefix("torch.")
    return cuda.Problem(**sizes, dtype=dtype, allow_tf32=precision == "tf32", layout="NHWC")  # type: ignore[arg-type]


def kernel(shape: Sequence[int], precision: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Callable:
    """The library's kernel, its weights summed beforehand; on a CPU the function."""
    if not x.is_cuda:
        return lambda: ours(x, w, b)
    plan = cuda.Plan(problem(shape, precision))
    y, memory = (
        torch.empty(n, device="cuda", dtype=t) for n, t in ((plan.y_shape, x.dtype), (plan.workspace_bytes, torch.uint8))
    )
    arrays = *(t.permute(0, 2, 3, 1) for t in (x, w)), y

    def run(prepared: bool = True) -> torch.Tensor:
        stream = torch.cuda.current_stream().cuda_stream
        plan.launch(*arrays, b=b, workspace=memory, weights_prepared=prepared, stream=stream)
        return y.permute(0, 3, 1, 2)

    run(prepared=False)
    return run


def compare(found: Any, expected: Any) -> None:
    """AssertionError where tensors are not the same within the rounding of their type."""
    for a, b in zip(found, expected, strict=True):
        error = float((a.float() - b.float()).norm() / b.float().norm())
        assert error < TOLERANCE, f"another result: {error:.1e} of its norm"


def measure(shape: tuple[int, ...], precision: str, device: str, time: Callable[[Callable[[], Any]], float]) -> dict[str, Any]:
    """Microseconds by pass and method, and the share of the roof."""
    x, w, b = layer(shape, DTYPES[precision], device, gradients=False)
    transposed = summed_weights(w.float(), (2, 2)).to(w.dtype).contiguous(memory_format=torch.channels_last)
    methods: dict[str, Callable[[], torch.Tensor]] = {
        "two operators": lambda: two_operators(x, w, b),
        "transposed": lambda: F.conv_transpose2d(x, transposed, b, stride=2, padding=1),
        "convpool": kernel(shape, precision, x, w, b),
    }
    found: dict[str, dict[str, float]] = {"forward": {}, "training": {}}
    with torch.no_grad():
        expected = two_operators(x, w, b)
        for name, run in methods.items():
            compare([run()], [expected])
            found["forward"][name] = time(run)
    n, c, m, *size = shape
    pixels = n * math.prod(size)
    roof = max(2 * pixels * c * m * 16 / PEAKS[precision], pixels * (c + 4 * m) * x.element_size() / BYTES_PER_US)
    tensors = layer(shape, DTYPES[precision], device, gradients=True)
    grad = torch.randn_like(expected)

    def step(method: Callable) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(method(*tensors), tensors, grad)

    compare(step(ours)(), step(two_operators)())
    for name, method in (("two operators", two_operators), ("convpool", ours)):
        found["training"][name] = time(step(method))
    return {**found, "roof_us": roof}


def time_tactics(problem: cuda.Problem, dtype: torch.dtype, timer: GraphTimer) -> dict[str, float]:
    """Microseconds by tactic, the one that the library chooses first, without those it expects to take 2.2 times as long."""
    x, w, b = (torch.randn(shape, device="cuda").to(dtype) for shape in (problem.x_shape, problem.w_shape, (problem.m,)))
    y, xs = torch.empty(problem.y_shape, device="cuda", dtype=dtype), [x, *(x.clone() for _ in range(3))]
    chosen, us = cuda.Plan(problem), {}
    for tactic in (chosen.tactic, *(t for t in cuda.tactics() if t.family == "upsample" and problem.why_not(t) is None)):
        plan = cuda.Plan(problem, tactic=tactic)
        if tactic.name in us or plan.expected_us > 2.2 * chosen.expected_us:
            continue
        memory = torch.empty(max(plan.workspace_bytes, 1), device="cuda", dtype=torch.uint8)
        plan.launch(x, w, y, b=b, workspace=memory)
        launch = functools.partial(plan.launch, b=b, workspace=memory, weights_prepared=True, stream=timer.stream)
        us[tactic.name] = timer.measure(lambda i, launch=launch: launch(xs[i], w, y), len(xs))["us"]  # type: ignore[misc]
    return us


def random_layers(seconds: float) -> dict[str, list[dict[str, Any]]]:
    """Random layers by precision: batch, channels, size of the small map, and microseconds by tactic."""
    timer, rng, channels = GraphTimer(torch, replays=7), random.Random(1), (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
    found: dict[str, list[dict[str, Any]]] = {precision: [] for precision in DTYPES}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        n, c, m, size = rng.choice((1, 2, 4, 8, 16, 32, 64)), *rng.choices(channels, k=2), rng.choice((4, 8, 16, 32, 64, 128))
        if not c / 4 <= m <= 2 * c or not 2e8 < 32 * n * size**2 * c * m < 8e11 or 4 * n * size**2 * m > 2**28:
            continue
        for precision, dtype in DTYPES.items():
            us = time_tactics(problem((n, c, m, size, size), precision), dtype, timer)
            found[precision].append({"layer": (n, c, m, size), "us": us})
    for precision, layers in found.items():
        ratios = [next(iter(item["us"].values())) / min(item["us"].values()) for item in layers]
        mean, far = statistics.geometric_mean(ratios), sum(ratio > 1.1 for ratio in ratios)
        print(f"{precision}: {len(layers)} layers; chosen over fastest {mean:.3f}, {far} over 1.1, {max(ratios):.2f} at most")
    return found


def main() -> None:
    """Times the layers, prints a line for each and the geometric means, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=DTYPES, action="append")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--random", type=float, metavar="SECONDS")
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.random:
        layers = random_layers(options.random)
        if options.json:
            options.json.write_text(json.dumps(layers) + "\n")
        return
    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = True
    on_gpu = options.device == "cuda"
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "commit": options.commit,
        "layers": [],
        "ratios": {},
    }
    for precision in options.precision or DTYPES:
        ratios: dict[str, list[float]] = {}
        for name, shape in UPSAMPLED_LAYERS.items():
            tiny = (min(shape[0], 4), *(max(n // 64, 3) for n in shape[1:3]), 12, 10)
            found = measure(shape if on_gpu else tiny, precision, options.device, graph_time if on_gpu else lambda run: 0.0)
            if not on_gpu:
                print(f"{precision} {name}: right", flush=True)
                continue
            record["layers"].append({"precision": precision, "layer": name, "shape": shape, **found})
            texts = []
            for passes in ("forward", "training"):
                us = found[passes]
                texts.append(f"{passes} {', '.join(f'{method} {value:.1f}' for method, value in us.items())}")
                for method in us.keys() - {"convpool"}:
                    ratios.setdefault(f"{passes}, over {method}", []).append(us[method] / us["convpool"])
            share = found["roof_us"] / found["forward"]["convpool"]
            print(f"{precision} {name}: {'; '.join(texts)} us; {share:.0%} of the roof", flush=True)
        for name, values in sorted(ratios.items()):
            record["ratios"][f"{precision} {name}"] = {"geometric_mean": statistics.geometric_mean(values), "least": min(values)}
            print(
                f"{precision} {name}: {statistics.geometric_mean(values):.2f} times as fast, {min(values):.2f} the least",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
