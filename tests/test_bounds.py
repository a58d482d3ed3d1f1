# SPDX-License-Identifier: Apache-2.0
"""Limits and defaults, each at its boundary: how far is searched, what is too large, what an option left out means."""

from __future__ import annotations

import dataclasses
import inspect
import json

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import convpool
from benchmarks.counts import Counts
from convpool.algebra.geometry import ConvSpec
from convpool.algebra.lowering import Cost
from convpool.algebra.parts import Parts
from convpool.check import verify as compare_module
from convpool.check.inputs import MAX_INPUT_BYTES, OPEN_SIZES, SCALES
from convpool.check.judge import OutputErrors, Verification
from convpool.ir import schema
from convpool.ir.constants import MAX_FOLDED_ELEMENTS, MAX_FOLDED_NODES, MAX_WEIGHT_ELEMENTS
from convpool.ir.index import Scope, index_model
from convpool.ir.model import infer_shapes
from convpool.macs import ModelMacs
from convpool.options import DEFAULT_LIMITS, OptimizeOptions, Target, options_for
from convpool.report import Summary
from convpool.rules import STAGES
from convpool.rules import convs as pads
from convpool.rules.base import Context, Reject
from convpool.rules.cuda_chain import conv as chain_conv
from convpool.rules.cuda_chain import layouts
from convpool.rules.pool_first.means import may_be_reduction, recognise_mean
from convpool.rules.pool_first.trace import conv_upstream, max_pools
from tests.support.models import graph
from tests.support.rewriting import PAIR


def index(model: onnx.ModelProto) -> Scope:
    return index_model(model, numpy_helper.to_array, lambda *_: pytest.fail("nothing to compute"), infer_shapes(model))[0]


def chain(count: int, node: str, first: str, last: str) -> str:
    """So many nodes behind one another, from tensor `first` to `last`."""
    names = [first, *(f"{last}{n}" for n in range(1, count)), last]
    return "\n".join(f"{y} = {node}({x})" for x, y in zip(names, names[1:], strict=False))


@pytest.mark.parametrize(("count", "found"), [(1, True), (23, True), (24, False)])
def test_a_convolution_in_front_of_a_pooling_is_searched_over_24_nodes(count, found):
    scope = index(graph(f"h = Conv<pads=[1,1,1,1]>(x, w)\n{chain(count, 'Relu', 'h', 'r')}\ny = MaxPool<kernel_shape=[2,2]>(r)"))
    assert conv_upstream(scope, "r") == (0 if found else None) and max_pools(scope) == found


@pytest.mark.parametrize(("count", "found"), [(1, False), (24, False), (25, True)])
def test_a_transpose_in_front_of_a_pad_may_be_further_than_24_nodes(count, found):
    scope = index(graph(f"{chain(count, 'Relu', 'x', 'r')}\ny = Neg(r)"))
    assert pads._transposed(scope, "r") == found


def test_a_transpose_is_found_among_several_inputs():
    scope = index(graph("t = Transpose<perm=[0,1,3,2]>(x)\na = Relu(x)\nb = Add(a, t)\ny = Neg(b)"))
    assert pads._transposed(scope, "b") and not pads._transposed(scope, "a")


@pytest.mark.parametrize(("count", "x"), [(1, "x"), (15, "x"), (16, "t1"), (17, "t2")])
def test_an_average_is_of_16_nodes_at_most(count, x):
    scope = index(graph(f"{chain(count, 'Transpose<perm=[0,1,3,2]>', 'x', 't')}\ny = ReduceMean<axes=[2,3]>(t)"))
    assert may_be_reduction(scope, count) == x


@pytest.mark.parametrize(("count", "ends"), [(1, False), (15, False), (16, True)])
def test_a_reduction_that_goes_on_within_16_nodes_ends_no_average(count, ends):
    views = chain(count, "Transpose<perm=[0,1,3,2]>", "m", "t")
    scope = index(graph(f"m = ReduceMean<axes=[2]>(x)\n{views}\ny = ReduceMean<axes=[2]>(t)"))
    assert (may_be_reduction(scope, 0) == "x") == ends


@pytest.mark.parametrize(("count", "known"), [(1, True), (100, True), (101, False)])
def test_a_constant_is_seen_through_100_nodes(count, known):
    scope = index(graph(f"{chain(count, 'Identity', 'c', 'i')}\ny = Add(x, i)", {"c": (1,)}))
    assert (scope.constant("i") is not None) == known


@pytest.mark.parametrize(("sizes", "known"), [((4095, 1), True), ((4095, 2), False), ((4096, 1), False), ((4097, 0), False)])
def test_4096_elements_are_folded(sizes, known):
    constants = {"a": [1] * sizes[0], "b": [1] * sizes[1]}
    scope = index(graph("c = Concat<axis=0>(a, b)\ny = Expand(x, c)", constants, outputs="float y"))
    assert (scope.constant("c") is not None) == known


@pytest.mark.parametrize(("end", "whole"), [(2**63 - 1, True), (2**31 - 1, True), (2**31 - 2, False), (16, False)])
def test_a_slice_of_the_channels_is_whole_from_2_to_the_31_on(end, whole):
    slices = "\n".join(f"s{i} = Slice(x, f{i}, e, a, t)" for i in (0, 1))
    constants = {"f0": [0, 0], "f1": [0, 1], "e": [end, 12], "a": [1, 3], "t": [1, 2], "two": np.float32(2)}
    scope = index(graph(f"{slices}\ns = Add(s0, s1)\ny = Div(s, two)", constants))
    found = recognise_mean(scope, 3, 2, (12, 12))
    if whole:
        assert not isinstance(found, Reject) and found is not None and found.spec.kernel_shape == (1, 2)
    else:
        assert isinstance(found, Reject) and found.condition == "Slice"


@pytest.mark.parametrize(
    ("shape", "same"),
    [("2,1,8,8", True), ("2,16,1,1", True), ("2,16,1,8", False), ("1,16,8,8", False), ("2,16", False), ("2,1", False)],
)
def test_a_tensor_that_is_the_same_in_both_layouts(shape, same):
    scope = index(graph("y = Relu(x)", inputs=f"float[{shape}] x", outputs="float y"))
    assert layouts.same_in_memory(scope, "x") == same
    moved = 2 * 4 * np.prod([int(n) for n in shape.split(",")]) / 3.0e6
    assert layouts._move_us(scope, "x") == pytest.approx(moved)
    assert layouts.turn_us(scope, "x") == (0 if same else pytest.approx(2.5 + moved))


@pytest.mark.parametrize(
    ("given", "elements", "item"),
    [("float16[2,16,8,8]", 2048, 2), ("float[N,16,H,8]", 8 * 16 * 32 * 8, 4), ("double[N,C,H,W]", 8 * 32**3, 8)],
)
def test_sizes_that_are_unknown_count_as_nominal_ones(given, elements, item):
    scope = index(graph("y = Relu(x)", inputs=f"{given} x", outputs=f"{given} y"))
    assert layouts._move_us(scope, "x") == pytest.approx(2 * item * elements / 3.0e6)
    assert layouts._move_us(scope, "nothing") == pytest.approx(2 * 4 * 8 * 32**3 / 3.0e6)


@pytest.mark.parametrize(("channels", "image"), [("1", True), ("4", True), ("5", False), ("C", False)])
def test_an_image_has_four_channels_at_most(channels, image):
    scope = index(graph("y = Relu(x)", inputs=f"float[2,{channels},8,8] x"))
    assert layouts._is_image(scope, "x", DEFAULT_LIMITS) == image
    assert not layouts._is_image(scope, "nothing", DEFAULT_LIMITS)


def test_channels_last_have_to_cost_less_in_a_group_that_is_free():
    group = layouts.Group(last_us=1.0, first_us=2.0)
    assert not group.last
    group.touched = True
    assert group.last
    for name, value in (("first_us", 1.0), ("fixed", True)):
        assert not layouts.Group(**{**vars(group), name: value}).last


def test_ends_whose_layout_is_fixed():
    body = "a = Relu(x)\nt = Transpose<perm=[0,2,3,1]>(a)\nb = Softmax(a)\nc = Add(a, b)\n"
    body += "m = ReduceMean<axes=[2,3]>(c)\ny = Flatten(m)"
    scope = index(graph(body, inputs="float[2,16,8,8] x", outputs="float[a,b,c,d] t, float[e,f] y"))
    given, read = layouts.fixed_ends(scope, {})
    assert given == {"x", "b", "y"} and read == {"t", "y", "a"}


def test_ports_of_the_operator_s_nodes():
    model = convpool.optimize(
        graph(f"{PAIR.replace('y =', 'p =')}\ny = Add(p, z)", inputs="float[1,16,12,12] x, float[1,32,6,6] z"), check=0
    )
    scope = index(model.model)
    (ports,) = layouts.ports_of(scope).values()
    assert (ports.x, ports.y, ports.residual) == ("x", "y", "z")
    given, read = layouts.fixed_ends(scope, layouts.ports_of(scope))
    assert {"x", "z"} <= given and "z" not in read and "y" in read
    node = model.model.graph.node[-1]
    schema.give_layout(node, 1)
    assert layouts.ports_of(index(model.model)) == {}


OPTIMIZE = {
    "target": "any",
    "lowering": None,
    "check": 1,
    "exclude": (),
    "enable": (),
    "disable": (),
    **dict.fromkeys(
        ("fuse_pool_conv", "stem", "plain_conv", "prologue", "epilogue", "concat", "fold", "fix_shapes", "accumulation")
    ),
    "autotune": False,
    "time": None,
    **dict.fromkeys(("data", "input_shapes", "rtol", "atol")),
    "seed": 0,
    "base_dir": None,
    "progress": None,
}
VERIFY = {"check": 1, **dict.fromkeys(("data", "input_shapes", "rtol", "atol")), "seed": 0}


@pytest.mark.parametrize(
    ("function", "defaults"),
    [(convpool.optimize, OPTIMIZE), (convpool.verify, VERIFY), (compare_module.compare_runners, {"check": 1, "seed": 0})],
)
def test_what_an_option_left_out_means(function, defaults):
    found = {name: item.default for name, item in inspect.signature(function).parameters.items()}
    assert defaults.items() <= found.items()
    if function is not compare_module.compare_runners:
        assert {name for name, value in found.items() if value is not inspect.Parameter.empty} == defaults.keys()


def test_a_report_is_indented_by_two():
    report = convpool.optimize(graph(PAIR), check=0).report
    assert report.to_json() == json.dumps(json.loads(report.to_json()), indent=2) + "\n" != report.to_json(indent=None)


@pytest.mark.parametrize(
    ("record", "defaults"),
    [
        (Cost, {"macs": 0, "additions": 0, "time": 0.0}),
        (Counts, {"multiplications": 0, "additions": 0, "reads": 0, "writes": 0}),
        (ConvSpec, {"group": 1}),
        (
            Parts,
            {"affine": False, "prologue": "", "prologue_alpha": 0.0, "residual": False, "epilogue": "", "epilogue_alpha": 0.0},
        ),
        (OutputErrors, {"note": "", "not_finite": 0.0, "compared": 0, "constant": False}),
        (Verification, {"allowed": "", "input_scale": 1.0}),
        (Summary, {**dict.fromkeys(("channels_last", "packed", "convolutions", "rewritten_convolutions"), 0), "batch": 1}),
        (ModelMacs, {"batch": 1}),
        (Target, {"direct_without_kernel": True, "plain_prologues": False, "metadata": ()}),
        (
            OptimizeOptions,
            {"lowering": "convavgpool", "direct_without_kernel": True, "exclude": (), "metadata": (), "accumulation": None},
        ),
    ],
)
def test_what_a_record_says_where_nothing_is_given(record, defaults):
    found = {field.name: field.default for field in dataclasses.fields(record)}
    assert {name: found[name] for name in defaults} == defaults


def test_the_limits_are_those_of_the_documents():
    assert vars(DEFAULT_LIMITS) == {
        "image_channels": 4,
        "filter_elements": 64,
        "wide_channels": 64,
        "channel_multiple": 8,
        "plain_macs": 2.5e9,
        "plain_results": 400_000,
        "pool_channels": 1024,
        "plain_prologues": False,
    }


@pytest.mark.parametrize(
    ("target", "lowering", "direct", "prologues"),
    [
        ("any", "convavgpool", True, False),
        ("cpu", "auto", True, False),
        ("tensorrt", "convavgpool", False, False),
        ("cuda", "convavgpool", False, True),
    ],
)
def test_what_the_targets_say(target, lowering, direct, prologues):
    options = options_for(target)
    found = options.lowering, options.direct_without_kernel, options.limits.plain_prologues
    assert found == (lowering, direct, prologues)


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
    assert isinstance(chain_conv._conv(index(model), 0, context), Reject) != CONVOLUTIONS[shape, kind]


def test_channels_that_the_kernels_read_at_once():
    kinds = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE)
    assert [chain_conv.chunk(kind) for kind in kinds] == [4, 8, 8, 2]


def test_stages_that_repeat_and_those_that_add_tensors():
    once = {"LowerOperator", "ImageConv", "ChainConv", "ChainPool", "ChainHead", "ChainConcats", "ChannelsLast"}
    keep_shapes = {"FuseEpilogue", "FusePrologue", "ChainConcats"}
    for stage in STAGES:
        names = {type(work).__name__ for work in stage.rules}
        assert (stage.repeats, stage.adds_tensors) == (not names & once, not names & keep_shapes), names


def test_what_is_too_large_to_be_computed():
    assert (MAX_WEIGHT_ELEMENTS, MAX_FOLDED_ELEMENTS, MAX_FOLDED_NODES) == (134217728, 4096, 100)


def test_sizes_and_scales_of_random_inputs():
    assert OPEN_SIZES == (64, 224, 32, 128, 16, 8, 1, 256, 512)
    assert SCALES == (1, 1 / 16, 1 / 256, 1 / 4096) and MAX_INPUT_BYTES == 1024**3
