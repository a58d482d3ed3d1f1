# SPDX-License-Identifier: Apache-2.0
"""The argument accumulation: which calls of the operator have it, and what the library is asked.  Launches of plans that only
count: what `constant_weights` keeps, and the addresses."""

import copy
import pickle
import struct
from types import SimpleNamespace

import pytest

from tests.support.torch import require_torch

torch = require_torch()
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import convpool.torch  # noqa: E402
from convpool.algebra.geometry import ConvSpec  # noqa: E402
from convpool.cuda import library  # noqa: E402
from convpool.errors import OptionError  # noqa: E402
from convpool.ir import schema  # noqa: E402
from convpool.torch import calls, compile_options, constant_weights, conv_avg_pool2d, explain, export_onnx, optimize  # noqa: E402
from convpool.torch.functional import pooled_first  # noqa: E402

GIVEN = [("default", 0), ("packed", 1)]
FIRST = (ConvSpec((3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1), (2, 2), (2, 2), (0, 0))
"""A 3x3 convolution padded by 1 and a pooling of 2x2, for `pooled_first`."""


def asked(run) -> list[int]:
    """Return the accumulation of every pooled_conv in `run`; PyTorch leaves out what is the default."""
    found = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.convpool.pooled_conv.default:
                found.append(args[13] if len(args) > 13 else 0)
            return func(*args, **(kwargs or {}))

    with Seen():
        run()
    return found


def network() -> nn.Module:
    """Two pairs, one with an activation behind it."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.AvgPool2d(2), nn.Tanh(), nn.Conv2d(16, 16, 3, padding=1), nn.AvgPool2d(2)]
    return nn.Sequential(*layers).eval()


@pytest.mark.parametrize(("accumulation", "number"), GIVEN)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_functions_and_modules_hand_it_on(rank, accumulation, number):
    x, w = torch.randn(2, 3, *[8] * rank), torch.randn(4, 3, *[3] * rank)
    function = getattr(convpool.torch, f"conv_avg_pool{rank}d")
    assert asked(lambda: function(x, w, padding=1, pool_size=2, accumulation=accumulation)) == [number]
    module = getattr(convpool.torch, f"ConvAvgPool{rank}d")(3, 4, 3, padding=1, pool_size=2, accumulation=accumulation)
    for made in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert asked(lambda made=made: made(x)) == [number]


def test_a_module_tells_it_and_one_of_an_earlier_version_has_the_default():
    module = convpool.torch.ConvAvgPool2d(4, 6, 3, pool_size=2, accumulation="packed")
    assert repr(module).endswith("pool_stride=(2, 2), accumulation='packed')")
    del module.__dict__["accumulation"]
    assert asked(lambda: module(torch.randn(1, 4, 8, 8))) == [0] and "accumulation" not in repr(module)


@pytest.mark.parametrize("wrong", ["fp16", 1, None, ["packed"]])
def test_other_words_are_refused(wrong):
    x, w = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)
    for call in (
        lambda: conv_avg_pool2d(x, w, pool_size=2, accumulation=wrong),
        lambda: conv_avg_pool2d(x, w, pool_size=1, accumulation=wrong),  # where PyTorch's two operators run
        lambda: convpool.torch.ConvAvgPool2d(3, 4, 3, pool_size=2, accumulation=wrong),
        lambda: optimize(network(), accumulation=wrong),
        lambda: compile_options(accumulation=wrong),
    ):
        with pytest.raises(OptionError, match="accumulation: got .*, expected one of default, packed"):
            call()


@pytest.mark.parametrize(("accumulation", "number"), GIVEN)
@pytest.mark.parametrize("training", [False, True])
def test_whole_modules(accumulation, number, training):
    module, x = network().train(training), torch.randn(2, 3, 16, 16)
    changed, report = optimize(module, x, accumulation=accumulation)
    assert report.options["accumulation"] == accumulation and report.summary.packed == 2 * number
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(changed(x), module(x))
        other = copy.deepcopy(changed)
        torch.testing.assert_close(other(x), module(x))
    assert explain(other).summary.packed == 2 * number


def test_compiled_modules():
    module, x = network(), torch.randn(2, 3, 16, 16)
    passes = [compile_options(accumulation=accumulation)["pre_grad_custom_pass"] for accumulation, _ in GIVEN]
    assert passes[0].uuid() != passes[1].uuid()  # inductor keeps the graphs apart

    def backend(graph, example):
        passes[1](graph.graph)
        graph.recompile()
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, backend=backend)(x), module(x))
    assert [(report.options["accumulation"], report.summary.packed) for report in passes[1].reports] == [("packed", 2)]


@pytest.mark.parametrize(("accumulation", "number"), GIVEN)
def test_exported_models_have_it(accumulation, number):
    pytest.importorskip("onnxscript")
    x = torch.randn(2, 3, 16, 16)
    changed, _ = optimize(network(), x, accumulation=accumulation)
    model = export_onnx(changed, (x,), verbose=False)
    nodes = [node for node in model.graph.node if schema.is_operator(node)]
    assert [schema.accumulation_of(node) for node in nodes] == [number, number]


@pytest.mark.parametrize(("accumulation", "number"), GIVEN)
def test_the_library_is_asked_for_it(accumulation, number):
    geometry = pooled_first(*FIRST, False, accumulation)
    assert geometry[-1] == number
    x, w = torch.empty(2, 16, 8, 8, dtype=torch.float16), torch.empty(8, 16, 3, 3, dtype=torch.float16)
    problem = calls.problem_of((x, w, None), geometry, True, True)
    assert problem.accumulation == accumulation and problem.struct.accumulation == number


# ---- launches ----


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
