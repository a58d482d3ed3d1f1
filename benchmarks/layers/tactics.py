# SPDX-License-Identifier: Apache-2.0
"""This project's tactics.  What a tactic makes of the weights is made once, outside the timing, as in inference.

As a program it answers `by_rule`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.layers.case import Candidate, Case, Skip
from benchmarks.layers.figures import TACTIC
from benchmarks.layers.record import entry_row
from benchmarks.layers.rows import Row
from benchmarks.layers.tensorrt import program
from convpool import cuda
from convpool.cuda import tuned
from convpool.errors import OptionError

ANY_WORKSPACE_BYTES = 2**40


def usable(case: Case) -> list[cuda.Tactic]:
    """The tactics that run the row on this GPU."""
    problem = cuda.Problem(**case.row.problem(case.precision, case.layout))
    return [tactic for tactic in cuda.tactics() if problem.why_not(tactic) is None]


def choice(case: Case, *, workspace: bool) -> cuda.Tactic:
    """The tactic that the library picks, with all the workspace that it wants or without any."""
    problem = cuda.Problem(**case.row.problem(case.precision, case.layout))
    return problem.default_tactic(max_workspace_bytes=ANY_WORKSPACE_BYTES if workspace else 0)


def by_rule(work: Sequence[tuple[Row, str]], layout: str, device: dict[str, int]) -> list[cuda.Tactic]:
    """The tactics that the cost rule picks for rows and their precisions with all the workspace that it wants, on a
    device as `cuda.current_device` has it.  Needs no GPU.

    The library reads CONVPOOL_TUNED once in a process, so another one is asked.  Raises LibraryError if that one fails.
    """
    asked = {"device": device, "problems": [row.problem(precision, layout) for row, precision in work]}
    done = subprocess.run(
        program("benchmarks.layers.tactics"),
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CONVPOOL_TUNED": tuned.OFF},
        cwd=Path(__file__).parents[2],
    )
    if done.returncode:
        message = done.stderr.strip().rpartition("\n")[2]
        raise cuda.LibraryError(
            f"cost rule: its process failed; got {message or f'exit status {done.returncode}'}, expected tactics"
        )
    return [cuda.find_tactic(number) for number in json.loads(done.stdout)]


def candidate(case: Case, tactic: cuda.Tactic) -> Candidate:
    """The tactic on the case's tensors.  The first call after a change of weights prepares them."""
    arguments = case.row.problem(case.precision, case.layout)
    problem = cuda.Problem(**arguments)
    reason = problem.why_not(tactic)
    if reason is not None:
        raise Skip(reason)
    workspace = case.empty(max(64, problem.workspace_bytes(tactic) // 4), dtype=case.device.torch.float32)
    shapes = ("n", "c", "m", "spatial", "kernel_shape", "dtype", "prologue_affine")  # conv_avg_pool has them from its arrays
    options = {key: value for key, value in arguments.items() if key not in shapes}
    prepared = -1

    def call(i: int) -> None:
        nonlocal prepared
        cuda.conv_avg_pool(
            case.raws[i],
            case.w,
            scale=case.scale,
            shift=case.shift,
            out=case.out,
            workspace=workspace,
            tactic=tactic,
            stream=case.device.handle,
            weights_prepared=prepared == case.weights_version,
            **options,
        )
        prepared = case.weights_version

    return Candidate(tactic.name, call, tactic=tactic.id)


def fastest(record: dict[str, Any]) -> list[str]:
    """A line of a tuning file for every row of a record with a tactic measured.

    Raises OptionError where the record does not say its GPU.
    """
    about, lines = record["protocol"], []
    device = {"cc": about.get("compute_capability"), "multiprocessors": about.get("multiprocessors")}
    for entry in record["rows"]:
        times = [found for name, found in entry["methods"].items() if name.startswith(TACTIC) and "us" in found]
        if not times:
            continue
        if not all(device.values()):
            raise OptionError(
                "--tune: the record does not say its GPU's multiprocessors; got one of an older version, "
                "expected a new one; measure again"
            )
        best = min(times, key=lambda found: found["us"])
        problem = cuda.Problem(**entry_row(entry).problem(entry["precision"], entry["layout"]))
        lines.append(tuned.row(problem, device, best["tactic"], best["us"], best["how"]))
    return lines


def main() -> None:
    """Answer on stdout, with tactics' ids, what `by_rule` asks on stdin."""
    asked = json.load(sys.stdin)
    chosen = [
        cuda.Problem(**problem).default_tactic(max_workspace_bytes=ANY_WORKSPACE_BYTES, **asked["device"])
        for problem in asked["problems"]
    ]
    print(json.dumps([tactic.id for tactic in chosen]))
