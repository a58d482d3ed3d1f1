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
from tests.support.rewriting import PAIR


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
