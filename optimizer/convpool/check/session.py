# SPDX-License-Identifier: Apache-2.0
"""onnxruntime sessions on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import ModelProto

from convpool.check.inputs import Arrays
from convpool.ir.model import LoadedModel
from convpool.ir.save import serialize


def make_session(model: LoadedModel, *, optimize: bool, threads: int = 0, spin: bool = False) -> Any:
    """An onnxruntime session on the CPU.

    optimize: with onnxruntime's own passes.  threads: 0 for as many as there are cores.  spin: idle threads wait for work
    awake, as is onnxruntime's default: faster for a session by itself, and in the way of others.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spin)))
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    if model.base_dir is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(model.base_dir))
    return onnxruntime.InferenceSession(serialize(model.proto), options, providers=["CPUExecutionProvider"])


def fitted(session: Any, arrays: Arrays) -> Arrays:
    """The arrays as a session's inputs take them: in float32 where the model was made float32."""
    floats = {item.name for item in session.get_inputs() if item.type == "tensor(float)"}
    return {name: array.astype(np.float32, copy=False) if name in floats else array for name, array in arrays.items()}


def evaluate(model: ModelProto, name: str) -> np.ndarray:
    """The value of one tensor of a model without inputs, for `convpool.ir.index`.  Raises what onnxruntime raises."""
    (result,) = make_session(LoadedModel(model, None, 0), optimize=False).run([name], {})
    return result
