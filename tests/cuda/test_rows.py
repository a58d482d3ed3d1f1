# SPDX-License-Identifier: Apache-2.0
"""Rows and families of kernels: an incomplete row does not compile, and no other code asks for a family. Needs no GPU."""

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


PLUGIN = Path(__file__).parents[2] / "plugin"
FAMILIES = sorted(path.parent.name for path in (PLUGIN / "src" / "families").glob("*/family.cpp"))
PUBLIC = ("direct_gemm", "filter_fused")  # names that families share
OUTSIDE = sorted(
    path
    for folder in ("src", "tensorrt")
    for path in (PLUGIN / folder).rglob("*")
    if path.suffix in (".h", ".cpp", ".cu", ".cuh") and "families" not in path.parts
)
IGNORED = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^#include[^\n]*', re.DOTALL | re.MULTILINE)


def asks(text: str) -> list[str]:
    """Names of families in the code, enumerators of them, and comparisons of a tactic's family."""
    code = IGNORED.sub(lambda found: '""' if found[0].startswith('"') else "", text)
    words = [word for name in (*FAMILIES, *PUBLIC) for word in (name, "k" + name.title().replace("_", ""))]
    named = re.findall(rf"\b(?:{'|'.join(words)})\b", code)
    compared = re.findall(r"family(?:_name)?\s*[!=]=|[!=]=\s*[\w.>-]*\bfamily\b|strcmp\([^)]*family\w*", code)
    return named + [found for found in compared if "nullptr" not in found]


def test_questions_are_found():
    assert asks("if (t.family == &direct_tma_family()) {}") == ["family =="]
    assert asks("if (f == Kind::kDirectTma) x = pointwise;") == ["kDirectTma", "pointwise"]
    assert asks('if (std::strcmp(t.family_name, "generic") == 0) {}') == ["strcmp(t.family_name"]
    assert asks('// generic runs it\nreturn "use the tactic generic";') == []


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(PLUGIN)))
def test_no_code_outside_asks_for_a_family(path):
    lists_them = path == PLUGIN / "src" / "core" / "registry.cpp"
    assert sorted(asks(path.read_text())) == (FAMILIES if lists_them else [])
