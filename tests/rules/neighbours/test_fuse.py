# SPDX-License-Identifier: Apache-2.0
"""Nodes before and behind a pair: each rule by which they are fused."""

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import convpool
from convpool.cli.group import run
from convpool.cli.optimize import command
from convpool.rules.neighbours.patterns import only_an_activation
from tests.support import rewriting, sessions
from tests.support.fusing import BEHIND, HALF, NORM, PAIR, PER_CHANNEL, RESIDUAL, SKIP, TAIL, only, operator_nodes, rewrite
from tests.support.models import TYPES, graph, index, operators, random_feeds, weights
from tests.support.rewriting import POOL

PROLOGUES = {
    "Relu": ("p = Relu(x)", "Relu"),
    "LeakyRelu": ("p = LeakyRelu<alpha=0.3>(x)", "LeakyRelu"),
    "LeakyRelu without alpha": ("p = LeakyRelu(x)", "LeakyRelu"),
    "BatchNormalization": ("p = BatchNormalization(x, g, b, m, d)", "Affine"),
    "BatchNormalization and Relu": ("n = BatchNormalization(x, g, b, m, d)\np = Relu(n)", "AffineRelu"),
    "Mul and Add and LeakyRelu": ("n = Mul(x, k)\no = Add(t, n)\np = LeakyRelu<alpha=0.1>(o)", "AffineLeakyRelu"),
    "Sub and Div": ("n = Sub(x, k)\no = Sub(s, n)\nq = Div(o, s)\np = Relu(q)", "AffineRelu"),
    "Identity and Dropout between": ("n = Dropout(x)\no = Mul(n, s)\nq = Identity(o)\np = Relu(q)", "AffineRelu"),
}


@pytest.mark.parametrize("name", PROLOGUES)
def test_prologue_of_a_padded_convolution(name):
    before, kind = PROLOGUES[name]
    model = rewrite(graph(f"{before}\n{PAIR}", {**NORM, **PER_CHANNEL}), 1, "convavgpool")
    assert [node.op_type for node in model.graph.node] in ([f"{kind}ConvAvgPool"], ["Dropout", f"{kind}ConvAvgPool"])
    node = model.graph.node[-1]
    values = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    slopes = {"LeakyRelu": 0.3, "LeakyRelu without alpha": 0.01, "Mul and Add and LeakyRelu": 0.1}
    assert values["prologue_alpha"] == pytest.approx(slopes.get(name, 0.0)) and values["alpha"] == 0.0
    assert len(node.input) == (5 if "Affine" in kind else 3)
    assert {t.name for t in model.graph.initializer} == set(node.input[1:])  # nothing else is left over
    rewrite(graph(f"{before}\n{PAIR}", {**NORM, **PER_CHANNEL}), 1, "convavgpool", disable="fuse_prologue")


def test_scale_and_shift_in_front_of_padding_are_exact():
    # A shift folded into the bias would be right inside and wrong along the border, by the shift times the outer taps.
    model = graph(f"n = Add(x, t)\n{PAIR.replace('(p,', '(n,')}", {"t": np.full((1, 16, 1, 1), 100, np.float32)})
    assert only(rewrite(model, 1, "convavgpool")).op_type == "AffineConvAvgPool"


EPILOGUES = {
    "Relu": ("y = Relu(q)", "Relu"),
    "LeakyRelu": ("y = LeakyRelu<alpha=0.3>(q)", "LeakyRelu"),
    "Tanh": ("y = Tanh(q)", "Tanh"),
    "Sigmoid": ("y = Sigmoid(q)", "Sigmoid"),
    "gain and bias and Tanh": ("n = Mul(q, c)\no = Add(n, c)\ny = Tanh(o)", "Tanh"),
    "Add and Sigmoid": ("n = Add(q, r)\ny = Sigmoid(n)", "AddSigmoid"),
    "BatchNormalization": ("y = BatchNormalization(q, g, b, m, d)", ""),
    "BatchNormalization and Relu": ("n = BatchNormalization(q, g, b, m, d)\ny = Relu(n)", "Relu"),
    "Mul and Sub": ("n = Mul(c, q)\ny = Sub(n, c)", ""),
    "Add of a tensor": ("y = Add(q, r)", "Add"),
    "Add of a tensor, reversed": ("y = Add(r, q)", "Add"),
    "Sum of two": ("y = Sum(q, r)", "Add"),
    "Add and LeakyRelu": ("n = Add(q, r)\ny = LeakyRelu(n)", "AddLeakyRelu"),
    "scaled, then Add and Relu": ("n = Mul(q, c)\no = Identity(n)\nf = Add(o, r)\ny = Relu(f)", "AddRelu"),
    "Add, then a shift": ("n = Add(q, r)\ny = Add(n, c)", "Add"),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("behind", "kind"), EPILOGUES.values(), ids=EPILOGUES)
def test_epilogue(behind, kind, bias):
    tail = TAIL.replace("w)", "w, e)") if bias else TAIL
    # Behind Tanh and Sigmoid the tolerance is that of an output of 1: weights that give sums of about 1.
    gain = 1 / 12 if kind.endswith(("Tanh", "Sigmoid")) else 1
    constants = {**BEHIND, "w": gain * weights((32, 16, 3, 3)), "c": (32, 1, 1), "e": (32,)}
    model = graph(f"{tail}\n{behind}", constants, inputs=RESIDUAL)
    node = only(rewrite(model, 1, "convavgpool"))
    assert node.op_type == f"ConvAvgPool{kind}" and list(node.output) == ["y"]
    assert list(node.input)[3:] == (["r"] if "Add" in kind else [])
    plain = rewrite(model, 1, "convavgpool", disable="fuse_epilogue")
    assert operator_nodes(plain)[0].op_type == "ConvAvgPool"
    assert len(plain.graph.node) == 1 + behind.count("=") - behind.count("alpha=")


def test_both_ends():
    body = f"n = BatchNormalization(x, g, b, m, d)\np = Relu(n)\n{PAIR.replace('y =', 'q =')}\no = Add(q, r)\ny = Relu(o)"
    model = rewrite(graph(body, NORM, inputs=RESIDUAL), 1, "convavgpool")
    node = only(model)
    assert node.op_type == "AffineReluConvAvgPoolAddRelu"
    assert list(node.input)[0] == "x" and list(node.input)[5] == "r"
    shapes = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    assert [shapes[name] for name in node.input[1:5]] == [[32, 3, 3, 16], [32], [16], [16]]
    assert [function.name for function in model.functions] == [node.op_type]
    assert {entry.domain: entry.version for entry in model.opset_import} == {"": 17, "ai.convpool": 2}


@pytest.mark.parametrize("order", [0, 1])
def test_of_two_pairs_that_meet_the_one_with_more_taps_takes_the_other(order):
    pairs = [TAIL, SKIP]
    body = "\n".join(pairs[::-1] if order else pairs) + "\ny = Add(r, q)"
    first, second = rewrite(graph(body, {"v": (32, 16, 1, 1)}), 2, "convavgpool").graph.node
    assert (first.op_type, second.op_type) == ("ConvAvgPool", "ConvAvgPoolAdd")
    assert second.input[3] == first.output[0] == "r" and first.input[1].startswith("v")


def test_of_two_equal_pairs_the_later_takes_the_other():
    body = f"{TAIL}\n{TAIL.replace('h =', 'u =').replace('(h)', '(u)').replace('q =', 'r =')}\ny = Add(q, r)"
    model = rewrite(graph(body), 2, "convavgpool")
    assert [node.op_type for node in model.graph.node] == ["ConvAvgPool", "ConvAvgPoolAdd"]
    assert model.graph.node[1].input[3] == "q"


def test_what_an_excluded_pair_does_not_take_the_other_takes():
    model = graph(f"{TAIL}\n{SKIP}\ny = Add(r, q)", {"v": (32, 16, 1, 1)})
    for node, name in zip(model.graph.node, "abcde", strict=True):
        node.name = name
    found = convpool.optimize(convpool.optimize(model, disable=["fuse_prologue", "fuse_epilogue"]).model, exclude="a").model
    assert [(node.name, node.op_type) for node in found.graph.node] == [("a", "ConvAvgPool"), ("c", "ConvAvgPoolAdd")]


def test_a_map_behind_the_residual_goes_into_the_convolution_that_gives_it():
    body = f"{TAIL}\nr = Conv<strides=[2,2]>(x, v)\nn = Add(q, r)\no = Mul(n, c)\nf = Add(o, c)\ny = Relu(f)"
    model = rewrite(graph(body, {"v": (32, 16, 1, 1), "c": (32, 1, 1)}), 1, "convavgpool")
    assert operators(model.graph) == {"Conv": 1, "ConvAvgPoolAddRelu": 1}
    conv = next(node for node in model.graph.node if node.op_type == "Conv")
    assert list(conv.input) == ["x", "v_scaled"]  # scaled, and no bias made up for it
    both = graph(f"{TAIL}\n{SKIP}\nn = Add(q, r)\ny = Div(n, c)", {"v": (32, 16, 1, 1), "c": np.float32(1.5)})
    assert [node.op_type for node in rewrite(both, 2, "convavgpool").graph.node] == ["ConvAvgPool", "ConvAvgPoolAdd"]


def test_an_excluded_convolution_is_not_scaled():
    body = f"{TAIL}\nr = Conv<strides=[2,2]>(x, v)\nn = Add(q, r)\ny = Mul(n, c)"
    model = graph(body, {"v": (32, 16, 1, 1), "c": np.float32(3)})
    assert operators(convpool.optimize(model).model.graph) == {"Conv": 1, "ConvAvgPoolAdd": 1}
    kept = convpool.optimize(model, exclude="r").model
    assert operators(kept.graph) == {"Conv": 1, "ConvAvgPoolAdd": 1, "Mul": 1}
    assert next(node for node in kept.graph.node if node.op_type == "Conv").input[1] == "v"


def test_a_group_that_is_left_out_is_1():
    old = convpool.optimize(
        graph(f"p = Relu(x)\nn = Mul(p, s)\n{PAIR.replace('(p,', '(n,')}", PER_CHANNEL), disable="fuse_prologue"
    ).model
    node = operator_nodes(old)[0]
    node.attribute.remove(next(item for item in node.attribute if item.name == "group"))
    assert [node.op_type for node in convpool.optimize(old, check=0).model.graph.node] == ["Relu", "AffineConvAvgPool"]


def test_an_activation_that_two_pairs_read_is_recomputed_in_each():
    body = f"n = Mul(x, s)\np = Relu(n)\n{PAIR.replace('y =', 'q =')}\nu = Conv(p, v)\no = {POOL}(u)\ny = Concat<axis=1>(q, o)"
    model = rewrite(graph(body, {**PER_CHANNEL, "v": (32, 16, 1, 1)}), 2, "convavgpool")
    assert operators(model.graph) == {"AffineReluConvAvgPool": 2, "Concat": 1}
    assert {node.input[0] for node in operator_nodes(model)} == {"x"}
    model = graph(body, {**PER_CHANNEL, "v": (32, 16, 1, 1)})
    for number, node in enumerate(model.graph.node):
        node.name = f"n{number}"
    part = convpool.optimize(model, disable="fuse_prologue").model
    kept = convpool.optimize(part, exclude="n2").model  # then somebody has to compute it anyway
    assert operators(kept.graph) == {"Concat": 1, "ConvAvgPool": 2, "Mul": 1, "Relu": 1}


def test_pooling_in_front_takes_in_what_is_before_it():
    body = f"p = Relu(x)\nh = {POOL}(p)\nq = Conv<pads=[1,1,1,1]>(h, w)\ny = Add(q, r)"
    assert only(rewrite(graph(body, inputs=RESIDUAL), 1, "convavgpool", enable="fuse_pool_conv")).op_type == "ReluConvAvgPoolAdd"


def test_a_model_of_version_1_gains_fused_variants_and_loses_the_function():
    old = convpool.optimize(graph(f"p = Relu(x)\n{PAIR}"), disable=["fuse_prologue", "fuse_epilogue"]).model
    assert {entry.domain: entry.version for entry in old.opset_import}["ai.convpool"] == 1
    result = convpool.optimize(old)
    assert [function.name for function in result.model.functions] == ["ReluConvAvgPool"]
    site = result.report.sites[0]
    assert (site.pattern, site.operator, site.absorbed) == ("conv_avg_pool", "ReluConvAvgPool", ("Relu 'p'",))
    assert convpool.optimize(result.model).changed is False


def test_without_anything_around_it_the_model_is_version_1_s():
    model = convpool.optimize(graph(PAIR.replace("(p,", "(x,"))).model
    assert {entry.domain: entry.version for entry in model.opset_import} == {"": 17, "ai.convpool": 1}
    assert [function.name for function in model.functions] == ["ConvAvgPool"]
    assert not {item.name for item in only(model).attribute} & {"residual", "activation", "alpha", "prologue_affine"}
    assert len(only(model).input) == 3
    assert not numpy_helper.to_array(next(item for item in model.graph.initializer if item.name == only(model).input[2])).any()


def test_report():
    body = f"n = BatchNormalization(x, g, b, m, d)\np = Relu(n)\n{PAIR.replace('y =', 'q =')}\nz = Relu(q)\ny = Tanh(z)"
    site = convpool.optimize(graph(body, NORM)).report.sites[0]
    assert (site.lowering, site.operator) == ("convavgpool", "AffineReluConvAvgPoolRelu")
    assert site.absorbed == ("BatchNormalization 'n'", "Relu 'p'", "Relu 'z'")
    # Written and read no more: two maps of 16x12x12 before it, one of 32x6x6 behind it, in float32.
    assert site.saved_bytes == 2 * 4 * (2 * 16 * 144 + 32 * 36)
    assert site.beside == ()


@pytest.mark.parametrize("lowering", ["direct", "fused", "auto"])
def test_other_lowerings_leave_it_to_the_runtime(lowering):
    body = f"p = Relu(x)\n{PAIR.replace('y =', 'q =')}\ny = Add(q, r)"
    assert {"Relu", "Add"} <= set(operators(rewrite(graph(body, inputs=RESIDUAL), 1, lowering).graph))


@pytest.mark.parametrize("opset", [7, 8, 9, 13, 14, 16, 21])
def test_opsets(opset):
    body = f"n = BatchNormalization(x, g, b, m, d)\np = LeakyRelu(n)\n{PAIR.replace('y =', 'q =')}\no = Add(q, r)\ny = Relu(o)"
    model = rewrite(graph(body, NORM, inputs=RESIDUAL, opset=opset), 1, "convavgpool")
    assert only(model).op_type == "AffineLeakyReluConvAvgPoolAddRelu"


OPEN = {"inputs": "float[N,16,H,W] x", "size": 16}


def test_open_sizes_by_a_common_origin():
    model = graph(f"{TAIL}\n{SKIP}\nn = Add(q, r)\ny = Relu(n)", {"v": (32, 16, 1, 1)}, inputs=OPEN["inputs"])
    found = rewrite(model, 2, "convavgpool", size=16)
    assert [node.op_type for node in found.graph.node] == ["ConvAvgPool", "ConvAvgPoolAddRelu"]
    pooled = graph(f"{TAIL}\nr = {POOL}(z)\nz2 = Relu(r)\ny = Add(q, z2)", inputs="float[N,16,H,W] x, float[N,32,H,W] z")
    # Two inputs that share the names of their sizes have equal sizes, but different origins.
    assert {node.op_type for node in operator_nodes(rewrite(pooled, 1, "convavgpool", size=16))} == {"ConvAvgPool"}


def test_open_sizes_of_a_common_origin_beside_one_channel():
    model = graph(f"{TAIL}\n{SKIP}\ny = Add(q, r)", {"v": (1, 16, 1, 1)}, inputs=OPEN["inputs"])
    assert operators(rewrite(model, 1, "convavgpool", size=16).graph) == {"ConvAvgPool": 1, "Conv": 1, "AveragePool": 1, "Add": 1}


@pytest.mark.parametrize("dtype", [*TYPES, "bfloat16"])
def test_types(dtype):
    kind, rng = TYPES.get(dtype, ml_dtypes.bfloat16), np.random.default_rng(0)
    shapes = {"w": (32, 16, 3, 3), "g": 16, "b": 16, "m": 16}
    constants = {name: (rng.standard_normal(shape) / 8).astype(kind) for name, shape in shapes.items()}
    constants["d"] = np.full(16, 2).astype(kind)
    body = f"n = BatchNormalization(x, g, b, m, d)\np = Relu(n)\n{PAIR.replace('y =', 'q =')}\no = Add(q, r)\ny = Relu(o)"
    inputs, outputs = f"{dtype}[1,16,12,12] x, {dtype}[1,32,6,6] r", f"{dtype}[a,b2,c,d2] y"
    model = graph(body, constants, inputs=inputs, outputs=outputs, opset=22, ir=10)
    result = convpool.optimize(model, check=2)
    assert only(result.model).op_type == "AffineReluConvAvgPoolAddRelu" and result.report.verification.passed
    assert {tensor.data_type for tensor in result.model.graph.initializer} == {helper.np_dtype_to_tensor_dtype(np.dtype(kind))}


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ([], "ReluConvAvgPoolRelu"),
        (["--disable", "fuse_epilogue"], "ReluConvAvgPool"),
        (["--disable", "fuse_prologue"], "ConvAvgPoolRelu"),
        (["--disable", "fuse_prologue", "--disable", "fuse_epilogue"], "ConvAvgPool"),
    ],
)
def test_command_line(options, kind, tmp_path, capsys):
    onnx.save(graph(f"p = Relu(x)\n{PAIR.replace('y =', 'q =')}\nz = Relu(q)\ny = Tanh(z)"), tmp_path / "in.onnx")
    assert run(command, "convpool-optimize", [str(tmp_path / "in.onnx"), "-o", str(tmp_path / "out.onnx"), *options]) == 0
    assert operator_nodes(onnx.load(tmp_path / "out.onnx"))[0].op_type == kind
    assert ("  convavgpool  " if kind == "ConvAvgPool" else f"  {kind} with Relu") in capsys.readouterr().out


@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_epsilon_before_and_behind(epsilon):
    small = {"d": np.full(16, 0.25, np.float32), "e": np.full(32, 0.25, np.float32), "f": (32,), "k": (32,), "l": (32,)}
    body = f"p = BatchNormalization<epsilon={epsilon}>(x, g, b, m, d)\n{PAIR.replace('y =', 'q =')}\n"
    body += f"y = BatchNormalization<epsilon={epsilon}>(q, f, k, l, e)"
    assert only(rewrite(graph(body, {**NORM, **small}), 1)).op_type == "AffineConvAvgPool"


def test_a_channel_too_small_for_the_type_is_taken_in_beside_others():
    scale = np.ones((16, 1, 1), np.float16)
    scale[3] = 1e-4
    body = f"n = Mul(x, s)\no = Mul(n, s)\np = Relu(o)\n{PAIR}"
    given = {"inputs": "float16[1,16,12,12] x", "outputs": "float16[a,b,c,d] y"}
    assert only(convpool.optimize(graph(body, {"w": HALF, "s": scale}, **given)).model).op_type == "AffineReluConvAvgPool"
    scale[8:] = 1e-4  # all that the second of two groups adds up
    grouped = convpool.optimize(graph(body, {"w": HALF, "s": scale}, **given), disable="fuse_prologue").model
    node = grouped.graph.node[-1]
    next(item for item in node.attribute if item.name == "group").i = 2
    weight = next(tensor for tensor in grouped.graph.initializer if tensor.name == node.input[1])
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight)[..., :8], weight.name))
    assert [node.op_type for node in convpool.optimize(grouped).model.graph.node] == ["Mul", "Mul", "Relu", "ConvAvgPool"]


@pytest.mark.parametrize(("front", "parts"), [("m = MaxPool<kernel_shape=[1,1]>(x)", ""), ("m = Add(x, z)", "Relu")])
def test_what_cannot_be_a_prologue_is_no_reason(front, parts):
    """Nobody expects a MaxPool to be fused; an Add of two inputs stays in front of the Relu that is."""
    text = f"{front}\n{rewriting.PAIR}".replace("Conv<pads=[1,1,1,1]>(x,", "Conv<pads=[1,1,1,1]>(m,")
    if parts:
        text = text.replace("h = Conv<pads=[1,1,1,1]>(m,", "r = Relu(m)\nh = Conv<pads=[1,1,1,1]>(r,")
    (site,) = convpool.optimize(graph(text, inputs="float[1,16,12,12] x, float[1,16,12,12] z"), check=0).report.sites
    assert (site.operator, site.beside) == (f"{parts}ConvAvgPool", ())


@pytest.mark.parametrize(
    ("between", "found"),
    [
        ("r = Relu(p)", {"ConvAvgPoolRelu": "p", "ConvAvgPoolAdd": "q"}),
        ("r = Identity(p)", {"ConvAvgPool": "q", "ConvAvgPoolAdd": "p"}),
    ],
)
def test_of_two_nodes_that_meet_the_one_with_more_work_adds_the_other_unless_it_ends_already(between, found):
    body = f"g = Conv<pads=[1,1,1,1]>(x, w)\np = {POOL}(g)\nh = Conv(x, v)\nq = {POOL}(h)\n{between}\ny = Add(r, q)"
    model = graph(body, {"v": (32, 16, 1, 1)})
    model.graph.node[0].name, model.graph.node[2].name = "p", "q"
    first = convpool.optimize(model, check=0, exclude="q").model
    for result in (convpool.optimize(model, check=1).model, convpool.optimize(first, check=1).model):
        assert {node.op_type: node.name for node in result.graph.node} == found


def without_bias(behind: str, *operands: str) -> onnx.ModelProto:
    """A node of the operator without bias, and another one behind it."""
    model = convpool.optimize(graph(rewriting.PAIR), check=0).model
    (node,) = model.graph.node
    del node.input[2:]
    node.output[0] = "q"
    model.graph.node.append(onnx.helper.make_node(behind, ["q", *operands], ["y"]))
    return model


def test_a_node_of_the_operator_without_bias_gets_zeros_for_an_epilogue():
    model = without_bias("Relu")
    result = convpool.optimize(model, check=1).model
    (fused,) = result.graph.node
    assert fused.op_type == "ConvAvgPoolRelu"
    feeds = random_feeds(model)
    np.testing.assert_array_equal(sessions.run(result, feeds)[0], sessions.run(model, feeds)[0])


def test_a_node_of_the_operator_without_bias_goes_on_without_one_where_only_its_weights_change():
    model = without_bias("Mul", "factor")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(4), "factor"))
    (scaled,) = convpool.optimize(model, check=1).model.graph.node
    assert scaled.op_type == "ConvAvgPool" and len(scaled.input) == 2


@pytest.mark.parametrize(
    ("body", "alone"),
    [
        ("r = Relu(x)", True),
        ("d = Dropout(x, ratio)\nr = Relu(d)", True),
        ("m = Mul(x, c)\nr = Relu(m)", False),
        ("m = Mul(x, c)\nd = Dropout(m, ratio)\ni = Identity(d)\nr = Relu(i)", False),
        ("m = Sum(x, z)\nr = Relu(m)", False),
        ("m = MaxPool<kernel_shape=[2,2]>(x)\nr = Relu(m)", True),
        ("r = Mul(x, c)", False),
        ("r = Neg(x)", False),
    ],
)
def test_an_activation_that_stands_alone(body, alone):
    inputs = "float[1,16,12,12] x, float[1,16,12,12] z"
    (scope,) = index(graph(f"{body}\ny = Neg(r)", {"c": np.float32(2), "ratio": np.float32(0.5)}, inputs=inputs))
    assert only_an_activation(scope, "r") == alone and not only_an_activation(scope, "x")
