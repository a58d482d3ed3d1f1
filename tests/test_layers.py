# SPDX-License-Identifier: Apache-2.0
"""Imports by part: the algebra only numpy, `ir` no runtime, no two modules one another."""

import ast
import subprocess
import sys
from pathlib import Path

import convpool

PACKAGE = Path(convpool.__file__).parent
ALGEBRA = sorted(f"convpool.algebra.{path.stem}" for path in (PACKAGE / "algebra").glob("*.py") if path.stem != "__init__")
RUNNING = ("onnxruntime", "convpool.check.session", "convpool.check.session", "convpool.api")
"""Modules that run models."""
BLOCKED = ("onnx", "onnxruntime", "ml_dtypes", "google", "click", "rich")


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
from convpool.algebra.lowering import Layer, Lowering, Obstacles, lower
layer = Layer(ConvSpec((3, 3), (1, 1), (1, 1, 1, 1), (1, 1)), (8, 4, 3, 3), (16, 16), constant=False)
pool = PoolSpec((2, 2), (2, 2), (0, 0, 0, 0), (1, 1))
direct, fused = (lower(layer, pool, name, Obstacles()) for name in ("direct", "fused"))
assert isinstance(direct, Lowering) and direct.conv.strides == (2, 2), direct
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
