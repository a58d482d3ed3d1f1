# SPDX-License-Identifier: Apache-2.0
"""A normalization of each image in front of a node, fused with what stands between."""

import numpy as np
import onnx
import pytest
from onnx import helper

import convpool
from convpool.ir import schema
from convpool.ir.model import load
from tests.support.models import graph, operators
from tests.support.rewriting import PAIR, POOL, assert_close, assert_stable

GROUPED = "f = Reshape(x, sizes)\ni = InstanceNormalization<epsilon=0.01>(f, e, d)\nt = Shape(x)\nq = Reshape(i, t)"
BEHIND = f"m = Mul(q, k)\na = Add(m, j)\nr = LeakyRelu<alpha=0.25>(a)\n{PAIR.replace('(x,', '(r,')}"
CONSTANTS = {
    "v": (32, 16, 1, 1),
    "sizes": np.array([0, 4, -1]),
    "same": np.array([2, 16, 8, 8]),
    "all": np.array([1, 4, -1]),
    "thirds": np.array([0, 4, 4, -1]),
    "e": np.arange(2, 6, dtype=np.float32) / 4,
    "d": np.arange(-1, 3, dtype=np.float32) / 4,
    "k": np.arange(3, 19, dtype=np.float32).reshape(16, 1, 1) / 8,
    "j": np.arange(-7, 9, dtype=np.float32).reshape(16, 1, 1) / 8,
    "o": np.arange(1, 17, dtype=np.float32) / 16,
}
KIND = "NormalizedLeakyReluConvAvgPool"


def run(body: str, target: str = "tensorrt", **options):
    """The model optimized for a target, and its operators; what it computes is the same, and a second run changes nothing."""
    model = graph(body, CONSTANTS, **{"inputs": "float[2,16,8,8] x", **options})
    result = convpool.optimize(model, target=target).model
    assert_close(model, result)
    assert_stable(result, target=target)
    return result, operators(result.graph)


@pytest.mark.parametrize("target", ["tensorrt", "cuda"])
@pytest.mark.parametrize(
    ("before", "groups"),
    [
        (GROUPED, 4),
        (GROUPED.replace("t = Shape(x)\n", "").replace("Reshape(i, t)", "Reshape(i, same)"), 4),
        ("q = InstanceNormalization<epsilon=0.01>(x, o, o)", 16),
    ],
)
def test_a_normalization_of_each_image_is_fused_with_what_stands_between(before, groups, target):
    result, found = run(f"{before}\n{BEHIND}", target)
    parts = schema.parts_of(result.graph.node[0])
    assert found == {KIND: 1} and result.graph.node[0].input[0] == "x"
    assert (parts.norm_groups, parts.epsilon) == (groups, np.float32(0.01))
    assert {entry.domain: entry.version for entry in result.opset_import}[schema.DOMAIN] == schema.NORMALIZING_VERSION


@pytest.mark.parametrize("size", ["8", "H"])
def test_of_any_batch_and_size(size):
    """The batch keeps its name, by which the residual is known to have the result's shape."""
    body = f"z = Identity(sizes)\n{GROUPED.replace('sizes', 'z')}\n{BEHIND.replace('y =', 'p =')}\ny = Add(p, l)"
    result, found = run(f"u = {POOL}(x)\nl = Conv(u, v)\n{body}", inputs=f"float[N,16,{size},8] x")
    dims = load(result).inferred.graph.output[0].type.tensor_type.shape.dim
    assert (dims[0].dim_param, dims[1].dim_value, dims[3].dim_value) == ("N", 32, 4)
    assert found == {f"{KIND}Add": 1, "AveragePool": 1, "Conv": 1}


def test_a_group_normalization_by_channel_is_fused():
    body = f"q = GroupNormalization<num_groups=4>(x, o, o)\n{BEHIND}"
    model = graph(body, CONSTANTS, inputs="float[2,16,8,8] x", opset=21)
    model.graph.value_info.append(helper.make_tensor_value_info("q", onnx.TensorProto.FLOAT, [2, 16, 8, 8]))  # as by exporters
    result = convpool.optimize(model, target="cuda").model
    assert operators(result.graph) == {KIND: 1} and schema.parts_of(result.graph.node[0]).norm_groups == 4
    assert_close(model, result)


def test_without_a_map_behind_it_scale_and_shift_are_its_own():
    body = f"q = InstanceNormalization(x, o, o)\n{PAIR.replace('(x,', '(q,')}"
    result, found = run(body)
    scale = next(item for item in result.graph.initializer if item.name == result.graph.node[0].input[3])
    assert found == {"NormalizedConvAvgPool": 1} and list(scale.dims) == [16]


@pytest.mark.parametrize(
    ("old", "new", "options"),
    [
        ("Reshape(x, sizes)", "Reshape(x, all)", {}),  # images are not apart
        ("Reshape(x, sizes)", "Reshape(x, thirds)", {}),  # of rank 4: groups within groups
        ("(f, e, d)", "(n, e, d)", {"of": "n = Relu(f)"}),  # another node between
        ("(f, e, d)", "(f, c, d)", {"of": "c = Softsign(e)"}),  # a computed scale
        ("q = Reshape(i, t)", "b = Reshape(i, t)\nq = Transpose<perm=[0,1,3,2]>(b)", {}),
        ("epsilon=0.01", "epsilon=-0.001", {}),  # which the library refuses
        ("", "", {"opset": 14}),  # whose function would need CastLike
        ("", "", {"outputs": "float[a,b,c,d] y, float[2,4,256] i"}),
        ("", "", {"outputs": "float[a,b,c,d] y, float[2,16,8,8] q"}),
    ],
)
def test_what_is_no_such_normalization_or_is_read_too_stays(old, new, options):
    before = GROUPED.replace(old, new) if old else GROUPED
    first, *rest = before.split("\n")
    before = "\n".join([first, *([options["of"]] if "of" in options else []), *rest])
    found = run(f"{before}\n{BEHIND}", **{key: value for key, value in options.items() if key != "of"})[1]
    assert found["InstanceNormalization"] == 1 and KIND not in found


def test_a_map_by_image_behind_it_keeps_it():
    body = "q = InstanceNormalization(x, o, o)\nm = Mul(q, f)\na = Add(m, s)\nr = Relu(a)\n" + PAIR.replace("(x,", "(r,")
    found = run(body, inputs="float[2,16,8,8] x, float[2,16,1,1] f, float[2,16,1,1] s")[1]
    assert found == {"InstanceNormalization": 1, "ModulatedReluConvAvgPool": 1}


def test_other_targets_and_a_rule_that_is_off_keep_it():
    model = graph(f"{GROUPED}\n{BEHIND}", CONSTANTS, inputs="float[2,16,8,8] x")
    for options in ({"target": "any", "enable": "fuse_prologue"}, {"target": "tensorrt", "disable": "norm_conv"}):
        assert operators(convpool.optimize(model, **options).model.graph)["InstanceNormalization"] == 1


@pytest.mark.parametrize("lowering", ["direct", "fused"])
def test_standard_operators_again(lowering):
    model = graph(f"{GROUPED}\n{BEHIND}", CONSTANTS, inputs="float[2,16,8,8] x")
    result = convpool.optimize(convpool.optimize(model, target="tensorrt").model, lowering=lowering).model
    assert operators(result.graph)["InstanceNormalization"] == 1 and not result.functions
    assert_close(model, result)
