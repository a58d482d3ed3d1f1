# SPDX-License-Identifier: Apache-2.0
"""Convolutions behind resamplings in onnxruntime on this machine's CPU: layers in every form, and whole models.

    python -m benchmarks resizing [NAME ...] [--json FILE] [--rounds N] [--threads N] [--models FILE ...]

Rows are timed as those of `model_times`: the original, the original again (its ratio to the first is the noise of the harness),
and each optimized model in turn, by medians; outputs are checked before.  A layer stands between 1x1 convolutions of 8 channels,
so that onnxruntime's blocked layout is in place on both sides as in a model.  NAME: rows whose name has this in it.  --models:
ONNX files too, as `python -m benchmarks public_models --export FOLDER` writes them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from rich.console import Console
from rich.table import Table

import convpool
from benchmarks.model_times import _cpu_name
from convpool.algebra.expand import FORMS
from convpool.check.session import Session, time_sessions
from convpool.ir.model import LoadedModel
from models.builder import Net
from models.generators import generate, random_inputs

BUDGET_S = 20.0
"""Seconds a row takes at most, checks aside."""
LAYERS = {  # batch, C, M, size of the small map, kernel
    "VAE decoder, 256 to 256, 64x64": (1, 256, 256, 64, 3),
    "VAE decoder, 128 to 128, 128x128": (1, 128, 128, 128, 3),
    "VQGAN, 512 to 512, 16x16": (1, 512, 512, 16, 3),
    "U-Net of SD, 1280 to 1280, 8x8": (1, 1280, 1280, 8, 3),
    "SNGAN generator, 256 to 128, 16x16, batch 8": (8, 256, 128, 16, 3),
    "SNGAN generator, 128 to 64, 32x32, batch 8": (8, 128, 64, 32, 3),
    "BigGAN generator, 1536 to 1536, 4x4": (1, 1536, 1536, 4, 3),
    "BigGAN generator, 384 to 192, 32x32": (1, 384, 192, 32, 3),
    "ESRGAN, 64 to 64, 128x128": (1, 64, 64, 128, 3),
    "MUNIT, 128 to 64, 64x64, 5x5": (1, 128, 64, 64, 5),
    "U-Net, 64 to 32, 128x128": (1, 64, 32, 128, 3),
    "U-Net, 512 to 256, 16x16": (1, 512, 256, 16, 3),
}
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "BigGAN-128 generator": ("biggan_generator", {"batch": 1, "width": 96, "factors": (16, 16, 8, 4, 2, 1)}),
    "SNGAN generator 64, batch 8": ("sngan_generator", {"batch": 8, "width": 64}),
    "SD-style VAE decoder, 256": (
        "vae_decoder",
        {"batch": 1, "size": 32, "widths": (512, 512, 256, 128), "blocks": 3, "groups": 32},
    ),
    "SegFormer-B0's head, 512": ("segformer_head", {"batch": 1, "size": 128}),
    "HRNet-W18's head, 512": ("hrnet_head", {"batch": 1, "size": 128}),
    "U-Net, 256": ("unet_nearest", {"batch": 1, "size": 256, "widths": (32, 64, 128, 256)}),
}


def layer(batch: int, c: int, m: int, *size: int, kernel: int = 3, dtype: str = "float32") -> onnx.ModelProto:
    """A 1x1 convolution, nearest upsampling by two, the convolution, and another of 1x1."""
    net = Net("layer", batch=batch, seed=0, opset=17, dtype=dtype)
    x = net.upsample(net.conv(net.input("x", 8, *size), "before", c, 1), "up")
    net.output(net.conv(net.conv(x, "conv", m, kernel), "after", 8, 1), "y")
    return net.model()


def square(batch: int, c: int, m: int, size: int, kernel: int, dtype: str = "float32") -> onnx.ModelProto:
    """The model of a layer of LAYERS."""
    return layer(batch, c, m, size, size, kernel=kernel, dtype=dtype)


def measure(model: onnx.ModelProto, forms: tuple[str, ...], rounds: int, threads: int) -> dict[str, Any]:
    """Median milliseconds of the original, of the result, and of each form; what was saved."""
    arrays = random_inputs(model)
    result = convpool.optimize(model, target="cpu")
    lowerings = sorted({site.lowering for site in result.report.sites if site.lowering})
    models = {"original": model, "again": model}
    if len(lowerings) != 1 or lowerings[0] not in forms:
        models["auto"] = result.model
    for form in forms:
        given = convpool.optimize(model, target="cpu", upsampling=form, check=0)
        if any(site.lowering == form for site in given.report.sites):
            models[form] = given.model
    sessions = {name: Session(LoadedModel(m, None, 0), optimize=True, threads=threads, spin=True) for name, m in models.items()}
    times = time_sessions(sessions, arrays, rounds, budget_s=BUDGET_S)
    times.setdefault("auto", times.get(lowerings[0], math.nan) if lowerings else times["original"])
    summary = result.report.summary
    counts = summary.model_macs_before, summary.model_macs_after
    row = {
        "times_ms": {name: time / 1e3 for name, time in times.items()},
        "speedup": times["original"] / times["auto"],
        "noise": times["original"] / times["again"],
        "lowerings": lowerings,
        "macs_saved": None if None in counts or not counts[0] else 1 - counts[1] / counts[0],
    }
    if forms:
        best = min(time for name, time in times.items() if name in FORMS)
        row |= {"best_speedup": times["original"] / best, "auto_over_best": times["auto"] / best}
    return row


def models(names: list[str], files: list[Path]) -> Iterator[tuple[str, str, onnx.ModelProto]]:
    """Kind, name and model of each row asked for."""
    for kind, table in (("layer", LAYERS), ("network", NETWORKS)):
        for name in table:
            if not names or any(word in name for word in names):
                entry: Any = table[name]
                yield kind, name, square(*entry) if kind == "layer" else generate(entry[0], **entry[1])
    for path in files:
        yield "file", path.stem, onnx.load(path)


def markdown(record: dict[str, Any]) -> str:
    """The record as a table of the results."""
    lines = ["| | original, ms | speed-up | fastest form | multiply-adds saved | written as |", "|---|---|---|---|---|---|"]
    for row in record["rows"]:
        best = f"{row['best_speedup']:.2f}" if "best_speedup" in row else ""
        saved = "" if row["macs_saved"] is None else f"{100 * row['macs_saved']:.0f}%"
        lines.append(
            f"| {row['name']} | {row['times_ms']['original']:.2f} | {row['speedup']:.2f} | {best} | {saved} | "
            f"{' and '.join(row['lowerings'])} |"
        )
    lines.append(f"| geometric mean of the layers | | {record['layers_geometric_mean']:.2f} | | | |")
    return "\n".join(lines) + "\n"


def public_markdown(record: dict[str, Any]) -> str:
    """The record of `public_models` as a table of the results."""
    by_name: dict[str, dict[str, Any]] = {}
    for row in record["rows"]:
        by_name.setdefault(row["name"], {"review": row["review"]})[row["exporter"]] = row
    lines = ["| | sites | saved by `fused` | saved by cost | published size |", "|---|---|---|---|---|"]
    for name, rows in by_name.items():
        found = [rows[key] for key in ("dynamo", "torchscript") if "error" not in rows.get(key, {"error": ""})]
        sites = " / ".join(dict.fromkeys(str(sum(row["sites"].values())) for row in found)) or "no export"
        shares = [
            " / ".join(dict.fromkeys(f"{row[key]:.1f}%" for row in found if row[key] is not None)) for key in ("saved", "auto")
        ]
        lines.append(f"| {name} | {sites} | {shares[0]} | {shares[1]} | {rows['review']:.1f}% |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print the table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--models", nargs="+", type=Path, default=[])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    found = []
    table = Table("row", "original ms", *("auto", *FORMS[1:]), "noise", "saved %", "lowerings", box=None)
    for kind, name, model in models(options.names, options.models):
        row = measure(model, FORMS[1:] if kind == "layer" else (), options.rounds, options.threads)
        found.append({"kind": kind, "name": name, **row})
        times = row["times_ms"]
        ratios = [f"{times['original'] / times[form]:.2f}" if form in times else "" for form in ("auto", *FORMS[1:])]
        saved = "" if row["macs_saved"] is None else f"{100 * row['macs_saved']:.1f}"
        table.add_row(name, f"{times['original']:.2f}", *ratios, f"{row['noise']:.2f}", saved, "+".join(row["lowerings"]))
        print(name, *ratios, flush=True)
        if options.json:
            options.json.write_text(json.dumps(recorded(found, options.threads, options.rounds), indent=2) + "\n")
    Console(width=150).print(table)
    record = recorded(found, options.threads, options.rounds)
    print({key: round(record[key], 3) for key in ("layers_geometric_mean", "auto_within_5_percent") if key in record})


def recorded(rows: list[dict[str, Any]], threads: int, rounds: int) -> dict[str, Any]:
    """The record of these rows."""
    record: dict[str, Any] = {"onnxruntime": onnxruntime.__version__, "cpu": _cpu_name(), "cores": os.cpu_count()}
    record |= {"threads": threads, "rounds": rounds, "rows": rows}
    layers = [row for row in rows if row["kind"] == "layer"]
    if layers:
        record["layers_geometric_mean"] = math.exp(statistics.fmean(math.log(row["speedup"]) for row in layers))
        record["auto_within_5_percent"] = float(np.mean([row["auto_over_best"] <= 1.05 for row in layers]))
    return record


if __name__ == "__main__":
    main()
