# SPDX-License-Identifier: Apache-2.0
"""Damaged models go through the whole optimizer, which may refuse them by an exception of its own, and nothing else.

    python -m tests.fuzz.damaged --cases 20000 --processes 2 [--first SEED] [--json FILE]

Each process reports every case before and after it, so that a crash or a case beyond the time limit is told by its number and
the next process goes on behind it.
"""

import argparse
import faulthandler
import json
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import convpool
from convpool.ir.model import load, suggested
from tests.support.damage import damaged

ROOT = Path(__file__).resolve().parents[2]
MEMORY_BYTES = 8 * 2**30
LIMIT_S = 60
PART = 1000
"""So many cases a process, at most; then the next one starts, and the record is written."""
LOWERINGS = ("convavgpool", "direct", "fused", "auto")


@dataclass
class Outcome:
    """How many cases ended how, and what is wrong with some: by number, in words."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: dict[int, str] = field(default_factory=dict)


def one(seed: int, folder: Path) -> str:
    """Optimize and save one damaged model; how it ended.  Raises whatever is not convpool's own."""
    path, out = folder / "model.onnx", folder / "out.onnx"
    path.write_bytes(damaged(seed))
    (folder / "data").write_bytes(bytes(18432))
    lowering = LOWERINGS[seed % len(LOWERINGS)]
    more = ("image_conv", "plain_conv") if lowering == "convavgpool" and seed % 3 == 0 else ()
    try:
        sizes = suggested(load(path).proto, {}) if seed % 5 == 1 else None
        result = convpool.optimize(path, lowering=lowering, fold=seed % 5 < 2, fix_shapes=sizes, enable=more)
        result.save(out, external_data=("auto", "one", "keep")[seed % 3])
    except convpool.ConvpoolError as error:
        return type(error).__name__
    return "changed" if result.changed else "unchanged"


def work(first: int, cases: int) -> None:
    """Run cases in this process, with a line before and after each one; one that takes too long ends it."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + cases):
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)
            print("start", seed, flush=True)
            try:
                print("end", one(seed, Path(folder)), flush=True)
            except Exception:
                print("fault", repr(traceback.format_exc(limit=-6)), flush=True)


def run(first: int, cases: int) -> Outcome:
    """Run cases in another process, and in a new one after each case that ends it."""
    outcome, at, end = Outcome(), first, first + cases
    while at < end:
        words = [sys.executable, "-m", "tests.fuzz.damaged", "--work", "--first", str(at), "--cases", str(end - at)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        for line in done.stdout.splitlines():
            word, rest = line.split(" ", 1)
            at = int(rest) if word == "start" else at + 1
            if word == "end":
                outcome.counts[rest] += 1
            elif word == "fault":
                outcome.faults[at - 1] = rest
        if done.returncode:
            outcome.faults[at] = f"ends the process with {done.returncode}: {done.stderr[-2000:]}"
            at += 1
    return outcome


def share(first: int, cases: int, processes: int, told: Callable[[Outcome], None] = lambda _: None) -> Outcome:
    """Run cases in several processes at a time; `told` hears what is known so far."""
    each, total = min(max(-(-cases // processes), 1), PART), Outcome()
    starts = range(first, first + cases, each)
    with ThreadPoolExecutor(processes) as pool:
        for outcome in pool.map(lambda at: run(at, min(each, first + cases - at)), starts):
            total.counts += outcome.counts
            total.faults |= outcome.faults
            told(total)
    return total


def main() -> None:
    """Run cases in several processes, and print what is wrong."""
    parser = argparse.ArgumentParser(description="Run damaged models through the optimizer.")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=20000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="a file for the counts and the faults")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.first, given.cases)
        return
    started = time.monotonic()

    def told(known: Outcome) -> None:
        done = known.counts.total() + len(known.faults)
        print(f"{done} of {given.cases}: {dict(known.counts)}, {len(known.faults)} faults", flush=True)
        if given.json:
            what = {"first": given.first, "cases": done, "counts": dict(known.counts), "faults": known.faults}
            given.json.write_text(json.dumps(what, indent=1) + "\n")

    total = share(given.first, given.cases, given.processes, told)
    for seed, fault in total.faults.items():
        print(f"case {seed}: {fault}")
    print(dict(total.counts), f"{len(total.faults)} faults, {time.monotonic() - started:.0f} s")
    sys.exit(bool(total.faults))


if __name__ == "__main__":
    main()
