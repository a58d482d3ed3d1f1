# SPDX-License-Identifier: Apache-2.0
"""`compile_options`: the pairs of a module that torch.compile captures, without a change to the module.

    model = torch.compile(model, options=convpool.torch.compile_options())

The passes run on the graph that TorchDynamo captures, before autograd: so forward, backward and what inductor makes of them see
the pooling done first.  All parameters are inputs of that graph.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from convpool.errors import ModelError
from convpool.options import OptimizeOptions
from convpool.torch.functional import checked
from convpool.torch.rewrite.contexts import contexts_of
from convpool.torch.rewrite.convolutions import run_by_library
from convpool.torch.rewrite.planning import PAIRS, Unmapped, plan
from convpool.torch.rewrite.sizes import Known, Sizes
from convpool.types import Accumulation


class PoolFirst(CustomGraphPass):
    """A pass of inductor over a graph before autograd; reports: what it found, graph by graph."""

    def __init__(self, options: OptimizeOptions) -> None:
        self.options = options
        self.reports: list[Any] = []

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite the pairs of the graph."""
        copied = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        try:
            copied.output(copied.graph_copy(graph, values))
            changed, report = plan(None, copied, sizes_of_graph(copied), self.options)
        except (Unmapped, ModelError):
            return
        self.reports.append(report)
        if changed:
            run_by_library(copied)
            _put(graph, copied, {copy: node for node, copy in values.items()})

    def uuid(self) -> Any:
        """What inductor's cache of compiled graphs tells this pass by: its option, and the package's files."""
        digest = hashlib.sha256(str(self.options.accumulation).encode())
        for path in sorted(Path(__file__).parents[1].rglob("*.py")):
            digest.update(path.read_bytes())
        return digest.hexdigest()


def compile_options(*, accumulation: Accumulation = "default") -> dict[str, Any]:
    """Options for torch.compile, by which inductor rewrites the pairs that it captures; add others of inductor's to them.

    accumulation: as of `conv_avg_pool2d`.  Raises OptionError for another one.
    """
    return {"pre_grad_custom_pass": PoolFirst(OptimizeOptions(passes=PAIRS, accumulation=checked(accumulation)))}


def sizes_of_graph(graph: fx.Graph) -> Sizes:
    """What TorchDynamo knows of the graph's tensors; sizes that it leaves open have the names that it gives them.

    Of tensors that autocast makes the passes see the type that they were made of: in ONNX no operator changes it."""
    tensors = {}
    enters = any("autocast" in text for context in set(contexts_of(graph).values()) for text in context)
    for node in graph.nodes:
        value = node.meta.get("example_value", node.meta.get("val"))
        if isinstance(value, torch.Tensor):
            casts = enters or value.device.type != "meta" and torch.is_autocast_enabled(value.device.type)
            dtype = torch.float32 if casts and value.dtype in (torch.float16, torch.bfloat16) else value.dtype
            tensors[node] = Known(dtype, tuple(n if type(n) is int else str(n) for n in value.shape))
    return Sizes(tensors, {}, None)


def _put(graph: fx.Graph, new: fx.Graph, originals: dict[fx.Node, fx.Node]) -> None:
    """Let a graph become the other one, but keep its inputs: TorchDynamo has attributes of its own on them.

    originals: of the other's nodes that are copies, the graph's own.
    """
    for node in reversed(graph.nodes):
        if node.op != "placeholder":
            graph.erase_node(node)
    values: dict[fx.Node, fx.Node] = {}
    for node in new.nodes:
        values[node] = originals[node] if node.op == "placeholder" else graph.node_copy(node, lambda item: values[item])
