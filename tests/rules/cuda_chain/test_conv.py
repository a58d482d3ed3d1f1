# SPDX-License-Identifier: Apache-2.0
"""With --target cuda: convolutions and poolings between pairs that become nodes of a chain."""

import numpy as np
import onnx
import pytest

import convpool
from convpool.options import options_for
from convpool.rules.base import Context, Reject
from convpool.rules.cuda_chain import conv as chain_conv
from tests.support.cuda_target import TAIL, for_cuda, wide
from tests.support.models import graph, operators, weights
from tests.support.rewriting import POOL
from tests.support.scopes import index

CONVOLUTIONS = {  # weights and their type: whether the kernels take such a convolution in a chain of nodes
    ((32, 16, 3, 3), "float32"): True,
    ((32, 12, 3, 3), "float32"): True,
    ((32, 6, 3, 3), "float32"): False,
    ((32, 12, 3, 3), "float16"): False,
    ((32, 8, 3, 3), "float16"): True,
    ((32, 16, 3, 3), "float64"): False,
    ((32, 3, 3, 3), "float32"): True,
    ((32, 3, 5, 5), "float32"): False,
    ((32, 2, 4, 8), "float32"): True,
    ((32, 1, 5, 13), "float32"): False,
    ((32, 5, 1, 1), "float32"): False,
}


@pytest.mark.parametrize(("shape", "kind"), CONVOLUTIONS)
def test_convolutions_of_a_chain(shape, kind):
    """Take 16 bytes of channels, or an image: 4 channels and 64 weights per filter at most."""
    name = {"float32": "float", "float16": "float16", "float64": "double"}[kind]
    model = graph(
        "y = Conv(x, k)", {"k": np.ones(shape, kind)}, inputs=f"{name}[1,{shape[1]},16,16] x", outputs=f"{name}[a,b,c,d] y"
    )
    context = Context(options_for("cuda"), 17, lambda name: False, {})
    assert isinstance(chain_conv._conv(index(model)[0], 0, context), Reject) != CONVOLUTIONS[shape, kind]


def test_channels_that_the_kernels_read_at_once():
    kinds = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE)
    assert [chain_conv.chunk(kind) for kind in kinds] == [4, 8, 8, 2]


def between(pooling: str, channels: int = 32, kind: str = "float") -> onnx.ModelProto:
    """A pair, a pooling from a to b, and another pair; many pairs read b, so that channels last cost less."""
    readers = "\n".join(f"t{i} = Conv<pads=[1,1,1,1]>(q, k)\ny{i} = {POOL}(t{i})" for i in range(3))
    dtype = np.float16 if kind == "float16" else np.float32
    constants = {
        "w": weights((channels, 16, 3, 3)).astype(dtype) / 12,
        "k": weights((8 if channels < 64 else 64, channels, 3, 3)).astype(dtype) / 17,
    }
    text = f"{TAIL}\na = Softsign(p)\n{pooling}\nq = Softsign(b)\n{readers}"
    outputs = ", ".join(f"{kind}[A,B,C,D] y{i}" for i in range(3))
    return graph(text, constants, inputs=f"{kind}[4,16,64,64] x", outputs=outputs)


@pytest.mark.parametrize(
    ("attributes", "channels", "kind", "taken"),
    [
        ("kernel_shape=[2,2], strides=[2,2]", 32, "float", True),
        ("kernel_shape=[4,2], strides=[4,2]", 32, "float", True),
        ('kernel_shape=[2,2], strides=[2,2], auto_pad="VALID"', 32, "float", True),
        ("kernel_shape=[2,2], strides=[2,2]", 36, "float", True),
        ("kernel_shape=[2,2], strides=[2,2]", 34, "float", False),
        ("kernel_shape=[2,2], strides=[2,2]", 40, "float16", True),
        ("kernel_shape=[2,2], strides=[2,2]", 36, "float16", False),
        ("kernel_shape=[2,2], strides=[2,2]", 1024, "float", True),
        ("kernel_shape=[2,2], strides=[2,2]", 1032, "float", False),
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
    model = wide(
        f"{text}t = Conv<pads=[1,1,1,1]>(q, k)\ny = {POOL}(t)", {"double": weights((32, 32, 3, 3)).astype(np.float64) / 17}
    )
    sites = convpool.optimize(model, target="cuda", check=0).report.sites
    assert [site.reason for site in sites if site.conv == "b"] == [
        "Conv 'b': type; got DOUBLE, expected float16, bfloat16 or float32"
    ]
