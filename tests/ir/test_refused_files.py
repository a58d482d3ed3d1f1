# SPDX-License-Identifier: Apache-2.0
"""Models, tensors and files that are refused in words, each for one defect."""

import io
import os
import stat
import threading

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper

import convpool
from convpool.errors import ModelError
from convpool.ir import constants, files, save
from convpool.ir import model as sanity
from convpool.ir.constants import constant_tensor
from convpool.ir.files import external_bytes
from tests.support.models import graph, operators
from tests.support.rewriting import PAIR, POOL


def refused(model: object) -> str:
    """Why a model is not taken."""
    with pytest.raises(ModelError) as found:
        convpool.optimize(model, check=0)
    return str(found.value)


def test_what_is_no_model(tmp_path):
    path = tmp_path / "a.onnx"
    path.write_bytes(onnx.ModelProto(producer_name="nobody").SerializeToString())
    assert refused(path) == f"{path}: not an ONNX model; it has no IR version or no graph"
    path.write_bytes(onnx.ModelProto(ir_version=8).SerializeToString())
    assert refused(path) == f"{path}: not an ONNX model; it has no IR version or no graph"
    path.write_bytes(b"")
    assert refused(path) == f"{path}: empty; expected an ONNX model"
    assert refused(tmp_path) == f"{tmp_path}: a folder; expected an ONNX file"
    assert refused(tmp_path / "b.onnx") == f"{tmp_path / 'b.onnx'}: no such file"
    assert refused(tmp_path / ("b" * 300)) == f"{tmp_path / ('b' * 300)}: cannot be read; File name too long"


def test_a_function_that_is_defined_twice():
    functions = """<opset_import: ["": 17], domain: "local">
    one (a) => (b) { b = Relu(a) }"""
    model = graph("y = local.one(x)", functions=functions, imports=', "local": 1')
    model.functions.append(model.functions[0])
    assert refused(model) == "function 'local::one': defined twice; expected once"
    del model.functions[1:]
    assert not convpool.optimize(model, check=0).changed


def test_a_name_that_is_no_utf_8():
    data = graph(PAIR).SerializeToString().replace(b"AveragePool", b"AveragePoo\xff")
    assert "got the bytes" in refused(data) and "expected UTF-8" in refused(data)


def external(**entries: str) -> TensorProto:
    """Two floats in a data file."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": "data", **entries}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"offset": "-1"}, "tensor 'w': offset of its external data; got '-1', expected a number of bytes"),
        ({"length": "two"}, "tensor 'w': length of its external data; got 'two', expected a number of bytes"),
        ({"location": ""}, "tensor 'w': external data without a location"),
        ({"location": "a\0b"}, "tensor 'w': external data 'a\\x00b'; expected a file name"),
    ],
)
def test_places_of_data_that_cannot_be(tmp_path, entries, message):
    (tmp_path / "data").write_bytes(bytes(8))
    model = graph(PAIR)
    (tensor,) = model.graph.initializer
    tensor.CopyFrom(external(**entries))
    with pytest.raises(ModelError) as found:
        convpool.optimize(model, check=0, base_dir=tmp_path)
    assert message in str(found.value)


def test_strings_in_a_data_file(tmp_path):
    tensor = external()
    tensor.data_type = TensorProto.STRING
    with pytest.raises(ModelError, match="^tensor 'w': external data; got strings, expected numbers$"):
        external_bytes(tensor, tmp_path)


def test_data_that_are_gone_when_they_are_read(tmp_path):
    with pytest.raises(ModelError, match="^external data 'data': cannot be read; No such file or directory$"):
        external_bytes(external(length="8"), tmp_path)


def test_bytes_that_are_gone_when_they_are_copied(tmp_path):
    (tmp_path / "data").write_bytes(bytes(range(8)))
    copied = io.BytesIO()
    save._copy_bytes(tmp_path / "data", 2, 6, copied)
    assert copied.getvalue() == bytes(range(2, 8))
    with pytest.raises(ModelError, match="data': got shorter since the model was loaded$"):
        save._copy_bytes(tmp_path / "data", 2, 7, io.BytesIO())


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    files.write_atomically(pipe, b"model")
    reader.join(10)
    assert read == [b"model"] and stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_graph_in_a_list_of_graphs_captures_too():
    """The list is an unknown operator's."""
    inner = helper.make_graph([helper.make_node("Relu", ["h"], ["r"])], "inner", [], [helper.make_empty_tensor_value_info("r")])
    model = graph(f"h = Conv<pads=[1,1,1,1]>(x, w)\ny = {POOL}(h)", imports=', "other": 1')
    assert convpool.optimize(model, check=0).changed
    node = helper.make_node("Switch", [], ["z"], domain="other")
    node.attribute.append(AttributeProto(name="bodies", type=AttributeProto.GRAPHS, graphs=[inner]))
    model.graph.node.append(node)
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    (site,) = convpool.optimize(model, check=0).report.sites
    assert site.reason == "Conv 'h': output 'h' is read by a subgraph; got other readers, expected only the pooling"


CONSTANTS = {
    "value_float": (2.5, np.float32, [2.5]),
    "value_floats": ([1.5, 2.0], np.float32, [1.5, 2.0]),
    "value_int": (3, np.int64, [3]),
    "value_ints": ([3, 4], np.int64, [3, 4]),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_values_of_a_constant(name):
    value, dtype, elements = CONSTANTS[name]
    array = onnx.numpy_helper.to_array(constant_tensor(helper.make_node("Constant", [], ["c"], **{name: value})))
    assert array.dtype == dtype and array.reshape(-1).tolist() == elements and array.ndim == (name[-1] == "s")


def test_constants_whose_value_is_not_known():
    text = helper.make_node("Constant", [], ["c"], value_string="text")
    given = helper.make_node("Constant", [], ["c"])
    given.attribute.append(AttributeProto(name="value_int", ref_attr_name="count", type=AttributeProto.INT))
    assert constant_tensor(text) is None and constant_tensor(given) is None
    assert constant_tensor(helper.make_node("Constant", [], ["c"])) is None


@pytest.mark.parametrize(("limit", "folded"), [(2 * 32 * 16 * 9, True), (2 * 32 * 16 * 9 - 1, False)])
def test_weights_are_computed_from_so_many_elements_at_most(monkeypatch, limit, folded):
    monkeypatch.setattr(constants, "MAX_WEIGHT_ELEMENTS", limit)
    model = graph(f"v = Mul(w, u)\nh = Conv<pads=[1,1,1,1]>(x, v)\ny = {POOL}(h)", {"u": (32, 16, 3, 3)})
    result = convpool.optimize(model, check=0, lowering="fused")
    assert result.changed == folded
    if folded:
        assert operators(result.model.graph) == {"Conv": 1}


@pytest.mark.parametrize("found", [b"caf\xe9", UnicodeDecodeError("utf-8", b"caf\xe9", 3, 4, "invalid")])
def test_a_name_that_protobuf_gives_as_bytes_or_refuses(monkeypatch, found):
    def strings(model):
        yield "fine"
        if isinstance(found, bytes):
            yield found
        else:
            raise found

    monkeypatch.setattr(sanity, "_strings", strings)
    with pytest.raises(ModelError, match=r"^model: a name; got the bytes b'caf\\xe9', expected UTF-8$"):
        sanity.check_strings(graph(PAIR))
