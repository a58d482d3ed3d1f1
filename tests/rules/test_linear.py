# SPDX-License-Identifier: Apache-2.0
"""Reading of nodes by the rules: linear ones, pads, and equal open sizes; pool_first/test_rejects.py has most refusals."""

import numpy as np
import pytest

import convpool
from convpool.rules.base import Reject
from convpool.rules.linear import Step, pad_numbers, step_or_reject
from convpool.rules.sizes import SizeOf, same_size, traced
from tests.support.models import function_scope, graph, index
from tests.support.rewriting import POOL, RTOL, assert_close


def test_a_linear_node_by_an_attribute_of_the_function():
    scope = function_scope("b = BatchNormalization<epsilon: float = @e>(a, w, w, w, w)")
    reason = "BatchNormalization 'b': attributes; got a reference to the function's 'epsilon', expected values"
    assert str(step_or_reject(scope, 0, 2)) == reason


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
        ("Pad(x, eight, number)", 17, "pads or value of Pad"),
        ("Pad(x, eight, numbers)", 17, "value of Pad"),
    ],
)
def test_what_a_pad_adds(node, opset, wanted):
    constants = {
        "eight": [0, 0, 1, 2, 0, 0, 3, 4], "four": [1, 2, 3, 4], "axes": [3, 2], "behind": [-1, -2], "one": [3],
        "two": np.float32(2), "numbers": np.ones(2, np.float32),
    }  # fmt: skip
    (scope,) = index(graph(f"y = {node}", constants, inputs="float[1,16,8,8] x, int64[2] given, float number", opset=opset))
    found = pad_numbers(scope, 0, 2)
    if isinstance(wanted, str):
        assert isinstance(found, Reject) and found.condition == wanted
    else:
        assert found == wanted


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
        ("y = Div(x, z)", "operands"),
        ("y = Add(x, z)", None),
        ("y = Add(x, u)", (0, None, None)),
        ("y = Mul(x, samples)", (0, None, None)),
        ("y = Identity(x)", (0, [1.0], [0.0])),
        ("y = Dropout(x)", (0, [1.0], [0.0])),
        ("y = Dropout(x, r, f)", (0, [1.0], [0.0])),
        ("y = BatchNormalization<epsilon = 0.0>(x, v, v, v, v)", (0, [1.0, 2**0.5], [0.0, 2 - 2 * 2**0.5])),
        ("y = BatchNormalization(x, u1, v, v, v)", (0, None, None)),
        ("y = Relu(x)", None),
    ],
)
def test_linear_nodes(body, found):
    constants = {"c": np.float32(3), "r": np.float32(0.5), "samples": np.ones((4, 1, 1, 1), np.float32), "f": np.bool_(False)}
    constants["v"] = np.float32([1, 2]) if "Batch" in body else np.float32([[[1]], [[2]]])
    inputs = "float[4,2,8,8] x, float[4,2,8,8] z, float[1,2,1,1] u, float[2] u1"
    (scope,) = index(graph(body, constants, inputs=inputs))
    step = step_or_reject(scope, 0, 2)
    if found is None or isinstance(found, str):
        assert (step.condition if isinstance(step, Reject) else step) == found
        return
    assert isinstance(step, Step) and step.operand == found[0]
    if found[1] is None:
        assert step.affine is None
    else:
        assert np.ravel(step.affine.scale).tolist() == pytest.approx(found[1])
        assert np.ravel(step.affine.shift).tolist() == pytest.approx(found[2])


CONSTANTS = {
    **{"v": (32, 16, 3, 3), "k": (32, 16, 1, 1), "k5": (32, 16, 5, 5), "big": (32, 32, 1, 1), "few": (32, 4, 3, 3)},
    **{"same": (16, 16, 3, 3), "row": (1, 16, 1, 1), "slope": (16, 1, 1), "half": np.float32(0.5)},
    **{"zero": [0], "one": [1], "eight": [8], "pads": [0, 0, 1, 1, 0, 0, 1, 1]},
}
C, CONV = "c = Conv<pads=[1,1,1,1]>(x, w)\n", "Conv<pads=[1,1,1,1]>"
STRIDED = "c = Conv<pads=[1,1,1,1], strides=[2,2]>(x, w)\n"
HALVES = "kernel_shape=[2,2], strides=[2,2]"
EQUAL = {
    "a convolution of another kernel": f"{C}d = Conv<pads=[2,2,2,2]>(x, k5)",
    "a convolution of one element": f"{C}r = Relu(x)\nd = Conv(r, k)",
    "automatic pads": f'{C}d = Conv<auto_pad="SAME_LOWER">(x, k5)',
    "no automatic pads": f'p = Pad(x, pads)\nc = Conv<auto_pad="VALID">(p, w)\nd = {CONV}(x, v)',
    "a Pad in front": f"{C}p = Pad(x, pads)\nd = Conv(p, v)",
    "an activation of several nodes": f"{C}m = Mul(x, half)\ne = Erf(x)\ng = Mul(m, e)\nd = {CONV}(g, v)",
    "a residual": f"{C}r = {CONV}(x, v)\ns = Conv(r, big)\na = Add(r, s)\nd = Relu(a)",
    "a residual of three": f"{C}r = Relu(x)\ns = Sigmoid(x)\na = Sum(r, x, s)\nd = {CONV}(a, v)",
    "a factor per channel": f"{C}g = GlobalAveragePool(x)\nf = Sigmoid(g)\nm = Mul(f, x)\nd = {CONV}(m, v)",
    "a mean over channels": f"{C}n = ReduceMean<axes=[1]>(x)\nm = Sub(x, n)\nd = {CONV}(m, v)",
    "a slope": f"{C}m = PRelu(x, slope)\nn = Add(m, row)\nd = {CONV}(n, v)",
    "factors and terms": f"{C}m = Mul(slope, x)\nn = Add(m, slope)\no = Sub(half, n)\np = LeakyRelu(o)\nd = {CONV}(p, v)",
    "a Concat of halves": f"{C}a, b = Split<axis=1>(x)\nr = Relu(b)\nm = Concat<axis=1>(r, a)\nd = {CONV}(m, v)",
    "a Slice of channels": f"{C}s = Slice(x, zero, eight, one)\nm = Concat<axis=-3>(s, s)\nd = {CONV}(m, v)",
    "a maximum by steps": f"{STRIDED}m = MaxPool<kernel_shape=[3,3], pads=[1,1,1,1], strides=[2,2]>(x)\nd = Conv(m, k)",
    "automatic pads by steps": f'{STRIDED}d = Conv<auto_pad="SAME_UPPER", strides=[2,2]>(x, v)',
    "windows without pads": "c = Conv(x, w)\nm = AveragePool<kernel_shape=[3,3]>(x)\nd = Conv(m, k)",
    "the same pads elsewhere": "c = Conv<pads=[0,1,1,0]>(x, w)\n"
    "m = AveragePool<kernel_shape=[3,3], pads=[1,1,0,0], count_include_pad=1>(x)\nd = Conv(m, k)",
    "steps by even and odd windows": f"{STRIDED}m = AveragePool<{HALVES}, pads=[1,1,0,0]>(x)\nd = Conv(m, k)",
    "steps that are rounded up": f"{STRIDED}m = MaxPool<{HALVES}, ceil_mode=1>(x)\nd = Conv(m, k)",
    "automatic pads of a mean": f'{C}m = AveragePool<kernel_shape=[3,3], auto_pad="SAME_UPPER">(x)\nd = Conv(m, k)',
}
OPEN = "float[N,16,H,W] x"
OTHER = {
    "a window without pads": f"{C}m = MaxPool<kernel_shape=[2,2]>(x)\nd = Conv(m, k)",
    "a convolution without pads": f"{C}d = Conv(x, v)",
    "steps by other pads": f"{STRIDED}m = MaxPool<{HALVES}>(x)\nd = Conv(m, k)",
    "steps on one side": f"{C}m = AveragePool<{HALVES}>(x)\nd = Conv(m, k)",
    "means that are rounded up": f"{STRIDED}m = AveragePool<{HALVES}, pads=[1,1,0,0], ceil_mode=1>(x)\nd = Conv(m, k)",
    "an axis more": "c = Conv(x, w)\nm = AveragePool<kernel_shape=[3,3], pads=[1,0,1,0]>(x)\nd = Conv(m, k)",
    "pads that make up for others": "c = Conv<pads=[1,1,0,1]>(x, w)\nm = Conv<pads=[0,1,1,0]>(x, same)\nd = Conv(m, k)",
    "space from channels": f"{C}m = DepthToSpace<blocksize=2>(x)\nd = {CONV}(m, few)",
    "turned": f"{C}m = Transpose<perm=[0,1,3,2]>(x)\nd = {CONV}(m, v)",
    "another input": f"{C}d = {CONV}(z, v)",
    "another input in a product": f"{C}m = Mul(x, z)\nd = {CONV}(m, v)",
    "another input in a sum": f"{C}m = Add(x, z)\nd = {CONV}(m, v)",
}


def added(body: str):
    inputs = OPEN + ", float[N,16,H,W] z" * ("z" in body.replace("zero", ""))
    return graph(f"{body}\nh = Add(c, d)\ny = {POOL}(h)", CONSTANTS, inputs=inputs)


@pytest.mark.parametrize("target", ["any", "cpu", "cuda"])
@pytest.mark.parametrize("name", EQUAL)
def test_maps_that_came_about_alike_are_pooled_one_by_one(name, target):
    model = added(EQUAL[name])
    result = convpool.optimize(model, target=target)
    assert result.report.summary.rewritten >= 1 and "h" not in {out for node in result.model.graph.node for out in node.output}
    for size in ((8, 8), (13, 21), (10, 7), (5, 30)):
        feeds = {"x": np.random.default_rng(0).standard_normal((2, 16, *size)).astype(np.float32)}
        assert_close(model, result.model, feeds, 2 * RTOL)


@pytest.mark.parametrize("name", OTHER)
def test_maps_that_an_add_may_broadcast_are_not(name):
    """Where one has one row or column and the other has more, onnxruntime runs the Add."""
    model = added(OTHER[name])
    assert not same_size(index(model)[0], ["c", "d"], 2)
    result = convpool.optimize(model, check=0, lowering="direct")
    assert result.model.SerializeToString() == model.SerializeToString()
    assert "spatial sizes of the operands" in str([site.reason for site in result.report.sites])


def test_sizes_behind_many_joins_are_found_at_once():
    joins = "\n".join(f"r{i} = Relu(a{i})\ns{i} = Sigmoid(a{i})\na{i + 1} = Add(r{i}, s{i})" for i in range(1500))
    (scope,) = index(graph(f"a0 = Relu(x)\n{joins}\ny = Tanh(x)", inputs=OPEN))
    assert same_size(scope, ["a1500", "y"], 2) and not same_size(scope, ["a1500", "w"], 2)


def test_of_two_axes_one_may_be_a_number():
    """Models that read lines of text have them."""
    model = graph(f"{EQUAL['a residual']}\nh = Add(c, d)\ny = {POOL}(h)", CONSTANTS, inputs="float[N,16,3,W] x")
    assert convpool.optimize(model).report.summary.rewritten == 1


def test_steps_behind_one_another_are_one():
    (scope,) = index(graph(f"{STRIDED}d = Conv<strides=[2,2]>(c, big)\ny = Conv<strides=[4,4]>(x, k)", CONSTANTS, inputs=OPEN))
    assert same_size(scope, ["d", "y"], 2) and not same_size(scope, ["c", "y"], 2)


def test_axes_of_what_has_another_rank_are_not_taken_for_channels():
    """A Slice of three axes cuts the first side."""
    text = "s = Slice(r, zero, eight, one)\ny = Add(x, s)"
    (scope,) = index(graph(text, CONSTANTS, inputs=f"{OPEN}, float[16,H,W] r"))
    assert not same_size(scope, ["x", "y"], 2)


@pytest.mark.parametrize(
    "body", ["b = Conv<group: int = @e>(a, w)", "b = AveragePool<kernel_shape = [2,2], ceil_mode: int = @e>(a)"]
)
def test_sizes_behind_a_window_by_an_attribute_of_the_function_begin_there(body):
    assert [traced(function_scope(body), "b", axis) for axis in (2, 3)] == [SizeOf("b", 2), SizeOf("b", 3)]


def test_sizes_behind_a_malformed_pooling_begin_there():
    (scope,) = index(graph("y = AveragePool<kernel_shape=[2,2], strides=[2,2]>(x)", inputs="float[N,16,H,W] x"))
    assert [traced(scope, "y", axis) for axis in (2, 3)] == [SizeOf("x", 2, divisor=2), SizeOf("x", 3, divisor=2)]
    assert same_size(scope, ["y"], 2) and not same_size(scope, ["y"], 3)


def test_open_sizes_whose_outputs_are_empty_at_every_size():
    model = graph("d = Sub(x, x)\ny = NonZero(d)", inputs="float[N,A] x", outputs="int64[B,C] y")
    found = convpool.verify(model, model)
    assert not found.passed and not found.differs and found.difference.startswith("no output can be compared")
