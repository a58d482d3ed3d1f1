# SPDX-License-Identifier: Apache-2.0
"""The library without a GPU: it loads, lists tactics, computes shapes, and refuses what is wrong with a reason."""

import concurrent.futures
import ctypes
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from convpool.cuda import Problem, ProblemError, UnsupportedError, find_tactic, library, tactics, tuned
from tests.support.kernels import conv_cases, conv_reference

H200 = dict(cc=90, shared_bytes=227 * 1024)
TURING = dict(cc=75, shared_bytes=64 * 1024)
ADA = dict(cc=89, shared_bytes=99 * 1024)
AMPERE = dict(cc=80, shared_bytes=163 * 1024)
BLACKWELL = dict(cc=120, shared_bytes=99 * 1024)
FLOATS = ("float16", "bfloat16", "float32")
LAYER = dict(n=64, c=128, m=128, spatial=(32, 32), kernel_shape=3, pool_kernel_shape=2, pool_pads=1, strides=2, layout="NHWC")
UPSAMPLED = dict(pool_kernel_shape=1, pool_pads=0, strides=1, pads=1, upsample=2)
UPSAMPLES = "upsample_sm90a_f16_m64n64k64_s4_im2col"
RS = "direct_fused_sm90a_f16_m64n128k32_s5_rs3x3"
NCHW = "direct_fused_sm90a_tf32_m256n64k16_s7_rs3x3_nchw32"
IM2COL = "direct_gemm_sm90a_f16_m64n64k64_s8_im2col"
DIRECT, FILTER = "direct_fused_sm75_f16_m64n64k32_s6", "filter_fused_sm75_f16_m64n64k32_s4"
ONES = dict(n=1, c=1, m=1)
POINT = dict(pool_kernel_shape=1, pool_pads=0)
E4M3 = dict(dtype="float8_e4m3fn")
PADDED, BELOW = "with its padding", r"expected less than 2\^31"
TF32_FIRST = dict(dtype="float32", allow_tf32=True, layout="NCHW")
NCHW_PACKED = "direct_fused_sm90a_f16_m128n64k32_s9_packed_rs3x3_nchw16"
PACKED_FIRST = dict(accumulation="packed", layout="NCHW")
# Steps of 65535^2 pixels, and bytes of the pixels under a tile past 2^63.
STEPS = dict(POINT, spatial=(32, 200000), pool_strides=(1, 65535), kernel_shape=(1, 2), strides=1, pads=(0, 65535, 0, 0))
STEPS |= dict(dilations=(1, 65535))
WINDOWS = dict(n=1, c=1, m=8, spatial=(1, 640000000), kernel_shape=1, strides=(28, 1), pool_kernel_shape=(1, 60000))
WINDOWS |= dict(pool_dilations=(1, 10600), pool_pads=0, pool_strides=(65535, 1))


def test_tactics_are_listed_with_distinct_ids_and_names():
    all_tactics = tactics()
    assert {t.family for t in all_tactics} == {"generic", "direct_gemm", "direct_fused", "filter_fused", "upsample"}
    assert len({t.id for t in all_tactics}) == len({t.name for t in all_tactics}) == len(all_tactics)
    assert 0 not in {t.id for t in all_tactics}


def test_an_id_of_a_retired_row_is_not_used_again():
    """Engines and tables of measurements name the kernels."""
    page = (Path(__file__).parents[2] / "docs" / "decisions" / "032-rows-and-families-that-stay.md").read_text()
    rows = re.findall(r"^\| `[\w]+` \|[^|]*\| ([\d, ]+) \|$", page, re.MULTILINE)
    retired = {int(number) for ids in rows for number in re.findall(r"[1-4]\d{3}\b", ids)}
    assert len(retired) == 61
    assert not retired & {tactic.id for tactic in tactics()}


@pytest.mark.parametrize("affine, before", [(False, None), *conv_cases.PROLOGUES])
def test_every_type_has_a_tactic_of_every_family_for_every_prologue(affine, before):
    for dtype, tf32 in (("float16", False), ("bfloat16", False), ("float32", True), ("float32", False)):
        given = dict(dtype=dtype, allow_tf32=tf32, prologue_affine=affine, prologue_activation=before)
        families = {t.family for t in tactics() if changed(**given).why_not(t, **H200) is None}
        assert families == {"generic", "direct_gemm", "direct_fused", "filter_fused"}
        problem = changed(**UPSAMPLED, **given)
        assert {t.family for t in tactics() if problem.why_not(t, **H200) is None} == {"generic", "upsample"}
        assert problem.default_tactic(**H200, multiprocessors=132, max_workspace_bytes=2**40).family == "upsample"
        assert problem.default_tactic(**AMPERE, multiprocessors=108, max_workspace_bytes=2**40).family == "upsample"
        assert problem.default_tactic(**AMPERE, multiprocessors=108).family == "generic"  # without room for the phases of W


@pytest.mark.parametrize("case", conv_cases.all_cases()[::3], ids=lambda c: "x".join(map(str, c["spatial"])))
def test_output_shape(case):
    problem = Problem(**case | dict(n=1, c=case.get("group", 1), m=case.get("group", 1)), layout="NCHW")
    y = conv_reference.linear(problem, np.zeros(problem.x_shape), np.zeros(problem.w_shape))
    assert problem.y_shape == y.shape


def changed(**fields) -> Problem:
    return Problem(**(LAYER | fields))


@pytest.mark.parametrize(
    "fields, reason",
    [
        (dict(spatial=(1, 32), pool_pads=0), r"spatial\[0\]; got 1, expected at least the pooling window"),
        (dict(spatial=(2, 32), pool_pads=0), r"pooled size\[0\]; got 1, expected at least the kernel"),
        (dict(n=0), r"n; got 0, expected 1"),
        (dict(c=2**31), r"c; got 2147483648, expected 1 to 2\^31 - 1"),
        (dict(group=3), r"c; got 128, expected a multiple of group 3"),
        (dict(m=127, group=2), r"m; got 127, expected a multiple of group 2"),
        (dict(strides=0), r"strides\[0\]; got 0, expected 1"),
        (dict(pads=(0, 0, -1, 0)), r"pads\[2\]; got -1, expected 0"),
        (dict(activation="clip", alpha=2, beta=1), r"clip bounds; got alpha 2\.0+ and beta 1\.0+, expected alpha <= beta"),
        (dict(prologue_activation="tanh"), r"prologue_activation; got 3, expected 0 \(none\), 1 \(relu\), 2 \(leaky_relu\) or 6"),
        (dict(prologue_activation="leaky_relu", prologue_alpha=65536), r"prologue_alpha.*; got 65536, expected at most 65504"),
        (dict(prologue_activation="leaky_relu", prologue_alpha=-65536), r"prologue_alpha.*; got -65536, expected at most"),
        (dict(prologue_activation="leaky_relu", prologue_alpha=3.4e38, dtype="bfloat16"), r"got 3\.4e.*, expected at most 3.38"),
        (dict(prologue_activation="leaky_relu", prologue_alpha=np.nan, dtype="float32"), r"got nan, expected at most 3\.40"),
        (dict(x_dtype="float16", dtype="float32"), r"x_dtype; got F16, expected F32, which W has$"),
        (dict(x_dtype="bfloat16"), r"x_dtype; got BF16, expected F16, which W has, or F32$"),
        (dict(x_dtype="int8"), r"x_dtype; got I8, expected F16, which W has, or F32$"),
        (dict(y_dtype="float32"), r"y_dtype; got F32, expected F16, which W has"),
        (dict(w_scale=True), r"has_w_scale; got 1, expected 0 where W has F16: scales are for 8-bit types"),
        (dict(dtype="int8", x_dtype="float16"), r"x_dtype; got F16, expected I8, which W has"),
        (dict(dtype="int8", x_dtype="float8_e4m3fn"), r"x_dtype; got F8E4M3, expected I8, which W has"),
        (dict(E4M3, y_dtype="float8_e4m3fn"), r"y_dtype; got F8E4M3, expected F16, BF16 or F32 where W has F8E4M3"),
        (dict(dtype="int8", prologue_affine=True), r"prologue_affine; got 1, expected 0 where W has I8"),
        (dict(dtype="int8", prologue_activation="relu"), r"prologue_activation; got 1, expected 0 where W has I8"),
        (dict(E4M3, c=2**22), r"products of an output's sum; got more than 2\^27"),
        (dict(n=2**20, spatial=(2**10, 2**10)), r"X has more than 2\^40 elements"),
        (dict(ONES, spatial=(32, 2**31 - 1)), r"spatial\[1\] with its padding; got 2147483649, expected less"),
        (dict(ONES, spatial=(32, 2**31 - 1), pool_pads=0, pads=1), rf"pooled size\[1\] {PADDED}; got 2147483648, {BELOW}"),
        (
            dict(ONES | POINT, spatial=(1, 1), kernel_shape=2**16 - 1, pads=2**15 - 1),
            f"taps of the kernel; got 4294836225, {BELOW}",
        ),
        (dict(upsample=2), r"pool_kernel\[0\]; got 2, expected 1 where X is upsampled: a problem pools or upsamples"),
        (dict(UPSAMPLED, upsample=(1, 2), pool_pads=(0, 0, 0, 1)), r"pool_pads\[1\]; got 1, expected 0 where X is upsampled"),
        (dict(UPSAMPLED, pool_strides=2), r"pool_strides\[0\]; got 2, expected 1 where X is upsampled"),
        (dict(UPSAMPLED, upsample=5), r"upsample\[0\]; got 5, expected 0 or 1 \(none\) to 4"),
        (dict(UPSAMPLED, upsample=-1), r"upsample\[0\]; got -1, expected 0 or 1"),
        (dict(UPSAMPLED, spatial=(1, 8), kernel_shape=5), r"upsampled size\[0\]; got 2, expected at least the kernel"),
        (dict(UPSAMPLED, **ONES, spatial=(1, 2**31 - 1)), rf"upsampled size\[1\] {PADDED}; got 4294967296, {BELOW}"),
        (dict(UPSAMPLED, n=2**17, c=1, m=1, spatial=(2**10, 2**11), upsample=4), r"Upsample\(X\) has more than 2\^40 elements"),
    ],
)
def test_wrong_problem_is_refused_with_a_reason(fields, reason):
    with pytest.raises(ProblemError, match=reason):
        changed(**fields).y_shape  # noqa: B018


@pytest.mark.parametrize("dtype, slope", [("float16", -65504), ("bfloat16", 3.38e38), ("float32", 3.4e38)])
def test_the_largest_slope_is_a_number_of_the_type(dtype, slope):
    assert changed(prologue_activation="leaky_relu", prologue_alpha=slope, dtype=dtype).y_shape
    assert changed(prologue_activation="relu", prologue_alpha=np.inf, dtype=dtype).y_shape  # a slope that nothing reads


@pytest.mark.parametrize(
    "fields, reason",
    [
        (dict(spatial=(1, 2, 3, 4)), r"spatial: wrong rank; got \(1, 2, 3, 4\)"),
        (dict(dtype="float64"), r"dtype: unknown; got 'float64'"),
        (dict(dtype=None), r"dtype: unknown; got None"),
        (dict(x_dtype="float64"), r"x_dtype: unknown; got 'float64'"),
        (dict(layout="NHCW"), r"layout: unknown; got 'NHCW'"),
        (dict(pads=(1, 1)), r"pads: wrong length; got \[1, 1\], expected 4"),
        (dict(n=2**64 + 1), r"n: out of range; got 18446744073709551617, expected a 64-bit number"),
        (dict(group=2**32 + 1), r"group: out of range; got 4294967297, expected a 32-bit number"),
        (dict(prologue_affine=2**32 + 1), r"prologue_affine: out of range; got 4294967297, expected a 32-bit number"),
        (dict(spatial=(32, 32.0)), r"spatial: no whole number; got 32\.0"),
        (dict(activation="gelu"), r"activation: unknown; got 'gelu'"),
        (dict(prologue_activation="gelu"), r"prologue_activation: unknown; got 'gelu'"),
    ],
)
def test_wrong_argument_is_named(fields, reason):
    with pytest.raises(ProblemError, match=reason):
        changed(**fields)


@pytest.mark.parametrize(
    "name, fields, reason",  # on an H200, or the device among the fields
    [
        (DIRECT, UPSAMPLED, r"upsampling of X; got some, expected none; use an upsample"),
        (UPSAMPLES, {}, r"upsampling of X; got none, expected some; use another tactic"),
        (UPSAMPLES, dict(UPSAMPLED, strides=(1, 2)), r"stride of dimension 1; got 2, expected 1; use the tactic generic"),
        (UPSAMPLES, dict(UPSAMPLED, dilations=(2, 1)), r"dilation of dimension 0; got 2, expected 1; use the tactic"),
        ("upsample_sm90a_f16_m128n128k64_s4_differences", dict(UPSAMPLED, residual=True), r"residual; got 1, expected 0"),
        (DIRECT, dict(group=2), r"group; got 2, expected 1; use the tactic generic"),
        (DIRECT, dict(dtype="bfloat16"), r"dtype; got BF16, expected F16"),
        (DIRECT, dict(spatial=(9, 9, 9)), r"rank; got 3, expected 1 or 2"),
        ("direct_fused_sm80_bf16_m64n64k32_s6", dict(TURING, dtype="bfloat16"), r"compute capability; got 75, expected 80"),
        ("direct_gemm_sm80_tf32_m64n64k16_s4", dict(dtype="float32"), r"allow_tf32; got 0, expected 1"),
        (DIRECT, dict(x_dtype="float32"), r"type of X; got F32, expected F16; use a few_channels"),
        ("direct_fused_sm90_f16_m64n64k32_s6_split8", dict(c=64), r"channel slices; got 2, expected at least 8"),
        ("direct_fused_sm75_f16_m128n256k32_s3", ADA, r"shared memory of a block; got 101376 bytes, expected at least"),
        (DIRECT, dict(kernel_shape=11), r"taps of the kernel; got 121"),
        ("filter_fused_sm75_f16_m64n64k32_s4", dict(pads=1, pool_pads=0), r"leading pads of dimension 0; got 1"),
        (
            "direct_gemm_sm90a_tf32x3_m64n64k16_s4",
            dict(dtype="float32", n=16, c=1, spatial=(2**13 - 1, 2**13 - 1)),
            f"16-byte chunks of the tensor to convolve; got 4294967296, {BELOW}",
        ),  # of 16 channels' halves
        (
            "direct_fused_sm90a_f16_m64n64k64_s5_1x1",
            dict(n=1, c=2**19, spatial=(2, 2), kernel_shape=1, strides=1, pool_pads=(0, 2**15) * 2, pool_dilations=(1, 2**15)),
            r"chunks between columns of a window; got 2147483648, expected at most 2\^30",
        ),
        (FILTER, STEPS, r"pixels that Y sees along dimension 1; got 4295032830"),
        (
            FILTER,
            dict(
                ONES, spatial=(1000, 1000), kernel_shape=2, dilations=30011, strides=1, pool_kernel_shape=20000, pool_pads=30000
            ),
            r"taps of the fused filter; got 2501100121, expected at most 2\^30",
        ),
        (
            "direct_gemm_sm90a_f16_m64n64k64_s4",  # the middle tap, in X, is 2^31 elements from the first, in the padding
            dict(POINT, n=1, c=4096, spatial=(8, 4096), strides=1, dilations=(128, 1), pads=(128, 1) * 2),
            r"elements between a filter's first and last tap; got 429\d+, expected at most 2\^30",
        ),
        (IM2COL, dict(strides=(2, 9)), r"stride, in width; got 9, expected 1 to 8; use a tactic without im2col"),
        (
            IM2COL,
            dict(spatial=(300, 8), dilations=(128, 1)),
            r"pixels from a window's first tap to its last, in height; got 256, expected 0 to 255",
        ),
        (
            "filter_fused_sm90a_f16_m64n64k64_s4_im2col",
            dict(pads=(128, 0) * 2),
            r"padding before the first pixel, in height; got 129, expected 0 to 128",
        ),
        (
            IM2COL,
            dict(POINT, spatial=(8, 200), kernel_shape=(1, 131), strides=1),
            r"last window's start from the last pixel on, in width; got -130, expected -128 to 127",
        ),
        ("direct_fused_sm75_f16_m128n128k32_s3", WINDOWS, r"shared memory of a block; got 232448 bytes"),
        (RS, dict(prologue_activation="leaky_relu", prologue_alpha=1.5), "slope of the prologue; got 1.5.*, expected at most 1"),
        (RS, dict(prologue_activation="leaky_relu", prologue_alpha=2**-25), "slope of the prologue; got 0.*, expected at most 1"),
        (
            "direct_fused_sm90a_f16_m64n128k32_s4_rs3x3_pool3",
            dict(pool_kernel_shape=3, pool_pads=2, strides=3, prologue_affine=True),
            "prologue; got scale and shift without ReLU, expected none",
        ),
        (NCHW, dict(TF32_FIRST, layout="NHWC"), "layout; got NHWC, expected NCHW"),
        (NCHW, dict(TF32_FIRST, y_layout="NHWC"), "layout; got NHWC, expected NCHW"),
        (NCHW, dict(TF32_FIRST, c=30), "input channels; got 30, expected a multiple of 4"),
        (NCHW, dict(TF32_FIRST, spatial=(16, 18)), "width; got 18, expected a multiple of 4"),
        (NCHW, dict(TF32_FIRST, prologue_affine=True), "prologue; got scale and shift without ReLU, expected none"),
        (NCHW, dict(TF32_FIRST, allow_tf32=False), "allow_tf32; got 0, expected 1"),
        (NCHW_PACKED, dict(PACKED_FIRST, c=36), "input channels; got 36, expected a multiple of 8"),
        (NCHW_PACKED, dict(PACKED_FIRST, spatial=(16, 20)), "width; got 20, expected a multiple of 8"),
        (NCHW_PACKED, dict(PACKED_FIRST, accumulation="default"), "accumulation; got 0 .*, expected 1"),
    ],
)
def test_tactic_says_why_not(name, fields, reason):
    device = H200 | {key: fields[key] for key in H200 if key in fields}
    why = changed(**{key: value for key, value in fields.items() if key not in device}).why_not(f"conv_avgpool_{name}", **device)
    assert why is not None and why.startswith(f"conv_avgpool_{name}: ")
    assert re.search(reason, why), why


def test_tactics_need_code_of_their_architecture():
    """A device runs code of its own major version, else PTX of the last; split and TF32 are empty in that of an older one."""
    built = [int(arch) for arch in library.load().convpool_architectures().decode().split(",")]
    for cc in (75, 80, 90, 100, 120):
        own = [arch for arch in built if arch // 10 == cc // 10 and arch <= cc]
        code = max(own) if own else built[-1] if built[-1] <= cc else 0
        for dtype in FLOATS:
            problem = changed(dtype=dtype, c=512, allow_tf32=True)
            for tactic in tactics():
                why = problem.why_not(tactic, cc=cc, shared_bytes=H200["shared_bytes"])
                assert ("architecture of the code" in (why or "")) == (0 < code < tactic.min_cc <= cc), (tactic.name, cc, why)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("kernel", "few"), [(4, True), (5, False)])  # filters of 64 and of 100 elements
def test_images_of_floats_have_a_tactic(dtype, kernel, few):
    image = dict(n=64, c=4, m=64, spatial=(64, 64), kernel_shape=kernel, pool_kernel_shape=1, x_dtype="float32", dtype=dtype)
    assert Problem(**image).default_tactic(**H200, multiprocessors=132).name.endswith("_few" if few else "_generic")


@pytest.mark.parametrize(
    ("fields", "space"),
    [
        (dict(), False),
        (dict(prologue_activation="relu"), False),
        (dict(prologue_activation="leaky_relu"), False),
        (dict(prologue_activation="relu", prologue_affine=True), True),
        (dict(prologue_activation="relu", layout="NCHW"), True),
        (dict(prologue_activation="relu", pool_kernel_shape=2), True),
    ],
)
def test_implicit_gemm_by_tma_activates_without_a_pass(fields, space):
    plain = dict(pool_kernel_shape=1, pool_pads=0, strides=1, pads=1)
    assert bool(changed(**(plain | fields)).workspace_bytes(f"conv_avgpool_{IM2COL}")) == space


@pytest.mark.parametrize("name, value", [("shared_bytes", 2**31 - 1), ("cc", 2**32 + 90), ("max_workspace_bytes", -1)])
def test_absurd_device_or_bound_is_refused(name, value):
    with pytest.raises(ProblemError, match=f"; got {value}, expected"):
        changed().default_tactic(**H200 | {name: value})


@pytest.mark.parametrize("device", [H200, TURING, AMPERE, ADA, BLACKWELL])
@pytest.mark.parametrize("dtype", FLOATS)
def test_some_tactic_runs_every_case_on_every_gpu(device, dtype):
    for case in conv_cases.all_cases()[::5]:
        problem = Problem(**case, dtype=dtype)
        assert problem.why_not("conv_avgpool_generic", **device) is None
        assert problem.why_not(problem.default_tactic(**device, multiprocessors=40), **device) is None


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("window", [12, 48, 112])
def test_means_of_large_windows_go_into_the_weights(window, layout):
    """A thread would load such a window in turn: measured on an H200 5 to 95 times as long as the fused filter."""
    wide = dict(n=16, c=8, m=16, spatial=(window + 2, window + 2), kernel_shape=3, pool_kernel_shape=window, layout=layout)
    chosen = Problem(**wide).default_tactic(**H200, multiprocessors=132, max_workspace_bytes=2**40)
    assert chosen.name.startswith("conv_avgpool_filter_fused_sm90a"), chosen.name


def test_large_layers_leave_generic_to_the_rest():
    for dtype in FLOATS:
        assert changed(dtype=dtype).default_tactic(multiprocessors=132, **H200).family != "generic"


def later_version(old):
    """A structure as a later version has it, with more behind `old`, and a pointer to it."""

    class Newer(ctypes.Structure):
        _fields_ = [("old", type(old)), ("later", ctypes.c_int32 * 4)]

    newer = Newer(old=old)
    newer.old.struct_size = ctypes.sizeof(Newer)
    return newer, ctypes.cast(ctypes.pointer(newer), ctypes.POINTER(type(old)))


def test_struct_of_a_newer_caller_is_taken_if_the_rest_is_zero():
    lib = library.load()
    newer, pointer = later_version(Problem(**LAYER).struct)
    assert lib.convpool_output_shape(pointer, None) == 0
    newer.later[2] = 1
    assert lib.convpool_output_shape(pointer, None) == 1
    assert "does not know" in library.last_error()
    for size in (8, 4097, 0x55555555):
        newer.old.struct_size = size
        assert lib.convpool_output_shape(pointer, None) == 1
        known = ctypes.sizeof(library.ProblemStruct)
        assert f"struct_size; got {size}, expected {known} or more, at most 4096" in library.last_error()


def test_a_wrong_size_of_a_tactics_entry_is_told():
    infos = (library.TacticStruct * 1)()
    for size in (0, ctypes.sizeof(library.TacticStruct) + 8):
        infos[0].struct_size = size
        assert library.load().convpool_tactics(infos, 1) == 0
        assert library.last_error() == f"infos: struct_size; got {size}, expected {ctypes.sizeof(library.TacticStruct)}"
    assert library.load().convpool_tactics(infos, 0) == len(tactics())


def test_null_pointers_are_refused():
    lib, problem = library.load(), Problem(**LAYER).struct
    assert lib.convpool_output_shape(None, None) == 1
    assert lib.convpool_workspace_bytes(problem, 1, None) == 1
    assert lib.convpool_launch(problem, 1, None, None) == 1
    tensors = library.TensorsStruct(struct_size=ctypes.sizeof(library.TensorsStruct))
    assert lib.convpool_launch(problem, 1, tensors, None) == 1
    assert library.last_error() == "tensors: x is null"


def test_tensors_of_a_newer_caller_are_taken_if_the_rest_is_zero():
    newer, pointer = later_version(library.TensorsStruct())
    size, larger = ctypes.sizeof(library.TensorsStruct), ctypes.sizeof(newer)
    for struct_size, later, reason in (
        (larger, 0, "tensors: x is null"),
        (larger, 1, f"tensors: byte {size + 8} is set, of a field that this version does not know; expected 0"),
        (size - 8, 0, f"tensors: struct_size; got {size - 8}, expected {size} or more, at most 4096"),
        (4097, 0, f"tensors: struct_size; got 4097, expected {size} or more, at most 4096"),
    ):
        newer.old.struct_size, newer.later[2] = struct_size, later
        assert library.load().convpool_launch(Problem(**LAYER).struct, 1, pointer, None) == 1
        assert library.last_error() == reason


@pytest.mark.parametrize(
    "tactic, pointers, status, reason",
    [
        (0, dict(prepared=1 << 20), 1, "tensors: prepared, and tactic 0"),
        (0, dict(flags=library.WEIGHTS_PREPARED), 1, "tensors: flags, and tactic 0"),
        (1, dict(shift=1 << 20), 1, "tensors: scale is null"),
        (1, dict(scale=1 << 20), 1, "tensors: shift is null"),
        (1, dict(scale=1 << 20, shift=(1 << 20) + 1), 4, "tensors: shift is not aligned to its 2-byte elements"),
    ],
)
def test_scale_and_shift_of_a_prologue_are_checked_and_prepared_weights_need_a_tactic(tactic, pointers, status, reason):
    size = ctypes.sizeof(library.TensorsStruct)
    tensors = library.TensorsStruct(**dict(struct_size=size, x=1 << 20, w=1 << 20, y=1 << 20) | pointers)
    assert library.load().convpool_launch(changed(prologue_affine=tactic > 0).struct, tactic, tensors, None) == status
    told = library.last_error()
    assert told.startswith(reason) if tactic == 0 else told == reason


def test_workspace_holds_what_the_stages_write():
    problem = changed(c=20, m=24, spatial=(16, 16), n=2)
    padded = 24  # channels in whole 16-byte chunks
    stages = (2 * 17 * 17 * padded * 2, 24 * 9 * padded * 2)  # pooled, weights
    expected = sum(-(-size // 256) * 256 for size in stages)
    assert problem.workspace_bytes("conv_avgpool_direct_gemm_sm75_f16_m64n64k32_s4") == expected
    assert problem.workspace_bytes("conv_avgpool_direct_fused_sm75_f16_m64n64k32_s6") == 0


def test_workspace_of_a_refused_problem_is_refused():
    grouped = changed(group=2)
    with pytest.raises(UnsupportedError, match=r"conv_avgpool_direct_gemm_sm75_f16_m64n64k32_s4: group; got 2, expected 1"):
        grouped.workspace_bytes("conv_avgpool_direct_gemm_sm75_f16_m64n64k32_s4")
    # Whatever device there is: split tactics and those of Hopper answer too.
    assert changed(c=512).workspace_bytes("conv_avgpool_direct_fused_sm90_f16_m64n64k32_s6_split8") == 0


def test_a_grid_that_no_device_launches_is_refused():
    """2^30 pixels of 1024 channels in tiles of 64x64, each by a cluster of 8."""
    wide = Problem(n=2**10, c=8, m=2**10, spatial=(2**10, 2**10), kernel_shape=1, pool_kernel_shape=1, layout="NHWC")
    why = wide.why_not("conv_avgpool_filter_fused_sm90a_f16_m64n64k64_s8_split8", **H200)
    assert why is not None and re.search(r"thread blocks; got 2147483648, expected less than 2\^31", why), why
    assert wide.why_not("conv_avgpool_filter_fused_sm90a_f16_m64n64k64_s8_split4", **H200) is None


def test_a_prologue_needs_a_copy_of_x_where_there_was_none():
    plain = changed(n=2, spatial=(16, 16), pool_kernel_shape=1, pool_pads=0, pads=1)
    for family in ("direct_gemm", "filter_fused"):
        tactic = f"conv_avgpool_{family}_sm75_f16_m64n64k32_s4"
        assert plain.workspace_bytes(tactic) == 0
        assert dataclasses.replace(plain, prologue_activation="relu").workspace_bytes(tactic) == 2 * 16 * 16 * 128 * 2


def test_problem_is_a_value():
    assert changed() == changed() and dataclasses.replace(changed(), n=1) != changed()


def test_reasons_belong_to_the_thread_that_asked():
    def ask(c):
        problem, reasons = Problem(**(LAYER | dict(c=c, group=3))), set()
        for _ in range(200):
            with pytest.raises(ProblemError) as caught:
                library.check(library.load().convpool_output_shape(problem.struct, None))
            reasons.add(str(caught.value))
        return reasons

    channels = range(4, 36, 3)  # none is a multiple of 3
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for c, reasons in zip(channels, pool.map(ask, channels), strict=True):
            assert reasons == {f"problem: c; got {c}, expected a multiple of group 3"}


CHOOSE = """
import json, os, sys, warnings
from convpool.cuda import Problem
for line in sys.stdin:
    if os.fork() == 0:
        os.environ["CONVPOOL_TUNED"], asked = json.loads(line)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            ids = [Problem(**fields).default_tactic(**device).id for fields, device in asked]
        print(json.dumps([ids, [str(one.message) for one in told]]), flush=True)
        os._exit(0)
    if os.wait()[1]:
        print("null", flush=True)
"""
WHOLE_H200 = H200 | dict(multiprocessors=132, max_workspace_bytes=2**30)
NONE = "conv_avgpool_generic"
SLOW = "conv_avgpool_direct_gemm_sm75_f16_m64n64k32_s4"


@functools.cache
def chooser() -> subprocess.Popen:
    """A process that forks for each request, before it loads the library."""
    return subprocess.Popen([sys.executable, "-c", CHOOSE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def chosen(table: str | None, *asked: tuple[dict, dict]) -> tuple[list[int], list[str]]:
    """Ids that a new process chooses with CONVPOOL_TUNED set so, and what it warns of; the variable is read once."""
    print(json.dumps([table or "", asked]), file=chooser().stdin, flush=True)
    return tuple(json.loads(chooser().stdout.readline()))


def row(tactic: str, *, cc: int = 90, **fields) -> str:
    problem = changed(**fields)
    return f"CONVPOOL_TUNED({', '.join(map(str, tuned.numbers(problem, cc, 132, find_tactic(tactic).id)))})\n"


def test_a_measured_tactic_is_chosen_for_its_problem_and_device_only(tmp_path):
    others = [
        dict(n=63), dict(spatial=(32, 31)), dict(layout="NCHW"), dict(y_layout="NCHW"), dict(prologue_affine=True),
        dict(prologue_activation="relu"), dict(dtype="bfloat16"), dict(m=64), dict(pads=1),
        dict(pool_pads=(1, 1, 1, 2)), dict(strides=1),
    ]  # fmt: skip
    asked = [
        (LAYER, WHOLE_H200),
        (LAYER | dict(bias=True, activation="relu"), WHOLE_H200),
        (LAYER | dict(residual=True), WHOLE_H200),
        (LAYER, WHOLE_H200 | dict(multiprocessors=114)),
        (LAYER, WHOLE_H200 | dict(max_workspace_bytes=0)),
    ]
    asked += [(LAYER | other, WHOLE_H200) for other in others]
    by_rule, told = chosen("off", *asked)
    slow = find_tactic(SLOW).id
    assert not told and slow not in by_rule
    path = tmp_path / "tuned.def"
    path.write_text("// measured\n\n" + row(NONE) + "  " + row(SLOW).strip() + "  // 9.1 us, the later row counts\r\n")
    assert chosen(str(path), *asked) == ([slow, slow, slow, *by_rule[3:]], [])
    none = find_tactic(NONE).id
    path.write_text(row(SLOW) + row(NONE, residual=True))  # measured with a residual: its own row, and for nothing else
    assert chosen(str(path), *asked) == ([slow, slow, none, *by_rule[3:]], [])
    compiled_in, _ = chosen(None, *asked)
    path.write_text(row(NONE, residual=True))
    assert chosen(str(path), *asked) == ([*compiled_in[:2], none, *compiled_in[3:]], [])


def test_prologues_have_rows_of_their_own(tmp_path):
    """The library once found no row of a Silu or of scales by image: `convpool tune` measured them in vain."""
    slow = [dict(prologue_activation="relu"), dict(prologue_affine=1, n=62)]
    none = [dict(slow[0], prologue_affine=True), dict(prologue_activation="silu"), dict(prologue_affine=2, n=62)]
    path = tmp_path / "tuned.def"
    path.write_text("".join(row(SLOW, **fields) for fields in slow) + "".join(row(NONE, **fields) for fields in none))
    asked = [(LAYER | prologue, WHOLE_H200) for prologue in (*slow, dict(prologue_activation="leaky_relu"), *none)]
    assert chosen(str(path), *asked) == ([find_tactic(SLOW).id] * 3 + [find_tactic(NONE).id] * 3, [])


def test_every_field_of_a_row_is_where_the_library_looks(tmp_path):
    """Numbers differ wherever they may, so that none can stand for another."""
    problems = [
        dict(
            n=67, c=72, m=136, spatial=(97, 89)[:rank], kernel_shape=(3, 4)[:rank], pool_kernel_shape=(2, 5)[:rank],
            pool_strides=(1, 2)[:rank], pool_pads=(1, 2)[:rank] + (0, 3)[:rank], pool_dilations=(3, 4)[:rank],
            strides=(4, 3)[:rank], pads=(0, 1)[:rank] + (2, 3)[:rank], dilations=(2, 5)[:rank], residual=True,
            dtype=dtype, prologue_activation="relu", allow_tf32=True, layout="NCHW", y_layout="NHWC",
        )
        for rank, dtype in ((1, "float32"), (2, "float16"))
    ]  # fmt: skip
    asked = [(problem, WHOLE_H200) for problem in problems]
    assert find_tactic(NONE).id not in chosen("off", *asked)[0]
    path = tmp_path / "tuned.def"
    path.write_text("".join(row(NONE, **problem) for problem in problems))
    assert chosen(str(path), *asked) == ([find_tactic(NONE).id] * 2, [])


def test_a_row_whose_tactic_cannot_run_leaves_the_choice_to_the_rule(tmp_path):
    path = tmp_path / "tuned.def"
    path.write_text(row("conv_avgpool_direct_gemm_sm80_bf16_m64n64k32_s4"))  # of another type
    assert chosen(str(path), (LAYER, WHOLE_H200)) == chosen("off", (LAYER, WHOLE_H200))


def test_a_row_of_an_unknown_tactic_is_told_and_left_out(tmp_path):
    path = tmp_path / "tuned.def"
    path.write_text(row(SLOW, n=63) + row(NONE).replace("(90, 132, 1,", "(90, 132, 999999,"))
    found, told = chosen(str(path), (LAYER, WHOLE_H200), (LAYER | dict(n=63), WHOLE_H200))
    assert found == [*chosen(None, (LAYER, WHOLE_H200))[0], find_tactic(SLOW).id]
    reason = "names no tactic; got id 999999, expected one that convpool_tactics lists; rows of unknown tactics are left out"
    assert told == [f"CONVPOOL_TUNED: {path}: line 2 {reason}"] * 2  # with every choice


@pytest.mark.parametrize(
    "text, reason",
    [
        ("// fine\nCONVPOOL_TUNED(90, 132)\n", r"line 2 is no row; got CONVPOOL_TUNED\(90, 132\), expected CONVPOOL_TUNED\("),
        ('{"format": 1}\n', r'line 1 is no row; got {"format": 1}'),
        ("\x1b[2J\x07\u202e\n", r"line 1 is no row; got \?\[2J\?{4}, expected"),
        (row(NONE).replace(")", ") 1"), r"line 1 is no row"),
        (row(NONE).replace("90", "90000000000"), r"line 1 is no row"),
        (row(NONE).replace(" 132", " -1"), r"line 1 is no row"),
        (row(SLOW) + row(SLOW)[:-9] + "\n", r"line 2 is no row"),
        (None, r"cannot be opened; got No such file or directory, expected a file of rows"),
        (Path, r"is no regular file; got a directory, a pipe or a device, expected a file of rows"),
        (os.mkfifo, r"is no regular file"),
        (row(SLOW) + "\0" + row(SLOW), r"line 2 is no text; got a zero byte, expected a row"),
        pytest.param("// long\n" * (1 << 21) + "//", r"is too large; got 16777218 bytes, expected at most 16777216", id="long"),
    ],
)
def test_an_unusable_file_of_measurements_is_told_and_not_used(text, reason, tmp_path):
    path = tmp_path / "tuned.def"
    if text is Path:
        path.mkdir()
    elif text is os.mkfifo:
        os.mkfifo(path)
    elif text is not None:
        path.write_text(text)
    found, told = chosen(str(path), (LAYER, WHOLE_H200))
    assert found == chosen(None, (LAYER, WHOLE_H200))[0]
    assert len(told) == 1 and told[0].startswith(f"CONVPOOL_TUNED: {path}") and re.search(reason, told[0]), told
    assert told[0].endswith("the file is not used, write it with convpool tune")


def test_the_rows_compiled_in_are_rows(tmp_path):
    path = Path(__file__).parents[2] / "plugin" / "src" / "tuned.def"
    assert chosen(str(path), (LAYER, WHOLE_H200))[1] == []
