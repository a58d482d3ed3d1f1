# SPDX-License-Identifier: Apache-2.0
"""onnxruntime runs in another process: whatever a model does to it, the caller goes on and is told in one line."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import onnx
import pytest

import convpool
from convpool.check import session, session_process
from convpool.check.session import Session, fitted
from convpool.errors import ConvpoolError, ModelError
from convpool.ir.model import LoadedModel
from convpool.ir.process import EndedError, OtherProcess, Shared
from tests.support.models import graph, random_feeds, weights
from tests.support.rewriting import PAIR, POOL

CRASHING = """
import importlib.util, os, signal, sys
spec = importlib.util.spec_from_file_location("real", {real!r})
real = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real)
def crashing(name, usual):
    def method(self, *words):
        with open({log!r}, "a+") as log:
            print(name, file=log, flush=True)
            log.seek(0)
            number = sum(line.strip() == name for line in log)
        if name == {method!r} and number in {numbers!r}:
            os.kill(os.getpid(), signal.{signal})
        return usual(self, *words)
    return method
for name in ("make", "run", "turn"):
    setattr(real.Service, name, crashing(name, getattr(real.Service, name)))
real.PAUSE_S = real.TURN_S = 0
Service = real.Service
"""


@pytest.fixture
def crash(tmp_path, monkeypatch):
    """crash(method, numbers, signal) lets the process end at these calls of a method of `Service`; gives all calls so far."""
    real, log = session_process.__file__, tmp_path / "log"

    def crash(method: str, numbers, ending: str = "SIGSEGV"):
        log.write_text("")
        script = tmp_path / f"{method}.py"
        script.write_text(CRASHING.format(real=real, log=str(log), method=method, numbers=numbers, signal=ending))
        monkeypatch.setattr(session_process, "__file__", str(script))
        monkeypatch.setattr(session._shared, "process", None)
        return lambda: log.read_text().split()

    yield crash
    session._shared.end()


def ending(**options) -> str:
    """How the optimizer ends on a pair: "passed", with what is noted, or the exception."""
    try:
        found = convpool.optimize(graph(PAIR), **options).report
    except ConvpoolError as error:
        assert "\n" not in str(error)
        return f"{type(error).__name__}: {error}"
    assert found.verification.passed
    return " ".join(["passed", *found.verification.notes, *found.warnings])


STAGES = {
    ("make", 1): "passed onnxruntime ends the process with SIGSEGV on the original unless its graph optimisations are on",
    ("make", 2): "VerificationError: verification: onnxruntime loads the original, but not the result: it ends the process",
    ("make", 3): "passed",  # onnxruntime's own optimisations do not take the original
    ("make", 4): "VerificationError: verification: onnxruntime's graph optimisations, on by default, take the original, but",
    ("make", 5): "passed",  # the sessions are made again
    ("run", 1): "passed onnxruntime ends the process with SIGSEGV on the original unless its graph optimisations are on",
    ("run", 2): "VerificationError: verification: the original runs, but not the result: onnxruntime cannot run the result: it",
    ("run", 3): "passed",  # other inputs, by which constant outputs are found
    ("run", 4): "passed",
    ("run", 5): "VerificationError: verification: onnxruntime's graph optimisations, on by default, take the original, but",
    ("run", 6): "passed not timed: ",
    ("make", 6): "passed not timed: ",
    ("turn", 1): "passed not timed: onnxruntime cannot time the models: ends the process with SIGSEGV",
    ("turn", 9): "passed not timed: onnxruntime cannot time the models: ends the process with SIGSEGV",
}
SIGNALS = {("make", 1): "SIGABRT", ("run", 1): "SIGFPE", ("turn", 1): "SIGKILL"}
"""Other signals, each at a stage that tells of it."""
ENDS = [(*stage, "SIGSEGV") for stage in STAGES] + [(*stage, name) for stage, name in SIGNALS.items()]


@pytest.mark.parametrize(("method", "number", "signal_name"), ENDS)
def test_a_crash_at_each_stage(crash, capfd, method, number, signal_name):
    crash(method, [number], signal_name)
    assert ending(time=True).startswith(STAGES[method, number].replace("SIGSEGV", signal_name))
    assert ending() == "passed"  # the next one gets another process
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("method", "what"), [("make", "load"), ("run", "run")])
def test_an_original_that_always_ends_the_process(crash, method, what):
    crash(method, range(1, 100))
    reason = f"onnxruntime cannot {what} the original: it ends the process"
    assert ending() == f"ModelError: {reason} with SIGSEGV; check=0 (--no-check) skips the check"
    with pytest.raises(ModelError, match=reason):
        convpool.verify(graph(PAIR), graph(PAIR))
    assert convpool.optimize(graph(PAIR), check=0).changed


def test_autotune_keeps_its_plan_where_a_form_ends_the_process(crash):
    for method in ("make", "run", "turn"):
        crash(method, [2])
        found = convpool.optimize(graph(PAIR), autotune=True, check=0, time=False)
        assert found.changed and [site.times_us for site in found.report.sites] == [None]


def test_weights_whose_computing_ends_the_process_are_no_constants(crash):
    model = graph(PAIR.replace("w)", "v)").replace("h =", "v = Mul(w, w)\nh ="))
    assert convpool.optimize(model, check=0, lowering="fused").changed
    crash("run", [1])
    assert not convpool.optimize(model, check=0, lowering="fused").changed


LOOP = """body = loop (int64 it, bool cond, float[p,q,r,t] a) => (bool goes, float[p,q,r,t] b, float[p,q,r,t] s) {
  goes = Identity(cond) b = Add(a, a) s = Identity(a) }"""
BRANCHES = """then_branch = yes () => (float[p,q,r,t] one, float[p,q,r,t] two) { one = Identity(x) two = Neg(x) },
  else_branch = no () => (float[p,q,r,t] three, float[p,q,r,t] four) { three = Neg(x) four = Identity(x) }"""
NORM = {name: np.abs(weights((16,), seed)) + 0.5 for seed, name in enumerate(("g", "o", "mu", "va"))}
LEFT_OUT = {
    "BatchNormalization in front": ("a = BatchNormalization(x, g, o, mu, va)", ["a", "", "", "", ""], (7, 8, 9), NORM),
    "Split, first": ("a = Split<axis=0>(x)", ["", "a"], (11, 12), {}),
    "Split, last": ("a = Split<axis=0>(x)", ["a", ""], (11, 13), {}),
    "Split of a number, first": ("a = Split<axis=0, num_outputs=2>(x)", ["", "a"], (18, 21), {}),
    "Split of a number, last": ("a = Split<axis=0, num_outputs=2>(x)", ["a", ""], (18, 21), {}),
    "Dropout": ("a = Dropout(x)", ["a", ""], (7, 10, 12, 13), {}),
    "MaxPool": ("a = MaxPool<kernel_shape=[1,1]>(x)", ["a", ""], (8, 12, 17), {}),
    "LayerNormalization": ("a = LayerNormalization(x, l)", ["a", "", ""], (17,), {"l": (12,)}),
    "Unique": ("u = Unique(x)\nn = Size(u)\nf = Cast<to=1>(n)\na = Add(x, f)", ["u", "", "", ""], (17,), {}),
    "Loop, last": (f"a = Loop<{LOOP}>(trip, go, x)", ["a", ""], (13, 17), {"trip": np.array(2), "go": np.array(True)}),
    "Loop, first": (f"u = Loop<{LOOP}>(trip, go, x)\na = Squeeze(u, zero)", ["", "u"], (17,),
                    {"trip": np.array(1), "go": np.array(True), "zero": [0]}),
    "If, last": (f"a = If<{BRANCHES}>(go)", ["a", ""], (13, 17), {"go": np.array(True)}),
    "If, first": (f"a = If<{BRANCHES}>(go)", ["", "a"], (17,), {"go": np.array(True)}),
}  # fmt: skip
GIVEN = [(name, opsets if len(opsets) > 1 else opsets * 2) for name, (_, _, opsets, _) in LEFT_OUT.items()]
CASES = [(name, opset, target) for name, opsets in GIVEN for opset, target in zip(opsets, ("any", "cpu") * 2, strict=False)]


def left_out(name: str, opset: int) -> onnx.ModelProto:
    """A pair behind a node that leaves some of its outputs out by an empty name."""
    body, outputs, _, constants = LEFT_OUT[name]
    model = graph(f"{body}\n{PAIR.replace('(x,', '(a,')}", constants, opset=opset, inputs="float[2,16,12,12] x")
    model.graph.node[0].output[:] = outputs
    return model


@pytest.mark.parametrize(("name", "opset", "target"), CASES)
def test_outputs_that_are_left_out(name, opset, target):
    """onnxruntime ends its process on some of these, by its version; then the refusal says so."""
    model = left_out(name, opset)
    try:
        assert convpool.optimize(model, target=target).report.verification.passed
    except ModelError as error:
        assert "onnxruntime cannot" in str(error) and str(error).endswith("check=0 (--no-check) skips the check")
    found = convpool.optimize(model, target=target, check=0)
    assert found.changed and found.report.summary.rewritten == 1


@pytest.mark.parametrize(("lowering", "opset"), [("convavgpool", 7), ("direct", 8), ("fused", 9), *product(["auto"], (7, 8, 9))])
def test_a_model_that_runs_as_by_default_is_compared_so(lowering, opset):
    """onnxruntime folds the normalisation into the convolution, and ends the process where it may not."""
    model = graph(f"c = Conv<pads=[1,1,1,1]>(x, w)\nn = BatchNormalization(c, g, o, mu, va)\ny = {POOL}(n)",
                  {name: np.tile(array, 2) for name, array in NORM.items()}, opset=opset)  # fmt: skip
    model.graph.node[1].output[:] = ["n", "", "", "", ""]
    assert convpool.optimize(model, lowering=lowering).report.verification.passed
    assert convpool.verify(model, model).passed


# ---- the sessions themselves --------------------------------------------------------------------------------------------


def made(body: str = "y = Mul(x, k)", *, factor: float = 2, **options) -> Session:
    model = graph(body, {"k": np.float32(factor)}, inputs="float[a] x", outputs="float[b] y")
    return Session(LoadedModel(model, None, 0), **{"optimize": False, **options})


X = {"x": np.arange(3, dtype=np.float32)}


def test_sessions_are_those_of_onnxruntime():
    model = graph(PAIR)
    feeds = random_feeds(model)
    for options in ({"optimize": False}, {"optimize": True, "threads": 1, "spin": True}):
        here = session_process.open_session(model.SerializeToString(), None, **options)
        there = Session(LoadedModel(model, None, 0), **options)
        assert list(there.inputs.items()) == [(i.name, i.type) for i in here.get_inputs()]
        assert there.outputs == [i.name for i in here.get_outputs()]
        np.testing.assert_array_equal(there.run(None, feeds)[0], here.run(None, feeds)[0])
        assert there.turn(feeds) > 0


def test_values_of_all_kinds_come_back():
    for array in (np.zeros((0, 3), np.float32), np.float32(3), np.asfortranarray(weights((3, 4))), weights((8, 4))[::2, ::-1]):
        shape = ",".join(map(str, np.shape(array)))
        model = graph("y = Identity(x)", inputs=f"float[{shape}] x", outputs=f"float[{shape}] y")
        (found,) = Session(LoadedModel(model, None, 0), optimize=False).run(None, {"x": np.asarray(array)})
        np.testing.assert_array_equal(found, array)
        found[...] = 0  # it may be written to
    words = graph("y = Identity(x)", inputs="string[2] x", outputs="string[2] y")
    (found,) = Session(LoadedModel(words, None, 0), optimize=False).run(["y"], {"x": np.array(["a", "bc"], object)})
    assert found.tolist() == ["a", "bc"]


def test_a_session_goes_on_in_the_next_process():
    first, second = made(), made(factor=3)
    session._shared.process._process.kill()
    with pytest.raises(EndedError, match="^ends the process with SIGKILL$"):
        second.run(None, X)
    for _ in range(2):
        assert (first.run(None, X)[0].tolist(), second.run(None, X)[0].tolist()) == ([0, 2, 4], [0, 3, 6])


def test_what_onnxruntime_refuses_leaves_the_process():
    found, place = made(), session._shared.process
    with pytest.raises(RuntimeError, match="are missing"):
        found.run(None, {"z": X["x"]})
    with pytest.raises(RuntimeError):
        made("y = Mul(x, unknown)")
    assert found.run(None, X)[0].tolist() == [0, 2, 4] and session._shared.process is place


def test_sessions_are_forgotten(monkeypatch):
    asked, usual = [], OtherProcess._exchange
    monkeypatch.setattr(OtherProcess, "_exchange", lambda self, words, *more: asked.append(words[0]) or usual(self, words, *more))
    made().run(None, X)
    gc.collect()
    assert asked == ["make", "run", "drop"]
    held = made()
    with session._shared.lock:  # as within a request
        del held
        gc.collect()
    assert asked[3:] == ["make"]
    made().run(None, X)
    assert asked[4:] == ["drop", "make", "run", "drop"]


def test_threads_share_the_process():
    def work(factor: int) -> list[list[float]]:
        mine = made(factor=factor)
        return [mine.run(None, X)[0].tolist() for _ in range(20)]

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(work, range(6))) == [[[0, factor, 2 * factor]] * 20 for factor in range(6)]


def test_a_forked_process_starts_one_of_its_own(monkeypatch):
    kept, place = made(), session._shared.process
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        assert kept.run(None, X)[0].tolist() == [0, 2, 4] and session._shared.process is not place
        session._shared.end()
    monkeypatch.setattr(session._shared, "process", place)
    assert made().run(None, X)[0].tolist() == [0, 2, 4]


@pytest.mark.parametrize("python", ["", "/nowhere/python", "/bin/true"])
def test_where_one_was_started_and_no_other_can_be_nothing_runs_here(monkeypatch, python):
    """The model that ended the process would end this one."""
    made()
    session._shared.end()
    with monkeypatch.context() as without:
        without.setattr(sys, "executable", python)
        with pytest.raises(ModelError, match="onnxruntime cannot load .* has no process: "):
            convpool.optimize(graph(PAIR), lowering="direct")
    assert made().run(None, X)[0].tolist() == [0, 2, 4]


@pytest.mark.parametrize("python", ["", "/nowhere/python", "/bin/true"])
def test_where_no_process_can_be_started_models_run_here(monkeypatch, python):
    monkeypatch.setattr(session, "_shared", Shared(session_process, list))
    monkeypatch.setattr(session, "_here", None)
    for name in ("PAUSE_S", "TURN_S"):
        monkeypatch.setattr(session_process, name, 0)
    monkeypatch.setattr(sys, "executable", python)
    found = convpool.optimize(graph(PAIR), lowering="direct", time=True)
    assert found.report.verification.passed and found.report.speed is not None and session._shared.process is None
    gc.collect()
    assert not session._here._made


@pytest.mark.parametrize("stage", ["make", "run"])
def test_ctrl_c_ends_the_process(crash, stage):
    log, main = crash(stage, [1], "SIGSTOP"), threading.get_ident()  # nothing comes back
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell starts the tests with &

    def press() -> None:
        while stage not in log():
            time.sleep(0.01)
        while not session._shared.process.gone:  # Python drops one that comes within a destructor
            signal.pthread_kill(main, signal.SIGINT)
            for _ in range(500):
                time.sleep(0 if session._shared.process.gone else 0.01)

    presser = threading.Thread(target=press)
    presser.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            made().run(None, X)
        presser.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert session._shared.process.gone and session._shared.process._process.returncode == -signal.SIGKILL
    assert made().run(None, X)[0].tolist() == [0, 2, 4]


def test_the_process_ends_with_its_parent_in_the_middle_of_a_run(tmp_path):
    """A Loop of 2^62 rounds.  The process has ten minutes to end."""
    model = graph(f"a = Loop<{LOOP}>(trip, go, x)\n{PAIR.replace('(x,', '(a,')}", {"trip": np.array(2**62), "go": np.array(True)})
    model.graph.node[0].output[:] = ["a", "s"]
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    code = f"""
import os, signal, threading, convpool
from convpool.check import session
def end():
    while session._shared.process is None or not session._shared.process._ready:
        pass
    print(session._shared.process._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=end).start()
convpool.optimize({str(path)!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    for _ in range(12000):
        if not os.path.exists(f"/proc/{int(done.stdout)}/exe"):
            return
        time.sleep(0.05)
    raise AssertionError("it goes on")


def test_floats_have_the_type_of_the_session_s_input():
    half = np.ones(2, np.float16)
    types = {"x": "tensor(float)", "h": "tensor(float16)", "d": "tensor(double)", "n": "tensor(int64)"}
    found = fitted(types, dict.fromkeys(types, half))
    assert found["x"].dtype == np.float32 and found["d"].dtype == np.float64 and found["h"] is half and found["n"] is half
