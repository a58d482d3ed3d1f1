# SPDX-License-Identifier: Apache-2.0
"""The bank in onnxruntime: a Conv and an AveragePool, which convpool rewrites so that the pooling comes first."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import onnxruntime
from bank import COUNT, FILTERS, SIDE, Images, Pooling, finish
from onnx import TensorProto, helper, numpy_helper

import convpool


def model(pooling: Pooling) -> onnx.ModelProto:
    """Images [N, 1, H, W] as float32 to sums [N, 9, P, Q] (of `max`: to the filtered images)."""
    weights = FILTERS.astype(np.float32).reshape(COUNT, 1, SIDE, SIDE)
    nodes = [helper.make_node("Conv", ["x", "w"], ["filtered"], "filters")]
    if pooling.kind != "max":
        shape, strides = [pooling.window] * 2, [pooling.stride] * 2
        nodes.append(helper.make_node("AveragePool", ["filtered"], ["y"], "pooling", kernel_shape=shape, strides=strides))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 1, "H", "W"])
    y = helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, ["N", COUNT, "P", "Q"])
    graph = helper.make_graph(nodes, "filter_bank", [x], [y], [numpy_helper.from_array(weights, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@functools.cache
def _session(pooling: Pooling) -> onnxruntime.InferenceSession:
    made = model(pooling) if pooling.kind == "max" else convpool.optimize(model(pooling), target="cpu").model
    return onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])


def run_onnxruntime(images: Images, pooling: Pooling) -> Images:
    """Do what `bank.run_numpy` does.

    A mean of the window times its size is a whole number below 2^18, which float32 gives to 0.1; so rounding makes it exact.
    """
    (means,) = _session(pooling).run(None, {"x": images[:, None].astype(np.float32)})
    if pooling.kind != "max":
        return finish(np.rint(means * pooling.window**2).astype(np.int32), pooling)
    filtered = finish(means.astype(np.int32), pooling)
    rows, columns = pooling.out_size(*images.shape[1:])
    reach = slice(0, rows * pooling.window), slice(0, columns * pooling.window)
    tiles = filtered[..., reach[0], reach[1]].reshape(*filtered.shape[:2], rows, pooling.window, columns, pooling.window)
    return tiles.max((3, 5))
