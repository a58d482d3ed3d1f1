# SPDX-License-Identifier: Apache-2.0
"""What a model must keep to before anything else looks at it.

onnx's checker and the runtimes are written in C++; what they make of a damaged file differs from version to version, up to a
crash.  Whatever can be told without them is refused here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain

from onnx import FunctionProto, GraphProto, ModelProto, TensorProto, ValueInfoProto, helper

from convpool.errors import ModelError
from convpool.ir.external import is_external, tensor_bytes
from convpool.ir.protos import all_nodes, graphs_within, model_nodes, tensors

MAX_NODES = 500_000
"""Most nodes once functions are expanded.  onnx's checker takes half a minute for these; large models have 20,000."""


def check_strings(model: ModelProto) -> None:
    """Raise ModelError for a name that is no UTF-8: protobuf lets it through, and gives bytes or raises when it is read."""
    try:
        wrong = next((text for text in _strings(model) if isinstance(text, bytes)), None)
    except UnicodeDecodeError as error:
        wrong = error.object
    if wrong is not None:
        raise ModelError(f"model: a name; got the bytes {bytes(wrong)[:40]!r}, expected UTF-8")


def _strings(model: ModelProto) -> Iterator[str | bytes]:
    for holder in _holders(model):
        yield holder.name
        if isinstance(holder, FunctionProto):
            yield from (holder.domain, *holder.input, *holder.output, *holder.attribute)
        for value in _values(holder):
            yield value.name
            yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)
    for node in model_nodes(model):
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        for attribute in node.attribute:
            yield from (attribute.name, attribute.ref_attr_name)
    for tensor in tensors(model):
        yield tensor.name
        for entry in tensor.external_data:
            yield from (entry.key, entry.value)
    for part in (model, *model.functions):
        yield from (entry.domain for entry in part.opset_import)


def check_types(model: ModelProto) -> None:
    """Raise ModelError for a tensor of an element type that onnx does not have, or of a negative size."""
    known = set(TensorProto.DataType.values())
    for holder in _holders(model):
        for value in _values(holder):
            if (found := value.type.tensor_type.elem_type) not in known:
                raise ModelError(f"tensor '{value.name}': element type; got {found}, expected one of ONNX's")
            sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            if any(size < -1 for size in sizes):  # some write -1 for an open one
                raise ModelError(f"tensor '{value.name}': shape; got {sizes}, expected no negative size")


def check_functions(model: ModelProto) -> None:
    """Raise ModelError for functions that older onnx crashes on, or that keep every onnx busy for minutes.

    These are two of one name, one that calls itself, directly or not, and calls that stand for more than MAX_NODES nodes.
    """
    calls: dict[tuple[str, str], Counter[tuple[str, str]]] = {}
    for function in model.functions:
        key = (function.domain, function.name)
        if key in calls and getattr(function, "overload", "") == "":
            raise ModelError(f"function '{function.domain}::{function.name}': defined twice; expected once")
        calls.setdefault(key, Counter()).update(_called(function))
    nodes: dict[tuple[str, str], int] = {}  # that a call stands for, at most MAX_NODES + 1; 0: on the way from the one begun with
    for start in calls:
        way = [(start, iter(calls[start]))] if start not in nodes else []
        while way:
            key, called = way[-1]
            nodes[key] = 0
            following = next((name for name in called if name in calls and not nodes.get(name)), None)
            if following is None:
                nodes[key] = _expanded(calls[key], nodes)
                way.pop()
            elif following in nodes:
                raise ModelError(f"function '{following[0]}::{following[1]}': it calls itself; got a circle, expected none")
            else:
                way.append((following, iter(calls[following])))
    if nodes and _expanded(_called(model.graph), nodes) > MAX_NODES:
        raise ModelError(f"functions: their calls stand for too many nodes; got more than {MAX_NODES}, expected no more")


def _called(holder: GraphProto | FunctionProto) -> Counter[tuple[str, str]]:
    return Counter((node.domain, node.op_type) for node in all_nodes(holder))


def _expanded(called: Counter[tuple[str, str]], nodes: Mapping[tuple[str, str], int]) -> int:
    """Nodes that these stand for once functions are expanded, at most MAX_NODES + 1."""
    return min(MAX_NODES + 1, 1 + sum(count * nodes.get(name, 1) for name, count in called.items()))


def _holders(model: ModelProto) -> Iterator[GraphProto | FunctionProto]:
    return chain.from_iterable(graphs_within(holder) for holder in (model.graph, *model.functions))


def _values(holder: GraphProto | FunctionProto) -> list[ValueInfoProto]:
    if isinstance(holder, FunctionProto):
        return list(holder.value_info)
    return [*holder.input, *holder.output, *holder.value_info]


def check_tensors(model: ModelProto) -> None:
    """Raise ModelError for a stored tensor of an unknown type, or whose data does not fill its shape."""
    for tensor in tensors(model):
        needed = tensor_bytes(tensor)
        if is_external(tensor):
            continue
        where = f"tensor '{tensor.name}'"
        if tensor.HasField("raw_data"):
            if needed is None or len(tensor.raw_data) != needed:
                expected = "strings" if needed is None else f"{needed} for {list(tensor.dims)}"
                raise ModelError(f"{where}: data; got {len(tensor.raw_data)} bytes, expected {expected}")
            continue
        elements, count = math.prod(tensor.dims), len(getattr(tensor, helper.tensor_dtype_to_field(tensor.data_type)))
        if count != _stored(tensor.data_type, elements, needed):
            raise ModelError(f"{where}: data; got {count} stored values, expected {elements} for {list(tensor.dims)}")


def _stored(data_type: int, elements: int, needed: int | None) -> int:
    """How many values of its field hold so many elements: two of a complex number, one of several narrow ones."""
    if data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128):
        return 2 * elements
    return min(elements, needed) if needed is not None else elements
