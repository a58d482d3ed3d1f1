# SPDX-License-Identifier: Apache-2.0
"""First and second derivatives in float64, by finite differences, and values against PyTorch's two operators; under torch.compile
what the backward is made of."""

import pytest

from tests.support.torch import calls_of, pools_first, random_layer, require_torch

torch = require_torch()
import torch.nn.functional as F  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import convpool.torch  # noqa: E402
from convpool.torch import conv_avg_pool2d, gradients, pairs, pooled_conv  # noqa: E402

FUNCTIONS = {rank: getattr(convpool.torch, f"conv_avg_pool{rank}d") for rank in (1, 2, 3)}
ops, aten = torch.ops.convpool, torch.ops.aten


def tensors(layer, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in layer.shapes]


def pair(layer, given):
    """Return what convpool's function and PyTorch's two operators give."""
    mine = FUNCTIONS[layer.rank](*given, **layer.conv, **layer.pool)
    return mine, layer.original(F, *given, *([] if layer.bias else [None]))


def convolution(layer, given):
    conv = [layer.conv[name] for name in ("stride", "padding", "dilation", "groups")]
    three = (*given, *([] if layer.bias else [None]))
    return pairs.convolve(*three, conv), getattr(F, f"conv{layer.rank}d")(*three, *conv)


@pytest.mark.parametrize(("both", "seed"), [*((pair, seed) for seed in range(200)), *((convolution, seed) for seed in range(60))])
def test_values_and_two_derivatives(both, seed):
    layer = random_layer(seed)
    given = tensors(layer, seed=seed)
    torch.testing.assert_close(*both(layer, given), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda *t: both(layer, t)[0], given, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *t: both(layer, t)[0], given, fast_mode=True)


def test_the_random_layers_have_every_kind():
    layers = [random_layer(seed) for seed in range(200)]
    assert {layer.rank for layer in layers} == {1, 2, 3} and 100 < sum(map(pools_first, layers)) < 200
    assert all(sum(2 in layer.conv[name] for layer in layers) > 9 for name in ("stride", "dilation", "padding"))
    assert sum(layer.conv["groups"] == 3 for layer in layers) > 9
    assert sum(any(layer.pool["pool_padding"]) for layer in layers) > 9


@pytest.mark.parametrize("relu", [0, 1])
@pytest.mark.parametrize("pool", [1, 2])
@pytest.mark.parametrize("wanted", range(1, 8))
def test_gradients_of_any_of_the_inputs(wanted, pool, relu):
    """A first-order backward pass, of pads that PyTorch's convolution takes, and the second derivatives."""
    torch.manual_seed(wanted)
    shapes = [(2, 4, 8, 6), (4, 2, 3, 3), (4,)]
    given = [torch.randn(shape, dtype=torch.float64).requires_grad_(bool(wanted >> i & 1)) for i, shape in enumerate(shapes)]
    box_pads, pads = ([1] * 4, [0] * 4) if pool > 1 else ([0] * 4, [1] * 4)  # of a padding of 1
    geometry = ([pool] * 2, [1, 1], box_pads, [1, 1], [pool] * 2, pads, [1, 1], 2, relu, 0.0)
    y, expected = pooled_conv(*given, *geometry), F.avg_pool2d(F.conv2d(*given, padding=1, groups=2), pool)
    expected = expected.relu() if relu else expected
    assert torch.autograd.gradgradcheck(lambda *t: pooled_conv(*t, *geometry), given, fast_mode=True)
    asked, grad = [t for t in given if t.requires_grad], torch.randn_like(y)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(t, asked, grad) for t in (y, expected)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("epilogue", [0, 1, 2])
@pytest.mark.parametrize("last_pad", [0, 1])
def test_activation_checkpoints(last_pad, epilogue, reentrant):
    """torch.utils.checkpoint computes what a backward pass kept again, and lets the pass ask for it once."""
    torch.manual_seed(0)
    x, weight = (torch.randn(shape, requires_grad=True) for shape in ((2, 4, 9, 9), (4, 4, 2, 2)))
    given = x, weight, None, [2, 2], [1, 1], [0] * 4, [1, 1], [2, 2], [0, 0, 2 * last_pad, 0], [1, 1], 1, epilogue, 0.2
    expected = torch.autograd.grad(pooled_conv(*given).square().sum(), given[:2])
    checkpoint(pooled_conv, *given, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close((x.grad, weight.grad), expected)


def test_the_box_mean_and_its_adjoint():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64, requires_grad=True)
    window = ([3, 2], [2, 1], [1, 2, 0, 1], [2, 1])
    z = ops.box_mean(x, *window)
    spread = ops.box_mean_adjoint(g := torch.randn_like(z).requires_grad_(), [7, 6], *window)
    torch.testing.assert_close((z * g).sum(), (x * spread).sum(), rtol=1e-12, atol=0)
    assert torch.autograd.gradgradcheck(lambda x: ops.box_mean(x, *window), [x])
    assert torch.autograd.gradgradcheck(lambda g: ops.box_mean_adjoint(g, [7, 6], *window), [g])


def test_the_first_pass_of_a_gradient_penalty_makes_no_gradient_of_weights():
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    layer = convpool.torch.ConvAvgPool2d(3, 4, 3, padding=1, pool_size=2)
    y = layer(x).square().sum()
    with calls_of(aten.convolution_backward.default) as found:
        (grad,) = torch.autograd.grad(y, [x], create_graph=True)
        (grad.square().sum() + y).backward()
    assert found[0][-1] == [True, False, False]
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("captures", [False, True])
def test_while_a_graph_is_captured_only_gradients_that_are_asked_for_are_made(captures, monkeypatch):
    """Elsewhere whoever asks for one parameter is taken to ask for all: PyTorch's answer takes the host long."""
    asked = []

    def wanted(*arguments, known=gradients.wanted):
        asked.append(known(*arguments))
        return asked[-1]

    monkeypatch.setattr(gradients, "wanted", wanted)
    monkeypatch.setattr(gradients, "_is_capturing", lambda: captures)
    x, weight = torch.randn(2, 3, 5, 5), torch.randn(3, 3, 1, 1)
    weights, biases = zip(*((weight.clone().requires_grad_(), torch.randn(3).requires_grad_()) for _ in range(3)), strict=True)
    y = x
    for one, bias in zip(weights, biases, strict=True):
        y = pairs.convolve(y, one, bias, ((1, 1), (0, 0), (1, 1), 1))
    torch.autograd.grad(y.sum(), biases)
    exact = [[True, False, True], [True, False, True], [False, False, True]]
    assert asked == (exact if captures else [[True, False, True], [True, True, True], [False, True, True]])


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("epilogue", [0, 1])
def test_several_gradients_at_once(last, epilogue):
    """torch.autograd.grad(is_grads_batched=True), as of jacobian(vectorize=True), and of gradients once more."""
    generator = torch.Generator().manual_seed(3)
    given = x, weight, bias = leaf(2, 4, 6, 8, last=last), leaf(3, 4, 3, 3, last=last), leaf(3)
    window, rest = ([2, 2], [1, 1], [1, 1, 1, 1], [1, 1]), ([2, 2], [0, 0, 0, 0], [1, 1], 1, epilogue, 0.0)
    hidden = pairs.convolve(x, weight.transpose(0, 1).repeat(1, 2, 1, 1)[:, :4], None, ((1, 1), (1, 1), (1, 1), 1))
    y, asked = pooled_conv(hidden, weight, bias, *window, *rest), given
    for _ in range(2):
        many = torch.randn(3, *y.shape, dtype=torch.float64, generator=generator)
        got = torch.autograd.grad(y, asked, many, retain_graph=True, is_grads_batched=True)
        one = [torch.autograd.grad(y, asked, each, create_graph=True) for each in many]
        torch.testing.assert_close(got, tuple(map(torch.stack, zip(*one, strict=True))))
        y, asked = one[0][0], given[1:2]


# ---- under torch.compile ----

SEEDS = [seed for seed in range(60) if pools_first(random_layer(seed)) and not random_layer(seed).pool["ceil_mode"]]


def backward_of(function, expected, given, **options):
    """Compare the gradients of a function compiled by AOTAutograd alone; the operators of its one backward graph."""
    backwards = []

    def keep(graph, example):
        backwards.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=lambda graph, example: graph.forward, bw_compiler=keep)
    results = torch.compile(function, fullgraph=True, backend=backend)(*given), expected
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), given) for y in results), **options)
    (found,) = backwards
    return found


def leaf(*shape, last=False):
    t = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape) + shape[0]))
    return (t.contiguous(memory_format=torch.channels_last) if last else t).requires_grad_()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("channels", "sums"), [(3, 0), (4, 1)])
def test_a_pair_s_backward(channels, sums, last):
    """One operator for the gradients at weight, box means and, of few channels, bias, and a pooling that inductor can fuse."""
    given = [leaf(2, channels, 8, 8, last=last), leaf(3, channels, 3, 3, last=last), leaf(3)]
    expected = F.avg_pool2d(F.conv2d(*given, padding=1), 2)
    found = backward_of(lambda *t: conv_avg_pool2d(*t, padding=1, pool_size=2), expected, given, check_stride=True)
    assert found.count(ops.pooled_conv_gradients.default) == 1 and found.count(aten.avg_pool2d.default) == 1
    assert aten.convolution_backward.default not in found and ops.box_mean_adjoint.default not in found
    assert found.count(aten.sum.dim_IntList) == sums


@pytest.mark.parametrize("seed", SEEDS[::8])
def test_random_layers(seed):
    layer = random_layer(seed)
    given = tensors(layer)
    found = backward_of(lambda *t: FUNCTIONS[layer.rank](*t, **layer.conv, **layer.pool), pair(layer, given)[1], given)
    assert found.count(ops.pooled_conv_gradients.default) == 1
