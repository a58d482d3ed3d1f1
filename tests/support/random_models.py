# SPDX-License-Identifier: Apache-2.0
"""Random models around convolution and average pooling, with what is known about them by construction.  A case says what node its
pair must become where that is beyond doubt, by rules that this module states for itself.  All data has magnitudes in [1/8, 2],
from which no weight that a rewrite makes can underflow, in half precision either."""

import math
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tests.support.operator_models import TYPES
from tests.support.random_graph import RandomGraph

NEWEST = onnx.defs.onnx_opset_version()
WEIGHT_KINDS = ("initializer", "constant", "identity", "overridable", "computed")


@dataclass
class Case:
    """A model, inputs for it, and the lowering to ask for."""

    seed: int
    model: onnx.ModelProto
    feeds: dict[str, np.ndarray]
    dtype: str
    lowering: str
    operator: str | None
    """The operator of its one node of convpool's, if there is one; None where there is a doubt."""
    tags: dict[str, str] = field(default_factory=dict)


class Maker(RandomGraph):
    """One model in the making; `exact` stays true while everything chosen is exact beyond doubt."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.seed, self.exact, self.tags = seed, True, {}
        self.inputs, self.feeds = [], {}
        self.dtype = str(self.pick(["float32"] * 6 + ["float16"] * 2 + ["bfloat16", "float64"]))
        self.opset = int(self.rng.integers(22 if self.dtype == "bfloat16" else 7, NEWEST + 1))
        self.ir = int(self.pick([3, 4, 6, 7, 8, 8, 9, 10, onnx.IR_VERSION]))
        self.rank, self.batch = int(self.pick([1, 1, 2, 2, 2, 2, 2, 3])), int(self.pick([1, 1, 2]))
        self.wide = self.chance(0.15)  # a convolution padded so far that zeros behind it may be zeros in front of it
        self.open_batch, self.prologue = False, ""
        self.epilogue: str | None = ""
        self.keeps_rank, self.factor = True, 1.0  # of the average: whether spatial axes remain, what it is multiplied by

    def data(self, *shape: int) -> np.ndarray:
        values = self.rng.uniform(0.125, 2, shape) * self.rng.choice([-1, 1], shape)
        return values.astype(helper.tensor_dtype_to_np_dtype(TYPES[self.dtype]))

    def node(self, op_type: str, inputs: list[str], **attributes) -> str:
        output = self.fresh("t")
        name = self.fresh(f"{op_type}_") if self.chance(0.8) else ""
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=name, **attributes))
        return output

    def constant(self, array: np.ndarray, kind: str = "") -> str:
        """A constant tensor, stored in one of WEIGHT_KINDS."""
        kind = kind or str(self.pick(["initializer", "initializer", "constant", "identity"]))
        if kind == "overridable" and self.ir < 4:
            kind = "initializer"  # before IR 4 nobody could override one
        if kind == "constant":
            name = self.fresh("c")
            self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array, name)))
            return name
        name = self.fresh("w")
        self.initializers.append(numpy_helper.from_array(array, name))
        if kind == "overridable" or self.ir < 4:
            elem_type = helper.np_dtype_to_tensor_dtype(array.dtype)
            self.inputs.append(helper.make_tensor_value_info(name, elem_type, array.shape))
        if kind == "computed":  # from a graph input, so that no constant folding can help
            return self.node("Mul", [name, self.feed((1,) * array.ndim)])
        return self.node("Identity", [name]) if kind == "identity" else name

    def feed(self, shape: tuple[int, ...], dims: list | None = None) -> str:
        name = self.fresh("x")
        self.inputs.append(helper.make_tensor_value_info(name, TYPES[self.dtype], dims or list(shape)))
        self.feeds[name] = self.data(*shape)
        return name

    def close_batch(self) -> None:
        """Give the inputs made so far the size of the batch."""
        for value in self.inputs if self.open_batch else ():
            for dim in value.type.tensor_type.shape.dim[:1]:
                dim.dim_value = self.batch if dim.dim_param else dim.dim_value
        self.open_batch = False


@dataclass
class Layer:
    """A convolution's numbers that the nodes behind it need."""

    group: int
    channels: int
    filters: int
    out: list[int]
    weight_kind: str


def make_conv(m: Maker, out: list[int]) -> tuple[str, Layer]:
    """A convolution with outputs of spatial size `out`, on a graph input or a Relu of one."""
    r, big = m.rank, m.chance(0.7)
    kernel = [int(m.pick([1, 2, 3, 3, 5])) for _ in range(r)] if m.chance(0.8) else [1] * r
    strides = [int(m.pick([1, 1, 1, 2, 3])) for _ in range(r)]
    dilations = [int(m.pick([1, 1, 1, 2])) for _ in range(r)]
    extents = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    pads = [int(m.rng.integers(0, e + 1)) if m.chance(0.5) else (e - 1) // 2 for e in extents * 2]
    auto = str(m.pick(["", "", "", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    if m.wide:
        auto, pads = "", [int(m.rng.integers(max(e - 2, 0), e + 2)) for e in extents * 2]
    size = [
        max((n - 1) * s + e - pads[i] - pads[r + i] + int(m.rng.integers(0, s)), 1)
        for i, (n, s, e) in enumerate(zip(out, strides, extents, strict=True))
    ]
    if auto == "VALID":
        pads = [0] * (2 * r)
        size = [(n - 1) * s + e for n, s, e in zip(out, strides, extents, strict=True)]
    elif auto.startswith("SAME"):
        size = [max(n * s - int(m.rng.integers(0, s)), 1) for n, s in zip(out, strides, strict=True)]
        totals = [max((-(-n // s) - 1) * s + e - n, 0) for n, s, e in zip(size, strides, extents, strict=True)]
        small = [total // 2 for total in totals]
        large = [total - low for total, low in zip(totals, small, strict=True)]
        pads = [*small, *large] if auto == "SAME_UPPER" else [*large, *small]
    out = [(n + pads[i] + pads[r + i] - e) // s + 1 for i, (n, s, e) in enumerate(zip(size, strides, extents, strict=True))]
    group = int(m.pick([1, 1, 1, 1, 1, 1, 2, 4]))
    channels, filters = (16, 64) if big and r < 3 else (8, 32) if big else (group * int(m.pick([1, 2])), 2 * group)
    kind = str(m.pick(["initializer"] * 6 + list(WEIGHT_KINDS[1:])))
    weight = m.constant(m.data(filters, channels // group, *kernel), kind)
    layer, bias = Layer(group, channels, filters, out, kind), m.chance(0.1 if m.wide else 0.6)
    shape = (m.batch, channels, *size)
    m.open_batch = m.chance(0.3)
    inputs = [make_before(m, m.feed(shape, ["N", *shape[1:]] if m.open_batch else None), channels), weight]
    if bias:
        inputs.append(m.constant(m.data(filters)))
    given = {"pads": pads} if not auto else {"auto_pad": auto, **({"pads": pads} if auto == "NOTSET" else {})}
    given |= {"strides": strides, "dilations": dilations, "group": group, "kernel_shape": kernel}
    for name, default in (("strides", 1), ("dilations", 1), ("pads", 0)):
        if name in given and all(v == default for v in given[name]) and m.chance(0.5):
            del given[name]
    if group == 1 and m.chance(0.5):
        del given["group"]
    if m.chance(0.4):
        del given["kernel_shape"]
    return m.node("Conv", inputs, **given), layer


def make_before(m: Maker, x: str, channels: int) -> str:
    """Nodes in front of the convolution, all of which its operator must fuse: `m.prologue` names what they are."""
    for _ in range(int(m.pick([0, 0, 0, 1, 1, 2]))):
        x = make_linear(m, x, channels)
        m.prologue = "Affine"
    return make_activation(m, x, "prologue")


def make_activation(m: Maker, name: str, attribute: str) -> str:
    """Perhaps an activation that may stand there, noted in the string `attribute` of `m`: "prologue" or "epilogue"."""
    if m.dtype == "float64" or m.chance(0.6):
        return name
    kinds = ["Relu", "LeakyRelu"] if attribute == "prologue" else ["Relu", "LeakyRelu", "Relu", "Tanh", "Sigmoid"]
    kind = str(m.pick(kinds if m.dtype != "bfloat16" else ["Relu"]))
    setattr(m, attribute, getattr(m, attribute) + kind)
    return m.node(kind, [name], **({"alpha": float(m.pick([0.25, -0.5]))} if kind == "LeakyRelu" and m.chance(0.7) else {}))


def make_linear(m: Maker, name: str, channels: int) -> str:
    """A map per channel with constants."""
    kind = str(m.pick(["BatchNormalization", "Add", "Sub", "Mul", "Div", "Sub reversed"]))
    if kind == "BatchNormalization":
        parameters = [m.constant(m.data(channels)) for _ in range(3)]
        return m.node(kind, [name, *parameters, m.constant(np.abs(m.data(channels)))])
    shapes = [(), (1,), (channels, *[1] * m.rank), (1, channels, *[1] * m.rank), (1,) * (m.rank + 2)]
    other = m.constant(m.data(*m.pick(shapes)))
    return m.node(kind.split()[0], [other, name] if kind.endswith("reversed") else [name, other])


def make_middle(m: Maker, name: str, layer: Layer, sizes: list[int]) -> str:
    """One operator between convolution and pooling; may end `exact` and change `sizes`."""
    r, channels = m.rank, layer.filters
    kinds = ["BatchNormalization", "binary", "binary", "binary", "Identity", "Dropout", "Pad"]
    kind = str(m.pick(["Pad"] if m.wide and m.chance(0.7) else kinds))
    m.tags["middle"] = f"{m.tags.get('middle', '')} {kind}".strip()
    if kind == "Identity":
        return m.node("Identity", [name])
    if kind == "Dropout":
        return m.node("Dropout", [name], **({"ratio": 0.5} if m.opset < 12 and m.chance(0.5) else {}))
    if kind == "BatchNormalization":
        given = {"epsilon": float(m.pick([1e-5, 1e-3]))} if m.chance(0.7) else {}
        parameters = [m.constant(m.data(channels)) for _ in range(3)]
        parameters.append(m.constant(np.abs(m.data(channels))))
        return m.node("BatchNormalization", [name, *parameters], **given)
    if kind == "Pad":
        return make_pad(m, name, layer, sizes)
    op_type = str(m.pick(["Add", "Sub", "Mul", "Div"]))
    shapes = [(), (1,), (channels, *[1] * r), (1, channels, *[1] * r), (1,) * (r + 2)]
    other = m.constant(m.data(*m.pick(shapes)))
    behind = m.chance(0.6) or op_type == "Div" and m.dtype not in ("float32", "float64")  # halves may divide by 0
    operands = [name, other] if behind else [other, name]
    m.exact &= op_type != "Div" or operands[0] == name
    return m.node(op_type, operands)


def make_pad(m: Maker, name: str, layer: Layer, sizes: list[int]) -> str:
    """A Pad: mostly of zeros by zero, else positive, negative, with a value or reflecting."""
    r, styles = m.rank, ["none", "none", "positive", "negative", "value", "reflect", "channel"]
    style = str(m.pick(["positive", "negative"] if m.wide else styles))
    pads = [0] * (2 * r + 4)
    if style == "channel":
        pads[1] = 1  # makes the channels wrong for whatever follows: only ever the last operator
        pads[r + 3] = -1
    elif style != "none":
        for i in range(r):
            for side in (2 + i, r + 4 + i):
                pads[side] = int(m.chance(0.5)) if m.wide else 1
                pads[side] *= -1 if style == "negative" else 1
            if style == "negative" and sizes[i] < 6 or style == "reflect" and sizes[i] < 3:
                pads[2 + i] = pads[r + 4 + i] = 0
            sizes[i] += pads[2 + i] + pads[r + 4 + i]
    m.exact &= not any(pads)
    given = {"mode": "reflect"} if style == "reflect" else {}
    value = float(m.data(1)[0]) if style == "value" else 0.0
    if m.opset < 11:
        return m.node("Pad", [name], pads=pads, **given, **({"value": value} if style == "value" else {}))
    # Shape inference does not see through Identity, and the sizes behind the Pad would be unknown.
    inputs = [name, m.constant(np.array(pads, np.int64), str(m.pick(["initializer", "constant"])))]
    if style == "value" or m.chance(0.3):
        inputs.append(m.constant(np.array(value, m.data(1).dtype)))
    return m.node("Pad", inputs, **given)


def window_out(sizes: list[int], kernel: list[int], strides: list[int]) -> list[int]:
    """Output sizes of a window operator without padding."""
    return [(n - k) // s + 1 for n, k, s in zip(sizes, kernel, strides, strict=True)]


def volume(numbers: list[int]) -> int:
    """The product, 0 if one is below 1."""
    return math.prod(max(n, 0) for n in numbers)
