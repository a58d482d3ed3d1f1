# SPDX-License-Identifier: Apache-2.0
"""The passes on a graph of torch.fx: graph -> ONNX skeleton -> passes -> graph, and the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnx import TensorProto
from torch import fx, nn

from convpool.algebra.geometry import Refusal
from convpool.api import rewrite
from convpool.errors import ModelError
from convpool.ir.model import load
from convpool.options import OptimizeOptions
from convpool.report import Report
from convpool.torch.rewrite.changes import held_by_changes
from convpool.torch.rewrite.functions import translate_call
from convpool.torch.rewrite.layers import translate_module
from convpool.torch.rewrite.rebuilding import Unmapped, rebuild
from convpool.torch.rewrite.sizes import Sizes, fold_sizes
from convpool.torch.rewrite.skeleton import Skeleton

PAIRS = frozenset({"pool_first"})
"""The passes in training."""
FUSED = PAIRS | {"fuse_epilogue", "fuse_prologue"}
"""The passes where no gradients are recorded."""


def skeleton_of(root: nn.Module | None, graph: fx.Graph, sizes: Sizes | None, refusal: Refusal | None = None) -> Skeleton:
    """The graph as the passes see it.  refusal: why none of its nodes may change."""
    if sizes is not None:
        fold_sizes(graph, sizes)
    held = held_by_changes(root, graph)
    skeleton = Skeleton(root, graph, sizes)
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            skeleton.add_input(node)
        elif node.op != "output":
            label = skeleton.label(node)
            translate = translate_module if node.op == "call_module" else translate_call
            protos = translate(skeleton, label, node)
            if protos is None:
                skeleton.add_opaque(node, label)
            else:
                skeleton.add(node, label, protos)
            skeleton.pin(label, refusal)
            skeleton.pin(label, held.get(node))
    return skeleton


def plan(
    root: nn.Module | None,
    graph: fx.Graph,
    sizes: Sizes | None,
    options: OptimizeOptions,
    refusal: Refusal | None = None,
) -> tuple[bool, Report]:
    """Rewrite the graph; whether it has changed, and the report.  Raises Unmapped, ModelError; the graph is of no use then."""
    skeleton = skeleton_of(root, graph, sizes, refusal)
    results: Sequence[fx.Node] = next(node for node in graph.nodes if node.op == "output").all_input_nodes
    given = load(skeleton.model(results))
    result = rewrite(given, replace(options, pinned=skeleton.pinned), {})
    if result.changed:
        rebuild(skeleton, result.model)
    return result.changed, result.report


__all__ = ["FUSED", "PAIRS", "ModelError", "TensorProto", "Unmapped", "plan"]
