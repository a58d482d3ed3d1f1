# SPDX-License-Identifier: Apache-2.0
"""Random problems of convolution and average pooling for PyTorch, and what tests do without it or without a GPU."""

import contextlib
import gc
import importlib.util
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.gpu import skip_or_fail

ROUNDS = max(1, round(float(os.environ.get("CONVPOOL_TEST_ROUNDS", "1"))))
"""How many times as many random cases as usual are tested."""


def require_torch() -> Any:
    """PyTorch.  The calling module is skipped without it, or fails where REQUIRE_TORCH=1."""
    if importlib.util.find_spec("torch") is None:
        if os.environ.get("REQUIRE_TORCH") == "1":
            pytest.fail("REQUIRE_TORCH=1, but PyTorch is not installed")
        pytest.skip("no PyTorch: make test-torch", allow_module_level=True)
    import torch
    import torch._dynamo.guards

    torch.set_num_threads(1)  # of layers as small as those of tests more would wait for one another
    # TorchDynamo times its guards for a log, behind a flush of all caches: a fifth of a small module's capture.
    torch._dynamo.guards.profile_guard_manager = lambda *given: 0.0
    gc.freeze()  # what is imported stays
    gc.set_threshold(700, 10, 50)
    return torch


def require_cuda() -> None:
    """Skip or fail the calling test where PyTorch has no GPU."""
    torch = require_torch()
    if not torch.cuda.is_available():
        skip_or_fail("PyTorch has no GPU")


@contextlib.contextmanager
def calls_of(operator: Any) -> Iterator[list[tuple]]:
    """The arguments of every call of an operator of PyTorch's in the context."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found: list[tuple] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is operator:
                found.append(args)
            return func(*args, **(kwargs or {}))

    with Seen():
        yield found


def drawn(*shape: int, grad: bool = True, dtype: Any = None, last: bool = False) -> Any:
    """Random numbers by the shape, of float64 unless another type is given.  last: with the channels last in memory."""
    torch = require_torch()
    t = torch.randn(shape, dtype=dtype or torch.float64, generator=torch.Generator().manual_seed(len(shape) + shape[0]))
    return (t.contiguous(memory_format=torch.channels_last) if last else t).requires_grad_(grad)


def nodes_of(y: Any) -> list[str]:
    """Return the names of the nodes that a backward pass runs."""
    seen, todo = set(), [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [item for item, _ in node.next_functions]
    return [node.name() for node in seen]


def results(module: Any, x: Any, order: int = 1) -> list[Any]:
    """Return the output, the derivatives that there are up to an order, from the same random numbers, and the buffers then."""
    torch = require_torch()
    torch.manual_seed(1)  # for Dropout
    x = x.clone().requires_grad_(order > 0)
    wanted = [t for t in (x, *module.parameters()) if t.requires_grad]
    with torch.set_grad_enabled(order > 0):
        found = [y := module(x)]
        for _ in range(order):
            if y is None or not y.requires_grad:
                break
            loss = y.double().square().sum() + y.double().sum()
            made = torch.autograd.grad(loss, wanted, create_graph=order > 1, allow_unused=True)
            found += [gradient for gradient in made if gradient is not None]
            y = made[0]
    return [*found, *module.buffers()]


@dataclass(frozen=True)
class Layer:
    """Arguments of a convolution and of the pooling behind it; every size is small."""

    rank: int
    x_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    bias: bool
    conv: dict[str, Any]
    pool: dict[str, Any]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of input, weight and bias, if there is one."""
        return [self.x_shape, self.weight_shape, *([self.weight_shape[:1]] if self.bias else [])]

    def original(self, functional: Any, x: Any, weight: Any, bias: Any) -> Any:
        """PyTorch's two operators; `functional` is torch.nn.functional."""
        conv, pool = getattr(functional, f"conv{self.rank}d"), getattr(functional, f"avg_pool{self.rank}d")
        sizes = (self.pool["pool_size"], self.pool["pool_stride"], self.pool["pool_padding"])
        return pool(conv(x, weight, bias, **self.conv), *sizes, ceil_mode=self.pool["ceil_mode"])


def random_layer(seed: int) -> Layer:
    """A layer of 1 to 3 axes with at least one output, by the seed."""
    draw = random.Random(seed)
    while True:
        rank = draw.choice((1, 1, 2, 2, 2, 3))

        def each(*values: int, rank: int = rank) -> tuple[int, ...]:
            return tuple(draw.choice(values) for _ in range(rank))

        groups, per_group, outputs = draw.choice((1, 1, 1, 2, 3)), draw.choice((1, 2)), draw.choice((1, 2))
        kernel, stride, dilation, padding = each(1, 2, 3), each(1, 1, 2), each(1, 1, 2), each(0, 1, 2)
        pool, pool_stride = each(1, 2, 2, 3), each(1, 2, 2, 3)
        pool_padding = each(0, 1) if draw.random() < 0.2 else (0,) * rank
        size = each(*range(3, 7 if rank > 1 else 12))
        axes = zip(size, padding, dilation, kernel, stride, strict=True)
        out = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in axes]
        pooled = [n + 2 * b >= p and 2 * b <= p for n, b, p in zip(out, pool_padding, pool, strict=True)]
        if min(out) < 1 or not all(pooled):
            continue
        conv = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        pooling = {"pool_size": pool, "pool_stride": pool_stride, "pool_padding": pool_padding, "ceil_mode": draw.random() < 0.2}
        shapes = (draw.choice((1, 2)), groups * per_group, *size), (groups * outputs, per_group, *kernel)
        return Layer(rank, *shapes, draw.random() < 0.7, conv, pooling)


def pools_first(layer: Layer) -> bool:
    """Return True if convpool does the pooling first, and not PyTorch's two operators."""
    from convpool.torch.modules import _describe

    pool = layer.pool.values()
    return _describe(layer.rank, layer.weight_shape[2:], *layer.conv.values(), *pool, True, layer.bias)[2] is not None


def pool_seeds(count: int) -> list[int]:
    """Return seeds of layers whose pooling comes first, of so many."""
    return [seed for seed in range(count) if pools_first(random_layer(seed))]


def random_upsampling(seed: int, rank: int) -> tuple:
    """Return x, weight, bias (or None), scales and pads of an upsampling and a convolution behind it, by the seed."""
    torch, rng = require_torch(), random.Random(seed)
    generator, last = torch.Generator().manual_seed(seed), {2: torch.channels_last, 3: torch.channels_last_3d}
    n, c, m = rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 4)
    kernel = [rng.randint(1, 4 if rank < 3 else 3) for _ in range(rank)]
    scale = tuple(rng.randint(1, 4 if rank < 3 else 2) for _ in range(rank - 1)) + (rng.randint(2, 4),)
    pads = tuple(rng.randint(0, k - 1) for k in kernel * 2)
    size = [rng.randint(max(2, k - p), 5) for k, p in zip(kernel, pads, strict=False)]
    x, weight, bias = (torch.randn(s, dtype=torch.float64, generator=generator) for s in ((n, c, *size), (m, c, *kernel), (m,)))
    if rank > 1 and rng.random() < 0.5:
        x = x.contiguous(memory_format=last[rank])
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_() if rng.random() < 0.7 else None, scale, pads
