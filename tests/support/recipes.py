# SPDX-License-Identifier: Apache-2.0
"""Reads the recipes of a document and does what they say, on a copy of the sources.

A recipe is a section.  A step of it is a line that begins with a path in backquotes and ends with a colon, and the block of
code below it: of the language `diff` a change to that file, of another language a new file.  In a change, lines that begin with
a space or a minus must stand in the file once, one below the other; `@@` separates places.
"""

import re
from dataclasses import dataclass
from pathlib import Path

STEP = re.compile(r"^`([\w./-]+)`[^\n]*:\n\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Step:
    """One file of a recipe: what to change in it, or all of it if `is_new`."""

    path: str
    is_new: bool
    text: str


def steps(text: str) -> list[Step]:
    """Every step of a text."""
    return [Step(path, language != "diff", change) for path, language, change in STEP.findall(text)]


def recipe(document: str, heading: str) -> list[Step]:
    """The steps of the section whose heading begins with `heading`."""
    sections = [part for part in re.split(r"^## ", document, flags=re.MULTILINE) if part.startswith(heading)]
    assert len(sections) == 1, f"sections that begin with {heading!r}: {len(sections)}"
    found, blocks = steps(sections[0]), len(re.findall(r"^```", sections[0], re.MULTILINE)) // 2
    assert len(found) == blocks, f"blocks of code without a line above that says which file: {blocks - len(found)}"
    return found


def changed(text: str, change: str) -> str:
    """A file's text after a change.  Raises AssertionError where its old lines do not stand there once."""
    for place in re.split(r"^@@.*\n", change, flags=re.MULTILINE):
        lines = place.splitlines()
        assert all(line[:1] in " -+" for line in lines), f"a line of a change that is none: {place}"
        old = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
        new = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
        found = f"\n{text}".count(f"\n{old}")
        assert old and found == 1, f"lines that a recipe changes stand in the file {found} times:\n{old}"
        text = f"\n{text}".replace(f"\n{old}", f"\n{new}", 1)[1:]
    return text


def follow(recipe: list[Step], root: Path) -> None:
    """Do what the steps say in the copy of the repository at `root`; every recipe has at least one step."""
    assert recipe
    for step in recipe:
        path = root / step.path
        if step.is_new:
            assert not path.exists(), f"{step.path} exists"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(step.text)
        else:
            path.write_text(changed(path.read_text(), step.text))
