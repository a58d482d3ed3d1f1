# SPDX-License-Identifier: Apache-2.0
"""A layer to measure: a convolution followed by average pooling.

    Y = AvgPool_p,q(Conv_s(X, W)) = Conv_sq(BoxMean_p(X), W)

Two cheaper forms follow, both as Suita et al. (JPDC 2020) have them.  direct: box means with windows dilated by s, then
the k x k convolution with stride s q.  fused: one convolution with the (k + s (p - 1))^2 kernel, stride s q.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.counts import Counts, count
from convpool.algebra.geometry import ConvSpec, PoolSpec

PRECISIONS = ("fp16", "bf16", "tf32", "fp32")
LAYOUTS = ("nhwc", "nchw")
ITEM_BYTES = {"fp16": 2, "bf16": 2, "tf32": 4, "fp32": 4}


@dataclass(frozen=True)
class Row:
    """One layer: X [n, c, h, w], a square kernel, square pooling, no bias.

    kernel, pad, stride are the convolution's, pool and pool_stride the pooling's (which has no padding), all in elements.
    prologue: a scale and a shift for every channel, then ReLU, stand in front, as in a DenseNet transition.
    packed: convpool may sum box means in the 16-bit type.
    """

    n: int
    c: int
    m: int
    h: int
    w: int
    kernel: int = 3
    pad: int = 1
    stride: int = 1
    pool: int = 2
    pool_stride: int = 2
    suite: str = ""
    label: str = ""
    prologue: bool = False
    packed: bool = False

    @property
    def name(self) -> str:
        """The layer's name, e.g. 64x32x8x8 to 32, 3x3."""
        text = f"{self.n}x{self.c}x{self.h}x{self.w} to {self.m}, {self.kernel}x{self.kernel}"
        if self.pad != self.kernel // 2:
            text += f" pad {self.pad}"
        if self.stride != 1:
            text += f" stride {self.stride}"
        if (self.pool, self.pool_stride) != (2, 2):
            text += f", pool {self.pool} stride {self.pool_stride}"
        return text + ", prologue" * self.prologue + ", packed" * self.packed

    def _conv(self, size: int) -> int:
        return (size + 2 * self.pad - self.kernel) // self.stride + 1

    @property
    def conv_size(self) -> tuple[int, int]:
        """Spatial size between convolution and pooling."""
        return self._conv(self.h), self._conv(self.w)

    @property
    def out_size(self) -> tuple[int, int]:
        """Spatial size of Y; less than 1 if the layer has no output."""
        rows, columns = ((size - self.pool) // self.pool_stride + 1 for size in self.conv_size)
        return rows, columns

    @property
    def fused_kernel(self) -> int:
        """Side of the kernel convolved with the box."""
        return self.kernel + self.stride * (self.pool - 1)

    @property
    def total_stride(self) -> int:
        """Stride of the direct and of the fused form."""
        return self.stride * self.pool_stride

    @property
    def box_pad(self) -> int:
        """Padding of the box means; what is left of `pad` is the convolution's."""
        return min(self.pad, self.stride * (self.pool - 1))

    @property
    def box_size(self) -> tuple[int, int]:
        """Spatial size of the box means at stride 1."""
        reach = self.stride * (self.pool - 1)
        return self.h + 2 * self.box_pad - reach, self.w + 2 * self.box_pad - reach

    @property
    def pointwise(self) -> bool:
        """True if only the box means carry the stride: a 1x1 convolution without padding."""
        return self.kernel == 1 and self.pad == 0

    @property
    def naive_macs(self) -> int:
        """Multiply-adds of the convolution as it stands."""
        rows, columns = self.conv_size
        return self.n * self.m * self.c * self.kernel**2 * rows * columns

    @property
    def direct_flops(self) -> int:
        """Operations that the direct form cannot avoid: two for each multiply-add."""
        rows, columns = self.out_size
        return 2 * self.n * self.m * self.c * self.kernel**2 * rows * columns

    def counts(self, form: str) -> Counts:
        """Operations and accesses of a form of the pair, one of `benchmarks.counts.FORMS`."""
        conv = ConvSpec((self.kernel,) * 2, (self.stride,) * 2, (self.pad,) * 4, (1, 1))
        pool = PoolSpec((self.pool,) * 2, (self.pool_stride,) * 2, (0,) * 4, (1, 1))
        return count(form, self.n, (self.m, self.c, self.kernel, self.kernel), (self.h, self.w), conv, pool)

    def min_bytes(self, precision: str) -> int:
        """X read once and Y written once; the weights stay in the cache."""
        rows, columns = self.out_size
        return ITEM_BYTES[precision] * self.n * (self.c * self.h * self.w + self.m * rows * columns)

    def problem(self, precision: str, layout: str) -> dict[str, Any]:
        """Arguments of `convpool.cuda.Problem`."""
        pointwise = self.pointwise
        prologue = {"prologue_affine": True, "prologue_activation": "relu"} if self.prologue else {}
        return {
            **prologue,
            **({"accumulation": "packed"} if self.packed else {}),
            "n": self.n,
            "c": self.c,
            "m": self.m,
            "spatial": (self.h, self.w),
            "kernel_shape": self.kernel,
            "pool_kernel_shape": self.pool,
            "pool_dilations": self.stride,
            "pool_pads": self.box_pad,
            "pads": self.pad - self.box_pad,
            "pool_strides": self.total_stride if pointwise else 1,
            "strides": 1 if pointwise else self.total_stride,
            "layout": layout.upper(),
            "dtype": {"fp16": "float16", "bf16": "bfloat16"}.get(precision, "float32"),
            "allow_tf32": precision == "tf32",
        }

    def prologue_bytes(self, precision: str) -> int:
        """Count bytes that a kernel of its own for the prologue reads and writes; 0 without one."""
        return 2 * ITEM_BYTES[precision] * self.n * self.c * self.h * self.w if self.prologue else 0

    def to_json(self) -> dict[str, Any]:
        """The fields as they stand in a record."""
        return asdict(self)
