# SPDX-License-Identifier: Apache-2.0
"""Shapes that a model computes from shapes: what is known of them where the batch is open."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper

import convpool
from convpool.ir.index import index_model, with_shapes_folded
from convpool.ir.model import infer_shapes
from tests.support.models import graph, operators
from tests.support.rewriting import rewrite

CONV = "h = Conv<pads=[1,1,1,1]>(x, w)\ns = Shape(h)\n"
MEAN = "f = Reshape(h, t)\ny = ReduceMean<axes=[2]>(f)"
CONSTANTS = {
    "zero": [0],
    "one": [1],
    "two": [2],
    "three": [3],
    "minus": [-1],
    "below": [-4],
    "all": [144],
    "both": [0, 1],
    "reverse": [1, 0],
    "scalar": np.int64(0),
    "tail": [32, 144],
}
TARGETS = {  # the target of a Reshape to batch, channels and positions: whether it is known to be that
    "Slice": ("p = Slice(s, zero, two)\nt = Concat<axis=0>(p, minus)", True),
    "Slice along an axis": ("p = Slice(s, zero, two, zero)\nt = Concat<axis=0>(p, minus)", True),
    "Slice by steps of 1": ("p = Slice(s, zero, two, zero, one)\nt = Concat<axis=0>(p, all)", True),
    "Slice from behind": ("p = Slice(s, below, two)\nt = Concat<axis=0>(p, minus)", True),
    "Gather of one": ("p = Gather(s, zero)\nt = Concat<axis=0>(p, tail)", True),
    "Gather of two": ("p = Gather(s, both)\nt = Concat<axis=0>(p, minus)", True),
    "Gather of a number": ("g = Gather(s, scalar)\np = Unsqueeze(g, zero)\nt = Concat<axis=0>(p, tail)", True),
    "Gather from behind": ("p = Gather(s, below)\nt = Concat<axis=0>(p, tail)", True),
    "a part of Shape": ("p = Shape<end=2>(h)\nt = Concat<axis=0>(p, minus)", True),
    "a part of Shape from behind": ("p = Shape<start=-4, end=-2>(h)\nt = Concat<axis=0>(p, minus)", True),
    "two parts of Shape": ("p = Shape<end=1>(h)\nq = Shape<start=1, end=2>(h)\nt = Concat<axis=0>(p, q, minus)", True),
    "channels first of all": ("p = Gather(s, reverse)\nt = Concat<axis=0>(p, minus)", False),
    "every second": ("q = Slice(s, zero, three, zero, two)\nt = Concat<axis=0>(q, minus)", False),
    "given by a caller": ("p = Slice(s, zero, e)\nt = Concat<axis=0>(p, minus)", False),
    "a product": ("p = Gather(s, zero)\nq = Mul(p, one)\nt = Concat<axis=0>(q, tail)", None),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_of_a_reshape_that_follows_from_shapes(name):
    """None: either would be right."""
    body, known = TARGETS[name]
    given = "float[N,16,12,12] x, int64[1] e" if ", e)" in body else "float[N,16,12,12] x"
    model = graph(f"{CONV}{body}\n{MEAN}", CONSTANTS, inputs=given, outputs="float[a,b,c] y")
    (site,) = convpool.optimize(model, check=0, lowering="direct").report.sites
    assert known is None or (site.status == "rewritten") == known, site.reason
    if site.status == "rewritten":
        result = rewrite(model, 1)
        assert operators(result.graph)["AveragePool"] == 1


@pytest.mark.parametrize(
    ("target", "values"),
    [
        ("p = Gather(s, reverse)\nt = Concat<axis=0>(p, all)", [32, -1, 144]),
        ("p = Gather(s, reverse)\nt = Concat<axis=0>(p, minus)", None),
    ],
)
def test_an_open_size_that_changes_its_place_is_minus_1_in_a_target(target, values):
    model = graph(f"{CONV}{target}\n{MEAN}", CONSTANTS, inputs="float[N,16,12,12] x", outputs="float[a,b,c] y")
    (scope,) = index_model(model, numpy_helper.to_array, lambda *_: pytest.fail("nothing to compute"), infer_shapes(model))
    folded = with_shapes_folded(model, scope)
    assert (folded is None) == (values is None)
    if folded is not None:
        assert numpy_helper.to_array(folded.graph.initializer[-1]).tolist() == values


def test_what_a_caller_picks_of_a_shape_is_not_known():
    body = "p = Gather(s, e)\nt = Concat<axis=0>(p, tail)"
    model = graph(f"{CONV}{body}\n{MEAN}", CONSTANTS, inputs="float[N,16,12,12] x, int64[1] e", outputs="float[a,b,c] y")
    (site,) = convpool.optimize(model, check=0, lowering="direct").report.sites
    assert site.conv == "h"


@pytest.mark.parametrize(("size", "known"), [(12, True), (13, True), ("W", False)])
def test_a_target_from_all_sizes(size, known):
    """Positions as a product of what Gather picks."""
    body = "r = Gather(s, two)\nc = Gather(s, three)\nn = Mul(r, c)\nt = Concat<axis=0>(zero, thirtytwo, n)"
    constants = {**CONSTANTS, "thirtytwo": [32]}
    model = graph(f"{CONV}{body}\n{MEAN}", constants, inputs=f"float[N,16,12,{size}] x", outputs="float[a,b,c] y")
    (site,) = convpool.optimize(model, check=0, lowering="direct").report.sites
    assert (site.status == "rewritten") == known
    if known:
        rewrite(model, 1)
