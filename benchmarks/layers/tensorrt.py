# SPDX-License-Identifier: Apache-2.0
"""TensorRT in a process of its own: another Python may have it than the one with PyTorch.

The process runs `tensorrt_worker`, reads a request a line and answers with a result a line; it measures while this one
waits.  One run so measures TensorRT beside the other methods.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.layers.record import Result
from benchmarks.layers.rows import Row
from convpool.errors import ConvpoolError

ROOT = Path(__file__).parents[2]


def program(module: str, python: str | None = None) -> list[str]:
    """The words that run `main` of a module, which -m would let import from the folder where one stands.

    It imports from where this process does.  Another Python (older than 3.11, it has no -P) imports from its own folders.
    """
    path = "[folder for folder in sys.path if folder]" if python else repr(sys.path)
    return [python or sys.executable, "-c", f"import sys; sys.path = {path}; from {module} import main; sys.exit(main())"]


class WorkerError(ConvpoolError):
    """TensorRT's process cannot be started, or ended."""


class Worker:
    """A running worker.  python: the interpreter that has TensorRT and pycuda.  Raises WorkerError."""

    def __init__(self, python: str | None = None) -> None:
        command = program("benchmarks.layers.tensorrt_worker", python)
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": paths},
            )  # Ctrl-C ends the run, not the answer in hand
        except OSError as error:
            raise WorkerError(f"TensorRT: {command[0]} cannot be started; got {error.strerror or error}") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        hello = self._answer()
        if "error" in hello:
            raise WorkerError(f"TensorRT: {hello['error']}")
        self.version = hello["version"]

    def measure(self, row: Row, precision: str, layout: str, form: str, replays: int, level: int) -> Result:
        """The result of one form ("naive", "fused", "direct") at a builder optimization level."""
        request = {
            "row": row.to_json(),
            "precision": precision,
            "layout": layout,
            "form": form,
            "replays": replays,
            "level": level,
        }
        try:
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
        except OSError as error:
            raise WorkerError(f"TensorRT: its process ended; got {error.strerror or error}") from error
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        for line in self._answers:
            if line.startswith("{"):  # other lines are what libraries print
                return json.loads(line)
        raise WorkerError(f"TensorRT: its process ended; got exit status {self._process.wait()}, expected an answer")

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):  # what a process that has ended did not take
            self._requests.close()
        self._answers.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
