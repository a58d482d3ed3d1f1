# SPDX-License-Identifier: Apache-2.0
"""Equal spatial sizes where shape inference gives none: two tensors have them if they came about in the same way.

The size of an axis is a number, or follows from the size n of an axis elsewhere by one window of extent E and stride S:
floor((n - E) / S) + 1.  Windows behind one another are one such window.

| node | sizes of its result |
|---|---|
| Conv, AveragePool, MaxPool, the operator; Pad | those of its input, by a window |
| elementwise, or along batch and channels alone | those of its input |
| elementwise, of several; Concat along batch or channels | those of the inputs of more than one element, if they are the same |
| any other | known from here on only as its own |

Only an Add of sizes 1 and n > 1 would be wrong: it broadcasts, and a pooling does not commute with that.  Two sizes that follow
alike from the same ones are equal whatever the inputs are, so that it cannot be one.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from convpool.algebra.geometry import ConvSpec, PoolSpec
from convpool.ir.index import Scope
from convpool.ir.protos import is_op, known_attributes
from convpool.ir.schema import is_operator, layout_of, specs_of
from convpool.rules.base import Reject, malformed, windows
from convpool.rules.convs import conv_leaf
from convpool.rules.linear import BROADCASTING, known_step, op_of

Size = int | tuple[object, int, int]
"""A number, or the axis that the size follows from, E and S."""
Sizes = tuple[Size, ...]
Windows = list[list[tuple[int, int]]]
"""Per window, in order, extent less padding and stride of each axis."""
NONLINEAR = (
    "Abs",
    "Celu",
    "Clip",
    "DepthToSpace",
    "DequantizeLinear",
    "Elu",
    "Erf",
    "Exp",
    "Gelu",
    "GroupNormalization",
    "HardSigmoid",
    "HardSwish",
    "InstanceNormalization",
    "LeakyRelu",
    "Mish",
    "PRelu",
    "QuantizeLinear",
    "Relu",
    "Selu",
    "Sigmoid",
    "Softplus",
    "Softsign",
    "Sqrt",
    "Swish",
    "Tanh",
    "ThresholdedRelu",
)
"""Elementwise operators that are looked through, beside the linear ones of `linear.OPS`, though no average moves past them."""
UNARY = (*(name for name in NONLINEAR if name != "DepthToSpace"), "Softmax", "LayerNormalization")
"""Operators that keep the sizes of their first input, beside linear ones."""

_found: WeakKeyDictionary[Scope, dict[tuple[str, int], Sizes]] = WeakKeyDictionary()


def same_size(scope: Scope, names: list[str], rank: int) -> bool:
    """Return True if the tensors provably have equal spatial sizes, by shape or origin.

    One of another rank is broadcast, and cannot be pooled as it is.
    """
    shapes = [scope.info(name).shape for name in names]
    if any(shape is not None and len(shape) != rank + 2 for shape in shapes):
        return False
    return len({spatial_sizes(scope, name, rank) for name in names}) == 1


def spatial_sizes(scope: Scope, name: str, rank: int) -> Sizes:
    """The last `rank` sizes of a tensor; equal ones are equal whenever the model runs."""
    known = _found.setdefault(scope, {})
    entered: set[str] = set()
    pending = [name]
    while pending:
        tensor = pending.pop()
        if (tensor, rank) in known:
            continue
        sources, through = _sources(scope, tensor, rank)
        missing = [source for source in sources if (source, rank) not in known and source not in entered]
        entered.add(tensor)
        if missing:
            pending += [tensor, *missing]
            continue
        own = _own(scope, tensor, rank)
        if all((source, rank) in known for source in sources):  # not so in a circle
            own = _behind(own, [known[source, rank] for source in sources], through)
        known[tensor, rank] = own
    return known[name, rank]


def _own(scope: Scope, tensor: str, rank: int) -> Sizes:
    """Sizes as shape inference has them; a name is of one size in all of a scope."""
    shape = scope.info(tensor).shape
    if shape is None:
        return tuple(((tensor, axis), 1, 1) for axis in range(-rank, 0))
    last = (1,) * (rank - len(shape)) + shape[-rank:]
    return tuple(n if isinstance(n, int) else (n or (tensor, axis), 1, 1) for axis, n in zip(range(-rank, 0), last, strict=True))


def _behind(own: Sizes, sources: list[Sizes], through: Windows) -> Sizes:
    """Sizes of a result: as they are known where they are numbers, else by its sources and windows."""
    sizes: list[Size] = []
    for axis, size in enumerate(own):
        given = {source[axis] for source in sources} - {1}
        if isinstance(size, tuple) and len(given) == 1 and isinstance(found := given.pop(), tuple):
            origin, extent, stride = found
            for window in through:
                e, s = window[axis]
                extent, stride = extent - stride + stride * e, stride * s
            size = (origin, extent, stride)
        sizes.append(size)
    return tuple(sizes)


def _sources(scope: Scope, tensor: str, rank: int) -> tuple[list[str], Windows]:
    """The tensors that the sizes of one follow from, and by which windows; none where that is not known."""
    index = scope.producer.get(tensor)
    if index is None:
        return [], []
    node, values = scope.nodes[index], known_attributes(scope.nodes[index])
    if values is None:
        return [], []
    through = _windows(scope, index, values, rank)
    if through is not None:
        return [node.input[0]], through
    op = op_of(node)
    if is_op(node, *BROADCASTING, "Where"):
        return list(node.input), []
    if is_op(node, *UNARY) or op is not None and not op.apart:
        return [node.input[0]], []
    if len(scope.info(tensor).shape or ()) != rank + 2:
        return [], []
    if is_op(node, "Concat", "Split") and values.get("axis", 0) % (rank + 2) < 2:
        return list(node.input if is_op(node, "Concat") else node.input[:1]), []  # a Concat takes empty tensors of any size
    step = known_step(scope, index, rank) if op is not None else None
    if step is None or isinstance(step, Reject):
        return [], []
    pads = step.pads or (0,) * (2 * rank)
    first = scope.nodes[(index, *step.before)[-1]]
    return [first.input[step.operand]], [[(1 - pads[i] - pads[rank + i], 1) for i in range(rank)]]


def _windows(scope: Scope, index: int, values: dict[str, Any], rank: int) -> Windows | None:
    """Return the effect on sizes of a node with these attributes; None if no window, or unknown."""
    node = scope.nodes[index]
    if is_operator(node) and not layout_of(node):
        pool, conv = specs_of(values)
        return [_window(pool), _window(conv)] if isinstance(pool, PoolSpec) else None
    if not is_op(node, "Conv", "AveragePool", "MaxPool"):
        return None
    strides = tuple(values.get("strides") or (1,) * rank)
    if values.get("auto_pad", b"").startswith(b"SAME") and len(strides) == rank and min(strides) > 0:
        return [[(1, stride) for stride in strides]]
    if is_op(node, "Conv"):
        leaf = conv_leaf(scope, index, rank)
        return None if isinstance(leaf, Reject) else [_window(leaf.conv)]
    if values.get("ceil_mode", 0) and any(stride > 1 for stride in strides) or malformed(scope, index, values, rank) is not None:
        return None
    return [_window(windows(values, rank))]


def _window(spec: ConvSpec | PoolSpec) -> list[tuple[int, int]]:
    r, extents = spec.rank, spec.extents
    return [(extents[i] - spec.pads[i] - spec.pads[r + i], spec.strides[i]) for i in range(r)]
