# SPDX-License-Identifier: Apache-2.0
"""Changing a model: the one way by which rules do, and it knows no rule.

A rule hands the new nodes of a plan to an Edit, which collects the changes to one scope; `Editor.commit` makes them at once.
Weights are never edited in place: changed ones are new constants, and those that nothing reads any more go at the end, unless
they are graph inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, helper, numpy_helper

from convpool.algebra.parts import ACCUMULATIONS
from convpool.ir import protos, schema
from convpool.ir.index import Scope
from convpool.ir.inference import MADE_UP
from convpool.ir.protos import fresh_name, graphs_within, label, model_nodes, nodes_within, opset_of, refill, rename, value_names


class Edit:
    """The changes to one scope.  `nodes`: a plan's new ones, inputs first, up to its `replace`; new_nodes: all that it put in."""

    def __init__(self, editor: Editor, scope: Scope) -> None:
        self.scope, self._editor, self.fresh = scope, editor, editor.fresh
        self.nodes: list[NodeProto] = []
        self.new_nodes: list[NodeProto] = []
        self.removed: set[int] = set()
        self.inserted: dict[int, list[NodeProto]] = {}
        self.new_inputs: dict[int, list[str]] = {}
        """Other inputs of nodes that stay."""
        self._unread: set[int] = set()
        self._common: dict[tuple, str] = {}
        self.computed: dict[object, str] = {}
        """Tensors that several plans compute, by a key: a plan's nodes stand in front of those of plans applied after it."""

    def add(self, op_type: str, inputs: Sequence[str], wanted: str, **values: Any) -> str:
        """A new node, with these attributes; the name of what it gives, a `fresh` one."""
        output = self.fresh(wanted)
        self.nodes.append(helper.make_node(op_type, list(inputs), [output], **values))
        return output

    def replace(self, anchor: int, removed: Iterable[int]) -> None:
        """Take nodes out, and put the new ones where node `anchor` stood.  A tensor that both give keeps its name."""
        self.removed |= set(removed)
        self.inserted[anchor], self.nodes[:] = list(self.nodes), []
        self.new_nodes.extend(self.inserted[anchor])

    def drop_unread(self, nodes: Iterable[int]) -> None:
        """Take those of these nodes out whose results nothing reads once all changes are made."""
        self._unread |= set(nodes)

    def store(self, array: np.ndarray, name: str) -> None:
        """Store a constant by this very name; the node that has given it goes."""
        self.nodes.extend(self._editor.store(self.scope, array, name))

    def constant(self, array: np.ndarray, wanted: str) -> str:
        """A new constant tensor's name."""
        name = self.fresh(wanted)
        self.store(array, name)
        return name

    def common(self, key: tuple, make: Callable[[], np.ndarray], wanted: str) -> str:
        """A constant that `make` gives, made once for all of the scope's plans that ask with the same key."""
        if key not in self._common:
            count = len(self.nodes)
            name = self.constant(make(), wanted)
            if len(self.nodes) > count:  # a node further back in the graph may not see this one
                return name
            self._common[key] = name
        return self._common[key]

    def dead(self) -> set[int]:
        """The nodes of `drop_unread` that nothing reads any more."""
        scope = self.scope
        read = {name for nodes in self.inserted.values() for node in nodes_within(nodes) for name in node.input}
        read |= scope.outputs | {name for names in self.new_inputs.values() for name in names}
        bodies = [(child.owner, child.free_names()) for child in scope.children]
        found: set[int] = set()
        for index in sorted(self._unread, reverse=True):  # readers stand behind what they read
            given = scope.nodes[index].output
            readers = {i for name in given for i in scope.readers.get(name, ()) if name in self.new_inputs.get(i, (name,))}
            readers |= {owner for owner, names in bodies if not names.isdisjoint(given)}
            if readers <= self.removed | found and not read & set(scope.nodes[index].output):
                found.add(index)
        return found


class Editor:
    """Edits one model; `finish` leaves it complete and consistent."""

    def __init__(self, model: ModelProto, *, names: bool = True) -> None:
        """names: whether new nodes get names, in a model whose nodes have some."""
        self._model, self._gives_names = model, names
        self._names = value_names(model)
        self._node_names: set[str] = set()
        for node in model_nodes(model):
            self._node_names.add(node.name)
        self._annotated = any(len(graph.value_info) for graph in graphs_within(model.graph))
        self._maybe_dead: set[str] = set()
        self._fresh: set[str] = set()
        self.new_constants: set[str] = set()
        """Names of the constants made."""
        self.operator_used = False
        """True if `finish` has to see to the operator's functions and imports."""

    def edit(self, scope: Scope, operator_version: int = 0) -> Edit:
        """A new Edit of a scope.  operator_version: of the operator's domain, which the scope imports then; 0 for none."""
        if operator_version:
            self._use_operator(scope, operator_version)
        return Edit(self, scope)

    def commit(self, edit: Edit) -> None:
        """Make the changes.  The scope's index is stale afterwards."""
        scope, removed = edit.scope, edit.removed | edit.dead()
        for index, names in edit.new_inputs.items():
            scope.nodes[index].input[:] = names
        for node in (*sum(edit.inserted.values(), []), *(scope.nodes[index] for index in edit.new_inputs)):
            for specs in (devices.sharding_spec for devices in node.device_configurations):  # a copied node's, of its old tensors
                gone = {spec.tensor_name for spec in specs} - {*node.input, *node.output}
                _drop_by_name(specs, gone, lambda spec: spec.tensor_name)
        if not removed and not edit.inserted:
            return
        kept = {name for nodes in edit.inserted.values() for node in nodes for name in node.output}
        gone = {name for index in removed for name in scope.nodes[index].output} - kept
        self.operator_used = self.operator_used or any(schema.is_operator(scope.nodes[index]) for index in removed)
        self._maybe_dead |= {name for index in removed for name in scope.nodes[index].input} - gone
        named = self._gives_names and bool(self._node_names - {""})
        for node in (node for added in edit.inserted.values() for node in nodes_within(added)):
            if named and not node.name:  # tools make names of these, and onnxruntime refuses two of one name
                node.name = fresh_name(next(filter(None, node.output)), self._node_names)
            self._node_names.add(node.name)
        nodes: list[NodeProto] = []
        for index, node in enumerate(scope.nodes):
            nodes.extend(edit.inserted.get(index, ()))
            if index not in removed:
                nodes.append(node)
        refill(scope.proto.node, nodes)
        _drop_by_name(scope.proto.value_info, gone, lambda value: value.name)
        if not scope.is_function:
            _drop_by_name(scope.proto.quantization_annotation, gone, lambda item: item.tensor_name)

    def finish(self, scopes: Sequence[Scope], inferred: ModelProto | None, metadata: Iterable[tuple[str, str]]) -> None:
        """Remove constants that only nodes read that went, complete the operator's functions, note sizes, and add `metadata`.

        scopes: stale afterwards.  inferred: the model after shape inference."""
        for scope, names in reversed(self._dead_constants(scopes)):
            for index in reversed([i for i, node in enumerate(scope.nodes) if set(node.output) & names]):
                del scope.proto.node[index]
            if isinstance(scope.proto, GraphProto):
                _drop_by_name(scope.proto.initializer, names, lambda tensor: tensor.name)
                _drop_by_name(scope.proto.sparse_initializer, names, lambda tensor: tensor.values.name)
                _drop_by_name(scope.proto.quantization_annotation, names, lambda item: item.tensor_name)
            _drop_by_name(scope.proto.value_info, names, lambda value: value.name)
        if self.operator_used and not schema.complete_functions(self._model, opset_of(self._model.opset_import)):
            for holder in (self._model, *self._model.functions):
                _drop_by_name(holder.opset_import, {schema.DOMAIN}, lambda entry: entry.domain)
            _drop_by_name(self._model.metadata_props, {schema.TARGET_KEY}, lambda entry: entry.key)  # of the nodes that went
        self._annotate(inferred)
        self._make_way()
        for key, value in metadata:
            _drop_by_name(self._model.metadata_props, {key}, lambda entry: entry.key)
            self._model.metadata_props.add(key=key, value=value)

    def _annotate(self, inferred: ModelProto | None) -> None:
        """Give the new tensors of `inferred` value_info, if there is any, and leave no size there that the inputs leave open."""
        is_open = inferred is not None and protos.has_open_sizes(inferred)
        for dim, size in protos.noted_sizes(self._model, inferred, outputs=False) if inferred and is_open else ():
            if dim.HasField("dim_value") and 0 <= dim.dim_value != size.dim_value:
                dim.Clear()
        if inferred is None or not self._annotated:
            return
        for graph, typed, _ in protos.side_by_side(self._model, inferred):
            known = {value.name for value in (*graph.value_info, *graph.output)}
            there = {name for node in graph.node for name in node.output} & self._fresh - known
            new = [value for value in typed.value_info if value.name in there]
            for value in new:
                value.ClearField("doc_string")
                for dim in value.type.tensor_type.shape.dim:
                    if dim.dim_param.startswith(MADE_UP):
                        dim.ClearField("dim_param")
            graph.value_info.extend(new)

    def accumulate(self, accumulation: str, excluded: Callable[[str], bool]) -> bool:
        """Let the operator's nodes sum in this way, but those excluded by name; whether any node changes."""
        changed = False
        for node in filter(schema.is_operator, model_nodes(self._model)):
            if schema.accumulation_of(node) != ACCUMULATIONS[accumulation] and not excluded(label(node)):
                schema.give_accumulation(node, accumulation)
                changed = True
        return changed

    def made(self, name: str) -> bool:
        return name in self._fresh

    def fresh(self, wanted: str) -> str:
        """A name for a new tensor: `wanted`, with a number behind it if something has that name already."""
        name = fresh_name(wanted, self._names)
        self._fresh.add(name)
        return name

    def store(self, scope: Scope, array: np.ndarray, name: str) -> list[NodeProto]:
        """Make a constant; a node gives it in functions, and before IR 4, where an initializer would be a graph input."""
        self.new_constants.add(name)
        tensor = numpy_helper.from_array(np.asarray(array, order="C"), name)
        if isinstance(scope.proto, FunctionProto) or self._model.ir_version < 4 or name in scope.outputs:
            if scope.opset >= 9 or array.dtype.kind == "f":
                return [helper.make_node("Constant", [], [name], value=tensor)]
            wide = self.fresh(f"{name}_float")  # older Constants have no integers
            given = helper.make_node("Constant", [], [wide], value=numpy_helper.from_array(array.astype(np.float64), wide))
            return [given, helper.make_node("Cast", [wide], [name], to=tensor.data_type)]
        scope.proto.initializer.append(tensor)
        return []

    def _make_way(self) -> None:
        """Rename what onnxruntime left of the operator's functions in a file that it saved: it gives the same names again."""
        graph, start = self._model.graph, tuple(f"_inlfunc_{op_type}_" for op_type in schema.used_in(self._model))
        kept = {value.name for value in (*graph.input, *graph.output)} | self._fresh
        names = sorted(name for name in value_names(self._model) - kept if name.startswith(start))
        if names:
            rename(graph, {name: self.fresh(name[1:]) for name in names})

    def _use_operator(self, scope: Scope, version: int) -> None:
        """Import the operator's domain; raise the IR version to one that has functions."""
        self.operator_used = True
        outermost = scope
        while outermost.parent is not None:
            outermost = outermost.parent
        imports = [self._model.opset_import]
        if isinstance(outermost.proto, FunctionProto):
            imports.append(outermost.proto.opset_import)
        for entries in imports:
            known = [entry for entry in entries if entry.domain == schema.DOMAIN]
            for entry in known:
                entry.version = max(entry.version, version)
            if not known:
                entries.append(helper.make_opsetid(schema.DOMAIN, version))
        if self._model.ir_version < 4:
            # From IR 4 on these would be inputs that a caller may override, and no longer constants.
            initializers = {tensor.name for tensor in self._model.graph.initializer}
            _drop_by_name(self._model.graph.input, initializers, lambda value: value.name)
        self._model.ir_version = max(self._model.ir_version, schema.MIN_IR_VERSION)

    def _dead_constants(self, scopes: Sequence[Scope]) -> list[tuple[Scope, set[str]]]:
        """Constants that nothing reads any more, by scope: what nodes that went read, and what only these read in turn."""
        dead: dict[int, set[str]] = {number: set() for number in range(len(scopes))}
        gone: dict[int, set[int]] = {id(scope): set() for scope in scopes}
        pending = set(self._maybe_dead)
        while pending:
            more: set[str] = set()
            for number, scope in enumerate(scopes):
                for name in sorted(pending - dead[number]):
                    if _is_constant(scope, name) and not _is_read(scope, name, gone):
                        dead[number].add(name)
                        index = scope.producer.get(name)
                        if index is not None:
                            gone[id(scope)].add(index)
                            more |= set(scope.nodes[index].input)
            pending = more
        return [(scopes[number], names) for number, names in dead.items() if names]


def _is_read(scope: Scope, name: str, gone: dict[int, set[int]]) -> bool:
    """Return True if a node that stays reads a tensor of a scope, in it or in a body inside it, or a quantization annotation."""
    if name in scope.outputs or set(scope.readers.get(name, ())) - gone[id(scope)]:
        return True
    notes = scope.proto.quantization_annotation if isinstance(scope.proto, GraphProto) else ()
    if any(entry.value == name for note in notes for entry in note.quant_parameter_tensor_names):
        return True
    return name in scope.captured and any(not child.defines(name) and _is_read(child, name, gone) for child in scope.children)


def _is_constant(scope: Scope, name: str) -> bool:
    """Return True if an initializer, or a node with no other effect, gives `name`."""
    if name in scope.inputs or name in scope.trained:
        return False
    if name in scope.initializers or name in scope.sparse:
        return True
    index = scope.producer.get(name)
    if index is None or len(scope.nodes[index].output) > 1:
        return False
    return scope.constant(name) is not None or scope.arithmetic(name) is not None


def _drop_by_name(entries: Any, names: set[str], name_of: Callable[[Any], str]) -> None:
    for index in reversed([i for i, entry in enumerate(entries) if name_of(entry) in names]):
        del entries[index]
