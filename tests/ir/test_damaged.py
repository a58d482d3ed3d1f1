# SPDX-License-Identifier: Apache-2.0
"""Damaged models: whatever is wrong with a file, convpool refuses it in its own words, and neither crashes nor hangs.
CONVPOOL_TEST_ROUNDS=20 runs more of them, CONVPOOL_DAMAGED_FIRST=N others, CONVPOOL_DAMAGED_PROCESSES=8 more at a time."""

import os
import stat
import sys
import threading
from contextlib import nullcontext, suppress
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper, numpy_helper

import convpool
from convpool.errors import ModelError
from convpool.ir import files, inlining
from convpool.ir import index as constants
from convpool.ir import model as sanity
from convpool.ir.index import constant_of
from tests.fuzz.damaged import Outcome, share
from tests.support.damage import damaged
from tests.support.models import graph, operators
from tests.support.rewriting import PAIR, POOL, cases

CASES = cases(1000)
FIRST = int(os.environ.get("CONVPOOL_DAMAGED_FIRST", "0"))
PROCESSES = int(os.environ.get("CONVPOOL_DAMAGED_PROCESSES", "2"))


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return share(FIRST, CASES, PROCESSES)


def test_only_exceptions_of_its_own(outcome):
    assert not outcome.faults, "\n".join(f"case {seed}: {fault}" for seed, fault in outcome.faults.items())
    assert outcome.counts.total() == CASES


def test_the_cases_reach_every_ending(outcome):
    if CASES < 1000:
        pytest.skip("too few cases for shares")
    for ending, percent in (("ModelError", 40), ("unchanged", 2), ("changed", 5)):
        assert outcome.counts[ending] >= CASES * percent // 100, outcome.counts
    assert outcome.counts["OptionError"] == outcome.counts["OutputError"] == 0


def test_a_case_is_the_same_each_time():
    assert [damaged(seed) for seed in range(50)] == [damaged(seed) for seed in range(50)]


def with_tensor(**fields) -> onnx.ModelProto:
    model = graph(PAIR)
    tensor = model.graph.initializer[0]
    for name, value in fields.items():
        if value is None:
            tensor.ClearField(name)
        elif isinstance(value, list):
            getattr(tensor, name)[:] = value
        elif name == "segment":
            tensor.segment.CopyFrom(value)
        else:
            setattr(tensor, name, value)
    return model


def with_window(value: object) -> onnx.ModelProto:
    model = graph(f"{PAIR.replace('y =', 'p =')}\ny = MaxPool<kernel_shape=[2,2], ceil_mode=1>(p)")
    model.graph.node[-1].attribute[0].CopyFrom(helper.make_attribute("kernel_shape", value))
    return model


MODELS = {
    "a window that is no list": (lambda: with_window(2.0), "kernel_shape"),
    "too few bytes": (lambda: with_tensor(dims=[32, 16, 3, 4]), r"tensor 'w': data; got 18432 bytes, expected 24576 for"),
    "too many bytes": (lambda: with_tensor(dims=[32, 16, 3, 2]), "got 18432 bytes, expected 12288"),
    "too few stored values": (lambda: with_tensor(raw_data=None, float_data=[1.0] * 100), "got 100 stored values, expected 4608"),
    "two values": (lambda: with_tensor(int64_data=[1]), r"tensor name: w\) should contain one and only one value field"),
    "unknown type": (lambda: with_tensor(data_type=77), "tensor 'w': element type; got 77, expected one of ONNX's"),
    "no type": (lambda: with_tensor(data_type=0), "element type; got 0"),
    "strings": (lambda: with_tensor(data_type=TensorProto.STRING), "expected strings"),
    "negative size": (lambda: with_tensor(dims=[32, -16, 3, -3]), "expected no negative size"),
    "a segment": (lambda: with_tensor(segment=TensorProto.Segment(begin=0, end=3)), "data; got a segment of them, expected all"),
    "size beyond memory": (lambda: with_tensor(dims=[2**62, 2**62, 3, 3]), "expected at most 576460752303423488 elements"),
    "an input of 2^33": (lambda: graph(PAIR, inputs=f"float[1,16,{2**33},12] x"), r"8589934592, 12\]; got \d+ bytes, expected"),
}


@pytest.mark.parametrize(("make", "message"), MODELS.values(), ids=MODELS)
def test_damage_by_hand(make, message):
    with pytest.raises(ModelError, match=message):
        convpool.optimize(make())


@pytest.mark.parametrize("what", ["h", "quantization", "scale", "sparse", "overload", "device"])
def test_a_name_that_is_no_text(what):
    model = graph(PAIR.replace("h", "hhhh" if what == "h" else "h"))
    note, node, name = model.graph.quantization_annotation.add(), model.graph.node[0], "hhhh"
    note.tensor_name = name if what == "quantization" else "h"
    note.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value=name if what == "scale" else "w")
    model.graph.sparse_initializer.add().values.name = name if what == "sparse" else "s"
    node.overload = name if what == "overload" else ""
    node.device_configurations.add().sharding_spec.add().tensor_name = name if what == "device" else "h"
    data = model.SerializeToString()
    with pytest.raises(ModelError, match="a name; got the bytes .*, expected UTF-8"):
        convpool.optimize(data.replace(b"hhhh", b"hh\xff\xfe"))


def test_notes_that_are_no_text_stay():
    model = graph(PAIR)
    model.doc_string = model.producer_name = model.domain = model.graph.doc_string = model.graph.node[0].doc_string = "hhhh"
    model.graph.node[0].metadata_props.add(key="hhhh", value="hhhh")
    result = convpool.optimize(model.SerializeToString().replace(b"hhhh", b"hh\xff\xfe"), check=0)
    assert result.report.summary.rewritten == 1 and result.model.SerializeToString().count(b"hh\xff\xfe") == 7


def test_an_element_type_of_an_input_that_there_is_not():
    model = graph(PAIR)
    model.graph.input[0].type.tensor_type.elem_type = 99
    with pytest.raises(ModelError, match="tensor 'x': element type; got 99"):
        convpool.optimize(model)
    model.graph.input[0].type.tensor_type.elem_type = 0
    with pytest.raises(ModelError):
        convpool.optimize(model)


def call_graphs() -> dict[str, list[tuple[int, int]]]:
    """Who calls whom, without a circle: a caller has the larger number, or in those named backward the smaller one."""
    random = np.random.default_rng(0)
    found = {
        "chain": [(k + 1, k) for k in range(300)],
        "one calls all": [(300, k) for k in range(300)],
        "all call one": [(k + 1, 0) for k in range(300)],
        "diamonds": [(k + 2 + e, k + d) for k in range(0, 300, 2) for d in (0, 1) for e in (0, 1)],
        "every pair": [(k, j) for k in range(60) for j in range(k)],
        "tree": [(1000 - (k - 1) // 2, 1000 - k) for k in range(1, 300)],
    }
    for n in (10, 100, 300, 900):
        pairs = (random.choice(300, 2, replace=False) for _ in range(n))
        found[f"random {n}"] = [(max(pair), min(pair)) for pair in pairs]
    return found | {f"{name} backward": [(-a, -b) for a, b in edges] for name, edges in found.items()}


def calling(edges: list[tuple[int, int]]) -> onnx.ModelProto:
    called = {name: [] for edge in edges for name in edge}
    for caller, callee in edges:
        called[caller].append(onnx.helper.make_node(f"f{callee}", ["a"], ["b"], domain="d"))
    functions = [onnx.helper.make_function("d", f"f{name}", ["a"], ["b"], called[name], []) for name in sorted(called)]
    return onnx.helper.make_model(onnx.helper.make_graph([], "g", [], []), functions=functions)


def steps_of(work) -> int:
    """Lines of Python that it runs."""
    lines = [0]

    def trace(frame, event, argument):
        lines[0] += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines[0]


@pytest.mark.parametrize(("name", "edges"), call_graphs().items(), ids=call_graphs())
def test_functions_that_call_one_another(name, edges):
    """In time that grows with the number of calls; a circle of any length is found."""
    model = calling(edges)
    size = len(edges) + len(model.functions)
    assert steps_of(lambda: inlining.check_functions(model)) < 60 * size
    below: dict[int, set[int]] = {}
    for caller, callee in sorted(edges, reverse="backward" in name):
        below.setdefault(caller, set()).update({callee} | below.get(callee, set()))
    top = max(below, key=lambda caller: len(below[caller]))
    for start in {top, edges[0][0]}:
        end = max(below[start])
        with pytest.raises(ModelError, match="it calls itself; got a circle"):
            inlining.check_functions(calling([*edges, (end, start)]))
    with pytest.raises(ModelError, match=f"'d::f{top}': it calls itself"):
        inlining.check_functions(calling([*edges, (top, top)]))


@pytest.mark.parametrize("width", [2, 3, 7, 10, 700])
@pytest.mark.parametrize("beyond", [False, True], ids=["few", "many"])
def test_functions_whose_calls_stand_for_too_many_nodes(width, beyond):
    """A row of functions, each of which calls the one before `width` times, up to the limit and beyond."""
    levels, nodes = 0, 1
    while 1 + width * nodes < inlining.MAX_NODES:
        levels, nodes = levels + 1, 1 + width * nodes
    levels += beyond
    model = calling([(level + 1, level) for level in range(levels) for _ in range(width)])
    model.graph.node.append(onnx.helper.make_node(f"f{levels}", ["x"], ["many"], domain="d"))
    refusal = pytest.raises(ModelError, match=f"stand for too many nodes; got more than {inlining.MAX_NODES}")
    with refusal if beyond else nullcontext():
        inlining.check_functions(model)


def test_a_function_that_calls_itself():
    model = convpool.optimize(graph(PAIR), check=0).model
    function = model.functions[0]
    function.node.append(onnx.helper.make_node(function.name, list(function.input), ["again"], domain=function.domain))
    with pytest.raises(ModelError, match="it calls itself"):
        convpool.optimize(model)


@pytest.mark.parametrize("order", [1, -1])
def test_functions_of_one_name_differ_by_their_overloads(order):
    """One may call the other; two of one overload are refused."""
    make_node, imports = onnx.helper.make_node, [onnx.helper.make_opsetid("", 17)]
    nodes = {"": make_node("Relu", ["x"], ["y"]), "twice": make_node("f", ["x"], ["y"], domain="d")}
    functions = [onnx.helper.make_function("d", "f", ["x"], ["y"], [nodes[key]], imports, overload=key) for key in nodes]
    model = calling([])
    model.functions.extend(functions[::order])
    inlining.check_functions(model)
    model.functions.append(functions[1])
    with pytest.raises(ModelError, match="'d::f': defined twice"):
        inlining.check_functions(model)


def test_an_operator_of_convpools_without_its_attributes():
    model = convpool.optimize(graph(PAIR), check=0).model
    for name in ("kernel_shape", "pool_strides", "pads"):
        broken = onnx.ModelProto.FromString(model.SerializeToString())
        (node,) = broken.graph.node
        kept = [attribute for attribute in node.attribute if attribute.name != name]
        del node.attribute[:]
        node.attribute.extend(kept)
        with pytest.raises(ModelError):
            convpool.optimize(broken)


def test_no_memory_for_the_check(monkeypatch):
    monkeypatch.setattr("convpool.check.judge.array_errors", Mock(side_effect=MemoryError))
    with pytest.raises(ModelError, match=r"not enough memory to check it; give smaller input_shapes .*, or check=0"):
        convpool.optimize(graph(PAIR))
    with pytest.raises(ModelError, match="not enough memory"):
        convpool.verify(graph(PAIR), graph(PAIR))


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


CONSTANTS = [
    ("value_float", 2.5, np.float32, [2.5]),
    ("value_floats", [1.5, 2.0], np.float32, [1.5, 2.0]),
    ("value_int", 3, np.int64, [3]),
    ("value_ints", [3, 4], np.int64, [3, 4]),
]


@pytest.mark.parametrize(("name", "value", "dtype", "elements"), CONSTANTS)
def test_values_of_a_constant(name, value, dtype, elements):
    array = constant_of(helper.make_node("Constant", [], ["c"], **{name: value}), numpy_helper.to_array).array()
    assert array.dtype == dtype and array.reshape(-1).tolist() == elements and array.ndim == (name[-1] == "s")


@pytest.mark.parametrize("node", ["Resize(h, , s)", "Resize(h, , , s)", "Pad(h, s)", "Mul(h, s)", "Resize<axes=[2,3]>(k, , t)"])
def test_strings_for_numbers_and_a_map_without_axes_are_left_alone(node):
    constants = {"s": np.array(["1"] * 4), "t": np.float32([2, 2])}
    model = graph(f"k = ReduceMean<keepdims=0>(x) h = Conv(x, w) u = {node}\ny = {POOL}(u)", constants, opset=18)
    assert not convpool.optimize(model, check=0).changed


@pytest.mark.parametrize("order", [[2**40] * 4, [0, 3, 1], [0, 1, 2, -1], [1, 0, 2, 3, 4]], ids=str)
@pytest.mark.parametrize(
    "body",
    [
        "h = Conv(x, w)\nt = Transpose<perm=[0,2,3,1]>(h)\nu = BAD(t)\ny = POOL(u)",
        "h = Conv(x, w)\nt = BAD(h)\nr = Relu(t)\nu = Transpose<perm=[0,3,1,2]>(r)\ny = POOL(u)",
        "g = BAD(x)\np = Pad(g, o)\nt = BAD(p)\nh = Conv(t, w)\ny = POOL(h)",
        "t = Transpose<perm=[0,3,1,2]>(x)\ng = GatherND(t, i)\nu = BAD(g)\ny = Conv(u, w)",
    ],
    ids=["behind a convolution", "in front of another", "around a Pad", "behind a GatherND"],
)
def test_orders_of_axes_that_are_none_are_left_alone(body, order):
    constants = {"o": [0, 0, 1, 1, 0, 0, 1, 1], "i": np.stack(np.indices((1, 4, 4, 4)), -1)}
    model = graph(body.replace("BAD", f"Transpose<perm={order}>").replace("POOL", POOL), constants)
    bad = [node for node in model.graph.node if node.attribute and list(node.attribute[0].ints) == order]
    with suppress(ModelError):  # for a convolution's input that no longer has four axes
        left = convpool.optimize(model, check=0, target="tensorrt", fold=True).model
        assert bad and [node for node in left.graph.node if node in bad] == bad


def test_constants_whose_value_is_not_known():
    nodes = [helper.make_node("Constant", [], ["c"], **values) for values in ({"value_string": "text"}, {}, {})]
    nodes[2].attribute.append(AttributeProto(name="value_int", ref_attr_name="count", type=AttributeProto.INT))
    assert [constant_of(node, numpy_helper.to_array) for node in nodes] == [None] * 3


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
