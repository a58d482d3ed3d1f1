# SPDX-License-Identifier: Apache-2.0
"""Choose what a graph runs: PyTorch's operators where an eager step waits for the host, kernels where it does not.

On a GPU a node of Python takes the host longer than PyTorch's two operators, whose derivatives are C++.  A kernel starts once
the host has launched it and the one before it has ended.  So an estimate follows host and GPU through forward and backward.  The
pairs that save the GPU most are rewritten, as long as that makes the step no longer; the others stay as the module has them.  The
same holds for second derivatives of convolutions, which a penalty asks for where the network's input needs a gradient: PyTorch
computes the weights' part by kernels as large as the images.

In a CUDA graph the host does not count.  There, and in the steps before it, all pairs run by kernels.  On a CPU pairs are
PyTorch's operators: pooling first, in the original order, or one convolution by pooled weights, whichever an estimate prefers.
"""

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from convpool.errors import OptionError
from convpool.torch import kernels, plain, skeleton, spectral
from convpool.torch.changes import contexts_of, is_of_module, value_of
from convpool.torch.kernels import frozen
from convpool.torch.pairs import POOLED_CONV, convolved, pooled_conv_of, suits
from convpool.torch.plain import CONVS, POOLS, RELU, Geometry, torch_pads
from convpool.torch.rewriting import RuleByName
from convpool.torch.upsampling import convolves_first, interpolated, upsample_conv_of

# Microseconds of a training step on H100s (benchmarks/log.md), without and with a penalty; the host is a slow one.
HOST_US, UNRECORDED_US = {False: 105, True: 200}, 36
"""The host's for an operator of PyTorch's, with derivatives and without."""
PAIR_US, POOLED_US, UPSAMPLED_US, CONVOLUTION_US = {False: 250, True: 700}, 100, 550, 250
"""The host's for a pair by kernels, one by pooled weights with a penalty, an upsampled convolution, or one with convpool's second
derivatives, beyond PyTorch's."""
OPERATOR, CONVOLUTION, UPSAMPLED, SAVED = (12.5, 3.6, 0), (16, 10.5, 2), (0, 4.5, 2.5), 0.75
"""The GPU's: for a kernel, for each MB of the result, for 1e9 multiply-adds of 16 bits; what an upsampled convolution saves of
that; the share that a pair saves of its convolution's."""
WEIGHTS_US, SECOND_US = 6, (70, 40, 4e-5, 0.6)
"""The GPU's for each MB of summed weights; for PyTorch's second derivative, beyond a gradient's: for one, for 1e9 multiply-adds,
for a position, times a power of all in an image."""
SHARES = {False: (1 / 3, 2 / 3), True: (1 / 6, 1 / 3, 1 / 2)}
"""How an operator's time is shared by forward and backward, and the backward of both."""
PENALTY = 2.5
"""How many times as long the GPU takes with a penalty."""
AVERAGE_MACS, LAST_MACS, TRAINED = {torch.float32: 400, torch.bfloat16: 700}, 25, 0.75
"""Multiply-adds of a CPU that take as long as an average; with the channels last; the share of that where gradients follow."""
LARGE, LEAST = 1 << 18, 0.85
"""Weights that take a CPU as long to read as 50 positions; the share of the original's time below which another order runs."""
SECOND_MACS = 2e6
"""Multiply-adds up to which PyTorch's second derivative of a convolution takes a CPU less time than nodes of Python."""

IMAGE_CHANNELS, PLAIN_MACS = 16, 2.5e9
"""Channels up to which, or multiply-adds with more, the library's convolution is faster than cuDNN under a compiler."""


def may_have_penalty(graph: fx.Graph) -> bool:
    """Return True if the network's input needs a gradient, so that second derivatives may be asked for."""
    inputs = [node for node in graph.find_nodes(op="placeholder") if not is_of_module(node)]
    return any(isinstance(value := value_of(node), Tensor) and value.requires_grad for node in inputs)


def runnable(module: fx.GraphModule, graph: fx.Graph, *, with_derivatives: Collection[str] | None = None) -> Callable:
    """A function that runs the module's rewritten graph: pairs are PyTorch's operators on a CPU, and calls of kernels elsewhere.

    In training with a penalty large ones on a CPU have derivatives of convpool's.  with_derivatives: in an eager step on a GPU,
    the names of convolutions with such.  PyTorch's operators run more of that: 1x1 kernels change places with poolings and
    upsamplings, and pairs of larger ones on large maps are convolved by pooled ones."""
    penalty, gpu_step = torch.is_grad_enabled() and may_have_penalty(graph), with_derivatives is not None
    for node in list(graph.nodes):
        operators: list[tuple] | None = None  # PyTorch's, one after the other: each with its arguments but the first
        if gpu_step and node.target is upsample_conv_of and convolves_first(value_of(node.args[1])):
            _, weight, bias, scales, _ = node.args
            operators = [(CONVS[len(scales)], weight, bias), (interpolated, scales)]
        elif node.target is POOLED_CONV:
            tensors, geometry = node.args[:3], frozen(node.args[3:])
            x, weight = value_of(tensors[0]), value_of(tensors[1])
            operators = _operators(tensors, geometry, gpu_step)
            if gpu_step and operators is None and _pools_weights(x, weight):
                operators = _by_pooled_weights(graph, node, tensors, geometry)
            elif operators is not None and not gpu_step:
                operators = _fastest(graph, node, operators, geometry)
            large = penalty and not gpu_step and _macs(weight, x) > SECOND_MACS * math.prod((*geometry[1], *geometry[4]))
            if operators is None:
                node.target, node.args = pooled_conv_of, (tensors, geometry)
            elif large or node.meta.get("convolution") in (with_derivatives or ()):
                operators = [(convolved if f in CONVS.values() else f, *rest) for f, *rest in operators]
        if operators is None:
            continue
        made = node.args[0]
        with graph.inserting_before(node):
            for function, *args in operators:
                made = graph.call_function(function, (made, *args))
        made.meta.update(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    spectral.normalize_at_once(graph, spectral.normalized)
    graph.lint()
    return fx.GraphModule(module, graph).forward


def _operators(tensors: Sequence[Any], geometry: Geometry, gpu_step: bool) -> list[tuple] | None:
    """PyTorch's operators that do it in turn, if any.  steps, zeros, spread: strides, pads and dilations of the convolution."""
    (_, weight, bias), (kernel, strides, pads, dilations, steps, zeros, spread, groups) = tensors, geometry[:RELU]
    x, w, rank = value_of(tensors[0]), value_of(weight), len(kernel)
    swaps = gpu_step and isinstance(w, Tensor) and max(w.shape[2:]) == 1 and not any((*pads, *zeros))
    on_cpu = isinstance(x, Tensor) and x.device.type == "cpu"
    if not (on_cpu or swaps) or any(d != 1 for d in dilations) or plain.is_deep_half(x):
        return None
    made: list[tuple] = []
    if not plain.pools_rightly(x, kernel, pads, dilations):
        made, pads = [(F.pad, torch_pads(pads))], (0,) * rank
    made.append((POOLS[rank], kernel, strides, pads[:rank], False, True))
    if zeros[:rank] != zeros[rank:]:
        made, zeros = [*made, (F.pad, torch_pads(zeros))], (0,) * rank
    return [*made, (CONVS[rank], weight, bias, steps, zeros[:rank], spread, groups)]


def _pools_weights(x: Any, weight: Any) -> bool:
    """Return True if a pair may run as one convolution by pooled weights: they are the smaller part."""
    known = isinstance(x, Tensor) and isinstance(weight, Tensor) and max(weight.shape[2:]) > 1
    return known and math.prod(plain.hints(x.shape)) >= 4 * weight.numel()


def _by_pooled_weights(graph: fx.Graph, node: fx.Node, tensors: Sequence[Any], geometry: Geometry) -> list[tuple] | None:
    """A pair as one convolution of both strides, by the weights' means over the pooling's windows.  Names as in `_operators`."""
    (_, weight, bias), (kernel, strides, pads, dilations, steps, zeros, spread, groups) = tensors, geometry[:RELU]
    ones, padding = all(n == 1 for n in (*strides, *dilations, *spread)), _padding(kernel, pads, zeros)
    if not ones or len(kernel) != 2 or padding is None:
        return None
    with graph.inserting_before(node):
        means = graph.call_function(_weight_means, (weight, kernel))
    return [(CONVS[2], means, bias, steps, padding, spread, groups)]


def _padding(kernel: Sequence[int], pads: Sequence[int], zeros: Sequence[int]) -> tuple[int, ...] | None:
    """The padding on both sides of each axis with which the convolution comes first, its windows with strides of 1 behind it.

    Zeros around the means are means of zeros where all windows of pixels have been taken."""
    rank = len(kernel)
    both = [pad + zero for pad, zero in zip(pads, zeros, strict=True)]
    taken = all(not zero or pad == k - 1 for pad, zero, k in zip(pads, zeros, (*kernel, *kernel), strict=True))
    return tuple(both[:rank]) if taken and both[:rank] == both[rank:] else None


def _fastest(graph: fx.Graph, node: fx.Node, operators: list[tuple], geometry: Geometry) -> list[tuple]:
    """A pair's operators on a CPU: these, pooling first, the original two, or one by pooled weights.  Names of `_operators`."""
    (x, weight, bias), (kernel, strides, pads, _, steps, zeros, spread, groups) = node.args[:3], geometry[:RELU]
    given, w, padding, rank = value_of(x), value_of(weight), _padding(kernel, pads, zeros), len(kernel)
    known = isinstance(given, Tensor) and isinstance(w, Tensor) and not given.is_cuda and given.dtype in AVERAGE_MACS
    if not known or padding is None or groups > 1 and given.requires_grad:  # this gradient takes long in any other order
        return operators
    if any(s != 1 for s in strides) and any((*padding, *(n - 1 for n in w.shape[2:]))):
        return operators
    (images, _, *sizes), (m, c, *window) = plain.hints(given.shape), w.shape
    means = plain.pooled_size(sizes, *geometry[:4])
    small = plain.pooled_size(means, window, *geometry[4:7])
    full = [n + 2 * p - d * (k - 1) for n, p, d, k in zip(sizes, padding, spread, window, strict=True)]
    last = rank == 2 and torch.channels_last in (plain.memory_format(given), plain.memory_format(w))
    average = (LAST_MACS if last else AVERAGE_MACS[given.dtype]) * (TRAINED if torch.is_grad_enabled() else 1)

    def time_of(kernel: Sequence[int], places: Sequence[int], averages: float) -> float:
        """Return the time that a convolution and averages take."""
        pixels, taps = math.prod(places), max(m, 16) * c * math.prod(kernel)
        slow = 60 if max(kernel) == 1 and pixels < 16 and not last else 0  # PyTorch has another convolution for these
        return taps * (images * (pixels + slow + 10) + (50 if taps >= LARGE else 0)) + average * averages

    wide = [n + k - 1 for n, k in zip(window, kernel, strict=True)]
    each = [images * c * groups * math.prod(means), images * m * math.prod(small), m * c * math.prod(wide)]
    times = [time_of(window, small, each[0]), LEAST * time_of(window, full, each[1])]
    if all(s == 1 for s in strides) and time_of(wide, small, each[2]) < min(times):
        return _by_pooled_weights(graph, node, node.args[:3], geometry) or operators
    pooling = (POOLS[rank], kernel, [s * t for s, t in zip(strides, steps, strict=True)], 0, False, True)
    return [(CONVS[rank], weight, bias, (1,) * rank, padding, spread, groups), pooling] if times[1] < times[0] else operators


def _weight_means(weight: Tensor, kernel: Sequence[int]) -> Tensor:
    """The means of weights, padded, over all windows: what the gradient of a pooling of stride 1 gives, in one operator."""
    size = [*weight.shape[:2], *(n + k - 1 for n, k in zip(weight.shape[2:], kernel, strict=True))]
    wide = weight if weight.is_cuda or weight.dtype not in plain.HALF_TYPES else weight.float()  # a CPU sums in their type
    like = torch.empty(size, dtype=wide.dtype, device=weight.device, memory_format=plain.memory_format(weight))
    return torch.ops.aten.avg_pool2d_backward.default(wide, like, kernel, (1, 1), (0, 0), False, True, None).to(weight.dtype)


def _macs(weight: Any, y: Any) -> float:
    """Multiply-adds of a convolution with a result y; endless where one is not known."""
    if not isinstance(weight, Tensor) or not isinstance(y, Tensor):
        return math.inf
    images, _, *sizes = plain.hints(y.shape)
    return math.prod(plain.hints(weight.shape)) * images * math.prod(sizes)


def _second_us(positions: float, pixels: float, macs: float) -> float:
    return SECOND_US[0] + SECOND_US[1] * macs + SECOND_US[2] * positions * pixels ** SECOND_US[3]


# ---- a GPU: which convolutions are worth a node of Python ----


def gaining(graph: fx.Graph, rule_by_name: RuleByName, scale: float = 1.0) -> tuple[set[str], set[str]]:
    """The names of an original graph's convolutions that an eager training step on a GPU gains from: those to rewrite,
    and those with second derivatives of convpool's.  scale: how many times the batch is as large as TorchDynamo's."""
    penalty = may_have_penalty(graph)
    operators: list[tuple[bool, float, float]] = []
    taken, with_derivatives = set[str](), set[str]()
    found: list[tuple[float, float, int, str, set[str]]] = []  # gain, the host's cost, place, name, and where that goes
    normalized = {node for one in spectral.find(graph) for node in one.nodes}
    for node in graph.nodes:
        y, name = value_of(node), node.name
        if node.op not in ("call_function", "call_method") or not isinstance(y, Tensor) or node in normalized:
            continue
        recorded, convolves, place, second_us = y.requires_grad, node.target in CONVS.values(), len(operators), 0.0
        passes = (PENALTY if penalty else 1) * (1 if recorded else SHARES[False][0])
        size = scale * y.element_size() * math.prod(plain.hints(y.shape)) / 1e6
        weight = value_of(node.args[1] if len(node.args) > 1 else node.kwargs.get("weight"))
        macs = scale * y.element_size() / 2 * _macs(weight, y) / 1e9 if convolves else 0.0
        device = passes * _us(CONVOLUTION if convolves else OPERATOR, size, macs)
        swaps = convolves and max(weight.shape[2:]) == 1  # PyTorch's operators in the other order
        by_operators = rule_by_name.get(name) == "pool_first" and (swaps or _pools_weights(value_of(node.args[0]), weight))
        if convolves and penalty:
            share = 4 if by_operators else 1  # of the positions, with a pooling of 2x2
            pixels = math.prod(plain.hints(y.shape)[2:])
            given = scale * plain.hints(y.shape)[0] * pixels, pixels, macs
            second_us = _second_us(*given)
            if name not in rule_by_name or by_operators:
                found.append((_second_us(*(n / share for n in given)), CONVOLUTION_US * recorded, place, name, with_derivatives))
        if rule_by_name.get(name) == "pool_first":
            saved = second_us - _second_us(*(n / share for n in given)) if by_operators and penalty else second_us
            own = POOLED_US * penalty * (not swaps) if by_operators else PAIR_US[penalty]
            found.append((SAVED * device + saved, own * recorded, place, name, taken))
        elif name in rule_by_name:
            written = WEIGHTS_US * weight.numel() * y.element_size() / 1e6
            gain = passes * (_us(UPSAMPLED, size * (1 + weight.shape[1] / weight.shape[0]), macs) - written) + second_us
            host = 0 if convolves_first(weight) else UPSAMPLED_US * recorded
            found.append((gain, host, place, name, taken))
        operators.append((recorded, HOST_US[penalty] if recorded else UNRECORDED_US, device + second_us))
    least = _step_us(operators, penalty)
    for gain, cost, place, name, chosen in sorted(found, key=lambda item: item[0], reverse=True):
        recorded, host, device = before = operators[place]
        operators[place] = (recorded, host + cost, device - gain)
        if gain > 0 and (now := _step_us(operators, penalty)) <= least:
            least = now
            chosen.add(name)
        else:
            operators[place] = before
    return taken, with_derivatives


def _us(terms: tuple[float, float, float], size: float, macs: float) -> float:
    return terms[0] + terms[1] * size + terms[2] * macs


def _step_us(operators: Sequence[tuple[bool, float, float]], penalty: bool) -> float:
    """The time of a step: forward, backward, and the backward of both; operators: recorded or not, the host's time, the GPU's."""
    host = device = 0.0
    for number, share in enumerate(SHARES[penalty]):
        for recorded, host_us, device_us in operators if number % 2 == 0 else reversed(operators):
            part = share if recorded else float(number == 0)
            host += part * host_us
            device = max(device, host) + part * device_us
    return max(host, device)


def place_of_batch(graph: fx.Graph) -> tuple[int, int] | None:
    """Which input of a graph on a GPU has the batch, and its size when TorchDynamo captured it; None on a CPU."""
    inputs = [(is_of_module(node), place, value_of(node)) for place, node in enumerate(graph.find_nodes(op="placeholder"))]
    found = [item for item in inputs if isinstance(item[2], Tensor) and item[2].is_cuda and item[2].dim()]
    if not found:
        return None
    of_module, place, value = min(found, key=lambda item: item[:2])
    return place, plain.hints(value.shape)[0]


def by_stream(step_of: Callable[[float], Callable], for_graphs: Callable, batch: tuple[int, int]) -> Callable:
    """A function that runs what `step_of` makes, once for each power of two of batches, on the default stream; else `for_graphs`.

    That is in a CUDA graph and the steps before it, which run on a stream of their own, as PyTorch's manual asks, and make ready
    what the graph needs.  batch: as `place_of_batch` gives it."""
    (place, known), ran = batch, list[bool]()
    by_size = {known.bit_length(): step_of(1.0)}

    def eagerly(*inputs: Any) -> Any:
        size = inputs[place].shape[0]
        run = by_size.get(size.bit_length())
        if run is None:
            run = by_size[size.bit_length()] = step_of(size / known)
        return run(*inputs)

    def run(*inputs: Any) -> Any:
        if not kernels.raw_stream(inputs[place].get_device()):
            return eagerly(*inputs)
        if not torch.cuda.is_current_stream_capturing():
            ran[:] = [True]
        elif not ran:
            warnings.warn("convpool: captured without kernels of its own; run a step on a side stream first", stacklevel=2)
            return eagerly(*inputs)
        return for_graphs(*inputs)

    return run


# ---- other convolutions of a graph on a GPU ----


def _convolutions(graph: fx.Graph) -> Iterator[tuple]:
    """The nodes that are convolutions with numbers as padding: each with input, weight, bias and convolution."""
    for node in list(graph.nodes):
        a = skeleton.arguments(node) if node.target in CONVS.values() else None
        value = value_of(a["input"]) if a is not None else None
        if a is None or not isinstance(value, Tensor) or not value.is_cuda:
            continue
        rank = list(CONVS.values()).index(node.target) + 1
        try:
            numbers = [plain.sizes(name, a[name], rank, 0) for name in ("stride", "padding", "dilation")]
        except OptionError:
            continue
        yield node, a["input"], a["weight"], a["bias"], (*numbers, a["groups"])


def give_derivatives(graph: fx.Graph, nodes: Collection[fx.Node] | None = None) -> None:
    """Let convolutions of the graph be calls of `convolved`: these nodes, or, for a CUDA graph, all, with their ReLUs."""
    contexts, cuda_graph = contexts_of(graph), nodes is None
    for node, *tensors, convolution in _convolutions(graph):
        if nodes is None or node in nodes:
            kwargs = {"cuda_graph": cuda_graph, "relu": cuda_graph and _takes_relu(node, contexts)}
            node.target, node.args, node.kwargs = convolved, (*tensors, *convolution), kwargs


def _takes_relu(node: fx.Node, contexts: dict[fx.Node, Any]) -> bool:
    """Let a node stand for the ReLU, too, that alone reads it in the same context; return False if there is none."""
    user = next(iter(node.users)) if len(node.users) == 1 else node
    fits = user.target in (F.relu, torch.relu, "relu") and contexts[user] == contexts[node]
    if fits:
        node.meta.update(user.meta)
        user.replace_all_uses_with(node)
        node.graph.erase_node(user)
    return fits


def run_by_library(graph: fx.Graph) -> None:
    """Let the library run convolutions of a graph for a compiler, where it is faster: it fuses a ReLU too."""
    contexts = contexts_of(graph)
    for node, x, weight, bias, convolution in _convolutions(graph):
        given, w = value_of(x), value_of(weight)
        if bias is None or not isinstance(w, Tensor) or not suits(given, w):
            continue
        macs = w.numel() * given.shape[0] * math.prod(given.shape[2:]) / math.prod(convolution[0])
        if given.shape[1] <= IMAGE_CHANNELS or macs <= PLAIN_MACS:
            pair = (*plain.single(*convolution), _takes_relu(node, contexts))
            node.target, node.args, node.kwargs = POOLED_CONV, (x, weight, bias, *pair), {}
