# SPDX-License-Identifier: Apache-2.0
"""The tactics that the library chooses, for every row of every benchmark suite and 2,000 random problems.  ``python -m
tests.golden.tactics`` compares the library's choices with those on record and names what differs; ``--write`` records anew. Needs
no GPU: the device is described to the library."""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
from itertools import product
from pathlib import Path

PATH = Path(__file__).with_name("tactics.json")
ANY_WORKSPACE_BYTES = 2**40
H200 = {"cc": 90, "multiprocessors": 132, "shared_bytes": 232448}
A100 = {"cc": 80, "multiprocessors": 108, "shared_bytes": 166912}
RANDOM_PROBLEMS = 2000
RECORDED_SUITES = ("suita-table1", "suita-table2", "tokura", "densenet", "batch1", "networks", "plain")
DTYPES = ({"dtype": "float16"}, {"dtype": "bfloat16"}, {"dtype": "float32", "allow_tf32": True}, {"dtype": "float32"})


def suite_problems() -> list[tuple[str, dict]]:
    """(name, arguments of `convpool.cuda.Problem`) of all suites, in every precision and layout."""
    from benchmarks.layers.rows import LAYOUTS, PRECISIONS
    from benchmarks.layers.suites import SUITES

    every = product([(suite, row) for suite in RECORDED_SUITES for row in SUITES[suite][0]], PRECISIONS, LAYOUTS)
    return [(f"{suite} {row.name} {given} {layout}", row.problem(given, layout)) for (suite, row), given, layout in every]


def upsampled_problems() -> list[tuple[str, dict]]:
    """Layers of generators, decoders and U-Nets, each a nearest upsampling by 2 and a 3x3 convolution: n, c, m, size of X."""
    layers = [
        (1, 512, 512, 64), (1, 512, 512, 128), (1, 256, 256, 256), (2, 1280, 1280, 32), (2, 640, 640, 64), (64, 256, 256, 16),
        (64, 1024, 512, 4), (64, 128, 64, 32), (32, 384, 192, 32), (32, 1536, 1536, 4), (1, 64, 64, 256), (8, 512, 256, 16),
        (8, 256, 128, 32), (1, 512, 512, 32), (1, 512, 512, 4), (1, 1024, 1024, 8), (4, 40, 24, 100),
    ]  # fmt: skip
    usual, found = dict(kernel_shape=3, pool_kernel_shape=1, pads=1, upsample=2, bias=True), []
    for (n, c, m, size), (number, dtype), layout in product(layers, enumerate(DTYPES), ("NHWC", "NCHW")):
        problem = dict(n=n, c=c, m=m, spatial=(size, size), layout=layout) | usual | dtype
        found.append((f"upsampled {n}x{c}-{m} {size} {number} {layout}", problem))
    return found


def random_problems(count: int) -> list[dict]:
    """Legal problems: rewritten pairs of 3 to 2048 channels, with and without what is fused with them."""
    rng = random.Random(7)
    found: list[dict] = []
    while len(found) < count:
        rank = rng.choice((1, 2, 2, 2, 2, 2, 2, 2, 2, 3))
        size = rng.choice((7, 8, 12, 14, 16, 28, 32, 33, 56, 64, 112, 128) if rank < 3 else (6, 8, 9, 12))
        kernel, pool = rng.choice((1, 1, 2, 3, 3, 3, 3, 4, 5, 7)), rng.choice((1, 2, 2, 2, 2, 3, 4))
        pad, stride = rng.choice((0, kernel // 2, kernel // 2)), rng.choice((1, 1, 1, 2))
        if (size + 2 * pad - kernel) // stride + 1 < pool:
            continue
        box_pad, pointwise = min(pad, stride * (pool - 1)), kernel == 1 and pad == 0
        layout = rng.choice(("channels_first", "channels_last", "channels_last", "channels_last"))
        problem = {
            "n": rng.choice((1, 1, 2, 8, 32, 64, 65)),
            "c": rng.choice((1, 3, 4, 8, 12, 24, 32, 40, 64, 72, 96, 128, 136, 192, 256, 320, 512, 1024, 2048)),
            "m": rng.choice((1, 8, 10, 16, 24, 32, 64, 72, 96, 128, 136, 192, 256, 320, 512, 1024)),
            "spatial": (size,) * rank,
            "kernel_shape": kernel,
            "pool_kernel_shape": pool,
            "pool_dilations": stride,
            "pool_pads": box_pad,
            "pads": pad - box_pad,
            "pool_strides": stride * pool if pointwise else 1,
            "strides": 1 if pointwise else stride * pool,
            "layout": layout,
            "y_layout": layout if rng.random() < 0.8 else rng.choice(("channels_first", "channels_last")),
            "bias": rng.random() < 0.7,
            "residual": rng.random() < 0.2,
        } | rng.choice(DTYPES)
        if rng.random() < 0.25:
            problem |= {"prologue_affine": rng.random() < 0.5, "prologue_activation": rng.choice((None, "relu", "leaky_relu"))}
        if rng.random() < 0.2:
            problem |= {"activation": rng.choice(("relu", "leaky_relu", "tanh", "clip"))}
        if rng.random() < 0.05:
            problem["group"] = rng.choice([g for g in (2, 3, 4, 8) if problem["c"] % g == 0 and problem["m"] % g == 0] or [1])
        found.append(problem)
    return found


def choices(problems: list[dict]) -> list[list]:
    """For each: the tactics chosen on an H200 with any workspace and with none, on an A100 with any; and a digest of the
    tactics that run it on an H200."""
    from convpool import cuda

    rows = []
    for arguments in problems:
        problem = cuda.Problem(**arguments)
        asked = ((ANY_WORKSPACE_BYTES, H200), (0, H200), (ANY_WORKSPACE_BYTES, A100))
        chosen = [problem.default_tactic(max_workspace_bytes=most, **device).id for most, device in asked]
        usable = [t.id for t in cuda.tactics() if problem.why_not(t, cc=90, shared_bytes=H200["shared_bytes"]) is None]
        rows.append([*chosen, hashlib.sha256(json.dumps(sorted(usable)).encode()).hexdigest()[:12]])
    return rows


def compute() -> dict[str, list]:
    """Choices by problem: of the suites with the measured rows too, of the random ones by the cost rule."""
    named = suite_problems() + upsampled_problems()
    found = dict(zip((name for name, _ in named), choices([arguments for _, arguments in named]), strict=True))
    # The library reads CONVPOOL_TUNED once in a process.
    asked = json.dumps([arguments for _, arguments in named] + random_problems(RANDOM_PROBLEMS))
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden.tactics", "--answer"], input=asked, capture_output=True, text=True,
        check=True, env={**os.environ, "CONVPOOL_TUNED": "off"},
    )  # fmt: skip
    by_rule = json.loads(done.stdout)
    found |= {f"{name}, by rule": row for (name, _), row in zip(named, by_rule, strict=False)}
    return found | {f"random {i}, by rule": row for i, row in enumerate(by_rule[len(named) :])}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.tactics", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="record the choices of this library")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        print(json.dumps(choices(json.load(sys.stdin))))
        return 0
    found = compute()
    if options.write:
        PATH.write_text(json.dumps(found, separators=(",", ":")).replace("],", "],\n") + "\n")
        print(f"{PATH.name}: {len(found)} problems")
        return 0
    wanted = json.loads(PATH.read_text())
    differing = [name for name in wanted if found.get(name) != wanted[name]]
    for name in differing:
        print(f"{name}: got {found.get(name)}, expected {wanted[name]}")
    print(f"{len(wanted)} problems, {len(differing)} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
