# SPDX-License-Identifier: Apache-2.0
"""A backend of torch.compile that does average poolings before the convolutions in front of them.

    model = torch.compile(model, backend="convpool")

TorchDynamo captures forward and watches what the capture depends on.  The backend rewrites the pairs of its graph and gives back
a function that runs under PyTorch's own autograd: hooks, autocast, second derivatives and wrappers of modules are PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from convpool.errors import ModelError
from convpool.options import OptimizeOptions
from convpool.report import Report
from convpool.torch.eager import pooled_conv_of
from convpool.torch.kernels import frozen
from convpool.torch.rewrite.changes import changes, is_of_module
from convpool.torch.rewrite.compiling import sizes_of_graph
from convpool.torch.rewrite.planning import FUSED, PAIRS, Unmapped, plan

_POOLED_CONV = torch.ops.convpool.pooled_conv
_CONVS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
_POOLS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_TENSORS = 6
"""The first arguments of the operator; the others are numbers."""


class PoolFirst:
    """The backend, and the reports of the graphs that it has seen."""

    def __init__(self, options: OptimizeOptions | None = None) -> None:
        self.options = options or OptimizeOptions()
        self.reports: list[Report] = []

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        """A function that runs the graph with its pairs rewritten, the graph itself where nothing changes."""
        _keep_checkpoints(module)
        for name, child in list(module.named_children()):  # such as the body of a checkpoint of activations
            if isinstance(child, fx.GraphModule) and (inside := self.rewritten(child.graph)) is not None:
                setattr(module, name, fx.GraphModule(child, inside))
        graph = self.rewritten(module.graph)
        if graph is None:
            return module.forward
        return _guarded(module.graph, fx.GraphModule(module, graph).forward, module.forward)

    def rewritten(self, graph: fx.Graph) -> fx.Graph | None:
        """A copy of the graph, rewritten; None where nothing changes.  Without gradients the pairs fuse their neighbours."""
        if any(isinstance(value := _value(node), torch.Tensor) and value.is_complex() for node in graph.nodes):
            return None
        for passes in (PAIRS,) if torch.is_grad_enabled() else (FUSED, FUSED - {"fuse_prologue"}):
            copied = fx.Graph()
            copied.output(copied.graph_copy(graph, {}))
            try:
                changed, report = plan(None, copied, sizes_of_graph(copied), replace(self.options, passes=passes))
            except (Unmapped, ModelError):
                continue
            self.reports.append(report)
            return _eager(copied) if changed else None
        return None


def _eager(graph: fx.Graph) -> fx.Graph:
    """The graph with calls of its pairs that take the host little time.

    On a CPU these are PyTorch's own operators, in the new order: no Python runs in the backward pass.  Where an argument needs a
    gradient a penalty may follow, whose second derivatives PyTorch computes slowly; there, and on a GPU, they are convpool's.
    """
    arguments = [_value(node) for node in graph.find_nodes(op="placeholder") if not is_of_module(node)]
    penalty = any(isinstance(value, torch.Tensor) and value.requires_grad for value in arguments)
    for node in graph.find_nodes(op="call_function", target=_POOLED_CONV):
        tensors, geometry = node.args[:_TENSORS], frozen(node.args[_TENSORS:])
        value = _value(tensors[0])
        on_cpu = isinstance(value, torch.Tensor) and value.device.type == "cpu"
        two = _two_operators(tensors, geometry) if on_cpu and not penalty else None
        if two is None:
            node.target, node.args = pooled_conv_of, (tensors, geometry)
            continue
        pooling, convolution = two
        with graph.inserting_before(node):
            node.args = (graph.call_function(*pooling), *convolution[1])
        node.target = convolution[0]
    graph.lint()
    return graph


def _two_operators(tensors: tuple, geometry: tuple) -> tuple[tuple, tuple] | None:
    """PyTorch's pooling and convolution, with their arguments but for the convolution's input; None where it has no such."""
    (x, weight, bias, scale, _, residual), (kernel, strides, pads, dilations, *convolution) = tensors, geometry[:8]
    rank, (steps, zeros, spread, groups) = len(kernel), convolution
    parts = scale is not None or residual is not None or geometry[8] or geometry[10] or geometry[12:] not in ((), (0,))
    poolable = all(pads[i] == pads[rank + i] and 2 * pads[i] <= kernel[i] for i in range(rank))
    if parts or not poolable or zeros[:rank] != zeros[rank:] or any(d != 1 for d in dilations):
        return None
    pooling = (_POOLS[rank], (x, kernel, strides, pads[:rank], False, True))
    return pooling, (_CONVS[rank], (weight, bias, steps, zeros[:rank], spread, groups))


def _guarded(graph: fx.Graph, run: Callable, original: Callable) -> Callable:
    """`run`, but `original` where an argument shares memory with a tensor of the module's that the graph changes."""
    places = {node: number for number, node in enumerate(graph.find_nodes(op="placeholder"))}
    changed = {item for node in graph.nodes for item in changes(None, node) if item in places and is_of_module(item)}
    own = [places[item] for item in changed]
    arguments = [number for node, number in places.items() if not is_of_module(node) and isinstance(_value(node), torch.Tensor)]
    if not own or not arguments:
        return run

    def guarded(*inputs: Any) -> Any:
        memories = {inputs[number].untyped_storage()._cdata for number in arguments}
        shares = any([inputs[number].untyped_storage()._cdata in memories for number in own])
        return original(*inputs) if shares else run(*inputs)

    return guarded


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _keep_checkpoints(module: fx.GraphModule) -> None:
    """Recompute in the backward pass what forward says: TorchDynamo's operator does so in AOTAutograd alone."""
    nodes = module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint)
    for node in nodes:
        node.target = _checkpointed
    if nodes:
        module.recompile()


def _checkpointed(body: Callable, *inputs: Any, **options: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(body, *inputs, **{"use_reentrant": False, **options})


def convpool(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
    """The backend that torch.compile knows by this name."""
    return PoolFirst()(module, example_inputs)
