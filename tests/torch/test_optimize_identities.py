# SPDX-License-Identifier: Apache-2.0
"""Tensors under several names, numbers that only seem to go with the batch, and classes that do more than hold values."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from tests.support.torch import require_torch

torch = require_torch()

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.utils import parametrizations, parametrize  # noqa: E402

from convpool.torch import optimize  # noqa: E402

X = torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


class Fn(nn.Module):
    """A convolution and a pooling; forward and more attributes are given."""

    def __init__(self, forward, prepare=None):
        super().__init__()
        torch.manual_seed(0)
        self.c, self.p, self.forward_of = nn.Conv2d(3, 8, 3, padding=1, dtype=torch.float64), nn.AvgPool2d(2), forward
        if prepare is not None:
            prepare(self)

    def forward(self, *args):
        return self.forward_of(self, *args)


def pooled(self, x):
    return self.p(self.c(x))


def assert_same(changed, module, *args):
    got, expected = (net(*(arg.detach().clone() for arg in args)) for net in (changed, module))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def convolved(self, x, weight):
    return self.p(F.conv2d(x, weight, padding=1))


def ones():
    return nn.Parameter(torch.ones(8, 3, 3, 3, dtype=torch.float64))


def tie(self):
    self.v = self.w = ones()
    self.listed = [self.w]


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: convolved(self, x, self.v) + convolved(self, x * x, self.w),
        lambda self, x: convolved(self, x, self.listed[0]),
    ],
    ids=["two names", "in a list"],
)
def test_a_tensor_of_several_names_gets_another_one(forward):
    module, (changed, report) = Fn(forward, tie), optimize(Fn(forward, tie), X)
    assert report.summary.rewritten
    compiled = torch.compile(changed, backend="eager")
    for number in range(2):
        for call in (changed, compiled):
            assert_same(call, module, X)
        for net in (module, changed):
            setattr(net, "wv"[number], nn.Parameter(ones() * (3 + number)))
        for call in (changed, compiled):
            assert_same(call, module, X)


def own_twin(self):
    self.twin = nn.Conv2d(3, 8, 3, padding=1, dtype=torch.float64)
    self.twin.weight = self.c.weight


def own_buffer(self):
    self.register_buffer("t", self.c.weight.data)


def twin_s(self, x):
    y = self.twin(x)
    self.c.weight.data.mul_(0.5)
    return self.p(y)


def buffer_s(self, x):
    y = self.c(x)
    self.t.mul_(0.5)
    return self.p(y)


def foreach(self, x):
    z, w = x.detach() * 1, x.detach() * 2
    y = self.c(w)
    torch._foreach_mul_([z, w], 2.0)
    return self.p(y)


def overload(self, x):
    z = x.detach() * 1
    y = self.c(z)
    torch.ops.aten.mul_.Tensor(z, 2.0)
    return self.p(y)


@pytest.mark.parametrize(("forward", "prepare"), [(twin_s, own_twin), (buffer_s, own_buffer), (foreach, None), (overload, None)])
@torch.no_grad()
def test_changes_under_another_name(forward, prepare):
    module, (changed, _) = Fn(forward, prepare), optimize(Fn(forward, prepare), X)
    for _ in range(3):
        assert_same(changed, module, X)


class InPlace(nn.Module):
    def forward(self, x):
        return F.relu(x, inplace=True)


class Block(nn.Module):
    """A residual block that begins with an activation in place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        first, second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.first, self.second, self.act, self.pool = first, second, InPlace(), nn.AvgPool2d(2)

    def forward(self, x):
        x = x * 1
        y = self.first(x)
        return self.pool(self.second(self.act(x))) + self.pool(y)


@pytest.mark.parametrize("later", [False, True])
@torch.no_grad()
def test_a_hooked_module_may_change_its_input(later):
    module, x = Block(), torch.randn(2, 8, 16, 16)
    if not later:
        module.act.register_forward_hook(lambda *args: None)
    changed, _ = optimize(module, x)
    if later:
        changed.act.register_forward_hook(lambda *args: None)
    assert_same(changed, Block(), x)


def test_one_tensor_as_two_arguments():
    def forward(self, a, b):
        y = self.c(b)
        a.add_(1)
        return self.p(y)

    module, (changed, _) = Fn(forward), optimize(Fn(forward), (X.clone(), X.clone()))
    one, other = X.clone(), X.clone()
    torch.testing.assert_close(changed(one, one), module(other, other))
    overlapping, theirs = X.clone(), X.clone()
    torch.testing.assert_close(changed(overlapping[:2], overlapping), module(theirs[:2], theirs))


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: pooled(self, x[: x.size(0) // 2 * 2]),
        lambda self, x: pooled(self, x[: (x.shape[0] >> 1) << 1]),
        lambda self, x: pooled(self, x) * (x.numel() // 768 // 2 * 2),
        lambda self, x: pooled(self, x) * (x.shape[2] / 16),
        lambda self, x: pooled(self, x).view(x.shape[0] * 2, -1),
    ],
)
def test_numbers_made_of_sizes(forward):
    module, (changed, report) = Fn(forward), optimize(Fn(forward), X)
    assert report.summary.rewritten == 1
    for count in (2, 3, 5, 4):
        assert_same(changed, module, torch.cat([X, X, X])[:count])


@dataclasses.dataclass
class Doubled:
    y: torch.Tensor

    def __post_init__(self):
        self.y = self.y * 2


@dataclasses.dataclass
class Plain:
    y: torch.Tensor


@pytest.mark.parametrize(("kind", "pairs"), [(Doubled, 0), (Plain, 1)])
def test_dataclasses(kind, pairs):
    def forward(self, x):
        return kind(pooled(self, x))

    module, (changed, report) = Fn(forward), optimize(Fn(forward), X)
    assert report.summary.rewritten == pairs
    assert type(changed(X)) is kind
    torch.testing.assert_close(changed(X).y, module(X).y)


def in_a_partial(self):
    self.scale = functools.partial(torch.mul, other=3.0)


def in_another_s_module(self):
    self.others = [nn.AvgPool2d(2)]


def in_a_tensor(self):
    self.t = torch.tensor(2.0, dtype=torch.float64)


@pytest.mark.parametrize(
    ("forward", "prepare", "change"),
    [
        (lambda self, x: self.scale(pooled(self, x)), in_a_partial, lambda net: net.scale.keywords.update(other=4.0)),
        (
            lambda self, x: F.avg_pool2d(self.c(x), self.others[0].kernel_size),
            in_another_s_module,
            lambda net: setattr(net.others[0], "kernel_size", 4),
        ),
        (
            lambda self, x: pooled(self, x) if self.others[0].training else self.c(x),
            in_another_s_module,
            lambda net: net.others[0].eval(),
        ),
        (
            lambda self, x: pooled(self, x) if self.t is None else pooled(self, x) * self.t,
            in_a_tensor,
            lambda net: setattr(net, "t", None),
        ),
    ],
    ids=["partial", "number of a module in a list", "mode of a module in a list", "a tensor that goes"],
)
def test_attributes_that_change(forward, prepare, change):
    module, (changed, report) = Fn(forward, prepare), optimize(Fn(forward, prepare), X)
    assert report.summary.rewritten == 1
    for net in (module, changed):
        change(net)
    assert_same(changed, module, X)


def test_an_input_that_is_a_parameter():
    def forward(self, x):
        return 2 * pooled(self, x) if isinstance(x, nn.Parameter) else pooled(self, x)

    module, (changed, _) = Fn(forward), optimize(Fn(forward), X)
    for x in (X, nn.Parameter(X.clone()), X):
        torch.testing.assert_close(changed(x), module(x))


def seeded(self, x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return pooled(self, x + torch.randn_like(x))


def cached(self, x):
    with parametrize.cached():
        return pooled(self, x) + pooled(self, 2 * x)


@pytest.mark.parametrize("example", [X, None])
@pytest.mark.parametrize("forward", [seeded, cached])
def test_contexts_and_seeds(forward, example):
    class Net(Fn):
        def forward(self, x):
            return forward(self, x)

    module, other = (Net(None, lambda self: parametrizations.spectral_norm(self.c)) for _ in range(2))
    changed, _ = optimize(other, example)
    for _ in range(3):
        assert_same(changed, module, X)


def test_a_parametrized_weight_and_bias():
    module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.AvgPool2d(2)).double()
    for name in ("weight", "bias"):
        parametrize.register_parametrization(module[0], name, nn.Tanh())
    changed, report = optimize(module, X)
    assert report.summary.rewritten == 1
    assert_same(changed, nn.Sequential(*module), X)


def test_a_name_that_is_a_word_of_python_s():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleDict({"global": nn.Sequential(nn.Conv2d(3, 8, 3), nn.AvgPool2d(2)).double()})

        def forward(self, x):
            return self.parts["global"](x)

    module = Net()
    assert_same(optimize(module, X)[0], module, X)


def test_complex_numbers():
    module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(2)).to(torch.complex128)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = module

        def forward(self, x):
            return self.body(x).mean(-1)

    changed, _ = optimize(Net(), X.to(torch.complex128))
    assert_same(changed, Net(), X.to(torch.complex128))


@torch.no_grad()
def test_scaled_inputs():
    """A factor in front of a convolution, which no fused layer takes from PyTorch, costs only what else is in front of pairs."""

    def forward(self, x):
        return F.relu(pooled(self, 2 * x))

    module, (changed, report) = Fn(forward).eval(), optimize(Fn(forward).eval(), X)
    assert report.summary.rewritten == 1
    assert_same(changed, module, X)
