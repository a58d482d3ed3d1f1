# SPDX-License-Identifier: Apache-2.0
"""Operators that read maps with the channels last, with --target cuda: what each becomes, and what needs a Transpose."""

import numpy as np
import onnx
import pytest

import convpool
from convpool.rules.cuda_chain import layouts as turns
from convpool.rules.cuda_chain.layouts import joined
from tests.support.cuda_target import NARROW, TAIL, for_cuda, layouts
from tests.support.models import graph, index, operators
from tests.support.rewriting import POOL

CONSTANTS = {
    **NARROW, "space": [2, 3], "width": [3], "channel": [1], "pair": [4, 32], "same_batch": [0, -1],
    "inner_zero": [-1, 0, 1], "slope": (32, 1, 1), "map": (32, 32), "column": (32, 1), "samples": (4, 1, 1, 1),
    "low": np.float32(-0.2), "high": np.float32(0.3), "g": (32,), "b": (32,), "m": (32,),
    "d": np.linspace(0.5, 2, 32, dtype=np.float32),
}  # fmt: skip
READERS = 4
PAIRS = "\n".join(f"t{i} = Conv<pads=[1,1,1,1]>(q, k)\ny{i} = {POOL}(t{i})" for i in range(READERS))
"""So many that channels last cost less, whatever reads the map too."""
RESHAPED = {"Reshape": 1}
TURNED = {"Transpose": 1}


def reading(body: str, dims: str, opset: int = 17) -> onnx.ModelProto:
    """A pair, a map a behind it, `body` from a to v, and more pairs behind a."""
    outputs = ", ".join(["float[A,B,C,D] y0", *(f"float[A,B,C,D] y{i}" for i in range(1, READERS)), f"float[{dims}] v"])
    text = f"{TAIL}\na = Softsign(p)\n{body}\nq = Softsign(a)\n{PAIRS}"
    return graph(text, CONSTANTS, inputs="float[4,16,64,64] x", outputs=outputs, opset=opset)


MEAN = "z = GlobalAveragePool(a)\n"
FROM_ONE_ELEMENT = {
    "Squeeze(z, space)": ("n,c", {"Squeeze": 1}),
    "Squeeze(z, width)": ("n,c,h", {"Squeeze": 1, **RESHAPED}),
    "Squeeze(z)": ("n,c", {"Squeeze": 1, **RESHAPED}),
    "Flatten(z)": ("n,c", {"Flatten": 1}),
    "Flatten<axis=2>(z)": ("n,c", {"Flatten": 1, **RESHAPED}),
    "Flatten<axis=0>(z)": ("n,c", {"Flatten": 1, **RESHAPED}),
    "Reshape(z, pair)": ("n,c", {"Reshape": 1}),
    "Reshape(z, same_batch)": ("n,c", {"Reshape": 1}),
    "Reshape(z, inner_zero)": ("n,c,h", {"Reshape": 2}),
    "Reshape<allowzero=1>(z, pair)": ("n,c", {"Reshape": 2}),
    "Transpose<perm=[1,0,2,3]>(z)": ("n,c,h,w", {"Transpose": 1}),
    "Softmax<axis=1>(z)": ("n,c,h,w", {"Softmax": 1, **RESHAPED}),
    "Tanh(z)": ("n,c,h,w", {"Tanh": 1, **RESHAPED}),
}


@pytest.mark.parametrize("node", FROM_ONE_ELEMENT)
def test_what_reads_a_map_of_one_element(node):
    """GlobalAveragePool itself is a mean along the middle axes."""
    dims, more = FROM_ONE_ELEMENT[node]
    result = for_cuda(reading(f"{MEAN}v = {node}", dims))
    assert layouts(result.model) == [2] + [3] * READERS
    assert operators(result.model.graph) == {"ConvAvgPool": READERS + 1, "ReduceMean": 1, "Softsign": 2, **more}


MAPS = {
    "Flatten(a)": ("n,c", {"Flatten": 1, **TURNED}),
    "Squeeze(a)": ("n,c,h,w", {"Squeeze": 1, **TURNED}),
    "Reshape(a, same_batch)": ("n,c", {"Reshape": 1, **TURNED}),
    "Transpose<perm=[1,0,2,3]>(a)": ("n,c,h,w", {"Transpose": 1}),
    "Transpose<perm=[0,2,3,1]>(a)": ("n,c,h,w", {}),
    "Transpose(a)": ("n,c,h,w", {"Transpose": 1}),
    "ReduceMax<axes=[1], keepdims=0>(a)": ("n,c,h", {"ReduceMax": 1}),
    "ReduceMin<axes=[2], keepdims=0>(a)": ("n,c,h", {"ReduceMin": 1, **TURNED}),
    "ReduceL1<axes=[0], keepdims=0>(a)": ("n,c,h", {"ReduceL1": 1, **TURNED}),
    "ReduceL2<axes=[0,-1,2], keepdims=0>(a)": ("n", {"ReduceL2": 1}),
    "ReduceSum<keepdims=0>(a, channel)": ("n,c,h", {"ReduceSum": 1}),
    "ReduceSum<keepdims=2>(a, channel)": ("n,c,h", {"ReduceSum": 1}),
    "ReduceSum<keepdims=0>(a, width)": ("n,c,h", {"ReduceSum": 1, **TURNED}),
    "ReduceSum(a)": ("n,c,h,w", {"ReduceSum": 1, **TURNED}),
    "ReduceSumSquare<axes=[1]>(a)": ("n,c,h,w", {"ReduceSumSquare": 1, **RESHAPED}),
    "ReduceMean<axes=[-2]>(a)": ("n,c,h,w", {"ReduceMean": 1, **TURNED}),
    "ReduceMean<axes=[-2,1]>(a)": ("n,c,h,w", {"ReduceMean": 1, **RESHAPED}),
    "Concat<axis=-2>(a, p)": ("n,c,h,w", {"Concat": 1, **TURNED}),
    "Concat<axis=0>(a, p)": ("n,c,h,w", {"Concat": 1, **TURNED}),
    "PRelu(a, slope)": ("n,c,h,w", {"PRelu": 1, **TURNED}),
    "Clip(a, low, high)": ("n,c,h,w", {"Clip": 1, **TURNED}),
    "Dropout(a)": ("n,c,h,w", {"Dropout": 1, **TURNED}),
    "Cast<to=1>(a)": ("n,c,h,w", {"Cast": 1, **TURNED}),
    "Max(a, low, slope, p)": ("n,c,h,w", {"Max": 1, **TURNED}),
    "Sum(map, a, column)": ("n,c,h,w", {"Sum": 1, **TURNED}),
    "Sub(samples, a)": ("n,c,h,w", {"Sub": 1, **TURNED}),
    "BatchNormalization<epsilon=0.1>(a, g, b, m, d)": ("n,c,h,w", {"Mul": 1, "Add": 1, **TURNED}),
    "LRN<size=3>(a)": ("n,c,h,w", {"LRN": 1, **TURNED}),
}


@pytest.mark.parametrize("node", MAPS)
def test_what_reads_a_map(node):
    """The node of v works in either layout, or reads the map's Transpose; or v is a Transpose."""
    dims, more = MAPS[node]
    result = for_cuda(reading(f"v = {node}", dims))
    assert layouts(result.model) == [2] + [3] * READERS
    assert operators(result.model.graph) == {"ConvAvgPool": READERS + 1, "Softsign": 2, **more}


@pytest.mark.parametrize(("body", "tensors"), [("y = Dropout(x)", ("x", "y")), ("y, mask = Dropout(x)", None)])
def test_a_node_of_two_results_keeps_its_layout(body, tensors):
    assert joined(index(graph(body))[0], 0) == tensors


@pytest.mark.parametrize(("epsilon", "tensors"), [("epsilon = 0.1", ("a", "b")), ("epsilon: float = @e", None)])
def test_a_norm_by_an_attribute_of_the_function_keeps_its_layout(epsilon, tensors):
    functions = f"""<domain: "local", opset_import: ["": 17]>
      norm <e> (a) => (b) {{ one = Constant<value_floats = [1.0]>() b = BatchNormalization<{epsilon}>(a, one, one, one, one) }}"""
    model = graph("y = local.norm<e = 0.1>(x)", inputs="float[2,1,4,4] x", functions=functions)
    assert joined(next(scope for scope in index(model) if scope.is_function), 1) == tensors


OLDER_OR_NEWER = {
    (12, "z = GlobalAveragePool(a)\nv = Squeeze<axes=[-1,2]>(z)", "n,c"): {"ReduceMean": 1, "Squeeze": 1},
    (18, "z = GlobalAveragePool(a)\nv = Squeeze(z, space)", "n,c"): {"ReduceMean": 1, "Squeeze": 1},
    (18, "v = ReduceMax<keepdims=0>(a, channel)", "n,c,h"): {"ReduceMax": 1},
    (11, "v = ReduceSum<axes=[-3], keepdims=0>(a)", "n,c,h"): {"ReduceSum": 1},
    (11, "v = Clip(a, low)", "n,c,h,w"): {"Clip": 1, **TURNED},
}


@pytest.mark.parametrize(("opset", "body", "dims"), OLDER_OR_NEWER)
def test_axes_as_attributes_and_as_tensors(opset, body, dims):
    result = for_cuda(reading(body, dims, opset))
    assert layouts(result.model) == [2] + [3] * READERS
    assert operators(result.model.graph) == {"ConvAvgPool": READERS + 1, "Softsign": 2, **OLDER_OR_NEWER[opset, body, dims]}


@pytest.mark.parametrize(("readers", "last"), [(1, False), (READERS, True)])
def test_a_mean_over_space_counts_against_channels_last(readers, last):
    """onnxruntime's CUDA provider takes longer for one along the middle axes."""
    pairs = "\n".join(PAIRS.splitlines()[: 2 * readers])
    outputs = ", ".join(f"float[A,B,C,D] y{i}" for i in range(readers))
    text = f"{TAIL}\na = Softsign(p)\n{MEAN}s = Sigmoid(z)\nq = Mul(a, s)\n{pairs}"
    result = for_cuda(graph(text, CONSTANTS, inputs="float[4,16,64,64] x", outputs=outputs))
    assert layouts(result.model) == ([2] + [3] * readers if last else [0, 0])
    assert ("ReduceMean" in operators(result.model.graph)) == last


def test_a_norm_with_parameters_of_another_type():
    """A half-precision map's may be float32 from opset 15 on; the result has the map's type."""
    half = {name: NARROW[name].astype(np.float16) for name in ("w", "k")}
    body = f"{TAIL}\na = Softsign(p)\nn = BatchNormalization(a, g, b, m, d)\nq = Softsign(n)\n{PAIRS}"
    outputs = ", ".join(f"float16[A,B,C,D] y{i}" for i in range(READERS))
    model = graph(body, {**CONSTANTS, **half}, inputs="float16[4,16,64,64] x", outputs=outputs)
    result = convpool.optimize(model, target="cuda", check=0).model
    kinds = {tensor.name: tensor.data_type for tensor in result.graph.initializer}
    maps = [node for node in result.graph.node if node.op_type in ("Mul", "Add")]
    assert [node.op_type for node in maps] == ["Mul", "Add"] and layouts(result) == [2] + [3] * READERS
    assert {kinds[node.input[1]] for node in maps} == {onnx.TensorProto.FLOAT16}


@pytest.mark.parametrize(("mean", "joins"), [(200, True), (300, False)])
def test_a_norm_whose_shift_the_type_has_not_keeps_its_layout(mean, joins):
    constants = {name: np.full(16, n, np.float16) for name, n in (("g", 300), ("b", 0), ("m", mean), ("d", 1))}
    text = "y = BatchNormalization<epsilon=0.0>(x, g, b, m, d)"
    (scope,) = index(graph(text, constants, inputs="float16[2,16,8,8] x", outputs="float16[2,16,8,8] y"))
    assert (joined(scope, 0) is not None) == joins


@pytest.mark.parametrize(
    ("given", "elements", "item"),
    [("float16[2,16,8,8]", 2048, 2), ("float[N,16,H,8]", 8 * 16 * 32 * 8, 4), ("double[N,C,H,W]", 8 * 32**3, 8)],
)
def test_sizes_that_are_unknown_count_as_nominal_ones(given, elements, item):
    (scope,) = index(graph("y = Relu(x)", inputs=f"{given} x", outputs=f"{given} y"))
    assert turns._move_us(scope, "x") == pytest.approx(2 * item * elements / 3.0e6)
    assert turns._move_us(scope, "nothing") == pytest.approx(2 * 4 * 8 * 32**3 / 3.0e6)


@pytest.mark.parametrize(("channels", "image"), [("1", True), ("4", True), ("5", False), ("C", False)])
def test_an_image_has_four_channels_at_most(channels, image):
    (scope,) = index(graph("y = Relu(x)", inputs=f"float[2,{channels},8,8] x"))
    assert turns._is_image(scope, "x") == image
    assert not turns._is_image(scope, "nothing")


JOINED = {
    "y = BatchNormalization(x, g, g, g, g)": ("x", "y"),
    "y = BatchNormalization<training_mode=1>(x, g, g, g, g)": None,
    "y = BatchNormalization(x, h, g, g, g)": None,
    "y = Add(x, map)": ("x", "y"),
    "y = Add(x, z)": ("x", "z", "y"),
    "y = Add(x, five)": None,
    "y = Add(g, g)": None,
    "y = Concat<axis=1>(x, z)": ("x", "z", "y"),
    "y = ReduceMean<axes=[2]>(x)": ("x", "y"),
    "y = ReduceMean<axes=[2], keepdims=0>(x)": None,
    "y = ReduceMean(x)": None,
    "y = GlobalAveragePool(x)": ("x", "y"),
    "y = Softmax(x)": None,
}


@pytest.mark.parametrize("node", JOINED)
def test_what_is_laid_out_alike(node):
    constants = {"g": np.ones(16, np.float32), "map": (16, 1, 1), "five": (1, 1, 1, 1, 1)}
    inputs = "float[2,16,8,8] x, float[2,16,8,8] z, float[16] h"
    dims = {"five": "a,b,c,d,e", "keepdims=0": "a,b,c", "Add(g, g)": "a"}
    outputs = next((f"float[{found}] y" for words, found in dims.items() if words in node), "float[a,b,c,d] y")
    (scope,) = index(graph(node, constants, inputs=inputs, outputs=outputs))
    assert "training" in node or scope.info("y").shape is not None
    assert joined(scope, 0) == JOINED[node]
