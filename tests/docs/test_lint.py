# SPDX-License-Identifier: Apache-2.0
"""`make lint` and the hooks of pre-commit run the same programs with the same options."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
OF_ALL_FILES = {".", "$(CPP)"}
OF_NAMED_FILES = {"--force-exclude"}  # ruff would check a file that it is given by name, excluded or not


def commands(lines: list[str], prefix: str, but: set[str]) -> set[tuple[str, ...]]:
    return {tuple(word for word in line.removeprefix(prefix).split() if word not in but) for line in lines}


def test_hooks_run_what_make_lint_runs():
    recipe = re.search(r"^lint: .+\n((?:\t.+\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    hooks = re.findall(r"^ +entry: (.+)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    by_make = commands(recipe.splitlines(), "\t$(BIN)/", OF_ALL_FILES)
    assert by_make == commands(hooks, ".venv/bin/", OF_NAMED_FILES) and ("mypy",) in by_make
