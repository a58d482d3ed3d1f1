"""Average pooling, then convolution: already the operator's order, made one node when asked for.

    x - AveragePool(stride = kernel) - Conv        x - ConvAvgPool

It saves no arithmetic, only traffic on a GPU.  Conditions: (1) no attribute refers to a function's; (2) the pooling's
strides equal its kernel; (3) its padding counts as zeros in the mean; (4) its window fits the map, and ceil_mode adds none;
(5) nobody else reads what it gives; (6) the convolution can be a node (`lowering.against_node`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from convpool.algebra.geometry import PoolSpec
from convpool.algebra.lowering import Lowering
from convpool.ir.index import Scope
from convpool.ir.protos import AttributeReference, attributes, is_op
from convpool.passes.conv_pool import Site
from convpool.passes.runtime import against_node, against_opset
from convpool.passes.trace import conv_leaf, conv_rank, spatial_size
from convpool.plan import Plan, Pooling, Reject, malformed, reject, rejection


def sites(scope: Scope) -> Iterator[Site]:
    """Every Conv whose input an AveragePool gives."""
    for index, node in enumerate(scope.nodes):
        if is_op(node, "Conv") and (site := site_of(scope, index)) is not None:
            yield site


def site_of(scope: Scope, conv: int) -> Site | None:
    """Convolution `conv` with the AveragePool that gives its input; None where another node does."""
    tensor = scope.nodes[conv].input[0]
    producer = scope.producer.get(tensor)
    if producer is None or not is_op(scope.nodes[producer], "AveragePool"):
        return None
    return Site(scope, producer, tensor, conv, "pool_conv")


def check(site: Site, main_opset: int) -> Plan | Reject:
    """A Plan for one ConvAvgPool, or why the pair stays two nodes."""
    scope = site.scope
    rank = conv_rank(scope, site.conv)
    if rank is None:
        return reject(scope, site.conv, "shape of the weights", "unknown", "a known rank")
    try:
        return _check(site, rank, main_opset)
    except AttributeReference as error:
        return reject(scope, site.root, "attributes", f"a reference to the function's '{error}'", "values")


def _check(site: Site, rank: int, main_opset: int) -> Plan | Reject:
    scope, index = site.scope, site.root
    node = scope.nodes[index]
    values = attributes(node)
    kernel = tuple(values["kernel_shape"])
    ones, zeros = (1,) * rank, (0,) * (2 * rank)
    if (wrong := malformed(scope, index, values, rank)) is not None:
        return wrong
    strides, dilations = tuple(values.get("strides") or ones), tuple(values.get("dilations") or ones)
    pads = tuple(values.get("pads") or zeros)
    if strides != kernel:
        return reject(scope, index, "strides", list(strides), f"kernel_shape, {list(kernel)}")
    if values.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        return reject(scope, index, "auto_pad", values["auto_pad"].decode(), "explicit pads")
    pads = zeros if values.get("auto_pad") == b"VALID" else pads
    if any(pads) and not values.get("count_include_pad", 0):
        return reject(scope, index, "padding left out of the mean", list(pads), "count_include_pad = 1")
    if any(d > 1 for d in dilations):
        return reject(scope, index, "dilations", list(dilations), "ones")
    size = spatial_size(scope, node.input[0], rank)
    if size is not None and any(n + pads[i] + pads[rank + i] < kernel[i] for i, n in enumerate(size)):
        return reject(scope, index, "window", list(kernel), f"no larger than the padded feature map, {list(size)}")
    if values.get("ceil_mode", 0):
        whole = size is not None and all(
            (n + pads[i] + pads[rank + i]) % k == 0 for i, (n, k) in enumerate(zip(size, kernel, strict=True))
        )
        if not whole:
            return reject(scope, index, "ceil_mode", "a partial window or an unknown size", "whole windows")
    others = scope.sole_reader(site.tensor)
    if others is not None:
        return reject(scope, index, f"output '{site.tensor}' {others}", "other readers", "the convolution alone")
    leaf = conv_leaf(scope, site.conv, rank)
    if isinstance(leaf, Reject):
        return leaf
    if (found := against_node(scope, leaf.conv)) is not None:
        return rejection(scope, leaf.node, found)
    if (found := against_opset(scope, main_opset)) is not None:
        return rejection(scope, site.conv, found)
    conv_node = scope.nodes[site.conv]
    spec = PoolSpec(kernel, strides, pads, dilations)
    pooling = Pooling(index, (index,), node.input[0], conv_node.output[0], "pool_conv", spec)
    leaf = replace(leaf, input=node.input[0])
    return Plan(scope, "pool_conv", pooling, leaf, (Lowering("convavgpool", spec, leaf.conv),))
