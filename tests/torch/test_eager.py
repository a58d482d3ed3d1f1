# SPDX-License-Identifier: Apache-2.0
"""Eager steps run, on a GPU, the original's operators or kernels, by sizes; on a CPU PyTorch's in the new order; all exact.

On a GPU PyTorch's own pooling has a wrong gradient where windows overlap in padding, with the channels last."""

import contextlib
import copy
import itertools
import math

import pytest

from tests.support.torch import nodes_of, require_torch

torch = require_torch()
import torch.nn.functional as F  # noqa: E402

import convpool.torch  # noqa: E402
from convpool.options import OptimizeOptions  # noqa: E402
from convpool.torch import eager, kernels, upsampling  # noqa: E402
from convpool.torch.backend import Captured, _rewritten_or_none, copied  # noqa: E402
from convpool.torch.pairs import convolved, pooled_conv_of  # noqa: E402
from convpool.torch.upsampling import interpolated, upsample_conv_of  # noqa: E402
from models import torch_discriminators as networks  # noqa: E402
from tests.support.torch_gpu import LAST, as_on_a_gpu  # noqa: E402
from tests.support.torch_modules import Forward  # noqa: E402

CONVS = {1: torch.nn.Conv1d, 2: torch.nn.Conv2d, 3: torch.nn.Conv3d}
POOLS = {1: torch.nn.AvgPool1d, 2: torch.nn.AvgPool2d, 3: torch.nn.AvgPool3d}
OPTIONS = {
    "padding": {"kernel_size": 3, "padding": 1},
    "one channel": {"kernel_size": 3, "padding": 1},
    "one tap": {"kernel_size": 1},
    "even kernel": {"kernel_size": 4, "padding": 1},
    "more padding": {"kernel_size": 5, "padding": 2},
    "no padding": {"kernel_size": 3},
    "pads of one side": {"kernel_size": 2, "padding": "same"},
    "groups": {"kernel_size": 3, "padding": 1, "groups": 3},
    "dilation": {"kernel_size": 3, "padding": 2, "dilation": 2},
}


@pytest.fixture(params=[False, True], ids=["operators", "nodes"])
def nodes(request, monkeypatch):
    """Let the host's time count for all or nothing: PyTorch's operators alone, or convpool's nodes wherever there are any."""
    least = 0 if request.param else 1e9
    costs = {"HOST_US": {False: 0, True: 0}, "PAIR_US": {False: least, True: least}}
    costs |= {"CONVOLUTION_US": least, "SECOND_MACS": least, "_pools_weights": lambda *given: False}
    for name, cost in costs.items():
        monkeypatch.setattr(eager, name, cost)
    return request.param


def gradients(net, x, penalty=False):
    """Return the nodes of a backward pass, and the gradients of a step by all parameters."""
    x = x.detach().requires_grad_(penalty)
    y = net(x)
    loss = y.square().sum()
    if penalty:
        loss = y.sin().sum() + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
    return nodes_of(y), torch.autograd.grad(loss, list(net.parameters()))


def optimized(net, x, device, last):
    """Return an optimized copy on a device, its input there, and how many pairs are rewritten."""
    order = LAST.get(x.dim() - 2, torch.contiguous_format) if last else torch.contiguous_format
    given = x.to(device, memory_format=order)
    changed, report = convpool.torch.optimize(copy.deepcopy(net).to(device, memory_format=order), given)
    return changed, given, report.summary.rewritten


def assert_same(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10, check_device=False)


MAPS = [(1, False), *itertools.product((2, 3), (False, True))]
EVERY = itertools.product((False, True), ("cpu", "cuda"), enumerate(OPTIONS), enumerate(MAPS))
DERIVATIVES = [
    (kind, *of, nodes, device) for nodes, device, (i, kind), (j, of) in EVERY if device == "cuda" or (i + j + nodes) % 2
]
"""Kinds and maps with both costs of nodes; on a CPU one of the two, so that each two values meet."""


@pytest.mark.parametrize("kind, rank, last, nodes, device", DERIVATIVES, indirect=["nodes", "device"])
def test_derivatives(kind, rank, last, nodes, device):
    torch.manual_seed(1)
    channels = 1 if kind == "one channel" else 6
    layers = [CONVS[rank](3, channels, 3), torch.nn.Tanh(), CONVS[rank](channels, 9, **OPTIONS[kind]), POOLS[rank](2)]
    net = torch.nn.Sequential(*layers, torch.nn.Tanh(), CONVS[rank](9, 2, 1)).double()
    x = torch.randn(2, 3, *[12] * rank, dtype=torch.float64)
    changed, given, rewritten = optimized(net, x, device, last)
    assert rewritten == 1
    on_gpu, apart = device == "cuda", rank == 3  # a box mean, then a convolution
    swaps = on_gpu and kind == "one tap"  # by PyTorch's operators, as all pairs of a CPU
    for penalty in (False, True):
        names, got = gradients(changed, given, penalty)
        by_operators = (swaps or not on_gpu) and not apart
        counts = nodes and on_gpu and not (apart or swaps), nodes and penalty and 2 * on_gpu + by_operators
        assert [names.count(f"_{name}Backward") for name in ("Pair", "Conv")] == [*counts], names
        assert_same(got, gradients(net, x, penalty)[1])


@pytest.mark.parametrize("last", [False, True])
def test_a_pooling_before_the_split_of_a_map(last, nodes, device):
    """Two convolutions of one map, whose mean is a pooling of its own in the rewritten graph."""
    torch.manual_seed(2)
    layers = {name: torch.nn.Conv2d(4, 4, 3, padding=1) for name in ("first", "second", "third")}
    net = Forward(
        lambda m, x: F.avg_pool2d(torch.cat([m.second(y := m.first(x).tanh()), y, m.third(y)], 1), 2), **layers
    ).double()
    x = torch.randn(2, 4, 12, 12, dtype=torch.float64)
    changed, given, rewritten = optimized(net, x, device, last)
    assert rewritten == 2
    names, got = gradients(changed, given)
    assert names.count("_PairBackward") == 2 * (nodes and device == "cuda")
    assert_same(got, gradients(net, x)[1])


def gaining(net, shape, pairs=None, scale=1.0, rule="pool_first"):
    """Return which convolutions gain in a step of images without numbers, if the first `pairs` are pairs, or all."""
    found = []

    def backend(graph, inputs):
        convs = [node for node in graph.graph.nodes if node.target is torch.conv2d]
        taken, with_derivatives = eager.gaining(graph.graph, dict.fromkeys([node.name for node in convs[:pairs]], rule), scale)
        found.extend(node.name in taken | with_derivatives for node in convs)
        return graph.forward

    torch._dynamo.reset()
    meta = {"device": "meta", "dtype": torch.bfloat16}
    torch.compile(net.to(**meta), backend=backend)(torch.randn(shape, **meta))
    return found


def step(channels, operators, kernel):
    """Convolutions, and operators of little work behind them."""
    convs = (torch.nn.Conv2d(*pair, kernel, padding=kernel // 2) for pair in itertools.pairwise(channels))
    behind = [torch.nn.Sigmoid() for _ in range(operators)]
    return Forward(
        lambda m, x: m.behind(m.convs(x).mean()), convs=torch.nn.Sequential(*convs), behind=torch.nn.Sequential(*behind)
    )


NODES, PENALTY, SWAPPED = {"pools": False}, {"penalty": True, "pairs": 1}, {"rule": "upsample_last", "kernel": 1}
LARGER, WIDE, THIN = SWAPPED | {"kernel": 3}, (64, 64, 64), (8, 8, 8)
GAINING = [
    # Pairs are worth their nodes where the GPU takes longest.  Those that gain most are taken first.
    (WIDE, 0, 128, NODES, [1, 1]),
    (WIDE, 200, 32, NODES, [0, 0]),
    (THIN, 0, 8, NODES, [0, 0]),
    ((8, 16, 128, 16), 0, 64, NODES, [0, 1, 0]),
    # By pooled weights they take the host no longer, also in a step that waits for it, if the maps are larger than the weights.
    (WIDE, 200, 32, {}, [1, 1]),
    (THIN, 200, 8, {}, [1, 1]),
    ((512, 512, 512), 200, 4, {}, [0, 0]),
    # Second derivatives are worth their nodes on large maps, in long steps too, and without a pooling; pooled weights are not.
    ((8, *THIN), 0, 256, PENALTY, [1, 1, 1]),
    ((8, *THIN), 200, 256, PENALTY, [1, 1, 1]),
    ((8, *THIN), 0, 8, PENALTY, [0, 0, 0]),
    # Upsampled convolutions too; those of 1x1 kernels everywhere, as they are PyTorch's operators in the other order.
    (WIDE, 0, 4, SWAPPED, [1, 1]),
    (WIDE, 0, 4, LARGER, [0, 0]),
    (WIDE, 0, 128, LARGER, [1, 1]),
]


@pytest.mark.parametrize(("channels", "operators", "size", "options", "taken"), GAINING)
def test_what_gains(channels, operators, size, options, taken, monkeypatch):
    rest = {"kernel": 3, "pools": True, "penalty": False} | options
    net, pools, penalty = step(channels, operators, rest.pop("kernel")), rest.pop("pools"), rest.pop("penalty")
    monkeypatch.setattr(eager, "may_have_penalty", lambda graph: penalty)
    if not pools:
        monkeypatch.setattr(eager, "_pools_weights", lambda *given: False)
        assert gaining(net, (4, channels[0], size, size), scale=16) == taken
        assert not any(gaining(net, (64, channels[0], size, size), 0))
    assert gaining(net, (64, channels[0], size, size), **rest) == taken


def test_a_step_of_a_network_with_normalised_weights_stays(monkeypatch):
    """SNGAN: its host time is that of the normalisation, and the GPU's far less.  1x1 shortcuts take the host no longer."""
    monkeypatch.setattr(eager, "_pools_weights", lambda *given: False)
    assert gaining(networks.sngan64(), (64, 3, 64, 64)) == [False, False, True] * 5


def ready(targets, in_steps=True, second=False):
    """A backend that runs a rewritten graph as `eager.runnable` makes it, and notes the functions that are called.

    second: with second derivatives of convpool's."""

    def backend(module, inputs):
        graph, rule_by_name = _rewritten_or_none(module.graph, OptimizeOptions(), Captured(""))
        assert rule_by_name
        convolutions = {node.name for node in module.graph.nodes if node.target is torch.conv2d and second}
        run = eager.runnable(module, graph, with_derivatives=convolutions if in_steps else None)
        targets.extend(node.target for node in run.__self__.graph.nodes if node.op == "call_function")
        return run

    torch._dynamo.reset()
    return backend


@pytest.mark.parametrize("penalty", [False, True])
@pytest.mark.parametrize("in_steps", [False, True])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("upsampled", [False, True])
def test_1x1_convolutions_change_places_by_operators_in_eager_steps(upsampled, kernel, in_steps, penalty):
    """Such a pair takes the host as long as the original's; captures, and larger kernels, are calls of convpool's."""
    found, conv = [], torch.nn.Conv2d(4, 8, kernel, padding=kernel // 2)
    layers = [torch.nn.Upsample(scale_factor=2), conv] if upsampled else [conv, torch.nn.AvgPool2d(2)]
    net = torch.nn.Sequential(*layers).to("meta")
    with contextlib.suppress(NotImplementedError, RuntimeError):  # kernels of convpool's have no meta tensors
        torch.compile(net, backend=ready(found, in_steps=in_steps))(torch.empty(2, 4, 8, 8, device="meta", requires_grad=penalty))
    operators = [torch.conv2d, interpolated] if upsampled else [F.avg_pool2d, torch.conv2d]
    assert found == (operators if kernel == 1 and in_steps else [upsample_conv_of if upsampled else pooled_conv_of])


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("kind", ["padding", "even kernel", "no padding", "one channel"])
def test_pairs_as_convolutions_by_pooled_weights(kind, second, last, device, monkeypatch):
    """An eager step on a GPU runs this for large maps."""
    monkeypatch.setattr(eager, "_operators", lambda *given: None)
    torch.manual_seed(3)
    channels, order = 1 if kind == "one channel" else 6, LAST[2] if last else torch.contiguous_format
    net = torch.nn.Sequential(CONVS[2](channels, 9, **OPTIONS[kind]), POOLS[2](2)).double()
    x = torch.randn(8, channels, 12, 12, dtype=torch.float64)
    for penalty in (False, True):
        targets = []
        changed = torch.compile(copy.deepcopy(net).to(device, memory_format=order), backend=ready(targets, second=second))
        names, got = gradients(changed, x.to(device, memory_format=order), penalty)
        assert targets == [eager._weight_means, convolved if second else torch.conv2d] and ("_ConvBackward" in names) == second
        assert_same(got, gradients(net, x, penalty)[1])


FIRST, BEHIND, ONE = [F.avg_pool2d, torch.conv2d], [torch.conv2d, F.avg_pool2d], [eager._weight_means, torch.conv2d]
ORDERS = [((8, 64, 64), 16, 1, FIRST), ((8, 256, 64), 16, 1, BEHIND), ((1, 512, 128), 4, 1, BEHIND), ((1, 64, 16), 8, 3, BEHIND)]
ORDERS += [((8, 64, 4), 32, 5, ONE), ((8, 64, 64), 8, 5, FIRST), ((0, 64, 64), 8, 3, FIRST)]
TYPES, STEPS = [(torch.float32, 1e-5), (torch.bfloat16, 0.03)], [(False, False), (False, True), (True, False)]
CASES = [(*step, *order, *TYPES[(i + j) % 2]) for (i, step), (j, order) in itertools.product(enumerate(STEPS), enumerate(ORDERS))]


@pytest.mark.parametrize("penalty, joined, sizes, size, kernel, expected, dtype, rtol", CASES)
def test_the_order_that_takes_a_cpu_least(penalty, joined, sizes, size, kernel, expected, dtype, rtol):
    """Averages take long, those of the channels last not.  With a penalty large ones have convpool's second derivatives.

    Of two types each meets every order, and large ones in every kind of step."""
    torch.manual_seed(4)
    conv = torch.nn.Conv2d(*sizes[1:], kernel, padding=kernel // 2)
    net = Forward(lambda m, x: F.avg_pool2d(m.conv(x) + m.conv(x.abs()) if joined else m.conv(x), 2), conv=conv)
    x, large = torch.randn(*sizes[:2], size, size), penalty and math.prod(sizes) * (kernel * size) ** 2 > 8e6
    exact = gradients(copy.deepcopy(net).double(), x.double(), penalty)[1]
    for order in (torch.contiguous_format, torch.channels_last):
        given, targets = {"dtype": dtype, "memory_format": order}, []
        got = gradients(torch.compile(net.to(**given), backend=ready(targets, in_steps=False)), x.to(**given), penalty)[1]
        wanted = [convolved if f is torch.conv2d and large else f for f in (FIRST if order == torch.channels_last else expected)]
        assert [f for f in targets if f in (*FIRST, *ONE, convolved)] == wanted * (1 + joined)
        assert all((a.double() - b).abs().max() <= rtol * b.abs().max() for a, b in zip(got, exact, strict=True))


def test_gradients_in_autocast_are_of_the_types_of_forward(device, monkeypatch):
    """The same as PyTorch's outside of it.  On a GPU PyTorch's own second derivatives take the type of autocast there."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(upsampling, "_pays", lambda *given: True)
    torch.manual_seed(0)
    x, weight = (torch.randn(shape, device=device, requires_grad=True) for shape in ((2, 4, 9, 9), (6, 4, 3, 3)))
    geometry, large = ((2, 2), (1, 1), (1, 1), 1), F.interpolate(x, scale_factor=2.0)
    plain = [function(x, weight, None, *geometry) for function in (F.conv2d, convolved)]
    for pair, found in (plain, []), ([F.conv2d(large, weight, padding=1), upsampling.upsample_conv2d(x, weight, padding=1)], []):
        for y, inside in zip(pair, (False, True), strict=True):
            with torch.autocast(device, torch.bfloat16, enabled=inside):
                found.append(torch.autograd.grad(y.square().sum() / 9, (x, weight), create_graph=True))
                found[-1] += torch.autograd.grad(found[-1][0].square().sum(), weight)
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3)
    with torch.autocast(device, torch.bfloat16):
        torch.testing.assert_close(*(function(x, weight, None, *geometry) for function in (convolved, F.conv2d)))


def test_a_kernel_waits_for_its_launch_and_the_one_before():
    for operators, penalty, us in (
        ([(True, 9, 3)], False, 11),  # the host: 3, then 6 for the backward, whose kernels take 2
        ([(True, 3, 9)], False, 10),  # the GPU: behind the first launch, of 1
        ([(True, 30, 3), (True, 3, 30)], False, 43),  # 11, 21, the second one's backward 41, the first one's, launched at 33
        ([(False, 5, 1), (True, 3, 9)], False, 15),
        ([(True, 6, 60)], True, 61),
        ([(True, 60, 6), (True, 6, 60)], True, 96),
    ):
        assert eager._step_us(operators, penalty) == pytest.approx(us)


def test_each_order_of_sizes_of_batches_has_its_plan(monkeypatch):
    """The captured batch tells nothing of those that follow."""
    monkeypatch.setattr(kernels, "raw_stream", lambda device: 0)
    scales = []
    run = eager.by_stream(lambda scale: scales.append(scale) or (lambda weight, x: scale), None, (1, 2))
    found = [run(None, torch.empty(batch, 1)) for batch in (2, 3, 64, 100, 64, 1)]
    assert found == [1, 1, 32, 32, 32, 0.5] and scales == [1, 32, 0.5]


def test_what_a_graph_for_captures_computes_at_once():
    """A ReLU that alone reads a convolution, in the same context, with it."""
    convs = torch.nn.ModuleList(torch.nn.Conv2d(4, 4, 3) for _ in range(3)).double()
    activations = []

    def forward(x):
        a = F.relu(convs[0](x), inplace=True)
        b, c = convs[1](a), convs[2](a)
        with torch.no_grad():
            b = F.relu(b)
        return b + F.relu(c) * c

    def backend(module, inputs):
        graph = copied(as_on_a_gpu(module.graph))
        eager.give_derivatives(graph)
        activations.extend(node.kwargs["relu"] for node in graph.find_nodes(op="call_function", target=convolved))
        return torch.fx.GraphModule(module, graph).forward

    y = torch.compile(forward, backend=backend)(x := torch.randn(2, 4, 9, 9, dtype=torch.float64))
    assert activations == [True, False, False]
    torch.testing.assert_close(y, expected := forward(x))
    found = [torch.autograd.grad(t.square().sum(), list(convs[::2].parameters())) for t in (y, expected)]
    torch.testing.assert_close(*found)
