# SPDX-License-Identifier: Apache-2.0
"""Sizes that shape inference leaves open: where they come from, and the factors of a Resize by them.

Each size is a term: a number, or `factor * ((n + offset) // divisor) + added`, where n is a size of some tensor.  The sizes of
a map are traced back to such terms, through convolutions, poolings, Pads and what acts on each element.  Equal terms are equal
sizes whatever the inputs are: an Add of such maps broadcasts none of them.  So is twice the size of a pooled map in a U-Net a
factor of 2, also where the input has an odd size.  The size of the skip connection is none: it is n, and the map has n // 2.

| node | sizes of its result |
|---|---|
| Conv, AveragePool, MaxPool, ConvAvgPool; Pad | those of its input, by windows, plus pads |
| Resize, ConvTranspose, DepthToSpace; SpaceToDepth | those of its input, times whole factors; over one |
| elementwise, or along batch and channels alone | those of its input |
| elementwise, of several; Concat along other axes | those of the inputs of more than one element, if they are the same |
| Reshape to sizes that are computed | these; one given as -1 by the number of elements |
| MatMul by a matrix | those of its input, but for the last |
| any other | known from here on only as its own |

Casts to floating point and back, and rounding, do not change what is a whole number anyway: a size times a whole factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from onnx import NodeProto

from convpool.algebra.expand import UpsampleSpec
from convpool.algebra.geometry import COMPUTED, NOMINAL_SIZE, ConvSpec, PoolSpec, Refusal, windows
from convpool.ir.index import Scope
from convpool.ir.protos import INTEGERS, WIDE, attributes, is_op, known_attributes, takes_more
from convpool.ir.schema import is_operator, layout_of, specs_of
from convpool.rules.base import Reject, reject
from convpool.rules.linear import BROADCASTING, UNARY, Step, op_of, order_of, pad_numbers, slice_numbers, step_or_reject

MAX_DEPTH = 96
"""Nodes that a size is traced back through at most, of maps and of what computes sizes together."""
MAX_TRIED = 1024
"""Largest size that `may_hold` tries."""
MERSENNE = (31, 61, 89, 107, 127, 521, 607)
"""Exponents of the primes that stand for open sizes."""
OPEN = 2 ** MERSENNE[0] - 1
"""The least of them: more than any size that is known."""
WHOLE_SHAPE = -1
"""The axis under which `Scope.traced` has the elements of a vector."""
KEEPING = (
    *UNARY, "BatchNormalization", "DequantizeLinear", "GroupNormalization", "InstanceNormalization", "LayerNormalization",
    "QuantizeLinear", "Softmax",
)  # fmt: skip
"""Operators whose result has the shape of the first input."""


@dataclass(frozen=True)
class SizeOf:
    """A size n of a tensor in a term: factor * ((n + offset) // divisor) + added, where `added` is from 0 to below the factor."""

    tensor: str
    axis: int
    factor: Fraction = Fraction(1)
    offset: int = 0
    divisor: int = 1
    added: Fraction = Fraction(0)

    def __str__(self) -> str:
        n = f"size {self.axis} of '{self.tensor}'"
        n = f"({n} + {self.offset})" if self.offset else n
        n = f"{n} // {self.divisor}" if self.divisor > 1 else n
        n = n if self.factor == 1 else f"{self.factor} * ({n})"
        return f"{n} + {self.added}" if self.added else n

    def at(self, n: int) -> Fraction:
        """The number that the term is for a size n."""
        return self.factor * ((n + self.offset) // self.divisor) + self.added

    def times(self, factor: Fraction) -> SizeOf:
        return replace(self, factor=self.factor * factor, added=self.added * factor)

    def plus(self, number: int) -> SizeOf | None:
        """The term plus a number; None where that is no term."""
        steps, rest = divmod(self.added + number, self.factor) if self.factor else (0, None)
        return None if rest is None else replace(self, offset=self.offset + steps * self.divisor, added=rest)

    def over(self, number: int) -> SizeOf | None:
        """The term divided by a number above 0 and rounded down; None where that is no term."""
        if self.factor == 1 and not self.added:
            return replace(self, divisor=self.divisor * number)
        whole = self.factor / number
        return replace(self, factor=whole, added=Fraction(self.added // number)) if whole.denominator == 1 else None


Term = Fraction | SizeOf | None
"""A number, a size in a term, or neither."""


def scales_of(scope: Scope, index: int, rank: int, depth: int = 0) -> tuple[Fraction | None, ...] | Reject:
    """The factor of each axis of a Resize or Upsample; None for one that is not known.  Raises AttributeReference."""
    node, values = scope.nodes[index], attributes(scope.nodes[index])
    x, inputs = node.input[0], [*node.input[1:], "", "", ""]
    shape, given = scope.info(x).shape, values.get("axes", range(rank + 2))
    if shape is not None and len(shape) != rank + 2:
        return reject(scope, index, "axes of the map", len(shape), rank + 2)
    if not all(-rank - 2 <= axis < rank + 2 for axis in given):
        return reject(scope, index, "axes", list(given), f"some of {rank + 2}")
    axes = [axis % (rank + 2) for axis in given]
    if values.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
        return reject(scope, index, "keep_aspect_ratio_policy", values["keep_aspect_ratio_policy"].decode(), "stretch")
    name = inputs[0] if scope.opset < 11 else inputs[1]
    constant = scope.constant(name) if name else None
    if "scales" not in values and name and constant is None:
        return reject(scope, index, "scales", COMPUTED, "a constant")
    numbers = values.get("scales") or ([] if constant is None else constant.array().reshape(-1).tolist())
    if not np.isfinite(numbers).all():
        return reject(scope, index, "scales", list(numbers), "finite numbers")
    found: list[Fraction | None] = [Fraction(number) for number in numbers]
    if not found and inputs[2]:
        sizes = size_terms(scope, inputs[2], depth)
        if sizes is None:
            return reject(scope, index, "sizes", COMPUTED, "the input's sizes times constants")
        found = [_ratio(scope, size, x, axis, depth) for size, axis in zip(sizes, axes, strict=False)]
    if len(found) != len(axes):
        return reject(scope, index, "scales", len(found), f"{len(axes)} numbers")
    full = dict(zip(axes, found, strict=True))
    return tuple(full.get(axis, Fraction(1)) for axis in range(rank + 2))


def _ratio(scope: Scope, term: Term, x: str, axis: int, depth: int = 0) -> Fraction | None:
    """The number of times that a size is that of `x` on an axis; None where it may be any."""
    if not isinstance(term, SizeOf):
        size = _origin(scope, SizeOf(x, axis))
        return term / size if term is not None and isinstance(size, int) and size > 0 else None
    own = traced(scope, x, axis, depth)
    same = (term.offset, term.divisor, term.added * own.factor) == (own.offset, own.divisor, own.added * term.factor)
    return term.factor / own.factor if same and own.factor > 0 and _origin(scope, term) == _origin(scope, own) else None


def _sizes_beside(scope: Scope, index: int, rank: int) -> dict[int, tuple[Term, SizeOf]]:
    """The computed sizes of a Resize whose factors are not known, and those of its map, by axis."""
    node = scope.nodes[index]
    terms = size_terms(scope, node.input[3]) if len(node.input) > 3 and node.input[3] else None
    axes = [axis % (rank + 2) for axis in (known_attributes(node) or {}).get("axes", range(rank + 2))]
    return {
        axis: (term, traced(scope, node.input[0], axis))
        for term, axis in zip(terms or (), axes, strict=False)
        if axis > 1 and _ratio(scope, term, node.input[0], axis) is None
    }


def unknown_ratios(scope: Scope, index: int, rank: int) -> str:
    """The spatial sizes of a Resize over those of its map, in words, for a reason."""
    shape = scope.info(scope.nodes[index].input[0]).shape or (None,) * (rank + 2)
    shown = [
        f"{'unknown' if term is None else term} over {size if isinstance(size := shape[axis], int) else own}"
        for axis, (term, own) in _sizes_beside(scope, index, rank).items()
        if not isinstance(term, Fraction)
    ]
    return ", ".join(dict.fromkeys(shown))


def rough_scales(scope: Scope, index: int, rank: int, scales: Sequence[Fraction | None]) -> list[Fraction] | None:
    """Spatial factors, those of large maps where `scales` depend on what is rounded or open; None where one may be any."""
    found, beside = [], _sizes_beside(scope, index, rank) if None in scales else {}
    small = scope.info(scope.nodes[index].input[0]).shape or ()
    for axis, scale in enumerate(scales, 2):
        term, own = beside.get(axis, (None, None))
        if scale is None and isinstance(term, SizeOf) and own is not None and own.factor > 0:
            if _origin(scope, term) == _origin(scope, own):
                scale = term.factor / term.divisor * own.divisor / own.factor
        if scale is None and small[axis : axis + 1] == (1,):  # one pixel becomes any number of them
            scale = Fraction(NOMINAL_SIZE)
        if scale is None or scale <= 0:
            return None
        found.append(scale)
    return found


def may_hold(scope: Scope, index: int, rank: int, factors: Sequence[int]) -> bool:
    """Return True if the computed sizes of a Resize are those of its map times the factors for some input up to MAX_TRIED."""
    beside = _sizes_beside(scope, index, rank)
    return all(
        isinstance(term, SizeOf) and any(term.at(n) == own.at(n) * factors[axis - 2] > 0 for n in range(MAX_TRIED))
        for axis, (term, own) in beside.items()
    )


# ---- sizes of maps ------------------------------------------------------------------------------------------------------


def same_size(scope: Scope, names: Sequence[str], rank: int, first: int = 2) -> bool:
    """Return True if the tensors, all of rank `rank` + 2, have provably equal sizes from axis `first` on, by shape or origin."""
    ranks = {len(shape) for name in names if (shape := scope.info(name).shape) is not None}
    return ranks <= {rank + 2} and len({tuple(_identity(scope, name, i) for i in range(first, rank + 2)) for name in names}) == 1


def _identity(scope: Scope, name: str, axis: int) -> object:
    """A number, or a term with the name of its size in place of the tensor."""
    if isinstance(size := _origin(scope, SizeOf(name, axis)), int):
        return size
    term = traced(scope, name, axis)
    return _origin(scope, term), term.factor, term.offset, term.divisor, term.added


def _origin(scope: Scope, term: SizeOf) -> object:
    """The size in a term, or its name, which is of one size in all of a scope."""
    known = (scope.info(term.tensor).shape or (None,) * (term.axis + 1))[term.axis]
    return known if known is not None else (term.tensor, term.axis)


def size_number(scope: Scope, term: Term, primes: dict[object, int], depth: int = 0) -> int | None:
    """A number in place of a term, the same for equal ones: a multiple of an open size's own prime, which tells products of
    sizes apart.  primes: those given out, to which it adds; None where there are no more."""
    if isinstance(term, SizeOf):
        key = _origin(scope, term), term.offset, term.divisor
        number = _left_over(scope, term, primes, depth + 1) if depth < 2 and key[1:] == (0, 1) else None
        if number is None and key not in primes and len(primes) < len(MERSENNE):
            primes[key] = 2 ** MERSENNE[len(primes)] - 1
        number = number or primes.get(key)
        term = term.factor * number if number is not None and term.factor > 0 and not term.added else None
    return int(term) if term is not None and term.denominator == 1 else None


def _left_over(scope: Scope, size: SizeOf, primes: dict[object, int], depth: int) -> int | None:
    """The number of a size that a Reshape is told as -1, by those of its input."""
    index = scope.made_by(size.tensor, "Reshape")
    if index is None:
        return None
    own, told = shape_terms(scope, scope.nodes[index].input[0]), size_terms(scope, scope.nodes[index].input[1])
    if own is None or told is None or [axis for axis, term in enumerate(told) if term == -1] != [size.axis]:
        return None
    copied = dict(enumerate(own))
    sides = own, [copied.get(axis) if term == 0 else term for axis, term in enumerate(told) if term != -1]
    whole, rest = (math.prod(size_number(scope, term, primes, depth) or 0 for term in side) for side in sides)
    return whole // rest if min(whole, rest) > 0 and whole % rest == 0 else None


def traced(scope: Scope, tensor: str, axis: int, depth: int = 0) -> SizeOf:
    """A size of a tensor as a term in that of a tensor in front of it."""
    key = tensor, axis
    if key not in scope.traced:
        if not depth:
            _trace_before(scope, tensor, axis)
        scope.traced[key] = SizeOf(tensor, axis)  # ends the search on a graph with a cycle
        index = scope.producer.get(tensor)
        if index is not None and depth < MAX_DEPTH:
            scope.traced[key] = _traced_through(scope, tensor, index, axis, depth + 1) or scope.traced[key]
    return scope.traced[key]


def _trace_before(scope: Scope, tensor: str, axis: int) -> None:
    """Trace all that is in front of a tensor, in order: so no search goes deep."""
    found: set[int] = set()
    pending = [tensor]
    while pending:
        index = scope.producer.get(pending.pop())
        if index is not None and index not in found and (scope.nodes[index].output[0], axis) not in scope.traced:
            found.add(index)
            pending.extend(scope.nodes[index].input)
    for name in (scope.nodes[index].output[0] for index in sorted(found)):
        for place in {axis, *range(len(scope.info(name).shape or ()))}:
            traced(scope, name, place, 1)


def _traced_through(scope: Scope, tensor: str, index: int, axis: int, depth: int) -> SizeOf | None:
    node, values = scope.nodes[index], known_attributes(scope.nodes[index])
    shape = scope.info(node.input[0]).shape if node.input else None
    if values is None or not shape or tensor != node.output[0] and not is_op(node, "Split"):
        return None
    x, rank = node.input[0], len(shape) - 2
    kept = is_op(node, *KEEPING) or is_op(node, "Split") and values.get("axis", 0) % len(shape) != axis
    kept = kept or is_op(node, "MatMul") and axis < len(shape) - 1 and len(scope.info(node.input[1]).shape or ()) == 2
    if kept and axis < len(shape):
        return traced(scope, x, axis, depth)
    if is_op(node, *BROADCASTING, "Where") or is_op(node, "Concat") and values.get("axis", 0) % len(shape) != axis:
        found = {traced(scope, name, place, depth) for name, place in _wide(scope, node, axis)}
        return found.pop() if len(found) == 1 else None
    if axis >= len(shape) and not is_op(node, "Reshape"):  # all in front of a map is traced, also what has fewer axes
        return None
    if is_op(node, "Conv", "ConvTranspose", "MaxPool", "AveragePool") or is_operator(node) and not layout_of(node):
        if axis < 2:
            return None if axis and not is_op(node, "MaxPool", "AveragePool") else traced(scope, x, axis, depth)
        return _through_windows(scope, index, values, axis - 2, rank, traced(scope, x, axis, depth))
    if is_op(node, "DepthToSpace", "SpaceToDepth") and axis > 1 and (block := values.get("blocksize", 0)) > 0:
        size = traced(scope, x, axis, depth)
        return size.times(Fraction(block)) if is_op(node, "DepthToSpace") else size.over(block)
    if is_op(node, "Pad"):
        numbers = pad_numbers(scope, index, rank)
        return None if isinstance(numbers, Reject) else traced(scope, x, axis, depth).plus(sum(numbers[0][axis :: rank + 2]))
    if is_op(node, "Resize", "Upsample") and rank > 0:
        factors = scales_of(scope, index, rank, depth)
        if isinstance(factors, Reject):
            return None
        if (factor := factors[axis]) is not None:
            size = traced(scope, x, axis, depth)
            if factor.numerator == 1:  # a half; float32 holds a third as another number, which a runtime rounds
                return size.over(factor.denominator)
            return size.times(factor) if factor.denominator == 1 else None
        axes = [number % (rank + 2) for number in values.get("axes", range(rank + 2))]
        return _sized(size_terms(scope, node.input[3], depth), axes.index(axis))
    if is_op(node, "Reshape"):
        terms = size_terms(scope, node.input[1], depth)
        copied = terms is not None and axis < min(len(terms), len(shape)) and terms[axis] == 0 and not values.get("allowzero", 0)
        if (found_there := traced(scope, x, axis, depth) if copied else _sized(terms, axis)) is not None:
            return found_there
    if is_op(node, "Transpose"):
        order = order_of(values, len(shape))
        return None if order is None else traced(scope, x, order[axis], depth)
    step = step_or_reject(scope, index, rank) if rank > 0 and axis > 1 and op_of(node) is not None else None
    if not isinstance(step, Step):
        return None
    return traced(scope, scope.nodes[(index, *step.before)[-1]].input[step.operand], axis, depth)


def _sized(terms: list[Term] | None, axis: int) -> SizeOf | None:
    """The term of an axis, where a tensor gets its shape from these."""
    term = terms[axis] if terms is not None and axis < len(terms) else None
    return term if isinstance(term, SizeOf) else None


def _wide(scope: Scope, node: NodeProto, axis: int) -> list[tuple[str, int]]:
    """The operands that give a broadcasting operator's result the size of an axis, each with its own; none for unknown ranks."""
    shapes = {name: shape for name in node.input if (shape := scope.info(name).shape) is not None}
    if len(shapes) < len(set(node.input)):
        return []
    rank = max(map(len, shapes.values()), default=0)
    places = [(name, axis - rank + len(shape)) for name, shape in shapes.items()]
    return [(name, place) for name, place in places if 0 <= place < len(shapes[name]) and shapes[name][place] != 1]


def _through_windows(scope: Scope, index: int, values: dict, i: int, rank: int, size: SizeOf | None) -> SizeOf | None:
    """The number of windows of a Conv, a pooling, or a node of the operator; the size of what those of a ConvTranspose cover."""
    node, ceiling = scope.nodes[index], values.get("ceil_mode", 0)
    specs: Sequence[PoolSpec | ConvSpec | UpsampleSpec] = specs_of(values) if is_operator(node) else ()
    if not specs:
        weight = scope.info(node.input[1]).shape if is_op(node, "Conv", "ConvTranspose") else None
        kernel = values.get("kernel_shape") or (weight[2:] if weight is not None else ())
        if values.get("auto_pad", b"").startswith(b"SAME"):  # as many as of one element
            kernel, ceiling, values = (1,) * rank, 0, {**values, "dilations": ()}
        if len(kernel) != rank or not all(isinstance(k, int) for k in kernel):
            return None
        found = windows({**values, "kernel_shape": kernel}, rank)
        if isinstance(found, Refusal):
            return None
        specs = (found,)
    for spec in specs:
        if isinstance(spec, UpsampleSpec):
            size = size and size.times(Fraction(spec.factors[i]))
            continue
        extent, stride, begin, end = spec.extents[i], spec.strides[i], spec.pads[i], spec.pads[rank + i]
        if is_op(node, "ConvTranspose"):  # (n - 1) * stride + extent + output_padding - pads
            more = values.get("output_padding") or (0,) * rank
            told = values.get("output_shape") or len(more) != rank or values.get("auto_pad", b"NOTSET") != b"NOTSET"
            return None if told or size is None else size.times(Fraction(stride)).plus(extent + more[i] - begin - end - stride)
        if ceiling and extent < stride + end:  # then the last window may start behind the map, and is none
            return None
        covered = size and size.plus(begin + end - extent + (stride - 1) * ceiling)
        steps = covered and covered.over(stride)
        size = steps and steps.plus(1)
    return size


# ---- sizes that are computed --------------------------------------------------------------------------------------------


def size_terms(scope: Scope, name: str, depth: int = 0) -> list[Term] | None:
    """The elements of a vector or number that is computed from shapes and constants; None where it comes about in another way."""
    if (name, WHOLE_SHAPE) not in scope.traced:
        if not depth:
            _trace_before(scope, name, 0)
        scope.traced[name, WHOLE_SHAPE] = None  # ends the search on a graph with a cycle
        scope.traced[name, WHOLE_SHAPE] = _computed_terms(scope, name, depth)
    return scope.traced[name, WHOLE_SHAPE]


def _computed_terms(scope: Scope, name: str, depth: int) -> list[Term] | None:
    constant = scope.constant(name)
    if constant is not None:
        array = constant.array()
        return [Fraction(float(value)) for value in array.reshape(-1)] if array.size <= 8 and np.isfinite(array).all() else None
    index = scope.producer.get(name)
    if index is None or depth > MAX_DEPTH:
        return None
    node = scope.nodes[index]
    if any(attribute.ref_attr_name for attribute in node.attribute):
        return None
    if is_op(node, "Shape"):
        terms, values = shape_terms(scope, node.input[0], depth + 1), attributes(node)
        return None if terms is None else terms[slice(values.get("start"), values.get("end"))]
    in_order = is_op(node, "Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze")
    if not in_order and any(len(scope.info(source).shape or ()) > 1 for source in node.input):  # of a matrix
        return None
    if is_op(node, "Concat"):
        parts = [size_terms(scope, source, depth + 1) for source in node.input]
        return None if any(part is None for part in parts) else [term for part in parts for term in part or ()]
    if is_op(node, "Add", "Div", "Mul", "Sub"):
        return _combined(scope, node, *(size_terms(scope, source, depth + 1) for source in node.input))
    if not is_op(node, "Identity", "Unsqueeze", "Squeeze", "Cast", "Floor", "Ceil", "Round", "Reshape", "Gather", "Slice"):
        return None
    terms = size_terms(scope, node.input[0], depth + 1)
    if terms is None:
        return None
    if is_op(node, "Gather"):
        picks = scope.constant_ints(node.input[1])
        ok = picks is not None and all(-len(terms) <= i < len(terms) for i in picks)
        return [terms[i] for i in picks or ()] if ok else None
    if is_op(node, "Slice"):
        starts, ends, axes, steps = slice_numbers(scope, index)
        known = [numbers[0] for numbers in (starts, ends, steps) if numbers is not None and len(numbers) == 1]
        more = takes_more(starts or (), ends or (), axes or (), steps or ())
        return terms[slice(*known)] if len(known) == 3 and known[2] and not more else None
    if is_op(node, "Cast") and attributes(node)["to"] not in WIDE:
        return None
    if is_op(node, "Cast", "Floor", "Ceil", "Round"):
        numbers = [(term.factor, term.added) if isinstance(term, SizeOf) else (term,) for term in terms]
        whole = [all(number is not None and number.denominator == 1 for number in both) for both in numbers]
        return [term if kept else None for term, kept in zip(terms, whole, strict=True)]
    may_be_matrix = is_op(node, "Reshape", "Unsqueeze") and len(terms) > 1 and scope.info(name).shape is None
    return None if may_be_matrix else terms


def shape_terms(scope: Scope, name: str, depth: int = 0) -> list[Term] | None:
    """The sizes of a tensor; None where their number is unknown."""
    shape, index = scope.info(name).shape, scope.producer.get(name)
    if shape is None and index is not None and is_op(scope.nodes[index], "Reshape"):
        terms = size_terms(scope, scope.nodes[index].input[1], depth)
        return None if any(isinstance(term, Fraction) and term < 1 for term in terms or ()) else terms
    if shape is None:
        return None
    return [Fraction(size) if isinstance(size, int) else traced(scope, name, axis, depth) for axis, size in enumerate(shape)]


def _combined(scope: Scope, node: NodeProto, left: list[Term] | None, right: list[Term] | None) -> list[Term] | None:
    if not left or not right or len(left) != len(right) and 1 not in (len(left), len(right)):
        return None
    count = max(len(left), len(right))
    pairs = zip(left * (count // len(left)), right * (count // len(right)), strict=True)
    return [_arithmetic(node.op_type, a, b, scope.info(node.output[0]).elem_type in INTEGERS) for a, b in pairs]


def _arithmetic(operator: str, a: Term, b: Term, whole: bool) -> Term:
    """Two terms added, subtracted, multiplied or divided.  whole: of integers, where a division rounds towards zero."""
    if a is None or b is None:
        return None
    if operator in ("Add", "Mul") and isinstance(b, SizeOf):
        a, b = b, a
    if isinstance(b, SizeOf):
        return None
    if operator == "Mul":
        return a.times(b) if isinstance(a, SizeOf) else a * b
    if not whole or b.denominator != 1 or operator == "Div" and b <= 0:
        return None
    if operator == "Div":
        if isinstance(a, SizeOf):  # which is not below zero, for a size of at least 1
            return a.over(int(b)) if a.offset >= -1 and a.factor > 0 else None
        return Fraction(a // b) if a >= 0 and a.denominator == 1 else None
    number = b if operator == "Add" else -b
    return a.plus(int(number)) if isinstance(a, SizeOf) else a + number


def groups_channels(scope: Scope, chain: Sequence[int], rank: int) -> bool:
    """Return True if Reshapes around a node, `chain` from the last on, go to [N, groups, rest] and back to the shape before."""
    x, there, back = scope.nodes[chain[2]].input[0], scope.nodes[chain[2]].output[0], scope.nodes[chain[0]].output[0]
    shape, grouped = scope.info(x).shape, scope.info(there).shape
    if shape is None or grouped is None or len(shape) != rank + 2 or len(grouped) != 3:
        return False
    if not isinstance(shape[1], int) or not isinstance(grouped[1], int) or grouped[1] <= 0 or shape[1] % grouped[1]:
        return False
    kept = [(there, 0), *((back, axis) for axis in range(len(scope.info(back).shape or shape)))]
    return len(kept) == rank + 3 and all(_identity(scope, name, axis) == _identity(scope, x, axis) for name, axis in kept)
