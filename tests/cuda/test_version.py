# SPDX-License-Identifier: Apache-2.0
"""There is one version number, the header's: the library, the installed package, changes and citation say the same."""

import importlib.metadata
import re
from pathlib import Path

import pytest

import convpool
from convpool.cuda import library

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "plugin" / "include" / "convpool.h"


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
