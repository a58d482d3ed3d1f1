# SPDX-License-Identifier: Apache-2.0
"""LeNet-5's two pairs on a GPU: with tanh in the node, against tanh as a kernel of its own behind it.

    python -m benchmarks lenet5_pairs [--json FILE]

The nodes, weights and first images are models/lenet5_digits.onnx', optimized.  Both pairs follow one another, as in the network,
channels first, as TensorRT hands them over.  Outputs are compared with the reference in float64 before they are timed.  Exits
with 1 where tanh in the node is not faster.  Needs a GPU, PyTorch and CuPy.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

import convpool
from benchmarks.layers.device import Device
from benchmarks.layers.record import machine
from convpool import cuda
from convpool.algebra.reference import conv_avg_pool
from convpool.ir import schema
from convpool.ir.protos import attributes

MODEL = Path(__file__).resolve().parents[1] / "models" / "lenet5_digits.onnx"
BATCHES = (1, 8, 32, 64, 128, 256)
SETS = 8
LIMITS = {"float32": 2e-6, "float16": 4e-3}
"""Limits of outputs below 1: sums of 150 products behind a first pair, three times rounded."""


def pairs() -> list[tuple[onnx.NodeProto, np.ndarray, np.ndarray]]:
    """The network's two nodes with weights [M, k, k, C] and bias [M]."""
    model = convpool.optimize(MODEL, check=0).model
    weights = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
    nodes = [node for node in model.graph.node if schema.is_operator(node)]
    assert [node.op_type for node in nodes] == ["ConvAvgPoolTanh"] * 2
    return [(node, weights[node.input[1]], weights[node.input[2]]) for node in nodes]


def reference(x: np.ndarray) -> np.ndarray:
    """Both pairs in float64."""
    for node, w, b in pairs():
        x = conv_avg_pool(x, w, b, *schema.specs_of(attributes(node)), schema.parts_of(node))
    return x


def network(torch: Any, dtype: str, images: Any, stream: int, *, fused: bool) -> Callable[[int], Any]:
    """call(i): both pairs on images[i]; returns the last result."""
    steps, x = [], images[0]
    for node, w, b in pairs():
        values = attributes(node)
        options: dict[str, Any] = {
            name: list(values[name]) for name in ("pool_kernel_shape", "pool_strides", "pool_pads", "strides", "pads")
        }
        tensors = [torch.from_numpy(array.copy()).cuda().to(getattr(torch, dtype)) for array in (w, b)]
        y = cuda.conv_avg_pool(x, *tensors, **options)
        options["activation"] = "tanh" if fused else None
        plan = cuda.plan_for(x, *tensors, **options)
        options["workspace"] = torch.empty(max(256, plan.workspace_bytes), dtype=torch.uint8, device="cuda")
        steps.append((tensors, options | {"tactic": plan.tactic}, y))
        x = y

    prepared = False

    def call(i: int) -> Any:
        nonlocal prepared
        x = images[i]
        for tensors, options, y in steps:
            cuda.conv_avg_pool(x, *tensors, **options, out=y, stream=stream, weights_prepared=prepared)
            x = y if fused else torch.tanh(y, out=y)
        prepared = True
        return x

    return call


def measure(device: Device, batch: int, dtype: str) -> dict[str, Any]:
    """Microseconds of both ways.  Raises AssertionError where one is wrong."""
    torch = device.torch
    random = np.random.default_rng(batch)
    arrays = [random.random((batch, 1, 32, 32), np.float32) for _ in range(SETS)]
    images = [torch.from_numpy(array).cuda().to(getattr(torch, dtype)) for array in arrays]
    wanted = reference(images[0].double().cpu().numpy())
    found: dict[str, Any] = {"batch": batch, "dtype": dtype}
    for name, fused in (("separate_us", False), ("fused_us", True)):
        call = network(torch, dtype, images, device.handle, fused=fused)
        with torch.cuda.stream(device.stream):
            got = call(0)
        torch.cuda.synchronize()
        error = float(np.abs(got.double().cpu().numpy() - wanted).max())
        assert error <= LIMITS[dtype], (batch, dtype, name, error)
        found[name] = device.measure(call, SETS)["us"]
    found["speedup"] = round(found["separate_us"] / found["fused_us"], 3)
    return found


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks lenet5_pairs", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    device = Device(replays=15)
    rows = [measure(device, batch, dtype) for dtype in LIMITS for batch in BATCHES]
    for row in rows:
        times = f"{row['separate_us']:.2f} us, in the node {row['fused_us']:.2f} us"
        print(f"{row['dtype']} batch {row['batch']:3}: {times}, {row['speedup']:.2f} times as fast")
    if options.json:
        record = {"commit": options.commit, "machine": machine(), "versions": device.versions(), "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(row["speedup"] > 1 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
