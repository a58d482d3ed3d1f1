# SPDX-License-Identifier: Apache-2.0
"""A prologue that normalizes X in groups of channels: every tactic against the definition in float64; what is refused."""

import numpy as np
import pytest

from convpool.cuda import Problem, ProblemError, library, tactics
from tests.support.kernels import conv_reference, pretended
from tests.support.kernels.tactic_checks import NUMPY_TYPES, run_twice

LAYER = dict(n=2, c=32, m=40, spatial=(14, 13), kernel_shape=3, pool_kernel_shape=1, pads=1, prologue_affine=3, prologue_groups=8)
CASES = [  # what differs from LAYER, and by how much the numbers of X are larger than their deviation
    (dict(prologue_epsilon=1e-5, prologue_activation="silu"), 0),
    (dict(pool_kernel_shape=2, strides=2, bias=True, residual=True, prologue_groups=32), 3),
    (dict(n=3, c=40, spatial=(37,), prologue_groups=5, prologue_epsilon=0.5, prologue_activation="relu"), 1),
    (dict(n=1, c=12, spatial=(5, 6, 7), prologue_groups=1, prologue_activation="leaky_relu", prologue_alpha=0.25), 30),
    (dict(n=1, c=2056, m=8, spatial=(6, 5), kernel_shape=1, pads=0, prologue_groups=257, prologue_activation="silu"), 0),
    (dict(n=1, c=4104, m=8, spatial=(3, 2), kernel_shape=1, pads=0, prologue_groups=9), 2),
    (dict(n=5, c=24, spatial=(40, 41), upsample=2, prologue_groups=6, prologue_activation="silu"), 0),
    (dict(n=1, c=64, m=64, spatial=(130, 120), prologue_groups=32, prologue_epsilon=1e-6, prologue_activation="silu"), 0),
    (dict(n=2, c=24, m=24, group=3, prologue_groups=4), 0),
]
STATISTICS = 2.0**-18
"""The relative error of mean and deviation, which are sums in float32."""


def normalized(p: Problem, x: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f(x) of x [N, C, spatial], and how far a correct kernel may be off."""
    groups = x.reshape(p.n, p.prologue_groups, -1)
    deviation = np.sqrt(groups.var(axis=2, keepdims=True) + np.float64(np.float32(p.prologue_epsilon)))
    ones, column = np.ones_like(x).reshape(groups.shape), (1, -1, *[1] * len(p.spatial))
    factor = (ones / deviation).reshape(x.shape) * scale.reshape(column)
    summand = shift.reshape(column) - (groups.mean(axis=2, keepdims=True) * ones).reshape(x.shape) * factor
    error = (conv_reference.UNIT_ROUNDOFF[p.dtype] + STATISTICS) * (np.abs(x * factor) + np.abs(summand))
    f = x * factor + summand
    if p.prologue_activation == "silu":
        return f / (1 + np.exp(-f)), 1.1 * error
    return np.where(f < 0, f * {"relu": 0.0, "leaky_relu": p.prologue_alpha}.get(p.prologue_activation, 1.0), f), error


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("index", range(len(CASES)))
def test_every_tactic_against_the_definition(gpu, index, dtype, layout):
    changed, far = CASES[index]
    rng, ran = np.random.default_rng(index), 0
    for allow_tf32 in (False, True)[: 1 + (dtype == "float32")]:
        p = Problem(**LAYER | changed, dtype=dtype, layout=layout, allow_tf32=allow_tf32)
        rounded = lambda *shape: rng.standard_normal(shape).astype(NUMPY_TYPES[dtype]).astype(np.float64)  # noqa: B023, E731
        x = (rounded(p.n, p.c, *p.spatial) + far).astype(NUMPY_TYPES[dtype]).astype(np.float64)
        w, scale, shift, b = rounded(*p.w_shape), rounded(p.c), rounded(p.c), rounded(p.m)
        f, error = normalized(p, x, scale, shift)
        before = conv_reference.linear(p, f, w) + (b.reshape(1, -1, *[1] * len(p.spatial)) if p.bias else 0)
        r = rounded(*before.shape)
        before = before + (r if p.residual else 0)
        off = conv_reference.linear(p, error, np.abs(w))
        for tactic in tactics():
            if p.why_not(tactic) is not None or allow_tf32 != ("tf32" in tactic.name):
                continue
            allowed = conv_reference.bound(p, tactic, f, w, conv_reference.linear(p, np.abs(f), np.abs(w)), before) + off
            for skewed in ("", "x") if tactic.family in ("generic", "direct_fused") else ("",):
                y = run_twice(p, tactic, x, w, b, r, scale, shift, skewed)
                excess = np.abs(y - conv_reference.activate(p, before)) - allowed
                assert excess.max() <= 0, (tactic.name, skewed, excess.max(), allowed.min())
                ran += 1
    assert ran > 1


def test_what_is_not_a_number_makes_its_group_so(gpu):
    p, rng = Problem(**LAYER, dtype="float16", layout="NHWC"), np.random.default_rng(0)
    x, w = rng.standard_normal((2, 32, 14, 13)), np.zeros(p.w_shape)
    w[:, 1, 1, :] = np.eye(40, 32)
    x[0, 5, 3, 3], x[1, 17, 0, 0] = np.inf, np.nan
    for tactic in (tactic for tactic in tactics() if tactic.family in ("generic", "filter_fused") and p.why_not(tactic) is None):
        y = run_twice(p, tactic, x, w, None, None, np.ones(32), np.zeros(32))
        wrong = np.isnan(y).any(axis=(2, 3))
        # A zero weight does not save a sum from an operand that is no number.
        assert wrong.all() if tactic.family == "generic" else wrong[0, 4:8].all() and wrong[1, 16:20].all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(prologue_groups=0), "prologue_groups; got 0, expected a divisor of c"),
        (dict(prologue_groups=7), "prologue_groups; got 7, expected a divisor of c"),
        (dict(prologue_affine=1), "prologue_groups; got 8, expected 0 where X is not normalized"),
        (dict(prologue_affine=4), "prologue_affine; got 4, expected 0"),
        (dict(prologue_epsilon=-1.0), "prologue_epsilon; got -1.000000, expected a finite number of at least 0"),
        (dict(prologue_epsilon=float("nan")), "prologue_epsilon; got nan, expected a finite number"),
        (dict(prologue_affine=1, prologue_groups=0, prologue_epsilon=1.0), "expected 0 where X is not normalized"),
        (dict(dtype="int8"), "prologue_affine; got 3, expected 0 where W has I8"),
        (dict(n=1 << 28, spatial=(8, 8)), "n \\* prologue_groups; got 2147483648, expected less than 2\\^31"),
    ],
)
def test_what_is_no_normalization_is_refused(changed, message):
    with pytest.raises(ProblemError, match=message):
        Problem(**LAYER | changed).y_shape  # noqa: B018


def test_it_runs_where_scale_and_shift_by_image_do_and_needs_memory_for_them():
    for dtype in ("float16", "float32"):
        p = Problem(**LAYER, dtype=dtype, layout="NHWC")
        by_image = Problem(**{**LAYER, "prologue_affine": 2, "prologue_groups": 0}, dtype=dtype, layout="NHWC")
        device = dict(cc=90, shared_bytes=232448)
        for tactic in tactics():
            assert (p.why_not(tactic, **device) is None) == (by_image.why_not(tactic, **device) is None), tactic.name
            if p.why_not(tactic, **device) is None:
                more = p.workspace_bytes(tactic) - by_image.workspace_bytes(tactic)
                arrays = (p.n * p.c * (2 if dtype == "float16" else 4), p.n * 6 * p.prologue_groups * 8)  # 6 parts of 32 pixels
                factors, moments = (-(-size // 256) * 256 for size in arrays)
                assert more == 2 * factors + moments


def test_no_smaller_problem_needs_more_memory():
    """TensorRT gives what the largest shape needs."""
    small = dict(kernel_shape=1, pads=0, m=8, dtype="float16", layout="NHWC")
    batches, sizes = (1, 2, 7, 8, 131, 132, 133, 263, 264, 265, 527, 528, 529, 1000), (1, 5, 6, 7, 31, 64, 129, 131, 400)
    problems = [[Problem(**LAYER | small | dict(n=n, spatial=(size, size))) for size in sizes] for n in batches]
    needed = np.array([[p.workspace_bytes("conv_avgpool_generic") for p in row] for row in problems])
    assert all((np.diff(needed, axis=axis) >= 0).all() for axis in (0, 1))


GROUPS = 2**31 // 512
MANY = dict(n=1, c=GROUPS, m=1, spatial=(480, 480), prologue_groups=GROUPS)  # of which 528 parts would be too many blocks
GRIDS = [({}, "NHWC", [2 * 6, 4]), ({}, "NCHW", [2 * 6 * 8, 4]), (MANY, "NCHW", [511 * GROUPS, GROUPS // 4])]


@pytest.mark.parametrize(("changed", "layout", "grids"), GRIDS)
def test_two_kernels_go_before(monkeypatch, changed, layout, grids):
    lib, p = pretended.load(monkeypatch), Problem(**LAYER | changed, dtype="float16", layout=layout)
    addresses = {name: number << 30 for number, name in enumerate(("x", "w", "b", "y", "workspace", "scale", "shift"), 1)}
    tensors = library.TensorsStruct(library.ctypes.sizeof(library.TensorsStruct), workspace_bytes=1 << 40, **addresses)
    before, generic = lib.pretended_launches(), 1
    assert lib.convpool_launch(p.struct, generic, tensors, None) == 0, lib.convpool_last_error()
    launched = [lib.pretended_launch(i)[0].grid for i in range(before, lib.pretended_launches())]
    assert len(launched) == 3 and launched[:2] == grids
