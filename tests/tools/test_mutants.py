# SPDX-License-Identifier: Apache-2.0
"""The changes that `make mutation` makes, and how the record counts them."""

import ast
import json
import subprocess
import sys
from collections import Counter

import pytest

from tools.mutation.__main__ import result, sample, score
from tools.mutation.mutants import mutants
from tools.mutation.outcome import PACKAGE, ROOT, Runs
from tools.mutation.reach import likeliest

CHANGES = {
    "a = b < c": ["a = (b >= c)", "a = (b <= c)"],
    "a = b is None": ["a = (b is not None)"],
    "a = b + c": ["a = (b - c)"],
    "a = b // 2": ["a = (b * 2)", "a = b // 3", "a = b // 1"],
    "a = 0": ["a = 1", "a = (-1)"],
    "a = True": ["a = False"],
    "a = b and c": ["a = (b or c)"],
    "a = not b": ["a = b"],
    "a = min(b)": ["a = max(b)"],
    "a = any(b)": ["a = all(b)"],
    "a = b if c else d": ["a = (b if not c else d)"],
    "def f():\n    return a": ["def f():\n    return None"],
    "def f():\n    return None": [],
    "f()": ["pass"],
    "if a:\n    b = c": ["pass"],
    "if a:\n    b = c\nelse:\n    b = d": [],
    "raise a": ["pass"],
    'def f() -> "int | None":\n    """Text."""\n    b: int | str = c': [],
    "assert a < b": [],
    "import a": [],
    'a = f"{b + c}"': [],
    "a = reject(b, c + d)": [],
    "a = ModelError(b + 1)": [],
    "é = b + c": ["é = (b - c)"],
}


@pytest.mark.parametrize("text", CHANGES)
def test_changes(text):
    assert [mutant.apply(text) for mutant in mutants(text)] == CHANGES[text]


def test_a_sample_is_the_same_for_the_same_seed_and_valid_python():
    chosen = sample(40, 3)
    assert chosen == sample(40, 3) != sample(40, 4)
    assert len({(path, mutant.line) for path, mutant in chosen}) == 40
    for path, mutant in chosen:
        text = path.read_text()
        changed = mutant.apply(text)
        assert changed != text
        ast.parse(changed)


def test_what_is_harmless_does_not_count():
    unseen = [{"judged": "equivalent: one input"}, {"judged": "message only"}, {"judged": ""}, {"judged": "a hole"}]
    counts = Counter(killed=15, timeout=1, survived=4)
    assert score(counts, unseen) == {"mutants": 20, "seen": 16, "harmless": 2, "share": round(16 / 18, 4)}


@pytest.mark.parametrize("by", ["--wall", "signal"])
def test_a_run_that_ends_early_leaves_a_record(tmp_path, by):
    words = [sys.executable, "-m", "tools.mutation", "--count", "4", "--seed", "3", "--json", str(tmp_path / "record.json")]
    run = subprocess.Popen([*words, *(["--wall", "0.01"] if by == "--wall" else [])], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if by == "signal":
        assert run.stdout.readline().startswith("without a change: ")  # told when it starts
        run.terminate()
    output, _ = run.communicate(timeout=60)
    assert "ended early: 4 changes have no result" in output and run.returncode == 1
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["unfinished"] == [0, 1, 2, 3] and record["mutants"] == 0


def test_a_change_is_tried_on_tests_that_reach_its_line_first():
    path, file = PACKAGE / "algebra" / "lowering.py", "tests/algebra/test_cost.py"
    runs = Runs()
    runs.unchanged([file], 60)
    lines = {line: tests for (name, line), tests in runs.reach.items() if name == "algebra/lowering.py"}
    inside = [line for line, tests in lines.items() if tests]
    assert inside and all(test.startswith(file) for line in inside for test in lines[line])
    changes = [mutant for mutant in mutants(path.read_text()) if mutant.line in inside and "return" in mutant.kind]
    status, failed = result(runs, path, changes[0], [file], 60)
    assert status == "killed" and failed[0] in lines[changes[0].line]


def test_tests_of_each_function_come_in_turn_and_the_first_files_first():
    tests = {"b.py::one", "a.py::two[1]", "a.py::two[2]", "a.py::three[x]", "c.py::four"}
    order = ["a.py::three[x]", "a.py::two[1]", "b.py::one", "c.py::four", "a.py::two[2]"]
    assert likeliest(tests, ["a.py", "b.py"], 5) == order and likeliest(tests, ["a.py", "b.py"], 2) == order[:2]
