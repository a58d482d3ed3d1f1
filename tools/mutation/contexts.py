# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: coverage.py notes the lines that each test reaches under the test's name."""

from __future__ import annotations

from collections.abc import Iterator

import coverage
import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Name the context of a test and of its fixtures."""
    running = coverage.Coverage.current()
    assert running is not None
    running.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        running.switch_context("")
