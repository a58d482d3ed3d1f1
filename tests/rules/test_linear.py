# SPDX-License-Identifier: Apache-2.0
"""Nodes that are linear: which are known, what they add, and which vary over space."""

import numpy as np
import pytest

from convpool.rules.base import Reject
from convpool.rules.linear import Step, known_step, pad_numbers, varies_over_space
from convpool.rules.neighbours.fuse import slope
from tests.support.models import graph
from tests.support.scopes import function_scope, index


def test_a_linear_node_by_an_attribute_of_the_function():
    scope = function_scope("b = BatchNormalization<epsilon: float = @e>(a, w, w, w, w)")
    assert str(known_step(scope, 0, 2)) == (
        "BatchNormalization 'b': attributes; got a reference to the function's 'epsilon', expected values"
    )


@pytest.mark.parametrize(
    ("node", "alpha"),
    [("LeakyRelu<alpha=0.25>", 0.25), ("LeakyRelu", 0.01), ("Relu", 0.0), ("LeakyRelu<alpha: float = @e>", None)],
)
def test_slopes(node, alpha):
    assert slope(function_scope(f"b = {node}(a)"), 0) == (None if alpha is None else pytest.approx(alpha))


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
    [
        ((2, 16, 1, 1), False),
        ((2, 16, 1, 8), True),
        ((16, 1, 1), False),
        ((1,), False),
        ((8,), True),
        ((1, 1, 1, 1, 1), True),
        ((2, 16, None, 1), True),
        ((), False),
        (None, True),
    ],
)
def test_what_varies_over_space(shape, varies):
    assert varies_over_space(shape, 2) == varies
