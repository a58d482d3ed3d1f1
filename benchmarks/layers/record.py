# SPDX-License-Identifier: Apache-2.0
"""The results of a run as data: rows with one result per method; JSON, CSV, merging.

A result is one of

    {"us", "spread_us", "error", "exact", "how"}   measured: median and interquartile range of microseconds a call
    {"wrong": error, "how"}                        its output differs from the reference; never timed
    {"skipped": reason}                            not run here

error is ||Y - R|| / ||R|| on random data against R in float64 (null where it is not finite); exact says whether data of
small integers gave the rounded exact result, which needs windows of a power of two; how names the algorithm chosen.
prologue_us is the part of us that a row's prologue takes as a kernel of its own at the speed of memory.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
import math
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.layers.rows import Row
from convpool.errors import OptionError

FORMAT = 1
Result = dict[str, Any]
Entry = dict[str, Any]
"""A row as measured: `row`, `precision`, `layout`, `direct_flops`, `min_bytes`, `methods`, `input_sets`, and `seconds`: of wall
time by method (`convpool`: all tactics) and for the row's `data`.  Records of older versions have no `seconds`."""


def new_record(command: str, commit: str, protocol: dict[str, Any]) -> dict[str, Any]:
    """A record without rows."""
    return {
        "format": FORMAT,
        "command": command,
        "commit": commit,
        "time": _now(),
        "machine": machine(),
        "protocol": protocol,
        "ceilings": {},
        "rows": [],
    }


def without_folders(words: list[str]) -> str:
    """A command line whose paths are names only, quoted for a shell."""
    return shlex.join(re.sub(r"[^=\s]*/", "", word) for word in words)


def new_entry(row: Row, precision: str, layout: str) -> Entry:
    """A row without results."""
    return {
        "row": row.to_json(),
        "precision": precision,
        "layout": layout,
        "direct_flops": row.direct_flops,
        "min_bytes": row.min_bytes(precision),
        "methods": {},
    }


def entry_row(entry: Entry) -> Row:
    """The row of an entry."""
    return Row(**entry["row"])


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def machine() -> dict[str, str]:
    """Name, driver and clocks of the first GPU by nvidia-smi; empty without it."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return {}
    query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem"
    done = subprocess.run([smi, f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {}
    return dict(zip(query.split(","), (value.strip() for value in lines[0].split(",")), strict=False))


def load(path: str) -> dict[str, Any]:
    """A record from a file.  Raises OptionError if it is none."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise OptionError(f"{path}: cannot be read; {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path}: cannot be read as JSON; got {error}, expected a record of layers") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("rows"), list):
        raise OptionError(f"{path}: no record of layers; expected an object with format {FORMAT} and rows")
    try:
        for entry in data["rows"]:
            _key(entry), entry["methods"].items()
    except (TypeError, KeyError, AttributeError) as error:
        raise OptionError(f"{path}: a row cannot be read; got {type(error).__name__} {error}") from error
    return data


def _key(entry: Entry) -> tuple:
    return entry_row(entry), entry["precision"], entry["layout"]


def merge(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of all rows: the first one's, with the rows and methods of the later ones added; later results win."""
    result = {**records[0], "rows": []}
    sources: list[dict[str, Any]] = []
    rows: dict[tuple, Entry] = {}
    for record in records:
        sources.append({key: record.get(key) for key in ("command", "commit", "time", "machine", "protocol")})
        tflops = {**result["ceilings"].get("tflops", {}), **record.get("ceilings", {}).get("tflops", {})}
        result["ceilings"] = {**result["ceilings"], **record.get("ceilings", {})} | ({"tflops": tflops} if tflops else {})
        for entry in record["rows"]:
            key = _key(entry)
            held = rows.setdefault(key, {**entry, "methods": {}})
            held["methods"].update(entry["methods"])
            if "seconds" in entry:
                held["seconds"] = {**held.get("seconds", {}), **entry["seconds"]}
    result["rows"] = list(rows.values())
    return result if len(records) == 1 else {**result, "merged": sources}


def to_json(record: dict[str, Any]) -> bytes:
    """The file format, a line for every innermost object; numbers that are not finite become null."""
    text = json.dumps(_finite(record), indent=1)
    text = re.sub(r"\{\n([^{}]*)\n *\}", lambda found: "{" + re.sub(r"\n *", " ", found[1].strip()) + "}", text)
    return (text + "\n").encode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def significant(value: float) -> float:
    """A number to three significant digits, as errors are recorded."""
    return float(f"{value:.3g}")


CSV_COLUMNS = ("suite", "row", "precision", "layout", "method", "us", "spread_us", "error", "exact", "how", "note")


def to_csv(record: dict[str, Any]) -> bytes:
    """One line for every row and method."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for entry in record["rows"]:
        row = entry_row(entry)
        common = {"suite": row.suite, "row": row.name, "precision": entry["precision"], "layout": entry["layout"]}
        for method, result in entry["methods"].items():
            note = f"wrong: {result['wrong']}" if "wrong" in result else result.get("skipped", "")
            writer.writerow({**common, **result, "method": method, "note": note})
    return text.getvalue().encode()
