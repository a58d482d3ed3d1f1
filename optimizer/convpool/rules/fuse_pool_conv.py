# SPDX-License-Identifier: Apache-2.0
"""Average pooling, then convolution: already the operator's order, made one node when asked for.

    x - AveragePool(stride = kernel) - Conv        x - ConvAvgPool

It saves no arithmetic, only traffic on a GPU.  Conditions: (1) no attribute refers to a function's; (2) the pooling's
strides equal its kernel; (3) its padding counts as zeros in the mean; (4) its window fits the map, and ceil_mode adds none;
(5) nobody else reads what it gives; (6) the convolution can be a node (`convs.against_node`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from convpool.algebra.geometry import PoolSpec
from convpool.ir.index import Scope
from convpool.ir.protos import attributes, is_op
from convpool.rules.base import Context, Reject, malformed, reject, rejection, spatial_size, windows
from convpool.rules.convs import Pooling, against_node, conv_leaf, conv_rank, macs
from convpool.rules.pool_first.pairs import PairPlan, PairRule, PairSite, operator_lowering


class FusePoolConv(PairRule):
    """Every Conv whose input an AveragePool gives."""

    names = ("fuse_pool_conv",)
    needs = ("AveragePool",)
    on_operators = True

    def sites(self, scope: Scope, context: Context) -> Iterator[PairSite]:
        for index, node in enumerate(scope.nodes):
            if is_op(node, "Conv") and (site := behind_pooling(scope, index)) is not None:
                yield site

    def check(self, site: PairSite, context: Context) -> PairPlan | Reject:
        scope = site.scope
        rank = conv_rank(scope, site.conv)
        if isinstance(rank, Reject):
            return rank
        spec = whole_windows(scope, site.root, rank)
        if isinstance(spec, Reject):
            return spec
        others = scope.other_readers(site.tensor)
        if others is not None:
            return reject(scope, site.root, f"output '{site.tensor}' {others}", "other readers", "only the convolution")
        leaf = conv_leaf(scope, site.conv, rank)
        if isinstance(leaf, Reject):
            return leaf
        if (found := against_node(scope, leaf.conv, context.main_opset, spec)) is not None:
            return rejection(scope, site.conv, found)
        x, count = scope.nodes[site.root].input[0], macs(scope, site.conv)
        pooling = Pooling(site.root, (site.root,), x, scope.nodes[site.conv].output[0], "pool_conv", spec)
        return PairPlan(scope, "pool_conv", pooling, replace(leaf, input=x), (operator_lowering(pooling, leaf, count),))


class ChainPoolConv(FusePoolConv):
    """The same in a model with a pair only."""

    names = ("chain_pool_conv",)

    def sites(self, scope: Scope, context: Context) -> Iterator[PairSite]:
        """The convolutions of a scope that read an AveragePool, where a pair has become a node of the operator."""
        if context.made_operator:
            yield from super().sites(scope, context)


def behind_pooling(scope: Scope, conv: int) -> PairSite | None:
    """Convolution `conv` with the AveragePool that gives its input; None where another node does."""
    tensor = scope.nodes[conv].input[0]
    pool = scope.made_by(tensor, "AveragePool")
    return None if pool is None else PairSite(scope, pool, tensor, conv, "pool_conv")


def whole_windows(scope: Scope, index: int, rank: int) -> PoolSpec | Reject:
    """The window of AveragePool `index`: conditions (2) to (4)."""
    node = scope.nodes[index]
    values = attributes(node)
    if (wrong := malformed(scope, index, values, rank)) is not None:
        return wrong
    spec = windows(values, rank)
    kernel, pads = spec.kernel_shape, spec.pads
    if spec.strides != kernel:
        return reject(scope, index, "strides", list(spec.strides), f"kernel_shape, {list(kernel)}")
    if values.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        return reject(scope, index, "auto_pad", values["auto_pad"].decode(errors="replace"), "explicit pads")
    if any(pads) and not values.get("count_include_pad", 0):
        return reject(scope, index, "padding left out of the mean", list(pads), "count_include_pad = 1")
    if max(spec.dilations) > 1:
        return reject(scope, index, "dilations", list(spec.dilations), "ones")
    known = [n if isinstance(n, int) else "?" for n in (scope.info(node.input[0]).shape or ())[2:]]
    if any(isinstance(n, int) and n + pads[i] + pads[rank + i] < kernel[i] for i, n in enumerate(known[:rank])):
        return reject(scope, index, "window", list(kernel), f"no larger than the padded feature map, {known}")
    size = spatial_size(scope, node.input[0], rank)
    if values.get("ceil_mode", 0):
        sizes = [n + pads[i] + pads[rank + i] for i, n in enumerate(size or ())]
        whole = size is not None and not any(n % k for n, k in zip(sizes, kernel, strict=True))
        if not whole:
            return reject(scope, index, "ceil_mode", "a partial window or an unknown size", "whole windows")
    return spec
