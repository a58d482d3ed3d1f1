# SPDX-License-Identifier: Apache-2.0
"""Prints, for each exporter, the models, their pairs, how many are rewritten, and which are missed and why."""

from tests.support.exported.cases import CASES, EXPORTERS
from tests.support.exported.made import MODELS, made, remove


def main() -> None:
    """Export and optimize everything."""
    missed, counts = [], {exporter: [0, 0, 0] for exporter in EXPORTERS}
    for name, exporter in MODELS:
        report, pairs = made(name, exporter).report, CASES[name].pairs
        found = report.summary.rewritten
        counts[exporter] = [a + b for a, b in zip(counts[exporter], (1, pairs, found), strict=True)]
        if found < pairs:
            reasons = {site.reason for site in report.sites if site.status == "rejected"}
            missed.append(f"{exporter}, {name}: {'; '.join(sorted(filter(None, reasons))) or 'not recognised'}")
    print("| exporter | models | pairs | rewritten | missed |\n| --- | --- | --- | --- | --- |")
    for exporter, (models, pairs, found) in counts.items():
        print(f"| {exporter} | {models} | {pairs} | {found} | {pairs - found} |")
    print(*missed, sep="\n")


if __name__ == "__main__":
    try:
        main()
    finally:
        remove()
