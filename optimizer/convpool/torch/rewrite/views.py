# SPDX-License-Identifier: Apache-2.0
"""Reductions, slices, and functions that only rearrange, as operators of ONNX; see `convpool.torch.rewrite.kinds`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnx import NodeProto, helper
from torch import fx

from convpool.torch.rewrite.skeleton import Skeleton

Translated = list[NodeProto] | None
Arguments = dict[str, Any]
FAR = 2**62
"""A Slice that ends here takes the rest of an axis."""


def getitem(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> Translated:
    index, shape = a["other"] if isinstance(a["other"], tuple) else (a["other"],), s.shape(a["input"])
    if shape is None:
        return None
    if Ellipsis in [item for item in index if not isinstance(item, fx.Node)]:
        place = [item is Ellipsis for item in index].index(True)
        index = (*index[:place], *[slice(None)] * (len(shape) - len(index) + 1), *index[place + 1 :])
    bounds = []
    for axis, item in enumerate(index):
        if not isinstance(item, slice) or not all(
            value is None or type(value) is int for value in (item.start, item.stop, item.step)
        ):
            return None
        if item != slice(None):
            bounds.append((item.start or 0, FAR if item.stop is None else item.stop, axis, item.step or 1))
    names = [s.number(list(numbers)) for numbers in zip(*bounds, strict=True)]
    return [helper.make_node("Slice" if names else "Identity", [a["input"].name, *names], [node.name])]


def reduction(op_type: str) -> Callable:
    def translate(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> Translated:
        dims = (a["dim"],) if type(a["dim"]) is int else a["dim"]
        shape = s.shape(a["input"])
        if not isinstance(dims, (tuple, list)) or not dims or a["dtype"] is not None or not all(type(d) is int for d in dims):
            return None
        if shape is not None:
            dims = [d % len(shape) for d in dims]
        names = [a["input"].name, s.number(list(dims))]
        return [helper.make_node(op_type, names, [node.name], keepdims=int(a["keepdim"]))]

    return translate


def reshape(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> Translated:
    before, after = s.shape(a["input"]), s.shape(node)
    if before is None or after is None:
        return None
    sizes = [n if isinstance(n, int) else 0 if i == 0 and before and before[0] == n else -1 for i, n in enumerate(after)]
    if sizes.count(-1) > 1 or any(n == 0 for n in (*after, *before)):
        return None
    return [helper.make_node("Reshape", [a["input"].name, s.number(sizes)], [node.name])]


def _transposed(s: Skeleton, node: fx.Node, order: Any, x: fx.Node) -> Translated:
    shape = s.shape(x)
    if shape is None or not all(type(axis) is int for axis in order):
        return None
    return [helper.make_node("Transpose", [x.name], [node.name], perm=[axis % len(shape) for axis in order])]


def permute(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> Translated:
    dims = a["dims"][0] if len(a["dims"]) == 1 and isinstance(a["dims"][0], (tuple, list)) else a["dims"]
    return _transposed(s, node, dims, a["input"])


def transpose(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> Translated:
    shape = s.shape(a["input"])
    if shape is None or type(a["dim0"]) is not int or type(a["dim1"]) is not int:
        return None
    order = list(range(len(shape)))
    order[a["dim0"]], order[a["dim1"]] = order[a["dim1"]], order[a["dim0"]]
    return _transposed(s, node, order, a["input"])


def pixel_unshuffle(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> Translated:
    shape, r = s.shape(a["input"]), a["downscale_factor"]
    if shape is None or len(shape) != 4 or not all(isinstance(n, int) for n in shape[1:]) or type(r) is not int:
        return None
    c, h, w = (n for n in shape[1:] if isinstance(n, int))
    split, moved = f"{node.name}/split", f"{node.name}/moved"
    return [
        helper.make_node("Reshape", [a["input"].name, s.number([0, c, h // r, r, w // r, r])], [split]),
        helper.make_node("Transpose", [split], [moved], perm=[0, 1, 3, 5, 2, 4]),
        helper.make_node("Reshape", [moved, s.number([0, c * r * r, h // r, w // r])], [node.name]),
    ]
