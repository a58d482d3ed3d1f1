# SPDX-License-Identifier: Apache-2.0
"""Normalize all weights of a network by their largest singular values at once, on a GPU.

PyTorch's spectral normalization is a dozen small kernels for each weight.  An eager step's host launches them one by one, and a
CUDA graph runs them so.  The library does a network's in four launches, and their derivatives in two (convpool.h).  Sums are in
float32, and sigma is not rounded to the weights' type.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.functional_tensor import FunctionalTensor

from convpool.cuda import library, training
from convpool.torch import kernels, plain
from convpool.torch.changes import changes, contexts_of, is_of_module, memories, value_of
from convpool.torch.pairs import LIBRARY, unwatched

TURNS = ("t", getattr, torch.ops.aten.numpy_T, torch.ops.aten.matrix_H)  # since PyTorch 2.14 .T and .H are operators


@dataclass
class Normalized:
    """One weight's normalization in a graph: `result` is the last of its `nodes`.

    tensors: the weight [M, ...], u [M] and v, inputs of the graph.  u_first: u is computed of the old v, then v of u.
    recorded: the nodes that have derivatives."""

    tensors: tuple[fx.Node, fx.Node, fx.Node]
    u_first: bool
    epsilon: float
    result: fx.Node
    nodes: set[fx.Node]
    recorded: set[fx.Node]


def _given(node: Any, count: int, *targets: Any) -> tuple:
    """The arguments of a call of one of the functions, by position alone; None for each of another call's."""
    fits = isinstance(node, fx.Node) and node.target in targets and len(node.args) == count and not node.kwargs
    return node.args if fits else (None,) * count


def _found(result: fx.Node) -> Normalized | None:
    """The normalization that a division ends, as `torch.nn.utils` and its parametrizations do it in training."""
    weight, sigma = result.args
    of_sigma, product = _given(sigma, 2, torch.dot, torch.vdot)
    matrix, of_product = _given(product, 2, torch.mv)
    if matrix is None or not isinstance(weight, fx.Node) or not is_of_module(weight):
        return None
    recorded, nodes, steps = {result, sigma, product, matrix}, set(), []
    if matrix.target not in ("flatten", "reshape") or matrix.args not in ((weight, 1), (weight, *value_of(weight).shape[:1], -1)):
        return None
    for node in (of_sigma, of_product):
        if isinstance(node, fx.Node) and node.target == "clone":
            nodes.add(node)
            node = node.args[0]
        fits = isinstance(node, fx.Node) and node.target is F.normalize and len(node.args) == 1
        if not fits or node.kwargs.keys() != {"dim", "eps", "out"} or node.kwargs["dim"]:
            return None
        steps.append((node, node.args[0], node.kwargs["out"], node.kwargs["eps"]))
    (u, of_u, last_u, epsilon), (v, of_v, last_v, other) = steps
    (first, by_u), (turned, by_v) = _given(of_u, 2, torch.mv), _given(of_v, 2, torch.mv)
    turns = isinstance(turned, fx.Node) and turned.target in TURNS
    turns = turns and isinstance(epsilon, float)  # one that a compiler leaves open is a node
    if first is not matrix or epsilon != other or not turns or turned.args not in ((matrix,), (matrix, "H"), (matrix, "T")):
        return None
    if (by_u, by_v) not in ((last_v, u), (v, last_u)) or not all(map(is_of_module, (last_u, last_v))):
        return None
    nodes |= {*recorded, u, of_u, v, of_v, turned}
    return Normalized((weight, last_u, last_v), by_u is last_v, epsilon, result, nodes, recorded)


def find(graph: fx.Graph) -> list[Normalized]:
    """The normalizations of weights on a GPU that the library does, and that nothing else in the graph meets."""
    candidates = list(filter(None, map(_found, graph.find_nodes(op="call_function", target=operator.truediv))))
    if not candidates or not kernels.library_is_there() or not training.has("spectral_norm"):
        return []
    contexts, found, memory = contexts_of(graph), [], {node: {node, *memories(node)} for node in graph.nodes}
    changed = {node: set().union(*(memory[item] for item in changes(node))) for node in graph.nodes}
    for one in candidates:
        if any(contexts[node] != contexts[next(iter(graph.nodes))] for node in one.recorded) or not _suits(one):
            continue
        weight, *vectors = one.tensors
        ends = {one.result, *(item for item in one.nodes if item.target is F.normalize)}
        inside = all(user in one.nodes for item in one.nodes - ends for user in item.users)
        read = all(user in one.nodes or user.op == "output" for item in {*vectors, *ends - {one.result}} for user in item.users)
        others, iterated = [node for node in graph.nodes if node not in one.nodes], memory[vectors[0]] | memory[vectors[1]]
        apart = not any(changed[node] & memory[weight] or node not in vectors and memory[node] & iterated for node in others)
        if inside and read and apart:
            found.append(one)
    return found


def _suits(one: Normalized) -> bool:
    weight, u, v = (value_of(node) for node in one.tensors)
    whole = all(isinstance(size, int) for size in weight.shape) and weight.numel() % 4 == 0 and 0 < weight.numel() < 1 << 31
    alike = all(t.dtype == weight.dtype and t.device == weight.device for t in (u, v, value_of(one.result)))
    sizes = whole and u.shape == weight.shape[:1] and v.shape == (weight.numel() // len(u),)
    return bool(sizes and alike and weight.is_cuda and weight.dtype in kernels.NAMES and not u.requires_grad | v.requires_grad)


def normalize_at_once(graph: fx.Graph, call: Any) -> None:
    """Let a graph begin with a call that normalizes all its weights, those of a type and a kind of normalization together.

    call: `normalized`, or in a graph for AOTAutograd convpool::normalized_weights, which it takes apart."""
    kinds: dict[Any, list[Normalized]] = {}
    for one in find(graph):
        weight = value_of(one.tensors[0])
        kinds.setdefault((weight.requires_grad, weight.dtype, weight.device, one.u_first, one.epsilon), []).append(one)
    last = graph.find_nodes(op="placeholder")[-1:]
    for (*_, u_first, epsilon), ones in kinds.items():
        weights, us, vs = (tuple(one.tensors[place] for one in ones) for place in range(3))
        with graph.inserting_after(last[0]):
            made = graph.call_function(call, (weights, us, vs, u_first, epsilon))
        made.meta["example_value"] = tuple(value_of(one.result) for one in ones)
        for place, one in enumerate(ones):
            with graph.inserting_after(made):
                item = graph.call_function(operator.getitem, (made, place))
            item.meta.update(one.result.meta)
            one.result.replace_all_uses_with(item)
    every = [one for ones in kinds.values() for one in ones]
    of_vectors = {node: node.kwargs["out"] for one in every for node in one.nodes if node.target is F.normalize}
    for node, vector in of_vectors.items():
        node.replace_all_uses_with(vector, lambda user: user.op == "output")
    gone = {node for one in every for node in one.nodes}
    for node in reversed(graph.nodes):
        if node in gone:
            graph.erase_node(node)


# ---- the call ----

LIBRARY.define(
    "spectral_norm(Tensor[] weights, Tensor(a!)[] us, Tensor(b!)[] vs, Tensor(c!)[] out, bool u_first, float epsilon) -> Tensor"
)
LIBRARY.define("normalized_weights(Tensor[] weights, Tensor(a!)[] us, Tensor(b!)[] vs, bool u_first, float epsilon) -> Tensor[]")
LIBRARY.define("spectral_norm_adjoint(Tensor[] weights, Tensor[] grads, Tensor kept, int[] places) -> Tensor[]")


def normalized(weights: Sequence[Tensor], us: Sequence[Tensor], vs: Sequence[Tensor], *kind: Any) -> Any:
    """The weights, each divided by its largest singular value; the vectors u and v change in place.  kind: u_first, epsilon."""
    if not unwatched(weights[0], weights[0], "meta") or not all(map(_plain, (*weights, *us, *vs))):
        return [weight / _sigma(weight, u, v, *kind) for weight, u, v in zip(weights, us, vs, strict=True)]
    return _recorded(_launch, weights, us, vs, *kind)


def _recorded(launch: Callable, weights: Sequence[Tensor], us: Any, vs: Any, *kind: Any) -> Sequence[Tensor]:
    """The normalized weights, with derivatives where they are wanted.  launch: `_launch`, or the operator for a compiler."""
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
        return _Normalize.apply(us, vs, kind, launch, *weights)
    made = [torch.empty_like(weight) for weight in weights]
    launch(weights, us, vs, made, *kind)
    return made


def _plain(tensor: Tensor) -> bool:
    """Return True if the library can read and write a tensor where it is."""
    dense = tensor.is_contiguous(memory_format=plain.memory_format(tensor))
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_cuda and dense and not tensor.data_ptr() & 15


def _sigma(weight: Tensor, u: Tensor, v: Tensor, u_first: bool, epsilon: float) -> Tensor:
    """A weight's largest singular value by PyTorch's operators, of u and v after a step, which changes them in place."""
    matrix, options = weight.flatten(1), {"dim": 0, "eps": epsilon}
    with torch.no_grad():
        for is_u in (u_first, not u_first):
            F.normalize(torch.mv(matrix, v) if is_u else torch.mv(matrix.H, u), out=u if is_u else v, **options)
    return torch.vdot(u.clone(), torch.mv(matrix, v.clone()))


def _sizes(weight: Tensor) -> tuple[int, int, int]:
    """Filters, channels and taps, as they lie in memory: of a weight with the channels first, all are channels of one tap."""
    m, taps = weight.shape[0], math.prod(weight.shape[2:])
    return (m, weight.numel() // m, 1) if weight.is_contiguous() else (m, weight.shape[1], taps)


def _kept(weights: Sequence[Tensor]) -> list[int]:
    """The places of u, v and sigma of each weight among the numbers that are kept, and the end."""
    return list(itertools.accumulate((len(weight) + weight.numel() // len(weight) + 1 for weight in weights), initial=0))


def _packed(weight: Tensor, kept: int, out: Tensor, *, dy: int = 0, u: int = 0, v: int = 0) -> bytes:
    """A weight for the library, with the addresses of what else is read and written."""
    return training.PACK(weight.data_ptr(), dy, u, v, out.data_ptr(), kept, *_sizes(weight), 0)


def _launch(weights: Sequence[Tensor], us: Any, vs: Any, made: Sequence[Tensor], *kind: Any) -> Tensor:
    """Write the normalized weights into `made`; return what is kept."""
    first, places = weights[0], _kept(weights)
    if first.get_device() != kernels.current_device():
        with torch.cuda.device(first.device):
            return _launch(weights, us, vs, made, *kind)
    kept = torch.empty(places[-1], dtype=torch.float32, device=first.device)
    at = kept.data_ptr()
    each = zip(weights, places[:-1], made, us, vs, strict=True)
    packed = [_packed(w, at + 4 * place, out, u=u.data_ptr(), v=v.data_ptr()) for w, place, out, u, v in each]
    dtype, stream = library.DTYPES[kernels.NAMES[first.dtype]], kernels.raw_stream(first.get_device())
    library.check(training.function("spectral_norm")(b"".join(packed), len(packed), dtype, *kind, stream))
    torch.autograd.graph.increment_version([vector for vector in (*us, *vs) if not vector.is_inference()])
    return kept


def _adjoint(weights: Sequence[Tensor], grads: Sequence[Tensor], kept: Tensor, places: Sequence[int]) -> Any:
    """The gradients at weights, from those behind them; places: of their numbers among those that are kept."""
    if weights[0].get_device() != kernels.current_device():
        with torch.cuda.device(weights[0].device):
            return _adjoint(weights, grads, kept, places)
    made, at = [torch.empty_like(weight) for weight in weights], kept.data_ptr()
    dy = [_as_weight(grad, weight) for grad, weight in zip(grads, weights, strict=True)]
    each = zip(weights, places, made, dy, strict=True)
    packed = [_packed(weight, at + 4 * place, out, dy=grad.data_ptr()) for weight, place, out, grad in each]
    shares = sum(-(-grad.numel() // training.SHARE) for grad in dy)
    sums = torch.empty(shares, dtype=torch.float32, device=kept.device)
    dtype, stream = library.DTYPES[kernels.NAMES[weights[0].dtype]], kernels.raw_stream(kept.get_device())
    library.check(training.function("spectral_norm_adjoint")(b"".join(packed), len(packed), dtype, sums.data_ptr(), stream))
    return made


class _Normalize(torch.autograd.Function):
    """One node for all weights.  u and v are constants to it, as to PyTorch's."""

    @staticmethod
    def forward(ctx: Any, us: Sequence[Tensor], vs: Sequence[Tensor], kind: tuple, launch: Callable, *weights: Tensor) -> Any:
        made = [torch.empty_like(weight) for weight in weights]
        kept = launch(weights, us, vs, made, *kind)
        # Not saved: parts of a network may have backward passes, and steps, of their own.
        ctx.weights, ctx.kept, ctx.versions = weights, kept, [weight._version for weight in weights]
        ctx.set_materialize_grads(False)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        weights, kept = ctx.weights, ctx.kept
        made, places = [None] * len(weights), _kept(weights)
        wanted = [n for n, grad in enumerate(grads) if grad is not None and ctx.needs_input_grad[4 + n]]
        now, then = ([versions[n] for n in wanted] for versions in ([w._version for w in weights], ctx.versions))
        if now != then:
            raise RuntimeError(f"weights modified in place since they were normalized: got versions {now}, expected {then}")
        given = [weights[n] for n in wanted], [grads[n] for n in wanted], kept, [places[n] for n in wanted]
        run: Callable = _plain_adjoint
        if not torch.is_grad_enabled() and isinstance(kept, FunctionalTensor):
            run = torch.ops.convpool.spectral_norm_adjoint
        elif not torch.is_grad_enabled() and all(unwatched(grad, kept, "meta") for grad in given[1]):
            run = _adjoint
        for n, found in zip(wanted, run(*given) if wanted else (), strict=True):
            made[n] = found
        return None, None, None, None, *made


def _as_weight(grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient as the weight lies in memory, and aligned."""
    grad = grad.contiguous(memory_format=plain.memory_format(weight))
    return grad.clone() if grad.data_ptr() & 15 else grad


def _plain_adjoint(weights: Sequence[Tensor], grads: Sequence[Tensor], kept: Tensor, places: Sequence[int]) -> list[Tensor]:
    """`_adjoint` in operators that have derivatives."""
    made = []
    for weight, grad, place in zip(weights, grads, places, strict=True):
        m, c, taps = _sizes(weight)
        u, v = kept[place : place + m], kept[place + m : place + m + c * taps]
        if not weight.is_contiguous():
            v = v.view(taps, c).t().reshape(-1)
        matrix, dy, both = weight.flatten(1).float(), grad.flatten(1).float(), u[:, None] * v
        sigma = (matrix * both).sum()
        d_matrix = (dy - (dy * matrix).sum() / sigma * both) / sigma
        made.append(d_matrix.to(weight.dtype).view(weight.shape))
    return made


# ---- operators, for compilers ----


def _run(weights: Sequence[Tensor], us: Any, vs: Any, out: Sequence[Tensor], *kind: Any) -> Tensor:
    """`_launch`, by PyTorch's operators where the library cannot read a tensor."""
    if all(map(_plain, (*weights, *us, *vs, *out))):
        return _launch(weights, us, vs, out, *kind)
    kept = []
    for weight, u, v, made in zip(weights, us, vs, out, strict=True):
        sigma, (_, c, taps) = _sigma(weight, u, v, *kind), _sizes(weight)
        made.copy_(weight / sigma)
        in_memory = v if weight.is_contiguous() else v.view(c, taps).t()
        kept += [u.float(), in_memory.float().flatten(), sigma.float().view(1)]
    return torch.cat(kept)


def _run_adjoint(weights: Sequence[Tensor], grads: Sequence[Tensor], *kept: Any) -> list[Tensor]:
    """`_adjoint`, by PyTorch's operators where the library cannot read a weight."""
    if all(map(_plain, weights)):
        return _adjoint(weights, grads, *kept)
    found = zip(weights, _plain_adjoint(weights, grads, *kept), strict=True)
    return [torch.empty_like(weight).copy_(grad) for weight, grad in found]


LIBRARY.impl("normalized_weights", functools.partial(_recorded, torch.ops.convpool.spectral_norm), "CompositeImplicitAutograd")
LIBRARY.impl("spectral_norm", _run, "CompositeExplicitAutograd")
LIBRARY.impl("spectral_norm_adjoint", _run_adjoint, "CompositeExplicitAutograd")


torch.library.register_fake("convpool::spectral_norm_adjoint", lambda ws, *_: [torch.empty_like(w) for w in ws], lib=LIBRARY)


@torch.library.register_fake("convpool::spectral_norm", lib=LIBRARY)
def _fake(weights: Sequence[Tensor], *_: Any) -> Tensor:
    return torch.empty(_kept(weights)[-1], dtype=torch.float32, device=weights[0].device)
