# SPDX-License-Identifier: Apache-2.0
"""Convolutions of a rewritten module that belong to no pair: in training they get the derivatives of `convpool.torch.gradients`.

Gradients of biases and second derivatives then take less time than PyTorch's.  The convolution itself stays PyTorch's, but in 16
bits with channels last and a bias on a GPU: PyTorch adds the bias in a pass of its own, and the library's plans do not.  Such a
plan computes a ReLU or LeakyReLU too that alone reads the convolution.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from convpool.options import DEFAULT_LIMITS
from convpool.torch import calls, gradients, kernels, plain
from convpool.torch.eager import pooled_conv_of, unwatched
from convpool.torch.rewrite.changes import changing
from convpool.torch.rewrite.layers import CONVS, as_in
from convpool.torch.rewrite.memory import has_hooks

IMAGE_CHANNELS = 16
"""Channels up to which the library's plans are faster than cuDNN, however large the layer is."""
PLAIN_MACS = DEFAULT_LIMITS.plain_macs
"""Multiply-adds up to which they are with more channels."""
LARGE_RESULT = 1 << 23
"""Numbers of a result from which on they save more of an eager step's time on the GPU than they cost on the host."""
_waiting: dict[tuple, bool] = {}
"""Kinds of calls for which it is known whether they wait for the host; those that do were made ready for a capture."""


def give_derivatives(root: nn.Module, graph: fx.Graph) -> None:
    """Let the graph's calls of convolutions be calls of `convolved`."""
    options = {"library": _has_library(), "image": next(iter(graph.nodes))}
    changed_by = changing(root, graph)
    for node in list(graph.nodes):
        if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            continue
        if _is_plain(root.get_submodule(str(node.target))):
            last, activation = _with_activation(root, node)
            if changed_by.get(last, set()) - set(_between(node, last)):  # a fused activation's derivative reads its result
                last, activation = node, (plain.NONE, 0.0)
            with graph.inserting_before(node):
                module = graph.create_node("get_attr", str(node.target))
                made = graph.call_function(convolved, (module, *node.args), options | {"activation": activation})
            _replace(graph, node, last, made)


def _has_library() -> bool:
    return torch.cuda.is_available() and kernels.library_is_there()


def run_by_library(graph: fx.Graph) -> None:
    """Let the library run convolutions of a graph that torch.compile captured, where it is faster."""
    if not _has_library():
        return
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.conv2d:
            names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
            _put_call(graph, node, dict(zip(names, node.args, strict=False)) | node.kwargs)


def _put_call(graph: fx.Graph, node: fx.Node, given: dict[str, Any]) -> None:
    x, weight, bias = (given.get(name) for name in ("input", "weight", "bias"))
    values: list[Any] = [item.meta.get("example_value") if isinstance(item, fx.Node) else None for item in (x, weight, bias)]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return
    options = [given.get(name, default) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))]
    if any(isinstance(option, str) for option in options) or values[0].dim() != 4:
        return
    strides, padding, dilations = ([option] * 2 if isinstance(option, int) else [*option] for option in options)
    if not _suits(values[0], values[1], tuple(strides), True):
        return
    last, activation = _with_activation(None, node)
    ones, zeros = [1, 1], [0] * 4
    geometry = (ones, ones, zeros, ones, strides, padding * 2, dilations, given.get("groups", 1), 0, 0.0, *activation)
    with graph.inserting_before(node):
        made = graph.call_function(torch.ops.convpool.pooled_conv, (x, weight, bias, None, None, None, *geometry))
    _replace(graph, node, last, made)


def _replace(graph: fx.Graph, node: fx.Node, last: fx.Node, made: fx.Node) -> None:
    """Put a node in the place of those from `node` to `last`, each the only reader of the one before."""
    made.meta.update(last.meta)
    last.replace_all_uses_with(made)
    for gone in [*_between(node, last)]:
        graph.erase_node(gone)


def _between(node: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """The nodes from `node` to `last`, each the only reader of the one before."""
    while last is not node:
        yield last
        last = last.all_input_nodes[0]
    yield node


def _is_plain(module: nn.Module) -> bool:
    if has_hooks(module) or not any(as_in(module, cls) for cls in CONVS):
        return False
    assert isinstance(module, nn.modules.conv._ConvNd)
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


def _with_activation(root: nn.Module | None, node: fx.Node) -> tuple[fx.Node, tuple[int, float]]:
    """The ReLU or LeakyReLU that alone reads a node, with its code and slope; the node itself and none where there is no such."""
    last = node
    while len(last.users) == 1:
        user = next(iter(last.users))
        if len(user.all_input_nodes) != 1:
            break
        if not _is_identity(root, user):
            found = _activation(root, user)
            return (user, found) if found is not None else (node, (plain.NONE, 0.0))
        last = user
    return node, (plain.NONE, 0.0)


def _is_identity(root: nn.Module | None, node: fx.Node) -> bool:
    if node.op != "call_module" or root is None:
        return False
    module = root.get_submodule(str(node.target))
    return as_in(module, nn.Identity) and not has_hooks(module)


def _activation(root: nn.Module | None, node: fx.Node) -> tuple[int, float] | None:
    """The code and slope of a node that is a ReLU or LeakyReLU."""
    slope: object = None
    if node.op == "call_module" and root is not None:
        module = root.get_submodule(str(node.target))
        if has_hooks(module):
            return None
        if as_in(module, nn.ReLU):
            return plain.RELU, 0.0
        slope = module.negative_slope if as_in(module, nn.LeakyReLU) else None
    elif node.op == "call_function" and node.target in (F.relu, torch.relu):
        return plain.RELU, 0.0
    elif node.op == "call_function" and node.target is F.leaky_relu:
        slope = node.args[1] if len(node.args) > 1 else node.kwargs.get("negative_slope", 0.01)
    # With another slope the result does not tell the sign of what it was made of.
    return (plain.LEAKY_RELU, slope) if isinstance(slope, float) and slope > 0 else None


def convolved(
    module: nn.modules.conv._ConvNd,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    activation: tuple[int, float] = (plain.NONE, 0.0),
    library: bool = True,
    image: Any = None,
) -> torch.Tensor:
    """activation(module(x)).  weight: the module's, where it has been read.  library: whether there is one.

    image: the network's input, if it has one; where that needs a gradient, second derivatives may follow.
    """
    weight, bias = module.weight if weight is None else weight, module.bias
    compiles = torch.compiler.is_compiling()
    library = library and bias is not None
    if torch.is_grad_enabled() and x.dim() == weight.dim() and (compiles or unwatched(x, weight, x.device.type)):
        if not compiles and _waits_for_host(module, x, weight, activation, library, image):
            pass
        elif library and _suits(x, weight, module.stride, compiles):
            return pooled_conv_of((x, weight, bias, None, None, None), _geometry(module, activation))
        elif not compiles and (x.requires_grad or weight.requires_grad or bias is not None and bias.requires_grad):
            convolution = (module.stride, module.padding, module.dilation, module.groups)
            return plain.activate(gradients.convolve(x, weight, convolution, bias), *activation)
    return plain.activate(module._conv_forward(x, weight, bias), *activation)


def _geometry(module: nn.modules.conv._ConvNd, activation: tuple[int, float]) -> tuple:
    """What `pooled_conv` takes behind its tensors."""
    ones, padding = (1,) * len(module.stride), tuple(module.padding)
    window = (ones, ones, (0,) * (2 * len(ones)), ones)
    return (*window, module.stride, padding * 2, module.dilation, module.groups, 0, 0.0, *activation, 0)


def _suits(x: torch.Tensor, weight: torch.Tensor, strides: tuple[int, ...], compiles: bool) -> bool:
    """Whether the library is faster than cuDNN.  torch.compile adds the bias in a pass that is there anyway."""
    if not x.is_cuda or x.dtype not in (torch.float16, torch.bfloat16) or plain.memory_format(x) != torch.channels_last:
        return False
    if x.dtype != weight.dtype or x.shape[1] != weight.shape[1]:
        return False
    products = weight.numel() * x.shape[0] * math.prod(x.shape[2:]) / math.prod(strides)
    return not compiles or x.shape[1] <= IMAGE_CHANNELS or products <= PLAIN_MACS


def _waits_for_host(
    module: nn.modules.conv._ConvNd,
    x: torch.Tensor,
    weight: torch.Tensor,
    activation: tuple[int, float],
    library: bool,
    image: Any,
) -> bool:
    """Whether an eager call's time is the host's: PyTorch's own convolution takes less of it.

    Such calls may be the warm-up before a capture, which goes the other way, and in which no plan can be made: so plans are made
    here.  Nor can cuDNN time its algorithms there: it must have seen convolutions of the same shapes and strides.
    """
    if not x.is_cuda or not isinstance(image, torch.Tensor) or image.requires_grad:
        return False
    if x.shape[0] * weight.shape[0] * math.prod(x.shape[2:]) // math.prod(module.stride) >= LARGE_RESULT:
        return False
    if torch.cuda.is_current_stream_capturing():
        return False
    convolution = (module.stride, module.padding, module.dilation, module.groups, activation)
    kind = (x.shape, x.stride(), x.dtype, x.device, weight.shape, weight.stride(), weight.dtype, library, convolution)
    waits = _waiting.get(kind)
    if waits is None:
        waits = len(_waiting) < calls.KEPT and not _has_two_orders(module, x, weight)
        if waits and library and _suits(x, weight, module.stride, False):
            kernels.prepare((x, weight, module.bias, None, None, None), _geometry(module, activation))
        if len(_waiting) < calls.KEPT:
            _waiting[kind] = waits
    return waits


def _has_two_orders(module: nn.modules.conv._ConvNd, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether input or result is contiguous and channels last at once: one channel, or one pixel.

    PyTorch's activations make such a result contiguous.  The library's plan, which computes them too, keeps the channels last.
    For cuDNN the convolution that reads it is then another one.
    """
    padding = tuple(module.padding)
    pixels = plain.pooled_size(x.shape[2:], weight.shape[2:], module.stride, padding * 2, module.dilation)
    return 1 in (x.shape[1], weight.shape[0], math.prod(x.shape[2:]), math.prod(pixels))
