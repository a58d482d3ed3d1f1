# SPDX-License-Identifier: Apache-2.0
"""Code and texts use the field's words, and docstrings begin with a verb or a noun."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTEAD = {
    r"siblings?": "fused variant",
    r"absorb(?!ed\b)\w*": "fuse",  # `absorbed` is a key of the report
    r"halves": "half precision, split, parts",
    r"tak(?:e|es|en|ing) (?:it |them )?in\b(?! turn| zip)": "fuse",
    r"(?:activation|convolution|pooling|rank|type) alone": "only the ...",
}
FILES = [
    path
    for folder in ("optimizer/convpool", "plugin")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".h", ".cpp", ".cu", ".cuh", ".def")
]
FIRST = re.compile(r"\s*((?:What|Whether|Of|That|Those|As|By|From)\b)")
"""First words of a docstring in place of a verb in the imperative, or an article and a noun."""
FOLDERS = ("benchmarks", "examples", "models", "optimizer", "plugin", "tests", "tools")
ELSEWHERE = ("optimizer/convpool/torch",)
"""Folders whose docstrings have not been changed yet."""


def retired(text: str) -> list[str]:
    """Words of a text that have a better one."""
    return [found[0] for word in INSTEAD for found in re.finditer(rf"\b{word}\b", text, re.IGNORECASE)]


def misbegun(code: str) -> list[str]:
    """Docstrings, attributes' included, that begin with a word of FIRST: the line and the word."""
    bodies = [getattr(node, "body", None) for node in ast.walk(ast.parse(code))]
    statements = [s for body in bodies if isinstance(body, list) for s in body]
    texts = [s.value for s in statements if isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)]
    return [f"{line}: {found[1]}" for line, found in [(text.lineno, FIRST.match(str(text.value))) for text in texts] if found]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_words(path):
    assert not retired(path.read_text()), INSTEAD


def test_docstrings_begin_with_a_verb_or_a_noun():
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 100
    changed = [path for path in files if not any(path.is_relative_to(ROOT / f) for f in ELSEWHERE)]
    found = {str(path.relative_to(ROOT)): misbegun(path.read_text()) for path in changed}
    assert {path: lines for path, lines in found.items() if lines} == {}
