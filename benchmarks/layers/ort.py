# SPDX-License-Identifier: Apache-2.0
"""onnxruntime's CUDA provider on the naive, fused and direct forms, and on ConvAvgPool by the library of custom operators.

A method is a session on a model of one layer, which runs on the stream of the run: it is captured and timed as every other
method.  Weights are initializers, as in a network's file.

| method | model | provider |
|---|---|---|
| ort_cuda_FORM | channels first | its own choice, channels first |
| ort_cuda_FORM_nhwc | as the run's layout, by Transposes at both ends | prefers channels last, where Transposes meet and vanish |
| convpool_ort_cuda | as the run's layout, by the operator's attribute | the library's kernels |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.layers.case import Candidate, Case, Skip
from benchmarks.layers.rows import Row
from convpool.api import optimize
from convpool.errors import OnnxruntimeError
from convpool.ir import schema
from convpool.onnxruntime.session import CPU, CUDA, require_cuda, runtime_module, session
from convpool.types import Accumulation, Lowering

FORMS = ("naive", "fused", "direct")
NAMES = (
    *(f"ort_cuda_{form}{layout}" for form in FORMS for layout in ("", "_nhwc")),
    "convpool_ort_cuda",
)
OPSET = 19
"""The first whose AveragePool has dilations, which the direct form of a strided convolution needs."""
TYPES = {
    "fp16": (TensorProto.FLOAT16, np.float16),
    "tf32": (TensorProto.FLOAT, np.float32),
    "fp32": (TensorProto.FLOAT, np.float32),
}


def layer(row: Row, w: np.ndarray) -> onnx.ModelProto:
    """A model of the original layer.  w [M, C, k, k] in the type of X and Y."""
    kind = helper.np_dtype_to_tensor_dtype(w.dtype)
    conv = helper.make_node("Conv", ["x", "w"], ["maps"], strides=[row.stride] * 2, pads=[row.pad] * 4)
    pool = helper.make_node("AveragePool", ["maps"], ["y"], kernel_shape=[row.pool] * 2, strides=[row.pool_stride] * 2)
    x = helper.make_tensor_value_info("x", kind, (row.n, row.c, row.h, row.w))
    y = helper.make_tensor_value_info("y", kind, (row.n, row.m, *row.out_size))
    graph = helper.make_graph([conv, pool], "layer", [x], [y], [numpy_helper.from_array(w, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)


def in_form(model: onnx.ModelProto, form: str, *, packed: bool = False) -> onnx.ModelProto:
    """The layer in a form.  packed: the operator's node may sum pooling windows in X's type.  Raises Skip where there is none."""
    if form == "naive":
        return model
    accumulation: Accumulation | None = "packed" if packed and form == "convavgpool" else None
    result = optimize(model, lowering=cast(Lowering, form), accumulation=accumulation, check=0)
    if result.model.SerializeToString() == model.SerializeToString():
        raise Skip(next((site.reason for site in result.report.sites if site.reason), "no such form"))
    return result.model


def channels_last(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same with input and output [N, H, W, C]: by the operator's attribute where there is one, else by Transposes."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    nodes = [node for node in graph.node if schema.is_operator(node)]
    if nodes:
        (node,) = nodes
        schema.give_layout(node, 1)
        permuting = schema.complete_layouts(nodes)
        del made.functions[:]
        made.functions.extend(schema.functions_for({node.op_type}, OPSET, permuting))
    else:
        for node in graph.node:
            for names in (node.input, node.output):
                for index, name in enumerate(names):
                    if name in ("x", "y"):
                        names[index] = f"{name}_first"
        graph.node.insert(0, helper.make_node("Transpose", ["x"], ["x_first"], perm=[0, 3, 1, 2]))
        graph.node.append(helper.make_node("Transpose", ["y_first"], ["y"], perm=[0, 2, 3, 1]))
    for value in (*graph.input, *graph.output):
        n, c, h, w = (dim.dim_value for dim in value.type.tensor_type.shape.dim)
        value.type.tensor_type.ClearField("shape")
        for size in (n, h, w, c):
            value.type.tensor_type.shape.dim.add().dim_value = size
    return made


def candidates(name: str) -> Callable[[Case], list[Candidate]]:
    """The maker of a method's one candidate."""
    form = "convavgpool" if name == NAMES[-1] else name.removeprefix("ort_cuda_")
    prefer_nhwc = form.endswith("_nhwc")

    def make(case: Case) -> list[Candidate]:
        if case.precision not in TYPES:
            raise Skip(f"numpy has no {case.precision} to bind outputs by")
        if case.row.prologue and form == "convavgpool":
            raise Skip("without a prologue only")
        try:
            require_cuda(runtime_module())
        except OnnxruntimeError as error:
            raise Skip(str(error)) from error
        return [_candidate(case, form.removesuffix("_nhwc"), prefer_nhwc)]

    return make


def _candidate(case: Case, form: str, prefer_nhwc: bool) -> Candidate:
    layout = case.layout if prefer_nhwc or form == "convavgpool" else "nchw"
    bound: dict[int, list[Callable[[], None]]] = {}  # by the version of the weights, which are initializers
    y = case.out if layout == case.layout else case.empty(*case.shape(*case.row.out_size, case.row.m, layout))

    def call(i: int) -> Any:
        if case.weights_version not in bound:
            bound.clear()
            bound[case.weights_version] = _bind(case, form, prefer_nhwc, layout, y)
        bound[case.weights_version][i]()
        return y

    call(0)  # what cannot be built or run says so here
    return Candidate("onnxruntime " + runtime_module().__version__, call, layout)


def _bind(case: Case, form: str, prefer_nhwc: bool, layout: str, y: Any) -> list[Callable[[], None]]:
    """A run on each set of inputs, which only enqueues."""
    kind, element = TYPES[case.precision]
    model = in_form(layer(case.row, case.w_first.cpu().numpy().astype(element, copy=False)), form, packed=case.row.packed)
    if layout == "nhwc":
        model = channels_last(model)
    options = {
        "use_tf32": str(int(case.precision == "tf32")),
        "prefer_nhwc": str(int(prefer_nhwc)),
        "user_compute_stream": str(case.device.handle),
    }
    if form == "convavgpool":
        made = session(model, [(CUDA, options), CPU])
    else:
        runtime = runtime_module()
        settings = runtime.SessionOptions()
        settings.log_severity_level = 3
        made = runtime.InferenceSession(model.SerializeToString(), settings, providers=[(CUDA, options), CPU])
    queued = runtime_module().RunOptions()
    queued.add_run_config_entry("disable_synchronize_execution_providers", "1")
    runs: list[Callable[[], None]] = []
    for x in case.xs_in(layout):
        binding = made.io_binding()
        binding.bind_input("x", "cuda", 0, element, list(x.shape), x.data_ptr())
        binding.bind_output("y", "cuda", 0, element, list(y.shape), y.data_ptr())
        runs.append(partial(made.run_with_iobinding, binding, queued))
    for _ in range(2):
        runs[0]()  # algorithms are looked for, and memory is taken, before anything is captured
    case.device.torch.cuda.synchronize()
    return runs
