# SPDX-License-Identifier: Apache-2.0
"""The reports of a run, and its pipeline: steps, counts, reasons in short, JSON, names, and a result that is no valid ONNX."""

import json
from dataclasses import replace

import pytest

import convpool
from convpool.algebra.geometry import refuse
from convpool.api import rewrite
from convpool.errors import ModelError
from convpool.ir.edit import Editor
from convpool.ir.model import load
from convpool.options import options_for
from convpool.report import SiteReport, json_text
from convpool.rules import base as reasons
from convpool.rules.base import Reject
from convpool.summary import Seen, notes
from tests.support.models import graph, operators
from tests.support.rewriting import IF_INPUTS, PAIR, POOL


def site(conv: str, **more) -> SiteReport:
    given = dict(pool="pool", pattern="conv_avg_pool", status="rewritten", lowering="convavgpool", macs_before=4, macs_after=1)
    return SiteReport(**{"conv": conv, **given, **more})


POOLED = "MaxPool follows a convolution 2 x: a maximum is not linear, so no pair"
INT8 = "TensorRT would run 3 x a float kernel for an INT8 convolution; --target tensorrt leaves these"


@pytest.mark.parametrize(
    ("sites", "max_pools", "int8", "wanted"),
    [
        ([], 0, 0, []), ([], 2, 0, [POOLED]), ([site("a", status="rejected")], 2, 0, [POOLED]),
        ([site("a")], 2, 0, []), ([site("a")], 0, 3, [INT8]),
    ],
)  # fmt: skip
def test_notes(sites, max_pools, int8, wanted):
    assert notes(Seen(max_pools=max_pools), sites, int8) == wanted


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (Reject("n", reasons.BETWEEN, "Relu", ""), "Relu between"),
        (Reject("n", "output 'x' has 2 readers", "other readers", ""), "read by something else too"),
        (Reject("n", "saves too little as direct", "1", ""), "saves too little"),
        (Reject("n", "Pad 'p' in front of the box mean", "pads", ""), "a Pad in front"),
        (Reject("n", "axes", "computed, or an input that a caller may override", ""), "axes not constant"),
        (Reject("n", "size", "unknown sizes", ""), "size: unknown"),
        (Reject("n", "mode", "edge", ""), "mode"),
    ],
)
def test_obstacles_in_short(verdict, words):
    assert reasons.in_short(verdict) == words


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (Reject("Elu 'e'", reasons.BETWEEN, "Elu", "linear"), "an Elu stands between: Elu 'e'"),
        (Reject("Conv 'c'", "mode", "edge", "constant"), "Conv 'c': mode; got edge, expected constant"),
    ],
)
def test_obstacles_in_words(verdict, words):
    assert reasons.in_words(verdict) == words


def test_the_size_of_a_model_from_memory():
    gs, model = pytest.importorskip("onnx_graphsurgeon"), graph(PAIR)
    assert convpool.optimize(model, check=0).report.summary.bytes_before == model.ByteSize()
    assert convpool.optimize(gs.import_onnx(model), check=0).report.summary.bytes_before > 18432


def test_operators_are_counted_in_bodies_and_functions():
    functions = """<domain: "local", opset_import: ["": 17]> net (f) => (g) { i = Relu(f) g = Neg(i) }"""
    body = f"{PAIR}\nz = If(flag) <then_branch = yes () => (float[a,b,c,d] t) {{ t = Relu(x) }}, "
    body += "else_branch = no () => (float[a,b,c,d] e) { e = local.net(x) }>"
    outputs = "float[a,b,c,d] y, float[e,f,g,h] z"
    summary = convpool.optimize(graph(body, inputs=IF_INPUTS, outputs=outputs, functions=functions), check=0).report.summary
    assert summary.operators_before == {"AveragePool": 1, "Conv": 1, "If": 1, "Neg": 1, "Relu": 2, "net": 1}
    assert summary.operators_after == {"ConvAvgPool": 1, "If": 1, "Neg": 1, "Relu": 2, "net": 1}


def test_a_report_is_indented_by_two_and_has_null_for_errors_that_are_not_finite():
    report = convpool.optimize(graph(PAIR), check=0).report
    assert report.to_json() == json.dumps(json.loads(report.to_json()), indent=2) + "\n" != report.to_json(indent=None)
    content = {"a": [float("inf"), 1.0, {"b": [-float("inf")]}], "c": float("nan")}
    assert json.loads(json_text(content)) == {"a": [None, 1.0, {"b": [None]}], "c": None}


def test_a_result_that_is_no_valid_onnx_is_an_error(monkeypatch):
    monkeypatch.setattr(Editor, "finish", lambda editor, *_: editor._model.graph.node.add(op_type="None", output=["z"]))
    with pytest.raises(ModelError, match="^the result is not valid ONNX: No Op registered for None"):
        convpool.optimize(graph(PAIR), check=0)


def test_metadata_is_written_once():
    model = graph(PAIR)
    model.metadata_props.add(key="convpool.target", value="old")
    model.metadata_props.add(key="other", value="kept")
    result = convpool.optimize(model, target="cuda", check=0).model
    assert [(item.key, item.value) for item in result.metadata_props] == [("other", "kept"), ("convpool.target", "cuda")]
    lowered = convpool.optimize(result, target="cpu", check=0).model  # which has none of the nodes
    assert [(item.key, item.value) for item in lowered.metadata_props] == [("other", "kept")]


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
    ("kernel", "pads", "opset", "wrong"),
    [([3, 1], [1, 0, 1, 0], 19, 1), ([3, 1], [1, 0, 1, 0], 18, 0), ([3, 3], [1, 1, 1, 1], 19, 0), ([3, 3], [1, 1, 1, 0], 22, 0)],
)
@pytest.mark.parametrize("options", [{"lowering": "direct"}, {"lowering": "auto"}, {}, {"target": "tensorrt"}])
def test_pads_that_early_releases_of_onnxruntime_misread(options, kernel, pads, opset, wrong):
    """Releases 1.21 to 1.24.4 take pads[1] for the end of the first of two axes.  Only nodes for a GPU have such pads."""
    model = graph(f"h = Conv<pads={pads}>(x, w)\ny = {POOL}(h)", {"w": (32, 16, *kernel)}, opset=opset)
    result, told = convpool.optimize(model, **options, check=0), wrong and "target" in options
    assert result.changed == (not wrong or options != {"lowering": "direct"}) and len(result.report.warnings) == told
    assert "AveragePool" not in operators(result.model.graph) or not wrong or not result.changed
    assert all("misread by onnxruntime 1.24 and earlier" in text for text in result.report.warnings)
    assert not convpool.optimize(result.model, **options, check=0).report.warnings  # the model's own nodes
