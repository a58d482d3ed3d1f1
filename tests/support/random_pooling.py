# SPDX-License-Identifier: Apache-2.0
"""The averages that random models end in."""

from itertools import product

import numpy as np
import onnx
from onnx import helper

from convpool.algebra.geometry import MAX_KERNEL_WINDOW
from tests.support.random_models import (
    TYPES,
    Case,
    Layer,
    Maker,
    make_activation,
    make_conv,
    make_linear,
    make_middle,
    volume,
    window_out,
)

WHOLE = ("reduce", "unsqueezed", "axes", "flattened", "sum")
"""Means over the feature map."""
HALVES = ("slices", "steps", "resize")
"""Means over 2 elements of each axis."""
FROM_OPSET = {"slices": 10, "steps": 10, "resize": 11}


def make_reduction(m: Maker, name: str, op_type: str, axes: list[int], keep: bool) -> str:
    """A reduction over these axes, in the form that its opset has; some are counted from the end."""
    given = {} if keep and m.chance(0.5) else {"keepdims": int(keep)}
    if m.opset >= (18 if op_type == "ReduceMean" else 13):
        return m.node(op_type, [name, m.constant(np.array(axes, np.int64))], **given)
    return m.node(op_type, [name], axes=axes, **given)


def make_whole(m: Maker, name: str, kind: str, channels: int) -> str:
    """A mean over the feature map in one of its ways, or its sum; `m.keeps_rank` says whether the spatial axes remain."""
    r, spatial = m.rank, list(range(2, m.rank + 2))
    m.keeps_rank = m.chance(0.5)
    if kind == "unsqueezed":
        name = _changed(m, "Unsqueeze", name, [2])
        name = make_reduction(m, name, "ReduceMean", [*spatial, r + 2], m.keeps_rank)
        return _changed(m, "Squeeze", name, [2]) if m.keeps_rank else name
    if kind == "flattened":
        rows, keep = make_shape(m, [0, int(m.pick([0, channels])), -1]), r == 1 and m.keeps_rank
        m.keeps_rank = keep
        return make_reduction(m, m.node("Reshape", [name, rows]), "ReduceMean", [int(m.pick([2, -1]))], keep)
    if kind == "axes":
        for axis in reversed(spatial):
            name = make_reduction(m, name, "ReduceMean", [axis], m.keeps_rank)
        return name
    axes = [axis - (r + 2 if m.chance(0.5) else 0) for axis in spatial]
    m.rng.shuffle(axes)
    return make_reduction(m, name, "ReduceSum" if kind == "sum" else "ReduceMean", axes, m.keeps_rank)


def _changed(m: Maker, op_type: str, name: str, axes: list[int]) -> str:
    """Unsqueeze or Squeeze, in the form that its opset has."""
    if m.opset < 13:
        return m.node(op_type, [name], axes=axes)
    return m.node(op_type, [name, m.constant(np.array(axes, np.int64), "initializer")])


def make_shape(m: Maker, shape: list[int]) -> str:
    """The shape for a Reshape.  Not behind an Identity, which shape inference does not see through, nor before opset 9 by a
    Constant, which has no integers."""
    return m.constant(np.array(shape, np.int64), str(m.pick(["initializer", "constant"])) if m.opset >= 9 else "initializer")


def make_view(m: Maker, name: str, channels: int, sizes: list[int], window: list[int]) -> str:
    """Each spatial axis as windows side by side, and the mean over their elements.  Sizes are multiples of the window."""
    shape = [int(m.pick([-1, 0])), channels, *(n for size, p in zip(sizes, window, strict=True) for n in (size // p, p))]
    rows = make_shape(m, shape)
    axes = [3 + 2 * axis - (2 * m.rank + 2 if m.chance(0.3) else 0) for axis in range(m.rank)]
    m.rng.shuffle(axes)
    return make_reduction(m, m.node("Reshape", [name, rows]), "ReduceMean", axes, False)


def make_box(m: Maker, name: str, channels: int, sizes: list[int], window: list[int], strides: list[int]) -> str:
    """A depthwise convolution with equal weights, of one over their number or of another; padded ones are inexact."""
    number = 1 / volume(window) if m.chance(0.7) else float(m.data(1)[0])
    weight = m.constant(np.full((channels, 1, *window), number, m.data(1).dtype))
    given = {"strides": strides, "group": channels}
    m.exact &= all(n >= p for n, p in zip(sizes, window, strict=True)) and volume(window) > 1
    if m.chance(0.2):
        given["pads"] = [int(m.rng.integers(0, p)) for p in window * 2]
        m.exact &= not any(given["pads"])
    m.factor = number * volume(window)
    return m.node("Conv", [name, weight], **given)


def make_resize(m: Maker, name: str) -> str:
    """A linear Resize to half of each size."""
    roi = m.constant(np.zeros(0, np.float32), "initializer")
    scales = m.constant(np.array([1, 1, *[0.5] * m.rank], np.float32), "initializer")
    how = str(m.pick(["half_pixel", "pytorch_half_pixel"]))
    return m.node("Resize", [name, roi, scales], mode="linear", coordinate_transformation_mode=how)


def make_slices(m: Maker, name: str, sizes: list[int], kind: str) -> str:
    """The mean of strided Slices: one Slice per corner, chained by axis, or in "steps" with a mean after each axis."""
    if kind == "steps":
        for axis in range(m.rank):
            name = _mean(m, _corners(m, name, sizes, [axis], False))
            sizes = [n // 2 if i == axis else n for i, n in enumerate(sizes)]
        return name
    return _mean(m, _corners(m, name, sizes, list(range(m.rank)), m.chance(0.5)))


def _corners(m: Maker, name: str, sizes: list[int], axes: list[int], chained: bool) -> list[str]:
    """The Slices of every second element of each of these spatial axes."""
    last = int(m.pick([2**31 - 1, 2**63 - 1, 2**40]))
    ends = [n if n % 2 == 0 else n - 1 for n in sizes]  # equal corners also of odd sizes

    def cut(source: str, of: list[int], starts: tuple[int, ...]) -> str:
        stops = [last if sizes[a] % 2 == 0 and m.chance(0.7) else ends[a] for a in of]
        rows = (starts, stops, [a - m.rank if m.chance(0.3) else a + 2 for a in of], [2] * len(of))
        return m.node("Slice", [source, *(m.constant(np.array(row, np.int64)) for row in rows)])

    corners = [name]
    if chained:
        for axis in axes:
            corners = [cut(corner, [axis], (start,)) for corner in corners for start in (0, 1)]
    else:
        corners = [cut(name, axes, starts) for starts in product((0, 1), repeat=len(axes))]
    m.rng.shuffle(corners)
    return corners


def _mean(m: Maker, corners: list[str]) -> str:
    """The mean of tensors, by Mean, or by a sum and a factor."""
    total, scalar = corners[0], m.pick([(), (1,)])
    if m.chance(0.2):
        return m.node("Mean", corners)
    if m.chance(0.3):
        total = m.node("Sum", corners)
    else:
        for corner in corners[1:]:
            total = m.node("Add", [total, corner])
    count, dtype = len(corners), helper.tensor_dtype_to_np_dtype(TYPES[m.dtype])
    if m.chance(0.5):
        return m.node("Div", [total, m.constant(np.full(scalar, count, dtype))])
    factor = m.constant(np.full(scalar, 1 / count, dtype))
    return m.node("Mul", [total, factor] if m.chance(0.5) else [factor, total])


KINDS = (*["average"] * 5, "global", "slices", "steps", "resize", "box", "box", "view", "view", *WHOLE)


def make_case(seed: int) -> Case:
    """Case number `seed`: the same on every machine."""
    m = Maker(seed)
    kind = str(m.pick([k for k in KINDS if m.opset >= FROM_OPSET.get(k, 0)]))
    m.tags["pool"] = kind
    window = [int(m.pick([1, 2, 2, 2, 3])) for _ in range(m.rank)]
    strides = list(window) if m.chance(0.7) else [int(m.pick([1, 2, 3])) for _ in range(m.rank)]
    dilations = [int(m.pick([1, 2])) for _ in range(m.rank)] if m.opset >= 19 and m.chance(0.15) else [1] * m.rank
    if kind in HALVES:
        window = strides = [2] * m.rank
    strides = window if kind == "view" else strides
    dilations = dilations if kind == "average" else [1] * m.rank
    extents = [e * (p - 1) + 1 for p, e in zip(window, dilations, strict=True)]
    small = kind in ("global", *WHOLE) and m.chance(0.5)  # a window for which the plugin has kernels
    most = 3 if m.rank == 3 or small else 6
    target = [(int(m.rng.integers(1, most + 1)) - 1) * s + e for s, e in zip(strides, extents, strict=True)]
    target = [n + int(m.rng.integers(0, s)) if m.chance(0.3) else n for n, s in zip(target, strides, strict=True)]
    name, layer = make_conv(m, target)
    sizes = list(layer.out)
    for _ in range(int(m.pick([0, 0, 1, 1, 2, 3]))):
        name = make_middle(m, name, layer, sizes)
    others = make_join(m, name, layer, sizes) if m.chance(0.2) else None
    if others is not None:
        name = others[0]
        m.tags["join"] = others[1]
    if kind == "global" or kind in WHOLE:
        window, strides = list(sizes), [1] * m.rank
        dilations = strides
    output = make_pooling(m, kind, name, layer, sizes, (window, strides, dilations))
    extents = [e * (p - 1) + 1 for p, e in zip(window, dilations, strict=True)]
    after = window_out(sizes, extents, strides)
    output = make_behind(m, output, layer, after, m.exact and others is None and m.keeps_rank)
    # A kernel as large as the map pays for no other than a pointwise convolution.
    lowering = str(m.pick(["convavgpool"] * 6 + ["direct", "auto"] + ["fused"] * (1 if kind in WHOLE else 3)))
    m.tags |= {"rank": str(m.rank), "group": str(layer.group), "weights": layer.weight_kind}
    m.tags["window"] = "large" if volume(window) > MAX_KERNEL_WINDOW else "small"
    m.tags["join"] = "none" if others is None else others[1]
    named = others is None and m.exact and m.keeps_rank and m.epilogue is not None
    expected = f"{m.prologue}ConvAvgPool{m.epilogue}" if named else None
    return Case(seed, finish(m, output), m.feeds, m.dtype, lowering, expected, m.tags)


def make_pooling(m: Maker, kind: str, name: str, layer: Layer, sizes: list[int], numbers: tuple) -> str:
    """An average of this kind; one of another where sizes do not admit it.  numbers: window, strides, dilations."""
    window, strides, dilations = numbers
    if kind == "global":
        return m.node("GlobalAveragePool", [name])
    channels = layer.filters
    if m.tags.get("join") == "Concat":
        channels = 2 * layer.filters
    if kind in WHOLE:
        m.factor = volume(sizes) if kind == "sum" else 1.0
        return make_whole(m, name, kind, channels)
    if kind == "box":
        return make_box(m, name, channels, sizes, window, strides)
    # Odd sizes of 1 and 3 give empty or broadcast Slices; such models are in the tests of rejects.
    fits = all(n >= 2 and (n % 2 == 0 or n >= 5) for n in sizes) if kind in HALVES else kind == "average"
    if kind == "view":
        fits = all(n >= p and n % p == 0 for n, p in zip(sizes, window, strict=True))
    if not fits:
        m.exact = False
        return make_average(m, name, sizes, [1] * m.rank, [1] * m.rank, [1] * m.rank)
    if kind == "view":
        return make_view(m, name, channels, sizes, window)
    if kind in HALVES:
        m.exact &= all(n % 2 == 0 and (n > 2 or kind != "resize") for n in sizes)
        return make_resize(m, name) if kind == "resize" else make_slices(m, name, sizes, kind)
    return make_average(m, name, sizes, window, strides, dilations)


def make_residual(m: Maker, shape: tuple[int, ...]) -> str:
    """A convolution of an image, or of one made half as large, that gives `shape`."""
    batch, filters, *size = shape
    channels, halved = int(m.pick([1, 3, 4, 5, 8])), m.chance(0.5)
    size = [2 * n for n in size] if halved else size
    image = m.feed((batch, channels, *size))
    image = m.node("AveragePool", [image], kernel_shape=[2, 2], strides=[2, 2]) if halved else image
    return m.node("Conv", [image, m.constant(m.data(filters, channels, 3, 3))], pads=[1] * 4)


def make_behind(m: Maker, name: str, layer: Layer, after: list[int], known: bool) -> str:
    """Nodes behind the average: maps per channel, a residual, an activation; `m.epilogue` says what must be fused.  known: the
    average gives [batch, filters, after...] beyond doubt."""
    constant = layer.weight_kind in ("initializer", "constant", "identity")
    m.epilogue = "" if constant or m.factor == 1 else None
    if known and m.chance(0.3):
        name = make_linear(m, name, layer.filters)
        m.epilogue = "" if constant else None
    if known and m.chance(0.4):
        m.close_batch()  # no runtime holds two inputs to one name
        shape = (m.batch, layer.filters, *after)
        broadcast = m.chance(0.2) and any(n > 1 for n in after)
        if broadcast:
            axis = int(m.rng.integers(2, len(shape)))
            shape = (*shape[:axis], 1, *shape[axis + 1 :])
        other = make_residual(m, shape) if m.rank == 2 and not broadcast and m.chance(0.7) else m.feed(shape)
        op_type = str(m.pick(["Add", "Sum"])) if m.opset >= 8 or not broadcast else "Add"  # Sum broadcasts from 8 on
        name = m.node(op_type, [name, other] if m.chance(0.5) else [other, name])
        m.tags["residual"] = "broadcast" if broadcast and shape[2:] != tuple(after) else "equal"
        if m.epilogue is not None:
            m.epilogue = "Add" if m.tags["residual"] == "equal" else None
    if m.epilogue is None:
        return m.node("Relu", [name]) if m.chance(0.3) and m.dtype != "float64" else name
    if not constant and "middle" in m.tags:
        m.epilogue = None  # its maps move behind the average, where they cannot be folded
        return name
    return make_activation(m, name, "epilogue")


def make_join(m: Maker, name: str, layer: Layer, sizes: list[int]) -> tuple[str, str]:
    """Join the branch with a second one of the same size: a pointwise convolution or none.  Its result, and how."""
    op_type = str(m.pick(["Add", "Sub", "Sum", "Concat"]))
    if m.chance(0.6):
        x = m.feed((m.batch, layer.channels, *sizes))
        weight = m.data(layer.filters, layer.channels, *[1] * m.rank)
        other = m.node("Conv", [x, m.constant(weight, "initializer")])
    else:
        other = m.feed((m.batch, layer.filters, *sizes))
        other = m.node("Relu", [other]) if m.dtype != "float64" else other
    operands = [name, other] if m.chance(0.5) else [other, name]
    return m.node(op_type, operands, **({"axis": 1} if op_type == "Concat" else {})), op_type


def make_average(m: Maker, name: str, sizes, window, strides, dilations) -> str:
    """AveragePool with random attributes; `exact` ends where a window is padded or may be partial."""
    given = {"kernel_shape": window, "strides": strides}
    if all(s == 1 for s in strides) and m.chance(0.5):
        del given["strides"]
    if any(e > 1 for e in dilations):
        given["dilations"] = dilations
    extents = [e * (p - 1) + 1 for p, e in zip(window, dilations, strict=True)]
    m.exact &= all(n >= e for n, e in zip(sizes, extents, strict=True))
    style = str(m.pick(["none", "none", "none", "zeros", "pads", "auto", "ceil", "ceil"]))
    fits = all((n - e) % s == 0 for n, e, s in zip(sizes, extents, strides, strict=True))
    if style == "zeros":
        given["pads"] = [0] * (2 * m.rank)
    elif style == "pads" and any(p > 1 for p in window) and all(e == 1 for e in dilations):
        given["pads"] = [int(m.rng.integers(0, p)) for p in window * 2]
        m.exact &= not any(given["pads"])
    elif style == "auto":
        given["auto_pad"] = str(m.pick(["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]))
        same = given["auto_pad"].startswith("SAME")
        m.exact &= not same or all((-(-n // s) - 1) * s + e <= n for n, s, e in zip(sizes, strides, extents, strict=True))
    elif style == "ceil" and m.opset >= 10:
        given["ceil_mode"] = 1
        m.exact &= fits
    if m.chance(0.5):
        given["count_include_pad"] = int(m.rng.integers(0, 2))
    m.tags["average"] = style
    return m.node("AveragePool", [name], **given)


def finish(m: Maker, output: str) -> onnx.ModelProto:
    """The model: with value_info in a third of the cases, with documentation and metadata always."""
    graph = helper.make_graph(m.nodes, "random", m.inputs, [], m.initializers, doc_string="a random graph")
    graph.output.append(helper.make_tensor_value_info(output, TYPES[m.dtype], None))
    told = dict(producer_name="random_models", producer_version="7", doc_string="a random model", model_version=3)
    imports = [helper.make_opsetid(str(m.pick(["", ""])), m.opset)]
    model = helper.make_model(graph, ir_version=m.ir, opset_imports=imports, **told)
    model.metadata_props.add(key="seed", value=str(m.seed))
    inferred = onnx.shape_inference.infer_shapes(model)
    if inferred.graph.output[0].type.tensor_type.HasField("shape"):
        model.graph.output[0].CopyFrom(inferred.graph.output[0])
    if m.chance(0.33):
        model.graph.value_info.extend(inferred.graph.value_info)
    return model
