# SPDX-License-Identifier: Apache-2.0
"""Every tactic on every case it supports, in both layouts."""

import re

import numpy as np
import pytest

from convpool.cuda import Plan, Problem, find_tactic, tactics
from tests.support.kernels import conv_reference
from tests.support.kernels.tactic_checks import (
    CASES,
    INTEGER,
    NUMPY_TYPES,
    RANDOM,
    check,
    check_float_image,
    layer_of,
    make_problem,
    run_twice,
    sizes,
)

GROUPS = {"float16": 12, "bfloat16": 4, "float32": 8}


def names(wanted=lambda name: True) -> list:
    """The tactics by name.  With `--dist loadgroup` a process of pytest-xdist gets tactics of one type, whose data it makes."""
    chosen = [tactic for tactic in tactics() if wanted(tactic.name)]
    groups = [f"{tactic.dtype}-{number % GROUPS.get(tactic.dtype, 1)}" for number, tactic in enumerate(chosen)]
    return [pytest.param(tactic.name, marks=pytest.mark.xdist_group(group)) for tactic, group in zip(chosen, groups, strict=True)]


def tactic_of(gpu, name: str, hopper: bool = False):
    """The tactic, where the GPU runs it.  hopper: on no other one."""
    tactic, (major, minor) = find_tactic(name), gpu.compute_capability()
    if 10 * major + minor < tactic.min_cc or hopper and (major, minor) != (9, 0):
        pytest.skip(f"needs compute capability {90 if hopper else tactic.min_cc}")
    return tactic


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("kind", [INTEGER, RANDOM])
@pytest.mark.parametrize("name", names())
def test_tactic(gpu, name, kind, layout):
    tactic = tactic_of(gpu, name)
    types = [tactic.dtype] if tactic.dtype else list(NUMPY_TYPES)
    tried = sum(check(i, tactic, dtype, layout, kind) for dtype in types for i in range(len(CASES)))
    print(f"{name}: {tried} cases")
    other = "NHWC" if "_nchw" in name else "NCHW" if "_tma" in name or "_rs" in name or name.endswith("_1x1") else None
    if layout == other:
        assert tried == 0
        return
    # A split of direct_fused needs as many slices of channels as it has blocks, which few of the cases have.
    least = {"generic": len(CASES) * len(types), "direct_fused": 3 if tactic.split_k > 1 else 40, "upsample": 60}
    assert tried >= (20 if name.endswith("_differences") else least.get(tactic.family, 500))


def layout_of(name: str) -> str:
    """A layout that a tactic is for."""
    return "NCHW" if "_nchw" in name else "NHWC"


def check_skewed(gpu, name: str, skewed: str, kernel: int):
    """The tactic runs the array named `skewed`, which is aligned to its elements only, or refuses it as its plan says."""
    tactic = tactic_of(gpu, name, hopper=True)
    wanted = dict(prologue_affine=True, bias=True, residual=True, kernel_shape=(kernel, kernel))
    case = next(i for i, c in enumerate(CASES) if i % 3 and wanted.items() <= c.items())  # check() moves Y at every third
    problem = make_problem(CASES[case], tactic.dtype, "NHWC", "NHWC", "tf32x3" not in name, INTEGER)
    if Plan(problem, tactic=tactic).alignments[skewed] <= np.dtype(NUMPY_TYPES[tactic.dtype]).itemsize:
        assert check(case, tactic, tactic.dtype, "NHWC", INTEGER, skewed)
    else:
        with pytest.raises(AssertionError, match=f"{name}: address of {skewed}; got one that is . modulo 16, expected"):
            check(case, tactic, tactic.dtype, "NHWC", INTEGER, skewed)


@pytest.mark.parametrize("rounded", ["x", "w"])
@pytest.mark.parametrize("name", names(lambda name: "_tf32_" in name))
def test_tf32_is_rounded_to_nearest(gpu, name, rounded):
    """Integers are exact either way, and the bound on random data is too wide to tell rounding from cutting off."""
    tactic = tactic_of(gpu, name)
    side = layer_of(tactic)["kernel_shape"]
    layer = dict(layer_of(tactic), dtype="float32", layout=layout_of(name), allow_tf32=True)
    problem = Problem(n=2, c=256, m=256, spatial=(16, 16), **layer)
    if reason := problem.why_not(tactic):
        pytest.skip(reason)
    x, w = np.ones(problem.x_shape[:1] + (256, 16, 16)), np.zeros(problem.w_shape)
    w[:, side // 2, side // 2] = np.eye(256)
    (x if rounded == "x" else w)[:] *= 1 + 3 * 2.0**-12
    nothing = np.zeros(256)
    y = run_twice(problem, tactic, x, w, nothing, nothing, nothing, nothing)
    assert (y == 1 + 2.0**-10).all(), np.unique(y)


def check_not_finite(problem: Problem, tactic, x: np.ndarray, w: np.ndarray) -> None:
    """Give the reference's result for an infinity of each sign and NaN among the values of X."""
    for place, value in ((5, np.inf), (15, -np.inf), (25, np.nan)):
        x[0, 0, place, place] = value
    with np.errstate(invalid="ignore"):
        expected = conv_reference.linear(problem, conv_reference.prologue(problem, x, x, x), w)
    np.testing.assert_array_equal(run_twice(problem, tactic, x, w, None, None, None, None), expected)


@pytest.mark.parametrize("before, slope", [("relu", 0.0), ("leaky_relu", 0.25), ("leaky_relu", 0.0)])
@pytest.mark.parametrize("name", names(lambda name: "_tma" in name or name.endswith("_im2col") and "f16_" in name))
def test_prologue_of_values_that_are_not_finite(gpu, name, before, slope):
    tactic = tactic_of(gpu, name, hopper=True)
    prologue = dict(prologue_activation=before, prologue_alpha=slope)
    layer = dict(layer_of(tactic), strides=2)
    if tactic.family == "upsample":
        del layer["strides"]
    elif "_tma" not in name:
        layer["pool_kernel_shape"] = 1
    layer |= dict(prologue, dtype=tactic.dtype, layout="NHWC", allow_tf32=True)
    problem = Problem(n=1, c=8, m=8, spatial=(36, 36), **layer)
    x, w = np.ones((1, 8, 36, 36)), np.zeros(problem.w_shape)
    w[:, 0] = 1  # sums that are numbers of bfloat16
    if tactic.family == "upsample":
        w[:] = 1  # which sums taps first: a zero beside a one does not make NaN of an infinity
    check_not_finite(problem, tactic, x, w)


@pytest.mark.parametrize("before", [None, "relu", "leaky_relu"])
@pytest.mark.parametrize("name", names(lambda name: "_rs" in name))
def test_box_means_of_values_that_are_not_finite(gpu, name, before):
    """Formed in registers, and rounded there.  128 channels are enough for every split."""
    tactic = tactic_of(gpu, name, hopper=True)
    accumulation = "packed" if tactic.packed else "default"
    kernel, window = sizes(name)
    layer = dict(n=1, c=128, m=8, spatial=(36, 40), kernel_shape=kernel, pool_kernel_shape=window, strides=window)
    layer |= dict(prologue_activation=before, prologue_alpha=0.25)
    problem = Problem(**layer, dtype=tactic.dtype, layout=layout_of(name), allow_tf32=True, accumulation=accumulation)
    if reason := problem.why_not(tactic):
        assert "prologue; got" in reason and before is not None
        return
    x, w = np.zeros((1, 128, 36, 40)), np.zeros(problem.w_shape)
    x[:, ::16] = w[:, 0] = 1  # sums that are numbers of bfloat16
    check_not_finite(problem, tactic, x, w)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation, alpha", [("relu", 0.0), ("leaky_relu", 0.25), ("leaky_relu", 0.0), ("clip", -0.5)])
@pytest.mark.parametrize("name", names(lambda name: "m64n64" in name or name.endswith("_few")))
def test_epilogue_of_values_that_are_not_finite(gpu, name, activation, alpha, residual):
    tactic = tactic_of(gpu, name)
    allowed, channels = 0, 3 if name.endswith("_few") else 256
    layer = dict(kernel_shape=1, pool_kernel_shape=2, strides=2) if name.endswith("_few") else layer_of(tactic)
    for y_layout in ("NHWC", "NCHW"):
        problem = Problem(
            n=1, c=channels, m=8, spatial=(20, 24), **layer, dtype=tactic.dtype, layout=layout_of(name),
            y_layout=y_layout, bias=True, residual=residual, activation=activation, alpha=alpha, beta=0.5,
            allow_tf32="tf32x3" not in name, accumulation="packed" if tactic.packed else "default",
        )  # fmt: skip
        if problem.why_not(tactic):
            continue
        allowed += 1
        bias = np.array([np.inf, -np.inf, np.nan, 0.25, -0.25, 4.0, -4.0, 0.0])
        before = np.zeros((1, 8, *problem.y_shape[2 if y_layout == "NCHW" else 1 :][:2])) + bias.reshape(1, 8, 1, 1)
        addend = np.full_like(before, 0.125)
        with np.errstate(invalid="ignore"):
            expected = conv_reference.activate(problem, before + addend if residual else before)
        x, w = np.zeros((1, channels, 20, 24)), np.ones(problem.w_shape)
        np.testing.assert_array_equal(run_twice(problem, tactic, x, w, bias, addend, None, None), expected)
    assert allowed, problem.why_not(tactic)


@pytest.mark.parametrize("skewed", ["x", "residual", "y"])
@pytest.mark.parametrize("name", names(lambda name: "m64n64" in name and not re.search("_rs|_tma|_1x1", name)))
def test_channels_first_arrays_aligned_to_their_elements(gpu, name, skewed):
    """Images are whole runs of pixels, which aligned arrays are read and written in."""
    tactic = tactic_of(gpu, name)
    wanted = dict(c=296, spatial=(8, 8), residual=True)  # slices enough for a split of 8
    if tactic.family == "upsample":
        wanted = dict(c=520, spatial=(4, 4), residual=True, upsample=2)
    case = next(i for i, c in enumerate(CASES) if i % 3 and wanted.items() <= c.items())
    assert check(case, tactic, tactic.dtype, "NCHW", INTEGER, skewed)


@pytest.mark.parametrize("skewed", ["x", "w", "b", "residual", "scale", "shift", "y"])
@pytest.mark.parametrize("name", names(lambda name: name.endswith(("_tma3x3", "_tma1x1", "_1x1"))))
def test_arrays_that_the_kernel_cannot_take(gpu, name, skewed):
    check_skewed(gpu, name, skewed, 3 if name.endswith("3x3") else 1)


@pytest.mark.parametrize("skewed", ["x", "w", "b", "residual", "y"])
@pytest.mark.parametrize("name", names(lambda name: "_nchw" in name))
def test_channels_first_arrays_that_the_kernel_cannot_take(gpu, name, skewed):
    tactic = tactic_of(gpu, name, hopper=True)
    accumulation = dict(accumulation="packed" if tactic.packed else "default")
    problems = [make_problem(case | accumulation, tactic.dtype, "NCHW", "NCHW", True, INTEGER) for case in CASES]
    fitting = (i for i, p in enumerate(problems) if p.bias and p.residual and p.why_not(tactic) is None)
    case = next(i for i in fitting if i % 3)  # check() moves Y at every third
    if skewed in ("x", "w"):
        with pytest.raises(AssertionError, match=f"{name}: address of {skewed}; got one that is . modulo 16, expected"):
            check(case, tactic, tactic.dtype, "NCHW", INTEGER, skewed)
    else:
        assert check(case, tactic, tactic.dtype, "NCHW", INTEGER, skewed)


@pytest.mark.parametrize("skewed", ["x", "b", "residual", "scale", "shift", "y"])  # W is refused where it is read in place
@pytest.mark.parametrize("name", names(lambda name: name.endswith("_m64n64k64_s8_im2col")))
def test_arrays_around_an_implicit_gemm_by_tma(gpu, name, skewed):
    check_skewed(gpu, name, skewed, 3)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("skewed", ["x", "w", "b", "residual", "scale", "shift", "y"])
@pytest.mark.parametrize("name", names(lambda name: name.endswith("_few")))
def test_arrays_of_few_channels_aligned_to_their_elements(gpu, name, skewed, layout):
    tactic = tactic_of(gpu, name)
    wanted = dict(c=3, kernel_shape=(1, 1), prologue_affine=True, bias=True, residual=True)
    case = next(i for i, c in enumerate(CASES) if i % 3 and wanted.items() <= c.items())
    assert check(case, tactic, tactic.dtype, layout, INTEGER, skewed)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("name", names(lambda name: re.search("16_.*_few$", name) or name == "conv_avgpool_generic"))
def test_images_of_floats(gpu, name, layout):
    tactic = tactic_of(gpu, name)
    types = [tactic.dtype] if tactic.dtype else ["float16", "bfloat16"]
    assert sum(check_float_image(i, tactic, dtype, layout) for dtype in types for i in range(len(CASES))) > 30


@pytest.mark.parametrize("skewed", ["x", "w"])
def test_default_tactic_takes_arrays_aligned_to_their_elements(gpu, skewed):
    """Without pooling and workspace, where implicit GEMM, the choice for other arrays on an H200, reads X and W in place."""
    p = Problem(n=2, c=64, m=64, spatial=(16, 16), kernel_shape=3, pool_kernel_shape=1, pads=1, layout="NHWC")
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-2, 3, shape).astype(np.float64) for shape in ((2, 64, 16, 16), p.w_shape))
    np.testing.assert_array_equal(run_twice(p, None, x, w, None, None, None, None, skewed), conv_reference.linear(p, x, w))
