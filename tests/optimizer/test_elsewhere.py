# SPDX-License-Identifier: Apache-2.0
"""Models on which onnx's shape inference ends or blocks the process are refused in one line."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import onnx
import pytest

import convpool
from convpool.errors import ModelError
from convpool.ir import elsewhere, inference_process
from convpool.ir.elsewhere import EndedError, infer
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
            raise ValueError("wrong with it")
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
        return b"<" + model + b">"
"""


@pytest.fixture
def pretended(tmp_path, monkeypatch):
    """A process that does what the request says."""
    path = tmp_path / "module.py"
    path.write_text(Module.source)
    monkeypatch.setattr(elsewhere.onnx_cpp2py_export, "__file__", str(path))
    monkeypatch.setattr(elsewhere, "_running", None)
    monkeypatch.setattr(elsewhere, "ANSWER_S", 1)
    yield
    elsewhere._end()


def outcome(model: bytes) -> bytes | str | None:
    try:
        return infer(model)
    except EndedError as error:
        return str(error)


ENDS = {
    b"SIGABRT": "ends the process with SIGABRT",
    b"SIGSEGV": "ends the process with SIGSEGV",
    b"SIGFPE": "ends the process with SIGFPE",
    b"status": "ends the process with status 7",
    b"for ever": "does not end",
    b"stops": "does not end",
    b"memory": "takes more than 2 GiB of memory",
}


@pytest.mark.parametrize("model", ENDS)
def test_what_a_model_does_to_its_process(pretended, capfd, model):
    assert [outcome(each) for each in (b"good", model, b"good", model)] == [b"<good>", ENDS[model], b"<good>", ENDS[model]]
    assert capfd.readouterr() == ("", "")


def test_a_model_has_so_much_time_and_memory_beside_what_the_process_has(monkeypatch):
    limits = {}
    monkeypatch.setattr(inference_process, "limit", limits.__setitem__)
    module = SimpleNamespace(shape_inference=SimpleNamespace(infer_shapes=lambda *given: given))
    assert inference_process.infer(module, b"model") == (inference_process.DONE, (b"model", False, False, True))
    with open("/proc/self/statm") as memory:
        own = int(memory.read().split()[0]) * resource.getpagesize()
    assert abs(limits[resource.RLIMIT_AS] - own - inference_process.GROWTH_BYTES - 5 * inference_process.COPIES) < 2**26
    assert inference_process.GROWTH_BYTES == 2**31  # as the message says
    used = resource.getrusage(resource.RUSAGE_SELF)
    assert abs(limits[resource.RLIMIT_CPU] - used.ru_utime - used.ru_stime - inference_process.CPU_S) < 2


def test_a_limit_is_no_higher_than_the_hard_one(monkeypatch):
    told = []
    for hard, wanted in ((resource.RLIM_INFINITY, 100), (50, 50), (200, 100)):
        monkeypatch.setattr(resource, "getrlimit", lambda what, hard=hard: (0, hard))
        monkeypatch.setattr(resource, "setrlimit", lambda what, values: told.append(values))
        inference_process.limit(resource.RLIMIT_CPU, 100)
        assert told.pop() == (wanted, hard)


@pytest.mark.parametrize("source", ["import time; time.sleep(60)", "raise SystemExit"])
def test_a_process_that_does_not_start(tmp_path, monkeypatch, source):
    (tmp_path / "module.py").write_text(source)
    monkeypatch.setattr(elsewhere.onnx_cpp2py_export, "__file__", str(tmp_path / "module.py"))
    monkeypatch.setattr(elsewhere, "START_S", 0.3)
    started = []
    start = subprocess.Popen
    monkeypatch.setattr(elsewhere.subprocess, "Popen", lambda *given, **more: started.append(start(*given, **more)) or started[0])
    with pytest.raises(OSError, match="^the process for shape inference does not start$"):
        elsewhere.InferenceProcess()
    assert started[0].returncode is not None


def test_one_process_serves_all_models_and_ends(pretended):
    assert infer(b"x" * 10**7) == b"<" + b"x" * 10**7 + b">"
    process = elsewhere._running._process
    with pytest.raises(onnx.shape_inference.InferenceError, match="^wrong with it$"):
        infer(b"fails")
    assert infer(b"") == b"<>" and elsewhere._running._process is process
    elsewhere._end()
    assert process.returncode == 0


def test_threads_ask_in_turn(pretended):
    found = []
    asked = [b"good", b"SIGABRT"] * 4
    threads = [threading.Thread(target=lambda model=model: found.append((model, outcome(model)))) for model in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found, key=str) == [(b"SIGABRT", ENDS[b"SIGABRT"])] * 4 + [(b"good", b"<good>")] * 4


def test_a_forked_process_starts_one_of_its_own(pretended, monkeypatch):
    assert infer(b"good") == b"<good>"
    first = elsewhere._running
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert outcome(b"SIGABRT") == ENDS[b"SIGABRT"]
    monkeypatch.undo()
    assert first.ask(b"good") == b"<good>"
    first.end()


@pytest.mark.parametrize("python", ["", "/nowhere/python", "/bin/true"])
def test_where_no_process_can_be_started_inference_is_done_here(pretended, monkeypatch, python):
    monkeypatch.setattr(sys, "executable", python)
    assert infer(b"SIGABRT") is None
    result = convpool.optimize(graph(PAIR), lowering="direct")
    assert result.changed and result.report.verification.passed


@pytest.mark.parametrize("size", [0, 1, 3])
def test_an_answer_may_come_in_parts(size):
    there, here = os.pipe()
    process = elsewhere.InferenceProcess.__new__(elsewhere.InferenceProcess)
    process._process = SimpleNamespace(stdout=open(there, "rb", buffering=0))
    writing = threading.Thread(target=lambda: [os.write(here, b"a"), time.sleep(0.05), os.write(here, b"bc"), os.close(here)])
    writing.start()
    assert process._read(size, time.monotonic() + 20) == b"abc"[:size]
    assert process._read(5, time.monotonic() + 20) == b"abc"[size:]  # the pipe has ended
    writing.join()
    process._process.stdout.close()


def test_ctrl_c_ends_the_process(pretended, monkeypatch):
    assert infer(b"good") == b"<good>"
    process = elsewhere._running._process

    def interrupted(self, count, until):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(elsewhere.InferenceProcess, "_read", interrupted)
        infer(b"stops")
    assert process.returncode == -signal.SIGKILL and infer(b"good") == b"<good>"


def test_the_process_ends_with_a_program_that_is_killed(tmp_path):
    code = """
import os, signal
from convpool.ir import elsewhere
try:
    elsewhere.infer(b"")
except Exception:
    pass
print(elsewhere._running._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    for _ in range(200):
        if not os.path.exists(f"/proc/{int(done.stdout)}/exe"):
            break
        time.sleep(0.05)
    else:
        raise AssertionError("it goes on")


@pytest.mark.parametrize(
    ("seed", "lowering"),
    [
        (5010615, "fused"),  # a Slice of a size below zero: an assertion of onnx 1.21 to 1.23
        (5017565, "direct"),
        (8108758, "fused"),  # likewise, once the Slice's step is known, which is an Identity's
        (10100602, "fused"),  # strides of fewer axes: onnx 1.19 divides by what lies behind them
        (10101242, "fused"),  # a Conv of another rank in a branch: an assertion of onnxruntime 1.21
    ],
)
def test_models_that_ended_the_process(seed, lowering, tmp_path):
    """A result or a refusal, by onnx's version."""
    path = tmp_path / "model.onnx"
    path.write_bytes(damaged(seed))
    code = f"""
import convpool
try:
    print(convpool.optimize({str(path)!r}, lowering={lowering!r}).changed)
except convpool.ConvpoolError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 1)


def test_sizes_beyond_memory():
    """Each Concat doubles a tensor of sizes, whose values onnx follows."""
    doubled = "\n".join(f"s{i + 1} = Concat<axis=0>(s{i}, s{i})" for i in range(40))
    model = graph(f"s0 = Shape(x)\n{doubled}\nz = ReduceSum(s40)\n{PAIR}", outputs="float[a,b,c,d] y, int64[e] z")
    with pytest.raises(ModelError, match="^the model is not valid ONNX: shape inference of onnx .* takes "):
        convpool.optimize(model)


def test_no_inference_is_done_here_and_none_with_the_weights(monkeypatch):
    asked, ask = [], elsewhere.infer
    monkeypatch.setattr(elsewhere, "infer", lambda model: asked.append(len(model)) or ask(model))
    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", lambda *_, **given: pytest.fail("inferred here"))
    assert convpool.optimize(graph(PAIR), check=0, lowering="direct").changed
    assert asked and 0 < max(asked) < 2000


def test_results_are_those_of_this_process():
    """Also through functions, convpool's own among them, whose schemas onnx knows here and not there."""
    functions = '\n<domain: "local", opset_import: ["" : 17]>\nf (a) => (b) { b = Relu(a) }\n'
    original = graph(f"r = local.f(x)\n{PAIR.replace('(x,', '(r,')}\nz = Shape(y)", functions=functions, imports=', "local": 1',
                     outputs="float[a,b,c,d] y, int64[e] z")  # fmt: skip
    for model in (original, convpool.optimize(original, check=0).model):
        assert elsewhere.infer_elsewhere(model) == onnx.shape_inference.infer_shapes(model, data_prop=True)


def test_a_model_is_refused_in_words(monkeypatch):
    def ends(model):
        raise EndedError("ends the process with SIGFPE")

    monkeypatch.setattr(elsewhere, "infer", ends)
    with pytest.raises(ModelError, match="^the model is not valid ONNX: shape .* ends the process with SIGFPE$"):
        convpool.optimize(graph(PAIR))
    with pytest.raises(ModelError):
        convpool.verify(graph(PAIR), graph(PAIR))
