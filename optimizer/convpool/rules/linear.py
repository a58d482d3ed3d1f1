# SPDX-License-Identifier: Apache-2.0
"""Nodes that may stand between a convolution and the pooling, and reasons why others may not.

| node | treatment | condition |
|---|---|---|
| Identity | dropped | |
| Cast, CastLike | dropped | to the type that the tensor has |
| Concat, Max, Mean, Min, Sum | dropped | of one tensor |
| Expand, Tile | dropped | the shape stays |
| Dropout | dropped | (1) inference form, mask unread |
| BatchNormalization | affine per channel | (2) inference form |
| Neg | affine per channel | |
| Add, Sub, Mul, Div | affine per channel | (3) the other operand does not vary over space; (4) no division by the data |
| Pad | added to the convolution's pads | (5) constant zeros on spatial axes, (6) as the convolution would give there |
| Pad, Slice, Gather, Split | moved behind | (7) along batch or channels; (8) of a Split one result is read |
| ReduceMean, ReduceSum | moved behind | (7); (9) keepdims |
| Reshape, Transpose, other views | dropped, or a Gather behind | (10) together they change no more than the channels' order |

An affine map per channel commutes with an average without padding.  With constant operands it is folded into weights
and bias, else the node moves behind the pooling.  So does all that acts along batch and channels, at each position alike.

`convpool.algebra.geometry` has the algebra of a Pad.

Views rearrange without computing anything.  Each axis of a tensor on the way is a list of spans of x's axes.  A span is
`size` positions of an axis that are `step` apart, so that Reshape splits and joins spans, and Transpose moves them.

    x [N, C, H, W] - Reshape [N, 2, C/2, H, W] - Transpose 0, 2, 1, 3, 4 - Reshape [N, C, H, W]      a shuffle of channels
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from onnx import NodeProto, TensorProto

from convpool.algebra.geometry import COMPUTED, Ints
from convpool.algebra.parts import IDENTITY, Affine
from convpool.ir.index import Dim, Scope
from convpool.ir.protos import AttributeReference, attributes, is_op
from convpool.rules.base import BETWEEN, Reject, reject

VIEWS = ("Flatten", "Reshape", "SpaceToDepth", "Squeeze", "Transpose", "Unsqueeze")
"""Operators that rearrange, and compute nothing."""
UNARY = (
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cast", "CastLike", "Ceil", "Celu", "Clip", "Cos",
    "Cosh", "Dropout", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu",
    "Log", "Mish", "Neg", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh",
    "Softplus", "Softsign", "Sqrt", "Swish", "Tan", "Tanh", "ThresholdedRelu",
)  # fmt: skip
"""Operators that act on each element of their first input alike."""
BROADCASTING = ("Add", "Div", "Max", "Mean", "Min", "Mul", "PRelu", "Pow", "Sub", "Sum")
"""Operators on each element of all inputs, with broadcasting."""
JOINS = ("Add", "Sub", "Sum", "Mean", "Concat")
"""Operators over which a pooling distributes."""
WHOLE_AXIS = 2**31 - 1
"""A Slice end at or beyond this reaches the end of any axis."""
MAX_CHAIN = 16
"""Most nodes of a chain that is looked at."""


@dataclass(frozen=True)
class Step:
    """One linear node.  operand: number of the input that carries the data; result: of the output that is read.  affine: what it
    does per channel, None if that is not constant; pads: what a Pad adds, begins then ends.  before: nodes that belong to it,
    nearest first; then `operand` is of the last one.  channels: which it picks, where a Gather takes their place."""

    node: int
    operand: int
    affine: Affine | None = IDENTITY
    pads: Ints | None = None
    result: int = 0
    before: Ints = ()
    channels: Ints = ()


@dataclass(frozen=True)
class LinearOp:
    """A linear operator: how a node of it is read, and what every search that meets one has to know.

    step: what a node does as a linear map; its arguments are those of `linear_step`.  binary: any input may carry the data, else
    the first.  rearranges: it does, selects or reduces, so that no node of the operator fuses it.  idle: it hands its input on
    as it is, at inference.  neutral: the constant operand with which it does; commutes: whichever input that is.
    """

    step: Callable[[Scope, int, int], Step | Reject | None]
    binary: bool = False
    rearranges: bool = False
    idle: bool = False
    neutral: float | None = None
    commutes: bool = False


def linear_step(scope: Scope, index: int, rank: int) -> Step | Reject | None:
    """Return node `index` as a linear map; a Reject if unqualified, None for others.  Raises AttributeReference."""
    op = op_of(scope.nodes[index])
    return None if op is None else op.step(scope, index, rank)


def step_or_reject(scope: Scope, index: int, rank: int) -> Step | Reject | None:
    """`linear_step`, with a Reject where an attribute refers to one of the function around the node."""
    try:
        return linear_step(scope, index, rank)
    except AttributeReference as error:
        return reject(scope, index, "attributes", f"a reference to the function's '{error}'", "values")


def op_of(node: NodeProto) -> LinearOp | None:
    """The node's operator, None if it is none of `OPS`."""
    return OPS.get(node.op_type) if node.domain in ("", "ai.onnx") else None


def is_map(scope: Scope, index: int) -> bool:
    """Return True if a node's operator may be a map per channel."""
    op = op_of(scope.nodes[index])
    if op is None or op.rearranges:
        return False
    return op.step is not _cast or isinstance(step_or_reject(scope, index, 0), Step)


def varies_over_space(shape: tuple[Dim, ...] | None, rank: int) -> bool:
    """Return True if a tensor, broadcast to [N, C, spatial...], may differ between positions.  shape: None if unknown."""
    return shape is None or len(shape) > rank + 2 or not set(shape[-rank:]) <= {1}


def _cast(scope: Scope, index: int, rank: int) -> Step | Reject:
    node = scope.nodes[index]
    given = scope.info(node.input[0]).elem_type
    to = attributes(node)["to"] if is_op(node, "Cast") else scope.info(node.input[1]).elem_type
    if given == to != 0:
        return Step(index, 0)
    known = {value: name for name, value in TensorProto.DataType.items() if value}
    names = [known.get(kind, "an unknown type") for kind in (given, to)]
    return reject(scope, index, BETWEEN, f"{node.op_type} of {names[0]} to {names[1]}", "linear operators only")


def _same_shape(scope: Scope, index: int, rank: int) -> Step | None:
    node = scope.nodes[index]
    shapes = [scope.info(name).shape for name in (node.input[0], node.output[0])]
    ones = scope.constant_ints(node.input[1])
    same = shapes[0] == shapes[1] and shapes[0] is not None and None not in shapes[0]
    return Step(index, 0) if same or ones is not None and len(ones) <= rank + 2 and set(ones) <= {1} else None


def _dropout(scope: Scope, index: int, rank: int) -> Step | Reject:
    node = scope.nodes[index]
    if any(is_used(scope, mask) for mask in node.output[1:]):
        return reject(scope, index, "mask", "a reader", "none")
    if scope.opset >= 12 and len(node.input) > 2 and node.input[2]:
        training = scope.constant_ints(node.input[2])
        if training != (0,):
            return reject(scope, index, "training_mode", training or COMPUTED, "false")
    return Step(index, 0)


def _batch_normalization(scope: Scope, index: int, rank: int) -> Step | Reject:
    node = scope.nodes[index]
    values = attributes(node)
    if values.get("training_mode", 0) or any(node.output[1:]):
        return reject(scope, index, "form", "training", "inference")
    if not values.get("spatial", 1):
        return reject(scope, index, "spatial", 0, 1)
    constants = [scope.constant(name) for name in node.input[1:5]]
    if any(c is None for c in constants):
        return Step(index, 0, None)
    if len({c.shape for c in constants if c is not None}) > 1:
        return reject(scope, index, "parameters", [list(c.shape) for c in constants if c is not None], "one shape")
    scale, shift, mean, variance = (c.array().astype(np.float64) for c in constants if c is not None)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = scale / np.sqrt(variance + np.float64(values.get("epsilon", np.float32(1e-5))))
        affine = Affine(factor, shift - factor * mean)
    return _finite(scope, index, affine) or Step(index, 0, affine)


def _finite(scope: Scope, index: int, affine: Affine) -> Reject | None:
    """Why a map with infinities or NaN cannot move: the mean of infinities of both signs is NaN, an infinite mean not."""
    if affine.is_finite:
        return None
    return reject(scope, index, "constant operands", "a division by 0, infinity or NaN", "finite numbers")


def _binary(scope: Scope, index: int, rank: int) -> Step | Reject | None:
    """None when neither operand is the same at every position: then it joins two feature maps."""
    node = scope.nodes[index]
    uniform = [not varies_over_space(info.shape, rank) for info in map(scope.info, [*node.input])]
    if not any(uniform):
        if node.op_type in ("Mul", "Div"):
            return reject(scope, index, "operands", "two that vary over space", "one that does not")
        return None
    constant = [u and scope.constant(name) is not None for u, name in zip(uniform, node.input, strict=True)]
    candidates = constant if any(constant) else uniform
    other = 1 if candidates[1] else 0
    if node.op_type == "Div" and other == 0:
        return reject(scope, index, "division by the data", "a nonlinear map", "division by a constant")
    operand = scope.constant(node.input[other])
    shape = (1,) * (rank + 2 - len(operand.shape)) + operand.shape if operand is not None else (0,)
    if operand is None or shape[0] != 1:  # else it differs between samples
        return Step(index, 1 - other, None)
    value = operand.array().astype(np.float64).reshape(-1)
    value = np.asarray(value[0] if shape[1] == 1 else value)
    if node.op_type in ("Mul", "Div"):
        with np.errstate(divide="ignore"):
            affine = Affine(value if node.op_type == "Mul" else np.asarray(1 / value), np.array(0.0))
    else:
        minus = node.op_type == "Sub"
        affine = Affine(np.array(-1.0 if minus and other == 0 else 1.0), np.asarray(-value if minus and other == 1 else value))
    return _finite(scope, index, affine) or Step(index, 1 - other, affine)


def pad_numbers(scope: Scope, index: int, rank: int) -> tuple[Ints, float] | Reject:
    """A Pad's pads on all axes, begins then ends, and the number it fills in.  Raises AttributeReference."""
    node = scope.nodes[index]
    values = attributes(node)
    if scope.opset < 11:
        pads, fill = tuple(values.get("pads", ())), float(values.get("value", 0.0))
    else:
        read = scope.constant_ints(node.input[1])
        constant = scope.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        if read is None or (constant is None and len(node.input) > 2 and node.input[2]):
            return reject(scope, index, "pads or value of Pad", COMPUTED, "constants")
        if constant is not None and constant.array().size != 1:
            return reject(scope, index, "value of Pad", f"shape {list(constant.shape)}", "one number")
        pads, fill = read, float(constant.array().reshape(-1)[0]) if constant is not None else 0.0
        if len(node.input) > 3 and node.input[3]:
            axes = scope.constant_ints(node.input[3])
            if axes is None:
                return reject(scope, index, "axes of Pad", COMPUTED, "a constant")
            if len(pads) != 2 * len(axes):
                return reject(scope, index, "pads of Pad", list(pads), f"{2 * len(axes)} numbers")
            full = [0] * (2 * (rank + 2))
            for i, axis in enumerate(axes):
                full[axis % (rank + 2)] = pads[i]
                full[axis % (rank + 2) + rank + 2] = pads[len(axes) + i]
            pads = tuple(full)
    if len(pads) != 2 * (rank + 2):
        return reject(scope, index, "pads of Pad", list(pads), f"{2 * (rank + 2)} numbers")
    return pads, fill


def _pad(scope: Scope, index: int, rank: int) -> Step | Reject:
    numbers = pad_numbers(scope, index, rank)
    if isinstance(numbers, Reject):
        return numbers
    pads, fill = numbers
    half = len(pads) // 2
    if any(pads) and not any((*pads[2:half], *pads[half + 2 :])):
        return Step(index, 0, None)
    mode = attributes(scope.nodes[index]).get("mode", b"constant").decode(errors="replace")
    if any(pads) and mode != "constant":
        return reject(scope, index, "mode of Pad", mode, "constant")
    if any(pads) and fill != 0:
        return reject(scope, index, "value of Pad", fill, 0)
    if any((*pads[:2], *pads[half : half + 2])):
        return reject(scope, index, "pads of Pad", list(pads), "zeros on the batch and channel axes")
    return Step(index, 0, IDENTITY, (*pads[2:half], *pads[half + 2 :]))


def slice_numbers(scope: Scope, index: int) -> list[Sequence[int] | None]:
    """Starts, ends, axes and steps of a Slice, None for what is computed.  Raises AttributeReference."""
    node, values = scope.nodes[index], attributes(scope.nodes[index])
    names = [*node.input[1:], "", "", "", ""][:4]
    read = [values.get(key) for key in ("starts", "ends", "axes")] if scope.opset < 10 else map(scope.constant_ints, names)
    starts, ends, axes, steps = [*read, None][:4]
    shape = (len(starts),) if starts is not None else scope.info(names[0]).shape
    if axes is None and not names[2] and shape and isinstance(shape[0], int):
        axes = range(shape[0])
    return [starts, ends, axes, (1,) * len(axes) if axes is not None and steps is None and not names[3] else steps]


def _slice(scope: Scope, index: int, rank: int) -> Step | Reject:
    starts, ends, axes, steps = slice_numbers(scope, index)
    if axes is None:
        return reject(scope, index, "axes of Slice", COMPUTED, "a constant")
    if any(numbers is not None and len(numbers) != len(axes) for numbers in (starts, ends, steps)):
        return reject(scope, index, "starts, ends or steps of Slice", "others", f"{len(axes)} numbers")
    sizes = scope.info(scope.nodes[index].input[0]).shape or (None,) * (rank + 2)
    cut = set()
    for number, axis in enumerate(axes):
        size = sizes[axis] if -len(sizes) <= axis < len(sizes) else None
        end = size if isinstance(size, int) else WHOLE_AXIS
        if starts is None or ends is None or steps is None or (starts[number], steps[number]) != (0, 1) or ends[number] < end:
            cut.add(axis % (rank + 2))
    return _along(scope, index, cut)


def _along(scope: Scope, index: int, axes: Collection[int], result: int = 0) -> Step | Reject:
    """A node that acts along these axes only, and at each position of the others alike."""
    if any(axis > 1 for axis in axes):
        condition = f"axes of {scope.nodes[index].op_type}"
        return reject(scope, index, condition, ", ".join(map(str, sorted(axes))), "0 and 1, batch and channels, alone")
    return Step(index, 0, None if axes else IDENTITY, result=result)


def _gather(scope: Scope, index: int, rank: int) -> Step | Reject:
    shape = scope.info(scope.nodes[index].input[1]).shape
    if shape is None or len(shape) != 1:
        return reject(scope, index, "axes of the indices of Gather", "unknown" if shape is None else len(shape), 1)
    return _along(scope, index, {attributes(scope.nodes[index]).get("axis", 0) % (rank + 2)})


def _split(scope: Scope, index: int, rank: int) -> Step | Reject:
    names = scope.nodes[index].output
    used = [number for number, name in enumerate(names) if is_used(scope, name)]
    axes = {attributes(scope.nodes[index]).get("axis", 0) % (rank + 2)} if len(names) > 1 else set()
    if len(used) > 1 and max(axes) < 2:
        return reject(scope, index, "results of Split that are read", len(used), "one")
    return _along(scope, index, axes, used[0])


def is_used(scope: Scope, name: str) -> bool:
    """Return True if anything reads a tensor."""
    return bool(name) and (name in scope.readers or name in scope.outputs or name in scope.captured)


def _reduction(scope: Scope, index: int, rank: int) -> Step | Reject | None:
    """None for one that drops axes, or is over space: then it is an average of its own."""
    values = attributes(scope.nodes[index])
    axes = axes_of(scope, index, values)
    if isinstance(axes, Reject):
        return axes
    over = {axis % (rank + 2) for axis in axes}
    return Step(index, 0, None) if over and over <= {0, 1} and values.get("keepdims", 1) == 1 else None


def _view(scope: Scope, index: int, rank: int) -> Step | Reject:
    chain = chain_to(scope, index)
    order = channel_order(scope, chain, rank)
    if isinstance(order, Reject):
        return order
    return Step(index, 0, None if order else IDENTITY, before=tuple(chain[-2::-1]), channels=order)


class Span(NamedTuple):
    """`size` positions (None: unknown) of axis `axis` of x, `step` apart."""

    axis: int
    size: int | None
    step: int = 1


Spans = tuple[Span, ...]


@dataclass(frozen=True)
class View:
    """A tensor computed from x: spans of x in each axis, spans that were averaged, and a factor, None where it is unknown."""

    axes: tuple[Spans, ...]
    averaged: Spans = ()
    factor: float | None = 1.0


def whole(scope: Scope, x: str, rank: int, size: Ints | None = None) -> View:
    """x itself.  size: its spatial sizes, where they are known otherwise than by shape inference."""
    shape = scope.info(x).shape
    known = (None,) * (rank + 2) if shape is None else tuple(n if isinstance(n, int) else None for n in shape)
    sizes = (*known[:2], *(size or known[2:]))
    return View(tuple((Span(axis, n),) if n != 1 or axis == 0 else () for axis, n in enumerate(sizes)))


def order_of(values: Mapping[str, Any], count: int) -> tuple[int, ...] | None:
    """The order of axes that a Transpose of these attributes gives; None where that is none of `count` axes."""
    order = tuple(values.get("perm") or range(count)[::-1])
    return order if sorted(order) == list(range(count)) else None


def viewed(scope: Scope, index: int, view: View, given: Sequence[Dim] | None = None) -> View | Reject:
    """Apply node `index`, one of VIEWS, to a view.  given: the sizes that a Reshape gives.  Raises AttributeReference."""
    node, count = scope.nodes[index], len(view.axes)
    values = attributes(node)
    if is_op(node, "Reshape"):
        return _reshaped(scope, index, view, given)
    if is_op(node, "Transpose"):
        order = order_of(values, count)
        if order is None:
            return reject(scope, index, "perm", list(values["perm"]), f"the axes from 0 to {count - 1}")
        return replace(view, axes=tuple(view.axes[axis] for axis in order))
    if is_op(node, "Flatten"):
        axis = values.get("axis", 1)
        axis += count if axis < 0 else 0
        return replace(view, axes=tuple(sum(half, ()) for half in (view.axes[:axis], view.axes[axis:])))
    if is_op(node, "SpaceToDepth"):
        return _space_to_depth(scope, index, view, values)
    axes = axes_of(scope, index, values)
    if isinstance(axes, Reject):
        return axes
    count += len(axes) if is_op(node, "Unsqueeze") else 0
    if not axes or any(not -count <= axis < count for axis in axes):
        return reject(scope, index, f"axes of {node.op_type}", list(axes) or "none", f"some of {count}")
    chosen = {axis % count for axis in axes}
    if is_op(node, "Unsqueeze"):
        rest = iter(view.axes)
        return replace(view, axes=tuple(() if axis in chosen else next(rest) for axis in range(count)))
    if any(view.axes[axis] for axis in chosen):
        return reject(scope, index, "axes of Squeeze", list(axes), "channels or space, of size 1")
    return replace(view, axes=tuple(spans for axis, spans in enumerate(view.axes) if axis not in chosen))


def chain_to(scope: Scope, index: int, *reductions: str) -> list[int]:
    """The views in front of node `index`, and it, the last.  reductions: operators that may be among them, read there alone."""
    chain = [index]
    while len(chain) < MAX_CHAIN and (producer := scope.producer.get(scope.nodes[chain[0]].input[0])) is not None:
        node = scope.nodes[producer]
        if not is_op(node, *VIEWS) and not (is_op(node, *reductions) and scope.other_readers(node.output[0]) is None):
            break
        chain.insert(0, producer)
    return chain


def axes_of(scope: Scope, index: int, values: dict[str, Any]) -> Ints | Reject:
    """The axes that a node is told, by an attribute or an input; empty where it is told none.  values: its attributes."""
    node = scope.nodes[index]
    axes = values.get("axes")
    if axes is None and len(node.input) > 1 and node.input[1]:
        axes = scope.constant_ints(node.input[1])
        if axes is None:
            return reject(scope, index, "axes", COMPUTED, "a constant")
    return tuple(axes or ())


def channel_order(scope: Scope, chain: list[int], rank: int) -> Ints | Reject:
    """The channels that a chain of views gives, in order; () for all as they were; a Reject where other axes change too."""
    x, last = scope.nodes[chain[0]].input[0], chain[-1]
    if len(scope.info(x).shape or range(rank + 2)) != rank + 2:
        return reject(scope, chain[0], "axes of its input", len(scope.info(x).shape or ()), rank + 2)
    view = before = whole(scope, x, rank)
    for index in chain:
        step = viewed(scope, index, view)
        if not isinstance(step, View):
            return step
        view = step
    axes = tuple(tuple(joined(list(spans))) for spans in view.axes)
    if axes == before.axes:
        return ()
    if (*axes[:1], *axes[2:]) == (*before.axes[:1], *before.axes[2:]):
        order = np.zeros(1, np.int64)
        for span in axes[1]:
            order = np.add.outer(order, span.step * np.arange(span.size or 1)).reshape(-1)
        return tuple(order.tolist())
    return reject(scope, last, BETWEEN, scope.nodes[last].op_type, "views that cancel, or shuffle channels")


def _reshaped(scope: Scope, index: int, view: View, given: Sequence[Dim] | None) -> View | Reject:
    """The spans in the shape of a Reshape, given or inferred; trailing axes that are all made one need no sizes."""
    target = scope.constant_ints(scope.nodes[index].input[1]) if len(scope.nodes[index].input) > 1 else None
    kept = len(target or ()) - 1
    if target == (0,) * kept + (-1,) and kept < len(view.axes):
        return replace(view, axes=(*view.axes[:kept], sum(view.axes[kept:], ())))
    shape = given or scope.info(scope.nodes[index].output[0]).shape
    spans = [span for axis in view.axes[1:] for span in axis]
    if shape is None or not all(isinstance(n, int) for n in shape[1:]) or any(span.size is None for span in spans):
        return reject(scope, index, "sizes of a Reshape", "unknown", "static sizes")
    axes = _regrouped(spans, [n for n in shape[1:] if isinstance(n, int)])
    if axes is None or [span.axis for span in view.axes[0]] != [0]:
        return reject(scope, index, "shape of a Reshape", list(shape), "axes split in two, or joined")
    return replace(view, axes=(view.axes[0], *axes))


def _regrouped(spans: list[Span], sizes: list[int]) -> list[Spans] | None:
    """The same positions in axes of these sizes; None where a span would be cut across."""
    left, axes = spans[::-1], []
    for size in sizes:
        axis: list[Span] = []
        while size > 1:
            span = left.pop() if left else None
            if span is None or span.size is None or span.size < 1:
                return None
            if size % span.size == 0:
                axis.append(span)
                size //= span.size
            elif span.size % size == 0:
                inner = span.size // size
                axis.append(Span(span.axis, size, span.step * inner))
                left.append(Span(span.axis, inner, span.step))
                size = 1
            else:
                return None
        axes.append(tuple(axis))
    return None if left or 0 in sizes else axes


def _space_to_depth(scope: Scope, index: int, view: View, values: dict[str, Any]) -> View | Reject:
    """Blocks of positions in front of the channels, row by row, or behind them."""
    (batch, channels, *spatial), block = view.axes, values["blocksize"]
    split = [_regrouped(list(spans), [math.prod(p.size or 0 for p in spans) // block, block]) for spans in spatial]
    outer = [axes[0] for axes in split if axes is not None]
    if len(outer) < len(spatial):
        return reject(scope, index, "sizes of a SpaceToDepth", "unknown, or not its blocks'", "multiples of the block size")
    inner = [span for axes in split if axes is not None for span in axes[1]]
    return replace(view, axes=(batch, (*channels, *inner) if values.get("mode") == b"CRD" else (*inner, *channels), *outer))


def joined(spans: list[Span]) -> list[Span]:
    """Spans, outer ones first, with those that continue one another made one."""
    found: list[Span] = []
    for span in spans:
        last = found[-1] if found and found[-1].axis == span.axis else None
        if last and last.size is not None and span.size is not None and last.step == span.step * span.size:
            found[-1] = Span(span.axis, last.size * span.size, span.step)
        else:
            found.append(span)
    return found


OPS: dict[str, LinearOp] = {
    "Identity": LinearOp(lambda scope, index, rank: Step(index, 0), idle=True),
    "Dropout": LinearOp(_dropout, idle=True),
    "BatchNormalization": LinearOp(_batch_normalization),
    "Add": LinearOp(_binary, binary=True, neutral=0, commutes=True),
    "Sub": LinearOp(_binary, binary=True, neutral=0),
    "Mul": LinearOp(_binary, binary=True, neutral=1, commutes=True),
    "Div": LinearOp(_binary, binary=True, neutral=1),
    "Neg": LinearOp(lambda scope, index, rank: Step(index, 0, Affine(np.array(-1.0), np.array(0.0)))),
    "Cast": LinearOp(_cast),
    "CastLike": LinearOp(_cast),
    "Pad": LinearOp(_pad, rearranges=True),
    "Slice": LinearOp(_slice, rearranges=True),
    "Gather": LinearOp(_gather, rearranges=True),
    "Split": LinearOp(_split, rearranges=True),
    **dict.fromkeys(("ReduceMean", "ReduceSum"), LinearOp(_reduction, rearranges=True)),
    **dict.fromkeys(("Expand", "Tile"), LinearOp(_same_shape, rearranges=True)),
    **dict.fromkeys(
        ("Concat", "Max", "Mean", "Min", "Sum"),
        LinearOp(lambda s, i, rank: Step(i, 0) if len(s.nodes[i].input) == 1 else None, binary=True, rearranges=True),
    ),
    **dict.fromkeys(VIEWS, LinearOp(_view, rearranges=True)),
}
"""Every linear operator: to add one is to add a line here, and the function that reads it."""
NONLINEAR = (
    *(name for name in UNARY if name not in OPS), "DepthToSpace", "DequantizeLinear", "GroupNormalization",
    "InstanceNormalization", "PRelu", "QuantizeLinear",
)  # fmt: skip
"""Operators that are looked through, beside the linear ones, though no average moves past them."""
