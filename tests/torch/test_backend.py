# SPDX-License-Identifier: Apache-2.0
"""The backend of torch.compile: networks, original and compiled."""

import copy

import pytest

from tests.support.torch import require_torch

torch = require_torch()

from convpool.torch.backend import PoolFirst  # noqa: E402
from tests.torch.test_optimize_networks import NETWORKS, TIMES, channels_last, distance, everything, floor, made  # noqa: E402

KINDS = ("SNGAN 64x64", "DVD-GAN", "LeNet-5")
"""The others come through `optimize` in test_optimize_networks.py, with the same backend."""


@pytest.mark.parametrize("name", KINDS)
def test_outputs_and_derivatives(name):
    """In one graph, with the pairs of `optimize`; second derivatives too."""
    module, x = made(name)
    exact = everything(copy.deepcopy(module).double(), x.double())
    own = [everything(copy.deepcopy(module), x), everything(*channels_last(module, x))]
    torch._dynamo.reset()
    backend = PoolFirst()
    found = everything(torch.compile(copy.deepcopy(module), backend=backend, fullgraph=True), x)
    assert [report.summary.rewritten for report in backend.reports] == [NETWORKS[name].pairs]
    for kind, reference in exact.items():
        bound = max(TIMES * max(distance(result[kind], reference) for result in own), floor(torch.float32))
        assert distance(found[kind], reference) <= bound, kind


@pytest.mark.parametrize("name", KINDS)
def test_inference(name):
    module, x = made(name)
    module.eval()
    torch._dynamo.reset()
    backend = PoolFirst()
    with torch.no_grad():
        compiled, exact = torch.compile(copy.deepcopy(module), backend=backend, fullgraph=True), copy.deepcopy(module).double()
        other, nhwc = channels_last(module, x)
        reference, y = exact(x.double()), compiled(x)
        distances = [distance([result], [reference]) for result in (module(x), other(nhwc), y)]
    assert [report.summary.rewritten for report in backend.reports] == [NETWORKS[name].pairs]
    assert distances[2] <= max(TIMES * max(distances[:2]), floor(torch.float32))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_without_a_penalty(name):
    """On a CPU without Python in the backward pass."""
    module, x = made(name)

    def results(net, x):
        y = net(x)
        gradients = torch.autograd.grad(y.square().mean(), list(net.parameters()), allow_unused=True)
        return [t.detach().double() for t in (y, *gradients) if t is not None]

    torch._dynamo.reset()
    backend = PoolFirst()
    compiled = torch.compile(copy.deepcopy(module), backend=backend, fullgraph=True)
    exact = results(copy.deepcopy(module).double(), x.double())
    own = [results(copy.deepcopy(module), x), results(*channels_last(module, x))]
    found = results(compiled, x)
    assert [report.summary.rewritten for report in backend.reports] == [NETWORKS[name].pairs]
    assert distance(found, exact) <= max(TIMES * max(distance(result, exact) for result in own), floor(torch.float32))
    names, nodes = set(), [compiled(x).grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in names:
            names.add(node)
            nodes += [following for following, _ in node.next_functions]
    assert not any("PooledConv" in node.name() for node in names)
