# SPDX-License-Identifier: Apache-2.0
"""The types of the public functions' arguments."""

import os
from typing import Any, Literal, Protocol

from onnx import ModelProto

from convpool.ir.model import LoadedModel


class Graph(Protocol):
    """An onnx_graphsurgeon.Graph, by what it has: convpool works without that package."""

    nodes: Any
    inputs: Any
    outputs: Any
    import_domains: Any


Model = str | os.PathLike[str] | bytes | ModelProto | Graph | LoadedModel
"""A path, serialised bytes, an onnx.ModelProto, an onnx_graphsurgeon.Graph, or what an OptimizeResult has as `loaded`."""
Target = Literal["any", "cpu", "tensorrt", "cuda"]
"""The runtime that a result is for; `convpool.options.TARGETS` says what each stands for."""
Lowering = Literal["convavgpool", "direct", "fused", "auto"]
"""The form of a rewritten pair, `convpool.algebra.geometry.REQUESTS`."""
Upsampling = Literal["conv_first", "fused", "subpixel", "phases", "direct"]
"""The form of a convolution behind a nearest upsampling, `convpool.algebra.expand.FORMS`."""
Accumulation = Literal["default", "packed"]
"""How kernels sum pooling windows of 16-bit types, `convpool.algebra.parts.ACCUMULATIONS`."""
Layout = Literal["auto", "one", "keep"]
"""Where a saved model's weights go, `convpool.ir.files.LAYOUTS`."""
