# SPDX-License-Identifier: Apache-2.0
"""Recognising a resampling of a map's spatial axes, in all its spellings.

| spelling | taken for |
|---|---|
| Resize, Upsample | nearest upsampling by whole factors, or another resampling |
| Cast, Resize, Cast, wider between, as converters to float16 write it | the same |
| views around Expand, Tile or a Concat of copies, on new axes, at once or axis by axis | nearest upsampling |
| Gather, or GatherND between Transposes, constant indices 0 0 1 1 ... on some axes | nearest upsampling |
| ConvTranspose with one group a channel, weights of ones as large as its strides | nearest upsampling |
| DepthToSpace of channels that a Concat or Tile repeats | nearest upsampling |

A Resize is a nearest upsampling if (1) batch and channels are kept, (2) every factor is a whole number, and (3) element t is
element floor(t / s) of the input: `asymmetric` positions with floor, or with round_prefer_floor for s = 2;
`tf_half_pixel_for_nn` with floor; those of `half_pixel`,
`pytorch_half_pixel` and `half_pixel_symmetric` with round_prefer_floor or round_prefer_ceil.  Any Resize commutes with what acts
on each position alike if (1) holds and the weights of each position add up to one: (4) no positions outside of the map
(tf_crop_and_resize), (5) no antialias, no exclude_outside.  (6) How much larger the result is has to be known: factors, sizes
beside static ones, or sizes that are computed from the input's Shape.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from onnx import TensorProto

from convpool.algebra.expand import RESIZE_WEIGHTS, UpsampleSpec
from convpool.algebra.geometry import Ints
from convpool.ir.index import FOLDABLE, Dim, Scope
from convpool.ir.protos import HALF_TYPES, attributes, is_op
from convpool.rules.base import Reject, reject
from convpool.rules.linear import MAX_CHAIN, VIEWS, WHOLE_AXIS, Span, View, axes_of, joined, order_of, slice_numbers, viewed
from convpool.rules.sizes import OPEN, may_hold, rough_scales, scales_of, shape_terms, size_number, size_terms, unknown_ratios

CENTRED = ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric")
"""Coordinates for which each element of an upsampled map lies nearest to one of the input, for every whole factor."""
POSITIONS = (*CENTRED, "asymmetric", "align_corners", "tf_half_pixel_for_nn")
"""Coordinates that lie in the map, or are moved to its border."""
COPIES = ("Concat", "Expand", "Tile")
"""Operators that may repeat an axis."""
COPY = -1
"""The axis of spans, in a view, that only number copies."""


@dataclass(frozen=True)
class Resample:
    """A resampling of the tensor `input`, which node `node` gives; `nodes`: all that goes with it where nothing else reads it.
    up: its factors where it is nearest by whole ones.  growth: how many elements there are for each of the input's.  mode: of a
    Resize; all other spellings are "nearest".  turned: the Transpose behind it of an input with the channels last.  casts: a Cast
    and the Resize behind it, where `node` is the Cast back.  likely: what `up` is if, in a run, the sizes turn out to be
    these times those of the map.  assumed: whether that is `up`."""

    node: int
    input: str
    up: UpsampleSpec | None
    growth: float
    nodes: frozenset[int]
    mode: str = "nearest"
    turned: int | None = None
    casts: Ints = ()
    likely: UpsampleSpec | None = None
    assumed: bool = False

    @property
    def resampler(self) -> int:
        """The node that resamples."""
        return self.casts[-1] if self.casts else self.node

    @property
    def picks(self) -> bool:
        """Return True if each element is one of the input's."""
        return self.mode == "nearest"

    @property
    def key(self) -> object:
        """Equal for two resamplings that do the same to maps of one size."""
        return self.node if self.up is None or self.assumed else self.up


def recognise(scope: Scope, index: int, rank: int, *, nearest: bool = False) -> Resample | Reject | None:
    """The resampling that a node ends, why it cannot move, or None.  nearest: refuse other modes.  Raises AttributeReference."""
    node = scope.nodes[index]
    if is_op(node, "Resize", "Upsample"):
        return _resize(scope, index, rank, nearest)
    if is_op(node, "Cast"):
        return _between_casts(scope, index, rank, nearest)
    if is_op(node, "Reshape", "Transpose") and (found := _repeated_axes(scope, index, rank)) is not None:
        return found
    if is_op(node, "ConvTranspose"):
        return _ones(scope, index, rank)
    if is_op(node, "DepthToSpace"):
        return _repeated_channels(scope, index, rank)
    return _gathered(scope, index, rank) if is_op(node, "Gather", "GatherND", "Transpose") else None


# ---- Resize and Upsample ------------------------------------------------------------------------------------------------


def _resize(scope: Scope, index: int, rank: int, nearest: bool) -> Resample | Reject:
    node, values = scope.nodes[index], attributes(scope.nodes[index])
    mode = values.get("mode", b"nearest").decode(errors="replace")
    if nearest and mode != "nearest":
        return reject(scope, index, "resampling", mode, "nearest upsampling by whole factors")
    scales = scales_of(scope, index, rank)
    if isinstance(scales, Reject):
        return scales
    if any(scale != 1 for scale in scales[:2]):
        return reject(scope, index, "scales of batch and channels", _shown(scales[:2]), "1 and 1")
    spatial = scales[2:]
    known = rough_scales(scope, index, rank, spatial)
    if known is None:
        return unknown_scales(scope, index, rank, spatial)
    old = scope.opset < 11
    coordinates = values.get("coordinate_transformation_mode", b"asymmetric" if old else b"half_pixel").decode(errors="replace")
    for name, got, expected in (("coordinate_transformation_mode", coordinates, POSITIONS), ("mode", mode, RESIZE_WEIGHTS)):
        if got not in expected:
            return reject(scope, index, name, got, f"one of {', '.join(expected)}")
    rounding = values.get("nearest_mode", b"floor" if old else b"round_prefer_floor").decode(errors="replace")
    whole = None
    if mode == "nearest" and all(scale.denominator == 1 for scale in known) and max(known) > 1:
        factors = tuple(int(scale) for scale in known)
        whole = UpsampleSpec(factors) if _repeats(coordinates, rounding, factors) else None
    up, likely = (whole, None) if None not in spatial else (None, whole)
    if likely is not None and not may_hold(scope, index, rank, likely.factors):
        likely = None
    for name in ("antialias", "exclude_outside"):  # one nearest element outside may be a zero
        if values.get(name, 0) and up is None:
            return reject(scope, index, name, 1, 0)
    nodes = frozenset((index, *size_nodes(scope, node.input[1:])))
    return Resample(index, node.input[0], up, float(math.prod(known)), nodes, mode, likely=likely)


def _between_casts(scope: Scope, index: int, rank: int, nearest: bool) -> Resample | Reject | None:
    """A Resize that computes in a wider type than the one that its input has, and its result gets."""
    chain = scope.chain(index, "Resize", "Cast") or scope.chain(index, "Upsample", "Cast")
    if chain is None:
        return None
    _, resize, first = chain
    x = scope.nodes[first].input[0]
    given, wide, result = (scope.info(name).elem_type for name in (x, scope.nodes[first].output[0], scope.nodes[index].output[0]))
    if given != result or given not in HALF_TYPES or wide not in (TensorProto.FLOAT, TensorProto.DOUBLE):
        return None
    found = _resize(scope, resize, rank, nearest)
    if isinstance(found, Reject):
        return found
    return replace(found, node=index, input=x, nodes=found.nodes | set(chain), casts=(first, resize))


def in_float32(scope: Scope, found: Resample) -> bool:
    """Return True if nearest upsampling is to compute in float32: of bfloat16, which onnxruntime's CUDA provider has for Conv but
    neither for Resize nor ConvTranspose, in a model without such a Resize."""
    return scope.info(found.input).elem_type == TensorProto.BFLOAT16 and not is_op(scope.nodes[found.node], "Resize")


def unknown_scales(scope: Scope, index: int, rank: int, scales: Sequence[Fraction | None] = ()) -> Reject:
    """The reason why a Resize stays whose factors differ from size to size."""
    got = unknown_ratios(scope, index, rank) or _shown(scales)
    return reject(scope, index, "scales", got, "known ones, the same for every size")


def _shown(scales: Sequence[Fraction | None]) -> list[object]:
    return ["unknown" if scale is None else round(float(scale), 6) for scale in scales]


def _repeats(coordinates: str, rounding: str, factors: Ints) -> bool:
    """Condition (3)."""
    if coordinates in CENTRED:
        return rounding in ("round_prefer_floor", "round_prefer_ceil")
    if coordinates not in ("asymmetric", "tf_half_pixel_for_nn"):
        return False
    return rounding == "floor" or coordinates == "asymmetric" and rounding == "round_prefer_floor" and max(factors) <= 2


def size_nodes(scope: Scope, names: Sequence[str]) -> set[int]:
    """The nodes that small tensors such as scales and sizes are computed by, up to what Shapes read."""
    return scope.cone(names, lambda index: is_op(scope.nodes[index], "Shape", "Constant", "Identity", *FOLDABLE))


# ---- other spellings ----------------------------------------------------------------------------------------------------


def _nearest(index: int, x: str, factors: Sequence[int], nodes: Sequence[int]) -> Resample | None:
    if max(factors) < 2:
        return None
    up = UpsampleSpec(tuple(factors))
    return Resample(index, x, up, float(up.copies), frozenset(nodes))


def _repeated_axes(scope: Scope, index: int, rank: int) -> Resample | None:
    """Elements of spatial axes repeated side by side, by views around nodes that copy, in one step or axis by axis.

    x [N, C, H, W] - Reshape or Unsqueeze [N, C, H, 1, W, 1] - Expand, Tile or Concat [N, C, H, s, W, s] - Reshape
    """
    chain: list[int] = []
    before: int | None = index
    turned: Resample | None = None
    while before is not None and len(chain) < MAX_CHAIN and is_op(scope.nodes[before], *VIEWS, *COPIES):
        chain.insert(0, before)
        x = scope.nodes[before].input[0]
        copies = any(is_op(scope.nodes[i], *COPIES) for i in chain)
        found = _copied(scope, x, chain, rank) if copies and len(scope.info(x).shape or ()) == rank + 2 else None
        if found is not None:
            given = [scope.nodes[i].input[1:] for i in chain if not is_op(scope.nodes[i], "Concat")]
            nodes = (*chain, *size_nodes(scope, [name for names in given for name in names]))
            result = _nearest(index, x, found[1], nodes)
            if found[0] and result is not None:
                return result
            turned = replace(result, turned=index) if result is not None and not found[0] else turned
        before = scope.producer.get(x)
    return turned


def _copied(scope: Scope, x: str, nodes: Sequence[int], rank: int) -> tuple[bool, list[int]] | None:
    """True for an x with the channels first, False for last, and how often nodes repeat each element of its spatial axes, side by
    side, with the channels first behind them.  None where they do anything else."""
    primes: dict[object, int] = {}
    sizes = [size_number(scope, term, primes) for term in shape_terms(scope, x) or ()]
    if None in sizes:
        return None
    view = before = View(tuple((Span(axis, n),) if n != 1 or axis == 0 else () for axis, n in enumerate(sizes)))
    for index in nodes:
        given = _given(scope, index, view, primes) if is_op(scope.nodes[index], "Expand", "Reshape") else None
        step = viewed(scope, index, view, given) if is_op(scope.nodes[index], *VIEWS) else _with_copies(scope, index, view, given)
        if not isinstance(step, View):
            return None
        view = step
    axes = [tuple(joined(list(spans))) for spans in view.axes]
    factors = [spans[-1].size or 0 if spans and spans[-1].axis == COPY else 1 for spans in axes]
    if len(axes) != rank + 2 or any(factor != 1 for factor in factors[:2]):
        return None
    kept = tuple(spans[:-1] if factor != 1 else spans for spans, factor in zip(axes, factors, strict=True))
    if kept == before.axes:
        return True, factors[2:]
    order, last = (0, rank + 1, *range(1, rank + 1)), scope.nodes[nodes[-1]]
    turns = is_op(last, "Transpose") and order_of(attributes(last), rank + 2) == order
    return (False, factors[2:]) if turns and kept == tuple(before.axes[axis] for axis in order) else None


def _given(scope: Scope, index: int, view: View, primes: dict[object, int]) -> list[int | None]:
    """The sizes that a Reshape or Expand gives a view, numbers in place of open ones, None for unknown ones.  A -1 behind
    the batch is known where the batch stays."""
    node = scope.nodes[index]
    terms = size_terms(scope, node.input[1]) or []
    shape: Sequence[Dim] = scope.info(node.output[0]).shape or (None,) * len(terms)
    if not terms or len(shape) != len(terms):
        return [n if isinstance(n, int) else None for n in shape]
    found = [n if isinstance(n, int) else size_number(scope, term, primes) for n, term in zip(shape, terms, strict=True)]
    if is_op(node, "Expand"):
        return found
    own = [math.prod(span.size or 0 for span in spans) for spans in view.axes]
    copied = [own[i] if n == 0 and i < len(own) and not attributes(node).get("allowzero", 0) else n for i, n in enumerate(found)]
    known = [n for n in copied if n is not None and n > 0]
    left = math.prod(own) // math.prod(known) if copied[0] == own[0] and len(known) == len(copied) - 1 else None
    return [left if n == -1 else n for n in copied]


def _with_copies(scope: Scope, index: int, view: View, given: Sequence[int | None] | None) -> View | None:
    """A view behind a node that repeats axes, but for the batch: copies stand outside of what they are of."""
    node, count = scope.nodes[index], len(view.axes)
    repeats: Ints | None = None
    if is_op(node, "Concat") and len(set(node.input)) == 1:
        axis = attributes(node)["axis"] % count
        repeats = tuple(len(node.input) if i == axis else 1 for i in range(count))
    elif is_op(node, "Tile"):
        repeats = scope.constant_ints(node.input[1])
    elif given is not None and len(given) == count:
        own = [math.prod(span.size or 0 for span in spans) for spans in view.axes]
        repeats = tuple(1 if m in (1, n) else m if n == 1 and m is not None else 0 for n, m in zip(own, given, strict=True))
    if repeats is None or len(repeats) != count or repeats[0] != 1 or not all(0 < n < OPEN for n in repeats):
        return None
    copies = [(Span(COPY, n, 0),) if n > 1 else () for n in repeats]
    return replace(view, axes=tuple((*copy, *spans) for copy, spans in zip(copies, view.axes, strict=True)))


def _ones(scope: Scope, index: int, rank: int) -> Resample | None:
    node, values = scope.nodes[index], attributes(scope.nodes[index])
    weight = scope.constant(node.input[1])
    strides = tuple(values.get("strides") or (1,) * rank)
    if weight is None or any(node.input[2:]) or len(weight.shape) != rank + 2:
        return None
    plain = weight.shape[1:] == (1, *strides) and values.get("group", 1) == weight.shape[0]
    others = any(values.get("pads", ())) or any(values.get("output_padding", ())) or "output_shape" in values
    dilated = any(d != 1 for d in values.get("dilations", ()))
    if not plain or others or dilated or values.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        return None
    return _nearest(index, node.input[0], strides, (index,)) if np.all(weight.array() == 1) else None


def _repeated_channels(scope: Scope, index: int, rank: int) -> Resample | None:
    node, values = scope.nodes[index], attributes(scope.nodes[index])
    block, source = values.get("blocksize", 1), scope.producer.get(node.input[0])
    if source is None or values.get("mode", b"DCR") != b"DCR" or rank != 2:
        return None
    before = scope.nodes[source]
    if is_op(before, "Concat"):
        whole = len(set(before.input)) == 1 and len(before.input) == block**2 and attributes(before).get("axis") in (1, -3)
    else:
        whole = is_op(before, "Tile") and scope.constant_ints(before.input[1]) == (1, block**2, 1, 1)
    return _nearest(index, before.input[0], (block, block), (index, source)) if whole else None


def _gathered(scope: Scope, index: int, rank: int) -> Resample | None:
    """Recognise a Gather on one axis, or a GatherND on the first axes between two Transposes, by constant indices."""
    node = scope.nodes[index]
    if is_op(node, "Gather"):
        constant = scope.constant(node.input[1])
        axis = attributes(node).get("axis", 0) % (rank + 2)
        if constant is None or len(constant.shape) != 1:
            return None
        return _by_indices(scope, index, node.input[0], constant.array()[:, None], (axis,), (index,), rank)
    if not is_op(node, "Transpose"):
        return None
    chain = scope.chain(index, "GatherND", "Transpose")
    if chain is None:
        return None
    last, gather, first = chain
    inner, outer = (order_of(attributes(scope.nodes[i]), rank + 2) for i in (first, last))
    if inner is None or outer is None or [inner[i] for i in outer] != list(range(rank + 2)):
        return None
    if attributes(scope.nodes[gather]).get("batch_dims", 0):
        return None
    constant = scope.constant(scope.nodes[gather].input[1])
    if constant is None or len(constant.shape) != constant.shape[-1] + 1:
        return None
    axes = inner[: constant.shape[-1]]
    return _by_indices(scope, index, scope.nodes[first].input[0], constant.array(), axes, chain, rank)


def _by_indices(
    scope: Scope, index: int, x: str, indices: np.ndarray, axes: Ints, nodes: Sequence[int], rank: int
) -> Resample | None:
    """Indices of these axes, [new sizes..., axes]: on each of them 0 to n - 1, each s times."""
    shape = scope.info(x).shape
    if shape is None or len(shape) != rank + 2 or min(axes) < 2:
        return None
    factors = [1] * rank
    for axis, count in zip(axes, indices.shape, strict=False):
        size = shape[axis]
        if not isinstance(size, int) or size < 1 or count % size:
            return None
        factors[axis - 2] = count // size
    rows = [np.arange(count) // factors[axis - 2] for axis, count in zip(axes, indices.shape, strict=False)]
    if 0 in indices.shape or not np.array_equal(indices, np.stack(np.meshgrid(*rows, indexing="ij"), -1)):
        return None
    return _nearest(index, x, factors, nodes)


# ---- maps whose first element is resized apart --------------------------------------------------------------------------


def first_apart(scope: Scope, index: int, rank: int) -> tuple[Resample, Ints] | None:
    """Nearest upsampling of a map whose first element on an axis is upsampled apart, as the first frame of a video.

    x - Split, or two Slices - Squeeze, Resize, Unsqueeze - Concat        the same, upsampled, but for some first elements
                             - Resize                     -

    The Concat is node `index`.  Gives the upsampling of x as a whole, and how many elements of it are missing in front on each
    axis: the first element may be repeated less often than the others.  Raises AttributeReference.
    """
    node = scope.nodes[index]
    if not is_op(node, "Concat") or len(node.input) != 2:
        return None
    axis = attributes(node).get("axis", 1) % (rank + 2)
    if axis < 2:
        return None
    first, rest = _repeated(scope, node.input[0], axis, rank), _repeated(scope, node.input[1], axis, rank)
    if first is None or rest is None or first.up is None or rest.up is None:
        return None
    x, cuts = _pieces(scope, first.input, rest.input, axis)
    missing = [b - a for a, b in zip(first.up.factors, rest.up.factors, strict=True)]
    if x is None or missing[axis - 2] < 0 or any(n for i, n in enumerate(missing) if i != axis - 2):
        return None
    nodes = frozenset({index, *first.nodes, *rest.nodes, *cuts})
    return replace(rest, node=index, input=x, growth=float(rest.up.copies), nodes=nodes), tuple(missing)


def _repeated(scope: Scope, name: str, axis: int, rank: int) -> Resample | None:
    """Nearest upsampling of all spatial axes, or of the others between Squeeze and Unsqueeze."""
    index = scope.producer.get(name)
    if index is None:
        return None
    squeezed = is_op(scope.nodes[index], "Unsqueeze") and axes_of(scope, index, attributes(scope.nodes[index])) == (axis,)
    around: frozenset[int] = frozenset()
    if squeezed:
        before = scope.producer.get(scope.nodes[index].input[0])
        around, index = frozenset({index}), before
    found = recognise(scope, index, rank - squeezed) if index is not None and rank > squeezed else None
    if not isinstance(found, Resample) or found.up is None or found.turned is not None:
        return None
    if not squeezed:
        return found
    source = _squeezed(scope, found.input, axis)
    if source is None:
        return None
    factors = (*found.up.factors[: axis - 2], 1, *found.up.factors[axis - 2 :])
    return replace(found, input=source[0], up=UpsampleSpec(factors), nodes=found.nodes | around | source[1])


def _squeezed(scope: Scope, name: str, axis: int) -> tuple[str, set[int]] | None:
    """The tensor that a Squeeze makes `name` of, and the nodes of that.  TorchScript writes an If around it, whose other branch
    gives the tensor as it is.  Behind the Unsqueeze that one has an axis too many for the Concat: a model that runs takes the
    Squeeze."""
    index = scope.producer.get(name)
    if index is None:
        return None
    if not is_op(scope.nodes[index], "If"):
        fits = is_op(scope.nodes[index], "Squeeze") and axes_of(scope, index, attributes(scope.nodes[index])) == (axis,)
        return (scope.nodes[index].input[0], {index}) if fits else None
    other, then = sorted((child for child in scope.children if child.owner == index), key=lambda child: child.path)
    ends = [place for body in (then, other) for place in (body.producer.get(name) for name in body.outputs) if place is not None]
    if len(ends) != 2:
        return None
    squeeze, copy = then.nodes[ends[0]], other.nodes[ends[1]]
    x = squeeze.input[0]
    fits = is_op(squeeze, "Squeeze") and is_op(copy, "Identity") and copy.input[0] == x and scope.defines(x)
    fits = fits and not then.defines(x) and not other.defines(x) and axes_of(then, ends[0], attributes(squeeze)) == (axis,)
    return (x, {index, *size_nodes(scope, scope.nodes[index].input)}) if fits else None


def _pieces(scope: Scope, first: str, rest: str, axis: int) -> tuple[str | None, set[int]]:
    """The tensor of which these are the first element on an axis and all others; None if they are not."""
    a, b = scope.producer.get(first), scope.producer.get(rest)
    if a is None or b is None:
        return None, set()
    one, other, shape = scope.nodes[a], scope.nodes[b], scope.info(first).shape
    if is_op(one, "Split") and a == b and list(one.output) == [first, rest]:
        same = shape is not None and attributes(one).get("axis", 0) % len(shape) == axis and shape[axis] == 1
        return (one.input[0] if same else None), {a}
    if not (is_op(one, "Slice") and is_op(other, "Slice") and one.input[0] == other.input[0]):
        return None, set()
    begins, ends, axes, steps = zip(slice_numbers(scope, a), slice_numbers(scope, b), strict=True)
    if (begins, ends[0], axes, steps) != (((0,), (1,)), (1,), ((axis,),) * 2, ((1,),) * 2):
        return None, set()
    last = ends[1][0] if ends[1] is not None and len(ends[1]) == 1 else 0
    size = (scope.info(one.input[0]).shape or (None,) * (axis + 1))[axis]
    whole = last >= (size if isinstance(size, int) else WHOLE_AXIS)
    return (one.input[0] if whole else None), {a, b}
