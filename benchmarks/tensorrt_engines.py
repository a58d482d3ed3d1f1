# SPDX-License-Identifier: Apache-2.0
r"""Whole models as TensorRT engines: with the plugin, and of the original model; accuracy and time.

    python -m benchmarks tensorrt_engines check --json benchmarks/results/h200_trt86_engines.json [--digits FILE.npz]
    python -m benchmarks tensorrt_engines time sngan64 wgan_gp --json benchmarks/results/h200_trt86_networks.json \
        --engines build/engines
    python -m benchmarks tensorrt_engines tests plugin lenet5 sngan64 --json benchmarks/results/h200_trt86_tests.json

`check` builds each model in fp32 and fp16, with a static batch and with open ones, saves the engines and runs them in a
new process; outputs are compared with onnxruntime and with float64 on the original model.  `time` is described in
`benchmarks.network_times`; it keeps its engines in a folder, and `--lowerings` times some of them.  `tests` runs groups of
tests/tensorrt and of the engines of tests/accuracy with REQUIRE_GPU=1, a few processes at a time, and keeps what passed and
the errors found.  `time` and `tests` put each row or group into the file as soon as it is done, in place of an earlier one.
Builders share the GPU in turns: with 13 of them an H200 needed more than twice as long for each as with 5.  Needs
TensorRT, pycuda and a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import onnx

from benchmarks import network_times
from convpool.check.session import Session
from convpool.ir.files import write_atomically
from convpool.ir.model import LoadedModel
from convpool.tensorrt import Engine, build_engine
from convpool.tensorrt.package import tensorrt_module
from models.digits import MODEL_PATH
from models.generators import generate, random_inputs
from tests.support.accuracy.float64 import run_float64
from tests.support.accuracy.limits import LIMITS, RATIOS
from tests.support.accuracy.measures import largest, root_mean_square

BATCHES = {"lenet5_digits": 8, "sngan64": 4, "wgan_gp": 4, "stargan_v2": 1, "densenet_transition1": 4}
STATIC_SETS = 16


def make_model(name: str, batch: int | str) -> onnx.ModelProto:
    """A model of the table; batch "N" leaves the batch open, and for a lone layer height and width too."""
    if name == "lenet5_digits":
        model = onnx.load(MODEL_PATH)
        if batch != "N":
            for value in (*model.graph.input, *model.graph.output):
                value.type.tensor_type.shape.dim[0].dim_value = batch
        return model
    model = generate(name, batch="dynamic" if batch == "N" else batch)
    if batch == "N" and name.startswith("densenet_transition"):
        for value in (*model.graph.input, *model.graph.output):
            for axis, dim in zip("HW", value.type.tensor_type.shape.dim[2:], strict=True):
                dim.dim_param = axis if value is model.graph.input[0] else f"{axis}2"
    return model


def make_inputs(name: str, batch: int, digits: str | None, size: int | None = None, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs for a batch; images of the digits' test set for LeNet-5 where it is given."""
    if name == "lenet5_digits" and digits:
        return {"image": np.load(digits)["image"][seed * batch :][:batch]}
    model = make_model(name, batch)
    if size is not None:
        for dim in model.graph.input[0].type.tensor_type.shape.dim[2:]:
            dim.dim_value = size
    return random_inputs(model, seed=seed, batch=batch)


def run_elsewhere(engine: Path, inputs: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """Run an engine file on several input sets in a new process."""
    given, result = engine.with_suffix(".in.npz"), engine.with_suffix(".out.npz")
    np.savez(given, **{f"{number}/{name}": x for number, one in enumerate(inputs) for name, x in one.items()})
    command = [sys.executable, "-m", "benchmarks.tensorrt_engines", "run", str(engine), str(given), str(result)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{engine.name}: {done.stderr.strip()[-2000:]}")
    return read_sets(result)


def read_sets(path: str | Path) -> list[dict[str, np.ndarray]]:
    """Arrays by name, for each set of a file whose names read `number/name`."""
    sets: dict[int, dict[str, np.ndarray]] = {}
    with np.load(path) as file:
        for key in file.files:
            number, _, name = key.partition("/")
            sets.setdefault(int(number), {})[name] = file[key]
    return [sets[number] for number in sorted(sets)]


def check_model(name: str, digits: str | None, level: int) -> list[dict]:
    """All cases of one model."""
    rows = []
    batch = BATCHES[name]
    layer = name.startswith("densenet_transition")
    size = {"small": 28, "large": 72} if layer else {"small": None, "large": None}
    sets = {
        "static": [make_inputs(name, batch, digits, seed=seed) for seed in range(STATIC_SETS)],
        "open": [make_inputs(name, 1, digits, size["small"]), make_inputs(name, 2 * batch, digits, size["large"])],
    }
    if name == "lenet5_digits" and digits:
        sets["open"].append({"image": np.load(digits)["image"]})
    with tempfile.TemporaryDirectory() as folder:
        for shapes, inputs in sets.items():
            model = make_model(name, batch if shapes == "static" else "N")
            session = Session(LoadedModel(model, None, 0), optimize=True)
            names = session.outputs
            runtime = [dict(zip(names, session.run(None, x), strict=True)) for x in inputs]
            exact = [run_float64(model, x) for x in inputs]
            profile = None
            if shapes == "open":
                low, high = inputs[0], inputs[-1]
                profile = {key: (low[key].shape, high[key].shape, high[key].shape) for key in low}
            for precision in ("fp32", "fp16"):
                sizes = sorted({str(list(x.shape)) for one in inputs for x in one.values()})
                row = {"model": name, "precision": precision, "shapes": shapes, "inputs": sizes, "input_sets": len(inputs)}
                # The original's engine is there for what TensorRT itself makes of the precision.
                for which in ("plugin", "original"):
                    path = Path(folder, f"{name}-{precision}-{shapes}-{which}.engine")
                    started = time.perf_counter()
                    engine = build_engine(
                        model,
                        precision=precision,
                        profiles=profile,
                        optimization_level=level,
                        timing_cache=Path(folder, "timing.cache"),
                        plugin=which == "plugin",
                        lowering=None if which == "plugin" else "none",
                    )
                    engine.save(path)
                    row[f"{which}_build_s"] = round(time.perf_counter() - started, 1)
                    outputs = run_elsewhere(path, inputs)
                    row[f"{which}_error"] = max(largest(y, r) for y, r in zip(outputs, exact, strict=True))
                    row[f"{which}_error_l2"] = root_mean_square(outputs, exact)
                    row[f"{which}_from_onnxruntime"] = max(largest(y, r) for y, r in zip(outputs, runtime, strict=True))
                    if name == "lenet5_digits":
                        row[f"{which}_labels_equal"] = all(
                            np.array_equal(y["logits"].argmax(1), r["logits"].argmax(1))
                            for y, r in zip(outputs, runtime, strict=True)
                        )
                row["ratio"] = row["plugin_error_l2"] / row["original_error_l2"]
                row["limit"] = LIMITS[name].relative(precision, engine=True)
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def run_limited(command: list[str], seconds: float) -> tuple[str, str]:
    """Run a command: its output, also until its time is up, and what went wrong."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(), f"not done after {seconds} s"
    return done.stdout, (done.stderr.strip() or f"exit status {done.returncode}") if done.returncode else ""


def check(arguments: argparse.Namespace) -> dict:
    """Every model, a few at a time."""
    names = arguments.models or list(BATCHES)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        program = [sys.executable, "-m", "benchmarks.tensorrt_engines", "check-one"]
        options = ["--level", str(arguments.level)] + (["--digits", arguments.digits] if arguments.digits else [])
        done = list(pool.map(lambda n: run_limited([*program, n, *options], arguments.timeout), names))
    rows, failures = [], []
    for name, (output, message) in zip(names, done, strict=True):
        rows += [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        if message:
            failures.append({"model": name, "message": message[-1500:]})
    return {"rows": rows, "failures": failures}


INTERRUPT_S = 60  # TensorRT's builder is not interrupted: the test at hand goes on to its end
TEST_GROUPS = {
    "plugin": ["tests/tensorrt", "tests/plugin", "-k", "gpu"],
    "densenet121_fp32": ["tests/accuracy", "-k", "test_tensorrt and densenet121 and fp32"],
    "densenet121_tf32": ["tests/accuracy", "-k", "test_tensorrt and densenet121 and tf32"],
    "densenet121_fp16": ["tests/accuracy", "-k", "test_tensorrt and densenet121 and fp16"],
    **{
        name: ["tests/accuracy", "-k", f"test_tensorrt and {name}"]
        for name in ("lenet5", "sngan64", "wgan_gp", "stargan_v2", "densenet_transition")
    },
}


def run_tests(group: str, seconds: float, digits: str | None = None) -> dict:
    """One group of tests: counts, what failed, and what the tests recorded."""
    environment = {**os.environ, "REQUIRE_GPU": "1", **({"CONVPOOL_DIGITS": str(Path(digits).resolve())} if digits else {})}
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder, "junit.xml")
        options = ["-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={junit}"]
        command = [sys.executable, "-m", "pytest", *options, *TEST_GROUPS[group]]
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            try:
                output, late = process.communicate(timeout=seconds)[0], False
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # pytest then writes down what it has
                try:
                    output = process.communicate(timeout=INTERRUPT_S)[0]
                except subprocess.TimeoutExpired:
                    process.kill()
                    output = process.communicate()[0]
                late = True
        status = process.returncode
        result = {"group": group, "exit_status": status, "seconds": round(time.perf_counter() - started, 1), "late": late}
        print(group, output[-6000:], sep="\n", flush=True)
        if not junit.exists():
            return {**result, "passed": 0, "skipped": [], "failed": [f"not done after {seconds} s"], "recorded": []}
        cases = list(ElementTree.parse(junit).iter("testcase"))
    recorded = [
        {"test": one.get("name"), **{p.get("name"): float(p.get("value")) for p in one.iter("property")}}
        for one in cases
        if one.find("properties") is not None
    ]
    bad = [one.get("name") for one in cases if one.find("failure") is not None or one.find("error") is not None]
    skipped = [f"{one.get('name')}: {one.find('skipped').get('message')}" for one in cases if one.find("skipped") is not None]
    passed = re.search(r"(\d+) passed", output)  # of a test that was interrupted the file says nothing bad
    return {**result, "passed": int(passed[1]) if passed else 0, "skipped": skipped, "failed": bad, "recorded": recorded}


def tests(arguments: argparse.Namespace) -> int:
    """Every group, a few at a time, each written as soon as it is done; 1 if one did not pass whole."""
    names = arguments.names or list(TEST_GROUPS)
    unknown = [name for name in names if name not in TEST_GROUPS]
    if unknown:
        raise SystemExit(f"tests: no group {unknown[0]!r}; expected {', '.join(TEST_GROUPS)}")
    groups = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for done in as_completed(pool.submit(run_tests, name, arguments.timeout, arguments.digits) for name in names):
            groups.append({**done.result(), **about(), "commit": arguments.commit})
            print(json.dumps(groups[-1]), flush=True)
            if arguments.json:
                add_group(Path(arguments.json), groups[-1])
    return 1 if any(group["exit_status"] != 0 or group["late"] for group in groups) else 0


def add_group(path: Path, group: dict) -> None:
    """Put a group into the record at `path`, in place of an earlier one of its name."""
    record = json.loads(path.read_text()) if path.exists() else {"groups": []}
    groups = [*(one for one in record["groups"] if one["group"] != group["group"]), group]
    record["groups"] = sorted(groups, key=lambda one: list(TEST_GROUPS).index(one["group"]))
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())


def timing(arguments: argparse.Namespace) -> int:
    """Every network asked for, each written as soon as it is done; 1 if a lowering was wrong or could not be run."""
    names = arguments.names or list(network_times.NETWORKS)
    unknown = [name for name in names if name not in network_times.NETWORKS]
    if unknown:
        raise SystemExit(f"time: no network {unknown[0]!r}; expected {', '.join(network_times.NETWORKS)}")
    with tempfile.TemporaryDirectory() as folder:
        engines = Path(arguments.engines or folder)
        engines.mkdir(parents=True, exist_ok=True)
        lowerings = tuple(arguments.lowerings or network_times.USUAL[arguments.precision])
        options = network_times.Options(
            engines,
            lowerings,
            arguments.precision,
            arguments.level,
            arguments.batch,
            arguments.rounds,
            arguments.layers,
            arguments.max_aux_streams,
        )
        path = Path(arguments.json or Path(folder, "times.json"))
        for name in names:
            row = {**network_times.time_network(name, options), **about(), "commit": arguments.commit}
            print(json.dumps(row), flush=True)
            record = network_times.add_row(path, row)
    print(network_times.markdown(record), *network_times.problems(record), sep="\n")
    return 1 if network_times.problems(record) else 0


def about() -> dict:
    """Return the machine that the figures are from."""
    trt = tensorrt_module()
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return {
        "command": " ".join(["python", "-m", "benchmarks.tensorrt_engines", *(Path(word).name for word in sys.argv[1:])]),
        "date": datetime.date.today().isoformat(),
        "tensorrt": trt.__version__,
        "gpu": subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0],
    }


def main() -> int:
    """Entry point; 1 if a case failed or missed its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("check", "check-one", "time", "tests", "run"))
    parser.add_argument("names", nargs="*", help="networks of `time`, groups of `tests`; default all")
    parser.add_argument("--json", help="record to write, or to put rows or groups into")
    parser.add_argument("--digits", help="npz with the digits' test set as `image`, where there is no scikit-learn")
    parser.add_argument("--models", nargs="*", help="models of `check`; default all")
    parser.add_argument("--jobs", type=int, default=5, help="models or groups at a time")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds for one model or group")
    parser.add_argument("--level", type=int, default=2, help="builder optimization level")
    parser.add_argument("--commit", default="", help="commit to record")
    group = parser.add_argument_group("time")
    group.add_argument("--engines", help="folder that keeps engines and TensorRT's timings for a later call")
    group.add_argument("--lowerings", nargs="+", choices=network_times.LOWERINGS, help="default: those usual in the precision")
    group.add_argument("--batch", type=int, help="in place of each network's own")
    group.add_argument("--precision", choices=("fp16", "tf32", "fp32"), default="fp16")
    group.add_argument("--max-aux-streams", type=int, help="streams that TensorRT may run layers on besides its own")
    group.add_argument("--rounds", type=int, default=30, help="timed replays of each engine")
    group.add_argument("--layers", action="store_true", help="also the time of every layer, by TensorRT's profiler")
    arguments = parser.parse_intermixed_args()  # names may stand between options
    if arguments.what == "run":
        engine, given, result = arguments.names
        loaded = Engine.load(engine)
        outputs = [loaded.run(one) for one in read_sets(given)]
        np.savez(result, **{f"{number}/{name}": y for number, one in enumerate(outputs) for name, y in one.items()})
        return 0
    if arguments.what == "check-one":
        check_model(arguments.names[0], arguments.digits, arguments.level)
        return 0
    if arguments.what in ("time", "tests"):
        return {"time": timing, "tests": tests}[arguments.what](arguments)
    results = {**about(), "commit": arguments.commit, **check(arguments)}
    text = json.dumps(results, indent=1) + "\n"
    if arguments.json:
        Path(arguments.json).write_text(text)
    print(text)
    bad = [row for row in results["rows"] if row["plugin_error"] > row["limit"] or row["ratio"] > RATIOS[row["precision"]]]
    return 1 if bad or results.get("failures") else 0


if __name__ == "__main__":
    sys.exit(main())
