# SPDX-License-Identifier: Apache-2.0
"""Prints the lines of source code by area, and fails where an area has more than its budget.

    python tools/line_budget.py

Whoever needs more lines raises the number in BUDGET in the same commit, and says why: growth is a decision.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".h", ".cpp", ".cu", ".cuh", ".c", ".def"}
BUDGET = {
    "optimizer": 25261,
    "plugin": 17500,
    "tests": 35999,
    "benchmarks": 8654,
    "tools": 952,
    "examples": 1167,
    "models": 2191,
}


def lines_by_area() -> dict[str, int]:
    """Lines of the source files that git tracks, by the areas of BUDGET."""
    listed = subprocess.run(["git", "ls-files", "-z", *BUDGET], cwd=ROOT, capture_output=True, text=True, check=True)
    counts = dict.fromkeys(BUDGET, 0)
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.suffix in SUFFIXES and path.exists():
            counts[name.split("/")[0]] += path.read_bytes().count(b"\n")
    return counts


def main() -> int:
    """Print the table; 1 where an area is over its budget."""
    counts = lines_by_area()
    print(f"{'area':12}{'lines':>8}{'budget':>8}")
    for area, lines in counts.items():
        print(f"{area:12}{lines:8}{BUDGET[area]:8}{'  over its budget' if lines > BUDGET[area] else ''}")
    return int(any(lines > BUDGET[area] for area, lines in counts.items()))


if __name__ == "__main__":
    sys.exit(main())
