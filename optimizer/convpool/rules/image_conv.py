# SPDX-License-Identifier: Apache-2.0
"""A convolution without a pooling: one node of the operator, whose pooling window is one element, when asked for.

    x - Conv        x - ConvAvgPool

It saves no arithmetic.  "image_conv": of an image.  TensorRT pads an image of few channels to 8 in front of its convolution;
the plugin has a kernel that reads it without.  An AveragePool in front goes with it where `fuse_pool_conv` can fuse it.
"plain_conv": of many channels, for which the plugin's kernels may be faster than TensorRT's.

Conditions: (1) no attribute refers to a function's; (2) two spatial axes; (3) it can be a node of the operator
(`convs.against_node`); (4) the weights are constants; (5) of an image at most `image_channels` channels and (6)
`filter_elements` weights a filter; (7) of others a kernel larger than one element, (8) at least `wide_channels` channels at both
ends, multiples of `channel_multiple`, and (9) at most `plain_macs` multiply-adds, or `plain_results` numbers in the result, for
the batch (the limits are those of `convpool.options.Limits`), unless `neighbours.patterns.normalizes`, with the rule "norm_conv";
(10) no Pad can come to stand in front: onnxruntime would merge it into the AveragePool, and refuse it there.  So Pads of zeros in
front go into the convolution's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from onnx import NodeProto

from convpool.ir.index import Scope
from convpool.ir.protos import AttributeReference, is_op, label
from convpool.options import Limits
from convpool.rules.base import Context, Reject, reject
from convpool.rules.convs import WINDOW, ConvLeaf, Pooling, channel_count, constant_leaf, macs, pads_upstream, with_pads_in_front
from convpool.rules.fuse_pool_conv import FusePoolConv, behind_pooling
from convpool.rules.neighbours.patterns import normalizes
from convpool.rules.pool_first.pairs import PairPlan, PairRule, PairSite, operator_lowering
from convpool.rules.pool_first.rule import moved_convolutions, pair_sites

KINDS = {"image_conv": "stem", "plain_conv": "plain_conv"}
"""The pattern that a report names, by the kind of convolution."""


class ImageConv(PairRule):
    """The model's own convolutions that are none of a pair, where a pair has become a node of the operator.  One of few channels
    or of an input is of an image, unless an average starts from it, rewritten or not.  Others are plain, as is that of an input
    of many channels where plain ones are asked for, unless an average that is exact to move starts from it."""

    names = (*KINDS, "norm_conv")
    on_operators = True
    needs = ("Conv",)

    def sites(self, scope: Scope, context: Context) -> Iterator[PairSite]:
        if not context.made_operator:
            return
        pairs = list(pair_sites(scope))
        of_pairs = {"image_conv": {site.conv for site in pairs}}
        if context.enabled("plain_conv"):
            of_pairs["plain_conv"] = {conv for site in pairs for conv in moved_convolutions(site, context)}
        for index, node in enumerate(scope.nodes):
            if is_op(node, "Conv") and (scope.path, node.output[0]) in context.originals:
                kind = _kind(scope, node, context)
                if context.enabled(kind) and index not in of_pairs[kind]:
                    yield PairSite(scope, index, node.input[0], index, KINDS[kind])

    def check(self, site: PairSite, context: Context) -> PairPlan | Reject:
        scope, index = site.scope, site.conv
        of_image = site.pattern == KINDS["image_conv"]
        leaf = constant_leaf(scope, index, context)
        if isinstance(leaf, Reject):
            return leaf
        wrong = _of_an_image(scope, leaf, context.options.limits) if of_image else _plain(scope, leaf, context)
        if wrong is not None:
            return wrong
        count = macs(scope, index)
        pooled = behind_pooling(scope, index) if of_image else None
        if pooled is not None and not context.excluded(pooled.names[1]):
            with suppress(AttributeReference):
                if isinstance(plan := FusePoolConv().check(pooled, context), PairPlan):
                    return replace(plan, pattern=site.pattern, lowerings=(operator_lowering(plan.pooling, leaf, count),))
        leaf = with_pads_in_front(scope, leaf)
        for where, pad, _ in pads_upstream(scope, leaf.input):
            if pad is None:
                return reject(scope, index, "input of the function", "what a call gives", "a tensor that is known")
            name = label(where.nodes[pad])
            return reject(scope, index, f"Pad '{name}' in front", "pads that the convolution cannot take", "none")
        pooling = Pooling(index, (), leaf.input, scope.nodes[index].output[0], site.pattern, WINDOW)
        return PairPlan(scope, site.pattern, pooling, leaf, (operator_lowering(pooling, leaf, count),))


def _kind(scope: Scope, node: NodeProto, context: Context) -> str:
    limits = context.options.limits
    given, taken = (channel_count(scope, name) for name in node.input[:2])
    if given is not None and given <= limits.image_channels:
        return "image_conv"
    many = context.enabled("plain_conv") and taken is not None and taken >= limits.wide_channels
    return "image_conv" if node.input[0] in scope.inputs and not many else "plain_conv"


def _of_an_image(scope: Scope, leaf: ConvLeaf, limits: Limits) -> Reject | None:
    """Conditions (5) and (6)."""
    channels = leaf.weight_shape[1]
    if channels > limits.image_channels:
        return reject(scope, leaf.node, "channels", channels, f"at most {limits.image_channels}")
    if channels * leaf.conv.taps > limits.filter_elements:
        return reject(scope, leaf.node, "weights a filter", channels * leaf.conv.taps, f"at most {limits.filter_elements}")
    return None


def _plain(scope: Scope, leaf: ConvLeaf, context: Context) -> Reject | None:
    """Conditions (7) to (9)."""
    limits = context.options.limits
    if leaf.conv.taps == 1:
        return reject(scope, leaf.node, "kernel_shape", list(leaf.conv.kernel_shape), "more than one element")
    for what, channels in (("input channels", leaf.weight_shape[1]), ("output channels", leaf.weight_shape[0])):
        if channels < limits.wide_channels or channels % limits.channel_multiple:
            expected = f"at least {limits.wide_channels}, a multiple of {limits.channel_multiple}"
            return reject(scope, leaf.node, what, channels, expected)
    result = scope.nodes[leaf.node].output[0]
    shapes = (scope.info(result).shape, context.sizes.get(result))
    shape = next((shape for shape in shapes if shape and all(isinstance(dim, int) for dim in shape)), None)
    results = math.prod(shape) if shape else 0
    count = results * leaf.weight_shape[1] * leaf.conv.taps if shape else None
    if context.enabled("norm_conv") and normalizes(scope, leaf.input, leaf.conv.rank):
        return None
    if count is None or count > limits.plain_macs and results > limits.plain_results:
        got = "an unknown number" if count is None else f"{count:.3g}"
        return reject(scope, leaf.node, "multiply-adds of the batch", got, f"at most {limits.plain_macs:.3g}")
    return None
