# SPDX-License-Identifier: Apache-2.0
"""The models of the methods of onnxruntime, and TensorRT's networks, built by the real builder of TensorRT-RTX."""

import numpy as np
import onnx
import pytest

from benchmarks.layers import ort
from benchmarks.layers.case import Skip
from benchmarks.layers.cpu import reference
from benchmarks.layers.rows import Row
from convpool.check.session import Session
from convpool.ir.model import LoadedModel

ROWS = [Row(2, 4, 6, 9, 8), Row(1, 4, 48, 11, 11, stride=2), Row(1, 4, 6, 9, 9, kernel=2, pad=0)]


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
