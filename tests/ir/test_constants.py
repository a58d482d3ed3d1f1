# SPDX-License-Identifier: Apache-2.0
"""Constants that exporters leave as small computations: which are computed, how deep, and how large they may be."""

import tracemalloc

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import convpool
from convpool.errors import ModelError
from convpool.ir import index as constants
from convpool.ir.index import folded
from tests.support.models import function_scope, graph, index, operators, weights
from tests.support.rewriting import DIRECT, PAIR, POOL, rewrite

CONV = "c = Conv<pads=[1,1,1,1]>(x, w)"
CHAINS = {
    "axes by Reshape": (
        "h = Conv(x, w)\nv = Constant<value_ints = [2, 3]>()\nn = Constant<value_ints = [-1]>()\n"
        "axes = Reshape(v, n)\ny = ReduceMean(h, axes)",
        {"w": (64, 16, 1, 1)},
        {"Conv": 1, "GlobalAveragePool": 1},
    ),
    "factor by Unsqueeze": (
        f"{CONV}\ni = Constant<value_ints = [1, 2]>()\nf = Unsqueeze(k, i)\nh = Mul(c, f)\ny = {POOL}(h)",
        {"k": (32,)},
        DIRECT,
    ),
    "pads by Concat, Reshape and Transpose": (
        f"c = Conv<pads=[1,1,1,1]>(x, w)\na = Concat<axis=0>(none, none)\nm = Reshape(a, two)\nt = Transpose(m)\n"
        f"p = Reshape(t, flat)\nq = Cast<to=7>(p)\nh = Pad(c, q)\ny = {POOL}(h)",
        {"none": [0, 0, 0, 0], "two": [4, 2], "flat": [-1]},
        DIRECT,
    ),
    "axes of a Pad": (
        f"q = Cast<to=7>(axes)\nc = Conv<pads=[1,1,1,1]>(x, w)\nh = Pad(c, none, , q)\ny = {POOL}(h)",
        {"none": [0, 0, 0, 0], "axes": np.array([2, 3], np.int32)},
        DIRECT,
    ),
    "bias by Expand": (
        f"b = Expand(zero, n)\nh = Conv<pads=[1,1,1,1]>(x, w, b)\ny = {POOL}(h)",
        {"zero": np.float32(0), "n": [32]},
        {**DIRECT, "Expand": 1},
    ),
    "parameters behind Identity": (
        f"c = Conv<pads=[1,1,1,1]>(x, w)\nv = Identity(g)\nh = BatchNormalization(c, g, b, b, v)\ny = {POOL}(h)",
        {"g": np.linspace(1, 2, 32, dtype=np.float32), "b": (32,)},
        DIRECT,
    ),
    "weights by an equalised learning rate": (
        f"v = Mul(w, k)\nh = Conv<pads=[1,1,1,1]>(x, v)\ny = {POOL}(h)",
        {"k": np.float32(0.1)},
        {**DIRECT, "Mul": 1},
    ),
}


@pytest.mark.parametrize(("body", "constants", "expected"), CHAINS.values(), ids=CHAINS)
def test_small_computations_count_as_constants(body, constants, expected):
    assert operators(rewrite(graph(body, constants, opset=18), 1).graph) == expected


# As torch.onnx writes the amounts of F.pad from opset 11 on: last axis first, filled up with zeros, turned round.
TORCH_PADS = (
    "n = Shape(amounts)\nm = Sub(eight, n)\nz = ConstantOfShape(m)\nf = Cast<to=7>(z)\n"
    "a = Concat<axis=0>(amounts, f)\nr = Reshape(a, rows)\ns = Slice(r, last, first, zero, back)\n"
    "t = Transpose<perm=[1,0]>(s)\nq = Reshape(t, flat)\np = Cast<to=7>(q)\n"
)
AMOUNTS = {
    "amounts": [1, 1, 1, 1], "eight": [8], "rows": [-1, 2], "last": [-1], "first": [-(2**63) + 1], "zero": [0],
    "back": [-1], "flat": [-1],
}  # fmt: skip


def same_pads(x: str, k: str) -> str:
    """Pads k of a strided convolution of 3x3, computed from the size of x as SAME is written by hand."""
    return f"""n{k} = Shape({x}) h{k} = Gather<axis=0>(n{k}, two) c{k} = Cast<to=1>(h{k}) d{k} = Div(c{k}, stride)
e{k} = Ceil(d{k}) i{k} = Cast<to=7>(e{k}) j{k} = Sub(i{k}, one) k{k} = Mul(j{k}, two) l{k} = Add(k{k}, three)
m{k} = Sub(l{k}, h{k}) t{k} = Max(m{k}, zero) {k} = Concat<axis=0>(zero, zero, zero, t{k}, zero, zero, zero, t{k})
"""


SAME = {"two": [2], "stride": np.array([2], np.float32), "one": [1], "three": [3], "zero": [0]}


@pytest.mark.parametrize("lowering", ["direct", "convavgpool"])
def test_pads_that_exporters_compute(lowering):
    result = rewrite(graph(f"{TORCH_PADS}d = Pad(x, p)\nh = Conv(d, w)\ny = {POOL}(h)", AMOUNTS), 1, lowering)
    assert not {"Pad", "Shape", "Slice", "Concat"} & operators(result.graph).keys()


def test_sizes_behind_pads_that_exporters_compute():
    """A mean over the map needs them, and so does ceil_mode."""
    for mean in ("GlobalAveragePool", "AveragePool<kernel_shape=[2,2], strides=[2,2], ceil_mode=1>"):
        model = graph(f"{TORCH_PADS}d = Pad(x, p)\no = Relu(d)\nh = Conv(o, w)\ny = {mean}(h)", AMOUNTS)
        rewrite(model, 1)
        (site,) = convpool.optimize(model, check=0).report.sites
        assert site.macs_before == 32 * 16 * 9 * 12 * 12


def test_sizes_behind_pads_that_follow_from_sizes():
    before = same_pads("x", "p") + "d = Pad(x, p)\ng = Conv<strides=[2,2]>(d, u)\nr = Relu(g)\n"
    body = same_pads("r", "q") + "e = Pad(r, q)\no = Relu(e)\nh = Conv(o, w)\ny = GlobalAveragePool(h)"
    model = graph(before + body, {**SAME, "u": (16, 16, 3, 3)}, inputs="float[1,16,24,24] x")
    onnx.checker.check_model(model, full_check=True)
    rewrite(model, 1)


SHAPED = {  # a node whose shape depends on values, the values, the shape of x
    "Expand(x, p)": ({"p": [1, 16, 12, 12]}, "1,16,12,1"),
    "Reshape(x, p)": ({"p": [1, 16, 12, 12]}, "1,16,144"),
    'Resize<mode="nearest">(x, , p)': ({"p": np.array([1, 1, 2, 2], np.float32)}, "1,16,6,6"),
    'Resize<mode="nearest">(x, , , p)': ({"p": [1, 16, 12, 12]}, "1,16,6,6"),
    'Resize<mode="nearest", coordinate_transformation_mode="tf_crop_and_resize">(x, p, , q)': (
        {"p": np.array([0, 0, 0, 0, 1, 1, 1, 1], np.float32), "q": [1, 16, 12, 12]},
        "1,16,6,6",
    ),
    "Slice(x, p, q, r, s)": ({"p": [0, 1], "q": [24, 24], "r": [2, 3], "s": [2, 2]}, "1,16,24,25"),
    "Squeeze(x, p)": ({"p": [0, 3]}, "1,1,16,1,12,12"),
    "Unsqueeze(x, p)": ({"p": [0]}, "16,12,12"),
    "Tile(x, p)": ({"p": [1, 1, 2, 3]}, "1,16,6,4"),
    "ReduceSum<keepdims=0>(x, p)": ({"p": [-1]}, "1,16,12,12,3"),
    "ReduceMean<keepdims=0>(x, p)": ({"p": [2]}, "1,16,5,12,12"),
}


@pytest.mark.parametrize("node", SHAPED)
def test_sizes_behind_operators_whose_values_are_computed(node):
    """Each value is the larger of two that are equal: onnx's inference does not compute it, and the mean needs the sizes."""
    values, shape = SHAPED[node]
    names = {name: f"{name}_known" for name in values}
    body = "".join(f"{name} = Max({known}, {known})\n" for name, known in names.items())
    body += f"d = {node}\no = Relu(d)\nh = Conv<pads=[1,1,1,1]>(o, weight)\ny = GlobalAveragePool(h)"
    given = {"weight": (32, 16, 3, 3), **{names[name]: value for name, value in values.items()}}
    model = graph(body, given, inputs=f"float[{shape}] x", opset=18)
    rewrite(model, 1)
    (site,) = convpool.optimize(model, check=0).report.sites
    assert site.macs_before == 32 * 16 * 9 * 12 * 12


def test_a_model_without_a_rewrite_keeps_its_chains():
    model = graph(f"{TORCH_PADS}d = Pad(x, p)\nh = Conv(d, w)\no = Relu(h)\ny = {POOL}(o)", AMOUNTS)
    result = convpool.optimize(model, check=0)
    assert result.report.sites and result.model.SerializeToString() == model.SerializeToString()


def test_pads_that_a_caller_gives_stay():
    body = f"{TORCH_PADS}d = Pad(x, p)\nh = Conv(d, w)\ny = GlobalAveragePool(h)"
    model = graph(body, {k: v for k, v in AMOUNTS.items() if k != "amounts"}, inputs="float[1,16,12,12] x, int64[4] amounts")
    (site,) = convpool.optimize(model, check=0).report.sites
    assert site.status == "rejected" and "unknown sizes" in site.reason


def test_a_pooling_with_ceil_mode_in_front_is_counted():
    """Take the shortcuts of ResNet-D."""
    pool = "AveragePool<kernel_shape=[2,2], strides=[2,2], ceil_mode=1>"
    model = graph(f"p = {pool}(x)\ny = Conv(p, v)", {"v": (32, 16, 1, 1)})
    (site,) = convpool.optimize(model, check=1, enable="fuse_pool_conv").report.sites
    assert (site.status, site.macs_before, site.macs_after) == ("rewritten", *[32 * 16 * 36] * 2)


def test_a_chain_from_an_input_is_no_constant():
    body = f"{CONV}\ni = Constant<value_ints = [1, 2]>()\nf = Unsqueeze(v, i)\nh = Mul(c, f)\ny = {POOL}(h)"
    model = graph(body, inputs="float[1,16,12,12] x, float[32] v", opset=18)
    assert operators(rewrite(model, 1).graph) == {**DIRECT, "Constant": 1, "Mul": 1, "Unsqueeze": 1}
    (scope,) = index(graph("u = Unsqueeze(k, a) g = Gather<axis=1>(u, k) y = Mul(g, g)", {"k": [0]}, inputs="int64[1] a"))
    assert scope.constant("g") is None  # it may be a matrix


# As exports of torch.nn.utils.spectral_norm compute them: W / (u' W v).
SPECTRAL = (
    "m = Reshape(raw, rows)\ns = MatMul(m, v)\nsigma = MatMul(u, s)\nk = Div(raw, sigma)\n"
    f"h = Conv<pads=[1,1,1,1]>(x, k)\ny = {POOL}(h)"
)
SPECTRAL_CONSTANTS = {"raw": (128, 16, 3, 3), "rows": [128, -1], "u": (128,), "v": (144,)}
FORMS = {"direct": {**DIRECT, "Reshape": 1, "MatMul": 2, "Div": 1}, "fused": {"Conv": 1}, "convavgpool": {"ConvAvgPool": 1}}


@pytest.mark.parametrize("lowering", FORMS)
def test_spectral_normalisation_is_computed_once(lowering):
    result = convpool.optimize(graph(SPECTRAL, SPECTRAL_CONSTANTS), lowering=lowering, check=1).model
    assert operators(result.graph) == FORMS[lowering]
    if lowering == "convavgpool":
        assert {tensor.name for tensor in result.graph.initializer} == {"k_channels_last", "h_bias"}


@pytest.mark.parametrize("dtype, op", [(np.float16, ""), (ml_dtypes.bfloat16, ""), (np.int8, ""), (np.float16, "Abs")])
def test_weights_stored_in_half_precision_are_constants(dtype, op):
    body = f"a = {op or 'Identity'}(stored)\nk = Cast<to=1>(a)\nh = Conv<pads=[1,1,1,1]>(x, k)\ny = {POOL}(h)"
    result = convpool.optimize(graph(body, {"stored": weights((128, 16, 3, 3)).astype(dtype)}), lowering="fused", check=1)
    kept = {**DIRECT, op or "Identity": 1, "Cast": 1}
    assert operators(result.model.graph) == (kept if op or dtype == np.int8 else {"Conv": 1})


def test_shape_arithmetic_may_stand_in_the_normalisation():
    body = SPECTRAL.replace("m = Reshape(raw, rows)", "both = Gather<axis=0>(table, zero)\nm = Reshape(raw, both)")
    model = graph(body, {**SPECTRAL_CONSTANTS, "table": np.array([[128, -1]]), "zero": np.array(0)})
    assert operators(convpool.optimize(model, lowering="fused", check=1).model.graph) == {"Conv": 1}


@pytest.mark.parametrize(
    "body, inputs",
    [
        (SPECTRAL, "float[1,16,12,12] x, float[128] u"),  # a caller may give another one
        (SPECTRAL.replace("k = Div(raw, sigma)", "d = Div(raw, sigma)\nk = Cast<to=1>(d)"), "float[1,16,12,12] x"),
        (SPECTRAL.replace("m = Reshape(raw, rows)", "r = RandomNormalLike(raw)\nm = Reshape(r, rows)"), "float[1,16,12,12] x"),
    ],
)
def test_weights_that_are_not_arithmetic_on_constants_stay_computed(body, inputs):
    model = graph(body, SPECTRAL_CONSTANTS, inputs=inputs)
    found = operators(convpool.optimize(model, check=0).model.graph)
    assert found["ConvAvgPool"] == found["Transpose"] == found["Div"] == 1
    fused = convpool.optimize(model, lowering="fused", check=0)
    assert fused.report.summary.rewritten == 0 and "weights; got computed" in fused.report.sites[0].reason


def test_what_else_reads_a_computed_weight_keeps_it():
    model = graph(f"{SPECTRAL}\nz = ReduceSum(k)", SPECTRAL_CONSTANTS, outputs="float[a,b,c,d] y, float[e,f,g,h] z")
    found = operators(rewrite(model, 1, lowering="convavgpool").graph)
    assert found == {"ConvAvgPool": 1, "Reshape": 1, "MatMul": 2, "Div": 1, "ReduceSum": 1}


@pytest.mark.parametrize("make", ["ConstantOfShape(n)", "Expand(zero, n)"])
def test_large_tensors_are_never_made(make):
    body = f"{PAIR}\nk = {make}\nj = Add(v, k)\nz = ReduceSum(j)"
    constants = {"n": [64, 1000, 1000], "zero": np.zeros(1, np.float32)}
    model = graph(body, constants, inputs="float[1,16,12,12] x, float v", outputs="float[a,b,c,d] y, float[e,f,g] z")
    tracemalloc.start()
    try:
        assert convpool.optimize(model, check=0).report.summary.rewritten == 1
        assert tracemalloc.get_traced_memory()[1] < 32_000_000  # the tensor has 256 MB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("kind", "field"), [(TensorProto.COMPLEX64, "float_data"), (TensorProto.COMPLEX128, "double_data")])
def test_complex_numbers_are_stored_as_two(kind, field):
    model = graph(PAIR)
    tensor = model.graph.initializer.add(name="c", data_type=kind, dims=[3])
    getattr(tensor, field).extend([1.0] * 6)
    assert convpool.optimize(model, check=0).changed
    getattr(tensor, field).append(1.0)
    with pytest.raises(ModelError, match="tensor 'c': data; got 7 stored values, expected 3"):
        convpool.optimize(model)


def test_what_the_reference_refuses_is_not_folded():
    node = helper.make_node("Reshape", ["a", "s"], ["y"])
    for shape, known in (([2, 3], True), ([4, 2], False)):
        tensor = folded(node, "y", {"a": np.arange(6.0), "s": np.array(shape)}, 17)
        assert (tensor is not None) == known
        assert tensor is None or np.array_equal(numpy_helper.to_array(tensor), np.arange(6.0).reshape(shape))


def test_weights_that_cannot_be_computed_are_no_constants(monkeypatch):
    asked = []

    def evaluate(model, name):
        asked.append(name)
        if len(asked) > 1:
            raise RuntimeError("no kernel")
        return np.arange(3.0)

    four = np.arange(4, dtype=np.float32)
    scope = constants.index_model(graph("y = Add(a, b)", {"a": four, "b": four + 1}), numpy_helper.to_array, evaluate)[0]
    found = scope.compute("y", [0])
    assert found is not None and found.array().tolist() == [0, 1, 2]
    assert scope.compute("y", [0]) is None and asked == ["y", "y"]
    for most in (7, 8):
        monkeypatch.setattr(constants, "MAX_WEIGHT_ELEMENTS", most)
        assert scope.compute("y", [0]) is None
    assert len(asked) == 3  # too large, and not asked for


def test_a_node_by_an_attribute_of_the_function_is_no_constant():
    body = "c = Constant<value_ints = [1]>() d = Concat<axis: int = @e>(c, c) f = Concat<axis = 0>(c, c) b = Reshape(a, f)"
    scope = function_scope(body)
    assert scope.constant("d") is None and scope.constant_ints("f") == (1, 1)
