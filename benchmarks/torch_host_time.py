# SPDX-License-Identifier: Apache-2.0
"""Host time of an eager call of `convpool.torch.conv_avg_pool2d`, beside PyTorch's convolution and pooling.

    python -m benchmarks torch_host_time [--layer N,C,M,H,W ...] [--rounds 100] [--commit REVISION] [--json FILE]

Layers are 3x3 convolutions of padding 1 with a bias, then 2x2 pooling.  What is timed is how long the host takes to queue a
call, as in `benchmarks.host_time`: medians of the rounds, in microseconds a call.  "module" is a call of an `nn.Sequential` of
the two layers, "optimized" of what `convpool.torch.optimize` makes of it.  All calls are planned before.  Exits with 1 if a
function's call takes longer than PyTorch's two.

Needs a GPU and PyTorch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.host_time import LAYERS, time_calls
from convpool.torch import conv_avg_pool2d, optimize


class Kind(NamedTuple):
    """The kind of a call: type, memory order, derivatives of input and weight recorded or not."""

    dtype: torch.dtype
    order: torch.memory_format
    recorded: bool = False


KINDS = {
    "fp16, channels last": Kind(torch.float16, torch.channels_last),
    "fp16, contiguous": Kind(torch.float16, torch.contiguous_format),
    "fp32, channels last": Kind(torch.float32, torch.channels_last),
    "fp32, contiguous": Kind(torch.float32, torch.contiguous_format),
    "fp16, channels last, derivatives recorded": Kind(torch.float16, torch.channels_last, True),
}
COLUMNS = {"torch_us": "PyTorch", "convpool_us": "convpool", "module_us": "module", "optimized_us": "optimized"}


def times_of(layer: tuple[int, ...], kind: Kind, rounds: int) -> dict[str, float]:
    """Microseconds of each column."""
    n, c, m, h, w = layer
    module: nn.Module = nn.Sequential(nn.Conv2d(c, m, 3, padding=1), nn.AvgPool2d(2))
    module = module.to("cuda", kind.dtype, memory_format=kind.order).requires_grad_(kind.recorded)
    x = torch.randn(n, c, h, w, device="cuda", dtype=kind.dtype).contiguous(memory_format=kind.order)
    x.requires_grad_(kind.recorded)
    weight, bias = (parameter for parameter in module.parameters())
    optimized, _ = optimize(module, x)
    bodies: dict[str, Callable[[], Any]] = {
        "torch_us": lambda: F.avg_pool2d(F.conv2d(x, weight, bias, padding=1), 2),
        "convpool_us": lambda: conv_avg_pool2d(x, weight, bias, padding=1, pool_size=2),
        "module_us": lambda: module(x),
        "optimized_us": lambda: optimized(x),
    }
    with torch.set_grad_enabled(kind.recorded):
        return time_calls(bodies, rounds, torch.cuda.synchronize)


def main(arguments: list[str] | None = None) -> int:
    """Prints a table, writes the record; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks torch_host_time", description=__doc__.splitlines()[0])
    parser.add_argument("--layer", action="append", metavar="N,C,M,H,W", help=f"may be repeated; default: {' '.join(LAYERS)}")
    parser.add_argument("--rounds", type=int, default=100, help="of 50 calls each (default: 100)")
    parser.add_argument("--commit", default="", help="written into the record")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times")
    options = parser.parse_args(arguments)
    layers = [tuple(map(int, text.split(","))) for text in options.layer or LAYERS]
    if any(len(layer) != 5 for layer in layers):
        parser.error("--layer: five numbers; expected N,C,M,H,W")
    print(f"{'layer':>18}" + "".join(f"{title:>11}" for title in COLUMNS.values()))
    rows: list[dict[str, Any]] = []
    for name, kind in KINDS.items():
        for layer in layers:
            times = times_of(layer, kind, options.rounds)
            rows.append({"kind": name, "layer": list(layer), **times})
            print(
                f"{','.join(map(str, layer)):>18}" + "".join(f"{times[key]:11.1f}" for key in COLUMNS) + f"   {name}", flush=True
            )
    if options.json:
        machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": options.commit}
        options.json.write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n")
    return 1 if any(row["convpool_us"] > row["torch_us"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
