# SPDX-License-Identifier: Apache-2.0
"""`conv_avg_pool`: the operator on GPU arrays.

    Y = act(w_scale[m] * Conv(AveragePool(f(X), count_include_pad=1), OIHW(W)) + B + R),  f(x) = pre(scale[c] * x + shift[c])

The convolution of box means is the average pooling of the convolution (Suita et al., JPDC 2020; Kasagi et al., MLSP
2017), with a quarter of the multiplications where the pooling is 2x2.

Types: all arrays have one type, float16, bfloat16 or float32.  x may be float32 beside a 16-bit w: it is rounded to w's type
as it is read, by the tactics for few channels and by generic.  Or x and w are both int8 or both float8_e4m3fn: then out, b and
residual are float16, bfloat16 or float32 (out is float32 if left out), w_scale may be a float32 array, and there are no scale,
shift and prologue_activation.

A call is planned by the kinds of its arrays (shape, type, device), x's class, its options, the workspace's size and whether all
addresses are multiples of 16, and by the current device where x does not tell it; the `CACHED_PLANS` plans made last are kept.
A call planned before checks what may differ between two arrays of one kind: order, address and, of what is written, overlap.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from convpool.cuda import arrays, library
from convpool.cuda.plan import OPERANDS, Plan, shapes_and_types
from convpool.cuda.problem import Problem, Tactic, channels_last
from convpool.errors import ArrayError, ProblemError

CACHED_PLANS = 1024
_plans: dict[Any, _Planned] = {}
_adding = threading.Lock()
_NAMES = (*OPERANDS[:-1], "out")  # which is y to a plan
_X, _W, _B, _RESIDUAL, _SCALE, _SHIFT, _W_SCALE, _OUT = range(8)

Sizes = Sequence[int] | int | None
_POOLING = ("pool_kernel_shape", "pool_strides", "pool_pads", "pool_dilations")
_CONVOLUTION = ("strides", "pads", "dilations", "group")
_ACTIVATIONS = ("activation", "alpha", "beta", "prologue_activation", "prologue_alpha")
_OPTIONS = (*_POOLING, *_CONVOLUTION, *_ACTIVATIONS, "layout", "y_layout", "allow_tf32", "accumulation", "tactic")
"""Arguments of `conv_avg_pool` but arrays and stream; calls have their values as a tuple, the tactic last."""


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
    pool_strides: Sizes = None,
    pool_pads: Sizes = None,
    pool_dilations: Sizes = None,
    strides: Sizes = None,
    pads: Sizes = None,
    dilations: Sizes = None,
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
    accumulation: str = "default",
) -> Any:
    """Run ConvAvgPool on the current device, on `stream`, without waiting for it.

    The module says which types the arrays may have.  They are contiguous, from pycuda, CuPy,
    PyTorch or anything with DLPack or __cuda_array_interface__; out and workspace share no memory
    with another.  One number stands for every dimension.  The attributes are those with the pooling
    done first: a 3x3 convolution with padding 1 and 2x2 pooling behind it is pool_kernel_shape=2,
    pool_pads=1, strides=2.  x's library allocates what is left out:
    out, and the workspace if the tactic needs more than the one given has.

    Args:
        x: The input, [N, C, spatial...] or, in layout NHWC, [N, spatial..., C].
        w: The weights, [M, kernel..., C/group].
        b: The bias, [M].
        pool_kernel_shape: AveragePool's attribute.
        residual: An addend of the shape of out.
        scale: The prologue's factor by channel, [C]; both or neither of scale and shift.
        shift: The prologue's summand by channel, [C].
        w_scale: Factors of 8-bit sums by output channel, [M].
        prologue_activation: The activation before the pooling: None, "relu", "leaky_relu" or "silu".
        prologue_alpha: The slope of that "leaky_relu".
        pool_strides: AveragePool's attribute.
        pool_pads: AveragePool's attribute.
        pool_dilations: AveragePool's attribute.
        strides: Conv's attribute, over the pooled tensor.
        pads: Conv's attribute, over the pooled tensor.
        dilations: Conv's attribute, over the pooled tensor.
        group: Conv's attribute.
        activation: None, "relu", "leaky_relu" (slope alpha), "tanh", "sigmoid", "silu" or "clip" (to
            alpha..beta).
        alpha: The slope of "leaky_relu", or the lower bound of "clip".
        beta: The upper bound of "clip".
        layout: The layout of x, such as "NCHW" or "NHWC".
        y_layout: The layout of out and residual.  Default: `layout`.
        out: The result, [N, M, out...] or [N, out..., M] in y_layout.
        workspace: Any GPU array; its bytes count.  Without `tactic`, a workspace given bounds the
            choice; so does none, except with CuPy and PyTorch, which free one without waiting.
        weights_prepared: True says that w is what it was in an earlier call with the same tactic
            and shapes, and that the workspace still holds what that call left there; both may be
            read before work queued earlier is done.
        stream: The stream.  Default: the default stream.
        tactic: An id or name of `tactics()`; None lets the library choose, as `plan_for` tells.
        allow_tf32: Round float32 products to TF32; else they have full precision.
        accumulation: "default" sums box means in float32; "packed" lets tactics sum those of
            float16 and bfloat16 in that type, at most twice the rounding error of the means.

    Returns:
        `out`.

    Raises:
        ArrayError: An array of wrong type, shape, order or device.
        ProblemError: Arguments that are no ConvAvgPool.
        UnsupportedError: The tactic does not run this.
        LibraryError: No libconvpool.so.
        CudaError: A failure of CUDA, or no GPU.
    """
    operands = (x, w, b, residual, scale, shift, w_scale, out)
    pooling = pool_kernel_shape, pool_strides, pool_pads, pool_dilations
    convolution = strides, pads, dilations, group
    activations = activation, alpha, beta, prologue_activation, prologue_alpha
    options = (*pooling, *convolution, *activations, layout, y_layout, allow_tf32, accumulation, tactic)  # as in _OPTIONS
    stream = 0 if stream is None else arrays.stream_handle(stream)
    call = _Call(operands, options, workspace, weights_prepared)
    planned = _planned(call)
    pointers = call.pointers
    if out is None:
        out, pointers[_OUT] = planned.make_out(x, stream)
    workspace_at, workspace_bytes = (call.workspace[0], call.workspace_bytes) if call.workspace is not None else (0, 0)
    if planned.plan.workspace_bytes > workspace_bytes:
        workspace_bytes = planned.plan.workspace_bytes
        workspace, workspace_at = planned.make_workspace(x, stream)
    flags = library.WEIGHTS_PREPARED if weights_prepared else 0
    try:
        planned.plan.launch_raw(pointers, workspace_at, workspace_bytes, stream, flags)
    except ProblemError:
        _expect_current_device(call.kinds[_X][2], library.current_ordinal())  # which says it in other words than the library
        raise
    return out


def plan_for(x: Any, w: Any, b: Any = None, **options: Any) -> Plan:
    """Return the plan that `conv_avg_pool` launches for the same arguments; launch nothing.

    It is made if there is none yet, and tells its tactic, how that was chosen, the expected time
    and the workspace.

    Args:
        x: As in `conv_avg_pool`, like all the others.
        w: The weights.
        b: The bias.
        **options: The other arguments of `conv_avg_pool`.

    Raises:
        ConvpoolError: As `conv_avg_pool` does.
    """
    bound = inspect.signature(conv_avg_pool).bind(x, w, b, **options)
    bound.apply_defaults()
    given = bound.arguments
    operands, chosen = tuple(given[name] for name in _NAMES), tuple(given[name] for name in _OPTIONS)
    return _planned(_Call(operands, chosen, given["workspace"], given["weights_prepared"])).plan


class _Planned(NamedTuple):
    """A plan, and what makes `out` and a workspace for it: None only where nothing has to be made."""

    plan: Plan
    make_out: Any
    make_workspace: Any


class _Call:
    """The arrays of one call as they were read (`arrays.Reading`: address, kind, bytes of an element, read-only; a kind is shape,
    type and device), and the key of its plan."""

    __slots__ = ("bits", "key", "kinds", "operands", "options", "pointers", "readings", "weights_prepared", "workspace")

    def __init__(self, operands: tuple, options: tuple, workspace: Any, weights_prepared: bool) -> None:
        readings: list[Any] = []
        kinds: list[Any] = []
        pointers, bits, readers = [], 0, arrays.readers
        for name, array in zip(_NAMES, operands, strict=True):
            if array is None:
                readings.append(None)
                pointers.append(0)
                kinds.append(None)
            else:
                reading = (readers.get(type(array)) or arrays.read)(name, array)
                readings.append(reading)
                pointers.append(reading[0])
                kinds.append(reading[1])
                bits |= reading[0]
        self.operands, self.options, self.readings, self.pointers, self.kinds = operands, options, readings, pointers, kinds
        self.workspace = None if workspace is None else arrays.read("workspace", workspace)
        self.weights_prepared = weights_prepared
        self.bits = bits & 15
        device = None if kinds[_X][2] is not None else library.current_ordinal()  # where x does not tell
        space = None if self.workspace is None else (arrays.nbytes(self.workspace), self.workspace[1][2])  # [2]: the device
        self.key = (options, type(operands[_X]), *kinds, self.bits == 0, space, weights_prepared, device)

    @property
    def workspace_bytes(self) -> int:
        return arrays.nbytes(self.workspace) if self.workspace is not None else 0


def _planned(call: _Call) -> _Planned:
    """The plan of a call, from the cache or made; ArrayError or ProblemError if it is no ConvAvgPool."""
    try:
        planned = _plans.get(call.key)
    except TypeError:  # a list among the options
        call.options = tuple(v if isinstance(v, str) or not hasattr(v, "__iter__") else tuple(v) for v in call.options)
        call.key = (call.options, *call.key[1:])
        planned = _plans.get(call.key)
    if planned is None:
        problem = _check_call(call)
    if call.workspace is not None or call.readings[_OUT] is not None:
        _check_own_memory(call)
    if planned is not None:
        return planned
    origin, tactic = arrays.origin(call.operands[_X]), call.options[-1]
    # CuPy and PyTorch free memory in the order of the stream; pycuda waits for the device instead.
    bounded = tactic is None and (call.workspace is not None or origin not in ("cupy", "torch"))
    most = call.workspace_bytes if bounded else None
    plan = Plan(problem, tactic=tactic, max_workspace_bytes=most, unaligned=tactic is None and call.bits != 0)
    _expect_current_device(call.kinds[_X][2], plan.device)
    make_out = arrays.allocator(origin, plan.y_shape, plan.problem.dtypes[2])
    planned = _Planned(plan, make_out, arrays.allocator(origin, (plan.workspace_bytes,), "uint8"))
    with _adding:
        if len(_plans) >= CACHED_PLANS:
            del _plans[next(iter(_plans))]
        _plans[call.key] = planned
    return planned


# ---- checks of a call that has no plan yet ----


def _check_call(call: _Call) -> Problem:
    """The problem of a call, checked by all that kinds, options and the workspace's size tell; needs no GPU."""
    if (call.kinds[_SCALE] is None) != (call.kinds[_SHIFT] is None):
        missing, given = ("scale", "shift") if call.kinds[_SCALE] is None else ("shift", "scale")
        raise ArrayError(f"{missing}: missing; got None, expected an array, since {given} is given; give both or neither")
    of_x = call.kinds[_X][2]
    _expect_current_device(of_x, library.current_ordinal())
    problem = _describe(call)
    _expect_device("w", call.kinds[_W][2], of_x)
    x, origin = call.operands[_X], arrays.origin(call.operands[_X])
    if call.kinds[_OUT] is None and not origin:
        raise ArrayError(f"out: missing; got None, expected an array, since {type(x).__name__} is of no known library")
    expected = shapes_and_types(problem)
    like = ", the type of out" if problem.dtypes[1] in library.EIGHT_BIT else ", the type of w"
    for name, kind in zip(_NAMES, call.kinds, strict=True):
        if kind is None:
            continue
        shape, dtype = expected["y" if name == "out" else name]
        if kind[0] != shape:
            raise ArrayError(f"{name}: wrong shape; got {tuple(kind[0])}, expected {shape}")
        if (got := arrays.dtype_name(kind[1])) != dtype:
            raise ArrayError(f"{name}: wrong type; got {got}, expected {dtype}{'' if name == 'w_scale' else like}")
        _expect_device(name, kind[2], of_x)
    if call.workspace is not None:
        _expect_device("workspace", call.workspace[1][2], of_x)
    tactic = call.options[-1]
    if call.weights_prepared and (call.workspace is None or tactic is None):
        raise ProblemError("weights_prepared: nothing to reuse; got no workspace or no tactic, expected both")
    if tactic is not None and (needed := problem.workspace_bytes(tactic)) > (held := call.workspace_bytes):
        if call.weights_prepared:
            raise ProblemError(f"weights_prepared: no workspace of this tactic; got {held} bytes, expected {needed}")
        if not origin:
            raise ProblemError(f"workspace: too small; got {held} bytes, expected {needed} for this tactic")
    return problem


def _expect_device(name: str, device: int | None, of_x: int | None) -> None:
    if None not in (device, of_x) and device != of_x:
        raise ArrayError(f"{name}: on another device; got device {device}, expected {of_x}, that of x")


def _expect_current_device(of_x: int | None, current: int | None) -> None:
    if None not in (of_x, current) and of_x != current:
        raise ArrayError(f"x: not on the current device; got device {of_x}, expected {current}; make x's the current one")


def _describe(call: _Call) -> Problem:
    """The problem of arrays whose dimensions fit together."""
    x, w = call.kinds[_X][0], call.kinds[_W][0]
    x_dtype, w_dtype = (arrays.dtype_name(call.kinds[i][1]) for i in (_X, _W))
    rank = len(x) - 2
    if not 1 <= rank <= library.MAX_RANK:
        raise ArrayError(f"x: wrong number of dimensions; got shape {tuple(x)}, expected 3 to 5")
    if len(w) != rank + 2:
        raise ArrayError(f"w: wrong number of dimensions; got shape {tuple(w)}, expected {rank + 2}: [M, kernel, C/group]")
    if x_dtype not in library.DTYPES:
        raise ArrayError(f"x: wrong type; got {x_dtype}, expected {', '.join(library.DTYPES)}")
    if w_dtype != x_dtype and not (x_dtype == "float32" and w_dtype in ("float16", "bfloat16")):
        raise ArrayError(f"w: wrong type; got {w_dtype}, expected {x_dtype}, the type of x")
    options = dict(zip(_OPTIONS[:-1], call.options[:-1], strict=True))
    layout, group = options["layout"], options["group"]
    channels, spatial = (x[-1], x[1:-1]) if channels_last(layout) else (x[1], x[2:])
    if group < 1 or w[-1] * group != channels:
        raise ArrayError(
            f"w: wrong last dimension; got {w[-1]} with group {group}, expected C / group of x, whose shape "
            f"{tuple(x)} in layout {layout} has C = {channels}"
        )
    if w_dtype in library.EIGHT_BIT and call.kinds[_OUT] is not None:
        options["y_dtype"] = arrays.dtype_name(call.kinds[_OUT][1])
    return Problem(
        n=x[0],
        c=channels,
        m=w[0],
        spatial=tuple(spatial),
        kernel_shape=tuple(w[1:-1]),
        dtype=w_dtype,
        x_dtype=x_dtype,
        bias=call.kinds[_B] is not None,
        residual=call.kinds[_RESIDUAL] is not None,
        prologue_affine=call.kinds[_SCALE] is not None,
        w_scale=call.kinds[_W_SCALE] is not None,
        **options,
    )


def _check_own_memory(call: _Call) -> None:
    """Check that `out` and `workspace` may be written and overlap nothing."""
    named = [(name, reading) for name, reading in zip(_NAMES, call.readings, strict=True) if reading is not None]
    if call.workspace is not None:
        named.append(("workspace", call.workspace))
    extents = [(name, reading[0], reading[0] + arrays.nbytes(reading)) for name, reading in named]
    for (name, start, end), (_, reading) in zip(extents, named, strict=True):
        if name not in ("out", "workspace"):  # which only these may not share, since they are written
            continue
        if reading[3]:  # read-only
            raise ArrayError(f"{name}: read-only; got an array that must not be written, expected one that may")
        for other, other_start, other_end in extents:
            if other != name and max(start, other_start) < min(end, other_end):
                raise ArrayError(f"{name}: overlaps {other}; got memory in common, expected an array of its own")
