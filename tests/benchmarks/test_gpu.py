# SPDX-License-Identifier: Apache-2.0
"""On a GPU: every method is right on odd shapes, in every precision and layout; the ceilings are plausible."""

import json

import pytest

from benchmarks.layers import cli
from benchmarks.layers import record as records
from benchmarks.layers.case import LIMITS
from benchmarks.layers.rows import LAYOUTS, PRECISIONS
from benchmarks.layers.run import LIBRARIES
from convpool import cuda
from convpool.cli.group import run

ROWS = [
    {"n": 3, "c": 6, "m": 10, "size": [13, 11]},
    {"n": 2, "c": 64, "m": 40, "size": 14, "kernel": 1},
    {"n": 2, "c": 64, "m": 40, "size": 14, "kernel": 1, "prologue": True},
    {"n": 2, "c": 24, "m": 16, "size": [11, 13], "prologue": True},
    {"n": 2, "c": 16, "m": 24, "size": 17, "stride": 2, "pool": 3, "pool_stride": 2},
    {"n": 1, "c": 8, "m": 8, "size": 9, "kernel": 5, "pad": 1, "pool": 4},
    {"n": 2, "c": 40, "m": 20, "size": [9, 14], "pool": 1},
    {"n": 3, "c": 33, "m": 9, "size": 7, "kernel": 1, "pool": 1},
]
NHWC_ONLY = {"sat_direct"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_method_is_right(gpu, precision, layout, tmp_path):
    (tmp_path / "own.json").write_text(json.dumps(ROWS))
    out = tmp_path / "out.json"
    args = [str(tmp_path / "own.json"), "--precision", precision, "--layout", layout, "--json", str(out)]
    assert run(cli.command, "python -m benchmarks layers", [*args, "--replays", "2", "--plans", "4", "-q"]) == 0
    record = records.load(str(out))
    assert record["ceilings"]["copy_tb_per_s"] > 0.05 and record["ceilings"]["tflops"][precision] > 0.5
    for entry in record["rows"]:
        row, methods = records.entry_row(entry), entry["methods"]
        expected = set(LIBRARIES) - (NHWC_ONLY if layout == "nchw" or row.stride > 1 or row.kernel == 1 else set())
        if row.pool == 1:  # of the forms of a pair one is left
            expected -= {"cudnn_naive", "cudnn_direct", "cublas_direct", "sat_direct"}
        assert methods["convpool_rule"]["tactic"] == methods["convpool"]["tactic"]  # the table has none of these layers
        for name in expected | {"convpool", "convpool_no_workspace", "convpool_rule"}:
            assert methods[name]["us"] > 0 and methods[name]["error"] <= LIMITS[precision], (row.name, name, methods[name])
            # Means over 4 or 16 small integers, and the sums of their products, have few bits.
            if row.pool in (2, 4) and precision != "bf16":
                assert methods[name]["exact"] or methods[name]["how"].startswith(("PyTorch", "cuDNN")), (row.name, name)


def test_the_library_and_pytorch_know_the_same_gpu(gpu):
    torch, _ = gpu
    about = torch.cuda.get_device_properties(0)
    device = cuda.current_device()
    assert (device["cc"], device["multiprocessors"]) == (10 * about.major + about.minor, about.multi_processor_count)
    assert device["shared_bytes"] >= 48 * 1024


def test_tensorrts_process_can_time(gpu):
    pytest.importorskip("pycuda")
    from benchmarks.layers.tensorrt_worker import Gpu

    worker = Gpu()
    source, target = (worker.memory.allocate(2**20) for _ in range(2))
    found = worker.measure(lambda i: worker.driver.memcpy_dtod_async(int(target), int(source), 2**20, worker.memory.stream), 4, 3)
    assert found["us"] > 0 and found["spread_us"] >= 0
