"""TensorRT engines whose ConvAvgPool nodes run on convpool's kernels.

    from convpool.tensorrt import build_engine, Engine
    engine = build_engine("model.onnx", precision="fp16", profiles={"x": ([1, 3, 64, 64], [8, 3, 64, 64], [64, 3, 64, 64])})
    engine.save("model.engine")
    outputs = Engine.load("model.engine").run({"x": images})

Works with the Python packages of TensorRT 8.6 to 11.  Importing this needs neither TensorRT nor a GPU; building and
running do, and running also needs pycuda.
"""

from convpool.tensorrt.autotune import Timed, build_fastest
from convpool.tensorrt.build import PRECISIONS, Profile, build_engine
from convpool.tensorrt.engine import Engine, TensorInfo
from convpool.tensorrt.errors import TensorRTError
from convpool.tensorrt.library import load_plugin, plugin_path

__all__ = [
    "PRECISIONS",
    "Engine",
    "Profile",
    "TensorInfo",
    "TensorRTError",
    "Timed",
    "build_engine",
    "build_fastest",
    "load_plugin",
    "plugin_path",
]
