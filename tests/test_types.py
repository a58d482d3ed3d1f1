# SPDX-License-Identifier: Apache-2.0
"""mypy --strict holds a caller to the public types, a graphsurgeon Graph comes back as one, and PyTorch may be missing."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import get_args

import onnx
import onnx_graphsurgeon as gs
import pytest

import convpool
from convpool import pipeline, types
from convpool.algebra.geometry import REQUESTS
from convpool.errors import OptionError
from convpool.ir.files import LAYOUTS
from convpool.options import TARGETS
from tests.support import sessions
from tests.support.models import graph, random_feeds
from tests.support.rewriting import PAIR

PACKAGE = Path(convpool.__file__).parents[1]
EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
SCRIPT = '''
"""What a user may write; each line with `type: ignore` is a mistake that mypy has to find."""

from pathlib import Path

import onnx

import convpool


def shrink(path: Path, lowering: convpool.Lowering = "auto") -> float:
    result = convpool.optimize(path, lowering=lowering, target="cpu", check=2, exclude=["/c1/*"], time=True)
    report: convpool.Report = result.report
    for site in report.sites:
        print(site.conv.upper(), site.pool, site.status, site.lowering or site.reason)
    model: onnx.ModelProto = result.model
    written: list[Path] = result.save("out.onnx", external_data="one")
    checked: convpool.Verification = convpool.verify(model, written[0], input_shapes={"x": (1, 3, 8, 8)})
    assert checked.passed, convpool.__version__.split(".")
    return report.speed.ratio if report.speed else 1.0


convpool.optimize(b"")
convpool.optimize("model.onnx", lowering="fused")
convpool.verify(onnx.ModelProto(), "out.onnx")
convpool.optimize(3)  # type: ignore[arg-type]
convpool.optimize("model.onnx", lowering="nonsense")  # type: ignore[arg-type]
convpool.optimize("model.onnx", target="gpu")  # type: ignore[arg-type]
convpool.optimize("model.onnx", check="2")  # type: ignore[arg-type]
convpool.verify(1, "out.onnx")  # type: ignore[arg-type]
convpool.optimize("model.onnx").save("out.onnx", external_data="two")  # type: ignore[arg-type]
convpool.optimize("model.onnx").report.sight  # type: ignore[attr-defined]
'''


def test_mypy_strict_holds_a_caller_and_the_examples_to_the_types(tmp_path):
    """Strict warns of an ignore that hides nothing, so that every mistake has to be found."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file=", f"--cache-dir={tmp_path}"]
    words += ["--ignore-missing-imports", str(script), *map(str, EXAMPLES)]
    # mypy finds what is installed, and wants no path.
    path = {} if PACKAGE.name == "site-packages" else {"MYPYPATH": str(PACKAGE)}
    done = subprocess.run(words, capture_output=True, text=True, env={"PATH": "", **path}, cwd=tmp_path)
    told = f"Success: no issues found in {len(EXAMPLES) + 1} source files\n"
    assert EXAMPLES and (done.returncode, done.stdout) == (0, told), done.stdout + done.stderr


def test_the_types_list_what_the_options_take():
    assert set(get_args(types.Lowering)) == set(REQUESTS)
    assert set(get_args(types.Target)) == set(TARGETS)
    assert set(get_args(types.Layout)) == set(LAYOUTS)
    assert (PACKAGE / "convpool" / "py.typed").exists()


def test_a_graph_of_graphsurgeon_comes_back_as_one():
    model = graph(PAIR)
    result = convpool.optimize(gs.import_onnx(model))
    assert isinstance(result.graph, gs.Graph) and [node.op for node in result.graph.nodes] == ["ConvAvgPool"]
    assert convpool.verify(gs.import_onnx(model), result.graph).passed
    feeds, exported = random_feeds(model), gs.export_onnx(result.graph)
    onnx.checker.check_model(exported)
    assert sessions.run(exported, feeds)[0].shape == sessions.run(model, feeds)[0].shape


def test_a_graph_holds_the_weights_of_external_files(tmp_path):
    onnx.save(graph(PAIR), tmp_path / "in.onnx", save_as_external_data=True, size_threshold=0)
    result = convpool.optimize(tmp_path / "in.onnx", lowering="direct")
    (tmp_path / "in.onnx").unlink()
    found = result.graph
    for path in tmp_path.iterdir():
        path.unlink()
    assert gs.export_onnx(found).graph.initializer[0].raw_data == graph(PAIR).graph.initializer[0].raw_data


def test_a_graph_without_graphsurgeon_says_what_to_install(monkeypatch):
    result = convpool.optimize(graph(PAIR), check=0)
    monkeypatch.setitem(sys.modules, "onnx_graphsurgeon", None)
    with pytest.raises(OptionError, match="pip install onnx-graphsurgeon"):
        _ = result.graph


def test_the_package_needs_no_graphsurgeon():
    """It is an extra: one property imports it, and only when asked."""
    imports = [
        (path.name, node)
        for path in (PACKAGE / "convpool").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom) and "onnx_graphsurgeon" in ast.unparse(node)
    ]
    assert [name for name, _ in imports] == [Path(pipeline.__file__).name] and imports[0][1].col_offset > 0


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_convpool_imports_neither_torch_nor_tensorrt():
    found = "[name for name in ('torch', 'tensorrt', 'pycuda') if name in sys.modules]"
    assert python(f"import sys, convpool, convpool.cuda, convpool.tensorrt; print({found})").strip() == "[]"


@pytest.mark.parametrize(("version", "fault"), [("None", "not installed"), ("'2.6.0'", "version; got 2.6.0, expected 2.7")])
def test_convpool_torch_names_the_extra(version, fault):
    said = python(
        f"""
import convpool, importlib.util, sys, types
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: {version} if name == "torch" else found(name, *rest)
sys.modules["torch"] = types.SimpleNamespace(__version__={version})
try:
    import convpool.torch
except convpool.ConvpoolError as error:
    print(isinstance(error, ImportError), error)
"""
    )
    assert said.startswith(f"True torch: {fault}") and "'convpool[torch]'" in said
