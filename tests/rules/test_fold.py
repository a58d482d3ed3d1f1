# SPDX-License-Identifier: Apache-2.0
"""The results of `--fold`, and Concats of channels that begin as an earlier one does."""

import numpy as np
import onnx
import pytest

import convpool
from convpool.cli.group import run
from convpool.cli.optimize import command
from models import generators
from tests.support import sessions
from tests.support.models import graph, operators, random_feeds
from tests.support.rewriting import POOL, assert_close, rewrite

FOLDED = {
    "arithmetic": ("a = Mul(p, q)\nb = Add(a, p)\ny = Add(x, b)", {"p": (1, 16, 1, 1), "q": (1, 16, 1, 1)}, {"Add": 1}),
    "any operator": ("a = Sin(p)\nb = Erf(a)\nc = Softmax<axis=1>(b)\ny = Add(x, c)", {"p": (1, 16, 1, 1)}, {"Add": 1}),
    "a random one": ("a = RandomNormalLike(p)\nb = Mul(a, zero)\ny = Add(x, b)", {"p": (1, 16, 1, 1)}, None),
    "a quantized weight": (
        "a = DequantizeLinear(p, s, z)\ny = Conv(x, a)",
        {"p": np.ones((4, 16, 3, 3), np.int8), "s": np.float32(0.1), "z": np.int8(0)},
        None,
    ),
    "a weight in half precision": ("a = Cast<to=1>(p)\ny = Conv(x, a)", {"p": np.ones((512, 16, 9, 9), np.float16)}, None),
    "a small one": ("a = Cast<to=1>(p)\ny = Conv(x, a)", {"p": np.ones((4, 16, 3, 3), np.float16)}, {"Conv": 1}),
    "a huge constant": ("a = Expand(zero, huge)\nb = ReduceSum(a)\ny = Add(x, b)", {"huge": [2**20, 2**10]}, None),
    "a large constant": ("a = Expand(zero, large)\nb = ReduceSum(a)\ny = Add(x, b)", {"large": [2**9, 2**10]}, None),
    "one of a tensor as large": ("a = Transpose(p)\ny = MatMul(x, a)", {"p": (3000, 12)}, {"MatMul": 1}),
    "the shape of an input": ("s = Shape(x)\nc = Cast<to=1>(s)\nr = ReduceProd(c)\ny = Div(x, r)", {}, {"Div": 1}),
    "several results": ("a, b = Split<axis=1>(p)\nc = Mul(x, a)\ny = Add(c, b)", {"p": (1, 32, 1, 1)}, {"Add": 1, "Mul": 1}),
    "one unread": ("a, b = Split<axis=1>(p)\ny = Mul(x, a)", {"p": (1, 32, 1, 1)}, {"Mul": 1}),
    "an Identity": ("a = Identity(x)\nb = Identity(a)\ny = Relu(b)", {}, {"Relu": 1}),
    "an Identity read twice": ("a = Identity(x)\nb = Relu(a)\nc = Neg(a)\ny = Add(b, c)", {}, {"Add": 1, "Neg": 1, "Relu": 1}),
    "many of them": ("a = Identity(x)\nb = Identity(x)\nc = Identity(b)\ny = Sum(a, b, c)", {}, {"Sum": 1}),
    "an Identity of the output": ("a = Relu(x)\ny = Identity(a)", {}, None),
    "an Identity of a constant": ("a = Identity(p)\ny = Add(x, a)", {"p": (1, 16, 1, 1)}, {"Add": 1}),
    "a Dropout": ("a = Dropout(x)\ny = Relu(a)", {}, {"Relu": 1}),
    "a Dropout with its mask": ("a, m = Dropout(x)\nb = Cast<to=1>(m)\ny = Add(a, b)", {}, None),
    "a Dropout in training": ("a = Dropout(x, r, yes)\ny = Mul(a, zero)", {"r": np.float32(0.5), "yes": np.bool_(True)}, None),
    "no number": ("a = Div(p, p)\ny = Add(x, a)", {"p": np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1)}, {"Add": 1}),
    "a Constant node": ("k = Constant<value_floats=[2.0]>()\na = Neg(k)\ny = Mul(x, a)", {}, {"Mul": 1}),
    "a constant output": ("a = Neg(p)\ny = Abs(a)", {"p": (1, 16, 2, 2)}, {"Constant": 1}),
    "one that a branch reads": (
        "a = Neg(p)\nc = Greater(a, a)\nd = Cast<to=6>(c)\ne = ReduceSum<keepdims=0>(d)\nflag = Cast<to=9>(e)\n"
        "y = If(flag) <then_branch = t () => (float[1,16,12,12] f) { f = Add(x, a) }, "
        "else_branch = u () => (float[1,16,12,12] g) { h = Abs(a) g = Sub(x, h) }>",
        {"p": (1, 16, 1, 1)},
        {"If": 1},
    ),
    "in a function": ("y = local.twice(x)", {}, None),
}
TWICE = """<opset_import: ["": 17], domain: "local">
twice (a) => (b) { k = Constant<value_floats=[2.0]>() m = Neg(k) i = Identity(a) b = Mul(i, m) }"""


@pytest.mark.parametrize("ir", [3, 8])
@pytest.mark.parametrize("name", FOLDED)
def test_fold_stores_what_is_constant(name, ir, recwarn):
    body, constants, wanted = FOLDED[name]
    if "local" in body and ir < 8:
        pytest.skip("no functions before IR 8")
    constants = {"zero": np.float32(0), **constants}
    model = graph(body, constants, ir=ir, functions=TWICE if "local" in body else "")
    before, result = model.SerializeToString(deterministic=True), convpool.optimize(model, check=0, fold=True)
    kinds = operators(result.model.graph)
    kinds = kinds if ir > 3 or wanted == {"Constant": 1} else {kind: n for kind, n in kinds.items() if kind != "Constant"}
    assert kinds == (operators(model.graph) if wanted is None else wanted)
    assert result.changed == (wanted is not None) and convpool.optimize(model, check=0).changed is False
    assert model.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(result.model, full_check="one that" not in name)
    assert not convpool.optimize(result.model, check=0, fold=True).changed and not recwarn.list
    if wanted is not None:
        assert_close(model, result.model)


def test_integers_of_old_models_end():
    """Their Constants have floating point only, so that a Cast of one stays."""
    result = convpool.optimize(graph("s = Shape(x)\ny = Reshape(x, s)", ir=3, opset=8), check=0, fold=True)
    assert operators(result.model.graph) == {"Cast": 1, "Constant": 1, "Reshape": 1}
    assert not convpool.optimize(result.model, check=0, fold=True).changed


IN_A_BRANCH = """y = If(yes) <
then_branch = t () => (float[a,b,c,d] f) { g = Add(e, zeros) d = Slice(x, zeros, g, axes) f = Add(m, d) },
else_branch = u () => (float[a,b,c,d] f2) { f2 = Relu(m) }>"""


@pytest.mark.parametrize("rest", ["d = Slice(x, zeros, e, axes)\ny = Add(m, d)", IN_A_BRANCH], ids=["beside", "in a branch"])
def test_sizes_that_onnx_counts_otherwise_than_runtimes_stay_computed(rest):
    """The last window of 6, of 7 by onnx's count before opset 22, starts behind the map."""
    constants = {"two": [2], "four": [4], "zeros": [0, 0], "axes": [2, 3], "k": np.float32(2), "yes": np.bool_(True)}
    pool = "AveragePool<kernel_shape=[2,2], strides=[2,2], pads=[1,1,1,1], ceil_mode=1>"
    body = f"p = {pool}(x)\nn = Neg(k)\nm = Mul(p, n)\ns = Shape(m)\ne = Slice(s, two, four)\n{rest}"
    model = graph(body, constants, inputs="float[1,16,11,11] x")
    left = convpool.optimize(model, check=1, fold=True).model
    assert list(left.graph.node) == [node for node in model.graph.node if node.op_type != "Neg"]


def test_folding_is_no_rewrite_of_a_pair():
    """Concats are joined in a model with a pair alone."""
    body = "a = Identity(x)\np = Concat<axis=1>(a, a)\nq = Concat<axis=1>(a, a, x)\nr = Relu(p)\ny = Concat<axis=1>(r, q)"
    result = convpool.optimize(graph(body), check=0, fold=True)
    assert result.changed and result.report.summary.concats == 0
    assert result.report.summary.operators_after == {"Concat": 3, "Relu": 1}


def test_what_a_rewrite_makes_is_stored_too():
    body = f"""y = If(flag) <then_branch = t () => (float[k,l,m,n] f) {{ r = Resize<mode="linear">(x, , , sizes) c = Conv(r, v)
    d = Conv<pads=[1,1,1,1]>(c, w) s = Shape(d) e = Reshape(d, s) f = {POOL}(e) }},
    else_branch = u () => (float[k,l,m,n] g) {{ g = Identity(x) }}>"""
    model = graph(body, {"v": (16, 32, 1, 1), "sizes": [3, 32, 6, 12]}, inputs="float[3,32,3,6] x, bool flag")
    once = convpool.optimize(model, target="cpu", fold=True)
    assert once.report.summary.rewritten == 2 and not convpool.optimize(once.model, target="cpu", fold=True).changed


def test_names_that_a_caller_may_replace_strings_low_bits_and_rows_of_a_matrix_stay():
    words = {"t": np.array(["a"], object), "yes": np.bool_(True)}
    low = "s = Shape(x)\nc = Concat<axis=0>(s, p)\nd = Cast<to=6>(c)\ne = Cast<to=7>(d)\nf = Gather(e, q)\ny = Expand(x, f)"
    row = "s = Shape(x)\nc = Unsqueeze(s, q)\nf = Gather(c, q)\nd = Reshape(f, p)\ny = Expand(x, d)"
    for model in (
        graph(row, {"p": [-1], "q": [0]}, inputs="float[1,n] x"),
        graph("a = Neg(p)\ny = Add(x, a)", {"p": (1, 16, 1, 1)}, inputs="float[1,16,12,12] x, float[1,16,1,1] p"),
        graph("a = Where(yes, t, t)\ny = Concat<axis=0>(a, t)", words, inputs="float[1] x", outputs="string[n] y"),
        graph(low, {"p": [2**32 + 3], "q": [1]}, inputs="float[n] x"),
    ):
        assert not convpool.optimize(model, check=0, fold=True).changed


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
    body = f"""{PAIR}p = Concat<axis=1>(t, a)
    r = If(flag) <
      then_branch = yes () => (float[i,j,k,l] d) {{ d = Concat<axis=1>(t, a, b) }},
      else_branch = no () => (float[i,j,k,l] e) {{ f = Concat<axis=1>(t, c) e = Concat<axis=1>(t, c, b) }}
    >"""
    model = rewrite(graph(body, inputs="float[1,16,12,12] x, bool flag", outputs="float[i,j,k,l] p, float[m,n,k,l] r"), 1)
    branches = {item.name: concats(item.g) for node in model.graph.node if node.op_type == "If" for item in node.attribute}
    assert branches == {"then_branch": {"d": ["t", "a", "b"]}, "else_branch": {"f": ["t", "c"], "e": ["f", "b"]}}


def test_an_axis_that_a_function_is_given():
    text = '<opset_import: ["": 17], domain: "local">\njoin <axis> (t, a, b) => (q)\n'
    text += "{ p = Concat<axis: int = @axis>(t, a)\nq = Concat<axis: int = @axis>(t, a, b) }"
    model = graph(PAIR + "q = local.join<axis = 1>(t, a, b)", functions=text, outputs="float[i,j,k,l] q")
    assert concats(rewrite(model, 1).functions[0]) == {"p": ["t", "a"], "q": ["t", "a", "b"]}


def test_every_layer_of_densenet121():
    result = convpool.optimize(generators.generate("densenet121", batch=1, size=64))
    assert result.report.verification.passed and result.report.summary.concats == 58 - 4
    assert {len(names) for names in concats(result.model.graph).values()} == {2}


def test_command_line(tmp_path, capsys):
    onnx.save(graph(PAIR + BLOCK, outputs=OUTPUTS), tmp_path / "in.onnx")
    assert run(command, "convpool-optimize", [str(tmp_path / "in.onnx")]) == 0
    assert "concats   2 reuse the result of an earlier one" in capsys.readouterr().out
