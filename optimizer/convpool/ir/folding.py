# SPDX-License-Identifier: Apache-2.0
"""Shapes that follow from constants which onnx's shape inference does not compute.

Exporters write the amounts of a Pad, or the sizes of a Reshape, by a chain of nodes on constants and on shapes.  Inference gives
up there, and all sizes behind are unknown.  So the model is inferred again with the values of these chains as initializers.  The
model itself stays as it is.
"""

from __future__ import annotations

from onnx import ModelProto, numpy_helper

from convpool.ir.index import Scope
from convpool.ir.protos import is_op

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


def with_shapes_folded(model: ModelProto, main: Scope) -> ModelProto | None:
    """A copy of the model for shape inference, node for node, in which constants that shapes depend on are initializers.

    main: the index of the model's main graph, the only one looked at.  None where that makes no shape known.
    """
    changes: list[tuple[int, int, str]] = []
    unknown = False
    for index, node in enumerate(main.nodes):
        positions = next((SHAPING[name] for name in SHAPING if is_op(node, name)), ())
        given = [(position, node.input[position]) for position in positions if position < len(node.input)]
        found = [(index, position, name) for position, name in given if _is_computed(main, name)]
        if found and all(main.constant(name) is not None for _, _, name in found):
            changes += found  # also where the shape is known by now, which may be by an earlier copy
            unknown = unknown or not _is_static(main, node.output[0])
    if not unknown:
        return None
    copy = ModelProto()
    copy.CopyFrom(model)
    stored: dict[str, str] = {}
    for index, position, name in changes:
        if name not in stored:
            constant = main.constant(name)
            assert constant is not None
            stored[name] = f"{name}/folded"
            copy.graph.initializer.append(numpy_helper.from_array(constant.array(), stored[name]))
        copy.graph.node[index].input[position] = stored[name]
    return copy


def _is_computed(scope: Scope, name: str) -> bool:
    """Whether nodes other than a Constant give a tensor."""
    producer = scope.producer.get(name)
    return producer is not None and not is_op(scope.nodes[producer], "Constant")


def _is_static(scope: Scope, name: str) -> bool:
    """Whether all sizes but the batch's are known."""
    shape = scope.info(name).shape
    return shape is not None and all(isinstance(n, int) for n in shape[1:])
