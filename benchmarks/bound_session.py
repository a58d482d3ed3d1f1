# SPDX-License-Identifier: Apache-2.0
"""A session with its inputs and outputs on the GPU: what a caller runs who wants speed, and what is timed."""

from __future__ import annotations

from typing import Any

import numpy as np

from convpool.check.inputs import Arrays
from convpool.errors import OnnxruntimeError, first_line
from convpool.onnxruntime.session import runtime_module


class Bound:
    """A session's inputs and outputs, bound to memory of the GPU for one set of shapes.

    The first two runs of a session with CUDA graphs warm up and capture; later ones replay.  The addresses stay the same, as
    a graph needs.  Raises OnnxruntimeError if onnxruntime refuses a run.
    """

    def __init__(self, session: Any, arrays: Arrays, device: int = 0) -> None:
        self.session = session
        self._runtime = runtime_module()
        self._binding = session.io_binding()
        self._device = device
        self._inputs: dict[str, Any] = {}
        for item in session.get_inputs():
            value = self._runtime.OrtValue.ortvalue_from_numpy(arrays[item.name], "cuda", device)
            self._inputs[item.name] = value
            self._binding.bind_ortvalue_input(item.name, value)
        self._outputs: list[Any] = []

    def run(self) -> None:
        """Run once and wait for the end."""
        self._run(None)

    def queue(self, runs: int, *, replay: bool = True) -> None:
        """Run so many times, and wait for the end of the last.  replay: False to launch node by node, CUDA graph or not."""
        queued, last = self._runtime.RunOptions(), self._runtime.RunOptions()
        queued.add_run_config_entry("disable_synchronize_execution_providers", "1")
        for options in () if replay else (queued, last):
            options.add_run_config_entry("gpu_graph_id", "-1")
        for _ in range(runs - 1):
            self._run(queued)
        self._run(last)

    def _run(self, options: Any) -> None:
        if not self._outputs:
            self._bind_outputs()
        try:
            self.session.run_with_iobinding(self._binding, options)
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise OnnxruntimeError(f"onnxruntime cannot run the model: {first_line(error)}") from error

    def update(self, arrays: Arrays) -> None:
        """Other values for the inputs, of the same shapes."""
        for name, value in self._inputs.items():
            value.update_inplace(np.ascontiguousarray(arrays[name]))

    def outputs(self) -> list[np.ndarray]:
        """Return the outputs of the last run, in order."""
        return [value.numpy() for value in self._outputs]

    def _bind_outputs(self) -> None:
        """To memory of the shapes that the inputs give; a session with CUDA graphs runs on nothing else."""
        names = [item.name for item in self.session.get_outputs()]
        shapes = [item.shape for item in self.session.get_outputs()]
        kinds = [item.type for item in self.session.get_outputs()]
        if any(not isinstance(size, int) for shape in shapes for size in shape):
            raise OnnxruntimeError(f"outputs: open sizes; got {shapes}, expected fixed ones to bind memory")
        for name, shape, kind in zip(names, shapes, kinds, strict=True):
            value = self._runtime.OrtValue.ortvalue_from_shape_and_type(shape, _TYPES[kind], "cuda", self._device)
            self._outputs.append(value)
            self._binding.bind_ortvalue_output(name, value)


_TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}
