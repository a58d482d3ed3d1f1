# SPDX-License-Identifier: Apache-2.0
"""Models as the rules see them: the index of a graph, or of a function that is called once."""

import onnx
import pytest
from onnx import numpy_helper

from convpool.ir.index import Scope, index_model
from convpool.ir.model import infer_shapes
from tests.support.models import graph


def index(model: onnx.ModelProto) -> list[Scope]:
    return index_model(model, numpy_helper.to_array, lambda *_: pytest.fail("nothing to compute"), infer_shapes(model))


FUNCTION = """<domain: "local", opset_import: ["": 17]> net <e> (a, w) => (b) {{ {0} }}"""


def function_scope(body: str, shape: str = "2,16,8,8") -> Scope:
    """The scope of a function, called with a tensor and weights."""
    model = graph(
        "y = local.net<e = 1>(x, w)", inputs=f"float[{shape}] x", functions=FUNCTION.format(body), imports=', "local": 1'
    )
    return next(scope for scope in index(model) if scope.is_function)


def chain(count: int, node: str, first: str, last: str) -> str:
    """So many nodes behind one another, from tensor `first` to `last`."""
    names = [first, *(f"{last}{n}" for n in range(1, count)), last]
    return "\n".join(f"{y} = {node}({x})" for x, y in zip(names, names[1:], strict=False))
