# SPDX-License-Identifier: Apache-2.0
"""Gains of a GPU beside the pairs: other convolutions, and weights that forward computes.

Where forward's input needs a gradient, a penalty may follow: PyTorch's second derivative of a convolution has kernels as large as
the images.  In a CUDA graph the host does not count: there the gradients of a convolution are two branches, and so are weights
that depend on no activation, such as normalised ones.  Eager steps are PyTorch's own but for the pairs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from convpool.torch import gradients, kernels, kinds, plain
from convpool.torch.changes import changes, contexts_of, is_of_module, value_of
from convpool.torch.pairs import POOLED_CONV, convolve, pooled_conv_of, unwatched

IMAGE_CHANNELS, PLAIN_MACS = 16, 2.5e9
"""Channels up to which, or multiply-adds with more, the library's convolution is faster than cuDNN under a compiler."""
BRANCHES = 4


# ---- convolutions of no pair ----


def convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, *convolution: Any, captures: bool = False, activation: int = plain.NONE
) -> torch.Tensor:
    """A convolution with fast second derivatives, and the activation of a code behind it.

    captures: in a CUDA graph, or before, so that the library may add the bias and compute the activation."""
    if not unwatched(x, weight, "cuda") or x.dim() != weight.dim():
        strides, padding, dilations, groups = convolution
        y = torch.convolution(x, weight, bias, strides, padding, dilations, False, (0,) * len(strides), groups)
    elif captures and bias is not None and _suits(x, weight):
        return pooled_conv_of((x, weight, bias), (*plain.single(*convolution)[:8], activation, 0.0, 0))
    else:
        y = convolve(x, weight, bias, convolution)
    return plain.activate(y, activation, 0.0)


def _suits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the library runs a convolution without the pass that PyTorch adds a bias in."""
    if x.dtype not in (torch.float16, torch.bfloat16) or x.dtype != weight.dtype or x.shape[1] != weight.shape[1]:
        return False
    return x.dim() == 4 and plain.memory_format(x) == torch.channels_last and kernels.library_is_there()


def _of_convolution(node: fx.Node) -> tuple | None:
    """Input, weight, bias and geometry of a node that is a convolution with numbers as padding."""
    a = kinds.arguments(node) if node.target in plain.CONVS.values() else None
    value = value_of(a["input"]) if a is not None else None
    if a is None or not isinstance(value, torch.Tensor) or not value.is_cuda:
        return None
    rank = list(plain.CONVS.values()).index(node.target) + 1
    try:
        sizes = [kinds.whole(a[name], rank) for name in ("stride", "padding", "dilation")]
    except kinds.Unknown:
        return None
    return a["input"], a["weight"], a["bias"], (*sizes, a["groups"])


def give_derivatives(graph: fx.Graph, asked: Collection[fx.Node] | None = None) -> None:
    """Let convolutions of the graph be calls of `convolved`: those that are asked for, or all, with their ReLUs, for captures."""
    contexts, captures = contexts_of(graph), asked is None
    for node in list(graph.nodes):
        found = _of_convolution(node) if asked is None or node in asked else None
        if found is None:
            continue
        last, activation = _activated(node, contexts) if captures else (node, plain.NONE)
        node.target, node.args = convolved, (*found[:3], *found[3])
        node.kwargs = {"captures": captures, "activation": activation}
        if last is not node:
            node.meta.update(last.meta)
            last.replace_all_uses_with(node)
            graph.erase_node(last)


def _activated(node: fx.Node, contexts: dict[fx.Node, Any]) -> tuple[fx.Node, int]:
    """The ReLU that alone reads a node, in the same context, and its code; else the node itself and the code of none."""
    user = next(iter(node.users)) if len(node.users) == 1 else node
    fits = user.target in (F.relu, torch.relu, "relu") and contexts[user] == contexts[node]
    return (user, plain.RELU) if fits else (node, plain.NONE)


def run_by_library(graph: fx.Graph) -> None:
    """Let the library run convolutions of a graph for a compiler, where it is faster: it fuses a ReLU too."""
    contexts = contexts_of(graph)
    for node in list(graph.nodes):
        found = _of_convolution(node)
        if found is None or found[2] is None or not isinstance(value_of(found[1]), torch.Tensor):
            continue
        (x, weight, bias, (strides, padding, dilations, groups)), x_value, w_value = found, value_of(found[0]), value_of(found[1])
        macs = w_value.numel() * x_value.shape[0] * math.prod(x_value.shape[2:]) / math.prod(strides)
        if not _suits(x_value, w_value) or not (x_value.shape[1] <= IMAGE_CHANNELS or macs <= PLAIN_MACS):
            continue
        last, activation = _activated(node, contexts)
        geometry = (*plain.single(strides, padding, dilations, groups)[:8], activation, 0.0)
        with graph.inserting_before(node):
            made = graph.call_function(POOLED_CONV, (x, weight, bias, *geometry))
        made.meta.update(last.meta)
        last.replace_all_uses_with(made)
        for gone in dict.fromkeys((last, node)):
            graph.erase_node(gone)


# ---- weights that forward computes ----


def compute_weights_first(module: fx.GraphModule, graph: fx.Graph) -> None:
    """Let a CUDA graph begin at its start, on branches of its own, what computes a tensor of parameters alone."""
    inputs = graph.find_nodes(op="placeholder")
    own = {node for node in inputs if is_of_module(node)}
    if not any(isinstance(value := value_of(node), torch.Tensor) and value.is_cuda for node in inputs if node not in own):
        return
    last = inputs[-1]
    for number, nodes in enumerate(_segments(graph, own)):
        inside = set(nodes)
        ends = [node for node in nodes if any(user not in inside for user in node.users)]
        given = list(dict.fromkeys(item for node in nodes for item in node.all_input_nodes if item not in inside))
        part, values = fx.Graph(), {}
        values.update({item: part.placeholder(item.name) for item in given})
        for node in nodes:
            values[node] = part.node_copy(node, lambda item, values=values: values[item])
        part.output(tuple(values[node] for node in ends))
        function = fx.GraphModule(module, part).forward
        with graph.inserting_after(last):  # in the order in which forward reads them
            last = begun = graph.call_function(_branch(function, number % BRANCHES), tuple(given))
        with graph.inserting_after(nodes[-1]):
            made = graph.call_function(_joined, (begun,))
        for place, node in reversed(list(enumerate(ends))):
            with graph.inserting_after(made):
                item = graph.call_function(operator.getitem, (made, place))
            item.meta.update(node.meta)
            node.replace_all_uses_with(item, lambda user, inside=inside: user not in inside)
        for node in reversed(nodes):
            graph.erase_node(node)


def _segments(graph: fx.Graph, own: set[fx.Node]) -> list[list[fx.Node]]:
    """Runs of nodes that nothing but parameters, and what came before in the run, enters, and that nothing else depends on.

    A run may enter torch.no_grad and leave it again, as spectral normalisation does."""
    contexts, runs = contexts_of(graph), []
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    first = contexts[nodes[0].prev]
    now: list[fx.Node] = []
    mine: set[fx.Node] = set()
    for node in nodes:
        given = set(node.all_input_nodes)
        switch = bool(now) and not given and value_of(node) is None
        fits = node.op in ("call_function", "call_method") and bool(given) and given <= own | mine or switch
        if not fits or now and contexts[node] == contexts[now[-1]] == first and not given & mine and not switch:
            runs.append(now)
            now, mine = [], set()
        if fits and (now or contexts[node] == first):
            now.append(node)
            mine.add(node)
    found = []
    for run in [*runs, now]:
        while run and (contexts[run[-1]] != first or not run[-1].all_input_nodes):
            run = run[:-1]
        inside = set(run)
        read = {item for node in run for item in node.all_input_nodes if item in own}
        written = {item for node in run for item in changes(node)} & own
        apart = not any(read & set(changes(node)) or written & set(node.all_input_nodes) for node in nodes if node not in inside)
        if len(run) > 2 and apart and any(user not in inside for node in run for user in node.users):
            found.append(run)
    return found


def _branch(function: Callable, branch: int) -> Callable:
    """A call of a function on a branch of a CUDA graph: its tensors, and an event behind them; None where none is captured."""

    def begin(*given: Any) -> tuple[Sequence[torch.Tensor], Any]:
        if not torch.cuda.is_current_stream_capturing():
            return function(*given), None
        main = torch.cuda.current_stream()
        side = gradients.side_of(main, 1 + branch)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            made = function(*given)
        for tensor in made:
            tensor.record_stream(main)
        return made, side.record_event()

    return begin


def _joined(begun: tuple[Sequence[torch.Tensor], Any]) -> Sequence[torch.Tensor]:
    made, event = begun
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
    return made
