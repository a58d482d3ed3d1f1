"""What stands before and behind a ConvAvgPool node goes into it: it becomes one of the fused variants in `convpool.ir.schema`.

    x - BatchNormalization - Relu - ConvAvgPool - Add - Relu        x - AffineReluConvAvgPoolAddRelu
                                              r --+                 r --+

Prologue, towards the input: (1) at most one Relu or LeakyRelu; (2) before it any number of linear nodes (`linear`)
with constants, one per channel or one for all, that neither raise the rank nor widen the channels; (3) only the node
reads what they give, or nodes that all take them in: then each of them recomputes it as it loads, and it is never
written; (4) no layer before takes them in already: behind a convolution or matrix product that nothing else reads,
every runtime does them for free; (5) in front of a plain convolution (`alone`) an activation only, of what no linear node or
Add gives: the plugin's kernels for those would do a map in a pass of its own, and runtimes fuse the activation with what stays.

Epilogue, towards the output: (6) only the next node reads the result; (7) linear nodes with constants per channel are
folded into weights and bias; with a residual already taken in, into those of the convolution that gives it too; (8) an
Add or Sum of two takes the other operand as the residual, if it provably has the same shape: nothing is broadcast; of
two ConvAvgPool nodes that meet in it, the one with more taps takes it, since the other is bound by memory; (9) then at
most one Relu or LeakyRelu.

The residual cannot depend on the node: only the Add reads the node's result, so that would be a cycle.  Zero padding
stays exact, since it comes after the prologue; folding a shift in front of a padded convolution into its bias would
not be.  Each step removes a pass over a tensor (`saved_bytes`) and adds none, so the cost only falls; onnxruntime inlines
the function and runs what it ran before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from onnx import helper

from convpool.ir import schema
from convpool.ir.index import Scope
from convpool.ir.protos import AttributeReference, attributes
from convpool.passes import epilogue, prologue
from convpool.passes.absorption import Absorption, Walk, channels_of, elem_type
from convpool.plan import Reject, reject

PHASES = {"epilogue": epilogue.take_in, "prologue": prologue.take_in}
"""In this order: what can go to the node in front is cheaper there, once for each result."""


def check(
    scope: Scope, index: int, phase: str, excluded: Callable[[str], bool] = lambda _: False
) -> tuple[Absorption | None, list[Reject]]:
    """What node `index`, one of the operators', takes in (None: nothing), and what it has to leave and why.

    phase: "epilogue", or "prologue" once no epilogue is left; excluded: whether a node of this name stays as it is.
    """
    node = scope.nodes[index]
    try:
        rank = len(attributes(node)["kernel_shape"])
    except AttributeReference as error:
        return None, [reject(scope, index, "attributes", f"a reference to the function's '{error}'", "values")]
    if channels_of(scope, index) is None or not elem_type(scope, index):
        return None, [reject(scope, index, "type or shape of the weights", "unknown", "known ones")]
    parts = schema.parts_of(node)
    residual = node.input[-1] if parts.residual else None
    walk = Walk(Absorption(scope, index, parts, node.input[0], None, residual, node.output[0]), rank, excluded)
    PHASES[phase](walk)
    plan = walk.plan
    if not plan.upstream and not plan.downstream:
        return None, walk.rejects
    return replace(plan, saved_bytes=_saved_bytes(plan)), walk.rejects


def _saved_bytes(plan: Absorption) -> int | None:
    """Bytes that are no longer written and read again, per sample where the batch is open; None if sizes are unknown."""
    scope, total = plan.scope, 0
    item = helper.tensor_dtype_to_np_dtype(elem_type(scope, plan.node)).itemsize
    names = [scope.nodes[i].output[0] for i in plan.upstream]
    names += [scope.nodes[plan.node].output[0], *(scope.nodes[i].output[0] for i in plan.downstream)][: len(plan.downstream)]
    for name in names:
        shape = scope.info(name).shape
        if shape is None or not all(isinstance(dim, int) for dim in shape[1:]):
            return None
        total += 2 * item * math.prod(dim if isinstance(dim, int) else 1 for dim in shape)
    return total
