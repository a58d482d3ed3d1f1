# SPDX-License-Identifier: Apache-2.0
"""The models of the methods of onnxruntime, and TensorRT's networks, built by the real builder of TensorRT-RTX."""

import numpy as np
import onnx
import pytest

from benchmarks.layers import ort
from benchmarks.layers.case import Skip
from benchmarks.layers.cpu import reference
from benchmarks.layers.record import new_record
from benchmarks.layers.rows import Row
from benchmarks.layers.run import Options, Run, protocol
from convpool.check.session import Session
from convpool.ir import schema
from convpool.ir.model import LoadedModel
from tests.support.gpu import skip_or_fail

ROWS = [Row(2, 4, 6, 9, 8), Row(1, 4, 48, 11, 11, stride=2), Row(1, 4, 6, 9, 9, kernel=2, pad=0)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("form", [*ort.FORMS, "convavgpool"])
@pytest.mark.parametrize("last", [False, True])
def test_a_form_computes_the_layer(row, form, last):
    rng = np.random.default_rng(0)
    x, w = (
        rng.standard_normal(s).astype(np.float32) for s in [(row.n, row.c, row.h, row.w), (row.m, row.c, row.kernel, row.kernel)]
    )
    model = ort.in_form(ort.layer(row, w), form)
    model = ort.channels_last(model) if last else model
    onnx.checker.check_model(model, full_check=True)
    given = np.ascontiguousarray(np.moveaxis(x, 1, -1)) if last else x
    (got,) = Session(LoadedModel(model, None, 0), optimize=False).run(None, {"x": given})
    np.testing.assert_allclose(np.moveaxis(got, -1, 1) if last else got, reference(x, w, row), rtol=1e-4, atol=1e-4)
    counts = {"naive": 1, "fused": 0, "direct": 1, "convavgpool": 0}
    assert sum(node.op_type == "AveragePool" for node in model.graph.node) == counts[form]


@pytest.mark.parametrize("form", ["convavgpool", "direct"])
def test_the_operator_s_node_sums_packed_where_the_row_does(form):
    layer = ort.layer(ROWS[0], np.ones((6, 4, 3, 3), np.float32))
    for packed in (False, True):
        nodes = [node for node in ort.in_form(layer, form, packed=packed).graph.node if schema.is_operator(node)]
        assert [schema.accumulation_of(node) for node in nodes] == ([int(packed)] if form == "convavgpool" else [])


def test_a_form_that_there_is_not_says_why():
    with pytest.raises(Skip, match="saves too little as fused"):
        ort.in_form(ort.layer(Row(1, 3, 2, 9, 9, kernel=1, pad=0), np.zeros((2, 3, 1, 1), np.float32)), "fused")


def test_the_methods_run_on_a_gpu():
    try:
        import torch

        assert torch.cuda.is_available()
        ort.require_cuda(ort.runtime_module())
    except Exception as error:
        skip_or_fail(f"no GPU for onnxruntime: {error}")
    options = Options(methods=("ort_cuda_*", "convpool_ort_cuda"), replays=3)
    for layout in ("nhwc", "nchw"):
        record = new_record("python -m benchmarks layers x", "", protocol(options))
        run = Run(record, [(Row(8, 64, 64, 32, 32, suite="own"), "fp16")], Options(**{**vars(options), "layout": layout}))
        run.measure(lambda done, rows, what: None)
        methods = record["rows"][0]["methods"]
        assert {name: "us" in found for name, found in methods.items()} == dict.fromkeys(ort.NAMES, True), methods
