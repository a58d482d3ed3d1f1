# SPDX-License-Identifier: Apache-2.0
"""The arrays and streams that `conv_avg_pool` takes, and what it says of the rest."""

import ctypes
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from convpool.cuda import ArrayError, Problem, ProblemError, arrays, conv_avg_pool, library
from tests.support.kernels import conv_reference


class Fake:
    """Describes an array in GPU memory that is never read: every call below is refused before."""

    def __init__(self, shape, typestr="<f2", strides=None, address=1 << 20, read_only=False, mask=None):
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": typestr, "data": (address, read_only), "version": 3, "strides": strides,
            "mask": mask,
        }  # fmt: skip


class FakeDlpack:
    """The same by DLPack; the tensor lives as long as this."""

    def __init__(self, shape, dtype=(2, 16, 1), device=(2, 0), address=1 << 24):
        self.sizes = (ctypes.c_int64 * len(shape))(*shape)
        self.device = device
        self.tensor = arrays._DLTensor(address, device, len(shape), dtype, self.sizes, None, 0)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, stream=None):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


X, W = Fake((2, 8, 16, 16)), Fake((4, 3, 3, 8))
OUT = (2, 4, 8, 8)
FAR, ELSEWHERE = Fake(OUT, address=2 << 20), FakeDlpack((1 << 20,), device=(2, 1))
POOLED = dict(pool_kernel_shape=2, pool_pads=1, strides=2)
IMPLICIT_GEMM = "conv_avgpool_direct_gemm_sm75_f16_m64n64k32_s4"
WORKSPACE = -(-2 * 17 * 17 * 8 * 2 // 256) * 256  # its bytes for X and W: box means


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (dict(x=np.zeros((2, 8, 16, 16), np.float16)), r"x: not in GPU memory"),
        (dict(x=[1, 2]), r"x: no GPU array; got builtins\.list"),
        (dict(x=Fake((8, 16))), r"x: wrong number of dimensions; got shape \(8, 16\)"),
        (dict(x=Fake((2, 8, 16, 16), "<f8")), r"x: wrong type; got <f8"),
        (dict(x=Fake((2, 8, 16, 16), strides=(4096, 2, 256, 16))), r"x: not contiguous"),
        (dict(w=Fake((4, 3, 8))), r"w: wrong number of dimensions"),
        (dict(w=Fake((4, 3, 3, 7))), r"w: wrong last dimension; got 7 with group 1"),
        (dict(w=Fake((4, 3, 3, 8), "<f4")), r"w: wrong type; got float32, expected float16"),
        (dict(b=Fake((5,))), r"b: wrong shape; got \(5,\), expected \(4,\)"),
        (dict(out=Fake((2, 4, 8, 9))), r"out: wrong shape; got \(2, 4, 8, 9\), expected \(2, 4, 8, 8\)"),
        (dict(residual=Fake((2, 4, 8, 8), "<f4")), r"residual: wrong type"),
        (dict(x=Fake((2, 8, 16, 16), "<f4"), b=Fake((4,), "<f4")), r"b: wrong type; got float32, expected float16"),
        (dict(scale=Fake((8,))), r"shift: missing; got None, expected an array, since scale is given"),
        (dict(scale=Fake((8,)), shift=Fake((4,))), r"shift: wrong shape; got \(4,\), expected \(8,\)"),
        (dict(x=Fake((2, 8, 16, 16), "<f4", strides=(8193, 1024, 64, 4))), r"x: not contiguous"),
        (dict(x=Fake((2, 8, 16, 16), "<f8", strides=(16384, 2048, 128, 8))), r"x: wrong type; got <f8"),
        (dict(x=Fake((2, 8, 16, 16), mask=Fake((2, 8, 16, 16)))), r"x: masked"),
        (dict(out=Fake(OUT, address=2 << 20, read_only=True)), r"out: read-only"),
        (dict(out=Fake(OUT, address=(1 << 20) + 2 * 2 * 8 * 16 * 16 - 2)), r"out: overlaps x; got memory in common"),
        (dict(out=FAR, residual=FAR), r"out: overlaps residual"),
        (dict(out=FAR, workspace=Fake((1024,), "|u1", address=(2 << 20) - 256), tactic=1), r"out: overlaps workspace"),
        (dict(x=FakeDlpack((2, 8, 16, 16)), workspace=ELSEWHERE, tactic=IMPLICIT_GEMM), "space: on another device; got device 1"),
        (dict(x=SimpleNamespace(__dlpack_device__=lambda: (2, 0), __dlpack__=lambda stream: None)), "x: DLPack export failed"),
        (dict(out=None), r"out: missing; got None"),
        (dict(stream=object()), r"stream: no CUDA stream; got object"),
    ],
)
def test_wrong_array_is_named(arguments, reason, monkeypatch):
    monkeypatch.setattr(library, "current_ordinal", lambda: 0)  # which arrays name, whatever device tests run on
    good = dict(x=X, w=W, out=Fake((2, 4, 8, 8)), **POOLED)
    with pytest.raises(ArrayError, match=reason):
        conv_avg_pool(**(good | arguments))


def test_array_of_another_than_the_current_device(monkeypatch):
    monkeypatch.setattr(library, "current_ordinal", lambda: 1)
    with pytest.raises(ArrayError, match=r"x: not on the current device; got device 0, expected 1"):
        conv_avg_pool(FakeDlpack((2, 8, 16, 16)), W, out=Fake(OUT), **POOLED)


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (dict(layout="CHWN"), r"layout: unknown"),
        (dict(tactic="nothing"), r"tactic: unknown; got 'nothing'"),
        (dict(weights_prepared=True), r"weights_prepared: nothing to reuse"),
        (dict(tactic=IMPLICIT_GEMM), r"workspace: too small; got 0 bytes, expected \d+"),
        (dict(tactic=IMPLICIT_GEMM, workspace=Fake((WORKSPACE - 1,), "|u1")), rf"too small; got {WORKSPACE - 1} bytes"),
        (dict(tactic=IMPLICIT_GEMM, workspace=FakeDlpack((WORKSPACE - 1,), (1, 8, 1))), rf"too small; got {WORKSPACE - 1} bytes"),
        (dict(tactic=IMPLICIT_GEMM, workspace=Fake((WORKSPACE // 8 - 1,), "<f8", (8,))), rf"small; got {WORKSPACE - 8} bytes"),
        (dict(tactic=IMPLICIT_GEMM, workspace=Fake((1,)), weights_prepared=True), r"weights_prepared: no workspace of this"),
        (dict(x=Fake((2, 8, 0, 16), strides=(256, 32, 32, 2))), r"spatial\[0\]; got 0, expected 1"),
        (dict(strides=2**32 + 2), r"strides: out of range; got 4294967298, expected a 32-bit number"),
        (dict(pool_kernel_shape=2.0), r"pool_kernel: no whole number; got 2\.0"),
        (dict(pads=(0, 0, 0.5, 0)), r"pads: no whole number; got 0\.5"),
    ],
)
def test_wrong_option_is_named(arguments, reason):
    good = dict(x=X, w=W, out=Fake((2, 4, 8, 8)), **POOLED)
    with pytest.raises(ProblemError, match=reason):
        conv_avg_pool(**(good | arguments))


def test_streams():
    given = {"handle": 5, "ptr": 6, "cuda_stream": 7, "__cuda_stream__": lambda: (0, 8)}  # of pycuda, CuPy, PyTorch; the protocol
    streams = [None, 4, *(SimpleNamespace(**{name: value}) for name, value in given.items())]
    assert [arrays.stream_handle(stream) for stream in streams] == [0, 4, 5, 6, 7, 8]


def expected(x, w):
    problem = Problem(n=x.shape[0], c=x.shape[1], m=w.shape[0], spatial=x.shape[2:], kernel_shape=3, **POOLED)
    return conv_reference.linear(problem, x.astype(np.float64), w.astype(np.float64))


def integers(shape, seed):
    return (4 * np.random.default_rng(seed).integers(-2, 3, shape)).astype(np.float16)


def test_pycuda(gpu):
    import pycuda.driver as driver
    import pycuda.gpuarray as gpuarray

    x, w = integers((2, 8, 16, 16), 0), integers((24, 3, 3, 8), 1)
    y = conv_avg_pool(gpuarray.to_gpu(x), gpuarray.to_gpu(w), **POOLED)
    assert isinstance(y, gpuarray.GPUArray) and y.dtype == np.float16
    np.testing.assert_array_equal(y.get(), expected(x, w))
    stream = driver.Stream()
    arguments = dict(POOLED, stream=stream, tactic=IMPLICIT_GEMM)  # its workspace is allocated here
    y = conv_avg_pool(gpuarray.to_gpu(x), gpuarray.to_gpu(w), **arguments)
    stream.synchronize()
    np.testing.assert_array_equal(y.get(), expected(x, w))


def test_pycuda_bfloat16(gpu):
    import pycuda.gpuarray as gpuarray

    x, w = (integers(s, i).astype(ml_dtypes.bfloat16) for i, s in enumerate([(2, 8, 16, 16), (24, 3, 3, 8)]))
    y = conv_avg_pool(gpuarray.to_gpu(x), gpuarray.to_gpu(w), **POOLED)
    np.testing.assert_array_equal(y.get(), expected(x, w).astype(ml_dtypes.bfloat16))


def test_torch(torch):
    x, w = integers((2, 8, 16, 16), 0), integers((24, 3, 3, 8), 1)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        gx, gw = torch.from_numpy(x).cuda().to(dtype), torch.from_numpy(w).cuda().to(dtype)
        y = conv_avg_pool(gx, gw, **POOLED)
        assert y.dtype == dtype and y.device == gx.device
        assert torch.equal(y.cpu(), torch.from_numpy(expected(x, w)).to(dtype))
    with pytest.raises(ArrayError, match="x: not in GPU memory"):
        conv_avg_pool(gx.cpu(), gw, pool_kernel_shape=2)
    with pytest.raises(ArrayError, match="x: not contiguous"):
        conv_avg_pool(gx.permute(0, 2, 3, 1), gw, pool_kernel_shape=2, layout="NHWC")


def test_the_current_device_is_told_from_another(torch):
    for device in range(torch.cuda.device_count()):
        with torch.cuda.device(device):
            x, w = torch.zeros(2, 8, 16, 16, device=device), torch.zeros(24, 3, 3, 8, device=device)
            assert library.current_ordinal() == device
            assert conv_avg_pool(x, w, pool_kernel_shape=2).device == x.device
            for other in range(device):
                with pytest.raises(ArrayError, match=f"x: not on the current device; got device {other}, expected {device}"):
                    conv_avg_pool(x.to(f"cuda:{other}"), w, pool_kernel_shape=2)


def test_cupy(torch):
    cupy = pytest.importorskip("cupy")
    x, w = integers((2, 8, 16, 16), 0), integers((24, 3, 3, 8), 1)
    y = conv_avg_pool(cupy.asarray(x), cupy.asarray(w), **POOLED)
    assert isinstance(y, cupy.ndarray)
    np.testing.assert_array_equal(cupy.asnumpy(y), expected(x, w))


def test_memory_of_torch_is_not_in_use_elsewhere(torch):
    """Work still to come on the current stream fills memory that was freed already; y, of another stream, must not be there."""
    x, w = integers((2, 8, 16, 16), 0), integers((24, 3, 3, 8), 1)
    gx, gw = torch.from_numpy(x).cuda(), torch.from_numpy(w).cuda()
    side = torch.cuda.Stream()
    for stream, current in ((side, torch.cuda.default_stream()), (None, side)):
        with torch.cuda.stream(current):
            freed = torch.empty(2, 24, 8, 8, device="cuda", dtype=torch.float16)
            torch.cuda.synchronize()
            torch.cuda._sleep(100_000_000)
            freed.fill_(float("nan"))
            del freed
            y = conv_avg_pool(gx, gw, **POOLED, stream=stream)
        torch.cuda.synchronize()
        np.testing.assert_array_equal(y.cpu().numpy(), expected(x, w))


def test_prepared_weights_are_reused(torch):
    x, w = integers((2, 8, 16, 16), 0), integers((24, 3, 3, 8), 1)
    gx, gw = torch.from_numpy(x).cuda(), torch.from_numpy(w).cuda()
    options = dict(pool_kernel_shape=2, pool_pads=1, strides=2, tactic="conv_avgpool_filter_fused_sm75_f16_m64n64k32_s4")
    workspace = torch.zeros(1 << 20, device="cuda")
    first = conv_avg_pool(gx, gw, workspace=workspace, **options)
    gw.fill_(float("nan"))  # not read again
    assert torch.equal(first, conv_avg_pool(gx, gw, workspace=workspace, weights_prepared=True, **options))
    assert torch.isnan(conv_avg_pool(gx, gw, workspace=workspace, **options)).all()


@pytest.mark.parametrize(
    "layout, tactic",
    [
        ("NCHW", None),
        ("NHWC", "conv_avgpool_direct_gemm_sm90a_f16_m64n64k64_s8_im2col"),
        ("NCHW", "conv_avgpool_filter_fused_sm90a_f16_m64n64k64_s8_split8_im2col"),
        ("NHWC", "conv_avgpool_direct_fused_sm90a_f16_m128n256k32_s4_tma3x3"),
    ],
)
def test_graph_capture(torch, layout, tactic):
    x, w = integers((2, 8, 16, 16), 0), integers((24, 3, 3, 8), 1)
    options = dict(pool_kernel_shape=2, pool_pads=1, strides=2, layout=layout)
    problem = Problem(n=2, c=8, m=24, spatial=(16, 16), kernel_shape=3, **options)
    if tactic is not None and (why := problem.why_not(tactic)):
        pytest.skip(why)

    def placed(array):
        return torch.from_numpy(np.ascontiguousarray(np.moveaxis(array, 1, -1) if layout == "NHWC" else array))

    gx, gw = placed(x).cuda(), torch.from_numpy(w).cuda()
    out = torch.empty(problem.y_shape, device="cuda", dtype=torch.float16)
    need = 0 if tactic is None else problem.workspace_bytes(tactic)
    workspace = torch.empty(need // 4, device="cuda") if need else None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        conv_avg_pool(gx, gw, out=out, workspace=workspace, tactic=tactic, stream=stream, **options)
    for factor in (1, 2):
        gx.copy_(placed(factor * x))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        np.testing.assert_array_equal(out.cpu().numpy(), placed(factor * expected(x, w)).numpy())


@pytest.mark.xdist_group("arrays of more than 2^31 elements")  # one after the other: they need 13 GB
@pytest.mark.parametrize(
    "layout, tactic",
    [
        ("NCHW", "conv_avgpool_direct_gemm_sm75_f16_m64n64k32_s4"),
        ("NCHW", "conv_avgpool_direct_fused_sm75_f16_m64n64k32_s6"),
        ("NHWC", "conv_avgpool_direct_gemm_sm90a_f16_m64n64k64_s8"),
        ("NHWC", "conv_avgpool_direct_gemm_sm90a_f16_m64n64k64_s8_im2col"),
        ("NCHW", "conv_avgpool_filter_fused_sm90a_f16_m64n64k64_s4_im2col"),
        ("NHWC", "conv_avgpool_filter_fused_sm90a_f16_m64n64k64_s4_im2col"),
        ("NHWC", "conv_avgpool_direct_fused_sm90a_f16_m128n256k32_s4_tma3x3"),
    ],
)
def test_arrays_of_more_than_2_to_the_31_elements(torch, layout, tactic):
    """X, its box means and Y. All images are one, so all of Y are, too."""
    images, c, m, size = 520, 64, 256, 256
    options = dict(pool_kernel_shape=2, pool_pads=1, strides=2, layout=layout)
    problem = Problem(n=images, c=c, m=m, spatial=(size, size), kernel_shape=3, **options)
    if why := problem.why_not(tactic):
        pytest.skip(why)
    options["tactic"] = tactic
    x = torch.from_numpy(integers((1, *problem.x_shape[1:]), 0)).cuda()
    w = torch.from_numpy(integers(problem.w_shape, 1)).cuda()
    one = conv_avg_pool(x, w, **options)[0]
    assert one.isfinite().all() and one.any()
    y = torch.full(problem.y_shape, float("nan"), device="cuda", dtype=torch.float16)
    assert min(x.numel() * images, y.numel()) > 2**31
    conv_avg_pool(x.repeat(images, 1, 1, 1), w, out=y, **options)
    wrong = [i for i in range(images) if not torch.equal(y[i], one)]
    del y
    torch.cuda.empty_cache()
    assert not wrong
