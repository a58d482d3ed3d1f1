# SPDX-License-Identifier: Apache-2.0
"""The rules on a graph of torch.fx: graph -> ONNX skeleton -> rules -> graph, and the report.

The graph is made anew, in the order of the model.  Nodes that the rules left alone are copied; those that moved are copied, too,
with other inputs.
"""

import operator
import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import onnx
import torch
from onnx import ModelProto, NodeProto, numpy_helper
from torch import Tensor, fx

from convpool.algebra.geometry import PoolSpec, refuse, windows
from convpool.ir import schema
from convpool.ir.model import Inference, LoadedModel
from convpool.ir.protos import attributes, is_op
from convpool.options import OptimizeOptions
from convpool.pipeline import rewrite
from convpool.report import Report
from convpool.torch import plain
from convpool.torch.changes import Context, changes, pinned_by_changes, value_of
from convpool.torch.pairs import POOLED_CONV, geometry_of
from convpool.torch.skeleton import DOMAIN, RESULT, Skeleton, translate_call
from convpool.torch.upsampling import upsample_conv_of

RuleByName = dict[str, str]
"""The rule that rewrites a convolution of a pair, or an upsampled one, by the name of its node."""


class Unmapped(Exception):
    """The graph or the rewritten model has something that the other cannot say."""


def copied(graph: fx.Graph) -> fx.Graph:
    """The graph again; its nodes have the same names."""
    made = fx.Graph(graph.owning_module)
    made.output(made.graph_copy(graph, {}))
    return made


def rewritten_graph(graph: fx.Graph, options: OptimizeOptions, stay: Collection[str] = ()) -> tuple[fx.Graph, Report, RuleByName]:
    """The graph as the rules make it; the report; and the convolutions that they have rewritten.

    stay: names of those that are not rewritten.  Raises Unmapped, ModelError."""
    graph = copied(graph)
    tensors = [value for node in graph.nodes if isinstance(value := value_of(node), Tensor)]
    if any(value.is_complex() for value in tensors):
        raise Unmapped("complex numbers")
    changed = pinned_by_changes(graph)
    skeleton = Skeleton(graph)
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            skeleton.add_input(node)
        elif node.op != "output":
            label = skeleton.label(node)
            skeleton.add(node, label, translate_call(skeleton, label, node))
            skeleton.pin(label, changed.get(node) or (refuse("time", "the host's", "the GPU's") if node.name in stay else None))
    model = skeleton.model(next(node for node in graph.nodes if node.op == "output").all_input_nodes)
    # All shapes are TorchDynamo's: `load` would doubt those behind operators that ONNX does not have.
    given = LoadedModel(model, None, model.ByteSize())
    given.inference = Inference(onnx.shape_inference.infer_shapes(model))
    resized = any(proto.op_type == "Resize" for proto in model.graph.node)
    rules = frozenset({"pool_first", *(["upsample_last"] if resized else [])})
    device = "cuda" if any(value.device.type == "cuda" for value in tensors) else "cpu"
    result = rewrite(given, replace(options, rules=rules, pinned=skeleton.pinned, for_torch=device))
    made = Rebuilding(skeleton, result.model).run() if result.changed else graph
    by = {site.conv: site.rule for site in result.report.sites if site.status == "rewritten"}
    return made, result.report, {node.name: by[name] for name, node in skeleton.labels.items() if name in by}


class Rebuilding:
    """The skeleton's graph once more, as the model has become.  Nodes come in the model's order."""

    def __init__(self, skeleton: Skeleton, model: ModelProto) -> None:
        self._skeleton, self._model, self._graph = skeleton, model, fx.Graph(skeleton.graph.owning_module)
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._old: dict[str, fx.Node] = {node.name: node for node in skeleton.graph.nodes}
        self._env: dict[str, fx.Node] = {}
        """The nodes that give tensors, by the tensors' names in the model."""
        self._weights: dict[str, str] = {}
        """Weights by the names of their copies with the channels last, which PyTorch's operator does not take."""
        self._context: Context | None = None
        """The context of the node that is made next."""
        self._moved: dict[fx.Node, Context | None] = {}
        """Nodes that stand for none of the old graph's, with the context that whoever reads them has to be in."""

    def run(self) -> fx.Graph:
        """Make it.  Raises Unmapped."""
        skeleton, stayed = self._skeleton, list[fx.Node]()
        *nodes, end = skeleton.graph.nodes
        for node in nodes:
            if node.op in ("placeholder", "get_attr"):
                self._stay(node)
        self._context = skeleton.contexts[next(iter(skeleton.graph.nodes))]
        for proto in self._model.graph.node:
            before = skeleton.protos.get(proto.name)
            if proto.name != RESULT and (before is None or before.SerializeToString() != proto.SerializeToString()):
                self._make(proto)
            elif proto.name in skeleton.labels:
                stayed.append(skeleton.labels[proto.name])
                self._stay(stayed[-1])
        order = {node: number for number, node in enumerate(nodes)}
        if stayed != sorted(stayed, key=order.__getitem__):
            raise Unmapped("nodes in another order")
        self._stay(end)
        self._graph.lint()
        return self._graph

    def _stay(self, old: fx.Node) -> None:
        self._context = self._skeleton.contexts[old]
        self._env[old.name] = self._graph.node_copy(old, lambda item: self._read(item.name))

    def _make(self, node: NodeProto) -> None:
        values = attributes(node)
        if schema.is_operator(node):
            pool, conv = schema.specs_of(values)
            assert isinstance(pool, PoolSpec)
            self._give(node, POOLED_CONV, (*self._tensors(node), *geometry_of(pool, conv)))
        elif is_op(node, "Transpose") and not node.name:
            self._weights[node.output[0]] = node.input[0]
        elif is_op(node, "Conv"):
            self._give(node, *self._convolution(node, values))
        elif is_op(node, "AveragePool"):
            self._give(node, *self._average(node, values))
        elif is_op(node, "GlobalAveragePool"):
            x = self._read(node.input[0])
            shape = self._skeleton.shape(x)
            if shape is None:
                raise Unmapped("a mean of unknown rank")
            self._give(node, torch.mean, (x, tuple(range(2, len(shape))), True))
        elif is_op(node, "Squeeze"):
            axes = numpy_helper.to_array(self._constants[node.input[1]])
            self._give(node, torch.squeeze_copy, (self._read(node.input[0]), tuple(int(axis) for axis in axes)))
        elif (node.op_type, node.domain) == ("UpsampleConv", DOMAIN):
            self._give(node, upsample_conv_of, (*self._tensors(node), tuple(values["factors"]), tuple(values["pads"])))
        elif node.name in self._skeleton.labels:
            self._copy(node, node.name)
        elif (label := re.sub(r"_moved(_\d+)?$", "", node.name)) in self._skeleton.labels and label:  # of resampling.emit
            self._copy(node, label, small=True)
        elif is_op(node, "Mul") and node.input[1] in self._constants:
            factor = numpy_helper.to_array(self._constants[node.input[1]]).item()
            self._give(node, torch.mul, (self._read(node.input[0]), factor))
        else:
            raise Unmapped(f"a node {node.op_type}")

    def _give(self, node: NodeProto, function: Any, args: tuple) -> None:
        """A new node.  It has a name that no node which stays has: names tell convolutions.  It alone has a "convolution" in its
        meta: the name of the one that it stands for, or None."""
        made = self._graph.create_node("call_function", function, args, name=node.output[0])
        old = self._skeleton.labels.get(node.name)
        made.meta["convolution"] = None if old is None else old.name
        self._became(node.output[0], made)

    def _became(self, name: str, made: fx.Node) -> None:
        """Let a node give the tensor of this name from here on."""
        old = self._old.get(name)
        if old is None:
            self._moved[made] = self._context
        else:
            self._check_context(self._skeleton.contexts[old])
            made = self._as_it_lay(made, value_of(old))
            made.meta.update(old.meta)
        self._env[name] = made

    def _as_it_lay(self, made: fx.Node, before: Any) -> fx.Node:
        """The node's result in the order in memory that the original's has: slices and calls in between may have changed it."""
        if not isinstance(before, Tensor):
            return made
        wanted, convolves = plain.memory_format(before), made.target in (POOLED_CONV, upsample_conv_of, *plain.CONVS.values())
        given = [value_of(item) for item in made.args[:2]] if convolves else [None]
        if all(isinstance(value, Tensor) for value in given) and wanted == plain.result_format(*given):
            return made
        is_pixel = max(plain.hints(before.shape)[2:], default=0) == 1  # contiguous in both orders, so that strides would stay
        copy = "clone" if is_pixel or made.target is operator.getitem else "contiguous"  # a pooling's result is no view
        return self._graph.call_method(copy, (made,), {"memory_format": wanted})

    def _copy(self, node: NodeProto, label: str, small: bool = False) -> None:
        """A node that moved: as in the graph, with the inputs that the model has now.  small: it is on another map, in front of
        an upsampling, and so it changes no tensor in place."""
        before, old = self._skeleton.protos[label], self._skeleton.labels[label]
        if len(before.input) != len(node.input) or before.op_type != node.op_type:
            raise Unmapped(f"another {node.op_type}")
        changed: dict[fx.Node, fx.Node] = {}
        for was, now in zip(map(self._crossed, before.input), map(self._crossed, node.input), strict=True):
            if was != now:
                first = next((item for item in old.all_input_nodes if item.name == was), None)
                if first is None or first in changed and changed[first] is not self._read(now):
                    raise Unmapped(f"inputs of a {node.op_type}")
                changed[first] = self._read(now)
        for item, now in changed.items():
            was, given = value_of(item), value_of(now)
            if small and isinstance(was, Tensor) and isinstance(given, Tensor) and given.dtype in plain.HALF_TYPES:
                changed[item] = self._graph.call_function(plain.as_interpolated, (now, was.dtype))
        if small:
            own = [item for item in changes(old) if item in changed]
            changed |= {item: self._graph.call_function(torch.clone, (changed[item],)) for item in own}
        made = self._graph.node_copy(old, lambda item: changed.get(item) or self._read(item.name))
        if small:
            for name in ("example_value", "val"):
                made.meta.pop(name, None)
        self._became(node.output[0], made)

    def _crossed(self, name: str) -> str:
        return self._skeleton.crossings.get(name, name)

    def _read(self, name: str) -> fx.Node:
        """The node that gives a tensor now."""
        name = self._crossed(name)
        if name not in self._env:
            raise Unmapped(f"tensor {name}")
        self._check_context(self._moved.get(self._env[name], self._context))
        return self._env[name]

    def _check_context(self, wanted: Context | None) -> None:
        if wanted != self._context:
            raise Unmapped("a node in another context")

    def _tensors(self, node: NodeProto) -> tuple[fx.Node, fx.Node, fx.Node | None]:
        """Input, weight and bias of a convolution; None where there is no bias, or one of zeros that a rule made."""
        x, weight, bias = [*node.input, ""][:3]
        has_bias = bias and bias not in self._constants
        return self._read(x), self._read(self._weights.get(weight, weight)), self._read(bias) if has_bias else None

    def _convolution(self, node: NodeProto, values: dict[str, Any]) -> tuple[Any, tuple]:
        kernel, pads = values["kernel_shape"], list(values["pads"])
        rank = len(kernel)
        x, weight, bias = self._tensors(node)
        rest = (list(values["strides"]), pads[:rank], list(values["dilations"]), values["group"])
        if pads[:rank] == pads[rank:]:
            return plain.CONVS[rank], (x, weight, bias, *rest)
        geometry = plain.single(*rest)
        return POOLED_CONV, (x, weight, bias, *geometry[:5], pads, *geometry[6:], False)

    def _average(self, node: NodeProto, values: dict[str, Any]) -> tuple[Any, tuple]:
        rank, x = len(values["kernel_shape"]), self._read(node.input[0])
        spec = windows(values, rank)
        assert isinstance(spec, PoolSpec), "made by a rule"
        kernel, strides, pads, dilations = map(list, (spec.kernel_shape, spec.strides, spec.pads, spec.dilations))
        if plain.pools_rightly(value_of(x), kernel, pads, dilations):
            return plain.POOLS[rank], (x, kernel, strides, pads[:rank], False, True)
        return torch.ops.convpool.box_mean, (x, kernel, strides, pads, dilations)
