# SPDX-License-Identifier: Apache-2.0
"""A BatchNorm in front of a fused layer, in inference: part of the layer where weights are promised to be constant."""

from __future__ import annotations

import pytest

from tests.support.torch import require_torch

torch = require_torch()

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from convpool.torch import constant, constant_weights, normed, optimize  # noqa: E402
from models.torch_networks import DenseNet  # noqa: E402

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    """Pretend a GPU."""
    monkeypatch.setattr(normed, "_has_kernels", lambda x: True)


@pytest.fixture
def norms(monkeypatch):
    """How often a BatchNorm runs by itself."""
    calls, own = [], F.batch_norm
    monkeypatch.setattr(F, "batch_norm", lambda *args: calls.append(1) or own(*args))
    return calls


def transition(norm, *between, m=8, groups=1):
    torch.manual_seed(1)
    for name, tensor in (*norm.named_parameters(), *norm.named_buffers()):
        if tensor.is_floating_point():
            tensor.data.uniform_(0.5, 1.5) if name != "running_mean" else tensor.data.normal_()
    return nn.Sequential(norm, *between, nn.Conv2d(4, m, 3, padding=1, groups=groups), nn.AvgPool2d(2)).eval()


@pytest.mark.parametrize("between", [(), (nn.ReLU(),), (nn.ReLU(inplace=True),), (nn.LeakyReLU(0.1),)])
@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4, eps=0.5)], ids=["", "plain", "epsilon"]
)
@torch.no_grad()
def test_it_is_part_of_the_layer_under_the_promise(norms, norm, between):
    model = transition(norm, *between)
    expected = model(X)
    changed, report = optimize(model, X)
    assert [site.status for site in report.sites] == ["rewritten"]
    norms.clear()
    torch.testing.assert_close(changed(X), expected)
    assert len(norms) == 1
    with constant_weights():
        for _ in range(2):
            torch.testing.assert_close(changed(X), expected)
    assert len(norms) == 1


@torch.no_grad()
def test_weights_count_in_every_call_without_the_promise():
    changed, _ = optimize(transition(nn.BatchNorm2d(4), nn.ReLU()), X)
    for _ in range(3):
        changed[0].weight.mul_(-1.5)
        changed[0].running_var.mul_(2)
        torch.testing.assert_close(changed(X), changed[3](changed[2](F.relu(changed[0](X)))))
    with constant_weights():
        changed(X)
    changed[0].weight.mul_(2)
    with constant_weights():
        torch.testing.assert_close(changed(X), changed[3](changed[2](F.relu(changed[0](X)))))


@pytest.mark.parametrize("groups", [1, 2])
@torch.no_grad()
def test_numbers_that_the_type_does_not_hold(norms, groups):
    model = transition(nn.BatchNorm2d(4), groups=groups).half()
    model[0].running_var.fill_(6e-8)
    model[0].eps = 1e-12
    model[0].weight.fill_(20.0)  # 8e4 times X, whose type ends at 6.5e4
    model[0].running_mean.zero_()
    x = X.half() / 4096
    changed, report = optimize(model, x)
    norms.clear()
    with constant_weights():
        torch.testing.assert_close(changed(x), model(x), rtol=4e-3, atol=4e-3 * float(model(x).abs().max()))
    assert report.summary.rewritten == 1 and norms


@torch.no_grad()
def test_a_small_factor_of_another_group_is_lost(norms):
    """Beside a larger one of its own group it may be."""
    model = transition(nn.BatchNorm2d(4), groups=2).half()
    model[0].weight.copy_(torch.tensor([1.0, 1.0, 1e-7, 1e-7]))
    model[0].running_mean.zero_()
    changed, _ = optimize(model, X.half())
    norms.clear()
    with constant_weights():
        changed(X.half())
    assert norms
    alone = optimize(transition(nn.BatchNorm2d(4)).half(), X.half())[0]
    alone[0].weight.copy_(model[0].weight)
    alone[0].running_mean.zero_()
    norms.clear()
    with constant_weights():
        alone(X.half())
    assert not norms


class Read(nn.Module):
    """A BatchNorm that something else reads, or whose input is changed behind it."""

    def __init__(self, change):
        super().__init__()
        self.norm, self.conv, self.change = nn.BatchNorm2d(4), nn.Conv2d(4, 8, 3, padding=1), change

    def forward(self, x):
        x = x + 1
        z = self.norm(x)
        y = x.mul_(2) if self.change else z
        return F.avg_pool2d(self.conv(F.relu(z)), 2), y


def parametrized():
    model = transition(nn.BatchNorm2d(4), nn.ReLU())
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Softplus())
    return model


def hooked():
    model = transition(nn.BatchNorm2d(4), nn.ReLU())
    model[0].register_forward_hook(lambda module, args, y: y + 1)
    return model


@pytest.mark.parametrize(
    ("make", "pairs"),
    [
        (lambda: Read(False).eval(), 1),
        (lambda: Read(True).eval(), 1),
        (lambda: transition(nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU()), 1),
        (lambda: transition(nn.InstanceNorm2d(4, affine=True), nn.ReLU()), 1),
        (parametrized, 1),
        (hooked, 1),
    ],
    ids=["read twice", "changed behind", "own numbers", "another norm", "parametrized", "a hook"],
)
@torch.no_grad()
def test_norms_that_run_by_themselves(make, pairs):
    model = make()
    changed, report = optimize(model, X)
    assert report.summary.rewritten == pairs
    with constant_weights():
        torch.testing.assert_close(changed(X.clone()), model(X.clone()))
        assert not constant.current()


def test_training_is_as_without():
    model = transition(nn.BatchNorm2d(4), nn.ReLU()).train()
    changed, _ = optimize(model, X)
    with torch.no_grad(), constant_weights():
        model_y = nn.Sequential(*(module for module in model))(X)
        torch.testing.assert_close(changed(X), model_y)
    with constant_weights():
        changed.eval()(X).sum().backward()
    assert all(parameter.grad is not None for parameter in changed.parameters())


@torch.no_grad()
def test_torch_export_writes_both():
    changed, _ = optimize(transition(nn.BatchNorm2d(4), nn.ReLU()), X)
    with constant_weights():
        program = torch.export.export(changed, (X,))
        torch.testing.assert_close(program.module()(X), changed(X))


@torch.no_grad()
def test_transitions_of_a_densenet(norms):
    torch.manual_seed(0)
    model, x = DenseNet(8, (2, 3, 4, 2), 10).eval(), torch.randn(2, 3, 64, 64)
    expected, many = model(x), len(norms)
    changed, _ = optimize(model, x)
    norms.clear()
    with constant_weights():
        torch.testing.assert_close(changed(x), expected, rtol=1e-4, atol=1e-4)
    assert len(norms) == many - 3
