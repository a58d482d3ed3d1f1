# SPDX-License-Identifier: Apache-2.0
"""Shapes that follow from constants which onnx's shape inference does not compute.

Exporters write the amounts of a Pad, or the sizes of a Reshape, by a chain of nodes on constants and on shapes.  Inference gives
up there, and all sizes behind are unknown.  So the model is inferred again with the values of these chains as initializers.  The
model itself stays as it is.

The shape that a Reshape gets may have an open size in it, such as the batch's, if that stays where it is or all others are known.
"""

from __future__ import annotations

from itertools import zip_longest

import numpy as np
from onnx import ModelProto, NodeProto, numpy_helper

from convpool.ir.constants import Evaluate, Read
from convpool.ir.index import Scope, index_model
from convpool.ir.model import infer_shapes
from convpool.ir.protos import attributes, is_op

SHAPING: dict[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "Pad": (1, 3),
    "ReduceMean": (1,),
    "ReduceSum": (1,),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
    "Squeeze": (1,),
    "Tile": (1,),
    "Unsqueeze": (1,),
}
"""Operators whose result has a shape that depends on values, and the inputs that have these."""
MAX_ROUNDS = 32
"""Most times that a model is inferred again: a chain may read a shape that an earlier one has made known."""


def index_with_shapes(model: ModelProto, read: Read, evaluate: Evaluate, inferred: ModelProto | None) -> list[Scope]:
    """`index_model`, with the shapes that follow from constants too."""
    scopes = index_model(model, read, evaluate, inferred)
    for _ in range(MAX_ROUNDS):
        folded = with_shapes_folded(model, scopes[0])
        sharper = infer_shapes(folded) if folded is not None else None
        if sharper is None:
            break
        before = scopes[0].infos
        scopes = index_model(model, read, evaluate, sharper)
        if scopes[0].infos == before:
            break
    return scopes


def with_shapes_folded(model: ModelProto, main: Scope) -> ModelProto | None:
    """A copy of the model for shape inference, node for node, in which constants that shapes depend on are initializers.

    main: the index of the model's main graph, the only one looked at.  None where that makes no shape known.
    """
    changes: list[tuple[int, int, str, np.ndarray]] = []
    unknown = False
    for index, node in enumerate(main.nodes):
        positions = next((SHAPING[name] for name in SHAPING if is_op(node, name)), ())
        given = [(position, node.input[position]) for position in positions if position < len(node.input)]
        found = [(index, position, name) for position, name in given if _is_computed(main, name)]
        values = [_value(main, node, name) for _, _, name in found]
        if found and all(value is not None for value in values):
            # Also where the shape is known by now, which may be by an earlier copy.
            changes += [(*place, value) for place, value in zip(found, values, strict=True) if value is not None]
            unknown = unknown or not _is_static(main, node.output[0])
    if not unknown:
        return None
    copy = ModelProto()
    copy.CopyFrom(model)
    for number, (index, position, name, value) in enumerate(changes):
        stored = f"{name}/folded/{number}"
        copy.graph.initializer.append(numpy_helper.from_array(value, stored))
        copy.graph.node[index].input[position] = stored
    return copy


def _value(scope: Scope, node: NodeProto, name: str) -> np.ndarray | None:
    """The value of a node's input; in a Reshape's shape, 0 for a size that is open and stays, -1 for one other that is open."""
    constant = scope.constant(name)
    if constant is not None:
        return constant.array()
    sizes, given = scope.sizes(name), scope.info(node.input[0]).shape
    if not is_op(node, "Reshape") or attributes(node).get("allowzero") or sizes is None or given is None or 0 in sizes:
        return None
    kept = [0 if isinstance(n, str) and n == old else n for n, old in zip_longest(sizes, given[: len(sizes)])]
    rest = [n for n in kept if not isinstance(n, int)]
    if len(rest) == 1 and -1 not in kept:
        kept, rest = [n if isinstance(n, int) else -1 for n in kept], []
    return None if rest else np.array(kept, np.int64)


def _is_computed(scope: Scope, name: str) -> bool:
    """Whether nodes other than a Constant give a tensor."""
    producer = scope.producer.get(name)
    return producer is not None and not is_op(scope.nodes[producer], "Constant")


def _is_static(scope: Scope, name: str) -> bool:
    """Whether all sizes but the batch's are known."""
    shape = scope.info(name).shape
    return shape is not None and all(isinstance(n, int) for n in shape[1:])
