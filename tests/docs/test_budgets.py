# SPDX-License-Identifier: Apache-2.0
"""Files of at most 600 lines and functions of at most 60, in the package and the plugin.  A longer one says why: by a line that
begins with `Length:` in the file's docstring or first comment, which for a function names it.  `python -m
tests.docs.test_budgets` lists all that are longer and say nothing."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE_LINES, FUNCTION_LINES = 600, 60
PYTHON = sorted((ROOT / "optimizer" / "convpool").rglob("*.py"))
CPP = sorted(path for path in (ROOT / "plugin").rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh"))
HEAD = re.compile(r"^(?:[ \t]*(?://[^\n]*|/\*.*?\*/|#[^\n]*)?\n)*", re.DOTALL)
LITERALS = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"(?P<tag>[^(]*)\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'""", re.DOTALL
)
OPENINGS = re.compile(r"\b(?:namespace|extern|struct|class|union|enum)\b[^;(){}]*$")
NAME = re.compile(r"([\w~:]+|operator[^\s(]+)\s*\(")


def python_functions(text: str) -> Iterator[tuple[str, int]]:
    """(name, lines) of every function, without its decorators and docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            docstring = first.end_lineno - first.lineno + 1 if ast.get_docstring(node) is not None else 0
            yield node.name, node.end_lineno - node.lineno + 1 - docstring


def cpp_functions(text: str) -> Iterator[tuple[str, int]]:
    """(name, lines) of every outermost block that is no namespace, type or initializer."""
    code = LITERALS.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    code = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", lambda found: re.sub(r"[^\n]", " ", found[0]), code, flags=re.MULTILINE)
    inside = 0  # depth within a function
    start, name, since = 0, "", 0  # of the function; where the text before the next brace begins
    for found in re.finditer(r"[{};]", code):
        mark = found[0]
        if mark == "{":
            before = code[since : found.start()]
            if inside:
                inside += 1
            elif not OPENINGS.search(before) and "(" in before and not re.search(r"=\s*$", before):
                inside, start = 1, since + len(before) - len(before.lstrip())
                name = next((n for n in NAME.findall(before) if not n.startswith("__")), "?")
        elif mark == "}" and inside:
            inside -= 1
            if not inside:
                yield name, code.count("\n", start, found.start()) + 1
        since = found.end()


def reasons(path: Path, text: str) -> list[str]:
    """Return what the file's docstring or first comment says about its length."""
    head = ast.get_docstring(ast.parse(text)) or "" if path.suffix == ".py" else HEAD.match(text)[0]
    return re.findall(r"\bLength: (.+)", head)


def too_long(path: Path) -> list[str]:
    """Return what is over a budget in a file, without a reason."""
    text = path.read_text()
    said, where = reasons(path, text), path.relative_to(ROOT)
    lines = text.count("\n")
    found = [f"{where}: file; got {lines} lines, expected at most {FILE_LINES}"] if lines > FILE_LINES and not said else []
    functions = python_functions(text) if path.suffix == ".py" else cpp_functions(text)
    return found + [
        f"{where}: {name}; got {count} lines, expected at most {FUNCTION_LINES}"
        for name, count in functions
        if count > FUNCTION_LINES and not any(re.search(rf"\b{re.escape(name)}\b", reason) for reason in said)
    ]


@pytest.mark.parametrize("path", [*PYTHON, *CPP], ids=lambda path: str(path.relative_to(ROOT)))
def test_within_budgets(path):
    assert too_long(path) == []


if __name__ == "__main__":
    print(*(line for path in (*PYTHON, *CPP) for line in too_long(path)), sep="\n")
