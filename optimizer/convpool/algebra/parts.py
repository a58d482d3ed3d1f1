# SPDX-License-Identifier: Apache-2.0
"""The parts of a node of the operators beside a convolution and the pooling or upsampling in front of it: a prologue, a
residual, an activation.

    [Affine | Modulated | Normalized][Relu | LeakyRelu | Silu]
    (ConvAvgPool | UpsampleConv)[Add][Relu | LeakyRelu | Tanh | Sigmoid | Silu]

Every combination is a fused variant, named after what it does in the order in which it does it.  LAYOUTS numbers
where the channels of its tensors stand: behind the batch, as in ONNX's Conv, or last, as the kernels read them.

An Affine is a map per channel, y = scale * x + shift.  Behind a convolution it folds into weights and bias:
scale * (W x + b) + shift = (scale W) x + (scale b + shift), scale and shift per output channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from convpool.algebra.geometry import Refusal

BFLOAT16_MAX, BFLOAT16_EPSILON = (2 - 2.0**-7) * 2.0**127, 2.0**-7
"""The numbers of numpy's finfo for bfloat16: 8 significant bits, float32's exponents."""


@dataclass(frozen=True)
class Affine:
    """y = scale * x + shift per channel; float64, shape () or [channels]."""

    scale: np.ndarray
    shift: np.ndarray

    def after(self, first: Affine) -> Affine:
        """The map that does `first`, then this one."""
        return Affine(self.scale * first.scale, self.scale * first.shift + self.shift)

    @property
    def is_finite(self) -> bool:
        """True if scale and shift are free of infinities and NaN."""
        return bool(np.isfinite(self.scale).all() and np.isfinite(self.shift).all())

    def fits(self, channels: int) -> bool:
        """Return True if scale and shift have one number for all channels, or one for each."""
        return all(values.size in (1, channels) for values in (self.scale, self.shift))


IDENTITY = Affine(np.array(1.0), np.array(0.0))


def fold(weight: np.ndarray, bias: np.ndarray | None, affine: Affine) -> tuple[np.ndarray, np.ndarray | None]:
    """Weights and bias of the convolution that does `affine` behind itself; float64.  weight: [M, ...]; bias: [M] or None.  The
    bias returned is None where it would be all zeros and there was none."""
    m = weight.shape[0]
    scale = np.broadcast_to(affine.scale, (m,))
    old = np.zeros(m) if bias is None else bias.astype(np.float64)
    new = scale * old + affine.shift
    return weight.astype(np.float64) * scale.reshape(-1, *[1] * (weight.ndim - 1)), new if new.any() or bias is not None else None


def limits(dtype: np.dtype) -> tuple[float, float]:
    """The largest finite number of a floating-point type, and the distance from 1 to the next number above it."""
    if dtype.name == "bfloat16":
        return BFLOAT16_MAX, BFLOAT16_EPSILON
    info = np.finfo(dtype)
    return float(info.max), float(info.eps)


def holds(values: np.ndarray, dtype: np.dtype) -> bool:
    """Return True if the type has finite numbers for all values."""
    return bool((np.abs(values) <= limits(dtype)[0]).all())


def keeps(factors: np.ndarray, dtype: np.dtype) -> bool:
    """Return True if the type has these factors, finite and to its precision.  factors: [rows, ...].  A number too small for the
    type may lose digits, or all, only beside a larger one in its row: what both are multiplied by is then added up.  A summand
    may always: the sum is no more precise than the type."""
    if not holds(factors, dtype):
        return False
    rows = factors.reshape(len(factors), -1)
    lost = np.abs(rows.astype(dtype).astype(np.float64) - rows)
    return bool((lost <= limits(dtype)[1] * np.abs(rows).max(axis=1, keepdims=True, initial=0)).all())


def outside(condition: str) -> Refusal:
    """The Refusal of numbers for which `keeps` or `holds` says no."""
    return Refusal(condition, "numbers too large or small", "ones that the type has")


OP_TYPE = "ConvAvgPool"
UPSAMPLING_OP_TYPE = "UpsampleConv"
MAX_UPSAMPLE = 4
"""The most copies of a pixel along an axis that UpsampleConv makes."""
ACTIVATION_NUMBERS = {"": 0, "Relu": 1, "LeakyRelu": 2, "Tanh": 3, "Sigmoid": 4, "Silu": 6}
"""The number of each activation in the attributes prologue_activation and activation: that of convpool_activation."""
ACCUMULATIONS = {"default": 0, "packed": 1}
"""How box means of 16-bit types may be summed, by the attribute accumulation: the numbers of convpool_accumulation."""
PROLOGUES = ("Relu", "LeakyRelu", "Silu")
"""Activations before the pooling."""
EPILOGUES = ("Relu", "LeakyRelu", "Tanh", "Sigmoid", "Silu")
"""Activations of the result."""
AFFINES = ("", "Affine", "Modulated", "Normalized")
"""Maps of X in front, by the attribute prologue_affine: nothing, numbers by channel, by image and channel, or by channel behind a
normalization of each image."""


@dataclass(frozen=True)
class Parts:
    """The parts of a node beside its convolution, and whether it upsamples in front of that or pools.

    affine: scale and shift in front, by channel, or `modulated` by image and channel.  normalized: before them, X has mean 0 and
    variance 1 in each of `norm_groups` groups of channels of an image, with `epsilon` added to the variance; 0 otherwise.
    prologue, epilogue: an activation, "" for none, "Silu" for x * sigmoid(x); their alphas count for LeakyRelu only and are 0
    otherwise.
    """

    affine: bool = False
    prologue: str = ""
    prologue_alpha: float = 0.0
    residual: bool = False
    epilogue: str = ""
    epilogue_alpha: float = 0.0
    upsamples: bool = False
    modulated: bool = False
    normalized: bool = False
    norm_groups: int = 0
    epsilon: float = 0.0

    @property
    def op_type(self) -> str:
        """The operator that does this."""
        core = UPSAMPLING_OP_TYPE if self.upsamples else OP_TYPE
        return f"{AFFINES[self.affine_number]}{self.prologue}{core}{'Add' if self.residual else ''}{self.epilogue}"

    @property
    def affine_number(self) -> int:
        """The number of AFFINES."""
        return 3 if self.normalized else 2 if self.modulated else int(self.affine)

    @cached_property
    def is_plain(self) -> bool:
        """True if there is no part beside."""
        return self in (PLAIN, PLAIN_UPSAMPLING)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs' names, in order."""
        return ("X", "W", "B", *(("scale", "shift") if self.affine else ()), *(("R",) if self.residual else ()))


PLAIN, PLAIN_UPSAMPLING = Parts(), Parts(upsamples=True)
OPERATORS = {
    parts.op_type: parts
    for upsamples, affine, prologue, residual, epilogue in product(
        (False, True), range(len(AFFINES)), ("", *PROLOGUES), (False, True), ("", *EPILOGUES)
    )
    for parts in (Parts(affine > 0, prologue, 0.0, residual, epilogue, 0.0, upsamples, affine == 2, affine == 3),)
}
"""Every operator by name, with alphas of 0: ConvAvgPool and its fused variants, UpsampleConv and its."""
FUSED_VARIANTS = {name: parts for name, parts in OPERATORS.items() if not parts.is_plain}
"""Every one that has parts beside."""
LAYOUTS = {0: (False, False), 1: (True, True), 2: (False, True), 3: (True, False)}
"""The pair (X has the channels last, R and Y have them last) by attribute channels_last."""


def to_channels_last(rank: int) -> list[int]:
    """The permutation from [N, C, spatial...] to [N, spatial..., C] for `rank` spatial axes."""
    return [0, *range(2, rank + 2), 1]


def to_channels_first(rank: int) -> list[int]:
    """The inverse of `to_channels_last`."""
    return [0, rank + 1, *range(1, rank + 1)]


def function_perms(channels_last: int, rank: int, residual: bool) -> dict[str, list[int]]:
    """The attributes by which the operator's function permutes tensors around its channels-first body."""
    x_last, y_last = LAYOUTS[channels_last]
    same, first, last = list(range(rank + 2)), to_channels_first(rank), to_channels_last(rank)
    perms = {"x_perm": first if x_last else same, "y_perm": last if y_last else same}
    return perms | ({"r_perm": first if y_last else same} if residual else {})
