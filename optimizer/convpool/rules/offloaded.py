# SPDX-License-Identifier: Apache-2.0
"""Convolutions without a pooling behind them, as nodes of the operator, when asked for.  It saves no arithmetic.

    x - AveragePool(stride = kernel) - Conv        x - ConvAvgPool
    x - Conv                                       x - ConvAvgPool, whose pooling window is one element

`FusePoolConv` saves traffic on a GPU.  Conditions: (1) no attribute refers to a function's; (2) the pooling's strides equal its
kernel; (3) its padding counts as zeros in the mean; (4) its window fits the map, and ceil_mode adds none; (5) nobody else reads
what it gives; (6) the convolution can be a node (`convs.against_node`).

`ImageConv`, rule "image_conv": of an image.  TensorRT pads an image of few channels to 8 in front of its convolution; the plugin
has a kernel that reads it without.  An AveragePool in front goes with it where `FusePoolConv` can fuse it.  Rule "plain_conv": of
many channels, for which the plugin's kernels may be faster than TensorRT's.  Conditions: (1) and (6); (7) two spatial axes; (8)
the weights are constants; (9) of an image at most IMAGE_CHANNELS channels and (10) FILTER_ELEMENTS weights a filter; (11) of
others a kernel larger than one element, (12) at least WIDE_CHANNELS channels at both ends, multiples of CHANNEL_MULTIPLE, and
(13) at most PLAIN_MACS multiply-adds, or PLAIN_RESULTS numbers in the result, for the batch (the limits are those of
`convpool.options`), unless `neighbours.patterns.normalizes`, with the rule "norm_conv"; (14) no Pad can come to stand in
front: onnxruntime would merge it into the AveragePool, and refuse it there.  So Pads of zeros in front go into the convolution's.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from onnx import NodeProto

from convpool.algebra.geometry import Lowered, PoolSpec, Refusal, windows
from convpool.ir.index import Scope
from convpool.ir.protos import AttributeReference, attributes, is_op, label
from convpool.options import CHANNEL_MULTIPLE, FILTER_ELEMENTS, IMAGE_CHANNELS, PLAIN_MACS, PLAIN_RESULTS, WIDE_CHANNELS
from convpool.rules import convs
from convpool.rules.base import Context, Reject, reject, rejection, spatial_size
from convpool.rules.neighbours.patterns import normalizes
from convpool.rules.pool_first.pairs import PairPlan, PairRule, PairSite
from convpool.rules.pool_first.rule import moved_convolutions, pair_sites


class FusePoolConv(PairRule):
    """Every Conv whose input an AveragePool gives."""

    names = ("fuse_pool_conv",)
    needs = ("AveragePool",)

    def sites(self, scope: Scope, context: Context) -> Iterator[PairSite]:
        for index, node in enumerate(scope.nodes):
            if is_op(node, "Conv") and (site := behind_pooling(scope, index)) is not None:
                yield site

    def check(self, site: PairSite, context: Context) -> PairPlan | Reject:
        scope = site.scope
        rank = convs.conv_rank(scope, site.conv)
        if isinstance(rank, Reject):
            return rank
        spec = whole_windows(scope, site.root, rank)
        if isinstance(spec, Reject):
            return spec
        others = scope.other_readers(site.tensor)
        if others is not None:
            return reject(scope, site.root, f"output '{site.tensor}' {others}", "other readers", "only the convolution")
        leaf = convs.conv_leaf(scope, site.conv, rank)
        if isinstance(leaf, Reject):
            return leaf
        if (found := convs.against_node(scope, leaf.conv, context.main_opset, spec)) is not None:
            return rejection(scope, site.conv, found)
        x = scope.nodes[site.root].input[0]
        pooling = convs.Pooling(site.root, (site.root,), x, scope.nodes[site.conv].output[0], "pool_conv", spec)
        return _as_node(scope, pooling, replace(leaf, input=x))


class ChainPoolConv(FusePoolConv):
    """The same in a model with a pair only, by its stage."""

    names = ("chain_pool_conv",)


def behind_pooling(scope: Scope, conv: int) -> PairSite | None:
    """Convolution `conv` with the AveragePool that gives its input; None where another node does."""
    tensor = scope.nodes[conv].input[0]
    pool = scope.made_by(tensor, "AveragePool")
    return None if pool is None else PairSite(scope, pool, tensor, conv, "pool_conv")


def whole_windows(scope: Scope, index: int, rank: int) -> PoolSpec | Reject:
    """The window of AveragePool `index`: conditions (2) to (4)."""
    node = scope.nodes[index]
    values = attributes(node)
    spec = windows(values, rank)
    if isinstance(spec, Refusal):
        return rejection(scope, index, spec)
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


KINDS = {"image_conv": "stem", "plain_conv": "plain_conv"}
"""The pattern that a report names, by the kind of convolution."""


class ImageConv(PairRule):
    """The model's own convolutions that are none of a pair, where a pair has become a node of the operator.  One of few channels
    or of an input is of an image, unless an average starts from it, rewritten or not.  Others are plain, as is that of an input
    of many channels where plain ones are asked for, unless an average that is exact to move starts from it."""

    names = (*KINDS, "norm_conv")
    needs = ("Conv",)

    def sites(self, scope: Scope, context: Context) -> Iterator[PairSite]:
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
        leaf = convs.constant_leaf(scope, index, context)
        if isinstance(leaf, Reject):
            return leaf
        wrong = _of_an_image(scope, leaf) if of_image else _plain(scope, leaf, context)
        if wrong is not None:
            return wrong
        pooled = behind_pooling(scope, index) if of_image else None
        if pooled is not None and not context.excluded(pooled.names[1]):
            with suppress(AttributeReference):
                if isinstance(plan := FusePoolConv().check(pooled, context), PairPlan):
                    return replace(plan, pattern=site.pattern)
        return alone(scope, leaf, site.pattern)


def alone(scope: Scope, leaf: convs.ConvLeaf, pattern: str) -> PairPlan | Reject:
    """A convolution as a node whose pooling window is one element: condition (14)."""
    leaf = convs.with_pads_in_front(scope, leaf)
    for where, pad, _ in convs.pads_upstream(scope, leaf.input):
        if pad is None:
            return reject(scope, leaf.node, "input of the function", "what a call gives", "a tensor that is known")
        condition = f"Pad '{label(where.nodes[pad])}' in front"
        return reject(scope, leaf.node, condition, "pads that the convolution cannot take", "none")
    output = scope.nodes[leaf.node].output[0]
    return _as_node(scope, convs.Pooling(leaf.node, (), leaf.input, output, pattern, convs.NO_POOLING), leaf)


def _as_node(scope: Scope, pooling: convs.Pooling, leaf: convs.ConvLeaf) -> PairPlan:
    """A convolution as a node of the operator, which saves no multiply-adds.  pooling: what stands in front of it."""
    count = convs.macs(scope, leaf.node)
    lowering = Lowered("convavgpool", pooling.spec, leaf.conv, macs_before=count, macs_after=count)
    return PairPlan(scope, pooling.kind, pooling, leaf, (lowering,))


def _kind(scope: Scope, node: NodeProto, context: Context) -> str:
    given, taken = (convs.channel_count(scope, name) for name in node.input[:2])
    if given is not None and given <= IMAGE_CHANNELS:
        return "image_conv"
    many = context.enabled("plain_conv") and taken is not None and taken >= WIDE_CHANNELS
    return "image_conv" if node.input[0] in scope.inputs and not many else "plain_conv"


def _of_an_image(scope: Scope, leaf: convs.ConvLeaf) -> Reject | None:
    """Conditions (9) and (10)."""
    channels = leaf.weight_shape[1]
    if channels > IMAGE_CHANNELS:
        return reject(scope, leaf.node, "channels", channels, f"at most {IMAGE_CHANNELS}")
    if channels * leaf.conv.taps > FILTER_ELEMENTS:
        return reject(scope, leaf.node, "weights a filter", channels * leaf.conv.taps, f"at most {FILTER_ELEMENTS}")
    return None


def _plain(scope: Scope, leaf: convs.ConvLeaf, context: Context) -> Reject | None:
    """Conditions (11) to (13)."""
    if leaf.conv.taps == 1:
        return reject(scope, leaf.node, "kernel_shape", list(leaf.conv.kernel_shape), "more than one element")
    for what, channels in (("input channels", leaf.weight_shape[1]), ("output channels", leaf.weight_shape[0])):
        if channels < WIDE_CHANNELS or channels % CHANNEL_MULTIPLE:
            expected = f"at least {WIDE_CHANNELS}, a multiple of {CHANNEL_MULTIPLE}"
            return reject(scope, leaf.node, what, channels, expected)
    result = scope.nodes[leaf.node].output[0]
    shapes = (scope.info(result).shape, context.shapes.get(result))
    shape = next((shape for shape in shapes if shape and all(isinstance(dim, int) for dim in shape)), None)
    results = math.prod(shape) if shape else 0
    count = results * leaf.weight_shape[1] * leaf.conv.taps if shape else None
    if context.enabled("norm_conv") and normalizes(scope, leaf.input, leaf.conv.rank):
        return None
    if count is None or count > PLAIN_MACS and results > PLAIN_RESULTS:
        got = "an unknown number" if count is None else f"{count:.3g}"
        return reject(scope, leaf.node, "multiply-adds of the batch", got, f"at most {PLAIN_MACS:.3g}")
    return None
