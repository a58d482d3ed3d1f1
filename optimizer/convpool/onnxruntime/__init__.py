# SPDX-License-Identifier: Apache-2.0
"""onnxruntime on a GPU: ConvAvgPool and its fused variants by the library's kernels, on the CUDA provider.

    session = convpool.onnxruntime.session("model.convpool.onnx")
    outputs = session.run(None, inputs)

Needs onnxruntime-gpu 1.21 or later, and libconvpool_ort.so, which comes with libconvpool.so.  The same file runs without either:
by the functions that it carries.
"""

from convpool.errors import OnnxruntimeError
from convpool.onnxruntime.session import CPU, CUDA, library_path, register, session

__all__ = ["CPU", "CUDA", "OnnxruntimeError", "library_path", "register", "session"]
