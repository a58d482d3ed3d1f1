# SPDX-License-Identifier: Apache-2.0
"""cuDNN on the naive, fused and direct forms (Suita et al., JPDC 2020), and the direct form on a summed-area table.

Convolutions are cuDNN's, called two ways: every engine that its frontend offers, and PyTorch in benchmark mode.  The
fastest that computes the right result counts.  Without TF32 no engine with tensor cores is used in float32; engines that
round inputs or sums to a narrower type than asked for never are.  Pooling and box means are the kernels of `gather`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.layers.case import NO_POOLING, Candidate, Case, Skip
from benchmarks.layers.device import Device, blocks
from benchmarks.layers.gather import box_means, pooling

Conv = tuple[str, Callable[[Any, Any], Any]]
"""(name, call(x, y)): the convolution of x, written to y, or returned as a tensor of its own."""


def _last(tensor: Any, layout: str) -> Any:
    """The tensor with its logical order [N, C, H, W]."""
    return tensor.permute(0, 3, 1, 2) if layout == "nhwc" else tensor


def _torch_conv(case: Case, w: Any, stride: int, pad: int) -> Conv:
    conv2d, layout = case.device.torch.nn.functional.conv2d, case.layout

    def call(x: Any, y: Any) -> Any:
        made = conv2d(_last(x, layout), w, stride=stride, padding=pad)
        return made.permute(0, 2, 3, 1).contiguous() if layout == "nhwc" else made

    return "PyTorch", call


@functools.cache
def _frontend(device: Device) -> tuple[Any, Any] | None:
    """(cudnn, handle on the device's stream), or None without the package."""
    try:
        import cudnn
    except ImportError:
        return None
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=device.handle)
    return cudnn, handle


def _frontend_convs(case: Case, x: Any, w: Any, y: Any, stride: int, pad: int) -> Iterator[Conv]:
    """Every engine of cuDNN's frontend for the convolution of tensors like x to tensors like y, by cuDNN's own ranking."""
    found = _frontend(case.device)
    if found is None:
        return
    cudnn, handle = found
    names = {"fp16": "HALF", "bf16": "BFLOAT16"}
    kind = getattr(cudnn.data_type, names.get(case.precision, "FLOAT"))
    graph = cudnn.pygraph(
        io_data_type=kind, intermediate_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT, handle=handle
    )
    image, filters, result = (_last(x, case.layout), w, _last(y, case.layout))
    xt, wt = (graph.tensor(dim=list(t.shape), stride=list(t.stride()), data_type=kind) for t in (image, filters))
    yt = graph.conv_fprop(
        image=xt, weight=wt, pre_padding=[pad, pad], post_padding=[pad, pad], stride=[stride, stride], dilation=[1, 1]
    )
    yt.set_output(True).set_data_type(kind).set_dim(list(result.shape)).set_stride(list(result.stride()))
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.B, cudnn.heur_mode.FALLBACK])
        note = cudnn.numerical_note
        barred = [note.DOWN_CONVERT_INPUTS, note.REDUCED_PRECISION_REDUCTION]
        graph.deselect_numeric_notes(barred + ([note.TENSOR_CORE] if case.precision == "fp32" else []))
        graph.check_support()
    except (RuntimeError, cudnn.cudnnGraphNotSupportedError):
        return  # no engine for this; PyTorch's call is left
    tried, built, count = set(), 0, graph.get_execution_plan_count()
    for index in range(count):
        if built == case.device.plans:
            return
        try:
            name = graph.get_plan_name_at_index(index)
            if name in tried:  # the ranking modes name the same engine again
                continue
            tried.add(name)
            graph.build_plan_at_index(index)
            workspace = case.empty(max(1, graph.get_workspace_size_plan_at_index(index)), dtype=case.device.torch.uint8)
        except (RuntimeError, cudnn.cudnnGraphNotSupportedError):
            continue  # barred by its notes, or not for this GPU
        built += 1

        def call(x: Any, y: Any, index: int = index, workspace: Any = workspace) -> None:
            pointers = {xt: x.data_ptr(), wt: filters.data_ptr(), yt: y.data_ptr()}
            graph.execute_plan_at_index(pointers, workspace.data_ptr(), index, handle)

        yield f"cuDNN plan {index + 1} of {count}, {name}", call


def convolutions(case: Case, x: Any, w_last: Any, w_first: Any, y: Any, stride: int, pad: int) -> list[Conv]:
    """Every way to have cuDNN convolve x, which is like the tensors at hand later, into tensors like y."""
    w = w_last.permute(0, 3, 1, 2) if case.layout == "nhwc" else w_first
    return [_torch_conv(case, w, stride, pad), *_frontend_convs(case, x, w, y, stride, pad)]


def naive(case: Case) -> list[Candidate]:
    """The original graph: convolution, then pooling."""
    row = case.row
    if row.pool == 1:
        raise Skip(NO_POOLING)
    between = case.empty(*case.shape(*row.conv_size, row.m))
    pool = pooling(case)

    def after(conv: Callable[[Any, Any], Any]) -> Callable[[int], None]:
        def call(i: int) -> None:
            made = conv(case.xs[i], between)
            pool(between if made is None else made, case.out)

        return call

    convs = convolutions(case, case.xs[0], case.w, case.w_first, between, row.stride, row.pad)
    return [Candidate(how, after(conv)) for how, conv in convs]


def fused(case: Case) -> list[Candidate]:
    """One convolution with the kernel convolved with the box."""
    row = case.row
    convs = convolutions(case, case.xs[0], case.w_fused, case.w_fused_first, case.out, row.total_stride, row.pad)

    def onto_out(conv: Callable[[Any, Any], Any]) -> Callable[[int], Any]:
        return lambda i: conv(case.xs[i], case.out)

    return [Candidate(how, onto_out(conv)) for how, conv in convs]


def _after_means(case: Case, means: Callable[[int], None], z: Any, only: str = "") -> list[Candidate]:
    """The convolution of box means that `means(i)` leaves in z; `only` by the algorithm of that name, if it is there."""
    row = case.row
    stride = 1 if row.pointwise else row.total_stride

    def after(conv: Callable[[Any, Any], Any]) -> Callable[[int], Any]:
        def call(i: int) -> Any:
            means(i)
            return conv(z, case.out)

        return call

    if "convolutions of means" not in case.memo:
        made = convolutions(case, z, case.w, case.w_first, case.out, stride, row.pad - row.box_pad)
        case.memo["convolutions of means"] = made
    convs = case.memo["convolutions of means"]
    return [Candidate(how, after(conv)) for how, conv in [c for c in convs if c[0] == only] or convs]


def direct(case: Case) -> list[Candidate]:
    """Box means, then the strided convolution."""
    if case.row.pool == 1:
        raise Skip(NO_POOLING)
    launch, z = box_means(case)
    return _after_means(case, lambda i: launch(case.xs[i], z), z)


def summed_area(case: Case) -> list[Candidate]:
    """Box means from a summed-area table in float32 (Kasagi et al., MLSP 2017), then the strided convolution."""
    row = case.row
    if row.pool == 1:
        raise Skip(NO_POOLING)
    if case.layout != "nhwc" or row.stride != 1:
        raise Skip("written for channels last and convolutions of stride 1")
    table = case.empty(row.n, row.h, row.w, row.c, dtype=case.device.torch.float32)
    height, width = row.box_size
    z = case.empty(row.n, height, width, row.c)
    rows, columns, boxes = (case.device.kernel(f"sat_{name}", case.precision) for name in ("rows", "columns", "means"))

    def means(i: int) -> None:
        rows((blocks(row.c), row.h, row.n), case.xs[i], table, row.h, row.w, row.c)
        columns((blocks(row.c), row.w, row.n), table, row.h, row.w, row.c)
        boxes((blocks(width * row.c), height, row.n), table, z, row.h, row.w, row.c, height, width, row.box_pad, row.pool)

    if row.pointwise:
        raise Skip("a 1x1 layer's boxes do not overlap: the table gains nothing")
    return _after_means(case, means, z, only=case.chosen.get("cudnn_direct", ""))
