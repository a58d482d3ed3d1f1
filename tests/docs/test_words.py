# SPDX-License-Identifier: Apache-2.0
"""Code and texts of the package and the plugin use the field's words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTEAD = {
    r"siblings?": "fused variant",
    r"absorb(?!ed\b)\w*": "fuse",  # `absorbed` is a key of the report
    r"halves": "half precision, split, parts",
    r"tak(?:e|es|en|ing) (?:it |them )?in\b(?! turn| zip)": "fuse",
    r"(?:activation|convolution|pooling|rank|type) alone": "only the ...",
}
FILES = [
    path
    for folder in ("optimizer/convpool", "plugin")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".h", ".cpp", ".cu", ".cuh", ".def")
]


def retired(text: str) -> list[str]:
    """Words of a text that have a better one."""
    return [found[0] for word in INSTEAD for found in re.finditer(rf"\b{word}\b", text, re.IGNORECASE)]


def test_words_are_found():
    assert retired("a Sibling takes it in, absorbs\nhalves") == ["Sibling", "absorbs", "halves", "takes it in"]
    assert retired("site.absorbed is taken into the list; calls take in turn") == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_words(path):
    assert not retired(path.read_text()), INSTEAD
