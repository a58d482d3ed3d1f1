# SPDX-License-Identifier: Apache-2.0
"""A base of the makers of random models."""

import numpy as np
import onnx
from onnx import helper, numpy_helper


class RandomGraph:
    """Nodes and constants in the making, and what is drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.count = 0

    def pick(self, options):
        return options[int(self.rng.integers(len(options)))]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def fresh(self, stem: str = "t") -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def constant(self, values, dtype=None) -> str:
        """The name of a new initializer."""
        name = self.fresh("c")
        self.initializers.append(numpy_helper.from_array(np.asarray(values, dtype, order="C"), name))
        return name

    def node(self, op_type: str, inputs: list[str], outputs: int = 1, **attributes) -> str | list[str]:
        """The name of what a new node gives; names of several outputs."""
        names = [self.fresh() for _ in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, names, name=f"{op_type}_{names[0]}", **attributes))
        return names[0] if outputs == 1 else names

    def model(self, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto], opset: int) -> onnx.ModelProto:
        body = helper.make_graph(self.nodes, "random", inputs, outputs, self.initializers)
        return helper.make_model(body, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
