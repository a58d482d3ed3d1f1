# SPDX-License-Identifier: Apache-2.0
"""Box mean, its adjoint and the convolution of box means by PyTorch's own operators: on a CPU, and wherever the CUDA library is
not used.

float16 and bfloat16 are summed in float32.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convpool.algebra.geometry import Ints, same_pads
from convpool.errors import OptionError

Numbers = Sequence[int]
Sizes = int | Sequence[int]
Geometry = tuple[Any, ...]
"""The numbers of pooled_conv behind tensors: kernel, strides, pads, dilations of the pooling, [:4]; strides, pads, dilations and
groups of the convolution, [4:8]; a ReLU or none, [RELU].  Of an upsampled convolution `kernels` takes two: factors and pads."""
RELU = 8

CONVS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
HALF_TYPES = (torch.float16, torch.bfloat16)
POOLS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def sizes(name: str, value: Any, rank: int, least: int) -> Ints:
    """One number for every axis, or one for each; OptionError otherwise."""
    given = tuple(value) if isinstance(value, (tuple, list)) else (value,) * rank
    if len(given) == 1:
        given *= rank
    try:
        found = tuple(operator.index(v) for v in given)
    except TypeError:
        raise OptionError(f"{name}: no whole numbers; got {value!r}, expected one, or {rank}") from None
    if len(found) != rank or min(found) < least:
        raise OptionError(f"{name}: wrong numbers; got {value!r}, expected one, or {rank}, of at least {least}")
    return found


def conv_pads(padding: Any, kernel: Ints, strides: Ints, dilations: Ints) -> Ints:
    """Begins, then ends, of PyTorch's padding argument, a word included."""
    rank = len(kernel)
    if not isinstance(padding, str):
        return sizes("padding", padding, rank, 0) * 2
    if padding == "valid":
        return (0,) * (2 * rank)
    if padding != "same" or any(s != 1 for s in strides):
        raise OptionError(f"padding: got {padding!r} with strides {strides}, expected numbers, 'valid', or 'same' with stride 1")
    return same_pads("SAME_UPPER", kernel, strides, dilations, None)


def memory_format(x: Tensor) -> torch.memory_format:
    """How results of x lie in memory: channels last where x does, else contiguous.  Strides tell of one pixel or channel."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is None:
        return torch.contiguous_format
    try:
        if type(x) is not Tensor and any(type(n) is not int for n in (*x.shape, *x.stride())):
            # PyTorch 2.11 does not tell of symbols; their hints do
            x = torch.empty_strided(hints(x.shape), hints(x.stride()), device="meta")
        found = x.is_contiguous(memory_format=last) and (not x.is_contiguous() or x.stride(1) < x.stride(-2))
        return last if found else torch.contiguous_format
    except RuntimeError:  # vmap does not tell
        return torch.contiguous_format


def as_interpolated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x of 16 bits in the type that an interpolation gives: float32 under autocast on a GPU, which TorchDynamo does not know."""
    return x.to(torch.float32 if x.is_cuda and torch.is_autocast_enabled("cuda") else dtype)


def hints(sizes: Sequence[Any], keep: bool = False) -> list[Any]:
    """Sizes with numbers for symbols: those of the tensors that were traced, else 1.  keep: symbols of the former stay."""
    return [n if type(n) is int or keep and n.node.hint else n.node.hint or 1 for n in sizes]


def result_format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """How the convolution of x lies in memory: channels last where x or the weight does, as PyTorch's own."""
    found = memory_format(x)
    return memory_format(weight) if found == torch.contiguous_format else found


def laid_out(x: Tensor, found: torch.memory_format) -> Tensor:
    """The tensor in an order in memory, where that can be told: vmap has one order alone."""
    try:
        return x.contiguous(memory_format=found)
    except RuntimeError:
        return x.contiguous()


def pooled_size(size: Numbers, kernel: Numbers, strides: Numbers, pads: Numbers, dilations: Numbers) -> list[int]:
    """Sizes of the windows' means; pads: all begins, then all ends."""
    r = len(kernel)
    if len(size) != r:
        raise OptionError(f"input: wrong number of dimensions; got {len(size) + 2}, expected {r + 2}")
    return [(size[i] + pads[i] + pads[r + i] - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1 for i in range(r)]


def single(strides: Numbers, padding: Numbers, dilations: Numbers, groups: int) -> tuple:
    """A convolution, as PyTorch takes it, as a pair: windows of one value; all but the ReLU."""
    ones = (1,) * len(strides)
    return (ones, ones, (0, 0) * len(ones), ones, tuple(strides), tuple(padding) * 2, tuple(dilations), groups)


def is_single(kernel: Numbers, strides: Numbers, pads: Numbers) -> bool:
    """Return True if the means are the input itself."""
    return all(k == 1 for k in kernel) and all(s == 1 for s in strides) and not any(pads)


def is_deep_half(x: Any) -> bool:
    """Return True for 16 bits and three axes on a CPU, where PyTorch has no avg_pool3d."""
    return isinstance(x, Tensor) and x.dim() == 5 and x.dtype in HALF_TYPES and x.device.type == "cpu"


def pools_rightly(x: Any, kernel: Numbers, pads: Numbers, dilations: Numbers) -> bool:
    """Return True if PyTorch pools these windows.

    On a GPU its gradient leaves pads out channels last (PyTorch 2.11); avg_pool3d wants maps as large as windows without pads."""
    rank = len(kernel)
    even = list(pads[:rank]) == list(pads[rank:]) and all(2 * pad <= size for pad, size in zip(pads, kernel, strict=False))
    on_cpu = isinstance(x, Tensor) and x.device.type == "cpu"
    large = rank < 3 or on_cpu and all(type(n) is int and n >= k for n, k in zip(x.shape[2:], kernel, strict=False))
    return even and all(d == 1 for d in dilations) and (on_cpu and large or not any(pads)) and not is_deep_half(x)


def torch_pads(pads: Numbers) -> list[int]:
    """Begins and ends in F.pad's order: the last axis first."""
    r = len(pads) // 2
    return [pad for i in range(r - 1, -1, -1) for pad in (pads[i], pads[r + i])]


def box_mean(x: Tensor, kernel: Numbers, strides: Numbers, pads: Numbers, dilations: Numbers) -> Tensor:
    """Means over windows, padding counted.  x: [N, C, size...]."""
    rank, padding, pooled = len(kernel), pads[: len(kernel)], all(d == 1 for d in dilations)
    means = x.float() if is_deep_half(x) or not pooled and x.dtype in HALF_TYPES else x
    if not pools_rightly(means, kernel, pads, dilations):
        means, padding = F.pad(means, torch_pads(pads)) if any(pads) else means, [0] * rank
    if pooled:
        means = POOLS[rank](means, kernel, strides, padding, False, True)
    else:
        for axis, (p, s, d) in enumerate(zip(kernel, strides, dilations, strict=True), 2):
            means = means.unfold(axis, d * (p - 1) + 1, s)[..., ::d].sum(-1)
        means = means / math.prod(kernel)
    return laid_out(means.to(x.dtype), memory_format(x))


def box_mean_adjoint(grad: Tensor, size: Numbers, kernel: Numbers, strides: Numbers, pads: Numbers, dilations: Numbers) -> Tensor:
    """The adjoint of `box_mean` for inputs of `size`: a mean over windows too, of the gradient with zeros in between."""
    rank, spread = len(kernel), grad
    apart = all(s >= k for s, k in zip(strides, kernel, strict=True))  # else a CPU sums 16 bits in their type
    fits = rank == 2 and (apart or grad.dtype not in HALF_TYPES) and any(s != 1 for s in strides)
    if fits and 0 not in hints(grad.shape, True) and pools_rightly(grad, kernel, pads, dilations) and not grad.is_cuda:
        like = torch.empty([*grad.shape[:2], *size], dtype=grad.dtype, device=grad.device, memory_format=memory_format(grad))
        return torch.ops.aten.avg_pool2d_backward(grad, like, kernel, strides, pads[:2], False, True, None)
    if any(s != 1 for s in strides):
        spread = grad.new_zeros([*grad.shape[:2], *((n - 1) * s + 1 for n, s in zip(grad.shape[2:], strides, strict=True))])
        places = (..., *(slice(None, None, s) for s in strides))
        spread[places] = grad
    reach = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
    begins = [far - pad for far, pad in zip(reach, pads, strict=False)]
    ends = [size[i] + reach[i] - begins[i] - spread.shape[i + 2] for i in range(rank)]
    spread = F.pad(spread, torch_pads([*begins, *ends]))
    return laid_out(box_mean(spread, kernel, [1] * rank, [0] * 2 * rank, dilations), memory_format(grad))


def convolve(x: Tensor, weight: Tensor, bias: Any, strides: Numbers, pads: Numbers, dilations: Numbers, groups: int) -> Tensor:
    """PyTorch's convolution with pads for each side."""
    rank = len(strides)
    padding = list(pads[:rank])
    if padding != list(pads[rank:]):
        x, padding = F.pad(x, torch_pads(pads)), [0] * rank
    return CONVS[rank](x, weight, bias, strides, padding, dilations, groups)


def pooled_conv(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any, mean: Callable[..., Tensor] = box_mean) -> Tensor:
    """The operator convpool::pooled_conv: box mean by `mean`, then PyTorch's convolution."""
    z = x if is_single(*geometry[:3]) else mean(x, *geometry[:4])
    y = convolve(z, weight, bias, *geometry[4:8])
    return laid_out(torch.relu(y) if geometry[RELU] else y, result_format(x, weight))
