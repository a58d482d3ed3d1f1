# SPDX-License-Identifier: Apache-2.0
"""Rows: the suites, their geometry, rows from a file, and their models for the methods of onnxruntime."""

from itertools import product

import numpy as np
import onnx
import pytest

from benchmarks.layers import ort
from benchmarks.layers.case import Skip
from benchmarks.layers.cpu import reference
from benchmarks.layers.rows import PRECISIONS, Row
from benchmarks.layers.suites import SUITES, load_rows
from convpool.check.session import Session
from convpool.cuda import Problem
from convpool.errors import OptionError
from convpool.ir.model import LoadedModel


def test_suites_have_the_papers_rows():
    assert [len(SUITES[name][0]) for name in SUITES] == [20, 20, 25, 10, 24, 21, 31, 108, 24]
    channels = (32, 64, 128, 256, 512)
    assert {(row.h, row.c) for row in SUITES["suita-table1"][0]} == set(product((8, 16, 32, 64), channels))
    assert {(row.c, row.m) for row in SUITES["tokura"][0]} == set(product(channels, channels))
    assert all(row.n == 1 for name in ("tokura", "batch1") for row in SUITES[name][0])
    assert {row.n for row in SUITES["densenet"][0]} == {1, 32}
    for rows, precisions, _ in SUITES.values():
        assert len({row.name for row in rows}) == len(rows) and set(precisions) <= set(PRECISIONS)
        assert all(min(row.out_size) >= 1 for row in rows)


def test_a_prologue_is_part_of_the_row(tmp_path):
    path = tmp_path / "own.json"
    path.write_text('[{"c": 8, "m": 4, "size": 6, "kernel": 1, "prologue": true}, {"c": 8, "m": 4, "size": 6, "kernel": 1}]')
    row, plain = load_rows(str(path))
    assert row.name == plain.name + ", prologue" and Row(**row.to_json()) == row
    assert (row.prologue_bytes("fp16"), row.prologue_bytes("fp32"), plain.prologue_bytes("fp16")) == (1152, 2304, 0)
    problem = Problem(**row.problem("fp16", "nhwc"))
    assert (problem.prologue_affine, problem.prologue_activation) == (True, "relu")
    assert not Problem(**plain.problem("fp16", "nhwc")).prologue_affine
    path.write_text('[{"c": 8, "m": 4, "size": 6, "prologue": 1}]')
    with pytest.raises(OptionError, match="row 1: prologue; got 1, expected true or false"):
        load_rows(str(path))


def test_rows_from_a_file(tmp_path):
    path = tmp_path / "own.json"
    path.write_text("""{"rows": [{"c": 8, "m": 16, "size": 12},
        {"n": 4, "c": 8, "m": 16, "size": [12, 10], "kernel": 1, "pool": 3, "label": "mine"},
        {"c": 8, "m": 8, "h": 9, "w": 8, "pad": 0, "stride": 2}]}""")
    first, second, third = load_rows(str(path))
    assert first == Row(1, 8, 16, 12, 12, suite="own.json")
    assert second == Row(4, 8, 16, 12, 10, kernel=1, pad=0, pool=3, pool_stride=3, suite="own.json", label="mine")
    assert (third.h, third.w, third.pad, third.stride) == (9, 8, 0, 2)
    assert (first.name, second.name) == ("1x8x12x12 to 16, 3x3", "4x8x12x10 to 16, 1x1, pool 3 stride 3")
    assert third.name == "1x8x9x8 to 8, 3x3 pad 0 stride 2"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "cannot be read as JSON"),
        ('{"rows": 3}', "no rows; got int"),
        ('[{"c": 8, "m": 8}]', "row 1: no 'h'; expected c, m and size"),
        ('[{"c": 8, "m": 8, "size": 8}, {"c": 0, "m": 8, "size": 8}]', "row 2: c; got 0, expected a whole number from 1"),
        ('[{"c": true, "m": 8, "size": 8}]', "row 1: c; got True"),
        ('[{"c": 8, "m": 8, "size": 8, "groups": 2}]', "row 1: unknown field 'groups'; expected c, h, kernel"),
        ('[{"c": 8, "m": 8, "size": 2, "pad": 0}]', "row 1: no output; got 1x8x2x2 to 8, 3x3 pad 0"),
    ],
)
def test_a_wrong_file_is_told(text, part, tmp_path):
    path = tmp_path / "own.json"
    path.write_text(text)
    with pytest.raises(OptionError) as caught:
        load_rows(str(path))
    assert str(caught.value).startswith(str(path)) and part in str(caught.value)


ROWS = [Row(2, 4, 12, 9, 8), Row(1, 4, 48, 11, 11, stride=2), Row(1, 4, 12, 9, 9, kernel=2, pad=0)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("form", [*ort.FORMS, "convavgpool"])
@pytest.mark.parametrize("last", [False, True])
def test_a_form_computes_the_layer(row, form, last):
    rng = np.random.default_rng(0)
    shapes = (row.n, row.c, row.h, row.w), (row.m, row.c, row.kernel, row.kernel)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    model = ort.in_form(ort.layer(row, w), form)
    model = ort.channels_last(model) if last else model
    onnx.checker.check_model(model, full_check=True)
    given = np.ascontiguousarray(np.moveaxis(x, 1, -1)) if last else x
    (got,) = Session(LoadedModel(model, None, 0), optimize=False).run(None, {"x": given})
    np.testing.assert_allclose(np.moveaxis(got, -1, 1) if last else got, reference(x, w, row), rtol=1e-4, atol=1e-4)
    counts = {"naive": 1, "fused": 0, "direct": 1, "convavgpool": 0}
    assert sum(node.op_type == "AveragePool" for node in model.graph.node) == counts[form]


def test_a_form_that_there_is_not_says_why():
    with pytest.raises(Skip, match="saves too little as fused"):
        ort.in_form(ort.layer(Row(1, 3, 2, 9, 9, kernel=1, pad=0), np.zeros((2, 3, 1, 1), np.float32)), "fused")
