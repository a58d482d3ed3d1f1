# SPDX-License-Identifier: Apache-2.0
"""A pretended TensorRT 8.6 is told flags by precision, profiles, limits, and its nodes."""

import re
import signal
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import onnx
import pytest
from onnx import TensorProto

from convpool.errors import ModelError, OptionError, OutputError, TensorRTError
from convpool.ir import files
from convpool.tensorrt import build_engine, builder
from convpool.tensorrt.builder import add_profiles, interruptible, monitor_of
from convpool.tensorrt.prepare import is_plugin_node, typical_shapes
from models.generators import generate
from tests.support.pretended_tensorrt import Config, Flag, Profile, TacticSource, pretended_tensorrt


def plugin_nodes(plan: bytes) -> list[onnx.NodeProto]:
    return list(filter(is_plugin_node, onnx.load_from_string(plan).graph.node))


def ints(node: onnx.NodeProto) -> dict[str, int]:
    return {item.name: item.i for item in node.attribute}


@pytest.mark.parametrize(("precision", "flags"), [("fp32", set()), ("tf32", {Flag.TF32}), ("fp16", {Flag.TF32, Flag.FP16})])
def test_a_precision_is_a_flag_and_the_nodes_know_it(trt, precision, flags):
    options = {"lowering": "convavgpool", "stem": False, "plain_conv": False, "workspace_bytes": 4096}
    engine = build_engine(generate("wgan_gp_small", batch=2), precision=precision, trt=trt, **options)
    (config,) = trt.configs
    assert config.flags == flags and config.pool_limits == {"workspace": 4096} and config.profiles == []
    assert [network.flags for network in trt.networks] == [1] and trt.plugins == [trt]
    nodes = plugin_nodes(engine.plan)
    assert nodes and engine.built_from["ConvAvgPool"] == sum(node.op_type == "ConvAvgPool" for node in nodes)
    assert {"allow_tf32" in ints(node) for node in nodes} == {precision == "tf32"}
    assert all(ints(node)["constant_weights"] == 1 for node in nodes)
    kinds = {tensor.name: tensor.data_type for tensor in onnx.load_from_string(engine.plan).graph.initializer}
    wanted = TensorProto.FLOAT16 if precision == "fp16" else TensorProto.FLOAT
    assert {kinds[node.input[1]] for node in nodes} == {wanted}


def test_a_precision_that_8_6_does_not_have_is_refused(trt):
    with pytest.raises(OptionError, match="precision: got bf16, which TensorRT 8.6.1 does not have; expected fp32, tf32 or fp16"):
        build_engine(generate("wgan_gp_small", batch=2), precision="bf16", trt=trt)


def test_an_engine_that_may_be_refitted_has_no_constant_weights(trt):
    told, options = [], {"configure": lambda config: config.set_flag(Flag.REFIT), "lowering": "convavgpool"}
    engine = build_engine(generate("wgan_gp_small", batch=2), trt=trt, configure_network=told.append, **options)
    nodes = plugin_nodes(engine.plan)
    assert nodes and not any("constant_weights" in ints(node) for node in nodes)
    first, second = trt.networks  # parsed once more, and the last one is the one that is built
    assert all("constant_weights" in ints(node) for node in filter(is_plugin_node, first.model.graph.node))
    assert told == [second]


def test_libraries_that_are_not_there_give_no_kernels(trt, monkeypatch):
    def library(name):
        if "cublasLt" in name:
            return type("Library", (), {"cublasLtCreate": None})
        raise OSError(name)

    monkeypatch.setattr(builder.ctypes, "CDLL", library)
    build_engine(generate("wgan_gp_small", batch=2), plugin=False, trt=trt)
    assert trt.configs[0].sources == 1 << TacticSource.CUBLAS_LT | 1 << TacticSource.EDGE_MASK_CONVOLUTIONS
    assert trt.plugins == []  # nothing for it to run


def test_open_inputs_get_profiles(trt):
    shapes = ([1, 3, 32, 32], [4, 3, 32, 32], [16, 3, 32, 32])
    larger = ([16, 3, 32, 32], [32, 3, 32, 32], [64, 3, 32, 32])
    model = generate("wgan_gp_small", batch="dynamic")
    build_engine(model, trt=trt, profiles=[{"image": shapes}, {"image": larger}])
    assert trt.configs[0].profiles == [{"image": tuple(map(tuple, one))} for one in (shapes, larger)]
    with pytest.raises(OptionError, match=r"profile: input 'image' has the open shape \[-1, 3, 32, 32\]; give its smallest"):
        build_engine(model, trt=trt)


OPEN_LATER = {"image": ([1, 3, 32, 32], [8, 3, 32, 32], [64, 3, 32, 32])}
"""For a batch of 2 an engine would be built all the same, and 64 be refused when it runs."""


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (OPEN_LATER, r"profile: input 'image'; got \[1, 3, 32, 32\], expected \[2, 3, 32, 32\]"),
        ({"none": ([1, 3, 32, 32],) * 3}, "profile: no input 'none'; expected image"),
        ({"image": ([4, 3, 32, 32], [1, 3, 32, 32], [16, 3, 32, 32])}, "expected the same rank and smallest <= typical"),
        ({"image": ([1, 3, 32, 32], [32, 3, 32, 32], [16, 3, 32, 32])}, "expected the same rank and smallest <= typical"),
        ({"image": ([1, 3, 32, 32], [1, 3, 32, 32])}, "got 2 shapes, expected its smallest, typical and largest"),
        ({"image": (1, 3, 32, 32)}, r"input 'image'; got \(1, 3, 32, 32\), expected its smallest, typical and largest shape"),
        *(
            ({"image": (shape,) * 3}, rf"got {re.escape(str(shape))}, expected \[-1, 3, 32, 32\] with -1 replaced")
            for shape in ([1, 3, 32, 31], [1, 4, 32, 32], [-1, 3, 32, 32], [1, 3, 32])
        ),
    ],
)
def test_profiles_that_no_input_can_have(trt, profile, message):
    with pytest.raises(OptionError, match=message):
        build_engine(generate("wgan_gp_small", batch=2 if profile is OPEN_LATER else "dynamic"), trt=trt, profiles=[profile])


def test_a_profile_without_one_of_the_open_inputs_is_refused():
    inputs = [SimpleNamespace(name=name, shape=(-1, 3)) for name in "xz"] + [SimpleNamespace(name="fixed", shape=(2,))]
    network = SimpleNamespace(num_inputs=3, get_input=inputs.__getitem__)
    three = ((1, 3), (2, 3), (4, 3))
    builder, config = SimpleNamespace(create_optimization_profile=Profile), Config()
    with pytest.raises(OptionError, match=r"^profile: no shapes for input 'z', which is open: \[-1, 3\]$"):
        add_profiles(builder, config, network, [{"x": three}])
    assert config.profiles == []
    add_profiles(builder, config, network, [{"x": three, "z": three}])
    assert config.profiles == [{"x": three, "z": three}]


def test_the_first_profile_s_typical_shapes():
    least, typical, most = [1, 3], [2, 3], [4, 3]
    assert typical_shapes([]) == {}
    assert typical_shapes([{"x": (least, typical, most), "z": ([1],) * 3}, {"x": ([9, 9],) * 3}]) == {"x": [2, 3], "z": [1]}
    for unusable in ((least, most), (least, [0, 3], most), (least, [2.5, 3], most)):
        assert typical_shapes([{"x": unusable, "z": ([1],) * 3}]) == {"z": [1]}


@pytest.mark.parametrize(
    ("version", "precision", "kind", "typed"),
    [
        ("8.6.1", "fp32", TensorProto.FLOAT, False),
        ("9.3.0", "fp32", TensorProto.FLOAT, False),
        ("10.0.0", "fp32", TensorProto.FLOAT, True),
        ("10.0.0", "fp16", TensorProto.FLOAT16, True),
        ("11.0.0", "bf16", TensorProto.BFLOAT16, True),
    ],
)
def test_types_come_by_the_model_or_by_flags(monkeypatch, version, precision, kind, typed):
    """A network has its model's types from 10 on: so the model gets those of the precision."""
    trt = pretended_tensorrt(version)
    monkeypatch.setattr(builder, "load_plugin", lambda trt: None)
    trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED = 3
    engine = build_engine(generate("wgan_gp_small", batch=2), precision=precision, lowering="auto", trt=trt)
    model = onnx.load_from_string(engine.plan)
    weights = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    assert {weights[node.input[1]] for node in model.graph.node if node.op_type == "Conv"} == {kind}
    assert [network.flags for network in trt.networks] == [0b1000 if typed else 1]
    assert trt.configs[0].flags & {Flag.FP16} == set()


def test_steps_of_a_build_are_handed_on_until_that_fails():
    steps = []

    def progress(*step):
        steps.append(step)
        if len(steps) == 4:
            raise KeyboardInterrupt

    class Monitor:
        """A class like pybind11's: no use before its own __init__ is called."""

        ready = False

        def __init__(self) -> None:
            self.ready = True

    monitor = monitor_of(SimpleNamespace(IProgressMonitor=Monitor), SimpleNamespace(progress_monitor=None), progress)
    assert monitor.ready
    monitor.phase_start("timing", None, 7)
    assert monitor.step_complete("timing", 0) and monitor.step_complete("timing", 1)
    assert not monitor.step_complete("timing", 2) and isinstance(monitor.error, KeyboardInterrupt)
    monitor.phase_finish("timing")
    assert steps == [("timing", done, 7) for done in range(4)]


def test_no_monitor_where_nobody_listens_or_tensorrt_has_none():
    config = SimpleNamespace(progress_monitor=None)
    assert monitor_of(SimpleNamespace(IProgressMonitor=object), config, None) is None
    assert monitor_of(SimpleNamespace(), config, print) is None
    assert monitor_of(SimpleNamespace(IProgressMonitor=object), SimpleNamespace(), print) is None


@pytest.mark.parametrize("options", [{}, {"precision": "fp32"}, {"plugin": False}, {"lowering": "none"}])
def test_heads_stay_in_float_beside_the_plugin_in_half_precision(trt, monkeypatch, options):
    told, kept = [], not options
    monkeypatch.setattr(builder, "keep_heads_in_float", lambda *given: told.append(given))
    options = {"precision": "fp16", "lowering": "convavgpool" if kept else None, **options}
    build_engine(generate("wgan_gp_small", batch=2), trt=trt, **options)
    assert told == ([(trt, trt.networks[-1], trt.configs[0])] if kept else [])


def test_the_builder_s_own_options(trt):
    model = generate("wgan_gp_small", batch=2)
    build_engine(model, trt=trt, optimization_level=2, max_aux_streams=3)
    build_engine(model, trt=trt)
    given, default = trt.configs
    assert (given.builder_optimization_level, given.max_aux_streams) == (2, 3)
    assert not hasattr(default, "builder_optimization_level") and not hasattr(default, "max_aux_streams")


@pytest.mark.parametrize(
    ("known", "written"),
    [(None, b"+ timed"), (b"known", b"known+ timed"), (b"damaged", b"+ timed"), (b"another device", b"+ timed")],
)
def test_a_timing_cache_is_read_where_it_can_be_and_written(trt, tmp_path, known, written):
    path = tmp_path / "timing.cache"
    if known is not None:
        path.write_bytes(known)
    build_engine(generate("wgan_gp_small", batch=2), trt=trt, timing_cache=path)
    assert path.read_bytes() == written


def test_timing_caches_that_cannot_be_files_or_written(trt, tmp_path, monkeypatch):
    model = generate("wgan_gp_small", batch=2)
    with pytest.raises(OptionError, match=f"^timing cache {tmp_path}: cannot be read; Is a directory$"):
        build_engine(model, trt=trt, timing_cache=tmp_path)
    with pytest.raises(OutputError, match=f"timing cache {tmp_path / 'no' / 'a'}: no folder '{tmp_path / 'no'}'; make it first"):
        build_engine(model, trt=trt, timing_cache=tmp_path / "no" / "a")

    monkeypatch.setattr(files, "replacing", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OutputError, match=f"^timing cache {tmp_path / 'a'}: cannot be written; No space left on device$"):
        build_engine(model, trt=trt, timing_cache=tmp_path / "a")


@pytest.mark.parametrize(
    ("place", "value", "kind", "message"),
    [
        ("Builder", Mock(side_effect=TypeError("nullptr")), TensorRTError, ": no builder; got nullptr"),
        ("Builder.build_serialized_network", lambda *_: None, TensorRTError, " 8.6.1 cannot build the engine; got no message"),
        ("OnnxParser.errors", ("node 3", "node 4"), ModelError, " 8.6.1 cannot read the model; got node 3; node 4"),
    ],
)
def test_steps_that_tensorrt_refuses(trt, tmp_path, monkeypatch, place, value, kind, message):
    monkeypatch.setitem(sys.modules, "trt", trt)
    monkeypatch.setattr(f"trt.{place}", value)
    with pytest.raises(kind, match=f"^TensorRT{message}$"):
        build_engine(generate("wgan_gp_small", batch=2), trt=trt, timing_cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_build_ends_with_what_its_monitor_raised(trt, monkeypatch):
    def stopped(*_):
        monitor.error = KeyboardInterrupt()

    monitor = SimpleNamespace(error=None)
    monkeypatch.setattr(builder, "monitor_of", lambda *_: monitor)
    monkeypatch.setattr(trt.Builder, "build_serialized_network", stopped)
    with pytest.raises(KeyboardInterrupt):
        build_engine(generate("wgan_gp_small", batch=2), trt=trt)


def test_ctrl_c_is_the_monitor_s_during_a_build():
    """And Python's again afterwards; where nobody listens, or another handler is set, it stays as it is."""
    monitor, own = SimpleNamespace(error=None), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with interruptible(monitor):
            signal.raise_signal(signal.SIGINT)
        assert isinstance(monitor.error, KeyboardInterrupt)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt), interruptible(None):
            signal.raise_signal(signal.SIGINT)
        caught = []
        signal.signal(signal.SIGINT, lambda *_: caught.append(1))
        with interruptible(SimpleNamespace(error=None)):
            signal.raise_signal(signal.SIGINT)
        assert caught == [1]
    finally:
        signal.signal(signal.SIGINT, own)
