# SPDX-License-Identifier: Apache-2.0
"""Looks in machine code for registers that are touched while a product of wgmma still uses them.

    nvdisasm -c kernels.cubin > kernels.sass
    python -m tools.wgmma_hazards kernels.sass

A product (HGMMA) reads its first operand and writes its accumulators until WARPGROUP.DEPBAR has waited for its group. ptxas
keeps to that within a block of code, but not from one turn of a loop to the next, and it warns of nothing. So the code of a
kernel is gone through in order, the loop around its products twice. Prints each write to such an operand and each use of such an
accumulator; exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_KERNEL = re.compile(r"\.text\.(\S+):")
_LABEL = re.compile(r"(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;")
_WRITES_NO_REGISTER = ("ST", "BAR", "BRA", "SYNCS.ARRIVE", "RED")
_WIDTHS = ((".128", 4), ("LDSM.16.M88.4", 4), (".64", 2), ("WIDE", 2))


class Line(NamedTuple):
    """An instruction, or a label, which has no operation."""

    at: str
    operation: str = ""
    arguments: str = ""


class Product(NamedTuple):
    """A product under way, and the registers that it uses."""

    at: str
    accumulators: frozenset[int]
    operand: frozenset[int]


def kernels(listing: str) -> dict[str, list[Line]]:
    """The lines of each kernel of nvdisasm's listing, by its name."""
    found: dict[str, list[Line]] = {}
    lines: list[Line] = []
    for text in listing.splitlines():
        if name := _KERNEL.match(text):
            lines = found.setdefault(name[1], [])
        elif label := _LABEL.match(text):
            lines.append(Line(label[1]))
        elif instruction := _INSTRUCTION.match(text):
            lines.append(Line(*instruction.groups()))
    return found


def hazards(lines: list[Line]) -> list[tuple[Line, Product]]:
    """Each instruction that touches what a product under way uses, and that product."""
    groups: list[list[Product]] = []
    pending: list[Product] = []
    found = []
    for line in _loop_twice(lines):
        if line.operation.startswith("HGMMA"):
            pending.append(_product(line))
            if "gsb0" in line.arguments:
                groups.append(pending)
                pending = []
        elif "DEPBAR" in line.operation and (wait := re.search(r"gsb0, 0x(\d)", line.arguments)):
            groups = groups[len(groups) - min(int(wait[1]), len(groups)) :]
        elif line.operation == "EXIT":
            groups, pending = [], []
        else:
            used, written = _registers(line)
            products = [product for group in (*groups, pending) for product in group]
            found += [(line, p) for p in products if written & p.operand or (used | written) & p.accumulators]
    return found


def _loop_twice(lines: list[Line]) -> Iterable[Line]:
    """The lines, the loop around all products twice."""
    places = {line.at: number for number, line in enumerate(lines) if not line.operation}
    products = [number for number, line in enumerate(lines) if line.operation.startswith("HGMMA")]
    for number in range(products[-1], len(lines)) if products else ():
        target = re.search(r"\.L_x_\d+", lines[number].arguments) if lines[number].operation.startswith("BRA") else None
        if target and places.get(target[0], len(lines)) < products[0]:
            return [*lines[: number + 1], *lines[places[target[0]] :]]
    return lines


def _product(line: Line) -> Product:
    """Accumulators D and operand A of `HGMMA.64xNxK.F32 D, A, descriptor, D`; A may be a descriptor, too."""
    parts = [part.strip() for part in line.arguments.split(",")]
    columns = re.search(r"\.64x(\d+)x", line.operation)
    first = int(parts[0][1:])
    operand = range(int(parts[1][1:]), int(parts[1][1:]) + 4) if parts[1].startswith("R") else ()
    return Product(line.at, frozenset(range(first, first + int(columns[1]) // 2 if columns else first)), frozenset(operand))


def _registers(line: Line) -> tuple[frozenset[int], frozenset[int]]:
    """The registers that an instruction names, and those that it writes."""
    named = frozenset(int(number) for number in re.findall(r"\bR(\d+)", line.arguments))
    first = re.match(r"R(\d+)", line.arguments)
    if first is None or line.operation.startswith(_WRITES_NO_REGISTER):
        return named, frozenset()
    width = next((width for part, width in _WIDTHS if part in line.operation), 1)
    return named, frozenset(range(int(first[1]), int(first[1]) + width))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.wgmma_hazards", description=__doc__.splitlines()[0])
    parser.add_argument("listings", nargs="+", type=Path, metavar="LISTING", help="what nvdisasm -c prints of a cubin")
    count = bad = 0
    for path in parser.parse_args().listings:
        for name, lines in kernels(path.read_text()).items():
            found = hazards(lines)
            count, bad = count + 1, bad + bool(found)
            for line, product in found:
                print(f"{name}: {line.at} {line.operation} {line.arguments} while the product at {product.at} is under way")
    print(f"{count} kernels, {bad} with hazards")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
