# SPDX-License-Identifier: Apache-2.0
"""Spectral normalization of all weights at once: which are found in a graph, and the library's numbers on a GPU."""

import copy

import pytest

from tests.support.torch import require_torch

torch = require_torch()
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import spectral_norm as hooked  # noqa: E402
from torch.nn.utils.parametrizations import spectral_norm  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from convpool.cuda import training  # noqa: E402
from convpool.torch import kernels, spectral  # noqa: E402
from convpool.torch.backend import Backend, copied  # noqa: E402
from tests.support.torch_gpu import as_on_a_gpu, gpu, on_gpu, replayed  # noqa: E402, F401
from tests.support.torch_modules import Doubled, Forward  # noqa: E402

ops = torch.ops.convpool
ALLOWED = {torch.float32: 4e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SHAPES = [(64, 3, 3, 3), (96, 64, 1, 1), (640, 512, 3, 3), (1, 1024), (20000, 20), (4, 4), (7, 4, 3, 3, 3), *[(12, 4, 3, 3)] * 60]


def network(wrap=spectral_norm, **options):
    """Two convolutions and a linear layer, with their weights normalized."""
    layers = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 3, padding=1), nn.Linear(8 * 4 * 4, 4)
    first, second, last = (wrap(layer, **options) for layer in layers)
    return nn.Sequential(first, nn.AvgPool2d(2), nn.ReLU(), second, nn.AvgPool2d(2), nn.Flatten(), last)


def compiled(net, monkeypatch, inner=None, dynamic=None):
    """The network with a GPU's normalization by PyTorch's operators, and how many weights a graph has.  inner: its compiler."""
    monkeypatch.setattr(kernels, "library_is_there", lambda: True)
    monkeypatch.setattr(training, "has", lambda name: True)
    counts = []
    torch._dynamo.reset()

    def backend(module, inputs):
        graph = copied(as_on_a_gpu(module.graph))
        counts.append(len(spectral.find(graph)))
        call = ops.normalized_weights.default if inner else spectral.normalized
        spectral.normalize_at_once(graph, call)
        made = graph.find_nodes(op="call_function", target=call)
        assert not spectral.find(graph) and len(made) == (counts[-1] > 0)
        changed = torch.fx.GraphModule(module, graph)
        return inner(changed, inputs) if inner else changed.forward

    return torch.compile(net, backend=backend, dynamic=dynamic), counts


RUNS = [(None, torch.contiguous_format), (torch._dynamo.lookup_backend("aot_eager"), torch.channels_last)]


@pytest.mark.parametrize(("inner", "layout"), RUNS)
@pytest.mark.parametrize("wrap", [spectral_norm, hooked])
def test_training_goes_on_as_it_did(wrap, layout, inner, monkeypatch):
    """Results, gradients, and the vectors of the power iteration."""
    original = network(wrap).to(memory_format=layout)
    net, counts = compiled(changed := copy.deepcopy(original), monkeypatch, inner)
    runs = (original, original), (net, changed)
    for _ in range(3):
        x = torch.randn(2, 3, 18, 18)
        torch.testing.assert_close(*(torch.autograd.grad(run(x).square().sum(), list(m.parameters())) for run, m in runs))
        torch.testing.assert_close(original.state_dict(), changed.state_dict())
    assert counts == [3]
    with torch.no_grad():
        torch.testing.assert_close(net(x), original(x))
    torch.testing.assert_close(original.state_dict(), changed.state_dict())
    assert counts == [3, 3]


def of_one(run):
    """A normalized convolution, and a function of it and the input."""
    return Forward(lambda m, x: run(m.conv, x), conv=spectral_norm(nn.Conv2d(3, 4, 3)))


def in_autocast(conv, x):
    with torch.autocast("cpu", torch.bfloat16):
        return conv(x)


def own(conv, x, with_sigma=torch.enable_grad, dot=torch.dot, turn=torch.Tensor.t):
    """A normalization of one's own."""
    weight, vectors = conv.parametrizations.weight.original, conv.parametrizations.weight[0]
    matrix = weight.flatten(1)
    with torch.no_grad():
        u = F.normalize(torch.mv(matrix, vectors._v), dim=0, eps=1e-12, out=vectors._u)
        v = F.normalize(torch.mv(turn(matrix), u), dim=0, eps=1e-12, out=vectors._v)
    with with_sigma():
        sigma = dot(u, torch.mv(matrix, v))
    return F.conv2d(x, weight / sigma)


def after(change):
    """A convolution whose weight is changed before."""

    def run(conv, x):
        with torch.no_grad():
            change(conv.parametrizations.weight.original)
        return conv(x)

    return run


LEFT = {
    "the weight's numbers changed before": of_one(after(lambda weight: weight.data.mul_(0.5))),
    "a part of the weight changed before": of_one(after(lambda weight: weight[:1].mul_(0.5))),
    "sigma without derivatives": of_one(lambda conv, x: own(conv, x, torch.no_grad)),
    "keywords": of_one(lambda conv, x: own(conv, x, dot=lambda u, mv: torch.dot(input=u, tensor=mv))),
    "evaluation": network().eval(),
    "two iterations": network(n_power_iterations=2),
    "two iterations, hooked": network(hooked, n_power_iterations=2),
    "transposed": spectral_norm(nn.ConvTranspose2d(3, 4, 3)),
    "15 elements": spectral_norm(nn.Conv2d(3, 5, 1)),
    "float64": spectral_norm(nn.Conv2d(3, 4, 3).double()),
    "vector read before": of_one(lambda conv, x: conv.parametrizations.weight[0]._u.sum() * conv(x)),
    "twice": of_one(lambda conv, x: conv(x) + conv(x + 1)),
    "a context of its own": of_one(in_autocast),
    "open numbers": network(),
}


# Graphs whose parts are read behind the normalization.
FOUND = {
    "a checkpoint behind": of_one(lambda conv, x: checkpoint(torch.tanh, conv(x), use_reentrant=False)),
    "turned by an operator, as since PyTorch 2.14": of_one(lambda conv, x: own(conv, x, turn=torch.ops.aten.matrix_H)),
    "a function behind": of_one(lambda conv, x: Doubled.apply(conv(x))),
}


@pytest.mark.parametrize("name", [*LEFT, *FOUND])
def test_what_is_left_to_pytorch(name, monkeypatch):
    net = copy.deepcopy((LEFT | FOUND)[name])
    changed, counts = compiled(copy.deepcopy(net), monkeypatch, dynamic=name == "open numbers" or None)
    x = torch.randn(2, 3, 18, 18, dtype=next(net.parameters()).dtype)
    found, expected = (
        (y := m(x), torch.autograd.grad(y.sin().sum(), list(m.parameters()), allow_unused=True)) for m in (changed, net)
    )
    torch.testing.assert_close(found, expected)
    assert counts == [int(name in FOUND)]
    torch.testing.assert_close(list(changed.state_dict().values()), list(net.state_dict().values()))


def test_parts_have_backward_passes_and_steps_of_their_own(monkeypatch):
    monkeypatch.setattr(spectral, "unwatched", lambda *given: False)  # for PyTorch's operators
    weights = [torch.randn(4, 8, requires_grad=True) for _ in range(2)]
    vectors = [[F.normalize(torch.randn(n), dim=0) for _ in weights] for n in (4, 8)]
    expected = (one := weights[1].detach()) / spectral._sigma(one, *(group[1].clone() for group in vectors), True, 1e-12)
    first, second = spectral._recorded(ops.spectral_norm, weights, *vectors, True, 1e-12)
    torch.testing.assert_close(second.detach(), expected)
    first.sum().backward()
    with torch.no_grad():
        weights[0] -= weights[0].grad
    second.sum().backward()
    sigma, both = (weights[1] / second).detach()[0, 0], vectors[0][1][:, None] * vectors[1][1]
    torch.testing.assert_close(weights[1].grad, (1 - second.detach().sum() * both) / sigma)
    with pytest.raises(RuntimeError, match="modified in place since they were normalized: got versions .1., expected .0."):
        first.sum().backward()


def given(dtype, last, shapes=SHAPES):
    """Weights and vectors."""
    weights = [(on_gpu(shape, dtype, last) / shape[0] ** 0.5).requires_grad_() for shape in shapes]
    us = [F.normalize(torch.randn(len(weight), device="cuda"), dim=0).to(dtype) for weight in weights]
    return weights, us, [F.normalize(torch.randn(w[0].numel(), device="cuda"), dim=0).to(dtype) for w in weights]


@pytest.mark.parametrize("u_first", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", ALLOWED)
def test_numbers(dtype, last, u_first, gpu):  # noqa: F811
    """Against float64: results, vectors, gradients, also those that have derivatives, for more weights than a launch takes."""
    torch.manual_seed(1)
    weights, us, vs = given(dtype, last)
    exact = [[t.detach().double().requires_grad_(t.requires_grad) for t in group] for group in (weights, us, vs)]
    expected = [tensors[0] / spectral._sigma(*tensors, u_first, 1e-12) for tensors in zip(*exact, strict=True)]
    versions = [t._version for t in (*us, *vs)]
    found = spectral.normalized(weights, us, vs, u_first, 1e-12)
    grads = [torch.randn_like(t) for t in found]
    grads[0] = torch.randn(len(grads[0].flatten()) + 1, device="cuda").to(dtype)[1:].view_as(grads[0])  # at an odd address
    derivatives = torch.autograd.grad(expected, exact[0], [grad.double() for grad in grads])
    first, again = (torch.autograd.grad(found, weights, grads, retain_graph=True, create_graph=more) for more in (False, True))
    assert all(now > before for now, before in zip((t._version for t in (*us, *vs)), versions, strict=True))
    assert [t.stride() for t in (*found, *first)] == [t.stride() for t in weights] * 2
    both = zip((*found, *us, *vs, *first, *again), (*expected, *exact[1], *exact[2], *derivatives, *derivatives), strict=True)
    for got, right in both:
        assert got.dtype == dtype and (got - right).abs().max() < ALLOWED[dtype] * right.abs().max()


@pytest.mark.parametrize("last", [False, True])
def test_second_derivatives_and_transforms(last, gpu):  # noqa: F811
    tensors, found = given(torch.float32, last, [(8, 4, 3, 3)]), []
    for run in (spectral.normalized, lambda w, u, v, *kind: [w[0] / spectral._sigma(w[0], u[0], v[0], *kind)]):
        weights, us, vs = ([t.detach().clone().requires_grad_(t.requires_grad) for t in group] for group in tensors)
        (grad,) = torch.autograd.grad(run(weights, us, vs, True, 1e-12)[0].sin().sum(), weights, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), weights)[0])
        found.append(torch.func.grad(lambda w, *given, run=run: run([w], *given, True, 1e-12)[0].sin().sum())(weights[0], us, vs))
    torch.testing.assert_close(found[:2], found[2:], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("last", [False, True])
def test_operators_change_what_they_say(last):
    weights = [torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)]
    given = weights, [torch.randn(4)], [torch.randn(12)]
    checks = {"test_utils": ("test_schema", "test_faketensor")}
    torch.library.opcheck(ops.spectral_norm.default, (*given, [weights[0].clone()], True, 1e-12), **checks)
    torch.library.opcheck(ops.spectral_norm_adjoint.default, (weights, weights, torch.randn(17), [0]), **checks)


def test_a_compiled_step(gpu, monkeypatch):  # noqa: F811
    """Under inductor two operators of the library do all weights, also such at odd addresses."""
    original, ran = network().cuda().to(memory_format=torch.channels_last), []
    for name in ("_launch", "_adjoint"):
        run = getattr(spectral, name)
        monkeypatch.setattr(spectral, name, lambda *given, name=name, run=run: [ran.append(name), run(*given)][1])
    changed = copy.deepcopy(original)
    net = torch.compile(changed, backend=Backend(inner=torch._dynamo.lookup_backend("inductor")))
    for step in range(4):
        if step == 2:
            for module in (original, changed):
                vector = module[3].parametrizations.weight[0]._u
                vector.set_(torch.cat([vector[:1], vector])[1:])
        x = torch.randn(2, 3, 18, 18, device="cuda")
        runs = (original, original), (net, changed)
        both = (torch.autograd.grad(run(x).square().sum(), list(module.parameters())) for run, module in runs)
        torch.testing.assert_close(*both, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(original.state_dict(), changed.state_dict(), rtol=1e-4, atol=1e-5)
    assert ran[:4] == ["_launch", "_adjoint"] * 2


def test_zeros_weights_that_nothing_reads_and_a_graph(gpu):  # noqa: F811
    """Weights of zeros give NaN, as PyTorch's; a CUDA graph iterates in each replay; autocast changes nothing."""
    weights, us, vs = given(torch.float32, False, [(8, 4), (8, 8)])
    with torch.no_grad():
        weights[0].zero_()
    before = [t.clone() for t in (*us, *vs)]
    found = spectral.normalized(weights, us, vs, True, 1e-12)
    for grad, is_read in zip(torch.autograd.grad(found[1].sum(), weights, allow_unused=True), (False, True), strict=True):
        assert (grad is not None) == is_read
    with torch.autocast("cuda", torch.bfloat16):
        again = spectral.normalized(weights, before[:2], before[2:], True, 1e-12)
    assert torch.equal(again[1], found[1]) and found[0].isnan().all() and not us[0].any() and not vs[0].any()
    found, replay = replayed(lambda: spectral.normalized(weights, us, vs, True, 1e-12))
    for _ in range(50):
        replay()
    torch.testing.assert_close(torch.linalg.matrix_norm(found[1], 2), torch.ones((), device="cuda"), rtol=1e-3, atol=0)
