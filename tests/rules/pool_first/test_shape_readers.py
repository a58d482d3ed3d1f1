# SPDX-License-Identifier: Apache-2.0
"""Shapes read off the convolution's result, as TorchScript's exporter writes them: they keep no pair from being rewritten."""

import numpy as np
import pytest
from onnx import numpy_helper

import convpool
from convpool.ir.index import index_model
from convpool.ir.model import LoadedModel
from tests.support import sessions
from tests.support.models import graph, operators, random_feeds
from tests.support.rewriting import CONV, DIRECT, POOL, rewrite

FLATTEN = "s = Shape(h)\nt = Slice(s, zero, two, zero)\nr = Concat<axis=0>(t, last)\nf = Reshape(h, r)\n"
VIEW = "s = Shape(h)\nn = Gather(s, first)\nu = Unsqueeze(n, zero)\nr = Concat<axis=0>(u, channels, last)\nf = Reshape(h, r)\n"
WINDOWS = """s = Shape(h)
n = Gather(s, first)
u = Unsqueeze(n, zero)
i = Gather(s, second)
j = Div(i, half)
v = Unsqueeze(j, zero)
r = Concat<axis=0>(u, channels, v, two, v, two)
f = Reshape(h, r)
y = ReduceMean<axes=[3,5], keepdims=0>(f)
"""
MEAN = "y = ReduceMean<axes=[2], keepdims=0>(f)"
COUNT = """s = Shape(h)
a = ReduceSum<keepdims=0>(h, axes)
i = Gather(s, second)
j = Gather(s, third)
k = Mul(i, j)
c = Cast<to=1>(k)
y = Div(a, c)"""
NUMBERS = {
    "zero": [0], "two": [2], "last": [-1], "channels": [32], "axes": [2, 3], "w": (32, 16, 3, 3),
    **{name: np.array(n, np.int64) for name, n in (("first", 0), ("second", 2), ("third", 3), ("half", 2))},
}  # fmt: skip
FLAT = {"outputs": "float[a,b] y"}
OPEN = {"inputs": "float[N,16,12,12] x"}
SQUEEZED = {**DIRECT, "Squeeze": 1}


@pytest.mark.parametrize("batch", [{}, OPEN], ids=["static", "open batch"])
@pytest.mark.parametrize(
    ("body", "options", "left"),
    [(FLATTEN + MEAN, FLAT, SQUEEZED), (VIEW + MEAN, FLAT, SQUEEZED), (WINDOWS, {}, DIRECT)],
    ids=["flatten", "view", "windows"],
)
def test_shapes_of_the_average_go_with_it(body, options, left, batch):
    assert operators(rewrite(graph(CONV + body, NUMBERS, **options, **batch), pairs=1, size=3).graph) == left


def test_a_shape_that_is_read_on_comes_from_the_input():
    result = rewrite(graph(CONV + COUNT, NUMBERS, **FLAT, **OPEN, opset=13), pairs=1, size=3)
    left = operators(result.graph)
    assert (left["Shape"], left["Slice"], left["Concat"], left["Conv"]) == (1, 1, 1, 1)
    (shape,) = (node for node in result.graph.node if node.op_type == "Shape")
    assert list(shape.input) == ["x"]


@pytest.mark.parametrize("body", ["", "<start=1>", "<start=1, end=-1>", "<end=1>", "<start=-2>"])
@pytest.mark.parametrize("batch", ["1", "N"])
def test_a_shape_as_an_output_gives_the_same(body, batch):
    model = graph(
        CONV + f"s = Shape{body}(h)\ny = {POOL}(h)", inputs=f"float[{batch},16,12,12] x", outputs="float[a,b,c,d] y, int64[e] s"
    )
    result = rewrite(model, pairs=1, size=3)
    feeds = random_feeds(model, size=3)
    np.testing.assert_array_equal(sessions.run(result, feeds)[1], sessions.run(model, feeds)[1])


def test_a_shape_that_several_nodes_on_the_way_are_read_for():
    body = CONV + f"s = Shape(h)\nk = Identity(h)\nt = Shape(k)\ny = {POOL}(k)\nz = Add(s, t)"
    rewrite(graph(body, **OPEN, outputs="float[a,b,c,d] y, int64[4] z"), pairs=1, size=3)


@pytest.mark.parametrize(
    ("body", "options", "reason"),
    [
        (f"{CONV}s = Shape(h)\ny = {POOL}(h)", {"inputs": "float[1,16,H,12] x"}, "output 'h' has 2 readers"),
        (f"{CONV}s = Shape(h)\ny = {POOL}(h)", {**OPEN, "opset": 9}, "output 'h' has 2 readers"),
        (f"{CONV}g = Relu(h)\ns = Shape(g)\ny = {POOL}(h)", OPEN, "output 'h' has 2 readers"),
        (
            f"{CONV}k = Add(h, v)\ns = Shape(k)\ny = {POOL}(k)",
            {"inputs": "float[1,16,12,12] x, float[N,32,1,1] v"},
            "Shape 's': open size; got N, expected that of a convolution's input",
        ),
        (
            f"{CONV}k = Conv<pads=[1,1,1,1]>(v, w)\nc = Concat<axis=0>(h, k)\ns = Shape(c)\ny = {POOL}(c)",
            {"inputs": "float[N,16,12,12] x, float[M,16,12,12] v"},
            "Shape 's': open size",
        ),
    ],
    ids=["open size of space", "opset 9", "not a Shape", "batch of another tensor", "two batches"],
)
def test_other_readers_keep_the_pair(body, options, reason):
    model = graph(body, **options, outputs="float[a,b,c,d] y, int64[4] s")
    result = convpool.optimize(model, check=0, lowering="direct")
    assert not result.changed
    assert any(reason in site.reason for site in result.report.sites), [site.reason for site in result.report.sites]


def test_two_pairs_that_share_a_shape():
    body = CONV + "k = Conv<pads=[1,1,1,1]>(x, w)\n" + FLATTEN + "g = Reshape(k, r)\n"
    body += "a = ReduceMean<axes=[2], keepdims=0>(f)\nb = ReduceMean<axes=[2], keepdims=0>(g)\ny = Add(a, b)"
    rewrite(graph(body, NUMBERS, **FLAT, **OPEN), pairs=2, size=3)


def test_large_tables_are_not_read_for_sizes(monkeypatch):
    names, read = [], LoadedModel.read
    monkeypatch.setattr(LoadedModel, "read", lambda self, tensor: names.append(tensor.name) or read(self, tensor))
    body = CONV + "i = Gather(table, zero)\nj = Shape(x)\nr = Concat<axis=0>(i, j)\n"
    body += f"f = Reshape(q, r)\ny = {POOL}(h)\nz = Identity(f)"
    model = graph(
        body,
        {**NUMBERS, "table": np.arange(10000, dtype=np.int64)},
        inputs="float[N,16,12,12] x, float[0] q",
        outputs="float[a,b,c,d] y, float[e,f,g,h,i] z",
    )
    assert convpool.optimize(model, check=0).report.summary.rewritten == 1
    assert names and "table" not in names


def test_a_batch_that_a_reshape_has_made_nameless():
    body = CONV + VIEW.replace("f = Reshape(h, r)", "g = Reshape(h, same)\nf = Reshape(g, r)").replace("last)", "area)") + MEAN
    numbers = {**NUMBERS, "same": [-1, 32, 144], "area": [144]}
    assert operators(rewrite(graph(body, numbers, **FLAT, **OPEN), pairs=1, size=3).graph) == SQUEEZED


def test_a_reshape_to_the_batch_of_another_tensor_stays():
    body = CONV + FLATTEN.replace("Shape(h)", "Shape(k)") + MEAN
    body = body.replace("s = ", "k = Conv<pads=[1,1,1,1]>(v, w)\ns = ")
    model = graph(body, NUMBERS, inputs="float[N,16,12,12] x, float[M,16,12,12] v", **FLAT)
    result = convpool.optimize(model, check=0)
    assert not result.changed
    assert "sizes of a Reshape; got unknown" in result.report.sites[0].reason


def test_each_node_of_a_shape_is_looked_at_once():
    """Forty Concats of a vector with itself are 2^40 ways to it."""
    doubled = "".join(f"d{n + 1} = Concat<axis=0>(d{n}, d{n})\n" for n in range(40))
    model = graph(doubled + "y = Identity(d40)", inputs="int64[1] d0", outputs="int64[n] y")
    (scope,) = index_model(model, numpy_helper.to_array, lambda *_: pytest.fail("nothing to compute"))
    assert scope.sizes("d40") is None
