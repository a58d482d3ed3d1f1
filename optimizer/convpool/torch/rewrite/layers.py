# SPDX-License-Identifier: Apache-2.0
"""Modules of torch.nn as operators of ONNX, for the passes; see `convpool.torch.rewrite.kinds`.

A module counts as one of torch.nn's where its forward is that one's: also a subclass, or with parametrizations.  Its parameters
are named, not read: reading a normalised weight would already change what the module keeps.  A module whose own work a rewrite
would skip is pinned: one with hooks, but for those of torch.nn.utils that compute a weight, and a quantized convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from onnx import helper
from torch import fx, nn

from convpool.algebra.geometry import Refusal, refuse
from convpool.torch.rewrite.kinds import Arguments, Translated, adaptive_average, average, convolution, dropout, plain
from convpool.torch.rewrite.memory import HOOKS, WEIGHT_HOOKS, has_hooks
from convpool.torch.rewrite.skeleton import DOMAIN, Skeleton, Source

CONVS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
QUANTIZED = ("torch.ao.", "torch.nn.quantized", "torch.nn.qat", "torch.nn.intrinsic")


def computing_hooks(module: nn.Module, name: str) -> list[Callable]:
    """The old-style hooks that compute the tensor `name` of a module before each call."""
    found = module.__dict__.get("_forward_pre_hooks", {}).values()
    return [hook for hook in found if isinstance(hook, WEIGHT_HOOKS) and hook.name == name]


def own_work(module: nn.Module) -> Refusal | None:
    """What a call of the module does besides its forward."""
    others = []
    for kind in HOOKS:
        for hook in (module.__dict__.get(kind) or {}).values():
            if not isinstance(hook, WEIGHT_HOOKS) or not hasattr(module, "weight"):
                others.append(getattr(hook, "__name__", type(hook).__name__))
    return refuse("hooks of the module", ", ".join(others), "none") if others else None


def as_in(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Whether the module computes what torch.nn's class does."""
    names = ("forward", "_conv_forward")
    if not isinstance(module, cls) or any(name in module.__dict__ for name in names):
        return False
    return all(getattr(type(module), name, None) is getattr(cls, name, None) for name in names)


def _type(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters()), torch.float32)


def _conv(s: Skeleton, label: str, node: fx.Node, module: nn.Module, x: fx.Node) -> Translated:
    assert isinstance(module, nn.modules.conv._ConvNd)
    path, kernel, dtype = str(node.target), tuple(module.kernel_size), _type(module)
    m, c = module.out_channels, module.in_channels // module.groups
    hooked = bool(computing_hooks(module, "weight"))
    weight = s.source(Source(path, "weight", hooked), (m, c, *kernel), dtype)
    bias = s.source(Source(path, "bias", bool(computing_hooks(module, "bias"))), (m,), dtype) if _has_bias(module) else None
    options = {"stride": module.stride, "padding": module.padding, "dilation": module.dilation, "groups": module.groups}
    if module.padding_mode == "zeros":
        return convolution(s, label, node, {"input": x, **options}, weight, bias, kernel)
    pads = tuple(module._reversed_padding_repeated_twice)
    found = convolution(s, label, node, {"input": x, **options, "padding": 0}, weight, bias, kernel)
    if found is None or s.shape(x) is None:
        return None
    padded = f"{node.name}/padded"
    s.derived[padded] = (F.pad, x, pads, module.padding_mode)
    found[0].input[0] = padded
    return [helper.make_node("Pad" + module.padding_mode, [x.name], [padded], domain=DOMAIN), *found]


def _has_bias(module: nn.Module) -> bool:
    if "bias" in module._parameters:
        return module._parameters["bias"] is not None
    return True  # parametrized, or computed by a hook


def _quantized_conv(s: Skeleton, label: str, node: fx.Node, module: nn.Module, x: fx.Node) -> Translated:
    """A convolution that rounds: the passes may see it, not move it."""
    kernel = module.kernel_size
    shape = (module.out_channels, module.in_channels // module.groups, *kernel)
    s.pin(label, refuse("module", f"{type(module).__module__}.{type(module).__name__}", "a convolution of torch.nn"))
    weight = s.source(Source(str(node.target), "weight"), shape, torch.float32)
    values: dict[str, Any] = dict(kernel_shape=kernel, strides=module.stride, dilations=module.dilation, group=module.groups)
    return [helper.make_node("Conv", [x.name, weight], [node.name], **values)]


def _batch_norm(s: Skeleton, label: str, node: fx.Node, module: nn.Module, x: fx.Node) -> Translated:
    assert isinstance(module, nn.modules.batchnorm._BatchNorm)
    own = module.running_mean is None or module.running_var is None
    names = []
    for name in ("weight", "bias", "running_mean", "running_var"):
        if getattr(module, name, None) is None:
            names.append(s.number([float(name in ("weight", "running_var"))] * module.num_features, "float32"))
        else:
            names.append(s.source(Source(str(node.target), name), (module.num_features,), torch.float32))
    values: dict[str, Any] = dict(epsilon=float(module.eps), training_mode=int(module.training or own))
    return [helper.make_node("BatchNormalization", [x.name, *names], [node.name], **values)]


def _normalization(s: Skeleton, label: str, node: fx.Node, module: nn.Module, x: fx.Node) -> Translated:
    shape = s.shape(x)
    if shape is None or len(shape) < 3 or not isinstance(shape[1], int):
        return None
    names = [x.name, s.number([1.0] * shape[1], "float32"), s.number([0.0] * shape[1], "float32")]
    if isinstance(module, nn.GroupNorm):
        return [helper.make_node("GroupNormalization", names, [node.name], num_groups=module.num_groups)]
    return [helper.make_node("InstanceNormalization", names, [node.name])]


def _zero_pad(s: Skeleton, label: str, node: fx.Node, module: nn.Module, x: fx.Node) -> Translated:
    assert isinstance(module, nn.modules.padding._ConstantPadNd)
    pads, rank = module.padding, len(module.padding) // 2
    names = [
        x.name,
        s.number([*pads[::2], *pads[1::2]]),
        s.scalar(module.value, x),
        s.number([rank + 1 - i for i in range(rank)]),
    ]
    return [helper.make_node("Pad", names, [node.name], mode="constant")]


def _with(translate: Callable, *names: str) -> Callable:
    """A function's translation, with its arguments read from attributes of the module, as attribute or argument=attribute."""

    def of_module(s: Skeleton, label: str, node: fx.Node, module: nn.Module, x: fx.Node) -> Translated:
        given: Arguments = {"input": x}
        for name in names:
            argument, _, attribute = name.partition("=")
            given[argument] = getattr(module, attribute or argument)
        return translate(s, label, node, given)

    return of_module


_POOL = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
_DROPOUT = _with(dropout, "p", "training")
MODULES: dict[type[nn.Module], Callable] = {
    **dict.fromkeys(CONVS, _conv),
    nn.AvgPool1d: _with(average(1), *_POOL),
    nn.AvgPool2d: _with(average(2), *_POOL, "divisor_override"),
    nn.AvgPool3d: _with(average(3), *_POOL, "divisor_override"),
    nn.AdaptiveAvgPool1d: _with(adaptive_average(1), "output_size"),
    nn.AdaptiveAvgPool2d: _with(adaptive_average(2), "output_size"),
    nn.AdaptiveAvgPool3d: _with(adaptive_average(3), "output_size"),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.GroupNorm), _normalization),
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout), _DROPOUT),
    **dict.fromkeys((nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d), _zero_pad),
    **dict.fromkeys((nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d), _zero_pad),
    nn.Identity: _with(plain("Identity")),
    nn.ReLU: _with(plain("Relu")),
    nn.LeakyReLU: _with(plain("LeakyRelu", "negative_slope=alpha"), "negative_slope"),
    nn.Sigmoid: _with(plain("Sigmoid")),
    nn.Tanh: _with(plain("Tanh")),
    nn.ELU: _with(plain("Elu")),
    nn.SELU: _with(plain("Selu")),
    nn.GELU: _with(plain("Gelu")),
    nn.Hardswish: _with(plain("HardSwish")),
    nn.Mish: _with(plain("Mish")),
    nn.Softplus: _with(plain("Softplus")),
    nn.Softsign: _with(plain("Softsign")),
}
"""How a module is translated, by the class of torch.nn whose forward it has."""


def translate_module(s: Skeleton, label: str, node: fx.Node) -> Translated:
    """The nodes of a module's call, None where there are none."""
    module = s.module(node)
    x = node.args[0] if len(node.args) == 1 and not node.kwargs else node.kwargs.get("input") if len(node.kwargs) == 1 else None
    if not isinstance(x, fx.Node):
        return None
    known = next((cls for cls in type(module).__mro__ if cls in MODULES and as_in(module, cls)), None)
    if known is not None:
        found = MODULES[known](s, label, node, module, x)
        s.pin(label, own_work(module) if has_hooks(module) else None)
        return found
    name = type(module).__name__
    if type(module).__module__.startswith(QUANTIZED) and "Conv" in name and "Transpose" not in name:
        return _quantized_conv(s, label, node, module, x)
    return None
