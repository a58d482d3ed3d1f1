# SPDX-License-Identifier: Apache-2.0
"""benchmarks.host_time: its turns, its bars, and the program that it compiles."""

import shutil
import subprocess

import pytest

from benchmarks import host_time


def test_calls_are_timed_in_turn(monkeypatch):
    """Time with a clock that stands still but for the calls."""
    now, order = 0.0, []

    def body(name: str, seconds: float):
        def call() -> None:
            nonlocal now
            now += seconds
            order.append(name)

        return call

    monkeypatch.setattr(host_time.time, "perf_counter", lambda: now)
    waits = []
    found = host_time.time_calls({"a": body("a", 2e-6), "b": body("b", 5e-6)}, 3, lambda: waits.append(len(order)))
    assert found == pytest.approx({"a": 2, "b": 5})
    assert order == (["a"] * host_time.CALLS + ["b"] * host_time.CALLS) * (host_time.WARM_UP_ROUNDS + 3)
    assert waits == list(range(0, len(order) + 1, host_time.CALLS))  # the stream is idle before each


def test_times_over_their_bars_are_named():
    row = {"layer": [1, 2, 3, 4, 5], "conv_avg_pool_us": 30.0, "plan_launch_python_us": 10.5, "more_us": 1.9}
    assert host_time.over_the_bar([row]) == ["[1, 2, 3, 4, 5]: Plan.launch; got 10.5 us, expected at most 10"]


def test_a_layer_is_five_numbers(capsys):
    with pytest.raises(SystemExit):
        host_time.main(["--layer", "1,2,3"])
    assert "--layer: five numbers; expected N,C,M,H,W" in capsys.readouterr().err


def test_the_program_compiles_and_says_what_it_lacks(tmp_path):
    if not shutil.which("g++"):
        pytest.skip("no g++")
    try:
        host_time.cuda_include()
    except SystemExit as error:
        pytest.skip(str(error))
    program = host_time.compiled(tmp_path)
    done = subprocess.run([program, tmp_path / "none.so"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("plan_launch_time: ")
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 1 and "usage: plan_launch_time" in done.stderr
