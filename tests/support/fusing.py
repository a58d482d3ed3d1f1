# SPDX-License-Identifier: Apache-2.0
"""Pairs with something before and behind them, and the optimizer with its options for that."""

import numpy as np
import onnx

from convpool.ir import schema
from tests.support import rewriting
from tests.support.models import operators, weights
from tests.support.rewriting import POOL

PAIR = f"h = Conv<pads=[1,1,1,1]>(p, w)\ny = {POOL}(h)"
TAIL = PAIR.replace("y =", "q =").replace("(p, w", "(x, w")
SKIP = f"u = Conv(x, v)\nr = {POOL}(u)"
NORM = {"g": (16,), "b": (16,), "m": (16,), "d": np.full(16, 2, np.float32)}
BEHIND = {"g": (32,), "b": (32,), "m": (32,), "d": np.full(32, 2, np.float32)}
PER_CHANNEL = {"k": (16, 1, 1), "t": (1, 16, 1, 1), "s": np.float32(-0.5)}
HALF = weights((32, 16, 3, 3), dtype=np.float16)
RESIDUAL = "float[1,16,12,12] x, float[1,32,6,6] r"


def rewrite(model: onnx.ModelProto, pairs: int, lowering: str = "convavgpool", **options) -> onnx.ModelProto:
    """`rewriting.rewrite` to nodes of the operator unless said otherwise."""
    return rewriting.rewrite(model, pairs, lowering, **options)


def operator_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The nodes of convpool's operators."""
    return [node for node in model.graph.node if schema.is_operator(node)]


def only(model: onnx.ModelProto) -> onnx.NodeProto:
    """The one node of a model into which all else was fused."""
    assert [schema.is_operator(node) for node in model.graph.node] == [True], operators(model.graph)
    return model.graph.node[0]
