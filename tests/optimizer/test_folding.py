# SPDX-License-Identifier: Apache-2.0
"""Constants that exporters leave as small computations, and what must not be computed because it is large."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import convpool
from tests.support.models import graph, operators
from tests.support.rewriting import PAIR, POOL, rewrite

DIRECT = {"AveragePool": 1, "Conv": 1}
CHAINS = {
    "axes by Reshape": (
        "h = Conv(x, w)\nv = Constant<value_ints = [2, 3]>()\nn = Constant<value_ints = [-1]>()\n"
        "axes = Reshape(v, n)\ny = ReduceMean(h, axes)",
        {"w": (64, 16, 1, 1)},
        {"Conv": 1, "GlobalAveragePool": 1},
    ),
    "factor by Unsqueeze": (
        f"c = Conv<pads=[1,1,1,1]>(x, w)\ni = Constant<value_ints = [1, 2]>()\nf = Unsqueeze(k, i)\nh = Mul(c, f)\ny = {POOL}(h)",
        {"k": (32,)},
        DIRECT,
    ),
    "pads by Concat, Reshape and Transpose": (
        f"c = Conv<pads=[1,1,1,1]>(x, w)\na = Concat<axis=0>(none, none)\nm = Reshape(a, two)\nt = Transpose(m)\n"
        f"p = Reshape(t, flat)\nq = Cast<to=7>(p)\nh = Pad(c, q)\ny = {POOL}(h)",
        {"none": [0, 0, 0, 0], "two": [4, 2], "flat": [-1]},
        DIRECT,
    ),
    "bias by Expand": (
        f"b = Expand(zero, n)\nh = Conv<pads=[1,1,1,1]>(x, w, b)\ny = {POOL}(h)",
        {"zero": np.float32(0), "n": [32]},
        {**DIRECT, "Expand": 1},
    ),
    "parameters behind Identity": (
        f"c = Conv<pads=[1,1,1,1]>(x, w)\nv = Identity(g)\nh = BatchNormalization(c, g, b, b, v)\ny = {POOL}(h)",
        {"g": np.linspace(1, 2, 32, dtype=np.float32), "b": (32,)},
        DIRECT,
    ),
    "weights by an equalised learning rate": (
        f"v = Mul(w, k)\nh = Conv<pads=[1,1,1,1]>(x, v)\ny = {POOL}(h)",
        {"k": np.float32(0.1)},
        {**DIRECT, "Mul": 1},
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_small_computations_count_as_constants(name):
    body, constants, expected = CHAINS[name]
    assert operators(rewrite(graph(body, constants, opset=18), 1).graph) == expected


def test_a_chain_from_an_input_is_no_constant():
    body = (
        f"c = Conv<pads=[1,1,1,1]>(x, w)\ni = Constant<value_ints = [1, 2]>()\nf = Unsqueeze(v, i)\nh = Mul(c, f)\ny = {POOL}(h)"
    )
    model = graph(body, inputs="float[1,16,12,12] x, float[32] v", opset=18)
    assert operators(rewrite(model, 1).graph) == {**DIRECT, "Constant": 1, "Mul": 1, "Unsqueeze": 1}


# As exports of torch.nn.utils.spectral_norm compute them: W / (u' W v).
SPECTRAL = (
    "m = Reshape(raw, rows)\ns = MatMul(m, v)\nsigma = MatMul(u, s)\nk = Div(raw, sigma)\n"
    f"h = Conv<pads=[1,1,1,1]>(x, k)\ny = {POOL}(h)"
)
SPECTRAL_CONSTANTS = {"raw": (128, 16, 3, 3), "rows": [128, -1], "u": (128,), "v": (144,)}
FORMS = {
    "direct": {"AveragePool": 1, "Conv": 1, "Reshape": 1, "MatMul": 2, "Div": 1},
    "fused": {"Conv": 1},
    "convavgpool": {"ConvAvgPool": 1},
}


@pytest.mark.parametrize("lowering", FORMS)
def test_spectral_normalisation_is_computed_once(lowering):
    model = graph(SPECTRAL, SPECTRAL_CONSTANTS)
    result = convpool.optimize(model, lowering=lowering, check=1).model
    assert operators(result.graph) == FORMS[lowering]
    if lowering == "convavgpool":
        assert {tensor.name for tensor in result.graph.initializer} == {"k_channels_last", "h_bias"}


def test_shape_arithmetic_may_stand_in_the_normalisation():
    body = SPECTRAL.replace("m = Reshape(raw, rows)", "both = Gather<axis=0>(table, zero)\nm = Reshape(raw, both)")
    model = graph(body, {**SPECTRAL_CONSTANTS, "table": np.array([[128, -1]]), "zero": np.array(0)})
    assert operators(convpool.optimize(model, lowering="fused", check=1).model.graph) == {"Conv": 1}


@pytest.mark.parametrize(
    "body, inputs",
    [
        (SPECTRAL, "float[1,16,12,12] x, float[128] u"),  # a caller may give another one
        (SPECTRAL.replace("k = Div(raw, sigma)", "d = Div(raw, sigma)\nk = Cast<to=1>(d)"), "float[1,16,12,12] x"),
        (SPECTRAL.replace("m = Reshape(raw, rows)", "r = RandomNormalLike(raw)\nm = Reshape(r, rows)"), "float[1,16,12,12] x"),
    ],
)
def test_weights_that_are_not_arithmetic_on_constants_stay_computed(body, inputs):
    model = graph(body, SPECTRAL_CONSTANTS, inputs=inputs)
    result = convpool.optimize(model, check=0).model
    found = operators(result.graph)
    assert found["ConvAvgPool"] == found["Transpose"] == found["Div"] == 1
    fused = convpool.optimize(model, lowering="fused", check=0)
    assert fused.report.summary.rewritten == 0 and "weights; got computed" in fused.report.sites[0].reason


def test_what_else_reads_a_computed_weight_keeps_it():
    model = graph(f"{SPECTRAL}\nz = ReduceSum(k)", SPECTRAL_CONSTANTS, outputs="float[a,b,c,d] y, float[e,f,g,h] z")
    assert operators(rewrite(model, 1, lowering="convavgpool").graph) == {
        "ConvAvgPool": 1,
        "Reshape": 1,
        "MatMul": 2,
        "Div": 1,
        "ReduceSum": 1,
    }


@pytest.mark.parametrize("make", ["ConstantOfShape(n)", "Expand(zero, n)"])
def test_large_tensors_are_never_made(make):
    body = f"{PAIR}\nk = {make}\nj = Add(v, k)\nz = ReduceSum(j)"
    constants = {"n": [64, 1000, 1000], "zero": np.zeros(1, np.float32)}
    model = graph(body, constants, inputs="float[1,16,12,12] x, float v", outputs="float[a,b,c,d] y, float[e,f,g] z")
    tracemalloc.start()
    try:
        assert convpool.optimize(model, check=0).report.summary.rewritten == 1
        assert tracemalloc.get_traced_memory()[1] < 32_000_000  # the tensor has 256 MB
    finally:
        tracemalloc.stop()
