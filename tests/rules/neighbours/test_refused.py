# SPDX-License-Identifier: Apache-2.0
"""Nodes before and behind a pair that are not fused: each reason, and where the order ends."""

import numpy as np
import onnx
import pytest

import convpool
from tests.support.fusing import HALF, NORM, PAIR, RESIDUAL, SKIP, TAIL, operator_nodes, optimize, rewrite
from tests.support.models import graph, graph_of
from tests.support.rewriting import POOL

REFUSALS: dict[str, tuple] = {  # body, the reason, and what `graph_of` is given
    # before the pair
    "read elsewhere": (
        f"p = Relu(x)\n{PAIR}\nz = Sigmoid(p)",
        "Relu 'p': output 'p' has 2 readers; got other readers, expected only the convolution",
        {"outputs": "float[a,b,c,d] y, float[a,b,e,f] z"},
    ),
    "a graph output": (
        f"p = Relu(x)\n{PAIR}",
        "Relu 'p': output 'p' is a graph output; got other readers, expected only the convolution",
        {"outputs": "float[a,b,c,d] y, float[a,b,e,f] p"},
    ),
    "captured by a branch": (
        f"p = Relu(x)\n{PAIR.replace('y =', 'q =')}\nz = If(flag) <"
        "then_branch = t () => (float[1,16,12,12] i) { i = Sigmoid(p) }, "
        "else_branch = e () => (float[1,16,12,12] j) { j = Tanh(p) }>\ny = Identity(q)",
        "Relu 'p': output 'p' is read by a subgraph; got other readers, expected only the convolution",
        {"inputs": "float[1,16,12,12] x, bool flag", "outputs": "float[a,b,c,d] y, float[a,b,e,f] z"},
    ),
    "training BatchNormalization": (
        f"p, i, j = BatchNormalization<training_mode=1>(x, g, b, m, d)\n{PAIR}",
        "BatchNormalization 'p': form; got training, expected inference",
        NORM,
    ),
    "BatchNormalization by a caller": (
        f"p = BatchNormalization(x, g, b, m, d)\n{PAIR}",
        "BatchNormalization 'p': constant operands; got computed ones, expected constants per channel",
        {**{k: v for k, v in NORM.items() if k != "g"}, "inputs": "float[1,16,12,12] x, float[16] g"},
    ),
    "negative variance": (
        f"p = BatchNormalization(x, g, b, m, d)\n{PAIR}",
        "BatchNormalization 'p': constant operands; got a division by 0, infinity or NaN, expected finite numbers",
        {**NORM, "d": np.full(16, -1, np.float32)},
    ),
    "a graph output by way of Identity": (
        f"p = Relu(x)\ni = Identity(p)\n{PAIR.replace('(p,', '(i,')}",
        "Relu 'p': output 'p' is a graph output; got other readers, expected only the convolution",
        {"outputs": "float[a,b,c,d] y, float[a,b,e,f] p"},
    ),
    "BatchNormalization per position": (
        f"p = BatchNormalization<spatial=0>(x, g, b, m, d)\n{PAIR}",
        "BatchNormalization 'p': spatial; got 0, expected 1",
        {**(dict.fromkeys("gbm", (16, 12, 12)) | {"d": np.ones((16, 12, 12), np.float32)}), "opset": 7},
    ),
    "differs by position": (
        f"p = Mul(x, k)\n{PAIR}",
        "Mul 'p': operands; got two that vary over space, expected one that does not",
        {"k": (12, 12)},
    ),
    "differs by sample": (
        f"p = Add(x, k)\n{PAIR}",
        "Add 'p': constant operands; got computed ones, expected constants per channel",
        {"k": (2, 1, 1, 1), "inputs": "float[2,16,12,12] x"},
    ),
    "channels widened": (
        f"p = Mul(x, k)\n{PAIR}",
        "Mul 'p': channels; got 1, expected 16, not widened",
        {"k": (16, 1, 1), "inputs": "float[1,1,12,12] x"},
    ),
    "rank raised": (
        f"p = Mul(x, k)\n{PAIR}",
        "Mul 'p': rank; got 3, expected 4",
        {"k": (1, 1, 1, 1), "inputs": "float[16,12,12] x"},
    ),
    "behind a convolution": (
        f"c = Conv<pads=[1,1,1,1]>(x, v)\np = Relu(c)\n{PAIR}",
        "Relu 'p': prologue; got Conv 'c' before it, which fuses it, expected a tensor that stays as it is",
        {"v": (16, 16, 3, 3)},
    ),
    "behind a residual of a convolution": (
        f"c = Conv<pads=[1,1,1,1]>(x, v)\ns = Add(x, c)\np = Relu(s)\n{PAIR}",
        "Relu 'p': prologue; got Conv 'c' before it, which fuses it, expected a tensor that stays as it is",
        {"v": (16, 16, 3, 3)},
    ),
    # behind it
    "result read elsewhere": (
        f"{TAIL}\ny = Relu(q)\nz = Sigmoid(q)",
        "ConvAvgPool 'q': result 'q' has 2 readers; got other readers, expected only Relu",
        {"outputs": "float[a,b,c,d] y, float[a,b,e,f] z"},
    ),
    "result is an output": (
        f"{TAIL}\ny = Relu(q)",
        "ConvAvgPool 'q': result 'q' is a graph output; got other readers, expected only Relu",
        {"outputs": "float[a,b,c,d] y, float[a,b,e,f] q"},
    ),
    "result captured by a branch": (
        f"{TAIL}\ny = Relu(q)\nz = If(flag) <"
        "then_branch = t () => (float[1,32,6,6] i) { i = Sigmoid(q) }, "
        "else_branch = e () => (float[1,32,6,6] j) { j = Tanh(q) }>",
        "ConvAvgPool 'q': result 'q' is read by a subgraph; got other readers, expected only Relu",
        {"inputs": "float[1,16,12,12] x, bool flag", "outputs": "float[a,b,c,d] y, float[a,b,e,f] z"},
    ),
    "added to itself": (
        f"{TAIL}\ny = Add(q, q)",
        "ConvAvgPool 'q': result 'q' has 2 readers; got other readers, expected only Add",
    ),
    "residual by way of itself": (
        f"{TAIL}\nt = Elu(q)\ny = Add(q, t)",
        "ConvAvgPool 'q': result 'q' has 2 readers; got other readers, expected only Add",
    ),
    "residual that broadcasts over space": (
        f"{TAIL}\ny = Add(q, r)",
        "Add 'y': shape of the residual; got [1, 32, 1, 6], expected provably the result's, [1, 32, 6, 6]",
        {"inputs": "float[1,16,12,12] x, float[1,32,1,6] r"},
    ),
    "residual per channel": (
        f"{TAIL}\ny = Add(q, r)",
        "Add 'y': shape of the residual; got [1, 32, 1, 1], expected provably the result's, [1, 32, 6, 6]",
        {"inputs": "float[1,16,12,12] x, float[1,32,1,1] r"},
    ),
    "residual that widens the batch": (
        f"{TAIL}\ny = Add(q, r)",
        "Add 'y': shape of the residual; got [4, 32, 6, 6], expected provably the result's, [1, 32, 6, 6]",
        {"inputs": "float[1,16,12,12] x, float[4,32,6,6] r"},
    ),
    "residual of lower rank": (
        f"{TAIL}\ny = Add(q, r)",
        "Add 'y': shape of the residual; got [32, 6, 6], expected provably the result's, [1, 32, 6, 6]",
        {"inputs": "float[1,16,12,12] x, float[32,6,6] r"},
    ),
    "residual of open size": (
        f"{TAIL}\ny = Add(q, r)",
        "Add 'y': shape of the residual; got ['M', 32, 6, 6], expected provably the result's, ['N', 32, 6, 6]",
        {"inputs": "float[N,16,12,12] x, float[M,32,6,6] r"},
    ),
    "a sum of three": (
        f"{TAIL}\ny = Sum(q, r, s)",
        "Sum 'y': operands; got 3, expected 2",
        {"inputs": RESIDUAL + ", float[1,32,6,6] s"},
    ),
    "a difference": (
        f"{TAIL}\ny = Sub(q, r)",
        "Sub 'y': constant operands; got computed ones, expected constants per channel",
        {"inputs": RESIDUAL},
    ),
    "a product of maps": (
        f"{TAIL}\ny = Mul(q, r)",
        "Mul 'y': operands; got two that vary over space, expected one that does not",
        {"inputs": RESIDUAL},
    ),
    "a computed factor": (
        f"{TAIL}\ny = Mul(q, r)",
        "Mul 'y': constant operands; got computed ones, expected constants per channel",
        {"inputs": "float[1,16,12,12] x, float[1,32,1,1] r"},
    ),
    "computed weights": (
        f"{TAIL.replace('w)', 'v)')}\ny = Mul(q, s)",
        "ConvAvgPool 'q': weights; got computed, or an input that a caller may override, expected constants",
        {"s": np.float32(2), "inputs": "float[1,16,12,12] x, float[32,16,3,3] v"},
    ),
    "weights beyond the type": (
        f"{TAIL}\ny = Mul(q, s)",
        "Mul 'y': constants folded into weights; got numbers too large or small, expected ones that the type has",
        {"w": np.full((32, 16, 3, 3), 1e30, np.float32), "s": np.float32(1e30)},
    ),
    "scale beyond the type": (
        f"n = Mul(x, s)\np = Mul(n, s)\n{PAIR}",
        "Mul 'p': scale and shift; got numbers too large or small, expected ones that the type has",
        {"s": np.float32(1e30)},
    ),
    "scale too small": (
        f"n = Mul(x, s)\np = Mul(n, s)\n{PAIR}",
        "Mul 'p': scale and shift; got numbers too large or small, expected ones that the type has",
        {"w": HALF, "s": np.float16(1e-4), "inputs": "float16[1,16,12,12] x", "outputs": "float16[a,b,c,d] y"},
    ),
    "weights too small": (
        f"{TAIL}\ny = Mul(q, s)",
        "Mul 'y': constants folded into weights; got numbers too large or small, expected ones that the type has",
        {"w": HALF / 64, "s": np.float16(1e-4), "inputs": "float16[1,16,12,12] x", "outputs": "float16[a,b,c,d] y"},
    ),
    "slope beyond float16": (
        f"p = LeakyRelu<alpha=-1e5>(x)\n{PAIR}",
        "LeakyRelu 'p': slope; got -100000, expected a number of float16",
    ),
    "widened behind": (
        "h = Conv<pads=[6,6,6,6]>(x, v)\n" + f"q = {POOL}(h)\ny = Mul(q, k)",
        "Mul 'y': channels; got constants that widen them, expected 1 or 1",
        {"v": (1, 16, 13, 13), "k": (8, 1, 1)},
    ),
    "a factor behind a residual": (
        f"{TAIL}\nn = Add(q, r)\ny = Mul(n, s)",
        "Mul 'y': map behind a residual; got one that its convolution cannot fold, expected a convolution with constant "
        "weights that nothing else reads",
        {"s": np.float32(2), "inputs": RESIDUAL},
    ),
    "a factor behind a residual that is read elsewhere": (
        f"{TAIL}\nr = Conv<strides=[2,2]>(x, v)\nn = Add(q, r)\ny = Mul(n, s)\nz = Tanh(r)",
        "Mul 'y': map behind a residual; got one that its convolution cannot fold, expected a convolution with constant "
        "weights that nothing else reads",
        {"v": (32, 16, 1, 1), "s": np.float32(2), "outputs": "float[a,b,c,d] y, float[a,b,e,f] z"},
    ),
    "a factor behind a residual of a fused variant": (
        f"{TAIL}\n{SKIP}\nt = Relu(r)\nn = Add(q, t)\ny = Mul(n, s)",
        "Mul 'y': map behind a residual; got one that its convolution cannot fold, expected a convolution with constant "
        "weights that nothing else reads",
        {"v": (32, 16, 1, 1), "s": np.float32(2)},
    ),
    "a second residual": (
        f"{TAIL}\nn = Add(q, r)\ny = Add(s, n)",
        "Add 'y': residual; got a second one, expected one",
        {"inputs": RESIDUAL + ", float[1,32,6,6] s"},
    ),
}


ADDED = {"a factor behind a residual of a fused variant": {"ConvAvgPoolRelu", "ConvAvgPoolAdd"}}
"""Operators left where they are more than the residual before the one refused."""


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_with_a_reason(name):
    body, expected, given = (*REFUSALS[name], {})[:3]
    model = graph_of(body, given)
    result = optimize(model, check=0)
    assert expected in [reason for site in result.report.sites for reason in site.beside]
    onnx.checker.check_model(result.model, full_check=True)
    kinds = {node.op_type for node in operator_nodes(result.model)}
    assert kinds == ADDED.get(name, {"ConvAvgPoolAdd"} if "n = Add" in body else {"ConvAvgPool"})
    if "beyond" not in name and "negative" not in name and "training" not in name:
        assert convpool.verify(model, result.model).passed


def test_parameters_that_do_not_fit_the_channels_are_refused():
    result = optimize(graph(f"p = BatchNormalization(x, f, f, f, f)\n{PAIR}", {"f": np.ones(5, np.float32)}), check=0)
    assert [node.op_type for node in operator_nodes(result.model)] == ["ConvAvgPool"]
    assert result.report.sites[0].beside == ("BatchNormalization 'p': parameters; got {5}, expected 16 of each",)


STOPS = {
    "another activation": (f"p = Tanh(x)\n{PAIR}", "ConvAvgPool"),
    "a second activation": (f"n = Relu(x)\np = LeakyRelu(n)\n{PAIR}", "LeakyReluConvAvgPool"),
    "a map between activation and convolution": (f"n = Relu(x)\np = Mul(n, s)\n{PAIR}", "AffineConvAvgPool"),
    "an activation behind an activation": (f"{TAIL}\nn = Relu(q)\ny = LeakyRelu(n)", "ConvAvgPoolRelu"),
    "an Add behind an activation": (f"{TAIL}\nn = Relu(q)\ny = Add(n, r)", "ConvAvgPoolRelu"),
    "an Identity alone": (f"p = Identity(x)\n{PAIR.replace('y =', 'q =')}\ny = Identity(q)", "ConvAvgPool"),
}


@pytest.mark.parametrize(("body", "kind"), STOPS.values(), ids=STOPS)
def test_stops_where_the_operator_s_order_ends(body, kind):
    model = rewrite(graph(body, {"s": np.float32(-2)}, inputs=RESIDUAL), 1, "convavgpool")
    assert operator_nodes(model)[0].op_type == kind and len(model.graph.node) > 1
