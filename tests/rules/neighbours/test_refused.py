# SPDX-License-Identifier: Apache-2.0
"""Neighbours that are not fused, each reason; fusions in bodies, functions and files; SiLU, and scale and shift by image."""

import copy

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import convpool
from convpool.check.session import Session
from convpool.ir import schema
from convpool.ir.model import LoadedModel
from convpool.ir.protos import value_names
from models.generators import generate
from tests.support.fusing import HALF, NORM, PAIR, RESIDUAL, SKIP, TAIL, only, operator_nodes, rewrite
from tests.support.models import graph, graph_of, operators, sparse_of, weights
from tests.support.rewriting import POOL

CONVOLUTION = "got other readers, expected only the convolution"
COMPUTED = "constant operands; got computed ones, expected constants per channel"
BEYOND = "got numbers too large or small, expected ones that the type has"
FUSES = "Relu 'p': prologue; got Conv 'c' before it, which fuses it, expected a tensor that stays as it is"
STAYS_MAP = (
    "Mul 'y': map behind a residual; got one that its convolution cannot fold, expected a convolution with constant "
    "weights that nothing else reads"
)
MORE = "float[a,b,c,d] y, float[a,b,e,f] {}"
HALVES = {"inputs": "float16[1,16,12,12] x", "outputs": "float16[a,b,c,d] y", "s": np.float16(1e-4)}
THREE = RESIDUAL + ", float[1,32,6,6] s"
BEFORE: dict[str, tuple] = {  # nodes before PAIR, the reason, and what `graph_of` is given
    "differs by sample": ("p = Add(x, k)", f"Add 'p': {COMPUTED}", {"k": (2, 1, 1, 1), "inputs": "float[2,16,12,12] x"}),
    "channels widened": (
        "p = Mul(x, k)",
        "Mul 'p': channels; got 1, expected 16, not widened",
        {"k": (16, 1, 1), "inputs": "float[1,1,12,12] x"},
    ),
    "rank raised": ("p = Mul(x, k)", "Mul 'p': rank; got 3, expected 4", {"k": (1, 1, 1, 1), "inputs": "float[16,12,12] x"}),
    "a graph output": ("p = Relu(x)", f"Relu 'p': output 'p' is a graph output; {CONVOLUTION}", {"outputs": MORE.format("p")}),
    "BatchNormalization by a caller": (
        "p = BatchNormalization(x, v, b, m, d)",
        f"BatchNormalization 'p': {COMPUTED}",
        {**NORM, "inputs": "float[1,16,12,12] x, float[16] v"},
    ),
    "behind a convolution": ("c = Conv<pads=[1,1,1,1]>(x, v)\np = Relu(c)", FUSES, {"v": (16, 16, 3, 3)}),
    "behind a residual of a convolution": (
        "c = Conv<pads=[1,1,1,1]>(x, v)\ns = Add(x, c)\np = Relu(s)",
        FUSES,
        {"v": (16, 16, 3, 3)},
    ),
    "scale beyond the type": ("n = Mul(x, s)\np = Mul(n, s)", f"Mul 'p': scale and shift; {BEYOND}", {"s": np.float32(1e30)}),
    "scale too small": ("n = Mul(x, s)\np = Mul(n, s)", f"Mul 'p': scale and shift; {BEYOND}", {"w": HALF, **HALVES}),
    "slope beyond float16": ("p = LeakyRelu<alpha=-1e5>(x)", "LeakyRelu 'p': slope; got -100000, expected a number of float16"),
}
BEHIND: dict[str, tuple] = {  # nodes behind TAIL, the reason, and what `graph_of` is given
    "result read elsewhere": (
        "y = Relu(q)\nz = Sigmoid(q)",
        "ConvAvgPool 'q': result 'q' has 2 readers; got other readers, expected only Relu",
        {"outputs": MORE.format("z")},
    ),
    "result is an output": (
        "y = Relu(q)",
        "ConvAvgPool 'q': result 'q' is a graph output; got other readers, expected only Relu",
        {"outputs": MORE.format("q")},
    ),
    "result captured by a branch": (
        "y = Relu(q)\nz = If(flag) <"
        "then_branch = t () => (float[1,32,6,6] i) { i = Sigmoid(q) }, "
        "else_branch = e () => (float[1,32,6,6] j) { j = Tanh(q) }>",
        "ConvAvgPool 'q': result 'q' is read by a subgraph; got other readers, expected only Relu",
        {"inputs": "float[1,16,12,12] x, bool flag", "outputs": MORE.format("z")},
    ),
    "added to itself": ("y = Add(q, q)", "ConvAvgPool 'q': result 'q' has 2 readers; got other readers, expected only Add"),
    "residual by way of itself": (
        "t = Elu(q)\ny = Add(q, t)",
        "ConvAvgPool 'q': result 'q' has 2 readers; got other readers, expected only Add",
    ),
    "residual that broadcasts over space": (
        "y = Add(q, r)",
        "Add 'y': shape of the residual; got [1, 32, 1, 6], expected provably the result's, [1, 32, 6, 6]",
        {"inputs": "float[1,16,12,12] x, float[1,32,1,6] r"},
    ),
    "residual of lower rank": (
        "y = Add(q, r)",
        "Add 'y': shape of the residual; got [32, 6, 6], expected provably the result's, [1, 32, 6, 6]",
        {"inputs": "float[1,16,12,12] x, float[32,6,6] r"},
    ),
    "residual of open size": (
        "y = Add(q, r)",
        "Add 'y': shape of the residual; got ['M', 32, 6, 6], expected provably the result's, ['N', 32, 6, 6]",
        {"inputs": "float[N,16,12,12] x, float[M,32,6,6] r"},
    ),
    "a sum of three": ("y = Sum(q, r, s)", "Sum 'y': operands; got 3, expected 2", {"inputs": THREE}),
    "a difference": ("y = Sub(q, r)", f"Sub 'y': {COMPUTED}", {"inputs": RESIDUAL}),
    "a computed factor": ("y = Mul(q, r)", f"Mul 'y': {COMPUTED}", {"inputs": "float[1,16,12,12] x, float[1,32,1,1] r"}),
    "weights beyond the type": (
        "y = Mul(q, s)",
        f"Mul 'y': constants folded into weights; {BEYOND}",
        {"w": np.full((32, 16, 3, 3), 1e30, np.float32), "s": np.float32(1e30)},
    ),
    "weights too small": ("y = Mul(q, s)", f"Mul 'y': constants folded into weights; {BEYOND}", {"w": HALF / 64, **HALVES}),
    "a factor behind a residual": ("n = Add(q, r)\ny = Mul(n, s)", STAYS_MAP, {"s": np.float32(2), "inputs": RESIDUAL}),
    "a factor behind a residual that is read elsewhere": (
        "r = Conv<strides=[2,2]>(x, v)\nn = Add(q, r)\ny = Mul(n, s)\nz = Tanh(r)",
        STAYS_MAP,
        {"v": (32, 16, 1, 1), "s": np.float32(2), "outputs": MORE.format("z")},
    ),
    "a factor behind a residual of a fused variant": (
        f"{SKIP}\nt = Relu(r)\nn = Add(q, t)\ny = Mul(n, s)",
        STAYS_MAP,
        {"v": (32, 16, 1, 1), "s": np.float32(2)},
    ),
    "a second residual": ("n = Add(q, r)\ny = Add(s, n)", "Add 'y': residual; got a second one, expected one", {"inputs": THREE}),
}
REFUSALS: dict[str, tuple] = {  # all nodes, the reason, and what `graph_of` is given
    **{name: (f"{nodes}\n{PAIR}", *rest) for name, (nodes, *rest) in BEFORE.items()},
    **{name: (f"{TAIL}\n{nodes}", *rest) for name, (nodes, *rest) in BEHIND.items()},
    "read elsewhere": (
        f"p = Relu(x)\n{PAIR}\nz = Sigmoid(p)",
        f"Relu 'p': output 'p' has 2 readers; {CONVOLUTION}",
        {"outputs": MORE.format("z")},
    ),
    "captured by a branch": (
        f"p = Relu(x)\n{PAIR.replace('y =', 'q =')}\nz = If(flag) <"
        "then_branch = t () => (float[1,16,12,12] i) { i = Sigmoid(p) }, "
        "else_branch = e () => (float[1,16,12,12] j) { j = Tanh(p) }>\ny = Identity(q)",
        f"Relu 'p': output 'p' is read by a subgraph; {CONVOLUTION}",
        {"inputs": "float[1,16,12,12] x, bool flag", "outputs": MORE.format("z")},
    ),
    "a graph output by way of Identity": (
        f"p = Relu(x)\ni = Identity(p)\n{PAIR.replace('(p,', '(i,')}",
        f"Relu 'p': output 'p' is a graph output; {CONVOLUTION}",
        {"outputs": MORE.format("p")},
    ),
    "computed weights": (
        f"{TAIL.replace('w)', 'v)')}\ny = Mul(q, s)",
        "ConvAvgPool 'q': weights; got computed, or an input that a caller may override, expected constants",
        {"s": np.float32(2), "inputs": "float[1,16,12,12] x, float[32,16,3,3] v"},
    ),
    "widened behind": (
        f"h = Conv<pads=[6,6,6,6]>(x, v)\nq = {POOL}(h)\ny = Mul(q, k)",
        "Mul 'y': channels; got constants that widen them, expected 1 or 1",
        {"v": (1, 16, 13, 13), "k": (8, 1, 1)},
    ),
}
ADDED = {"a factor behind a residual of a fused variant": {"ConvAvgPoolRelu", "ConvAvgPoolAdd"}}
"""Operators left where they are more than the residual before the one refused."""


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_with_a_reason(name):
    body, expected, given = (*REFUSALS[name], {})[:3]
    model = graph_of(body, given)
    result = convpool.optimize(model, check=0)
    assert expected in [reason for site in result.report.sites for reason in site.beside]
    onnx.checker.check_model(result.model, full_check=True)
    kinds = {node.op_type for node in operator_nodes(result.model)}
    assert kinds == ADDED.get(name, {"ConvAvgPoolAdd"} if "n = Add" in body else {"ConvAvgPool"})
    if "beyond" not in name:
        assert convpool.verify(model, result.model).passed


def test_parameters_that_do_not_fit_the_channels_are_refused():
    result = convpool.optimize(graph(f"p = BatchNormalization(x, f, f, f, f)\n{PAIR}", {"f": np.ones(5, np.float32)}), check=0)
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


BLOCK = '<domain: "local", opset_import: ["" : 17]> block '
IF_BODY = f"""p = Relu(x)
y = If(flag) <
  then_branch = yes () => (float[1,32,6,6] a) {{ {PAIR.replace("y =", "q =")} a = Relu(q) }},
  else_branch = no () => (float[1,32,6,6] c) {{ n = Relu(z) f = Conv<pads=[1,1,1,1]>(n, w) o = {POOL}(f) c = Add(o, r) }}
>"""


def test_inside_a_branch_and_not_across_its_border():
    inputs = "float[1,16,12,12] x, float[1,16,12,12] z, float[1,32,6,6] r, bool flag"
    model = rewrite(graph(IF_BODY, inputs=inputs), 2, "convavgpool")
    assert [node.op_type for node in model.graph.node] == ["Relu", "If"]  # the branch only captures p
    branches = [operators(attribute.g) for attribute in model.graph.node[1].attribute]
    assert branches == [{"ConvAvgPoolRelu": 1}, {"ReluConvAvgPoolAdd": 1}]


def test_inside_a_loop():
    body = (
        "n = Constant<value = int64 {3}>()\ny = Loop(n, flag, x) <body = step (int64 i, bool go, float[1,16,12,12] s) => "
        f"(bool again, float[1,16,12,12] next) {{ again = Identity(go) p = Relu(s) {PAIR.replace('y =', 'o =')} "
        'f = LeakyRelu(o) next = Resize<mode="nearest">(f, , scales) }>'
    )
    constants = {"w": (16, 16, 3, 3), "scales": np.array([1, 1, 2, 2], np.float32)}
    standard = {"AveragePool": 1, "Conv": 1, "Relu": 1, "LeakyRelu": 1}
    for lowering, nodes in (("convavgpool", {"ReluConvAvgPoolLeakyRelu": 1}), ("direct", standard)):
        model = rewrite(graph(body, constants, inputs="float[1,16,12,12] x, bool flag"), 1, lowering)
        loop = next(node for node in model.graph.node if node.op_type == "Loop")
        assert operators(loop.attribute[0].g) == {"Identity": 1, "Resize": 1, **nodes}


def test_inside_a_function_with_constants_of_its_own():
    text = f"(x, w, g, b, m, d) => (y) {{ k = Constant<value = float {{2.0}}>() n = Mul(x, k) p = Relu(n) {PAIR} }}"
    found = rewrite(graph("y = local.block(x, w, g, b, m, d)", NORM, functions=BLOCK + text), 1, "convavgpool")
    assert "AffineReluConvAvgPool" in operators(found.functions[0])
    assert {entry.domain: entry.version for entry in found.functions[0].opset_import} == {"": 17, "ai.convpool": 2}


def test_alpha_of_a_function_s_attribute_is_unknown():
    text = f"{BLOCK} <a>(x, w) => (y) {{ p = LeakyRelu<alpha : float = @a>(x) {PAIR} }}"
    model = rewrite(graph("y = local.block<a = 0.5>(x, w)", functions=text), 1, "convavgpool")
    assert operators(model.functions[0])["LeakyRelu"] == 1


def test_a_node_of_that_name_in_another_domain_is_left_alone():
    model = convpool.optimize(graph(f"p = Relu(x)\n{PAIR}"), disable="fuse_prologue").model
    schema.move_to_domain(model, "trt.plugins")
    assert convpool.optimize(model, check=0).changed is False


def test_weights_that_something_else_reads_are_not_edited():
    body = f"{TAIL}\nn = Mul(q, c)\nz = Conv(x, w)\ny = Relu(n)"
    model = graph(body, {"c": (32, 1, 1)}, outputs="float[a,b,c,d] y, float[a,b,e,f] z")
    result = rewrite(model, 1, "convavgpool")
    kept = {tensor.name: numpy_helper.to_array(tensor) for tensor in result.graph.initializer}
    assert np.array_equal(kept["w"], numpy_helper.to_array(model.graph.initializer[0]))


def test_constants_that_others_read_stay_as_they_are():
    body = (
        f"n = BatchNormalization(x, g, b, m, d)\np = Relu(n)\n{PAIR.replace('y =', 'q =')}\nt = Mul(q, c)\ny = Relu(t)\n"
        "z = BatchNormalization(x, g, b, m, d)\nu = Mul(x, c2)\nv = Mul(r, c)"
    )
    outputs = "float[a,b,c,d] y, float[a,b,e,f] z, float[a,b,e,f] u, float[a,b,e,f] v"
    model = graph(body, {**NORM, "c": (32, 1, 1), "c2": (16, 1, 1)}, inputs=RESIDUAL, outputs=outputs)
    result = rewrite(model, 1)
    assert operator_nodes(result)[0].op_type == "AffineReluConvAvgPoolRelu"
    before, after = ({tensor.name: tensor for tensor in item.graph.initializer} for item in (model, result))
    assert all(after[name] == before[name] for name in (*NORM, "c", "c2"))


def test_names_that_are_taken_are_not_taken_again():
    # Every name that the operator's constants would like to have belongs to something else.
    body = f"{PAIR.replace('y =', 'q =')}\nt = Mul(q, c)\ny = Relu(t)\n"
    body = f"n = BatchNormalization(x, g, b, m, d)\np = Relu(n)\n{body}"
    names = (
        "w_channels_last", "w_channels_last_scaled", "q_factor", "q_shift", "q_bias", "y_factor", "y_shift", "y_bias",
        "q_bias_scaled", "y_bias_scaled", "mean", "variance", "scaled", "activated", "pooled", "weight",
    )  # fmt: skip
    body += "\n".join(f"{name} = Relu(x)" for name in names) + f"\nz = Sum({', '.join(names)})"
    model = graph(body, {**NORM, "c": (32, 1, 1)}, outputs="float[a,b,c,d] y, float[a,b,e,f] z")
    assert operator_nodes(result := rewrite(model, 1))[0].op_type == "AffineReluConvAvgPoolRelu"
    assert not {f"{name}_scale" for name in value_names(result)} & value_names(result)  # a quantizer of onnxruntime takes these


def test_external_constants(tmp_path):
    body = f"n = BatchNormalization(x, g, b, m, d)\np = Relu(n)\n{PAIR.replace('y =', 'q =')}\nt = Mul(q, c)\ny = Relu(t)"
    model = graph(body, {**NORM, "c": (32, 1, 1)})
    (tmp_path / "out").mkdir()
    onnx.save(model, tmp_path / "in.onnx", save_as_external_data=True, location="in.data", size_threshold=0)
    convpool.optimize(tmp_path / "in.onnx").save(tmp_path / "out" / "out.onnx")
    assert only(onnx.load(tmp_path / "out" / "out.onnx")).op_type == "AffineReluConvAvgPoolRelu"
    assert convpool.verify(tmp_path / "in.onnx", tmp_path / "out" / "out.onnx").passed


def test_a_sparse_initializer_is_a_constant_to_fold():
    model = graph(f"p = Add(x, t)\n{PAIR}")
    model.graph.sparse_initializer.append(sparse_of(weights((1, 16, 1, 1)), "t"))
    result = convpool.optimize(model)
    assert only(result.model).op_type == "AffineConvAvgPool" and not result.model.graph.sparse_initializer
    assert result.report.verification.passed


def test_two_branches_of_a_network_scale_the_convolution_between_them_once():
    # The second Mul finds the residual's convolution already scaled by the first.
    body = f"{TAIL}\nr = Conv<strides=[2,2]>(x, v)\nn = Add(q, r)\no = Mul(n, c)\nf = Sub(o, c)\ny = Mul(f, c)"
    model = rewrite(graph(body, {"v": (32, 16, 1, 1), "c": (32, 1, 1)}), 1)
    assert operators(model.graph) == {"Conv": 1, "ConvAvgPoolAdd": 1}
    assert len(model.graph.initializer) == 3  # two weights and the bias


def test_nodes_whose_attributes_a_function_gives_are_left_alone():
    """Beside one that fuses what it reads."""
    inner = convpool.optimize(graph(f"p = Relu(x)\n{PAIR}"), disable="fuse_prologue").model
    node = next(node for node in inner.graph.node if node.op_type == "ConvAvgPool")
    first, second = copy.deepcopy(node), copy.deepcopy(node)
    first.input[:], first.output[:] = ["p", "w", "b"], ["s"]
    second.input[:], second.output[:] = ["p", "w", "b"], ["t"]
    group = next(item for item in second.attribute if item.name == "group")
    group.Clear()
    group.name, group.ref_attr_name, group.type = "group", "groups", onnx.AttributeProto.INT
    nodes = [helper.make_node("Relu", ["x"], ["p"]), first, second, helper.make_node("Sub", ["s", "t"], ["y"])]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(schema.DOMAIN, 1)]
    function = helper.make_function("local", "both", ["x", "w", "b"], ["y"], nodes, imports, ["groups"])
    model = copy.deepcopy(inner)
    model.functions.append(function)
    model.opset_import.add(domain="local", version=1)
    call = helper.make_node("both", ["x", *node.input[1:3]], list(node.output), domain="local", groups=1)
    del model.graph.node[:]
    model.graph.node.append(call)
    result = convpool.optimize(model)  # the difference is zeros
    body = next(function for function in result.model.functions if function.name == "both").node
    assert [n.op_type for n in body] == ["Relu", "ConvAvgPool", "ConvAvgPool", "Sub"]


PAIR_OF_R = f"c = Conv<pads=[1,1,1,1]>(r, w)\ny = {POOL}(c)"
SILU = "a = Softsign(x)\ns = Sigmoid(a)\nr = Mul(a, s)"
MODULATED = "a = Softsign(x)\nm = Mul(a, g)\nn = Add(m, t)\nr = Relu(n)"
MAPPED = "q = Softsign(x)\nb = Mul(q, k)\na = Add(b, j)"
WEIGHTS = {"k": (1, 16, 1, 1), "j": (1, 16, 1, 1), "v": (16, 16, 3, 3)}
COLUMNS = "float[2,16,8,8] x, float[2,16,1,1] g, float[2,16,1,1] t"


def fused(body: str, target: str = "cuda", inputs: str = COLUMNS, **options):
    """The result for a model, and its operators; both models give the same, and a second run changes nothing."""
    model = graph(body, WEIGHTS, inputs=inputs)
    result = convpool.optimize(model, target=target, check=0, **options)
    assert not convpool.optimize(result.model, target=target, check=0, **options).changed
    rng = np.random.default_rng(0)
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in model.graph.input}
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    y, z = (Session(LoadedModel(m, None, 0), optimize=False).run(None, feeds) for m in (model, result.model))
    for before, after in zip(y, z, strict=True):
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-5 * np.abs(before).max())
    return result, operators(result.model.graph)


SWAPPED, BEHIND_A_MAP = SILU.replace("(a, s)", "(s, a)"), SILU.replace("a = Softsign(x)", MAPPED)


@pytest.mark.parametrize(
    ("before", "parts"), [(SILU, "Silu"), (SWAPPED, "Silu"), (BEHIND_A_MAP, "AffineSilu"), (MODULATED, "ModulatedRelu")]
)
@pytest.mark.parametrize("target", ["any", "tensorrt", "cuda"])
def test_a_silu_or_a_map_by_image_in_front_of_a_pair_is_its_prologue(target, before, parts):
    result, found = fused(f"{before}\n{PAIR_OF_R}", target)
    assert found == {"Softsign": 1, f"{parts}ConvAvgPool": 1}
    assert {entry.domain: entry.version for entry in result.model.opset_import}[schema.DOMAIN] == schema.MODULATING_VERSION


def test_a_silu_behind_a_pair_is_its_epilogue_unless_its_input_is_read_too():
    body = PAIR_OF_R.replace("(r,", "(x,").replace("y =", "p =") + "\ns = Sigmoid(p)\n"
    assert fused(body + "y = Mul(p, s)", inputs="float[2,16,8,8] x")[1] == {"ConvAvgPoolSilu": 1}
    found = fused(body + "q = Mul(p, s)\ny = Concat<axis=1>(q, p)", inputs="float[2,16,8,8] x")[1]
    assert found == {"ConvAvgPool": 1, "Sigmoid": 1, "Mul": 1, "Concat": 1}


@pytest.mark.parametrize("other", ["Sigmoid(x)", "HardSigmoid(a)"])
def test_a_product_that_is_no_silu_stays(other):
    result, found = fused(f"a = Softsign(x)\ns = {other}\nr = Mul(a, s)\n{PAIR_OF_R}", inputs="float[2,16,8,8] x")
    assert found["ConvAvgPool"] == found["Mul"] == 1
    assert "two that vary over space" in repr(result.report.sites)


@pytest.mark.parametrize(
    ("before", "read", "kept"),
    [(SILU, "s", {"Sigmoid": 1, "Mul": 1, "ConvAvgPool": 1}), (MODULATED, "m", {"ReluConvAvgPool": 1})],
)
def test_a_sigmoid_or_a_product_that_is_read_too_stays(before, read, kept):
    body = f"{before}\n{PAIR_OF_R.replace('y =', 'p =')}\nq = {POOL}({read})\ny = Concat<axis=1>(p, q)"
    assert kept.items() <= fused(body)[1].items()


@pytest.mark.parametrize("pair", ["", f"h = Conv<pads=[1,1,1,1]>(z, v)\nt = {POOL}(h)\n"])
def test_constants_before_a_map_by_image_change_factor_and_summand(pair):
    """A pair that gives the summand does not take the new Add, in this run or the next."""
    body = MODULATED.replace("a = Softsign(x)", MAPPED)
    inputs = COLUMNS.replace("[2,16,1,1] t", "[2,16,2,2] z") if pair else COLUMNS
    found = fused(f"{pair}{body}\n{PAIR_OF_R}", "tensorrt", inputs)[1]
    assert found == {"Softsign": 1, "Mul": 2, "Add": 1, "ModulatedReluConvAvgPool": 1} | ({"ConvAvgPool": 1} if pair else {})


@pytest.mark.parametrize(
    ("old", "new", "inputs"),
    [
        ("", "", COLUMNS.replace("g", "z").replace("[2,16,1,1] z", "[1,16,1,1] g")),  # the same for all images
        ("", "", COLUMNS.replace("[2,16,1,1] g", "[2,1,1,1] g")),  # for all channels
        ("", "", COLUMNS.replace("[2,16,1,1] t", "[2,16,8,8] t")),  # a map
        ("Mul(a, g)", "Sub(a, g)", COLUMNS),
        ("Add(m, t)", "Mul(m, t)", COLUMNS),
    ],
)
def test_other_computed_maps_stay(old, new, inputs):
    _, found = fused(f"{MODULATED.replace(old, new)}\n{PAIR_OF_R}", inputs=inputs)
    assert found["ReluConvAvgPool"] == 1 and sum(found.values()) == 4


@pytest.mark.parametrize("target", ["tensorrt", "cuda"])
@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        ("vae_decoder", {}, "NormalizedSilu"),
        ("stargan_v2_generator", {"widths": (64, 64)}, "ModulatedLeakyRelu"),
        ("biggan_generator", {"width": 64}, "ModulatedRelu"),
    ],
)
def test_a_plain_convolution_fuses_what_stands_behind_a_normalization(name, options, part, target):
    found = set(operators(convpool.optimize(generate(name, batch=2, **options), target=target, check=0).model.graph))
    taken = {f"{part}ConvAvgPoolAdd", f"{part}ConvAvgPool"} & found
    assert bool(taken) == (target == "cuda" or name != "biggan_generator")


LARGE = "m = Mul(h, k)\ns = Sigmoid(m)\ng = Mul(m, s)\ny = Conv<pads=[1,1,1,1]>(g, w)\np = Conv(x, q)\n"
LARGE += "z = AveragePool<kernel_shape=[2,2], strides=[2,2]>(p)"


@pytest.mark.parametrize(
    ("before", "taken"),
    [
        ("h = InstanceNormalization(x, o, o)", True),
        ("f = Reshape(x, sizes)\ni = InstanceNormalization(f, e, e)\nr = Shape(x)\nh = Reshape(i, r)", True),
        ("i = InstanceNormalization(x, o, o)\nh = Relu(i)", False),
        ("h = Neg(x)", False),
        ("h = Conv<pads=[1,1,1,1]>(x, v)", False),
    ],
)
def test_a_large_plain_convolution_is_the_plugins_behind_a_normalization(before, taken):
    ones = {"o": np.ones(64, np.float32), "e": np.ones(8, np.float32), "sizes": np.array([64, 8, -1])}
    given = {"w": (64, 64, 3, 3), "v": (64, 64, 3, 3), "q": (64, 64, 3, 3), "k": np.full((64, 1, 1), 2, np.float32), **ones}
    outputs = "float[64,64,66,64] y, float[64,64,32,31] z"
    model = graph(f"{before}\n{LARGE}", given, inputs="float[64,64,66,64] x", outputs=outputs)
    kinds = operators(convpool.optimize(model, target="tensorrt", check=0).model.graph)
    assert ("NormalizedSiluConvAvgPool" in kinds) == taken and ("Sigmoid" in kinds) != taken
    assert "Sigmoid" in operators(convpool.optimize(model, target="tensorrt", disable="norm_conv", check=0).model.graph)


def test_a_convolution_behind_a_silu_joins_the_chain_between_other_nodes():
    """Both layouts cost the same there, but the kernels do the SiLU as they turn X."""
    found = convpool.optimize(generate("vae_decoder", batch=1), target="cuda", check=1)
    kinds = operators(found.model.graph)
    assert kinds["NormalizedSiluConvAvgPoolAdd"] == 4 and kinds["NormalizedSiluConvAvgPool"] == 5 and "Conv" not in kinds
    assert "Sigmoid" not in kinds and found.report.verification.passed
