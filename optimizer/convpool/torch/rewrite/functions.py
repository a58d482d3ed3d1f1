# SPDX-License-Identifier: Apache-2.0
"""PyTorch's functions and methods for the passes: a line for each, with its parameters and its translation."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from convpool.torch.rewrite import kinds, views
from convpool.torch.rewrite.kinds import Translated
from convpool.torch.rewrite.skeleton import Skeleton


def signature(text: str) -> inspect.Signature:
    """The parameters that a line of Python describes."""
    space: dict[str, Any] = {}
    exec(f"def function({text}): pass", space)
    return inspect.signature(space["function"])


X = "input, inplace=False"
BINARY = "input, other, *, alpha=1, rounding_mode=None, out=None"
_LINES: list[tuple[str, Callable, tuple[Any, ...]]] = [
    *(
        (f"{X.split(',')[0]}, weight, bias=None, stride=1, padding=0, dilation=1, groups=1", kinds.conv(r), functions)
        for r, functions in ((1, (F.conv1d,)), (2, (F.conv2d,)), (3, (F.conv3d,)))
    ),
    ("input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True", kinds.average(1), (F.avg_pool1d,)),
    *(
        (
            "input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None",
            kinds.average(r),
            (function,),
        )
        for r, function in ((2, F.avg_pool2d), (3, F.avg_pool3d))
    ),
    *(
        ("input, output_size", kinds.adaptive_average(r), functions)
        for r, functions in (
            (1, (F.adaptive_avg_pool1d, torch.adaptive_avg_pool1d)),
            (2, (F.adaptive_avg_pool2d, torch._C._nn.adaptive_avg_pool2d)),
            (3, (F.adaptive_avg_pool3d, torch._C._nn.adaptive_avg_pool3d)),
        )
    ),
    (X, kinds.plain("Relu"), (F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_")),
    (
        "input, negative_slope=0.01, inplace=False",
        kinds.plain("LeakyRelu", "negative_slope=alpha"),
        (F.leaky_relu, F.leaky_relu_),
    ),
    (X, kinds.plain("Sigmoid"), (F.sigmoid, torch.sigmoid, "sigmoid", "sigmoid_")),
    (X, kinds.plain("Tanh"), (F.tanh, torch.tanh, "tanh", "tanh_")),
    ("input, alpha=1.0, inplace=False", kinds.plain("Elu"), (F.elu,)),
    (X, kinds.plain("Selu"), (F.selu,)),
    (X, kinds.plain("HardSwish"), (F.hardswish,)),
    (X, kinds.plain("Mish"), (F.mish,)),
    ("input, *, approximate='none'", kinds.plain("Gelu"), (F.gelu,)),
    ("input, beta=1, threshold=20", kinds.plain("Softplus"), (F.softplus,)),
    ("input", kinds.plain("Abs"), (torch.abs, "abs")),
    ("input", kinds.plain("Neg"), (torch.neg, operator.neg, "neg")),
    ("input", kinds.plain("Exp"), (torch.exp, "exp")),
    ("input", kinds.plain("Sqrt"), (torch.sqrt, "sqrt")),
    (
        "input, p=0.5, training=True, inplace=False",
        kinds.dropout,
        (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, torch.dropout),
    ),
    (
        "input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5",
        kinds.batch_norm,
        (F.batch_norm,),
    ),
    (BINARY, kinds.binary("Add"), (torch.add, operator.add, operator.iadd, "add", "add_")),
    (BINARY, kinds.binary("Sub"), (torch.sub, operator.sub, operator.isub, "sub", "sub_")),
    (BINARY, kinds.binary("Mul"), (torch.mul, operator.mul, operator.imul, "mul", "mul_")),
    (
        BINARY,
        kinds.binary("Div"),
        (torch.div, torch.true_divide, operator.truediv, operator.itruediv, "div", "div_"),
    ),
    ("tensors, dim=0", kinds.cat, (torch.cat, torch.concat, torch.concatenate)),
    ("tensors, dim=0", kinds.stack, (torch.stack,)),
    ("input, pad, mode='constant', value=None", kinds.pad, (F.pad,)),
    (
        "input, size=None, scale_factor=None, mode='nearest', align_corners=None, recompute_scale_factor=None, antialias=False",
        kinds.interpolate,
        (F.interpolate,),
    ),
    ("input, other", views.getitem, (operator.getitem,)),
    ("input, dim=None, keepdim=False, dtype=None", views.reduction("ReduceMean"), (torch.mean, "mean")),
    ("input, dim=None, keepdim=False, dtype=None", views.reduction("ReduceSum"), (torch.sum, "sum")),
    ("input, *sizes, **others", views.reshape, (torch.reshape, torch.flatten, torch.unflatten)),
    ("input, *sizes, **others", views.reshape, ("reshape", "view", "flatten", "unflatten")),
    ("input, *dims", views.permute, (torch.permute, "permute")),
    ("input, dim0, dim1", views.transpose, (torch.transpose, torch.swapaxes, "transpose", "swapaxes")),
    ("input, downscale_factor", views.pixel_unshuffle, (F.pixel_unshuffle, torch.pixel_unshuffle)),
]
FUNCTIONS = {function: (signature(text), translate) for text, translate, functions in _LINES for function in functions}
"""How a function, or a method by its name, is bound and translated."""

NUMBERS = ("eps", "value", "scale_factor", "ceil_mode", "divisor_override")
"""Arguments that a translation reads; torch.compile may leave them open."""


def translate_call(s: Skeleton, label: str, node: fx.Node) -> Translated:
    """The nodes of a function or method, None where there are none."""
    found = FUNCTIONS.get(node.target)
    if found is None:
        return None
    parameters, translate = found
    try:
        bound = parameters.bind(*node.args, **_renamed(node.kwargs))
    except TypeError:
        return None
    bound.apply_defaults()
    if "input" in bound.arguments and not isinstance(bound.arguments["input"], (fx.Node, int, float)):
        return None
    if any(isinstance(bound.arguments.get(name), fx.Node) for name in NUMBERS):
        return None
    return translate(s, label, node, bound.arguments)


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords by one name: torch.dropout's and numpy's differ."""
    names = {"train": "training", "axis": "dim", "self": "input"}
    return {names.get(key, key): value for key, value in kwargs.items()}
