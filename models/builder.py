# SPDX-License-Identifier: Apache-2.0
"""A thin layer over onnx-graphsurgeon that writes networks with seeded, platform-independent weights.

Weights: each parameter takes the raw 64-bit words of a PCG64 seeded by (seed, crc32 of its name), keeps 24 bits, and
scales them to U(-b, b). numpy guarantees the raw stream across versions; everything after it is exactly rounded IEEE
arithmetic, so no libm, BLAS or platform changes a bit. U(-b, b) has variance b^2 / 3, hence He's variance
gain / fan_in (He et al., ICCV 2015) asks for b = sqrt(3 gain / fan_in), with gain 2 behind a ReLU and 1 elsewhere.

Layers take and return graphsurgeon Variables; ``shape`` of a Variable is (N or int, C, spatial...) and is followed
through every layer, so that reducible networks know their own sizes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import helper

BATCH_NAME = "N"
_DTYPES = {"float16": np.float16, "float32": np.float32, "float64": np.float64}


class Net:
    """One network under construction.

    ``batch`` is "dynamic" (the symbolic dimension ``N``) or a positive int, ``dtype`` one of float16, float32,
    float64. ``opset`` is 7 or later; below 9 the model is IR 3, whose initializers are graph inputs too.
    """

    def __init__(self, name: str, *, batch: str | int, seed: int, opset: int, dtype: str):
        if batch != "dynamic" and not (isinstance(batch, int) and batch > 0):
            raise ValueError(f"{name}: batch; got {batch!r}, expected 'dynamic' or a positive int")
        if dtype not in _DTYPES:
            raise ValueError(f"{name}: dtype; got {dtype!r}, expected one of {', '.join(_DTYPES)}")
        if not 7 <= opset <= onnx.defs.onnx_opset_version():
            raise ValueError(f"{name}: opset; got {opset}, expected 7 to {onnx.defs.onnx_opset_version()}")
        self.batch = BATCH_NAME if batch == "dynamic" else batch
        self.seed = seed
        self.opset = opset
        self.dtype = _DTYPES[dtype]
        self.graph = gs.Graph(name=name, opset=opset)

    # Tensors

    def input(self, name: str, *shape: int) -> gs.Variable:
        """A graph input of ``shape`` without the batch dimension."""
        x = gs.Variable(name, dtype=self.dtype, shape=(self.batch, *shape))
        self.graph.inputs.append(x)
        return x

    def output(self, x: gs.Variable, name: str) -> None:
        """Names ``x`` as the next graph output."""
        x.name, x.dtype = name, self.dtype
        self.graph.outputs.append(x)

    def uniform(self, name: str, shape: Sequence[int], low: float, high: float) -> gs.Constant:
        """A parameter with U(low, high) entries that depend on the seed and on ``name`` only."""
        bits = np.random.PCG64(np.random.SeedSequence([self.seed, zlib.crc32(name.encode())]))
        unit = (bits.random_raw(math.prod(shape)) >> np.uint64(40)).astype(np.float64) * 2.0**-24
        return gs.Constant(name, (low + (high - low) * unit).astype(self.dtype).reshape(shape))

    def constant(self, name: str, values: np.ndarray) -> gs.Constant:
        """A constant with these values, in the model's type."""
        return gs.Constant(name, values.astype(self.dtype))

    def scalar(self, name: str, value: float) -> gs.Constant:
        """A constant of no axes, in the model's type."""
        return gs.Constant(name, np.array(value, dtype=self.dtype))

    def ints(self, name: str, *values: int) -> gs.Constant:
        """A constant of one axis, int64."""
        return gs.Constant(name, np.array(values, dtype=np.int64))

    def op(self, op: str, name: str, inputs: Sequence[gs.Tensor], shape: Sequence, **attrs) -> gs.Variable:
        """Appends one node with one output of ``shape``."""
        y = gs.Variable(f"{name}_output", shape=tuple(shape))
        self.graph.nodes.append(gs.Node(op=op, name=name, inputs=list(inputs), outputs=[y], attrs=attrs))
        return y

    # Layers

    def conv(self, x, name, channels, kernel, *, stride=1, pads=None, group=1, bias=True, gain=2.0) -> gs.Variable:
        """Convolution of any rank; ``pads`` defaults to kernel // 2 on both sides."""
        rank = len(x.shape) - 2
        kernel, stride = _per_axis(kernel, rank), _per_axis(stride, rank)
        pads = [k // 2 for k in kernel] if pads is None else _per_axis(pads, rank)
        fan_in = x.shape[1] // group * math.prod(kernel)
        bound = math.sqrt(3.0 * gain / fan_in)
        inputs = [x, self.uniform(f"{name}.weight", (channels, x.shape[1] // group, *kernel), -bound, bound)]
        if bias:
            inputs.append(self.uniform(f"{name}.bias", (channels,), -0.1, 0.1))
        spatial = _output_sizes(name, x, kernel, stride, pads)
        return self.op(
            "Conv",
            name,
            inputs,
            (x.shape[0], channels, *spatial),
            kernel_shape=kernel,
            strides=stride,
            pads=pads * 2,
            dilations=[1] * rank,
            group=group,
        )

    def batch_norm(self, x, name) -> gs.Variable:
        """BatchNormalization in inference form, statistics like those of a trained network."""
        ranges = {"scale": (0.7, 1.3), "bias": (-0.3, 0.3), "mean": (-0.3, 0.3), "var": (0.6, 1.6)}
        stats = [self.uniform(f"{name}.{key}", (x.shape[1],), *bounds) for key, bounds in ranges.items()]
        return self.op("BatchNormalization", name, [x, *stats], x.shape, epsilon=1e-5)

    def instance_norm(self, x, name) -> gs.Variable:
        """InstanceNormalization with a scale and a shift."""
        params = [
            self.uniform(f"{name}.{key}", (x.shape[1],), *bounds)
            for key, bounds in (("scale", (0.7, 1.3)), ("bias", (-0.3, 0.3)))
        ]
        return self.op("InstanceNormalization", name, [x, *params], x.shape, epsilon=1e-5)

    def upsample(self, x, name, factor=2, *, mode="nearest") -> gs.Variable:
        """Resize by a whole factor as PyTorch exports it, "nearest" or "linear"; opset 13 or later, else Upsample."""
        shape = (*x.shape[:2], *(n * factor for n in x.shape[2:]))
        scales = gs.Constant(f"{name}.scales", np.array([1, 1, *[factor] * (len(shape) - 2)], np.float32))
        if self.opset < 9:
            return self.op("Upsample", name, [x], shape, mode=mode, scales=[float(value) for value in scales.values])
        if self.opset < 11:
            return self.op("Upsample" if self.opset < 10 else "Resize", name, [x, scales], shape, mode=mode)
        roi = gs.Constant(f"{name}.roi", np.zeros(0, np.float32)) if self.opset < 13 else gs.Variable("")
        nearest = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        linear = {"coordinate_transformation_mode": "half_pixel"}
        return self.op("Resize", name, [x, roi, scales], shape, mode=mode, **(nearest if mode == "nearest" else linear))

    def act(self, x, name, kind="Relu", **attrs) -> gs.Variable:
        """An elementwise operator: Relu, LeakyRelu (alpha), Elu, Tanh, Sigmoid."""
        return self.op(kind, name, [x], x.shape, **attrs)

    def pool(self, x, name, kernel=2, *, stride=None, pads=0, kind="AveragePool", **attrs) -> gs.Variable:
        """AveragePool or MaxPool without partial windows; ``stride`` defaults to the kernel."""
        rank = len(x.shape) - 2
        kernel, pads = _per_axis(kernel, rank), _per_axis(pads, rank)
        stride = kernel if stride is None else _per_axis(stride, rank)
        spatial = _output_sizes(name, x, kernel, stride, pads)
        return self.op(kind, name, [x], (*x.shape[:2], *spatial), kernel_shape=kernel, strides=stride, pads=pads * 2, **attrs)

    def global_pool(self, x, name) -> gs.Variable:
        """GlobalAveragePool, [N, C, 1...]."""
        return self.op("GlobalAveragePool", name, [x], (*x.shape[:2], *[1] * (len(x.shape) - 2)))

    def reduce(self, x, name, kind: str, axes: Sequence[int]) -> gs.Variable:
        """ReduceSum, ReduceMean or ReduceMax without the reduced axes; axes move to an input at opset 13 or 18."""
        shape = [n for axis, n in enumerate(x.shape) if axis not in axes]
        if self.opset >= (13 if kind == "ReduceSum" else 18):
            return self.op(kind, name, [x, self.ints(f"{name}.axes", *axes)], shape, keepdims=0)
        return self.op(kind, name, [x], shape, axes=list(axes), keepdims=0)

    def slice(self, x, name, start: int, step: int, axis: int) -> gs.Variable:
        """x[..., start::step, ...] along ``axis`` (opset 10 or later: older Slices have no step)."""
        if self.opset < 10:
            raise ValueError(f"{name}: strided Slice; got opset {self.opset}, expected 10 or later")
        bounds = {"starts": start, "ends": 2**63 - 1, "axes": axis, "steps": step}
        inputs = [x, *(self.ints(f"{name}.{key}", value) for key, value in bounds.items())]
        shape = list(x.shape)
        shape[axis] = len(range(start, shape[axis], step))
        return self.op("Slice", name, inputs, shape)

    def add(self, a, b, name) -> gs.Variable:
        """Add; `b` is no larger than `a`."""
        return self.op("Add", name, [a, b], a.shape)

    def concat(self, xs, name) -> gs.Variable:
        """Concat of channels."""
        channels = sum(x.shape[1] for x in xs)
        return self.op("Concat", name, xs, (xs[0].shape[0], channels, *xs[0].shape[2:]), axis=1)

    def reshape(self, x, name, *shape: int) -> gs.Variable:
        """Reshape to (N, ``shape``...); the batch is copied (0 in the target), so it may be symbolic."""
        return self.op("Reshape", name, [x, self.ints(f"{name}.shape", 0, *shape)], (x.shape[0], *shape))

    def linear(self, x, name, features, gain=1.0) -> gs.Variable:
        """Flatten where needed, then a fully connected layer (Gemm with transB, as PyTorch exports it)."""
        inputs = math.prod(x.shape[1:])
        if len(x.shape) > 2:
            x = self.op("Flatten", f"{name}/flatten", [x], (x.shape[0], inputs), axis=1)
        bound = gain * math.sqrt(3.0 / inputs)
        weight = self.uniform(f"{name}.weight", (features, inputs), -bound, bound)
        bias = self.uniform(f"{name}.bias", (features,), -0.1, 0.1)
        return self.op("Gemm", name, [x, weight, bias], (x.shape[0], features), transB=1)

    # The model

    def model(self) -> onnx.ModelProto:
        """The finished model: no value_info, the oldest IR version that the opset allows."""
        for tensor in self.graph.tensors().values():
            if isinstance(tensor, gs.Variable) and tensor not in self.graph.inputs + self.graph.outputs:
                tensor.shape = None
        model = gs.export_onnx(self.graph)
        model.producer_name, model.producer_version = "convpool.models", ""
        model.ir_version = helper.find_min_ir_version_for(model.opset_import)
        if model.ir_version < 4:
            model.graph.input.extend(helper.make_tensor_value_info(w.name, w.data_type, w.dims) for w in model.graph.initializer)
        return model


def _per_axis(value: int | Sequence[int], rank: int) -> list[int]:
    return [value] * rank if isinstance(value, int) else list(value)


def _output_sizes(name: str, x: gs.Variable, kernel: list[int], stride: list[int], pads: list[int]) -> list[int]:
    """Spatial sizes after a window of ``kernel``, symmetric ``pads``, no partial windows."""
    sizes = [(n + 2 * p - k) // s + 1 for n, p, k, s in zip(x.shape[2:], pads, kernel, stride, strict=True)]
    if min(sizes) < 1:
        raise ValueError(f"{name}: input of size {list(x.shape[2:])}; expected at least the window {kernel}")
    return sizes
