# SPDX-License-Identifier: Apache-2.0
"""Parametrized weights of a rewritten module in training, as branches of a CUDA graph.

Spectral normalisation launches many small kernels for each weight.  They depend on no activation.  So while a graph is captured,
forward begins all such weights at its start, on streams of their own; PyTorch runs their backward pass there too.  The GPU runs
them beside the convolutions.  Outside of a capture they are computed where they are read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from convpool.torch.gradients import side_of
from convpool.torch.rewrite.convolutions import convolved

BRANCHES = 4


def compute_weights_first(root: nn.Module, graph: fx.Graph) -> None:
    """Let the graph ask at its start for the parametrized tensors that it reads."""
    x = next(iter(graph.nodes))
    first = next(node for node in graph.nodes if node.op != "placeholder")
    if x is first:
        return
    branches: dict[tuple[str, str], int] = {}  # a tensor's is one: computing it may change buffers
    for node in list(graph.nodes):
        if node.op == "get_attr":
            path, _, name = str(node.target).rpartition(".")
        elif node.target is convolved:
            path, name = str(node.args[0].target), "weight"
        else:
            continue
        if not parametrize.is_parametrized(root.get_submodule(path), name):
            continue
        with graph.inserting_before(first):
            module = graph.create_node("get_attr", path)
            branch = branches.setdefault((path, name), len(branches)) % BRANCHES
            begun = graph.call_function(begin, (x, module, name, branch))
        with graph.inserting_before(node):
            tensor = graph.call_function(finish, (begun, module, name))
        if node.op == "get_attr":
            node.replace_all_uses_with(tensor)
            first = node.next if node is first else first
            graph.erase_node(node)
        else:
            node.args = (*node.args, tensor)


def begin(x: torch.Tensor, module: nn.Module, name: str, branch: int) -> Any:
    """While a CUDA graph is captured: the tensor, computed on a branch of the graph, and its end.  Else None."""
    if torch.compiler.is_compiling() or not x.is_cuda or not torch.cuda.is_current_stream_capturing():
        return None
    main = torch.cuda.current_stream()
    side = side_of(main, 1 + branch)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        tensor = getattr(module, name)
    tensor.record_stream(main)
    return tensor, side.record_event()


def finish(begun: Any, module: nn.Module, name: str) -> torch.Tensor:
    """The tensor, on the current stream."""
    if begun is None:
        return getattr(module, name)
    tensor, end = begun
    torch.cuda.current_stream().wait_event(end)
    return tensor
