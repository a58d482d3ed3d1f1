# SPDX-License-Identifier: Apache-2.0
"""Modules of every kind through `convpool.torch.optimize`: what they compute stays, also when they change or are wrapped."""

import copy
import functools
import gc
import pickle
import re
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest

from convpool.errors import OptionError
from tests.support.torch import require_torch, results

torch = require_torch()
from torch import nn  # noqa: E402
from torch._inductor.utils import fresh_inductor_cache  # noqa: E402
from torch.func import functional_call, grad, jvp, stack_module_state, vmap  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.utils import parametrizations, prune  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from convpool.torch import ConvAvgPool2d, explain, export_onnx, optimize, optimizing  # noqa: E402
from models.torch_discriminators import SNGAN  # noqa: E402
from models.torch_networks import LeNet5  # noqa: E402
from tests.support.torch_modules import Doubled, Forward  # noqa: E402

X = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(0))
SCALE = {"a": 1.0}


class Net(Forward):
    """A convolution, and a forward that is given it."""

    def __init__(self, forward):
        super().__init__(forward, c=nn.Conv2d(4, 8, 3, padding=1))
        self.factor, self.factors, self.kept = 1.0, [1.0], None

    def pair(self, x):
        return F.avg_pool2d(self.c(x), 2)


def assert_same(module, changed, x=X):
    """The sums are of fewer than 300 numbers."""
    order = 2 * int(torch.is_grad_enabled())
    for mine, theirs in zip(results(changed, x, order), results(module, x, order), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5 * max(float(theirs.detach().abs().max()), 1e-3))


@pytest.mark.parametrize("pads", [(0, 1, 0, 1), (2, 2, 2, 2)])
def test_zeros_around_a_map_beside(pads):
    """Pads that onnxruntime would fail with or miscount in an average are PyTorch's own."""
    module = Net(lambda m, x: F.avg_pool2d(m.c(F.pad(x, pads)) + F.pad(x.repeat(1, 2, 1, 1), pads), 2))
    assert_same(module, optimize(module, X)[0])
    (site,) = explain(module, X).sites
    assert site.status == "rewritten", site.reason


def keeping(m, x):
    m.kept = m.c(x)
    return F.avg_pool2d(m.kept, 2)


def changed_weight(m, x):
    h = m.c(x)
    with torch.no_grad():
        m.c.weight.mul_(0.5)
        y = F.avg_pool2d(h, 2)
        m.c.weight.mul_(2.0)
    return y * x.mean()


def deviation(m, x):
    y, group = m.pair(x), min(x.shape[0], 4)
    s = y.reshape(group, -1, *y.shape[1:]).var(0, unbiased=False).mean((1, 2, 3), keepdim=True)
    return y + s.repeat(group, 1, 1, 1)


FORWARDS = {
    "plain": (lambda m, x: m.pair(x), 1),
    "a branch by data": (lambda m, x: (y := m.pair(x)) * (2 if y.sum() > 0 else 3), 1),
    "text": (lambda m, x: (y := m.pair(x), print("seen", tuple(y.shape)))[0] + 1, 1),
    "random numbers": (lambda m, x: m.pair(x + torch.randn_like(x)) * torch.rand(()), 1),
    "types of the input": (lambda m, x: m.pair(x) * {torch.float32: 2}.get(x.dtype, 7) * 3 ** (type(x) is torch.Tensor), 1),
    "a kept map": (keeping, 0),
    "a map read twice": (lambda m, x: F.avg_pool2d(h := m.c(x), 2) + h.mean(), 0),
    "a map changed by a view": (lambda m, x: (h := m.c(x), h[:, 0].zero_(), F.avg_pool2d(h, 2))[2], 0),
    "a weight changed later": (changed_weight, 0),
    "an activation in place": (lambda m, x: m.pair(F.relu_(x * 1)), 1),
    "a function of autograd": (lambda m, x: Doubled.apply(m.pair(Doubled.apply(x))), 1),
    "a function of autograd between": (lambda m, x: F.avg_pool2d(Doubled.apply(m.c(x)), 2), 0),
    "sizes": (deviation, 1),
    "images as a height": (lambda m, x: F.conv2d(x.transpose(0, 2), m.c.weight[..., :1, :1]).sum((2, 3)), 0),
    "a number of images": (lambda m, x: m.c(F.interpolate(y, (8, 16)) if (y := x.transpose(0, 2)).shape[2] == 4 else x), 1),
    "images as a signal": (lambda m, x: m.c(x.reshape(1, 4, -1, 8)).mean((2, 3)), 1),
    "beside a height": (lambda m, x: F.conv2d(x.sum((1, 2))[None, None] * x.sum((1, 2)), m.c.weight[:, :1]).mean((2, 3)), 0),
    "a variable of a common name": (lambda m, x: (result := m.pair(x)) + result.mean(), 1),
    "one tensor twice": (lambda m, x: torch.cat([m.pair(x).view(-1), m.pair(x).view(-1) * 2]), 2),
    "order": (lambda m, x: F.avg_pool2d(m.c(x).to(x.dtype, memory_format=torch.channels_last).clone().type_as(x), 2), 1),
    "a pixel": (lambda m, x: F.interpolate(m.c(x.to(memory_format=torch.channels_last)).mean((2, 3), True), 2).view(-1), 1),
    "Dropout between": (lambda m, x: F.avg_pool2d(F.dropout(m.c(x), 0.5), 2), 0),
    "slices": (lambda m, x: F.avg_pool2d(m.c(x)[:, ::2], 2).view(len(x), -1)[:, :4] + m.c(x)[:, ::2].mean((2, 3)), 2),
    "half by a linear resize": (lambda m, x: F.interpolate(m.c(x), scale_factor=0.5, mode="bilinear"), 1),
    "a global": (lambda m, x: m.pair(x) * SCALE["a"], 1),
    "a map changed later, without gradients": (lambda m, x: (F.avg_pool2d(h := m.c(x), 2), h.mul_(0.0))[0] + h.mean(), 0),
}
if hasattr(torch.compiler, "nested_compile_region"):
    FORWARDS["a region"] = (lambda m, x: (f := torch.compiler.nested_compile_region(lambda y: m.pair(y)))(x) + f(-x), 1)


@pytest.mark.parametrize("name", FORWARDS)
def test_forward(name):
    torch.manual_seed(1)
    module, pairs = Net(FORWARDS[name][0]), FORWARDS[name][1]
    with torch.set_grad_enabled("without gradients" not in name):
        changed, report = optimize(copy.deepcopy(module), X.clone().requires_grad_())
        assert report.summary.rewritten == pairs, str(report)
        assert_same(module, changed)
        y, expected = changed(X), module(X)
        assert (y.stride(), y._is_view()) == (expected.stride(), expected._is_view())
        assert_same(module, changed, X[:3])
    cuts = [text for text in report.warnings if "test_optimize.py" in text and "y.sum() > 0" in text]
    assert len(cuts) == (name == "a branch by data"), report.warnings


# ---- changes ----

(HOOKED := nn.Conv2d(4, 8, 3, padding=1)).register_forward_hook(lambda c, args, y: y * 3)
CHANGES = {
    "a number": lambda m: setattr(m, "factor", 3.0),
    "a list": lambda m: m.factors.append(5.0),
    "a global": lambda m: SCALE.update(a=2.0),
    "another layer": lambda m: setattr(m, "c", nn.Conv2d(4, 8, 1)),
    "one that has a hook": lambda m: setattr(m, "c", HOOKED),
    "other tensors": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True),
    "frozen": lambda m: m.requires_grad_(False),
    "frozen for a step": lambda m: (m.requires_grad_(False)(X), m.requires_grad_()),
    "double": lambda m: m.double().float(),
    "channels last": lambda m: m.to(memory_format=torch.channels_last),
    "a parametrization": lambda m: parametrizations.weight_norm(m.c),
    "pruned": lambda m: prune.l1_unstructured(m.c, "weight", 0.3),
    "padding": lambda m: setattr(m.c, "padding", (0, 0)),
    "a hook": lambda m: m.c.register_forward_hook(lambda c, args, y: y * 3),
    "a hook for a call": lambda m: (hook := m.c.register_forward_hook(lambda c, args, y: y * 3), m(X), hook.remove()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_module_that_changes(name, monkeypatch):
    monkeypatch.setitem(SCALE, "a", 1.0)
    torch.manual_seed(2)
    module = Net(lambda m, x: m.pair(F.interpolate(x, scale_factor=(m.factor, 2.0))) * m.factor * sum(m.factors) * SCALE["a"])
    changed, _ = optimize(copy.deepcopy(module), X.clone().requires_grad_())
    assert_same(module, changed)
    for net in (module, changed):
        torch.manual_seed(5)
        CHANGES[name](net)
    assert_same(module, changed)


@pytest.mark.parametrize("between", [nn.BatchNorm2d(8), nn.Dropout(0.5)])
def test_training_and_evaluation(between):
    module = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), between, nn.AvgPool2d(2))
    changed, report = optimize(module, X)
    assert report.summary.rewritten == 0
    changed.eval(), module.eval()
    assert_same(module, changed)
    assert report.summary.rewritten == 1 and len(report.plans) == 2


def test_batches_are_one_plan():
    changed, report = optimize(nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.AvgPool2d(2)), X)
    for batch in (4, 7, 2, 15):  # PyTorch itself tells 16 from fewer: its convolution chooses an order in memory
        assert changed(torch.randn(batch, 4, 8, 8)).shape[0] == batch
    assert len(report.plans) == 1
    torch.no_grad()(changed)(X)
    assert [line.rpartition(": ")[2] for line in report.plans] == ["1 pair", "1 pair"] and "without gradients" in report.plans[1]


def test_the_limit_is_told(monkeypatch):
    monkeypatch.setattr(optimizing, "LIMIT", 2)
    module = Net(lambda m, x: m.pair(x) * m.factor)
    changed, _ = optimize(copy.deepcopy(module), X)
    with pytest.warns(UserWarning, match="captured 2 times"):
        changed.eval()(X[..., :4])
    changed.factor = module.factor = 4.0
    assert_same(module, changed)


def test_hooks_that_come_and_go_at_each_call(monkeypatch):
    """A capture without them is kept; those with hooks that are new each time go up to the limit."""
    module = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.AvgPool2d(2))
    (changed, report), held = optimize(copy.deepcopy(module), X), weakref.WeakSet()
    for factor in range(3):
        held.add(holds := nn.Identity())
        hooks = [net[1].register_forward_hook(lambda m, args, y, *own, f=factor, h=holds: h(y * f)) for net in (module, changed)]
        assert_same(module, changed)
        [hook.remove() for hook in hooks]
        assert_same(module, changed)
        assert len(report.plans) == 2 + factor + 1  # at first by look, and for gradients at the input
    del holds, hooks
    gc.collect()
    assert len(held) <= 1  # the last one's
    monkeypatch.setattr(optimizing, "LIMIT", len(report.plans))
    [net[0].register_forward_hook(lambda m, args, y: y.flip(1)) for net in (module, changed)]
    assert_same(module, changed)
    assert len(report.plans) == 5


# ---- what is given and told ----


def test_explain_leaves_the_module_alone_and_the_report_prints_as_a_table():
    module = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.AvgPool2d(2))
    assert explain(module, X).summary.rewritten == 1 and module._compiled_call_impl is None and "_convpool" not in module.__dict__
    changed, report = optimize(module)
    assert str(report).splitlines()[0] == "No call is captured." and "call the module" in report.hints[0]
    changed(X)
    assert explain(changed) is report and report.summary.rewritten == 1 and not report.hints
    changed(X[..., :4])
    assert str(report).splitlines()[0].split() == ["convolution", "pooling", "rewritten", "as", "multiply-adds", "after"]
    assert len(report.plans) == 2 and "rewrites  1 of 1 convolution: 18.4 k -> 4.61 k multiply-adds" in str(report)
    _, report = optimize(Net(torch.compiler.disable(lambda m, x: m.pair(x))), X)
    assert "captures nothing" in report.warnings[0] and not report.hints and not report.plans


FAILS_BEHIND_A_CUT = Forward(lambda m, x: (torch._dynamo.graph_break(), (x * 2).view(-1, 1_000_003)))


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((3,), {}, "module: got int"),
        ((nn.ReLU(), 3), {}, "example_inputs: got int"),
        ((nn.Conv2d(4, 8, 3), (1, 4, 8, 8)), {}, r"for a shape, pass torch.randn\(1, 4, 8, 8\)"),
        ((nn.Conv2d(4, 8, 3), (X, X)), {}, "forward fails; got TypeError"),
        ((nn.Conv2d(3, 8, 3), X), {}, "forward fails; got RuntimeError"),
        ((FAILS_BEHIND_A_CUT, X), {}, "forward fails; got RuntimeError: shape"),
        ((nn.ReLU(), X), {"exclude": 3}, "exclude: got 3"),
    ],
)
def test_wrong_arguments(arguments, options, words):
    with pytest.raises(OptionError, match=words):
        optimize(*arguments, **options)


def test_excluded_by_name():
    module = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular"), nn.AvgPool2d(2))
    assert [site.status for site in optimize(module, X, exclude="0")[1].sites] == ["excluded"]
    assert "nothing" in " ".join(optimize(module, X, exclude="nothing")[1].warnings)


def test_the_original_is_left_alone_unless_it_may_change():
    not_followed = Forward(torch.compiler.disable(lambda m, x: F.dropout(m.norm(x))), norm=nn.BatchNorm2d(4))
    module = nn.Sequential(not_followed, nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.AvgPool2d(2))
    before, random = {name: tensor.clone() for name, tensor in module.state_dict().items()}, torch.get_rng_state()
    changed, _ = optimize(module, X)
    assert module._compiled_call_impl is None and changed[1].weight is module[1].weight
    assert optimize(module, X, inplace=True)[0] is module and type(module) is nn.Sequential
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    "make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: torch.optim.swa_utils.AveragedModel(m).module]
)
def test_copies(make):
    other = make(optimize(nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.AvgPool2d(2)), X)[0])
    with torch.no_grad():
        other[0].weight.mul_(2)
    expected = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.AvgPool2d(2))
    expected.load_state_dict(other.state_dict())
    assert_same(expected, other)
    assert explain(other).summary.rewritten == 1 and type(other) is nn.Sequential


# ---- what else looks at the module ----


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return 2 * made if func is torch.conv2d else made


class DoublingTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        made = super().__torch_function__(func, types, args, kwargs)
        return 2 * made if func is torch.conv2d else made


class Rounded(TwoTensor):
    """Images that a convolution rounds, as those of quantized networks."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    __tensor_unflatten__ = staticmethod(lambda inner, meta, *sizes: Rounded(inner["a"], inner["b"]))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution.default:
            args = (Rounded(args[0].a.round(), args[0].b), *args[1:])
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_tracers_see_the_original():
    module, x = LeNet5(), torch.randn(2, 1, 32, 32)
    changed, _ = optimize(module, x)
    with Doubling():
        found, expected = changed(x), module(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(changed(x.as_subclass(DoublingTensor)), expected.as_subclass(DoublingTensor))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = [torch.fx.symbolic_trace(changed), torch.jit.trace(changed, x), torch.jit.script(changed)]
    for found in (*traced, torch.export.export(changed, (x,)).module()):
        torch.testing.assert_close(found(x), module(x))
    layer = ConvAvgPool2d(4, 8, 3, pool_size=2)
    torch.testing.assert_close(torch.export.export(layer, (X,)).module()(X), layer(X))


def test_replicas_have_their_own_weights_and_tensors_of_a_class_see_the_original():
    """DataParallel makes the former for each device."""
    module, x = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.AvgPool2d(2)).double(), X.double()
    changed, _ = optimize(module, x)
    torch.testing.assert_close(changed(Rounded(x, x)).a, module(Rounded(x, x)).a)
    replica = changed._replicate_for_data_parallel()
    replica._modules["0"] = nn.Conv2d(4, 8, 3, padding=1).double()
    torch.testing.assert_close(replica(x), changed[1](replica._modules["0"](x)))


def test_modules_that_are_compiled_already():
    for module in (torch.compile(nn.Sequential(nn.ReLU()), backend="eager"), torch.jit.script(nn.Sequential(nn.ReLU()))):
        changed, report = optimize(module, X, inplace=True)
        assert changed is module and "stays as it is" in report.warnings[0]


def test_the_backend_by_its_name(monkeypatch):
    """The entry point, and options for inductor, whose cache tells versions apart: gradients are convpool's code."""
    named = re.search(r'^convpool = "(convpool.torch[^"]+)"$', Path("pyproject.toml").read_text(), re.M)
    backend = metadata.EntryPoint("convpool", named[1], "torch_dynamo_backends").load()
    module = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.AvgPool2d(2))
    for options in (None, {"exclude": "0"}):
        torch.testing.assert_close(torch.compile(module, backend=backend, options=options)(X), module(X), rtol=1e-5, atol=1e-5)
    with pytest.raises(Exception, match="expected None or 'inductor'"):
        torch.compile(module, backend=backend, options={"inner": "other"})(X)
    with fresh_inductor_cache(), torch._functorch.config.patch(enable_autograd_cache=True):
        for version, hits in (("1", 0), ("2", 0), ("2", 1)):
            torch._dynamo.reset()
            monkeypatch.setattr("convpool.torch.backend.InductorPass.uuid", lambda _, version=version: version)
            (counts := torch._dynamo.utils.counters["aot_autograd"]).clear()
            torch.compile(module.requires_grad_(False), backend=backend, options={"inner": "inductor"})(X)
            assert counts["autograd_cache_hit"] == hits


@pytest.mark.parametrize("layers", [False, True])
def test_onnx(layers, tmp_path):
    pytest.importorskip("tests.support.exported.exporting")  # whose exports take less time
    x = X.repeat(1, 4, 1, 1)
    pair = [ConvAvgPool2d(16, 64, 3, padding=1, pool_size=2)] if layers else [nn.Conv2d(16, 64, 3, padding=1), nn.AvgPool2d(2)]
    module = nn.Sequential(*pair, nn.ReLU()).eval()
    changed = module if layers else optimize(module, x)[0]
    own = torch.onnx.export(changed, (x,), dynamo=True).model_proto
    model = export_onnx(changed, (x,), tmp_path / "model.onnx")
    assert [node.op_type for node in own.graph.node][:2] == ["Conv", "AveragePool"]
    assert "ConvAvgPoolRelu" in [node.op_type for node in model.graph.node] and (tmp_path / "model.onnx").stat().st_size > 1000
    runtime = pytest.importorskip("onnxruntime")
    found = runtime.InferenceSession(model.SerializeToString()).run(None, {model.graph.input[0].name: x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), module(x), rtol=1e-5, atol=1e-5)


# ---- what PyTorch offers around modules ----

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def saved_on_cpu(function, x):
    with torch.autograd.graph.save_on_cpu():
        return function(x)


@pytest.fixture
def x():
    return torch.randn(4, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def both(x, seed=0):
    """A small network in float64 and what `optimize` makes of it."""
    torch.manual_seed(seed)
    original = SNGAN(8, (1, 2), spectral_norm=False).double()
    optimized, report = optimize(copy.deepcopy(original), x)
    assert report.summary.rewritten == 3
    return original, optimized


def checkpointed(module, x, reentrant):
    checkpoint(module, x.requires_grad_(), use_reentrant=reentrant).square().sum().backward()
    return [parameter.grad for parameter in module.parameters()]


def functional(module, x):
    weights = {name: 1.1 * weight.detach() for name, weight in module.named_parameters()}
    return grad(lambda weights: functional_call(module, weights, (x,)).square().sum())(weights)


AROUND = [functional, lambda module, x: jvp(grad(lambda x: module(x).square().sum()), (x,), (x.flip(-1),))[1]]
AROUND += [functools.partial(checkpointed, reentrant=flag) for flag in (False, True)]


@pytest.mark.parametrize("derivatives", AROUND)
def test_derivatives_of_what_is_around_a_module(derivatives, x):
    original, optimized = both(x)
    torch.testing.assert_close(derivatives(optimized, x), derivatives(original, x), **EXACT)


def test_ensembles_of_stacked_modules(x):
    pairs = [both(x, seed) for seed in range(3)]
    state = stack_module_state([optimized for _, optimized in pairs])
    base = copy.deepcopy(pairs[0][1]).to("meta")
    y = vmap(lambda parameters, buffers: functional_call(base, (parameters, buffers), (x,)))(*state)
    torch.testing.assert_close(y, torch.stack([original(x) for original, _ in pairs]), **EXACT)


@pytest.mark.parametrize("keep", [lambda f, x: checkpoint(f, x, use_reentrant=False), saved_on_cpu], ids=["checkpoint", "cpu"])
def test_checkpoints_inside_of_forward(x, keep):
    """DenseNets save memory so: the rewritten module keeps no activations either."""

    class Saving(SNGAN):
        def forward(self, x):
            return keep(super().forward, x)

    found = []
    for change in (False, True):
        torch.manual_seed(0)
        module, seen = Saving(8, (1, 2), spectral_norm=False).double(), []
        if change:
            module, report = optimize(module, x)
            assert report.summary.rewritten > 0  # parts of it
        with torch.autograd.graph.saved_tensors_hooks(lambda t, seen=seen: seen.append(t.data_ptr()) or t, lambda t: t):
            module(x.clone().requires_grad_())
        parameters = {parameter.data_ptr() for parameter in module.parameters()}  # they are there anyway
        found.append(len([place for place in seen if place not in parameters]))
    assert found[1] <= found[0]


def test_a_weight_changed_between_forward_and_backward_is_an_error(x):
    loss = (module := both(x)[1])(x).square().sum()
    with torch.no_grad():
        module.blocks[1].conv2.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def at_once(function, given):
    """Return what a function gives for each of some values, each in a thread of its own."""
    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(function, given))


def test_threads_that_optimize_at_once_or_share_a_module(x):
    modules = [nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.AvgPool2d(2)) for _ in range(3)]
    at_once(lambda module: assert_same(module, optimize(module, X)[0]), modules)
    original, optimized = both(x)
    batches = [x[:1], x[:2], x[:3], x] * 2
    for found, batch in zip(at_once(optimized, batches), batches, strict=True):
        torch.testing.assert_close(found, original(batch), **EXACT)


def test_a_call_while_another_thread_makes_the_first(monkeypatch):
    changed, _ = optimize(nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.AvgPool2d(2)))
    kept, results = optimizing.compiled, []

    def compiled(backend):
        monkeypatch.undo()
        results.extend(at_once(changed, [X]))
        return kept(backend)

    monkeypatch.setattr(optimizing, "compiled", compiled)
    torch.testing.assert_close(changed(X), *results)


@pytest.mark.parametrize("given", [(), (X,)])
def test_modules_are_freed(given):
    changed, _ = optimize(nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.AvgPool2d(2)), *given)
    changed(X).sum().backward()
    seen = weakref.ref(changed)
    del changed
    gc.collect()
    assert seen() is None


def test_fully_sharded(x, tmp_path):
    """FSDP2 puts a class of its own in front of the module's."""
    fully_shard, distributed = pytest.importorskip("torch.distributed.fsdp").fully_shard, torch.distributed
    original, changed = both(x)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        fully_shard(changed, mesh=mesh)
        for module in (original, changed):
            module(x).square().sum().backward()
        for found, expected in zip(changed.parameters(), original.parameters(), strict=True):
            torch.testing.assert_close(found.grad.full_tensor(), expected.grad, **EXACT)
    finally:
        distributed.destroy_process_group()
