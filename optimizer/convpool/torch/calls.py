# SPDX-License-Identifier: Apache-2.0
"""Calls of pooled_conv and of upsampled convolutions on a GPU, planned once for each kind: the way from tensors to a launch that
every later call takes.

A kind is what a plan depends on: shapes, strides and types of the tensors, their device, the geometry, and whether float32 may be
multiplied in TF32.  The `KEPT` kinds seen first are kept.

The fastest plan of a small layer reads the weights convolved with the pooling window.  Making those takes as long as the layer.
So such plans run only inside `constant_weights`, where the caller promises that weights stay.  No check of a tensor's version
could stand in for the promise: changes through `.data`, as moving averages of weights are often written, do not count there.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch

from convpool.algebra.parts import MAX_UPSAMPLE
from convpool.cuda import Plan, Problem, library, tactics
from convpool.torch import plain

KEPT = 4096
ACCUMULATIONS = tuple(library.ACCUMULATIONS)
NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
_ACTIVATIONS = (None, "relu", "leaky_relu")
_NAMES = ("pool_kernel_shape", "pool_strides", "pool_pads", "pool_dilations", "strides", "pads", "dilations", "group")
_TENSORS_BYTES = library.PACK_TENSORS.__self__.size  # type: ignore[attr-defined]
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)

Tensors = tuple[torch.Tensor, torch.Tensor, Any]
"""x, weight, bias."""


_fp32_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", None)  # what the attribute asks, in half the time


def allows_tf32() -> bool:
    """Whether PyTorch multiplies float32 in TF32 in convolutions."""
    return _fp32_precision("cuda", "conv") == "tf32" if _fp32_precision is not None else torch.backends.cudnn.allow_tf32


def _fits(tensors: Tensors, geometry: tuple) -> bool:
    """Whether the library may be asked: PyTorch's operators refuse the rest, or do it."""
    x, weight, bias = tensors
    groups, rank = geometry[7] if len(geometry) > 2 else 1, x.dim() - 2
    if groups != 1 or not 1 <= rank <= 2 or 0 in x.shape or 0 in weight.shape or weight.shape[1:2] != x.shape[1:2]:
        return False
    if any(t is not None and (t.dtype != x.dtype or t.device != x.device) for t in (weight, bias)):
        return False
    if bias is not None and bias.shape != weight.shape[:1]:
        return False
    if len(geometry) == 2:
        return max(geometry[0]) <= MAX_UPSAMPLE
    sizes = plain.pooled_size(x.shape[2:], *geometry[:4])
    return min(plain.pooled_size(sizes, weight.shape[2:], *geometry[4:7])) > 0


def problem_of(tensors: Tensors, geometry: tuple, x_last: bool, y_last: bool) -> Problem:
    x, weight, bias = tensors
    common: dict[str, Any] = {"n": x.shape[0], "c": x.shape[1], "m": weight.shape[0], "spatial": tuple(x.shape[2:])}
    common |= {"kernel_shape": tuple(weight.shape[2:]), "dtype": NAMES[x.dtype], "bias": bias is not None}
    layout, y_layout = ("channels_last" if last else "channels_first" for last in (x_last, y_last))
    common |= {"layout": layout, "y_layout": y_layout, "allow_tf32": allows_tf32()}
    if len(geometry) == 2:
        return Problem(**common, pool_kernel_shape=1, upsample=geometry[0], pads=geometry[1])
    epilogue, common["alpha"], accumulation = geometry[8:]
    common |= {"activation": _ACTIVATIONS[epilogue], "accumulation": ACCUMULATIONS[accumulation]}
    return Problem(**common, **dict(zip(_NAMES, geometry, strict=False)))


def _fastest(problem: Problem) -> Plan:
    """The plan for weights that may be others in every call: what transforms them is launched each time.

    Such a launch takes some 3 microseconds and writes 1 MB in another, on an H200.  The cost rule names the fastest tactic that
    reads the weights as they are.
    """
    plan = Plan(problem)
    if not plan.prepared_bytes:
        return plan
    allowed = plan.expected_us + 3 + plan.prepared_bytes / 2**20
    for tactic in tactics():
        if tactic.family != "generic" and problem.why_not(tactic) is None:
            other = Plan(problem, tactic=tactic)
            if not other.prepared_bytes and other.expected_us < allowed:
                plan, allowed = other, other.expected_us
    return plan


def library_weight(weight: torch.Tensor) -> torch.Tensor:
    """[M, kernel..., C/groups] in memory."""
    if weight.dim() == 4:
        return weight.contiguous(memory_format=torch.channels_last)
    return weight.movedim(1, -1).contiguous()


class Store(dict[Any, tuple[torch.Tensor | None, torch.Tensor, Any]]):
    """Results kept inside a `constant_weights`, by call and the weights' address.

    Each is the weights in the library's order, None if they are so already, the same transformed, and what tells when the weights
    are gone, and others may get their address.  passing: calls whose weights were gone in it, as those are that every forward
    pass computes.  Nothing more is kept of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.passing: set[Any] = set()


_kept: ContextVar[Store | None] = ContextVar("convpool_constant_weights", default=None)
current = _kept.get
"""The results that a `constant_weights` keeps, None outside."""


@contextlib.contextmanager
def constant_weights() -> Iterator[None]:
    """Within this context no weight of a convpool layer changes: a promise of the caller's, for inference on a GPU.

    Weights are transformed once in the context, by their first call outside a CUDA graph's capture, which waits for it.  A graph
    that is captured afterwards reads what was made: it is of no use once the context is left.  A weight that is changed in it may
    count or not.
    """
    token = _kept.set(Store())
    try:
        yield
    finally:
        _kept.reset(token)


class Call:
    """A kind of call, with its plan, and another one for constant weights once there are such."""

    def __init__(self, tensors: Tensors, geometry: tuple) -> None:
        x, weight, bias = tensors
        self.formats = plain.memory_format(x), plain.result_format(x, weight)
        self.problem = problem_of(tensors, geometry, *(found != torch.contiguous_format for found in self.formats))
        self.copies_weight = library_weight(weight).data_ptr() != weight.data_ptr()
        self.copies_others = not (x.is_contiguous(memory_format=self.formats[0]) and (bias is None or bias.is_contiguous()))
        self.plan = _fastest(self.problem)
        self.constant: Plan | None = None
        self.space, self.device = self.plan.workspace_bytes, x.device
        self.handle, self.launch = self.plan._handle, self.plan._launch
        shape = self.plan.y_shape
        if self.formats[1] != torch.contiguous_format:
            shape = (shape[0], shape[-1], *shape[1:-1])
        made = torch.empty(shape, device="meta", memory_format=self.formats[1])
        self.y_shape, self.y_strides = shape, made.stride()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        """Queues the work on PyTorch's current stream of the current device, which is x's."""
        kept = current()
        if self.copies_others:
            x, bias = x.contiguous(memory_format=self.formats[0]), None if bias is None else bias.contiguous()
        constant = kept is not None and self not in kept.passing and not weight.data_ptr() & 15
        if self.copies_weight and not constant:
            weight = library_weight(weight)
        x_at, w_at, b_at = x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr()
        if (x_at | w_at | b_at) & 15:  # kernels read 16 bytes at a time; copies are aligned
            return self(x.clone(), weight.clone() if w_at & 15 else weight, None if bias is None else bias.clone())
        y = torch.empty_strided(self.y_shape, self.y_strides, dtype=x.dtype, device=self.device)
        if constant:
            self._launch_constant(kept, weight, (x_at, b_at, y.data_ptr()))
            return y
        space_at = 0
        if self.space:
            space = torch.empty(self.space, dtype=torch.uint8, device=self.device)
            space_at = space.data_ptr()
        packed = library.PACK_TENSORS(_TENSORS_BYTES, 0, x_at, w_at, b_at, 0, y.data_ptr(), space_at, self.space, 0, 0, 0, 0, 0)
        status = self.launch(self.handle, packed, raw_stream(self.device.index))
        if status:
            library.check(status)
        return y

    def _launch_constant(self, store: Any, weight: torch.Tensor, addresses: tuple[int, int, int]) -> None:
        """Launch the plan for constant weights.  What it makes of them is kept for all streams, as long as the weights live.

        Not what a capture makes: its graph may run long after."""
        plan = self.constant = self.constant or Plan(self.problem)
        key = (self, weight.data_ptr())  # the call itself: of one that is gone another has the id
        found = store.get(key)
        if found is None:
            dense, prepared = library_weight(weight), torch.empty(plan.prepared_bytes, dtype=torch.uint8, device=self.device)
        else:
            dense, prepared = weight if found[0] is None else found[0], found[1]
        size, (x_at, b_at, y_at) = plan.workspace_bytes - plan.prepared_bytes, addresses
        space = torch.empty(size, dtype=torch.uint8, device=self.device)
        operands, flags = (x_at, dense.data_ptr(), b_at, 0, 0, 0, 0, y_at), 0 if found is None else library.WEIGHTS_PREPARED
        memory = (space.data_ptr(), size, raw_stream(self.device.index), flags, prepared.data_ptr(), plan.prepared_bytes)
        plan.launch_raw(operands, *memory)
        if found is None and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()
            of_store = weakref.ref(store)

            def gone(_: Any) -> None:
                held = of_store()
                if held is not None:
                    held.pop(key, None)
                    held.passing.add(self)

            store[key] = (None if dense is weight else dense, prepared, weakref.ref(weight, gone))


_calls: dict[Any, Call | None] = {}
_NEW: Any = object()


def find(geometry: tuple, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> Call | None:
    """The call for these tensors, planned; None where the library has no kernel on tensor cores for it.

    geometry: the operator's arguments behind the tensors, as tuples; of an upsampled convolution the factors and the pads.  x's
    device is the current one.
    """
    of_bias, casts = bias is None or (bias.dtype, bias.stride()), x.dtype == torch.float32 and allows_tf32()
    of_weight = weight.shape, weight.stride(), weight.dtype
    key = (x.shape, x.stride(), x.dtype, x.device, of_weight, of_bias, geometry, casts)
    call = _calls.get(key, _NEW)
    if call is _NEW:
        call = None
        if x.dtype in NAMES and _fits((x, weight, bias), geometry):
            made = Call((x, weight, bias), geometry)
            call = made if made.plan.tactic.family != "generic" else None
        if len(_calls) < KEPT:
            _calls[key] = call
    return call
