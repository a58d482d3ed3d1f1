# SPDX-License-Identifier: Apache-2.0
"""`build`: from an ONNX model to a TensorRT engine that was run and compared with the model.

1. The model is loaded once and optimized for the precision, TensorRT and GPU (`policy`, `prepare`).
2. TensorRT builds an engine (`builder`); with `autotune` one for each lowering, which are timed (`tune`).
3. The fastest engine runs on the inputs that onnxruntime gets for the model as it was given.  Where the outputs disagree, the
   next fastest takes its place.
4. A report says what was built, timed and compared.
"""

from __future__ import annotations

import importlib.util
import os
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from convpool.check.inputs import Arrays, load_arrays
from convpool.check.judge import Verification
from convpool.check.session import open_model
from convpool.check.verify import compare_runners
from convpool.errors import OptionError, TensorRTError, VerificationError
from convpool.ir import schema
from convpool.ir.model import LoadedModel, load
from convpool.tensorrt import prepare
from convpool.tensorrt.build_options import BuildOptions
from convpool.tensorrt.builder import build_plan
from convpool.tensorrt.engine import Engine, EngineRunner
from convpool.tensorrt.package import tensorrt_module
from convpool.tensorrt.policy import default_lowering, optimize_keywords
from convpool.tensorrt.tune import Timed, time_lowerings


@dataclass(frozen=True)
class Tuning:
    """Times of the lowerings' engines.

    lowering: the one kept, None if no engine's outputs agree.  times_us: median microseconds a run.  left_out: why a lowering
    has no engine, or why its engine was not kept.
    """

    lowering: str | None
    times_us: dict[str, float]
    left_out: dict[str, str]


@dataclass(frozen=True)
class BuildReport:
    """The outcome of a build and its comparison.

    accumulation: of the options, None for that of the model's own nodes.  plugin_nodes, other_nodes: how many nodes of each
    operator the plugin and TensorRT run.
    """

    precision: str
    plugin: bool
    accumulation: str | None
    build_seconds: float
    engine_bytes: int
    plugin_nodes: dict[str, int]
    other_nodes: dict[str, int]
    verification: Verification | None
    autotune: Tuning | None

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dicts and lists, in the order of the JSON file."""
        return asdict(self)


@dataclass(frozen=True)
class Built:
    """An engine, and what is known of it.  lowering: the form of the model's pairs in it."""

    engine: Engine
    lowering: str
    report: BuildReport

    @property
    def verification(self) -> Verification | None:
        """The comparison with onnxruntime; None where there was no check."""
        return self.report.verification

    @property
    def plugin_nodes(self) -> dict[str, int]:
        """How many nodes of each operator the plugin runs."""
        return self.report.plugin_nodes

    @property
    def times_us(self) -> dict[str, float]:
        """Median microseconds a run of each lowering's engine, fastest first; empty without `autotune`."""
        return self.report.autotune.times_us if self.report.autotune else {}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the engine to a file, atomically.  Raises OutputError."""
        self.engine.save(path)


class EngineMismatchError(VerificationError):
    """The outputs of an engine disagree with onnxruntime's on the model.  `built` holds the engine and the comparison."""

    def __init__(self, message: str, built: Built) -> None:
        super().__init__(message)
        self.built = built


def build(model: object, options: BuildOptions | None = None, **keywords: Any) -> Built:
    """Build a TensorRT engine from a model, run it, and compare it with onnxruntime on the model.

    The comparison needs a GPU and pycuda; `check=0` leaves it out.

    Args:
        model: A path, serialised bytes, an onnx.ModelProto, a gs.Graph, or what
            `convpool.ir.model.load` gave.  It is not changed.
        options: The options.
        **keywords: Fields of `BuildOptions`, which replace those of `options`.

    Returns:
        The engine and its report.

    Raises:
        OptionError: An option is unusable.
        ModelError: The model is unusable.
        OutputError: The timing cache cannot be written.
        TensorRTError: TensorRT fails, with its own messages.
        EngineMismatchError: The outputs of the engine, or of all engines with `autotune`, disagree
            with onnxruntime's; a VerificationError.
    """
    options = replace(options or BuildOptions(), **keywords)
    arrays = load_arrays(options.data)  # before any work: a wrong file should fail at once
    loaded = load(model)
    if options.checked or options.autotune:
        check_can_run(options)
    started, timed = time.perf_counter(), None
    if options.autotune:
        timed = time_lowerings(loaded, options)
        engines = timed.engines
    else:
        lowering = options.lowering or default_lowering(loaded, options)
        engines = {lowering: _build_one(loaded, lowering, options)}
    seconds = time.perf_counter() - started
    lowering, verification = next(iter(engines)), None
    left_out = dict(timed.left_out) if timed else {}
    if options.checked:
        lowering, verification = _first_that_agrees(loaded, engines, options, arrays, left_out)
    agrees = verification is None or verification.passed
    tuning = Tuning(lowering if agrees else None, timed.times_us, left_out) if timed else None
    built = Built(engines[lowering], lowering, _report(engines[lowering], options, seconds, verification, tuning))
    if verification is not None and not agrees:
        raise EngineMismatchError(f"verification: {verification.difference}", built)
    return built


def build_engine(model: object, options: BuildOptions | None = None, **keywords: Any) -> Engine:
    """`build` without its check: the engine has not been run.  Arguments and errors are those of `build`."""
    return build(model, options, **{**keywords, "check": 0, "data": None}).engine


def build_fastest(model: object, options: BuildOptions | None = None, **keywords: Any) -> Timed:
    """The engines of all lowerings of the model's pairs, timed on this GPU, fastest first; their outputs are not compared.

    `build` with `autotune` also compares them, and keeps one.  Arguments are those of `build`, but `lowering` and `layers`.

    Raises what `build` raises, and TensorRTError where no lowering is left.
    """
    return time_lowerings(load(model), replace(options or BuildOptions(), **{**keywords, "autotune": True}))


def check_can_run(options: BuildOptions, no_check: str = "check=0", no_autotune: str = "autotune") -> None:
    """Raise TensorRTError, in the caller's words, where the engine could not be run: before the minutes of a build."""
    if options.trt is None:
        tensorrt_module()
    if importlib.util.find_spec("pycuda") is None:
        purpose, without = ("timed", f"leave out {no_autotune}") if options.autotune else ("checked", f"say {no_check}")
        raise TensorRTError(f"pycuda: not installed, but the engine is run to be {purpose}; pip install pycuda, or {without}")


def _build_one(model: LoadedModel, lowering: str, options: BuildOptions) -> Engine:
    """The engine of one lowering."""
    if options.lowering in ("direct", "fused") and prepare.has_plugin_nodes(model.proto):
        raise OptionError(f"lowering: got {lowering} for a model with the operator's nodes already; expected the original model")
    trt = options.trt or tensorrt_module()
    keywords = optimize_keywords(options, trt)
    return build_plan(trt, prepare.lowered(model, lowering, layers=options.layers, **keywords), options)


def _first_that_agrees(
    model: LoadedModel, engines: dict[str, Engine], options: BuildOptions, data: Arrays | None, left_out: dict[str, str]
) -> tuple[str, Verification]:
    """The first engine that agrees with onnxruntime, else the last, with its comparison; left_out takes the others' reasons."""
    reference = open_model(model, layers=options.layers)
    for lowering, engine in engines.items():
        how: dict[str, Any] = {name: getattr(options, name) for name in ("precision", "rtol", "atol", "seed")}
        verification = compare_runners(reference, EngineRunner(engine), check=max(options.check, 1), data=data, **how)
        if verification.passed:
            break
        left_out[lowering] = verification.difference
    return lowering, verification


def _report(
    engine: Engine, options: BuildOptions, seconds: float, verification: Verification | None, tuning: Tuning | None
) -> BuildReport:
    nodes = sorted(engine.built_from.items())
    ours = {name: count for name, count in nodes if options.plugin and name in schema.OP_TYPES}
    others = {name: count for name, count in nodes if name not in ours}
    asked = options.precision, options.plugin, options.accumulation
    return BuildReport(*asked, seconds, len(engine.plan), ours, others, verification, tuning)
