# SPDX-License-Identifier: Apache-2.0
"""Single decisions that few models depend on: each one is what tells a right from a slightly wrong optimizer."""

from __future__ import annotations

import io
import os

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import convpool
from convpool.algebra import lowering as lowerings
from convpool.algebra.geometry import ConvSpec, PoolSpec, Refusal
from convpool.algebra.lowering import Layer
from convpool.check.judge import Judge, Tolerance, array_errors
from convpool.errors import ModelError
from convpool.ir import files, save, schema
from convpool.ir import files as external
from convpool.ir.edit import Editor
from convpool.ir.index import index_model
from convpool.ir.inference import mark_layers
from convpool.ir.model import infer_shapes, load, passes_full_check
from convpool.report import _finite
from convpool.rules import lower_operator
from convpool.rules import seen as reasons
from convpool.rules.base import Reject
from tests.support import sessions
from tests.support.models import graph, operators, random_feeds
from tests.support.rewriting import PAIR, POOL

CONV = "h = Conv<pads=[1,1,1,1]>(x, w)\n"


def check(model: onnx.ModelProto, pairs: int, **options) -> convpool.OptimizeResult:
    """The result of a model in which so many pairs are rewritten, compared with the original."""
    result = convpool.optimize(model, check=2, **options)
    assert result.report.summary.rewritten == pairs, [site.reason for site in result.report.sites]
    return result


def test_pairs_that_share_a_pooling_are_rewritten_one_by_one():
    """A pooling that a convolution on either side could take."""
    body = f"p = Conv<pads=[1,1,1,1]>(x, w)\nq = {POOL}(p)\ny = Conv(q, v)"
    model = graph(body, {"v": (8, 32, 3, 3)})
    for given in ({}, {"fuse_pool_conv": True}, {"fuse_pool_conv": True, "lowering": "fused"}):
        result = convpool.optimize(model, check=1, **given)
        assert result.changed and operators(result.model.graph).get("AveragePool", 0) == 0


def test_an_error_twice_the_original_s_own_passes():
    reference, exact = np.zeros(4), Tolerance(0.0, 0.0)
    original = np.array([0.0, 1.0, 0.0, 0.0])
    for error, passed in ((1.9, True), (2.0, True), (2.1, False)):
        assert array_errors("y", reference, np.array([0, 0, 0, error]), exact, original).passed is passed
    assert not array_errors("y", reference, np.array([0, 0, 0, 0.1]), exact).passed


def test_empty_sequences_agree():
    judge = Judge.__new__(Judge)
    found = judge._sequence("y", [], [], [])
    assert (found.max_abs_error, found.max_rel_error, found.passed) == (0, 0, True)


@pytest.mark.parametrize("place", ["x" * 300, "circle"])
def test_data_files_whose_names_cannot_be_followed(tmp_path, place):
    os.symlink("circle", tmp_path / "circle")
    with pytest.raises(ModelError, match=r"^w: external data '.*': cannot be read; (File name too long|Too many levels|Symlink)"):
        external._checked_size("w", tmp_path, place)


def test_data_that_gets_shorter(tmp_path):
    (tmp_path / "data").write_bytes(bytes(8))
    tensor = TensorProto(data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "data"), ("offset", "0"), ("length", "8")):
        tensor.external_data.add(key=key, value=value)
    assert external.external_bytes(tensor, tmp_path) == bytes(8)
    (tmp_path / "data").write_bytes(bytes(7))
    with pytest.raises(ModelError, match="'data': got shorter since the model was loaded"):
        external.external_bytes(tensor, tmp_path)


def test_zeros_are_copied_as_a_hole_and_not_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(save, "_CHUNK_BYTES", 4)
    content = b"abcd" + bytes(8) + b"efgh" + bytes(2)
    (tmp_path / "data").write_bytes(content)
    copied = io.BytesIO()
    save._copy_bytes(tmp_path / "data", 2, len(content) - 2, copied)
    assert copied.getvalue() == content[2:]


def test_a_file_is_whole_when_it_gets_its_name(tmp_path, monkeypatch):
    seen, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda source, target: seen.append(os.path.getsize(source)) or replace(source, target))
    files.write_atomically(tmp_path / "out", bytes(100))
    assert seen == [100]


def test_saving_leaves_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        files.write_atomically(tmp_path / "out", b"x")
        assert os.umask(0o027) == 0o027 and (tmp_path / "out").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_the_size_of_a_model_from_memory():
    model = graph(PAIR)
    assert convpool.optimize(model, check=0).report.summary.bytes_before == model.ByteSize()


@pytest.mark.parametrize(("body", "counts"), [("q = Slice(x, s, e, a)", 0), ("q = elsewhere.Crop(x, s, e, a)", 1)])
def test_a_noted_shape_counts_behind_an_operator_that_onnx_does_not_know(body, counts):
    """A Slice by an input keeps the rank alone, and the mean needs the sizes; a note of them may be of other inputs."""
    body = f"{body}\nh = Conv(q, w)\ny = ReduceMean<axes=[2,3], keepdims=1>(h)"
    inputs = "float[1,16,20,20] x, int64[2] s, int64[2] e"
    model = graph(body, {"a": [2, 3]}, inputs=inputs, imports=', "elsewhere": 1')
    assert convpool.optimize(model, check=0).report.summary.rewritten == 0
    model.graph.value_info.append(helper.make_tensor_value_info("q", TensorProto.FLOAT, [1, 16, 12, 12]))
    assert convpool.optimize(model, check=0).report.summary.rewritten == counts


def test_a_claimed_size_below_zero_is_refused():
    model = graph(PAIR)
    model.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, [1, 32, -5, 12]))
    with pytest.raises(ModelError, match=r"tensor 'h': shape; got \[1, 32, -5, 12\], expected no negative size"):
        convpool.optimize(model)
    model.graph.value_info[0].type.tensor_type.shape.dim[2].dim_value = -1  # as some write an open one
    assert convpool.optimize(model, check=0).changed


def test_onnx_knows_every_operator():
    schema.register_schema()
    assert [name for name in schema.OP_TYPES if not onnx.defs.has(name, schema.DOMAIN)] == []


def operator_model(**attributes) -> onnx.ModelProto:
    """A node of the operator, with some attributes changed."""
    model = convpool.optimize(graph(PAIR), check=0).model
    node = next(node for node in model.graph.node if schema.is_operator(node))
    for name, value in attributes.items():
        next(item for item in node.attribute if item.name == name).CopyFrom(helper.make_attribute(name, value))
    return model


@pytest.mark.parametrize("name", ["strides", "pads", "pool_pads", "pool_strides"])
def test_attributes_of_other_ranks_are_told(name):
    (site,) = convpool.optimize(operator_model(**{name: [1]}), lowering="direct", check=0).report.sites
    assert site.status == "rejected" and "attributes; got" in site.reason and "expected numbers for 2 axes" in site.reason


def test_an_odd_number_of_pads_is_told():
    (site,) = convpool.optimize(operator_model(pads=[1, 1, 1, 1, 1]), lowering="direct", check=0).report.sites
    assert site.status == "rejected" and "attributes; got" in site.reason and "expected numbers for 2 axes" in site.reason


@pytest.mark.parametrize(
    ("kernel", "strides", "pads", "idle"),
    [((1, 1), (1, 1), 0, True), ((1, 2), (1, 1), 0, False), ((1, 1), (1, 2), 0, False), ((1, 1), (1, 1), 1, False)],
)
def test_a_window_of_one_element_at_every_position_averages_nothing(kernel, strides, pads, idle):
    assert lower_operator._is_idle(PoolSpec(kernel, strides, (0, 0, 0, pads), (1, 1))) == idle


def test_weights_of_another_rank_are_told():
    model = operator_model()
    model.graph.initializer[0].dims[:] = [32, 9, 16]
    (site,) = convpool.optimize(model, lowering="direct", check=0).report.sites
    assert site.reason == "ConvAvgPool 'y': shape of the weights; got [32, 9, 16], expected one of rank 4"


@pytest.mark.parametrize("shape", [(), (16,), (32, 1)])
def test_a_bias_of_another_shape_in_a_function_is_told(shape):
    functions = f"""<opset_import: ["": 17], domain: "local">
    net (a) => (v) {{ h = Conv<pads=[1,1,1,1]>(a, w, b) v = {POOL}(h) }}"""
    model = graph("y = local.net(x)", functions=functions, imports=', "local": 1')
    for name, size in (("w", (32, 16, 3, 3)), ("b", shape)):
        value = numpy_helper.from_array(np.ones(size, np.float32))
        model.functions[0].node.insert(0, helper.make_node("Constant", [], [name], value=value))
    (site,) = convpool.optimize(model, check=0).report.sites
    assert site.reason == f"Conv 'h': shape of the bias; got {list(shape)}, expected [32]"


def test_a_lowered_node_keeps_its_words():
    model = operator_model()
    node = next(node for node in model.graph.node if schema.is_operator(node))
    node.name, node.doc_string = "name", "words"
    result = check(model, 1, lowering="direct").model
    assert [(node.name, node.doc_string) for node in result.graph.node if node.op_type == "Conv"] == [("name", "words")]


def test_a_result_that_is_no_valid_onnx_is_an_error(monkeypatch):
    monkeypatch.setattr(Editor, "finish", lambda editor, scopes: editor._model.graph.node.add(op_type="None", output=["z"]))
    with pytest.raises(ModelError, match="^the result is not valid ONNX: No Op registered for None"):
        convpool.optimize(graph(PAIR), check=0)


def test_metadata_is_written_once():
    model = graph(PAIR)
    model.metadata_props.add(key="convpool.target", value="old")
    model.metadata_props.add(key="other", value="kept")
    result = convpool.optimize(model, target="cuda", check=0).model
    assert [(item.key, item.value) for item in result.metadata_props] == [("other", "kept"), ("convpool.target", "cuda")]


def test_fused_weights_may_grow_sixteenfold_and_any_up_to_a_limit(monkeypatch):
    conv, pool = ConvSpec((1, 1), (1, 1), (0,) * 4, (1, 1), 1), PoolSpec((4, 4), (4, 4), (0,) * 4, (1, 1))
    layer = Layer(conv, (8, 8, 1, 1), (16, 16), True)
    monkeypatch.setattr(lowerings, "MAX_FUSED_ELEMENTS", 100)
    assert lowerings._fused(layer, pool).name == "fused"
    wider = PoolSpec((5, 4), (5, 4), (0,) * 4, (1, 1))
    refused = lowerings._fused(layer, wider)
    assert (
        isinstance(refused, Refusal) and "got 1,280, expected at most 1,024" in f"got {refused.got}, expected {refused.expected}"
    )
    monkeypatch.setattr(lowerings, "MAX_FUSED_ELEMENTS", 1280)
    assert lowerings._fused(layer, wider).name == "fused"


def test_halves_that_are_no_strided_slices():
    """Slices without steps, one beside the other: their mean is no average over windows."""
    ends = {"b": [0, 0], "c": [0, 6], "e": [12, 6], "f": [12, 12], "a": [2, 3], "half": np.float32(0.5)}
    body = CONV + "s1 = Slice(h, b, e, a)\ns2 = Slice(h, c, f, a)\nt = Add(s1, s2)\ny = Mul(t, half)"
    check(graph(body, ends), 0)


@pytest.mark.parametrize("behind", ["g = Mul(h, k)", "g = BatchNormalization(h, k1, b1, b1, k1)"])
def test_a_computed_bias_is_scaled_too(behind):
    """Nothing may be folded into the weights alone."""
    body = f"h = Conv<pads=[1,1,1,1]>(x, w, bias)\n{behind}\ny = {POOL}(g)"
    constants = {"k": np.float32(3), "k1": (32,), "b1": np.full(32, 0.5, np.float32)}
    constants["k1"] = np.linspace(0.5, 2, 32, dtype=np.float32)
    model = graph(body, constants, inputs="float[1,16,12,12] x, float[32] bias")
    for lowering in ("convavgpool", "direct", "fused", "auto"):
        result = convpool.optimize(model, check=0, lowering=lowering)
        feeds = random_feeds(model)
        (wanted,), (got,) = sessions.run(model, feeds), sessions.run(result.model, feeds)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_normalization_in_training_is_none_of_inference():
    statistics = {"g": (32,), "b": (32,), "m": (32,), "v": np.ones(32, np.float32)}
    body = CONV + f"n, rm, rv = BatchNormalization<training_mode=1>(h, g, b, m, v)\ny = {POOL}(n)"
    for outputs in ("n, rm, rv", "n"):
        model = graph(body.replace("n, rm, rv", outputs), statistics)
        (site,) = convpool.optimize(model, check=0).report.sites
        assert site.status == "rejected" and "form; got training, expected inference" in site.reason
    old = CONV + f"n, rm, rv, sm, sv = BatchNormalization(h, g, b, m, v)\ny = {POOL}(n)"
    (site,) = convpool.optimize(graph(old, statistics, opset=9), check=0).report.sites
    assert site.status == "rejected" and "form; got training, expected inference" in site.reason


@pytest.mark.parametrize(
    ("condition", "got", "words"),
    [
        ("sizes", "unknown for 2 axes", "sizes: unknown"),
        ("axes", "a computed tensor", "axes not constant"),
        ("mode", "nearest", "mode"),
        ("output 'x'", "2 readers", "read by something else too"),
        ("saves too little as fused", "5", "saves too little"),
        (reasons.BETWEEN, "Relu", "Relu between"),
    ],
)
def test_reasons_in_short(condition, got, words):
    assert reasons.in_short(Reject("node", condition, got, "more")) == words


@pytest.mark.parametrize(("target", "form"), [("any", "direct"), ("tensorrt", None), ("cuda", None)])
def test_grouped_pairs_of_computed_weights_stay_where_a_gpu_runs_them(target, form):
    """Such weights cannot be fused, and an AveragePool and a Conv are slower there."""
    model = graph(
        PAIR.replace("pads=", "group=16, pads=").replace("(x, w)", "(x, u)"), inputs="float[1,16,12,12] x, float[32,1,3,3] u"
    )
    (site,) = convpool.optimize(model, target=target, check=0).report.sites
    assert site.lowering == form


def test_layers_are_added_to_the_outputs_that_there_are():
    model = graph(f"{PAIR}\nz = Relu(y)", outputs="float[1,32,6,6] z, float[1,32,6,6] y")
    mark_layers(model)
    assert [value.name for value in model.graph.output] == ["z", "y", "h"]
    assert len(sessions.run(model, random_feeds(model))) == 3


def test_sizes_of_a_tile_that_constants_give():
    """The repeats of Tile are its second input; they come from a Concat."""
    body = (
        "n = Concat<axis=0>(one, two)\nt = Tile(x, n)\n"
        + CONV.replace("(x,", "(t,")
        + "y = ReduceMean<axes=[2,3], keepdims=1>(h)"
    )
    model = graph(body, {"one": [1, 1], "two": [2, 1]}, inputs="float[1,16,12,12] x")
    check(model, 1, lowering="direct")


@pytest.mark.parametrize("computed", ["starts", "ends", "axes", "steps"])
def test_sizes_of_a_slice_that_constants_give(computed):
    """Each of Slice's inputs, one of them from a Concat."""
    given = {"starts": [0, 1], "ends": [8, 9], "axes": [2, 3], "steps": [1, 1]}
    constants = {name: values for name, values in given.items() if name != computed}
    constants |= {f"{computed}{i}": [value] for i, value in enumerate(given[computed])}
    body = f"{computed} = Concat<axis=0>({computed}0, {computed}1)\nt = Slice(x, starts, ends, axes, steps)\n"
    model = graph(body + CONV.replace("(x,", "(t,") + "y = ReduceMean<axes=[2,3], keepdims=1>(h)", constants)
    check(model, 1, lowering="direct")


def test_a_gather_of_one_index_gives_a_number():
    """Also of a shape with an open batch, of which onnx knows nothing."""
    for index, shape in ((np.int64(2), ()), (np.array([2]), (1,)), (np.array([[2, 3]]), (1, 2))):
        body = "s = Shape(x)\ng = Gather(s, i)\ny = Identity(g)"
        model = graph(body, {"i": index}, inputs="float[N,16,12,14] x", outputs="int64[a] y")
        del model.graph.output[0].type.tensor_type.shape.dim[:]
        model.graph.output[0].type.tensor_type.ClearField("shape")
        (scope,) = index_model(model, numpy_helper.to_array, lambda *_: pytest.fail("nothing to compute"), infer_shapes(model))
        found = scope.constant("g")
        assert found is not None and found.shape == shape and found.array().reshape(-1).tolist() == [12, 14][: found.array().size]


def test_the_size_of_a_graph():
    gs = pytest.importorskip("onnx_graphsurgeon")
    assert convpool.optimize(gs.import_onnx(graph(PAIR)), check=0).report.summary.bytes_before > 18432


def test_shapes_of_what_a_gather_picks_of_a_shape():
    """One index gives a number, a list gives a list; both with an open batch."""
    for index, body in (
        (np.int64(2), "n = Unsqueeze(g, zero)\nf = Concat<axis=0>(b, n, rest)"),
        (np.array([2]), "f = Concat<axis=0>(b, g, rest)"),
    ):
        text = CONV + f"s = Shape(x)\ng = Gather(s, i)\n{body}\nr = Reshape(h, f)\ny = ReduceMean<axes=[2], keepdims=0>(r)"
        constants = {"i": index, "zero": [0], "b": [-1, 32], "rest": [12]}
        model = graph(text.replace("axes=[2]", "axes=[2,3]"), constants, inputs="float[N,16,12,12] x", outputs="float[a,b] y")
        check(model, 1)


@pytest.mark.parametrize(("kind", "field"), [(TensorProto.COMPLEX64, "float_data"), (TensorProto.COMPLEX128, "double_data")])
def test_complex_numbers_are_stored_as_two(kind, field):
    model = graph(PAIR)
    tensor = model.graph.initializer.add(name="c", data_type=kind, dims=[3])
    getattr(tensor, field).extend([1.0] * 6)
    assert convpool.optimize(model, check=0).changed
    getattr(tensor, field).append(1.0)
    with pytest.raises(ModelError, match="tensor 'c': data; got 7 stored values, expected 3"):
        convpool.optimize(model)


def test_errors_that_are_not_finite_are_null_in_json():
    infinite = float("inf")
    assert _finite({"a": [infinite, 1.0, {"b": [-infinite]}], "c": float("nan")}) == {"a": [None, 1.0, {"b": [None]}], "c": None}


def test_a_sum_onto_computed_numbers_is_no_mean():
    corners = {"f": [0, 0], "r": [1, 0], "c": [0, 1], "d": [1, 1], "e": [2**40, 2**40], "a": [2, 3], "s": [2, 2]}
    slices = "".join(f"s{i} = Slice(h, {start}, e, a, s)\n" for i, start in enumerate("frcd"))
    body = CONV + slices + "n = Shape(s0)\nz = Expand(v, n)\nt = Sum(z, s0, s1, s2, s3)\ny = Div(t, four)"
    constants = {**corners, "four": np.float32(4)}
    check(graph(body, constants, inputs="float[1,16,12,12] x, float[1] v"), 0)
    check(graph(body, {**constants, "v": np.zeros(1, np.float32)}), 1)


def test_a_box_filter_that_cannot_be_told_is_reported():
    body = 'h = Conv(x, w)\ny = Conv<group=32, strides=[2,2], auto_pad="SAME_UPPER">(h, box)'
    model = graph(body, {"box": np.full((32, 1, 2, 2), 0.25, np.float32)}, inputs="float[1,16,H,W] x")
    (site,) = convpool.optimize(model, check=0).report.sites
    assert site.status == "rejected" and "auto_pad" in site.reason


def test_strict_shape_inference_refuses_shapes_that_contradict_the_nodes():
    """A result must pass it where the original does."""
    model = graph("h = Relu(x)\ny = Conv<pads=[1,1,1,1]>(h, w)")
    assert passes_full_check(load(model))
    model.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, [1, 16, 12, 13]))
    assert not passes_full_check(load(model))
