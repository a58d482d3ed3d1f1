# SPDX-License-Identifier: Apache-2.0
"""Rows of tuning files, which the library asks before its cost rule: `plugin/src/tuned.def`, or the one CONVPOOL_TUNED names."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from convpool.cuda.problem import Problem, Tactic
from convpool.errors import OptionError

OFF = "off"
"""Value of CONVPOOL_TUNED that leaves the choice to the cost rule."""
TACTIC_FIELD = 2
_ROW = re.compile(r"\s*CONVPOOL_TUNED\(( *[0-9]{1,10} *(?:, *[0-9]{1,10} *)*)\)\s*(?://.*)?")
_HEADER = "// Tactics by measurement, for the environment variable CONVPOOL_TUNED; the columns stand in plugin/src/tuned.def.\n"


def numbers(problem: Problem, cc: int, multiprocessors: int, tactic: int) -> list[int]:
    """The numbers of a row, in the order that `tuned.def` says."""
    s, rank = problem.struct, len(problem.spatial)
    less_exact = problem.allow_tf32 if problem.dtype == "float32" else problem.accumulation == "packed"
    general = s.prologue_affine >= 2 or problem.prologue_activation == "silu"
    prologue = 3 if general else 1 if s.prologue_affine else 2 if s.prologue_activation else 0
    row = [cc, multiprocessors, tactic, s.w_dtype, int(less_exact), s.x_layout, s.y_layout, s.has_residual, prologue]
    row += [s.group, s.n, s.c, s.m, rank]
    upsamples = any(s.upsample[i] > 1 for i in range(rank))
    for i in range(rank):
        row += [s.spatial[i], *((0, s.upsample[i]) if upsamples else (s.pool_kernel[i], s.pool_strides[i]))]
        row += [s.pool_pads[i], s.pool_pads[rank + i], s.pool_dilations[i]]
        row += [s.kernel[i], s.strides[i], s.pads[i], s.pads[rank + i], s.dilations[i]]
    return row


def row(problem: Problem, device: Mapping[str, int], tactic: Tactic | int, us: float, name: str) -> str:
    """A line of the file.  device: cc and multiprocessors, as `current_device` has them.  us: the tactic's time."""
    number = tactic if isinstance(tactic, int) else tactic.id
    text = ", ".join(map(str, numbers(problem, device["cc"], device["multiprocessors"], number)))
    return f"CONVPOOL_TUNED({text})  // {us:.1f} us, {name}"


def merged(rows: Iterable[str], path: str) -> bytes:
    """The file at `path` with `rows` in place of those of the same problems, else at its end.  Raises OptionError."""
    try:
        lines = Path(path).read_text().splitlines() if Path(path).exists() else _HEADER.splitlines()
    except (OSError, ValueError) as error:
        raise OptionError(f"{path}: cannot be read; got {error}, expected a file of rows") from error
    places = {}
    for number, line in enumerate(lines):
        if line.strip() and not line.lstrip().startswith("//"):
            places[_key(line, f"{path}: line {number + 1}")] = number
    for line in rows:
        place = places.setdefault(_key(line, "tune"), len(lines))
        lines[place : place + 1] = [line]
    return ("\n".join(lines) + "\n").encode()


def _key(line: str, where: str) -> tuple[int, ...]:
    """The numbers of a row without the tactic."""
    found = _ROW.fullmatch(line)
    if found is None:
        raise OptionError(f"{where}: no row; got {line.strip()[:60]!r}, expected CONVPOOL_TUNED(numbers)")
    values = [int(number) for number in found[1].split(",")]
    return (*values[:TACTIC_FIELD], *values[TACTIC_FIELD + 1 :])
