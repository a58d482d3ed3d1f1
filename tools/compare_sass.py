# SPDX-License-Identifier: Apache-2.0
"""Compares the machine code of two builds and prints the kernels whose instructions, registers or stack differ.

    python -m tools.compare_sass OLD NEW [--rename old_kernel=new_kernel]

OLD and NEW are libraries, object files or cubins; no CUDA tool is needed. Libraries must hold their code uncompressed: build
them with `-DCMAKE_CUDA_FLAGS=--no-compress`. Exits with 1 if a kernel is missing, needs more registers or stack, or has over
0.5% more instructions (NOPs, the padding, do not count). `reordered`: as many instructions, other ones or in another order.
"""

from __future__ import annotations

import argparse
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

EM_CUDA, NOP, SHORT_VALUE, REGISTERS, FRAME = 190, 0x918, 4, 0x2F, 0x11


class Kernel(NamedTuple):
    """Registers of a thread, bytes of its stack, instructions of 16 bytes."""

    registers: int
    stack: int
    code: tuple[bytes, ...]


def cubins(blob: bytes) -> Iterator[bytes]:
    """The CUDA ELF files inside a file, which may be one itself."""
    for match in re.finditer(b"\x7fELF", blob):
        if blob[match.start() + 18 : match.start() + 20] == struct.pack("<H", EM_CUDA):
            yield blob[match.start() :]


def attributes(info: bytes) -> Iterator[tuple[int, int, int]]:
    """(attribute, symbol, number) of a .nv.info section: each a kind, an attribute and a size, then perhaps the value."""
    at = 0
    while at < len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, at)
        if kind == SHORT_VALUE and size == 8:
            yield attribute, *struct.unpack_from("<II", info, at + 4)
        at += 4 + (size if kind == SHORT_VALUE else 0)


def kernels_of(elf: bytes) -> Iterator[tuple[str, Kernel]]:
    """Mangled name with the ELF flags, which give the architecture, and code of each kernel of a cubin."""
    (table,), (flags,) = struct.unpack_from("<Q", elf, 40), struct.unpack_from("<I", elf, 48)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    contents = [elf[offset : offset + length] for *_, offset, length in headers]
    sections = {contents[names][h[0] :].split(b"\0", 1)[0].decode(): c for h, c in zip(headers, contents, strict=True)}
    numbers = {}
    for attribute, symbol, number in attributes(sections[".nv.info"]):
        (name,) = struct.unpack_from("<I", sections[".symtab"], symbol * 24)
        numbers[attribute, sections[".strtab"][name:].split(b"\0", 1)[0].decode()] = number
    for section, code in sections.items():
        if name := section.removeprefix(".text.") if section.startswith(".text.") else "":
            words = [code[i : i + 16] for i in range(0, len(code), 16)]
            kept = tuple(word for word in words if struct.unpack_from("<H", word)[0] & 0xFFF != NOP)
            yield f"{name} 0x{flags:x}", Kernel(numbers[REGISTERS, name], numbers[FRAME, name], kept)


def kernels(path: Path, renames: list[str]) -> dict[str, Kernel]:
    """All kernels of a file by demangled name, without the hash of an unnamed namespace."""
    found = [pair for cubin in cubins(path.read_bytes()) for pair in kernels_of(cubin)]
    if not found:
        raise SystemExit(f"{path}: no uncompressed CUDA code; build it with -DCMAKE_CUDA_FLAGS=--no-compress")
    text = "\n".join(name for name, _ in found)
    text = subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True).stdout
    for rename in ["(anonymous namespace)::=", *renames]:
        text = text.replace(rename.partition("=")[0], rename.partition("=")[2])
    return dict(zip(text.splitlines(), (kernel for _, kernel in found), strict=True))


def main() -> int:
    """Compare the two files of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rename", action="append", default=[], metavar="OLD=NEW", help="in the names of OLD's kernels")
    arguments = parser.parse_args()
    old, new = kernels(arguments.old, arguments.rename), kernels(arguments.new, [])
    failed = sorted(old.keys() ^ new.keys())
    for name in failed:
        print(f"only in {'OLD' if name in old else 'NEW'}: {name}")
    for name in sorted(name for name in old.keys() & new.keys() if old[name] != new[name]):
        a, b = old[name], new[name]
        if b.registers > a.registers or b.stack > a.stack or len(b.code) > len(a.code) * 1.005:
            failed.append(name)
        state = "WORSE" if name in failed else "reordered" if len(a.code) == len(b.code) and a[:2] == b[:2] else "differs"
        numbers = f"instructions {len(a.code)} -> {len(b.code)}, registers {a[0]} -> {b[0]}, stack {a[1]} -> {b[1]}"
        print(f"{state}: {name}\n    {numbers}")
    print(f"{sum(old[name] == new.get(name) for name in old)} of {len(old.keys() | new.keys())} kernels the same")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
