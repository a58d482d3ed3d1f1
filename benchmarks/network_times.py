# SPDX-License-Identifier: Apache-2.0
"""Times of whole networks as TensorRT engines; the command is `python -m benchmarks tensorrt_engines time`.

Every lowering of a network is an engine of its own.  Its output for one batch is compared with onnxruntime's on the original
in float32 first.  An engine is timed if its error is at most the greater of two: the limit of tests/accuracy, and the error of
the original model's own engine of the same run.  Without the plugin twice that limit is enough.  The original's engine, which is
what the others are compared with, needs finite outputs only; the table has its error beside ours.

An engine is timed as one CUDA graph of calls on inputs rotated beyond the L2 cache, replayed in turn with those of the other
lowerings so that all see the same clocks; each timed replay follows another of the same graph, which hides the launch.  Figures
are medians over the rounds.

A DenseNet transition stands inside a network, so its engines read and write what TensorRT has there: half precision with the
channels last.  The other networks read float images as they are exported.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from convpool import optimize
from convpool.check.session import Session
from convpool.cuda.timing import input_sets, summarize
from convpool.errors import ConvpoolError, first_line
from convpool.ir import schema
from convpool.ir.files import write_atomically
from convpool.ir.model import LoadedModel
from convpool.tensorrt import PRECISIONS, Engine, build_engine, plugin_path
from convpool.tensorrt.build_options import HALF_PRECISIONS
from convpool.tensorrt.package import tensorrt_module
from convpool.tensorrt.pipeline import TIMING_ITERATIONS, choose_patiently, time_in_turn
from convpool.tensorrt.prepare import OFFLOADING
from models.builder import Net
from models.decoders import PAPER_SIZES
from models.generators import generate, random_inputs
from tests.support.accuracy.half_io import Arrays, from_channels_last, half_channels_last, to_channels_last
from tests.support.accuracy.limits import LIMITS
from tests.support.accuracy.measures import largest

Row = dict[str, Any]


@dataclass(frozen=True)
class Network:
    """A row: its batch, how many times as fast as the original it is to be in fp16, whether it is a piece of a network.

    layer: of one upsampled layer, C, M, the small map's size and the kernel.
    """

    batch: int
    bar: float
    inside: bool = False
    layer: tuple[int, int, int, int] | None = None


NETWORKS = {
    "sngan64": Network(64, 2.1),
    "sngan64_in_place": Network(64, 2.1),
    "stargan_v2": Network(1, 2.1),
    "wgan_gp": Network(64, 1.9),
    "biggan128": Network(16, 1.55),
    "lenet5": Network(64, 1.0),
    "densenet_transition1": Network(32, 2.5, inside=True),
    "densenet_transition2": Network(32, 2.5, inside=True),
    "densenet_transition3": Network(32, 2.5, inside=True),
    "densenet121": Network(32, 1.08),
    "sngan_generator": Network(64, 1.6),
    "biggan_generator": Network(16, 1.5),
    "stargan_v2_generator": Network(8, 1.25),
    "unet_nearest": Network(1, 1.2),
    "vae_decoder": Network(1, 1.12),
    "upsampled_512_64": Network(1, 1.2, layer=(512, 512, 64, 3)),
    "upsampled_256_16": Network(64, 1.2, layer=(256, 256, 16, 3)),
    "upsampled_256_256": Network(1, 1.2, layer=(256, 256, 256, 3)),
    "upsampled_64_256": Network(1, 1.2, layer=(64, 64, 256, 3)),
    "upsampled_640_32": Network(2, 1.2, layer=(640, 640, 32, 3)),
}
"""Rows by generator; those that enlarge maps have the sizes of `PAPER_SIZES`.  Layers stand between 1x1 convolutions of as many
channels; standard operators are to reach the bar in their geometric mean."""
STANDARD, OURS = ("direct", "fused"), ("plain_conv", "stem", "fused_variants", "plugin", "concats_kept")
OFFLOADED = ("image_conv", "plain_conv")
LOWERINGS: dict[str, dict[str, Any] | None] = {
    "original": None,
    "direct": {"lowering": "direct"},
    "fused": {"lowering": "fused"},
    "plugin": {"disable": ("fuse_prologue", "fuse_epilogue", *OFFLOADED)},
    "fused_variants": {"disable": OFFLOADED},
    "stem": {"disable": ("plain_conv",)},
    "plain_conv": {"disable": ()},
    "concats_kept": {"disable": ("chain_concats", *OFFLOADED)},
}
"""Arguments of `convpool.optimize`; plugin: ConvAvgPool alone; fused_variants: with what stands before and after it; stem: and
convolutions of images; plain_conv: and others of many channels, as `convpool-build` has it; concats_kept: fused_variants with all
Concats as they were."""
USUAL = {
    precision: ("original", "direct", "fused", "fused_variants", *(("plain_conv",) if precision in OFFLOADING else ()))
    for precision in PRECISIONS
}
"""Variants timed by default, by precision."""


@dataclass(frozen=True)
class Options:
    """How to build and time.  batch: in place of a row's own; engines: a folder that keeps engines and TensorRT's timings."""

    engines: Path
    lowerings: tuple[str, ...] = USUAL["fp16"]
    precision: str = "fp16"
    level: int = 2
    batch: int | None = None
    rounds: int = 30
    layers: bool = False
    max_aux_streams: int | None = None


def make_model(name: str, batch: int) -> onnx.ModelProto:
    """The model of a row."""
    if (found := NETWORKS[name].layer) is None:
        return generate(name, batch=batch, **PAPER_SIZES.get(name, {}))
    c, m, size, kernel = found
    net = Net(name, batch=batch, seed=0, opset=17, dtype="float32")
    x = net.upsample(net.conv(net.input("x", c, size, size), "before", c, 1), "up")
    net.output(net.conv(net.conv(x, "conv", m, kernel), "after", m, 1), "y")
    return net.model()


def lowered(model: onnx.ModelProto, lowering: str, precision: str) -> onnx.ModelProto:
    """The model in one lowering; in `OFFLOADING` alone do convolutions without a pooling go to the plugin."""
    arguments = LOWERINGS[lowering]
    if arguments is None:
        return model
    disable = [*arguments.get("disable", ()), *(() if precision in OFFLOADING else OFFLOADED)]
    disable += () if precision in HALF_PRECISIONS else ("norm_conv",)
    return optimize(model, target="tensorrt", **{**arguments, "disable": disable}, check=0).model


def get_engine(name: str, lowering: str, model: onnx.ModelProto, batch: int, options: Options) -> Engine:
    """The engine of a lowered model, from the folder where it is one of this model, TensorRT and plugin; else built."""
    plugin = lowering in OURS
    inside = NETWORKS[name].inside and options.precision == "fp16"
    digest = hashlib.sha256(model.SerializeToString(deterministic=True))
    built_by = (options.level, options.max_aux_streams, TIMING_ITERATIONS, tensorrt_module().__version__)
    digest.update(repr((options.precision, inside, *built_by)).encode())
    if plugin:
        digest.update(plugin_path().read_bytes())
    path = options.engines / f"{name}-{batch}-{options.precision}-{lowering}-{digest.hexdigest()[:12]}.engine"
    if path.exists():
        return Engine.load(path)
    engine = build_engine(
        model,
        precision=options.precision,
        optimization_level=options.level,
        plugin=plugin,
        lowering="none",
        max_aux_streams=options.max_aux_streams,
        timing_cache=options.engines / f"timing-{TIMING_ITERATIONS}.cache",
        configure=choose_patiently,
        configure_network=half_channels_last if inside else None,
    )
    engine.save(path)
    return engine


def layer_times(engine: Engine, inputs: Arrays, runs: int = 20) -> dict[str, float]:
    """Microseconds per layer on one input set by TensorRT's profiler, which adds its own cost to each."""
    trt = tensorrt_module()
    totals: dict[str, float] = {}

    class Profiler(trt.IProfiler):
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            totals[layer_name] = totals.get(layer_name, 0.0) + ms * 1000 / runs

    engine.bind(inputs)  # to buffers of its own: those of the timing are gone
    context = engine.context
    context.profiler = Profiler()
    for _ in range(runs):
        engine.execute()
        engine.memory.synchronize(None)
    return {name: round(value, 2) for name, value in totals.items()}


def is_accurate(lowering: str, error: float, limit: float, original: float) -> bool:
    """Return True if an engine may be timed.

    limit: of tests/accuracy.  original: the error of the original's own engine, 0 where there is none in the run.
    """
    allowed = limit if lowering in OURS else 2 * limit  # TensorRT's own kernels may round more often
    if math.isfinite(original):
        allowed = max(allowed, original)
    return math.isfinite(error) and (lowering == "original" or error <= allowed)


def time_network(name: str, options: Options) -> Row:
    """Build, check and time one network.

    A lowering gives {"us", "spread_us", "error", "nodes"}, {"wrong"}, {"skipped"}, or {"same_as"} where it changes nothing.
    """
    network, batch = NETWORKS[name], options.batch or NETWORKS[name].batch
    inside = network.inside and options.precision == "fp16"
    model = make_model(name, batch)
    limit = LIMITS["upsampled" if network.layer else name].relative(options.precision, engine=True)
    inputs = random_inputs(model)
    if inside:
        inputs = {key: x.astype(np.float16).astype(np.float32) for key, x in inputs.items()}
    session = Session(LoadedModel(model, None, 0), optimize=True)
    reference = dict(zip(session.outputs, session.run(None, inputs), strict=True))
    found: dict[str, dict[str, Any]] = {}
    engines: dict[str, Engine] = {}
    given = to_channels_last(inputs) if inside else inputs
    made: dict[bytes, str] = {}
    for lowering in options.lowerings:
        try:
            form = lowered(model, lowering, options.precision)
            same = made.setdefault(form.SerializeToString(deterministic=True), lowering)
            if same != lowering:
                found[lowering] = {"same_as": same}
                continue
            engine = get_engine(name, lowering, form, batch, options)
            outputs = engine.run(given)
        except (ConvpoolError, RuntimeError) as error:
            found[lowering] = {"skipped": first_line(error)}
            continue
        error = largest(from_channels_last(outputs) if inside else outputs, reference)
        nodes = Counter(node.op_type for node in form.graph.node if node.op_type in schema.OP_TYPES)
        found[lowering] = {"error": error, **({"nodes": dict(nodes)} if nodes else {})}
        engines[lowering] = engine
    theirs = found.get("original", {}).get("error", 0.0)
    for lowering in list(engines):
        if not is_accurate(lowering, found[lowering]["error"], limit, theirs):
            found[lowering] = {"wrong": found[lowering]["error"]}
            del engines[lowering]
    row = {
        "network": name,
        "batch": batch,
        "precision": options.precision,
        "level": options.level,
        "max_aux_streams": options.max_aux_streams,
        "bar": network.bar if options.precision == "fp16" else None,
        "limit": limit,
        "half_channels_last": inside,
        "rounds": options.rounds,
        "lowerings": found,
    }
    if engines:
        row["input_sets"] = _time(engines, model, inside, options.rounds, found)
    if options.layers:
        row["layers_us"] = {lowering: layer_times(engine, given) for lowering, engine in engines.items()}
    return row


def _time(engines: dict[str, Engine], model: onnx.ModelProto, inside: bool, rounds: int, found: dict[str, dict[str, Any]]) -> int:
    """Add each engine's time to what was found; the number of input sets."""
    next(iter(engines.values())).memory  # noqa: B018  a current context, which gpuarray needs
    import pycuda.driver as driver
    import pycuda.gpuarray as gpuarray

    l2_bytes = driver.Context.get_device().get_attribute(driver.device_attribute.L2_CACHE_SIZE)

    def on_gpu(seed: int) -> dict[str, Any]:
        one = random_inputs(model, seed=seed)
        return {name: gpuarray.to_gpu(x) for name, x in (to_channels_last(one) if inside else one).items()}

    arrays = [on_gpu(0)]
    sets = input_sets(sum(x.nbytes for x in arrays[0].values()), l2_bytes)
    arrays += map(on_gpu, range(1, sets))
    for lowering, times in time_in_turn(engines, arrays, rounds).items():
        found[lowering].update(summarize(times))
    return sets


def timed(row: Row) -> dict[str, dict[str, Any]]:
    """Errors and times of the lowerings that were timed, or are the same as one that was."""
    found = {name: row["lowerings"].get(one.get("same_as"), one) for name, one in row["lowerings"].items()}
    return {lowering: one for lowering, one in found.items() if "us" in one}


def times_of(row: Row) -> dict[str, float]:
    """Microseconds of the lowerings that were timed, or are the same as one that was."""
    return {lowering: one["us"] for lowering, one in timed(row).items()}


def ratios(row: Row) -> tuple[float | None, float | None]:
    """How many times as fast the plugin is as the original, and as the best lowering in standard operators."""
    times = times_of(row)
    ours = next((times[lowering] for lowering in OURS if lowering in times), None)
    standard = min((times[lowering] for lowering in STANDARD if lowering in times), default=None)
    return tuple(other / ours if other and ours else None for other in (times.get("original"), standard))


def errors(row: Row) -> tuple[str, str, str]:
    """The errors of the original's engine and of the plugin's, and the limit of tests/accuracy."""
    found = timed(row)
    ours = next((found[lowering] for lowering in OURS if lowering in found), {})
    values = found.get("original", {}).get("error"), ours.get("error"), row["limit"]
    original, plugin, limit = ("" if value is None else f"{value:.2g}" for value in values)
    return original, plugin, limit


def markdown(record: dict[str, Any]) -> str:
    """The table of a record: microseconds by lowering, what they come to, what was asked for, and errors."""
    measured = [times_of(row) for row in record["rows"]]
    names = [name for name in LOWERINGS if any(name in times for times in measured)]
    lines = [
        "| network, batch, precision | " + " | ".join(names) + " | over original | asked | over best of direct, fused | "
        "error, original | error, plugin | limit |",
        "|---" * (len(names) + 7) + "|",
    ]
    for row, times in zip(record["rows"], measured, strict=True):
        cells = [f"{times[name]:.1f}" if name in times else "" for name in names]
        over = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios(row)]
        name = f"{row['network']}, {row['batch']}, {row['precision']}"
        lines.append(f"| {' | '.join([name, *cells, over[0], str(row['bar'] or ''), over[1], *errors(row)])} |")
    return "\n".join(lines)


def problems(record: dict[str, Any]) -> list[str]:
    """A line for every lowering that was wrong or not run."""
    return [
        f"{row['network']}, {row['precision']}: {name}: "
        + (
            f"error {found['wrong']:.3g}, limit {row['limit']:.3g}, the original's {errors(row)[0] or 'unknown'}"
            if "wrong" in found
            else f"not run: {found['skipped']}"
        )
        for row in record["rows"]
        for name, found in row["lowerings"].items()
        if "us" not in found and "same_as" not in found
    ]


def add_row(path: Path, row: Row, order: tuple[str, ...] = tuple(NETWORKS)) -> dict[str, Any]:
    """Put a row into the record at `path`, in place of an earlier one of the same network, batch and precision."""

    def key(one: Row) -> tuple:
        return one["network"], one["batch"], one["precision"]

    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [*(one for one in earlier if key(one) != key(row)), row]
    record = {"rows": sorted(rows, key=lambda one: (order.index(one["network"]), one["batch"], one["precision"]))}
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
    return record
