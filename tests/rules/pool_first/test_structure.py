# SPDX-License-Identifier: Apache-2.0
"""Where pairs stand and what surrounds them: bodies, functions, captures, shared and overridable weights, metadata."""

import numpy as np
import onnx
import pytest
from onnx import helper

import convpool
from convpool.check.session import make_session
from convpool.ir import schema
from convpool.ir.model import LoadedModel
from tests.support import sessions
from tests.support.cuda_target import NARROW, TAIL
from tests.support.models import graph, operators, random_feeds, weights
from tests.support.rewriting import IF_BODY, IF_INPUTS, PAIR, POOL, RTOL, rewrite

LOWERINGS = ("convavgpool", "direct", "fused", "auto")


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_both_branches_of_an_if_with_captured_weights(lowering):
    result = rewrite(graph(IF_BODY, {"v": (32, 16, 3, 3)}, inputs=IF_INPUTS), 2, lowering)
    branches = [attribute.g for attribute in result.graph.node[0].attribute]
    expected = {"convavgpool": {"ConvAvgPool": 1}, "direct": {"AveragePool": 1, "Conv": 1}}
    expected |= {"fused": {"Conv": 1}, "auto": expected["direct"]}
    assert [operators(branch) for branch in branches] == [expected[lowering]] * 2
    assert [branch.output[0].name for branch in branches] == ["a", "b"]
    # Folded weights stand in the branch that reads them, and the outer ones that nothing reads are gone.
    outer = {tensor.name for tensor in result.graph.initializer}
    assert outer == ({"w", "v"} if lowering in ("direct", "auto") else set())


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_pairs_outside_and_inside_a_branch_are_reported_once(lowering):
    inner = f"h = Conv<pads=[1,1,1,1]>(r, w) q = {POOL}(h) a = Relu(q)"
    text = f"""g = Conv<pads=[1,1,1,1]>(x, w)
p = {POOL}(g)
r = Relu(p)
y = If(flag) <then_branch = yes () => (float[1,16,3,3] a) {{ {inner} }},
  else_branch = no () => (float[1,16,3,3] b) {{ b = {POOL}(r) }}>"""
    result = convpool.optimize(graph(text, {"w": (16, 16, 3, 3)}, inputs=IF_INPUTS), lowering=lowering)
    rewritten = [site for site in result.report.sites if site.status == "rewritten"]
    assert [(site.conv, site.scope) for site in rewritten] == [("g", ""), ("h", "y.then_branch")]
    taken_in = [("Relu 'r'",), ("Relu 'a'",)] if lowering == "convavgpool" else [(), ()]
    assert [site.absorbed for site in rewritten] == taken_in


def test_branches_with_equal_names_and_own_weights():
    text = IF_BODY.replace("b)", "a)").replace("k =", "h =").replace("(k)", "(h)").replace("b =", "a =")
    model = graph(text.replace("(x, v)", "(x, w)"), inputs=IF_INPUTS)
    for number, attribute in enumerate(model.graph.node[0].attribute):
        attribute.g.node[0].input[1] = "own"
        weights = np.full((32, 16, 3, 3), number + 1, np.float32)
        attribute.g.initializer.append(onnx.numpy_helper.from_array(weights, "own"))
    del model.graph.initializer[:]
    result = rewrite(model, 2, "convavgpool")
    sums = [onnx.numpy_helper.to_array(a.g.initializer[0]).mean() for a in result.graph.node[0].attribute]
    assert sums == [1.0, 2.0]


def test_pair_read_in_a_branch_only_by_its_pooling_stays():
    text = f"h = Conv<pads=[1,1,1,1]>(x, w)\ny = If(flag) <then_branch = a () => (float[1,32,6,6] p) {{ p = {POOL}(h) }}, "
    model = graph(text + "else_branch = b () => (float[1,32,12,12] q) { q = Relu(h) }>", inputs=IF_INPUTS)
    assert convpool.optimize(model, check=0).model.SerializeToString() == model.SerializeToString()


def test_pairs_in_a_body_within_a_body_become_standard_operators():
    """onnxruntime 1.31 mixes up tensors of functions inlined in both, where a constant decides an If."""
    inner = f"""y2 = If(flag) <
      then_branch = yes2 () => (float[1,16,6,6] a2) {{ n = Neg(r) h2 = Conv<pads=[1,1,1,1]>(n, w2) a2 = {POOL}(h2) }},
      else_branch = no2 () => (float[1,16,6,6] b2) {{ b2 = {POOL}(r) }}>"""
    text = f"""r = Relu(x)
y = If(k) <then_branch = yes () => (float[1,16,3,3] a) {{ {inner} h = Conv<pads=[1,1,1,1]>(y2, w) a = {POOL}(h) }},
  else_branch = no () => (float[1,16,3,3] b) {{ b = AveragePool<kernel_shape=[4,4], strides=[4,4]>(r) }}>"""
    model = graph(text, {"w": (16, 16, 3, 3), "w2": (16, 16, 3, 3), "k": np.array(True)}, inputs=IF_INPUTS)
    result = rewrite(model, 2, "convavgpool")
    outer = result.graph.node[-1].attribute[0].g
    assert operators(outer) == {"ConvAvgPool": 1, "If": 1}
    body = next(node for node in outer.node if node.op_type == "If").attribute[0].g
    assert operators(body) == {"AveragePool": 1, "Conv": 1, "Neg": 1}
    runners = [make_session(LoadedModel(m, None, 0), optimize=True) for m in (model, result)]
    (one,), (other,) = (runner.run(None, random_feeds(model)) for runner in runners)
    np.testing.assert_allclose(other, one, rtol=0, atol=1e-5 * np.abs(one).max())


def test_scan_body():
    body = (
        "last, y = Scan(start, xs) <num_scan_inputs = 1, body = step (float[1] s, float[1,16,12,12] item) => "
        f"(float[1] t, float[1,32,6,6] o) {{ t = Identity(s) h = Conv<pads=[1,1,1,1]>(item, w) o = {POOL}(h) }}>"
    )
    model = graph(body, inputs="float[1] start, float[3,1,16,12,12] xs", outputs="float[1] last, float[3,1,32,6,6] y")
    result = rewrite(model, 1, "convavgpool")
    body = next(attribute.g for attribute in result.graph.node[0].attribute if attribute.HasField("g"))
    assert operators(body) == {"ConvAvgPool": 1, "Identity": 1}
    assert "ai.convpool" in {entry.domain for entry in result.opset_import}


FUNCTION = f"""
<domain: "local", opset_import: ["" : OPSET]>
pair (x, w) => (y) {{ h = Conv<pads=[1,1,1,1]>(x, w) y = {POOL}(h) }}
"""
CALLS = "a = local.pair(x, w)\nb = local.pair(x, v)\ny = Add(a, b)"
LOCAL = ', "local": 1'


def test_function_called_twice():
    model = graph(CALLS, {"v": (32, 16, 3, 3)}, functions=FUNCTION.replace("OPSET", "17"), imports=LOCAL)
    result = rewrite(model, 1)
    assert operators(result.functions[0]) == {"AveragePool": 1, "Conv": 1}
    assert operators(result.graph) == {"Add": 1, "pair": 2}


def test_function_of_another_opset_takes_standard_operators():
    model = graph(CALLS, {"v": (32, 16, 3, 3)}, functions=FUNCTION.replace("OPSET", "16"), imports=LOCAL)
    result = rewrite(model, 1, "convavgpool")
    assert operators(result.functions[0]) == {"AveragePool": 1, "Conv": 1}
    assert all(function.domain != schema.DOMAIN for function in result.functions)


def test_function_of_the_same_opset_takes_the_operator():
    model = graph(CALLS, {"v": (32, 16, 3, 3)}, functions=FUNCTION.replace("OPSET", "17"), imports=LOCAL)
    result = rewrite(model, 1, "convavgpool")
    assert [function.name for function in result.functions] == ["pair", "ConvAvgPool"]
    assert result.functions[0].node[-1].op_type == "ConvAvgPool"
    assert {entry.domain: entry.version for entry in result.functions[0].opset_import}["ai.convpool"] == 1


def test_nested_functions():
    outer = '\n<domain: "local", opset_import: ["" : 17, "local" : 1]>\nouter (x, w) => (y) { y = local.pair(x, w) }\n'
    rewrite(graph("y = local.outer(x, w)", functions=outer + FUNCTION.replace("OPSET", "17"), imports=LOCAL), 1)


@pytest.mark.parametrize(
    "reference", ["Conv<pads=[1,1,1,1], strides : ints = @s>", "AveragePool<kernel_shape : ints = @s, strides=[2,2]>"]
)
def test_an_attribute_of_the_function_is_known_once_the_call_is_inlined(reference):
    op_type = reference.partition("<")[0]
    text = FUNCTION.replace("OPSET", "17").replace("pair (", "pair <s>(")
    text = text.replace("Conv<pads=[1,1,1,1]>" if op_type == "Conv" else POOL, reference)
    result = convpool.optimize(graph("y = local.pair<s = [2,2]>(x, w)", functions=text, imports=LOCAL), check=2)
    assert [site.status for site in result.report.sites] == ["rewritten"] and result.report.verification.passed


def test_zeros_by_an_attribute_of_the_function_are_unknown():
    text = """
<domain: "local", opset_import: ["" : 17]>
mean <v>(x, w, f, e, a, s, q) => (y) {
  h = Conv<pads=[1,1,1,1]>(x, w)
  s1 = Slice(h, f, e, a, s)
  n = Shape(s1)
  z = ConstantOfShape<value : tensor = @v>(n)
  t = Sum(z, s1, s1)
  y = Mul(t, q)
}
"""
    constants = {"f": [0, 0], "e": [99, 99], "a": [2, 3], "s": [2, 2], "q": np.float32(0.5)}
    call = "y = local.mean<v = float[1] {0.0}>(x, w, f, e, a, s, q)"
    model = graph(call, constants, functions=text, imports=LOCAL)
    assert convpool.optimize(model, check=0).model.SerializeToString() == model.SerializeToString()


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_shared_weights_are_never_edited(lowering):
    body = f"{PAIR.replace('y =', 'p =')}\nu = Conv<pads=[1,1,1,1]>(x, w)\nq = {POOL}(u)\nz = Conv(x, w)"
    model = graph(f"{body}\ny = Add(p, q)", outputs="float[a,b,c,d] y, float[a,b,e,f] z")
    kept = {tensor.name: tensor for tensor in rewrite(model, 2, lowering).graph.initializer}
    assert kept["w"] == model.graph.initializer[0]
    assert len(kept) == {"convavgpool": 3, "fused": 2}.get(lowering, 1)  # the weights once, and one bias of zeros


def test_shared_weights_scaled_differently():
    body = "\n".join(f"h{i} = Conv<pads=[1,1,1,1]>(x, w)\nm{i} = Mul(h{i}, k{i})\np{i} = {POOL}(m{i})" for i in (1, 2))
    result = rewrite(graph(f"{body}\ny = Add(p1, p2)", {"k1": np.float32(2), "k2": np.float32(-3)}), 2)
    assert operators(result.graph) == {"Add": 1, "AveragePool": 2, "Conv": 2}
    assert len(result.graph.initializer) == 2  # w itself is read by nothing any more


def overridable(ir: int) -> onnx.ModelProto:
    """A pair whose weights have a default and are an input too, scaled afterwards."""
    model = graph(f"c = Conv<pads=[1,1,1,1]>(x, w)\nh = Mul(c, k)\ny = {POOL}(h)", {"k": np.float32(3)}, ir=ir)
    if ir >= 4:
        model.graph.input.append(helper.make_tensor_value_info("w", 1, (32, 16, 3, 3)))
    return model


@pytest.mark.parametrize("lowering", ["convavgpool", "direct"])
def test_overridable_weights_keep_their_effect(lowering):
    model = overridable(8)
    result = rewrite(model, 1, lowering)
    assert [value.name for value in result.graph.input] == ["x", "w"]
    names = {"convavgpool": {"ConvAvgPool": 1, "Transpose": 1}, "direct": {"AveragePool": 1, "Conv": 1}}[lowering]
    assert operators(result.graph) == {**names, "Mul": 1}
    feeds = {**random_feeds(model), "w": np.ones((32, 16, 3, 3), np.float32)}
    expected, got = sessions.run(model, feeds)[0], sessions.run(result, feeds)[0]
    np.testing.assert_allclose(got, expected, rtol=0, atol=RTOL * np.abs(expected).max())


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_ir_3_initializers_are_constants(lowering):
    result = rewrite(overridable(3), 1, lowering)
    assert "Mul" not in operators(result.graph)
    if lowering == "convavgpool":
        assert result.ir_version == schema.MIN_IR_VERSION
        assert [value.name for value in result.graph.input] == ["x"]
    else:
        assert result.ir_version == 3
        assert {t.name for t in result.graph.initializer} <= {v.name for v in result.graph.input}


def test_a_function_called_in_a_body_within_a_body_becomes_standard_operators():
    inner = f"""y2 = If(flag) <then_branch = yes2 () => (float[1,16,6,6] a2) {{ n = Neg(r) a2 = local.pair(n, w2) }},
      else_branch = no2 () => (float[1,16,6,6] b2) {{ b2 = {POOL}(r) }}>"""
    text = f"""r = Relu(x)
y = If(k) <then_branch = yes () => (float[1,16,3,3] a) {{ {inner} h = Conv<pads=[1,1,1,1]>(y2, w) a = {POOL}(h) }},
  else_branch = no () => (float[1,16,3,3] b) {{ b = AveragePool<kernel_shape=[4,4], strides=[4,4]>(r) }}>"""
    constants = {"w": (16, 16, 3, 3), "w2": (16, 16, 3, 3), "k": np.array(True)}
    model = graph(text, constants, inputs=IF_INPUTS, functions=FUNCTION.replace("OPSET", "17"), imports=LOCAL)
    result = rewrite(model, 2, "convavgpool")
    body = next(function for function in result.functions if function.name == "pair").node
    assert [node.op_type for node in body] == ["AveragePool", "Conv"]


def test_a_function_of_another_opset_gets_no_more_nodes():
    """It has one of an earlier run; the operator's function has the main graph's opset, which is newer now."""
    inner = f"""{TAIL.replace("(x,", "(a,")} q = Softsign(p) m = {POOL}(q) n = Softsign(m) t = Conv<pads=[1,1,1,1]>(n, k)
    z = {POOL}(t) f = Relu(z) c = Conv<pads=[1,1,1,1]>(f, w) e = Softsign(c) o = GlobalMaxPool(e) r = Flatten(o)
    s = GlobalAveragePool(f) d = Flatten(s) u = MatMul(d, g) v = Concat<axis=1>(u, r)"""
    model = graph(
        "v = local.net(x)\n" + PAIR.replace("h =", "main =").replace("(h)", "(main)"),
        NARROW,
        inputs="float[4,16,64,64] x",
        outputs="float[i,j] v, float[a,b,c,d] y",
        functions=f"""<opset_import: ["": 17], domain: "local">
        net (a) => (v) {{ {inner} }}""",
        imports=', "local": 1',
    )
    for name, array in (("g", weights((16, 4))), ("k", NARROW["k"]), ("w", NARROW["w"])):
        constant = onnx.helper.make_node("Constant", [], [name], value=onnx.numpy_helper.from_array(array))
        model.functions[0].node.insert(0, constant)
    written = convpool.optimize(model, check=0, exclude="main").model
    for opset, kept in ((17, False), (18, True)):
        next(entry for entry in written.opset_import if not entry.domain).version = opset
        result = convpool.optimize(written, target="cuda", check=0)
        found = operators(next(item for item in result.model.functions if item.name == "net"))
        assert ("MatMul" in found, "Conv" in found, "AveragePool" in found) == (kept, kept, kept)
        operator_nodes = sum(count for name, count in found.items() if "ConvAvgPool" in name)
        assert operator_nodes == (2 if kept else 5) and result.report.summary.rewritten > 0


def test_names_that_a_function_has_are_not_taken_again():
    functions = f"""<opset_import: ["": 17], domain: "local">
    net (a, w) => (b) {{ b_pooled_input = Neg(a) c = Conv<pads=[1,1,1,1]>(b_pooled_input, w) b = {POOL}(c) }}"""
    result = rewrite(graph("y = local.net(x, w)", functions=functions, imports=', "local": 1'), 1)
    names = [name for node in result.functions[0].node for name in node.output]
    assert len(names) == len(set(names)) == 3 and "b_pooled_input" in names
