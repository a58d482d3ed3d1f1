# SPDX-License-Identifier: Apache-2.0
"""What runs a model or an engine on arrays.

`Runner` is all that a comparison needs to know of either.  A model runs in onnxruntime here; an engine runs in TensorRT, in
`convpool.tensorrt`.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from onnx import ModelProto, TensorProto, helper

from convpool.check.inputs import Arrays, Ranges, float_types, to_float32
from convpool.check.judge import precision_of
from convpool.check.session import Session, fitted
from convpool.errors import ModelError, first_line
from convpool.ir.elsewhere import mark_layers
from convpool.ir.model import LoadedModel
from convpool.ir.process import EndedError

Outputs = dict[str, Any]
"""What a run gives by output's name: arrays, and for a model also sequences, maps and missing optionals."""


class Runner(Protocol):
    """Runs one thing on inputs by name.

    runtime: its name.  precision: what it computes in, "fp32" where nothing says otherwise.  model: the model, which says what
    its inputs may be; None for an engine.  input_types: by input's name, where there is no model.
    """

    runtime: str
    input_names: list[str]
    output_names: list[str]
    precision: str
    model: ModelProto | None
    input_types: dict[str, np.dtype]

    def run(self, arrays: Arrays) -> Outputs:
        """All outputs by name.  Raises a ConvpoolError where it cannot run."""
        ...

    def ranges(self) -> Ranges:
        """The shapes of inputs that it is made for; none where any will do."""
        ...


class OnnxruntimeRunner:
    """A model in onnxruntime on the CPU.  `error` says why it could not be loaded.

    what: the model, in messages.  optimize: with onnxruntime's own passes.  lenient: with them too where onnxruntime ends its
    process without them, as on some optional outputs that a model leaves out; then `note` says so.  spin: as for `Session`.
    """

    runtime = "onnxruntime"

    def __init__(
        self,
        model: LoadedModel,
        what: str,
        *,
        optimize: bool = False,
        lenient: bool = True,
        spin: bool = False,
        precision: str = "fp32",
    ) -> None:
        self.what, self.error, self.note, self.precision = what, "", "", precision
        self.model: ModelProto | None = model.proto
        self.input_types: dict[str, np.dtype] = {}
        self.input_names: list[str] = []
        self.output_names: list[str] = []
        self.optimize, self._lenient = optimize, lenient and not optimize
        self._loaded, self._spin = model, spin
        try:
            self._load()
        except Exception as error:  # onnxruntime's exceptions share no base class
            self.error = _why(error)

    def _load(self) -> None:
        try:
            self.session = Session(self._loaded, optimize=self.optimize, spin=self._spin)
        except EndedError as error:
            if not self._lenient:
                raise
            self._optimize(error)
        self.input_names = [value.name for value in self.session.get_inputs()]
        self.output_names = [value.name for value in self.session.get_outputs()]

    def _optimize(self, error: EndedError) -> None:
        """Load the model with onnxruntime's passes from now on.  error: what it does without."""
        self._lenient = False
        self.session = Session(self._loaded, optimize=True, spin=self._spin)
        self.optimize = True
        self.note = f"onnxruntime {error} on {self.what} unless its graph optimisations are on, as they are by default"

    def check(self) -> None:
        """Raise ModelError if it could not be loaded."""
        if self.error:
            raise ModelError(f"onnxruntime cannot load {self.what}: {self.error}")

    def run(self, arrays: Arrays) -> Outputs:
        """All outputs by name.  Raises ModelError if onnxruntime fails."""
        return dict(zip(self.output_names, self.values(arrays), strict=True))

    def values(self, arrays: Arrays) -> list[Any]:
        """All outputs in order.  Raises ModelError if onnxruntime fails."""
        self.check()
        given = fitted(self.session, arrays)
        try:
            try:
                return self.session.run(None, given)
            except EndedError as error:
                if not self._lenient:
                    raise
                self._optimize(error)
                return self.session.run(None, given)
        except Exception as error:
            raise ModelError(f"onnxruntime cannot run {self.what}: {_why(error)}") from error

    def ranges(self) -> Ranges:
        """None: a model runs on whatever its inputs allow."""
        return {}


def _why(error: Exception) -> str:
    return f"it {error}" if isinstance(error, EndedError) else first_line(error)


def open_model(model: LoadedModel, what: str = "the model", *, layers: bool = False) -> OnnxruntimeRunner:
    """A runner of a model, in float32 where onnxruntime has no kernels for the model's types.

    layers: intermediate tensors become outputs too.  what: the model, in messages.  Raises ModelError if it cannot be loaded.
    """
    types = float_types(model.proto)
    precision = precision_of(map(helper.tensor_dtype_to_np_dtype, types))
    given = LoadedModel(model.proto, model.base_dir, 0)
    if layers:
        given.proto = ModelProto()
        given.proto.CopyFrom(model.proto)
        mark_layers(given.proto, model.inferred)
    runner = OnnxruntimeRunner(given, what, precision=precision)
    if runner.error and types - {TensorProto.FLOAT}:
        wide = LoadedModel(to_float32(given), model.base_dir, 0)
        runner = OnnxruntimeRunner(wide, f"{what} in float32", precision=precision)
        runner.check()
        runner.what = what
    runner.check()
    runner.model = model.proto
    return runner
