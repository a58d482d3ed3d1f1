# SPDX-License-Identifier: Apache-2.0
"""TensorRT-RTX's parser and builder take the rewritten models in standard operators, in every precision."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from convpool.cli import build as build_cli
from convpool.cli.group import run
from convpool.errors import ModelError, OutputError
from convpool.tensorrt import build, build_engine
from models.generators import generate
from tests.support.models import graph
from tests.support.rtx import for_ampere_and_later

trt = pytest.importorskip("tensorrt_rtx_bindings")
ROOT = Path(__file__).parents[2]
MODELS = dict.fromkeys(("wgan_gp_small", "stargan_v2_small", "densenet_small"), ("fp32", "tf32", "fp16", "bf16"))
MODELS |= {"lenet5_digits": ("fp16",), "sngan64_small": ("fp16",), "densenet_transition1": ("fp32", "fp16")}


@pytest.mark.parametrize("name", MODELS)
def test_builds(name):
    """In every precision and lowering, by one process, which a failed build may end."""
    program = [sys.executable, "-m", "tests.support.rtx.build_model", name, *MODELS[name]]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600 * len(MODELS[name]), cwd=ROOT)
    assert done.returncode == 0, (done.stdout, done.stderr[-3000:])
    built = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(built) == 2 * len(MODELS[name])
    for precision, lowering, engine_bytes, count in built:
        element = 2 if precision in ("fp16", "bf16") else 4
        assert engine_bytes > 0.9 * element * count, (precision, lowering)  # the weights are in it


def test_convpool_build_builds_what_it_loaded(tmp_path, monkeypatch, capsys):
    """The whole program but for the plugin and the run, which need another TensorRT and a GPU."""
    configs = []

    def configure(config):
        for_ampere_and_later(config)
        configs.append((config.max_aux_streams, config.builder_optimization_level))

    monkeypatch.setattr(build_cli, "build", functools.partial(build, trt=trt, configure=configure))
    onnx.save(generate("wgan_gp_small", batch="dynamic"), tmp_path / "model.onnx")
    engine, report = tmp_path / "m.engine", tmp_path / "report.json"
    shapes = [f"--{kind}-shape=image:{n}x3x32x32" for kind, n in (("min", 1), ("max", 4))]
    arguments = [str(tmp_path / "model.onnx"), "-o", str(engine), "--no-plugin", "--check", "0", "--report", str(report), *shapes]
    assert run(build_cli.build_command, "convpool-build", arguments) == 0, capsys.readouterr().err
    content = json.loads(report.read_text())
    assert content["engine_bytes"] == engine.stat().st_size > 0 and content["plugin"] is False
    assert "written" in capsys.readouterr().out
    assert run(build_cli.build_command, "convpool-build", [*arguments, "--max-aux-streams=3", "--optimization-level=1"]) == 0
    assert configs[0] != configs[1] == (3, 1)


def build_small(**options) -> None:
    build_engine(generate("wgan_gp_small", batch=2), plugin=False, trt=trt, configure=for_ampere_and_later, **options)


def test_timing_caches(tmp_path):
    cache = tmp_path / "t.cache"
    build_small(timing_cache=cache)
    written = cache.read_bytes()
    cache.write_bytes(b"damaged")
    build_small(timing_cache=cache)
    assert written and len(cache.read_bytes()) == len(written)
    with pytest.raises(OutputError, match="timing cache .*t.cache: no folder '.*nowhere'; make it first"):
        build_small(timing_cache=tmp_path / "nowhere" / "t.cache")


def test_a_progress_function_that_raises_stops_the_build(capfd):
    told = []

    def progress(*step):
        told.append(step)
        if len(told) == stop:
            raise KeyError("enough")

    for stop in (1, 2, 20):  # in phase_start, in a phase within, in step_complete
        told.clear()
        with pytest.raises(KeyError, match="enough"):
            build_small(progress=progress)
        assert len(told) == stop
    assert capfd.readouterr().err == ""


def test_ctrl_c_stops_the_build_with_status_130(tmp_path):
    onnx.save(generate("sngan64_small", batch=2), tmp_path / "model.onnx")
    code = f"""
import functools, os, signal, sys, threading
sys.path.insert(0, {str(ROOT)!r})
import tensorrt_rtx_bindings as trt
from convpool.cli import build as build_cli
from convpool.cli.group import run
from convpool.tensorrt import build
from tests.support.rtx import for_ampere_and_later

def interrupted(model, options):
    steps = []
    def first(*step):
        steps.append(step)
        if len(steps) == 3: threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT)).start()
    return build(model, options, progress=first, trt=trt, configure=for_ampere_and_later)

build_cli.build = interrupted
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start without
sys.exit(run(build_cli.build_command, "convpool-build", ["model.onnx", "-o", "m.engine", "--no-plugin", "--check", "0", "-q"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert (done.returncode, done.stderr.strip()) == (130, "convpool-build: interrupted")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_a_model_that_tensorrt_cannot_read_is_an_error_with_its_message():
    inputs, outputs = "float[1,4] x, string[1] s", "float[1,4] y, string[1] t"
    model = graph("m = Neg(x)\ny = Det(m)\nt = StringNormalizer(s)", inputs=inputs, outputs=outputs)
    with pytest.raises(ModelError, match="TensorRT .* cannot read the model; got "):
        build_engine(model, lowering="none", plugin=False, trt=trt)


def test_a_plugin_s_message_is_seen(plugin):
    """On stderr: the places of RTX's logger functions are written nowhere, so its logger is not called."""
    code = """
import sys
import tensorrt_rtx_bindings as trt
logger = trt.Logger(trt.Logger.VERBOSE)
runtime = trt.Runtime(logger)  # the process's logger, for the plugin to find
registry = trt.get_plugin_registry()
assert registry.load_library(sys.argv[1]) is not None
creator = registry.get_creator("ConvAvgPool", "1", "")
for phase in (trt.TensorRTPhase.BUILD, trt.TensorRTPhase.RUNTIME):
    assert creator.create_plugin("layer", trt.PluginFieldCollection([]), phase) is None
"""
    done = subprocess.run([sys.executable, "-c", code, plugin], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("convpool: createPlugin: pool_kernel_shape; got no such attribute, expected one on the node") == 2
