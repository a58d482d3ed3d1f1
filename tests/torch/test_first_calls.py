# SPDX-License-Identifier: Apache-2.0
"""First calls with a size, for which a plan is made, in contexts that keep what calls compute: autocast, parametrize.cached."""

import contextlib
import copy

import pytest

from tests.support.torch import require_torch

torch = require_torch()

from torch import nn  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402
from torch.nn.utils.parametrizations import spectral_norm, weight_norm  # noqa: E402

from convpool.torch import optimize  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh():
    """TorchDynamo keeps captures by the code of forward, and before PyTorch 2.13 at most 8 of one code."""
    torch._dynamo.reset()


class Apart(nn.Module):
    """One whose forward cannot be followed, so that its parts are looked at in a call of it."""

    def __init__(self, inside):
        super().__init__()
        self.inside, self.last = inside, nn.Conv2d(8, 4, 1)

    def forward(self, x):
        y = self.inside(x)
        return self.last(y if y.sum() < 1e9 else -y)


def chain(wrap=lambda conv: conv):
    torch.manual_seed(0)
    first, second = wrap(nn.Conv2d(3, 8, 3, padding=1)), nn.Conv2d(8, 8, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.AvgPool2d(2))


MODULES = {
    "plain": chain,
    "spectral norm": lambda: chain(spectral_norm),
    "weight norm": lambda: chain(weight_norm),
    "in parts": lambda: Apart(chain()),
}


def autocast(device, dtype=torch.bfloat16, **options):
    return lambda: torch.autocast(device, dtype, **options)


CONTEXTS = {
    "autocast": [autocast("cpu")],
    "float16": [autocast("cpu", torch.float16)],
    "no cache": [autocast("cpu", cache_enabled=False)],
    "nested": [autocast("cpu"), autocast("cpu")],
    "nested, off": [autocast("cpu"), autocast("cpu", enabled=False)],
    "nested, on": [autocast("cpu", enabled=False), autocast("cpu")],
    "another device": [autocast("cuda"), autocast("cpu")],
    "cached": [parametrize.cached],
    "cached, autocast": [parametrize.cached, autocast("cpu")],
}
TELLING = ("autocast", "cached", "cached, autocast")
PAIRS = [
    (name, contexts) for name in MODULES for contexts in CONTEXTS if name in ("plain", "spectral norm") or contexts in TELLING
]
MODES = {"training": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def entered(contexts):
    stack = contextlib.ExitStack()
    for context in contexts:
        stack.enter_context(context())
    return stack


def step(net, x, contexts, mode):
    """The results of two calls, the gradients, and the parameters after a step, of a training step; or the results alone."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with entered(contexts):
        with mode():
            y = net(x)
        if mode is torch.inference_mode:
            return [y]
        if mode is torch.no_grad:
            return [y, net(x).detach()]
        z = net(x)
    (y.float().square().mean() + z.float().mean()).backward()
    gradients = [p.grad for p in net.parameters()]
    optimizer.step()
    return [y, z, *gradients, *(p.detach() for p in net.parameters())]


def check_same(found, expected, rtol=3e-2):
    for one, other in zip(found, expected, strict=True):
        assert type(one) is torch.Tensor and one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    "name, contexts, mode", [(*pair, mode) for pair in PAIRS for mode in MODES if mode != "inference" or pair[1] in TELLING]
)
def test_a_call_of_a_new_size(name, contexts, mode):
    original, x = MODULES[name](), torch.randn(2, 3, 32, 32)
    changed, report = optimize(copy.deepcopy(original), torch.randn(2, 3, 16, 16))
    assert report.summary.rewritten == 1
    before = torch.get_rng_state()
    found = step(changed, x, CONTEXTS[contexts], MODES[mode])
    assert torch.equal(before, torch.get_rng_state())
    check_same(found, step(original, x, CONTEXTS[contexts], MODES[mode]))
    if mode == "training":
        weights = [changed.get_parameter(key) for key, _ in original.named_parameters() if key.endswith("weight")]
        assert all(p.grad.abs().max() > 0 for p in weights)


@pytest.mark.parametrize("name, contexts", PAIRS)
def test_optimize_inside(name, contexts):
    """Neither the module nor the original, which has the same parameters, has anything of it in the same context."""
    original, x = MODULES[name](), torch.randn(2, 3, 16, 16)
    expected = step(copy.deepcopy(original), x, CONTEXTS[contexts], contextlib.nullcontext)
    for inplace, which in ((False, 0), (False, 1), (True, 0)):
        module = copy.deepcopy(original)
        with entered(CONTEXTS[contexts]):
            nets = (module, optimize(module, x, inplace=inplace)[0])
            y = nets[which](x)
        assert torch.is_autocast_cache_enabled() and not parametrize._cache_enabled
        check_same([y], expected[:1])
        y.float().square().mean().backward()
        assert all(type(p.grad) is torch.Tensor for p in module.parameters())


@pytest.mark.parametrize("limit", ["recompile_limit", "accumulated_recompile_limit"])
def test_limit_of_captures(limit):
    """TorchDynamo counts captures by the code of forward, which all modules of the class share where it is cut in two."""
    x = torch.randn(2, 3, 16, 16)
    with torch._dynamo.config.patch({limit: 2}):
        reports = [optimize(MODULES["in parts"](), x)[1] for _ in range(4)]
    torch._dynamo.reset()
    rewritten = [report.summary.rewritten for report in reports]
    if limit == "recompile_limit":  # each module has its own, and looking has 64
        assert rewritten == [1, 1, 1, 1] and not any("limit" in line for report in reports for line in report.warnings)
    else:
        assert rewritten[0] == 1 and rewritten[-1] == 0
        assert any("TorchDynamo's limit of captures" in line for line in reports[-1].warnings)
