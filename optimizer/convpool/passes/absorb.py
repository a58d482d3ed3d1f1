"""What stands before and behind a ConvAvgPool node goes into it: it becomes one of the siblings in `convpool.operator`.

    x - BatchNormalization - Relu - ConvAvgPool - Add - Relu        x - AffineReluConvAvgPoolAddRelu
                                              r --+                 r --+

Prologue, towards the input: (1) at most one Relu or LeakyRelu; (2) before it any number of linear nodes (`linear`)
with constants, one per channel or one for all, that neither raise the rank nor widen the channels; (3) only the node
reads what they give, or nodes that all take them in: then each of them recomputes it as it loads, and it is never
written; (4) no layer before takes them in already: behind a convolution or matrix product that nothing else reads,
every runtime does them for free.

Epilogue, towards the output: (5) only the next node reads the result; (6) linear nodes with constants per channel are
folded into weights and bias; with a residual already taken in, into those of the convolution that gives it too; (7) an
Add or Sum of two takes the other operand as the residual, if it provably has the same shape: nothing is broadcast; of
two ConvAvgPool nodes that meet in it, the one with more taps takes it, since the other is bound by memory; (8) then at
most one Relu or LeakyRelu.

The residual cannot depend on the node: only the Add reads the node's result, so that would be a cycle.  Zero padding
stays exact, since it comes after the prologue; folding a shift in front of a padded convolution into its bias would
not be.  Each step removes a pass over a tensor (`saved_bytes`) and adds none, so the cost only falls; onnxruntime inlines
the function and runs what it ran before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np
from onnx import helper

from convpool import operator
from convpool.graph import AttributeReference, Scope, attributes, is_op, label
from convpool.operator import Parts
from convpool.passes.linear import BINARY, Step, linear_step
from convpool.passes.trace import spatial_origin
from convpool.plan import IDENTITY, Affine, Reject, reject

ACTIVATIONS = operator.ACTIVATIONS[1:]
EPILOGUE_HOSTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators into whose own epilogue runtimes fuse what is elementwise behind them."""


@dataclass(frozen=True)
class Weights:
    """New constants for a node: weights as the node stores them, and bias [M]."""

    node: int
    weight: np.ndarray
    bias: np.ndarray


@dataclass(frozen=True)
class Absorption:
    """A node of the operator, what it becomes, and what it takes in.

    upstream: nodes that go where nothing else reads what they give; downstream: nodes that go.  weights: of the node,
    scaled: of the convolution that gives the residual; None where they stay.
    """

    scope: Scope
    node: int
    parts: Parts
    x: str
    affine: Affine | None = None
    residual: str | None = None
    output: str = ""
    upstream: tuple[int, ...] = ()
    downstream: tuple[int, ...] = ()
    weights: Weights | None = None
    scaled: Weights | None = None
    saved_bytes: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes taken in, as a report names them."""
        nodes = self.scope.nodes
        return tuple(f"{nodes[i].op_type} '{label(nodes[i])}'" for i in (*reversed(self.upstream), *self.downstream))


@dataclass
class _Walk:
    """One node's plan in the making, and why its ends stopped."""

    plan: Absorption
    rank: int
    excluded: Callable[[str], bool]
    rejects: list[Reject] = field(default_factory=list)


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
    if _channels(scope, index) is None or not _elem_type(scope, index):
        return None, [reject(scope, index, "type or shape of the weights", "unknown", "known ones")]
    parts = operator.parts_of(node)
    residual = node.input[-1] if parts.residual else None
    walk = _Walk(Absorption(scope, index, parts, node.input[0], None, residual, node.output[0]), rank, excluded)
    if phase == "epilogue":
        current: Absorption | None = walk.plan
        while current is not None:
            if current.parts != walk.plan.parts or current.weights is not walk.plan.weights:
                walk.plan = current  # an Identity alone is not worth a change
            current = _behind(walk, current)
    elif not _has_prologue(scope, index):
        _before(walk)
    plan = walk.plan
    if not plan.upstream and not plan.downstream:
        return None, walk.rejects
    return replace(plan, saved_bytes=_saved_bytes(plan)), walk.rejects


def _behind(walk: _Walk, plan: Absorption) -> Absorption | None:
    """The plan with one more node behind taken in; None where there is none to take in."""
    scope, parts = plan.scope, plan.parts
    wanted = ("Sum", "BatchNormalization", "Identity", "Dropout", *BINARY, *ACTIVATIONS)
    readers = [index for index in scope.readers.get(plan.output, []) if is_op(scope.nodes[index], *wanted)]
    if not readers or parts.after:
        return None
    reader = readers[0]
    node = scope.nodes[reader]
    others = scope.sole_reader(plan.output)
    if others is not None:
        found = reject(scope, plan.node, f"result '{plan.output}' {others}", "other readers", f"{node.op_type} alone")
        walk.rejects.append(found)
        return None
    taken = replace(plan, output=node.output[0], downstream=(*plan.downstream, reader))
    if is_op(node, *ACTIVATIONS):
        alpha = _alpha(scope, reader)
        return None if alpha is None else replace(taken, parts=replace(parts, after=node.op_type, after_alpha=alpha))
    step = _step(scope, reader, walk.rank)
    if isinstance(step, Step) and step.affine is not None and node.input[step.operand] == plan.output:
        result: Absorption | Reject | None = _fold(walk, taken, step)
    elif is_op(node, "Add", "Sum"):
        result = _residual(walk, plan, taken)
    else:
        result = step if isinstance(step, Reject) else reject(
            scope, reader, "constant operands", "computed ones", "constants per channel"
        )  # fmt: skip
    if isinstance(result, Reject):
        walk.rejects.append(result)
        return None
    return result


def _step(scope: Scope, index: int, rank: int) -> Step | Reject | None:
    """The node as a linear map, None where it joins two tensors."""
    if is_op(scope.nodes[index], "Sum"):
        return None
    try:
        return linear_step(scope, index, rank)
    except AttributeReference as error:
        return reject(scope, index, "attributes", f"a reference to the function's '{error}'", "values")


def _fold(walk: _Walk, plan: Absorption, step: Step) -> Absorption | Reject:
    """Condition (6): `step` behind the node, in its weights."""
    scope = plan.scope
    if step.affine is IDENTITY:
        return plan
    assert step.affine is not None
    m = plan.weights.bias.size if plan.weights else _channels(scope, plan.node)[0]
    if any(v.size not in (1, m) for v in (step.affine.scale, step.affine.shift)):
        return reject(scope, step.node, "channels", "constants that widen them", f"{m} or 1")
    weights = plan.weights or _weights(scope, plan.node)
    if weights is None:
        return reject(scope, plan.node, "weights", "computed, or an input that a caller may override", "constants")
    own, other = _scaled(weights, step.affine), plan.scaled
    if plan.parts.residual and (step.affine.scale != 1).any():
        source = scope.producer.get(plan.residual or "")
        giver = plan.scaled or (_giver(walk, source) if source is not None else None)
        if giver is None:
            return reject(scope, step.node, "map behind a residual", "one that its convolution cannot take in",
                          "a convolution with constant weights that nothing else reads")  # fmt: skip
        other = _scaled(giver, Affine(step.affine.scale, np.array(0.0)))
        if other is None:
            own = None
    if own is None:
        return reject(scope, step.node, "constants folded into weights", "numbers outside the type's range", "finite ones")
    return replace(plan, weights=own, scaled=other)


def _residual(walk: _Walk, plan: Absorption, taken: Absorption) -> Absorption | Reject | None:
    """Condition (7): the other operand of the Add."""
    scope, reader = plan.scope, taken.downstream[-1]
    node = scope.nodes[reader]
    if len(node.input) != 2:
        return reject(scope, reader, "operands", len(node.input), 2)
    if plan.parts.residual:
        return reject(scope, reader, "residual", "a second one", "one")
    other = node.input[1] if node.input[0] == plan.output else node.input[0]
    shapes = [scope.info(name).shape for name in (plan.output, other)]
    if shapes[0] is not None and (x := scope.info(plan.x).shape):
        shapes[0] = (x[0], *shapes[0][1:])  # a value_info may have another name for the batch
    same = shapes[0] == shapes[1] and shapes[0] is not None and len(shapes[0]) == walk.rank + 2 and None not in shapes[0]
    if not same and not _same_origin(scope, plan.output, other, shapes, walk.rank):
        got, expected = (list(shape) if shape is not None else "unknown" for shape in reversed(shapes))
        return reject(scope, reader, "shape of the residual", got, f"provably the result's, {expected}")
    rival = scope.producer.get(other)
    if rival is not None and operator.is_operator(scope.nodes[rival]) and scope.sole_reader(other) is None:
        parts = operator.parts_of(scope.nodes[rival])
        able = not parts.after and not parts.residual and not walk.excluded(label(scope.nodes[rival]))
        if able and (_work(scope, rival), rival) > (_work(scope, plan.node), plan.node):
            return None
    return replace(taken, residual=other, parts=replace(plan.parts, residual=True))


def _before(walk: _Walk) -> None:
    """Conditions (1) to (4)."""
    plan = walk.plan
    scope, x, parts, affine = plan.scope, plan.x, plan.parts, IDENTITY
    upstream: list[int] = []
    while (index := scope.producer.get(x)) is not None:
        node = scope.nodes[index]
        if not is_op(node, "BatchNormalization", "Identity", "Dropout", *BINARY, *ACTIVATIONS):
            break
        if not _all_take(scope, x, plan.node, bool(upstream), walk.excluded):
            found = reject(scope, index, f"output '{x}' {scope.sole_reader(x)}", "other readers", "the convolution alone")
            walk.rejects.append(found)
            break
        if is_op(node, *ACTIVATIONS):
            alpha = _alpha(scope, index)
            if alpha is None or parts.before or affine is not IDENTITY:
                break
            parts, x = replace(parts, before=node.op_type, before_alpha=alpha), node.input[0]
        else:
            step = _fitting(walk, index)
            if isinstance(step, Reject):
                walk.rejects.append(step)
                break
            assert step.affine is not None
            if step.affine is not IDENTITY:
                affine = step.affine if affine is IDENTITY else affine.after(step.affine)
            x = node.input[step.operand]
        upstream.append(index)
        if affine is not IDENTITY or parts.before:  # an Identity alone is not worth a change
            parts = replace(parts, affine=affine is not IDENTITY)
            given = affine if parts.affine else None
            walk.plan = replace(plan, x=x, affine=given, parts=parts, upstream=tuple(upstream))
    host = _host(scope, walk.plan.x) if walk.plan.upstream else None
    if host is not None:
        got = f"{scope.nodes[host].op_type} '{label(scope.nodes[host])}' before it, which takes it in"
        walk.rejects.append(reject(scope, walk.plan.upstream[0], "prologue", got, "a tensor that stays as it is"))
        walk.plan = plan
    elif walk.plan.affine is not None and not _representable(plan, walk.plan.affine):
        got = "numbers outside the type's range"
        walk.rejects.append(reject(scope, walk.plan.upstream[0], "scale and shift", got, "finite ones"))
        walk.plan = plan


def _fitting(walk: _Walk, index: int) -> Step | Reject:
    """Node `index` in front of the chain as a map per channel of a tensor of the same shape; condition (2)."""
    scope, rank = walk.plan.scope, walk.rank
    node = scope.nodes[index]
    step = _step(scope, index, rank)
    if isinstance(step, Reject):
        return step
    if step is None or step.affine is None:
        return reject(scope, index, "constant operands", "computed ones", "constants per channel")
    if step.affine is IDENTITY or is_op(node, "BatchNormalization"):
        return step
    channels = _channels(scope, walk.plan.node)
    shape = scope.info(node.input[step.operand]).shape
    if shape is None or len(shape) != rank + 2:
        return reject(scope, index, "rank", "unknown" if shape is None else len(shape), rank + 2)
    sizes = {step.affine.scale.size, step.affine.shift.size}
    assert channels is not None
    if sizes != {1} and (shape[1] != channels[1] or not sizes <= {1, channels[1]}):
        return reject(scope, index, "channels", shape[1], f"{channels[1]}, not widened")
    return step


def _all_take(scope: Scope, x: str, node: int, inside: bool, excluded: Callable[[str], bool]) -> bool:
    """Whether whatever reads `x` takes it in: the chain so far, or nodes that may have a prologue and have none yet."""
    if x in scope.outputs or x in scope.captured:
        return False
    readers = scope.readers.get(x, [])
    if inside:
        return len(readers) == 1
    return all(
        operator.is_operator(scope.nodes[i]) and scope.nodes[i].input[0] == x and x not in scope.nodes[i].input[1:]
        and (i == node or not _has_prologue(scope, i) and not excluded(label(scope.nodes[i])))
        for i in readers
    )  # fmt: skip


def _has_prologue(scope: Scope, index: int) -> bool:
    parts = operator.parts_of(scope.nodes[index])
    return parts.affine or bool(parts.before)


def _host(scope: Scope, x: str) -> int | None:
    """The layer that gives `x` to this chain alone, possibly by an Add, and into which runtimes fuse it; condition (4)."""
    for _ in range(2):
        index = scope.producer.get(x)
        if index is None or scope.sole_reader(x) is not None:
            return None
        node = scope.nodes[index]
        if is_op(node, *EPILOGUE_HOSTS):
            return index
        if not is_op(node, "Add", "Sum"):
            return None
        given = [name for name in node.input if (i := scope.producer.get(name)) is not None
                 and is_op(scope.nodes[i], *EPILOGUE_HOSTS)]  # fmt: skip
        if not given:
            return None
        x = given[0]
    return None


def _alpha(scope: Scope, index: int) -> float | None:
    """An activation's slope below 0 as the operator has it; None where it is an attribute of a function around it."""
    try:
        values = attributes(scope.nodes[index])
    except AttributeReference:
        return None
    return float(values.get("alpha", np.float32(0.01))) if is_op(scope.nodes[index], "LeakyRelu") else 0.0


def _weights(scope: Scope, index: int) -> Weights | None:
    """The constant weights and bias (zeros if there is none) of a Conv or a node of the operator."""
    node = scope.nodes[index]
    weight = scope.constant(node.input[1])
    has_bias = len(node.input) > 2 and bool(node.input[2])
    bias = scope.constant(node.input[2]) if has_bias else None
    if weight is None or (has_bias and bias is None):
        return None
    array = weight.array()
    return Weights(index, array, bias.array() if bias else np.zeros(array.shape[0], array.dtype))


def _giver(walk: _Walk, index: int) -> Weights | None:
    """Weights of the convolution that gives the residual, if they may be scaled."""
    scope = walk.plan.scope
    node = scope.nodes[index]
    if scope.sole_reader(node.output[0]) is not None or walk.excluded(label(node)):
        return None
    if operator.is_operator(node):
        parts = operator.parts_of(node)
        if parts.after or parts.residual:
            return None
    elif not is_op(node, "Conv"):
        return None
    return _weights(scope, index)


def _scaled(weights: Weights, affine: Affine) -> Weights | None:
    """The affine map behind the convolution, folded in; None if the type cannot hold the result."""
    dtype = weights.weight.dtype
    m = weights.weight.shape[0]
    scale = np.broadcast_to(affine.scale, (m,))
    with np.errstate(over="ignore", invalid="ignore"):
        weight = weights.weight.astype(np.float64) * scale.reshape(-1, *[1] * (weights.weight.ndim - 1))
        bias = weights.bias.astype(np.float64) * scale + affine.shift
        if not _holds(weight, dtype) or not _holds(bias, dtype):
            return None
        return Weights(weights.node, weight.astype(dtype), bias.astype(dtype))


def _representable(plan: Absorption, affine: Affine) -> bool:
    dtype = helper.tensor_dtype_to_np_dtype(_elem_type(plan.scope, plan.node))
    return _holds(affine.scale, dtype) and _holds(affine.shift, dtype)


def _holds(values: np.ndarray, dtype: np.dtype) -> bool:
    """Whether the type has finite numbers for all values."""
    return bool((np.abs(values) <= float(ml_dtypes.finfo(dtype).max)).all())


def _elem_type(scope: Scope, index: int) -> int:
    node = scope.nodes[index]
    return scope.info(node.input[1]).elem_type or scope.info(node.input[0]).elem_type


def _channels(scope: Scope, index: int) -> tuple[int, int] | None:
    """(M, C) of a node of the operator; None where its weights' shape is unknown."""
    node = scope.nodes[index]
    shape = scope.info(node.input[1]).shape
    if shape is None or not all(isinstance(dim, int) for dim in shape):
        return None
    return shape[0], shape[-1] * int(attributes(node).get("group", 1))


def _work(scope: Scope, index: int) -> int:
    """Multiply-adds per output position."""
    shape = scope.info(scope.nodes[index].input[1]).shape
    return math.prod(dim for dim in shape[1:] if isinstance(dim, int)) if shape else 0


def _same_origin(scope: Scope, y: str, other: str, shapes: list, rank: int) -> bool:
    """Whether batch and channels are equal by their shapes, and spatial sizes by how they came about."""
    if any(shape is None or len(shape) != rank + 2 or None in shape[:2] for shape in shapes):
        return False
    return shapes[0][:2] == shapes[1][:2] and spatial_origin(scope, y, rank) == spatial_origin(scope, other, rank)


def _saved_bytes(plan: Absorption) -> int | None:
    """Bytes that are no longer written and read again, per sample where the batch is open; None if sizes are unknown."""
    scope, total = plan.scope, 0
    item = helper.tensor_dtype_to_np_dtype(_elem_type(scope, plan.node)).itemsize
    names = [scope.nodes[i].output[0] for i in plan.upstream]
    names += [scope.nodes[plan.node].output[0], *(scope.nodes[i].output[0] for i in plan.downstream)][: len(plan.downstream)]
    for name in names:
        shape = scope.info(name).shape
        if shape is None or not all(isinstance(dim, int) for dim in shape[1:]):
            return None
        total += 2 * item * math.prod(dim if isinstance(dim, int) else 1 for dim in shape)
    return total
