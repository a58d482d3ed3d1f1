# SPDX-License-Identifier: Apache-2.0
"""What one node of the operator may do beside pooling and convolution: a prologue, a residual, an activation.

    [Affine][Relu | LeakyRelu]ConvAvgPool[Add][Relu | LeakyRelu | Tanh | Sigmoid]

Every combination is a fused variant, named after what it does in the order in which it does it.
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
