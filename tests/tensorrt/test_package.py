# SPDX-License-Identifier: Apache-2.0
"""TensorRT's package, its registry and its engines as convpool.tensorrt takes them, without TensorRT: versions, paths, types."""

import sys
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from convpool.errors import LibraryError, TensorRTError
from convpool.ir import schema
from convpool.ir.model import load
from convpool.tensorrt import BuildOptions, package, prepare
from convpool.tensorrt.engine import EngineRunner, PycudaMemory
from models.generators import generate
from tests.support.models import graph, model_of
from tests.support.played_engine import ILogger
from tests.support.rewriting import PAIR


def tensorrt(version: str, name: str = "tensorrt") -> ModuleType:
    module = ModuleType(name)
    module.__version__ = version
    module.get_plugin_registry = lambda: None
    return module


@pytest.mark.parametrize(("version", "accepted"), [("8.5.3", False), ("8.6.1", True), ("11.4.0", True), ("12.0.0", False)])
def test_versions(monkeypatch, version, accepted):
    monkeypatch.setitem(sys.modules, "tensorrt", module := tensorrt(version))
    if accepted:
        assert package.tensorrt_module() is module
    else:
        with pytest.raises(TensorRTError, match=f"tensorrt: version; got {version}, expected 8.6 to 11"):
            package.tensorrt_module()


def test_a_module_of_that_name_that_is_not_tensorrt(monkeypatch):
    module = ModuleType("tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    with pytest.raises(TensorRTError, match="^tensorrt: not TensorRT; got <module 'tensorrt'>; pip install tensorrt$"):
        package.tensorrt_module()
    module.Runtime, module.__version__ = object, "10.1.0"  # as the lean package, which has no plugin registry
    assert package.tensorrt_module() is module


def test_the_last_errors_that_tensorrt_logged_are_told_once():
    log = package.logger(SimpleNamespace(__name__="told once", ILogger=ILogger))
    for severity, text in (("ERROR", "a"), ("WARNING", "b"), ("INTERNAL_ERROR", "c\nd")):
        log.log(ILogger.Severity[severity], text)
    assert log.explain("first") == "first | a | c d" and log.explain("second") == "second" and log.explain() == ""
    for text in "123456":
        log.log(ILogger.Severity.ERROR, text)
    assert log.explain() == "3 | 4 | 5 | 6"


def test_networks_compute_in_the_types_of_the_model_from_10_on():
    for version, weakly in (("8.6.1", True), ("9.3.0", True), ("10.0.0", False), ("11.4.0", False)):
        assert package.is_weakly_typed(tensorrt(version)) == weakly
    assert not package.is_weakly_typed(tensorrt("1.7.0", "tensorrt_rtx"))


def test_the_library_that_is_installed(monkeypatch, tmp_path):
    monkeypatch.delenv("CONVPOOL_PLUGIN_LIBRARY", raising=False)
    (tmp_path / "lib.so").write_bytes(b"")
    (tmp_path / "link.so").symlink_to("lib.so")
    monkeypatch.setattr(package, "library_path", lambda: tmp_path / "link.so")
    assert package.plugin_path() == (tmp_path / "lib.so").resolve()
    monkeypatch.setattr(package, "library_path", Mock(side_effect=LibraryError("no library")))
    with pytest.raises(TensorRTError, match="^no library$"):
        package.plugin_path()


@pytest.mark.parametrize(("there", "got"), [(384, ""), (383, "no {}"), (0, "none of the operators")])
def test_a_registry_has_to_have_every_operator(monkeypatch, tmp_path, there, got):
    """The first one there stands for a library that is loaded already."""
    known = schema.OP_TYPES[:there]
    registry = SimpleNamespace(get_creator=lambda name, *_: name if name in known else None)
    trt = SimpleNamespace(__name__="registry", __version__="10.0.0", get_plugin_registry=lambda: registry, ILogger=ILogger)
    path, registered = tmp_path / "own.so", []
    path.write_bytes(b"")
    monkeypatch.setenv("CONVPOOL_PLUGIN_LIBRARY", str(path))
    monkeypatch.setattr(package, "_register", lambda *given: registered.append(given))
    if got:
        missing = got.format(schema.OP_TYPES[-1])
        told = f"{path.resolve()}: plugins; got {missing} in TensorRT 10.0.0, expected 384; build the library"
        with pytest.raises(TensorRTError, match=f"^{told}"):
            package.load_plugin(trt)
    else:
        assert package.load_plugin(trt) == path.resolve()
    assert registered == ([] if there else [(trt, path.resolve())])


def test_a_library_goes_into_the_registry_once_it_can_be_opened(monkeypatch):
    opened, registered = [], []

    def open_library(path):
        opened.append(path)
        if path == "wrong.so":
            raise OSError("invalid ELF header")

    registry = SimpleNamespace(load_library=lambda path: registered.append(path) or "handle")
    trt = SimpleNamespace(__name__="opening", ILogger=ILogger, get_plugin_registry=lambda: registry)
    monkeypatch.setattr(package.ctypes, "CDLL", open_library)
    monkeypatch.setattr(package, "_handles", handles := {})
    package._register(trt, Path("own.so"))
    assert opened == registered == ["own.so"] and handles == {"opening": "handle"}
    with pytest.raises(TensorRTError, match="^wrong.so: cannot be loaded as a plugin library; got invalid ELF header$"):
        package._register(trt, Path("wrong.so"))
    assert registered == ["own.so"]


def test_the_registry_is_asked_by_the_function_of_its_version():
    def asked(**functions):
        return package.find_creator(SimpleNamespace(get_plugin_registry=lambda: SimpleNamespace(**functions)), "ConvAvgPoolRelu")

    assert asked(get_plugin_creator=lambda *words: ("old", *words)) == ("old", "ConvAvgPoolRelu", "1", "")
    assert asked(get_creator=lambda *words: ("new", *words)) == ("new", "ConvAvgPoolRelu", "1", "")
    assert asked(get_creator=lambda *words: "new", get_plugin_creator=lambda *words: "old") == "new"


def info(name: str = "x", *typical: int, dtype=np.float32) -> SimpleNamespace:
    """An input whose profiles have these batches as their typical ones."""
    profiles = [((1, 3), (batch, 3), (16, 3)) for batch in typical]
    return SimpleNamespace(name=name, dtype=np.dtype(dtype), profiles=profiles, format="LINEAR", shape=(-1, 3))


def test_a_runner_gives_what_the_engine_gives():
    engine = SimpleNamespace(inputs={"x": info("x", 2, 5)}, outputs={"y": info("y")}, run=lambda arrays: {"y": arrays["x"] + 1})
    runner = EngineRunner(engine)
    assert np.array_equal(runner.run({"x": np.ones(3)})["y"], np.full(3, 2))
    assert runner.ranges() == {"x": ((1, 3), (2, 3), (16, 3))} and (runner.input_names, runner.output_names) == (["x"], ["y"])


def test_work_is_timed_between_two_events():
    done = []

    class Event:
        def record(self, stream):
            done.append(("record", self, stream))

        def synchronize(self):
            done.append(("wait", self))

        def time_till(self, other):
            return 0.25 * (done.index(("record", other, "stream")) - done.index(("record", self, "stream")))

    memory = PycudaMemory.__new__(PycudaMemory)
    memory._driver, memory.stream = SimpleNamespace(Event=Event, Error=RuntimeError), "stream"
    assert memory.elapsed_us(lambda: done.append("work")) == 500.0
    assert [item if item == "work" else item[0] for item in done] == ["record", "work", "record", "wait"]
    assert done[3][1] is done[2][1]


@pytest.mark.parametrize(("name", "value"), [("value_float", 0.1), ("value_floats", [0.1, 0.2, 1e6])])
def test_constants_as_attributes_become_half_precision_ones(name, value):
    node = helper.make_node("Constant", [], ["y"], **{name: value})
    model = model_of([node], {}, {"y": [len(value)] if isinstance(value, list) else []})
    prepare.cast_floats(model, TensorProto.FLOAT16)
    onnx.checker.check_model(model, full_check=True)
    (tensor,) = [item.t for node in model.graph.node if node.op_type == "Constant" for item in node.attribute]
    assert numpy_helper.to_array(tensor).tolist() == np.minimum(np.array(value), 65504).astype(np.float16).tolist()


def test_casts_to_float_become_half_precision_ones():
    model = graph("c = Cast<to=1>(n)\nd = Cast<to=7>(c)\ny = Add(c, x)", inputs="int64[1,16,12,12] n, float[1,16,12,12] x")
    prepare.cast_floats(model, TensorProto.FLOAT16)
    kinds = [node.attribute[0].i for node in model.graph.node if node.op_type == "Cast"]
    # x to half precision, the model's own two, the result to float32
    assert kinds == [TensorProto.FLOAT16, TensorProto.FLOAT16, TensorProto.INT64, TensorProto.FLOAT]


def test_names_left_out_at_the_end_go_when_functions_are_inlined():
    functions = """<domain: "local", opset_import: ["": 17]> net (a, b, bias) => (c) { c = Conv(a, b, bias) }"""
    inlined = prepare.inline_own_functions(graph("y = local.net(x, w)", functions=functions))
    assert not inlined.functions and list(inlined.graph.node[0].input) == ["x", "w"]
    assert prepare.inline_own_functions(inlined) is inlined


def test_a_default_of_a_function_s_attribute_and_a_result_that_is_an_input_stay_when_it_is_inlined():
    functions = """<domain: "local", opset_import: ["": 17]> net <p: ints = [1,1,1,1]> (a, b) => (c, a) {
        c = Conv<pads: ints = @p>(a, b) }"""
    nodes = prepare.inline_own_functions(graph("y, z = local.net(x, w)", functions=functions)).graph.node
    assert [node.op_type for node in nodes] == ["Conv", "Identity"] and list(nodes[0].attribute[0].ints) == [1, 1, 1, 1]
    assert [*nodes[1].input, *nodes[1].output] == ["x", "z"]


def test_a_model_without_layers_has_its_own_outputs_alone():
    model = load(graph(PAIR))
    for lowering in ("none", "direct", "convavgpool"):
        assert [value.name for value in prepare.lowered(model, lowering).graph.output] == ["y"]
    assert len(prepare.lowered(model, "direct", layers=True).graph.output) == 2


@pytest.mark.parametrize(
    ("cc", "stem", "plain"), [(79, False, False), (80, True, False), (89, True, False), (90, True, True), (100, True, False)]
)
def test_convolutions_that_the_plugin_takes_by_compute_capability(monkeypatch, cc, stem, plain):
    monkeypatch.setattr(prepare, "current_device", lambda: {"cc": cc})
    trt = tensorrt("8.6.1")
    assert prepare.offloaded_convs(BuildOptions(precision="fp16"), trt) == {"image_conv": stem, "plain_conv": plain}
    assert prepare.offloaded_convs(BuildOptions(precision="bf16", stem=False), trt) == {"image_conv": False, "plain_conv": plain}
    none = {"image_conv": False, "plain_conv": False}
    assert prepare.offloaded_convs(BuildOptions(precision="fp16", plain_conv=False), trt) == none | {"image_conv": stem}
    for options in (BuildOptions(), BuildOptions(precision="fp16", plugin=False), BuildOptions(precision="tf32", plugin=False)):
        assert prepare.offloaded_convs(options, trt) == none
    assert prepare.offloaded_convs(BuildOptions(precision="tf32"), trt) == {"image_conv": plain, "plain_conv": plain}
    assert prepare.offloaded_convs(BuildOptions(precision="tf32", plain_conv=False), trt) == none
    for version in ("9.3.0", "10.0.0"):
        found = prepare.offloaded_convs(BuildOptions(precision="fp16", trt=tensorrt(version)))
        assert found == (none if version == "10.0.0" else {"image_conv": stem, "plain_conv": plain})
    assert not prepare.offloaded_convs(BuildOptions(precision="fp16", trt=tensorrt("1.2.0", "tensorrt_rtx")))["plain_conv"]


@pytest.mark.parametrize("options", [BuildOptions(precision=p, plain_conv=c) for p in ("fp16", "bf16", "tf32") for c in (0, 1)])
def test_convolutions_behind_a_normalization_go_to_the_plugin_in_16_bits_alone(monkeypatch, options):
    monkeypatch.setattr(prepare, "current_device", lambda: {"cc": 90})
    assert ("norm_conv" in prepare.optimize_keywords(options, tensorrt("8.6.1"))["disable"]) == (options.precision == "tf32")


def test_convolutions_that_the_plugin_takes_on_a_gpu_that_is_unknown(monkeypatch):
    monkeypatch.setattr(prepare, "current_device", Mock(side_effect=LibraryError("no library")))
    assert prepare.offloaded_convs(BuildOptions(precision="fp16"), tensorrt("8.6.1")) == {"image_conv": True, "plain_conv": False}
    assert prepare.offloaded_convs(BuildOptions(precision="fp16", stem=False), tensorrt("8.6.1"))["image_conv"] is False
    assert not any(prepare.offloaded_convs(BuildOptions(precision="tf32"), tensorrt("8.6.1")).values())


@pytest.mark.parametrize(
    ("cc", "trt_version", "plain_conv", "network", "in_tf32"),
    [
        (90, "8.6.1", True, "wgan_gp", "convavgpool"),
        (90, "8.6.1", True, "stargan_v2_small", "convavgpool"),  # TensorRT keeps the last convolution
        (90, "8.6.1", True, "densenet_small", "convavgpool, pairs alone"),  # and here most, but its pairs are 1x1 ones
        (90, "8.6.1", True, "darknet19", "fused"),  # and here a third, but the plugin would have only one pair
        (90, "8.6.1", True, "unet_nearest", "convavgpool"),  # here nearly all, but the plugin has upsampled ones
        (90, "8.6.1", False, "wgan_gp", "fused"),
        (90, "10.0.0", True, "wgan_gp", "fused"),
        (89, "8.6.1", True, "wgan_gp", "fused"),
    ],
)
def test_lowerings_where_none_is_asked_for(monkeypatch, cc, trt_version, plain_conv, network, in_tf32):
    monkeypatch.setattr(prepare, "current_device", lambda: {"cc": cc})
    wide = {"width": 64, "max_width": 64} if network == "stargan_v2_small" else {}  # as plain convolutions on the plugin are
    model = load(generate(network, batch=2, **wide))
    given = product(("fp32", "tf32", "fp16", "bf16"), (True, False))
    options = [BuildOptions(precision=precision, plugin=plugin, plain_conv=plain_conv) for precision, plugin in given]
    made = (prepare.with_default_lowering(model, option, tensorrt(trt_version)) for option in options)
    found = [f"{one.lowering}{', pairs alone' * (one.plain_conv != plain_conv)}" for one in made]
    assert found == ["convavgpool", "auto", in_tf32, "auto", *["convavgpool", "auto"] * 2]
    bare = load(graph("y = my.ConvAvgPoolRelu(x, w)", imports=', "my": 1'))  # a node of a file, with no attribute
    assert (prepare.with_default_lowering(bare, options[2], tensorrt("8.6.1")).lowering == "fused") == (cc < 90 or not plain_conv)
