# SPDX-License-Identifier: Apache-2.0
"""Random models with upsampled maps give the same numbers after a rewrite, and the same bytes after a second one."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import convpool
from convpool.algebra.expand import FORMS
from tests.support.random_graph import RandomGraph
from tests.support.resizing import TOLERANCE
from tests.support.rewriting import assert_close, assert_stable, cases


class Maker(RandomGraph):
    """Builds one random model; `form` is the one to ask for."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.rank = int(self.pick([1, 2, 2, 2, 3]))
        self.opset = int(self.pick([9, 10, 11, 13, 17, 18, 21]))
        self.form = str(self.pick(FORMS))
        self.factors = [int(self.pick([2, 2, 3, 4, 5])) for _ in range(self.rank)]
        if self.rank == 3:
            self.factors = [min(factor, 3) for factor in self.factors]
        if self.chance(0.5):
            self.factors = [self.factors[0]] * self.rank
        elif self.rank > 1 and self.chance(0.3):
            self.factors[0] = 1
        self.size = [int(self.rng.integers(1 if self.chance(0.2) else 2, 6)) for _ in range(self.rank)]
        self.channels = int(self.pick([2, 4, 6]))
        self.inputs: dict[str, list[int]] = {}
        self.open = self.chance(0.3)

    def numbers(self, *shape: int) -> np.ndarray:
        """Small whole numbers in float32."""
        return self.rng.integers(-3, 4, shape).astype(np.float32)

    def add(self, op_type: str, *inputs: str, **values) -> str:
        """A new node; the name of what it gives."""
        return self.node(op_type, list(inputs), **values)

    def input(self, size: list[int]) -> str:
        """A new input."""
        name = f"x{len(self.inputs)}"
        self.inputs[name] = [2, self.channels, *size]
        return name

    def large(self) -> list[int]:
        """The size of an upsampled map."""
        return [n * s for n, s in zip(self.size, self.factors, strict=True)]

    def upsampled(self) -> str:
        """A new input, upsampled, in one of the spellings of its opset."""
        x, full = self.input(self.size), np.array([1, 1, *self.factors], np.float32)
        whole = int(max(self.factors)) <= 2
        if self.opset < 10:
            return self.add("Upsample", x, self.constant(full), mode="nearest")
        if self.opset < 11:
            return self.add("Resize", x, self.constant(full), mode="nearest")
        kind = self.pick(["scales", "scales", "sizes", "computed", "expand", "ones", "gather"])
        roundings = [
            ("asymmetric", "floor"),
            ("tf_half_pixel_for_nn", "floor"),
            ("half_pixel", "round_prefer_floor"),
            ("pytorch_half_pixel", "round_prefer_ceil"),
        ]
        coordinates, rounding = self.pick([*roundings, ("asymmetric", "round_prefer_floor" if whole else "floor")])
        values = {"mode": "nearest", "coordinate_transformation_mode": coordinates, "nearest_mode": rounding}
        roi = "" if self.opset >= 13 else self.constant(np.zeros(0, np.float32))
        none = "" if self.opset >= 13 else self.constant(np.zeros(0, np.float32))
        if kind == "sizes" and not self.open:
            return self.add("Resize", x, roi, none, self.constant([2, self.channels, *self.large()]), **values)
        if kind == "computed" and self.opset >= 13:
            shape = self.add("Shape", x)
            first = self.add("Slice", shape, *(self.constant([n]) for n in (0, 2, 0)))
            rest = self.add("Slice", shape, *(self.constant([n]) for n in (2, 2**62, 0)))
            grown = self.add("Mul", rest, self.constant(self.factors))
            return self.add("Resize", x, "", "", self.add("Concat", first, grown, axis=0), **values)
        if kind == "expand" and not self.open and self.opset >= 13:
            one, many = [2, self.channels], [2, self.channels]
            for n, s in zip(self.size, self.factors, strict=True):
                one, many = [*one, n, 1], [*many, n, s]
            spread = self.add("Expand", self.add("Reshape", x, self.constant(one)), self.constant(many))
            return self.add("Reshape", spread, self.constant([2, self.channels, *self.large()]))
        if kind == "ones" and self.rank < 3:
            weight = self.constant(np.ones((self.channels, 1, *self.factors), np.float32))
            return self.add("ConvTranspose", x, weight, strides=self.factors, kernel_shape=self.factors, group=self.channels)
        if kind == "gather" and not self.open:
            for axis, (n, s) in enumerate(zip(self.size, self.factors, strict=True)):
                x = self.add("Gather", x, self.constant(np.repeat(np.arange(n), s)), axis=axis + 2)
            return x
        return self.add("Resize", x, roi, self.constant(full), **values)

    def between(self, x: str, channels: int, *, normal: bool) -> str:
        """Some nodes that a nearest upsampling moves past."""
        column = (channels, *[1] * self.rank)
        for _ in range(int(self.rng.integers(0, 3))):
            kind = self.pick(["Relu", "LeakyRelu", "Mul", "Add", "gate", "norm", "bn", "groups"])
            if kind in ("Relu", "LeakyRelu"):
                x = self.add(kind, x)
            elif kind in ("Mul", "Add"):
                columns = [self.constant(self.numbers(*column)) for _ in range(2)]
                x = self.add(kind, *self.pick([(x, columns[0]), (columns[1], x)]))
            elif kind == "gate":
                x = self.add("Mul", x, self.add("Sigmoid", x))
            elif kind == "bn":
                params = [self.constant(np.abs(self.numbers(channels)) + 1) for _ in range(4)]
                x = self.add("BatchNormalization", x, *params)
            elif normal and kind == "norm":
                x = self.add("InstanceNormalization", x, *(self.constant(self.numbers(channels)) for _ in range(2)))
            elif normal and kind == "groups" and not self.open:
                shape, flat = [2, channels, *self.large()], self.add("Reshape", x, self.constant([0, 2, -1]))
                ones = self.constant(np.ones(2, np.float32)), self.constant(np.zeros(2, np.float32))
                flat = self.add("InstanceNormalization", flat, *ones)
                x = self.add("Reshape", flat, self.constant(shape))
        return x

    def convolution(self, x: str, channels: int, *, group: int = 1, most: int = 7) -> str:
        """A convolution of the upsampled map with a bias or none."""
        kernel = [int(self.rng.integers(1, (3 if self.rank == 3 else most) + 1)) for _ in range(self.rank)]
        dilations = [s if self.chance(0.15) else 1 for s in self.factors]
        reach = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
        if self.chance(0.5):
            begins = [r // 2 for r in reach]
            pads = [*begins, *(r - b for r, b in zip(reach, begins, strict=True))]
        else:
            pads = [int(self.rng.integers(0, r + 1)) for r in (*reach, *reach)]
        room = [n + pads[i] + pads[self.rank + i] - reach[i] for i, n in enumerate(self.large())]
        pads = [pad if room[i % self.rank] > 0 else reach[i % self.rank] for i, pad in enumerate(pads)]
        m = group * int(self.pick([1, 2, 3]))
        weight = self.constant(self.numbers(m, channels // group, *kernel))
        bias = [self.constant(self.numbers(m))] if self.chance(0.5) else []
        split = [int(self.rng.integers(0, pad + 1)) for pad in pads] if self.chance(0.2) else [0] * len(pads)
        if any(split):
            outer = [0, 0, *split[: self.rank], 0, 0, *split[self.rank :]]
            if self.opset < 11:
                x = self.add("Pad", x, pads=outer)
            else:
                x = self.add("Pad", x, self.constant(outer))
        pads = [pad - part for pad, part in zip(pads, split, strict=True)]
        y = self.add("Conv", x, weight, *bias, kernel_shape=kernel, pads=pads, dilations=dilations, group=group)
        for op_type in ("BatchNormalization", "Relu"):
            if self.chance(0.3):
                more = [self.constant(np.abs(self.numbers(m)) + 1) for _ in range(4)] if op_type != "Relu" else []
                y = self.add(op_type, y, *more)
        return y

    def finish(self, outputs: list[str]) -> onnx.ModelProto:
        """The model that was built."""

        def shape(dims: list[int]) -> list:
            return ["N", dims[1], *(f"S{axis}" for axis in range(self.rank))] if self.open else dims

        kind = TensorProto.FLOAT
        large = {name: dims[2:] == self.large() for name, dims in self.inputs.items()}
        shapes = {name: shape(dims) for name, dims in self.inputs.items()}
        for name in filter(large.get, shapes):
            shapes[name] = [f"L{d}" if isinstance(d, str) and d != "N" else d for d in shapes[name]]
        inputs = [helper.make_tensor_value_info(name, kind, dims) for name, dims in shapes.items()]
        found = [helper.make_tensor_value_info(name, kind, [f"{name}_{i}" for i in range(self.rank + 2)]) for name in outputs]
        return self.model(inputs, found, self.opset)


def random_upsampled(seed: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray], Maker]:
    """A model with one or two convolutions of upsampled maps, arrays for its inputs, and its maker."""
    maker = Maker(seed)
    structure = maker.pick(["one", "one", "concat", "skip", "skip first", "two readers", "grouped", "shared", "add", "broadcast"])
    u = maker.upsampled()
    channels, normal = maker.channels, True
    if structure == "concat":
        u = maker.add("Concat", u, maker.upsampled(), axis=1)
        channels *= 2
    elif structure.startswith("skip"):
        u = maker.between(u, channels, normal=True)
        pair = [u, maker.input(maker.large())]
        u = maker.add("Concat", *(pair if structure == "skip" else pair[::-1]), axis=1)
        channels, normal = 2 * channels, False
    elif structure in ("add", "broadcast") and not maker.open:
        other = maker.large() if structure == "add" else [*maker.large()[:-1], 1]
        u, normal = maker.add("Add", u, maker.input(other)), False
    h = maker.between(u, channels, normal=normal)
    outputs = [maker.convolution(h, channels, group=2 if structure == "grouped" else 1)]
    if structure == "two readers":
        outputs.append(maker.convolution(h, channels))
    elif structure == "shared":
        outputs.append(maker.add("Neg", h))
    return maker.finish(outputs), {name: maker.numbers(*dims) for name, dims in maker.inputs.items()}, maker


@pytest.mark.parametrize("seed", range(cases(120)))
def test_a_random_model(seed):
    model, feeds, maker = random_upsampled(seed)
    result = convpool.optimize(model, check=0, target="cpu", upsampling=maker.form)
    onnx.checker.check_model(result.model, full_check=True)
    assert_close(model, result.model, feeds, TOLERANCE)
    assert_stable(result.model, target="cpu", upsampling=maker.form)


def test_the_models_have_every_form():
    forms = set()
    for seed in range(100):
        model, _, maker = random_upsampled(seed)
        report = convpool.optimize(model, check=0, target="cpu", upsampling=maker.form).report
        forms |= {site.lowering for site in report.sites if site.status == "rewritten"}
    assert forms >= {"conv_first", "fused", "subpixel", "phases", "direct"}
