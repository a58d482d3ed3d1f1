# SPDX-License-Identifier: Apache-2.0
"""Packed sums of box means in TensorRT and in onnxruntime, against float64.  Needs a GPU for whose layer the library has them."""

import numpy as np
import pytest

from convpool import onnxruntime as on_gpu
from convpool.tensorrt import build_engine
from convpool.tensorrt.package import is_weakly_typed, tensorrt_module
from tests.support.accuracy.half_io import from_channels_last, half_channels_last, to_channels_last
from tests.support.gpu import require_gpu, skip_or_fail
from tests.support.packed_layer import PackedLayer


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_onnxruntime_s_operator(dtype, plugin, monkeypatch):
    monkeypatch.setenv("CONVPOOL_LIBRARY", str(plugin))
    layer = PackedLayer(dtype)
    x, results = np.ascontiguousarray(np.moveaxis(layer.x, 1, -1)), []
    for accumulation in ("packed", "default"):
        try:
            session = on_gpu.session(layer.node(accumulation))
        except on_gpu.OnnxruntimeError as error:
            skip_or_fail(str(error))
        first, second = (session.run(None, {"x": x})[0] for _ in range(2))  # weights transformed, and kept
        assert first.tobytes() == second.tobytes()
        results.append(np.moveaxis(first, -1, 1))
    layer.check(*results)


def test_tensorrt_s_plugin():
    """In the formats that the node has inside a network: halves, channels last."""
    require_gpu()
    layer, weakly_typed = PackedLayer(), is_weakly_typed(tensorrt_module())
    results = []
    for accumulation in ("packed", "default"):
        options = {"precision": "fp16", "accumulation": accumulation, "optimization_level": 1}
        if weakly_typed:  # others have the inputs' own types
            options["configure_network"] = half_channels_last
        engine = build_engine(layer.pair(), **options)
        given = to_channels_last({"x": layer.x}) if weakly_typed else {"x": layer.x}
        found = engine.run(given)
        results.append((from_channels_last(found) if weakly_typed else found)["y"])
    layer.check(*results, differ=weakly_typed)  # TensorRT 10 and later take the fastest tactic, packed or not
