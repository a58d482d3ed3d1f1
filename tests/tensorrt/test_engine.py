# SPDX-License-Identifier: Apache-2.0
"""`Engine` without a GPU: pycuda and TensorRT are played, to see what they are told and what becomes of refusals."""

import gc
import re
import subprocess
import sys
import threading
import time
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import onnx
import pytest

from convpool.check.session import OnnxruntimeRunner
from convpool.cli.verify import open_runner
from convpool.cuda import ArrayError
from convpool.errors import OptionError, OutputError
from convpool.tensorrt import Engine, TensorRTError, load_plugin
from convpool.tensorrt import engine as engine_module
from convpool.tensorrt.engine import EngineRunner, PycudaMemory, is_engine
from tests.support.models import graph
from tests.support.played_engine import PYCUDA, ILogger, Played, TensorFormat, TensorLocation
from tests.support.rewriting import PAIR


class Array:
    """An array on the GPU."""

    def __init__(self, typestr: str = "<f4", shape: tuple[int, ...] = (2, 3)) -> None:
        self.__cuda_array_interface__ = {"shape": shape, "typestr": typestr, "data": (4096, False), "version": 3}


def in_a_thread(body) -> None:
    """Run it in a thread of its own, which has ended then."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(body).result()


def test_a_thread_leaves_no_context_behind(driver):
    """pycuda would end the process."""
    seen = []

    def body():
        kept = [PycudaMemory(), PycudaMemory()]
        seen.append((threading.get_ident(), len(driver.stacks[threading.get_ident()])))
        assert kept

    for _ in range(2):
        in_a_thread(body)
    assert [depth for _, depth in seen] == [1, 1]
    assert all(not driver.stacks[thread] for thread, _ in seen)


def test_a_context_of_the_caller_s_is_used_and_stays(driver):
    depths = []

    def body():
        driver.Context(1).push()
        for device in (None, 1):
            PycudaMemory(device)
        with pytest.raises(TensorRTError, match="CUDA device 0: cannot be used; got a context of another device"):
            PycudaMemory(0)
        gc.collect()
        depths.append(len(driver.stacks[threading.get_ident()]))

    in_a_thread(body)
    assert depths == [1] and [len(stack) for stack in driver.stacks.values()] == [1]


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # as what __del__ raises becomes
def test_a_context_that_the_caller_pops_is_no_error_at_the_end(driver):
    def body():
        PycudaMemory()
        driver.Context.pop()
        PycudaMemory()

    in_a_thread(body)
    assert [len(stack) for stack in driver.stacks.values()] == [0]


def test_the_main_thread_s_context_is_popped_at_exit():
    code = f"""
import types, sys
driver = types.ModuleType("pycuda.driver"); exec({PYCUDA!r}, driver.__dict__)
package = types.ModuleType("pycuda"); package.driver = driver
sys.modules.update({{"pycuda": package, "pycuda.driver": driver}})
import atexit
atexit.register(lambda: print(*map(len, driver.stacks.values())))
from convpool.tensorrt.engine import PycudaMemory
memory = PycudaMemory()
print(*map(len, driver.stacks.values()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["1", "0"], "")


def test_threads_register_the_plugin_once(plugin, monkeypatch):
    """A second registration of the same names is an error to TensorRT."""
    registered, barrier = [], threading.Barrier(4)

    class Registry:
        def load_library(self, path):
            time.sleep(0.05)
            registered.append(path)

        def get_creator(self, name, version, namespace):
            if not registered:
                time.sleep(0.01)
            return name if registered else None

    trt = types.SimpleNamespace(__name__="threads", __version__="10.0.0", get_plugin_registry=Registry, ILogger=ILogger)
    monkeypatch.setenv("CONVPOOL_PLUGIN_LIBRARY", str(plugin))

    def body(_):
        barrier.wait()
        return str(load_plugin(trt))

    with ThreadPoolExecutor(4) as threads:
        paths = list(threads.map(body, range(4)))
    assert registered == [str(plugin)] and paths == [str(plugin)] * 4


@pytest.mark.parametrize("batch", [0, 1, 4])
def test_runs_hand_over_what_they_are_given(engine_of, batch):
    x = np.arange(batch * 6, dtype=np.float64).reshape(batch, 6)[:, ::2]  # not contiguous, and of another type
    y = engine_of().run({"x": x})["y"]
    assert y.dtype == np.float32 and np.array_equal(y, x)


def test_a_scalar_stays_one(engine_of):
    y = engine_of(shape=()).run({"x": 2.5})["y"]
    assert y.shape == () and y == 2.5


def test_integers_are_narrowed_only_where_they_fit(engine_of):
    engine = engine_of(dtype="INT32")
    assert np.array_equal(engine.run({"x": np.array([[1, -2, 3]])})["y"], [[1, -2, 3]])
    assert np.array_equal(engine.run({"x": np.array([[True, False, True]])})["y"], [[1, 0, 1]])
    with pytest.raises(OptionError, match="input 'x': values; got int64 ones that int32 does not hold"):
        engine.run({"x": np.array([[1, 2**32 + 2, 3]])})
    with pytest.raises(OptionError, match="input 'x': type; got float64, expected int32"):
        engine.run({"x": np.zeros((1, 3))})


def test_gpu_arrays_live_until_others_take_their_place(engine_of):
    engine, arrays = engine_of(), [Array(), Array(), Array()]
    alive = [weakref.ref(array) for array in arrays]
    engine.bind({"x": arrays[0]})
    engine.point({"x": arrays[1]})
    assert engine._trt.addresses["x"] == 4096
    del arrays[:2]
    gc.collect()
    assert [reference() is not None for reference in alive] == [False, True, True]
    engine.bind({"x": arrays.pop()})
    gc.collect()
    assert [reference() is not None for reference in alive] == [False, False, True]


def test_pycuda_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "pycuda", None)
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    with pytest.raises(TensorRTError, match="pycuda: cannot be imported; got .*; pip install pycuda"):
        PycudaMemory()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": Array("<f2")}, "input 'x': type; got float16, expected float32"),
        ({"x": Array(shape=(5, 3))}, r"input 'x': shape; got \[5, 3\], expected \[2, 3\], as bound"),
        ({"z": Array()}, "engine: no input 'z'; expected x"),
        ({"x": np.zeros((2, 3), np.float32)}, "x: not in GPU memory; got DLPack device type 1, expected CUDA"),
    ],
)
def test_arrays_of_the_next_run_are_of_the_bound_shape_and_type(engine_of, inputs, message):
    """The engine would read their bytes as they are."""
    engine = engine_of()
    engine.bind({"x": Array()})
    with pytest.raises((OptionError, ArrayError), match=message):
        engine.point(inputs)
    with pytest.raises(OptionError, match="input 'x': type; got float16, expected float32"):
        engine.bind({"x": Array("<f2")})
    assert engine._trt.addresses["x"] == 4096


def test_memory_that_is_no_plain_array_is_refused(engine_of):
    with pytest.raises(TensorRTError, match="engine: tensor 'x': got one in host memory"):
        engine_of(location=TensorLocation.HOST).run({"x": np.ones((2, 3), np.float32)})
    padded = "engine: tensor 'x': format HWC8; got shape .*, which it pads, expected a multiple of 8 in dimension 1"
    for channels in (12, -1):
        with pytest.raises(TensorRTError, match=padded):
            engine_of(shape=(-1, channels), order=TensorFormat.HWC8).inputs  # noqa: B018
    dense = engine_of(shape=(-1, 16), order=TensorFormat.HWC8)
    assert dense.inputs["x"].format == "HWC8"
    with pytest.raises(OptionError, match="engine: tensor 'x'; got format HWC8, expected LINEAR to compare"):
        EngineRunner(dense)


def test_a_type_that_numpy_lacks_is_an_error(engine_of):
    with pytest.raises(TensorRTError, match="engine: tensor 'x': type; got FP8, expected FLOAT, "):
        engine_of(dtype="FP8").inputs  # noqa: B018


@pytest.mark.parametrize("kind", ["FLOAT", "HALF", "BF16", "INT8", "INT32", "INT64", "BOOL", "UINT8"])
def test_every_other_type_goes_through(engine_of, driver, kind):
    engine = engine_of(dtype=kind)
    x = np.array([[0, 1, 1]]).astype(engine.inputs["x"].dtype)
    y = engine.run({"x": x})["y"]
    assert y.dtype == x.dtype and np.array_equal(y, x)
    assert len(driver.buffers[engine._trt.addresses["y"]]) == x.nbytes


def test_failures_of_the_gpu_are_typed(engine_of, driver):
    engine = engine_of()
    engine.run({"x": np.ones((2, 3), np.float32)})
    driver.broken.append(True)
    with pytest.raises(TensorRTError, match="GPU memory: 24 bytes cannot be copied from the GPU; got an illegal"):
        engine.run({"x": np.ones((2, 3), np.float32)})


def test_waiting_waits_for_the_stream_and_tells_of_failures(driver):
    waited = []
    stream = types.SimpleNamespace(synchronize=lambda: waited.append("the caller's"))

    def body():
        memory = PycudaMemory()
        memory.synchronize(stream)
        memory.synchronize(None)
        driver.broken.append(True)
        with pytest.raises(TensorRTError, match="^GPU: the engine's work failed; got an illegal memory access"):
            memory.synchronize(None)

    in_a_thread(body)
    assert waited == ["the caller's"]


def test_a_device_that_is_not_there(driver):
    def body():
        with pytest.raises(TensorRTError, match="CUDA device 5: cannot be used; got invalid device ordinal"):
            PycudaMemory(5)

    in_a_thread(body)


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
    monkeypatch.setattr(Engine, "load", lambda path: engine_of())
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
        ("shape", "engine: tensor 'x': shape [2, 3] is refused; got"),  # it would run on with the one of before
        ("address", "engine: tensor 'x': address 0x"),
    ],
)
def test_what_tensorrt_cannot_do(engine_of, refused, message):
    engine = engine_of()
    if refused in ("shape", "address", "run"):
        engine.run({"x": X})
    engine._trt.refuse = refused
    with pytest.raises(TensorRTError, match=f"^{re.escape(message)}"):
        engine.run({"x": X})


def test_an_engine_that_cannot_be_loaded_without_the_plugin(engine_of, monkeypatch):
    monkeypatch.setattr(engine_module, "load_plugin", Mock(side_effect=TensorRTError("plugin library: not found")))
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
    for stream in (None, types.SimpleNamespace(handle=12, synchronize=lambda: None)):
        engine.run({"x": X}, stream=stream)
    assert engine._trt.streams == [7, 11, 7, 12]
    engine._trt.refuse = "run"
    with pytest.raises(TensorRTError, match="^engine: the run failed; got no message$"):
        engine.execute()
