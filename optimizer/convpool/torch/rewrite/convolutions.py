# SPDX-License-Identifier: Apache-2.0
"""Convolutions of a rewritten module that belong to no pair: in training they get the derivatives of `convpool.torch.gradients`.

Gradients of biases and second derivatives then take less time than PyTorch's.  The convolution itself stays PyTorch's, but in 16
bits with channels last and a bias on a GPU: PyTorch adds the bias in a pass of its own, and the library's plans do not.
"""

from __future__ import annotations

import torch
from torch import fx, nn

from convpool.torch import gradients, plain
from convpool.torch.eager import pooled_conv_of, unwatched
from convpool.torch.rewrite.capture import has_hooks
from convpool.torch.rewrite.layers import CONVS, as_in


def give_derivatives(root: nn.Module, graph: fx.Graph) -> None:
    """Let the graph's calls of convolutions be calls of `convolved`."""
    for node in list(graph.nodes):
        if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            continue
        if _is_plain(root.get_submodule(str(node.target))):
            with graph.inserting_before(node):
                module = graph.create_node("get_attr", str(node.target))
                made = graph.call_function(convolved, (module, *node.args))
            made.meta.update(node.meta)
            node.replace_all_uses_with(made)
            graph.erase_node(node)


def _is_plain(module: nn.Module) -> bool:
    if has_hooks(module) or not any(as_in(module, cls) for cls in CONVS):
        return False
    assert isinstance(module, nn.modules.conv._ConvNd)
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


def convolved(module: nn.modules.conv._ConvNd, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """module(x).  weight: the module's, where it has been read."""
    weight, bias = module.weight if weight is None else weight, module.bias
    if not torch.is_grad_enabled() or x.dim() != weight.dim() or not unwatched(x, weight, x.device.type):
        return module._conv_forward(x, weight, bias)
    strides, padding, dilations, groups = module.stride, module.padding, module.dilation, module.groups
    if bias is not None and x.is_cuda and x.element_size() == 2 and plain.memory_format(x) != torch.contiguous_format:
        ones = (1,) * len(strides)
        window, none = (ones, ones, (0,) * (2 * len(strides)), ones), (0, 0.0, 0, 0.0, 0)
        convolution = (strides, (*padding, *padding), dilations, groups)
        return pooled_conv_of((x, weight, bias, None, None, None), (*window, *convolution, *none))
    if x.requires_grad or weight.requires_grad or bias is not None and bias.requires_grad:
        return gradients.convolve(x, weight, (strides, padding, dilations, groups), bias)
    return module._conv_forward(x, weight, bias)
