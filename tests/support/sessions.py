# SPDX-License-Identifier: Apache-2.0
"""onnxruntime with its own optimisations off, so that a difference is convpool's."""

import numpy as np
import onnx
import onnxruntime


def session(model: onnx.ModelProto | bytes | str) -> onnxruntime.InferenceSession:
    """A session on one CPU thread."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(model: onnx.ModelProto | bytes | str, feeds: dict[str, np.ndarray]) -> list:
    """All outputs of one run."""
    return session(model).run(None, feeds)
