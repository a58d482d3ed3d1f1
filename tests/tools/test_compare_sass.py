# SPDX-License-Identifier: Apache-2.0
"""Tools that read machine code: comparison of CUDA ELF files made here, and registers of products under way."""

import struct
import sys

import pytest

from tools import compare_sass, wgmma_hazards

EM_CUDA = 190
ADD, MULTIPLY, NOP = (struct.pack("<QQ", opcode, 7) for opcode in (0x210, 0x224, 0x918))


def cubin(name: str, code: bytes, registers: int = 32, stack: int = 0) -> bytes:
    """A CUDA ELF file with one kernel, of the sections that the script reads."""
    info = b"".join(struct.pack("<BBHII", 4, attribute, 8, 1, number) for attribute, number in ((0x2F, registers), (0x11, stack)))
    sections = {
        "": b"",
        ".strtab": b"\0" + name.encode() + b"\0",
        ".symtab": bytes(24) + struct.pack("<I", 1) + bytes(20),
        ".nv.info": info + struct.pack("<BBH", 3, 1, 12),  # an attribute without a value after it
        f".text.{name}": code,
        ".shstrtab": b"",
    }
    names, at = b"", {}
    for section in sections:
        at[section] = len(names)
        names += section.encode() + b"\0"
    sections[".shstrtab"] = names
    body, headers = b"", b""
    for section, content in sections.items():
        headers += struct.pack("<IIQQQQIIQQ", at[section], 1, 0, 0, 64 + len(body), len(content), 0, 0, 0, 0)
        body += content
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<H", header, 18, EM_CUDA)
    struct.pack_into("<Q", header, 40, 64 + len(body))
    struct.pack_into("<HHH", header, 58, 64, len(sections), len(sections) - 1)
    return bytes(header) + body + headers


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """Runs the script on two files' contents; gives its exit status and what it prints."""

    def run(old: bytes, new: bytes, *options: str) -> tuple[int, str]:
        for name, content in (("old", old), ("new", new)):
            (tmp_path / name).write_bytes(content)
        monkeypatch.setattr(sys, "argv", ["compare_sass", str(tmp_path / "old"), str(tmp_path / "new"), *options])
        return compare_sass.main(), capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("new", "status", "found"),
    [
        (cubin("f", MULTIPLY + ADD), 0, "reordered: f 0x0\n    instructions 2 -> 2, registers 32 -> 32, stack 0 -> 0"),
        (cubin("f", ADD), 0, "differs: f 0x0\n    instructions 2 -> 1"),
        (cubin("f", ADD * 3), 1, "WORSE: f 0x0\n    instructions 2 -> 3"),
        (cubin("f", ADD + MULTIPLY, registers=40), 1, "WORSE: f 0x0\n    instructions 2 -> 2, registers 32 -> 40"),
        (cubin("f", ADD + MULTIPLY, stack=16), 1, "WORSE: f 0x0\n    instructions 2 -> 2, registers 32 -> 32, stack 0 -> 16"),
        (cubin("g", ADD + MULTIPLY), 1, "only in OLD: f 0x0\nonly in NEW: g 0x0"),
    ],
)
def test_differences(compare, new, status, found):
    answer, text = compare(cubin("f", ADD + MULTIPLY), new)
    assert (answer, found in text, "0 of" in text) == (status, True, True)


def test_a_library_with_compressed_code_is_refused(compare):
    with pytest.raises(SystemExit, match="old: no uncompressed CUDA code; build it with -DCMAKE_CUDA_FLAGS=--no-compress"):
        compare(b"compressed", cubin("f", ADD))


PRODUCT = "HGMMA.64x64x16.F32 R24, R76, gdesc[UR8], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def listing(*code: str) -> str:
    lines = [line if line[0] == "." else f"        /*{16 * i:04x}*/                   {line} ;" for i, line in enumerate(code)]
    return "\n".join([".text._Z6kernelv:", *lines])


@pytest.mark.parametrize(
    "code",
    [
        (PRODUCT, "FADD R80, R76, R77", WAIT, "FADD R76, R24, R25"),  # an operand may be read; after the wait all is free
        (PRODUCT, "STS.128 [R76+UR4], R80", WAIT),  # an address is not written
        (PRODUCT, PRODUCT.replace("R76", "R80"), "WARPGROUP.DEPBAR.LE gsb0, 0x1", "MOV R76, R1", WAIT),
        (".L_x_1:", "MOV R76, R1", PRODUCT, WAIT, "@P0 BRA `(.L_x_1)"),
        (PRODUCT.replace("R76", "gdesc[UR4]"), "MOV R76, R1", WAIT),
    ],
)
def test_what_may_be_touched(code):
    assert wgmma_hazards.hazards(wgmma_hazards.kernels(listing(*code))["_Z6kernelv"]) == []


@pytest.mark.parametrize(
    "code, culprit",
    [
        ((PRODUCT, "MOV R79, R1", WAIT), "MOV"),  # the operand's last register
        ((PRODUCT, "LDSM.16.M88.4 R74, [R2]", WAIT), "LDSM.16.M88.4"),  # four registers, two of the operand
        ((PRODUCT, "MOV R1, R55", WAIT), "MOV"),  # an accumulator, read
        ((PRODUCT, PRODUCT, "WARPGROUP.DEPBAR.LE gsb0, 0x1", "F2FP R76, R1, R2", WAIT), "F2FP"),
        ((".L_x_1:", "MOV R76, R1", PRODUCT, "@P0 BRA `(.L_x_1)", WAIT), "MOV"),  # in the loop's next turn
    ],
)
def test_what_must_not_be_touched(code, culprit):
    found = wgmma_hazards.hazards(wgmma_hazards.kernels(listing(*code))["_Z6kernelv"])
    assert found and {line.operation for line, _ in found} == {culprit}
