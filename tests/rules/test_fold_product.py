# SPDX-License-Identifier: Apache-2.0
"""Maps by constants behind matrix products: folded into their weights, to the bit on whole numbers, and when they stay."""

from collections import Counter

import numpy as np
import pytest

import convpool
from tests.support.models import graph, operators
from tests.support.resizing import whole
from tests.support.rewriting import DIRECT, POOL, rewrite

NUMBERS = {
    **{"w": whole((32, 16, 3, 3)), "p": whole((8, 6), 1), "q": whole((8, 6), 2), "t": whole((6, 8), 3)},
    **{"a": whole((6,), 4), "b": whole((1, 6), 5), "c": whole((6, 1, 1), 6), "d": whole((1, 6, 1, 1), 7)},
    **{"five": whole((5, 6), 8), "wide": whole((3, 1, 6), 9), "row": whole((5, 1), 10)},
    "eight": np.array([1, 2, 4, -8, 0.5, -1], np.float32),
    "none": np.array([1, 0, 1, 1, 1, 1], np.float32),
    "one": np.float32(1),
    "col": [0, 6, 1, 1],
    "ends": [2, 3],
}
"""Whole numbers, and powers of two."""
PAIR = f"hh = Conv<pads=[1,1,1,1]>(x, w)\ny = {POOL}(hh)"
GIVEN = {"inputs": "float[1,16,12,12] x, float[5,8] z", "outputs": "float[e,f,g,h] y, float[i,j] r"}
FOUR = {**GIVEN, "outputs": "float[e,f,g,h] y, float[i,j,k,l] r"}
COLUMNS = "g = Gemm(z, p, a)\nh = Gemm<transB=1>(z, t, b)\ngc = Reshape(g, col)\nhc = Reshape(h, col)\nk = Add(one, gc)\n"
CONDITIONAL = f"{COLUMNS}m = Mul(k, c)\nn = Mul(k, d)\ns = Add(n, hc)\nm0 = Exp(m)\nr = Mul(m0, s)"
VIEWS = {"Flatten": 1, "Gemm": 1, "Unsqueeze": 1}
FOLDED = {
    "scale and shift of a conditional normalization": (CONDITIONAL, FOUR, {"Gemm": 2, "Reshape": 2, "Exp": 1, "Mul": 1}),
    "alpha and beta": ("g = Gemm<alpha=2.0, beta=-0.5>(z, p, b)\nr = Mul(a, g)", GIVEN, {"Gemm": 1}),
    "a MatMul": ("g = MatMul(z, p)\nk = Add(g, a)\nr = Sub(a, k)", GIVEN, {"Gemm": 1}),
    "before opset 11": ("g = MatMul(z, p)\nr = Mul(g, b)", {**GIVEN, "opset": 9}, {"Gemm": 1}),
    "a sum of products": ("g = Gemm(z, p, one)\nh = MatMul(z, q)\nr = Sub(g, h)", GIVEN, {"Gemm": 1}),
    "weights of two": ("g = Gemm(z, p)\nh = Gemm(z, p)\nk = Neg(h)\nl = Mul(g, b)\nr = Sub(l, k)", GIVEN, {"Gemm": 1}),
    "a product read twice": ("g = MatMul(z, p)\nk = Mul(g, b)\nr = Add(k, g)", GIVEN, {"Gemm": 1}),
    "a division": ("g = MatMul(z, p)\nr = Div(g, eight)", GIVEN, {"Gemm": 1}),
    "other views": ("g = MatMul(z, p)\nu = Unsqueeze(g, ends)\nk = Mul(u, c)\nr = Flatten(k)", GIVEN, VIEWS),
    "one that stays": (
        "g = MatMul(z, p)\nh = MatMul(z, q)\nk = Mul(g, a)\nl = Add(k, h)\no = Abs(h)\nr = Mul(o, l)",
        GIVEN,
        {"Abs": 1, "Gemm": 1, "MatMul": 1, "Mul": 1},
    ),
}  # fmt: skip


def model_of(body: str, given: dict, pair: str = PAIR, **constants):
    """A pair, and products of z."""
    return graph(f"{pair}\n{body}", NUMBERS | constants, **given)


@pytest.mark.parametrize("name", FOLDED)
def test_maps_go_into_the_weights(name):
    body, given, wanted = FOLDED[name]
    result = rewrite(model_of(body, given), 1, rtol=0, whole=True, enable="fold_product")
    assert operators(result.graph) == {**DIRECT, **wanted}


BEHIND = "g = Gemm(z, p, b)\n"
KEPT = {
    "a product that others read": f"{BEHIND}r = Mul(g, a)\no = Exp(g)",
    "one read by more than there are": f"{BEHIND}k = Mul(g, a)\nl = Add(g, b)\no = Exp(k)\no2 = Exp(l)\nr = Mul(o, o2)",
    "a number for each image": f"{BEHIND}r = Mul(g, five)",
    "a constant of more axes": f"{BEHIND}k = Mul(g, wide)\nr = Flatten(k)",
    "another input": f"{BEHIND}v = Abs(z)\nh = MatMul(v, q)\nr = Add(g, h)",
    "a product of products": f"{BEHIND}h = MatMul(z, q)\nr = Mul(g, h)",
    "a division by it": f"{BEHIND}r = Div(a, g)",
    "a division by zero": f"{BEHIND}r = Div(g, none)",
    "the bias of a MatMul": "g = MatMul(z, p)\nr = Add(g, a)",
    "a transposed input": "v = Transpose(z)\ng = Gemm<transA=1>(v, p, b)\nr = Mul(g, a)",
    "a bias by image": "g = Gemm(z, p, row)\nr = Mul(g, a)",
    "computed weights": "v = Transpose(z)\ng = MatMul(z, v)\nr = Mul(g, b2)",
    "a view that moves columns": f"{BEHIND}k = Reshape(g, turned)\nr = Mul(k, b2)",
    "a quantized input": "i = QuantizeLinear(z, u)\nj = DequantizeLinear(i, u)\ng = Gemm(j, p, b)\nr = Mul(g, a)",
    "an activation between": f"{BEHIND}k = Exp(g)\nr = Mul(k, a)",
}


@pytest.mark.parametrize("name", KEPT)
def test_others_stay(name):
    model = model_of(KEPT[name], GIVEN, turned=[6, 5], b2=whole((1, 5)), u=np.float32(1))
    result = rewrite(model, 1, rtol=0 if "Exp" not in KEPT[name] else 1e-6, whole=True, enable="fold_product")
    assert operators(result.graph) == Counter(operators(model.graph))


def test_numbers_outside_of_the_type_stay():
    """In half precision the product may hold what its weights would not."""
    given = {"inputs": "float[1,16,12,12] x, float16[5,8] z", "outputs": "float[e,f,g,h] y, float16[i,j] r"}
    half = {name: NUMBERS[name].astype(np.float16) for name in ("p", "b")}
    for factor, changed in ((4.0, True), (6e4, False)):
        model = model_of(f"{BEHIND}r = Mul(g, a)", given, **half, a=np.full(6, factor, np.float16))
        kinds = operators(convpool.optimize(model, check=0, lowering="direct", enable="fold_product").model.graph)
        assert ("Mul" in kinds) != changed


def test_graph_outputs_and_inputs_that_a_caller_replaces():
    outputs = {**GIVEN, "outputs": "float[e,f,g,h] y, float[i,j] r, float[i,j] g"}
    assert operators(rewrite(model_of(f"{BEHIND}r = Mul(g, a)", outputs), 1, enable="fold_product").graph)["Mul"] == 1
    replaced = {**GIVEN, "inputs": f"{GIVEN['inputs']}, float[8,6] p"}
    assert operators(rewrite(model_of(f"{BEHIND}r = Mul(g, a)", replaced), 1, enable="fold_product").graph)["Mul"] == 1


@pytest.mark.parametrize(("read", "kept"), [("g", True), ("k", False)])
def test_what_a_branch_reads_is_there(read, kept):
    branches = "<then_branch = t () => (float[i2,j2] u) { u = Abs(k) }, else_branch = e () => (float[i3,j3] v) { v = Neg(%s) }>"
    given = {**GIVEN, "inputs": f"{GIVEN['inputs']}, bool f"}
    result = rewrite(model_of(f"{BEHIND}k = Mul(g, a)\nr = If(f) {branches % read}", given), 1, enable="fold_product")
    assert operators(result.graph) == {**DIRECT, "Gemm": 1, "If": 1, **({"Mul": 1} if kept else {})}


def test_names_that_are_excluded_and_models_without_a_pair_stay():
    model = model_of(f"{BEHIND}r = Mul(g, a)", GIVEN)
    assert "Mul" not in operators(convpool.optimize(model, target="tensorrt", check=0).model.graph)
    assert "Mul" in operators(convpool.optimize(model, target="tensorrt", check=0, exclude="r").model.graph)
    assert "Mul" in operators(convpool.optimize(model, check=0).model.graph)  # for every runtime: rounds otherwise, gains little
    alone = model_of(f"{BEHIND}r = Mul(g, a)", GIVEN, pair="y = Conv(x, w)")
    assert not convpool.optimize(alone, target="tensorrt", check=0).changed
