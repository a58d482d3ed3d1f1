# SPDX-License-Identifier: Apache-2.0
"""Networks that enlarge maps: every convolution behind a resampling is found, and the result computes the same."""

from collections import Counter

import pytest

import convpool
from models import generators

EXPECTED = {
    "vae_decoder": {"upsample_last": 3},
    "sngan_generator": {"upsample_last": 4, "resize_last": 4},
    "biggan_generator": {"upsample_last": 4, "resize_last": 4},
    "stargan_v2_generator": {"upsample_last": 3, "resize_last": 3},
    "unet_nearest": {"upsample_last": 2},
    "unet3d": {"upsample_last": 2},
    "segformer_head": {"resize_last": 1},
    "hrnet_head": {"resize_last": 1},
    "yolo_neck": {"resize_last": 2},
    "esrgan_tail": {"upsample_last": 2},
}
"""Sites rewritten for a CPU, by rule.  StarGAN v2 has two shortcuts; the 1x1 convolution behind the last sum makes three."""


@pytest.mark.parametrize("name", EXPECTED)
def test_for_a_cpu(name):
    result = convpool.optimize(generators.generate(name), target="cpu")
    assert Counter(site.rule for site in result.report.sites if site.status == "rewritten") == EXPECTED[name]
    summary = result.report.summary
    assert result.report.verification.passed and summary.model_macs_after < 0.95 * summary.model_macs_before
    again = convpool.optimize(result.model, target="cpu", check=0)
    assert again.model.SerializeToString(deterministic=True) == result.model.SerializeToString(deterministic=True)


@pytest.mark.parametrize("target", ("any", "tensorrt", "cuda"))
@pytest.mark.parametrize("name", ("vae_decoder", "stargan_v2_generator", "yolo_neck"))
def test_for_other_targets(name, target):
    assert convpool.optimize(generators.generate(name), target=target).report.verification.passed


@pytest.mark.parametrize("dtype", ("float16", "float64"))
def test_other_types(dtype):
    result = convpool.optimize(generators.generate("segformer_head", dtype=dtype, width=64, size=16), target="cpu")
    assert result.report.verification.passed
