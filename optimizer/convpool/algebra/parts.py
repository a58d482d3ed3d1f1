# SPDX-License-Identifier: Apache-2.0
"""What one node of the operator may do beside pooling and convolution: a prologue, a residual, an activation.

    [Affine][Relu | LeakyRelu]ConvAvgPool[Add][Relu | LeakyRelu]

Every combination is a fused variant, named after what it does in the order in which it does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

OP_TYPE = "ConvAvgPool"
ACTIVATIONS = ("", "Relu", "LeakyRelu")
"""The activations by the number that the attributes prologue_activation and activation give."""


@dataclass(frozen=True)
class Parts:
    """What a node does beside pooling and convolution; alphas count for LeakyRelu only and are 0 otherwise."""

    affine: bool = False
    before: str = ""
    before_alpha: float = 0.0
    residual: bool = False
    after: str = ""
    after_alpha: float = 0.0

    @property
    def op_type(self) -> str:
        """The operator that does this."""
        prologue = ("Affine" if self.affine else "") + self.before
        return f"{prologue}{OP_TYPE}{'Add' if self.residual else ''}{self.after}"

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs' names, in order."""
        return ("X", "W", "B", *(("scale", "shift") if self.affine else ()), *(("R",) if self.residual else ()))


PLAIN = Parts()
FUSED_VARIANTS = {
    parts.op_type: parts
    for affine, before, residual, after in product((False, True), ACTIVATIONS, (False, True), ACTIVATIONS)
    if (parts := Parts(affine, before, 0.0, residual, after)) != PLAIN
}
"""Every fused variant by name, with alphas of 0."""
