# SPDX-License-Identifier: Apache-2.0
"""Changes between calls of an optimized module, and reads of forward: outputs as before."""

from __future__ import annotations

import copy
import pickle
import threading
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest

from tests.support.torch import require_torch

torch = require_torch()

from torch import nn  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from convpool.torch import optimize  # noqa: E402
from convpool.torch.rewrite import branches  # noqa: E402


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


X = randn(2, 4, 8, 8)


class Named(NamedTuple):
    """A result with a name."""

    y: Any


class Fn(nn.Module):
    """A convolution, a number, a counter, and a forward that is given them."""

    def __init__(self, forward):
        super().__init__()
        torch.manual_seed(0)
        self.c, self._forward, self.alpha = nn.Conv2d(4, 8, 3, padding=1, dtype=torch.float64), forward, 0.5
        self.skip, self.act = nn.Conv2d(4, 8, 1, dtype=torch.float64), None
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, *args):
        return self._forward(self, *args)


def pair():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.LeakyReLU(0.1), nn.Conv2d(8, 8, 3, padding=1), nn.AvgPool2d(2)
    ).double()


def assert_same(changed, module, *args):
    torch.testing.assert_close(changed(*args), module(*args), rtol=1e-10, atol=1e-10)


def optimized(module, *args, pairs=1):
    changed, report = optimize(copy.deepcopy(module), args)
    assert report.summary.rewritten == pairs, [site.reason for site in report.sites]
    return changed


def fade(self, x):
    return self.alpha * F.avg_pool2d(self.c(x), 2) + (1 - self.alpha) * self.skip(F.avg_pool2d(x, 2))


def test_a_number_that_fades_in():
    """Progressive growing does so.  Too many values are the original's."""
    module, changed = Fn(fade), optimized(Fn(fade), X)
    for step in range(80):
        module.alpha = changed.alpha = step / 80
        assert_same(changed, module, X)
    assert len(changed._convpool_region.plans) <= 64
    del changed.alpha, module.alpha
    for item in (changed, module):
        with pytest.raises(AttributeError, match="alpha"):
            item(X)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m[2], "stride", (2, 2)),
        lambda m: setattr(m[1], "negative_slope", 0.7),
        lambda m: setattr(m[2], "padding_mode", "circular"),
        lambda m: setattr(m[3], "kernel_size", 3),
        lambda m: setattr(m[2], "forward", torch.zeros_like),
        lambda m: setattr(m[2], "_conv_forward", lambda x, weight, bias: F.conv2d(x.roll(1), weight, bias, padding=1)),
        lambda m: m.append(nn.Tanh()),
        lambda m: m.insert(2, nn.Tanh()),
        lambda m: m.__delitem__(1),
    ],
    ids=["stride", "slope", "padding mode", "window", "forward of an instance", "its convolution", "append", "insert", "delete"],
)
@pytest.mark.parametrize("grad", [True, False])
def test_a_module_that_is_changed(change, grad):
    module, changed = pair(), optimized(pair(), X)
    with torch.set_grad_enabled(grad):
        assert_same(changed, module, X)
        for item in (module, changed):
            change(item)
        assert_same(changed, module, X)


def test_sizes_after_an_attribute_has_changed():
    """The adaptive pooling's window is another one then."""
    module = nn.Sequential(nn.AvgPool2d(1), *pair()[:3], nn.AdaptiveAvgPool2d(4))
    changed = optimized(module, X)
    for item in (module, changed):
        item[0].kernel_size = item[0].stride = 2
    assert_same(changed, module, X)


def test_a_module_that_comes_where_none_was():
    def forward(self, x):
        h = F.avg_pool2d(self.c(x), 2)
        return h if self.act is None else self.act(h)

    for registered in (False, True):
        module = Fn(forward)
        if registered:
            del module.act
            module.register_module("act", None)
        changed = optimized(module, X)
        for item in (module, changed):
            item.act = nn.Tanh()
        assert_same(changed, module, X)


def test_a_module_whose_sizes_are_others_in_another_one_s_place():
    def forward(self, x):
        h = F.avg_pool2d(self.c(x), 2)
        return h.view(x.size(0), h.size(1), -1) * h.size(1)

    module, changed = Fn(forward), optimized(Fn(forward), X)
    module.c = changed.c = nn.Conv2d(4, 16, 3, padding=1, dtype=torch.float64)
    assert_same(changed, module, X)


ROWS = torch.tensor(2.0).double(), randn(8), randn(1, 1), randn(1, 8), randn(2, 8)


@pytest.mark.parametrize(
    ("forward", "given"),
    [
        (lambda self, x, y: F.avg_pool2d(self.c(x) * y, 2), ROWS[:3]),
        (lambda self, x, y: (F.avg_pool2d(self.c(x), 2) * y.mean()).view(x.size(0), -1), ROWS),
        (lambda self, x, y: F.avg_pool2d(self.c(x), 2) + y.view(y.size(0), 8, 1, 1), ROWS[3:]),
    ],
    ids=["product", "the first one's batch", "the second one's batch"],
)
def test_inputs_with_other_batches(forward, given):
    """A second input without a batch, with one sample, and with as many as the first."""
    for first in given:
        module = Fn(forward)
        changed, report = optimize(copy.deepcopy(module), (X, first))
        assert report.summary.rewritten == 1 or first.dim()
        for y in given:
            assert_same(changed, module, X, y)
            if y.dim() < 2 or len(y) == 1:
                assert_same(changed, module, randn(6, 4, 8, 8), y)


@pytest.mark.parametrize("first", [True, False])
def test_an_input_without_a_batch_in_front(first):
    def forward(self, y, x):
        return (F.avg_pool2d(self.c(x), 2) * y).view(x.shape[0], -1)

    module, changed = Fn(forward), optimized(Fn(forward), torch.tensor(2.0).double(), X)
    assert_same(changed, module, torch.tensor(3.0).double(), X if first else randn(5, 4, 8, 8))


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: F.avg_pool2d(self.c(x), 2) * (1 if isinstance(x, torch.Tensor) else 2),
        lambda self, x: F.avg_pool2d(self.c(torch.cat(x, 1) if isinstance(x, (list, tuple)) else x), 2),
        lambda self, x: F.avg_pool2d(self.c(x), 2) * (1 if torch.is_tensor(x) else 2),
        lambda self, x: F.avg_pool2d(self.c(x), 2) * (1 if torch.is_grad_enabled() else 2),
    ],
    ids=["isinstance", "a list or not", "is_tensor", "is_grad_enabled"],
)
def test_what_forward_asks(forward):
    module, changed = Fn(forward), optimized(Fn(forward), X)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert_same(changed, module, X)


def test_a_type_that_nobody_knows():
    module = Fn(lambda self, x: (lambda h: F.avg_pool2d(h, 2) * (1 if isinstance(h, torch.Tensor) else 2))(self.c(x)))
    changed, report = optimize(module, X)
    assert ["type that forward asks for; got that of c, expected that of an input" in site.reason for site in report.sites] == [
        True
    ]
    assert_same(changed, module, X)


@pytest.mark.parametrize("flows", [True, False])
def test_numbers_in_buffers_stay(flows):
    def forward(self, x):
        self.count += 1
        h = self.c(x)
        h = h * self.count if flows or h.sum() > 0 else h
        return F.avg_pool2d(h, 2)

    module = Fn(forward)
    changed, _ = optimize(copy.deepcopy(module), X)
    assert changed.count == 0
    for _ in range(3):
        assert_same(changed, module, X)
    assert changed.count == module.count == 3


class Locked(nn.Sequential):
    """A module that holds what a pickle cannot."""

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "lock"}


def test_a_state_of_its_own():
    module = Locked(*pair())
    module.lock = threading.Lock()
    changed, _ = optimize(module, X, inplace=True)
    again = pickle.loads(pickle.dumps(changed))
    assert type(again).__name__ == "Locked" and not hasattr(again, "lock")
    assert_same(again, changed, X)


@pytest.mark.parametrize("grad", [True, False])
def test_forward_mode(grad):
    tangents = []
    for module in (pair(), optimized(pair(), X)):
        with torch.set_grad_enabled(grad), forward_ad.dual_level():
            tangents.append(forward_ad.unpack_dual(module(forward_ad.make_dual(X, torch.cos(X)))).tangent)
    torch.testing.assert_close(*tangents, rtol=1e-10, atol=1e-10)


def test_tensors_without_numbers():
    changed = optimized(pair(), X)
    assert changed.to("meta")(X.to("meta")).shape == (2, 8, 4, 4)


@pytest.mark.parametrize("normalize", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm], ids=["old", "new"])
def test_a_normalised_weight_is_computed_in_every_call(normalize):
    """Each moves the vectors of spectral normalisation on."""

    def make():
        torch.manual_seed(3)
        shared = normalize(nn.Conv2d(16, 16, 3, padding=1, dtype=torch.float64))
        return nn.Sequential(shared, nn.AvgPool2d(2), nn.Tanh(), shared, nn.AvgPool2d(2))

    x = randn(2, 16, 32, 32)
    module, (changed, report) = make(), optimize(make(), x)
    assert report.summary.rewritten == 2
    for _ in range(2):
        assert_same(changed, module, x)


def test_a_hook_of_all_modules_sees_each():
    changed, seen = optimized(pair(), X), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, y: seen.append(type(module).__name__))
    try:
        changed(X)
    finally:
        handle.remove()
    assert seen == ["Conv2d", "LeakyReLU", "Conv2d", "AvgPool2d", "Sequential"]


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
def test_a_first_call_inside_a_transform(transform):
    module, changed = pair(), optimize(pair())[0]
    calls = {
        "grad": lambda m: torch.func.grad(lambda x: m(x).square().sum())(X),
        "jvp": lambda m: torch.func.jvp(m, (X,), (torch.cos(X),)),
        "vmap": lambda m: torch.vmap(m)(X[None]),
    }
    torch.testing.assert_close(calls[transform](changed), calls[transform](module), rtol=1e-10, atol=1e-10)


def test_a_shared_weight_is_computed_on_one_branch(monkeypatch):
    """Two branches of a CUDA graph would write its vectors at the same time."""
    seen = []
    monkeypatch.setattr(branches, "begin", lambda x, module, name, branch: seen.append((module, branch)))
    torch.manual_seed(3)
    shared, other = (nn.utils.parametrizations.spectral_norm(nn.Conv2d(16, 16, 3, padding=1)).double() for _ in range(2))
    x = randn(2, 16, 32, 32)
    optimize(nn.Sequential(shared, nn.AvgPool2d(2), other, nn.AvgPool2d(2), shared), x, inplace=True)[0](x)
    assert [(module is shared, branch) for module, branch in seen] == [(True, 0), (False, 1), (True, 0)]


def test_inputs_have_their_names():
    module, changed = pair(), optimized(pair(), X)
    sizes = {"input": {0: torch.export.Dim("n")}}
    with torch.no_grad():
        program = torch.export.export(changed, (X,), dynamic_shapes=sizes)
        assert "pooled_conv" in str(program.graph)
        assert_same(program.module(), module, randn(5, 4, 8, 8))


@pytest.mark.parametrize(
    "groups",
    [lambda n: (n + 7) // 8, lambda n: n % 2 + 1, lambda n: n // 2, lambda n: 2 * n],
    ids=["rounded up", "odd or even", "half", "twice"],
)
def test_numbers_made_of_the_batch(groups):
    """Numbers like a minibatch's deviation: some are the same for twice as many samples."""
    module = Fn(lambda self, x: F.avg_pool2d(self.c(x), 2) * groups(x.shape[0]))
    changed = optimized(module, X)
    for batch in (2, 3, 9, 16):
        assert_same(changed, module, randn(batch, 4, 8, 8))


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.stride(1),
        lambda x: x.stride()[1] // 8,
        lambda x: x.transpose(0, 1).stride(0),
        lambda x: x.is_contiguous() + 1,
        lambda x: x.storage_offset() + 1,
        lambda x: x.requires_grad + 1,
        lambda x: x._version + 1,
    ],
    ids=["stride", "strides", "of a view", "order", "offset", "derivatives", "version"],
)
def test_numbers_that_sizes_do_not_tell(ask):
    module, x = Fn(lambda self, x: F.avg_pool2d(self.c(x), 2) * ask(x)), torch.cat([X, X])[2:]
    given = [x.clone(), x.contiguous(memory_format=torch.channels_last), x.clone().requires_grad_(), x.clone().add_(1), x]
    for example in given:
        changed = optimized(module, example)
        for other in given:
            assert_same(changed, module, other)


def keeping(self, x, kept):
    h = F.avg_pool2d(self.c(x), 2)
    kept["h"] = h
    kept["all"].append(h.mean())
    return h


def replacing(self, x, kept):
    kept["all"][0] = kept["all"][0] * 2
    return F.avg_pool2d(self.c(x), 2) + kept["all"][0]


@pytest.mark.parametrize(("forward", "given"), [(keeping, []), (replacing, [X.mean()])], ids=["more", "other"])
def test_a_list_and_a_dictionary_that_forward_changes(forward, given):
    """A discriminator hands out features so."""
    module = Fn(forward)
    changed, report = optimize(copy.deepcopy(module), (X, {"all": [*given]}))
    assert any("arguments that forward changes" in site.reason for site in report.sites if site.reason)
    kept = []
    for item in (changed, module):
        kept.append({"all": [*given]})
        kept[-1]["y"] = item(X, kept[-1])
    torch.testing.assert_close(*kept, rtol=1e-10, atol=1e-10)
    assert kept[0].keys() == kept[1].keys() and len(kept[0]["all"]) == len(kept[1]["all"]) == 1


def feature(self, x):
    return F.avg_pool2d(self.c(x), 2)


class Output(dict):
    """An output that is read by attribute too."""

    @property
    def y(self):
        return self["y"]


@pytest.mark.parametrize(
    "kind", [lambda y: OrderedDict(y=y), lambda y: defaultdict(list, y=y), lambda y: Output(y=y), lambda y: [Output(y=y)], Named]
)
def test_results_keep_their_class(kind):
    module = Fn(lambda self, x: kind(feature(self, x)))
    changed, _ = optimize(copy.deepcopy(module), X)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            given, expected = changed(X), module(X)
            assert type(given) is type(expected)
            (given, expected) = (tuple(y.values()) if isinstance(y, dict) else y for y in (given, expected))
            torch.testing.assert_close(given, expected, rtol=1e-10, atol=1e-10)


def caught_truth(self, x):
    try:
        factor = 2.0 if x.sum() > 0 else 3.0
    except Exception:
        factor = 5.0
    return factor * feature(self, x)


def caught_items(self, x):
    try:
        factor = sum(1.0 for _ in x)
    except Exception:
        factor = 5.0
    return factor * feature(self, x)


@pytest.mark.parametrize("forward", [caught_truth, caught_items])
def test_errors_of_stand_ins_that_forward_catches(forward):
    module = Fn(forward)
    changed, report = optimize(copy.deepcopy(module), X)
    assert any("flow of forward" in site.reason for site in report.sites if site.reason)
    assert_same(changed, module, X)


def test_text_of_a_size():
    module = Fn(lambda self, x: {f"{x.shape[1]} channels": feature(self, x)})
    changed, _ = optimize(copy.deepcopy(module), X)
    assert list(changed(X)) == list(module(X)) == ["4 channels"]


def test_attributes_that_tensors_lack():
    module = Fn(lambda self, x: (3.0 if hasattr(x, "tensors") else 5.0) * feature(self, getattr(x, "tensors", x)))
    changed, report = optimize(copy.deepcopy(module), X)
    assert [site.status for site in report.sites] == ["rewritten"]
    assert_same(changed, module, X)


def test_a_shallow_copy_has_attributes_of_its_own():
    module, changed = Fn(fade), optimized(Fn(fade), X)
    assert_same(changed, module, X)
    for again in (copy.copy(changed), copy.copy(copy.copy(changed))):
        again.alpha, other = 0.25, Fn(fade)
        other.alpha = 0.25
        assert_same(again, other, X)
        assert_same(changed, module, X)


def test_a_class_that_registers_its_subclasses():
    known = {}

    class Registered(nn.Sequential):
        def __init_subclass__(cls, *, name):
            known[name] = cls

    class Pair(Registered, name="pair"):
        pass

    changed = optimized(Pair(*pair()), X)
    assert known == {"pair": Pair} and isinstance(changed, Pair)
    assert_same(changed, known["pair"](*pair()), X)


class Quarters(nn.Module):
    """A mean of strided slices, which needs the sizes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)

    def forward(self, x):
        h = self.conv(x)
        return (h[:, :, ::2, ::2] + h[:, :, 1::2, ::2] + h[:, :, ::2, 1::2] + h[:, :, 1::2, 1::2]) / 4


HINT = "with example inputs more averages may be found: optimize(module, x)"


@pytest.mark.parametrize(
    ("layers", "hints"),
    [
        ([nn.Conv2d(4, 8, 3), nn.AdaptiveAvgPool2d(1)], [HINT]),
        ([Quarters()], [HINT]),
        ([nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)], []),
        ([nn.Linear(8, 8)], []),
    ],
    ids=["a mean over the map", "slices", "a ReLU between", "no convolution"],
)
def test_a_report_without_sizes_asks_for_example_inputs_where_they_help(layers, hints):
    module = nn.Sequential(*layers).double()
    without, given = optimize(module)[1], optimize(module, X)[1]
    assert without.hints == hints and given.hints == []
    assert (given.summary.rewritten > without.summary.rewritten) == bool(hints)
