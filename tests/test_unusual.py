# SPDX-License-Identifier: Apache-2.0
"""Single functions where something is missing, refused or of an unusual form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from google.protobuf.message import EncodeError
from onnx import TensorProto, helper, numpy_helper

import convpool
from convpool.algebra.geometry import refuse
from convpool.api import rewrite
from convpool.check.inputs import load_arrays
from convpool.errors import ModelError, OptionError, OutputError
from convpool.ir import constants, save, schema
from convpool.ir import files as external
from convpool.ir import index as index_module
from convpool.ir import model as model_module
from convpool.ir import model as sanity
from convpool.ir import schema as domains
from convpool.ir.constants import Constant, computed, folded
from convpool.ir.index import TensorInfo
from convpool.ir.model import load
from convpool.ir.protos import _read_names
from convpool.options import options_for
from convpool.rules.base import Reject
from convpool.rules.convs import Pooling, moved_pads
from convpool.rules.origins import spatial_sizes
from convpool.rules.pool_first.averages import box_filter, candidates, may_be_box_filter, recognise
from tests.support.models import graph, operators
from tests.support.rewriting import IF_INPUTS, PAIR, POOL
from tests.support.scopes import FUNCTION, function_scope, index


def test_a_result_as_bytes():
    result = convpool.optimize(graph(PAIR), check=0)
    assert onnx.load_from_string(result.to_bytes()) == result.model


def test_a_model_too_large_for_one_file(monkeypatch):
    class Large:
        def SerializeToString(self):
            raise EncodeError

    with pytest.raises(ModelError, match="^model: too large for one file; got over 2147483647 bytes, expected less; give it ext"):
        save.serialize(Large())
    model = graph(PAIR)
    size = save._whole_bytes(model)
    for limit in (size, size - 1):
        monkeypatch.setattr(save, "PROTOBUF_LIMIT_BYTES", limit)
        if limit == size:
            assert save.self_contained(model, None) == model
            continue
        message = f"^model: too large without data files; got {size} bytes, expected at most {limit}$"
        with pytest.raises(ModelError, match=message):
            save.self_contained(model, None)


def test_one_array_without_a_name_is_no_data(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(3))
    with pytest.raises(OptionError, match="x.npy': not a .npz file of named arrays$"):
        load_arrays(tmp_path / "x.npy")


def test_what_the_reference_refuses_is_not_folded():
    node = helper.make_node("Reshape", ["a", "s"], ["y"])
    for shape, known in (([2, 3], True), ([4, 2], False)):
        tensor = folded(node, "y", {"a": np.arange(6.0), "s": np.array(shape)}, 17)
        assert (tensor is not None) == known
        assert tensor is None or np.array_equal(numpy_helper.to_array(tensor), np.arange(6.0).reshape(shape))


def test_weights_that_cannot_be_computed_are_no_constants(monkeypatch):
    leaf = Constant(numpy_helper.from_array(np.arange(4.0)), numpy_helper.to_array)
    asked = []

    def evaluate(model, name):
        asked.append(name)
        if len(asked) > 1:
            raise RuntimeError("no kernel")
        return np.arange(3.0)

    nodes = [helper.make_node("Neg", ["a"], ["y"])]
    found = computed(nodes, "y", {"a": leaf}, 17, evaluate)
    assert found is not None and numpy_helper.to_array(found).tolist() == [0, 1, 2]
    assert computed(nodes, "y", {"a": leaf}, 17, evaluate) is None and asked == ["y", "y"]
    for most in (7, 8):
        monkeypatch.setattr(constants, "MAX_WEIGHT_ELEMENTS", most)
        assert computed(nodes, "y", {"a": leaf, "b": leaf}, 17, evaluate) is None
    assert len(asked) == 3  # too large, and not asked for


def test_data_that_cannot_be_read(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "data").write_bytes(bytes(8))
    monkeypatch.setattr(external, "load_external_data_for_tensor", refused)
    with pytest.raises(ModelError, match="^w: external data 'data': cannot be read; Permission denied$"):
        external._checked_size("w", tmp_path, "data")


@pytest.mark.parametrize("found", [b"caf\xe9", UnicodeDecodeError("utf-8", b"caf\xe9", 3, 4, "invalid")])
def test_a_name_that_is_no_utf_8(monkeypatch, found):
    """Protobuf gives its bytes or raises."""

    def strings(model):
        yield "fine"
        if isinstance(found, bytes):
            yield found
        else:
            raise found

    monkeypatch.setattr(sanity, "_strings", strings)
    with pytest.raises(ModelError, match=r"^model: a name; got the bytes b'caf\\xe9', expected UTF-8$"):
        sanity.check_strings(graph(PAIR))


@pytest.mark.parametrize(
    "body", ["b = Conv<group: int = @e>(a, w)", "b = AveragePool<kernel_shape = [2,2], ceil_mode: int = @e>(a)"]
)
def test_sizes_behind_a_window_by_an_attribute_of_the_function_begin_there(body):
    assert spatial_sizes(function_scope(body), "b", 2) == ((("b", -2), 1, 1), (("b", -1), 1, 1))


def test_sizes_behind_a_malformed_pooling_begin_there():
    text = "y = AveragePool<kernel_shape=[2,2], strides=[2,2]>(x)"
    (scope,) = index(graph(text, inputs="float[N,16,H,W] x"))
    assert spatial_sizes(scope, "y", 2) == (("H", 2, 2), ("W", 2, 2))
    assert spatial_sizes(scope, "y", 3)[0] == 16 and spatial_sizes(scope, "y", 3)[1][1:] == (1, 1)


def test_a_box_filter_by_an_attribute_of_the_function():
    box = "w2 = Constant<value_floats = [1.0]>() b = Conv<group: int = @e>(a, w2)"
    assert may_be_box_filter(function_scope(box), 1) is None


@pytest.mark.parametrize("pinned", ["conv", "pool", "none"])
def test_a_node_that_stays_by_name(pinned):
    """The layer has a hook: convpool.torch asks so."""
    model = graph(PAIR)
    for node, name in zip(model.graph.node, ("conv", "pool"), strict=True):
        node.name = name
    result = rewrite(load(model), replace(options_for("any"), pinned={pinned: refuse("hook", "one", "none")}), {})
    assert result.changed == (pinned == "none")
    reasons = {"conv": "Conv 'conv': hook; got one, expected none", "pool": "AveragePool 'pool': hook; got one, expected none"}
    assert [site.reason for site in result.report.sites] == [reasons.get(pinned)]


@pytest.mark.parametrize(("front", "parts"), [("m = MaxPool<kernel_shape=[1,1]>(x)", ""), ("m = Add(x, z)", "Relu")])
def test_what_cannot_be_a_prologue_is_no_reason(front, parts):
    """Nobody expects a MaxPool to be fused; an Add of two inputs stays in front of the Relu that is."""
    text = f"{front}\nr = Relu(m)\n{PAIR.replace('(x,', '(r,')}" if parts else f"{front}\n{PAIR.replace('(x,', '(m,')}"
    (site,) = convpool.optimize(graph(text, inputs="float[1,16,12,12] x, float[1,16,12,12] z"), check=0).report.sites
    assert (site.operator, site.beside) == (f"{parts}ConvAvgPool", ())


def test_a_node_by_an_attribute_of_the_function_is_no_constant():
    body = "c = Constant<value_ints = [1]>() d = Concat<axis: int = @e>(c, c) f = Concat<axis = 0>(c, c) b = Reshape(a, f)"
    scope = function_scope(body)
    assert scope.constant("d") is None and scope.constant_ints("f") == (1, 1)


def test_sizes_are_followed_so_deep(monkeypatch):
    steps = "\n".join(f"s{n + 1} = Concat<axis=0>(s{n}, one)" for n in range(4))
    model = graph(f"s0 = Shape(x)\n{steps}\ny = Identity(s4)", {"one": [1]}, inputs="float[N,16] x", outputs="int64[a] y")
    assert index(model)[0].sizes("s4") == ("N", 16, 1, 1, 1, 1)
    for depth, known in ((5, True), (3, False)):
        monkeypatch.setattr(index_module, "MAX_FOLDED_NODES", depth)
        assert (index(model)[0].sizes("s4") is not None) == known


def test_weights_of_whole_numbers_in_a_function_are_told():
    functions = f"""<opset_import: ["": 17], domain: "local">
    net (a) => (v) {{ h = Conv<pads=[1,1,1,1]>(a, w) v = {POOL}(h) }}"""
    model = graph("y = local.net(x)", functions=functions, imports=', "local": 1')
    value = numpy_helper.from_array(np.ones((32, 16, 3, 3), np.int32))
    model.functions[0].node.insert(0, helper.make_node("Constant", [], ["w"], value=value))
    (site,) = convpool.optimize(model, check=0).report.sites
    assert site.reason == "Conv 'h': type of the weights; got INT32, expected floating point"


@pytest.mark.parametrize(
    ("body", "pair"),
    [
        (
            "h = Conv<pads=[1,1,1,1]>(a, w) b = AveragePool<kernel_shape=[2,2], strides=[2,2], ceil_mode: int = @e>(h)",
            True,
        ),
        ("p = AveragePool<kernel_shape=[2,2], strides=[2,2], ceil_mode: int = @e>(a) b = Conv<pads=[1,1,1,1]>(p, w)", False),
    ],
)
def test_poolings_by_an_attribute_of_the_function_beside_a_convolution_for_the_plugin(body, pair):
    functions = f"""<domain: "local", opset_import: ["": 17]> net <e> (a) => (b) {{ {body} }}"""
    model = graph("y = local.net<e = 0>(x)", inputs="float[1,64,16,16] x", functions=functions, imports=', "local": 1')
    value = numpy_helper.from_array(np.ones((64, 64, 3, 3), np.float32))
    model.functions[0].node.insert(0, helper.make_node("Constant", [], ["w"], value=value))
    result = convpool.optimize(model, target="tensorrt", check=1)
    sites = [site.status for site in result.report.sites if site.pool]
    assert sites == (["rewritten"] if pair else []) and result.report.verification.passed


def test_pads_by_an_attribute_of_the_function_are_unknown():
    scope = function_scope("b = Pad<mode: string = @e>(a, w)")
    assert moved_pads(scope, 0, (), 2) is None


def test_what_a_node_reads_through_its_bodies():
    body = """y = If(flag) <then_branch = yes () => (float[a] t) { u = Add(outer, own) t = Mul(u, x) },
      else_branch = no () => (float[a] late) { v = Neg(x) }>"""
    model = graph(body, inputs="float[4] x, bool flag, float[4] outer, float[4] late", outputs="float[a] y")
    node = model.graph.node[0]
    assert _read_names(node) == {"flag", "outer", "own", "x", "late"}
    node.attribute[0].g.initializer.append(numpy_helper.from_array(np.ones(4, np.float32), "own"))
    assert _read_names(node) == {"flag", "outer", "x", "late"}
    node.attribute[1].g.input.append(helper.make_tensor_value_info("late", TensorProto.FLOAT, [4]))
    assert _read_names(node) == {"flag", "outer", "x"}


def test_operators_are_counted_in_bodies_and_functions():
    functions = """<domain: "local", opset_import: ["": 17]> net (f) => (g) { i = Relu(f) g = Neg(i) }"""
    body = f"{PAIR}\nz = If(flag) <then_branch = yes () => (float[a,b,c,d] t) {{ t = Relu(x) }}, "
    body += "else_branch = no () => (float[a,b,c,d] e) { e = local.net(x) }>"
    outputs = "float[a,b,c,d] y, float[e,f,g,h] z"
    model = graph(body, inputs=IF_INPUTS, outputs=outputs, functions=functions, imports=', "local": 1')
    summary = convpool.optimize(model, check=0).report.summary
    assert summary.operators_before == {"AveragePool": 1, "Conv": 1, "If": 1, "Neg": 1, "Relu": 2, "net": 1}
    assert summary.operators_after == {"ConvAvgPool": 1, "If": 1, "Neg": 1, "Relu": 2, "net": 1}


def test_channels_that_do_not_fit_count_by_what_follows_from_the_inputs():
    """Not by value_info, which may be of an earlier version of the model."""
    stale = graph("a = Relu(x)\ny = Conv(a, w)")
    stale.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, [1, 8, 12, 12]))
    assert not convpool.optimize(stale, check=0).changed
    wrong = graph("a = Concat<axis=1>(x, x)\ny = Conv(a, w)")
    with pytest.raises(
        ModelError, match=r"^Conv 'y': weights \[32, 16, 3, 3\], group 1; got an input of shape \[1, 32, 12, 12\]"
    ):
        convpool.optimize(wrong, check=0)


def test_a_result_that_cannot_be_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save._Placer, "_append", full)
    out = tmp_path / "out.onnx"
    with pytest.raises(OutputError, match=f"^{out}: cannot be written; No space left on device$"):
        convpool.optimize(graph(PAIR), check=0).save(out, external_data="one")
    assert list(tmp_path.iterdir()) == []


def test_a_strided_box_filter_with_pads_by_a_size_that_is_unknown():
    box = {"box": np.full((16, 1, 2, 2), 0.25, np.float32)}
    for attributes, wrong in (("strides=[2,2]", False), ('strides=[2,2], auto_pad="SAME_UPPER"', True)):
        (scope,) = index(graph(f"y = Conv<group=16, {attributes}>(x, box)", box, inputs="float[N,16,H,W] x"))
        found = box_filter(scope, 0, 2, None)
        assert isinstance(found, Reject if wrong else Pooling) and (not wrong or found.condition == "auto_pad")


def test_a_function_whose_shapes_cannot_be_inferred(monkeypatch):
    model = graph("y = local.net<e = 1>(x, w)", functions=FUNCTION.format("b = Relu(a)"), imports=', "local": 1')
    info = {"a": TensorInfo(TensorProto.FLOAT, (2, 3))}
    assert index_module._infer_function(model, model.functions[0], info) is not None

    def refused(*_):
        raise ValueError

    monkeypatch.setattr(model_module, "infer_elsewhere", refused)
    assert index_module._infer_function(model, model.functions[0], info) is None


@pytest.mark.parametrize(("size", "known"), [(256, True), (257, False)])
def test_a_sum_over_more_positions_than_its_type_has_numbers(size, known):
    weights = {"w": np.ones((8, 8, 1, 1), np.float16)}
    inputs, outputs = f"float16[1,8,{size},{size - 1}] x", "float16[a,b,c,d] y"
    model = graph("h = Conv(x, w)\ny = ReduceSum(h, axes)", {**weights, "axes": [2, 3]}, inputs=inputs, outputs=outputs)
    (site,) = convpool.optimize(model, check=0).report.sites
    told = f"ReduceSum 'y': factor of the average; got {257.0 * 256}, expected a number that the type has"
    assert site.reason == (None if known else told)


def test_what_is_picked_of_a_shape_that_is_not_all_known():
    body = "s = Shape(x)\ng = Gather(s, two)\nh = Gather(s, first)\nt = Slice(s, three, end)\nc = Concat<axis=0>(s, three)\n"
    constants = {"two": [1, 3], "first": [0], "three": [3], "end": [4], "n": np.int64(3)}
    model = graph(f"{body}k = Gather(s, n)\ny = Identity(c)", constants, inputs="float[N,16,H,12] x", outputs="int64[a] y")
    (scope,) = index(model)
    values = {name: scope.constant(name) for name in "gtkhc"}
    assert {name: value.array().tolist() for name, value in values.items() if value is not None} == {
        "g": [16, 12],
        "t": [12],
        "k": 12,
    }


def test_a_shape_is_a_constant_where_all_of_it_is_known():
    body = "s = Shape(x)\nt = Shape<start=1>(z)\nu = Shape(z)\ny = Concat<axis=0>(s, t, u)"
    (scope,) = index(graph(body, inputs="float[2,16] x, float[N,3,4] z", outputs="int64[a] y"))
    values = {name: scope.constant(name) for name in "stu"}
    assert {name: value.array().tolist() for name, value in values.items() if value is not None} == {"s": [2, 16], "t": [3, 4]}


def test_nodes_in_another_domain_stay_there_unless_they_become_standard_operators():
    result = convpool.optimize(graph(PAIR), check=0)
    result.move_to_domain("trt.plugins")
    again = convpool.optimize(result.model, check=0)
    assert not again.changed and again.model == result.model and again.model.graph.node[0].domain == "trt.plugins"
    standard = convpool.optimize(result.model, lowering="direct", check=1).model
    assert not standard.functions and operators(standard.graph)["AveragePool"] == operators(standard.graph)["Conv"] == 1


def test_sizes_that_shape_inference_names_have_no_name_in_the_result():
    model = graph(PAIR, inputs="float[N,16,H,W] x")
    model = onnx.shape_inference.infer_shapes(model)
    for lowering in ("direct", "convavgpool"):
        result = convpool.optimize(model, lowering=lowering, check=0).model
        names = {dim.dim_param for value in result.graph.value_info for dim in value.type.tensor_type.shape.dim}
        assert names <= {"", "N"} and (lowering != "direct" or len(result.graph.value_info) > 0)


def test_only_nodes_of_the_source_s_domain_move_to_another():
    model = convpool.optimize(graph(PAIR), check=0).model
    for domain, op_type in ((schema.DOMAIN, "Foreign"), ("elsewhere", "ConvAvgPool")):
        model.graph.node.add(op_type=op_type, domain=domain, input=["y"], output=[f"{domain}/{op_type}"])
    assert domains.move_to_domain(model, "trt.plugins")
    assert [node.domain for node in model.graph.node] == ["trt.plugins", schema.DOMAIN, "elsewhere"]
    assert not domains.move_to_domain(model, "trt.plugins") and not domains.move_to_domain(model, schema.DOMAIN)


@pytest.mark.parametrize(
    ("between", "found"),
    [
        ("r = Relu(p)", {"ConvAvgPoolRelu": "p", "ConvAvgPoolAdd": "q"}),
        ("r = Identity(p)", {"ConvAvgPool": "q", "ConvAvgPoolAdd": "p"}),
    ],
)
def test_of_two_nodes_that_meet_the_one_with_more_work_adds_the_other_unless_it_ends_already(between, found):
    body = f"g = Conv<pads=[1,1,1,1]>(x, w)\np = {POOL}(g)\nh = Conv(x, v)\nq = {POOL}(h)\n{between}\ny = Add(r, q)"
    model = graph(body, {"v": (32, 16, 1, 1)})
    model.graph.node[0].name, model.graph.node[2].name = "p", "q"
    first = convpool.optimize(model, check=0, exclude="q").model
    for result in (convpool.optimize(model, check=1).model, convpool.optimize(first, check=1).model):
        assert {node.op_type: node.name for node in result.graph.node} == found


COMPOSED = {  # averages of averages: size, then the kind, window, strides and factor of both together
    "p = AveragePool<kernel_shape=[2,2], strides=[2,2]>(x)\ny = AveragePool<kernel_shape=[3,3], strides=[3,3]>(p)": (
        12,
        ("pool", (6, 6), (6, 6), 1.0),
    ),
    "p = AveragePool<kernel_shape=[2,2], strides=[2,2]>(x)\ny = GlobalAveragePool(p)": (12, ("global", None, None, 1.0)),
    "p = AveragePool<kernel_shape=[3,3], strides=[3,3]>(x)\ny = GlobalAveragePool(p)": (13, ("mean", (12, 12), (12, 12), 1.0)),
    "p = AveragePool<kernel_shape=[2,2]>(x)\ny = AveragePool<kernel_shape=[2,2]>(p)": (12, ("pool", (2, 2), (1, 1), 1.0)),
    "p = ReduceSum(x, width)\ny = ReduceSum(p, height)": (12, ("global", None, None, 144.0)),
    "p = AveragePool<kernel_shape=[2,2], strides=[2,2]>(x)\ny = ReduceSum(p, space)": (12, ("global", None, None, 36.0)),
}


@pytest.mark.parametrize("body", COMPOSED)
def test_averages_of_averages(body):
    """With strides of 1 the elements of the second window overlap those of the first: only the first is taken."""
    size, wanted = COMPOSED[body]
    constants = {"width": [3], "height": [2], "space": [2, 3]}
    (scope,) = index(graph(body, constants, inputs=f"float[1,16,{size},{size}] x"))
    (chain,) = candidates(scope)
    found = recognise(scope, chain, 2)
    assert isinstance(found, Pooling) and found.input == "x"
    spec = found.spec
    kernel, strides = (None, None) if spec is None else (spec.kernel_shape, spec.strides)
    assert (found.kind, kernel, strides, found.factor) == wanted
