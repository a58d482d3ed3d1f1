# SPDX-License-Identifier: Apache-2.0
"""Convolutions without a pooling beside a pair: the models, and why one stays."""

import onnx

import convpool
from tests.support.models import graph
from tests.support.rewriting import POOL

PAIR = f"h = Conv<pads=[1,1,1,1]>(s, w)\ny = {POOL}(h)"
STEM = "s = Conv<pads=[1,1,1,1]>(x, v)\n"
RELU = STEM.replace("s =", "c =") + "s = Relu(c)\n"
SHAPES = {"v": (16, 3, 3, 3)}
POOLED = "p = AveragePool<kernel_shape=[2,2], strides=[2,2]>(x)\ns = Conv<pads=[1,1,1,1]>(p, v)\n"
OTHER = f"g = Conv(z, w)\no = {POOL}(g)"
BESIDE = {"outputs": "float[a,b,c,d] y, float[i,j,k,l] o"}
WIDE = "float[1,64,8,8] x"
WIDE_SHAPES = {"v": (64, 64, 3, 3), "w": (32, 64, 3, 3)}


def made(model: onnx.ModelProto) -> list[str]:
    """The operators of all nodes, in order."""
    return [node.op_type for node in model.graph.node]


def windows(node: onnx.NodeProto) -> dict[str, list[int]]:
    """A node's attributes that are lists of numbers."""
    return {item.name: list(item.ints) for item in node.attribute if item.ints}


def check_reason(kind, name, body, constants, inputs, expected):
    """The convolution 's' beside a pair is rejected for the reason expected, and the model is as without the option."""
    constants = {key: value for key, value in {**SHAPES, **constants}.items() if value is not None}
    outputs = f"float[{'a,b,c' if name == 'one axis' else 'a,b,c,d'}] s, float[i,j,k,l] o"
    model = graph(body + OTHER, constants, inputs=f"{inputs}, float[1,16,12,12] z", outputs=outputs)
    result = convpool.optimize(model, check=0, **{kind: True})
    assert [(site.pattern, site.status, site.reason) for site in result.report.sites] == [
        ("conv_pool", "rewritten", None),
        (kind, "rejected", expected),
    ]
    plain = convpool.optimize(model, check=0)
    assert result.model.SerializeToString() == plain.model.SerializeToString()
