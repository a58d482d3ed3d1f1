# SPDX-License-Identifier: Apache-2.0
"""Real networks, original and optimized: outputs, gradients, second gradients, inference, checkpoints, 20 steps of training.

What may differ is derived from PyTorch itself: the original with two orders of summation (contiguous and channels last) against
the original in float64.  The optimized one may be four times as far from float64 as the worse of the two, or four units of
rounding where both happen to be nearer.  Random modules in float64 behind them, through changes of mode, parameters and batch.
"""

import collections
import copy
import functools
import itertools

import pytest

from tests.support.torch import ROUNDS, nodes_of, require_torch, results

torch = require_torch()
import torch.nn.functional as F  # noqa: E402

from convpool.torch import optimize, upsampling  # noqa: E402
from tests.support.torch_modules import RandomModules  # noqa: E402
from tests.support.torch_networks import NETWORKS, channels_last, made  # noqa: E402

TIMES, STEPS = 4, 20
KINDS = [("cpu", torch.float32), *(("cuda", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16))]


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    monkeypatch.setattr(upsampling, "_pays", lambda *given: True)  # the small maps here too
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def everything(module, x):
    """Output, gradients of a loss, and gradients of the squared norm of the gradient at x, by kind; on a CPU those without it."""
    x, parameters = x.clone().requires_grad_(), list(module.parameters())
    y = module(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    loss, penalty = F.softplus(-y).mean(), slope.square().flatten(1).sum(1).mean()
    first = torch.autograd.grad(loss, (x, *parameters), retain_graph=True, allow_unused=True)
    second = torch.autograd.grad(penalty, parameters, allow_unused=True)
    kinds = {"outputs": [y, loss], "gradients": [slope, *first], "second gradients": [penalty, *second]}
    if x.device.type == "cpu":
        y = module(x.detach())
        kinds["without a penalty"] = [y, *torch.autograd.grad(y.square().mean(), parameters, allow_unused=True)]
    zero = torch.zeros(1, dtype=torch.float64)  # of what does not enter
    return {kind: [zero if t is None else t.detach().double().cpu() for t in tensors] for kind, tensors in kinds.items()}


def inference(module, x):
    """The output without gradients."""
    with torch.no_grad():
        return {"outputs": [module(x).double().cpu()]}


def distance(found, reference):
    """Largest difference of any tensor of a kind, each relative to its largest value, or a millionth of the kind's; or NaN."""
    sizes = [float(t.abs().max()) for t in reference]
    scales = (max(size, 1e-6 * max(sizes)) or 1 for size in sizes)
    differences = [float((a - b).abs().max()) / scale for a, b, scale in zip(found, reference, scales, strict=True)]
    return float(torch.tensor(differences, dtype=torch.float64).max())


DEEP = {"SNGAN 64x64": 4, "SNGAN 128x128": 4, "DenseNet-121": 2}
LIKE_OTHERS = ("projection 64x64", "WGAN-GP 32x32", "IGEBM 32x32", "StyleGAN 64x64", "GAN stability 32x32")
ALL = [
    (name, *kind, of)
    for name, kind, of in itertools.product(NETWORKS, KINDS, (everything, inference))
    if (name not in DEEP or kind in KINDS[1 : DEEP[name]]) and (kind, of, name in LIKE_OTHERS) != (KINDS[0], inference, True)
]
"""Each network on each device and in each type; the deepest, whose blocks are those of others, on a GPU, DenseNet-121 in one.
On a CPU those without normalizations, or with another one's, run in training alone."""


@functools.cache
def in_training(name, size):
    """A module on a CPU, an input of at most this size, the optimized module, which has the same tensors, and the report."""
    module, x = made(name)
    return module, x[..., :size, :size], *optimize(module, x[..., :size, :size])


@pytest.mark.parametrize(("name", "device", "dtype", "of"), ALL)
def test_outputs_and_derivatives(name, device, dtype, of):
    trains = (device, of) == ("cpu", everything)
    module, x, *optimized = in_training(name, NETWORKS[name].shape[-1]) if trains else made(name, device, dtype)
    if of is inference:
        for _ in range(2):  # running means, and the vectors of spectral norm
            of(module, x)
        module.eval()
    exact = of(copy.deepcopy(module).double(), x.double())
    own = [of(copy.deepcopy(module), x), of(*channels_last(module, x))]
    with torch.set_grad_enabled(of is everything):
        changed, report = optimized or optimize(module, x)
    assert report.summary.rewritten == NETWORKS[name].pairs, [(s.conv, s.status, s.reason) for s in report.sites]
    assert len(report.plans) == 1  # one graph
    kept = [[(key, id(t)) for key, t in net.state_dict(keep_vars=True).items()] for net in (module, changed)]
    assert kept[0] == kept[1]  # checkpoints load both ways
    found = of(changed, x)
    for kind, reference in exact.items():
        # Second gradients of a deep network in float16 pass its range in PyTorch too: of these there is no rounding to compare.
        held = [all(bool(result[kind][i].isfinite().all()) for result in own) for i in range(len(reference))]
        assert any(held) and (all(held) or dtype == torch.float16), kind
        compared = (reference, found[kind], *(result[kind] for result in own))
        kept = [list(itertools.compress(tensors, held)) for tensors in compared]
        bound = max(TIMES * max(distance(tensors, kept[0]) for tensors in kept[2:]), 4 * torch.finfo(dtype).eps)
        assert distance(kept[1], kept[0]) <= bound, kind
    # Without a penalty a CPU runs no Python in the backward pass.
    assert device == "cuda" or of is inference or not any("_Pair" in node for node in nodes_of(changed(x)))


# ---- in training ----

OF_ALL_KINDS = ("SNGAN 32x32", "WGAN-GP 64x64", "StarGAN v2 64x64", "DVD-GAN", "LeNet-5", "DenseNet of short blocks")


def losses(module, x, seed):
    """The losses of 20 steps on noise, after which the module is as before: a copy's graphs would be captured anew."""
    before = copy.deepcopy(module.state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(STEPS):
        batch = x + torch.randn(x.shape, generator=generator).to(x.device)
        optimizer.zero_grad(set_to_none=True)
        loss = F.softplus(-module(batch)).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach().double().cpu())
    module.load_state_dict(before)
    return torch.stack(found)


TRAINED = [("cpu", name) for name in OF_ALL_KINDS] + [("cuda", name) for name in NETWORKS if name != "DenseNet-121"]


@pytest.mark.parametrize("device, name", TRAINED)
def test_training_follows_the_original(name, device):
    size = min(NETWORKS[name].trained, NETWORKS[name].shape[-1])
    if device == "cpu":
        module, x, changed, _ = in_training(name, size)
    else:
        module, x = made(name, device)
        changed, _ = optimize(copy.deepcopy(module), x := x[..., :size, :size])
    # A ReLU may pass zero by a rounding, which moves the losses by 1e-5 or not at all.  On a GPU runs differ, so one more counts.
    own_orders = [channels_last(module, x)] + [(module, torch.nextafter(x, x + 1))] * (device == "cuda")
    own_far, far = 0.0, 0.0
    for seed in (29, 30, 31):
        own = losses(module, x, seed)
        assert own[0] != own[-1]
        *others, found = [losses(*run, seed) for run in (*own_orders, (changed, x))]
        assert found.isfinite().all()
        own_far = max(own_far, *(float((other - own).abs().max() / own.abs().max()) for other in others))
        far = max(far, float((found - own).abs().max() / own.abs().max()))
    assert far <= max(TIMES * own_far, STEPS * 4 * torch.finfo(torch.float32).eps)


# ---- random modules ----

FIRST, SEEDS, CALLS, LEAST_PAIRS, LEAST_UPSAMPLED = 20, 15, 3, 8, 2


def test_random_modules_keep_their_results():
    rules = collections.Counter()
    for seed in range(FIRST, FIRST + SEEDS * ROUNDS):
        generator = RandomModules(seed)
        rng, original = generator.rng, generator.module()
        x = torch.randn(2, generator.inputs, *[rng.choice((12, 14, 15))] * generator.rank, dtype=torch.float64)
        try:
            with torch.no_grad():
                copy.deepcopy(original).eval()(x.clone())
        except RuntimeError:  # smaller than a window
            continue
        rewritten, report = optimize(copy.deepcopy(original), *rng.choice(((), (x,))))
        for call in range(CALLS):
            order, training = rng.choice((0, 1, 2)), rng.choice((True, False))
            given = x if call == 0 else torch.randn(rng.choice((2, 3)), *x.shape[1:], dtype=x.dtype)
            for module in (original, rewritten):
                module.train(training)
            try:
                expected = results(original, given, order)
            except (RuntimeError, ValueError):  # BatchNorm of one value
                continue
            found = results(rewritten, given, order)
            largest = max(float(tensor.detach().abs().max()) for tensor in expected)  # BatchNorms magnify
            torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7 * largest, msg=lambda text: f"{seed=}: {text}")  # noqa: B023
            with torch.no_grad():
                for parameter in (*original.parameters(), *rewritten.parameters()):
                    parameter.mul_(0.9)
        rules.update(site.rule for site in report.sites if site.status == "rewritten")
    assert rules["pool_first"] >= LEAST_PAIRS and rules["upsample_last"] >= LEAST_UPSAMPLED, rules
