# SPDX-License-Identifier: Apache-2.0
"""There is one version number, the header's: the library and the installed package say the same."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

import convpool
from convpool.cuda import library

HEADER = Path(__file__).parents[2] / "plugin" / "include" / "convpool.h"


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
