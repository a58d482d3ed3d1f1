# SPDX-License-Identifier: Apache-2.0
"""An engine as `convpool.check` runs and compares it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from convpool.check.inputs import Arrays, Ranges
from convpool.check.judge import precision_of
from convpool.check.session import Runner, open_model
from convpool.errors import OptionError
from convpool.ir.model import load
from convpool.tensorrt.engine import Engine

ENGINE_SUFFIXES = (".engine", ".plan", ".trt")


class EngineRunner(Runner):
    """An engine in TensorRT, of the precision of its inputs and outputs.  Raises OptionError for formats other than LINEAR."""

    runtime = "TensorRT"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.input_names, self.output_names = list(engine.inputs), list(engine.outputs)
        self.input_types = {name: info.dtype for name, info in engine.inputs.items()}
        infos = (*engine.inputs.values(), *engine.outputs.values())
        self.precision = precision_of(info.dtype for info in infos)
        for info in infos:
            if info.format != "LINEAR":
                raise OptionError(f"engine: tensor '{info.name}'; got format {info.format}, expected LINEAR to compare")

    def run(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """All outputs by name.  Raises OptionError or TensorRTError."""
        return self._engine.run(arrays)

    def ranges(self) -> Ranges:
        """For every input the shapes of the first profile."""
        return {name: info.profiles[0] for name, info in self._engine.inputs.items()}


def is_engine(path: str) -> bool:
    """Return True if a file is an engine, by its suffix."""
    return Path(path).suffix.lower() in ENGINE_SUFFIXES


def open_runner(path: str, *, layers: bool = False) -> Runner:
    """A runner for a file: an engine by its suffix, else an ONNX model.  Raises ModelError, OptionError or TensorRTError."""
    if is_engine(path):
        return EngineRunner(Engine.load(path))
    return open_model(load(path), path, layers=layers)
