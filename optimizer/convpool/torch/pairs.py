# SPDX-License-Identifier: Apache-2.0
"""convpool::pooled_conv and its derivatives: the operators of torch.library, and the shortest way to them for eager calls.

A call with derivatives is made of parts, each differentiable to any order.  A ReLU is computed with the pair, which is
Y = conv(Z, W) + b of the box means Z = box_mean(X).  Its backward makes Z again:

    dZ, dW, db = gradients of the small convolution at Z      (PyTorch's own operator: cuDNN)
    dX = box_mean_adjoint(dZ)

dX is linear in dY and W, and dW in dY and X, as Y is in X and W.  So three nodes are one another's derivatives, to any order:
the pair, its gradient at X and its gradient at W.  PyTorch's own second derivative of a convolution computes the weights' part as
a convolution with kernels as large as the images, many times slower.  That of a transposed convolution has no such part: so a
plain convolution has the gradient at X by one, without further nodes.

Forward is one call of the library, with derivatives or without, where it has a kernel.
"""

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from convpool.algebra.geometry import ConvSpec, Ints, PoolSpec, pool_first
from convpool.cuda.training import MAX_FILTER
from convpool.torch import deprecated, kernels, plain
from convpool.torch.plain import RELU, Geometry, Numbers

Convolution = tuple[Any, Any, Any, int]
"""Strides, padding, dilations and groups, as torch.convolution takes them."""
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""The gradients at input, weight and bias; None for those that are not asked for."""
LIBRARY = torch.library.Library("convpool", "DEF")
_WINDOW = "int[] pool_kernel, int[] pool_strides, int[] pool_pads, int[] pool_dilations"
_CONVOLUTION = "int[] strides, int[] pads, int[] dilations, int groups"
_BOX = "int[] kernel, int[] strides, int[] pads, int[] dilations"
LIBRARY.define(f"box_mean(Tensor x, {_BOX}) -> Tensor")
LIBRARY.define(f"box_mean_adjoint(Tensor grad, SymInt[] size, {_BOX}) -> Tensor")
LIBRARY.define(f"pooled_conv(Tensor x, Tensor weight, Tensor? bias, {_WINDOW}, {_CONVOLUTION}, bool relu) -> Tensor")
LIBRARY.define(
    f"pooled_conv_gradients(Tensor grad, Tensor x, Tensor weight, {_WINDOW}, {_CONVOLUTION}, "
    "bool of_input, bool of_weight, bool of_bias) -> (Tensor, Tensor, Tensor)"
)
for _name in ("box_mean", "box_mean_adjoint", "pooled_conv"):
    LIBRARY.impl(_name, getattr(plain, _name), "CompositeExplicitAutograd")
    LIBRARY.impl(_name, getattr(kernels, _name), "CUDA")
_ops = torch.ops.convpool
POOLED_CONV = _ops.pooled_conv
_TYPES = (Tensor, torch.nn.Parameter)


# ---- calls ----


def pooled_conv_of(tensors: tuple, geometry: Geometry) -> Tensor:
    """pooled_conv of x, weight and bias, and of the other arguments as tuples and numbers.

    PyTorch takes some 20 microseconds to bring a call from Python to an operator of torch.library and back to Python.  An eager
    call that nothing intercepts goes to the kernels at once.
    """
    x, weight = tensors[:2]
    if unwatched(x, weight, "cuda" if x.is_cuda else x.device.type):
        return _pair(*tensors, geometry, _run) if _needs_gradients(tensors) else _run(tensors, geometry)
    if is_exporting() or is_transformed(x):
        return plain.pooled_conv(*cast_for_autocast(tensors), *geometry)
    return _ops.pooled_conv(*tensors, *geometry)


def _needs_gradients(tensors: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])


def _run(tensors: Any, geometry: Geometry) -> Tensor:
    """The operator without derivatives."""
    (x, weight, bias), home = tensors, _home(tensors[0])
    if home is not None and type(weight) in _TYPES and (bias is None or type(bias) in _TYPES):  # kernels take addresses
        return home.pooled_conv(x, weight, bias, *geometry)
    with torch._C._AutoDispatchBelowAutograd():
        return _ops.pooled_conv(x, weight, bias, *geometry)


def _home(t: Tensor) -> Any:
    """The module whose functions a tensor's operators call at once, without derivatives; None where something looks on."""
    if type(t) not in _TYPES or torch._C._len_torch_dispatch_stack() or is_transformed(t):
        return None
    return kernels if t.is_cuda else plain


def unwatched(x: Any, weight: Any, device: str) -> bool:
    """Return True if the tensors are plain, and nothing intercepts operators.  device: "meta" if autocast does not matter."""
    c = torch._C
    if type(x) not in _TYPES or type(weight) not in _TYPES or torch.compiler.is_compiling() or c._len_torch_dispatch_stack():
        return False
    if c._len_torch_function_stack() or is_transformed(x) or c._get_tracing_state() is not None:
        return False
    return device == "meta" or not torch.is_autocast_enabled(device)


def is_exporting() -> bool:
    """Return True if torch.export follows the call."""
    # Not by torch.compiler.is_exporting(), which PyTorch 2.11 takes for true under torch.compile as well.
    return getattr(torch.compiler, "_is_exporting_flag", False)


def _with_autograd(*inputs: Any) -> Tensor:
    """The operator's implementation in front of PyTorch's autograd."""
    tensors, geometry = inputs[:3], kernels.frozen(inputs[3:])
    if not _needs_gradients(tensors):
        return _run(tensors, geometry)
    y = _pair(*tensors, (*geometry[:RELU], False), _run)
    return torch.relu(y) if geometry[RELU] else y  # a compiler sees PyTorch's


LIBRARY.impl("pooled_conv", _with_autograd, "Autograd")


def pooled_conv(*inputs: Any) -> Tensor:
    """torch.ops.convpool.pooled_conv, with the same arguments, also under torch.func's transforms."""
    if len(inputs) > 12:  # of 0.2: a number of the epilogue, a slope, perhaps an accumulation
        deprecated.warn("an epilogue of pooled_conv", "the last argument says whether a ReLU follows")
        y = pooled_conv(*inputs[:11], inputs[11] == 1)
        return torch.nn.functional.leaky_relu(y, inputs[12]) if inputs[11] == 2 else y
    return pooled_conv_of(inputs[:3], kernels.frozen(inputs[3:]))


def pair_of(conv: ConvSpec, pool: Ints, strides: Ints) -> Geometry:
    """The geometry of a pair without a ReLU."""
    return geometry_of(*pool_first.__wrapped__(conv, PoolSpec(pool, strides, (0, 0) * len(pool), (1,) * len(pool))))


def geometry_of(box: PoolSpec, conv: ConvSpec) -> Geometry:
    """The same, of the box means and the convolution behind them."""
    return (box.kernel_shape, box.strides, box.pads, box.dilations, conv.strides, conv.pads, conv.dilations, conv.group, False)


# ---- a pair, and its gradients ----


class _Pair(torch.autograd.Function):
    """A pair, or one with a ReLU.  run: what computes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, geometry: Geometry, run: Callable) -> Tensor:
        y = run((x, weight, bias), geometry)
        ctx.save_for_backward(x, weight, *([y] if geometry[RELU] else ()))
        ctx.are_tensors, ctx.geometry = (True, True, bias is not None), (*geometry[:RELU], False)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        x, weight, *rectified = ctx.saved_tensors
        grad = torch.ops.aten.threshold_backward(grads[0], rectified[0], 0) if rectified else grads[0]
        return *pair_gradients(grad, x, weight, ctx.geometry, wanted(ctx, ctx.are_tensors)), None, None


class _Gradient(torch.autograd.Function):
    """A pair's gradient at x (number 0), from the weight, or at the weight (1), from x.

    like: of the result's shape, type and memory order; its values do not matter."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, other: Tensor, like: Tensor, geometry: Geometry, number: int) -> Tensor:
        ctx.save_for_backward(grad, other)
        ctx.number, ctx.geometry = number, geometry
        x, weight = (other, like) if number else (like, other)
        found: Any = pair_gradients(grad, x, weight, geometry, (number == 0, number == 1, False))
        return found[number]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        (grad, other), (outer,), number, geometry = ctx.saved_tensors, grads, ctx.number, ctx.geometry
        needs, (x, weight) = wanted(ctx, (True, True)), (other, outer) if number else (outer, other)
        found, d_grad = side_by_side(
            grad,
            lambda: pair_gradients(grad, x, weight, geometry, (number == 1, number == 0, False)) if needs[1] else (None, None),
            lambda: pair_by_torch((x, weight, None), geometry) if needs[0] else None,
        )
        return d_grad, found[1 - number], None, None, None


# Without PyTorch's question for transforms, which has been answered.
_pair, _gradient = (super(torch.autograd.Function, function).apply for function in (_Pair, _Gradient))


def pair_gradients(grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, needs: Sequence[bool]) -> Gradients:
    """The gradients of a pair; differentiable."""
    records, is_single = torch.is_grad_enabled(), plain.is_single(*geometry[:3])
    if not is_transformed(grad):
        grad = grad.contiguous(memory_format=plain.result_format(x, weight))  # copied once for all who read it
    if isinstance(grad, FunctionalTensor) and not records:
        # AOTAutograd follows, for torch.compile.  A compiler fuses the bias's sums with what is around them; with those of few
        # channels they cost nothing.
        together = needs[1] and needs[2] and has_few_channels(weight, True)
        d_z, d_weight, d_bias = _ops.pooled_conv_gradients(grad, x, weight, *geometry[:RELU], needs[0], needs[1], together)
        d_x = d_z if is_single or not needs[0] else _fusible_adjoint(d_z, x, *geometry[:4])
        alone = channel_sums(grad) if needs[2] and not together else None
        return d_x if needs[0] else None, d_weight if needs[1] else None, d_bias if together else alone
    if records and type(grad) is Tensor and not any(map(is_transformed, (grad, x, weight))):  # for PyTorch's own autograd
        d_input = _gradient(grad, weight, x.detach(), geometry, 0) if needs[0] else None
        d_weight = _gradient(grad, x, weight.detach(), geometry, 1) if needs[1] else None
        return d_input, d_weight, channel_sums(grad) if needs[2] else None
    d_z, d_weight, d_bias = _at_means(grad, x, weight, geometry, needs)
    d_x = d_z if is_single or d_z is None else _boxes(grad).box_mean_adjoint(d_z, x.shape[2:], *geometry[:4])
    return d_x, d_weight, d_bias


def _at_means(grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, needs: Sequence[bool]) -> Gradients:
    """The gradients at the box means in place of the input, the weight and the bias."""
    window, (strides, pads, dilations, groups), rank = geometry[:4], geometry[4:8], x.dim() - 2
    z, even = x, pads[:rank] == pads[rank:]
    if not plain.is_single(*window[:3]):  # without the weight's gradient the shape and order alone count
        z = _boxes(x if is_transformed(x) else grad).box_mean(x, *window) if needs[1] else _empty_means(x, *window)
    if not even:
        z = F.pad(z, plain.torch_pads(pads))
    convolution = (strides, pads[:rank] if even else (0,) * rank, dilations, groups)
    d_z, d_weight, d_bias = of_convolution(grad, z, weight, convolution, needs)
    return d_z if d_z is None or even else F.pad(d_z, plain.torch_pads([-pad for pad in pads])), d_weight, d_bias


def _boxes(grad: Tensor) -> Any:
    """The box mean and its adjoint: operators, or their kernels at once where no derivatives are wanted and nothing looks on."""
    return plain if is_transformed(grad) else not torch.is_grad_enabled() and _home(grad) or _ops


def pair_by_torch(tensors: Any, geometry: Geometry) -> Tensor:
    """A pair in a backward pass, differentiable: the box means, then PyTorch's convolution."""
    return _by_torch(tensors, geometry) if any(map(is_transformed, tensors[:2])) else _pair(*tensors, geometry, _by_torch)


def _by_torch(tensors: Any, geometry: Geometry) -> Tensor:
    with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
        return plain.pooled_conv(*tensors, *geometry, mean=_boxes(tensors[0]).box_mean)


# ---- what the backward passes are made of ----

_LEAF = torch._C._functions.AccumulateGrad
_pass_of_parameters = -2
"""The last pass of torch.autograd.grad that was seen to ask for a parameter."""


def wanted(ctx: Any, are_tensors: Sequence[bool]) -> list[bool]:
    """Tell for each input of a node if this pass wants its gradient.  A gradient penalty's first pass wants no weights'."""
    edges = iter(ctx.next_functions)
    needs = []
    for number, (required, is_tensor) in enumerate(zip(ctx.needs_input_grad, are_tensors, strict=False)):
        node = next(edges)[0] if is_tensor else None
        needs.append(required and (node is None or _is_reached(node, number > 0)))
    return needs


def _is_reached(node: Any, is_parameter: bool) -> bool:
    """Return True if this pass runs a node.

    PyTorch answers by an exception, which takes as long as a launch of several kernels, for leaves that torch.autograd.grad was
    asked for.  One that asks for a parameter is taken to ask for all.  Not while a CUDA graph is captured: every replay would
    compute what nobody asked for, and cuDNN may not have seen it.
    """
    global _pass_of_parameters
    is_parameter = is_parameter and type(node) is _LEAF
    if is_parameter and torch._C._current_graph_task_id() == _pass_of_parameters and not _is_cuda_graph_captured():
        return True
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        if is_parameter:
            _pass_of_parameters = torch._C._current_graph_task_id()
        return True


def of_convolution(grad: Tensor, z: Tensor, weight: Tensor, convolution: Convolution, needs: Sequence[bool]) -> Gradients:
    """The gradients of a convolution, by one call where that is possible.

    Of what is not asked for, z or the weight, the shape, type and memory order count alone."""
    if needs[0] and (needs[1] or needs[2]) and is_in_cuda_graph(grad):
        found, d_z = side_by_side(
            grad,
            lambda: of_convolution(grad, z, weight, convolution, (False, *needs[1:]))[1:],
            lambda: of_convolution(grad, z, weight, convolution, (True, False, False))[0],
        )
        return d_z, *found
    few = None  # cuDNN is slower with images
    if needs[1] and has_few_channels(weight, needs[2]) and takes_kernels(grad) and not is_transformed(z):
        few = kernels.few_channels_gradients(grad, z, weight, convolution, needs[2])
    if few is not None:
        return of_convolution(grad, z, weight, convolution, (True, False, False))[0] if needs[0] else None, *few
    apart = needs[2] and _sums_by_product(grad)
    mask, (strides, padding, dilations, groups) = [needs[0], needs[1], needs[2] and not apart], convolution
    made: Sequence[Any] = (None, None, None)
    if any(mask):
        options = ([weight.shape[0]], strides, padding, dilations, False, [0] * len(strides), groups)
        made = torch.ops.aten.convolution_backward.default(grad, z, weight, *options, mask)
    d_z, d_weight, d_bias = (t if asked else None for t, asked in zip(made, mask, strict=True))
    return d_z, d_weight, channel_sums(grad) if apart else d_bias


def has_few_channels(weight: Tensor, bias: bool) -> bool:
    """Return True if the library may have a kernel for the gradients at weights like these, and at a bias."""
    return weight.numel() <= (MAX_FILTER - bias) * weight.shape[0]


def takes_kernels(t: Tensor) -> bool:
    """Return True if the library's kernels may run on a tensor at once: on the current GPU, and nothing intercepts operators."""
    return _home(t) is kernels and t.get_device() == torch.cuda.current_device()


MANY = 1 << 21
"""Numbers of a gradient from which on its columns are summed as a product; outside of a CUDA graph four times as many, as the
product takes the host 40 microseconds more."""
_products = threading.local()
"""A place for each thread that runs backward passes: `started` once it has multiplied matrices, so that cuBLAS is there."""
_sides: dict[Any, torch.cuda.Stream] = {}


def channel_sums(grad: Tensor) -> Tensor:
    """A bias's gradient: sums over all axes but the second, in float32, rounded once."""
    if not _sums_by_product(grad):
        return grad.sum([0, *range(2, grad.dim())])
    rows = grad.movedim(1, -1).flatten(0, -2)
    sums = torch.mm(rows.new_ones(1, len(rows)), rows, out_dtype=torch.float32)[0].to(grad.dtype)
    _products.started = True
    return sums


def _sums_by_product(grad: Tensor) -> bool:
    """Return True if a product with ones sums a gradient's columns: PyTorch's own sum of long ones in 16 bits is slow on a GPU.

    cuBLAS cannot start while a CUDA graph is captured: so a thread's first product is made as soon as there are MANY numbers.
    """
    if not grad.is_cuda or grad.element_size() != 2 or is_transformed(grad):
        return False
    started = getattr(_products, "started", False)
    least = 4 * MANY if started and not is_in_cuda_graph(grad) else MANY
    if type(grad) is not Tensor or torch.is_grad_enabled() or grad.numel() < least:
        return False
    if plain.memory_format(grad) == torch.contiguous_format or not started and _is_cuda_graph_captured():
        return False
    return not torch.are_deterministic_algorithms_enabled() and hasattr(torch.ops.aten.mm, "dtype")


def side_by_side(grad: Tensor, first: Callable[[], Sequence[Any]], second: Callable[[], Any]) -> tuple[Any, Any]:
    """Run both and return what they give; first: new tensors, or None for some.  The gradient's device is the current one.

    While a CUDA graph is captured they are two branches of it, which the GPU may run at the same time.
    """
    if not is_in_cuda_graph(grad):
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


def is_in_cuda_graph(grad: Tensor) -> bool:
    """Return True while a CUDA graph is captured, of a backward pass without derivatives of its own."""
    plain_tensor = type(grad) is Tensor and grad.is_cuda
    return plain_tensor and not torch.is_grad_enabled() and torch.cuda.is_current_stream_capturing()


def _is_cuda_graph_captured() -> bool:
    """Return True while a CUDA graph is captured, in a PyTorch without CUDA too."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_transformed(t: Tensor) -> bool:
    """Return True inside of torch.func's transforms and forward mode, and for several gradients in one (is_grads_batched=True).

    PyTorch's operators alone take what is there, and their derivatives alone are recorded."""
    if torch.compiler.is_compiling():
        return False
    active = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return active or torch._C._functorch.is_legacy_batchedtensor(t)


# ---- convolutions of no pair ----


def convolved(x: Tensor, weight: Tensor, bias: Any, *convolution: Any, cuda_graph: bool = False, relu: bool = False) -> Tensor:
    """A convolution with fast second derivatives, and a ReLU behind it.

    cuda_graph: in one, or before it, so that the library may add the bias and compute the ReLU."""
    if not unwatched(x, weight, x.device.type) or x.dim() != weight.dim():
        y = plain.CONVS[weight.dim() - 2](x, weight, bias, *convolution)  # which autocast knows on a CPU, too
    elif cuda_graph and bias is not None and suits(x, weight):
        return pooled_conv_of((x, weight, bias), (*plain.single(*convolution), relu))
    else:
        y = conv_with_derivatives(x, weight, bias, convolution)
    return torch.relu(y) if relu else y


def suits(x: Tensor, weight: Tensor) -> bool:
    """True where the library runs a convolution without the pass in which PyTorch adds a bias."""
    if x.dtype not in (torch.float16, torch.bfloat16) or x.dtype != weight.dtype or x.shape[1] != weight.shape[1]:
        return False
    return x.dim() == 4 and plain.memory_format(x) == torch.channels_last and kernels.library_is_there()


class _Conv(torch.autograd.Function):
    """A convolution whose gradients are PyTorch's operators, with derivatives that are such too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, convolution: Convolution) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.are_tensors, ctx.convolution = (True, True, bias is not None), convolution
        return plain.CONVS[x.dim() - 2](x, weight, bias, *convolution)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        (x, weight), convolution, needs = ctx.saved_tensors, ctx.convolution, wanted(ctx, ctx.are_tensors)
        given = grads[0], x, weight, convolution, needs
        if not torch.is_grad_enabled():
            return *of_convolution(*given), None
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return *recorded(*given), None


conv_with_derivatives = super(torch.autograd.Function, _Conv).apply
"""PyTorch's convolution of x, weight and bias, by a Convolution, with fast second derivatives.  Nothing intercepts operators."""


def recorded(grad: Tensor, x: Tensor, weight: Tensor, convolution: Convolution, needs: Sequence[bool]) -> Gradients:
    """`of_convolution` with derivatives: at the input a transposed convolution, whose derivatives are as fast as gradients."""
    (strides, padding, dilations, groups), d_x, d_weight = convolution, None, None
    if needs[0]:
        sizes = zip(x.shape[2:], grad.shape[2:], weight.shape[2:], strides, padding, dilations, strict=True)
        rest = [n - (m - 1) * s + 2 * p - d * (k - 1) - 1 for n, m, k, s, p, d in sizes]
        d_x = torch.convolution(grad, weight, None, strides, padding, dilations, True, rest, groups)
    if needs[1]:
        options = (None, strides, padding, dilations, False, [0] * len(strides), groups, [False, True, False])
        d_weight = torch.ops.aten.convolution_backward.default(grad, x, weight.detach(), *options)[1]
    return d_x, d_weight, channel_sums(grad) if needs[2] else None


# ---- autocast: as PyTorch's convolutions ----


def cast_for_autocast(values: Sequence[Any]) -> list[Any]:
    """The values, tensors of floats in autocast's type where it is on for the first one's device."""
    device = values[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return list(values)
    dtype = torch.get_autocast_dtype(device)
    lower = [isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 for t in values]
    return [value.to(dtype) if lowers else value for value, lowers in zip(values, lower, strict=True)]


def _autocast(*inputs: Any) -> Tensor:
    cast = cast_for_autocast(inputs)
    with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
        return _ops.pooled_conv(*cast)


AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
LIBRARY.impl("pooled_conv", _autocast, "AutocastCPU")
LIBRARY.impl("pooled_conv", _autocast, "AutocastCUDA")


# ---- box means: fake tensors and derivatives ----


def _new(like: Tensor, shape: Sequence[Any], found: torch.memory_format) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=found)


@torch.library.register_fake("convpool::box_mean", lib=LIBRARY)
def _empty_means(x: Tensor, *window: Numbers) -> Tensor:
    return _new(x, [*x.shape[:2], *plain.pooled_size(x.shape[2:], *window)], plain.memory_format(x))


@torch.library.register_fake("convpool::box_mean_adjoint", lib=LIBRARY)
def _fake_adjoint(grad: Tensor, size: Numbers, *window: Numbers) -> Tensor:
    return _new(grad, [*grad.shape[:2], *size], plain.memory_format(grad))


@torch.library.register_fake("convpool::pooled_conv", lib=LIBRARY)
def _fake_pooled_conv(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    sizes = plain.pooled_size(plain.pooled_size(x.shape[2:], *rest[1:5]), weight.shape[2:], *rest[5:8])
    return _new(x, [x.shape[0], weight.shape[0], *sizes], plain.result_format(x, weight))


@torch.library.register_fake("convpool::pooled_conv_gradients", lib=LIBRARY)
def _fake_gradients(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    (of_input, of_weight, of_bias), found = rest[8:], plain.result_format(x, weight)
    sizes = [*x.shape[:2], *plain.pooled_size(x.shape[2:], *rest[:4])]
    d_z = _new(grad, sizes, found) if of_input else grad.new_empty(0)
    d_weight = _new(grad, weight.shape, found) if of_weight else grad.new_empty(0)
    return d_z, d_weight, grad.new_empty(weight.shape[0] if of_bias else 0)


def _box_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.size, ctx.window = inputs[0].shape[2:], inputs[-4:]


def _box_mean_backward(ctx: Any, grad: Tensor) -> tuple:
    return _ops.box_mean_adjoint(grad, ctx.size, *ctx.window), *[None] * 4


def _adjoint_backward(ctx: Any, grad: Tensor) -> tuple:
    return _ops.box_mean(grad, *ctx.window), *[None] * 5


torch.library.register_autograd("convpool::box_mean", _box_mean_backward, setup_context=_box_context, lib=LIBRARY)
torch.library.register_autograd("convpool::box_mean_adjoint", _adjoint_backward, setup_context=_box_context, lib=LIBRARY)


# ---- what a compiler sees of a backward ----

MOST = 25
"""Positions of a window up to which its sums are written out."""


def _gradients_for_compilers(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The gradients at the box means, the weight and the bias; empty those that are not asked for.

    One operator for all: they are two branches of a CUDA graph then, whatever a compiler makes of what is around it."""
    with torch.no_grad():
        given = _at_means(grad, x, weight, (*map(tuple, rest[:7]), rest[7]), rest[8:])
    found = plain.result_format(x, weight)
    made = [grad.new_empty(0) if t is None else t for t in given]
    return tuple(t.contiguous(memory_format=found) if t.dim() > 1 else t for t in made)


LIBRARY.impl("pooled_conv_gradients", _gradients_for_compilers, "CompositeExplicitAutograd")


def _fusible_adjoint(grad: Tensor, x: Tensor, kernel: Numbers, strides: Numbers, pads: Numbers, dilations: Numbers) -> Tensor:
    """The box mean's adjoint of PyTorch's operators, which inductor fuses with what stands around them.

    A kernel of the library would read and write all of it once more.  With strides of 1 the adjoint is a mean over windows, too.
    Inductor's code for avg_pool2d_backward, which looks for the windows of each position, takes 42 microseconds where plain loads
    take 25 (64 images of 64x64, 64 channels).
    """
    if math.prod(kernel) <= MOST and all(d == 1 for d in dilations):
        if all(s == 1 for s in strides):
            return plain.box_mean_adjoint(grad, x.shape[2:], kernel, strides, pads, dilations)
        even = list(pads[:2]) == list(pads[2:]) and all(2 * p <= k for p, k in zip(pads, kernel, strict=False))
        if len(kernel) == 2 and even:
            return torch.ops.aten.avg_pool2d_backward(grad, x, kernel, strides, pads[:2], False, True, None)
    return _ops.box_mean_adjoint(grad, x.shape[2:], kernel, strides, pads, dilations)
