# SPDX-License-Identifier: Apache-2.0
"""Sites and plans of a pair, the nodes that a plan becomes, and its report.

A plan becomes poolings and convolutions in the lowerings that it has chosen.  The pooling's output keeps its name, the new
convolution the old one's name, doc string and metadata."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from onnx import NodeProto, helper

from convpool.algebra.geometry import Lowering, PoolSpec, fuse_kernel
from convpool.algebra.parts import IDENTITY, OP_TYPE, to_channels_last
from convpool.ir import schema
from convpool.ir.edit import Edit
from convpool.ir.index import Scope
from convpool.ir.protos import label, stand_for
from convpool.ir.schema import VERSION
from convpool.report import Log
from convpool.rules.base import Plan, Reject, Rule, Site, verdict_of
from convpool.rules.convs import ConvLeaf, JoinTree, Pooling, Tree, conv_leaves, folded, macs, tree_nodes
from convpool.rules.linear import Step
from convpool.rules.pool_first.averages import Candidate
from convpool.rules.pool_first.trace import ShapeNodes, rewire


@dataclass(frozen=True)
class PairSite(Site):
    """A convolution and a pooling: node `root` ends an average over `tensor`, which is computed from convolution `conv`.  Where
    there is no average, `root` is the convolution.  averages: what may be averages of averages, from `root` on to the one of
    `tensor`; empty where `root` has been recognised as an AveragePool."""

    tensor: str
    conv: int
    pattern: str
    averages: tuple[Candidate, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the convolution and of the pooling, "" where there is none; of several poolings the first one first."""
        conv = label(self.scope.nodes[self.conv])
        if self.root == self.conv:
            return conv, ""
        roots = [item.root for item in reversed(self.averages)] or [self.root]
        return conv, *(label(self.scope.nodes[root]) for root in roots)


@dataclass(frozen=True)
class PairPlan(Plan):
    """A site that is exact to rewrite and pays.  `lowerings` belong to the convolutions of `tree`, left to right."""

    pattern: str
    pooling: Pooling
    tree: Tree
    lowerings: tuple[Lowering, ...] = ()
    fallback: Reject | None = None
    """Why a convolution does not become the operator that is asked for."""
    shapes: ShapeNodes = ShapeNodes()

    @cached_property
    def own(self) -> frozenset[int]:
        """The average and everything between it and the convolutions, with what reads their shapes."""
        return frozenset((*self.pooling.nodes, *tree_nodes(self.tree), *self.shapes.nodes))

    @property
    def operator_version(self) -> int:
        return VERSION if any(lowering.name == "convavgpool" for lowering in self.lowerings) else 0

    @property
    def timed(self) -> tuple[frozenset[int], str]:
        return self.own, self.pooling.output

    @cached_property
    def leaves(self) -> tuple[ConvLeaf, ...]:
        """The convolutions of `tree`, left to right."""
        return tuple(conv_leaves(self.tree))

    @cached_property
    def convolutions(self) -> tuple[int, ...]:
        return tuple(leaf.node for leaf in self.leaves)


class PairRule(Rule):
    """A rule whose plans are PairPlans."""

    def apply(self, plan: PairPlan, edit: Edit) -> None:
        Emitter(edit, plan.pooling, plan.lowerings).run(plan.tree)
        gone = {*plan.pooling.nodes, *tree_nodes(plan.tree)}
        edit.replace(max(plan.pooling.root, *tree_nodes(plan.tree)), gone)
        rewire(plan.shapes, edit)
        edit.drop_unread(index for leaf in plan.leaves for index in leaf.passed)

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

    def kept(self, site: PairSite, verdict: Reject | None, times: dict[str, float] | None, log: Log) -> None:
        """One report with the reason, unless the site is of nodes that an earlier round made."""
        if log.made(site.scope.nodes[site.root].output[0]):
            return
        conv, pool, *_ = site.names
        count = macs(site.scope, site.conv)
        values = {"macs_before": count, "macs_after": count, "times_us": times, **verdict_of(verdict)}
        log.kept(self.site_report(site.scope, site.pattern, None, conv=conv, pool=pool, **values))


def node_plan(scope: Scope, pooling: Pooling, leaf: ConvLeaf) -> PairPlan:
    """A convolution as a node of the operator, which saves no multiply-adds.  pooling: what stands in front of it."""
    count = macs(scope, leaf.node)
    lowering = Lowering("convavgpool", pooling.spec, leaf.conv, macs_before=count, macs_after=count)
    return PairPlan(scope, pooling.kind, pooling, leaf, (lowering,))


class Emitter:
    """The nodes of one plan, inputs first."""

    def __init__(self, edit: Edit, pooling: Pooling, lowerings: Sequence[Lowering]) -> None:
        """lowerings: of the tree's convolutions, left to right."""
        self._edit, self._scope, self._pooling = edit, edit.scope, pooling
        self._lowerings = iter(lowerings)
        self._nodes = edit.nodes
        self._root = edit.scope.nodes[pooling.root]

    def run(self, tree: Tree) -> None:
        """Make all nodes; the last one writes the pooling's output."""
        name = self._tree(tree)
        if self._pooling.factor != 1:
            name = self._scale(name)
        if self._pooling.batch:
            name = self._with_axes("ReduceMean", 18, name, [0])
        if self._pooling.squeeze:
            name = self._with_axes("Squeeze", 13, name, list(self._pooling.squeeze))
        outputs = self._nodes[-1].output
        outputs[list(outputs).index(name)] = self._pooling.output

    def _tree(self, tree: Tree) -> str:
        if isinstance(tree, str):
            return self._pool(tree, self._pooling.spec)
        if isinstance(tree, ConvLeaf):
            name = self._leaf(tree, next(self._lowerings))
        else:
            name = self._join(tree)
        for moved in tree.behind:
            name = self._move(moved, name)
        return name

    def _leaf(self, leaf: ConvLeaf, lowering: Lowering) -> str:
        old = self._scope.nodes[leaf.node]
        x, (weight, bias) = leaf.input, self._weights(leaf, lowering)
        output = self._fresh_output(old)
        if lowering.name == "convavgpool":
            assert lowering.pool is not None
            bias = bias or self._zero_bias(old)
            node = schema.make_node([x, weight, bias] if bias else [x, weight], output, lowering.pool, lowering.conv)
        else:
            if lowering.pool is not None or lowering.is_global:
                x = self._pool(x, lowering.pool)
            node = helper.make_node("Conv", [x, weight, bias] if bias else [x, weight], [output], **asdict(lowering.conv))
        stand_for(node, old)
        self._nodes.append(node)
        return output

    def _weights(self, leaf: ConvLeaf, lowering: Lowering) -> tuple[str, str]:
        """Names of the weights and the bias, in the form that the lowering takes; "" for no bias."""
        old = self._scope.nodes[leaf.node]
        weight, bias = old.input[1], old.input[2] if len(old.input) > 2 else ""
        if leaf.affine is IDENTITY:
            if lowering.name == "fused":
                key = (weight, leaf.conv, self._pooling.spec)
                weight = self._edit.shared(key, lambda: self._fuse(leaf, folded(leaf)[0]), f"{weight}_fused")
            elif lowering.name == "convavgpool":
                weight = self._channels_last(leaf, weight)
            return weight, bias
        array, bias_array = folded(leaf)
        if lowering.name == "convavgpool":
            weight = self._edit.constant(np.moveaxis(array, 1, -1), f"{weight}_channels_last")
        elif lowering.name == "fused":
            weight = self._edit.constant(self._fuse(leaf, array), f"{weight}_fused")
        else:
            weight = self._edit.constant(array, f"{weight}_scaled")
        wanted = f"{bias or old.output[0] + '_bias'}_scaled"
        return weight, "" if bias_array is None else self._edit.constant(bias_array, wanted)

    def _zero_bias(self, old: NodeProto) -> str:
        """A bias of zeros, "" where the number of channels is not known.  Inlining the operator's function without one gives a
        Conv with an empty third input, which onnxruntime does not bring into its blocked layout."""
        info = self._scope.info(old.input[1])
        if info.shape is None or not isinstance(info.shape[0], int) or not info.elem_type:
            return ""
        zeros = np.zeros(info.shape[0], helper.tensor_dtype_to_np_dtype(info.elem_type))
        key = ("zeros", info.elem_type, info.shape[0])
        return self._edit.shared(key, lambda: zeros, f"{old.output[0]}_bias")

    def _channels_last(self, leaf: ConvLeaf, weight: str) -> str:
        if leaf.weight is not None:
            value = leaf.weight
            return self._edit.shared((weight,), lambda: np.moveaxis(value.array(), 1, -1), f"{weight}_channels_last")
        return self._edit.add("Transpose", [weight], f"{weight}_channels_last", perm=to_channels_last(leaf.conv.rank))

    def _fuse(self, leaf: ConvLeaf, array: np.ndarray) -> np.ndarray:
        assert self._pooling.spec is not None
        return fuse_kernel(array, leaf.conv, self._pooling.spec).astype(array.dtype)

    def _pool(self, x: str, spec: PoolSpec | None) -> str:
        wanted = f"{self._pooling.output}_pooled_input"
        if spec is None:
            output = self._edit.add("GlobalAveragePool", [x], wanted)
        else:
            output = self._edit.add("AveragePool", [x], wanted, kernel_shape=spec.kernel_shape, strides=spec.strides)
            padding = {"pads": spec.pads, "count_include_pad": 1} if any(spec.pads) else {}
            schema.give(self._nodes[-1], padding | ({"dilations": spec.dilations} if max(spec.dilations) > 1 else {}))
        stand_for(self._nodes[-1], self._root)
        self._root = NodeProto()  # another one stands for none
        return output

    def _join(self, tree: JoinTree) -> str:
        inputs = [self._tree(child) for child in tree.children]
        node = deepcopy(self._scope.nodes[tree.node])
        node.input[:] = inputs
        node.output[0] = self._fresh_output(node)
        self._nodes.append(node)
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
        self._nodes.append(node)
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
            stand_for(self._nodes[-1], self._root)
            self._root = NodeProto()
        return output

    def _fresh_output(self, node: NodeProto) -> str:
        return self._edit.fresh(f"{node.output[0]}_pooled")
