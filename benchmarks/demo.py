# SPDX-License-Identifier: Apache-2.0
"""The demonstration behind `make demo`: LeNet-5 on handwritten digits, optimized, verified, and timed before and after."""

from __future__ import annotations

import onnx
from rich.console import Console
from rich.table import Table

import convpool
from convpool.check.session import Session, time_sessions
from convpool.cli.table import make_console, show
from convpool.ir.model import LoadedModel
from models import digits

BATCHES = (1, 32)


def main() -> None:
    """Optimize the bundled model and print what changed, what was checked, and what it brings."""
    console: Console = make_console(stderr=False)
    console.print(f"convpool-optimize {digits.MODEL_PATH.name} --lowering auto")
    console.print()
    result = convpool.optimize(digits.MODEL_PATH, lowering="auto", check=3)
    show(result.report, console)
    original = onnx.load(digits.MODEL_PATH)
    images, labels = digits.load_test_set()
    name = original.graph.input[0].name
    sessions = {
        "original": Session(LoadedModel(original, None, 0), optimize=True, spin=True),
        "optimized": Session(LoadedModel(result.model, None, 0), optimize=True, spin=True),
    }
    hits = {key: int((s.run(None, {name: images})[0].argmax(1) == labels).sum()) for key, s in sessions.items()}
    table = Table("", *sessions, "ratio", box=None, pad_edge=False, title_justify="left")
    table.add_row("digits right", *(f"{hits[key]} of {len(labels)}" for key in sessions), "")
    for batch in BATCHES:
        times = time_sessions(sessions, {name: images[:batch]}, rounds=31, budget_s=5)
        table.add_row(
            f"batch {batch}",
            *(f"{times[key]:.0f} us" for key in sessions),
            f"{times['original'] / times['optimized']:.2f} times faster",
        )
    console.print()
    console.print(table)


if __name__ == "__main__":
    main()
