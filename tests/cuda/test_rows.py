# SPDX-License-Identifier: Apache-2.0
"""Rows of the kernel families: one without a fitted cost, or with another's id, does not compile. Needs no GPU."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "plugin" / "src"
DECISION = ROOT / "docs" / "decisions" / "032-rows-and-families-that-stay.md"
ROWS = sorted((SOURCES / "families").glob("*/rows.h"))
COST = re.compile(
    r"(constexpr Tile \w+(?: = \w+\(|\{).*|    \{\{[^{}]*), (?:fitted\([^)]*\)|\{[^}]*\})(?=[^{}]*(?:[})];|\}, +1, \{))"
)
IDS = re.compile(r"(?<![\w.])[1-4]\d{3}\b")
RETIRED = re.compile(r"^\| `[\w]+` \|[^|]*\| ([\d, ]+) \|$", re.MULTILINE)


def compiled(rows: str, folder: Path) -> subprocess.CompletedProcess[str]:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = folder / "rows.cpp"
    source.write_text(rows.replace("#pragma once", ""))
    command = [compiler, "-std=c++20", "-fsyntax-only", f"-I{SOURCES}", source]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("path", ROWS, ids=lambda path: path.parent.name)
def test_a_row_needs_a_fitted_cost_and_an_id_of_its_own(path, tmp_path):
    rows = path.read_text()
    done = compiled(rows, tmp_path)
    assert done.returncode == 0, done.stderr
    without, removed = COST.subn(r"\1, {}", rows, count=1)
    assert removed == 1
    first, second = IDS.findall(rows)[:2]
    done = compiled(without.replace(second, first), tmp_path)
    assert done.returncode != 0 and "a row's tile has a fitted cost" in done.stderr, done.stderr
    assert "ids_differ(kRows)" in done.stderr, done.stderr


def test_an_id_of_a_retired_row_is_not_used_again():
    retired = {number for ids in RETIRED.findall(DECISION.read_text()) for number in IDS.findall(ids)}
    assert len(retired) == 61
    assert not retired & {number for path in ROWS for number in IDS.findall(path.read_text())}


def test_every_family_with_rows_is_here():
    assert len(ROWS) == 8
