# SPDX-License-Identifier: Apache-2.0
"""The library as Python finds it: its file, its one version number, and the ctypes mirror of convpool.h."""

import ctypes
import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

import convpool
from convpool.cuda import LibraryError, library, training
from convpool.errors import NotBuiltError, TensorRTError
from convpool.tensorrt import plugin_path

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "plugin" / "include" / "convpool.h"
STRUCTURES = {
    "convpool_problem": library.ProblemStruct,
    "convpool_tensors": library.TensorsStruct,
    "convpool_tactic_info": library.TacticStruct,
    "convpool_plan_properties": library.PlanStruct,
    "convpool_box_problem": training.BoxStruct,
    "convpool_spectral_weight": training.WeightStruct,
}


def compiler() -> str:
    found = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if not found:
        pytest.skip("no C compiler")
    return found


def header_fields(structure: str) -> list[str]:
    """Names of the fields, in the order of the header."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)
    body, names = re.search(r"typedef struct \{([^{}]*)\} " + structure + ";", text)[1], []
    for declaration in filter(None, (part.strip() for part in body.split(";"))):
        first, *others = declaration.split(",")
        names += [re.search(r"(\w+)(\[[^]]*\])*$", text.strip())[1] for text in (first, *others)]
    return names


@pytest.fixture(scope="module")
def layout(tmp_path_factory) -> list[str]:
    """Return what the compiled program prints."""
    folder = tmp_path_factory.mktemp("layout")
    lines = [f"FIELD({structure}, {field});" for structure in STRUCTURES for field in header_fields(structure)]
    lines += [f'printf("{structure} %zu\\n", sizeof({structure}));' for structure in STRUCTURES]
    (folder / "fields.inc").write_text("\n".join(lines))
    program, source = folder / "print_layout", Path(__file__).with_name("print_layout.c")
    command = [compiler(), f"-I{HEADER.parent}", f'-DFIELDS="{folder}/fields.inc"', str(source), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_field_is_where_the_header_has_it(structure, layout):
    mirror = STRUCTURES[structure]
    fields = [(name, getattr(mirror, name)) for name, _ in mirror._fields_]
    wanted = [line for line in layout if line.startswith(f"{structure} ") and len(line.split()) == 4]
    assert [f"{structure} {name} {field.offset} {field.size}" for name, field in fields] == wanted
    assert f"{structure} {ctypes.sizeof(mirror)}" in layout


def test_the_versions_of_header_library_and_package_agree(layout):
    assert layout[0] == f"ABI {library.ABI_VERSION}"
    assert library.load().convpool_abi_version() == library.ABI_VERSION


def test_a_library_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(library, "ABI_VERSION", 999)
    library._load.cache_clear()
    with pytest.raises(LibraryError, match=r"another version of its interface; got \d+ from .*, expected 999"):
        library.load()
    library._load.cache_clear()


def header_version() -> str:
    parts = dict(re.findall(r"#define CONVPOOL_VERSION_(\w+) (\d+)", HEADER.read_text()))
    return ".".join(parts[name] for name in ("MAJOR", "MINOR", "PATCH"))


def test_library():
    assert library.load().convpool_version().decode() == header_version()


def test_installed_package():
    try:
        installed = importlib.metadata.version("convpool")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("convpool is not installed")
    assert installed == header_version() == convpool.__version__


def test_changes_and_citation():
    """The newest heading of the changes may be that of the next release, without a number."""
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert next(name for name in headings if name != "Unreleased") == header_version()
    assert f"\nversion: {header_version()}\n" in (ROOT / "CITATION.cff").read_text()


def install(folder: Path, name: str, version: str) -> Path:
    """A distribution as pip leaves it, with the library's file; the file."""
    information = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    file = folder / library.INSTALLED
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"a library")
    return file


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of distributions that comes first, and no library by name."""
    for name in ("CONVPOOL_LIBRARY", "CONVPOOL_PLUGIN_LIBRARY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    library._load.cache_clear()
    yield tmp_path
    library._load.cache_clear()


@pytest.mark.parametrize("named", [{}, {"CONVPOOL_LIBRARY": "", "CONVPOOL_PLUGIN_LIBRARY": ""}])
def test_the_distribution_s_file_is_the_library_and_the_plugin(folder, monkeypatch, named):
    install(folder, "convpool", "0.7.0")
    file = install(folder, "convpool-cuda", "0.7.0")
    for variable, value in named.items():
        monkeypatch.setenv(variable, value)
    assert library.library_path() == file and plugin_path() == file.resolve()


def test_another_version_of_the_distribution_is_refused(folder):
    install(folder, "convpool", "0.7.0")
    install(folder, "convpool-cuda", "0.6.9")
    message = "convpool-cuda: another version; got 0.6.9, expected convpool's 0.7.0; run `pip install ./plugin`"
    with pytest.raises(LibraryError, match=message):
        library.load()
    with pytest.raises(TensorRTError, match=message):
        plugin_path()


def test_a_distribution_without_its_file_is_an_error(folder):
    install(folder, "convpool", "0.7.0")
    install(folder, "convpool-cuda", "0.7.0").unlink()
    with pytest.raises(LibraryError, match="not found; got .*libconvpool.so, expected the file of convpool-cuda; run"):
        library.library_path()


def test_without_the_distribution_the_library_is_not_built(folder, monkeypatch):
    monkeypatch.setattr(library, "DISTRIBUTION", "convpool-none")
    with pytest.raises(NotBuiltError, match="not built; got no convpool-none, expected it installed; run `pip install ./plugin`"):
        library.load()


def test_a_named_file_comes_first(folder, monkeypatch):
    install(folder, "convpool-cuda", "0.6.9")
    (folder / "own.so").write_bytes(b"another")
    monkeypatch.setenv("CONVPOOL_LIBRARY", str(folder / "own.so"))
    assert library.library_path() == folder / "own.so" and plugin_path() == folder / "own.so"
    with pytest.raises(LibraryError, match="cannot be loaded; got .*own.so"):
        library.load()
    monkeypatch.setenv("CONVPOOL_PLUGIN_LIBRARY", str(folder / "third.so"))
    told = "not found; got .*third.so, expected the built library; CONVPOOL_PLUGIN_LIBRARY names"
    with pytest.raises(TensorRTError, match=told):
        plugin_path()


def places(folder: Path) -> dict[str, bool]:
    """Values of the variable with whether there is such a file, from inside `folder`."""
    odd = ["a b.so", "é 中.so", "\x1b[2J.so", "-rf", "$HOME", os.fsdecode(b"caf\xe9.so"), "n" * 240]
    for name in ("own.so", "deep/own.so", *odd):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"no library")
    (folder / "link.so").symlink_to("own.so")
    (folder / "broken.so").symlink_to("none.so")
    (folder / "circle.so").symlink_to("circle.so")
    os.mkfifo(folder / "fifo")
    there = ["own.so", "./own.so", ".//deep/../own.so", "deep/own.so", str(folder / "own.so"), "link.so", *odd]
    absent = ". .. / deep deep/ own.so/ /dev/null /dev/zero fifo broken.so circle.so none.so libm.so.6".split()
    absent += ["~/own.so", " own.so", "n" * 300, "n/" * 3000, "\n", os.fsdecode(b"\xff\xfe")]
    return dict.fromkeys(there, True) | dict.fromkeys(absent, False)


@pytest.mark.parametrize("variable", ["CONVPOOL_LIBRARY", "CONVPOOL_PLUGIN_LIBRARY"])
def test_odd_values_of_the_variable(folder, monkeypatch, variable):
    """A file is loaded from where it was found, whatever the loader's own folders have; else one error."""
    monkeypatch.chdir(folder)
    for named, there in places(folder).items():
        monkeypatch.setenv(variable, named)
        find = library.library_path if variable == "CONVPOOL_LIBRARY" else plugin_path
        if there:
            assert find().is_absolute() and find().samefile(named), named
            if variable == "CONVPOOL_LIBRARY":
                with pytest.raises(LibraryError, match=f"cannot be loaded; got {re.escape(str(folder.resolve()))}"):
                    library.load()
        else:
            told = f"not found; got {re.escape(named)}, expected the built library"
            with pytest.raises((LibraryError, TensorRTError), match=told):
                find()


@pytest.mark.parametrize(
    "message", [b"", b"caf\xe9", b"\x1b]0;OWNED\x07", "é 中".encode(), b"\xff" * 60, b"\x9b2J", b"a\nb", "\u202e".encode()]
)
def test_messages_of_any_bytes(monkeypatch, message):
    """The library quotes a file and names its path."""
    monkeypatch.setattr(library, "load", lambda: SimpleNamespace(convpool_last_error=lambda: message))
    assert library.last_error().isprintable() and len(library.last_error()) >= len(message.decode(errors="ignore"))
