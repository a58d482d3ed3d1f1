# SPDX-License-Identifier: Apache-2.0
"""Recognising a Resize to one half as an average.

Linear interpolation at the positions of `half_pixel`, 2 i + 1/2, is the mean of elements 2 i and 2 i + 1: an AveragePool of
window and stride 2.  It is when (1) each spatial size is halved or kept, and batch and channels are kept; (2) the mode is linear,
without antialias; (3) the coordinates are half_pixel, or pytorch_half_pixel where more than one element remains (that takes the
first element else); (4) the sizes halved are static and even, since runtimes differ in the scale that they take for odd ones.
"""

from __future__ import annotations

from convpool.algebra.geometry import Ints, PoolSpec
from convpool.ir.index import Scope
from convpool.ir.protos import attributes, is_op
from convpool.passes.base import Reject, reject
from convpool.passes.tree import Pooling

HALF_PIXEL_OPSET = 11
"""The first opset whose Resize has other coordinates than 2 i."""


def may_be_half(scope: Scope, index: int) -> str | None:
    """The tensor that a Resize makes smaller; None for any other node, or where its scales are computed."""
    node = scope.nodes[index]
    scales = _scales(scope, index) if is_op(node, "Resize") else None
    smaller = scales is not None and all(scale <= 1 for scale in scales) and any(scale < 1 for scale in scales)
    return node.input[0] if smaller else None


def recognise_half(scope: Scope, index: int, rank: int, size: Ints | None) -> Pooling | Reject | None:
    """The mean over 2 elements of each axis that a Resize makes half as long, or why it is another."""
    node, scales = scope.nodes[index], _scales(scope, index)
    values = attributes(node)
    if scales is None:
        return None
    if len(scales) != rank + 2 or any(s != 1 for s in scales[:2]) or any(s not in (1, 0.5) for s in scales[2:]):
        return reject(scope, index, "scales", [round(s, 6) for s in scales], "1/2 or 1 on spatial axes")
    mode = values.get("mode", b"nearest").decode(errors="replace")
    if mode != "linear":
        return reject(scope, index, "mode", mode, "linear")
    if values.get("antialias", 0):
        return reject(scope, index, "antialias", 1, 0)
    default = b"half_pixel" if scope.opset >= HALF_PIXEL_OPSET else b"asymmetric"
    coordinates = values.get("coordinate_transformation_mode", default).decode(errors="replace")
    if coordinates not in ("half_pixel", "pytorch_half_pixel"):
        return reject(scope, index, "coordinate_transformation_mode", coordinates, "half_pixel or pytorch_half_pixel")
    if size is None:
        return reject(scope, index, "size of the Resize's input", "unknown", "static spatial sizes")
    kernel = tuple(2 if scale == 0.5 else 1 for scale in scales[2:])
    if any(n % k for n, k in zip(size, kernel, strict=True)):
        return reject(scope, index, "size halved", list(size), "even numbers; runtimes scale odd ones differently")
    if coordinates == "pytorch_half_pixel" and any(n == k == 2 for n, k in zip(size, kernel, strict=True)):
        return reject(scope, index, "elements that pytorch_half_pixel leaves", 1, "more")
    spec = PoolSpec(kernel, kernel, (0,) * (2 * rank), (1,) * rank)
    return Pooling(index, (index,), node.input[0], node.output[0], "resize", spec)


def _scales(scope: Scope, index: int) -> tuple[float, ...] | None:
    """What a Resize multiplies each size by, as far as constants tell; of `sizes`, beside a shape that is known on those axes."""
    node = scope.nodes[index]
    inputs = list(node.input)
    shape = scope.info(inputs[0]).shape
    given = {item.name: item for item in node.attribute}
    position = 1 if scope.opset < HALF_PIXEL_OPSET else 2
    numbers = scope.constant(inputs[position]) if len(inputs) > position and inputs[position] else None
    axes = tuple(given["axes"].ints) if "axes" in given else None
    if numbers is not None and numbers.shape != (0,):
        found = tuple(float(value) for value in numbers.array().reshape(-1))
    else:
        sizes = scope.constant_ints(inputs[3]) if len(inputs) > 3 and inputs[3] else None
        policy = given.get("keep_aspect_ratio_policy")
        if sizes is None or shape is None or policy is not None and policy.s != b"stretch":
            return None
        old = [shape[axis] for axis in axes] if axes is not None else list(shape)
        if len(old) != len(sizes):
            return None
        found = tuple(n / dim for n, dim in zip(sizes, old, strict=True) if isinstance(dim, int) and dim > 0)
        if len(found) != len(old):
            return None
    if axes is None:
        return found
    if shape is None or len(found) != len(axes):
        return None
    full = dict(zip((axis % len(shape) for axis in axes), found, strict=True))
    return tuple(full.get(axis, 1.0) for axis in range(len(shape)))
