"""Convolution, then average pooling: do the pooling first.

    x - Conv - (linear nodes) - average            x - ConvAvgPool - (nodes that do not fold)

Conditions, in the order in which they are checked: (1) no attribute refers to a function's; (2) the average is exact
to move (`pooling`); (3) all that stands between is linear, and nobody else reads it (`trace`, `linear`); (4) a
lowering exists (`lowering`); (5) it saves: the convolutions do at most 3/4 of their multiply-adds afterwards, and the
weighted cost falls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto, helper

from convpool.algebra import cost
from convpool.algebra.affine import IDENTITY, fold, holds, keeps, outside
from convpool.algebra.cost import Cost
from convpool.algebra.geometry import Ints, PoolSpec
from convpool.algebra.lowering import ORDERS, Lowering, lower, lowering_cost, nominal_size, without_kernel
from convpool.algebra.pads import fills_window
from convpool.algebra.refusal import Refusal
from convpool.ir.index import Scope
from convpool.ir.protos import AttributeReference, is_op, label
from convpool.passes.pooling import may_be_pooling, recognise
from convpool.passes.runtime import runtime_of
from convpool.passes.trace import (
    channel_count,
    conv_leaf,
    conv_rank,
    conv_upstream,
    moved_pads,
    pads_upstream,
    spatial_size,
    trace,
    zero_pads,
)
from convpool.plan import ConvLeaf, JoinTree, Plan, Pooling, Reject, Tree, conv_leaves, opaque_leaves, reject, rejection

ENOUGH = 0.75
"""Largest share of the multiply-adds that may remain: no rewrite without pooling strides passes on a large map."""
SUFFIXES = {"pool": "pool", "global": "global_pool", "slice_mean": "slice_mean"}
"""How each kind of average ends a pattern's name."""


@dataclass(frozen=True)
class Site:
    """A candidate: node `root` ends an average over `tensor`, which is computed from convolution `conv`.

    Where there is no average, `root` is the convolution.
    """

    scope: Scope
    root: int
    tensor: str
    conv: int
    pattern: str

    @property
    def names(self) -> tuple[str, str]:
        """Names of the convolution and of the pooling, "" where there is none."""
        return label(self.scope.nodes[self.conv]), "" if self.root == self.conv else label(self.scope.nodes[self.root])


def sites(scope: Scope) -> Iterator[Site]:
    """Every average that is computed from a convolution with only elementwise nodes and joins between."""
    for index in range(len(scope.nodes)):
        tensor = may_be_pooling(scope, index)
        conv = conv_upstream(scope, tensor) if tensor else None
        if tensor and conv is not None:
            op_type = scope.nodes[index].op_type
            kind = {"AveragePool": "pool", "GlobalAveragePool": "global", "ReduceMean": "global"}
            yield Site(scope, index, tensor, conv, f"conv_{SUFFIXES[kind.get(op_type, 'slice_mean')]}")


def check(site: Site, lowering: str, main_opset: int) -> Plan | Reject | None:
    """A Plan if the site is exact to rewrite and pays, otherwise why not; None if it is no average over windows.

    lowering: one of `algebra.lowering.REQUESTS`; main_opset: version of the standard operators in the main graph.
    """
    found = _traced(site)
    if not isinstance(found, tuple):
        return found
    scope, (pooling, tree) = site.scope, found
    tree = _unfold_overflow(tree)
    if pooling.spec is None:
        rank = conv_leaves(tree)[0].conv.rank
        size = spatial_size(scope, site.tensor, rank) or _tree_size(tree)
        if size is not None:
            ones, zeros = (1,) * rank, (0,) * (2 * rank)
            pooling = replace(pooling, spec=PoolSpec(size, ones, zeros, ones))
    plan = Plan(scope, _pattern(scope, pooling, tree), pooling, tree)
    return _choose(plan, lowering, main_opset)


def moving(site: Site) -> set[int]:
    """The convolutions that a rewrite of the site would move, whether it pays or not; none where it is not exact."""
    found = _traced(site)
    return {leaf.node for leaf in conv_leaves(found[1])} if isinstance(found, tuple) else set()


def _traced(site: Site) -> tuple[Pooling, Tree] | Reject | None:
    """The average and the convolutions that it could stand before: conditions (1) to (3)."""
    scope = site.scope
    rank = conv_rank(scope, site.conv)
    if rank is None:
        return reject(scope, site.conv, "shape of the weights", "unknown", "a known rank")
    try:
        pooling = recognise(scope, site.root, rank, spatial_size(scope, site.tensor, rank))
        if pooling is None or isinstance(pooling, Reject):
            return pooling
        tree = trace(scope, pooling.input, rank, frozenset(pooling.nodes))
        if isinstance(tree, Reject):
            return tree
        merged = _merged_pad(scope, tree, pooling.spec)
    except AttributeReference as error:
        return reject(scope, site.root, "attributes", f"a reference to the function's '{error}'", "values")
    return (pooling, tree) if merged is None else merged


def _merged_pad(scope: Scope, tree: Tree, pool: PoolSpec | None) -> Reject | None:
    """Why a tensor cannot be pooled as it is: onnxruntime would merge the Pad that gives it into the pooling, and fail."""
    for leaf in opaque_leaves(tree) if pool is not None else ():
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


def macs(site: Site) -> int | None:
    """Multiply-adds of the site's convolution for one sample, None where its sizes are unknown."""
    rank = conv_rank(site.scope, site.conv)
    try:
        leaf = conv_leaf(site.scope, site.conv, rank) if rank else None
    except AttributeReference:
        return None
    if not isinstance(leaf, ConvLeaf) or leaf.size is None:
        return None
    return cost.conv_cost(leaf.conv, leaf.weight_shape, leaf.size, 4).macs


def _choose(plan: Plan, request: str, main_opset: int) -> Plan | Reject:
    """The plan with a lowering for each convolution, the first that pays, or why there is none."""
    leaves = conv_leaves(plan.tree)
    slow = {leaf.node: without_kernel(leaf.conv) for leaf in leaves if request == "convavgpool"}
    failure: Reject | None = None
    order = ORDERS[request]
    # The cheapest lowering by time may leave too many multiply-adds (a pointwise convolution fused): then the others.
    attempts = [order, *((name,) for name in order)] if request == "auto" else [order[i:] for i in range(len(order))]
    for attempt in attempts:
        lowerings = []
        for leaf in leaves:
            admitted = [_lowering(plan, leaf, name, main_opset) for name in attempt]
            usable = [item for item in admitted if isinstance(item, Lowering)]
            refusal = slow.get(leaf.node)
            if refusal is not None and any(map(_is_direct, usable)):
                usable = [item for item in usable if not _is_direct(item)]
                failure = failure or rejection(plan.scope, leaf.node, refusal)
            if not usable:
                failure = failure or next(item for item in admitted if isinstance(item, Reject))
                break
            lowerings.append(min(usable, key=lambda f: _leaf_cost(plan, leaf, f).time) if request == "auto" else usable[0])
        else:
            outcome = _judge(plan, lowerings)
            if isinstance(outcome, Plan):
                return outcome
            failure = failure or outcome
    assert failure is not None
    return failure


def _is_direct(lowering: Lowering) -> bool:
    """Whether a box mean over windows stands before the convolution."""
    return lowering.name == "direct" and lowering.pool is not None


def _lowering(plan: Plan, leaf: ConvLeaf, name: str, main_opset: int) -> Lowering | Reject:
    """`lowering.lower`, or why not: a Pad would be merged into the box mean, or the type cannot hold the fused weights, each a
    share of those that there are."""
    scope, spec = plan.scope, plan.pooling.spec
    found = lower(leaf.layer, spec, name, runtime_of(scope, leaf.conv, main_opset))
    if isinstance(found, Refusal):
        return rejection(scope, leaf.node, found)
    for where, pad, orders in pads_upstream(scope, leaf.input) if found.pool is not None else ():
        if pad is not None and _reaches(where, pad, orders, found.pool):
            return reject(
                scope,
                leaf.node,
                f"Pad '{label(where.nodes[pad])}' in front of the box mean",
                "pads that reach its window, or unknown ones",
                "less, as onnxruntime demands",
            )
    if found.name == "fused" and leaf.weight is not None and leaf.weight.data_type == TensorProto.FLOAT16:
        assert spec is not None
        weight, _ = _folded(leaf)
        if not keeps(weight / spec.taps, np.dtype(np.float16)):
            return rejection(scope, leaf.node, outside("fused weights"))
    return found


def _reaches(scope: Scope, pad: int, orders: tuple[Ints | None, ...], box: PoolSpec) -> bool:
    """Whether a Pad's zeros, merged into the box mean, would fill a window of it; so do pads that are unknown.

    orders: the Transposes between, through which onnxruntime moves it.
    """
    pads = moved_pads(scope, pad, orders, box.rank)
    return pads is None or fills_window(pads, box)


def _judge(plan: Plan, lowerings: list[Lowering]) -> Plan | Reject:
    """Condition (5), over all of the tree; sizes that the model leaves open are taken as nominal ones."""
    scope, spec = plan.scope, plan.pooling.spec
    leaves = conv_leaves(plan.tree)
    bytes_ = _item_bytes(scope, leaves[0])
    before, after, priced = Cost(), Cost(), []
    for leaf, found in zip(leaves, lowerings, strict=True):
        size = leaf.size or nominal_size(leaf.conv, spec)
        old = cost.conv_cost(leaf.conv, leaf.weight_shape, size, bytes_)
        new = lowering_cost(found, leaf.layer, size, bytes_)
        before, after = before + old, after + new
        known = leaf.size is not None
        priced.append(replace(found, macs_before=old.macs if known else None, macs_after=new.macs if known else None))
    full = leaves[0].conv.output_size(leaves[0].size or nominal_size(leaves[0].conv, spec))
    window = spec or PoolSpec(full, (1,) * len(full), (0,) * (2 * len(full)), (1,) * len(full))
    pooled = window.output_size(full)
    channels = leaves[0].weight_shape[0]
    before += cost.pool_cost(window, channel_count(scope, plan.pooling.input) or channels, full, bytes_)
    steps = len(_moving(plan.tree))
    before += cost.affine_cost(steps, channels, full, bytes_)
    after += cost.affine_cost(steps, channels, pooled, bytes_)
    for opaque in opaque_leaves(plan.tree):
        after += cost.pool_cost(window, channel_count(scope, opaque.tensor) or channels, full, bytes_)
    if after.macs > ENOUGH * before.macs or after.time >= before.time:
        return reject(
            scope,
            leaves[0].node,
            f"saves nothing as {lowerings[0].name}",
            f"{after.macs:,} multiply-adds and {after.additions:,} additions after {before.macs:,} and {before.additions:,}",
            "a saving",
        )
    return replace(plan, lowerings=tuple(priced))


def _leaf_cost(plan: Plan, leaf: ConvLeaf, found: Lowering) -> Cost:
    size = leaf.size or nominal_size(leaf.conv, plan.pooling.spec)
    return lowering_cost(found, leaf.layer, size, _item_bytes(plan.scope, leaf))


def _pattern(scope: Scope, pooling: Pooling, tree: Tree) -> str:
    middle = ""
    if isinstance(tree, JoinTree):
        middle = "concat_" if is_op(scope.nodes[tree.node], "Concat") else "add_"
    return f"conv_{middle}{SUFFIXES[pooling.kind]}"


def _moving(tree: Tree) -> list[int]:
    """Joins and nodes that go behind the pooling."""
    if isinstance(tree, ConvLeaf):
        return [moved.node for moved in tree.behind]
    if isinstance(tree, JoinTree):
        return [tree.node, *(m.node for m in tree.behind), *(n for child in tree.children for n in _moving(child))]
    return []


def _unfold_overflow(tree: Tree) -> Tree:
    """Let affine maps move behind the pooling where their type cannot hold the folded weights."""
    if isinstance(tree, JoinTree):
        return replace(tree, children=tuple(_unfold_overflow(child) for child in tree.children))
    if not isinstance(tree, ConvLeaf) or tree.affine is IDENTITY:
        return tree
    assert tree.weight is not None
    dtype = helper.tensor_dtype_to_np_dtype(tree.weight.data_type)
    with np.errstate(over="ignore", invalid="ignore"):
        weight, bias = _folded(tree)
        if keeps(weight, dtype) and (bias is None or holds(bias, dtype)):
            return tree
    return replace(tree, affine=IDENTITY, behind=(*tree.folded, *tree.behind))


def folded(leaf: ConvLeaf) -> tuple[np.ndarray, np.ndarray | None]:
    """Weights [M, C/group, kernel...] and bias [M] or None with the affine map folded in, in the weights' type."""
    assert leaf.weight is not None
    if leaf.affine is IDENTITY:
        return leaf.weight.array(), None if leaf.bias is None else leaf.bias.array()
    dtype = helper.tensor_dtype_to_np_dtype(leaf.weight.data_type)
    weight, bias = _folded(leaf)
    return weight.astype(dtype), None if bias is None else bias.astype(dtype)


def _folded(leaf: ConvLeaf) -> tuple[np.ndarray, np.ndarray | None]:
    """`folded` in float64."""
    assert leaf.weight is not None
    return fold(leaf.weight.array(), None if leaf.bias is None else leaf.bias.array(), leaf.affine)


def _tree_size(tree: Tree) -> Ints | None:
    """Spatial sizes at the pooling by the convolution's own arithmetic, where shape inference gave none."""
    if isinstance(tree, ConvLeaf) and tree.size is not None:
        return tree.conv.output_size(tree.size)
    return None


def _item_bytes(scope: Scope, leaf: ConvLeaf) -> int:
    elem_type = scope.info(scope.nodes[leaf.node].input[1]).elem_type
    return helper.tensor_dtype_to_np_dtype(elem_type).itemsize if elem_type else 4
