# SPDX-License-Identifier: Apache-2.0
r"""Whole networks on onnxruntime's CUDA provider: the original, every standard form, and convpool's operators.

    python -m benchmarks onnxruntime_times [NETWORK ...] [--precision fp16 tf32] --json benchmarks/results/h200_ort.json
    python -m benchmarks onnxruntime_times --resizing --json benchmarks/results/h100_ort_resizing.json

Every method is a session of its own, with inputs and outputs on the GPU and runs captured as a CUDA graph.  Its outputs are
compared with the original's in float32 on the CPU provider first, by the tolerances of `convpool verify`; one that is further
off is not timed.  Then the sessions run in turn.  A run is timed on the host from call to return, which waits for the GPU;
`queued_us` is the time of a run among many that are queued and waited for together, `eager_us` that without the CUDA graph.
Figures are medians over the rounds.  --resizing: layers and networks with convolutions behind resamplings, in the forms of
standard operators that the rules can write.
Each row is written as soon as it is done, in place of an earlier one of its network, batch, precision and graphs.  Needs a GPU,
onnxruntime-gpu and libconvpool_ort.so.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx

import convpool
from benchmarks import resizing
from benchmarks.bound_session import Bound
from convpool.check.judge import PRECISION_TOLERANCES, Judge, Tolerance
from convpool.check.session import OnnxruntimeRunner
from convpool.cuda.timing import summarize
from convpool.errors import ConvpoolError, first_line
from convpool.ir import schema
from convpool.ir.files import write_atomically
from convpool.ir.model import load
from convpool.onnxruntime import CPU, CUDA, library_path, session
from convpool.onnxruntime.session import require_cuda, runtime_module
from models.decoders import PAPER_SIZES, UPSAMPLED_LAYERS
from models.generators import REGISTRY, generate, random_inputs

Row = dict[str, Any]
QUEUED = 20
"""Runs that are queued together."""
NETWORKS = {
    **{"sngan64": 64, "wgan_gp": 64, "stargan_v2": 1, "biggan128": 16, "densenet121": 32},
    **{"sngan_generator": 64, "biggan_generator": 16, "stargan_v2_generator": 8, "unet_nearest": 1, "vae_decoder": 1},
}
"""Batches by generator; those that enlarge maps have the sizes of `PAPER_SIZES`."""
BATCH = 16
"""Images a batch of the others."""
BARS = {
    "fp16": {
        **{"sngan64": 3.5, "wgan_gp": 3.0, "stargan_v2": 2.2, "biggan128": 1.6, "densenet121": 1.15},
        **{"sngan_generator": 2.5, "biggan_generator": 2.0, "stargan_v2_generator": 1.8, "unet_nearest": 1.5, "vae_decoder": 1.3},
    },
    "tf32": {"sngan64": 2.0, "wgan_gp": 1.8, "stargan_v2": 1.6, "biggan128": 1.3},
}
"""How many times as fast as the faster of the original's two layouts it is to be."""
DTYPES = {"fp16": "float16", "tf32": "float32", "fp32": "float32"}


@dataclass(frozen=True)
class Method:
    """options: of `convpool.optimize`, None for the original.  library: the operators run by the library's kernels, else by
    their functions.  nhwc: onnxruntime prefers channels last."""

    options: dict[str, Any] | None = None
    library: bool = False
    nhwc: bool = False


STANDARD = {"direct": {"lowering": "direct"}, "fused": {"lowering": "fused"}, "auto": {"lowering": "auto"}}
OURS = {
    "pairs": {"target": "tensorrt", "disable": ("fuse_prologue", "fuse_epilogue", "image_conv", "plain_conv")},
    "variants": {"target": "tensorrt", "disable": ("image_conv", "plain_conv")},
    "convolutions": {"target": "tensorrt"},
    "cuda": {"target": "cuda"},
}
"""pairs: ConvAvgPool alone; variants: with what stands before and after it; convolutions: and other convolutions that the
library runs; cuda: what `--target cuda` makes."""
FORMS = ("fused", "subpixel", "phases")
RESIZED = {
    "resized": {"target": "cuda", "lowering": "auto"},
    **{f"resized_{form}": {"target": "cuda", "lowering": "auto", "upsampling": form} for form in FORMS},
}
"""Standard operators in the form that the target takes, and in each that there is for float16, whatever it costs."""
METHODS = {
    "original": Method(),
    "original_nhwc": Method(nhwc=True),
    **{name: Method(options) for name, options in STANDARD.items()},
    **{f"{name}_nhwc": Method(options, nhwc=True) for name, options in STANDARD.items()},
    "function": Method(OURS["pairs"]),
    "function_nhwc": Method(OURS["pairs"], nhwc=True),
    **{name: Method(options, library=True) for name, options in OURS.items()},
    **{f"{name}_nhwc": Method(options, library=True, nhwc=True) for name, options in OURS.items()},
    **{name: Method(options) for name, options in RESIZED.items()},
    **{f"{name}_nhwc": Method(options, nhwc=True) for name, options in RESIZED.items()},
}
LAYERS: dict[str, Callable[..., onnx.ModelProto]] = {
    **{name: functools.partial(resizing.layer, *shape) for name, shape in UPSAMPLED_LAYERS.items()},
    **{name: functools.partial(resizing.square, *shape) for name, shape in resizing.LAYERS.items()},
}
"""Layers of --resizing."""
SMALL = ", small"
"""Ends the name of a network of --resizing that has its generator's own sizes."""
HEADS: dict[str, dict[str, Any]] = {
    **{"segformer_head": {"size": 128}, "hrnet_head": {"size": 128}, "yolo_neck": {"size": 20, "widths": (512, 256, 128)}},
    **{"esrgan_tail": {"size": 128}, "unet3d": {"size": 64, "widths": (32, 64, 128)}},
}
"""Sizes of other networks that enlarge maps."""
RESIZING = {
    **{name: layer.args[0] for name, layer in LAYERS.items()},
    **{name: NETWORKS.get(name, 4) for name in (*PAPER_SIZES, *HEADS)},
    **dict.fromkeys((f"{name}{SMALL}" for name in (*PAPER_SIZES, *HEADS)), 4),
}
"""Batches by row of --resizing."""


def make_session(model: onnx.ModelProto, method: Method, precision: str, *, cuda_graph: bool) -> Any:
    """A session of one method."""
    options = {"use_tf32": precision != "fp32", "prefer_nhwc": method.nhwc, "cuda_graph": cuda_graph}
    if method.library:
        return session(model, **options)
    given = {"use_tf32": int(options["use_tf32"]), "prefer_nhwc": int(method.nhwc), "enable_cuda_graph": int(cuda_graph)}
    runtime = runtime_module()
    require_cuda(runtime)
    settings = runtime.SessionOptions()
    settings.log_severity_level = 3
    return runtime.InferenceSession(model.SerializeToString(), settings, providers=[(CUDA, given), CPU])


def bind(
    model: onnx.ModelProto, method: Method, precision: str, arrays: dict[str, np.ndarray], graphs: bool
) -> tuple[Bound, bool]:
    """A session that has run, and whether its runs are a CUDA graph: some models cannot be captured."""
    try:
        bound = Bound(make_session(model, method, precision, cuda_graph=graphs), arrays)
        for _ in range(4):
            bound.run()
        return bound, graphs
    except Exception as error:  # onnxruntime's exceptions share no base class
        print(f"no CUDA graph: {first_line(error)}", file=sys.stderr)
    bound = Bound(make_session(model, method, precision, cuda_graph=False), arrays)
    for _ in range(4):
        bound.run()
    return bound, False


def time_network(name: str, batch: int, precision: str, methods: list[str], rounds: int, graphs: bool) -> Row:
    """Build, check and time one network: by method {"us", "spread_us", "queued_us", "error", "graph"}, {"wrong"}, {"skipped"}
    or {"same_as"} where the model is another method's."""
    sizes = {} if name.endswith(SMALL) else {**PAPER_SIZES, **HEADS}.get(name, {})
    maker = LAYERS.get(name) or functools.partial(generate, name.removesuffix(SMALL), batch=batch, **sizes)
    model = maker(dtype=DTYPES[precision])
    arrays = random_inputs(model)
    reference = OnnxruntimeRunner(load(model).in_float32(), "the original in float32", optimize=True)
    exact = reference.values(arrays)
    found: dict[str, Row] = {}
    sessions: dict[str, Bound] = {}
    made: dict[tuple[bytes, bool, bool], str] = {}
    for key in methods:
        method = METHODS[key]
        started = time.perf_counter()
        try:
            form = model if method.options is None else convpool.optimize(model, **method.options, check=0).model
            identity = (form.SerializeToString(deterministic=True), method.library and bool(schema.used_in(form)), method.nhwc)
            same = made.setdefault(identity, key)
            if same != key:
                found[key] = {"same_as": same}
                continue
            bound, graph = bind(form, method, precision, arrays, graphs)
        except (ConvpoolError, RuntimeError, TypeError, ValueError) as error:
            found[key] = {"skipped": first_line(error)}
            continue
        rtol, atol = PRECISION_TOLERANCES[precision]
        judge = Judge(reference.output_names, Tolerance(rtol, atol))
        judge.add(exact, bound.outputs())
        verdict = judge.verdict("the original in float32", 1, {})
        error = max((output.max_rel_error for output in verdict.outputs), default=0.0)
        if not verdict.passed:
            found[key] = {"wrong": error}
            continue
        found[key] = {"error": error, "graph": graph, "session_s": round(time.perf_counter() - started, 2)}
        sessions[key] = bound
    for key, times in in_turn(sessions, rounds).items():
        found[key].update(times)
    return {"network": name, "batch": batch, "precision": precision, "graphs": graphs, "rounds": rounds, "methods": found}


def in_turn(sessions: dict[str, Bound], rounds: int) -> dict[str, Row]:
    """Microseconds of each session's runs."""
    single: dict[str, list[float]] = {key: [] for key in sessions}
    queued: dict[bool, dict[str, list[float]]] = {replay: {key: [] for key in sessions} for replay in (True, False)}
    for _ in range(rounds):
        for key, bound in sessions.items():
            bound.run()
            for _ in range(3):
                start = time.perf_counter()
                bound.run()
                single[key].append((time.perf_counter() - start) * 1e6)
            for replay, times in queued.items():
                start = time.perf_counter()
                bound.queue(QUEUED, replay=replay)
                times[key].append((time.perf_counter() - start) * 1e6 / QUEUED)
    medians = [{key: summarize(times[key])["us"] for key in sessions} for times in queued.values()]
    return {key: {**summarize(single[key]), "queued_us": medians[0][key], "eager_us": medians[1][key]} for key in sessions}


def times_of(row: Row, figure: str = "us") -> dict[str, float]:
    """Microseconds of the methods that were timed, or are the same as one that was."""
    methods = row["methods"]
    found = {key: methods.get(one.get("same_as"), one) for key, one in methods.items()}
    return {key: one[figure] for key, one in found.items() if figure in one}


def best(times: dict[str, float], names: dict[str, Any] | tuple[str, ...]) -> tuple[str, float] | None:
    """The fastest of some methods, in either layout."""
    keys = [key for key in times if key.removesuffix("_nhwc") in names]
    return min(((key, times[key]) for key in keys), key=lambda pair: pair[1]) if keys else None


def gain(row: Row) -> float:
    """How many times as fast the best of ours is as the faster of the original's two layouts."""
    times = times_of(row)
    pairs = [best(times, names) for names in (("original",), OURS)]
    assert all(pairs), row["network"]
    original, ours = (us for _, us in filter(None, pairs))
    return original / ours


def markdown(record: dict[str, Any], names: Mapping[str, str] = MappingProxyType({})) -> str:
    """The table of a record, in microseconds: the faster layout of each, and what `cuda` comes to, else the best of ours.

    names: what to call the networks.
    """
    lines = [
        "| network | original | standard | pairs | cuda | over original | asked | over standard | commit |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in record["rows"]:
        times = times_of(row)
        original, standard, pairs, ours = (best(times, keys) for keys in (("original",), STANDARD, ("pairs",), ("cuda",)))
        ours = ours or best(times, OURS)
        cells = ["" if pair is None else f"{pair[1]:.1f}" for pair in (original, standard, pairs, ours)]
        over = ["" if pair is None or ours is None else f"{pair[1] / ours[1]:.2f}" for pair in (original, standard)]
        bar = BARS.get(row["precision"], {}).get(row["network"]) if row["graphs"] else None
        name = f"{names.get(row['network'], row['network'])}, batch {row['batch']}, {row['precision']}"
        name += "" if row["graphs"] else ", no CUDA graph"
        line = " | ".join([name, *cells, over[0], str(bar or ""), over[1], row.get("commit", "")[:7]])
        lines.append(f"| {line} |".replace("|  |", "| |").replace("|  |", "| |"))
    return "\n".join(lines)


def resizing_markdown(record: dict[str, Any]) -> str:
    """The table of a record of --resizing: by how much the faster layout of each form is as fast as that of the original."""
    lines = [f"| | original, us | speed-up | without CUDA graph | {' | '.join(FORMS)} |", f"| --- |{' --- |' * (3 + len(FORMS))}"]
    ratios: dict[str, list[float]] = {}
    for row in record["rows"]:
        times, eager = times_of(row), times_of(row, "eager_us")
        original = best(times, ("original",))
        assert original is not None, row["network"]
        pairs = [(best(t, ("original",)), best(t, (key,))) for t, key in ((times, "resized"), (eager, "resized"))]
        pairs += [(original, best(times, (f"resized_{form}",))) for form in FORMS]
        cells = ["" if one is None or other is None else f"{one[1] / other[1]:.2f}" for one, other in pairs]
        lines.append(f"| {row['network']}, batch {row['batch']} | {original[1]:.1f} | {' | '.join(cells)} |")
        if row["network"] in UPSAMPLED_LAYERS:
            for key, cell in zip(("speed-up", "eager"), cells[:2], strict=True):
                ratios.setdefault(key, []).append(float(cell))
    if ratios:
        means = [f"{statistics.geometric_mean(values):.2f}" for values in ratios.values()]
        lines.append(f"| geometric mean of the first {len(ratios['speed-up'])} | | {' | '.join(means)} |{' |' * len(FORMS)}")
    return "\n".join(lines).replace("|  |", "| |").replace("|  |", "| |")


def add_row(path: Path | None, row: Row) -> dict[str, Any]:
    """Put a row into the record at `path`, in place of an earlier one of the same network, batch, precision and graphs."""

    def order(name: str) -> tuple[int, str]:
        names = [*LAYERS, *NETWORKS]
        return (names.index(name) if name in names else len(names)), name

    identity = ("network", "batch", "precision", "graphs")
    earlier = json.loads(path.read_text())["rows"] if path is not None and path.exists() else []
    rows = [one for one in earlier if any(one[key] != row[key] for key in identity)] + [row]
    record = {"rows": sorted(rows, key=lambda one: (one["precision"], not one["graphs"], order(one["network"]), one["batch"]))}
    if path is not None:
        write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
    return record


def about() -> Row:
    """Return the machine that the figures are from."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return {
        "command": " ".join(["python", "-m", "benchmarks.onnxruntime_times", *(Path(word).name for word in sys.argv[1:])]),
        "date": datetime.date.today().isoformat(),
        "onnxruntime": runtime_module().__version__,
        "gpu": subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0],
    }


def main() -> int:
    """Entry point; 1 if a method was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", choices=[*REGISTRY, *RESIZING, []], help=f"default: {', '.join(NETWORKS)}")
    parser.add_argument("--resizing", action="store_true", help="layers and networks with convolutions behind resamplings")
    parser.add_argument("--precision", nargs="+", choices=DTYPES, default=["fp16", "tf32"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="default all; of standard operators for --resizing")
    parser.add_argument("--batch", type=int, help="in place of each network's own")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-graphs", action="store_true", help="without CUDA graphs, as most applications run")
    parser.add_argument("--json", type=Path, help="record to put rows into")
    parser.add_argument("--commit", default="", help="commit to record")
    arguments = parser.parse_intermixed_args()
    batches = RESIZING if arguments.resizing else NETWORKS
    usual = ("original", *(RESIZED if arguments.resizing else (*STANDARD, "function", *OURS)))
    methods = arguments.methods or [key for key in METHODS if key.removesuffix("_nhwc") in usual]
    if any(METHODS[key].library for key in methods):
        library_path()  # before anything is measured
    rows = []
    for precision in arguments.precision:
        for name in arguments.networks or batches:
            batch = arguments.batch or batches.get(name, BATCH)
            row = time_network(name, batch, precision, methods, arguments.rounds, not arguments.no_graphs)
            rows.append({**row, **about(), "commit": arguments.commit})
            print(json.dumps(rows[-1]), flush=True)
            add_row(arguments.json, rows[-1])
    print((resizing_markdown if arguments.resizing else markdown)({"rows": rows}))
    wrong = [f"{row['network']}: {key}: {one}" for row in rows for key, one in row["methods"].items() if "wrong" in one]
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
