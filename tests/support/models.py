# SPDX-License-Identifier: Apache-2.0
"""Small models from ONNX text: `graph("h = Conv(x, w) ...")`, with seeded weights for the names that are given a shape."""

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from convpool.ir import schema
from convpool.ir.index import Scope, index_model
from convpool.ir.inference import infer_shapes

TYPES = {"float": np.float32, "float16": np.float16, "double": np.float64}


def weights(shape: tuple[int, ...], seed: int = 0, dtype=np.float32) -> np.ndarray:
    """Normal numbers; the same for the same shape and seed."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def sparse_of(array: np.ndarray, name: str, flat: bool = True) -> onnx.SparseTensorProto:
    """Every third element, by flat or by full indices."""
    places = np.arange(0, array.size, 3)
    indices = places if flat else np.stack(np.unravel_index(places, array.shape), axis=1)
    values = numpy_helper.from_array(array.reshape(-1)[places], name)
    return helper.make_sparse_tensor(values, numpy_helper.from_array(indices.astype(np.int64), f"{name}_places"), array.shape)


def graph(
    body: str,
    constants: dict[str, object] | None = None,
    *,
    inputs: str = "float[1,16,12,12] x",
    outputs: str = "float[a,b,c,d] y",
    opset: int = 17,
    ir: int = 8,
    functions: str = "",
    imports: str = "",
) -> onnx.ModelProto:
    """A model with `body` as its nodes.  constants: initializers by name; a tuple is a shape to fill with `weights`, a list of
    ints an int64 tensor. imports: of domains beside the standard one; by default "local" where there are functions."""
    imports = imports or (', "local": 1' if functions else "")
    text = f'<ir_version: {ir}, opset_import: ["": {opset}{imports}]>\nmain ({inputs}) => ({outputs})\n{{\n{body}\n}}\n'
    model = onnx.parser.parse_model(text + functions)
    for number, (name, value) in enumerate({"w": (32, 16, 3, 3), **(constants or {})}.items()):
        if not any(name in names for names in _names(model.graph)):
            continue
        array = weights(value, number) if isinstance(value, tuple) else np.asarray(value)
        array = array.astype(np.int64) if isinstance(value, list) else array
        model.graph.initializer.append(numpy_helper.from_array(array, name))
        if ir < 4:
            elem_type = helper.np_dtype_to_tensor_dtype(array.dtype)
            model.graph.input.append(helper.make_tensor_value_info(name, elem_type, array.shape))
    return model


def graph_of(body: str, given: dict[str, object]) -> onnx.ModelProto:
    """`graph` by one dictionary: its arguments, and constants by their names."""
    arguments = {name: given[name] for name in ("inputs", "outputs", "opset") if name in given}
    return graph(body, {name: value for name, value in given.items() if name not in arguments}, **arguments)


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, Sequence],
    outputs: dict[str, Sequence],
    constants: dict[str, np.ndarray] | None = None,
    *,
    kind: int = TensorProto.FLOAT,
    opset: int = 17,
    version: int = 1,
    functions: Sequence[onnx.FunctionProto] = (),
) -> onnx.ModelProto:
    """A model of nodes that are made already.  inputs, outputs: shapes by name.  version: of convpool's operators."""
    values = ([helper.make_tensor_value_info(name, kind, shape) for name, shape in given.items()] for given in (inputs, outputs))
    stored = [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(schema.DOMAIN, version)]
    made = helper.make_graph(nodes, "g", *values, stored)
    return helper.make_model(made, opset_imports=imports, ir_version=8, functions=functions)


def _names(proto):
    """The input names of every node, subgraphs included."""
    for node in proto.node:
        yield node.input
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _names(attribute.g)
                yield [value.name for value in attribute.g.output]


def random_feeds(model: onnx.ModelProto, seed: int = 1, size: int = 8) -> dict[str, np.ndarray]:
    """Normal numbers for every input without an initializer; open dimensions become `size`, truth values true."""
    known, feeds = {tensor.name for tensor in model.graph.initializer}, {}
    for value in model.graph.input:
        if value.name not in known:
            kind = value.type.tensor_type
            shape = tuple(dim.dim_value or size for dim in kind.shape.dim)
            dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
            feeds[value.name] = weights(shape, seed + len(feeds)).astype(dtype) if dtype.kind == "f" else np.ones(shape, dtype)
    return feeds


def operators(proto) -> dict[str, int]:
    """How often each operator occurs in a graph, subgraphs left out."""
    names = [node.op_type for node in proto.node]
    return {name: names.count(name) for name in sorted(set(names))}


def index(model: onnx.ModelProto) -> list[Scope]:
    return index_model(model, numpy_helper.to_array, lambda *_: pytest.fail("nothing to compute"), infer_shapes(model))


FUNCTION = """<domain: "local", opset_import: ["": 17]> net <e> (a, w) => (b) {{ {0} }}"""


def function_scope(body: str, shape: str = "2,16,8,8") -> Scope:
    """The scope of a function, called with a tensor and weights."""
    model = graph("y = local.net<e = 1>(x, w)", inputs=f"float[{shape}] x", functions=FUNCTION.format(body))
    return next(scope for scope in index(model) if scope.is_function)
