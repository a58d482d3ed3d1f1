"""`build_fastest`: the forms of a model's pairs as engines, timed on the GPU at hand.

Which form is fastest depends on what stands around a pair: TensorRT fuses convolutions with what follows them, and changes
formats where its layers meet the plugin's.  So whole engines are timed, the original model's among them.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convpool.errors import ConvpoolError, OptionError, first_line
from convpool.inputs import random_array
from convpool.modelio import LoadedModel, load
from convpool.tensorrt import prepare
from convpool.tensorrt.build import build_engine
from convpool.tensorrt.engine import Engine
from convpool.tensorrt.timing import time_in_turn

FORMS = ("none", "convavgpool", "direct", "fused")
"""As `build_engine` names them; none: the model as it is."""


@dataclass(frozen=True)
class Fastest:
    """The engine kept, its form, median microseconds of every form that was timed, and why others were not."""

    engine: Engine
    lowering: str
    times_us: dict[str, float]
    left_out: dict[str, str]


def build_fastest(model: object, *, plugin: bool = True, timing_cache: Any = None, **options: Any) -> Fastest:
    """Build an engine for every form of the model's pairs and keep the one that is fastest here, at the typical shapes.

    model, options: as for `build_engine`, but `lowering`.  plugin: without it only standard operators are tried.
    timing_cache: where None, the builds share one that is thrown away.

    Raises OptionError for a model that has the operator's nodes already, and what `build_engine` raises where no form at
    all can be built.
    """
    loaded = model if isinstance(model, LoadedModel) else load(model)
    if prepare.has_operator(loaded.proto):
        raise OptionError("autotune: the model has ConvAvgPool nodes already; expected the original model, whose forms are timed")
    engines: dict[str, Engine] = {}
    failures: dict[str, ConvpoolError] = {}
    with tempfile.TemporaryDirectory() as folder:
        cache = timing_cache or Path(folder, "timing.cache")
        for form in FORMS:
            if form == "convavgpool" and not plugin:
                continue
            try:
                engine = build_engine(loaded, plugin=plugin, lowering=form, timing_cache=cache, **options)
                engine.inputs  # noqa: B018  loads it, so that one that cannot be loaded is left out too
                engines[form] = engine
            except OptionError:
                raise
            except ConvpoolError as error:
                failures[form] = error
    if not engines:
        raise next(iter(failures.values()))
    times = time_in_turn(engines, [typical_inputs(next(iter(engines.values())))])
    medians = {form: statistics.median(values) for form, values in times.items()}
    best = min(medians, key=medians.__getitem__)
    return Fastest(engines[best], best, medians, {form: first_line(error) for form, error in failures.items()})


def typical_inputs(engine: Engine, seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs of the first profile's typical shapes."""
    rng = np.random.default_rng(seed)
    return {name: random_array(rng, info.dtype, info.profiles[0][1]) for name, info in engine.inputs.items()}
