# SPDX-License-Identifier: Apache-2.0
"""The scan of machine code for registers of products under way."""

import sys

import pytest

from tools import wgmma_hazards

PRODUCT = "HGMMA.64x64x16.F32 R24, R76, gdesc[UR8], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def listing(*code: str) -> str:
    lines = [
        line if line.startswith(".") else f"        /*{16 * i:04x}*/                   {line} ;" for i, line in enumerate(code)
    ]
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


@pytest.mark.parametrize("bad, status", [(False, 0), (True, 1)])
def test_the_command_tells_and_fails(tmp_path, monkeypatch, capsys, bad, status):
    path = tmp_path / "kernels.sass"
    path.write_text(listing(PRODUCT, *(["MOV R76, R1"] if bad else []), WAIT))
    monkeypatch.setattr(sys, "argv", ["wgmma_hazards", str(path)])
    assert wgmma_hazards.main() == status
    assert f"1 kernels, {status} with hazards" in capsys.readouterr().out
