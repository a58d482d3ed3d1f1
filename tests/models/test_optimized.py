# SPDX-License-Identifier: Apache-2.0
"""Real networks: every pair and every convolution behind a resampling is found; what the target cuda leaves; equal results."""

from collections import Counter
from pathlib import Path

import onnx
import onnxruntime
import pytest

import convpool
from convpool.ir import schema
from models import digits, generators, light
from tests.support.rewriting import assert_stable

PATTERNS = {
    "conv_pool": "conv_pool", "conv_slices": "conv_slice_mean", "add_pool": "conv_add_pool",
    "concat_pool": "conv_concat_pool", "conv_global_pool": "conv_global_pool",
}  # fmt: skip
"""The manifest's kinds of sites, and the patterns the optimizer reports them as."""
SMALL = [name for name in generators.names() if name.endswith("_small") or name.startswith(("conv_", "densenet_t", "disc"))]
AROUND = {
    "densenet_transition1": {"AffineReluConvAvgPool": 1},
    "densenet_small": {"AffineReluConvAvgPool": 3},
    "discriminator_block": {"ConvAvgPool": 1, "ConvAvgPoolAdd": 1},
    "sngan64_small": {"ConvAvgPool": 4, "ConvAvgPoolAdd": 4, "ConvAvgPoolAddRelu": 1},
    "sngan64_in_place_small": {"ConvAvgPool": 4, "ConvAvgPoolAddRelu": 5},
    "biggan_small": {"ConvAvgPool": 4, "ConvAvgPoolAdd": 5},
    "wgan_gp_slices_small": {"ConvAvgPool": 1, "ConvAvgPoolAdd": 2},
    "stargan_v2_small": {"LeakyReluConvAvgPoolLeakyRelu": 4, "ConvAvgPoolAdd": 2},
    "igebm_small": {"ConvAvgPool": 1, "ConvAvgPoolAddLeakyRelu": 3},
    "nextvit_small": {"ConvAvgPoolAdd": 3},
}
"""Networks, and the operators that are left of their pairs and what stands around these."""
REJECTED = ("vgg_average", "squeeze_excite", "resnet_d")
NEIGHBOURS = ["fuse_prologue", "fuse_epilogue"]


def rewritten(result: convpool.OptimizeResult) -> Counter[str]:
    """Rewritten sites by pattern."""
    return Counter(site.pattern for site in result.report.sites if site.status == "rewritten")


@pytest.mark.parametrize("lowering", ["convavgpool", "auto"])
@pytest.mark.parametrize("name", SMALL)
def test_every_pair_is_found(name, lowering):
    result = convpool.optimize(generators.generate(name), lowering=lowering)
    wanted = {PATTERNS[kind]: count for kind, count in generators.REGISTRY[name].sites.items() if kind in PATTERNS}
    if name == "densenet_small_3d" and lowering == "convavgpool":
        wanted = {}  # pointwise pairs in 3-D, for which the plugin has no fast kernel
    if name == "sparcnet_small":
        wanted = {"conv_pool": 1}  # the others have too few channels to gain on a CPU
    names = [node.name for node in result.model.graph.node]
    assert all(names) and len(set(names)) == len(names)
    found = rewritten(result)
    found.pop("conv_add_global_pool", None)  # NextViT's head, which the manifest does not count
    assert found == wanted
    assert result.report.verification.inputs == (1 if wanted else 0) and result.report.verification.passed


@pytest.mark.parametrize("batch", ["dynamic", 2])
@pytest.mark.parametrize("name", AROUND)
def test_what_stands_around_the_pairs_is_taken_in(name, batch):
    model = convpool.optimize(generators.generate(name, batch=batch), enable=NEIGHBOURS).model
    assert Counter(node.op_type for node in model.graph.node if node.domain == schema.DOMAIN) == AROUND[name]
    plain = convpool.optimize(generators.generate(name, batch=batch), disable=NEIGHBOURS, check=0).model
    found = Counter(node.op_type for node in plain.graph.node if node.domain == schema.DOMAIN)
    assert sum(found.values()) == found["ConvAvgPool"] == sum(AROUND[name].values())


def ran(model: onnx.ModelProto, folder: Path) -> Counter[str]:
    """The operators that onnxruntime runs for a model, layouts changed and functions inlined."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns that the file is for this machine only
    options.optimized_model_filepath = str(folder / "ran.onnx")
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node)


@pytest.mark.parametrize("name", AROUND)
def test_onnxruntime_runs_nothing_more_for_fused_variants(name, tmp_path):
    model = generators.generate(name)
    plain, fused = (ran(convpool.optimize(model, **{on: NEIGHBOURS}, check=0).model, tmp_path) for on in ("disable", "enable"))
    assert fused <= plain and fused.total() > 0


@pytest.mark.parametrize("fused", [False, True])
def test_resnet_d_shortcuts_under_the_option(fused):
    result = convpool.optimize(generators.generate("resnet_d"), enable=["fuse_pool_conv"], disable=[] if fused else NEIGHBOURS)
    assert rewritten(result) == {"pool_conv": 3} and result.report.verification.passed
    found = [site.operator for site in result.report.sites if site.status == "rewritten"]
    assert ("ConvAvgPoolAddRelu" in found) == fused and (fused or set(found) == {"ConvAvgPool"}), found


@pytest.mark.parametrize("target", ["any", "cuda"])
@pytest.mark.parametrize("name", REJECTED)
def test_what_has_no_pair_stays_byte_for_byte(name, target):
    model = generators.generate(name)
    result = convpool.optimize(model, target=target)
    assert not result.changed and not rewritten(result)
    assert result.model.SerializeToString() == model.SerializeToString()


def test_lenet5():
    result = convpool.optimize(digits.MODEL_PATH)
    assert rewritten(result) == {"conv_pool": 2}
    assert [node.op_type for node in result.model.graph.node if schema.is_operator(node)] == ["ConvAvgPoolTanh"] * 2


def test_light_densenet121():
    result = convpool.optimize(light.light_densenet121_path())
    assert rewritten(result) == {"conv_pool": 3} and result.report.verification.passed


EXPECTED = {
    "vae_decoder": {"upsample_last": 2},
    "sngan_generator": {"upsample_last": 4, "resize_last": 4},
    "biggan_generator": {"upsample_last": 4, "resize_last": 4},
    "stargan_v2_generator": {"upsample_last": 2, "resize_last": 3},
    "unet_nearest": {"upsample_last": 2},
    "unet3d": {"upsample_last": 2},
    "segformer_head": {"resize_last": 1},
    "hrnet_head": {"resize_last": 1},
    "yolo_neck": {"resize_last": 2},
    "esrgan_tail": {"upsample_last": 2},
}
"""Sites rewritten for a CPU, by rule.  StarGAN v2's third 1x1 is behind the last sum.  Its and the VAE's 32 channels stay."""


@pytest.mark.parametrize("name", EXPECTED)
def test_for_a_cpu(name):
    result = convpool.optimize(generators.generate(name), target="cpu")
    assert Counter(site.rule for site in result.report.sites if site.status == "rewritten") == EXPECTED[name]
    summary = result.report.summary
    assert result.report.verification.passed and summary.model_macs_after < 0.95 * summary.model_macs_before
    assert_stable(result.model, target="cpu")


@pytest.mark.parametrize("target", ("any", "tensorrt", "cuda"))
@pytest.mark.parametrize("name", ("vae_decoder", "stargan_v2_generator", "yolo_neck"))
def test_for_other_targets(name, target):
    assert convpool.optimize(generators.generate(name), target=target).report.verification.passed


@pytest.mark.parametrize("dtype", ("float16", "float64"))
def test_other_types(dtype):
    result = convpool.optimize(generators.generate("segformer_head", dtype=dtype, width=64, size=16), target="cpu")
    assert result.report.verification.passed


WANTED = {
    "sngan64": dict(ConvAvgPoolRelu=1, ConvAvgPool=6, ConvAvgPoolAdd=4, ReluConvAvgPoolRelu=4, ConvAvgPoolAddRelu=1, Flatten=1),
    "wgan_gp": dict(ConvAvgPoolRelu=1, ConvAvgPool=3, ConvAvgPoolAdd=3, ReluConvAvgPoolRelu=3, ConvAvgPoolAddRelu=1, Flatten=1),
    "stargan_v2": dict(ConvAvgPool=8, ConvAvgPoolAdd=5, ConvAvgPoolAddLeakyRelu=1, ConvAvgPoolLeakyRelu=1)
    | dict(LeakyReluConvAvgPoolLeakyRelu=6, Reshape=1),
    "biggan_small": dict(ConvAvgPoolRelu=1, ConvAvgPool=9, ConvAvgPoolAdd=6, ReluConvAvgPoolRelu=5, ConvAvgPoolAddRelu=1)
    | dict(MaxPool=2, MatMul=2, Softmax=1, Reshape=5, Transpose=2, Flatten=1),
    "densenet121": dict(AffineReluConvAvgPoolRelu=58, AffineReluConvAvgPool=4, ConvAvgPool=58, Concat=58)
    | dict(Conv=1, BatchNormalization=1, Relu=1, MaxPool=1, Transpose=1, Flatten=1),
    "igebm": dict(ConvAvgPool=4, ConvAvgPoolLeakyRelu=6, ConvAvgPoolAddLeakyRelu=6, ReluConvAvgPool=1, Flatten=1),
}
"""All nodes of the results.  Of BigGAN the attention's Transposes are the model's own; DenseNet's stands behind its MaxPool."""
NARROW = {"sngan64": {"width": 16}, "stargan_v2": {"width": 16, "max_width": 128}}
SMALL_ON_CUDA = [name for name in generators.names() if name.endswith("_small") and not name.startswith("condensenet")]


@pytest.mark.parametrize("name,dtype", [*((name, "float32") for name in WANTED), ("wgan_gp", "float16"), ("igebm", "float16")])
def test_what_is_left(name, dtype):
    result = convpool.optimize(generators.generate(name, dtype=dtype, **NARROW.get(name, {})), target="cuda", check=0)
    assert Counter(node.op_type for node in result.model.graph.node) == WANTED[name]
    images = [node for node in result.model.graph.node if schema.is_operator(node) and schema.layout_of(node) == 2]
    assert {node.input[0] for node in images} >= ({"image"} if name != "densenet121" else set())
    assert_stable(result.model, target="cuda")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", SMALL_ON_CUDA)
def test_it_computes_the_same(name, dtype):
    result = convpool.optimize(generators.generate(name, dtype=dtype), target="cuda")
    assert result.changed and result.report.verification.passed
