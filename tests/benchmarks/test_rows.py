# SPDX-License-Identifier: Apache-2.0
"""Rows: the suites, their geometry, rows from a file."""

import json

import numpy as np
import pytest
from onnx import shape_inference

from benchmarks.layers.cpu import reference
from benchmarks.layers.rows import LAYOUTS, PRECISIONS, Row
from benchmarks.layers.suites import SUITES, load_rows
from benchmarks.layers.tensorrt_worker import fuse
from convpool import optimize
from convpool.cuda import LibraryError, Problem
from convpool.errors import OptionError
from convpool.ir import schema
from convpool.ir.protos import attributes
from models.generators import generate

ALL = [row for rows, _, _ in SUITES.values() for row in rows]
SHAPES = [
    Row(2, 3, 4, 8, 8),
    Row(1, 2, 3, 9, 7),
    Row(1, 2, 3, 8, 6, kernel=1, pad=0),
    Row(1, 2, 3, 11, 9, kernel=5, pad=1, pool=3, pool_stride=3),
    Row(1, 2, 2, 12, 13, kernel=3, pad=2, stride=2, pool=3, pool_stride=1),
    Row(1, 2, 2, 7, 7, kernel=1, pad=1, stride=2),
]


def test_suites_have_the_papers_rows():
    assert [len(SUITES[name][0]) for name in SUITES] == [20, 20, 25, 10, 24, 21, 31, 108, 24]
    assert {(row.h, row.c) for row in SUITES["suita-table1"][0]} == {
        (size, c) for size in (8, 16, 32, 64) for c in (32, 64, 128, 256, 512)
    }
    assert {(row.c, row.m) for row in SUITES["tokura"][0]} == {
        (c, m) for c in (32, 64, 128, 256, 512) for m in (32, 64, 128, 256, 512)
    }
    assert all(row.n == 1 for name in ("tokura", "batch1") for row in SUITES[name][0])
    assert {row.n for row in SUITES["densenet"][0]} == {1, 32}
    for rows, precisions, _ in SUITES.values():
        assert len({row.name for row in rows}) == len(rows) and set(precisions) <= set(PRECISIONS)
        assert all(min(row.out_size) >= 1 for row in rows)


def test_suites_have_what_the_optimizer_makes_of_networks():
    found: dict[str, set] = {"networks": set(), "plain": set()}
    for network, batch in (("sngan64", 64), ("wgan_gp", 64), ("stargan_v2", 1)):
        model = optimize(generate(network, batch=batch), enable=["fuse_prologue", "fuse_epilogue", "plain_conv"], check=0).model
        graph = shape_inference.infer_shapes(model).graph
        known = [*graph.input, *graph.value_info]
        shapes = {one.name: tuple(d.dim_value for d in one.type.tensor_type.shape.dim) for one in known}
        weights = {one.name: tuple(one.dims) for one in graph.initializer}
        for node in graph.node:
            if node.op_type in schema.OP_TYPES:
                (n, c, h, w), (m, *kernel, _) = shapes[node.input[0]], weights[node.input[1]]
                suite = "plain" if attributes(node)["pool_kernel_shape"] == [1, 1] else "networks"
                found[suite].add((n, c, m, h, w, *kernel, node.op_type.startswith("LeakyRelu")))
    others = ("ResNet-50", "VGG-16")
    for suite, of_networks in found.items():
        rows = [(r.n, r.c, r.m, r.h, r.w, r.kernel, r.kernel, r.prologue) for r in SUITES[suite][0] if r.label not in others]
        assert of_networks == set(rows) and len(rows) == len(of_networks)


def test_counts_are_those_of_the_baselines():
    row = SUITES["suita-table2"][0][0]  # 64x32x8x8 to 32
    assert (row.direct_flops, row.min_bytes("fp16"), row.min_bytes("fp32")) == (18874368, 327680, 655360)
    assert row.naive_macs == 64 * 32 * 32 * 9 * 64


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


@pytest.mark.parametrize("row", SHAPES, ids=lambda row: row.name)
def test_direct_and_fused_forms_compute_the_same(row):
    random = np.random.default_rng(0)
    x = random.integers(-3, 4, (row.n, row.c, row.h, row.w)).astype(float)
    w = random.integers(-3, 4, (row.m, row.c, row.kernel, row.kernel)).astype(float)
    right = reference(x, w, row)
    assert right.shape == (row.n, row.m, *row.out_size)

    def convolved(x, w, stride, pad):
        one = Row(row.n, row.c, row.m, *x.shape[2:], kernel=w.shape[2], pad=pad, stride=stride, pool=1, pool_stride=1)
        return reference(x, w, one)

    np.testing.assert_allclose(convolved(x, fuse(w, row), row.total_stride, row.pad), right, atol=1e-12)
    padded = np.pad(x, ((0, 0), (0, 0), (row.box_pad,) * 2, (row.box_pad,) * 2))
    (rows, columns), s = row.box_size, row.stride
    means = sum(padded[:, :, u * s :, v * s :][:, :, :rows, :columns] for u in range(row.pool) for v in range(row.pool))
    step = row.total_stride if row.pointwise else 1
    means = means[:, :, ::step, ::step]
    if row.pointwise:
        means = means[:, :, : row.out_size[0], : row.out_size[1]]
    stride = 1 if row.pointwise else row.total_stride
    np.testing.assert_allclose(convolved(means / row.pool**2, w, stride, row.pad - row.box_pad), right, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("row", [*SHAPES, *ALL[::7]], ids=lambda row: row.name)
def test_the_librarys_problem_has_the_rows_output(row, layout):
    for precision in PRECISIONS:
        problem = Problem(**row.problem(precision, layout))
        try:
            shape = problem.y_shape
        except LibraryError as error:
            pytest.skip(str(error))
        maps = (row.m, *row.out_size) if layout == "nchw" else (*row.out_size, row.m)
        assert shape == (row.n, *maps)


def test_rows_from_a_file(tmp_path):
    path = tmp_path / "own.json"
    path.write_text(
        json.dumps(
            {
                "rows": [
                    {"c": 8, "m": 16, "size": 12},
                    {"n": 4, "c": 8, "m": 16, "size": [12, 10], "kernel": 1, "pool": 3, "label": "mine"},
                    {"c": 8, "m": 8, "h": 9, "w": 8, "pad": 0, "stride": 2},
                ]
            }
        )
    )
    first, second, third = load_rows(str(path))
    assert first == Row(1, 8, 16, 12, 12, suite="own.json")
    assert second == Row(4, 8, 16, 12, 10, kernel=1, pad=0, pool=3, pool_stride=3, suite="own.json", label="mine")
    assert (third.h, third.w, third.pad, third.stride) == (9, 8, 0, 2)
    assert [row.name for row in (first, second, third)] == [
        "1x8x12x12 to 16, 3x3",
        "4x8x12x10 to 16, 1x1, pool 3 stride 3",
        "1x8x9x8 to 8, 3x3 pad 0 stride 2",
    ]


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
