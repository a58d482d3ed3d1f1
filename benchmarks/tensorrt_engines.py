r"""Whole models as TensorRT engines: with the plugin, and of the original model; accuracy and time.

    python -m benchmarks.tensorrt_engines check --json benchmarks/results/h200_trt86_engines.json [--digits FILE.npz]
    python -m benchmarks.tensorrt_engines time --json benchmarks/results/h200_trt86_sngan64.json
    python -m benchmarks.tensorrt_engines tests plugin --json benchmarks/results/h200_trt86_tests.json
    python -m benchmarks.tensorrt_engines tests small stargan_v2 densenet121_fp32 densenet121_tf32 densenet121_fp16 \
        --jobs 3 --json benchmarks/results/h200_trt86_accuracy.json

`check` builds each model in fp32 and fp16, with a static batch and with open ones, saves the engines and runs them in a
new process; outputs are compared with onnxruntime and with float64 on the original model.  `time` builds one model with
the plugin, as it is, and in standard operators, and replays CUDA graphs of all engines in turn over inputs rotated
beyond the L2.  `tests` runs groups of tests/plugin and of the engines of tests/accuracy with REQUIRE_GPU=1, a few processes
at a time, and keeps what passed and the errors found.  Builders share the GPU in turns: with 13 of them an H200 needed
more than twice as long for each as with 5.  Needs TensorRT, pycuda and a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx

from convpool.modelio import LoadedModel
from convpool.tensorrt import Engine, build_engine
from convpool.tensorrt.library import tensorrt_module
from convpool.verify import make_session
from models.digits import MODEL_PATH
from models.generators import generate, random_inputs
from tests.accuracy.errors import largest, root_mean_square
from tests.accuracy.limits import FP16_RATIO, LIMITS
from tests.accuracy.reference64 import run_float64

BATCHES = {"lenet5_digits": 8, "sngan64": 4, "wgan_gp": 4, "stargan_v2": 1, "densenet_transition1": 4}
STATIC_SETS = 16
L2_BYTES = 60 * 2**20
RELAXED_CAPTURE = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: TensorRT may call what a strict capture refuses


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


def make_inputs(
    name: str, batch: int, digits: str | None, size: int | None = None, seed: int = 0
) -> dict[str, np.ndarray]:
    """Inputs for a batch; images of the digits' test set for LeNet-5 where it is given."""
    if name == "lenet5_digits" and digits:
        return {"image": np.load(digits)["inputs"][seed * batch :][:batch]}
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
    sets = {"static": [make_inputs(name, batch, digits, seed=seed) for seed in range(STATIC_SETS)], "open": [
        make_inputs(name, 1, digits, size["small"]), make_inputs(name, 2 * batch, digits, size["large"])]}  # fmt: skip
    if name == "lenet5_digits" and digits:
        sets["open"].append({"image": np.load(digits)["inputs"]})
    with tempfile.TemporaryDirectory() as folder:
        for shapes, inputs in sets.items():
            model = make_model(name, batch if shapes == "static" else "N")
            session = make_session(LoadedModel(model, None, 0), optimize=True)
            names = [output.name for output in session.get_outputs()]
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
                for which in ("plugin", "original") if shapes == "static" else ("plugin",):
                    path = Path(folder, f"{name}-{precision}-{shapes}-{which}.engine")
                    started = time.perf_counter()
                    engine = build_engine(model, precision=precision, profiles=profile, optimization_level=level,
                                          timing_cache=Path(folder, "timing.cache"),
                                          plugin=which == "plugin", lowering=None if which == "plugin" else "none")  # fmt: skip
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
                row["fp16_ratio"] = None
                if "original_error_l2" in row and precision == "fp16":
                    row["fp16_ratio"] = row["plugin_error_l2"] / row["original_error_l2"]
                row["limit"] = LIMITS[name].relative(precision)
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def run_limited(command: list[str], seconds: float) -> tuple[str, str]:
    """What a command prints, and what went wrong; also what it printed before its time was up."""
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
    "plugin": ["tests/plugin"],
    "densenet121_fp32": ["tests/accuracy", "-k", "test_tensorrt and densenet121 and fp32"],
    "densenet121_tf32": ["tests/accuracy", "-k", "test_tensorrt and densenet121 and tf32"],
    "densenet121_fp16": ["tests/accuracy", "-k", "test_tensorrt and densenet121 and fp16"],
    "small": ["tests/accuracy", "-k", "test_tensorrt and (lenet5 or sngan64 or wgan_gp or densenet_transition)"],
    "stargan_v2": ["tests/accuracy", "-k", "test_tensorrt and stargan_v2"],
}


def run_tests(group: str, seconds: float) -> dict:
    """One group of tests: counts, what failed, and what the tests recorded."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder, "junit.xml")
        options = ["-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={junit}"]
        command = [sys.executable, "-m", "pytest", *options, *TEST_GROUPS[group]]
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "REQUIRE_GPU": "1"}) as process:
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
        for one in cases if one.find("properties") is not None
    ]  # fmt: skip
    bad = [one.get("name") for one in cases if one.find("failure") is not None or one.find("error") is not None]
    skipped = [f"{one.get('name')}: {one.find('skipped').get('message')}" for one in cases if one.find("skipped") is not None]
    passed = re.search(r"(\d+) passed", output)  # of a test that was interrupted the file says nothing bad
    return {**result, "passed": int(passed[1]) if passed else 0, "skipped": skipped, "failed": bad, "recorded": recorded}


def tests(arguments: argparse.Namespace) -> dict:
    """Every group, a few at a time."""
    with ThreadPoolExecutor(arguments.jobs) as pool:
        groups = list(pool.map(lambda group: run_tests(group, arguments.timeout), arguments.names or TEST_GROUPS))
    return {"groups": groups, "failures": [g["group"] for g in groups if g["exit_status"] != 0 or g["late"]]}


class Replay:
    """One engine as CUDA graphs, one per input set."""

    def __init__(self, engine: Engine, inputs: list[dict]) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._stream = engine.memory.stream
        self._graphs = []
        for one in inputs:
            engine.bind(one)
            engine.execute()  # once outside: TensorRT may allocate on the first run
            engine.memory.synchronize(None)
            graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
            stream = ctypes.c_void_p(self._stream.handle)
            self._check(self._cuda.cuStreamBeginCapture_v2(stream, RELAXED_CAPTURE))
            engine.execute()
            self._check(self._cuda.cuStreamEndCapture(stream, ctypes.byref(graph)))
            self._check(self._cuda.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)))
            self._graphs.append(executable)

    def microseconds(self) -> float:
        """Time of a run: all input sets once, divided by their number."""
        import pycuda.driver as driver

        start, stop = driver.Event(), driver.Event()
        start.record(self._stream)
        for graph in self._graphs:
            self._check(self._cuda.cuGraphLaunch(graph, ctypes.c_void_p(self._stream.handle)))
        stop.record(self._stream)
        stop.synchronize()
        return start.time_till(stop) * 1000 / len(self._graphs)

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA driver: error {code}")


def layer_times(engine: Engine, runs: int = 20) -> dict[str, float]:
    """Microseconds per layer by TensorRT's profiler, which adds its own cost to each."""
    trt = tensorrt_module()
    totals: dict[str, float] = {}

    class Profiler(trt.IProfiler):
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            totals[layer_name] = totals.get(layer_name, 0.0) + ms * 1000 / runs

    context = engine._load().context
    context.profiler = Profiler()
    for _ in range(runs):
        engine.execute()
        engine.memory.synchronize(None)
    return {name: round(value, 2) for name, value in totals.items()}


def timing(arguments: argparse.Namespace) -> dict:
    """One model's engines beside each other."""
    import pycuda.gpuarray as gpuarray

    model = make_model(arguments.model, arguments.batch)
    first = random_inputs(model)
    sets = max(2, 2 * L2_BYTES // max(1, sum(x.nbytes for x in first.values())))
    sets = min(sets, 40)
    engines = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, plugin, lowering in (
            ("plugin", True, "convavgpool"), ("original", False, "none"),
            ("direct", False, "direct"), ("fused", False, "fused"), ("original_again", False, "none"),
        ):  # fmt: skip
            engines[name] = build_engine(model, precision=arguments.precision, optimization_level=arguments.level,
                                         plugin=plugin, lowering=lowering, timing_cache=Path(folder, "timing.cache"))  # fmt: skip
    engines["plugin"].memory  # noqa: B018  a current context, which gpuarray needs
    rng = np.random.default_rng(0)
    device = [
        {name: gpuarray.to_gpu(x + rng.standard_normal(x.shape).astype(x.dtype)) for name, x in first.items()}
        for _ in range(sets)
    ]
    replays = {name: Replay(engine, device) for name, engine in engines.items()}
    times: dict[str, list[float]] = {name: [] for name in replays}
    for round_number in range(arguments.rounds + 2):
        for name, replay in replays.items():
            value = replay.microseconds()
            if round_number >= 2:
                times[name].append(value)
    medians = {name: statistics.median(values) for name, values in times.items()}
    spread = {name: statistics.quantiles(values, n=4) for name, values in times.items()}
    return {
        "model": arguments.model, "batch": arguments.batch, "precision": arguments.precision, "input_sets": sets,
        "rounds": arguments.rounds, "median_us": medians,
        "quartiles_us": {name: [q[0], q[2]] for name, q in spread.items()},
        "original_over": {name: medians["original"] / value for name, value in medians.items()},
        "layers_us": {name: layer_times(engine) for name, engine in engines.items()} if arguments.layers else None,
    }  # fmt: skip


def about() -> dict:
    """What the figures were measured on."""
    trt = tensorrt_module()
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return {
        "command": " ".join(["python", "-m", "benchmarks.tensorrt_engines", *(Path(word).name for word in sys.argv[1:])]),
        "date": datetime.date.today().isoformat(), "tensorrt": trt.__version__,
        "gpu": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip(),
    }  # fmt: skip


def main() -> int:
    """Entry point; 1 if a case failed or missed its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("check", "check-one", "time", "tests", "run"))
    parser.add_argument("names", nargs="*", help="groups of `tests`, default all")
    parser.add_argument("--json")
    parser.add_argument("--digits", help="npz with the digits' test set as `inputs`")
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=1200, help="seconds for one model")
    parser.add_argument("--level", type=int, default=2, help="builder optimization level")
    parser.add_argument("--model", default="sngan64")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--layers", action="store_true", help="also the time of every layer, by TensorRT's profiler")
    arguments = parser.parse_args()
    if arguments.what == "run":
        engine, given, result = arguments.names
        loaded = Engine.load(engine)
        outputs = [loaded.run(one) for one in read_sets(given)]
        np.savez(result, **{f"{number}/{name}": y for number, one in enumerate(outputs) for name, y in one.items()})
        return 0
    if arguments.what == "check-one":
        check_model(arguments.names[0], arguments.digits, arguments.level)
        return 0
    results = {**about(), **{"check": check, "time": timing, "tests": tests}[arguments.what](arguments)}
    text = json.dumps(results, indent=1) + "\n"
    if arguments.json:
        Path(arguments.json).write_text(text)
    print(text)
    bad = [row for row in results.get("rows", []) if row["plugin_error"] > row["limit"] or (row["fp16_ratio"] or 0) > FP16_RATIO]
    return 1 if bad or results.get("failures") else 0


if __name__ == "__main__":
    sys.exit(main())
