# SPDX-License-Identifier: Apache-2.0
"""Models on which onnx's shape inference ends or blocks the process are refused in one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import onnx
import pytest

import convpool
from convpool.errors import ModelError
from convpool.ir import rehearsal
from convpool.ir.rehearsal import rehearse
from tests.support.damage import damaged
from tests.support.models import graph

PAIR = "h = Conv<pads=[1,1,1,1]>(x, w)\ny = AveragePool<kernel_shape=[2,2], strides=[2,2]>(h)"


class Module:
    """In place of onnx's C++ module, in the other process."""

    source = """
import os, signal
class shape_inference:
    def infer_shapes(model, *_):
        if model == b"fails":
            raise ValueError
        if model == b"stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        if model == b"for ever":
            os.kill(os.getpid(), signal.SIGXCPU)
        if model == b"memory":
            bytearray(2**62)
        if model == b"status":
            os._exit(7)
        if model in (b"SIGABRT", b"SIGSEGV", b"SIGFPE"):
            os.write(2, b"text")
            os.kill(os.getpid(), getattr(signal, model.decode()))
"""


@pytest.fixture
def pretended(tmp_path, monkeypatch):
    """A process that does what the request says."""
    path = tmp_path / "module.py"
    path.write_text(Module.source)
    monkeypatch.setattr(rehearsal.onnx_cpp2py_export, "__file__", str(path))
    monkeypatch.setattr(rehearsal, "_running", None)
    monkeypatch.setattr(rehearsal, "ANSWER_S", 1)
    yield
    rehearsal._end()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (b"nothing", None),
        (b"fails", None),
        (b"SIGABRT", "ends the process with SIGABRT"),
        (b"SIGSEGV", "ends the process with SIGSEGV"),
        (b"SIGFPE", "ends the process with SIGFPE"),
        (b"status", "ends the process with status 7"),
        (b"for ever", "does not end"),
        (b"stops", "does not end"),
        (b"memory", "takes more than 2 GiB of memory"),
    ],
)
def test_what_a_model_does_to_its_process(pretended, capfd, model, expected):
    assert [rehearse(each) for each in (b"nothing", model, b"nothing", model)] == [None, expected, None, expected]
    assert capfd.readouterr() == ("", "")


def test_one_process_serves_all_models_and_ends(pretended):
    assert rehearse(b"x" * 10**7) is None
    process = rehearsal._running._process
    assert rehearse(b"") is None and rehearsal._running._process is process
    rehearsal._end()
    assert process.returncode == 0


def test_threads_ask_in_turn(pretended):
    found = []
    asked = [b"nothing", b"SIGABRT"] * 4
    threads = [threading.Thread(target=lambda model=model: found.append((model, rehearse(model)))) for model in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found, key=str) == [(b"SIGABRT", "ends the process with SIGABRT")] * 4 + [(b"nothing", None)] * 4


def test_a_forked_process_starts_one_of_its_own(pretended, monkeypatch):
    assert rehearse(b"nothing") is None
    first = rehearsal._running
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert rehearse(b"SIGABRT") == "ends the process with SIGABRT"
    monkeypatch.undo()
    assert first.ask(b"nothing") is None
    first.end()


@pytest.mark.parametrize("python", ["", "/nowhere/python", "/bin/true"])
def test_no_process_can_be_started(pretended, monkeypatch, python):
    monkeypatch.setattr(sys, "executable", python)
    assert rehearse(b"SIGABRT") is None


def test_ctrl_c_ends_the_process(pretended, monkeypatch):
    assert rehearse(b"nothing") is None
    process = rehearsal._running._process

    def interrupted(self, until):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(rehearsal.InferenceProcess, "_answer", interrupted)
        rehearse(b"stops")
    assert process.returncode == -signal.SIGKILL and rehearse(b"nothing") is None


def test_the_process_ends_with_a_program_that_is_killed(tmp_path):
    code = """
import os, signal
from convpool.ir import rehearsal
rehearsal.rehearse(b"")
print(rehearsal._running._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    for _ in range(200):
        if not os.path.exists(f"/proc/{int(done.stdout)}/exe"):
            break
        time.sleep(0.05)
    else:
        raise AssertionError("it goes on")


@pytest.mark.parametrize("seed", [5010615, 5017565])  # Slice of sizes below zero: an assertion of onnx 1.21 to 1.23
def test_onnx_ends_the_process(seed, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(damaged(seed))
    with pytest.raises(ModelError):
        convpool.optimize(path)


def test_sizes_beyond_memory():
    """Each Concat doubles a tensor of sizes, whose values onnx follows."""
    doubled = "\n".join(f"s{i + 1} = Concat<axis=0>(s{i}, s{i})" for i in range(40))
    model = graph(f"s0 = Shape(x)\n{doubled}\nz = ReduceSum(s40)\n{PAIR}", outputs="float[a,b,c,d] y, int64[e] z")
    with pytest.raises(ModelError, match="^the model is not valid ONNX: shape inference of onnx .* takes "):
        convpool.optimize(model)


def test_a_value_that_a_pass_makes_known_is_rehearsed(tmp_path):
    """The step of a Slice of a size below zero is an Identity's, which convpool folds."""
    path = tmp_path / "model.onnx"
    path.write_bytes(damaged(8108758))
    with pytest.raises(ModelError):
        convpool.optimize(path, lowering="fused")


def test_every_inference_is_rehearsed_without_the_weights(monkeypatch):
    asked, inferred = [], []
    infer = onnx.shape_inference.infer_shapes
    monkeypatch.setattr(rehearsal, "rehearse", asked.append)
    monkeypatch.setattr(
        onnx.shape_inference, "infer_shapes", lambda model, **given: inferred.append(model) or infer(model, **given)
    )
    assert convpool.optimize(graph(PAIR), check=0).changed
    assert [model.SerializeToString() for model in inferred] == asked and 0 < len(asked[0]) < 2000


def test_a_model_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(rehearsal, "rehearse", lambda model: "ends the process with SIGFPE")
    with pytest.raises(ModelError, match="^the model is not valid ONNX: shape .* ends the process with SIGFPE$"):
        convpool.optimize(graph(PAIR))
    with pytest.raises(ModelError):
        convpool.verify(graph(PAIR), graph(PAIR))
