# SPDX-License-Identifier: Apache-2.0
"""The ctypes mirror of convpool.h against what a C compiler makes of the header."""

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from convpool.cuda import LibraryError, box, library

INCLUDE = Path(__file__).parents[2] / "plugin" / "include"
STRUCTURES = {
    "convpool_problem": library.ProblemStruct,
    "convpool_tensors": library.TensorsStruct,
    "convpool_tactic_info": library.TacticStruct,
    "convpool_plan_properties": library.PlanStruct,
    "convpool_box_problem": box.BoxStruct,
}


def compiler() -> str:
    found = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if not found:
        pytest.skip("no C compiler")
    return found


def header_fields(structure: str) -> list[str]:
    """Names of the fields, in the order of the header."""
    text = re.sub(r"/\*.*?\*/", "", (INCLUDE / "convpool.h").read_text(), flags=re.S)
    body = re.search(r"typedef struct \{([^{}]*)\} " + structure + ";", text)[1]
    names = []
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
    program = folder / "print_layout"
    source = Path(__file__).with_name("print_layout.c")
    command = [compiler(), f"-I{INCLUDE}", f'-DFIELDS="{folder}/fields.inc"', str(source), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_field_is_where_the_header_has_it(structure, layout):
    mirror = STRUCTURES[structure]
    fields = [(name, getattr(mirror, name).offset, getattr(mirror, name).size) for name, _ in mirror._fields_]
    assert [f"{structure} {name} {offset} {size}" for name, offset, size in fields] == [
        line for line in layout if line.startswith(f"{structure} ") and len(line.split()) == 4
    ]
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
