# SPDX-License-Identifier: Apache-2.0
"""Models on which onnx's shape inference ends or blocks the process are refused in one line."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
from onnx import TensorProto, helper

import convpool
from convpool.errors import ModelError
from convpool.ir import model as models
from convpool.ir import rehearsal
from convpool.ir.rehearsal import rehearse
from tests.support.damage import damaged
from tests.support.models import graph

PAIR = "h = Conv<pads=[1,1,1,1]>(x, w)\ny = AveragePool<kernel_shape=[2,2], strides=[2,2]>(h)"


def forever():
    while True:
        pass


def fails():
    raise ValueError


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (lambda: None, None),
        (fails, None),
        (lambda: os._exit(1), None),
        (os.abort, "ends the process with SIGABRT"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "ends the process with SIGSEGV"),
        (forever, "takes longer than 1 s"),
        (lambda: np.empty(2**32, np.uint8), "takes more than 2 GiB of memory"),
    ],
)
def test_what_an_action_does_to_its_process(monkeypatch, action, expected):
    monkeypatch.setattr(rehearsal, "CPU_S", 1)
    assert rehearse(action) == expected


def test_it_may_copy_what_it_works_on():
    assert rehearse(lambda: np.empty(2**32, np.uint8), 2**30) is None


def test_it_says_nothing_and_changes_nothing(capfd):
    changed = []

    def action():
        changed.append(1)
        os.write(1, b"out")
        os.write(2, b"err")
        os.abort()

    assert rehearse(action) == "ends the process with SIGABRT"
    assert changed == [] and capfd.readouterr() == ("", "")


def test_beside_other_threads_without_a_warning(recwarn):
    done, found = threading.Event(), []
    others = [threading.Thread(target=done.wait) for _ in range(4)]
    for thread in others:
        thread.start()
    from_another = threading.Thread(target=lambda: found.append(rehearse(os.abort)))
    from_another.start()
    from_another.join()
    done.set()
    assert found == ["ends the process with SIGABRT"] and not recwarn.list


def test_no_child_can_be_made(monkeypatch):
    def none():
        raise OSError

    monkeypatch.setattr(os, "fork", none)
    assert rehearse(os.abort) is None


def test_the_status_of_the_child_is_not_kept():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert rehearse(os.abort) is None
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_ctrl_c_ends_the_child(monkeypatch):
    started = []
    wait = os.waitpid

    def interrupted(child, options):
        started.append(child)
        if len(started) == 1:
            raise KeyboardInterrupt
        return wait(child, options)

    monkeypatch.setattr(os, "waitpid", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rehearse(forever)
    assert len(started) == 2 and started[0] == started[1]
    with pytest.raises(ChildProcessError):
        wait(started[0], 0)


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


def test_a_new_model_is_rehearsed_and_no_result(monkeypatch):
    calls = []
    monkeypatch.setattr(models, "rehearse", lambda action, size_bytes: calls.append(size_bytes))
    model = graph(PAIR)
    assert convpool.optimize(model, check=0).changed
    assert len(calls) == 1 and 0 < calls[0] < 2000  # without the weights
    monkeypatch.setattr(models, "rehearse", lambda action, size_bytes: "ends the process with SIGFPE")
    with pytest.raises(ModelError, match="shape inference of onnx .* ends the process with SIGFPE"):
        convpool.optimize(model)
    with pytest.raises(ModelError):
        convpool.verify(model, model)


def test_weights_in_constants_count_as_what_it_works_on(monkeypatch):
    calls = []
    monkeypatch.setattr(models, "rehearse", lambda action, size_bytes: calls.append(size_bytes))
    values = helper.make_tensor("v", TensorProto.FLOAT, [30000], [0.0] * 30000)
    model = graph(PAIR)
    model.graph.node.insert(0, helper.make_node("Constant", [], ["v"], value=values))
    convpool.optimize(model, check=0)
    assert calls[0] > 120000
