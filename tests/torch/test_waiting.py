# SPDX-License-Identifier: Apache-2.0
"""Which eager training steps run the original forward, because the host limits them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from tests.support.torch import require_torch

torch = require_torch()

from torch import fx, nn  # noqa: E402

import convpool.torch  # noqa: E402
from convpool.torch.eager import pooled_conv  # noqa: E402
from convpool.torch.rewrite import waiting  # noqa: E402
from tests.support.torch_gpu import gpu, replayed  # noqa: E402, F401

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "h200_torch_layers.json"


def layer_graph(channels):
    """A pair of the record, pooled first, as a plan has it."""
    root, graph = nn.Module(), fx.Graph()
    root.c = nn.Conv2d(channels, channels, 3, padding=1, dtype=torch.bfloat16)
    x, weight, bias = graph.placeholder("x"), graph.get_attr("c.weight"), graph.get_attr("c.bias")
    geometry = ([2, 2], [1, 1], [1] * 4, [1, 1], [2, 2], [0] * 4, [1, 1], 1, 0, 0.0, 0, 0.0)
    graph.output(graph.call_function(pooled_conv, (x, weight, bias, None, None, None, *geometry)))
    return root, graph


LAYERS = [row for row in json.loads(RECORD.read_text())["layers"] if row["dtype"] == "bf16" and row["pass"] == "training"]


@pytest.mark.parametrize("row", LAYERS, ids=lambda row: f"{row['size']}/{row['channels']}")
def test_what_a_pair_saves(row):
    """Expect the measured saving, within 1.7 times, from 30 microseconds on: less always waits."""
    root, graph = layer_graph(row["channels"])
    x = torch.empty(64, row["channels"], row["size"], row["size"], dtype=torch.bfloat16, device="meta")
    saved = 1e6 * waiting.saved_time(root.to("meta"), graph, [x], waiting.Speed(), 0.0)
    measured = row["us"]["original"] - row["us"]["convpool"]
    assert measured / 1.7 < saved < measured * 1.7 or max(saved, measured) < 70


def test_slower_gpus_save_more():
    root, graph = layer_graph(64)
    x = torch.empty(64, 64, 64, 64, dtype=torch.bfloat16, device="meta")
    times = [waiting.saved_time(root.to("meta"), graph, [x], waiting.Speed(*speed), 0.0) for speed in ((1, 1), (3, 1), (3, 5))]
    assert times[0] < times[1] < times[2]


def critic():
    """A network that is optimized, and an input."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.AvgPool2d(2), nn.Flatten())
    net, report = convpool.torch.optimize(net.cuda())
    assert report.summary.rewritten == 1
    return net, torch.randn(2, 3, 8, 8, device="cuda")


def is_pooled_first(y):
    """Return True if a result's derivatives have a node of a pair; else they have a pooling's."""
    names, nodes = set(), [y.grad_fn]
    while nodes:
        node = nodes.pop()
        names.add(node.name())
        nodes += [following for following, _ in node.next_functions if following is not None]
    pooled, averaged = any("PooledConv" in name for name in names), any("AvgPool2D" in name for name in names)
    assert pooled != averaged
    return pooled


@pytest.fixture
def everything_waits(gpu, monkeypatch):  # noqa: F811
    monkeypatch.setattr(waiting, "HOST", 1.0)


@pytest.mark.usefixtures("gpu")
def test_large_pairs_do_not_wait(monkeypatch):
    monkeypatch.setattr(waiting, "HOST", 1e-12)
    net, x = critic()
    assert is_pooled_first(net(x))


@pytest.mark.usefixtures("everything_waits")
def test_eager_steps():
    net, x = critic()
    y = net(x)
    assert not is_pooled_first(y)
    with torch.autocast("cuda", torch.bfloat16):
        assert not is_pooled_first(net(x))
    made = torch.randn(2, 3, 8, 8, device="cuda", requires_grad=True) * 1  # as by a generator
    assert not is_pooled_first(net(made))
    assert is_pooled_first(net(x.clone().requires_grad_()))  # a penalty may follow, of which another number decides
    with torch.no_grad():
        torch.testing.assert_close(net(x), y, rtol=1e-4, atol=1e-5)
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    assert is_pooled_first(net(x.clone().requires_grad_()))
    assert not is_pooled_first(net(made))


@pytest.mark.usefixtures("everything_waits")
def test_small_penalties(monkeypatch):
    monkeypatch.setattr(waiting, "HOST_OF_A_PENALTY", 1.0)
    net, x = critic()
    assert not is_pooled_first(net(x.requires_grad_()))


@pytest.mark.parametrize("warmed", [False, True])
@pytest.mark.parametrize("times_algorithms", [False, True])
@pytest.mark.usefixtures("everything_waits")
def test_captures(warmed, times_algorithms, monkeypatch):
    """Steps on a side stream make the plan ready; after others alone, what is captured is the original, and a warning says so."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", times_algorithms)
    net, x = critic()
    runs = []

    def step():
        y = net(x)
        runs.append(is_pooled_first(y))
        return y.detach(), *torch.autograd.grad(y.square().sum(), list(net.parameters()))

    expected = step()
    if warmed:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found, replay = replayed(step)
        assert runs == [False, True, True, True, True]
    else:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with pytest.warns(UserWarning, match="side stream"), torch.cuda.graph(graph):
            found = step()
        replay = graph.replay
        assert runs == [False, False]
    replay()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
