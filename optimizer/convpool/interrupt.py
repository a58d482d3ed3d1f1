# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, SIGTERM and SIGHUP end a command with one line and the status that shells expect, also while it is being imported."""

import os  # typing and pathlib take long to import: a signal still ends Python meanwhile
import signal
import sys

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
"""The word of a command that a signal ended."""


def command_name() -> str:
    """The command that this process runs, as it calls itself; "" where convpool is imported by something else."""
    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    if program == "-m":
        modules = {"convpool.cli": "convpool-optimize", "convpool": "convpool"}
        return next((name for module, name in modules.items() if module in sys.orig_argv), "")
    return program if program == "convpool" or program.startswith("convpool-") else ""


def end_quietly() -> None:
    """Let these signals end a command at once, unless somebody handles them; only in commands."""
    for number in WORDS if command_name() else ():
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end)


def raise_again() -> None:
    """Let these signals be KeyboardInterrupts, so that what is under way is cleared up."""
    for number in WORDS:
        if signal.getsignal(number) is _end:
            signal.signal(number, stop)


def ignore() -> None:
    """Ignore these signals in a command that is done, and only ends: Python would show a traceback, or end by the signal."""
    for number in WORDS:
        if signal.getsignal(number) is stop:
            signal.signal(number, signal.SIG_IGN)


def stop(number: int, _frame: object = None) -> object:
    """Raise KeyboardInterrupt with the signal's number: a handler."""
    raise KeyboardInterrupt(number)


def told(error: BaseException | None) -> tuple[str, int]:
    """Return a command's word for a KeyboardInterrupt, and its exit status."""
    number = signal.Signals(error.args[0]) if isinstance(error, KeyboardInterrupt) and error.args else signal.SIGINT
    return WORDS[number], 128 + number


def _end(number: int, _frame: object) -> object:
    try:
        os.write(2, f"{command_name()}: {WORDS[signal.Signals(number)]}\n".encode())
    finally:
        os._exit(128 + number)
