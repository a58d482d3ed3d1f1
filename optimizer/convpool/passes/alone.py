"""A convolution without a pair: one node of the operator, whose pooling window is one element, when asked for.

    x - Conv        x - ConvAvgPool

It saves no arithmetic.  "stem": of an image.  TensorRT pads an image of few channels to 8 in front of its convolution; the
plugin has a kernel that reads it without.  An AveragePool in front goes with it where `pool_conv` can take it.  "plain_conv":
of many channels, for which the plugin's kernels may be faster than TensorRT's.

Conditions: (1) no attribute refers to a function's; (2) two spatial axes; (3) it can be a node of the operator
(`lowering.against_node`); (4) the weights are constants; (5) of an image at most MAX_CHANNELS channels and (6)
MAX_FILTER_ELEMENTS weights a filter; (7) of others a kernel of more than one element, (8) MIN_CHANNELS or more channels at both
ends, multiples of CHANNEL_MULTIPLE, and (9) at most MAX_MACS multiply-adds for the batch; (10) the function has the scope's
opset; (11) no Pad can come to stand in front: onnxruntime would merge it into the AveragePool, and refuse it there. So Pads of
zeros in front go into the convolution's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

from onnx import NodeProto

from convpool.algebra.geometry import PoolSpec
from convpool.algebra.lowering import Lowering
from convpool.ir.index import Scope
from convpool.ir.protos import AttributeReference, attributes, is_op, label
from convpool.passes import conv_pool, pool_conv
from convpool.passes.conv_pool import Site
from convpool.passes.runtime import against_node, against_opset
from convpool.passes.trace import channel_count, conv_leaf, conv_rank, pads_upstream, with_pads_in_front
from convpool.plan import ConvLeaf, Plan, Pooling, Reject, reject, rejection

KINDS = ("stem", "plain_conv")
"""Options of `convpool.optimize`, and what a report calls the pattern."""
RANK = 2
MAX_CHANNELS = 4
"""Most channels of what counts as an image: TensorRT pads more of them less."""
MAX_FILTER_ELEMENTS = 64
"""Most weights a filter that the plugin's kernel for images takes: channels times kernel elements."""
MIN_CHANNELS = 64
"""Fewest input and output channels of a plain convolution: the fewest that were measured."""
CHANNEL_MULTIPLE = 8
"""What its channels are multiples of: half precision then needs no padding with the channels last."""
MAX_MACS = 2.5e9
"""Most multiply-adds of a plain convolution: those of more take the better of TensorRT 8.6 and cuDNN 0.77 to 1.15 times as long
as the plugin's kernels, in `convpool-bench plain` on an H200."""
WINDOW = PoolSpec((1,) * RANK, (1,) * RANK, (0,) * (2 * RANK), (1,) * RANK)


def sites(scope: Scope, kinds: Collection[str]) -> Iterator[Site]:
    """Every Conv of one of the kinds that is none of a pair.

    A Conv of few channels or of an input is a stem, unless an average starts from it, rewritten or not.  Others are plain, as is
    that of an input of many channels where plain ones are asked for, unless an average that is exact to move starts from it.
    """
    pairs = list(conv_pool.sites(scope))
    of_pairs = {"stem": {site.conv for site in pairs}}
    if "plain_conv" in kinds:
        of_pairs["plain_conv"] = {conv for site in pairs for conv in conv_pool.moving(site)}
    for index, node in enumerate(scope.nodes):
        if is_op(node, "Conv"):
            kind = _kind(scope, node, kinds)
            if kind in kinds and index not in of_pairs[kind]:
                yield Site(scope, index, node.input[0], index, kind)


def _kind(scope: Scope, node: NodeProto, kinds: Collection[str]) -> str:
    given, taken = (channel_count(scope, name) for name in node.input[:2])
    if given is not None and given <= MAX_CHANNELS:
        return "stem"
    many = "plain_conv" in kinds and taken is not None and taken >= MIN_CHANNELS
    return "stem" if node.input[0] in scope.inputs and not many else "plain_conv"


def check(
    site: Site, main_opset: int, excluded: Callable[[str], bool] = lambda _: False, sizes: Mapping[str, tuple] | None = None
) -> Plan | Reject:
    """A Plan for one ConvAvgPool, or why the convolution stays.

    excluded: whether a pooling of this name does.  sizes: shapes of tensors, for plain convolutions whose own are open.
    """
    scope, index = site.scope, site.conv
    rank = conv_rank(scope, index)
    if rank != RANK:
        return reject(scope, index, "spatial axes", "an unknown number" if rank is None else rank, RANK)
    try:
        leaf = conv_leaf(scope, index, rank)
    except AttributeReference as error:
        return reject(scope, index, "attributes", f"a reference to the function's '{error}'", "values")
    if isinstance(leaf, Reject):
        return leaf
    if (found := against_node(scope, leaf.conv)) is not None:
        return rejection(scope, leaf.node, found)
    if leaf.weight is None:
        return reject(scope, index, "weights", "computed, or an input that a caller may override", "a constant")
    wrong = _of_an_image(scope, leaf) if site.pattern == "stem" else _plain(scope, leaf, sizes or {})
    if wrong is not None:
        return wrong
    if (found := against_opset(scope, main_opset)) is not None:
        return rejection(scope, index, found)
    macs = conv_pool.macs(site)
    pooled = pool_conv.site_of(scope, index) if site.pattern == "stem" else None
    if pooled is not None and not excluded(pooled.names[1]):
        plan = pool_conv.check(pooled, main_opset)
        if isinstance(plan, Plan):
            lowerings = tuple(replace(item, macs_before=macs, macs_after=macs) for item in plan.lowerings)
            return replace(plan, pattern=site.pattern, lowerings=lowerings)
    leaf = with_pads_in_front(scope, leaf)
    for where, pad, _ in pads_upstream(scope, leaf.input):
        if pad is None:
            return reject(scope, index, "input of the function", "what a call gives", "a tensor that is known")
        name = label(where.nodes[pad])
        return reject(scope, index, f"Pad '{name}' in front", "pads that the convolution cannot take", "none")
    pooling = Pooling(index, (), leaf.input, scope.nodes[index].output[0], site.pattern, WINDOW)
    lowering = Lowering("convavgpool", WINDOW, leaf.conv, macs_before=macs, macs_after=macs)
    return Plan(scope, site.pattern, pooling, leaf, (lowering,))


def is_plain(node: NodeProto, channels: int) -> bool:
    """Whether a node of the operator with so many input channels is a plain convolution, this run's or an earlier one's.

    Raises AttributeReference.
    """
    return channels > MAX_CHANNELS and all(k == 1 for k in attributes(node)["pool_kernel_shape"])


def _of_an_image(scope: Scope, leaf: ConvLeaf) -> Reject | None:
    """Conditions (5) and (6)."""
    channels = leaf.weight_shape[1]
    if channels > MAX_CHANNELS:
        return reject(scope, leaf.node, "channels", channels, f"at most {MAX_CHANNELS}")
    if channels * leaf.conv.taps > MAX_FILTER_ELEMENTS:
        return reject(scope, leaf.node, "weights a filter", channels * leaf.conv.taps, f"at most {MAX_FILTER_ELEMENTS}")
    return None


def _plain(scope: Scope, leaf: ConvLeaf, sizes: Mapping[str, tuple]) -> Reject | None:
    """Conditions (7) to (9)."""
    if leaf.conv.taps == 1:
        return reject(scope, leaf.node, "kernel_shape", list(leaf.conv.kernel_shape), "more than one element")
    for what, channels in (("input channels", leaf.weight_shape[1]), ("output channels", leaf.weight_shape[0])):
        if channels < MIN_CHANNELS or channels % CHANNEL_MULTIPLE:
            return reject(scope, leaf.node, what, channels, f"at least {MIN_CHANNELS}, a multiple of {CHANNEL_MULTIPLE}")
    result = scope.nodes[leaf.node].output[0]
    shape = next((s for s in (scope.info(result).shape, sizes.get(result)) if s and all(isinstance(d, int) for d in s)), None)
    macs = math.prod(shape) * leaf.weight_shape[1] * leaf.conv.taps if shape else None
    if macs is None or macs > MAX_MACS:
        got = "an unknown number" if macs is None else f"{macs:.3g}"
        return reject(scope, leaf.node, "multiply-adds of the batch", got, f"at most {MAX_MACS:.3g}")
    return None
