"""A convolution of an image: one node of the operator, whose pooling window is one element, when asked for.

    x - Conv        x - ConvAvgPool

It saves no arithmetic.  TensorRT pads an image of few channels to 8 in front of its convolution; the plugin has a kernel that
reads it without.  Conditions: (1) no attribute refers to a function's; (2) two spatial axes; (3) one group; (4) the weights
are constants; (5) at most MAX_CHANNELS channels and (6) MAX_FILTER_ELEMENTS weights a filter; (7) the function has the
scope's opset; (8) no Pad can come to stand in front: onnxruntime would merge it into the AveragePool, and refuse it there.
So Pads of zeros in front go into the convolution's own.
"""

from __future__ import annotations

from collections.abc import Iterator

from convpool.geometry import PoolSpec
from convpool.graph import AttributeReference, Scope, is_op, label
from convpool.passes import conv_pool
from convpool.passes.conv_pool import Site
from convpool.passes.trace import conv_leaf, conv_rank, pads_upstream, with_pads_in_front
from convpool.plan import Choice, Plan, Pooling, Reject, reject

RANK = 2
MAX_CHANNELS = 4
"""Most channels of what counts as an image: TensorRT pads more of them less."""
MAX_FILTER_ELEMENTS = 64
"""Most weights a filter that the plugin's kernel takes: channels times kernel elements."""
WINDOW = PoolSpec((1,) * RANK, (1,) * RANK, (0,) * (2 * RANK), (1,) * RANK)


def sites(scope: Scope) -> Iterator[Site]:
    """Every Conv of an input or of few channels, unless it is one of a pair, rewritten or not."""
    of_pairs = {site.conv for site in conv_pool.sites(scope)}
    for index, node in enumerate(scope.nodes):
        if is_op(node, "Conv") and index not in of_pairs:
            shape = scope.info(node.input[0]).shape
            few = shape is not None and len(shape) > 1 and isinstance(shape[1], int) and shape[1] <= MAX_CHANNELS
            if few or node.input[0] in scope.inputs:
                yield Site(scope, index, node.input[0], index, "stem")


def check(site: Site, main_opset: int) -> Plan | Reject:
    """A Plan for one ConvAvgPool, or why the convolution stays."""
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
    if leaf.conv.group != 1:
        return reject(scope, index, "group", leaf.conv.group, 1)
    if leaf.weight is None:
        return reject(scope, index, "weights", "computed, or an input that a caller may override", "a constant")
    channels = leaf.weight_shape[1]
    if channels > MAX_CHANNELS:
        return reject(scope, index, "channels", channels, f"at most {MAX_CHANNELS}")
    if channels * leaf.conv.taps > MAX_FILTER_ELEMENTS:
        return reject(scope, index, "weights a filter", channels * leaf.conv.taps, f"at most {MAX_FILTER_ELEMENTS}")
    if scope.opset != main_opset:
        return reject(scope, index, "opset of the function", scope.opset, f"the model's, {main_opset}")
    leaf, macs = with_pads_in_front(scope, leaf), conv_pool.macs(site)
    for where, pad in pads_upstream(scope, leaf.input):
        if pad is None:
            return reject(scope, index, "input of the function", "what a call gives", "a tensor that is known")
        name = label(where.nodes[pad])
        return reject(scope, index, f"Pad '{name}' in front", "pads that the convolution cannot take", "none")
    pooling = Pooling(index, (), leaf.input, scope.nodes[index].output[0], "stem", WINDOW)
    return Plan(scope, "stem", pooling, leaf, (Choice("convavgpool", macs, macs),))
