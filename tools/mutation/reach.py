# SPDX-License-Identifier: Apache-2.0
"""Which tests reach a line of the package, by coverage.py's records of runs without a change."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, zip_longest
from pathlib import Path

import coverage

Reach = dict[tuple[str, int], set[str]]
"""Names of tests by the file, as a path inside the package, and the line, from 1."""


def add(reach: Reach, record: Path, package: Path) -> None:
    """The lines of one run's record; package: the folder that the run imported."""
    data = coverage.CoverageData(str(record))
    data.read()
    for name in data.measured_files():
        inside = str(Path(name).relative_to(package))
        for line, tests in data.contexts_by_lineno(name).items():
            reach.setdefault((inside, line), set()).update(filter(None, tests))


def likeliest(tests: set[str], files: list[str], count: int) -> list[str]:
    """At most `count` of the tests: one of every function, those of the first files first, then a second of each.

    files: their order, likeliest to fail first.
    """
    functions: dict[str, list[str]] = defaultdict(list)
    order = {name: i for i, name in enumerate(files)}
    for test in sorted(tests, key=lambda test: (order.get(test.split("::")[0], len(files)), test)):
        functions[test.split("[")[0]].append(test)
    rounds = zip_longest(*functions.values())
    return [test for test in chain.from_iterable(rounds) if test is not None][:count]
