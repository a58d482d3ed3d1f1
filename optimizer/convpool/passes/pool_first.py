# SPDX-License-Identifier: Apache-2.0
"""Convolution, then average pooling: do the pooling first.

    x - Conv - (linear nodes) - average            x - ConvAvgPool - (nodes that do not fold)

Conditions, in the order in which they are checked: (1) no attribute refers to a function's; (2) the average is exact
to move (`pooling`); (3) all that stands between is linear, and nobody else reads it (`trace`, `linear`, `shape_readers`); (4) a
lowering exists (`algebra.lowering`, `runtime`); (5) it saves: the convolutions do at most 3/4 of their multiply-adds
afterwards, and the weighted cost falls (`choose`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from onnx import helper

from convpool.algebra.affine import IDENTITY, holds, keeps
from convpool.algebra.geometry import Ints, PoolSpec
from convpool.algebra.lowering import ORDERS
from convpool.ir.index import Scope
from convpool.ir.protos import AttributeReference, attributes, is_op, label
from convpool.passes.base import BETWEEN, Context, Plan, Reject, reject
from convpool.passes.choose import choose
from convpool.passes.convs import conv_rank
from convpool.passes.linear import is_used
from convpool.passes.pads import zero_pads
from convpool.passes.pairs import PairPass, PairPlan, PairSite
from convpool.passes.pooling import average_of, candidates, recognise
from convpool.passes.shape_readers import shapes_of
from convpool.passes.sizes import spatial_size
from convpool.passes.trace import trace
from convpool.passes.tree import ConvLeaf, JoinTree, Pooling, Tree, conv_leaves, folded_exactly, opaque_leaves
from convpool.passes.upstream import conv_upstream

SUFFIXES = {"global": "global_pool"}
"""How kinds of averages end a pattern's name, where that is not the kind itself."""


class PoolFirst(PairPass):
    """Every average that is computed from a convolution with only elementwise nodes and joins between."""

    names = ("pool_first",)
    has_alternatives = True

    def sites(self, scope: Scope, context: Context) -> Iterator[PairSite]:
        """The averages of a scope."""
        return averages(scope)

    def check(self, site: PairSite, context: Context) -> PairPlan | Reject | None:
        """A plan if the site is exact to rewrite and pays, otherwise why not; None if it is no average over windows."""
        found = _traced(site)
        if not isinstance(found, tuple):
            return found
        scope, (pooling, tree) = site.scope, found
        if any(context.excluded(label(scope.nodes[node])) for node in pooling.nodes if pooling.split is not None):
            assert pooling.split is not None
            return reject(scope, pooling.split, "averages of its results", "one excluded by name", "none")
        shapes = shapes_of(scope, pooling, tree)
        if isinstance(shapes, Reject):
            return shapes
        tree = _unfold_overflow(tree)
        if pooling.spec is None:
            rank = conv_leaves(tree)[0].conv.rank
            size = spatial_size(scope, pooling.input, rank) or _tree_size(tree)
            if size is not None:
                ones, zeros = (1,) * rank, (0,) * (2 * rank)
                pooling = replace(pooling, spec=PoolSpec(size, ones, zeros, ones))
        return choose(PairPlan(scope, _pattern(scope, pooling, tree), pooling, tree, shapes=shapes), context)

    def alternatives(self, site: PairSite, context: Context) -> dict[str, Plan]:
        """A plan for each lowering of the request, by the lowerings of its convolutions.

        Not "direct" beside "convavgpool": they are the same nodes, once onnxruntime has inlined the function.
        """
        found: dict[str, Plan] = {}
        for name in ORDERS[context.options.lowering]:
            if name == "direct" and any("convavgpool" in key for key in found):
                continue
            plan = self.check(site, replace(context, options=replace(context.options, lowering=name)))
            if isinstance(plan, PairPlan):
                found.setdefault("+".join(lowering.name for lowering in plan.lowerings), plan)
        return found


def averages(scope: Scope) -> Iterator[PairSite]:
    """Every average that is computed from a convolution with only elementwise nodes and joins between."""
    for chain in candidates(scope):
        conv = conv_upstream(scope, chain[-1].input)
        if conv is not None:
            kind = chain[0].form.kind
            yield PairSite(scope, chain[0].root, chain[-1].input, conv, f"conv_{SUFFIXES.get(kind, kind)}", chain)


def moving(site: PairSite) -> set[int]:
    """The convolutions that a rewrite of the site would move, whether it pays or not; none where it is not exact."""
    try:
        found = _traced(site)
    except AttributeReference:
        return set()
    return {leaf.node for leaf in conv_leaves(found[1])} if isinstance(found, tuple) else set()


def _traced(site: PairSite) -> tuple[Pooling, Tree] | Reject | None:
    """The average and the convolutions that it could stand before: conditions (2) and (3)."""
    scope = site.scope
    rank = conv_rank(scope, site.conv)
    if rank is None:
        return reject(scope, site.conv, "shape of the weights", "unknown", "a known rank")
    pooling = recognise(scope, site.averages, rank)
    if isinstance(pooling, Reject):
        # Whoever mends the pooling would only learn then that something nonlinear stands in the way too.
        tree = trace(scope, site.tensor, rank, frozenset(item.root for item in site.averages))
        return tree if isinstance(tree, Reject) and tree.condition == BETWEEN else pooling
    if pooling is None:
        return None
    pooling = _before_split(scope, pooling, rank)
    tree = trace(scope, pooling.input, rank, frozenset(pooling.nodes))
    if isinstance(tree, Reject):
        return tree
    merged = _merged_pad(scope, tree, pooling.spec)
    return (pooling, tree) if merged is None else merged


def _before_split(scope: Scope, pooling: Pooling, rank: int) -> Pooling:
    """The one average of a tensor that a Split divides into parts, all averaged alike; else `pooling` as it is.

    conv - Split +- average         conv - average - Split +-
                 +- average                                +-
    """
    index = scope.producer.get(pooling.input)
    if index is None or not is_op(scope.nodes[index], "Split") or pooling.batch or {0, 1} & set(pooling.squeeze):
        return pooling
    node = scope.nodes[index]
    names = [name if is_used(scope, name) else "" for name in node.output]
    if attributes(node).get("axis", 0) % (rank + 2) > 1 or sum(map(bool, names)) < 2:
        return pooling
    found = [average_of(scope, name, rank) if name else None for name in names]
    for item in filter(None, found):
        if replace(item, root=pooling.root, nodes=pooling.nodes, input=pooling.input, output=pooling.output) != pooling:
            return pooling
    if any(name and item is None for name, item in zip(names, found, strict=True)):
        return pooling
    nodes = (index, *(node for item in found if item is not None for node in item.nodes))
    parts = tuple("" if item is None else item.output for item in found)
    return replace(pooling, nodes=nodes, input=node.input[0], split=index, parts=parts)


def _merged_pad(scope: Scope, tree: Tree, pool: PoolSpec | None) -> Reject | None:
    """Why a tensor cannot be pooled as it is: onnxruntime would merge the Pad that gives it into the pooling, and fail."""
    if pool is None:
        return None
    for leaf in opaque_leaves(tree):
        _, pads, nodes = zero_pads(scope, leaf.tensor, pool.rank)
        if any(pad >= k for pad, k in zip(pads, pool.kernel_shape * 2, strict=True)):
            return reject(
                scope,
                nodes[-1],
                "Pad that the pooling would follow",
                list(pads),
                f"less than {list(pool.kernel_shape)}, as onnxruntime demands",
            )
    return None


def _pattern(scope: Scope, pooling: Pooling, tree: Tree) -> str:
    middle = ""
    if isinstance(tree, JoinTree):
        middle = "concat_" if is_op(scope.nodes[tree.node], "Concat") else "add_"
    return f"conv_{middle}{SUFFIXES.get(pooling.kind, pooling.kind)}"


def _unfold_overflow(tree: Tree) -> Tree:
    """Let affine maps move behind the pooling where their type cannot hold the folded weights."""
    if isinstance(tree, JoinTree):
        return replace(tree, children=tuple(_unfold_overflow(child) for child in tree.children))
    if not isinstance(tree, ConvLeaf) or tree.affine is IDENTITY:
        return tree
    assert tree.weight is not None
    dtype = helper.tensor_dtype_to_np_dtype(tree.weight.data_type)
    with np.errstate(over="ignore", invalid="ignore"):
        weight, bias = folded_exactly(tree)
        if keeps(weight, dtype) and (bias is None or holds(bias, dtype)):
            return tree
    return replace(tree, affine=IDENTITY, behind=(*tree.folded, *tree.behind))


def _tree_size(tree: Tree) -> Ints | None:
    """Spatial sizes at the pooling by the convolution's own arithmetic, where shape inference gave none."""
    if isinstance(tree, ConvLeaf) and tree.size is not None:
        return tree.conv.output_size(tree.size)
    return None
