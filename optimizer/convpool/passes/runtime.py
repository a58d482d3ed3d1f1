# SPDX-License-Identifier: Apache-2.0
"""What a model's opset, its nesting and the plugin do not admit, as `convpool.algebra.lowering` asks for it."""

from __future__ import annotations

from convpool.algebra.geometry import ConvSpec, PoolSpec
from convpool.algebra.lowering import Runtime, without_kernel
from convpool.algebra.refusal import Refusal, refuse
from convpool.ir.index import Scope
from convpool.ir.schema import POOL_DILATIONS_OPSET

MAX_BODIES = 1
"""Most bodies around a node of the operator.

onnxruntime, up to 1.32 at least, gives tensors of inlined functions one name in a body and in one inside that, and mixes them
up where an If is constant.
"""


def against_node(scope: Scope, conv: ConvSpec, main_opset: int, pool: PoolSpec | None = None) -> Refusal | None:
    """Why a convolution becomes no node of the operator; pool: the window behind it, where there is one of known size.

    The operator's function has the main graph's opset, so that it cannot be called from a function of another.
    """
    if scope.depth > MAX_BODIES:
        return refuse("bodies around a ConvAvgPool", scope.depth, f"at most {MAX_BODIES}")
    if (found := without_kernel(conv, pool)) is not None:
        return found
    return None if scope.opset == main_opset else refuse("opset of the function", scope.opset, f"the model's, {main_opset}")


def runtime_of(scope: Scope, conv: ConvSpec, main_opset: int, pool: PoolSpec | None) -> Runtime:
    """What cannot be written for a convolution of this scope and its window."""
    no_dilations = None
    if scope.opset < POOL_DILATIONS_OPSET:
        expected = f"opset {POOL_DILATIONS_OPSET}, where AveragePool has dilations"
        no_dilations = refuse("dilated box mean", f"opset {scope.opset}", expected)
    return Runtime(no_dilations, against_node(scope, conv, main_opset, pool))
