# SPDX-License-Identifier: Apache-2.0
"""onnxruntime on this machine's CPU: optimized models against their originals, run in turn.

    python -m benchmarks model_times [--json FILE] [--rounds N]

Every row times the original, a second session of the original (its ratio to the first is the noise of the harness) and
the optimized model in turn, each as if by itself, and compares medians.  Outputs are checked before.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from rich.console import Console
from rich.progress import track
from rich.table import Table

import convpool
from convpool.check.session import Session, time_sessions
from convpool.ir.model import LoadedModel
from models import digits, generators

THREADS = 2
OPTIONS = {"lowering": "auto"}
"""Options of `convpool.optimize` for every row: standard operators only."""
LAYERS = [  # batch, C, size, M, kernel
    (1, 64, 56, 64, 3),
    (1, 256, 28, 256, 3),
    (8, 128, 32, 128, 3),
    (1, 3, 224, 64, 3),
    (1, 512, 14, 512, 3),
    (4, 64, 64, 128, 3),
    (8, 32, 32, 64, 5),
    (1, 256, 56, 128, 1),
]
"""Convolutions with `same` padding in front of a 2x2 pooling, as they occur in discriminators, DenseNet and LeNet."""
NETWORKS = {
    "sngan64, batch 8": ("sngan64", 8),
    "wgan_gp, batch 8": ("wgan_gp", 8),
    "wgan_gp_slices, batch 8": ("wgan_gp_slices", 8),
    "stargan_v2, batch 1": ("stargan_v2", 1),
    "biggan128, batch 8": ("biggan128", 8),
    "biggan256, batch 1": ("biggan256", 1),
    "densenet121, batch 1": ("densenet121", 1),
}
LENET_BATCHES = (1, 8, 32)


def measure(model, arrays: dict[str, np.ndarray], rounds: int) -> dict[str, float]:
    """Medians in milliseconds of original and optimized model, their ratio, and the ratio of two equal originals."""
    result = convpool.optimize(model, **OPTIONS, check=1)
    models = {"original": model, "again": model, "optimized": result.model}
    sessions = {name: Session(LoadedModel(m, None, 0), optimize=True, threads=THREADS, spin=True) for name, m in models.items()}
    times = time_sessions(sessions, arrays, rounds, budget_s=30)
    return {
        "original_ms": times["original"] / 1e3,
        "optimized_ms": times["optimized"] / 1e3,
        "speedup": times["original"] / times["optimized"],
        "noise": times["original"] / times["again"],
        "lowerings": sorted({s.lowering for s in result.report.sites if s.lowering}),
    }


def rows(rounds: int):
    """Every row with its name and kind."""
    work = [("layer", f"{n}x{c}x{s}x{s} to {m}, {k}x{k}", (n, c, s, m, k)) for n, c, s, m, k in LAYERS]
    work += [("network", name, entry) for name, entry in NETWORKS.items()]
    work += [("network", f"lenet5_digits, batch {batch}", batch) for batch in LENET_BATCHES]
    for kind, name, entry in track(work, description="timing", transient=True):
        if kind == "layer":
            n, c, s, m, k = entry
            model = generators.generate("conv_pool", batch=n, channels=c, size=s, filters=m, kernel=k)
            arrays = generators.random_inputs(model)
        elif isinstance(entry, tuple):
            model = generators.generate(entry[0], batch=entry[1])
            arrays = generators.random_inputs(model)
        else:
            model = onnx.load(digits.MODEL_PATH)
            images, _ = digits.load_test_set()
            arrays = {model.graph.input[0].name: images[:entry]}
        yield {"kind": kind, "name": name, **measure(model, arrays, rounds)}


def markdown(record: dict) -> str:
    """The record as the README's table."""
    lines = ["| | original, ms | optimized, ms | speed-up |", "|---|---|---|---|"]
    for row in record["rows"]:
        lines.append(f"| {row['name']} | {row['original_ms']:.2f} | {row['optimized_ms']:.2f} | {row['speedup']:.2f} |")
    lines.append(f"| geometric mean of the layers | | | {record['layers_geometric_mean']:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print the table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--rounds", type=int, default=41)
    options = parser.parse_args()
    found = list(rows(options.rounds))
    table = Table("row", "original ms", "optimized ms", "speed-up", "noise", "lowering", box=None)
    for row in found:
        table.add_row(
            row["name"],
            f"{row['original_ms']:.3f}",
            f"{row['optimized_ms']:.3f}",
            f"{row['speedup']:.2f}",
            f"{row['noise']:.2f}",
            "+".join(row["lowerings"]),
        )
    Console().print(table)
    mean = math.exp(statistics.fmean(math.log(row["speedup"]) for row in found if row["kind"] == "layer"))
    print(f"geometric mean over the {len(LAYERS)} layers: {mean:.2f}")
    if options.json:
        record = {
            "onnxruntime": onnxruntime.__version__,
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "threads": THREADS,
            "options": OPTIONS,
            "rounds": options.rounds,
            "layers_geometric_mean": mean,
            "rows": found,
        }
        options.json.write_text(json.dumps(record, indent=2) + "\n")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
