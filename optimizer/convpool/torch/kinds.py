# SPDX-License-Identifier: Apache-2.0
"""PyTorch's functions and methods as operators of ONNX, for the rules: one translation for each kind, then the table of all.

A translation gives the nodes, the last one with the result; None where ONNX has no such operator for these arguments.  It may pin
the node: then the rules see it, and leave it as it is.
"""

from __future__ import annotations

import inspect
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from onnx import NodeProto, helper
from torch import fx

from convpool.algebra.geometry import refuse, same_pads
from convpool.algebra.parts import MAX_UPSAMPLE
from convpool.torch.changes import value_of
from convpool.torch.skeleton import Skeleton, ints

Translated = list[NodeProto] | None
Arguments = dict[str, Any]


def conv(rank: int) -> Callable:
    """A Conv of `rank` spatial axes."""

    def translate(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> Translated:
        shape, strides, dilations = s.shape(a["weight"]), ints(a["stride"], rank), ints(a["dilation"], rank)
        if shape is None or len(shape) != rank + 2 or strides is None or dilations is None or type(a["groups"]) is not int:
            return None
        kernel = tuple(n for n in shape[2:] if isinstance(n, int))
        pads: tuple[int, ...] | None
        if a["padding"] == "same":
            pads = same_pads("SAME_UPPER", kernel, (1,) * rank, dilations, None)
        else:
            padding = ints(0 if a["padding"] == "valid" else a["padding"], rank)
            pads = None if padding is None else padding * 2
        if len(kernel) != rank or pads is None:
            return None
        given = s.shape(a["input"])
        if given is not None and len(given) != rank + 2:
            s.pin(label, refuse("dimensions of the input", len(given), f"{rank + 2}, with a batch"))
        inputs = [a["input"].name, a["weight"].name, *([a["bias"].name] if isinstance(a["bias"], fx.Node) else [])]
        values: dict[str, Any] = dict(kernel_shape=kernel, strides=strides, pads=pads, dilations=dilations, group=a["groups"])
        return [helper.make_node("Conv", inputs, [node.name], **values)]

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
    """An operator of one tensor.  parameters: attributes that the rules have to know, as argument=attribute."""

    def translate(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> Translated:
        values: dict[str, Any] = {attribute: a[argument] for argument, attribute in (item.split("=") for item in parameters)}
        if not all(isinstance(value, (int, float)) for value in values.values()) or not isinstance(a["input"], fx.Node):
            return None
        values = {name: float(value) for name, value in values.items()}
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


def normalization(op_type: str) -> Callable:
    """GroupNorm or InstanceNorm, which the rules only have to know by name."""

    def translate(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> Translated:
        shape = s.shape(a["input"])
        if shape is None or len(shape) < 3 or not isinstance(shape[1], int):
            return None
        if all(isinstance(size, int) and size <= MAX_UPSAMPLE for size in shape[2:]):
            return None  # in front of an upsampling it may be of one value, which PyTorch refuses
        if "running_mean" in a["others"] or any(value is not None for value in a["rest"][:2] if op_type[0] == "I"):
            return None  # their variance is another one of a map that repeats
        names = [a["input"].name, s.number([1.0] * shape[1], "float32"), s.number([0.0] * shape[1], "float32")]
        values = {"num_groups": a["num_groups"]} if "num_groups" in a else {}
        return [helper.make_node(op_type, names, [node.name], **values)]

    return translate


def binary(op_type: str) -> Callable:
    def translate(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> Translated:
        if a["alpha"] != 1 or a["rounding_mode"] is not None or a["out"] is not None:
            return None
        given = [a["input"], a["other"]]
        tensors = [value for value in given if isinstance(value, fx.Node)]
        known = [s.known(value) for value in tensors]
        types = {item.dtype for item in known if item is not None}
        if None in known or len(types) != 1 or not all(dtype.is_floating_point for dtype in types):
            return None  # numbers, or tuples that are joined
        if not all(isinstance(v, fx.Node) or isinstance(v, (int, float)) and not isinstance(v, bool) for v in given):
            return None
        names = [v.name if isinstance(v, fx.Node) else s.scalar(v, tensors[0]) for v in given]
        return [helper.make_node(op_type, names, [node.name])]

    return translate


def joined(stacks: bool) -> Callable:
    """torch.cat, or torch.stack: each tensor with one more axis, then a Concat."""

    def translate(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> Translated:
        tensors, axis = a["tensors"], a["dim"]
        if not isinstance(tensors, (tuple, list)) or not all(isinstance(t, fx.Node) for t in tensors) or type(axis) is not int:
            return None
        names, pieces = [t.name for t in tensors], []
        if stacks:
            at, wide = s.number([axis]), [f"{node.name}/{number}" for number in range(len(names))]
            pieces = [helper.make_node("Unsqueeze", [name, at], [made]) for name, made in zip(names, wide, strict=True)]
            names = wide
        return [*pieces, helper.make_node("Concat", names, [node.name], axis=axis)]

    return translate


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
    pairs, values = list(zip(before[2:], after[2:], strict=True)), dict[str, Any]()
    nearest = a["mode"] in ("nearest", "nearest-exact")
    if not nearest and a["mode"] not in ("bilinear", "linear", "trilinear"):
        return None
    if not all(isinstance(n, int) and n for pair in pairs for n in pair):
        return None
    if a["size"] is None and not a["recompute_scale_factor"]:  # the scale itself sets where values are taken
        given = a["scale_factor"]
        wanted = given if isinstance(given, (tuple, list)) else (given,) * len(pairs)
        if any(m != n * factor for (n, m), factor in zip(pairs, wanted, strict=True)):
            return None
    if nearest and any(m % n for n, m in pairs):  # type: ignore[operator]
        return None
    if nearest:  # of whole factors, where all kinds of it are the same
        values = dict(mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    else:
        coordinates = "align_corners" if a["align_corners"] else "half_pixel"
        values = dict(mode="linear", coordinate_transformation_mode=coordinates, antialias=int(a["antialias"]))
    scales = s.number([1, 1, *(m / n for n, m in pairs)], "float32")  # type: ignore[operator]
    return [helper.make_node("Resize", [a["input"].name, "", scales], [node.name], **values)]


def same(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> Translated:
    """A call that changes no number and no type: another order in memory at most, which `plan` gives the result."""
    x, y = value_of(a["input"]), value_of(node)
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor) or (x.dtype, x.device) != (y.dtype, y.device):
        return None
    return [helper.make_node("Identity", [a["input"].name], [node.name])]


# ---- reductions, slices, and functions that only rearrange ----

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
    given, made = s.known(a["input"]), s.known(node)
    if given is None or made is None or given.dtype != made.dtype:
        return None
    before, after = given.shape, made.shape
    sizes = [n if isinstance(n, int) else 0 if i == 0 and before and before[0] == n else -1 for i, n in enumerate(after)]
    if sizes.count(-1) > 1 or any(n == 0 for n in (*after, *before)):
        return None
    return [helper.make_node("Reshape", [a["input"].name, s.number(sizes)], [node.name])]


def permute(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> Translated:
    """A permutation of all axes, or an exchange of two."""
    shape, given = s.shape(a["input"]), a["dims"] if "dims" in a else (a["dim0"], a["dim1"])
    given = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    if shape is None or not all(type(axis) is int for axis in given):
        return None
    order, axes = list(range(len(shape))), [axis % len(shape) for axis in given]
    if "dims" in a:
        order = axes
    else:
        order[axes[0]], order[axes[1]] = axes[1], axes[0]
    return [helper.make_node("Transpose", [a["input"].name], [node.name], perm=order)]


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


# ---- the table ----


def signature(text: str) -> inspect.Signature:
    """The parameters that a line of Python describes."""
    space: dict[str, Any] = {}
    exec(f"def function({text}): pass", space)
    return inspect.signature(space["function"])


_CONV = "input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1"
_POOL = "input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None"
_BINARY = "input, other, *, alpha=1, rounding_mode=None, out=None"
_NORM = "input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5"
_RESIZE = "input, size=None, scale_factor=None, mode='nearest', align_corners=None, recompute_scale_factor=None, antialias=False"
_REDUCE, _ANY = "input, dim=None, keepdim=False, dtype=None", "input, *sizes, **others"
_LINES: list[tuple[str, str, Callable]] = [
    *((f"conv{r}d", _CONV, conv(r)) for r in (1, 2, 3)),
    *((f"avg_pool{r}d", _POOL, average(r)) for r in (1, 2, 3)),
    *((f"adaptive_avg_pool{r}d", "input, output_size", adaptive_average(r)) for r in (1, 2, 3)),
    ("relu relu_", "input, inplace=False", plain("Relu")),
    ("leaky_relu leaky_relu_", "input, negative_slope=0.01, inplace=False", plain("LeakyRelu", "negative_slope=alpha")),
    ("sigmoid sigmoid_", "input", plain("Sigmoid")),
    ("tanh tanh_", "input", plain("Tanh")),
    ("elu", "input, alpha=1.0, inplace=False", plain("Elu")),
    ("selu", "input, inplace=False", plain("Selu")),
    ("hardswish", "input, inplace=False", plain("HardSwish")),
    ("mish", "input, inplace=False", plain("Mish")),
    ("gelu", "input, *, approximate='none'", plain("Gelu")),
    ("softplus", "input, beta=1, threshold=20", plain("Softplus")),
    ("softsign", "input", plain("Softsign")),
    *((name, "input", plain(name.title())) for name in ("abs", "neg", "exp", "sqrt")),
    ("dropout dropout1d dropout2d dropout3d alpha_dropout", "input, p=0.5, training=True, inplace=False", dropout),
    ("batch_norm", _NORM, batch_norm),
    ("group_norm", "input, num_groups, *rest, **others", normalization("GroupNormalization")),
    ("instance_norm", "input, *rest, **others", normalization("InstanceNormalization")),
    ("add iadd add_", _BINARY, binary("Add")),
    ("sub isub sub_", _BINARY, binary("Sub")),
    ("mul imul mul_", _BINARY, binary("Mul")),
    ("div true_divide truediv itruediv div_", _BINARY, binary("Div")),
    ("contiguous clone to type type_as float double half bfloat16", "input, *rest, **others", same),
    ("cat concat concatenate", "tensors, dim=0", joined(False)),
    ("stack", "tensors, dim=0", joined(True)),
    ("pad", "input, pad, mode='constant', value=None", pad),
    ("interpolate", _RESIZE, interpolate),
    ("getitem", "input, other", getitem),
    ("mean", _REDUCE, reduction("ReduceMean")),
    ("sum", _REDUCE, reduction("ReduceSum")),
    ("reshape view flatten unflatten", _ANY, reshape),
    ("permute", "input, *dims", permute),
    ("transpose swapaxes", "input, dim0, dim1", permute),
    ("pixel_unshuffle", "input, downscale_factor", pixel_unshuffle),
]
"""Names of functions and methods, their parameters, and the translation."""


def _functions(name: str) -> Iterator[Any]:
    """What a graph has for a name: PyTorch's functions, Python's operator, an operator of ATen, the method."""
    for home in (F, torch, operator, torch._C._nn):
        found = getattr(home, name, None)
        if callable(found):
            yield found
    if isinstance(getattr(torch.Tensor, name, None), (types.MethodDescriptorType, types.FunctionType)):
        yield name
    packet = getattr(torch.ops.aten, name, None) if name != "batch_norm" else None  # whose arguments have another order
    for overload in packet.overloads() if packet is not None else ():
        yield getattr(packet, overload)


FUNCTIONS = {
    function: (signature(text), translate)
    for names, text, translate in _LINES
    for name in names.split()
    for function in _functions(name)
}
"""How a function, or a method by its name, is bound and translated."""

NUMBERS = ("eps", "value", "scale_factor", "ceil_mode", "divisor_override")
"""Arguments that a translation reads; torch.compile may leave them open."""


def translate_call(s: Skeleton, label: str, node: fx.Node) -> Translated:
    """The nodes of a function or method, None where there are none."""
    given = arguments(node)
    if given is None or "input" in given and not isinstance(given["input"], (fx.Node, int, float)):
        return None
    if any(isinstance(given.get(name), fx.Node) for name in NUMBERS):
        return None
    return FUNCTIONS[node.target][1](s, label, node, given)


def arguments(node: fx.Node) -> Arguments | None:
    """The arguments of a call by their names, complete; None where the function is not known, or has no such."""
    found = FUNCTIONS.get(node.target)
    names = {"train": "training", "axis": "dim", "self": "input"}  # torch.dropout's and numpy's
    try:
        bound = found and found[0].bind(*node.args, **{names.get(key, key): value for key, value in node.kwargs.items()})
    except TypeError:
        return None
    if bound is None:
        return None
    bound.apply_defaults()
    return bound.arguments
