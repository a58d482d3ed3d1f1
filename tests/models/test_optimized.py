# SPDX-License-Identifier: Apache-2.0
"""Real networks: the optimizer finds every pair that the manifest counts, and the result computes the same."""

from collections import Counter
from pathlib import Path

import onnx
import onnxruntime
import pytest

import convpool
from convpool.ir import schema
from models import digits, generators, light

PATTERNS = {
    "conv_pool": "conv_pool",
    "conv_slices": "conv_slice_mean",
    "add_pool": "conv_add_pool",
    "concat_pool": "conv_concat_pool",
    "conv_global_pool": "conv_global_pool",
}
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
    found = rewritten(result)
    found.pop("conv_add_global_pool", None)  # NextViT's head, which the manifest does not count
    assert found == wanted
    assert result.report.verification.inputs == (1 if wanted else 0) and result.report.verification.passed


@pytest.mark.parametrize("batch", ["dynamic", 2])
@pytest.mark.parametrize("name", AROUND)
def test_what_stands_around_the_pairs_is_taken_in(name, batch):
    model = convpool.optimize(generators.generate(name, batch=batch), enable=["fuse_prologue", "fuse_epilogue"]).model
    assert Counter(node.op_type for node in model.graph.node if node.domain == schema.DOMAIN) == AROUND[name]
    plain = convpool.optimize(generators.generate(name, batch=batch), disable=["fuse_prologue", "fuse_epilogue"], check=0).model
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
    model = generators.generate("resnet_d")
    result = convpool.optimize(model, enable=["fuse_pool_conv"], disable=[] if fused else NEIGHBOURS)
    assert rewritten(result) == {"pool_conv": 3} and result.report.verification.passed
    found = [site.operator for site in result.report.sites if site.status == "rewritten"]
    assert ("ConvAvgPoolAddRelu" in found) == fused and (fused or set(found) == {"ConvAvgPool"}), found


@pytest.mark.parametrize("name", REJECTED)
def test_what_has_no_pair_stays_byte_for_byte(name):
    model = generators.generate(name)
    result = convpool.optimize(model)
    assert not result.changed and not rewritten(result)
    assert result.model.SerializeToString() == model.SerializeToString()


def test_lenet5():
    result = convpool.optimize(digits.MODEL_PATH)
    assert rewritten(result) == {"conv_pool": 2}
    assert [node.op_type for node in result.model.graph.node if schema.is_operator(node)] == ["ConvAvgPoolTanh"] * 2


def test_light_densenet121():
    result = convpool.optimize(light.light_densenet121_path())
    assert rewritten(result) == {"conv_pool": 3}
    assert result.report.verification.passed
