# SPDX-License-Identifier: Apache-2.0
"""Modules of every kind through `convpool.torch.optimize`: what they compute stays, also after they have changed."""

import copy
import pickle
import re
import threading
import warnings
from importlib import metadata
from pathlib import Path

import pytest

from convpool.errors import OptionError
from tests.support.torch import require_torch, results

torch = require_torch()

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402

from convpool.torch import ConvAvgPool2d, explain, export_onnx, optimize, optimizing  # noqa: E402

X = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(0))
SCALE = {"a": 1.0}


class Net(nn.Module):
    """A convolution, and a forward that is given it."""

    def __init__(self, forward):
        super().__init__()
        self.c, self.factor, self.factors, self.kept, self._forward = nn.Conv2d(4, 8, 3, padding=1), 1.0, [1.0], None, forward

    def forward(self, x):
        return self._forward(self, x)

    def pair(self, x):
        return F.avg_pool2d(self.c(x), 2)


def assert_same(module, changed, x=X):
    """The sums are of fewer than 300 numbers."""
    order = int(torch.is_grad_enabled())
    for mine, theirs in zip(results(changed, x, order), results(module, x, order), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5 * max(float(theirs.detach().abs().max()), 1e-3))


def under_no_grad(m, x):
    with torch.no_grad():
        h = m.c(x)
    return F.avg_pool2d(h, 2) + x.mean()


def all_under_no_grad(m, x):
    with torch.no_grad():
        h = m.pair(x)
    return h * x.mean()


def branching(m, x):
    y = m.pair(x)
    return y * 2 if y.sum() > 0 else y * 3


def printing(m, x):
    y = m.pair(x)
    print("seen", tuple(y.shape))
    return y + 1


def keeping(m, x):
    m.kept = m.c(x)
    return F.avg_pool2d(m.kept, 2)


def changed_later(m, x):
    h = m.c(x)
    y = F.avg_pool2d(h, 2)
    h.mul_(0.0)
    return y + h.mean()


def changed_through_a_view(m, x):
    h = m.c(x)
    h[:, 0].zero_()
    return F.avg_pool2d(h, 2)


def changed_input(m, x):
    x = x * 1
    h = m.c(x)
    x.zero_()
    return F.avg_pool2d(h, 2) + x.mean()


def changed_weight(m, x):
    h = m.c(x)
    with torch.no_grad():
        m.c.weight.mul_(0.5)
        y = F.avg_pool2d(h, 2)
        m.c.weight.mul_(2.0)
    return y * x.mean()


def deviation(m, x):
    y = m.pair(x)
    group = min(x.shape[0], 4)
    s = y.reshape(group, -1, *y.shape[1:]).var(0, unbiased=False).mean((1, 2, 3), keepdim=True)
    return y + s.repeat(group, 1, 1, 1)


class Double(torch.autograd.Function):
    """Its gradient is not its derivative."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 5 * grad


FORWARDS = {
    "plain": (lambda m, x: m.pair(x), 1),
    "no_grad around the convolution": (under_no_grad, 0),
    "no_grad around both": (all_under_no_grad, 1),
    "a branch by data": (branching, 1),
    "text": (printing, 1),
    "random numbers": (lambda m, x: m.pair(x + torch.randn_like(x)) * torch.rand(()), 1),
    "type of the input": (lambda m, x: m.pair(x) * (2 if type(x) is torch.Tensor else 3), 1),
    "a table of types": (lambda m, x: m.pair(x) * {torch.float32: 2}.get(x.dtype, 7), 1),
    "a kept map": (keeping, 0),
    "a map read twice": (lambda m, x: F.avg_pool2d(h := m.c(x), 2) + h.mean(), 0),
    "a map changed by a view": (changed_through_a_view, 0),
    "a weight changed later": (changed_weight, 0),
    "an activation in place": (lambda m, x: m.pair(F.relu_(x * 1)), 1),
    "a function of autograd": (lambda m, x: Double.apply(m.pair(Double.apply(x))), 1),
    "a function of autograd between": (lambda m, x: F.avg_pool2d(Double.apply(m.c(x)), 2), 0),
    "sizes": (deviation, 1),
    "one tensor twice": (lambda m, x: torch.cat([m.pair(x), m.pair(x)]), 2),
    "another order in memory": (lambda m, x: F.avg_pool2d(m.c(x).contiguous(memory_format=torch.channels_last), 2), 1),
    "the type it has": (lambda m, x: F.avg_pool2d(m.c(x).to(x.dtype).clone().type_as(x), 2), 1),
    "Dropout between": (lambda m, x: F.avg_pool2d(F.dropout(m.c(x), 0.5), 2), 0),
    "a slice": (lambda m, x: F.avg_pool2d(m.c(x), 2)[:, :4], 1),
    "a global": (lambda m, x: m.pair(x) * SCALE["a"], 1),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_forward(name):
    forward, pairs = FORWARDS[name]
    torch.manual_seed(1)
    module = Net(forward)
    changed, report = optimize(copy.deepcopy(module), X)
    assert report.summary.rewritten == pairs, str(report)
    assert_same(module, changed)
    assert changed(X).stride() == module(X).stride()
    assert_same(module, changed, X[:3])


@pytest.mark.parametrize("forward", [changed_later, changed_input])
def test_tensors_that_change_without_gradients(forward):
    module = Net(forward)
    with torch.no_grad():
        changed, report = optimize(module, X)
        assert report.summary.rewritten == 0
        assert_same(module, changed)


def test_where_forward_is_cut_is_told():
    _, report = optimize(Net(branching), X)
    assert any("test_optimize.py" in text and "y.sum() > 0" in text for text in report.warnings), report.warnings


# ---- changes ----


CHANGES = {
    "a number": lambda m: setattr(m, "factor", 3.0),
    "a list": lambda m: m.factors.append(5.0),
    "a global": lambda m: SCALE.update(a=2.0),
    "another layer": lambda m: setattr(m, "c", nn.Conv2d(4, 8, 1)),
    "other tensors": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True),
    "frozen": lambda m: m.requires_grad_(False),
    "double": lambda m: m.double().float(),
    "channels last": lambda m: m.to(memory_format=torch.channels_last),
    "a parametrization": lambda m: parametrizations.weight_norm(m.c),
    "padding": lambda m: setattr(m.c, "padding", (0, 0)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_module_that_changes(name):
    torch.manual_seed(2)
    module = Net(lambda m, x: m.pair(x) * m.factor * sum(m.factors) * SCALE["a"])
    changed, _ = optimize(copy.deepcopy(module), X)
    assert_same(module, changed)
    torch.manual_seed(5)
    CHANGES[name](module)
    torch.manual_seed(5)
    CHANGES[name](changed)
    try:
        assert_same(module, changed)
    finally:
        SCALE["a"] = 1.0


def test_hooks_that_come_and_go():
    module, calls = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.AvgPool2d(2)), []
    changed, _ = optimize(module, X)
    handle = changed[0].register_forward_hook(lambda m, args, y: calls.append(1) or y * 3)
    torch.testing.assert_close(changed(X), module(X) * 3, rtol=1e-5, atol=1e-5)
    changed(X)
    assert len(calls) == 2
    handle.remove()
    torch.testing.assert_close(changed(X), module(X), rtol=1e-5, atol=1e-5)
    assert len(calls) == 2


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
    with torch.no_grad():
        changed(X)
    assert [line.rpartition(": ")[2] for line in report.plans] == ["1 pair", "1 pair"] and "without gradients" in report.plans[1]


def test_the_limit_is_told(monkeypatch):
    monkeypatch.setattr(optimizing, "LIMIT", 2)
    module = Net(lambda m, x: m.pair(x) * m.factor)
    changed, _ = optimize(copy.deepcopy(module), X)
    with pytest.warns(UserWarning, match="captured 2 times"):
        changed.eval()(X[..., :4])
    changed.factor = module.factor = 4.0
    assert_same(module, changed)


# ---- what is given and told ----


def test_the_report_prints_as_a_table():
    _, report = optimize(nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.AvgPool2d(2)), X)
    assert str(report).splitlines()[0].split() == ["convolution", "pooling", "rewritten", "as", "multiply-adds", "after"]
    assert "rewrites  1 of 1 convolution: 18.4 k -> 4.61 k multiply-adds" in str(report)


def test_explain_leaves_the_module_alone():
    module = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.AvgPool2d(2))
    assert explain(module, X).summary.rewritten == 1
    assert module._compiled_call_impl is None and "_convpool" not in module.__dict__
    changed, report = optimize(module)
    assert not report.sites and "call the module" in report.hints[0]
    changed(X)
    assert explain(changed) is report and report.summary.rewritten == 1 and not report.hints


class FailsBehindACut(nn.Module):
    """A call fails behind the place where TorchDynamo cuts forward in two."""

    def forward(self, x):
        y = x * 2
        torch._dynamo.graph_break()
        return y.view(-1, 1_000_003)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((3,), {}, "module: got int"),
        ((nn.ReLU(), 3), {}, "example_inputs: got int"),
        ((nn.Conv2d(4, 8, 3), (1, 4, 8, 8)), {}, r"for a shape, pass torch.randn\(1, 4, 8, 8\)"),
        ((nn.Conv2d(4, 8, 3), (X, X)), {}, "forward fails; got TypeError"),
        ((nn.Conv2d(3, 8, 3), X), {}, "forward fails; got RuntimeError"),
        ((FailsBehindACut(), X), {}, "forward fails; got RuntimeError: shape"),
        ((nn.ReLU(), X), {"exclude": 3}, "exclude: got 3"),
    ],
)
def test_wrong_arguments(arguments, options, words):
    with pytest.raises(OptionError, match=words):
        optimize(*arguments, **options)


def test_excluded_by_name():
    module = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.AvgPool2d(2))
    assert [site.status for site in optimize(module, X, exclude="0")[1].sites] == ["excluded"]
    assert "nothing" in " ".join(optimize(module, X, exclude="nothing")[1].warnings)


def test_the_original_is_left_alone_unless_it_may_change():
    module = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.AvgPool2d(2))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    random = torch.get_rng_state()
    changed, _ = optimize(module, X)
    assert module._compiled_call_impl is None and changed[0].weight is module[0].weight
    assert optimize(module, X, inplace=True)[0] is module and type(module) is nn.Sequential
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    "make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: torch.optim.swa_utils.AveragedModel(m).module]
)
def test_copies(make):
    changed, _ = optimize(nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.AvgPool2d(2)), X)
    other = make(changed)
    with torch.no_grad():
        other[0].weight.mul_(2)
    expected = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.AvgPool2d(2))
    expected.load_state_dict(other.state_dict())
    assert_same(expected, other)
    assert explain(other).summary.rewritten == 1 and type(other) is nn.Sequential


# ---- what else looks at the module ----


def test_tracers_see_the_original():
    module = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.AvgPool2d(2))
    changed, _ = optimize(module, X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = [torch.fx.symbolic_trace(changed), torch.jit.trace(changed, X), torch.jit.script(changed)]
    for found in (*traced, torch.export.export(changed, (X,)).module()):
        torch.testing.assert_close(found(X), module(X))
    layer = ConvAvgPool2d(4, 8, 3, pool_size=2)
    torch.testing.assert_close(torch.export.export(layer, (X,)).module()(X), layer(X))


def test_replicas_have_their_own_weights():
    """DataParallel makes them for each device."""
    changed, _ = optimize(nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.AvgPool2d(2)), X)
    replica = changed._replicate_for_data_parallel()
    replica._modules["0"] = nn.Conv2d(4, 8, 3, padding=1)
    torch.testing.assert_close(replica(X), changed[1](replica._modules["0"](X)))


def test_modules_that_are_compiled_already():
    for module in (torch.compile(nn.Sequential(nn.ReLU()), backend="eager"), torch.jit.script(nn.Sequential(nn.ReLU()))):
        changed, report = optimize(module, X, inplace=True)
        assert changed is module and "stays as it is" in report.warnings[0]


def test_the_backend_by_its_name():
    """The entry point, and options for inductor."""
    named = re.search(r'^convpool = "(convpool.torch[^"]+)"$', Path("pyproject.toml").read_text(), re.M)
    backend = metadata.EntryPoint("convpool", named[1], "torch_dynamo_backends").load()
    module = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.AvgPool2d(2))
    for options in (None, {"exclude": "0", "accumulation": "packed"}):
        torch.testing.assert_close(torch.compile(module, backend=backend, options=options)(X), module(X), rtol=1e-5, atol=1e-5)
    with pytest.raises(Exception, match="expected None or 'inductor'"):
        torch.compile(module, backend=backend, options={"inner": "other"})(X)


@pytest.mark.parametrize("layers", [False, True])
def test_onnx(layers, tmp_path):
    pytest.importorskip("onnxscript")
    pair = [ConvAvgPool2d(4, 8, 3, padding=1, pool_size=2)] if layers else [nn.Conv2d(4, 8, 3, padding=1), nn.AvgPool2d(2)]
    module = nn.Sequential(*pair, nn.ReLU()).eval()
    changed = module if layers else optimize(module, X)[0]
    own = torch.onnx.export(changed, (X,), dynamo=True).model_proto
    assert [node.op_type for node in own.graph.node][:2] == ["Conv", "AveragePool"]
    model = export_onnx(changed, (X,), tmp_path / "model.onnx")
    assert "ConvAvgPoolRelu" in [node.op_type for node in model.graph.node] and (tmp_path / "model.onnx").stat().st_size > 1000
    runtime = pytest.importorskip("onnxruntime")
    found = runtime.InferenceSession(model.SerializeToString()).run(None, {model.graph.input[0].name: X.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), module(X), rtol=1e-5, atol=1e-5)


def test_threads_that_optimize_at_once():
    failures = []

    def work(seed):
        try:
            module = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.AvgPool2d(2))
            assert_same(module, optimize(module, X)[0])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
