# SPDX-License-Identifier: Apache-2.0
"""Constants: values that no caller can change, and what follows from them before a model is run.

Small shape arithmetic is evaluated by onnx's reference implementation.  Weights of any size that a model computes from
constants are evaluated by whoever indexes the model (`Evaluate`): nothing here runs a runtime.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, SparseTensorProto, TensorProto, ValueInfoProto, helper, numpy_helper

from convpool.ir.files import is_external
from convpool.ir.inference import infer_elsewhere

Read = Callable[[TensorProto], np.ndarray]
"""Gives the value of a stored tensor, external or not."""
Evaluate = Callable[[ModelProto, str], np.ndarray]
"""Gives the value of one tensor of a model without inputs.  May raise anything: then the value is unknown."""
FOLDABLE = (
    "Abs Add Cast CastLike Ceil Clip Concat ConstantOfShape Div Equal Expand Floor Gather Greater Less Max Min Mod Mul Neg "
    "Not Range ReduceMax ReduceMin ReduceProd ReduceSum Reshape ScatterND Slice Split Squeeze Sub Tile Transpose Unsqueeze "
    "Where"
).split()
"""Operators of shape arithmetic that are evaluated where all their inputs are constants."""
MAX_FOLDED_ELEMENTS = 4096
"""Largest tensor taken into or made by that: sizes, axes, and per-channel parameters."""
MAX_FOLDED_NODES = 100
"""Longest chain of nodes looked through to a constant."""
ARITHMETIC = (
    "Abs Add Concat Div Exp Flatten Gemm Identity MatMul Max Min Mul Neg Pow Reciprocal ReduceL2 ReduceMean ReduceSum "
    "ReduceSumSquare Reshape Slice Sqrt Squeeze Sub Transpose Unsqueeze"
).split()
"""Operators of reparametrised weights, beside Cast of stored HALF_TYPES.  Not DequantizeLinear, which keeps a file small."""
HALF_TYPES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
COMPUTING_IR_VERSION = 8
MAX_WEIGHT_ELEMENTS = 2**27
"""Most elements that weights are computed from."""
UNIT_ROUNDOFF: dict[int, float] = {
    TensorProto.FLOAT16: 2.0**-11,
    TensorProto.BFLOAT16: 2.0**-8,
    TensorProto.FLOAT: 2.0**-24,
    TensorProto.DOUBLE: 2.0**-53,
}
"""Largest relative error of a number that is rounded to a type."""


@dataclass(frozen=True)
class Constant:
    """A value that no caller can change: an initializer or a Constant node, read only when asked for."""

    tensor: TensorProto
    read: Read

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.dims)

    @property
    def data_type(self) -> int:
        return self.tensor.data_type

    @property
    def unit_roundoff(self) -> float:
        """Relative error that its numbers may have by being rounded to their type; 0 for types that are not floating-point."""
        return UNIT_ROUNDOFF.get(self.data_type, 0.0)

    def array(self) -> np.ndarray:
        """The value; external data is read from its file here."""
        return self.read(self.tensor)


def folded(node: NodeProto, name: str, inputs: Mapping[str, np.ndarray], opset: int) -> TensorProto | None:
    """Return a node's output `name` for constants; None if too large or the reference refuses."""
    stored = [numpy_helper.from_array(array, source) for source, array in inputs.items()]
    outputs = [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None)]
    graph = helper.make_graph([node], "fold", [], outputs, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    try:
        from onnx.reference import ReferenceEvaluator

        shape = infer_elsewhere(model).graph.output[0].type.tensor_type.shape
        if math.prod(dim.dim_value for dim in shape.dim) > MAX_FOLDED_ELEMENTS:
            return None
        (value,) = ReferenceEvaluator(model).run([name], {})
        result = np.asarray(value)
    except Exception:  # whatever the reference implementation has against it: then it is not folded
        return None
    return None if result.size > MAX_FOLDED_ELEMENTS else numpy_helper.from_array(result, name)


def computed(
    nodes: Sequence[NodeProto], name: str, leaves: Mapping[str, Constant], opset: int, evaluate: Evaluate
) -> TensorProto | None:
    """Return `name` that nodes give for constants; None if too large or `evaluate` refuses."""
    if sum(math.prod(leaf.shape) for leaf in leaves.values()) > MAX_WEIGHT_ELEMENTS:
        return None
    stored = [numpy_helper.from_array(leaf.array(), source) for source, leaf in leaves.items()]
    graph = helper.make_graph(nodes, "weights", [], [ValueInfoProto(name=name)], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=COMPUTING_IR_VERSION)
    try:
        result = evaluate(model, name)
    except Exception:  # a type or opset that the runtime does not have: then these are no constants
        return None
    return numpy_helper.from_array(result, name)


def constant_of(node: NodeProto, read: Read) -> Constant | None:
    """The value of a Constant node; None for a string, or an attribute of the function around it."""
    if len(node.attribute) != 1 or node.attribute[0].ref_attr_name:
        return None
    attribute = node.attribute[0]
    if attribute.name == "value":
        return Constant(attribute.t, read)
    if attribute.name == "sparse_value":
        return sparse_constant(attribute.sparse_tensor)
    if attribute.name not in ("value_float", "value_floats", "value_int", "value_ints"):
        return None
    kind = np.float32 if "float" in attribute.name else np.int64
    return Constant(numpy_helper.from_array(np.array(helper.get_attribute_value(attribute), kind)), read)


def sparse_constant(sparse: SparseTensorProto) -> Constant | None:
    """A sparse tensor as a constant that is made dense when it is read; None for one in a file, or too large for that."""
    if is_external(sparse.values) or is_external(sparse.indices) or math.prod(sparse.dims) > MAX_WEIGHT_ELEMENTS:
        return None

    def dense(tensor: TensorProto) -> np.ndarray:
        values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
        array = np.zeros(tuple(tensor.dims), values.dtype)
        if indices.ndim == 2:
            array[tuple(indices.T)] = values
        else:
            array.reshape(-1)[indices] = values
        return array

    return Constant(TensorProto(data_type=sparse.values.data_type, dims=sparse.dims), dense)
