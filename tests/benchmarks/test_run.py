# SPDX-License-Identifier: Apache-2.0
"""The loop over methods, with a pretended GPU: which algorithm counts, wrong ones, failures, the library's choices."""

import sys
from unittest.mock import Mock

import numpy as np
import pytest

from benchmarks.layers import cpu, tactics
from benchmarks.layers.case import NORMALS, Candidate, Skip
from benchmarks.layers.device import DeviceError
from benchmarks.layers.record import new_record
from benchmarks.layers.rows import Row
from benchmarks.layers.run import Options, Run, measure, protocol
from benchmarks.layers.suites import SUITES
from benchmarks.layers.tensorrt import Worker
from convpool import cuda
from convpool.cuda import tuned

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
    return Candidate("failing", Mock(side_effect=RuntimeError(message)))


def test_the_fastest_algorithm_counts(case):
    found = measure(case, lambda: [candidate(9), candidate(5), candidate(7)])
    assert found == {"us": 5, "spread_us": 0.1, "error": 1e-4, "exact": True, "how": "at 5", "candidates": 3}
    assert case.timed[-1] == (5, False) and len(case.timed) == 4
    assert case.limits[:3] == [float("inf"), 13.5, 7.5]  # half as long again as the fastest so far is hopeless


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: [candidate(9), candidate(5, error=0.5)], {"how": "at 9"}),  # wrong: it does not count
        (lambda: [candidate(5, error=0.5)], {"wrong": 0.5, "how": "at 5"}),
        (lambda: [failing("no"), candidate(6), candidate(7)], {"how": "at 6"}),
        (lambda: [failing("no plan")], {"skipped": "no plan"}),
        (lambda: [failing("a"), failing("b")], {"skipped": "no algorithm runs this"}),
        (Mock(side_effect=Skip("channels last only")), {"skipped": "channels last only"}),
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


H200 = {"cc": 90, "multiprocessors": 132, "shared_bytes": 227 * 1024}


def test_the_cost_rules_choice_does_not_see_measurements(tmp_path, monkeypatch):
    """The variable names a measurement that all processes but the rule's own would follow."""
    row, other = SUITES["suita-table2"][0][0], cuda.find_tactic("conv_avgpool_generic")
    problem, path = cuda.Problem(**row.problem("fp16", "nhwc")), tmp_path / "tuned.def"
    path.write_text(f"CONVPOOL_TUNED({', '.join(map(str, tuned.numbers(problem, 90, 132, other.id)))})\n")
    monkeypatch.setenv("CONVPOOL_TUNED", str(path))
    work = [(row, "fp16"), (SUITES["suita-table2"][0][-1], "tf32"), (SUITES["densenet"][0][0], "fp16")]
    chosen = tactics.by_rule(work, "nhwc", H200)
    for (row, precision), tactic in zip(work, chosen, strict=True):
        problem = cuda.Problem(**row.problem(precision, "nhwc"))
        assert problem.why_not(tactic, cc=90, shared_bytes=227 * 1024) is None and tactic.family != "generic"
    assert chosen[1].tf32 and len(set(chosen)) == 3


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
