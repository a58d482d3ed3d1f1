# SPDX-License-Identifier: Apache-2.0
"""A kernel family is known in its folder and by one line of the registry: no other code asks which one a tactic is of."""

import re
from pathlib import Path

import pytest

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
