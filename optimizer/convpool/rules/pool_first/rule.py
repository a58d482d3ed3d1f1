# SPDX-License-Identifier: Apache-2.0
"""Convolution, then average pooling: do the pooling first.

    x - Conv - (linear nodes) - average            x - ConvAvgPool - (nodes that do not fold)

Conditions, in the order in which they are checked: (1) no attribute refers to a function's (`ir.protos` raises, `rules.base`
refuses); (2) the average is exact to move (`averages`); (3) all that stands between is linear, and nobody else reads it
(`pairs.trace`, `rules.linear`); (4) no weight is infinite; (5) a lowering exists (`algebra.geometry`); (6) it saves: the
convolutions do at most 3/4 of their multiply-adds afterwards, and the weighted cost falls (`choose`).  A site gets the first
lowering that is admitted and pays, by the cost of all of its tree.

`rules.convs` has what these files hand on: a `Pooling`, and the `ConvLeaf`s and `JoinTree`s in front of it.  `pairs` writes the
nodes (`PairRule.apply`).  What stands behind the average goes into the node later (`rules.neighbours.fuse`, stage epilogues)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto, helper

from convpool.algebra import geometry
from convpool.algebra.geometry import COUNTED, PoolSpec, Refusal, fills_window, miscounts, refuse, whole_map
from convpool.algebra.parts import IDENTITY, holds, keeps, outside
from convpool.ir.index import Scope
from convpool.ir.protos import AttributeReference, is_op, label
from convpool.ir.schema import POOL_DILATIONS_OPSET
from convpool.options import OptimizeOptions
from convpool.report import OF_TARGET
from convpool.rules import convs
from convpool.rules.base import BETWEEN, Context, Plan, Reject, reject, rejection, spatial_size
from convpool.rules.pool_first.averages import possible_averages, recognise
from convpool.rules.pool_first.pairs import PairPlan, PairRule, PairSite, conv_upstream, shape_nodes_of, trace

SUFFIXES = {"global": "global_pool"}
"""How kinds of averages end a pattern's name, where that is not the kind itself."""


class PoolFirst(PairRule):
    """Every average that is computed from a convolution with only elementwise nodes and joins between."""

    names = ("pool_first",)
    has_alternatives = True

    def sites(self, scope: Scope, context: Context) -> Iterator[PairSite]:
        return pair_sites(scope)

    def check(self, site: PairSite, context: Context) -> PairPlan | Reject | None:
        found = _average_and_tree(site, context)
        if not isinstance(found, tuple):
            return found
        scope, (pooling, tree) = site.scope, found
        shape_nodes = shape_nodes_of(scope, pooling, tree)
        if isinstance(shape_nodes, Reject):
            return shape_nodes
        leaves = convs.conv_leaves(tree)
        for leaf in leaves:
            if leaf.weight is not None and np.isinf(leaf.weight.array()).any():
                # Of a map of both signs it makes infinities of both signs, whose mean is NaN.
                return reject(scope, leaf.node, "weights", "infinity", "finite numbers")
        tree = _unfold_overflow(tree)
        if pooling.spec is None:
            size = spatial_size(scope, pooling.input, leaves[0].conv.rank)
            if size is None and isinstance(tree, convs.ConvLeaf) and tree.size is not None:
                size = tree.conv.output_size(tree.size)  # where shape inference gave none
            pooling = pooling if size is None else replace(pooling, spec=whole_map(size))
        if pooling.spec is not None and min(pooling.spec.kernel_shape) < 1:
            return reject(scope, pooling.root, "window", list(pooling.spec.kernel_shape), "a feature map with elements")
        middle = ("concat_" if is_op(scope.nodes[tree.node], "Concat") else "add_") if isinstance(tree, convs.JoinTree) else ""
        pattern = f"conv_{middle}{SUFFIXES.get(pooling.kind, pooling.kind)}"
        return choose(PairPlan(scope, pattern, pooling, tree, shape_nodes=shape_nodes), context)

    def alternatives(self, site: PairSite, context: Context) -> dict[str, Plan]:
        """A plan for each lowering of the request; none for "direct" beside "convavgpool", the same nodes once inlined."""
        found: dict[str, Plan] = {}
        for name in geometry.ORDERS[context.options.lowering]:
            if name == "direct" and any("convavgpool" in key for key in found):
                continue
            plan = self.check(site, replace(context, options=replace(context.options, lowering=name)))
            if isinstance(plan, PairPlan):
                found.setdefault("+".join(lowering.name for lowering in plan.lowerings), plan)
        return found


def pair_sites(scope: Scope) -> Iterator[PairSite]:
    """The sites of `PoolFirst`, of which other rules ask too."""
    for chain in possible_averages(scope):  # the last average first
        conv = conv_upstream(scope, chain[-1].input)
        if conv is not None:
            kind = chain[0].spelling.kind
            yield PairSite(scope, chain[0].root, chain[-1].input, conv, f"conv_{SUFFIXES.get(kind, kind)}", chain)


def moved_convolutions(site: PairSite, context: Context) -> set[int]:
    """The convolutions that a rewrite of the site would move, whether it pays or not; none where it is not exact."""
    try:
        found = _average_and_tree(site, context)
    except AttributeReference:
        return set()
    return {leaf.node for leaf in convs.conv_leaves(found[1])} if isinstance(found, tuple) else set()


def _average_and_tree(site: PairSite, context: Context) -> tuple[convs.Pooling, convs.Tree] | Reject | None:
    """The average and the convolutions that it could stand before: conditions (2) and (3)."""
    scope = site.scope
    rank = convs.conv_rank(scope, site.conv)
    if isinstance(rank, Reject):
        return rank
    pooling = recognise(scope, site.averages, rank)
    if isinstance(pooling, Reject):
        # Whoever mends the pooling would only learn then that something nonlinear stands in the way too.
        tree = trace(scope, site.tensor, rank, frozenset(item.root for item in site.averages))
        return tree if isinstance(tree, Reject) and tree.condition == BETWEEN else pooling
    if pooling is None:
        return None
    tree = trace(scope, pooling.input, rank, frozenset(pooling.nodes))
    if isinstance(tree, Reject):
        return tree
    return _against_opaque(scope, tree, pooling, context) or (pooling, tree)


def _against_opaque(scope: Scope, tree: convs.Tree, pooling: convs.Pooling, context: Context) -> Reject | None:
    """Why a tensor cannot be pooled as it is: windows of several averages have gaps, which AveragePool has from opset 19 on, or
    onnxruntime would merge the Pad that gives the tensor into the pooling, and fail."""
    pool = pooling.spec
    if pool is None or context.options.for_torch:
        return None
    for leaf in convs.opaque_leaves(tree):
        if max(pool.dilations) > 1 and scope.opset < POOL_DILATIONS_OPSET:
            expected = f"1 on every axis before opset {POOL_DILATIONS_OPSET}"
            return reject(scope, pooling.root, f"dilations of the average of '{leaf}'", list(pool.dilations), expected)
        _, pads, passed = convs.zero_pads(scope, leaf, pool.rank)
        if any(pad >= k for pad, k in zip(pads, pool.kernel_shape * 2, strict=True)):
            expected = f"less than {list(pool.kernel_shape)}, as onnxruntime demands"
            return reject(scope, passed[-1], "Pad that the pooling would follow", list(pads), expected)
        if scope.opset >= POOL_DILATIONS_OPSET and miscounts(pads):
            return reject(scope, passed[-1], "Pad that the pooling would follow", list(pads), COUNTED)
    return None


def _unfold_overflow(tree: convs.Tree) -> convs.Tree:
    """Let affine maps move behind the pooling where their type cannot hold the folded weights."""
    if isinstance(tree, convs.JoinTree):
        return replace(tree, children=tuple(_unfold_overflow(child) for child in tree.children))
    if not isinstance(tree, convs.ConvLeaf) or tree.affine is IDENTITY:
        return tree
    assert tree.weight is not None
    dtype = helper.tensor_dtype_to_np_dtype(tree.weight.data_type)
    with np.errstate(over="ignore", invalid="ignore"):
        weight, bias = convs.exact_weights(tree)
        if keeps(weight, dtype) and (bias is None or holds(bias, dtype)):
            return tree
    return replace(tree, affine=IDENTITY, behind=(*tree.folded, *tree.behind))


ENOUGH = 0.75
"""Largest share of the multiply-adds that may remain: no rewrite without pooling strides passes on a large map."""


@dataclass(frozen=True)
class Attempt:
    """Lowerings to try for every convolution of a plan, the first that is admitted.  by_cost: the cheapest, but for the operator.
    direct_needs_kernel: no `direct` without a fast kernel; on three axes without groups TensorRT alone loses by it."""

    names: tuple[str, ...]
    by_cost: bool = False
    direct_needs_kernel: bool = False


FEW_CHANNELS, LEAST_FUSED, MOST_OVERLAPPING = 8, 512, 49
"""A GPU is slow with one fused convolution to at most so many channels at fewer than so many positions of an image; and with
overlapping windows of more than so many elements, each summed by a thread."""
LEAST_IN_TENSORRT = 3000
"""The fewest positions of all images for which TensorRT gains by one fused convolution on three axes."""
MANY_CHANNELS = 12
"""More than so many times as many input as output channels make averages slow on a GPU: a rewrite for both devices has to pay on
each of them."""
BY_COST = (Attempt(("direct", "fused"), by_cost=True), Attempt(("direct",)), Attempt(("fused",)))
"""The cheapest lowering by time may leave too many multiply-adds (a pointwise convolution fused): then the others."""


def choose(plan: PairPlan, context: Context) -> PairPlan | Reject:
    """The plan with a lowering for each convolution, the first that pays, or why there is none."""
    failure = limit = None  # the first reason, and the first that another target would lift
    order, operator = geometry.ORDERS[context.options.lowering], context.options.lowering == "convavgpool"
    # Each leaves out the first lowering of the attempt before, which has failed with it.
    attempts = tuple(Attempt(order[i:], direct_needs_kernel=operator) for i in range(len(order)))
    if context.options.lowering == "auto":
        attempts = BY_COST
    elif operator and context.options.direct_without_kernel:
        attempts = (Attempt(order, by_cost=True), *BY_COST)
    for attempt in attempts:
        lowerings = []
        for leaf in plan.leaves:
            found, reason = _of_leaf(plan, leaf, attempt, context)
            failure = failure or reason
            limit = limit or (reason if reason is not None and reason.expected.endswith(OF_TARGET) else None)
            if found is None:
                break
            lowerings.append(found)
        else:
            opset = _cpu_opset(plan, context, {found.name for found in lowerings})
            outcome = _judge(plan, lowerings, opset)
            many = any(c * leaf.conv.group > MANY_CHANNELS * m for leaf in plan.leaves for m, c in (leaf.weight_shape[:2],))
            if opset and operator and many and isinstance(outcome, PairPlan):
                outcome = _judge(plan, lowerings, 0)  # on a GPU
            if isinstance(outcome, PairPlan):
                return replace(outcome, fallback=_fallback(outcome, failure, context))
            failure = failure or outcome
    assert failure is not None
    return limit or failure


def _fallback(plan: PairPlan, failure: Reject | None, context: Context) -> Reject | None:
    """Why a convolution of a plan is not the operator, where that is asked for.  failure: of the attempts before the plan's."""
    if context.options.lowering != "convavgpool":
        return None
    for leaf, lowering in zip(plan.leaves, plan.lowerings, strict=True):
        if lowering.name != "convavgpool":
            found = _lowering(plan, leaf, "convavgpool", context)
            return found if isinstance(found, Reject) else failure
    return None


def _of_leaf(
    plan: PairPlan, leaf: convs.ConvLeaf, attempt: Attempt, context: Context
) -> tuple[geometry.Lowered | None, Reject | None]:
    """The lowering that an attempt comes to for one convolution, and why `direct` lacks a kernel; for none, that or a reason."""
    needs = attempt.direct_needs_kernel and (leaf.conv.rank < 3 or leaf.conv.group > 1 or "tensorrt" in context.options.devices)
    refusal = geometry.without_kernel(leaf.conv, plan.pooling.spec) if needs else None
    usable: list[geometry.Lowered] = []
    reason = failure = None
    for name in attempt.names:
        found = _lowering(plan, leaf, name, context)
        if isinstance(found, Reject):
            failure = failure or found
        elif refusal is not None and found.name == "direct" and found.pool is not None:  # box means over windows
            reason = rejection(plan.scope, leaf.node, refusal)
        else:
            usable.append(found)
            if not attempt.by_cost or name == "convavgpool":
                break
    if not usable:
        return None, reason or failure
    if len(usable) == 1:
        return usable[0], reason
    size, bytes_ = leaf.size or geometry.nominal_size(leaf.conv, plan.pooling.spec), _item_bytes(plan.scope, leaf)
    opset = _cpu_opset(plan, context, {found.name for found in usable})
    return min(usable, key=lambda found: geometry.lowering_cost(found, leaf.layer, size, bytes_, opset).time), reason


def _cpu_opset(plan: PairPlan, context: Context, names: set[str]) -> int:
    """The opset where lowerings must not be slow in onnxruntime on a CPU; 0 where a GPU decides, or the caller.  Of a target for
    both a CPU decides over standard operators, and over the operator too on one axis and from SLOW_OPSET on."""
    options, opset = context.options, plan.scope.opset
    both = "cpu" in options.devices and not options.for_torch and options.lowering in ("convavgpool", "auto")
    standard = options.lowering == "convavgpool" and "convavgpool" not in names
    slow = opset >= geometry.SLOW_OPSET or plan.leaves[0].conv.rank == 1
    return opset if options.devices == ("cpu",) or both and (standard or slow) else 0


def _lowering(plan: PairPlan, leaf: convs.ConvLeaf, name: str, context: Context) -> geometry.Lowered | Reject:
    """`geometry.lower`, or why not: a Pad would be merged into the box mean, or what the fused weights would become."""
    scope, spec = plan.scope, plan.pooling.spec
    conv = replace(leaf.conv, group=1) if context.options.for_torch else leaf.conv  # PyTorch's operator has groups
    obstacles = convs.obstacles_of(scope, conv, context, spec)
    found = geometry.lower(leaf.layer, spec, name, obstacles)
    if isinstance(found, Refusal):
        return rejection(scope, leaf.node, found)
    shapes = (scope.info(leaf.input).shape, context.shapes.get(leaf.input))
    images = next((shape[0] for shape in shapes if shape and isinstance(shape[0], int) and shape[0] > 0), 1)
    if spec is not None and (slow := _against_gpu(leaf, found, spec, images, context.options)) is not None:
        return rejection(scope, leaf.node, slow)
    if found.pool is not None and (merged := _pad_in_front(scope, leaf, found.pool, obstacles.may_miscount)) is not None:
        return merged
    why = convs.against_merged_weights(scope, leaf.input) if found.pool is None and not found.is_global else None
    if why is not None:
        return rejection(scope, leaf.node, why)
    if found.name == "fused" and leaf.weight is not None and leaf.weight.data_type == TensorProto.FLOAT16:
        assert spec is not None
        weight, _ = convs.exact_weights(leaf)
        if not keeps(weight / spec.taps, np.dtype(np.float16)):
            return rejection(scope, leaf.node, outside("fused weights"))
    return found


def _against_gpu(
    leaf: convs.ConvLeaf, found: geometry.Lowered, spec: PoolSpec, images: int, options: OptimizeOptions
) -> Refusal | None:
    """Why a lowering is slow on a GPU (decision 009): large windows; a fused convolution of few results, three axes or groups."""
    for_cpu = (
        "gpu" not in options.devices or options.lowering == "auto" and "cpu" in options.devices or options.for_torch == "cpu"
    )
    if for_cpu or options.lowering in ("direct", "fused"):
        return None
    if found.name == "fused":
        conv, (m, c) = found.conv, leaf.weight_shape[:2]
        places = LEAST_IN_TENSORRT if leaf.size is None else conv.places(leaf.size)
        if m <= FEW_CHANNELS and conv.group == 1 and places < LEAST_FUSED:
            what = "positions of one fused convolution to few channels"
            return refuse(what, places, f"at least {LEAST_FUSED}, {OF_TARGET}")
        in_float = leaf.weight is not None and leaf.weight.data_type == TensorProto.FLOAT
        if "tensorrt" in options.devices:
            if conv.group > 1 and (c != m // conv.group or c & (c - 1)):
                what = "channels of a group of one fused convolution, and outputs"
                return refuse(what, [c, m // conv.group], f"the same power of two, {OF_TARGET}")
            if spec.rank > 2 and images * places < LEAST_IN_TENSORRT:
                what = "positions of one fused convolution with three spatial axes, of all images"
                return refuse(what, images * places, f"at least {LEAST_IN_TENSORRT}, {OF_TARGET}")
        elif spec.rank > 2 and in_float:
            return refuse("spatial axes of one fused convolution in float32", spec.rank, f"at most 2, {OF_TARGET}")
    most = geometry.MAX_KERNEL_WINDOW if found.name == "fused" else spec.taps
    if found.pool is not None and not found.conv.is_pointwise:
        summed = found.name == "convavgpool" or "cpu" not in options.devices or options.for_torch == "cuda"
        most = MOST_OVERLAPPING if summed else most
    return (
        refuse("pooling window", list(spec.kernel_shape), f"at most {most} elements, {OF_TARGET}") if spec.taps > most else None
    )


def _pad_in_front(scope: Scope, leaf: convs.ConvLeaf, box: PoolSpec, may_miscount: bool) -> Reject | None:
    """Why a Pad in front keeps the box mean from standing before a convolution.  may_miscount: see Obstacles."""
    for where, pad, orders in convs.pads_upstream(scope, leaf.input):
        pads = None if pad is None else convs.moved_pads(where, pad, orders, box.rank)
        merged = tuple(a + b for a, b in zip(pads or (0,) * len(box.pads), box.pads, strict=True))
        if pad is not None and (pads is None or fills_window(pads, box) or may_miscount and miscounts(merged)):
            condition = f"Pad '{label(where.nodes[pad])}' in front of the box mean"
            got = "pads that reach its window, unknown ones, or more at an end"
            return reject(scope, leaf.node, condition, got, "others, as onnxruntime demands")
    return None


def _judge(plan: PairPlan, lowerings: list[geometry.Lowered], cpu_opset: int) -> PairPlan | Reject:
    """Condition (6), over all of the tree; sizes that the model leaves open are taken as nominal ones."""
    scope, spec = plan.scope, plan.pooling.spec
    leaves = plan.leaves
    bytes_ = _item_bytes(scope, leaves[0])
    before, after, priced = geometry.Cost(), geometry.Cost(), []
    for leaf, found in zip(leaves, lowerings, strict=True):
        size = leaf.size or geometry.nominal_size(leaf.conv, spec)
        old = geometry.conv_cost(leaf.conv, leaf.weight_shape, size, bytes_, on_cpu=cpu_opset > 0)
        new = geometry.lowering_cost(found, leaf.layer, size, bytes_, cpu_opset)
        before, after = before + old, after + new
        known = leaf.size is not None
        priced.append(replace(found, macs_before=old.macs if known else None, macs_after=new.macs if known else None))
    full = leaves[0].conv.output_size(leaves[0].size or geometry.nominal_size(leaves[0].conv, spec))
    window = spec or whole_map(full)
    pooled = window.output_size(full)
    channels = leaves[0].weight_shape[0]
    opset = cpu_opset if plan.pooling.kind == "pool" else 0  # other spellings are no AveragePool of onnxruntime's
    before += geometry.pool_cost(window, convs.channel_count(scope, plan.pooling.input) or channels, full, bytes_, opset)
    # Joins, and nodes that go behind the pooling.
    inner = [item for item in convs.walk(plan.tree) if not isinstance(item, str)]
    steps = sum(len(item.behind) + isinstance(item, convs.JoinTree) for item in inner)
    before += geometry.affine_cost(steps, channels, full, bytes_)
    after += geometry.affine_cost(steps, channels, pooled, bytes_)
    for opaque in convs.opaque_leaves(plan.tree):
        after += geometry.pool_cost(window, convs.channel_count(scope, opaque) or channels, full, bytes_, cpu_opset)
    if after.macs > ENOUGH * before.macs or after.share_of(before) >= 1:
        got = f"{after.macs:,} of {before.macs:,} multiply-adds, and "
        got += f"{after.additions:,} additions in place of {before.additions:,}"
        expected = f"at most {ENOUGH:.0%} of the multiply-adds, and less time by the cost model"
        return reject(scope, leaves[0].node, f"saves too little as {lowerings[0].name}", got, expected)
    return replace(plan, lowerings=tuple(priced))


def _item_bytes(scope: Scope, leaf: convs.ConvLeaf) -> int:
    elem_type = scope.info(scope.nodes[leaf.node].input[1]).elem_type
    return helper.tensor_dtype_to_np_dtype(elem_type).itemsize if elem_type else 4
