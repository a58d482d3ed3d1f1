# SPDX-License-Identifier: Apache-2.0
"""Runs the kernel tests and compute-sanitizer on this machine's GPU and records what they say.

    python tools/gpu_checks.py --json benchmarks/results/h200_kernel_tests.json --commit "$(git rev-parse HEAD)"

Needs pycuda, pytest, PyTorch (for cuDNN's error) and compute-sanitizer. Exits with 1 if anything failed or was skipped.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from convpool import cuda

ROOT = Path(__file__).parent.parent
SANITIZE = ROOT / "tests" / "support" / "kernels" / "sanitize.sh"


def gpu() -> dict:
    query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    values = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(",")
    return dict(zip(query.split(","), (v.strip() for v in values), strict=True))


def run_tests(workers: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            str(ROOT / "tests" / "cuda"),
            "-q",
            f"--junitxml={report}",
            "-p",
            "no:cacheprovider",
        ]
        command += ["-n", workers, "--dist", "loadgroup"] if workers != "0" else []
        # Many processes with many threads each would wait for one another.
        subprocess.run(command, env=os.environ | {"REQUIRE_GPU": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
        suite = ElementTree.parse(report).getroot().find("testsuite")
        counts = {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
    return counts


def run_sanitizer() -> dict:
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run([str(SANITIZE)], capture_output=True, text=True, env=environment)
    print(done.stdout)
    parts = re.split(r"^== (\w+)$", done.stdout, flags=re.MULTILINE)[1:]
    summaries = {
        tool: re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", text) for tool, text in zip(parts[::2], parts[1::2], strict=True)
    }
    runs = [int(n) for n in re.findall(r"(\d+) checked runs", done.stdout)]
    return {"exit_status": done.returncode, "summaries": summaries, "checked_runs": runs}


PARTS = {"tests": run_tests, "compute_sanitizer": lambda workers: run_sanitizer()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{' or '.join(PARTS)}; default both, side by side")
    parser.add_argument("--json", type=Path, required=True, help="record to write; a part that is not run stays as it is there")
    parser.add_argument("--commit", default="", help="commit to record")
    parser.add_argument("--workers", default="0", help="processes for pytest-xdist; 0: none")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no such part; got {unknown.pop()}, expected {' or '.join(PARTS)}")
    parts = arguments.parts or list(PARTS)
    with ThreadPoolExecutor() as pool:  # the sanitizer slows its own process down, not the others
        running = {part: pool.submit(PARTS[part], arguments.workers) for part in parts}
        found = {part: one.result() for part, one in running.items()}
    sys.path.insert(0, str(ROOT))
    from tests.support.kernels import conv_cases

    about = {
        "commit": arguments.commit,
        "gpu": gpu(),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(Path(argument).name for argument in sys.argv),
    }
    record = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    record |= {
        "architectures": cuda.library.load().convpool_architectures().decode(),
        "tactics": len(cuda.tactics()),
        "shapes": len(conv_cases.all_cases()),
        **{part: {**about, **result} for part, result in found.items()},
    }
    arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    failed = [found["tests"][name] for name in ("failures", "errors", "skipped")] if "tests" in found else []
    failed += [found["compute_sanitizer"]["exit_status"]] if "compute_sanitizer" in found else []
    return 1 if any(failed) else 0


if __name__ == "__main__":
    sys.exit(main())
