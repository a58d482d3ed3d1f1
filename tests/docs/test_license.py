# SPDX-License-Identifier: Apache-2.0
"""Every source file names the licence at its head, and both distributions carry the licence's text."""

import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINE = "SPDX-License-Identifier: Apache-2.0"
TEXT_SHA256 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"  # apache.org/licenses/LICENSE-2.0.txt
FOLDERS = ("benchmarks", "docs", "models", "optimizer", "plugin", "tests", "tools")
ENDINGS = (".py", ".c", ".h", ".cpp", ".cu", ".cuh", ".cu.in", ".def", ".map", ".cmake", ".sh", "CMakeLists.txt")
SOURCES = [
    ROOT / "Makefile",
    ROOT / ".ci" / "run",
    *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.name.endswith(ENDINGS)),
]


def test_every_source_file_names_the_licence_in_its_first_lines():
    assert len(SOURCES) > 400
    without = [path for path in SOURCES if not any(LINE in line for line in path.read_text().splitlines()[:2])]
    assert [str(path.relative_to(ROOT)) for path in without] == []


def test_the_licence_is_there_in_full():
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == TEXT_SHA256
    assert (ROOT / "plugin" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
