# SPDX-License-Identifier: Apache-2.0
"""Values forward reads besides stand-ins: attributes, tensors, generators.  Outputs as before."""

from __future__ import annotations

import copy
import enum
import random
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.torch import require_torch

torch = require_torch()

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from convpool.torch import optimize  # noqa: E402

X = torch.randn(2, 4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


class Fn(nn.Module):
    """A convolution, and a forward that is given it and one more attribute."""

    def __init__(self, forward, **own):
        super().__init__()
        torch.manual_seed(0)
        self.c, self.forward_of = nn.Conv2d(4, 8, 3, padding=1, dtype=torch.float64), forward
        for name, value in own.items():
            setattr(self, name, value)

    def forward(self, *args):
        return self.forward_of(self, *args)


def pooled(self, x):
    return F.avg_pool2d(self.c(x), 2)


def assert_same(changed, module, *args):
    torch.testing.assert_close(changed(*args), module(*args), rtol=1e-10, atol=1e-10)


def refused(make, words, *args):
    """The module is left as it is for a reason with these words, also in three calls; of both modules what optimize left."""
    module, (changed, report) = make(), optimize(make(), args, inplace=True)
    assert any(words in (site.reason or "") for site in report.sites), [site.reason for site in report.sites]
    for _ in range(3):
        assert_same(changed, module, *args)


class Counter:
    """An object that is no module."""

    def __init__(self):
        self.n = 0

    def count(self):
        self.n += 1
        return self.n


@pytest.mark.parametrize(
    ("value", "forward", "change"),
    [
        (0.5, lambda self, x: pooled(self, x) * self._own, lambda m: setattr(m, "_own", 0.7)),
        (torch.tanh, lambda self, x: self._own(pooled(self, x)), lambda m: setattr(m, "_own", torch.sigmoid)),
        ([0.5], lambda self, x: pooled(self, x) * self._own[0], lambda m: m._own.__setitem__(0, 0.7)),
        ([0.5], lambda self, x: pooled(self, x) * self._own[0], lambda m: setattr(m, "_own", [0.7])),
        ({"a": {"b": 0.5}}, lambda self, x: pooled(self, x) * self._own["a"]["b"], lambda m: m._own["a"].update(b=0.7)),
        (SimpleNamespace(a=0.5), lambda self, x: pooled(self, x) * self._own.a, lambda m: setattr(m._own, "a", 0.7)),
        (torch.float64, lambda self, x: pooled(self, x).to(self._own), lambda m: setattr(m, "_own", torch.float32)),
        (np.ones(2), lambda self, x: pooled(self, x) * float(self._own[0]), lambda m: m._own.fill(0.7)),
    ],
    ids=["private", "function", "list", "another list", "dictionary", "object", "type", "array"],
)
def test_attributes_of_every_kind(value, forward, change):
    module, (changed, report) = Fn(forward, _own=copy.deepcopy(value)), optimize(Fn(forward, _own=value), X)
    assert report.summary.rewritten == 1
    compiled = torch.compile(changed, backend="eager")
    for call in (changed, compiled):
        assert_same(call, module, X)
    for item in (module, changed):
        change(item)
    for call in (compiled, changed, compiled):
        assert_same(call, module, X)


def test_a_constant_of_the_class():
    class Scaled(Fn):
        factor = 0.5

    def forward(self, x):
        return pooled(self, x) * self.factor

    module, (changed, _) = Scaled(forward), optimize(Scaled(forward), X)
    for factor in (0.5, 0.7):
        Scaled.factor = factor
        assert_same(changed, module, X)


def test_a_list_that_always_changes():
    """Then the original forward runs."""

    def forward(self, x):
        return pooled(self, x) * self.scales[0]

    module, (changed, _) = Fn(forward, scales=[0.0]), optimize(Fn(forward, scales=[0.0]), X)
    for step in range(70):
        module.scales[0] = changed.scales[0] = step
        assert_same(changed, module, X)
    assert changed._convpool_region.starts == 64


def test_an_object_that_forward_changes():
    refused(
        lambda: Fn(lambda self, x: pooled(self, x) * self.counter.count(), counter=Counter()),
        "attributes that forward assigns; got what is in an attribute",
        X,
    )


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: random.Random(0), lambda g: g.random()),
        (lambda: np.random.default_rng(0), lambda g: g.random()),
        (lambda: torch.Generator().manual_seed(0), lambda g: torch.rand((), generator=g).item()),
    ],
    ids=["Python", "numpy", "PyTorch"],
)
def test_a_generator_of_its_own(make, draw):
    refused(lambda: Fn(lambda self, x: pooled(self, x) * draw(self.own), own=make()), "random numbers in forward", X)


def test_the_type_of_the_parameters():
    """Models that cast their inputs read it as `self.dtype`."""

    def forward(self, x):
        return pooled(self, x.to(next(self.parameters()).dtype)).double()

    module, (changed, report) = Fn(forward), optimize(Fn(forward), X)
    assert report.summary.rewritten == 1
    compiled = torch.compile(changed, backend="eager")
    for call in (changed, compiled):
        assert_same(call, module, X)
    for item in (module, changed):
        item.float()
    for call in (compiled, changed):
        torch.testing.assert_close(call(X), module(X), rtol=1e-5, atol=1e-5)


def by_channel(self, x):
    y = pooled(self, x)
    return (y / y.shape[1] * self.c.weight.shape[0] ** 2).reshape(x.shape[0], -1)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_pruned_weight(in_place):
    """Parameters of other sizes, which forward uses."""
    module, (changed, report) = Fn(by_channel), optimize(Fn(by_channel), X)
    assert report.summary.rewritten == 1
    compiled = torch.compile(changed, backend="eager")
    for call in (changed, compiled):
        assert_same(call, module, X)
    for conv in (module.c, changed.c):
        for name, parameter in [*conv.named_parameters()]:
            kept = parameter.data[:6].clone()
            if in_place:
                parameter.data = kept
            else:
                setattr(conv, name, nn.Parameter(kept))
    for call in (changed, compiled):
        assert_same(call, module, X)


FEATURES = []


def recorded(self, x):
    FEATURES.append(self.c(x))
    return F.avg_pool2d(FEATURES[-1], 2)


def test_values_that_forward_keeps():
    """In a list that is no attribute.  Optimize calls forward once for the arguments of its submodules."""
    refused(lambda: Fn(recorded), "values that forward keeps", X)
    assert len(FEATURES) == 1 + 6 and all(isinstance(value, torch.Tensor) for value in FEATURES)


def test_text_that_forward_prints(capsys):
    refused(lambda: Fn(lambda self, x: (print("called"), pooled(self, x))[1]), "text that forward prints", X)
    assert capsys.readouterr().out == "called\n" * (1 + 6)


def clipped(self, x):
    for parameter in self.parameters():
        parameter.data.mul_(0.5)
    return pooled(self, x)


def counted(self, x):
    self.own.add_(1)
    return pooled(self, x) * self.own


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda self, x: pooled(self, x) * self.own.item(), "numbers of tensors in forward; got item"),
        (
            lambda self, x: pooled(self, x) * float([*self.parameters()][0][0, 0, 0, 0]),
            "numbers of tensors in forward; got __float__",
        ),
        (counted, "tensors that forward changes; got one by add_"),
    ],
)
def test_real_tensors(forward, words):
    refused(lambda: Fn(forward, own=torch.tensor(2.0)), words, X)


def test_parameters_that_forward_changes_are_changed_by_calls_alone():
    module, changed = Fn(clipped), optimize(Fn(clipped))[0]
    for _ in range(3):
        assert_same(changed, module, X)


def test_tensors_that_forward_makes_of_numbers_may_be_asked():
    module = Fn(lambda self, x: pooled(self, x) * torch.linspace(0, 1, 4).tolist()[2])
    changed, report = optimize(module, X)
    assert report.summary.rewritten == 1
    assert_same(changed, module, X)


class Kind(enum.IntEnum):
    """A number with a name."""

    TWO = 2


def test_numbers_of_other_classes():
    """numpy's, as schedules give them, and one whose text is no Python."""

    def forward(self, x):
        return pooled(self, x) * self.own

    module, (changed, report) = Fn(forward, own=np.float64(0.5)), optimize(Fn(forward, own=np.float64(0.5)), X)
    assert report.summary.rewritten == 1
    for factor in np.linspace(0, 1, 3):
        module.own = changed.own = factor
        assert_same(changed, module, X)
    refused(lambda: Fn(forward, own=Kind.TWO), "number or word in forward; got one of class Kind, expected Python's own", X)


def set_data(self, x):
    self.c.weight.data = self.c.weight.data / self.c.weight.data.norm()
    return pooled(self, x)


def set_requires_grad(self, x):
    y = pooled(self, x)
    y.requires_grad = True
    return y


def asked_for_its_function(self, x):
    y = pooled(self, x)
    return y if y.grad_fn is None else 2 * y


def caught_number(self, x):
    y = pooled(self, x)
    try:
        return y * int(y.sum().abs() + 2)
    except TypeError:
        return y


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (set_data, "attributes of tensors that forward sets; got data"),
        (set_requires_grad, "attributes of tensors that forward sets; got requires_grad"),
        (asked_for_its_function, "state of a tensor that forward asks for; got grad_fn"),
        (caught_number, "a question for a value"),
    ],
)
def test_what_stand_ins_would_drop(forward, words):
    with torch.no_grad():
        refused(lambda: Fn(forward), words, X)


def test_a_weight_that_forward_changes_is_as_it_was():
    """The run for the submodules' arguments changes nothing."""

    def forward(self, x):
        for parameter in self.parameters():
            parameter.data = parameter.data * 0.5
        self.own.data.mul_(2)
        return pooled(self, x)

    module = Fn(forward, own=nn.Parameter(torch.ones(3)))
    before = {name: (p, p.data_ptr(), p.detach().clone()) for name, p in module.named_parameters()}
    changed, _ = optimize(module, X)
    for name, p in changed.named_parameters():
        same, place, numbers = before[name]
        assert p is same and p.data_ptr() == place and torch.equal(p, numbers)


def aliased(self, x):
    y = pooled(self, x)
    z = y
    y += 1
    z *= 2
    return z, y


def weight_s_own_data(self, x):
    w = self.c.weight.data
    w /= w.norm()
    return pooled(self, x)


def a_whole_number(self, x):
    n = x.shape[1]
    n *= 2
    return pooled(self, x) * n


@pytest.mark.parametrize(("forward", "pairs"), [(aliased, 1), (weight_s_own_data, 0), (a_whole_number, 1)])
def test_assignments_with_an_operator(forward, pairs):
    """They change a tensor in place, under all its names; of numbers they make new ones."""
    module, (changed, report) = Fn(forward), optimize(Fn(forward), X)
    assert report.summary.rewritten == pairs, [site.reason for site in report.sites]
    for _ in range(2):
        for got, expected in zip(changed(X), module(X), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(changed.c.weight, module.c.weight)


def test_slopes_are_those_of_the_module():
    """ONNX has them in float32."""

    def forward(self, x):
        return F.leaky_relu(pooled(self, F.leaky_relu(x, 0.7)), 0.3)

    module, (changed, report) = Fn(forward), optimize(Fn(forward), X)
    assert report.summary.rewritten == 1
    with torch.no_grad():
        torch.testing.assert_close(changed(X), module(X), rtol=1e-13, atol=1e-13)


def test_memory_orders_that_forward_asks_for():
    """The result lies in memory as the original's, for a view."""

    def forward(self, x):
        return F.avg_pool2d(self.c(x).contiguous(), 2).view(x.shape[0], -1)

    module, (changed, _) = Fn(forward), optimize(Fn(forward), X)
    assert_same(changed, module, X.contiguous(memory_format=torch.channels_last))
