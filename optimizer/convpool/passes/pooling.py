# SPDX-License-Identifier: Apache-2.0
"""Averages over windows, however a model writes them: `FORMS` has a line for each way, and each a recogniser of its own.

| written as | window | recognised in |
|---|---|---|
| AveragePool | kernel_shape | `windows` |
| GlobalAveragePool | the feature map | `windows` |
| a depthwise Conv with equal weights | its kernel | `windows` |
| the mean of strided Slices | one element per Slice | `slice_mean` |
| ReduceMean, ReduceSum, around them what rearranges | what is reduced, per axis | `reductions` |
| Resize to one half | 2 | `resize` |

An average of an average is one where their windows make one, and nothing else reads what is between (`_composed`): per axis,
of window k, stride s and dilation d, behind it k', s', d',

    mean_j mean_l x[(i s' + d' j) s + d l],    one window of k k' elements where d' s = k d, or k = 1, or k' = 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto, helper

from convpool.algebra.affine import holds
from convpool.algebra.geometry import Ints, PoolSpec
from convpool.ir.index import Scope
from convpool.ir.protos import FLOATS, is_op
from convpool.passes import reductions, resize, slice_mean, windows
from convpool.passes.base import Reject, reject
from convpool.passes.sizes import spatial_size
from convpool.passes.tree import Pooling

MayBe = Callable[[Scope, int], "str | None"]
"""The tensor that would be averaged if a node ends an average; cheap, and no conditions checked."""
Recognise = Callable[[Scope, int, int, "Ints | None"], "Pooling | Reject | None"]
"""The average that a node ends; a Reject where it is one but not exact to move, None where it is none.

Arguments: the scope; the node; the number of spatial axes; the spatial sizes of the tensor averaged, None where any is unknown.
Raises AttributeReference.
"""


@dataclass(frozen=True)
class Form:
    """A way to write an average.  kind: what a report calls it until it is recognised, which may tell more."""

    kind: str
    may_be: MayBe
    recognise: Recognise


FORMS = (
    Form("pool", windows.may_be_average_pool, windows.average_pool),
    Form("global", windows.may_be_global, windows.global_average_pool),
    Form("box_filter", windows.may_be_box_filter, windows.box_filter),
    Form("slice_mean", slice_mean.may_be_mean, slice_mean.recognise_mean),
    Form("global", reductions.may_be_reduction, reductions.recognise_reduction),
    Form("resize", resize.may_be_half, resize.recognise_half),
)


@dataclass(frozen=True)
class Candidate:
    """What may be an average of the tensor `input`, written as `form` and ended by node `root`."""

    form: Form
    root: int
    input: str


def candidates(scope: Scope) -> Iterator[tuple[Candidate, ...]]:
    """What may be averages in a scope, in the order of their ends: each with those directly before it, the last one first."""
    found: dict[int, Candidate] = {}
    for index in range(len(scope.nodes)):
        for form in FORMS:
            if (tensor := form.may_be(scope, index)) is not None:
                found[index] = Candidate(form, index, tensor)
                break
    before = {index: producer for index, item in found.items() if (producer := _before(scope, item)) in found}
    for index in sorted(found.keys() - set(before.values())):
        chain = [found[index]]
        while chain[-1].root in before:
            chain.append(found[before[chain[-1].root]])
        yield tuple(chain)


def recognise(scope: Scope, chain: Sequence[Candidate], rank: int) -> Pooling | Reject | None:
    """The average that the first of a chain is, taken together with those behind it as far as they make one window.

    chain: of `candidates`, the last one first.  rank: number of spatial axes.  Raises AttributeReference.
    """
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


def average_of(scope: Scope, name: str, rank: int) -> Pooling | None:
    """The average that one node alone makes of a tensor, which nothing else reads; None where there is none."""
    for form in FORMS if scope.sole_reader(name) is None else ():
        root = scope.readers[name][0]
        if form.may_be(scope, root) == name:
            found = _single(scope, Candidate(form, root, name), rank, spatial_size(scope, name, rank))
            return found if isinstance(found, Pooling) and found.nodes == (root,) else None
    return None


def _before(scope: Scope, item: Candidate) -> int | None:
    """The node that gives what is averaged, if the average alone reads that.

    Not a Conv, which is more than an average: it takes another one in front of itself.
    """
    producer = scope.producer.get(item.input)
    if producer is None or is_op(scope.nodes[producer], "Conv"):
        return None
    readers = scope.readers.get(item.input, ())
    alone = scope.sole_reader(item.input) is None
    slices = item.form.kind == "slice_mean" and all(is_op(scope.nodes[reader], "Slice") for reader in readers)
    return producer if alone or slices else None


def _single(scope: Scope, item: Candidate, rank: int, size: Ints | None) -> Pooling | Reject | None:
    found = item.form.recognise(scope, item.root, rank, size)
    if isinstance(found, Pooling) and found.factor != 1:
        elem_type = scope.info(found.input).elem_type
        if elem_type not in FLOATS:
            kind = (TensorProto.DataType.Name(elem_type), "floating point") if elem_type else ("unknown", "a known one")
            return reject(scope, item.root, "type of the average", *kind)
        if not holds(np.array(found.factor), helper.tensor_dtype_to_np_dtype(elem_type)):
            return reject(scope, item.root, "factor of the average", found.factor, "a number that the type has")
    return found


def _composed(scope: Scope, inner: Pooling, outer: Pooling, size: Ints | None, between: Ints | None) -> Pooling | None:
    """`outer` of `inner` as one average; None where it is none, or another node reads what is between.

    size, between: spatial sizes of what `inner` averages, and of what it gives, None where unknown.
    """
    name = outer.input
    inside = set(scope.readers.get(name, ())) <= set(outer.nodes) and name not in scope.outputs | scope.captured
    if inner.spec is None or inner.output != name or not inside:
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
    ones = tuple(d if k > 1 else 1 for k, d in zip(kernel, dilations, strict=True))
    return PoolSpec(tuple(kernel), strides, outer.pads, ones)
