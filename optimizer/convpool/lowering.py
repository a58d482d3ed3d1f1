"""The forms that an exact site can be written in, which of them a model admits, and what each costs.

| lowering | nodes | needs |
|---|---|---|
| convavgpool | ai.convpool::ConvAvgPool, a model-local function | one group, 1-D or 2-D; global means of static size |
| direct | AveragePool, Conv | |
| fused | Conv with the kernel convolved with the box | constant weights, which do not grow out of proportion |
| auto | direct or fused, whichever the cost model puts ahead | |

`convavgpool` falls back to the next form that the model admits and that pays, `direct` and `fused` do not.  Where the plugin has
no fast kernel, with groups and in 3-D, it falls back to `fused` alone: TensorRT 8.6 is slower with `direct` there, and in 3-D
slower than with the original (docs/log.md, Decisions).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from convpool import cost
from convpool.cost import Cost
from convpool.geometry import ConvSpec, Ints, PoolSpec, fused_spec, pool_first
from convpool.graph import Scope
from convpool.operator import POOL_DILATIONS_OPSET
from convpool.plan import ConvLeaf, Reject, reject

LOWERINGS = ("convavgpool", "direct", "fused")
REQUESTS = (*LOWERINGS, "auto")
ORDERS: dict[str, tuple[str, ...]] = {
    "convavgpool": ("convavgpool", "direct", "fused"),
    "direct": ("direct",),
    "fused": ("fused",),
    "auto": ("direct", "fused"),
}
"""For each request the lowerings to try, in order; for auto the order is by cost."""
MAX_KERNEL_RANK = 2
"""Most spatial axes of the plugin's kernels on tensor cores; its `generic` kernel takes more, and groups."""
MAX_FUSED_ELEMENTS = 2**24
MAX_FUSED_GROWTH = 16
"""Fused weights may be as large as the one, or as many times as large as the other: a mean over 56 x 56 makes them 300."""


@dataclass(frozen=True)
class Form:
    """One lowering of one convolution.  pool is None where the pooling is global or has vanished (`is_global` tells)."""

    lowering: str
    pool: PoolSpec | None
    conv: ConvSpec
    is_global: bool = False


def form(scope: Scope, leaf: ConvLeaf, pool: PoolSpec | None, lowering: str, main_opset: int) -> Form | Reject:
    """`leaf` behind the window `pool` (None: the feature map, of unknown size) in the given lowering, or why not."""
    conv = leaf.conv
    whole = conv.is_pointwise and not any(conv.pads) and all(s == 1 for s in conv.strides)
    if pool is None:
        if not whole or lowering == "fused":
            return reject(scope, leaf.node, "mean over a feature map", "unknown sizes", "static sizes, or a 1x1 Conv")
        if lowering == "convavgpool":
            return reject(scope, leaf.node, "pool_kernel_shape", "unknown sizes", "static sizes")
        return Form("direct", None, conv, is_global=True)
    if lowering == "fused":
        if leaf.weight is None:
            return reject(scope, leaf.node, "weights", "computed, or an input that a caller may override", "a constant")
        fused = fused_spec(conv, pool)
        channels = math.prod(leaf.weight_shape[:2])
        limit = max(MAX_FUSED_ELEMENTS, MAX_FUSED_GROWTH * channels * conv.taps)
        if channels * fused.taps > limit:
            return reject(scope, leaf.node, "elements of the fused weights", f"{channels * fused.taps:,}", f"at most {limit:,}")
        return Form("fused", None, fused)
    if pool.taps == 1:
        # Nothing to average: the convolution alone takes fewer positions.
        if lowering == "convavgpool":
            return reject(scope, leaf.node, "pooling window", "one element", "more")
        return Form("direct", None, fused_spec(conv, pool))
    box, rest = pool_first(conv, pool)
    if any(d > 1 for d in box.dilations) and scope.opset < POOL_DILATIONS_OPSET:
        return reject(
            scope,
            leaf.node,
            "dilated box mean",
            f"opset {scope.opset}",
            f"opset {POOL_DILATIONS_OPSET}, where AveragePool has dilations",
        )
    if any(pad >= k for pad, k in zip(box.pads, box.kernel_shape * 2, strict=True)):
        return reject(
            scope,
            leaf.node,
            "pads of the box mean",
            list(box.pads),
            f"less than {list(box.kernel_shape)}, as onnxruntime demands",
        )
    if lowering == "convavgpool" and (found := against_node(scope, leaf)) is not None:
        return found
    if lowering == "convavgpool" and scope.opset != main_opset:
        return reject(scope, leaf.node, "opset of the function", scope.opset, f"the model's, {main_opset}")
    if lowering == "direct" and whole and leaf.size == pool.kernel_shape:
        return Form("direct", None, conv, is_global=True)
    return Form(lowering, box, rest)


def against_node(scope: Scope, leaf: ConvLeaf) -> Reject | None:
    """Why a convolution becomes no node of the operator, whatever its windows.

    The plugin may have no fast kernel.  onnxruntime, up to 1.32 at least, gives tensors of inlined functions one name in a body
    and in one inside that, and mixes them up where an If is constant.
    """
    if scope.depth > 1:
        return reject(scope, leaf.node, "bodies around a ConvAvgPool", scope.depth, "at most 1")
    return without_kernel(scope, leaf)


def without_kernel(scope: Scope, leaf: ConvLeaf) -> Reject | None:
    """Why the plugin has but one thread per output for a convolution."""
    if leaf.conv.group > 1:
        return reject(scope, leaf.node, "group of a ConvAvgPool", leaf.conv.group, "1, for which the plugin has kernels")
    if leaf.conv.rank > MAX_KERNEL_RANK:
        return reject(
            scope,
            leaf.node,
            "spatial axes of a ConvAvgPool",
            leaf.conv.rank,
            f"at most {MAX_KERNEL_RANK}, for which the plugin has kernels",
        )
    return None


def form_cost(found: Form, leaf: ConvLeaf, size: Ints, item_bytes: int) -> Cost:
    """Cost of a form per sample; size: spatial input sizes, nominal where unknown."""
    channels = leaf.weight_shape[1] * leaf.conv.group
    shape = (*leaf.weight_shape[:2], *found.conv.kernel_shape)
    if found.is_global:
        everything = PoolSpec(size, (1,) * len(size), (0,) * (2 * len(size)), (1,) * len(size))
        pooled, pool = (1,) * len(size), everything
    elif found.pool is not None:
        pooled, pool = found.pool.output_size(size), found.pool
    else:
        return cost.conv_cost(found.conv, shape, size, item_bytes)
    return cost.pool_cost(pool, channels, size, item_bytes) + cost.conv_cost(found.conv, shape, pooled, item_bytes)
