# SPDX-License-Identifier: Apache-2.0
"""The operators on a GPU: against PyTorch's own in float64, in every type and layout, on streams, and captured steps."""

import copy
import math
import subprocess
import sys

import pytest

from tests.support.torch import pool_seeds, random_layer, require_torch

torch = require_torch()
import torch.nn.functional as F  # noqa: E402

import convpool.torch  # noqa: E402
from convpool.torch import kernels, pairs, plain  # noqa: E402
from convpool.torch.pairs import convolved  # noqa: E402
from models.torch_discriminators import SNGAN, WGANGP32, gradient_penalty  # noqa: E402
from tests.support.torch_gpu import DTYPES, LAST, by_replays, gpu, on_gpu, replayed  # noqa: E402, F401

FUNCTIONS = {rank: getattr(convpool.torch, f"conv_avg_pool{rank}d") for rank in (1, 2, 3)}
ops = torch.ops.convpool
pytestmark = pytest.mark.usefixtures("gpu")


def assert_near(got, expected, terms):
    """Within the rounding of sums of `terms` products of operands rounded to the type, relative to the largest expected value."""
    expected = expected.to(torch.float64)
    error = (got.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    assert error < 4 * torch.finfo(got.dtype).eps * terms**0.5 + 1e-12, error


def assert_with_derivatives_near(y, given, expected, exact):
    """The results of what is given and of the same in float64; given and exact: input, weight, and bias if there is one."""
    grad, terms = torch.randn_like(expected).to(given[0].dtype), max(y[0].numel(), 9 * given[1][0].numel())
    got = torch.autograd.grad(y, given, grad)
    for mine, theirs in zip((y, *got), (expected, *torch.autograd.grad(expected, exact, grad.double())), strict=True):
        assert_near(mine, theirs, terms)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", pool_seeds(80))
def test_random_layers(seed, dtype, last):
    torch.manual_seed(seed)
    layer = random_layer(seed)
    given = [on_gpu(shape, dtype, last, grad=True) for shape in layer.shapes]
    exact = [t.detach().double().requires_grad_() for t in given]
    y = FUNCTIONS[layer.rank](*given, **layer.conv, **layer.pool)
    expected = layer.original(F, *exact, *([] if layer.bias else [None]))
    assert_with_derivatives_near(y, given, expected, exact)


@pytest.mark.parametrize("kernel", [1, 3])
def test_windows_of_more_than_64_elements_are_not_summed_by_one_thread(kernel, monkeypatch):
    """A 3x3 convolution and a mean over 112x112 took 47 times as long as PyTorch's two operators."""
    monkeypatch.setattr(kernels, "by_plan", lambda *given: pytest.fail("a plan"))
    x, pool = torch.randn(2, 8, 9, 9, device="cuda"), torch.nn.AdaptiveAvgPool2d(1)
    module = torch.nn.Sequential(torch.nn.Conv2d(8, 16, kernel, padding=kernel // 2), pool).cuda()
    changed, report = convpool.torch.optimize(copy.deepcopy(module), x)
    assert [site.status for site in report.sites] == ["rewritten" if kernel == 1 else "rejected"]
    given, padding = (x, module[0].weight, module[0].bias), kernel // 2
    for found in (changed(x), convpool.torch.conv_avg_pool2d(*given, padding=padding, pool_size=9)):
        torch.testing.assert_close(found, module(x), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize(
    "shape, window",
    [
        ((3, 16, 9, 13), ([2, 2], [1, 1], [1, 1, 1, 1], [1, 1])),
        ((2, 8, 8, 8), ([2, 2], [2, 2], [0, 0, 0, 0], [1, 1])),
        ((2, 8, 7, 9), ([2, 2], [2, 2], [1, 0, 0, 1], [1, 1])),
        ((2, 5, 10, 9), ([3, 2], [2, 1], [2, 0, 1, 3], [1, 2])),
        ((2, 24, 6, 6), ([3, 3], [1, 1], [2, 2, 2, 2], [1, 1])),
        ((1, 3, 12, 11), ([2, 3], [3, 2], [0, 1, 1, 0], [2, 1])),
        ((2, 8, 30), ([4], [2], [3, 1], [1])),
        ((2, 16, 5, 6, 7), ([2, 2, 3], [2, 1, 1], [1, 0, 1, 0, 1, 1], [1, 2, 1])),
        ((2, 16, 5, 6, 7), ([1, 2, 2], [1, 1, 1], [0, 1, 1, 0, 1, 1], [1, 1, 1])),
    ],
)
def test_box_means(shape, window, dtype, last):
    """Sums of small whole numbers are exact, so only the division and the result are rounded."""
    x = torch.randint(-8, 9, shape, device="cuda").to(dtype)
    x = x.contiguous(memory_format=LAST[x.dim() - 2]) if last and x.dim() - 2 in LAST else x
    z, expected = ops.box_mean(x, *window), plain.box_mean(x, *window)
    assert z.stride() == expected.stride()
    is_power_of_two = not math.prod(window[0]) & (math.prod(window[0]) - 1)  # else fp32 divides to within a rounding
    torch.testing.assert_close(z, expected, rtol=0 if is_power_of_two else torch.finfo(dtype).eps, atol=0)
    grad = torch.randint(-8, 9, z.shape, device="cuda").to(dtype).contiguous(memory_format=plain.memory_format(z))
    spread = ops.box_mean_adjoint(grad, shape[2:], *window)
    expected = plain.box_mean_adjoint(grad.double(), shape[2:], *window)
    torch.testing.assert_close(spread.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-12)


def test_box_means_of_slices():
    """Tensors that are not dense, twice: the second call takes what the first has found."""
    window = ([2, 2], [1, 1], [1, 1, 1, 1], [1, 1])
    x = torch.randint(-8, 9, (2, 16, 9, 13), device="cuda").half().contiguous(memory_format=torch.channels_last)[:, ::2]
    grad = torch.randint(-8, 9, (2, 16, 10, 14), device="cuda").half()[:, ::2]
    for _ in range(2):
        assert torch.equal(ops.box_mean(x, *window), plain.box_mean(x, *window))
        spread = ops.box_mean_adjoint(grad, x.shape[2:], *window)
        expected = plain.box_mean_adjoint(grad.double(), x.shape[2:], *window)
        torch.testing.assert_close(spread.double(), expected, rtol=torch.finfo(torch.half).eps, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"in_channels": 3, "out_channels": 16, "kernel_size": 3, "padding": 1},
        {"in_channels": 32, "out_channels": 64, "kernel_size": 3, "padding": 1},
        {"in_channels": 16, "out_channels": 8, "kernel_size": (2, 5), "stride": 2, "padding": (0, 3), "dilation": (2, 1)},
        {"in_channels": 16, "out_channels": 32, "kernel_size": 3, "padding": 1, "groups": 4},
        {"in_channels": 64, "out_channels": 24, "kernel_size": 1, "bias": False},
    ],
)
@pytest.mark.parametrize("relu", [False, True])
def test_a_convolution_beside_pairs(relu, options, last, dtype):
    torch.manual_seed(11)
    module = torch.nn.Conv2d(**options, device="cuda", dtype=dtype)
    exact = copy.deepcopy(module).double()
    module = module.to(memory_format=torch.channels_last) if last else module
    x = on_gpu((4, options["in_channels"], 12, 11), dtype, last, grad=True)
    x64 = x.detach().double().requires_grad_()
    geometry = (module.stride, module.padding, module.dilation, module.groups)
    y, expected = convolved(x, module.weight, module.bias, *geometry, cuda_graph=True, relu=relu), exact(x64)
    expected = expected * (y > 0) if relu else expected  # one that is rounded to zero has no gradient
    assert y.stride() == module(x).stride()
    assert_with_derivatives_near(y, [x, *module.parameters()], expected, [x64, *exact.parameters()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 64, 64, 64), (3, 5, 7, 9), (2, 8, 1, 1), (4, 1, 8, 8), (7, 24, 10), (2, 16, 5, 6, 7)])
def test_sums_of_channels(shape, dtype):
    grad = on_gpu(shape, dtype, True)
    expected = grad.double().sum([0, *range(2, grad.dim())])
    error = (pairs.channel_sums(grad).double() - expected).abs().max()
    assert error <= 2 * torch.finfo(dtype).eps * grad.double().abs().sum([0, *range(2, grad.dim())]).max()


def test_it_is_deterministic():
    layer = convpool.torch.ConvAvgPool2d(64, 64, 3, padding=1, pool_size=2).cuda().half()
    x = on_gpu((32, 64, 64, 64), torch.float16, True, grad=True)  # so large that biases' gradients may be products
    try:
        torch.use_deterministic_algorithms(True, warn_only=False)
        runs = []
        for _ in range(3):
            y = layer(x)
            runs.append((y, *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_tf32_follows_pytorch():
    x, w = on_gpu((4, 64, 16, 16), torch.float32, True), on_gpu((64, 64, 3, 3), torch.float32, True)
    expected, errors = F.avg_pool2d(F.conv2d(x.double(), w.double(), padding=1), 2), []
    for allowed in (False, True):
        torch.backends.cudnn.allow_tf32 = allowed
        y = convpool.torch.conv_avg_pool2d(x, w, padding=1, pool_size=2)
        errors.append(((y - expected).abs().max() / expected.abs().max()).item())
    assert errors[0] < 2e-6 < errors[1] < 2e-3


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(
    ("n", "c", "m", "size", "kernel", "convolution"),
    [
        (5, 3, 64, (33, 31), (3, 3), (1, 1, 1)),
        (64, 3, 64, (32, 32), (1, 1), (1, 0, 1)),
        (2, 3, 200, (17, 64), (3, 3), ((2, 1), (0, 2), (1, 3))),
        (3, 1, 8, (28, 28), (5, 5), (1, 2, 1)),
        (1, 4, 72, (5, 9), (2, 4), (1, 1, 1)),
        (6, 3, 40, (9, 16), (3, 3), (1, 1, 1)),
        (3, 2, 64, (40, 66), (3, 5), ((3, 2), (4, 1), (1, 1))),
        (300, 2, 128, (1, 7), (1, 3), (1, (0, 1), 1)),
        (7, 16, 24, (12, 12), (1, 2), (1, 0, 1)),
    ],
)
def test_weights_of_few_channels(n, c, m, size, kernel, convolution, dtype):
    torch.manual_seed(0)
    stride, padding, dilation = convolution
    x, weight = on_gpu((n, c, *size), dtype, True), on_gpu((m, c, *kernel), dtype, True)
    shape = F.conv2d(x, weight, None, stride, padding, dilation).shape
    grad = torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=torch.channels_last)
    pairs = [(v, v) if isinstance(v, int) else v for v in convolution]
    expected = torch.nn.grad.conv2d_weight(x.double(), weight.shape, grad.double(), stride, padding, dilation)
    for bias in {c * kernel[0] * kernel[1] < 32, False}:
        every = (kernels.few_channels_gradients(grad, given, weight, (*pairs, 1), bias) for given in (x, x, x.contiguous()))
        (got, d_bias), *others = every
        assert got.is_contiguous(memory_format=torch.channels_last)
        assert_near(got, expected, 4)  # operands are exact, sums are float32's
        if bias:
            assert_near(d_bias, grad.double().sum((0, 2, 3)), 4)
        for other in others:
            torch.testing.assert_close(other[0], got, rtol=0, atol=0)
            torch.testing.assert_close(other[1], d_bias, rtol=0, atol=0)


def test_weights_that_cudnn_takes():
    for channels, outputs, dtype in ((4, 64, torch.float16), (3, 60, torch.float16), (3, 64, torch.float32)):
        x, weight = on_gpu((2, channels, 8, 8), dtype, True), on_gpu((outputs, channels, 3, 3), dtype, True)
        grad = F.conv2d(x, weight, padding=1)
        assert kernels.few_channels_gradients(grad, x, weight, ((1, 1), (1, 1), (1, 1), 1), False) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 128, 3, 3), (5, 130, 2, 4), (200, 3, 1, 1), (65, 63, 1, 5)])
def test_weights_turned_round_and_back(shape, dtype):
    weight, last = on_gpu(shape, dtype, True), torch.channels_last
    found = kernels.turned(weight, 4)
    assert found.is_contiguous(memory_format=last) and torch.equal(found, 4 * weight.flip((2, 3)).transpose(0, 1))
    assert torch.equal(kernels.turned(found, 0.25), weight)
    assert kernels.turned(on_gpu((4, 4, 3, 3), dtype), 4) is None


def test_a_step_takes_the_weights_of_images_from_the_library(monkeypatch):
    """Eager, first derivatives and second ones."""
    called, own = [], kernels.few_channels_gradients
    monkeypatch.setattr(kernels, "few_channels_gradients", lambda *given: called.append(own(*given)) or called[-1])
    x, weight = on_gpu((4, 3, 16, 16), torch.bfloat16, True), on_gpu((64, 3, 3, 3), torch.bfloat16, True, grad=True)
    y = convpool.torch.conv_avg_pool2d(x.requires_grad_(), weight, padding=1, pool_size=(1, 1), pool_stride=(2, 2))
    (d_x,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    torch.autograd.grad(d_x.float().square().sum(), weight)
    assert called and all(found is not None for found in called)


# ---- captured steps ----


@pytest.mark.parametrize("times_algorithms", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_a_graph_of_a_network_s_gradient_penalty(normed, times_algorithms, monkeypatch):
    """Its branches write what the same kernels write one after the other, in every replay.

    times_algorithms: cuDNN does at the first call of a kind, which no capture allows: the steps before make them all."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", times_algorithms)
    torch.manual_seed(3)
    critic = (SNGAN(16, (1, 2, 4)) if normed else WGANGP32(32)).cuda().to(memory_format=torch.channels_last)
    critic, report = convpool.torch.optimize(critic, on_gpu((8, 3, 32, 32), torch.float32, True))
    assert report.summary.rewritten == (5 if normed else 3)
    for parametrization in (m for m in critic.modules() if hasattr(m, "n_power_iterations")):
        parametrization.n_power_iterations = 0  # of vectors that no step changes
    real, fake = (on_gpu((8, 3, 32, 32), torch.float32, True) for _ in range(2))
    mix = torch.rand(8, 1, 1, 1, device="cuda")

    def step():
        loss = gradient_penalty(critic, real, fake, mix) + critic(fake).mean() - critic(real).mean()
        return loss.detach(), *torch.autograd.grad(loss, list(critic.parameters()))

    for got, expected in by_replays(step, real, times=10):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("end", ["one pixel", "one channel"])
@pytest.mark.parametrize("biases_alone", [False, True])
def test_steps_before_a_capture_let_cudnn_choose(biases_alone, end, channels, last, dtype, monkeypatch):
    """It times the algorithms that the gradients need.  Tensors of one channel or one pixel lie in two memory orders at once."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.manual_seed(5)
    layers = [torch.nn.Conv2d(channels, 32, 3, padding=1), torch.nn.LeakyReLU(0.2), torch.nn.Conv2d(32, 64, 3, padding=1)]
    layers += [torch.nn.AvgPool2d(2), torch.nn.LeakyReLU(0.2)]
    last_layers = {
        "one pixel": [torch.nn.Conv2d(64, 64, 4), torch.nn.LeakyReLU(0.2), torch.nn.Conv2d(64, 2, 1)],
        "one channel": [torch.nn.Conv2d(64, 1, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(1, 8, 3, padding=1)],
    }
    order = torch.channels_last if last else torch.contiguous_format
    original = torch.nn.Sequential(*layers, *last_layers[end]).to("cuda", dtype, memory_format=order)
    x = on_gpu((4, channels, 8, 8), dtype, last)
    net, report = convpool.torch.optimize(original, x)
    asked = [parameter for parameter in net.parameters() if parameter.dim() == 1 or not biases_alone]
    assert report.summary.rewritten == 1

    def step():
        return torch.autograd.grad(net(x).float().square().sum(), asked)

    bound = {torch.float32: 1e-4, torch.float64: 1e-12}.get(dtype, 8 * torch.finfo(dtype).eps)  # the graph's kernels are others
    for got, expected in by_replays(step, x):
        assert (got - expected).double().norm() <= bound * expected.double().norm()


def test_a_capture_where_nothing_was_multiplied_before():
    """In a process of its own: cuBLAS, which may sum the gradients of biases, starts outside of captures only."""
    program = """
import torch, convpool.torch
from tests.support.torch_gpu import replayed
layers = [torch.nn.Conv2d(3, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.AvgPool2d(2)]
original = torch.nn.Sequential(*layers).to("cuda", torch.bfloat16, memory_format=torch.channels_last)
net, _ = convpool.torch.optimize(original)
x = torch.randn(4, 3, 128, 128, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
step = lambda: torch.autograd.grad(net(x).float().sum(), list(net.parameters()))
found, replay = replayed(step)
replay()
for got, expected in zip(found, step(), strict=True):
    assert (got - expected).float().norm() <= 2**-4 * expected.float().norm()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_compiled_training_step():
    """In bf16 and channels last, where the library runs all convolutions; also captured."""
    torch.manual_seed(5)
    original = SNGAN(16, (1, 2, 4), spectral_norm=False).cuda().to(memory_format=torch.channels_last)
    exact, original = copy.deepcopy(original).double(), original.bfloat16()
    exact.load_state_dict(original.state_dict())
    x = on_gpu((8, 3, 32, 32), torch.bfloat16, True)
    backend = convpool.torch.backend.convpool
    net = torch.compile(original, fullgraph=True, backend=backend, options={"inner": "inductor"})
    expected = torch.autograd.grad(exact(x.double()).sum(), list(exact.parameters()))
    eager = torch.autograd.grad(original(x).float().sum(), list(original.parameters()))

    def step():
        return torch.autograd.grad(net(x).float().sum(), list(net.parameters()))

    found, replay = replayed(step)
    replay()
    for got, theirs, reference in zip(found, eager, expected, strict=True):
        error, allowed = ((t.double() - reference).norm() / reference.norm() for t in (got, theirs))
        assert error < 2 * allowed + 0.01
