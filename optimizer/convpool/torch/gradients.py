# SPDX-License-Identifier: Apache-2.0
"""The gradients of a convolution, and what a backward pass has to know: what it is asked for, and who follows it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from convpool.cuda.weight_gradient import MAX_FILTER
from convpool.torch import kernels, plain

Geometry = tuple[Any, Any, Any, int]
"""Strides, padding, dilations and groups, as torch.convolution takes them."""


# ---- what the backward passes are made of ----

MANY = 1 << 21
"""Numbers of a gradient from which on its columns are summed as a product; outside of a capture four times as many, as the
product takes the host 40 microseconds more."""
_products = threading.local()
"""Of each thread that runs backward passes: `started` once it has multiplied matrices, and so cuBLAS is there."""
_sides: dict[Any, torch.cuda.Stream] = {}
_LEAF = torch._C._functions.AccumulateGrad


def wanted(ctx: Any, are_tensors: Sequence[bool]) -> list[bool]:
    """For each input of a node whether this pass wants its gradient.  A gradient penalty's first pass wants no weights'."""
    edges = iter(ctx.next_functions)
    needs = []
    for number, (required, is_tensor) in enumerate(zip(ctx.needs_input_grad, are_tensors, strict=False)):
        node = next(edges)[0] if is_tensor else None
        needs.append(required and (node is None or _runs(node, number > 0)))
    return needs


_pass_of_parameters = -2
"""The last pass of torch.autograd.grad that was seen to ask for a parameter."""


def _runs(node: Any, is_parameter: bool) -> bool:
    """Whether this pass runs a node.

    PyTorch answers by an exception, which takes as long as a launch of several kernels, for leaves that torch.autograd.grad was
    asked for.  One that asks for a parameter is taken to ask for all.  Not while a CUDA graph is captured: every replay would
    compute what nobody asked for, and cuDNN may not have seen it.
    """
    global _pass_of_parameters
    is_parameter = is_parameter and type(node) is _LEAF
    if is_parameter and torch._C._current_graph_task_id() == _pass_of_parameters and not _is_capturing():
        return True
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        if is_parameter:
            _pass_of_parameters = torch._C._current_graph_task_id()
        return True


def channel_sums(grad: torch.Tensor) -> torch.Tensor:
    """A bias's gradient: sums over all axes but the second, in float32, rounded once."""
    if not _sums_by_product(grad, MANY if is_captured(grad) else 4 * MANY):
        return grad.sum([0, *range(2, grad.dim())])
    rows = grad.movedim(1, -1).flatten(0, -2)
    sums = torch.mm(rows.new_ones(1, len(rows)), rows, out_dtype=torch.float32)[0].to(grad.dtype)
    _products.started = True
    return sums


def _sums_by_product(grad: torch.Tensor, least: int = MANY) -> bool:
    """Whether a product with ones sums the columns of a gradient: PyTorch's own sum of long ones in 16 bits is slow on a GPU.

    cuBLAS cannot start while a CUDA graph is captured: so a thread's first product is made as soon as there are MANY numbers.
    """
    if not grad.is_cuda or grad.element_size() != 2 or is_batched(grad) or plain.memory_format(grad) == torch.contiguous_format:
        return False
    started = getattr(_products, "started", False)
    if type(grad) is not torch.Tensor or torch.is_grad_enabled() or grad.numel() < (least if started else MANY):
        return False
    if not started and _is_capturing():
        return False
    return not torch.are_deterministic_algorithms_enabled() and hasattr(torch.ops.aten.mm, "dtype")


def _is_capturing() -> bool:
    """Whether a CUDA graph is captured, in a PyTorch without CUDA too."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_batched(grad: torch.Tensor) -> bool:
    """Whether a gradient is several, of torch.autograd.grad(is_grads_batched=True): operators alone take it."""
    return not torch.compiler.is_compiling() and torch._C._functorch.is_legacy_batchedtensor(grad)


def is_captured(grad: torch.Tensor) -> bool:
    """Whether a CUDA graph is captured, of a backward pass without derivatives of its own."""
    plain_tensor = type(grad) is torch.Tensor and grad.is_cuda
    return plain_tensor and not torch.is_grad_enabled() and torch.cuda.is_current_stream_capturing()


def side_by_side(grad: torch.Tensor, first: Callable[[], Sequence[Any]], second: Callable[[], Any]) -> tuple[Any, Any]:
    """What both give; first: new tensors, or None for some.  On the gradient's device, which is the current one.

    While a CUDA graph is captured they are two branches of it, which the GPU may run at the same time.
    """
    if not is_captured(grad):
        return first(), second()
    main = torch.cuda.current_stream()
    key = main.device, main.cuda_stream
    if key not in _sides:
        _sides[key] = torch.cuda.Stream(main.device)
    side = _sides[key]
    side.wait_stream(main)
    with torch.cuda.stream(side):
        made = first()
    other = second()
    main.wait_stream(side)
    for tensor in made:
        if tensor is not None:
            tensor.record_stream(main)  # it was allocated for the side stream
    return made, other


def has_few_channels(weight: torch.Tensor, bias: bool) -> bool:
    """Whether the library may have a kernel for the gradients at weights like these, and at a bias."""
    return weight.numel() <= (MAX_FILTER - bias) * weight.shape[0]


def is_plain(t: torch.Tensor) -> bool:
    """Return True if the library's kernels may run on a tensor at once: on the current GPU, and nothing intercepts operators."""
    if not t.is_cuda or type(t) not in (torch.Tensor, torch.nn.Parameter) or torch._C._len_torch_dispatch_stack():
        return False
    return not torch._C._are_functorch_transforms_active() and not is_batched(t) and t.get_device() == torch.cuda.current_device()


def of_convolution(
    grad: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, geometry: Geometry, needs: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients at input, weight and bias, None for those that are not asked for; by one call where that is possible.

    Of what is not asked for, z or the weight, the shape, type and memory order count alone."""
    captured = is_captured(grad)
    if captured and needs[0] and (needs[1] or needs[2]):
        found, d_z = side_by_side(
            grad,
            lambda: of_convolution(grad, z, weight, geometry, (False, *needs[1:]))[1:],
            lambda: of_convolution(grad, z, weight, geometry, (True, False, False))[0],
        )
        return d_z, *found
    few = None
    if needs[1] and has_few_channels(weight, needs[2]) and is_plain(grad):  # cuDNN takes several times as long for images
        few = kernels.few_channels_gradients(grad, z, weight, geometry, needs[2])
    if few is not None:
        return of_convolution(grad, z, weight, geometry, (True, False, False))[0] if needs[0] else None, *few
    apart = needs[2] and _sums_by_product(grad, MANY if captured else 4 * MANY)
    mask, (strides, padding, dilations, groups) = [needs[0], needs[1], needs[2] and not apart], geometry
    made: Sequence[Any] = (None, None, None)
    if any(mask):
        options = ([weight.shape[0]], strides, padding, dilations, False, [0] * len(strides), groups)
        made = torch.ops.aten.convolution_backward.default(grad, z, weight, *options, mask)
    d_z, d_weight, d_bias = (t if wanted else None for t, wanted in zip(made, mask, strict=True))
    return d_z, d_weight, channel_sums(grad) if apart else d_bias


def recorded(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry, needs: Sequence[bool]) -> tuple:
    """The same with derivatives: at the input a transposed convolution, whose derivatives are as fast as gradients."""
    (strides, padding, dilations, groups), d_x, d_weight = geometry, None, None
    if needs[0]:
        sizes = zip(x.shape[2:], grad.shape[2:], weight.shape[2:], strides, padding, dilations, strict=True)
        rest = [n - (m - 1) * s + 2 * p - d * (k - 1) - 1 for n, m, k, s, p, d in sizes]
        d_x = torch.convolution(grad, weight, None, strides, padding, dilations, True, rest, groups)
    if needs[1]:
        options = (None, strides, padding, dilations, False, [0] * len(strides), groups, [False, True, False])
        d_weight = torch.ops.aten.convolution_backward.default(grad, x, weight.detach(), *options)[1]
    return d_x, d_weight, channel_sums(grad) if needs[2] else None
