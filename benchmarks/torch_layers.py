# SPDX-License-Identifier: Apache-2.0
"""The 20 layers of suita-table2 in PyTorch, against PyTorch's own conv2d and avg_pool2d with cudnn.benchmark.

    python -m benchmarks torch_layers --json benchmarks/results/h200_torch_layers.json

Batch 64, 3x3, padding 1, pooling 2x2, channels last, no bias, each captured in a CUDA graph; forward, and forward with the
gradients of input and weight.  Times are medians of replays, in microseconds of one pass.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import convpool.torch

SIZES, CHANNELS = (8, 16, 32, 64), (32, 64, 128, 256, 512)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
PASSES = ("forward", "training")
WINDOW = ([2, 2], [1, 1], [1, 1, 1, 1], [1, 1])


def original(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """PyTorch's two operators."""
    return F.avg_pool2d(F.conv2d(x, w, padding=1), 2)


def ours(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The function under test."""
    return convpool.torch.conv_avg_pool2d(x, w, padding=1, pool_size=2)


def box_then_cudnn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Box mean by its kernel, convolution by cuDNN; the box mean is kept for the backward."""
    return F.conv2d(torch.ops.convpool.box_mean(x, *WINDOW), w, stride=2)


METHODS = {"original": original, "convpool": ours, "box_then_cudnn": box_then_cudnn}


def captured(run: Callable[[], Any], calls: int = 1) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of `calls` calls, and what the last one returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # cuDNN allocates in its first call
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    gc.collect()  # a graph that is destroyed during a capture spoils it, and PyTorch no longer collects before one
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            for _ in range(calls - 1):
                run()
            found = run()
    finally:
        gc.enable()
    return graph, found


def graph_time(run: Callable[[], Any], *, calls: int = 10, replays: int = 15) -> float:
    """Microseconds of one call, from graphs of `calls` calls."""
    graph, _ = captured(run, calls)
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # so long that the replay is queued before the clock starts
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def time_layer(size: int, channels: int, dtype: torch.dtype, training: bool, methods: list[str]) -> dict[str, float]:
    """Microseconds by method."""
    made = {"dtype": dtype, "device": "cuda"}
    x = torch.randn(64, channels, size, size, **made).contiguous(memory_format=torch.channels_last).requires_grad_(training)
    w = torch.randn(channels, channels, 3, 3, **made).div_(3 * channels**0.5)
    w = w.contiguous(memory_format=torch.channels_last).requires_grad_(training)
    grad = torch.randn(64, channels, size // 2, size // 2, **made).contiguous(memory_format=torch.channels_last)
    found = {}
    for name in methods:
        method = METHODS[name]

        def forward(method: Any = method) -> Any:
            return method(x, w)

        def step(method: Any = method) -> Any:
            return torch.autograd.grad(method(x, w), [x, w], grad)

        forward()
        found[name] = graph_time(step if training else forward)
    return found


def main() -> None:
    """Times what the arguments name, prints a table and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--passes", choices=PASSES, action="append")
    parser.add_argument("--method", choices=METHODS, action="append")
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    methods = ["original", *(options.method or [name for name in METHODS if name != "original"])]
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "commit": options.commit,
        "layers": [],
        "ratios": {},
    }
    for dtype in options.dtype or DTYPES:
        for passes in options.passes or PASSES:
            ratios: dict[str, list[float]] = {name: [] for name in methods[1:]}
            for size in SIZES:
                for channels in CHANNELS:
                    times = time_layer(size, channels, DTYPES[dtype], passes == "training", methods)
                    record["layers"].append({"dtype": dtype, "pass": passes, "size": size, "channels": channels, "us": times})
                    shown = ", ".join(f"{name} {value:.1f}" for name, value in times.items())
                    print(f"{dtype} {passes} {size}x{size} C={channels}: {shown} us", flush=True)
                    for name in methods[1:]:
                        ratios[name].append(times["original"] / times[name])
            for name, values in ratios.items():
                mean, least = statistics.geometric_mean(values), min(values)
                record["ratios"][f"{dtype} {passes} {name}"] = {"geometric_mean": mean, "least": least}
                print(f"{dtype} {passes} {name}: {mean:.2f} times as fast (geometric mean), {least:.2f} the least", flush=True)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
