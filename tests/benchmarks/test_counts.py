# SPDX-License-Identifier: Apache-2.0
"""Counts of operations and accesses: of small layers, and the papers' tables against their formulas."""

import csv
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks import counts
from benchmarks.layers.suites import SUITES
from convpool.algebra.geometry import ConvSpec, PoolSpec

DATA = Path(__file__).parents[2] / "benchmarks" / "layers" / "data"

# Multiplications, additions, reads and writes of each form, as loops that compute it by its definition counted them.
COUNTED = {  # batch, C, M, size, kernel, stride, pad, pool, pool stride
    (2, 3, 4, (8, 6), 3, 1, 1, 2, 2): (
        (10464, 10272, 780, 480), (4608, 4512, 480, 96), (2970, 3306, 774, 474), (2970, 4122, 1350, 1050),
    ),
    (1, 2, 3, (9, 8), 3, 1, 0, 2, 2): ((2295, 2223, 324, 153), (864, 837, 240, 27), (598, 699, 310, 139), (598, 1049, 598, 427)),
    (1, 2, 3, (4, 6), 1, 1, 0, 2, 2): ((162, 126, 126, 90), (144, 126, 72, 18), (48, 54, 66, 30), (66, 184, 180, 144)),
    (1, 2, 2, (12, 13), 3, 2, 1, 3, 1): ((1552, 1748, 432, 124), (3920, 3880, 508, 40), (940, 1720, 568, 260)),
    (1, 1, 2, (11, 12), 5, 1, 2, 3, 3): (
        (6624, 6528, 446, 288), (1176, 1152, 230, 24), (782, 1356, 364, 206), (782, 1363, 628, 470),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("layer", "counted"), COUNTED.items(), ids=str)
def test_counts_of_every_form(layer, counted):
    batch, c, m, size, k, stride, pad, p, step = layer
    conv = ConvSpec((k, k), (stride,) * 2, (pad,) * 4, (1, 1))
    pool = PoolSpec((p, p), (step,) * 2, (0,) * 4, (1, 1))
    for form, wanted in zip(counts.FORMS, counted, strict=False):  # the table's windows have no strides
        got = counts.count(form, batch, (m, c, k, k), size, conv, pool)
        assert got == counts.Counts(*wanted) and (got.operations, got.accesses) == (sum(wanted[:2]), sum(wanted[2:]))


def transcribed() -> dict[tuple[str, str], dict[tuple[int, int], float]]:
    """Tokura's counts by (dtype, method), then by channels."""
    found: dict = defaultdict(dict)
    for line in csv.DictReader((DATA / "tokura2018_counts.csv").read_text().splitlines()):
        channels = int(line["in_channels"]), int(line["out_channels"])
        found[line["dtype"], line["method"]][channels] = int(line["operations_1e5"]) * 1e5
    return found


def test_tokuras_counts_are_those_of_table_1():
    """Compare nvprof's counts with the formula; libraries compute at least 64 or 128 outputs."""
    lines, cells = csv.DictReader((DATA / "tokura2018.csv").read_text().splitlines()), 0
    starred = {(x["dtype"], x["method"], int(x["in_channels"]), int(x["out_channels"])) for x in lines if x["tensor_core"] == "1"}
    for (dtype, method), values in transcribed().items():
        assert len(values) == 25
        for (c, m), operations in values.items():
            form = method.split("_")[1]
            if (dtype, method, c, m) in starred:  # nvprof counts no operation of a tensor core
                assert operations < 0.25 * counts.tokura_operations(form, 32, 3, c, m, 2)
            elif dtype == "fp32":
                form = "winograd" if form == "naive" else form
                computed = max(m, 64) if method == "cudnn_direct_sum" and c <= 64 else m
                slack = 1.45 if method == "cublas_direct_sum" and m < 64 else 1.18
                assert 0.966 <= operations / counts.tokura_operations(form, 32, 3, c, computed, 2) <= slack
            else:
                assert 0.99 <= operations / counts.tokura_operations(form, 32, 3, c, max(m, 128), 2) <= 1.05
            cells += 1
    assert cells == 250 and len(starred) == 14 + 9 + 25 + 25


@pytest.mark.parametrize(
    ("stated", "form", "number"),
    [
        (counts.tokura_operations, "naive", 2 * 9 * 10 * 64 + 320),
        (counts.tokura_operations, "winograd", 36 * 10 + 68 * 16 * 5 + 320),
        (counts.tokura_operations, "fused", 63 * 80),
        (counts.tokura_operations, "direct", 512 + 35 * 80),
        (counts.suita_bound, "naive", 640 * 9),
        (counts.suita_bound, "fused", 640 * 25 / 4),
        (counts.suita_bound, "direct", 640 * 9 / 4 + 128),
        (counts.suita_bound, "table", 640 * 9 / 4 + 128),
    ],
)
def test_the_papers_formulas_by_hand(stated, form, number):
    """8 x 8 elements, 2 to 5 channels, a 3 x 3 kernel, windows of 2 x 2: 80 outputs."""
    assert stated(form, n=8, k=3, c_in=2, c_out=5, p=2) == number


def test_tokuras_own_example():
    sizes = {"n": 32, "k": 3, "c_in": 512, "c_out": 512, "p": 2}
    direct = counts.tokura_operations("direct", **sizes)
    assert direct == 1209925632
    assert 3.9 < counts.tokura_operations("naive", **sizes) / direct < 4.1
    assert 1.75 < counts.tokura_operations("fused", **sizes) / direct < 1.85
    assert transcribed()["fp32", "cublas_direct_sum"][512, 512] == pytest.approx(1217946624, rel=1e-4)


@pytest.mark.parametrize("suite", ["suita-table1", "tokura"])
def test_the_exact_counts_are_those_of_the_papers(suite):
    for row in SUITES[suite][0]:
        k, p, sizes = row.kernel, row.pool, {"n": row.h, "k": row.kernel, "c_in": row.c, "c_out": row.m, "p": row.pool}
        found = {form: row.counts(form) for form in counts.FORMS}
        for form in ("naive", "fused", "direct"):
            stated = row.n * counts.tokura_operations(form, **sizes)
            assert found[form].operations == pytest.approx(stated, rel=0.02)
        for form, counted in found.items():
            # Two operations a product; of a table three additions a mean more than the sums of lemma and theorem.
            ratio = counted.operations / (row.n * counts.suita_bound(form, **sizes))
            wide = 2 * (k + p - 1) ** 2 / (k + p) ** 2 if form == "fused" else 2
            assert wide * 0.97 <= ratio <= wide + 0.16, (row.name, form, ratio)
        assert found["direct"].operations < found["table"].operations < found["fused"].operations < found["naive"].operations
        assert found["direct"].accesses < found["table"].accesses
