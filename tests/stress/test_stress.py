# SPDX-License-Identifier: Apache-2.0
"""Hopper's rings under random delays: a build with -DCONVPOOL_STRESS=<seed> delays readers and copies, and results stay exact.

    cmake -S plugin -B build/stress -DCONVPOOL_STRESS=1 -DCONVPOOL_CUDA_ARCHITECTURES=90 && cmake --build build/stress
    CONVPOOL_LIBRARY=build/stress/libconvpool.so CONVPOOL_STRESSED=1 python -m pytest tests/stress

An arrival that overtakes the reading before it, or a copy that does not wait for all readers, overwrites operands in use.  Blocks
go through several tiles of several slices here, so that every buffer of every ring is used again.
"""

import functools
import os

import numpy as np
import pytest

from convpool.cuda import Problem, find_tactic, tactics
from tests.cuda.conftest import gpu  # noqa: F401
from tests.support.gpu import skip_or_fail
from tests.support.kernels import conv_reference
from tests.support.kernels.tactic_checks import NUMPY_TYPES, run_twice, sizes

TIMES = 5
RINGS = [tactic.name for tactic in tactics() if "sm90a" in tactic.name and "tf32x3" not in tactic.name]
ACTIVATING = [name for name in RINGS if "_rs" in name or "upsample" in name]


def problem_of(kernel: int, pool: int, before: str | None, dtype: str, packed: bool, layout: str) -> Problem:
    """A layer that pools, or with a pool of 0 one that upsamples by 2."""
    if pool == 0:
        shape = dict(n=24, c=200, m=264, spatial=(18, 20), kernel_shape=kernel, pool_kernel_shape=1, pads=kernel // 2, upsample=2)
        return Problem(**shape, dtype=dtype, layout=layout, allow_tf32=True, prologue_activation=before)
    pads = min(kernel // 2, pool - 1)
    return Problem(
        n=24, c=200, m=264, spatial=(36, 40), kernel_shape=kernel, pool_kernel_shape=pool, pool_pads=pads,
        pads=kernel // 2 - pads, pool_strides=1 if kernel > 1 else pool, strides=pool if kernel > 1 else 1,
        dtype=dtype, layout=layout, allow_tf32=True, accumulation="packed" if packed else "default",
        prologue_activation=before,
    )  # fmt: skip


@functools.cache
def data_of(kernel: int, pool: int, before: str | None):
    """x and w of small whole numbers, of which box means and fused weights are exact, and the exact y."""
    problem, rng = problem_of(kernel, pool, before, "float16", False, "NHWC"), np.random.default_rng(kernel)
    x = rng.integers(-1, 2, (problem.n, problem.c, *problem.spatial)) * float(max(pool, 1) ** 2)
    w = rng.integers(-1, 2, problem.w_shape) * (rng.random(problem.w_shape) < 0.25) * 1.0
    return x, w, conv_reference.linear(problem, conv_reference.prologue(problem, x, x, x), w)


@pytest.mark.parametrize("name, before", [*((name, None) for name in RINGS), *((name, "relu") for name in ACTIVATING)])
def test_results_are_exact_under_delays(gpu, name, before):  # noqa: F811
    if gpu.compute_capability() != (9, 0):
        pytest.skip("needs compute capability 90")
    if os.environ.get("CONVPOOL_STRESSED") != "1":
        skip_or_fail("CONVPOOL_LIBRARY is no build with CONVPOOL_STRESS; CONVPOOL_STRESSED=1 says that it is")
    tactic = find_tactic(name)
    kernel, pool = (3, 0) if tactic.family == "upsample" else sizes(name)
    problem = problem_of(kernel, pool, before, tactic.dtype, tactic.packed, "NCHW" if "_nchw" in name else "NHWC")
    if (reason := problem.why_not(tactic)) is not None:
        pytest.skip(reason)
    x, w, exact = data_of(kernel, pool, before)
    nothing = np.zeros(1)
    rounded = exact.astype(np.float32).astype(NUMPY_TYPES[tactic.dtype]).astype(np.float64)
    for _ in range(TIMES):
        y = run_twice(problem, tactic, x, w, nothing, nothing, nothing, nothing)
        wrong = np.argwhere(y != rounded)
        assert not len(wrong), f"{len(wrong)} of {y.size} wrong; at {wrong[0]} got {y[tuple(wrong[0])]}"
