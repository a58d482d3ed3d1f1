# SPDX-License-Identifier: Apache-2.0
"""Random networks around pairs: what may stand between them, in either layout, and what may not."""

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.support.random_graph import RandomGraph

KINDS = ("conv", "pair", "pool", "act", "norm", "bias", "residual", "concat", "max", "turn", "mean", "tanh", "grouped", "scale")


class Chain(RandomGraph):
    """A network in the making: maps of 2-D feature maps with the shapes that they have."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.kinds: set[str] = set()

    def data(self, *shape: int) -> str:
        return self.constant(self.rng.uniform(-1, 1, shape).astype(np.float32))

    def conv(self, x: str, shape: tuple, filters: int, kernel: int, group: int = 1) -> tuple[str, tuple]:
        fan_in = shape[1] // group * kernel**2
        weight = self.rng.uniform(-1, 1, (filters, shape[1] // group, kernel, kernel)) * np.sqrt(3 / fan_in)
        inputs = [x, self.constant(weight.astype(np.float32)), self.data(filters)]
        return self.node("Conv", inputs, pads=[kernel // 2] * 4, group=group), (shape[0], filters, *shape[2:])

    def step(self, x: str, shape: tuple) -> tuple[str, tuple]:
        """One more layer of a random kind."""
        kind = str(self.pick(KINDS))
        n, c, h, w = shape
        halves = h % 2 == 0 and w % 2 == 0
        if kind == "max" and not halves or kind in ("pair", "pool") and not halves:
            kind = "act"
        self.kinds.add(kind)
        if kind in ("conv", "pair"):
            y, shape = self.conv(x, shape, int(self.pick([8, 16, 12])), int(self.pick([1, 3])))
            return (y, shape) if kind == "conv" else self.halve(y, shape, "AveragePool")
        if kind in ("pool", "max"):
            return self.halve(x, shape, "AveragePool" if kind == "pool" else "MaxPool")
        if kind == "grouped":
            return self.conv(x, shape, c, 3, group=4) if c % 4 == 0 else (x, shape)
        if kind in ("act", "tanh"):
            return self.node(str(self.pick(["Relu", "LeakyRelu"])) if kind == "act" else "Tanh", [x]), shape
        if kind == "norm":
            variance = self.constant(self.rng.uniform(0.5, 2, c).astype(np.float32))
            return self.node("BatchNormalization", [x, self.data(c), self.data(c), self.data(c), variance]), shape
        if kind in ("bias", "scale"):
            sizes = self.pick([(c, 1, 1), (1, c, 1, 1), (1,), (h, w), (c, h, 1)])
            operands = [x, self.data(*sizes)]
            return self.node("Add" if kind == "bias" else "Mul", operands if self.rng.random() < 0.7 else operands[::-1]), shape
        if kind in ("residual", "concat"):
            y, _ = self.conv(x, shape, c, 3)
            if kind == "residual":
                return self.node("Add", [x, y]), shape
            return self.node("Concat", [x, y], axis=int(self.pick([1, -3]))), (n, 2 * c, h, w)
        if kind == "turn":
            return self.node("Transpose", [x], perm=[0, 1, 3, 2]), (n, c, w, h)
        y = self.node("ReduceMean", [x], axes=[2, 3])
        return self.node("Mul", [x, self.node("Sigmoid", [y])]), shape

    def halve(self, x: str, shape: tuple, op_type: str) -> tuple[str, tuple]:
        y = self.node(op_type, [x], kernel_shape=[2, 2], strides=[2, 2])
        return y, (*shape[:2], shape[2] // 2, shape[3] // 2)


def make_chain(seed: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray], set[str]]:
    """A model of one to three outputs, its input, and the kinds of layers that it has."""
    chain = Chain(seed)
    shape = (2, int(chain.pick([3, 8, 16])), 16, int(chain.pick([16, 8])))
    x, rows = "x", [chain.pick(["N", 2]), *shape[1:]]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, rows)]
    feeds = {"x": chain.rng.uniform(-1, 1, shape).astype(np.float32)}
    if chain.rng.random() < 0.2:  # as TensorFlow's exporters begin
        feeds["x"] = np.moveaxis(feeds["x"], 1, -1).copy()
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows[0], *feeds["x"].shape[1:]])]
        x = chain.node("Transpose", ["x"], perm=[0, 3, 1, 2])
    outputs = []
    for _ in range(int(chain.rng.integers(4, 12))):
        x, shape = chain.step(x, shape)
        if chain.rng.random() < 0.05:
            outputs.append(x)
    x, shape = chain.conv(x, shape, 8, 3)
    if shape[2] % 2 == 0 and shape[3] % 2 == 0:
        x, shape = chain.halve(x, shape, "AveragePool")
    end = str(chain.pick(["map", "mean", "sum", "flatten", "global", "last"]))
    if end == "mean":
        x = chain.node("ReduceMean", [x], axes=[2, 3], keepdims=0)
    elif end == "sum":
        x = chain.node("ReduceSum", [x, chain.constant(np.array([-1, -2]))], keepdims=0)
    elif end in ("flatten", "global"):
        x = chain.node("Flatten", [chain.node("GlobalAveragePool", [x]) if end == "global" else x])
    elif end == "last":
        x = chain.node("Transpose", [x], perm=[0, 2, 3, 1])
    names = list(dict.fromkeys([*outputs, x]))
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
    return chain.model(inputs, values, 17), feeds, chain.kinds | {end}
