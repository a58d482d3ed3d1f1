# SPDX-License-Identifier: Apache-2.0
"""Modules that `convpool.torch.optimize` must leave alone, in whole or in part: outputs equal, and the reason is told."""

from __future__ import annotations

import copy
import pickle
import random

import pytest

from convpool.errors import OptionError
from tests.support.torch import require_torch

torch = require_torch()

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from convpool.torch import ConvAvgPool2d, optimize  # noqa: E402
from convpool.torch.rewrite.capture import capture  # noqa: E402

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


def conv(c=4, m=8):
    return nn.Conv2d(c, m, 3, padding=1)


def pair(*between):
    return nn.Sequential(conv(), *between, nn.AvgPool2d(2))


class Fn(nn.Module):
    """A convolution, and a forward that is given it."""

    def __init__(self, forward):
        super().__init__()
        self.c, self.count, self._forward = conv(), 0, forward

    def forward(self, x):
        return self._forward(self, x)


def reasons(report):
    return [site.reason or "" for site in report.sites]


def assert_same(module, changed, *args, **kwargs):
    """Both give the same from the same state; the convolution's sums are of fewer than 100 numbers around 1."""
    results = []
    for item in (copy.deepcopy(module), changed):
        torch.manual_seed(3)
        random.seed(3)
        results.append(item(*args, **kwargs))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def refused(module, words, mode=False, x=X):
    """The module with no pair rewritten, for a reason with these words, and the same outputs."""
    torch.manual_seed(5)
    module.train(mode)
    changed, report = optimize(module, x)
    assert report.summary.rewritten == 0
    assert any(words in reason for reason in reasons(report)), reasons(report)
    assert_same(module, changed, x)
    return changed, report


def note(*args):
    return None


def test_a_hook_on_the_convolution():
    module = pair()
    module[0].register_forward_hook(note)
    refused(module, "Conv '0': hooks of the module; got note, expected none")


def test_a_hook_on_the_pooling():
    module = pair()
    module[1].register_forward_pre_hook(note)
    refused(module, "AveragePool '1': hooks of the module; got note, expected none")


def test_a_backward_hook_on_a_module_between():
    module = pair(nn.Identity())
    module[1].register_full_backward_hook(note)
    refused(module, "hooks of the module; got note, expected none")


def test_a_hook_on_a_container_sees_its_call_and_its_inside_is_rewritten():
    module = nn.Sequential(pair(), nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.AvgPool2d(2)))
    seen = []
    module[0].register_forward_hook(lambda m, args, result: seen.append(tuple(result.shape)))
    module.eval()
    changed, report = optimize(module, X)
    assert [(site.conv, site.pool, site.status) for site in report.sites] == [
        ("0.0", "0.1", "rewritten"),
        ("1.0", "1.1", "rewritten"),
    ]
    assert not seen  # nothing of a plan's making is seen
    changed(X)
    assert seen == [(2, 8, 4, 4)]
    assert_same(module, changed, X)


def test_a_hook_that_comes_later_is_called_once_a_call():
    changed, report = optimize(pair(), X)
    assert report.summary.rewritten == 1
    seen = []
    handle = changed[0].register_forward_hook(lambda m, args, result: seen.append(tuple(result.shape)))
    changed(X)
    assert seen == [(2, 8, 8, 8)]
    handle.remove()
    changed(X)
    assert len(seen) == 1


def test_a_convolution_beside_pairs_has_its_derivatives_and_hooks():
    module = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding="same"), *pair())
    changed, _ = optimize(module, X)
    assert "convolved" in code_of(changed, X) and "pooled_conv" in code_of(changed, X)
    x = X.clone().requires_grad_()
    grads = [torch.autograd.grad(item(x).square().sum(), [x, *module.parameters()]) for item in (module, changed)]
    for expected, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    seen = []
    changed[0].register_forward_hook(lambda m, args, result: seen.append(tuple(result.shape)))
    assert_same(module, changed, X)
    assert seen == [(2, 4, 8, 8)]
    with torch.no_grad():
        assert "convolved" not in code_of(changed, X)


def test_a_module_that_takes_another_ones_place_runs():
    changed, _ = optimize(pair(), X)
    changed[0] = conv()
    assert_same(nn.Sequential(*copy.deepcopy([*changed])), changed, X)
    changed.eval()
    changed[1] = nn.MaxPool2d(2)
    assert_same(nn.Sequential(*copy.deepcopy([*changed])), changed, X)


def test_a_shared_convolution_is_rewritten_where_it_pays_for_each_call():
    shared = nn.Conv2d(16, 16, 3, padding=1)
    module = nn.Sequential(shared, nn.AvgPool2d(2), nn.ReLU(), shared, nn.AvgPool2d(2))
    x = torch.randn(2, 16, 16, 16)
    changed, report = optimize(module, x)
    assert [site.conv for site in report.sites if site.status == "rewritten"] == ["0", "0 2"]
    assert changed[0] is changed[3]
    assert_same(module, changed, x)


def test_an_output_that_is_read_twice():
    refused(Fn(lambda self, x: (lambda h: (F.avg_pool2d(h, 2), h.mean()))(self.c(x))), "output 'c' has 2 readers")


def test_an_output_that_the_module_gives():
    refused(Fn(lambda self, x: (lambda h: (F.avg_pool2d(h, 2), h))(self.c(x))), "output 'c' is a graph output")


def under_no_grad(self, x):
    with torch.no_grad():
        h = self.c(x)
    return F.avg_pool2d(h, 2)


def under_autocast(self, x):
    with torch.autocast("cpu", enabled=False):
        h = self.c(x)
    return F.avg_pool2d(h, 2)


@pytest.mark.parametrize(("forward", "words"), [(under_no_grad, "torch.no_grad"), (under_autocast, "torch.autocast")])
def test_a_context_in_forward(forward, words):
    module = Fn(forward)
    changed, _ = refused(module, f"Conv 'c': context in forward; got {words}")
    assert changed(X).requires_grad == module(X).requires_grad


@pytest.mark.parametrize(
    ("ask", "context"),
    [
        (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.autocast("cpu", torch.bfloat16)),
        (lambda: torch.get_autocast_dtype("cpu") == torch.float16, lambda: torch.autocast("cpu", torch.float16)),
        (lambda: torch.is_inference_mode_enabled(), torch.inference_mode),
    ],
    ids=["autocast", "type of autocast", "inference mode"],
)
def test_a_state_that_forward_asks_for(ask, context):
    module = Fn(lambda self, x: F.avg_pool2d(self.c(x), 2) * (3 if ask() else 1))
    changed, _ = refused(module, "Conv 'c': state that forward asks for; got torch.")
    with context():
        torch.testing.assert_close(changed(X), module(X), rtol=0, atol=0)


def test_frozen_weights_are_rewritten_and_stay_frozen():
    module = pair()
    module[0].requires_grad_(False)
    changed, report = optimize(module, X)
    assert report.summary.rewritten == 1
    assert not changed(X).requires_grad
    assert_same(module, changed, X)


@pytest.mark.parametrize("between", [nn.Dropout(0.5), nn.Dropout2d(0.5)])
def test_dropout_between_in_training(between):
    changed, _ = refused(pair(between), "Dropout '1': training_mode; got (1,), expected false", mode=True)
    changed.eval()  # of this mode the module has a plan of its own
    assert "pooled_conv" in code_of(changed, X)


def test_batch_norm_between_in_training():
    module = pair(nn.BatchNorm2d(8))
    changed, _ = refused(module, "BatchNormalization '1': form; got training, expected inference", mode=True)
    changed.eval()
    assert "pooled_conv" in code_of(changed, X)
    assert_same(module.eval(), changed, X)


def code_of(changed, *args):
    """The names that the function of a call's plan uses."""
    run = changed._convpool_region.find(changed, args, {})
    return " ".join(run.__code__.co_names) if run is not None else ""


def test_a_quantized_convolution():
    qat = pytest.importorskip("torch.ao.quantization")
    module = nn.Sequential(qat.QuantStub(), conv(), qat.DeQuantStub(), nn.AvgPool2d(2)).train()
    module.qconfig = qat.get_default_qat_qconfig("fbgemm")
    prepared = qat.prepare_qat(module)
    prepared(X)
    refused(prepared, "Conv '1': module; got torch.ao.nn.qat", mode=False)


def data_dependent(self, x):
    h = self.c(x)
    return F.avg_pool2d(h if h.sum() > 0 else -h, 2)


def test_flow_that_depends_on_data_leaves_the_rest_working():
    module = nn.Sequential()
    module.inner = pair()
    module.outer = Fn(data_dependent)
    module.outer.c = nn.Conv2d(8, 8, 3, padding=1)
    changed, report = optimize(module, X)
    assert {site.conv: site.status for site in report.sites} == {"inner.0": "rewritten", "outer.c": "rejected"}
    assert "forward of 'outer': flow of forward" in report.sites[1].reason
    assert_same(module, changed, X)


def changed_between(self, x):
    x = x * 1
    h = self.c(x)
    x.mul_(3)
    return F.avg_pool2d(h, 2).sum() + x.sum()


def changed_through_a_view(self, x):
    x = x * 1
    h = self.c(x)
    x.view(-1)[:5].zero_()
    return F.avg_pool2d(h, 2).sum() + x.sum()


@pytest.mark.parametrize("forward", [changed_between, changed_through_a_view])
def test_a_tensor_that_is_changed_between(forward):
    refused(Fn(forward), "Conv 'c': tensor changed in place")


def weight_changed_between(self, x):
    h = self.c(x)
    self.c.weight.data.mul_(0.5)
    return F.avg_pool2d(h, 2)


def test_a_weight_that_is_changed_between():
    module = Fn(weight_changed_between)
    changed, report = optimize(module, X)
    assert report.summary.rewritten == 0
    first = copy.deepcopy(module)
    torch.testing.assert_close(changed(X), first(X), rtol=1e-5, atol=1e-5)


class Halved(torch.autograd.Function):
    """Half of its input, in place."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


def changed_by_a_function(self, x):
    x = x * 1
    h = self.c(x)
    return Halved.apply(x).sum() + F.avg_pool2d(h, 2)


def test_a_tensor_that_a_function_changes():
    refused(Fn(changed_by_a_function), "tensors that forward changes; got one by Halved")


def test_activations_in_place_keep_no_pair():
    for module in (
        nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(inplace=True), *pair()),
        nn.Sequential(nn.BatchNorm2d(4), nn.Identity(), nn.ReLU(inplace=True), *pair()),
        nn.Sequential(nn.ReLU(inplace=True), *pair()),
    ):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                changed, report = optimize(module.eval(), X)
                assert report.summary.rewritten == 1
                results, inputs = [], []
                for item in (module, changed):
                    inputs.append(X.clone())
                    results.append(item(inputs[-1]))
                torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(*inputs, rtol=0, atol=0)  # what the caller sees changed is the same


def counting(self, x):
    self.count += 1
    self.last = self.c(x)
    return F.avg_pool2d(self.last, 2)


def test_a_forward_that_keeps_something():
    changed, _ = refused(Fn(counting), "attributes that forward assigns; got")
    assert changed.count == 1 and changed.last.shape == (2, 8, 8, 8)


def lucky(self, x):
    return F.avg_pool2d(self.c(x * 2 if random.random() < 0.5 else x), 2)


def noisy(self, x):
    return F.avg_pool2d(self.c(x + torch.randn(8)), 2)


@pytest.mark.parametrize(("forward", "words"), [(lucky, "random numbers in forward"), (noisy, "tensors that forward makes")])
def test_random_numbers(forward, words):
    refused(Fn(forward), words)


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is reversed."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


def test_an_autograd_function_keeps_its_backward():
    module = Fn(lambda self, x: F.avg_pool2d(self.c(Reversed.apply(x)), 2))
    changed, report = optimize(module, X)
    assert report.summary.rewritten == 1
    x = X.clone().requires_grad_()
    grads = [torch.autograd.grad(item(x).sum(), x)[0] for item in (module, changed)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


class Options(nn.Module):
    """Arguments beside a tensor."""

    def __init__(self):
        super().__init__()
        self.c = conv()

    def forward(self, x, y=None, *, flag=True, pieces=()):
        h = F.avg_pool2d(self.c(x), 2)
        h = h if y is None else h + y
        for piece in pieces:
            h = h * piece
        return h if flag else -h


def test_every_way_of_calling():
    module, y = Options(), torch.ones(1)
    changed, _ = optimize(module, X)
    for args, kwargs in (
        ((X,), {}),
        ((X, y), {}),
        ((X,), {"y": y, "flag": False}),
        ((), {"x": X}),
        ((X,), {"pieces": (y, 2 * y)}),
        ((X[:1],), {}),
        ((X[:, :, :6],), {}),
        ((X[0],), {}),
        ((X.contiguous(memory_format=torch.channels_last),), {}),
    ):
        assert_same(module, changed, *args, **kwargs)


def test_a_forward_of_the_instance_a_script_and_no_batch():
    module = pair()
    module.forward = lambda x: 2 * x
    refused(module, "forward; got an attribute of the module, expected a method of its class")
    changed, report = optimize(nn.Sequential(torch.jit.script(pair())), X)
    assert not report.sites and changed(X).shape == (2, 8, 4, 4)
    refused(pair(), "expected 4 channels and rank 4", x=X[0])


def test_without_an_example_all_sizes_run():
    module = pair()
    changed, report = optimize(module)
    assert [site.status for site in report.sites] == ["rewritten"]
    for x in (X, X[:, :, :7, :5], X[0]):
        assert_same(module, changed, x)


def test_copies_and_pickles_are_rewritten_too():
    changed, _ = optimize(nn.ModuleDict({"a": Options()})["a"], X)
    for again in (copy.deepcopy(changed), pickle.loads(pickle.dumps(changed))):
        assert_same(changed, again, X)
        assert "pooled_conv" in code_of(again, X)
    assert isinstance(changed, Options) and type(changed).__name__ == "Options"


def test_the_original_is_left_alone_unless_it_may_change():
    module = pair()
    changed, _ = optimize(module, X)
    assert type(module) is nn.Sequential and "_convpool_region" not in module.__dict__
    same, _ = optimize(module, X, inplace=True)
    assert same is module and "pooled_conv" in code_of(same, X)


def test_a_pair_is_excluded_by_name():
    _, report = optimize(nn.Sequential(pair(), nn.Conv2d(8, 8, 3, padding=1), nn.AvgPool2d(2)), X, exclude="0.*")
    assert {site.conv: site.status for site in report.sites} == {"0.0": "excluded", "1": "rewritten"}


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((3,), {}, "got int, expected"),
        ((nn.Identity(), 3), {}, "got int, expected"),
        ((nn.Identity(), X), {"exclude": None}, "exclude: got None, expected"),
        ((pair(), (2, 4, 8, 8)), {}, r"too many positional arguments; got \(int, int, int, int\), expected arguments of forward"),
        ((pair(), {"x": X}), {}, r"missing a required argument: 'input'; got \(x=\), expected"),
    ],
)
def test_arguments_of_wrong_types(arguments, options, words):
    with pytest.raises(OptionError, match=words):
        optimize(*arguments, **options)


def test_a_pattern_that_matches_no_name_is_told():
    _, report = optimize(pair(), X, exclude=["0", "first.*"])
    assert report.warnings == ["exclude: 'first.*' matches no convolution, pooling or Concat here"]


@pytest.mark.parametrize("x", [X[0, 0], X[None]])
@pytest.mark.parametrize("make", [lambda: optimize(pair(), X)[0], lambda: ConvAvgPool2d(4, 8, 3, padding=1, pool_size=2)])
def test_inputs_with_a_wrong_number_of_dimensions(make, x):
    with pytest.raises((OptionError, RuntimeError), match="number of dimensions; got|Expected 3D .* or 4D"):
        make()(x)


def test_capturing_leaves_no_trace():
    module = Fn(counting)
    before = dict(module.__dict__)
    capture(module, (X,), {}, Fn.forward)
    assert module.__dict__ == before and type(module) is Fn
    assert torch.autograd.Function.apply.__func__ is not None and torch.no_grad.__enter__.__name__ == "__enter__"
