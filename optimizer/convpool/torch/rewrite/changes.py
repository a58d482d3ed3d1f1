# SPDX-License-Identifier: Apache-2.0
"""Operators that change a tensor in place, and what they keep from moving.

A node that moves reads its inputs later than before.  That is the same only if nothing changes them in between.  Tensors that may
share memory form a group; one in which something is changed is harmless where each member but the last is read by the next one
alone, so that nobody sees an older state.  All nodes of any other such group, and whoever reads from it, stay as they are.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from convpool.algebra.geometry import Refusal, refuse
from convpool.torch.rewrite.memory import has_own_hooks

IN_PLACE = {getattr(operator, name) for name in dir(operator) if name.startswith("i") and hasattr(operator, "__" + name + "__")}
IN_PLACE -= {operator.inv, operator.invert, operator.index, getattr(operator, "is_", None)}
FRESH_MODULES = (
    nn.modules.conv._ConvNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.batchnorm._NormBase,
    nn.modules.padding._ConstantPadNd,
    nn.Linear,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.ReLU,
    nn.LeakyReLU,
    nn.PReLU,
    nn.ELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Sigmoid,
    nn.Tanh,
    nn.Softplus,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Hardsigmoid,
    nn.Embedding,
)
"""Modules whose result is a new tensor unless they work in place."""
FRESH = frozenset(
    "add sub mul truediv div true_divide neg matmul cat concat stack relu leaky_relu sigmoid tanh elu gelu silu pow sqrt rsqrt"
    " conv1d conv2d conv3d avg_pool1d avg_pool2d avg_pool3d max_pool2d batch_norm linear sum mean exp softplus clone clamp abs"
    " pooled_conv interpolate layer_norm group_norm instance_norm bmm einsum softmax".split()
)
"""Functions and methods whose result is a new tensor unless they work in place."""


def changes(root: nn.Module | None, node: fx.Node) -> list[fx.Node]:
    """The tensors that a node changes, or may change."""
    first = [arg for arg in node.args[:1] if isinstance(arg, fx.Node)] or list(node.all_input_nodes[:1])
    out = node.kwargs.get("out")
    if isinstance(out, fx.Node):
        return [out]
    if node.op == "call_module":
        assert root is not None
        module = root.get_submodule(str(node.target))
        if type(module).__module__.startswith("torch.nn") and not has_own_hooks(module):
            return first if getattr(module, "inplace", False) else []
        # One that is left whole, for its hooks or as TorchScript, may change what it is given.
        return list(node.all_input_nodes)
    if node.op == "call_method":
        name = str(node.target)
        return (
            first if name.endswith("_") and not name.endswith("__") and name != "requires_grad_" or name == "__setitem__" else []
        )
    schemas = _schemas(node.target)
    if any(schema.is_mutable for schema in schemas):
        return list(node.all_input_nodes)
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        if isinstance(node.args[0] if node.args else None, (list, tuple)) and name.endswith("_") and not name.endswith("__"):
            return list(
                dict.fromkeys(item for item in node.args[0] if isinstance(item, fx.Node))
            )  # torch._foreach_mul_ and its like
        if node.target in IN_PLACE or node.target is operator.setitem or node.kwargs.get("inplace"):
            return first
        if len(node.args) > 1 and node.args[-1] is True and "inplace" in _parameters(node.target)[-1:]:
            return first
        return first if name.endswith("_") and not name.endswith("__") else []
    return []


def _schemas(target: object) -> list[Any]:
    """Those of an operator, or of all its overloads."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name)._schema for name in target.overloads() if name != "out" and not name.endswith("_out")]
    return [target._schema] if isinstance(target, torch._ops.OpOverload) else []


def _parameters(function: object) -> tuple[str, ...]:
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    return code.co_varnames[: code.co_argcount] if code is not None else ()


def _is_fresh(root: nn.Module | None, node: fx.Node) -> bool:
    if node.op == "call_module":
        assert root is not None
        return isinstance(root.get_submodule(str(node.target)), FRESH_MODULES)
    if node.op in ("call_function", "call_method"):
        return (getattr(node.target, "__name__", None) or str(node.target)) in FRESH
    return False


def held_by_changes(root: nn.Module | None, graph: fx.Graph) -> dict[fx.Node, Refusal]:
    """The nodes that must stay because of what is changed in place, with the reason.

    Readers behind a node that changes a tensor are made to read its result: it is the same tensor.
    """
    nodes = list(graph.nodes)
    order = {node: number for number, node in enumerate(nodes)}
    changed: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        targets = changes(root, node)
        if not targets:
            continue
        changed[node] = targets
        if (
            len(targets) == 1
            and node.op in ("call_function", "call_method", "call_module")
            and node.target is not operator.setitem
        ):
            targets[0].replace_all_uses_with(node, lambda user, after=order[node]: order[user] > after)
    if not changed:
        return {}
    root_of = _groups(root, nodes, changed)
    held: dict[fx.Node, Refusal] = {}
    for number in sorted({order[root_of(node)] for node in changed}):
        members = [node for node in nodes if root_of(node) is nodes[number] and node.op != "output"]
        why = refuse(
            "tensor changed in place", f"by {next(n.name for n in members if n in changed)}", "one that nothing else reads"
        )
        held |= dict.fromkeys(_owners(root, nodes, members), why)
        if not _is_path(members):
            held |= dict.fromkeys(_with_readers(members), why)
        elif members[0].op in ("placeholder", "get_attr") or not _is_fresh(root, members[0]):
            held |= dict.fromkeys(members, why)  # whoever called sees the change
    return held


def changing(root: nn.Module | None, graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """For each node the nodes that change its tensor, or one that may share its memory; none for most."""
    nodes = list(graph.nodes)
    changed = {node: targets for node in nodes if (targets := changes(root, node))}
    root_of, found = _groups(root, nodes, changed), defaultdict(set)
    for node, targets in changed.items():
        for target in targets:
            found[root_of(target)].add(node)
    return {node: found[root_of(node)] for node in nodes if root_of(node) in found}


def _groups(root: nn.Module | None, nodes: list[fx.Node], changed: dict[fx.Node, list[fx.Node]]) -> Callable[[fx.Node], fx.Node]:
    """A function that gives one node of each group of those whose tensors may share memory."""
    group: dict[fx.Node, fx.Node] = {node: node for node in nodes}

    def root_of(node: fx.Node) -> fx.Node:
        while group[node] is not node:
            node = group[node]
        return node

    memories: dict[Any, fx.Node] = {}
    for node in nodes:
        if node.op in ("get_attr", "placeholder"):
            first = memories.setdefault(_memory(root, node), node)
            group[root_of(node)] = root_of(first)
        shares = node.op != "output" and node not in changed and not _is_fresh(root, node)
        for other in node.all_input_nodes if shares else ():
            group[root_of(node)] = root_of(other)
        for other in changed.get(node, ()):
            group[root_of(node)] = root_of(other)
    return root_of


def _owners(root: nn.Module | None, nodes: list[fx.Node], members: list[fx.Node]) -> list[fx.Node]:
    """Calls of modules that own one of the tensors: they read it too, which the graph does not show."""
    places = {_memory(root, node) for node in members if node.op == "get_attr"}
    if root is None or not places:
        return []
    calls = [(node, root.get_submodule(str(node.target))) for node in nodes if node.op == "call_module"]
    return [node for node, module in calls if any(_place(x) in places for x in (*module.parameters(), *module.buffers()))]


def _memory(root: nn.Module | None, node: fx.Node) -> Any:
    """What tells the memory of a module's tensor from others; the arguments of a call may all have the same."""
    if node.op == "placeholder":
        value = node.meta.get("example_value")
        return _place(value) if isinstance(value, torch.Tensor) and is_of_module(node) else "arguments"
    path, _, name = str(node.target).rpartition(".")
    module = root.get_submodule(path) if root is not None else None
    kinds = (module._parameters, module._buffers, vars(module)) if module is not None else ()
    value = next((own[name] for own in kinds if name in own), None)  # not by getattr, which would compute parametrized ones
    return _place(value) if isinstance(value, torch.Tensor) else node


def is_of_module(node: fx.Node) -> bool:
    """Whether an input of a graph of TorchDynamo's is a parameter or buffer."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    return any(f".{kind}[" in (name() if callable(name) else name) for kind in ("_parameters", "_buffers"))


def _place(x: torch.Tensor) -> int:
    plain = type(x) in (torch.Tensor, nn.Parameter, FakeTensor) and x.layout == torch.strided
    return x.untyped_storage()._cdata if plain and not torch._C._functorch.is_functorch_wrapped_tensor(x) else id(x)


def _is_path(members: list[fx.Node]) -> bool:
    """Whether each member is read by the next one only, so that no older state is seen."""
    return all(list(a.users) == [b] for a, b in zip(members, members[1:], strict=False))


def _with_readers(members: Iterable[fx.Node]) -> set[fx.Node]:
    return {node for member in members for node in (member, *member.users)}
