# SPDX-License-Identifier: Apache-2.0
"""The ways to write the pair: what is found, and exactly which operators remain."""

import numpy as np
import onnx
import pytest

import convpool
from tests.support.models import graph, operators
from tests.support.rewriting import CONV, DIRECT, PAIR, POOL, assert_close, rewrite

TWO = "p = Conv<pads=[1,1,1,1]>(x, w)\nq = Conv(x, v)\n"
POINTWISE = {"v": (32, 16, 1, 1)}
TWO_IMAGES = "float[1,16,12,12] x, float[1,16,12,12] z"
MIDDLES = {
    "Identity": "h = Identity(c)",
    "Dropout": "h = Dropout(c)",
    "Dropout with its mask unread": "h, m = Dropout(c)",
    "Dropout with a ratio": "h = Dropout(c, half)",
    "a factor as an attribute": "f = Constant<value_float = 0.5>()\nh = Mul(c, f)",
    "factors as an attribute": "f = Constant<value_floats = [0.5]>()\nh = Mul(f, c)",
    "BatchNormalization": "h = BatchNormalization(c, g, b, g2, v2)",
    "Add": "h = Add(c, k)",
    "Sub": "h = Sub(c, k)",
    "Sub reversed": "h = Sub(k, c)",
    "Mul": "h = Mul(k, c)",
    "Div": "h = Div(c, k)",
    "scalar": "h = Mul(c, half)",
    "three": "i = Mul(c, k)\nj = Sub(half, i)\nh = Div(j, k)",
    "Pad by nothing": "h = Pad(c, none)",
    "Pad by nothing with a value": "h = Pad(c, none, half)",
    "Pad that crops": "h = Pad(c, crop)",
}
CONSTANTS = {
    "k": (32, 1, 1), "half": np.float32(0.5), "g": (32,), "b": (32,), "g2": (32,), "v2": np.full(32, 2, np.float32),
    "none": [0] * 8, "crop": [0, 0, -1, 0, 0, 0, 0, -1],
}  # fmt: skip


@pytest.mark.parametrize("lowering", ["direct", "fused"])
@pytest.mark.parametrize("name", MIDDLES)
def test_linear_operators_between_vanish(name, lowering):
    body = f"c = Conv<pads=[1,1,1,1]>(x, w, bias)\n{MIDDLES[name]}\ny = {POOL}(h)"
    result = rewrite(graph(body, {**CONSTANTS, "bias": (32,)}), 1, lowering)
    assert operators(result.graph) == (DIRECT if lowering == "direct" else {"Conv": 1})


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_each_of_few_channels_has_its_own_factor(channels):
    """Shapes with sizes of 1 and 2 look like others."""
    given = {"w": (channels, 16, 3, 3), "k": np.arange(2, 2 + channels, dtype=np.float32).reshape(-1, 1, 1)}
    model = graph(f"c = Conv<pads=[1,1,1,1]>(x, w)\nh = Mul(c, k)\ny = {POOL}(h)", given)
    assert operators(rewrite(model, 1, "fused").graph) == {"Conv": 1}


@pytest.mark.parametrize("factor", [1e-5, 2.0**15])
@pytest.mark.parametrize("lowering", ["convavgpool", "direct", "fused"])
def test_a_factor_that_half_precision_weights_cannot_take_in_moves_behind(lowering, factor):
    constants = {"w": np.full((32, 16, 3, 3), 8 if factor > 1 else 0.01, np.float16), "k": np.float16(factor)}
    body = f"c = Conv<pads=[1,1,1,1]>(x, w)\nh = Mul(c, k)\ny = {POOL}(h)"
    model = graph(body, constants, inputs="float16[1,16,12,12] x", outputs="float16[a,b,c,d] y")
    result = convpool.optimize(model, check=0, lowering=lowering)
    assert result.report.summary.rewritten == 1 and operators(result.model.graph)["Mul"] == 1


@pytest.mark.parametrize("lowering", ["convavgpool", "direct", "fused"])
def test_of_two_convolutions_that_meet_only_the_one_whose_weights_overflow_keeps_its_factor(lowering):
    constants = {"w": np.full((32, 16, 3, 3), 8, np.float16), "v": np.full((32, 16, 3, 3), 0.25, np.float16)}
    body = "c = Conv<pads=[1,1,1,1]>(x, w)\nd = Mul(c, k)\ne = Conv<pads=[1,1,1,1]>(x, v)\nf = Mul(e, k)\nh = Add(d, f)\n"
    given = {"inputs": "float16[1,16,12,12] x", "outputs": "float16[a,b,c,d] y"}
    model = graph(f"{body}y = {POOL}(h)", {**constants, "k": np.float16(2.0**15)}, **given)
    result = convpool.optimize(model, check=0, lowering=lowering, disable="fuse_epilogue")
    assert result.report.summary.rewritten == 2 and operators(result.model.graph)["Mul"] == 1
    for tensor in result.model.graph.initializer:
        assert np.isfinite(onnx.numpy_helper.to_array(tensor).astype(np.float64)).all()


@pytest.mark.parametrize(
    ("operator", "operands"), [("Mul", "c, n"), ("Mul", "n, c"), ("Add", "c, n"), ("Sub", "n, c"), ("Div", "c, n")]
)
def test_factors_that_are_no_constants_move_behind(operator, operands):
    body = f"c = Conv<pads=[1,1,1,1]>(x, w)\nh = {operator}({operands})\ny = {POOL}(h)"
    result = rewrite(graph(body, inputs="float[1,16,12,12] x, float[1,32,1,1] n"), 1)
    assert [node.op_type for node in result.graph.node] == ["AveragePool", "Conv", operator]
    assert result.graph.node[2].input[operands.split(", ").index("n")] == "n"


JOINS = {
    "Add": ("h = Add(p, q)", {"Add": 1, "AveragePool": 2, "Conv": 2}),
    "Sub": ("h = Sub(q, p)", {"AveragePool": 2, "Conv": 2, "Sub": 1}),
    "Sum": ("h = Sum(p, q)", {"AveragePool": 2, "Conv": 2, "Sum": 1}),
    "Concat": ("h = Concat<axis=1>(p, q)", {"AveragePool": 2, "Concat": 1, "Conv": 2}),
    "Concat of a negative axis": ("h = Concat<axis=-3>(p, q)", {"AveragePool": 2, "Concat": 1, "Conv": 2}),
    "scaled": ("i = Add(p, q)\nh = Mul(i, k)", {"Add": 1, "AveragePool": 2, "Conv": 2, "Mul": 1}),
    "scaled branch": ("i = Mul(k, q)\nh = Add(p, i)", {"Add": 1, "AveragePool": 2, "Conv": 2}),
    "residual": ("o = Relu(v2)\nh = Add(p, o)", {"Add": 1, "AveragePool": 2, "Conv": 1, "Relu": 1}),
    "dense": ("o = Relu(v2)\nh = Concat<axis=1>(o, p)", {"AveragePool": 2, "Concat": 1, "Conv": 1, "Relu": 1}),
}


@pytest.mark.parametrize(("join", "expected"), JOINS.values(), ids=JOINS)
def test_pooling_distributes_over_a_join(join, expected):
    branches = TWO if "q" in join.replace("Concat", "") else TWO.splitlines()[0] + "\n"
    constants, inputs = {**POINTWISE, "k": (32, 1, 1)}, "float[1,16,12,12] x, float[1,32,12,12] v2"
    model = graph(f"{branches}{join}\ny = {POOL}(h)", constants, inputs=inputs)
    assert operators(rewrite(model, branches.count("Conv")).graph) == expected


def test_an_operand_of_lower_rank_is_not_pooled():
    body = f"p = Mul(x, two)\nq = Conv<pads=[1,1,1,1]>(p, w)\nh = Add(q, x)\ny = {POOL}(h)"
    model = graph(body, {"two": np.full((1, 1, 1, 1), 2, "f"), "w": (16, 16, 3, 3)}, inputs="float[16,12,12] x")
    result = convpool.optimize(model, check=0)
    assert not result.changed and "spatial sizes of the operands" in result.report.sites[0].reason


def test_long_ways_to_the_pooling_and_to_a_constant():
    count = 2000
    chain = "c0 = Relu(x)\n" + "".join(f"c{i + 1} = Add(c{i}, x)\n" for i in range(count))
    same = "w0 = Identity(w)\n" + "".join(f"w{i + 1} = Identity(w{i})\n" for i in range(count))
    body = f"{chain}{same}p = Conv<pads=[1,1,1,1]>(x, w{count})\nh = Add(p, c{count})\ny = {POOL}(h)"
    assert convpool.optimize(graph(body, {"w": (16, 16, 3, 3)}), lowering="direct", check=1).report.summary.rewritten == 1


UNPADDED = {  # poolings whose auto_pad or ceil_mode changes nothing, and the map they are of
    "SAME as TensorFlow writes it": ('kernel_shape=[2,2], strides=[2,2], auto_pad="SAME_UPPER"', "12,12"),
    "SAME of one element, open size": ('kernel_shape=[1,1], auto_pad="SAME_LOWER"', "H,W"),
    "ceil_mode without strides, open size": ("kernel_shape=[2,2], ceil_mode=1", "H,W"),
    "ceil_mode and whole windows": ("kernel_shape=[3,2], strides=[3,2], ceil_mode=1", "12,12"),
}


@pytest.mark.parametrize(("attributes", "size"), UNPADDED.values(), ids=UNPADDED)
def test_padding_that_is_none(attributes, size):
    model = graph(CONV + f"y = AveragePool<{attributes}>(h)", inputs=f"float[1,16,{size}] x")
    (site,) = convpool.optimize(model, check=1).report.sites
    if "strides" in attributes:
        assert site.status == "rewritten"
    else:  # exact, and no gain
        assert "saves too little" in site.reason or "one element" in site.reason


GLOBAL = {
    "GlobalAveragePool": "y = GlobalAveragePool(h)",
    "ReduceMean": "y = ReduceMean<axes=[2,3]>(h)",
    "negative axes": "y = ReduceMean<axes=[-1,-2], keepdims=1>(h)",
}


@pytest.mark.parametrize("name", GLOBAL)
def test_mean_over_the_feature_map(name):
    model = graph("h = Conv(x, w)\n" + GLOBAL[name], {"w": (64, 16, 1, 1)}, inputs="float[1,16,8,8] x")
    assert operators(rewrite(model, 1).graph) == {"Conv": 1, "GlobalAveragePool": 1}
    assert operators(rewrite(model, 1, "convavgpool").graph) == {"ConvAvgPool": 1}


def test_mean_over_the_feature_map_of_a_sum():
    """Its windows are as large as the map, which no 1x1 convolution has to be behind."""
    model = graph("p = Conv(x, w)\nq = Conv(z, w)\nh = Add(p, q)\ny = GlobalAveragePool(h)", inputs=TWO_IMAGES)
    assert operators(rewrite(model, 2).graph) == {"Add": 1, "AveragePool": 2, "Conv": 2}


def test_global_mean_of_open_size_behind_a_pointwise_convolution():
    model = graph("h = Conv(x, w)\ny = GlobalAveragePool(h)", {"w": (64, 16, 1, 1)}, inputs="float[N,16,H,W] x")
    assert operators(rewrite(model, 1, "convavgpool").graph) == {"Conv": 1, "GlobalAveragePool": 1}


@pytest.mark.parametrize("pads", [[0, 0, 0, 0], [1, 0, 1, 1]])
def test_fuse_pool_conv(pads):
    pool = f"AveragePool<kernel_shape=[2,3], strides=[2,3], pads={pads}, count_include_pad=1>"
    model = graph(f"h = {pool}(x)\ny = Conv<pads=[1,1,1,1]>(h, w, b)", {"b": (32,)})
    assert operators(rewrite(model, 0).graph) == {"AveragePool": 1, "Conv": 1}
    assert operators(rewrite(model, 0, "convavgpool").graph) == {"AveragePool": 1, "Conv": 1}
    result = rewrite(model, 1, "convavgpool", enable="fuse_pool_conv")
    assert operators(result.graph) == {"ConvAvgPool": 1}
    assert list(result.graph.node[0].input)[2] == "b"


def test_numbers_of_the_operator():
    model = graph("h = Conv<pads=[1,2,1,1], strides=[2,1]>(x, w)\ny = " + POOL + "(h)", opset=19)
    node = rewrite(model, 1, "convavgpool", target="tensorrt").graph.node[-1]
    assert {item.name: list(item.ints) for item in node.attribute if item.ints} == {
        "pool_kernel_shape": [2, 2], "pool_strides": [1, 1], "pool_pads": [1, 1, 1, 1], "pool_dilations": [2, 1],
        "kernel_shape": [3, 3], "strides": [4, 2], "pads": [0, 1, 0, 0], "dilations": [1, 1],
        "weight_perm": [0, 3, 1, 2],
    }  # fmt: skip
    assert {item.name: item.i for item in node.attribute if item.type == 2} == {"group": 1}
    assert {item.name: item.s for item in node.attribute if item.type == 3} == {"plugin_version": b"1", "plugin_namespace": b""}


def test_excluded_by_name():
    model = graph(PAIR)
    model.graph.node[0].name, model.graph.node[1].name = "block/conv", "block/pool"
    for pattern in ("block/*", "*/pool", "block/conv"):
        assert operators(rewrite(model, 0, exclude=[pattern]).graph) == DIRECT
    assert operators(rewrite(model, 1, "fused", exclude=["conv"]).graph) == {"Conv": 1}


@pytest.mark.parametrize("pattern", ["p", "q", "y"])
def test_any_excluded_convolution_of_a_join_keeps_it(pattern):
    model = graph(f"p = Conv(x, w)\nq = Conv(x, u)\nh = Add(p, q)\ny = {POOL}(h)", {"u": (32, 16, 3, 3)})
    result = convpool.optimize(model, check=0, exclude=pattern)
    assert not result.changed and [site.status for site in result.report.sites] == ["excluded"]


@pytest.mark.parametrize(
    ("conv", "shape", "sizes", "in_tensorrt"),
    [
        ("Conv<group=2, pads=[1,1,1,1]>(x, w)", (16, 8, 3, 3), "12,12", "fused"),
        ("Conv<group=2>(x, w)", (16, 8, 1, 1), "12,12", None),
        ("Conv<pads=[1,1,1,1,1,1]>(x, w)", (16, 16, 3, 3, 3), "32,32,32", "fused"),
        ("Conv(x, w)", (32, 16, 1, 1, 1), "32,32,32", None),
    ],
    ids=["groups", "pointwise groups", "3-D", "pointwise 3-D"],
)
def test_what_the_plugin_has_no_fast_kernel_for(conv, shape, sizes, in_tensorrt):
    rank, given = len(shape) - 2, {"w": shape}
    pool = f"AveragePool<kernel_shape={[2] * rank}, strides={[2] * rank}>"
    types = {"inputs": f"float[1,16,{sizes}] x", "outputs": f"float[{','.join('abcde'[: rank + 2])}] y"}
    model = graph(f"h = {conv}\ny = {pool}(h)", given, **types)
    for options in ({}, {"target": "cpu"}, {"lowering": "auto"}):
        site = convpool.optimize(model, check=0, **options).report.sites[0]
        assert site.status == "rewritten" and site.lowering in ("direct", "fused")
    assert operators(rewrite(model, 1, "convavgpool").graph) == {"AveragePool": 1, "Conv": 1}
    kept = convpool.optimize(model, target="tensorrt").report.sites[0]
    assert kept.lowering == in_tensorrt
    assert in_tensorrt or kept.status == "rejected" and "for which the plugin has kernels" in kept.reason
    body = f"h = Conv{'<group=2>' if 'group' in conv else ''}(x, w)\ny = GlobalAveragePool(h)"
    whole = graph(body, {"w": (*shape[:2], *[1] * rank)}, inputs=f"float[1,16{',12' * rank}] x", outputs=types["outputs"])
    assert operators(rewrite(whole, 1, "convavgpool").graph) == {"Conv": 1, "GlobalAveragePool": 1}
    first = graph(f"h = {pool}(x)\ny = {conv.replace('(x', '(h')}", given, **types)
    kept = convpool.optimize(first, enable="fuse_pool_conv")
    assert not kept.changed and "expected 1, for which" in kept.report.sites[0].reason.replace("at most 2", "1")


@pytest.mark.parametrize(("sizes", "operator"), [("8,8", True), ("5,13", False)], ids=["64", "65"])
@pytest.mark.parametrize("target", ["any", "tensorrt", "cuda"])
def test_a_window_of_more_than_64_elements_is_no_node(sizes, operator, target):
    """The plugin's kernels sum a window in one thread: a global mean over a large map would take far longer than before."""
    whole = graph("h = Conv(x, w)\ny = GlobalAveragePool(h)", {"w": (64, 16, 1, 1)}, inputs=f"float[1,16,{sizes}] x")
    result = convpool.optimize(whole, target=target)
    found = operators(result.model.graph)
    assert ("ConvAvgPool" in found, "GlobalAveragePool" in found) == (operator, not operator)
    assert [site.lowering for site in result.report.sites] == ["convavgpool" if operator else "direct"]


SLOW = {  # weights, size, window, opset: for a CPU, TensorRT, onnxruntime's CUDA provider, any
    "three axes in float32": ((4, 48, 3, 3, 3), 16, 2, 19, ["fused", None, "direct", None]),
    "few results": ((3, 64, 3, 3), 24, 4, 17, ["fused", None, None, None]),
    "more": ((3, 64, 3, 3), 96, 4, 17, ["fused", "fused", "fused", "fused"]),
    "a large window": ((16, 16, 3, 3), 24, 24, 17, ["direct", None, None, "direct"]),
    "windows that overlap": ((16, 16, 3, 3), 8, 8, 17, ["direct", None, None, "direct"]),
    "smaller ones": ((16, 16, 3, 3), 7, 7, 17, ["direct", "convavgpool", "convavgpool", "convavgpool"]),
}  # fmt: skip


@pytest.mark.parametrize(("shape", "size", "window", "opset", "expected"), SLOW.values(), ids=SLOW)
def test_forms_that_are_slow_on_a_gpu_are_for_a_cpu(shape, size, window, opset, expected):
    """Such took up to 28 times as long as the original (decision 009)."""
    rank, given = len(shape) - 2, {"w": shape}
    pool = f"AveragePool<kernel_shape={[window] * rank}, strides={[window] * rank}>"
    body, inputs = f"h = Conv<pads={[1] * 2 * rank}>(x, w)\ny = {pool}(h)", f"float[1,{shape[1]}{f',{size}' * rank}] x"
    model = graph(body, given, inputs=inputs, outputs=f"float[{','.join('abcde'[: rank + 2])}] y", opset=opset)
    sites = [convpool.optimize(model, check=0, target=name).report.sites[0] for name in ("cpu", "tensorrt", "cuda", "any")]
    assert [site.lowering for site in sites] == expected, [site.reason for site in sites]
    kept = [site.reason for site in sites if site.status == "rejected"]
    assert all("for this target" in reason or "saves too little as fused" in reason for reason in kept)
    asked = convpool.optimize(model, check=0, target="cuda", lowering=expected[0]).report.sites[0]
    assert asked.lowering == expected[0]  # a form that is asked for is taken


@pytest.mark.parametrize(("m", "c", "group"), [(16, 8, 2), (16, 1, 16), (32, 8, 2), (24, 12, 2)])
def test_groups_that_tensorrt_has_no_kernel_for_stay_there(m, c, group):
    """Where a group's channels and outputs differ, or are no power of two, one fused convolution took up to 3.1 times as long."""
    body = f"h = Conv<pads=[1,1,1,1], group={group}>(x, w)\ny = {POOL}(h)"
    model = graph(body, {"w": (m, c, 3, 3)}, inputs=f"float[1,{c * group},16,16] x")
    sites = [convpool.optimize(model, check=0, target=name).report.sites[0] for name in ("tensorrt", "cuda")]
    assert [site.lowering for site in sites] == ["fused" if c == m // group and c != 12 else None, "fused"]
    assert sites[0].lowering or f"got [{c}, {m // group}], expected the same power of two" in sites[0].reason


@pytest.mark.parametrize("disable", [(), "plain_conv"])
@pytest.mark.parametrize(("batch", "given", "taken"), [("N", 8, 1), ("N", 4, 0), ("N", 0, 0), ("8", 0, 1), ("0", 0, 0)])
def test_images_on_three_axes_count_in_tensorrt_as_a_caller_gives_them(batch, given, taken, disable):
    body = f"h = Conv<pads=[1,1,1,1,1,1]>(x, w)\ny = {POOL.replace('2,2', '2,2,2')}(h)"
    inputs, outputs = f"float[{batch},16,16,16,16] x", "float[a,b,c,d,e] y"
    model = graph(body, {"w": (16, 16, 3, 3, 3)}, inputs=inputs, outputs=outputs)
    shapes = {"x": [given, 16, 16, 16, 16]} if given else {}
    found = convpool.optimize(model, check=0, target="tensorrt", input_shapes=shapes, disable=disable).report.sites[0]
    assert found.lowering == "fused" if taken else "of all images; got" in found.reason


@pytest.mark.parametrize(("window", "pairs"), [([8, 8], 1), ([5, 13], 0)], ids=["64", "65"])
def test_fuse_pool_conv_takes_windows_of_at_most_64_elements(window, pairs):
    pool = f"AveragePool<kernel_shape={window}, strides={window}>"
    model = graph(f"h = {pool}(x)\ny = Conv(h, w)", {"w": (32, 16, 1, 1)}, inputs="float[1,16,16,26] x")
    rewrite(model, pairs, "convavgpool", enable="fuse_pool_conv")


def test_maps_beside_a_convolution_count_with_their_own_channels():
    """A second run, which sees the Concats joined, would find another cost."""
    body, given, maps = ["m0 = Relu(x)"], {"z": (64, 8, 3, 3)}, ["m0"]
    for j in (1, 2, 3):
        body += [f"q{j} = Concat<axis=1>({', '.join(maps)})"] if j > 1 else []
        body += [f"r{j} = Relu({f'q{j}' if j > 1 else 'm0'})", f"m{j} = Conv(r{j}, w{j})"]
        given[f"w{j}"] = (8, 8 * j, 1, 1)
        maps.append(f"m{j}")
    body += [f"c = Concat<axis=1>({', '.join(maps)})", f"y = {POOL}(c)", "h = Conv<pads=[1,1,1,1]>(x, z)", f"k = {POOL}(h)"]
    shapes = {"inputs": "float[1,8,8,8] x", "outputs": "float[a,b,c,d] y, float[a,e,c,d] k"}
    result = convpool.optimize(graph("\n".join(body), given, **shapes))
    assert result.changed and not convpool.optimize(result.model).changed


def test_a_wide_map_beside_a_convolution_is_pooled_before_and_after():
    """Its pooling is no cost of the rewrite."""
    given = {"w": (8, 16, 3, 3)}
    shapes = {"inputs": "float[1,16,32,32] x, float[1,64,32,32] r", "outputs": "float[a,b,c,d] y"}
    model = graph(f"h = Conv<pads=[1,1,1,1]>(x, w)\nc = Concat<axis=1>(h, r)\ny = {POOL}(c)", given, **shapes)
    assert operators(rewrite(model, 1, "direct").graph) == {"AveragePool": 2, "Concat": 1, "Conv": 1}


def test_pairs_that_share_a_pooling_are_rewritten_one_by_one():
    """A pooling that a convolution on either side could take."""
    model = graph(f"p = Conv<pads=[1,1,1,1]>(x, w)\nq = {POOL}(p)\ny = Conv(q, v)", {"v": (8, 32, 3, 3)})
    for given in ({}, {"enable": "fuse_pool_conv"}, {"enable": "fuse_pool_conv", "lowering": "fused"}):
        result = convpool.optimize(model, check=1, **given)
        assert result.changed and operators(result.model.graph).get("AveragePool", 0) == 0


@pytest.mark.parametrize("behind", ["g = Mul(h, k)", "g = BatchNormalization(h, k1, b1, b1, k1)"])
def test_a_computed_bias_is_scaled_too(behind):
    """Nothing may be folded into the weights alone."""
    body = f"h = Conv<pads=[1,1,1,1]>(x, w, bias)\n{behind}\ny = {POOL}(g)"
    constants = {"k": np.float32(3), "k1": (32,), "b1": np.full(32, 0.5, np.float32)}
    constants["k1"] = np.linspace(0.5, 2, 32, dtype=np.float32)
    model = graph(body, constants, inputs="float[1,16,12,12] x, float[32] bias")
    for lowering in ("convavgpool", "direct", "fused", "auto"):
        assert_close(model, convpool.optimize(model, check=0, lowering=lowering).model, rtol=1e-5)


@pytest.mark.parametrize(("target", "form"), [("any", "direct"), ("tensorrt", None), ("cuda", None)])
def test_grouped_pairs_of_computed_weights_stay_where_a_gpu_runs_them(target, form):
    """Such weights cannot be fused, and an AveragePool and a Conv are slower there."""
    body = PAIR.replace("pads=", "group=16, pads=").replace("(x, w)", "(x, u)")
    (site,) = convpool.optimize(graph(body, inputs="float[1,16,12,12] x, float[32,1,3,3] u"), target=target, check=0).report.sites
    assert site.lowering == form
