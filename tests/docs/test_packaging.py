# SPDX-License-Identifier: Apache-2.0
"""The two distributions' files and metadata: built by their own backends, without compiling."""

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from tests.cuda.test_abi import header_version

ROOT = Path(__file__).parents[2]
IGNORED = {"__pycache__", ".git", ".venv", "build", "dist", "shared", ".hypothesis"}

pytest.importorskip("scikit_build_core")


def backend(folder: Path, call: str) -> str:
    """Return what a hook of the distribution's build backend returns."""
    paths = [str(folder / "build_backend")] if folder.name == "plugin" else []
    module = "convpool_build" if paths else "scikit_build_core.build"
    code = f"import sys; sys.path[:0] = {paths}; import {module} as backend; print(); print(backend.{call})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def check_metadata(metadata: Message, name: str) -> None:
    assert (metadata["Name"], metadata["Version"]) == (name, header_version())
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert metadata["Author"] == "The convpool authors" and metadata["Keywords"] and metadata.get_all("Classifier")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """The wheel of convpool."""
    folder = tmp_path_factory.mktemp("wheel")
    return zipfile.ZipFile(folder / backend(ROOT, f"build_wheel({str(folder)!r})"))


def test_the_optimizer_is_python_for_any_platform(wheel):
    assert Path(wheel.filename).name == f"convpool-{header_version()}-py3-none-any.whl"
    package = {path.relative_to(ROOT / "optimizer").as_posix() for path in (ROOT / "optimizer").rglob("*") if path.is_file()}
    wanted = {path for path in package if "__pycache__" not in path and not path.endswith(".so")}
    assert {file for file in wheel.namelist() if ".dist-info/" not in file} == wanted
    check_metadata(email.message_from_bytes(wheel.read(f"convpool-{header_version()}.dist-info/METADATA")), "convpool")


def test_extras_name_the_cuda_library(wheel):
    metadata = email.message_from_bytes(wheel.read(f"convpool-{header_version()}.dist-info/METADATA"))
    needed = metadata.get_all("Requires-Dist")
    assert [line for line in needed if "extra" not in line and "cuda" in line] == []
    assert any(re.fullmatch(r"convpool-cuda; *extra == ['\"]cuda['\"]", line) for line in needed), needed


def test_the_cuda_library_s_metadata_need_no_compiler(tmp_path):
    information = tmp_path / backend(ROOT / "plugin", f"prepare_metadata_for_build_wheel({str(tmp_path)!r})")
    check_metadata(email.message_from_string((information / "METADATA").read_text()), "convpool-cuda")


def test_without_a_compiler_the_cuda_library_says_what_to_install(tmp_path):
    code = "import sys; sys.path[:0] = ['build_backend']; import convpool_build; convpool_build.get_requires_for_build_wheel()"
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "plugin", env=environment)
    assert done.returncode == 1
    assert done.stderr.startswith("convpool-cuda: no C++ compiler found; install one")


def test_the_sdist_has_all_that_its_documents_name(tmp_path):
    sdist = tarfile.open(tmp_path / backend(ROOT, f"build_sdist({str(tmp_path)!r})"))
    names = {name.partition("/")[2] for name in sdist.getnames()}
    folders = ("benchmarks", "docs", "models", "optimizer", "plugin", "tests", "tools")
    files = [path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    wanted = {path.as_posix() for path in files if not IGNORED & set(path.parts) and path.suffix != ".so"}
    wanted |= {"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "pyproject.toml"}
    wanted |= {".ci/run", ".clang-format"}
    assert wanted - names == set() and len(wanted) > 400
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_the_cuda_library_s_sdist_builds_alone(tmp_path):
    sdist = tarfile.open(tmp_path / backend(ROOT / "plugin", f"build_sdist({str(tmp_path)!r})"))
    names = {name.partition("/")[2] for name in sdist.getnames()}
    files = {path.relative_to(ROOT / "plugin") for path in (ROOT / "plugin").rglob("*") if path.is_file()}
    assert {path.as_posix() for path in files if not IGNORED & set(path.parts)} - names == set()
