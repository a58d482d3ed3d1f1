# SPDX-License-Identifier: Apache-2.0
"""Poolings, pads and spatial axes of convolutions, as the rules read them."""

import pytest

from convpool.rules import convs
from convpool.rules.convs import (
    POINT,
    ConvLeaf,
    JoinTree,
    Moved,
    OpaqueLeaf,
    conv_leaves,
    conv_rank,
    moved_pads,
    opaque_leaves,
    tree_nodes,
)
from convpool.rules.pool_first.rule import _nodes_behind
from tests.support.models import graph
from tests.support.scopes import chain, function_scope, index


def test_pads_by_an_attribute_of_the_function_are_unknown():
    assert moved_pads(function_scope("b = Pad<mode: string = @e>(a, w)"), 0, (), 2) is None


@pytest.mark.parametrize(("count", "found"), [(1, False), (24, False), (25, True)])
def test_a_transpose_in_front_of_a_pad_may_be_further_than_24_nodes(count, found):
    (scope,) = index(graph(f"{chain(count, 'Relu', 'x', 'r')}\ny = Neg(r)"))
    assert convs._transposed(scope, "r") == found


def test_a_transpose_is_found_among_several_inputs():
    (scope,) = index(graph("t = Transpose<perm=[0,1,3,2]>(x)\na = Relu(x)\nb = Add(a, t)\ny = Neg(b)"))
    assert convs._transposed(scope, "b") and not convs._transposed(scope, "a")


@pytest.mark.parametrize(
    ("weights", "attributes", "rank"),
    [("float[8,16,3,3]", "", 2), ("float[8,16,3]", "", 1), ("float", "kernel_shape=[3,3]", None), ("float[8,16,K,3]", "", 2)],
)
def test_spatial_axes_of_a_convolution(weights, attributes, rank):
    x = "float[1,16,8]" if weights == "float[8,16,3]" else "float[1,16,8,8]"
    node = f"y = Conv<{attributes}>(x, k)" if attributes else "y = Conv(x, k)"
    (scope,) = index(graph(node, inputs=f"{x} x, {weights} k", outputs="float y"))
    found = conv_rank(scope, 0)
    assert found == rank or rank is None and found.condition == "shape of the weights" and found.got == "unknown"


def test_what_goes_behind_a_pooling():
    leaf = ConvLeaf(1, "x", POINT, None, None, (1, 1, 1, 1), None, behind=(Moved(3, 0), Moved(4, 1)))
    assert _nodes_behind(leaf) == [3, 4] and _nodes_behind(OpaqueLeaf("x")) == []
    inner = JoinTree(7, (leaf, OpaqueLeaf("z")), behind=(Moved(8, 0),))
    tree = JoinTree(5, (OpaqueLeaf("x"), inner), behind=(Moved(6, 0),), nodes=(5, 6))
    assert _nodes_behind(tree) == [5, 6, 7, 8, 3, 4]
    assert conv_leaves(tree) == [leaf] and [item.tensor for item in opaque_leaves(tree)] == ["x", "z"]
    assert tree_nodes(tree) == [5, 6] and conv_leaves(OpaqueLeaf("x")) == opaque_leaves(leaf) == tree_nodes(OpaqueLeaf("x")) == []
