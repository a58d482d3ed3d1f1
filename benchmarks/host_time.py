# SPDX-License-Identifier: Apache-2.0
"""Host time of a convolution with pooling: `conv_avg_pool`, `Plan.launch`, `convpool_plan_launch` and PyTorch's two calls.

    python -m benchmarks host_time [--layer N,C,M,H,W ...] [--rounds 200] [--json FILE]

Layers are half precision, channels last: a 3x3 convolution of padding 1, then 2x2 pooling.  What is timed is how long the host
takes to queue a call: 50 calls into an idle stream, one kind after the other and round after round; medians of the rounds, in
microseconds a call.  All calls are planned before.  "bare" are launches of a plan's kernels by the driver, "more" what
convpool_plan_launch takes beyond them, as benchmarks/plan_launch_time.cpp tells, which is compiled on the spot unless
`--plan-launch-time` names it.  Exits with 1 if a time is over its bar.

Needs a GPU, PyTorch and a C++ compiler with CUDA's headers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LAYERS = ("64,256,256,8,8", "64,64,64,64,64", "1,128,128,16,16")
CALLS = 50  # a queue takes about a thousand launches before it makes the host wait
WARM_UP_ROUNDS = 10
BARS_US = {"conv_avg_pool_us": 30.0, "plan_launch_python_us": 10.0, "more_us": 2.0}
COLUMNS = {
    "conv_avg_pool_us": "conv_avg_pool",
    "plan_launch_python_us": "Plan.launch",
    "plan_launch_addresses_us": "of addresses",
    "plan_launch_us": "C launch",
    "bare_us": "bare",
    "more_us": "more",
    "torch_us": "PyTorch",
}


def time_calls(bodies: dict[str, Callable[[], Any]], rounds: int, synchronize: Callable[[], None]) -> dict[str, float]:
    """Median microseconds of a call of each body, timed in turn."""
    times: dict[str, list[float]] = {name: [] for name in bodies}
    for number in range(WARM_UP_ROUNDS + rounds):
        for name, body in bodies.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                body()
            elapsed = time.perf_counter() - start
            if number >= WARM_UP_ROUNDS:
                times[name].append(elapsed / CALLS * 1e6)
    synchronize()
    return {name: statistics.median(found) for name, found in times.items()}


def python_times(layer: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Time calls from Python: `conv_avg_pool`, a launch of its plan, PyTorch's two operators."""
    import torch

    from convpool.cuda import conv_avg_pool, plan_for

    n, c, m, h, w = layer
    x = torch.randn(n, h, w, c, device="cuda", dtype=torch.float16)
    weights = torch.randn(m, 3, 3, c, device="cuda", dtype=torch.float16) / (9 * c) ** 0.5
    bias = torch.randn(m, device="cuda", dtype=torch.float16)
    options = {"pool_kernel_shape": 2, "pool_pads": 1, "strides": 2, "layout": "NHWC"}
    y = conv_avg_pool(x, weights, bias, **options)
    plan = plan_for(x, weights, bias, **options)
    space = torch.empty(max(plan.workspace_bytes, 1), device="cuda", dtype=torch.uint8)
    addresses = [tensor.data_ptr() for tensor in (x, weights, y, bias, space)]
    nchw, oihw = x.permute(0, 3, 1, 2), weights.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
    convolve, pool = torch.nn.functional.conv2d, torch.nn.functional.avg_pool2d
    bodies = {
        "conv_avg_pool_us": lambda: conv_avg_pool(x, weights, bias, **options),
        "plan_launch_python_us": lambda: plan.launch(x, weights, y, b=bias, workspace=space),
        "plan_launch_addresses_us": lambda: plan.launch(
            addresses[0], addresses[1], addresses[2], b=addresses[3], workspace=addresses[4]
        ),
        "torch_us": lambda: pool(convolve(nchw, oihw, bias, padding=1), 2),
    }
    with torch.inference_mode():
        times = time_calls(bodies, rounds, torch.cuda.synchronize)
    chosen = {"tactic": plan.tactic.name, "how_chosen": plan.how_chosen, "workspace_bytes": plan.workspace_bytes}
    return {"layer": list(layer), **chosen, **times}


def cuda_include() -> Path:
    """The folder of cuda.h: the toolkit's, or that of PyPI's runtime headers."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda", "/opt/cuda"]
    packages = [Path(sysconfig.get_paths()["purelib"]) / "nvidia" / name for name in ("cu13", "cuda_runtime")]
    for folder in [Path(home) / "include" for home in homes if home] + [package / "include" for package in packages]:
        if (folder / "cuda.h").exists():
            return folder
    raise SystemExit("cuda.h: not found; expected a CUDA toolkit; set CUDA_HOME, or name a program with --plan-launch-time")


def compiled(folder: Path) -> Path:
    """The program that times convpool_plan_launch."""
    program = folder / "plan_launch_time"
    includes = [f"-I{ROOT / 'plugin' / 'include'}", f"-I{cuda_include()}"]
    source = str(ROOT / "benchmarks" / "plan_launch_time.cpp")
    subprocess.run(["g++", "-O2", "-std=c++17", *includes, source, "-ldl", "-o", str(program)], check=True)
    return program


def c_times(program: Path, layer: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Time convpool_plan_launch, beside launches of its kernels."""
    from convpool.cuda import library

    shape = ",".join(map(str, layer))
    command = [str(program), "--layer", shape, "--rounds", str(rounds), str(library.library_path())]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stderr.strip())
    found = json.loads(done.stdout)
    return {name: found[name] for name in ("kernels", "plan_launch_us", "bare_us", "more_us")}


def over_the_bar(rows: list[dict[str, Any]]) -> list[str]:
    """A sentence for every time that is over its bar."""
    return [
        f"{row['layer']}: {COLUMNS[name]}; got {row[name]:.1f} us, expected at most {bar:g}"
        for row in rows
        for name, bar in BARS_US.items()
        if row[name] > bar
    ]


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"{'layer':>18} {'kernels':>8}" + "".join(f"{title:>14}" for title in COLUMNS.values()) + "   tactic")
    for row in rows:
        times = "".join(f"{row[name]:14.1f}" for name in COLUMNS)
        print(f"{','.join(map(str, row['layer'])):>18} {row['kernels']:8}{times}   {row['tactic']}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks host_time", description=__doc__.splitlines()[0])
    parser.add_argument("--layer", action="append", metavar="N,C,M,H,W", help=f"may be repeated; default: {' '.join(LAYERS)}")
    parser.add_argument("--rounds", type=int, default=200, help="of 50 calls each (default: 200)")
    parser.add_argument("--plan-launch-time", type=Path, metavar="PROGRAM", help="compiled from plan_launch_time.cpp")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times")
    options = parser.parse_args(arguments)
    layers = [tuple(map(int, text.split(","))) for text in options.layer or LAYERS]
    if any(len(layer) != 5 for layer in layers):
        parser.error("--layer: five numbers; expected N,C,M,H,W")
    import torch

    with tempfile.TemporaryDirectory() as folder:
        program = options.plan_launch_time or compiled(Path(folder))
        rows = [python_times(layer, options.rounds) | c_times(program, layer, options.rounds) for layer in layers]
    print_table(rows)
    if options.json:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version()}
        options.json.write_text(json.dumps({**machine, "bars_us": BARS_US, "rows": rows}, indent=1) + "\n")
    for sentence in over_the_bar(rows):
        print(sentence)
    return 1 if over_the_bar(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
