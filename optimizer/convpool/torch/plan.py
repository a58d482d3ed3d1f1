# SPDX-License-Identifier: Apache-2.0
"""The rules on a graph of torch.fx: graph -> ONNX skeleton -> rules -> graph, and the report."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import onnx
from torch import fx

from convpool.algebra.geometry import refuse
from convpool.api import rewrite
from convpool.ir.model import LoadedModel
from convpool.options import OptimizeOptions
from convpool.report import Report
from convpool.torch.changes import held_by_changes
from convpool.torch.kinds import translate_call
from convpool.torch.rebuild import Rebuilding
from convpool.torch.skeleton import Skeleton


def plan(graph: fx.Graph, options: OptimizeOptions, stay: Collection[fx.Node] = ()) -> tuple[bool, Report, list[fx.Node]]:
    """Rewrite the graph; whether it has changed, the report, and the convolutions that were rewritten.

    stay: nodes that are not.  Raises Unmapped, ModelError; the graph is of no use then."""
    held = {**dict.fromkeys(stay, refuse("time", "the host's", "the GPU's")), **held_by_changes(graph)}
    skeleton = Skeleton(graph)
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            skeleton.add_input(node)
        elif node.op != "output":
            label = skeleton.label(node)
            protos = translate_call(skeleton, label, node)
            if protos is None:
                skeleton.add_opaque(node, label)
            else:
                skeleton.add(node, label, protos)
            skeleton.pin(label, held.get(node))
    results = next(node for node in graph.nodes if node.op == "output").all_input_nodes
    model = skeleton.model(results)
    # All shapes are TorchDynamo's: `load` would doubt those behind operators that ONNX does not have.
    given = LoadedModel(model, None, model.ByteSize(), inferred=onnx.shape_inference.infer_shapes(model))
    resized = any(proto.op_type == "Resize" for proto in model.graph.node)
    passes = frozenset({"pool_first", *(["upsample_last"] if resized else [])})
    result = rewrite(given, replace(options, passes=passes, pinned=skeleton.pinned, for_torch=True), {})
    if result.changed:
        Rebuilding(skeleton, result.model).run()
    rewritten = [site.conv for site in result.report.sites if site.status == "rewritten"]
    return result.changed, result.report, [skeleton.labels[name] for name in rewritten if name in skeleton.labels]
