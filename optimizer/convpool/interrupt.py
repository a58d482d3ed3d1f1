# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a command is being imported, which takes half a second: one line and status 130, as later on."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended."""


def command_name() -> str:
    """The command that this process runs, as it calls itself; "" where convpool is imported by something else."""
    program = Path(sys.argv[0]).name if sys.argv else ""
    if program == "-m" and "convpool.cli" in sys.orig_argv:
        return "convpool-optimize"
    return program if program == "convpool" or program.startswith("convpool-") else ""


def end_quietly() -> None:
    """From now on Ctrl-C ends a command at once.  Nothing for other programs, or where somebody handles it already."""
    if command_name() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """From now on Ctrl-C is a KeyboardInterrupt again, so that what is under way is cleared up."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(_number: int, _frame: FrameType | None) -> Any:
    os.write(2, f"{command_name()}: interrupted\n".encode())
    os._exit(INTERRUPTED)
