# SPDX-License-Identifier: Apache-2.0
"""libconvpool_ort.so in onnxruntime's CPU package: registration, types and shapes, refusals, and results by its CPU kernels."""

import itertools
import os
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, compose, helper

import convpool
from convpool import onnxruntime as on_gpu
from convpool.ir import schema
from convpool.ir.model import load
from models import generators
from tests.support.models import graph
from tests.support.operator_models import SAMPLED, Node

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def library(plugin, monkeypatch) -> Path:
    """The library beside libconvpool.so."""
    monkeypatch.setenv("CONVPOOL_LIBRARY", str(plugin))
    return on_gpu.library_path()


def registered(model: onnx.ModelProto):
    """A session on the CPU provider with the library."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    on_gpu.register(options)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run_together(nodes: dict[str, Node]) -> None:
    """Run nodes, by a prefix for their names, in one model: making a session takes far longer than a run."""
    given = {prefix: node.with_constants(node.arrays(1)) for prefix, node in nodes.items()}
    parts = (compose.add_prefix(node.model(functions=False), prefix) for prefix, node in nodes.items())
    *others, whole = sorted(parts, key=lambda part: max(entry.version for entry in part.opset_import if entry.domain))
    for part, field in itertools.product(others, ("node", "input", "output", "initializer")):
        getattr(whole.graph, field).extend(getattr(part.graph, field))
    feeds = {prefix + name: a for prefix, node in nodes.items() for name, a in node.feeds(given[prefix]).items()}
    for (prefix, node), y in zip(nodes.items(), registered(whole).run([f"{prefix}Y" for prefix in nodes], feeds), strict=True):
        node.check(y, given[prefix])


@pytest.mark.parametrize("part", range(8))
def test_every_operator_of_every_type(part):
    names = itertools.product(SAMPLED[part::8], ("float16", "bfloat16", "float32", "float64"))
    run_together({f"{op_type}_{dtype}_": Node(op_type, dtype) for op_type, dtype in names})


@pytest.mark.parametrize("channels_last", [0, 1, 2, 3])
def test_ranks_groups_and_layouts(channels_last):
    cases = itertools.product(("ReluConvAvgPoolAdd", "ReluUpsampleConvAdd"), ((11,), (7, 10), (5, 6, 7)), (1, 4))
    run_together({f"{case}": Node(case[0], sizes=case[1], group=case[2], channels_last=channels_last) for case in cases})


@pytest.mark.parametrize("op_type", ["ConvAvgPool", "UpsampleConv"])
@pytest.mark.parametrize("bias", [True, False])
def test_open_sizes_and_weights_that_change(bias, op_type):
    node = Node(op_type, constant=False, open_sizes=True, bias=bias)
    session = registered(node.model(functions=False))
    for seed, (batch, sizes) in enumerate([(1, (9, 10)), (3, (4, 31)), (1, (9, 10))]):
        node.run(session, seed, batch=batch, sizes=sizes)


WIDE = 65535
"""Padding at each side, with which a small X has tensors of any number of elements behind it."""


@pytest.mark.parametrize("open_sizes", [False, True])
@pytest.mark.parametrize("channels_last", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("node", "tensor"),
    [
        (Node(sizes=(2, 2), channels=128), "AveragePool(X)"),
        (Node("ReluConvAvgPoolTanh", "float16", sizes=(2, 2, 2)), "AveragePool(X)"),
        (Node("AffineConvAvgPool", "float64", sizes=(3, 2, 3), channels=8192, filters=1), "AveragePool(X)"),  # above 2^64
        (Node("ConvAvgPool", "bfloat16", sizes=(2, 2), filters=256, batch=1), "Y"),
        (Node("LeakyReluConvAvgPool", sizes=(2, 2, 2), group=2), "Y"),
        (Node("ReluUpsampleConv", sizes=(2, 2), filters=256, batch=1), "Y"),
    ],
)
def test_sizes_beyond_all_memory_are_refused_before_any_is_taken(node, tensor, channels_last, open_sizes):
    pads = {"pads": [WIDE] * 2 * node.rank, "strides": [1] * node.rank}
    attributes = pads if tensor == "Y" else {"pool_pads": [WIDE] * 2 * node.rank, "strides": [WIDE] * node.rank}
    node = replace(node, channels_last=channels_last, open_sizes=open_sizes, attributes=attributes)
    with pytest.raises(Exception) as error:
        node.run(registered(node.model(functions=False)))
    assert f"{node.op_type}: sizes of {tensor}; got [" in str(error.value)
    assert "expected at most 2^40 elements" in str(error.value)


def test_2_to_the_40_elements_are_the_most():
    attributes = {"pool_pads": [WIDE] * 4, "strides": [WIDE] * 2}  # 2^17 places of an axis of 3
    registered(Node(sizes=(3, 3), channels=64, batch=1, attributes=attributes).model(functions=False))
    with pytest.raises(Exception, match=r"got \[1, 65, 131072, 131072\], expected at most 2\^40 elements"):
        registered(Node(sizes=(3, 3), channels=65, batch=1, attributes=attributes).model(functions=False))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("kernel", ["pool_kernel_shape", "pool_dilations"])
def test_windows_over_padding_take_no_longer(rank, kernel):
    """Up to 2^48 taps, of which one is over an element."""
    pool = {"pool_kernel_shape": [2] * rank, "pool_pads": [WIDE - 1] * 2 * rank, "pool_strides": [WIDE] * rank}
    pool |= {kernel: [WIDE - (kernel == "pool_dilations")] * rank}
    kernel_shape = {"kernel_shape": [1] * rank, "strides": [1] * rank, "pads": [0] * 2 * rank}
    model = Node(sizes=(1,) * rank, attributes=pool | kernel_shape).model(functions=False)
    w = onnx.numpy_helper.from_array(np.ones((16, *[1] * rank, 8), np.float32), "W")
    (at,) = (i for i, item in enumerate(model.graph.initializer) if item.name == "W")
    model.graph.initializer[at].CopyFrom(w)
    x = np.full((2, 8, *[1] * rank), 2.0**17, np.float32)
    bias = next(onnx.numpy_helper.to_array(item) for item in model.graph.initializer if item.name == "B")
    got = registered(model).run(None, {"X": x})[0]
    taps = (2 if kernel == "pool_dilations" else WIDE) ** rank
    expected = 8 * 2.0**17 / taps + bias.reshape(-1, *[1] * rank)
    np.testing.assert_allclose(got, np.broadcast_to(expected, got.shape), rtol=1e-6)


@pytest.mark.parametrize("attributes", [{}, {"pool_pads": [WIDE] * 4, "strides": [WIDE] * 2}])
def test_sizes_of_0_have_no_elements(attributes):
    node = Node("ConvAvgPool", open_sizes=True, sizes=(9, 10), channels=128, attributes=attributes)
    got = registered(node.model(functions=False)).run(None, {"X": np.zeros((0, 128, 9, 10), np.float32)})[0]
    assert got.shape == (0, 16, *((5, 5) if not attributes else (3, 3)))


def test_a_map_without_elements_is_not_upsampled():
    """Pads would give a result, of nothing but the bias."""
    session = registered(Node("UpsampleConv", open_sizes=True).model(functions=False))
    with pytest.raises(Exception, match="UpsampleConv: dimension 2 of X; got 0, expected 1 to"):
        session.run(None, {"X": np.zeros((2, 8, 0, 10), np.float32)})
    (got,) = session.run(None, {"X": np.zeros((0, 8, 9, 10), np.float32)})
    assert got.shape == (0, 16, 26, 20)


def test_half_types_round_to_nearest():
    """Every value that is one, and those between: by a pooling of one element and a weight of 1."""
    values = np.frombuffer(np.arange(2**16, dtype=np.uint16).tobytes(), np.float16)
    with np.errstate(invalid="ignore", over="ignore"):
        floats = np.concatenate([values.astype(np.float32), np.nextafter(values, np.float16(np.inf)).astype(np.float32) * 0.75])
    made = Node("ConvAvgPool", "float16", sizes=(1,), channels=1, filters=1, batch=len(floats)).model(functions=False)
    for item in made.graph.node[-2].attribute:
        if item.name in ("pool_kernel_shape", "kernel_shape", "strides"):
            item.ints[:] = [1]
        if item.name in ("pads", "pool_pads"):
            item.ints[:] = [0, 0]
    del made.graph.initializer[:]
    for name, array in (("W", np.ones((1, 1, 1), np.float32)), ("B", np.zeros(1, np.float32))):
        made.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    with np.errstate(over="ignore", invalid="ignore"):
        expected = floats.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(registered(made).run(None, {"X": floats.reshape(-1, 1, 1)})[0].ravel(), expected)


@pytest.mark.parametrize("channels_last", [0, 1, 2, 3])
def test_types_and_shapes_are_inferred(channels_last):
    y_last = channels_last in (1, 2)
    node = Node("ConvAvgPoolAdd", "float16", open_sizes=True, channels_last=channels_last)
    (output,) = registered(node.model(functions=False)).get_outputs()
    batch, *spatial = output.shape
    channels = spatial.pop(-1 if y_last else 0)
    assert (output.type, batch, channels) == ("tensor(float)", "N", 16)
    assert len({*spatial, "N"}) == 3 and all(isinstance(name, str) for name in spatial)  # none for known, no two for equal
    fixed = Node("ConvAvgPool", channels_last=channels_last)
    assert registered(fixed.model(functions=False)).get_outputs()[0].shape == list(fixed.expected(fixed.arrays()).shape)


REFUSED = [  # attributes, the message, and the operator if it is another one than ConvAvgPool
    ({"kernel_shape": None}, "kernel_shape; got no such attribute, expected one on the node"),
    ({"kernel_shape": [3, 5]}, "ConvAvgPool: shape of W; got [16, 3, 3, 8], expected [?, 3, 5, 8]"),
    ({"strides": [2, 2, 2]}, "strides; got 3 values, expected 2 for a kernel_shape of 2"),
    ({"strides": [0, 1]}, "strides[0]; got 0, expected 1 to 65535"),
    ({"strides": 2}, "ConvAvgPool: strides; got an attribute of another type, expected integers"),
    ({"group": [1]}, "ConvAvgPool: group; got an attribute of another type, expected an integer"),
    ({"group": 3}, "ConvAvgPool: channels of X; got 8, expected a multiple of group 3"),
    ({"weight_perm": [0, 1, 2, 3]}, "ConvAvgPool: weight_perm; got [0, 1, 2, 3], expected [0, 3, 1, 2]"),
    ({"x_perm": [0, 3, 1, 2]}, "ConvAvgPool: x_perm; got [0, 3, 1, 2], expected [0, 1, 2, 3]"),
    ({"channels_last": 4}, "ConvAvgPool: channels_last; got 4, expected 0 to 3"),
    ({"accumulation": 2}, "accumulation[0]; got 2, expected 0 to 1"),
    ({"accumulation": -1}, "accumulation[0]; got -1, expected 0 to 1"),
    ({"accumulation": "packed"}, "ConvAvgPool: accumulation; got an attribute of another type, expected an integer"),
    ({"pool_kernel_shape": [40, 2]}, "pool_kernel_shape[0]: elements under the window; got 9 and 1 pads, expected at least"),
    ({"prologue_activation": 2}, "prologue_activation; got 2, expected 1 by the operator's name", "ReluConvAvgPool"),
    ({"alpha": 0.5}, "alpha; got 0.5, expected 0, as the operator's name has no LeakyRelu there", "ConvAvgPoolRelu"),
    ({"alpha": "x"}, "alpha; got an attribute of another type, expected a float", "ConvAvgPoolLeakyRelu"),
    ({"r_perm": [0, 3, 1, 2]}, "r_perm; got [0, 3, 1, 2], expected [0, 1, 2, 3]", "ConvAvgPoolAdd"),
    ({"upsample": [3, 5]}, "upsample[1]; got 5, expected 1 to 4", "UpsampleConv"),
    ({"upsample": [2, 2]}, "UpsampleConv: scales; got [1, 1, 3, 2], expected 1, 1, then upsample", "UpsampleConv"),
    ({"scales": 2.0}, "UpsampleConvAdd: scales; got an attribute of another type", "UpsampleConvAdd"),
    ({"upsample": None}, "upsample; got no such attribute, expected one on the node", "ReluUpsampleConv"),
    ({"dilations": [20, 1]}, "kernel_shape[0]: elements under the window; got 27 and 1 pads, expected at", "UpsampleConv"),
    ({"norm_groups": 3}, "channels of X; got 8, expected a multiple of norm_groups 3", "NormalizedConvAvgPool"),
    ({"epsilon": -1.0}, "epsilon; got -1, expected a finite number of at least 0", "NormalizedConvAvgPool"),
    ({"epsilon": np.inf}, "epsilon; got inf, expected a finite number of at least 0", "NormalizedUpsampleConv"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: "-".join(map(str, (*case[2:], *case[0].items()))))
def test_wrong_attributes_and_those_that_deny_the_operator_are_refused(case):
    attributes, message, *op_type = case
    with pytest.raises(Exception, match=re.escape(message)):
        registered(Node(*op_type, attributes=attributes).model(functions=False))


def test_a_residual_of_another_shape_is_refused():
    node = Node("ConvAvgPoolAdd", open_sizes=True)
    session, arrays = registered(node.model(functions=False)), node.arrays()
    arrays["R"] = arrays["R"][:, :, :1]
    with pytest.raises(Exception, match=r"ConvAvgPoolAdd: shape of R; got \[2, 16, 1, 5\], expected \[2, 16, 5, 5\]"):
        session.run(None, node.feeds(arrays))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_optimized_network_runs_alike_with_and_without_the_library(dtype):
    model = generators.generate("wgan_gp", batch=1, dtype=dtype, width=16)
    result = convpool.optimize(model, target="tensorrt", check=0)
    assert schema.used_in(result.model)
    inputs = generators.random_inputs(model)
    with_library = registered(result.model).run(None, inputs)
    for a, b in zip(with_library, on_gpu.session(result.model, [on_gpu.CPU]).run(None, inputs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2 if dtype == "float16" else 1e-4, atol=1e-3)


def test_shapes_that_nothing_tells_before_a_run():
    node = Node(constant=False)
    model, arrays = node.model(functions=False), node.arrays()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    session = registered(model)
    node.check(session.run(None, node.feeds(arrays))[0], arrays)
    for name, array, message in (
        ("X", arrays["X"][0], "number of dimensions of X; got 3, expected 4"),
        ("W", arrays["W"][..., :4], "shape of W; got [16, 3, 3, 4], expected [?, 3, 3, 8]"),
        ("B", arrays["B"][:3], "shape of B; got [3], expected [16]"),
        ("X", arrays["X"][:, :, :0], "elements under the window; got 0 and 1 pads, expected at least 2"),
    ):
        with pytest.raises(Exception, match=re.escape(message)):
            session.run(None, {**node.feeds(arrays), name: array})


def test_an_empty_name_in_the_bias_s_place_is_no_bias():
    node = Node(bias=False)
    model = node.model(functions=False)
    model.graph.node[0].input.append("")
    node.run(registered(model))


def test_a_node_in_a_branch():
    node = Node()
    model, arrays = node.model(functions=False), node.arrays()
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("Y", "Z", "out")}
    branch = helper.make_graph(list(model.graph.node), "then", [], [values["Y"]], list(model.graph.initializer))
    other = helper.make_graph([helper.make_node("Identity", ["X"], ["Z"])], "else", [], [values["Z"]])
    condition = helper.make_node("If", ["c"], ["out"], then_branch=branch, else_branch=other)
    inputs = [*model.graph.input, helper.make_tensor_value_info("c", TensorProto.BOOL, [])]
    made = helper.make_graph([condition], "g", inputs, [values["out"]])
    outer = helper.make_model(made, opset_imports=list(model.opset_import), ir_version=8)
    node.check(registered(outer).run(None, {"X": arrays["X"], "c": np.array(True)})[0], arrays)


WAYS = {
    "package": on_gpu.register,
    "onnxruntime": lambda options: options.register_custom_ops_library(str(on_gpu.library_path())),
}


AGAIN = [*itertools.product(WAYS, repeat=2), *((way, other, way) for way, other in itertools.permutations(WAYS))]


@pytest.mark.parametrize("ways", AGAIN, ids=" ".join)
@pytest.mark.parametrize("between", ["nothing", "a session", "a session's copy"])
def test_registering_again_changes_nothing(ways, between):
    node = Node()
    options, model = onnxruntime.SessionOptions(), node.model(functions=False).SerializeToString()
    for way in ways:
        WAYS[way](options)
        if between == "nothing":
            continue
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        node.run(session)
        if between == "a session's copy":  # has the entries of the options, and not their operators
            options = session.get_session_options()
            WAYS[way](options)
    node.run(onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]))


FOLDER = "session.model_external_initializers_file_folder_path"
GIVEN = {
    "path": Path, "string": str, "loaded": load, "bytes": lambda path: onnx.load(path).SerializeToString(), "proto": onnx.load,
}  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "before"),
    [
        *((*pair, None) for pair in itertools.product(GIVEN, repeat=2)),
        # For a model that is a path, some releases look there themselves.
        *((*pair, "elsewhere") for pair in itertools.product(["loaded", "bytes", "proto"], repeat=2)),
    ],
)
def test_options_of_the_caller_are_as_before(first, second, before, tmp_path):
    """Both models have a data file of one name and size; neither gets the other's weights."""
    options = onnxruntime.SessionOptions()
    if before:
        options.add_session_config_entry(FOLDER, str(tmp_path / before))
    for value, given in ((1, first), (2, second)):
        folder = tmp_path / str(value)
        folder.mkdir()
        weights = {"W": np.full((4, 4, 3, 3), value, np.float32)}
        model = graph("Y = Conv(X, W)", weights, inputs="float[1,4,8,8] X", outputs="float[1,4,6,6] Y")
        onnx.save(model, folder / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
        source = GIVEN[given](folder / "m.onnx")
        own = on_gpu.session(source, [on_gpu.CPU])
        own.set_providers([on_gpu.CPU])  # for which onnxruntime loads the model and its data again
        for session in (own, on_gpu.session(source, [on_gpu.CPU], options=options)):
            got = session.run(None, {"X": np.ones((1, 4, 8, 8), np.float32)})[0]
            np.testing.assert_array_equal(got, np.full_like(got, 36 * value))
        now = ""
        with suppress(RuntimeError):
            now = options.get_session_config_entry(FOLDER)
        assert now == (str(tmp_path / before) if before else "")


def test_a_session_on_a_machine_without_the_provider_says_so():
    if on_gpu.CUDA in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has the CUDA provider")
    with pytest.raises(on_gpu.OnnxruntimeError, match="expected CUDAExecutionProvider; pip uninstall onnxruntime, then"):
        on_gpu.session(Node().model())


def test_a_library_that_is_not_there_is_named(tmp_path, monkeypatch, library):
    (tmp_path / "libconvpool.so").symlink_to("/dev/null")
    monkeypatch.setenv("CONVPOOL_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(on_gpu.OnnxruntimeError, match="libconvpool: not found"):
        on_gpu.library_path()
    shutil.copy(library.parent / "libconvpool.so", tmp_path / "copy.so")
    monkeypatch.setenv("CONVPOOL_LIBRARY", str(tmp_path / "copy.so"))
    with pytest.raises(on_gpu.OnnxruntimeError, match=r"libconvpool_ort.so: not found; got .*, expected it beside"):
        on_gpu.library_path()
    (tmp_path / "libconvpool_ort.so").write_bytes(b"no library")
    with pytest.raises(on_gpu.OnnxruntimeError, match="cannot be registered; got .*file too short"):
        on_gpu.register(onnxruntime.SessionOptions())


def test_it_links_neither_onnxruntime_nor_a_driver(library):
    printed = subprocess.run(["readelf", "-d", "--dyn-syms", str(library)], capture_output=True, text=True, check=True).stdout
    needed = [line for line in printed.splitlines() if "NEEDED" in line]
    assert needed and not [line for line in needed if "onnxruntime" in line or "libcuda" in line]
    exported = [line.split()[-1] for line in printed.splitlines() if " GLOBAL " in line and " UND " not in line]
    assert exported == ["RegisterCustomOps"]


def in_old_onnxruntime(library, folder, model, feeds) -> subprocess.CompletedProcess:
    """Run a model in the Python with an old onnxruntime that CONVPOOL_OLD_ONNXRUNTIME_PYTHON names; Y goes to y.npy."""
    python = os.environ.get("CONVPOOL_OLD_ONNXRUNTIME_PYTHON")
    if python is None:
        pytest.skip("CONVPOOL_OLD_ONNXRUNTIME_PYTHON names no Python with an old onnxruntime")
    onnx.save(model, folder / "model.onnx")
    np.savez(folder / "inputs.npz", **feeds)
    code = f"""
import numpy as np, onnxruntime as ort
options = ort.SessionOptions()
options.register_custom_ops_library({str(library)!r})
options.register_custom_ops_library({str(library)!r})
session = ort.InferenceSession({str(folder / "model.onnx")!r}, options, providers=["CPUExecutionProvider"])
np.save({str(folder / "y.npy")!r}, session.run(None, dict(np.load({str(folder / "inputs.npz")!r})))[0])
"""
    return subprocess.run([python, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("op_type", ["ConvAvgPool", "AffineReluConvAvgPoolAddLeakyRelu"])
def test_the_oldest_onnxruntime_runs_it(op_type, bias, library, tmp_path):
    node = Node(op_type, "float16", bias=bias)
    arrays = node.arrays()
    done = in_old_onnxruntime(library, tmp_path, node.model(functions=False), node.feeds(arrays))
    assert done.returncode == 0, done.stderr[-2000:]
    node.check(np.load(tmp_path / "y.npy"), arrays)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("sizes", [(11,), (7, 10), (5, 6, 7)])
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("open_sizes", [True, False])
def test_an_empty_name_does_not_end_an_old_onnxruntime(dtype, sizes, constant, open_sizes, library, tmp_path):
    """It runs from 1.24 on; before, it is refused."""
    node = Node("ConvAvgPool", dtype, sizes, bias=False, constant=constant, open_sizes=open_sizes)
    model, arrays = node.model(functions=False), node.arrays()
    (made,) = (item for item in model.graph.node if item.op_type == "ConvAvgPool")
    made.input.append("")
    done = in_old_onnxruntime(library, tmp_path, model, node.feeds(arrays))
    if done.returncode == 0:
        node.check(np.load(tmp_path / "y.npy"), arrays)
    else:
        assert done.returncode == 1 and "absent, but not optional. Op : ConvAvgPool" in done.stderr, done.stderr[-2000:]


def test_declarations_are_those_of_the_header(tmp_path):
    """CONVPOOL_ONNXRUNTIME_INCLUDE names a folder with onnxruntime_c_api.h."""
    include = os.environ.get("CONVPOOL_ONNXRUNTIME_INCLUDE")
    compiler = shutil.which("c++") or shutil.which("g++")
    if include is None or compiler is None:
        pytest.skip("CONVPOOL_ONNXRUNTIME_INCLUDE names no folder of onnxruntime's headers")
    folder = ROOT / "plugin" / "onnxruntime"
    command = [compiler, "-std=c++17", "-fsyntax-only", "-isystem", include, str(folder / "check_declarations.cpp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
