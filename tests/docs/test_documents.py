# SPDX-License-Identifier: Apache-2.0
"""The documents' links lead somewhere, the index lists every decision, and every source file names the licence."""

import hashlib
import re
from pathlib import Path

import pytest

from tests.support.recipes import steps

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *(p for d in ("docs", "benchmarks", "examples", "models", "plugin") for p in sorted((ROOT / d).rglob("*.md"))),
]
DECISIONS = ROOT / "docs" / "decisions"


def prose(path: Path) -> str:
    """A document without its code blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path):
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(path)) if "://" not in link]
    assert not [link for link in links if not (path.parent / link.split("#")[0]).exists()]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_of_the_repository_that_are_named_exist(path):
    """A path in backquotes, such as `benchmarks/results/cpu.json`, is one of the repository's."""
    tops = "benchmarks|docs|examples|models|optimizer|plugin|tests|tools"
    named = re.findall(rf"`((?:{tops})/[\w./-]+)`", prose(path))
    made = {step.path for step in steps(path.read_text()) if step.is_new}  # by a recipe
    assert not [name for name in named if not (ROOT / name).exists() and name not in made]


def test_decisions_are_listed_by_their_titles():
    pages = sorted(DECISIONS.glob("[0-9]*.md"))
    titles = [(p.name, p.read_text().splitlines()[0].removeprefix(f"# {p.name[:3]}: ")) for p in pages]
    assert re.findall(r"^\| \[\d+\]\((.*?)\) \| (.*) \|$", (DECISIONS / "README.md").read_text(), re.MULTILINE) == titles
    assert [int(name[:3]) for name, _ in titles] == list(range(1, len(titles) + 1))


@pytest.mark.parametrize("path", sorted(DECISIONS.glob("[0-9]*.md")), ids=lambda path: path.stem)
def test_a_decision_has_context_decision_and_evidence(path):
    assert re.findall(r"^## (.*)$", path.read_text(), re.MULTILINE) == ["Context", "Decision", "Evidence"]


def test_the_log_is_short():
    assert len((ROOT / "docs" / "log.md").read_text().splitlines()) <= 60


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


def test_files_that_comments_of_the_library_name_exist():
    """A file such as `core/plan.h` in a comment is one of the repository's, or of those that a build gets or makes."""
    others = {"onnxruntime_c_api.h", "NvInfer.h", "build_hash.h", "a.cpp", "b.h"}
    plugin = [path for path in SOURCES if path.is_relative_to(ROOT / "plugin")]
    ends = tuple(f"/{path.relative_to(ROOT)}" for path in SOURCES)
    named = re.compile(r"(?<![\w./<-])[\w/]+\.(?:cuh|cu\.in|cpp|def|cmake|h|py|sh)\b")
    comments = [(path, text) for path in plugin for text in re.findall(r"(?://|^#) (.*)$", path.read_text(), re.MULTILINE)]
    found = [(path, name) for path, text in comments for name in named.findall(text) if name not in others]
    assert len(found) > 20
    assert [(path.name, name) for path, name in found if not any(end.endswith(f"/{name}") for end in ends)] == []


def test_the_licence_is_there_in_full():
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == TEXT_SHA256
    assert (ROOT / "plugin" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
