# SPDX-License-Identifier: Apache-2.0
"""Times two builds of the library in turn, row by row, and prints the ratio of their times.

    python -m benchmarks compare_builds --old optimizer_old:libconvpool_old.so --new optimizer:libconvpool.so \
        suita-table2 tokura --precision fp16 --json out.json

A build is the folder that holds its convpool package and, behind a colon, its libconvpool.so. Each runs in a process of its own
and times the tactic that it chooses itself, as the benchmark `layers` does; the processes take turns, so that both see the same
clocks. Rows whose ratio of medians leaves 1 by more than `--limit` are timed again at the end, in `--again` times as many
rounds; that ratio then counts. Exits with 1 if a row's tactics differ, or if a ratio still leaves 1 by more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class Build:
    """A process that times rows with one build."""

    def __init__(self, text: str) -> None:
        package, _, library = text.partition(":")
        path = os.pathsep.join((str(Path(package).resolve()), str(ROOT)))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.compare_builds", "--answer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "CONVPOOL_LIBRARY": str(Path(library).resolve())},
        )

    def ask(self, row: dict[str, Any]) -> dict[str, Any]:
        """Microseconds and tactic of one row, timed now."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(row), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{row}: the process that times it has ended")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def prepared(device: Any, asked: dict[str, Any]) -> tuple[Callable[[int], Any], int, int]:
    """Return a call of one row on input set i, the number of sets, and the tactic's id."""
    from benchmarks.layers.suites import SUITES
    from convpool import cuda

    torch, precision = device.torch, asked["precision"]
    row = SUITES[asked["suite"]][0][asked["index"]]
    arguments = row.problem(precision, asked["layout"])
    problem = cuda.Problem(**arguments)
    tactic = problem.default_tactic(max_workspace_bytes=2**40)
    dtype, sets = device.dtype(precision), device.sets(row, precision)
    xs = [torch.randn(problem.x_shape, device="cuda").to(dtype) for _ in range(sets)]
    w = (torch.randn(problem.w_shape, device="cuda") * (row.kernel**2 * row.c) ** -0.5).to(dtype)
    given = ("n", "c", "m", "spatial", "kernel_shape", "dtype", "prologue_affine")
    options = {key: value for key, value in arguments.items() if key not in given}
    options |= {"tactic": tactic, "stream": device.handle, "out": torch.empty(problem.y_shape, device="cuda", dtype=dtype)}
    options["workspace"] = torch.empty(max(64, problem.workspace_bytes(tactic) // 4), device="cuda")
    if row.prologue:
        options |= {name: torch.randn(row.c, device="cuda").to(dtype) for name in ("scale", "shift")}
    cuda.conv_avg_pool(xs[0], w, **options)
    return lambda i: cuda.conv_avg_pool(xs[i], w, weights_prepared=True, **options), sets, tactic.id


def answer() -> None:
    """Time the rows that stdin asks for. The tensors of a row stay until another one is asked for."""
    from benchmarks.layers.device import Device

    device = Device(replays=11)
    kept, made = None, None
    for line in sys.stdin:
        asked = json.loads(line)
        if asked != kept:
            kept, made = None, None
            kept, made = asked, prepared(device, asked)
        call, sets, tactic = made
        print(json.dumps({**device.measure(call, sets), "tactic": tactic}), flush=True)


def timed(builds: dict[str, Build], asked: dict[str, Any], rounds: int, limit: float) -> dict[str, Any]:
    """One row by both builds: medians of microseconds, tactics and the ratio of new to old."""
    from benchmarks.layers.suites import SUITES

    times: dict[str, list[dict]] = {"old": [], "new": []}
    for number in range(rounds):
        for name in ("old", "new") if number % 2 == 0 else ("new", "old"):
            times[name].append(builds[name].ask(asked))
    us = {name: statistics.median(one["us"] for one in found) for name, found in times.items()}
    tactic = {name: found[0]["tactic"] for name, found in times.items()}
    ratio, row = us["new"] / us["old"], SUITES[asked["suite"]][0][asked["index"]].name
    mark = "" if abs(ratio - 1) <= limit and tactic["old"] == tactic["new"] else "  <--"
    print(f"{asked['suite']} {row} {asked['precision']}: {us['old']:.2f} {us['new']:.2f} us, {ratio:.3f}{mark}", flush=True)
    return {**asked, "name": row, "us": us, "tactic": tactic, "ratio": round(ratio, 4)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare_builds", description=__doc__.splitlines()[0])
    parser.add_argument("suites", nargs="*")
    parser.add_argument("--old")
    parser.add_argument("--new")
    parser.add_argument("--precision", action="append")
    parser.add_argument("--layout", default="nhwc")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--again", type=int, default=5)
    parser.add_argument("--limit", type=float, default=0.02)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        answer()
        return 0
    from benchmarks.layers.suites import SUITES

    builds = {"old": Build(options.old), "new": Build(options.new)}
    asked = [
        {"suite": suite, "index": index, "precision": precision, "layout": options.layout}
        for suite in options.suites
        for index in range(len(SUITES[suite][0]))
        for precision in options.precision or SUITES[suite][1]
    ]
    rows = [timed(builds, one, options.rounds, options.limit) for one in asked]
    for number, row in enumerate(rows):
        if abs(row["ratio"] - 1) > options.limit:
            again = timed(builds, asked[number], options.again * options.rounds, options.limit)
            rows[number] = {**again, "first_ratio": row["ratio"]}
    for build in builds.values():
        build.close()
    mean = statistics.geometric_mean(row["ratio"] for row in rows)
    apart = [row for row in rows if abs(row["ratio"] - 1) > options.limit or row["tactic"]["old"] != row["tactic"]["new"]]
    print(f"{len(rows)} rows, geometric mean of new/old {mean:.4f}, {len(apart)} beyond {options.limit:.0%}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "geometric_mean": round(mean, 4)}, indent=1) + "\n")
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
