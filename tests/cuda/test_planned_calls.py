# SPDX-License-Identifier: Apache-2.0
"""`convpool.cuda.Plan`, and the plans that `conv_avg_pool` keeps, on the pretended CUDA runtime."""

import concurrent.futures
import contextlib
import gc
import sys
from types import SimpleNamespace

import pytest

from convpool.cuda import ArrayError, CudaError, Plan, Problem, ProblemError, UnsupportedError, conv_avg_pool, library, plan_for
from convpool.cuda import operator as calls
from tests.support.kernels import pretended
from tests.support.kernels.pretended import Tensor

POOLED = dict(pool_kernel_shape=2, pool_pads=1, strides=2, layout="NHWC")
LAYER = dict(n=8, c=256, m=256, spatial=(8, 8), kernel_shape=3, **POOLED)
X, W, Y = (8, 8, 8, 256), (256, 3, 3, 256), (8, 4, 4, 256)
FUSED = "conv_avgpool_direct_fused_sm75_f16_m64n64k32_s6"
GEMM = "conv_avgpool_direct_gemm_sm75_f16_m64n64k32_s4"


@pytest.fixture
def lib(monkeypatch):
    """The pretended library as the package's, device 0 current; no call planned yet."""
    monkeypatch.setitem(sys.modules, "torch", pretended.torch_module())
    monkeypatch.setattr(calls, "_plans", {})
    monkeypatch.setattr(library, "current_ordinal", lambda: 0)
    monkeypatch.setattr(Tensor, "made", [])
    return pretended.load(monkeypatch)


# ---- conv_avg_pool ----


def test_a_call_is_planned_once(lib):
    for _ in range(3):
        y = conv_avg_pool(Tensor(X), Tensor(W), **POOLED)
        assert y.shape == Y and repr(y.dtype) == "torch.float16"
    plan = plan_for(Tensor(X), Tensor(W), **POOLED)
    assert len(calls._plans) == 1 and plan.how_chosen == "rule" and plan.y_shape == Y
    assert lib.pretended_launches() % 3 == 0 and lib.pretended_launches() > 0


def test_the_workspace_of_the_fastest_tactic_is_allocated(lib):
    plan = plan_for(Tensor(X), Tensor(W), **POOLED)
    assert plan.workspace_bytes > 0
    best = Problem(**LAYER).default_tactic(max_workspace_bytes=2**40, cc=90, multiprocessors=132, shared_bytes=232448)
    assert plan.tactic == best
    y = conv_avg_pool(Tensor(X), Tensor(W), **POOLED)
    made = [(tensor.shape, repr(tensor.dtype)) for tensor in Tensor.made]
    assert made == [(Y, "torch.float16"), ((plan.workspace_bytes,), "torch.uint8")]
    assert y is Tensor.made[0]


def test_a_workspace_bounds_the_choice(lib):
    assert plan_for(Tensor(X), Tensor(W), workspace=Tensor((256,), "uint8"), **POOLED).workspace_bytes <= 256
    conv_avg_pool(Tensor(X), Tensor(W), workspace=Tensor((256,), "uint8"), **POOLED)
    assert len(Tensor.made) == 1  # out


def test_arrays_of_no_known_library_need_a_tactic_without_workspace(lib):
    class Array:
        def __init__(self, shape, address):
            data = (address, False)
            self.__cuda_array_interface__ = {"shape": shape, "typestr": "<f2", "data": data, "version": 3, "strides": None}

    x, w, y = Array(X, 1 << 30), Array(W, 1 << 31), Array(Y, 1 << 32)
    assert plan_for(x, w, out=y, **POOLED).workspace_bytes == 0
    assert conv_avg_pool(x, w, out=y, **POOLED) is y


def test_kinds_options_and_alignment_make_a_plan(lib):
    def call(x=X, dtype="float16", **options):
        conv_avg_pool(Tensor(x, dtype), Tensor(W, dtype), **(POOLED | options))
        return len(calls._plans)

    others = (dict(), dict(x=(4, 8, 8, 256)), dict(dtype="bfloat16"), dict(activation="relu"), dict(tactic=FUSED))
    assert [call(**other) for other in others] == [1, 2, 3, 4, 5]
    assert [call(pads=[0, 0, 0, 0]), call(pads=(0, 0, 0, 0)), call(pads=[0, 0, 0, 0])] == [6, 6, 6]
    conv_avg_pool(Tensor(X, address=(1 << 30) + 2), Tensor(W), **POOLED)
    assert len(calls._plans) == 7
    assert plan_for(Tensor(X, address=(1 << 30) + 2), Tensor(W), **POOLED).alignments == {"x": 2, "w": 2, "y": 2}


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize(
    "changed, reason",
    [
        (dict(x=Tensor(X, contiguous=False)), "x: DLPack export failed; got not contiguous"),
        (dict(x=Tensor(X, requires_grad=True)), "x: DLPack export failed; got requires grad"),
        (dict(w=Tensor(W, cuda=False)), "w: not in GPU memory"),
        (dict(w=Tensor(W, device=1)), "w: on another device; got device 1, expected 0"),
        (dict(w=Tensor(W, "bfloat16")), "w: wrong type; got bfloat16, expected float16, the type of x"),
        (dict(out=Tensor(Y, address=1 << 20)), "out: overlaps x; got memory in common"),
        (dict(out=Tensor(Y, address=1 << 26), workspace=Tensor((1 << 20,), "uint8", address=1 << 26)), "out: overlaps workspace"),
        (dict(stream=object()), "stream: no CUDA stream"),
    ],
)
def test_what_may_differ_is_checked_in_every_call(lib, changed, reason, planned):
    good = dict(x=Tensor(X, address=1 << 20), w=Tensor(W), out=Tensor(Y), workspace=Tensor((1 << 20,), "uint8")) | POOLED
    if planned:
        conv_avg_pool(**good)
        launches = lib.pretended_launches()
    with pytest.raises(ArrayError, match=reason):
        conv_avg_pool(**(good | changed))
    assert lib.pretended_launches() == (launches if planned else 0)


def test_another_current_device_is_refused_where_planned_and_where_not(lib, monkeypatch):
    x, w = Tensor(X), Tensor(W)
    conv_avg_pool(x, w, **POOLED)
    monkeypatch.setattr(library, "current_ordinal", lambda: 1)
    lib.pretended_set_device(1, 200)
    for options in (POOLED, POOLED | dict(activation="relu")):
        with pytest.raises(ArrayError, match="x: not on the current device; got device 0, expected 1"):
            conv_avg_pool(x, w, **options)


def test_the_device_of_a_thread_without_a_context_is_checked_by_the_plan(lib, monkeypatch):
    monkeypatch.setattr(library, "current_ordinal", lambda: None)
    with pytest.raises(ArrayError, match="x: not on the current device; got device 1, expected 0"):
        conv_avg_pool(Tensor(X, device=1), Tensor(W, device=1), **POOLED)
    assert not len(calls._plans)


def test_arrays_of_cupy_are_read_by_their_attributes_and_made_on_the_stream(lib, monkeypatch):
    made = []

    class Array:
        def __init__(self, shape, dtype="float16", contiguous=True):
            Tensor.addresses += 1 << 30
            self.shape, self.dtype, self.itemsize = shape, SimpleNamespace(name=dtype), pretended.ITEM_BYTES[dtype]
            self.data, self.device = SimpleNamespace(ptr=Tensor.addresses), contextlib.nullcontext()
            self.device.id, self.flags = 0, SimpleNamespace(c_contiguous=contiguous)

        def __dlpack_device__(self):
            return (2, 0)

        def __dlpack__(self, stream=None):
            raise BufferError("not contiguous")

    def empty(shape, dtype):
        made.append((shape, dtype))
        return Array(shape, dtype)

    Array.__module__, Array.__qualname__ = "cupy", "ndarray"
    handles = []
    stream = SimpleNamespace(ExternalStream=lambda handle: contextlib.nullcontext(handles.append(handle)))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(empty=empty, cuda=stream))
    plan, y = plan_for(Array(X), Array(W), **POOLED), conv_avg_pool(Array(X), Array(W), stream=7, **POOLED)
    assert isinstance(y, Array) and y.shape == Y
    assert made == [(Y, "float16"), ((plan.workspace_bytes,), "uint8")] and handles == [7, 7]
    with pytest.raises(ArrayError, match="x: DLPack export failed; got not contiguous"):
        conv_avg_pool(Array(X, contiguous=False), Array(W), **POOLED)


def test_8_bit_arrays_give_floats(lib):
    x, w, scale = Tensor(X, "int8"), Tensor(W, "int8"), Tensor((256,), "float32")
    assert repr(conv_avg_pool(x, w, w_scale=scale, **POOLED).dtype) == "torch.float32"
    half = Tensor(Y, "float16")
    assert conv_avg_pool(x, w, w_scale=scale, residual=Tensor(Y, "float16"), out=half, **POOLED) is half
    with pytest.raises(ArrayError, match="residual: wrong type; got float16, expected float32, the type of out"):
        conv_avg_pool(x, w, residual=Tensor(Y, "float16"), **POOLED)
    with pytest.raises(ArrayError, match="w_scale: wrong type; got float16, expected float32"):
        conv_avg_pool(x, w, w_scale=Tensor((256,)), **POOLED)


def test_plans_made_last_are_kept(lib, monkeypatch):
    monkeypatch.setattr(calls, "CACHED_PLANS", 2)

    def plan(n):
        return plan_for(Tensor((n, *X[1:])), Tensor(W), **POOLED)

    first, second = plan(1), plan(2)
    assert plan(1) is first
    plan(3)  # in the place of the first
    assert plan(2) is second and plan(1) is not first and len(calls._plans) == 2


def test_threads_plan_and_launch_at_once(lib):
    def work(n: int) -> int:
        lib.pretended_set_device(0, 100)
        for i in range(50):
            assert conv_avg_pool(Tensor((1 + (n + i) % 4, *X[1:])), Tensor(W), tactic=FUSED, **POOLED).shape[0] == 1 + (n + i) % 4
        return 50

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        done = sum(threads.map(work, range(8)))
    assert lib.pretended_launches() == done == 400 and len(calls._plans) == 4


# ---- Plan ----


def test_a_plan_tells_what_it_is(lib):
    named = Plan(Problem(**LAYER), tactic=FUSED)
    assert (named.tactic.name, named.how_chosen, named.workspace_bytes, named.device) == (FUSED, "named", 0, 0)
    assert named.expected_us > 1 and named.alignments == {"x": 2, "w": 2, "y": 2}
    chosen = Plan(Problem(**LAYER))
    assert chosen.how_chosen == "rule" and chosen.workspace_bytes > 0 and chosen.prepared_bytes <= chosen.workspace_bytes
    assert Plan(Problem(**LAYER), max_workspace_bytes=0).workspace_bytes == 0
    assert repr(named) == f"Plan({FUSED}, named, {named.expected_us:.1f} us, 0 bytes of workspace)"


def test_a_plan_says_why_it_cannot_be(lib):
    with pytest.raises(UnsupportedError, match="dtype; got BF16, expected F16"):
        Plan(Problem(**LAYER, dtype="bfloat16"), tactic=FUSED)
    with pytest.raises(ProblemError, match="workspace; got 0 bytes, expected"):
        Plan(Problem(**LAYER), tactic=GEMM, max_workspace_bytes=0)
    with pytest.raises(ProblemError, match="max_workspace_bytes: out of range; got -1, expected an unsigned 64-bit number"):
        Plan(Problem(**LAYER), max_workspace_bytes=-1)
    lib.pretended_set_device(-1, 0)
    with pytest.raises(CudaError, match="no current CUDA device"):
        Plan(Problem(**LAYER))


def test_a_plan_is_launched_with_arrays_and_addresses(lib):
    plan = Plan(Problem(**LAYER, bias=True, residual=True), tactic=GEMM)
    space = Tensor((plan.workspace_bytes,), "uint8")
    right = dict(x=Tensor(X), w=Tensor(W), y=Tensor(Y), b=Tensor((256,)), residual=Tensor(Y), workspace=1 << 33)
    plan.launch(**right)
    launches = lib.pretended_launches()
    assert launches > 0
    plan.launch(1 << 20, 1 << 21, 1 << 22, b=1 << 23, residual=1 << 24, workspace=1 << 25)
    assert lib.pretended_launches() == 2 * launches
    size = plan.workspace_bytes
    for error, reason, wrong in (
        (ArrayError, r"x: wrong shape; got \(8, 8, 8, 255\), expected \(8, 8, 8, 256\)", dict(x=Tensor((8, 8, 8, 255)))),
        (ArrayError, "b: wrong type; got float32, expected float16", dict(b=Tensor((256,), "float32"))),
        (ArrayError, "w: on another device; got device 1, expected 0, that of the plan", dict(w=Tensor(W, device=1))),
        (ProblemError, "residual is null", dict(residual=None)),
        (ProblemError, "workspace; got 0 bytes", dict(workspace=None)),
        (ProblemError, f"workspace; got {size - 1} bytes, expected {size}", dict(workspace=Tensor((size - 1,), "uint8"))),
        (ArrayError, "workspace: on another device; got device 1", dict(workspace=Tensor((size,), "uint8", device=1))),
    ):
        with pytest.raises(error, match=reason):
            plan.launch(**(right | wrong))
    assert lib.pretended_launches() == 2 * launches
    plan.launch(**(right | dict(workspace=space)))
    assert lib.pretended_launches() == 3 * launches


def test_a_plan_is_destroyed_with_its_object(lib, monkeypatch):
    destroy, gone = lib.convpool_plan_destroy, []
    monkeypatch.setattr(lib, "convpool_plan_destroy", lambda handle: (gone.append(handle), destroy(handle)))
    plan = Plan(Problem(**LAYER))
    handle = plan._handle
    lib.pretended_set_device(-1, 0)  # nor does it need a device
    del plan
    gc.collect()
    assert gone == [handle]
