# SPDX-License-Identifier: Apache-2.0
"""SiLU, and scale and shift by image: what fuses, and what stays and why."""

import numpy as np
import pytest

import convpool
from convpool.check.session import make_session
from convpool.ir import schema
from convpool.ir.model import LoadedModel
from models.generators import generate
from tests.support.models import graph, operators

POOL = "AveragePool<kernel_shape=[2,2], strides=[2,2]>"
PAIR = f"c = Conv<pads=[1,1,1,1]>(r, w)\ny = {POOL}(c)"
SILU = "a = Softsign(x)\ns = Sigmoid(a)\nr = Mul(a, s)"
MODULATED = "a = Softsign(x)\nm = Mul(a, g)\nn = Add(m, t)\nr = Relu(n)"
WEIGHTS = {"k": (1, 16, 1, 1), "j": (1, 16, 1, 1)}
COLUMNS = "float[2,16,8,8] x, float[2,16,1,1] g, float[2,16,1,1] t"


def fused(body: str, target: str = "cuda", inputs: str = COLUMNS, **options):
    """The result for a model, and its operators; both models give the same."""
    model = graph(body, WEIGHTS, inputs=inputs)
    result = convpool.optimize(model, target=target, check=0, **options)
    rng = np.random.default_rng(0)
    feeds = {
        value.name: rng.standard_normal([dim.dim_value for dim in value.type.tensor_type.shape.dim]).astype(np.float32)
        for value in model.graph.input
    }
    y, z = (make_session(LoadedModel(m, None, 0), optimize=False).run(None, feeds) for m in (model, result.model))
    for before, after in zip(y, z, strict=True):
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-5 * np.abs(before).max())
    return result, operators(result.model.graph)


def reasons(result) -> str:
    return repr(result.report.sites)


@pytest.mark.parametrize("product", ["Mul(a, s)", "Mul(s, a)"])
@pytest.mark.parametrize("target", ["any", "tensorrt", "cuda"])
def test_a_silu_in_front_of_a_pair_is_its_prologue(target, product):
    result, found = fused(f"{SILU.replace('Mul(a, s)', product)}\n{PAIR}", target, "float[2,16,8,8] x")
    assert found == {"Softsign": 1, "SiluConvAvgPool": 1}
    assert {entry.domain: entry.version for entry in result.model.opset_import}[schema.DOMAIN] == schema.MODULATING_VERSION


def test_a_map_in_front_of_a_silu_goes_with_it():
    body = "q = Softsign(x)\nb = Mul(q, k)\na = Add(b, j)\ns = Sigmoid(a)\nr = Mul(a, s)\n"
    assert fused(body + PAIR, inputs="float[2,16,8,8] x")[1] == {"Softsign": 1, "AffineSiluConvAvgPool": 1}


def test_a_silu_behind_a_pair_is_its_epilogue():
    body = PAIR.replace("(r,", "(x,").replace("y =", "p =") + "\ns = Sigmoid(p)\ny = Mul(p, s)"
    assert fused(body, inputs="float[2,16,8,8] x")[1] == {"ConvAvgPoolSilu": 1}


def test_a_silu_whose_input_is_read_too_is_no_epilogue():
    body = PAIR.replace("(r,", "(x,").replace("y =", "p =") + "\ns = Sigmoid(p)\nq = Mul(p, s)\ny = Concat<axis=1>(q, p)"
    assert fused(body, inputs="float[2,16,8,8] x")[1] == {"ConvAvgPool": 1, "Sigmoid": 1, "Mul": 1, "Concat": 1}


@pytest.mark.parametrize(
    "body",
    [
        "a = Softsign(x)\ns = Sigmoid(x)\nr = Mul(a, s)",  # of another tensor
        "a = Softsign(x)\ns = HardSigmoid(a)\nr = Mul(a, s)",
    ],
)
def test_a_product_that_is_no_silu_stays(body):
    result, found = fused(f"{body}\n{PAIR}", inputs="float[2,16,8,8] x")
    assert found["ConvAvgPool"] == found["Mul"] == 1
    assert "two that vary over space" in reasons(result)


def test_a_sigmoid_that_is_read_too_stays():
    result, found = fused(
        f"{SILU}\n{PAIR.replace('y =', 'p =')}\nq = {POOL}(s)\ny = Concat<axis=1>(p, q)", inputs="float[2,16,8,8] x"
    )
    assert found["Sigmoid"] == found["Mul"] == found["ConvAvgPool"] == 1


@pytest.mark.parametrize("target", ["any", "tensorrt", "cuda"])
def test_a_map_by_image_is_the_prologue(target):
    assert fused(f"{MODULATED}\n{PAIR}", target)[1] == {"Softsign": 1, "ModulatedReluConvAvgPool": 1}


def test_constants_before_a_map_by_image_change_factor_and_summand():
    body = MODULATED.replace("a = Softsign(x)", "q = Softsign(x)\nb = Mul(q, k)\na = Add(b, j)")
    assert fused(f"{body}\n{PAIR}")[1] == {"Softsign": 1, "Mul": 2, "Add": 1, "ModulatedReluConvAvgPool": 1}


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
    _, found = fused(f"{MODULATED.replace(old, new)}\n{PAIR}", inputs=inputs)
    assert found["ReluConvAvgPool"] == 1 and sum(found.values()) == 4


def test_a_product_that_is_read_too_keeps_the_map():
    body = f"{MODULATED}\n{PAIR.replace('y =', 'p =')}\nq = {POOL}(m)\ny = Concat<axis=1>(p, q)"
    assert fused(body)[1]["ReluConvAvgPool"] == 1


@pytest.mark.parametrize("target", ["tensorrt", "cuda"])
@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        ("vae_decoder", {}, "AffineSilu"),
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
    model = graph(
        f"{before}\n{LARGE}", given, inputs="float[64,64,66,64] x", outputs="float[64,64,66,64] y, float[64,64,32,31] z"
    )
    kinds = operators(convpool.optimize(model, target="tensorrt", check=0).model.graph)
    assert ("AffineSiluConvAvgPool" in kinds) == taken and ("Sigmoid" in kinds) != taken
    assert "Sigmoid" in operators(convpool.optimize(model, target="tensorrt", disable="norm_conv", check=0).model.graph)


def test_a_convolution_behind_a_silu_joins_the_chain_between_other_nodes():
    """Both layouts cost the same there, but the kernels do the SiLU as they turn X."""
    found = convpool.optimize(generate("vae_decoder", batch=1), target="cuda", check=1)
    kinds = operators(found.model.graph)
    assert kinds["AffineSiluConvAvgPoolAdd"] == 4 and kinds["AffineSiluConvAvgPool"] == 5 and "Conv" not in kinds
    assert "Sigmoid" not in kinds and found.report.verification.passed
