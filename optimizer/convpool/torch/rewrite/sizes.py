# SPDX-License-Identifier: Apache-2.0
"""Types and shapes of a graph's tensors, by a run of it without numbers, and the graph without its questions about sizes.

The run is made with the batch at hand, the first input's, and with twice as many samples: a size that doubles is the batch's, any
other is fixed for inputs of these sizes.  Inputs with another number of samples keep it.  A graph that cannot run with another
batch has all its sizes fixed, the batch's too; so has one that computes numbers from the batch which do not double.
"""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from convpool.torch.rewrite.memory import without_caches, without_hooks

Dim = int | str | None
_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_LOGGING = threading.RLock()


@dataclass(frozen=True)
class Known:
    """What is known of a tensor: its type, and its shape with names for sizes that go with the batch."""

    dtype: torch.dtype
    shape: tuple[Dim, ...]


@dataclass(frozen=True)
class Sizes:
    """Tensors of a graph by node, and its whole numbers: an int, several, or "batch" for that of the inputs.

    batch: the only batch that they hold for; None if for all.  complete: whether every tensor of the graph is known.
    """

    tensors: dict[fx.Node, Known]
    numbers: dict[fx.Node, int | str | tuple[int, ...]]
    batch: int | None
    complete: bool = True

    def on(self, graph: fx.Graph) -> Sizes:
        """The same for another graph whose nodes have the same names."""
        nodes = {node.name: node for node in graph.nodes}
        tensors = {nodes[node.name]: known for node, known in self.tensors.items()}
        numbers = {nodes[node.name]: number for node, number in self.numbers.items()}
        return Sizes(tensors, numbers, self.batch, self.complete)


class _Run(fx.Interpreter):
    """Keeps what each node gives."""

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__(root, garbage_collect_values=False, graph=graph)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.values[n] = value
        return value


def sizes_of(root: nn.Module, graph: fx.Graph, inputs: Sequence[torch.Tensor]) -> Sizes | None:
    """The sizes for inputs like these; None where the graph does not run without numbers."""
    batch = next((x.shape[0] for x in inputs if x.dim()), None)
    shapes = [list(x.shape) for x in inputs]
    once = values_of(root, graph, inputs, shapes)
    if once is None:
        return None
    shapes = [[2 * batch, *shape[1:]] if batch and shape[:1] == [batch] else shape for shape in shapes]
    twice = values_of(root, graph, inputs, shapes) if batch else None
    if twice is None:
        twice, only = once, batch
    else:
        only = None
    if any(_is_open(node, once, twice) for node in once):
        twice, only = once, batch
    tensors: dict[fx.Node, Known] = {}
    numbers: dict[fx.Node, int | str | tuple[int, ...]] = {}
    made = made_of_sizes(once)
    for node, value in once.items():
        other = twice.get(node)
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor) and value.dim() == other.dim():
            shape = tuple(_dim(a, b) for a, b in zip(value.shape, other.shape, strict=True))
            tensors[node] = Known(value.dtype, shape)
        elif node not in made:
            continue
        elif type(value) is int and type(other) is int:
            if value == other:
                numbers[node] = value
            elif value == batch and other == 2 * value and _is_asked(node):
                numbers[node] = "batch"
        elif isinstance(value, tuple) and value and all(type(n) is int for n in value) and value == other:
            numbers[node] = tuple(value)
    return Sizes(tensors, numbers, only)


ASKING = frozenset({"size", "shape", "dim", "ndim", "ndimension", "numel", "nelement", "__len__"})
"""What asks a tensor for nothing but its sizes: strides, say, another call with the same sizes may have others."""


def asks_for_sizes(node: fx.Node) -> bool:
    """Whether a node, of one tensor, asks for nothing but its sizes."""
    attribute = node.args[1] if node.target is getattr and len(node.args) > 1 else node.target
    return attribute in ASKING or node.target in (len, torch.numel)


def made_of_sizes(values: Mapping[fx.Node, Any]) -> set[fx.Node]:
    """The nodes that sizes of tensors determine, and nothing else.  values: of a graph's nodes, in order."""
    made: set[fx.Node] = set()
    for node in values:
        given = node.all_input_nodes
        if len(given) == 1 and isinstance(values.get(given[0]), torch.Tensor):
            sized = asks_for_sizes(node)
        else:
            pure = getattr(node.target, "__module__", None) in ("_operator", "builtins", "math")
            sized = bool(given) and all(item in made for item in given) and (pure or node.op == "call_method")
        if sized:
            made.add(node)
    return made


def _is_asked(node: fx.Node) -> bool:
    """Whether a number is one size, asked for, and not computed from any."""
    given = node.all_input_nodes
    return asks_for_sizes(node) or node.target is operator.getitem and len(given) == 1 and asks_for_sizes(given[0])


def _is_open(node: fx.Node, once: dict[fx.Node, Any], twice: dict[fx.Node, Any]) -> bool:
    """Whether a number made of others that go with the batch does not double with it: (n + 7) // 8, say."""
    value = once[node]
    if type(value) is not int or node.target is operator.getitem:
        return False
    divides = node.target in (operator.floordiv, operator.mod, operator.rshift, operator.truediv, operator.and_)
    if value and twice.get(node) == 2 * value and not divides:
        return False
    given = [item for item in node.all_input_nodes if isinstance(once.get(item), (int, tuple))]
    return any(once[item] != twice.get(item) for item in given)


def ranks_of(graph: fx.Graph, inputs: Sequence[torch.Tensor]) -> Sizes:
    """What holds for inputs of all sizes: their types, and how many dimensions they have, 0 standing for an unknown number."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    pairs = zip(placeholders, inputs, strict=True)
    return Sizes({node: Known(x.dtype, (None,) * x.dim()) for node, x in pairs if x.dim()}, {}, None, complete=False)


def _dim(once: int, twice: int) -> Dim:
    if once == twice:
        return int(once)
    return f"batch{once}" if twice == 2 * once else None


def values_of(
    root: nn.Module, graph: fx.Graph, inputs: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
) -> dict[fx.Node, Any] | None:
    """What each node gives in a run without numbers, for inputs of these shapes; None where the graph does not run so."""
    before = without_hooks(root)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), without_caches(), _silent():
            given = [torch.empty(shape, dtype=x.dtype, device=x.device) for x, shape in zip(inputs, shapes, strict=True)]
            run = _Run(root, graph)
            run.run(*given)
    except Exception:  # an operator that needs numbers, or sizes that do not fit
        return None
    finally:
        before.restore()
    return run.values


@contextmanager
def _silent() -> Iterator[None]:
    """Without the log of errors that are expected here; one thread at a time, so that it is what it was afterwards."""
    with _LOGGING:
        before, _LOG.disabled = _LOG.disabled, True
        try:
            yield
        finally:
            _LOG.disabled = before


def fold_sizes(graph: fx.Graph, sizes: Sizes) -> None:
    """Put numbers in the place of nodes that ask for sizes, so that these keep no tensor alive.

    The batch is asked of the first input that has one.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    first = next((node for node in inputs if node in sizes.tensors and sizes.tensors[node].shape), None)
    batch: fx.Node | None = None
    for node in list(graph.nodes):
        if node.op in ("placeholder", "get_attr", "output") or node not in sizes.numbers:
            continue
        number = sizes.numbers[node]
        if number == "batch":
            if node.op == "call_method" and node.args[0] is first:
                continue
            if batch is None:
                with graph.inserting_after(inputs[-1]):
                    batch = graph.call_method("size", (first, 0))
                sizes.numbers[batch] = "batch"
            node.replace_all_uses_with(batch)
        else:
            for user in list(node.users):
                _put_number(user, node, number)
    for node in reversed(list(graph.nodes)):
        asks = node in sizes.numbers or node.op == "call_method" and node.target in ("size", "dim")
        asks = (
            asks or node.op == "call_function" and node.target is getattr and node.args[1] in ("shape", "ndim", "dtype", "device")
        )
        asks = asks or node.op == "call_function" and node.target in (len,)
        if asks and not node.users and node.op != "placeholder":
            graph.erase_node(node)


def _put_number(user: fx.Node, node: fx.Node, number: Any) -> None:
    user.args = fx.map_arg(user.args, lambda n: number if n is node else n)
    user.kwargs = fx.map_arg(user.kwargs, lambda n: number if n is node else n)
