# SPDX-License-Identifier: Apache-2.0
"""A module is traced while other threads run PyTorch: they see nothing of it, and the trace nothing of them."""

from __future__ import annotations

import threading

from tests.support.torch import require_torch

torch = require_torch()

from torch import nn  # noqa: E402

from convpool.torch import optimize  # noqa: E402


class Asks(torch.autograd.Function):
    """Doubles a tensor."""

    @staticmethod
    def forward(context, x):
        return 2 * x if isinstance(x, torch.Tensor) else None

    @staticmethod
    def backward(context, gradient):
        return 2 * gradient


class Meanwhile(nn.Module):
    """A pair whose forward has something done in another thread."""

    def __init__(self, work):
        super().__init__()
        self.pair = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.AvgPool2d(2))
        self.work = work

    def forward(self, x):
        """The mean of the pair's convolution, once the work is done."""
        self.work(self)
        return self.pair(x)


def in_a_thread(work):
    """Return what a function returns, or raises, in a thread of its own."""
    found = []

    def run():
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_other_threads_run_as_always_during_a_trace():
    other, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval(), torch.randn(2, 3, 8, 8)
    expected, seen = other(x).detach(), []

    def work(module):
        def calls():
            with torch.no_grad():
                return other(x), Asks.apply(x), module.pair[0].weight, module.pair(torch.ones(1, 16, 16, 16))

        seen.append(in_a_thread(calls))

    module = Meanwhile(work).eval()
    changed, report = optimize(module, torch.randn(1, 16, 16, 16))
    assert [site.status for site in report.sites] == ["rewritten"], report.sites
    assert seen
    for y, doubled, weight, own in seen:
        assert torch.equal(y, expected) and torch.equal(doubled, 2 * x)
        assert weight is module.pair[0].weight
        assert torch.equal(own, module.pair(torch.ones(1, 16, 16, 16)))
    assert torch.allclose(changed(torch.ones(1, 16, 16, 16)), own, atol=1e-6)


def test_a_trace_waits_for_the_one_before():
    call, enter = nn.Module.__call__, torch.no_grad.__enter__
    second_began, overlaps, threads, reports = threading.Event(), [], [], []

    def second(module):
        second_began.set()

    def first(module):
        if threads:
            return
        other = Meanwhile(second).eval()
        threads.append(threading.Thread(target=lambda: reports.append(optimize(other, torch.randn(1, 16, 16, 16))[1])))
        threads[0].start()
        overlaps.append(second_began.wait(0.2))  # it would have begun by then

    _, report = optimize(Meanwhile(first).eval(), torch.randn(1, 16, 16, 16))
    threads[0].join()
    assert overlaps == [False] and second_began.is_set()
    assert [[site.status for site in found.sites] for found in (report, *reports)] == [["rewritten"], ["rewritten"]]
    assert nn.Module.__call__ is call and torch.no_grad.__enter__ is enter
    assert isinstance.__module__ == "builtins"


class Scaled(Meanwhile):
    """A pair with an argument that is no tensor."""

    def forward(self, x, scale=1.0):
        """The mean of the pair's convolution, scaled."""
        return super().forward(x) * scale


def test_another_thread_may_call_the_module_that_is_traced():
    module, threads, found = Scaled(lambda module: None).eval(), [], []
    changed, _ = optimize(module, torch.randn(1, 16, 16, 16))
    x = torch.ones(1, 16, 8, 8)

    def call(scale):
        try:
            found.append(changed(x, scale=scale))
        except Exception as error:
            found.append(error)

    def work(_):
        if not threads:
            threads.append(threading.Thread(target=call, args=(3.0,)))
            threads[0].start()
            threads[0].join(0.2)

    changed.work = work
    y = changed(x)
    threads[0].join()
    assert isinstance(found[0], torch.Tensor), found[0]
    torch.testing.assert_close(y, module(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[0], module(x, scale=3.0), rtol=1e-5, atol=1e-5)
