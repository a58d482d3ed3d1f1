# SPDX-License-Identifier: Apache-2.0
"""Convolutions behind DequantizeLinear: TensorRT runs them in INT8, so its target leaves them, and other targets say so."""

import numpy as np
import pytest

import convpool
from tests.support import sessions
from tests.support.models import graph, random_feeds
from tests.support.rewriting import POOL, RTOL

GIVEN = {
    "s": np.float32(0.05),
    "z": np.int8(0),
    "k": np.ones((64, 64, 3, 3), np.int8),
    "v": (64, 64, 3, 3),
    "one": (64, 64, 1, 1),
}
GIVEN |= {"c": (1, 64, 1, 1), "half": np.array([1, 1, 0.5, 0.5], np.float32), "b": (64,)}
INT8 = "q = QuantizeLinear(x, s, z)\nd = DequantizeLinear(q, s, z)\nw8 = DequantizeLinear(k, s, z)\n"
CONVS = {
    "3x3": "h = Conv<pads=[1,1,1,1]>(d, w8)",
    "with a bias": "h = Conv<pads=[1,1,1,1]>(d, w8, b)",
    "1x1 in float weights": "h = Conv(d, one)",
    "with a scale behind": "g = Conv<pads=[1,1,1,1]>(d, w8)\nh = Mul(g, c)",
    "with a shift behind": "g = Conv<pads=[1,1,1,1]>(d, w8)\nh = Add(g, c)",
    "one of two added": "g = Conv<pads=[1,1,1,1]>(d, w8)\nf = Conv<pads=[1,1,1,1]>(x, v)\nh = Add(g, f)",
    "one of two joined": "g = Conv<pads=[1,1,1,1]>(x, v)\nf = Conv<pads=[1,1,1,1]>(d, w8)\nh = Concat<axis=1>(f, g)",
}
MEANS = {
    "AveragePool": f"y = {POOL}(h)",
    "GlobalAveragePool": "y = GlobalAveragePool(h)",
    "ReduceMean": "y = ReduceMean<axes=[2,3]>(h)",
    "Resize": 'y = Resize<mode="linear">(h, , half)',
}
CASES = [(conv, mean) for conv in CONVS for mean in MEANS]
KERNEL = "would become a float kernel; got INT8, behind DequantizeLinear, expected float"


def model(body: str):
    return graph(body, GIVEN, inputs="float[1,64,8,8] x")


@pytest.mark.parametrize(("conv", "mean"), CASES)
def test_the_target_of_tensorrt_leaves_them(conv, mean):
    result = convpool.optimize(model(INT8 + CONVS[conv] + "\n" + MEANS[mean]), target="tensorrt", check=0)
    assert not result.changed and result.report.notes == []
    assert {site.obstacle for site in result.report.sites} == {"would become a float kernel"}
    assert all(site.reason.startswith("Conv '") and site.reason.endswith(KERNEL) for site in result.report.sites)


@pytest.mark.parametrize(("conv", "mean"), CASES)
@pytest.mark.parametrize("target", ["any", "cpu"])
def test_other_targets_say_what_it_costs(conv, mean, target):
    given = model(INT8 + CONVS[conv] + "\n" + MEANS[mean])
    result = convpool.optimize(given, target=target, check=0)
    assert result.report.summary.rewritten >= 1
    assert result.report.notes == [
        "TensorRT would run 1 x a float kernel for an INT8 convolution; --target tensorrt leaves these"
    ]
    feeds = random_feeds(given)
    (wanted,), (got,) = sessions.run(given, feeds), sessions.run(result.model, feeds)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=RTOL * np.abs(wanted).max())


@pytest.mark.parametrize("mean", MEANS)
def test_weights_alone_in_int8_are_no_int8_convolution(mean):
    body = f"w8 = DequantizeLinear(k, s, z)\nh = Conv<pads=[1,1,1,1]>(x, w8)\n{MEANS[mean]}"
    report = convpool.optimize(model(body), target="tensorrt", check=0).report
    assert report.summary.rewritten == 1 and report.notes == []


def test_a_float_pair_beside_them_takes_no_int8_convolution_along():
    """The target of TensorRT writes other convolutions as nodes too, in a model with a pair."""
    body = f"p = Conv<pads=[1,1,1,1]>(x, v)\nr = {POOL}(p)\n{INT8}h = Conv<pads=[1,1,1,1]>(d, v)\na = {POOL}(h)\nt = Relu(a)\n"
    body += "u = Relu(r)\ny = Add(t, u)"
    for options, left in (({"target": "tensorrt"}, 1), ({"enable": ["plain_conv"]}, 0)):
        result = convpool.optimize(model(body), check=0, **options)
        assert [node.op_type for node in result.model.graph.node].count("Conv") == left
