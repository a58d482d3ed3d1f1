# SPDX-License-Identifier: Apache-2.0
"""The parts of a node of the operator beside pooling and convolution: a prologue, a residual, an activation.

    [Affine][Relu | LeakyRelu]ConvAvgPool[Add][Relu | LeakyRelu | Tanh | Sigmoid]

Every combination is a fused variant, named after what it does in the order in which it does it.  LAYOUTS numbers
where the channels of its tensors stand: behind the batch, as in ONNX's Conv, or last, as the kernels read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

OP_TYPE = "ConvAvgPool"
ACTIVATION_NUMBERS = {"": 0, "Relu": 1, "LeakyRelu": 2, "Tanh": 3, "Sigmoid": 4}
"""The number of each activation in the attributes prologue_activation and activation: that of convpool_activation."""
ACCUMULATIONS = {"default": 0, "packed": 1}
"""How box means of 16-bit types may be summed, by the attribute accumulation: the numbers of convpool_accumulation."""
PROLOGUES = ("Relu", "LeakyRelu")
"""Activations before the pooling."""
EPILOGUES = ("Relu", "LeakyRelu", "Tanh", "Sigmoid")
"""Activations of the result."""


@dataclass(frozen=True)
class Parts:
    """What a node does beside pooling and convolution.

    prologue, epilogue: an activation, "" for none; their alphas count for LeakyRelu only and are 0 otherwise.
    """

    affine: bool = False
    prologue: str = ""
    prologue_alpha: float = 0.0
    residual: bool = False
    epilogue: str = ""
    epilogue_alpha: float = 0.0

    @property
    def op_type(self) -> str:
        """The operator that does this."""
        return f"{'Affine' if self.affine else ''}{self.prologue}{OP_TYPE}{'Add' if self.residual else ''}{self.epilogue}"

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs' names, in order."""
        return ("X", "W", "B", *(("scale", "shift") if self.affine else ()), *(("R",) if self.residual else ()))


PLAIN = Parts()
FUSED_VARIANTS = {
    parts.op_type: parts
    for affine, prologue, residual, epilogue in product((False, True), ("", *PROLOGUES), (False, True), ("", *EPILOGUES))
    if (parts := Parts(affine, prologue, 0.0, residual, epilogue)) != PLAIN
}
"""Every fused variant by name, with alphas of 0."""


LAYOUTS = {0: (False, False), 1: (True, True), 2: (False, True), 3: (True, False)}
"""Whether X, and whether R and Y, have the channels last, by the attribute channels_last."""


def number_of(x_last: bool, y_last: bool) -> int:
    """The attribute channels_last of a node."""
    return next(number for number, layout in LAYOUTS.items() if layout == (x_last, y_last))


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
