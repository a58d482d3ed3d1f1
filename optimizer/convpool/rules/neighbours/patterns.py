# SPDX-License-Identifier: Apache-2.0
"""Nodes beside one of the operator: a map by image, a SiLU, a layer that fuses what is behind it.

    x - Mul (factor) - Add (summand)        x - Sigmoid - Mul
                                              +-----------+

Factor and summand are computed tensors [N, C, 1...], as of conditional and adaptive normalization.
"""

from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from convpool.algebra.parts import IDENTITY, PROLOGUES, Affine
from convpool.ir import schema
from convpool.ir.index import Scope
from convpool.ir.protos import is_op, known_attributes
from convpool.rules.linear import is_map, op_of
from convpool.rules.sizes import groups_channels


@dataclass(frozen=True)
class Modulation:
    """The map by image and channel y = factor * (affine of x) + summand; factor and summand are tensors [N, C, 1...]."""

    factor: str
    summand: str
    affine: Affine = IDENTITY


def silu_of(scope: Scope, index: int) -> tuple[int, str] | None:
    """The Sigmoid and the x of x * sigmoid(x), where node `index` is that Mul and alone reads the Sigmoid; else None."""
    node = scope.nodes[index]
    for x, gate in zip(node.input, reversed(node.input), strict=True) if is_op(node, "Mul") else ():
        sigmoid = scope.made_by(gate, "Sigmoid")
        if sigmoid is not None and scope.other_readers(gate) is None and scope.nodes[sigmoid].input[0] == x:
            return sigmoid, x
    return None


def silu_behind(scope: Scope, y: str) -> tuple[int, int] | None:
    """The Sigmoid and the Mul of y * sigmoid(y), where nothing else reads y or the Sigmoid."""
    readers = scope.readers.get(y, [])
    for product in readers if y not in scope.outputs and y not in scope.captured and len(set(readers)) == 2 else ():
        found = silu_of(scope, product)
        if found is not None and found[1] == y:
            return found[0], product
    return None


def modulator_of(scope: Scope, index: int, op_type: str, rank: int) -> tuple[str, str] | None:
    """The two operands of node `index`, first the one of x, then one [N, C, 1...] that is computed; None for other nodes."""
    node = scope.nodes[index]
    if not is_op(node, op_type) or len(node.input) != 2:
        return None
    for x, other in zip(node.input, reversed(node.input), strict=True):
        shapes = [scope.info(name).shape for name in (x, other)]
        if None in shapes or any(len(shape or ()) != rank + 2 for shape in shapes) or scope.constant(other) is not None:
            continue
        given, wanted = (tuple(shape or ()) for shape in shapes)
        column = (*given[:2], *(1,) * rank)
        if None not in column and wanted == column != given:
            return x, other
    return None


def modulated_by(scope: Scope, index: int, rank: int, channels: int) -> tuple[int, str, str, str] | None:
    """The Mul of a map of so many channels before the Add `index`, its factor, the Add's summand and the map; None for others."""
    added = modulator_of(scope, index, "Add", rank)
    product = scope.producer.get(added[0]) if added is not None else None
    if added is None or product is None or scope.other_readers(added[0]) is not None:
        return None
    multiplied = modulator_of(scope, product, "Mul", rank)
    if multiplied is None or (scope.info(multiplied[0]).shape or (None, None))[1] != channels:
        return None
    return product, multiplied[1], added[1], multiplied[0]


EPILOGUE_HOSTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators into whose own epilogue runtimes fuse what is elementwise behind them."""


def host_of(scope: Scope, x: str) -> int | None:
    """The layer that gives `x` only to this chain, possibly by an Add, and into which runtimes fuse it; condition (4)."""
    for _ in range(2):
        index = scope.producer.get(x)
        if index is None or scope.other_readers(x) is not None:
            return None
        node = scope.nodes[index]
        if is_op(node, *EPILOGUE_HOSTS):
            return index
        if not is_op(node, "Add", "Sum"):
            return None
        x = next((name for name in node.input if scope.made_by(name, *EPILOGUE_HOSTS) is not None), "")
    return None


def mapped_by(scope: Scope, x: str, rank: int) -> str | None:
    """The tensor of which a SiLU, or an activation of a map by image, gives `x` to one reader alone; None for others."""
    index = scope.producer.get(x)
    if index is None or scope.other_readers(x) is not None:
        return None
    silu = silu_of(scope, index)
    if silu is not None:
        return silu[1]
    node = scope.nodes[index]
    before = scope.producer.get(node.input[0]) if is_op(node, *PROLOGUES) and scope.other_readers(node.input[0]) is None else None
    added = modulator_of(scope, before, "Add", rank) if before is not None else None
    return added[0] if added is not None else None


def normalizes(scope: Scope, x: str, rank: int) -> bool:
    """Return True if what gives `x` is `mapped_by` a normalization of each image, with maps and reshapes between."""
    found = mapped_by(scope, x, rank)
    while found is not None and (index := scope.producer.get(found)) is not None:
        node = scope.nodes[index]
        multiplied = modulator_of(scope, index, "Mul", rank)
        if is_op(node, "InstanceNormalization"):
            return True
        if multiplied is not None:
            found = multiplied[0]
        elif is_op(node, "Reshape") or _is_idle(node):
            found = node.input[0]
        else:
            found = next((name for name in node.input if scope.constant(name) is None), None) if is_map(scope, index) else None
    return False


GROUPS_BY_CHANNEL_OPSET = 21
"""The first opset whose GroupNormalization has scale and bias by channel."""


@dataclass(frozen=True)
class Normalization:
    """Mean 0 and variance 1 in each of `groups` groups of channels of an image, then a map by channel.

    x: what is normalized.  nodes: that do it, from the last on.
    """

    x: str
    groups: int
    epsilon: float
    affine: Affine
    nodes: tuple[int, ...]


def normalization_of(scope: Scope, y: str, rank: int, channels: int) -> Normalization | None:
    """The normalization with constant scale and bias that gives `y`, a map of so many channels; None for others.

    InstanceNormalization, GroupNormalization from opset 21 on, or Reshape to [N, groups, rest], InstanceNormalization, Reshape
    to the shape before.  Nothing else reads what these nodes give, but for `y`."""
    index = scope.made_by(y, "InstanceNormalization", "GroupNormalization", "Reshape")
    if index is None:
        return None
    nodes, inner = [index], index
    x = scope.nodes[index].input[0]
    if is_op(scope.nodes[index], "Reshape"):
        chain = scope.chain(index, "InstanceNormalization", "Reshape")
        if chain is None or not groups_channels(scope, chain, rank):
            return None
        _, inner, first = nodes = chain
        x = scope.nodes[first].input[0]
        source = scope.producer.get(scope.nodes[index].input[1])
        if any(scope.other_readers(scope.nodes[i].output[0]) is not None for i in (inner, first)):
            return None
        nodes = [*chain, *([source] if source is not None else ())]
    node, values = scope.nodes[inner], known_attributes(scope.nodes[inner])
    constants = [scope.constant(name) for name in node.input[1:3]]
    shape, grouped = scope.info(x).shape, scope.info(node.input[0]).shape
    if values is None or len(constants) != 2 or shape is None or len(shape) != rank + 2 or shape[1] != channels or not grouped:
        return None
    groups = int(values["num_groups"]) if is_op(node, "GroupNormalization") else grouped[1]
    whole = scope.opset >= GROUPS_BY_CHANNEL_OPSET or not is_op(node, "GroupNormalization")
    if not whole or not isinstance(groups, int) or groups < 1 or channels % groups or None in constants:
        return None
    scale, bias = (item.array().astype(np.float64) for item in constants if item is not None)
    epsilon = float(values.get("epsilon", 1e-5))
    if scale.size != bias.size or scale.size not in (groups, channels) or not 0 <= epsilon < np.inf:
        return None
    affine = Affine(*(np.repeat(array, channels // array.size) for array in (scale, bias)))
    return Normalization(x, groups, epsilon, affine, tuple(nodes))


def only_an_activation(scope: Scope, x: str) -> bool:
    """Return True if an activation gives `x`, and no elementwise node its input; condition (5)."""
    index = scope.made_by(x, *PROLOGUES)
    if index is None:
        return False
    before = scope.producer.get(scope.nodes[index].input[0])
    while before is not None and _is_idle(scope.nodes[before]):
        before = scope.producer.get(scope.nodes[before].input[0])
    return before is None or not (is_map(scope, before) or is_op(scope.nodes[before], "Sum"))


def _is_idle(node: NodeProto) -> bool:
    op = op_of(node)
    return op is not None and op.idle


def may_fuse(scope: Scope, index: int) -> bool:
    """Return True if a node's operator may stand in a prologue."""
    return is_map(scope, index) or is_op(scope.nodes[index], *PROLOGUES)


def has_prologue(scope: Scope, index: int) -> bool:
    """Return True if a node of the operator has a prologue."""
    parts = schema.parts_of(scope.nodes[index])
    return parts.affine or bool(parts.prologue)
