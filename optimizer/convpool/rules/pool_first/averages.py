# SPDX-License-Identifier: Apache-2.0
"""Averages over windows, however a model writes them: `SPELLINGS`, at the end, has a line for each, with a recogniser.

| written as | window |
|---|---|
| AveragePool | kernel_shape |
| GlobalAveragePool | the feature map |
| a box filter: a depthwise Conv with equal weights | its kernel |
| the mean of strided Slices (`means`) | one element per Slice |
| ReduceMean, ReduceSum, around them what rearranges (`means`) | what is reduced, per axis |
| Resize to one half | 2 |

A box filter is a depthwise Conv whose weights are all one number w: it gives w times the number of its taps, times the
average.  Zeros of its pads would count, as those of an AveragePool with count_include_pad = 1.

The first three are exact to move when (1) no window reaches into padding, given or automatic, since outside the feature map
stand zeros and not what the convolution would give there, and (2) all windows lie inside: ceil_mode adds no partial one, and
the window fits the map.  A box filter besides has (3) no bias.

A Resize to one half is an average too.  Linear interpolation at the positions of `half_pixel`, 2 i + 1/2, is the mean of
elements 2 i and 2 i + 1: an AveragePool of window and stride 2.  It is when (1) each spatial size is halved or kept, and batch
and channels are kept; (2) the mode is linear, without antialias; (3) the coordinates are half_pixel, or pytorch_half_pixel
where more than one element remains (that takes the first element else); (4) the sizes halved are static and even, since
runtimes differ in the scale that they take for odd ones.

An average of an average is one where their windows make one, and nothing else reads what is between (`_composed`): per axis,
of window k, stride s and dilation d, behind it k', s', d',

    mean_j mean_l x[(i s' + d' j) s + d l],    one window of k k' elements where d' s = k d, or k = 1, or k' = 1
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from onnx import TensorProto, helper

from convpool.algebra.geometry import Ints, PoolSpec, Refusal, windows
from convpool.algebra.parts import holds
from convpool.ir.index import Scope
from convpool.ir.protos import FLOATS, STANDARD_DOMAINS, AttributeReference, attributes, is_op, known_attributes
from convpool.rules.base import Reject, reject, rejection, spatial_size
from convpool.rules.convs import Pooling, conv_leaf
from convpool.rules.pool_first import means
from convpool.rules.sizes import scales_of

MayBe = Callable[[Scope, int], "str | None"]
"""The tensor that would be averaged if a node ends an average; cheap, and no conditions checked."""
Recognise = Callable[[Scope, int, int, "Ints | None"], "Pooling | Reject | None"]
"""The average that a node ends; a Reject where it is one but not exact to move, None where it is none.

Arguments: the scope; the node; the number of spatial axes; the spatial sizes of the tensor averaged, None where any is unknown.
Raises AttributeReference.
"""


@dataclass(frozen=True)
class Spelling:
    """A way to write an average, which ends in `ops`; kind: its name in reports until it is recognised."""

    kind: str
    ops: tuple[str, ...]
    may_be: MayBe
    recognise: Recognise


@dataclass(frozen=True)
class PossibleAverage:
    """A possible average of the tensor `input`, written as `spelling` says and ended by node `root`."""

    spelling: Spelling
    root: int
    input: str


def possible_averages(scope: Scope) -> Iterator[tuple[PossibleAverage, ...]]:
    """Yield possible averages by their ends, each with those right before it, last first."""
    found: dict[int, PossibleAverage] = {}
    for index, node in enumerate(scope.nodes):
        for spelling in SPELLINGS_OF.get(node.op_type, ()) if node.domain in STANDARD_DOMAINS else ():
            if (tensor := spelling.may_be(scope, index)) is not None:
                found[index] = PossibleAverage(spelling, index, tensor)
                break
    before = {index: producer for index, item in found.items() if (producer := _before(scope, item)) in found}
    for index in sorted(found.keys() - set(before.values())):
        chain = [found[index]]
        while chain[-1].root in before:
            chain.append(found[before[chain[-1].root]])
        yield tuple(chain)


def _before(scope: Scope, item: PossibleAverage) -> int | None:
    """The node that gives what is averaged to that average alone; no Conv, which takes another average in front of itself."""
    producer = scope.producer.get(item.input)
    if producer is None or is_op(scope.nodes[producer], "Conv"):
        return None
    readers = scope.readers.get(item.input, ())
    alone = scope.other_readers(item.input) is None
    slices = item.spelling.kind == "slice_mean" and all(is_op(scope.nodes[reader], "Slice") for reader in readers)
    return producer if alone or slices else None


def recognise(scope: Scope, chain: Sequence[PossibleAverage], rank: int) -> Pooling | Reject | None:
    """The average that a chain makes from the one nearest to the convolution, chain[-1], outwards, as far as it is one window.
    chain: of `possible_averages`, the last one first.  rank: number of spatial axes.  Raises AttributeReference."""
    size = spatial_size(scope, chain[-1].input, rank)
    found = _single(scope, chain[-1], rank, size)
    if found is None and len(chain) > 1:
        return recognise(scope, chain[:-1], rank)
    for item in reversed(chain[:-1]):
        if not isinstance(found, Pooling) or found.spec is None or found.squeeze or found.input != chain[-1].input:
            break
        # By the window's own arithmetic: shape inference does not see through all that gives a Slice its bounds.
        between = None if size is None else found.spec.output_size(size)
        outer = _single(scope, item, rank, between)
        both = _composed(scope, found, outer, size, between) if isinstance(outer, Pooling) else None
        if both is None:
            break
        found = both
    return found


def _single(scope: Scope, item: PossibleAverage, rank: int, size: Ints | None) -> Pooling | Reject | None:
    found = item.spelling.recognise(scope, item.root, rank, size)
    if isinstance(found, Pooling) and found.factor != 1:
        elem_type = scope.info(found.input).elem_type
        if elem_type not in FLOATS:
            kind = (TensorProto.DataType.Name(elem_type), "floating point") if elem_type else ("unknown", "a known one")
            return reject(scope, item.root, "type of the average", *kind)
        if not holds(np.array(found.factor), helper.tensor_dtype_to_np_dtype(elem_type)):
            return reject(scope, item.root, "factor of the average", found.factor, "a number that the type has")
    return found


def _composed(scope: Scope, inner: Pooling, outer: Pooling, size: Ints | None, between: Ints | None) -> Pooling | None:
    """`outer` of `inner`, of maps of these sizes, as one average; None where it is none or another node reads between."""
    if inner.spec is None or inner.output != outer.input or scope.read_outside(outer.input, outer.nodes):
        return None
    window = outer.spec
    if window is None:
        if between is None:
            return None
        window = PoolSpec(between, between, (0,) * len(between) * 2, (1,) * len(between))
    spec = _one_window(inner.spec, window)
    if spec is None:
        return None
    whole = outer.spec is None and spec.kernel_shape == size
    return replace(
        outer,
        nodes=tuple(sorted((*inner.nodes, *outer.nodes))),
        input=inner.input,
        kind=outer.kind if whole or outer.kind != "global" else "mean",
        spec=None if whole else spec,
        factor=inner.factor * outer.factor,
    )


def _one_window(inner: PoolSpec, outer: PoolSpec) -> PoolSpec | None:
    """The window of `outer` behind `inner`; None where their elements do not follow one another at one distance."""
    kernel, dilations = [], []
    for i in range(inner.rank):
        k, s, d = inner.kernel_shape[i], inner.strides[i], inner.dilations[i]
        if k > 1 and outer.kernel_shape[i] > 1 and outer.dilations[i] * s != k * d:
            return None
        kernel.append(k * outer.kernel_shape[i])
        dilations.append(d if k > 1 else outer.dilations[i] * s)
    strides = tuple(a * b for a, b in zip(inner.strides, outer.strides, strict=True))
    return PoolSpec(tuple(kernel), strides, outer.pads, tuple(d if k > 1 else 1 for k, d in zip(kernel, dilations, strict=True)))


def _input(scope: Scope, index: int) -> str:
    """The tensor that the pooling `index` averages."""
    return scope.nodes[index].input[0]


def average_pool(scope: Scope, index: int, rank: int, size: Ints | None) -> Pooling | Reject:
    """An AveragePool whose windows lie inside of the map, or why they do not."""
    node = scope.nodes[index]
    values = attributes(node)
    if len(values["kernel_shape"]) != rank:
        return reject(scope, index, "kernel_shape", tuple(values["kernel_shape"]), f"{rank} dimensions, as the convolution has")
    spec = windows(values, rank)
    if isinstance(spec, Refusal):
        return rejection(scope, index, spec)
    auto_pad = values.get("auto_pad", b"NOTSET").decode(errors="replace")
    ceil = bool(values.get("ceil_mode", 0)) and not auto_pad.startswith("SAME")
    if (wrong := _padded(scope, index, spec, size, ceil)) is not None:
        return wrong
    known = list(zip(size or (), spec.extents, spec.strides, strict=size is not None))
    if auto_pad.startswith("SAME"):
        # SAME gives ceil(size / stride) windows; none of them is padded where they all fit.
        if size is None and max(*spec.extents, *spec.strides) > 1:
            return reject(scope, index, "auto_pad", f"{auto_pad} on an unknown size", "no padding")
        for n, window, stride in known:
            if (math.ceil(n / stride) - 1) * stride + window > n:
                return reject(scope, index, "auto_pad", f"{auto_pad}, which pads size {n}", "no padding")
    elif ceil:
        if size is None and max(spec.strides) > 1:
            return reject(scope, index, "ceil_mode", "1 on an unknown size", "windows that all lie inside")
        for n, window, stride in known:
            if (n - window) % stride:
                return reject(scope, index, "ceil_mode", f"a partial window on size {n}", "windows that all lie inside")
    return Pooling(index, (index,), node.input[0], node.output[0], "pool", replace(spec, pads=(0,) * (2 * rank)))


def _padded(scope: Scope, index: int, spec: PoolSpec, size: Ints | None, ceil: bool) -> Reject | None:
    """Why windows do not fit the map, or reach into the padding that `spec` gives."""
    known = size or (scope.info(scope.nodes[index].input[0]).shape or ())[2:]  # one side may be open, and the other too small
    if any(isinstance(n, int) and n < w for n, w in zip(known, spec.extents, strict=False)):
        shown = [n if isinstance(n, int) else "?" for n in known]
        return reject(scope, index, "window", list(spec.extents), f"no larger than the feature map, {shown}")
    # Pads that no window reaches change nothing: exporters to opset 9, which has no ceil_mode, write such at the ends.
    without = replace(spec, pads=(0,) * len(spec.pads))
    reached = size is None or any(spec.pads[: spec.rank]) or spec.output_size(size) != without.output_size(size)
    if any(spec.pads) and (ceil or reached):
        return reject(scope, index, "pooling pads", list(spec.pads), "no padding")
    return None


def global_average_pool(scope: Scope, index: int, rank: int, size: Ints | None) -> Pooling:
    return Pooling(index, (index,), _input(scope, index), scope.nodes[index].output[0], "global", None)


def may_be_box_filter(scope: Scope, index: int) -> str | None:
    """Return the input of node `index` if it is a depthwise Conv with equal weights, else None."""
    return None if _box_weight(scope, index) is None else _input(scope, index)


def box_filter(scope: Scope, index: int, rank: int, size: Ints | None) -> Pooling | Reject | None:
    """A box filter whose windows lie inside of the map, or why they do not."""
    node, weight = scope.nodes[index], _box_weight(scope, index)
    assert weight is not None
    leaf = conv_leaf(scope, index, rank)
    if isinstance(leaf, Reject):
        return leaf
    conv = leaf.conv
    spec = PoolSpec(conv.kernel_shape, conv.strides, conv.pads, conv.dilations)
    if (wrong := _padded(scope, index, spec, size, ceil=False)) is not None:
        return wrong
    if len(node.input) > 2 and node.input[2] and (leaf.bias is None or leaf.bias.array().any()):
        return reject(scope, index, "bias of a box filter", "numbers", "none, or zeros")
    factor = weight * conv.taps
    assert leaf.weight is not None
    if math.isclose(factor, 1, rel_tol=leaf.weight.unit_roundoff):
        factor = 1.0
    spec = replace(spec, pads=(0,) * (2 * rank))
    return Pooling(index, (index,), node.input[0], node.output[0], "box_filter", spec, factor=factor)


def _box_weight(scope: Scope, index: int) -> float | None:
    """The one number in the weights of a depthwise convolution of more than one tap; None where it is none, or they differ."""
    weight = scope.constant(scope.nodes[index].input[1])
    shape = () if weight is None else weight.shape
    if weight is None or len(shape) < 3 or shape[1] != 1 or math.prod(shape[2:]) < 2:
        return None
    values = known_attributes(scope.nodes[index])
    if values is None or values.get("group", 1) != shape[0]:
        return None
    array = weight.array()
    number = float(array.reshape(-1)[0])
    return number if number and math.isfinite(number) and (array == array.reshape(-1)[0]).all() else None


def may_be_half(scope: Scope, index: int) -> str | None:
    """The tensor that a Resize makes smaller; None for any other node, or where its scales are computed."""
    x = scope.nodes[index].input[0]
    try:
        scales = _scales(scope, index)
    except AttributeReference:
        return x
    return x if scales is not None and min(scales) < 1 and max(scales) <= 1 else None


def recognise_half(scope: Scope, index: int, rank: int, size: Ints | None) -> Pooling | Reject | None:
    """The mean over 2 elements of each axis that a Resize makes half as long, or why it is another."""
    node, scales = scope.nodes[index], _scales(scope, index)
    values = attributes(node)
    assert scales is not None
    if len(scales) != rank + 2 or any(s != 1 for s in scales[:2]) or any(s not in (1, 0.5) for s in scales[2:]):
        return reject(scope, index, "scales", [round(float(s), 6) for s in scales], "1/2 or 1 on spatial axes")
    mode = values.get("mode", b"nearest").decode(errors="replace")
    if mode != "linear":
        return reject(scope, index, "mode", mode, "linear")
    if values.get("antialias", 0):
        return reject(scope, index, "antialias", 1, 0)
    default = b"half_pixel" if scope.opset >= 11 else b"asymmetric"
    coordinates = values.get("coordinate_transformation_mode", default).decode(errors="replace")
    if coordinates not in ("half_pixel", "pytorch_half_pixel"):
        return reject(scope, index, "coordinate_transformation_mode", coordinates, "half_pixel or pytorch_half_pixel")
    if size is None:
        return reject(scope, index, "size of the Resize's input", "unknown", "static spatial sizes")
    kernel = tuple(2 if scale == 0.5 else 1 for scale in scales[2:])
    if any(n % k for n, k in zip(size, kernel, strict=True)):
        return reject(scope, index, "size halved", list(size), "even numbers; runtimes scale odd ones differently")
    if coordinates == "pytorch_half_pixel" and any(n == k == 2 for n, k in zip(size, kernel, strict=True)):
        return reject(scope, index, "elements that pytorch_half_pixel leaves", 1, "more")
    spec = PoolSpec(kernel, kernel, (0,) * (2 * rank), (1,) * rank)
    return Pooling(index, (index,), node.input[0], node.output[0], "resize", spec)


def _scales(scope: Scope, index: int) -> list[Fraction] | None:
    """A Resize's factors, None where one is not known.  Raises AttributeReference."""
    shape = scope.info(scope.nodes[index].input[0]).shape
    found = None if shape is None else scales_of(scope, index, len(shape) - 2)
    known = [] if found is None or isinstance(found, Reject) else [scale for scale in found if scale is not None]
    return known if known and len(known) == len(shape or ()) else None


SPELLINGS = (
    Spelling("pool", ("AveragePool",), _input, average_pool),
    Spelling("global", ("GlobalAveragePool",), _input, global_average_pool),
    Spelling("box_filter", ("Conv",), may_be_box_filter, box_filter),
    Spelling("slice_mean", means.ENDS_OF_SUMS, means.may_be_mean, means.recognise_mean),
    Spelling("global", ("Squeeze", *means.REDUCTIONS), means.may_be_reduction, means.recognise_reduction),
    Spelling("resize", ("Resize",), may_be_half, recognise_half),
)
SPELLINGS_OF = {op: tuple(one for one in SPELLINGS if op in one.ops) for spelling in SPELLINGS for op in spelling.ops}
"""The spellings that end in an operator."""
