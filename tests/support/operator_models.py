# SPDX-License-Identifier: Apache-2.0
"""Models of one node of ai.convpool, of any type, rank and layout, with inputs on which half precision is exact."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
from onnx import TensorProto, helper

from convpool.algebra import reference
from convpool.algebra.expand import UpsampleSpec
from convpool.algebra.geometry import ConvSpec, PoolSpec
from convpool.algebra.parts import LAYOUTS, OPERATORS
from convpool.ir import schema
from tests.support.models import model_of

TYPES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
TYPES |= {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}
ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-20, "float64": 2.0**-20}
"""Relative error of one rounding of the result to the type, doubled; of the wide types, which their means' sums need."""
SLOPES = {"LeakyRelu": 0.25}
SAMPLED = [
    name
    for number, name in enumerate(schema.OP_TYPES)
    if number % 7 == 0 or schema.version_of(OPERATORS[name]) < schema.MODULATING_VERSION
]
"""The operators, but of those with a Silu or by image every seventh: both are one of several activations and maps."""


@dataclass(frozen=True)
class Node:
    """A node.  sizes: of X's spatial axes.  constant: W, B, scale and shift are initializers, else inputs.  Inputs and outputs of
    a model are float32, or float64 where the node's are."""

    op_type: str = "ConvAvgPool"
    dtype: str = "float32"
    sizes: tuple[int, ...] = (9, 10)
    batch: int = 2
    channels: int = 8
    filters: int = 16
    group: int = 1
    channels_last: int = 0
    accumulation: str = "default"
    bias: bool = True
    constant: bool = True
    open_sizes: bool = False
    attributes: dict[str, object] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The number of spatial axes."""
        return len(self.sizes)

    @property
    def specs(self) -> tuple[PoolSpec | UpsampleSpec, ConvSpec]:
        """2x2 means at every place, then a 3x3 convolution of stride 2, padded by 1; or copies by 2 and 3 and one of stride 1."""
        r = self.rank
        if OPERATORS[self.op_type].upsamples:
            pads = (1,) * r + (0,) + (1,) * (r - 1)
            return UpsampleSpec((3, 2, 2)[:r]), ConvSpec((3,) * r, (1,) * r, pads, (1,) * r, self.group)
        pool = PoolSpec((2,) * r, (1,) * r, (1,) + (0,) * (2 * r - 1), (1,) * r)
        return pool, ConvSpec((3,) * r, (2,) * r, (1,) * (2 * r), (1,) * r, self.group)

    @property
    def parts(self) -> schema.Parts:
        """The parts of the node beside."""
        kind = OPERATORS[self.op_type]
        slopes = SLOPES.get(kind.prologue, 0), 2 * SLOPES.get(kind.epilogue, 0)
        parts = replace(kind, prologue_alpha=slopes[0], epilogue_alpha=slopes[1])
        # Numbers of a variance of 64 are halves once they are normalized.
        return replace(parts, norm_groups=2, epsilon=192.0) if kind.normalized else parts

    @property
    def names(self) -> list[str]:
        """The node's inputs."""
        return [name for name in self.parts.inputs if name != "B" or self.bias or not self.parts.is_plain]

    def arrays(self, seed: int = 0, sizes: tuple[int, ...] | None = None, batch: int | None = None) -> dict[str, np.ndarray]:
        """All inputs of the node, of small whole numbers that stay whole through slopes and means."""
        rng = np.random.default_rng(seed)
        sizes, batch = sizes or self.sizes, self.batch if batch is None else batch
        before, conv = self.specs
        out = conv.output_size(before.output_size(sizes))
        wide = np.float64 if self.dtype == "float64" else np.float32
        x_last, y_last = LAYOUTS[self.channels_last]
        factors = (batch, self.channels, *(1,) * self.rank) if self.parts.modulated else (self.channels,)

        def numbers(*shape: int, last: bool = False) -> np.ndarray:
            array = rng.integers(-1, 2, shape).astype(wide)
            return np.ascontiguousarray(np.moveaxis(array, 1, -1)) if last else array

        found = {
            "X": numbers(batch, self.channels, *sizes, last=x_last) * 4 ** (self.rank + 1),
            "W": numbers(self.filters, *conv.kernel_shape, self.channels // self.group),
            "B": numbers(self.filters) * 8,
            "scale": numbers(*factors) * (2 * 4 ** (self.rank + 1) if self.parts.normalized else 2),
            "shift": numbers(*factors) * 4 ** (self.rank + 1),
            "R": numbers(batch, self.filters, *out, last=y_last) * 8,
        }
        if self.parts.normalized:  # each group: numbers of two values, 8 below and above its mean, as many of each
            signs = np.resize([-8, 8], (batch * 2, self.channels // 2 * math.prod(sizes))).astype(wide)
            x = rng.permuted(signs, axis=1) + 16 * rng.integers(-2, 3, (batch * 2, 1))
            x = x.reshape(batch, self.channels, *sizes).astype(wide)
            found["X"] = np.ascontiguousarray(np.moveaxis(x, 1, -1)) if x_last else x
        return {name: found[name] for name in self.names}

    def expected(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """The result in float64."""
        rest = [arrays.get(name) for name in ("scale", "shift", "R")]
        bias = arrays.get("B")
        bias = np.zeros(self.filters) if bias is None else bias
        args = (arrays["X"], arrays["W"], bias, *self.specs, self.parts, *rest, self.channels_last)
        return reference.conv_avg_pool(*args)

    def model(self, seed: int = 0, *, functions: bool = True) -> onnx.ModelProto:
        """A model with the node between Casts from and to the type of the model's inputs."""
        arrays = self.arrays(seed)
        weights = [name for name in self.names if self.constant and name not in ("X", "R")]
        outside = TensorProto.DOUBLE if self.dtype == "float64" else TensorProto.FLOAT
        inside = TYPES[self.dtype]
        casts = inside != outside
        inputs, output = [name + "_" * casts for name in self.names], "Y" + "_" * casts
        node = schema.make_node(inputs, output, *self.specs, "node")
        schema.give_parts(node, self.parts)
        schema.give_layout(node, self.channels_last)
        schema.give_accumulation(node, self.accumulation)
        permuting = schema.complete_layouts([node])
        for name, value in self.attributes.items():
            kept = [item for item in node.attribute if item.name != name]
            del node.attribute[:]
            node.attribute.extend(kept)
            if value is not None:
                node.attribute.append(helper.make_attribute(name, value))
        nodes = [node]
        if casts:
            nodes = [helper.make_node("Cast", [name], [f"{name}_"], to=inside) for name in self.names] + nodes
            nodes.append(helper.make_node("Cast", ["Y_"], ["Y"], to=outside))
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        y_shape: list[object] = [None] * (self.rank + 2)
        if self.open_sizes:
            x_last, y_last = LAYOUTS[self.channels_last]
            shapes["X"] = _open(self.channels, x_last, self.rank, "i")
            if "R" in shapes:
                shapes["R"] = _open(self.filters, y_last, self.rank, "o")
        inputs = {name: shapes[name] for name in self.names if name not in weights}
        made = schema.functions_for({self.op_type}, 17, permuting) if functions else []
        constants, version = {name: arrays[name] for name in weights}, schema.version_of(self.parts)
        return model_of(nodes, inputs, {"Y": y_shape}, constants, kind=outside, version=version, functions=made)

    def with_constants(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The arrays, with a model's initializers in place of those that it does not take."""
        return {**arrays, **({name: a for name, a in self.arrays().items() if name not in ("X", "R")} if self.constant else {})}

    def feeds(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Select what a session takes of them."""
        return {name: array for name, array in arrays.items() if not self.constant or name in ("X", "R")}

    def check(self, got: np.ndarray, arrays: dict[str, np.ndarray], rounding: float | None = None) -> None:
        """Compare a result with the reference."""
        expected = self.expected(arrays)
        relative = ROUNDING[self.dtype] if rounding is None else rounding
        # Normalized numbers are whole but for the last bit of their mean and root.
        absolute = max(relative * np.abs(expected).max(), 2.0**-14) if self.parts.normalized else 1e-5
        np.testing.assert_allclose(got.astype(np.float64), expected, rtol=relative, atol=absolute)
        assert np.abs(expected).max() > (0.5 if self.parts.epilogue in ("Tanh", "Sigmoid") else 8)

    def run(self, session, seed: int = 0, rounding: float | None = None, **sizes) -> None:
        """Run the node's model on inputs of a seed, and compare."""
        arrays = self.with_constants(self.arrays(seed, **sizes))
        self.check(session.run(None, self.feeds(arrays))[0], arrays, rounding)


def _open(channels: int, last: bool, rank: int, prefix: str) -> list[object]:
    spatial = [f"{prefix}{axis}" for axis in range(rank)]
    return ["N", *spatial, channels] if last else ["N", channels, *spatial]
