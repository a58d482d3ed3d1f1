# SPDX-License-Identifier: Apache-2.0
"""The same model as other exporters write it: channels last with Transposes around, in functions, in the domain ai.onnx."""

import numpy as np
import onnx
from onnx import AttributeProto, helper, numpy_helper

from convpool.algebra.parts import to_channels_first, to_channels_last
from convpool.ir.model import infer_shapes
from convpool.ir.protos import model_nodes

ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Relu", "Identity", "Tanh", "Sigmoid", "LeakyRelu")


def copy_of(model: onnx.ModelProto) -> onnx.ModelProto:
    result = onnx.ModelProto()
    result.CopyFrom(model)
    return result


def in_long_domain(model: onnx.ModelProto, rng: np.random.Generator) -> onnx.ModelProto:
    """Some nodes, and perhaps the import, by the domain's long name."""
    result = copy_of(model)
    for node in model_nodes(result):
        node.domain = "ai.onnx" if not node.domain and rng.random() < 0.8 else node.domain
    for entry in result.opset_import:
        entry.domain = "ai.onnx" if not entry.domain and rng.random() < 0.5 else entry.domain
    return result


class _Turner:
    """Writes a main graph as converters from TensorFlow do."""

    def __init__(self, model: onnx.ModelProto) -> None:
        inferred = infer_shapes(model)
        assert inferred is not None
        values = (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output)
        self.ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in values}
        self.constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self.constants[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
        self.outputs = {value.name for value in model.graph.output}
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.last: dict[str, str] = {}

    def transpose(self, source: str, target: str, perm: list[int]) -> str:
        self.nodes.append(helper.make_node("Transpose", [source], [target], perm=perm))
        return target

    def is_map(self, name: str) -> bool:
        return name not in self.constants and self.ranks.get(name, 0) > 2

    def in_either(self, node: onnx.NodeProto) -> int:
        """The rank of what an elementwise node joins; 0 where it stays between Transposes."""
        ranks = {self.ranks.get(name, 0) for name in (*node.input, *node.output) if name not in self.constants}
        rank = ranks.pop() if len(ranks) == 1 and node.op_type in ELEMENTWISE else 0
        return rank if rank > 2 and all(self.constants[n].ndim <= rank for n in node.input if n in self.constants) else 0

    def with_channels_last(self, name: str, rank: int) -> str:
        """A tensor with the channels last, made where it is not there yet."""
        if name in self.constants:
            array = self.constants[name]
            array = array.reshape((1,) * (rank - array.ndim) + array.shape).transpose(to_channels_last(rank - 2))
            while array.ndim and array.shape[0] == 1 and rank > 3:  # [C], as they write it
                array = array[0]
            stored = f"{name}_{len(self.initializers)}_last"
            self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), stored))
            return self.initializers[-1].name
        if name not in self.last:
            self.last[name] = self.transpose(name, f"{name}_last", to_channels_last(rank - 2))
        return self.last[name]

    def add(self, node: onnx.NodeProto) -> None:
        rank = self.in_either(node)
        if rank:
            made = copy_node(node)
            made.input[:] = [self.with_channels_last(name, rank) for name in node.input]
            made.output[:] = [f"{node.output[0]}_last"]
            self.nodes.append(made)
            self.last[node.output[0]] = made.output[0]
            if node.output[0] in self.outputs:
                self.transpose(made.output[0], node.output[0], to_channels_first(rank - 2))
            return
        made = copy_node(node)
        for position, name in enumerate(node.input):
            if name in self.last:
                first = f"{name}_first{len(self.nodes)}"
                made.input[position] = self.transpose(self.last[name], first, to_channels_first(self.ranks[name] - 2))
        self.nodes.append(made)
        for name in node.output:
            if self.is_map(name):
                self.with_channels_last(name, self.ranks[name])


def copy_node(node: onnx.NodeProto) -> onnx.NodeProto:
    made = onnx.NodeProto()
    made.CopyFrom(node)
    return made


def with_channels_last(model: onnx.ModelProto) -> onnx.ModelProto:
    """Every map is kept with its channels last, and turned around whatever needs them first."""
    turner, result = _Turner(model), copy_of(model)
    for node in model.graph.node:
        turner.add(node)
    del result.graph.node[:]
    result.graph.node.extend(turner.nodes)
    result.graph.ClearField("value_info")
    result.graph.initializer.extend(turner.initializers)
    used = {name for node in result.graph.node for name in node.input}
    given = {value.name for value in result.graph.input}
    for index in reversed(range(len(result.graph.initializer))):
        name = result.graph.initializer[index].name
        if name not in used and name not in given:
            del result.graph.initializer[index]
    return result


def in_functions(model: onnx.ModelProto, rng: np.random.Generator, depth: int = 2) -> onnx.ModelProto:
    """Runs of nodes as functions, some with functions in them, some attributes of whose nodes are the call's."""
    result = copy_of(model)
    result.ir_version = max(result.ir_version, 10)
    result.graph.ClearField("value_info")
    result.opset_import.append(helper.make_opsetid("local", 1))
    outputs = [value.name for value in model.graph.output]
    nodes = _as_calls(result, list(model.graph.node), outputs, rng, depth)
    del result.graph.node[:]
    result.graph.node.extend(nodes)
    return result


def _as_calls(model, nodes, outputs, rng, depth) -> list[onnx.NodeProto]:
    found, position = [], 0
    while position < len(nodes):
        size = int(rng.integers(1, 4))
        run, rest = nodes[position : position + size], nodes[position + size :]
        position += size
        if rng.random() < 0.3:
            found += run
            continue
        made = {name for node in run for name in node.output if name}
        inputs = list(dict.fromkeys(name for node in run for name in node.input if name and name not in made))
        needed = {name for node in rest for name in node.input} | set(outputs)
        results = [name for node in run for name in node.output if name in needed]
        if not results:
            found += run
            continue
        given = []
        inner = [copy_node(node) for node in run]
        for number, node in enumerate(inner):
            for attribute in node.attribute:
                if attribute.type in (AttributeProto.INT, AttributeProto.INTS) and rng.random() < 0.5:
                    name = f"{attribute.name}{number}"
                    given.append(AttributeProto.FromString(attribute.SerializeToString()))
                    given[-1].name = name
                    kind, own = attribute.type, attribute.name
                    attribute.Clear()
                    attribute.name, attribute.type, attribute.ref_attr_name = own, kind, name
        if depth and rng.random() < 0.5 and not given:
            inner = _as_calls(model, inner, results, rng, depth - 1)
        imports = [*(entry for entry in model.opset_import if entry.domain != "local"), helper.make_opsetid("local", 1)]
        name = f"Part{len(model.functions)}"
        names = [attribute.name for attribute in given]
        model.functions.append(helper.make_function("local", name, inputs, results, inner, imports, names))
        call = helper.make_node(name, inputs, results, name=f"call{len(model.functions)}", domain="local")
        call.attribute.extend(given)
        found.append(call)
    return found
