"""`conv_avg_pool`: the operator on GPU arrays.

    Y = act(Conv(AveragePool(f(X), count_include_pad=1), OIHW(W), B) + R),  f(x) = pre(scale[c] * x + shift[c])

The convolution of box means is the average pooling of the convolution (Suita et al., JPDC 2020; Kasagi et al., MLSP
2017), with a quarter of the multiplications where the pooling is 2x2.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from convpool.cuda import arrays, library
from convpool.cuda.errors import ArrayError, ProblemError
from convpool.cuda.problem import EIGHT_BIT, Problem, Tactic, channels_last, find_tactic


def _describe(x: arrays.ArrayView, w: arrays.ArrayView, layout: str, group: int, options: dict[str, Any]) -> Problem:
    rank = len(x.shape) - 2
    if not 1 <= rank <= library.MAX_RANK:
        raise ArrayError(f"x: wrong number of dimensions; got shape {x.shape}, expected 3 to 5")
    if len(w.shape) != rank + 2:
        raise ArrayError(f"w: wrong number of dimensions; got shape {w.shape}, expected {rank + 2}: [M, kernel, C/group]")
    if x.dtype not in library.DTYPES:
        raise ArrayError(f"x: wrong type; got {x.dtype}, expected {', '.join(library.DTYPES)}")
    x_float = x.dtype == "float32" and w.dtype in ("float16", "bfloat16")
    if w.dtype != x.dtype and not x_float:
        raise ArrayError(f"w: wrong type; got {w.dtype}, expected {x.dtype}, the type of x")
    last = channels_last(layout)
    channels, spatial = (x.shape[-1], x.shape[1:-1]) if last else (x.shape[1], x.shape[2:])
    if group < 1 or w.shape[-1] * group != channels:
        raise ArrayError(
            f"w: wrong last dimension; got {w.shape[-1]} with group {group}, expected C / group of x, whose shape "
            f"{x.shape} in layout {layout} has C = {channels}"
        )
    return Problem(
        n=x.shape[0],
        c=channels,
        m=w.shape[0],
        spatial=spatial,
        kernel_shape=w.shape[1:-1],
        dtype=w.dtype,
        x_dtype=x.dtype,
        layout=layout,
        group=group,
        **options,
    )


def _expect(view: arrays.ArrayView, shape: tuple[int, ...], dtype: str, like: str) -> None:
    if view.shape != shape:
        raise ArrayError(f"{view.name}: wrong shape; got {view.shape}, expected {shape}")
    if view.dtype != dtype:
        raise ArrayError(f"{view.name}: wrong type; got {view.dtype}, expected {dtype}{like}")


def _expect_device(view: arrays.ArrayView, x: arrays.ArrayView) -> None:
    if None not in (view.device, x.device) and view.device != x.device:
        raise ArrayError(f"{view.name}: on another device; got device {view.device}, expected {x.device}, that of x")


def _expect_own_memory(view: arrays.ArrayView, all_views: list[arrays.ArrayView]) -> None:
    if view.read_only:
        raise ArrayError(f"{view.name}: read-only; got an array that must not be written, expected one that may")
    for other in all_views:
        if other is not view and max(view.pointer, other.pointer) < min(view.pointer + view.nbytes, other.pointer + other.nbytes):
            raise ArrayError(f"{view.name}: overlaps {other.name}; got memory in common, expected an array of its own")


def conv_avg_pool(
    x: Any,
    w: Any,
    b: Any = None,
    *,
    pool_kernel_shape: Sequence[int] | int,
    residual: Any = None,
    scale: Any = None,
    shift: Any = None,
    w_scale: Any = None,
    prologue_activation: str | None = None,
    prologue_alpha: float = 0.0,
    pool_strides: Sequence[int] | int | None = None,
    pool_pads: Sequence[int] | int | None = None,
    pool_dilations: Sequence[int] | int | None = None,
    strides: Sequence[int] | int | None = None,
    pads: Sequence[int] | int | None = None,
    dilations: Sequence[int] | int | None = None,
    group: int = 1,
    activation: str | None = None,
    alpha: float = 0.0,
    beta: float = 0.0,
    layout: str = "NCHW",
    y_layout: str | None = None,
    out: Any = None,
    workspace: Any = None,
    weights_prepared: bool = False,
    stream: Any = None,
    tactic: int | str | Tactic | None = None,
    allow_tf32: bool = False,
) -> Any:
    """Runs ConvAvgPool on the current device, on `stream`, without waiting for it; returns `out`.

    x is [N, C, spatial...] or, in layout NHWC, [N, spatial..., C]; w is [M, kernel..., C/group]; b is [M]; scale and
    shift, both or neither, are [C]; residual and out are [N, M, out...] or [N, out..., M] in y_layout (default: layout).
    All have one type, float16, bfloat16 or float32 (x may be float32 beside a 16-bit w: it is rounded to w's type as it is
    read, by the tactics for few channels and by generic).  Or x and w are both int8 or both float8_e4m3fn: then out, b and
    residual are float16, bfloat16 or float32 (out is float32 if left out), w_scale may be a float32 [M] that multiplies the sum,
    and there are no scale, shift and prologue_activation.  Arrays are contiguous, and come from pycuda, CuPy, PyTorch or anything
    with DLPack or __cuda_array_interface__.  out and workspace share no memory with another array.
    pool_* are AveragePool's attributes and strides, pads, dilations Conv's, over the pooled tensor; a single number
    stands for every dimension.  activation is None, "relu", "leaky_relu" (slope alpha), "tanh", "sigmoid" or "clip" (to
    alpha..beta); prologue_activation, before the pooling, None, "relu" or "leaky_relu" (slope prologue_alpha).

    out is allocated by the library that made x if it is left out.  tactic is an id or name of `tactics()`; left out,
    the library picks one, as measured or by its cost rule, within `workspace` (any GPU array; its bytes count), so without
    one only among those that need none.  The fastest often need some: `Problem.default_tactic(max_workspace_bytes=...)`
    names them.  A tactic that needs more workspace than given gets it allocated by x's library.  weights_prepared says
    that the workspace still holds what an earlier call with the same w, tactic and shapes left there, so that w is not
    transformed again.  float32 is computed at full precision unless allow_tf32.

    Raises ArrayError (an array of wrong type, shape, order or device), ProblemError (arguments that are no
    ConvAvgPool), UnsupportedError (the tactic does not run this), LibraryError (no libconvpool.so), CudaError.
    """
    if (scale is None) != (shift is None):
        missing, given = ("scale", "shift") if scale is None else ("shift", "scale")
        raise ArrayError(f"{missing}: missing; got None, expected an array, since {given} is given; give both or neither")
    views = {name: arrays.view(name, a) for name, a in (("x", x), ("w", w))}
    vx = views["x"]
    if None not in (vx.device, current := library.current_ordinal()) and vx.device != current:
        raise ArrayError(f"x: not on the current device; got device {vx.device}, expected {current}; make x's the current one")
    options = dict(
        pool_kernel_shape=pool_kernel_shape,
        pool_strides=pool_strides,
        pool_pads=pool_pads,
        pool_dilations=pool_dilations,
        strides=strides,
        pads=pads,
        dilations=dilations,
        activation=activation,
        alpha=alpha,
        beta=beta,
        allow_tf32=allow_tf32,
        bias=b is not None,
        residual=residual is not None,
        y_layout=y_layout,
        prologue_affine=scale is not None,
        w_scale=w_scale is not None,
        prologue_activation=prologue_activation,
        prologue_alpha=prologue_alpha,
    )
    eight_bit = views["w"].dtype in EIGHT_BIT
    if eight_bit and out is not None:
        options["y_dtype"] = arrays.view("out", out).dtype
    problem = _describe(vx, views["w"], layout, group, options)
    _expect_device(views["w"], vx)
    y_shape = problem.y_shape
    if out is None:
        out = arrays.empty_like_maker(x, y_shape, problem.dtypes[2], stream)
        if out is None:
            raise ArrayError(f"out: missing; got None, expected an array, since {type(x).__name__} is of no known library")
    like = ", the type of out" if eight_bit else ", the type of w"
    for name, array, shape, dtype in (
        ("b", b, (problem.m,), problem.dtypes[2]),
        ("residual", residual, y_shape, problem.dtypes[2]),
        ("scale", scale, (problem.c,), problem.dtypes[1]),
        ("shift", shift, (problem.c,), problem.dtypes[1]),
        ("w_scale", w_scale, (problem.m,), "float32"),
        ("out", out, y_shape, problem.dtypes[2]),
    ):
        if array is not None:
            views[name] = arrays.view(name, array)
            _expect(views[name], shape, dtype, "" if name == "w_scale" else like)
            _expect_device(views[name], vx)

    space = None if workspace is None else arrays.view("workspace", workspace)
    space_bytes = 0 if space is None else space.nbytes
    if space is not None:
        _expect_device(space, vx)
    if weights_prepared and (workspace is None or tactic is None):
        raise ProblemError("weights_prepared: nothing to reuse; got no workspace or no tactic, expected both")
    if tactic is not None:
        needed = problem.workspace_bytes(tactic)
        if needed > space_bytes:
            if weights_prepared:
                raise ProblemError(f"weights_prepared: no workspace of this tactic; got {space_bytes} bytes, expected {needed}")
            workspace = arrays.empty_like_maker(x, (needed // 4,), "float32", stream)
            if workspace is None:
                raise ProblemError(f"workspace: too small; got {space_bytes} bytes, expected {needed} for this tactic")
            space, space_bytes = arrays.view("workspace", workspace), needed

    tensors = library.TensorsStruct(struct_size=ctypes.sizeof(library.TensorsStruct))
    tensors.flags = library.WEIGHTS_PREPARED if weights_prepared else 0
    tensors.x, tensors.w, tensors.y = vx.pointer, views["w"].pointer, views["out"].pointer
    for name in ("b", "residual", "scale", "shift", "w_scale"):
        setattr(tensors, name, views[name].pointer if name in views else None)
    tensors.workspace = space.pointer if space is not None else None
    tensors.workspace_bytes = space_bytes
    chosen = 0 if tactic is None else find_tactic(tactic).id
    handle = arrays.stream_handle(stream)
    if space is not None:
        views["workspace"] = space
    for name in ("out", "workspace"):
        if name in views:
            _expect_own_memory(views[name], list(views.values()))
    library.check(library.load().convpool_launch(problem.struct, chosen, tensors, handle))
    if chosen == 0:
        library.warn_of_tuned_file()
    return out
