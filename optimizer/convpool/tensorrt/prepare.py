"""A model in the form that one TensorRT version reads: everything that differs between versions, on the ONNX side.

| TensorRT | opset | half precision |
|---|---|---|
| 8.6, 9 | up to 17 | a flag of the builder |
| 10, 11 | as the parser | types in the model: `cast_floats` |

Local functions, which 8.6 does not read and 10 sometimes takes before a plugin, are inlined or left to the plugin.
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import onnx
import onnx.inliner
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.external_data_helper import load_external_data_for_model

from convpool import operator
from convpool.errors import ModelError
from convpool.graph import graphs_within, index_model, is_op
from convpool.modelio import load

OLD_PARSER_OPSET = 17
"""The newest opset that the parser of TensorRT 8.6 knows."""
CONSTANT_WEIGHTS, ALLOW_TF32 = "constant_weights", "allow_tf32"
WEIGHTED = ("Conv", "ConvTranspose", "Gemm")
_NUMPY_TYPES = {TensorProto.FLOAT16: np.dtype(np.float16), TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16)}
_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype")
_FLOAT_ONLY_INPUTS = {"Resize": (1, 2), "Upsample": (1,)}
"""Inputs that stay float32 whatever the type of the data: regions and scales."""


def has_operator(model: ModelProto) -> bool:
    """Whether the model has nodes of convpool's operators."""
    return any(is_operator(node) for node in _nodes(model.graph))


def is_operator(node: NodeProto) -> bool:
    """Whether the node is a ConvAvgPool or a sibling, in whatever domain a runtime wants it."""
    return node.op_type in operator.OP_TYPES


def self_contained(model: object) -> ModelProto:
    """A copy of the model with its external data read in.  Raises ModelError."""
    loaded = load(model)
    copy = ModelProto()
    copy.CopyFrom(loaded.proto)
    if loaded.has_external_data:
        load_external_data_for_model(copy, str(loaded.base_dir))
    return copy


def inline_own_functions(model: ModelProto) -> ModelProto:
    """Without local functions but those of convpool's operators: what stands in them is seen, and goes to the plugin."""
    own = [(function.domain, function.name) for function in model.functions if function.name not in operator.OP_TYPES]
    return _without_trailing_blanks(onnx.inliner.inline_selected_functions(model, own)) if own else model


def for_parser(model: ModelProto, major: int, *, plugin: bool, allow_tf32: bool) -> ModelProto:
    """The model for the ONNX parser of TensorRT `major`; changed in place where it can be, so pass a copy."""
    if plugin and has_operator(model):  # TensorRT 10.0 to 10.6 take a function before a plugin of the same name
        others = [function for function in model.functions if function.name not in operator.OP_TYPES]
        del model.functions[:]
        model.functions.extend(others)
    if model.functions:
        model = _without_trailing_blanks(onnx.inliner.inline_local_functions(model))
    if major < 10:
        opset = next(item.version for item in model.opset_import if item.domain in ("", "ai.onnx"))
        if opset > OLD_PARSER_OPSET:
            raise ModelError(
                f"model: opset; got {opset}, expected at most {OLD_PARSER_OPSET} for TensorRT {major}; export it with "
                f"opset {OLD_PARSER_OPSET}"
            )
    for node in filter(is_operator, _nodes(model.graph)):
        _say(node, ALLOW_TF32, plugin and allow_tf32)
    return model


def _say(node: NodeProto, name: str, truth: bool) -> None:
    """Give the node the attribute `name` = 1, or none of that name."""
    others = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend(others)
    if truth:
        node.attribute.append(helper.make_attribute(name, 1))


def _without_trailing_blanks(model: ModelProto) -> ModelProto:
    """Drop empty inputs at a node's end, as inlining leaves them for an optional bias; TensorRT refuses such a node."""
    for node in _nodes(model.graph):
        while node.input and not node.input[-1]:
            del node.input[-1]
    return model


def fold_weights(model: ModelProto) -> None:
    """Make initializers of weights that the main graph computes from constants, as spectral normalisation leaves them.

    TensorRT would compute them in every run.
    """
    graph, scope = model.graph, index_model(model, numpy_helper.to_array)[0]
    folded: set[str] = set()
    chains: set[int] = set()
    for node in graph.node:
        name = node.input[1] if len(node.input) > 1 and (is_op(node, *WEIGHTED) or is_operator(node)) else ""
        nodes = scope.arithmetic(name) if name in scope.producer and name not in folded else None
        value = scope.weights(name) if nodes else None
        if value is not None:
            graph.initializer.append(numpy_helper.from_array(value.array(), name))
            folded.add(name)
            chains.update(nodes)
    read = {name for index, node in enumerate(graph.node) if index not in chains for name in node.input}
    read |= scope.captured | scope.outputs
    leaves: set[str] = set()
    for index in sorted(chains, reverse=True):  # readers stand behind what they read
        node = graph.node[index]
        if set(node.output) <= folded or not set(node.output) & read:
            leaves.update(node.input)
            del graph.node[index]
        else:
            read.update(node.input)
    unread = leaves - read - {value.name for value in graph.input}
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name in unread:
            del graph.initializer[index]


def say_constant_weights(model: ModelProto, constant: bool) -> None:
    """Tell the plugin, by the attribute constant_weights = 1, of nodes whose weights are initializers and nothing else.

    It then keeps what it makes of them from run to run.  That must not be said of an engine that may be refitted: its
    weights change in place, which no plugin can see.
    """
    given = {value.name for value in model.graph.input}
    weights = {tensor.name for tensor in model.graph.initializer} - given
    for node in filter(is_operator, _nodes(model.graph)):
        _say(node, CONSTANT_WEIGHTS, False)
    for node in filter(is_operator, model.graph.node):  # the main graph's, where a name has one meaning
        _say(node, CONSTANT_WEIGHTS, constant and node.input[1] in weights)


def serialized(model: ModelProto) -> bytes:
    """The model's bytes.  Raises ModelError past protobuf's 2 GiB."""
    try:
        return model.SerializeToString()
    except Exception as error:
        raise ModelError("model: more than 2 GiB with its weights; TensorRT cannot read it from memory") from error


def half_weights(model: ModelProto, kind: int) -> None:
    """Give the operators' nodes constants of type `kind` (FLOAT16): weights, biases, scales and shifts that only they read.

    For weakly typed networks, where TensorRT would otherwise convert the float32 constants in every run.
    """
    elsewhere = {
        node.input[index]
        for node in _nodes(model.graph)
        for index in range(len(node.input))
        if index == 0 or not is_operator(node)
    }
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in filter(is_operator, model.graph.node):
        for name in node.input[1:]:
            if name in initializers and name not in elsewhere:
                _convert(initializers[name], kind)


def mark_all(model: ModelProto) -> None:
    """Make every intermediate float tensor of known type an output, so that an engine keeps it."""
    known = {value.name: value for value in onnx.shape_inference.infer_shapes(model).graph.value_info}
    outputs = {value.name for value in model.graph.output}
    for node in model.graph.node:
        for name in node.output:
            value = known.get(name)
            if value is not None and name not in outputs and value.type.tensor_type.elem_type == TensorProto.FLOAT:
                model.graph.output.append(value)


def cast_floats(model: ModelProto, kind: int) -> None:
    """Make every float32 tensor inside the model one of type `kind` (FLOAT16, BFLOAT16); inputs and outputs stay float32.

    For strongly typed networks, where the model's types say how TensorRT computes.
    """
    graph = model.graph
    kept = _float_only(graph)
    for node in _nodes(graph):
        if node.op_type != "Constant" or node.output[0] not in kept:
            _convert_attributes(node, kind)
    for inner in graphs_within(graph):
        for tensor in inner.initializer:
            if tensor.name not in kept:
                _convert(tensor, kind)
        for value in (*inner.value_info, *(() if inner is graph else (*inner.input, *inner.output))):
            if value.type.tensor_type.elem_type == TensorProto.FLOAT and value.name not in kept:
                value.type.tensor_type.elem_type = kind
    _cast_ends(graph, kind)


def _float_only(graph: GraphProto) -> set[str]:
    names: set[str] = set()
    for node in _nodes(graph):
        for index in _FLOAT_ONLY_INPUTS.get(node.op_type, ()):
            names.update(node.input[index : index + 1])
    return names


def _convert(tensor: TensorProto, kind: int) -> None:
    if tensor.data_type != TensorProto.FLOAT:
        return
    values = numpy_helper.to_array(tensor)
    largest = float(ml_dtypes.finfo(_NUMPY_TYPES[kind]).max)
    finite = np.where(np.isfinite(values), np.clip(values, -largest, largest), values)
    tensor.CopyFrom(helper.make_tensor(tensor.name, kind, tensor.dims, finite.astype(_NUMPY_TYPES[kind]).tobytes(), raw=True))


def _convert_attributes(node: NodeProto, kind: int) -> None:
    for attribute in node.attribute:
        if attribute.name in _TYPE_ATTRIBUTES and attribute.type == AttributeProto.INT:
            if attribute.i == TensorProto.FLOAT:
                attribute.i = kind
        elif attribute.type == AttributeProto.TENSOR and node.op_type in ("Constant", "ConstantOfShape"):
            _convert(attribute.t, kind)
        elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
            shape = [] if attribute.name == "value_float" else [len(attribute.floats)]
            values = [attribute.f] if attribute.name == "value_float" else list(attribute.floats)
            tensor = helper.make_tensor("", TensorProto.FLOAT, shape, values)
            _convert(tensor, kind)
            attribute.CopyFrom(helper.make_attribute("value", tensor))


def _cast_ends(graph: GraphProto, kind: int) -> None:
    """Casts between the float32 inputs and outputs and the inside."""
    first, last, renames = [], [], {}
    initializers = {tensor.name for tensor in graph.initializer}
    for value in graph.input:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT and value.name not in initializers:
            renames[value.name] = f"{value.name}__inside"
            first.append(helper.make_node("Cast", [value.name], [renames[value.name]], to=kind))
    for value in graph.output:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            inside = renames.setdefault(value.name, f"{value.name}__inside")
            last.append(helper.make_node("Cast", [inside], [value.name], to=TensorProto.FLOAT))
    for node in _nodes(graph):
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                names[index] = renames.get(name, name)
    nodes = [*first, *graph.node, *last]
    del graph.node[:]
    graph.node.extend(nodes)


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for inner in graphs_within(graph):
        yield from inner.node


__all__ = ["cast_floats", "for_parser", "half_weights", "has_operator", "mark_all", "say_constant_weights", "self_contained"]
