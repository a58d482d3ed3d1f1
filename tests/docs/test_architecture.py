# SPDX-License-Identifier: Apache-2.0
"""Paths and names of docs/architecture.md exist, and its table of layers is how the package imports."""

import re
from pathlib import Path

import pytest

from tests.test_layers import imports, modules

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "architecture.md").read_text()
DIAGRAMS = "\n".join(re.findall(r"^```\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL))
HOMES = (ROOT / "optimizer" / "convpool", ROOT / "plugin", ROOT / "plugin" / "tensorrt", ROOT / "plugin" / "src")
PATH = r"(?:[\w]+/)*\w+\.(?:py|cpp|h|cuh?)\b"
NAMED = re.findall(rf"({PATH}) (\w+)", DIAGRAMS)
FUNCTIONS = re.findall(r"\b(\w+)\(\)", DIAGRAMS)


def sources(path: str) -> list[Path]:
    """The files that a diagram may mean by a path."""
    homes = (*HOMES, *(HOMES[0] / folder for folder in ("check", "tensorrt", "rules", "rules/pool_first")))
    return [home / path for home in homes if (home / path).is_file()]


def test_there_are_five_diagrams():
    assert DOCUMENT.count("\n```\n") == 10 and len(NAMED) > 25


@pytest.mark.parametrize("path", sorted(set(re.findall(PATH, DIAGRAMS))))
def test_a_path_in_a_diagram_exists(path):
    assert sources(path)


@pytest.mark.parametrize(
    "path, name", [(p, n) for p, n in NAMED if re.search(rf"{re.escape(p)} {n}(?:\(\)|$|  )", DIAGRAMS, re.M)]
)
def test_a_name_beside_a_path_stands_in_that_file(path, name):
    assert any(re.search(rf"\b{name}\b", source.read_text()) for source in sources(path)), name


def test_every_function_in_a_diagram_exists():
    code = "\n".join(path.read_text() for home in HOMES[:2] for path in home.rglob("*") if path.suffix in (".py", ".h", ".cpp"))
    assert [name for name in FUNCTIONS if not re.search(rf"\b{name}\(", code)] == []


def table() -> dict[str, set[str]]:
    """Area of the package: areas that it imports, by the document."""
    text = DOCUMENT.split("## Layers of the plugin")[0]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| [^|]* \| ((?:`\w+`(?:, )?)*) ?\|$", text, re.M)
    names = [(re.findall(r"\w+", areas), set(re.findall(r"\w+", imported))) for areas, imported in rows]
    return {area: imported for areas, imported in names for area in areas}


def test_the_package_imports_as_the_table_says():
    known = modules()
    found: dict[str, set[str]] = {area: set() for area in table()}
    for name, path in known.items():
        area = name.split(".")[1] if "." in name else ""
        if area and area != "__main__":
            others = {other.split(".")[1] for other in imports(path, set(known)) if other.startswith("convpool.")}
            found.setdefault(area, set()).update(others - {area})
    assert found.keys() == table().keys()
    assert {area: others - table()[area] for area, others in found.items() if others - table()[area]} == {}
