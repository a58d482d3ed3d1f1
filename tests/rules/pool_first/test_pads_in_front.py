# SPDX-License-Identifier: Apache-2.0
"""Pads in front of a pair: those that go into the convolution, and those that onnxruntime would move."""

import numpy as np
import pytest

import convpool
from convpool.check.session import make_session
from convpool.ir.model import LoadedModel
from tests.support.models import graph, operators
from tests.support.rewriting import DIRECT, POOL, rewrite

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
    constants = {"two": [0, 0, 2, 2, 0, 0, 2, 2], "crop": [0, 0, -1, 0, 0, 0, 0, 0], "one": np.float32(1)}
    result = rewrite(graph(f"{body}\ny = {POOL}(p)", constants), 1, lowering)
    assert "Pad" not in operators(result.graph) if gone else operators(result.graph)["Pad"] == 1
    make_session(LoadedModel(result, None, 0), optimize=True)  # merges Pads into the AveragePool behind them


@pytest.mark.parametrize(
    ("between", "taken_out"),
    [
        ("d = Mul(c, unit)", True),
        ("d = Add(nothing, c)", True),
        ("d = Cast<to=1>(c)", True),
        ("d = Expand(c, shape)", True),
        ("d = Mul(c, half)", False),
        ("d = Sub(nothing, c)", False),
        ("d = Cast<to=11>(c)\ne = Cast<to=1>(d)", False),
    ],
)
def test_a_pad_behind_what_onnxruntime_takes_out(between, taken_out):
    """It would be merged into the box mean, which may not be padded by as much as its window."""
    constants = {
        "two": [0, 0, 2, 2, 0, 0, 2, 2],
        "unit": np.float32(1),
        "nothing": np.float32(0),
        "half": np.float32(0.5),
        "shape": [1],
    }
    last = "e" if "e = " in between else "d"
    model = graph(f"c = Pad(x, two)\n{between}\np = Conv({last}, w)\ny = {POOL}(p)", constants)
    for lowering, kept in (("convavgpool", "convavgpool"), ("direct", "direct"), ("fused", "fused")):
        result = convpool.optimize(model, lowering=lowering, disable="fuse_prologue", check=1)
        (site,) = result.report.sites
        if taken_out and lowering == "direct":
            assert site.reason.startswith("Conv 'p': Pad 'c' in front of the box mean; got pads that reach its window")
        else:
            assert site.lowering == ("fused" if taken_out else kept)
        make_session(LoadedModel(result.model, None, 0), optimize=True)


@pytest.mark.parametrize(("value", "zeros"), [("", True), (", value=0.0", True), (", value=1.0", False), (", value=-1.0", False)])
def test_a_pad_of_older_opsets_has_its_value_as_an_attribute(value, zeros):
    body = f"c = Pad<pads=[0,0,2,2,0,0,2,2]{value}>(x)\nd = Mul(c, unit)\np = Conv(d, w)\ny = {POOL}(p)"
    model = graph(body, {"unit": np.float32(1)}, opset=10)
    (site,) = convpool.optimize(model, lowering="direct", check=1).report.sites
    assert (site.status == "rejected" and "Pad 'c' in front of the box mean" in site.reason) == zeros


def test_a_pad_in_front_that_is_an_output_stays():
    body = f"c = Pad(x, two)\np = Conv(c, w)\ny = {POOL}(p)"
    outputs = "float[a,b,c,d] y, float[e,f,g,h] c"
    result = rewrite(graph(body, {"two": [0, 0, 2, 2, 0, 0, 2, 2]}, outputs=outputs), 1)
    assert operators(result.graph) == {**DIRECT, "Pad": 1}


def test_a_pad_in_front_that_something_else_reads_stays():
    body = f"c = Pad(x, two)\np = Conv(c, w)\ny = {POOL}(p)\nz = Relu(c)"
    constants = {"two": [0, 0, 2, 2, 0, 0, 2, 2]}
    result = rewrite(graph(body, constants, outputs="float[a,b,c,d] y, float[a,b,c,d] z"), 1)
    assert operators(result.graph) == {**DIRECT, "Pad": 1, "Relu": 1}


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
    model = graph(
        "y = local.moved<order=[0,3,1,2]>(x, w, p)", {"p": [0, 0, 1, 0, 0, 0, 1, 0]}, functions=functions, imports=', "local": 1'
    )
    result = convpool.optimize(model, check=2)  # the call is inlined, with the order in it
    assert result.changed and [site.status for site in result.report.sites] == ["rewritten"]


TWO = [0, 0, 2, 2, 0, 0, 2, 2]


def test_axes_of_a_pad_in_any_order():
    """begins then ends, in the order of `axes`: here of columns, then of rows."""
    body = f"c = Conv<pads=[3,4,3,4]>(x, w)\nh = Pad(c, p, , axes)\ny = {POOL}(h)"
    for axes in ([3, 2], [-1, -2]):
        model = graph(body, {"p": [2, 1, 1, 0], "axes": axes}, inputs="float[1,16,11,11] x", opset=18)
        assert operators(rewrite(model, 1).graph) == {"AveragePool": 1, "Conv": 1}


def test_a_pad_that_a_body_reads_too_stays():
    """A pooling in the body would find no zeros."""
    body = f"""c = Pad(x, two)
h = Conv(c, w)
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
    model = graph(
        body,
        {"w": (32, 16, 5, 5), "p": [0, 2, 2, 0, 0, 2, 2, 0], "zero": np.zeros((1, 1, 1, 1), np.float32), "s": [1, 32, 6, 6]},
        inputs="float[1,16,12,12] x, bool flag" if turned else "float[1,12,12,16] x, bool flag",
    )
    then = convpool.optimize(model, check=1).model.graph.node[-1].attribute[0].g
    assert ("ConvAvgPool" in operators(then)) == moves


@pytest.mark.parametrize("before", ["", "t = Relu(a)\n", "r = Constant<value_int=1>()\n"])
def test_a_pad_in_a_function_between_transposes(before):
    """A call's result may come from a Transpose: the call is inlined, the pair rewritten."""
    source = "t" if "Relu" in before else "a"
    functions = f"""<opset_import: ["": 17], domain: "local">
    net (a, w, p) => (z) {{ {before} q = Pad({source}, p) u = Transpose<perm=[0,3,1,2]>(q) h = Conv(u, w) z = {POOL}(h) }}"""
    constants = {"w": (32, 16, 5, 5), "p": [0, 2, 2, 0, 0, 2, 2, 0]}
    body = "o = Transpose<perm=[0,2,3,1]>(x)\ny = local.net(o, w, p)"
    result = convpool.optimize(graph(body, constants, functions=functions, imports=', "local": 1'), check=1)
    assert [site.status for site in result.report.sites] == ["rewritten"] and result.report.verification.passed
    assert not any(item.name == "net" for item in result.model.functions)
