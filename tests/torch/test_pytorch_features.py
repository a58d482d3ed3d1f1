# SPDX-License-Identifier: Apache-2.0
"""Rewritten modules under what PyTorch offers around modules: each gives what the original gives."""

import copy
import threading

import pytest

from tests.support.torch import require_torch

torch = require_torch()
from torch import nn  # noqa: E402
from torch.func import functional_call, grad, jvp, stack_module_state, vmap  # noqa: E402
from torch.nn.utils import prune  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from convpool.torch import optimize  # noqa: E402
from models.torch_discriminators import SNGAN  # noqa: E402

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
    original = SNGAN(8, (1, 2, 4), spectral_norm=False).double()
    optimized, report = optimize(copy.deepcopy(original), x)
    assert report.summary.rewritten == 5
    return original, optimized


def assert_same_gradients(modules, loss_of):
    for module in modules:
        loss_of(module).backward()
    for a, b in zip(*(module.parameters() for module in modules), strict=True):
        torch.testing.assert_close(a.grad, b.grad, **EXACT)


def test_functional_call_and_its_gradient(x):
    modules = both(x)
    weights = {name: 1.1 * weight.detach() for name, weight in modules[0].named_parameters()}
    got, expected = (grad(lambda w, m=m: functional_call(m, w, (x,)).square().sum())(weights) for m in modules)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, **EXACT)


def test_ensembles_of_stacked_modules(x):
    pairs = [both(x, seed) for seed in range(3)]
    state = stack_module_state([optimized for _, optimized in pairs])
    base = copy.deepcopy(pairs[0][1]).to("meta")
    y = vmap(lambda parameters, buffers: functional_call(base, (parameters, buffers), (x,)))(*state)
    torch.testing.assert_close(y, torch.stack([original(x) for original, _ in pairs]), **EXACT)


def test_products_of_the_hessian(x):
    tangent = torch.randn_like(x)
    got, expected = (jvp(grad(lambda z, m=m: m(z).square().sum()), (x,), (tangent,))[1] for m in both(x))
    torch.testing.assert_close(got, expected, **EXACT)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_activations(x, reentrant):
    x.requires_grad_()
    assert_same_gradients(both(x), lambda module: checkpoint(module, x, use_reentrant=reentrant).square().sum())


@pytest.mark.parametrize("keep", [lambda f, x: checkpoint(f, x, use_reentrant=False), saved_on_cpu], ids=["checkpoint", "cpu"])
def test_checkpoints_inside_of_forward(x, keep):
    """DenseNets save memory so: the rewritten module keeps no activations either."""

    class Saving(SNGAN):
        def forward(self, x):
            return keep(super().forward, x)

    found = []
    for change in (False, True):
        torch.manual_seed(0)
        module, seen = Saving(8, (1, 2, 4), spectral_norm=False).double(), []
        if change:
            module, report = optimize(module, x)
            assert report.summary.rewritten > 0  # parts of it
        with torch.autograd.graph.saved_tensors_hooks(lambda t, seen=seen: seen.append(t.data_ptr()) or t, lambda t: t):
            module(x.clone().requires_grad_())
        parameters = {parameter.data_ptr() for parameter in module.parameters()}  # they are there anyway
        found.append(len([place for place in seen if place not in parameters]))
    assert found[1] <= found[0]


def test_a_weight_changed_between_forward_and_backward_is_an_error(x):
    module = both(x)[1]
    loss = module(x).square().sum()
    with torch.no_grad():
        module.blocks[1].conv2.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_frozen_and_trained_in_turn(x):
    """A GAN's generator steps freeze its discriminator."""
    original, optimized = both(x)
    for trains in (True, False, True, False):
        gradients = []
        for module in (original, optimized):
            module.requires_grad_(trains)
            image = x.clone().requires_grad_()
            gradients.append(torch.autograd.grad(module(image).sum(), image)[0])
        torch.testing.assert_close(*gradients, **EXACT)


def test_pruned_weights(x):
    modules = both(x)
    modules[1](x)
    for module in modules:
        for part in module.modules():
            if isinstance(part, nn.Conv2d):
                prune.l1_unstructured(part, "weight", 0.3)
    torch.testing.assert_close(modules[1](x), modules[0](x), **EXACT)
    assert_same_gradients(modules, lambda module: module(x).square().sum())


def test_threads_that_share_a_module(x):
    original, optimized = both(x)
    batches, found = [x[:1], x[:2], x[:3], x] * 2, {}

    def call(number):
        found[number] = optimized(batches[number])

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, batch in enumerate(batches):
        torch.testing.assert_close(found[number], original(batch), **EXACT)


def test_fully_sharded(x, tmp_path):
    """FSDP2 puts a class of its own in front of the module's."""
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("no torch.distributed")
    from torch.distributed.fsdp import fully_shard

    original, changed = both(x)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        fully_shard(changed, mesh=mesh)
        for module in (original, changed):
            module(x).square().sum().backward()
        for mine, theirs in zip(changed.parameters(), original.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, **EXACT)
    finally:
        distributed.destroy_process_group()
