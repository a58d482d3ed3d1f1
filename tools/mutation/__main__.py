# SPDX-License-Identifier: Apache-2.0
"""``python -m tools.mutation``: which share of small wrong changes to the optimizer and convpool.tensorrt the fast tests see.

A line is drawn uniformly from those that can be changed, then one of its changes; the same seed gives the same ones, and ends
with a list of those that no test sees.  Whoever reads that list judges each in the record, in "judged": "equivalent", "slower"
and "message" do not count against the tests.  A judgement stays when the record is written again.

Each change is tried on tests that reach its line, as coverage.py saw in the runs without a change. If they pass, the files follow
whose tests start processes, in which coverage.py sees nothing. A line that no test reaches, as of a constant, gets all tests.

The record is written after each change, also where a signal or ``--wall`` ends the run: "unfinished" then has the numbers of the
changes without a result.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from tools.mutation.mutants import Mutant, mutants
from tools.mutation.outcome import AT_IMPORT, PACKAGE, ROOT, Runs
from tools.mutation.reach import likeliest

FOLDERS = ("algebra", "ir", "check", "rules", "tensorrt")
ELSEWHERE = ("reference.py",)
"""Files that only tests/cuda uses, as its reference."""
FILES = ("api.py", "options.py", "pipeline.py", "report.py", "summary.py")
TESTED = ("rules/pool_first", "rules/*", "rules", "check", "ir", "algebra", ".")
"""Folders of tests/ for the package without its runtimes, those first that see most."""
LAST = (
    "tests/ir/test_inference.py",
    "tests/cli/test_bad_input.py",
    "tests/cli/test_report.py",
    "tests/test_autotune.py",
)
NETWORKS = ("tests/models/test_optimized.py", "tests/cli/test_misuse.py")
"""Real networks and the command: minutes, for what no other test has seen."""
SLOW = (*LAST, *NETWORKS, "tests/ir/test_save.py", "tests/test_options.py")
"""The slowest: those that start processes, time models, or have many."""
NEAR = 60
"""How many of the tests that reach a line are tried before the others."""
HARMLESS = ("equivalent", "slower", "message")


def sample(count: int, seed: int) -> list[tuple[Path, Mutant]]:
    """`count` changes at lines that differ, drawn with `seed`."""
    lines = _lines()
    draw = random.Random(seed)
    places = draw.sample(sorted(lines), min(count, len(lines)))
    return [(place[0], draw.choice(lines[place])) for place in places]


@functools.cache
def _lines() -> dict[tuple[Path, int], list[Mutant]]:
    """The changes of each line, in the order of the files."""
    lines: dict[tuple[Path, int], list[Mutant]] = {}
    folders = [path for name in FOLDERS for path in (PACKAGE / name).rglob("*.py") if path.name not in ELSEWHERE]
    for path in sorted([*(PACKAGE / name for name in FILES), *folders]):
        for mutant in mutants(path.read_text()):
            lines.setdefault((path, mutant.line), []).append(mutant)
    return lines


def tests_for(path: Path, quick: bool = False) -> list[str]:
    """Test files for a changed file, the likeliest to fail first.  quick: without the slow ones."""
    files = _tests_for(path)
    named = [name for name in files if name.endswith((f"/test_{path.stem}.py", f"/test_{path.stem}s.py"))]
    return [name for name in dict.fromkeys((*named, *files)) if not quick or name not in SLOW]


def _tests_for(path: Path) -> list[str]:
    tests = ROOT / "tests"
    found = [
        file for folder in TESTED for file in sorted((tests / folder).glob("test_*.py" if folder == "." else "**/test_*.py"))
    ]
    optimizer = [name for file in found if (name := str(file.relative_to(ROOT))) not in LAST]
    without_gpu = [
        file for file in sorted((tests / "tensorrt").glob("test_*.py")) if not file.stem.endswith(("_gpu", "rtx_engines"))
    ]
    tensorrt = [str(file.relative_to(ROOT)) for file in without_gpu]
    if path.parent.name == "tensorrt":
        return tensorrt
    # Engines are compared by the same code as models, and reports are shown by the commands.
    shared = tensorrt if path.parent.name in ("check", "convpool") else []
    return list(dict.fromkeys([*optimizer, *shared, *LAST, *NETWORKS]))


class Record:
    """The results known so far, and their file."""

    def __init__(self, options: argparse.Namespace, chosen: dict[int, tuple[Path, Mutant]]):
        self.options, self.chosen, self.started = options, chosen, time.monotonic()
        self.counts: Counter[str] = Counter()
        self.unseen: list[dict] = []
        self.unfinished = set(chosen)
        self.dropped: list[str] = []
        self.judged: dict[tuple[str, str, str], str] = {}
        if options.json and options.json.exists():
            known = json.loads(options.json.read_text())["unseen"]
            self.judged = {(m["file"], m["before"], m["after"]): m["judged"] for m in known}

    def add(self, number: int, status: str, failed: str) -> None:
        """Count, print and write one result."""
        path, mutant = self.chosen[number]
        self.counts[status] += 1
        self.unfinished.discard(number)
        name = str(path.relative_to(PACKAGE))
        done = f"{time.monotonic() - self.started:.0f} s {len(self.chosen) - len(self.unfinished)}/{len(self.chosen)}"
        print(f"{done} {number} {status} {name}:{mutant.line} {mutant.before!r} -> {mutant.after!r} {failed}", flush=True)
        if status == "survived":
            before, at = path.read_text(), mutant.line - 1
            text = {"before": before.splitlines()[at].strip(), "after": mutant.apply(before).splitlines()[at].strip()}
            why = self.judged.get((name, text["before"], text["after"]), "")
            place = {"number": number, "file": name, "line": mutant.line, "kind": mutant.kind}
            self.unseen.append({**place, **text, "judged": why})
        self.write()

    def write(self) -> None:
        """The file, if there is one."""
        if not self.options.json:
            return
        head: dict[str, object] = {"commit": self.options.commit, "seed": self.options.seed}
        head |= {**score(self.counts, self.unseen), "outcomes": dict(self.counts)}
        if self.unfinished:
            head["unfinished"] = sorted(self.unfinished)
        if self.dropped:
            head["dropped"] = self.dropped
        unseen = sorted(self.unseen, key=lambda mutant: mutant["number"])
        self.options.json.write_text(json.dumps({**head, "unseen": unseen}, indent=1) + "\n")


def score(counts: Counter[str], unseen: list[dict]) -> dict[str, float]:
    """Shares of the changes that are seen: of all, and of those that change what is computed or decided."""
    seen, harmless = counts["killed"] + counts["timeout"], sum(m["judged"].startswith(HARMLESS) for m in unseen)
    total = sum(counts.values())
    return {"mutants": total, "seen": seen, "harmless": harmless, "share": round(seen / max(total - harmless, 1), 4)}


def as_they_end(futures: dict[Future, int | str], until: float) -> Iterator[tuple[int | str, tuple[str, list[str]]]]:
    """The key and the result of each, until the time comes."""
    left = set(futures)
    while left:
        done, left = wait(left, timeout=max(until - time.monotonic(), 0), return_when=FIRST_COMPLETED)
        if not done:
            raise TimeoutError
        for future in done:
            yield futures[future], future.result()


def measure(options: argparse.Namespace, record: Record, runs: Runs, pool: ThreadPoolExecutor) -> int:
    """Run the tests without a change, file by file, then with each change.  Raises TimeoutError when the time is over."""
    until = time.monotonic() + (options.wall or threading.TIMEOUT_MAX / 2)
    files = {test for path, _ in record.chosen.values() for test in tests_for(path, options.quick)}
    print(f"without a change: {len(files)} files of tests; then {len(record.chosen)} changes", flush=True)
    unchanged = {pool.submit(runs.unchanged, [test], 10 * options.limit): test for test in sorted(files)}
    for test, (status, failed) in as_they_end(unchanged, until):
        print(f"{time.monotonic() - record.started:.0f} s unchanged {test}: {status}", flush=True)
        if status != "survived":
            print(f"without a change: {status} {' '.join(failed)}", flush=True)
            record.dropped += failed or [str(test)]
    if record.dropped and not options.drop_failing:
        return 2
    runs.dropped = sorted(record.dropped)
    futures = {
        pool.submit(result, runs, path, mutant, tests_for(path, options.quick), options.limit): number
        for number, (path, mutant) in record.chosen.items()
    }
    for number, (status, failed) in as_they_end(futures, until):
        record.add(int(number), status, " ".join(failed))
    return 0


def result(runs: Runs, path: Path, mutant: Mutant, files: list[str], limit_s: float) -> tuple[str, list[str]]:
    """The outcome of a change: by the tests that reach its line and may see it in another process, or by all files of tests."""
    reaching = runs.reach.get((str(path.relative_to(PACKAGE)), mutant.line), set())
    near = likeliest(reaching, files, len(reaching))
    rest = [test for test in near[NEAR:] if test.split("::")[0] not in SLOW]
    found: tuple[str, list[str]] = ("survived", [AT_IMPORT])
    for tests in (near[:NEAR], [*rest, *(file for file in files if file in SLOW)]) if near else ():
        found = runs.outcome(path, mutant, tests, limit_s)
        if found[0] != "survived":
            break
    # Not only where the package cannot be imported, also where pytest finds no test of one of the names.
    return runs.outcome(path, mutant, files, limit_s) if found[1] == [AT_IMPORT] else found


def stop(*_: object) -> None:
    """End early, once: `timeout` sends its signal twice."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="how many changes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", help="of these, the ones with these numbers")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one, after which it counts as seen")
    parser.add_argument("--wall", type=float, default=0, help="seconds for all, after which those that run are given up")
    parser.add_argument("--quick", action="store_true", help="without the slowest tests: see by --only what those see")
    parser.add_argument("--drop-failing", action="store_true", help="leave out tests that fail without a change")
    parser.add_argument("--commit", default="", help="what is measured, for the record")
    parser.add_argument("--json", type=Path, help="the record; judgements in it are kept")
    options = parser.parse_args()
    chosen = dict(enumerate(sample(options.count, options.seed)))
    if options.only is not None:
        chosen = {number: chosen[number] for number in options.only}
    record, runs, status = Record(options, chosen), Runs(), 1
    signal.signal(signal.SIGTERM, stop)
    pool = ThreadPoolExecutor(options.jobs)
    try:
        status = measure(options, record, runs, pool)
    except (KeyboardInterrupt, TimeoutError):
        print(f"ended early: {len(record.unfinished)} changes have no result", flush=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        runs.end()
    record.write()
    print(f"{time.monotonic() - record.started:.0f} s; {json.dumps(score(record.counts, record.unseen))}")
    return status


if __name__ == "__main__":
    sys.exit(main())
