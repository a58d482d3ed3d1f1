"""What runs a model or an engine on arrays.

`Runner` is all that a comparison needs to know of either.  A model runs in onnxruntime here; an engine runs in TensorRT, in
`convpool.tensorrt`.
"""

from __future__ import annotations

from typing import Any, Protocol

from convpool.check.inputs import Arrays
from convpool.check.session import fitted, make_session
from convpool.errors import ModelError, first_line
from convpool.ir.model import LoadedModel

Outputs = dict[str, Any]
"""What a run gives by output's name: arrays, and for a model also sequences, maps and missing optionals."""


class Runner(Protocol):
    """Runs one thing on inputs by name.  precision: what it computes in, "fp32" where nothing says otherwise."""

    input_names: list[str]
    output_names: list[str]
    precision: str

    def run(self, arrays: Arrays) -> Outputs:
        """All outputs by name.  Raises a ConvpoolError where it cannot run."""
        ...

    def typical_shapes(self) -> dict[str, list[int]]:
        """Shapes of inputs that it is made for; none where any will do."""
        ...


class OnnxruntimeRunner:
    """A model in onnxruntime on the CPU.  `error` says why it could not be loaded.

    what: the model, in messages.  optimize: with onnxruntime's own passes.
    """

    def __init__(self, model: LoadedModel, what: str, *, optimize: bool = False, precision: str = "fp32") -> None:
        self.what, self.error, self.precision = what, "", precision
        self.input_names: list[str] = []
        self.output_names: list[str] = []
        try:
            self._session = make_session(model, optimize=optimize)
        except Exception as error:  # onnxruntime's exceptions share no base class
            self.error = first_line(error)
            return
        self.input_names = [value.name for value in self._session.get_inputs()]
        self.output_names = [value.name for value in self._session.get_outputs()]

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
        try:
            return self._session.run(None, fitted(self._session, arrays))
        except Exception as error:
            raise ModelError(f"onnxruntime cannot run {self.what}: {first_line(error)}") from error

    def typical_shapes(self) -> dict[str, list[int]]:
        """None: a model runs on whatever its inputs allow."""
        return {}
