"""Applying plans: the only module that changes a model.

A plan's nodes go and the new ones stand where its last node stood.  The pooling's output keeps its name, the new
convolution the old one's name, doc string and metadata.  A node of the operator that takes in others stands where the last
of them stood, with its output's name.  Weights are never edited in place: changed ones are new
constants, and those that nothing reads any more go at the end, unless they are graph inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, helper, numpy_helper

from convpool.algebra.affine import IDENTITY
from convpool.algebra.geometry import ConvSpec, PoolSpec, fuse_kernel
from convpool.algebra.lowering import Lowering
from convpool.ir import schema
from convpool.ir.constants import Evaluate, Read
from convpool.ir.index import Scope, index_model
from convpool.ir.protos import graphs_within, opset_of, value_names
from convpool.passes.absorption import Absorption, Weights
from convpool.passes.conv_pool import folded
from convpool.plan import ConvLeaf, JoinTree, Moved, OpaqueLeaf, Plan, Tree, conv_leaves, tree_nodes


class Rewriter:
    """Applies plans to one model; `finish` leaves it complete and consistent."""

    def __init__(self, model: ModelProto, read: Read, evaluate: Evaluate) -> None:
        self._model, self._read, self._evaluate = model, read, evaluate
        self._names = value_names(model)
        self._annotated = any(len(graph.value_info) for graph in graphs_within(model.graph))
        self._maybe_dead: set[str] = set()
        self._numbers: Counter[str] = Counter()
        self._fresh: set[str] = set()
        self.new_constants: set[str] = set()
        """Names of the constants made."""
        self._shared: dict[tuple, str] = {}
        self._operator_used = False

    def apply(self, scope: Scope, plans: list[Plan]) -> list[list[str]]:
        """Apply plans of one scope, whose nodes are disjoint.  The scope's index is stale afterwards.

        Returns for each plan what its ConvAvgPool nodes give, in the order of its convolutions.
        """
        if any(lowering.name == "convavgpool" for plan in plans for lowering in plan.lowerings):
            self._use_operator(scope, schema.VERSION)
        self._shared = {}
        removed: set[int] = set()
        inserted: dict[int, list[NodeProto]] = {}
        made = []
        for plan in plans:
            anchor = max(plan.pooling.root, *tree_nodes(plan.tree))
            inserted[anchor] = _Emitter(self, scope, plan).run()
            made.append([node.output[0] for node in inserted[anchor] if schema.is_operator(node)])
            removed |= {*plan.pooling.nodes, *tree_nodes(plan.tree)}
        passed = {index for plan in plans for leaf in conv_leaves(plan.tree) for index in leaf.passed}
        removed |= _unread(scope, passed, removed, inserted)
        self._replace(scope, removed, inserted, {plan.pooling.output for plan in plans})
        return made

    def absorb(self, scope: Scope, plans: list[Absorption]) -> None:
        """Let nodes of the operator take in what stands around them.  The scope's index is stale afterwards.

        No two plans share a node but upstream ones, which go if all that read them take them in.
        """
        self._use_operator(scope, schema.VERSION)
        if any(plan.parts != schema.PLAIN for plan in plans):
            self._use_operator(scope, schema.FUSED_VARIANTS_VERSION)
        self._shared = {}
        removed: set[int] = set()
        inserted: dict[int, list[NodeProto]] = {}
        for plan in plans:
            inserted[max(plan.node, *plan.downstream, plan.node)] = self._absorbing(plan)
            removed |= {plan.node, *plan.downstream}
            if plan.scaled is not None:
                inserted[plan.scaled.node] = self._scaled(scope, plan.scaled)
                removed.add(plan.scaled.node)
        removed |= _unread(scope, {index for plan in plans for index in plan.upstream}, removed, inserted)
        self._replace(scope, removed, inserted, {node.output[0] for nodes in inserted.values() for node in nodes})

    def _absorbing(self, plan: Absorption) -> list[NodeProto]:
        """The node of `plan` as it becomes, behind the constants that it needs."""
        scope, parts = plan.scope, plan.parts
        node, nodes = NodeProto(), []
        node.CopyFrom(scope.nodes[plan.node])
        before = schema.parts_of(node)
        given = dict(zip(before.inputs, node.input, strict=False))
        given["X"], stem = plan.x, node.output[0]
        elem_type = scope.info(given["W"]).elem_type or scope.info(node.input[0]).elem_type
        dtype = helper.tensor_dtype_to_np_dtype(elem_type)

        def constant(key: tuple, make: Callable[[], np.ndarray], wanted: str) -> str:
            return self.shared(scope, key, lambda: make().astype(dtype), wanted, nodes)

        if plan.weights is not None:
            new = plan.weights
            old = given.get("B", "")
            given["W"] = constant(("W", plan.node), lambda: new.weight, f"{given['W']}_scaled")
            if old or new.bias.any():
                given["B"] = constant(("B", plan.node), lambda: new.bias, f"{old or stem + '_bias'}_scaled")
        if plan.affine is not None:
            affine, shape = plan.affine, scope.info(node.input[1]).shape
            assert shape is not None and isinstance(shape[-1], int)
            channels = shape[-1] * next((item.i for item in node.attribute if item.name == "group"), 1)
            for name, values in (("scale", affine.scale), ("shift", affine.shift)):
                full = np.broadcast_to(values, (channels,))
                given[name] = constant((name, plan.node), lambda full=full: full, f"{stem}_{name}")
        if plan.residual is not None:
            given["R"] = plan.residual
        if parts != schema.PLAIN and not given.get("B"):
            shape = scope.info(node.input[1]).shape
            assert shape is not None
            given["B"] = constant(("zeros", elem_type, shape[0]), lambda: np.zeros(shape[0]), f"{stem}_bias")
        schema.give_parts(node, parts)
        del node.input[:]
        node.input.extend(given[name] for name in parts.inputs if name != "B" or given.get("B"))
        node.output[0] = plan.output
        return [*nodes, node]

    def _scaled(self, scope: Scope, weights: Weights) -> list[NodeProto]:
        """A convolution with other weights and bias."""
        node, nodes = NodeProto(), []
        node.CopyFrom(scope.nodes[weights.node])
        old = node.input[2] if len(node.input) > 2 else ""
        del node.input[2:]
        node.input[1] = self.shared(scope, ("W", weights.node), lambda: weights.weight, f"{node.input[1]}_scaled", nodes)
        if old or weights.bias.any():
            wanted = f"{old or node.output[0] + '_bias'}_scaled"
            node.input.append(self.shared(scope, ("B", weights.node), lambda: weights.bias, wanted, nodes))
        node.input.extend(scope.nodes[weights.node].input[3:])
        return [*nodes, node]

    def _replace(self, scope: Scope, removed: set[int], inserted: dict[int, list[NodeProto]], kept: set[str]) -> None:
        """Take nodes out and put others where `inserted` says; the tensors in `kept` stay what they are called."""
        gone = {name for index in removed for name in scope.nodes[index].output} - kept
        self._maybe_dead |= {name for index in removed for name in scope.nodes[index].input} - gone
        nodes: list[NodeProto] = []
        for index, node in enumerate(scope.nodes):
            nodes.extend(inserted.get(index, ()))
            if index not in removed:
                nodes.append(node)
        scope.proto.ClearField("node")
        scope.proto.node.extend(nodes)
        _drop_by_name(scope.proto.value_info, gone, lambda value: value.name)
        if not scope.is_function:
            _drop_by_name(scope.proto.quantization_annotation, gone, lambda item: item.tensor_name)

    def finish(self) -> None:
        """Remove constants that were read only by nodes that went, and add the operator's function if it is used."""
        while dead := self._dead_constants():
            for scope, names in dead:
                indices = [i for i, node in enumerate(scope.nodes) if set(node.output) & names]
                for index in reversed(indices):
                    self._maybe_dead |= set(scope.nodes[index].input)
                    del scope.proto.node[index]
                if isinstance(scope.proto, GraphProto):
                    _drop_by_name(scope.proto.initializer, names, lambda tensor: tensor.name)
                    _drop_by_name(scope.proto.quantization_annotation, names, lambda item: item.tensor_name)
                _drop_by_name(scope.proto.value_info, names, lambda value: value.name)
        if self._operator_used:
            self._complete_functions()

    def annotate(self, inferred: ModelProto | None) -> None:
        """Give the new tensors value_info, from `inferred`, if the model had any value_info."""
        if inferred is None or not self._annotated:
            return
        for graph, typed in zip(graphs_within(self._model.graph), graphs_within(inferred.graph), strict=True):
            known = {value.name for value in graph.value_info}
            known |= {value.name for value in graph.output}
            new = [value for value in typed.value_info if value.name in self._fresh and value.name not in known]
            for value in new:
                for dim in value.type.tensor_type.shape.dim:
                    if dim.dim_param.startswith("unk__"):  # a name that shape inference made up
                        dim.ClearField("dim_param")
            graph.value_info.extend(new)

    def made(self, name: str) -> bool:
        """Whether tensor `name` is new."""
        return name in self._fresh

    def fresh(self, wanted: str) -> str:
        """`wanted`, with a number behind it if something has that name already."""
        name = wanted
        while name in self._names:
            self._numbers[wanted] += 1
            name = f"{wanted}_{self._numbers[wanted]}"
        self._names.add(name)
        self._fresh.add(name)
        return name

    def constant(self, scope: Scope, array: np.ndarray, wanted: str) -> tuple[str, list[NodeProto]]:
        """A new constant tensor: its name, and the node that gives it where initializers are not to be had.

        Functions have no initializers, and before IR 4 each would have to become a graph input.
        """
        name = self.fresh(wanted)
        self.new_constants.add(name)
        tensor = numpy_helper.from_array(np.ascontiguousarray(array), name)
        if isinstance(scope.proto, FunctionProto) or self._model.ir_version < 4:
            return name, [helper.make_node("Constant", [], [name], value=tensor)]
        scope.proto.initializer.append(tensor)
        return name, []

    def shared(self, scope: Scope, key: tuple, make: Callable[[], np.ndarray], wanted: str, nodes: list[NodeProto]) -> str:
        """A constant that `make` gives, made once in a scope for all that ask with the same key."""
        if key not in self._shared:
            name, new = self.constant(scope, make(), wanted)
            nodes.extend(new)
            if new:  # a node further back in the graph may not see this one
                return name
            self._shared[key] = name
        return self._shared[key]

    def _complete_functions(self) -> None:
        """Add the functions of the operators in use, and remove those that a fused variant has replaced everywhere."""
        used, known = schema.used_in(self._model), set()
        for index in reversed(range(len(self._model.functions))):
            function = self._model.functions[index]
            if function.domain == schema.DOMAIN and function.name in schema.OP_TYPES:
                known.add(function.name)
                if function.name not in used:
                    del self._model.functions[index]
        self._model.functions.extend(schema.functions_for(used - known, opset_of(self._model.opset_import)))

    def _use_operator(self, scope: Scope, version: int) -> None:
        """Import the operator's domain; raise the IR version to one that has functions."""
        self._operator_used = True
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

    def _dead_constants(self) -> list[tuple[Scope, set[str]]]:
        if not self._maybe_dead:
            return []
        dead = []
        for scope in index_model(self._model, self._read, self._evaluate):
            names = {
                name
                for name in self._maybe_dead
                if name not in scope.readers
                and name not in scope.captured
                and name not in scope.outputs
                and name not in scope.inputs
                and (name in scope.initializers or _is_constant_node(scope, name))
            }
            if names:
                dead.append((scope, names))
        return dead


def read_instead(scope: Scope, inputs: dict[int, list[str]]) -> None:
    """Give nodes of one scope, by their numbers, other inputs.  The scope's index is stale afterwards."""
    for index, names in inputs.items():
        del scope.nodes[index].input[:]
        scope.nodes[index].input.extend(names)


class _Emitter:
    """The nodes of one plan, inputs first."""

    def __init__(self, rewriter: Rewriter, scope: Scope, plan: Plan) -> None:
        self._rewriter, self._scope, self._plan = rewriter, scope, plan
        self._lowerings = iter(plan.lowerings)
        self._nodes: list[NodeProto] = []
        self._pool_name = scope.nodes[plan.pooling.root].name

    def run(self) -> list[NodeProto]:
        """All nodes; the last one writes the pooling's output."""
        name = self._tree(self._plan.tree)
        if self._plan.pooling.squeeze:
            name = self._squeeze(name)
        self._nodes[-1].output[0] = self._plan.pooling.output
        return self._nodes

    def _tree(self, tree: Tree) -> str:
        if isinstance(tree, OpaqueLeaf):
            return self._pool(tree.tensor, self._plan.pooling.spec)
        if isinstance(tree, ConvLeaf):
            name = self._leaf(tree, next(self._lowerings))
        else:
            name = self._join(tree)
        for moved in tree.behind:
            name = self._move(moved, name)
        return name

    def _leaf(self, leaf: ConvLeaf, found: Lowering) -> str:
        old = self._scope.nodes[leaf.node]
        x, weight, bias = leaf.input, old.input[1], old.input[2] if len(old.input) > 2 else ""
        if found.name == "fused" and leaf.affine is IDENTITY:
            weight = self._fused(leaf, weight)
        elif leaf.affine is not IDENTITY:
            array, bias_array = folded(leaf)
            if found.name == "fused":
                array = self._fuse(leaf, array)
            if found.name == "convavgpool":
                weight = self._constant(np.moveaxis(array, 1, -1), f"{weight}_channels_last")
            else:
                weight = self._constant(array, f"{weight}_{'fused' if found.name == 'fused' else 'scaled'}")
            wanted = f"{bias or old.output[0] + '_bias'}_scaled"
            bias = "" if bias_array is None else self._constant(bias_array, wanted)
        elif found.name == "convavgpool":
            weight = self._channels_last(leaf, weight)
        output = self._fresh_output(old)
        if found.name == "convavgpool":
            assert found.pool is not None
            bias = bias or self._zero_bias(old)
            inputs = [x, weight, bias] if bias else [x, weight]
            node = schema.make_node(inputs, output, found.pool, found.conv)
        else:
            if found.pool is not None or found.is_global:
                x = self._pool(x, found.pool)
            node = _conv_node([x, weight, bias] if bias else [x, weight], output, found.conv)
        node.name, node.doc_string = old.name, old.doc_string
        node.metadata_props.extend(old.metadata_props)
        if not node.doc_string:
            node.ClearField("doc_string")
        self._nodes.append(node)
        return output

    def _zero_bias(self, old: NodeProto) -> str:
        """A bias of zeros, "" where the number of channels is not known.

        Inlining the operator's function without one gives a Conv with an empty third input, which onnxruntime does not
        take into its blocked layout.
        """
        info = self._scope.info(old.input[1])
        if info.shape is None or not isinstance(info.shape[0], int) or not info.elem_type:
            return ""
        zeros = np.zeros(info.shape[0], helper.tensor_dtype_to_np_dtype(info.elem_type))
        key = ("zeros", info.elem_type, info.shape[0])
        return self._rewriter.shared(self._scope, key, lambda: zeros, f"{old.output[0]}_bias", self._nodes)

    def _channels_last(self, leaf: ConvLeaf, weight: str) -> str:
        if leaf.weight is not None:
            value = leaf.weight
            return self._rewriter.shared(
                self._scope, (weight,), lambda: np.moveaxis(value.array(), 1, -1), f"{weight}_channels_last", self._nodes
            )
        output = self._rewriter.fresh(f"{weight}_channels_last")
        perm = schema.channels_last_perm(leaf.conv.rank)
        self._nodes.append(helper.make_node("Transpose", [weight], [output], perm=perm))
        return output

    def _fused(self, leaf: ConvLeaf, weight: str) -> str:
        key = (weight, leaf.conv, self._plan.pooling.spec)
        return self._rewriter.shared(self._scope, key, lambda: self._fuse(leaf, folded(leaf)[0]), f"{weight}_fused", self._nodes)

    def _fuse(self, leaf: ConvLeaf, array: np.ndarray) -> np.ndarray:
        assert self._plan.pooling.spec is not None
        return fuse_kernel(array, leaf.conv, self._plan.pooling.spec).astype(array.dtype)

    def _pool(self, x: str, spec: PoolSpec | None) -> str:
        output = self._rewriter.fresh(f"{self._plan.pooling.output}_pooled_input")
        if spec is None:
            node = helper.make_node("GlobalAveragePool", [x], [output])
        else:
            node = helper.make_node("AveragePool", [x], [output], kernel_shape=spec.kernel_shape, strides=spec.strides)
            if any(spec.pads):
                node.attribute.append(helper.make_attribute("pads", spec.pads))
                node.attribute.append(helper.make_attribute("count_include_pad", 1))
            if any(d > 1 for d in spec.dilations):
                node.attribute.append(helper.make_attribute("dilations", spec.dilations))
        node.name, self._pool_name = self._pool_name, ""
        self._nodes.append(node)
        return output

    def _join(self, tree: JoinTree) -> str:
        inputs = [self._tree(child) for child in tree.children]
        node = NodeProto()
        node.CopyFrom(self._scope.nodes[tree.node])
        del node.input[:]
        node.input.extend(inputs)
        node.output[0] = self._fresh_output(node)
        self._nodes.append(node)
        return node.output[0]

    def _move(self, moved: Moved, data: str) -> str:
        node = NodeProto()
        node.CopyFrom(self._scope.nodes[moved.node])
        node.input[moved.operand] = data
        node.output[0] = self._fresh_output(node)
        self._nodes.append(node)
        return node.output[0]

    def _squeeze(self, name: str) -> str:
        rank = conv_leaves(self._plan.tree)[0].conv.rank
        axes = list(range(2, rank + 2))
        output = self._rewriter.fresh(f"{name}_squeezed")
        if self._scope.opset < 13:
            node = helper.make_node("Squeeze", [name], [output], axes=axes)
        else:
            constant = self._constant(np.array(axes, np.int64), f"{name}_axes")
            node = helper.make_node("Squeeze", [name, constant], [output])
        node.name, self._pool_name = self._pool_name, ""
        self._nodes.append(node)
        return output

    def _constant(self, array: np.ndarray, wanted: str) -> str:
        name, nodes = self._rewriter.constant(self._scope, array, wanted)
        self._nodes.extend(nodes)
        return name

    def _fresh_output(self, node: NodeProto) -> str:
        return self._rewriter.fresh(f"{node.output[0]}_pooled")


def _conv_node(inputs: list[str], output: str, conv: ConvSpec) -> NodeProto:
    return helper.make_node(
        "Conv",
        inputs,
        [output],
        kernel_shape=conv.kernel_shape,
        strides=conv.strides,
        pads=conv.pads,
        dilations=conv.dilations,
        group=conv.group,
    )


def _unread(scope: Scope, candidates: set[int], removed: set[int], inserted: dict[int, list[NodeProto]]) -> set[int]:
    """The candidates whose results nothing reads any more once the other changes are made."""
    read = {name for nodes in inserted.values() for node in nodes for name in node.input} | scope.outputs | scope.captured
    dead: set[int] = set()
    for index in sorted(candidates, reverse=True):  # readers stand behind what they read
        readers = {reader for name in scope.nodes[index].output for reader in scope.readers.get(name, ())}
        if readers <= removed | dead and not read & set(scope.nodes[index].output):
            dead.add(index)
    return dead


def _is_constant_node(scope: Scope, name: str) -> bool:
    """Whether a node without effect but this constant gives `name`: it may go when nothing reads it."""
    index = scope.producer.get(name)
    if index is None or len(scope.nodes[index].output) > 1:
        return False
    return scope.constant(name) is not None or scope.arithmetic(name) is not None


def _drop_by_name(entries, names: set[str], name_of) -> None:
    for index in reversed([i for i, entry in enumerate(entries) if name_of(entry) in names]):
        del entries[index]
