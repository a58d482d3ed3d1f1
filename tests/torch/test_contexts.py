# SPDX-License-Identifier: Apache-2.0
"""Graphs of torch.compile: pairs inside and across of contexts, and beside tensors that forward changes; modules that are called
first in contexts that keep what calls compute: autocast, parametrize.cached."""

import contextlib
import copy
import functools
import itertools
import operator

import pytest

from tests.support.torch import require_torch

torch = require_torch()
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402
from torch.nn.utils.parametrizations import spectral_norm, weight_norm  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from convpool.torch import optimize  # noqa: E402
from convpool.torch.backend import Backend  # noqa: E402
from tests.support.torch_modules import Forward  # noqa: E402


def compiled(function, by_inductor=False):
    """The function with its pairs rewritten, by PyTorch's autograd or inductor; and the backend, which has the reports."""
    inductor = torch._TorchCompileInductorWrapper(None, {"cpp.vec_isa_ok": False}, None)  # trying instructions takes long
    torch._dynamo.reset()
    rewrite = Backend(inner=inductor if by_inductor else lambda graph, example: graph.forward)
    return torch.compile(function, backend=rewrite), rewrite


def statuses(rewrite):
    sites = [site for one in rewrite.captured for report in one.reports for site in report.sites]
    return [site.status for site in sorted(sites, key=lambda site: site.conv)]


def entered(contexts):
    stack = contextlib.ExitStack()
    for context in contexts:
        stack.enter_context(context())
    return stack


def step(net, x, *outer, calls=1):
    """Sum of results, gradients at the input and the parameters, and parameters and buffers after a step of training."""
    x, optimizer = x.clone().requires_grad_(), torch.optim.SGD(net.parameters(), 0.1)
    with entered(outer):
        y = sum(net(x) for _ in range(calls))
    if y.requires_grad:
        (y.float().square().mean() + y.float().mean()).backward()
        optimizer.step()
    return [y.detach(), x.grad, *(p.grad for p in net.parameters()), *(t.detach() for t in net.state_dict().values())]


def check_same(found, expected, rtol=1e-4):
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert type(one) is type(other) and one.dtype == other.dtype
            assert float((one - other).abs().max()) <= rtol * max(float(other.abs().max()), 0.1)


# ---- contexts ----


def crossing(first, second, third):
    """A convolution in one context, linear operators behind it in a second, their pooling in a third; a pair after them."""

    def forward(m, x):
        x = x * 1.0
        with first():
            y = m.first(x)
        with second():
            y = y * 0.5 - 1
        with third():
            y = F.avg_pool2d(y, 2)
        return y.sum((2, 3)) + F.avg_pool2d(m.second(x), 2).sum((2, 3))

    torch.manual_seed(0)
    return Forward(forward, first=nn.Conv2d(3, 8, 3, padding=1), second=nn.Conv2d(3, 8, 3))


@contextlib.contextmanager
def nested():
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        yield


CONTEXTS = {
    "none": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "autocast of another device": lambda: torch.autocast("cuda", torch.float16),
    "nested": nested,
}
NAMES = [name for name in CONTEXTS if name != "none"]
PLACES = list(itertools.product((0, 1), repeat=3))[1:]
OUTER = [(name, "none", PLACES) for name in NAMES]
OUTER += [(*names, [p for p in PLACES if sum(p) % 2]) for names in itertools.product(("no_grad", "autocast"), repeat=2)]
INSIDE = [(tuple(name if there else "none" for there in places), outer) for name, outer, among in OUTER for places in among]
INSIDE += [((*names[:1], "none", *names[1:])[:: (-1) ** n], "none") for n, names in enumerate(itertools.combinations(NAMES, 2))]
"""Two contexts meet once; inside of others one or all parts are in a context."""


@pytest.mark.parametrize(("names", "outer"), INSIDE)
def test_contexts(names, outer):
    """names: of the contexts of forward's parts; outer: the context around the call."""
    net, of_call = crossing(*(CONTEXTS[name] for name in names)), CONTEXTS[outer]
    x, (compiles, rewrite) = torch.randn(2, 3, 10, 10), compiled(copy.deepcopy(net))
    check_same(step(compiles, x, of_call), step(net, x, of_call), 5e-2 if "autocast" in str((names, outer)) else 1e-4)
    changes_nothing = ("no_grad", "set_grad_enabled") if outer == "no_grad" else ("enable_grad",)
    apart = len({"none" if name in changes_nothing else name for name in names}) > 1
    assert statuses(rewrite) == ["rejected" if apart else "rewritten", "rewritten"]
    if apart:
        assert any("context in forward; got" in str(site.reason) for site in rewrite.captured[0].reports[0].sites)


def pair(x, w):
    return F.avg_pool2d(F.conv2d(x, w), 2)


def inference(x, w):
    with torch.inference_mode():
        y = F.conv2d(x, w)
        z = F.avg_pool2d(y, 2)
    return F.avg_pool2d(y, 2).detach() + z.detach()


def residual(x, w):
    """A sum of which one part is made in a context: the other one is a pair."""
    with torch.no_grad():
        shift = F.conv2d(x, w)
    return F.avg_pool2d(F.conv2d(x, w) + shift, 2)


def frozen_weights(x, w):
    with torch.no_grad():
        scaled = w * 2
    return pair(x, scaled) + pair(x, w)


def statistics(x, w):
    """A context between the two that reads what the pair does not."""
    y = F.conv2d(x, w)
    with torch.no_grad():
        mean = x.mean()
    return F.avg_pool2d(y, 2) + mean


FUNCTIONS = [
    ("inference_mode", inference, ["rejected", "rejected"]),
    ("residual", residual, ["rejected"]),
    ("weights of another context", frozen_weights, ["rewritten", "rewritten"]),
    ("statistics", statistics, ["rewritten"]),
    ("vmap", lambda x, w: torch.vmap(lambda x: pair(x, w))(x[:, None]), ["rejected"]),
    ("vmap of weights", lambda x, w: torch.vmap(lambda w: pair(x, w))(torch.stack([w, w * 2])), ["rejected"]),
    ("grad", lambda x, w: torch.func.grad(lambda x: pair(x, w).square().sum())(x), ["rejected"]),
    ("jacrev", lambda x, w: torch.func.jacrev(lambda w: pair(x, w).sum((0, 2, 3)))(w), ["rejected"]),
    ("vjp", lambda x, w: torch.func.vjp(lambda x: pair(x, w), x)[1](pair(x, w))[0], ["rejected", "rewritten"]),
    ("grads", lambda x, w: torch.vmap(torch.func.grad(lambda w, x: pair(x, w).sum()), (None, 0))(w, x[:, None]), ["rejected"]),
    ("after a transform", lambda x, w: pair(x, w) + torch.vmap(torch.sum)(x).sum() + pair(x, w * 2), ["rewritten"] * 2),
]
BY_INDUCTOR = ("inference_mode", "weights of another context", "after a transform")
BOTH = [(whole, *item) for whole in (False, True) for item in FUNCTIONS if not whole or item[0] in BY_INDUCTOR]


@pytest.mark.parametrize("whole, function, wanted", [(b[0], *b[2:]) for b in BOTH], ids=[f"{b[1]}-{b[0]}" for b in BOTH])
def test_functions(whole, function, wanted):
    """whole: by inductor, which gets the same graph.  Another batch leaves the batch open, a symbol that vmap reads."""
    net = Forward(lambda m, x: function(x, m.weight), weight=nn.Parameter(torch.randn(8, 3, 3, 3)))
    compiles, rewrite = compiled(copy.deepcopy(net), whole)
    for batch in (2,) if whole else (2, 3):
        x = torch.randn(batch, 3, 10, 10)
        check_same(step(compiles, x), step(net, x))
    assert statuses(rewrite) == sorted(wanted * len(rewrite.captured))


# ---- tensors that forward changes ----


def pair_and_change(change, when, x, weight, bias=None):
    """A pair, and a change of a tensor before, in between or after it."""
    for number, part in enumerate((lambda h: h, lambda h: F.conv2d(h, weight, bias), lambda h: F.avg_pool2d(h, 2))):
        x = part(x)
        if number == when:
            change()
    return x


def update(norm, m, training=True):
    return norm(m.other[..., 0, 0].t(), None, None, m.bias, m.other[:, 0, 0, 0], training, 0.1, 1e-5, False)


CHANGES = {
    "the weight": (lambda m, x: m.weight.mul_(2), "rejected"),
    "its view": (lambda m, x: m.view.mul_(2), "rejected"),
    "its part": (lambda m, x: m.weight[0].zero_(), "rejected"),
    "by out": (lambda m, x: torch.neg(m.other, out=m.weight), "rejected"),
    "by one out of two": (lambda m, x: torch.sort(m.other, out=(m.weight, m.other.long())), "rejected"),
    "in a checkpoint": (lambda m, x: checkpoint(lambda y: m.weight.mul_(2) * y, x.sum(), use_reentrant=False), "rejected"),
    "as a mean": (lambda m, x: F.batch_norm(m.other[..., 0, 0].t(), m.bias, m.other[:, 0, 0, 0], training=True), "rejected"),
    "a part": (lambda m, x: F.batch_norm(m.other[..., 0, 0].t(), m.bias[:], m.other[:, 0, 0, 0], training=True), "rejected"),
    "no mean": (lambda m, x: F.batch_norm(m.other[..., 0, 0].t(), m.bias, m.other[:, 0, 0, 0]), "rewritten"),
    "as rows": (lambda m, x: F.embedding(torch.arange(8), m.bias.view(8, 1), max_norm=0.1), "rejected"),
    "by copy_": (lambda m, x: m.weight.copy_(m.other), "rejected"),
    "by an item": (lambda m, x: m.weight.__setitem__(0, 0.0), "rejected"),
    "by a method": (lambda m, x: m.weight.__imul__(2), "rejected"),
    "by a function in C++": (lambda m, x: update(torch.batch_norm, m), "rejected"),
    "by an operator": (lambda m, x: update(torch.ops.aten.batch_norm.default, m), "rejected"),
    "by an evaluated one": (lambda m, x: update(torch.batch_norm, m, False), "rewritten"),
    "another": (lambda m, x: m.other.add_(1), "rewritten"),
    "another, from it": (lambda m, x: m.other.copy_(m.weight), "rewritten"),
    "the input": (lambda m, x: x.detach().mul_(2), "rejected"),
}


@pytest.mark.parametrize("when", [0, 1, 2])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_buffers(name, when):
    change, wanted = CHANGES[name]
    weight, other, bias, x = (torch.randn(shape) for shape in ((8, 3, 3, 3), (8, 3, 3, 3), (8,), (2, 3, 10, 10)))
    buffers = {"weight": weight, "other": other, "view": weight[:4], "bias": bias}
    net = Forward(lambda m, x: pair_and_change(lambda: change(m, x), when, x, m.weight, m.bias), **buffers)
    compiles, rewrite = compiled(copy.deepcopy(net))
    modules = (compiles, net)
    check_same(*([m(given := x.clone()).detach(), m(given).detach(), given, *m.state_dict().values()] for m in modules))
    assert when != 1 or statuses(rewrite)[0] == wanted


@pytest.mark.parametrize(
    "change",
    [
        lambda m, y: F.embedding(torch.arange(7, -1, -1), m.table, max_norm=1.0),
        lambda m, y: F.batch_norm(y, m.table[0], m.mean.abs()) + F.batch_norm(y, m.mean, m.mean.abs(), training=True),
        lambda m, y: F.instance_norm(y, m.mean, m.table[0].abs(), use_input_stats=True),
        lambda m, y: torch._foreach_mul_([m.mean], 2.0),
        lambda m, y: checkpoint(lambda y: m.mean.mul_(2) * y.sum(), y, use_reentrant=False),
    ],
)
def test_readers_behind_a_change_that_gives_another_tensor(change):
    def forward(m, x):
        y = F.avg_pool2d(F.conv2d(x, m.weight), 2)
        change(m, y)
        return y, F.linear(m.mean, m.table)

    shapes, x = {"weight": (8, 3, 3, 3), "table": (8, 8), "mean": (8,)}, torch.randn(2, 3, 10, 10)
    net = Forward(forward, **{name: torch.randn(shape) * 3 for name, shape in shapes.items()})
    compiles, _ = compiled(copy.deepcopy(net))
    check_same(*([*module(x), *module.state_dict().values()] for module in (compiles, net)))


@pytest.mark.parametrize("view", [lambda b: b, lambda b: b.detach(), lambda b: F.dropout(b, 0.5, False)[:1]])
@pytest.mark.parametrize("which", ["the input", "the weight", "another buffer"])
def test_a_buffer_in_the_memory_of_another_tensor(which, view):
    """Since the capture an argument has been in that of a buffer that forward changes, or of the weight, and is changed; or the
    weight has been in the buffer's."""

    def forward(m, x):
        x, y = (x[0].tanh(), x[1]) if which == "the weight" else (x[0], m.buffer)
        return pair_and_change(lambda: view(y).zero_(), 1, x, m.weight)

    x, weight = torch.randn(2, 3, 10, 10), torch.randn(8, 3, 3, 3)
    net = Forward(forward, buffer=weight.clone() if which == "another buffer" else x.clone(), weight=weight)
    copied = copy.deepcopy(net)
    changed, report = optimize(copied, ([x, weight.clone()],))
    assert report.summary.rewritten == 1
    results = []
    for run, module in ((changed, copied), (net, net)):
        image = module.buffer.detach() if which == "the input" else x
        kernel = (module.weight if which == "the weight" else weight).detach()
        if which == "another buffer":
            module.buffer.data = module.weight.data
        results.append([run([image, kernel])])
    check_same(*results)


@pytest.mark.parametrize("when", [0, 1, 2])
def test_arguments_that_may_share_memory(when):
    """No two of a later call's arguments need have memory of their own because the first call's had."""

    def forward(x, y, w):
        return pair_and_change(lambda: y.mul_(2), when, x, w)

    compiles, rewrite = compiled(forward)
    for shares in (False, True):
        results = []
        for function in (compiles, forward):
            torch.manual_seed(0)
            x, w = torch.randn(2, 3, 10, 10), torch.randn(8, 3, 3, 3)
            y = x.view(-1) if shares else torch.randn(600)
            results.append([function(x, y, w), function(x, y, w)])
        check_same(*results)
    assert set(statuses(rewrite)) == {"rejected"}


@torch.compiler.allow_in_graph
def doubled(h):
    return h.mul_(2)


KEPT = dict(use_reentrant=False)
UNFOLLOWED = {
    "checkpoint": lambda h: checkpoint(doubled, h, **KEPT),
    "a view in a checkpoint": lambda h: checkpoint(lambda h: h[:1].mul_(2), h, **KEPT),
    "checkpoints": lambda h: checkpoint(lambda h: checkpoint(doubled, h, **KEPT), h, **KEPT),
    "numpy": lambda h: operator.imul(h.numpy(), 2),
    "a function left whole": doubled,
    "Dropout that gives its input": lambda h: F.dropout(h, 0.5, False).mul_(2),
    "Dropout in a checkpoint": lambda h: checkpoint(lambda h: F.dropout(h, 0.5, False)[:1].mul_(2), h, **KEPT),
    "a checkpoint that gives its input": lambda h: checkpoint(lambda h: F.dropout(h, 0.5, False), h, **KEPT).mul_(2),
}


@pytest.mark.parametrize("name", UNFOLLOWED)
def test_a_map_changed_where_torchdynamo_does_not_follow(name):
    def forward(x, w):
        h = x * 1.5
        return pair_and_change(lambda: UNFOLLOWED[name](h), 1, h, w) + pair(x, w)

    x, w, (compiles, rewrite) = torch.randn(2, 3, 10, 10), torch.randn(8, 3, 3, 3), compiled(forward)
    check_same([compiles(x, w)], [forward(x, w)])
    assert statuses(rewrite) == ["rejected", "rewritten"]


@pytest.mark.parametrize("given", [lambda x: x, torch.detach])
@pytest.mark.parametrize("reentrant", [False, True])
def test_statistics_that_a_checkpoint_changes(reentrant, given):
    """A parameter that nothing reads is there for the gradients of others."""
    unread = nn.Parameter(torch.ones(1))
    net = nn.Sequential(nn.Tanh(), nn.Conv2d(3, 8, 3, padding=1), nn.AvgPool2d(2), nn.BatchNorm2d(8))
    original = Forward(lambda m, x: checkpoint(lambda x, _: m.net(x), given(x), m.w, use_reentrant=reentrant), net=net, w=unread)
    x, (changed, report) = torch.randn(2, 3, 16, 16), optimize(copy.deepcopy(original), torch.randn(2, 3, 16, 16))
    check_same(step(changed, x), step(original, x))
    assert report.summary.rewritten == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_in_a_checkpoint(reentrant):
    """Each draws its numbers again; the inner one's pair is rewritten, too."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.AvgPool2d(2), nn.BatchNorm2d(8), nn.Dropout(0.5)) for _ in range(2)]
    kept = functools.partial(checkpoint, use_reentrant=reentrant)
    inner = Forward(lambda m, x: kept(m.first, x), first=blocks[0])
    original = Forward(lambda m, x: kept(lambda x: m.second(m.first(x)), x.tanh()), first=inner, second=blocks[1])
    changed, report = optimize(copy.deepcopy(original), torch.randn(2, 8, 16, 16))
    x, results = torch.randn(2, 8, 16, 16), []
    for module in (changed, original):
        torch.manual_seed(1)
        results.append(step(module, x))
    check_same(*results)
    assert report.summary.rewritten == 2


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("layer", [nn.BatchNorm2d, nn.InstanceNorm2d])
@pytest.mark.parametrize("wrap", [lambda conv: conv, spectral_norm])
def test_normalizations_that_keep_statistics(wrap, layer, before):
    """Every second combination runs by inductor: each two values meet there."""
    torch.manual_seed(0)
    whole = before == ((wrap is spectral_norm) == (layer is nn.InstanceNorm2d))
    pairs = [wrap(nn.Conv2d(8, 8, 3, padding=1)), nn.AvgPool2d(2)]
    norm = layer(8, track_running_stats=True)
    net = nn.Sequential(nn.Conv2d(3, 8, 1), *([norm, *pairs] if before else [*pairs, norm]))
    x, (compiles, rewrite) = torch.randn(2, 3, 16, 16), compiled(copy.deepcopy(net), whole)
    check_same(step(compiles, x), step(net, x))
    assert statuses(rewrite) == ["rewritten"]


# ---- modules that are called in contexts first ----


def chain(wrap=lambda conv: conv):
    torch.manual_seed(0)
    first, second = wrap(nn.Conv2d(3, 8, 3, padding=1)), nn.Conv2d(8, 8, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.AvgPool2d(2))


MODULES = {
    "plain": chain,
    "spectral norm": lambda: chain(spectral_norm),
    "weight norm": lambda: chain(weight_norm),
    "in parts": lambda: Forward(
        lambda m, x: m.last(y if (y := m.inside(x)).sum() < 1e9 else -y), inside=chain(), last=nn.Conv2d(8, 4, 1)
    ),
}
AUTOCAST, OFF, ANOTHER = (CONTEXTS[name] for name in ("autocast", "autocast off", "autocast of another device"))
KEEPING = {
    "autocast": [AUTOCAST],
    "cached": [parametrize.cached],
    "cached, autocast": [parametrize.cached, AUTOCAST],
    "float16": [lambda: torch.autocast("cpu", torch.float16)],
    "no cache": [lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False)],
    "nested": [AUTOCAST, AUTOCAST],
    "nested, off": [AUTOCAST, OFF],
    "nested, on": [OFF, AUTOCAST],
    "another device": [ANOTHER, AUTOCAST],
}
FEWER = {"weight norm": 3, "in parts": 3}
FIRST = [(m, kept, (i + j) % 2) for i, m in enumerate(MODULES) for j, kept in enumerate(list(KEEPING)[: FEWER.get(m)])]
"""Modules in contexts, and which of two ways: each module and each context meets both."""


@pytest.mark.parametrize("name, kept, inference", FIRST)
def test_first_calls_of_a_size(name, kept, inference):
    """With gradients, and in one of two modes without.  Sizes are symbols in one context alone: these take longer."""
    torch._dynamo.reset()
    original = MODULES[name]()
    changed, report = optimize(copy.deepcopy(original), torch.randn(2, 3, 16, 16))
    assert report.summary.rewritten == 1
    for mode, size in ((contextlib.nullcontext, 12), (torch.inference_mode if inference else torch.no_grad, 10)):
        x, before, plans = torch.randn(2, 3, size, size), torch.get_rng_state(), len(report.plans)
        with torch._dynamo.config.patch(automatic_dynamic_shapes=kept == "cached, autocast"):
            found = step(changed, x, *KEEPING[kept], mode, calls=2)
        assert torch.equal(before, torch.get_rng_state()) and len(report.plans) > plans
        check_same(found, step(original, x, *KEEPING[kept], mode, calls=2), 5e-2)


@pytest.mark.parametrize("name, kept, inplace", FIRST)
def test_optimize_inside(name, kept, inplace):
    """Neither the module nor the original, which has the same parameters, has anything of it in the same context."""
    torch._dynamo.reset()
    module, x = MODULES[name](), torch.randn(2, 3, 16, 16)
    expected = step(copy.deepcopy(module), x, *KEEPING[kept])
    with entered(KEEPING[kept]):
        changed = optimize(module, x, inplace=bool(inplace))[0]
        both = [net(x) for net in ((changed,) if inplace else (changed, module))]
    assert torch.is_autocast_cache_enabled() and not parametrize._cache_enabled
    check_same([y.detach() for y in both], expected[:1] * len(both), 5e-2)
    sum(y.float().square().mean() for y in both).backward()
    assert all(type(p.grad) is torch.Tensor for p in module.parameters())


@pytest.mark.parametrize("limit", ["recompile_limit", "accumulated_recompile_limit"])
def test_limit_of_captures(limit):
    """TorchDynamo counts captures by the code of forward, which all modules of the class share where it is cut in two."""
    torch._dynamo.reset()
    x = torch.randn(2, 3, 16, 16)
    with torch._dynamo.config.patch({limit: 2}):
        reports = [optimize(MODULES["in parts"](), x)[1] for _ in range(4)]
    torch._dynamo.reset()
    rewritten = [report.summary.rewritten for report in reports]
    if limit == "recompile_limit":  # each module has its own, and looking has 64
        assert rewritten == [1, 1, 1, 1] and not any("limit" in line for report in reports for line in report.warnings)
    else:
        assert rewritten[0] == 1 and rewritten[-1] == 0
        assert any("recompile_limit" in line for line in reports[-1].warnings)
