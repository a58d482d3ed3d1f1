# SPDX-License-Identifier: Apache-2.0
"""A layer whose box means the library sums in the 16-bit type where it may: its models, and how far from exact it may be."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper

from convpool.algebra.geometry import ConvSpec, PoolSpec
from convpool.cuda import Problem
from convpool.errors import ConvpoolError
from convpool.ir import schema
from tests.support.gpu import skip_or_fail
from tests.support.kernels import conv_reference
from tests.support.models import model_of

N, C, M, SIZE = 16, 64, 64, 32
TYPES = {"float16": (np.float16, TensorProto.FLOAT16), "bfloat16": (ml_dtypes.bfloat16, TensorProto.BFLOAT16)}


class PackedLayer:
    """x [N, C, H, W], w [M, C, 3, 3] and b [M], exact in `dtype`, for a convolution padded by 1 and an average pooling of 2x2."""

    def __init__(self, dtype: str = "float16") -> None:
        """Skips or fails the calling test where the library would not choose a packed tactic."""
        self.dtype = dtype
        self.problem = Problem(
            n=N, c=C, m=M, spatial=(SIZE, SIZE), kernel_shape=3, strides=2, pool_kernel_shape=2, pool_pads=1,
            bias=True, dtype=dtype, layout="NHWC", accumulation="packed",
        )  # fmt: skip
        self.tactic = self._tactic(self.problem)
        if not self.tactic.packed:
            skip_or_fail(f"no packed tactic is chosen here, but {self.tactic.name}")
        rng = np.random.default_rng(7)
        self.x, self.w, self.b = (
            (rng.standard_normal(shape) * size).astype(TYPES[dtype][0]).astype(np.float32)
            for shape, size in (((N, C, SIZE, SIZE), 1), ((M, C, 3, 3), 1 / 24), ((M,), 1))
        )

    @staticmethod
    def _tactic(problem: Problem):
        try:
            return problem.default_tactic()
        except ConvpoolError as error:
            skip_or_fail(str(error))

    def pair(self) -> onnx.ModelProto:
        """Convolution and pooling in float32."""
        conv = helper.make_node("Conv", ["x", "w", "b"], ["h"], name="conv", pads=[1] * 4)
        pool = helper.make_node("AveragePool", ["h"], ["y"], name="pool", kernel_shape=[2, 2], strides=[2, 2])
        return self._model([conv, pool], self.x.shape, self.w)

    def node(self, accumulation: str) -> onnx.ModelProto:
        """One node of the operator in `dtype`, channels last, between Casts."""
        pool, conv = PoolSpec((2, 2), (1, 1), (1,) * 4, (1, 1)), ConvSpec((3, 3), (2, 2), (0,) * 4, (1, 1), 1)
        node = schema.make_node(["x_", "w_", "b_"], "y_", pool, conv, "node")
        schema.give_accumulation(node, accumulation)
        schema.give_layout(node, 1)
        schema.complete_layouts([node])
        casts = [helper.make_node("Cast", [name], [f"{name}_"], to=TYPES[self.dtype][1]) for name in "xwb"]
        nodes = [*casts, node, helper.make_node("Cast", ["y_"], ["y"], to=TensorProto.FLOAT)]
        return self._model(nodes, (N, SIZE, SIZE, C), np.ascontiguousarray(np.moveaxis(self.w, 1, -1)))

    def _model(self, nodes: list[onnx.NodeProto], x_shape: tuple[int, ...], w: np.ndarray) -> onnx.ModelProto:
        return model_of(nodes, {"x": x_shape}, {"y": [None] * 4}, {"w": w, "b": self.b})

    def check(self, packed: np.ndarray, default: np.ndarray, *, differ: bool = True) -> None:
        """Compare results [N, M, h, w] with the exact one, each within its own bound.  differ: they were summed in two ways."""
        x, w = self.x.astype(np.float64), np.moveaxis(self.w, 1, -1).astype(np.float64)
        before = conv_reference.linear(self.problem, x, w) + self.b.reshape(1, -1, 1, 1)
        sums = conv_reference.linear(self.problem, np.abs(x), np.abs(w))
        exact = self._tactic(replace(self.problem, accumulation="default"))
        for y, tactic in ((packed, self.tactic), (default, exact)):
            found = y.astype(np.float64)
            assert found.shape == before.shape and np.isfinite(found).all()
            limit = conv_reference.bound(self.problem, tactic, x, w, sums, before)
            worst = float(np.max(np.abs(found - before) / limit))
            assert worst <= 1, f"{tactic.name}: {worst:.2f} of the bound"
        assert not differ or packed.astype(np.float64).tobytes() != default.astype(np.float64).tobytes()
