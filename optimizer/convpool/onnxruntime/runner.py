# SPDX-License-Identifier: Apache-2.0
"""A model on the CUDA provider as `convpool.check` runs and compares it."""

from __future__ import annotations

from typing import Any

from onnx import TensorProto, helper

from convpool.check.inputs import Arrays, float_types
from convpool.check.judge import precision_of
from convpool.check.session import Runner, with_layers
from convpool.errors import OnnxruntimeError, first_line
from convpool.ir.model import LoadedModel
from convpool.onnxruntime.session import session


class CudaRunner(Runner):
    """A model in onnxruntime on the CUDA provider, the operators by the library; a `convpool.check.session.Runner`.  what: the
    model, in messages.  precision: by the model's types, "tf32" where it is float32.  arguments: those of
    `convpool.onnxruntime.session`.  Raises OnnxruntimeError if the model cannot be loaded."""

    runtime = "onnxruntime's CUDA provider"

    def __init__(self, model: LoadedModel, what: str, **arguments: Any) -> None:
        self.what, self.model = what, model.proto
        types = float_types(model.proto)
        narrow = types - {TensorProto.FLOAT, TensorProto.DOUBLE}
        tf32 = not narrow and arguments.get("use_tf32", True)
        self.precision = "tf32" if tf32 else precision_of(map(helper.tensor_dtype_to_np_dtype, types))
        self.session = session(model, **arguments)
        self.input_names = [value.name for value in self.session.get_inputs()]
        self.output_names = [value.name for value in self.session.get_outputs()]

    def run(self, arrays: Arrays) -> dict[str, Any]:
        """All outputs by name.  Raises OnnxruntimeError if onnxruntime fails."""
        try:
            values = self.session.run(None, arrays)
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise OnnxruntimeError(f"onnxruntime cannot run {self.what}: {first_line(error)}") from error
        return dict(zip(self.output_names, values, strict=True))


def open_on_cuda(model: LoadedModel, what: str, *, layers: bool = False) -> CudaRunner:
    """A runner on the CUDA provider.  layers: intermediate tensors become outputs too.  Raises OnnxruntimeError."""
    runner = CudaRunner(with_layers(model) if layers else model, what)
    runner.model = model.proto
    return runner
