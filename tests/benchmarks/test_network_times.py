# SPDX-License-Identifier: Apache-2.0
"""Times of networks and of the host: the check before the timing, records, tables, turns and bars; one network on a GPU."""

import numpy as np
import pytest

from benchmarks import network_times
from benchmarks.network_times import NETWORKS, Options, time_network
from convpool.check.session import Session
from convpool.cuda.timing import summarize
from convpool.ir.model import LoadedModel
from convpool.tensorrt import TensorRTError
from tests.support.accuracy.half_io import from_channels_last, to_channels_last
from tests.support.accuracy.limits import LIMITS


def row(network: str, batch: int = 1, **us: float) -> dict:
    lowerings = {name: {"us": value, "spread_us": 0.1, "error": 1e-3} for name, value in us.items()}
    return {
        "network": network, "batch": batch, "precision": "fp16", "bar": NETWORKS[network].bar, "limit": 2e-3,
        "lowerings": lowerings,
    }  # fmt: skip


class FakeEngine:
    """TensorRT, played by onnxruntime, off by a factor; channels last at both ends if inside."""

    def __init__(self, model, inside: bool, factor: float) -> None:
        self.session, self.inside, self.factor = Session(LoadedModel(model, None, 0), optimize=True), inside, factor

    def run(self, inputs):
        if self.inside:
            assert all(x.dtype == np.float16 for x in inputs.values())
            inputs = {name: x.astype(np.float32) for name, x in from_channels_last(inputs).items()}
        outputs = {name: y * self.factor for name, y in zip(self.session.outputs, self.session.run(None, inputs), strict=True)}
        return to_channels_last(outputs) if self.inside else outputs


def pretend(engines, model, inside, rounds, found):
    """Times as of engines that ran."""
    for lowering in engines:
        found[lowering].update(summarize([3.0, 4.0, 5.0]))
    return 4


@pytest.mark.parametrize("name", ["densenet_transition3", "wgan_gp"])
def test_a_network_is_checked_before_it_is_timed(name, monkeypatch, tmp_path):
    def get_engine(name, lowering, model, batch, options):
        if lowering == "plugin":
            raise TensorRTError("no builder")
        return FakeEngine(model, NETWORKS[name].inside, 1.2 if lowering == "fused" else 1)

    monkeypatch.setattr(network_times, "get_engine", get_engine)
    monkeypatch.setattr(network_times, "_time", pretend)
    found = time_network(name, Options(tmp_path, tuple(network_times.LOWERINGS), batch=1))
    lowerings = found["lowerings"]
    assert lowerings["plugin"] == {"skipped": "no builder"}
    if name == "wgan_gp":
        assert set(lowerings["fused"]) == {"wrong"} and lowerings["fused"]["wrong"] == pytest.approx(0.2, rel=0.1)
    else:  # a 1x1 pair, which has no fused form
        assert lowerings["fused"] == {"same_as": "original"}
    for lowering in ("original", "direct", "fused_variants"):
        assert lowerings[lowering]["us"] == 4 and 0 <= lowerings[lowering]["error"] <= found["limit"]
    fused_variants = {"AffineReluConvAvgPool": 1} if name == "densenet_transition3" else {"ConvAvgPoolAdd": 2, "ConvAvgPool": 1}
    if name == "wgan_gp":
        assert lowerings["stem"]["nodes"] == fused_variants | {"ConvAvgPool": 2, "ConvAvgPoolRelu": 1}
        assert lowerings["plain_conv"]["nodes"] == {
            "ConvAvgPool": 2, "ConvAvgPoolRelu": 1, "ReluConvAvgPoolRelu": 3, "ConvAvgPoolAdd": 3,
            "ConvAvgPoolAddRelu": 1,
        }  # fmt: skip
    else:
        assert lowerings["stem"] == lowerings["plain_conv"] == {"same_as": "fused_variants"}
    assert lowerings["fused_variants"]["nodes"] == fused_variants and "nodes" not in lowerings["direct"]
    assert (found["batch"], found["input_sets"], found["half_channels_last"]) == (1, 4, NETWORKS[name].inside)


LIMIT = LIMITS["wgan_gp"].relative("fp16", engine=True)


@pytest.mark.parametrize(
    ("original", "ours", "standard", "timed"),
    [
        (0.5, 0.9, 1.9, ("original", "direct", "plugin")),  # in units of the limit: below it
        (0.5, 1.1, 2.1, ("original",)),
        (5.0, 4.9, 4.9, ("original", "direct", "plugin")),  # the original's own engine is beyond it
        (5.0, 5.1, 5.1, ("original",)),
        (np.inf, 1.1, 2.1, ()),  # an original that is not finite allows nothing
        (np.inf, 0.9, 1.9, ("direct", "plugin")),
    ],
)
@pytest.mark.parametrize("order", [("original", "direct", "plugin"), ("plugin", "direct", "original")])
def test_an_engine_may_be_as_far_off_as_the_originals_own(original, ours, standard, timed, order, monkeypatch, tmp_path):
    errors = {"original": original, "plugin": ours, "direct": standard}

    def get_engine(name, lowering, model, batch, options):
        return FakeEngine(model, False, 1 + errors[lowering] * LIMIT)

    monkeypatch.setattr(network_times, "get_engine", get_engine)
    monkeypatch.setattr(network_times, "_time", pretend)
    found = time_network("wgan_gp", Options(tmp_path, order, batch=1))["lowerings"]
    assert {lowering for lowering, one in found.items() if "us" in one} == set(timed)
    for lowering, one in found.items():
        assert one["error" if lowering in timed else "wrong"] == pytest.approx(errors[lowering] * LIMIT, rel=1e-2)


def test_without_an_engine_of_the_original_the_limit_decides(monkeypatch, tmp_path):
    monkeypatch.setattr(network_times, "get_engine", lambda name, lowering, model, *_: FakeEngine(model, False, 1 + 1.1 * LIMIT))
    found = time_network("wgan_gp", Options(tmp_path, ("plugin",), batch=1))
    assert set(found["lowerings"]["plugin"]) == {"wrong"} and "input_sets" not in found


def test_the_table_compares_with_the_original_and_the_best_standard_form():
    whole = row("sngan64", 64, original=360, direct=300, fused=270, plugin=250, fused_variants=180)
    whole["lowerings"]["fused_variants"]["error"] = 4e-4
    part = row("wgan_gp", 64, original=100, plugin=50)
    part["lowerings"] |= {"fused": {"wrong": 0.5}, "fused_variants": {"skipped": "no builder"}}
    record = {"rows": [whole, part]}
    assert network_times.markdown(record).splitlines() == [
        "| network, batch, precision | original | direct | fused | plugin | fused_variants | over original | asked | "
        "over best of direct, fused | error, original | error, plugin | limit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
        "| sngan64, 64, fp16 | 360.0 | 300.0 | 270.0 | 250.0 | 180.0 | 2.00 | 2.1 | 1.50 | 0.001 | 0.0004 | 0.002 |",
        "| wgan_gp, 64, fp16 | 100.0 |  |  | 50.0 |  | 2.00 | 1.9 |  | 0.001 | 0.001 | 0.002 |",
    ]
    assert network_times.problems(record) == [
        "wgan_gp, fp16: fused: error 0.5, limit 0.002, the original's 0.001",
        "wgan_gp, fp16: fused_variants: not run: no builder",
    ]
