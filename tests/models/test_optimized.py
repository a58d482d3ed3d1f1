"""Real networks: the optimizer finds every pair that the manifest counts, and the result computes the same."""

from __future__ import annotations

from collections import Counter

import pytest

import convpool
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
REJECTED = ("vgg_average", "squeeze_excite", "resnet_d")


def rewritten(result: convpool.OptimizeResult) -> Counter[str]:
    """Rewritten sites by pattern."""
    return Counter(site.pattern for site in result.report.sites if site.status == "rewritten")


@pytest.mark.parametrize("lowering", ["convavgpool", "auto"])
@pytest.mark.parametrize("name", SMALL)
def test_every_pair_is_found(name, lowering):
    result = convpool.optimize(generators.generate(name), lowering=lowering)
    wanted = {PATTERNS[kind]: count for kind, count in generators.REGISTRY[name].sites.items() if kind in PATTERNS}
    found = rewritten(result)
    found.pop("conv_add_global_pool", None)  # NextViT's head, which the manifest does not count
    assert found == wanted
    assert result.report.verification.inputs == 1 and result.report.verification.passed


@pytest.mark.parametrize("name", REJECTED)
def test_what_has_no_pair_stays_byte_for_byte(name):
    model = generators.generate(name)
    result = convpool.optimize(model)
    assert not result.changed and not rewritten(result)
    assert result.model.SerializeToString() == model.SerializeToString()


def test_lenet5():
    assert rewritten(convpool.optimize(digits.MODEL_PATH)) == {"conv_pool": 2}


def test_light_densenet121():
    result = convpool.optimize(light.light_densenet121_path())
    assert rewritten(result) == {"conv_pool": 3}
    assert result.report.verification.passed
