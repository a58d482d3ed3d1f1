# SPDX-License-Identifier: Apache-2.0
"""convpool_plan through ctypes: without a device, and on the pretended CUDA runtime of tests/support/pretended_cuda.

The pretended library is part of a build with -DCONVPOOL_PLUGIN_TESTS=ON: in CONVPOOL_PLUGIN_BUILD, or in build/plugin-tests.
"""

import concurrent.futures
import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from convpool.cuda import Problem, UnsupportedError, find_tactic, library, tactics
from tests.support.kernels.pretended import Launch, load

ROOT = Path(__file__).parents[2]
LAYER = dict(n=64, c=128, m=128, spatial=(32, 32), kernel_shape=3, pool_kernel_shape=2, pool_pads=1, strides=2, layout="NHWC")
INVALID, UNSUPPORTED, TOO_SMALL, MISALIGNED, CUDA_ERROR = 1, 2, 3, 4, 5
BY_NAME, BY_MEASUREMENT, BY_RULE = 0, 1, 2
UNALIGNED = 1
ANY_BYTES = 2**63
RS = "direct_fused_sm90a_f16_m128n128k32_s5_rs3x3"
MEMORY = 1 << 20  # an address that nothing follows


class Pretended:
    """The pretended library: every call below is made on device 0 unless told otherwise."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.lib = load(patched)
        self.plans: list[ctypes.c_void_p] = []

    def device(self, ordinal: int, context: int) -> None:
        self.lib.pretended_set_device(ordinal, context)

    def error(self) -> str:
        return self.lib.convpool_last_error().decode()

    def create(self, problem: Problem, tactic: str | int = 0, workspace: int = ANY_BYTES, flags: int = 0):
        number = find_tactic(f"conv_avgpool_{tactic}").id if isinstance(tactic, str) else tactic
        plan = ctypes.c_void_p()
        status = self.lib.convpool_plan_create(problem.struct, number, workspace, flags, plan)
        assert (plan.value is None) == (status != 0)
        self.plans.append(plan)
        return status, plan

    def made(self, *arguments, **options) -> ctypes.c_void_p:
        status, plan = self.create(*arguments, **options)
        assert status == 0, self.error()
        return plan

    def info(self, plan) -> library.PlanStruct:
        properties = library.PlanStruct(struct_size=ctypes.sizeof(library.PlanStruct))
        assert self.lib.convpool_plan_info(plan, properties) == 0
        return properties

    def launch(self, plan, **pointers) -> int:
        return self.lib.convpool_plan_launch(plan, bytes(tensors(**pointers)), None)

    def launches(self) -> list[Launch]:
        return [self.lib.pretended_launch(i).contents for i in range(self.lib.pretended_launches())]

    def forget(self) -> None:
        self.lib.pretended_forget()


def tensors(**pointers) -> library.TensorsStruct:
    given = {"x": MEMORY, "w": 2 * MEMORY, "y": 3 * MEMORY, "b": 4 * MEMORY} | pointers
    return library.TensorsStruct(struct_size=ctypes.sizeof(library.TensorsStruct), **given)


def layer(**fields) -> Problem:
    return Problem(**(LAYER | fields))


@pytest.fixture
def pretended(monkeypatch):
    session = Pretended(monkeypatch)
    yield session
    for plan in session.plans:
        session.lib.convpool_plan_destroy(plan)


# ---- without a device -----------------------------------------------------------------------------------------------


def test_a_plan_needs_a_device(pretended):
    pretended.device(-1, 0)
    status, _ = pretended.create(layer())
    assert status == CUDA_ERROR
    assert pretended.error().startswith("no current CUDA device: cudaErrorNoDevice")


def test_the_real_library_says_that_there_is_no_device():
    program = "from convpool.cuda import *; Plan(Problem(n=1, c=8, m=8, spatial=(8, 8), kernel_shape=3, pool_kernel_shape=2))"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "CONVPOOL_LIBRARY": str(library.library_path())}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert "convpool.errors.CudaError: no current CUDA device" in done.stderr.splitlines()[-1]


def test_null_pointers_and_unknown_flags_are_refused(pretended):
    lib = pretended.lib
    assert lib.convpool_plan_create(layer().struct, 0, 0, 0, None) == INVALID
    assert pretended.error() == "out: the pointer is null"
    assert pretended.create(layer(), flags=2)[0] == INVALID
    assert pretended.error() == "flags; got 2, expected 0 or CONVPOOL_PLAN_UNALIGNED"
    assert pretended.create(layer(), 999)[0] == INVALID
    assert pretended.error().startswith("tactic: no such id; got 999")
    assert pretended.launch(None) == INVALID and pretended.error() == "plan: the pointer is null"
    assert lib.convpool_plan_info(None, library.PlanStruct()) == INVALID
    plan = pretended.made(layer())
    assert lib.convpool_plan_info(plan, None) == INVALID
    assert lib.convpool_plan_info(plan, library.PlanStruct(struct_size=8)) == INVALID
    assert pretended.error() == f"properties: struct_size; got 8, expected {ctypes.sizeof(library.PlanStruct)}"
    lib.convpool_plan_destroy(None)


# ---- planning -------------------------------------------------------------------------------------------------------


def test_info_of_a_named_plan(pretended):
    info = pretended.info(pretended.made(layer(residual=True), RS))
    assert info.name.decode() == f"conv_avgpool_{RS}"
    assert (info.chosen_by, info.device, info.workspace_bytes, info.prepared_bytes) == (BY_NAME, 0, 0, 0)
    assert 1 < info.expected_us < 1000
    assert list(info.out_spatial) == [16, 16, 0]
    assert [info.x_alignment, info.w_alignment, info.y_alignment, info.residual_alignment] == [16] * 4
    assert [info.b_alignment, info.scale_alignment, info.shift_alignment] == [0] * 3


def test_info_of_a_plan_with_workspace(pretended):
    problem = layer(bias=True, prologue_affine=True)
    info = pretended.info(pretended.made(problem, "direct_gemm_sm90a_f16_m64n64k64_s4"))
    assert info.workspace_bytes == problem.workspace_bytes("conv_avgpool_direct_gemm_sm90a_f16_m64n64k64_s4")
    assert info.prepared_bytes == 0
    assert (info.x_alignment, info.w_alignment, info.b_alignment, info.scale_alignment) == (2, 16, 2, 2)


@pytest.mark.parametrize("workspace", [0, ANY_BYTES])
def test_the_chosen_tactic_is_the_default_one(pretended, workspace):
    for fields in (dict(), dict(dtype="float32"), dict(n=3, c=3), dict(layout="NCHW"), dict(n=1, c=640, spatial=(9, 9))):
        info = pretended.info(pretended.made(layer(**fields), workspace=workspace))
        default = layer(**fields).default_tactic(cc=90, multiprocessors=132, shared_bytes=232448, max_workspace_bytes=workspace)
        assert info.tactic == default.id
        assert info.chosen_by in (BY_MEASUREMENT, BY_RULE) and info.workspace_bytes <= workspace


def test_a_measured_choice_is_told_from_one_by_rule(pretended):
    assert pretended.info(pretended.made(layer(accumulation="packed"))).chosen_by == BY_MEASUREMENT
    assert pretended.info(pretended.made(layer(accumulation="packed", n=63))).chosen_by == BY_RULE


def test_the_rule_has_a_time_for_every_tactic(pretended):
    """Each runs some problem of these on an H200, and is then expected to take a finite time."""
    layers = [dict(c=512, bias=True), dict(c=512, kernel_shape=1, pool_pads=0), dict(c=1), dict(c=3, m=64), dict(kernel_shape=5)]
    layers += [dict(kernel_shape=kernel, pool_kernel_shape=3, strides=3) for kernel in (3, 5)]
    layers += [dict(c=4, m=64, kernel_shape=4, pool_kernel_shape=1, pool_pads=0), dict(layout="NCHW")]
    layers += [dict(pool_kernel_shape=1, pool_pads=0, strides=1, pads=1, upsample=2)]
    expected = dict.fromkeys((tactic.id for tactic in tactics()), None)
    for dtype, tf32 in (("float16", False), ("bfloat16", False), ("float32", True), ("float32", False)):
        for fields in layers:
            for tactic in tactics():
                problem = layer(**fields, dtype=dtype, allow_tf32=tf32, accumulation="packed" if tactic.packed else "default")
                if problem.why_not(tactic, cc=90, shared_bytes=232448) is None:
                    expected[tactic.id] = pretended.info(pretended.made(problem, tactic.id)).expected_us
    assert all(us is not None and 1 < us < 1e6 for us in expected.values()), expected


def test_a_named_tactic_that_does_not_run_says_why(pretended):
    assert pretended.create(layer(group=2), "direct_fused_sm75_f16_m64n64k32_s6")[0] == UNSUPPORTED
    assert "group; got 2, expected 1; use the tactic generic" in pretended.error()


def test_a_device_that_no_tactic_runs_on_is_refused(pretended):
    pretended.lib.pretended_describe(70, 80, 98304)
    try:
        assert pretended.create(layer())[0] == UNSUPPORTED
    finally:
        pretended.lib.pretended_describe(90, 132, 232448)
    reason = "compute capability; got 70, expected 75 or more; no tactic runs on such a device"
    assert pretended.error() == f"conv_avgpool_generic: {reason}"
    with pytest.raises(UnsupportedError, match="compute capability; got 70"):
        layer().default_tactic(cc=70, multiprocessors=80, shared_bytes=98304)


def test_a_named_tactic_keeps_to_the_workspace(pretended):
    name = "direct_gemm_sm75_f16_m64n64k32_s4"
    needed = layer().workspace_bytes(f"conv_avgpool_{name}")
    assert pretended.create(layer(), name, workspace=needed)[0] == 0
    assert pretended.create(layer(), name, workspace=needed - 1)[0] == TOO_SMALL
    assert pretended.error() == f"conv_avgpool_{name}: workspace; got {needed - 1} bytes, expected {needed}"


def test_unaligned_plans_need_no_alignment(pretended):
    for fields in (dict(), dict(kernel_shape=1, pool_pads=0), dict(dtype="float32", allow_tf32=True), dict(c=20)):
        info = pretended.info(pretended.made(layer(**fields, bias=True), flags=UNALIGNED))
        element = 4 if "dtype" in fields else 2
        assert [info.x_alignment, info.w_alignment, info.y_alignment, info.b_alignment] == [element] * 4
    assert pretended.create(layer(), RS, flags=UNALIGNED)[0] == MISALIGNED
    assert pretended.error().startswith(f"conv_avgpool_{RS}: address of x; got one that may be unaligned, expected a multiple")


# ---- launching ------------------------------------------------------------------------------------------------------


def test_a_launch_queues_the_planned_kernels(pretended):
    plan = pretended.made(layer(), "direct_gemm_sm90a_f16_m64n64k64_s8_split2")
    loads = pretended.lib.pretended_loads()
    assert pretended.launch(plan, workspace=5 * MEMORY, workspace_bytes=ANY_BYTES) == 0, pretended.error()
    box_means, gemm = pretended.launches()
    assert (gemm.threads, gemm.cluster, gemm.grid) == (128, 2, 64 * 16 * 16 // 64 * 2 * 2)
    assert box_means.cluster == 1
    assert pretended.lib.pretended_loads() == loads > 0


def test_kept_weights_are_not_computed_again(pretended):
    plan = pretended.made(layer(), "filter_fused_sm75_f16_m64n64k32_s4")
    memory = dict(prepared=5 * MEMORY, prepared_bytes=pretended.info(plan).prepared_bytes)
    assert pretended.launch(plan, **memory) == 0 and len(pretended.launches()) == 2
    pretended.forget()
    assert pretended.launch(plan, **memory, flags=library.WEIGHTS_PREPARED) == 0
    assert len(pretended.launches()) == 1


@pytest.mark.parametrize("tactic", [RS, "direct_gemm_sm90a_f16_m64n64k64_s8_im2col"])
def test_tensor_maps_are_encoded_once_for_an_address(pretended, tactic):
    plan, memory = pretended.made(layer(), tactic), dict(workspace=5 * MEMORY, workspace_bytes=ANY_BYTES)
    seen = []
    for x in (MEMORY, MEMORY, 7 * MEMORY, MEMORY):
        assert pretended.launch(plan, x=x, **memory | dict(workspace=4 * MEMORY + x)) == 0, pretended.error()
        seen.append(pretended.lib.pretended_encodings())
    x_maps = 1 if "im2col" in tactic else 2
    assert [after - before for before, after in zip([0, *seen], seen, strict=False)] == [x_maps + 1, 0, x_maps, x_maps]


@pytest.mark.parametrize(
    ("fields", "copied"),
    [
        (dict(bias=True), True), (dict(activation="leaky_relu", alpha=0.25), True), (dict(spatial=(16, 20)), True),
        (dict(spatial=(128, 2)), True), (dict(dtype="float32", allow_tf32=True, m=260), True), (dict(m=260), False),
        (dict(spatial=(16, 18)), False), (dict(pads=(1, 1, 1, 0)), False), (dict(activation="sigmoid"), False),
        (dict(residual=True), False), (dict(layout="NCHW"), False), (dict(n=1), False), (dict(y=MEMORY + 2), False),
    ],
)  # fmt: skip
def test_sums_of_phases_are_copied_to_whole_boxes_of_y(pretended, fields, copied):
    upsampled = dict(n=64, m=256, spatial=(16, 16), pool_kernel_shape=1, pool_pads=0, strides=1, pads=1, upsample=2)
    y = {"y": fields["y"]} if "y" in fields else {}
    problem = layer(**upsampled | {name: value for name, value in fields.items() if name != "y"})
    name = f"upsample_sm90a_{'tf32_m128n256k32' if 'dtype' in fields else 'f16_m128n256k64'}_s3_im2col"
    memory = dict(residual=7 * MEMORY, workspace=5 * MEMORY, workspace_bytes=ANY_BYTES)
    assert pretended.launch(pretended.made(problem, name), **memory | y) == 0, pretended.error()
    assert pretended.lib.pretended_encodings() == (3 if copied else 2)  # of X, W and Y


@pytest.mark.parametrize(
    ("tactic", "fields", "tensor"),
    [
        *((RS, dict(), tensor) for tensor in ("x", "w", "y")),
        (RS, dict(bias=True), "b"),
        ("direct_fused_sm90a_f16_m64n64k64_s5_1x1", dict(kernel_shape=1, pool_pads=0), "x"),
        ("filter_fused_sm90a_f16_m64n64k64_s4", dict(), "x"),
        ("direct_gemm_sm90a_f16_m64n64k64_s4", dict(), "w"),
    ],
)
def test_a_named_tactic_refuses_misaligned_tensors(pretended, tactic, fields, tensor):
    """Nothing runs in its place: neither by a plan nor by the stateless call."""
    problem, memory = layer(**fields), dict(workspace=5 * MEMORY, workspace_bytes=ANY_BYTES)
    plan = pretended.made(problem, tactic)
    expected = f"conv_avgpool_{tactic}: address of {tensor}; got one that is 2 modulo 16, expected a multiple of 16"
    assert pretended.launch(plan, **memory | {tensor: MEMORY + 2}) == MISALIGNED
    assert pretended.error().startswith(expected)
    given = tensors(**memory | {tensor: MEMORY + 2})
    assert pretended.lib.convpool_launch(problem.struct, find_tactic(f"conv_avgpool_{tactic}").id, given, None) == MISALIGNED
    assert pretended.error().startswith(expected)
    assert pretended.launches() == []


def test_tactic_0_takes_misaligned_tensors(pretended):
    problem = layer(bias=True)
    for tensor in ("x", "w", "y", "b"):
        pretended.forget()
        given = tensors(**{tensor: MEMORY + 2}, workspace=5 * MEMORY, workspace_bytes=ANY_BYTES)
        assert pretended.lib.convpool_launch(problem.struct, 0, given, None) == 0, pretended.error()
        assert pretended.launches()


def test_missing_and_small_memory_is_refused(pretended):
    plan = pretended.made(layer(), "direct_gemm_sm75_f16_m64n64k32_s4")
    needed = pretended.info(plan).workspace_bytes
    assert pretended.launch(plan) == TOO_SMALL
    assert f"workspace; got 0 bytes, expected {needed}" in pretended.error()
    assert pretended.launch(plan, workspace=MEMORY + 128, workspace_bytes=needed) == MISALIGNED
    assert pretended.launch(plan, x=None) == INVALID and pretended.error() == "tensors: x is null"


def test_a_plan_stays_on_its_device(pretended):
    plan, loads = pretended.made(layer(), "generic"), pretended.lib.pretended_loads()
    pretended.device(1, 200)
    assert pretended.launch(plan) == INVALID
    reason = "current device; got 1, expected the plan's, 0; make a plan for each device"
    assert pretended.error() == f"conv_avgpool_generic: {reason}"
    pretended.device(0, 101)  # another context of the same device: the kernels are loaded there too
    assert pretended.launch(plan) == 0 and pretended.lib.pretended_loads() > loads


def test_threads_share_a_plan(pretended):
    plan = pretended.made(layer(), RS)

    def run(thread: int) -> set[int]:
        pretended.device(0, 100)
        return {pretended.launch(plan, x=(10 + (thread + i) % 3) * MEMORY) for i in range(200)}

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert set().union(*pool.map(run, range(8))) == {0}
    assert len(pretended.launches()) == 1600


# ---- stateless launches ---------------------------------------------------------------------------------------------


def test_a_stateless_launch_is_that_of_a_plan(pretended):
    """On the current device, whichever it is."""
    tactic = find_tactic(f"conv_avgpool_{RS}").id
    for device, multiprocessors in ((0, 100), (1, 201)):
        pretended.device(device, multiprocessors)
        pretended.forget()
        assert pretended.launch(pretended.made(layer(n=5), tactic)) == 0
        assert pretended.lib.convpool_launch(layer(n=5).struct, tactic, tensors(), None) == 0
        of_plan, stateless = pretended.launches()
        assert bytes(stateless) == bytes(of_plan)


def test_prepare_loads_what_a_launch_needs(pretended):
    problem, tactic = layer(n=7), find_tactic("conv_avgpool_direct_gemm_sm75_f16_m64n64k32_s4").id
    before = pretended.lib.pretended_loads()
    assert pretended.lib.convpool_prepare(problem.struct, tactic) == 0
    loads = pretended.lib.pretended_loads() - before
    assert loads > 1 and not pretended.launches()
    plan = pretended.made(problem, tactic)
    assert pretended.lib.pretended_loads() - before == 2 * loads
    assert pretended.launch(plan, workspace=5 * MEMORY, workspace_bytes=ANY_BYTES) == 0
    assert pretended.lib.pretended_loads() - before == 2 * loads


# ---- log ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log, lines", [("1", 2), ("0", 0)])
def test_log_tells_every_shape_once(pretended, log, lines):
    program = (
        "from tests.cuda import test_plan as t\n"
        "p, packed = t.Pretended(t.pytest.MonkeyPatch()), t.layer(accumulation='packed')\n"
        "for plan in (p.made(packed), p.made(packed), p.made(t.layer(n=3, bias=True, activation='relu'), 'generic')):\n"
        "    p.launch(plan)\n"
    )
    environment = {**os.environ, "CONVPOOL_LOG": log}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    told = [line for line in done.stderr.splitlines() if line.startswith("convpool: ")]
    assert len(told) == lines
    if lines:
        assert told[0].startswith("convpool: f16 (packed) n64 c128 m128 32x32 channels last, pool 2x2 ")
        assert "conv_avgpool_direct_fused" in told[0] and "(measured), expected " in told[0]
        assert ", bias, relu: conv_avgpool_generic (named), expected " in told[1]
