# SPDX-License-Identifier: Apache-2.0
"""The operators on NVIDIA GPUs, by the CUDA library on PyTorch's current stream.

Tensors of float16, bfloat16 and float32 run so.  Others, and all where the library is not installed, run by PyTorch's own
operators (`convpool.torch.plain`).  pooled_conv is one plan where the library has a kernel on tensor cores for it; else (groups,
three axes) it is the library's box mean, then cuDNN.

Calls are planned once for each kind: the way from tensors to a launch that every later call takes.  A kind is what a plan depends
on: shapes, strides and types of the tensors, their device, the geometry, and whether float32 may be multiplied in TF32.  The
`KEPT` kinds seen first are kept.

The fastest plan of a small layer reads the weights convolved with the pooling window.  Making those takes as long as the layer,
and they cannot be kept: no check of a tensor's version notices changes through `.data`, as moving averages are often written.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from convpool.algebra.parts import MAX_UPSAMPLE
from convpool.cuda import Plan, Problem, library, tactics, training
from convpool.errors import NotBuiltError
from convpool.torch import plain
from convpool.torch.plain import RELU, Geometry, Numbers

KEPT = 4096
NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
_NAMES = ("pool_kernel_shape", "pool_strides", "pool_pads", "pool_dilations", "strides", "pads", "dilations", "group")
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
Tensors = tuple[Tensor, Tensor, Any]
"""x, weight, bias."""
_fp32_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", None)  # what the attribute asks, in half the time
_NEW: Any = object()
_calls: dict[Any, Planned | None] = {}
_boxes: dict[Any, Callable | None] = {}
_weight_gradients: dict[Any, Callable | None] = {}


# ---- plans ----


def pooled_conv(*inputs: Any) -> Tensor:
    """`plain.pooled_conv` by one plan of the library; where it has none, by its box mean and PyTorch's convolution."""
    y = by_plan(inputs[:3], frozen(inputs[3:]))
    return plain.pooled_conv(*inputs, mean=box_mean) if y is None else y


def frozen(geometry: Sequence[Any]) -> Geometry:
    """A geometry from lists, hashable."""
    return (*map(tuple, geometry[:7]), *geometry[7:])


def by_plan(tensors: Sequence[Any], geometry: Geometry) -> Tensor | None:
    """A call by one plan of the library on x's device, or None; geometry: hashable."""
    if not library_is_there():
        return None
    device = tensors[0].get_device()
    if device != current_device():
        with torch.cuda.device(device):
            return by_plan(tensors, geometry)
    call = find(geometry, *tensors)
    return None if call is None else call(*tensors)


@functools.cache
def library_is_there() -> bool:
    """Return True if libconvpool.so is installed; LibraryError if it is, but of no use."""
    try:
        library.load()
    except NotBuiltError:
        return False
    return True


def find(geometry: Geometry, x: Tensor, weight: Tensor, bias: Any) -> Planned | None:
    """The call for these tensors, planned; None where the library has no kernel on tensor cores for it.

    geometry: hashable.  x's device is the current one."""
    of_bias = bias is None or (bias.shape, bias.stride(), bias.dtype, bias.device)
    of_weight, casts = (weight.shape, weight.stride(), weight.dtype, weight.device), x.dtype == torch.float32 and allows_tf32()
    key = (x.shape, x.stride(), x.dtype, x.device, of_weight, of_bias, geometry, casts)
    call = _calls.get(key, _NEW)
    if call is _NEW:
        made = Planned((x, weight, bias), geometry) if x.dtype in NAMES and _fits((x, weight, bias), geometry) else None
        call = _keep(_calls, key, made if made is not None and made.plan.tactic.family != "generic" else None)
    return call


def _keep(calls: dict, key: Any, made: Any) -> Any:
    """Return what was made for a kind of call, and keep it."""
    if len(calls) < KEPT:
        calls[key] = made
    return made


def allows_tf32() -> bool:
    """True where PyTorch multiplies float32 in TF32 in convolutions."""
    return _fp32_precision("cuda", "conv") == "tf32" if _fp32_precision is not None else torch.backends.cudnn.allow_tf32


def _fits(tensors: Tensors, geometry: Geometry) -> bool:
    """True where the library may be asked: PyTorch's operators refuse the rest, or do it."""
    x, weight, bias = tensors
    groups, rank = geometry[7] if len(geometry) > 2 else 1, x.dim() - 2
    if groups != 1 or not 1 <= rank <= 2 or 0 in x.shape or 0 in weight.shape or weight.shape[1:2] != x.shape[1:2]:
        return False
    if any(t is not None and (t.dtype != x.dtype or t.device != x.device) for t in (weight, bias)):
        return False
    if bias is not None and bias.shape != weight.shape[:1]:
        return False
    if len(geometry) == 2:  # an upsampled convolution's
        return max(geometry[0]) <= MAX_UPSAMPLE
    sizes = plain.pooled_size(x.shape[2:], *geometry[:4])
    return min(plain.pooled_size(sizes, weight.shape[2:], *geometry[4:7])) > 0


class Planned:
    """A kind of call, with its plan."""

    def __init__(self, tensors: Tensors, geometry: Geometry) -> None:
        x, weight, bias = tensors
        self.formats = plain.memory_format(x), plain.result_format(x, weight)
        problem = problem_of(tensors, geometry, *(found != torch.contiguous_format for found in self.formats))
        self.copies_weight = library_weight(weight).data_ptr() != weight.data_ptr()
        self.copies_others = not (x.is_contiguous(memory_format=self.formats[0]) and (bias is None or bias.is_contiguous()))
        self.plan = _fastest(problem)
        self.space, self.device = self.plan.workspace_bytes, x.device
        self.handle, self.launch = self.plan._handle, self.plan._launch
        shape = self.plan.y_shape
        if self.formats[1] != torch.contiguous_format:
            shape = (shape[0], shape[-1], *shape[1:-1])
        made = torch.empty(shape, device="meta", memory_format=self.formats[1])
        self.y_shape, self.y_strides = shape, made.stride()

    def __call__(self, x: Tensor, weight: Tensor, bias: Any) -> Tensor:
        """Queues the work on PyTorch's current stream of the current device, which is x's."""
        if self.copies_others:
            x, bias = x.contiguous(memory_format=self.formats[0]), None if bias is None else bias.contiguous()
        if self.copies_weight:
            weight = library_weight(weight)
        x_at, w_at, b_at = x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr()
        if (x_at | w_at | b_at) & 15:  # kernels read 16 bytes at a time; copies are aligned
            x, weight, bias = (t.clone() if t is not None and t.data_ptr() & 15 else t for t in (x, weight, bias))
            x_at, w_at, b_at = x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr()
        y = torch.empty_strided(self.y_shape, self.y_strides, dtype=x.dtype, device=self.device)
        s_at = 0
        if self.space:
            space = torch.empty(self.space, dtype=torch.uint8, device=self.device)
            s_at = space.data_ptr()
        given = library.PACK_TENSORS(library.TENSORS_BYTES, 0, x_at, w_at, b_at, 0, y.data_ptr(), s_at, self.space, 0, 0, 0, 0, 0)
        library.check(self.launch(self.handle, given, raw_stream(self.device.index)))
        return y


def problem_of(tensors: Tensors, geometry: Geometry, x_last: bool, y_last: bool) -> Problem:
    x, weight, bias = tensors
    common: dict[str, Any] = {"n": x.shape[0], "c": x.shape[1], "m": weight.shape[0], "spatial": tuple(x.shape[2:])}
    common |= {"kernel_shape": tuple(weight.shape[2:]), "dtype": NAMES[x.dtype], "bias": bias is not None}
    layout, y_layout = ("channels_last" if last else "channels_first" for last in (x_last, y_last))
    common |= {"layout": layout, "y_layout": y_layout, "allow_tf32": allows_tf32()}
    if len(geometry) == 2:  # an upsampled convolution's
        return Problem(**common, pool_kernel_shape=1, upsample=geometry[0], pads=geometry[1])
    return Problem(**common, activation="relu" if geometry[RELU] else None, **dict(zip(_NAMES, geometry, strict=False)))


def _fastest(problem: Problem) -> Plan:
    """The plan for weights that may be others in every call: what transforms them is launched each time.

    Such a launch takes some 3 microseconds and writes 1 MB in another, on an H200.  The cost rule names the fastest tactic that
    reads the weights as they are.
    """
    plan = Plan(problem)
    if not plan.prepared_bytes:
        return plan
    allowed = plan.expected_us + 3 + plan.prepared_bytes / 2**20
    for tactic in tactics():
        if tactic.family != "generic" and problem.why_not(tactic) is None:
            other = Plan(problem, tactic=tactic)
            if not other.prepared_bytes and other.expected_us < allowed:
                plan, allowed = other, other.expected_us
    return plan


def library_weight(weight: Tensor) -> Tensor:
    """[M, kernel..., C/groups] in memory."""
    if weight.dim() == 4:
        return weight.contiguous(memory_format=torch.channels_last)
    return weight.movedim(1, -1).contiguous()


# ---- box means, blocks and weights ----


def box_mean(x: Tensor, *window: Numbers) -> Tensor:
    """The result of `plain.box_mean`, by one kernel of the library."""
    found = _box(False, x, x.shape[2:], window)
    return plain.box_mean(x, *window) if found is None else found(x)


def box_mean_adjoint(grad: Tensor, size: Numbers, *window: Numbers) -> Tensor:
    """The result of `plain.box_mean_adjoint`, by one kernel of the library."""
    found = _box(True, grad, size, window)
    return plain.box_mean_adjoint(grad, size, *window) if found is None else found(grad)


def _box(adjoint: bool, x: Tensor, size: Numbers, window: tuple, sums: bool = False) -> Callable | None:
    """The call for these tensors, None where PyTorch's operators run; size: of the input of the box mean."""
    size, window = tuple(size), tuple(map(tuple, window))
    key = (adjoint, x.shape, x.stride(), x.dtype, size, window, sums)
    found = _boxes.get(key, _NEW)
    if found is _NEW:
        runs = x.dtype in NAMES and 0 not in x.shape and library_is_there() and min(plain.pooled_size(size, *window)) > 0
        found = _keep(_boxes, key, _boxed(adjoint, x, size, window, sums) if runs else None)
    return found


def _boxed(adjoint: bool, x: Any, size: Numbers, window: tuple[Numbers, ...], sums: bool) -> Callable:
    """box_mean, or its adjoint, of tensors of one kind: shapes, strides, type, and the window; or of sums in place of means."""
    order, full = plain.memory_format(x), (*x.shape[:2], *size)
    shape = full if adjoint else (*x.shape[:2], *plain.pooled_size(size, *window))
    strides = torch.empty(shape, device="meta", memory_format=order).stride()
    problem = training.box_problem(NAMES[x.dtype], order != torch.contiguous_format, full, *window, sums=sums)
    launch = training.function("box_mean_adjoint" if adjoint else "box_mean")
    copies = not x.is_contiguous(memory_format=order)

    def run(x: Tensor) -> Tensor:
        device = x.get_device()
        if device != current_device():
            with torch.cuda.device(device):
                return run(x)
        if copies:
            x = x.contiguous(memory_format=order)
        out = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
        library.check(launch(problem, x.data_ptr(), 0, out.data_ptr(), raw_stream(device)))
        return out

    return run


def blocks(x: Tensor, scales: Numbers, sums: bool) -> Tensor | None:
    """Each value repeated over a block of `scales`, or the sums over blocks; None where the library has no kernel."""
    if x.dtype not in NAMES or not library_is_there() or not training.has("turn_weights"):  # a library of that version
        return None
    size = x.shape[2:] if sums else [n * scale for n, scale in zip(x.shape[2:], scales, strict=True)]
    found = _box(not sums, x, size, (scales, scales, (0, 0) * len(scales), (1,) * len(scales)), True)
    return None if found is None else found(x)


def few_channels_gradients(
    grad: Tensor, z: Tensor, weight: Tensor, convolution: tuple, bias: bool
) -> tuple[Tensor, Tensor | None] | None:
    """The gradients at the weights and, where wanted, the bias, from the convolution's input z, with the channels last.

    None where the library has no kernel.  convolution: as torch.convolution takes it.  The tensors are on the current device.
    """
    convolution = (*map(tuple, convolution[:3]), convolution[3])
    key = (grad.shape, grad.stride(), grad.dtype, z.shape, z.dtype, weight.shape, weight.dtype, convolution)
    found = _weight_gradients.get(key, _NEW)
    if found is _NEW:
        found = _keep(_weight_gradients, key, _weight_gradient(grad, z, weight, convolution))
    return None if found is None or grad.data_ptr() & 15 else found(grad, z, bias)


def _weight_gradient(grad: Tensor, z: Tensor, weight: Tensor, convolution: tuple) -> Callable | None:
    """The call for tensors of one kind: of the gradient, the convolution's input, and whether the bias's is wanted."""
    last, groups, shape = torch.channels_last, convolution[3], tuple(weight.shape)
    if z.dim() != 4 or groups != 1 or 0 in grad.shape or 0 in z.shape or not library_is_there():
        return None
    if not grad.dtype == z.dtype == weight.dtype or z.dtype not in (torch.float16, torch.bfloat16):
        return None
    if not grad.is_contiguous(memory_format=last) or torch.cuda.get_device_capability(z.device) < (8, 0):
        return None
    problem = problem_of((z, weight, None), (*plain.single(*convolution), False), True, True)
    space_bytes, packed, launch = training.gradient_bytes(problem), bytes(problem.struct), training.function("weight_gradient")
    if space_bytes is None:
        return None

    def run(grad: Tensor, z: Tensor, bias: bool) -> tuple[Tensor, Tensor | None]:
        z, d_bias = z.contiguous(memory_format=last), z.new_empty(shape[0]) if bias else None
        out = torch.empty(shape, dtype=z.dtype, device=z.device, memory_format=last)
        space = torch.empty(space_bytes, dtype=torch.uint8, device=z.device)
        at = grad.data_ptr(), z.data_ptr(), out.data_ptr(), 0 if d_bias is None else d_bias.data_ptr(), space.data_ptr()
        library.check(launch(packed, *at, space_bytes, raw_stream(z.device.index)))
        return out, d_bias

    return run


def turned(weight: Tensor, factor: float) -> Tensor | None:
    """Weights [M, C, kernel] with the channels last as [C, M, kernel], turned round and times a factor.

    None where the library has no kernel.  The weight is on the current device."""
    if weight.dim() != 4 or weight.dtype not in NAMES or not weight.is_contiguous(memory_format=torch.channels_last):
        return None
    (m, c, *kernel), dtype = weight.shape, library.DTYPES[NAMES[weight.dtype]]
    sizes = m, c, math.prod(kernel)
    if min(sizes) < 1 or max(sizes) > training.MOST_TURNED or not library_is_there() or not training.has("turn_weights"):
        return None
    out = torch.empty((c, m, *kernel), dtype=weight.dtype, device=weight.device, memory_format=torch.channels_last)
    turn = training.function("turn_weights")
    library.check(turn(weight.data_ptr(), out.data_ptr(), *sizes, dtype, factor, raw_stream(weight.get_device())))
    return out
