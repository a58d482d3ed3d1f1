# SPDX-License-Identifier: Apache-2.0
"""Paths and names of docs/architecture.md exist, and its table of layers is how the package imports: the algebra only numpy, `ir`
no runtime, no two modules one another."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import convpool

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "architecture.md").read_text()
DIAGRAMS = "\n".join(re.findall(r"^```\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL))
HOMES = (ROOT / "optimizer" / "convpool", ROOT / "plugin", ROOT / "plugin" / "tensorrt", ROOT / "plugin" / "src")
PATH = r"(?:[\w]+/)*\w+\.(?:py|cpp|h|cuh?)\b"
NAMED = re.findall(rf"({PATH}) (\w+)", DIAGRAMS)
FUNCTIONS = re.findall(r"\b(\w+)\(\)", DIAGRAMS)
PACKAGE = Path(convpool.__file__).parent
ALGEBRA = sorted(f"convpool.algebra.{path.stem}" for path in (PACKAGE / "algebra").glob("*.py") if path.stem != "__init__")
RUNNING = ("onnxruntime", "convpool.check.session", "convpool.api")
"""Modules that run models."""
BLOCKED = ("onnx", "onnxruntime", "ml_dtypes", "google", "click", "rich")


def sources(path: str) -> list[Path]:
    """The files that a diagram may mean by a path."""
    homes = (*HOMES, *(HOMES[0] / folder for folder in ("check", "tensorrt", "rules", "rules/pool_first")))
    return [home / path for home in homes if (home / path).is_file()]


def test_there_are_seven_diagrams():
    assert DOCUMENT.count("\n```\n") == 14 and len(NAMED) > 35


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
    assert found == table()


def test_the_plugin_includes_as_the_table_says():
    rows = re.findall(r"^\| `plugin/src/(\w+)/` \| [^|]* \| ([^|]*) \|$", DOCUMENT, re.M)
    for folder, known in rows:
        paths = [path for path in (ROOT / "plugin" / "src" / folder).rglob("*") if path.is_file()]
        found = {name for path in paths for name in re.findall(r'#include "(\w+)/', path.read_text())}
        assert found - {folder} == set(re.findall(r"`(\w+)`", known)), folder
    assert len(rows) == 6


def modules() -> dict[str, Path]:
    """Every module of the package by its name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def runs(tree: ast.AST):
    """The nodes of a syntax tree but for what stands under `if TYPE_CHECKING`, which never runs."""
    if isinstance(tree, ast.If) and isinstance(tree.test, ast.Name) and tree.test.id == "TYPE_CHECKING":
        return
    yield tree
    for child in ast.iter_child_nodes(tree):
        yield from runs(child)


def imports(path: Path, known: set[str]) -> set[str]:
    """Return imports, in functions too: modules of the package, top-level names of others."""
    found = set()
    for node in runs(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {f"{node.module}.{a.name}" if f"{node.module}.{a.name}" in known else node.module for a in node.names}
    return {name if name.split(".")[0] == "convpool" else name.split(".")[0] for name in found}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import one another, as groups."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        pending, seen = [start], set()
        while pending:
            for name in graph[pending.pop()] - seen:
                seen.add(name)
                pending.append(name)
        reach[start] = seen
    return sorted(map(list, {tuple(sorted(b for b in reach[a] if a in reach[b])) for a in graph if a in reach[a]}))


def test_no_two_modules_import_one_another():
    known = modules()
    assert not circles({name: imports(path, set(known)) & known.keys() for name, path in known.items()})


def test_the_algebra_loads_where_there_is_numpy_alone():
    code = f"""
import importlib, sys, types
for name in {BLOCKED}:
    sys.modules[name] = None
package = types.ModuleType("convpool")  # not the package's own __init__, which imports everything
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["convpool"] = package
for name in {ALGEBRA}:
    importlib.import_module(name)
from convpool.algebra.geometry import ConvSpec, PoolSpec, Refusal
from convpool.algebra.geometry import Layer, Lowered, Obstacles, lower
layer = Layer(ConvSpec((3, 3), (1, 1), (1, 1, 1, 1), (1, 1)), (8, 4, 3, 3), (16, 16), constant=False)
pool = PoolSpec((2, 2), (2, 2), (0, 0, 0, 0), (1, 1))
direct, fused = (lower(layer, pool, name, Obstacles()) for name in ("direct", "fused"))
assert isinstance(direct, Lowered) and direct.conv.strides == (2, 2), direct
assert isinstance(fused, Refusal) and fused.expected == "a constant", fused
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ir_and_report_run_no_model():
    known = modules()
    pending = [name for name in known if name.startswith("convpool.ir.") or name == "convpool.report"]
    seen = set(pending)
    while pending:
        for name in imports(known[pending.pop()], set(known)) - seen:
            assert name not in RUNNING
            seen.add(name)
            pending += [name] if name in known else []
