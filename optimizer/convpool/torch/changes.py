# SPDX-License-Identifier: Apache-2.0
"""Find what keeps the nodes of a graph from moving: operators that change a tensor in place, and contexts of forward.

A node that moves reads its inputs later than before.  That is the same only if nothing changes them in between.  Tensors that
share memory form a group; one in which something is changed is harmless where each member but the last is read by the next one
alone, so that nobody sees an older state.  All nodes of any other such group, and whoever reads from it, stay as they are.

Contexts are torch.no_grad(), torch.autocast(), transforms of torch.func and others.  In a graph of TorchDynamo's they are nodes
that read no tensor and give none.  Such a switch counts for all nodes behind it, up to the one that takes it back:

    _set_grad_enabled(False)                            _set_grad_enabled(True)
    enter = _enter_autocast("cpu", torch.bfloat16)      _exit_autocast(enter)
    _vmap_increment_nesting(4, "error")                 _vmap_decrement_nesting()

A pair is rewritten only where all of it runs in the same context, and in no transform, whose tensors the operator does not know.
"""

import types
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from convpool.algebra.geometry import Refusal, refuse

_IN_PLACE = "iadd iand idiv iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor setitem".split()
_OPAQUE = ("flat_apply", "invoke_leaf_function", "triton_kernel_wrapper_mutation")
"""Operators that may change all that they are given."""
_KNOWN = ("torch", "convpool", "einops", "_operator", "builtins", "math")
"""Packages whose functions may not, unless their names or arguments say so."""


def value_of(node: Any) -> Any:
    """What TorchDynamo or torch.export knows of a node's result: a tensor without numbers, say."""
    return node.meta.get("example_value", node.meta.get("val")) if isinstance(node, fx.Node) else None


def is_of_module(node: fx.Node) -> bool:
    """Return True if an input of a graph of TorchDynamo's is a parameter or buffer."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    return any(f".{kind}[" in (name() if callable(name) else name) for kind in ("_parameters", "_buffers"))


def changes(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node changes, or may change."""
    first = [item for item in pytree.tree_leaves(node.args[:1]) if isinstance(item, fx.Node)] or list(node.all_input_nodes[:1])
    if outs := [item for item in pytree.tree_leaves(node.kwargs.get("out")) if isinstance(item, fx.Node)]:
        return outs
    if node.op not in ("call_function", "call_method"):
        return list(node.all_input_nodes) if node.op == "call_module" else []
    target, name = node.target, _name(node)
    if name in _OPAQUE or not _is_known(target):
        return list(node.all_input_nodes)
    if written := _written(node, _schemas(target)):
        return written
    if bodies := _bodies(node):
        inside = {memory for body in bodies for item in body.nodes for one in changes(item) for memory in _tensors(one)}
        for item in _dropouts([node]):
            inside.update(_tensors(item.all_input_nodes[0]) if inside.intersection(_tensors(item)) else ())
        return [item for item in node.all_input_nodes if inside.intersection(_tensors(item)) and _is_read(item, target)]
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_" or name.strip("_") in _IN_PLACE
    inplace = node.kwargs.get("inplace") or any(arg is True for arg in node.args[-1:]) and "inplace" in _parameters(target)[-1:]
    return first if in_place or inplace else []


def _is_known(target: Any) -> bool:
    """Return False for what TorchDynamo calls and does not follow: numpy's, and what torch.compiler.allow_in_graph names."""
    owner = getattr(target, "__self__", None)
    home = getattr(owner if isinstance(owner, type) else target, "__module__", None) or "builtins"
    return home.split(".")[0] in _KNOWN and not home.startswith("torch._dynamo.")


def _is_read(item: fx.Node, target: Any) -> bool:
    """Return True if something else than one function may see a tensor change."""
    return not is_of_module(item) or any(user.target is not target for user in item.users)


def _bodies(node: fx.Node) -> list[fx.Graph]:
    """The graphs that a higher-order operator runs, such as a checkpoint of activations; their inputs are tensors around them."""
    owner = node.graph.owning_module
    given = [getattr(owner, str(item.target), None) for item in node.all_input_nodes if item.op == "get_attr"]
    return [body.graph for body in given if isinstance(body, fx.GraphModule)]


def _schemas(target: object) -> list[Any]:
    """The schemas of an operator, or of all its overloads; of a function in C++, the schema of the operator that it calls."""
    if isinstance(target, types.BuiltinFunctionType):
        target = getattr(getattr(torch.ops.aten, target.__name__, None), "default", None)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name)._schema for name in target.overloads() if name != "out" and not name.endswith("_out")]
    return [target._schema] if isinstance(target, torch._ops.OpOverload) else []


def _written(node: fx.Node, schemas: list[Any]) -> list[fx.Node]:
    """The inputs that an operator's schemas name, and what they do not: statistics, and the rows of a table."""
    names = [item.name for item in schemas[0].arguments] if schemas else _parameters(node.target)
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    written = [item.name for one in schemas for item in one.arguments if item.alias_info is not None and item.alias_info.is_write]
    updates = given.get("training", "training" not in names) and given.get("use_input_stats", True)
    written += ["running_mean", "running_var"] * bool(updates) + ["weight"] * (given.get("max_norm") is not None)
    items = dict.fromkeys(pytree.tree_leaves([given.get(name) for name in written]))
    return [item for item in items if isinstance(item, fx.Node) and (schemas or _is_read(item, node.target))]


def _parameters(function: object) -> tuple[str, ...]:
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    return code.co_varnames[: code.co_argcount] if code is not None else ()


def pinned_by_changes(graph: fx.Graph) -> dict[fx.Node, Refusal]:
    """The nodes that must stay because of what is changed in place, with the reason.

    Readers behind a node that changes a tensor are made to read its result, where it is the same tensor.
    """
    nodes = [node for node in graph.nodes if node.op != "output"]
    order = {node: number for number, node in enumerate(graph.nodes)}
    changed: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        targets = changes(node)
        if not targets:
            continue
        changed[node] = targets
        if len(targets) == 1 and _is_same(value_of(node), value_of(targets[0])):
            targets[0].replace_all_uses_with(node, lambda user, after=order[node]: order[user] > after)
    if not changed:
        return {}
    pinned: dict[fx.Node, Refusal] = {}
    for members in _groups(nodes, changed):
        names = [node.name for node in members if node in changed]
        if not names:
            continue
        why = refuse("tensor changed in place", f"by {names[0]}", "one that nothing else reads")
        if not all(list(a.users) == [b] for a, b in zip(members, members[1:], strict=False)):
            pinned |= {node: why for member in members for node in (member, *member.users)}
        elif members[0].op in ("placeholder", "get_attr"):
            pinned |= dict.fromkeys(members, why)  # whoever called sees the change
    return pinned


def inputs_of(graph: fx.Graph) -> tuple[dict[int, Any], list[int]]:
    """The places of inputs that are tensors, with their memories, and the places of those in memory that the graph changes."""
    nodes = [node for node in graph.nodes if node.op != "output"]
    changed = {node: targets for node in nodes if (targets := changes(node))}
    groups = [members for members in _groups(nodes, changed) if not changed.keys().isdisjoint(members)] if changed else []
    found = [node for members in groups for node in members]
    inputs = [(place, node) for place, node in enumerate(graph.find_nodes(op="placeholder")) if is_plain(value_of(node))]
    return {place: next(memories(node)) for place, node in inputs}, [place for place, node in inputs if node in found]


def _is_same(a: Any, b: Any) -> bool:
    """Return True if two values are surely one tensor.  An embedding or a normalization gives another than it changes."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or _memory(a) != _memory(b):
        return False
    return a is b or (a.shape, a.stride(), a.storage_offset()) == (b.shape, b.stride(), b.storage_offset())


def _groups(nodes: list[fx.Node], changed: dict[fx.Node, list[fx.Node]]) -> list[list[fx.Node]]:
    """The nodes whose tensors may share memory, in order, one list for each such group."""
    group: dict[Any, Any] = {}

    def root_of(item: Any) -> Any:
        while group.setdefault(item, item) is not item:
            item = group[item]
        return item

    for node in nodes:
        unknown = node.all_input_nodes if value_of(node) is None and node.op in ("call_function", "call_method") else ()
        for other in [*memories(node), *changed.get(node, unknown)]:
            group[root_of(node)] = root_of(other)
    found: dict[Any, list[fx.Node]] = {}
    for node in nodes:
        found.setdefault(root_of(node), []).append(node)
    return list(found.values())


def memories(node: fx.Node) -> Iterator[Any]:
    """What tells the memories of a node's tensors from others; the arguments of a call may all have the same."""
    if node.op == "placeholder" and not is_of_module(node):
        yield "arguments"
    for item in _dropouts([node]):
        yield from (*_tensors(item), *_tensors(item.all_input_nodes[0]))
    yield from _tensors(node)


def _dropouts(nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """The nodes of Dropout, in bodies too, last first.  Evaluated, they give their input, which TorchDynamo does not know."""
    for node in reversed(nodes):
        if node.op == "call_function" and _name(node).startswith("dropout"):
            yield node
        for body in _bodies(node):
            yield from _dropouts(list(body.nodes))


def _tensors(node: fx.Node) -> list[tuple[str, int]]:
    """The memories of the tensors in a node's result."""
    return [_memory(item) for item in pytree.tree_leaves(value_of(node)) if isinstance(item, Tensor)]


def _memory(tensor: Tensor) -> tuple[str, int]:
    return ("storage", tensor.untyped_storage()._cdata) if is_plain(tensor) else ("tensor", id(tensor))


def is_plain(tensor: Tensor) -> bool:
    """Return True for a tensor that has memory, of no other class than PyTorch's."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter, FakeTensor) and tensor.layout == torch.strided
    return plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


# ---- contexts ----

Context: TypeAlias = tuple[str, ...]
TRANSFORM = "torch.func"
"""In a context: a transform of torch.func, or a level of forward-mode derivatives."""
_GRAD = "_set_grad_enabled"
_BEGINS = ("_increment_nesting", "enter_dual_level")
_DATA = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, tuple, list, int, float)


def contexts_of(graph: fx.Graph) -> dict[fx.Node, Context]:
    """The context of each node of a graph that is called in the current mode of gradients."""
    found: dict[fx.Node, Context] = {}
    on: dict[Any, str] = {_GRAD: _text(_GRAD, (torch.is_grad_enabled(),))}
    for node in graph.nodes:
        data = any(isinstance(value_of(item), _DATA) for item in (node, *node.all_input_nodes))
        if node.op == "call_function" and (not data or _name(node).endswith(_BEGINS)):  # vmap's reads the size of an open batch
            _turn(on, node)
        found[node] = tuple(on.values())
    return found


def _turn(on: dict[Any, str], switch: fx.Node) -> None:
    """on: what is set, by the name of the function that sets it, or the switch that enters it."""
    name = _name(switch)
    if name.endswith(_BEGINS):
        on[switch] = TRANSFORM
    elif name.endswith(("_decrement_nesting", "exit_dual_level")):
        del on[[key for key, text in on.items() if text == TRANSFORM][-1]]
    elif name.startswith("_exit_") and switch.all_input_nodes:
        for entered in switch.all_input_nodes:
            del on[entered]
    else:
        on[switch if name.startswith("_enter_") else name] = _text(name, switch.args)


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))


def _text(name: str, args: tuple) -> str:
    return f"{name}({', '.join(map(str, args))})"
