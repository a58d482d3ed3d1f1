# SPDX-License-Identifier: Apache-2.0
"""The progress bar of the commands that go through a known number of steps."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn

from convpool.cli.table import make_console
from convpool.errors import printable


class StepBar:
    """A bar on stderr, with the step to its left, or `first` there; nothing if `hidden` or where stderr is no terminal."""

    def __init__(self, first: ProgressColumn | None = None, *, hidden: bool) -> None:
        console = make_console(stderr=True)
        self._shown = console.is_terminal and not hidden
        step = TextColumn("{task.description}", markup=False)
        columns = (first, BarColumn(), MofNCompleteColumn(), step) if first else (step, BarColumn(), MofNCompleteColumn())
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> StepBar:
        if self._shown:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._bar.stop()

    def update(self, done: int, total: int, what: str) -> None:
        """Show that step number `done` of `total` is under way, and what it is."""
        self._bar.update(self._task, completed=done, total=total, description=printable(what))
