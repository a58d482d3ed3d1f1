# SPDX-License-Identifier: Apache-2.0
"""What happens where something is missing, refused or of an unusual form: single functions, each with what it gives then."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from google.protobuf.message import EncodeError
from onnx import TensorProto, helper, numpy_helper

import convpool
from convpool.algebra.refusal import refuse
from convpool.api import rewrite
from convpool.check.inputs import load_arrays
from convpool.errors import ModelError, OptionError
from convpool.ir import constants, external, sanity, save
from convpool.ir.constants import Constant, computed, folded
from convpool.ir.index import Scope, index_model
from convpool.ir.model import _adds, infer_shapes, load
from convpool.options import options_for
from convpool.passes.either_layout import axes_of, joined
from convpool.passes.linear import known_step
from convpool.passes.origins import spatial_origin
from convpool.passes.resize import may_be_half, recognise_half
from convpool.passes.windows import may_be_box_filter
from tests.support.models import graph
from tests.support.rewriting import PAIR


def index(model: onnx.ModelProto) -> list[Scope]:
    return index_model(model, numpy_helper.to_array, lambda *_: pytest.fail("nothing to compute"), infer_shapes(model))


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
    ("claimed", "known", "adds"),
    [
        ([1, 2], None, True),
        ([1, 2], [1, None], True),
        ([1, 2], [1, 2], False),
        ([1, "N"], [1, None], True),
        ([1, "N"], [1, 2], False),
        ([3, 2], [1, None], False),
        ([1, 2, 3], [1, None], False),
        (None, [1, None], False),
        ([None, None], [None, None], False),
    ],
)
def test_what_value_info_adds(claimed, known, adds):
    values = [helper.make_tensor_value_info("t", TensorProto.FLOAT, shape) for shape in (claimed, known)]
    assert _adds(*values) == adds
    assert _adds(values[0], None)


FUNCTION = """<domain: "local", opset_import: ["": 17]> net <e> (a, w) => (b) {{ {0} }}"""


def function_scope(body: str, shape: str = "2,16,8,8") -> Scope:
    """The scope of a function, called with a tensor and weights."""
    model = graph(
        "y = local.net<e = 1>(x, w)",
        inputs=f"float[{shape}] x",
        functions=FUNCTION.format(body),
        imports=', "local": 1',
    )
    return next(scope for scope in index(model) if scope.is_function)


def test_a_linear_node_by_an_attribute_of_the_function():
    scope = function_scope("b = BatchNormalization<epsilon: float = @e>(a, w, w, w, w)")
    assert str(known_step(scope, 0, 2)) == (
        "BatchNormalization 'b': attributes; got a reference to the function's 'epsilon', expected values"
    )


@pytest.mark.parametrize(
    "body", ["b = Conv<group: int = @e>(a, w)", "b = AveragePool<kernel_shape = [2,2], ceil_mode: int = @e>(a)"]
)
def test_sizes_behind_a_window_by_an_attribute_of_the_function_begin_there(body):
    assert spatial_origin(function_scope(body), "b", 2)[0] == "b"


def test_sizes_behind_a_malformed_pooling_begin_there():
    (scope,) = index(graph("y = AveragePool<kernel_shape=[2,2], strides=[2,2]>(x)"))
    assert spatial_origin(scope, "y", 2) == ("x", 2, 2, 2, 2)
    assert spatial_origin(scope, "y", 3)[0] == "y"


def test_a_box_filter_by_an_attribute_of_the_function():
    box = "w2 = Constant<value_floats = [1.0]>() b = Conv<group: int = @e>(a, w2)"
    assert may_be_box_filter(function_scope(box), 1) is None


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
    assert scope.info("y").shape is not None and joined(scope, 0) == JOINED[node]


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


@pytest.mark.parametrize("pinned", ["conv", "pool", "none"])
def test_a_node_that_stays_by_name(pinned):
    """As convpool.torch asks for a layer with a hook."""
    model = graph(PAIR)
    for node, name in zip(model.graph.node, ("conv", "pool"), strict=True):
        node.name = name
    result = rewrite(load(model), replace(options_for("any"), pinned={pinned: refuse("hook", "one", "none")}), {})
    assert result.changed == (pinned == "none")
    reasons = {"conv": "Conv 'conv': hook; got one, expected none", "pool": "AveragePool 'pool': hook; got one, expected none"}
    assert [site.reason for site in result.report.sites] == [reasons.get(pinned)]
