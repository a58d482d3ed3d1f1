# SPDX-License-Identifier: Apache-2.0
"""The target cuda: chains of the operator's nodes, the layout of the tensors between them, and what else becomes a node."""

import functools
import json
from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import convpool
from convpool.cli.group import run
from convpool.cli.optimize import command
from convpool.ir import schema
from convpool.rules.cuda_chain.layouts import SUMS
from tests.support.cuda_target import NARROW, TAIL, for_cuda, layouts, wide
from tests.support.models import graph, operators, weights
from tests.support.random_graph import RandomGraph
from tests.support.rewriting import IF_BODY, IF_INPUTS, PAIR, POOL, RTOL, assert_close, assert_stable, cases

CHAINS = max(80, cases(80))
KINDS = ("conv", "pair", "pool", "act", "norm", "bias", "residual", "concat", "max", "turn", "mean", "tanh", "grouped", "scale")


class Chain(RandomGraph):
    """A random network around pairs in the making: maps of 2-D feature maps with the shapes that they have."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.kinds: set[str] = set()

    def data(self, *shape: int) -> str:
        return self.constant(self.rng.uniform(-1, 1, shape).astype(np.float32))

    def conv(self, x: str, shape: tuple, filters: int, kernel: int, group: int = 1) -> tuple[str, tuple]:
        fan_in = shape[1] // group * kernel**2
        weight = self.rng.uniform(-1, 1, (filters, shape[1] // group, kernel, kernel)) * np.sqrt(3 / fan_in)
        inputs = [x, self.constant(weight.astype(np.float32)), self.data(filters)]
        return self.node("Conv", inputs, pads=[kernel // 2] * 4, group=group), (shape[0], filters, *shape[2:])

    def step(self, x: str, shape: tuple) -> tuple[str, tuple]:
        """One more layer of a random kind."""
        kind = str(self.pick(KINDS))
        n, c, h, w = shape
        halves = h % 2 == 0 and w % 2 == 0
        if kind == "max" and not halves or kind in ("pair", "pool") and not halves:
            kind = "act"
        self.kinds.add(kind)
        if kind in ("conv", "pair"):
            y, shape = self.conv(x, shape, int(self.pick([8, 16, 12])), int(self.pick([1, 3])))
            return (y, shape) if kind == "conv" else self.halve(y, shape, "AveragePool")
        if kind in ("pool", "max"):
            return self.halve(x, shape, "AveragePool" if kind == "pool" else "MaxPool")
        if kind == "grouped":
            return self.conv(x, shape, c, 3, group=4) if c % 4 == 0 else (x, shape)
        if kind in ("act", "tanh"):
            return self.node(str(self.pick(["Relu", "LeakyRelu"])) if kind == "act" else "Tanh", [x]), shape
        if kind == "norm":
            variance = self.constant(self.rng.uniform(0.5, 2, c).astype(np.float32))
            return self.node("BatchNormalization", [x, self.data(c), self.data(c), self.data(c), variance]), shape
        if kind in ("bias", "scale"):
            sizes = self.pick([(c, 1, 1), (1, c, 1, 1), (1,), (h, w), (c, h, 1)])
            operands = [x, self.data(*sizes)]
            return self.node("Add" if kind == "bias" else "Mul", operands if self.rng.random() < 0.7 else operands[::-1]), shape
        if kind in ("residual", "concat"):
            y, _ = self.conv(x, shape, c, 3)
            if kind == "residual":
                return self.node("Add", [x, y]), shape
            return self.node("Concat", [x, y], axis=int(self.pick([1, -3]))), (n, 2 * c, h, w)
        if kind == "turn":
            return self.node("Transpose", [x], perm=[0, 1, 3, 2]), (n, c, w, h)
        y = self.node("ReduceMean", [x], axes=[2, 3])
        return self.node("Mul", [x, self.node("Sigmoid", [y])]), shape

    def halve(self, x: str, shape: tuple, op_type: str) -> tuple[str, tuple]:
        y = self.node(op_type, [x], kernel_shape=[2, 2], strides=[2, 2])
        return y, (*shape[:2], shape[2] // 2, shape[3] // 2)


def make_chain(seed: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray], set[str]]:
    """A model of one to three outputs, its input, and the kinds of layers that it has."""
    chain = Chain(seed)
    shape = (2, int(chain.pick([3, 8, 16])), 16, int(chain.pick([16, 8])))
    x, rows = "x", [chain.pick(["N", 2]), *shape[1:]]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, rows)]
    feeds = {"x": chain.rng.uniform(-1, 1, shape).astype(np.float32)}
    if chain.rng.random() < 0.2:  # as TensorFlow's exporters begin
        feeds["x"] = np.moveaxis(feeds["x"], 1, -1).copy()
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows[0], *feeds["x"].shape[1:]])]
        x = chain.node("Transpose", ["x"], perm=[0, 3, 1, 2])
    outputs = []
    for _ in range(int(chain.rng.integers(4, 12))):
        x, shape = chain.step(x, shape)
        if chain.rng.random() < 0.05:
            outputs.append(x)
    x, shape = chain.conv(x, shape, 8, 3)
    if shape[2] % 2 == 0 and shape[3] % 2 == 0:
        x, shape = chain.halve(x, shape, "AveragePool")
    end = str(chain.pick(["map", "mean", "sum", "flatten", "global", "last"]))
    if end == "mean":
        x = chain.node("ReduceMean", [x], axes=[2, 3], keepdims=0)
    elif end == "sum":
        x = chain.node("ReduceSum", [x, chain.constant(np.array([-1, -2]))], keepdims=0)
    elif end in ("flatten", "global"):
        x = chain.node("Flatten", [chain.node("GlobalAveragePool", [x]) if end == "global" else x])
    elif end == "last":
        x = chain.node("Transpose", [x], perm=[0, 2, 3, 1])
    names = list(dict.fromkeys([*outputs, x]))
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
    return chain.model(inputs, values, 17), feeds, chain.kinds | {end}


def test_two_pairs_behind_one_another_keep_the_channels_last():
    chain = for_cuda(wide(f"{TAIL}\nq = Softsign(p)\nt = Conv<pads=[1,1,1,1]>(q, k)\ny = {POOL}(t)"))
    assert operators(chain.model.graph) == {"ConvAvgPool": 2, "Softsign": 1} and layouts(chain.model) == [2, 3]
    assert chain.report.summary.channels_last == 3


def test_quantized_maps_keep_the_channels_first():
    """onnxruntime 1.32 loads no Transpose behind a DequantizeLinear of int8 from opset 21 on: the check fails then."""
    body = f"i = QuantizeLinear(x, o, e)\nd = DequantizeLinear(i, o, e)\n{TAIL.replace('(x', '(d')}\n"
    body += f"q = Softsign(p)\nt = Conv<pads=[1,1,1,1]>(q, k)\ny = {POOL}(t)"
    model = wide(body, {"o": np.float32(0.25), "e": np.int8(0)}, opset=21)
    result = convpool.optimize(model, target="cuda", check=1)
    assert layouts(result.model) == [0, 0]
    assert "layout; got a DequantizeLinear, expected none" in str(result.report.sites)


@functools.cache
def optimized(chain: int) -> convpool.OptimizeResult:
    return convpool.optimize(make_chain(chain)[0], target="cuda", check=0)


@pytest.mark.parametrize("chain", range(CHAINS))
def test_random_chains_compute_the_same(chain):
    model, feeds, _ = make_chain(chain)
    result = optimized(chain)
    assert_stable(result.model, target="cuda")
    back = convpool.optimize(result.model, lowering="direct", check=0)
    assert not schema.used_in(back.model)
    for changed in (result.model, back.model):
        assert_close(model, changed, feeds, 2e-5)


def test_the_random_chains_reach_what_they_are_for():
    found, kinds = Counter(), Counter()
    for chain in range(CHAINS):
        kinds.update(make_chain(chain)[2])
        found.update(layouts(optimized(chain).model))
    assert all(found[layout] > CHAINS // 8 for layout in (0, 1, 2, 3)), found
    assert all(kinds[kind] > CHAINS // 20 for kind in (*KINDS, "map", "sum", "flatten", "global", "last")), kinds


def test_a_file_says_what_it_is_for_and_only_where_something_changed():
    result = for_cuda(graph(PAIR))
    assert {item.key: item.value for item in result.model.metadata_props} == {"convpool.target": "cuda"}
    untouched = graph("h = Conv<pads=[1,1,1,1]>(x, w)\ny = Relu(h)")
    kept = convpool.optimize(untouched, target="cuda", check=0)
    assert not kept.changed and kept.model.SerializeToString() == untouched.SerializeToString()
    assert not convpool.optimize(graph(PAIR), check=0).model.metadata_props


def test_a_model_without_a_pair_stays():
    model = wide(f"p = {POOL}(x)\nh = Conv<pads=[1,1,1,1]>(p, w)\ns = Relu(h)\ny = Conv<pads=[1,1,1,1]>(s, k)")
    assert convpool.optimize(model, enable=["fuse_pool_conv"], check=0).changed
    assert not convpool.optimize(model, target="cuda", check=0).changed


def chain_of(middle: str, behind: str = "", **options) -> convpool.OptimizeResult:
    """A pair, `middle` from p to q, another pair, `behind` from z to y."""
    text = f"{TAIL}\n{middle}\nt = Conv<pads=[1,1,1,1]>(q, k)\n{'z' if behind else 'y'} = {POOL}(t)\n{behind}"
    return for_cuda(wide(text, {"c": (32, 1, 1), "g": (32,), "n": np.linspace(0.5, 2, 32, dtype=np.float32)}), **options)


NORM = "a = Softsign(p)\nb = BatchNormalization(a, g, g, g, n)"


@pytest.mark.parametrize(
    ("middle", "wanted"),
    [
        ("q = Tanh(p)", {"ConvAvgPoolTanh": 1, "ConvAvgPool": 1}),
        ("q = HardSwish(p)", {"ConvAvgPool": 2, "HardSwish": 1}),
        ("a = Softsign(p)\nq = Mul(a, c)", {"ConvAvgPool": 1, "AffineConvAvgPool": 1, "Softsign": 1}),
        ("a = Softsign(p)\nb = Mul(a, c)\nq = Softsign(b)", {"ConvAvgPool": 2, "Softsign": 2, "Mul": 1}),
        (f"{NORM}\nq = Softsign(b)", {"ConvAvgPool": 2, "Softsign": 2, "Mul": 1, "Add": 1}),
        ("a = Softsign(p)\nb = Abs(p)\nq = Max(a, b)", {"ConvAvgPool": 2, "Softsign": 1, "Abs": 1, "Max": 1}),
    ],
)
def test_elementwise_nodes_work_in_either_layout(middle, wanted):
    result = chain_of(middle)
    assert operators(result.model.graph) == wanted and layouts(result.model) == [2, 3]


def test_a_concat_joins_the_last_axis():
    text = f"{TAIL}\na = Softsign(p)\nq = Concat<axis=1>(p, a)\nt = Conv<pads=[1,1,1,1]>(q, u)\ny = {POOL}(t)"
    result = for_cuda(wide(text, {"u": (16, 64, 3, 3)}))
    assert operators(result.model.graph) == {"ConvAvgPool": 2, "Softsign": 1, "Concat": 1} and layouts(result.model) == [2, 3]
    concat = next(node for node in result.model.graph.node if node.op_type == "Concat")
    assert [item.i for item in concat.attribute] == [3]


def test_a_pooling_between_pairs_multiplies_by_the_identity():
    result = chain_of(f"a = Softsign(p)\nb = {POOL}(a)\nq = Softsign(b)")
    assert operators(result.model.graph) == {"ConvAvgPool": 3, "Softsign": 2} and layouts(result.model) == [2, 1, 3]
    pool = [node for node in result.model.graph.node if schema.is_operator(node)][1]
    (weights,) = (tensor for tensor in result.model.graph.initializer if tensor.name == pool.input[1])
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(weights).reshape(32, 32), np.eye(32))
    site = next(site for site in result.report.sites if site.pattern == "chain" and not site.conv)
    assert (site.status, site.lowering, site.operator) == ("rewritten", "convavgpool", "ConvAvgPool")


def test_what_needs_channels_first_gets_one_transpose():
    heads = "\n".join(f"t{i} = Conv<pads=[1,1,1,1]>(q, k)\nu{i} = {POOL}(t{i})\ne{i} = Softsign(u{i})" for i in range(5))
    middle = "a = Softsign(p)\nb = Softmax<axis=1>(p)\nd = LRN<size=3>(p)\nc1 = Add(a, b)\nq = Mul(c1, d)"
    result = for_cuda(wide(f"{TAIL}\n{middle}\n{heads}\ny = Sum(e0, e1, e2, e3, e4)"))
    assert operators(result.model.graph)["Transpose"] == 3  # p for Softmax and LRN together, and what each gives
    perms = [list(node.attribute[0].ints) for node in result.model.graph.node if node.op_type == "Transpose"]
    assert sorted(perms) == [[0, 2, 3, 1], [0, 2, 3, 1], [0, 3, 1, 2]]


@pytest.mark.parametrize("end,axes", [("y = ReduceSum<keepdims=0>(z, s)", [1, 2]), ("y = ReduceMax<axes=[-1,2]>(z)", [1, 2])])
def test_a_sum_over_space_has_other_axes_where_the_map_has_the_channels_last(end, axes):
    """Here an operator that turns nothing reads the map too."""
    text = f"{TAIL}\nt = Conv<pads=[1,1,1,1]>(p, k)\nz = {POOL}(t)\no = Conv<pads=[1,1,1,1]>(z, w)\nr = {POOL}(o)\n{end}"
    model = wide(text, {"s": [-1, -2]}, outputs="float[a,b] y, float[a,b,c,d] r")
    if "Max" in end:
        model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 16, 1, 1]))
    big = next(value for value in model.graph.input if value.name == "x")
    big.CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, [16, 16, 256, 256]))
    result = convpool.optimize(model, target="cuda", check=0).model
    total = next(node for node in result.graph.node if node.op_type in SUMS)
    given = [list(item.ints) for item in total.attribute if item.name == "axes"]
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor).tolist() for tensor in result.graph.initializer}
    assert (given[0] if given else constants[total.input[1]]) == axes


def test_one_by_one_maps_are_reshaped():
    text = f"{TAIL}\nt = Conv<pads=[1,1,1,1]>(p, k)\nz = GlobalAveragePool(t)\nm = Relu(z)\nu = Conv(m, o)\ny = Flatten(u)"
    result = for_cuda(wide(text, {"o": (16, 16, 1, 1)}, outputs="float[a,b] y"))
    assert "Transpose" not in operators(result.model.graph) and "Conv" not in operators(result.model.graph)


@pytest.mark.parametrize("batch", ["16", "N"])
def test_a_map_that_a_reshape_makes_of_one_element_is_transposed(batch):
    """It reads one position in either layout, and gives the channels first: generators begin so."""
    up = 'Resize<mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor">(r, , s)'
    text = f"""a = Conv(x, c)\nl = LeakyRelu(a)\nr = Reshape(l, shape)\nu = {up}\nt = Conv<pads=[1,1,1,1]>(u, o)\nq = Relu(t)
        p = Conv<pads=[1,1,1,1]>(q, o)\nv = {up}\nd = Conv<pads=[1,1,1,1]>(v, o)\nz = Add(p, d)\ny = Tanh(z)"""
    constants = {"c": weights((1024, 128, 1, 1)) / 99, "o": weights((64, 64, 3, 3)) / 99, "shape": [-1, 64, 4, 4]}
    result = for_cuda(graph(text, {**constants, "s": np.float32([1, 1, 2, 2])}, inputs=f"float[{batch},128,1,1] x"))
    assert operators(result.model.graph)["Transpose"] == 1 and schema.used_in(result.model)


def test_a_transpose_of_the_model_s_own_is_none_where_the_layout_is_what_it_makes():
    text = f"x = Transpose<perm=[0,3,1,2]>(i)\n{TAIL}\nq = Softsign(p)\nt = Conv<pads=[1,1,1,1]>(q, k)\nz = {POOL}(t)\n"
    result = for_cuda(graph(text + "y = Transpose<perm=[0,2,3,1]>(z)", NARROW, inputs="float[4,64,64,16] i"))
    assert operators(result.model.graph) == {"ConvAvgPool": 2, "Softsign": 1} and layouts(result.model) == [1, 1]


def test_what_a_subgraph_reads_keeps_its_layout():
    text = f"{TAIL}\nq = Softsign(p)\nt = Conv<pads=[1,1,1,1]>(q, k)\nz = {POOL}(t)\n"
    body = "y = If(flag) <then_branch = a () => (float[4,32,32,32] m) { m = Neg(p) }, else_branch = b () => "
    body += "(float[4,32,32,32] n) { n = Abs(p) }>"
    model = graph(text + body, NARROW, inputs="float[4,16,64,64] x, bool flag", outputs="float[a,b,c,d] y, float[a,b,c,d] z")
    assert operators(for_cuda(model).model.graph)["Transpose"] == 1


def test_nodes_in_bodies_keep_the_channels_first():
    result = for_cuda(graph(IF_BODY, {"v": (32, 16, 3, 3)}, inputs=IF_INPUTS))
    bodies = [item.g for node in result.model.graph.node for item in node.attribute if item.HasField("g")]
    assert [schema.layout_of(node) for body in bodies for node in body.node if schema.is_operator(node)] == [0, 0]


REASONS = {
    "input channels; got 12, expected a multiple of 4": ("", "float"),
    "input channels; got 12, expected a multiple of 8": ("", "float16"),
    "group of a ConvAvgPool; got 4, expected 1": (", group=4", "float"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_reasons_of_convolutions_that_stay(reason):
    options, kind = REASONS[reason]
    channels = 16 if options else 10 if kind == "float" else 12
    dtype = np.float16 if kind == "float16" else np.float32
    groups = 4 if options else 1
    constants = {"w": np.ones((channels, 16, 3, 3), dtype), "k": np.ones((16, channels // groups, 3, 3), dtype)}
    text = f"{TAIL}\nq = Softsign(p)\ny = Conv<pads=[1,1,1,1]{options}>(q, k)"
    model = graph(text, constants, inputs=f"{kind}[4,16,64,64] x", outputs=f"{kind}[a,b,c,d] y")
    sites = convpool.optimize(model, target="cuda", check=0).report.sites
    found = [site.reason for site in sites if site.pattern == "chain"]
    assert len(found) == 1 and reason.replace("got 12", f"got {channels}") in found[0], found


def test_a_pad_that_crops_in_front_of_a_convolution_that_stays():
    text = f"{TAIL}\nq = Pad(p, o)\nt = Conv<pads=[1,1,1,1]>(q, k)\ny = Conv(t, v)"
    sites = for_cuda(wide(text, {"o": [0, 0, -1, -1, 0, 0, -1, -1], "v": (16, 16, 3, 3)})).report.sites
    reason = "Conv 't': Pad 'q' in front; got pads that the convolution cannot take, expected none"
    assert [site.reason for site in sites if site.status == "rejected"] == [reason]


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ("A,B,C,D", "shape of the weights; got ('A', 'B', 'C', 'D'), expected a static kernel with 2 axes"),
        ("16,32,3,3", "weights; got computed, or an input that a caller may override, expected a constant"),
    ],
)
def test_computed_weights_between_nodes_stay(shape, reason):
    text = f"{TAIL}\nq = Softsign(p)\nt = Conv<pads=[1,1,1,1]>(q, u)\ny = Softsign(t)"
    model = graph(text, NARROW, inputs=f"float[4,16,64,64] x, float[{shape}] u")
    sites = convpool.optimize(model, target="cuda", check=0).report.sites
    assert [site.reason for site in sites if site.status == "rejected"] == [f"Conv 't': {reason}"]


def test_reasons_of_layouts():
    far = f"{TAIL}\na = Softmax<axis=1>(p)\nb = Conv<pads=[1,1,1,1]>(a, k)\ny = Softmax<axis=1>(b)"
    sites = convpool.optimize(wide(far), target="cuda", check=0).report.sites
    (kept,) = [site for site in sites if site.pattern == "chain"]
    assert "layout; got other nodes before and behind it, expected nodes of the operator" in kept.reason
    pair = next(site for site in sites if site.status == "rewritten")
    assert any("layout; got channels first at less cost" in reason for reason in pair.beside)


def test_doubles_stay_with_the_channels_first():
    text = f"{TAIL}\nq = Softsign(p)\nt = Conv<pads=[1,1,1,1]>(q, k)\ny = {POOL}(t)"
    constants = {"w": np.ones((32, 16, 3, 3)), "k": np.ones((16, 32, 3, 3))}
    model = graph(text, constants, inputs="double[4,16,64,64] x", outputs="double[a,b,c,d] y")
    assert layouts(convpool.optimize(model, target="cuda", check=0).model) == [0, 0]


def test_names_that_switch_the_passes():
    text = f"{TAIL}\nq = Softsign(p)\nt = Conv<pads=[1,1,1,1]>(q, k)\nz = Softsign(t)\nu = Conv<pads=[1,1,1,1]>(z, v)\n"
    model = wide(f"{text}y = {POOL}(u)", {"v": (32, 16, 3, 3)})
    assert layouts(for_cuda(model).model) == [2, 1, 3]
    assert layouts(for_cuda(model, disable=["chain_conv"]).model) == [0, 0]
    assert layouts(for_cuda(model, disable=["channels_last"]).model) == [0, 0, 0]


def test_an_image_s_convolution_beside_an_average_is_taken():
    """The average starts from it too, so that `image_conv` leaves it."""
    text = f"c = Conv<pads=[1,1,1,1]>(x, i)\nd = Conv<pads=[1,1,1,1]>(c, j)\nr = Add(c, d)\np = {POOL}(r)\na = Relu(p)\n"
    text += f"t = Conv<pads=[1,1,1,1]>(a, k)\ny = {POOL}(t)"
    constants = {"i": weights((32, 3, 3, 3)), "j": weights((32, 32, 3, 3)) / 17}
    result = for_cuda(graph(text, {**NARROW, **constants}, inputs="float[4,3,64,64] x"))
    assert "Conv" not in operators(result.model.graph) and "AveragePool" not in operators(result.model.graph)


def test_a_function_s_own_chain_has_its_own_layout():
    functions = f"""<opset_import: ["": 17], domain: "local">
    net (a, w, k) => (y) {{ {TAIL.replace("(x,", "(a,")} q = Softsign(p) t = Conv<pads=[1,1,1,1]>(q, k) z = {POOL}(t)
    y = Relu(z) }}"""
    body = "g = local.net(x, w, k)\nh = local.net(g, w, k)\ny = Relu(h)"
    model = graph(body, NARROW, inputs="float[4,16,64,64] x", functions=functions)
    before = model.SerializeToString(deterministic=True)
    result = convpool.optimize(model, target="cuda", check=0)
    assert model.SerializeToString(deterministic=True) == before
    assert_close(model, result.model, rtol=4 * RTOL)
    assert_stable(result.model, target="cuda")


@pytest.mark.parametrize("inputs", ["float[] x", "float[n,c,h,w] x", "float[n,16,h,w] x"])
def test_unknown_ranks_and_sizes(inputs):
    """A tensor of unknown rank is not turned; open sizes count as nominal ones."""
    text = f"{TAIL}\nq = Softsign(p)\nt = Conv<pads=[1,1,1,1]>(q, k)\nz = {POOL}(t)\na = Softsign(z)\n"
    model = graph(text + f"u = Conv<pads=[1,1,1,1]>(a, v)\ny = {POOL}(u)", NARROW, inputs=inputs)
    result = convpool.optimize(model, target="cuda", check=0)
    assert layouts(result.model) == ([0, 0, 0] if inputs == "float[] x" else [2, 1, 3])
    assert_close(model, result.model, {"x": weights((2, 16, 32, 32))}, 4 * RTOL)


def between(pooling: str, channels: int = 32, kind: str = "float") -> onnx.ModelProto:
    """A pair, a pooling from a to b, and another pair; many pairs read b, so that channels last cost less."""
    readers = "\n".join(f"t{i} = Conv<pads=[1,1,1,1]>(q, k)\ny{i} = {POOL}(t{i})" for i in range(3))
    dtype = np.float16 if kind == "float16" else np.float32
    k = weights((8 if channels < 64 else 64, channels, 3, 3)).astype(dtype) / 17
    constants = {"w": weights((channels, 16, 3, 3)).astype(dtype) / 12, "k": k}
    text = f"{TAIL}\na = Softsign(p)\n{pooling}\nq = Softsign(b)\n{readers}"
    outputs = ", ".join(f"{kind}[A,B,C,D] y{i}" for i in range(3))
    return graph(text, constants, inputs=f"{kind}[4,16,64,64] x", outputs=outputs)


@pytest.mark.parametrize(
    ("attributes", "channels", "kind", "taken"),
    [
        *(("kernel_shape=[2,2], strides=[2,2]", n, "float", n in (32, 36, 1024)) for n in (32, 34, 36, 1024, 1032)),
        *(("kernel_shape=[2,2], strides=[2,2]", n, "float16", n == 40) for n in (36, 40)),
        ("kernel_shape=[4,2], strides=[4,2]", 32, "float", True),
        ('kernel_shape=[2,2], strides=[2,2], auto_pad="VALID"', 32, "float", True),
        ("kernel_shape=[2,2]", 32, "float", False),
        ('kernel_shape=[2,2], strides=[2,2], auto_pad="SAME_UPPER"', 32, "float", False),
        ("kernel_shape=[2,2], strides=[2,2], pads=[1,1,1,1], count_include_pad=1", 32, "float", False),
        ("kernel_shape=[3,3], strides=[3,3], ceil_mode=1", 32, "float", False),
    ],
)
def test_poolings_between_pairs_that_become_nodes(attributes, channels, kind, taken):
    """Whole windows without padding, of at most 1024 channels, in multiples of 16 bytes."""
    result = convpool.optimize(between(f"b = AveragePool<{attributes}>(a)", channels, kind), target="cuda", check=0).model
    found = operators(result.graph)
    assert found["ConvAvgPool"] == 4 + taken and ("AveragePool" not in found) == taken


def test_a_pooling_of_another_type_between_pairs_stays():
    pooling = "c = Cast<to=11>(a)\nd = AveragePool<kernel_shape=[2,2], strides=[2,2]>(c)\nb = Cast<to=1>(d)"
    found = operators(convpool.optimize(between(pooling), target="cuda", check=0).model.graph)
    assert found["AveragePool"] == 1 and found["ConvAvgPool"] == 4


def test_a_pooling_between_pairs_along_one_axis_of_three_stays():
    """The kernels have two spatial axes."""
    text = f"{TAIL}\na = Unsqueeze(p, e)\nb = AveragePool<kernel_shape=[1,2,2], strides=[1,2,2]>(a)\nq = Squeeze(b, e)\n"
    model = wide(f"{text}t = Conv<pads=[1,1,1,1]>(q, k)\ny = {POOL}(t)", {"e": [2]})
    assert operators(for_cuda(model).model.graph)["AveragePool"] == 1


def test_a_convolution_of_another_type_between_pairs_stays():
    text = f"{TAIL}\na = Cast<to=11>(p)\nb = Conv<pads=[1,1,1,1]>(a, double)\nq = Cast<to=1>(b)\n"
    model = wide(f"{text}t = Conv<pads=[1,1,1,1]>(q, k)\ny = {POOL}(t)", {"double": weights((32, 32, 3, 3), 0, float) / 17})
    sites = convpool.optimize(model, target="cuda", check=0).report.sites
    reasons = [site.reason for site in sites if site.conv == "b"]
    assert reasons == ["Conv 'b': type; got DOUBLE, expected float16, bfloat16 or float32"]


MAP = f"{TAIL}\nt = Conv<pads=[1,1,1,1]>(p, k)\nz = AveragePool<kernel_shape=[4,4], strides=[4,4]>(t)\na = Relu(z)\n"
"""A map of 16 channels, 8 by 8 elements, with the channels last."""
SUM = "m = ReduceSum<keepdims=0>(a, s)\n"
CONSTANTS = {
    **NARROW, "s": [2, 3], "o": [0], "row": [3], "back": [-1, -2], "d": [0, -1], "three": [4, 1, 16],
    "flat": [4, 16, 64], "e": weights((5, 16)), "f": weights((16, 5)), "b": weights((5,)), "one": weights((1, 5)),
    "scalar": weights((1,)), "rows": weights((4, 1)), "four": weights((5, 4)), "vector": weights((16,)),
    "v2": weights((64, 3)),
}  # fmt: skip
TAKEN = {
    "a sum and a Gemm": SUM + "y = Gemm<transB=1>(m, e, b)",
    "a sum over negative axes and a Gemm": "m = ReduceSum<keepdims=0>(a, back)\ny = Gemm(m, f, one)",
    "a mean, a view and a Gemm": "n = ReduceMean<axes=[2,3]>(a)\nm = Flatten(n)\ny = Gemm<transB=1>(m, e)",
    "a mean, a Squeeze and a Gemm": "n = ReduceMean<axes=[2,3]>(a)\nm = Squeeze(n, s)\ny = Gemm(m, f, scalar)",
    "a global mean, a view and a MatMul": "n = GlobalAveragePool(a)\nm = Reshape(n, d)\ny = MatMul(m, f)",
    "factors of one": SUM + "y = Gemm<transB=1, alpha=1.0, beta=1.0>(m, e, b)",
}


def head(name: str) -> onnx.ModelProto:
    return wide(MAP + TAKEN[name], CONSTANTS, outputs="float[a,b] y")


@pytest.mark.parametrize("name", TAKEN)
def test_a_head_becomes_one_node(name):
    result = for_cuda(head(name))
    found = operators(result.model.graph)
    assert found == {"ConvAvgPool": 2, "ConvAvgPoolRelu": 1, "Flatten": 1} and layouts(result.model) == [2, 1, 1]
    site = next(site for site in result.report.sites if site.pattern == "head")
    assert site.status == "rewritten" and site.pool and (site.macs_before, site.macs_after) == (80, 80)


def test_the_node_has_the_name_of_the_product():
    model = head("a sum and a Gemm")
    model.graph.node[-1].name = "classifier"
    names = {node.op_type: node.name for node in for_cuda(model).model.graph.node if node.output[0].startswith("y")}
    assert names == {"ConvAvgPool": "classifier", "Flatten": "y"}


STAYS = {
    "another factor": SUM + "y = Gemm<transB=1, alpha=2.0>(m, e, b)",
    "another factor of the bias": SUM + "y = Gemm<transB=1, beta=2.0>(m, e, b)",
    "the other operand turned": SUM + "y = Gemm<transA=1, transB=1>(m, four)",
    "computed weights": SUM + "g = Tanh(m)\ny = Gemm<transB=1>(m, g)",
    "weights of one axis": SUM + "n = MatMul(m, vector)\ny = Unsqueeze(n, o)",
    "a bias per sample": SUM + "y = Gemm<transB=1>(m, e, rows)",
    "a computed bias": SUM + "g = ReduceMean<axes=[0]>(m)\nj = MatMul(g, f)\ny = Gemm<transB=1>(m, e, j)",
    "another reader": SUM + "n = Neg(m)\nq = Gemm<transB=1>(m, e, b)\ny = Concat<axis=1>(n, q)",
    "another reader of what a view reads": "n = ReduceMean<axes=[2,3]>(a)\nm = Flatten(n)\nh2 = Squeeze(n, s)\n"
    "q = Gemm<transB=1>(m, e, b)\ny = Concat<axis=1>(h2, q)",
    "other axes": "m = ReduceSum<keepdims=0>(a, o)\nn = Flatten(m)\ny = MatMul(n, v2)",
    "an operand of three axes": SUM + "n = Reshape(m, three)\nq = MatMul(n, f)\ny = Flatten(q)",
    "a map of three axes": "r = Reshape(a, flat)\nm = ReduceSum<keepdims=0>(r, two)\ny = Gemm<transB=1>(m, e)",
    "another type": "c = Cast<to=11>(a)\nm = ReduceSum<keepdims=0>(c, s)\ng = MatMul(m, doubles)\ny = Cast<to=1>(g)",
    "something between": SUM + "n = Tanh(m)\ny = Gemm<transB=1>(n, e, b)",
    "another layout": "h1 = Softmax<axis=1>(x)\nm = ReduceSum<keepdims=0>(h1, s)\n"
    "q = Gemm<transB=1>(m, e)\nr = GlobalMaxPool(a)\nh2 = Flatten(r)\n"
    "y = Concat<axis=1>(q, h2)",
}


@pytest.mark.parametrize("name", STAYS)
def test_heads_that_stay(name):
    constants = {**CONSTANTS, "two": [2], "doubles": weights((16, 5), dtype=np.float64)}
    model = wide(MAP + STAYS[name], constants, outputs="float[c,d] y")
    result = for_cuda(model)
    products = [sum(node.op_type in ("Gemm", "MatMul") for node in item.graph.node) for item in (model, result.model)]
    assert products[0] == products[1] > 0
    assert not [site for site in result.report.sites if site.pattern == "head"]


def head_of(channels: int, kind: str, end: str, size: str = "32,32", factor: float = 1.0) -> convpool.OptimizeResult:
    """The target's result for a head of so many channels."""
    dtype = {"float": np.float32, "float16": np.float16}[kind]
    constants = {"w": weights((32, 16, 3, 3)).astype(dtype) / 12, "k": weights((channels, 32, 3, 3)).astype(dtype) / 17}
    constants |= {"s": [2, 3], "e": (factor * weights((5, channels))).astype(dtype)}
    narrow = MAP.replace("[4,4]", "[2,2]")  # with windows of 4x4, so few channels are written as one convolution
    model = graph(narrow + end, constants, inputs=f"{kind}[4,16,{size}] x", outputs=f"{kind}[a,b] y")
    return convpool.optimize(model, target="cuda", check=0)


@pytest.mark.parametrize(
    ("taken", "channels", "kind", "end", "size", "factor"),
    [
        (True, 12, "float", SUM, "32,32", 1),
        (False, 10, "float", SUM, "32,32", 1),
        (True, 8, "float16", SUM, "32,32", 1),
        (False, 12, "float16", SUM, "32,32", 1),
        (False, 12, "float", SUM, "H,32", 1),
        (False, 12, "float", SUM, "32,36", 1),
        (True, 8, "float16", "m = ReduceMean<axes=[2,3], keepdims=0>(a)\n", "32,32", 400),
        (False, 8, "float16", SUM, "32,32", 1600),
    ],
)
def test_channels_sizes_and_numbers_of_a_head(taken, channels, kind, end, size, factor):
    """Channels in multiples of 16 bytes, maps of a known size of at most 64 elements, and weights that the type has when
    multiplied by the map's size."""
    found = operators(head_of(channels, kind, end + "y = Gemm<transB=1>(m, e)", size, factor).model.graph)
    assert ("Gemm" in found, "Flatten" in found) == (not taken, taken)


def test_the_report_tells_of_chains_and_layouts(tmp_path, capsys):
    onnx.save(head("a mean, a view and a Gemm"), tmp_path / "in.onnx")
    words = [str(tmp_path / "in.onnx"), "--target", "cuda", "--report", str(tmp_path / "r.json")]
    assert run(command, "convpool-optimize", words) == 0
    out = capsys.readouterr().out
    assert "layout    4 nodes with channels last" in out and "ReduceMean 1 -> 0" in out
    assert json.loads((tmp_path / "r.json").read_text())["summary"]["channels_last"] == 4
