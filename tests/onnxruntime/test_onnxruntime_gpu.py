# SPDX-License-Identifier: Apache-2.0
"""The custom operators on onnxruntime's CUDA provider.  Needs onnxruntime-gpu and a GPU; REQUIRE_GPU=1 makes a skip a failure."""

import ctypes
import json
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import convpool
from benchmarks.bound_session import Bound
from convpool import onnxruntime as on_gpu
from convpool.check.session import open_model
from convpool.check.verify import compare_runners
from convpool.cli.verify import main
from convpool.ir import schema
from convpool.ir.model import load
from convpool.onnxruntime.session import CudaRunner
from models import generators
from tests.support.gpu import skip_or_fail
from tests.support.operator_models import SAMPLED, Node


@pytest.fixture(autouse=True, scope="module")
def library(plugin):
    """The library beside libconvpool.so, on a machine with the CUDA provider and a GPU."""
    before = os.environ.get("CONVPOOL_LIBRARY")
    os.environ["CONVPOOL_LIBRARY"] = str(plugin)
    try:
        on_gpu.session(Node().model())
    except on_gpu.OnnxruntimeError as error:
        skip_or_fail(str(error))
    yield
    if before is None:
        del os.environ["CONVPOOL_LIBRARY"]
    else:
        os.environ["CONVPOOL_LIBRARY"] = before


def free_bytes() -> int:
    """Ask the driver for the current device's free memory."""
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert driver.cuInit(0) == 0
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxPushCurrent_v2(context) == 0
    assert driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    assert driver.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
    assert driver.cuDevicePrimaryCtxRelease_v2(0) == 0
    return free.value


def profiled_providers(model, tmp_path) -> dict[str, str]:
    """Which provider ran each operator, by onnxruntime's profile of a run."""
    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    session = on_gpu.session(model, options=options)
    session.run(None, generators.random_inputs(model))
    events = json.loads(Path(session.end_profiling()).read_text())
    return {e["args"]["op_name"]: e["args"]["provider"] for e in events if "provider" in e.get("args", {})}


@pytest.mark.parametrize("op_type", SAMPLED)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_operator_of_every_type(op_type, dtype):
    node = Node(op_type, dtype)
    node.run(on_gpu.session(node.model(functions=False)), seed=1)


@pytest.mark.parametrize("channels_last", [0, 1, 2, 3])
@pytest.mark.parametrize(("sizes", "group"), [((11,), 1), ((7, 10), 4), ((5, 6, 7), 1)])
def test_ranks_groups_and_layouts(sizes, group, channels_last):
    for op_type in ("ReluConvAvgPoolAdd", "ReluUpsampleConvAdd"):
        node = Node(op_type, "float16", sizes=sizes, group=group, channels_last=channels_last)
        node.run(on_gpu.session(node.model(functions=False)), seed=1)


def test_the_kernels_run_on_the_gpu(tmp_path):
    assert profiled_providers(Node(dtype="float16").model(functions=False), tmp_path)["ConvAvgPool"] == on_gpu.CUDA


def test_float64_runs_by_the_cpu_provider(tmp_path):
    node = Node(dtype="float64")
    node.run(on_gpu.session(node.model(functions=False)))
    assert profiled_providers(node.model(functions=False), tmp_path)["ConvAvgPool"] == on_gpu.CPU


@pytest.mark.parametrize("op_type", ["ConvAvgPool", "UpsampleConv"])
@pytest.mark.parametrize("bias", [True, False])
def test_open_sizes_and_weights_that_change(bias, op_type):
    node = Node(op_type, "float16", constant=False, open_sizes=True, bias=bias)
    session = on_gpu.session(node.model(functions=False))
    for seed in range(3):
        for batch, sizes in [(1, (9, 10)), (3, (4, 31)), (1, (9, 10))]:
            node.run(session, seed, batch=batch, sizes=sizes)


def test_two_devices_in_turn():
    node = Node("ConvAvgPoolRelu", "float16", channels=64, filters=64)
    model = node.model(functions=False)
    first = on_gpu.session(model, device=0)
    try:
        second = on_gpu.session(model, device=1)
    except on_gpu.OnnxruntimeError:
        pytest.skip("one GPU")
    for seed in range(4):
        for session in (first, second):
            node.run(session, seed)


def test_more_shapes_than_are_kept():
    node = Node("ConvAvgPoolRelu", "float16", channels=64, filters=64, open_sizes=True)
    session = on_gpu.session(node.model(functions=False))
    for _ in range(2):
        for size in range(3, 83):
            node.run(session, batch=1, sizes=(size, 4))


def test_an_empty_batch_gives_an_empty_result():
    node = Node("ConvAvgPool", open_sizes=True)
    (got,) = on_gpu.session(node.model(functions=False)).run(None, {"X": np.zeros((0, 8, 9, 10), np.float32)})
    assert got.shape == (0, 16, 5, 5)


def test_the_provider_says_whether_products_are_in_tf32():
    node = Node("ConvAvgPool", channels=64, filters=64)
    x = np.random.default_rng(0).standard_normal((2, 64, 9, 10)).astype(np.float32)
    model, exact = node.model(functions=False), node.expected({**node.arrays(), "X": x})

    def error(use_tf32: bool) -> float:
        got = on_gpu.session(model, use_tf32=use_tf32).run(None, {"X": x})[0]
        return float(np.abs(got - exact).max() / np.abs(exact).max())

    assert error(False) < 2e-6 < error(True) < 2e-3


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["wgan_gp", "sngan_generator"])
def test_cuda_graphs_give_the_same_bits(name, dtype):
    model = generators.generate(name, batch=4, dtype=dtype)
    optimized = convpool.optimize(model, target="tensorrt", check=0).model
    plain = Bound(on_gpu.session(optimized), generators.random_inputs(model))
    graph = Bound(on_gpu.session(optimized, cuda_graph=True), generators.random_inputs(model))
    for seed in range(6):
        arrays = generators.random_inputs(model, seed=seed)
        for bound in (plain, graph):
            bound.update(arrays)
            bound.run()
        for a, b in zip(plain.outputs(), graph.outputs(), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("sizes", [(40,), (9, 10), (5, 6, 7)])
def test_cuda_graphs_of_every_rank(sizes):
    node = Node("ConvAvgPoolRelu", "float16", sizes=sizes)
    bound = Bound(on_gpu.session(node.model(functions=False), cuda_graph=True), node.arrays())
    for seed in range(5):
        arrays = node.with_constants(node.arrays(seed))
        bound.update(arrays)
        bound.run()
        node.check(bound.outputs()[0], arrays)


@pytest.mark.parametrize("target", ["tensorrt", "cuda"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["wgan_gp", "sngan_generator", "biggan_generator", "vae_decoder", "unet_nearest"])
def test_a_network_agrees_with_float32(name, dtype, target):
    model = generators.generate(name, batch=4, dtype=dtype, **{"unet_nearest": {"widths": (32, 64, 128)}}.get(name, {}))
    optimized = convpool.optimize(model, target=target, check=0).model
    assert schema.used_in(optimized)
    assert compare_runners(open_model(load(model)), CudaRunner(load(optimized), "the result")).passed


@pytest.mark.parametrize("layers", [(), ("--layers",)])
def test_the_command_compares_on_the_gpu(monkeypatch, tmp_path, capsys, layers):
    model = generators.generate("sngan64_small", batch="dynamic")
    onnx.save(model, tmp_path / "model.onnx")
    convpool.optimize(model, target="cuda", check=0).save(tmp_path / "result.onnx")
    files = [str(tmp_path / name) for name in ("model.onnx", "result.onnx")]
    shape = f"{model.graph.input[0].name}:3x3x64x64"
    options = ["--provider", "cuda", "--check", "2", "--input-shape", shape, *layers]
    monkeypatch.setattr("sys.argv", ["convpool-verify", *files, *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code, capsys.readouterr()


def test_sessions_and_runs_in_several_threads():
    node = Node("ConvAvgPoolLeakyRelu", "float16", channels=64, filters=128, sizes=(32, 32), open_sizes=True)
    model = node.model(functions=False)
    sessions = [on_gpu.session(model), on_gpu.session(model)]

    def work(number: int) -> None:
        for seed in range(20):
            node.run(sessions[number % 2], seed, sizes=(32, 8 + 8 * (seed % 3)))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


def _in_child(result) -> None:
    try:
        node = Node(dtype="float16")
        node.run(on_gpu.session(node.model(functions=False)))
        result.put("right")
    except BaseException as error:  # told to the parent
        result.put(f"{type(error).__name__}: {error}")


def test_a_session_in_a_process_of_its_own():
    context = multiprocessing.get_context("spawn")
    result = context.Queue()
    child = context.Process(target=_in_child, args=(result,))
    child.start()
    assert result.get(timeout=120) == "right"
    child.join()


def least_growth(work, tries: int = 3) -> int:
    """Bytes of the device's memory that are gone after some work, the least of a few tries: others use some now and then."""
    grown = []
    for _ in range(tries):
        before = free_bytes()
        work()
        grown.append(before - free_bytes())
        if grown[-1] <= 0:
            break
    return min(grown)


def test_nothing_leaks_over_a_thousand_runs():
    node = Node("ConvAvgPool", "float16", channels=64, filters=128, sizes=(64, 64), batch=8)
    model = node.model(functions=False)
    bound = Bound(on_gpu.session(model), node.arrays())

    def runs(count: int) -> None:
        for _ in range(count):
            bound.run()

    def sessions(count: int) -> None:
        for _ in range(count):
            on_gpu.session(model).run(None, node.feeds(node.arrays()))

    runs(10)
    assert least_growth(lambda: runs(1000)) < 1 << 20
    sessions(5)
    assert least_growth(lambda: sessions(20)) < 4 << 20


def test_unaligned_inputs_run_by_another_kernel():
    """A tensor of a caller's need be aligned to its elements only."""
    try:
        import torch
    except ImportError:
        skip_or_fail("no PyTorch")
    node = Node("ConvAvgPool", "float32", channels=64, filters=64, sizes=(16, 16))
    session, arrays = on_gpu.session(node.model(functions=False)), node.arrays(3)
    space = torch.empty(arrays["X"].size + 1, device="cuda")
    space[1:].copy_(torch.from_numpy(arrays["X"].ravel()))
    torch.cuda.synchronize()
    binding = session.io_binding()
    binding.bind_input("X", "cuda", 0, np.float32, arrays["X"].shape, space.data_ptr() + 4)
    binding.bind_output("Y")
    session.run_with_iobinding(binding)
    node.check(binding.copy_outputs_to_cpu()[0], node.with_constants(arrays))
