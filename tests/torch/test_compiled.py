# SPDX-License-Identifier: Apache-2.0
"""Training under torch.compile: what its backward is made of, and gradients against PyTorch's two operators."""

from __future__ import annotations

import pytest

from tests.support.torch import pools_first, random_layer, require_torch

torch = require_torch()
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import convpool.torch  # noqa: E402
from convpool.torch import conv_avg_pool2d, optimize  # noqa: E402
from convpool.torch.rewrite import convolutions  # noqa: E402

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
    assert found.count(ops.pooled_conv_gradients.default) == 1 and found.count(aten.slice.Tensor) > 3
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


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("epilogue, alpha", [(0, 0.0), (1, 0.0), (2, -0.3), (3, 0.0)])
def test_prologues_and_epilogues(epilogue, alpha, wanted):
    """scale * x + shift and a LeakyReLU in front, an activation behind; gradients at the input, the parameters or both."""
    x, weight, bias, scale, shift = leaf(2, 4, 6, 8), leaf(3, 4, 3, 3), leaf(3), leaf(4), leaf(4)
    given = [*([x] if wanted[0] else []), *([weight, bias, scale, shift] if wanted[1] else [])]
    rest = ([2, 2], [1, 1], [1, 0, 1, 1], [1, 1], [2, 2], [0, 1, 0, 0], [1, 1], 1, 2, 0.2, epilogue, alpha)
    tensors = [t if any(t is g for g in given) else t.detach() for t in (x, weight, bias, scale, shift)]

    def loss(x, weight, bias, scale, shift):
        return convpool.torch.pooled_conv(x, weight, bias, scale, shift, None, *rest).square().sum()

    function, backwards = compiled(loss)
    got = torch.autograd.grad(function(*tensors), given)
    torch.testing.assert_close(got, torch.autograd.grad(loss(*tensors), given))
    assert backwards[0].count(ops.pooled_conv_gradients.default) == 1


@pytest.mark.parametrize("wanted", [(True, True, True), (True, True, False), (True, False, False), (False, True, True)])
@pytest.mark.parametrize("last", [False, True])
def test_the_gradients_as_an_operator(last, wanted):
    x, weight = (t.detach() for t in (leaf(2, 4, 6, 8, last=last), leaf(3, 4, 3, 3, last=last)))
    window, convolution = ([2, 2], [1, 1], [1, 0, 1, 1], [1, 1]), ([2, 2], [0, 1, 0, 0], [1, 1], 1)
    grad = torch.ones_like(ops.pooled_conv(x, weight, None, None, None, None, *window, *convolution, 0, 0.0, 0, 0.0))
    for gate in (None, x.neg()):
        given = (grad, x, gate, 0.1, weight, *window, *convolution, *wanted)
        torch.library.opcheck(ops.pooled_conv_gradients.default, given)


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


# ---- activations behind convolutions that belong to no pair ----


class Two(nn.Module):
    """A plain convolution, what follows it, and a pair."""

    def __init__(self, between):
        super().__init__()
        self.conv, self.between = nn.Conv2d(4, 4, 3, padding=1), between
        self.pair = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.AvgPool2d(2))

    def forward(self, x):
        return self.pair(self.between(self.conv(x)))


class Also(nn.Module):
    """A ReLU of a tensor that something else reads."""

    def forward(self, x):
        return F.relu(x) + 0.5 * x


class Call(nn.Module):
    """A function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def hooked():
    module = nn.ReLU()
    module.register_forward_hook(lambda m, args, result: result * 2)
    return module


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize(
    "between, taken",
    [
        (nn.ReLU(), True),
        (nn.ReLU(inplace=True), True),
        (nn.LeakyReLU(0.2), True),
        (nn.Sequential(nn.Identity(), nn.ReLU()), True),
        (Call(F.relu), True),
        (Call(lambda x: F.leaky_relu(x, negative_slope=0.3)), True),
        (nn.LeakyReLU(-0.2), False),
        (nn.LeakyReLU(0), False),
        (nn.Tanh(), False),
        (Also(), False),
        (hooked(), False),
    ],
)
def test_an_activation_behind_a_convolution(between, taken, compiles):
    torch.manual_seed(2)
    module, x = Two(between), torch.randn(2, 4, 8, 8)
    changed, report = optimize(module, x)
    assert report.summary.rewritten == 1
    plan = changed.__dict__["_convpool_region"].planned(changed, (x,), {})
    steps = [name for name in plan.run.__code__.co_names if name in ("relu", "leaky_relu", "between")]
    assert bool(steps) is not taken
    net, backwards = compiled(changed) if compiles else (changed, None)
    got = torch.autograd.grad(net(x).square().sum(), list(changed.parameters()))
    for mine, theirs in zip(got, torch.autograd.grad(module(x).square().sum(), list(module.parameters())), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert not compiles or ops.pooled_conv_gradients.default in backwards[0]


# ---- which convolutions the library runs ----


@pytest.mark.parametrize(
    "shape, weight, options, expected",
    [
        ((64, 64, 32, 32), (64, 64, 3, 3), {}, True),
        ((64, 64, 64, 64), (64, 64, 3, 3), {}, False),  # so large that cuDNN is faster
        ((64, 64, 64, 64), (64, 64, 3, 3), {"compiles": False}, True),  # but adds the bias in a pass of its own
        ((64, 3, 256, 256), (512, 3, 3, 3), {}, True),
        ((64, 64, 32, 32), (64, 16, 3, 3), {}, False),  # groups
        ((64, 64, 32, 32), (64, 64, 3, 3), {"last": False}, False),
        ((64, 64, 32, 32), (64, 64, 3, 3), {"dtype": torch.float32}, False),
        ((64, 64, 32, 32), (64, 64, 3, 3), {"of_weight": torch.float32}, False),
        ((64, 64, 32, 32), (64, 64, 3, 3), {"device": "cpu"}, False),
        ((4, 16, 8, 8, 8), (16, 16, 3, 3, 3), {}, False),
    ],
)
def test_convolutions_that_suit_the_library(shape, weight, options, expected):
    dtype = options.get("dtype", torch.bfloat16)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)]
    found = last if options.get("last", True) else torch.contiguous_format
    with FakeTensorMode():
        x = torch.empty(shape, dtype=dtype, device=options.get("device", "cuda"), memory_format=found)
        w = torch.empty(weight, dtype=options.get("of_weight", dtype), device=x.device)
        assert convolutions._suits(x, w, (1,) * (len(shape) - 2), options.get("compiles", True)) is expected


def test_plain_convolutions_of_a_captured_graph(monkeypatch):
    """Pretend a GPU with the library: passes of compile_options, then its fused operator."""
    monkeypatch.setattr(convolutions, "_has_library", lambda: True)
    monkeypatch.setattr(convolutions, "_suits", lambda x, weight, strides, compiles: x.shape[1] == weight.shape[1])
    torch.manual_seed(3)
    layers = [
        nn.Conv2d(4, 8, 3, stride=(2, 1), padding=(1, 0)),
        nn.LeakyReLU(0.2),
        nn.Conv2d(8, 8, 1),
        nn.Conv2d(8, 8, 3, groups=2),
    ]
    module = nn.Sequential(*layers, nn.Conv2d(8, 8, 3, padding=1), nn.AvgPool2d(2))
    x, rewrite, found = torch.randn(2, 4, 16, 16), convpool.torch.compile_options()["pre_grad_custom_pass"], []

    def backend(graph, example):
        rewrite(graph.graph)
        graph.recompile()
        found.extend(node for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    y = torch.compile(module, backend=backend)(x)
    torch.testing.assert_close(y, module(x), rtol=1e-5, atol=1e-5)
    calls = [node for node in found if "pooled_conv" in str(node.target)]
    assert [node.args[16] for node in calls] == [2, 0, 0] and [node.target for node in found].count(torch.conv2d) == 1


def test_a_pass_for_parameters_is_asked_for_one_leaf(monkeypatch):
    """PyTorch answers by an exception for each, which takes long."""
    asked, real = [], torch._C._will_engine_execute_node

    def counted(node):
        asked.append(node)
        return real(node)

    monkeypatch.setattr(torch._C, "_will_engine_execute_node", counted)
    module, _ = optimize(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1), nn.AvgPool2d(2)))
    loss, parameters = module(torch.randn(2, 4, 8, 8)).square().sum(), list(module.parameters())
    got = torch.autograd.grad(loss, parameters, retain_graph=True)
    assert len([node for node in asked if type(node) is torch._C._functions.AccumulateGrad]) == 1
    for number, parameter in enumerate(parameters):
        torch.testing.assert_close(torch.autograd.grad(loss, parameter, retain_graph=True)[0], got[number])
    asked.clear()
    loss.backward()
    torch.testing.assert_close([parameter.grad for parameter in parameters], list(got))
