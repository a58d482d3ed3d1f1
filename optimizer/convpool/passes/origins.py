# SPDX-License-Identifier: Apache-2.0
"""Equal spatial sizes where shape inference gives none: two tensors have them if they came about in the same way."""

from __future__ import annotations

from convpool.algebra.geometry import ConvSpec, PoolSpec
from convpool.ir.index import Scope
from convpool.ir.protos import is_op, known_attributes
from convpool.ir.schema import is_operator, layout_of
from convpool.passes.base import Reject, malformed
from convpool.passes.convs import conv_leaf
from convpool.passes.linear import Step, linear_step, op_of
from convpool.passes.upstream import NONLINEAR


def same_size(scope: Scope, names: list[str], rank: int) -> bool:
    """Whether the tensors provably have equal spatial sizes: by their shapes, or by how they came about.

    One of another rank is broadcast, and cannot be pooled as it is.
    """
    shapes = [scope.info(name).shape for name in names]
    if any(s is not None and len(s) != rank + 2 for s in shapes):
        return False
    if all(s is not None and None not in s[2:] for s in shapes):
        if len({s[2:] for s in shapes if s is not None}) == 1:
            return True
    return len({spatial_origin(scope, name, rank) for name in names}) == 1


def spatial_origin(scope: Scope, name: str, rank: int) -> tuple:
    """A tensor and how sizes followed from its: equal origins have equal spatial sizes.

    Windows of extent E and stride S give floor((n - E) / S) + 1 positions; behind one another they are one such window.
    """
    extents, strides = [1] * rank, [1] * rank
    while (index := scope.producer.get(name)) is not None:
        node = scope.nodes[index]
        windows = _windows(scope, index, rank)
        if windows is not None:
            for window in reversed(windows):
                for i, (e, s) in enumerate(window):
                    extents[i], strides[i] = e - s + s * extents[i], s * strides[i]
            name = node.input[0]
        elif (op := op_of(node)) is not None and op.binary:
            step = linear_step(scope, index, rank)
            if not isinstance(step, Step):
                break
            name = node.input[step.operand]
        elif op is not None and not op.apart or is_op(node, *NONLINEAR) and not is_op(node, "PRelu"):
            name = node.input[0]
        else:
            break
    return (name, *extents, *strides)


def _windows(scope: Scope, index: int, rank: int) -> list[list[tuple[int, int]]] | None:
    """What a node does to sizes: per window, in order, extent less padding and stride of each axis; None if unknown."""
    node = scope.nodes[index]
    values = known_attributes(node)
    if values is None:
        return None
    if is_op(node, "Conv"):
        leaf = conv_leaf(scope, index, rank)
        return None if isinstance(leaf, Reject) else [_window(leaf.conv)]
    names = ("kernel_shape", "strides", "pads", "dilations")
    if is_operator(node) and not layout_of(node):
        kernel_shape, strides, pads, dilations = (tuple(values[key]) for key in names)
        pool = PoolSpec(*(tuple(values[f"pool_{key}"]) for key in names))
        return [_window(pool), _window(ConvSpec(kernel_shape, strides, pads, dilations))]
    if is_op(node, "AveragePool") and not values.get("ceil_mode", 0) and values.get("auto_pad", b"NOTSET") == b"NOTSET":
        defaults = ((), (1,) * rank, (0,) * (2 * rank), (1,) * rank)
        if malformed(scope, index, values, rank) is not None:
            return None
        return [_window(PoolSpec(*(tuple(values.get(key) or default) for key, default in zip(names, defaults, strict=True))))]
    return None


def _window(spec: ConvSpec | PoolSpec) -> list[tuple[int, int]]:
    r = spec.rank
    return [
        (spec.dilations[i] * (spec.kernel_shape[i] - 1) + 1 - spec.pads[i] - spec.pads[r + i], spec.strides[i]) for i in range(r)
    ]
