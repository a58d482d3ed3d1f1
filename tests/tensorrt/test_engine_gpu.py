# SPDX-License-Identifier: Apache-2.0
"""Engines with the plugin on a GPU: shapes, profiles, contexts, graphs, files, and every refusal."""

import ctypes
import json
import re
import subprocess
import sys

import numpy as np
import onnx
import pytest

from convpool import optimize
from convpool.algebra.parts import FUSED_VARIANTS
from convpool.check.session import Session
from convpool.errors import ModelError, OptionError
from convpool.ir import schema
from convpool.ir.model import LoadedModel
from convpool.tensorrt import BuildOptions, Engine, TensorRTError, build_engine
from convpool.tensorrt.package import version
from convpool.tensorrt.prepare import offloaded_convs
from models.generators import generate, random_inputs
from tests.support.gpu import require_gpu
from tests.support.models import graph, weights


@pytest.fixture(autouse=True)
def _gpu():
    require_gpu()


def reference(model, inputs) -> np.ndarray:
    return Session(LoadedModel(model, None, 0), optimize=False).run(None, inputs)[0]


def open_layer(**arguments):
    """One layer, open in batch, height and width, with a profile from 1x16x16 to 8x48x48."""
    model = generate("conv_pool", batch="dynamic", **arguments)
    value = model.graph.input[0]
    channels = value.type.tensor_type.shape.dim[1].dim_value
    for axis, dim in zip("HW", value.type.tensor_type.shape.dim[2:], strict=True):
        dim.dim_param = axis
    for axis, dim in zip("PQ", model.graph.output[0].type.tensor_type.shape.dim[2:], strict=True):
        dim.dim_param = axis
    profile = {value.name: ([1, channels, 16, 16], [4, channels, 32, 32], [8, channels, 48, 48])}
    return model, value.name, channels, profile


@pytest.fixture(scope="module")
def layer():
    require_gpu()
    model, name, channels, profile = open_layer()
    return model, name, channels, build_engine(model, precision="fp32", profiles=profile, optimization_level=1)


@pytest.mark.parametrize("shape", [(1, 16, 16), (8, 48, 48), (3, 17, 31), (5, 32, 47)])
def test_open_sizes(layer, shape):
    model, name, channels, engine = layer
    x = np.random.default_rng(0).standard_normal((shape[0], channels, *shape[1:])).astype(np.float32)
    wanted = reference(model, {name: x})
    found = next(iter(engine.run({name: x}).values()))
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= 2e-6 * np.abs(wanted).max()


def test_two_contexts_take_turns(layer):
    """Two engines from one plan, their runs interleaved on their own streams."""
    model, name, channels, engine = layer
    rng = np.random.default_rng(2)
    engines = [Engine(engine.plan), Engine(engine.plan)]
    inputs = [rng.standard_normal((n, channels, 16 + 8 * n, 24)).astype(np.float32) for n in (1, 3)]
    shapes = [one.bind({name: x}) for one, x in zip(engines, inputs, strict=True)]
    for _ in range(10):
        for one in engines:
            one.execute()
    for one, x, shape in zip(engines, inputs, shapes, strict=True):
        output, size = next(iter(shape.items()))
        found = np.empty(size, np.float32)
        one.memory.download(found, one._loaded.buffers[output][0], None)
        one.memory.synchronize(None)
        wanted = reference(model, {name: x})
        assert np.abs(found - wanted).max() <= 2e-6 * np.abs(wanted).max()


def printed(code, channels, name, path):
    """Return what code prints in a process of its own: sys.argv[1] is an engine's file, x its input."""
    start = f"""
import sys, threading, numpy as np
from convpool.tensorrt import Engine, TensorRTError
x = {{{name!r}: np.random.default_rng(0).standard_normal((3, {channels}, 24, 24)).astype(np.float32)}}
"""
    done = subprocess.run([sys.executable, "-c", start + code, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_threads_run_engines_of_their_own(layer, tmp_path):
    """In a process of its own, which pycuda would end with the first thread that leaves a context behind."""
    _, name, channels, engine = layer
    engine.save(tmp_path / "layer.engine")
    code = """
found, kept = [], []
def body():
    engine = Engine.load(sys.argv[1])
    found.extend(next(iter(engine.run(x).values())).tobytes() for _ in range(5))
    kept.append(engine)  # outlives its thread
for started in (4, 1):
    threads = [threading.Thread(target=body) for _ in range(started)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
body()
print(len(found), len(set(found)))
"""
    assert printed(code, channels, name, tmp_path / "layer.engine") == ["30", "1"]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_threads_with_contexts_of_their_own(precision, tmp_path):
    """cuCtxCreate in each thread: kernels and what is set for them belong to a context, not to the device."""
    model, name, channels, profile = open_layer()
    build_engine(model, precision=precision, profiles=profile, optimization_level=1).save(tmp_path / "layer.engine")
    code = """
import pycuda.driver as driver
found = []
def body():
    context = driver.Device(0).make_context()
    engine = Engine.load(sys.argv[1])
    found.append(next(iter(engine.run(x).values())).tobytes())
    del engine
    context.pop()
driver.init()
for _ in range(3):
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
print(len(found), len(set(found)))
"""
    assert printed(code, channels, name, tmp_path / "layer.engine") == ["3", "1"]


def test_each_device_runs_its_own_engine(layer, tmp_path):
    import pycuda.driver as driver

    if driver.Device.count() < 2:
        pytest.skip("one GPU")
    _, name, channels, engine = layer
    engine.save(tmp_path / "layer.engine")
    code = """
import pycuda.driver as driver
found, devices = [], []
def body(device):
    engine = Engine.load(sys.argv[1], device=device)
    found.append(next(iter(engine.run(x).values())).tobytes())
    devices.append(driver.Context.get_device().pci_bus_id())
body(0)
thread = threading.Thread(target=body, args=(1,))
thread.start()
thread.join()
try:
    Engine.load(sys.argv[1], device=1).run(x)
except TensorRTError as error:
    print(len(set(found)), len(set(devices)), "another device" in str(error))
"""
    assert printed(code, channels, name, tmp_path / "layer.engine") == ["1", "2", "True"]


def test_runs_are_captured_into_a_graph(layer):
    model, name, channels, engine = layer
    x = np.random.default_rng(3).standard_normal((4, channels, 32, 32)).astype(np.float32)
    output, size = next(iter(engine.bind({name: x}).items()))
    engine.execute()
    engine.memory.synchronize(None)
    cuda, stream = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(engine.memory.stream.handle)
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cuStreamBeginCapture_v2(stream, 2) == 0
    engine.execute()
    assert cuda.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
    assert cuda.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)) == 0
    buffer = engine._loaded.buffers[output][0]
    engine.memory.upload(buffer, np.full(size, np.nan, np.float32), None)
    assert cuda.cuGraphLaunch(executable, stream) == 0
    found = np.empty(size, np.float32)
    engine.memory.download(found, buffer, None)
    engine.memory.synchronize(None)
    wanted = reference(model, {name: x})
    assert np.abs(found - wanted).max() <= 2e-6 * np.abs(wanted).max()


def test_several_profiles():
    model = generate("wgan_gp_small", batch="dynamic")
    size = [3, 32, 32]
    profiles = [{"image": ([n, *size], [n, *size], [m, *size])} for n, m in ((1, 2), (8, 16))]
    engine = build_engine(model, precision="fp16", profiles=profiles, optimization_level=1)
    assert len(engine.inputs["image"].profiles) == 2
    for batch in (2, 16, 1, 9):
        x = random_inputs(model, batch=batch)
        wanted = reference(model, x)
        assert np.abs(engine.run(x)["score"] - wanted).max() <= 1e-2 * np.abs(wanted).max()
    with pytest.raises(OptionError, match="shape; got"):
        engine.run(random_inputs(model, batch=4))


def test_gpu_arrays_go_in_as_they_are(layer):
    model, name, channels, engine = layer
    x = np.random.default_rng(4).standard_normal((2, channels, 16, 16)).astype(np.float32)
    assert engine.memory is not None  # makes a context current
    import pycuda.gpuarray as gpuarray

    on_gpu = gpuarray.to_gpu(x)
    wanted = reference(model, {name: x})
    assert np.abs(next(iter(engine.run({name: on_gpu}).values())) - wanted).max() <= 2e-6 * np.abs(wanted).max()
    with pytest.raises(OptionError, match="type; got float16, expected float32"):
        engine.run({name: gpuarray.to_gpu(x.astype(np.float16))})


def test_a_node_that_the_plugin_refuses_is_an_error_not_a_crash():
    """A weight of another shape than kernel_shape says: the parser stops, with the plugin's message."""
    rewritten = optimize(generate("wgan_gp_small", batch=1), check=0).model
    node = next(node for node in rewritten.graph.node if node.op_type == "ConvAvgPool")
    for attribute in node.attribute:
        if attribute.name == "kernel_shape":
            attribute.ints[:] = [5] * len(attribute.ints)
    with pytest.raises((ModelError, TensorRTError), match=r"W: dimension 1; got [13], expected kernel_shape\[0\] = 5"):
        build_engine(rewritten, optimization_level=1)


AROUND = """<ir_version: 8, opset_import: ["": 17]>
block (float[BATCH,64,HEIGHT,WIDTH] x) => (float[BATCH,32,P,Q] y) {
  n = BatchNormalization(x, g, b, m, d) p = LeakyRelu<alpha = 0.25>(n) c = Conv<pads = [1, 1, 1, 1]>(p, w, v)
  q = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(c) h = Conv(x, u)
  r = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(h) a = Add(q, r) y = LeakyRelu<alpha = 0.1>(a)
}"""


def residual_block(sizes: dict[str, object]) -> onnx.ModelProto:
    """A block with every part that a node can fuse; its shortcut is pooled by a node of its own."""
    text = AROUND
    for name, size in sizes.items():
        text = re.sub(rf"\b{name}\b", str(size), text)
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(7)
    shapes = {"g": (64,), "b": (64,), "m": (64,), "d": (64,), "w": (32, 64, 3, 3), "v": (32,), "u": (32, 64, 1, 1)}
    for name, shape in shapes.items():
        values = rng.uniform(0.5, 2, shape) if name in "gd" else rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        model.graph.initializer.append(onnx.numpy_helper.from_array(values.astype(np.float32), name))
    return model


def plugin_layers(engine: Engine) -> int:
    import tensorrt as trt

    text = engine.handle.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    return len(re.findall(r'"LayerType"\s*:\s*"PluginV', text))


def detailed(config) -> None:
    import tensorrt as trt

    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED


VARIANTS = ["AffineLeakyReluConvAvgPoolAddLeakyRelu", "ConvAvgPool"]


@pytest.mark.parametrize(("precision", "limit"), [("fp32", 4e-6), ("tf32", 4e-3), ("fp16", 8e-3)])
def test_fused_variants_of_open_sizes(precision, limit):
    """Prologue and residual in one node; the engine goes through its file's bytes, so each operator is found by its name."""
    model = residual_block({"BATCH": "batch", "HEIGHT": "height", "WIDTH": "width"})
    rewritten = optimize(model, enable=["fuse_prologue", "fuse_epilogue"], check=0).model
    assert sorted(node.op_type for node in rewritten.graph.node) == VARIANTS
    profile = {"x": ([1, 64, 16, 16], [4, 64, 32, 32], [8, 64, 48, 48])}
    engine = build_engine(rewritten, precision=precision, profiles=profile, optimization_level=1, configure=detailed)
    assert plugin_layers(engine) == len(VARIANTS)
    rng = np.random.default_rng(8)
    for shape in ((1, 16, 16), (8, 48, 48), (3, 18, 32), (5, 31, 47)):
        x = {"x": rng.standard_normal((shape[0], 64, *shape[1:])).astype(np.float32)}
        wanted, found = reference(model, x), engine.run(x)["y"]
        assert found.shape == wanted.shape
        assert 0 < np.abs(found - wanted).max() <= limit * np.abs(wanted).max()


@pytest.mark.parametrize(("precision", "limit"), [("fp32", 4e-6), ("fp16", 8e-3)])
def test_fused_variants_of_fixed_sizes(precision, limit, tmp_path):
    model = residual_block({"BATCH": 4, "HEIGHT": 16, "WIDTH": 20, "P": 8, "Q": 10})
    rewritten = optimize(model, enable=["fuse_prologue", "fuse_epilogue"], check=0).model
    assert sorted(node.op_type for node in rewritten.graph.node) == VARIANTS
    engine = build_engine(rewritten, precision=precision, optimization_level=1, configure=detailed)
    assert plugin_layers(engine) == len(VARIANTS)
    x = random_inputs(model)
    wanted, found = reference(model, x), engine.run(x)["y"]
    assert np.abs(found - wanted).max() <= limit * np.abs(wanted).max()
    engine.save(tmp_path / "block.engine")
    np.save(tmp_path / "x.npy", x["x"])
    code = (
        "import sys, numpy as np\nfrom convpool.tensorrt import Engine\n"
        "np.save(sys.argv[3], Engine.load(sys.argv[1]).run({'x': np.load(sys.argv[2])})['y'])"
    )
    files = [str(tmp_path / part) for part in ("block.engine", "x.npy", "y.npy")]
    subprocess.run([sys.executable, "-c", code, *files], check=True)
    assert np.array_equal(np.load(tmp_path / "y.npy"), found)


UPSAMPLED = """
r = LeakyRelu<alpha=0.125>(x)
u = Resize<mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor">(r, , s)
h = Conv<pads=[1,0,1,2]>(u, w, b) c = Conv<pads=[1,0,1,2]>(v, k) a = Add(h, c) y = Relu(a)
"""


@pytest.mark.parametrize(("precision", "limit"), [("fp32", 4e-6), ("tf32", 4e-3), ("fp16", 8e-3)])
@pytest.mark.parametrize("factors", [(2, 2), (3, 1)])
def test_an_upsampled_convolution_of_open_sizes(factors, precision, limit):
    """Prologue and bias in one node.  v is of the upsampled size, which open sizes do not tell: so the sum stays behind it."""
    constants = {"s": np.array([1, 1, *factors], np.float32), "w": weights((72, 64, 3, 3)), "b": (72,)}
    constants |= {"k": weights((72, 8, 3, 3))}
    model = graph(UPSAMPLED, constants, inputs="float[N,64,H,W] x, float[N,8,P,Q] v", outputs="float[N,72,R,S] y")
    shapes = {"x": [1, 64, 8, 8], "v": [1, 8, *(8 * f for f in factors)]}
    rewritten = optimize(model, target="tensorrt", input_shapes=shapes, check=0)
    nodes = [node.op_type for node in rewritten.model.graph.node if schema.is_operator(node)]
    assert "LeakyReluUpsampleConv" in nodes
    sizes = [(1, 8, 8), (4, 16, 16), (8, 24, 24)]
    profile = {"x": tuple([n, 64, h, w] for n, h, w in sizes)}
    profile["v"] = tuple([n, 8, h * factors[0], w * factors[1]] for n, h, w in sizes)
    engine = build_engine(rewritten.model, precision=precision, profiles=profile, optimization_level=1, configure=detailed)
    assert plugin_layers(engine) == len(nodes)
    rng = np.random.default_rng(8)
    for n, h, w in ((1, 8, 8), (8, 24, 24), (3, 9, 17)):
        shapes = {"x": (n, 64, h, w), "v": (n, 8, h * factors[0], w * factors[1])}
        feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        wanted, found = reference(model, feeds), engine.run(feeds)["y"]
        assert found.shape == wanted.shape
        assert 0 < np.abs(found - wanted).max() <= limit * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("densenet_small", "AffineReluConvAvgPool"),
        ("stargan_v2_small", "LeakyReluConvAvgPoolLeakyRelu"),
        ("sngan64_small", "ConvAvgPoolAddRelu"),
        ("lenet5", "ConvAvgPoolTanh"),
        *((name, "UpsampleConv") for name in ("sngan_generator", "biggan_generator", "vae_decoder", "unet_nearest")),
    ],
)
def test_networks_of_fused_variants(name, kind):
    model = generate(name, batch=2, **({"widths": (32, 64, 128)} if name == "unet_nearest" else {}))
    rewritten = optimize(model, target="tensorrt" if kind == "UpsampleConv" else "any", check=0).model
    nodes = [node.op_type for node in rewritten.graph.node if schema.is_operator(node)]
    assert any(kind in op_type for op_type in nodes)
    engine = build_engine(rewritten, precision="fp16", optimization_level=1, configure=detailed)
    assert plugin_layers(engine) == len(nodes)
    inputs = random_inputs(model)
    wanted, found = reference(model, inputs), next(iter(engine.run(inputs).values()))
    assert np.abs(found - wanted).max() <= 2e-2 * np.abs(wanted).max()


def test_a_slope_that_half_does_not_have_stays_in_float():
    """An infinite slope would make NaN of zeros."""
    model = residual_block({"BATCH": 4, "HEIGHT": 16, "WIDTH": 20, "P": 8, "Q": 10})
    rewritten = optimize(model, enable=["fuse_prologue", "fuse_epilogue"], check=0).model
    steep = {"LeakyRelu": "alpha", VARIANTS[0]: "prologue_alpha"}
    for either in (model.graph, rewritten.graph):
        node = next(node for node in either.node if node.op_type in steep)
        next(item for item in node.attribute if item.name == steep[node.op_type]).f = 1e5
    engine = build_engine(rewritten, precision="fp16", optimization_level=1, configure=detailed)
    assert plugin_layers(engine) == len(VARIANTS)
    x = random_inputs(model)
    wanted, found = reference(model, x), engine.run(x)["y"]
    assert np.abs(wanted).max() > 65504 and np.abs(found - wanted).max() <= 8e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize(("name", "option", "count"), [("sngan64_small", "stem", 2), ("wgan_gp", "plain_conv", 5)])
def test_convolutions_without_a_pooling(name, option, count, precision):
    rule = "image_conv" if option == "stem" else option
    model = generate(name, batch=2)
    inputs = random_inputs(model)
    layers = []
    for on in (True, False):
        engine = build_engine(model, precision=precision, optimization_level=1, configure=detailed, **{option: on})
        layers.append(plugin_layers(engine))
        wanted, found = reference(model, inputs), next(iter(engine.run(inputs).values()))
        assert np.abs(found - wanted).max() <= (2e-2 if precision == "fp16" else 1e-5) * np.abs(wanted).max()
    assert layers[0] == layers[1] + (count if offloaded_convs(BuildOptions(precision=precision))[rule] else 0)


def test_the_head_of_a_network_stays_in_float():
    import tensorrt as trt

    if version(trt)[0] >= 10:
        pytest.skip("strongly typed: every tensor is of half precision")
    engine = build_engine(generate("wgan_gp_small", batch=2), precision="fp16", optimization_level=1, configure=detailed)
    text = engine.handle.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    layers = [layer for layer in json.loads(text, strict=False)["Layers"] if layer["Name"] in ("head/mean", "head/linear")]
    formats = [tensor["Format/Datatype"] for layer in layers for tensor in (*layer["Inputs"], *layer["Outputs"])]
    assert formats and all(name.endswith("FP32") for name in formats)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("attribute", "AffineLeakyReluConvAvgPoolAddLeakyRelu: residual; got 0, expected 1 by the operator's name"),
        ("input", r"AffineLeakyReluConvAvgPoolAddLeakyRelu 'y': tensors; got 5 inputs .*, expected X, W, B, scale, shift, R"),
        ("shape", r"R: shape; got \[4, 32, 16, 20\], expected that of Y, \[4, 32, 8, 10\]"),
    ],
)
def test_a_fused_variant_that_contradicts_itself_is_refused(change, message):
    model = residual_block({"BATCH": 4, "HEIGHT": 16, "WIDTH": 20, "P": 8, "Q": 10})
    rewritten = optimize(model, enable=["fuse_prologue", "fuse_epilogue"], check=0).model
    node = next(node for node in rewritten.graph.node if node.op_type in FUSED_VARIANTS)
    if change == "attribute":
        next(item for item in node.attribute if item.name == "residual").i = 0
    elif change == "input":
        node.input.pop()
    else:
        rewritten.graph.node.insert(0, onnx.helper.make_node("Conv", ["x", "ones"], ["large"]))
        rewritten.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((32, 64, 1, 1), np.float32), "ones"))
        node.input[-1] = "large"
    with pytest.raises((ModelError, TensorRTError), match=message):
        build_engine(rewritten, optimization_level=1).run(random_inputs(model))


def test_weights_that_are_an_input_are_read_in_every_run():
    """W as a tensor of the run: other values by the same address give other outputs."""
    model = generate("wgan_gp_small", batch=2)
    rewritten = optimize(model, check=0).model
    node = next(node for node in rewritten.graph.node if node.op_type == "ConvAvgPool")
    weights = next(tensor for tensor in rewritten.graph.initializer if tensor.name == node.input[1])
    values = onnx.numpy_helper.to_array(weights)
    rewritten.graph.input.append(onnx.helper.make_tensor_value_info(weights.name, weights.data_type, weights.dims))
    rewritten.graph.initializer.remove(weights)
    engine = build_engine(rewritten, optimization_level=1)
    inputs = random_inputs(model)
    for factor in (1.0, -0.5, 1.0, 0.25):
        feed = {**inputs, weights.name: values * np.float32(factor)}
        wanted = reference(rewritten, feed)
        for _ in range(2):
            assert np.abs(engine.run(feed)["score"] - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_refitted_weights_are_used(precision):
    """An engine that may be refitted keeps nothing of its weights."""
    import tensorrt as trt

    from convpool.tensorrt.package import logger

    model = generate("wgan_gp_small", batch=2)
    rewritten = optimize(model, check=0).model
    node = next(node for node in rewritten.graph.node if node.op_type == "ConvAvgPool")
    weights = next(tensor for tensor in rewritten.graph.initializer if tensor.name == node.input[1])
    engine = build_engine(
        rewritten, precision=precision, optimization_level=1, configure=lambda config: config.set_flag(trt.BuilderFlag.REFIT)
    )
    inputs = random_inputs(model)
    limit = {"fp32": 1e-5, "fp16": 1e-2}[precision]
    values = onnx.numpy_helper.to_array(weights)
    for factor in (1.0, -0.5, 2.0):
        changed = np.ascontiguousarray(values * np.float32(factor))
        if factor != 1.0:
            refitter = trt.Refitter(engine.handle, logger(trt))
            kind = np.float16 if precision == "fp16" else np.float32
            assert refitter.set_weights(weights.name, trt.WeightsRole.CONSTANT, changed.astype(kind))
            assert refitter.refit_cuda_engine()
        weights.CopyFrom(onnx.numpy_helper.from_array(changed, weights.name))
        wanted = reference(rewritten, inputs)
        for _ in range(2):
            assert np.abs(engine.run(inputs)["score"] - wanted).max() <= limit * np.abs(wanted).max()
