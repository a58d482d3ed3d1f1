# SPDX-License-Identifier: Apache-2.0
"""What may stand between a convolution and the pooling, and why other things may not.

| node | treatment | condition |
|---|---|---|
| Identity | dropped | |
| Dropout | dropped | (1) inference form, mask unread |
| BatchNormalization | affine per channel | (2) inference form |
| Add, Sub, Mul, Div | affine per channel | (3) the other operand does not vary over space; (4) no division by the data |
| Pad | added to the convolution's pads | (5) constant zeros on spatial axes, (6) as the convolution would give there |

An affine map per channel commutes with an average without padding.  With constant operands it is folded into weights
and bias, else the node moves behind the pooling.

`convpool.algebra.pads` has the algebra of a Pad.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from convpool.algebra.affine import IDENTITY, Affine
from convpool.algebra.geometry import Ints
from convpool.ir.index import Scope
from convpool.ir.protos import AttributeReference, attributes
from convpool.passes.base import Reject, reject

JOINS = ("Add", "Sub", "Sum", "Concat")
"""Operators over which a pooling distributes."""


@dataclass(frozen=True)
class Step:
    """One linear node.  operand: number of the input that carries the data.

    affine: what it does per channel, None if that is not constant; pads: what a Pad adds, begins then ends.
    """

    node: int
    operand: int
    affine: Affine | None = IDENTITY
    pads: Ints | None = None


def linear_step(scope: Scope, index: int, rank: int) -> Step | Reject | None:
    """What node `index` does as a linear map; a Reject where it does not qualify, None for any other operator.

    Raises AttributeReference.
    """
    op = op_of(scope.nodes[index])
    return None if op is None else op.step(scope, index, rank)


def known_step(scope: Scope, index: int, rank: int) -> Step | Reject | None:
    """`linear_step`, with a Reject where an attribute refers to one of the function around the node."""
    try:
        return linear_step(scope, index, rank)
    except AttributeReference as error:
        return reject(scope, index, "attributes", f"a reference to the function's '{error}'", "values")


def varies_over_space(scope: Scope, name: str, rank: int) -> bool:
    """Whether tensor `name`, broadcast to [N, C, spatial...], may differ between positions."""
    shape = scope.info(name).shape
    if shape is None or len(shape) > rank + 2:
        return True
    return any(dim != 1 for dim in shape[-rank:])


def _identity(scope: Scope, index: int, rank: int) -> Step:
    return Step(index, 0)


def _dropout(scope: Scope, index: int, rank: int) -> Step | Reject:
    node = scope.nodes[index]
    mask = node.output[1] if len(node.output) > 1 else ""
    if mask and (mask in scope.readers or mask in scope.outputs or mask in scope.captured):
        return reject(scope, index, "mask", "a reader", "none")
    if scope.opset >= 12 and len(node.input) > 2 and node.input[2]:
        training = scope.constant_ints(node.input[2])
        if training != (0,):
            return reject(scope, index, "training_mode", training or "a computed tensor", "false")
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


def _finite(scope: Scope, index: int, affine: Affine | None) -> Reject | None:
    """Why a map with infinities or NaN cannot move: the mean of infinities of both signs is NaN, an infinite mean not."""
    if affine is None or affine.is_finite:
        return None
    return reject(scope, index, "constant operands", "a division by 0, infinity or NaN", "finite numbers")


def _binary(scope: Scope, index: int, rank: int) -> Step | Reject | None:
    """None when neither operand is the same at every position: then it joins two feature maps."""
    node = scope.nodes[index]
    uniform = [not varies_over_space(scope, name, rank) for name in node.input]
    if not any(uniform):
        if node.op_type in ("Mul", "Div"):
            return reject(scope, index, "operands", "two that vary over space", "one that does not")
        return None
    constant = [u and scope.constant(name) is not None for u, name in zip(uniform, node.input, strict=True)]
    candidates = constant if any(constant) else uniform
    other = 1 if candidates[1] else 0
    if node.op_type == "Div" and other == 0:
        return reject(scope, index, "division by the data", "a nonlinear map", "division by a constant")
    affine = _constant_affine(scope, node.op_type, node.input[other], other, rank)
    return _finite(scope, index, affine) or Step(index, 1 - other, affine)


def _constant_affine(scope: Scope, op_type: str, name: str, position: int, rank: int) -> Affine | None:
    constant = scope.constant(name)
    if constant is None:
        return None
    shape = (1,) * (rank + 2 - len(constant.shape)) + constant.shape
    if shape[0] != 1:
        return None  # differs between samples
    value = constant.array().astype(np.float64).reshape(-1)
    value = value[0] if shape[1] == 1 else value
    one, zero = np.array(1.0), np.array(0.0)
    if op_type == "Add":
        return Affine(one, np.asarray(value))
    if op_type == "Sub":
        return Affine(one, np.asarray(-value)) if position == 1 else Affine(-one, np.asarray(value))
    if op_type == "Mul":
        return Affine(np.asarray(value), zero)
    with np.errstate(divide="ignore"):
        return Affine(np.asarray(1 / value), zero)


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
            return reject(scope, index, "pads or value of Pad", "a computed tensor", "constants")
        if constant is not None and constant.array().size != 1:
            return reject(scope, index, "value of Pad", f"shape {list(constant.shape)}", "one number")
        pads, fill = read, float(constant.array().reshape(-1)[0]) if constant is not None else 0.0
        if len(node.input) > 3 and node.input[3]:
            axes = scope.constant_ints(node.input[3])
            if axes is None:
                return reject(scope, index, "axes of Pad", "a computed tensor", "a constant")
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
    mode = attributes(scope.nodes[index]).get("mode", b"constant").decode(errors="replace")
    if any(pads) and mode != "constant":
        return reject(scope, index, "mode of Pad", mode, "constant")
    if any(pads) and fill != 0:
        return reject(scope, index, "value of Pad", fill, 0)
    half = len(pads) // 2
    if any((*pads[:2], *pads[half : half + 2])):
        return reject(scope, index, "pads of Pad", list(pads), "zeros on the batch and channel axes")
    return Step(index, 0, IDENTITY, (*pads[2:half], *pads[half + 2 :]))


@dataclass(frozen=True)
class LinearOp:
    """A linear operator: how a node of it is read, and what every search that meets one has to know.

    step: what a node does as a linear map; its arguments are those of `linear_step`.  binary: either input may carry the data,
    else the first.  pads: it changes spatial sizes, so that no node of the operator fuses it.  idle: it hands its input on as
    it is, at inference.  neutral: the constant operand with which it does; commutes: whichever input that is.
    """

    step: Callable[[Scope, int, int], Step | Reject | None]
    binary: bool = False
    pads: bool = False
    idle: bool = False
    neutral: float | None = None
    commutes: bool = False


OPS: dict[str, LinearOp] = {
    "Identity": LinearOp(_identity, idle=True),
    "Dropout": LinearOp(_dropout, idle=True),
    "BatchNormalization": LinearOp(_batch_normalization),
    "Add": LinearOp(_binary, binary=True, neutral=0, commutes=True),
    "Sub": LinearOp(_binary, binary=True, neutral=0),
    "Mul": LinearOp(_binary, binary=True, neutral=1, commutes=True),
    "Div": LinearOp(_binary, binary=True, neutral=1),
    "Pad": LinearOp(_pad, pads=True),
}
"""Every linear operator: to add one is to add a line here, and the function that reads it."""


def op_of(node: NodeProto) -> LinearOp | None:
    """The node's operator, None if it is none of `OPS`."""
    return OPS.get(node.op_type) if node.domain in ("", "ai.onnx") else None


def is_map(node: NodeProto) -> bool:
    """Whether the node's operator may be a map per channel."""
    op = op_of(node)
    return op is not None and not op.pads
