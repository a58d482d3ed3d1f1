# SPDX-License-Identifier: Apache-2.0
"""The changes that `make mutation` makes, and how the record counts them."""

import ast
from collections import Counter

import pytest

from tools.mutation.__main__ import sample, score
from tools.mutation.mutants import mutants

CHANGES = {
    "a = b < c": ["a = (b >= c)", "a = (b <= c)"],
    "a = b is None": ["a = (b is not None)"],
    "a = b + c": ["a = (b - c)"],
    "a = b // 2": ["a = (b * 2)", "a = b // 3", "a = b // 1"],
    "a = 0": ["a = 1", "a = (-1)"],
    "a = True": ["a = False"],
    "a = b and c": ["a = (b or c)"],
    "a = not b": ["a = b"],
    "a = min(b)": ["a = max(b)"],
    "a = any(b)": ["a = all(b)"],
    "a = b if c else d": ["a = (b if not c else d)"],
    "def f():\n    return a": ["def f():\n    return None"],
    "def f():\n    return None": [],
    "f()": ["pass"],
    "if a:\n    b = c": ["pass"],
    "if a:\n    b = c\nelse:\n    b = d": [],
    "raise a": ["pass"],
    'def f() -> "int | None":\n    """Text."""\n    b: int | str = c': [],
    "assert a < b": [],
    "import a": [],
    'a = f"{b + c}"': [],
    "a = reject(b, c + d)": [],
    "a = ModelError(b + 1)": [],
    "é = b + c": ["é = (b - c)"],
}


@pytest.mark.parametrize("text", CHANGES)
def test_changes(text):
    assert [mutant.apply(text) for mutant in mutants(text)] == CHANGES[text]


def test_a_sample_is_the_same_for_the_same_seed_and_valid_python():
    chosen = sample(40, 3)
    assert chosen == sample(40, 3) != sample(40, 4)
    assert len({(path, mutant.line) for path, mutant in chosen}) == 40
    for path, mutant in chosen:
        text = path.read_text()
        changed = mutant.apply(text)
        assert changed != text
        ast.parse(changed)


def test_what_is_harmless_does_not_count():
    unseen = [{"judged": "equivalent: one input"}, {"judged": "message only"}, {"judged": ""}, {"judged": "a hole"}]
    counts = Counter(killed=15, timeout=1, survived=4)
    assert score(counts, unseen) == {"mutants": 20, "seen": 16, "harmless": 2, "share": round(16 / 18, 4)}
