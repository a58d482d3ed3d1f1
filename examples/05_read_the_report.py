# SPDX-License-Identifier: Apache-2.0
"""Read the JSON report of `convpool optimize`: totals, reasons, errors.

    convpool optimize MODEL.onnx --dry-run --report report.json
    python examples/05_read_the_report.py [report.json]

Needs: nothing but Python to read a report.  Without an argument it makes the report of the bundled LeNet-5 first, which
needs convpool.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

BUNDLED = Path(__file__).parents[1] / "models" / "lenet5_digits.onnx"


def make_report(path: Path) -> None:
    """Run the command; --dry-run writes no model."""
    command = [sys.executable, "-m", "convpool", "optimize", str(BUNDLED)]
    subprocess.run([*command, "--exclude", "/c1/*", "--dry-run", "--quiet", "--report", str(path)], check=True)


def main(path: Path | None = None) -> None:
    """Print what a report says."""
    if path is None:
        path = Path("report.json")
        make_report(path)
    report = json.loads(path.read_text())

    # "sites": one entry for each candidate, a convolution with the average or Resize beside it.
    for site in report["sites"]:
        print(f"{site['conv']} -> {site['pool']}: {site['status']} {site['operator'] or site['lowering'] or ''}")
    kept = Counter(site["obstacle"] or site["reason"] for site in report["sites"] if site["status"] == "rejected")
    for reason, count in kept.most_common():
        print(f"left unchanged {count} times: {reason}")

    # "summary": totals.  Multiply-adds are null if a size is unknown; `--input-shape` gives it.
    summary = report["summary"]
    print(f"{summary['rewritten_convolutions']} of {summary['convolutions']} convolutions rewritten")
    before, after = summary["model_macs_before"], summary["model_macs_after"]
    if before and after:
        print(f"multiply-adds of the model: {before} -> {after} ({after / before - 1:+.0%})")

    # "verification": null if nothing was checked.  Errors are null if they are infinite or NaN.
    verification = report["verification"]
    if verification:
        print("equal to the original:", verification["passed"])
        for output in verification["outputs"]:
            print(f"  {output['name']}: {output['max_rel_error']} relative")

    # "speed": null unless the models were timed (--time).
    if report["speed"]:
        print(f"times in us: {report['speed']['original_us']} -> {report['speed']['result_us']}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
