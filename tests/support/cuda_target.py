# SPDX-License-Identifier: Apache-2.0
"""Models for --target cuda, and what every result must hold."""

import onnx

import convpool
from convpool.ir import schema
from tests.support.models import graph, random_feeds, weights
from tests.support.rewriting import PAIR, RTOL, assert_close, assert_stable

NARROW = {"w": weights((32, 16, 3, 3)) / 12, "k": weights((16, 32, 3, 3)) / 17, "v": weights((32, 16, 3, 3)) / 12}
TAIL = PAIR.replace("y =", "p =")


def for_cuda(model: onnx.ModelProto, size: int = 8, **options) -> convpool.OptimizeResult:
    """The result, which is valid, equal, and stays as it is in a second run."""
    result = convpool.optimize(model, target="cuda", check=0, **options)
    onnx.checker.check_model(result.model, full_check=True)
    assert_stable(result.model, target="cuda", check=0, **options)
    assert_close(model, result.model, random_feeds(model, size=size), 4 * RTOL)
    return result


def layouts(model: onnx.ModelProto) -> list[int]:
    """The attribute channels_last of the operator's nodes, in order."""
    return [schema.layout_of(node) for node in model.graph.node if schema.is_operator(node)]


def wide(body: str, constants=None, **options) -> onnx.ModelProto:
    """A model whose maps are large enough that a Transpose costs more than a launch."""
    return graph(body, {**NARROW, **(constants or {})}, inputs="float[4,16,64,64] x", **options)
