# SPDX-License-Identifier: Apache-2.0
"""The pipeline: nodes that stay by name, metadata, and a result that is no valid ONNX."""

from dataclasses import replace

import pytest

import convpool
from convpool.algebra.geometry import refuse
from convpool.api import rewrite
from convpool.errors import ModelError
from convpool.ir.edit import Editor
from convpool.ir.model import load
from convpool.options import options_for
from tests.support.models import graph
from tests.support.rewriting import PAIR, POOL


def test_a_result_that_is_no_valid_onnx_is_an_error(monkeypatch):
    monkeypatch.setattr(Editor, "finish", lambda editor, scopes: editor._model.graph.node.add(op_type="None", output=["z"]))
    with pytest.raises(ModelError, match="^the result is not valid ONNX: No Op registered for None"):
        convpool.optimize(graph(PAIR), check=0)


def test_metadata_is_written_once():
    model = graph(PAIR)
    model.metadata_props.add(key="convpool.target", value="old")
    model.metadata_props.add(key="other", value="kept")
    result = convpool.optimize(model, target="cuda", check=0).model
    assert [(item.key, item.value) for item in result.metadata_props] == [("other", "kept"), ("convpool.target", "cuda")]


@pytest.mark.parametrize("pinned", ["conv", "pool", "none"])
def test_a_node_that_stays_by_name(pinned):
    """The layer has a hook: convpool.torch asks so."""
    model = graph(PAIR)
    for node, name in zip(model.graph.node, ("conv", "pool"), strict=True):
        node.name = name
    result = rewrite(load(model), replace(options_for("any"), pinned={pinned: refuse("hook", "one", "none")}), {})
    assert result.changed == (pinned == "none")
    reasons = {"conv": "Conv 'conv': hook; got one, expected none", "pool": "AveragePool 'pool': hook; got one, expected none"}
    assert [site.reason for site in result.report.sites] == [reasons.get(pinned)]


@pytest.mark.parametrize(
    ("kernel", "pads", "opset", "told"),
    [([3, 1], [1, 0, 1, 0], 19, 1), ([3, 1], [1, 0, 1, 0], 18, 0), ([3, 3], [1, 1, 1, 1], 19, 0), ([3, 3], [1, 0, 0, 1], 22, 0)],
)
@pytest.mark.parametrize("lowering", ["direct", "convavgpool"])
def test_pads_that_early_releases_of_onnxruntime_misread_are_told(lowering, kernel, pads, opset, told):
    """They take pads[1] for the end of the first of two axes; onnxruntime 1.21 to 1.24.4 were wrong, 1.25.1 is right."""
    model = graph(f"h = Conv<pads={pads}>(x, w)\ny = {POOL}(h)", {"w": (32, 16, *kernel)}, opset=opset)
    result = convpool.optimize(model, lowering=lowering, check=0)
    assert result.changed and len(result.report.warnings) == told
    assert all("misread by onnxruntime 1.24 and earlier" in text for text in result.report.warnings)
    assert not convpool.optimize(result.model, lowering=lowering, check=0).report.warnings  # the model's own nodes
