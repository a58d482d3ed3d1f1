# SPDX-License-Identifier: Apache-2.0
"""Where pairs stand and what surrounds them: bodies, functions, captures, shared weights, metadata, pads, INT8 weights."""

import numpy as np
import onnx
import pytest
from onnx import helper

import convpool
from convpool.check.session import Session
from convpool.ir import schema
from convpool.ir.model import LoadedModel
from tests.support.cuda_target import NARROW, TAIL
from tests.support.models import graph, operators, random_feeds, weights
from tests.support.rewriting import DIRECT, IF_BODY, IF_INPUTS, PAIR, POOL, assert_close, rewrite

LOWERINGS = ("convavgpool", "direct", "fused", "auto")
FUNCTION = f"""
<domain: "local", opset_import: ["" : OPSET]>
pair (x, w) => (y) {{ h = Conv<pads=[1,1,1,1]>(x, w) y = {POOL}(h) }}
"""
CALLS = "a = local.pair(x, w)\nb = local.pair(x, v)\ny = Add(a, b)"
TWO = [0, 0, 2, 2, 0, 0, 2, 2]


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
    assert [onnx.numpy_helper.to_array(a.g.initializer[0]).mean() for a in result.graph.node[0].attribute] == [1.0, 2.0]


def test_pair_read_in_a_branch_only_by_its_pooling_stays():
    text = f"h = Conv<pads=[1,1,1,1]>(x, w)\ny = If(flag) <then_branch = a () => (float[1,32,6,6] p) {{ p = {POOL}(h) }}, "
    model = graph(text + "else_branch = b () => (float[1,32,12,12] q) { q = Relu(h) }>", inputs=IF_INPUTS)
    assert convpool.optimize(model, check=0).model.SerializeToString() == model.SerializeToString()


@pytest.mark.parametrize("called", [False, True])
def test_pairs_in_a_body_within_a_body_become_standard_operators(called):
    """onnxruntime 1.31 mixes up tensors of functions inlined in both, where a constant decides an If."""
    pair = "a2 = local.pair(n, w2)" if called else f"h2 = Conv<pads=[1,1,1,1]>(n, w2) a2 = {POOL}(h2)"
    inner = f"""y2 = If(flag) <then_branch = yes2 () => (float[1,16,6,6] a2) {{ n = Neg(r) {pair} }},
      else_branch = no2 () => (float[1,16,6,6] b2) {{ b2 = {POOL}(r) }}>"""
    text = f"""r = Relu(x)
y = If(k) <then_branch = yes () => (float[1,16,3,3] a) {{ {inner} h = Conv<pads=[1,1,1,1]>(y2, w) a = {POOL}(h) }},
  else_branch = no () => (float[1,16,3,3] b) {{ b = AveragePool<kernel_shape=[4,4], strides=[4,4]>(r) }}>"""
    constants = {"w": (16, 16, 3, 3), "w2": (16, 16, 3, 3), "k": np.array(True)}
    functions = {"functions": FUNCTION.replace("OPSET", "17")} if called else {}
    model = graph(text, constants, inputs=IF_INPUTS, **functions)
    result = rewrite(model, 2, "convavgpool")
    if called:
        body = next(function for function in result.functions if function.name == "pair").node
        assert [node.op_type for node in body] == ["AveragePool", "Conv"]
        return
    outer = result.graph.node[-1].attribute[0].g
    assert operators(outer) == {"ConvAvgPool": 1, "If": 1}
    body = next(node for node in outer.node if node.op_type == "If").attribute[0].g
    assert operators(body) == {"AveragePool": 1, "Conv": 1, "Neg": 1}
    runners = [Session(LoadedModel(m, None, 0), optimize=True) for m in (model, result)]
    (one,), (other,) = (runner.run(None, random_feeds(model)) for runner in runners)
    np.testing.assert_allclose(other, one, rtol=0, atol=1e-5 * np.abs(one).max())


def test_pairs_in_the_body_of_a_sequence_map_become_standard_operators():
    """onnxruntime makes it a Loop in a function, and mixes up functions in that."""
    body = f"(float[1,16,12,12] e) => (float[1,32,6,6] o) {{ h = Conv<pads=[1,1,1,1]>(e, w) o = {POOL}(h) }}"
    text = f"s = SequenceConstruct(x, x)\nt = SequenceMap<body = each {body}>(s)\ny = ConcatFromSequence<axis = 0>(t)"
    assert operators(rewrite(graph(text), 1, "convavgpool").graph.node[1].attribute[0].g) == DIRECT


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


@pytest.mark.parametrize(("opset", "lowering"), [(17, "direct"), (17, "convavgpool"), (16, "convavgpool")])
def test_function_called_twice(opset, lowering):
    """A function of another opset than the model's takes standard operators."""
    result = rewrite(graph(CALLS, {"v": (32, 16, 3, 3)}, functions=FUNCTION.replace("OPSET", str(opset))), 1, lowering)
    assert operators(result.graph)["pair"] == 2
    if (opset, lowering) == (17, "convavgpool"):
        assert [function.name for function in result.functions] == ["pair", "ConvAvgPool"]
        assert result.functions[0].node[-1].op_type == "ConvAvgPool"
        assert {entry.domain: entry.version for entry in result.functions[0].opset_import}["ai.convpool"] == 1
    else:
        assert operators(result.functions[0]) == {"AveragePool": 1, "Conv": 1} and len(result.functions) == 1


@pytest.mark.parametrize(
    "reference", ["Conv<pads=[1,1,1,1], strides : ints = @s>", "AveragePool<kernel_shape : ints = @s, strides=[2,2]>"]
)
def test_an_attribute_of_the_function_is_known_once_the_call_is_inlined(reference):
    op_type = reference.partition("<")[0]
    text = FUNCTION.replace("OPSET", "17").replace("pair (", "pair <s>(")
    text = text.replace("Conv<pads=[1,1,1,1]>" if op_type == "Conv" else POOL, reference)
    result = convpool.optimize(graph("y = local.pair<s = [2,2]>(x, w)", functions=text), check=2)
    assert [site.status for site in result.report.sites] == ["rewritten"] and result.report.verification.passed


def test_zeros_by_an_attribute_of_the_function_are_unknown():
    text = """<domain: "local", opset_import: ["" : 17]> mean <v>(x, w, f, e, a, s, q) => (y) {
h = Conv<pads=[1,1,1,1]>(x, w) s1 = Slice(h, f, e, a, s) n = Shape(s1) z = ConstantOfShape<value : tensor = @v>(n)
t = Sum(z, s1, s1) y = Mul(t, q) }"""
    constants = {"f": [0, 0], "e": [99, 99], "a": [2, 3], "s": [2, 2], "q": np.float32(0.5)}
    model = graph("y = local.mean<v = float[1] {0.0}>(x, w, f, e, a, s, q)", constants, functions=text)
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
    names = DIRECT if lowering == "direct" else {"ConvAvgPool": 1, "Transpose": 1}
    assert operators(result.graph) == {**names, "Mul": 1}
    assert_close(model, result, {**random_feeds(model), "w": np.ones((32, 16, 3, 3), np.float32)})


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


@pytest.mark.parametrize("node", ["Reshape(x, s)", "Resize(x, , , s)", "Slice(x, zeros, s)"])
def test_sizes_that_a_caller_may_replace_are_unknown(node):
    for inputs, pairs in (("float[1,16,12,12] x", 1), ("float[1,16,12,12] x, int64[4] s", 0)):
        body = f"m = {node}\nh = Conv(m, w)\ny = GlobalAveragePool(h)"
        rewrite(graph(body, {"s": [1, 16, 12, 12], "zeros": [0] * 4}, inputs=inputs), pairs)


@pytest.mark.parametrize(("scale", "pairs"), [(2.0, 1), (1.3, 0)])
def test_bodies_may_have_names_in_common(scale, pairs):
    """Onnxruntime holds a body to the sizes that onnx says: of 10 by 1.3 it makes 13, and onnx says 12."""
    branch = "() => (float[a,b,c,d] r) {{ s = {} v = Relu(x) m = Resize(v, , s) h = Conv(m, w) r = GlobalAveragePool(h) }}"
    one, other = map(branch.format, (f"Constant<value_floats=[1.0,1.0,{scale},{scale}]>()", "Identity(given)"))
    inputs = "bool flag, float[4] given, float[1,16,10,10] x"
    model = graph(f"y = If(flag)<then_branch = t {one}, else_branch = e {other}>", inputs=inputs)
    feeds = random_feeds(model) | {"given": np.float32([1, 1, 1.3, 1.3])}
    result = convpool.optimize(model, data=feeds)
    assert result.report.summary.rewritten == pairs
    convpool.verify(model, result.model, data=feeds | {"flag": ~feeds["flag"]})


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
    result = rewrite(graph("y = local.net(x, w)", functions=functions), 1)
    names = [name for node in result.functions[0].node for name in node.output]
    assert len(names) == len(set(names)) == 3 and "b_pooled_input" in names


PADS = {  # Pads and the convolution behind them
    "Pad": ("c = Pad(x, two)\np = Conv(c, w)", True),
    "Pad and padding": ("c = Pad(x, two)\np = Conv<pads=[1,1,1,1]>(c, w)", True),
    "SAME": ('c = Pad(x, two)\np = Conv<auto_pad="SAME_UPPER">(c, w)', True),
    "two and an Identity": ("a = Pad(x, two)\nb = Identity(a)\nc = Pad(b, two)\np = Conv(c, w)", True),
    "of ones": ("c = Pad(x, two, one)\np = Conv(c, w)", False),
    "that crops": ("c = Pad(x, crop)\np = Conv(c, w)", False),
}


@pytest.mark.parametrize("lowering", ["convavgpool", "direct", "fused"])
@pytest.mark.parametrize(("body", "gone"), PADS.values(), ids=PADS)
def test_pads_in_front_go_into_the_convolution(body, gone, lowering):
    constants = {"two": TWO, "crop": [0, 0, -1, 0, 0, 0, 0, 0], "one": np.float32(1)}
    result = rewrite(graph(f"{body}\ny = {POOL}(p)", constants), 1, lowering)
    assert "Pad" not in operators(result.graph) if gone else operators(result.graph)["Pad"] == 1
    Session(LoadedModel(result, None, 0), optimize=True)  # merges Pads into the AveragePool behind them


@pytest.mark.parametrize(
    ("between", "taken_out"),
    [
        ("d = Mul(c, unit)", True), ("d = Add(nothing, c)", True), ("d = Cast<to=1>(c)", True),
        ("d = Expand(c, shape)", True), ("d = Mul(c, half)", False), ("d = Sub(nothing, c)", False),
        ("d = Cast<to=11>(c)\ne = Cast<to=1>(d)", False),
    ],
)  # fmt: skip
def test_a_pad_behind_what_onnxruntime_takes_out(between, taken_out):
    """It would be merged into the box mean, which may not be padded by as much as its window."""
    constants = {"two": TWO, "shape": [1], "unit": np.float32(1), "nothing": np.float32(0), "half": np.float32(0.5)}
    last = "e" if "e = " in between else "d"
    model = graph(f"c = Pad(x, two)\n{between}\np = Conv({last}, w)\ny = {POOL}(p)", constants)
    for lowering in ("convavgpool", "direct", "fused"):
        result = convpool.optimize(model, lowering=lowering, disable="fuse_prologue", check=1)
        (site,) = result.report.sites
        if taken_out and lowering == "direct":
            assert site.reason.startswith("Conv 'p': Pad 'c' in front of the box mean; got pads that reach its window")
        else:
            assert site.lowering == ("fused" if taken_out else lowering)
        Session(LoadedModel(result.model, None, 0), optimize=True)


@pytest.mark.parametrize(("value", "zeros"), [("", True), (", value=0.0", True), (", value=1.0", False), (", value=-1.0", False)])
def test_a_pad_of_older_opsets_has_its_value_as_an_attribute(value, zeros):
    body = f"c = Pad<pads=[0,0,2,2,0,0,2,2]{value}>(x)\nd = Mul(c, unit)\np = Conv(d, w)\ny = {POOL}(p)"
    model = graph(body, {"unit": np.float32(1)}, opset=10)
    (site,) = convpool.optimize(model, lowering="direct", check=1).report.sites
    assert (site.status == "rejected" and "Pad 'c' in front of the box mean" in site.reason) == zeros


@pytest.mark.parametrize(("reader", "output"), [("", "c"), ("z = Relu(c)", "z")])
def test_a_pad_in_front_that_is_an_output_or_that_something_else_reads_stays(reader, output):
    body = f"c = Pad(x, two)\np = Conv(c, w)\ny = {POOL}(p)\n{reader}"
    result = rewrite(graph(body, {"two": TWO}, outputs=f"float[a,b,c,d] y, float[e,f,g,h] {output}"), 1)
    assert operators(result.graph) == {**DIRECT, "Pad": 1, **({"Relu": 1} if reader else {})}


@pytest.mark.parametrize(("pads", "lowering"), [(0, "convavgpool"), (1, "fused")])
def test_pads_that_onnxruntime_moves_through_a_transpose(pads, lowering):
    """A Pad in TensorFlow's layout comes to stand in front of the box mean, whose window they may reach with its own."""
    order = {"last": "[0,2,3,1]", "first": "[0,3,1,2]"}
    body = f"t = Transpose<perm={order['last']}>(x)\nq = Pad(t, p)\nu = Transpose<perm={order['first']}>(q)\n"
    model = graph(f"{body}h = Conv<pads={[pads] * 4}>(u, w)\ny = {POOL}(h)", {"p": [0, 1, 1, 0, 0, 1, 1, 0]})
    assert [site.lowering for site in convpool.optimize(model).report.sites] == [lowering]


@pytest.mark.parametrize("before", ["", "t = Relu(x)\n"])
def test_pads_behind_which_alone_a_transpose_stands_stay_where_they_are(before):
    """onnxruntime moves a Transpose to another one only."""
    body = f"{before}q = Pad({'t' if before else 'x'}, p)\nu = Transpose<perm=[0,3,1,2]>(q)\nh = Conv(u, w)\ny = {POOL}(h)"
    given = {"w": (32, 16, 5, 5), "p": [0, 2, 2, 0, 0, 2, 2, 0]}
    result = rewrite(graph(body, given, inputs="float[1,12,12,16] x"), 1, "convavgpool")
    assert "ConvAvgPool" in operators(result.graph)
    assert convpool.verify(graph(body, given, inputs="float[1,12,12,16] x"), result).passed


def test_a_pad_behind_a_transpose_whose_order_a_function_is_given():
    functions = f"""<domain: "local", opset_import: ["": 17]>
      moved <order> (x, w, p) => (y) {{ t = Transpose<perm=[0,2,3,1]>(x) q = Pad(t, p) u = Transpose<perm: ints = @order>(q)
        h = Conv<pads=[1,1,1,1]>(u, w) y = {POOL}(h) }}"""
    model = graph("y = local.moved<order=[0,3,1,2]>(x, w, p)", {"p": [0, 0, 1, 0, 0, 0, 1, 0]}, functions=functions)
    result = convpool.optimize(model, check=2)  # the call is inlined, with the order in it
    assert result.changed and [site.status for site in result.report.sites] == ["rewritten"]


def test_a_pad_that_a_body_reads_too_stays():
    """A pooling in the body would find no zeros."""
    body = f"""c = Pad(x, two) h = Conv(c, w)
y = {POOL}(h)
z = If(flag) <then_branch = a () => (float[1,16,8,8] t) {{ t = MaxPool<kernel_shape=[2,2], strides=[2,2]>(c) }},
  else_branch = b () => (float[1,16,8,8] e) {{ e = AveragePool<kernel_shape=[2,2], strides=[2,2]>(c) }}>"""
    model = graph(body, {"two": TWO}, inputs="float[1,16,12,12] x, bool flag", outputs="float[a,b,c,d] y, float[e,f,g,h] z")
    result = convpool.optimize(model, lowering="fused", check=1)
    (conv,) = [node for node in result.model.graph.node if node.op_type == "Conv"]
    assert [list(item.ints) for item in conv.attribute if item.name == "pads"] == [[0, 0, 0, 0]]
    assert result.report.summary.rewritten == 1 and operators(result.model.graph)["Pad"] == 1


MOVED = {
    "a Transpose outside of the body": ("t = Transpose<perm=[0,2,3,1]>(x)\n", False),
    "a Transpose and a Relu outside": ("u = Transpose<perm=[0,2,3,1]>(x)\nt = Relu(u)\n", False),
    "no Transpose": ("t = Relu(x)\n", True),
}


@pytest.mark.parametrize(("before", "moves"), MOVED.values(), ids=MOVED)
def test_a_pad_in_a_body_between_transposes(before, moves):
    """onnxruntime moves a Transpose behind the Pad where it finds another one in front: the Pad would meet the AveragePool."""
    turned = "Transpose" in before
    inner = f"q = Pad(t, p) u2 = Transpose<perm=[0,3,1,2]>(q) h = Conv(u2, w) z = {POOL}(h)"
    body = f"""{before}y = If(flag) <then_branch = yes () => (float[1,32,6,6] z) {{ {inner} }},
      else_branch = no () => (float[1,32,6,6] e) {{ e = Expand(zero, s) }}>"""
    given = {"w": (32, 16, 5, 5), "p": [0, 2, 2, 0, 0, 2, 2, 0], "zero": np.zeros((1, 1, 1, 1), np.float32), "s": [1, 32, 6, 6]}
    model = graph(body, given, inputs=IF_INPUTS if turned else "float[1,12,12,16] x, bool flag")
    assert ("ConvAvgPool" in operators(convpool.optimize(model, check=1).model.graph.node[-1].attribute[0].g)) == moves


@pytest.mark.parametrize("before", ["", "t = Relu(a)\n", "r = Constant<value_int=1>()\n"])
def test_a_pad_in_a_function_between_transposes(before):
    """A call's result may come from a Transpose: the call is inlined, the pair rewritten."""
    source = "t" if "Relu" in before else "a"
    functions = f"""<opset_import: ["": 17], domain: "local">
    net (a, w, p) => (z) {{ {before} q = Pad({source}, p) u = Transpose<perm=[0,3,1,2]>(q) h = Conv(u, w) z = {POOL}(h) }}"""
    constants = {"w": (32, 16, 5, 5), "p": [0, 2, 2, 0, 0, 2, 2, 0]}
    body = "o = Transpose<perm=[0,2,3,1]>(x)\ny = local.net(o, w, p)"
    result = convpool.optimize(graph(body, constants, functions=functions), check=1)
    assert [site.status for site in result.report.sites] == ["rewritten"] and result.report.verification.passed
    assert not any(item.name == "net" for item in result.model.functions)


GIVEN = {"s": np.float32(0.05), "z": np.int8(0), "k": np.ones((64, 64, 3, 3), np.int8)}
GIVEN |= {"v": (64, 64, 3, 3), "one": (64, 64, 1, 1)}
GIVEN |= {"c": (1, 64, 1, 1), "half": np.array([1, 1, 0.5, 0.5], np.float32), "b": (64,)}
INT8 = "q = QuantizeLinear(x, s, z)\nd = DequantizeLinear(q, s, z)\nw8 = DequantizeLinear(k, s, z)\n"
CONVS = {
    "3x3": "h = Conv<pads=[1,1,1,1]>(d, w8)",
    "with a bias": "h = Conv<pads=[1,1,1,1]>(d, w8, b)",
    "1x1 in float weights": "h = Conv(d, one)",
    "with a scale behind": "g = Conv<pads=[1,1,1,1]>(d, w8)\nh = Mul(g, c)",
    "with a shift behind": "g = Conv<pads=[1,1,1,1]>(d, w8)\nh = Add(g, c)",
    "one of two added": "g = Conv<pads=[1,1,1,1]>(d, w8)\nf = Conv<pads=[1,1,1,1]>(x, v)\nh = Add(g, f)",
    "one of two joined": "g = Conv<pads=[1,1,1,1]>(x, v)\nf = Conv<pads=[1,1,1,1]>(d, w8)\nh = Concat<axis=1>(f, g)",
}
MEANS = {
    "AveragePool": f"y = {POOL}(h)",
    "GlobalAveragePool": "y = GlobalAveragePool(h)",
    "ReduceMean": "y = ReduceMean<axes=[2,3]>(h)",
    "Resize": 'y = Resize<mode="linear">(h, , half)',
}
CASES = [(conv, mean) for conv in CONVS for mean in MEANS]
MS = "com.microsoft."
KERNEL = "would become a float kernel; got INT8, behind DequantizeLinear, expected float"


def model(body: str):
    return graph(body, GIVEN, inputs="float[1,64,6,6] x")


@pytest.mark.parametrize(("conv", "mean"), CASES)
def test_the_target_of_tensorrt_leaves_them(conv, mean):
    result = convpool.optimize(model(INT8 + CONVS[conv] + "\n" + MEANS[mean]), target="tensorrt", check=0)
    assert not result.changed and result.report.notes == []
    assert {site.obstacle for site in result.report.sites} == {"would become a float kernel"}
    assert all(site.reason.startswith("Conv '") and site.reason.endswith(KERNEL) for site in result.report.sites)


@pytest.mark.parametrize(("conv", "mean"), CASES)
@pytest.mark.parametrize("target", ["any", "cpu"])
def test_other_targets_say_what_it_costs(conv, mean, target):
    given = model(INT8 + CONVS[conv] + "\n" + MEANS[mean])
    result = convpool.optimize(given, target=target, check=0)
    assert result.report.summary.rewritten >= 1
    (note,) = result.report.notes
    assert note == "TensorRT would run 1 x a float kernel for an INT8 convolution; --target tensorrt leaves these"
    assert_close(given, result.model)


@pytest.mark.parametrize(("domain", "move"), [("", "Cast<to=1>(d)"), ("", "MaxPool<kernel_shape=[2,2]>(d)"), (MS, "Identity(d)")])
@pytest.mark.parametrize("behind", ["y = QuantizeLinear(h, t)", "r = Relu(h)\ny = QuantizeLinear(r, t)"])
def test_one_convolution_between_two_quantizations_is_not_written(domain, move, behind):
    """onnxruntime would quantize its weights: the check fails then."""
    moved = INT8.replace("= D", f"= {domain}D") + f"m = {move}\ng = Conv<pads=[1,1,1,1]>(m, v)\nh = {POOL}(g)\n{behind}"
    given = GIVEN | {"v": (8, 8, 3, 3), "t": np.float32(2)}
    given = graph(moved, given, inputs="float[1,8,24,24] x", outputs="uint8[e,f,i,j] y", imports=', "com.microsoft": 1')
    assert "AveragePool" in operators(convpool.optimize(given, target="cpu").model.graph)
    assert convpool.optimize(given, lowering="fused").report.sites[0].obstacle.endswith("would quantize")
    assert "AveragePool" in operators(convpool.optimize(convpool.optimize(given).model, lowering="fused").model.graph)


@pytest.mark.parametrize("mean", MEANS)
def test_weights_alone_in_int8_are_no_int8_convolution(mean):
    body = f"w8 = DequantizeLinear(k, s, z)\nh = Conv<pads=[1,1,1,1]>(x, w8)\n{MEANS[mean]}"
    report = convpool.optimize(model(body), target="tensorrt", check=0).report
    assert report.summary.rewritten == 1 and report.notes == []


def test_a_float_pair_beside_them_takes_no_int8_convolution_along():
    """The target of TensorRT writes other convolutions as nodes too, in a model with a pair."""
    body = f"p = Conv<pads=[1,1,1,1]>(x, v)\nr = {POOL}(p)\n{INT8}h = Conv<pads=[1,1,1,1]>(d, v)\na = {POOL}(h)\nt = Relu(a)\n"
    body += "u = Relu(r)\ny = Add(t, u)"
    for options, left in (({"target": "tensorrt"}, 1), ({"enable": ["plain_conv"]}, 0)):
        result = convpool.optimize(model(body), check=0, **options)
        assert [node.op_type for node in result.model.graph.node].count("Conv") == left
