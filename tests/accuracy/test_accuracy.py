# SPDX-License-Identifier: Apache-2.0
"""Whole models against float64, for every lowering and precision.  Every limit is in limits.py, with its reason.

The onnxruntime rows run everywhere; half precision there rounds every tensor to 16 bits and computes in float32.  The
TensorRT rows need a GPU, TensorRT, pycuda and the plugin.
"""

import functools
import os
import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from convpool import optimize
from convpool.algebra.parts import FUSED_VARIANTS
from convpool.check.session import Session
from convpool.ir import schema
from convpool.ir.model import LoadedModel
from convpool.tensorrt import Engine, build_engine, prepare
from convpool.tensorrt.package import tensorrt_module, version
from models.digits import MODEL_PATH, load_test_set
from models.generators import generate, random_inputs
from tests.support.accuracy.float64 import run_float64, to_float64
from tests.support.accuracy.half_io import from_channels_last, half_channels_last, to_channels_last
from tests.support.accuracy.limits import LIMITS, RATIOS
from tests.support.accuracy.measures import largest, root_mean_square
from tests.support.gpu import require_gpu

BATCHES = {
    "lenet5_digits": 32, "lenet5": 8, "sngan64": 2, "sngan64_in_place": 2, "wgan_gp": 4, "stargan_v2": 1,
    "densenet121": 1, "densenet_transition1": 1, "densenet_transition2": 1, "densenet_transition3": 1,
}  # fmt: skip
NARROW = {"width": 32}
SMALLER = {"densenet121": {"size": 64}, "stargan_v2": {**NARROW, "max_width": 256}, "sngan64": NARROW, "sngan64_in_place": NARROW}
"""Smaller inputs, or fewer channels, of onnxruntime's rows: as many layers in less time."""
RATIO_SETS = 16
FP16_RESULTS = 1024
"""Least number of results behind a ratio in fp16: of n independent errors it scatters by 1 / sqrt(n), 0.03, and its limit is
1.1. A critic has one result for an image. In fp32, whose limit is 2, `RATIO_SETS` will do."""
LOWERINGS = ("original", "convavgpool", "fused_variants", "direct", "fused")
"""Lowerings, nothing fused; fused_variants is convavgpool with prologue and epilogue."""
KINDS = {"fp16": onnx.TensorProto.FLOAT16, "bf16": onnx.TensorProto.BFLOAT16}


def digit_images() -> np.ndarray:
    """The digits' test set; CONVPOOL_DIGITS names an .npz with it as `image` where there is no scikit-learn."""
    file = os.environ.get("CONVPOOL_DIGITS")
    return np.load(file)["image"] if file else load_test_set()[0]


@functools.lru_cache(2)  # tests go model by model
def case(name: str, smaller: bool = False) -> tuple[onnx.ModelProto, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Model, inputs and float64 outputs."""
    if name == "lenet5_digits":
        model, inputs = onnx.load(MODEL_PATH), {"image": digit_images()[: BATCHES[name]]}
    else:
        model = generate(name, batch=BATCHES[name], **(SMALLER.get(name, {}) if smaller else {}))
        inputs = random_inputs(model)
    return model, inputs, run_float64(model, inputs)


@functools.lru_cache(len(LOWERINGS))
def lowered(name: str, lowering: str) -> onnx.ModelProto:
    model = case(name, True)[0]
    if lowering == "fused_variants":
        found = optimize(model, enable=["fuse_prologue", "fuse_epilogue"], check=0).model
        assert name == "lenet5_digits" or any(node.op_type in FUSED_VARIANTS for node in found.graph.node)
        return found
    if lowering == "original":
        return model
    return optimize(model, lowering=lowering, disable=["fuse_prologue", "fuse_epilogue"], check=0).model


def run_onnxruntime(model: onnx.ModelProto, precision: str, inputs) -> dict[str, np.ndarray]:
    if precision in KINDS:
        model = prepare.self_contained(model, None)
        prepare.cast_floats(model, KINDS[precision])
    session = Session(LoadedModel(model, None, 0), optimize=False)
    return dict(zip(session.outputs, session.run(None, inputs), strict=True))


def test_float64_reference_is_onnx_own_on_a_small_model():
    """The windowed operators written for speed agree with onnx's evaluator, which takes them one by one."""
    for name in ("stargan_v2_small", "densenet_small", "sparcnet_small"):
        model = generate(name, batch=1)
        inputs = random_inputs(model)
        wanted = ReferenceEvaluator(to_float64(model)).run(None, {key: value.astype(np.float64) for key, value in inputs.items()})
        for value, got in zip(wanted, run_float64(model, inputs).values(), strict=True):
            np.testing.assert_allclose(got, value, rtol=1e-10, atol=1e-12 * np.abs(value).max())


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("name", BATCHES)
def test_onnxruntime(name, lowering, precision):
    _, inputs, reference = case(name, True)
    found = largest(run_onnxruntime(lowered(name, lowering), precision, inputs), reference)
    assert 0 < found <= LIMITS[name].relative(precision)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_lenet5_keeps_every_label(lowering, precision):
    """Top-1 on the digits' test set: label for label that of the original in float32."""
    images, labels = load_test_set()
    plain = run_onnxruntime(lowered("lenet5_digits", "original"), "fp32", {"image": images})["logits"].argmax(1)
    found = run_onnxruntime(lowered("lenet5_digits", lowering), precision, {"image": images})["logits"].argmax(1)
    assert np.array_equal(found, plain)
    assert (found == labels).mean() > 0.9


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_lenet5_keeps_every_label_in_tensorrt(precision):
    """Both pairs, with gain, bias and tanh, are one node of the plugin each."""
    require_gpu()
    images, _ = load_test_set()
    model, rewritten = (lowered("lenet5_digits", lowering) for lowering in ("original", "convavgpool"))
    assert [node.op_type for node in rewritten.graph.node if schema.is_operator(node)] == ["ConvAvgPoolTanh"] * 2
    batch = BATCHES["lenet5_digits"]
    whole = len(images) // batch * batch
    wanted = run_onnxruntime(model, "fp32", {"image": images[:whole]})["logits"].argmax(1)
    batches = (images[i : i + batch] for i in range(0, whole, batch))
    parts = [run_engine("lenet5_digits", precision, True, {"image": given})["logits"] for given in batches]
    assert np.array_equal(np.concatenate(parts).argmax(1), wanted)


@functools.cache
def cache_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory()


def halves_outside(name: str, precision: str) -> bool:
    """Return True for a lone layer with halves at both ends: from floats TensorRT may make TF32.  From TensorRT 10 on an engine
    has the model's own types."""
    return name.startswith("densenet_transition") and precision == "fp16" and version(tensorrt_module())[0] < 10


@functools.cache
def engine(name: str, precision: str, plugin: bool) -> Engine:
    model, inputs, _ = case(name)
    return build_engine(
        model,
        precision=precision,
        plugin=plugin,
        lowering="convavgpool" if plugin else "none",
        optimization_level=2,
        profiles={k: (x.shape,) * 3 for k, x in inputs.items()},
        timing_cache=Path(cache_folder().name, "timing.cache"),
        configure_network=half_channels_last if halves_outside(name, precision) else None,
    )


def run_engine(name: str, precision: str, plugin: bool, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if halves_outside(name, precision):
        return from_channels_last(engine(name, precision, plugin).run(to_channels_last(inputs)))
    return engine(name, precision, plugin).run(inputs)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
@pytest.mark.parametrize("name", BATCHES)
def test_tensorrt(name, precision, record_property):
    require_gpu()
    _, inputs, reference = case(name)
    error = largest(run_engine(name, precision, True, inputs), reference)
    record_property("error", error)
    limit = LIMITS[name].relative(precision, engine=True)
    record_property("limit", limit)
    assert 0 < error <= limit


def run_exactly(model: onnx.ModelProto, precision: str, sets: list) -> list[dict[str, np.ndarray]]:
    """Results in float64; where fp16 is judged, by onnxruntime in float32, a thousand times as exact and fast enough."""
    if precision != "fp16":
        return [run_float64(model, one) for one in sets]
    session = Session(LoadedModel(model, None, 0), optimize=True)
    return [dict(zip(session.outputs, session.run(None, one), strict=True)) for one in sets]


@pytest.mark.parametrize("precision", RATIOS)
@pytest.mark.parametrize("name", BATCHES)
def test_tensorrt_is_as_exact_as_without_the_plugin(name, precision, record_property):
    require_gpu()
    model, _, reference = case(name)
    if name == "lenet5_digits":
        images, batch = digit_images(), BATCHES[name]
        sets = [{"image": images[i : i + batch]} for i in range(0, len(images) - batch + 1, batch)]
    else:
        enough = FP16_RESULTS // sum(y.size for y in reference.values()) if precision == "fp16" else 0
        sets = [random_inputs(model, seed=seed) for seed in range(max(RATIO_SETS, enough))]
    if halves_outside(name, precision):  # which both engines would round alike
        sets = [{key: x.astype(np.float16).astype(np.float32) for key, x in one.items()} for one in sets]
    exact = run_exactly(model, precision, sets)
    errors = [root_mean_square([run_engine(name, precision, plugin, one) for one in sets], exact) for plugin in (True, False)]
    record_property("ratio", errors[0] / errors[1])
    record_property("limit", RATIOS[precision])
    assert 0 < errors[0] <= RATIOS[precision] * errors[1]
