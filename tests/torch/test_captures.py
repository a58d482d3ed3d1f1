# SPDX-License-Identifier: Apache-2.0
"""Training steps captured in CUDA graphs give what eager ones give."""

import copy
import subprocess
import sys

import pytest

from tests.support.torch import require_torch

torch = require_torch()

import convpool.torch  # noqa: E402
from models.torch_discriminators import SNGAN, WGANGP32, gradient_penalty  # noqa: E402
from tests.support.torch_gpu import DTYPES, gpu, on_gpu, replayed  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("gpu")


def by_kernels(step):
    """Run a step on a stream of its own, where all pairs run by kernels as in a capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = step()
    torch.cuda.current_stream().wait_stream(stream)
    return found


@pytest.mark.parametrize("last", [False, True])
def test_a_graph_of_a_training_step(last):
    layer = convpool.torch.ConvAvgPool2d(32, 64, 3, padding=1, pool_size=2).cuda().half()
    still = on_gpu((2, 32, 16, 16), torch.float16, last, grad=True)

    def step():
        y = layer(still)
        return y.detach(), *torch.autograd.grad(y.float().sum(), [layer.weight, layer.bias, still])

    found, replay = replayed(step)
    with torch.no_grad():
        still.copy_(2 * still)
    replay()
    for got, expected in zip(found, step(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


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

    found, replay = replayed(step)
    for _ in range(10):
        with torch.no_grad():
            real.copy_(torch.randn_like(real))
        replay()
        for got, expected in zip(found, by_kernels(step), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("end", ["one pixel", "one channel"])
def test_steps_before_a_capture_let_cudnn_choose(end, channels, last, dtype, monkeypatch):
    """It times its algorithms in those steps.  Tensors of one channel or one pixel lie in two memory orders at once."""
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
    assert report.summary.rewritten == 1

    def step():
        return torch.autograd.grad(net(x).float().square().sum(), list(net.parameters()))

    found, replay = replayed(step)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    replay()
    bound = {torch.float32: 1e-4, torch.float64: 1e-12}.get(dtype, 8 * torch.finfo(dtype).eps)  # the graph's kernels are others
    for got, expected in zip(found, by_kernels(step), strict=True):
        assert (got - expected).double().norm() <= bound * expected.double().norm()


def test_a_capture_of_some_parameters_gradients(monkeypatch):
    """cuDNN has only seen the convolutions that these gradients need."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    layers = [torch.nn.Conv2d(3, 20, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(20, 28, 3, padding=1), torch.nn.AvgPool2d(2)]
    original = torch.nn.Sequential(*layers, torch.nn.Conv2d(28, 12, 3, padding=1)).cuda()
    net, _ = convpool.torch.optimize(original)
    biases = [parameter for parameter in net.parameters() if parameter.dim() == 1]
    x = on_gpu((5, 3, 18, 22), torch.float32)

    def step():
        return torch.autograd.grad(net(x).square().sum(), biases)

    found, replay = replayed(step)
    replay()
    for got, expected in zip(found, step(), strict=True):
        assert (got - expected).norm() <= 1e-4 * expected.norm()


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


@pytest.mark.parametrize("way", ["backend", "options"])
def test_a_compiled_training_step(way):
    """In bf16 and channels last, where the library runs all convolutions; also captured."""
    torch.manual_seed(5)
    original = SNGAN(16, (1, 2, 4), spectral_norm=False).cuda().to(memory_format=torch.channels_last)
    exact, original = copy.deepcopy(original).double(), original.bfloat16()
    exact.load_state_dict(original.state_dict())
    x = on_gpu((8, 3, 32, 32), torch.bfloat16, True)
    if way == "backend":
        net = torch.compile(original, fullgraph=True, backend=convpool.torch.backend.convpool, options={"inner": "inductor"})
    else:
        net = torch.compile(original, fullgraph=True, options=convpool.torch.compile_options())
    expected = torch.autograd.grad(exact(x.double()).sum(), list(exact.parameters()))
    eager = torch.autograd.grad(original(x).float().sum(), list(original.parameters()))

    def step():
        return torch.autograd.grad(net(x).float().sum(), list(net.parameters()))

    found, replay = replayed(step)
    replay()
    for got, theirs, reference in zip(found, eager, expected, strict=True):
        error, allowed = ((t.double() - reference).norm() / reference.norm() for t in (got, theirs))
        assert error < 2 * allowed + 0.01
