# SPDX-License-Identifier: Apache-2.0
"""The loop over methods, with a pretended GPU: which algorithm counts, wrong ones, failures, the library's choices."""

import dataclasses
import sys
from contextlib import nullcontext
from unittest.mock import Mock

import numpy as np
import pytest

from benchmarks.layers import cpu, run, tactics
from benchmarks.layers.case import NORMALS, Candidate, Skip
from benchmarks.layers.device import DeviceError
from benchmarks.layers.record import new_record
from benchmarks.layers.rows import Row
from benchmarks.layers.run import Options, Run, measure, protocol
from benchmarks.layers.suites import SUITES
from benchmarks.layers.tensorrt import Worker, WorkerError
from convpool import cuda
from convpool.cuda import tuned
from convpool.cuda.timing import GraphTimer

ROW = Row(1, 4, 6, 9, 8, suite="own")


class Torch:
    class cuda:
        broken = False

        @classmethod
        def synchronize(cls):
            if cls.broken:
                raise RuntimeError("an illegal memory access was encountered")


class PretendedCase:
    """Candidates' calls return (microseconds, error) or raise."""

    row, precision, sets = ROW, "fp16", 4

    def __init__(self):
        self.device, self.timed, self.limits = self, [], []
        self.torch, self.chosen = Torch, {}

    def measure(self, call, sets, *, quick=False, give_up_us=0):
        us, _ = call(0)
        self.limits.append(give_up_us)
        self.timed.append((us, quick))
        return {"us": us, "spread_us": 0.1}

    def check(self, candidate):
        _, error = candidate.call(0)
        return {"integers": 0.0, NORMALS: error}, error < 1e-3


@pytest.fixture
def case():
    yield PretendedCase()
    Torch.cuda.broken = False


def candidate(us, error=1e-4, **more):
    return Candidate(f"at {us}", lambda i: (us, error), **more)


def failing(message):
    def call(i):
        raise RuntimeError(message)

    return Candidate("failing", call)


def test_the_fastest_algorithm_counts(case):
    found = measure(case, lambda: [candidate(9), candidate(5), candidate(7)])
    assert found == {"us": 5, "spread_us": 0.1, "error": 1e-4, "exact": True, "how": "at 5", "candidates": 3}
    assert case.timed[-1] == (5, False) and len(case.timed) == 4
    assert case.limits[:3] == [float("inf"), 13.5, 7.5]  # half as long again as the fastest so far is hopeless


def declining():
    raise Skip("channels last only")


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: [candidate(9), candidate(5, error=0.5)], {"how": "at 9"}),  # wrong: it does not count
        (lambda: [candidate(5, error=0.5)], {"wrong": 0.5, "how": "at 5"}),
        (lambda: [failing("no"), candidate(6), candidate(7)], {"how": "at 6"}),
        (lambda: [failing("no plan")], {"skipped": "no plan"}),
        (lambda: [failing("a"), failing("b")], {"skipped": "no algorithm runs this"}),
        (declining, {"skipped": "channels last only"}),
    ],
)
def test_what_is_wrong_or_fails_is_not_timed(case, make, found):
    got = measure(case, make)
    assert got.items() >= found.items() and ("us" in got) == bool(case.timed)
    assert str(measure(case, lambda: [candidate(5, error=float("nan"))])["wrong"]) == "nan"


def test_a_gpu_that_stopped_ends_the_run(case):
    Torch.cuda.broken = True
    with pytest.raises(DeviceError, match="1x4x9x8 to 6, 3x3; got no; an illegal memory access"):
        measure(case, lambda: [failing("no")])


def tactic(number, family="direct_gemm"):
    from convpool.cuda import Tactic

    return Tactic(number, f"conv_avgpool_t{number}", family, "float16", False, 75, 1, False, 1)


@pytest.fixture
def pretended(monkeypatch, case):
    """A run whose GPU has three tactics; the library picks 2, without workspace 3, by its rule 1."""
    all_tactics = [tactic(1), tactic(2), tactic(3, "generic")]
    monkeypatch.setattr(run.tactics, "usable", lambda case: all_tactics)
    monkeypatch.setattr(run.tactics, "choice", lambda case, workspace: all_tactics[1 if workspace else 2])
    monkeypatch.setattr(run.tactics, "by_rule", lambda work, layout, device: [all_tactics[0]] * len(work))
    monkeypatch.setattr(run.cuda, "current_device", dict)
    monkeypatch.setattr(run.tactics, "candidate", lambda case, t: candidate(10 * t.id, tactic=t.id))
    libraries = {"cudnn_naive": lambda case: [candidate(50)], "textbook_gemm": lambda case: [candidate(99)]}
    monkeypatch.setattr(run, "LIBRARIES", libraries)
    monkeypatch.setattr(run.Run, "_use_gpu", lambda self: setattr(self, "device", case))
    monkeypatch.setattr(run, "Case", lambda device, row, *_: setattr(case, "row", row) or case)

    def make(rows=(ROW,), **options):
        chosen = Options(**options)
        record = new_record("python -m benchmarks layers", "", protocol(chosen))
        return record, Run(record, [(row, "fp16") for row in rows], chosen)

    return make


def test_every_tactic_and_the_librarys_choices(pretended, case):
    record, running = pretended(methods=("c*",))
    shown = []
    running.measure(lambda done, total, what: shown.append((done, total, what)))
    (entry,) = record["rows"]
    times = {name: found.get("us") for name, found in entry["methods"].items()}
    assert times == {
        "cudnn_naive": 50, "convpool:t1": 10, "convpool:t2": 20, "convpool:t3": 30, "convpool": 20,
        "convpool_no_workspace": 30, "convpool_rule": 10,
    }  # fmt: skip
    assert [entry["methods"][name]["tactic"] for name in ("convpool", "convpool_rule")] == [2, 1]
    assert len(case.timed) == 4 and entry["input_sets"] == 4  # the choices are tactics that were measured anyway
    assert set(entry["seconds"]) == {"data", "cudnn_naive", "convpool"} and min(entry["seconds"].values()) >= 0
    assert shown[0] == (0, 1, "1x4x9x8 to 6, 3x3 cudnn_naive")


H200 = {"cc": 90, "multiprocessors": 132, "shared_bytes": 227 * 1024}


def test_the_cost_rules_choice_does_not_see_measurements(tmp_path, monkeypatch):
    """The variable names a measurement that all processes but the rule's own would follow."""
    row = SUITES["suita-table2"][0][0]
    other = cuda.find_tactic("conv_avgpool_generic")
    problem = cuda.Problem(**row.problem("fp16", "nhwc"))
    path = tmp_path / "tuned.def"
    path.write_text(f"CONVPOOL_TUNED({', '.join(map(str, tuned.numbers(problem, 90, 132, other.id)))})\n")
    monkeypatch.setenv("CONVPOOL_TUNED", str(path))
    work = [(row, "fp16"), (SUITES["suita-table2"][0][-1], "tf32"), (SUITES["densenet"][0][0], "fp16")]
    chosen = tactics.by_rule(work, "nhwc", H200)
    for (row, precision), tactic in zip(work, chosen, strict=True):
        problem = cuda.Problem(**row.problem(precision, "nhwc"))
        assert problem.why_not(tactic, cc=90, shared_bytes=227 * 1024) is None and tactic.family != "generic"
    assert chosen[1].tf32 and len(set(chosen)) == 3


class PretendedTorch:
    """The part of PyTorch that `GraphTimer.measure` needs: a graph that does nothing."""

    class cuda:
        stream = staticmethod(lambda stream: nullcontext())
        graph = staticmethod(lambda graph, **options: nullcontext())
        CUDAGraph = Mock

    sum = Mock()


@pytest.mark.parametrize(
    ("replays_us", "give_up_us", "us", "left"),
    [
        ([20, 21, 20, 22, 20], 30, 20, 0),
        ([20, 21, 20, 22, 20], 10, 20.5, 3),  # twice slower: hopeless
        ([99, 9, 9, 9, 9], 10, 9, 0),  # one disturbed replay is not enough
    ],
)
def test_a_hopeless_algorithm_is_given_up_after_two_replays(replays_us, give_up_us, us, left):
    device = object.__new__(GraphTimer)
    device._torch, device.stream, device._replays, device._flush, device._sink = PretendedTorch, Mock(), 15, None, None
    elapsed = [50, *(4 * us for us in replays_us)]  # a first look, then replays of 4 calls
    device._elapsed_us = lambda work: elapsed.pop(0)
    assert device.measure(lambda i: None, 4, quick=True, give_up_us=give_up_us)["us"] == us and len(elapsed) == left


def test_slow_methods_wait_until_they_are_asked_for(pretended):
    large = Row(64, 512, 512, 64, 64)
    for slow in (False, True):
        record, running = pretended(rows=(large,), methods=("c*", "text*"), slow=slow)
        running.measure(lambda *_: None)
        methods = record["rows"][0]["methods"]
        assert (methods["textbook_gemm"] == {"skipped": "slow"}) == (not slow)
        assert ("convpool:t3" in methods) == slow and methods["convpool_no_workspace"]["us"] == 30


def test_what_was_measured_stays_after_an_interrupt(pretended, monkeypatch):
    record, running = pretended(rows=(ROW, Row(1, 4, 6, 5, 5)), methods=("cudnn_naive", "convpool"))

    def choose(case, workspace):
        if len(record["rows"]) == 2:
            raise KeyboardInterrupt
        return tactic(2)

    monkeypatch.setattr(run.tactics, "choice", choose)
    with pytest.raises(KeyboardInterrupt):
        running.measure(lambda *_: None)
    assert [list(entry["methods"]) for entry in record["rows"]] == [["cudnn_naive", "convpool"], ["cudnn_naive"]]


@pytest.mark.parametrize("name", ["cpu_loop", "onnxruntime_cpu"])
@pytest.mark.parametrize("row", [ROW, Row(2, 3, 4, 9, 9, kernel=5, pad=1, stride=2, pool=3, pool_stride=1)], ids=lambda r: r.name)
def test_the_cpus_methods_are_right(name, row, monkeypatch):
    monkeypatch.setattr(cpu, "BUDGET_S", 0.0)
    found = cpu.measure(name, row)
    assert found.get("skipped") == "no C compiler" or (0 < found["error"] < 1e-6 and found["us"] > 0)


def test_a_wrong_cpu_method_is_never_timed(monkeypatch):
    monkeypatch.setattr(cpu, "_onnxruntime", lambda row, w: lambda x, w: np.zeros((row.n, row.m, *row.out_size)))
    assert cpu.measure("onnxruntime_cpu", ROW) == {"wrong": 1.0, "how": "original graph, fp32"}


def _worker(tmp_path, code: str) -> Worker:
    """A worker that runs other code: its Python is a script that ignores -m and the module."""
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\nimport json, sys\n{code}\n")
    program.chmod(0o755)
    return Worker(str(program))


def test_a_worker_that_cannot_work_is_told(tmp_path):
    with pytest.raises(WorkerError, match="cannot be started"):
        Worker(str(tmp_path / "nothing"))
    with pytest.raises(WorkerError, match="TensorRT: tensorrt: cannot be imported"):
        _worker(tmp_path, 'print(json.dumps({"error": "tensorrt: cannot be imported"}))')
    with pytest.raises(WorkerError, match="its process ended; got exit status 3"):
        _worker(tmp_path, "sys.exit(3)")


def test_a_row_that_ends_tensorrts_process_is_skipped_and_the_next_one_measured(tmp_path):
    ends = """
print("a library's greeting")
print(json.dumps({"version": "8.6.0"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["row"]["c"] == 5:
        sys.exit(3)
    print(json.dumps({"us": asked["row"]["c"] + asked["level"]}), flush=True)
"""
    worker = _worker(tmp_path, ends)
    assert worker.version == "8.6.0"
    worker.close()
    made = new_record("python -m benchmarks layers x", "", protocol(Options()))
    work = [(Row(1, c, 6, 9, 8, suite="own"), "fp16") for c in (4, 5, 6)]
    options = Options(methods=("tensorrt_naive",), tensorrt_python=str(tmp_path / "python"), tensorrt_level=3)
    Run(made, work, options).measure(lambda done, rows, what: None)
    found = [entry["methods"]["tensorrt_naive"] for entry in made["rows"]]
    assert found[::2] == [{"us": 7}, {"us": 9}] and "its process ended; got exit status 3" in found[1]["skipped"]


def test_another_methods_prologue_is_a_kernel_at_the_speed_of_memory(tmp_path):
    _worker(
        tmp_path,
        """
print(json.dumps({"version": "8.6.0"}), flush=True)
for line in sys.stdin:
    print(json.dumps({"us": 7.0}), flush=True)
""",
    ).close()
    row = Row(1, 1000, 6, 20, 100, suite="own", prologue=True)  # 4 MB of half precision
    options = Options(methods=("tensorrt_naive",), tensorrt_python=str(tmp_path / "python"))

    def found(ceilings: dict, row: Row) -> dict:
        made = {**new_record("python -m benchmarks layers x", "", protocol(options)), "ceilings": ceilings}
        Run(made, [(row, "fp16")], options).measure(lambda done, rows, what: None)
        return made["rows"][0]["methods"]["tensorrt_naive"]

    assert found({"copy_tb_per_s": 4.0}, row) == {"us": 9.0, "prologue_us": 2.0}
    assert found({"copy_tb_per_s": 4.0}, dataclasses.replace(row, prologue=False)) == {"us": 7.0}
    assert "needs the copy bandwidth" in found({}, row)["skipped"]
