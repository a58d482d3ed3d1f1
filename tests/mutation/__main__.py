# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.mutation``: which share of small wrong changes to the optimizer and convpool.tensorrt the fast tests see.

A line is drawn uniformly from those that can be changed, then one of its changes; the same seed gives the same ones, and ends
with a list of those that no test sees.  Whoever reads that list judges each in the record, in "judged": "equivalent", "slower"
and "message" do not count against the tests.  A judgement stays when the record is written again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutation.mutants import Mutant, mutants

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "optimizer" / "convpool"
FOLDERS = ("algebra", "ir", "check", "passes", "tensorrt")
ELSEWHERE = ("reference.py",)
"""What only tests/kernels uses, as its reference."""
FILES = ("api.py", "autotune.py", "options.py", "pipeline.py", "report.py", "reporting.py")
FIRST = "property averages forms rejects structure fusion preserved verify cost folding layers offload_conv".split()
"""Of tests/optimizer, those that see most; the others follow, but the backend suite, which takes as long as all of them."""
TENSORRT_TESTS = "build build_cli build_fastest builder engine prepare_models".split()
"""Of tests/plugin, those that need neither a GPU nor a compiler."""
CHOSEN = "not real_clock and not (test_damaged and (of_its_own or reach or crashes))"
"""Which tests are run: not those of thousands of damaged models, nor of real times."""
HARMLESS = ("equivalent", "slower", "message")


def sample(count: int, seed: int) -> list[tuple[Path, Mutant]]:
    """`count` changes at lines that differ, drawn with `seed`."""
    lines: dict[tuple[Path, int], list[Mutant]] = {}
    folders = [path for name in FOLDERS for path in (PACKAGE / name).glob("*.py") if path.name not in ELSEWHERE]
    for path in sorted([*(PACKAGE / name for name in FILES), *folders]):
        for mutant in mutants(path.read_text()):
            lines.setdefault((path, mutant.line), []).append(mutant)
    draw = random.Random(seed)
    places = draw.sample(sorted(lines), min(count, len(lines)))
    return [(place[0], draw.choice(lines[place])) for place in places]


def tests_for(path: Path) -> list[str]:
    """Test files for a changed file, the likeliest to fail first."""
    optimizer = [f"tests/optimizer/test_{name}.py" for name in FIRST]
    others = {str(name.relative_to(ROOT)) for name in (ROOT / "tests" / "optimizer").glob("test_*.py")} - set(optimizer)
    optimizer += sorted(others - {"tests/optimizer/test_backend_suite.py"})
    tensorrt = [f"tests/plugin/test_{name}.py" for name in TENSORRT_TESTS]
    if path.parent.name == "tensorrt":
        return tensorrt
    # Engines are compared by the same code as models, and reports are shown by the commands.
    shared = tensorrt if path.parent.name in ("check", "convpool") else []
    return [*optimizer, "tests/cli/test_report.py", *shared]


def outcome(path: Path | None, mutant: Mutant | None, tests: list[str], limit_s: float) -> tuple[str, str]:
    """("killed", the test that failed), ("survived", "") or ("timeout", ""); without a mutant, of the code as it is."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "convpool")
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        if path is not None and mutant is not None:
            changed = copy / path.relative_to(PACKAGE)
            changed.write_text(mutant.apply(path.read_text()))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", CHOSEN, "--tb=no", *tests]
        given = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "CONVPOOL_PROPERTY_CASES": "150", "PYTHONDONTWRITEBYTECODE": "1"}
        run = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **given},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = run.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
            return "timeout", ""
    if run.returncode == 0:
        return "survived", ""
    failed = next((line.split()[1] for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "at import")
    return "killed", failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="how many changes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--limit", type=float, default=180, help="seconds for one, after which it counts as seen")
    parser.add_argument("--commit", default="", help="what is measured, for the record")
    parser.add_argument("--json", type=Path, help="the record; judgements in it are kept")
    options = parser.parse_args()
    judged = {}
    if options.json and options.json.exists():
        judged = {(m["file"], m["before"], m["after"]): m["judged"] for m in json.loads(options.json.read_text())["unseen"]}
    for tests in {tuple(tests_for(PACKAGE / "api.py")), tuple(tests_for(PACKAGE / "tensorrt" / "x.py"))}:
        status, failed = outcome(None, None, list(tests), 10 * options.limit)
        if status != "survived":
            print(f"without a change: {status} {failed}")
            return 2
    chosen = sample(options.count, options.seed)
    started, counts, unseen = time.monotonic(), Counter(), []
    with ThreadPoolExecutor(options.jobs) as pool:
        results = pool.map(lambda item: outcome(*item, tests_for(item[0]), options.limit), chosen)
        for number, ((path, mutant), (status, failed)) in enumerate(zip(chosen, results, strict=True)):
            counts[status] += 1
            name = str(path.relative_to(PACKAGE))
            print(f"{number} {status} {name}:{mutant.line} {mutant.before!r} -> {mutant.after!r} {failed}", flush=True)
            if status == "survived":
                before = path.read_text()
                at = mutant.line - 1
                text = {"before": before.splitlines()[at].strip(), "after": mutant.apply(before).splitlines()[at].strip()}
                why = judged.get((name, text["before"], text["after"]), "")
                unseen.append({"file": name, "line": mutant.line, "kind": mutant.kind, **text, "judged": why})
            if options.json:
                write(options, counts, unseen)
    print(f"{time.monotonic() - started:.0f} s; {json.dumps(score(counts, unseen))}")
    return 0


def score(counts: Counter[str], unseen: list[dict]) -> dict[str, float]:
    """Shares of the changes that are seen: of all, and of those that change what is computed or decided."""
    seen, harmless = counts["killed"] + counts["timeout"], sum(m["judged"].startswith(HARMLESS) for m in unseen)
    total = sum(counts.values())
    return {"mutants": total, "seen": seen, "harmless": harmless, "share": round(seen / max(total - harmless, 1), 4)}


def write(options: argparse.Namespace, counts: Counter[str], unseen: list[dict]) -> None:
    """The record as it is so far."""
    head = {"commit": options.commit, "seed": options.seed, **score(counts, unseen), "outcomes": dict(counts)}
    options.json.write_text(json.dumps({**head, "unseen": unseen}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
