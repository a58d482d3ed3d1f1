# SPDX-License-Identifier: Apache-2.0
"""A pair: the way from a pooling's input back to the convolutions, sites and plans, the nodes that a plan becomes, its report.

`conv_upstream` finds the convolution that a report names, whether the pair is exact to move or not.  `trace` goes back through
linear nodes, and through Add, Sub, Sum, Mean and Concat.

    conv - linear... -+
                      Add - linear... - pooling      ->     Add of two pooled convolutions
    conv - linear... -+

A tensor on the way may have no other reader, since its value at full resolution is gone afterwards; Shapes of it have other ways
to what they give.  Below a join a branch that does not qualify is pooled as it is, if it provably has the spatial size of the
others (broadcasting over space does not commute with pooling; Concat broadcasts nothing).

`shape_nodes_of` plans for Shapes that a model reads off a tensor which a rewrite takes away, as exporters do for `view(n, c, -1)`
and `h * w`.

    x - Conv - h - Reshape - ReduceMean         x - ConvAvgPool
               |      |                         |
               +- Shape - Slice, Concat         +- Shape - Slice - Concat with [M, H, W]     where anything still reads it

A Shape does not keep h there if (1) all sizes of h but the first are static, and (2) the first one is too, or has the name of the
first size of a convolution's input.  Shapes that only serve the average go with it.

A plan becomes poolings and convolutions in the lowerings that it has chosen.  The pooling's output keeps its name, the new
convolution the old one's name, doc string and metadata.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from onnx import NodeProto, helper

from convpool.algebra.geometry import Lowered, PoolSpec, Refusal, fuse_kernel, pad_behind
from convpool.algebra.parts import IDENTITY, OP_TYPE, to_channels_last
from convpool.ir import schema
from convpool.ir.edit import Edit
from convpool.ir.index import FOLDABLE, Dim, Scope
from convpool.ir.protos import attributes, give, is_op, label, stand_for
from convpool.report import Log
from convpool.rules import convs
from convpool.rules.base import BETWEEN, Plan, Reject, Rule, Site, reason_fields, reject, rejection
from convpool.rules.linear import JOINS, NONLINEAR, Step, linear_step, op_of
from convpool.rules.pool_first.averages import PossibleAverage
from convpool.rules.sizes import same_size

SEARCH_LIMIT = 24
"""Nodes that the search visits at most: candidates are local."""
DEPTH_LIMIT = 100
"""Nodes on a way from the pooling that are looked at: below a join, what lies further back is pooled as it is."""


@dataclass(frozen=True)
class PairSite(Site):
    """A convolution and a pooling: node `root` ends an average over `tensor`, which is computed from convolution `conv`.  Where
    there is no average, `root` is the convolution.  averages: what may be averages of averages, from `root` on to the one of
    `tensor`; empty where `root` has been recognised as an AveragePool."""

    tensor: str
    conv: int
    pattern: str
    averages: tuple[PossibleAverage, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the convolution and of the pooling, "" where there is none; of several poolings the first one first."""
        conv = label(self.scope.nodes[self.conv])
        if self.root == self.conv:
            return conv, ""
        roots = [item.root for item in reversed(self.averages)] or [self.root]
        return conv, *(label(self.scope.nodes[root]) for root in roots)


def conv_upstream(scope: Scope, tensor: str) -> int | None:
    """The nearest convolution that `tensor` is computed from by elementwise nodes, joins and Transposes, exact or not; if there
    is none, also by nodes that rearrange, select or reduce."""
    ways = (upstream(scope, tensor, all_linear=all_linear) for all_linear in (False, True))
    return next((index for way in ways for index in way if is_op(scope.nodes[index], "Conv")), None)


def upstream(scope: Scope, tensor: str, *, all_linear: bool = False) -> Iterator[int]:
    """The nodes in front of `tensor`, nearest first.  all_linear: also past those that rearrange, select or reduce."""
    pending: list[str] = [tensor]
    seen: set[int] = set()
    while pending and len(seen) < SEARCH_LIMIT:
        index = scope.producer.get(pending.pop(0))
        if index is None or index in seen:
            continue
        seen.add(index)
        yield index
        node = scope.nodes[index]
        linear = op_of(node)
        if linear is not None and linear.rearranges and not all_linear and not is_op(node, "Pad", "Transpose", *JOINS):
            continue
        if is_op(node, *JOINS) or linear is not None and linear.binary:
            pending.extend(node.input)
        elif linear is not None or is_op(node, *NONLINEAR):
            pending.append(node.input[0])


def trace(scope: Scope, tensor: str, rank: int, inside: frozenset[int] = frozenset(), depth: int = 0) -> convs.Tree | Reject:
    """The tree of convolutions that `tensor` is computed from, or a Reject.  inside: nodes of the average itself, which may read
    `tensor` any number of times; depth: nodes from the average."""
    index = scope.producer.get(tensor)
    if index is None:
        return Reject(f"tensor '{tensor}'", "producer", "an input or constant", "a convolution")
    node = scope.nodes[index]
    others = reader_in_the_way(scope, tensor, inside)
    if others is not None:
        return reject(scope, index, f"output '{tensor}' {others}", "other readers", "only the pooling")
    if is_op(node, "Conv"):
        leaf = convs.conv_leaf(scope, index, rank)
        return leaf if isinstance(leaf, Reject) else convs.with_pads_in_front(scope, leaf)
    if depth == DEPTH_LIMIT:
        return reject(scope, index, "nodes between convolution and pooling", f"over {DEPTH_LIMIT}", "fewer")
    step = linear_step(scope, index, rank)
    if isinstance(step, Reject):
        return step
    if step is not None:
        for inner in step.before:
            name = scope.nodes[inner].output[0]
            if (others := reader_in_the_way(scope, name, frozenset())) is not None:
                return reject(scope, inner, f"output '{name}' {others}", "other readers", "only the pooling")
        tree = trace(scope, scope.nodes[(index, *step.before)[-1]].input[step.operand], rank, depth=depth + 1)
        return tree if isinstance(tree, Reject) else _with_step(scope, tree, step)
    if is_op(node, *JOINS):
        return _join(scope, index, rank, depth)
    return reject(scope, index, BETWEEN, node.op_type, "linear operators only")


def reader_in_the_way(scope: Scope, tensor: str, inside: frozenset[int]) -> str | None:
    """Name a reader of `tensor` beside one node or `inside`; Shapes that go do not count."""
    others = scope.other_readers(tensor)
    if others is None or tensor in scope.outputs or tensor in scope.captured:
        return others
    readers = [reader for reader in scope.readers[tensor] if not _is_replaceable_shape(scope, reader)]
    return None if len(readers) == 1 or readers and set(readers) <= inside else others


SLICE_OPSET = 10
"""The first opset whose Slice has inputs."""


def _is_replaceable_shape(scope: Scope, node: int) -> bool:
    """Return True if a node is a Shape of which at most the first size is open."""
    if not is_op(scope.nodes[node], "Shape") or any(item.ref_attr_name for item in scope.nodes[node].attribute):
        return False
    shape = scope.info(scope.nodes[node].input[0]).shape
    if not shape or not all(isinstance(n, int) for n in shape[1:]):
        return False
    return isinstance(shape[0], int) or isinstance(shape[0], str) and scope.opset >= SLICE_OPSET


def _with_step(scope: Scope, tree: convs.Tree, step: Step) -> convs.Tree | Reject:
    """`tree` with one more linear node behind it."""
    assert not isinstance(tree, str), "trace returns opaque leaves only below joins"
    nodes = (*tree.nodes, *step.before, step.node)
    if step.pads is not None and any(step.pads):
        if isinstance(tree, convs.JoinTree) or tree.behind:
            return reject(scope, step.node, "Pad behind nodes that move", list(step.pads), "Pad next to a convolution")
        conv = pad_behind(tree.conv, step.pads, any(scope.nodes[tree.node].input[2:]) or bool(tree.affine.shift.any()))
        return rejection(scope, step.node, conv) if isinstance(conv, Refusal) else replace(tree, conv=conv, nodes=nodes)
    if step.affine is IDENTITY:
        return replace(tree, nodes=nodes)
    if isinstance(tree, convs.ConvLeaf) and not tree.behind and convs.is_known(scope, tree) and step.affine is not None:
        if step.affine.fits(tree.weight_shape[0]):
            return replace(tree, affine=step.affine.after(tree.affine), folded=(*tree.folded, step), nodes=nodes)
    return replace(tree, behind=(*tree.behind, step), nodes=nodes)


def _join(scope: Scope, index: int, rank: int, depth: int) -> convs.JoinTree | Reject:
    node = scope.nodes[index]
    if is_op(node, "Concat"):
        axis = attributes(node).get("axis", 1) % (rank + 2)
        if axis > 1:
            return reject(scope, index, "axis of Concat", axis, "batch or channels")
    elif not same_size(scope, node.input, rank):
        return reject(scope, index, "spatial sizes of the operands", "not provably equal", "equal sizes")
    children, failures = [], []
    for name in node.input:
        child = trace(scope, name, rank, depth=depth + 1)
        if isinstance(child, Reject):
            failures.append(child)
        children.append(name if isinstance(child, Reject) else child)
    tree = convs.JoinTree(index, tuple(children), nodes=(index,))
    return tree if convs.conv_leaves(tree) else failures[0]


@dataclass(frozen=True)
class ShapeNode:
    """A Shape node and the sizes that it gives; `batch`: a tensor with the open one as its first, where one is open."""

    node: int
    sizes: tuple[Dim, ...]
    batch: str | None


@dataclass(frozen=True)
class ShapeNodes:
    """The fate of the Shapes of tensors that go.  dying: nodes that only serve the average."""

    kept: tuple[ShapeNode, ...] = ()
    dying: frozenset[int] = frozenset()

    @property
    def nodes(self) -> frozenset[int]:
        return self.dying | {item.node for item in self.kept}


def shape_nodes_of(scope: Scope, pooling: convs.Pooling, tree: convs.Tree) -> ShapeNodes | Reject:
    """Plan Shapes that read what a rewrite removes; a Reject if the open size is only there."""
    own = {*pooling.nodes, *convs.tree_nodes(tree)}
    gone = {name for node in own for name in scope.nodes[node].output} - {pooling.output}
    readers = {reader for name in gone for reader in scope.readers.get(name, ())} - own
    found = sorted(reader for reader in readers if _is_replaceable_shape(scope, reader))
    if not found:
        return ShapeNodes()
    # Shapes, and what is computed from them, that only the other inputs of the average need.
    names = (name for node in pooling.nodes for name in scope.nodes[node].input[1:])
    dying = scope.cone(names, lambda index: index not in own and is_op(scope.nodes[index], "Shape", *FOLDABLE))
    while read := {i for i in dying if any(scope.read_outside(name, own | dying) for name in scope.nodes[i].output)}:
        dying -= read
    kept = []
    for node in found:
        if node in dying:
            continue
        sizes = scope.sizes(scope.nodes[node].output[0])
        assert sizes is not None
        named = [name for name in sizes if not isinstance(name, int)]
        inputs = [leaf.input for leaf in convs.conv_leaves(tree) if (scope.info(leaf.input).shape or (None,))[0] in named]
        if named and not inputs:
            return reject(scope, node, "open size", named[0], "that of a convolution's input")
        kept.append(ShapeNode(node, sizes, inputs[0] if named else None))
    return ShapeNodes(tuple(kept), frozenset(dying))


@dataclass(frozen=True)
class PairPlan(Plan):
    """A site that is exact to rewrite and pays.  `lowerings` belong to the convolutions of `tree`, left to right."""

    pattern: str
    pooling: convs.Pooling
    tree: convs.Tree
    lowerings: tuple[Lowered, ...] = ()
    fallback: Reject | None = None
    """Why a convolution does not become the operator that is asked for."""
    shape_nodes: ShapeNodes = ShapeNodes()

    @cached_property
    def own(self) -> frozenset[int]:
        """The average, the convolutions and everything between, with what reads their shapes."""
        return frozenset((*self.pooling.nodes, *convs.tree_nodes(self.tree), *self.shape_nodes.nodes))

    @property
    def operator_version(self) -> int:
        return schema.POOLING_VERSION if any(lowering.name == "convavgpool" for lowering in self.lowerings) else 0

    @property
    def timed(self) -> tuple[frozenset[int], str]:
        return self.own, self.pooling.output

    @cached_property
    def leaves(self) -> tuple[convs.ConvLeaf, ...]:
        """The convolutions of `tree`, left to right."""
        return tuple(convs.conv_leaves(self.tree))

    @cached_property
    def convolutions(self) -> tuple[int, ...]:
        return tuple(leaf.node for leaf in self.leaves)


class PairRule(Rule):
    """A rule whose plans are PairPlans."""

    def apply(self, plan: PairPlan, edit: Edit) -> None:
        PairEmitter(edit, plan.pooling, plan.lowerings).run(plan.tree)
        gone = {*plan.pooling.nodes, *convs.tree_nodes(plan.tree)}
        edit.replace(max(plan.pooling.root, *convs.tree_nodes(plan.tree)), gone)
        rewire(plan.shape_nodes, edit)
        edit.drop_unread(index for leaf in plan.leaves for index in leaf.passed_pads)

    def rewritten(self, plan: PairPlan, outputs: list[str], times: dict[str, float] | None, log: Log) -> None:
        scope, made = plan.scope, iter(outputs)
        pool = label(scope.nodes[plan.pooling.root]) if plan.pooling.nodes else ""
        for leaf, lowering in zip(plan.leaves, plan.lowerings, strict=True):
            as_operator = lowering.name == "convavgpool"
            values: dict[str, Any] = {"macs_before": lowering.macs_before, "macs_after": lowering.macs_after, "times_us": times}
            values["operator"] = OP_TYPE if as_operator else None
            values["fallback"] = None if as_operator or plan.fallback is None else plan.fallback.why
            name = label(scope.nodes[leaf.node])
            site = self.site_report(scope, plan.pattern, lowering.name, conv=name, pool=pool, **values)
            log.rewritten(site, next(made) if as_operator else None)

    def kept(self, site: PairSite, why: Reject, times: dict[str, float] | None, log: Log) -> None:
        """One report with the reason, unless the site is of nodes that an earlier round made."""
        if log.made(site.scope.nodes[site.root].output[0]):
            return
        conv, pool, *_ = site.names
        count = convs.macs(site.scope, site.conv)
        values = {"macs_before": count, "macs_after": count, "times_us": times, **reason_fields(why)}
        log.kept(self.site_report(site.scope, site.pattern, None, conv=conv, pool=pool, **values))


class PairEmitter:
    """The nodes of one plan, inputs first."""

    def __init__(self, edit: Edit, pooling: convs.Pooling, lowerings: Sequence[Lowered]) -> None:
        """lowerings: of the tree's convolutions, left to right."""
        self._edit, self._scope, self._pooling = edit, edit.scope, pooling
        self._lowerings = iter(lowerings)
        self._root = edit.scope.nodes[pooling.root]

    def run(self, tree: convs.Tree) -> None:
        """Make all nodes; the last one writes the pooling's output."""
        name = self._tree(tree)
        if self._pooling.factor != 1:
            name = self._scale(name)
        if self._pooling.batch:
            name = self._with_axes("ReduceMean", 18, name, [0])
        if self._pooling.squeeze:
            name = self._with_axes("Squeeze", 13, name, list(self._pooling.squeeze))
        outputs = self._edit.nodes[-1].output
        outputs[list(outputs).index(name)] = self._pooling.output

    def _tree(self, tree: convs.Tree) -> str:
        if isinstance(tree, str):
            return self._pool(tree, self._pooling.spec)
        if isinstance(tree, convs.ConvLeaf):
            name = self._leaf(tree, next(self._lowerings))
        else:
            name = self._join(tree)
        for moved in tree.behind:
            name = self._move(moved, name)
        return name

    def _leaf(self, leaf: convs.ConvLeaf, lowering: Lowered) -> str:
        old = self._scope.nodes[leaf.node]
        x, (weight, bias) = leaf.input, self._weights(leaf, lowering)
        output = self._edit.fresh(f"{old.output[0]}_pooled")
        if lowering.name == "convavgpool":
            assert lowering.pool is not None
            bias = bias or self._zero_bias(old)
            node = schema.make_node([x, weight, bias] if bias else [x, weight], output, lowering.pool, lowering.conv)
        else:
            if lowering.pool is not None or lowering.is_global:
                x = self._pool(x, lowering.pool)
            node = helper.make_node("Conv", [x, weight, bias] if bias else [x, weight], [output], **asdict(lowering.conv))
        stand_for(node, old)
        self._edit.nodes.append(node)
        return output

    def _weights(self, leaf: convs.ConvLeaf, lowering: Lowered) -> tuple[str, str]:
        """Names of the weights and the bias, in the form that the lowering takes; "" for no bias."""
        old = self._scope.nodes[leaf.node]
        weight, bias = old.input[1], old.input[2] if len(old.input) > 2 else ""
        if leaf.affine is IDENTITY:
            if lowering.name == "fused":
                key = (weight, leaf.conv, self._pooling.spec)
                weight = self._edit.common(key, lambda: self._fuse(leaf, convs.folded_weights(leaf)[0]), f"{weight}_fused")
            elif lowering.name == "convavgpool":
                weight = self._channels_last(leaf, weight)
            return weight, bias
        array, bias_array = convs.folded_weights(leaf)
        if lowering.name == "convavgpool":
            weight = self._edit.constant(np.moveaxis(array, 1, -1), f"{weight}_channels_last")
        elif lowering.name == "fused":
            weight = self._edit.constant(self._fuse(leaf, array), f"{weight}_fused")
        else:
            weight = self._edit.constant(array, f"{weight}_scaled")
        return weight, "" if bias_array is None else self._edit.constant(bias_array, f"{bias or old.output[0] + '_bias'}_scaled")

    def _zero_bias(self, old: NodeProto) -> str:
        """A bias of zeros, "" where the number of channels is not known.  Inlining the operator's function without one gives a
        Conv with an empty third input, which onnxruntime does not bring into its blocked layout."""
        info = self._scope.info(old.input[1])
        if info.shape is None or not isinstance(info.shape[0], int) or not info.elem_type:
            return ""
        zeros = np.zeros(info.shape[0], helper.tensor_dtype_to_np_dtype(info.elem_type))
        return self._edit.common(("zeros", info.elem_type, info.shape[0]), lambda: zeros, f"{old.output[0]}_bias")

    def _channels_last(self, leaf: convs.ConvLeaf, weight: str) -> str:
        if leaf.weight is not None:
            value = leaf.weight
            return self._edit.common((weight,), lambda: np.moveaxis(value.array(), 1, -1), f"{weight}_channels_last")
        return self._edit.add("Transpose", [weight], f"{weight}_channels_last", perm=to_channels_last(leaf.conv.rank))

    def _fuse(self, leaf: convs.ConvLeaf, array: np.ndarray) -> np.ndarray:
        assert self._pooling.spec is not None
        return fuse_kernel(array, leaf.conv, self._pooling.spec).astype(array.dtype)

    def _pool(self, x: str, spec: PoolSpec | None) -> str:
        wanted = f"{self._pooling.output}_pooled_input"
        if spec is None:
            output = self._edit.add("GlobalAveragePool", [x], wanted)
        else:
            output = self._edit.add("AveragePool", [x], wanted, kernel_shape=spec.kernel_shape, strides=spec.strides)
            padding = {"pads": spec.pads, "count_include_pad": 1} if any(spec.pads) else {}
            give(self._edit.nodes[-1], padding | ({"dilations": spec.dilations} if max(spec.dilations) > 1 else {}))
        stand_for(self._edit.nodes[-1], self._root)
        self._root = NodeProto()  # a second pooling stands for no old node
        return output

    def _join(self, tree: convs.JoinTree) -> str:
        inputs = [self._tree(child) for child in tree.children]
        node = deepcopy(self._scope.nodes[tree.node])
        node.input[:] = inputs
        node.output[0] = self._edit.fresh(f"{node.output[0]}_pooled")
        self._edit.nodes.append(node)
        return node.output[0]

    def _move(self, moved: Step, data: str) -> str:
        """A linear node behind the pooling, or a Gather of the channels that views pick."""
        node = deepcopy(self._scope.nodes[moved.node])
        if moved.channels:
            order = self._edit.constant(np.array(moved.channels, np.int64), f"{node.output[0]}_channels")
            node = helper.make_node("Gather", [data, order], node.output[:1], axis=1)
        node.input[moved.operand] = data
        for number, name in enumerate(node.output):
            node.output[number] = name and self._edit.fresh(f"{name}_pooled")
        self._edit.nodes.append(node)
        return node.output[moved.result]

    def _scale(self, name: str) -> str:
        dtype = helper.tensor_dtype_to_np_dtype(self._scope.info(self._pooling.input).elem_type)
        factor = self._edit.constant(np.array(self._pooling.factor, dtype), f"{self._pooling.output}_factor")
        return self._edit.add("Mul", [name, factor], f"{self._pooling.output}_scaled")

    def _with_axes(self, op_type: str, from_opset: int, name: str, axes: list[int]) -> str:
        """A Squeeze or ReduceMean; its axes are an input from some opset on."""
        by_attribute = self._scope.opset < from_opset
        inputs = [name] if by_attribute else [name, self._edit.constant(np.array(axes, np.int64), f"{name}_axes")]
        wanted = f"{name}_{'squeezed' if op_type == 'Squeeze' else 'mean'}"
        output = self._edit.add(op_type, inputs, wanted, **({"axes": axes} if by_attribute else {}))
        if op_type == "Squeeze":
            stand_for(self._edit.nodes[-1], self._root)
            self._root = NodeProto()
        return output


def rewire(found: ShapeNodes, edit: Edit) -> None:
    """Let the Shapes that stay give the same without the tensor that goes, and drop the others."""
    for item in found.kept:
        output = edit.scope.nodes[item.node].output[0]
        if item.batch is None:
            known = edit.constant(np.array(item.sizes, np.int64), f"{output}/sizes")
            edit.nodes.append(helper.make_node("Identity", [known], [output]))
        else:
            whole, first = edit.fresh(f"{output}/input"), edit.fresh(f"{output}/batch")
            zero, one = (edit.constant(np.array([n], np.int64), f"{output}/{n}") for n in (0, 1))
            rest = edit.constant(np.array(item.sizes[1:], np.int64), f"{output}/sizes")
            edit.nodes.append(helper.make_node("Shape", [item.batch], [whole]))
            edit.nodes.append(helper.make_node("Slice", [whole, zero, one, zero], [first]))
            edit.nodes.append(helper.make_node("Concat", [first, rest], [output], axis=0))
        edit.replace(item.node, {item.node})
    edit.drop_unread(found.dying)
