# SPDX-License-Identifier: Apache-2.0
"""Counts of operations and accesses: against loops that count, and the papers' tables against their formulas."""

from __future__ import annotations

import csv
from collections import defaultdict
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from benchmarks import counts
from benchmarks.layers.suites import SUITES
from convpool.algebra.geometry import ConvSpec, PoolSpec

DATA = Path(__file__).parents[2] / "benchmarks" / "layers" / "data"
CASES = {  # batch, C, M, size, kernel, stride, pad, pool, pool stride
    "3x3": (2, 3, 4, (8, 6), 3, 1, 1, 2, 2),
    "no padding": (1, 2, 3, (9, 8), 3, 1, 0, 2, 2),
    "1x1": (1, 2, 3, (4, 6), 1, 1, 0, 2, 2),
    "strides": (1, 2, 2, (12, 13), 3, 2, 1, 3, 1),
    "5x5, window 3": (1, 1, 2, (11, 12), 5, 1, 2, 3, 3),
}


class Counted:
    """A number that counts what is done with it."""

    multiplications = additions = 0

    def __init__(self, value: float) -> None:
        self.value = value

    def __add__(self, other: Counted) -> Counted:
        Counted.additions += 1
        return Counted(self.value + other.value)

    def __sub__(self, other: Counted) -> Counted:
        Counted.additions += 1
        return Counted(self.value - other.value)

    def __mul__(self, other: Counted) -> Counted:
        Counted.multiplications += 1
        return Counted(self.value * other.value)


def array(values: np.ndarray) -> np.ndarray:
    return np.vectorize(Counted, otypes=[object])(values)


def total(values) -> Counted:
    first, *rest = values
    for value in rest:
        first = first + value
    return first


def convolve(x: np.ndarray, w: np.ndarray, stride: int, pad: int, out: tuple[int, int]) -> np.ndarray:
    """x [N, C, H, W], w [M, C, a, b], by the definition."""
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)), constant_values=Counted(0.0))
    result = np.empty((len(x), len(w), *out), object)
    for n, m, i, j in np.ndindex(result.shape):
        window = x[n, :, i * stride : i * stride + w.shape[2], j * stride : j * stride + w.shape[3]]
        result[n, m, i, j] = total(a * b for a, b in zip(window.flat, w[m].flat, strict=True))
    return result


def pooled(x: np.ndarray, p: int, stride: int, out: tuple[int, int]) -> np.ndarray:
    result, part = np.empty((*x.shape[:2], *out), object), Counted(1 / p**2)
    for n, m, i, j in np.ndindex(result.shape):
        result[n, m, i, j] = total(x[n, m, i * stride : i * stride + p, j * stride : j * stride + p].flat) * part
    return result


def naive(x, w, stride, pad, p, step, middle, out):
    return pooled(convolve(x, w, stride, pad, middle), p, step, out)


def fused(x, w, stride, pad, p, step, middle, out):
    side = w.shape[2] + stride * (p - 1)
    kernel = np.zeros((*w.shape[:2], side, side))
    for u, v in product(range(p), repeat=2):
        values = np.vectorize(lambda item: item.value)(w)
        kernel[:, :, u * stride : u * stride + w.shape[2], v * stride : v * stride + w.shape[2]] += values / p**2
    return convolve(x, array(kernel), stride * step, pad, out)


def direct(x, w, stride, pad, p, step, middle, out):
    if w.shape[2] == 1 and not pad:
        return convolve(pooled(x[:, :, ::stride, ::stride], p, step, out), w, 1, 0, out)
    inner = min(pad, stride * (p - 1))
    z = np.pad(x, ((0, 0), (0, 0), (inner, inner), (inner, inner)), constant_values=Counted(0.0))
    for axis in (2, 3):
        length = z.shape[axis] - stride * (p - 1)
        z = total(np.take(z, range(u * stride, u * stride + length), axis) for u in range(p))
    return convolve(z * Counted(1 / p**2), w, stride * step, pad - inner, out)


def table(x, w, stride, pad, p, step, middle, out):
    inner = min(pad, p - 1)
    h, width = x.shape[2:]
    s = x.copy()
    for axis, size in ((2, h), (3, width)):
        for i in range(1, size):
            here, before = ((slice(None),) * axis + (k,) for k in (i, i - 1))
            s[here] = s[here] + s[before]
    zero = Counted(0.0)
    box = (h + 2 * inner - p + 1, width + 2 * inner - p + 1)
    z = np.empty((*x.shape[:2], *box), object)
    for n, c, i, j in np.ndindex(z.shape):
        top, bottom, left, right = i - inner - 1, min(i - inner + p, h) - 1, j - inner - 1, min(j - inner + p, width) - 1
        at = [s[n, c, a, b] if a >= 0 and b >= 0 else zero for a, b in product((top, bottom), (left, right))]
        z[n, c, i, j] = (at[3] - at[1] - at[2] + at[0]) * Counted(1 / p**2)
    return convolve(z, w, step, pad - inner, out)


@pytest.mark.parametrize(("batch", "c", "m", "size", "k", "stride", "pad", "p", "step"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("form", counts.FORMS)
def test_a_loop_that_counts_finds_the_same(form, batch, c, m, size, k, stride, pad, p, step):
    if form == "table" and stride > 1:
        pytest.skip("the table's windows have no dilation here")
    conv = ConvSpec((k, k), (stride,) * 2, (pad,) * 4, (1, 1))
    pool = PoolSpec((p, p), (step,) * 2, (0,) * 4, (1, 1))
    middle = conv.output_size(size)
    out = pool.output_size(middle)
    random = np.random.default_rng(0)
    x, w = random.integers(-3, 4, (batch, c, *size)).astype(float), random.integers(-3, 4, (m, c, k, k)).astype(float)
    results = []
    for compute in (naive, globals()[form]):
        Counted.multiplications = Counted.additions = 0
        found = compute(array(x), array(w), stride, pad, p, step, middle, out)
        results.append(np.vectorize(lambda item: item.value)(found))
    np.testing.assert_allclose(results[1], results[0], atol=1e-9)
    got = counts.count(form, batch, (m, c, k, k), size, conv, pool)
    assert (got.multiplications, got.additions) == (Counted.multiplications, Counted.additions)
    assert got.operations == got.multiplications + got.additions and got.accesses == got.reads + got.writes
    x_elements, y_elements, weights = x.size, results[0].size, w.size
    between = {"naive": batch * m * middle[0] * middle[1], "fused": 0}
    if form in between:
        taps = (k + stride * (p - 1)) ** 2 if form == "fused" else k * k
        assert got.reads == x_elements + between[form] + weights * taps // k**2
        assert got.writes == y_elements + between[form]
    else:
        assert got.reads > x_elements + weights and got.writes > y_elements


def test_another_form_is_an_error():
    pool, conv = PoolSpec((2, 2), (2, 2), (0,) * 4, (1, 1)), ConvSpec((3, 3), (1, 1), (1,) * 4, (1, 1))
    for call in (
        lambda: counts.count("fft", 1, (1, 1, 3, 3), (8, 8), conv, pool),
        lambda: counts.tokura_operations("table", 32, 3, 1, 1, 2),
        lambda: counts.suita_bound("winograd", 32, 3, 1, 1, 2),
    ):
        with pytest.raises(ValueError, match="form; got"):
            call()


def transcribed() -> dict[tuple[str, str], dict[tuple[int, int], float]]:
    """Tokura's counts by (dtype, method), then by channels."""
    found: dict = defaultdict(dict)
    for line in csv.DictReader((DATA / "tokura2018_counts.csv").read_text().splitlines()):
        channels = int(line["in_channels"]), int(line["out_channels"])
        found[line["dtype"], line["method"]][channels] = int(line["operations_1e5"]) * 1e5
    return found


def with_tensor_cores() -> set[tuple]:
    lines = csv.DictReader((DATA / "tokura2018.csv").read_text().splitlines())
    return {(x["dtype"], x["method"], int(x["in_channels"]), int(x["out_channels"])) for x in lines if x["tensor_core"] == "1"}


def test_tokuras_counts_are_those_of_table_1():
    """Compare nvprof's counts with the formula; libraries compute at least 64 or 128 outputs."""
    starred, cells = with_tensor_cores(), 0
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
