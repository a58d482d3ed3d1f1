# SPDX-License-Identifier: Apache-2.0
"""The GPU of a run through PyTorch and CuPy: its clock, its ceilings, the kernels of the other methods."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.layers.rows import Row
from convpool.cuda.timing import GraphTimer, input_sets
from convpool.errors import ConvpoolError

ELEMENTS = {"fp16": "__half", "bf16": "__nv_bfloat16", "tf32": "float", "fp32": "float"}
MATRIX = 8192
"""Side of the square matrices whose product gives the matrix rate."""
COPY_BYTES = 2**30
THREADS = 256
INSTALL = "pip install '.[bench]' in convpool's repository"


class DeviceError(ConvpoolError):
    """There is no GPU, or a package that the measuring needs is missing."""


def modules() -> tuple[Any, Any]:
    """(torch, cupy).  Raises DeviceError where one is missing or there is no GPU."""
    try:
        import torch
    except ImportError as error:
        raise DeviceError(f"PyTorch: cannot be imported; got {error}, expected PyTorch and an NVIDIA GPU; " + INSTALL) from error
    if not torch.cuda.is_available():
        raise DeviceError("GPU: none found by PyTorch; got torch.cuda.is_available() False, expected an NVIDIA GPU")
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(f"CuPy: cannot be imported; got {error}; {INSTALL}") from error
    return torch, cupy


def source() -> str:
    """CUDA source of the other methods' kernels."""
    return (Path(__file__).parent / "data" / "kernels.cu").read_text()


class Device:
    """The current GPU.  Everything runs on `stream`.  plans: how many of cuDNN's engines to try, None: all."""

    def __init__(self, replays: int, plans: int | None = None) -> None:
        self.plans = plans
        self.torch, self.cupy = modules()
        torch = self.torch
        torch.backends.cudnn.benchmark = True
        self._timer = GraphTimer(torch, replays)
        self.measure, self.stream, self.l2_bytes = self._timer.measure, self._timer.stream, self._timer.l2_bytes
        self.handle = self.stream.cuda_stream
        self._cupy_stream = self.cupy.cuda.Stream.from_external(self.stream)
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.compute_capability = properties.major * 10 + properties.minor
        self.multiprocessors = properties.multi_processor_count

    def versions(self) -> dict[str, str]:
        """Return names and versions of what measures."""
        cudnn = self.torch.backends.cudnn.version()
        return {
            "PyTorch": self.torch.__version__,
            "cuDNN": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
            "CUDA": self.torch.version.cuda,
            "CuPy": self.cupy.__version__,
        }

    def set_precision(self, precision: str) -> None:
        """Set if PyTorch may round float32 operands to TF32."""
        self.torch.backends.cudnn.allow_tf32 = precision == "tf32"
        self.torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"

    def dtype(self, precision: str) -> Any:
        """PyTorch's type of a precision's tensors."""
        return {"fp16": self.torch.float16, "bf16": self.torch.bfloat16}.get(precision, self.torch.float32)

    def sets(self, row: Row, precision: str) -> int:
        """Sets of inputs to rotate for a row."""
        item = 2 if precision in ("fp16", "bf16") else 4
        return input_sets(row.n * row.c * row.h * row.w * item, self.l2_bytes)

    def kernel(self, name: str, precision: str) -> Callable[..., None]:
        """launch(grid, *arguments) of a kernel of `kernels.cu`, in blocks of 256; tensors and whole numbers as arguments."""
        function = _module(ELEMENTS[precision]).get_function(name)
        int32, torch = self.cupy.int32, self.torch

        def launch(grid: tuple[int, int, int], *arguments: Any) -> None:
            values = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else int32(a) for a in arguments)
            with self._cupy_stream:
                function(grid, (THREADS,), values)

        return launch

    def copy_tb_per_s(self) -> float:
        """Bandwidth of a large copy, bytes read plus bytes written."""
        x = self.torch.ones(COPY_BYTES // 4, device="cuda")
        y = self.torch.empty_like(x)
        neg = self.torch.neg  # a kernel: a copy within a graph goes to the slower copy engines
        return 2 * COPY_BYTES / self.measure(lambda _: neg(x, out=y), 4)["us"] / 1e6

    def tflops(self, precision: str) -> float:
        """Rate of a large matrix product on random data."""
        self.set_precision(precision)
        a, b = (self.torch.randn(MATRIX, MATRIX, device="cuda").to(self.dtype(precision)) for _ in range(2))
        out = self.torch.empty_like(a)
        return 2 * MATRIX**3 / self.measure(lambda _: self.torch.matmul(a, b, out=out), 4)["us"] / 1e6


@functools.cache
def _module(element: str) -> Any:
    import cupy

    return cupy.RawModule(code=source(), options=("-std=c++17", f"-DELEMENT={element}"))


def blocks(items: int) -> int:
    """Thread blocks for that many threads."""
    return math.ceil(items / THREADS)
