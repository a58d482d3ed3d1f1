"""`build_fastest`: the forms of a model's pairs as engines, timed on the GPU at hand.

Which form is fastest depends on what stands around a pair: TensorRT fuses convolutions with what follows them, and changes
formats where its layers meet the plugin's.  So whole engines are timed, the original model's among them.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convpool.errors import ConvpoolError, OptionError, OutputError, first_line
from convpool.inputs import random_array
from convpool.modelio import load
from convpool.tensorrt import prepare
from convpool.tensorrt.build import build_engine, plugin_takes, prepared_model, typical
from convpool.tensorrt.engine import Engine
from convpool.tensorrt.errors import TensorRTError
from convpool.tensorrt.timing import choose_patiently, time_in_turn

FORMS = ("none", "convavgpool", "direct", "fused")
"""As `build_engine` names them; none: the model as it is."""


@dataclass(frozen=True)
class Timed:
    """The engines of a model's forms, fastest first, median microseconds a run, and why other forms have none."""

    engines: dict[str, Engine]
    times_us: dict[str, float]
    left_out: dict[str, str]


def build_fastest(
    model: object,
    *,
    plugin: bool = True,
    stem: bool = True,
    plain_conv: bool = True,
    timing_cache: str | os.PathLike[str] | None = None,
    configure: Callable[[Any], None] | None = None,
    **options: Any,
) -> Timed:
    """Build an engine for every form of the model's pairs and time them here, at the first profile's typical shapes.

    model, stem, plain_conv, options: as for `build_engine`, but `lowering` and `layers`.  plugin: without it only standard
    operators are tried.  timing_cache: where None, the builds share one that is thrown away.  A form that comes out as another
    one does, that cannot be built, or that cannot be run or captured into a CUDA graph, is left out.

    Outputs are not compared: `convpool.tensorrt.compare` does that, and `convpool-build --autotune`.  Raises OptionError for a
    model that has the operator's nodes already, OutputError for a cache that cannot be written, and TensorRTError, or what
    `build_engine` raises, where no form is left.
    """
    loaded = load(model)
    if prepare.has_operator(loaded.proto):
        raise OptionError("autotune: the model has ConvAvgPool nodes already; expected the original model, whose forms are timed")

    def set_up(config: Any) -> None:
        choose_patiently(config)
        if configure is not None:
            configure(config)

    precision = options.get("precision", "fp32")
    taken = plugin_takes(precision, plugin, stem=stem, plain_conv=plain_conv, trt=options.get("trt"))
    engines: dict[str, Engine] = {}
    left_out: dict[str, str] = {}
    seen: dict[bytes, str] = {}
    failure: ConvpoolError | None = None
    with tempfile.TemporaryDirectory() as folder:
        options |= {"timing_cache": timing_cache or Path(folder, "timing.cache"), "configure": set_up, "plugin": plugin}
        for form in FORMS if plugin else [form for form in FORMS if form != "convavgpool"]:
            form_model = prepared_model(loaded, form, shapes=typical(options.get("profiles")), **taken)
            same = seen.setdefault(hashlib.sha256(prepare.serialized(form_model)).digest(), form)
            if same != form:
                left_out[form] = f"the same as {same}"
                continue
            try:
                engines[form] = build_engine(form_model, lowering="none", **options)
            except (OptionError, OutputError):
                raise
            except ConvpoolError as error:
                left_out[form], failure = first_line(error), failure or error
    if failure and not engines:
        raise failure
    times = time_in_turn(engines, [typical_inputs(engines)], left_out=left_out)
    if not times:
        reasons = "; ".join(f"{form}: {reason}" for form, reason in left_out.items())
        raise TensorRTError(f"autotune: no form's engine could be timed; got {reasons}; leave out autotune")
    medians = {form: statistics.median(values) for form, values in times.items()}
    fastest_first = sorted(medians, key=medians.__getitem__)
    return Timed({form: engines[form] for form in fastest_first}, {form: medians[form] for form in fastest_first}, left_out)


def typical_inputs(engines: dict[str, Engine], seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs of the first profile's typical shapes, by the first of the engines that can be loaded."""
    rng = np.random.default_rng(seed)
    for number, engine in enumerate(engines.values(), 1):
        try:
            inputs = engine.inputs
        except TensorRTError:
            if number == len(engines):
                raise
        else:
            return {name: random_array(rng, info.dtype, info.profiles[0][1]) for name, info in inputs.items()}
    return {}
