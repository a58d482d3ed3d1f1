# SPDX-License-Identifier: Apache-2.0
"""Concats of channels that begin as an earlier one does."""

import json

import numpy as np
import onnx
import pytest

import convpool
from convpool.cli.group import run
from convpool.cli.optimize import command
from models import generators
from tests.support import sessions
from tests.support.models import graph, random_feeds
from tests.support.rewriting import POOL, rewrite

PAIR = f"h = Conv<pads=[1,1,1,1]>(x, w)\nt = {POOL}(h)\na = Neg(t)\nb = Abs(t)\nc = Relu(a)\n"
BLOCK = "p = Concat<axis=1>(t, a)\nq = Concat<axis=1>(t, a, b)\nr = Concat<axis=1>(t, a, b, c)\n"
OUTPUTS = "float[i,j,k,l] p, float[m,n,k,l] q, float[o,s,k,l] r"


def concats(proto) -> dict[str, list[str]]:
    """The inputs of every Concat, by its output."""
    return {node.output[0]: list(node.input) for node in proto.node if node.op_type == "Concat"}


@pytest.mark.parametrize("lowering", ["convavgpool", "direct", "fused"])
def test_a_dense_block_is_joined_once(lowering):
    model = graph(PAIR + BLOCK, outputs=OUTPUTS)
    result = rewrite(model, 1, lowering)
    assert concats(result.graph) == {"p": ["t", "a"], "q": ["p", "b"], "r": ["q", "c"]}
    apart = convpool.optimize(model, lowering=lowering, disable="chain_concats").model
    assert concats(apart.graph) == concats(model.graph)
    feeds = random_feeds(model)
    for one, other in zip(sessions.run(apart, feeds), sessions.run(result, feeds), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("p = Concat<axis=1>(t, a)\nq = Concat<axis=1>(t, a, t, a, b)\nr = Concat<axis=1>(t, a, t)", ["p", "t", "a", "b"]),
        ("p = Concat<axis=1>(t, a)\nr = Concat<axis=1>(t, a, t)\nq = Concat<axis=1>(t, a, t, a, b)", ["r", "a", "b"]),
        ("p = Concat<axis=1>(t, a)\nr = Concat<axis=1>(t, a)\nq = Concat<axis=1>(t, a, b)", ["p", "b"]),
        ("p = Concat<axis=1>(a, t)\nr = Concat<axis=1>(t)\nq = Concat<axis=1>(t, a, b)", ["t", "a", "b"]),
        ("p = Concat<axis=1>(t, a)\nr = Neg(t)\nq = Concat<axis=1>(t, a)", ["t", "a"]),
        ("p = Concat<axis=2>(t, a)\nr = Neg(t)\nq = Concat<axis=2>(t, a, b)", ["t", "a", "b"]),
        ("p = Concat<axis=2>(t, a)\nr = Neg(t)\nq = Concat<axis=1>(t, a, b)", ["t", "a", "b"]),
        ("q = Concat<axis=1>(t, a, b)\np = Concat<axis=1>(t, a)\nr = Neg(t)", ["t", "a", "b"]),
    ],
    ids=["prefix", "longest prefix", "first of two", "other order", "same", "axis 2", "other axis", "later one"],
)
def test_what_counts_as_an_earlier_one(body, expected):
    outputs = "float[i,j,k,l] p, float[m,n,o,s] q, float[d,e,f,g] r"
    assert concats(rewrite(graph(PAIR + body, outputs=outputs), 1).graph)["q"] == expected


def test_excluded_and_without_a_pair():
    model = graph(PAIR + BLOCK, outputs=OUTPUTS)
    part = convpool.optimize(model, exclude="q")
    assert concats(part.model.graph) == {"p": ["t", "a"], "q": ["t", "a", "b"], "r": ["q", "c"]}
    assert part.report.summary.concats == 1 and part.report.verification.passed
    kept = convpool.optimize(model, exclude="t")
    assert not kept.changed and kept.report.summary.concats == 0
    assert kept.model.SerializeToString() == model.SerializeToString()


def test_each_scope_by_itself():
    body = (
        PAIR
        + "p = Concat<axis=1>(t, a)\n"
        + """r = If(flag) <
      then_branch = yes () => (float[i,j,k,l] d) { d = Concat<axis=1>(t, a, b) },
      else_branch = no () => (float[i,j,k,l] e) { f = Concat<axis=1>(t, c) e = Concat<axis=1>(t, c, b) }
    >"""
    )
    model = rewrite(graph(body, inputs="float[1,16,12,12] x, bool flag", outputs="float[i,j,k,l] p, float[m,n,k,l] r"), 1)
    branches = {item.name: concats(item.g) for node in model.graph.node if node.op_type == "If" for item in node.attribute}
    assert branches == {"then_branch": {"d": ["t", "a", "b"]}, "else_branch": {"f": ["t", "c"], "e": ["f", "b"]}}


def test_an_axis_that_a_function_is_given():
    text = '<opset_import: ["": 17], domain: "local">\njoin <axis> (t, a, b) => (q)\n'
    text += "{ p = Concat<axis: int = @axis>(t, a)\nq = Concat<axis: int = @axis>(t, a, b) }"
    model = graph(PAIR + "q = local.join<axis = 1>(t, a, b)", functions=text, imports=', "local": 1', outputs="float[i,j,k,l] q")
    assert concats(rewrite(model, 1).functions[0]) == {"p": ["t", "a"], "q": ["t", "a", "b"]}


def test_every_layer_of_densenet121():
    result = convpool.optimize(generators.generate("densenet121", batch=1, size=64))
    assert result.report.verification.passed and result.report.summary.concats == 58 - 4
    assert {len(names) for names in concats(result.model.graph).values()} == {2}


@pytest.mark.parametrize(("options", "count"), [([], 2), (["--concat"], 2), (["--no-concat"], 0)])
def test_command_line(options, count, tmp_path, capsys):
    onnx.save(graph(PAIR + BLOCK, outputs=OUTPUTS), tmp_path / "in.onnx")
    report = tmp_path / "report.json"
    assert run(command, "convpool-optimize", [str(tmp_path / "in.onnx"), "--report", str(report), *options]) == 0
    assert json.loads(report.read_text())["summary"]["concats"] == count
    assert ("concats   2 reuse the result of an earlier one" in capsys.readouterr().out) == bool(count)
