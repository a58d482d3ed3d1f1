# SPDX-License-Identifier: Apache-2.0
"""How single nodes and chains are read: as averages, linear maps, pads, and in either layout."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from convpool.rules.base import Reject
from convpool.rules.convs import (
    POINT,
    ConvLeaf,
    JoinTree,
    Moved,
    OpaqueLeaf,
    Pooling,
    conv_leaves,
    conv_rank,
    opaque_leaves,
    tree_nodes,
)
from convpool.rules.cuda_chain.layouts import _moved, _permuted, axes_of, joined, reads_any
from convpool.rules.linear import Step, known_step, pad_numbers, varies_over_space
from convpool.rules.neighbours.fuse import _host, _only_an_activation
from convpool.rules.neighbours.fusion import slope
from convpool.rules.pool_first import means as slice_mean
from convpool.rules.pool_first.averages import may_be_half, recognise_half
from convpool.rules.pool_first.means import may_be_reduction, recognise_reduction
from convpool.rules.pool_first.rule import _nodes_behind
from tests.support.models import graph
from tests.support.scopes import function_scope, index


def test_a_linear_node_by_an_attribute_of_the_function():
    scope = function_scope("b = BatchNormalization<epsilon: float = @e>(a, w, w, w, w)")
    assert str(known_step(scope, 0, 2)) == (
        "BatchNormalization 'b': attributes; got a reference to the function's 'epsilon', expected values"
    )


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


@pytest.mark.parametrize(
    ("node", "axes"),
    [
        ("y = ReduceMean<axes=[-1, 2]>(x)", (2, 3)),
        ("y = ReduceSum(x, two)", (2,)),
        ("y = ReduceSum(x)", None),
        ("y = ReduceSum(x, given)", None),
        ("y = Squeeze(x, two)", (2,)),
    ],
)
def test_axes_of_a_sum(node, axes):
    inputs = "float[2,16,1,8] x, int64[1] given"
    (scope,) = index(graph(node, {"two": [2]}, inputs=inputs, outputs="float y"))
    assert axes_of(scope, 0) == axes


def test_axes_by_an_attribute_of_the_function_are_unknown():
    assert axes_of(function_scope("b = ReduceMax<axes: ints = @e>(a)"), 0) is None


@pytest.mark.parametrize(
    ("scales", "smaller"),
    [([1, 1, 0.5, 0.5], True), ([1, 1, 1, 0.5], True), ([1, 1, 1, 1], False), ([1, 1, 0.5, 2], False)],
)
def test_a_resize_that_makes_a_map_smaller(scales, smaller):
    (scope,) = index(graph("y = Resize(x, r, s)", {"r": np.zeros(0, np.float32), "s": np.array(scales, np.float32)}))
    assert may_be_half(scope, 0) == ("x" if smaller else None)


def test_a_resize_by_scales_of_a_caller():
    inputs = "float[1,16,12,12] x, float[4] s, int64[4] n"
    for node in ("y = Resize(x, r, s)", "y = Resize(x, r, e, n)"):
        (scope,) = index(graph(node, {"r": np.zeros(0, np.float32), "e": np.zeros(0, np.float32)}, inputs=inputs))
        assert may_be_half(scope, 0) is None and recognise_half(scope, 0, 2, (12, 12)) is None


SQUEEZES = {  # whether the last node ends an average, and of what
    "u = Unsqueeze(x, b)\ny = Squeeze(u, b)": None,
    "u = Unsqueeze(x, b)\nm = ReduceMean<axes=[3]>(u)\ny = Squeeze(m, b)": "x",
    "m = ReduceMean<axes=[2]>(x)\ny = Squeeze(m, b)": None,
    "y = Squeeze(x, b)": None,
    "m = ReduceMean<axes=[3]>(x)\ny = ReduceMean<axes=[2]>(m)": "x",
    "m = ReduceMean<axes=[3]>(x)\nr = Relu(m)\ny = ReduceMean<axes=[2]>(r)": "r",
}


@pytest.mark.parametrize("body", SQUEEZES)
def test_which_nodes_end_an_average(body):
    (scope,) = index(graph(body, {"b": [2]}, inputs="float[2,16,1,8] x", outputs="float y"))
    assert may_be_reduction(scope, len(scope.nodes) - 1) == SQUEEZES[body]


def test_a_reduction_that_another_one_follows_ends_no_average():
    body = "u = Unsqueeze(x, b)\nm = ReduceMean<axes=[3]>(u)\ns = Squeeze(m, b)\ny = ReduceMean<axes=[2], keepdims=0>(s)"
    (scope,) = index(graph(body, {"b": [2]}, inputs="float[2,16,8] x", outputs="float[a,c] y"))
    assert [may_be_reduction(scope, number) for number in range(4)] == [None, None, None, "x"]
    (scope,) = index(graph("m = ReduceMean<axes=[3]>(x)\nr = Relu(m)\ny = ReduceMean<axes=[2]>(r)"))
    assert [may_be_reduction(scope, number) for number in (0, 2)] == ["x", "r"]


@pytest.mark.parametrize(
    ("body", "kind", "window"),
    [
        ("y = ReduceMean<axes=[2,3]>(x)", "global", None),
        ("y = ReduceMean<axes=[3]>(x)", "mean", (1, 8)),
        ("r = Reshape(x, split)\ny = ReduceMean<axes=[3,5], keepdims=0>(r)", "mean", (2, 2)),
    ],
)
def test_means_over_the_map_and_over_windows(body, kind, window):
    (scope,) = index(graph(body, {"split": [2, 16, 4, 2, 4, 2]}, inputs="float[2,16,8,8] x"))
    found = recognise_reduction(scope, len(scope.nodes) - 1, 2, (8, 8))
    assert isinstance(found, Pooling) and found.kind == kind
    assert (None if found.spec is None else found.spec.kernel_shape) == window


@pytest.mark.parametrize(
    ("node", "alpha"),
    [("LeakyRelu<alpha=0.25>", 0.25), ("LeakyRelu", 0.01), ("Relu", 0.0), ("LeakyRelu<alpha: float = @e>", None)],
)
def test_slopes(node, alpha):
    found = slope(function_scope(f"b = {node}(a)"), 0)
    assert found == (None if alpha is None else pytest.approx(alpha))


@pytest.mark.parametrize("most", [4, 3])
def test_sums_of_slices_of_so_many_nodes_are_looked_at(monkeypatch, most):
    slices = "\n".join(f"s{i}{j} = Slice(x, f{i}{j}, e, a, t)" for i in "01" for j in "01")
    body = f"{slices}\np = Add(s00, s01)\nq = Add(p, s10)\nr = Add(q, s11)\ny = Div(r, four)"
    corners = {f"f{i}{j}": [i, j] for i in (0, 1) for j in (0, 1)}
    (scope,) = index(graph(body, {**corners, "e": [12, 12], "a": [2, 3], "t": [2, 2], "four": np.float32(4)}))
    monkeypatch.setattr(slice_mean, "MAX_TERM_NODES", most)
    assert slice_mean.may_be_mean(scope, 7) == ("x" if most == 4 else None)


READ_IN_EITHER_LAYOUT = {
    ("y = Transpose(x)", "2,16,8,8"): True,
    ("y = ReduceMean<axes=[2,3], keepdims=0>(x)", "2,16,8,8"): True,
    ("y = ReduceMean<axes=[1], keepdims=0>(x)", "2,16,8,8"): True,
    ("y = ReduceMean<axes=[3], keepdims=0>(x)", "2,16,8,8"): False,
    ("y = ReduceMean<axes=[0], keepdims=0>(x)", "2,16,8,8"): False,
    ("y = ReduceMean<axes=[0,2,3], keepdims=0>(x)", "2,16,8,8"): True,
    ("y = ReduceMean<axes=[2,3]>(x)", "2,16,8,8"): False,
    ("y = Flatten(x)", "2,16,8,8"): False,
    ("y = Flatten(x)", "2,16,1,1"): True,
    ("y = Flatten(x)", "2,1,8,8"): True,
    ("y = Flatten<axis=2>(x)", "2,16,1,1"): False,
    ("y = Squeeze(x, space)", "2,16,1,1"): True,
    ("y = Squeeze(x, width)", "2,16,1,1"): False,
    ("y = Squeeze(x)", "2,16,1,1"): False,
    ("y = Reshape(x, flat)", "2,16,1,1"): True,
    ("y = Reshape(x, kept)", "2,16,1,1"): False,
    ("y = Reshape(x, given)", "2,16,1,1"): False,
    ("y = Reshape<allowzero=1>(x, flat)", "2,16,1,1"): False,
    ("y = Flatten(x)", "2,16"): False,
    ("y = Relu(x)", "2,16,1,1"): False,
}


@pytest.mark.parametrize(("node", "shape"), READ_IN_EITHER_LAYOUT)
def test_what_gives_the_same_from_either_layout(node, shape):
    constants = {"space": [2, 3], "width": [3], "flat": [0, -1], "kept": [-1, 0]}
    rank = 2 if "Flatten" in node or "Reshape" in node or "Squeeze" in node and "width" not in node else None
    outputs = "float[a,b] y" if rank == 2 else "float y" if "keepdims=0" in node or "width" in node else "float[a,b,c,d] y"
    (scope,) = index(graph(node, constants, inputs=f"float[{shape}] x, int64[2] given", outputs=outputs))
    assert reads_any(scope, 0) == READ_IN_EITHER_LAYOUT[node, shape]


def test_axes_with_channels_last():
    assert [_moved(axis, 4) for axis in range(4)] == [0, 3, 1, 2] and [_moved(axis, 3) for axis in range(3)] == [0, 2, 1]


@pytest.mark.parametrize(
    ("perm", "x_last", "y_last", "wanted"),
    [
        ([0, 2, 3, 1], True, False, None),
        ([0, 2, 3, 1], False, False, [0, 2, 3, 1]),
        ([0, 1, 3, 2], True, False, [0, 3, 2, 1]),
        ([0, 1, 3, 2], True, True, [0, 2, 1, 3]),
        ([0, 3, 1, 2], False, True, None),
        ([1, 0, 2, 3], True, False, [3, 0, 1, 2]),
    ],
)
def test_transposes_between_layouts(perm, x_last, y_last, wanted):
    """Compare with numpy: of a tensor in its layout, the result in its own."""
    node = _permuted(helper.make_node("Transpose", ["x"], ["y"], perm=perm), 4, x_last, y_last)
    given = np.arange(120).reshape(2, 3, 4, 5)
    expected = np.transpose(given, perm)
    expected = np.moveaxis(expected, 1, -1) if y_last else expected
    found = np.moveaxis(given, 1, -1) if x_last else given
    if wanted is None:
        assert node.op_type == "Identity" and np.array_equal(found, expected)
    else:
        assert list(node.attribute[0].ints) == wanted and np.array_equal(np.transpose(found, wanted), expected)


@pytest.mark.parametrize(
    ("node", "opset", "wanted"),
    [
        ("Pad<pads=[0,0,1,2,0,0,3,4]>(x)", 10, ((0, 0, 1, 2, 0, 0, 3, 4), 0.0)),
        ("Pad<pads=[0,0,1,2,0,0,3,4], value=2.0>(x)", 10, ((0, 0, 1, 2, 0, 0, 3, 4), 2.0)),
        ("Pad(x, eight)", 17, ((0, 0, 1, 2, 0, 0, 3, 4), 0.0)),
        ("Pad(x, eight, two)", 17, ((0, 0, 1, 2, 0, 0, 3, 4), 2.0)),
        ("Pad(x, four, , axes)", 18, ((0, 0, 2, 1, 0, 0, 4, 3), 0.0)),
        ("Pad(x, four, , behind)", 18, ((0, 0, 2, 1, 0, 0, 4, 3), 0.0)),
        ("Pad(x, four, , one)", 18, "pads of Pad"),
        ("Pad(x, four, , given)", 18, "axes of Pad"),
        ("Pad(x, four)", 17, "pads of Pad"),
        ("Pad(x, given)", 17, "pads or value of Pad"),
        ("Pad(x, eight, number)", 17, "pads or value of Pad"),
        ("Pad(x, eight, numbers)", 17, "value of Pad"),
    ],
)
def test_what_a_pad_adds(node, opset, wanted):
    constants = {
        "eight": [0, 0, 1, 2, 0, 0, 3, 4],
        "four": [1, 2, 3, 4],
        "axes": [3, 2],
        "behind": [-1, -2],
        "one": [3],
        "two": np.float32(2),
        "numbers": np.ones(2, np.float32),
    }
    inputs = "float[1,16,8,8] x, int64[2] given, float number"
    (scope,) = index(graph(f"y = {node}", constants, inputs=inputs, opset=opset))
    found = pad_numbers(scope, 0, 2)
    if isinstance(wanted, str):
        assert isinstance(found, Reject) and found.condition == wanted
    else:
        assert found == wanted


@pytest.mark.parametrize(
    ("node", "pads"),
    [
        ("Pad(x, inner)", (1, 2, 3, 4)),
        ("Pad(x, outer)", None),
        ("Pad(x, both)", "pads of Pad"),
        ("Pad(x, inner, two)", "value of Pad"),
        ("Pad(x, none, two)", (0, 0, 0, 0)),
        ('Pad<mode="edge">(x, inner)', "mode of Pad"),
        ('Pad<mode="edge">(x, none)', (0, 0, 0, 0)),
        ('Pad<mode="constant">(x, inner)', (1, 2, 3, 4)),
    ],
)
def test_pads_that_are_linear(node, pads):
    constants = {"inner": [0, 0, 1, 2, 0, 0, 3, 4], "outer": [0, 0, 0, 0, 0, 1, 0, 0], "both": [0, 1, 1, 0, 0, 0, 0, 0]}
    constants |= {"none": [0] * 8, "two": np.float32(2)}
    (scope,) = index(graph(f"y = {node}", constants, inputs="float[1,16,8,8] x"))
    found = known_step(scope, 0, 2)
    assert (found.condition if isinstance(found, Reject) else found.pads) == pads


@pytest.mark.parametrize(
    ("weights", "attributes", "rank"),
    [("float[8,16,3,3]", "", 2), ("float[8,16,3]", "", 1), ("float", "kernel_shape=[3,3]", None), ("float[8,16,K,3]", "", 2)],
)
def test_spatial_axes_of_a_convolution(weights, attributes, rank):
    x = "float[1,16,8]" if weights == "float[8,16,3]" else "float[1,16,8,8]"
    node = f"y = Conv<{attributes}>(x, k)" if attributes else "y = Conv(x, k)"
    (scope,) = index(graph(node, inputs=f"{x} x, {weights} k", outputs="float y"))
    assert conv_rank(scope, 0) == rank


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
    assert _only_an_activation(scope, "r") == alone and not _only_an_activation(scope, "x")


HOSTS = {  # what gives x: the number of the layer into which runtimes fuse a chain behind it
    "x1 = Conv(x, w)": 0,
    "c = Conv(x, w)\nx1 = Add(c, z)": 0,
    "x1 = Add(x, x)": None,
    "c = Conv(x, w)\na = Add(c, z)\nx1 = Add(a, z)": None,
    "x1 = MaxPool<kernel_shape=[1,1]>(x)": None,
    "x1 = Neg(x)": None,
}


@pytest.mark.parametrize("body", HOSTS)
def test_layers_that_fuse_what_stands_behind_them(body):
    inputs = "float[1,16,12,12] x, float[1,32,10,10] z"
    (scope,) = index(graph(f"{body}\ny = Relu(x1)", inputs=inputs, outputs="float y"))
    assert _host(scope, "x1") == HOSTS[body] and _host(scope, "x") is None
    (scope,) = index(graph(f"{body}\ny = Relu(x1)\nv = Neg(x1)", inputs=inputs, outputs="float y, float v"))
    assert _host(scope, "x1") is None  # something else reads it


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("y = Add(x, c)", (0, [1.0], [3.0])),
        ("y = Add(c, x)", (1, [1.0], [3.0])),
        ("y = Sub(x, c)", (0, [1.0], [-3.0])),
        ("y = Sub(c, x)", (1, [-1.0], [3.0])),
        ("y = Mul(x, c)", (0, [3.0], [0.0])),
        ("y = Mul(v, x)", (1, [1.0, 2.0], [0.0])),
        ("y = Div(x, c)", (0, [1 / 3], [0.0])),
        ("y = Div(c, x)", "division by the data"),
        ("y = Div(x, zero)", "constant operands"),
        ("y = Mul(x, z)", "operands"),
        ("y = Div(x, z)", "operands"),
        ("y = Add(x, z)", None),
        ("y = Add(x, u)", (0, None, None)),
        ("y = Mul(x, samples)", (0, None, None)),
        ("y = Identity(x)", (0, [1.0], [0.0])),
        ("y = Dropout(x)", (0, [1.0], [0.0])),
        ("y = Dropout(x, r, t)", "training_mode"),
        ("y = Dropout(x, r, f)", (0, [1.0], [0.0])),
        ("y = Dropout(x, r, flag)", "training_mode"),
        ("y = BatchNormalization<epsilon = 0.0>(x, v, v, v, v)", (0, [1.0, 2**0.5], [0.0, 2 - 2 * 2**0.5])),
        ("y = BatchNormalization(x, u1, v, v, v)", (0, None, None)),
        ("y = BatchNormalization<epsilon = 0.0>(x, v, v, v, zeros)", "constant operands"),
        ("y = Relu(x)", None),
    ],
)
def test_linear_nodes(body, found):
    constants = {
        "c": np.float32(3),
        "v": np.array([1, 2], np.float32) if "Batch" in body else np.array([1, 2], np.float32).reshape(2, 1, 1),
        "zero": np.float32(0),
        "zeros": np.zeros(2, np.float32),
        "samples": np.ones((4, 1, 1, 1), np.float32),
        "r": np.float32(0.5),
        "t": np.bool_(True),
        "f": np.bool_(False),
    }
    inputs = "float[4,2,8,8] x, float[4,2,8,8] z, float[1,2,1,1] u, float[2] u1, bool flag"
    (scope,) = index(graph(body, constants, inputs=inputs))
    step = known_step(scope, 0, 2)
    if found is None or isinstance(found, str):
        assert (step.condition if isinstance(step, Reject) else step) == found
        return
    assert isinstance(step, Step) and step.operand == found[0]
    if found[1] is None:
        assert step.affine is None
    else:
        assert np.ravel(step.affine.scale).tolist() == pytest.approx(found[1])
        assert np.ravel(step.affine.shift).tolist() == pytest.approx(found[2])


@pytest.mark.parametrize(
    ("shape", "varies"),
    [("2,16,1,1", False), ("2,16,1,8", True), ("16,1,1", False), ("1", False), ("8", True), ("1,1,1,1,1", True)],
)
def test_what_varies_over_space(shape, varies):
    (scope,) = index(graph("y = Neg(x)", inputs=f"float[{shape}] x", outputs="float y"))
    assert varies_over_space(scope, "x", 2) == varies and varies_over_space(scope, "nothing", 2)


def test_what_goes_behind_a_pooling():
    leaf = ConvLeaf(1, "x", POINT, None, None, (1, 1, 1, 1), None, behind=(Moved(3, 0), Moved(4, 1)))
    assert _nodes_behind(leaf) == [3, 4] and _nodes_behind(OpaqueLeaf("x")) == []
    inner = JoinTree(7, (leaf, OpaqueLeaf("z")), behind=(Moved(8, 0),))
    tree = JoinTree(5, (OpaqueLeaf("x"), inner), behind=(Moved(6, 0),), nodes=(5, 6))
    assert _nodes_behind(tree) == [5, 6, 7, 8, 3, 4]
    assert conv_leaves(tree) == [leaf] and [item.tensor for item in opaque_leaves(tree)] == ["x", "z"]
    assert tree_nodes(tree) == [5, 6] and conv_leaves(OpaqueLeaf("x")) == opaque_leaves(leaf) == tree_nodes(OpaqueLeaf("x")) == []
