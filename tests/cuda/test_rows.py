# SPDX-License-Identifier: Apache-2.0
"""Ids of kernels that were retired are not used again: engines and tables of measurements name them."""

import re
from pathlib import Path

from convpool.cuda import tactics

DECISION = Path(__file__).parents[2] / "docs" / "decisions" / "032-rows-and-families-that-stay.md"
RETIRED = re.compile(r"^\| `[\w]+` \|[^|]*\| ([\d, ]+) \|$", re.MULTILINE)


def test_an_id_of_a_retired_row_is_not_used_again():
    retired = {int(number) for ids in RETIRED.findall(DECISION.read_text()) for number in re.findall(r"[1-4]\d{3}\b", ids)}
    assert len(retired) == 61
    assert not retired & {tactic.id for tactic in tactics()}
