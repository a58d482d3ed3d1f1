# SPDX-License-Identifier: Apache-2.0
"""How long the optimizer takes on large models, without a check: many nodes, and weights of 2.5 GB in an external file.

    python -m benchmarks scale [--json FILE]

Each row runs in a process of its own, which reports its time in `convpool.optimize` and `save`, and its peak memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

EXTERNAL_BYTES = 2_500_000_000


def many_nodes(nodes: int, relus: int) -> onnx.ModelProto:
    """Conv, AveragePool, Resize back, then `relus` Relus, over and over until there are `nodes` nodes."""
    made, x = [], "x"
    while len(made) < nodes:
        k = len(made)
        made.append(helper.make_node("Conv", [x, "w"], [f"c{k}"], name=f"conv{k}", pads=[1] * 4))
        made.append(helper.make_node("AveragePool", [f"c{k}"], [f"p{k}"], kernel_shape=[2, 2], strides=[2, 2]))
        made.append(helper.make_node("Resize", [f"p{k}", "", "scales"], [f"u{k}"], mode="nearest"))
        x = f"u{k}"
        for number in range(relus):
            made.append(helper.make_node("Relu", [x], [f"r{k}_{number}"]))
            x = f"r{k}_{number}"
    weight = np.random.default_rng(0).standard_normal((4, 4, 3, 3)).astype(np.float32)
    stored = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.float32([1, 1, 2, 2]), "scales")]
    return _model(made, "x", [1, 4, 16, 16], x, stored)


def external(folder: Path) -> Path:
    """A pair in front of matrix products whose weights lie in a sparse file of EXTERNAL_BYTES."""
    size, offset, stored, made, x = 8000, 0, [], [], "flat"
    made.append(helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4))
    made.append(helper.make_node("AveragePool", ["c"], ["p"], kernel_shape=[2, 2], strides=[2, 2]))
    made.append(helper.make_node("GlobalAveragePool", ["p"], ["g"]))
    made.append(helper.make_node("Flatten", ["g"], ["flat"]))
    shapes = [("w", [size, 3, 3, 3])] + [(f"m{i}", [size, size]) for i in range(EXTERNAL_BYTES // (size * size * 4) + 1)]
    for name, shape in shapes:
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
        length = int(np.prod(shape)) * 4
        for key, value in (("location", "weights.bin"), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        stored.append(tensor)
        offset += length
        if name != "w":
            made.append(helper.make_node("MatMul", [x, name], [f"y{name}"]))
            x = f"y{name}"
    with open(folder / "weights.bin", "wb") as file:
        file.truncate(offset)
    path = folder / "external.onnx"
    path.write_bytes(_model(made, "x", [1, 3, 64, 64], x, stored).SerializeToString())
    return path


def _model(nodes, name: str, shape: list[int], output: str, stored) -> onnx.ModelProto:
    ends = helper.make_tensor_value_info(name, 1, shape), helper.make_tensor_value_info(output, 1, None)
    graph = helper.make_graph(nodes, "g", [ends[0]], [ends[1]], stored)
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def measure(path: str) -> dict[str, float]:
    """Optimize the model at `path` in this process."""
    import convpool

    begin = time.perf_counter()
    result = convpool.optimize(path, check=0)
    (Path(path).parent / "out").mkdir(exist_ok=True)
    result.save(Path(path).parent / "out" / "out.onnx")
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"pairs": result.report.summary.rewritten, "seconds": seconds, "peak_mib": peak}


def main() -> None:
    """Make the models, measure each in a new process, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        models = {}
        for nodes, relus in ((10_000, 7), (20_000, 7), (20_000, 0)):
            name = f"{nodes} nodes, {100 // (3 + relus)}% pairs"
            models[name] = Path(folder, f"{nodes}_{relus}.onnx")
            onnx.save(many_nodes(nodes, relus), models[name])
        models["external data, 2.5 GB"] = external(Path(folder))
        for name, path in models.items():
            command = [sys.executable, "-m", "benchmarks.scale", "--measure", str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append({"name": name, **json.loads(done.stdout)})
            print("{name:28} {pairs:6} pairs {seconds:6.2f} s {peak_mib:6.0f} MiB".format(**rows[-1]))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
