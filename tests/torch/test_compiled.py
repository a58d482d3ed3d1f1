# SPDX-License-Identifier: Apache-2.0
"""Training under torch.compile: what its backward is made of, and gradients against PyTorch's two operators."""

import pytest

from tests.support.torch import pools_first, random_layer, require_torch

torch = require_torch()
import torch.nn.functional as F  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402

import convpool.torch  # noqa: E402
from convpool.torch import conv_avg_pool2d  # noqa: E402

torch.set_num_threads(1)  # of layers this small more would wait for one another
FUNCTIONS = {rank: getattr(convpool.torch, f"conv_avg_pool{rank}d") for rank in (1, 2, 3)}
ops, aten = torch.ops.convpool, torch.ops.aten
SEEDS = [seed for seed in range(60) if pools_first(random_layer(seed)) and not random_layer(seed).pool["ceil_mode"]]


def compiled(function):
    """The function compiled by AOTAutograd alone, and the operators of each backward graph."""
    backwards = []

    def keep(graph, example):
        backwards.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=lambda graph, example: graph.forward, bw_compiler=keep)
    return torch.compile(function, fullgraph=True, backend=backend), backwards


def leaf(*shape, last=False):
    t = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape) + shape[0]))
    return (t.contiguous(memory_format=torch.channels_last) if last else t).requires_grad_()


@pytest.mark.parametrize("last", [False, True])
def test_a_pair_s_backward(last):
    """One operator for the gradients at weight and box means, and a pooling that inductor can fuse."""
    given = [leaf(2, 4, 8, 8, last=last), leaf(3, 4, 3, 3, last=last), leaf(3)]
    function, backwards = compiled(lambda x, w, b: conv_avg_pool2d(x, w, b, padding=1, pool_size=2))
    got = torch.autograd.grad(function(*given).square().sum(), given)
    y = F.avg_pool2d(F.conv2d(*given, padding=1), 2)
    for mine, theirs in zip(got, torch.autograd.grad(y.square().sum(), given), strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.stride() == theirs.stride()
    (found,) = backwards
    assert found.count(ops.pooled_conv_gradients.default) == 1 and found.count(aten.avg_pool2d.default) == 1
    assert aten.convolution_backward.default not in found and ops.box_mean_adjoint.default not in found


@pytest.mark.parametrize("seed", SEEDS[::8])
def test_random_layers(seed):
    layer = random_layer(seed)
    shapes = [layer.x_shape, layer.weight_shape, *([layer.weight_shape[:1]] if layer.bias else [])]
    given = [leaf(*shape) for shape in shapes]
    function, backwards = compiled(lambda *tensors: FUNCTIONS[layer.rank](*tensors, **layer.conv, **layer.pool))
    got = torch.autograd.grad(function(*given).square().sum(), given)
    expected = layer.original(F, *given, *([] if layer.bias else [None]))
    torch.testing.assert_close(got, torch.autograd.grad(expected.square().sum(), given))
    assert backwards[0].count(ops.pooled_conv_gradients.default) == 1


@pytest.mark.parametrize("wanted", [(True, True, True), (True, True, False), (True, False, False), (False, True, True)])
@pytest.mark.parametrize("last", [False, True])
def test_the_gradients_as_an_operator(last, wanted):
    x, weight = (t.detach() for t in (leaf(2, 4, 6, 8, last=last), leaf(3, 4, 3, 3, last=last)))
    window, convolution = ([2, 2], [1, 1], [1, 0, 1, 1], [1, 1]), ([2, 2], [0, 1, 0, 0], [1, 1], 1)
    grad = torch.ones_like(ops.pooled_conv(x, weight, None, *window, *convolution, 0, 0.0))
    torch.library.opcheck(ops.pooled_conv_gradients.default, (grad, x, weight, *window, *convolution, *wanted))


@pytest.mark.parametrize(("channels", "sums"), [(3, 0), (4, 1)])
def test_a_bias_s_gradient_comes_with_those_of_few_channels(channels, sums):
    function, backwards = compiled(lambda x, w, b: conv_avg_pool2d(x, w, b, padding=1, pool_size=2).square().sum())
    given = [leaf(2, channels, 8, 8), leaf(8, channels, 3, 3), leaf(8)]
    exact = [tensor.detach().clone().requires_grad_() for tensor in given]
    function(*given).backward()
    x, w, b = exact
    F.avg_pool2d(F.conv2d(x, w, b, padding=1), 2).square().sum().backward()
    for tensor, other in zip(given, exact, strict=True):
        torch.testing.assert_close(tensor.grad, other.grad)
    assert backwards[0].count(torch.ops.aten.sum.dim_IntList) == sums
