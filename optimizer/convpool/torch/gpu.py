# SPDX-License-Identifier: Apache-2.0
"""Gains of a GPU beside the pairs: other convolutions.

Where forward's input needs a gradient, a penalty may follow: PyTorch's second derivative of a convolution has kernels as large as
the images.  In a CUDA graph the host does not count: there the gradients of a convolution are two branches.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from convpool.torch import kernels, kinds, plain
from convpool.torch.changes import contexts_of, value_of
from convpool.torch.pairs import POOLED_CONV, convolve, pooled_conv_of, unwatched

IMAGE_CHANNELS, PLAIN_MACS = 16, 2.5e9
"""Channels up to which, or multiply-adds with more, the library's convolution is faster than cuDNN under a compiler."""


# ---- convolutions of no pair ----


def convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, *convolution: Any, captures: bool = False, activation: int = plain.NONE
) -> torch.Tensor:
    """A convolution with fast second derivatives, and the activation of a code behind it.

    captures: in a CUDA graph, or before, so that the library may add the bias and compute the activation."""
    if not unwatched(x, weight, x.device.type) or x.dim() != weight.dim():
        y = plain.CONVS[weight.dim() - 2](x, weight, bias, *convolution)  # which autocast knows on a CPU, too
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
