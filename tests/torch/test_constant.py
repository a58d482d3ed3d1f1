# SPDX-License-Identifier: Apache-2.0
"""The values that `constant_weights` keeps, with a plan that only counts, and the addresses that plans get."""

import struct
from types import SimpleNamespace

import pytest

from tests.support.torch import require_torch

torch = require_torch()

from convpool.cuda import library  # noqa: E402
from convpool.torch import calls, constant_weights  # noqa: E402


def call(launches):
    """A kind of call whose launch notes its flags."""
    made = object.__new__(calls.Call)
    made.constant = SimpleNamespace(
        prepared_bytes=8,
        workspace_bytes=8,
        launch_raw=lambda addresses, space, size, stream, flags, *prepared: launches.append(flags),
    )
    made.formats, made.device = (torch.contiguous_format,) * 2, torch.device("cpu")
    made.y_shape, made.y_strides = (1, 1, 1, 1), (1, 1, 1, 1)
    made.copies_others = made.copies_weight = False
    made.handle, made.space = None, 0
    made.launch = lambda handle, packed, stream: launches.append("each time") or 0
    return made


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(calls, "raw_stream", lambda index: 0)


def test_weights_are_made_for_one_kind_of_call(no_gpu):
    """Also where that kind is gone and another one has its address."""
    x, weight, launches = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3), []
    with constant_weights():
        kind = call(launches)
        for _ in range(2):
            kind(x, weight, None)
        assert launches == [0, library.WEIGHTS_PREPARED]
        for _ in range(20):
            kind = None
            kind = call(launches)
            kind(x, weight, None)
    assert launches[2:] == [0] * 20


@pytest.mark.parametrize("last", [False, True])
def test_weights_that_every_call_computes_are_not_kept(no_gpu, last):
    x, weight, launches = torch.ones(1, 1, 4, 4), torch.ones(1, 2, 3, 3), []
    if last:  # the library's own order, which needs no copy
        weight = weight.to(memory_format=torch.channels_last)
    with constant_weights():
        kind = call(launches)
        for _ in range(4):
            kind(x, weight * 1, None)
            assert not calls.current()
        kind(x, weight, None)
    assert launches == [0, *["each time"] * 4]
    with constant_weights():  # which knows nothing of the one before
        for _ in range(3):
            kind(x, weight, None)
    assert launches[5:] == [0, library.WEIGHTS_PREPARED, library.WEIGHTS_PREPARED]


def test_kernels_get_addresses_that_are_multiples_of_16(no_gpu):
    kind, seen = call([]), []
    kind.launch = lambda handle, packed, stream: seen.append(struct.unpack("@IIPPPPPPNPPPNP", packed)[2:5]) or 0
    kind(torch.ones(17)[1:].view(1, 1, 4, 4), torch.ones(10)[1:].view(1, 1, 3, 3), torch.ones(2)[1:])
    assert len(seen) == 1 and all(address and address % 16 == 0 for address in seen[0])
