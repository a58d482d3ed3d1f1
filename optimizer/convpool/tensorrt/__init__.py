# SPDX-License-Identifier: Apache-2.0
"""TensorRT engines whose ConvAvgPool nodes run on convpool's kernels.

    from convpool.tensorrt import build, Engine
    built = build("model.onnx", precision="fp16", profiles={"x": ([1, 3, 64, 64], [8, 3, 64, 64], [64, 3, 64, 64])})
    built.save("model.engine")
    outputs = Engine.load("model.engine").run({"x": images})

`build` compares the engine with onnxruntime on the model; `build_engine` gives an engine that has not been run.

Works with the Python packages of TensorRT 8.6 to 11.  Importing this needs neither TensorRT nor a GPU; building and
running do, and running also needs pycuda.
"""

from convpool.errors import TensorRTError
from convpool.tensorrt.build_options import PRECISIONS, BuildOptions, Profile
from convpool.tensorrt.engine import Engine, TensorInfo
from convpool.tensorrt.package import load_plugin, plugin_path
from convpool.tensorrt.pipeline import BuildReport, Built, EngineMismatchError, Timed, Tuning, build, build_engine, build_fastest

__all__ = [
    "PRECISIONS", "BuildOptions", "BuildReport", "Built", "Engine", "EngineMismatchError", "Profile", "TensorInfo",
    "TensorRTError", "Timed", "Tuning", "build", "build_engine", "build_fastest", "load_plugin", "plugin_path",
]  # fmt: skip
