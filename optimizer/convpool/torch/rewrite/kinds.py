# SPDX-License-Identifier: Apache-2.0
"""What PyTorch computes as operators of ONNX, for the passes: one function for each kind of operator.

A translation gives the nodes, the last one with the result; None where ONNX has no such operator for these arguments.  It may pin
the node: then the passes see it, and leave it as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import NodeProto, helper
from torch import fx

from convpool.algebra.geometry import refuse, same_pads
from convpool.torch.rewrite.skeleton import Skeleton, ints

Translated = list[NodeProto] | None
Arguments = dict[str, Any]


def convolution(s: Skeleton, label: str, node: fx.Node, a: Arguments, weight: str, bias: str | None, kernel: tuple) -> Translated:
    """A Conv.  a: stride, padding, dilation and groups."""
    rank = len(kernel)
    strides, dilations = ints(a["stride"], rank), ints(a["dilation"], rank)
    if strides is None or dilations is None or type(a["groups"]) is not int or not isinstance(a["input"], fx.Node):
        return None
    if a["padding"] == "same":
        pads = same_pads("SAME_UPPER", kernel, (1,) * rank, dilations, None)
    else:
        padding = ints(0 if a["padding"] == "valid" else a["padding"], rank)
        if padding is None:
            return None
        pads = padding * 2
    shape = s.shape(a["input"])
    if shape is not None and len(shape) != rank + 2:
        s.pin(label, refuse("dimensions of the input", len(shape), f"{rank + 2}, with a batch"))
    inputs = [a["input"].name, weight, *([bias] if bias else [])]
    values: dict[str, Any] = dict(kernel_shape=kernel, strides=strides, pads=pads, dilations=dilations, group=a["groups"])
    return [helper.make_node("Conv", inputs, [node.name], **values)]


def conv(rank: int) -> Callable:
    def translate(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> Translated:
        shape = s.shape(a["weight"])
        if shape is None or len(shape) != rank + 2 or not all(isinstance(n, int) for n in shape):
            return None
        kernel = tuple(n for n in shape[2:] if isinstance(n, int))
        bias = a["bias"].name if isinstance(a["bias"], fx.Node) else None
        return convolution(s, label, node, a, a["weight"].name, bias, kernel)

    return translate


def average(rank: int) -> Callable:
    """AvgPool1d, AvgPool2d or AvgPool3d."""

    def translate(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> Translated:
        kernel = ints(a["kernel_size"], rank)
        stride = a["stride"] if a["stride"] not in (None, [], ()) else a["kernel_size"]
        strides, padding = ints(stride, rank), ints(a["padding"], rank)
        shape = s.shape(a["input"])
        if kernel is None or strides is None or padding is None or shape is not None and len(shape) != rank + 2:
            return None
        if a.get("divisor_override"):
            s.pin(label, refuse("divisor_override", a["divisor_override"], "none"))
        values: dict[str, Any] = dict(kernel_shape=kernel, strides=strides, pads=padding * 2)
        values |= dict(ceil_mode=int(a["ceil_mode"]), count_include_pad=int(a["count_include_pad"]))
        return [helper.make_node("AveragePool", [a["input"].name], [node.name], **values)]

    return translate


def adaptive_average(rank: int) -> Callable:
    """AdaptiveAvgPool1d, 2d or 3d: windows where the sizes are multiples."""

    def translate(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> Translated:
        given = a["output_size"]
        wanted = tuple(given) if isinstance(given, (tuple, list)) else (given,) * rank
        shape = s.shape(a["input"])
        if shape is not None and len(shape) != rank + 2:
            return None
        if all(n == 1 for n in wanted):
            return [helper.make_node("GlobalAveragePool", [a["input"].name], [node.name])]
        sizes = (None,) * rank if shape is None else shape[2:]
        pairs = [(size, n if n is not None else size) for size, n in zip(sizes, wanted, strict=True)]
        if not all(isinstance(size, int) and isinstance(n, int) and n > 0 and size % n == 0 for size, n in pairs):
            return None
        kernel = [size // n for size, n in pairs]  # type: ignore[operator]
        return [helper.make_node("AveragePool", [a["input"].name], [node.name], kernel_shape=kernel, strides=kernel)]

    return translate


def plain(op_type: str, *parameters: str) -> Callable:
    """An operator of one tensor.  parameters: attributes that the passes have to know, as argument=attribute."""

    def translate(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> Translated:
        values: dict[str, Any] = {attribute: a[argument] for argument, attribute in (item.split("=") for item in parameters)}
        if not all(isinstance(value, (int, float)) for value in values.values()) or not isinstance(a["input"], fx.Node):
            return None
        values = {name: float(value) for name, value in values.items()}
        if any(s.slopes.setdefault(float(np.float32(value)), value) != value for value in values.values()):
            return None
        return [helper.make_node(op_type, [a["input"].name], [node.name], **values)]

    return translate


def dropout(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> Translated:
    """Dropout of single numbers or of channels."""
    if not isinstance(a["p"], (int, float)) or not isinstance(a["training"], bool):
        return None
    active = a["training"] and a["p"] > 0
    names = [a["input"].name, s.number(a["p"], "float32"), s.number(active, "bool")]
    return [helper.make_node("Dropout", names, [node.name])]


def batch_norm(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> Translated:
    given = [a[name] for name in ("weight", "bias", "running_mean", "running_var")]
    if not all(isinstance(value, fx.Node) for value in given) or not isinstance(a["training"], bool):
        return None
    names = [a["input"].name, *(value.name for value in given)]
    values: dict[str, Any] = dict(epsilon=float(a["eps"]), training_mode=int(a["training"]))
    return [helper.make_node("BatchNormalization", names, [node.name], **values)]


def binary(op_type: str) -> Callable:
    def translate(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> Translated:
        if a["alpha"] != 1 or a["rounding_mode"] is not None or a["out"] is not None:
            return None
        given = [a["input"], a["other"]]
        tensors = [value for value in given if isinstance(value, fx.Node)]
        known = [s.known(value) for value in tensors]
        if not tensors:
            return None
        if s.sizes is not None and s.sizes.complete and any(item is None for item in known):
            return None  # numbers, or tuples that are joined
        types = {item.dtype for item in known if item is not None}
        if len(types) > 1 or not all(dtype.is_floating_point for dtype in types):
            return None
        if not all(isinstance(v, fx.Node) or isinstance(v, (int, float)) and not isinstance(v, bool) for v in given):
            return None
        names = [v.name if isinstance(v, fx.Node) else s.scalar(v, tensors[0]) for v in given]
        return [helper.make_node(op_type, names, [node.name])]

    return translate


def cat(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> Translated:
    tensors = a["tensors"]
    if not isinstance(tensors, (tuple, list)) or not all(isinstance(t, fx.Node) for t in tensors) or type(a["dim"]) is not int:
        return None
    return [helper.make_node("Concat", [t.name for t in tensors], [node.name], axis=a["dim"])]


def stack(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> Translated:
    """torch.stack: each tensor with one more axis, then a Concat."""
    tensors = a["tensors"]
    if not isinstance(tensors, (tuple, list)) or not all(isinstance(t, fx.Node) for t in tensors) or type(a["dim"]) is not int:
        return None
    names = [f"{node.name}/{number}" for number in range(len(tensors))]
    axis = s.number([a["dim"]])
    pieces = [helper.make_node("Unsqueeze", [t.name, axis], [name]) for t, name in zip(tensors, names, strict=True)]
    return [*pieces, helper.make_node("Concat", names, [node.name], axis=a["dim"])]


def pad(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> Translated:
    pads, shape = a["pad"], s.shape(a["input"])
    if not isinstance(pads, (tuple, list)) or not all(type(n) is int for n in pads) or a["mode"] not in ("constant", "reflect"):
        return None
    axes = [-1 - i for i in range(len(pads) // 2)]
    if shape is not None:
        axes = [axis + len(shape) for axis in axes]
    elif any(pads):
        return None
    names = [a["input"].name, s.number([*pads[::2], *pads[1::2]]), s.scalar(a["value"] or 0.0, a["input"]), s.number(axes)]
    return [helper.make_node("Pad", names, [node.name], mode=a["mode"])]


def interpolate(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> Translated:
    before, after = s.shape(a["input"]), s.shape(node)
    if before is None or after is None or len(before) < 3:
        return None
    if a["mode"] == "area":
        return adaptive_average(len(before) - 2)(s, label, node, {"input": a["input"], "output_size": after[2:]})
    pairs = list(zip(before[2:], after[2:], strict=True))
    if a["mode"] not in ("bilinear", "linear", "trilinear") or not all(isinstance(n, int) for pair in pairs for n in pair):
        return None
    if a["size"] is None and not a["recompute_scale_factor"]:  # the scale itself sets where values are taken
        given = a["scale_factor"]
        wanted = given if isinstance(given, (tuple, list)) else (given,) * len(pairs)
        if any(m != n * factor for (n, m), factor in zip(pairs, wanted, strict=True)):
            return None
    coordinates = "align_corners" if a["align_corners"] else "half_pixel"
    values: dict[str, Any] = dict(mode="linear", coordinate_transformation_mode=coordinates, antialias=int(a["antialias"]))
    scales = s.number([1, 1, *(m / n for n, m in pairs)], "float32")  # type: ignore[operator]
    return [helper.make_node("Resize", [a["input"].name, "", scales], [node.name], **values)]
