# SPDX-License-Identifier: Apache-2.0
"""A small record as python -m benchmarks layers writes it, made by hand: two rows of suita-table2, figures easy to check."""

from benchmarks.layers.record import new_entry
from benchmarks.layers.suites import SUITES


def result(us: float, how: str = "", **more) -> dict:
    """A measured result."""
    return {"us": us, "spread_us": us / 100, "error": 3e-4, "exact": True, "how": how, **more}


def record() -> dict:
    """Row 1: 8x8, 32 channels, ours 4 us; row 2: 64x64, 512 channels, ours 500 us."""
    rows = SUITES["suita-table2"][0]
    small, large = (new_entry(row, "fp16", "nhwc") for row in (rows[0], rows[-1]))
    small["methods"] = {
        "cudnn_naive": result(8, "PyTorch"),
        "cudnn_fused": result(6),
        "cudnn_direct": result(7),
        "cublas_fused": result(9),
        "cublas_direct": {"skipped": "no algorithm runs this"},
        "tensorrt_naive": result(10),
        "textbook_direct": {"wrong": 0.25, "how": "textbook_direct"},
        "cpu_loop": result(1),
        "convpool:direct_gemm_a": result(4, "conv_avgpool_direct_gemm_a", tactic=1001),
        "convpool:filter_fused_b": result(5, "conv_avgpool_filter_fused_b", tactic=3001),
        "convpool": result(4, "conv_avgpool_direct_gemm_a", tactic=1001),
    }
    large["methods"] = {
        "cudnn_naive": result(2000),
        "cudnn_fused": {"skipped": "slow"},
        "cudnn_direct": result(1000),
        "cublas_fused": result(1200),
        "cublas_direct": result(800),
        "tensorrt_naive": result(1800),
        "convpool:direct_gemm_a": result(400, "conv_avgpool_direct_gemm_a", tactic=1001),
        "convpool:filter_fused_b": result(500, "conv_avgpool_filter_fused_b", tactic=3001),
        "convpool": result(500, "conv_avgpool_filter_fused_b", tactic=3001),
    }
    return {
        "format": 1,
        "command": "python -m benchmarks layers suita-table2",
        "commit": "",
        "time": "2026-01-01T00:00:00+00:00",
        "machine": {"name": "NVIDIA H200"},
        "protocol": {"convpool": "0.1.0", "compute_capability": 90, "multiprocessors": 132, "versions": {}},
        "ceilings": {"copy_tb_per_s": 4.0, "tflops": {"fp16": 800.0}},
        "rows": [small, large],
    }
