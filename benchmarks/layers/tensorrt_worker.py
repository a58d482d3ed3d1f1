# SPDX-License-Identifier: Apache-2.0
"""TensorRT's own kernels on the naive, fused and direct forms, one request a line; see `benchmarks.layers.tensorrt`.

    {"row": ..., "precision", "layout", "form", "replays", "level"} -> a result as `benchmarks.layers.record` has it

The network has one convolution, with a pooling before or behind it, and its input and output in the type and layout of
the run, so that nothing is converted.  cuBLAS and cuDNN are not among its tactics.  TensorRT 8.6 chooses a type per layer
(fp16 flag); 10 and later are strongly typed.  Needs pycuda, and nvcc for the kernel that empties the L2 cache.
"""

from __future__ import annotations

import ctypes
import functools
import json
import sys
from typing import Any

import numpy as np

from benchmarks.layers import cpu
from benchmarks.layers.case import HALF_SUMS, LIMITS
from benchmarks.layers.record import Result, significant
from benchmarks.layers.rows import Row
from convpool.cuda.timing import input_sets, schedule, summarize
from convpool.errors import ConvpoolError, first_line

WORKSPACE_BYTES = 1 << 30
RANDOM_VALUES = 1 << 24
"""Random inputs repeat after so many values; making more takes longer than measuring."""
RELAXED_CAPTURE = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: TensorRT may call what a strict capture refuses
FLUSH = """
extern "C" __global__ void flush(const float4 *x, float *sink, size_t count) {
    float sum = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x) {
        float4 v = x[i];
        sum += v.x + v.y + v.z + v.w;
    }
    if (sum == -1.0f) *sink = sum;
}
"""


def build(trt: Any, row: Row, form: str, precision: str, layout: str, w: np.ndarray, level: int) -> bytes:
    """A serialised engine of one form.  w [M, C, k, k] in the run's type, fused for the fused form.

    Raises ConvpoolError where TensorRT cannot build it.
    """
    from convpool.tensorrt.package import logger, version
    from convpool.tensorrt.pipeline import choose_patiently

    log = logger(trt)
    log.explain()
    builder = _builder(trt)
    weak = "rtx" not in trt.__name__ and version(trt)[0] < 10
    flag = "EXPLICIT_BATCH" if weak else "STRONGLY_TYPED"
    flags = trt.NetworkDefinitionCreationFlag
    network = builder.create_network(1 << int(getattr(flags, flag)) if hasattr(flags, flag) else 0)
    half = precision in ("fp16", "bf16")
    kind = {"fp16": trt.DataType.HALF, "bf16": getattr(trt.DataType, "BF16", None)}.get(precision, trt.DataType.FLOAT)
    if kind is None:
        raise ConvpoolError(f"TensorRT {trt.__version__} has no bf16")
    x = network.add_input("x", kind, (row.n, row.c, row.h, row.w))
    # TensorRT 8.6 has no weights of an address, and numpy no bfloat16 of its own.
    weights = trt.Weights(kind, w.ctypes.data, w.size) if precision == "bf16" else trt.Weights(w)
    y = _layers(trt, network, row, form, x, weights)
    y.name = "y"
    network.mark_output(y)
    wanted = trt.TensorFormat.LINEAR if layout == "nchw" else trt.TensorFormat.HWC8 if half else trt.TensorFormat.HWC
    for tensor in (x, y):
        if weak:
            tensor.dtype = kind
        tensor.allowed_formats = 1 << int(wanted)
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, WORKSPACE_BYTES)
    if hasattr(config, "builder_optimization_level"):
        config.builder_optimization_level = level
    choose_patiently(config)
    if hasattr(trt.BuilderFlag, "TF32"):
        (config.clear_flag if precision == "fp32" else config.set_flag)(trt.BuilderFlag.TF32)
    if weak and half:
        config.set_flag(getattr(trt.BuilderFlag, precision.upper()))
    sources = [getattr(trt.TacticSource, name, None) for name in ("EDGE_MASK_CONVOLUTIONS", "JIT_CONVOLUTIONS")]
    if any(source is not None for source in sources):
        config.set_tactic_sources(sum(1 << int(source) for source in sources if source is not None))
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise ConvpoolError(f"TensorRT {trt.__version__} cannot build it; got {log.explain() or 'no message'}")
    return bytes(plan)


@functools.cache
def _builder(trt: Any) -> Any:
    """One builder for all requests: every new one loads TensorRT's kernels."""
    from convpool.tensorrt.package import logger

    return trt.Builder(logger(trt))


def _layers(trt: Any, network: Any, row: Row, form: str, x: Any, weights: Any) -> Any:
    def convolve(x: Any, kernel: int, stride: int, pad: int) -> Any:
        layer = network.add_convolution_nd(x, row.m, (kernel, kernel), weights, trt.Weights())
        layer.stride_nd, layer.padding_nd = (stride, stride), (pad, pad)
        return layer.get_output(0)

    def pool(x: Any, stride: int, pad: int) -> Any:
        layer = network.add_pooling_nd(x, trt.PoolingType.AVERAGE, (row.pool, row.pool))
        layer.stride_nd, layer.padding_nd = (stride, stride), (pad, pad)
        layer.average_count_excludes_padding = False
        return layer.get_output(0)

    if form == "naive":
        return pool(convolve(x, row.kernel, row.stride, row.pad), row.pool_stride, 0)
    if form == "fused":
        return convolve(x, row.fused_kernel, row.total_stride, row.pad)
    if row.stride != 1:
        raise ConvpoolError("TensorRT's pooling has no dilation, which box means of a strided convolution need")
    stride = (row.total_stride, 1) if row.pointwise else (1, row.total_stride)
    return convolve(pool(x, stride[0], row.box_pad), row.kernel, stride[1], row.pad - row.box_pad)


def fuse(w: np.ndarray, row: Row) -> np.ndarray:
    """W [M, C, k, k] convolved with the box of means."""
    side, kernel = row.fused_kernel, row.kernel
    fused = np.zeros((row.m, row.c, side, side))
    for u in range(row.pool):
        for v in range(row.pool):
            top, left = u * row.stride, v * row.stride
            fused[:, :, top : top + kernel, left : left + kernel] += w
    return fused / row.pool**2


class Gpu:
    """The GPU through pycuda, in the primary context."""

    def __init__(self) -> None:
        from pycuda.compiler import SourceModule

        from convpool.tensorrt.engine import PycudaMemory

        self.memory = PycudaMemory()
        import pycuda.driver as driver

        self.driver, self.cuda = driver, ctypes.CDLL("libcuda.so.1")
        device = driver.Context.get_device()
        self.l2_bytes = device.get_attribute(driver.device_attribute.L2_CACHE_SIZE)
        self._flush = SourceModule(FLUSH, no_extern_c=True).get_function("flush")
        self._flushed = self.memory.allocate(2 * self.l2_bytes)
        driver.memset_d32(self._flushed, 0, 2 * self.l2_bytes // 4)

    def measure(self, enqueue: Any, sets: int, replays: int) -> dict[str, float]:
        """Median and spread of microseconds of enqueue(i), captured as in `convpool.cuda.timing`."""
        stream = self.memory.stream
        handle, graph, executable = ctypes.c_void_p(stream.handle), ctypes.c_void_p(), ctypes.c_void_p()
        enqueue(0)
        stream.synchronize()
        calls, replays = schedule(max(self.memory.elapsed_us(lambda: enqueue(0)), 1.0), sets, replays)
        self._check(self.cuda.cuStreamBeginCapture_v2(handle, RELAXED_CAPTURE))
        for i in range(calls):
            enqueue(i)
        self._check(self.cuda.cuStreamEndCapture(handle, ctypes.byref(graph)))
        self._check(self.cuda.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)))

        def replay() -> None:
            self._check(self.cuda.cuGraphLaunch(executable, handle))

        replay()
        times = []
        for _ in range(replays):
            count = np.uint64(2 * self.l2_bytes // 16)
            self._flush(self._flushed, self._flushed, count, block=(256, 1, 1), grid=(512, 1), stream=stream)
            times.append(self.memory.elapsed_us(replay) / calls)
        self._check(self.cuda.cuGraphExecDestroy(executable))
        self._check(self.cuda.cuGraphDestroy(graph))
        return summarize(times)

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise ConvpoolError(f"CUDA driver: error {code}")


def _types(precision: str) -> np.dtype:
    if precision == "bf16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(np.float16 if precision == "fp16" else np.float32)


@functools.lru_cache(maxsize=1)  # the forms of a row follow one another
def _data(row: Row, precision: str, layout: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """W [M, C, k, k] and X of random normal numbers, X in the layout, and Y [2, M, P, Q] of its first and last image in
    float64."""
    random, dtype = np.random.default_rng(row.c), _types(precision)
    w = (random.standard_normal((row.m, row.c, row.kernel, row.kernel)) / (row.c * row.kernel**2) ** 0.5).astype(dtype)
    values = row.n * row.c * row.h * row.w
    x = np.resize(random.standard_normal(min(values, RANDOM_VALUES), np.float32).astype(dtype), values)
    x = x.reshape((row.n, row.h, row.w, row.c) if layout == "nhwc" else (row.n, row.c, row.h, row.w))
    return w, x, cpu.reference(_ends(x, layout), w, row)


def _ends(tensor: np.ndarray, layout: str) -> np.ndarray:
    """The first and the last image, channels first, in float64."""
    ends = tensor[[0, -1]]
    return (ends.transpose(0, 3, 1, 2) if layout == "nhwc" else ends).astype(np.float64)


def answer(trt: Any, gpu: Gpu, row: Row, precision: str, layout: str, form: str, replays: int, level: int) -> Result:
    """Build, check on the first and last image, time."""
    if layout == "nhwc" and precision in ("fp16", "bf16") and (row.c % 8 or row.m % 8):
        raise ConvpoolError("TensorRT pads channels to multiples of 8 in this layout")
    w, x, right = _data(row, precision, layout)
    dtype = x.dtype
    used = np.ascontiguousarray(fuse(w.astype(np.float64), row).astype(dtype) if form == "fused" else w)
    from convpool.tensorrt.package import logger

    runtime = trt.Runtime(logger(trt))
    engine = runtime.deserialize_cuda_engine(build(trt, row, form, precision, layout, used, level))
    context = engine.create_execution_context()
    sets = input_sets(x.nbytes, gpu.l2_bytes)
    inputs = [gpu.memory.allocate(x.nbytes) for _ in range(sets)]
    gpu.memory.upload(inputs[0], x, None)
    for buffer in inputs[1:]:
        gpu.driver.memcpy_dtod_async(int(buffer), int(inputs[0]), x.nbytes, gpu.memory.stream)
    (p, q), m, n = row.out_size, row.m, row.n
    y = np.empty((n, p, q, m) if layout == "nhwc" else (n, m, p, q), dtype)
    out = gpu.memory.allocate(y.nbytes)
    gpu.driver.memset_d8(out, 0xFF, y.nbytes)  # not a number in every type
    context.set_tensor_address("y", int(out))

    def enqueue(i: int) -> None:
        context.set_tensor_address("x", int(inputs[i]))
        if not context.execute_async_v3(gpu.memory.stream.handle):
            raise ConvpoolError(f"TensorRT: the run failed; got {logger(trt).explain() or 'no message'}")

    enqueue(0)
    gpu.memory.download(y, out, None)
    gpu.memory.synchronize(None)
    error = float(np.linalg.norm(_ends(y, layout) - right) / np.linalg.norm(right))
    how = f"TensorRT {trt.__version__}, level {level}"
    if not error <= LIMITS[precision] * (HALF_SUMS if precision == "fp16" else 1):
        return {"wrong": error, "how": how}
    return {**gpu.measure(enqueue, sets, replays), "error": significant(error), "exact": False, "how": how}


def main() -> int:
    """Answer requests until the input ends."""
    try:
        from convpool.tensorrt.package import tensorrt_module

        trt, gpu = tensorrt_module(), Gpu()
    except Exception as error:  # no TensorRT, no pycuda, no driver, no nvcc: each with its own exception
        print(json.dumps({"error": first_line(error)}), flush=True)
        return 2
    print(json.dumps({"version": trt.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            result = answer(trt, gpu, Row(**request.pop("row")), **request)
        except Exception as error:  # the bindings' exceptions share no base class; the next request may work
            result = {"skipped": first_line(error)}
            try:
                gpu.memory.synchronize(None)
            except ConvpoolError as broken:  # nothing works in this process any more, and another one is started
                print(f"{first_line(error)}; {first_line(broken)}", file=sys.stderr, flush=True)
                return 3
        print(json.dumps(result), flush=True)
    _builder.cache_clear()  # while the GPU's context is there
    return 0
