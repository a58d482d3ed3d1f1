# SPDX-License-Identifier: Apache-2.0
"""Counts conv-pool sites by a plain walk over the graph, independent of the optimizer and of the generators.

The kinds are those of ``models.generators.Generator``. It reads the forms that the models here contain, no more.
"""

from collections import Counter

import onnx
from onnx import helper


def _attribute(node: onnx.NodeProto, name: str):
    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), None)


def count_sites(model: onnx.ModelProto) -> dict[str, int]:
    graph = model.graph
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)

    def only_reader(node: onnx.NodeProto) -> onnx.NodeProto | None:
        found = readers.get(node.output[0], [])
        return found[0] if len(found) == 1 else None

    sites: Counter[str] = Counter()
    for node in graph.node:
        reader = only_reader(node)
        if node.op_type == "AveragePool" and reader is not None and reader.op_type == "Conv":
            sites["pool_conv"] += _attribute(node, "kernel_shape") == _attribute(node, "strides")
        if node.op_type != "Conv":
            continue
        if reader is None:
            sites["conv_slices"] += _is_mean_of_slices(node, readers)
        elif reader.op_type == "AveragePool":
            window1 = set(_attribute(reader, "kernel_shape")) == {1}
            sites["conv_pool_window1" if window1 else "conv_pool"] += 1
        elif reader.op_type == "GlobalAveragePool":
            sites["conv_global_pool"] += 1
        elif reader.op_type in ("Add", "Concat"):
            after = only_reader(reader)
            if after is not None and after.op_type == "AveragePool":
                sites[f"{reader.op_type.lower()}_pool"] += 1
    return {kind: count for kind, count in sites.items() if count}


def _is_mean_of_slices(conv: onnx.NodeProto, readers: dict[str, list[onnx.NodeProto]]) -> bool:
    """Conv, two Slices of rows, four of columns, Adds or a Sum, then Div or Mul."""
    layer = readers.get(conv.output[0], [])
    for width in (2, 4):
        if [node.op_type for node in layer] != ["Slice"] * width:
            return False
        layer = [reader for node in layer for reader in readers[node.output[0]]]
    node = layer[0]
    while node.op_type in ("Add", "Sum"):
        node = readers[node.output[0]][0]
    return node.op_type in ("Div", "Mul")
