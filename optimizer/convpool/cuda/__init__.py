# SPDX-License-Identifier: Apache-2.0
"""ConvAvgPool on NVIDIA GPUs: the Python side of libconvpool.so (C API: convpool.h).

    import pycuda.autoinit, pycuda.gpuarray as gpuarray
    from convpool.cuda import conv_avg_pool
    y = conv_avg_pool(gpuarray.to_gpu(x), gpuarray.to_gpu(w), pool_kernel_shape=2, pool_pads=1, strides=2)

`Plan` is a problem planned once, to be launched many times.  `conv_avg_pool` keeps one for every kind of call; `plan_for`
gives it.

Importing this, listing tactics and checking problems need no GPU; plans, calls and `current_device` do.  No GPU package is
imported: arrays of pycuda, CuPy and PyTorch are taken as they come.
"""

from convpool.cuda import library
from convpool.cuda.operator import conv_avg_pool, plan_for
from convpool.cuda.plan import Plan
from convpool.cuda.problem import Problem, Tactic, current_device, find_tactic, tactics
from convpool.errors import ArrayError, ConvpoolError, CudaError, LibraryError, ProblemError, UnsupportedError

__all__ = [
    "ArrayError", "ConvpoolError", "CudaError", "LibraryError", "Plan", "Problem", "ProblemError", "Tactic",
    "UnsupportedError", "conv_avg_pool", "current_device", "find_tactic", "library", "plan_for", "tactics",
]  # fmt: skip
