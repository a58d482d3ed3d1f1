# SPDX-License-Identifier: Apache-2.0
"""One row on the GPU: its tensors, the exact result, and whether a method's output is right.

Two sets of data: small integers, on which a method that keeps its sums in float32 is exact in fp16 and wider types, and
random normal numbers, on which the error is measured and on which everything is timed (uniform bits cost a GPU power).

A method is wrong above these errors, relative and in the 2-norm, on either:

| precision | limit | why |
|---|---|---|
| fp16 | 2e-3 | three roundings to 11 bits (box mean or fused weight, convolution's output, Y): below 1e-3 |
| bf16 | 1.6e-2 | the same with 8 bits |
| tf32 | 2e-3 | operands rounded to 11 bits |
| fp32 | 1e-4 | sums of 5000 products and summed-area tables lose 1e-5; a method that uses TF32 is at 3e-4 |

In fp16 TensorRT may be twice as far off: it keeps some sums in fp16, where 8192 products were 3.3e-3 off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.layers.device import Device
from benchmarks.layers.rows import Row

LIMITS = {"fp16": 2e-3, "bf16": 1.6e-2, "tf32": 2e-3, "fp32": 1e-4}
HALF_SUMS = 2
INTEGERS, NORMALS = "integers", "normals"
IMAGES_AT_ONCE = 8
"""Images of a row that the reference computes at once, for its memory."""


NO_POOLING = "no pooling: the same as the fused form"


class Skip(Exception):
    """A method does not run a row here; the message says why."""


@dataclass(frozen=True)
class Candidate:
    """One way to run a method.  call(i) enqueues it on input set i; it writes `case.out`, or returns its own tensor, in
    `layout` if that is not the case's."""

    how: str
    call: Callable[[int], Any]
    layout: str | None = None
    tactic: int | None = None


def fuse_weights(torch: Any, w: Any, row: Row) -> Any:
    """W [M, k, k, C] convolved with the box of means: [M, k', k', C] with k' = k + s (p - 1)."""
    side, kernel = row.fused_kernel, row.kernel
    fused = torch.zeros(row.m, side, side, row.c, dtype=torch.float32, device=w.device)
    for u in range(row.pool):
        for v in range(row.pool):
            top, left = u * row.stride, v * row.stride
            fused[:, top : top + kernel, left : left + kernel] += w.float()
    return (fused / row.pool**2).to(w.dtype)


def reference(torch: Any, x: Any, w: Any, row: Row) -> Any:
    """The definition in float64: convolution, then pooling.  x [N, H, W, C], w [M, k, k, C] give [N, P, Q, M]."""
    rows, columns = row.conv_size
    height, width = row.out_size
    x = torch.nn.functional.pad(x.double(), (0, 0, row.pad, row.pad, row.pad, row.pad))
    sums = torch.zeros(x.shape[0], rows, columns, row.m, dtype=torch.float64, device=x.device)
    for a in range(row.kernel):
        for b in range(row.kernel):
            taps = x[:, a : a + row.stride * (rows - 1) + 1 : row.stride, b : b + row.stride * (columns - 1) + 1 : row.stride]
            sums += taps @ w[:, a, b].double().T
    step, out = row.pool_stride, 0
    for u in range(row.pool):
        for v in range(row.pool):
            out = out + sums[:, u : u + step * (height - 1) + 1 : step, v : v + step * (width - 1) + 1 : step]
    return out / row.pool**2


class Case:
    """The tensors of one row in one precision and layout.

    raws: input sets before the row's prologue, scale and shift [C]; without one the raws are the xs, and both are None.
    xs: input sets, [N, H, W, C] or [N, C, H, W] by layout; out: Y in the same order.  w [M, k, k, C] and w_fused
    [M, k', k', C]; w_first and w_fused_first have the channels before the taps.  All keep their addresses.
    """

    def __init__(self, device: Device, row: Row, precision: str, layout: str) -> None:
        torch = device.torch
        self.device, self.row, self.precision, self.layout = device, row, precision, layout
        device.set_precision(precision)
        self.dtype = device.dtype(precision)
        self.sets = device.sets(row, precision)
        generator = torch.Generator(device="cuda").manual_seed(row.c * 1000 + row.h)
        shape, weights = (row.n, row.h, row.w, row.c), (row.m, row.kernel, row.kernel, row.c)

        def integers(shape: tuple[int, ...]) -> Any:
            return torch.randint(-2, 3, shape, device="cuda", generator=generator).to(self.dtype)

        def normals(shape: tuple[int, ...], deviation: float = 1.0) -> Any:
            return (torch.randn(shape, device="cuda", generator=generator) * deviation).to(self.dtype)

        deviation = (row.kernel**2 * row.c) ** -0.5
        data = {INTEGERS: (integers(shape), integers(weights)), NORMALS: (normals(shape), normals(weights, deviation))}
        self.scale: Any = None
        self.shift: Any = None
        if row.prologue:  # whole numbers, so that integers stay exact
            self.scale = torch.randint(1, 3, (row.c,), device="cuda", generator=generator).to(self.dtype)
            self.shift = torch.randint(-1, 2, (row.c,), device="cuda", generator=generator).to(self.dtype)
        self._references = {kind: self._reference(*tensors) for kind, tensors in data.items()}
        self._data = {kind: (self._ordered(x), w) for kind, (x, w) in data.items()}
        self.raws = [self._ordered(normals(shape)) for _ in range(self.sets)]
        self.xs = [self._after_prologue(raw, layout) for raw in self.raws] if row.prologue else self.raws
        self.w = torch.empty_like(data[NORMALS][1])
        self.w_fused = fuse_weights(torch, self.w, row)
        self.w_first, self.w_fused_first = (w.permute(0, 3, 1, 2).contiguous() for w in (self.w, self.w_fused))
        self._first: list[Any] | None = None
        self.weights_version = 0
        self.chosen: dict[str, str] = {}  # the algorithm that a method was fastest with
        self.memo: dict[str, Any] = {}
        self.out = torch.empty(self.shape(*row.out_size, row.m), device="cuda", dtype=self.dtype)
        self.use(NORMALS)

    def shape(self, height: int, width: int, channels: int, layout: str | None = None) -> tuple[int, int, int, int]:
        """A map's shape in the layout."""
        n = self.row.n
        return (n, height, width, channels) if (layout or self.layout) == "nhwc" else (n, channels, height, width)

    def empty(self, *shape: int, dtype: Any = None) -> Any:
        """An uninitialised tensor."""
        return self.device.torch.empty(shape, device="cuda", dtype=dtype or self.dtype)

    def _ordered(self, x: Any) -> Any:
        return x if self.layout == "nhwc" else x.permute(0, 3, 1, 2).contiguous()

    def _after_prologue(self, x: Any, layout: str) -> Any:
        """relu(scale[c] x + shift[c]) in the type of x."""
        shape = (-1,) if layout == "nhwc" else (-1, 1, 1)
        scale, shift = (values.to(x.dtype).reshape(shape) for values in (self.scale, self.shift))
        return (scale * x + shift).relu_()

    def _reference(self, x: Any, w: Any) -> Any:
        torch, parts = self.device.torch, []
        for part in x.split(IMAGES_AT_ONCE):
            part = part.double()
            parts.append(reference(torch, self._after_prologue(part, "nhwc") if self.row.prologue else part, w, self.row))
        return torch.cat(parts)

    def use(self, kind: str) -> None:
        """Make set 0 and the weights those of `kind`, in place."""
        x, w = self._data[kind]
        self.raws[0].copy_(x)
        if self.row.prologue:
            self.xs[0].copy_(self._after_prologue(x, self.layout))
        self.w.copy_(w)
        self.w_fused.copy_(fuse_weights(self.device.torch, w, self.row))
        self.w_first.copy_(self.w.permute(0, 3, 1, 2))
        self.w_fused_first.copy_(self.w_fused.permute(0, 3, 1, 2))
        self.weights_version += 1
        if self._first is not None:
            self._first[0].copy_(self._channels_first(0))
        self.device.torch.cuda.synchronize()

    def _channels_first(self, i: int) -> Any:
        return self.xs[i].permute(0, 3, 1, 2) if self.layout == "nhwc" else self.xs[i]

    def xs_in(self, layout: str) -> list[Any]:
        """The input sets in a layout; a copy, made once, where it is channels first and the case's is not."""
        if layout == self.layout:
            return self.xs
        if layout == "nhwc":
            raise Skip("reads channels last only")
        if self._first is None:
            self._first = [self._channels_first(i).contiguous() for i in range(self.sets)]
        return self._first

    def check(self, candidate: Candidate) -> tuple[dict[str, float], bool]:
        """(relative error on each set of data, whether the integers came out exactly).  The data in use after it is the
        random one."""
        torch, errors, exact = self.device.torch, {}, False
        for kind in (INTEGERS, NORMALS):
            self.use(kind)
            self.out.fill_(float("nan"))
            torch.cuda.synchronize()
            with torch.cuda.stream(self.device.stream):
                made = candidate.call(0)
            torch.cuda.synchronize()
            y = self.out if made is None else made
            if (candidate.layout or self.layout) == "nchw":
                y = y.permute(0, 2, 3, 1)
            right = self._references[kind]
            errors[kind] = float((y.double() - right).norm() / right.norm())
            if kind == INTEGERS:
                exact = bool((y == right.to(self.dtype)).all())
        return errors, exact
