# SPDX-License-Identifier: Apache-2.0
"""Errors of `Engine` on wrong files, inputs or TensorRT; TensorRT and pycuda are played."""

import re
import types

import numpy as np
import onnx
import pytest

from convpool.check.session import OnnxruntimeRunner
from convpool.errors import OptionError, OutputError
from convpool.tensorrt import Engine, TensorRTError
from convpool.tensorrt import engine as engine_module
from convpool.tensorrt import runner as runner_module
from convpool.tensorrt.package import logger
from convpool.tensorrt.runner import EngineRunner, is_engine, open_runner
from tests.support.models import graph
from tests.support.played_engine import Played
from tests.support.rewriting import PAIR

X = np.ones((2, 3), np.float32)


def test_an_engine_s_file(tmp_path):
    path = tmp_path / "a.engine"
    Engine(b"the plan").save(path)
    assert path.read_bytes() == b"the plan" == Engine.load(path).plan
    missing = re.escape(f"engine {tmp_path / 'b.engine'}: cannot be read; No such file or directory")
    with pytest.raises(OptionError, match=f"^{missing}$"):
        Engine.load(tmp_path / "b.engine")
    nowhere = re.escape(f"{tmp_path / 'no' / 'a.engine'}: cannot be written; No such file or directory")
    with pytest.raises(OutputError, match=f"^{nowhere}$"):
        Engine(b"").save(tmp_path / "no" / "a.engine")


def test_a_file_is_an_engine_by_its_suffix(engine_of, tmp_path, monkeypatch):
    names = {"a.engine": True, "a.plan": True, "a.TRT": True, "a.onnx": False, "engine": False, "a.engine.onnx": False}
    assert {name: is_engine(name) for name in names} == names
    monkeypatch.setattr(runner_module.Engine, "load", lambda path: engine_of())
    assert isinstance(open_runner("a.plan"), EngineRunner)
    onnx.save(graph(PAIR), tmp_path / "a.onnx")
    runner = open_runner(str(tmp_path / "a.onnx"))
    assert isinstance(runner, OnnxruntimeRunner) and runner.output_names == ["y"]
    assert open_runner(str(tmp_path / "a.onnx"), layers=True).output_names == ["y", "h"]


def test_without_a_package_tensorrt_is_imported_once(driver, monkeypatch):
    asked = []
    monkeypatch.setattr(engine_module, "load_plugin", lambda trt: None)
    monkeypatch.setattr(engine_module, "tensorrt_module", lambda: asked.append(1) or Played(driver))
    engine = Engine(b"plan")
    for _ in range(2):
        assert engine.run({"x": X})["y"].tolist() == X.tolist()
    assert asked == [1]


def test_tensorrt_s_own_objects(engine_of):
    engine = engine_of()
    assert engine.handle is engine.context is engine._trt


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "engine: no value for input 'x'; got none"),
        ({"z": X}, "engine: no value for input 'x'; got z"),
        ({"x": X, "z": X}, "engine: no input 'z'; expected x"),
        ({"x": X[0]}, "input 'x': shape; got [3], expected [-1, 3]"),
        ({"x": X[:, :2]}, "input 'x': shape; got [2, 2], expected [-1, 3]"),
        ({"x": np.ones((5, 3), np.float32)}, "input 'x': shape; got [5, 3], expected [0, 3] to [4, 3]"),
    ],
)
def test_inputs_that_do_not_fit(engine_of, given, message):
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        engine_of().run(given)


def test_the_first_profile_that_fits_is_taken_once(engine_of):
    engine = engine_of()
    engine._trt.num_optimization_profiles = 2
    for rows in (4, 5, 8, 1):
        assert engine.run({"x": np.full((rows, 3), rows, np.float32)})["y"].shape == (rows, 3)
    assert engine._trt.profiles == [(1, 7), (0, 7)]
    with pytest.raises(OptionError, match=re.escape("got [9, 3], expected [5, 3] to [8, 3]")):
        engine.run({"x": np.ones((9, 3), np.float32)})


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ("runtime", "TensorRT: no runtime; got pybind11::init(): factory function returned nullptr"),
        ("engine", "engine: cannot be loaded by TensorRT 10.0.0; got"),
        ("context", "engine: no execution context; got no message"),
        ("run", "engine: the run failed; got no message"),
    ],
)
def test_what_tensorrt_cannot_do(engine_of, refused, message):
    engine = engine_of()
    engine._trt.refuse = refused
    with pytest.raises(TensorRTError, match=f"^{re.escape(message)}"):
        engine.run({"x": X})


def test_an_engine_that_cannot_be_loaded_without_the_plugin(engine_of, monkeypatch):
    def load_plugin(trt):
        raise TensorRTError("plugin library: not found")

    monkeypatch.setattr(engine_module, "load_plugin", load_plugin)
    assert np.array_equal(engine_of().run({"x": X})["y"], X)  # one without the plugin's layers
    engine = engine_of()
    engine._trt.refuse = "engine"
    with pytest.raises(TensorRTError, match="cannot be loaded by TensorRT 10.0.0; got plugin library: not found$"):
        engine.run({"x": X})


def test_an_output_whose_shape_the_data_say(engine_of):
    engine = engine_of()
    engine._trt.set_input_shape = lambda name, shape: True
    with pytest.raises(TensorRTError, match=re.escape("output 'y' has a shape that depends on the data: [-1, 3]")):
        engine.run({"x": X})


def test_outputs_that_stay_on_the_device(engine_of, driver):
    engine = engine_of()
    y = engine.run({"x": X}, on_device=True)["y"]
    assert bytes(driver.buffers[int(y)]) == X.tobytes()


def test_bound_inputs_are_run_on_the_engine_s_stream_or_the_caller_s(engine_of):
    engine = engine_of()
    assert engine.bind({"x": X}) == {"y": (2, 3)}
    engine.execute()
    engine.execute(types.SimpleNamespace(handle=11))
    assert engine._trt.streams == [7, 11]
    engine._trt.refuse = "run"
    with pytest.raises(TensorRTError, match="^engine: the run failed; got no message$"):
        engine.execute()


def test_only_errors_of_tensorrt_are_told(engine_of):
    trt = engine_of()._trt
    log, severity = logger(trt), trt.ILogger.Severity
    log.explain()
    for kind, text in ((severity.ERROR, "one"), (severity.WARNING, "two"), (severity.INTERNAL_ERROR, "three\nlines")):
        log.log(kind, text)
    assert log.explain("first") == "first | one | three lines"
    assert log.explain() == ""
    for number in range(6):
        log.log(severity.ERROR, str(number))
    assert log.explain() == "2 | 3 | 4 | 5"
