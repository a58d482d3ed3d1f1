# SPDX-License-Identifier: Apache-2.0
"""Real networks with the target cuda: what is left of them, by operator, and that it computes the same."""

from collections import Counter

import pytest

import convpool
from convpool.ir import schema
from models import generators

WANTED = {
    "sngan64": {
        "ConvAvgPoolRelu": 1,
        "ConvAvgPool": 6,
        "ConvAvgPoolAdd": 4,
        "ReluConvAvgPoolRelu": 4,
        "ConvAvgPoolAddRelu": 1,
        "Flatten": 1,
    },
    "wgan_gp": {
        "ConvAvgPoolRelu": 1,
        "ConvAvgPool": 3,
        "ConvAvgPoolAdd": 3,
        "ReluConvAvgPoolRelu": 3,
        "ConvAvgPoolAddRelu": 1,
        "Flatten": 1,
    },
    "stargan_v2": {
        "ConvAvgPool": 8,
        "LeakyReluConvAvgPoolLeakyRelu": 6,
        "ConvAvgPoolAdd": 5,
        "ConvAvgPoolAddLeakyRelu": 1,
        "ConvAvgPoolLeakyRelu": 1,
        "Reshape": 1,
    },
    "biggan_small": {
        "ConvAvgPoolRelu": 1,
        "ConvAvgPool": 9,
        "ConvAvgPoolAdd": 6,
        "ReluConvAvgPoolRelu": 5,
        "ConvAvgPoolAddRelu": 1,
        "MaxPool": 2,
        "MatMul": 2,
        "Softmax": 1,
        "Reshape": 5,
        "Transpose": 2,
        "Flatten": 1,
    },
    "densenet121": {
        "Conv": 1,
        "BatchNormalization": 1,
        "Relu": 1,
        "MaxPool": 1,
        "Transpose": 1,
        "AffineReluConvAvgPoolRelu": 58,
        "ConvAvgPool": 58,
        "Concat": 58,
        "AffineReluConvAvgPool": 4,
        "Flatten": 1,
    },
    "igebm": {"ConvAvgPool": 4, "ConvAvgPoolLeakyRelu": 6, "ConvAvgPoolAddLeakyRelu": 6, "ReluConvAvgPool": 1, "Flatten": 1},
}
"""All nodes of the results.  Of BigGAN the attention's Transposes are the model's own; DenseNet's stands behind its MaxPool."""
NO_PAIR = ("vgg_average", "squeeze_excite", "resnet_d")
SMALL = [name for name in generators.names() if name.endswith("_small") and not name.startswith("condensenet")]


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in WANTED), ("wgan_gp", "float16"), ("igebm", "float16")]
)
def test_what_is_left(name, dtype):
    result = convpool.optimize(generators.generate(name, dtype=dtype), target="cuda", check=0)
    assert Counter(node.op_type for node in result.model.graph.node) == WANTED[name]
    images = [node for node in result.model.graph.node if schema.is_operator(node) and schema.layout_of(node) == 2]
    assert {node.input[0] for node in images} >= ({"image"} if name != "densenet121" else set())
    again = convpool.optimize(result.model, target="cuda", check=0)
    assert again.model.SerializeToString(deterministic=True) == result.model.SerializeToString(deterministic=True)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", SMALL)
def test_it_computes_the_same(name, dtype):
    result = convpool.optimize(generators.generate(name, dtype=dtype), target="cuda")
    assert result.changed and result.report.verification.passed


@pytest.mark.parametrize("name", NO_PAIR)
def test_without_a_pair_a_model_stays_byte_for_byte(name):
    model = generators.generate(name)
    result = convpool.optimize(model, target="cuda", check=0)
    assert not result.changed and result.model.SerializeToString() == model.SerializeToString()
