# SPDX-License-Identifier: Apache-2.0
"""Runs of the tests on a changed copy of the package, several at a time."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from tools.mutation import reach
from tools.mutation.mutants import Mutant

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "optimizer" / "convpool"
WITH_THE_LIBRARY = ("threads_register_the_plugin", "runs_nodes_with_it", "s_operators_ask_it_of_the_library")
LEFT_OUT = ("real_clock", "memory_of_a_model", "mypy_strict", *WITH_THE_LIBRARY)
"""Tests of real times, with models of gigabytes, of what callers write, with the plugin's library or sources."""
CHOSEN = f"not {' and not '.join(LEFT_OUT)} and not (test_damaged and (of_its_own or reach or crashes))"
"""Which tests are run: nor those of thousands of damaged models."""

AT_IMPORT = "at import"


class Runs:
    """The runs that are under way; `dropped`: tests that are left out of them; `reach`: what those without a change reached."""

    def __init__(self) -> None:
        self.dropped: list[str] = []
        self.reach: reach.Reach = {}
        self._processes: set[subprocess.Popen] = set()
        self._lock = threading.Lock()
        self._ended = False

    def unchanged(self, tests: list[str], limit_s: float) -> tuple[str, list[str]]:
        """Find the `outcome` of the code as it is, all tests run, and add to `reach`."""
        with tempfile.TemporaryDirectory() as folder:
            record, package = Path(folder, "coverage"), Path(folder, "convpool")
            measure = ["-m", "coverage", "run", f"--data-file={record}", f"--source={package}"]
            result = self._run(folder, None, None, tests, limit_s, [*measure, "-m", "pytest", "-p", "tools.mutation.contexts"])
            if record.exists():
                with self._lock:
                    reach.add(self.reach, record, package)
        return result

    def outcome(self, path: Path, mutant: Mutant, tests: list[str], limit_s: float) -> tuple[str, list[str]]:
        """("killed", the test that failed or AT_IMPORT), ("survived", []) or ("timeout", []).  tests: files, or single tests."""
        with tempfile.TemporaryDirectory() as folder:
            return self._run(folder, path, mutant, tests, limit_s, ["-m", "pytest", "-x"])

    def _run(
        self, folder: str, path: Path | None, mutant: Mutant | None, tests: list[str], limit_s: float, start: list[str]
    ) -> tuple[str, list[str]]:
        copy = Path(folder, "convpool")
        shutil.copytree(PACKAGE, copy)  # what Python has compiled goes along: times are kept
        if path is not None and mutant is not None:
            changed = copy / path.relative_to(PACKAGE)
            changed.write_text(mutant.apply(path.read_text()))
            os.utime(changed, (1, 1))  # another time than what is compiled of it, even within a second
        left_out = [word for name in self.dropped for word in ("--deselect", name)]
        words = [sys.executable, *start, "-q", "-p", "no:cacheprovider", "-k", CHOSEN, "--tb=no", *left_out, *tests]
        paths = [folder, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        given = {"CONVPOOL_TEST_ROUNDS": "0.3", "TMPDIR": folder, "COVERAGE_CORE": "ctrace"}
        run = self._start(words, {**given, "PYTHONPATH": os.pathsep.join(paths)})
        try:
            output, _ = run.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _kill(run)
            return "timeout", []
        finally:
            with self._lock:
                self._processes.discard(run)
        if run.returncode in (0, 5):  # 5: every test of the file is left out
            return "survived", []
        lines = [line.split(" ", 1) for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return "killed", [line[1].split(" - ")[0] for line in lines] if lines or mutant is None else [AT_IMPORT]

    def end(self) -> None:
        """Kill the runs that are under way; none starts after that."""
        with self._lock:
            self._ended = True
            for run in self._processes:
                _kill(run)

    def _start(self, words: list[str], given: dict[str, str]) -> subprocess.Popen:
        run = subprocess.Popen(
            words,
            cwd=ROOT,
            env={**os.environ, **given},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        with self._lock:
            if not self._ended:
                self._processes.add(run)
                return run
        _kill(run)
        raise RuntimeError("the runs have ended")


def _kill(run: subprocess.Popen) -> None:
    """The run and what it has started."""
    try:
        os.killpg(run.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    run.wait()
